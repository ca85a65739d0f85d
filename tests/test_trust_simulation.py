"""A small crowd that lies, for error budgets; tests/bench/trust.py tries all policies on more.

[S3-35 S3-40]: fewer copies than a quorum of three, and hardly a wrong answer.
"""

import sys

import pytest
import simulated

import minigrid as m

BUDGET = 'validation = "recheck"\nwrong_answers_at_most = {}'


@pytest.fixture
def run(tmp_path):
    """Run a world of so many hosts and workunits; return its measures."""
    def live(hosts, n, constants, share, temper="always wrong", seed=1):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        crowd = simulated.crowd(hosts, share, temper=temper)
        measures = simulated.Crowd(seed, folder, crowd, n, constants).run()
        assert m.project.counts["stage errors"] == 0, m.project.errors
        (violations,) = m.plugged("violations")
        assert violations() == []
        print(constants, measures)
        return measures

    with simulated.in_a_hurry():
        yield live
    m.close_project()


def test_a_fifth_of_liars_a_budget_of_one_in_a_thousand(run):
    found = run(60, 400, BUDGET.format(1e-3), 0.2)
    assert found["answers"] == 400
    assert found["wrong_rate"] < 1e-3
    assert found["honest_listed"] == 0
    three = run(60, 400, "min_quorum = 3", 0.2)
    assert found["copies"] < three["copies"] - 0.3


def test_proven_hosts_need_fewer_copies_and_sometimes_liars_stay_within_the_budget(run):
    """Hosts that lie once in ten times become proven now and then: that is what r is for."""
    found = run(20, 600, BUDGET.format(0.05), 0.2, "sometimes wrong")
    assert found["answers"] == 600
    assert found["wrong_rate"] <= 0.05
    assert found["copies"] < 2
    budget = sys.modules["minigrid_plugin_budget"]
    known = budget.Budget.get()
    assert known.single > 100 and known.checked > 100  # or else this proves nothing
    assert budget.chosen_for(m.apps["truth"], m.project.now)[0] < 1.9


def test_colluders_are_the_limit_of_two_equal_answers(run):
    """What the page says: two who agree to lie are believed, unless something else finds them."""
    found = run(20, 150, 'validation = "recheck"\nwrong_answers_at_most = 1e-3', 0.4, "colluder")
    assert found["wrong"] > 0
