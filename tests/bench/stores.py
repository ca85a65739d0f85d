"""Stores with many workunits, inserted directly: what would take a server minutes or months."""

import contextlib
import hashlib
import os
import sqlite3

import minigrid as m

BATCH = 20_000
FINISHED, UNSENT, REPORTED = "finished", "unsent", "reported"


def fill(folder, first, n, kind):
    """Put n workunits of a kind into the store of a project, with one result for each.

    finished: all is done and it waits for the purge; unsent: ready to be given out; reported: its
    transition is due, and its output is there.
    """
    now, app_id = m.wall_clock(), 1
    with contextlib.closing(sqlite3.connect(folder / "data" / "minigrid.db",
                                            isolation_level=None)) as store:
        store.execute("PRAGMA synchronous = OFF")
        store.execute("INSERT OR IGNORE INTO app (id, name, create_time, next_number) "
                      "VALUES (?, 'bench', ?, 0)", (app_id, now))
        hosts = store.execute("SELECT count(*) FROM host").fetchone()[0]
        for start in range(first, first + n, BATCH):
            numbers = range(start, min(start + BATCH, first + n))
            store.execute("BEGIN")
            insert(store, m.Workunit, [workunit_row(i, app_id, now, kind) for i in numbers])
            insert(store, m.Result, [result_row(i, app_id, now, kind, hosts) for i in numbers])
            store.execute("COMMIT")
        store.execute("UPDATE app SET next_number = ?", (first + n,))
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if kind == REPORTED:
        place_outputs(folder / "data" / "upload", first, n)


def place_outputs(upload, first, n):
    """Place the outputs of reported results; as links, since writing 100,000 files takes long."""
    for i in range(first, first + n):
        if i % 10_000 == first % 10_000:  # A file has at most 65,000 names.
            original = upload / f"original{i}"
            original.write_bytes(b"1")
        name = f"bench_{i}_0_out"
        os.link(original, upload / hashlib.md5(name.encode()).hexdigest()[:2] / name)


def insert(store, model, rows):
    """Insert dictionaries; what a row does not say is what its model says."""
    fields = model._meta.sorted_fields
    defaults = {f.column_name: f.db_value(f.default) for f in fields}
    names = ", ".join(defaults)
    store.executemany(
        f"INSERT INTO {model._meta.table_name} ({names}) "
        f"VALUES ({', '.join('?' * len(defaults))})",
        [[row.get(name, default) for name, default in defaults.items()] for row in rows])


def workunit_row(i, app_id, now, kind):
    """Return a workunit as columns."""
    file = m.file_entry(f"bench_{i}_in", b"%d" % i)
    row = dict(id=i + 1, app_id=app_id, name=f"bench_{i}", number=i, create_time=now - 900,
               mod_time=now - 900, input_files=m.canonical_json([file]), min_quorum=1,
               target_nresults=1, rsc_disk_bound=1e6, canonical_credit=10)
    if kind == FINISHED:
        row.update(transition_time=m.NEVER, canonical_resultid=i + 1, assimilate_state=2,
                   file_delete_state=2, mod_time=now)
    else:
        row.update(transition_time=now + 10**6 if kind == UNSENT else now - 100)
    return row


def result_row(i, app_id, now, kind, hosts):
    """Return the only result of a workunit as columns."""
    row = dict(id=i + 1, workunit_id=i + 1, app_id=app_id, name=f"bench_{i}_0",
               create_time=now - 900, server_state=2)
    if kind != UNSENT:
        host = i % hosts + 1
        row.update(server_state=5, outcome=1, client_state=5, host_id=host, user_id=host,
                   app_version_id=1, sent_time=now - 800, report_deadline=now + 86400,
                   received_time=now - 100, elapsed_time=5, cpu_time=5)
    if kind == FINISHED:
        row.update(validate_state=1, file_delete_state=2, granted_credit=10)
    return row
