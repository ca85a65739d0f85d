"""Days on a virtual clock: volunteers of every temper against the real schedule() and run_pass().

The world is a function of its seed. All along the store and its files must be sound; at the end
everything must be settled, nothing assimilated twice, no file left, and every rule must have fired,
or else the world was too tame to prove anything.
"""

import gzip
import json
from collections import Counter

import pytest
from simulated import HOUR, World, in_a_hurry

import minigrid as m

UNREACHABLE = {"consensus after the end", "fail: nothing to assimilate"}  # see the table

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
APPS = {"sums": SUMS, "dice": DICE, "huge": HUGE, "checked": CHECKED, "inverse": INVERSE,
        "recheck": RECHECK}
MADE = {"sums": 60, "dice": 4, "huge": 2, "checked": 30, "inverse": 8, "recheck": 12}
FACTORS = {"checked": 3, "inverse": 5}  # where no wrong answer is believed
TEMPERS = ["honest"] * 5 + ["liar"] * 2 + ["careless"] * 2 + [
    "crasher", "garbler", "vanisher", "late", "late crasher", "quitter", "forgetter", "detacher"]


SETTINGS = dict(stock=20, report_grace_period=600, delete_delay=2 * HOUR, purge_delay=12 * HOUR,
                infeasible_max=5)
ANSWERS = {"sums": lambda x, rng: x * x, "dice": lambda x, rng: rng.random(),
           "huge": lambda x, rng: x, "checked": lambda x, rng: 3 * x,
           "inverse": lambda x, rng: 5 * x, "inverse --invert": lambda y, rng: y / 5,
           "recheck": lambda x, rng: 7 * x}


def make_world(seed, folder):
    """A world of seventeen volunteers and six applications that know all troubles."""
    return World(seed, folder, APPS, ANSWERS, TEMPERS, **SETTINGS)


@pytest.fixture(autouse=True)
def no_disk():
    """Power cuts are tested elsewhere."""
    with in_a_hurry():
        yield


@pytest.fixture(params=[1, 3])
def world(request, tmp_path):
    """A world with all its life behind it."""
    print(f"seed {request.param}")
    world = make_world(request.param, tmp_path)
    world.live(days=40)
    yield world
    m.close_project()


def test_a_world_settles_and_every_rule_has_fired(world):
    fired = {row.rule for row in m.Firing.select()}
    assert set(m.RULES) - fired == UNREACHABLE
    assert m.project.counts["stage errors"] == 0

    # Each workunit was assimilated once [S4-31 C23], and its line says what came out [S4-29].
    for app, n in MADE.items():
        path = m.project.data / "results" / f"{app}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(line["number"] for line in lines) == list(range(n))
        for line in lines:
            assert line["answer"] is not None or line["errors"]  # there may be both [S2-36]
            if app == "sums" and line["answer"] is not None:
                assert line["answer"] == line["number"] ** 2
            if app in FACTORS and line["answer"] is not None:
                assert line["answer"] == FACTORS[app] * line["number"]
            if app == "huge":
                assert line["errors"] == ["COULDNT_SEND_RESULT"]

    # Nothing is left but the archive [S4-30 S4-32 S4-61 S4-62].
    for folder in ("upload", "download"):
        left = [p.name for p in (m.project.data / folder).glob("*/*")
                if p.suffix not in (".py", ".sh", ".cmd")]  # of the applications
        assert left == []
    archived = [json.loads(line) for path in (m.project.data / "archive").glob("*.gz")
                for line in gzip.open(path, "rt")]
    assert Counter(wu["name"].split("_")[0] for wu in archived if wu["number"] is not None) == MADE
    for wu in archived:
        hosts = [r["host"] for r in wu["results"] if r["host"]]
        assert len(hosts) == len(set(hosts)) and len(wu["results"]) <= wu["max_total_results"]
        assert {r["server_state"] for r in wu["results"]} <= {5}
        assert len({r["granted_credit"] for r in wu["results"] if r["validate_state"] == 1}) <= 1
        assert wu["canonical_resultid"] or wu["error_mask"]

    # Credit is what was granted, to the last result.
    granted = Counter()
    for wu in archived:
        for r in wu["results"]:
            granted[r["user"]] += r["granted_credit"]
    for user in m.User.select():
        assert user.total_credit == pytest.approx(granted[user.id])


def test_a_second_pass_at_the_same_time_changes_nothing(tmp_path):
    world = make_world(3, tmp_path)
    for _ in range(60):
        world.event()
        m.run_pass(world.now)  # What a pass freed from trouble may still do.
        before = list(m.db.connection().iterdump())
        m.run_pass(world.now)
        assert list(m.db.connection().iterdump()) == before
    m.close_project()


def test_a_world_is_a_function_of_its_seed(tmp_path):
    histories = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        world = make_world(4, tmp_path / name)
        for _ in range(60):
            world.event()
        histories.append(list(m.db.connection().iterdump()))
        m.close_project()
    assert histories[0] == histories[1]
