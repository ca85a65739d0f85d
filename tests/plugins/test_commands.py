"""The commands as people type them: real processes, what they print, their exit status.

Every process has a bounded time; what is waited for is a line it prints or an answer it gives.
"""

import argparse
import contextlib
import http.client
import json
import platform
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import minigrid as m

ROOT = Path(m.__file__).resolve().parent
SQUARES = ROOT / "plugins" / "apps" / "squares.py"
PATIENCE = 60  # seconds until a process that does not end is a failure
SLOW = '''"""slow: nobody computes this here."""


def workunit(i):
    return {"input": i} if i < 5 else None


def compute(input):
    return input
'''


@pytest.fixture
def cli(tmp_path):
    """Return a function that runs a command in an empty directory to its end."""
    def function(*arguments):
        return subprocess.run([sys.executable, str(ROOT / "minigrid.py"), *map(str, arguments)],
                              cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    return function


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The same without a process of its own, which takes most of the time."""
    monkeypatch.chdir(tmp_path)

    def function(*arguments):
        parser = argparse.ArgumentParser(prog="minigrid")
        parsers = parser.add_subparsers(required=True)
        for add in m.plugged("commands"):
            add(parsers)
        options, status, error = parser.parse_args([*map(str, arguments)]), 1, ""
        try:
            status = options.run(options) or 0
        except (m.ClientError, m.PluginError, m.StoreError) as trouble:
            error = f"minigrid: {trouble}\n"
        out = capsys.readouterr().out
        return subprocess.CompletedProcess(arguments, status, out, error)

    return function


def failed(done, *parts):
    """Hold that a command failed with one plain message; return the message."""
    assert done.returncode == 1, done
    assert done.stderr.startswith("minigrid: ") and "minigrid.py" not in done.stderr, done.stderr
    for part in parts:
        assert part in done.stderr
    return done.stderr


def one_sentence(done, *parts):
    assert len(failed(done, *parts).splitlines()) == 1


@contextlib.contextmanager
def started(*arguments, cwd, until="http://"):
    """Start a command; yield the process and the line it printed when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "minigrid.py"), *map(str, arguments)], cwd=cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    guard = threading.Timer(PATIENCE, process.kill)
    guard.start()
    try:
        line = next((line for line in process.stdout if re.search(until, line)), "")
        yield process, line
    finally:
        process.kill()
        process.communicate()
        guard.cancel()


@contextlib.contextmanager
def serving(directory, *more):
    """Run a server on a directory with the applications of `apps` beside it; yield its address."""
    with started("serve", "--data", directory / "data", "--port", "0", "--host", "127.0.0.1",
                 "--apps", directory / "apps", *more, cwd=directory) as (process, line):
        yield process, re.search(r"http://\S+", line)[0]


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def post(url, value, **headers):
    request = urllib.request.Request(url, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def eventually(condition):
    """Wait until something is so; a bounded number of looks."""
    pause = threading.Event()
    for _ in range(PATIENCE * 20):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it never became so")


@pytest.fixture
def stopped(tmp_path):
    """A directory with a store of five workunits that nobody computes; its server has stopped."""
    (tmp_path / "apps").mkdir()
    (tmp_path / "apps" / "slow.py").write_text(SLOW)
    m.open_project(m.Settings(data=str(tmp_path / "data")), random.Random(1))
    m.db.execute_sql("PRAGMA synchronous = OFF")
    assert m.sync_apps([tmp_path / "apps"], m.wall_clock()) == []
    m.run_pass(m.wall_clock())
    m.close_project()
    return tmp_path


def rows(directory, query):
    with contextlib.closing(sqlite3.connect(directory / "data" / "minigrid.db")) as store:
        return store.execute(query).fetchall()


def lines(directory, app):
    path = directory / "data" / "results" / f"{app}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- 1. Help and typing errors -------------------------------------------------

COMMANDS = ["serve", "demo", "run", "try", "join", "status", "cancel", "check", "backup"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(cli, tmp_path, command):
    done = cli(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert ("--stock" in done.stdout) == (command == "serve")
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_command(cli):
    done = cli("--help")
    assert set(COMMANDS) <= set(re.findall(r"(?m)^    (\w+) ", done.stdout))
    assert cli("--version").stdout == f"minigrid {m.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["serve", "--prot", "1"], ["cancel"], ["try"],
                                       ["serve", "--port", "x"], ["run", "--volunteers", "many"]])
def test_what_is_no_command(cli, tmp_path, arguments):
    done = cli(*arguments)
    assert done.returncode == 2 and "usage: minigrid" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- 2. try --------------------------------------------------------------------


def test_try_shows_the_whole_life_of_a_workunit(cli, tmp_path):
    done = cli("try", SQUARES)
    assert (done.returncode, done.stderr) == (0, "")
    steps = re.findall(r"(?m)^  (\w+)", done.stdout)
    assert steps == ["load", "generate", "compute", "compute", "kept"]
    assert "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]" in done.stdout
    for rule in ("send", "report success", "valid", "consensus", "assimilated", "purge"):
        assert re.search(rf": {rule}$", done.stdout, re.M), rule
    assert list(tmp_path.iterdir()) == [], "the scratch directory is elsewhere and gone"


def test_try_takes_any_number(call):
    assert "input of 41 bytes: [190,191," in call("try", SQUARES, "--number", 19).stdout
    one_sentence(call("try", SQUARES, "--number", 20), "squares.py", "workunit(20) is None")


HEAD = '''"""mine: of a prototyper."""

import os


def workunit(i):
    return {"input": i + 1}


def compute(input):
    return input
'''
BROKEN = {  # what is wrong: (what stands at the end of the file, parts of the message)
    "a hook is missing": ("\ndel compute\n", ("mine.py: compute is missing", "def compute(input)")),
    "wrong parameters": ("\n\ndef compare(a):\n    return True\n", ("compare()", "found")),
    "a syntax error": ("\nx = (\n", ("mine.py: SyntaxError", "(line 13)")),
    "an import that fails": ("\nimport nmupy\n", ("nmupy", "(line 13)")),
    "an impossible number": ("\nmin_quorum = 0\n", ("mine.py: min_quorum", "found 0")),
    "a number that cannot be": ("\n\ndef workunit(i):\n    return {'input': 1, 'min_quorum': 0}\n",
                                ("mine.py: workunit(0)", "min_quorum")),
    "workunit raises": ("\n\ndef workunit(i):\n    return {}['x']\n",
                        ("mine.py: workunit() failed: KeyError: 'x' (line 15)",)),
    "workunit is random": ("\n\ndef workunit(i):\n    return {'input': list(os.urandom(8))}\n",
                           ("workunit(0) gave something else the second time",)),
    "compute raises": ("\n\ndef compute(input):\n    return 1 / (input - 1)\n",
                       ("compute() failed", "line 15", "ZeroDivisionError")),
    "compute exits": ("\n\ndef compute(input):\n    os._exit(7)\n", ("compute() failed",)),
    "compute gives NaN": ("\n\ndef compute(input):\n    return float('nan')\n",
                          ("compute()", "no NaN")),
    "compute gives an object": ("\n\ndef compute(input):\n    return {1}\n",
                                ("compute()", "JSON value")),
    "compute gives text for bytes": ("\nreturns = 'bytes'\n", ("compute()", "bytes")),
    "copies disagree": ("\n\ndef compute(input):\n    return list(os.urandom(8))\n",
                        ("mine.py", "copies disagree", "randomness of its own")),
    "parse refuses": ("\n\ndef parse(output):\n    raise ValueError('too short')\n",
                      ("mine.py", "parse()", "too short", "line 15")),
    "parse raises": ("\n\ndef parse(output):\n    return output.x\n",
                     ("mine.py: parse() failed: AttributeError", "(line 15)")),
    "compare raises": ("\n\ndef compare(a, b):\n    return a.x\n",
                       ("mine.py: compare() failed: AttributeError", "(line 15)")),
    "compare refuses": ("\n\ndef compare(a, b):\n    return False\n",
                        ("mine.py", "copies disagree", "compare()")),
    "check_set raises": ("\n\ndef check_set(answers):\n    return answers.x\n",
                         ("mine.py: check_set() failed: AttributeError", "(line 15)")),
    "check_set gives nonsense": ("\n\ndef check_set(answers):\n    return 99\n",
                                 ("mine.py", "check_set()")),
    "assimilate raises": ("\n\ndef assimilate(workunit, answer):\n    open('/no/such/file')\n",
                          ("mine.py: assimilate() failed: FileNotFoundError", "(line 15)")),
    "assimilate gives an object": ("\n\ndef assimilate(workunit, answer):\n    return object()\n",
                                   ("mine.py: assimilate() must return a JSON value",)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_try_says_what_is_wrong_and_where(call, tmp_path, case):
    end, parts = BROKEN[case]
    (tmp_path / "mine.py").write_text(HEAD + end)
    failed(call("try", "mine.py"), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("case", ["a syntax error", "compute raises", "assimilate raises"])
def test_try_says_it_once(cli, tmp_path, case):
    """To a person, on the terminal: no log lines between, no second time."""
    (tmp_path / "mine.py").write_text(HEAD + BROKEN[case][0])
    error = failed(cli("try", "mine.py"), *BROKEN[case][1])
    assert error.count(BROKEN[case][1][-1]) == 1


@pytest.mark.parametrize("name", ["nothing.py", "nowhere", "notes.txt", "."])
def test_try_what_is_no_application(call, tmp_path, name):
    (tmp_path / "notes.txt").write_text("not Python")
    one_sentence(call("try", name), *[name] * (name != "."))


PROGRAMS = {  # a native application: (its program, what is said, what is not)
    "fails": ("exit 3", ["the program for x86_64-pc-linux-gnu failed"], ["compute()"]),
    "disagrees": ("cat /proc/sys/kernel/random/uuid",
                  ["Does the program use the time", "compare()"], ["compute()", "module"]),
    "unreadable": ("echo no", ["parse() refuses what the program gave: ", "too short"],
                   ["compute()"]),
}


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux",
                    reason="the program is one for Linux on x86_64")
@pytest.mark.parametrize("case", PROGRAMS)
def test_try_speaks_of_programs_where_programs_compute(call, tmp_path, case):
    program, said, unsaid = PROGRAMS[case]
    path = tmp_path / "mine" / "versions" / "x86_64-pc-linux-gnu" / "mine"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "mine" / "app.py").write_text(HEAD.partition("def compute")[0] + """
takes = returns = "bytes"


def workunit(i):
    return {"input": b"1"}


def parse(output):
    if len(output) < 9:
        raise ValueError("too short")
    return output
""")
    error = failed(call("try", "mine"), *said)
    assert not [text for text in unsaid if text in error], error


def test_try_forgives_randomness_that_is_seeded_for_it(call, tmp_path):
    """[D6] `random` is seeded by the workunit's name, so replicas agree."""
    (tmp_path / "mine.py").write_text(
        HEAD + "\n\ndef compute(input):\n    import random\n    return random.random()\n")
    done = call("try", "mine.py")
    assert (done.returncode, done.stderr) == (0, "")


# ---- 3. run --------------------------------------------------------------------


def test_run_stopped_halfway_goes_on_to_the_end(cli, tmp_path):
    """Real volunteers compute squares; Ctrl-C in between; nothing twice, nothing lost."""
    command = ["run", SQUARES, "--volunteers", 2, "--data", "data", "--port", 0]
    with started(*command, cwd=tmp_path, until=r"\] [1-9]\d*/20") as (process, line):
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE)
        assert (process.returncode, error) == (130, ""), out
    halfway = lines(tmp_path, "squares")
    assert 0 < len(halfway) < 20 and "Answers so far: data/results/squares.jsonl" in out
    assert cli("check").returncode == 0
    assert not (tmp_path / "data" / "server.json").exists()
    done = cli(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20/20" in done.stdout and "Answers: data/results/squares.jsonl" in done.stdout
    found = lines(tmp_path, "squares")
    assert found[:len(halfway)] == halfway
    assert sorted(line["number"] for line in found) == list(range(20))
    for line in found:
        first = 10 * line["number"]
        assert line["answer"] == [n * n for n in range(first, first + 10)]
    assert "nothing wrong" in cli("check").stdout
    counts = re.search(r"(?m)^squares +(\d+) +(\d+) +(\d+) +(\d+)$", cli("status").stdout)
    assert counts.groups() == ("0", "0", "20", "0")


RUNS = {
    "broken": ("def f(:\n", [], ("mine.py: SyntaxError",)),
    "too few volunteers": (HEAD + "\nmin_quorum = 3\n", [], ("3 computers", "--volunteers 3")),
    "no volunteers": (HEAD, ["--volunteers", "0"], ("--volunteers must be at least 1",)),
    "no file": (None, [], ("mine.py",)),
}


@pytest.mark.parametrize("case", RUNS)
def test_run_refuses(cli, tmp_path, case):
    source, more, parts = RUNS[case]
    if source:
        (tmp_path / "mine.py").write_text(source)
    one_sentence(cli("run", "mine.py", "--port", 0, *(more or ["--volunteers", 2])), *parts)


# ---- 4. serve ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_the_server_cleanly_and_the_next_start_goes_on(stopped, cli, name):
    for start in range(2):
        with serving(stopped) as (process, url):
            assert get(f"{url}/status.json")["total"]["unsent"] == 10
            note = json.loads((stopped / "data" / "server.json").read_text())
            assert note == {"pid": process.pid, "url": url}
            process.send_signal(getattr(signal, name))
            out, error = process.communicate(timeout=PATIENCE)
            assert (process.returncode, error) == (0, ""), out
        assert "stopping" in out
        assert sorted(p.name for p in (stopped / "data").glob("*.*")) == [
            "minigrid.db", "server.lock"], "no write-ahead log is left, no note"
        assert "nothing wrong" in cli("check").stdout


def test_stopping_in_the_middle_of_traffic_is_as_quiet(stopped, cli):
    """Whoever presses Ctrl-C sees no traceback, though clients are asking at that moment."""
    with serving(stopped) as (process, url):
        host = re.fullmatch("http://(.*)", url)[1]
        busy = [threading.Event() for _ in range(3)]

        def ask(answered):
            with contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE)) as server:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    while True:
                        server.request("GET", "/status.json")
                        server.getresponse().read()
                        answered.set()

        clients = [threading.Thread(target=ask, args=(answered,)) for answered in busy]
        for client in clients:
            client.start()
        assert all(answered.wait(PATIENCE) for answered in busy)
        process.terminate()
        _, error = process.communicate(timeout=PATIENCE)
        assert (process.returncode, error) == (0, "")
        for client in clients:
            client.join(PATIENCE)
    assert "nothing wrong" in cli("check").stdout


def test_the_server_says_how_to_join(stopped):
    with serving(stopped) as (process, url):
        with urllib.request.urlopen(f"{url}/volunteer.py", timeout=PATIENCE) as answer:
            assert answer.read() == (ROOT / "plugins" / "volunteer.py").read_bytes()
        process.terminate()
        out = process.stdout.read()  # What was read ahead is lost to communicate().
    assert f"{url}/volunteer.py" in out and "exec(" in out
    assert re.search(r"(?m)^  python3 -c .* http://\S+$", out)
    assert re.search(r"(?m)^on Windows:\n  py -c .* http://\S+$", out)


def test_the_server_tells_of_troubles_where_it_was_started(stopped):
    """Each once: who watches the terminal must not have to look elsewhere."""
    source = (stopped / "apps" / "slow.py").read_text()
    (stopped / "apps" / "odd.py").write_text(source.replace("i < 5", "i < 5 or nonsense"))
    with started("serve", "--data", stopped / "data", "--port", "0", "--host", "127.0.0.1",
                 "--apps", stopped / "apps", cwd=stopped, until="trouble: ") as (process, trouble):
        assert re.search(r"odd.py: workunit\(\) failed: NameError: .*\(line \d+\)", trouble)
        next(line for line in process.stdout if " waiting, " in line)
        process.terminate()
        assert "trouble" not in process.stdout.read()


def test_troubles_are_told_once_and_not_all_at_a_time(monkeypatch, capsys):
    (show,), line = m.plugged("show_troubles"), types.SimpleNamespace(end=lambda: None)
    first, more = (5, "one"), [(5, "two"), (6, "two"), (6, "three"), (7, "four"), (8, "five")]
    monkeypatch.setattr(m.project, "errors", [first, *more])
    told = show(line, [first])
    assert capsys.readouterr().out.splitlines() == [
        "trouble: two", "trouble: two", "trouble: three", "trouble: 2 more, see the first page"]
    assert show(line, told) == told and capsys.readouterr().out == ""


def test_the_server_says_first_what_its_owner_named(stopped):
    (stopped / "setup.cfg").write_text(
        "[api]\naddresses = https://grid.example http://a.lan:8080\n")
    with serving(stopped) as (process, url):
        user = post(f"{url}/register", {})
        known = post(f"{url}/scheduler", {"authenticator": user["authenticator"]})["addresses"]
        assert known == [url, "https://grid.example", "http://a.lan:8080"]
        process.terminate()
        out = process.stdout.read()
    listed = out.partition("\n\n")[0].split()
    assert listed[-2:] == ["http://a.lan:8080", "https://grid.example"], "the best one last"
    assert "https://grid.example/volunteer.py" in out and "  https://grid.example/\n" in out


@pytest.mark.parametrize("address", ["grid.example", "http://a/../b", "http://a:99999"])
def test_an_address_that_is_none_stops_the_start(cli, tmp_path, address):
    (tmp_path / "setup.cfg").write_text(f"[api]\naddresses = {address}\n")
    one_sentence(cli("serve", "--port", 0), "setup.cfg", "'addresses' of [api]", address)


def test_who_joins_is_who_the_proxy_says_and_nobody_else(stopped):
    (stopped / "setup.cfg").write_text("[accounts]\njoins_per_hour = 1\n")

    def statuses(url):
        found = []
        for address in ("198.51.100.1", "198.51.100.1", "6.6.6.6, 198.51.100.1", "2001:db8::1", ""):
            try:
                post(f"{url}/register", {}, **({"X-Forwarded-For": address} if address else {}))
                found.append(200)
            except urllib.error.HTTPError as error:
                found.append(error.code)
                assert 0 < int(error.headers["Retry-After"]) <= 3600
                error.close()
        return found

    with serving(stopped, "--proxy", "127.0.0.1") as (_, url):
        assert statuses(url) == [200, 429, 429, 200, 200]
    with serving(stopped) as (_, url):
        assert statuses(url) == [200] * 5, "this machine's own programs, whatever they claim"


def test_a_backup_that_is_due_does_not_wait_for_an_hour(stopped):
    kept = stopped / "data" / "backup"

    def daily():
        return rows(stopped, "SELECT value FROM meta WHERE name = 'daily'")

    with serving(stopped):
        eventually(lambda: list(kept.glob("minigrid-*.db")))
    (first,), (copy,) = daily(), kept.glob("minigrid-*.db")
    copy.unlink()
    with serving(stopped) as (process, _):
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert daily() == [first] and not list(kept.glob("minigrid-*.db")), "no second one that day"


def test_an_application_that_is_broken_is_left_out(stopped):
    (stopped / "apps" / "bad.py").write_text("def f(:\n")
    with started("serve", "--data", stopped / "data", "--port", "0", "--apps", stopped / "apps",
                 cwd=stopped, until="trouble: ") as (process, line):
        assert "bad.py: SyntaxError" in line
        process.terminate()
        assert process.wait(PATIENCE) == 0


PLACES = {
    "a port in use": (lambda port: ["--port", port], ("port {port}", "in use", "--port")),
    "a port that is none": (lambda port: ["--port", 99999], ("99999",)),
    "a negative port": (lambda port: ["--port", -5], ("-5",)),
    "an address of nobody": (lambda port: ["--port", 0, "--host", "no.such.host.invalid"],
                             ("no.such.host.invalid",)),
    "an address of others": (lambda port: ["--port", 0, "--host", "192.0.2.1"], ("192.0.2.1",)),
    "a file for a directory": (lambda port: ["--port", 0, "--data", __file__],
                               ("cannot write to", "test_commands.py")),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_place_where_it_cannot_serve(cli, case):
    options, parts = PLACES[case]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("serve", "--host", "127.0.0.1", *options(port))
    one_sentence(done, *[part.format(port=port) for part in parts])


# ---- 5. status, check, cancel, backup ------------------------------------------


@pytest.mark.parametrize("command", [["status"], ["check"], ["cancel", "slow"], ["backup"]])
def test_where_there_is_no_project(call, tmp_path, command):
    one_sentence(call(*command), "there is no project in data", "--data")
    assert list(tmp_path.iterdir()) == []


def test_status_with_and_without_a_server(stopped, cli):
    done = cli("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"(?m)^slow +10 +0 +0 +0$", done.stdout)
    assert "process" not in done.stdout, "no server is running"
    with serving(stopped) as (process, url):
        done = cli("status")
        assert f"(process {process.pid}, {url})" in done.stdout
        process.kill()
        process.wait(PATIENCE)
    assert "process" not in cli("status").stdout, "what was killed does not run, whatever it noted"


def test_check_says_what_is_wrong(stopped, cli, call):
    done = call("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"nothing wrong (schema {m.SCHEMA_VERSION}, 5 workunits, 10 results)\n"
    with contextlib.closing(sqlite3.connect(stopped / "data" / "minigrid.db")) as store, store:
        store.execute("UPDATE result SET outcome = 3 WHERE name = 'slow_2_1'")
        store.execute("DELETE FROM small_file WHERE name = 'download/slow_4_in'")
    done = cli("check")
    assert (done.returncode, done.stderr) == (1, "")
    wrong, missing, total = done.stdout.splitlines()
    assert wrong.startswith("wrong: ") and "slow_2_1" in wrong
    assert missing == "wrong: input slow_4_in is missing" and total.startswith("2 things wrong")


def test_check_beside_a_running_server(stopped, cli):
    with serving(stopped) as (process, url):
        assert cli("check").returncode == 0
        assert get(f"{url}/status.json")["total"]["unsent"] == 10


def test_check_of_a_damaged_store(stopped, cli):
    """Damaged so that it still opens: pages inside are gone."""
    path = stopped / "data" / "minigrid.db"
    content = path.read_bytes()
    path.write_bytes(content[:4096 * 4] + b"\xa5" * 4096 * 3 + content[4096 * 7:])
    done = cli("check")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "wrong: store: " in done.stdout or "cannot open" in done.stderr


CANCEL = {  # names: (exit status, numbers of the workunits that are cancelled)
    "a workunit": (["slow_1"], 0, [1]),
    "several": (["slow_1", "slow_3"], 0, [1, 3]),
    "one twice": (["slow_1", "slow_1"], 0, [1]),
    "an application": (["slow"], 0, [0, 1, 2, 3, 4]),
    "an application and one of its own": (["slow", "slow_2"], 0, [0, 1, 2, 3, 4]),
    "nobody": (["slow_9"], 1, []),
    "a result": (["slow_1_0"], 1, []),
    "one of two": (["slow_1", "slow_9"], 1, []),
    "everything": (["%"], 1, []),
    "an application of nobody": (["fast"], 1, []),
}


@pytest.mark.parametrize("case", CANCEL)
def test_cancel(stopped, call, case):
    names, status, numbers = CANCEL[case]
    done = call("cancel", *names)
    assert done.returncode == status
    found = rows(stopped, "SELECT number FROM workunit WHERE error_mask & 16 ORDER BY number")
    assert [number for number, in found] == numbers
    if status:
        one_sentence(done, "nothing was cancelled", names[-1])
    else:
        assert done.stdout.startswith(f"{len(numbers)} workunit")
        assert call("cancel", *names).stdout.startswith("0 workunits"), "they are already"


def test_cancelled_workunits_end_as_failures_when_the_server_runs_again(stopped, cli):
    assert cli("cancel", "slow_1", "slow_3").returncode == 0
    with serving(stopped) as (process, url):
        eventually(lambda: get(f"{url}/status.json")["total"]["failed"] == 2)
        assert get(f"{url}/status.json")["total"]["unsent"] == 6
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert sorted(line["number"] for line in lines(stopped, "slow")) == [1, 3]
    assert {tuple(line["errors"]) for line in lines(stopped, "slow")} == {("CANCELLED",)}
    assert "nothing wrong" in cli("check").stdout


def test_cancel_beside_a_running_server(stopped, cli):
    with serving(stopped) as (process, url):
        assert get(f"{url}/status.json")["total"]["unsent"] == 10
        done = cli("cancel", "slow")
        assert (done.returncode, done.stderr) == (0, "")
        eventually(lambda: get(f"{url}/status.json")["total"]["failed"] == 5)
        assert get(f"{url}/status.json")["total"]["unsent"] == 0
        assert get(f"{url}/status.json")["troubles"] == []
    assert len(lines(stopped, "slow")) == 5


def test_backup(stopped, cli, call, tmp_path):
    done = cli("backup", "copies/mine.db")
    assert (done.returncode, done.stdout) == (0, "copied to copies/mine.db\n")
    with contextlib.closing(sqlite3.connect(tmp_path / "copies" / "mine.db")) as copy:
        assert copy.execute("SELECT count(*) FROM result").fetchone() == (10,)
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    done = call("backup")
    (path,) = (stopped / "data" / "backup").iterdir()
    assert done.stdout.strip().endswith(f"data/backup/{path.name}")
    with serving(stopped):
        assert cli("backup", "copies/beside.db").returncode == 0
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {"mine.db", "beside.db"}
    one_sentence(call("backup", Path(__file__) / "below.db"), "cannot write", "below.db")
    one_sentence(call("backup", "copies"), "cannot write", "copies")
