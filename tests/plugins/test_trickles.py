"""Trickles: messages of running jobs are heard once, and answers come down once [WIRE 13]."""

import sys

import make
import pytest
from make import NOW, Client, add, copies, dump, settings

import minigrid as m

DAY = 86400
TALK = make.NEAR + '''

def trickle(workunit, text):
    """Answers all but "quiet"; some texts are more than it can take."""
    with open(workunit.folder / "heard", "a") as file:
        file.write(f"{workunit.result} {workunit.number} {text}\\n")
    if text == "bad":
        raise ValueError("I do not understand")
    return {"quiet": None, "odd": 7}.get(text, f"yes, {text}")
'''


@pytest.fixture
def grid(folder, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda file: None)
    with make.project(folder, {"talk": TALK, "near": make.NEAR, "more": TALK}, stock=0,
                      min_sendwork_interval=0) as project:
        (project.data / "results" / "heard").unlink(missing_ok=True)
        yield project
        assert m.plugged("violations")[-1]() == []


@pytest.fixture
def trickles(grid):
    return sys.modules["minigrid_plugin_trickles"]


@pytest.fixture
def ann(grid):
    """A client with a running job, talk_0_0."""
    add("talk")
    ann = Client("ann")
    assert ann.fetch() == ["talk_0_0"]
    return ann


def up(*texts, result="talk_0_0", at=1):
    return [{"result": result, "time": at + n, "text": text} for n, text in enumerate(texts)]


def heard():
    path = m.project.data / "results" / "heard"
    return path.read_text().splitlines() if path.exists() else []


def down(client, now=NOW, running=("talk_0_0",)):
    return [(t["result"], t["time"], t["text"])
            for t in client.ask(now, other_results=list(running)).trickles]


def waiting(trickles):
    return trickles.MsgFromHost.select().where(
        trickles.MsgFromHost.text.is_null(False)).count()


def test_a_message_is_heard_once_however_often_it_comes(ann):
    for now in (NOW, NOW + 1):
        assert ann.ask(now, trickles=up("one", "two")).trickles_taken
    m.run_pass(NOW + 2)
    assert ann.ask(NOW + 3, trickles=up("one", "two", "three")).trickles_taken
    m.run_pass(NOW + 4)
    assert heard() == ["talk_0_0 0 one", "talk_0_0 0 two", "talk_0_0 0 three"]
    m.run_pass(NOW + 4)
    assert len(heard()) == 3


def test_the_same_words_later_are_another_message(ann):
    ann.ask(trickles=up("one") + up("one", at=2))
    m.run_pass(NOW)
    assert len(heard()) == 2


def test_no_messages_nothing_taken(ann):
    assert not ann.ask().trickles_taken


def test_answers_go_down_once_in_order_each_with_a_time_of_its_own(ann):
    ann.ask(trickles=up("one", "quiet", "two"))
    assert down(ann) == []
    m.run_pass(NOW + 5)
    assert down(ann, NOW + 6, ["other_0_0"]) == []  # Not while it does not run.
    assert ann.ask(NOW + 6).trickles == []  # Nor if nobody knows.
    assert down(ann, NOW + 6) == [("talk_0_0", NOW + 5, "yes, one"),
                                  ("talk_0_0", NOW + 6, "yes, two")]
    assert down(ann, NOW + 6) == []
    ann.ask(NOW + 6, trickles=up("three", at=9))
    m.run_pass(NOW + 6)  # The time is taken, by what went down before.
    assert down(ann, NOW + 6) == [("talk_0_0", NOW + 7, "yes, three")]


def test_messages_of_other_hosts_results_are_taken_and_dropped(ann, trickles):
    bob = Client("bob")
    assert bob.ask(trickles=up("mine!") + up("x", result="none_0_0")).trickles_taken
    assert Client("ann").ask(trickles=up("from my other computer")).trickles_taken
    assert trickles.MsgFromHost.select().count() == 0
    ann.ask(trickles=up("one"))
    m.run_pass(NOW)
    assert down(bob) == []  # Naming a result is not enough to get its messages.
    assert len(down(ann)) == 1


def test_an_application_that_does_not_listen(ann, trickles):
    add("near")
    bob = Client("bob")
    (name,) = bob.fetch(platforms=["python"], work_req_seconds=1)[:1]
    m.Result.update(app=m.apps["near"].id).where(m.Result.name == name).execute()
    assert bob.ask(trickles=up("hello", result=name)).trickles_taken
    assert waiting(trickles) == 0 and trickles.MsgFromHost.select().count() == 1
    m.run_pass(NOW)
    assert heard() == []
    m.Result.update(app=m.apps["talk"].id).where(m.Result.name == name).execute()


@pytest.mark.parametrize("text, why", [("bad", "I do not understand"), ("odd", "found 7")])
def test_a_hook_that_fails_costs_its_own_message_only(ann, text, why, grid):
    ann.ask(trickles=up(text, "one", text, "two"))
    for now in range(NOW, NOW + 4):
        m.run_pass(now)
    assert [line.split()[-1] for line in heard()] == [text, "one", text, "two"]
    assert [t for *_, t in down(ann)] == ["yes, one", "yes, two"]
    told = [t for _, t in grid.errors]
    assert len(told) == 1 and why in told[0] and "trickle" in told[0]
    assert not grid.put_off


def test_one_that_fails_does_not_stop_another(ann, grid):
    add("more", 1)
    bob = Client("bob")
    name = next(a for a in bob.ask(work_req_seconds=1e6).assignments if a.app == "more").name
    ann.ask(trickles=up("bad", "bad2"))
    bob.ask(trickles=up("one", result=name))
    m.run_pass(NOW)
    assert [line.split()[-1] for line in heard()] == ["bad", "one"]


def test_an_application_that_is_put_off_blocks_no_other(ann, grid, trickles, monkeypatch):
    monkeypatch.setattr(trickles, "AT_ONCE", 2)
    add("more", 1)
    bob = Client("bob")
    name = next(a for a in bob.ask(work_req_seconds=1e6).assignments if a.app == "more").name
    ann.ask(trickles=up("a", "b", "c"))
    bob.ask(trickles=up("d", result=name))
    grid.put_off["talk", m.ALL] = NOW + 100
    m.run_pass(NOW)
    assert [line.split()[-1] for line in heard()] == ["d"]
    for now in range(NOW + 100, NOW + 103):
        m.run_pass(now)
    assert [line.split()[-1] for line in heard()] == ["d", "a", "b", "c"]


def test_a_flood_waits_and_is_not_lost(ann, trickles, monkeypatch):
    monkeypatch.setattr(trickles, "WAITING_MAX", 6)  # as many as there are
    texts = [str(n) for n in range(6)]
    for part in (texts[:5], texts[5:]):
        assert ann.ask(trickles=up(*part, at=len(part))).trickles_taken
    late = up("late", at=99)
    assert not ann.ask(trickles=late).trickles_taken
    assert waiting(trickles) == 6
    m.run_pass(NOW)
    assert ann.ask(trickles=late).trickles_taken
    m.run_pass(NOW + 1)
    assert [line.split()[-1] for line in heard()] == texts + ["late"]


def test_a_job_has_only_so_many_messages(ann, trickles, monkeypatch):
    monkeypatch.setattr(trickles, "KEPT_MAX", 5)
    for k in range(4):
        assert ann.ask(trickles=up(str(k), "x", at=10 * k)).trickles_taken
        m.run_pass(NOW + k)
    assert len(heard()) == trickles.MsgFromHost.select().count() == 5


def test_texts_are_bounded(ann, trickles):
    ann.ask(trickles=up("x" * 100_000))
    m.run_pass(NOW)
    ((*_, text),) = down(ann)
    assert len(text) == trickles.TEXT_MAX


def test_many_answers_come_in_several_replies(ann, trickles, monkeypatch):
    monkeypatch.setattr(trickles, "AT_ONCE", 3)
    ann.ask(trickles=up(*"abcd"))
    m.run_pass(NOW), m.run_pass(NOW + 1)
    assert [len(down(ann)) for _ in range(3)] == [3, 1, 0]


def test_old_messages_are_forgotten(ann, trickles):
    ann.ask(trickles=up("one"))
    m.run_pass(NOW)
    before = dump()
    trickles.hourly(NOW + 30 * DAY)
    assert dump() == before
    trickles.hourly(NOW + 30 * DAY + 1)
    assert trickles.MsgFromHost.select().count() == 0


def test_messages_go_with_their_workunit(ann, trickles):
    settings(purge_delay=0)
    ann.ask(trickles=up("one", "two"))
    m.run_pass(NOW)
    m.project.write(lambda: m.plugged("cancel_workunits")[-1]([1], NOW))
    ann.report("talk_0_0", None, NOW + 1)
    ann.ask(NOW + 1, trickles=up("after the end", at=50))
    for now in range(NOW + 2, NOW + 9):
        m.run_pass(now)
    assert copies() == []
    assert trickles.MsgFromHost.select().count() == trickles.MsgToHost.select().count() == 0


def test_a_message_that_came_while_its_workunit_went(ann, trickles):
    """What was read before the purge answers a result that is no more."""
    ann.ask(trickles=up("one"))
    (row,) = trickles.MsgFromHost.select()
    trickles.MsgFromHost.delete().execute()
    m.Result.delete().execute(), m.Workunit.delete().execute()
    m.db.execute_sql("DELETE FROM small_file")
    m.project.write(lambda: trickles.settle([(row, "too late")], NOW))
    assert trickles.MsgToHost.select().count() == 0


def test_a_new_process_goes_on_where_the_old_one_was(ann, folder, trickles):
    ann.ask(trickles=up("one"))
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.run_pass(NOW)
    make.restart(folder, stock=0, min_sendwork_interval=0)
    ann.ask(NOW, trickles=up("one"))
    m.run_pass(NOW)
    assert len(heard()) == 1 and down(ann) == [("talk_0_0", NOW, "yes, one")]


def test_a_request_without_messages_costs_nothing(ann):
    seen = []
    m.db.connection().set_trace_callback(seen.append)
    try:
        ann.ask()
    finally:
        m.db.connection().set_trace_callback(None)
    assert not [text for text in seen if "msg_" in text]
