"""Credit: one number for all valid copies of a workunit, and nobody gains by lying about it.

[S0-39 S0-45 S2-04 S2-22]
"""

import logging
import math

import make
import pytest
from make import DAY, NOW, Client, add, copies, over, states, success, units, wu

import minigrid as m

S, O, V = m.ServerState, m.Outcome, m.ValidateState
SPEED = 4.32e7  # Python operations a second: as fast as 4.32 GFLOPS, 0.01 credit a second
ESTIMATE = 1e9 / SPEED * 0.01  # credit for the operations that are estimated if nothing is said
RUNTIME = "\n\ncredit_by = 'runtime'\n"


def credit(name):
    """Something of the plugin, as the process has loaded it."""
    return m.plugged(name)[-1]


@pytest.fixture
def load(grid, folder):
    """Load an application `paid`, near with more text; return the faults."""
    def load(more):
        (folder / "paid.py").write_text(make.NEAR + more)
        return m.sync_apps([folder / "paid.py"], NOW)
    return load


def answered(*told, at=NOW, answers=None, user=None, **parameters):
    """Make a workunit of `paid` whose copies take (seconds, speed), each of a user of its own."""
    unit = add("paid", len(units()), now=at, **{
        **dict(min_quorum=len(told), target_nresults=len(told)), **parameters})
    clients = [Client(user or f"user {n}") for n in range(len(told))]
    names = [client.fetch(at, host=dict(p_fpops=speed))
             for client, (_, speed) in zip(clients, told)]
    for n, (client, (name,), (seconds, _)) in enumerate(zip(clients, names, told)):
        report(client, name, seconds, at + 10**6, (answers or ["5"] * 9)[n])
    return unit


def report(client, name, seconds, now, answer="5"):
    make.output(name).write_text(answer)
    client.ask(now, reports=[m.Report(name, 5, 0, seconds * 0.9, seconds)])


def judged(now=NOW + 10**6 + 1):
    m.run_pass(now, [m.transitioner, m.validator])
    return states(copies(), "granted_credit")


def troubles():
    return " ".join(text for _, text in m.project.errors)


# ---- The choice ------------------------------------------------------------------


@pytest.mark.parametrize("more, wanted", [
    ("credit_by = 'luck'", "credit_by: must be one of 'workunit', 'runtime', 'check_set'; found "
                           "'luck'"),
    ("credit_by = ['runtime']", "credit_by: must be one of"),
    ("credit_by = 'check_set'", "needs a function check_set(answers) that returns (index, credit)"),
    ("credit_by = 'workunit'", None), ("credit_by = 'runtime'", None),
    ("credit_by = 'check_set'\n\n\ndef check_set(answers):\n    return 0, 1\n", None)])
def test_the_choice_is_checked_at_the_start(load, more, wanted):
    faults = load(f"\n\n{more}\n")
    assert wanted in faults[0] if wanted else faults == []


@pytest.mark.parametrize("given, granted", [({}, 10), (dict(credit=3), 3),
                                            (dict(rsc_fpops_est=5e7), 0.5)])
def test_by_default_the_workunit_says_it(load, given, granted):
    """[S0-39 S2-04] Run times play no part."""
    load("")
    answered((7, SPEED), (70, 9 * SPEED), **given)
    assert judged() == [granted, granted]


# ---- By run time and speed ---------------------------------------------------------

CLAIMS = {  # claims, estimate -> credit
    "nobody tells a time": ([], 9, 0), "one alone, below the estimate": ([3], 9, 3),
    "one alone, above the estimate": ([30], 9, 9), "two: the smaller": ([5, 4], 9, 4),
    "two equal": ([4, 4], 9, 4), "three: the middle one": ([9, 1, 4], 9, 4),
    "four: the mean of the inner two": ([1, 100, 3, 5], 9, 4),
    "five: the mean of the inner three": ([0.1, 2, 3, 7, 1e9], 9, 4),
    "two above the estimate confirm each other": ([20, 30], 9, 20),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_claims(case):
    claims, estimate, granted = CLAIMS[case]
    found, why = credit("settle_claims")(claims, estimate)
    assert found == granted
    assert why.startswith("run time x speed claims " if len(claims) > 1 else
                          "its run time" if claims else "no copy")


@pytest.mark.parametrize("n", range(2, 8))
def test_one_liar_gains_nothing_and_takes_little(n):
    """Whatever one claims, the credit stays within what the others claim, if they are two or more;
    of two, it never rises above the other."""
    others = [10.0 + i for i in range(n - 1)]
    for lie in (0.001, 1, 10, 11.5, 12, 1e3, 1e30):
        found, _ = credit("settle_claims")([lie, *others], 5)
        assert found <= max(others)
        assert n == 2 or found >= min(others)


@pytest.mark.parametrize("host, version, seconds, claim", [
    (dict(p_fpops=1e9, client_version="7.20.5"), "x86_64-pc-linux-gnu", 86400, 200),
    (dict(p_fpops=1e9, client_version="7.20.5"), "python", 864, 2),
    (dict(p_fpops=1e7, client_version="python 0.3"), "python", 86400, 200),
    (dict(p_fpops=1e7, client_version=""), "x86_64-pc-linux-gnu", 86400, 200),
    (dict(p_fpops=-5, client_version="7.20.5"), "python", 86400, 0),
    (dict(p_fpops=1e29, client_version="7.20.5"), "python", 0.432, 1)])
def test_a_claim_is_in_boincs_unit(host, version, seconds, claim):
    """200 credits for a day at 1 GFLOPS, whichever way the client measures its speed."""
    r = m.Result(elapsed_time=seconds, host=m.Host(**host),
                 app_version=m.AppVersion(platform=version, options={}))
    unit = m.Workunit(rsc_fpops_est=1e9, rsc_fpops_bound=1e20)
    assert credit("claimed")(r, unit) == pytest.approx(claim)


def test_all_processors_of_a_program_count():
    r = m.Result(elapsed_time=864, host=m.Host(p_fpops=1e9, p_ncpus=4, client_version="7.20.5"),
                 app_version=m.AppVersion(platform="x", options={"ncpus": 4.0}))
    assert credit("claimed")(r, m.Workunit(rsc_fpops_bound=1e20)) == pytest.approx(8)


def test_no_claim_counts_for_more_than_a_job_may_do():
    r = m.Result(elapsed_time=1e6, host=m.Host(p_fpops=1e9, client_version="7.20.5"),
                 app_version=m.AppVersion(platform="x", options={}))
    assert credit("claimed")(r, m.Workunit(rsc_fpops_bound=4.32e12)) == pytest.approx(10)


LIVES = {  # (seconds, speed) of each copy -> what each is granted
    "two, equally fast": ([(100, SPEED), (300, SPEED)], 1),
    "the same work on a fast and a slow one": ([(100, SPEED), (50, 2 * SPEED)], 1),
    "one lies about its time": ([(100, SPEED), (90000, SPEED)], 1),
    "one lies about its speed": ([(100, SPEED), (100, 1e12)], 1),
    "one of three lies": ([(100, SPEED), (120, SPEED), (90000, 1e12)], 1.2),
    "three": ([(100, SPEED), (110, SPEED), (400, SPEED)], 1.1),
    "one tells no time, which takes nothing from the other": ([(10, SPEED), (0, SPEED)], 0.1),
    "one tells no time, the other a lie": ([(90000, SPEED), (0, SPEED)], ESTIMATE),
    "nobody tells a time": ([(0, SPEED), (0, SPEED)], 0),
    "one alone": ([(10, SPEED)], 0.1), "one alone, who lies": ([(90000, 1e12)], ESTIMATE),
}


@pytest.mark.parametrize("case", LIVES)
def test_run_times_are_paid_equally(load, case):
    """[S0-39 S0-45]"""
    load(RUNTIME)
    told, granted = LIVES[case]
    answered(*told)
    assert judged() == pytest.approx([granted] * len(told))
    assert [u.total_credit for u in m.User.select()] == pytest.approx([granted] * len(told))
    assert units()[0].canonical_credit == pytest.approx(granted)


def test_a_wrong_answer_claims_nothing(load):
    """The others are paid as if it were not there."""
    load(RUNTIME)
    answered((100, SPEED), (200, SPEED), (150, SPEED), answers=["5", "5", "99"])
    assert judged() == pytest.approx([1, 1, 0])


def test_two_computers_of_one_user_confirm_nothing(load):
    load(RUNTIME)
    answered((90000, 1e12), (90000, 1e12), user="eve")
    assert judged() == pytest.approx([ESTIMATE, ESTIMATE])


def test_never_beyond_the_limit(load):
    load(RUNTIME)
    make.settings(max_granted_credit=0.75)
    unit = answered((100, SPEED), (200, SPEED))
    assert judged() == [0.75, 0.75]
    (text,) = {credit("credit_sentence")(r, units()[0]) for r in copies()}
    assert text.endswith("; 0.75 is the most that is granted here") and unit.id == 1


# ---- By check_set ------------------------------------------------------------------

BY_SET = "\n\ncredit_by = 'check_set'\n\n\ndef check_set(answers):\n    return {}\n"


@pytest.mark.parametrize("returned, granted", [
    ("0, 7", 7), ("0, 2.5", 2.5), ("0, 0", 0), ("0, 10 ** 400", 1e6), ("0", 10), ("0, None", 10)])
def test_check_set_decides_the_credit(load, returned, granted):
    """[S2-22] The index alone leaves it to the workunit."""
    assert load(BY_SET.format(returned)) == []
    answered((1, SPEED), (1, SPEED))
    assert judged() == [granted, granted]


@pytest.mark.parametrize("returned", [
    "0, float('nan')", "0, float('inf')", "0, -1", "0, True", "0, '5'", "(0, 1, 2)", "[0, 1]"])
def test_no_credit_is_no_number(load, returned):
    """Not a number would spoil all sums for ever; the workunit waits for a better check_set()."""
    load(BY_SET.format(returned))
    answered((1, SPEED), (1, SPEED))
    assert judged() == [0, 0]
    assert units()[0].canonical_resultid == 0 and "check_set() must" in troubles()
    assert "paid.py" in troubles()


def test_no_agreement_needs_no_credit(load):
    load(BY_SET.format("None, None"))
    answered((1, SPEED), (1, SPEED))
    assert judged() == [0, 0]
    assert states(copies(), "validate_state")[:2] == [V.INCONCLUSIVE] * 2


@pytest.mark.parametrize("choice", ["", RUNTIME])
def test_a_credit_that_would_not_count_is_refused(load, choice):
    load(choice + "\n\ndef check_set(answers):\n    return 0, 7\n")
    answered((1, SPEED), (1, SPEED))
    assert judged() == [0, 0]
    assert "check_set() gave a credit, which would not count; wanted: credit_by = 'check_set', " \
           "or only the index" in troubles()


# ---- One number for each workunit, at any time ----------------------------------------


@pytest.mark.parametrize("more", ["", RUNTIME, BY_SET.format("0, 7")])
@pytest.mark.parametrize("most", [0.001, 0.5, 1e6])
def test_a_late_copy_gets_the_same(load, more, most):
    """[S0-39 S0-45] Also if its time is another, or the limit has changed meanwhile."""
    load(more)
    unit = add("paid", 0, now=NOW, min_quorum=2, target_nresults=3)
    clients = [Client(f"user {n}") for n in range(3)]
    names = [client.fetch(NOW, host=dict(p_fpops=SPEED))[0] for client in clients]
    for client, name in zip(clients[:2], names):
        report(client, name, 100, NOW + 1000)
    first = judged(NOW + 1001)
    assert first[0] == first[1] > 0 and first[2] == 0
    make.settings(max_granted_credit=most)
    report(clients[2], names[2], 900, NOW + 1002)
    assert judged(NOW + 1003) == [first[0]] * 3
    assert units()[0].id == unit.id
    assert not [text for text in m.plugged("violations")[0]() if "credit" in text]
    assert {u.total_credit for u in m.User.select()} == {first[0]}


def test_what_was_granted_stays_when_answers_vote_again(load):
    """The canonical result is lost: a new one is found, among others with other run times."""
    load(RUNTIME)
    answered((100, SPEED), (200, SPEED), target_nresults=3)
    first = judged()
    m.project.write(lambda: m.Result.delete().where(m.Result.id == units()[0].canonical_resultid)
                    .execute())
    m.project.write(lambda: m.Workunit.update(canonical_resultid=0, assimilate_state=0,
                                              need_validate=True).execute())
    m.project.write(lambda: m.Result.insert(
        workunit=1, app=units()[0].app_id, name="paid_0_9", create_time=NOW, host=1, user=1,
        app_version=copies()[0].app_version_id, sent_time=NOW, received_time=NOW + 9,
        server_state=S.OVER, outcome=O.SUCCESS, elapsed_time=5e5).execute())
    make.output("paid_0_9").write_text("5")
    judged()
    assert {r.granted_credit for r in copies() if r.validate_state == V.VALID} == {first[0]}
    assert m.User.get_by_id(2).total_credit == first[1]  # once


# ---- Recent averages ------------------------------------------------------------------


@pytest.mark.parametrize("age, part", [(0, 1), (7 * DAY, 0.5), (14 * DAY, 0.25), (-DAY, 1)])
def test_recent_credit_fades_while_a_host_is_away(grid, age, part):
    for model in (m.Host, m.User):
        holder = model(expavg_credit=80, expavg_time=NOW)
        assert credit("faded")(holder, NOW + age) == pytest.approx(80 * part)
        assert (holder.expavg_credit, holder.expavg_time) == (80, NOW), "it only looks"
    assert credit("faded")(m.Host(), NOW) == 0


def test_steady_work_averages_to_its_rate():
    """Ten credits a day for a year: the average comes to ten a day, for whatever comes in."""
    host, add_to_average = m.Host(), credit("add_to_average")
    for hour in range(365 * 24):
        add_to_average(host, 10 / 24, NOW + hour * 3600)
    assert host.expavg_credit == pytest.approx(10, rel=0.01)


def test_the_front_page_shows_it_as_it_is_now(load):
    load("")
    answered((1, SPEED), (1, SPEED))
    judged()
    rows = {now: m.plugged("status")[0](now)["hosts"]["recent"][0]["recent_credit"]
            for now in (NOW + 10**6 + 1, NOW + 10**6 + 1 + 7 * DAY)}
    assert list(rows.values()) == [round(10 * math.log(2) / 7, 2), round(5 * math.log(2) / 7, 2)]


# ---- In words -------------------------------------------------------------------------

SENTENCES = {
    "by estimate": (wu(rsc_fpops_est=6e7, canonical_credit=0.6),
                    success(V.VALID, granted_credit=0.6),
                    "0.60 credit, the same for each valid copy: 6e+07 operations estimated, at "
                    "1e+08 a credit"),
    "as set": (wu(canonical_credit=7), success(V.VALID, granted_credit=7),
               "7.00 credit, the same for each valid copy: as the application has set for it"),
    "very little": (wu(canonical_credit=0.00123), success(V.VALID, granted_credit=0.00123),
                    "0.0012 credit, the same for each valid copy: as the application has set for "
                    "it"),
    "wrong": (wu(), success(V.INVALID), "none: its answer was wrong"),
    "waiting": (wu(), success(), "pending: its answer waits to be compared with others"),
    "no agreement": (wu(), success(V.INCONCLUSIVE),
                     "pending: its answer waits to be compared with others"),
    "too late": (wu(), success(V.TOO_LATE), "none: it came when the answer to compare it with was "
                                            "gone; nobody is to blame"),
    "given up": (wu(), success(V.NO_CHECK), "none: its workunit was given up, nobody compares it"),
    "error": (wu(), make.error(), "none: it could not be computed"),
    "no reply": (wu(), make.lost(), "none: it was not reported by its deadline"),
    "not needed": (wu(), over(O.DIDNT_NEED), "none: it was not needed any more"),
    "could not send": (wu(), over(O.COULDNT_SEND), "none: no computer could do it"),
    "unreadable": (wu(), over(O.VALIDATE_ERROR, V.INVALID),
                   "none: its output was missing, or could not be read"),
    "detached": (wu(), over(O.CLIENT_DETACHED), "none: its computer left the project"),
    "unsent": (wu(), make.unsent(), "none yet: it waits for a computer"),
    "under way": (wu(), make.sent(), "none yet: a computer has it"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_each_value_is_explained(grid, case):
    unit, r, wanted = SENTENCES[case]
    assert credit("credit_sentence")(r, unit) == wanted


@pytest.mark.parametrize("more, why", [
    (RUNTIME, "1.00 credit, the same for each valid copy: from run time x speed of the copies that "
              "agreed, the extremes left out"),
    (BY_SET.format("0, 7"), "7.00 credit, the same for each valid copy: as check_set() of the "
                            "application said"),
    (BY_SET.format("0"), "10.00 credit, the same for each valid copy: 1e+09 operations estimated, "
                         "at 1e+08 a credit")])
def test_the_choice_is_named(load, more, why):
    load(more)
    answered((100, SPEED), (200, SPEED))
    judged()
    assert {credit("credit_sentence")(r, units()[0]) for r in copies()} == {why}


@pytest.mark.parametrize("more, why", [
    (RUNTIME, "1.00 credit for each valid copy: run time x speed claims 1.00, 2.00, of which the "
              "smaller counts"),
    (BY_SET.format("0, 7"), "7.00 credit for each valid copy: as check_set() of the application "
                            "says"),
    ("", "10.00 credit for each valid copy: 1e+09 operations estimated, at 1e+08 a credit")])
def test_the_decision_is_told_once_with_its_numbers(load, more, why, caplog):
    load(more)
    answered((100, SPEED), (200, SPEED))
    with caplog.at_level(logging.INFO, "minigrid"):
        judged()
    assert [text for text in caplog.messages if " credit" in text] == [f"WORKUNIT#1 {why}"]


def test_a_late_copy_is_told_that_it_got_the_same(load, caplog):
    load("")
    add("paid", 0, now=NOW, min_quorum=2, target_nresults=3)
    clients = [Client(f"user {n}") for n in range(3)]
    names = [client.fetch(NOW)[0] for client in clients]
    for client, name in zip(clients[:2], names):
        report(client, name, 100, NOW + 1000)
    judged(NOW + 1001)
    report(clients[2], names[2], 900, NOW + 1002)
    with caplog.at_level(logging.INFO, "minigrid"):
        judged(NOW + 1003)
    assert [text for text in caplog.messages if " credit" in text] == [
        "RESULT#3 10.00 credit, as for each valid copy of it"]
