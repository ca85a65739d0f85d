"""The transitioner: each of its rules where it fires, and one second or one result beside."""

import pytest
from make import DAY, NOW, error, lost, numbered, over, row, sent, states, success, unsent, wu

import minigrid as m

A, E, F, O, S, V = (m.AssimilateState, m.ErrorMask, m.FileDeleteState, m.Outcome, m.ServerState,
                    m.ValidateState)
GIVE_UP, ASK = "hand over the failure", "ask for validation"
ERRORS, TOTAL = "fail: too many errors", "fail: too many results"
UNSENDABLE, UNNEEDED = "fail: could not send", "not needed: workunit failed"
DONE, NEVER = dict(assimilate_state=A.DONE), m.NEVER


def run(case, fired):
    """Apply the transitioner to a case; return the rules that fired and the new copies."""
    unit, results, *_ = case
    new = m.transition(unit, numbered(unit, results), NOW)
    names = fired()
    assert names.count("make a copy") == len(new)
    return [name for name in names if name != "make a copy"], new


CASES = {  # id: (workunit, its results, rules that fire, new copies)
    "S0-25 nothing made yet: target_nresults": (wu(), [], [], 2),
    "S0-25 target above the quorum": (wu(target_nresults=4), [], [], 4),
    "S0-25 one is missing": (wu(), [unsent()], [], 1),
    "S0-25 none is missing": (wu(), [unsent(), sent()], [], 0),
    "S4-34 INACTIVE counts with UNSENT": (wu(), [row(server_state=S.INACTIVE), sent()], [], 0),
    "C2 the deadline is the last good second": (wu(), [sent(NOW), sent(NOW)], [], 0),
    "C2 a second later it is over": (wu(), [sent(NOW - 1), sent()], ["time out"], 1),
    "S0-16 two at once": (wu(), [sent(NOW - 1), sent(NOW - 9)], ["time out", "time out"], 2),
    # Asking for validation
    "C12 the first of two": (wu(), [success(), sent()], [], 0),
    "S0-19 the quorum": (wu(), [success(), success()], [ASK], 0),
    "S4-20 nothing new": (wu(), [success(V.INCONCLUSIVE), success(V.INCONCLUSIVE)], [], 0),
    "C19 INCONCLUSIVE counts": (wu(), [success(V.INCONCLUSIVE), success()], [ASK], 0),
    "C19 INVALID does not": (wu(), [success(V.INVALID), success()], [], 1),
    "C19 an error does not": (wu(), [error(), success()], [], 1),
    "C19 VALID counts": (wu(canonical_resultid=1), [success(V.VALID), success()], [ASK], 0),
    "quorum 1": (wu(min_quorum=1, target_nresults=1), [success()], [ASK], 0),
    "quorum 3, two are there": (wu(min_quorum=3, target_nresults=3), [success(), success()], [], 1),
    # How many copies
    "C4 usable ones count as made": (wu(target_nresults=3), [success(), success()], [ASK], 1),
    "C4 decided: none": (wu(canonical_resultid=1, target_nresults=4, assimilate_state=A.READY),
                         [success(V.VALID)], [], 0),
    "C39 failed: none": (wu(error_mask=E.CANCELLED, assimilate_state=A.READY), [lost()], [], 0),
    "C5 five of five lost": (wu(max_total_results=5), [lost() for _ in range(5)],
                             [TOTAL, GIVE_UP], 0),
    "C5 four of five lost: room for one": (wu(max_total_results=5), [lost() for _ in range(4)],
                                           [], 1),
    "C5 none needed at the limit": (wu(max_total_results=2), [sent(), sent()], [], 0),
    "S0-23 above the limit": (wu(max_total_results=2), [sent(), sent(), sent()],
                              [TOTAL, GIVE_UP], 0),
    "C4 decided at the limit": (wu(canonical_resultid=1, max_total_results=2, **DONE),
                                [success(V.VALID, file_delete_state=F.DONE), sent()], [], 0),
    "T9 flag 2": (wu(transitioner_flags=2), [sent()], [], 0),
    "T9 flag 2 forbids no failure": (wu(transitioner_flags=2, max_total_results=1), [lost()],
                                     [TOTAL, GIVE_UP], 0),
    # Failures
    "C6 three errors": (wu(), [error() for _ in range(3)], [], 2),
    "C6 four errors": (wu(), [error() for _ in range(4)], [ERRORS, GIVE_UP], 0),
    "C6 no error allowed": (wu(max_error_results=0), [error()], [ERRORS, GIVE_UP], 0),
    "C7 unreadable is an error": (wu(max_error_results=0),
                                  [over(O.VALIDATE_ERROR, V.INVALID)], [ERRORS, GIVE_UP], 0),
    "C7 aborted by its user is none": (wu(max_error_results=0), [error(exit_status=203)], [], 2),
    "C7 lost is none": (wu(max_error_results=0), [lost()], [], 2),
    "C7 detached is none": (wu(max_error_results=0), [over(O.CLIENT_DETACHED)], [], 2),
    "C7 not needed is none": (wu(max_error_results=0), [over(O.DIDNT_NEED)], [], 2),
    "C7 INVALID is none": (wu(max_error_results=0), [success(V.INVALID)], [], 2),
    "S0-20 one could not be sent": (wu(), [over(O.COULDNT_SEND), sent()],
                                    [UNSENDABLE, GIVE_UP], 0),
    "S0-22 many successes": (wu(max_success_results=2, target_nresults=4),
                             [success(V.INCONCLUSIVE) for _ in range(4)], [], 0),
    "C18 two failures, two bits": (wu(max_error_results=0), [over(O.COULDNT_SEND), error()],
                                   [UNSENDABLE, ERRORS, GIVE_UP], 0),
    "S0-26 copies that wait": (wu(error_mask=E.CANCELLED),
                               [unsent(), row(server_state=S.INACTIVE), sent()],
                               [UNNEEDED, UNNEEDED, GIVE_UP], 0),
    "S4-57 nobody checks": (wu(error_mask=E.CANCELLED),
                            [success(), success(V.INCONCLUSIVE), success(V.VALID), error()],
                            [ASK, "nobody will check", "nobody will check", GIVE_UP], 0),
    "S4-15 READY already": (wu(error_mask=1, assimilate_state=A.READY), [sent()], [], 0),
    "S4-15 DONE already": (wu(error_mask=1, **DONE), [sent()], [], 0),
    # After the decision
    "C3 the canonical output is gone": (
        wu(canonical_resultid=1, **DONE, file_delete_state=F.DONE),
        [success(V.VALID, file_delete_state=F.DONE), success()], ["too late", "free output"], 0),
    "C3 it is about to go": (
        wu(canonical_resultid=1, **DONE, file_delete_state=F.DONE),
        [success(V.VALID, file_delete_state=F.READY), success()], [ASK], 0),
    "T5 deferred, and all is settled": (wu(canonical_resultid=1),
                                        [success(V.VALID), error()], ["hand over again"], 0),
    "T5 deferred, one is under way": (wu(canonical_resultid=1), [success(V.VALID), sent()], [], 0),
    "T5 deferred, one is not judged": (wu(canonical_resultid=1),
                                       [success(V.VALID), success()], [ASK], 0),
    "T5 handed over already": (wu(canonical_resultid=1, assimilate_state=A.READY),
                               [success(V.VALID), error()], [], 0),
    "the canonical result is missing": (wu(canonical_resultid=9), [success(), error()], [], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case, fired):
    rules, new = run(CASES[case], fired)
    assert (rules, len(new)) == tuple(CASES[case][2:])


def test_failures_leave_their_bits(fired):
    for results, mask in (([error()] * 4, 2), ([over(O.COULDNT_SEND)], 1), ([lost()] * 10, 8)):
        unit = wu(error_mask=E.CANCELLED * (mask == 1))
        run((unit, [row(**r.__data__) for r in results]), fired)
        assert unit.error_mask == mask | 16 * (mask == 1)


# ---- Whose files may go --------------------------------------------------------

FILES = {  # id: (workunit, results, delete_delay, rules that fire)
    "S0-29 not assimilated yet": (wu(error_mask=1, assimilate_state=A.READY), [error()], 0, []),
    "C10 all is over": (wu(error_mask=1, **DONE), [error()], 0, ["free inputs", "free output"]),
    "C17 one is under way": (wu(error_mask=1, **DONE), [error(), sent()], 0, ["free output"]),
    "C17 lost, its deadline ahead": (
        wu(error_mask=1, **DONE), [lost(report_deadline=NOW + 1)], 0, []),
    "C17 lost, its deadline now": (
        wu(error_mask=1, **DONE), [lost(report_deadline=NOW)], 0, ["free inputs"]),
    "C16 failed, unreadable, unchecked, unsettled, late": (
        wu(error_mask=1, **DONE, canonical_resultid=6),
        [error(), over(O.VALIDATE_ERROR, V.INVALID), success(V.NO_CHECK), success(V.INCONCLUSIVE),
         success(V.TOO_LATE), sent()], 0,
        ["nobody will check"] + ["free output"] * 5),
    "T2 never computed: no output": (
        wu(error_mask=1, **DONE), [over(O.DIDNT_NEED), over(O.CLIENT_DETACHED), lost()], 0,
        ["free inputs"]),
    "S0-32 the canonical one waits for what is under way": (
        wu(canonical_resultid=1, **DONE), [success(V.VALID), success(V.VALID), sent()], 0,
        ["free output"]),
    "S4-64 the canonical one waits for what is not judged": (
        wu(canonical_resultid=1, **DONE), [success(V.VALID), success(V.INVALID), success()], 0,
        ["ask for validation", "free output"]),
    "S4-52 all is judged": (
        wu(canonical_resultid=1, **DONE), [success(V.VALID), success(V.VALID)], 0,
        ["free inputs", "free canonical output", "free output"]),
    "once only": (wu(canonical_resultid=1, **DONE, file_delete_state=F.READY),
                  [success(V.VALID, file_delete_state=F.DONE),
                   success(V.INVALID, file_delete_state=F.ERROR)], 0, []),
    "T7 delete_delay is over": (wu(error_mask=1, **DONE), [error(), error(received_time=NOW - 30)],
                                30, ["free inputs", "free output", "free output"]),
    "T7 delete_delay, a second early": (
        wu(error_mask=1, **DONE), [error(), error(received_time=NOW - 30)], 31, []),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case, fired, monkeypatch):
    unit, results, delay, rules = FILES[case]
    monkeypatch.setattr(m.project, "settings", m.Settings(delete_delay=delay))
    assert run((unit, results), fired) == (rules, [])


def test_free_means_ready(fired):
    unit = wu(canonical_resultid=1, error_mask=E.COULDNT_SEND_RESULT, **DONE)
    results = [success(V.VALID), error(), lost(), over(O.COULDNT_SEND)]
    run((unit, results), fired)
    assert unit.file_delete_state == F.READY
    assert states(results, "file_delete_state") == [F.READY, F.READY, F.INIT, F.INIT]


# ---- When to look again --------------------------------------------------------

NEXT = {  # id: (workunit, results, delete_delay, next look)
    "C1 the earliest deadline": (wu(), [sent(NOW + 59), sent(NOW + 60)], 0, NOW + 59),
    "C1 not delay_bound from now": (wu(delay_bound=100), [sent(NOW - 1), sent(NOW + 59)], 0,
                                    NOW + 59),
    "S4-06 over ones do not count": (wu(), [lost(report_deadline=NOW + 3), sent(NOW + 60)], 0,
                                     NOW + 60),
    "C1 safety net": (wu(), [unsent(), unsent()], 0, NOW + 10 * DAY),
    "C1 safety net, long tasks": (wu(delay_bound=8 * DAY), [], 0, NOW + 12 * DAY),
    "T8 no safety net beside a deadline": (wu(), [sent(NOW + 99 * DAY)], 0, NOW + 99 * DAY),
    "C9 failed": (wu(error_mask=1), [unsent()], 0, NEVER),
    "C9 decided": (wu(canonical_resultid=1), [success(V.VALID)], 0, NEVER),
    "decided, one is under way": (wu(canonical_resultid=1), [success(V.VALID), sent(NOW + 7)], 0,
                                  NOW + 7),
    "T7 delete_delay": (wu(error_mask=1, **DONE), [error(received_time=NOW - 30)], 31, NOW + 1),
    "T7 delete_delay is over": (wu(error_mask=1, **DONE), [error(received_time=NOW - 30)], 30,
                                NEVER),
    "T7 not before assimilation": (wu(error_mask=1, assimilate_state=A.READY), [error()], 999,
                                   NEVER),
    "T7 a deadline is earlier": (wu(error_mask=1, **DONE), [error(), sent(NOW + 5)], 999, NOW + 5),
}


@pytest.mark.parametrize("case", NEXT)
def test_next_look(case, fired, monkeypatch):
    unit, results, delay, wanted = NEXT[case]
    monkeypatch.setattr(m.project, "settings", m.Settings(delete_delay=delay))
    run((unit, results), fired)
    assert unit.transition_time == wanted


@pytest.mark.parametrize("late, wait", [
    (1, 60), (30, 60), (31, 62), (300, 600), (DAY // 2, DAY), (DAY // 2 + 1, DAY), (9 * DAY, DAY)])
def test_deadline_in_the_past(late, wait):
    """C1, a clock set back: twice the lateness, at least a minute, at most a day."""
    assert m.next_look(wu(), [sent(NOW - late), sent(NOW + 5)], NOW) == NOW + wait


def test_deadline_at_this_second():
    assert m.next_look(wu(), [sent(NOW)], NOW) == NOW


# ---- New copies ----------------------------------------------------------------


def test_new_copies(fired):
    """Names count on from the highest, also when rows in between are gone."""
    unit, results = wu(target_nresults=3, priority=5), numbered(wu(), [lost(), lost()])
    results[1].name = "unit_7_10"
    new = m.transition(unit, results, NOW)
    assert states(new, "name") == ["unit_7_11", "unit_7_12", "unit_7_13"]
    for r in new:
        assert (r.workunit_id, r.app_id, r.create_time, r.priority) == (1, 1, NOW, 5)
        assert (r.server_state, r.outcome, r.host_id) == (S.UNSENT, O.INIT, None)


PRIORITIES = {  # id: (results, increase on over, except after an error, priority of the new copy)
    "first copies": ([], 3, 3, 5),
    "nothing is over": ([sent()], 3, 3, 5),
    "default": ([lost()], 0, 0, 5),
    "one is over": ([lost()], 3, 0, 8),
    "an error": ([error()], 3, 0, 8),
    "unless there was an error: none": ([lost()], 0, 4, 9),
    "unless there was an error: one": ([lost(), error()], 0, 4, 5),
    "both: the first": ([lost()], 3, 4, 8),
}


@pytest.mark.parametrize("case", PRIORITIES)
def test_priority_of_repeats(case, fired, monkeypatch):
    """T10."""
    results, on_over, except_error, priority = PRIORITIES[case]
    monkeypatch.setattr(m.project, "settings", m.Settings(
        reliable_priority_on_over=on_over, reliable_priority_on_over_except_error=except_error))
    _, new = run((wu(priority=5), results), fired)
    assert {r.priority for r in new} == {priority}


def test_time_out_keeps_the_deadline(fired):
    """The files wait for it, and a late report is measured by it [C17]."""
    results = [sent(NOW - 1)]
    run((wu(), results), fired)
    assert (results[0].server_state, results[0].outcome) == (S.OVER, O.NO_REPLY)
    assert (results[0].report_deadline, results[0].received_time) == (NOW - 1, 0)
