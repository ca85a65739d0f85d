"""No check, the application's check, known answers, and the log of wrong ones [S3-25..S3-28]."""

import json
import sys

import make
import pytest
from make import NOW, Client, add, answered, copies, output, result, settings, states, units
from web import Web

import minigrid as m

V = m.ValidateState
OFF = '\nblack_list, spot_checks = "off", 0\n'  # No copies are kept for spot checks.
NONE = make.NEAR.replace('"""count: i for i, two must agree."""', 'validation = "none"' + OFF)
CHECK = NONE.replace('"none"', '"check"') + '''

def check(input, output):
    """The same number, or one more; a list is too odd to be checked, a dictionary a fault."""
    if output == []:
        raise ValueError("odd")
    if output == {}:
        raise OSError("away")
    if output == [[]]:
        raise TypeError("a fault")
    return output - input in (0, 1)
'''
KNOWN = make.NEAR + '''

def known(i):
    return 7 if i in (7, None) else None
'''
APPS = {"free": NONE, "checked": CHECK, "near": KNOWN}


@pytest.fixture
def grid(folder, monkeypatch):
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    with make.project(folder, APPS, stock=0, min_sendwork_interval=0) as project:
        assert not project.errors
        yield project
        assert m.plugged("violations")[0]() == []
        assert project.counts["stage errors"] == 0


def test_the_four_ways_of_validation_and_boincs_two(grid, folder):
    """S3-25, D9: none, direct check, inverse task, recomputation; any other is refused."""
    assert {name for table in m.plugged("VALIDATION") for name in table} == {
        "none", "check", "inverse", "recheck", "quorum", "adaptive"}
    (folder / "odd.py").write_text(NONE.replace('"none"', '"trust me"'))
    (fault,) = m.sync_apps([folder / "odd.py"], NOW)
    assert "validation must be one of" in fault and "found 'trust me'" in fault
    grid.errors.clear()


def passes(*seconds):
    for n in seconds or (1, 2, 3):
        m.run_pass(NOW + n)


def log_of(app):
    path = m.project.data / "wrong" / f"{app}.wrong.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answers(app):
    path = m.project.data / "results" / f"{app}.jsonl"
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()] \
        if path.exists() else []


# ---- Way 1: no check -------------------------------------------------------------


def test_without_a_check_the_result_goes_straight_to_the_application(grid):
    """S3-26: one copy, one answer, whatever it is."""
    answered("99", app="free", number=3, min_quorum=1)
    assert len(copies()) == 1 and units()[0].min_quorum == 1
    passes()
    assert answers("free") == [[99, 3]]
    assert states(copies(), "validate_state") == [V.VALID] and copies()[0].granted_credit > 0
    assert log_of("free") == []


@pytest.mark.parametrize("answer", ['"bad"', "{"])
def test_what_cannot_be_read_is_no_result(grid, answer):
    answered(answer, app="free", number=3, min_quorum=1)
    passes(1, 2)
    assert (copies()[0].outcome, len(copies())) == (m.Outcome.VALIDATE_ERROR, 2)
    (line,) = log_of("free")
    assert (line["rule"], line["output"]) == ("unreadable output", answer)


def test_a_late_second_copy_is_acknowledged_and_stored_once(grid):
    """S3-06: the first answer completes the portion."""
    add("free", 3, NOW, delay_bound=100)
    ann, bob = Client("ann"), Client("bob")
    (one,) = ann.fetch()
    passes(101, 102)
    (two,) = bob.fetch(NOW + 103)
    bob.report(two, "4", NOW + 104)
    passes(105)
    assert ann.report(one, "5", NOW + 106).acks == [one]
    passes(107, 108)
    assert answers("free") == [[4, 3]]
    assert result(one).validate_state == V.VALID


# ---- Way 2: the application's own check --------------------------------------------

ANSWERS = {  # answer -> validate_state
    "3": V.VALID, "4": V.VALID, "5": V.INVALID, "[]": V.INVALID, "{": V.INVALID,
    '"bad"': V.INVALID}


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_application_checks(answer, grid):
    """S3-27: it is asked with the pair (request, result) and says right or wrong."""
    answered(answer, app="checked", number=3, min_quorum=1)
    passes()
    assert copies()[0].validate_state == ANSWERS[answer]
    right = ANSWERS[answer] == V.VALID
    assert answers("checked") == ([[int(answer), 3]] if right else [])
    assert len(copies()) == 2 - right  # A wrong one counts as not received.
    assert len(log_of("checked")) == 1 - right


def test_a_wrong_answer_is_no_error_of_the_workunit(grid):
    """Liars cannot make a workunit fail sooner than max_total_results."""
    add("checked", 3, max_error_results=0, max_total_results=6, max_success_results=2)
    for n in range(5):
        liar = Client(f"liar {n}")
        liar.report(*liar.fetch(NOW + 10 * n), "9", NOW + 10 * n)
        passes(10 * n + 1, 10 * n + 2)
    ann = Client("ann")
    ann.report(*ann.fetch(NOW + 60), "3", NOW + 60)
    passes(61, 62)
    assert answers("checked") == [[3, 3]]
    assert states(copies(), "validate_state") == [V.INVALID] * 5 + [V.VALID]


def test_a_workunit_that_only_liars_answer_fails_in_the_end(grid):
    add("checked", 3, max_total_results=3, max_success_results=2)
    for n in range(3):
        liar = Client(f"liar {n}")
        liar.report(*liar.fetch(NOW + 10 * n), "9", NOW + 10 * n)
        passes(10 * n + 1, 10 * n + 2)
    assert units()[0].error_mask == m.ErrorMask.TOO_MANY_TOTAL_RESULTS


@pytest.mark.parametrize("mode, refused", [("literal", True), ("normal", False), ("off", False)])
def test_who_gives_a_wrong_answer_is_black_listed(folder, monkeypatch, mode, refused):
    """S3-29: connections from it are no longer accepted; C36: or it gets no tasks for a while."""
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    text = CHECK.replace('"off", 0', f'"{mode}", 0')
    with make.project(folder, {"checked": text}, stock=0, min_sendwork_interval=0) as project:
        assert not project.errors
        answered("9", app="checked", number=3, min_quorum=1)
        passes()
        liar = Client("user 0", hostid=1, seqno=9, cpid=m.Host.get_by_id(1).host_cpid)
        reply = liar.ask(NOW + 5, work_req_seconds=1)
        assert (reply.request_delay == 86400) == refused
        add("checked", 4, NOW + 6)
        assert len(liar.fetch(NOW + 7)) == (mode == "off")
        assert len(Client("honest").fetch(NOW + 7)) == 1


def test_both_copies_are_checked_and_the_right_one_counts(grid):
    answered("9", "3", "4", "[]", app="checked", number=3, min_quorum=1, target_nresults=4)
    passes()
    assert states(copies(), "validate_state") == [V.INVALID, V.VALID, V.VALID, V.INVALID]
    assert units()[0].canonical_resultid == 2 and answers("checked") == [[3, 3]]


def test_a_late_answer_is_checked_too(grid):
    """Not compared: a right answer may differ from the first."""
    add("checked", 3, target_nresults=3)
    clients = [Client(name) for name in "abc"]
    names = [*clients[0].fetch(), *clients[1].fetch(), *clients[2].fetch()]
    clients[0].report(names[0], "3")
    passes(1)
    clients[1].report(names[1], "4", NOW + 2)
    clients[2].report(names[2], "5", NOW + 2)
    passes(3)
    assert states(copies(), "validate_state") == [V.VALID, V.VALID, V.INVALID]


def test_nonsense_is_a_wrong_answer(grid):
    """Even if it came first, so that nobody knew whether the check works at all."""
    add("checked", 3), add("checked", 4)
    liar, honest = Client("liar"), Client("honest")
    liar.report(liar.fetch(work_req_seconds=1)[0], "[[]]")
    passes(1)
    assert copies()[0].validate_state == V.INIT and len(grid.put_off) == 1
    honest.report(honest.fetch(NOW + 2, work_req_seconds=1)[0], "4", NOW + 2)
    passes(3)
    assert not grid.put_off
    passes(4)
    assert copies()[0].validate_state == V.INVALID
    assert log_of("checked")[0]["output"] == "[[]]"


def test_one_liar_does_not_stop_the_application(grid):
    """FAULTS_MAX of its outputs come first; ten minutes later others are looked at again."""
    for number in range(m.FAULTS_MAX + 2):
        add("checked", number)
    liar = Client("liar")
    settings(max_wus_in_progress=m.FAULTS_MAX + 2)
    names = [name for _ in range(3) for name in liar.fetch(work_req_seconds=1e6)]
    assert len(names) == m.FAULTS_MAX + 2
    for name in names[:-1]:
        liar.report(name, "[[]]")
    passes(1)
    assert grid.put_off["checked", 0] == NOW + 1 + 600
    liar.report(names[-1], str(m.FAULTS_MAX + 1), NOW + 2)
    passes(3, 602, 603)
    found = states(copies(), "validate_state")
    assert (found.count(V.INVALID), found.count(V.VALID)) == (m.FAULTS_MAX + 1, 1)
    assert not grid.put_off


def test_a_fault_of_the_check_puts_the_workunit_off(grid):
    answered("[[]]", app="checked", number=3, min_quorum=1)
    passes()
    assert "check() failed: TypeError" in grid.errors[-1][1]
    assert copies()[0].validate_state == V.INIT


@pytest.mark.parametrize("others", [[], ["3"], ["9"]])
def test_a_check_that_cannot_tell_now(grid, others, monkeypatch):
    """It is asked again in six hours; no copies are made and no workunit fails meanwhile."""
    answered("{}", *others, app="checked", number=3, min_quorum=1,
             target_nresults=1 + len(others))
    passes()
    assert states(copies(), "validate_state") == [V.INIT] * (1 + len(others))
    assert units()[0].error_mask == 0 and log_of("checked") == []
    assert "checked_3: away" in grid.errors[-1][1]
    output("checked_3_0").write_text("4")  # The disk is back.
    passes(5, make.RETRY, make.RETRY + 1, make.RETRY + 2)
    assert copies()[0].validate_state == V.VALID and answers("checked") == [[4, 3]]


# ---- Known answers -----------------------------------------------------------------


def test_a_known_answer_outvotes_everybody(grid):
    """Two agree, and are wrong; the workunit looks like any other."""
    answered("20", "20", app="near", number=7)
    assert (units()[0].min_quorum, units()[0].target_nresults) == (2, 2)
    passes()
    assert states(copies(), "validate_state")[:2] == [V.INVALID] * 2
    assert len(copies()) == 4
    assert [line["why"][0] for line in log_of("near")] == [
        "its answer is not the one known beforehand"] * 2
    assert answers("near") == []


@pytest.mark.parametrize("outputs, found", [
    (["7", "8"], [V.VALID, V.VALID]), (["20", "8"], [V.INVALID, V.VALID]),
    (["7", "[]"], [V.VALID, V.INVALID]),
    (["7", "{}"], [V.VALID, V.INIT])])  # This one could not be compared just now.
def test_compare_says_what_is_the_known_answer(grid, outputs, found):
    answered(*outputs, app="near", number=7)
    passes()
    assert states(copies(), "validate_state")[:2] == found
    assert units()[0].canonical_resultid == 1 + found.index(V.VALID)
    kept = copies(server_state=m.ServerState.INACTIVE)  # for whoever was wrong, to come back by
    assert len(kept) == found.count(V.INVALID)


def test_other_workunits_vote(grid):
    answered("20", "20", app="near", number=6)
    passes()
    assert states(copies(), "validate_state") == [V.VALID] * 2


def test_the_verdict_says_that_the_answer_was_known(grid):
    answered("7", "20", app="near", number=7)
    ((wu, results),) = m.load([1])
    verdict = m.apps["near"].judge(wu, results, m.apps["near"])
    assert (verdict.known, verdict.wrong, verdict.matching) == (True, {2}, {1})
    assert verdict.canonical == 1
    wu.number = None  # a workunit of a policy
    assert not m.apps["near"].judge(wu, results, m.apps["near"]).known


# ---- S3-28: the log ------------------------------------------------------------------


def test_wrong_answers_are_kept(grid):
    """S3-28: for every policy, with who gave them and how it was found out."""
    answered("5", "5", "9", app="near", number=1, min_quorum=3)
    passes()
    (line,) = log_of("near")
    why = line.pop("why")
    assert why[0] == "1 of 3 answers agree with it, itself included; 2 agree with each other"
    assert line == dict(
        time=NOW + 1, workunit="near_1", number=1, result="near_1_2", host=3, user=3,
        validation="quorum", rule="invalid", output="9", nbytes=1)


def test_a_wrong_answer_is_kept_before_its_file_goes(grid):
    answered("9", app="checked", number=3, min_quorum=1)
    ann = Client("ann")
    passes(1, 2)
    ann.report(*ann.fetch(NOW + 3), "3", NOW + 3)
    passes(4, 5, 6)
    assert not output("checked_3_0").exists()
    assert [line["output"] for line in log_of("checked")] == ["9"]


def test_no_address_leads_to_the_log(grid):
    answered("9", app="checked", number=3, min_quorum=1)
    passes()
    assert log_of("checked")
    web = Web()
    for path in ("wrong/checked.wrong.jsonl", "results/checked.wrong.jsonl",
                 "results/../wrong/checked.wrong.jsonl", "results/..%2Fwrong%2Fchecked.wrong.jsonl",
                 "download/checked.wrong.jsonl", "data/wrong/checked.wrong.jsonl"):
        assert web("GET", f"/{path}").status == 404, path
    assert "wrong.jsonl" not in json.dumps(web("GET", "/status.json").json)


def test_huge_and_binary_outputs_are_kept_in_part(grid, monkeypatch):
    checks = sys.modules["minigrid_plugin_checks"]
    monkeypatch.setattr(checks, "OUTPUT_BYTES", 10)
    monkeypatch.setattr(checks, "TAKEN_BYTES", 17)  # quotes included
    answered("9" * 50, "8" * 50, app="checked", number=3, min_quorum=1, target_nresults=2)
    passes(1)
    assert [(line["output"], line["nbytes"]) for line in log_of("checked")] == [
        ("9" * 10, 50), ("8" * 5, 50)]
    monkeypatch.undo()
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    passes(2)
    ann = Client("ann")
    (name,) = ann.fetch(NOW + 5)
    ann.report(name, "x", NOW + 5)
    output(name).write_bytes(b"\xff\xfe")
    passes(6)
    assert (log_of("checked")[2]["output"], log_of("checked")[2]["note"]) == (
        "fffe", "in hexadecimal digits")


@pytest.mark.parametrize("content, nbytes, kept, is_text", [
    ("ab€".encode(), 5, "ab€", True), ("ab€".encode(), 4, "ab", True), (b"", 4, "", True),
    (b"ab\xe2", 4, "6162e2", False), (b"ab\xe2cd", 4, "6162e263", False)])
def test_text_is_kept_as_text_wherever_it_is_cut(grid, content, nbytes, kept, is_text):
    add("free", 1)
    output("free_1_0").write_bytes(content)
    found = sys.modules["minigrid_plugin_checks"].begin_of(result("free_1_0"), nbytes)
    assert (found["output"], found["nbytes"]) == (kept, len(content))
    assert ("note" not in found) == is_text


def test_odd_answers_take_no_more_room_than_others(grid, monkeypatch):
    """What JSON writes as six characters counts as six."""
    monkeypatch.setattr(sys.modules["minigrid_plugin_checks"], "TAKEN_BYTES", 100)
    answered("\1" * 50, "\2" * 50, app="checked", number=3, min_quorum=1, target_nresults=2)
    passes(1)
    assert [line["output"] for line in log_of("checked")] == ["\1" * 50, ""]


def test_the_log_is_bounded(grid, monkeypatch, caplog):
    """The older half goes."""
    checks = sys.modules["minigrid_plugin_checks"]
    monkeypatch.setattr(checks, "LOG_BYTES_MAX", 2000)
    path = m.project.data / "wrong" / "near.wrong.jsonl"
    for n in range(10):
        m.project.write(lambda: checks.keep(path, b"%300d\n" % n))
    new, old = path.read_text().split(), path.with_name("near.wrong.old.jsonl").read_text().split()
    assert old + new == [str(n) for n in range(6, 10)] and new
    assert m.Meta.get_by_id("size of near.wrong.jsonl").value == path.stat().st_size
    assert "shorter than it was" not in caplog.text


def test_a_log_that_cannot_be_written_stops_nothing(grid):
    folder = m.project.data / "wrong"
    folder.mkdir(exist_ok=True)
    (folder / "checked.wrong.jsonl").mkdir()
    answered("9", app="checked", number=3, min_quorum=1)
    passes(1)
    (folder / "checked.wrong.jsonl").rmdir()
    assert copies()[0].validate_state == V.INVALID
    assert "wrong answers of checked are not kept" in grid.errors[-1][1]


def test_what_was_not_committed_is_not_in_the_log(grid, monkeypatch):
    answered("9", app="checked", number=3, min_quorum=1)
    with pytest.raises(RuntimeError):
        def fails():
            r = copies()[0]
            m.fire(m.RULES["wrong"], r)
            raise RuntimeError
        m.project.write(fails)
    assert log_of("checked") == []


# ---- What is refused, and what is said ---------------------------------------------------

BAD = {
    "check without check()": (CHECK.replace("def check(", "def checks("), "def check(input,"),
    "check() without check": (CHECK.replace('"check"', '"quorum"'), "validation = 'check'"),
    "two must agree, unchecked": (NONE + "\nmin_quorum = 2\n", "min_quorum must be left out or 1"),
    "two must agree, checked": (CHECK + "\nmin_quorum = 2\n", "min_quorum must be left out or 1"),
    "check of one": (CHECK.replace("(input, output)", "(output)"), "check(input, output)"),
    "known of none": (KNOWN.replace("known(i)", "known()"), "known(i)"),
}


@pytest.mark.parametrize("case", BAD)
def test_applications_that_are_refused(case, folder):
    text, words = BAD[case]
    with make.project(folder, {"bad": text}) as project:
        assert [words in error for _, error in project.errors] == [True]


def test_a_workunit_that_wants_votes_is_refused(grid):
    with pytest.raises(m.PluginError, match="min_quorum must be left out or 1.*found 3"):
        add("free", 1, min_quorum=3)


SAID = {  # (application, number, answers) -> what is said of the first
    "nothing to compare": ("free", 1, ["5"], "accepted with nothing to compare it with"),
    "checked": ("checked", 1, ["1"], "check() of the application calls its answer right"),
    "wrong": ("checked", 1, ["7"], "check() of the application calls its answer wrong"),
    "known": ("near", 7, ["7", "7"], "its answer is the one known beforehand"),
    "a vote": ("near", 1, ["5", "6"], "2 of 2 answers agree with it, itself included"),
}


@pytest.mark.parametrize("case", SAID)
def test_reasons(case, grid, monkeypatch):
    app, number, outputs, words = SAID[case]
    said = []
    monkeypatch.setattr(sys.modules["minigrid_plugin_checks"], "explain",
                        lambda row, text: said.append((row.id, text)))
    answered(*outputs, app=app, number=number, min_quorum=len(outputs))
    passes(1)
    assert said[0] == (1, words)


@pytest.mark.parametrize("said", ["None", "1", "'yes'", "[]", "raise_it", "1 / 0"])
def test_a_check_that_does_not_answer_condemns_nobody(said, folder, monkeypatch):
    """A forgotten return is the application's fault, and must not black-list honest hosts."""
    text = NONE.replace('"none"', '"check"').replace(OFF, "\n") \
        + f"\n\ndef check(input, output):\n    return {said}\n"
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    with make.project(folder, {"odd": text}, stock=0, min_sendwork_interval=0) as project:
        answered("5", app="odd", number=5, min_quorum=1)
        passes()
        (error,) = project.errors
        assert "check() must return True or False; found" in error[1] or "failed" in error[1]
        assert states(copies(), "validate_state") == [V.INIT]
        assert units()[0].need_validate and not units()[0].error_mask  # nothing is lost
        assert len(Client("user 0").fetch(NOW + 9)) == 0 and log_of("odd") == []
        (folder / "odd.py").write_text(text.replace(said, "True"))
        make.restart(folder, stock=0)
        passes()
        assert states(copies(), "validate_state") == [V.VALID]
