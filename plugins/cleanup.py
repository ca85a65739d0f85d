"""The last two stages: delete files that nobody needs, move finished workunits to the archive.

Core rules say which files may go; what becomes of a finished workunit is a project's choice, so it
is here: one JSON line in data/archive, compressed by month.
"""

import contextlib
import functools
import gzip
import os
import time

from peewee import SQL

from minigrid import (CHUNK, CHUNKS_MAX, DELETED, FILES_GONE, FILES_READY, FILES_STUCK, NOT_DELETED,
                      PURGE, FileDeleteState, Result, ServerState, SharedFile, Workunit,
                      append_exactly, canonical_json, chunks, db, file_path, fire, load, log,
                      output_files, place_of, plugged, prepared, project, save_all)

F = FileDeleteState
FOLDERS = {Workunit: "download", Result: "upload"}
JSON = ("input_files", "output_files", "refusals")  # which are read when they are asked for


def delete_files(folder, files, small=()):
    """Delete files; return whether all are gone. One that was not there counts as gone [F1 F3].

    But not the `small` ones, folder/name: they go with what the store says of them.
    """
    gone = True
    for file in files:
        if f"{folder}/{file['name']}" in small:
            continue
        path = place_of(folder, file["name"])
        try:
            if not file.get("no_delete") and not file.get("sticky"):
                if folder == "upload":  # a broken one
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{path}.part")
                os.unlink(path)
        except FileNotFoundError:  # A lost directory is trouble, a lost file is not.
            gone &= os.path.exists(os.path.dirname(path))
        except OSError as error:
            log.warning("cannot delete %s: %s", path, error)
            gone = False
    return gone


def file_deleter(now):
    """Stage: delete the files of workunits and results that are ready to go [S2-07 S4-13 S4-62].

    Failed deletions are tried again in the first pass of the process, then hourly [F2].
    """
    states = [FILES_READY]
    if project.retry_files_at <= now:
        states, project.retry_files_at = [FILES_STUCK, FILES_READY], now + 3600
    done = 0
    for state in states:
        for model in (Workunit, Result):
            for ids in chunks(rows_in(model, state.sql)()):
                files = {row.id: row.input_files if model is Workunit else output_files(row)
                         for row in files_of(model)(ids)}
                folder = FOLDERS[model]
                names = [f"{folder}/{file['name']}" for some in files.values() for file in some
                         if not file.get("no_delete")]
                small = {name for name, in plugged("small_among")[-1](names)}
                gone = {i: delete_files(folder, some, small) for i, some in files.items()}
                done += project.write(lambda: mark_deleted(model, gone, names, now))
    return done


@functools.lru_cache(maxsize=None)
def rows_in(model, state):
    """Return the query for the ids of rows whose files are in a state."""
    return prepared(lambda: model.select(model.id).where(SQL(state)).order_by(model.id)
                    .limit(CHUNK * CHUNKS_MAX).tuples())


@functools.lru_cache(maxsize=None)
def files_of(model):
    """Return the query for the files of rows."""
    files = Workunit.input_files if model is Workunit else Result.output_files
    return prepared(lambda ids: model.select(model.id, model.name, files).where(model.id.in_(ids)))


@functools.lru_cache(maxsize=None)
def rows_of(model):
    """Return the query for rows by their ids."""
    return prepared(lambda ids: model.select().where(model.id.in_(ids)))


def mark_deleted(model, gone, names, now):
    """Note which rows' files are gone, the small ones being forgotten. Runs in the writer."""
    rows = [row for row in rows_of(model)(list(gone))
            if row.file_delete_state in (F.READY, F.ERROR)]
    for row in rows:
        if gone[row.id] or row.file_delete_state != F.ERROR:
            fire(DELETED if gone[row.id] else NOT_DELETED, row)
        if model is Workunit:
            row.mod_time = now
    if model is Workunit:
        release_shared([row for row in rows if row.file_delete_state == F.DONE])
    plugged("forget_files")[-1](names)
    save_all(rows)
    return len(rows)


def release_shared(units):
    """Delete the shared inputs of workunits that nobody else needs. Runs in the writer.

    There, because the writer is also who adds workunits: between look and deletion none can come.
    """
    names = {file["name"] for wu in units for file in wu.input_files if file.get("sticky")}
    if not names:
        return
    SharedFile.delete().where(SharedFile.workunit.in_([wu.id for wu in units])).execute()
    needed = {row.name for row in SharedFile.select(SharedFile.name).distinct()
              .where(SharedFile.name.in_(names))}
    for name in names - needed:
        try:
            file_path("download", name).unlink(missing_ok=True)
        except OSError as error:  # It stays; nobody is harmed.
            log.warning("cannot delete %s: %s", name, error)


def purger(now):
    """Stage: move finished workunits from the store to data/archive [S4-12].

    Only when all their results are over and no file of theirs waits to be deleted [P1 P3].
    """
    done = 0
    for ids in chunks(finished_before(now - project.settings.purge_delay)):
        for wu, results in load([wu_id for wu_id, in with_other_files(ids)]):
            if purgeable(wu, results):  # Outputs that came unasked for go with their rows [P2 C16].
                for r in results:
                    if r.file_delete_state != F.DONE:
                        delete_files("upload", output_files(r))
        done += project.write(lambda: purge(ids, now))
    return done


@prepared
def with_other_files(ids):
    """Find which workunits have results whose files were never marked to be deleted."""
    return Result.select(Result.workunit).distinct().where(
        Result.workunit.in_(ids), Result.file_delete_state != F.DONE).tuples()


@prepared
def finished_before(time):
    """Find the ids of workunits that were finished before a time."""
    return (Workunit.select(Workunit.id).order_by(Workunit.mod_time, Workunit.id)
            .where(FILES_GONE, Workunit.mod_time <= time).limit(CHUNK * CHUNKS_MAX).tuples())


def purgeable(wu, results):
    """Say whether nothing of a workunit is unfinished."""
    return wu.file_delete_state == F.DONE and (
        all(r.server_state == ServerState.OVER and r.file_delete_state in (F.INIT, F.DONE)
            for r in results))


def purge(ids, now):
    """Archive workunits, one JSON line each, and remove their rows. Runs in the writer."""
    lines, gone, small = [], [], []
    for wu, results in load(ids):
        if not purgeable(wu, results):
            continue
        fire(PURGE, wu)
        record = {**values_of(wu), "purge_time": now, "results": [
            {k: v for k, v in values_of(r).items() if k != "stderr_out"} for r in results]}
        lines.append(canonical_json(record) + "\n")
        gone.append(wu.id)
        small += [f"upload/{file['name']}" for r in results for file in output_files(r)]
    if gone:
        plugged("forget_files")[-1](small)  # that came late, or unasked for
        month = time.strftime("%Y-%m", time.gmtime(now))
        packed = gzip.compress("".join(lines).encode(), 6, mtime=now)  # 9 takes three times as long
        append_exactly(project.data / "archive" / f"workunits-{month}.jsonl.gz", packed)
        remove(gone)
    return len(gone)


def values_of(row):
    """Return the values of a row by the names of its fields, of its JSON fields, too."""
    return {**row.__data__, **{name: getattr(row, name) for name in JSON if hasattr(row, name)}}


def remove(ids):
    """Remove the rows of workunits and of their results."""
    for table, column in (("result", "workunit_id"), ("workunit", "id")):
        db.connection().executemany(f"DELETE FROM {table} WHERE {column} = ?",
                                    [(wu_id,) for wu_id in ids])


STAGES = (file_deleter, purger)
