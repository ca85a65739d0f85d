"""Try every policy of trust on a simulated crowd that lies, and print the README's table.

    PYTHONPATH=. python tests/bench/trust.py [--hosts 1000] [--workunits 5000] [--seed 1]
        [--colluders 0.05] [--liars 0 0.05 0.2 0.4] [--lies 1] [--only POLICY]
        [--jobs N] [--quick] [--json FILE] [--markdown FILE]

Real schedule() and run_pass() on a virtual clock, a project in a temporary directory for each line.
Liars give a wrong answer each time, each another one; colluders give the same wrong one. Of the
others 10 % are slow, 5 % flaky, 2 % copies of another's client directory, 10 % asleep at night.
`--quick` is 100 hosts and 500 workunits. A line of 5,000 workunits takes one or two minutes of a
processor, and one line for each processor is computed at once. With `--json` each line is kept as
soon as it is known, and what the file has of a stopped run is not done again; `--markdown` writes
the table as far as it is known. `--lies 0.1` makes liars that are wrong once in ten times.
"""

import argparse
import concurrent.futures
import functools
import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import minigrid as m

POLICIES = {  # what stands in the application's file
    "none": dict(validation="none"),
    "check": dict(validation="check"),
    "inverse": dict(validation="inverse"),
    "recheck 1.3": dict(validation="recheck", recheck=1.3),
    "recheck 2": dict(validation="recheck", recheck=2),
    "quorum 2": dict(min_quorum=2),
    "quorum 3": dict(min_quorum=3),
    "adaptive": dict(validation="adaptive"),
    "budget 1e-3": dict(validation="recheck", wrong_answers_at_most=1e-3),
}
COLUMNS = {
    "policy": lambda x: x["policy"],
    "liars": lambda x: f"{x['share']:.0%}",
    "wrong answers accepted": lambda x: f"{x['wrong']} ({x['wrong_rate']:.2%})",
    "failed": lambda x: f"{x['failed']}",
    "copies per workunit": lambda x: f"{x['copies'] / x['workunits']:.2f}",
    "last answer": lambda x: f"{24 * (x['days_to_last'] or x['days']):.0f} h",
    "liars caught": lambda x: f"{x['liars_caught']} of {x['liars']}",
    "honest black-listed at the end (ever)":
        lambda x: f"{x['honest_listed']} ({x['honest_ever_listed']})",
}


def measure(policy, share, options):
    """Run one world to its end; return its figures."""
    simulate = load_plugins()
    others = 1 - share - options.colluders
    shares = {kind: part * others for kind, part in simulate.tempers.USUAL.items()}
    plan = simulate.world.Plan(
        seed=options.seed, hosts=options.hosts, workunits=options.workunits, lies=options.lies,
        cache_hours=2, shares={**shares, "liars": share, "colluders": options.colluders})
    with tempfile.TemporaryDirectory(dir=simulate.memory()) as folder:
        with simulate.prepared(plan, Path(folder), constants=POLICIES[policy]) as (world, name):
            world.live()
            found = simulate.report.figures(world, name)
            assert not found["stage_errors"], m.project.errors
    return dict(policy=policy, share=share, **found)


@functools.lru_cache(maxsize=None)
def load_plugins():
    """Load the plugins a server loads, once in each process; return the simulator."""
    if not m.plugins:
        m.load_plugins(m.Settings.plugins.split())
        gc.set_threshold(50_000)  # A tenth of the time otherwise.
    return sys.modules["minigrid_plugin_simulate"]


def table(rows):
    """Return rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)] + [
        [show(row) for show in COLUMNS.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    """Measure all policies and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--workunits", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--colluders", type=float, default=0.05)
    parser.add_argument("--liars", type=float, nargs="*", default=[0, 0.05, 0.2, 0.4])
    parser.add_argument("--lies", type=float, default=1, help="share of their answers")
    parser.add_argument("--only", default=[*POLICIES], nargs="*", choices=POLICIES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="100 hosts, 500 workunits")
    parser.add_argument("--json", type=Path, help="keep the figures here, and go on from them")
    parser.add_argument("--markdown", type=Path, help="write the table here, line by line")
    options = parser.parse_args()
    if options.quick:
        options.hosts, options.workunits = 100, 500
    cases = [(policy, share) for policy in options.only for share in options.liars]
    world_of = {f"given {name}": getattr(options, name) for name in (
        "hosts", "workunits", "seed", "colluders", "lies")}
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    rows = {(row["policy"], row["share"]): row for row in kept if world_of.items() <= row.items()}
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(measure, *case, options): case for case in cases if case not in rows}
        for run in concurrent.futures.as_completed(runs):
            row = rows[runs[run]] = {**world_of, **run.result()}
            kept.append(row)
            print({key: row[key] for key in row if key not in ("progress", "rules")},
                  file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))
            if options.markdown:
                options.markdown.write_text(table([rows[case] for case in cases if case in rows]))
    print(table([rows[case] for case in cases]))


if __name__ == "__main__":
    main()
