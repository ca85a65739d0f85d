"""A small crowd that lies, for error budgets; tests/bench/trust.py tries all policies on more.

[S3-35 S3-40]: fewer copies than a quorum of three, and hardly a wrong answer.
"""

import sys

import pytest

import minigrid as m

BUDGET = dict(validation="recheck", wrong_answers_at_most=1e-3)


@pytest.fixture
def run(tmp_path):
    """Run a world of so many hosts and workunits; return its figures."""
    simulate = sys.modules["minigrid_plugin_simulate"]

    def live(hosts, n, constants, lie, share, look=lambda: None, seed=1, **more):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        plan = simulate.world.Plan(seed=seed, hosts=hosts, workunits=n, cache_hours=2, **more,
                                   shares={**simulate.tempers.USUAL, lie: share})
        with simulate.prepared(plan, folder, constants=constants) as (world, name):
            world.live()
            found = simulate.report.figures(world, name)
            assert found["stage_errors"] == 0, m.project.errors
            look()
        print(constants, found)
        return found

    return live


def test_a_fifth_of_liars_a_budget_of_one_in_a_thousand(run):
    found = run(60, 400, BUDGET, "liars", 0.2)
    assert found["answers"] == 400
    assert found["wrong_rate"] < 1e-3
    assert found["honest_listed"] == 0
    three = run(60, 400, dict(min_quorum=3), "liars", 0.2)
    assert found["copies_per_answer"] < three["copies_per_answer"] - 0.3


def test_proven_hosts_need_fewer_copies_and_sometimes_liars_stay_within_the_budget(run):
    """Hosts that lie once in ten times become proven now and then: that is what r is for."""
    def look():
        budget = sys.modules["minigrid_plugin_budget"]
        known = budget.Budget.get()
        assert known.single > 100 and known.checked > 100  # or else this proves nothing
        assert budget.chosen_for(m.apps["task"], m.project.now)[0] < 1.9

    found = run(20, 600, {**BUDGET, "wrong_answers_at_most": 0.05}, "liars", 0.2, look, lies=0.1)
    assert found["answers"] == 600
    assert found["wrong_rate"] <= 0.05
    assert found["copies_per_answer"] < 2


def test_colluders_are_the_limit_of_two_equal_answers(run):
    """What the page says: two who agree to lie are believed, unless something else finds them."""
    found = run(20, 150, BUDGET, "colluders", 0.4)
    assert found["wrong"] > 0
