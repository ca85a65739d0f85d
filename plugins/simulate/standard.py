"""Worlds that every change of minigrid must bear: small, and full of trouble; all rules fire."""

import dataclasses
from pathlib import Path

from minigrid import PARAMETERS, RULES, ClientError, PluginError, plugins

from . import tempers, watch, world

HOUR, DAY = 3600, 86400
SEEDS = [1, 3]
UNREACHABLE = {"consensus after the end", "fail: nothing to assimilate"}  # see the table of rules

SUMS = '''
min_quorum = 2
target_nresults = 3
max_error_results = 2
max_success_results = 5
max_total_results = 8
delay_bound = 6 * 3600


def workunit(i):
    tight = {0: {"max_error_results": 0}, 1: {"max_total_results": 4, "max_success_results": 4}}
    return {"input": i, "priority": i % 3, **tight.get(i % 6, {})} if i < 60 else None


def compute(input):
    return input * input


def parse(output):
    if not isinstance(output, int):
        raise ValueError("not a number")
    return output


def assimilate(workunit, answer):
    first = workunit.name not in asked
    asked.add(workunit.name)
    return "defer" if first and workunit.number % 5 == 0 and answer is not None else answer


asked = set()
'''
DICE = '''
"""dice: no two answers agree."""
max_success_results = 4
delay_bound = 6 * 3600


def workunit(i):
    return {"input": i} if i < 4 else None


def compute(input):
    return "dice"
'''
HUGE = '''
"""huge: no computer has the memory for it."""
rsc_memory_bound = 1e15


def workunit(i):
    return {"input": i} if i < 2 else None


def compute(input):
    return input
'''
NUMBER = '''

def parse(output):
    if not isinstance(output, (int, float)):
        raise ValueError("not a number")
    return output


def assimilate(workunit, answer):
    return answer
'''
CHECKED = '''
"""checked: X-Com's second way, and its third variant of dispatch."""
validation, dispatch = "check", "xcom3"


def workunit(i):
    return {"input": i} if i < 30 else None


def compute(input):
    return 3 * input


def check(input, output):
    return output == 3 * input
''' + NUMBER
INVERSE = '''
"""inverse: X-Com's third way."""
validation = "inverse"
delay_bound = 12 * 3600


def workunit(i):
    return {"input": i} if i < 8 else None


def compute(input):
    return 5 * input


def invert(output):
    return output / 5


def same(input, recovered):
    return input == recovered
''' + NUMBER
RECHECK = '''
"""recheck: X-Com's fourth way; a second copy of every other workunit."""
validation, recheck, spot_checks, dispatch = "recheck", 1.5, 0.2, "xcom2"


def workunit(i):
    return {"input": i} if i < 12 else None


def compute(input):
    return 7 * input
''' + NUMBER
SIZE = "\nrsc_fpops_est = 1.6e11  # an hour and a half\n"
APPS = {name: text + SIZE for name, text in {
    "sums": SUMS, "dice": DICE, "huge": HUGE, "checked": CHECKED, "inverse": INVERSE,
    "recheck": RECHECK}.items()}
MADE = {"sums": 60, "dice": 4, "huge": 2, "checked": 30, "inverse": 8, "recheck": 12}
ANSWERS = {"sums": lambda x, rng: x * x, "dice": lambda x, rng: rng.random(),
           "huge": lambda x, rng: x, "checked": lambda x, rng: 3 * x,
           "inverse": lambda x, rng: 5 * x, "inverse --invert": lambda y, rng: y / 5,
           "recheck": lambda x, rng: 7 * x}
KINDS = ["honest"] * 5 + ["liars"] * 2 + ["careless"] * 2 + [
    "crashers", "garblers", "hoarders", "late", "late-crashers", "quitters", "forgetters",
    "reattaching"]
SETTINGS = dict(stock=20, report_grace_period=600, delete_delay=2 * HOUR, purge_delay=12 * HOUR,
                infeasible_max=5)
SMALL = dict(ncpus=1, cache_hours=3, lies=0.7, days=40, purged=True)


def policies(seed, folder, **more):
    """Return the world of seventeen hosts and six applications that know all troubles."""
    plan = world.Plan(**{**SMALL, **dict(seed=seed, hosts=len(KINDS), lost=0.05, unreadable=1,
                                         cancels=3, workunits=sum(MADE.values())), **more})
    return world.running_world(plan, folder, APPS, ANSWERS, kinds=KINDS, **SETTINGS)


def machine(seed, folder, **more):
    """Return the same with a server that is killed, full and faulty, and a lossy network."""
    return policies(seed, folder, **{**dict(
        lost=0.05, repeated=0.05, reordered=0.05, crashes=20, disk_full=1, raising=1), **more})


def crowd(seed, folder, **more):
    """Return a world of all kinds, some of which come and go."""
    others = {kind: 0.04 for kind in tempers.TEMPERS if kind != tempers.HONEST}
    plan = world.Plan(**{**dict(
        seed=seed, hosts=60, workunits=300, shares=others, arrivals=10, lifetime=10, lost=0.02,
        repeated=0.02, reordered=0.02, cancels=0.2, ncpus=2, purged=True), **more})
    texts, answers = world.toy(plan, dict(min_quorum=2, delay_bound=DAY))
    return world.running_world(plan, folder, texts, answers)


WORLDS = {"policies": policies, "machine": machine, "crowd": crowd}


def run(name, seed, folder):
    """Run a standard world to its end; return how often each rule has fired."""
    with WORLDS[name](seed, folder) as w:
        w.live()
        if not w.finished():
            w.watch.broken("it is not settled [S4-29 S4-30]")
        return watch.fired()


def silent(counts):
    """Return the names of the rules that should have fired and have not."""
    return sorted(set(RULES) - set(counts) - UNREACHABLE)


# ---- Applications of others ----------------------------------------------------------


def borrow(plan, path, given):
    """Take numbers and policies of a file's application: (plan, name, constants, hooks).

    Raises ClientError, PluginError.
    """
    found = [(loader, file) for loader in plugins if hasattr(loader, "find")
             for file in loader.find(Path(path))]
    if len(found) != 1:
        raise ClientError(f"{path}: wanted is one application, found {len(found)}")
    (loader, file), = found
    application = loader.load(file)
    numbers = []
    while len(numbers) < plan.workunits and \
            (one := application.hooks["workunit"](len(numbers))) is not None:
        numbers.append({key: value for key, value in one.items()
                        if key in PARAMETERS and key not in given})
    if not numbers:
        raise PluginError(f"{path}: workunit(0) is None: there is nothing to simulate")
    constants = {"rsc_fpops_est": 1e9, **application.parameters, **application.policies, **given}
    if constants.get("credit_by") == "check_set":
        del constants["credit_by"]  # Its function would have to see real answers.
    if file.is_dir():  # Its operations are those of a processor, a hundred times as fast.
        constants["rsc_fpops_est"] /= 100

    def workunit(i):
        return {**numbers[i], "input": b"%d" % i} if i < len(numbers) else None

    hooks, known = {"workunit": workunit}, application.hooks.get("known")
    if known:
        hooks["known"] = lambda i: None if known(i) is None else world.truth(i, None)
    return (dataclasses.replace(plan, workunits=len(numbers)), application.name, constants, hooks)
