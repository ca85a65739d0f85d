"""SIGKILL in the middle of real traffic: nothing acknowledged is lost, nothing is done twice.

The server is the real process. The volunteers are three threads that speak the protocol with the
standard library, so it is known exactly what they were told. The server is killed after a random
number of answers, or between a request and its answer, or in the middle of a pass, or while it
starts; and started again, until the work is done. MINIGRID_KILLS says how often (20),
MINIGRID_SEED begins the random numbers.
"""

import contextlib
import gzip
import hashlib
import http.client
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import minigrid as m

ROOT = Path(m.__file__).resolve().parent
KILLS = int(os.environ.get("MINIGRID_KILLS", "20"))
SEED = int(os.environ.get("MINIGRID_SEED", "1"))
PATIENCE = 60  # seconds until something that does not end is a failure
N_WORKUNITS = 60 + 12 * KILLS
APP = '''"""quick: squares, at once."""

max_success_results, max_total_results, max_error_results = 20, 40, 20


def workunit(i):
    return {"input": i} if i < N_WORKUNITS else None


def compute(input):
    return input * input
'''
OPTIONS = dict(host="127.0.0.1", port=0, request_delay=0, min_sendwork_interval=0, purge_delay=0,
               stock=4 * N_WORKUNITS, daily_result_quota=10**6)
ERROR = 195  # exit status of a child that failed
SUCCESS, CLIENT_ERROR = int(m.Outcome.SUCCESS), int(m.Outcome.CLIENT_ERROR)


class World:
    """What the volunteers share: the server's address, what was acknowledged, when to kill."""

    def __init__(self, data):
        self.data, self.env = data, None  # `env`: of the server's process
        self.set_work(N_WORKUNITS)
        self.changed = threading.Condition()
        self.address, self.process = None, None
        self.over = False
        self.n_answers, self.kill_at, self.kill_in_flight = 0, None, False
        self.reported, self.uploaded, self.troubles = {}, {}, []

    def set_work(self, n):
        """Write the application, with so many workunits."""
        self.n_workunits = n
        (self.data.parent / "quick.py").write_text(APP.replace("N_WORKUNITS", str(n)))

    def open_to(self, address, process, kill_at=None, in_flight=False):
        """Let the volunteers know the address, and at which answer the server will die."""
        with self.changed:
            self.address, self.process = address, process
            self.n_answers, self.kill_at, self.kill_in_flight = 0, kill_at, in_flight
            self.changed.notify_all()

    def wait_for_address(self, last):
        """Return an address other than the one that has failed, or None when all is over."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.over or self.address not in (None, last), PATIENCE)
            return None if self.over else self.address

    def end(self):
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def sent(self, rng):
        """A request is on its way: kill now, if it is this one's turn."""
        if self.kill_in_flight and self.n_answers + 1 == self.kill_at:
            threading.Event().wait(rng.uniform(0, 0.006))
            self.kill()

    def answered(self):
        with self.changed:
            self.n_answers += 1
            now = self.n_answers == self.kill_at
        if now:
            self.kill()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)


class Refused(Exception):
    """The server says that it cannot do that now."""


class Volunteer(threading.Thread):
    """Fetches, uploads in one or two pieces, reports; keeps what it knows when the server dies."""

    def __init__(self, world, name, rng, may_refuse=()):
        super().__init__(name=name, daemon=True)
        self.world, self.rng, self.may_refuse = world, rng, may_refuse  # HTTP statuses
        self.n_refused = 0
        self.connection, self.address = None, None
        self.key, self.hostid, self.rpc_seqno = "", 0, 0
        self.held, self.pending = {}, {}  # name -> assignment; name -> report not acknowledged yet

    def run(self):
        try:
            while not self.world.over:
                try:
                    self.turn()
                except Refused:
                    self.n_refused += 1
                    threading.Event().wait(0.01)
                except (OSError, http.client.HTTPException):
                    self.hang_up()
        except BaseException as error:
            self.world.troubles.append(f"{self.name}: {error!r}")
        self.hang_up()

    def hang_up(self):
        if self.connection:
            self.connection.close()
        self.connection = None

    def ask(self, method, path, body=b"", **headers):
        """Send a request, return the answer. Raises OSError, HTTPException if the server died."""
        if self.connection is None:
            self.address = self.world.wait_for_address(self.address)
            if self.address is None:
                raise ConnectionError("all is over")
            self.connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        self.connection.request(method, path, body, headers)
        self.world.sent(self.rng)
        answer = self.connection.getresponse()
        content = answer.read()
        self.world.answered()
        if answer.status in self.may_refuse:
            raise Refused
        if answer.status != 200:
            raise AssertionError(f"{method} {path}: {answer.status} {content[:200]}")
        return content

    def post(self, path, value):
        return json.loads(self.ask("POST", path, json.dumps(value).encode()))

    def turn(self):
        """One request, and some of the work it brought."""
        if not self.key:
            self.key = self.post("/register", {"nickname": self.name})["authenticator"]
        self.rpc_seqno += 1
        reports = list(self.pending.values())
        reply = self.post("/scheduler", {
            "authenticator": self.key, "hostid": self.hostid, "rpc_seqno": self.rpc_seqno,
            "host_cpid": self.name, "allow_multiple_clients": True,
            "host": {"p_ncpus": 4, "p_fpops": 1e9},
            "work_req_seconds": 1 if len(self.held) < 3 else 0,
            "cpu_req_instances": self.rng.randint(1, 4), "reports": reports,
            "other_results": [name for name in self.held if name not in self.pending]})
        self.hostid = reply["hostid"]
        for name in reply["acks"]:
            report = self.pending.pop(name)
            self.held.pop(name, None)
            self.world.reported[name] = CLIENT_ERROR if report["exit_status"] else SUCCESS
        for name in reply["aborts"] + reply["aborts_if_not_started"]:
            if name not in self.pending:
                self.held.pop(name, None)
        for job in reply["assignments"]:
            self.held.setdefault(job["name"], job)
        for name, job in list(self.held.items()):
            if name not in self.pending:
                self.work(name, job)

    def work(self, name, job):
        """Compute a result and upload it, or fail."""
        if name.endswith("_0") and self.rng.random() < 0.05:  # Three hosts can replace one copy.
            self.pending[name] = {"name": name, "client_state": 3, "exit_status": ERROR,
                                  "stderr_out": "no luck"}
            return
        content = self.ask("GET", path_of(job["input"]["url"]))
        assert hashlib.sha256(content).hexdigest() == job["input"]["sha256"]
        output = json.dumps(json.loads(content) ** 2).encode()
        path = path_of(job["output"]["url"])
        there = json.loads(self.ask("GET", path))
        while not there["complete"]:
            start = there["nbytes"] % len(output)  # All there, not complete yet: once more.
            end = len(output) if start or self.rng.random() < 0.5 else (len(output) + 1) // 2
            there = json.loads(self.ask("PUT", path, output[start:end], **{
                "Authorization": f"Bearer {self.key}",
                "Content-Range": f"bytes {start}-{end - 1}/{len(output)}",
                "X-Sha256": hashlib.sha256(output).hexdigest()}))
        self.world.uploaded[name] = output
        self.pending[name] = {"name": name, "client_state": 5, "exit_status": 0,
                              "elapsed_time": 0.1}


def path_of(url):
    return re.fullmatch(r"http://[^/]+(/.*)", url)[1]


# ---- The server ----------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "data")
    yield world
    world.end()
    if world.process:
        world.process.kill()
        world.process.wait(PATIENCE)


def start(world):
    """Start the server as a person does."""
    options = [part for key, value in OPTIONS.items()
               for part in ("--" + key.replace("_", "-"), str(value))]
    with open(world.data.parent / "stderr.txt", "a") as stderr:
        world.process = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "minigrid.py"), "serve", "--data", str(world.data),
             "--apps", "quick.py", *options], cwd=world.data.parent, text=True,
            env=world.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
    return world.process


def address_of(process):
    """Return the address that a starting server prints."""
    line = next((line for line in process.stdout if "http://" in line), "")
    found = re.search(r"http://([\d.]+):(\d+)", line)
    return found and (found[1], int(found[2]))


def live_and_die(world, rng):
    """Run the server until it is killed in one of four ways; return which."""
    how = rng.choice(["answer"] * 4 + ["flight"] * 4 + ["pass"] * 3 + ["start"])
    with start(world) as process:
        guard = threading.Timer(PATIENCE, process.kill)
        guard.start()
        if how == "start":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.4))
            world.kill()
        else:
            address = address_of(process)
            assert address, (world.data.parent / "stderr.txt").read_text()
            if how == "pass":
                folder = rng.choice(["results", "results", "archive"])
                seen = footprint(world, folder)
                world.open_to(address, process)
                for _ in range(6000):  # Until the assimilator or the purger has written.
                    if footprint(world, folder) != seen:
                        break
                    threading.Event().wait(0.0005)
                threading.Event().wait(rng.choice([0, 0.0005, 0.001, 0.003, 0.01]))
                world.kill()
            else:
                world.open_to(address, process, rng.randint(1, 120), how == "flight")
        status = process.wait(PATIENCE)
        guard.cancel()
        assert guard.finished.is_set() and status == -signal.SIGKILL, (how, status)
    world.address = None
    return how


def footprint(world, folder):
    """Return the size of what only a pass makes grow."""
    return sum(path.stat().st_size for path in (world.data / folder).glob("*.jsonl*"))


def rows(world, query):
    with contextlib.closing(sqlite3.connect(world.data / "minigrid.db")) as store:
        return store.execute(query).fetchall()


def kept_uploads(world):
    """Hold that every upload that was acknowledged is there, or was reported and dealt with."""
    uploads = dict(world.uploaded)
    if not uploads:
        return
    waiting = {name for name, in rows(world, "SELECT name FROM result WHERE server_state = 4")}
    for name in waiting & set(uploads):
        assert output_of(world, f"{name}_out") == uploads[name]


def output_of(world, name):
    """Return an output, from the store or from its folder."""
    small = rows(world, f"SELECT content FROM small_file WHERE name = 'upload/{name}'")
    digits = hashlib.md5(name.encode()).hexdigest()[:2]
    return small[0][0] if small else (world.data / "upload" / digits / name).read_bytes()


# ---- The test ------------------------------------------------------------------


def test_killed_at_any_moment(world):
    rng, ways = random.Random(SEED), Counter()
    volunteers = [Volunteer(world, f"v{n}", random.Random(f"{SEED} {n}")) for n in range(3)]
    for volunteer in volunteers:
        volunteer.start()
    for _ in range(KILLS):
        ways[live_and_die(world, rng)] += 1
        assert not world.troubles, (SEED, world.troubles)
        kept_uploads(world)
    finish(world)
    for volunteer in volunteers:
        volunteer.join(PATIENCE)
    assert not world.troubles, (SEED, world.troubles)
    print(f"{sum(ways.values())} kills: {dict(ways)}; {len(world.reported)} reports acknowledged")
    everything_is_there_once(world)


def finish(world):
    """Let the last server live until all is done; stop it as a person does."""
    with start(world) as process:
        guard = threading.Timer(2 * PATIENCE, process.kill)
        guard.start()
        world.open_to(address_of(process), process)
        pause = threading.Event()
        while process.poll() is None and len(lines(world)) < world.n_workunits:
            pause.wait(0.05)
            assert not world.troubles, (SEED, world.troubles)
        assert process.poll() is None, ("not done in time", SEED, world.troubles, rows(
            world, "SELECT name, transition_time, need_validate, assimilate_state FROM workunit "
            "WHERE assimilate_state != 2"), rows(world, "SELECT name, server_state, outcome, "
                                                 "host_id FROM result WHERE server_state != 5"))
        pause.wait(1.5)  # One more pass: files are deleted, the last workunits purged.
        world.end()
        process.terminate()
        assert process.wait(PATIENCE) == 0, (world.data.parent / "stderr.txt").read_text()
        guard.cancel()


def lines(world):
    path = world.data / "results" / "quick.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def everything_is_there_once(world):
    done = subprocess.run([sys.executable, str(ROOT / "minigrid.py"), "check"], text=True,
                          cwd=world.data.parent, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0 and done.stdout.startswith("nothing wrong"), done.stdout
    assert "Traceback" not in (world.data.parent / "stderr.txt").read_text()

    answers = [json.loads(line) for line in lines(world)]
    assert sorted(a["number"] for a in answers) == list(range(world.n_workunits))
    assert all(a["answer"] == a["number"] ** 2 and not a["errors"] for a in answers)

    archived = [json.loads(line) for path in (world.data / "archive").glob("*.gz")
                for line in gzip.open(path, "rt", encoding="utf-8")]
    stored = rows(world, "SELECT name, outcome, granted_credit FROM result")
    names = [w["name"] for w in archived] + [n for n, in rows(world, "SELECT name FROM workunit")]
    assert sorted(names) == sorted(f"quick_{i}" for i in range(world.n_workunits)), "each once"
    results = stored + [(r["name"], r["outcome"], r["granted_credit"])
                        for w in archived for r in w["results"]]
    outcomes = {name: outcome for name, outcome, _ in results}
    assert len(outcomes) == len(results)
    lost = {name: (told, outcomes.get(name)) for name, told in world.reported.items()
            if outcomes.get(name) != told}
    assert not lost, f"acknowledged, and not in the store: {lost}"
    assert len(world.reported) >= 2 * world.n_workunits

    totals = dict(rows(world, "SELECT rule, n FROM firing"))
    assert totals["assimilated"] == world.n_workunits
    count = Counter(outcomes.values())
    assert totals["report success"] + totals.get("report success late", 0) == count[SUCCESS]
    assert totals.get("report error", 0) == count[CLIENT_ERROR]
    (credit,), = rows(world, "SELECT sum(total_credit) FROM host")
    assert credit == pytest.approx(sum(granted for _, _, granted in results))
