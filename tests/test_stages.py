"""The stages: from the first workunit to the archive, past hooks that fail and full disks."""

import errno
import gzip
import json
import shutil
import sys
from types import SimpleNamespace

import make
import pytest
from make import (DAY, NOW, RETRY, Client, add, answered, copies, dump, kept, output, restart,
                  result, settings, states, units)

import minigrid as m

A, E, F, O, S, V = (m.AssimilateState, m.ErrorMask, m.FileDeleteState, m.Outcome, m.ServerState,
                    m.ValidateState)


def passes(*times):
    """Run whole passes; return what the last one did."""
    return [m.run_pass(now) for now in times][-1]


def lines(app="near"):
    """What an application has kept: the objects of its file in data/results."""
    path = m.project.data / "results" / f"{app}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def troubles():
    return "\n".join(text for _, text in m.project.errors)


def control(name, on=True):
    """Tell the application "near" how to assimilate, by a file it looks for."""
    path = m.project.data / "results" / name
    path.touch() if on else path.unlink()


# ---- Generator -----------------------------------------------------------------

ENDLESS = make.COUNT.replace(" if i < 3 else None", "")


def serve(folder, stock=4, **apps):
    """Start anew with other applications."""
    for path in folder.glob("*.py"):
        path.unlink()
    for name, text in apps.items():
        (folder / f"{name}.py").write_text(text)
    return restart(folder, stock=stock)


def numbers(app):
    return [unit.number for unit in units() if unit.app_id == m.apps[app].id]


@pytest.mark.parametrize("stock, n", [(0, 0), (1, 1), (4, 4), (120, 70)])
def test_stock_is_kept(stock, n, grid, folder):
    """At least `stock` unsent results; a chunk at a time, each workunit with two copies."""
    serve(folder, stock, endless=ENDLESS)
    assert passes(NOW)["generator"] == n
    assert numbers("endless") == list(range(n))
    assert len(copies(server_state=S.UNSENT)) == 2 * n
    assert passes(NOW + 1)["generator"] == 0
    m.Result.update(server_state=S.IN_PROGRESS, report_deadline=NOW + DAY).execute()
    assert passes(NOW + 2)["generator"] == n


def test_it_stops_at_none_and_goes_on_after_a_restart(grid, folder):
    serve(folder, app=make.COUNT)
    assert (passes(NOW)["generator"], numbers("app")) == (3, [0, 1, 2])
    assert passes(NOW + 1)["generator"] == 0
    m.close_project()
    serve(folder, app=make.COUNT.replace("i < 3", "i < 5"))
    m.Result.update(server_state=S.IN_PROGRESS, report_deadline=NOW + DAY).execute()
    assert (passes(NOW + 2)["generator"], numbers("app")) == (2, [0, 1, 2, 3, 4])


def test_workunits_are_made_with_their_input(grid, folder):
    serve(folder, app=make.COUNT + "\n\ndelay_bound, priority, credit = 77, 3, 5\n")
    passes(NOW)
    unit = units()[2]
    assert (unit.name, unit.number, unit.create_time) == ("app_2", 2, NOW)
    assert (unit.delay_bound, unit.priority, unit.canonical_credit) == (77, 3, 5)
    assert (unit.min_quorum, unit.target_nresults, unit.error_mask) == (2, 2, 0)
    assert kept("download", "app_2_in") == b"2"
    assert states(copies(workunit=unit), "name") == ["app_2_0", "app_2_1"]


@pytest.mark.parametrize("threads", [False, True])
def test_inputs_are_written_before_the_writer_is_held(threads, grid, folder, monkeypatch, on_disk):
    """The disk may be slow; a report that waits for it would wait for fifty files [D4]."""
    serve(folder, 50, app=ENDLESS)
    generator, held = sys.modules["minigrid_plugin_generator"], []
    monkeypatch.setattr(generator, "store_files", lambda *files: held.append(
        grid.write.working) or m.store_files(*files))
    if threads:
        grid.write.start()
    try:
        assert generator.generator(NOW) == 50
    finally:
        grid.write.stop()
    assert held == [None]
    assert [m.file_path("download", f"app_{i}_in").read_bytes() for i in (0, 49)] == [b"0", b"49"]
    assert not list((grid.data / "download").glob("*/*.new"))


def test_without_its_input_no_workunit_is_made(grid, folder, monkeypatch, on_disk):
    """A full disk, for one: nothing is stored, and the next pass begins at the same number."""
    serve(folder, 4, app=ENDLESS)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["minigrid_plugin_generator"], "store_files", full_disk)
        passes(NOW)
    assert numbers("app") == [] and "No space" in troubles()
    m.project.counts["stage errors"] = 0
    passes(NOW + 1)
    assert numbers("app") == [0, 1, 2, 3]


def full_disk(*file):
    """Refuse to store anything."""
    raise OSError(errno.ENOSPC, "No space left on device")


BROKEN = {  # id: (what workunit(i) does, what is said)
    "raises": ("1 / 0", "workunit() failed: ZeroDivisionError: division by zero (line 5)"),
    "no dict": ("5", "must return a dict"),
    "no input": ("{'inputs': i}", "must return a dict"),
    "unknown parameter": ("{'input': i, 'min_quorun': 2}", "'min_quorun'"),
    "impossible numbers": ("{'input': i, 'min_quorum': 9, 'max_total_results': 8}", "must not be"),
    "no number": ("{'input': i, 'delay_bound': None}", "delay_bound must be a number"),
    "no JSON": ("{'input': {1, 2}}", "input"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_application_waits_and_the_others_go_on(case, grid, folder):
    does, says = BROKEN[case]
    serve(folder, broken=make.COUNT.replace('{"input": i}', does), fine=make.COUNT)
    assert passes(NOW)["generator"] == 3
    assert (numbers("broken"), numbers("fine")) == ([], [0, 1, 2])
    assert "broken.py" in troubles() and says in troubles()
    passes(NOW + 1, NOW + RETRY - 1)
    assert len(m.project.errors) == 1
    passes(NOW + RETRY, NOW + RETRY + 1)
    assert len(m.project.errors) == 2


def test_good_ones_before_a_bad_one_are_made(grid, folder):
    """Whether the hook raises or its numbers are wrong; and no number is used twice."""
    serve(folder, 9, app=ENDLESS.replace('{"input": i}', '{"input": 1 // (i - 2)}'))
    passes(NOW)
    assert numbers("app") == [0, 1] and "ZeroDivisionError" in troubles()
    assert len(m.project.errors) == 1  # It was asked once.
    serve(folder, app=ENDLESS.replace('{"input": i}', '{"input": i, "credit": 2 - i}'))
    m.Result.update(server_state=S.IN_PROGRESS, report_deadline=NOW + DAY).execute()
    passes(NOW + 1)
    assert numbers("app") == [0, 1, 2] and "workunit(3): credit" in troubles()


def test_a_generator_that_fails_stops_nothing_else(grid, folder):
    serve(folder, near=make.NEAR.replace('return {"input": i} if i < 3 else None', "return 1 / 0"))
    answered("5", "5")
    passes(NOW + 1)
    assert len(lines()) == 1 and "ZeroDivisionError" in troubles()
    assert len(Client("ann").fetch()) == 0 and add(number=1)
    assert len(Client("ann").fetch()) == 1


# ---- A whole life --------------------------------------------------------------


def test_a_whole_life(grid):
    settings(purge_delay=100)
    name = answered("5", "5")
    done = passes(NOW + 1)
    assert {"transitioner": 1, "validator": 1, "assimilator": 1}.items() <= done.items()
    assert lines() == [dict(workunit=name, number=0, errors=[], answer=[5, 0])]
    unit = units()[0]
    assert unit.assimilate_state == A.DONE and unit.transition_time == unit.mod_time == NOW + 1
    done = passes(NOW + 2)
    assert (done["transitioner"], done["file_deleter"], done["purger"]) == (1, 3, 0)
    assert not list((grid.data / "upload").glob("*/*"))
    assert not m.file_path("download", f"{name}_in").exists()
    assert {units()[0].file_delete_state, *states(copies(), "file_delete_state")} == {F.DONE}
    assert units()[0].transition_time == m.NEVER  # S4-30
    assert passes(NOW + 101)["purger"] == 0
    assert passes(NOW + 102)["purger"] == 1
    assert (units(), copies()) == ([], [])
    assert m.plugged("violations")[0]() == []


def test_a_failed_life(grid):
    answered(None, min_quorum=1, max_error_results=0)
    passes(NOW + 1, NOW + 2)
    assert lines() == [dict(workunit="near_0", number=0, errors=["TOO_MANY_ERROR_RESULTS"],
                            answer=[None, 0])]
    assert units()[0].file_delete_state == copies()[0].file_delete_state == F.DONE


def worlds():
    """Something for every stage to do."""
    answered("5", "5")
    add(number=1, delay_bound=5)
    Client("zoe").fetch()
    add("count", 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_second_pass_in_the_same_second_does_nothing(n, grid):
    """Once all is settled: STYLE 4."""
    settings(purge_delay=0)
    worlds()
    passes(*range(NOW + 1, NOW + 12, 3)[:n])
    now = range(NOW + 1, NOW + 12, 3)[n - 1]
    before, written = dump(), m.db.connection().total_changes
    assert not any(passes(now).values())
    assert (dump(), m.db.connection().total_changes) == (before, written)


def test_many_workunits_are_done_in_one_pass(grid):
    """More than a chunk."""
    with m.db.atomic():
        for number in range(m.CHUNK + 7):
            add(number=number, min_quorum=1, target_nresults=1, delay_bound=10**6)
    ann = Client("ann")
    settings(max_wus_to_send=999, max_wus_in_progress=999)
    names = ann.fetch(work_req_seconds=1e9)
    for name in names:
        output(name).write_text("5")
    ann.ask(reports=[m.Report(name, 5, 0) for name in names])
    done = passes(NOW + 1)
    assert (done["transitioner"], done["validator"], done["assimilator"]) == (len(names),) * 3
    assert len(names) == m.CHUNK + 7 == len(lines())


@pytest.mark.parametrize("running, n", [(True, 3), (False, 1)])
def test_a_pass_that_has_left_something_over_is_followed_by_another(running, n, monkeypatch):
    """Unless the server stops just now: who has 100,000 workunits to time out need not wait."""
    full = m.CHUNK * m.CHUNKS_MAX
    done = iter([{"a": 1, "b": full}, {"a": full + 1, "b": 0}, {"a": full - 1}, {"a": full}])
    called = []
    monkeypatch.setattr(m, "run_pass", lambda now: called.append(now) or next(done))
    m.run_passes(lambda: NOW, SimpleNamespace(running=running))
    assert called == [NOW] * n


def test_a_pass_has_a_limit_and_begins_with_what_waits_longest(grid, monkeypatch):
    """D7, C8: so that every stage has its turn, and nobody is overtaken for ever."""
    monkeypatch.setattr(m, "CHUNK", 2)
    monkeypatch.setattr(m, "CHUNKS_MAX", 1)
    monkeypatch.setattr(m.due, "known", {})  # The limit is part of its SQL.
    for number in range(5):
        add(number=number)
    for unit in units():  # The newest are due for longest.
        m.Workunit.update(transition_time=NOW - unit.id).where(m.Workunit.id == unit.id).execute()
    for left in ([1, 2, 3], [1], []):
        m.transitioner(NOW)
        assert [unit.id for unit in units() if unit.transition_time < NOW] == left


def test_workunits_come_in_the_order_asked_for(grid):
    for number in range(3):
        add(number=number)
    assert [(unit.id, len(results)) for unit, results in m.load([3, 1, 9, 2])] == [
        (3, 2), (1, 2), (2, 2)]


def test_troubles_that_are_kept_are_bounded(grid):
    for n in range(50):
        m.remember(NOW + n, f"trouble {n}")
    assert grid.errors[-1] == (NOW + 49, "trouble 49") and len(grid.errors) <= 20


def test_flag_1_is_left_alone(grid):
    """T9."""
    answered("5", "5")
    m.Workunit.update(transitioner_flags=1).execute()
    assert passes(NOW + 1)["transitioner"] == 0


@pytest.mark.parametrize("time, due", [(NOW - 1, 1), (NOW, 0), (0, 1), (m.NEVER, 0)])
def test_due_is_strictly_before_now(time, due, grid):
    """S0-15, C9."""
    add()
    m.Workunit.update(transition_time=time).execute()
    assert m.transitioner(NOW) == due
    m.Workunit.update(transition_time=m.NEVER).execute()
    assert m.transitioner(m.NEVER + 5) == 0


# ---- Assimilation, exactly once ------------------------------------------------


@pytest.mark.parametrize("place", ["before the file", "after the file", "in the commit"])
def test_a_crash_after_the_hook_leaves_one_line(place, grid, folder, monkeypatch):
    """C23: whatever was written is cut off, or was not written, and the hook runs again."""
    answered("5", "5")
    append, assimilate = m.append_exactly, sys.modules["minigrid_plugin_assimilate"]

    def fall(*args):
        if place == "after the file":
            append(*args)
        raise KeyError("power cut")

    with monkeypatch.context() as patch:
        if place == "in the commit":
            m.transitioner(NOW + 1), m.validator(NOW + 1)
            patch.setattr(m, "count_firings", lambda done: done and fall())
            with pytest.raises(KeyError):
                assimilate.assimilator(NOW + 1)
        else:
            patch.setattr(assimilate, "append_exactly", fall)
            m.run_pass(NOW + 1)
    m.close_project()
    restart(folder, stock=0)
    assert units()[0].assimilate_state == A.READY
    passes(NOW + 2, NOW + 3, NOW + 4, NOW + 5)
    assert len(lines()) == 1
    assert units()[0].assimilate_state == A.DONE


def test_lines_of_several_workunits_survive_a_torn_one(grid):
    answered("5", "5")
    passes(NOW + 1)
    with open(grid.data / "results" / "near.jsonl", "ab") as file:
        file.write(b'{"workunit": "ne')
    name = add(number=1, min_quorum=1, target_nresults=1).name
    ann = Client("ann")
    ann.report(*ann.fetch(NOW + 2), "7", NOW + 2)
    passes(NOW + 3)
    assert [line["workunit"] for line in lines()] == ["near_0", name]


def test_append_exactly(grid):
    """As part of a transaction: what is not committed is cut off by the next call."""
    path = grid.data / "results" / "x"

    def fall():
        m.append_exactly(path, b"lost")
        raise KeyError

    m.project.write(lambda: m.append_exactly(path, b"one "))
    with pytest.raises(KeyError):
        m.project.write(fall)
    assert path.read_bytes() == b"one lost"
    m.project.write(lambda: m.append_exactly(path, b"two "))
    assert path.read_bytes() == b"one two "
    path.write_bytes(b"on")  # Somebody cut it: go on behind what is left, never with a hole.
    m.project.write(lambda: m.append_exactly(path, b"three"))
    assert path.read_bytes() == b"onthree"


def test_a_handler_that_raises_is_asked_again_in_six_hours(grid):
    answered("5", "5")
    control("fail")
    passes(NOW + 1)
    assert "I do not like it" in troubles() and lines() == []
    control("fail", False)
    passes(NOW + 2, NOW + RETRY)
    assert units()[0].assimilate_state == A.READY
    passes(NOW + RETRY + 1, NOW + RETRY + 2)
    assert len(lines()) == 1 and units()[0].assimilate_state == A.DONE


def test_a_canonical_output_that_is_missing_is_trouble(grid):
    """The handler is not called with nothing."""
    answered("5", "5")
    m.transitioner(NOW + 1), m.validator(NOW + 1)
    kept = output("near_0_0").read_bytes()
    output("near_0_0").unlink()
    passes(NOW + 1)
    assert lines() == [] and "near_0" in troubles()
    output("near_0_0").write_bytes(kept)
    passes(NOW + RETRY + 1, NOW + RETRY + 2)
    assert lines()[0]["answer"] == [5, 0]


def test_deferred_until_it_is_liked(grid):
    """A2, T5: the application is asked again, and told once."""
    answered("5", "5")
    control("defer")
    passes(NOW + 1)
    assert (units()[0].assimilate_state, units()[0].transition_time) == (A.INIT, NOW + 1)
    passes(NOW + 2)
    assert lines() == []
    control("defer", False)
    passes(NOW + 3, NOW + 4)
    assert len(lines()) == 1 and units()[0].assimilate_state == A.DONE


def test_answer_and_error_come_together(grid):
    """S2-36: cancelled just after it was decided; A1: nothing at all to tell."""
    answered("5", "5")
    m.transitioner(NOW + 1), m.validator(NOW + 1)
    m.Workunit.update(error_mask=E.CANCELLED | 1).execute()
    add(number=1)
    m.Workunit.update(assimilate_state=A.READY).where(m.Workunit.number == 1).execute()
    passes(NOW + 2)
    assert [(line["errors"], line["answer"]) for line in lines()] == [
        (["COULDNT_SEND_RESULT", "CANCELLED"], [5, 0]), (["NO_CANONICAL_RESULT"], [None, 1])]
    assert states(units(), "error_mask") == [17, 32]


# ---- Hooks and stages that fail ------------------------------------------------


def test_too_many_faults_stop_the_application(grid):
    """FAULTS_MAX of its workunits may fail; one more, and it waits for six hours altogether."""
    with m.db.atomic():
        for number in range(m.FAULTS_MAX + 2):
            add(number=number, min_quorum=1, target_nresults=1)
    m.Workunit.update(assimilate_state=A.READY, error_mask=1).execute()
    m.Workunit.update(assimilate_state=A.INIT).where(m.Workunit.number >= m.FAULTS_MAX).execute()
    control("fail")
    passes(NOW)
    assert ("near", 0) not in grid.put_off
    m.Workunit.update(assimilate_state=A.READY).execute()
    passes(NOW + 1)
    assert grid.put_off["near", 0] == NOW + 1 + RETRY
    assert len(grid.put_off) == m.FAULTS_MAX + 2  # The last one was not even tried.
    assert [a.name for a in m.working(NOW + 2).values()] == ["count"]
    assert "failed on 20 workunits" in troubles()
    control("fail", False)
    passes(NOW + 1 + RETRY, NOW + 2 + RETRY)
    assert len(lines()) == m.FAULTS_MAX + 2


def test_no_work_of_an_application_that_waits(grid):
    add(), add("count")
    m.put_off(m.apps["near"], 0, NOW, "out of order")
    assert Client("ann").fetch(work_req_seconds=1e6) == ["count_0_0"]
    assert Client("ann").fetch(NOW + RETRY) == ["near_0_0"]


def test_a_stage_that_raises_does_not_stop_the_others(grid):
    answered("5", "5")

    def burning(now):
        raise RuntimeError("it burns")

    done = m.run_pass(NOW + 1, [burning, m.transitioner, burning, m.validator])
    assert list(done) == ["transitioner", "validator"] and units()[0].canonical_resultid
    assert grid.counts["stage errors"] == 2 and "burning: RuntimeError('it burns')" in troubles()


def test_a_full_disk_ends_the_pass(grid):
    answered("5", "5")

    def full(now):
        raise m.StoreError("the disk is full")

    assert m.run_pass(NOW + 1, [full, m.transitioner]) == {}
    assert "the disk is full" in troubles() and units()[0].transition_time == NOW


def test_an_illegal_move_costs_its_workunit_only(grid):
    """A state that cannot be: VALID without a canonical result, and not readable just now."""
    clients = [Client("ann"), Client("bob"), Client("cyd")]
    answered("5", "5", '"away"', clients=clients, min_quorum=2, target_nresults=3)
    m.Result.update(validate_state=V.VALID).where(m.Result.name == "near_0_2").execute()
    answered("7", "7", clients=clients, number=1)

    def spoilt():
        results = m.Result.select().where(m.Result.workunit == 1).order_by(m.Result.id)
        return [*results.tuples()]

    before = spoilt()
    passes(NOW + 1)
    assert [bool(unit.canonical_resultid) for unit in units()] == [False, True]
    assert grid.counts["stage errors"] == 1 and "IllegalMove" in troubles()
    assert units()[0].transition_time == NOW + 1 + RETRY
    assert spoilt() == before
    assert [h.total_credit for h in m.Host.select()] == [10, 10, 0]  # for the sound one
    assert [f.n for f in m.Firing.select().where(m.Firing.rule == "valid")] == [2]
    passes(NOW + 2)
    assert grid.counts["stage errors"] == 1
    passes(NOW + 2 + RETRY, NOW + 3 + RETRY)
    assert grid.counts["stage errors"] == 2


@pytest.mark.parametrize("state, later", [(S.IN_PROGRESS, 1000), (S.OVER, 1 + RETRY)])
def test_a_deadline_is_kept_by_a_workunit_that_waits_for_its_programmer(grid, state, later):
    """[S0-34] A copy that is under way may be lost meanwhile: it is given up in its time."""
    answered("5", "5", '"away"', clients=[Client(name) for name in ("ann", "bob", "cyd")],
             min_quorum=2, target_nresults=4)
    m.Result.update(validate_state=V.VALID).where(m.Result.name == "near_0_2").execute()
    m.Result.update(server_state=state, report_deadline=NOW + 1000).where(
        m.Result.name == "near_0_3").execute()
    passes(NOW + 1)
    assert grid.counts["stage errors"] == 1 and "IllegalMove" in troubles()
    assert units()[0].transition_time == NOW + later
    grid.counts["stage errors"] = 0


# ---- Files ---------------------------------------------------------------------


def gone(name):
    """A workunit that is assimilated, with two outputs; deletions begin with the next pass."""
    answered("5", "5")
    passes(NOW + 1)
    return m.file_path("download", f"{name}_in"), output(f"{name}_0"), output(f"{name}_1")


def test_a_file_that_is_gone_counts_as_deleted(grid, on_disk):
    """F1."""
    for path in gone("near_0"):
        path.unlink()
    passes(NOW + 2)
    assert units()[0].file_delete_state == F.DONE
    assert states(copies(), "file_delete_state") == [F.DONE, F.DONE]


def test_what_cannot_be_deleted_is_tried_every_hour(grid, on_disk):
    """F2, F3, P1: and the workunit stays until then."""
    settings(purge_delay=100)
    stuck, lost, fine = gone("near_0")
    stuck.unlink()
    stuck.mkdir()  # cannot be unlinked, not even by root
    lost.unlink()
    shutil.rmtree(lost.parent)
    passes(NOW + 2)
    assert units()[0].file_delete_state == F.ERROR
    assert states(copies(), "file_delete_state") == [F.ERROR, F.DONE]
    stuck.rmdir()
    lost.parent.mkdir()
    passes(NOW + 3, NOW + 1 + 3599)
    assert units()[0].file_delete_state == F.ERROR
    passes(NOW + 1 + 3600, NOW + 1 + 3699)
    assert units()[0].file_delete_state == F.DONE
    passes(NOW + 1 + 3700)
    assert units() == []


def test_what_stays_undeleted_is_told_once(grid, on_disk):
    """C16: the second hour finds what the first one found."""
    stuck, *_ = gone("near_0")
    stuck.unlink()
    stuck.mkdir()
    passes(NOW + 2, NOW + 3 + 3600, NOW + 4 + 7200)
    assert units()[0].file_delete_state == F.ERROR
    assert m.Firing.get(rule="files not deleted").n == 1
    stuck.rmdir()


def test_the_rest_of_a_broken_upload_goes_too(grid):
    """P2: an error was reported while a part of its output was here."""
    answered("5", None, min_quorum=1, target_nresults=2)
    (part,) = [path.with_name(path.name + ".part") for path in [output("near_0_1")]]
    part.write_bytes(b"half")
    passes(NOW + 1, NOW + 2, NOW + 3)
    assert result("near_0_1").file_delete_state == F.DONE and not part.exists()


def test_the_first_pass_of_a_process_tries_again(grid, folder):
    """F2."""
    gone("near_0")
    m.Workunit.update(file_delete_state=F.ERROR, transition_time=m.NEVER).execute()
    passes(NOW + 2)
    assert units()[0].file_delete_state == F.ERROR
    m.close_project()
    restart(folder, stock=0)
    passes(NOW + 3)
    assert units()[0].file_delete_state == F.DONE


def test_files_wait_for_the_delay(grid):
    """T7: nothing but the clock wakes the workunit."""
    settings(delete_delay=1000)
    answered("5", "5")
    passes(*range(NOW + 1, NOW + 5), NOW + 1000)
    assert units()[0].file_delete_state == F.INIT
    passes(NOW + 1001)
    assert units()[0].file_delete_state == F.DONE


def test_no_delete(grid, either):
    answered("5", "5")
    files = [dict(units()[0].input_files[0], no_delete=True)]
    m.Workunit.update(input_files=files).execute()
    passes(NOW + 1, NOW + 2)
    assert units()[0].file_delete_state == F.DONE
    assert kept("download", "near_0_in")


# ---- Purge ---------------------------------------------------------------------


def archived(data):
    return [json.loads(line) for path in sorted((data / "archive").glob("*.gz"))
            for line in gzip.open(path, "rt")]


def finished(**changes):
    """Put a finished workunit, with two results, into the store as it might stand there."""
    add(min_quorum=2)
    m.Workunit.update(assimilate_state=A.DONE, file_delete_state=F.DONE, transition_time=m.NEVER,
                      mod_time=NOW, error_mask=1).execute()
    m.Result.update(server_state=S.OVER, outcome=O.DIDNT_NEED).execute()
    m.Result.update(**changes or {"priority": 0}).where(m.Result.name == "near_0_1").execute()


PURGED = {  # id: (changes of one result, purged)
    "all is over": ({}, True),
    "one is under way": (dict(server_state=S.IN_PROGRESS, outcome=O.INIT), False),
    "one waits to be deleted": (dict(file_delete_state=F.READY), False),
    "one could not be deleted": (dict(file_delete_state=F.ERROR), False),
    "one was deleted": (dict(file_delete_state=F.DONE), True),
}


@pytest.mark.parametrize("case", PURGED)
def test_purge_wants_everything_done(case, grid):
    """P1, P2, P3."""
    changes, purged = PURGED[case]
    settings(purge_delay=0)
    finished(**changes)
    (purger,) = (stage for stage in m.all_stages() if stage.__name__ == "purger")
    assert purger(NOW) == purged
    assert (units() == [], copies() == []) == (purged, purged)


def test_purge_waits_and_keeps_a_line(grid):
    settings(purge_delay=1000)
    finished()
    stray = output("near_0_1")
    stray.write_text("came unasked")  # P2
    passes(NOW + 999)
    assert len(units()) == 1 and stray.exists()
    passes(NOW + 1000)
    (kept,) = archived(grid.data)
    assert (kept["name"], kept["purge_time"], kept["error_mask"]) == ("near_0", NOW + 1000, 1)
    assert [r["name"] for r in kept["results"]] == ["near_0_0", "near_0_1"]
    assert (units(), copies(), stray.exists()) == ([], [], False)


def test_small_outputs_that_came_late_go_with_their_rows(grid):
    """P2: deleted once, or never to be deleted; nothing would ever look for them again."""
    settings(purge_delay=1000)
    finished(file_delete_state=F.DONE)
    for name in ("near_0_0", "near_0_1", "near_1_0"):
        m.project.write(lambda: m.plugged("keep_file")[-1]("upload", f"{name}_out", b"late"))
    passes(NOW + 1000)
    small = [name for name, in m.db.execute_sql("SELECT name FROM small_file ORDER BY name")]
    assert units() == [] and small == ["download/near_0_in", "upload/near_1_0_out"]
    m.db.execute_sql("DELETE FROM small_file")


def test_small_files_go_when_they_are_deleted(grid):
    """S4-13: with the row that says so, whatever else lies in the folders."""
    answered("5", "5")
    output("near_0_0").unlink()
    m.project.write(lambda: m.plugged("keep_file")[-1]("upload", "near_0_0_out", b"5"))
    passes(NOW + 1)
    assert [line["answer"][0] for line in lines()] == [5]
    assert {name for name, in m.db.execute_sql("SELECT name FROM small_file")} == {
        "download/near_0_in", "upload/near_0_0_out"}
    passes(NOW + 2)
    assert states(copies(), "file_delete_state") == [F.DONE, F.DONE]
    assert units()[0].file_delete_state == F.DONE and not output("near_0_1").exists()
    assert m.db.execute_sql("SELECT count(*) FROM small_file").fetchone() == (0,)


def test_the_archive_grows_by_whole_lines(grid):
    settings(purge_delay=0)
    for _ in range(2):
        finished()
        passes(NOW + 1)
    assert [line["name"] for line in archived(grid.data)] == ["near_0", "near_0"]


# ---- Cancel --------------------------------------------------------------------


def cancel(ids):
    (cancel_workunits,) = m.plugged("cancel_workunits")
    return m.project.write(lambda: cancel_workunits(ids, NOW + 1))


def test_cancel(grid):
    """C9, C42: due at once, told as a failure, called back from whoever has a copy."""
    add()
    ann = Client("ann")
    (name,) = ann.fetch()
    assert cancel([1, 99]) == 1
    assert (units()[0].error_mask, units()[0].transition_time) == (E.CANCELLED, 0)
    passes(NOW + 1)
    assert (units()[0].assimilate_state, lines()[0]["errors"]) == (A.DONE, ["CANCELLED"])
    assert states(copies(), "outcome") == [O.INIT, O.DIDNT_NEED]
    assert ann.ask(NOW + 2, other_results=[name]).aborts == [name]
    ann.report(name, None, NOW + 3)
    passes(NOW + 4)
    assert result(name).outcome == O.CLIENT_ERROR and units()[0].file_delete_state == F.DONE


@pytest.mark.parametrize("change, n", [
    ({}, 1), (dict(error_mask=E.CANCELLED), 0), (dict(error_mask=1), 1),
    (dict(assimilate_state=A.READY), 0), (dict(assimilate_state=A.DONE), 0)])
def test_only_what_is_not_ended_can_be_cancelled(change, n, grid):
    add()
    if change:
        m.Workunit.update(**change).execute()
    assert cancel([1]) == n


# ---- The table of events -------------------------------------------------------


def test_firings_are_counted_for_ever(grid):
    settings(purge_delay=0)
    answered("5", "5")
    passes(NOW + 1, NOW + 2)
    assert units() == []
    counts = {f.rule: f.n for f in m.Firing.select().where(m.Firing.app == m.apps["near"].id)}
    assert {"make a copy": 2, "send": 2, "report success": 2, "valid": 2, "consensus": 1,
            "assimilated": 1, "files deleted": 3, "purge": 1}.items() <= counts.items()
