"""A closed world for the real BOINC client: a network of its own, a server, clients, volunteers.

The network namespace has nothing but loopback, so that no client can call home; whatever is started
in it ends with the test.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("boinc", "boinccmd", "unshare", "nsenter", "setpriv", "ip")
URL = "http://127.0.0.1:8080/"
PASSWORD = "correct horse"
PROJECT_FOLDER = "projects/127.0.0.1_8080"  # in a client's directory

CC_CONFIG = """<cc_config>
<log_flags><task>1</task><file_xfer>1</file_xfer><sched_ops>1</sched_ops>
<sched_op_debug>1</sched_op_debug><unparsed_xml>1</unparsed_xml>{flags}</log_flags>
<options><allow_multiple_clients>1</allow_multiple_clients>
<dont_contact_ref_site>1</dont_contact_ref_site><no_info_fetch>1</no_info_fetch>
<no_gpus>1</no_gpus><skip_cpu_benchmarks>1</skip_cpu_benchmarks>
<no_priority_change>1</no_priority_change><fetch_on_update>1</fetch_on_update>
<max_file_xfers>16</max_file_xfers><max_file_xfers_per_project>16</max_file_xfers_per_project>
<ncpus>{ncpus}</ncpus></options></cc_config>
"""
PREFS = """<global_preferences><run_on_batteries>1</run_on_batteries>
<run_if_user_active>1</run_if_user_active><suspend_cpu_usage>0</suspend_cpu_usage>
<max_ncpus_pct>100</max_ncpus_pct><cpu_usage_limit>100</cpu_usage_limit>
<work_buf_min_days>{days}</work_buf_min_days>
<work_buf_additional_days>0</work_buf_additional_days><disk_interval>1</disk_interval>
<disk_max_used_gb>0</disk_max_used_gb><disk_max_used_pct>100</disk_max_used_pct>
<disk_min_free_gb>0</disk_min_free_gb><ram_max_used_busy_pct>90</ram_max_used_busy_pct>
{more}</global_preferences>
"""


def missing():
    """Return which programs this machine lacks for a closed world."""
    return [name for name in PROGRAMS if not shutil.which(name)]


MARKS = [  # of tests in such a world; CI installs the programs and skips none
    pytest.mark.boinc,
    pytest.mark.skipif(bool(missing()) and not os.environ.get("CI"),
                       reason=f"needs {', '.join(missing())}")]


def until(found, seconds, what, tell=lambda: ""):
    """Wait until a condition holds and return its value; fail after twice so many seconds.

    They are those of a machine that does nothing else; here other tests run beside.
    """
    deadline = time.monotonic() + 2 * seconds
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {2 * seconds} s: {what}\n{tell()}"
        time.sleep(0.2)


class World:
    """A namespace with a server; the store is looked into from outside, read only."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.clients = []
        self.started = []  # every process: what a test leaves running ends with its world
        self.server = None

    def __enter__(self):
        own = [] if os.geteuid() == 0 else ["--map-root-user"]
        mortal = ["setpriv", "--pdeathsig", "KILL"]  # It ends with us, however we end.
        self.holder = subprocess.Popen(
            [*mortal, "unshare", "--net", *own, "sh", "-c",
             "ip link set lo up && echo ready && exec sleep 1800"], stdout=subprocess.PIPE)
        assert self.holder.stdout.readline() == b"ready\n"
        ns = f"/proc/{self.holder.pid}/ns"
        self.inside = [*mortal, "nsenter", f"--net={ns}/net"]
        if own:
            self.inside += [f"--user={ns}/user", "--preserve-credentials"]
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.kill()
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()

    def popen(self, command, name, **more):
        """Start a program inside; what it says goes to a file."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started.append(subprocess.Popen(
                self.inside + command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, **more))
        return self.started[-1]

    def run(self, command, **more):
        """Run a program inside to its end; return its exit status and what it said."""
        done = subprocess.run(self.inside + [str(c) for c in command], capture_output=True,
                              text=True, timeout=120, stdin=subprocess.DEVNULL, **more)
        return done.returncode, done.stdout + done.stderr

    def minigrid(self, *arguments):
        """Run a minigrid command inside."""
        return self.run([sys.executable, ROOT / "minigrid.py", *arguments], cwd=self.folder)

    # ---- Server

    def serve(self, *apps, settings=""):
        """Start (again) a server with these applications; wait until it answers."""
        if settings:
            (self.folder / "setup.cfg").write_text(settings)
        self.apps = apps or self.apps
        self.server = self.popen(
            [sys.executable, str(ROOT / "minigrid.py"), "serve", "--port", "8080", "--host",
             "127.0.0.1", "--data", str(self.folder / "data"), "--apps",
             " ".join(map(str, self.apps))], "server", cwd=self.folder)
        until(lambda: self.get("/status.json") or self.server.poll() is not None, 60,
              "the server answers", self.log)
        assert self.server.poll() is None, self.log()

    def stop(self, how=signal.SIGTERM):
        """Stop the server and wait for its end."""
        if self.server and self.server.poll() is None:
            os.killpg(self.server.pid, how)
            self.server.wait(60)

    def get(self, path):
        """Return a page of the server, empty if it does not answer."""
        code = ("import sys, urllib.request as u\n"
                "sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=20).read())")
        status, text = self.run([sys.executable, "-c", code, URL[:-1] + path])
        return text if status == 0 else ""

    def log(self, name="server"):
        """Return what a program has said so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-6000:]

    def kept(self, app):
        """Return what an application keeps of its answers: {number of the workunit: answer}."""
        path = self.folder / "data" / "results" / f"{app}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line["number"]: line["answer"] for line in map(json.loads, lines)}

    def rows(self, query, *values):
        """Ask the store; a row is a tuple, a single column a value."""
        path = self.folder / "data" / "minigrid.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
            found = store.execute(query, values).fetchall()
        return [row[0] if len(row) == 1 else row for row in found]

    def wait(self, query, *values, seconds=90):
        """Wait until the store answers a query with something that is true."""
        return until(lambda: [row for row in self.rows(query, *values) if row], seconds,
                     f"{query} {values}", self.tell)

    def hurry(self, query, *values, seconds=120):
        """Wait as wait() does, and have the clients ask again now and then."""
        return self.nag(lambda: [row for row in self.rows(query, *values) if row], seconds,
                        f"{query} {values}")

    def nag(self, found, seconds, what):
        """Wait as until() does, and have the clients ask again now and then.

        Without it, one that got no work stays away for 5 to 15 minutes [WIRE 15.2].
        """
        asked = 0.0

        def look():
            nonlocal asked
            if time.monotonic() - asked > 6:  # An update within 5 s of a request is lost.
                asked = time.monotonic()
                for client in self.clients:
                    client.project("update")
            return found()
        return until(look, seconds, what, self.tell)

    def tell(self):
        """Describe where everything stands, for a test that failed."""
        logs = [f"--- {c.name}\n{self.log(c.name)[-3000:]}" for c in self.clients]
        states = self.rows("SELECT name, host_id, server_state, outcome, validate_state, "
                           "exit_status, stderr_out FROM result WHERE server_state > 2 LIMIT 40")
        return "\n".join([self.log()[-2000:], *map(str, states), *logs])

    # ---- Those who compute

    def client(self, name, files=None, **more):
        """Make a client in a directory of its own, attached to a new account; start it.

        `files` (paths below its directory and texts) are there before its first start.
        """
        client = Client(self, name, **more)
        for path, text in (files or {}).items():
            client.put(path, text)
        self.clients.append(client)
        client.start()
        return client

    def clone(self, client, name):
        """Copy the directory of a client that stands still; return the client that has the copy."""
        copy = Client(self, name, client.key)
        shutil.copytree(client.folder, copy.folder, symlinks=True, dirs_exist_ok=True)
        self.clients.append(copy)
        return copy

    def volunteer(self, name, *options):
        """Start our own volunteer."""
        return self.popen([sys.executable, str(ROOT / "plugins" / "volunteer.py"), URL,
                           "--name", name, "--dir", str(self.folder / name), *options],
                          name, cwd=self.folder)


class Client:
    """A real BOINC client with a data directory of its own."""

    def __init__(self, world, name, key="", ncpus=2, days=0.01, path="", port=None, prefs="",
                 flags=""):
        self.world, self.name, self.key = world, name, key
        self.port = port or 31500 + len(world.clients)
        self.folder = world.folder / name
        self.folder.mkdir()
        self.process = None
        self.environment = {"PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"],
                            "HOME": str(self.folder), "LANG": "C.UTF-8"}
        for file, text in (("cc_config.xml", CC_CONFIG.format(ncpus=ncpus, flags=flags)),
                           ("global_prefs_override.xml", PREFS.format(days=days, more=prefs)),
                           ("gui_rpc_auth.cfg", "secret\n")):
            self.put(file, text)

    @property
    def files(self):
        """The names of the files it keeps for the project."""
        folder = self.folder / PROJECT_FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def put(self, path, text):
        """Write a file below its directory; a script may be run."""
        path = self.folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)

    def log(self):
        """Return all that it has said so far, also before it was started again."""
        return (self.world.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self):
        """Start it; make an account and attach it, the first time."""
        self.process = self.world.popen(
            ["boinc", "--dir", str(self.folder), "--gui_rpc_port", str(self.port),
             "--sched_retry_delay_min", "1", "--sched_retry_delay_max", "3",
             "--pers_retry_delay_min", "1", "--pers_retry_delay_max", "3"],
            self.name, cwd=self.folder, env=self.environment)
        until(lambda: self.command("--client_version")[0] == 0, 30, f"{self.name} starts")
        if not self.key:
            self.key = self.join()
            self.attach()

    def command(self, *arguments):
        """Give a command by boinccmd; return its exit status and what it said."""
        return self.world.run(["boinccmd", "--host", f"127.0.0.1:{self.port}", "--passwd",
                               "secret", *arguments], cwd=self.folder)

    def join(self):
        """Make an account as a person does; return its key."""
        address = f"{self.name}@example.org"
        status, text = self.command("--create_account", URL, address, PASSWORD, self.name)
        found = re.search(r"account key: (\w+)", text)
        assert found, text
        return found[1]

    def attach(self):
        """Attach to the project, and wait until it said hello."""
        status, text = self.command("--project_attach", URL, self.key)
        assert status == 0, text

    def project(self, operation):
        """Do something with the project: update, reset, detach ..."""
        return self.command("--project", URL, operation)

    def tasks(self):
        """Return what the client says of its tasks."""
        return self.command("--get_tasks")[1]

    def messages(self):
        """Return its event log."""
        return self.command("--get_messages")[1]

    def stop(self):
        """Stop it as a person does."""
        self.command("--quit")
        self.process.wait(90)

    def kill(self):
        """End it, and whatever it has started."""
        if self.process and self.process.poll() is None:
            self.command("--quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
