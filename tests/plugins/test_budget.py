"""Error budgets: what is chosen for what is measured, who is believed alone, what counts as proof.

[S3-35 S3-40 S3-42]
"""

import json
import logging
import random
import sys

import make
import pytest
from make import DAY, NOW, Client

import minigrid as m

budget = None  # the plugin, once the fixtures have loaded it
TEXT = make.NEAR + '\nvalidation = "recheck"\nwrong_answers_at_most = 0.01\n'


@pytest.fixture(autouse=True)
def plugin():
    global budget
    budget = sys.modules["minigrid_plugin_budget"]


@pytest.fixture
def grid(folder, monkeypatch):
    """A project whose application has a budget of one wrong answer in a hundred."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    with make.project(folder, {"near": TEXT}, stock=0,
                      min_sendwork_interval=0) as project:
        yield project


@pytest.fixture
def single(grid):
    """All that is known of hosts is good, and all workunits are drawn to have one copy."""
    know(checked=1e6, answers=1e6)
    grid.rng = One(1)


class One(random.Random):
    """Draws that never ask for a second copy."""

    def random(self):
        return 0.99


def know(**known):
    """Set what is known of the hosts together."""
    budget.Budget.replace(app=m.apps["near"].id, time=NOW, **known).execute()


def known():
    return budget.Budget.get()


def prove(client, run=10, at=NOW, **more):
    """Make a client's host, and let it have been right so often in a row; return the client."""
    client.ask()
    budget.Evidence.create(host=client.hostid, app=m.apps["near"].id, run=run, checked_time=at,
                           **more)
    return client


def run_of(client):
    row = budget.Evidence.get_or_none(host=client.hostid)
    return row and row.run


def judge(now=NOW):
    """Passes until all is judged that can be."""
    for k in range(4):
        m.run_pass(now + 1 + k, m.STAGES[:2])


def unit():
    (wu,) = make.units()
    return wu


# ---- Formulas ------------------------------------------------------------------


@pytest.mark.parametrize("n, exact", [
    (0, 2.996), (1, 4.744), (2, 6.296), (10, 16.96), (100, 118.1)])
def test_upper_bounds_are_those_of_poisson(n, exact):
    assert budget.upper_bound(n) == pytest.approx(exact, rel=0.012)


CHOICES = {  # what is known: budget, p, t -> r, s
    "nothing: two copies of nearly all": (1e-3, 1, 1, 1.999, 0.01),
    "errors ten times the budget": (1e-3, 1e-2, 1e-6, 1.9, 0.01),
    "errors twice the budget": (1e-3, 2e-3, 1e-6, 1.5, 0.01),
    "errors below the budget: the least": (1e-3, 1e-4, 1e-9, 1.02, 0.01),
    "few turn bad: spot checks alone": (1e-2, 1e-3, 5e-4, 1.02, 0.5 / 10.5 - 0.02),
    "many turn bad: more copies, too": (1e-2, 1e-3, 1e-2, 1.45, 0.05),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices(case):
    share, p, t, r, s = CHOICES[case]
    assert budget.choose(share, p, t) == pytest.approx((r, s), abs=1e-3)


@pytest.mark.parametrize("share", [1e-6, 1e-4, 1e-3, 1e-2, 0.3])
def test_whatever_is_measured_the_budget_is_kept(share):
    for p in (1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1):
        for t in (1e-7, 1e-5, 1e-3, 0.1, 1):
            r, s = budget.choose(share, p, t)
            assert (2 - r) * p <= share * (1 + 1e-9)
            assert r - 1 + s >= t / (t + share) - 1e-9 or r == 2
            assert 1.02 <= r <= 2 and 0.01 <= s <= 0.05


RATES = {  # checked, wrong, answers, found -> p, t
    "nothing": (0, 0, 0, 0, 1, 1),
    "a few right ones prove little": (2, 0, 2, 0, 1, 1),
    "3000 right ones: one in a thousand": (3000, 0, 30000, 0, 1e-3, 1e-4),
    "wrong ones count": (1000, 10, 2000, 5, 0.017, 0.00526),
}


@pytest.mark.parametrize("case", RATES)
def test_rates_are_upper_bounds(case):
    checked, wrong, answers, found, p, t = RATES[case]
    row = budget.Budget(checked=checked, wrong=wrong, answers=answers, found=found)
    assert budget.rates(row) == pytest.approx((p, t), rel=0.02)


def test_evidence_decays(grid):
    know(checked=800, wrong=8, answers=1600, found=4, settled=7)
    later = budget.known_of(m.apps["near"].id, NOW + 60 * DAY)
    assert (later.checked, later.wrong, later.answers, later.found) == (200, 2, 400, 1)
    assert later.settled == 7  # a total, no evidence
    assert budget.known_of(m.apps["near"].id, NOW - DAY).checked == 800  # a clock set back


# ---- What an application may say -----------------------------------------------


WRONG = {
    "a policy that compares": ("wrong_answers_at_most = 1e-3", "needs validation = \"recheck\""),
    "both": ('validation = "recheck"\nrecheck = 2.0\nwrong_answers_at_most = 1e-3',
             "leave out recheck"),
    "no third answer": ('validation = "recheck"\nmax_success_results = 2\n'
                        'wrong_answers_at_most = 1e-3', "max_success_results must be 3"),
    "zero": ('validation = "recheck"\nwrong_answers_at_most = 0', "between 1e-9 and 0.5"),
    "a text": ('validation = "recheck"\nwrong_answers_at_most = "few"', "between 1e-9 and 0.5"),
    "yes": ('validation = "recheck"\nwrong_answers_at_most = True', "between 1e-9 and 0.5"),
    "not a number": ('validation = "recheck"\nwrong_answers_at_most = float("nan")', "between"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_a_budget_is_refused(grid, folder, case):
    constants, said = WRONG[case]
    (folder / "other.py").write_text(f"{make.COUNT}\n{constants}\n")
    (fault,) = m.sync_apps([folder], NOW)
    assert "other.py" in fault and said in fault and "wrong_answers_at_most" in fault


def test_a_workunit_without_room_for_more_copies_is_refused(single):
    """Also where one is drawn: its host may prove to be a stranger, and two may differ."""
    for given in (dict(max_success_results=1, max_total_results=1), dict(max_success_results=2)):
        with pytest.raises(m.PluginError, match="max_success_results"):
            make.add("near", 1, **given)
    assert make.units() == []


def test_other_applications_are_left_alone(folder, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda file: None)
    with make.project(folder, {"near": make.NEAR}, stock=0, min_sendwork_interval=0):
        name = make.answered("5", "5")
        judge()
        assert unit().min_quorum == 2 and unit().canonical_resultid and name
        assert not budget.Evidence.select().exists() and not budget.Budget.select().exists()
        assert budget.spot_check_rate(m.apps["near"]) is None
        assert budget.trust_facts(NOW) == []


# ---- How many copies -----------------------------------------------------------


def test_mean_number_of_copies_is_r(grid):
    """[S3-40 S3-42]: drawn at creation from the project's generator."""
    know(checked=300, answers=300)  # p = 0.01: as much as the budget allows
    application = m.apps["near"]
    m.project.now = NOW
    r, n, runs = budget.chosen_for(application, NOW)[0], 2000, []
    for _ in range(2):
        m.project.rng = random.Random(5)
        runs.append([budget.shape_work(application, {}) for _ in range(n)])
    drawn, again = runs
    assert drawn == again
    assert all(d["min_quorum"] == d["target_nresults"] in (1, 2) for d in drawn)
    mean = sum(d["min_quorum"] for d in drawn) / n
    assert abs(mean - r) < 3 * ((r - 1) * (2 - r) / n) ** 0.5
    assert 1.3 < r < 1.7  # or else this proves nothing


def test_nothing_known_means_two_copies(grid):
    grid.rng = random.Random(1)
    for number in range(5):
        assert make.add(number=number).min_quorum == 2


def test_a_stranger_is_checked_by_another_at_once(single, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    make.add()
    ann = prove(Client("ann"), run=9)
    assert ann.fetch() == ["near_0_0"]
    assert unit().min_quorum == unit().target_nresults == 2
    assert f"host {ann.hostid} is not proven, 9 of 10 right answers in a row" in caplog.text
    m.run_pass(NOW + 1, m.STAGES)
    assert len(make.copies()) == 2


def test_a_proven_host_is_believed_alone(single, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    make.add()
    ann = prove(Client("ann"))
    ann.report(*ann.fetch(), "5")
    judge()
    assert unit().canonical_resultid and len(make.copies()) == 1
    assert f"one copy: host {ann.hostid} is proven, 10 right answers in a row; r = 1." \
        in caplog.text
    assert known().single == known().settled == 1
    assert run_of(ann) == 10  # what nobody has compared proves nothing


def test_a_drawn_second_copy_is_explained(grid, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    make.add()
    Client("ann").fetch()
    assert "two copies, r = 1.99 for a budget of 0.01" in caplog.text


NO_PROOF = {  # what becomes of a proven host before its answer is judged
    "it was found out": dict(run=0),
    "its proof has become old": dict(checked_time=NOW - 31 * DAY),
}


@pytest.mark.parametrize("case", NO_PROOF)
def test_a_single_answer_needs_a_proof_when_it_is_judged(single, case):
    make.add()
    ann, bob = prove(Client("ann")), Client("bob")
    (name,) = ann.fetch()
    budget.Evidence.update(**NO_PROOF[case]).execute()
    ann.report(name, "5")
    judge()
    assert not unit().canonical_resultid and unit().min_quorum == 2
    bob.report(*bob.fetch(NOW + 5), "5", now=NOW + 5)
    judge(NOW + 5)
    assert unit().canonical_resultid and run_of(bob) == 1


def test_proofs_end_after_a_month(single):
    row = budget.Evidence(run=10, checked_time=NOW)
    assert budget.is_proven(row, NOW + 30 * DAY) and not budget.is_proven(row, NOW + 30 * DAY + 1)


def test_two_single_answers_that_differ_ask_for_a_third(single):
    """A copy was given up and replaced, and both come at once."""
    make.add(delay_bound=1000)
    ann, bob, cyd = prove(Client("ann")), prove(Client("bob")), Client("cyd")
    (first,) = ann.fetch()
    m.run_pass(NOW + 2000, m.STAGES)
    (second,) = bob.fetch(NOW + 2001)
    ann.report(first, "5", now=NOW + 2002)
    bob.report(second, "9", now=NOW + 2003)
    judge(NOW + 2003)
    assert not unit().canonical_resultid and unit().min_quorum == 2
    (third,) = cyd.fetch(NOW + 2010)
    cyd.report(third, "9", now=NOW + 2011)
    judge(NOW + 2011)
    assert unit().canonical_resultid == make.result(second).id
    assert (run_of(ann), run_of(bob), run_of(cyd)) == (0, 11, 1)


def test_an_unreadable_single_answer_asks_for_nothing_but_its_replacement(single):
    make.add()
    ann = prove(Client("ann"), singles=3)
    ann.report(*ann.fetch(), '"garbage"')
    judge()
    assert unit().min_quorum == 1 and len(make.copies()) == 2
    assert run_of(ann) == 0 and known().wrong == 0  # It would never have been believed.


def strangers(*answers):
    """Let so many strangers answer one workunit of two copies, in a project of many hosts."""
    know(hosts=10)
    m.project.rng = random.Random(1)
    make.add()
    clients = [Client(f"stranger {k}") for k in range(len(answers))]
    for k, (client, answer) in enumerate(zip(clients, answers)):
        client.report(*client.fetch(NOW + k), answer, now=NOW + k)
    judge(NOW + 5)
    return clients


def look(now):
    """A pass of all stages, and one for what it woke."""
    m.run_pass(now)
    m.run_pass(now + 1)


def test_equal_answers_of_two_strangers_wait_for_somebody_who_knows_one(grid, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    ann, bob = strangers("5", "5")
    assert not unit().canonical_resultid and len(make.copies()) == 2
    assert "waits 10800 s at most: 2 equal answers" in caplog.text
    caplog.clear()
    look(NOW + 700)
    assert not unit().canonical_resultid
    assert "judged" not in caplog.text  # To read and compare the same again would be a waste.
    prove(bob, run=1)
    look(NOW + 1000)  # not yet: a look every ten minutes
    assert not unit().canonical_resultid
    look(NOW + 1400)
    assert unit().canonical_resultid and len(make.copies()) == 2
    assert run_of(ann) == 1
    assert not budget.Waiting.select().exists()  # Its number may be given to another workunit.


def test_a_host_whose_task_another_one_reports_is_not_proven_any_more(grid):
    """[C43] Or a liar would stay proven, whatever its volunteer's other computers report."""
    ann = prove(Client("ann"), 20)
    make.add()
    (name,) = ann.fetch(NOW)
    Client("ann").report(name, "5", now=NOW + 1)
    assert run_of(ann) == 0


def test_different_answers_of_strangers_do_not_wait(grid):
    strangers("5", "9")
    look(NOW + 10)
    assert len(make.copies()) == 3 and not budget.Waiting.select().exists()


def test_equal_answers_of_two_strangers_need_a_third_in_the_end(grid, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    strangers("5", "5")
    for at in range(600, 10800, 3300):
        look(NOW + at + 20)
        assert len(make.copies()) == 2
    look(NOW + 11200)
    m.run_pass(NOW + 11210)
    assert "one more copy: equal answers" in caplog.text
    cyd = Client("cyd")
    cyd.report(*cyd.fetch(NOW + 11220), "5", now=NOW + 11230)
    judge(NOW + 11230)
    assert unit().canonical_resultid and run_of(cyd) == 1


TRUSTED = {  # answers, runs of their hosts -> the answer believed
    "strangers alone have no vote": ("55", [0, 0], None),
    "one known vouches": ("55", [1, 0], "5"),
    "three strangers": ("555", [0, 0, 0], "5"),
    "three strangers and a contradiction": ("5955", [0, 0, 0, 0], None),
    "four strangers and a contradiction": ("59555", [0, 0, 0, 0, 0], "5"),
    "one known against three strangers": ("5955", [0, 3, 0, 0], None),
    "two known against three strangers": ("59559", [0, 3, 0, 0, 1], "9"),
    "one known against one known, whoever else agrees": ("595", [1, 1, 0], None),
    "two known against one": ("595", [1, 30, 1], "5"),
    "a known one against a stranger is but one": ("59", [7, 0], None),
    "three strangers where no more copies may be made": ("559751", [0] * 6, "5"),
    "a tie where no more copies may be made": ("559599", [0] * 6, None),
    "one known against one, where no more copies may be made": ("591375", [1, 1, 0, 0, 0, 0], "5"),
    "two strangers where no more copies may be made": ("591375", [0] * 6, None),
}


@pytest.mark.parametrize("case", TRUSTED)
def test_known_hosts_have_the_votes(grid, caplog, case):
    """Any number of strangers may be one person; who was right before is another matter."""
    caplog.set_level(logging.INFO, "minigrid")
    answers, runs, believed = TRUSTED[case]
    know(hosts=10)
    m.project.rng = random.Random(1)
    make.add()
    for k, (answer, run) in enumerate(zip(answers, runs)):
        client = prove(Client(f"user {k}"), run)
        m.Workunit.update(target_nresults=k + 1, transition_time=0).where(
            m.Workunit.target_nresults <= k).execute()
        m.run_pass(NOW + 1, m.STAGES[:1])
        client.report(*client.fetch(NOW + 1), answer, now=NOW + 1)
    m.Workunit.update(transition_time=0).execute()
    judge()
    right = [answer for answer, r in zip(answers, make.copies())
             if r.validate_state == m.ValidateState.VALID]
    assert right == [believed] * (answers.count(believed) if believed else 0)
    assert bool(unit().canonical_resultid) == bool(believed)
    if believed and len(right) < len(answers):
        n = sum(run > 0 for answer, run in zip(answers, runs) if answer == believed) or "none"
        assert f"{len(right)} of {len(answers)} answers are believed; of their hosts {n} had " \
               f"been found right elsewhere" in caplog.text
    # To wait has sense only while somebody may still come to be known.
    assert budget.Waiting.select().exists() == (not believed and not any(runs))


def test_a_small_project_believes_two_strangers(grid):
    know(hosts=0)
    make.add()
    ann, bob = Client("ann"), Client("bob")
    for client in (ann, bob):
        client.report(*client.fetch(), "5")
    judge()
    assert unit().canonical_resultid and known().hosts == 2


# ---- Evidence ------------------------------------------------------------------


def vote(*answers, runs=None):
    """Let clients answer one workunit of two copies, or more; return the clients."""
    m.project.rng = random.Random(1)
    clients = [Client(f"user {k}") for k in range(len(answers))]
    for client, run in zip(clients, runs or []):
        prove(client, run, singles=4)
        for number in range(100, 104):
            budget.Single.create(host=client.hostid, app=m.apps["near"].id, time=NOW,
                                 workunit=f"near_{number}", number=number)
    make.add(min_quorum=2)
    for k, (client, answer) in enumerate(zip(clients, answers)):
        if k == 2:
            judge(NOW + 12)
        client.report(*client.fetch(NOW + 10 * k), answer, now=NOW + 10 * k + 1)
    judge(NOW + 100)
    return clients


VOTES = {  # answers, runs before -> runs after, checked, wrong, answers, found, doubtful
    "strangers who agree": ("55", [0, 0], [1, 1], 0, 0, 0, 0, 0),
    "the tenth proves; it does not count yet": ("55", [9, 0], [10, 1], 0, 0, 0, 0, 0),
    "a proven one counts": ("55", [10, 3], [11, 4], 1, 0, 1, 0, 0),
    "a proven one is found out": ("955", [12, 3, 0], [0, 4, 1], 1, 1, 1, 1, 4),
    "one is wrong that was proven once": ("955", [9, 10, 0], [0, 11, 1], 1, 0, 1, 0, 4),
}


@pytest.mark.parametrize("case", VOTES)
def test_compared_answers_are_evidence(grid, case):
    answers, before, after, *counts = VOTES[case]
    know(checked=0)
    clients = vote(*answers, runs=before)
    assert [run_of(client) for client in clients] == after
    assert not budget.Evidence.select().where(budget.Evidence.singles > 0).exists()
    assert budget.Single.select().where(budget.Single.doubtful).count() == counts[4]
    row = known()
    assert [row.checked, row.wrong, row.answers, row.found, row.doubtful] == pytest.approx(counts)
    assert (row.settled, row.judged, row.single) == (1, len(answers), 0)


def test_who_is_found_out_makes_its_single_answers_doubtful(single, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    ann = prove(Client("ann"))
    for number in range(3):
        make.add(number=number)
        ann.report(*ann.fetch(), "5")
        judge()
    m.project.rng = random.Random(1)
    know(checked=0)
    make.add(number=9)
    bob, cyd = Client("bob"), Client("cyd")
    ann.report(*ann.fetch(NOW + 200), "7", now=NOW + 201)
    bob.report(*bob.fetch(NOW + 202), "5", now=NOW + 203)
    judge(NOW + 203)
    cyd.report(*cyd.fetch(NOW + 210), "5", now=NOW + 211)
    judge(NOW + 211)
    assert known().doubtful == 3
    assert f"host {ann.hostid} was proven by 10 right answers and is no longer" in caplog.text
    assert f"doubtful: 3 answers of host {ann.hostid} that were believed alone" in caplog.text
    why = f"host {ann.hostid}, whose word alone was taken for it, was wrong in near_9_0, the " \
          f"next of its answers that was compared"
    for wu in make.units()[:3]:
        assert f"{m.label(wu)} doubtful: {why}" in caplog.text
    path = m.project.data / "wrong" / "near.doubtful.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        dict(workunit=f"near_{n}", number=n, host=ann.hostid, believed=NOW + 1, time=NOW + 212,
             why=why) for n in range(3)]
    (page,) = [part for part in budget.trust_facts(NOW) if part["title"] == "Doubtful answers"]
    assert page["rows"] == [[f"near_{n}", n, "near", f"computer {ann.hostid}",
                             "2023-11-14 22:13 UTC"] for n in (2, 1, 0)]
    budget.hourly(NOW + 366 * DAY)
    assert not budget.Single.select().exists()


@pytest.mark.parametrize("answer, left", [("5", 0), ('"garbage"', 1)])
def test_a_right_answer_clears_those_believed_alone_before(single, answer, left):
    """One that cannot be read says nothing of them."""
    make.add()
    ann, bob, cyd = prove(Client("ann")), Client("bob"), Client("cyd")
    ann.report(*ann.fetch(), "5")
    judge()
    assert [row.workunit for row in budget.Single.select()] == ["near_0"]
    m.project.rng = random.Random(1)
    know(checked=0)
    make.add(number=9)
    for k, (client, said) in enumerate([(ann, answer), (bob, "5"), (cyd, "5")]):
        if names := client.fetch(NOW + 10 + k):
            client.report(*names, said, now=NOW + 20 + k)
        judge(NOW + 30 + 10 * k)
    assert m.Workunit.get(name="near_9").canonical_resultid
    assert budget.Single.select().count() == left and known().doubtful == 0
    assert budget.Evidence.get(host=ann.hostid).singles == left


LATE = {  # the late copy's answer -> run of the one believed alone, wrong ones
    "5": (11, 0),
    "9": (0, 1),
    '"garbage"': (10, 0),
}


def test_check_set_alone_with_one_answer_proves_nothing(folder, single):
    """It has compared nothing: whoever is believed alone has not been right once more."""
    (folder / "near.py").write_text(TEXT + "\n\ndef check_set(answers):\n    return 0\n")
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.project.rng = One(1)
    know(checked=1e6, answers=1e6)
    client = prove(Client("ann"))
    make.add("near", 7)
    (name,) = client.fetch()
    client.report(name, "5")
    judge()
    assert unit().canonical_resultid and run_of(client) == 10 and known().single == 1


@pytest.mark.parametrize("answer", LATE)
def test_a_late_copy_checks_the_answer_believed_alone(single, answer):
    know(checked=1e6, answers=1e6, hosts=10)
    make.add(delay_bound=1000)
    ann, bob = prove(Client("ann")), prove(Client("bob"))
    (first,) = ann.fetch()
    budget.Evidence.update(run=0).where(budget.Evidence.host == ann.hostid).execute()
    m.run_pass(NOW + 2000, m.STAGES)
    bob.report(*bob.fetch(NOW + 2001), "5", now=NOW + 2002)
    judge(NOW + 2002)
    assert unit().canonical_resultid
    ann.report(first, answer, now=NOW + 2010)
    judge(NOW + 2010)
    run, wrong = LATE[answer]
    assert run_of(bob) == run and known().found == pytest.approx(wrong, rel=1e-3)
    assert run_of(ann) == (1 if answer == "5" else 0)


# ---- What is shown -------------------------------------------------------------


def test_the_page_of_trust_shows_what_is_chosen_and_its_cost(grid):
    know(checked=3000, answers=3000, settled=100, judged=150, single=60, doubtful=2)
    (part,) = budget.trust_facts(NOW)
    assert "independently" in part["text"] and "agree to" in part["text"]
    (row,) = part["rows"]
    assert len(row) == len(part["columns"])
    r, s, p, t = budget.chosen_for(m.apps["near"], NOW)
    assert row == ["near", "0.01", f"{r:.2f}", f"{s:.1%}", "0 of 3,000, at most 0.00099",
                   "0 in 3,000, at most 0.00099", f"1.50 (expected {r + s:.2f} from proven hosts)",
                   "60 of 100", 2]
    m.project.now = NOW
    assert budget.spot_check_rate(m.apps["near"]) == s
