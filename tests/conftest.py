"""Fixtures for all tests: the plugins a real server loads, and nothing left open."""

import functools
import itertools
import os
import sys

import hypothesis
import make
import pytest

import minigrid

hypothesis.settings.register_profile(  # Several processes share the machine: it may be slow.
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="session")
def plugins():
    """Load the plugins once, as the process does."""
    minigrid.load_plugins(minigrid.Settings.plugins.split())
    shipped = sys.modules["minigrid_plugin_boinc"].shipped
    # A third of opening a project; a thousand tests open one, and the text is always the same.
    shipped.read_harness = functools.cache(shipped.read_harness)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One place for all small projects: making its 512 directories takes longer than most tests."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def no_fsync(monkeypatch):
    """Rules are tested, not the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="session")
def made_keys(plugins, tmp_path_factory):
    """The files of all keys, to be copied: drawing them takes longer than most tests."""
    folder, keys = tmp_path_factory.mktemp("made") / "keys", sys.modules["minigrid_plugin_keys"]
    for scheme in keys.SCHEMES:
        keys.open_keys(folder, scheme)
    return folder


@pytest.fixture
def grid(folder, no_fsync):
    """An open project with the two applications of make.py, no work, and no wait for it."""
    with make.project(folder, {"count": make.COUNT, "near": make.NEAR}, stock=0,
                      min_sendwork_interval=0) as project:
        yield project


@pytest.fixture
def on_disk(plugins, monkeypatch):
    """However small they are, inputs and outputs are files."""
    monkeypatch.setattr(sys.modules["minigrid_plugin_files"], "SMALL_BYTES", -1)


@pytest.fixture(params=["in the store", "on disk"])
def either(request):
    """Once with inputs and outputs in the store, once as files."""
    if request.param == "on disk":
        request.getfixturevalue("on_disk")


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


# ---- Several processes (pytest-xdist): each has its own temporary directory and fixtures


def pytest_sessionfinish(session):
    """In a worker, hand the notes to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["notes"] = NOTES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take the notes of a worker; one that crashed has left none."""
    NOTES.extend(getattr(node, "workeroutput", {}).get("notes", []))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Make a worker's report fit to be sent: a log may name files that are no Unicode."""
    return sendable((yield))


def sendable(value):
    """Return the same of lists, dicts and strings, with lone surrogates spelt out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, (list, tuple)):
        return type(value)(map(sendable, value))  # The place of a skip must stay a tuple.
    if isinstance(value, dict):
        return {key: sendable(item) for key, item in value.items()}
    return value


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return how many processes run the tests: none but this one for what is in one file.

    Three for a core, as most tests of processes and all of the real client wait rather than work.
    """
    files = {argument.partition("::")[0] for argument in config.args}
    if len(files) == 1 and min(files).endswith(".py") and not any(map(alone, config.args)):
        return 0
    return 3 * (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep a file's tests together, so that its fixtures are made once, but see alone()."""
    from xdist.scheduler import LoadScopeScheduling

    class Parts(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid if alone(nodeid) else nodeid.partition("::")[0]

    return Parts(config, log)


def alone(nodeid):
    """Is it one of the tests of the real client, which share nothing and wait for its clocks?"""
    return "/test_real_" in nodeid


def file_of(item):
    return item.nodeid.partition("::")[0]


LONG = {f"tests/{name}.py" for name in (
    "test_crash", "test_disk", "test_faults", "test_flood", "test_golden", "test_simulation",
    "test_trust_simulation",
    "plugins/test_volunteer_faults")}


def pytest_collection_modifyitems(items):
    """Begin with what takes longest, and mix what waits with what computes.

    Two tests of the real client, a file, two more, and so on: a worker takes the next part of this
    order when it is done with one.
    """
    waiting = [item for item in items if alone(item.nodeid)]
    others = [item for item in items if not alone(item.nodeid)]
    others.sort(key=lambda item: file_of(item) not in LONG)
    items.clear()
    for _, file in itertools.groupby(others, key=file_of):
        items += [*waiting[:2], *file]
        del waiting[:2]
    items += waiting


@pytest.fixture
def server():
    """A scripted server for tests of the volunteer's client."""
    from volunteer_world import Server  # of tests/plugins, where these tests are
    s = Server()
    yield s
    s.close()


@pytest.fixture
def clock():
    """A clock that stands still until somebody moves it."""
    from volunteer_world import Clock
    return Clock()
