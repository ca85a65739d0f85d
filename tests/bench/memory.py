"""Fill a store with finished workunits and measure what they cost a server: it should be nothing.

    python tests/bench/memory.py [--workunits 1000000] [--small 1000] [--dir DIR]

For a small and for a large number of finished workunits (two results each, nothing purged) it
prints: seconds from the start of the server's process to the first answer of /status.json, the
resident memory of that process before and after some scheduler requests, milliseconds of a request
that gets work, of one that reports and asks, of /status.json, and of a pass with nothing to do.
"""

import argparse
import contextlib
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import minigrid as m  # noqa: E402

BATCH = 20_000
APP = '''"""bench: work for ever."""

rsc_fpops_est = 1e6


def workunit(i):
    return {"input": i} if i >= FIRST else None


def compute(input):
    return input
'''


def fill(data, n):
    """Make a store with n finished workunits and two valid results each, inserted directly."""
    m.open_project(m.Settings(data=str(data)), random.Random(1))
    assert not m.sync_apps([data.parent / "bench.py"], m.wall_clock())
    app = m.App.get()
    m.App.update(next_number=n).execute()
    users = [m.User.create(create_time=0, name=f"u{k}", authenticator=f"{k:032x}")
             for k in range(100)]
    for user in users:
        m.Host.create(user=user, create_time=0, host_cpid=f"h{user.id}")
    m.close_project()
    now = m.wall_clock()
    with contextlib.closing(sqlite3.connect(data / "minigrid.db", isolation_level=None)) as store:
        store.execute("PRAGMA synchronous = OFF")
        columns = {table: [row[1] for row in store.execute(f"PRAGMA table_info({table})")]
                   for table in ("workunit", "result")}
        for first in range(0, n, BATCH):
            store.execute("BEGIN")
            numbers = range(first, min(first + BATCH, n))
            insert(store, columns, "workunit", (workunit_row(i, app.id, now) for i in numbers))
            insert(store, columns, "result", (result_row(i, k, app.id, now)
                                              for i in numbers for k in (0, 1)))
            store.execute("COMMIT")
        for rule, count in (("assimilated", n), ("valid", 2 * n), ("report success", 2 * n)):
            store.execute("INSERT INTO firing (app_id, rule, n) VALUES (?, ?, ?)",
                          (app.id, rule, count))
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def insert(store, columns, table, rows):
    """Insert dictionaries; what a row does not say is what its model says."""
    model = {"workunit": m.Workunit, "result": m.Result}[table]
    defaults = {field.column_name: field.db_value(field.default)
                for field in model._meta.sorted_fields}
    names = [name for name in columns[table]]
    store.executemany(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
        ([row.get(name, defaults[name]) for name in names] for row in rows))


def workunit_row(i, app_id, now):
    name = f"bench_{i}"
    file = {"name": f"{name}_in", "nbytes": 7, "sha256": "0" * 64}
    return dict(id=i + 1, app_id=app_id, name=name, number=i, create_time=now - 900, mod_time=now,
                input_files=m.canonical_json([file]), transition_time=m.NEVER,
                canonical_resultid=2 * i + 1, canonical_credit=10, assimilate_state=2,
                file_delete_state=2)


def result_row(i, k, app_id, now):
    host = (i + 50 * k) % 100 + 1
    return dict(id=2 * i + k + 1, workunit_id=i + 1, app_id=app_id, name=f"bench_{i}_{k}",
                create_time=now - 900, server_state=5, outcome=1, client_state=5, validate_state=1,
                file_delete_state=2, host_id=host, user_id=host, app_version_id=1,
                sent_time=now - 800, report_deadline=now + 86400, received_time=now - 100,
                elapsed_time=5, cpu_time=5, granted_credit=10)


class Server:
    """The real server process on a directory."""

    def __init__(self, data):
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "minigrid.py"), "serve", "--data", str(data),
             "--port", "0", "--host", "127.0.0.1", "--apps", str(data.parent / "bench.py"),
             "--request-delay", "0", "--min-sendwork-interval", "0"],
            cwd=data.parent, stdout=subprocess.PIPE, text=True)
        line = next(line for line in self.process.stdout if "http://" in line)
        self.connection = http.client.HTTPConnection(
            *re.search(r"http://([\d.]+):(\d+)", line).groups(), timeout=60)
        self.get("/status.json")
        self.seconds = time.perf_counter() - self.started

    def get(self, path):
        self.connection.request("GET", path)
        return json.loads(self.connection.getresponse().read())

    def post(self, path, value):
        self.connection.request("POST", path, json.dumps(value).encode())
        answer = json.loads(self.connection.getresponse().read())
        assert "error" not in answer, answer
        return answer

    def megabytes(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1024

    def stop(self):
        self.process.terminate()
        self.process.wait()


def milliseconds(function, n):
    """Return the median time of a call."""
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1000 * sorted(times)[n // 2]


def requests(server):
    """Measure requests of a host that takes one result each time, and reports it."""
    key = server.post("/register", {"nickname": "bench"})["authenticator"]
    state = {"hostid": 0, "rpc_seqno": 0, "held": []}

    def ask(reports):
        state["rpc_seqno"] += 1
        reply = server.post("/scheduler", {
            "authenticator": key, "hostid": state["hostid"], "rpc_seqno": state["rpc_seqno"],
            "host_cpid": key, "host": {"p_ncpus": 64, "p_fpops": 1e9}, "work_req_seconds": 1e-9,
            "reports": reports})
        state["hostid"] = reply["hostid"]
        state["held"] += [job["name"] for job in reply["assignments"]]

    def report():
        names, state["held"] = state["held"][:5], state["held"][5:]
        ask([{"name": name, "client_state": 3, "exit_status": 195} for name in names])

    figures = milliseconds(lambda: ask([]), 40), milliseconds(report, 40)
    assert state["rpc_seqno"] == 80 and server.get("/status.json")["total"]["errors"] > 20
    return figures


def measure(directory, n):
    """Fill a store in a directory, run a server on it, and print the figures."""
    (directory / "bench.py").write_text(APP.replace("FIRST", str(n)))
    begin = time.perf_counter()
    fill(directory / "data", n)
    filled = time.perf_counter() - begin
    size = (directory / "data" / "minigrid.db").stat().st_size / 1e6
    server = Server(directory / "data")
    try:
        first = server.megabytes()
        work, report = requests(server)
        page = milliseconds(lambda: server.get("/status.json"), 20)
        last = server.megabytes()
    finally:
        server.stop()
    m.open_project(m.Settings(data=str(directory / "data")), random.Random(1))
    m.sync_apps([directory / "bench.py"], m.wall_clock())
    now = m.wall_clock() + 100
    m.run_pass(now)
    idle = milliseconds(lambda: m.run_pass(now), 20)
    m.close_project()
    print(f"{n:>10,} workunits: store {size:,.0f} MB (filled in {filled:.0f} s); "
          f"start {server.seconds:.2f} s; memory {first:.0f} MB, after requests {last:.0f} MB; "
          f"request {work:.1f} ms, with 5 reports {report:.1f} ms; status page {page:.1f} ms; "
          f"idle pass {idle:.1f} ms", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workunits", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--dir", help="where to make the stores (default: a temporary directory)")
    options = parser.parse_args()
    os.chdir(tempfile.gettempdir())  # Not where a setup.cfg lies.
    m.load_plugins(m.Settings.plugins.split())
    for n in (options.small, options.workunits):
        directory = Path(tempfile.mkdtemp(dir=options.dir, prefix="minigrid-bench-"))
        try:
            measure(directory, n)
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
