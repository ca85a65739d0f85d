"""minigrid: a whole volunteer-computing project in one process and one command.

Strangers' computers ask this server for work, compute it, and report; the server gives every task
to several of them, compares what comes back, and keeps the answers that agree. It follows the
rules of BOINC's back end (cited as S0-16, C5 ... in comments and in the table of section 2).

    any BOINC client ---XML--+                                    +--- plugins/apps/*.py
    volunteer.py ------JSON--+--> schedule(Request, now) --+      |    workunit, compute,
                                  (Bottle, waitress)       |      |    compare, assimilate
                                                           v      |
                         APScheduler --> run_pass(now) --> one writer --> data/minigrid.db

Two nouns: a *workunit* is a task; a *result* is one copy of it, held by at most one host.
One clock: `now` is an argument everywhere, an int in seconds UTC; section 13 alone reads a clock.
One writer: only functions handed to `project.write()` change the store.

Read it from the top: every section uses only what stands above it.

    1 States        2 Rules         3 Records       4 Store and writer   5 Settings and project
    6 Applications  7 Work and files   8 Scheduler  9 Transitioner      10 Validator
    11 Stages      12 HTTP         13 Process and command line
"""

import argparse
import concurrent.futures
import configparser
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import os
import queue
import random
import re
import sqlite3
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Callable

import bottle
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from peewee import (SQL, BigIntegerField, BooleanField, CharField, DatabaseError, FieldAccessor,
                    FloatField, ForeignKeyField, IntegerField, IntegrityError, Model,
                    SqliteDatabase, TextField)
from playhouse.fields import IntEnumField

__version__ = "0.6.0"
log = logging.getLogger("minigrid")

__all__ = """
    NEVER ServerState Outcome ValidateState FileDeleteState AssimilateState ErrorMask Rule rule
    RULES fire explain fired label ClientError PluginError StoreError db Meta User Host App
    AppVersion HostAppVersion Workunit Result SharedFile Firing Record canonical_json prepared
    results_named save_all append_exactly lock_directory server_note UNSENT IN_PROGRESS DUE
    TO_VALIDATE TO_ASSIMILATE Settings setting read_settings project open_project close_project
    remember PARAMETERS Application ALL GENERATOR apps plugins plugged sync_apps FILE_NAME
    working file_path place_of file_entry store_file store_files settle output_files Request
    Report Reply schedule say_to send COULDNT_SEND DETACH HOST_FIELDS log transition Verdict
    candidates load DELETED NOT_DELETED PURGE FILES_READY FILES_GONE FILES_STUCK CHUNK
    CHUNKS_MAX put_off chunks STAGES all_stages run_pass base_url wall_clock running main CANCEL
    change NOT_NOW held_by hosts_of results_of ASSIMILATED DEFERRED FAIL_NO_CANONICAL work_off
""".split()

NEVER = 2147483647  # the INT_MAX of transition_time [C9 C35]; 0 means due at once
RETRY_SECONDS = 6 * 3600  # a workunit that could not be judged is looked at again then [C13]


# ---- 1. States ---------------------------------------------------------------
#
# A workunit has no overall state, only independent fields. Names and numbers are BOINC's, so that
# two dumps can be laid side by side [RULES table 5].


class ServerState(IntEnum):
    """Where a result stands on the server [S4-34]."""

    INACTIVE = 1  # not made by minigrid; counts with UNSENT where a store holds it
    UNSENT = 2
    IN_PROGRESS = 4
    OVER = 5  # reported, timed out, or not needed


class Outcome(IntEnum):
    """How a result ended; INIT until it is OVER [S4-41]."""

    INIT = 0
    SUCCESS = 1
    COULDNT_SEND = 2
    CLIENT_ERROR = 3
    NO_REPLY = 4
    DIDNT_NEED = 5
    VALIDATE_ERROR = 6  # reported as a success, but its output is missing or cannot be read
    CLIENT_DETACHED = 7


class ValidateState(IntEnum):
    """What the validator thinks of a result; no ERROR state exists [C15]."""

    INIT = 0
    VALID = 1
    INVALID = 2
    NO_CHECK = 3  # the workunit failed: nobody will ever judge this result
    INCONCLUSIVE = 4  # compared without consensus; compared again with the next result
    TOO_LATE = 5  # came when the canonical output was gone: no credit, no blame


class FileDeleteState(IntEnum):
    """May the files of a workunit (inputs) or of a result (outputs) go? [S4-10 S4-51]"""

    INIT = 0
    READY = 1
    DONE = 2
    ERROR = 3  # deleting failed; tried again hourly [C16]


class AssimilateState(IntEnum):
    """Has the application taken the answer, or the failure? [S4-14]"""

    INIT = 0
    READY = 1
    DONE = 2


class ErrorMask(IntFlag):
    """Why a workunit was given up; zero while it was not [S4-23 C18]."""

    NONE = 0
    COULDNT_SEND_RESULT = 1
    TOO_MANY_ERROR_RESULTS = 2
    TOO_MANY_SUCCESS_RESULTS = 4
    TOO_MANY_TOTAL_RESULTS = 8
    CANCELLED = 16
    NO_CANONICAL_RESULT = 32


NO_TRANSITION, NO_NEW_RESULTS = 1, 2  # transitioner_flags of a workunit [T9]
S, O, V, F, A, E = ServerState, Outcome, ValidateState, FileDeleteState, AssimilateState, ErrorMask


# ---- 2. Rules ----------------------------------------------------------------
#
# A rule is one event in the life of one row: who may cause it, from which states, to which, and the
# ids of RULES.md that say so. `fire()` is the only writer of a state field: stage code says when,
# the table says what, the citation says why. An error bit is added to the mask, never taken away.


class IllegalMove(Exception):
    """A rule was fired on a row it does not fit: our own bug, never a volunteer's."""


@dataclass(frozen=True)
class Rule:
    """One row of the table; `before` maps fields to allowed values, `after` to the new one."""

    name: str
    by: str
    cites: str
    why: str
    before: dict
    after: dict


RULES = {}  # name -> Rule, in the order in which a workunit may meet them
fired = []  # (rule or text, row) since the writer last emptied it: log lines, counts, answers


def rule(*columns):
    """Enter a rule into the table and return it."""
    RULES[columns[0]] = Rule(*columns)
    return RULES[columns[0]]


def fire(rule, row):
    """Apply a rule to a row in memory; error bits are added to those already set.

    Raises IllegalMove, with the row unchanged, if the rule does not start from what it holds.
    """
    for name, allowed in rule.before.items():
        value = getattr(row, name)
        if value not in allowed:
            raise IllegalMove(f"{label(row)} {rule.by}: '{rule.name}' wants {name} in "
                              f"{sorted(allowed)}, found {value!r}")
    if "error_mask" in rule.after and row.error_mask & rule.after["error_mask"]:
        return  # The bit is set already: nothing happens.
    for name, value in rule.after.items():
        setattr(row, name, row.error_mask | value if name == "error_mask" else value)
    fired.append((rule, row))


def explain(row, text):
    """Tell those who ask why: a decision about a row, with the numbers it was made from."""
    fired.append((text, row))


def label(row):
    """Name a row as log lines do: RESULT#12, WORKUNIT#7; a new one has no number yet."""
    return f"{type(row).__name__.upper()}#{row.id or row.name}"


QUEUED, SENT = dict(server_state={S.UNSENT, S.INACTIVE}), dict(server_state={S.IN_PROGRESS})
GIVEN_UP, REPORTED = dict(server_state={S.OVER}, outcome={O.NO_REPLY}), dict(outcome={O.SUCCESS})
UNJUDGED = dict(outcome={O.SUCCESS}, validate_state={V.INIT, V.INCONCLUSIVE})

# Work generator and scheduler

NEW_RESULT = rule(
    "make a copy", "transitioner", "S0-24 S0-25 S2-10 S4-34 C4",
    "fewer copies than target_nresults are waiting, under way, or still usable",
    dict(server_state={S.UNSENT}), dict(server_state=S.UNSENT))
SEND = rule(
    "send", "scheduler", "S2-27 S4-35", "a host asked for work and can do this in time",
    dict(server_state={S.UNSENT}), dict(server_state=S.IN_PROGRESS))
COULDNT_SEND = rule(
    "could not send", "scheduler", "S0-10 S0-11 S0-13",
    "too many hosts asked that are too small or too slow for it",
    dict(server_state={S.UNSENT}), dict(server_state=S.OVER, outcome=O.COULDNT_SEND))
SUCCESS = rule(
    "report success", "scheduler", "S0-07 S0-08 S2-31 S2-33 S4-36 S4-42",
    "the host reports client_state 5 (uploaded) and exit_status 0",
    SENT, dict(server_state=S.OVER, outcome=O.SUCCESS))
CLIENT_ERROR = rule(
    "report error", "scheduler", "S0-05 S0-06 S0-08 S2-34 S4-36 S4-43 C15",
    "the host reports anything else", SENT,
    dict(server_state=S.OVER, outcome=O.CLIENT_ERROR, validate_state=V.INVALID))
LATE_SUCCESS = rule(
    "report success late", "scheduler", "S0-07 C11",
    "given up, but it came all the same: it counts while it can be compared",
    GIVEN_UP, dict(outcome=O.SUCCESS))
LATE_ERROR = rule(
    "report error late", "scheduler", "S0-05 S0-06 C11 C15",
    "given up, and then reported as failed", GIVEN_UP,
    dict(outcome=O.CLIENT_ERROR, validate_state=V.INVALID))
DETACH = rule(
    "host detached", "scheduler", "S4-37 S4-49 C14",
    "the host came back as new and without its tasks",
    SENT, dict(server_state=S.OVER, outcome=O.CLIENT_DETACHED))

# Transitioner

TIME_OUT = rule(
    "time out", "transitioner", "S0-16 S0-17 S2-14 S4-38 C2", "now > report_deadline",
    SENT, dict(server_state=S.OVER, outcome=O.NO_REPLY))
TOO_LATE = rule(
    "too late", "transitioner", "C3",
    "the canonical output is gone: nothing to compare with",
    UNJUDGED, dict(validate_state=V.TOO_LATE))
NEED_VALIDATE = rule(
    "ask for validation", "transitioner", "S0-18 S0-19 S4-19 S4-20 C12 C19",
    "min_quorum usable results, at least one of them not looked at yet",
    dict(need_validate={False, True}), dict(need_validate=True))
FAIL_UNSENDABLE = rule(
    "fail: could not send", "transitioner", "S0-20 S2-15 S4-24", "one result could not be sent",
    {}, dict(error_mask=E.COULDNT_SEND_RESULT))
FAIL_ERRORS = rule(
    "fail: too many errors", "transitioner", "S0-21 S2-08 S2-16 S4-25 C6 C7 C18",
    "more than max_error_results ended in an error", {}, dict(error_mask=E.TOO_MANY_ERROR_RESULTS))
FAIL_TOTAL = rule(
    "fail: too many results", "transitioner", "S0-23 S2-17 S4-27 C5",
    "one more copy is needed and max_total_results were made",
    {}, dict(error_mask=E.TOO_MANY_TOTAL_RESULTS))
NOT_NEEDED = rule(
    "not needed: workunit failed", "transitioner", "S0-26 S0-27 S2-18 S4-39 S4-46",
    "the workunit was given up before this copy was sent",
    QUEUED, dict(server_state=S.OVER, outcome=O.DIDNT_NEED))
NO_CHECK = rule(
    "nobody will check", "transitioner", "S4-57",
    "the workunit was given up; its credit shall not show as pending", UNJUDGED,
    dict(validate_state=V.NO_CHECK))
GIVE_UP = rule(
    "hand over the failure", "transitioner", "S0-28 S2-05 S2-18 S4-15",
    "an error bit is set and the application was not told yet",
    dict(assimilate_state={A.INIT}), dict(assimilate_state=A.READY))
RESUME = rule(
    "hand over again", "transitioner", "T5 C23",
    "a deferred assimilation: all copies are over and judged now",
    dict(assimilate_state={A.INIT}), dict(assimilate_state=A.READY))
FREE_INPUT = rule(
    "free inputs", "transitioner", "S0-29 S0-30 S2-07 S2-19 S4-11 S4-32 C17",
    "assimilated, all copies over and judged: nobody will ask for the inputs",
    dict(file_delete_state={F.INIT}), dict(file_delete_state=F.READY))
FREE_OUTPUT = rule(
    "free output", "transitioner", "S0-31 S0-32 S0-33 S4-53 S4-63 C10 C16 C45",
    "assimilated, and this output is not the canonical one",
    dict(server_state={S.OVER}, file_delete_state={F.INIT}), dict(file_delete_state=F.READY))
FREE_CANONICAL = rule(
    "free canonical output", "transitioner", "S4-52 S4-64",
    "assimilated, all copies over and judged: nothing more to compare with it",
    dict(server_state={S.OVER}, file_delete_state={F.INIT}), dict(file_delete_state=F.READY))

# Validator

VALID = rule(
    "valid", "validator", "S0-39 S0-40 S0-44 S2-23 S2-25 S4-55",
    "agrees with the canonical result; credit is granted", REPORTED, dict(validate_state=V.VALID))
INVALID = rule(
    "invalid", "validator", "S0-40 S0-44 S2-25 S4-56", "differs from the canonical result",
    REPORTED, dict(validate_state=V.INVALID))
WRONG = rule(
    "wrong", "validator", "S3-27 S3-33 S3-39", "the application, or a known answer, says so",
    UNJUDGED, dict(validate_state=V.INVALID))
INCONCLUSIVE = rule(
    "inconclusive", "validator", "S4-59", "compared, but no group of results is large enough yet",
    REPORTED, dict(validate_state=V.INCONCLUSIVE))
LOOK_AGAIN = rule(
    "look again", "validator", "V6 C13 C19",
    "the others agree, but this output could not be read just now",
    UNJUDGED, dict(validate_state=V.INIT))
UNREADABLE = rule(
    "unreadable output", "validator", "S4-48 C15",
    "the output is missing or the application cannot read it",
    REPORTED, dict(outcome=O.VALIDATE_ERROR, validate_state=V.INVALID))
CONSENSUS = rule(
    "consensus", "validator", "S0-43 S0-47 S2-22 S2-26 S4-02 S4-16 C20 S3-37 S3-38",
    "enough results agree; one of them is the canonical result",
    dict(assimilate_state={A.INIT}), dict(assimilate_state=A.READY))
LATE_CONSENSUS = rule(
    "consensus after the end", "validator", "S2-36 S4-16 S4-31",
    "as above, but the application was told already and is not told twice",
    dict(assimilate_state={A.READY, A.DONE}), {})
NOT_NEEDED_NOW = rule(
    "not needed: decided", "validator", "S0-48 S2-26 S4-40 S4-47",
    "the canonical result was found before this copy was sent",
    QUEUED, dict(server_state=S.OVER, outcome=O.DIDNT_NEED))
FAIL_SUCCESSES = rule(
    "fail: no consensus", "validator", "S0-22 S0-49 S2-09 S4-26 S4-28 C6 C20",
    "more than max_success_results usable results and still no agreement",
    {}, dict(error_mask=E.TOO_MANY_SUCCESS_RESULTS))
JUDGED = rule(
    "judged", "validator", "S0-36 S0-52 S4-22", "the validator has been here, whatever it found",
    dict(need_validate={False, True}), dict(need_validate=False))

# Assimilator, file deleter, purger, people

FAIL_NO_CANONICAL = rule(
    "fail: nothing to assimilate", "assimilator", "A1",
    "neither an error nor a canonical result that exists",
    {}, dict(error_mask=E.NO_CANONICAL_RESULT))
ASSIMILATED = rule(
    "assimilated", "assimilator", "S0-54 S2-39 S4-17 C23",
    "the application has taken the answer, or the failure",
    dict(assimilate_state={A.READY}), dict(assimilate_state=A.DONE))
DEFERRED = rule(
    "assimilation deferred", "assimilator", "A2 C23",
    "the application wants to be asked again when all copies are in",
    dict(assimilate_state={A.READY}), dict(assimilate_state=A.INIT))
DELETED = rule(
    "files deleted", "file deleter", "S4-12 S4-13 F1 C16",
    "every file is gone; one that was not there counts as deleted",
    dict(file_delete_state={F.READY, F.ERROR}), dict(file_delete_state=F.DONE))
NOT_DELETED = rule(
    "files not deleted", "file deleter", "F2 F3 C16", "the system refused; tried again every hour",
    dict(file_delete_state={F.READY, F.ERROR}), dict(file_delete_state=F.ERROR))
PURGE = rule(
    "purge", "purger", "S4-12 P1 P2 P3", "all is done and archived: the rows go",
    dict(file_delete_state={F.DONE}), {})
CANCEL = rule(
    "cancel", "operator", "C9 C42", "the project's owner does not want it any more",
    {}, dict(error_mask=E.CANCELLED))

# ---- 3. Records --------------------------------------------------------------
#
# Plain peewee models with BOINC's column names. Partial indexes hold only the rows somebody waits
# for, so that a million finished workunits cost a request or a pass nothing. SQLite uses such an
# index only where the query repeats its condition as it stands: hence the constants below.

db = SqliteDatabase(None, lock_type="IMMEDIATE", pragmas={
    "journal_mode": "wal", "synchronous": "full", "foreign_keys": 1, "cache_size": -8000,
    "temp_store": "memory",  # Else what a savepoint may need back is written to files.
}, timeout=30, cached_statements=500)

DUE = SQL("transition_time < 2147483647")
TO_VALIDATE = SQL("need_validate")
TO_ASSIMILATE = SQL("assimilate_state = 1")
UNSENT = SQL("server_state = 2")
IN_PROGRESS = SQL("server_state = 4")
FILES_READY, FILES_GONE, FILES_STUCK = (SQL(f"file_delete_state = {n}") for n in (1, 2, 3))


class Unread(str):
    """The JSON text of a field that nobody has asked for yet: most are never."""


class JSONAccessor(FieldAccessor):
    """Reads the text of a JSONField when it is asked for."""

    def __get__(self, instance, instance_type=None):
        value = super().__get__(instance, instance_type)
        if type(value) is Unread:
            value = instance.__data__[self.name] = json.loads(value)
        return value


class JSONField(TextField):
    """A JSON value, written canonically."""

    accessor_class = JSONAccessor

    def db_value(self, value):
        return None if value is None else canonical_json(value)

    def python_value(self, value):
        return None if value is None else json.loads(value)


def canonical_json(value):
    """Write a JSON value so that equal values give equal text. Raises ValueError, TypeError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False,
                      allow_nan=False)


class Record(Model):
    """Base of all tables: `save_all()` writes only the fields that changed."""

    class Meta:
        database = db
        only_save_dirty = True
        legacy_table_names = False


class Meta(Record):
    """Single values of the store: schema version, sizes of files that grow with it."""

    name = CharField(primary_key=True)
    value = BigIntegerField()


class User(Record):
    """A volunteer: a nickname, or an account with e-mail address and password."""

    create_time = BigIntegerField()
    name = CharField()
    email_addr = CharField(null=True, unique=True)
    passwd_hash = CharField(default="")  # salt and scrypt of BOINC's passwd_hash [WIRE 5]
    authenticator = CharField(unique=True)
    total_credit = FloatField(default=0)
    expavg_credit = FloatField(default=0)  # credit per day, half of it a week old
    expavg_time = FloatField(default=0)


class Host(Record):
    """A client directory on a computer; two clients on one computer are two hosts [D-08]."""

    user = ForeignKeyField(User)
    create_time = BigIntegerField()
    host_cpid = CharField(default="", index=True)
    rpc_time = BigIntegerField(default=0)  # last request
    rpc_seqno = BigIntegerField(default=0)
    work_time = BigIntegerField(default=0)  # last request that was given a chance of work
    domain_name = CharField(default="")
    p_ncpus = IntegerField(default=1)
    p_vendor = CharField(default="")
    p_model = CharField(default="")
    p_fpops = FloatField(default=1e9)  # floating-point operations per second and processor
    m_nbytes = FloatField(default=0)
    d_free = FloatField(default=0)
    d_total = FloatField(default=0)
    os_name = CharField(default="")
    os_version = CharField(default="")
    details = JSONField(default=dict)  # what else the client says of its computer [WIRE 6.1]
    client_version = CharField(default="")
    on_frac = FloatField(default=1)  # share of time the computer is on ...
    active_frac = FloatField(default=1)  # ... and allowed to compute while it is
    total_credit = FloatField(default=0)
    expavg_credit = FloatField(default=0)
    expavg_time = FloatField(default=0)
    avg_turnaround = FloatField(default=0)  # s from sending to report
    why_no_work = TextField(default="")  # what the last request without work was told [D-04]


class App(Record):
    """An application; its code is in plugins/apps, its place in the work generator here."""

    name = CharField(unique=True)
    create_time = BigIntegerField()
    next_number = BigIntegerField(default=0)  # the next i for workunit(i)


class AppVersion(Record):
    """The files of an application for one platform; new content is a new version [WIRE 17]."""

    app = ForeignKeyField(App)
    create_time = BigIntegerField()
    platform = CharField()
    version_num = IntegerField()
    plan_class = CharField(default="")
    files = JSONField()  # [{name, sha256, md5, nbytes}], main: true is run, open_name, boinc
    options = JSONField(default=dict)  # how it is run, and where: see plugins/native_apps.py

    class Meta:
        indexes = ((("app", "platform", "version_num", "plan_class"), True),)


class HostAppVersion(Record):
    """How one host does with one application version: quota and measured speed."""

    host = ForeignKeyField(Host, index=False)
    app_version = ForeignKeyField(AppVersion)
    max_jobs_per_day = IntegerField()  # for each processor; shrinks with errors, and grows again
    n_jobs_today = IntegerField(default=0)
    quota_day = IntegerField(default=0)  # days since the epoch
    consecutive_valid = IntegerField(default=0)
    et_n = IntegerField(default=0)  # reports behind et_avg
    et_avg = FloatField(default=0)  # elapsed seconds per estimated floating-point operation

    class Meta:
        indexes = ((("host", "app_version"), True),)


class Workunit(Record):
    """A task: parameters set at creation, and state fields that only rules change."""

    app = ForeignKeyField(App, index=False)
    name = CharField(unique=True)
    number = BigIntegerField(null=True)  # the i of workunit(i)
    create_time = BigIntegerField()
    mod_time = BigIntegerField(default=0)
    input_files = JSONField()  # [{name, sha256, md5, nbytes}], open_name, sticky: true if shared
    command_line = CharField(default="")  # arguments for a native program
    priority = IntegerField(default=0)
    batch = IntegerField(default=0)
    rsc_fpops_est = FloatField(default=1e9)
    rsc_fpops_bound = FloatField(default=1e12)
    rsc_memory_bound = FloatField(default=2.5e8)  # bytes
    rsc_disk_bound = FloatField(default=1e8)  # bytes
    delay_bound = IntegerField(default=86400)  # s from sending to the deadline
    complexity = FloatField(default=1)  # computing time in the application's units [S3-11 S3-12]
    min_quorum = IntegerField(default=2)
    target_nresults = IntegerField(default=2)
    max_error_results = IntegerField(default=3)
    max_total_results = IntegerField(default=10)
    max_success_results = IntegerField(default=6)
    transitioner_flags = IntegerField(default=0)
    canonical_credit = FloatField(default=0)  # granted to each valid result [S2-04]
    transition_time = BigIntegerField(default=0)  # next look of the transitioner [S0-01 S4-03]
    canonical_resultid = BigIntegerField(default=0)  # 0 = none [S4-01 C35]
    error_mask = IntEnumField(ErrorMask, default=E.NONE)  # [S4-23]
    need_validate = BooleanField(default=False)  # [S4-18 S4-21]
    assimilate_state = IntEnumField(AssimilateState, default=A.INIT)  # [S4-14]
    file_delete_state = IntEnumField(FileDeleteState, default=F.INIT)  # of the inputs [S4-10]


class Result(Record):
    """One copy of a workunit, held by at most one host."""

    workunit = ForeignKeyField(Workunit, backref="results")
    app = ForeignKeyField(App, index=False)
    name = CharField(unique=True)
    create_time = BigIntegerField()
    priority = IntegerField(default=0)
    server_state = IntEnumField(ServerState, default=S.UNSENT)  # [S4-34]
    outcome = IntEnumField(Outcome, default=O.INIT)  # defined once OVER [S4-41]
    client_state = IntegerField(default=0)  # where the client failed [S2-30 S4-50]
    validate_state = IntEnumField(ValidateState, default=V.INIT)  # [S4-54]
    file_delete_state = IntEnumField(FileDeleteState, default=F.INIT)  # of the outputs [S4-51]
    host = ForeignKeyField(Host, null=True, index=False)
    user = ForeignKeyField(User, null=True, index=False)
    app_version = ForeignKeyField(AppVersion, null=True, index=False)
    sent_time = BigIntegerField(default=0)
    report_deadline = BigIntegerField(default=0)  # give up after it [S4-33]; 0 while UNSENT
    received_time = BigIntegerField(default=0)
    exit_status = IntegerField(default=0)
    cpu_time = FloatField(default=0)
    elapsed_time = FloatField(default=0)
    granted_credit = FloatField(default=0)
    output_files = JSONField(null=True)  # [{name}]; None: one file, named after the result
    refusals = JSONField(null=True)  # [[time, hostid, reason]]: hosts too small for it [S0-13]
    stderr_out = TextField(default="")


class SharedFile(Record):
    """Who needs an input file that several workunits share; the last one takes it along."""

    name = CharField()
    workunit = ForeignKeyField(Workunit)

    class Meta:
        indexes = ((("name", "workunit"), True),)


class Firing(Record):
    """How often each rule has fired, for ever: totals that survive the purge and cost no scan."""

    app = ForeignKeyField(App)
    rule = CharField()
    n = BigIntegerField(default=0)

    class Meta:
        indexes = ((("app", "rule"), True),)


TABLES = (Meta, User, Host, App, AppVersion, HostAppVersion, Workunit, Result, SharedFile, Firing)
INDEXES = (
    ("workunit_due", Workunit, (Workunit.transition_time,), DUE),
    ("workunit_to_validate", Workunit, (Workunit.id, Workunit.app), TO_VALIDATE),
    ("workunit_to_assimilate", Workunit, (Workunit.id, Workunit.app), TO_ASSIMILATE),
    ("workunit_files_ready", Workunit, (Workunit.id,), FILES_READY),
    ("workunit_files_stuck", Workunit, (Workunit.id,), FILES_STUCK),
    ("workunit_to_purge", Workunit, (Workunit.mod_time,), FILES_GONE),
    ("result_unsent", Result, (Result.priority.desc(), Result.id, Result.app), UNSENT),
    ("result_held", Result, (Result.host, Result.server_state, Result.app), IN_PROGRESS),
    ("result_of_host", Result, (Result.host, Result.id), SQL("host_id IS NOT NULL")),
    ("result_of_user", Result, (Result.user, Result.id), SQL("user_id IS NOT NULL")),
    ("result_files_ready", Result, (Result.id,), FILES_READY),
    ("result_files_stuck", Result, (Result.id,), FILES_STUCK),
)
for _name, _model, _fields, _where in INDEXES:
    _model.add_index(_model.index(*_fields, where=_where, name=_name))


class prepared:
    """A query whose SQL peewee puts together once, not at each call: most of a request's time.

    Made of build(*values) -> query. Called with values it returns records, with joined ones in
    their places, or tuples. A list is for in_(); its last element is repeated up to a power of 2,
    so that few lengths need to be known; an empty one finds nothing.
    """

    def __init__(self, build):
        self.build, self.known = build, {}  # sizes of lists -> SQL, its parameters, who makes rows

    def __call__(self, *values):
        return list(self.each(*values))

    def first(self, *values):
        """Return the first row, or None."""
        return next(self.each(*values), None)

    def each(self, *values):
        """Return an iterator of rows, which are read from the store as it goes."""
        sizes = tuple([-1 if type(value) is not list else  # no list, or rounded up, or empty
                       1 << (len(value) - 1).bit_length() if value else 0 for value in values])
        if 0 in sizes:
            return iter(())
        sql, order, make = self.known.get(sizes) or self._build(sizes)
        given = []
        for size, value in zip(sizes, values):
            given += [value] if size < 0 else value + value[-1:] * (size - len(value))
        rows = db.connection().execute(sql, [
            value if place is None else given[place] for place, value in order])
        return map(make, rows) if make else rows

    def _build(self, sizes):
        marks = [[object() for _ in range(abs(size))] for size in sizes]
        query = self.build(*([SQL("?", [mark]) for mark in some] if size > 0 else SQL("?", some)
                             for size, some in zip(sizes, marks)))
        sql, params = query.sql()
        place = {mark: i for i, mark in enumerate(sum(marks, []))}
        order = [(place.get(param) if type(param) is object else None, param)
                 for param in params]
        make = None if query._row_type else maker(query.model, query._returning)
        return self.known.setdefault(sizes, (sql, order, make))


def maker(model, fields):
    """Return a function that makes a record of the values of fields, its own and joined ones."""
    own = [f for f in fields if f.model is model]  # They come first.
    names, rest = [f.name for f in own], fields[len(own):]
    special = [(f.name, (lambda text: text and Unread(text)) if isinstance(f, JSONField) else
                functools.lru_cache(None)(f.python_value)) for f in own
               if isinstance(f, (JSONField, IntEnumField, BooleanField))]
    joined = [(key.name, len(own), maker(key.rel_model, rest)) for key in model._meta.refs
              if rest and rest[0].model is key.rel_model]

    def make(values):
        row = model.__new__(model)
        data = row.__data__ = dict(zip(names, values))
        row.__rel__, row._dirty = {}, set()
        for name, convert in special:
            data[name] = convert(data[name])
        for key, start, make_other in joined:
            row.__rel__[key] = make_other(values[start:])
        return row
    return make


users_of, hosts_of, workunits_of = (prepared(lambda ids, model=model: model.select().where(
    model.id.in_(ids))) for model in (User, Host, Workunit))
versions_of = prepared(lambda host_ids: HostAppVersion.select().where(
    HostAppVersion.host.in_(host_ids)))
value_of = prepared(lambda name: Meta.select(Meta.value).where(Meta.name == name).tuples())
results_of = prepared(lambda wu_ids: Result.select().where(Result.workunit.in_(wu_ids))
                      .order_by(Result.workunit, Result.id))
results_named = prepared(lambda names: Result.select(Result, Workunit).join(Workunit)
                         .where(Result.name.in_(names)))
copies_on = prepared(lambda wu_id, host_id: Result.select().where(
    Result.workunit == wu_id, Result.host + 0 == host_id))  # not through all it ever had, either
held_by = prepared(lambda host_id: Result.select(Result, Workunit).join(Workunit).where(
    IN_PROGRESS, Result.host == host_id))  # ORDER BY would walk through all it ever had.


def save_all(rows):
    """Write new rows, which get their ids, and the changed fields of old ones."""
    groups = defaultdict(list)
    for row in rows:
        if row._dirty:
            new = row.__data__.get("id") is None
            groups[type(row), new, tuple(sorted(row._dirty))].append(row)
    for (model, new, names), members in groups.items():
        sql, fields = writing(model, new, names)
        values = [[value if type(value := row.__data__.get(name)) is plain else to_db(value)
                   for name, plain, to_db in fields] for row in members]
        if not new:
            db.connection().executemany(sql, values)
        for row, columns in zip(members, values):
            if new:
                row.__data__["id"] = db.connection().execute(sql, columns).lastrowid
            row._dirty.clear()


@functools.lru_cache(maxsize=1000)
def writing(model, new, names):
    """Return the SQL that writes these fields of a row, and [(name, plain type, db_value())]."""
    fields = [model._meta.fields[name] for name in names if name != "id"]
    table, columns = model._meta.table_name, [f'"{f.column_name}"' for f in fields]
    if new:
        sql = f'INSERT INTO "{table}" ({", ".join(columns)}) ' \
              f'VALUES ({", ".join(db.param * len(columns))})'
    else:
        sql = f'UPDATE "{table}" SET {", ".join(f"{c} = {db.param}" for c in columns)} ' \
              f'WHERE "id" = {db.param}'
        fields.append(model._meta.primary_key)
    plain = {IntegerField: int, BigIntegerField: int, ForeignKeyField: int, FloatField: float,
             CharField: str, TextField: str}  # what needs no db_value(), which is slow
    return sql, [(f.name, plain.get(type(f)), int if isinstance(f, IntEnumField) else f.db_value)
                 for f in fields]


# ---- 4. Store and writer -----------------------------------------------------
#
# All changes happen in one thread [D4]; while a server runs, in that of the network. It takes every
# function and request that waits, runs each in a savepoint of one transaction, commits once with
# synchronous=FULL, and only then answers: no lock errors, no races between reports and stages, one
# fsync for many requests, and nothing that was acknowledged is lost. A function that raises loses
# its own changes only.

SCHEMA_VERSION = 4
MIGRATIONS = {  # version -> SQL statements that make version + 1 of it
    1: ("ALTER TABLE host ADD COLUMN details TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE app_version ADD COLUMN options TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE workunit ADD COLUMN command_line VARCHAR(255) NOT NULL DEFAULT ''",
        "DROP INDEX IF EXISTS result_in_progress"),
    2: ("ALTER TABLE workunit ADD COLUMN complexity REAL NOT NULL DEFAULT 1",),
    3: ()}  # From then on small inputs and outputs are in the store: older releases miss them.


class ClientError(Exception):
    """The volunteer's fault; `status` is the HTTP status that says so."""

    def __init__(self, text, status=400, **details):
        super().__init__(text)
        self.status, self.details = status, details


class PluginError(Exception):
    """The project's fault: names the file, the hook, and what was wanted."""


class StoreError(Exception):
    """The store cannot be opened or cannot take a change just now."""


class Writer:
    """The one writer: a thread of its own, or the server's; without a thread, whoever calls.

    `write(function)` returns what the function returned, after its changes are durable. Raises
    what the function raised, or StoreError if the store refused (disk full, read only).
    """

    def __init__(self):
        self.waiting = queue.SimpleQueue()
        self.thread = self.working = None  # `working`: the thread in the middle of a transaction
        self.inside = False  # a function that was handed to us is running
        self.refused = self.refusal = None  # by the store, in a request; told it before it writes
        self.wake = None  # called when something waits for a thread that lead()s
        self.trouble = ""  # why the last commit failed; empty while all is well

    def start(self):
        """Change the store in a thread of its own from now on."""
        self.wake = None
        self.thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.thread.start()

    def stop(self):
        """Finish what waits, then work in the caller's thread again."""
        if self.thread:
            self.waiting.put(None)
            self.thread.join()
            self.thread = None

    def lead(self, wake):
        """Change the store in the calling thread until start(): it calls work() after `wake()`."""
        self.waiting.put(None)
        self.thread.join()  # Until then others see a thread, and hand in what they want.
        self.thread, self.wake = threading.current_thread(), wake

    def __call__(self, function):
        if self.working is threading.current_thread():
            return function() if self.inside else self._part(function)  # Two changes are one.
        task = concurrent.futures.Future(), function
        if self.thread not in (None, threading.current_thread()):
            self.waiting.put(task)
            if self.wake:
                self.wake()
        else:
            self._commit([task])
        return task[0].result()

    def work(self, requests=(), wait=False):
        """Do what waits, and answer requests, with one commit; return whether to go on.

        A request is a function that calls `write()` for what it changes, and keeps its answer to
        itself until this returns. If the store refuses it is called again: write() raises then.
        """
        tasks = [self.waiting.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while len(tasks) < 64:  # a bound on what one failing commit can take along
                tasks.append(self.waiting.get_nowait())
        work = [task for task in tasks if task] + [(None, request) for request in requests]
        if work:
            self._commit(work)
        return None not in tasks

    def _run(self):
        while self.work(wait=True):
            pass
        db.close()

    def _commit(self, tasks):
        answers, self.done, self.working = [], [], threading.current_thread()
        self.refused = None
        try:
            with db.atomic("IMMEDIATE"):
                for future, function in tasks:
                    if future:
                        answers.append((future, *self._try(function)))
                    else:
                        function()
                    if self.refused:
                        raise self.refused
                count_firings(self.done)
                for note in plugged("at_commit"):
                    note(self.done, project.now)
            self.trouble = ""
        except Exception as error:  # The commit failed: nothing of the group happened. It may be
            # a plugin's bug, but the one writer must live and everybody who waits get an answer.
            if len(tasks) > 1:  # One of them may be to blame: each alone, then.
                return [self._commit([task]) for task in tasks]
            answers, self.done = self._refuse(tasks[0], error), []
        finally:
            self.working = None
        for rule, row in self.done if log.isEnabledFor(logging.INFO) else ():
            log.info("%s %s", label(row), rule if isinstance(rule, str)
                     else f"{rule.by}: {rule.name}")
        for future, value, error in answers:
            future.set_exception(error) if error else future.set_result(value)

    def _refuse(self, task, error):
        """Tell one whose commit has failed; return the answers that are left to give."""
        while isinstance(error.__context__, (DatabaseError, sqlite3.Error)):
            error = error.__context__  # what the failed rollback hides
        known = isinstance(error, (DatabaseError, sqlite3.Error))
        self.trouble = str(error) if known else repr(error)
        refusal = StoreError(f"the server's store cannot be written: {error}") if known else error
        if task[0]:
            return [(task[0], None, refusal)]
        self.refused, self.refusal = None, refusal
        try:
            task[1]()
        except Exception:
            log.exception("a request that was refused")
        finally:
            self.refusal = None
        return []

    def _part(self, function):
        """Run what a request changes; what the store refuses fails the whole transaction."""
        if self.refusal:
            raise self.refusal
        try:
            if self.refused:  # SQLite may have ended the transaction: this would be one of its own.
                raise self.refused
            value, error = self._try(function)
        except (DatabaseError, sqlite3.Error) as error:
            self.refused = error
            raise StoreError("the server's store cannot be written") from error
        if error:
            raise error
        return value

    def _try(self, function):
        """Run one function in its savepoint; return its value and its exception."""
        fired.clear()
        execute, self.inside = db.connection().execute, True
        try:
            execute("SAVEPOINT change")
            try:
                value = function()
            except BaseException:
                execute("ROLLBACK TO change")
                raise
            execute("RELEASE change")
        except Exception as error:
            if isinstance(error, (DatabaseError, sqlite3.Error)) and not isinstance(
                    error, (IntegrityError, sqlite3.IntegrityError)):
                raise  # Full or damaged: the transaction is lost, too.
            return None, error
        finally:
            self.inside = False
        self.done.extend(fired)
        return value, None


def count_firings(done):
    """Add the fired rules of a transaction to the totals of their applications."""
    counts = Counter((row.app_id, rule.name) for rule, row in done
                     if isinstance(rule, Rule) and row.app_id
                     and getattr(row, "number", 0) is not None)  # no policy's own workunits
    for (app_id, name), n in counts.items():
        db.connection().execute(
            "INSERT INTO firing (app_id, rule, n) VALUES (?, ?, ?) ON CONFLICT (app_id, rule) "
            "DO UPDATE SET n = n + excluded.n", (app_id, name, n))


def open_store(path):
    """Open the store, made or migrated where needed. Raises StoreError, with advice."""
    db.init(str(path))
    try:
        tables = db.get_tables() if path.exists() else []
        row = Meta.get_or_none(name="schema") if "meta" in tables else None
        if tables and row is None:
            raise StoreError(f"{path} is no minigrid store: choose another directory with --data")
        version = row.value if row else SCHEMA_VERSION
        if version > SCHEMA_VERSION:
            raise StoreError(f"{path} was made by a newer minigrid (schema {version}, this one "
                             f"knows {SCHEMA_VERSION}): install that one, or use another --data")
        with db.atomic("IMMEDIATE"):
            for step in range(version, SCHEMA_VERSION):
                if step not in MIGRATIONS:
                    raise StoreError(f"{path} has schema {step}, too old for this minigrid: "
                                     f"open it with an older release first")
                for statement in MIGRATIONS[step]:
                    db.execute_sql(statement)
            db.create_tables(TABLES)
            Meta.replace(name="schema", value=SCHEMA_VERSION).execute()
    except DatabaseError as error:
        raise StoreError(f"cannot open {path}: {error}. If the file is damaged, put back the "
                         f"newest copy from {path.parent / 'backup'}") from error


def lock_directory(data):
    """Hold the data directory until this process dies, however it dies. Raises StoreError."""
    # SQLite's own file lock, because it is the same on every system.
    lock = sqlite3.connect(data / "server.lock", timeout=0, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        raise StoreError(f"another minigrid {server_note(data)} works on {data}: stop it first, or "
                         f"choose another directory with --data" if "locked" in str(error) else
                         f"cannot write to {data}: {error}") from None
    return lock


def server_note(data):
    """Say in brackets which process serves a data directory, as it noted itself."""
    try:
        return "(process {pid}, {url})".format(**json.loads((data / "server.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return "(process unknown)"


def append_exactly(path, data):
    """Append bytes to a file as part of the transaction in progress: all or nothing, once."""
    # The store holds the size that is true; what a crash left behind it is cut off here.
    known = value_of.first(f"size of {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if path.exists() else "w+b") as file:
        end, size = file.seek(0, os.SEEK_END), known[0] if known else 0
        if end < size:
            log.warning("%s is shorter than it was: somebody cut or replaced it", path)
        size = file.seek(file.truncate(min(size, end))) + file.write(data)
        file.flush()
        os.fsync(file.fileno())
    db.execute_sql("REPLACE INTO meta (name, value) VALUES (?, ?)", (f"size of {path.name}", size))


# ---- 5. Settings and project -------------------------------------------------


def setting(default, about):
    """One setting with its default and what it means (shown by `minigrid serve --help`)."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Settings:
    """The [minigrid] section of setup.cfg; an unknown key is an error."""

    name: str = setting("minigrid", "name of the project, shown to volunteers")
    data: str = setting("data", "directory of the store and of all files")
    host: str = setting("0.0.0.0", "address to listen on; 127.0.0.1 for this machine only")
    port: int = setting(8080, "port to listen on; 0 takes a free one")
    proxy: str = setting("", "address of a web server in front whose X-Forwarded-* are believed")
    apps: str = setting("plugins/apps", "application files, or directories of them")
    plugins: str = setting(
        "python_apps native_apps generator quorum assimilate checks recheck inverse budget hosts "
        "dispatch sampling trust credit cleanup accounts keys files api trickles boinc pages "
        "status nodes why upkeep pause simulate connections commands", "what to load")
    stock: int = setting(100, "unsent results to keep ready for each application")
    request_delay: float = setting(5, "s a client is asked to wait between requests")
    min_sendwork_interval: float = setting(2, "s between two requests of a host that may get work")
    report_grace_period: int = setting(0, "s after the deadline before a copy is given up [C22]")
    delete_delay: int = setting(0, "s that files stay after the last report [C16]")
    purge_delay: int = setting(7 * 86400, "s that finished workunits stay in the store")
    max_wus_to_send: int = setting(8, "results in one reply, for each processor")
    max_wus_in_progress: int = setting(16, "results that a host may hold, for each processor")
    daily_result_quota: int = setting(1000, "results a day and processor; errors shrink it")
    one_result_per_user_per_wu: bool = setting(False, "no two copies to computers of one user")
    infeasible_max: int = setting(50, "refusals (memory, disk, speed) that end a result")
    resend_lost_results: bool = setting(True, "send again what a client has lost")
    send_result_abort: bool = setting(True, "tell clients to drop what nobody needs [C42]")
    reliable_priority_on_over: int = setting(0, "added priority of repeats [T10]")
    reliable_priority_on_over_except_error: int = setting(0, "the same, unless there was an error")
    max_granted_credit: float = setting(1e6, "no result gets more credit than this")
    upload_bytes_max: int = setting(64 << 20, "largest output that is taken")
    hook_seconds: float = setting(30, "s an application's hook may take on the server")
    backups: int = setting(7, "daily backups to keep; 0 makes none")


def read_settings(path, kind=Settings, section="minigrid", **overrides):
    """Read a section of a file, where there is one, as a dataclass; overrides win [D6].

    A plugin may have a section and a dataclass of its own. Raises ClientError.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ClientError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    given = dict(parser[section]) if parser.has_section(section) else {}
    given.update({key: value for key, value in overrides.items() if value is not None})
    known = {f.name: f.type for f in dataclasses.fields(kind)}
    for key, text in given.items():
        try:
            convert = known[key]
            if convert is bool:
                given[key] = parser.BOOLEAN_STATES[str(text).lower()]
            else:
                given[key] = convert(text)
                assert convert is str or 0 <= given[key] < (65536 if key == "port" else 1e15)
        except (ValueError, KeyError, AssertionError):
            if key not in known:
                raise ClientError(f"{path}: unknown setting '{key}'; known are "
                                  f"{', '.join(known)}") from None
            wanted = {bool: "yes or no", int: "a whole number", float: "a number"}[convert]
            raise ClientError(f"{path}: setting '{key}' must be {wanted}, not negative, not "
                              f"huge; found '{str(text)[:50]}'") from None
    return kind(**given)


class Project:
    """What is open just now: settings, directory, writer, generator, and the passing troubles."""

    def __init__(self):
        self.settings = Settings()
        self.data = Path(self.settings.data)
        self.rng = random.Random(0)
        self.write = Writer()
        self.now = 0  # of the change in progress, or of the last one
        self.lock = None
        self.retry_files_at = 0  # the first pass of a process retries failed deletions [F2]
        self.put_off = {}  # (application name, workunit id) -> not before this time
        self.errors = []  # the last troubles, for the status page: (time, text)
        self.counts = Counter()  # passes, requests, refused requests, errors of stages


project = Project()
apps = {}  # name -> Application: what is served
plugins = []  # the loaded modules of plugins/


def plugged(name):
    """Return what the plugins define under a name, in their order."""
    return [defined[name] for defined in having(name, id(plugins), len(plugins))]


@functools.lru_cache(maxsize=1000)
def having(name, *which):
    """Return what the plugins define that define a name; asked for twenty times in each request."""
    return [vars(plugin) for plugin in plugins if name in vars(plugin)]


def open_project(settings, rng, lock=True):
    """Open data directory and store; make them where there are none. Raises StoreError."""
    close_project()
    having.cache_clear()
    project.__init__()
    project.settings, project.rng, project.data = settings, rng, Path(settings.data)
    try:
        (project.data / "results").mkdir(parents=True, exist_ok=True)
        # All directories now: one that is missing later is a sign of trouble [F3].
        for number in range(512):
            folder = "download" if number < 256 else "upload"
            (project.data / folder / f"{number % 256:02x}").mkdir(parents=True, exist_ok=True)
        if lock:
            project.lock = lock_directory(project.data)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot write to {project.data}: {error}") from None
    open_store(project.data / "minigrid.db")
    db.create_tables(sum(plugged("TABLES"), ()))


def close_project():
    """Finish what waits, write the log of the store back into it, let the directory go."""
    project.write.stop()
    if not db.is_closed():
        db.close()
    if project.lock:
        (project.data / "server.json").unlink(missing_ok=True)
        project.lock.close()
        project.lock = None
    apps.clear()


def remember(now, text):
    """Keep a trouble for status page and log: the operator must not have to search."""
    log.error(text)
    project.errors = project.errors[-19:] + [(now, text)]


# ---- 6. Applications ---------------------------------------------------------
#
# What an application is for the core [S2-01]: parameters, and hooks on bytes. How one is
# found, checked and called (a Python file, native programs) is the business of a loader plugin,
# which bounds the time of its hooks and turns what they raise into a PluginError [D6].

PARAMETERS = {  # workunit parameter -> type
    **dict.fromkeys(("priority", "delay_bound", "min_quorum", "target_nresults",
                     "max_error_results", "max_total_results", "max_success_results"), int),
    **dict.fromkeys(("rsc_fpops_est", "rsc_fpops_bound", "rsc_memory_bound", "rsc_disk_bound",
                     "complexity", "credit"), float),
}
FAULTS_MAX = 20  # workunits put off before the whole application is
ALL, GENERATOR = 0, -1  # in the place of a workunit's id: all of an application, its workunit(i)


@dataclass
class Application:
    """A loaded application and its rows in the store.

    Its hooks: workunit(i) -> {"input": bytes, parameters} or None; parse(bytes) -> answer;
    compare(a, b) -> do they agree?; check_set(answers) -> index of the canonical one or None, or
    (index, credit), itself None where answers vote; assimilate(told, bytes or None) -> JSON text,
    None or "defer".
    """

    name: str
    path: Path
    about: str
    hooks: dict
    parameters: dict  # defaults for its workunits
    judge: Callable  # the validation policy: (wu, results, application) -> Verdict
    policies: dict = field(default_factory=dict)  # constants of its file that plugins know
    id: int = 0
    versions: list = field(default_factory=list)  # its AppVersions of today, all platforms
    drained: bool = False  # it had no more to give when the generator last asked


def sync_apps(paths, now):
    """Load applications from files and directories; return the faults, which stop no other."""
    faults = []
    for path in map(Path, paths):
        found = [(p, file) for p in plugins if hasattr(p, "find") for file in p.find(path)]
        if not found:
            faults.append(f"{path}: there is no application here")
        for loader, file in found:
            try:
                application = loader.load(file)
                if apps.get(application.name, application).path != application.path:
                    raise PluginError(f"{file}: there is an application '{application.name}' "
                                      f"already: {apps[application.name].path}")
                project.write(lambda: enter_app(loader, application, now))
                apps[application.name] = application
            except (PluginError, OSError) as error:
                faults.append(str(error))
    for fault in faults:
        remember(now, fault)
    return faults


def enter_app(loader, application, now):
    """Enter an application, and its version if that is new. Runs in the writer."""
    row, _ = App.get_or_create(name=application.name, defaults={"create_time": now})
    loader.enter(application, row, now)
    application.id = row.id


def put_off(application, wu_id, now, error, seconds=RETRY_SECONDS):
    """Let what an application failed on wait for six hours; too much of it stops all of it."""
    # In memory only: whoever has mended the file starts the server again, and need not wait.
    remember(now, str(error))
    project.put_off[application.name, wu_id] = now + RETRY_SECONDS
    if sum(name == application.name for name, _ in project.put_off) > FAULTS_MAX:
        project.put_off[application.name, ALL] = now + seconds
        remember(now, f"{application.path}: failed on {FAULTS_MAX} workunits; put off for "
                      f"{seconds // 60} min, or until the server is started again")


def working(now):
    """Return the applications whose hooks may be called: {id: Application}."""
    for key, until in list(project.put_off.items()):
        if until <= now:
            project.put_off.pop(key, None)
    return {a.id: a for a in apps.values() if (a.name, ALL) not in project.put_off}


# ---- 7. Work and files -------------------------------------------------------

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")


def file_path(folder, name):
    """Return where a file lies: data/<folder>/<two hex digits>/<name> [D13].

    Raises ClientError for a name that is none; so nothing from outside becomes a path unchecked.
    """
    return Path(place_of(folder, name))


def place_of(folder, name):
    """Return what file_path() does as a text, in a fifth of the time."""
    if not FILE_NAME.fullmatch(name):
        raise ClientError(f"'{name[:80]}' is not a file name of this project", 404)
    return f"{project.data}/{folder}/{hashlib.md5(name.encode()).hexdigest()[:2]}/{name}"


def store_file(folder, name, content):
    """Write a file that survives a power cut, or none: temporary name, flush, rename."""
    store_files(folder, {name: content})


def store_files(folder, contents):
    """Write files, {name: bytes}, as store_file() does; together they take half the time."""
    paths = [place_of(folder, name) for name in contents]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(f"{path}.new", "wb")) for path in paths]
        for file, content in zip(files, contents.values()):
            file.write(content)
            file.flush()
        for file in files:
            os.fsync(file.fileno())
    settle_files([(f"{path}.new", path) for path in paths])


def file_entry(name, content, **more):
    """Describe a file as rows keep it, with the sums of both protocols [WIRE 7.4]."""
    return dict(name=name, sha256=hashlib.sha256(content).hexdigest(),
                md5=hashlib.md5(content).hexdigest(), nbytes=len(content), **more)


def settle(temporary, path):
    """Give a complete file its name, and make the name itself survive a power cut."""
    settle_files([(temporary, path)])


def settle_files(files):
    """Do so with many: [(temporary, path)]."""
    for temporary, path in files:
        os.replace(temporary, path)
    for folder in sorted({os.path.dirname(path) for _, path in files}):
        if hasattr(os, "O_DIRECTORY"):  # Windows cannot flush a directory and need not.
            handle = os.open(folder, os.O_DIRECTORY)
            os.fsync(handle)
            os.close(handle)


def output_files(result):
    """Return the output files of a result: [{name, no_delete?}]."""
    files = result.output_files
    return [{"name": f"{result.name}_out"}] if files is None else files


# ---- 8. Scheduler ------------------------------------------------------------


@dataclass
class Report:
    """What a host says about one finished result [WIRE 6.2]."""

    name: str
    client_state: int = 0  # 5 = outputs uploaded
    exit_status: int = 0
    cpu_time: float = 0  # s
    elapsed_time: float = 0  # s
    peak_memory: float = 0  # bytes
    stderr_out: str = ""


@dataclass
class Request:
    """One request of a host: reports, what it holds, what it wants [D5, WIRE 6]."""

    authenticator: str
    hostid: int = 0  # 0 = none yet [C35]
    rpc_seqno: int = 0  # a lower one than last time means a copied client directory
    host_cpid: str = ""  # made by the client, one for each of its directories
    allow_multiple_clients: bool = False
    host: dict = field(default_factory=dict)  # columns of Host that clients may set
    platforms: list = field(default_factory=lambda: ["python"])  # the best first
    client_version: str = ""
    work_req_seconds: float = 0  # 0 = no work wanted
    cpu_req_instances: float = 0  # idle processors to fill
    estimated_delay: float = 0  # s until what the host holds is done
    reports: list = field(default_factory=list)  # of Report
    other_results: list = None  # names of results it holds; None: it does not say
    trickles: list = field(default_factory=list)  # messages of running jobs: {result, time, text}
    versions: dict = None  # {app id: [AppVersion]} it may get; None: all of its platforms
    more: object = None  # of a protocol's plugin, for its at_contact(); may have why_not(version)


@dataclass
class Reply:
    """The answer to a Request [WIRE 7]."""

    hostid: int = 0
    userid: int = 0
    project_name: str = ""
    server_time: int = 0
    request_delay: float = 0  # s; 0 = none asked [C35]
    messages: list = field(default_factory=list)  # [{priority: low | notice, text}]
    acks: list = field(default_factory=list)  # names to forget
    aborts: list = field(default_factory=list)  # names to stop now [C42]
    aborts_if_not_started: list = field(default_factory=list)
    assignments: list = field(default_factory=list)  # as the dispatch policy describes them
    trickles: list = field(default_factory=list)  # messages for running jobs: {result, time, text}
    trickles_taken: bool = False  # those of the request need not be sent again
    user_total_credit: float = 0
    host_total_credit: float = 0


HOST_FIELDS = {name: Host._meta.fields[name] for name in (  # what clients tell of theirs
    "domain_name p_ncpus p_vendor p_model p_fpops m_nbytes d_free d_total os_name os_version "
    "on_frac active_frac details").split()}


def schedule(request, now):
    """Serve one request: take reports, tell what to drop, hand out work [S2-27..S2-34, D8].

    Runs in the writer: all it changes is saved together, and nothing if it raises.
    """
    settings = project.settings
    reply = Reply(project_name=settings.name, server_time=now, request_delay=settings.request_delay)
    user = plugged("user_of_key")[-1](request.authenticator)
    if user is None:
        reply.request_delay = 3600  # Refused clients do not stop by themselves [WIRE 17].
        return say_to(reply, "this project does not know your account key; join again", "notice")
    project.now = now
    host, detached = plugged("identify")[-1](request, user, now)
    reply.hostid, reply.userid, changed = host.id, user.id, [host] + detached
    if why := next(filter(None, (refuse(host, now) for refuse in plugged("refused"))), ""):
        reply.request_delay = 86400  # as BOINC's clients know it [C36]
        host.why_no_work = why
        save_all(changed)
        return say_to(reply, why, "notice")
    reply.user_total_credit, reply.host_total_credit = user.total_credit, host.total_credit
    versions = {v.app_version_id: v for v in versions_of([host.id])}
    lost_some = take_reports(request, reply, host, versions, changed, now)
    save_all(changed[1:])  # What follows asks the store for them, and must see it.
    held = sorted(held_by(host.id), key=lambda r: r.id)
    (look_at_held,) = plugged("look_at_held")
    look_at_held(request, reply, host, versions, held, lost_some, changed, now)
    if request.work_req_seconds > 0:
        if now - host.work_time < settings.min_sendwork_interval:
            wait = host.work_time + settings.min_sendwork_interval - now
            say_to(reply, f"last request too recent: work is given again in {wait:g} s")
            reply.request_delay = max(reply.request_delay, wait)
        else:
            host.work_time = now
            plugged("give_work")[-1](request, reply, host, versions, len(held), changed, now)
    for look in plugged("at_contact"):
        look(request, reply, user, host, now)
    host.rpc_time = now
    save_all(changed + list(versions.values()))
    return reply


def say_to(reply, text, priority="low"):
    """Add a message in plain words to a reply; return the reply."""
    reply.messages.append({"priority": priority, "text": text})
    return reply


def take_reports(request, reply, host, versions, changed, now):
    """Record what the host reports; say whether some of it was reported before [C43]."""
    # Every name is acknowledged, or the client repeats it for ever.
    names = [report.name for report in request.reports]
    rows = {r.name: r for r in results_named(names)}
    units, twice = {}, False
    for report in request.reports:
        reply.acks.append(report.name)
        r = rows.get(report.name)
        if r is None:
            say_to(reply, f"{report.name} is not known here (any more)")
        elif r.user_id != host.user_id or r.server_state in (S.UNSENT, S.INACTIVE):
            say_to(reply, f"{report.name} was never sent to you; ignored")
        elif r.received_time or (r.server_state == S.OVER and r.outcome != O.NO_REPLY):
            twice = True  # Also a detached host's: decided one way, here [C11].
        else:
            handed_on = r.host_id != host.id and r.workunit_id not in units \
                and not copies_on(r.workunit_id, host.id)
            r.__rel__["workunit"] = units.setdefault(r.workunit_id, r.workunit)  # Not two rows.
            if handed_on:  # Its user's other host reports it [C43]; no two copies on one.
                for take_note in plugged("handed_on"):
                    take_note(r, host, now)
                r.host = host.id
            receive(r, report, host, versions, now)
            changed += [r, r.workunit]
    return twice


def receive(r, report, host, versions, now):
    """Apply one report to its result [S0-05..S0-09 S2-30 S2-31 C11]."""
    # That the output has really arrived is the validator's to find out: it opens it [WIRE 17.7].
    late, good = r.server_state == S.OVER, report.client_state == 5 and report.exit_status == 0
    if good:
        fire(LATE_SUCCESS if late else SUCCESS, r)
    else:
        fire(LATE_ERROR if late else CLIENT_ERROR, r)
    r.client_state, r.exit_status = report.client_state, report.exit_status  # [S2-30 S4-50]
    r.received_time = now
    r.elapsed_time = min(max(report.elapsed_time, 0), max(now - r.sent_time, 0))  # [C34]
    r.cpu_time = max(report.cpu_time, 0)
    r.stderr_out = "" if good else report.stderr_out[-16384:]
    r.workunit.transition_time = now  # [S0-09 S0-12 S0-14 S4-04]
    weight = 0.3 if host.avg_turnaround else 1
    host.avg_turnaround += weight * (now - r.sent_time - host.avg_turnaround)
    if r.app_version_id in versions:
        plugged("learn")[-1](versions[r.app_version_id], r, good)


def send(r, wu, host, version, now):
    """Give a result to a host [S0-03 S0-04 S2-27..S2-29 S4-05 S4-33 S4-35 C22]."""
    fire(SEND, r)
    r.host, r.user, r.app_version = host.id, host.user_id, version.id
    r.sent_time = now
    r.report_deadline = now + wu.delay_bound + project.settings.report_grace_period
    wu.transition_time = min(wu.transition_time, r.report_deadline)


# ---- 9. Transitioner ---------------------------------------------------------


def is_error(r):
    """Say whether a result counts against max_error_results; not if its user aborted it [C7]."""
    return r.server_state == S.OVER and (
        r.outcome == O.VALIDATE_ERROR or (r.outcome == O.CLIENT_ERROR and r.exit_status != 203))


def is_usable(r):
    """Say whether a result may still take part in a consensus [C19]."""
    return (r.server_state == S.OVER and r.outcome == O.SUCCESS and r.validate_state != V.INVALID)


def transition(wu, results, now):
    """Apply the transitioner's rules to a workunit and all its results in memory [S0-14..S0-35].

    What timed out? Is there something to validate, has the workunit failed, how many copies does
    it need, whose files may go, when to look again? Returns the new results, unsaved.
    """
    for r in results:
        if r.server_state == S.IN_PROGRESS and r.report_deadline < now:  # strictly [C2]
            fire(TIME_OUT, r)
    canonical = next((r for r in results if r.id == wu.canonical_resultid), None)
    new_success = [r for r in results if is_usable(r) and r.validate_state == V.INIT]
    if canonical and canonical.file_delete_state == F.DONE:
        for r in new_success:
            fire(TOO_LATE, r)
    elif new_success and sum(map(is_usable, results)) >= wu.min_quorum:
        fire(NEED_VALIDATE, wu)
    if any(r.server_state == S.OVER and r.outcome == O.COULDNT_SEND for r in results):
        fire(FAIL_UNSENDABLE, wu)
    if sum(map(is_error, results)) > wu.max_error_results:  # [C6]
        fire(FAIL_ERRORS, wu)
    new = make_results(wu, results, now)
    if wu.error_mask:
        abandon(wu, results)
    elif canonical and wu.assimilate_state == A.INIT and all_settled(results, now):
        fire(RESUME, wu)
    if wu.assimilate_state == A.DONE:
        free_files(wu, results, canonical, now)
    wu.transition_time = next_look(wu, results, now)
    return new


def make_results(wu, results, now):
    """Make the copies a workunit needs, never above max_total_results [C4 C5 C39]."""
    room = wu.max_total_results - len(results)
    if room < 0:
        fire(FAIL_TOTAL, wu)  # [S0-23] as it stands: somebody lowered the limit.
    waiting = sum(r.server_state != S.OVER for r in results)
    needed = wu.target_nresults - waiting - sum(map(is_usable, results))
    if needed <= 0 or wu.error_mask or wu.canonical_resultid:
        return []
    if room <= 0:
        fire(FAIL_TOTAL, wu)
        return []
    if wu.transitioner_flags & NO_NEW_RESULTS:  # [T9]
        return []
    taken = [int(r.name.rpartition("_")[2]) for r in results]
    first, priority = max(taken, default=-1) + 1, wu.priority + repeat_priority(results)
    new = [Result(workunit=wu.id, app=wu.app_id, name=f"{wu.name}_{first + k}", create_time=now,
                  priority=priority) for k in range(min(needed, room))]
    for r in new:
        fire(NEW_RESULT, r)
    return new


def repeat_priority(results):
    """Return how much more urgent a repeat is than a first copy [T10]."""
    settings = project.settings
    if not any(r.server_state == S.OVER for r in results):
        return 0
    return settings.reliable_priority_on_over or (
        0 if any(map(is_error, results)) else settings.reliable_priority_on_over_except_error)


def abandon(wu, results):
    """Let go of the copies of a failed workunit and hand the failure over [S0-26..S0-28 C42]."""
    for r in results:
        if r.server_state in (S.UNSENT, S.INACTIVE):
            fire(NOT_NEEDED, r)
        elif is_usable(r) and r.validate_state in (V.INIT, V.INCONCLUSIVE):
            fire(NO_CHECK, r)
    if wu.assimilate_state == A.INIT:
        fire(GIVE_UP, wu)


def all_settled(results, now):
    """Say whether no report can come that would still need inputs or a canonical output [C17]."""
    # A copy that was given up early, when it was lost, is waited for until its deadline.
    return all(r.server_state == S.OVER
               and not (r.outcome == O.NO_REPLY and r.report_deadline > now)
               and not (r.outcome == O.SUCCESS and r.validate_state == V.INIT) for r in results)


def free_files(wu, results, canonical, now):
    """Mark the files of an assimilated workunit that nobody needs any more [C10 C16 C17 C44]."""
    if not files_free_at(results) <= now:
        return
    settled = all_settled(results, now)
    if settled and wu.file_delete_state == F.INIT:
        fire(FREE_INPUT, wu)
    for r in results:
        has_output = r.outcome in (O.CLIENT_ERROR, O.VALIDATE_ERROR) \
            or (r.outcome == O.SUCCESS and r.validate_state != V.INIT)
        if r.server_state != S.OVER or r.file_delete_state != F.INIT or not has_output:
            continue  # Never computed: no files [T2]; what came unasked goes with the purge [P2].
        if r is not canonical:
            fire(FREE_OUTPUT, r)
        elif settled:
            fire(FREE_CANONICAL, r)


def files_free_at(results):
    """Return when files may go: delete_delay after the last report [T7]."""
    last = max((r.received_time for r in results), default=0)
    return last + project.settings.delete_delay


def next_look(wu, results, now):
    """Return the next transition_time: the earliest deadline, or what else will wake it [C1].

    NEVER only when nothing can happen without a report [S0-34 S4-06 S4-30 S4-61 C9].
    """
    times = [r.report_deadline for r in results if r.server_state == S.IN_PROGRESS]
    if times and min(times) < now:  # Not after the time-outs above; kept for a clock set back.
        return now + min(max(2 * (now - min(times)), 60), 86400)
    if not times and not wu.canonical_resultid and not wu.error_mask:
        times.append(now + max(10 * 86400, int(1.5 * wu.delay_bound)))  # the safety net
    if wu.assimilate_state == A.DONE and files_free_at(results) > now:
        times.append(files_free_at(results))
    return min(times, default=NEVER)


# ---- 10. Validator -----------------------------------------------------------


@dataclass
class Verdict:
    """What the application says of the outputs of a workunit; no state was changed yet."""

    seen: set = field(default_factory=set)  # ids of the results looked at
    unreadable: set = field(default_factory=set)
    wrong: set = field(default_factory=set)  # whatever the others say
    pending: set = field(default_factory=set)  # need no other copy, but another's check
    unchecked: set = field(default_factory=set)  # accepted with nothing to compare them with
    groups: list = field(default_factory=list)  # of sets: who agrees with whom
    unsure: set = field(default_factory=set)  # a transient failure: look again later
    matching: set = field(default_factory=set)  # agree with the canonical result
    late: set = field(default_factory=set)  # cannot be compared: the canonical output is lost
    canonical: int = 0  # found now; 0 = none
    credit: float = None  # for each valid copy; None: as the workunit says
    credit_why: str = ""  # in words
    known: bool = False  # compared with an answer known beforehand, not with each other


def candidates(results, decided):
    """Return the results a validator looks at: stragglers, or all that may form a consensus.

    INIT and INCONCLUSIVE ones are compared again with each new result, VALID ones count [C19].
    """
    states = {V.INIT, V.INCONCLUSIVE} if decided else {V.INIT, V.INCONCLUSIVE, V.VALID}
    return [r for r in results if is_usable(r) and r.validate_state in states]


def validate(wu, results, verdict, hosts, now):
    """Apply the rules that follow from a verdict to one workunit in memory [S0-36..S0-52]."""
    # `hosts` maps result ids to (host, user, host's app version), who are rewarded. Results that
    # came after the verdict are left as they are, and the transitioner is told to look at once.
    decided = any(r.id == wu.canonical_resultid for r in results)
    todo = candidates(results, decided)
    looked_at = [r for r in todo if r.id in verdict.seen]
    before = {r.id: r.validate_state for r in looked_at}
    for r in looked_at:
        if r.id in verdict.unreadable | verdict.wrong:
            fire(UNREADABLE if r.id in verdict.unreadable else WRONG, r)
    good = [r for r in looked_at if r.id not in verdict.unreadable | verdict.wrong]
    missed = len(looked_at) < len(todo)
    wake = missed or len(good) < len(looked_at)  # [S4-07 S4-08 S0-51]
    if decided:
        for r in good:
            if r.id in verdict.late:
                fire(TOO_LATE, r)  # not its fault [V9]
            elif r.id not in verdict.unsure:
                settle_result(r, wu, verdict)
        wake = missed or not verdict.unsure and bool(looked_at)  # [S0-41]
        if verdict.unsure:
            wu.transition_time = min(wu.transition_time, now + RETRY_SECONDS)  # [C13]
    elif verdict.canonical:
        accept(wu, results, good, verdict, now)
        wake = missed
    elif len(looked_at) >= wu.min_quorum:
        wake |= disagree(wu, good, verdict, now)
    if wake:
        wu.transition_time = now  # [S0-51 C13]
    fire(JUDGED, wu)
    judged = [r for r in looked_at if r.id in hosts
              and r.validate_state in {V.VALID, V.INVALID} - {before[r.id]}]
    for learn in plugged("at_verdict"):  # Last of all: no rule can fail any more, nothing is given
        learn(wu, judged, verdict, hosts, now)  # twice.


def accept(wu, results, good, verdict, now):
    """Settle a workunit that has found its canonical result [S0-43..S0-48 C13]."""
    wu.canonical_resultid = verdict.canonical
    credit = wu.canonical_credit if verdict.credit is None else verdict.credit
    wu.canonical_credit = min(max(credit, 0), project.settings.max_granted_credit)
    for r in good:
        if r.id in verdict.unsure:
            fire(LOOK_AGAIN, r)
        else:
            settle_result(r, wu, verdict)
    fire(CONSENSUS if wu.assimilate_state == A.INIT else LATE_CONSENSUS, wu)
    for r in results:
        if r.server_state in (S.UNSENT, S.INACTIVE):
            fire(NOT_NEEDED_NOW, r)
    # The assimilator wakes the transitioner [C13]; an unsure result must be looked at again [V6].
    wu.transition_time = now + RETRY_SECONDS if verdict.unsure else NEVER


def disagree(wu, good, verdict, now):
    """Ask for one more copy, or give up; return whether to look at once [S0-50 S4-09 C20 C21]."""
    for r in good:
        fire(INCONCLUSIVE, r)
    if verdict.pending:
        return False
    if verdict.unsure:
        wu.transition_time = min(wu.transition_time, now + RETRY_SECONDS)  # [C13]
    if len(good) < wu.target_nresults and len(good) <= wu.max_success_results:
        return False  # More copies are under way.
    if len(good) < min(wu.max_success_results, wu.max_total_results):
        wu.target_nresults = len(good) + 1  # [C21]
    else:  # No further copy is allowed, so no answer will ever come [S4-29 V4].
        fire(FAIL_SUCCESSES, wu)
    return True


def settle_result(r, wu, verdict):
    """Call a result valid, with its credit, or invalid [S0-39 S0-40 S0-45 S2-04 S2-25]."""
    match = r.id in verdict.matching
    fire(VALID if match else INVALID, r)
    if match and wu.canonical_credit > 0 and project.settings.max_granted_credit:
        r.granted_credit = wu.canonical_credit  # as accept() has bounded it: the same for all


# ---- 11. Stages --------------------------------------------------------------
#
# A stage finds workunits, calls plugins and touches files outside of the writer, and applies rules
# to rows read inside the transaction that saves them: reports arrive meanwhile. Its chunks are
# small, so that no volunteer waits long, and limited, so that no pass is endless.

CHUNK = 50  # workunits in one transaction: some ten milliseconds
CHUNKS_MAX = 40  # of one stage in one pass, so that every stage has its turn
NOT_NOW = object()  # what a stage's work returns for a workunit that it leaves for the next pass


def load(ids):
    """Read workunits with their results in the order of ids: [(wu, results)] (golden hazard 2)."""
    units = {wu.id: (wu, []) for wu in workunits_of(ids)}
    for r in results_of(list(units)):
        units[r.workunit_id][1].append(r)
    return [units[i] for i in ids if i in units]


def change(units, still, act, now):
    """Apply act(wu, results) -> new rows to workunits read now, if still(wu); save what changed.

    `units` are their ids, or what load() has returned for these in the same transaction. One that
    raises is put off alone: none of its changes are saved. Runs in the writer.
    """
    rows, done, project.now = [], 0, now
    for wu, results in load(units) if units and isinstance(units[0], int) else units:
        if not still(wu):
            continue
        mark = len(fired)
        try:
            extra = act(wu, results) or []
        except Exception as error:
            del fired[mark:]
            project.counts["stage errors"] += 1
            remember(now, f"{label(wu)} {wu.name}: {error!r}: please report this as a bug")
            later = project.put_off[str(wu.app_id), wu.id] = now + RETRY_SECONDS
            look = min([later, *(r.report_deadline for r in results  # [S0-34]
                                 if r.server_state == S.IN_PROGRESS and r.report_deadline > now)])
            Workunit.update(transition_time=look).where(Workunit.id == wu.id).execute()
            continue
        changed = [row for row in (wu, *results, *extra) if row.dirty_fields]
        if changed:
            wu.mod_time = now
            rows += [wu, *changed]
            done += 1
    save_all(dict.fromkeys(rows))
    return done


def chunks(rows):
    """Return the ids in the first columns of rows, in chunks; as many as one pass may handle."""
    ids = [row[0] for row in rows]
    return [ids[i:i + CHUNK] for i in range(0, len(ids), CHUNK)]


def waiting(condition, now, *more):
    """Find the ids of workunits that wait for a stage of their application."""
    served = list(working(now))  # drops what was put off until now
    off = [wu_id for _, wu_id in list(project.put_off) if wu_id > 0]
    find = to_validate if condition is TO_VALIDATE else to_assimilate
    return find.build(served).where(Workunit.id.not_in(off), *more) if off or more else find(served)


to_validate, to_assimilate = (prepared(lambda served, condition=condition: Workunit.select(
    Workunit.id).where(condition, Workunit.app.in_(served)).order_by(Workunit.id)
    .limit(CHUNK * CHUNKS_MAX).tuples()) for condition in (TO_VALIDATE, TO_ASSIMILATE))
due = prepared(lambda now: Workunit.select(Workunit.id).where(
    DUE, Workunit.transition_time < now, Workunit.transitioner_flags.bin_and(NO_TRANSITION) == 0)
    .order_by(Workunit.transition_time, Workunit.id).limit(CHUNK * CHUNKS_MAX).tuples())  # [T9]


def transitioner(now):
    """Stage: handle every workunit whose transition_time is past [S0-15 S2-13 C8 C40]."""
    return sum(project.write(lambda: change(
        ids, lambda wu: wu.transition_time < now,
        lambda wu, results: transition(wu, results, now), now)) for ids in chunks(due(now)))


def validator(now):
    """Stage: settle the workunits that have results to compare [S0-36 S2-25]."""
    return work_off(TO_VALIDATE, lambda wu, results, application: application.judge(
        wu, results, application), settle_all, now)


def work_off(condition, work, settle, now, *more):
    """Let applications work on what waits, outside of the writer; settle it in the writer."""
    # work(wu, results, application) reads only; settle({wu id: what it returned}, now) changes
    # rows read anew. A workunit an application fails on is put off alone.
    done = 0
    for ids in chunks(waiting(condition, now, *more)):
        found = {}
        for wu, results in load(ids):
            application = working(now).get(wu.app_id)  # None: put off by one of these just now
            try:
                value = work(wu, results, application) if application else NOT_NOW
                if value is not NOT_NOW:
                    found[wu.id] = value
            except Exception as error:  # A hook, or a file that is missing or damaged.
                put_off(application, wu.id, now, f"{wu.name}: {error}",
                        getattr(error, "seconds", RETRY_SECONDS))
        done += project.write(lambda: settle(found, now))
    return done


def settle_all(verdicts, now):
    """Apply verdicts to rows read now, and reward hosts and users. Runs in the writer."""
    units = load(list(verdicts))
    reported = [r for _, results in units for r in results]
    # Each host, user and version is one row, however many results it has.
    hosts = {host.id: host for host in hosts_of(list({r.host_id for r in reported}))}
    users = {user.id: user for user in users_of(list({r.user_id for r in reported}))}
    versions = {(v.host_id, v.app_version_id): v for v in versions_of(list(hosts))}

    def settle_one(wu, results):
        validate(wu, results, verdicts[wu.id], {
            r.id: (hosts.get(r.host_id), users.get(r.user_id),
                   versions.get((r.host_id, r.app_version_id))) for r in results}, now)

    done = change(units, lambda wu: wu.need_validate, settle_one, now)
    return save_all([*hosts.values(), *users.values(), *versions.values()]) or done


STAGES = (transitioner, validator)


def all_stages():
    """Return the stages in their sequence: work, the core's, then the others' (files, purge)."""
    return sum(plugged("STAGES"), sum(plugged("FIRST_STAGES"), ()) + STAGES)


def run_pass(now, stages=None):
    """Run all stages once, in sequence; return how many workunits each has handled [S2-12 D7].

    A stage that fails is logged, counted and shown, and does not stop the others.
    """
    done = {}
    for stage in stages or all_stages():
        try:
            done[stage.__name__] = stage(now)
        except StoreError as error:  # Full or read only: nothing is half done; try again.
            remember(now, str(error))
            break
        except Exception as error:
            project.counts["stage errors"] += 1
            log.exception("%s failed", stage.__name__)
            remember(now, f"{stage.__name__}: {error!r}")
    project.counts["passes"] += 1
    return done


def run_passes(clock, jobs):
    """Run passes until one has left nothing over, or the server stops."""
    while max(run_pass(clock()).values(), default=0) >= CHUNK * CHUNKS_MAX and jobs.running:
        pass


# ---- 12. HTTP ----------------------------------------------------------------
#
# A route parses, calls one function, serialises: the business of plugins. What is common to all is
# here: errors become one plain sentence, whoever asks and whatever went wrong.


def make_app(clock):
    """Return the Bottle application with the routes of all plugins; `clock()` gives `now`."""
    app = bottle.Bottle()
    app.install(lambda route: answer_errors(route, clock))
    app.default_error_handler = unknown_address
    for routes in plugged("routes"):
        routes(app, clock)
    return app


def answer_errors(route, clock):
    """Turn what a route raises into an answer that says whose fault it is [DESIGN 5]."""
    @functools.wraps(route)
    def answer(*args, **kwargs):
        project.counts["requests"] += 1
        try:
            return route(*args, **kwargs)
        except ClientError as error:
            project.counts["refused requests"] += 1
            return http_error(error.status, str(error), **error.details)
        except StoreError as error:
            return http_error(503, f"{error}; your work is not lost, try again later")
        except bottle.HTTPResponse:
            raise
        except Exception as error:
            log.exception("%s %s", bottle.request.method, bottle.request.path)
            remember(clock(), f"{bottle.request.method} {bottle.request.path[:80]}: {error!r}")
            project.counts["server errors"] += 1
            return http_error(500, "the server has a problem on its side; try again later")
    return answer


def http_error(status, text, **details):
    """Answer with {"error": text} as JSON; `retry_after` is told in a header, too."""
    body, later = json.dumps({"error": str(text), **details}), details.get("retry_after")
    headers = {"Retry-After": str(later)} if later else {}
    return bottle.HTTPResponse(body, status, headers, Content_Type="application/json")


def unknown_address(error):
    """Answer what no route has taken; never as HTML, for it repeats what was asked."""
    bottle.response.content_type = "application/json"
    return http_error(error.status_code, error.body).body


def base_url():
    """Return how the asking client sees this server: addresses may change [D5, boinc#5946]."""
    asked = bottle.request.environ  # Not .urlparts, which is slow: it quotes the path, too.
    host = re.fullmatch(r"[\w.:\[\]-]{1,255}", asked.get("HTTP_HOST", ""))
    return f"{asked['wsgi.url_scheme']}://{host[0]}" if host else ""


# ---- 13. Process and command line --------------------------------------------


def wall_clock():
    """Read the only clock there is, the server's, in whole seconds UTC [S0-02 C34]."""
    return int(time.time())


def load_plugins(names):
    """Load the modules of plugins/ that a project uses. Raises PluginError.

    A plugin has some of: routes(app, clock), commands(subparsers), hourly(now), STAGES, TABLES;
    user_of_key(), identify(), give_work() ...; VALIDATION, find(), load(), enter(); listen().
    """
    here = Path(__file__).resolve().parent
    for name in names:
        found = [path for folder in ("plugins", "minigrid_plugins") for path in (
            here / folder / f"{name}.py", here / folder / name / "__init__.py") if path.exists()]
        if not re.fullmatch(r"\w+", name) or not found:
            raise PluginError(f"there is no plugin '{name}' in plugins/")
        spec = importlib.util.spec_from_file_location(f"minigrid_plugin_{name}", found[0])
        plugin = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = plugin  # where its dataclasses look for it
        spec.loader.exec_module(plugin)
        plugins.append(plugin)


@contextlib.contextmanager
def running(settings, paths, clock=wall_clock):
    """Run a server; yield its address; stop it cleanly. Raises StoreError, ClientError."""
    if not plugged("listen"):
        raise PluginError("nothing here serves HTTP: add the plugin connections to 'plugins'")
    open_project(settings, random.SystemRandom())
    server = jobs = None
    try:
        project.write.start()
        sync_apps(paths, clock())
        server = plugged("listen")[-1](make_app(clock), settings)
        note = {"pid": os.getpid(), "url": f"http://127.0.0.1:{server.port}"}
        (project.data / "server.json").write_text(json.dumps(note))
        server.start()
        run_pass(clock(), all_stages()[:1])  # The first volunteer shall not wait for a pass.
        jobs = BackgroundScheduler(timezone="UTC", executors={"default": ThreadPoolExecutor(1)})
        common = dict(coalesce=True, max_instances=1, misfire_grace_time=None,  # [D7]
                      next_run_time=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))  # at once
        jobs.add_job(lambda: run_passes(clock, jobs), "interval", seconds=1, **common)
        for work in plugged("hourly"):
            jobs.add_job(lambda work=work: work(clock()), "interval", hours=1, **common)
        jobs.start()
        yield note["url"]
    finally:
        if jobs:  # first: its passes need the server's thread to write
            jobs.shutdown(wait=True)
        if server:
            server.stop()
        close_project()


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="minigrid", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=f"minigrid {__version__}")
    try:
        settings = read_settings("setup.cfg")
        load_plugins(settings.plugins.split())
        commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for add in plugged("commands"):
            add(commands)
        options = parser.parse_args(arguments)
        return options.run(options) or 0
    except (ClientError, PluginError, StoreError) as error:
        print(f"minigrid: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):  # Whoever read our output has gone.
        return 130


if __name__ == "__main__":
    sys.modules["minigrid"] = sys.modules["__main__"]  # or plugins would import a second copy
    sys.exit(main())
