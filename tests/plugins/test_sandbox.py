"""The volunteer's sandbox: hostile jobs, and what is promised must be kept.

All tests run as root and as an ordinary user, with what the system offers: `best` is what
probe_sandbox() finds here, `none` is without a sandbox, where the bounds hold all the same, and
the others are what there is where user namespaces are forbidden.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import test_volunteer as t
from test_volunteer import PATIENCE, finish, in_time, v

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has a job object only")
KINDS = {"best": None, "none": v.Protection(),
         "landlock": v.Protection(files="landlock", seccomp=True)}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    return v.probe_sandbox(tmp_path_factory.mktemp("probe"))


@pytest.fixture(params=KINDS)
def kind(request, probed, tmp_path):
    protection = KINDS[request.param] or probed
    if request.param == "landlock" and not works(protection, tmp_path):
        pytest.skip("this system has no Landlock")
    return protection


@pytest.fixture
def best(probed):
    if not probed.files:
        pytest.skip("this system has no sandbox: " + probed.words)
    return probed


def works(protection, tmp_path):
    folder = tmp_path / "probe"
    (folder / "files").mkdir(parents=True)
    can = v.probe(protection, folder, folder / "harness.py")
    return can is not None and not {"read", "write", "network"} & set(can)


def run(tmp_path, body, data=None, protection=v.Protection(), **more):
    """Run compute(given) with this body; ((exit_status, text), its value, stderr)."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    source = "import os, signal, socket, subprocess, sys, time\n\ndef compute(given):\n" + lines
    (status, text), output, stderr = finish(
        t.start(tmp_path, source, json.dumps(data).encode(), protection=protection, **more))
    return (status, text), json.loads(output) if output else None, stderr


def alive(pid):
    try:
        return "State:\tZ" not in Path("/proc/%d/status" % pid).read_text()
    except OSError:
        return False


def processes_with(word):
    """Processes of the machine whose command line has a word in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


# ---- What is promised ----------------------------------------------------------


def test_what_the_probe_says_is_what_is_tried(probed):
    assert "jobs" in probed.words and "\n" not in probed.words
    assert ("only in their own" in probed.words) == bool(probed.files)


def test_a_job_computes_the_same_in_every_kind(tmp_path, kind):
    body = "import random\nreturn [random.random(), 0.1 + 0.2, list({str(n) for n in range(9)})]"
    assert run(tmp_path, body, protection=kind)[1] == run(tmp_path, body, name="wu_1_1", slot=1)[1]


def test_others_files_are_neither_read_nor_written(tmp_path, kind):
    secret = tmp_path / "home" / ".ssh" / "id_rsa"
    secret.parent.mkdir(parents=True)
    secret.write_text("private")
    secret.chmod(0o644)
    body = """
done = []
for name, attempt in (("read", lambda: open(given).read()), ("append", lambda: open(given, "a")),
                      ("delete", lambda: os.unlink(given)), ("link", lambda: os.link(given, "x")),
                      ("list", lambda: os.listdir(os.path.dirname(given))),
                      ("up", lambda: open("../../client.json", "w"))):
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
return done"""
    outcome, done, stderr = run(tmp_path, body, str(secret), kind)
    assert outcome == (0, ""), stderr
    if kind.files:
        assert secret.read_text() == "private" and not (tmp_path / "client.json").exists()
        assert not {"read", "append", "delete", "link", "list"} & set(done)
    else:
        assert "read" in done  # Else this test tests nothing.


def test_the_system_is_read_only(tmp_path, best):
    body = """
refused = 0
for folder in ("/", "/usr", "/etc", "/dev", "/opt", sys.prefix + "/lib"):
    try:
        open(folder + "/minigrid-was-here", "w")
    except OSError:
        refused += given or bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
return [refused, os.path.exists("/old") and os.listdir("/old")]"""
    if best.files == "mount":
        body = "open('/tmp/x', 'w').write('x'), open('/dev/shm/x', 'w').write('x')\n" + body.strip()
    refused, old = run(tmp_path, body, best.files != "mount", best)[1]
    assert refused == 6 and not old


def test_no_network(tmp_path, kind):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        body = """
try:
    socket.create_connection(("127.0.0.1", given), 2)
    return "connected"
except OSError:
    pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", given))
    return "sent"
except OSError:
    return "refused"
"""
        _, said, stderr = run(tmp_path, body, listener.getsockname()[1], kind)
    assert said == ("refused" if kind.namespaces or kind.seccomp else "connected"), stderr


def test_no_way_back_to_privileges(tmp_path, best):
    body = """
rows = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
return [rows["CapEff"].strip(), rows["CapPrm"].strip(), rows["CapInh"].strip(),
        rows["NoNewPrivs"].strip(), os.getuid()]"""
    *sets, locked, uid = run(tmp_path, body, protection=best)[1]
    assert {int(x, 16) for x in sets} == {0} and locked == "1"
    if os.getuid() == 0:
        assert uid == best.user("0") != 0


def test_other_processes_are_out_of_reach(tmp_path, best):
    body = """
done = []
for name, attempt in (("signal", lambda: os.kill(given, 0)),
                      ("memory", lambda: open("/proc/%d/mem" % given, "rb").read(1))):
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
return [done, os.path.exists("/proc/%d" % given) and len(os.listdir("/proc"))]"""
    done, _ = run(tmp_path, body, os.getpid(), best)[1]
    assert done == [] if best.namespaces else "memory" not in done


def test_python_and_its_children_work_inside(tmp_path, kind):
    body = """
import ctypes, hashlib, multiprocessing, sqlite3, tempfile, zlib
lock = multiprocessing.Lock() if given else None
with tempfile.NamedTemporaryFile() as f:
    f.write(b"x")
done = subprocess.run([sys.executable, "-c", "import json; print(json.dumps([1]))"],
                      stdout=subprocess.PIPE)
return done.stdout.decode().strip()"""
    outcome, said, stderr = run(tmp_path, body, kind.files != "landlock", kind)
    assert (outcome, said) == ((0, ""), "[1]"), stderr


def test_a_native_program_runs_inside(tmp_path, kind):
    task = t.start_native(tmp_path, "tr a-c A-C; sh -c 'echo x > fraction_done'", b"abc",
                          protection=kind)
    assert finish(task)[:2] == ((0, ""), b"ABC")


def test_a_checkpoint_is_found_again(tmp_path, kind):
    assert finish(t.start(tmp_path, t.CHECKPOINT, protection=kind))[0][0] == 195
    task = t.start(tmp_path, t.CHECKPOINT, protection=kind)
    assert task.job.resumed and finish(task)[:2] == ((0, ""), b'["done",{"n":4}]')


def test_half_a_sandbox_is_none(tmp_path):
    """A step that fails ends the job before it has begun."""
    protection = v.Protection(files="landlock", seccomp=True, first_user=1 << 40)
    with pytest.raises((OSError, OverflowError)):
        run(tmp_path, "return 1", protection=protection)
    task = t.start(tmp_path, "def compute(input): return 1", slot=1,
                   protection=v.Protection(files="mount"))  # Not without namespaces, nor as root.
    if os.getuid():
        (status, text), output, _ = finish(task)
        assert status == 195 and "sandbox could not be made" in text and output is None
    else:
        finish(task)


# ---- Nothing survives ----------------------------------------------------------

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", given])
    os._exit(0)
os.wait()
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    for pid in [p for p in os.listdir("/proc") if p.isdigit()] if os.path.isdir("/proc") else []:
        try:
            if given.encode() in open("/proc/%s/cmdline" % pid, "rb").read():
                deadline = 0
        except OSError:
            pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell whose orphans they are")
@pytest.mark.parametrize("end", ["return 1", "signal.pause()", "os.kill(os.getpid(), 9)"])
def test_daemons_die_with_the_job(tmp_path, kind, end):
    word = "daemon-of-%d-%d" % (os.getpid(), time.monotonic_ns())
    body = DAEMON.replace("os.listdir(\"/proc\")", "listed()").strip() + "\n" + end
    body = "def listed():\n    try:\n        return os.listdir('/proc')\n    except OSError:\n" \
           "        time.sleep(0.5)\n        return ['0']\n" + body
    if kind.files == "landlock":  # It cannot look for its daemon in /proc.
        body = body.replace("+ 20", "+ 1")
    lines = "\n".join("    " + line for line in body.splitlines())
    source = "import os, signal, sys, time\n\ndef compute(given):\n" + lines
    task = t.start(tmp_path, source, json.dumps(word).encode(), protection=kind)
    if "pause" in end:
        deadline = time.monotonic() + PATIENCE
        while not processes_with(word) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes_with(word)
        task.kill(202, "")
    in_time(task.wait)
    assert processes_with(word) == []


def test_jobs_die_with_a_killed_keeper(tmp_path, best):
    task, reader = stuck(tmp_path, best)
    pids = v_children(task.process.pid)
    task.process.kill()
    in_time(task.wait)
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids and not any(map(alive, pids))


def stuck(tmp_path, protection, line="pass"):
    source = "import time\ndef compute(given):\n    %s\n    open('ready', 'w')\n" \
             "    time.sleep(600)\n" % line
    task = t.start(tmp_path, source, protection=protection)
    deadline = time.monotonic() + PATIENCE
    while not (task.slot / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (task.slot / "ready").exists()
    return task, None


def v_children(pid):
    found = [int(c) for c in Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()]
    return found + [c for child in found for c in v_children(child)]


# ---- Bounds --------------------------------------------------------------------

FORKS = """
for n in range(given):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
time.sleep(60)"""

BEYOND = {  # body, bounds -> exit status, text
    "processes": (FORKS, {}, 195, "stopped: over its limit of 20 processes"),
    "bytes": ("for n in range(30): open(str(n), 'wb').write(bytes(100000))\ntime.sleep(60)",
              dict(rsc_disk_bound=1e6), 196, "stopped: over its disk limit of 1 MB"),
    "bytes at the end": ("for n in range(30): open(str(n), 'wb').write(bytes(100000))",
                         dict(rsc_disk_bound=1e6), 196, "stopped: over its disk limit of 1 MB"),
    "bytes without a name": (
        "files = [open('x%d' % n, 'wb') for n in range(30)]\n"
        "for f in files: os.unlink(f.name), f.write(bytes(100000)), f.flush()\ntime.sleep(60)",
        dict(rsc_disk_bound=1e6), 196, "stopped: over its disk limit of 1 MB"),
    "files": ("for n in range(600): open(str(n), 'w')\ntime.sleep(60)", {}, 196,
              "stopped: over its limit of 500 files"),
    "deep": ("for n in range(90): os.mkdir('d'), os.chdir('d')\ntime.sleep(60)", {}, 196,
             "stopped: its directories are more than 64 deep"),
    "output": ("while True: os.write(1, b'x' * 10000)", {}, 196,
               "stopped: it printed more than its limit of 1 MB"),
    "memory": ("x = b'x' * 150000000\ntime.sleep(60)", dict(rsc_memory_bound=1e8), 198,
               "stopped: over its memory limit of 100 MB"),
    "memory of orphans": (
        "for n in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n        x = b'x' * 50000000\n        time.sleep(60)\n"
        "time.sleep(60)", dict(rsc_memory_bound=1e8), 198,
        "stopped: over its memory limit of 100 MB"),
    "processor time of orphans": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    while True: pass\ntime.sleep(60)", dict(seconds=-9.7), 197,
        "stopped: over its limit of 0 s of processor time"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="ps looks less often")
@pytest.mark.parametrize("case", BEYOND)
def test_bounds(tmp_path, kind, case, monkeypatch):
    body, bounds, status, text = BEYOND[case]
    monkeypatch.setattr(v, "PROCESSES_MAX", 20)
    monkeypatch.setattr(v, "SLOT_FILES_MAX", 500)
    monkeypatch.setattr(v, "PRINTED_MAX", 1e6)
    outcome, _, stderr = run(tmp_path, body, 40, kind, **bounds)
    assert outcome == (status, text), stderr[-500:]


def test_a_fork_bomb_is_stopped(tmp_path, kind, monkeypatch):
    """The system's own bound on threads keeps it small until it is seen."""
    monkeypatch.setattr(v, "PROCESSES_MAX", 20)
    body = "for n in range(9):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(60)"
    assert run(tmp_path, body, None, kind)[0] == (195, "stopped: over its limit of 20 processes")
    body = "import resource\nreturn resource.getrlimit(resource.RLIMIT_NPROC)[1]"
    assert 1000 < run(tmp_path, body, None, kind)[1] < 50000


def test_shared_memory_counts_once(tmp_path):
    """Children that share their parent's pages are no second copy of them."""
    body = "x = b'x' * 60000000\nfor n in range(4):\n    if os.fork() == 0:\n" \
           "        time.sleep(1)\n        os._exit(0)\nfor n in range(4): os.wait()\nreturn 1"
    assert run(tmp_path, body, rsc_memory_bound=1.5e8)[0] == (0, "")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no such count here")
def test_a_process_that_ends_while_memory_is_counted_does_not_spoil_the_count():
    keeper = {}
    exec(v.KEEPER.rpartition("PAGE, TICKS")[0], keeper)
    gone, zombie = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    gone.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert keeper["shared_out"]([os.getpid(), gone.pid, zombie.pid]) > 1e6
    zombie.wait()


# ---- What a job leaves ---------------------------------------------------------

LEFT = {  # name -> what to leave under it
    "link": "os.symlink(given, name)", "pipe": "os.mkfifo(name)",
    "directory": "os.makedirs(name + '/x/y')", "huge": "open(name, 'wb').truncate(50000000)",
    "hard link": "open('other', 'w').write('1') and os.link('other', name)",
    "nonsense": "open(name, 'w').write('[' * 100000)"}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("name", ["output", "done.json", "progress.txt", "trickle_up.0",
                                  "stderr.txt", "checkpoint.json", "trickle_down.0"])
def test_what_a_job_leaves_leads_nowhere(tmp_path, name, what):
    """Nothing hangs, nothing is written or read elsewhere, and the slot can be used again."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    body = "name = %r\nif os.path.exists(name): os.unlink(name)\n%s\nos._exit(0)" % (
        name, LEFT[what])
    source = "import os\n\ndef compute(given):\n" + "\n".join(
        "    " + line for line in body.splitlines())
    task = t.start(tmp_path, source, json.dumps(str(victim)).encode())
    code = in_time(task.wait)
    task.job.down = ["a message"]
    v.deliver(task.slot, task.job)
    task.look(t.NOW + 1)
    task.take_trickles(t.NOW + 2)
    status, text = task.outcome(code)
    assert "mine" not in task.stderr(1000) + json.dumps(task.job.trickles)
    if name == "output":
        assert (status == 0) == (what in ("huge", "nonsense"))
    assert run(tmp_path, "return 1")[:2] == ((0, ""), 1)
    assert victim.read_text() == "mine"


def test_messages_for_a_job_follow_no_link_it_has_laid(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    slot = tmp_path / "slot"
    slot.mkdir()
    for name in ("trickle_down.0", "trickle_down.0.new", "trickle_down.1"):
        (slot / name).symlink_to(victim)
    job = v.Job("x", down=["one", "two"])
    v.deliver(slot, job)
    assert victim.read_text() == "mine" and (slot / "trickle_down.1").read_text() == "two"
    assert sorted(p.name for p in slot.iterdir() if not p.is_symlink()) == [
        "trickle_down.0", "trickle_down.1"]


def test_deleting_what_wants_to_stay(tmp_path):
    """Closed and read-only directories, odd names, and more levels than a path may have."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    slot = tmp_path / "slot"
    slot.mkdir()
    (slot / "link").symlink_to(outside)
    (slot / "a\nb").write_text("x")
    os.mkfifo(slot / "pipe")
    (slot / "closed" / "in").mkdir(parents=True)
    (slot / "closed" / "in" / "f").write_text("x")
    place = os.open(slot, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=place)
        inner = os.open("deep", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    (slot / "closed" / "in").chmod(0)
    (slot / "closed").chmod(0)
    slot.chmod(0o500)
    assert v.remove_tree(slot)
    assert not slot.exists() and (outside / "kept").exists()
    (tmp_path / "to").symlink_to(outside)
    assert v.remove_tree(tmp_path / "to") and (outside / "kept").exists()
    assert v.remove_tree(tmp_path / "nothing")


def test_what_cannot_be_deleted_is_put_aside(tmp_path, monkeypatch):
    slot = tmp_path / "slot"
    (slot / "x").mkdir(parents=True)
    monkeypatch.setattr(v, "unlink_in", lambda *args: 1 / 0)
    monkeypatch.setattr(v, "remove_entry", lambda *args: False)
    assert v.remove_tree(slot) and not slot.exists()
    assert [p.name[:5] for p in tmp_path.iterdir()] == ["lost-"]


def test_the_look_at_a_huge_tree_is_short(tmp_path):
    for n in range(30):
        (tmp_path / str(n)).mkdir()
        for m in range(20):
            (tmp_path / str(n) / str(m)).write_text("x")
    assert v.tree_size(tmp_path)[1] == 630
    assert v.tree_size(tmp_path, 50)[1] < 120


def test_a_closed_output_is_opened_again(tmp_path):
    body = "open('output', 'w').write('5')\nos.chmod('output', 0)\nos._exit(0)"
    lines = "\n".join("    " + line for line in body.splitlines())
    task = t.start(tmp_path, "import os\ndef compute(given):\n" + lines)
    assert task.outcome(in_time(task.wait)) == (0, "")
    assert (task.slot / "output").read_bytes() == b"5"


def test_what_is_shown_is_no_home():
    visible, _ = v.visible_paths()
    for home in v.hidden_paths():
        assert not any(home == p or home.startswith(p + "/") for p in visible)
    assert any(p.startswith(os.path.realpath(sys.base_prefix)) for p in visible)
