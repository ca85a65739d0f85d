"""Keeping a project sound: planted breakages are found; backups; files that belong to nothing."""

import contextlib
import itertools
import os
import random
import re
import shutil
import sqlite3
import sys
import threading

import make
import pytest
from make import DAY, NOW, Client

import minigrid as m

PATIENCE = 60  # seconds until something that does not end is a failure


@pytest.fixture
def upkeep(plugins):
    return sys.modules["minigrid_plugin_upkeep"]


def passes(first, n=4):
    for now in range(first, first + n):
        m.run_pass(now)


@pytest.fixture
def world(grid):
    """Workunits in all walks of life: done, kept, failed, under way, waiting; a sound store."""
    clients = [Client(f"user {n}") for n in range(3)]
    make.answered("1", "1", number=0, clients=clients)  # near_0: done, its files deleted
    passes(NOW + 1)
    make.settings(delete_delay=10**9)
    make.answered("2", "2", number=1, clients=clients)  # near_1: done, its files kept
    make.answered(None, None, number=2, clients=clients, max_error_results=1)  # near_2: failed
    make.add(number=3)  # near_3: one copy under way, one reported
    clients[0].fetch()
    (name,) = clients[1].fetch()
    clients[1].report(name, "4")
    make.add(number=4)  # near_4: one copy was lost, another is waiting
    clients[2].fetch()
    lost = m.Result.get(workunit=m.Workunit.get(name="near_4"), server_state=4)
    m.Result.update(report_deadline=NOW).where(m.Result.id == lost.id).execute()
    m.Workunit.update(transition_time=NOW).where(m.Workunit.name == "near_4").execute()
    passes(NOW + 1)
    make.add(number=5)  # near_5: nobody has asked yet
    return grid


def test_the_world_has_all_walks_of_life(world, upkeep):
    found = {wu.name: (int(wu.assimilate_state), int(wu.file_delete_state), int(wu.error_mask))
             for wu in make.units()}
    assert found == {"near_0": (2, 2, 0), "near_1": (2, 0, 0), "near_2": (2, 0, 2),
                     "near_3": (0, 0, 0), "near_4": (0, 0, 0), "near_5": (0, 0, 0)}
    assert {(int(r.server_state), int(r.outcome)) for r in make.copies()} == {
        (2, 0), (4, 0), (5, 1), (5, 3), (5, 4)}
    assert upkeep.violations() == []


# ---- 1. violations() -----------------------------------------------------------

SENT = "(SELECT id FROM result WHERE name = 'near_3_0')"
PLANTED = {  # what is broken: (how, what is said, who is named)
    "in progress without a host": (
        f"UPDATE result SET host_id = NULL WHERE id = {SENT}", "S4-33", "near_3_0"),
    "in progress and never sent": (
        f"UPDATE result SET sent_time = 0 WHERE id = {SENT}", "S4-33", "near_3_0"),
    "in progress without a deadline": (
        f"UPDATE result SET report_deadline = 0 WHERE id = {SENT}", "S4-33", "near_3_0"),
    "over without an outcome": (
        "UPDATE result SET outcome = 0, validate_state = 0 WHERE name = 'near_2_0'", "S4-41",
        "near_2_0"),
    "an outcome before the end": (
        "UPDATE result SET outcome = 2 WHERE name = 'near_5_0'", "S4-41", "near_5_0"),
    "a verdict on a lost copy": (
        "UPDATE result SET validate_state = 2 WHERE outcome = 4", "S4-54", "near_4_0"),
    "credit for an error": (
        "UPDATE result SET granted_credit = 9 WHERE name = 'near_2_0'", "S0-39", "near_2_0"),
    "negative credit": (
        "UPDATE result SET granted_credit = -1 WHERE name LIKE 'near_1%'", "negative credit",
        "near_1_0, near_1_1"),
    "two copies on one host": (
        "UPDATE result SET host_id = (SELECT min(host_id) FROM result WHERE name LIKE 'near_1%') "
        "WHERE name LIKE 'near_1%'", "two copies", "near_1"),
    "more copies than allowed": (
        "UPDATE workunit SET max_total_results = 1, max_error_results = 1 WHERE name = 'near_3'",
        "C5", "near_3"),
    "a canonical result that does not exist": (
        "UPDATE workunit SET canonical_resultid = 9999 WHERE name = 'near_1'", "S4-01", "near_1"),
    "another workunit's canonical result": (
        "UPDATE workunit SET canonical_resultid = (SELECT canonical_resultid FROM workunit WHERE "
        "name = 'near_0') WHERE name = 'near_1'", "S4-01", "near_1"),
    "an invalid canonical result": (
        "UPDATE result SET validate_state = 2, granted_credit = 0 WHERE id = (SELECT "
        "canonical_resultid FROM workunit WHERE name = 'near_1')", "S4-01", "near_1"),
    "unequal credit": (
        "UPDATE result SET granted_credit = granted_credit + 1 WHERE name = 'near_1_1'", "S0-45",
        "near_1"),
    "assimilated without answer or error": (
        "UPDATE workunit SET canonical_resultid = 0 WHERE name = 'near_1'", "S4-31", "near_1"),
    "inputs freed while a copy is under way": (
        "UPDATE workunit SET file_delete_state = 1 WHERE name = 'near_3'", "S4-32", "near_3"),
    "inputs freed before the end": (
        "UPDATE workunit SET file_delete_state = 1, assimilate_state = 1 WHERE name = 'near_1'",
        "S4-32", "near_1"),
    "nothing will ever wake it": (
        "UPDATE workunit SET transition_time = 2147483647 WHERE name = 'near_5'", "S4-30",
        "near_5"),
    "it sleeps past a deadline": (
        "UPDATE workunit SET transition_time = 1 + (SELECT report_deadline FROM result WHERE "
        "name = 'near_3_0') WHERE name = 'near_3'", "S0-34", "near_3_0"),
    "a row of nobody": ("DELETE FROM workunit WHERE name = 'near_0'", "points to no row", "result"),
    "a small input of nobody": (
        "INSERT INTO small_file SELECT 'download/near_9_in', content FROM small_file LIMIT 1",
        "belongs to no workunit", "download/near_9_in"),
    "a small output of nobody": (
        "INSERT INTO small_file SELECT 'upload/near_5_9_out', content FROM small_file LIMIT 1",
        "belongs to no result", "upload/near_5_9_out"),
    "an index that lost a row": (
        "UPDATE sqlite_master SET sql = replace(sql, 'server_state = 2', 'server_state = 4') "
        "WHERE name = 'result_unsent'", "store: ", "result_unsent"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_breakage_is_found(world, upkeep, case):
    """Exactly what was broken is named: nothing else, and nothing less."""
    how, what, who = PLANTED[case]
    m.db.execute_sql("PRAGMA foreign_keys = OFF")
    m.db.execute_sql("PRAGMA writable_schema = ON")
    assert m.db.execute_sql(how).rowcount > 0
    m.db.close()  # The next connection reads the schema as it is now.
    found = upkeep.violations()
    assert [text for text in found if what in text and who in text], found
    assert len(found) == 1 or all(who in text for text in found), found


FILES = {  # which file: (folder, name, is it removed?, what is said)
    "an input that is needed": ("download", "near_3_in", True, "input near_3_in is missing"),
    "an input that waits": ("download", "near_5_in", True, "input near_5_in is missing"),
    "an input that was deleted": ("download", "near_0_in", False, "input near_0_in is there"),
    "a canonical output": ("upload", "near_1_0_out", True, "output near_1_0_out is missing"),
    "an output that was deleted": ("upload", "near_0_0_out", False, "output near_0_0_out is there"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_missing_or_too_many_is_found(world, upkeep, case):
    folder, name, removed, what = FILES[case]
    path = m.file_path(folder, name)
    if not removed:
        path.write_text("1")
    elif not m.db.execute_sql("DELETE FROM small_file WHERE name = ?",
                              (f"{folder}/{name}",)).rowcount:
        path.unlink()
    assert upkeep.violations() == [what]


def test_many_of_a_kind_make_one_line(world, upkeep):
    for number in range(10, 30):
        make.add(number=number)
    m.db.execute_sql("UPDATE workunit SET transition_time = 2147483647 WHERE number >= 10")
    (text,) = upkeep.violations()
    assert text.endswith("near_10, near_11, near_12, near_13, near_14 ...")


@pytest.mark.parametrize("page", [2, 5, 9])
def test_a_store_damaged_inside_is_reported_not_raised(world, upkeep, page):
    """What opens well may still be damaged further in: that is what a check is for."""
    path = world.data / "minigrid.db"
    m.db.execute_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    m.db.close()
    with open(path, "r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xa5" * 4096)
    assert [text for text in upkeep.violations() if text.startswith("store: ")]
    m.db.close()


def test_checking_changes_nothing(world, upkeep):
    before = make.dump()
    upkeep.violations()
    upkeep.spot_check(random.Random(1))
    assert make.dump() == before


def test_what_the_other_computer_of_a_user_reports_is_sound(grid, upkeep):
    """[C43] A client directory was moved, and both computers had a copy of the workunit."""
    one, two = Client("ann"), Client("ann")
    make.add(number=0)
    (first,), (second,) = one.fetch(), two.fetch()
    two.report(first, "1")
    two.report(second, "1")
    assert upkeep.violations() == []
    passes(NOW + 1)
    assert upkeep.violations() == [] and make.units()[0].assimilate_state == 2


def test_a_deadline_that_has_passed_before_the_next_pass_is_sound(grid, upkeep):
    """A report sets the workunit due; that another copy is overdue already is no breakage."""
    one, two = Client("ann"), Client("bob")
    make.add(number=0, delay_bound=100)
    (first,), _ = one.fetch(), two.fetch()
    one.report(first, "1", NOW + 105)
    assert upkeep.violations() == []
    passes(NOW + 106)
    assert upkeep.violations() == []


def test_a_lost_copy_that_is_not_sent_again_is_sound(grid, upkeep):
    """[C43] It is given up at once: due, though its deadline is just over."""
    one = Client("ann")
    make.add(number=0, delay_bound=100)
    one.fetch()
    one.ask(NOW + 90, other_results=[])
    assert m.Result.get(host=one.hostid).report_deadline < NOW + 90
    assert upkeep.violations() == []


# ---- 2. spot_check() -----------------------------------------------------------

SPOTS = {"two copies on one host": "two copies", "more copies than allowed": "max_total_results",
         "a canonical result that does not exist": "does not exist",
         "nothing will ever wake it": "ever wake"}


@pytest.mark.parametrize("case", SPOTS)
def test_the_spot_check_finds_what_it_looks_at(world, upkeep, case):
    how, _, name = PLANTED[case]
    rng = random.Random(1)
    assert [text for _ in range(50) for text in upkeep.spot_check(rng)] == []
    m.db.execute_sql(how)
    found = {text for _ in range(50) for text in upkeep.spot_check(rng)}
    assert len(found) == 1 and found.pop().startswith(name)
    assert SPOTS[case] in [text for _ in range(50) for text in upkeep.spot_check(rng)][0]


def test_the_spot_check_of_an_empty_store(grid, upkeep):
    assert upkeep.spot_check(random.Random(1)) == []


# ---- 3. Backups ----------------------------------------------------------------


def rows_of(path, query):
    with contextlib.closing(sqlite3.connect(path)) as copy:
        return copy.execute(query).fetchall()


def test_a_backup_is_the_store_as_it_was(world, upkeep, tmp_path):
    before = make.dump()
    assert upkeep.backup(tmp_path / "deep" / "copy.db") == tmp_path / "deep" / "copy.db"
    make.add(number=99)
    for name, rows in before.items():
        assert rows_of(tmp_path / "deep" / "copy.db", f'SELECT * FROM "{name}" ORDER BY 1') == rows
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy.db"], "and alone"


def test_a_backup_put_back_goes_on(world, upkeep, folder, tmp_path):
    """As the advice for a damaged store says."""
    upkeep.backup(tmp_path / "copy.db")
    before = make.dump()
    m.close_project()
    for path in world.data.glob("minigrid.db*"):
        path.unlink()
    shutil.copy(tmp_path / "copy.db", world.data / "minigrid.db")
    make.restart(folder)
    after = make.dump()
    assert after == before
    assert upkeep.violations() == []
    passes(NOW + 10)
    assert make.units()


def test_a_backup_beside_a_busy_writer_is_consistent_and_comes_to_its_end(grid, upkeep, tmp_path):
    """Pairs of rows are written together all the time: the copy holds both or none."""
    grid.write(lambda: m.save_all(m.User(create_time=1, name="x" * 3000, authenticator=f"{i}")
                                  for i in range(6000)))
    grid.write.start()
    ended, begun, n_commits = threading.Event(), threading.Event(), 3000

    def be_busy():
        for i in itertools.takewhile(lambda _: not ended.is_set(), range(n_commits)):
            grid.write(lambda: [m.Meta.create(name=f"{i} {k}", value=i) for k in range(2)])
            begun.set()
        ended.set()

    writer = threading.Thread(target=be_busy)
    writer.start()
    try:
        assert begun.wait(PATIENCE)
        upkeep.backup(tmp_path / "copy.db")
        assert not ended.is_set(), f"not done before {n_commits} commits were"
    finally:
        ended.set()
        writer.join(PATIENCE)
    copies = rows_of(tmp_path / "copy.db", "SELECT value, count(*) FROM meta WHERE name LIKE '% %' "
                     "GROUP BY value")
    assert copies and all(count == 2 for _, count in copies)
    assert [value for value, _ in copies] == list(range(len(copies)))
    assert rows_of(tmp_path / "copy.db", "PRAGMA integrity_check") == [("ok",)]
    assert rows_of(tmp_path / "copy.db", "SELECT count(*) FROM user") == [(6000,)]


def test_a_backup_that_fails_leaves_the_last_one(grid, upkeep, tmp_path):
    target = tmp_path / "copy.db"
    upkeep.backup(target)
    before = target.read_bytes()
    (tmp_path / "copy.db.part").mkdir()
    with pytest.raises((OSError, sqlite3.Error)):
        upkeep.backup(target)
    assert target.read_bytes() == before
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        upkeep.backup(tmp_path / "file" / "copy.db")


def test_a_half_backup_is_replaced(grid, upkeep, tmp_path):
    """What a crash in the middle of a backup has left is in nobody's way."""
    (tmp_path / "copy.db.part").write_bytes(b"half a copy")
    upkeep.backup(tmp_path / "copy.db")
    assert rows_of(tmp_path / "copy.db", "PRAGMA integrity_check") == [("ok",)]
    assert not (tmp_path / "copy.db.part").exists()


@pytest.fixture
def backups(grid):
    """The directory of backups, empty."""
    path = grid.data / "backup"
    shutil.rmtree(path, ignore_errors=True)
    yield lambda: sorted(p.name for p in path.iterdir()) if path.exists() else []
    shutil.rmtree(path, ignore_errors=True)


def test_old_backups_go_and_nothing_else(grid, upkeep, backups):
    make.settings(backups=3)
    (grid.data / "backup").mkdir()
    kept = ["before-the-move.db", "minigrid-2001-01-01-120000.db", "notes.txt"]
    for name in kept:  # What a person has put there, `minigrid backup` for one.
        (grid.data / "backup" / name).write_text("mine")
    days = [NOW + n * DAY for n in range(6)]
    for now in days:
        upkeep.daily(now)
    assert backups() == sorted(kept + [
        "minigrid-%04d-%02d-%02d.db" % m.time.gmtime(now)[:3] for now in days[-3:]])


def test_two_backups_of_a_day_are_one(grid, upkeep, backups):
    upkeep.daily(NOW)
    make.add(number=0)
    upkeep.daily(NOW + 5)
    (name,) = backups()
    assert rows_of(grid.data / "backup" / name, "SELECT count(*) FROM workunit") == [(1,)]


def test_no_backups_where_none_are_wanted(grid, upkeep, backups):
    make.settings(backups=0)
    upkeep.daily(NOW)
    assert backups() == []


def test_the_daily_work_is_done_once_a_day_however_often_the_server_starts(grid, upkeep, backups):
    for now in (NOW, NOW + 10, NOW + 3600, NOW + DAY - 3600):
        upkeep.hourly(now)
        assert len(backups()) == 1
    upkeep.hourly(NOW + DAY)
    upkeep.hourly(NOW + DAY + 3600)
    assert len(backups()) == 2


def test_daily_work_that_fails_is_remembered_for_the_status_page(grid, upkeep, backups):
    (grid.data / "backup").write_text("in the way")
    upkeep.hourly(NOW)
    assert [text for _, text in grid.errors if "daily work failed" in text]
    (grid.data / "backup").unlink()


# ---- 4. Files that belong to nothing -------------------------------------------


def put(folder, name, age):
    """Make a file as old as wanted; return its path."""
    path = m.file_path(folder, name)
    path.write_text("x")
    os.utime(path, (NOW - age, NOW - age))
    return path


ORPHANS = {  # file: (folder, is it deleted?)
    "near_77_0_out": ("upload", True), "near_77_0_out.part": ("upload", True),
    "near_77_0_out.new": ("upload", True), "gone_1_2_out": ("upload", True),
    "near_77_in": ("download", True), "near_77_in.new": ("download", True),
    "near_0_0_out": ("upload", False), "near_0_0_out.part": ("upload", False),
    "near_0_in": ("download", False), "near_0_in.new": ("download", False),
    "near_1_0123abcd.py": ("download", False), "near_99_in.py": ("download", False),
    "notes.txt": ("upload", False), "out": ("upload", False), "in": ("download", False),
}


@pytest.mark.parametrize("age", [5 * DAY, DAY + 1, DAY - 1, 0])
def test_orphans(grid, upkeep, age):
    """[C46] Old and of no workunit or result: gone. Young, or known, or a stranger's: left."""
    make.add(number=0, now=NOW)
    for name, (folder, orphan) in ORPHANS.items():
        path = put(folder, name, age)
        deleted = orphan and age > DAY
        assert upkeep.delete_orphans(NOW) == deleted, name
        assert path.exists() != deleted, name


def test_no_orphan_is_younger_than_the_oldest_workunit(grid, upkeep):
    """[S4-66] It may be an output that comes really late."""
    make.add(number=0, now=NOW - 3 * DAY)
    make.add(number=1, now=NOW)
    late, old = put("upload", "near_5_0_out", 2 * DAY), put("upload", "near_5_1_out", 4 * DAY)
    assert upkeep.delete_orphans(NOW) == 1
    assert late.exists() and not old.exists()


def test_orphans_of_a_store_without_workunits(grid, upkeep):
    path = put("upload", "near_5_0_out", 2 * DAY)
    assert upkeep.delete_orphans(NOW) == 1 and not path.exists()


def test_what_is_no_file_of_ours_stays(grid, upkeep):
    folder = m.file_path("upload", "near_5_0_out").parent
    (folder / "dir_out").mkdir(exist_ok=True)
    outside = grid.data / "upload" / "near_5_0_out"
    outside.write_text("x")
    for path in (folder / "dir_out", outside):
        os.utime(path, (NOW - 9 * DAY, NOW - 9 * DAY))
    assert upkeep.delete_orphans(NOW) == 0
    assert outside.exists() and (folder / "dir_out").is_dir()
    outside.unlink()
    (folder / "dir_out").rmdir()


def test_the_daily_work_deletes_orphans(grid, upkeep, backups):
    path = put("upload", "near_5_0_out", 2 * DAY)
    upkeep.daily(NOW)
    assert not path.exists()
    assert re.fullmatch(r"minigrid-\d{4}-\d\d-\d\d\.db", backups()[0])
