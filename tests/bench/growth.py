"""What finished results in the store cost: a request, a pass, memory, bytes of the store.

Run by the bench it measures in a process of its own on one project:

    python tests/bench/growth.py FOLDER
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import serving  # noqa: E402
import stores  # noqa: E402

import minigrid as m  # noqa: E402

REQUESTS = 20  # in one round; so many workunits go through the pass behind them


def growth(options):
    """Cost of a request and of a pass with few and with many finished results in the store.

    Every size has its process, and they take turns: what else the machine does meets all alike.
    """
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(serving.project(
            options.dir, [(n, stores.FINISHED), (REQUESTS * (options.rounds + 60), stores.UNSENT)],
            purge_delay=7 * 86400)) for n in options.sizes]
        sizes = [(folder / "data" / "minigrid.db").stat().st_size for folder in folders]
        rounds = take_turns(folders, options.rounds)
        for i, (n, folder) in enumerate(zip(options.sizes, folders)):
            costs = {kind: statistics.median(costs[i][kind] for costs in rounds)
                     for kind in rounds[0][i]}
            ratios = {f"{kind}_ratio": statistics.median(
                costs[i][kind] / costs[0][kind] for costs in rounds) for kind in rounds[0][i]}
            yield dict(bench="growth", finished=n, **costs, **ratios, **of_process(folder),
                       store_mb=sizes[i] / 1e6,
                       bytes_per_result=(sizes[i] - sizes[0]) / (n - options.sizes[0])
                       if i else None)


def take_turns(folders, rounds):
    """Let a process on each project do a round in turn; return all costs, without the first."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(subprocess.Popen(
            [sys.executable, __file__, str(folder)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE)) for folder in folders]
        found = []
        for _ in range(rounds + 2):
            row = []
            for worker in workers:
                worker.stdin.write("round\n")
                worker.stdin.flush()
                row.append(json.loads(worker.stdout.readline()))
            found.append(row)
        for worker in workers:
            worker.stdin.close()
    return found[2:]  # The first fill caches, and have less to do in their pass.


def of_process(folder):
    """Start the real server on a project; return its start, its memory after some requests."""
    with serving.Server(folder) as server:
        server.get("/status.json")
        start = time.perf_counter() - server.started
        times = sorted(server.get("/status.json")[1] for _ in range(9))
        serving.load(server, protocol="xml", connections=4, reports=500, seconds=60,
                     outputs=str(folder / "data" / "upload"))
        return dict(start_seconds=start, memory_mb=server.megabytes(), status_ms=1e3 * times[4])


# ---- The process of one size --------------------------------------------------


def work(folder):
    """Do a round for each line that comes in; print its costs as JSON."""
    serving.load_plugins()
    settings = m.Settings(data=str(folder / "data"), min_sendwork_interval=0, stock=0)
    m.open_project(settings, random.Random(1))
    assert not m.sync_apps([folder / "bench.py"], m.wall_clock())
    m.make_app(m.wall_clock)  # It reads settings, and opens keys.
    now, held, seqno = m.wall_clock() + 10, {}, 0
    for _ in sys.stdin:
        seqno += 1
        request = milliseconds(lambda: [ask(k, held, seqno, now) for k in range(REQUESTS)])
        full = milliseconds(lambda: m.run_pass(now + 1))
        m.run_pass(now + 2)  # It deletes the files.
        m.run_pass(now + 3)
        idle = milliseconds(lambda: m.run_pass(now + 3))
        now += 4
        print(json.dumps(dict(request_ms=request / REQUESTS, pass_ms=full, idle_pass_ms=idle)),
              flush=True)
    assert not m.project.counts["stage errors"], m.project.errors
    m.close_project()


def ask(k, held, seqno, now):
    """Let one host report what it holds, and ask for one more."""
    key, cpid = serving.HOSTS[k]
    for name in held.get(k, ()):
        m.file_path("upload", f"{name}_out").write_bytes(b"1")
    request = m.Request(
        authenticator=key, hostid=k + 1, rpc_seqno=seqno, host_cpid=cpid, other_results=[],
        work_req_seconds=1e-6, reports=[m.Report(name, 5) for name in held.get(k, ())])
    reply = m.project.write(lambda: m.schedule(request, now))
    held[k] = [given.name for given in reply.assignments]
    assert len(held[k]) == 1, reply


def milliseconds(function):
    """Return the processor time that a call takes."""
    begun = time.process_time()
    function()
    return 1e3 * (time.process_time() - begun)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
