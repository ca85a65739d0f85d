"""The validator: how outputs are compared, and the rules that follow from it."""

import json
import math

import pytest
from make import (DAY, NOW, RETRY, Client, add, answered, copies, error, numbered, output, result,
                  row, sent, settings, states, success, units, unsent, wu)

import minigrid as m

A, F, S, V = m.AssimilateState, m.FileDeleteState, m.ServerState, m.ValidateState
DONE, NEVER = dict(assimilate_state=A.DONE), m.NEVER
BAD, AWAY, ODD, LATER = "bad", "away", [], {}  # troubles of make.NEAR
MISSING, NO_FOLDER, GARBLED = "no file", "no folder", "no JSON"  # troubles of the file

# ---- The policy "quorum": what it says of outputs ------------------------------


def judge(outputs, unit, first=success(), **hooks):
    """Let the policy look at results with these outputs; return its verdict."""
    results = numbered(unit, [row(**first.__data__)] + [success() for _ in outputs[1:]])
    for r, value in zip(results, outputs):
        path = output(r.name)
        if value == NO_FOLDER:
            path.parent.rmdir()
        elif value != MISSING:
            path.write_text("{" if value == GARBLED else json.dumps(value))
    application = m.apps["near"]
    application.hooks.update(hooks)
    try:
        return application.judge(unit, results, application)
    finally:
        for r in results:
            output(r.name).parent.mkdir(exist_ok=True)


VOTES = {  # id: (min_quorum, outputs, canonical, matching, unreadable, unsure)
    "two agree": (2, [5, 5], 1, {1, 2}, {}, {}),
    "S2-23 the application compares": (2, [5, 6], 1, {1, 2}, {}, {}),
    "two differ": (2, [5, 7], 0, {}, {}, {}),
    "below the quorum nobody is compared": (2, [BAD], 0, {}, {}, {}),
    "C20 two of three": (2, [5, 9, 5], 1, {1, 3}, {}, {}),
    "C20 a majority of the quorum: 2 of 3": (3, [1, 5, 5], 2, {2, 3}, {}, {}),
    "C20 a majority of the quorum: 2 of 4": (4, [5, 5, 1, 9], 0, {}, {}, {}),
    "C20 a majority of the quorum: 3 of 4": (4, [5, 5, 1, 5], 1, {1, 2, 4}, {}, {}),
    "C20 a, a, b, b": (2, [5, 5, 9, 9], 0, {}, {}, {}),
    "V3 a, a, b, b, b": (2, [5, 5, 9, 9, 9], 3, {3, 4, 5}, {}, {}),
    "V2 quorum 1: the first": (1, [5, 9], 1, {1}, {}, {}),
    "V2 quorum 1: the larger group": (1, [5, 9, 9], 2, {2, 3}, {}, {}),
    "V10 the one in the middle": (2, [1, 2, 3], 2, {1, 2, 3}, {}, {}),
    "V10 two ends of one group": (2, [1, 2, 2, 3], 2, {1, 2, 3, 4}, {}, {}),
    "one is unreadable": (2, [5, BAD, 5], 1, {1, 3}, {2}, {}),
    "not JSON": (2, [5, GARBLED], 0, {}, {2}, {}),
    "reported, and not there": (2, [5, 5, MISSING], 1, {1, 2}, {3}, {}),
    "its directory is gone: trouble of ours": (2, [5, 5, NO_FOLDER], 1, {1, 2}, {}, {3}),
    "one is away": (2, [5, 5, AWAY], 1, {1, 2}, {}, {3}),
    "one is away, too few are left": (2, [5, AWAY], 0, {}, {}, {2}),
    "one is unreadable, too few are left": (3, [5, 5, BAD], 0, {}, {3}, {}),
    "never comparable": (2, [ODD, 5, 5], 2, {2, 3}, {}, {}),
    "not comparable just now": (2, [5, 5, LATER], 0, {}, {}, {1, 3}),
}


@pytest.mark.parametrize("case", VOTES)
def test_vote(case, grid):
    quorum, outputs, *wanted = VOTES[case]
    verdict = judge(outputs, wu(min_quorum=quorum, target_nresults=quorum))
    assert verdict.seen == set(range(1, len(outputs) + 1))
    assert [verdict.canonical, verdict.matching, verdict.unreadable, verdict.unsure] == [
        wanted[0], *map(set, wanted[1:])]


STRAGGLERS = {  # id: (outputs, the first is canonical; matching, unreadable, unsure, late)
    "agrees, differs, unreadable": ([5, 6, 7, BAD], {2}, {4}, {}, {}),
    "V9 the canonical output is gone": ([MISSING, 5, BAD, AWAY], {}, {3}, {4}, {2}),
    "V9 ... cannot be read now": ([AWAY, 5], {}, {}, {2}, {}),
    "V9 ... or ever": ([BAD, 5], {}, {}, {}, {2}),
    "V15 the first that waits ends the look": ([5, 5, LATER, 5, BAD], {2}, {}, {3, 4, 5}, {}),
    "V15 also if it cannot be read": ([5, BAD, 5, AWAY, 5, BAD], {3}, {2}, {4, 5, 6}, {}),
    "never comparable": ([5, ODD], {}, {}, {}, {}),
}


@pytest.mark.parametrize("case", STRAGGLERS)
def test_stragglers(case, grid):
    outputs, *wanted = STRAGGLERS[case]
    verdict = judge(outputs, wu(canonical_resultid=1), first=success(V.VALID))
    assert verdict.seen == set(range(2, len(outputs) + 1))
    found = [verdict.matching, verdict.unreadable, verdict.unsure, verdict.late]
    assert found == [*map(set, wanted)]
    assert verdict.canonical == 0


SETS = {  # id: (outputs, what check_set says, what it is asked, canonical, matching)
    "S2-22 it picks": ([5, 9, 6], 2, [5, 9, 6], 3, {1, 3}),
    "no majority is asked for": ([1, 5, 9], 1, [1, 5, 9], 2, {2}),
    "it sees what can be read": ([BAD, 5, 9, 9], 0, [5, 9, 9], 2, {2}),
    "no agreement": ([5, 5], None, [5, 5], 0, {}),
    "not asked below the quorum": ([5, BAD], 0, None, 0, {}),
}


@pytest.mark.parametrize("case", SETS)
def test_check_set_replaces_the_vote(case, grid):
    outputs, index, wanted, canonical, matching = SETS[case]
    asked = []
    verdict = judge(outputs, wu(), check_set=lambda answers: asked.append(answers) or index)
    assert asked == [wanted] * (wanted is not None)
    assert (verdict.canonical, verdict.matching) == (canonical, set(matching))


SPOILT_SETS = {  # id: (outputs, what check_set cannot take, canonical, unreadable)
    "one is left out": ([5, 7, 6], [7], 1, {2}),
    "too few are left": ([5, 7], [7], 0, {2}),
    "nobody knows which": ([5, 7, 7], [7], 0, {}),
    "none can be taken": ([7, 7], [7], 0, {}),
}


@pytest.mark.parametrize("case", SPOILT_SETS)
def test_an_answer_that_check_set_cannot_take(case, grid):
    outputs, refused, canonical, unreadable = SPOILT_SETS[case]

    def check_set(answers):
        if set(answers) & set(refused):
            raise ValueError("no")
        return 0

    verdict = judge(outputs, wu(), check_set=check_set)
    assert (verdict.canonical, verdict.unreadable) == (canonical, set(unreadable))


def test_who_votes():
    """C19, V17: what is INVALID, NO_CHECK or TOO_LATE does not; stragglers exclude the VALID."""
    results = [success(state) for state in V] + [sent(), error()]
    votes = {flag: states(m.candidates(results, flag), "validate_state") for flag in (True, False)}
    assert votes == {True: [V.INIT, V.INCONCLUSIVE], False: [V.INIT, V.VALID, V.INCONCLUSIVE]}


# ---- The rules that follow -----------------------------------------------------

OK, BETTER, WRONG = "valid", "inconclusive", "invalid"
AGREE = dict(canonical=1, matching={1, 2})
TWO, THREE = [success(), success()], [success(), success(), success()]
UNSURE = "look again"
DECIDED = dict(canonical_resultid=1, **DONE)

CASES = {  # id: (changes of the workunit, results, verdict, rules, next look: None = as before)
    "C13 consensus": ({}, TWO, AGREE, [OK, OK, "consensus"], NEVER),
    "one differs": ({}, THREE, AGREE, [OK, OK, WRONG, "consensus"], NEVER),
    "C19 INCONCLUSIVE ones are settled": (
        {}, [success(V.INCONCLUSIVE), success()], AGREE, [OK, OK, "consensus"], NEVER),
    "S0-48 unsent copies end": (
        {}, [*TWO, unsent(), row(server_state=S.INACTIVE), sent()], AGREE,
        [OK, OK, "consensus"] + ["not needed: decided"] * 2, NEVER),
    "S4-31 told of a failure already": (
        dict(error_mask=1, **DONE), TWO, AGREE, [OK, OK, "consensus after the end"], NEVER),
    "S4-31 about to be told": (
        dict(error_mask=1, assimilate_state=A.READY), TWO, AGREE,
        [OK, OK, "consensus after the end"], NEVER),
    "V6 consensus, one is unsure": (
        {}, THREE, dict(**AGREE, unsure={3}), [OK, OK, UNSURE, "consensus"], NOW + RETRY),
    "consensus, one is unreadable": (
        {}, THREE, dict(**AGREE, unreadable={3}), ["unreadable output", OK, OK, "consensus"],
        NEVER),
    "consensus, and a report came meanwhile": (
        {}, THREE, dict(**AGREE, seen={1, 2}), [OK, OK, "consensus"], NOW),
    "no consensus, and a report came meanwhile": (
        dict(target_nresults=3), THREE, dict(seen={1, 2}), [BETTER, BETTER], NOW),
    "below the quorum": ({}, [success(), sent()], {}, [], None),
    "the canonical result does not exist": (
        dict(canonical_resultid=9), [success()], {}, [], None),
    "C21 no consensus": ({}, TWO, {}, [BETTER, BETTER], NOW),
    "V14 more copies are under way": (
        dict(target_nresults=3), [*TWO, sent()], {}, [BETTER, BETTER], None),
    "S4-59 unreadable ones are not compared": (
        {}, TWO, dict(unreadable={2}), ["unreadable output", BETTER], NOW),
    "all are unreadable": (
        {}, TWO, dict(unreadable={1, 2}), ["unreadable output"] * 2, NOW),
    "C13 unsure, more copies are under way": (
        dict(target_nresults=3), TWO, dict(unsure={2}), [BETTER, BETTER], NOW + RETRY),
    "V7 unsure, one more copy": ({}, TWO, dict(unsure={2}), [BETTER, BETTER], NOW),
    "S4-29 V4 no more successes allowed": (
        dict(max_success_results=2), TWO, {}, [BETTER, BETTER, "fail: no consensus"], NOW),
    "S4-29 V4 no more results allowed": (
        dict(max_total_results=2), TWO, {}, [BETTER, BETTER, "fail: no consensus"], NOW),
    "C6 as many as allowed, more under way": (
        dict(max_success_results=2, target_nresults=3), TWO, {}, [BETTER, BETTER], None),
    "C6 one above": (
        dict(max_success_results=2, target_nresults=4), THREE, {},
        [BETTER] * 3 + ["fail: no consensus"], NOW),
    "C20 VALID ones count": (
        {}, [success(V.VALID), success()], AGREE, [OK, OK, "consensus"], NEVER),
    "straggler agrees": (DECIDED, [success(V.VALID), success()], dict(matching={2}), [OK], NOW),
    "straggler differs": (DECIDED, [success(V.VALID), success()], {}, [WRONG], NOW),
    "straggler, INCONCLUSIVE before": (
        DECIDED, [success(V.VALID), success(V.INCONCLUSIVE)], {}, [WRONG], NOW),
    "straggler is unreadable": (
        DECIDED, [success(V.VALID), success()], dict(unreadable={2}), ["unreadable output"], NOW),
    "straggler must wait": (
        DECIDED, [success(V.VALID), success()], dict(unsure={2}), [], NOW + RETRY),
    "one straggler must wait": (
        DECIDED, [success(V.VALID), *TWO], dict(matching={2}, unsure={3}), [OK], NOW + RETRY),
    "straggler, and a report came meanwhile": (
        DECIDED, [success(V.VALID), *TWO], dict(seen={2}, matching={2}), [OK], NOW),
    "straggler waits, and a report came meanwhile": (
        DECIDED, [success(V.VALID), *TWO], dict(seen={2}, unsure={2}), [], NOW),
    "no stragglers after all": (DECIDED, [success(V.VALID), success(V.TOO_LATE)], {}, [], None),
}


def settle(case, **more):
    """Apply the verdict of a case to fresh rows; return workunit and results."""
    changes, results, verdict, *_ = case
    unit = wu(**{**dict(need_validate=True, transition_time=NEVER), **changes, **more})
    results = numbered(unit, [row(**r.__data__) for r in results])
    verdict = m.Verdict(**{**dict(seen={r.id for r in results}), **verdict})
    m.validate(unit, results, verdict, {}, NOW)
    return unit, results


@pytest.mark.parametrize("case", CASES)
def test_rules(case, fired):
    *_, rules, wanted = CASES[case]
    unit, _ = settle(CASES[case])
    assert fired() == rules + ["judged"]
    assert unit.transition_time == (wanted or NEVER)
    assert unit.need_validate is False  # S0-52


@pytest.mark.parametrize("case", CASES)
def test_an_earlier_look_is_kept(case, fired):
    """Unless the assimilator is to do the waking: a deadline must not be slept through."""
    *_, wanted = CASES[case]
    unit, _ = settle(CASES[case], transition_time=NOW + 50)
    assert unit.transition_time == (wanted if "consensus" in fired()
                                    or "consensus after the end" in fired()
                                    else min(wanted or NEVER, NOW + 50))


AIMS = [  # (target_nresults, max_success_results, max_total_results, usable) -> target, error
    (2, 6, 10, 2, 3, 0), (2, 3, 10, 2, 3, 0), (2, 6, 3, 2, 3, 0), (3, 6, 10, 2, 3, 0),
    (2, 6, 10, 4, 5, 0), (2, 2, 10, 2, 2, 4), (2, 6, 2, 2, 2, 4), (2, 6, 10, 6, 2, 4),
    (3, 3, 3, 3, 3, 4)]


@pytest.mark.parametrize("target, success_max, total_max, usable, aim, mask", AIMS)
def test_one_more_within_the_limits(target, success_max, total_max, usable, aim, mask, fired):
    """C21."""
    changes = dict(target_nresults=target, max_success_results=success_max,
                   max_total_results=total_max)
    unit, _ = settle((changes, [success() for _ in range(usable)], {}))
    assert (unit.target_nresults, unit.error_mask) == (aim, mask)


def test_unreadable_ones_are_no_reason_for_a_higher_aim(fired):
    unit, results = settle(({}, THREE, dict(unreadable={2, 3})))
    assert unit.target_nresults == 2
    assert states(results, "outcome") == [1, 6, 6]
    assert states(results, "validate_state") == [V.INCONCLUSIVE, V.INVALID, V.INVALID]


def test_consensus_is_written_down(fired):
    unit, results = settle(({}, THREE, dict(canonical=2, matching={2, 3})))
    assert (unit.canonical_resultid, unit.assimilate_state) == (2, A.READY)
    assert states(results, "validate_state") == [V.INVALID, V.VALID, V.VALID]
    assert states(results, "granted_credit") == [0, 10, 10]


@pytest.mark.parametrize("given, most, granted", [
    (10, 1e6, 10), (10, 10, 10), (10, 9, 9), (-5, 9, 0), (10, 0, 0)])
def test_credit_is_equal_and_bounded(given, most, granted, fired, monkeypatch):
    monkeypatch.setattr(m.project, "settings", m.Settings(max_granted_credit=most))
    unit, results = settle((dict(canonical_credit=given), TWO, AGREE))
    assert states(results, "granted_credit") == [granted, granted]
    assert unit.canonical_credit == granted
    case = dict(DECIDED, canonical_credit=given), [success(V.VALID), success()], dict(matching={2})
    late = settle(case)[1][1].granted_credit  # S0-45: as those before it got, or none at all
    assert late == (max(given, 0) if most else 0)


def test_credit_is_not_added_to_what_was_granted(fired):
    """S0-39: compared again, as its canonical result was lost, a copy keeps what it has."""
    _, results = settle(({}, [success(V.VALID, granted_credit=10), success()], AGREE))
    assert states(results, "granted_credit") == [10, 10]


def test_credit_is_given_once(fired):
    """Also where a VALID result is voted on again, because its canonical one was lost."""
    unit, results = wu(), numbered(wu(), [success(V.VALID, granted_credit=10), success()])
    hosts = {r.id: (m.Host(), m.User(), m.HostAppVersion()) for r in results}
    m.validate(unit, results, m.Verdict(seen={1, 2}, **AGREE), hosts, NOW)
    assert [[host.total_credit, user.total_credit, version.consecutive_valid]
            for host, user, version in hosts.values()] == [[0, 0, 0], [10, 10, 1]]


def test_average_of_credit_halves_in_a_week():
    host = m.Host()
    (add_to_average,) = m.plugged("add_to_average")
    add_to_average(host, 70, NOW)
    first = host.expavg_credit
    assert first == pytest.approx(70 * math.log(2) / 7)
    add_to_average(host, 0, NOW + 7 * DAY)
    assert host.expavg_credit == pytest.approx(first / 2)
    add_to_average(host, 0, NOW)  # The clock was set back: nothing grows.
    assert host.expavg_credit == pytest.approx(first / 2)


# ---- In the store --------------------------------------------------------------


def passes(now, *stages):
    return m.run_pass(now, [getattr(m, name) for name in stages or ("transitioner", "validator")])


def test_credit_reaches_hosts_and_users_once(grid):
    name = answered("5", "5", "9", credit=8, min_quorum=2, target_nresults=3)
    m.HostAppVersion.update(consecutive_valid=4).execute()
    for now in (NOW + 1, NOW + 2, NOW + 3):
        passes(now)
    assert states(copies(), "granted_credit") == [8, 8, 0]
    for model in (m.Host, m.User):
        assert [h.total_credit for h in model.select().order_by(model.id)] == [8, 8, 0]
        assert [h.expavg_time for h in model.select().order_by(model.id)] == [NOW + 1, NOW + 1, 0]
    assert [v.consecutive_valid for v in m.HostAppVersion.select()] == [5, 5, 0]
    assert units()[0].name == name and units()[0].canonical_resultid == 1


def test_one_host_may_be_rewarded_for_several_workunits(grid):
    ann, bob = Client("ann"), Client("bob")
    for number in range(3):
        add(number=number, credit=2)
    for client in (ann, bob):
        for name in client.fetch(work_req_seconds=1e6):
            client.report(name, "5")
    passes(NOW + 1)
    assert (ann.host().total_credit, bob.host().total_credit) == (6, 6)
    assert [v.consecutive_valid for v in m.HostAppVersion.select()] == [3, 3]


def test_what_is_not_decided_is_not_held_against_anybody(grid):
    """INCONCLUSIVE and unsure results leave a host's series of valid ones alone."""
    answered("5", "9", '"away"', min_quorum=3)
    m.HostAppVersion.update(consecutive_valid=4).execute()
    passes(NOW + 1)
    assert states(copies(), "validate_state") == [V.INCONCLUSIVE] * 3
    assert [v.consecutive_valid for v in m.HostAppVersion.select()] == [4, 4, 4]


def test_a_third_opinion_decides(grid):
    """C21: two differ, one more copy is made; C19: all three are compared."""
    answered("5", "9")
    passes(NOW + 1)
    passes(NOW + 2)
    assert len(copies()) == 3
    cyd = Client("cyd")
    cyd.report(*cyd.fetch(NOW + 3), "9", NOW + 3)
    passes(NOW + 4)
    assert states(copies(), "validate_state") == [V.INVALID, V.VALID, V.VALID]
    assert units()[0].canonical_resultid == 2


def test_a_tie_gets_one_more_copy(grid):
    """C20: a, a, b, b arriving together."""
    answered("5", "5", "9", "9", min_quorum=2, target_nresults=4)
    passes(NOW + 1)
    passes(NOW + 2)
    assert units()[0].canonical_resultid == 0
    assert states(copies(), "server_state") == [S.OVER] * 4 + [S.UNSENT]


def test_no_answer_possible_is_an_error_at_once(grid):
    """S4-29: it does not wait for a copy that cannot come."""
    answered("5", "9", max_success_results=2, max_total_results=2)
    passes(NOW + 1)
    passes(NOW + 2)
    assert (units()[0].error_mask, units()[0].assimilate_state) == (4, A.READY)
    assert states(copies(), "validate_state") == [V.NO_CHECK, V.NO_CHECK]


def test_transient_failure_is_looked_at_again(grid):
    """V6: the others agree; six hours later the third is valid, too, and gets its credit."""
    answered("5", "5", '"away"', min_quorum=2, target_nresults=3, credit=8)
    passes(NOW + 1)
    assert units()[0].transition_time == NOW + 1 + RETRY
    assert states(copies(), "validate_state") == [V.VALID, V.VALID, V.INIT]
    output("near_0_2").write_text("6")
    passes(NOW + 1 + RETRY)
    assert copies()[2].validate_state == V.INIT
    passes(NOW + 2 + RETRY)
    assert (copies()[2].validate_state, copies()[2].granted_credit) == (V.VALID, 8)


def test_a_report_between_judging_and_settling(grid, monkeypatch):
    """It is not lost: neither is it called judged, nor does its workunit sleep."""
    answered("5", "5", min_quorum=2, target_nresults=3)
    cyd = Client("cyd")
    (late,) = cyd.fetch()
    judge = m.apps["near"].judge

    def and_meanwhile(*args):
        verdict = judge(*args)
        cyd.report(late, "9", NOW + 1)
        return verdict

    monkeypatch.setattr(m.apps["near"], "judge", and_meanwhile)
    passes(NOW + 1)
    assert states(copies(), "validate_state") == [V.VALID, V.VALID, V.INIT]
    assert units()[0].transition_time == NOW + 1
    monkeypatch.setattr(m.apps["near"], "judge", judge)
    passes(NOW + 2)
    assert states(copies(), "validate_state") == [V.VALID, V.VALID, V.INVALID]


def test_canonical_output_that_cannot_be_read(grid):
    """V9: stragglers wait while it may come back, and are not blamed."""
    answered("5", "5", min_quorum=2, target_nresults=3)
    cyd = Client("cyd")
    (late,) = cyd.fetch()
    passes(NOW + 1)
    kept = output("near_0_0").read_text()
    output("near_0_0").unlink()
    output("near_0_0").mkdir()
    cyd.report(late, "5", NOW + 2)
    passes(NOW + 3)
    assert (result(late).validate_state, result(late).outcome) == (V.INIT, 1)
    output("near_0_0").rmdir()
    output("near_0_0").write_text(kept)
    assert units()[0].transition_time <= NOW + 3 + RETRY
    passes(NOW + 4 + RETRY)
    assert result(late).validate_state == V.VALID


def test_canonical_output_that_is_lost(grid):
    """V9, S4-30: a straggler is too late, without credit or blame, and waits for nothing."""
    answered("5", "5", min_quorum=2, target_nresults=3)
    cyd = Client("cyd")
    (late,) = cyd.fetch()
    m.HostAppVersion.update(consecutive_valid=4).execute()
    passes(NOW + 1)
    output("near_0_0").unlink()
    cyd.report(late, "5", NOW + 2)
    passes(NOW + 3)
    assert (result(late).validate_state, result(late).granted_credit) == (V.TOO_LATE, 0)
    assert [v.consecutive_valid for v in m.HostAppVersion.select()] == [5, 5, 4]


def test_after_the_canonical_output_is_gone(grid):
    """C3: too late means no credit, and no blame either."""
    answered("5", "5", min_quorum=2, target_nresults=3)
    cyd = Client("cyd")
    (late,) = cyd.fetch()
    m.HostAppVersion.update(consecutive_valid=4).execute()
    passes(NOW + 1)
    m.Result.update(file_delete_state=F.DONE).where(m.Result.id == 1).execute()
    cyd.report(late, "5", NOW + 2)
    passes(NOW + 3)
    assert (result(late).validate_state, result(late).granted_credit) == (V.TOO_LATE, 0)
    assert [v.consecutive_valid for v in m.HostAppVersion.select()] == [5, 5, 4]


def test_hook_that_raises_costs_its_workunit_only(grid, monkeypatch):
    for number in range(2):
        add(number=number)
    for client in (Client("ann"), Client("bob")):
        for name in client.fetch(work_req_seconds=1e6):
            client.report(name, "5")
    judge = m.apps["near"].judge

    def fussy(unit, *args):
        if unit.number == 0:
            raise m.PluginError("I do not like zero")
        return judge(unit, *args)

    monkeypatch.setattr(m.apps["near"], "judge", fussy)
    passes(NOW + 1)
    assert [bool(unit.canonical_resultid) for unit in units()] == [False, True]
    assert "I do not like zero" in grid.errors[-1][1]
    monkeypatch.setattr(m.apps["near"], "judge", judge)
    passes(NOW + RETRY)
    assert units()[0].need_validate
    passes(NOW + 1 + RETRY)
    passes(NOW + 2 + RETRY)
    assert units()[0].canonical_resultid == 1


def test_most_credit_is_a_setting(grid):
    settings(max_granted_credit=3)
    answered("5", "5", credit=8)
    passes(NOW + 1)
    assert states(copies(), "granted_credit") == [3, 3]
