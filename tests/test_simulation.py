"""Days on a virtual clock: the standard worlds of `minigrid simulate`, looked at from outside.

A world is a function of its seed. All along its own watch looks at rows and files; at the end
everything must be settled, nothing assimilated twice, no file left, and every rule must have fired,
or else the world was too tame to prove anything.
"""

import gzip
import json
import sys
from collections import Counter

import pytest

import minigrid as m

FACTORS = {"checked": 3, "inverse": 5}  # where no wrong answer is believed


def standard():
    return sys.modules["minigrid_plugin_simulate"].standard


@pytest.fixture(params=["policies-1", "policies-3", "machine-1"])
def world(request, tmp_path):
    """A world with all its life behind it."""
    name, seed = request.param.split("-")
    print(f"replay: minigrid simulate --standard --seed {seed}")
    with standard().WORLDS[name](int(seed), tmp_path) as world:
        world.live()
        assert world.finished(), "not settled in time"
        yield world


FIRED = Counter()  # of all worlds above


def test_a_world_settles(world):
    plan, made = world.plan, standard().MADE
    FIRED.update({row.rule: row.n for row in m.Firing.select()})
    if not plan.raising:
        assert m.project.counts["stage errors"] == 0

    # Each workunit was assimilated once [S4-31 C23], and its line says what came out [S4-29].
    for app, n in made.items():
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
                assert set(line["errors"]) <= {"COULDNT_SEND_RESULT", "CANCELLED"}

    if plan.crashes:  # What a crash has left beside the store goes with the daily work [C46].
        assert world.faults.crashes > 10
        m.plugged("delete_orphans")[-1](m.wall_clock() + 2 * 86400)

    # Nothing is left but the archive [S4-30 S4-32 S4-61 S4-62].
    for folder in ("upload", "download"):
        left = [p.name for p in (m.project.data / folder).glob("*/*")
                if p.suffix not in (".py", ".sh", ".cmd")]  # of the applications
        assert left == []
    archived = [json.loads(line) for path in (m.project.data / "archive").glob("*.gz")
                for line in gzip.open(path, "rt")]
    assert Counter(wu["name"].split("_")[0] for wu in archived if wu["number"] is not None) == made
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


def test_every_rule_has_fired_over_the_standard_worlds():
    assert len(FIRED) > 1, "runs after the worlds above"
    assert standard().silent(FIRED) == []


def test_a_second_pass_at_the_same_time_changes_nothing(tmp_path):
    """And fires nothing: the watch looks after each pass here, and compares all of the store."""
    with standard().policies(3, tmp_path, unreadable=0) as world:
        world.second_look_factor = 0
        for _ in range(60):
            world.step()
            m.run_pass(world.now + 1)
            before = list(m.db.connection().iterdump())
            m.run_pass(world.now + 1)
            assert list(m.db.connection().iterdump()) == before
            world.now += 1
