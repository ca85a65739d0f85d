"""Fixtures for all tests: the plugins a real server loads, and nothing left open."""

import os

import make
import pytest

import minigrid


@pytest.fixture(autouse=True, scope="session")
def plugins():
    """Load the plugins once, as the process does."""
    minigrid.load_plugins(minigrid.Settings.plugins.split())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One place for all small projects: making its 512 directories takes longer than most tests."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def grid(folder, monkeypatch):
    """An open project with the two applications of make.py, no work, and no wait for it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # Rules are tested, not the disk.
    with make.project(folder, {"count": make.COUNT, "near": make.NEAR}, stock=0,
                      min_sendwork_interval=0) as project:
        yield project


@pytest.fixture
def fired(monkeypatch):
    """The rules that fire during a test of pure functions, as names; settings are the defaults."""
    monkeypatch.setattr(minigrid.project, "settings", minigrid.Settings())
    minigrid.fired.clear()
    yield lambda: [rule.name for rule, _ in minigrid.fired]
    minigrid.fired.clear()


NOTES = []  # lines for the end of the test run, whatever was captured


def pytest_terminal_summary(terminalreporter):
    """Say what a passing test has to say, such as which vectors differ on purpose."""
    for line in NOTES:
        terminalreporter.write_line(line)
