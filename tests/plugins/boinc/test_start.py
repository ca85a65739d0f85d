"""The start program: jobs run by the files that are shipped, in slots as the client makes them.

A fake client writes the slot and the message file and waits for what it wants to see, with a
patience that only a failure exhausts. One process stands for each job, as in life.
"""

import ast
import html
import importlib.util
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[3] / "plugins" / "boinc"
PATIENCE = 60  # seconds until something that does not come is a failure
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="for Unix; there is no client to fake here")


def load(name):
    spec = importlib.util.spec_from_file_location(f"boinc_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shipped, start = load("shipped"), load("start")
FILES = {file["name"]: file["content"] for file in shipped.start_files("unix")}

SUM = """
def compute(input):
    print("at work")
    return sum(input)
"""

STEPS = '''
import os, time

def compute(input, progress, checkpoint):
    """Go step by step; the first step after a start waits for a file `go` of the test."""
    os.mkdir("scratch")
    at = checkpoint.state or 0
    burnt = time.process_time() + 0.2
    while time.process_time() < burnt:
        pass
    at += 1
    progress(at / 3)
    checkpoint(at)
    while not os.path.exists(input):
        time.sleep(0.01)
    return at
'''

WAITS = '''
import os, time

def compute(input):
    open("pid", "w").write(str(os.getpid()))
    while not os.path.exists(input):
        time.sleep(0.01)
    return "gone on"
'''


class Slot:
    """A slot directory with a job in it, and the client that looks after it."""

    def __init__(self, folder):
        self.project, self.path = folder / "projects" / "p", folder / "slots" / "0"
        self.project.mkdir(parents=True)
        self.path.mkdir(parents=True)
        self.processes, self.said = [], []
        self.init = {"wu_name": "unit_1", "result_name": "unit_1_0", "client_pid": os.getpid()}
        self.signed = []
        for name, content in FILES.items():
            self.sign(name, content)
        self.write("in", b"[1, 2, 3]")
        self.write("boinc_mmap_file", bytes(8192))
        with open(self.path / "boinc_mmap_file", "r+b") as f:
            self.memory = mmap.mmap(f.fileno(), 8192)

    def write(self, name, content):
        (self.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def read(self, name):
        return (self.path / name).read_text()

    def has(self, name):
        return (self.path / name).exists()

    def sign(self, name, content):
        """Enter a file of the application: it lies in the project's folder and in the slot."""
        self.write(name, content)
        shutil.copy(self.path / name, self.project / f"{name}_1")
        os.chmod(self.project / f"{name}_1", 0o755)
        self.signed.append(f"{name}_1")

    def start(self, *arguments, before="", script="start.sh_1", **environment):
        """Start the job as the client does; `before` is text from the server in init_data.xml."""
        lines = [f"<{k}>{v}</{k}>" for k, v in self.init.items()]
        files = [f"<app_file>{name}</app_file>" for name in self.signed]
        self.write("init_data.xml", "\n".join(
            ["<app_init_data>", before, *lines, *files, "</app_init_data>", ""]))
        with open(self.path / "stderr.txt", "ab") as stderr:
            process = subprocess.Popen(
                [f"../../projects/p/{script}", *arguments], cwd=self.path, stderr=stderr,
                stdout=subprocess.DEVNULL, env={"PATH": PATH, **environment})
        self.processes.append(process)
        return process

    def run(self, *arguments, **more):
        """Run the job to its end; return its exit status."""
        process = self.start(*arguments, **more)
        self.until(lambda: process.poll() is not None)
        return process.returncode

    def until(self, condition):
        """Do what the client does every second, at a quicker pace, until something is so."""
        limit = time.monotonic() + PATIENCE
        while not condition():
            self.listen()
            assert time.monotonic() < limit, (self.read("stderr.txt"), sorted(
                os.listdir(self.path)))
            time.sleep(0.01)
        self.listen()

    def listen(self):
        text = self.take(5)
        if text:
            found = re.findall(r"<(\w+)>([^<]*)</\1>", text)
            self.said.append({name: float(value) for name, value in found})
            assert len(self.said[-1]) == 3

    def take(self, channel):
        at = channel * 1024
        if not self.memory[at]:
            return ""
        text = self.memory[at + 1:at + 1024].split(b"\0")[0].decode()
        self.memory[at] = 0
        return text

    def order(self, text, channel=0):
        """Send the job a message when the one before has been taken."""
        at = channel * 1024
        self.until(lambda: not self.memory[at])
        self.memory[at + 1:at + 2 + len(text)] = text.encode() + b"\0"
        self.memory[at] = 1

    def pid(self):
        """The number of the job's own process, once it has told."""
        self.until(lambda: self.has("pid") and self.read("pid"))
        return int(self.read("pid"))

    def gone(self, pid):
        self.until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z")

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE)
        self.memory.close()


def state(pid):
    """The letter of a process's state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.fixture
def slot(tmp_path):
    slot = Slot(tmp_path)
    yield slot
    slot.close()


def python(slot, code, **more):
    slot.sign("app.py", code)
    return slot.run("python", "app.py", **more)


def native(slot, script, *arguments, **more):
    slot.sign("tool", "#!/bin/sh\n" + script)
    return slot.run("native", "tool", *arguments, **more)


# ---- Python jobs ---------------------------------------------------------------


def test_python_job_succeeds(slot):
    assert python(slot, SUM) == 0
    assert slot.read("out") == "6"
    assert slot.has("boinc_finish_called")
    assert slot.read("stderr.txt") == "at work\n"
    assert slot.said[-1]["fraction_done"] == 1 and slot.said[-1]["current_cpu_time"] > 0


def test_python_job_has_what_volunteers_give_it(slot):
    """Same seed, same hashes, own folder, no path to the slot's files as modules."""
    slot.write("json.py", "raise SystemExit('a file of the slot was imported')")
    code = """
import os, random, sys

def compute(input):
    return [random.random(), hash("word"), sorted(os.environ), sys.path[0] != os.getcwd(),
            os.environ["HOME"] == os.getcwd()]
"""
    assert python(slot, code, PYTHONPATH="/nowhere", SECRET="x", PYTHONHASHSEED="7") == 0
    found = json.loads(slot.read("out"))
    wanted = subprocess.run(
        [sys.executable, "-c", "import random; random.seed('unit_1'); "
         "print([random.random(), hash('word')])"], env={"PYTHONHASHSEED": "0"},
        capture_output=True, text=True, check=True).stdout
    assert found[:2] == ast.literal_eval(wanted)
    assert set(found[2]) <= {"HOME", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONUTF8", "TEMP", "TMP",
                             "TMPDIR"}
    assert found[3:] == [True, True]


@pytest.mark.parametrize("arguments, wanted", [
    ([], "6"), (["--invert"], "[1,2,3,0]"), (["--invert", "x"], "6"), (["--inverse"], "6")])
def test_python_job_checks_another(slot, arguments, wanted):
    """The inverse task, and no other word, is another function of the file [S3-31]."""
    slot.sign("app.py", SUM + "\n\ndef invert(output):\n    return output + [0]\n")
    assert slot.run("python", "app.py", *arguments) == 0
    assert slot.read("out") == wanted


FAULTS = {
    "an exception": ("raise ValueError('wrong')", 195, "ValueError: wrong"),
    "an exit with status 0": ("raise SystemExit(0)", 195, "SystemExit: 0"),
    "no output": ("import os; os._exit(0)", 195, "left no output"),
    "another exit code": ("import os; os._exit(7)", 195, "exit code 7"),
    "a crash": ("import os; os.abort()", 195, "SIGABRT"),
    "too much memory": ("keep = bytearray(150_000_000); import time; time.sleep(60)", 198,
                        "memory limit"),
    "too big a file": ("open('big', 'wb').write(bytes(3_000_000))", 196, "disk limit"),
    "an output that is a link": ("import os; os.symlink('in', 'output'); os._exit(0)", 195,
                                 "left no output"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_python_job(slot, fault):
    line, status, text = FAULTS[fault]
    slot.init.update(rsc_memory_bound=100e6, rsc_disk_bound=2e6)
    found = python(slot, f"def compute(input):\n    {line}\n    return 1\n")
    assert found == status, slot.read("stderr.txt")
    assert text in slot.read("stderr.txt")
    assert not slot.has("boinc_finish_called") and not slot.has("out")


def test_without_a_message_file_a_job_runs_all_the_same(slot):
    os.unlink(slot.path / "boinc_mmap_file")
    assert python(slot, SUM) == 0 and slot.read("out") == "6"


def test_job_that_was_done_when_the_client_died_is_not_done_again(slot):
    slot.write("out", "6")
    slot.write("boinc_finish_called", "0\n")
    assert python(slot, "def compute(input):\n    raise ValueError\n") == 0
    assert slot.read("out") == "6"


# ---- Orders --------------------------------------------------------------------


def test_suspend_and_resume(slot):
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    process, pid = slot.start("python", "app.py"), slot.pid()
    slot.order("<suspend/>")
    slot.until(lambda: state(pid) == "T")
    slot.write("go", "")
    slot.order("<resume/>")
    slot.until(lambda: process.poll() is not None)
    assert process.returncode == 0 and slot.read("out") == '"gone on"'


def test_quit_keeps_checkpoint_and_cpu_time_but_no_other_file(slot):
    slot.write("in", '"go"')
    slot.sign("app.py", STEPS)
    first = slot.start("python", "app.py")
    slot.until(lambda: slot.said and slot.said[-1]["checkpoint_cpu_time"] > 0)
    assert slot.said[-1]["fraction_done"] == pytest.approx(1 / 3, abs=0.001)
    used = slot.said[-1]["current_cpu_time"]
    slot.order("<quit/>")
    slot.until(lambda: first.poll() is not None)
    assert first.returncode == -signal.SIGTERM and not slot.has("boinc_finish_called")
    second = slot.start("python", "app.py")
    slot.until(lambda: json.loads(slot.read("checkpoint.json"))["state"] == 2)
    slot.write("go", "")
    slot.until(lambda: second.poll() is not None)
    assert second.returncode == 0 and slot.read("out") == "2"
    assert slot.said[-1]["current_cpu_time"] >= used + 0.2


def test_a_job_without_checkpoint_begins_anew(slot):
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    first, pid = slot.start("python", "app.py"), slot.pid()
    slot.until(lambda: slot.said)
    slot.order("<suspend/>")
    slot.order("<quit/>")
    slot.until(lambda: first.poll() is not None)
    slot.gone(pid)
    slot.write("go", "")
    slot.write("trickle_down_7", "<text>kept</text>")
    second = slot.start("python", "app.py")
    slot.until(lambda: slot.has("pid") and slot.read("pid") not in ("", str(pid)))
    slot.until(lambda: slot.has("trickle_down.0"))
    assert not slot.has("go"), "what came after the first start is the broken run's"
    slot.write("go", "")
    slot.until(lambda: second.poll() is not None)
    assert second.returncode == 0


def test_progress_is_that_of_the_checkpoint(slot):
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    for checkpoint in (True, False):
        kept = dict(job="unit_1_0", cpu_time=9.0, checkpoint_cpu_time=4.0, fraction_done=0.5,
                    killed=0, files=sorted([*os.listdir(slot.path), "init_data.xml", "go"]))
        slot.write("start.json", json.dumps(kept))
        slot.write("go", "")
        if checkpoint:
            slot.write("checkpoint.json", "{}")
        else:
            os.unlink(slot.path / "checkpoint.json")
        slot.said.clear()
        assert slot.run("python", "app.py") == 0
        os.unlink(slot.path / "boinc_finish_called")
        assert slot.said[0]["checkpoint_cpu_time"] == 4 * checkpoint
        assert slot.said[0]["current_cpu_time"] >= 9 and slot.said[-1]["fraction_done"] == 1


def test_suspended_job_is_asked_to_end_before_it_is_killed(slot):
    slot.sign("tool", "#!/bin/sh\ntrap 'echo asked >checkpoint; exit' TERM\necho $$ >pid\n"
                      "while :; do sleep 0.05; done\n")
    process, pid = slot.start("native", "tool"), slot.pid()
    slot.order("<suspend/>")
    slot.until(lambda: state(pid) == "T")
    slot.order("<quit/>")
    slot.until(lambda: process.poll() is not None)
    assert slot.read("checkpoint") == "asked\n" and not slot.has("boinc_finish_called")


def test_abort_ends_the_job_for_good(slot):
    slot.sign("app.py", WAITS)
    slot.write("in", '"go"')
    process, pid = slot.start("python", "app.py"), slot.pid()
    slot.order("<abort/>")
    slot.until(lambda: process.poll() is not None)
    assert process.returncode == start.ABORTED and not slot.has("boinc_finish_called")
    slot.gone(pid)


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("kind", ["python", "native"])
def test_killed_start_program_leaves_no_orphan(slot, kind, suspended):
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    slot.sign("tool", "#!/bin/sh\nsleep 1000 & echo $! >pid\nwait\n")
    process = slot.start(kind, "app.py" if kind == "python" else "tool")
    pid = slot.pid()
    if suspended:
        slot.order("<suspend/>")
        slot.until(lambda: state(pid) == "T")
    process.kill()
    slot.gone(pid)


KILLED_EARLY = """
import importlib.util, os, signal, subprocess, sys

spec = importlib.util.spec_from_file_location("start", sys.argv[1])
start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start)

class Popen(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        open("number", "w").write(str(self.pid))
        os.kill(os.getpid(), signal.SIGKILL)

start.subprocess.Popen = Popen
start.Job(["/bin/sh", "-c", "sleep 1000 & wait"], True, stdin=subprocess.DEVNULL)
"""


def test_killed_just_after_the_start_of_the_job_leaves_no_orphan(slot):
    slot.write("stderr.txt", "")
    program = Path(__file__).parents[3] / "plugins" / "boinc" / "start.py"
    process = subprocess.run([sys.executable, "-c", KILLED_EARLY, program], cwd=slot.path,
                             timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    slot.gone(int(slot.read("number")))


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_mean_quit(slot, number):
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    process, pid = slot.start("python", "app.py"), slot.pid()
    process.send_signal(getattr(signal, number))
    slot.until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGTERM
    slot.gone(pid)


def test_job_of_a_client_that_is_gone_ends(slot):
    other = subprocess.Popen(["sleep", "1000"])
    slot.init["client_pid"] = other.pid
    slot.write("in", '"go"')
    slot.sign("app.py", WAITS)
    process, pid = slot.start("python", "app.py"), slot.pid()
    slot.until(lambda: slot.said)
    other.kill()
    other.wait()
    slot.until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGTERM and "client is gone" in slot.read("stderr.txt")
    slot.gone(pid)


def test_client_that_cannot_be_watched_is_heard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boinc_mmap_file").write_bytes(bytes(8192))
    channels = start.Channels()
    client = start.Client(channels, 0)
    assert not any(client.gone() for _ in range(20))
    channels.put(start.HEARTBEAT, "<heartbeat/>")
    assert [client.gone() for _ in range(32)] == [False] * 31 + [True]
    channels.memory = None
    assert not client.gone(), "without a message file it cannot be heard"


def test_job_ended_from_outside_goes_on_but_not_for_ever(slot):
    for _ in range(start.KILLS_MAX):
        assert native(slot, "kill -TERM $$") == -signal.SIGTERM
    assert native(slot, "kill -TERM $$") == 128 + signal.SIGTERM


# ---- Native jobs ---------------------------------------------------------------


def test_native_job_reads_and_writes_standard_streams(slot):
    assert native(slot, "read line; echo \"$line and $# words: $2\"", "a", "b c") == 0
    assert slot.read("out") == "[1, 2, 3] and 2 words: b c\n"
    assert slot.has("boinc_finish_called") and slot.read("stderr.txt") == ""


def test_native_job_may_write_its_output_itself(slot):
    assert native(slot, "echo chatter; cp in out") == 0
    assert slot.read("out") == "[1, 2, 3]"


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_native_job_compiled(slot, tmp_path):
    (tmp_path / "p.c").write_text(
        '#include <stdio.h>\nint main(void) { int c; volatile double x = 0; long i;\n'
        'for (i = 0; i < 100000000; i++) x += i;\n'
        'while ((c = getchar()) != EOF) if (c != \',\') putchar(c); return x < 0; }\n')
    subprocess.run(["cc", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
    slot.sign("p", (tmp_path / "p").read_bytes())
    assert slot.run("native", "p") == 0
    assert slot.read("out") == "[1 2 3]"
    assert slot.said[-1]["current_cpu_time"] > 0.05


@pytest.mark.parametrize("script, status, text", [
    ("exit 3", 3, "exit status 3"),
    ("kill -SEGV $$", 128 + signal.SIGSEGV, "SIGSEGV"),
    ("kill -KILL $$", 128 + signal.SIGKILL, "SIGKILL"),
    ("mkdir out", 195, "is no file"),
    ("ln -s in out", 195, "is no file"),
])
def test_failed_native_job(slot, script, status, text):
    assert native(slot, script) == status
    assert text in slot.read("stderr.txt") and not slot.has("boinc_finish_called")


def test_native_job_that_cannot_be_started(slot):
    slot.sign("tool", b"\0not a program")
    assert slot.run("native", "tool") == start.NOT_STARTED
    assert "could not be started" in slot.read("stderr.txt")


def test_native_job_over_its_memory(slot):
    slot.init["rsc_memory_bound"] = 50e6
    slot.sign("tool", f"#!{sys.executable}\nkeep = bytearray(150_000_000)\nimport time\n"
                      "time.sleep(60)\n")
    assert slot.run("native", "tool") == 198


def test_native_progress_and_cpu_time_of_its_children(slot):
    slot.sign("tool", "#!/bin/sh\necho 0.25 more >fraction_done\n"
                      "sh -c 'while :; do :; done' & wait\n")
    process = slot.start("native", "tool")
    slot.until(lambda: slot.said and slot.said[-1]["current_cpu_time"] > 0.5)
    assert slot.said[-1]["fraction_done"] == 0.25
    slot.order("<quit/>")
    slot.until(lambda: process.poll() is not None)


@pytest.mark.parametrize("checkpoint", ["", "echo 1 >checkpoint; "])
def test_stopped_native_job(slot, checkpoint):
    """With a checkpoint all its files are left as they are, without one none."""
    slot.sign("tool", "#!/bin/sh\nif [ -f part ]; then echo went on >>out; exit; fi\n"
                      f"echo first >out; {checkpoint}echo $$ >part; sleep 1000\n")
    process = slot.start("native", "tool")
    slot.until(lambda: slot.has("part"))
    slot.order("<quit/>")
    slot.until(lambda: process.poll() is not None)
    again = slot.start("native", "tool")
    if checkpoint:
        slot.until(lambda: again.poll() is not None)
        assert slot.read("out") == "first\nwent on\n" and slot.has("boinc_finish_called")
    else:
        slot.until(lambda: slot.has("part") and slot.read("out") == "first\n")
        assert again.poll() is None


# ---- Only what is signed -------------------------------------------------------


@pytest.mark.parametrize("arguments", [
    ("python", "in"), ("native", "in"), ("native", "/bin/true"), ("native", "../0/in"),
    ("native", "gone"), ("python", "-c"), ("shell", "start.py"), ("native",), ()])
def test_nothing_unsigned_is_run(slot, arguments):
    slot.write("in", "#!/bin/sh\ntouch broken_in\n")
    os.chmod(slot.path / "in", 0o755)
    assert slot.run(*arguments) == start.NOT_SIGNED
    assert not slot.has("broken_in") and not slot.has("boinc_finish_called")


def test_server_cannot_add_to_the_list_of_signed_files(slot):
    """Preferences and names come from the server as they are, but before the client's list."""
    shutil.copy(slot.path / "in", slot.project / "in_1")
    before = "<app_file>in_1</app_file>\n</app_init_data>\n"
    assert slot.run("native", "in", before=before) == start.NOT_SIGNED


def test_start_sh_runs_no_other_start_py(slot):
    slot.write("start.py", "open('broken_in', 'w')")
    assert python(slot, SUM) == 125
    assert not slot.has("broken_in")


# ---- Trickles ------------------------------------------------------------------


TALKS = '''
import os, time

def compute(input):
    for n, text in enumerate(input):
        with open("up", "w") as f:
            f.write(text)
        os.rename("up", f"trickle_up.{n}")
    while not os.path.exists("trickle_down.1"):
        time.sleep(0.01)
    return [open(f"trickle_down.{n}").read() for n in range(2)]
'''


def test_trickles(slot):
    texts = ["<one> & \u00e9 \u20ac \x07 ]]>", "two"]
    slot.write("in", json.dumps(texts))
    slot.sign("app.py", TALKS)
    process = slot.start("python", "app.py")
    came = []
    for _ in texts:
        slot.until(lambda: slot.take(6) == "<have_new_trickle_up/>\n")
        came.append(slot.read("trickle_up.xml"))
        os.unlink(slot.path / "trickle_up.xml")
    bodies = [re.fullmatch("<variety>minigrid</variety>\n<text>\n([^<>]*)\n</text>\n", c)[1]
              for c in came]
    assert [html.unescape(b) for b in bodies] == [texts[0].replace("\x07", ""), "two"]
    assert all(b.isascii() for b in bodies)
    slot.write("trickle_down_12", "<text>\nsecond &lt;&#233;\n\n</text>\n")
    slot.write("trickle_down_9", "<variety>x</variety><text>first</text>\n")
    slot.order("<have_trickle_down/>", 7)
    slot.until(lambda: process.poll() is not None)
    assert json.loads(slot.read("out")) == ["first", "second <\u00e9\n"]
    assert not [name for name in os.listdir(slot.path) if name.startswith("trickle_down_")]


def test_last_trickles_are_taken_before_the_end(slot):
    slot.sign("tool", "#!/bin/sh\nfor n in 0 1 2; do echo $n >trickle_up.$n; done\n")
    process, came = slot.start("native", "tool"), []

    def take():
        if slot.take(6):
            came.append(slot.read("trickle_up.xml"))
            os.unlink(slot.path / "trickle_up.xml")
        return process.poll() is not None

    slot.until(take)
    take()  # The client looks once more when the process has ended.
    assert process.returncode == 0
    assert [re.search("<text>\n(.)", text)[1] for text in came] == ["0", "1", "2"]


def test_half_written_and_foreign_trickles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("boinc_mmap_file").write_bytes(bytes(8192))
    trickles = start.Trickles(start.Channels())
    Path("trickle_down_5").write_text("<text>half")
    Path("trickle_up.0").write_bytes(b"x" * (start.TRICKLE_BYTES_MAX + 1))
    Path("trickle_up.1").write_bytes(b"&" * start.TRICKLE_BYTES_MAX)
    Path("trickle_up.x").write_text("no number")
    trickles.relay()
    trickles.relay()
    assert sorted(os.listdir()) == ["boinc_mmap_file", "trickle_down_5", "trickle_up.x"]
    Path("trickle_down_5").write_text("<text>half and half</text>")
    trickles.relay()
    assert Path("trickle_down.0").read_text() == "half and half"
    Path("trickle_down_6").write_text("<body>not by us</body>")
    os.utime("trickle_down_6", (0, 0))
    trickles.relay()
    assert not Path("trickle_down_6").exists() and not Path("trickle_down.1").exists()


def test_a_trickle_begun_before_a_stop_is_announced_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("boinc_mmap_file").write_bytes(bytes(8192))
    Path("trickle_up.xml").write_text("left")
    Path("trickle_wait.4").write_text("old")
    Path("trickle_up.0").write_text("new")
    channels = start.Channels()
    trickles = start.Trickles(channels)
    seen = []
    for _ in range(3):
        assert trickles.relay() is None and channels.take(start.TRICKLE_UP)
        seen.append(Path("trickle_up.xml").read_text())
        os.unlink("trickle_up.xml")
    assert seen[0] == "left" and "old" in seen[1] and "new" in seen[2]
    assert not trickles.pending()


# ---- Without Python ------------------------------------------------------------


@pytest.fixture
def bare(slot):
    """A slot on a computer where no Python is new enough."""
    script = FILES["start.sh"].replace(b"(3, 9)", b"(99, 9)")
    assert script != FILES["start.sh"]
    slot.sign("start.sh", script)
    return slot


def test_without_python_a_python_job_says_what_to_install(bare):
    assert python(bare, SUM) == 127
    assert "needs Python 3.9" in bare.read("stderr.txt") and not bare.has("boinc_finish_called")


def test_without_python_a_native_job_runs(bare):
    bare.write("out", "of a broken run")
    assert native(bare, "read line; echo \"$line $2\"", "a", "b c") == 0
    assert bare.read("out") == "[1, 2, 3] b c\n" and bare.has("boinc_finish_called")


@pytest.mark.parametrize("script, status", [("exit 3", 3), ("kill -SEGV $$", 139)])
def test_without_python_a_native_job_fails(bare, script, status):
    assert native(bare, script) == status
    assert not bare.has("boinc_finish_called") and not bare.has("out")


@pytest.mark.parametrize("name", ["in", "/bin/true", "gone", "-x", ""])
def test_without_python_nothing_unsigned_is_run(bare, name):
    bare.write("in", "#!/bin/sh\ntouch broken_in\n")
    shutil.copy(bare.path / "in", bare.project / "in_1")
    assert bare.run("native", name, before="<app_file>in_1</app_file>") == 125
    assert not bare.has("broken_in")


def test_without_python_a_signal_ends_a_native_job(bare):
    bare.sign("tool", "#!/bin/sh\necho $$ >pid\nexec sleep 1000\n")
    process, pid = bare.start("native", "tool"), bare.pid()
    process.terminate()
    bare.until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGTERM
    bare.gone(pid)


# ---- What the client says; what is shipped -------------------------------------


def test_init_is_read_tolerantly(tmp_path):
    path = tmp_path / "init_data.xml"
    path.write_text("<wu_name>old</wu_name>\n<wu_name> a&amp;b </wu_name>\n"
                    "<rsc_memory_bound>1e8</rsc_memory_bound><a>nan</a><b>-1</b><c>x</c><d>inf</d>"
                    "<app_file>forged</app_file> <x/> <app_file>p</app_file>\n"
                    "<app_file>q</app_file>\n</app_init_data>")
    init = start.Init(path)
    assert init.word("wu_name") == "a&b" and init.word("gone") == ""
    assert init.number("rsc_memory_bound") == 1e8
    assert [init.number(name, 5.0) for name in "abcde"] == [5.0] * 5
    assert init.application_files() == ["p", "q"]
    assert start.Init(tmp_path / "gone").word("wu_name") == ""


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_init_data_is_read(tmp_path_factory, junk, at):
    path = tmp_path_factory.getbasetemp() / "junk.xml"
    whole = b"<wu_name>w</wu_name><client_pid>7</client_pid><app_file>a</app_file>" * 3
    path.write_bytes(whole[:at] + junk + whole[at:])
    init = start.Init(path)
    assert isinstance(init.word("wu_name"), str) and init.number("client_pid") >= 0
    assert isinstance(init.application_files(), list)


@given(st.text(max_size=200))
def test_escaped_text_has_no_structure_and_comes_back(text):
    sent = start.escape(text)
    assert sent.isascii() and not set(b"<>") & set(sent)
    kept = re.sub("[\0-\x08\x0b-\x1f\x7f]", "", text.replace("\r", "\n"))
    if not re.search("[\x80-\x9f\ufdd0-\ufdef\ud800-\udfff]", kept) and not any(
            ord(c) & 0xFFFE == 0xFFFE for c in kept):  # HTML takes these for other characters.
        assert html.unescape(sent.decode()) == kept


def test_message_that_still_waits_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("boinc_mmap_file").write_bytes(bytes(8192))
    channels = start.Channels()
    assert channels.put(5, "first") and not channels.put(5, "second")
    assert channels.take(5) == "first" and channels.take(5) == ""
    assert channels.put(5, "x" * 5000) and channels.take(6) == ""
    assert channels.take(5) == "x" * 1022


def test_state_of_another_job_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slot = start.Slot("job_1", 5.0)
    slot.kept["cpu_time"] = 8.0
    slot.save()
    assert start.Slot("job_1", 0.0).kept["cpu_time"] == 8.0
    assert start.Slot("job_2", 0.0).kept["cpu_time"] == 0.0
    Path("start.json").write_text("{")
    assert start.Slot("job_2", 3.0).kept["cpu_time"] == 3.0


def test_shipped_files():
    def names(which):
        return [(f["name"], f["boinc"]) for f in shipped.start_files(which)]

    assert names("unix") == [("start.sh", "unix"), ("start.py", "both")]
    assert names("windows") == [("start.cmd", "windows"), ("start.py", "both")]
    assert len(names("both")) == 3
    contents = {f["name"]: f["content"] for f in shipped.start_files("both")}
    assert b"\r" not in contents["start.sh"] + contents["start.py"]
    assert contents["start.cmd"].count(b"\r\n") == contents["start.cmd"].count(b"\n") > 20
    assert shipped.start_files("both") == shipped.start_files("both")


def test_shipped_start_py_holds_the_harness():
    volunteer = (FOLDER.parent / "volunteer.py").read_text(encoding="utf-8")
    harness = shipped.read_harness(volunteer)
    assert "def watch_memory" in harness
    assert shipped.read_harness(FILES["start.py"]) == harness
    awkward = 'a = \'\'\'x\'\'\' + """y""" \\\n\\n\té\n'
    source = "one\n" + shipped.PLACEHOLDER + "two\n"
    built = shipped.build(source, awkward).decode()
    assert awkward == ast.literal_eval(built[built.index("("):built.rindex(")") + 1])
    with pytest.raises(ValueError):
        shipped.build("no place", harness)
    with pytest.raises(ValueError):
        shipped.read_harness("x = 1")


def test_start_py_that_was_not_built_says_so(slot):
    slot.sign("start.py", (FOLDER / "start.py").read_bytes())
    assert python(slot, SUM) == start.NOT_STARTED
    assert "lacks its harness" in slot.read("stderr.txt")


def test_error_of_the_start_program_itself_is_no_success(slot):
    os.unlink(slot.path / "boinc_mmap_file")
    slot.sign("app.py", SUM)
    slot.write("job.json.new", "")
    (slot.path / "harness").write_text("in the way")
    assert slot.run("python", "app.py") == start.FAILED
    assert "failed by itself" in slot.read("stderr.txt")
