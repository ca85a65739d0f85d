"""Faults on the real thing: the client's process, the server's process, and trouble between them.

A small proxy (Between) stands in the middle. It knows what kind each request is, has a list of
faults for each kind, and keeps what was said. The client is the real file with shorter delays, in
a process that can be killed; so is the server. MINIGRID_VOLUNTEER_KILLS says how often the client
is killed (10), MINIGRID_SEED begins the random numbers.
"""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from volunteer_world import (FILE, PATIENCE, Signer, attend, crash, drive, folder_of, make_client,
                             next_event, v)

import minigrid as m

ROOT = Path(m.__file__).resolve().parent
KILLS = int(os.environ.get("MINIGRID_VOLUNTEER_KILLS", "10"))
SEED = int(os.environ.get("MINIGRID_SEED", "1"))
OPTIONS = dict(host="127.0.0.1", port=0, request_delay=0, min_sendwork_interval=0,
               purge_delay=10**8, daily_result_quota=10**6)
LAUNCHER = """
import functools, importlib.util, sys
spec = importlib.util.spec_from_file_location("volunteer", sys.argv[1])
v = sys.modules["volunteer"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(v)
v.DELAY_MIN, v.DELAY_MAX, v.IDLE_DELAY_MAX = 0.1, 0.4, 0.2
v.transfer_delay = v.backoff
v.MASTER_FETCH_PERIOD, v.MASTER_FETCH_TRIES = 2, 10 ** 9
v.PIECE_BYTES = 50000
v.Transport = functools.partial(v.Transport, timeout=float(sys.argv[2]))
v.main(sys.argv[3:])
"""
LONG_OUTPUT = '''"""long: gives back a text of 120,000 characters."""

min_quorum = 1


def workunit(i):
    return {"input": i} if i < %d else None


def compute(input):
    return "%%06d" %% input * 20000
'''


def eventually(condition, what="it", patience=2 * PATIENCE):
    """Wait until something is so; a bounded number of looks. Return what it was."""
    pause = threading.Event()
    for _ in range(patience * 50):
        value = condition()
        if value:
            return value
        pause.wait(0.02)
    raise AssertionError(f"{what} never became so")


# ---- Between client and server ---------------------------------------------------


def read_message(sock):
    """Read a request or an answer: (head, body), whatever has come when the other side closes."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data:
            piece = sock.recv(65536)
            if not piece:
                return data, b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        match = re.search(rb"(?im)^content-length: *(\d+)", head)
        length = int(match[1]) if match else 0
        while len(body) < length:
            piece = sock.recv(65536)
            if not piece:
                break
            body += piece
        return head + b"\r\n\r\n", body
    return data, b""


def with_body(head, body):
    """An answer with another body, its length told rightly."""
    return re.sub(rb"(?im)^content-length: *\d+", b"Content-Length: %d" % len(body), head), body


def say(status, body, *more):
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Connection: close", *more]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


ANSWERS = {
    "500": say(b"500 Oh", b"{}"),
    "503": say(b"503 Busy", b"<p>come back later</p>", b"Content-Type: text/html"),
    "garbage": b"\x00\x16\x03 this is no HTTP \xff\xfe\r\n\r\n",
    "nonsense": say(b"200 OK", b'{"acks": [[[', b"Content-Type: application/json"),
    "page": say(b"200 OK", b"<html>Welcome to our hotel</html>", b"Content-Type: text/html"),
    "empty": b"",
}
BUSY = say(b"503 Busy", b"{}", b"Retry-After: 100000")  # more than any backoff


class Between:
    """A proxy. `faults` maps kinds such as "GET download" to lists of what to do in turn:

    a key of ANSWERS, or an answer; "hang"; "half up", "half down": only half of the request or of
    the answer arrives, and the server is killed and started again; "cut": half of an answer, nobody
    dies; None: nothing; a function of (head, body) that returns those to be sent instead. `always`
    has functions that change all answers of a kind. `on_request` hears of all that comes and of its
    answers."""

    def __init__(self, restart=None):
        self.port, self.restart = None, restart or (lambda: None)
        self.faults, self.always, self.used = {}, {}, []
        self.requests, self.replies = [], []  # of the scheduler
        self.on_request = lambda kind, moment, path: None
        self.lock = threading.Lock()
        self.steady = threading.RLock()  # held while the server is started again
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def close(self):
        self.listener.close()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.handle, args=(client,), daemon=True).start()

    def handle(self, client):
        with client, contextlib.suppress(OSError):
            head, body = read_message(client)
            match = re.match(r"(\w+) /([\w.]*)(\S*)", head.decode("latin-1"))
            if match:
                kind = (match[1] + " " + match[2]).strip()
                self.exchange(client, kind, match[3], head, body)

    def exchange(self, client, kind, path, head, body):
        with self.lock:
            waiting = self.faults.get(kind)
            fault = waiting.pop(0) if waiting else None
            if fault:
                self.used.append((kind, fault))
            if kind == "POST scheduler":
                self.requests.append(json.loads(body))
        self.on_request(kind, "came", path)
        if fault == "hang":
            client.recv(1)  # Until the client gives up.
        elif isinstance(fault, bytes):
            client.sendall(fault)
        elif fault in ANSWERS:
            client.sendall(ANSWERS[fault])
        elif fault == "half up":
            with self.connect() as server:
                server.sendall((head + body)[:len(head + body) // 2])
                self.restart()
        else:
            self.pass_on(client, kind, path, head + body, fault)

    def connect(self):
        with self.steady:
            return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def pass_on(self, client, kind, path, request, fault):
        with self.connect() as server:
            server.sendall(request)
            head, body = read_message(server)
        for change in (self.always.get(kind), fault):
            if callable(change):
                head, body = change(head, body)
        self.on_request(kind, "answered", path)
        if fault == "half down":
            self.restart()
        if fault in ("half down", "cut"):
            client.sendall(head + body[:len(body) // 2])
            return
        if kind == "POST scheduler":
            with contextlib.suppress(ValueError):
                self.replies.append(json.loads(body))
        client.sendall(head + body)

    @property
    def left(self):
        return {kind: faults for kind, faults in self.faults.items() if faults}

    def reports(self):
        """All that was reported, as (name, report as text), each as often as it was said."""
        return [(r["name"], json.dumps(r, sort_keys=True))
                for request in self.requests for r in request["reports"]]


# ---- The processes ---------------------------------------------------------------


class World:
    """A server, a client and what is between them, all in one directory."""

    def __init__(self, folder, app, **options):
        self.folder, self.options = folder, dict(OPTIONS, **options)
        self.server = self.client = None
        (folder / "apps").mkdir()
        name = re.match(r'"""(\w+)', app)[1]
        (folder / "apps" / (name + ".py")).write_text(app)
        (folder / "launcher.py").write_text(LAUNCHER)
        self.answers = folder / "data" / "results" / (name + ".jsonl")
        self.between = Between(self.restart)
        self.start_server()

    def close(self):
        self.between.close()
        for process in (self.client, self.server):
            if process:
                process.kill()
                process.wait(PATIENCE)
        if self.server:
            self.server.stdout.close()

    def start_server(self):
        options = [part for key, value in self.options.items()
                   for part in ("--" + key.replace("_", "-"), str(value))]
        with open(self.folder / "server.txt", "a") as errors:
            self.server = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "minigrid.py"), "serve", "--data",
                 str(self.folder / "data"), "--apps", "apps", *options], cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
        line = next((line for line in self.server.stdout if "http://" in line), "")
        assert line, (self.folder / "server.txt").read_text()
        self.between.port = int(re.search(r":(\d+)", line.partition("://")[2])[1])

    def restart(self):
        """Kill the server as a power cut does, and start it again."""
        with self.between.steady:
            self.server.kill()
            self.server.wait(PATIENCE)
            self.server.stdout.close()
            self.start_server()

    def start_client(self, *more, timeout=20, before=(), directory=None):
        with open(self.folder / "client.txt", "a") as out:
            self.client = subprocess.Popen(
                [*before, sys.executable, str(self.folder / "launcher.py"), str(FILE), str(timeout),
                 self.between.url, "--dir", str(directory or self.folder / "client"), "--cpus", "2",
                 "--report-at-once", "--plain", *more], cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        return self.client

    def stop_client(self):
        """Stop it as a person does."""
        self.client.send_signal(signal.SIGTERM)
        assert self.client.wait(PATIENCE) == 0, self.said()

    def said(self):
        return (self.folder / "client.txt").read_text()

    def rows(self, query):
        with contextlib.closing(sqlite3.connect(self.folder / "data" / "minigrid.db")) as store:
            return store.execute(query).fetchall()

    def results(self):
        """What the server has of each result: {name: (outcome, exit status)}."""
        return {name: (m.Outcome(outcome).name, status) for name, outcome, status in self.rows(
            "SELECT name, outcome, exit_status FROM result WHERE server_state = 5")}

    def lines(self):
        """The answers that the server has settled on: {number: answer}; each must be once."""
        text = self.answers.read_text() if self.answers.exists() else ""
        answers = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
        numbers = [a["number"] for a in answers]
        assert len(set(numbers)) == len(numbers)
        return {a["number"]: a["answer"] for a in answers}

    def all_right(self, wanted):
        """Hold that all is done, once, right, by one host, and that nothing was said twice in
        different words."""
        eventually(lambda: len(self.lines()) >= len(wanted), "all that was to be done")
        assert self.lines() == wanted
        outcomes = Counter(outcome for outcome, _ in self.results().values())
        assert outcomes == {"SUCCESS": len(wanted)}, outcomes
        totals = dict(self.rows("SELECT rule, n FROM firing"))
        assert totals["report success"] == len(wanted)
        assert self.rows("SELECT count(*) FROM host") == [(1,)]
        self.said_once()
        assert "Traceback" not in self.said() + (self.folder / "server.txt").read_text()

    def noted(self, directory):
        """Hold that a killed client had noted the number of each request before it was sent."""
        sent = [r["rpc_seqno"] for r in self.between.requests if r["hostid"]]
        if sent:
            state = json.loads((directory / "client.json").read_text())
            assert state["projects"][0]["rpc_seqno"] >= max(sent)

    def said_once(self):
        words = defaultdict(set)
        for name, report in self.between.reports():
            words[name].add(report)
        assert not {name: said for name, said in words.items() if len(said) > 1}
        numbers = defaultdict(list)
        for request in self.between.requests:
            if request["hostid"]:
                numbers[request["hostid"]].append(request["rpc_seqno"])
        for sent in numbers.values():
            assert sent == sorted(set(sent)), "a number twice"


@pytest.fixture
def world(tmp_path):
    worlds = []

    def make(app, **options):
        worlds.append(World(tmp_path, app, **options))
        return worlds[0]

    yield make
    for w in worlds:
        w.close()


# ---- 1. The server stops in the middle of everything ------------------------------


def test_the_server_dies_in_the_middle_of_every_kind_of_transfer(world):
    w = world(LONG_OUTPUT % 6)
    w.between.faults = {
        "POST register": ["half up", "half down"],
        "GET": ["half down"],
        "POST scheduler": ["half up", "half down", None, "half down"],
        "GET download": ["half up", None, "half down"],
        "PUT upload": ["half up", None, "half down", None, None, "half up"],
        "GET upload": [None, "half down"]}
    planned = Counter((kind, f) for kind, fs in w.between.faults.items() for f in fs if f)
    w.start_client("--max-jobs", "6")
    assert w.client.wait(2 * PATIENCE) == 0, w.said()
    assert not w.between.left and Counter(w.between.used) == planned
    w.all_right({n: "%06d" % n * 20000 for n in range(6)})


# ---- 2. Files and signatures that are not what they should be ----------------------


MARK = '''"""mark: squares."""

min_quorum = 1
rsc_disk_bound = 1e6


def workunit(i):
    return {"input": i} if i < 8 else None


def compute(input):
    return input * input
'''
BAD_DOWNLOADS = {  # what becomes of an answer's body
    "truncated": lambda head, body: with_body(head, body[:-1]),
    "cut off": lambda head, body: (head, body[:-1]),
    "a byte too many": lambda head, body: with_body(head, body + b"x"),
    "corrupt": lambda head, body: (head, body[:-1] + bytes([body[-1] ^ 1])),
    "another": lambda head, body: with_body(head, b"open('MARK', 'w')"),
}


def altered(change):
    """A function for Between that changes the assignments of an answer of the scheduler."""
    def function(head, body):
        reply = json.loads(body)
        for given in reply["assignments"]:
            change(given)
        return with_body(head, json.dumps(reply).encode())
    return function


def test_spoilt_downloads_are_fetched_again_or_the_job_fails(world):
    """Nothing runs that is not what was announced, not even once; without a sandbox, so that it
    could leave its mark."""
    w = world(MARK)
    mark = w.folder / "mark"
    spoilt = [lambda head, body, change=change: change(head, body.replace(b"MARK", b""))
              for change in BAD_DOWNLOADS.values()]
    evil = ("open(%r, 'w').close()\n" % str(mark)).encode()
    hopeless = set()

    def spoil(head, body):  # The input of number 5 never comes as it should.
        if body == b"5":
            hopeless.add(body)
            return head, b"6"
        return head, body

    w.between.faults = {"GET download": [lambda h, b: with_body(h, evil), *spoilt]}
    w.between.always = {"GET download": spoil}
    w.start_client("--max-jobs", "8", "--no-sandbox")
    assert w.client.wait(PATIENCE) == 0, w.said()
    assert not w.between.left and hopeless and not mark.exists()
    results = w.results()
    assert results.pop("mark_5_0") == ("CLIENT_ERROR", v.EXIT_DOWNLOAD)
    assert set(results.values()) == {("SUCCESS", 0)} and len(results) == 7
    eventually(lambda: len(w.lines()) == 7)
    assert w.lines() == {n: n * n for n in range(8) if n != 5}
    w.said_once()


def test_what_is_not_signed_rightly_is_not_run(world):
    w = world(MARK)
    mark = w.folder / "mark"
    evil = ("open(%r, 'w').close()\ndef compute(x): return x * x\n" % str(mark)).encode()
    reasons = {"mark_1_0": lambda f: f.update(signature=f["signature"][:-1] + (
                       "1" if f["signature"][-1] == "0" else "0")),
               "mark_2_0": lambda f: f.pop("signature"),
               "mark_3_0": lambda f: f.update(sha256=v.hashlib.sha256(evil).hexdigest(),
                                              nbytes=len(evil), name="other.py"),
               "mark_4_0": lambda f: f.update(signature=f["signature"][::-1])}

    def change(given):
        if given["name"] in reasons:
            reasons[given["name"]](given["files"][0])

    def serve(head, body):
        return with_body(say(b"200 OK", b"")[:-4] + b"\r\n\r\n", evil) if b"404" in head[:20] \
            else (head, body)

    w.between.always = {"POST scheduler": altered(change), "GET download": serve}
    w.start_client("--max-jobs", "8", "--no-sandbox")
    assert w.client.wait(PATIENCE) == 0, w.said()
    assert not mark.exists()
    results = w.results()
    assert {results.pop(name) for name in reasons} == {("CLIENT_ERROR", v.EXIT_DOWNLOAD)}
    assert set(results.values()) == {("SUCCESS", 0)} and len(results) == 4
    assert w.said().count("is not signed by the project as what it shall be used for") == 4
    w.said_once()


def test_another_key_stops_all_new_work_and_loses_nothing(world):
    """Somebody in between shows a key of his own: nothing of what he says counts. Afterwards the
    jobs that are here are finished and reported as if nothing had been."""
    w = world(MARK)
    other = Signer()

    def change(head, body):
        reply = json.loads(body)
        reply["signing_key"], reply["hostid"] = other.text, 666
        reply["acks"] = [r["name"] for request in w.between.requests for r in request["reports"]]
        reply["assignments"] = [other.sign_files(a) for a in reply["assignments"]]
        return with_body(head, json.dumps(reply).encode())

    w.between.faults = {"POST scheduler": [None, change]}
    w.start_client()
    assert w.client.wait(PATIENCE) == 1, w.said()
    assert "shows another signing key than before" in w.said()
    w.start_client("--max-jobs", "8")
    eventually(lambda: len(w.results()) == 8, "the end of all jobs")
    w.stop_client()
    w.all_right({n: n * n for n in range(8)})


# ---- 3. Nonsense, errors, silence --------------------------------------------------


KINDS = ["POST register", "GET", "POST scheduler", "GET download", "GET upload", "PUT upload"]


def test_errors_garbage_and_silence_in_every_kind_of_request(world):
    w = world(LONG_OUTPUT % 8)
    faults = [*ANSWERS, "hang", "cut"]
    # Two failures of the scheduler in a row have the front page read; a reply lost in the middle
    # must not be the last of its kind, or nobody would ask again.
    w.between.faults = {kind: [f for fault in faults for f in (fault, None)] for kind in KINDS[3:]}
    w.between.faults.update({kind: list(faults) for kind in KINDS[:3]})
    planned = Counter((kind, f) for kind, fs in w.between.faults.items() for f in fs if f)
    w.start_client("--max-jobs", "8", timeout=2)
    assert w.client.wait(2 * PATIENCE) == 0, w.said()
    missed = planned - Counter(w.between.used)
    assert not missed, missed
    w.all_right({n: "%06d" % n * 20000 for n in range(8)})


@pytest.mark.parametrize("kind", KINDS)
def test_who_says_when_to_come_back_is_left_in_peace_until_then(tmp_path, server, clock, kind):
    between = Between()
    between.port = server.httpd.server_port
    server.url = between.url
    server.add(1, b"def compute(input):\n    return 'x' * 1000\n")
    client = make_client(tmp_path, server, n_cpus=1)
    came = []
    between.on_request = lambda what, moment, path: came.append((what, path, clock.now)) \
        if moment == "came" else None
    between.faults = {kind: [BUSY]}
    if kind == "GET":
        between.faults["POST register"] = ["500"] * v.MASTER_FETCH_PERIOD
    if kind == "GET upload":  # Asked only if an upload was begun before.
        between.faults["PUT upload"] = ["500"]
    drive(client, clock, lambda: server.store)
    between.close()
    _, path, first = next(entry for entry in came if entry[0] == kind)
    if kind.endswith(("load")):  # Other files, and the scheduler, may be asked.
        again = [at for _, other, at in came if other == path and at > first]
    else:
        again = [at for _, _, at in came if at > first]
    assert min(again) - first >= min(v.RETRY_AFTER_MAX, 100000)
    assert {r["exit_status"] for r in server.store.values()} == {0}


# ---- 4. A full disk ----------------------------------------------------------------


def can_mount():
    done = subprocess.run(["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"],
                          capture_output=True) if shutil.which("unshare") else None
    return bool(done) and done.returncode == 0


class SmallDisk:
    """A file system of a few megabytes, in a mount namespace that a process of ours holds."""

    def __init__(self, folder, nbytes):
        self.folder = folder
        folder.mkdir()
        self.holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo there '
             "&& exec cat", "sh", str(nbytes), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.holder.stdout.readline() == b"there\n"
        self.inside = Path("/proc/%d/root" % self.holder.pid + str(folder))
        self.before = ["nsenter", "-m", "-t", str(self.holder.pid), "-w" + str(folder.parent)]

    def fill(self):
        with contextlib.suppress(OSError), open(self.inside / "ballast", "ab", 0) as f:
            while f.write(bytes(4096)):
                pass

    def free(self):
        (self.inside / "ballast").unlink()

    def close(self):
        self.holder.stdin.close()
        self.holder.wait(PATIENCE)
        self.holder.stdout.close()


@pytest.fixture
def disk(tmp_path):
    if not can_mount():
        pytest.skip("making a small file system needs root")
    disk = SmallDisk(tmp_path / "disk", 8 << 20)
    yield disk
    disk.close()


FILLER = '''"""filler: writes a file, on a disk that gets full while it runs."""

min_quorum = 1
rsc_disk_bound = 5e6
FOLDER = %r


def workunit(i):
    return {"input": [i, "x" * 200000]} if i < 3 else None


def compute(input, checkpoint):
    import os, time
    if checkpoint.state is None:
        checkpoint(1)
        if input[0] == 1:
            open(os.path.join(FOLDER, "ready"), "w").close()
            while not os.path.exists(os.path.join(FOLDER, "full")):
                time.sleep(0.01)
    else:
        open(os.path.join(FOLDER, "again"), "a").close()
    with open("scratch", "wb") as f:
        f.write(bytes(2000000))
    return input[0]
'''


def test_a_full_disk_stops_everything_and_spoils_nothing(world, disk, tmp_path):
    w = world(FILLER % str(tmp_path))
    directory = disk.folder / "client"
    start = [("--max-jobs", "3", "--no-sandbox", "--cpus", "1")]

    def fill_once(kind, moment, path):
        if (kind, moment) == ("GET download", "answered") and not full:
            full.append(1)
            disk.fill()

    full = []
    w.between.on_request = fill_once
    w.start_client(*start[0], before=disk.before, directory=directory)
    eventually(lambda: "disk is full: no room for" in w.said(), "a download without room")
    w.between.on_request = lambda kind, moment, path: None
    disk.free()

    eventually((tmp_path / "ready").exists, "a job that runs")
    disk.fill()
    (tmp_path / "full").touch()
    eventually(lambda: "filler_1_0: stopped, for this computer's disk is full" in w.said())
    assert not (tmp_path / "again").exists()
    disk.free()
    eventually((tmp_path / "again").exists, "the job that goes on from its checkpoint")

    assert w.client.wait(PATIENCE) == 0, w.said()
    assert "there is room on the disk again" in w.said()
    w.all_right({n: n for n in range(3)})


def test_nothing_is_reported_that_cannot_be_kept(world, disk):
    """The disk gets full while a finished output is on its way, and the client is killed then: its
    number must not be used twice, and the output not be computed twice."""
    w = world(MARK)
    directory = disk.folder / "client"
    once = threading.Event()

    def fill_once(kind, moment, path):
        if kind == "PUT upload" and moment == "came":
            once.set()
            disk.fill()

    def stuck():
        if once.is_set():
            disk.fill()  # The slot of an ended job may have made some room.
        return "nothing is asked or reported until" in w.said()

    w.between.on_request = fill_once
    w.start_client("--cpus", "1", before=disk.before, directory=directory)
    eventually(stuck, "a state not written")
    w.between.on_request = lambda kind, moment, path: None
    log = len((disk.inside / "client" / "log.txt").read_bytes())
    w.client.kill()
    w.client.wait(PATIENCE)
    said = w.said()
    finished = set(re.findall(r"(mark_\d+_0): finished", said))
    reported = " ".join(re.findall("reported .*", said))
    unreported = finished - set(re.findall(r"mark_\d+_0", reported))
    kept = {path.name for path in (disk.inside / "client").glob("projects/*/outputs/*")}
    assert finished and kept >= unreported
    assert said.count("there is room on the disk again") <= 1, said
    w.noted(disk.inside / "client")

    w.start_client("--cpus", "1", before=disk.before, directory=directory)
    assert w.client.wait(PATIENCE) == 1 and "make room and start again" in w.said()
    disk.free()
    w.start_client("--cpus", "1", before=disk.before, directory=directory)
    eventually(lambda: len(w.results()) == 8, "the end of all jobs")
    w.stop_client()
    assert len((disk.inside / "client" / "log.txt").read_bytes()) > log
    w.all_right({n: n * n for n in range(8)})


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_request_waits_until_it_is_noted(tmp_path, server, clock, monkeypatch):
    """Registration, too: who forgets it would join twice."""
    server.add(1)
    client = make_client(tmp_path, server)
    for n_before in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(v, "save_state", full)
            if n_before:
                client.wait(PATIENCE)  # for the answer to the registration
            for _ in range(20):
                client.step(clock.now)
                clock.now += 100
            assert len(server.registered) == n_before and not server.requests
        client.step(clock.now)
    drive(client, clock, lambda: server.store)
    errors = client.voice.errors.getvalue()
    assert errors.count("cannot write to") == 2  # Once each time, though it was tried often.
    assert client.voice.stream.getvalue().count("there is room on the disk again") == 2
    assert not client.projects[0].n_rpc_failures


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_half(tmp_path, monkeypatch):
    path = tmp_path / "client.json"
    v.write_safely(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            v.write_safely(path, b"new")
    assert [f.name for f in tmp_path.iterdir()] == ["client.json"]
    assert path.read_bytes() == b"old"


GREEDY = b"""
def compute(input, checkpoint):
    checkpoint((checkpoint.state or 0) + 1)
    open("scratch", "w").close()
    raise OSError(28, "No space left on device")
"""


@pytest.mark.parametrize("until", ["for ever", "soon"])
def test_a_job_without_room_waits_but_not_for_ever(tmp_path, server, clock, monkeypatch, until):
    """What fills the disk is what the job itself has written: it goes first."""
    again = b"if (checkpoint.state or 0) < 2:\n        raise"
    source = GREEDY if until == "for ever" else GREEDY.replace(b"raise", again)
    server.add(1, source + b"    return 7\n")
    client = make_client(tmp_path, server)
    space = shutil.disk_usage(tmp_path)

    def usage(path):
        scratch = any((client.directory / "slots").glob("*/scratch"))
        return space._replace(free=v.ROOM_MIN - scratch)

    monkeypatch.setattr(v.shutil, "disk_usage", usage)
    monkeypatch.setattr(v, "disk_room", lambda folder: 1e9)  # Else nothing would be fetched.
    drive(client, clock, lambda: server.store)
    said = client.voice.errors.getvalue()
    assert said.count("it goes on when there is room") == (
        v.PUT_OFF_MAX if until == "for ever" else 2)
    status, = [report["exit_status"] for report in server.store.values()]
    assert status == (v.EXIT_DISK if until == "for ever" else 0)


def test_without_room_nothing_is_started(tmp_path, server, clock, monkeypatch):
    server.add(1)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: [j for j in client.jobs if j.client_state == v.C.DOWNLOADING])
    space = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(v.shutil, "disk_usage", lambda path: space._replace(free=v.ROOM_MIN - 1))
        drive(client, clock, lambda: "no job is started" in client.voice.errors.getvalue())
        for _ in range(9):
            client.step(clock.now)
        assert not client.tasks and not client.jobs[0].over
    drive(client, clock, lambda: server.store)


def test_no_room_at_the_start_of_a_job_is_not_its_fault(tmp_path, server, clock, monkeypatch):
    server.add(1)
    client = make_client(tmp_path, server)
    real, tries = shutil.copyfile, []
    monkeypatch.setattr(v.shutil, "copyfile", lambda *names: tries.append(1) or (
        full() if len(tries) < 3 else real(*names)))
    drive(client, clock, lambda: server.store)
    assert {report["exit_status"] for report in server.store.values()} == {0}


def test_our_own_disk_is_tried_again_soon(tmp_path, server, clock):
    server.add(1)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.jobs)
    trouble = v.LocalError("x", OSError(errno.ENOSPC, ""))
    for n in range(9):
        client._failed_transfer(("get", ".", "x"), client.jobs, trouble, False)
        assert 0 < client.retries["get", ".", "x"].at - client.now <= v.PUT_OFF_SECONDS


# ---- 5. The client is killed at any moment -----------------------------------------


STEPS = 8
N_JOBS = 3 * KILLS + 4
STEPPER = '''"""step: eight steps with a checkpoint after each; all is noted in a file outside."""

min_quorum = 1
rsc_fpops_est = 3e7
delay_bound = 86400


def workunit(i):
    return {"input": i} if i < %d else None


def compute(input, progress, checkpoint):
    import os, time

    def note(*words):
        try:
            f = os.open(%r, os.O_WRONLY | os.O_APPEND)
        except OSError:
            return  # In a sandbox.
        os.write(f, ("%%d %%s %%d\\n" %% (input, *words)).encode())
        os.close(f)

    state = checkpoint.state or {"number": input, "step": 0, "starts": []}
    assert state["number"] == input, "the checkpoint of another job"
    state["starts"].append(state["step"])
    while state["step"] < %d:
        note("begins", state["step"])
        time.sleep(0.1)
        state["step"] += 1
        checkpoint(state)
        note("kept", state["step"])
        progress(state["step"] / %d)
    return state
'''


def job_processes(folder):
    """The processes of the jobs of a client's directory: their home is a slot of it."""
    mark = ("HOME=%s/slots/" % folder).encode()
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if mark in Path("/proc", entry, "environ").read_bytes():
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    found.add((int(entry), stat[19]))  # with its start: numbers are used again
    return found


class Killer:
    """Kills the client: after a while, or at one of its requests, before or after the answer."""

    def __init__(self, w, rng):
        self.w, self.rng, self.n = w, rng, 0
        self.at = None
        w.between.on_request = self.hear

    def hear(self, kind, moment, path):
        with self.w.between.lock:
            self.n += self.at is not None
            now = self.n == self.at
        if now:
            self.w.client.kill()

    def kill(self, how):
        """Wait for the moment, another kind than last time; return which it was."""
        self.n, how = 0, "time" if how == "request" else "request"
        self.at = self.rng.randint(1, 16) if how == "request" else None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.w.client.wait(self.rng.uniform(0.1, 2.2) if how == "time" else 3)
        self.at = None
        self.w.client.kill()
        assert self.w.client.wait(PATIENCE) == -signal.SIGKILL, self.w.said()
        return how


def check_steps(text, finished):
    """Hold that no step was done again after its checkpoint, and none of a job that was finished;
    `finished` are pairs: number, length of the text by then."""
    kept = defaultdict(int)
    for line in text.splitlines():
        number, what, step = line.split()
        if what == "begins":
            assert int(step) >= kept[number], f"lost: {line}, though {kept[number]} were kept"
        else:
            kept[number] = int(step)
    for number, length in finished:
        assert not re.search(rf"(?m)^{number} begins", text[length:]), f"{number} was finished"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked for in /proc")
def test_killed_at_any_moment(world, tmp_path):
    notes, folder = tmp_path / "notes.txt", tmp_path / "client"
    notes.touch(mode=0o666)
    w = world(STEPPER % (N_JOBS, str(notes), STEPS, STEPS))
    rng, ways, finished, how = random.Random(SEED), Counter(), [], ""
    killer = Killer(w, rng)
    for _ in range(KILLS):
        w.start_client(*([] if rng.random() < 0.3 else ["--no-sandbox"]))
        how = killer.kill(how)
        ways[how] += 1
        left = job_processes(folder)
        w.noted(folder)
        length = len(notes.read_text())
        finished += [(path.name.split("_")[1], length)
                     for path in folder.glob("projects/*/outputs/*")]
        if rng.random() < 0.5:  # Else the next one starts while they still may be there.
            eventually(lambda: not left & job_processes(folder), "the end of a job's process")
    w.start_client("--no-sandbox")
    eventually(lambda: not left & job_processes(folder), "the end of a job's process")
    eventually(lambda: len(w.results()) == N_JOBS, "the end of all jobs", 5 * PATIENCE)
    w.stop_client()
    assert not job_processes(folder)
    print(f"{dict(ways)}; {len(finished)} found finished; "
          f"{len(w.between.requests)} requests, {len(w.between.reports())} reports")

    failures = [line for line in w.said().splitlines() if "failed after" in line]
    assert not failures, failures
    check_steps(notes.read_text(), finished)
    eventually(lambda: len(w.lines()) == N_JOBS, "the last answer")
    answers = w.lines()
    for number, answer in answers.items():
        assert answer["number"] == number and answer["step"] == STEPS
        assert answer["starts"] == sorted(set(answer["starts"]))
    w.all_right(answers)
    assert sorted(answers) == list(range(N_JOBS))
    assert len({request["host_cpid"] for request in w.between.requests}) == 1


# ---- 5a. What a killed client had no time to note, moment by moment


@pytest.mark.skipif(os.name == "nt", reason="no keeper holds the slot there")
def test_no_job_is_started_beside_what_a_killed_client_has_left(tmp_path, server, clock):
    """Two processes would write one checkpoint."""
    server.add(1, WAITING)
    first = make_client(tmp_path, server)
    drive(first, clock, lambda: first.tasks)
    slot = first.directory / "slots" / "0"
    eventually((slot / "checkpoint.json").exists, "a checkpoint")
    first.dirty = first.urgent = True
    first._save()
    again = make_client(tmp_path, server)
    for _ in range(3):
        again.step(clock.now)
        clock.now = next_event(again, clock.now)
    assert not again.tasks and again.jobs[0].client_state == v.C.READY
    assert (slot / "checkpoint.json").exists()
    crash(first)
    drive(again, clock, lambda: server.store)
    assert bytes(server.uploads["wu_1_0"]) == b'"half way"'


def until_kept(client, clock, state):
    """Turn the client until a job is in a state, and that is kept; return what is kept."""
    drive(client, clock, lambda: [job for job in client.jobs if job.client_state == state])
    client.dirty = client.urgent = True
    client._save()
    return (client.directory / "client.json").read_bytes()


def test_an_output_that_is_there_is_not_computed_again(tmp_path, server, clock):
    """Killed between the move of the output and the note of it."""
    server.add(1)
    server.trouble = {"PUT upload": [500] * 99}
    client = make_client(tmp_path, server)
    kept = until_kept(client, clock, v.C.READY)
    drive(client, clock, lambda: [j for j in client.jobs if j.client_state == v.C.UPLOADING])
    crash(client)
    (client.directory / "client.json").write_bytes(kept)
    server.trouble = {}
    again = make_client(tmp_path, server)
    assert again.jobs[0].client_state == v.C.UPLOADING
    drive(again, clock, lambda: server.store or again.tasks)
    assert not again.tasks and {r["exit_status"] for r in server.store.values()} == {0}
    assert bytes(server.uploads["wu_1_0"]) == b"1"


WAITING = b"""
def compute(input, checkpoint):
    if checkpoint.state is None:
        checkpoint("half way")
        import threading
        threading.Event().wait()
    return checkpoint.state
"""


def test_a_checkpoint_is_found_though_its_job_was_not_noted_as_started(tmp_path, server, clock):
    server.add(1, WAITING)
    client = make_client(tmp_path, server)
    kept = until_kept(client, clock, v.C.READY)
    drive(client, clock, lambda: client.tasks)
    slot = client.directory / "slots" / "0"
    eventually((slot / "checkpoint.json").exists, "a checkpoint")
    crash(client)
    (client.directory / "client.json").write_bytes(
        kept.replace(b'"slot": 0', b'"slot": -1'))
    attend(make_client(tmp_path, server), clock, lambda: server.store)  # It ends, in any case.
    assert bytes(server.uploads["wu_1_0"]) == b'"half way"'


def test_after_a_power_cut_an_output_is_not_trusted(tmp_path, server, clock):
    """It may be there without its content; the job goes on from what was flushed."""
    server.add(1)
    server.trouble = {"PUT upload": [500] * 99}
    client = make_client(tmp_path, server)
    kept = until_kept(client, clock, v.C.READY)
    drive(client, clock, lambda: [j for j in client.jobs if j.client_state == v.C.UPLOADING])
    crash(client)
    output, = folder_of(tmp_path).glob("outputs/*")
    output.write_bytes(b"")
    os.utime(output, (1, 1))
    (client.directory / "client.json").write_bytes(kept)
    server.trouble = {}
    drive(make_client(tmp_path, server), clock, lambda: server.store)
    assert bytes(server.uploads["wu_1_0"]) == b"1"


def test_an_upload_that_was_taken_is_not_missed(tmp_path, server, clock):
    """Killed between the server's last word and the note of it: the file must still be there."""
    server.add(1)
    client = make_client(tmp_path, server)
    kept = until_kept(client, clock, v.C.UPLOADING)
    drive(client, clock, lambda: [j for j in client.jobs if j.client_state == v.C.UPLOADED])
    crash(client)
    server.requests.clear(), server.store.clear()
    (client.directory / "client.json").write_bytes(kept)
    again = make_client(tmp_path, server)
    drive(again, clock, lambda: server.store)
    assert {(r["client_state"], r["exit_status"]) for r in server.store.values()} == {
        (v.C.UPLOADED, 0)}
    drive(again, clock, lambda: not again.jobs)
    assert not list(folder_of(tmp_path).glob("outputs/*"))


def kept_jobs(tmp_path, server, *jobs, notes):
    """A client that finds jobs, and directories with notes whose they are."""
    client = make_client(tmp_path, server)
    for job in jobs:
        client.projects[0].adopt(job)
    for n, name in notes.items():
        slot = client.directory / "slots" / str(n)
        slot.mkdir()
        (slot / "checkpoint.json").write_text("{}")
        owner = client.projects[0].folder + "\n" + name
        slot.with_name(slot.name + ".job").write_text(owner)
    client.dirty = client.urgent = True
    client._save()
    again = make_client(tmp_path, server)
    there = {int(path.name) for path in (client.directory / "slots").iterdir()
             if path.suffix != ".job"}
    left = {int(path.stem) for path in (client.directory / "slots").glob("*.job")}
    assert left <= there
    return {job.name: job.slot for job in again.jobs}, there


SLOTS = {  # (slots of the jobs as kept, notes beside the slots): (slots then, directories left)
    "as noted": (dict(a=0, b=1), {0: "a", 1: "b"}, dict(a=0, b=1), {0, 1}),
    "started, and not kept": (dict(a=0, b=-1), {0: "a", 1: "b"}, dict(a=0, b=1), {0, 1}),
    "another came after it": (dict(a=0, b=-1), {0: "b"}, dict(a=-1, b=0), {0}),
    "they have changed places": (dict(a=0, b=1), {0: "b", 1: "a"}, dict(a=1, b=0), {0, 1}),
    "of a job that is gone": (dict(a=0), {0: "x"}, dict(a=-1), set()),
    "nobody's": (dict(a=-1), {0: "x", 3: "y"}, dict(a=-1), set()),
    "over": (dict(over=0, b=-1), {0: "b"}, dict(over=-1, b=0), {0}),
}


@pytest.mark.parametrize("case", SLOTS)
def test_no_job_goes_on_from_the_checkpoint_of_another(tmp_path, server, case):
    kept, notes, then, there = SLOTS[case]
    jobs = [v.Job(name, client_state=v.C.UPLOADED if name == "over" else v.C.READY,
                  over=name == "over", slot=slot, report_deadline=2e9)
            for name, slot in kept.items()]
    assert kept_jobs(tmp_path, server, *jobs, notes=notes) == (then, there)


def test_a_slot_without_a_note_is_that_of_the_state(tmp_path, server):
    """As an older client has left it."""
    client = make_client(tmp_path, server)
    client.projects[0].adopt(v.Job("a", client_state=v.C.READY, slot=0, report_deadline=2e9))
    (client.directory / "slots" / "0").mkdir()
    client._save()
    again = make_client(tmp_path, server)
    assert again.jobs[0].slot == 0 and (again.directory / "slots" / "0").is_dir()
