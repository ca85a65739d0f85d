"""Settings: their defaults, and one plain sentence for each way to get a configuration wrong."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minigrid as m

ROOT = Path(m.__file__).resolve().parent
PATIENCE = 60


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a configuration with the given lines in [minigrid]."""
    path = tmp_path / "setup.cfg"

    def function(lines, **overrides):
        if lines is not None:
            path.write_bytes(lines if isinstance(lines, bytes) else f"[minigrid]\n{lines}".encode())
        return m.read_settings(path, **overrides)

    return function


def refused(read, lines):
    """Return the sentence that refuses a configuration; it names the file, on one line."""
    with pytest.raises(m.ClientError) as caught:
        read(lines)
    text = str(caught.value)
    assert "setup.cfg" in text and text.strip() == text and "\n" not in text
    return text


# ---- What is right -------------------------------------------------------------


@pytest.mark.parametrize("lines", [None, "", b"", b"[flake8]\nport = 1\n"])
def test_no_file_or_no_section_means_the_defaults(read, lines):
    assert read(lines) == m.Settings()


def test_defaults_are_such_that_nothing_need_be_configured():
    """Every setting has a default of its own type, and says what it means."""
    for field in dataclasses.fields(m.Settings):
        assert type(field.default) is field.type or field.type is float
        assert len(field.metadata["about"]) > 10
    plugins = m.Settings.plugins.split()
    assert {"python_apps", "quorum", "dispatch", "api", "commands"} <= set(plugins)


GOOD = {  # lines -> (key, value)
    "stock = 7": ("stock", 7), "stock=0": ("stock", 0), "request_delay = 0.5":
    ("request_delay", 0.5), "request_delay = 3": ("request_delay", 3.0),
    "resend_lost_results = no": ("resend_lost_results", False),
    "one_result_per_user_per_wu = Yes": ("one_result_per_user_per_wu", True),
    "one_result_per_user_per_wu = 1": ("one_result_per_user_per_wu", True),
    "one_result_per_user_per_wu = FALSE": ("one_result_per_user_per_wu", False),
    "name = 100 % grün": ("name", "100 % grün"), "max_granted_credit = 1e3":
    ("max_granted_credit", 1000.0),
}


@pytest.mark.parametrize("lines", GOOD)
def test_values_become_their_types(read, lines):
    key, value = GOOD[lines]
    found = getattr(read(lines), key)
    assert found == value and type(found) is type(value)
    assert read(lines) == dataclasses.replace(m.Settings(), **{key: value}), "the others stay"


def test_overrides_win_and_none_is_none(read):
    got = read("stock = 7\nport = 1234", stock="8", port=None)
    assert (got.stock, got.port) == (8, 1234)


def test_an_override_may_be_nothing(read):
    """Zero and the empty text are values: a free port, no proxy."""
    got = read("stock = 7\nproxy = 10.0.0.1", stock=0, port=0, proxy="")
    assert (got.stock, got.port, got.proxy) == (0, 0, "")


def test_settings_do_not_change_while_the_server_runs():
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.Settings().stock = 1


# ---- What is wrong -------------------------------------------------------------

WRONG = {  # lines -> what the sentence must name
    "stok = 7": ("'stok'", "stock"),
    "Stock Size = 7": ("'stock size'",),
    "stock = many": ("'stock'", "'many'", "number"),
    "stock =": ("'stock'", "number"),
    "stock = 7.5": ("'stock'", "'7.5'", "whole number"),
    "stock = 1e3": ("'stock'", "'1e3'"),
    "stock = -1": ("'stock'", "'-1'", "not negative"),
    "stock = 10000000000000000": ("'stock'",),
    "stock = " + "9" * 5000: ("'stock'",),
    "port = eighty": ("'port'", "'eighty'"),
    "request_delay = nan": ("'request_delay'", "'nan'"),
    "request_delay = NaN": ("'request_delay'", "'NaN'"),
    "request_delay = inf": ("'request_delay'", "'inf'"),
    "request_delay = -inf": ("'request_delay'", "'-inf'"),
    "request_delay = 1e999": ("'request_delay'",),
    "request_delay = -0.1": ("'request_delay'", "not negative"),
    "request_delay = soon": ("'request_delay'", "'soon'"),
    "resend_lost_results = maybe": ("'resend_lost_results'", "'maybe'"),
    "resend_lost_results = 2": ("'resend_lost_results'", "'2'"),
    "resend_lost_results =": ("'resend_lost_results'",),
    "port = 65536": ("'port'", "'65536'"),
    "stock = 1\nstock = 2": ("stock", "already exists"),
    "stock = 1\n[minigrid]\nport = 1": ("minigrid", "already exists"),
    "stock": ("stock",),
    "[minigrid": ("[minigrid",),
}


@pytest.mark.parametrize("lines", WRONG, ids=lambda lines: lines[:30].replace("\n", " "))
def test_what_is_wrong_is_named(read, lines):
    text = refused(read, lines)
    for part in WRONG[lines]:
        assert part in text
    assert len(text) < 1500


@pytest.mark.parametrize("content", [b"port = 1\n", b"\x00\x01\x02", b"[minigrid]\nname = \xff\n"])
def test_a_file_that_is_no_configuration(read, content):
    refused(read, content)


def test_the_first_of_several_faults_is_enough(read):
    assert re.search("'(stok|prt)'", refused(read, "stok = 1\nprt = 2"))


COMMANDS = {  # what stands in setup.cfg or on the command line -> what must be named
    "a key": ("[minigrid]\nstok = 7\n", [], "'stok'"),
    "a value": ("[minigrid]\nstock = many\n", [], "'stock'"),
    "an option": ("", ["--stock", "many"], "'stock'"),
    "a plugin": ("[minigrid]\nplugins = commands nothing\n", [], "'nothing'"),
    "no server": ("[minigrid]\nplugins = commands\n", [], "connections"),
    "a plugin like a path": ("[minigrid]\nplugins = commands ../x\n", [], "'../x'"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_line_says_it_in_one_line(tmp_path, case):
    text, options, named = COMMANDS[case]
    (tmp_path / "setup.cfg").write_text(text)
    done = subprocess.run(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--port", "0", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("minigrid: ") and len(done.stderr.splitlines()) == 1
    assert named in done.stderr
    assert not (tmp_path / "data").exists(), "nothing is made where nothing can start"
