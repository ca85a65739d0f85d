#!/usr/bin/env python3
"""volunteer: gives this computer's spare time to a minigrid server. One file, no installation.

    python3 volunteer.py http://192.168.1.5:8080

joins the server, fetches jobs ("results" on the server), checks every file, runs each job in a
process of its own, uploads the output, reports, and asks for more. All it keeps is in one
directory, so it may be stopped or killed at any moment: the next start goes on from there.

1. Clock and randomness    delays: how long to wait after what
2. State                   what survives the process: State, Project, Job; the lock
3. Policy                  when to talk to the server and what to say; how to take its answers
4. Transport               HTTP: JSON, downloads and uploads that resume
5. Harness                 the program that runs inside a job's process
6. Tasks                   slots, processes, bounds
7. Client                  step(now): one turn of everything
8. Command line

Sections 1 to 3 do no I/O: `now` (seconds, the client's clock) and the random generator are
parameters. All state changes in the main thread; transfers and processes are waited for in
threads that only bring back an outcome. Rule ids ([C30], [S1-15]) are those of RULES.md.
"""

import argparse
import contextlib
import functools
import hashlib
import http.client
import ipaddress
import json
import math
import os
import platform
import queue
import random
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path

VERSION = "minigrid 1.0"

# ---- 1. Clock and randomness -------------------------------------------------

DELAY_MIN, DELAY_MAX = 60.0, 4 * 3600.0  # seconds [C30]
IDLE_DELAY_MAX = 60.0  # asking a server that has no work
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
    new work arrive, then up to a minute; never less than what the server asked for."""
    ceiling = min(IDLE_DELAY_MAX, 2.0 ** min(n_empty - 1, 10))
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
    trickles: list = field(default_factory=list)  # of dicts: time, text; not yet acknowledged
    n_trickles: int = 0  # trickle_up files taken so far: a number is never taken twice
    trickle_time: int = 0  # of the last message; no two of a job are of one second
    down: list = field(default_factory=list)  # texts for it that came while it was not running
    n_down: int = 0  # trickle_down files written so far

    @property
    def to_compute(self):
        return not self.over and self.client_state in (C.NEW, C.DOWNLOADING, C.READY)

    @property
    def downloads(self):
        return self.files + self.inputs + ([self.input] if self.input else [])


@dataclass
class Project:
    """One server and how we stand with it. (A later client has several.)"""

    url: str
    nickname: str = ""
    email_addr: str = ""
    authenticator: str = ""
    userid: int = 0
    hostid: int = 0  # 0: none yet [C35]
    rpc_seqno: int = 0  # number of the last request sent under this hostid
    name: str = ""
    n_rpc_failures: int = 0
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
    credit: float = 0.0
    jobs: list = field(default_factory=list)


@dataclass
class State:
    """All that survives the process: `client.json` in the client's directory."""

    project: Project
    host_cpid: str = ""  # made once per directory, so that clones can be told apart
    p_fpops: float = 0.0
    saved_at: float = 0.0


def revive(kind, data):
    """Build a dataclass from JSON; unknown keys are dropped, so that versions may differ."""
    return kind(**{f.name: data[f.name] for f in fields(kind) if f.name in data})


def write_safely(path, data):
    """Write a file so that after a power cut either the old or the new content is there."""
    temporary = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    with open(os.open(temporary, flags, 0o600), "wb") as f:  # It holds the authenticator.
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def save_state(state, directory):
    """Keep the state as JSON. Raises OSError, e.g. when the disk is full."""
    project = dict(vars(state.project), jobs=[vars(job) for job in state.project.jobs])
    text = json.dumps(dict(vars(state), project=project))
    write_safely(directory / "client.json", text.encode())


def load_state(directory):
    """Read what save_state() kept; None if there is nothing (or nothing readable: set aside)."""
    path = directory / "client.json"
    try:
        data = json.loads(path.read_bytes())
        state = revive(State, data)
        state.project = revive(Project, data["project"])
        state.project.jobs = [revive(Job, job) for job in data["project"]["jobs"]]
        return state
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        os.replace(path, path.with_name("client.json.bad"))
        return None


def lock(directory):
    """Take the directory's lock and return the open file that holds it; None if it is taken.
    The system lets go of it when the process dies, however it dies."""
    f = open(directory / "lock", "a+b")
    try:
        if os.name == "nt":
            import msvcrt

            f.seek(0)
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        f.close()
        return None
    return f


# ---- 3. Policy ---------------------------------------------------------------

JOBS_PER_CPU_MAX = 32  # held at once, whatever the estimates say
BUNDLE_SECONDS = 1.0  # how long a finished job waits for others to be reported with
SETTLE_SECONDS = 0.5  # a request for work waits this long for an upload that is under way
REPORT_BYTES_MAX = 256 * 1024  # stderr in one request; what does not fit goes with the next
STDERR_CHARS = 64 * 1024  # of a failed job are kept, the last ones
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")  # devices on Windows
SLOT_NAMES = {"in", "out", "output", "stdout.txt", "stderr.txt", "job.json", "done.json",
              "progress.txt", "fraction_done", "checkpoint", "checkpoint.json"}
FILES_MAX = 1000  # of one job
TRICKLE_BYTES = 32768  # of one message of a job; longer ones are cut
TRICKLES_HELD = 100  # messages of a job that wait here, in each direction; more wait in its slot
NATIVE_SPEED = 100.0  # floating-point operations of a native program for each one of Python


@dataclass
class Limits:
    """What next_request() has to know beside the project."""

    n_cpus: int
    p_fpops: float
    room: float = math.inf  # jobs we still want, beside those held
    report_wait: float = BUNDLE_SECONDS
    leaving: bool = False  # the client is about to exit: only report


@dataclass
class Request:
    """What the next request to the scheduler says."""

    reports: list
    work_req_seconds: float = 0.0
    cpu_req_instances: int = 0
    estimated_delay: float = 0.0
    trickles: list = field(default_factory=list)  # of pairs: job, message

    @property
    def asks(self):
        return self.work_req_seconds > 0 or self.cpu_req_instances > 0


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


def water_marks(project):
    """Low and high mark of the queue, in seconds of work per processor [S1-20 S1-33 C33]. They grow
    with the delay the server asks for: a big server wants few requests, a class quick ones."""
    low = max(10.0, 2 * project.request_delay)
    return low, 3 * low


def next_request(project, limits, now):
    """Decide whether to call the scheduler now, and what to say; None: not now. No side effects.

    One request reports and asks at once [S1-01]. Reports wait a moment to be bundled [S1-03]."""
    if project.min_rpc_time > now:  # [C27]
        return None
    waiting = [job for job in project.jobs if job.over]
    to_compute = [job for job in project.jobs if job.to_compute]
    seconds = sum(remaining(job, project, limits.p_fpops) for job in to_compute)
    idle = max(0, limits.n_cpus - len(to_compute))
    low, high = water_marks(project)
    spare = JOBS_PER_CPU_MAX * limits.n_cpus - (len(project.jobs) - len(waiting))
    room = min(limits.room, spare)
    may_ask = not limits.leaving and room >= 1 and project.work_time <= now
    settling = any(job.client_state == C.UPLOADING and now - job.ended_at < SETTLE_SECONDS
                   for job in project.jobs)
    hungry = may_ask and not settling and (idle or seconds < low * limits.n_cpus)
    due = any(idle and not settling or limits.leaving or now - job.ended_at >= limits.report_wait
              or local_deadline(job, project) < now + DELAY_MIN for job in waiting)
    trickling = any(job.trickles for job in project.jobs) and project.trickle_time <= now
    if not hungry and not due and not trickling:
        return None
    request = Request(first_reports(waiting), estimated_delay=seconds / limits.n_cpus,
                      trickles=first_trickles(project.jobs))
    missing = high * limits.n_cpus - seconds
    if may_ask and (idle or missing > 0):
        # The server counts in its own estimates. `room` keeps bad ones from filling the disk.
        wanted = max(missing, 1.0) / (project.correction or 1.0)
        if room < spare:
            wanted = min(wanted, room * (project.typical or 1.0))
        elif project.typical:
            wanted = min(wanted, spare * project.typical)
        request.work_req_seconds = max(wanted, 1e-3)
        request.cpu_req_instances = int(min(idle, room))
    return request


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


def body_of(request, state, host, platforms=("python",)):
    """The request as the JSON the server wants. Counts it: rpc_seqno goes up with every request
    under a host id, also if the reply gets lost; without a host id it is 0 [C35]."""
    project = state.project
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
    }


def take_failure(project, now, rng):
    """Note that a request failed: back off [S1-24 S1-25 C25]."""
    project.n_rpc_failures += 1
    project.min_rpc_time = now + backoff(project.n_rpc_failures, rng)


def take_reply(state, reply, request, n_new, sent, now, rng):
    """Note what a reply says about the project and us. First reset, then apply the delay [C28]."""
    project = state.project
    project.n_rpc_failures, project.min_rpc_time = 0, 0.0
    project.request_delay = number(reply.get("request_delay"), 0, 7 * 86400, 0.0)
    if project.request_delay:  # 0: none asked [C35]
        project.min_rpc_time = now + project.request_delay
    hostid = int(number(reply.get("hostid"), 1, 2 ** 63, project.hostid))
    if hostid != project.hostid:
        if project.hostid:  # Our directory was copied: part from the copy [WIRE 15.3].
            state.host_cpid = secrets.token_hex(16)
        project.hostid, project.rpc_seqno = hostid, 0
    server_time = number(reply.get("server_time"), 1, 1e11, None)
    if server_time is not None:
        project.clock_offset = server_time - (sent + now) / 2
    project.name = plain(reply.get("project_name"), 80)
    project.userid = int(number(reply.get("userid"), 0, 2 ** 63, project.userid))
    project.credit = number(reply.get("user_total_credit"), 0, 1e18, project.credit)
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


def move(project, url):
    """Follow a project to another address, with the files and uploads of all its jobs [D5]."""
    for job in project.jobs:
        for f in job.downloads + ([job.output] if job.output else []):
            if f["url"].startswith(project.url + "/"):
                f["url"] = url + f["url"][len(project.url):]
    project.url = url


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
        raise ValueError("the name %s is not allowed" % ascii(name)[:60])
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
    """Return a full http(s) address; ValueError for others: urllib would open file:// as well."""
    url = urllib.parse.urljoin(base + "/", url if isinstance(url, str) else "")
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("%s is no web address" % ascii(url)[:60])
    return url


def parse_file(data, base):
    """Check one file to download."""
    if not re.fullmatch("[0-9a-f]{64}", str(data["sha256"])):
        raise ValueError("a file without a proper sha256")
    nbytes = number(data["nbytes"], 0, 1e15, -1)
    if nbytes != int(nbytes) or nbytes < 0:
        raise ValueError("a file without a proper size")
    return {"name": safe_name(data["name"]), "url": web_address(base, data["url"]),
            "sha256": data["sha256"], "nbytes": int(nbytes), "main": data.get("main") is True,
            "open_name": safe_open_name(data.get("open_name") or data["name"]),
            "executable": data.get("executable") is True}


def parse_files(data, base):
    """Check the files of an assignment: those of the application, the input, further inputs."""
    files = [parse_file(f, base) for f in data["files"]]
    inputs = [parse_file(f, base) for f in data.get("inputs") or []]
    if [f["main"] for f in files].count(True) != 1:
        raise ValueError("not exactly one main file")
    input = dict(parse_file(data["input"], base), open_name="in")
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
            ncpus=number(data.get("ncpus"), 0.01, 4096, 1.0),
            command_line=argument_text(data.get("command_line", "")),
            files=files, input=input, inputs=inputs,
            output={"name": safe_name(data["output"]["name"]),
                    "url": web_address(base, data["output"]["url"]),
                    "nbytes_max": number(data["output"].get("nbytes_max"), 0, 1e15, 1e8)},
            report_deadline=number(data["report_deadline"], 0, 1e11, 1e11),
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


# ---- 4. Transport ------------------------------------------------------------

PIECE_BYTES = 4 * 1024 * 1024  # of an upload; what was lost of one is sent again
REPLY_BYTES_MAX = 64 * 1024 * 1024
LATER = (401, 408, 409, 425, 429)  # refusals that may pass


class TransportError(Exception):
    """A request failed. `status` is HTTP's, 0 if there was no answer at all."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status

    @property
    def lasting(self):
        """Will the same request be refused for ever?"""
        return 400 <= self.status < 500 and self.status not in LATER

    def __str__(self):
        if self.status >= 500:
            return "the server has a problem on its side: " + self.args[0]
        return ("the server refuses: " if self.status else "no connection: ") + self.args[0]


class BadFile(Exception):
    """A downloaded file is not what the server announced."""


def sha256_of(path):
    """Return the SHA-256 of a file as hex, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while True:
            block = f.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)


class Transport:
    """HTTP by urllib. Knows nothing of jobs; safe to use from several threads."""

    def __init__(self, timeout=30.0):
        self.timeout = timeout
        self.straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.proxied = urllib.request.build_opener()

    def _opener(self, url):
        """A proxy of the environment is for the internet, not for a server in the same room."""
        host = urllib.parse.urlsplit(url).hostname or ""
        try:
            near = ipaddress.ip_address(host).is_private
        except ValueError:
            near = "." not in host or host.endswith(".local")
        return self.straight if near else self.proxied

    @contextlib.contextmanager
    def _open(self, method, url, data=None, headers=()):
        """Send a request, give the response; every kind of trouble becomes a TransportError."""
        request = urllib.request.Request(url, data, dict(headers), method=method)
        request.add_header("User-Agent", VERSION)
        try:
            with self._opener(url).open(request, timeout=self.timeout) as response:
                yield response
        except urllib.error.HTTPError as e:
            with e:
                raise refusal(e) from None
        except urllib.error.URLError as e:
            raise TransportError(0, str(e.reason)) from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise TransportError(0, str(e) or type(e).__name__) from None

    def _json(self, method, url, data=None, headers=()):
        with self._open(method, url, data, headers) as response:
            data = response.read(REPLY_BYTES_MAX)
        with contextlib.suppress(ValueError):
            value = json.loads(data)
            if isinstance(value, dict):
                return value
        raise TransportError(500, "its answer is no JSON object")

    def post_json(self, url, value):
        """POST a JSON value, return the JSON object answered."""
        data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return self._json("POST", url, data, {"Content-Type": "application/json"})

    def download(self, wanted, partial, path):
        """Bring a file (a dict: url, sha256, nbytes) to `path`, going on where `partial` ends.
        It appears under its name only if size and checksum are right; else BadFile."""
        if path.exists():
            if path.stat().st_size == wanted["nbytes"] and sha256_of(path) == wanted["sha256"]:
                return
            path.unlink()
        have = partial.stat().st_size if partial.exists() else 0
        if have > wanted["nbytes"]:
            have = 0
        if not have or have < wanted["nbytes"]:
            self._get(wanted, partial, have)
        nbytes, sha256 = partial.stat().st_size, sha256_of(partial)
        if nbytes < wanted["nbytes"]:
            raise TransportError(0, "the connection broke at byte %d" % nbytes)
        if nbytes > wanted["nbytes"] or sha256 != wanted["sha256"]:
            partial.unlink()
            raise BadFile("its content is not what was announced (size or checksum)")
        os.replace(partial, path)

    def _get(self, wanted, partial, have):
        headers = {"Range": "bytes=%d-" % have} if have else {}
        with self._open("GET", wanted["url"], headers=headers) as response:
            resumed = have and response.status == 206
            left = wanted["nbytes"] - (have if resumed else 0) + 1  # One more shows it is too long.
            with open(partial, "ab" if resumed else "wb") as f:
                while left > 0:
                    block = response.read(min(left, 1 << 16))
                    if not block:
                        break
                    try:
                        f.write(block)
                    except OSError as e:  # Ours, not the network's.
                        raise BadFile("it cannot be written: %s" % e)
                    left -= len(block)

    def upload(self, url, path, authenticator, resume):
        """Send a file in pieces, going on where the server's copy ends."""
        total, auth = path.stat().st_size, {"Authorization": "Bearer " + authenticator}
        headers = dict(auth, **{"X-Sha256": sha256_of(path),
                                "Content-Type": "application/octet-stream"})
        reply = self._uploaded(url, auth) if resume or total > PIECE_BYTES else {}
        stuck = 0
        with open(path, "rb") as f:
            while reply.get("complete") is not True:
                at = int(number(reply.get("nbytes"), 0, total, 0))
                at = at if at < total else 0  # All there and yet not complete: once more.
                f.seek(at)
                data = f.read(PIECE_BYTES)
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


def refusal(response):
    """Make a TransportError of an HTTP error: the server's own sentence if it has one."""
    try:
        body = json.loads(response.read(1 << 20))
    except (OSError, ValueError, http.client.HTTPException):
        body = None
    text = plain(body.get("error")) if isinstance(body, dict) else ""
    return TransportError(response.code, text or "HTTP %d %s"
                          % (response.code, plain(response.reason, 80)))


# ---- 5. Harness --------------------------------------------------------------

# The program that runs one job. A string, because this file may have come through
# `python3 -c "$(curl ...)"` and then has no path of its own. It gets the slot directory, and as
# standard input a pipe that ends when the client dies, on every system. It leaves `output`,
# `done.json` and an exit code.
HARNESS = r'''"""Runs one job of a minigrid volunteer. Written by volunteer.py at each start."""

import errno
import importlib.util
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback

CHILD_FAILED, DISK, TIME, MEMORY = 195, 196, 197, 198
TRICKLE_BYTES = 32768
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


def program_memory():
    """Bytes in use now by the native program and what it has started; 0 if there is none."""
    if not run_native.pid:
        return 0
    if sys.platform == "linux":
        return tree_memory(run_native.pid, 0)
    done = subprocess.run(["/bin/ps", "-A", "-o", "pgid=", "-o", "rss="], stdout=subprocess.PIPE)
    rows = [line.split() for line in done.stdout.splitlines()]
    return 1024 * sum(int(row[1]) for row in rows if int(row[0]) == os.getpgrp())


def tree_memory(pid, depth):
    """Resident bytes of a process and all below it; what ends meanwhile does not count."""
    try:
        with open("/proc/%d/statm" % pid) as f:
            total = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
            children = f.read().split()
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
        while max(peak_memory(), run_native.memory) <= memory:
            time.sleep(0.2 if sys.platform == "linux" else 1.0)  # ps is not free.
            run_native.memory = max(run_native.memory, program_memory())
        leave_note()
    except OSError:
        return  # No /bin/ps, or no room for another process: the system's own bounds remain.
    die(MEMORY)


def limit(job):
    """Bounds that the system itself keeps; the client watches the same ones from outside."""
    memory = int(job["memory"] * 2 + (1 << 30))  # Address space is far more than memory in use.
    try:
        import resource
    except ImportError:
        return limit_windows(memory)
    wanted = [("CORE", 0), ("NOFILE", 256), ("FSIZE", job["disk"]), ("CPU", job["cpu_seconds"])]
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
        limits = Limits(flags=0x2000 | 0x200)  # KILL_ON_JOB_CLOSE, JOB_MEMORY
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
    run_native.pid, run_native.memory = 0, 0
    progress.last, checkpoint.state, checkpoint.before = -1.0, None, 0.0
    try:
        with open("checkpoint.json", "rb") as f:
            kept = json.load(f)
        checkpoint.state, checkpoint.before = kept["state"], kept["cpu_time"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # None yet, or cut short by a power failure: from the beginning, then.


def encode(value, returns):
    """The output as bytes; TypeError or ValueError with a text for the application's author."""
    if returns == "bytes":
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError("compute() has to return bytes, not " + type(value).__name__)
        return bytes(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise type(e)("compute() has to return a JSON value (no NaN, no infinity): %s" % e)
    return text.encode()


def run_native(job):
    """Run a program that knows nothing of us: it reads standard input, which is the file `in`, and
    writes standard output or the file `out`. Return its exit status."""
    if os.name != "nt":
        os.environ.setdefault("PATH", PATH)
    with open(job["input"], "rb") as data, open("stdout.txt", "wb") as printed:
        program = subprocess.Popen([os.path.abspath(job["main"])] + job["arguments"], stdin=data,
                                   stdout=printed)
    run_native.pid = program.pid
    code = program.wait()
    run_native.pid = 0
    if code == 0:
        written = os.path.isfile("out") and not os.path.islink("out")
        os.replace("out" if written else "stdout.txt", "output")
    elif code < 0:
        sys.stderr.write("the program was ended by signal %d\n" % -code)
        ends = {getattr(signal, "SIGXFSZ", 0): DISK, getattr(signal, "SIGXCPU", 0): TIME}
        return ends.get(-code, 128 - code)
    return code if code < 256 else CHILD_FAILED  # Windows has larger ones.


def run(job):
    if "arguments" in job:
        return run_native(job)
    spec = importlib.util.spec_from_file_location("app", os.path.abspath(job["main"]))
    app = sys.modules["app"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    with open(job["input"], "rb") as f:
        data = f.read()
    if getattr(app, "takes", "json") != "bytes":
        data = json.loads(data)
    offered = {"progress": progress, "checkpoint": checkpoint, "trickle": trickle}
    wanted = inspect.signature(app.compute).parameters
    random.seed(job["workunit"])  # Replicas must agree.
    output = app.compute(data, **{k: offered[k] for k in offered if k in wanted})
    write("output", encode(output, getattr(app, "returns", "json")))
    return 0


def leave_note():
    """Tell the client what the job has used."""
    used = {"cpu_time": spent(), "peak_memory": max(peak_memory(), run_native.memory)}
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
    pipe = os.dup(0)  # Not inherited by what the job may start.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=watch, args=(pipe, job["memory"]), daemon=True).start()
    limit(job)
    try:
        status = run(job)
    except BaseException as e:  # SystemExit too: a job ends by returning.
        status = status_of(e)
        try:
            traceback.print_exc()
            sys.stderr.flush()
        except OSError:
            pass  # stderr.txt may be what is too big.
    try:
        sys.stdout.flush()
        leave_note()
    except OSError as e:
        status = status or status_of(e)
    die(status)


main()
'''

# ---- 6. Tasks ----------------------------------------------------------------

KEPT_ENVIRONMENT = ("SYSTEMROOT", "WINDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
TIME_BOUND_MIN = 60.0
TICK_MAX = 10.0  # A longer gap between two looks was sleep or a clock that was set: not computing.
LOOK_SECONDS = 0.5
TRICKLE = re.compile(r"trickle_(?:up|down)\.(\d{1,15})")


def time_bound(job, p_fpops):
    """Seconds a job may take on this computer."""
    return max(TIME_BOUND_MIN, job.rsc_fpops_bound / speed(job, p_fpops))


def prepare_slot(slot, job, files, seconds):
    """Fill a slot directory with checked copies; BadFile names the file that is not what it should
    be. Return True if the job goes on from a checkpoint; all else that was there is removed."""
    slot.mkdir(parents=True, exist_ok=True)
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
        if native and (f.get("main") or f.get("executable")):
            place.chmod(0o700)
    order = {"workunit": job.workunit, "main": open_name(next(f for f in job.files if f["main"])),
             "input": open_name(job.input), "memory": job.rsc_memory_bound,
             "disk": job.rsc_disk_bound, "cpu_seconds": seconds * (os.cpu_count() or 1) + 60,
             "n_trickles": job.n_trickles}
    if native:
        order["arguments"] = split_arguments(job.command_line)
    (slot / "job.json").write_text(json.dumps(order), encoding="utf-8")
    return resumed


def empty_slot(slot, native, names):
    """Remove what an earlier start has left, but its checkpoint and messages; True if there is a
    checkpoint. With a file `checkpoint` a native program finds all the files it has made."""
    checkpoint = slot / ("checkpoint" if native else "checkpoint.json")
    resumed = checkpoint.is_file()
    ours = names | {"job.json", "done.json", "stdout.txt", "stderr.txt", "output"}
    for old in list(slot.iterdir()):
        if old.is_symlink() or not old.is_dir():
            if old.name in ours or not (old == checkpoint or TRICKLE.fullmatch(old.name)
                                        or native and resumed):
                old.unlink()
        elif old.name in ours or not (native and resumed):
            shutil.rmtree(old)
    return resumed


def open_name(f):
    """The name of a file in a job's directory; a state of an older version has none."""
    return f.get("open_name") or f["name"]


def deliver(slot, job):
    """Write the texts that have come for a job into its slot, each as a whole file."""
    while job.down:
        path = slot / ("trickle_down.%d" % job.n_down)
        temporary = path.with_name(path.name + ".new")
        temporary.write_bytes(job.down[0].encode(errors="replace"))
        os.replace(temporary, path)
        del job.down[0]
        job.n_down += 1


def tree_bytes(directory):
    """Bytes of all files below a directory; what vanishes meanwhile does not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


class Task:
    """A running job: a process of its own, in a slot directory."""

    def __init__(self, job, slot, harness, seconds, now):
        self.job, self.slot, self.seconds, self.looked = job, slot, seconds, now
        self.measured = -math.inf
        self.verdict = None  # (exit_status, text) if we ended it
        self.gone, self.lock = False, threading.Lock()
        self.taken = []  # messages that can be deleted once the state is kept
        self.baggage = tree_bytes(slot)  # Our own copies are not the job's consumption.
        folder = str(slot.resolve())
        environment = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
        environment.update(PYTHONHASHSEED="0", PYTHONUTF8="1", HOME=folder, TMPDIR=folder,
                           TEMP=folder, TMP=folder)
        if os.name == "nt":
            environment["PATH"] = os.environ.get("PATH", "")
            own = {"creationflags": subprocess.BELOW_NORMAL_PRIORITY_CLASS
                   | subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        else:
            own = {"start_new_session": True}  # So that its children can be killed with it.
        # Not -I: it ignores PYTHONHASHSEED, and replicas must iterate over sets in one order. The
        # environment is our own and the harness drops its directory from sys.path: same effect.
        with open(slot / "stderr.txt", "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-B", str(harness.resolve()), folder], cwd=folder,
                env=environment, stdin=subprocess.PIPE, stdout=stderr, stderr=stderr, **own)

    def wait(self):
        """Block until the process has ended (own thread); return its exit code."""
        if os.name != "nt" and hasattr(os, "waitid"):
            # While it is a zombie its number cannot be given to others: now kill what it left.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            with self.lock:
                self._kill_group()
                self.gone = True
        code = self.process.wait()
        self.gone = True
        self.process.stdin.close()
        return code

    def _kill_group(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, exit_status=0, text=""):
        """End it, with everything it started. The first reason given is kept; none: not its fault,
        it will go on later."""
        self.verdict = self.verdict or (exit_status and (exit_status, text))
        with self.lock:
            if not self.gone:
                self._kill_group() if os.name != "nt" else self.process.kill()

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
        job.peak_memory = max(job.peak_memory, self._memory())
        if job.peak_memory > job.rsc_memory_bound:
            self.kill(EXIT_MEMORY, "stopped: over its memory limit of %.0f MB"
                      % (job.rsc_memory_bound / 1e6))
        if tree_bytes(self.slot) - self.baggage > job.rsc_disk_bound:
            self.kill(EXIT_DISK, "stopped: over its disk limit of %.0f MB"
                      % (job.rsc_disk_bound / 1e6))
        with contextlib.suppress(OSError, ValueError):  # It may be half written just now.
            name = "progress.txt" if job.platform == "python" else "fraction_done"
            with open(self.slot / name, "rb") as f:
                fraction = float(f.read(64))
            job.fraction_done = number(fraction, 0.0, 1.0, job.fraction_done)
        return self.take_trickles(now)

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
                with open(self.slot / ("trickle_up.%d" % n), "rb") as f:
                    text = storable(f.read(TRICKLE_BYTES).decode("utf-8", "replace"))
                job.trickle_time = max(int(now), job.trickle_time + 1)
                job.trickles.append({"time": job.trickle_time, "text": text})
            self.taken = [self.slot / ("trickle_up.%d" % n) for n in ups if n < job.n_trickles]
        return job.n_trickles > old

    def _memory(self):
        """Peak of resident memory so far, bytes; 0 where only the harness can tell."""
        try:
            status = Path("/proc/%d/status" % self.process.pid).read_text()
            return int(re.search(r"VmHWM:\s*(\d+)", status).group(1)) * 1024
        except (OSError, AttributeError):
            return 0

    def outcome(self, code):
        """What an ended process means: (exit_status, text in plain words)."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            done = json.loads((self.slot / "done.json").read_bytes())
            self.job.cpu_time = number(done.get("cpu_time"), 0, 1e12, 0.0)
            self.job.peak_memory = max(self.job.peak_memory,
                                       int(number(done.get("peak_memory"), 0, 1e15, 0)))
        if self.verdict:
            return self.verdict
        if code == 0:
            output = self.slot / "output"
            if output.is_file() and not output.is_symlink():
                return 0, ""
            return EXIT_CHILD_FAILED, "it left no output"
        if code == -getattr(signal, "SIGXCPU", 0):
            code = EXIT_TIME
        known = {EXIT_CHILD_FAILED: "", EXIT_DISK: "stopped: over its disk limit",
                 EXIT_TIME: "stopped: over its limit of processor time",
                 EXIT_MEMORY: "stopped: over its memory limit"}
        if code in known:
            return code, known[code]
        if self.job.platform != "python" and 0 < code < 256:
            return code, "its program ended with exit status %d" % code
        how = "signal %d" % -code if code < 0 else "exit code %d" % code
        return EXIT_CHILD_FAILED, "its process ended with " + how

    def stderr(self, nbytes):
        """The end of what the job printed."""
        try:
            with open(self.slot / "stderr.txt", "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - nbytes))
                return f.read().decode("utf-8", "replace")
        except OSError:
            return ""


# ---- 7. Client ---------------------------------------------------------------

TRANSFERS_MAX = 4
BAD_FILES_MAX = 3  # retries of a file that is wrong or refused
ONCE_TRIES = 5  # replies without work until --once gives up
SAVE_SECONDS = 1.0
CACHE_SECONDS = 30 * 86400  # files that no job has needed for so long are deleted


class Voice:
    """What people see: one line per event, in plain words."""

    def __init__(self, quiet=False, stream=None, errors=None):
        self.quiet, self.stream, self.errors = quiet, stream or sys.stdout, errors or sys.stderr

    def _print(self, text, stream):
        with contextlib.suppress(OSError, ValueError):  # Its terminal may be gone.
            print(time.strftime("%H:%M:%S"), text, file=stream, flush=True)

    def tell(self, text):
        if not self.quiet:
            self._print(text, self.stream)

    def warn(self, text):
        self._print(text, self.errors)


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


@dataclass
class Retry:
    """A file transfer that has failed: how often, how often for a bad file, when again."""

    n: int = 0
    n_bad: int = 0
    at: float = 0.0
    offline: bool = False


class Client:
    """Everything together. step(now) does one turn and never blocks on network or processes;
    wait() blocks until something happens. Owns the directory; the caller holds its lock."""

    def __init__(self, directory, url, options, transport, rng, voice, host=None):
        self.directory, self.options, self.transport = directory, options, transport
        self.rng, self.voice, self.host = rng, voice, host or (lambda: {})
        self.events, self.busy = queue.SimpleQueue(), set()
        self.tasks, self.retries, self.checked = {}, {}, set()
        self.now = 0.0
        self.leaving = self.stopped = self.fetched = False
        self.fatal = ""  # a sentence: no point in going on
        self.told, self.apps = set(), set()
        self.dirty, self.urgent, self.save_time = True, True, 0.0
        for name in ("files", "partial", "outputs", "slots"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        write_safely(directory / "harness.py", HARNESS.encode())
        self.state = load_state(directory) or State(Project(url))
        self.project = self.state.project
        self.state.host_cpid = self.state.host_cpid or secrets.token_hex(16)
        self.project.nickname = self.project.nickname or options.nickname or friendly_name(rng)
        self.project.n_empty, self.project.work_time = 0, 0.0  # Who starts a client wants work now.
        self.n_reported_before = self.project.n_reported
        self._clean_up()

    # -- turning

    def step(self, now):
        """One turn: hear outcomes, look after processes, start what can be started, talk, save."""
        mind_clock(self.project, self.now or self.state.saved_at, now)
        self.now = now
        self._hear()
        for task in list(self.tasks.values()):
            if task.look(now):
                self.dirty = self.urgent = True
        if not self.wanted_left():
            self._give_back()
        if not self.leaving:
            self._start_transfers()
            self._start_tasks()
        self._contact()
        self._save()

    def wait(self, seconds):
        """Block until an outcome is there, but not longer. Consumes nothing."""
        with contextlib.suppress(queue.Empty):
            self.events.put(self.events.get(timeout=max(0.0, seconds)))

    def pause(self, now):
        """Seconds until something may have to be done by itself."""
        times = [self.project.min_rpc_time, self.project.work_time]
        times += [retry.at for retry in self.retries.values()]
        times += [job.ended_at + BUNDLE_SECONDS for job in self.project.jobs if job.over]
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
        done = self.project.n_reported - self.n_reported_before
        done += sum(not job.to_compute and job.client_state != C.ABORTED
                    for job in self.project.jobs)
        return max(0, self.options.max_jobs - done)

    def finished(self):
        """Is there nothing left that this run was started for?"""
        if self.stopped or self.fatal:
            return True
        if self.project.jobs or "rpc" in self.busy:
            return False
        if self.options.once and not self.fetched and self.project.n_empty >= ONCE_TRIES:
            self.voice.warn("the server has no work for this computer")
            return True
        return not self.wanted_left() or (self.options.once and self.fetched)

    def leave(self, clock, seconds=5.0):
        """End cleanly: jobs stop (they go on from their checkpoints at the next start), what is
        finished is reported if that is quickly done, the state is kept."""
        self.leaving = True
        for task in self.tasks.values():
            task.kill()
        end = clock() + seconds
        while True:
            now = clock()
            self.step(now)
            reports = any(job.over for job in self.project.jobs) and self.project.authenticator
            hopeless = self.project.min_rpc_time >= end or self.project.n_rpc_failures
            if now >= end or (not self.tasks and "rpc" not in self.busy
                              and (not reports or hopeless)):
                break
            self.wait(min(self.pause(now), end - now))
        self.dirty = self.urgent = True
        self._save()

    def _save(self):
        """Keep the state if it has changed, at most once a second unless it matters: with jobs of
        0.1 s a disk flush for each would be most of the work."""
        if not self.dirty or (not self.urgent and abs(self.now - self.save_time) < SAVE_SECONDS):
            return
        self.save_time = self.state.saved_at = self.now
        try:
            save_state(self.state, self.directory)
            self.dirty = self.urgent = False
        except OSError as e:
            self._warn_once("cannot write to %s: %s" % (self.directory, e))
            self.urgent = False

    def _warn_once(self, text):
        if text not in self.told:
            self.told.add(text)
            self.voice.warn(text)

    # -- the server

    def _contact(self):
        project, now = self.project, self.now
        if "rpc" in self.busy or self.fatal:
            return
        if not project.authenticator:
            if not self.leaving and project.min_rpc_time <= now:
                self._register()
            return
        limits = Limits(self.options.n_cpus, self.state.p_fpops, leaving=self.leaving)
        if self.options.report_at_once:
            limits.report_wait = 0.0
        if self.options.once and self.fetched:
            limits.room = 0
        elif self.options.max_jobs:
            limits.room = self.wanted_left() - sum(job.to_compute for job in project.jobs)
        request = next_request(project, limits, now)
        if request is None:
            return
        body = body_of(request, self.state, self.host(), self.options.platforms)
        self.dirty = self.urgent = True
        self._save()  # Before sending: a number must never be used twice.
        self._begin("rpc", lambda: self.transport.post_json(project.url + "/scheduler", body),
                    functools.partial(self._replied, request, now))

    def _register(self):
        project, options = self.project, self.options
        body = {"nickname": project.nickname}
        if options.email_addr:
            body.update(email_addr=options.email_addr, password=options.password)
        if options.invitation:
            body["invitation"] = options.invitation
        self._begin("rpc", lambda: self.transport.post_json(project.url + "/register", body),
                    self._registered)

    def _registered(self, reply, error):
        project = self.project
        authenticator = reply.get("authenticator") if reply else None
        if not error and not (isinstance(authenticator, str)
                              and re.fullmatch(r"[A-Za-z0-9_-]{8,128}", authenticator)):
            error = TransportError(500, "it did not say who we are")
        if error:
            if getattr(error, "lasting", False) or getattr(error, "status", 0) == 401:
                self.fatal = str(error)
                return
            return self._rpc_failed(error)
        # n_rpc_failures stays: only the scheduler's answer shows that it knows us.
        project.authenticator, project.min_rpc_time = authenticator, 0.0
        project.userid = int(number(reply.get("userid"), 0, 2 ** 63, 0))
        project.nickname = plain(reply.get("name"), 80) or project.nickname
        project.email_addr = self.options.email_addr
        self.dirty = self.urgent = True
        self.voice.tell("joined %s as %s" % (project.url, project.nickname))

    def _rpc_failed(self, error):
        take_failure(self.project, self.now, self.rng)
        self.dirty = True
        self.voice.warn("%s; trying again in %s"
                        % (error, duration(self.project.min_rpc_time - self.now)))

    def _replied(self, request, sent, reply, error):
        project = self.project
        if not error and number(reply.get("hostid"), 0, 2 ** 63, None) is None:
            error = TransportError(500, "its answer makes no sense")
        if error and getattr(error, "lasting", False):
            for job in request.reports:  # Should something in it be the reason, it must not
                job.stderr_out = ""  # keep all that is finished from being reported for ever.
            drop_trickles(request)
        if getattr(error, "status", 0) == 401 or (
                not error and project.hostid and reply["hostid"] == 0):
            return self._unknown_here(error or "the server does not know this client")
        if error:
            return self._rpc_failed(error)
        jobs = self._accept(reply)
        was_failing = project.n_rpc_failures
        take_reply(self.state, reply, request, len(jobs), sent, self.now, self.rng)
        self.dirty = self.urgent = True
        if was_failing:  # The server is back: files that waited for it need not wait longer.
            for retry in self.retries.values():
                retry.at = 0.0 if retry.offline else retry.at
        self._forget(names_in(reply.get("acks")))
        self._abort(names_in(reply.get("aborts")), names_in(reply.get("aborts_if_not_started")))
        self._tell_news(reply, request, jobs)
        self._take_down(reply.get("trickles"))
        if jobs:
            project.jobs += jobs
            project.typical = estimate(jobs[-1], self.state.p_fpops)
            self.fetched = True

    def _unknown_here(self, error):
        """The server does not know our authenticator: it was set up anew, as demonstrations are."""
        project = self.project
        if project.email_addr and not self.options.password:
            self.fatal = "%s. Start again with --email and --password" % error
            return
        take_failure(project, self.now, self.rng)
        if project.n_rpc_failures == 1:  # Soon the first time only.
            project.min_rpc_time = self.now + transfer_delay(1, self.rng)
        project.authenticator, project.hostid, project.rpc_seqno = "", 0, 0
        self.dirty = self.urgent = True
        self.voice.warn("%s; joining again as %s in %s" % (
            error, project.nickname, duration(project.min_rpc_time - self.now)))

    def _accept(self, reply):
        """The new jobs of a reply. A result that we hold already may be sent again: keep ours."""
        held = {job.name for job in self.project.jobs}
        jobs = []
        assignments = reply.get("assignments")
        for data in assignments if isinstance(assignments, list) else []:
            try:
                job = parse_assignment(data, self.project.url, self.options.platforms)
            except ValueError as e:
                self.voice.warn("refused a job: %s" % e)
                job = refused(data, "refused: %s" % e, self.now)
            if job and job.name not in held:
                held.add(job.name)
                jobs.append(job)
        return jobs

    def _take_down(self, trickles):
        """Give messages to the jobs they are for, at once if they run, else at their start."""
        jobs = {job.name: job for job in self.project.jobs}
        for message in trickles if isinstance(trickles, list) else []:
            name = message.get("result") if isinstance(message, dict) else None
            job = jobs.get(name) if isinstance(name, str) else None
            text = message.get("text") if job else None
            if isinstance(text, str) and job.to_compute and len(job.down) < TRICKLES_HELD:
                job.down.append(text[:2 * TRICKLE_BYTES])
        for task in self.tasks.values():
            with contextlib.suppress(OSError):  # Later, then: at its next start.
                deliver(task.slot, task.job)

    def _tell_news(self, reply, request, jobs):
        project, tell = self.project, self.voice.tell
        messages = reply.get("messages")
        for message in messages if isinstance(messages, list) else []:
            text = plain(message.get("text")) if isinstance(message, dict) else ""
            if text and (message.get("priority") == "notice" or text not in self.told):
                tell("server: " + text)
                self.told = {text} if len(self.told) > 99 else self.told | {text}
        if jobs:
            apps = {job.app: job.about for job in jobs}
            tell("%d new job%s: %s" % (len(jobs), "s" * (len(jobs) > 1), ", ".join(apps)))
            for app in apps.keys() - self.apps:  # What they are for, once.
                self.apps.add(app)
                tell("%s: %s" % (app, apps[app]))
        elif request.asks and project.n_empty == 1:
            tell("no work at the moment; asking again from time to time")

    def _forget(self, names):
        """Acknowledged: the server has taken the report (or the result is none of ours)."""
        done = [job for job in self.project.jobs if job.name in names]
        if not done:
            return
        self.project.jobs = [job for job in self.project.jobs if job.name not in names]
        for job in done:
            if job.name in self.tasks:  # Not reported, yet acknowledged: nobody wants it.
                self.tasks[job.name].kill(EXIT_ABORTED_BY_PROJECT, "")
            self.project.n_reported += job.client_state != C.ABORTED
            self._drop_files(job)
        self._drop_inputs(done)
        self.voice.tell("reported %s" % ", ".join(job.name for job in done[:4])
                        + (" and %d more" % (len(done) - 4) if len(done) > 4 else "")
                        + ("; credit so far %.1f" % self.project.credit
                           if self.project.credit else ""))

    def _abort(self, names, if_not_started):
        for job in self.project.jobs:
            not_started = job.to_compute and job.slot < 0
            if not job.over and (job.name in names or job.name in if_not_started and not_started):
                self._end(job, C.ABORTED, EXIT_ABORTED_BY_PROJECT, "not needed any more")

    def _give_back(self):
        """--max-jobs is reached: let others have the rest now, not after the deadline."""
        for job in self.project.jobs:
            if job.to_compute:
                self._end(job, C.ABORTED, EXIT_ABORTED_BY_USER, "given back")

    # -- files

    def _start_transfers(self):
        for job in by_deadline(self.project.jobs):
            if not job.over and job.client_state == C.UPLOADING:
                self._transfer(("put", job.name),
                               functools.partial(self._upload, job, job.upload_begun),
                               functools.partial(self._uploaded, job))
                job.upload_begun = job.upload_begun or ("put", job.name) in self.busy
            elif job.to_compute and job.client_state != C.READY:
                job.client_state = C.DOWNLOADING
                missing = [f for f in job.downloads
                           if (f["name"], f["sha256"]) not in self.checked]
                for f in missing:
                    self._transfer(("get", f["name"]), functools.partial(self._download, f),
                                   functools.partial(self._downloaded, f))
                if not missing:
                    job.client_state = C.READY

    def _transfer(self, key, work, done):
        running = sum(k[0] in ("get", "put") for k in self.busy)
        retry = self.retries.get(key)
        if key in self.busy or running >= TRANSFERS_MAX or (retry and retry.at > self.now):
            return
        self._begin(key, work, done)

    def _failed_transfer(self, key, error, bad):
        """Note a failed transfer; return True if it is to be tried again."""
        retry = self.retries.setdefault(key, Retry())
        retry.n, retry.n_bad = retry.n + 1, retry.n_bad + bad
        retry.offline = getattr(error, "status", None) == 0
        if retry.n_bad > BAD_FILES_MAX:
            del self.retries[key]
            return False
        retry.at = self.now + transfer_delay(retry.n, self.rng)
        self.voice.warn("%s: %s failed (%s); trying again in %s" % (
            key[1], "download" if key[0] == "get" else "upload", error,
            duration(retry.at - self.now)))
        return True

    def _download(self, f):
        free = shutil.disk_usage(self.directory).free
        if f["nbytes"] > free:
            raise BadFile("%d bytes, but only %d are free on this disk" % (f["nbytes"], free))
        folder = self.directory
        self.transport.download(f, folder / "partial" / f["name"], folder / "files" / f["name"])

    def _downloaded(self, f, _, error):
        key = ("get", f["name"])
        if not error:
            self.retries.pop(key, None)
            self.checked.add((f["name"], f["sha256"]))
            return
        bad = isinstance(error, BadFile) or getattr(error, "lasting", False)
        if self._failed_transfer(key, error, bad):
            return
        for job in self.project.jobs:
            if job.to_compute and any((g["name"], g["sha256"]) == (f["name"], f["sha256"])
                                      for g in job.downloads):
                self._end(job, C.DOWNLOADING, EXIT_DOWNLOAD,
                          "download of %s failed: %s" % (f["name"], error))

    def _upload(self, job, resume):
        self.transport.upload(job.output["url"], self.directory / "outputs" / job.name,
                              self.project.authenticator, resume)

    def _uploaded(self, job, _, error):
        key = ("put", job.name)
        if job.over or job not in self.project.jobs:
            return  # Aborted meanwhile.
        self.dirty = True
        if not error:
            self.retries.pop(key, None)
            job.client_state, job.over = C.UPLOADED, True
            self._drop_files(job)
            self.voice.tell("%s: finished in %s, uploaded" % (job.name, duration(job.elapsed_time)))
        elif getattr(error, "lasting", False) or isinstance(error, FileNotFoundError):
            self._end(job, C.UPLOAD_FAILED, EXIT_UPLOAD, "upload failed: %s" % error)
        else:
            self._failed_transfer(key, error, False)

    def _drop_files(self, job):
        with contextlib.suppress(OSError):
            (self.directory / "outputs" / job.name).unlink()
        if job.slot >= 0 and job.name not in self.tasks:
            shutil.rmtree(self.directory / "slots" / str(job.slot), ignore_errors=True)
            job.slot = -1

    def _drop_inputs(self, done):
        """Delete the inputs of forgotten jobs; application files stay for the next ones."""
        kept = {f["name"] for job in self.project.jobs for f in job.downloads}
        kept |= {f["name"] for job in done for f in job.files}
        for f in [job.input for job in done if job.input and job.input["name"] not in kept]:
            self.checked.discard((f["name"], f["sha256"]))
            with contextlib.suppress(OSError):
                (self.directory / "files" / f["name"]).unlink()

    def _clean_up(self):
        """At the start: remove what belongs to no job (a crash can leave some), and application
        files that have not been needed for long."""
        jobs = self.project.jobs
        files = {f["name"] for job in jobs for f in job.downloads}
        for folder, kept in (("slots", {str(job.slot) for job in jobs}), ("partial", files),
                             ("outputs", {job.name for job in jobs}), ("files", files)):
            for path in (self.directory / folder).iterdir():
                age = self.state.saved_at - path.lstat().st_mtime
                if path.is_dir() and path.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name not in kept and (folder != "files" or age > CACHE_SECONDS):
                    path.unlink()

    # -- computing

    def _start_tasks(self):
        for job in by_deadline(self.project.jobs):
            if len(self.tasks) >= self.wanted_left():
                return
            if job.client_state == C.READY and not job.over and job.name not in self.tasks:
                used = sum(task.job.ncpus for task in self.tasks.values())
                if used and used + job.ncpus > self.options.n_cpus + 1e-6:
                    return  # It waits for its turn; later ones do not overtake it.
                self._start_task(job)

    def _start_task(self, job):
        if job.slot < 0:
            used = {other.slot for other in self.project.jobs}
            used |= {int(task.slot.name) for task in self.tasks.values()}
            job.slot = next(n for n in range(len(used) + 1) if n not in used)
        slot = self.directory / "slots" / str(job.slot)
        seconds = time_bound(job, self.state.p_fpops)
        try:
            if not prepare_slot(slot, job, self.directory / "files", seconds):
                job.elapsed_time = job.fraction_done = 0.0
            deliver(slot, job)
            task = Task(job, slot, self.directory / "harness.py", seconds, self.now)
        except BadFile as e:
            # Damaged or deleted since it was checked: fetch it again.
            self.checked -= {(f["name"], f["sha256"]) for f in job.downloads}
            job.client_state = C.NEW
            self._failed_transfer(("get", str(e)), "damaged on this computer's disk", True)
            return
        except OSError as e:
            self._end(job, C.COMPUTE_ERROR, EXIT_CHILD_FAILED, "could not be started: %s" % e)
            return
        self.tasks[job.name] = task
        self.dirty = True
        self._begin(("run", job.name), task.wait, functools.partial(self._exited, task))

    def _exited(self, task, code, error):
        job = task.job
        del self.tasks[job.name]
        task.tick(self.now)
        task.take_trickles(self.now)
        self.dirty = True
        if job.over or job not in self.project.jobs:
            self._drop_files(job)  # Aborted; only now can the slot go.
            return
        if self.leaving and not (code == 0 or task.verdict):
            return  # Not its fault: it goes on at the next start.
        exit_status, text = task.outcome(code) if not error else (EXIT_CHILD_FAILED, str(error))
        if exit_status:
            tail = task.stderr(STDERR_CHARS)
            lines = tail.strip().splitlines()
            self._end(job, C.COMPUTE_ERROR, exit_status, text or (lines[-1] if lines else ""), tail)
            return
        nbytes = (task.slot / "output").stat().st_size
        if nbytes > job.output["nbytes_max"]:
            self._end(job, C.UPLOAD_FAILED, EXIT_UPLOAD, "its output of %d bytes is too large: "
                      "the limit is %d" % (nbytes, job.output["nbytes_max"]))
            return
        job.stderr_out = storable(task.stderr(2048))
        os.replace(task.slot / "output", self.directory / "outputs" / job.name)
        job.client_state, job.ended_at, job.fraction_done = C.UPLOADING, self.now, 1.0
        shutil.rmtree(task.slot, ignore_errors=True)
        job.slot = -1
        learn(job, self.project, self.state.p_fpops)
        take_outcome(self.project, True, self.now, self.rng)

    def _end(self, job, client_state, exit_status, text, stderr=""):
        """A job is over without success: nothing left but to report it."""
        job.client_state, job.exit_status, job.over = client_state, exit_status, True
        job.ended_at = self.now
        job.stderr_out = storable(stderr if text in stderr else (stderr + "\n" + text).strip())
        self.dirty = True
        self.retries.pop(("put", job.name), None)
        if job.name in self.tasks:
            self.tasks[job.name].kill(exit_status, text)
        self._drop_files(job)
        if client_state == C.ABORTED:
            self.voice.tell("%s: %s" % (job.name, text))
        else:
            take_outcome(self.project, False, self.now, self.rng)
            self.voice.warn("%s: failed after %s: %s"
                            % (job.name, duration(job.elapsed_time), plain(text)))


def duration(seconds):
    """Seconds in words, for people."""
    if seconds < 100:
        return "%.1f s" % seconds
    return "%.0f min" % (seconds / 60) if seconds < 7200 else "%.1f h" % (seconds / 3600)


# ---- 8. Command line ---------------------------------------------------------


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
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError("%r is no address like http://192.168.1.5:8080" % text)
    return url


def choose_directory(url, wanted):
    """Find a directory that no running client uses and lock it: (directory, lock). SystemExit with
    a plain sentence if there is none."""
    if wanted:
        candidates = [Path(wanted)]
    else:
        parts = urllib.parse.urlsplit(url)
        name = re.sub(r"[^A-Za-z0-9.-]", "_", parts.netloc.rpartition("@")[2])
        base = Path.home() / ".minigrid"
        candidates = [base / (name + ("-%d" % n if n > 1 else "")) for n in range(1, 100)]
    for directory in candidates:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = lock(directory)
        except OSError as e:
            raise SystemExit("cannot use %s: %s" % (directory, e.strerror))
        if held:
            return directory, held
    raise SystemExit("another client is running in %s; give this one its own with --dir"
                     % candidates[0])


def parse_arguments(argv):
    """Read the command line."""
    p = argparse.ArgumentParser(
        prog="volunteer.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Give this computer's spare time to a minigrid server.",
        epilog="""\
examples:
  volunteer.py 192.168.1.5:8080                 join under a made-up name and compute until Ctrl-C
  volunteer.py 192.168.1.5:8080 --name "blue fox" --cpus 2
  volunteer.py URL --once                       fetch work once, finish it, report it, exit

Jobs run at low priority, each in a process and an empty directory of its own, with bounds on time,
memory and disk. They are programs of the project: join projects you trust. Ctrl-C stops cleanly,
and the next start goes on from there. Several clients on one computer are fine: each gets a
directory of its own.""")
    p.add_argument("url", metavar="URL", type=full_url, help="the server: host:port")
    p.add_argument("--name", default="", help="nickname shown by the server (default: made up)")
    p.add_argument("--email", default="", help="join as an account instead; needs --password")
    p.add_argument("--password", default="", help="of that account; is not kept")
    p.add_argument("--invitation", default="", metavar="CODE",
                   help="code that the project has given you, if it wants one")
    p.add_argument("--no-native", action="store_true",
                   help="run no programs for this kind of computer, only Python")
    p.add_argument("--dir", default="", help="where to keep files (default: ~/.minigrid/HOST_PORT)")
    p.add_argument("--moved", action="store_true",
                   help="the project of --dir has moved to URL: go on with it there")
    p.add_argument("--cpus", type=int, default=processors(), metavar="N",
                   help="jobs to run at a time (default: all processors, here %(default)s)")
    p.add_argument("--once", action="store_true", help="fetch work once, exit when it is reported")
    p.add_argument("--max-jobs", type=int, default=0, metavar="N",
                   help="exit when N finished jobs have been reported")
    p.add_argument("--quiet", action="store_true", help="print only what went wrong")
    p.add_argument("--report-at-once", action="store_true",
                   help="report each job when it is finished instead of bundling for a second")
    p.add_argument("--stop-with-stdin", action="store_true",
                   help="for programs that start this one: stop when standard input ends "
                        "(it is not read otherwise)")
    args = p.parse_args(argv)
    if bool(args.email) != bool(args.password):
        p.error("--email and --password go together")
    if args.cpus < 1 or args.max_jobs < 0:
        p.error("--cpus and --max-jobs are positive numbers")
    return args


def obey_signals(client):
    """First signal: stop cleanly. Second: at once; the jobs' pipes break, so they end as well."""
    def on_signal(number, frame):
        if client.stopped:
            os._exit(1)
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
    directory, held = choose_directory(args.url, args.dir)
    voice = Voice(args.quiet)
    options = Options(args.name, args.email, args.password, args.cpus, args.once, args.max_jobs,
                      args.report_at_once, args.invitation,
                      ("python",) + (() if args.no_native else native_platforms()))
    host = functools.partial(describe_host, directory, args.cpus)
    client = Client(directory, args.url, options, Transport(), random.SystemRandom(), voice, host)
    project = client.project
    if project.url != args.url:
        if not args.moved:  # Never show one server's authenticator to another.
            raise SystemExit("%s belongs to %s; choose another --dir, or add --moved if that "
                             "project has moved to %s" % (directory, project.url, args.url))
        move(project, args.url)
    client.state.p_fpops = client.state.p_fpops or measure_fpops()
    if project.authenticator:
        voice.tell("%s at %s, %d jobs kept from last time"
                   % (project.nickname, project.url, len(project.jobs)))
    obey_signals(client)
    if args.stop_with_stdin:
        threading.Thread(target=stop_with_stdin, args=(client,), daemon=True).start()
    client.step(time.time())
    while not client.finished():
        client.wait(client.pause(time.time()))
        client.step(time.time())
    client.leave(time.time)
    if client.fatal:
        voice.warn(client.fatal)
    voice.tell("stopped; %d jobs finished in all" % project.n_reported)
    held.close()
    sys.stdout.flush()
    os._exit(1 if client.fatal else 0)  # Not waiting for transfers that hang.


if __name__ == "__main__":
    main()
