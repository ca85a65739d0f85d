"""Keeping a project sound: check of store and files, cancelling, backups, unknown files [C46]."""

import re
import sqlite3
import time

from peewee import DatabaseError

from peewee import fn

import minigrid
from minigrid import FileDeleteState as F
from minigrid import (AssimilateState, ErrorMask, Outcome, Result, Workunit, db, load, log,
                      output_files, plugged, prepared, project)

NEVER = minigrid.NEVER

# Each invariant is a query for the rows that break it: (what is wrong, query for a name).
INVARIANTS = {
    "a result in progress without host, sending time or deadline [S4-33]":
        "SELECT name FROM result WHERE server_state = 4 AND (host_id IS NULL OR sent_time = 0 "
        "OR report_deadline = 0)",
    "an outcome without being over, or over without an outcome [S4-41]":
        "SELECT name FROM result WHERE (server_state = 5) != (outcome != 0)",
    "a verdict on a result that was never reported [S4-54]":
        "SELECT name FROM result WHERE validate_state != 0 AND outcome NOT IN (1, 3, 6)",
    "credit without being valid [S0-39]":
        "SELECT name FROM result WHERE granted_credit > 0 AND validate_state != 1",
    "negative credit":
        "SELECT name FROM result WHERE granted_credit < 0",
    "two copies of a workunit on one host [D8]":
        "SELECT w.name FROM result r JOIN workunit w ON w.id = r.workunit_id "
        "WHERE r.host_id IS NOT NULL GROUP BY r.workunit_id, r.host_id HAVING count(*) > 1",
    "more results than max_total_results [C5]":
        "SELECT w.name FROM workunit w JOIN result r ON r.workunit_id = w.id "
        "GROUP BY w.id HAVING count(*) > w.max_total_results",
    "a canonical result that is none of its valid results [S4-01]":
        "SELECT w.name FROM workunit w LEFT JOIN result r ON r.id = w.canonical_resultid "
        "AND r.workunit_id = w.id AND r.outcome = 1 AND r.validate_state = 1 "
        "WHERE w.canonical_resultid != 0 AND r.id IS NULL",
    "valid results with unequal credit [S0-45]":
        "SELECT w.name FROM workunit w JOIN result r ON r.workunit_id = w.id "
        "WHERE r.validate_state = 1 GROUP BY w.id "
        "HAVING max(r.granted_credit) - min(r.granted_credit) > 1e-9",
    "assimilated without answer or error [S4-29 S4-31]":
        "SELECT name FROM workunit WHERE assimilate_state != 0 AND canonical_resultid = 0 "
        "AND error_mask = 0",
    "inputs freed while a copy is under way [S4-32]":
        "SELECT w.name FROM workunit w JOIN result r ON r.workunit_id = w.id "
        "WHERE w.file_delete_state != 0 AND (r.server_state != 5 OR w.assimilate_state != 2)",
    "a workunit nothing will ever wake [S4-29 S4-30]":
        "SELECT name FROM workunit WHERE transition_time = 2147483647 AND NOT need_validate "
        "AND assimilate_state = 0",
    "a result under way with a workunit that does not wait for its deadline [S0-34]":
        "SELECT r.name FROM result r JOIN workunit w ON w.id = r.workunit_id "
        "WHERE r.server_state = 4 AND w.assimilate_state != 1 AND w.transition_time > "
        "max(r.report_deadline, (SELECT max(rpc_time) FROM host))",  # or due since a request
    "a small output that belongs to no result":
        "SELECT name FROM small_file WHERE name LIKE 'upload/%' AND NOT EXISTS (SELECT 1 FROM "
        "result WHERE result.name = substr(small_file.name, 8, length(small_file.name) - 11))",
    "a small input that belongs to no workunit":
        "SELECT name FROM small_file WHERE name LIKE 'download/%' AND NOT EXISTS (SELECT 1 FROM "
        "workunit WHERE workunit.name = substr(small_file.name, 10, length(small_file.name) - 12))",
}


def violations():
    """Return what is wrong with store and files: [text]; empty if all is sound.

    Reads everything, so it takes a while on a large store; changes nothing.
    """
    found = []
    try:
        found += [f"store: {row[0]}" for row in db.execute_sql("PRAGMA integrity_check")
                  if row[0] != "ok"]
        found += [f"store: {row[0]} row {row[1]} points to no row of {row[2]}"
                  for row in db.execute_sql("PRAGMA foreign_key_check")]
        for what, query in INVARIANTS.items():
            names = [row[0] for row in db.execute_sql(query + " LIMIT 6")]
            if names:
                found.append(f"{what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
        return found + file_violations()
    except (DatabaseError, sqlite3.Error) as error:  # It cannot even be read to its end.
        found.append(f"store: {error}; put back the newest copy from {project.data / 'backup'}")
        return found


def file_violations():
    """Return which files are missing though they are needed, or there though deleted."""
    found, (size_of,) = [], plugged("file_size")
    for wu in Workunit.select(Workunit.name, Workunit.input_files, Workunit.file_delete_state) \
            .where(Workunit.file_delete_state.in_([F.INIT, F.DONE])).iterator():
        for file in wu.input_files:
            there = size_of("download", file["name"]) is not None
            if there != (wu.file_delete_state == F.INIT) and not file.get("no_delete") \
                    and not (there and file.get("sticky")):  # Others may share it.
                found.append(f"input {file['name']} is {'there' if there else 'missing'}")
    query = Result.select(Result.name, Result.output_files, Result.file_delete_state).where(
        (Result.outcome == Outcome.SUCCESS) & Result.validate_state.in_([1]) |
        (Result.file_delete_state == F.DONE))
    for r in query.iterator():
        for file in output_files(r):
            there = size_of("upload", file["name"]) is not None
            if there == (r.file_delete_state == F.DONE):
                found.append(f"output {file['name']} is {'there' if there else 'missing'}")
    return found[:20]


@prepared
def last_workunit():
    """Find the highest id of a workunit."""
    return Workunit.select(fn.MAX(Workunit.id)).tuples()


def spot_check(rng):
    """Check one workunit, drawn at random; return what is wrong with it."""
    last = last_workunit.first()[0]
    found = load([rng.randint(1, last)]) if last else []
    if not found:
        return []
    (wu, results), = found
    hosts = [r.host_id for r in results if r.host_id]
    wrong = []
    if len(hosts) != len(set(hosts)):
        wrong.append("two copies on one host")
    if len(results) > wu.max_total_results:
        wrong.append("more copies than max_total_results")
    if wu.canonical_resultid and wu.canonical_resultid not in [r.id for r in results]:
        wrong.append("a canonical result that does not exist")
    if wu.transition_time == NEVER and not wu.need_validate and wu.assimilate_state == 0:
        wrong.append("nothing will ever wake it")
    return [f"{wu.name}: {text}" for text in wrong]


def guard(now):
    """Stage: look at one workunit, so that a fault of ours shows in real stores, too."""
    wrong = [text for text in spot_check(project.rng)
             if text not in [known for _, known in project.errors]]
    for text in wrong:
        minigrid.remember(now, text)
    return len(wrong)


STAGES = (guard,)


def cancel_workunits(ids, now):
    """Give workunits up on their owner's word (bit 16); return how many [C9 C42].

    Copies in the hands of volunteers are called back at their next request. Runs in the writer.
    """
    def stop(wu, results):
        minigrid.fire(minigrid.CANCEL, wu)
        wu.transition_time = 0

    def unfinished(wu):
        return wu.assimilate_state == AssimilateState.INIT and not \
            wu.error_mask & ErrorMask.CANCELLED

    return minigrid.change(ids, unfinished, stop, now)


def hourly(now):
    """Do the daily work when a day has gone by, also if the server never runs a whole day."""
    last = minigrid.Meta.get_or_none(name="daily")
    if last and now - last.value < 86400 - 60:
        return
    project.write(lambda: minigrid.Meta.replace(name="daily", value=now).execute())
    try:
        daily(now)
    except Exception as error:
        log.exception("daily work failed")
        minigrid.remember(now, f"daily work failed: {error}")


def daily(now):
    """Once a day: a backup, and away with files that belong to nothing."""
    if project.settings.backups:
        backup(project.data / "backup" / time.strftime("minigrid-%Y-%m-%d.db", time.gmtime(now)))
        kept = sorted((project.data / "backup").glob("minigrid-????-??-??.db"))  # Ours alone.
        for old in kept[:-project.settings.backups]:
            old.unlink()
    delete_orphans(now)


def backup(target):
    """Copy the store as it is at this moment, while the server works on; return the path.

    Raises OSError or sqlite3.Error. The copy is complete or absent, never half.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".part")
    temporary.unlink(missing_ok=True)
    source = sqlite3.connect(f"file:{project.data / 'minigrid.db'}?mode=ro", uri=True)
    copy = sqlite3.connect(temporary)
    try:
        with copy:
            source.backup(copy)  # In one step: between two, any commit would start it again.
        copy.execute("PRAGMA journal_mode = delete")
    finally:
        copy.close()
        source.close()
    minigrid.settle(temporary, target)
    return target


def delete_orphans(now, age_min=86400):
    """Delete uploaded files that belong to no result, and inputs that belong to no workunit [C46].

    Only what is older than the oldest workunit of the store and than `age_min` seconds; an upload
    for a name the store does not know is refused at once, so this finds only what a crash left
    (S4-66). Returns how many were deleted.
    """
    oldest = Workunit.select(minigrid.Workunit.create_time).order_by(Workunit.id).limit(1).scalar()
    before, n = min(oldest or now, now - age_min), 0
    for folder, model, suffix in (("upload", Result, "_out"), ("download", Workunit, "_in")):
        for path in (project.data / folder).glob("*/*"):
            name = path.name.removesuffix(".part").removesuffix(".new")
            if path.is_file() and path.stat().st_mtime < before and name.endswith(suffix) \
                    and not model.select().where(model.name == name[:-len(suffix)]).exists():
                path.unlink()
                n += 1
    used = {file["name"] for version in minigrid.AppVersion.select() for file in version.files}
    for path in (project.data / "download").glob("*/*"):  # shared inputs, named by their content
        if re.fullmatch(r".+_[0-9a-f]{16}_.+", path.name) and path.stat().st_mtime < before \
                and path.name not in used and not minigrid.SharedFile.select().where(
                    minigrid.SharedFile.name == path.name.removesuffix(".new")).exists():
            path.unlink()
            n += 1
    if n:
        log.info("deleted %d files that belong to nothing", n)
    return n
