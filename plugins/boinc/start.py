#!/usr/bin/env python3
"""Runs one job of a minigrid project in a slot of a BOINC client; shipped, and never imported.

    start.py [PATH] python FILE         FILE has compute(): the harness of volunteer.py runs it,
                                        or its invert(), if --invert comes behind
    start.py [PATH] native FILE ARGS    FILE is a program that knows nothing of BOINC

PATH is the file the client has started (start.sh, start.cmd), which lies beside the files of the
project. The job is a process group of its own; this program stands between it and the client:

1. What the client says    init_data.xml, the message file            [WIRE 11.4 11.6]
2. The slot                what outlives a stop: start.json, checkpoints
3. The job                 its process, CPU time, suspension, end
4. Trickles                files of the job <-> files of the client    [WIRE 13]
5. One start               the loop, and what an ended job means       [WIRE 11.5 12]

A native program reads standard input (also the file `in`) and writes standard output, or a file
`out`. It may write a number from 0 to 1 to a file `fraction_done`. If it is stopped, it is started
again later: in a slot as it was first, unless it has made a file `checkpoint`; then all its files
are left as they are, but standard output begins anew (so such a program writes `out` itself).

No file is run but those of the application, which the project has signed: the command line and
the input come unsigned. Standard library only, Python 3.9 and later.
"""

import contextlib
import filecmp
import html
import json
import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

HARNESS = ""  # filled in by the server with the harness of volunteer.py

POLL_SECONDS = 0.25  # between two looks at the client's messages
LOOK_SECONDS = 1.0  # between two measures of the job; the client looks as often
SAVE_SECONDS = 10.0  # of CPU time that a crash may lose
HEARTBEAT_SECONDS = 30.0  # without one, where the client's process cannot be watched
GRACE_SECONDS = 5.0  # from asking the job to end to killing it; the client waits 60
FINAL_SECONDS = 1.5  # how long the last words wait for the client to take those before
TRICKLE_SECONDS = 30.0  # the same for trickles, of which it takes one a second
TRICKLE_BYTES_MAX, TRICKLE_SENT_MAX = 32768, 65536  # of a message, and of how it is written
KILLS_MAX = 3  # a job that seems to be killed from outside is started again so many times
NO_BOUND = 1e15

CONTROL, HEARTBEAT, STATUS, TRICKLE_UP, TRICKLE_DOWN = 0, 4, 5, 6, 7
CHANNELS, CHANNEL_BYTES = 8, 1024

FAILED, NOT_SIGNED, NOT_STARTED, ABORTED = 1, 125, 126, 194
CHILD_FAILED, DISK, MEMORY = 195, 196, 198  # BOINC's numbers, which the harness uses, too
CONTROL_C = 0xC000013A  # Windows: ended from outside, so the client starts the job again
FROM_OUTSIDE = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP")
                if hasattr(signal, name)]
KEPT_ENVIRONMENT = ("SYSTEMROOT", "WINDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
CLIENTS_OWN = re.compile(r"boinc_|trickle_|init_data|stderr\.txt$|start\.json$")
PLAIN_NAME = re.compile(r"\w[\w.+-]*")


class Failed(Exception):
    """The job cannot succeed: ends it with an exit status that the server gets to see."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Quit(Exception):
    """The job is to end now and to go on another time."""


def say(text):
    """Tell the user and the project: the client sends standard error with the result."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("start.py: %s\n" % text)
        sys.stderr.flush()


def write(name, data):
    """Write a file so that nobody finds half of it."""
    with open(name + ".new", "wb") as f:
        f.write(data)
    os.replace(name + ".new", name)


# ---- 1. What the client says ---------------------------------------------------


class Init:
    """What init_data.xml says. Nothing in it is needed; what is not there has a default."""

    def __init__(self, path="init_data.xml"):
        self.text = ""
        with contextlib.suppress(OSError):
            with open(path, "rb") as f:
                self.text = f.read(1 << 20).decode("utf-8", "replace")

    def word(self, name):
        """Return an element's text; the last one, for preferences of the project come first."""
        found = re.findall("<%s>([^<]*)</%s>" % (name, name), self.text)
        return html.unescape(found[-1].strip()) if found else ""

    def number(self, name, default=0.0):
        """Return an element's number if it is a positive one."""
        with contextlib.suppress(ValueError):
            value = float(self.word(name))
            return value if 0 < value < NO_BOUND else default
        return default

    def application_files(self):
        """Return the names of the application's files: only those at the end are by the client,
        what stands before may be text from the server."""
        runs = re.findall(r"(?:<app_file>[^<\n]*</app_file>\s*)+", self.text)
        return re.findall("<app_file>([^<]*)<", runs[-1]) if runs else []


def check_signed(name, folder, names):
    """Raise Failed unless the slot's file is a copy of one of the application's files, whose
    signatures the client has checked. Without this, who has taken the server could have anything
    run by it, and no signing key would be needed."""
    if not PLAIN_NAME.fullmatch(name) or not os.path.isfile(name):
        raise Failed(NOT_SIGNED, "there is no file %.100r to run" % name)
    for other in names:
        with contextlib.suppress(OSError):
            if filecmp.cmp(name, os.path.join(folder, other), shallow=False):
                return
    if names:  # A client that lists no files cannot be asked.
        raise Failed(NOT_SIGNED, "%s is none of the signed files of its application" % name)


class Channels:
    """The memory shared with the client. A channel's first byte is 1 while a message waits."""

    def __init__(self, tag=""):
        self.memory = None
        size = CHANNELS * CHANNEL_BYTES
        with contextlib.suppress(OSError, ValueError):  # Without it, the job runs all the same.
            if os.name != "nt":
                with open("boinc_mmap_file", "r+b") as f:
                    self.memory = mmap.mmap(f.fileno(), size)
                return
        for name in ("Global\\" + tag, tag) if tag else ():
            with contextlib.suppress(OSError, ValueError):
                self.memory = mmap.mmap(-1, size, tagname=name)
                return

    def free(self, channel):
        return self.memory is not None and self.memory[channel * CHANNEL_BYTES] == 0

    def take(self, channel):
        """Return the message that waits, or nothing."""
        start = channel * CHANNEL_BYTES
        if self.memory is None or self.memory[start] == 0:
            return ""
        text = self.memory[start + 1:start + CHANNEL_BYTES].split(b"\0")[0]
        self.memory[start] = 0
        return text.decode("ascii", "replace")

    def put(self, channel, text):
        """Send a message, unless one still waits; tell whether it was sent."""
        if not self.free(channel):
            return False
        start, data = channel * CHANNEL_BYTES, text.encode()[:CHANNEL_BYTES - 2] + b"\0"
        self.memory[start + 1:start + 1 + len(data)] = data
        self.memory[start] = 1
        return True


class Client:
    """The client's process: nobody computes for one that is gone."""

    def __init__(self, channels, pid):
        self.channels, self.pid, self.silence = channels, pid, 0.0
        self.parent = os.getppid() if os.name != "nt" else 0
        self.watched = bool(pid) and exists(pid)  # Not if it has another number in here.

    def gone(self):
        """Tell whether it is gone. Called every LOOK_SECONDS, which are what is counted: while the
        computer sleeps the client is silent, too."""
        if self.parent and os.getppid() != self.parent or self.watched and not exists(self.pid):
            return True
        beat = self.channels.take(HEARTBEAT)
        self.silence = 0.0 if beat or self.watched else self.silence + LOOK_SECONDS
        return self.channels.memory is not None and self.silence > HEARTBEAT_SECONDS


def exists(pid):
    """Tell whether there is a process of this number."""
    if os.name != "nt":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass  # Somebody else's.
        return True
    import ctypes  # os.kill() would end it there.

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.OpenProcess(0x00100000, False, pid)  # SYNCHRONIZE
    if handle:
        running = kernel.WaitForSingleObject(ctypes.c_void_p(handle), 0) != 0
        kernel.CloseHandle(ctypes.c_void_p(handle))
        return running
    return ctypes.get_last_error() == 5  # ERROR_ACCESS_DENIED: somebody else's


# ---- 2. The slot ---------------------------------------------------------------


class Slot:
    """What is kept in start.json over the stops of a job: CPU seconds, and the first files."""

    def __init__(self, job, cpu_time):
        self.kept = {"job": job, "cpu_time": cpu_time, "checkpoint_cpu_time": 0.0,
                     "fraction_done": 0.0, "killed": 0, "files": sorted(os.listdir("."))}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with open("start.json", "rb") as f:
                old = json.load(f)
            old = {k: type(v)(old[k]) for k, v in self.kept.items()}
            if old["job"] == job:
                self.kept = old
        self.save()

    def save(self):
        write("start.json", json.dumps(self.kept).encode())

    def tidy(self, checkpoint, all_files):
        """Remove what a broken run has left, for a job must find its slot as at its first start
        (a volunteer.py gives it an empty one). Its checkpoint stays, and with it, where the
        program makes its own, all of its files. Return whether there is a checkpoint."""
        goes_on = os.path.isfile(checkpoint)
        if goes_on and all_files:
            return True
        for name in set(os.listdir(".")) - set(self.kept["files"]) - {checkpoint}:
            if CLIENTS_OWN.match(name) and name != "boinc_finish_called":
                continue
            if os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name)
            else:
                os.unlink(name)
        return goes_on


# ---- 3. The job ----------------------------------------------------------------


def clean_environment(native):
    """Return the environment that volunteer.py gives to jobs, so that copies agree."""
    folder = os.getcwd()
    kept = KEPT_ENVIRONMENT + (("PATH",) if native or os.name == "nt" else ())
    environment = {k: os.environ[k] for k in kept if k in os.environ}
    environment.update(PYTHONHASHSEED="0", PYTHONUTF8="1", HOME=folder, TMPDIR=folder,
                       TEMP=folder, TMP=folder)
    return environment


def measure(pid):
    """Return the CPU seconds of a process and its descendants, and the resident bytes of the
    largest of them; (None, 0) where the system does not tell (no /proc)."""
    seconds, largest, todo = None, 0, [pid]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open("/proc/%d/stat" % pid) as f:
                stat = f.read().rpartition(")")[2].split()
            ticks = sum(int(x) for x in stat[11:15])  # own, and of children it has waited for
            seconds = (seconds or 0.0) + ticks / os.sysconf("SC_CLK_TCK")
            largest = max(largest, int(stat[21]) * os.sysconf("SC_PAGE_SIZE"))
            with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
                todo += [int(child) for child in f.read().split()]
    return seconds, largest


def guard():
    """Fork a process that kills the job's group if this one is killed; return a file to which the
    job writes its number, and this process a dot when all is over. The job may be stopped at that
    time, and could not end by itself."""
    inner, outer = os.pipe()
    if os.fork():
        os.close(inner)
        return outer
    try:
        for number in FROM_OUTSIDE:
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, inner)
        os.closerange(inner + 1, 256)
        with open(inner, "rb") as f:
            said = f.read()  # All of it comes before the end, from the job too: it has exec'd.
        if said and not said.endswith(b"."):
            os.killpg(int(said), signal.SIGKILL)
    finally:
        os._exit(0)


class Job:
    """The running job: a process group."""

    def __init__(self, command, native, **pipes):
        self.guard = None
        if os.name == "nt":
            own = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP
                   | subprocess.CREATE_NO_WINDOW}
        else:  # The guard first, and told by the job itself: we may be killed at any moment.
            self.guard = guard()
            own = {"start_new_session": True, "preexec_fn": self.tell_guard}
        try:
            self.process = subprocess.Popen(command, env=clean_environment(native), **pipes, **own)
        except OSError as e:
            self.dismiss_guard()
            raise Failed(NOT_STARTED, "%s could not be started: %s" % (command[0], e)) from None
        self.pid, self.code, self.suspended = self.process.pid, None, False
        self.seconds, self.looked, self.cpu_time, self.memory = 0.0, time.monotonic(), 0.0, 0

    def tell_guard(self):
        """In the job's process before it becomes the job: say who it is."""
        os.write(self.guard, b"%d" % os.getpid())

    def dismiss_guard(self):
        if self.guard is not None:
            os.write(self.guard, b".")
            os.close(self.guard)

    def look(self):
        """Measure CPU time and memory. Where CPU time cannot be had before the end, the seconds
        that the job was not suspended stand for it; a long gap was sleep, or this was stopped."""
        now = time.monotonic()
        if not self.suspended:
            self.seconds += min(now - self.looked, 10 * LOOK_SECONDS)
        self.looked = now
        seconds, self.memory = measure(self.pid)
        self.cpu_time = self.seconds if seconds is None else max(seconds, self.cpu_time)

    def ended(self):
        """Tell whether the job's process has ended; if so, end what it has started, too."""
        if self.code is None and hasattr(os, "waitid"):
            # While it is a zombie its number cannot be given to others.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.signal("SIGKILL")
        if self.code is None and self.process.poll() is not None:
            self.code = self.process.returncode
            self.dismiss_guard()
            with contextlib.suppress(ImportError):
                import resource

                used = resource.getrusage(resource.RUSAGE_CHILDREN)
                total = used.ru_utime + used.ru_stime
                self.cpu_time = total if measure(os.getpid())[0] is None else max(
                    total, self.cpu_time)
        return self.code is not None

    def signal(self, name):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, getattr(signal, name))

    def suspend(self, wanted):
        """Halt or continue all processes of the job."""
        if wanted == self.suspended:
            return
        self.look()
        self.suspended = wanted
        if os.name != "nt":
            self.signal("SIGSTOP" if wanted else "SIGCONT")
            return
        import ctypes  # Has no signals; this halts the first process, which is all of most jobs.

        call = ctypes.windll.ntdll.NtSuspendProcess if wanted else (
            ctypes.windll.ntdll.NtResumeProcess)
        call(ctypes.c_void_p(int(self.process._handle)))

    def end(self, wait, seconds=0.0):
        """End the job: ask it to, and kill it after so many seconds. `wait(seconds)` waits."""
        limit = time.monotonic() + seconds
        if seconds and os.name != "nt":
            self.signal("SIGTERM")
            self.signal("SIGCONT")
            while not self.ended() and time.monotonic() < limit:
                wait(0.05)
        if self.ended():
            return
        if os.name == "nt":
            subprocess.call(["taskkill", "/F", "/T", "/PID", str(self.pid)],
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)
            self.process.kill()
        else:
            self.signal("SIGKILL")
        while not self.ended():
            wait(0.05)


# ---- 4. Trickles ---------------------------------------------------------------


def numbered(prefix):
    """Return the numbers n for which there is a file PREFIXn, in order."""
    return sorted(int(name[len(prefix):]) for name in os.listdir(".")
                  if name.startswith(prefix) and re.fullmatch("[0-9]{1,18}", name[len(prefix):]))


class Trickles:
    """Messages of a running job to the project and back."""

    def __init__(self, channels):
        self.channels = channels
        self.up = (numbered("trickle_wait.") or [-1])[-1] + 1
        self.down = (numbered("trickle_down.") or [-1])[-1] + 1

    def relay(self):
        """Carry on what has come. A stop at any place loses nothing, but may send one twice."""
        for n in numbered("trickle_up."):  # Its numbers may begin anew at the next start.
            os.replace("trickle_up.%d" % n, "trickle_wait.%d" % self.up)
            self.up += 1
        if self.channels.free(TRICKLE_UP):
            if not os.path.exists("trickle_up.xml"):
                self._next()
            if os.path.exists("trickle_up.xml"):
                self.channels.put(TRICKLE_UP, "<have_new_trickle_up/>\n")
        self.channels.take(TRICKLE_DOWN)
        for n in numbered("trickle_down_"):
            self._hand_down("trickle_down_%d" % n)

    def _next(self):
        for n in numbered("trickle_wait.")[:1]:
            name = "trickle_wait.%d" % n
            with open(name, "rb") as f:
                data = f.read(TRICKLE_BYTES_MAX + 1)
            text = escape(data.decode("utf-8", "replace"))
            if len(data) > TRICKLE_BYTES_MAX or len(text) > TRICKLE_SENT_MAX:
                say("a trickle was left out: it is longer than %d bytes" % TRICKLE_BYTES_MAX)
            else:
                write("trickle_up.xml",
                      b"<variety>minigrid</variety>\n<text>\n%s\n</text>\n" % text)
            os.unlink(name)

    def _hand_down(self, name):
        with open(name, "rb") as f:
            found = re.search(b"<text>\n?(.*?)\n?</text>", f.read(1 << 20), re.S)
        if found:
            text = html.unescape(found[1].decode("utf-8", "replace"))
            write("trickle_down.%d" % self.down, text.encode())
            self.down += 1
        elif time.time() - os.stat(name).st_mtime < 10:
            return  # The client may be writing it just now.
        os.unlink(name)

    def pending(self):
        """Tell whether something waits to go up that would be lost with the slot."""
        self.relay()
        return self.channels.memory is not None and bool(numbered("trickle_wait."))


def escape(text):
    """Return text as ASCII that cannot be taken for structure; the client sends it as it is."""
    text = re.sub("[\0-\x08\x0b-\x1f\x7f]", "", text.replace("\r", "\n"))
    return html.escape(text, quote=False).encode("ascii", "xmlcharrefreplace")


# ---- 5. One start --------------------------------------------------------------


class Start:
    """One run of this program."""

    def __init__(self, arguments):
        path = "" if arguments[:1] in (["python"], ["native"]) else "".join(arguments[:1])
        arguments = arguments[1:] if path else arguments
        if len(arguments) < 2:
            raise Failed(NOT_SIGNED, "the command line names no job: python FILE, or native FILE")
        self.kind, self.file, *self.arguments = arguments
        self.init = init = Init()
        self.check(path)
        self.channels = Channels(init.word("comm_obj_name"))
        self.client = Client(self.channels, int(init.number("client_pid")))
        self.trickles = Trickles(self.channels)
        self.slot = Slot(init.word("result_name"), init.number("wu_cpu_time"))
        self.memory_max = init.number("rsc_memory_bound", NO_BOUND)
        self.job, self.stopped, self.seen = None, False, None
        self.fraction_done = self.slot.kept["fraction_done"]
        self.before = self.slot.kept["cpu_time"]  # of earlier starts
        self.next_look = self.next_save = time.monotonic()
        self.wake = None

    def check(self, path):
        """Raise Failed if this is not to be run."""
        folder = os.path.dirname(path) if path else self.init.word("project_dir")
        if os.name == "nt" and folder.startswith("/"):  # See start.cmd.
            folder = "../../projects" + folder
        if self.kind not in ("python", "native"):
            raise Failed(NOT_SIGNED, "%.100r is no kind of job" % self.kind)
        check_signed(self.file, folder, self.init.application_files())

    # -- running

    def run(self):
        """Run the job and return the exit status. Raises Failed and Quit."""
        self.listen()
        if os.path.isfile("boinc_finish_called") and os.path.isfile("out"):
            self.last_words()  # Only the client was too late to see that it is done.
            return 0
        self.prepare()
        grace = 0.0
        try:
            while not self.job.ended():
                self.turn()
                self.wait(POLL_SECONDS)
        except Quit:
            grace = GRACE_SECONDS
            raise
        finally:
            if self.job.code is None:
                self.job.end(self.wait, grace)
            self.save()
        try:
            self.conclude()
        finally:
            self.last_words()
        with open("boinc_finish_called", "wb") as f:
            f.write(b"0\n")
            f.flush()
            os.fsync(f.fileno())
        return 0

    def listen(self):
        """Have signals noted: all that end a process mean to quit. The end of the job wakes us."""
        for number in FROM_OUTSIDE:
            signal.signal(number, self.stop)
        if os.name != "nt":
            self.wake, outer = os.pipe()
            os.set_blocking(outer, False)
            signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda number, frame: None)
            with contextlib.suppress(ImportError, ValueError, OSError):
                import resource  # A core file could fill the slot.

                resource.setrlimit(resource.RLIMIT_CORE,
                                   (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def stop(self, number, frame):
        self.stopped = True

    def wait(self, seconds):
        """Wait, but no longer than until a signal comes or the job ends."""
        if os.name == "nt":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.process.wait(seconds)
        elif select.select([self.wake], [], [], seconds)[0]:
            os.read(self.wake, 4096)

    def prepare(self):
        """Make the slot ready and start the job."""
        native = self.kind == "native"
        checkpoint = "checkpoint" if native else "checkpoint.json"
        if not self.slot.tidy(checkpoint, all_files=native):
            self.fraction_done = self.slot.kept["checkpoint_cpu_time"] = 0.0
        self.checkpoint, self.seen = checkpoint, self.stamp(checkpoint)
        self.slot.save()
        if native:
            self.start_native()
        else:
            self.start_python()

    def start_native(self):
        """Start a program of its own."""
        program = os.path.join(os.getcwd(), self.file)
        os.chmod(program, 0o700)
        with open("in" if os.path.exists("in") else os.devnull, "rb") as stdin, \
                open("stdout.txt", "wb") as stdout:
            self.job = Job([program, *self.arguments], True, stdin=stdin, stdout=stdout)

    def start_python(self):
        """Start the harness as volunteer.py does. It lies in a directory of its own: files of the
        application and of the input must not stand in for modules of Python."""
        if not HARNESS:
            raise Failed(NOT_STARTED, "this file lacks its harness: it is not as servers ship it")
        os.makedirs("harness", exist_ok=True)
        write("harness/harness.py", HARNESS.encode())
        order = {"workunit": self.init.word("wu_name"), "main": self.file, "input": "in",
                 "memory": self.memory_max, "disk": self.init.number("rsc_disk_bound", NO_BOUND),
                 "cpu_seconds": 1e9}  # The client keeps the bound on time.
        if self.arguments == ["--invert"]:
            order["function"] = "invert"
        write("job.json", json.dumps(order).encode())
        folder = os.getcwd()
        harness = os.path.join(folder, "harness", "harness.py")
        # Its standard input is a pipe that ends with this process: then it ends as well.
        self.job = Job([sys.executable, "-s", "-B", harness, folder], False,
                       stdin=subprocess.PIPE, stdout=2)

    def turn(self):
        """Do what is due. Raises Quit, and Failed if the job is to end for good."""
        self.obey()
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_SECONDS
        if self.client.gone():
            raise Quit("the client is gone")
        self.job.look()
        if self.job.memory > self.memory_max:
            raise Failed(MEMORY, "stopped: over its memory limit of %.0f MB"
                         % (self.memory_max / 1e6))
        self.read_progress()
        self.trickles.relay()
        self.tell()
        if time.monotonic() > self.next_save:
            self.save()

    def obey(self):
        """Take the client's orders [WIRE 11.4]."""
        order = self.channels.take(CONTROL)
        if "<abort/>" in order:
            raise Failed(ABORTED, "aborted")
        if "<quit/>" in order or self.stopped:
            raise Quit("stopped by the %s" % ("system" if self.stopped else "client"))
        if "<suspend/>" in order or "<resume/>" in order:
            self.job.suspend("<suspend/>" in order)

    # -- telling

    @property
    def cpu_time(self):
        return self.before + (self.job.cpu_time if self.job else 0.0)

    @staticmethod
    def stamp(name):
        """Return what changes when a file is written anew."""
        with contextlib.suppress(OSError):
            status = os.stat(name)
            return status.st_mtime_ns, status.st_ino, status.st_size
        return None

    def read_progress(self):
        """See how far the job says it is, and whether it has made a checkpoint."""
        name = "fraction_done" if self.kind == "native" else "progress.txt"
        with contextlib.suppress(OSError, ValueError, IndexError):  # Half written just now.
            with open(name, "rb") as f:
                fraction = float(f.read(100).split()[0])
            self.fraction_done = min(1.0, max(0.0, fraction)) if fraction == fraction else 0.0
        stamp = self.stamp(self.checkpoint)
        if stamp != self.seen:
            self.seen = stamp
            self.slot.kept["checkpoint_cpu_time"] = self.cpu_time
            self.save()

    def tell(self):
        """Tell the client CPU time and progress; tell whether it could be told."""
        return self.channels.put(
            STATUS, "<current_cpu_time>%.6e</current_cpu_time>\n"
            "<checkpoint_cpu_time>%.6e</checkpoint_cpu_time>\n<fraction_done>%.6e</fraction_done>\n"
            % (self.cpu_time, self.slot.kept["checkpoint_cpu_time"], self.fraction_done))

    def save(self):
        """Keep the CPU time over a stop."""
        self.next_save = time.monotonic() + SAVE_SECONDS
        self.slot.kept.update(cpu_time=self.cpu_time, fraction_done=self.fraction_done)
        self.slot.save()

    def last_words(self):
        """Tell the client the final CPU time, and have it take the trickles. It looks at the
        message file once more when this process has ended, but takes one message then. If it
        wants to quit now, the next start says the rest."""
        with contextlib.suppress(Quit):
            self.insist(lambda: not self.trickles.pending(), TRICKLE_SECONDS)
            self.insist(self.tell, FINAL_SECONDS)

    def insist(self, done, seconds):
        """Try something until it is done, for so many seconds. Raises Quit and Failed."""
        limit = time.monotonic() + seconds
        while not done() and self.channels.memory is not None and time.monotonic() < limit:
            self.obey()
            self.wait(0.05)

    # -- ending

    def conclude(self):
        """Turn an ended process into `out`. Raises Failed or, if it seems to have been killed
        with the system going down, Quit; in a slot of a healthy client it goes on at once."""
        code, kept = self.job.code, self.slot.kept
        if -code in FROM_OUTSIDE and (self.stopped or kept["killed"] < KILLS_MAX):
            kept["killed"] += not self.stopped
            self.save()
            raise Quit("the job was ended by %s" % signal_name(-code))
        if self.kind == "native":
            self.conclude_native(code)
        elif code == 0:
            if os.path.islink("output") or not os.path.isfile("output"):
                raise Failed(CHILD_FAILED, "the job left no output")
            os.replace("output", "out")
        else:
            known = {DISK: "stopped: over its disk limit", MEMORY: "stopped: over its memory limit",
                     CHILD_FAILED: "the job failed"}
            how = "by " + signal_name(-code) if code < 0 else "with exit code %d" % code
            raise Failed(code if code in known else CHILD_FAILED,
                         known.get(code, "the job's process ended " + how))
        self.fraction_done = 1.0

    def conclude_native(self, code):
        """The same for a program of its own, whose exit status is handed on."""
        if code < 0:
            raise Failed(128 - code, "%s was ended by %s" % (self.file, signal_name(-code)))
        if code:
            raise Failed(code if code < 256 else CHILD_FAILED,
                         "%s ended with exit status %d" % (self.file, code))
        if not os.path.lexists("out"):
            os.replace("stdout.txt", "out")
        if os.path.islink("out") or not os.path.isfile("out"):
            raise Failed(CHILD_FAILED, "%s made an `out` that is no file" % self.file)


def signal_name(number):
    """Return a signal's name and number."""
    with contextlib.suppress(ValueError):
        return "signal %d (%s)" % (number, signal.Signals(number).name)
    return "signal %d" % number


def leave():
    """End so that the client starts the job again later: killed, or it would count exits."""
    if os.name != "nt":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(CONTROL_C)


def main(arguments):
    """Run a job; end with exit status 0 and `boinc_finish_called`, or with an error status, or
    by SIGTERM if it is to go on another time."""
    try:
        status = Start(arguments).run()
    except Quit as e:
        say(e)
        leave()
    except Failed as e:
        say(e)
        status = e.status
    except BaseException as e:  # An error in here must not become a hang, nor an exit status 0.
        say("failed by itself: %s: %s" % (type(e).__name__, e))
        status = FAILED
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
