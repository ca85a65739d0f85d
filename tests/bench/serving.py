"""A project for the benches, the real server process on it, and the load that it gets."""

import contextlib
import functools
import http.client
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import stores

import minigrid as m

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOSTS = [(f"{k:032x}", f"{k + (1 << 100):032x}") for k in range(400)]  # key and host_cpid
PAUSE_SECONDS = 0.3  # what no scheduler of a system does to an idle thread
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, in a second
APP = '''"""bench: work that is done at once."""

rsc_fpops_est = 1e9
rsc_disk_bound = 1e6
min_quorum = {quorum}


def workunit(i):
    return {{"input": i}} if i < {last} else None


def compute(input):
    return 1
'''
SETTINGS = dict(host="127.0.0.1", port=0, data="data", apps="bench.py", request_delay=0,
                min_sendwork_interval=0, purge_delay=0, daily_result_quota=1_000_000, backups=0)


@contextlib.contextmanager
def project(directory, filled=(), quorum=1, last=0, **settings):
    """Make a project with users and their hosts; yield its folder, remove it afterwards.

    `filled` is [(n, kind)] of stores.fill(), in the order of the workunits' numbers; `last` is the
    number at which the application has no more.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix="minigrid-bench-") as name:
        folder, settings = Path(name), {**SETTINGS, **settings}
        (folder / "bench.py").write_text(APP.format(quorum=quorum, last=last))
        (folder / "setup.cfg").write_text("[minigrid]\n" + "".join(
            f"{key} = {value}\n" for key, value in settings.items()))
        load_plugins()
        m.open_project(m.Settings(data=str(folder / "data")), random.Random(1))
        with m.db.atomic():
            for key, cpid in HOSTS:
                user = m.User.create(name=f"user {int(key, 16)}", authenticator=key, create_time=0)
                m.Host.create(user=user, create_time=0, host_cpid=cpid)
        m.close_project()
        shutil.copytree(Path(made_keys().name, "keys"), folder / "data" / "keys")
        first = 0
        for n, kind in filled:
            stores.fill(folder, first, n, kind)
            first += n
        os.sync()  # Or the server's first commits would wait for all that was written here.
        yield folder


@functools.lru_cache(maxsize=None)
def made_keys():
    """Draw signing keys once for all projects: it takes seconds, now more, now less of them."""
    folder, keys = tempfile.TemporaryDirectory(), sys.modules["minigrid_plugin_keys"]
    for scheme in keys.SCHEMES:
        keys.open_keys(Path(folder.name) / "keys", scheme)
    return folder


def load_plugins():
    """Load the plugins that a server loads, once."""
    if not m.plugins:
        m.load_plugins(m.Settings.plugins.split())


class Watched:
    """A process that works on a project, and what can be seen of it from outside."""

    def __init__(self, folder, process):
        self.folder, self.process = folder, process

    def cpu_seconds(self):
        """Return the processor time of all its threads until now."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / TICKS

    def megabytes(self):
        """Return its resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1024

    def ask(self, sql, *values):
        """Read one number from its store; None while there is none."""
        try:
            uri = f"file:{self.folder}/data/minigrid.db?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as store:
                row = store.execute(sql, values).fetchone()
                return row and row[0]
        except sqlite3.OperationalError:
            return None  # It is being made.

    def firings(self, rule):
        """Return how often a rule has fired."""
        return self.ask("SELECT sum(n) FROM firing WHERE rule = ?", rule) or 0

    def all_firings(self):
        """Return how often each rule has fired, as a text."""
        return self.ask("SELECT group_concat(rule || ': ' || n, ', ') FROM firing")

    def wait_for(self, condition, seconds=600, step=0.02):
        """Wait until a condition holds; return when it did."""
        end = time.perf_counter() + seconds
        while not condition():
            if time.perf_counter() > end:
                raise RuntimeError(f"waited in vain; these rules have fired: {self.all_firings()}")
            time.sleep(step)
        return time.perf_counter()


class Server(Watched):
    """The real server process on a project, as a person starts it; a context manager."""

    def __init__(self, folder, *changes):
        self.started = time.perf_counter()
        program = [str(HERE / "launch.py"), *changes] if changes else [str(ROOT / "minigrid.py")]
        super().__init__(folder, subprocess.Popen(
            [sys.executable, *program, "serve"], cwd=folder, stdout=subprocess.PIPE, text=True))

    def __enter__(self):
        for line in self.process.stdout:
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(match[1])
                return self
        raise RuntimeError("the server did not start")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=120)

    def get(self, path):
        """Return an answer and the seconds it took."""
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read(), time.perf_counter() - begun


class Pauses(threading.Thread):
    """Notes when the whole machine stood still, as virtual ones do for seconds; a context manager.

    That is no server's fault: rates are reckoned without that time, and it is told.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.found = threading.Event(), []

    def run(self):
        last = time.perf_counter()
        while not self.over.wait(0.02):
            now = time.perf_counter()
            if now - last > PAUSE_SECONDS:
                self.found.append((last, now))
            last = now

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def within(self, begun, ended):
        """Return for how many seconds between two times the machine stood still."""
        return sum(max(min(b, ended) - max(a, begun), 0) for a, b in self.found)


def load(server, **spec):
    """Let the load generator work in a process of its own; return its figures and the server's."""
    with Pauses() as pauses:
        figures, cpu_seconds = run_load(server, spec)
    paused = pauses.within(figures["begun"], figures["ended"])
    seconds = figures["ended"] - figures["begun"] - paused
    return {**figures, "seconds": seconds, "paused_seconds": paused,
            "per_second": figures["requests"] / seconds,
            "jobs_per_second": figures["jobs_given"] / seconds,
            "generator_cores": figures["generator_cpu"] / seconds,
            "server_cores": cpu_seconds / seconds,
            "cpu_ms": 1e3 * cpu_seconds / max(figures["requests"], 1)}


def run_load(server, spec):
    """Run the load generator; return its figures, and the server's processor time meanwhile."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "load.py")], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        process.stdin.write(json.dumps({"port": server.port, "hosts": HOSTS, **spec}))
        process.stdin.close()
        heard, cpu = [], {}
        for line in process.stderr:  # "begun" and "ended" as it happens, or a traceback
            cpu[line.strip()] = server.cpu_seconds()
            heard.append(line)
        text = process.stdout.read()
    if process.returncode:
        raise RuntimeError("the load generator failed:\n" + "".join(heard[-20:]))
    return json.loads(text), cpu["ended"] - cpu["begun"]
