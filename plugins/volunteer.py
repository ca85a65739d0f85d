#!/usr/bin/env python3
"""volunteer: gives this computer's spare time to minigrid servers. One file, no installation.

    python3 volunteer.py http://192.168.1.5:8080

joins the project there, fetches jobs ("results" on the server), checks every file, runs each job in
a process of its own, uploads the output, reports, and asks for more. Several projects share the
computer by their resource shares. All it keeps is in one directory, so it may be stopped or killed
at any moment: the next start goes on from there.

1. Clock and randomness    delays: how long to wait after what
2. State                   what survives the process: State, Project, Job; the lock
3. Policy                  which project to talk to, when, what to say; how to take its answers
4. Signatures              the project's key, and what it has signed
5. Transport               HTTP: JSON, downloads and uploads that resume
6. Harness                 the program that runs inside a job's process
7. Tasks                   slots, processes, bounds
8. View                    what people see: messages, the terminal, a page on loopback
9. Client                  step(now): one turn of everything
10. Command line

Sections 1, 3 and 4 do no I/O: `now` (seconds, the client's clock) and the random generator are
parameters. All state changes in the main thread; transfers and processes are waited for in
threads that only bring back an outcome. Rule ids ([C30], [S1-15]) are those of RULES.md.
"""

import argparse
import base64
import collections
import contextlib
import email.utils
import errno
import functools
import hashlib
import html
import html.parser
import http.client
import http.server
import io
import ipaddress
import itertools
import json
import marshal
import math
import os
import platform
import queue
import random
import re
import secrets
import shutil
import signal
import socket
import socketserver
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
import urllib.parse
import urllib.request
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path

try:
    import ssl
except ImportError:  # Some Pythons are built without it.
    ssl = None

VERSION = "minigrid 0.6.0"

# ---- 1. Clock and randomness -------------------------------------------------

DELAY_MIN, DELAY_MAX = 60.0, 4 * 3600.0  # seconds [C30]
IDLE_DELAY_MAX = 60.0  # asking a server that has no work,
IDLE_LONG = 15  # and so many times longer when it had none for hours
CLOCK_JUMP = 60.0  # a clock set back by more than this makes all waiting void [C34]

ADJECTIVES = "blue brave bright calm clever eager gentle happy jolly kind lucky quick".split()
ANIMALS = "badger beaver crane dolphin falcon fox heron lynx marten otter owl raven".split()


def backoff(n_failures, rng):
    """Seconds to wait after the n-th failure in a row: doubling, and spread so that clients of a
    server that comes back do not all call at once [S1-04 S1-37 C30]."""
    ceiling = min(DELAY_MAX, DELAY_MIN * 2 ** min(n_failures, 10))
    return ceiling * (0.5 + 0.5 * rng.random())


def transfer_delay(n_failures, rng):
    """Seconds to wait after the n-th failure of a file transfer: a lost connection often is just
    that, so the first retry comes soon; after it, `backoff`."""
    return 1.0 + rng.random() if n_failures <= 1 else backoff(n_failures - 1, rng)


def idle_delay(n_empty, request_delay, rng):
    """Seconds to wait after the n-th reply without work [C29]: quick at first, so that a class sees
    new work arrive; then a minute, and in hours without work up to a quarter of an hour. Never less
    than what the server asked for."""
    ceiling = min(IDLE_DELAY_MAX, 2.0 ** min(n_empty - 1, 10))
    ceiling *= max(1, min(IDLE_LONG, n_empty // 60))
    return max(request_delay, ceiling * (0.5 + 0.5 * rng.random()))


def friendly_name(rng):
    """Make a nickname that says nothing about its owner: the login name is nobody's business."""
    return "%s-%s-%d" % (rng.choice(ADJECTIVES), rng.choice(ANIMALS), rng.randrange(10, 100))


def measure_fpops(seconds=0.2, cpu_time=time.process_time):
    """Measure Python-level floating point operations per second. CPU time, so that several
    clients started at once on one machine do not slow down each other's measure."""
    start, n, x = cpu_time(), 0, 1.0
    while cpu_time() - start < seconds:
        for _ in range(5000):
            x = x * 0.999 + 0.5
        n += 10000
    return n / (cpu_time() - start)


# ---- 2. State ----------------------------------------------------------------


class ClientState(IntEnum):
    """What has become of a job here; BOINC's numbers, sent in reports."""

    NEW = 0
    DOWNLOADING = 1  # with `over`: the download failed
    READY = 2  # all files here and checked; waiting or running
    COMPUTE_ERROR = 3
    UPLOADING = 4
    UPLOADED = 5
    ABORTED = 6
    UPLOAD_FAILED = 7


C = ClientState

EXIT_DOWNLOAD, EXIT_UPLOAD = -186, -187
EXIT_UNSTARTED_LATE = 200
EXIT_CHILD_FAILED, EXIT_TIME, EXIT_DISK, EXIT_MEMORY = 195, 197, 196, 198
EXIT_ABORTED_BY_PROJECT, EXIT_ABORTED_BY_USER = 202, 203


@dataclass(eq=False)
class Job:
    """One result held by this client: the server's assignment and what became of it."""

    name: str
    workunit: str = ""
    app: str = ""
    about: str = ""
    app_version: int = 0
    platform: str = "python"  # or BOINC's name of the one a native program is for
    ncpus: float = 1.0  # processors it keeps busy
    command_line: str = ""  # arguments of a native program
    files: list = field(default_factory=list)  # of dicts: name, url, sha256, nbytes, main ...
    input: dict = field(default_factory=dict)  # name, url, sha256, nbytes
    inputs: list = field(default_factory=list)  # further input files, shared by several jobs
    output: dict = field(default_factory=dict)  # name, url, nbytes_max
    report_deadline: float = 0.0  # seconds, the server's clock; see local_deadline()
    delay_bound: float = 0.0  # seconds that it was given until then
    rsc_fpops_est: float = 1e9
    rsc_fpops_bound: float = 1e13
    rsc_memory_bound: float = 5e8  # bytes
    rsc_disk_bound: float = 1e8  # bytes
    client_state: int = C.NEW
    over: bool = False  # nothing left to do but to report it
    slot: int = -1  # directory slots/<n> while started; its checkpoint outlives the process
    exit_status: int = 0
    stderr_out: str = ""
    cpu_time: float = 0.0
    elapsed_time: float = 0.0
    peak_memory: int = 0
    fraction_done: float = 0.0
    ended_at: float = 0.0  # when computing ended, client's clock
    upload_begun: bool = False  # the server may hold a part: ask before sending
    received: float = 0.0  # when it came; 0: nobody knows
    stuck_since: float = 0.0  # its files cannot be transferred since then; 0: they can
    nbytes: int = -1  # of its output, once that is there
    trickles: list = field(default_factory=list)  # of dicts: time, text; not yet acknowledged
    n_trickles: int = 0  # trickle_up files taken so far: a number is never taken twice
    trickle_time: int = 0  # of the last message; no two of a job are of one second
    down: list = field(default_factory=list)  # texts for it that came while it was not running
    n_down: int = 0  # trickle_down files written so far

    project = None  # the Project it is of; no field, for it is not saved with the job
    n_damaged = 0  # times that one of its files had to be fetched again; not saved

    @property
    def to_compute(self):
        return not self.over and self.client_state in (C.NEW, C.DOWNLOADING, C.READY)

    @property
    def downloads(self):
        return self.files + self.inputs + ([self.input] if self.input else [])


@dataclass(eq=False)
class Project:
    """One project and how we stand with it."""

    url: str  # its front page, and the first address of its scheduler
    folder: str = "."  # where its files are, below the client's directory
    addresses: list = field(default_factory=list)  # of its scheduler; tried in this order [S1-22]
    resource_share: float = 100.0
    resting: bool = False  # not named at the last start: neither asked nor computed for
    nickname: str = ""
    email_addr: str = ""
    authenticator: str = ""
    userid: int = 0
    hostid: int = 0  # 0: none yet [C35]
    rpc_seqno: int = 0  # number of the last request sent under this hostid
    key: str = ""  # public key by which its files must be signed; "": none seen yet [D11]
    name: str = ""
    exp_avg_cpu: float = 0.0  # seconds of processors given to it, fading by e per week [S1-07]
    avg_time: float = 0.0  # when exp_avg_cpu was brought up to date
    n_rpc_failures: int = 0
    n_master_failures: int = 0  # in a row
    fetch_master: bool = False  # read its front page again [S1-26]
    min_rpc_time: float = 0.0  # no request before this; 0: at once [S1-11 S1-12]
    request_delay: float = 0.0  # what the server asked for last
    n_empty: int = 0  # replies without work in a row
    work_time: float = 0.0  # no request for work before this; reports may go
    trickle_time: float = 0.0  # no request just for the messages of jobs before this
    n_bad_batches: int = 0  # batches of jobs in a row of which none succeeded [S1-15]
    batch_failed: bool = False
    clock_offset: float = 0.0  # server's clock minus ours [C34]
    correction: float = 0.0  # real seconds per estimated second; 0: nothing finished yet
    typical: float = 0.0  # estimated seconds of the job that came last
    n_reported: int = 0  # finished jobs that the server has acknowledged
    n_failed: int = 0  # of these, without success
    credit: float = 0.0
    trouble: str = ""  # why the last request failed, or what the server said instead of work
    jobs: list = field(default_factory=list)

    fatal = ""  # why there is no point in asking it in this run; no field, for it is not saved

    def adopt(self, job):
        """Take a job among ours; it knows its project from then on."""
        job.project = self
        self.jobs.append(job)


@dataclass
class State:
    """All that survives the process: `client.json` in the client's directory."""

    projects: list = field(default_factory=list)
    host_cpid: str = ""  # made once per directory, so that clones can be told apart
    p_fpops: float = 0.0
    saved_at: float = 0.0


def revive(kind, data):
    """Build a dataclass from JSON; unknown keys are dropped, so that versions may differ. TypeError
    for a value of a wrong type: people edit files, and here it still can be said."""
    known = {f.name: data[f.name] for f in fields(kind) if f.name in data}
    for f in fields(kind):
        value = known.get(f.name, 0.0 if f.type is float else f.type())
        good = number(value, -1e300, 1e300, None) is not None if f.type is float else (
            type(value) is f.type)
        if not good:
            raise TypeError("%s is no %s" % (f.name, f.type.__name__))
    return kind(**known)


def write_safely(path, data):
    """Write a file so that after a power cut either the old or the new content is there."""
    temporary = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as f:  # It holds the authenticator.
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # On a full disk a part of it helps nobody.
        raise


def plain_fields(record, **instead):
    """The fields of a dataclass as JSON values, some replaced."""
    return dict({f.name: getattr(record, f.name) for f in fields(record)}, **instead)


def save_state(state, directory):
    """Keep the state as JSON. Raises OSError, e.g. when the disk is full."""
    projects = [plain_fields(project, jobs=[plain_fields(job) for job in project.jobs])
                for project in state.projects]
    text = json.dumps(plain_fields(state, projects=projects))
    write_safely(directory / "client.json", text.encode())


def load_state(directory):
    """Read what save_state() kept; None if there is nothing (or nothing readable: set aside)."""
    path = directory / "client.json"
    try:
        data = json.loads(path.read_bytes())
        if "project" in data:  # of a client that knew one project only
            data["projects"] = [data["project"]]
        state = revive(State, dict(data, projects=[]))
        for kept in data["projects"]:
            project = revive(Project, dict(kept, jobs=[]))
            for job in kept["jobs"]:
                project.adopt(revive(Job, job))
                localise(project.jobs[-1], project.url)
            state.projects.append(project)
        return state
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        os.replace(path, path.with_name("client.json.bad"))
        return None


def lock(path):
    """Lock a file, made if need be, and return the open file that holds the lock; None if another
    process has it. The system lets go of it when the process dies, however it dies. Raises OSError
    if there are no locks there, as on some network drives."""
    f = open(path, "a+b")
    try:
        if os.name == "nt":
            import msvcrt

            f.seek(0)
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        f.close()
        if e.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        return None
    return f


# ---- 3. Policy ---------------------------------------------------------------

JOBS_PER_CPU_MAX = 32  # held at once, whatever the estimates say
BUNDLE_SECONDS = 1.0  # how long a finished job waits for others to be reported with,
BUNDLE_LONG = 600.0  # and longer by a tenth of its own time, up to this
SETTLE_SECONDS = 0.5  # a request for work waits this long for an upload that is under way
REPORT_BYTES_MAX = 256 * 1024  # stderr in one request; what does not fit goes with the next
STDERR_CHARS = 64 * 1024  # of a failed job are kept, the last ones
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")  # devices on Windows
SLOT_NAMES = {"in", "out", "output", "stdout.txt", "stderr.txt", "job.json", "done.json",
              "progress.txt", "fraction_done", "checkpoint", "checkpoint.json"}
FILES_MAX = 1000  # of one job
JOBS_KEPT_PER_CPU = 4 * JOBS_PER_CPU_MAX  # of one project, finished ones too
FILES_KEPT_PER_CPU = 10 * JOBS_KEPT_PER_CPU  # of these jobs together
STDERR_KEPT = 4 * 1024 * 1024  # characters, of all finished jobs of a project
DOWN_KEPT = 4 * 1024 * 1024  # characters, of all texts that wait for a project's jobs
NEWS_MAX = 10  # messages of one reply that are shown
URL_CHARS = 2000
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".dll", ".exe", ".dylib", ".bat", ".cmd", ".pth")
TRICKLE_BYTES = 32768  # of one message of a job; longer ones are cut
TRICKLES_HELD = 100  # messages of a job that wait here, in each direction; more wait in its slot
NATIVE_SPEED = 100.0  # floating-point operations of a native program for each one of Python


EXP_DECAY_RATE = 1 / (7 * 86400.0)  # per second: a factor of e per week [S1-08 C24]
MASTER_FETCH_PERIOD = 10  # every tenth failure the front page is read again [S1-26 C26]
MASTER_FETCH_TRIES = 3  # failures of that in a row, and then it is tried
MASTER_FETCH_INTERVAL = 86400.0  # s; BOINC's client waits two weeks, but hobbyists' machines sleep
ADDRESSES_MAX = 10  # of one project
OVERDUE_MARGIN = 60.0  # s before its deadline a report becomes urgent
SLOW_SECONDS, SLOW_MAX, SLOW_FACTOR = 30.0, 300.0, 4  # see rest_after()
WAIT_MAX = 7 * 86400.0  # s; what a server may ask for at most
STALL_SECONDS = 60.0  # of failing, or
FETCH_SECONDS = 600.0  # of fetching, after which a job's files are not expected soon
HURRY_FACTOR, HURRY_SECONDS = 4.0, 86400.0  # see may_hurry()
NCPUS_MIN = 0.25  # of a job: whoever says it needs none must not run a hundred at once
MARK_MAX = 8 * 3600.0  # s; a server that asks for days of calm does not get days of work


@dataclass
class Limits:
    """What the policy has to know beside the projects."""

    n_cpus: int
    p_fpops: float
    room: float = math.inf  # jobs we still want, beside those held
    report_wait: float = BUNDLE_SECONDS
    leaving: bool = False  # the client is about to exit: only report
    low_water: float = 0.0  # seconds of work per processor [S1-33]; 0: as the server's delay says
    high_water: float = 0.0  # the same [S1-20]


@dataclass
class Request:
    """What a request to the scheduler says."""

    reports: list
    work_req_seconds: float = 0.0
    cpu_req_instances: int = 0
    estimated_delay: float = 0.0
    trickles: list = field(default_factory=list)  # of pairs: job, message

    @property
    def asks(self):
        return self.work_req_seconds > 0 or self.cpu_req_instances > 0


@dataclass
class Action:
    """One thing to do over the network: "join", "rpc" to the scheduler, or "master"."""

    kind: str
    project: Project
    url: str  # the address, without the path
    request: Request = None


# -- shares


def devote(project, seconds, now):
    """Note that a processor has worked so many seconds for a project [S1-07]."""
    project.exp_avg_cpu = faded(project, now) + seconds
    project.avg_time = now


def faded(project, now):
    """Return exp_avg_cpu as it is now: without work it falls by a factor of e per week [C24]."""
    return project.exp_avg_cpu * math.exp(-max(0.0, now - project.avg_time) * EXP_DECAY_RATE)


def resource_debt(project, now, pledged=0.0):
    """Return what can be sorted: how much work we owe a project [S1-09 S1-10]. Never served is
    infinite debt, ties go by share [C24]; a share of 0 has work only when no other project has,
    and several of them take turns. `pledged` are seconds that jobs running now will still take."""
    share, given = project.resource_share, faded(project, now) + pledged
    debt = 0.0 if share <= 0 else share / given if given > 0 else math.inf
    return debt, share, -given


# -- estimates


def local_deadline(job, project):
    """The job's deadline by the client's clock [C34]."""
    return job.report_deadline - project.clock_offset


def by_deadline(jobs):
    """Earliest deadline first; sorted() is stable, so equal ones stay as they came."""
    return sorted(jobs, key=lambda job: job.report_deadline)


def speed(job, p_fpops):
    """Operations a second of this job's kind. `p_fpops` is measured in Python, and applications
    of native programs count what those do."""
    if job.platform == "python":
        return max(p_fpops, 1.0)
    return max(p_fpops, 1.0) * NATIVE_SPEED * job.ncpus


def estimate(job, p_fpops):
    """Seconds the project thinks this job takes here."""
    return job.rsc_fpops_est / speed(job, p_fpops)


def remaining(job, project, p_fpops):
    """Estimate the seconds until the job is done, from its own progress if it tells."""
    if job.fraction_done > 0.05:
        return job.elapsed_time * (1 - job.fraction_done) / job.fraction_done
    total = estimate(job, p_fpops) * (project.correction or 1.0)
    return max(total - job.elapsed_time, 0.05 * total)


def learn(job, project, p_fpops):
    """Correct the estimates by a job that has succeeded: up at once, since too much work is worse
    than too little, down step by step."""
    ratio = min(1e4, max(1e-4, job.elapsed_time / max(estimate(job, p_fpops), 1e-9)))
    old = project.correction
    project.correction = ratio if ratio >= old or not old else 0.7 * old + 0.3 * ratio


def water_marks(project, limits):
    """Low and high mark of the queue, in seconds of work per processor [S1-20 S1-33 C33]. They grow
    with the delay the server asks for: a big server wants few requests, a class quick ones. A
    project without a share gets no queue, only processors that are idle."""
    if project.resource_share <= 0:
        return 0.0, 0.0
    low = limits.low_water or max(10.0, min(MARK_MAX, 2 * project.request_delay))
    return low, max(low, limits.high_water or 3 * low)


@dataclass
class Queue:
    """The work that is here, of all projects: how long it lasts, not how many jobs [S1-36]."""

    loads: list  # seconds until each processor has nothing left to do, estimated
    seconds: float  # the work in all, of one processor
    room: float  # how many more jobs may be held

    @property
    def idle(self):
        """Processors without a job."""
        return self.loads.count(0.0)

    def missing(self, mark):
        """Seconds of work until all processors are busy for as long as a water mark."""
        return sum(max(0.0, mark - load) for load in self.loads)


def stalled(job, now):
    """Do the files of this job not come? Then no processor waits for it."""
    return job.to_compute and job.client_state != C.READY and (
        0 < job.stuck_since < now - STALL_SECONDS or 0 < job.received < now - FETCH_SECONDS)


def waits_for_files(project, limits, now):
    """Are so many jobs of a project stalled that it makes no sense to fetch more of them?"""
    return sum(stalled(job, now) for job in project.jobs) >= limits.n_cpus


def owed(project, queue, limits, now):
    """Has a project no work here though the jobs of others will last for longer than any queue
    should? Then it is asked all the same: these estimates may be mistaken, or lies. Whose turn it
    is is decided by debt, when the processors are given away."""
    long = max(MARK_MAX, 2 * limits.low_water, 2 * limits.high_water)
    return min(queue.loads) > long and not any(
        job.to_compute and not stalled(job, now) for job in project.jobs)


def queue_of(projects, limits, now=0.0):
    """Add up the work that is here. A resting project's jobs keep no processor busy; those that
    only wait for files or their upload take no room, or one project that is down would starve the
    others. Nor does it take more than its part of the room."""
    active = [p for p in projects if not p.resting]
    held = [[job for job in p.jobs if job.to_compute and not stalled(job, now)] for p in active]
    part = held_max(limits) / max(1, len(active))
    to_compute = [job for jobs in held for job in jobs]
    room = min(limits.room, held_max(limits) - sum(min(part, len(jobs)) for jobs in held))
    loads, seconds = [0.0] * limits.n_cpus, 0.0
    for job in sorted(to_compute, key=lambda job: job.slot < 0):  # What has begun comes first.
        left = remaining(job, job.project, limits.p_fpops) or 1e-6
        seconds += left
        n = min(limits.n_cpus, max(1, round(job.ncpus)))
        loads.sort()
        loads[:n] = [loads[n - 1] + left] * n  # It waits until so many are free at once.
    return Queue(loads, seconds, room)


def held_max(limits):
    """How many jobs are held at once, whatever the estimates say; not counting finished ones."""
    return JOBS_PER_CPU_MAX * limits.n_cpus


# -- sessions


def may_call(project, now):
    """Is it time for a request to this project [S1-11 C27]?"""
    return not project.fatal and project.min_rpc_time <= now


def next_for_work(projects, limits, now):
    """The project with the greatest resource debt among those that may be asked [S1-21]. One that
    cannot take back so many jobs as it gave has to wait; one without a share is not asked while
    another is expected to have work, though it may not be asked this very moment."""
    active = [p for p in projects if not p.resting and not p.fatal
              and sum(not job.over for job in p.jobs) < held_max(limits)]
    hopeful = any(p.resource_share > 0 and not p.n_empty and not p.n_rpc_failures
                  and max(p.min_rpc_time, p.work_time) <= now + DELAY_MIN for p in active)
    ready = [p for p in active if p.authenticator and may_call(p, now) and p.work_time <= now
             and len(p.jobs) < JOBS_KEPT_PER_CPU * limits.n_cpus
             and not waits_for_files(p, limits, now)
             and (p.resource_share > 0 or not hopeful)]
    return max(ready, key=lambda p: resource_debt(p, now), default=None)


def settling(project, now):
    """Is an upload about to end? Its report then goes with the request that asks for more."""
    return any(job.client_state == C.UPLOADING and now - job.ended_at < SETTLE_SECONDS
               for job in project.jobs)


def has_reports(project, queue, limits, now):
    """Should this project hear from us now [S1-34]? Reports wait a moment to be bundled [S1-03],
    but not beyond their deadlines [S1-06], and not while a processor has nothing to do."""
    at_once = limits.leaving or queue.idle and not settling(project, now)
    due = any(at_once or now - job.ended_at >= report_wait(job, limits) or is_overdue(job, now)
              for job in project.jobs if job.over)
    return due or project.trickle_time <= now and any(job.trickles for job in project.jobs)


def report_wait(job, limits):
    """Seconds that a finished job waits for others: a job of hours may wait for minutes."""
    if not limits.report_wait:
        return 0.0
    return max(limits.report_wait, min(BUNDLE_LONG, job.elapsed_time / 10))


def is_overdue(job, now):
    """Is the deadline of this finished job past, or nearly [S1-34], by our clock [C34]?"""
    return job.over and local_deadline(job, job.project) < now + OVERDUE_MARGIN


class SchedulerOp:
    """Sessions with schedulers: a state machine that does no I/O [S1-17 S1-19].

    poll() says what to do next; whoever does it tells the outcome by succeeded() or failed(). One
    thing is under way at a time [S1-32]. A session is "join", "get-work", "report-result" [S1-18],
    or "master", which reads the front pages of projects whose addresses all fail [S1-05]."""

    def __init__(self, rng):
        self.rng = rng
        self.session, self.action = "", None  # action: what is under way
        self.left = []  # addresses of the action's project that were not tried yet [S1-22]
        self.online = False  # one of the others has shown that it is not our network [C31]
        self.master_time = 0.0  # no front page is read before this
        self.began = 0.0  # when the first of the addresses was tried

    def poll(self, projects, limits, now):
        """The next Action, or None: nothing to do now."""
        if self.action:
            return None
        queue = queue_of(projects, limits, now)
        if self.left:
            return self._go(self.last, queue, projects, limits, now)
        if not self.session:
            self.session = self._begin(projects, queue, limits, now)
        if self.session == "get-work":
            project = self._worth_asking(projects, queue, limits, now)
            if project:
                return self._go(("rpc", project, True), queue, projects, limits, now)
            self.session = "master"
        if self.session == "master":
            for project in projects:  # Resting ones as well: they may have reports.
                if self._may_read(project, limits, now):
                    self.action, self.began = Action("master", project, project.url), now
                    return self.action
            self.session = ""
        if self.session == "join":
            project = next(p for p in projects if self._may_join(p, limits, now))
            return self._go(("join", project, False), queue, projects, limits, now)
        if self.session == "report-result":
            project = next_to_report(projects, queue, limits, now)
            asks = project is next_for_work(projects, limits, now)  # [S1-35]
            return self._go(("rpc", project, asks), queue, projects, limits, now)
        return None

    def _begin(self, projects, queue, limits, now):
        """Which session is due [S1-33 S1-34]."""
        if any(self._may_join(p, limits, now) for p in projects):
            return "join"
        project = next_for_work(projects, limits, now)
        if project and not limits.leaving and queue.room >= 1 and not settling(project, now):
            # By its own marks, as in _worth_asking(): one that ends at once would begin for ever.
            if (queue.idle or queue.missing(water_marks(project, limits)[0])
                    or owed(project, queue, limits, now)):
                return "get-work"
        if next_to_report(projects, queue, limits, now):
            return "report-result"
        return "master" if any(self._may_read(p, limits, now) for p in projects) else ""

    def _may_read(self, project, limits, now):
        return (project.fetch_master and not project.fatal and not limits.leaving
                and self.master_time <= now)

    @staticmethod
    def _may_join(project, limits, now):
        return (not project.authenticator and not project.resting and not limits.leaving
                and may_call(project, now))

    @staticmethod
    def _worth_asking(projects, queue, limits, now):
        """The project to ask for work, None when the high-water mark is reached [S1-20]."""
        project = next_for_work(projects, limits, now)
        if not project or limits.leaving or queue.room < 1:
            return None
        high = water_marks(project, limits)[1]
        return project if (queue.idle or queue.missing(high)
                           or owed(project, queue, limits, now)) else None

    def _go(self, what, queue, projects, limits, now):
        kind, project, asks = self.last = what
        if not self.left:
            self.left, self.online, self.began = addresses_of(project), False, now
        request = None
        if kind == "rpc":
            request = make_request(project, queue, limits, now, asks)
        self.action = Action(kind, project, self.left.pop(0), request)
        return self.action

    def succeeded(self):
        """The action went well: this address is the first to be tried from now on."""
        action, self.action, self.left = self.action, None, []
        if action.kind != "master":
            action.project.addresses = merged([action.url], addresses_of(action.project))
        self._end()

    def failed(self, now, least=0.0, network_down=False, final=False):
        """The action failed. When no address of the project is left, that is one failure [S1-24],
        and True is returned. `least` are seconds that the server wants us to stay away at least;
        `final`: other addresses will not say anything else."""
        action, self.action = self.action, None
        self.online = self.online or not network_down
        if self.left and action.kind != "master" and not final:
            return False
        self.left = []
        if network_down and (action.kind == "master" or not self.online):
            # Nobody's fault, and over soon: it does not count [C31].
            wait = now + DELAY_MIN * (1 + self.rng.random())
            if action.kind == "master":
                self.master_time = wait
            else:
                action.project.min_rpc_time = wait
        else:
            least = max(least, rest_after(now - self.began, ADDRESSES_MAX))
            take_failure(action.project, now, self.rng, least, action.kind == "master")
        self._end()
        return True

    def _end(self):
        """A session for one project is over; get-work goes on with others [S1-20 S1-27]."""
        if self.session in ("join", "report-result"):
            self.session = ""


def next_to_report(projects, queue, limits, now):
    """The project to report to, None if none has to be: overdue results first [S1-34]."""
    ready = [p for p in projects if p.authenticator and may_call(p, now)
             and has_reports(p, queue, limits, now)]
    return min(ready, key=lambda p: min(
        [local_deadline(job, p) for job in p.jobs if job.over], default=math.inf), default=None)


def make_request(project, queue, limits, now, asks):
    """Say what is to be said to a project. One request reports and asks at once [S1-01]; it asks
    for what is missing to the high-water mark of all work [S1-20 S1-35]. No side effects."""
    waiting = sorted((job for job in project.jobs if job.over),
                     key=lambda job: not is_overdue(job, now))  # Overdue ones first, then as ended.
    request = Request(first_reports(waiting), estimated_delay=queue.seconds / limits.n_cpus,
                      trickles=first_trickles(project.jobs))
    missing = queue.missing(water_marks(project, limits)[1])
    if asks and not limits.leaving and queue.room >= 1 and (
            queue.idle or missing > 0 or owed(project, queue, limits, now)):
        # Real seconds, for the server has learnt from our reports how long its jobs take here, as
        # we have. `room` keeps bad estimates from filling the disk.
        wanted = max(missing, 1.0)
        if project.typical or limits.room <= queue.room:
            typical = (project.typical or 1.0) * max(1.0, project.correction)
            wanted = min(wanted, queue.room * typical)
        request.work_req_seconds = max(wanted, 1e-3)
        request.cpu_req_instances = int(min(queue.idle, queue.room))
    return request


def addresses_of(project):
    """The addresses of a project's scheduler, without the path."""
    return list(project.addresses) or [project.url]


def merged(first, then):
    """Two lists as one, each address once."""
    return list(dict.fromkeys(first + then))[:ADDRESSES_MAX]


def first_reports(waiting):
    """The reports that fit into one request; at least one."""
    chosen, nbytes = [], 0
    for job in waiting:
        nbytes += len(job.stderr_out.encode(errors="replace")) + 200
        if chosen and nbytes > REPORT_BYTES_MAX:
            break
        chosen.append(job)
    return chosen


def first_trickles(jobs):
    """The messages of jobs that fit into one request, as pairs of job and message."""
    chosen, nbytes = [], 0
    for job in jobs:
        for message in job.trickles:
            nbytes += len(message["text"].encode(errors="replace")) + 200
            if nbytes > REPORT_BYTES_MAX or len(chosen) >= TRICKLES_HELD:
                return chosen
            chosen.append((job, message))
    return chosen


def body_of(request, project, state, host, platforms=("python",)):
    """The request as the JSON the server wants. Counts it: rpc_seqno goes up with every request
    under a host id, also if the reply gets lost; without a host id it is 0 [C35]."""
    project.rpc_seqno = project.rpc_seqno + 1 if project.hostid else 0
    reported = {job.name for job in request.reports}
    keys = ("name", "exit_status", "client_state", "cpu_time", "elapsed_time", "stderr_out",
            "peak_memory", "app_version")
    return {
        "authenticator": project.authenticator,
        "hostid": project.hostid,
        "rpc_seqno": project.rpc_seqno,
        "host_cpid": state.host_cpid,
        "allow_multiple_clients": True,
        "host": dict(host, domain_name=project.nickname, p_fpops=state.p_fpops),
        "platforms": list(platforms),
        "client_version": VERSION,
        "work_req_seconds": round(request.work_req_seconds, 3),
        "cpu_req_instances": request.cpu_req_instances,
        "estimated_delay": round(request.estimated_delay, 3),
        "reports": [{key: getattr(job, key) for key in keys} for job in request.reports],
        "other_results": [job.name for job in project.jobs if job.name not in reported],
        "trickles": [dict(message, result=job.name) for job, message in request.trickles],
        "signing_key": fingerprint(project.key) if project.key else "",
    }


def take_failure(project, now, rng, least=0.0, master=False):
    """Note that a request to all addresses of a project failed, or one for its front page: back off
    [S1-14 S1-24 S1-25 S1-28 S1-30 C25]; at every tenth failure have the front page read [S1-26], in
    whatever session that was [S1-31 C31]."""
    project.n_rpc_failures += 1
    wait = max(backoff(project.n_rpc_failures, rng), min(least, WAIT_MAX))
    if master:
        project.n_master_failures += 1
        project.fetch_master = False  # Not again at once: the next tenth failure asks for it.
        if project.n_master_failures >= MASTER_FETCH_TRIES:
            wait = max(wait, MASTER_FETCH_INTERVAL)  # [C26]
    elif project.n_rpc_failures % MASTER_FETCH_PERIOD == 0:
        project.fetch_master = True
    project.min_rpc_time = now + wait


def rest_after(seconds, n_addresses=1):
    """Seconds to leave a project alone when talking to it took so long: one thing is under way at a
    time [S1-32], and a server that drips must not hold up the others. A gap that is longer than any
    exchange was sleep."""
    return SLOW_FACTOR * max(0.0, min(seconds, SLOW_MAX * n_addresses) - SLOW_SECONDS)


def take_master(project, found):
    """Note the addresses of a project's front page. New ones are tried at once [S1-29]."""
    project.n_master_failures, project.fetch_master = 0, False
    known = addresses_of(project)
    fresh = [url for url in found if url not in known]
    project.addresses = merged(fresh, known)
    if fresh:
        project.n_rpc_failures, project.min_rpc_time = 0, 0.0
    return fresh


class Links(html.parser.HTMLParser):
    """Collects where a page says its scheduler is."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "link" and "minigrid_scheduler" in (values.get("rel") or "").split():
            self.found.append(values.get("href"))


def read_master(text, url):
    """The addresses of the scheduler in a project's front page [S1-27]; ValueError if none."""
    links, bases = Links(), []
    try:
        links.feed(text)
    except Exception:  # What it makes of broken pages differs among the versions of Python.
        raise ValueError("its front page is no HTML") from None
    for href in links.found:
        with contextlib.suppress(ValueError):
            full = urllib.parse.urljoin(url, href or "")
            if full.endswith("/scheduler"):
                bases.append(full[:-len("/scheduler")])
    found = usable_addresses(bases, url)
    if not found:
        raise ValueError("its front page names no scheduler")
    return found


def usable_addresses(given, url):
    """Those addresses of a list from outside that can be used by somebody who has come by `url`:
    what came encrypted is not continued in the open."""
    found = []
    for address in given[:10 * ADDRESSES_MAX] if isinstance(given, list) else []:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            parts = urllib.parse.urlsplit(address)
            secure = parts.scheme == "https" or not url.startswith("https:")
            if (parts.scheme in ("http", "https") and parts.hostname and secure
                    and re.fullmatch(r"[!-~]{1,500}", address)
                    and "@" not in parts.netloc and not parts.query and parts.port != 0
                    and not inward(url, address)):
                found.append(address.rstrip("/"))
    return found[:ADDRESSES_MAX]


def take_reply(project, state, reply, request, n_new, sent, now, rng):
    """Note what a reply says about the project and us. First reset [S1-23], then apply the delay
    that it asks for [S1-13 C28]."""
    project.n_rpc_failures, project.min_rpc_time, project.trouble = 0, 0.0, ""
    project.n_master_failures, project.fetch_master = 0, False
    project.request_delay = number(reply.get("request_delay"), 0, WAIT_MAX, 0.0)
    if project.request_delay:  # 0: none asked [C35]
        project.min_rpc_time = now + project.request_delay
    if rest_after(now - sent):
        project.min_rpc_time = max(project.min_rpc_time, now + rest_after(now - sent))
    hostid = int(number(reply.get("hostid"), 1, 2 ** 63, project.hostid))
    if hostid != project.hostid:
        if project.hostid:  # Our directory was copied: part from the copy [WIRE 15.3].
            state.host_cpid = secrets.token_hex(16)
        project.hostid, project.rpc_seqno = hostid, 0
    server_time = number(reply.get("server_time", reply.get("http_date")), 1, 1e11, None)
    if server_time is not None:
        project.clock_offset = server_time - (sent + now) / 2
    project.name = plain(reply.get("project_name"), 80)
    project.userid = int(number(reply.get("userid"), 0, 2 ** 63, project.userid))
    project.credit = number(reply.get("user_total_credit"), 0, 1e18, project.credit)
    project.addresses = merged(addresses_of(project),
                               usable_addresses(reply.get("addresses"), project.url))
    if reply.get("trickles_taken") is True:
        drop_trickles(request)
    elif request.trickles:  # It cannot take them, now or ever: no request just for them.
        project.trickle_time = now + DELAY_MIN
    if n_new:
        project.n_empty, project.work_time = 0, 0.0
        project.n_bad_batches += project.batch_failed
        project.batch_failed = False
    elif request.asks:
        project.n_empty += 1
        project.work_time = now + idle_delay(project.n_empty, project.request_delay, rng)


def drop_trickles(request):
    """Forget the messages that went with a request."""
    for job, message in request.trickles:
        job.trickles = [other for other in job.trickles if other is not message]


def take_outcome(project, success, now, rng):
    """Prevent a cycle of rapid failures [S1-15]. One batch of failed jobs is forgiven, so that a
    single bad job does not stop a class; from the second on no work is asked for during a backoff.
    Other than in BOINC, reports are not held up by it."""
    if success:
        project.n_bad_batches, project.batch_failed = 0, False
        return
    project.batch_failed = True
    if project.n_bad_batches:
        project.work_time = max(project.work_time, now + backoff(project.n_bad_batches, rng))


def mind_clock(project, last, now):
    """Void all waiting if the clock was set back [C34]: nobody should sleep for a year."""
    if now < last - CLOCK_JUMP:
        project.min_rpc_time = project.work_time = project.trickle_time = 0.0
        project.avg_time = min(project.avg_time, now)
        for job in project.jobs:
            # Else their reports and transfers would wait for the old time.
            job.received = min(job.received, now)
            job.ended_at, job.stuck_since = min(job.ended_at, now), min(job.stuck_since, now)


def localise(job, base):
    """Keep the addresses of a job's files without that of the server: it may change [D5]."""
    for f in job.downloads + ([job.output] if job.output else []):
        if f["url"].startswith(base + "/"):
            f["url"] = f["url"][len(base):]


def places(project, url):
    """All addresses under which a file of a project may be had, the likeliest first."""
    return [base + url for base in addresses_of(project)] if url.startswith("/") else [url]


def standing(project, now):
    """How we stand with a project, for people: (sentence, until when; 0: no time to tell)."""
    if project.fatal:
        return project.fatal, 0.0
    if project.resting:
        return "rests: it was not named at this start", 0.0
    if project.min_rpc_time > now and project.n_rpc_failures:
        return again(project.trouble or "no answer"), project.min_rpc_time
    if project.work_time > now:
        return "%s; asking again" % (project.trouble or "no work for this computer now"), max(
            project.work_time, project.min_rpc_time)
    if project.min_rpc_time > now + project.request_delay / 2 + 5:
        return "the server wants us to wait", project.min_rpc_time
    return "" if project.authenticator else "joining", 0.0


def again(sentence):
    """Say after what went wrong that it is tried again; some such sentences are questions."""
    return sentence + (" Trying again" if sentence.endswith("?") else "; trying again")


# -- which job next


def may_hurry(job, left, limits):
    """May a job overtake others because of its deadline, though its project has been given far
    more than theirs? No more than was fetched of it by its own estimates, or deadlines and false
    estimates would buy all processors: not one of days, and none that has taken far longer."""
    total = estimate(job, limits.p_fpops) * (job.project.correction or 1.0)
    given = job.delay_bound or HURRY_SECONDS
    return left <= min(given, HURRY_SECONDS) and job.elapsed_time <= HURRY_FACTOR * total


def next_job(ready, running, limits, now):
    """The job to start next. One that would be late if all others came first has to come first, by
    its deadline [S1-06]; otherwise the project's with the greatest debt, counting what already
    runs for it as given; None if there is none. Late means: after half of the time it was given,
    for its server may be down for hours when it is done. See may_hurry(). Jobs of one project are
    started as they came: by their deadlines, an application with short ones could keep another
    one's jobs from ever being started."""
    queue = sum(remaining(job, job.project, limits.p_fpops) for job in ready) / limits.n_cpus
    pledged = {}
    for job in running:
        pledged[job.project] = (pledged.get(job.project, 0.0)
                                + remaining(job, job.project, limits.p_fpops) * job.ncpus)

    most = max([resource_debt(job.project, now)[0] for job in ready], default=0.0)

    def order(job):
        left = remaining(job, job.project, limits.p_fpops)
        deadline = local_deadline(job, job.project)
        late = deadline - job.delay_bound / 2 - left - queue < now
        if late and (may_hurry(job, left, limits) or HURRY_FACTOR * resource_debt(
                job.project, now)[0] >= most):
            return 0, deadline
        debt = resource_debt(job.project, now, pledged.get(job.project, 0.0))
        return (1, *(-part for part in debt), job.received)

    return min(ready, key=order, default=None)


def number(value, low, high, default):
    """A finite number between low and high; anything else from outside is the default."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return value
    return default


def plain(value, length=500):
    """Text from outside for a terminal: one line, no control characters, not too long."""
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else " " for c in text)[:length].strip()


def storable(text):
    """The end of a text, without what a database may refuse: a refused request reports nothing."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[-STDERR_CHARS:]


def safe_name(name):
    """Return a name that is safe as a file name on every system; ValueError for all others."""
    if (not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name)
            or name.startswith(".") or name.endswith(".") or RESERVED.match(name)):
        raise ValueError("the name %s is not allowed" % (
            ascii(name)[:60] if isinstance(name, str) else "of a file or job"))
    return name


def safe_open_name(name):
    """Return a name that is safe in a job's directory; ValueError for those the client uses."""
    low = safe_name(name).lower()
    if low in SLOT_NAMES or low.startswith("trickle_") or low.endswith(".new"):
        raise ValueError("the name %s is one that the client itself uses" % name)
    return name


def split_arguments(text):
    """Split a command line as BOINC's client does, or replicas would compute different things: at
    blanks, but not between quotes that begin a word; nothing else has a meaning [WIRE 11.2]."""
    words = re.finditer(r"""'([^']*)(?:'|$)|"([^"]*)(?:"|$)|(\S+)""", text, re.ASCII)
    return [next(part for part in word.groups() if part is not None) for word in words]


def web_address(base, url):
    """Return a full http(s) address; ValueError for others: urllib would open file:// as well. A
    project of the internet does not send us to this computer or its neighbours [D11]."""
    url = urllib.parse.urljoin(base + "/", url if isinstance(url, str) else "")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or len(url) > URL_CHARS:
        raise ValueError("%s is no web address" % ascii(url)[:60])
    if inward(base, url):
        raise ValueError("%s is in this computer's own network" % ascii(url)[:60])
    return url


def inward(base, url):
    """Does an address lead from the internet to a machine near by?"""
    host = urllib.parse.urlsplit(base).hostname
    return near(urllib.parse.urlsplit(url).hostname) and not (host and near(host))


def parse_file(data, base):
    """Check one file to download."""
    if not (isinstance(data["sha256"], str) and re.fullmatch("[0-9a-f]{64}", data["sha256"])):
        raise ValueError("a file without a proper sha256")
    nbytes = number(data["nbytes"], 0, 1e15, -1)
    if nbytes != int(nbytes) or nbytes < 0:
        raise ValueError("a file without a proper size")
    return {"name": safe_name(data["name"]), "url": web_address(base, data["url"]),
            "sha256": data["sha256"], "nbytes": int(nbytes), "main": data.get("main") is True,
            "open_name": safe_open_name(data.get("open_name") or data["name"]),
            "executable": data.get("executable") is True}


def parse_input(data, base):
    """Check an input file. It comes unsigned, so it must never be run: neither started, nor found
    by a program that looks for a library beside itself [D11]."""
    f = dict(parse_file(data, base), main=False, executable=False)
    if f["open_name"].lower().endswith(CODE_SUFFIXES):
        raise ValueError("the input %s has the name of a program" % f["open_name"])
    return f


def parse_files(data, base):
    """Check the files of an assignment: those of the application, the input, further inputs."""
    files = [parse_file(f, base) for f in data["files"]]
    inputs = [parse_input(f, base) for f in data.get("inputs") or []]
    if [f["main"] for f in files].count(True) != 1:
        raise ValueError("not exactly one main file")
    input = dict(parse_input(data["input"], base), open_name="in")
    more = files + inputs
    for names in ([f["name"].lower() for f in more + [input]],
                  [f["open_name"].lower() for f in more]):
        if len(set(names)) < len(names) or len(names) > FILES_MAX or SLOT_NAMES & set(names):
            raise ValueError("two files of one name, or a name that the client itself uses")
    return files, input, inputs


def parse_assignment(data, base, platforms=("python",)):
    """Build a Job from what the server sent; ValueError in plain words if it is unfit."""
    try:
        files, input, inputs = parse_files(data, base)
        if data.get("platform", "python") not in platforms:
            raise ValueError("a program for %s, which does not run here"
                             % plain(data["platform"], 80))
        return Job(
            name=safe_name(data["name"]), workunit=safe_name(data["workunit"]),
            app=plain(data["app"], 80), about=plain(data.get("about"), 300),
            app_version=int(number(data.get("app_version"), 0, 2 ** 63, 0)),
            platform=data.get("platform", "python"),
            ncpus=max(NCPUS_MIN, number(data.get("ncpus"), 0.01, 4096, 1.0)),
            command_line=argument_text(data.get("command_line", "")),
            files=files, input=input, inputs=inputs,
            output={"name": safe_name(data["output"]["name"]),
                    "url": web_address(base, data["output"]["url"]),
                    "nbytes_max": number(data["output"].get("nbytes_max"), 0, 1e15, 1e8)},
            report_deadline=number(data["report_deadline"], 0, 1e11, 1e11),
            delay_bound=number(data.get("delay_bound"), 0, 1e9, 0.0),
            rsc_fpops_est=number(data.get("rsc_fpops_est"), 1, 1e30, 1e9),
            rsc_fpops_bound=number(data.get("rsc_fpops_bound"), 1, 1e30, 1e13),
            rsc_memory_bound=number(data.get("rsc_memory_bound"), 1, 1e15, 5e8),
            rsc_disk_bound=number(data.get("rsc_disk_bound"), 1, 1e15, 1e8))
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError("an incomplete assignment (%r)" % e)


def argument_text(text):
    """Return a command line; ValueError for one that no program can be given."""
    if not isinstance(text, str) or len(text) > 4096 or "\0" in text:
        raise ValueError("a command line that is no text, or too long")
    text.encode()  # Half a surrogate pair is a ValueError, too.
    return text


def refused(data, text, now):
    """An unfit assignment as a failed job, so that the server hears of it; None if not even its
    name can be used."""
    try:
        return Job(safe_name(data["name"]), over=True, client_state=C.DOWNLOADING, ended_at=now,
                   exit_status=EXIT_DOWNLOAD, stderr_out=text)
    except (KeyError, TypeError, ValueError):
        return None


def names_in(value):
    """The strings of a list from outside, as a set."""
    return {v for v in value if isinstance(v, str)} if isinstance(value, list) else set()


def list_of(data, key):
    """The list under a key of something from outside; an empty one if there is none."""
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, list) else []


def count_files(data):
    """How many files an assignment from outside says it has."""
    return len(list_of(data, "files")) + len(list_of(data, "inputs")) + 1


# ---- 4. Signatures -----------------------------------------------------------
#
# Nothing is run that the project has not signed; the connection and the server are trusted with
# neither program nor key [D11]. RSA over SHA-256, padded as PKCS #1 v1.5 says. What must stand in
# the block is built and compared as a whole; whoever parses it instead can be cheated.

KEY_BITS = (2048, 8192)  # shorter keys are weak, longer ones a way to keep us busy
KEY_TEXT = re.compile("minigrid-rsa-1 ([1-9a-f][0-9a-f]{511,2047}) ([1-9a-f][0-9a-f]{0,7})")
KEY_CHANGES_MAX = 100  # in one reply
SHA256_INFO = bytes.fromhex("3031300d060960864801650304020105000420")  # its DigestInfo [RFC 8017]


def read_key(text):
    """Read the numbers (n, e) of a public key; ValueError if it is none, or a weak one."""
    match = KEY_TEXT.fullmatch(text) if isinstance(text, str) else None
    n, e = (int(digits, 16) for digits in match.groups()) if match else (0, 0)
    if not KEY_BITS[0] <= n.bit_length() <= KEY_BITS[1] or not n & e & 1 or e < 3:
        raise ValueError("the project shows something that is no signing key of %d to %d bits"
                         % KEY_BITS)
    return n, e


def fingerprint(text):
    """The SHA-256 of a key's text in hex. People compare its first 32 digits, which `minigrid keys`
    shows."""
    return hashlib.sha256(text.encode()).hexdigest()


def verifies(data, signature, key):
    """Say whether a signature (hex, from anybody) is that of these bytes by a key (n, e)."""
    n, e = key
    size = (n.bit_length() + 7) // 8
    if not isinstance(signature, str) or not re.fullmatch("[0-9a-f]{%d}" % (2 * size), signature):
        return False
    tail = SHA256_INFO + hashlib.sha256(data).digest()
    wanted = b"\0\1" + b"\xff" * (size - 3 - len(tail)) + b"\0" + tail
    number = int(signature, 16)  # A second number for the same signature is none: below n only.
    return number < n and pow(number, e, n) == int.from_bytes(wanted, "big")


def file_statement(assignment, file):
    """Return the bytes that the project signs of a file: for which use it is, not its content
    alone. So no data file becomes a program, and no file that of another application. ValueError
    if a part is missing or has a line feed, with which two uses could have one text."""
    parts = [assignment.get("app"), assignment.get("platform", "python"),
             file.get("open_name") or file.get("name"), str(int(file.get("main") is True)),
             str(int(file.get("executable") is True)), file.get("sha256")]
    if not all(isinstance(part, str) and re.fullmatch("[!-~]{1,250}", part) for part in parts):
        raise ValueError("an incomplete assignment: a file without name, use or sum")
    return ("minigrid file 1\n" + "".join(part + "\n" for part in parts)).encode()


def check_signatures(assignment, key_text):
    """Check that the project has signed every file of an application; ValueError in plain words,
    naming the file, if not. The assignment may be anything. About a millisecond a file [D11]."""
    if not key_text:
        raise ValueError("the project has shown no signing key; unsigned programs are not run")
    key = read_key(key_text)
    files = assignment.get("files") if isinstance(assignment, dict) else None
    if not isinstance(files, list) or not files or not all(isinstance(f, dict) for f in files) \
            or len(files) > FILES_MAX:
        raise ValueError("an incomplete assignment: no list of files")
    for file in files:
        if not verifies(file_statement(assignment, file), file.get("signature"), key):
            raise ValueError("the file %s is not signed by the project as what it shall be used "
                             "for here; it is not run" % plain(file.get("name"), 80))


def follow_key(held, reply):
    """Return the text of the key to hold after a reply, with what the project says of its key.

    The first key is taken as it is; another one only if each step to it is signed by the key before
    it, from the one we hold [D11, WIRE 8.3]. ValueError in plain words if not: keep the old one,
    and take no work. A reply without a key says that ours is the right one."""
    shown = reply.get("signing_key")
    if shown is None or shown in ("", held):
        return held
    read_key(shown)
    if not held:
        return shown
    changes = reply.get("signing_key_changes")
    if not isinstance(changes, list) or len(changes) > KEY_CHANGES_MAX:
        changes = []
    key = held
    for change in changes:
        new = change.get("key") if isinstance(change, dict) else None
        read_key(new)
        if not verifies(b"minigrid key 1\n" + new.encode(), change.get("signature"),
                        read_key(key)):
            break
        key = new
        if key == shown:
            return shown
    raise ValueError(
        "the project shows another signing key than before, and the one you hold has not signed "
        "it: fingerprint %s instead of %s. No work is taken. Either the server is not the one it "
        "was, or its people have lost their key: ask them. If they say that this is their new "
        "key, start once with --key %s"
        % (fingerprint(shown)[:32], fingerprint(held)[:32], fingerprint(shown)[:32]))


# ---- 5. Transport ------------------------------------------------------------

PIECE_BYTES = 4 * 1024 * 1024  # of an upload; what was lost of one is sent again
BLOCK_BYTES = 64 * 1024  # read or sent at once
REPLY_BYTES_MAX = 32 * 1024 * 1024
VALUES_MAX = 2_000_000  # in a reply; each may take a hundred bytes of memory
TEXT_BYTES_MAX = 1000 * 1000  # of a project's front page
ERROR_BYTES_MAX = 64 * 1024  # of the body of a refusal
HEADER_BYTES_MAX = 8 * 1024 * 1024  # and of all else that is no body
SENDING_BYTES = 128 * 1024  # on their way at once: what the system hides from us, see dial()
REDIRECTS_MAX = 5
SOURCES_MAX = 10  # addresses of one file
SLOW_BYTES = 1024  # have to pass in the time `slow` of Transport
RETRY_AFTER_MAX = 86400.0  # seconds a server may ask us to stay away by Retry-After
CERTIFICATE_WAIT = 3600.0  # seconds: a wrong certificate is mended by people
SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of processes, memory, files
LATER = (401, 407, 408, 409, 421, 425, 429)  # refusals that may pass
FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
PORTAL = ("the answer is a web page, not minigrid: is this the right address, or does this "
          "network want a login first?")


class TransportError(Exception):
    """A request failed. `status` is HTTP's, 0 if the project gave no answer at all (somebody else
    between us and it may have). `retry_after`: seconds it asks us to wait at least. `moved_to`:
    the address to which it sends what we do not show to another host. `told`: the words are its
    own. `network_down`: this computer has no network, so it says nothing about the project."""

    def __init__(self, status, text, retry_after=0.0, moved_to="", told=False, network_down=False):
        super().__init__(text)
        self.network_down = network_down
        self.status, self.retry_after = status, retry_after
        self.moved_to, self.told = moved_to, told

    @property
    def lasting(self):
        """Will the same request be refused for ever?"""
        return 400 <= self.status < 500 and self.status not in LATER

    def __str__(self):
        if 300 <= self.status < 400:
            return self.args[0]
        if self.status >= 500:
            return "the server has a problem on its side: " + self.args[0]
        return ("the server refuses: " if self.status else "no connection: ") + self.args[0]


class BadFile(Exception):
    """A downloaded file is not what the server announced, or one of ours is no plain file."""


class LocalError(Exception):
    """This computer's own trouble with a file: not the project's fault, and it may pass. `full`:
    there is no room left."""

    def __init__(self, path, error):
        self.full = error.errno in FULL
        super().__init__(("this computer's disk is full: no room for %s" % path) if self.full else
                         "cannot use %s: %s" % (path, error.strerror or error))


@contextlib.contextmanager
def own_disk(path):
    """Tell trouble with our own files from trouble with the network: both are OSErrors."""
    try:
        yield
    except OSError as e:
        raise LocalError(path, e) from None


def open_plain(path, flags=os.O_RDONLY):
    """Open a plain file in our directory; BadFile for a link, a pipe or the like, which a job may
    have put there [D11]. Raises OSError."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise BadFile("%s is no plain file" % path)
    mode = "r+b" if flags & os.O_RDWR else "rb"
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
        flags |= getattr(os, name, 0)
    return open(path, mode, opener=lambda name, _: os.open(name, flags, 0o600))


def open_partial(path):
    """Open a file to go on with. Whatever is not ours alone is replaced, never written to."""
    with contextlib.suppress(FileNotFoundError):
        known = os.lstat(path)
        if not stat.S_ISREG(known.st_mode) or known.st_nlink > 1:
            os.unlink(path)
    return open_plain(path, os.O_RDWR | os.O_CREAT)


def digest_of(f):
    """Return the SHA-256 of an open file as hex, read in pieces."""
    digest = hashlib.sha256()
    f.seek(0)
    while True:
        block = f.read(1 << 20)
        if not block:
            return digest.hexdigest()
        digest.update(block)


def sha256_of(path):
    """Return the SHA-256 of a file as hex."""
    with open(path, "rb") as f:
        return digest_of(f)


def fits(f, wanted):
    """Is an open file what was announced?"""
    return f.seek(0, os.SEEK_END) == wanted["nbytes"] and digest_of(f) == wanted["sha256"]


def holds(path, wanted):
    """Is a finished file there? (Another one of its name will be replaced.)"""
    try:
        with open_plain(path) as f:
            return fits(f, wanted)
    except (FileNotFoundError, BadFile):
        return False


class Patience:
    """How long one exchange may take: `timeout` seconds without a byte, `slow` seconds for each KB,
    `total` in all. A server that drips a byte a second must not hold us for ever."""

    def __init__(self, clock, timeout, slow, total):
        self.clock, self.timeout, self.slow, self.total = clock, timeout, slow, total
        self.end = clock() + total
        self.slow_end, self.moved_bytes = clock() + slow, 0

    def seconds(self):
        """How long the next step may take. Raises socket.timeout if it may not."""
        left = min(self.timeout, min(self.end, self.slow_end) - self.clock())
        if left <= 0:
            raise socket.timeout()
        return left

    def moved(self, nbytes):
        """Note that bytes have passed."""
        self.moved_bytes += nbytes
        if self.moved_bytes >= SLOW_BYTES:
            self.slow_end, self.moved_bytes = self.clock() + self.slow, 0

    def complaint(self):
        """Say what took too long."""
        if self.clock() >= self.end:
            return "it took more than %g s in all" % self.total
        if self.clock() >= self.slow_end:
            return "too slow: less than %d bytes in %g s" % (SLOW_BYTES, self.slow)
        return "no answer for %g s" % self.timeout


class Wire(io.RawIOBase):
    """A socket under bounds of time and of bytes to read, in the shape http.client wants."""

    def __init__(self, sock, patience, bytes_max):
        self.sock, self.patience, self.bytes_left = sock, patience, bytes_max
        self.waiting, self.response = True, None
        self.buffered = io.BufferedReader(self, BLOCK_BYTES)

    def makefile(self, mode):
        return self.buffered

    def readable(self):
        return True

    def readinto(self, buffer):
        """Read what is there; None if nothing is and we do not wait for it."""
        self.sock.settimeout(self.patience.seconds() if self.waiting else 0)
        try:
            n = self.sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError if ssl else BlockingIOError):
            return None
        self.patience.moved(n)
        self.bytes_left -= n
        if self.bytes_left < 0:
            raise http.client.HTTPException("more headers or padding than anybody needs")
        return n

    def sendall(self, data):
        """Send all of it; the bounds hold for each part, as a slow uplink needs its time."""
        data = memoryview(data)
        while len(data):
            self.sock.settimeout(self.patience.seconds())
            n = self.sock.send(data[:BLOCK_BYTES])
            self.patience.moved(n)
            data = data[n:]

    def send_body(self, data):
        """Send a body; stop when the answer comes before its end, or when the other side has
        closed: a refusal that waits to be read is worth more than "broken pipe"."""
        try:
            for at in range(0, len(data), BLOCK_BYTES):
                if at and self.has_answer():
                    return
                self.sendall(data[at:at + BLOCK_BYTES])
        except OSError:
            pass  # Reading will tell.

    def read_head(self, method):
        """Read an answer up to its body and return it."""
        self.response = http.client.HTTPResponse(self, method=method)
        self.response.begin()
        return self.response

    def hang_up(self):
        """Close all that belongs to it. (RawIOBase.close() leaves the socket to others.)"""
        if self.response:
            self.response.close()
        self.sock.close()

    def has_answer(self):
        """Has something come already? Does not wait."""
        self.waiting = False
        try:
            return bool(self.buffered.peek(1))
        finally:
            self.waiting = True


def dial(host, port, patience):
    """Connect to the first address of a host that answers. The system's buffer is kept small: with
    megabytes in it a slow uplink would still be sending while we believe to wait for an answer."""
    error = OSError("%s has no address" % host)
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(patience.seconds())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENDING_BYTES)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as e:
            sock.close()
            error = e
    raise error


def say(wire, method, target, headers, data=None):
    """Send a request and read the head of the answer; http.client refuses odd characters."""
    connection = http.client.HTTPConnection("unused", 80)  # It only writes for us.
    connection.sock = wire
    connection.putrequest(method, target, skip_host=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    wire.send_body(data or b"")
    return wire.read_head(method)


def host_and_port(parts):
    """The name and port of an address's server; ValueError if there is none."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("%s is no web address" % ascii(parts.geturl())[:100])
    host = parts.hostname
    if not host.isascii():
        host = host.encode("idna").decode()
    return host, parts.port or (443 if parts.scheme == "https" else 80)


def place_name(host, port, scheme=""):
    """A server's name as it stands in an address or in a Host header."""
    name = "[%s]" % host.partition("%")[0] if ":" in host else host
    return name if port == {"http": 80, "https": 443}.get(scheme) else "%s:%d" % (name, port)


def near(host):
    """Is this a server in the same room? A proxy of the environment is for the internet."""
    host = host.rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_private
    except ValueError:  # "127.1" is an address, too, for the system.
        end = host.rpartition(".")[2]
        return ("." not in host or end in ("local", "localhost", "localdomain")
                or bool(re.fullmatch("[0-9]+|0x[0-9a-f]*", end)))


def parse_proxy(text):
    """Return host, port and headers for a proxy such as http://user:password@host:3128; ValueError
    in plain words for others."""
    parts = urllib.parse.urlsplit(text if "://" in text else "http://" + text)
    try:
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError
        headers = {}
        if parts.username is not None:
            words = [urllib.parse.unquote(w or "") for w in (parts.username, parts.password)]
            code = base64.b64encode(":".join(words).encode()).decode()
            headers["Proxy-Authorization"] = "Basic " + code
        return parts.hostname, parts.port or 80, headers
    except ValueError:  # Its text may hold a password: do not show it.
        raise ValueError("the proxy's address is not like http://host:3128 or "
                         "http://user:password@host:3128 (no other kind is known)") from None


def safety(ca_file):
    """Make the settings of HTTPS: the system's certificate authorities, and a file of one's own.
    Checking cannot be switched off. ValueError if the file is none."""
    if ssl is None:
        raise ValueError("this Python has no module ssl, so there is no https:// with it")
    context = ssl.create_default_context()
    try:
        if ca_file:
            context.load_verify_locations(ca_file)
    except (OSError, ValueError) as e:
        raise ValueError("cannot read certificates from %s: %s"
                         % (ca_file, getattr(e, "strerror", None) or e)) from None
    return context


def certificate_error(host, code, text):
    """Say in plain words why a certificate is refused and what to do; `code` is OpenSSL's."""
    if code == 10:
        text = "has expired (or this computer's clock is wrong); the project has to renew it"
    elif code == 9:
        text = "is not valid yet; is this computer's clock right?"
    elif code in (62, 64):
        text = "is for another name; check the address"
    elif code in (18, 19, 20, 21):
        text = ("comes from nobody this computer trusts; if the project has told you to use a "
                "certificate of its own, give that file with --ca-file")
        if sys.platform == "darwin":
            text += ("; if all https:// fails, run \"Install Certificates.command\" in the "
                     "folder of Python once")
    else:
        text = "is not accepted (%s)" % plain(text, 100)
    return TransportError(0, "the certificate of %s %s" % (host, text), CERTIFICATE_WAIT)


def trouble(e, host, patience):
    """Make a TransportError of what went wrong on the way, in plain words."""
    if ssl and isinstance(e, ssl.SSLCertVerificationError):
        return certificate_error(host, e.verify_code, e.verify_message)
    if isinstance(e, socket.timeout):
        text = patience.complaint()
    elif ssl and isinstance(e, ssl.SSLError):
        text = "no encryption can be agreed on with %s (%s); is it http:// there?" % (
            host, plain(e.reason, 60) or "it broke off")
    elif isinstance(e, socket.gaierror):
        text = "the name %s is not known (or there is no network)" % host
    elif isinstance(e, ConnectionRefusedError):
        text = "nothing answers at %s; is the server running?" % host
    elif isinstance(e, (ConnectionError, http.client.IncompleteRead)):
        text = "the connection broke"
    elif isinstance(e, http.client.HTTPException):
        text = "the answer is not HTTP (%s)" % (plain(str(e), 60) or type(e).__name__)
    else:
        text = plain(getattr(e, "strerror", None) or str(e), 200) or type(e).__name__
    down = getattr(e, "errno", None) in (
        (socket.EAI_AGAIN,) if isinstance(e, socket.gaierror) else (errno.ENETUNREACH,
                                                                    errno.ENETDOWN))
    return TransportError(0, text, network_down=down)


def is_page(response):
    """Is an answer meant for people with a browser?"""
    return "html" in (response.getheader("Content-Type") or "").lower()


def blocks(response, nbytes_max):
    """Give an answer's body in pieces, nbytes_max bytes of it at most. Raises TransportError if it
    ends before it should."""
    announced, n = response.length, 0  # None: in chunks, or until the connection ends
    end = nbytes_max if announced is None else min(announced, nbytes_max)
    while n < end:
        block = response.read1(min(end - n, BLOCK_BYTES))
        if not block:
            break
        n += len(block)
        yield block
    if announced is not None and n < end:
        raise TransportError(0, "the connection broke at byte %d of %d" % (n, announced))


def whole_body(response, nbytes_max):
    """Return an answer's body; TransportError if it is too large. Never cut silently."""
    if (response.length or 0) <= nbytes_max:
        data = b"".join(blocks(response, nbytes_max + 1))
        if len(data) <= nbytes_max:
            return data
    raise TransportError(500, "its answer is larger than %d bytes" % nbytes_max)


def json_object(data):
    """The JSON object in some bytes, else None."""
    with contextlib.suppress(ValueError, RecursionError):
        if sum(data.count(sign) for sign in (b",", b"[", b"{")) > VALUES_MAX:
            return None
        value = json.loads(data)
        return value if isinstance(value, dict) else None


def refusal(response):
    """Make a TransportError of an HTTP error: the server's own sentence if it has one."""
    try:
        body = json_object(whole_body(response, ERROR_BYTES_MAX))
    except (OSError, http.client.HTTPException, TransportError):
        body = None
    text = plain(body.get("error")) if body else ""
    told = bool(text)
    if not told:
        text = "HTTP %d %s" % (response.status, plain(response.reason, 80))
        if response.status == 407:
            text = ("the proxy wants a name and a password: give its address as "
                    "http://user:password@host:port")
        elif is_page(response) and (response.status < 500 or response.status == 511):
            text += "; " + PORTAL
    return TransportError(response.status, text, retry_after(response), told=told)


def disown(error, but=()):
    """Give an error without minigrid's own words the status 0: it comes from something in between
    (a login page, a filter), so it must not end jobs or accounts."""
    if not error.told and 400 <= error.status < 500 and error.status not in but:
        error.status = 0
    return error


def moment(text):
    """Seconds since the epoch of a date in a header; None if it is none."""
    with contextlib.suppress(ValueError, OverflowError, TypeError, IndexError):
        return float(email.utils.mktime_tz(email.utils.parsedate_tz(text)))


def retry_after(response):
    """How long a server asks us to stay away, 0 if it does not. A date is compared with the
    server's own clock [C34]."""
    text = (response.getheader("Retry-After") or "").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        seconds = float(text)
    else:
        then, now = moment(text), moment(response.getheader("Date"))
        seconds = then - now if then is not None and now is not None else 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_MAX)


def redirected(response, url, sends_body, private):
    """The address to which an answer sends us; TransportError if we do not follow. What is private
    (an authenticator, a request's body) is never shown to another host than the one asked."""
    status, there = response.status, urllib.parse.urljoin(url, response.getheader("Location") or "")
    old, new = urllib.parse.urlsplit(url), urllib.parse.urlsplit(there)
    if (new.scheme not in ("http", "https") or not new.hostname
            or (old.scheme, new.scheme) == ("https", "http")
            or near(new.hostname) and not near(old.hostname)):  # A router's pages, for example.
        raise TransportError(status, "the server sends us to %s, where we do not go"
                             % plain(there, 200))
    if private and host_and_port(old) != host_and_port(new):
        raise TransportError(status, "the server sends us to %s: it has moved, or this network "
                             "wants a login first" % plain(there, 200), moved_to=there)
    if sends_body and status not in (301, 307, 308):
        raise TransportError(status, "the server sends us to %s instead of answering"
                             % plain(there, 200))
    return there


def sources(wanted):
    """The addresses of a file, in turn."""
    more = wanted.get("urls")
    more = [url for url in more if isinstance(url, str)] if isinstance(more, list) else []
    return list(dict.fromkeys(([wanted["url"]] if wanted.get("url") else []) + more))[:SOURCES_MAX]


def goes_on(response, have, nbytes):
    """Does a 206 begin where our part ends? Else it would be sewn together wrongly."""
    match = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)",
                         (response.getheader("Content-Range") or "").strip())
    return bool(match) and int(match.group(1)) == have and match.group(2) in ("*", str(nbytes))


class Transport:
    """HTTP over http.client. Knows nothing of jobs; safe to use from several threads.

    Seconds: `timeout` without a byte, `slow` for each KB of a transfer, `total` for an exchange of
    JSON or text. `proxy`: "" as the environment says, "none", or an address through which all
    goes. `ca_file`: certificates to trust beside the system's. Raises ValueError if these are
    wrong."""

    def __init__(self, timeout=30.0, slow=60.0, total=300.0, proxy="", ca_file="",
                 clock=time.monotonic):
        self.timeout, self.slow, self.total, self.clock = timeout, slow, total, clock
        self.proxy, self.ca_file = proxy, ca_file
        if proxy not in ("", "none"):
            parse_proxy(proxy)
        self.context = safety(ca_file) if ca_file else None  # else made when first needed

    # -- one exchange

    def _proxy(self, parts):
        """The proxy for an address, or None: the user's wish, else that of the environment."""
        if self.proxy:
            return None if self.proxy == "none" else parse_proxy(self.proxy)
        if near(parts.hostname) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
        text = urllib.request.getproxies().get(parts.scheme)
        return parse_proxy(text) if text else None

    def _connect(self, parts, proxy, patience, bytes_max):
        """Open the way to a server, through a proxy's tunnel if need be; return the Wire."""
        host, port = host_and_port(parts)
        if parts.scheme == "https" and not self.context:
            self.context = safety("")
        try:
            sock = dial(*(proxy[:2] if proxy else (host, port)), patience)
        except OSError as e:
            if not proxy:
                raise
            raise TransportError(0, "through the proxy: "
                                 + trouble(e, place_name(*proxy[:2]), patience).args[0]) from None
        try:
            if parts.scheme == "http":
                return Wire(sock, patience, bytes_max)
            if proxy:
                place = place_name(host, port)
                with say(Wire(sock, patience, HEADER_BYTES_MAX), "CONNECT", place,
                         dict(proxy[2], Host=place)) as answer:
                    if not 200 <= answer.status < 300:
                        raise TransportError(0, "the proxy does not connect us: %s"
                                             % refusal(answer).args[0])
            sock.settimeout(patience.seconds())
            sock = self.context.wrap_socket(sock, server_hostname=host)
            return Wire(sock, patience, bytes_max)
        except BaseException:
            sock.close()
            raise

    def _exchange(self, method, url, data, headers, patience, bytes_max):
        """Send one request; return the Wire, for the caller to close, and the response."""
        parts = urllib.parse.urlsplit(url)
        host, port = host_and_port(parts)
        proxy = self._proxy(parts)
        place = place_name(host, port, parts.scheme)
        target = urllib.parse.quote(parts.path or "/", "/%:=&+$,;@!*'()~")
        if parts.query:
            target += "?" + urllib.parse.quote(parts.query, "/%:=&+$,;@!*'()~?")
        headers = dict(headers, Host=place, Connection="close")
        headers["User-Agent"] = VERSION
        if data is not None:
            headers["Content-Length"] = str(len(data))
        if proxy and parts.scheme == "http":
            target = "http://%s%s" % (place, target)
            headers.update(proxy[2])
        wire = self._connect(parts, proxy, patience, bytes_max)
        try:
            return wire, say(wire, method, target, headers, data)
        except BaseException:
            wire.hang_up()
            raise

    @contextlib.contextmanager
    def _open(self, method, url, data=None, headers=(), total=math.inf, nbytes_max=math.inf):
        """Send a request, follow redirects as far as they may go, give (response, its address);
        every kind of trouble becomes a TransportError."""
        patience = Patience(self.clock, self.timeout, self.slow, total)
        private = data is not None or "Authorization" in dict(headers)
        bytes_max = HEADER_BYTES_MAX + 2 * nbytes_max  # Chunks have heads, too.
        wire = None
        try:
            for n in range(REDIRECTS_MAX + 1):
                wire, response = self._exchange(method, url, data, headers, patience, bytes_max)
                if response.status not in (301, 302, 303, 307, 308):
                    break
                url = redirected(response, url, data is not None, private)
                wire.hang_up()
            else:
                raise TransportError(response.status, "the server sends us in a circle")
            if not 200 <= response.status < 300:
                raise refusal(response)
            coding = response.getheader("Content-Encoding") or "identity"
            if coding.lower() != "identity":
                raise TransportError(500, "its answer is packed (%s), which nobody asked for"
                                     % plain(coding, 40))
            yield response, url
        except (OSError, http.client.HTTPException, ValueError) as e:
            place = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
            raise trouble(e, plain(place, 100), patience) from None
        finally:
            if wire:
                wire.hang_up()

    def _json(self, method, url, data=None, headers=()):
        total = math.inf if method == "PUT" else self.total
        try:
            with self._open(method, url, data, headers, total, REPLY_BYTES_MAX) as (response, _):
                value = json_object(whole_body(response, REPLY_BYTES_MAX))
                if value is None and is_page(response):
                    raise TransportError(0, PORTAL)
                date = moment(response.getheader("Date"))
        except TransportError as e:
            raise disown(e)
        if value is None:
            raise TransportError(500, "its answer is no JSON object")
        if date is not None:
            value.setdefault("http_date", date)
        return value

    def post_json(self, url, value):
        """POST a JSON value, return the JSON object answered. If the server has told its time,
        that is in it as "http_date", seconds since the epoch [C34]."""
        data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return self._json("POST", url, data, {"Content-Type": "application/json"})

    def get_text(self, url, nbytes_max=TEXT_BYTES_MAX):
        """GET a page, at another host too if it is sent there: no secrets go with it. Return its
        text and its address."""
        nbytes_max = int(nbytes_max)
        with self._open("GET", url, None, (), self.total, nbytes_max) as (response, place):
            return whole_body(response, nbytes_max).decode("utf-8", "replace"), place

    # -- downloads

    def download(self, wanted, partial, path):
        """Bring a file (a dict: url, perhaps urls, sha256, nbytes) to `path`, going on where
        `partial` ends. It appears under its name only if size and checksum are right; else
        BadFile. LocalError: this computer's disk. Nothing is flushed to the disk, which would cost
        more than a small job: after a power cut a spoilt file is found by its checksum."""
        with own_disk(path):
            if holds(path, wanted):
                return
        errors = [TransportError(500, "it gives no address for the file")]
        for url in sources(wanted):
            try:
                self._fetch(url, wanted, partial)
            except (TransportError, BadFile) as e:
                errors.append(e)
                continue
            with own_disk(path):
                os.replace(partial, path)
            return
        passing = [e for e in errors[1:] if not (isinstance(e, BadFile) or e.lasting)]
        raise (passing or errors)[-1]  # As long as one source may recover the job may, too.

    def _fetch(self, url, wanted, partial):
        """Complete `partial` from one source. What was there before may be damaged, or of a file
        that has changed since: if it does not fit start over, once."""
        with own_disk(partial):
            f = open_partial(partial)
        try:
            resumed = f.seek(0, os.SEEK_END) > 0
            self._get(url, wanted, f)
            if resumed and not fits(f, wanted):
                f.truncate(0)
                self._get(url, wanted, f)
            if not fits(f, wanted):
                f.truncate(0)
                raise BadFile("its content is not what was announced (size or checksum)")
        except OSError as e:  # The network's are TransportErrors by now.
            raise LocalError(partial, e) from None
        finally:
            with contextlib.suppress(OSError):  # All was flushed by _save().
                f.close()

    def _get(self, url, wanted, f):
        """Append what is missing to an open file."""
        have, nbytes = f.seek(0, os.SEEK_END), wanted["nbytes"]
        if have > nbytes:
            have = f.truncate(0)
        if have == nbytes:
            return
        headers = {"Range": "bytes=%d-" % have} if have else {}
        try:
            with self._open("GET", url, None, headers, nbytes_max=nbytes) as (response, _):
                if response.status != 206 or goes_on(response, have, nbytes):
                    return self._save(response, f, have if response.status == 206 else 0, nbytes)
                if not have:
                    raise TransportError(500, "it sends another part of the file than the whole")
        except TransportError as e:
            if e.status != 416 or not have:
                raise disown(e, (404, 410))  # What is not there is not there, whoever says so.
        with own_disk(f.name):
            f.truncate(0)
        self._get(url, wanted, f)

    def _save(self, response, f, at, nbytes):
        """Write an answer's body to an open file from byte `at` on."""
        length, left = response.length, nbytes - at
        if is_page(response) and length != left:
            raise TransportError(0, PORTAL)
        if length is not None and (length > left or length < left and response.status != 206):
            raise BadFile("its size is not what was announced: %d bytes instead of %d"
                          % (length, left))
        with own_disk(f.name):
            f.truncate(at)
            f.seek(at)
        try:
            for block in blocks(response, nbytes - at + 1):  # One more shows it is too long.
                at += len(block)
                with own_disk(f.name):
                    f.write(block)
        finally:
            with own_disk(f.name):
                f.flush()
        if at < nbytes:
            raise TransportError(0, "the connection broke at byte %d of %d" % (at, nbytes))

    # -- uploads

    def upload(self, url, path, authenticator, resume):
        """Send a file in pieces, going on where the server's copy ends. FileNotFoundError or
        BadFile: there is nothing to send, and never will be."""
        try:
            f = open_plain(path)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise LocalError(path, e) from None
        with f:
            self._send_pieces(url, f, {"Authorization": "Bearer " + authenticator}, resume)

    def _send_pieces(self, url, f, auth, resume):
        with own_disk(f.name):
            total, sha256 = f.seek(0, os.SEEK_END), digest_of(f)
        headers = dict(auth, **{"X-Sha256": sha256, "Content-Type": "application/octet-stream"})
        reply = self._uploaded(url, auth) if resume or total > PIECE_BYTES else {}
        stuck = 0
        for _ in range(8 + 2 * total // PIECE_BYTES):
            if reply.get("complete") is True:
                return
            at = int(number(reply.get("nbytes"), 0, total, 0))
            at = at if at < total else 0  # All there and yet not complete: once more.
            with own_disk(f.name):
                f.seek(at)
                data = f.read(min(PIECE_BYTES, total - at))
            span = "%d-%d" % (at, at + len(data) - 1) if data else "*"
            headers["Content-Range"] = "bytes %s/%d" % (span, total)
            try:
                reply = self._json("PUT", url, data, headers)
            except TransportError as e:
                if e.status != 409:
                    raise
                reply = self._uploaded(url, auth)  # Its copy ends elsewhere: go on there.
            stuck += number(reply.get("nbytes"), 0, total, 0) <= at
            if stuck > 3:
                break
        if reply.get("complete") is not True:
            raise TransportError(500, "it does not take the upload")

    def _uploaded(self, url, headers):
        """Ask how much of an upload the server has. It may not know the name before the first
        byte, so a refusal here says nothing: let the upload itself find out."""
        try:
            return self._json("GET", url, None, headers)
        except TransportError as e:
            if e.status in (403, 404):
                return {}
            raise


# ---- 6. Harness --------------------------------------------------------------

# The program that runs one job. A string, because this file may have come through
# `python3 -c "$(curl ...)"` and then has no path of its own. It gets the slot directory, and as
# standard input a pipe that ends when the client dies, on every system. It leaves `output`,
# `done.json` and an exit code.
HARNESS = r'''"""Runs one job of a minigrid volunteer. Written by volunteer.py at each start."""

import errno
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time

CHILD_FAILED, DISK, TIME, MEMORY = 195, 196, 197, 198
TRICKLE_BYTES = 32768
PROCESSES_MAX = 100  # at a time; not everywhere can this be kept
PATH = "/usr/local/bin:/usr/bin:/bin"  # of native programs, where the client's has none for them


def write(name, data):
    with open(name + ".new", "wb") as f:
        f.write(data)
    os.replace(name + ".new", name)


def cpu_time():
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def peak_memory():
    """Bytes. Linux lets a process inherit its parent's ru_maxrss, so VmHWM is asked first."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return 0  # Windows
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def all_memory():
    """Bytes in use now by this process and all it has started."""
    if sys.platform == "linux":
        return tree_memory(os.getpid(), 0)
    import subprocess  # Modules that few jobs need would cost each of them its time.

    done = subprocess.run(["/bin/ps", "-A", "-o", "pgid=", "-o", "rss="], stdout=subprocess.PIPE)
    rows = [line.split() for line in done.stdout.splitlines()]
    return 1024 * sum(int(row[1]) for row in rows if int(row[0]) == os.getpgrp())


def tree_memory(pid, depth):
    """Resident bytes of a process and all below it; what ends meanwhile does not count."""
    children = []
    try:
        with open("/proc/%d/statm" % pid) as f:
            total = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in os.listdir("/proc/%d/task" % pid):  # Each thread has children of its own.
            with open("/proc/%d/task/%s/children" % (pid, thread)) as f:
                children += f.read().split()
    except (OSError, ValueError, IndexError):
        return 0
    return total + sum(tree_memory(int(child), depth + 1) for child in children if depth < 20)


def die(status):
    """End at once, with all processes the job has started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid() and status is None:
        os.killpg(0, signal.SIGKILL)
    os._exit(CHILD_FAILED if status is None else status)


def watch(pipe, memory):
    """Thread: nobody computes for a client that is dead, or beyond the memory bound."""
    if sys.platform != "win32":
        threading.Thread(target=watch_memory, args=(memory,), daemon=True).start()
    try:
        while os.read(pipe, 1):
            pass
    finally:
        die(None)


def watch_memory(memory):
    try:
        while max(peak_memory(), watch_memory.peak) <= memory:
            time.sleep(0.2 if sys.platform == "linux" else 1.0)  # ps is not free.
            watch_memory.peak = max(watch_memory.peak, all_memory())
        leave_note()
    except OSError:
        return  # No /bin/ps, or no room for another process: the system's own bounds remain.
    die(MEMORY)


watch_memory.peak = 0


def limit(job):
    """Bounds that the system itself keeps; the client watches the same ones from outside."""
    memory = int(job["memory"] * 2 + (1 << 30))  # Address space is far more than memory in use.
    try:
        import resource
    except ImportError:
        return limit_windows(memory)
    # The system counts more roughly than the keeper, and for each process: it comes second, or a
    # job would go on without a child, and nobody would know.
    wanted = [("CORE", 0), ("NOFILE", 256), ("FSIZE", job["disk"]),
              ("CPU", job["cpu_seconds"] * 1.25 + 1)]
    for name, value in wanted + ([("AS", memory)] if sys.platform == "linux" else []):
        try:
            kind = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(kind)[1]
            value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
            resource.setrlimit(kind, (value, hard if name == "CPU" else value))
        except (AttributeError, ValueError, OverflowError, OSError):
            pass  # Better without this bound than not at all.
    try:
        os.nice(10)
    except OSError:
        pass


def limit_windows(memory):
    """Put this process into a job object: what it starts dies with it, and is bounded."""
    import ctypes

    class Limits(ctypes.Structure):  # JOBOBJECT_EXTENDED_LIMIT_INFORMATION
        _fields_ = [("times", ctypes.c_int64 * 2), ("flags", ctypes.c_uint32),
                    ("working_set", ctypes.c_size_t * 2), ("n_processes", ctypes.c_uint32),
                    ("affinity", ctypes.c_size_t), ("classes", ctypes.c_uint32 * 2),
                    ("io", ctypes.c_uint64 * 6), ("memory", ctypes.c_size_t * 4)]

    try:
        kernel = ctypes.windll.kernel32
        kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
        flags = 0x2000 | 0x200 | 8  # KILL_ON_JOB_CLOSE, JOB_MEMORY, ACTIVE_PROCESS
        limits = Limits(flags=flags, n_processes=PROCESSES_MAX)
        limits.memory[1] = min(memory, sys.maxsize)
        handle = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))  # Open until the end.
        kernel.SetInformationJobObject(handle, 9, ctypes.byref(limits), ctypes.sizeof(limits))
        kernel.AssignProcessToJobObject(handle, ctypes.c_void_p(kernel.GetCurrentProcess()))
    except (AttributeError, OSError, ctypes.ArgumentError):
        pass  # Better without this bound than not at all.


def progress(fraction):
    """Tell how far the job is: 0..1. Cheap: most calls write nothing."""
    now = time.monotonic()
    if now - progress.last >= 0.2:
        progress.last = now
        with open("progress.txt", "w") as f:
            f.write("%.4f" % min(1.0, max(0.0, float(fraction))))


def checkpoint(state):
    """Keep a JSON value; after an interruption it is back as checkpoint.state."""
    write("checkpoint.json", json.dumps({"state": state, "cpu_time": spent()}).encode())


def trickle(text=None):
    """Send a text to the server while the job runs; return the texts that have come for it."""
    if text is not None:
        data = str(text).encode()
        if len(data) > TRICKLE_BYTES or b"\0" in data:
            raise ValueError("trickle() takes a text of at most %d bytes" % TRICKLE_BYTES)
        write("trickle_up.%d" % trickle.next, data)
        trickle.next += 1
    texts = []
    for n in numbers_of("trickle_down."):
        with open("trickle_down.%d" % n, encoding="utf-8", errors="replace") as f:
            texts.append(f.read())
        os.remove("trickle_down.%d" % n)
    return texts


def numbers_of(start):
    """The numbers of the files with this beginning, in order."""
    ends = [name[len(start):] for name in os.listdir() if name.startswith(start)]
    return sorted(int(end) for end in ends if end.isdigit())


def spent():
    return checkpoint.before + cpu_time()


def resume(job):
    # A number that was taken once would not be taken again.
    trickle.next = max([job.get("n_trickles", 0) - 1] + numbers_of("trickle_up.")) + 1
    progress.last, checkpoint.state, checkpoint.before = -1.0, None, 0.0
    try:
        with open("checkpoint.json", "rb") as f:
            kept = json.load(f)
        checkpoint.state, checkpoint.before = kept["state"], kept["cpu_time"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # None yet, or cut short by a power failure: from the beginning, then.


def encode(value, returns, name):
    """The output as bytes; TypeError or ValueError with a text for the application's author."""
    if returns == "bytes":
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError("%s() has to return bytes, not %s" % (name, type(value).__name__))
        return bytes(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise type(e)("%s() has to return a JSON value (no NaN, no infinity): %s" % (name, e))
    return text.encode()


def run_native(job):
    """Run a program that knows nothing of us: it reads standard input, which is the file `in`, and
    writes standard output or the file `out`. Return its exit status."""
    import subprocess

    if os.name != "nt":
        os.environ.setdefault("PATH", PATH)
    with open(job["input"], "rb") as data, open("stdout.txt", "wb") as printed:
        program = subprocess.Popen([os.path.abspath(job["main"])] + job["arguments"], stdin=data,
                                   stdout=printed)
    code = program.wait()
    if code == 0:
        written = os.path.isfile("out") and not os.path.islink("out")
        os.replace("out" if written else "stdout.txt", "output")
    elif code < 0:
        sys.stderr.write("the program was ended by signal %d\n" % -code)
        ends = {getattr(signal, "SIGXFSZ", 0): DISK, getattr(signal, "SIGXCPU", 0): TIME}
        return ends.get(-code, 128 - code)
    return code if code < 256 else CHILD_FAILED  # Windows has larger ones.


def parameters(function):
    """The names of a function's parameters; without the module inspect, as a rule: it is slow."""
    if type(function) is type(parameters) and not hasattr(function, "__wrapped__"):
        code = function.__code__
        return code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    import inspect

    return inspect.signature(function).parameters


def run(job):
    if "arguments" in job:
        return run_native(job)
    spec = importlib.util.spec_from_file_location("app", os.path.abspath(job["main"]))
    app = sys.modules["app"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    with open(job["input"], "rb") as f:
        data = f.read()
    name, kinds = "compute", [getattr(app, kind, "json") for kind in ("takes", "returns")]
    if job.get("function") == "invert":  # A check: from another volunteer's output to its input.
        name = "invert"
        kinds.reverse()
    if kinds[0] != "bytes":
        data = json.loads(data)
    offered = {"progress": progress, "checkpoint": checkpoint, "trickle": trickle}
    function = getattr(app, name)
    wanted = parameters(function)
    random.seed(job["workunit"])  # Replicas must agree.
    output = function(data, **{k: offered[k] for k in offered if k in wanted})
    write("output", encode(output, kinds[1], name))
    return 0


def leave_note():
    """Tell the client what the job has used."""
    used = {"cpu_time": spent(), "peak_memory": max(peak_memory(), watch_memory.peak)}
    write("done.json", json.dumps(used).encode())


def status_of(error):
    if isinstance(error, MemoryError):
        return MEMORY
    full = (errno.EFBIG, errno.ENOSPC, getattr(errno, "EDQUOT", -1))
    return DISK if isinstance(error, OSError) and error.errno in full else CHILD_FAILED


def main():
    os.chdir(sys.argv[1])
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]
    with open("job.json") as f:
        job = json.load(f)
    resume(job)
    if sys.argv[2:] != ["kept"]:  # Else its keeper watches, from outside.
        pipe = os.dup(0)  # Not inherited by what the job may start.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        threading.Thread(target=watch, args=(pipe, job["memory"]), daemon=True).start()
    limit(job)
    try:
        status = run(job)
    except BaseException as e:  # SystemExit too: a job ends by returning.
        status = status_of(e)
        try:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        except (OSError, MemoryError):
            pass  # stderr.txt may be what is too big.
    try:
        sys.stdout.flush()
        leave_note()
    except OSError as e:
        status = status or status_of(e)
    die(status)


main()
'''

# On Linux and macOS a job is started and watched by this program, a process between the client and
# the job that the job cannot reach: it makes the sandbox, keeps the bounds for all that the job
# starts, ends it all, and tells the client what was used. A string for the same reason; sent
# through standard input as code, so that nothing is compiled again for each job.
# Facts about the system's calls are from the Linux manual pages (namespaces, pivot_root, capset,
# seccomp, landlock) and Apple's sandbox-exec(1).
KEEPER = r'''
import errno
import json
import os
import resource
import select
import signal
import stat
import sys
import time

LINUX = sys.platform == "linux"
CHILD_FAILED, DISK, TIME, MEMORY = 195, 196, 197, 198
LOOK_SECONDS = 0.2 if LINUX else 1.0  # ps is not free.
DISK_SECONDS = 0.5
DEPTH_MAX = 64  # of directories in a slot
THREADS = 1000  # that a job may have beside its processes
SCRATCH_BYTES = 16 << 20  # of /tmp, which is memory
NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
FLAGS = {"ro": RDONLY, "nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC, "noatime": 1024,
         "nodiratime": 2048, "relatime": 1 << 21}
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store",
          "/gnu/store", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
          "/etc/alternatives", "/etc/localtime", "/sys/devices/system/cpu"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]


class Beyond(Exception):
    """The job is over a bound: exit status and text."""


# -- What Linux offers


def call(name, *arguments):
    """Call a function of the C library by its name, or one of the system by its number."""
    import ctypes

    if not hasattr(call, "libc"):
        call.libc = ctypes.CDLL(None, use_errno=True)
    if isinstance(name, int):
        arguments, name = (ctypes.c_long(name),) + arguments, "syscall"
    function = getattr(call.libc, name)
    value = function(*[os.fsencode(a) if isinstance(a, str) else ctypes.c_ulong(a)
                       if isinstance(a, int) else a for a in arguments])
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (name, os.strerror(number)))
    return value


def write(path, text):
    with open(path, "w") as f:
        f.write(text)


def unshare(order):
    """Enter namespaces of our own, as an unprivileged user by way of a user namespace."""
    flags, uid, gid = NEWPID | NEWNET | NEWIPC | NEWUTS, os.getuid(), os.getgid()
    if order["user"] is not None:
        return call("unshare", flags)
    call("unshare", flags | NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", "%d %d 1" % (uid, uid))
    write("/proc/self/gid_map", "%d %d 1" % (gid, gid))
    try:
        write("/proc/sys/user/max_user_namespaces", "0")  # None inside of this one.
    except OSError:
        pass


def mount(source, place, kind, flags, options=None):
    call("mount", source, place, kind, flags, options)


def bind(path, before="/old"):
    """Show a path of the old tree in the new one, if there is one."""
    source = before + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        return os.symlink(os.readlink(source), path)
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        write(path, "")
    mount(source, path, None, BIND | REC)


def scratch(path, mode, size=SCRATCH_BYTES):
    """Put a small file system in memory there."""
    os.makedirs(path, exist_ok=True)
    mount("tmpfs", path, "tmpfs", NOSUID | NODEV, "size=%d,nr_inodes=4096,mode=%o" % (size, mode))


def build_tree(order):
    """Make a file tree of our own: the system and Python as they are, but read-only, the slot, and
    two small directories in memory. What is not named is not there: no home, no client, no
    sockets of other programs."""
    folder = order["folder"]
    call("unshare", NEWNS)
    mount(None, "/", None, REC | PRIVATE)
    scratch(folder, 0o755)  # The slot itself comes back below.
    os.mkdir(folder + "/old")
    call("pivot_root", folder, folder + "/old")
    os.chdir("/")
    for path in SYSTEM + DEVICES:
        bind(path)
    scratch("/tmp", 0o1777)
    for path in order["hidden"]:
        if os.path.isdir(path):  # A home in a directory of the system's
            scratch(path, 0o755)
    for path in order["visible"]:
        bind(path)
    for path, real in order["links"]:
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(real, path)
    os.makedirs(folder, exist_ok=True)
    mount("/old" + folder, folder, None, BIND)
    finish_tree(order)


def finish_tree(order):
    """Put in the rest, and make all read-only that is not the job's own."""
    folder, uid, gid = order["folder"], order["user"] or os.getuid(), order["user"] or os.getgid()
    scratch("/dev/shm", 0o1777)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, "/dev/" + name)
    os.makedirs("/etc", exist_ok=True)
    write("/etc/passwd", "job:x:%d:%d::%s:/bin/sh\n" % (uid, gid, folder))
    write("/etc/group", "job:x:%d:\n" % gid)
    os.mkdir("/proc")
    try:
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    except OSError:
        pass  # Not in a container that hides parts of it; little needs it.
    with open("/old/proc/self/mountinfo", "rb") as f:
        rows = [line.split() for line in f]
    for row in rows:
        place = os.fsdecode(row[4].decode("unicode_escape").encode("latin-1"))
        if place == "/old" or place.startswith(("/old/", "/proc")):
            continue
        had = sum(FLAGS.get(word, 0) for word in row[5].decode().split(","))
        own = place in (folder, "/tmp", "/dev/shm")
        device = NODEV if own else 0
        try:
            mount(None, place, None, REMOUNT | BIND | had | NOSUID | device | (not own and RDONLY))
        except FileNotFoundError:
            pass  # Below what is hidden.
    call("umount2", "/old", 2)  # MNT_DETACH
    try:
        os.rmdir("/old")
    except OSError:
        pass  # Read-only by now, and empty.


def prctl(option, *values):
    call("prctl", option, *(values + (0,) * (4 - len(values))))


def drop(order):
    """Give away all privileges for good."""
    import ctypes

    if LINUX:
        for number in range(64):
            try:
                prctl(24, number)  # PR_CAPBSET_DROP
            except OSError:
                break  # No such capability, or none to give away.
    if order["user"] is not None:
        os.setgroups([])
        os.setresgid(*[order["user"]] * 3) if LINUX else os.setgid(order["user"])
        os.setresuid(*[order["user"]] * 3) if LINUX else os.setuid(order["user"])
    if LINUX:
        head = (ctypes.c_uint32 * 2)(0x20080522, 0)
        call("capset", head, (ctypes.c_uint32 * 6)())
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS: no set-uid program helps.
        prctl(4, 1)  # PR_SET_DUMPABLE: may read its own /proc/self.
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def landlock(order):
    """Where namespaces are forbidden: have the system refuse files [landlock(7)]."""
    import ctypes

    abi = call(444, None, 0, 1)
    read = 0b1101  # execute, read files, read directories
    every = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1  # Not ioctl: terminals are none of its files.
    rules = (ctypes.c_uint64 * 3)(every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset = call(444, rules, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    paths = SYSTEM + order["visible"] + [real for _, real in order["links"]] + ["/proc/self"]
    for path, may in [(p, read) for p in paths] + [(p, 0b110) for p in DEVICES] + [
            (order["folder"], every)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            may &= 0b111 | 1 << 14
        rule = ctypes.create_string_buffer(may.to_bytes(8, sys.byteorder)
                                           + place.to_bytes(4, sys.byteorder), 12)
        call(445, ruleset, 1, rule, 0)
        os.close(place)
    call(446, ruleset, 0)
    os.close(ruleset)


def forbid_network():
    """Where namespaces are forbidden: have the system refuse sockets, and what could look into
    other processes or go round this [seccomp(2)]."""
    import ctypes

    # socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, pidfd_getfd
    architecture, numbers = {"x86_64": (0xC000003E, (41, 101, 310, 311, 425, 438)),
                             "aarch64": (0xC00000B7, (198, 117, 270, 271, 425, 438))}[
                                 os.uname().machine]
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, refuse),
             (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (0x06, 0, 0, refuse)]  # x32
    for number in numbers:
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, refuse)]
    rules.append((0x06, 0, 0, allow))

    class Rule(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                    ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("n", ctypes.c_uint16), ("rules", ctypes.POINTER(Rule))]

    array = (Rule * len(rules))(*[Rule(*rule) for rule in rules])
    program = Program(len(rules), array)
    prctl(22, 2, ctypes.addressof(program))  # PR_SET_SECCOMP


# -- What macOS offers


def seatbelt(order):
    """Return a profile for sandbox-exec. UNTRIED: nobody has run it yet on a Mac."""
    def quoted(path):
        return '"%s"' % path.replace("\\", "\\\\").replace('"', '\\"')

    hidden = " ".join("(subpath %s)" % quoted(p) for p in order["hidden"])
    shown = " ".join("(subpath %s)" % quoted(p) for p in order["visible"] + [order["folder"]])
    lines = ["(version 1)", "(allow default)", "(deny network*)", "(deny file-write*)",
             "(allow file-write* (subpath %s))" % quoted(order["folder"]),
             '(allow file-write-data (literal "/dev/null") (literal "/dev/zero"))']
    if hidden:
        lines += ["(deny file-read-data %s)" % hidden,
                  "(allow file-read* %s (literal %s))" % (shown, quoted(order["harness"]))]
    return "\n".join(lines)


# -- The job's process


def refuse(error, status):
    """Say why there is no job: half a sandbox is none."""
    os.write(status, b"x" + str(error).encode()[:500] + b"\n")
    os._exit(CHILD_FAILED)


def start(order, code, status, alive):
    """In the child: make the sandbox and become the job, or the first process of a small system
    whose second is the job. A first one would ignore signals, and its end ends all."""
    signal.set_wakeup_fd(-1)
    os.dup2(alive if not LINUX else os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        if LINUX:
            prctl(1, signal.SIGKILL)
        if order["files"] == "mount":
            build_tree(order)
        drop(order)
        if order["namespaces"]:
            prctl(4, 0)  # The first process is not the job's to look into, or to write.
        job = os.fork() if order["namespaces"] else 0
        if not job and LINUX:
            prctl(4, 1)
        if job:
            for descriptor in range(3, order["files_max"]):
                if descriptor != status:
                    try:
                        os.close(descriptor)
                    except OSError:
                        pass
            await_job(job, status)
        if order["files"] == "landlock":
            landlock(order)
        if order["seccomp"]:
            forbid_network()
        bound(order)
    except BaseException as e:
        refuse(e, status)
    become(order, code)


def await_job(job, status):
    """Be the parent of all that lose theirs, until the job ends."""
    while True:
        try:
            pid, how = os.wait()
        except InterruptedError:
            continue
        if pid == job:
            os.write(status, b"s%d" % how)
            os._exit(0)


def bound(order):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = order["threads"] if hard == resource.RLIM_INFINITY else min(hard, order["threads"])
    resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))
    if LINUX:
        try:
            write("/proc/self/oom_score_adj", "1000")  # Before the user's programs.
        except OSError:
            pass


def become(order, code):
    """Run the harness."""
    os.closerange(3, order["files_max"])  # The slot's lock, too, which is the keeper's alone.
    if order["files"] == "seatbelt":
        os.execv("/usr/bin/sandbox-exec", [
            "sandbox-exec", "-p", seatbelt(order), sys.executable, "-s", "-B", order["harness"],
            order["folder"]])
    sys.argv = [order["harness"], order["folder"]] + ["kept"] * LINUX
    exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
    os._exit(CHILD_FAILED)


# -- Watching


def children_of(pid):
    """Return the processes below this one: {pid: (resident bytes, CPU seconds)}; CPU time with that
    of the children it has waited for."""
    found, todo = {}, [pid]
    while todo:
        parent = todo.pop()
        try:
            for thread in os.listdir("/proc/%d/task" % parent):
                with open("/proc/%d/task/%s/children" % (parent, thread), "rb") as f:
                    todo += [int(child) for child in f.read().split()]
        except FileNotFoundError:
            if parent == pid:
                return listed(pid)
        except OSError:
            pass
        try:
            with open("/proc/%d/stat" % parent, "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if parent != pid:
            found[parent] = (int(fields[21]) * PAGE, sum(map(int, fields[11:15])) / TICKS)
    return found


def listed(pid):
    """The same by ps, where /proc does not tell. What was ours before stays ours: its parent may
    have ended."""
    import subprocess

    try:
        ps = subprocess.Popen(["/bin/ps", "-A", "-o", "pid=,ppid=,pgid=,rss=,time="],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        rows = [line.split() for line in ps.communicate()[0].decode().splitlines()]
    except OSError:
        return {}
    table = {int(r[0]): (int(r[1]), int(r[2]), int(r[3]) * 1024, seconds_of(r[4])) for r in rows
             if len(r) == 5 and int(r[0]) not in (pid, ps.pid)}
    ours = {p for p in listed.known if p in table}
    while True:
        more = {p for p, row in table.items() if row[0] == pid or row[0] in ours or row[1] in ours}
        if more <= ours:
            listed.known = ours
            return {p: table[p][2:] for p in ours}
        ours |= more


listed.known = set()


def seconds_of(text):
    """Return [days-][hours:]minutes:seconds in seconds."""
    days, _, rest = text.rpartition("-")
    total = 0.0
    for part in rest.replace(",", ".").split(":"):
        total = total * 60 + float(part)
    return total + 86400 * int(days or 0)


def shared_out(pids):
    """Memory with each shared page counted once in all; None where the system does not tell."""
    total = 0
    for pid in pids:
        try:
            with open("/proc/%d/smaps_rollup" % pid, "rb") as f:
                total += next(int(line.split()[1]) for line in f if line.startswith(b"Pss:")) * 1024
        except (OSError, StopIteration):
            if has_memory(pid):
                return None
    return total


def has_memory(pid):
    """Has a process memory? One that ends has none, even if nobody has waited for it yet."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[21]) > 0
    except OSError:
        return False


def below(place, depth, found):
    """Add bytes and number of files below an open directory to `found`; follow no link."""
    if depth > DEPTH_MAX:
        raise Beyond(DISK, "stopped: its directories are more than %d deep" % DEPTH_MAX)
    with os.scandir(place) as entries:
        for entry in entries:
            found[1] += 1
            if found[1] > found[2]:
                raise Beyond(DISK, "stopped: over its limit of %d files" % found[3])
            try:
                kind = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(kind.st_mode):
                    found[0] += kind.st_size
                    continue
                inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW,
                                dir_fd=place)
            except PermissionError:
                raise Beyond(DISK, "stopped: it closed a directory, so its disk use is not seen")
            except OSError:
                continue  # Gone meanwhile.
            try:
                below(inner, depth + 1, found)
            finally:
                os.close(inner)


def unlinked(pids):
    """Bytes of files that are open, but have no name any more."""
    seen = {}
    for pid in pids:
        try:
            for name in os.listdir("/proc/%d/fd" % pid):
                kind = os.stat("/proc/%d/fd/%s" % (pid, name))
                if kind.st_nlink == 0 and stat.S_ISREG(kind.st_mode):
                    seen[kind.st_dev, kind.st_ino] = kind.st_blocks * 512
        except OSError:
            continue
    return sum(seen.values())


class Watch:
    """What the job has used so far; look() raises Beyond."""

    def __init__(self, order):
        self.order, self.peak, self.cpu = order, 0, 0.0
        self.next_look = self.next_disk = 0.0
        self.place = os.open(order["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def count(self, seconds=0.0):
        """Count CPU time: that of running processes, and what the system knows of ended ones."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu = max(self.cpu, used.ru_utime + used.ru_stime + seconds)
        return self.cpu

    def look(self, child):
        now, order = time.monotonic(), self.order
        if now < self.next_look:
            return
        processes = children_of(os.getpid())
        self.look_at_cpu(sum(seconds for _, seconds in processes.values()))
        if order["namespaces"]:
            processes.pop(child, None)  # Our own helper.
        if len(processes) > order["processes"]:
            raise Beyond(CHILD_FAILED, "stopped: over its limit of %d processes"
                         % order["processes"])
        self.look_at_memory(processes)
        if now >= self.next_disk:
            self.look_at_disk(processes)
            took = time.monotonic() - now
            self.next_disk = now + max(DISK_SECONDS, 20 * took)
        self.next_look = time.monotonic() + LOOK_SECONDS

    def look_at_cpu(self, seconds):
        if self.count(seconds) > self.order["cpu_seconds"]:
            raise Beyond(TIME, "stopped: over its limit of %.0f s of processor time"
                         % self.order["cpu_seconds"])

    def look_at_memory(self, processes):
        used = sum(resident for resident, _ in processes.values())
        if used > self.order["memory"] and len(processes) > 1:
            fair = shared_out(processes)
            used = used if fair is None else fair
        self.peak = max(self.peak, used)
        if used > self.order["memory"]:
            raise Beyond(MEMORY, "stopped: over its memory limit of %.0f MB"
                         % (self.order["memory"] / 1e6))

    def look_at_disk(self, processes=()):
        order, (had, n) = self.order, self.order["baggage"]  # What the client has put there.
        if os.fstat(2).st_size > order["printed"]:
            raise Beyond(DISK, "stopped: it printed more than its limit of %.0f MB"
                         % (order["printed"] / 1e6))
        found = [0, 0, n + order["n_files"], order["n_files"]]
        below(self.place, 0, found)
        if found[0] + unlinked(processes) - had > order["disk"]:
            raise Beyond(DISK, "stopped: over its disk limit of %.0f MB" % (order["disk"] / 1e6))


def reap(child):
    """Take the ended processes; return how the child ended, once it has."""
    how = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return how
        if pid == 0:
            return how
        how = status if pid == child else how


def end_all(order, child, how):
    """Kill all that the job has started; return how the child ended. Halted first, none of them can
    start others meanwhile. In a namespace the first process takes all with it."""
    if how is None:
        os.kill(child, signal.SIGKILL)
    if order["namespaces"]:
        return how if how is not None else os.waitpid(child, 0)[1]
    halted = set()
    for _ in range(2000):
        ended = reap(child)
        how = how if ended is None else ended
        left = set(children_of(os.getpid()))
        if not left:
            break
        fresh = left - halted
        for pid in fresh or left:
            try:
                os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
            except OSError:
                pass
        halted = set() if not fresh else halted | fresh
        if not fresh:
            time.sleep(0.005)
    return 9 if how is None else how


def main(order, code):
    os.chdir("/")
    inner, outer = os.pipe()
    os.set_blocking(outer, False)
    os.set_blocking(inner, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # The client ends us, by closing the pipe.
    told, status = os.pipe()
    alive, _ = os.pipe()  # Ends with us.
    watch = Watch(order)
    try:
        if LINUX:
            prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to us.
            with open("/proc/loadavg") as f:
                threads = int(f.read().split()[3].split("/")[1])
        else:
            threads = 1000
        # The system counts a user's threads; where the user is not the job's alone, add theirs.
        order["threads"] = order["processes"] + THREADS + (
            0 if order["user"] not in (None, 65534) else threads)
        if order["namespaces"]:
            unshare(order)
        child = os.fork()
    except (OSError, AttributeError) as e:
        return report(watch, None, [CHILD_FAILED, "its sandbox could not be made: %s" % e])
    if child == 0:
        start(order, code, status, alive)
    os.close(status)
    if LINUX:
        prctl(4, 0)  # PR_SET_DUMPABLE: not for the job to look into.
    how = beyond = None
    try:
        while how is None and beyond is None:
            ready = select.select([0, inner], [], [], LOOK_SECONDS)[0]
            if 0 in ready and not os.read(0, 64):
                break
            if inner in ready:
                os.read(inner, 4096)
            how = reap(child)
            if how is None:
                watch.look(child)
    except Beyond as e:
        beyond = list(e.args)
    how = end_all(order, child, how)
    reap(child)
    said = os.read(told, 600) if order["namespaces"] or select.select([told], [], [], 0)[0] else b""
    if said[:1] == b"x":
        return report(watch, None, [CHILD_FAILED, "its sandbox could not be made: %s"
                                    % said[1:].decode(errors="replace").splitlines()[0]])
    if order["namespaces"]:
        how = int(said[1:]) if said[:1] == b"s" else signal.SIGKILL
    if beyond is None and os.WIFEXITED(how) and os.WEXITSTATUS(how) in (0, DISK):
        try:
            watch.look_at_cpu(0.0)  # A short job may have ended between two looks.
            watch.look_at_disk()
        except Beyond as e:
            beyond = list(e.args)
    report(watch, how, beyond)


def report(watch, how, beyond):
    """Tell the client how it ended: the last thing."""
    code = how and (-os.WTERMSIG(how) if os.WIFSIGNALED(how) else os.WEXITSTATUS(how))
    text = json.dumps({"code": code, "stopped": beyond, "cpu_time": watch.count(),
                       "peak_memory": watch.peak})
    try:
        os.write(1, text.encode())
    except OSError:
        pass  # Nobody listens any more.
    os._exit(0)


PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
main(order, harness)
'''

# ---- 7. Tasks ----------------------------------------------------------------

KEPT_ENVIRONMENT = ("SYSTEMROOT", "WINDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
TIME_BOUND_MIN = 60.0
RUN_SECONDS, RUN_SECONDS_MAX = 86400.0, 30 * 86400.0  # of a job, whatever its project says
MEMORY_PART = 0.9  # of this computer's, for one job
DISK_KEPT_FREE, DISK_PART_FREE = 1e9, 0.02  # bytes, and part of the disk: the smaller one
TURN_SECONDS = 3600.0  # that a job with a checkpoint runs before others have their turn,
TURN_LOST_SECONDS = 86400.0  # and one that will begin anew
TICK_MAX = 10.0  # A longer gap between two looks was sleep or a clock that was set: not computing.
LOOK_SECONDS = 0.5
SLOT_FILES_MAX = 10000  # that a job may make
PRINTED_MAX = 10e6  # bytes that it may print
PROCESSES_MAX = 100  # of one job at a time
KILL_SECONDS = 10.0  # that a job's keeper has to end it
PROBE_SECONDS = 20.0
JOB_USERS, N_JOB_USERS = 60706, 400  # Numbers that nobody gives to users; when we are root.
NOBODY = 65534
TRICKLE = re.compile(r"trickle_(?:up|down)\.(\d{1,15})")


def time_bound(job, p_fpops):
    """Seconds a job may take on this computer: what the project says, but not for ever, and not far
    beyond the time after which nobody waits for it."""
    ours = min(RUN_SECONDS_MAX, max(RUN_SECONDS, job.delay_bound or math.inf))
    return max(TIME_BOUND_MIN, min(ours, job.rsc_fpops_bound / speed(job, p_fpops)))


def own_bounds(job, directory, n_cpus):
    """Bring the bounds that a project has chosen down to what this computer has."""
    memory = memory_bytes() * MEMORY_PART
    if memory:
        job.rsc_memory_bound = min(job.rsc_memory_bound, memory)
    job.rsc_disk_bound = min(job.rsc_disk_bound, max(1e6, disk_room(directory) / n_cpus))


def disk_room(directory):
    """Bytes that projects may still use: the disk is not filled to the brim."""
    disk = shutil.disk_usage(directory)
    return max(0.0, disk.free - min(DISK_KEPT_FREE, disk.total * DISK_PART_FREE))


def folder_bytes(folder):
    """Bytes of the files in a directory of ours."""
    total = 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # Gone meanwhile.
            total += os.lstat(os.path.join(folder, name)).st_size
    return total


def prepare_slot(slot, job, files, seconds):
    """Fill a slot directory with checked copies; BadFile names the file that is not what it should
    be. Return True if the job goes on from a checkpoint; all else that was there is removed."""
    if slot.is_symlink():
        slot.unlink()
    slot.mkdir(parents=True, exist_ok=True)
    slot.chmod(0o700)
    native = job.platform != "python"
    resumed = empty_slot(slot, native, {open_name(f) for f in job.downloads})
    for f in job.downloads:
        kept, place = files / f["name"], slot / open_name(f)
        if not kept.exists():
            raise BadFile(f["name"])
        shutil.copyfile(kept, place)
        if sha256_of(place) != f["sha256"]:
            kept.unlink()
            raise BadFile(f["name"])
        os.utime(kept)  # When it was needed last, see CACHE_SECONDS.
        if native and (f.get("main") or f.get("executable")):
            place.chmod(0o700)
    order = {"workunit": job.workunit, "main": open_name(next(f for f in job.files if f["main"])),
             "input": open_name(job.input), "memory": job.rsc_memory_bound,
             "disk": job.rsc_disk_bound, "cpu_seconds": cpu_bound(job, seconds),
             "n_trickles": job.n_trickles}
    if native:
        order["arguments"] = split_arguments(job.command_line)
    elif job.command_line == "--invert":  # The only word that means anything to a Python job.
        order["function"] = "invert"
    (slot / "job.json").write_text(json.dumps(order), encoding="utf-8")
    return resumed


def cpu_bound(job, seconds):
    """Seconds of processor time that a job may take in one start: those of its time limit on each
    of the processors it asks for."""
    return seconds * max(1.0, job.ncpus) + 10


def empty_slot(slot, native, names):
    """Remove what an earlier start has left, but its checkpoint and messages; True if there is a
    checkpoint. With a file `checkpoint` a native program finds all the files it has made."""
    checkpoint = slot / ("checkpoint" if native else "checkpoint.json")
    resumed = checkpoint.is_file() and not checkpoint.is_symlink()
    ours = {name.casefold() for name in names} | {
        "job.json", "done.json", "stdout.txt", "stderr.txt", "output"}
    for old in list(slot.iterdir()):
        name = old.name.casefold()  # On many a Mac "In" is "in", and a link would be followed.
        if old.is_symlink() or not old.is_dir():
            kept = resumed and (native or old == checkpoint) or TRICKLE.fullmatch(old.name)
            if name in ours or not kept:
                old.unlink()
        elif name in ours or not (native and resumed):
            if not remove_tree(old):
                raise OSError("cannot delete %s" % old)
    return resumed


def open_name(f):
    """The name of a file in a job's directory; a state of an older version has none."""
    return f.get("open_name") or f["name"]


def read_regular(path, nbytes, end=False):
    """Read up to so many bytes of a file that a job has made, the first ones or the last. OSError
    if it is anything but a plain file of one name: a link leads to other people's files, and to
    open a named pipe takes for ever [D11]."""
    flags = [getattr(os, "O_" + name, 0) for name in ("NOFOLLOW", "NONBLOCK", "BINARY")]
    if path.is_symlink():  # Windows has no O_NOFOLLOW.
        raise OSError(errno.ELOOP, "is a link", str(path))
    with open(os.open(path, os.O_RDONLY | sum(flags)), "rb") as f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        f.seek(max(0, status.st_size - nbytes) if end else 0)
        return f.read(nbytes)


def deliver(slot, job):
    """Write the texts that have come for a job into its slot, each as a whole file. The job may be
    running: no name it could guess is written to, and no link followed."""
    while job.down:
        temporary = slot / (".down-" + secrets.token_hex(16))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(temporary, flags, 0o644), "wb") as f:
            f.write(job.down[0].encode(errors="replace"))
        temporary.chmod(0o644)  # Whatever the umask: the job may be another user.
        try:
            os.replace(temporary, slot / ("trickle_down.%d" % job.n_down))
        except (IsADirectoryError, PermissionError):
            temporary.unlink()  # It has made a directory of that name: it does not want to hear.
        del job.down[0]
        job.n_down += 1


def tree_size(directory, n_max=SLOT_FILES_MAX):
    """Bytes and number of all files below a directory; what vanishes meanwhile does not count. It
    stops soon after n_max files: a job must not keep the client busy."""
    total = n = 0
    for folder, folders, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
        n += len(names) + len(folders)
        if n > n_max:
            break
    return total, n


def remove_tree(path):
    """Delete a directory that a job has filled; True if it is gone. Follows no link, needs no
    recursion however deep it is, and opens what was closed. What cannot be deleted is put aside
    under another name, so that the slot can be used again. The job's processes are dead."""
    with contextlib.suppress(OSError):
        if os.name == "nt" or path.is_symlink() or not path.is_dir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return True
        path.chmod(0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while os.listdir(top) and any([remove_entry(top, name) for name in os.listdir(top)]):
                pass
        finally:
            os.close(top)
        path.rmdir()
    if not os.path.lexists(path):
        return True
    with contextlib.suppress(OSError):
        path.rename(path.with_name("lost-" + secrets.token_hex(8)))
    return not os.path.lexists(path)


def remove_entry(top, name):
    """Delete an entry of an open directory; the directories in it come up into that one first.
    True if it went or changed, so that another try makes sense."""
    changed = False
    with contextlib.suppress(OSError):
        if not unlink_in(top, name):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for entry in os.listdir(inner):
                    with contextlib.suppress(OSError):
                        if not unlink_in(inner, entry):
                            fresh = secrets.token_hex(16)
                            os.rename(entry, fresh, src_dir_fd=inner, dst_dir_fd=top)
                        changed = True
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
        changed = True
    return changed


def unlink_in(folder, name):
    """Delete a file in an open directory; False if it is a directory, which can be opened then."""
    status = os.lstat(name, dir_fd=folder) if os.lstat in os.supports_dir_fd else os.stat(
        name, dir_fd=folder, follow_symlinks=False)
    if getattr(status, "st_flags", 0):  # macOS: even its owner cannot delete what is locked.
        os.chflags(os.path.join("/dev/fd/%d" % folder, name), 0, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        os.chmod(name, 0o700, dir_fd=folder)
        return False
    os.unlink(name, dir_fd=folder)
    return True


# -- protection


@dataclass(frozen=True)
class Protection:
    """What keeps a job in, beside its bounds; see probe_sandbox(). The default: nothing."""

    namespaces: bool = False  # Linux: processes and network of its own
    files: str = ""  # what keeps it from others' files: mount, landlock (Linux), seatbelt (macOS)
    seccomp: bool = False  # Linux: no sockets
    first_user: int = 0  # we are root: jobs run as this user, or this one plus the slot's number
    words: str = ("jobs are kept apart only by bounds and an empty environment: they can read and "
                  "write what you can")

    def user(self, slot_name):
        """The number of the user that the job of a slot runs as; None: ours."""
        n = int(slot_name) % N_JOB_USERS if slot_name.isdigit() else N_JOB_USERS - 1
        return (self.first_user + n if self.first_user == JOB_USERS else self.first_user) or None


def candidates():
    """All that may work here, the best first."""
    users = [JOB_USERS, NOBODY, 0] if hasattr(os, "getuid") and os.getuid() == 0 else [0]
    kinds = []
    if sys.platform == "linux":
        kinds = [(True, "mount", False), (True, "landlock", True), (True, "landlock", False),
                 (False, "landlock", True), (False, "landlock", False), (True, "", True),
                 (False, "", True)]
    elif sys.platform == "darwin":
        kinds = [(False, "seatbelt", False)]
    return [Protection(*kind, first_user=user) for kind in kinds + [(False, "", False)]
            for user in users][:-1]


def taken_users():
    """Are numbers of JOB_USERS in use here?"""
    import pwd

    numbers = {entry.pw_uid for entry in pwd.getpwall()}
    return not numbers.isdisjoint(range(JOB_USERS, JOB_USERS + N_JOB_USERS))


PROBE = b"""
import os, socket

def compute(given):
    tries = {"read": lambda: open(given["secret"]).close(),
             "write": lambda: open(given["secret"] + ".job", "w").close(),
             "network": lambda: socket.create_connection(("127.0.0.1", given["port"]), 2).close(),
             "signal": lambda: os.kill(given["pid"], 0)}
    done = ["root"] if os.getuid() == 0 else []
    for name, attempt in tries.items():
        try:
            attempt()
            done += [name] * (name != "write")  # Perhaps elsewhere than it thinks.
        except OSError:
            pass
    return done
"""


def probe_sandbox(directory):
    """Find out what this system has to keep jobs in, by real jobs that try to get out of it;
    return the best Protection that works. For the start of the client: it takes about 0.1 s, and
    more where little works."""
    if os.name == "nt":
        return Protection(words="jobs run with your rights, in a job object: what they start ends "
                          "with them and counts for their bounds")
    folder, harness = directory / "probe", directory / "probe" / "harness.py"
    remove_tree(folder)
    (folder / "files").mkdir(parents=True, mode=0o700)
    harness.write_text(HARNESS, encoding="utf-8")
    try:
        for protection in candidates():
            if protection.first_user == JOB_USERS and taken_users():
                continue
            can = probe(protection, folder, harness)
            if can is not None and not (protection.files and {"read", "write"} & set(can)):
                return replace(protection, words=describe(protection, can))
        return Protection()
    finally:
        remove_tree(folder)


def probe(protection, folder, harness):
    """Run a job that tries to get out; return what it could do, None if it did not run."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        secret = folder / "secret"
        secret.write_text("x")
        with contextlib.suppress(FileNotFoundError):
            (folder / "secret.job").unlink()
        given = json.dumps({"secret": str(secret.resolve()), "port": listener.getsockname()[1],
                            "pid": os.getpid()}).encode()
        files = []
        for name, data in (("probe.py", PROBE), ("in", given)):
            (folder / "files" / name).write_bytes(data)
            files.append({"name": name, "sha256": hashlib.sha256(data).hexdigest(), "main": True})
        job = Job("probe", workunit="probe", files=files[:1], input=files[1])
        try:
            prepare_slot(folder / "slot", job, folder / "files", PROBE_SECONDS)
            task = Task(job, folder / "slot", harness, PROBE_SECONDS, 0.0, protection)
            timer = threading.Timer(PROBE_SECONDS, task.kill)
            timer.start()
            code = task.wait()
            timer.cancel()
            if code:
                return None
            written = ["write"] if (folder / "secret.job").exists() else []
            return json.loads(read_regular(task.slot / "output", 999)) + written
        except (OSError, ValueError):
            return None


def describe(protection, can):
    """Say in one sentence what jobs can do, of which `can` is what one has just done."""
    words = ["jobs " + ("can connect to the network" if "network" in can else "see no network")]
    words.append("can write what you can" if "write" in can else
                 "can write only in their own directory")
    words.append("read what you can" if "read" in can else "read only the system and Python")
    words.append("do not see other programs" if protection.namespaces else
                 "cannot disturb other programs" if "signal" not in can else
                 "could end other programs of the user they run as")
    sentence = ", ".join(words[:-1]) + ", and " + words[-1]
    return sentence + ("; they run as root: better start this as another user" if "root" in can
                       else "")


@functools.lru_cache(1)
def visible_paths():
    """What a job has to see of this Python, which may live in somebody's home: (real paths, pairs
    of a link and what it means). Never a home as a whole."""
    names = ("bin", "lib", "lib32", "lib64", "pyvenv.cfg")
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    paths = {os.path.join(prefix, name) for prefix in prefixes for name in names}
    paths |= set(os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            if "/" in line and ".so" in line:  # Libraries of Python in places of their own
                paths.add(os.path.dirname(line[line.index("/"):]))
    paths = {path for path in paths if path.startswith("/") and os.path.exists(path)}
    hidden = hidden_paths()
    real = {os.path.realpath(path) for path in paths}
    real = sorted(path for path in real if not any(
        h == path or h.startswith(path.rstrip("/") + "/") for h in hidden))
    return real, [(path, os.path.realpath(path)) for path in sorted(paths)
                  if path != os.path.realpath(path)]


def hidden_paths():
    """Homes, which jobs need not see."""
    homes = {os.path.realpath(os.path.expanduser("~")), "/home", "/root", "/Users"}
    return sorted(home for home in homes if home.count("/") > 1 or home in (
        "/home", "/root", "/Users"))


def hand_over(slot, user):
    """Give a slot to the user its job runs as. A file of several names may be somebody else's."""
    os.chown(slot, user, user)
    for entry in os.scandir(slot):
        status = entry.stat(follow_symlinks=False)
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            os.unlink(entry.path)
        else:
            os.chown(entry.path, user, user, follow_symlinks=False)


@functools.lru_cache(2)
def compiled(source, name):
    """Compile a program once for all jobs."""
    return compile(source, name, "exec")


# What a new Python does first: the rest comes through standard input.
BOOT = ("import sys; sys.path[:] = [p for p in sys.path if p]; import marshal; "
        "keeper, harness, order = marshal.load(sys.stdin.buffer); exec(keeper)")


class Task:
    """A running job: a process of its own, in a slot directory."""

    def __init__(self, job, slot, harness, seconds, now, protection=Protection(), held=None):
        """`held` is the open file with the slot's lock, for the keeper to have until its end."""
        self.job, self.slot, self.seconds, self.looked = job, slot, seconds, now
        self.began, self.makes_way = job.elapsed_time, False
        self.measured = -math.inf
        self.verdict = None  # (exit_status, text) if we ended it
        self.ending = self.gone = False
        self.lock, self.used = threading.Lock(), {}
        self.taken = []  # messages that can be deleted once the state is kept
        self.baggage = self._baggage()  # Our own copies are not the job's consumption.
        self.keeper, user = os.name != "nt", protection.user(slot.name)
        folder = str(slot.resolve())
        environment = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
        environment.update(PYTHONHASHSEED="0", PYTHONUTF8="1", HOME=folder, TMPDIR=folder,
                           TEMP=folder, TMP=folder)
        # Not -I: it ignores PYTHONHASHSEED, and replicas must iterate over sets in one order. The
        # environment is our own and the harness drops its directory from sys.path: same effect.
        command = [sys.executable, "-s", "-B"]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(
            os, "O_NONBLOCK", 0)
        with open(os.open(slot / "stderr.txt", flags, 0o600), "ab") as stderr:
            if self.keeper:  # In a session of its own: the terminal's Ctrl-C is for the client.
                if os.getuid() == 0:  # Back as well: without a sandbox jobs have no root's rights.
                    hand_over(slot, user or 0)
                self.process = subprocess.Popen(
                    command + ["-c", BOOT], cwd="/", env=environment, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                    pass_fds=[held.fileno()] if held else [])
                self._send(dict(self._order(protection, user), folder=folder,
                                harness=str(harness.resolve()),
                                files_max=max(64, held.fileno() + 1 if held else 0)))
                return
            environment["PATH"] = os.environ.get("PATH", "")
            self.process = subprocess.Popen(
                command + [str(harness.resolve()), folder], cwd=folder, env=environment,
                stdin=subprocess.PIPE, stdout=stderr, stderr=stderr,
                creationflags=subprocess.BELOW_NORMAL_PRIORITY_CLASS
                | subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW)

    def _baggage(self):
        """Bytes and number of the files that the client has put into the slot."""
        sizes = []
        for name in {open_name(f) for f in self.job.downloads} | {"job.json"}:
            with contextlib.suppress(OSError):
                sizes.append((self.slot / name).stat().st_size)
        return sum(sizes), len(sizes)

    def _order(self, protection, user):
        """What the keeper has to know."""
        job, (visible, links) = self.job, visible_paths()
        return {"namespaces": protection.namespaces, "files": protection.files, "user": user,
                "seccomp": protection.seccomp, "visible": visible, "links": links,
                "hidden": hidden_paths(), "baggage": self.baggage, "memory": job.rsc_memory_bound,
                "disk": job.rsc_disk_bound, "cpu_seconds": cpu_bound(job, self.seconds),
                "n_files": SLOT_FILES_MAX, "processes": PROCESSES_MAX, "printed": PRINTED_MAX}

    def _send(self, order):
        """Send the keeper its program, the harness and what it has to know. The pipe stays open:
        its end means that the job is to end."""
        programs = compiled(KEEPER, "keeper"), compiled(HARNESS, "harness")
        with contextlib.suppress(OSError):  # It has died: wait() will tell.
            self.process.stdin.write(marshal.dumps(programs + (order,)))
            self.process.stdin.flush()

    def wait(self):
        """Block until the process has ended (own thread); return its exit code."""
        report = self.process.stdout.read(65536) if self.keeper else b""
        if os.name != "nt" and hasattr(os, "waitid"):
            # While it is a zombie its number cannot be given to others: now kill what it left.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            with self.lock:
                self._kill_group()
                self.gone = True
        code = self.process.wait()
        self.gone = True
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, AttributeError):
                pipe.close()
        return self._take_report(report, code) if self.keeper else code

    def _take_report(self, report, code):
        """Note what the keeper says of the job, and return the job's own exit code."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            self.used = dict(json.loads(report))
            if self.used["stopped"]:
                status, text = self.used["stopped"]
                self.verdict = self.verdict or (int(status), plain(text, 600))
            return -9 if self.used["code"] is None else int(self.used["code"])
        return code or EXIT_CHILD_FAILED

    def _kill_group(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, exit_status=0, text=""):
        """End it, with everything it started. The first reason given is kept; none: not its fault,
        it will go on later."""
        self.verdict = self.verdict or (exit_status and (exit_status, text))
        with self.lock:
            if self.gone or self.ending:
                return
            self.ending = True
            if not self.keeper:
                return self.process.kill()
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # The keeper ends it, or is ended, some time later.
            timer = threading.Timer(KILL_SECONDS, self.kill_keeper)
            timer.daemon = True
            timer.start()

    def kill_keeper(self):
        """End a keeper that has not ended by itself, and what dies with it."""
        with self.lock:
            if self.keeper and not self.gone:
                self._kill_group()

    def had_its_turn(self):
        """Has it run for so long that another project may have its processor?"""
        seconds = self.job.elapsed_time - self.began
        name = "checkpoint.json" if self.job.platform == "python" else "checkpoint"
        return seconds >= TURN_LOST_SECONDS or seconds >= TURN_SECONDS and (
            self.slot / name).is_file()

    def unpaid(self):
        """Processor seconds that it has used beyond those it said it would."""
        used = number(self.used.get("cpu_time"), 0, 1e12, 0.0)
        return max(0.0, used - (self.job.elapsed_time - self.began) * self.job.ncpus)

    def tick(self, now):
        """Count the time. Suspension of the computer and jumps of the clock are not computing."""
        self.job.elapsed_time += min(max(0.0, now - self.looked), TICK_MAX)
        self.looked = now

    def look(self, now):
        """Count the time and kill the process if it is beyond a bound. Return True if there were
        messages for the server."""
        self.tick(now)
        job = self.job
        if job.elapsed_time > self.seconds:
            self.kill(EXIT_TIME, "stopped: over its time limit of %.0f s" % self.seconds)
        if abs(now - self.measured) < LOOK_SECONDS:
            return False
        self.measured = now
        if not self.keeper:
            self._look_at_disk()
        with contextlib.suppress(OSError, ValueError):  # It may be half written just now.
            name = "progress.txt" if job.platform == "python" else "fraction_done"
            fraction = float(read_regular(self.slot / name, 64))
            job.fraction_done = number(fraction, 0.0, 1.0, job.fraction_done)
        return self.take_trickles(now)

    def _look_at_disk(self):
        """What keepers do elsewhere."""
        nbytes, n = tree_size(self.slot, self.baggage[1] + SLOT_FILES_MAX)
        if nbytes - self.baggage[0] > self.job.rsc_disk_bound:
            self.kill(EXIT_DISK, "stopped: over its disk limit of %.0f MB"
                      % (self.job.rsc_disk_bound / 1e6))
        if n - self.baggage[1] > SLOT_FILES_MAX:
            self.kill(EXIT_DISK, "stopped: over its limit of %d files" % SLOT_FILES_MAX)

    def take_trickles(self, now):
        """Take the messages that the job has left; True if there were any. Their files go at the
        next look: by then the state is kept."""
        for path in self.taken:
            with contextlib.suppress(OSError):
                path.unlink()
        self.taken, job, old = [], self.job, self.job.n_trickles
        with contextlib.suppress(OSError):
            found = [TRICKLE.fullmatch(name) for name in os.listdir(self.slot)]
            ups = sorted(int(m[1]) for m in found if m and m[0].startswith("trickle_up."))
            for n in ups:
                if n < job.n_trickles or len(job.trickles) >= TRICKLES_HELD:
                    continue
                job.n_trickles = n + 1
                try:
                    text = read_regular(self.slot / ("trickle_up.%d" % n), TRICKLE_BYTES)
                except OSError:
                    continue  # No plain file, so no message.
                text = storable(text.decode("utf-8", "replace"))
                job.trickle_time = max(int(now), job.trickle_time + 1)
                job.trickles.append({"time": job.trickle_time, "text": text})
            self.taken = [self.slot / ("trickle_up.%d" % n) for n in ups if n < job.n_trickles]
        return job.n_trickles > old

    def outcome(self, code):
        """What an ended process means: (exit_status, text in plain words)."""
        job, done = self.job, {}
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            done = dict(json.loads(read_regular(self.slot / "done.json", 4096)))
        # The job counts what it has used before a stop; its keeper, what its processes hide.
        job.cpu_time = max(number(told.get("cpu_time"), 0, 1e12, 0.0) for told in (done, self.used))
        job.peak_memory = max(int(number(told.get("peak_memory"), 0, 1e15, 0)) for told in (
            done, self.used, {"peak_memory": job.peak_memory}))
        if self.verdict:
            return self.verdict
        if code == 0:
            with contextlib.suppress(OSError):
                self.slot.chmod(0o700)
                if stat.S_ISREG(os.lstat(self.slot / "output").st_mode):
                    os.chmod(self.slot / "output", 0o600)
                read_regular(self.slot / "output", 1)
                return 0, ""
            return EXIT_CHILD_FAILED, "it left no output"
        if code == -getattr(signal, "SIGXCPU", 0):
            code = EXIT_TIME
        known = {EXIT_CHILD_FAILED: "",
                 EXIT_DISK: "stopped: over its disk limit of %.0f MB" % (job.rsc_disk_bound / 1e6),
                 EXIT_TIME: "stopped: over its limit of %.0f s of processor time"
                            % cpu_bound(job, self.seconds),
                 EXIT_MEMORY: "stopped: over its memory limit of %.0f MB"
                              % (job.rsc_memory_bound / 1e6)}
        if code in known:
            return code, known[code]
        if self.job.platform != "python" and 0 < code < 256:
            return code, "its program ended with exit status %d" % code
        how = "signal %d" % -code if code < 0 else "exit code %d" % code
        return EXIT_CHILD_FAILED, "its process ended with " + how

    def stderr(self, nbytes):
        """The end of what the job printed."""
        try:
            return read_regular(self.slot / "stderr.txt", nbytes, end=True).decode(
                "utf-8", "replace")
        except OSError:
            return ""


# ---- 8. View -----------------------------------------------------------------

MESSAGES_KEPT = 100
LOG_BYTES_MAX = 1_000_000  # of log.txt; as much again in log.old.txt
SECONDS_A_FRAME = 1.0
FRAMES_QUEUED, MESSAGES_QUEUED = 10, 1000  # while the terminal takes nothing, then they are dropped
PAGE_THREADS = 16
PAGE_SECONDS = 10.0  # for one request of the page, however slow its client
SGR = {"bold": "1", "dim": "2", "good": "32", "wait": "33", "bad": "31"}
JOB_ORDER = "running uploading downloading waiting failed aborted finished".split()
JOB_STYLES = {"running": "good", "failed": "bad", "aborted": "wait"}


def duration(seconds):
    """Seconds in words, for people."""
    seconds = number(seconds, 0, 1e11, 0.0)
    if seconds < 9.95:
        return "%.1f s" % seconds
    if seconds < 99.5:
        return "%.0f s" % seconds
    minutes = int(seconds / 60 + 0.5)
    if minutes < 120:
        return "%d min" % minutes
    if minutes < 12 * 60:
        return "%d h %02d min" % divmod(minutes, 60) if minutes % 60 else "%d h" % (minutes // 60)
    hours = int(seconds / 3600 + 0.5)
    return "%d h" % hours if hours < 72 else "%.0f days" % (seconds / 86400)


def clock_time(at, now):
    """The time of day, for people; with the date if it is not within twelve hours."""
    form = "%H:%M" if abs(at - now) < 12 * 3600 else "%d %b %H:%M"
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):  # Windows knows no year beyond 3000.
        return "some day"


def until_words(until, now):
    """Say until when something waits: on the clock and from now; nothing if that has passed."""
    if not until or until <= now:
        return ""
    return "until %s (in %s)" % (clock_time(until, now), duration(until - now))


def due_words(deadline, now):
    """Say when a job is due. Without a deadline, or with one in years, nothing is."""
    if not 0 < deadline < now + 3 * 365 * 86400:
        return ""
    if deadline <= now:
        return "overdue since %s" % clock_time(deadline, now)
    return "due in %s" % duration(deadline - now)


def percent(fraction):
    """A fraction as per cent; 100 % only when it is all."""
    return "%d %%" % math.floor(100 * number(fraction, 0, 1, 0.0) + 1e-9)


def how_many(n, noun):
    """A number and its noun, in the plural if need be."""
    return "%d %s%s" % (n, noun, "" if n == 1 else "s" if noun[-1] != "s" else "es")


def by_state(jobs):
    """The jobs as people want them: what runs first, what is over last."""
    order = {state: i for i, state in enumerate(JOB_ORDER)}
    return sorted(jobs, key=lambda job: order.get(job["state"], len(order)))


def count_jobs(jobs):
    """How many jobs are in which state, in words."""
    counts = [(sum(job["state"] == state for job in jobs), state) for state in JOB_ORDER]
    return ", ".join("%d %s" % pair for pair in counts if pair[0]) or "none"


def job_facts(job, now, project=""):
    """What there is to say of a job beside its name and progress, the most important first."""
    state, facts = job["state"], []
    if job["why"] or job["until"] > now:
        facts.append(" ".join(filter(None, (plain(job["why"]), until_words(job["until"], now)))))
    elif state == "running" and job["remaining"] is not None:
        facts.append("%s left" % duration(job["remaining"]))
    elif state == "waiting" and job["remaining"] is not None:
        facts.append("takes %s" % duration(job["remaining"]))
    elif job["elapsed"]:
        facts.append("took %s" % duration(job["elapsed"]))
    if state not in ("failed", "aborted"):
        facts.append(due_words(job["deadline"], now))
    return [fact for fact in facts + [plain(project, 30)] if fact]


def now_sentence(s):
    """One sentence on what the client does or waits for, and until when; may be empty."""
    if s["stopping"]:
        return "Stopping; what is not finished goes on at the next start. Ctrl-C again: at once."
    until = until_words(s["until"], s["now"])
    return ", ".join(filter(None, (plain(s["waiting"]), until if s["waiting"] else "")))


# -- lines for a terminal


def char_columns(c):
    """Columns that a character takes on a terminal: none, one or two."""
    if unicodedata.category(c) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def columns(text):
    """Columns that a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(char_columns, text))


def cut(text, width, mark="..."):
    """Shorten a text to some columns; a mark shows where."""
    if columns(text) <= width:
        return text
    if width <= columns(mark):
        return mark[:max(0, width)]
    left, kept = width - columns(mark), []
    for c in text:
        left -= char_columns(c)
        if left < 0:
            break
        kept.append(c)
    return "".join(kept).rstrip() + mark


def pad(text, width):
    """Fill a text with blanks up to some columns."""
    return text + " " * (width - columns(text))


def wrap(text, width, n_max, mark):
    """Break a text into at most so many lines, at blanks; the last one is cut."""
    lines = [""]
    for word in text.split():
        longer = (lines[-1] + " " + word).strip()
        if columns(longer) <= width or len(lines) == n_max or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [cut(line, width, mark) for line in lines if line]


class Pen:
    """How lines are drawn: how wide, in colour or not, with which signs."""

    def __init__(self, width, colour, unicode):
        self.width, self.colour, self.unicode = width, colour, unicode
        self.full, self.empty, self.mark, self.dot = (
            ("\u2588", "\u2591", "\u2026", " \u00b7 ") if unicode else ("#", "-", "...", ", "))

    def text(self, value, length=500):
        """Text of others as this terminal can show it: one line, no control characters."""
        text = plain(value, length)
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def line(self, *spans):
        """Join pairs of style and text to a line that is never too wide."""
        parts, left = [], self.width
        for style, text in spans:
            text = cut(text, left, self.mark)
            left -= columns(text)
            coded = self.colour and style and text
            parts.append("\x1b[%sm%s\x1b[0m" % (SGR[style], text) if coded else text)
        return "".join(parts)

    def spread(self, left, right, style="", side="dim"):
        """A line with one text at each end; the left one gives way."""
        right = cut(right, self.width, self.mark)
        room = self.width - columns(right) - 2
        if room < 4:
            return self.line((style, left))
        return self.line((style, pad(cut(left, room, self.mark), room + 2)), (side, right))

    def first(self, facts, room):
        """Join as many facts as there is room for, at least the first one."""
        text = ""
        for fact in facts:
            longer = text + self.dot + fact if text else fact
            if text and columns(longer) > room:
                break
            text = longer
        return text

    def waits(self, why, until, room):
        """Say why and until when something waits; the end of the reason is what gives way."""
        if until and columns(until) > room:
            until = until.partition(" (")[0]
        why = self.text(why)
        if until and why:
            why = cut(why, room - columns(until) - 2, self.mark)
            return why + ", " + until if why else until
        return cut(why or until, room, self.mark)

    def bar(self, fraction, width):
        """A progress bar; full only when all is done."""
        n = math.floor(width * number(fraction, 0, 1, 0.0) + 1e-9)
        return self.full * n + self.empty * (width - n)


def fit(lines, room, mark):
    """As many lines as there is room for; the last one says how many are missing."""
    if len(lines) <= room:
        return lines
    return lines[:max(0, room - 1)] + [mark(len(lines) - room + 1)] * (room > 0)


def project_name(project):
    """What to call a project: its name, or its address until it has told its name."""
    return project["name"] or project["url"]


def project_figures(p, several):
    """The numbers of a project in words, the most important first."""
    yield "credit %.10g" % round(p["credit"], 1)
    if several:
        yield "share %s, given %s" % (percent(p["share_wanted"]), percent(p["share_given"]))
    if p["n_failed"]:
        yield "%d failed" % p["n_failed"]
    yield how_many(p["n_reported"], "job") + " done"


def project_lines(s, pen, short):
    """The lines of all projects, as one list for each project. `short`: one line each."""
    several = len(s["projects"]) > 1
    for p in s["projects"]:
        name, until = pen.text(project_name(p), 200), until_words(p["until"], s["now"])
        style = "wait" if until else "dim"
        figures = pen.first(project_figures(p, several), pen.width - min(columns(name), 20) - 2)
        first = pen.spread(name, figures, "bold", "")
        if short and until:  # The figures can wait; why nothing comes, and until when, cannot.
            name = cut(name, pen.width // 3, pen.mark)
            state = pen.waits(p["state"], until, pen.width - columns(name) - 2)
            first = pen.line(("bold", name), (style, "  " + state))
        state = pen.waits(p["state"], until, pen.width - 2)
        yield [first] if short or not state else [first, pen.line((style, "  " + state))]


def job_line(job, s, pen):
    """One line: how far the job is, what it is called, when it will be ready, when it is due."""
    bar = 20 if pen.width >= 100 else 12 if pen.width >= 70 else 7 if pen.width >= 50 else 0
    state, style = job["state"], JOB_STYLES.get(job["state"], "")
    done = "%5s" % percent(job["fraction"])
    if state == "running":
        first = [(style, pen.bar(job["fraction"], bar)), ("", done + "  ")]
    else:
        begun = job["fraction"] > 0 and state in ("waiting", "uploading", "downloading")
        done = done if begun and bar >= 12 else ""
        first = [(style, pad(state, bar + 5 - len(done))), ("", done + ("  " if bar else " "))]
    room = pen.width - sum(columns(text) for _, text in first)
    several = len(s["projects"]) > 1
    facts = [pen.text(f) for f in job_facts(job, s["now"], job["project"] if several else "")]
    name = pen.text(job["name"], 200)
    right = pen.first(facts, room - min(columns(name), max(12, room // 2)) - 2)
    right = cut(right, room - min(columns(name), max(8, room // 3)) - 2, pen.mark)
    left = room - columns(right) - (2 if right else 0)
    late = 0 < job["deadline"] < s["now"] + number(job["remaining"], 0, 1e11, 0.0)
    kind = "bad" if late or state == "failed" else "dim"
    return pen.line(*first, ("", pad(cut(name, left, pen.mark), left)),
                    (kind, "  " + right if right else ""))


def message_line(message, pen):
    """One line for a message: when, and what."""
    at, kind, text = message
    return pen.line(("dim", clock_time(at, at) + " "),
                    ("wait" if kind == "warn" else "", pen.text(text)))


def head_lines(s, pen, height):
    """The lines at the top: who this is and what time, and what is waited for."""
    who = [plain(s["version"], 40), plain(s["host"], 80), how_many(s["n_cpus"], "processor")]
    at = time.strftime("%H:%M:%S", time.localtime(s["now"]))
    sentence = wrap(pen.text(now_sentence(s)), pen.width, 2 if height >= 8 else 1, pen.mark)
    return [pen.spread(pen.text(pen.dot.join(filter(None, who))), at, "bold")] + [
        pen.line(("wait", line)) for line in sentence]


def foot_lines(s, pen, height):
    """The lines at the bottom, where there is room for them."""
    if height < 18:
        return []
    lines = wrap(pen.text(s["protection"]), pen.width, 2, pen.mark)
    lines.append("Ctrl-C stops cleanly: the next start goes on from there.")
    return [""] + [pen.line(("dim", line)) for line in lines]


def render(snapshot, width, height, colour, unicode=True):
    """Draw the live view: at most `height` lines of at most `width` columns. Small terminals get
    less detail; the head, what is waited for, and the counts of jobs go last."""
    s, pen = snapshot, Pen(width, colour, unicode)

    def more(n):
        return pen.line(("dim", "  and %d more" % n))

    gap = [""] if height >= 14 else []
    head, foot = head_lines(s, pen, height), foot_lines(s, pen, height)
    title = [pen.line(("bold", "Jobs: "), ("", count_jobs(s["jobs"])))]
    room = height - len(head) - len(title) - len(foot) - 2 * len(gap)
    jobs = [job_line(job, s, pen) for job in by_state(s["jobs"])]
    room_projects = max(room - len(jobs), (room + 1) // 2)
    blocks = list(project_lines(s, pen, False))
    if sum(map(len, blocks)) > room_projects:
        blocks = list(project_lines(s, pen, True))
    projects = fit([line for block in blocks for line in block], room_projects, more)
    lines = head + gap + projects + gap + title + fit(jobs, room - len(projects), more)
    room = height - len(lines) - len(foot) - len(gap)
    if room > 0 and s["messages"]:
        lines += gap + [message_line(m, pen) for m in s["messages"][-min(room, 10):]]
    return (lines + foot)[:max(0, height)]


# -- the terminal


class LogFile:
    """A file of messages that never grows beyond a bound: when full it becomes NAME.old.txt.
    Nothing it does raises OSError: a full disk must not stop the client."""

    def __init__(self, path, nbytes_max=LOG_BYTES_MAX):
        self.path, self.nbytes_max, self.torn = Path(path), nbytes_max, False

    def write(self, line):
        """Append a line. Opened each time, so that people may move or delete the file."""
        data = (b"\n" if self.torn else b"") + (line + "\n").encode("utf-8", "replace")
        data = data[:self.nbytes_max]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_size + len(data) > self.nbytes_max:
                    old = self.path.with_name(self.path.stem + ".old" + self.path.suffix)
                    os.replace(self.path, old)
                    self.torn = False
            f = os.open(self.path, flags | getattr(os, "O_BINARY", 0), 0o600)
            try:
                self.torn = os.write(f, data) < len(data)
            finally:
                os.close(f)


class Voice:
    """What people are told: one line per event, in plain words; on a live view's terminal above
    the view. The last messages are kept for the view, all of them go to the log file."""

    def __init__(self, quiet=False, stream=None, errors=None, clock=time.time, log=None,
                 screen=None):
        self.quiet, self.stream, self.errors = quiet, stream or sys.stdout, errors or sys.stderr
        self.clock, self.log, self.screen = clock, log, screen
        self.messages = collections.deque(maxlen=MESSAGES_KEPT)  # of (time, kind, text)

    def _say(self, kind, text, stream):
        now, text = self.clock(), plain(text, 4000)
        at = time.localtime(now)
        self.messages.append((now, kind, text))
        if self.log:
            mark = "warning: " if kind == "warn" else ""
            self.log.write("%s %s%s" % (time.strftime("%Y-%m-%d %H:%M:%S", at), mark, text))
        if self.quiet and kind == "tell":
            return
        line = "%s %s" % (time.strftime("%H:%M:%S", at), text)
        if self.screen and not self.screen.closed and is_terminal(stream):
            self.screen.say(line, kind)
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # Its terminal may be gone.
            print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    def tell(self, text):
        self._say("tell", text, self.stream)

    def warn(self, text):
        self._say("warn", text, self.errors)


def is_terminal(stream):
    """Does a person see at once what is written there?"""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # Under pythonw there is none; or it is closed.
        return False


def in_foreground(fd):
    """Is the terminal ours to draw on? Not while a shell runs us in the background."""
    try:
        group = os.tcgetpgrp(fd)
    except (AttributeError, OSError):  # Windows; or not the terminal that controls us
        return True
    return group in (0, os.getpgrp())  # 0: it belongs to processes that a container cannot see.


def enable_ansi():
    """Have the console of Windows 10 and later obey escape sequences. Return a function that sets
    it back; None if it cannot, as older ones."""
    with contextlib.suppress(Exception):
        import ctypes

        kernel = ctypes.windll.kernel32
        kernel.GetStdHandle.restype = ctypes.c_void_p
        handle, mode = ctypes.c_void_p(kernel.GetStdHandle(-11)), ctypes.c_ulong()
        if kernel.GetConsoleMode(handle, ctypes.byref(mode)) and kernel.SetConsoleMode(
                handle, mode.value | 4):  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
            return functools.partial(kernel.SetConsoleMode, handle, mode.value)
    return None


def open_screen(quiet, lines_only, stream=None, environ=os.environ):
    """Return a Screen if a live view can and may be drawn there, else None: plain lines then."""
    stream = stream or sys.stdout
    if quiet or lines_only or not is_terminal(stream):
        return None
    if os.name == "nt":
        restore = enable_ansi()
        if restore is None:
            return None
    else:
        restore = None
        if environ.get("TERM", "dumb") == "dumb":
            return None
    return Screen(stream, not environ.get("NO_COLOR"), restore)


class Screen:
    """The live view on a terminal. Not the alternate screen: messages go into the scrollback as
    ordinary lines, and the view is drawn anew below them.

    Each frame is one write which leaves the terminal as it found it: cursor shown and below the
    view, lines wrapping. So nothing has to be repaired after kill -9, and close() only wipes the
    view. A thread writes, since a terminal may take nothing for hours (Ctrl-S, text being selected
    in a Windows console, a lost ssh) while the client must go on."""

    BEGIN, END, WIPE = "\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h", "\x1b[J"

    def __init__(self, stream, colour=True, restore=None):
        self.raw = open(stream.fileno(), "wb", buffering=0, closefd=False)
        self.encoding = "utf-8" if os.name == "nt" else stream.encoding or "ascii"
        self.colour, self.restore, self.drawn_at = colour, restore, None
        self.lines, self.widths = [], []  # of the view that stands there now
        try:
            "\u2588\u2591\u2026\u00b7".encode(self.encoding)
            self.unicode = True
        except (UnicodeEncodeError, LookupError):
            self.unicode = False
        self.closed = False
        self.frames = queue.SimpleQueue()  # The one that a signal handler may put into.
        self.old_handler = None
        if hasattr(signal, "SIGCONT"):
            with contextlib.suppress(ValueError):  # Not the main thread: then do without.
                self.old_handler = signal.signal(signal.SIGCONT, self.forget)
        self.thread = threading.Thread(target=self._write_frames, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def size(self):
        """Columns and rows of the terminal."""
        try:
            width, height = os.get_terminal_size(self.raw.fileno())
        except OSError:
            width, height = 0, 0
        return width or 80, height or 24  # Some serial lines say 0.

    def due(self, now):
        """Is it time for the next show()? Also if the clock was set back."""
        return self.drawn_at is None or not 0 <= now - self.drawn_at < SECONDS_A_FRAME

    def show(self, snapshot, now):
        """Draw the view, or nothing if it is too early, or if the terminal is not ours now."""
        if self.closed or not self.due(now) or self.frames.qsize() > FRAMES_QUEUED:
            return
        self.drawn_at = now
        if not in_foreground(self.raw.fileno()):
            self.forget()
            return
        width, height = self.size()
        up = self._up(width)
        # Not the whole screen, so that the last messages stay in sight. The last column stays
        # free: some terminals wrap as soon as it is taken.
        room = max(height * 2 // 3, min(height - 2, 12))
        gap = [""] if height >= 20 else []
        s, size = dict(snapshot, messages=[]), (width - 1, room - len(gap))
        self.lines = gap + render(s, *size, self.colour, self.unicode)
        self.widths = [columns(line) for line in gap + render(s, *size, False, self.unicode)]
        self._put(up + self._view() + self.WIPE)

    def say(self, line, kind="tell"):
        """Let a message appear above the view; a long one wraps as others do."""
        if self.closed or self.frames.qsize() > MESSAGES_QUEUED:
            return
        if self.colour and kind == "warn":
            line = "\x1b[%sm%s\x1b[0m" % (SGR["wait"], line)
        if not in_foreground(self.raw.fileno()):
            self.forget()
        up = self._up(self.size()[0])
        self._put(up + self.WIPE + "\x1b[?7h" + line + "\r\n\x1b[?7l" + self._view())

    def forget(self, *signal_arguments):
        """Draw the next view where the cursor is: others have written to the terminal."""
        self.lines, self.widths = [], []

    def close(self):
        """Wipe the view; wait a moment until all that was said is written. Twice is fine."""
        if self.closed:
            return
        self._put(self._up(self.size()[0]) + self.WIPE)
        self.closed = True
        self.frames.put(None)
        self.thread.join(1.0)
        if self.old_handler is not None:
            signal.signal(signal.SIGCONT, self.old_handler)
        if self.restore:
            self.restore()

    def _up(self, width):
        """Go to the first line of the view. In a narrower window most terminals have wrapped it."""
        rows = sum(max(1, -(-w // width)) for w in self.widths)
        return "\r\x1b[%dA" % rows if rows else "\r"

    def _view(self):
        return "".join(line + "\x1b[K\r\n" for line in self.lines)

    def _put(self, text):
        self.frames.put(self.BEGIN + text + self.END)

    def _write_frames(self):
        for text in iter(self.frames.get, None):
            data = text.encode(self.encoding, "replace")
            with contextlib.suppress(OSError, ValueError):  # The terminal may be gone.
                while data:
                    n = self.raw.write(data)
                    data = data[n or 0:]
                    if not n:  # Somebody has made it non-blocking.
                        time.sleep(0.05)


# -- the page

PAGE_STYLE = """
:root { color-scheme: light dark; --page: #f3f5f7; --card: #fff; --ink: #14202b; --soft: #51606e;
  --line: #d5dce2; --main: #0a6e63; --wait: #8a5200; --bad: #b3261e; --wait-page: #fff4de; }
@media (prefers-color-scheme: dark) { :root { --page: #0f161d; --card: #18222c; --ink: #eef3f7;
  --soft: #a9b8c5; --line: #32414f; --main: #53d1c0; --wait: #f0b04a; --bad: #ff8a80;
  --wait-page: #33291a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 2rem; max-width: 64rem;
  background: var(--page); color: var(--ink); font-family: system-ui, sans-serif;
  line-height: 1.45; overflow-wrap: anywhere; }
h1, h2, h3, p, ul, ol { margin: 0; padding: 0; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin: 1.5rem 0 0.5rem; }
h2 small { font-weight: 400; }
h3 { font-size: 1.05rem; }
a { color: var(--main); }
a:focus-visible { outline: 3px solid var(--main); outline-offset: 2px; }
small, .soft, footer { color: var(--soft); font-size: 0.9rem; }
ul, ol { list-style: none; }
#now p { margin-top: 0.75rem; padding: 0.5rem 0.8rem; border-radius: 0.5rem; font-size: 1.1rem;
  background: var(--wait-page); border-left: 0.3rem solid var(--wait); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.75rem;
  padding: 0.75rem 1rem; margin-bottom: 0.6rem; }
.row, .facts { display: flex; flex-wrap: wrap; gap: 0 1.25rem; align-items: baseline; }
.row { justify-content: space-between; }
.row > * { min-width: 0; }
.waiting { color: var(--wait); }
.bad, .failed { color: var(--bad); }
.state { font-weight: 600; }
.running { color: var(--main); }
progress { display: block; width: 100%; height: 0.7rem; margin: 0.35rem 0; appearance: none;
  border: 0; border-radius: 0.35rem; overflow: hidden; background: var(--line);
  accent-color: var(--main); }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--main); }
progress::-moz-progress-bar { background: var(--main); }
#messages li { padding: 0.2rem 0; border-bottom: 1px solid var(--line); display: flex;
  gap: 0.75rem; }
#messages li:last-child { border: 0; }
time { color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { margin-top: 1.5rem; }
#gone { position: sticky; top: 0; padding: 0.6rem 1rem; border-radius: 0.5rem; font-weight: 600;
  background: var(--card); color: var(--bad); border: 2px solid var(--bad); }
[hidden] { display: none; }
"""

# The parts of a fresh copy of the page replace those that have changed, but not the one in which
# somebody marks a text or has gone to a link with the keyboard.
PAGE_SCRIPT = """
const gone = document.getElementById("gone");
function inUse(part) {
  const marked = getSelection();
  return part.contains(document.activeElement)
    || !marked.isCollapsed && part.contains(marked.anchorNode);
}
async function update() {
  try {
    const answer = await fetch("/", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of fresh.querySelectorAll("[data-part]")) {
      const old = document.getElementById(part.id);
      if (old.innerHTML !== part.innerHTML && !inUse(old)) old.replaceWith(part);
    }
    document.title = fresh.title;
    gone.hidden = true;
  } catch (e) {
    gone.hidden = false;
  }
  setTimeout(update, 2000);
}
setTimeout(update, 2000);
"""

PAGE_ICON = ("data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16' "
             "fill='%230a7a6e'%3E%3Cpath d='M1 1h6v6H1zM9 1h6v6H9zM1 9h6v6H1z'/%3E%3C/svg%3E")


def source_hash(text):
    """Name an inline script or style in a content security policy: only this one is obeyed."""
    digest = hashlib.sha256(text.encode()).digest()
    return "'sha256-%s'" % base64.b64encode(digest).decode()


PAGE_HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src %s; style-src %s; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % (
            source_hash(PAGE_SCRIPT), source_hash(PAGE_STYLE)),
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin"}


def text_html(value, length=500):
    """Text of others as HTML: no control characters, and its direction stays inside."""
    return "<bdi>%s</bdi>" % html.escape(plain(value, length))


def link_html(url, name):
    """A link, if the address is one of the web; else only its name, since javascript: is no
    place to send people to."""
    if not isinstance(url, str) or not re.fullmatch(r"(?i)https?://[!#-;=?-_a-z~]{1,2000}", url):
        return text_html(name, 100)
    return '<a href="%s" rel="noopener noreferrer" target="_blank">%s</a>' % (
        html.escape(url), text_html(name, 100))


def project_html(p, now, several):
    """One project as a card."""
    figures = [html.escape(figure) for figure in project_figures(p, several)]
    if p["nickname"]:
        figures.append("as " + text_html(p["nickname"], 80))
    links = ["<li>%s</li>" % link_html(link["url"], link["name"]) for link in p["links"]]
    state = ", ".join(filter(None, (plain(p["state"]), until_words(p["until"], now))))
    return '<li class="card"><h3>%s</h3><p class="%s">%s</p><p class="facts soft">%s</p>%s</li>' % (
        link_html(p["url"], project_name(p)), "waiting" if p["until"] > now else "",
        text_html(state), "".join("<span>%s</span>" % f for f in figures),
        '<ul class="facts">%s</ul>' % "".join(links) if links else "")


def job_html(job, now, several):
    """One job as a card."""
    state = job["state"] if job["state"] in JOB_ORDER else ""
    late = 0 < job["deadline"] < now + number(job["remaining"], 0, 1e11, 0.0)
    facts = ", ".join(job_facts(job, now, job["project"] if several else ""))
    parts = ['<li class="card"><div class="row"><h3>%s</h3><span class="state %s">%s</span></div>'
             % (text_html(job["name"], 200), state, state)]
    if state in ("running", "waiting", "downloading", "uploading") and (
            state == "running" or job["fraction"] > 0):
        parts.append('<progress max="1" value="%.4f">%s</progress>' % (
            number(job["fraction"], 0, 1, 0.0), percent(job["fraction"])))
        facts = ", ".join(filter(None, (percent(job["fraction"]), facts)))
    about = ": ".join(filter(None, (plain(job["app"], 80), plain(job["about"]))))
    parts.append('<p class="row"><span class="soft">%s</span><span class="%s">%s</span></p></li>'
                 % (text_html(about), "bad" if late else "soft", text_html(facts)))
    return "".join(parts)


def message_html(message):
    """One message as an item of the list."""
    at, kind, text = message
    return '<li><time>%s</time><span class="%s">%s</span></li>' % (
        html.escape(time.strftime("%H:%M:%S", time.localtime(at))),
        "waiting" if kind == "warn" else "", text_html(text, 2000))


def page_html(s, title):
    """The whole page: what the view shows, and the rest of what is known."""
    now, several = s["now"], len(s["projects"]) > 1
    who = [text_html(s["version"], 40), text_html(s["host"], 80),
           how_many(s["n_cpus"], "processor"), "files in " + text_html(s["directory"])]
    sentence = now_sentence(s)
    parts = {
        "now": "<p>%s</p>" % text_html(sentence) if sentence else "",
        "projects": "<h2>Projects</h2><ul>%s</ul>" % (
            "".join(project_html(p, now, several) for p in s["projects"])),
        "jobs": "<h2>Jobs <small>%s</small></h2><ul>%s</ul>" % (
            count_jobs(s["jobs"]),
            "".join(job_html(job, now, several) for job in by_state(s["jobs"]))),
        "messages": '<h2>Messages</h2><ol class="card">%s</ol>' % "".join(
            message_html(m) for m in reversed(s["messages"])) if s["messages"] else ""}
    body = "".join('<section id="%s" data-part>%s</section>' % part for part in parts.items())
    return "".join((
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>',
        html.escape(plain(title, 100)),
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">',
        '<noscript><meta http-equiv="refresh" content="5"></noscript><link rel="icon" href="',
        PAGE_ICON, '"><style>', PAGE_STYLE, "</style></head><body><p id=\"gone\" hidden role=alert>"
        "No answer: the client has stopped, or is very busy. What is below was true before.</p>"
        "<header><h1>", text_html(title, 100), '</h1><p class="soft">', " &middot; ".join(who),
        "</p></header><main>", body, "</main><footer><p>", text_html(s["protection"]),
        "</p><p>Only programs on this computer can open this page.</p></footer><script>",
        PAGE_SCRIPT, "</script></body></html>"))


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request for the page. Nothing it gets changes anything."""

    timeout = PAGE_SECONDS
    server_version, sys_version = "minigrid", ""

    def do_GET(self):
        """Send the page or its data. Another Host is a foreign web site that has its own name
        lead here, in order to read this page by its script (DNS rebinding)."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.server.hosts:
            return self._refuse(403, "open this page as http://%s/" % self.server.hosts[0])
        text, path = self.server.text, self.path.partition("?")[0]
        if path not in ("/", "/status.json"):
            return self._refuse(404, "there are only / and /status.json")
        if text is None:
            return self._refuse(503, "the client is just starting")
        if path == "/":
            page = page_html(json.loads(text), self.server.title)
            return self._send(200, "text/html; charset=utf-8", page)
        return self._send(200, "application/json", text)

    do_HEAD = do_GET

    def send_error(self, code, message=None, explain=None):
        """Refuse what http.server does not take, without repeating it as that would."""
        if code == 501:
            return self._refuse(405, "only GET and HEAD")
        self._refuse(code, "this is no request for a page")

    def _refuse(self, code, text):
        self._send(code, "text/plain; charset=utf-8", text + "\n")

    def _send(self, code, kind, text):
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in PAGE_HEADERS.items():
            self.send_header(name, value)
        if code == 405:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        """Say nothing: the terminal is for what the client does."""


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server with a bound on its threads, and on the time that each may take."""

    daemon_threads, block_on_close, request_queue_size = True, False, 4 * PAGE_THREADS
    allow_reuse_address = os.name != "nt"  # There it would let two programs share a port.
    text, title, hosts = None, "", ()

    def __init__(self, address):
        self.connections, self.guard = {}, threading.Lock()  # socket: when it must be over
        super().__init__(address, PageHandler)

    def process_request(self, request, client_address):
        """Serve a connection, or close it if too many are open."""
        with self.guard:
            room = len(self.connections) < PAGE_THREADS
            if room:
                self.connections[request] = time.monotonic() + PAGE_SECONDS
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def service_actions(self):
        """Cut off who sends or reads a byte now and then; called twice a second."""
        with self.guard:
            for request, end in self.connections.items():
                if time.monotonic() > end:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request):
        """Forget a connection before it is closed."""
        with self.guard:
            self.connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """A browser that goes away is no error; ours are shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Page:
    """The view as a page for browsers on this computer [D-17]. SystemExit in plain words if the
    port cannot be had; port 0 takes any free one, and `url` says which."""

    def __init__(self, port, title="minigrid volunteer"):
        try:
            self.server = PageServer(("127.0.0.1", port))
        except (OSError, OverflowError) as e:
            raise SystemExit("cannot serve the page at 127.0.0.1:%d: %s. Choose another port, or 0 "
                             "for any free one" % (port, getattr(e, "strerror", "") or e))
        self.shown_at = -math.inf  # when something was last published
        port = self.server.server_address[1]
        self.url = "http://127.0.0.1:%d/" % port
        self.server.title = title
        names = ("127.0.0.1", "localhost", "[::1]")
        self.server.hosts = tuple("%s:%d" % (name, port) for name in names) + (
            names if port == 80 else ())
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def publish(self, snapshot):
        """Show this from now on. As text, so that what changes later is not seen half changed."""
        self.server.text = json.dumps(snapshot)

    def close(self):
        """Stop serving and give the port back."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5.0)


# ---- 9. Client ---------------------------------------------------------------

TRANSFERS_MAX = 4  # of each project: one that drips must not hold up the others
BAD_FILES_MAX = 3  # retries of a file that is wrong or refused
ONCE_TRIES = 5  # replies without work until --once gives up
SAVE_SECONDS = 1.0
WORTH_SECONDS = 5.0  # the end of a job that took longer is kept at once
SAVE_TIMES_SECONDS = 60.0  # how long jobs have run is kept so often
TRANSFER_SECONDS_MAX = 14 * 86400  # from its first failure on [C32]
ROOM_MIN = 1_000_000  # bytes; a disk with less is full: no job is started
PUT_OFF_MAX = 10  # how often a job begins again because the disk was full
SLOT_SECONDS = 0.5  # until a slot is tried again in which a killed client's job still runs
PUT_OFF_SECONDS = 300.0  # at most, until our own full disk is tried again: it costs nobody else
PAGE_PORT = 8081
CACHE_SECONDS = 30 * 86400  # files that no job has needed for so long are deleted


@dataclass
class Options:
    """How this run of the client was asked to behave."""

    nickname: str = ""
    email_addr: str = ""
    password: str = ""
    n_cpus: int = 1
    once: bool = False
    max_jobs: int = 0  # 0: no end
    report_at_once: bool = False
    invitation: str = ""
    platforms: tuple = ("python",)  # programs that may run here
    key: str = ""  # fingerprint of the key that the project must show
    low_water: float = 0.0  # seconds; 0: as the servers' delays say
    high_water: float = 0.0
    moved: bool = False  # the one project that is not named is the one new address
    ask_now: bool = False
    forget: str = ""  # address of a project to part from


@dataclass
class Retry:
    """A file transfer that has failed: how often, how often for a bad file, when again."""

    n: int = 0
    n_bad: int = 0
    at: float = 0.0
    offline: bool = False
    text: str = ""  # what went wrong


class Client:
    """Everything together. step(now) does one turn and never blocks on network or processes;
    wait() blocks until something happens. Owns the directory; the caller holds its lock.
    `wanted` are pairs of address and share (None: as before) of the projects to work for; the
    others that are known here rest. None at all: those of last time."""

    def __init__(self, directory, wanted, options, transport, rng, voice, host=None):
        self.directory, self.options, self.transport = directory, options, transport
        self.rng, self.voice, self.host = rng, voice, host or (lambda: {})
        self.events, self.busy = queue.SimpleQueue(), set()
        self.op = SchedulerOp(rng)
        self.tasks, self.retries, self.checked = {}, {}, set()
        self.untaken = {}  # of finished jobs, whose output could not be taken yet
        self.left_slots = set()  # to be deleted when the state is kept
        self.start_time, self.shortage = 0.0, ""  # no job is started before this, and why
        self.now = 0.0
        self.leaving = self.stopped = self.fetched = False
        self.told, self.apps = set(), set()
        self.unsent = None  # a request that waits until it is noted on the disk
        self.full = {}  # for what our disk has no room, as was said
        self.protection = Protection()  # what keeps jobs from doing harm
        self.dirty, self.urgent, self.save_time = True, True, 0.0
        (directory / "slots").mkdir(parents=True, exist_ok=True)
        self._write_harness()
        kept = (directory / "client.json").exists()
        self.state = load_state(directory) or State()
        if kept and not (directory / "client.json").exists():
            voice.warn("client.json in %s makes no sense; it is set aside as client.json.bad, and "
                       "this client begins anew" % directory)
        self.state.host_cpid = self.state.host_cpid or secrets.token_hex(16)
        self._attach(wanted)
        self.n_reported_before = sum(p.n_reported for p in self.projects)
        self._recover()
        self._clean_up()

    def _write_harness(self):
        """Write the program of job processes, unless it is there: the disk may be full."""
        path, data = self.directory / "harness.py", HARNESS.encode()
        if not path.is_file() or path.read_bytes() != data:
            write_safely(path, data)

    def _attach(self, wanted):
        known = {project.url: project for project in self.projects}
        fresh = [url for url, _ in wanted if url not in known]
        lost = [url for url in known if url not in dict(wanted)]
        if self.options.moved and fresh and lost:  # Else nothing is here yet: `minigrid run`.
            if not len(fresh) == len(lost) == 1:
                raise SystemExit("--moved is for one new address, and one project of %s that is "
                                 "not named; nothing is changed" % self.directory)
            project = known[fresh[0]] = known.pop(lost[0])
            project.url, project.addresses, project.min_rpc_time = fresh[0], [], 0.0
        for project in self.projects:
            project.trouble = ""
            if self.options.ask_now or not project.authenticator:
                project.min_rpc_time = 0.0  # Who tries to join tries once more, and better.
            project.resting = (project.resting or project.url == self.options.forget
                               if not wanted else True)
            project.n_empty, project.work_time = 0, 0.0  # Who starts a client wants work now.
        for url, share in wanted:
            project = known.get(url)
            if not project:
                project = known[url] = Project(url, self._new_folder(url))
                project.nickname = self.options.nickname or next(
                    (p.nickname for p in self.projects), "") or friendly_name(self.rng)
                self.projects.append(project)
            project.resting = False
            project.resource_share = project.resource_share if share is None else share
        for project in self.projects:
            for name in ("files", "partial", "outputs"):
                (self.directory / project.folder / name).mkdir(parents=True, exist_ok=True)

    def _new_folder(self, url):
        """A folder for a project's files. Its name is for people; that it is new is what counts."""
        name, used = folder_name(url), {project.folder for project in self.projects}
        names = ("projects/" + name + ("-%d" % n if n else "") for n in range(1000))
        return next(folder for folder in names if folder not in used)

    @property
    def projects(self):
        return self.state.projects

    @property
    def active(self):
        return [project for project in self.projects if not project.resting]

    @property
    def jobs(self):
        """All jobs here, of all projects."""
        return [job for project in self.projects for job in project.jobs]

    @property
    def fatal(self):
        """Why there is no point in going on, if no project is left that may be asked."""
        if any(project.url == self.options.forget for project in self.projects):
            return ""
        if all(project.fatal for project in self.active) and not self.tasks:
            nothing = "" if self.options.forget else "no project to work for"
            return "; ".join(project.fatal for project in self.active) or nothing
        return ""

    def _place(self, project, kind, name):
        """Path of a file of a project; `kind` is files, partial or outputs."""
        return self.directory / project.folder / kind / name

    def _say(self, project, text, how=None):
        """Tell something about a project; its name goes before it where there are several."""
        name = project.name or project.url
        (how or self.voice.tell)(name + ": " + text if len(self.active) > 1 else text)

    def _warn(self, project, text):
        self._say(project, text, self.voice.warn)

    def introduce(self, now):
        """Say at the start what protects this computer, and how we stand with the projects."""
        self.voice.tell(self.protection.words)
        for project in self.projects:
            kept = how_many(len(project.jobs), "job")
            if project.url == self.options.forget:
                self.voice.tell("%s will be forgotten" % project.url)
            elif project.resting:
                self.voice.tell("%s rests, for it is not named; %s kept" % (project.url, kept))
            elif project.authenticator:
                self.voice.tell("%s at %s, %s kept from last time"
                                % (project.nickname, project.url, kept))
            else:
                self.voice.tell("joining %s as %s" % (project.url, project.nickname))
            if not project.resting and project.min_rpc_time > now + 5:
                self.voice.tell("%s will be asked again in %s (--ask-now does not wait)"
                                % (project.url, duration(project.min_rpc_time - now)))

    # -- turning

    def step(self, now):
        """One turn: hear outcomes, look after processes, start what can be started, talk, save."""
        last = self.now or self.state.saved_at
        for project in self.projects:
            mind_clock(project, last, now)
        if now < last - CLOCK_JUMP:  # [C34]
            self.start_time = self.op.master_time = 0.0
            for retry in self.retries.values():
                retry.at = 0.0
        self.now = now
        self._hear()
        for job, task in list(self.tasks.items()):
            before = job.elapsed_time
            if task.look(now):
                self.dirty = self.urgent = True
            devote(job.project, (job.elapsed_time - before) * job.ncpus, now)
        for job, (task, nbytes) in list(self.untaken.items()):
            del self.untaken[job]
            if not job.over and job in job.project.jobs:
                self._finish(task, nbytes)
        if not self.wanted_left():
            self._give_back()
        if not self.leaving:
            self._drop_late()
            self._start_transfers()
            self._start_tasks()
        self._contact()
        self._part()
        self._save()

    def wait(self, seconds):
        """Block until an outcome is there, but not longer. Consumes nothing."""
        with contextlib.suppress(queue.Empty):
            self.events.put(self.events.get(timeout=max(0.0, seconds)))

    def pause(self, now):
        """Seconds until something may have to be done by itself."""
        times = [t for p in self.projects for t in (p.min_rpc_time, p.work_time)]
        times += [retry.at for retry in self.retries.values()]
        times += [job.ended_at + BUNDLE_SECONDS for job in self.jobs if job.over]
        ahead = [t - now for t in times if t > now]
        return max(0.02, min(ahead + [LOOK_SECONDS if self.tasks else 1.0]))

    def _begin(self, key, work, done):
        """Run work() in a thread; done(result, error) follows in a later step()."""
        def run():
            result = error = None
            try:
                result = work()
            except Exception as e:  # Brought to the main thread, whatever it is.
                error = e
            self.events.put((key, done, result, error))

        self.busy.add(key)
        threading.Thread(target=run, daemon=True).start()

    def _hear(self):
        for _ in range(self.events.qsize()):
            event = self.events.get()
            if event is not None:  # None only wakes.
                key, done, result, error = event
                self.busy.discard(key)
                done(result, error)

    def stop(self):
        """Ask the main loop to end; safe in a signal handler."""
        self.stopped = True
        self.events.put(None)

    def wanted_left(self):
        """How many more finished jobs --max-jobs allows."""
        if not self.options.max_jobs:
            return math.inf
        done = sum(p.n_reported for p in self.projects) - self.n_reported_before
        done += sum(not job.to_compute and job.client_state != C.ABORTED for job in self.jobs)
        return max(0, self.options.max_jobs - done)

    def finished(self):
        """Is there nothing left that this run was started for?"""
        if self.stopped or self.fatal:
            return True
        if not self.active:
            return not any(project.url == self.options.forget for project in self.projects)
        if self.op.action or any(project.jobs for project in self.active if not project.fatal):
            return False
        if self.options.once and not self.fetched and all(
                project.fatal or project.n_empty >= ONCE_TRIES for project in self.active):
            self.voice.warn("there is no work for this computer")
            return True
        return not self.wanted_left() or (self.options.once and self.fetched)

    def leave(self, clock, seconds=5.0, turned=lambda now: None):
        """End cleanly: jobs stop (they go on from their checkpoints at the next start), what is
        finished is reported if that is quickly done, the state is kept. Calls turned(now) after
        each step."""
        self.leaving = True
        if self.stopped:
            self.voice.tell("stopping: what is not finished goes on at the next start")
        for task in self.tasks.values():
            task.kill()
        end = clock() + seconds
        while True:
            now = clock()
            self.step(now)
            turned(now)
            hopeful = any(any(job.over for job in p.jobs) and p.authenticator and not p.fatal
                          and p.min_rpc_time < end and not p.n_rpc_failures for p in self.projects)
            if now >= end or not self.tasks and not self.op.action and not hopeful:
                break
            self.wait(min(self.pause(now), end - now))
        for task in self.tasks.values():
            task.kill_keeper()  # Nobody will be there to do it later.
        self.dirty = self.urgent = True
        self._save()

    def _save(self):
        """Keep the state if it has changed, at most once a second unless it matters: with jobs of
        0.1 s a disk flush for each would be most of the work."""
        since = abs(self.now - self.save_time)
        changed = self.dirty and (self.urgent or since >= SAVE_SECONDS)
        if not changed and not (self.tasks and since >= SAVE_TIMES_SECONDS):
            return
        self.save_time = self.state.saved_at = self.now
        try:
            save_state(self.state, self.directory)
            self.dirty = self.urgent = False
            self._note_disk("state")
        except OSError as e:
            self._note_disk("state", "cannot write to %s (%s): nothing is asked or reported until "
                            "that is possible" % (self.directory, e.strerror))
            self.urgent = False
        while self.left_slots:  # If that failed, too: perhaps their room is what is missing.
            self._free_slot(self.left_slots.pop())

    def _note_disk(self, what, trouble=""):
        """Say that our disk has no room for something, and once it has room for all, each once."""
        if trouble and what not in self.full:
            self.voice.warn(trouble)
        if trouble:
            self.full[what] = trouble
        elif self.full.pop(what, "") and not self.full:
            self.voice.tell("there is room on the disk again")

    def _disk_full(self):
        """Is there no room for jobs? Says so."""
        full = shutil.disk_usage(self.directory).free < ROOM_MIN
        self._note_disk("jobs", full and "this computer's disk is full (%s): no job is started "
                                         "until there is room" % self.directory)
        return full

    def _warn_once(self, text):
        if text not in self.told:
            self.told.add(text)
            self.voice.warn(text)

    # -- the servers

    def _limits(self):
        options = self.options
        limits = Limits(options.n_cpus, self.state.p_fpops, leaving=self.leaving,
                        low_water=options.low_water, high_water=options.high_water)
        if options.report_at_once:
            limits.report_wait = 0.0
        if options.once and self.fetched:
            limits.room = 0
        elif options.max_jobs:
            limits.room = self.wanted_left() - sum(
                job.to_compute for project in self.active for job in project.jobs)
        return limits

    def _contact(self):
        """Do what the policy says is to be done next, if anything is."""
        if self.unsent:
            return self._send()
        action = self.op.poll(self.projects, self._limits(), self.now)
        if not action:
            return
        if action.kind == "master":
            self._begin("rpc", functools.partial(self.transport.get_text, action.url),
                        functools.partial(self._master_read, action))
            return
        if action.kind == "join":
            path, body, done = "/register", self._introduction(action.project), self._joined
        else:
            path, done = "/scheduler", self._replied
            body = body_of(action.request, action.project, self.state, self.host(),
                           self.options.platforms)
        self.dirty = True
        self.unsent = action, action.url + path, body, done
        self._send()

    def _send(self):
        """Send a request once the state is kept: a number must never be used twice, and what is
        reported must not be forgotten. On a full disk it waits."""
        if self.dirty:
            self.urgent = True
            self._save()
        if self.dirty:
            return
        (action, url, body, done), self.unsent = self.unsent, None
        self._begin("rpc", functools.partial(self.transport.post_json, url, body),
                    functools.partial(done, action, self.now))

    def _introduction(self, project):
        options, body = self.options, {"nickname": project.nickname}
        if options.email_addr:
            body.update(email_addr=options.email_addr, password=options.password)
        if options.invitation:
            body["invitation"] = options.invitation
        return body

    def _joined(self, action, sent, reply, error):
        project = action.project
        authenticator = reply.get("authenticator") if reply else None
        if not error and not (isinstance(authenticator, str)
                              and re.fullmatch(r"[A-Za-z0-9_-]{8,128}", authenticator)):
            error = TransportError(500, "it did not say who we are")
        if error:
            if getattr(error, "lasting", False) or getattr(error, "status", 0) == 401:
                project.fatal = str(error)
            return self._failed(action, error, final=bool(project.fatal))
        # n_rpc_failures stays: only the scheduler's answer shows that it knows us.
        project.authenticator, project.min_rpc_time, project.trouble = authenticator, 0.0, ""
        project.userid = int(number(reply.get("userid"), 0, 2 ** 63, 0))
        project.nickname = plain(reply.get("name"), 80) or project.nickname
        project.email_addr = self.options.email_addr
        self.dirty = self.urgent = True
        self.op.succeeded()
        self.voice.tell("joined %s as %s" % (project.url, project.nickname))

    def _failed(self, action, error, final=False):
        """An action failed: the policy goes on with another address, or waits."""
        project = action.project
        if getattr(error, "moved_to", ""):
            project.fetch_master = True  # It says itself that it is elsewhere: look where.
        waits = self.op.failed(self.now, getattr(error, "retry_after", 0.0),
                               getattr(error, "network_down", False), final)
        project.trouble = plain(str(error))
        self.dirty = True
        if project.fatal:
            project.min_rpc_time = 0.0  # Nothing is asked in this run; who mends it waits for it.
            self._warn(project, project.fatal)
        elif waits:
            self._warn(project, "%s in %s"
                       % (again(str(error)), duration(project.min_rpc_time - self.now)))

    def _master_read(self, action, found, error):
        project = action.project
        try:
            if error:
                raise error
            fresh = take_master(project, read_master(*found))
        except (TransportError, ValueError) as e:
            return self._failed(action, e)
        self.op.succeeded()
        self.dirty = True
        if fresh:
            self._say(project, "its front page names other addresses: %s" % ", ".join(fresh))

    def _replied(self, action, sent, reply, error):
        project, request = action.project, action.request
        if not error and number(reply.get("hostid"), 0, 2 ** 63, None) is None:
            error = TransportError(500, "its answer makes no sense")
        if error and getattr(error, "lasting", False):
            for job in request.reports:  # Should something in it be the reason, it must not
                job.stderr_out = ""  # keep all that is finished from being reported for ever.
            drop_trickles(request)
        if getattr(error, "status", 0) == 401 or (
                not error and project.hostid and reply["hostid"] == 0):
            return self._unknown_here(action, error or "the server does not know this client")
        if error:
            return self._failed(action, error)
        try:
            self._follow_key(project, reply)
        except ValueError as e:  # Somebody else may be speaking: nothing of this counts.
            project.fatal = str(e)
            return self._failed(action, e, final=True)
        jobs = self._accept(action, reply)
        was_failing = project.n_rpc_failures
        take_reply(project, self.state, reply, request, len(jobs), sent, self.now, self.rng)
        self.op.succeeded()
        self.dirty = self.urgent = True
        if was_failing:  # The server is back: files that waited for it need not wait longer.
            for (_, folder, _), retry in self.retries.items():
                retry.at = 0.0 if retry.offline and folder == project.folder else retry.at
        self._forget(project, names_in(reply.get("acks")))
        if any(job in project.jobs for job in request.reports):  # It has not taken them. Without
            project.min_rpc_time = max(  # a delay we would report them again and again.
                project.min_rpc_time, self.now + DELAY_MIN * (1 + self.rng.random()))
        self._abort(project, names_in(reply.get("aborts")),
                    names_in(reply.get("aborts_if_not_started")))
        self._tell_news(project, reply, request, jobs)
        self._take_down(project, reply.get("trickles"))
        for job in jobs:
            project.adopt(job)
            self.fetched, job.received = True, self.now
            job.delay_bound = min(job.delay_bound, max(0, local_deadline(job, project) - self.now))
            if job.over:  # Refused. Without this, such jobs would be fetched without end [S1-15].
                take_outcome(project, False, self.now, self.rng)
        if jobs:
            project.typical = estimate(jobs[-1], self.state.p_fpops)

    def _follow_key(self, project, reply):
        """Keep the project's key, or follow its change [D11]; ValueError in plain words."""
        wanted = self.options.key
        if wanted and project.key and not fingerprint(project.key).startswith(wanted):
            key = follow_key("", reply)  # The user says so: this one and no other.
        else:
            key = follow_key(project.key, reply)
        if wanted and key and not fingerprint(key).startswith(wanted):
            raise ValueError("the project at %s shows a key with the fingerprint %s, not the one "
                             "given with --key" % (project.url, fingerprint(key)[:32]))
        if project.key and key != project.key:
            self._say(project, "the project has changed its key to %s" % fingerprint(key)[:32])
        project.key = key

    def _unknown_here(self, action, error):
        """The server does not know our authenticator: it was set up anew, as demonstrations are."""
        project = action.project
        if project.email_addr and not self.options.password:
            project.fatal = "%s. Start again with --email and --password" % error
            return self._failed(action, error, final=True)
        self.op.failed(self.now, final=True)
        if project.n_rpc_failures == 1:  # Soon the first time only.
            project.min_rpc_time = self.now + transfer_delay(1, self.rng)
        project.authenticator, project.hostid, project.rpc_seqno = "", 0, 0
        project.trouble = plain(str(error))
        self.dirty = self.urgent = True
        self._warn(project, "%s; joining again as %s in %s" % (
            error, project.nickname, duration(project.min_rpc_time - self.now)))

    def _accept(self, action, reply):
        """The new jobs of a reply. A result that we hold already may be sent again: keep ours."""
        project = action.project
        held = {job.name for job in project.jobs}
        jobs, n_refused = [], 0
        assignments, n_cpus = list_of(reply, "assignments"), self.options.n_cpus
        room = max(0, JOBS_KEPT_PER_CPU * n_cpus - len(project.jobs))
        n_files = FILES_MAX + FILES_KEPT_PER_CPU * n_cpus - sum(
            len(job.downloads) for job in project.jobs)
        if len(assignments) > room:
            self._warn(project, "it gives %d jobs at once, to a computer that has room for %d more "
                       "of its jobs" % (len(assignments), room))
        for data in assignments[:room]:
            try:
                n_files -= count_files(data)
                if n_files < 0:
                    raise ValueError("too many files, with those of its other jobs")
                check_signatures(data, project.key)
                job = parse_assignment(data, action.url, self.options.platforms)
                localise(job, action.url)
            except ValueError as e:
                n_refused += 1
                if n_refused <= NEWS_MAX:
                    self._warn(project, "refused a job: %s" % e)
                job = refused(data, "refused: %s" % e, self.now)
            if job and job.name not in held:
                held.add(job.name)
                jobs.append(job)
        return jobs

    def _take_down(self, project, trickles):
        """Give messages to the jobs they are for, at once if they run, else at their start."""
        jobs = {job.name: job for job in project.jobs}
        left = DOWN_KEPT - sum(len(text) for job in project.jobs for text in job.down)
        for message in trickles if isinstance(trickles, list) else []:
            name = message.get("result") if isinstance(message, dict) else None
            job = jobs.get(name) if isinstance(name, str) else None
            text = message.get("text") if job else None
            if isinstance(text, str) and job.to_compute and len(job.down) < TRICKLES_HELD:
                text = text[:2 * TRICKLE_BYTES]
                left -= len(text)
                if left >= 0:
                    job.down.append(text)
        for task in self.tasks.values():
            with contextlib.suppress(OSError):  # Later, then: at its next start.
                deliver(task.slot, task.job)

    def _tell_news(self, project, reply, request, jobs):
        for message in list_of(reply, "messages")[:NEWS_MAX]:
            text = plain(message.get("text")) if isinstance(message, dict) else ""
            new = (project.url, text) not in self.told
            if text and (message.get("priority") == "notice" or new):
                self._say(project, "server: " + text)
                self.told = {(project.url, text)} | (self.told if len(self.told) < 99 else set())
            if text and request.asks and not jobs:
                project.trouble = text
        if jobs:
            apps = {job.app: job.about for job in jobs}
            self._say(project, "%d new job%s: %s"
                      % (len(jobs), "s" * (len(jobs) > 1), ", ".join(apps)))
            for app in apps:  # What they are for, once.
                if (project.url, app) not in self.apps:
                    self.apps.add((project.url, app))
                    self._say(project, "%s: %s" % (app, apps[app]))
        elif request.asks and project.n_empty == 2:  # Once may be a matter of seconds.
            self._say(project, "no work at the moment; asking again from time to time")

    def _forget(self, project, names):
        """Acknowledged: the server has taken the report (or the result is none of ours)."""
        done = [job for job in project.jobs if job.name in names]
        if not done:
            return
        project.jobs = [job for job in project.jobs if job.name not in names]
        for job in done:
            if job in self.tasks:  # Not reported, yet acknowledged: nobody wants it.
                self.tasks[job].kill(EXIT_ABORTED_BY_PROJECT, "")
            project.n_reported += job.over and job.client_state != C.ABORTED
            project.n_failed += job.over and job.client_state not in (C.ABORTED, C.UPLOADED)
            self._drop_files(job)
        self._drop_inputs(project, done)
        wanted = {("put", project.folder, job.name) for job in project.jobs}
        wanted |= {run_key(job) for job in project.jobs}
        wanted |= {("get", project.folder, f["name"]) for job in project.jobs if job.to_compute
                   for f in job.downloads}
        for key in [key for key in self.retries if key[1] == project.folder]:
            if key not in wanted:
                del self.retries[key]
        credit = "; credit so far %.1f" % project.credit if project.credit else ""
        self._say(project, "reported %s%s" % (listed_names(done), credit))

    def _abort(self, project, names, if_not_started):
        for job in project.jobs:
            not_started = job.to_compute and job.slot < 0
            if not job.over and (job.name in names or job.name in if_not_started and not_started):
                self._end(job, C.ABORTED, EXIT_ABORTED_BY_PROJECT, "not needed any more")

    def _drop_late(self):
        """Nobody waits for a job that was not even started by its deadline."""
        for job in self.jobs:
            if (job.to_compute and job.slot < 0
                    and local_deadline(job, job.project) < self.now):
                self._end(job, C.ABORTED, EXIT_UNSTARTED_LATE, "not started by its deadline")
                take_outcome(job.project, False, self.now, self.rng)  # Too much of it was fetched.

    def _give_back(self):
        """--max-jobs is reached: let others have the rest now, not after the deadline. What a
        resting project has given is none of this run's business."""
        for project in self.active:
            self._return_jobs(project, [job for job in project.jobs if job.to_compute])

    def _return_jobs(self, project, jobs):
        for job in jobs:
            self._end(job, C.ABORTED, EXIT_ABORTED_BY_USER, "")
        if jobs:
            n = how_many(len(jobs), "job")
            self._say(project, "%s given back: %s" % (n, listed_names(jobs)))

    def _part(self):
        """Leave a project: its jobs are given back, then all we have of it is deleted."""
        for project in [p for p in self.projects if p.url == self.options.forget]:
            self._return_jobs(project, [job for job in project.jobs if not job.over])
            told = not project.jobs or not project.authenticator or project.trouble
            if told and not self.op.action and not any(job in self.tasks for job in project.jobs):
                self.projects.remove(project)
                self.dirty = self.urgent = True
                for name in ("files", "partial", "outputs") if project.folder == "." else (".",):
                    remove_tree(self.directory / project.folder / name)
                self.voice.tell("%s is forgotten%s" % (
                    project.url, "; it was not told: " + project.trouble if project.jobs else ""))

    # -- files

    def _start_transfers(self):
        for job in by_deadline(self.jobs):
            project = job.project
            if not job.over and job.client_state == C.UPLOADING:
                key = "put", project.folder, job.name
                self._transfer(key, functools.partial(self._upload, job, job.upload_begun),
                               functools.partial(self._uploaded, job))
                job.upload_begun = job.upload_begun or key in self.busy
            elif job.to_compute and job.client_state != C.READY and not project.resting:
                job.client_state = C.DOWNLOADING
                missing = [f for f in job.downloads if file_key(project, f) not in self.checked]
                for f in missing:
                    self._transfer(("get", project.folder, f["name"]),
                                   functools.partial(self._download, project, f),
                                   functools.partial(self._downloaded, project, f))
                if not missing:
                    job.client_state = C.READY

    def _transfer(self, key, work, done):
        running = sum(k[0] in ("get", "put") and k[1] == key[1] for k in self.busy)
        retry = self.retries.get(key)
        if key in self.busy or running >= TRANSFERS_MAX or (retry and retry.at > self.now):
            return
        self._begin(key, work, done)

    def _failed_transfer(self, key, jobs, error, bad):
        """Note a failed transfer of some jobs; return True if it is to be tried again."""
        retry = self.retries.setdefault(key, Retry())
        retry.n, retry.n_bad = retry.n + 1, retry.n_bad + bad
        retry.offline, retry.text = getattr(error, "status", None) == 0, plain(str(error))
        for job in jobs:
            job.stuck_since = job.stuck_since or self.now
        too_long = any(self.now - job.stuck_since > TRANSFER_SECONDS_MAX for job in jobs)  # [C32]
        if retry.n_bad > BAD_FILES_MAX or too_long:
            del self.retries[key]
            return False
        wait = max(getattr(error, "retry_after", 0.0), transfer_delay(retry.n, self.rng))
        if isinstance(error, LocalError):
            wait = min(wait, PUT_OFF_SECONDS)
        retry.at = self.now + wait
        self.voice.warn("%s: %s failed (%s); trying again in %s" % (
            key[2], "download" if key[0] == "get" else "upload", error,
            duration(retry.at - self.now)))
        return True

    def _download(self, project, f):
        room = disk_room(self.directory)
        own = sum(folder_bytes(self._place(project, kind, "")) for kind in ("files", "partial"))
        # One project's files do not fill the disk.
        part = (room + own) / max(1, len(self.active)) - own
        if f["nbytes"] > min(room, max(part, room / 100)):
            raise LocalError(f["name"], OSError(errno.ENOSPC, "%d bytes" % f["nbytes"]))
        urls = places(project, f["url"])
        self.transport.download(dict(f, url=urls[0], urls=urls),
                                self._place(project, "partial", f["name"]),
                                self._place(project, "files", f["name"]))

    def _downloaded(self, project, f, _, error):
        key = "get", project.folder, f["name"]
        jobs = [job for job in project.jobs if job.to_compute
                and file_key(project, f) in [file_key(project, g) for g in job.downloads]]
        if not error or not jobs:  # Nobody needs it any more: no word of trying again.
            self.retries.pop(key, None)
        if error and not jobs:
            return
        if not error:
            self.checked.add(file_key(project, f))
            for job in jobs:
                job.stuck_since = 0.0
            return
        bad = isinstance(error, BadFile) or getattr(error, "lasting", False)
        if self._failed_transfer(key, jobs, error, bad):
            return
        for job in jobs:
            self._end(job, C.DOWNLOADING, EXIT_DOWNLOAD,
                      "download of %s failed: %s" % (f["name"], error))

    def _upload(self, job, resume):
        project, error = job.project, None
        path = self._place(project, "outputs", job.name)
        if job.nbytes not in (-1, path.stat().st_size):  # It was never flushed to the disk.
            raise BadFile("a power cut has cut it short")
        for url in places(project, job.output["url"]):
            try:
                return self.transport.upload(url, path, project.authenticator, resume)
            except TransportError as e:
                error = error if error and e.status == 0 else e  # An answer says more than none.
        raise error

    def _uploaded(self, job, _, error):
        key = "put", job.project.folder, job.name
        if job.over or job not in job.project.jobs:
            return  # Aborted meanwhile.
        self.dirty = True
        if not error:
            self.retries.pop(key, None)
            # The file stays until the report is acknowledged: should we be killed before this is
            # noted, the upload is taken up again, and must not find nothing.
            job.client_state, job.over, job.stuck_since = C.UPLOADED, True, 0.0
            self._say(job.project,
                      "%s: finished in %s, uploaded" % (job.name, duration(job.elapsed_time)))
        elif (getattr(error, "lasting", False) or isinstance(error, (BadFile, FileNotFoundError))
              or not self._failed_transfer(key, [job], error, False)):
            self._end(job, C.UPLOAD_FAILED, EXIT_UPLOAD, "upload failed: %s" % error)

    def _drop_files(self, job):
        with contextlib.suppress(OSError):
            self._place(job.project, "outputs", job.name).unlink()
        self._drop_slot(job)

    def _drop_slot(self, job):
        """Give up a job's slot, unless a process is still in it."""
        if job.slot >= 0 and job not in self.tasks:
            self._free_slot(job.slot)
            job.slot = -1

    def _free_slot(self, n):
        """Delete a slot and the note whose it was."""
        slot = self.directory / "slots" / str(n)
        remove_tree(slot)
        with contextlib.suppress(OSError):
            slot.with_name(slot.name + ".job").unlink()

    def _drop_inputs(self, project, done):
        """Delete the inputs of forgotten jobs; application files stay for the next ones."""
        kept = {f["name"] for job in project.jobs for f in job.downloads}
        kept |= {f["name"] for job in done for f in job.files}
        for f in [job.input for job in done if job.input and job.input["name"] not in kept]:
            self.checked.discard(file_key(project, f))
            with contextlib.suppress(OSError):
                self._place(project, "files", f["name"]).unlink()

    def _recover(self):
        """At the start: find what a killed client had no time to note. An output is moved to its
        place only when its job has succeeded. Whose a slot is stands beside it: two jobs may have
        had it one after the other, and none may go on from the other's checkpoint."""
        slots = self.directory / "slots"
        owners = {}
        for path in slots.glob("*.job"):
            with contextlib.suppress(OSError):
                owners[path.stem] = path.read_text(encoding="utf-8", errors="replace")
        found = {owner: int(n) for n, owner in owners.items()
                 if n.isdigit() and (slots / n).is_dir()}
        for job in self.jobs:
            if not job.to_compute:
                job.slot = -1  # Nothing runs now; another job may have come to this slot.
                continue
            output = self._place(job.project, "outputs", job.name)
            if whole_since_boot(output):
                job.client_state, job.slot = C.UPLOADING, -1
                job.ended_at, job.fraction_done = self.state.saved_at, 1.0
            elif owners.get(str(job.slot), owner_of(job)) != owner_of(job) or job.slot < 0:
                job.slot = found.get(owner_of(job), -1)

    def _clean_up(self):
        """At the start: remove what belongs to no job (a crash can leave some), and application
        files that have not been needed for long."""
        kept = {str(job.slot) for job in self.jobs}
        self._clean(self.directory / "slots", kept | {slot + ".job" for slot in kept})
        for project in self.projects:
            files = {f["name"] for job in project.jobs for f in job.downloads}
            folder = self.directory / project.folder
            self._clean(folder / "partial", files)
            self._clean(folder / "outputs", {job.name for job in project.jobs})
            self._clean(folder / "files", files, CACHE_SECONDS)

    def _clean(self, folder, kept, seconds=-math.inf):
        for path in folder.iterdir():
            if path.name in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
                continue
            with contextlib.suppress(OSError):  # Another time, then.
                if self.state.saved_at - path.lstat().st_mtime > seconds:
                    path.unlink()

    # -- what people see

    def snapshot(self):
        """How everything stands, as JSON values: what the terminal and the page show."""
        now, active = self.now, self.active
        wanted = sum(p.resource_share for p in active) or 1.0
        given = sum(faded(p, now) for p in active) or 1.0
        standings = {p: standing(p, now) for p in self.projects}
        waiting, until = "", 0.0
        if active and not self.tasks:  # The one that will end first says most.
            waiting, until = min((standings[p] for p in active), key=lambda s: s[1] or math.inf)
        if self.start_time > now:
            waiting, until = "no job can be started: " + self.shortage, self.start_time
        return {
            "now": now, "version": VERSION, "directory": str(self.directory),
            "n_cpus": self.options.n_cpus, "host": active[0].nickname if active else "",
            "protection": self.protection.words, "waiting": waiting, "until": until,
            "stopping": self.leaving or self.stopped,
            "projects": [{
                "name": p.name or p.url, "url": p.url, "nickname": p.nickname,
                "share": p.resource_share,
                "share_wanted": 0.0 if p.resting else p.resource_share / wanted,
                "share_given": 0.0 if p.resting else faded(p, now) / given,
                "credit": p.credit, "n_reported": p.n_reported, "n_failed": p.n_failed,
                "state": standings[p][0], "until": standings[p][1],
                "links": [{"name": "status", "url": p.url + "/"}]} for p in self.projects],
            "jobs": [self._shown(job) for job in by_deadline(self.jobs)],
            "messages": [list(message) for message in self.voice.messages]}

    def _shown(self, job):
        """A job as people see it."""
        kind = "get" if job.to_compute else "put"
        names = [f["name"] for f in job.downloads] if kind == "get" else [job.name]
        keys = [(kind, job.project.folder, name) for name in names]
        keys.append(run_key(job))
        stuck = [self.retries[key] for key in keys if key in self.retries]
        state = {C.UPLOADING: "uploading", C.UPLOADED: "finished", C.ABORTED: "aborted"}.get(
            job.client_state, "failed")
        if job.to_compute:
            state = "running" if job in self.tasks else (
                "waiting" if job.client_state == C.READY else "downloading")
        left = remaining(job, job.project, self.state.p_fpops) if job.to_compute else None
        return {"name": job.name, "app": job.app, "about": job.about,
                "project": job.project.name or job.project.url, "state": state,
                "fraction": 1.0 if not job.to_compute else job.fraction_done,
                "elapsed": job.elapsed_time, "remaining": left,
                "deadline": local_deadline(job, job.project),
                "why": stuck[0].text if stuck else "", "until": stuck[0].at if stuck else 0.0}

    # -- computing

    def _start_tasks(self):
        if self.now < self.start_time:
            return
        ready = [job for job in self.jobs if job.client_state == C.READY and not job.over
                 and job not in self.tasks and job not in self.untaken and not job.project.resting
                 and self.retries.get(run_key(job), Retry()).at <= self.now]
        if (ready or self.full) and self._disk_full():
            return
        while ready and len(self.tasks) < self.wanted_left():
            job = next_job(ready, list(self.tasks), self._limits(), self.now)
            used = sum(running.ncpus for running in self.tasks)
            if used and used + job.ncpus > self.options.n_cpus + 1e-6:
                return self._make_way(job)  # It waits; later ones do not overtake it.
            ready.remove(job)
            self._start_task(job)
            if self.now < self.start_time:
                return

    def _make_way(self, job):
        """Let a job have the processor of another project's that has had its turn, if no job of its
        own project runs. The other one goes on later, from its checkpoint if it has one."""
        if any(task.makes_way or other.project is job.project
               for other, task in self.tasks.items()):
            return
        debt = resource_debt(job.project, self.now)
        others = [task for other, task in self.tasks.items() if task.had_its_turn()
                  and resource_debt(other.project, self.now) < debt]
        if others:
            task = min(others, key=lambda task: resource_debt(task.job.project, self.now))
            task.makes_way = True
            task.kill()
            self._say(job.project, "%s makes way for %s; it goes on later"
                      % (task.job.name, job.name))

    def _start_task(self, job):
        project = job.project
        fresh = job.slot < 0
        if fresh:  # What could not be deleted in a slot would be in the way of every job.
            used = {other.slot for other in self.jobs}
            job.slot = next(n for n in itertools.count() if n not in used and not os.path.lexists(
                self.directory / "slots" / str(n)))
        slot = self.directory / "slots" / str(job.slot)
        seconds = time_bound(job, self.state.p_fpops)
        held = None
        try:
            held = lock(slot.with_name(slot.name + ".job"))
            if not held:
                return self._await_slot(job)
            held.truncate(0)
            held.write(owner_of(job).encode())
            held.flush()
            own_bounds(job, self.directory, self.options.n_cpus)
            files = self.directory / project.folder / "files"
            if not prepare_slot(slot, job, files, seconds):
                job.elapsed_time = job.fraction_done = 0.0
            deliver(slot, job)
            task = Task(job, slot, self.directory / "harness.py", seconds, self.now,
                        self.protection, held)
        except BadFile as e:
            self._fetch_again(job, str(e))
            return self._drop_slot(job) if fresh else None
        except OSError as e:
            if e.errno in SHORT:  # Of this computer, for now; a full disk is seen to by _put_off().
                if not self.start_time:
                    self.voice.warn("no job can be started now: %s" % e.strerror)
                self.start_time, self.shortage = self.now + DELAY_MIN, e.strerror
                return self._drop_slot(job) if fresh else None
            if not (e.errno in FULL and self._put_off(job)):
                self._end(job, C.COMPUTE_ERROR, EXIT_CHILD_FAILED, "could not be started: %s" % e)
            return
        finally:
            if held:
                held.close()  # The keeper holds it now, if there is one.
        self.start_time = 0.0
        self.tasks[job] = task
        self.dirty = True
        self._begin(run_key(job), task.wait,
                    functools.partial(self._exited, task))

    def _await_slot(self, job):
        """A process that a killed client has left is still there, and may yet write a checkpoint:
        its keeper is about to end it."""
        self.retries.setdefault(run_key(job), Retry()).at = self.now + SLOT_SECONDS

    def _fetch_again(self, job, name):
        """A file is damaged or gone since it was checked. If that happens again and again this
        computer's disk or memory is bad: do not go on asking the server for it."""
        self.checked -= {file_key(job.project, f) for f in job.downloads}
        job.client_state, job.n_damaged = C.NEW, job.n_damaged + 1
        text = "damaged on this computer's disk"
        if job.n_damaged > BAD_FILES_MAX or not self._failed_transfer(
                ("get", job.project.folder, name), [job], text, True):
            self._end(job, C.DOWNLOADING, EXIT_DOWNLOAD, "%s: %s" % (name, text))

    def _exited(self, task, code, error):
        job = task.job
        del self.tasks[job]
        before = job.elapsed_time
        task.tick(self.now)
        devote(job.project, (job.elapsed_time - before) * job.ncpus + task.unpaid(), self.now)
        task.take_trickles(self.now)
        self.dirty = True
        if job.over or job not in job.project.jobs:
            self._drop_slot(job)  # Aborted; only now can it go. By now its name may be another's.
            return
        if (self.leaving or task.makes_way) and not (code == 0 or task.verdict):
            return  # Not its fault: it goes on at the next start.
        exit_status, text = task.outcome(code) if not error else (EXIT_CHILD_FAILED, str(error))
        if exit_status and not task.verdict and self._disk_full() and self._put_off(job):
            return
        if exit_status:
            tail = task.stderr(STDERR_CHARS)
            lines = tail.strip().splitlines()
            self._end(job, C.COMPUTE_ERROR, exit_status, text or (lines[-1] if lines else ""), tail)
            return
        try:
            nbytes = (task.slot / "output").lstat().st_size
        except OSError as e:  # A process of the job that has survived took it away.
            self._end(job, C.COMPUTE_ERROR, EXIT_CHILD_FAILED, "its output is lost: %s" % e)
            return
        if nbytes > job.output["nbytes_max"]:
            self._end(job, C.UPLOAD_FAILED, EXIT_UPLOAD, "its output of %d bytes is too large: "
                      "the limit is %d" % (nbytes, job.output["nbytes_max"]))
            return
        self._finish(task, nbytes)

    def _finish(self, task, nbytes):
        """A job has succeeded: take its output. The slot goes when the state is kept: killed before
        that, the job goes on from its checkpoint."""
        job = task.job
        try:
            if job.elapsed_time > WORTH_SECONDS:  # A power cut shall not leave half of it.
                flush(task.slot / "output")
            os.replace(task.slot / "output", self._place(job.project, "outputs", job.name))
        except OSError as e:  # No room for the name, or a virus scanner is reading it [Windows].
            self._warn_once("cannot take the output of %s (%s); trying again"
                            % (job.name, e.strerror))
            self.untaken[job] = task, nbytes
            return
        job.stderr_out, job.nbytes = storable(task.stderr(2048)), nbytes
        job.client_state, job.ended_at, job.fraction_done = C.UPLOADING, self.now, 1.0
        self.urgent = self.urgent or job.elapsed_time > WORTH_SECONDS
        self.retries.pop(run_key(job), None)
        self.left_slots.add(job.slot)
        job.slot = -1
        learn(job, job.project, self.state.p_fpops)
        take_outcome(job.project, True, self.now, self.rng)

    def _put_off(self, job):
        """Our disk is full, which is not the job's fault: it goes on from its checkpoint when there
        is room. Return False if that has been so too often."""
        retry = self.retries.setdefault(run_key(job), Retry())
        retry.n, retry.text = retry.n + 1, "this computer's disk is full"
        if retry.n > PUT_OFF_MAX:
            return False
        with contextlib.suppress(OSError):  # What it has left may be what fills the disk.
            empty_slot(self.directory / "slots" / str(job.slot), job.platform != "python",
                       {open_name(f) for f in job.downloads})
        retry.at = self.now + min(transfer_delay(retry.n, self.rng), PUT_OFF_SECONDS)
        self._warn(job.project, "%s: stopped, for this computer's disk is full; it goes on when "
                                "there is room" % job.name)
        return True

    def _end(self, job, client_state, exit_status, text, stderr=""):
        """A job is over without success: nothing left but to report it."""
        job.client_state, job.exit_status, job.over = client_state, exit_status, True
        job.ended_at = self.now
        stderr = storable(stderr if text in stderr else (stderr + "\n" + text).strip())
        kept = sum(len(other.stderr_out) for other in job.project.jobs)
        job.stderr_out = stderr if kept < STDERR_KEPT else stderr[-500:]  # It is not taken back.
        self.dirty = True
        for key in (("put", job.project.folder, job.name), run_key(job)):
            self.retries.pop(key, None)
        if job in self.tasks:
            self.tasks[job].kill(exit_status, text)
        self._drop_files(job)
        if client_state == C.ABORTED:
            if text:
                self._say(job.project, "%s: %s" % (job.name, text))
        else:
            if job.command_line != "--invert":  # Else it is another's output that is no good.
                take_outcome(job.project, False, self.now, self.rng)
            self._warn(job.project, "%s: failed after %s: %s"
                       % (job.name, duration(job.elapsed_time), plain(text)))


def listed_names(jobs):
    """The names of some jobs, for people: not more than they want to read."""
    more = " and %d more" % (len(jobs) - 4) if len(jobs) > 4 else ""
    return ", ".join(job.name for job in jobs[:4]) + more


def file_key(project, f):
    """What tells a file of one project from all others; the same name may come with new content."""
    return project.folder, f["name"], f["sha256"]


def flush(path):
    """Have a file written to the disk. Raises OSError."""
    f = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(f)
    finally:
        os.close(f)


def run_key(job):
    """Under which it is noted that a job has to wait for room."""
    return "run", job.project.folder, job.name


def whole_since_boot(path):
    """Is a plain file there, of this run of the computer? A power cut may have left one without
    its content, for not each is flushed. Clocks that jumped make it say no, which is safe."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and status.st_mtime > time.time() - time.monotonic()
    return False


def owner_of(job):
    """What tells a job from those of all projects: it stands beside its slot."""
    return job.project.folder + "\n" + job.name


def folder_name(url):
    """An address as the name of a folder."""
    parts = urllib.parse.urlsplit(url)
    name = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
    return re.sub(r"[^A-Za-z0-9.-]", "_", name).strip(".")[:80] or "project"


# ---- 10. Command line --------------------------------------------------------


def describe_host(directory, n_cpus):
    """What the server gets to know about this computer. No names of persons or machines."""
    disk = shutil.disk_usage(directory)
    return {"p_ncpus": n_cpus, "p_vendor": "", "p_model": processor_model(),
            "p_features": processor_features(), "m_nbytes": memory_bytes(),
            "d_free": disk.free, "d_total": disk.total,
            "os_name": platform.system(), "os_version": platform.release(),
            "on_frac": 1.0, "active_frac": 1.0}


def processor_model():
    """Return what the system calls its processor, or nothing."""
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        return plain(re.search(r"(?m)^model name\s*:\s*(.*)$", text).group(1), 100)
    return plain(platform.processor() or platform.machine(), 100)


def processor_features():
    """Return the words by which Linux says what its processor can do, such as avx2."""
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        return plain(re.search(r"(?mi)^(?:flags|features)\s*:\s*(.*)$", text).group(1), 4000)
    return ""


def native_platforms(system=None, machine=None, bits=8 * struct.calcsize("P")):
    """BOINC's names of the platforms whose programs run here, the best first."""
    system = system or sys.platform
    machine = (machine or platform.machine()).lower()
    if system.startswith("linux") and "ANDROID_ROOT" not in os.environ:
        names = {"x86_64": "x86_64-pc-linux-gnu", "amd64": "x86_64-pc-linux-gnu",
                 "aarch64": "aarch64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu",
                 "armv7l": "arm-unknown-linux-gnueabihf", "riscv64": "riscv64-unknown-linux-gnu",
                 "ppc64le": "powerpc64le-unknown-linux-gnu"}
        if bits == 32:  # A 64-bit kernel under a 32-bit system has no libraries for 64 bits.
            names.update(x86_64="i686-pc-linux-gnu", aarch64="arm-unknown-linux-gnueabihf")
        if re.fullmatch("i[3-6]86", machine):
            return ("i686-pc-linux-gnu",)
        return (names[machine],) if machine in names else ()
    if system == "darwin":
        rosetta = os.path.exists("/Library/Apple/usr/libexec/oah/libRosettaRuntime")
        apple = ("arm64-apple-darwin",) if machine == "arm64" else ()
        return apple + (("x86_64-apple-darwin",) if rosetta or not apple else ())
    if system == "win32":
        arm = ("windows_arm64",) if machine == "arm64" else ()
        return arm + (("windows_x86_64",) if machine in ("amd64", "arm64") else ()) + (
            "windows_intelx86",)
    if system.startswith("freebsd") and machine in ("amd64", "x86_64"):
        return ("x86_64-pc-freebsd",)
    return ()


def memory_bytes():
    """Return how much memory the computer has, in bytes; 0 where it does not say."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(Exception):  # Windows
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
                (name, ctypes.c_ulonglong) for name in "total avail a b c d e".split()]

        status = Status(ctypes.sizeof(Status))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total
    return 0


def processors():
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def full_url(text):
    """The server's address as people type it: with or without http://."""
    url = (text if "://" in text else "http://" + text).rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or url != plain(url):
        raise argparse.ArgumentTypeError("%r is no address like http://192.168.1.5:8080" % text)
    return url


def url_and_share(text):
    """An address, perhaps with the share of the computer that its project gets: URL=SHARE."""
    url, equals, share = text.partition("=")
    with contextlib.suppress(ValueError):
        if not equals:
            return full_url(url), None
        if 0 <= float(share) <= 1e6:
            return full_url(url), float(share)
    raise argparse.ArgumentTypeError("%r: a share is a number, such as %s=2" % (text, url))


def works_for(path, url):
    """Is a project among those that a client.json names? Not read by load_state(), which would set
    a damaged one aside."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return any(p["url"] == url for p in json.loads(path.read_bytes())["projects"])
    return False


def choose_directory(url, wanted, forget=""):
    """Find a directory that no running client uses and lock it: (directory, lock). Without an
    address it is the one used last, or one with a project to forget. SystemExit with a plain
    sentence if there is none."""
    try:
        base = (Path(wanted) if wanted else Path.home()) / ".minigrid"
    except RuntimeError:
        raise SystemExit("this user has no home; say with --dir where to keep files") from None
    if wanted:
        candidates = [Path(wanted)]
    elif url:
        name = folder_name(url)
        candidates = [base / (name + ("-%d" % n if n > 1 else "")) for n in range(1, 100)]
    else:
        candidates = sorted(base.glob("*/client.json"), key=lambda f: -f.stat().st_mtime)
        candidates = [f.parent for f in candidates if not forget or works_for(f, forget)]
        if forget and not candidates:
            raise SystemExit("nothing to forget: no client in %s works for %s" % (base, forget))
        if not candidates:
            raise SystemExit("which project? Name its address, such as http://192.168.1.5:8080")
    for directory in candidates:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = lock(directory / "lock")
        except OSError as e:
            raise SystemExit("cannot use %s: %s; name another place with --dir"
                             % (directory, e.strerror))
        if held:
            return directory, held
    raise SystemExit("another client is running in %s; %s" % (
        candidates[0], "stop it first" if forget else "give this one its own with --dir"))


def port(text):
    """A number that can be that of a port."""
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 65536):
        raise argparse.ArgumentTypeError("%r is no port: a number from 0 to 65535" % text)
    return int(text)


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in a line: ten lines of options above hide it."""

    def error(self, message):
        self.exit(2, "%s: %s; --help lists all options\n" % (self.prog, message))


def parse_arguments(argv):
    """Read the command line."""
    p = Parser(
        prog="volunteer.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Give this computer's spare time to a minigrid server.",
        epilog="""\
examples:
  volunteer.py 192.168.1.5:8080                 join under a made-up name and compute until Ctrl-C
  volunteer.py 192.168.1.5:8080 --name "blue fox" --cpus 2
  volunteer.py URL --once                       fetch work once, finish it, report it, exit
  volunteer.py URL1=3 URL2=1                    two projects; three quarters go to the first
  volunteer.py                                  go on as last time

Jobs run at low priority, each in a process and an empty directory of its own, with bounds on time,
memory and disk. They are programs of the project: join projects you trust. Ctrl-C stops cleanly,
and the next start goes on from there. Several clients on one computer are fine: each gets a
directory of its own.""")
    add_project_options(p)
    add_running_options(p)
    add_view_options(p)
    args = p.parse_args(argv)
    if bool(args.email) != bool(args.password):
        p.error("--email and --password go together")
    waters = args.low_water, args.high_water
    if args.cpus < 1 or args.max_jobs < 0 or not all(0 <= water < math.inf for water in waters):
        p.error("--cpus, --max-jobs, --low-water and --high-water are positive numbers")
    if args.key and (len(args.urls) != 1 or not re.fullmatch("[0-9a-f]{32,64}", args.key)):
        p.error("--key is 32 to 64 hexadecimal digits, for one URL")
    if args.moved and not (args.urls and args.dir):
        p.error("--moved needs the new URL, and --dir with the directory of the project")
    return args


def add_project_options(p):
    """Which projects, and as whom."""
    p.add_argument("urls", metavar="URL[=SHARE]", nargs="*", type=url_and_share,
                   help="a project's address, host:port, and its share of this computer among "
                        "several (default: 100); none at all: as last time")
    p.add_argument("--name", default="", help="nickname shown by the server (default: made up)")
    p.add_argument("--email", default="", help="join as an account instead; needs --password")
    p.add_argument("--password", default="", help="of that account; is not kept")
    p.add_argument("--invitation", default="", metavar="CODE",
                   help="code that the project has given you, if it wants one")
    p.add_argument("--key", metavar="FINGERPRINT", type=str.lower, default="",
                   help="of the key by which the project signs its programs, 32 digits or more; "
                        "trust no other (default: the key it shows first)")
    p.add_argument("--moved", action="store_true",
                   help="the project of --dir has moved to URL: go on with it there")
    p.add_argument("--forget", metavar="URL", type=full_url,
                   help="leave a project: give back its jobs, delete its files")


def add_running_options(p):
    """How to work for them."""
    p.add_argument("--dir", default="", help="where to keep files (default: ~/.minigrid/HOST_PORT)")
    p.add_argument("--cpus", type=int, default=processors(), metavar="N",
                   help="jobs to run at a time (default: all processors, here %(default)s)")
    p.add_argument("--no-native", action="store_true",
                   help="run no programs for this kind of computer, only Python")
    p.add_argument("--proxy", metavar="URL", default="",
                   help="go through this HTTP proxy, 'none' for through none (default: "
                        "HTTP_PROXY and HTTPS_PROXY, not for machines near by)")
    p.add_argument("--ca-file", metavar="FILE", default="",
                   help="trust the certificates in this file, too, for https://")
    p.add_argument("--no-sandbox", action="store_true",
                   help="do not keep jobs from files and network where the system could; for "
                        "developers")
    p.add_argument("--once", action="store_true", help="fetch work once, exit when it is reported")
    p.add_argument("--max-jobs", type=int, default=0, metavar="N",
                   help="exit when N finished jobs have been reported")
    p.add_argument("--report-at-once", action="store_true",
                   help="report each job when it is finished instead of bundling for a second")
    p.add_argument("--low-water", type=float, default=0, metavar="SECONDS",
                   help="fetch work when what is here lasts less than this, for each processor "
                        "(default: 10 s or what suits the server)")
    p.add_argument("--high-water", type=float, default=0, metavar="SECONDS",
                   help="and then so much (default: three times as much)")
    p.add_argument("--ask-now", action="store_true",
                   help="do not wait until it is time to ask again: forget old delays")
    p.add_argument("--stop-with-stdin", action="store_true",
                   help="for programs that start this one: stop when standard input ends "
                        "(it is not read otherwise)")


def add_view_options(p):
    """What to show."""
    p.add_argument("--quiet", action="store_true", help="print only what went wrong")
    p.add_argument("--plain", action="store_true",
                   help="print lines only, no live view (as when the output is no terminal)")
    p.add_argument("--page", type=port, metavar="PORT", nargs="?", const=PAGE_PORT,
                   help="show the same in a browser on this computer, at http://127.0.0.1:PORT "
                        "(default: %d; 0: any free one)" % PAGE_PORT)


def obey_signals(client):
    """First signal: stop cleanly. Second: at once; the jobs' pipes break, so they end as well."""
    seen = []  # Not client.stopped: the end of standard input may have set that.

    def on_signal(number, frame):
        if seen:
            os._exit(1)
        seen.append(number)
        client.stop()

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name) and (  # nohup has a hang-up ignored: let it be.
                name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN):
            signal.signal(getattr(signal, name), on_signal)
    if hasattr(signal, "SIGCHLD"):  # Inherited as ignored, it would hide the jobs' exit codes.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def stop_with_stdin(client):
    """Stop the client when its standard input ends: its parent has died."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    client.stop()


def main(argv=None):
    """Run the client; return the exit status."""
    args = parse_arguments(argv)
    directory, held = choose_directory(args.urls[0][0] if args.urls else "", args.dir, args.forget)
    page = Page(args.page) if args.page is not None else None
    with contextlib.ExitStack() as stack:
        screen = open_screen(args.quiet, args.plain)
        if screen:
            stack.enter_context(screen)
        voice = Voice(args.quiet, log=LogFile(directory / "log.txt"), screen=screen)
        try:
            client = build_client(args, directory, voice)
        except KeyboardInterrupt:
            raise SystemExit("stopped before it began") from None
        obey_signals(client)
        if args.stop_with_stdin:
            threading.Thread(target=stop_with_stdin, args=(client,), daemon=True).start()
        if page:
            voice.tell("this client's page: " + page.url)
        try:
            run(client, screen, page)
        except Exception:  # A fault of this program: whoever leaves it running looks here later.
            voice.log.write(traceback.format_exc())
            raise
    fatal = client.fatal
    if fatal and not client.active:
        voice.warn(fatal)
    n = sum(p.n_reported - p.n_failed for p in client.projects)
    voice.tell("stopped; %s finished in all" % how_many(n, "job"))
    held.close()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # It may be gone, or none.
        sys.stdout.flush()
    os._exit(1 if fatal else 0)  # Not waiting for transfers that hang.


def build_client(args, directory, voice):
    """Make the client that the command line describes."""
    options = Options(
        args.name, args.email, args.password, args.cpus, args.once, args.max_jobs,
        args.report_at_once, args.invitation,
        ("python",) + (() if args.no_native else native_platforms()), args.key, args.low_water,
        args.high_water, args.moved, args.ask_now, args.forget or "")
    host = functools.partial(describe_host, directory, args.cpus)
    try:
        transport = Transport(proxy=args.proxy, ca_file=args.ca_file)
    except ValueError as e:
        raise SystemExit(str(e))
    try:
        # Without room the probe would find no protection, and nothing could be kept anyway.
        if shutil.disk_usage(directory).free < ROOM_MIN:
            raise OSError(errno.ENOSPC, "the disk is full; make room and start again")
        client = Client(directory, args.urls, options, transport, random.SystemRandom(), voice,
                        host)
        if args.forget and args.forget not in [project.url for project in client.projects]:
            raise SystemExit("nothing to forget: the client in %s does not work for %s"
                             % (directory, args.forget))
        client.state.p_fpops = client.state.p_fpops or measure_fpops()
        if not args.no_sandbox:
            client.protection = probe_sandbox(directory)
    except OSError as e:
        raise SystemExit("cannot use %s: %s" % (directory, e.strerror or e))
    client.introduce(time.time())
    return client


def run(client, screen, page):
    """Turn the client until it is done, and show how it stands."""
    def turn(now):
        client.step(now)
        show(client, screen, page, now)

    turn(time.time())
    while not client.finished():
        client.wait(client.pause(time.time()))
        turn(time.time())
    client.leave(time.time, turned=functools.partial(show, client, screen, page))


def show(client, screen, page, now):
    """Let people see how everything stands, if they want to and it is time."""
    if page and abs(now - page.shown_at) >= SECONDS_A_FRAME or screen and screen.due(now):
        snapshot = client.snapshot()
        if screen:
            screen.show(snapshot, now)
        if page:
            page.shown_at = now
            page.publish(snapshot)


if __name__ == "__main__":
    main()
