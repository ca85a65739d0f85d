"""Validation by the inverse task: who checks whom, and who is believed [S3-30..S3-34 C36]."""

import hashlib
import json
import subprocess
import sys

import make
import pytest
from make import Client, add, copies, do, output, passes, result, settings, units

import minigrid as m

TWICE = '''"""twice: doubles a number; half of it must be the number again."""

validation = "inverse"
black_list, spot_checks = "off", 0  # Nothing is kept for those who are to prove themselves.


def workunit(i):
    return {"input": i} if i < 3 else None


def compute(input):
    return 2 * input


def invert(output):
    return output // 2


def same(input, recovered):
    if recovered == "away":
        raise OSError("the disk is away")
    if recovered == "odd":
        raise ValueError("no number")
    if recovered == "bug":
        raise TypeError("a fault of the application")
    return input == recovered
'''
V, O, S = m.ValidateState, m.Outcome, m.ServerState
STATES = {V.VALID: "valid", V.INVALID: "wrong", V.INCONCLUSIVE: "waits", V.INIT: "new",
          V.NO_CHECK: "given up"}


@pytest.fixture
def app():
    return TWICE


@pytest.fixture
def grid(folder, no_fsync, app):
    """A project with an application that is checked by its inverse, at the first second."""
    with make.clocked(folder, {"twice": app}) as project:
        yield project


def inverse():
    return sys.modules["minigrid_plugin_inverse"]


def checks():
    return list(inverse().InverseCheck.select().order_by(inverse().InverseCheck.id))


def computed(grid, answer="10"):
    """Have workunit 5 computed; return its first result's name."""
    add("twice", 5, grid.clock)
    return do(grid, Client("computes"), answer)


def lost(grid):
    """Have a workunit computed, and its output lost before it is checked; return its name."""
    add("twice", 5, grid.clock)
    ann = Client("ann")
    (first,) = ann.fetch(grid.clock)
    ann.report(first, "10", grid.clock)
    m.run_pass(grid.clock + 1, [m.transitioner, m.validator])
    output(first).unlink()
    return first


def states(*names):
    return [STATES[result(name).validate_state] for name in names]


def settled(grid):
    """Let all that is finished go, as after a week; nothing may be left."""
    passes(grid)
    assert not any(check.open for check in checks())
    settings(purge_delay=0)
    passes(grid, 4)
    assert (units(), checks()) == ([], [])
    assert [p.name for folder in ("upload", "download") for p in (grid.data / folder).glob("*/*")
            if p.suffix not in (".py", ".sh", ".cmd")] == []


def answers(grid):
    path = grid.data / "results" / "twice.jsonl"
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()] \
        if path.exists() else []


# ---- A result that is right ------------------------------------------------------


def test_a_right_answer_is_confirmed_by_another_node(grid):
    """S3-30..S3-32: head of the list, the output is the input, the application compares."""
    first = computed(grid, " 10\n")
    add("twice", 0, grid.clock, priority=2**31 - 1)
    assert states(first) == ["waits"] and units()[0].canonical_resultid == 0
    bob = Client("bob")
    (job,) = bob.ask(grid.clock, work_req_seconds=1).assignments  # before what is most urgent
    assert (job.command_line, job.app) == ("--invert", "twice")
    assert make.kept("download", job.input["name"]) == b" 10\n"
    assert "5" not in job.name.partition("_check_")[0] and "twice_5" not in job.name
    bob.report(job.name, "5", grid.clock)
    passes(grid)
    assert states(first, job.name) == ["valid", "valid"]
    assert answers(grid) == [10]
    credit = units()[0].canonical_credit
    assert credit > 0 and bob.host().total_credit == credit == result(job.name).granted_credit
    (row,) = m.Firing.select().where(m.Firing.rule == "assimilated")
    assert row.n == 1  # What the application was told counts, not what its checks are for.
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([units()[2].id], grid.clock))
    settled(grid)


def test_nothing_is_accepted_before_its_check(grid):
    computed(grid)
    passes(grid, 20)
    assert answers(grid) == []
    assert len(checks()) == 1 and len(units()) == 2


def test_nobody_checks_himself(grid):
    """S3-34; and another computer of the same user only where there is nobody else."""
    computed(grid)
    again, twin = Client("computes", cpid=m.Host.get_by_id(1).host_cpid), Client("computes")
    again.hostid = 1
    again.seqno = 9
    assert again.fetch(grid.clock) == [] and "nobody checks" in again.host().why_no_work
    assert twin.fetch(grid.clock) == [] and "somebody else" in twin.host().why_no_work
    grid.clock = checks()[0].create_time + 3599
    assert twin.fetch(grid.clock) == []
    grid.clock += 1
    assert again.fetch(grid.clock) == []
    settings(one_result_per_user_per_wu=True)
    assert twin.fetch(grid.clock) == []
    settings(one_result_per_user_per_wu=False)
    assert len(twin.fetch(grid.clock)) == 1


def test_a_client_that_knows_no_checks_gets_none(grid):
    """It would compute where it is to compute back, and be called wrong."""
    computed(grid)
    bob = Client("bob")
    for version in ("0.1.0", "0.3.0"):
        assert bob.ask(grid.clock, client_version=f"minigrid {version}",
                       work_req_seconds=1).assignments == []
        assert "too old" in bob.host().why_no_work
    assert len(bob.ask(grid.clock, client_version="minigrid 0.10.0",
                       work_req_seconds=1).assignments) == 1


# ---- C36: who is believed -----------------------------------------------------------

VERDICTS = {  # what the checks recover, one after the other -> the result, the checks
    "S3-32 the input": (["5"], "valid", ["valid"]),
    "C36 one says otherwise: nobody is believed": (["4"], "waits", ["waits"]),
    "C36 the first checker was wrong": (["4", "5"], "valid", ["wrong", "valid"]),
    "C36 the result was wrong": (["4", "4"], "wrong", ["valid", "valid"]),
    "two who disagree prove nothing": (["4", "3"], "waits", ["waits", "waits"]),
    "both checkers were wrong": (["4", "3", "5"], "valid", ["wrong", "wrong", "valid"]),
    "one checker and the result were wrong": (
        ["4", "3", "4"], "wrong", ["valid", "wrong", "valid"]),
    "C36 the later two": (["3", "4", "4"], "wrong", ["wrong", "valid", "valid"]),
    "nobody knows": (["1", "2", "3", "4"], "waits", ["waits"] * 4),
    "an answer that same() cannot use": (['"odd"', "5"], "valid", ["wrong", "valid"]),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_who_is_believed(case, grid):
    recovered, wanted, of_checks = VERDICTS[case]
    first = computed(grid)
    asked = [do(grid, Client(f"checks {n}"), answer) for n, answer in enumerate(recovered)]
    passes(grid, 4)
    assert states(first) == [wanted]
    assert states(*asked) == of_checks
    assert answers(grid) == [10] * (wanted == "valid")
    kinds = {check.workunit.id for check in checks()}
    assert kinds == {1}
    for name, found in zip(asked, of_checks):  # No check that is judged waits for anything.
        assert bool(result(name).workunit.assimilate_state) == (found != "waits")


def test_an_honest_checker_is_paid_though_the_result_was_wrong(grid):
    first = computed(grid, "11")
    asked = [do(grid, Client(f"checks {n}"), "55") for n in range(2)]
    assert states(first, *asked) == ["wrong", "valid", "valid"]
    assert [result(name).granted_credit > 0 for name in (first, *asked)] == [False, True, True]
    bob = Client("bob")
    second = do(grid, bob, "10")  # The result counts as not received: there is a new copy.
    assert result(second).workunit_id == 1
    last = do(grid, Client("last"), "5")
    assert states(second, last) == ["valid", "valid"] and answers(grid) == [10]
    settled(grid)


@pytest.mark.parametrize("app", [TWICE + "\n\nblack_list = 'literal'\n"])
def test_literal_rule(grid, app):
    """S3-33: the result counts as not received, and both nodes are wrong."""
    first = computed(grid)
    asked = do(grid, Client("checks"), "4")
    assert states(first, asked) == ["wrong", "wrong"]
    assert len(checks()) == 1
    assert black_list() == [(result(name).host_id, 2, "S3-33") for name in (first, asked)]
    do(grid, Client("second"), "10")
    do(grid, Client("third"), "5")
    assert answers(grid) == [10]


def black_list():
    entries = sys.modules["minigrid_plugin_trust.blacklist"].BlackEntry
    return [(e.host, e.level, e.rule) for e in entries.select().order_by(entries.host)]


PUNISHED = {  # what the checks recover, one after the other -> who is black-listed, 1 computed it
    "nobody yet": (["4"], []), "the first checker": (["4", "5"], [2]),
    "who computed it": (["4", "4"], [1]), "both checkers": (["4", "3", "5"], [2, 3]),
    "who computed it, and one checker": (["4", "3", "4"], [1, 3]),
}


@pytest.mark.parametrize("app", [TWICE.replace('"off", 0', '"normal", 0')])
@pytest.mark.parametrize("case", PUNISHED)
def test_who_is_black_listed(case, grid, app):
    """C36: nobody while one says this and one that; then who was found wrong, and no one else."""
    recovered, wanted = PUNISHED[case]
    computed(grid)
    for n, answer in enumerate(recovered):
        do(grid, Client(f"checks {n}"), answer)
    passes(grid, 4)
    assert black_list() == [(host, 1, "S3-33") for host in wanted]


def test_a_result_that_stays_in_doubt_is_computed_again(grid):
    """Its own fate is then decided by comparison with the one that was confirmed."""
    first = computed(grid)
    for n, answer in enumerate("1234"):
        do(grid, Client(f"checks {n}"), answer)
    second = do(grid, Client("second"), "10")
    assert result(second).workunit_id == 1
    do(grid, Client("last"), "5")
    passes(grid)
    assert states(first, second) == ["valid", "valid"] and answers(grid) == [10]
    settled(grid)


def test_three_different_nodes(grid):
    """C36: the third check is neither for who computed nor for who checked first."""
    computed(grid)
    bob = Client("bob")
    do(grid, bob, "4")
    assert bob.fetch(grid.clock) == [] and "nobody checks" in bob.host().why_no_work
    assert len(Client("cyd").fetch(grid.clock)) == 1


# ---- Checks that do not come ----------------------------------------------------------


def test_a_checker_that_errs_or_vanishes_is_replaced(grid):
    first = computed(grid)
    do(grid, Client("errs"), None)
    do(grid, Client("garbles"), "{")
    (gone,) = Client("vanishes").fetch(grid.clock)
    grid.clock += 86400
    passes(grid, 2)
    assert result(gone).outcome == O.NO_REPLY
    do(grid, Client("checks"), "5")
    assert states(first) == ["valid"] and len(checks()) == 1


def test_a_late_check_is_compared_with_the_one_that_came(grid):
    first = computed(grid)
    slow, liar = Client("slow"), Client("liar")
    (late,) = slow.fetch(grid.clock)
    grid.clock += 86400
    passes(grid, 2)
    (later,) = liar.fetch(grid.clock)
    grid.clock += 86400
    passes(grid, 2)
    checker = Client("checks")
    checker.report(*checker.fetch(grid.clock), "5", grid.clock)
    passes(grid, 1)
    slow.report(late, "5", grid.clock)
    liar.report(later, "6", grid.clock)
    passes(grid)
    assert states(first, late, later) == ["valid", "valid", "wrong"]
    settled(grid)


def test_checks_that_fail_are_bounded(grid):
    """Nobody can invert it: three computers try with each result, then it is computed again."""
    settings(max_wus_in_progress=1)
    add("twice", 5, grid.clock, max_error_results=0, max_success_results=2, max_total_results=4)
    do(grid, Client("first"), "10")
    for n in range(3):
        assert result(do(grid, Client(f"errs {n}"), None)).workunit_id != 1
    assert result(do(grid, Client("second"), "10")).workunit_id == 1
    for n in range(3):
        do(grid, Client(f"errs too {n}"), None)
    assert units()[0].error_mask == m.ErrorMask.TOO_MANY_SUCCESS_RESULTS
    assert len(checks()) == 2
    settled(grid)


def test_it_is_told_which_check_a_workunit_waits_for(grid):
    computed(grid)
    waits = m.plugged("waits_for")

    def said():
        return [text for more in waits for text in more(units()[0], copies(), grid.clock)]

    asked = units()[1].name
    assert said() == [f"waits until another computer has checked twice_5_0: see {asked}"]
    do(grid, Client("bob"), "5")
    assert said() == []


def test_cancelling_a_workunit_cancels_its_check(grid):
    computed(grid)
    bob = Client("bob")
    (job,) = bob.fetch(grid.clock)
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([1], grid.clock))
    passes(grid)
    assert bob.ask(grid.clock, other_results=[job]).aborts == [job]
    bob.report(job, None, grid.clock)
    settled(grid)


def test_cancelling_while_two_checks_disagree(grid):
    computed(grid)
    do(grid, Client("bob"), "4")
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([1], grid.clock))
    settled(grid)


def test_a_cancelled_check_is_made_again(grid):
    first = computed(grid)
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([2], grid.clock))
    passes(grid)
    assert len(checks()) == 2
    do(grid, Client("bob"), "5")
    assert states(first) == ["valid"]


def test_a_check_is_dropped_when_another_copy_was_confirmed(grid):
    """The race of a late first copy and its repeat: both have a check, one is enough."""
    unit = add("twice", 5, grid.clock)
    slow = Client("slow")
    (late,) = slow.fetch(grid.clock)
    grid.clock += 86400
    passes(grid, 2)
    quick = do(grid, Client("quick"), "10")
    slow.report(late, "10", grid.clock)
    passes(grid)
    assert len(checks()) == 2
    bob, cyd = Client("bob"), Client("cyd")
    (one,), (two,) = bob.fetch(grid.clock), cyd.fetch(grid.clock)
    bob.report(one, "5", grid.clock)
    passes(grid)
    assert states(late, quick) == ["valid", "valid"]
    assert cyd.ask(grid.clock, other_results=[two]).aborts == [two]
    cyd.report(two, None, grid.clock)
    assert unit.id == 1
    settled(grid)


def test_a_result_that_comes_with_the_confirmation_of_another_needs_no_check(grid):
    add("twice", 5, grid.clock)
    slow = Client("slow")
    (late,) = slow.fetch(grid.clock)
    grid.clock += 86400
    passes(grid, 2)
    do(grid, Client("quick"), "10")
    bob = Client("bob")
    bob.report(*bob.fetch(grid.clock), "5", grid.clock)
    passes(grid, 1)
    slow.report(late, "11", grid.clock)
    passes(grid)
    assert states(late) == ["wrong"] and len(checks()) == 1 and answers(grid) == [10]
    settled(grid)


def test_an_output_that_is_lost_before_it_was_checked(grid, monkeypatch):
    first = lost(grid)
    passes(grid)
    assert result(first).outcome == O.VALIDATE_ERROR
    do(grid, Client("second"), "10")
    do(grid, Client("checks"), "5")
    assert answers(grid) == [10]


def test_an_output_that_is_lost_after_it_was_handed_out(grid):
    """The check has bytes of its own."""
    first = computed(grid)
    kept = output(first).read_bytes()
    output(first).unlink()
    (job,) = Client("bob").ask(grid.clock, work_req_seconds=1).assignments
    assert make.kept("download", job.input["name"]) == kept
    output(first).write_bytes(kept)


def test_an_output_that_cannot_be_read_now(grid):
    first = lost(grid)
    output(first).mkdir()
    passes(grid, 5)
    assert len(units()) == 1 and len(grid.errors) == 1
    output(first).rmdir()
    output(first).write_text("10")
    grid.clock += make.RETRY
    passes(grid)
    assert len(units()) == 2


def test_same_that_raises_puts_off_this_check_alone(grid):
    first = computed(grid)
    do(grid, Client("bob"), '"bug"')
    assert states(first) == ["waits"]
    assert "same() failed: TypeError" in grid.errors[-1][1]
    assert len(grid.errors) == 1


def test_an_output_that_nobody_can_compute_back_from(grid):
    """Three that fail are enough; somebody else computes the workunit, and is believed."""
    first = computed(grid, '"nonsense"')
    for name in ("bob", "cleo", "cyd"):
        client = Client(name)
        (asked,) = client.fetch(grid.clock)
        assert asked.startswith("twice_check_")
        client.report(asked, now=grid.clock)
        passes(grid)
    assert [check.open for check in checks()] == [False]
    assert units()[-1].error_mask and states(first) == ["waits"]
    second = do(grid, Client("dora"), "10")
    assert second == "twice_5_1"
    do(grid, Client("emil"), "5")
    assert states(first, second) == ["wrong", "valid"]
    settled(grid)


def test_same_that_cannot_tell_now_gets_another_answer(grid):
    first = computed(grid)
    do(grid, Client("bob"), '"away"')
    do(grid, Client("cyd"), "5")
    assert states(first) in (["waits"], ["valid"])
    assert len(checks()) == 1


def test_a_restart_between_any_two_steps_loses_nothing(grid, folder):
    """Crash between: everything is in the store."""
    def again():
        clock = grid.clock
        make.restart(folder, stock=0, min_sendwork_interval=0)
        m.project.clock = clock

    names = []
    add("twice", 5, grid.clock)
    for client, answer in (("a", "10"), ("b", "4"), ("c", "5")):
        names.append(do(m.project, Client(client), answer))
        again()
        for stage in m.all_stages():
            m.project.clock += 1
            m.run_pass(m.project.clock, [stage])
            again()
        passes(m.project)
    assert states(*names) == ["valid", "wrong", "valid"]
    assert answers(m.project) == [10]
    settled(m.project)


def test_a_second_pass_changes_nothing_while_all_wait(grid):
    computed(grid)
    do(grid, Client("bob"), "4")
    m.run_pass(grid.clock)
    before = list(m.db.connection().iterdump())
    m.run_pass(grid.clock)
    assert list(m.db.connection().iterdump()) == before


def test_open_checks_are_found_by_their_index(grid):
    plan = m.db.execute_sql("EXPLAIN QUERY PLAN " + " ".join(
        str(part) for part in [inverse().InverseCheck.select(inverse().InverseCheck.id)
                               .where(inverse().OPEN).sql()[0]])).fetchall()
    assert "inversecheck_open" in str(plan)


@pytest.mark.parametrize("app", [TWICE + '\n\ndef known(i):\n    return 10 if i == 5 else None\n'])
def test_a_known_answer_needs_no_check(grid, app):
    first = computed(grid)
    assert states(first) == ["valid"] and checks() == [] and answers(grid) == [10]
    told = [part for part in m.plugged("tell")[0](first, grid.clock, False)[1]]
    assert "known beforehand" in str(told) and "recovered" not in str(told)


# ---- What is refused ------------------------------------------------------------------

BAD = {
    "no invert": (TWICE.replace("def invert(output)", "def other(output)"), "def invert(output)"),
    "no same": (TWICE.replace("def same(", "def other("), "def same(input, recovered)"),
    "parameters": (TWICE.replace("def same(input, recovered)", "def same(input)"), "same()"),
    "a quorum": (TWICE + "\n\nmin_quorum = 2\n", "min_quorum must be left out or 1"),
    "another policy": (TWICE.replace('"inverse"', '"quorum"'), "validation = 'inverse'"),
}


@pytest.mark.parametrize("case", BAD)
def test_applications_that_are_refused(case, folder):
    text, words = BAD[case]
    with make.project(folder, {"twice": text}) as project:
        assert [words in error for _, error in project.errors] == [True]


# ---- Whoever computes it ------------------------------------------------------------------


def test_a_volunteer_runs_invert(tmp_path, monkeypatch, capsys):
    """The whole life with the harness of the real volunteer, in processes."""
    path = tmp_path / "twice.py"
    path.write_text(TWICE)
    commands = sys.modules["minigrid_plugin_commands"]
    monkeypatch.chdir(tmp_path)
    parser = m.argparse.ArgumentParser()
    commands.commands(parser.add_subparsers())
    options = parser.parse_args(["try", str(path), "--number", "2"])
    assert not options.run(options)
    shown = capsys.readouterr().out
    assert "kept      4" in shown and "twice_check_" in shown


KINDS = {  # constants, function, command line, input -> output, or part of what is said
    "compute": ("", "", b"3", b"[3]"),
    "invert": ("", "--invert", b"[3]", b"3"),
    "another word": ("", "--inverted", b"3", b"[3]"),
    "two words": ("", "-x --invert", b"3", b"[3]"),
    "bytes to JSON": ("takes = 'bytes'", "--invert", b"[104,105]", b"hi"),
    "JSON to bytes": ("returns = 'bytes'", "--invert", b"hi", b"[104,105]"),
    "no bytes": ("takes = 'bytes'", "--invert", b"[1000]", "ValueError"),
    "a wrong kind": ("takes = 'bytes'", "--invert", b'"text"', "invert() has to return bytes"),
}
BOTH_WAYS = '''
{}


def compute(input):
    return [input]


def invert(output, progress):
    progress(0.5)
    if output == "text":
        return output
    if isinstance(output, bytes):
        return list(output)
    return bytes(output) if globals().get("takes") == "bytes" else output[0]
'''


@pytest.mark.parametrize("case", KINDS)
def test_what_is_read_and_written_by_invert(case, tmp_path):
    """Its input is of the kind compute() returns, its output of the kind that takes."""
    constants, line, given, wanted = KINDS[case]
    volunteer = sys.modules["minigrid_plugin_commands"].volunteer_module()
    job = volunteer.Job(
        name="a_0", workunit="a", app="a", about="", app_version=1, platform="python", ncpus=1.0,
        command_line=line, files=[], input={"name": "in"}, inputs=[], output={}, delay_bound=1.0,
        report_deadline=1.0, rsc_fpops_est=1.0, rsc_fpops_bound=1.0, rsc_memory_bound=1e9,
        rsc_disk_bound=1e9)
    files, slot = tmp_path / "files", tmp_path / "slot"
    files.mkdir()
    code = BOTH_WAYS.format(constants).encode()
    entries = [dict(name=name, sha256=hashlib.sha256(data).hexdigest(), nbytes=len(data), **more)
               for name, data, more in (("app.py", code, dict(main=True)), ("in", given, {}))]
    job.files, job.input = entries[:1], entries[1]
    for name, data in (("app.py", code), ("in", given)):
        (files / name).write_bytes(data)
    volunteer.prepare_slot(slot, job, files, 60)
    (tmp_path / "harness.py").write_text(volunteer.HARNESS)
    process = subprocess.Popen(  # It ends when its standard input does.
        [sys.executable, str(tmp_path / "harness.py"), str(slot)], stdin=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)
    said = process.stderr.read()
    process.wait(60)
    process.stdin.close()
    process.stderr.close()
    if isinstance(wanted, bytes):
        assert (slot / "output").read_bytes() == wanted, said
    else:
        assert wanted in said and process.returncode


@pytest.mark.parametrize("said", ["None", "'yes'", "1"])
def test_same_that_does_not_answer_is_a_fault_of_the_application(said, grid, folder):
    """A forgotten return must not leave honest nodes in doubt, nor "yes" be taken for True."""
    first = computed(grid)
    text = (folder / "twice.py").read_text()
    (folder / "twice.py").write_text(text.replace("input == recovered", said))
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.project.clock = grid.clock
    check = do(m.project, Client("bob"), "5")
    assert "same() must return True or False" in m.project.errors[0][1]
    assert states(first, check) == ["waits", "new"] and len(m.project.errors) == 1
    (folder / "twice.py").write_text(text)
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.project.clock = grid.clock + 10
    passes(m.project)
    assert states(first, check) == ["valid", "valid"]


@pytest.mark.parametrize("how", [
    'validation = "quorum"', 'validation = "none"', 'validation = "adaptive"',
    'validation = "recheck"\nrecheck = 1', 'validation = "recheck"\nwrong_answers_at_most = 0.01',
    'validation = "check"\ndef check(input, output):\n    return output == 2 * input'])
@pytest.mark.parametrize("begun", ["asked", "sent", "denied"])
def test_an_application_that_is_checked_in_another_way_now(how, begun, grid, folder):
    """What waits for a check is judged as the application wants it now; the check is given up."""
    first = computed(grid)
    if begun == "sent":
        assert Client("away").fetch(grid.clock)
    if begun == "denied":
        do(grid, Client("liz"), "77")
    text = (folder / "twice.py").read_text().split("def invert")[0]
    text = text.replace('validation = "inverse"', how)
    if "at_most" in how:
        text = text.replace('"off", 0', '"off", None').replace(", spot_checks", ", _")
    (folder / "twice.py").write_text(text)
    assert make.restart(folder, stock=0, min_sendwork_interval=0) == []
    m.project.clock = grid.clock
    passes(m.project)
    alone = '"none"' in how or '"check"' in how
    assert (result(first).validate_state == V.VALID) == alone  # One answer is no vote.
    for name in () if alone else ("bob", "eve"):
        for task in Client(name).fetch(m.project.clock):
            assert task.startswith("twice_5_")  # no check, which nobody could answer now
            Client(name).report(task, "10", m.project.clock, hostid=0)
    passes(m.project, 5)
    assert states(first) == ["valid"] and answers(m.project) == [10]
    assert not any(check.open for check in checks())
    assert all(wu.canonical_resultid or wu.error_mask for wu in units())
    make.settings(purge_delay=0)
    m.project.clock += 2 * make.DAY
    settled(m.project)


def test_tasks_that_everybody_has_computed_are_checked_by_each_other(grid, app):
    """[S3-34] In a small project a task was handed to both computers: who checks their answers?"""
    add("twice", 5, grid.clock, target_nresults=2)
    ann, bob = Client("ann"), Client("bob")
    first, other = (client.fetch(grid.clock)[0] for client in (ann, bob))
    ann.report(first, "10", grid.clock)
    bob.report(other, "10", grid.clock)
    passes(grid)
    assert states(first, other) == ["waits", "waits"] and len(checks()) == 2
    assert ann.fetch(grid.clock) == [] == bob.fetch(grid.clock)
    assert "has not computed the same" in bob.host().why_no_work
    grid.clock += 3600
    (question,) = ann.fetch(grid.clock)
    asked = next(check for check in checks()
                 if check.question == result(question).workunit_id)
    assert asked.result_id == result(other).id  # never its own
    ann.report(question, "5", grid.clock)
    passes(grid)
    assert states(first, other) == ["valid", "valid"] and answers(grid) == [10]
