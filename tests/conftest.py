"""Fixtures for all tests: the plugins a real server loads, and nothing left open."""

import pytest

import minigrid


@pytest.fixture(autouse=True, scope="session")
def plugins():
    """Load the plugins once, as the process does."""
    minigrid.load_plugins(minigrid.Settings.plugins.split())
