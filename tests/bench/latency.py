"""How long a request takes while passes have 100,000 due workunits to work on."""

import contextlib
import sqlite3
import tempfile
import time
from pathlib import Path

import serving
import stores

COMMITS = 300


def latency(options):
    """Time of a request, one after the other, with nothing due and with very much due."""
    supply = (int(1000 * options.seconds), stores.UNSENT)
    for connections in options.latency_connections:
        for due in (0, options.due):
            with serving.project(options.dir, [(due, stores.REPORTED), supply]) as folder, \
                    serving.Server(folder, *options.profile) as server:
                figures = serving.load(
                    server, protocol="xml", connections=connections, warm_up=50,
                    seconds=options.seconds, outputs=str(folder / "data" / "upload"))
                done = server.firings("assimilated")
            yield dict(bench="latency", connections=connections, due=due,
                       still_due=max(due - done, 0), **figures, **bare_commits(options.dir))


def bare_commits(directory):
    """Return how long commits of one row take without a server: no request can be faster."""
    with tempfile.TemporaryDirectory(dir=directory) as folder, contextlib.closing(
            sqlite3.connect(Path(folder) / "bare.db", isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.execute("PRAGMA synchronous = FULL")
        store.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)")
        times = []
        for n in range(COMMITS):
            begun = time.perf_counter()
            store.execute("INSERT INTO t (n) VALUES (?)", (n,))
            times.append(1e3 * (time.perf_counter() - begun))
    times.sort()
    return dict(commit_median_ms=times[COMMITS // 2], commit_p99_ms=times[COMMITS * 99 // 100])
