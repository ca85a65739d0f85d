"""How much a server does in a second: scheduler requests, and whole lives of workunits."""

import contextlib
import sqlite3
import threading
import time

import serving
import stores

import minigrid as m

# What BOINC's server 8.3.0 does on this class of machine: 2 cores, MariaDB 10.11 with durable
# commits, FastCGI under Apache, 400 hosts, the same requests; the range of several runs.
BOINC_REQUESTS = {1: (119, 141), 4: (238, 268), 16: (161, 219)}  # connections -> requests/s
BOINC_LIVES = {(1, 1): (93, 114), (2, 1): (60, 79), (1, 10): (171, 171),
               (2, 10): (72, 87)}  # (quorum, jobs per request) -> workunits/s, the whole run
BOINC_LIVES_UPLOADED = {(1, 1): (84, 84)}
SUPPLY_MAX = 1500  # requests a second: more work than this is not prepared
VALID_ENOUGH = 1000  # of the reported results: nobody waits for the last of them
BAD_ENDS = "report error", "invalid", "unreadable output", "time out"
BARE_SQL = (  # what one request with one report and one new job changes in the store
    "UPDATE host SET rpc_time = :now, rpc_seqno = :n, work_time = :now, avg_turnaround = :n "
    "WHERE id = :host",
    "UPDATE host_app_version SET n_jobs_today = :n, et_n = :n, et_avg = 1e-9 "
    "WHERE host_id = :host AND app_version_id = 1",
    "INSERT INTO firing (app_id, rule, n) VALUES (1, 'send', 1) ON CONFLICT (app_id, rule) "
    "DO UPDATE SET n = n + excluded.n",
    "INSERT INTO firing (app_id, rule, n) VALUES (1, 'report success', 1) ON CONFLICT (app_id, "
    "rule) DO UPDATE SET n = n + excluded.n")
BARE_SQL_JOB = (  # the same for each job of a request
    "UPDATE result SET server_state = 5, outcome = 1, client_state = 5, received_time = :now, "
    "cpu_time = 3570.1, elapsed_time = 1 WHERE id = :old",
    "UPDATE workunit SET transition_time = :now WHERE id = :old",
    "UPDATE result SET server_state = 4, host_id = :host, user_id = :host, app_version_id = 1, "
    "sent_time = :now, report_deadline = :now + 86400 WHERE id = :new",
    "UPDATE workunit SET transition_time = :now + 86400 WHERE id = :new")


def requests(options):
    """Scheduler requests a second; each reports the jobs of the reply before and asks for more."""
    for jobs in options.jobs:
        bare = [bare_sqlite(options, jobs, group) for group in (1, 16)]
        for protocol in options.protocols:
            for connections in options.connections:
                case = dict(protocol=protocol, jobs=jobs, connections=connections)
                row = {"bench": "requests", **case, **request_run(options, case)}
                row["alone_per_second"] = request_run(options, case, "--no-passes")["per_second"]
                row["empty_per_second"] = empty_run(options, case)["per_second"]
                row["sqlite_per_second"], row["sqlite_16_per_second"] = bare
                row["boinc"] = BOINC_REQUESTS.get(connections) if jobs == 1 else None
                yield row


def request_run(options, case, *changes):
    """Measure one kind of request on a fresh project; what is reported must end as valid."""
    warm_up = 2 * len(serving.HOSTS)  # Then every host has jobs, and its rows.
    n = int(case["jobs"] * (SUPPLY_MAX * options.seconds + 2 * warm_up))
    with serving.project(options.dir, [(n, stores.UNSENT)]) as folder, \
            serving.Server(folder, *changes, *options.profile) as server:
        figures = serving.load(server, **case, warm_up=warm_up,
                               seconds=options.seconds, outputs=str(folder / "data" / "upload"))
        if not changes:
            enough = min(figures["total"]["reported"], VALID_ENOUGH)
            server.wait_for(lambda: server.firings("valid") >= enough)
            figures["valid"] = server.firings("valid")
            assert not any(map(server.firings, BAD_ENDS)), server.all_firings()
    return figures


def empty_run(options, case):
    """Measure what a route that does nothing makes of the same requests."""
    with serving.project(options.dir) as folder, serving.Server(folder, "--empty") as server:
        return serving.load(server, **case, warm_up=200, seconds=options.seconds, limit=True)


def bare_sqlite(options, jobs, group):
    """Return how many requests' rows bare SQL writes in a second, with as many in one commit."""
    hosts = len(serving.HOSTS)
    n = int(20_000 * jobs)
    with serving.project(options.dir, [(n, stores.UNSENT)]) as folder:
        store = sqlite3.connect(folder / "data" / "minigrid.db", isolation_level=None)
        store.execute("PRAGMA synchronous = FULL")
        store.execute("PRAGMA cache_size = -8000")
        store.executemany("INSERT INTO host_app_version VALUES (NULL, ?, 1, 9, 0, 0, 0, 0, 0)",
                          [(host,) for host in range(1, hosts + 1)])
        now, done, begun = m.wall_clock(), 0, time.perf_counter()
        while (seconds := time.perf_counter() - begun) < options.seconds:
            store.execute("BEGIN IMMEDIATE")
            for _ in range(group):
                write_request(store, done, jobs, n, now, hosts)
                done += 1
            store.execute("COMMIT")
        store.close()
    return done / seconds


def write_request(store, number, jobs, n, now, hosts):
    """Write the rows of one request."""
    values = dict(now=now, n=number, host=number % hosts + 1)
    for k in range(jobs):
        new = (number * jobs + k) % n + 1
        values.update(new=new, old=(new - hosts * jobs - 1) % n + 1)
        for sql in BARE_SQL_JOB:
            store.execute(sql, values)
    for sql in BARE_SQL:
        store.execute(sql, values)


# ---- Whole lives -------------------------------------------------------------


def life(options):
    """Finished workunits a second: created, sent, reported, validated, assimilated, purged."""
    for uploaded in options.uploads:
        for quorum in options.quorums:
            for jobs in options.jobs:
                figures = life_run(options, quorum, jobs, uploaded)
                boinc = (BOINC_LIVES_UPLOADED if uploaded else BOINC_LIVES).get((quorum, jobs))
                yield dict(bench="life", quorum=quorum, jobs=jobs, uploaded=uploaded,
                           boinc=boinc, **figures)


def life_run(options, quorum, jobs, uploaded):
    """Take workunits through their whole life, from the first creation to the last purge."""
    n, timeline, over = options.workunits, [], threading.Event()
    with serving.project(options.dir, quorum=quorum, last=n, stock=options.stock) as folder, \
            serving.Server(folder, *options.profile) as server:
        begun = server.wait_for(lambda: server.firings("make a copy"))
        cpu = server.cpu_seconds()
        pauses = serving.Pauses()
        watcher = threading.Thread(target=watch, args=(server, timeline, over))
        watcher.start()
        with pauses, stopped(watcher, over):
            figures = serving.load(
                server, protocol="xml", connections=8, jobs=jobs, reports=n * quorum,
                seconds=options.patience, warm_up=1,
                outputs="put" if uploaded else str(folder / "data" / "upload"))
            ended = server.wait_for(lambda: server.firings("purge") >= n, options.patience)
        cpu, valid = server.cpu_seconds() - cpu, server.firings("valid")
    assert valid == n * quorum, valid
    seconds = ended - begun - (paused := pauses.within(begun, ended))
    return {**figures, "workunits": n, "valid": valid, "whole_seconds": seconds,
            "paused_seconds": paused, "per_second": n / seconds,
            "middle_per_second": middle(timeline, n, pauses),
            "cpu_ms": 1e3 * cpu / n, "requests_per_second": figures["per_second"]}


def watch(server, timeline, over):
    """Note how many workunits are done, again and again."""
    while not over.wait(0.25):
        timeline.append((time.perf_counter(), server.firings("assimilated")))


@contextlib.contextmanager
def stopped(watcher, over):
    """Stop a watcher, whatever happens."""
    try:
        yield
    finally:
        over.set()
        watcher.join()


def middle(timeline, n, pauses):
    """Return the rate at which the middle half of n workunits was assimilated."""
    half = [(at, done) for at, done in timeline if n / 4 <= done <= 3 * n / 4]
    if len(half) < 2 or half[-1][1] == half[0][1]:
        return None
    (begun, first), (ended, last) = half[0], half[-1]
    return (last - first) / (ended - begun - pauses.within(begun, ended))
