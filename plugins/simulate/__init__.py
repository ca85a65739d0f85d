"""minigrid simulate: what a project would be like, before anybody lends a computer [D12].

The real schedule() and run_pass() over the real store, on a virtual clock, with a population of
simulated computers of every temper, and faults of the machine. One seed gives one history. It is
the main test of the rules, too: invariants are checked all along.

The modules: `tempers` what hosts are like, `hosts` one of them, `world` a project with its clock,
`faults` what goes wrong on the server, `watch` what must never be, `report` the figures,
`standard` worlds in which every rule fires.
"""

import contextlib
import gc
import json
import os
import shlex
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from minigrid import ClientError, canonical_json

from . import faults, hosts, report, standard, tempers, watch, world

__all__ = ["faults", "hosts", "report", "standard", "tempers", "watch", "world", "commands"]
OPTIONS = {  # name -> (type, what it is); the defaults are those of world.Plan
    "seed": (int, "the history is a function of it"),
    "hosts": (int, "computers at the beginning"),
    "workunits": (int, "how many to compute"),
    "days": (float, "stop after so many days, whatever is missing"),
    "ncpus": (int, "processors of a computer"),
    "task-hours": (float, "hours that a task takes a usual processor; other ones differ"),
    "cache-hours": (float, "hours of work that a computer keeps ready"),
    "lies": (float, "share of a liar's answers that are wrong"),
    "lost": (float, "share of the requests whose reply never arrives"),
    "repeated": (float, "share of the requests that arrive twice"),
    "reordered": (float, "share of the requests that arrive after the next one"),
    "crashes": (float, "times a day that the server is killed, at any write"),
    "disk-full": (float, "hours a day in which the server's disk is full"),
    "raising": (float, "hours a day in which the application or a plugin has a fault"),
    "unreadable": (float, "share of the passes during which an output cannot be read"),
    "cancels": (float, "times a day that the owner cancels two workunits"),
    "arrivals": (str, "new computers a day: 10 or 10/day"),
    "lifetime": (float, "days until a computer leaves for good, on average; 0: it stays"),
}
DEFAULTS = {f.name: f.default for f in fields(world.Plan)}


def commands(parsers):
    """Add the command to the command line."""
    parser = parsers.add_parser(
        "simulate", help="try a project on simulated computers: how long, how many copies, what "
        "is wasted, what liars achieve", description="Run the real server on a virtual clock with "
        "simulated computers, honest and otherwise.", epilog="Kinds of computers get a share, as "
        "in --liars 0.05; who is nothing else is honest. The same seed and options give the same "
        "output, byte for byte.")
    parser.set_defaults(run=run)
    parser.add_argument("app", nargs="?", help="application file whose numbers and policies are "
                        "taken; it is not computed, answers are drawn")
    for name, (kind, about) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=f"{about} (default "
                            f"{DEFAULTS[name.replace('-', '_')]})".replace("%", "%%"))
    for kind, temper in tempers.TEMPERS.items():
        if kind != tempers.HONEST:
            parser.add_argument(f"--{kind}", type=float, metavar="SHARE", dest=f"kind {kind}",
                                help=f"{temper.about} (default {tempers.USUAL.get(kind, 0)})")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a number or policy of the application, such as min_quorum=3, "
                        "validation=recheck; as often as you like")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--standard", action="store_true", help="run the standard worlds instead, "
                        "in which every rule must fire")


def run(options):
    """Run a world, or the standard ones; return the exit status."""
    gc.set_threshold(50_000)  # Rows come and go by the million: a tenth of the time otherwise.
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="minigrid-", dir=memory()) as folder:
        if options.standard:
            return run_standard(Path(folder), options)
        plan, constants = plan_of(options), dict(map(constant, options.set))
        with prepared(plan, Path(folder), options.app, constants) as (w, name):
            try:
                w.live()
            except watch.Violation as error:
                return complain(error, plan)
            found = report.figures(w, name)
        print(canonical_json(found) if options.json else report.text(found), flush=True)
    say_speed(w, found["copies"], time.process_time() - began)
    return 0


def complain(error, plan, command=None):
    """Say what was violated, and how to see it again; return the exit status."""
    print(f"minigrid: violated in the world of seed {plan.seed}, {error}\n"
          f"replay: minigrid {shlex.join(command or sys.argv[1:])}", file=sys.stderr)
    return 1


def say_speed(w, results, seconds):
    """Tell how fast it was; not with the figures, for it is another each time."""
    print(f"{w.steps:,} events and {results:,} results in {seconds:.1f} s of a processor: "
          f"{w.steps / max(seconds, 1e-9):,.0f} events/s, {results / max(seconds, 1e-9):,.0f} "
          f"results/s; {w.own_seconds / max(w.steps, 1) * 1000:.3f} ms of an event are the "
          f"simulator's own", file=sys.stderr)


def memory():
    """Return a directory in memory, if this system has one: files are many and short-lived."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# ---- Options -----------------------------------------------------------------------


def plan_of(options):
    """Return the plan that the options describe. Raises ClientError."""
    given = {name.replace("-", "_"): value for name in OPTIONS
             if (value := getattr(options, name.replace("-", "_"))) is not None}
    shares = dict(tempers.USUAL)
    for key, share in vars(options).items():
        if key.startswith("kind ") and share is not None:
            shares[key[5:]] = share
    for name in ("lies", "lost", "repeated", "reordered", "unreadable"):
        if not 0 <= given.get(name, 0) <= 1:
            raise ClientError(f"--{name} must be a share from 0 to 1, found {given[name]:g}")
    if min(shares.values()) < 0 or sum(shares.values()) > 1:
        raise ClientError(f"the shares of all kinds of computers must not be above 1 together, "
                          f"found {sum(shares.values()):g}: "
                          + ", ".join(f"--{kind} {share:g}" for kind, share in shares.items()))
    if "arrivals" in given:
        given["arrivals"] = per_day(given["arrivals"])
    plan = world.Plan(**given, shares={k: v for k, v in shares.items() if v})
    for name in ("hosts", "workunits", "days", "ncpus", "task_hours"):
        if not getattr(plan, name) > 0:
            raise ClientError(f"--{name.replace('_', '-')} must be above 0")
    negative = [name for name in given if name != "seed" and not given[name] >= 0]
    if negative:
        raise ClientError(f"--{negative[0].replace('_', '-')} must not be negative")
    return plan


def per_day(text):
    """Read a rate such as 10 or 10/day. Raises ClientError."""
    try:
        return float(text.removesuffix("/day"))
    except ValueError:
        raise ClientError(f"--arrivals must be a number of computers a day, such as 10 or 10/day; "
                          f"found '{text}'") from None


def constant(text):
    """Read NAME=VALUE as a constant of an application: (name, value). Raises ClientError."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ClientError(f"--set must be NAME=VALUE, such as min_quorum=3; found '{text}'")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, {"True": True, "False": False}.get(value, value)


# ---- Worlds ------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(plan, folder, path=None, constants=None, kinds=None, **settings):
    """Yield a world with one application, the built-in one or one like that of a file; its name.

    Of a file's application all numbers and policies are taken, those of each workunit(i), too; its
    inputs are not sent, nothing is computed, and whether two answers agree is known without it.
    """
    name, hooks = world.NAME, {"workunit": lambda i: {  # without a thread for each call
        "input": b"%d" % i} if i < plan.workunits else None}
    if path:
        plan, name, constants, hooks = standard.borrow(plan, Path(path), constants or {})
    texts, answers = world.toy(plan, constants, name)
    with world.running_world(plan, folder, texts, answers, {name: hooks}, kinds, **settings) as w:
        yield w, name


def run_standard(folder, options):
    """Run the standard worlds; print which rules have fired; return the exit status."""
    seeds = [options.seed] if options.seed is not None else standard.SEEDS
    total = watch.Counter()
    for seed in seeds:
        for name in standard.WORLDS:
            place = folder / f"{name}-{seed}"
            place.mkdir()
            try:
                counts = standard.run(name, seed, place)
            except watch.Violation as error:
                return complain(error, world.Plan(seed=seed),
                                ["simulate", "--standard", "--seed", str(seed)])
            total.update(counts)
            if not options.json:
                print(f"seed {seed}: {name}: {sum(counts.values()):,} rules fired, all is sound")
    never = standard.silent(total)
    if options.json:
        print(canonical_json({"seeds": seeds, "rules": dict(sorted(total.items())),
                              "never": never}))
    else:
        for rule, n in sorted(total.items()):
            print(f"{n:>9,}  {rule}")
        print("never fired: " + (", ".join(never) or "none"))
    return 1 if never else 0
