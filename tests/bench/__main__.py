"""Measure how fast minigrid is, each figure beside its limit, and print tables in Markdown.

    PYTHONPATH=. python tests/bench [BENCH ...] [--quick] [--json FILE]

    requests   scheduler requests a second over HTTP; beside them an empty route on the same HTTP
               server with the same bodies, and the same rows written by bare SQL
    life       finished workunits a second, from the first creation to the last purge
    latency    a request while passes have 100,000 due workunits to work on
    growth     what finished results in the store cost: request, pass, memory, bytes
    startup    seconds until the server answers, until the demo has its first answer

All of it takes about an hour on two cores; --quick looks only whether everything works. The server
is the real process with durable commits, its projects lie in --dir, which should be on the disk
that is meant; the load comes from one other process on the same machine. A virtual machine may
stand still for seconds: rates are reckoned without that time, and it is shown; what a request took
meanwhile is not forgiven. --profile FILE adds to FILE where the processor time of each measured
server went.
"""

import argparse
import datetime
import json
import os
import platform
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import growth  # noqa: E402
import latency  # noqa: E402
import startup  # noqa: E402
import throughput  # noqa: E402

BENCHES = {"requests": throughput.requests, "life": throughput.life, "latency": latency.latency,
           "growth": growth.growth, "startup": startup.startup}
QUICK = dict(seconds=0.5, workunits=40, sizes=[100, 300], rounds=3, due=1000, starts=1,
             connections=[4], jobs=[3], latency_connections=[1], quorums=[2])


def per_second(value):
    """Show a rate."""
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def seen(pair):
    """Show the range of BOINC's figures."""
    return "" if not pair else f"{pair[0]}-{pair[1]}" if pair[0] < pair[1] else f"{pair[0]}"


def times(row):
    """Show how many times as fast as BOINC's server a row is, at its best."""
    return f"{row['per_second'] / row['boinc'][1]:.2f}" if row["boinc"] else ""


COLUMNS = {
    "requests": {
        "protocol": lambda x: x["protocol"],
        "jobs per request": lambda x: x["jobs"],
        "connections": lambda x: x["connections"],
        "requests/s": lambda x: per_second(x["per_second"]),
        "median, p99, worst ms": lambda x: milliseconds(x),
        "server: cores, ms of CPU": lambda x: f"{x['server_cores']:.2f}, {x['cpu_ms']:.2f}",
        "load: cores": lambda x: f"{x['generator_cores']:.2f}",
        "without passes": lambda x: per_second(x["alone_per_second"]),
        "limit: empty route": lambda x: per_second(x["empty_per_second"]),
        "limit: bare SQL, a commit each (for 16)": lambda x: "{} ({})".format(
            per_second(x["sqlite_per_second"]), per_second(x["sqlite_16_per_second"])),
        "BOINC": lambda x: seen(x["boinc"]),
        "times BOINC": times,
    },
    "life": {
        "quorum": lambda x: x["quorum"],
        "jobs per request": lambda x: x["jobs"],
        "outputs": lambda x: "uploaded" if x["uploaded"] else "placed",
        "workunits": lambda x: f"{x['workunits']:,}",
        "workunits/s": lambda x: per_second(x["per_second"]),
        "in the middle": lambda x: per_second(x["middle_per_second"]),
        "ms of CPU for each": lambda x: f"{x['cpu_ms']:.2f}",
        "server: cores": lambda x: f"{x['server_cores']:.2f}",
        "machine stood still, s": lambda x: f"{x['paused_seconds']:.1f}",
        "BOINC": lambda x: seen(x["boinc"]),
        "times BOINC": times,
    },
    "latency": {
        "due at the start": lambda x: f"{x['due']:,}",
        "unfinished at the end": lambda x: f"{x['still_due']:,}",
        "connections": lambda x: x["connections"],
        "requests/s": lambda x: per_second(x["per_second"]),
        "median ms": lambda x: f"{x['median_ms']:.1f}",
        "p99 ms": lambda x: f"{x['p99_ms']:.1f}",
        "worst ms": lambda x: f"{x['worst_ms']:.1f}",
        "machine stood still, s": lambda x: f"{x['paused_seconds']:.1f}",
        "limit: a bare commit, median, p99 ms": lambda x: (
            f"{x['commit_median_ms']:.1f}, {x['commit_p99_ms']:.1f}"),
    },
    "growth": {
        "finished results": lambda x: f"{x['finished']:,}",
        "request, ms of CPU": lambda x: f"{x['request_ms']:.2f}",
        "times": lambda x: f"{x['request_ms_ratio']:.2f}",
        "pass over 20 workunits, ms of CPU": lambda x: f"{x['pass_ms']:.1f}",
        "times ": lambda x: f"{x['pass_ms_ratio']:.2f}",
        "idle pass, ms of CPU": lambda x: f"{x['idle_pass_ms']:.2f}",
        "memory MB": lambda x: f"{x['memory_mb']:.0f}",
        "store MB": lambda x: f"{x['store_mb']:,.1f}",
        "bytes per result, with its workunit": lambda x: (
            f"{x['bytes_per_result']:,.0f}" if x["bytes_per_result"] else ""),
        "start s": lambda x: f"{x['start_seconds']:.2f}",
        "status page ms": lambda x: f"{x['status_ms']:.1f}",
    },
    "startup": {
        "what": lambda x: x["what"],
        "s, median": lambda x: f"{x['seconds']:.2f}",
        "s, worst": lambda x: f"{x['worst']:.2f}",
    },
}


def milliseconds(row):
    """Show the times of requests."""
    return f"{row['median_ms']:.1f}, {row['p99_ms']:.1f}, {row['worst_ms']:.1f}"


def table(name, rows):
    """Return the rows of a bench as a table in Markdown."""
    columns = COLUMNS[name]
    lines = [columns, ["---:"] * len(columns)] + [
        [show(row) for show in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def targets(rows):
    """Compare what was measured with what was wanted: [(what, wanted, found, met)]."""
    found = []

    def target(what, wanted, value, met):
        found.append((what, wanted, value, "yes" if met else "no"))

    for row in rows:
        kind = row["bench"]
        if kind == "requests" and (row["protocol"], row["jobs"], row["connections"]) \
                == ("xml", 1, 16):
            ratio, share = row["per_second"] / row["boinc"][1], (
                row["per_second"] / row["empty_per_second"])
            target("scheduler requests", "3 times BOINC's", f"{ratio:.2f} times", ratio >= 3)
            target("scheduler requests", "half of an empty route", f"{share:.2f}", share >= 0.5)
        if kind == "life" and row["quorum"] == 1 and row["boinc"] and not row["uploaded"]:
            wanted, ratio = 3 if row["jobs"] == 1 else 5, row["per_second"] / row["boinc"][1]
            target(f"finished workunits, {row['jobs']} to a request", f"{wanted} times BOINC's",
                   f"{ratio:.2f} times", ratio >= wanted)
        if kind == "latency" and row["due"]:
            target(f"p99 during the big pass, {row['connections']} connections", "under 100 ms",
                   f"{row['p99_ms']:.0f} ms", row["p99_ms"] < 100)
    sizes = [row for row in rows if row["bench"] == "growth"]
    if sizes:
        last = sizes[-1]
        for what, ratio in (("request", last["request_ms_ratio"]), ("pass", last["pass_ms_ratio"])):
            target(f"a {what} at {last['finished']:,} results", "at most 1.2 times",
                   f"{ratio:.2f} times", ratio <= 1.2)
        target(f"memory at {last['finished']:,} results", "under 150 MB",
               f"{last['memory_mb']:.0f} MB", last["memory_mb"] < 150)
    return found


def conditions():
    """Return under which conditions figures were measured."""
    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    processor = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text()
                      .splitlines() if line.startswith("model name")), platform.machine())
    return dict(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        commit=git("rev-parse", "--short", "HEAD") + " changed" * bool(git("status", "--short")),
        python=platform.python_version(), sqlite=sqlite3.sqlite_version, cores=os.cpu_count(),
        processor=processor, busy=os.getloadavg()[0],
        durability="WAL, synchronous=FULL; outputs are placed by the load unless uploaded")


def parse():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [options] [BENCH ...]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", metavar="BENCH", help="which; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny counts: only, does it work?")
    parser.add_argument("--json", metavar="FILE", help="all figures and their conditions")
    parser.add_argument("--profile", metavar="FILE", help="add where the servers' time went")
    parser.add_argument("--dir", help="where to make projects (default: temporary files)")
    for name, kind, default in (
            ("seconds", float, 8), ("workunits", int, 12000), ("stock", int, 4000),
            ("patience", float, 600), ("due", int, 100_000), ("rounds", int, 40),
            ("starts", int, 3)):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N",
                            help=f"(default {default})")
    for name, kind, default in (
            ("connections", int, [1, 4, 16]), ("jobs", int, [1, 10]), ("quorums", int, [1, 2]),
            ("protocols", str, ["xml", "json"]), ("outputs", str, ["placed", "uploaded"]),
            ("latency-connections", int, [1, 4]), ("sizes", int, [10**3, 10**4, 10**5, 10**6])):
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, metavar="N",
                            help=f"(default {' '.join(map(str, default))})")
    if "--quick" in sys.argv:  # What is said besides wins.
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    unknown = set(options.benches) - set(BENCHES)
    if unknown:
        parser.error(f"there is no bench {', '.join(sorted(unknown))}")
    options.profile = ["--profile", os.path.abspath(options.profile)] if options.profile else []
    options.uploads = [{"placed": False, "uploaded": True}[how] for how in options.outputs]
    return options


def main():
    """Run the benches, print each table as soon as it is known."""
    options, rows, given = parse(), [], conditions()
    print("; ".join(f"{key} {value}" for key, value in given.items()), flush=True)
    for name in options.benches or BENCHES:
        found = []
        for row in BENCHES[name](options):
            found.append(row)
            print(f"{name}: {len(found)} measured", file=sys.stderr, flush=True)
        print(f"\n{name}\n\n{table(name, found)}", flush=True)
        rows += found
    print("\ntargets\n\n| what | wanted | found | met |\n| --- | --- | --- | --- |")
    for line in targets(rows):
        print(f"| {' | '.join(line)} |")
    if options.json:
        Path(options.json).write_text(json.dumps(
            {"conditions": given, "rows": rows, "targets": targets(rows)}, indent=1))


if __name__ == "__main__":
    main()
