"""Store and writer: groups, savepoints, refusals, schema, files that grow with the store [D4].

What a disk refuses is provoked in the database itself (a limit on its pages, a constraint that
fails at the commit), never imitated.
"""

import concurrent.futures
import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peewee import IntegrityError

import minigrid as m

NOW = 1_800_000_000
PATIENCE = 60  # seconds until something that does not end is a failure
ROOT = Path(m.__file__).resolve().parent


@pytest.fixture
def grid(tmp_path):
    """An open project whose writer works in the caller's thread."""
    m.open_project(m.Settings(data=str(tmp_path / "data")), random.Random(1))
    yield m.project
    m.close_project()


@pytest.fixture
def write(grid):
    """The writer in a thread of its own, as in a server."""
    grid.write.start()
    return grid.write


def note(name, value=1):
    """Return a function that leaves one row behind and returns its name."""
    return lambda: m.Meta.create(name=name, value=value).name


def notes():
    """Return what note() left, as another connection sees it: only what is committed."""
    with contextlib.closing(sqlite3.connect(m.project.data / "minigrid.db")) as other:
        return {row[0] for row in other.execute("SELECT name FROM meta WHERE name != 'schema'")}


def dump():
    """Return all rows of the store, as another connection sees them."""
    with contextlib.closing(sqlite3.connect(m.project.data / "minigrid.db")) as other:
        return {name: other.execute(f'SELECT * FROM "{name}"').fetchall() for (name,) in
                other.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()}


def until(condition):
    """Wait until something is so; a bounded number of looks."""
    pause = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never became so")


def as_one_group(write, functions, seen=None):
    """Let functions wait together for the writer, in their order; return their futures.

    `seen` collects the statements of the writer's connection from the group's BEGIN on.
    """
    release, ready = threading.Event(), threading.Event()

    def occupy():
        if seen is not None:
            m.db.connection().set_trace_callback(seen.append)
        ready.set()
        assert release.wait(PATIENCE)

    pool = concurrent.futures.ThreadPoolExecutor(len(functions) + 1)
    first = pool.submit(write, occupy)
    assert ready.wait(PATIENCE)
    futures = []
    for function in functions:
        futures.append(pool.submit(write, function))
        until(lambda: write.waiting.qsize() == len(futures))
    release.set()
    first.result(PATIENCE)
    pool.shutdown(wait=False)
    return futures


def outcome(future):
    """Return what a future gave, or the exception it raised."""
    return future.exception(PATIENCE) or future.result()


# ---- 1. Groups -----------------------------------------------------------------


def test_all_who_wait_share_one_transaction(write):
    seen = []
    futures = as_one_group(write, [note(f"n{i}") for i in range(20)], seen)
    assert [f.result(PATIENCE) for f in futures] == [f"n{i}" for i in range(20)]
    seen = seen[seen.index("COMMIT") + 1:]  # What came before was the first, who waited alone.
    assert [s for s in seen if s.startswith(("BEGIN", "COMMIT"))] == ["BEGIN IMMEDIATE", "COMMIT"]
    assert sum(s.startswith("SAVEPOINT") for s in seen) == 20


def test_a_group_is_bounded(write):
    """So that one commit that fails does not take everybody along."""
    seen = []
    for future in as_one_group(write, [note(f"n{i}") for i in range(150)], seen):
        future.result(PATIENCE)
    sizes, size = [], 0
    for text in seen[seen.index("COMMIT") + 1:]:
        size += text.startswith("SAVEPOINT")
        if text == "COMMIT":
            sizes, size = sizes + [size], 0
    assert sum(sizes) == 150 and max(sizes) <= 64


def test_functions_run_in_the_order_in_which_they_came(write):
    order = []
    futures = as_one_group(write, [lambda i=i: order.append(i) for i in range(40)])
    concurrent.futures.wait(futures, PATIENCE)
    assert order == list(range(40))


def test_whoever_raises_loses_its_own_changes_only(write):
    def fail():
        m.Meta.create(name="half", value=1)
        raise KeyError("my own fault")

    before, failing, after = as_one_group(write, [note("before"), fail, note("after")])
    assert isinstance(outcome(failing), KeyError)
    assert (outcome(before), outcome(after)) == ("before", "after")
    assert notes() == {"before", "after"}


def test_a_constraint_is_the_fault_of_whoever_breaks_it(write):
    """A row that exists already says nothing about the disk: the others go on."""
    write(note("there"))
    before, failing, after = as_one_group(write, [note("before"), note("there"), note("after")])
    assert isinstance(outcome(failing), IntegrityError)
    assert (outcome(before), outcome(after)) == ("before", "after")
    assert notes() == {"there", "before", "after"}


def test_nobody_is_answered_before_the_commit(write):
    """Looked at from inside: at the COMMIT no future of the group has its answer yet."""
    early, futures = [], []

    def at_commit(statement):
        if statement == "COMMIT":
            early.extend(concurrent.futures.wait(futures, 0.2, "FIRST_COMPLETED").done)

    def watch():
        m.db.connection().set_trace_callback(at_commit)
        return "watched"

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ready, release = threading.Event(), threading.Event()
        pool.submit(write, lambda: (ready.set(), release.wait(PATIENCE)))
        ready.wait(PATIENCE)
        futures += [pool.submit(write, watch), pool.submit(write, note("a"))]
        until(lambda: write.waiting.qsize() == 2)
        release.set()
        assert [f.result(PATIENCE) for f in futures] == ["watched", "a"]
    assert not early


def test_an_answer_means_that_others_see_it(write):
    for i in range(20):
        write(note(f"n{i}"))
        assert f"n{i}" in notes()


def test_works_in_the_callers_thread_without_one_of_its_own(grid):
    here = []
    assert grid.write(lambda: here.append(threading.current_thread()) or note("a")()) == "a"
    with pytest.raises(ZeroDivisionError):
        grid.write(lambda: note("b")() and 1 / 0)
    assert here == [threading.current_thread()] and notes() == {"a"}


def test_stop_finishes_what_waits_and_start_goes_on(write):
    futures = as_one_group(write, [note(f"n{i}") for i in range(5)])
    write.stop()
    assert all(f.done() or f.result(PATIENCE) for f in futures) and len(notes()) == 5
    write(note("inline"))
    write.start()
    assert write(note("again")) == "again" and len(notes()) == 7


def test_stop_finishes_what_waits_in_the_same_group(write):
    """Whoever stops the writer comes behind those who wait already, and all are one group."""
    ready, release = threading.Event(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        pool.submit(write, lambda: (ready.set(), release.wait(PATIENCE)))
        assert ready.wait(PATIENCE)
        last = pool.submit(write, note("last"))
        until(lambda: write.waiting.qsize() == 1)
        stopped = pool.submit(write.stop)
        until(lambda: write.waiting.qsize() == 2)
        release.set()
        stopped.result(PATIENCE)
        done = last.done() or concurrent.futures.wait([last], 1).done
        write.start()  # or who was forgotten would wait for ever
    assert done and notes() == {"last"}


@pytest.mark.parametrize("thread", [True, False])
def test_writing_inside_the_writer_joins_the_transaction(grid, thread):
    """No deadlock; what was written inside is lost if the outside raises."""
    if thread:
        grid.write.start()

    def outer(fail):
        inner = grid.write(note(f"inner {fail}"))
        if fail:
            raise KeyError(inner)
        return inner

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        write = (lambda f: pool.submit(grid.write, f).result(PATIENCE)) if thread else grid.write
        assert write(lambda: outer(False)) == "inner False"
        with pytest.raises(KeyError):
            write(lambda: outer(True))
    assert notes() == {"inner False"}


# ---- 2. Requests that are answered at once -----------------------------------------


class Request:
    """A request as work() wants it: it writes, and keeps its answer until that is durable."""

    def __init__(self, write, *changes):
        self.write, self.changes, self.answers = write, changes, []

    def __call__(self):
        """Answer with what each change gave, or with what was raised."""
        answer = []
        for change in self.changes:
            try:
                answer.append(self.write(change))
            except Exception as error:
                answer.append(error)
        self.answers.append(answer)


def traced(seen):
    """Collect the statements of this thread's connection."""
    m.db.connection().set_trace_callback(seen.append)


def test_requests_that_wait_share_one_commit(grid):
    requests, seen = [Request(grid.write, note(f"a{i}"), note(f"b{i}")) for i in range(10)], []
    traced(seen)
    assert grid.write.work(requests)
    assert [s for s in seen if s.startswith(("BEGIN", "COMMIT"))] == ["BEGIN IMMEDIATE", "COMMIT"]
    assert [r.answers for r in requests] == [[[f"a{i}", f"b{i}"]] for i in range(10)]
    assert len(notes()) == 20 and grid.write.working is None


def test_a_request_loses_what_failed_only(grid):
    """Its other changes stay, and those of all others."""
    def fail():
        m.Meta.create(name="half", value=1)
        return grid.write(note("inner")) and 1 / 0

    first, middle, last = requests = [Request(grid.write, note("a")), Request(
        grid.write, note("b"), fail, note("c")), Request(grid.write, note("a"), note("d"))]
    assert grid.write.work(requests)
    assert isinstance(middle.answers[0][1], ZeroDivisionError)
    assert isinstance(last.answers[0][0], IntegrityError)
    assert notes() == {"a", "b", "c", "d"}


@pytest.mark.parametrize("trouble", ["statement", "commit"])
def test_a_request_that_the_store_refuses_is_told_and_the_others_go_on(grid, trouble):
    """Each is tried alone then; who was refused is asked once more, when nothing is half done."""
    bad = {"statement": fill, "commit": fail_at_commit}[trouble]
    requests = [Request(grid.write, note("a")), Request(
        grid.write, note("half"), bad, note("half, too")), Request(grid.write, note("z"))]
    limit_pages()
    before = m.App.select().count()
    assert grid.write.work(requests)
    lift_limit()
    assert notes() == {"a", "z"} and grid.write.working is None
    assert [r.answers[-1] for r in requests[::2]] == [["a"], ["z"]]
    told = requests[1].answers[-1]
    assert [type(error) for error in told] == [m.StoreError] * 3, told
    assert "cannot be written" in str(told[0]) and m.App.select().count() == before
    assert grid.write.work([Request(grid.write, note("later"))]) and "later" in notes()
    assert not grid.write.trouble


def test_what_is_raised_beside_the_changes_of_a_request_stops_nobody(grid):
    """A fault of ours in what prepares the answer: its group is tried again, each alone."""
    def broken():
        grid.write(note("broken"))
        raise KeyError("a fault of ours")

    good = Request(grid.write, note("good"))
    assert grid.write.work([broken, good])
    assert notes() == {"good"} and grid.write.working is None


def test_a_thread_that_leads_does_what_others_hand_in(write):
    """With requests that have come by then, in one commit, after it was woken for each."""
    woken, seen, request = [], [], Request(write, note("request"))
    write.lead(lambda: woken.append(write.waiting.qsize()))
    traced(seen)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        try:
            futures = [pool.submit(write, note("a")), pool.submit(write, note("b"))]
            until(lambda: write.waiting.qsize() == 2)
            assert not any(future.done() for future in futures)
            assert write.work([request])
            assert {future.result(PATIENCE) for future in futures} == {"a", "b"}
            assert [s for s in seen if s in ("BEGIN IMMEDIATE", "COMMIT")] == seen[:1] + seen[-1:]
            assert request.answers == [["request"]] and notes() == {"a", "b", "request"}
            del seen[:]
            assert write.work() and not seen, "nothing waits: nothing is written"
            assert write(note("own")) == "own" and "own" in notes(), "nobody else would do it"
            late = pool.submit(write, note("late"))
            until(lambda: write.waiting.qsize() == 1)
        finally:
            write.start()  # as when the server stops: what waits is not lost
        assert late.result(PATIENCE) == "late"
    assert len(woken) == 3


def test_one_that_fails_takes_nobody_along_in_a_common_commit(write):
    """Requests and functions of other threads are tried alone where the store refuses one."""
    write.lead(lambda: None)
    request = Request(write, note("request"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(write, note("a")), pool.submit(write, fail_at_commit)]
        until(lambda: write.waiting.qsize() == 2)
        assert write.work([request])
        assert futures[0].result(PATIENCE) == "a"
        assert isinstance(outcome(futures[1]), m.StoreError)
        assert request.answers[-1] == ["request"] and notes() == {"a", "request"}
        write.start()


def test_rules_of_requests_are_counted_once(grid):
    """Those of a change that failed, or of a first attempt, are not."""
    application = m.App.create(name="a", create_time=NOW)
    requests = [Request(grid.write, send(application), send(application, KeyError("no")))
                for _ in range(3)] + [Request(grid.write, send(application), fail_at_commit)]
    assert grid.write.work(requests)
    assert [(row.rule, row.n) for row in m.Firing.select()] == [("send", 3)]


# ---- 3. Totals and log lines of rules ------------------------------------------


@pytest.fixture
def app(grid):
    m.db.execute_sql("PRAGMA synchronous = OFF")
    return grid.write(lambda: m.App.create(name="a", create_time=NOW))


def send(app, error=None):
    """Return a function that fires a rule, and may raise after it."""
    def function():
        m.fire(m.RULES["send"], m.Result(app=app.id, workunit=1, name="a_0_0", create_time=NOW))
        if error:
            raise error
    return function


def totals():
    return {row.rule: row.n for row in m.Firing.select()}


def test_totals_and_log_lines_tell_what_is_committed_and_only_that(app, write, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    group = as_one_group(write, [send(app), send(app, KeyError("no")), send(app)])
    assert [type(outcome(f)) for f in group] == [type(None), KeyError, type(None)]
    assert totals() == {"send": 2}
    assert [r.getMessage() for r in caplog.records] == ["RESULT#a_0_0 scheduler: send"] * 2


def test_totals_add_up_over_transactions(app, write):
    for _ in range(3):
        write(send(app))
    assert totals() == {"send": 3}


def test_totals_are_lost_with_their_transaction(app, write, caplog):
    caplog.set_level(logging.INFO, "minigrid")
    write(send(app))
    with pytest.raises(m.StoreError):
        write(lambda: (send(app)(), fail_at_commit()))
    assert totals() == {"send": 1} and len(caplog.records) == 1
    write(lambda: None)
    assert totals() == {"send": 1}, "what was lost must not be counted later"


def test_totals_of_writing_inside_the_writer_count_once(app, grid):
    def outer():
        send(app)()
        grid.write(lambda: m.fire(m.RULES["time out"], m.Result(
            app=app.id, name="b", server_state=m.ServerState.IN_PROGRESS)))

    grid.write(outer)
    assert totals() == {"send": 1, "time out": 1}


# ---- 4. What the disk refuses --------------------------------------------------


def limit_pages(more=2):
    """Leave room for so many more pages: the rest of the disk is full."""
    pages = m.db.execute_sql("PRAGMA page_count").fetchone()[0]
    m.db.execute_sql(f"PRAGMA max_page_count = {pages + more}")


def lift_limit():
    m.db.execute_sql("PRAGMA max_page_count = 1000000")


def users():
    return [m.User(create_time=NOW, name="x" * 200, authenticator=f"{i}") for i in range(300)]


def fill():
    """More than there is room for, as the stages write it."""
    m.save_all(users())


def fill_by_rows():
    """The same, row by row."""
    for user in users():
        user.save()


def fail_at_commit():
    """Break a constraint that is looked at when all is done: the COMMIT itself fails."""
    m.db.execute_sql("PRAGMA defer_foreign_keys = ON")
    m.AppVersion.create(app=99, create_time=NOW, platform="python", version_num=1, files=[])


@pytest.mark.parametrize("greedy", [fill, fill_by_rows])
def test_a_full_disk_refuses_what_has_no_room_and_nothing_else(write, greedy):
    write(note("old"))
    write(limit_pages)
    small, large, last = as_one_group(write, [note("small"), greedy, note("last")])
    assert isinstance(outcome(large), m.StoreError)
    assert (outcome(small), outcome(last)) == ("small", "last"), "they fit"
    assert notes() == {"old", "small", "last"} and not dump()["user"]
    write(lift_limit)
    write(greedy)
    assert len(dump()["user"]) == 300


@pytest.mark.parametrize("greedy", [fill, fill_by_rows])
def test_a_full_disk_is_named(write, greedy):
    """Whoever runs the project must read what to do about it: make room."""
    write(limit_pages)
    with pytest.raises(m.StoreError, match="full"):
        write(greedy)
    assert "full" in write.trouble


def test_the_trouble_is_over_when_a_commit_succeeds(write):
    with pytest.raises(m.StoreError):
        write(fail_at_commit)
    assert write.trouble
    write(note("a"))
    assert write.trouble == ""


def test_a_commit_that_fails_takes_nobody_else_along(write):
    write(note("old"))
    before, failing, after = as_one_group(write, [note("a"), fail_at_commit, note("b")])
    assert isinstance(outcome(failing), m.StoreError)
    assert "cannot be written: FOREIGN KEY" in str(outcome(failing))
    assert (outcome(before), outcome(after)) == ("a", "b")
    assert notes() == {"old", "a", "b"} and not dump()["app_version"]


@pytest.mark.parametrize("first", [True, False])
def test_a_commit_that_fails_takes_the_only_other_one_not_along(write, first):
    pair = [fail_at_commit, note("a")] if first else [note("a"), fail_at_commit]
    told = [outcome(future) for future in as_one_group(write, pair)]
    assert isinstance(told[not first], m.StoreError) and told[first] == "a"
    assert notes() == {"a"}


def test_a_store_that_may_only_be_read(grid):
    m.db.execute_sql("PRAGMA query_only = ON")
    with pytest.raises(m.StoreError, match="readonly"):
        grid.write(note("a"))
    m.db.execute_sql("PRAGMA query_only = OFF")
    assert grid.write(note("b")) == "b" and notes() == {"b"}


# ---- 4. save_all ---------------------------------------------------------------


def work(app, **more):
    values = dict(app=app, name="a_0", create_time=NOW, input_files=[{"name": "é"}])
    return m.Workunit(**{**values, **more})


def test_save_all_inserts_what_is_new(grid, app):
    units = [work(app.id, name=f"a_{i}", number=None, error_mask=m.ErrorMask(16 | 4),
                  assimilate_state=m.AssimilateState.DONE) for i in range(3)]
    grid.write(lambda: m.save_all(units))
    assert grid.write(lambda: m.save_all(units)) is None, "saved rows are not inserted again"
    found = list(m.Workunit.select().order_by(m.Workunit.id))
    assert [wu.name for wu in found] == ["a_0", "a_1", "a_2"]
    assert found[0].number is None and found[0].input_files == [{"name": "é"}]
    assert found[0].error_mask is m.ErrorMask(16 | 4)
    assert found[0].assimilate_state is m.AssimilateState.DONE
    assert m.db.execute_sql("SELECT typeof(error_mask), typeof(number), min_quorum FROM workunit"
                            ).fetchone() == ("integer", "null", 2)


def test_save_all_writes_changed_fields_only(grid, app):
    grid.write(lambda: m.save_all([work(app.id), work(app.id, name="a_1")]))
    mine, seen = m.Workunit.get(name="a_0"), []
    m.Workunit.update(priority=7, need_validate=True).execute()  # Somebody else, meanwhile.
    mine.need_validate = False
    mine.input_files = [{"name": "new"}]
    m.db.connection().set_trace_callback(seen.append)
    grid.write(lambda: m.save_all([mine]))
    m.db.connection().set_trace_callback(None)
    (update,) = [s for s in seen if s.startswith("UPDATE")]
    assert re.findall(r'"(\w+)" = ', update) == ["input_files", "need_validate", "id"]
    rows = m.Workunit.select(m.Workunit.priority, m.Workunit.need_validate).tuples()
    assert list(rows) == [(7, False), (7, True)]
    assert m.Workunit.get(name="a_0").input_files == [{"name": "new"}]
    assert not mine.dirty_fields


def test_save_all_of_nothing_writes_nothing(grid, app):
    grid.write(lambda: m.save_all([work(app.id)]))
    seen = []
    m.db.connection().set_trace_callback(seen.append)
    grid.write(lambda: m.save_all([]))
    grid.write(lambda: m.save_all([m.Workunit.get(name="a_0")]))
    m.db.connection().set_trace_callback(None)
    assert not [s for s in seen if s.startswith(("UPDATE", "INSERT"))]


def test_save_all_groups_rows_that_change_alike(grid, app):
    """Different fields of different tables in one call: every row gets its own."""
    grid.write(lambda: m.save_all([work(app.id, name=f"a_{i}") for i in range(6)]))
    units = list(m.Workunit.select().order_by(m.Workunit.id))
    for i, wu in enumerate(units):
        setattr(wu, "priority" if i % 2 else "batch", i + 1)
    user = m.User(create_time=NOW, name="u", authenticator="k", email_addr=None)
    grid.write(lambda: m.save_all([*units, user]))
    assert list(m.Workunit.select(m.Workunit.priority, m.Workunit.batch).tuples()) == [
        (0, 1), (2, 0), (0, 3), (4, 0), (0, 5), (6, 0)]
    assert m.User.get().email_addr is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": {1}}])
def test_what_is_not_json_is_refused(grid, app, value):
    with pytest.raises((ValueError, TypeError)):
        grid.write(lambda: m.save_all([work(app.id, input_files=[value])]))
    assert not m.Workunit.select().count()


# ---- 5. Opening a store --------------------------------------------------------


def opened(data):
    m.open_project(m.Settings(data=str(data)), random.Random(1))


@pytest.fixture
def data(tmp_path):
    """A directory with a store of this version and one row; closed."""
    opened(tmp_path / "data")
    m.project.write(note("kept"))
    m.close_project()
    yield tmp_path / "data"
    m.close_project()


def test_a_new_store_has_this_schema(tmp_path):
    opened(tmp_path / "deep" / "data")
    assert m.Meta.get_by_id("schema").value == m.SCHEMA_VERSION
    names = {row[0] for row in m.db.execute_sql("SELECT name FROM sqlite_master")}
    assert {name for name, *_ in m.INDEXES} <= names
    assert m.db.execute_sql("PRAGMA journal_mode").fetchone() == ("wal",)
    assert m.db.execute_sql("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert m.db.execute_sql("PRAGMA foreign_keys").fetchone() == (1,)
    m.close_project()


def test_an_empty_file_becomes_a_store(tmp_path):
    """What a crash between creating the file and the first commit leaves."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "minigrid.db").touch()
    opened(tmp_path / "data")
    assert m.Meta.get_by_id("schema").value == m.SCHEMA_VERSION
    m.close_project()


def test_the_same_version_opens_as_it_is(data):
    before = schema(data)
    opened(data)
    assert notes() == {"kept"} and schema(data) == before


def schema(data):
    with contextlib.closing(sqlite3.connect(data / "minigrid.db")) as other:
        return other.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def test_a_newer_store_is_left_alone(data, monkeypatch):
    monkeypatch.setattr(m, "SCHEMA_VERSION", m.SCHEMA_VERSION + 1)
    monkeypatch.setattr(m, "MIGRATIONS", {m.SCHEMA_VERSION - 1: ["SELECT 1"]})
    opened(data)
    m.close_project()
    monkeypatch.undo()
    before = (data / "minigrid.db").read_bytes()
    with pytest.raises(m.StoreError, match=f"schema {m.SCHEMA_VERSION + 1}.*--data"):
        opened(data)
    assert (data / "minigrid.db").read_bytes() == before


def test_an_older_store_is_brought_up_to_date_step_by_step(data, monkeypatch):
    first = m.SCHEMA_VERSION
    monkeypatch.setattr(m, "SCHEMA_VERSION", first + 2)
    monkeypatch.setattr(m, "MIGRATIONS", {
        first: ["ALTER TABLE meta ADD COLUMN note TEXT", "UPDATE meta SET note = 'one'"],
        first + 1: ["UPDATE meta SET note = note || ' two'"]})
    opened(data)
    rows = dict(m.db.execute_sql("SELECT name, note FROM meta WHERE name = 'kept'"))
    assert rows == {"kept": "one two"}
    assert m.Meta.get_by_id("schema").value == first + 2
    opened(data)  # And only once.
    assert dict(m.db.execute_sql("SELECT name, note FROM meta WHERE name = 'kept'")) == rows


FIRST_ROWS = """
INSERT INTO meta VALUES ('schema', 1);
INSERT INTO app VALUES (1, 'echo', 5, 1);
INSERT INTO user VALUES (1, 5, 'ann', NULL, '', 'ann', 0, 0, 0);
INSERT INTO host VALUES (1, 1, 5, 'c', 5, 0, 5, 'kitchen', 1, '', '', 1e9, 0, 0, 0, '', '', '', 1,
    1, 7, 0, 0, 0, '');
INSERT INTO app_version VALUES (1, 1, 5, 'python', 1, '',
    '[{"name":"echo_1.py","nbytes":3,"sha256":"00"}]');
INSERT INTO host_app_version VALUES (1, 1, 1, 1000, 1, 0, 0, 0, 0);
INSERT INTO workunit VALUES (1, 1, 'echo_0', 0, 5, 5, '[{"name":"echo_0_in","nbytes":1}]', 0, 0,
    1e9, 1e12, 1e8, 1e8, 86400, 1, 1, 3, 10, 6, 0, 10, LATER, 0, 0, 0, 0, 0);
INSERT INTO result (id, workunit_id, app_id, name, create_time, priority, server_state, outcome,
    client_state, validate_state, file_delete_state, host_id, user_id, app_version_id, sent_time,
    report_deadline, received_time, exit_status, cpu_time, elapsed_time, granted_credit, stderr_out)
    VALUES (1, 1, 1, 'echo_0_0', 5, 0, 4, 0, 0, 0, 0, 1, 1, 1, NOW, LATER, 0, 0, 0, 0, 0, '');
"""
ECHO_AGAIN = '''"""echo: gives back what it got."""


def workunit(i):
    return None


def compute(input):
    return input
'''


@pytest.fixture
def first_store(tmp_path):
    """A directory with a store of the first release and a result in progress; closed."""
    (tmp_path / "data").mkdir()
    rows = FIRST_ROWS.replace("NOW", str(NOW)).replace("LATER", str(NOW + 86400))
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "minigrid.db")) as store:
        store.executescript((ROOT / "tests" / "schema_1.sql").read_text() + rows)
    yield tmp_path / "data"
    m.close_project()


def columns():
    """The columns of all tables: name, type, may it be NULL, is it a key."""
    return {table: {(name, kind, needed, key) for _, name, kind, needed, _, key in
                    m.db.execute_sql(f'PRAGMA table_info("{table}")')}
            for table in m.db.get_tables()}


def indexes():
    return {name for name, in m.db.execute_sql(
        "SELECT name FROM sqlite_master WHERE type = 'index'")}


def test_a_store_of_the_first_release_becomes_one_of_this(first_store, tmp_path):
    opened(tmp_path / "new")
    wanted = columns(), indexes()
    m.close_project()
    for _ in range(2):  # And is left as it is the next time.
        opened(first_store)
        assert (columns(), indexes()) == wanted
        assert m.Meta.get_by_id("schema").value == m.SCHEMA_VERSION
        host, version, wu = m.Host.get(), m.AppVersion.get(), m.Workunit.get()
        assert (host.details, version.options, wu.command_line) == ({}, {}, "")
        assert (host.domain_name, host.total_credit) == ("kitchen", 7)
        assert version.files[0]["nbytes"] == 3
        m.close_project()


def test_work_goes_on_in_a_store_of_the_first_release(first_store, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO_AGAIN)
    opened(first_store)
    assert m.sync_apps([tmp_path / "echo.py"], NOW) == []
    (version,) = m.apps["echo"].versions
    assert version.version_num == 2 and all("md5" in file for file in version.files)
    asked = dict(authenticator="ann", hostid=1, rpc_seqno=1, host_cpid="c")

    def ask(**more):
        return m.project.write(lambda: m.schedule(m.Request(**asked, **more), NOW + 9))

    (lost,) = ask(other_results=[]).assignments
    assert (lost.name, lost.version_num, lost.inputs, lost.command_line) == ("echo_0_0", 1, [], "")
    m.file_path("upload", "echo_0_0_out").write_text("0")
    m.file_path("download", "echo_0_in").write_text("0")
    assert ask(reports=[m.Report("echo_0_0", 5, 0, elapsed_time=1)]).acks == ["echo_0_0"]
    for now in range(NOW + 10, NOW + 20):
        m.run_pass(now)
    wu = m.Workunit.get()
    assert wu.canonical_resultid == 1 and wu.file_delete_state == m.FileDeleteState.DONE
    assert m.plugged("violations")[-1]() == []


def test_an_older_store_that_nobody_can_migrate_is_left_alone(data, monkeypatch):
    before = schema(data)
    monkeypatch.setattr(m, "SCHEMA_VERSION", m.SCHEMA_VERSION + 1)
    with pytest.raises(m.StoreError, match="too old.*older release"):
        opened(data)
    assert schema(data) == before and m.Meta.get_by_id("schema").value == m.SCHEMA_VERSION - 1


def test_a_migration_that_fails_changes_nothing(data, monkeypatch):
    before = schema(data)
    monkeypatch.setattr(m, "SCHEMA_VERSION", m.SCHEMA_VERSION + 1)
    monkeypatch.setattr(m, "MIGRATIONS", {m.SCHEMA_VERSION - 1: [
        "ALTER TABLE meta ADD COLUMN note TEXT", "UPDATE absent SET value = 1"]})
    with pytest.raises(m.StoreError, match="no such table: absent"):
        opened(data)
    assert schema(data) == before


def test_the_database_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "minigrid.db"
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE photos (name TEXT)")
    with pytest.raises(m.StoreError, match="minigrid store.*--data"):
        opened(tmp_path / "data")
    assert [row[1] for row in schema(tmp_path / "data")] == ["photos"]


META_OF_OTHERS = {
    "without the schema's row": "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER)",
    "with other columns": "CREATE TABLE meta (title TEXT)",
}


@pytest.mark.parametrize("case", META_OF_OTHERS)
def test_a_meta_table_alone_makes_no_store(tmp_path, case):
    (tmp_path / "data").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "minigrid.db")) as other, other:
        other.execute(META_OF_OTHERS[case])
    with pytest.raises(m.StoreError):
        opened(tmp_path / "data")
    assert len(schema(tmp_path / "data")) <= 2


DAMAGES = {
    "another kind of file": lambda content: b"Dear diary, " * 1000,
    "its first page gone": lambda content: bytes(4096) + content[4096:],
    "cut in its first page": lambda content: content[:900],
    "garbage in its schema": lambda content: content[:100] + b"\xff" * 3996 + content[4096:],
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_store_is_named_with_advice(data, case):
    path = data / "minigrid.db"
    path.write_bytes(DAMAGES[case](path.read_bytes()))
    with pytest.raises(m.StoreError, match="cannot open .*minigrid.db: .*put back .*backup"):
        opened(data)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_directory_that_cannot_be_made(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(m.StoreError, match=f"cannot write to .*{where}"):
        opened(tmp_path / where)
    assert (tmp_path / "file").read_text() == "in the way"


# ---- 6. One process a directory ------------------------------------------------


@contextlib.contextmanager
def server(data):
    """A real server process on a directory; yields it once it says its address."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--data", str(data), "--port", "0",
         "--host", "127.0.0.1", "--apps", str(data.parent / "apps")], cwd=data.parent, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        for line in process.stdout:
            if "http://" in line:
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_by_name_until_the_first_is_dead(tmp_path):
    data = tmp_path / "data"
    (tmp_path / "apps").mkdir()
    with server(data) as first:
        url = json.loads((data / "server.json").read_text())["url"]
        with pytest.raises(m.StoreError, match=f"process {first.pid}, {url}.*--data"):
            opened(data)
        with server(data) as second:
            assert second.wait(PATIENCE) == 1
            error = second.stderr.read()
        assert f"process {first.pid}" in error and len(error.splitlines()) == 1
        opened_beside(data)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(PATIENCE)
        opened(data)  # The lock dies with its process; nobody has to remove a file.
        assert m.project.write(note("mine")) == "mine"
        m.close_project()


def opened_beside(data):
    """Commands such as `status` and `cancel` read and write beside a running server."""
    m.open_project(m.Settings(data=str(data)), random.Random(1), lock=False)
    m.project.write(note("beside"))
    m.close_project()
    assert json.loads((data / "server.json").read_text())["pid"]


def test_closing_lets_the_directory_go(tmp_path):
    opened(tmp_path / "data")
    m.close_project()
    script = "import sys, random, minigrid as m; m.open_project(m.Settings(data=sys.argv[1]), " \
             "random.Random(1)); print(m.Meta.get_by_id('schema').value)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "data")], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout.strip(), done.returncode) == (str(m.SCHEMA_VERSION), 0), done.stderr


# ---- 7. Files that grow with the store -----------------------------------------


@pytest.fixture
def file(grid):
    m.db.execute_sql("PRAGMA synchronous = OFF")
    return grid.data / "results" / "a.jsonl"


def append(file, data, error=None):
    def function():
        m.append_exactly(file, data)
        if error:
            raise error
    m.project.write(function)


def test_append_exactly_appends(file):
    append(file, b"one\n")
    append(file, b"two\n")
    assert file.read_bytes() == b"one\ntwo\n"


def test_a_torn_tail_is_cut_off(file):
    append(file, b"one\n")
    with open(file, "ab") as tail:
        tail.write(b'{"half a li')
    append(file, b"two\n")
    assert file.read_bytes() == b"one\ntwo\n"


def test_what_was_never_committed_is_cut_off(file):
    append(file, b"one\n")
    with pytest.raises(KeyError):
        append(file, b"lost\n", KeyError())
    append(file, b"two\n")
    assert file.read_bytes() == b"one\ntwo\n"


def test_what_a_failing_commit_left_is_cut_off(file):
    append(file, b"one\n")
    with pytest.raises(m.StoreError):
        m.project.write(lambda: (m.append_exactly(file, b"lost\n"), fail_at_commit()))
    append(file, b"two\n")
    assert file.read_bytes() == b"one\ntwo\n"


def test_a_first_line_that_was_never_committed_is_cut_off(file):
    with pytest.raises(KeyError):
        append(file, b"lost\n", KeyError())
    append(file, b"one\n")
    assert file.read_bytes() == b"one\n"


@pytest.mark.parametrize("left", [b"one\n", b"", None])
def test_a_file_that_somebody_cut_goes_on_from_there(file, caplog, left):
    """Nothing is invented where bytes are gone: no hole, a warning, and the next lines whole."""
    append(file, b"one\ntwo\n")
    file.unlink() if left is None else file.write_bytes(left)
    append(file, b"three\n")
    append(file, b"four\n")
    assert file.read_bytes() == (left or b"") + b"three\nfour\n"
    assert [r.getMessage() for r in caplog.records if "shorter than it was" in r.getMessage()]


STEPS = st.lists(st.tuples(st.sampled_from(["append", "raise", "tear"]), st.binary(max_size=9)),
                 max_size=12)


def test_any_history_leaves_exactly_what_was_committed(grid):
    m.db.execute_sql("PRAGMA synchronous = OFF")
    numbers = itertools.count()

    @given(steps=STEPS)
    @settings(max_examples=40, deadline=None, database=None)
    def check(steps):
        file, wanted = grid.data / "results" / f"{next(numbers)}.jsonl", b""
        for what, data in [*steps, ("append", b"end")]:
            if what == "tear":
                with open(file, "ab") as tail:
                    tail.write(data)
            else:
                with contextlib.suppress(KeyError):
                    append(file, data, KeyError() if what == "raise" else None)
                wanted += data if what == "append" else b""
        assert file.read_bytes() == wanted

    check()


# ---- 8. Indexes ----------------------------------------------------------------

APP = '''"""small: nothing much."""


def workunit(i):
    return {"input": i} if i < 12 else None


def compute(input):
    return input
'''
HOT = {  # what a pass or a request asks: (part of the statement, the index that answers it)
    "due": (r"transition_time < 2147483647 AND", "workunit_due"),
    "to validate": (r"SELECT \S+ FROM \"workunit\".*need_validate AND", "workunit_to_validate"),
    "to assimilate": (r"SELECT \S+ FROM \"workunit\".*assimilate_state = 1",
                      "workunit_to_assimilate"),
    "input files ready": (r"FROM \"workunit\".*file_delete_state = 1", "workunit_files_ready"),
    "output files ready": (r"FROM \"result\".*file_delete_state = 1", "result_files_ready"),
    "input files stuck": (r"FROM \"workunit\".*file_delete_state = 3", "workunit_files_stuck"),
    "output files stuck": (r"FROM \"result\".*file_delete_state = 3", "result_files_stuck"),
    "to purge": (r"file_delete_state = 2", "workunit_to_purge"),
    "stock": (r"SELECT COUNT.*server_state = 2", "result_unsent"),
    "unsent in order of priority": (r"server_state = 2.*ORDER BY .*\"priority\" DESC",
                                    "result_unsent"),
    "no two copies to a host": (r"NOT EXISTS\(SELECT 1 FROM \"result\"", "result_workunit_id"),
    "copies of a workunit on a host": (r"\"workunit_id\" = \d+\) AND \(.*\"host_id\"",
                                       "result_workunit_id"),
    "in progress on a host": (r"server_state = 4 AND .*\"host_id\" = ", "result_held"),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Each different SELECT of a project's whole life, with how SQLite carries it out."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "small.py").write_text(APP)
    m.open_project(m.Settings(data=str(folder / "data"), purge_delay=0, min_sendwork_interval=0),
                   random.Random(1))
    m.db.execute_sql("PRAGMA synchronous = OFF")
    assert m.sync_apps([folder], NOW) == []
    seen = []
    m.db.connection().set_trace_callback(seen.append)
    live(seen)
    m.db.connection().set_trace_callback(None)
    found = [(sql, [row[3] for row in m.db.execute_sql(f"EXPLAIN QUERY PLAN {sql}")])
             for sql in dict.fromkeys(seen) if sql.startswith("SELECT")]
    m.close_project()
    return found


def live(seen):
    """Let two hosts do some of the work; run every stage, a request of each kind, the page."""
    users = [m.User.create(create_time=NOW, name=k, authenticator=k) for k in "ab"]
    now = NOW
    m.run_pass(now)
    for user in users:
        asked = m.Request(user.authenticator, host_cpid=user.name, work_req_seconds=10,
                          other_results=[], host={"p_fpops": 3e7})
        reply = m.project.write(lambda: m.schedule(asked, now))
        for job in reply.assignments:
            m.store_file("upload", job.output["name"], b"1")
        told = m.Request(user.authenticator, hostid=reply.hostid, rpc_seqno=1,
                         other_results=["small_9_9"], reports=[
                             m.Report(job.name, client_state=5) for job in reply.assignments])
        m.project.write(lambda: m.schedule(told, now))
    for now in range(NOW + 1, NOW + 8):
        m.run_pass(now)
    assert m.Firing.get(rule="purge").n, "the workunits did not come to their end"
    m.plugged("status")[0](now)
    m.copies_on(1, 1)  # as for a report that comes from another host


@pytest.mark.parametrize("case", HOT)
def test_what_waits_is_found_in_its_index(plans, case):
    part, index = HOT[case]
    found = [(sql, plan) for sql, plan in plans if re.search(part, sql)]
    assert found, f"no statement like {part}"
    for sql, plan in found:
        assert any(re.search(rf"USING (COVERING )?INDEX {index}\b", step) for step in plan), \
            f"{sql}\n{plan}"


def test_unsent_results_come_in_order_without_sorting(plans):
    for sql, plan in plans:
        if "server_state = 2" in sql and "ORDER BY" in sql:
            assert not [step for step in plan if "TEMP B-TREE" in step], plan


def test_no_request_and_no_pass_walks_through_what_is_over(plans):
    """Full scans, ranges of row numbers, and an application's rows all grow with the past."""
    partial = "|".join(name for name, *_ in m.INDEXES)
    for sql, plan in plans:
        if not re.search(r'FROM "(workunit|result)"', sql):
            continue
        for step in plan:
            slow = (step.startswith("SCAN") and not re.search(rf"INDEX ({partial})\b", step)
                    and not re.search(r"SCAN (_wrapped|\(subquery)", step)) \
                or re.search(r"PRIMARY KEY \(rowid[<>]|INDEX workunit_app_id", step)
            assert not slow, f"{step}:\n{sql}"


def test_a_fault_in_what_follows_a_change_does_not_end_the_writer(write, monkeypatch):
    """A plugin's at_commit() that raises loses this change; everybody is answered [D4]."""
    monkeypatch.setattr(m, "plugged", lambda name: [lambda done, now: 1 / 0])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            write(note("lost"))
    assert "ZeroDivisionError" in write.trouble
    monkeypatch.undo()
    write(note("kept"))
    assert notes() == {"kept"} and write.trouble == ""
