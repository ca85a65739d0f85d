"""The volunteer's client: policy as tables, the harness, whole runs against a scripted server.

The clock is a number that drive() moves; only processes and sockets are waited for. Two tests start
the client as people do, as a process of its own.
"""

import ast
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from volunteer_world import (FILE, NOW, PATIENCE, assignment, attend, crash, drive, folder_of,
                             make_client, open_job, project, reports, v)

import minigrid


# ---- 1. The file itself ------------------------------------------------------


def imports(source):
    for node in ast.walk(ast.parse(source, feature_version=(3, 9))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("source", [FILE.read_text(encoding="utf-8"), v.HARNESS])
def test_imports_only_the_standard_library(source):
    standard = set(getattr(sys, "stdlib_module_names", ())) | {"msvcrt"}
    for name in imports(source):
        found = importlib.util.find_spec(name) if not standard - {"msvcrt"} else None
        assert name in standard or (found and "site-packages" not in str(found.origin)), name


def test_server_and_client_know_the_same_names_of_programs():
    """What the client would refuse, the server tells the application's author at once [D11]."""
    assert v.CODE_SUFFIXES == sys.modules["minigrid_plugin_python_apps"].CODE_SUFFIXES


def test_it_tells_the_version_it_came_with():
    assert v.VERSION == "minigrid " + minigrid.__version__


def test_one_form_of_banner():
    banners = re.findall(r"(?m)^# ----.*$", FILE.read_text(encoding="utf-8"))
    assert {len(b) for b in banners} == {80}
    titles = [b[7:].rstrip("- ") for b in banners]
    listed = re.findall(r"(?m)^(\d+\. .*?)(?:  .*)?$", v.__doc__)
    assert titles == listed
    assert [int(title.partition(".")[0]) for title in titles] == list(range(1, 11))


# ---- 3. What comes from outside ----------------------------------------------

HOSTILE = ["../x", "a/b", "a\\b", "/etc/passwd", ".hidden", "..", "", "a b", "x" * 201, "a\n", "é",
           "nul", "CON.py", "x.", None, 7, ["a"], "a\x00b", "C:x"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name):
    with pytest.raises(ValueError):
        v.safe_name(name)


def spoiled(**more):
    data = assignment()
    for path, value in more.items():
        *folders, last = path.split("__")
        where = data
        for key in folders:
            where = where[int(key)] if isinstance(where, list) else where[key]
        where[last] = value
    return data


UNFIT = {
    "input name": spoiled(input__name="../../.bashrc"), "file name": spoiled(files__0__name="/x"),
    "result name": spoiled(name=".."), "output name": spoiled(output__name="a/b"),
    "file url": spoiled(input__url="file:///etc/passwd"), "no main": spoiled(files__0__main=False),
    "no files": spoiled(files=None), "size": spoiled(input__nbytes=-1), "input": spoiled(input=3),
    "checksum": spoiled(input__sha256="abc"), "deadline": {"name": "x"}, "no dict": [],
    "nan": spoiled(input__nbytes=float("nan")), "workunit": spoiled(workunit="../x"),
    "the client's own file": spoiled(input__name="checkpoint.json"),
    "one name twice": spoiled(input__name=assignment()["files"][0]["name"].upper()),
    "a native program, to who wants none": spoiled(platform="x86_64-pc-linux-gnu"),
    "a platform that is no text": spoiled(platform=["python"]),
    "a platform that is nothing": spoiled(platform=None),
    "arguments that are no text": spoiled(command_line=["-x"]),
    "arguments with a NUL": spoiled(command_line="a\0b"),
    "arguments without end": spoiled(command_line="x" * 4097),
    "half a character": spoiled(command_line="\ud800"),
    "an input that would be imported": spoiled(
        inputs=[dict(assignment()["input"], name="x", open_name="random.PY")]),
    "inputs that are no list": spoiled(inputs=7), "an input that is no dict": spoiled(inputs=[7]),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_assignments_are_refused(case):
    assert v.parse_assignment(spoiled(), "http://x")
    with pytest.raises(ValueError):
        v.parse_assignment(UNFIT[case], "http://x")


OPEN_NAMES = ["../x", "a/b", "/etc/passwd", "..", ".profile", "nul.txt", "a\0", "x.", "in", "OUT",
              "output", "Job.json", "done.json", "stderr.txt", "stdout.txt", "checkpoint",
              "checkpoint.json", "progress.txt", "fraction_done", "trickle_up.0",
              "trickle_down.1", "output.new", 7, ["a"], "x" * 201, "DATA"]


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_hostile_open_names_are_refused(name):
    """Of the application's files and of further inputs; "DATA" is there already, but for case."""
    more = dict(assignment()["input"], name="more", open_name="data")
    for files, inputs in (([dict(more, name="m2", open_name=name)], [more]),
                          ([], [more, dict(more, name="m2", open_name=name)])):
        a = assignment()
        with pytest.raises(ValueError):
            v.parse_assignment(dict(a, files=a["files"] + files, inputs=inputs), "http://x")
    a["inputs"] = [more, dict(more, name="m2", open_name="data2")]
    assert [f["open_name"] for f in v.parse_assignment(a, "http://x").inputs] == ["data", "data2"]


ARGUMENTS = {  # as BOINC's client splits them [WIRE 11.2]
    "": [], "  ": [], "a b": ["a", "b"], " a\t\n b ": ["a", "b"], "'a b' c": ["a b", "c"],
    '"a \'b\'" c': ["a 'b'", "c"], "-f'a b'": ["-f'a", "b'"], "'a'b": ["a", "b"],
    "a\\ b $HOME *": ["a\\", "b", "$HOME", "*"], "'open end": ["open end"], '"" x': ["", "x"],
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_command_lines(text):
    assert v.split_arguments(text) == ARGUMENTS[text]


PLATFORMS = {  # sys.platform, machine, bits of the Python -> names
    ("linux", "x86_64", 64): ("x86_64-pc-linux-gnu",), ("linux", "sparc", 64): (),
    ("linux", "i686", 32): ("i686-pc-linux-gnu",), ("linux", "x86_64", 32): ("i686-pc-linux-gnu",),
    ("linux", "aarch64", 64): ("aarch64-unknown-linux-gnu",),
    ("linux", "aarch64", 32): ("arm-unknown-linux-gnueabihf",),
    ("linux", "armv7l", 32): ("arm-unknown-linux-gnueabihf",),
    ("darwin", "x86_64", 64): ("x86_64-apple-darwin",),
    ("darwin", "arm64", 64): ("arm64-apple-darwin",),
    ("win32", "AMD64", 64): ("windows_x86_64", "windows_intelx86"),
    ("win32", "x86", 32): ("windows_intelx86",), ("sunos5", "x86_64", 64): (),
    ("freebsd14", "amd64", 64): ("x86_64-pc-freebsd",),
}


@pytest.mark.parametrize("computer", PLATFORMS)
def test_native_platforms(computer):
    assert v.native_platforms(*computer) == PLATFORMS[computer]


def test_a_native_program_counts_other_operations():
    """What Python does in a second is no measure for a program made for speed."""
    python = v.Job("p", rsc_fpops_est=1e9, rsc_fpops_bound=1e11)
    native = v.Job("n", platform="x", ncpus=2.0, rsc_fpops_est=1e9, rsc_fpops_bound=1e13)
    assert (v.estimate(python, 1e7), v.estimate(native, 1e7)) == (100, 0.5)
    assert (v.time_bound(python, 1e7), v.time_bound(native, 1e7)) == (1e4, 5e3)


def test_text_for_the_terminal_is_harmless():
    assert v.plain("a\x1b[2Jb\nc\u202e") == "a [2Jb c"
    assert v.plain(None) == "" and len(v.plain("x" * 9999)) == 500


# ---- 4. State ----------------------------------------------------------------


def test_state_survives(tmp_path):
    p = project(open_job(slot=2, elapsed_time=1.5), rpc_seqno=7, min_rpc_time=NOW + 5)
    v.save_state(v.State([p], "c" * 32, 2e7, NOW), tmp_path)
    state = v.load_state(tmp_path)
    kept = state.projects[0]
    assert v.plain_fields(kept.jobs[0]) == v.plain_fields(p.jobs[0])
    assert v.plain_fields(kept, jobs=0) == v.plain_fields(p, jobs=0)
    assert kept.jobs[0].project is kept
    assert os.stat(tmp_path / "client.json").st_mode & 0o077 == 0  # It holds the authenticator.


def test_a_state_of_another_version_is_read_and_a_broken_one_set_aside(tmp_path):
    path = tmp_path / "client.json"
    path.write_text('{"new": 1, "project": {"url": "u", "jobs": [{"name": "n", "new": 1}]}}')
    assert v.load_state(tmp_path).projects[0].jobs[0].name == "n"
    path.write_text('{"project": {"ur')
    assert v.load_state(tmp_path) is None
    assert (tmp_path / "client.json.bad").exists() and v.load_state(tmp_path) is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    v.write_safely(tmp_path / "f", b"old")
    with pytest.raises(TypeError):
        v.write_safely(tmp_path / "f", "no bytes")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    directory, first = v.choose_directory("http://h:80", "")
    second_directory, second = v.choose_directory("http://h:80", "")
    assert [directory.name, second_directory.name] == ["h_80", "h_80-2"]
    with pytest.raises(SystemExit, match="another client is running"):
        v.choose_directory("http://h:80", str(directory))
    first.close()  # As the system does when a process dies.
    again_directory, again = v.choose_directory("http://h:80", "")
    assert again_directory == directory
    again.close()
    second.close()


# ---- 5. Harness --------------------------------------------------------------


def start(tmp_path, source, data=b"3", seconds=60.0, name="wu_1_0", slot=0,
          protection=v.Protection(), **bounds):
    """Start a job as the client does; its Task."""
    files = tmp_path / "files"
    files.mkdir(exist_ok=True)
    v.write_safely(tmp_path / "harness.py", v.HARNESS.encode())  # Others may be reading it.
    source = source.encode()
    job = v.parse_assignment(assignment(name, source, data, **bounds), "http://x")
    (files / job.files[0]["name"]).write_bytes(source)
    (files / job.input["name"]).write_bytes(data)
    slot = tmp_path / "slots" / str(slot)
    job.resumed = v.prepare_slot(slot, job, files, seconds)
    return v.Task(job, slot, tmp_path / "harness.py", seconds, NOW, protection)


def in_time(function, *args):
    """Call a function that blocks on a process; fail instead of waiting for ever."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(PATIENCE)


def finish(task):
    """Wait for a Task; (exit_status, text), output, stderr."""
    try:
        outcome = task.outcome(in_time(task.wait))
    finally:
        task.kill()
    output = task.slot / "output"
    return outcome, output.read_bytes() if output.exists() else None, task.stderr(65536)


def run(tmp_path, source, data=b"3", **more):
    return finish(start(tmp_path, source, data, **more))


GOOD = {  # app, input -> output
    "json": ("def compute(input): return {'b': input, 'a': (1.5, None)}", b"[3]",
             b'{"a":[1.5,null],"b":[3]}'),
    "bytes": ("takes = returns = 'bytes'\ndef compute(input): return input[::-1]", b"\xff\x00a",
              b"a\x00\xff"),
    "bytes to json": ("takes = 'bytes'\ndef compute(input): return len(input)", b"\xff" * 9, b"9"),
    "prints": ("def compute(input):\n    print('hello')\n    return 1", b"0", b"1"),
    "asks for both": ("def compute(input, checkpoint, progress):\n    progress(2)\n"
                      "    return checkpoint.state", b"0", b"null"),
    "module constants and classes": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "def compute(input): return pickle.loads(pickle.dumps(P(input))).x", b"3", b"3"),
}


@pytest.mark.parametrize("case", GOOD)
def test_harness_output(tmp_path, case):
    source, data, wanted = GOOD[case]
    outcome, output, stderr = run(tmp_path, source, data)
    assert (outcome, output) == ((0, ""), wanted), stderr


BAD = {  # app -> what stderr has to say
    "raises": ("def compute(input):\n    return 1 / 0", "line 2, in compute"),
    "does not load": ("import nonsuch", "No module named 'nonsuch'"),
    "nan": ("def compute(input): return [float('nan')]", "no NaN"),
    "no json": ("def compute(input): return {1, 2}", "has to return a JSON value"),
    "no bytes": ("returns = 'bytes'\ndef compute(input): return 'text'", "bytes, not str"),
    "exits": ("def compute(input): raise SystemExit(0)", "SystemExit"),
    "endless recursion": ("def compute(input): return compute(input)", "RecursionError"),
}


@pytest.mark.parametrize("case", BAD)
def test_harness_error(tmp_path, case):
    source, text = BAD[case]
    (status, _), output, stderr = run(tmp_path, source)
    assert (status, output) == (195, None) and text in stderr


def test_other_ways_to_die(tmp_path):
    (status, text), _, _ = run(tmp_path, "import os\ndef compute(input): os.kill(os.getpid(), 11)")
    assert (status, text) == (195, "its process ended with signal 11")
    (status, text), _, _ = run(tmp_path, "import os\ndef compute(input): os._exit(0)")
    assert (status, text) == (195, "it left no output")


RANDOM = """
import random
def compute(input): return [random.random(), list({str(n) for n in range(99)})]
"""


def test_replicas_agree(tmp_path):
    """Seed = the workunit's name; sets of strings in one order."""
    first, second, other = (start(tmp_path, RANDOM, name=name, slot=n)
                            for n, name in enumerate(["wu_1_0", "wu_1_1", "wu_2_0"]))
    ends = [finish(task) for task in (first, second, other)]
    assert all(end[1] for end in ends), ends
    outputs = [json.loads(end[1]) for end in ends]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == random.Random("wu_1").random() != outputs[2][0]


ENVIRONMENT = """
import os, sys
def compute(input):
    return [sorted(os.environ), os.getcwd(), sys.path, sys.stdin.read(), os.nice(0)]
"""


def test_the_job_gets_an_empty_world(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    task = start(tmp_path, ENVIRONMENT)
    names, folder, path, text, nice = json.loads(finish(task)[1])
    assert "SECRET" not in names and "PATH" not in names
    assert folder == str(task.slot.resolve()) and text == "" and nice >= 10
    assert str(tmp_path) not in path and "" not in path


CHECKPOINT = """
import os
def compute(input, checkpoint):
    state = checkpoint.state or {"n": 0}
    for n in range(state["n"], 6):
        checkpoint({"n": n + 1})
        if n == 3 and checkpoint.state is None:
            os._exit(9)
    return ["done", checkpoint.state]
"""


def test_a_job_goes_on_from_its_checkpoint(tmp_path):
    assert run(tmp_path, CHECKPOINT)[0][0] == 195
    task = start(tmp_path, CHECKPOINT)
    assert task.job.resumed
    assert finish(task)[:2] == ((0, ""), b'["done",{"n":4}]')


def test_a_broken_checkpoint_is_no_checkpoint(tmp_path):
    slot = tmp_path / "slots" / "0"
    slot.mkdir(parents=True)
    (slot / "checkpoint.json").write_text('{"sta')
    (slot / "left over").mkdir()
    source = "import os\ndef compute(input, checkpoint): return [checkpoint.state, os.listdir()]"
    state, names = json.loads(run(tmp_path, source)[1])
    assert state is None and "left over" not in names


def test_files_are_checked_when_the_job_starts(tmp_path):
    run(tmp_path, "def compute(input): return 1")
    damaged = next((tmp_path / "files").glob("sq_*.py"))
    damaged.write_text("evil")
    job = v.parse_assignment(assignment("wu_1_0", b"def compute(input): return 1"), "http://x")
    with pytest.raises(v.BadFile, match=damaged.name):
        v.prepare_slot(tmp_path / "slots" / "1", job, tmp_path / "files", 60)
    assert not damaged.exists()


# A job that says "ready" through a named pipe and then never ends.
STUCK = """
import threading
def compute(input):
    %s
    with open(input, "w") as f:
        f.write("ready")
        f.flush()
        threading.Event().wait()
"""


def start_stuck(tmp_path, line="pass", **more):
    """Start a job that does `line` and then hangs; the Task and the pipe it holds open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    return start(tmp_path, STUCK % line, json.dumps(str(pipe)).encode(), **more), reader


def hear(reader):
    """What comes through the pipe next; b'' when its last writer is dead."""
    poll = select.poll()
    poll.register(reader, select.POLLIN | select.POLLHUP)
    assert poll.poll(PATIENCE * 1000), "nothing came"
    return os.read(reader, 99)


def test_time_limit(tmp_path):
    task, reader = start_stuck(tmp_path)
    assert hear(reader) == b"ready"
    for seconds in (10, 20, 30, 40, 50, 60):
        task.look(NOW + seconds)
        assert not task.verdict
    task.look(NOW + 61)
    assert finish(task)[0] == (197, "stopped: over its time limit of 60 s")
    os.close(reader)


def test_time_asleep_or_a_clock_that_jumps_is_not_computing(tmp_path):
    task, reader = start_stuck(tmp_path)
    for now in (NOW + 1, NOW + 86400, NOW - 86400, NOW):
        task.look(now)
    assert task.job.elapsed_time == 1 + 10 + 0 + 10 and not task.verdict
    task.kill()
    finish(task)
    os.close(reader)


def test_disk_limit_of_all_files_together(tmp_path):
    line = "for n in range(9): open(str(n), 'wb').write(bytes(200000))"
    task, reader = start_stuck(tmp_path, line, rsc_disk_bound=1e6)
    assert hear(reader) == b"ready"
    task.look(NOW)
    assert finish(task)[0] == (196, "stopped: over its disk limit of 1 MB")
    os.close(reader)


def test_disk_limit_of_one_file(tmp_path):
    source = "def compute(input): open('x', 'wb').write(bytes(2000000))"
    status, text = run(tmp_path, source, rsc_disk_bound=1e6)[0]  # Its keeper may see it as well.
    assert status == 196 and text.startswith("stopped: over its disk limit")


def test_memory_limit_seen_by_the_client(tmp_path):
    task, reader = start_stuck(tmp_path, "global x; x = b'x' * 150000000", rsc_memory_bound=1e8)
    in_time(os.waitid, os.P_PID, task.process.pid, os.WEXITED | os.WNOWAIT)  # Its own watch.
    assert finish(task)[0][0] == 198
    os.close(reader)


def test_memory_limit_by_the_system(tmp_path):
    (status, text), _, stderr = run(tmp_path, "def compute(input): bytearray(1 << 40)")
    assert (status, text) == (198, "stopped: over its memory limit of 500 MB")
    assert "MemoryError" in stderr


def test_memory_limit_counts_the_children_of_python_jobs(tmp_path):
    """Each of them is below the limit, and one is started by a thread."""
    source = ("import os, signal, threading\ndef compute(input):\n"
              "    def child():\n        if os.fork() == 0:\n"
              "            x = b'x' * 60000000\n            signal.pause()\n"
              "        threading.Event().wait()\n"
              "    thread = threading.Thread(target=child)\n    thread.start()\n    child()\n"
              "    threading.Event().wait()")
    (status, text), _, _ = run(tmp_path, source, rsc_memory_bound=1e8)
    assert (status, text) == (198, "stopped: over its memory limit of 100 MB")


CHILD = """
import subprocess, sys
code = '''
import sys, threading
with open(sys.argv[1], "w") as f:
    f.write("child")
    f.flush()
    print("alive", flush=True)
    threading.Event().wait()
'''
def compute(input):
    child = subprocess.Popen([sys.executable, "-c", code, input], stdout=subprocess.PIPE)
    child.stdout.readline()
    {end}
"""


@pytest.mark.parametrize("end", ["child.wait()", "return 1"])
def test_what_a_job_starts_dies_with_it(tmp_path, end):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    task = start(tmp_path, CHILD.format(end=end), json.dumps(str(pipe)).encode())
    assert hear(reader) == b"child"
    if "wait" in end:
        task.kill(202, "")
    in_time(task.wait)
    assert hear(reader) == b""
    os.close(reader)


PARENT = """
import importlib.util, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_volunteer as t
task, reader = t.start_stuck(Path({folder!r}))
print(t.hear(reader).decode(), flush=True)
sys.stdin.read()
"""


def test_jobs_die_with_a_killed_client(tmp_path):
    code = PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert in_time(parent.stdout.readline) == b"ready\n"
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    parent.kill()
    parent.communicate(timeout=PATIENCE)
    assert hear(reader) == b""  # Its last writer, the job, is gone.
    os.close(reader)


# ---- 6. Native programs --------------------------------------------------------

LINUX = "x86_64-pc-linux-gnu"
posix = pytest.mark.skipif(os.name != "posix", reason="runs shell scripts")


def start_native(tmp_path, script, data=b"3", seconds=60.0, slot=0, arguments="", inputs=(),
                 protection=v.Protection(), **bounds):
    """Start a shell script as a native program; its Task."""
    files = tmp_path / "files"
    files.mkdir(exist_ok=True)
    v.write_safely(tmp_path / "harness.py", v.HARNESS.encode())
    source = b"#!/bin/sh\n" + script.encode()
    a = assignment("wu_1_0", source, data, platform=LINUX, command_line=arguments, **bounds)
    a["files"][0].update(open_name="program", executable=True)
    for name, content in dict(inputs).items():
        entry = dict(a["input"], name="wu_%s" % name, open_name=name, nbytes=len(content),
                     sha256=hashlib.sha256(content).hexdigest())
        a["inputs"] = a.get("inputs", []) + [entry]
        (files / entry["name"]).write_bytes(content)
    job = v.parse_assignment(a, "http://x", ("python", LINUX))
    (files / job.files[0]["name"]).write_bytes(source)
    (files / job.input["name"]).write_bytes(data)
    slot = tmp_path / "slots" / str(slot)
    job.resumed = v.prepare_slot(slot, job, files, seconds)
    return v.Task(job, slot, tmp_path / "harness.py", seconds, NOW, protection)


NATIVE = {  # script, arguments -> output
    "standard input to standard output": ("tr a-c A-C", "", b"xABC"),
    "files in and out": ("cat in in > out; echo ignored", "", b"xabcxabc"),
    "an empty output": ("cat > /dev/null", "", b""),
    "arguments": ('printf "%s|" "$@"', "a 'b  c' \"d'\" $HOME", b"a|b  c|d'|$HOME|"),
    "a further input": ("cat table.txt", "", b"a table"),
    "who may read it": ("stat -c %a program 2>/dev/null || stat -f %Lp program", "", b"700\n"),
    "a child that prints": ("sh -c 'echo hello'", "", b"hello\n"),
}


@posix
@pytest.mark.parametrize("case", NATIVE)
def test_native_output(tmp_path, case):
    script, arguments, wanted = NATIVE[case]
    task = start_native(tmp_path, script, b"xabc", arguments=arguments,
                        inputs={"table.txt": b"a table"})
    outcome, output, stderr = finish(task)
    assert (outcome, output) == ((0, ""), wanted), stderr
    assert task.job.cpu_time > 0


NATIVE_BAD = {  # script -> exit status, part of the text or of stderr
    "fails": ("echo because >&2; exit 3", 3, "its program ended with exit status 3", "because"),
    "fails after writing out": ("echo 1 > out; exit 4", 4, "exit status 4", ""),
    "is killed": ("kill -SEGV $$", 139, "exit status 139", "ended by signal 11"),
    "does not start": ("exec /nonsuch", 127, "exit status 127", "nonsuch"),
    "writes too much": ("while :; do echo 0123456789012345; done", 196, "disk limit", ""),
    "writes too much to out": ("exec > out; while :; do echo 0123456789; done", 196, "disk", ""),
}


@posix
@pytest.mark.parametrize("case", NATIVE_BAD)
def test_native_error(tmp_path, case):
    script, wanted, said, printed = NATIVE_BAD[case]
    (status, text), output, stderr = finish(start_native(tmp_path, script, rsc_disk_bound=1e5))
    assert (status, output) == (wanted, None)
    assert said in text and printed in stderr


@posix
def test_a_file_that_is_no_program(tmp_path):
    task = start_native(tmp_path, "")
    finish(task)
    (task.slot / "program").write_bytes(b"\x7fELF nonsense")
    again = v.Task(task.job, task.slot, tmp_path / "harness.py", 60, NOW)
    (status, _), output, stderr = finish(again)
    assert status == 195 and "Exec format error" in stderr


@posix
def test_a_native_program_gets_an_empty_world(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    task = start_native(tmp_path, "env; pwd; ls; ulimit -c")
    lines = finish(task)[1].decode().splitlines()
    assert not any("SECRET" in line for line in lines) and "0" in lines
    assert str(task.slot.resolve()) in lines
    names = set(lines[lines.index(str(task.slot.resolve())) + 1:-1])
    assert names == {"in", "program", "job.json", "stderr.txt", "stdout.txt"}


def stuck_native(tmp_path, line="", **more):
    """Start a program that does a line, says "ready" through a pipe and hangs with its child."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = "import signal; signal.pause()"
    script = "exec 3> '%s'\n%s\necho ready >&3\n'%s' -c '%s'\n" % (
        pipe, line, sys.executable, code)
    return start_native(tmp_path, script, **more), reader


@posix
def test_a_native_program_that_hangs_ends_with_all_it_started(tmp_path):
    task, reader = stuck_native(tmp_path)
    assert hear(reader) == b"ready\n"
    for seconds in (10, 20, 30, 40, 50, 60, 61):
        task.look(NOW + seconds)
    assert finish(task)[0] == (197, "stopped: over its time limit of 60 s")
    assert hear(reader) == b""  # The last writer, its child, is gone.
    os.close(reader)


@posix
def test_the_disk_limit_counts_what_a_native_program_writes(tmp_path):
    task, reader = stuck_native(tmp_path, "for n in 1 2 3; do head -c 40000 /dev/zero > $n; done",
                                rsc_disk_bound=1e5)
    assert hear(reader) == b"ready\n"
    task.look(NOW)
    assert finish(task)[0] == (196, "stopped: over its disk limit of 0 MB")
    os.close(reader)


@posix
@pytest.mark.skipif(sys.platform != "linux", reason="macOS is watched by ps, with larger steps")
def test_the_memory_of_a_native_program_is_watched_with_its_children(tmp_path):
    code = "x = bytearray(120000000); print(len(x), flush=True); import signal; signal.pause()"
    task = start_native(tmp_path, "'%s' -c '%s' & wait" % (sys.executable, code),
                        rsc_memory_bound=1e8)
    (status, text), _, _ = finish(task)
    assert (status, text) == (198, "stopped: over its memory limit of 100 MB")
    assert task.job.peak_memory > 1e8


@posix
def test_processor_time_of_a_native_program(tmp_path):
    """[S1-15] Of the program and its children together; wall time is another limit."""
    task = start_native(tmp_path, "while :; do :; done & wait", seconds=-9.0)
    (status, text), _, _ = finish(task)
    assert (status, text) == (197, "stopped: over its limit of 1 s of processor time")


@posix
def test_progress_and_checkpoint_of_a_native_program(tmp_path):
    """With a file `checkpoint` it finds all it has made; without, nothing."""
    script = ("if [ -f checkpoint ]; then cat half data/more > out; exit; fi\n"
              "mkdir -p data; echo 1 > half; echo 2 > data/more; echo 0.25 > fraction_done\n%s\n"
              "echo stale > out; exit 9")
    task = start_native(tmp_path, script % "")
    assert finish(task)[0][0] == 9
    task.look(NOW + 1)
    assert task.job.fraction_done == 0.25
    task = start_native(tmp_path, script % "> checkpoint")
    assert not task.job.resumed and finish(task)[0][0] == 9
    task = start_native(tmp_path, script % "> checkpoint")
    assert task.job.resumed and finish(task)[:2] == ((0, ""), b"1\n2\n")


@posix
def test_what_a_program_leaves_in_its_slot_leads_nowhere(tmp_path):
    """A link in the place of a file that the client writes would have it write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    script = ("> checkpoint; for n in in job.json stderr.txt table.txt output out; do\n"
              "rm -f $n; ln -s '%s' $n; done; exit 1" % victim)
    for _ in range(2):
        finish(start_native(tmp_path, script, inputs={"table.txt": b"a table"}))
    assert victim.read_text() == "mine"
    task = start_native(tmp_path, "rm -f out; ln -s '%s' out; echo printed" % victim)
    assert finish(task)[1] == b"printed\n"


def add_with_table(server, *numbers):
    """Add workunits whose job opens a further input by name; return that input's file name."""
    content = b"a table" * 99
    server.files["sq_0123_table"] = content
    entry = {"name": "sq_0123_table", "url": server.url + "/download/sq_0123_table",
             "open_name": "table.txt", "sha256": hashlib.sha256(content).hexdigest(),
             "nbytes": len(content)}
    for n in numbers:
        server.add(n, b"def compute(input): return len(open('table.txt').read())", inputs=[entry])
    return "sq_0123_table"


def test_further_inputs_are_fetched_once_and_kept_for_the_next_jobs(tmp_path, server, clock):
    """Also those of Python jobs."""
    name = add_with_table(server, 1, 2, 3)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    kept = folder_of(tmp_path) / "files" / name
    kept.write_text(kept.read_text().upper())  # Damaged, then, before one more job needs it.
    add_with_table(server, 4)
    client.fetched = False
    drive(client, clock, client.finished)
    assert [bytes(u) for u in server.uploads.values()] == [b"693"] * 4
    assert server.log.count("GET /download/" + name) == 2


def test_a_job_of_two_processors_waits_for_both(tmp_path, server, monkeypatch):
    client = make_client(tmp_path, server, n_cpus=2)
    monkeypatch.setattr(client, "_start_task", lambda job: client.tasks.update({
        job: SimpleNamespace(job=job, makes_way=False, had_its_turn=lambda: False)}))
    for n, ncpus in enumerate((1.0, 2.0, 0.5, 0.5, 1.0, 1.0)):
        client.projects[0].adopt(open_job("r_%d" % n, ncpus=ncpus))
    started = []
    for done in ("none", "r_0", "r_1", "r_2"):
        client.tasks = {job: task for job, task in client.tasks.items() if job.name != done}
        client.projects[0].jobs = [job for job in client.jobs if job.name != done]
        client._start_tasks()
        # None overtakes one that has to wait.
        started.append(" ".join(job.name for job in client.tasks))
    assert started == ["r_0", "r_1", "r_2 r_3 r_4", "r_3 r_4"]


# ---- 7. Trickles ---------------------------------------------------------------


def test_trickle_of_the_harness(tmp_path):
    """Each text is a whole file; what has come is given once, in order; numbers go on."""
    source = ("def compute(input, trickle):\n"
              "    first = trickle('one')\n"
              "    return [first, trickle(), trickle('é' * 10)]\n")
    task = start(tmp_path, "def compute(input): return 1")
    finish(task)
    for n, text in ((0, "a"), (2, "b"), (10, "c\n"), ("x", "no"), ("3.new", "no")):
        (task.slot / ("trickle_down.%s" % n)).write_text(text)
    (task.slot / "trickle_up.4").write_text("left over")
    again = start(tmp_path, source)
    outcome, output, stderr = finish(again)
    assert json.loads(output) == [["a", "b", "c\n"], [], []], stderr
    ups = {p.name: p.read_text() for p in again.slot.glob("trickle_up.*")}
    assert ups == {"trickle_up.4": "left over", "trickle_up.5": "one", "trickle_up.6": "é" * 10}
    (status, _), _, stderr = run(tmp_path, "def compute(input, trickle): trickle('x' * 32769)")
    assert status == 195 and "at most 32768 bytes" in stderr


TALK = b"""
import time
def compute(input, trickle):
    trickle("hello")
    trickle("hello")
    got = []
    while len(got) < 2:
        got += trickle()
        time.sleep(0.01)
    return got
"""


def heard(server):
    return [(t["result"], t["text"]) for r in server.requests for t in r["trickles"]]


def test_messages_go_up_and_come_down_while_the_job_runs(tmp_path, server, clock):
    server.add(1, TALK)
    client = make_client(tmp_path, server, once=True)
    server.extra = [{}] + [{"trickles_taken": True, "trickles": [
        {"result": "wu_1_0", "time": 1, "text": "welcome"}, {"result": "nobody", "text": "?"},
        {"result": "wu_1_0", "text": 7}, {"result": ["x"], "text": "?"}, None,
        {"result": "wu_1_0", "time": 1, "text": "\ud800 back"}]}] * 2
    attend(client, clock, client.finished)
    assert json.loads(bytes(server.uploads["wu_1_0"]))[:2] == ["welcome", "? back"]
    assert heard(server) == [("wu_1_0", "hello")] * 2
    first, second = [t["time"] for r in server.requests for t in r["trickles"]]
    assert first < second  # Or the server would take one for a repetition of the other.


def test_last_words_of_a_job_are_heard(tmp_path, server, clock):
    server.add(1, b"def compute(input, trickle): trickle('bye')\n")
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert heard(server)[0] == ("wu_1_0", "bye")


def test_messages_are_kept_until_the_server_has_taken_them(tmp_path, server, clock):
    """Over a crash of the client, and by a server that does not know of them without hurry."""
    stuck = b"import threading\ndef compute(input, trickle):\n    trickle('x')\n" \
            b"    threading.Event().wait()\n"
    server.add(1, stuck, rsc_fpops_est=1e12)  # Enough to do: no request for work.
    client = make_client(tmp_path, server, n_cpus=1)
    attend(client, clock, lambda: client.projects[0].trickle_time)
    assert client.projects[0].trickle_time > clock.now + 50
    before = len(server.requests)
    for _ in range(20):
        clock.now += 1
        client.step(clock.now)
    assert len(server.requests) == before and client.projects[0].jobs[0].trickles
    crash(client)
    again = make_client(tmp_path, server, n_cpus=1)
    assert [t["text"] for t in again.projects[0].jobs[0].trickles] == ["x"]
    server.extra = [{"trickles_taken": True}] * 3
    clock.now += 60
    attend(again, clock, lambda: not again.projects[0].jobs[0].trickles)
    texts = [tuple(t.items()) for r in server.requests for t in r["trickles"]]
    assert texts.count(texts[0]) > 1  # With the same time: the server knows it. Others may follow.
    again.leave(lambda: clock.now)


def test_a_message_is_taken_once_whenever_the_client_is_killed(tmp_path):
    """Its file goes only when the state that holds it is kept."""
    task = start(tmp_path, "def compute(input, trickle): trickle('a'); trickle('b')")
    finish(task)
    assert task.look(NOW + 1) and [t["text"] for t in task.job.trickles] == ["a", "b"]
    assert len(list(task.slot.glob("trickle_up.*"))) == 2
    kept = v.revive(v.Job, json.loads(json.dumps(vars(task.job))))
    task.job, task.taken = kept, []  # As after a crash: the files are still there.
    assert not task.look(NOW + 2) and len(kept.trickles) == 2
    assert not task.look(NOW + 3) and not list(task.slot.glob("trickle_up.*"))
    assert [t["time"] for t in kept.trickles] == [NOW + 1, NOW + 2]


def test_a_job_that_chatters_is_bounded(tmp_path):
    task = start(tmp_path, "def compute(input, trickle):\n    for n in range(150): trickle('x')")
    finish(task)
    (task.slot / "trickle_up.150").write_bytes(b"\xff\0" * 99999)
    task.look(NOW + 1)
    assert len(task.job.trickles) == 100
    request = v.Request([], trickles=v.first_trickles([task.job]))
    v.drop_trickles(request)
    assert not task.job.trickles
    task.look(NOW + 2)
    assert len(task.job.trickles) == 51
    assert len(task.job.trickles[-1]["text"].encode()) <= 3 * 32768
    assert "\0" not in task.job.trickles[-1]["text"]
    many = v.Job("r", trickles=[{"time": n, "text": "x" * 32768} for n in range(100)])
    assert len(v.first_trickles([many])) == 7


# ---- 8. The client against a scripted server ---------------------------------

def test_a_whole_run(tmp_path, server, clock):
    for n in range(5):
        server.add(n)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert {n: bytes(u) for n, u in server.uploads.items()} == {
        "wu_%d_0" % n: b"%d" % n ** 2 for n in range(5)}
    assert set(reports(server).values()) == {(5, 0)} and len(server.store) == 5
    assert server.registered == [{"nickname": "otter"}]
    assert [r["rpc_seqno"] for r in server.requests] == list(range(len(server.requests)))
    assert server.requests[0]["hostid"] == 0 and server.requests[1]["hostid"] == 3
    folder = tmp_path / "client"
    assert not any((folder / "slots").iterdir())
    folder = folder_of(tmp_path)
    assert not any(any((folder / d).iterdir()) for d in ("outputs", "partial"))
    assert [p.suffix for p in (folder / "files").iterdir()] == [".py"]  # Kept for the next jobs.


def test_trouble_on_all_sides_loses_nothing(tmp_path, server, clock):
    """A 503, downloads and uploads cut in half, a reply that gets lost: the same is said again."""
    big = b"def compute(input):\n    return 'x' * 3000 + str(input)\n" + b"#" * 5000
    for n in range(3):
        server.add(n, big)
    server.trouble = {"GET download": ["cut", None, 503], "PUT upload": ["cut", 503],
                      "POST scheduler": [None, "lost", 503]}
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert set(reports(server).values()) == {(5, 0)} and len(server.store) == 3
    assert all(len(u) == 3003 for u in server.uploads.values())
    assert any(line.startswith("GET /upload/") for line in server.log)
    lost, again = server.requests[1], server.requests[2]
    held = [r["name"] for r in again["reports"]] + again["other_results"]
    assert lost["reports"] and {r["name"] for r in lost["reports"]} <= set(held)
    assert [r["rpc_seqno"] for r in server.requests[:3]] == [0, 1, 3]  # The 503 used up a number.
    errors = client.voice.errors.getvalue()
    assert "the server has a problem on its side: scripted trouble" in errors
    assert "no connection: " in errors


def test_an_upload_goes_on_where_it_was_cut(tmp_path, server, clock):
    server.add(1, b"returns = 'bytes'\ndef compute(input): return bytes(range(256)) * 40\n")
    server.trouble = {"PUT upload": ["cut"]}
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert bytes(server.uploads["wu_1_0"]) == bytes(range(256)) * 40
    assert [line.split()[0] for line in server.log if "upload" in line] == ["PUT", "GET", "PUT"]


def test_pieces_offsets_and_empty_files(tmp_path, server, monkeypatch):
    monkeypatch.setattr(v, "PIECE_BYTES", 1000)
    for name, data in {"big": os.urandom(2500), "empty": b"", "piece": b"x" * 1000}.items():
        (tmp_path / name).write_bytes(data)
        server.uploads[name] = bytearray(data[:700]) if name == "big" else bytearray()
        v.Transport().upload(server.url + "/upload/" + name, tmp_path / name, "a" * 32, False)
        assert server.uploads[name] == data
    server.uploads["all"] = bytearray(b"x" * 50)  # All there, but its server was killed just then.
    (tmp_path / "all").write_bytes(b"x" * 50)
    server.restart_at_0 = {"all"}
    v.Transport().upload(server.url + "/upload/all", tmp_path / "all", "a" * 32, True)
    assert server.complete >= {"all"}
    server.uploads["far"] = bytearray(b"x" * 300)  # It has more than the client knows of: a 409.
    (tmp_path / "far").write_bytes(b"x" * 900)
    for _ in range(2):  # The second time it has all: what a client asks that was killed just then.
        v.Transport().upload(server.url + "/upload/far", tmp_path / "far", "a" * 32, False)
    assert server.uploads["far"] == b"x" * 900


def test_a_wrong_checksum_never_runs(tmp_path, server, clock):
    mark = tmp_path / "it ran"
    a = server.add(1, b"open(%r, 'w')\ndef compute(input): return 1\n" % str(mark).encode())
    name = a["files"][0]["name"]
    server.files[name] = server.files[name].replace(b"return 1", b"return 2")
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (1, -186)} and not mark.exists()
    assert len([line for line in server.log if name in line]) == 1 + 3
    assert not (folder_of(tmp_path) / "files" / name).exists()


@pytest.mark.parametrize("nbytes", [5, 500])
def test_a_wrong_size_is_not_kept(tmp_path, server, nbytes):
    server.files["f"] = b"x" * 50
    wanted = {"url": server.url + "/download/f", "nbytes": nbytes,
              "sha256": hashlib.sha256(b"x" * 50).hexdigest()}
    with pytest.raises((v.BadFile, v.TransportError)):
        v.Transport().download(wanted, tmp_path / "partial", tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_hostile_assignments_touch_nothing_and_are_reported(tmp_path, server, clock):
    server.add(1)["input"]["name"] = "../../evil"
    server.add(2)["name"] = "../evil"
    server.add(3)["files"][0]["url"] = "file:///etc/passwd"
    server.add(4)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (1, -186), "wu_3_0": (1, -186), "wu_4_0": (5, 0)}
    assert not list(tmp_path.rglob("*evil*"))


def test_a_failing_job_is_reported_with_its_traceback(tmp_path, server, clock):
    server.add(1, b"def compute(input): return 1 / input", b"0", rsc_fpops_est=1e7)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (3, 195)}
    assert "ZeroDivisionError" in server.store["wu_1_0"]["stderr_out"]
    assert "wu_1_0: failed after" in client.voice.errors.getvalue()


@pytest.mark.parametrize("status", [403, 404, 413])
def test_a_refused_upload_ends_the_result(tmp_path, server, clock, status):
    server.add(1)
    server.trouble = {"PUT upload": [status]}
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (7, -187)}
    assert "scripted trouble" in server.store["wu_1_0"]["stderr_out"]


def test_an_output_that_is_too_large_is_not_sent(tmp_path, server, clock):
    server.add(1)["output"]["nbytes_max"] = 0
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (7, -187)} and not server.uploads


def test_aborts(tmp_path, server, clock):
    """Running jobs are killed, waiting ones dropped; 'if not started' spares the running one."""
    stuck = b"import threading\ndef compute(input): threading.Event().wait()\n"
    for n in range(4):
        server.add(n, stuck)
    client = make_client(tmp_path, server, n_cpus=2)
    drive(client, clock, lambda: len(client.tasks) == 2, True)
    first, second = (job.name for job in client.tasks)
    server.extra = [{"aborts": [first], "aborts_if_not_started": [second, "wu_3_0"]}]
    client.projects[0].typical = 0
    clock.now += 100
    for job in client.projects[0].jobs:
        job.rsc_fpops_est = 1.0  # Too little queued: it calls.
    client.step(clock.now)
    drive(client, clock, lambda: first in server.store and "wu_3_0" in server.store, True)
    assert reports(server) == {first: (6, 202), "wu_3_0": (6, 202)}
    assert second in [job.name for job in client.tasks]
    client.leave(lambda: clock.now)
    assert not client.tasks


def test_a_result_sent_again_is_the_one_held(tmp_path, server, clock):
    again = dict(server.add(1))
    server.extra = [{}, {"assignments": [again, again]}]
    client = make_client(tmp_path, server, n_cpus=8)
    drive(client, clock, lambda: len(server.requests) >= 2)
    client.step(clock.now)
    drive(client, clock, lambda: not client.op.action)
    assert len(client.projects[0].jobs) <= 1
    assert len([line for line in server.log if line == "PUT /upload/wu_1_0"]) <= 1


def test_max_jobs(tmp_path, server, clock):
    """The rest is given back, not kept until the deadline."""
    for n in range(6):
        server.add(n)
    client = make_client(tmp_path, server, n_cpus=1, max_jobs=2)
    drive(client, clock, client.finished)
    states = [state for state, _ in reports(server).values()]
    assert states.count(5) == 2 and states.count(6) == 4
    assert server.requests[0]["cpu_req_instances"] == 1


def test_an_unknown_authenticator_joins_again_without_hammering(tmp_path, server, clock):
    client = make_client(tmp_path, server)
    server.trouble = {"POST scheduler": [401, 401, 401]}
    drive(client, clock, lambda: len(server.requests) == 1)
    assert len(server.registered) == 4 and clock.now - NOW >= 1 + 120 + 240  # [C30]
    assert server.requests[0]["authenticator"] == "%032x" % 4


def test_an_invitation_is_shown_at_registration(tmp_path, server, clock):
    client = make_client(tmp_path, server, invitation="open sesame")
    drive(client, clock, lambda: server.requests)
    assert server.registered == [{"nickname": "otter", "invitation": "open sesame"}]


def test_platforms_are_told(tmp_path, server, clock):
    client = make_client(tmp_path, server, platforms=("python", LINUX))
    drive(client, clock, lambda: server.requests)
    assert server.requests[0]["platforms"] == ["python", LINUX]


def test_what_the_server_refuses_at_registration_is_said_and_the_end(tmp_path, server, clock):
    server.trouble = {"POST register": [403]}
    client = make_client(tmp_path, server)
    drive(client, clock, client.finished)
    assert client.fatal == "the server refuses: scripted trouble"


def test_a_reply_without_host_id_means_the_server_does_not_know_us(tmp_path, server, clock):
    client = make_client(tmp_path, server)
    server.extra = [{}, {"hostid": 0, "request_delay": 3600}]
    drive(client, clock, lambda: len(server.registered) == 2)
    assert clock.now < NOW + 60
    drive(client, clock, lambda: len(server.requests) == 3)
    assert (server.requests[2]["hostid"], server.requests[2]["rpc_seqno"]) == (0, 0)


def test_what_a_job_prints_cannot_keep_reports_from_being_taken(tmp_path, server, clock):
    source = b"def compute(input):\n    print('\\0' * 99999, flush=True)\n    return 1 / 0\n"
    server.add(1, source)
    server.trouble = {"POST scheduler": [None, 400]}
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, lambda: any(job.over for job in client.projects[0].jobs))
    text = client.projects[0].jobs[0].stderr_out
    assert len(text) == 65536 and "\0" not in text and "ZeroDivisionError" in text
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (3, 195)}
    assert server.store["wu_1_0"]["stderr_out"] == ""  # The first try was refused with it.


@pytest.mark.parametrize("answer", [[], {}, {"hostid": "x"}, {"hostid": -1}])
def test_nonsense_as_a_reply_is_a_failure(tmp_path, server, clock, answer):
    client = make_client(tmp_path, server)
    server.do_scheduler = lambda h, body, fault: answer
    drive(client, clock, lambda: client.projects[0].n_rpc_failures == 1)
    assert client.projects[0].min_rpc_time - clock.now <= 120
    assert "the server has a problem on its side" in client.voice.errors.getvalue()


def test_lists_of_nonsense_do_not_stop_it(tmp_path, server, clock):
    server.add(1)
    nonsense = [None, 3, "x", [], {"text": 5}, {"name": {}}]
    server.extra = [{"acks": nonsense, "aborts": nonsense, "messages": nonsense,
                     "aborts_if_not_started": 7, "userid": "x", "project_name": 4}]
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (5, 0)}


def test_killed_at_any_step_nothing_is_lost(tmp_path, server, clock):
    """After a few turns the client is dropped, as by kill -9; the next one has only its files."""
    for n in range(3):
        server.add(n, CHECKPOINT.replace("os._exit(9)", "pass").encode())
    server.trouble = {"PUT upload": ["cut"], "POST scheduler": [None, None, "lost"]}
    n_clients, rng = 0, random.Random(7)
    while len(server.store) < 3 and n_clients < 100:
        client = make_client(tmp_path, server, n_cpus=1)
        n_clients += 1
        for _ in range(rng.randrange(1, 9)):
            client.step(clock.now)
            if client.busy:
                client.wait(PATIENCE)
            clock.now += 5
        crash(client)
    assert set(reports(server).values()) == {(5, 0)} and len(server.store) == 3
    assert n_clients > 1
    sent = [r["rpc_seqno"] for r in server.requests if r["hostid"]]
    assert sent == sorted(set(sent))  # No number twice.


def test_a_damaged_file_is_fetched_again(tmp_path, server, clock):
    server.add(1)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    kept = next((folder_of(tmp_path) / "files").iterdir())
    kept.write_text("damaged")
    server.add(2)
    client.fetched = False
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (5, 0), "wu_2_0": (5, 0)}


def test_a_job_interrupted_by_leaving_goes_on(tmp_path, server, clock):
    source = b"""
def compute(input, checkpoint):
    if checkpoint.state is None:
        checkpoint("half way")
        with open(input, "w") as f:
            f.write("ready")
        import threading
        threading.Event().wait()
    return checkpoint.state
"""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    server.add(1, source, json.dumps(str(pipe)).encode())
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks)
    assert hear(reader) == b"ready"
    client.step(clock.now + 5)
    client.leave(lambda: clock.now + 5)
    os.close(reader)
    assert not server.store
    again = make_client(tmp_path, server, n_cpus=1)
    assert again.projects[0].jobs[0].elapsed_time == 5
    clock.now += 9
    drive(again, clock, lambda: "wu_1_0" in server.store)
    assert bytes(server.uploads["wu_1_0"]) == b'"half way"'
    assert server.store["wu_1_0"]["elapsed_time"] >= 5


def test_finished_work_is_reported_when_leaving(tmp_path, server, clock):
    server.add(1)
    server.extra = [{"request_delay": 0}] * 2
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: any(job.over for job in client.projects[0].jobs) or server.store)

    def ticking():
        clock.now += 0.1
        return clock.now

    client.leave(ticking)
    assert reports(server) == {"wu_1_0": (5, 0)}
    assert v.load_state(tmp_path / "client").projects[0].jobs == []


# ---- 9. As people start it ---------------------------------------------------


def command(server, tmp_path, *more, how=(str(FILE),)):
    return subprocess.Popen([sys.executable, *how, server.url[7:], "--dir", str(tmp_path / "dir"),
                             *more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def test_started_from_a_file_and_from_text(tmp_path, server):
    server.add(1)
    server.extra = [{"request_delay": 0.1}] * 9
    process = command(server, tmp_path, "--once", "--cpus", "2")
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text
    assert re.search(r"joined http://127.0.0.1:\d+ as [a-z]+-[a-z]+-\d\d\n", text)
    assert "1 new job: sq\n" in text and "sq: squares\n" in text and "wu_1_0: finished in" in text
    server.add(2)
    source = "exec(open(%r, encoding='utf-8').read())" % str(FILE)  # As by the one line to join:
    process = command(server, tmp_path, "--once", "--quiet", how=("-c", source))  # no __file__.
    assert process.communicate(timeout=PATIENCE)[0] == "" and process.returncode == 0
    assert len(server.registered) == 1 and len(server.store) == 2
    host = server.requests[0]["host"]
    assert host["p_fpops"] > 1e5 and host["m_nbytes"] > 1e6 and host["d_free"] > 0


def test_a_signal_stops_it_cleanly(tmp_path, server):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    server.add(1, (STUCK % "pass").encode(), json.dumps(str(pipe)).encode())
    process = command(server, tmp_path, "--no-sandbox")  # Which would hide the pipe.
    assert hear(reader) == b"ready"
    other = command(server, tmp_path)
    assert "another client is running in" in other.communicate(timeout=PATIENCE)[0]
    assert other.returncode == 1
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0 and "Traceback" not in text
    assert hear(reader) == b""  # The job is dead, and kept.
    kept = v.load_state(tmp_path / "dir").projects[0].jobs
    assert [job.name for job in kept] == ["wu_1_0"]
    os.close(reader)
    shutil.rmtree(tmp_path / "dir")


def test_help_teaches():
    text = subprocess.run([sys.executable, str(FILE), "--help"], stdout=subprocess.PIPE,
                          timeout=PATIENCE).stdout.decode()
    assert "examples:" in text and "--max-jobs" in text and "trust" in text
    assert "--invitation CODE" in text and "--no-native" in text


@pytest.mark.parametrize("more, native", [((), True), (("--no-native",), False)])
def test_native_programs_can_be_refused(tmp_path, server, more, native):
    server.add(1)
    server.extra = [{"request_delay": 0.1}] * 9
    process = command(server, tmp_path, "--once", "--cpus", "1", "--invitation", "friend", *more)
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text
    wanted = ["python", *(v.native_platforms() if native else ())]
    assert server.requests[0]["platforms"] == wanted
    assert server.registered[0]["invitation"] == "friend"
