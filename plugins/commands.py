"""The commands a person types: serve, demo, run, try, join, status, cancel, check, backup.

Each is a thin shell over the core. Whoever waits sees progress; whoever presses Ctrl-C gets a clean
stop; what goes wrong is one plain sentence.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import minigrid
from minigrid import (App, ClientError, Firing, Meta, PluginError, Report, Request, Result,
                      Settings, StoreError, Workunit, apps, open_project, plugged, project,
                      running, wall_clock)

HERE = Path(__file__).resolve().parent
DISAGREE = """
The copies disagree. Does {what} use the time, the process, or randomness of its own?{seeded} Or let
compare() forgive small differences."""
TROUBLES_SHOWN = 3  # at a time; the first page has them all
SEEDED = " The module\nrandom is seeded alike for all copies."


def commands(parsers):
    """Add the commands to the command line."""
    add(parsers, "demo", demo, "see it work: a server and three volunteers on this machine "
        "compute a picture, every tile twice", epilog="Stopped half-way, the next demo goes on.")
    serve_parser = add(parsers, "serve", serve, "run a project for volunteers in your network",
                       epilog="All settings may stand in the [minigrid] section of setup.cfg; "
                       "those of accounts and of BOINC clients in [accounts] and [boinc].")
    for field in dataclasses.fields(Settings):
        if field.name not in ("data", "port", "host"):
            serve_parser.add_argument(
                "--" + field.name.replace("_", "-"), dest=field.name, metavar="X",
                help=f"{field.metadata['about']} (default {field.default})".replace("%", "%%"))
    run_parser = add(parsers, "run", run, "compute an application to its end on this machine",
                     epilog="Answers are lines of data/results/<application>.jsonl.")
    run_parser.add_argument("app", nargs="+", help="application file, such as mywork.py")
    run_parser.add_argument("--volunteers", type=int, metavar="N",
                            help="how many to start (default: one for each processor, at least 2)")
    try_parser = add(parsers, "try", try_app, "take one workunit of an application through its "
                     "whole life, step by step, in a scratch directory", server=False)
    try_parser.add_argument("app", help="application file, such as mywork.py")
    try_parser.add_argument("--number", type=int, default=0, metavar="I",
                            help="which workunit: the i of workunit(i) (default 0)")
    join_parser = parsers.add_parser(
        "join", add_help=False, help="give this computer's spare time to a project",
        description="All arguments go to the volunteer's client: try 'minigrid join --help'.")
    # All that follows is the client's business, its --help too.
    join_parser.parse_known_args = lambda arguments, _: (
        argparse.Namespace(run=join, arguments=arguments), [])
    add(parsers, "status", show_status, "say how a project is doing", server=False, data=True)
    cancel_parser = add(parsers, "cancel", cancel, "give up workunits; volunteers are told at "
                        "their next contact", server=False, data=True)
    cancel_parser.add_argument("names", nargs="+", metavar="NAME",
                               help="a workunit, or an application: all its unfinished workunits")
    add(parsers, "check", check, "check store and files for what must never be", server=False,
        data=True)
    backup_parser = add(parsers, "backup", save_copy, "copy the store as it is, even while the "
                        "server works", server=False, data=True)
    backup_parser.add_argument("file", nargs="?", help="where to (default: data/backup/DATE.db)")


def add(parsers, name, run, about, server=True, data=False, epilog=None):
    """Add one command with the options it shares with others."""
    parser = parsers.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".",
                                epilog=epilog)
    parser.set_defaults(run=run)
    if server or data:
        parser.add_argument("--data", metavar="DIR", help="directory of store and files "
                            "(default: data)")
    if server:
        parser.add_argument("--port", type=int, help="port to listen on (default 8080; 0: any)")
        parser.add_argument("--host", help="address to listen on")
        parser.add_argument("--verbose", action="store_true", help="one line for each rule fired")
    return parser


def settings_of(options, **more):
    """Read the settings with what the command line says about them."""
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {key: value for key, value in vars(options).items() if key in names}
    return minigrid.read_settings("setup.cfg", **{**more, **{
        key: value for key, value in given.items() if value is not None}})


def app_paths(text):
    """Return where applications are: as written, or else those that came with minigrid."""
    return [path if path.exists() or path.parts[:1] != ("plugins",)
            else HERE.joinpath(*path.parts[1:]) for path in map(Path, text.split())]


# ---- Showing progress --------------------------------------------------------


def say(text=""):
    """Print a line for the person who waits."""
    print(text, flush=True)


class Line:
    """One line of the terminal that is written again and again; plain lines where there is none."""

    def __init__(self):
        self.live, self.last = sys.stdout.isatty(), ""

    def show(self, text):
        """Replace the line, or print it if it has changed and nobody sees it change."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="", flush=True)
        elif text != self.last:
            say(text)
        self.last = text

    def end(self):
        """Leave the line as it stands."""
        if self.live and self.last:
            print(flush=True)
        self.last = ""


def bar(done, total, width=30):
    """Draw how much of a whole is done."""
    full = width * done // max(total, 1)
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total}"


@contextlib.contextmanager
def stop_signal():
    """Give an event that Ctrl-C and SIGTERM set, so that every loop ends cleanly."""
    event, before = threading.Event(), {}
    for name in (signal.SIGINT, signal.SIGTERM):
        before[name] = signal.signal(name, lambda *_: event.set())
    try:
        yield event
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


# ---- serve -------------------------------------------------------------------


def addresses(port):
    """Return the addresses of this machine in its networks."""
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    best = ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Sends nothing; shows which address would be used.
        best = probe.getsockname()[0]
    if not best:  # A class room without a router: Linux knows no way to that address.
        with contextlib.suppress(OSError):
            table = Path("/proc/net/fib_trie").read_text(encoding="ascii")
            found.update(re.findall(r"-- ([0-9.]+)\n +/32 host LOCAL", table))
    found = sorted(a for a in found | {best} if a and not a.startswith("127."))
    found.sort(key=lambda a: a == best)  # The best one last, where people look.
    return [f"http://{a}:{port}" for a in found]


def serve(options):
    """Run a project until it is stopped."""
    verbose(options)
    settings = settings_of(options)
    with stop_signal() as stop, running(settings, app_paths(settings.apps)) as url:
        say(f"minigrid serves {len(apps)} applications: {', '.join(apps) or 'none yet'}")
        told = list(project.errors)
        for _, fault in told:
            say(f"trouble: {fault}")
        urls = [url] + (addresses(url.rpartition(":")[2])
                        if settings.host in ("0.0.0.0", "::") else [])
        for named in plugged("all_addresses"):  # What the owner has named is best.
            urls = list(dict.fromkeys([*urls, *named("")[::-1]]))
        say("\nOpen in a browser:\n" + "\n".join(f"  {u}" for u in urls))
        if plugged("scheduler_path"):
            say(f"\nJoin with BOINC (Add project, in BOINC Manager):\n  {urls[-1]}/")
        (join_lines,) = plugged("join_lines")
        lines = join_lines(urls[-1])
        say(f"\nJoin from a machine that has only Python (Linux, macOS):\n  {lines['posix']}\n"
            f"on Windows:\n  {lines['windows']}\nother ways: see the page above")
        say("\nStop with Ctrl-C; the next start goes on.\n")
        line = Line()
        while not stop.wait(2):
            told = show_troubles(line, told)
            line.show(counts_line())
        line.end()
        say("stopping ...")
    return 0


def show_troubles(line, told):
    """Print what went wrong and was not told yet; return what has been told."""
    known = list(project.errors)
    news = [text for at, text in known if (at, text) not in told]
    if news:
        line.end()
    for text in news[:TROUBLES_SHOWN]:
        say(f"trouble: {text}")
    if len(news) > TROUBLES_SHOWN:
        say(f"trouble: {len(news) - TROUBLES_SHOWN} more, see the first page")
    return known


def counts_line():
    """Say in one line how the project is doing."""
    (status,) = plugged("status")
    now = status(wall_clock())
    total = now["total"]
    return (f"{total['unsent']} waiting, {total['in_progress']} with volunteers, "
            f"{total['done']} workunits done, {total['failed']} failed; "
            f"{now['hosts']['active']} computers active")


def verbose(options):
    """Log as much as the user asked for."""
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR,
                        format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    logging.getLogger("waitress").setLevel(logging.CRITICAL)  # Clients that hang up are no news.
    if not options.verbose:
        minigrid.log.setLevel(logging.CRITICAL)


@contextlib.contextmanager
def quietly():
    """Do not log what a command shows itself."""
    level = minigrid.log.level
    minigrid.log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        minigrid.log.setLevel(level)


# ---- demo and run ------------------------------------------------------------


@contextlib.contextmanager
def volunteers(n, url, data):
    """Run n volunteers on this machine, each a process and a host of its own; end them all."""
    processes = []
    for k in range(1, n + 1):
        directory = data / "volunteers" / str(k)
        directory.mkdir(parents=True, exist_ok=True)
        log = open(directory / "log.txt", "a")
        processes.append(subprocess.Popen(
            [sys.executable, str(HERE / "volunteer.py"), url, "--dir", str(directory), "--moved",
             "--cpus", "1", "--name", f"volunteer {k}", "--stop-with-stdin"],
            stdin=subprocess.PIPE,  # It ends with us, however we end.
            stdout=log, stderr=log, start_new_session=os.name == "posix"))  # Ctrl-C is ours.
        log.close()
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()


def count_workunits(application, limit=1 << 20):
    """Return how many workunits an application has, or None if that cannot be told quickly."""
    workunit, high = application.hooks["workunit"], 1
    while workunit(high - 1) is not None:
        if (high := high * 2) > limit:
            return None
    low = high // 2  # workunit(low - 1) exists, workunit(high - 1) does not.
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if workunit(middle - 1) is not None else (low, middle)
    return low


def progress_of(application):
    """Return (finished, made, exhausted) of an application, at no cost however much it did."""
    made = App.get_by_id(application.id).next_number
    row = Firing.get_or_none(app=application.id, rule="assimilated")
    return (row.n if row else 0), made, application.hooks["workunit"](made) is None


def compute_all(settings, paths, n, stop, url_shown):
    """Serve applications to volunteers of our own until all is computed; return whether it is."""
    with running(settings, paths) as url:
        if project.errors or not apps:
            raise PluginError("\n".join(text for _, text in project.errors) or "no application")
        totals = {name: count_workunits(a) for name, a in apps.items()}
        url_shown(url, totals)
        line, finished = Line(), False
        with volunteers(n, url, project.data) as processes:
            while not stop.wait(0.3) and not finished:
                states = {name: progress_of(a) for name, a in apps.items()}
                finished = all(gone and done == made for done, made, gone in states.values())
                line.show("  ".join(
                    f"{name} {bar(done, totals[name] or made)}"
                    for name, (done, made, _) in states.items()) + (
                        f"  {project.errors[-1][1]}" if project.errors else ""))
                if all(p.poll() is not None for p in processes):
                    raise ClientError(f"all volunteers have stopped: see the log files in "
                                      f"{project.data / 'volunteers'}")
        line.end()
        return finished


def local_settings(options):
    """Return settings for a project of this machine alone: quick, and not open to others."""
    return settings_of(options, host="127.0.0.1", request_delay=0.5, min_sendwork_interval=0,
                       max_wus_to_send=2, port=free_port() if options.port is None else None)


def demo(options):
    """Compute the picture of the Mandelbrot set with three volunteers of our own."""
    verbose(options)
    settings = local_settings(options)
    picture = Path(settings.data).resolve() / "results" / "mandelbrot.png"

    def show(url, totals):
        say(f"Three volunteers compute {totals['mandelbrot']} tiles of the Mandelbrot set, each "
            f"tile twice; only what\ntwo of them agree on goes into the picture. Watch it grow at "
            f"{url}\nCtrl-C stops; the next 'minigrid demo' goes on.\n")

    with stop_signal() as stop:
        finished = compute_all(settings, app_paths("plugins/apps/mandelbrot.py"), 3, stop, show)
    if finished:
        say(f"\nDone. The picture: {picture}\nNext: 'minigrid serve' for volunteers in your "
            f"network, or 'minigrid try FILE' with an application of yours.")
    else:
        say("\nStopped. 'minigrid demo' goes on where it was.")
    return 0


def free_port(first=8080):
    """Return the first free port from 8080 on, so that the demo runs beside anything."""
    for port in range(first, first + 50):
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    return 0


def run(options):
    """Compute applications to their end on this machine."""
    verbose(options)
    n = options.volunteers if options.volunteers is not None else max(2, os.cpu_count() or 2)
    if n < 1:
        raise ClientError("--volunteers must be at least 1")
    settings = local_settings(options)

    def show(url, totals):
        for name, application in apps.items():
            quorum = minigrid.plugged("check_parameters")[-1](application.parameters)["min_quorum"]
            if quorum > n:
                raise ClientError(f"{name} wants {quorum} computers to agree: start with "
                                  f"--volunteers {quorum}")
        say(f"{n} volunteers compute {', '.join(totals)}; watch at {url}. Ctrl-C stops, the same "
            f"command goes on.\n")

    with stop_signal() as stop:
        finished = compute_all(settings, [Path(path) for path in options.app], n, stop, show)
    for path in options.app:
        answers = Path(settings.data) / "results" / f"{Path(path).stem}.jsonl"
        if answers.exists():
            say(f"{'Answers' if finished else 'Answers so far'}: {answers}")
    return 0 if finished else 130


# ---- try ---------------------------------------------------------------------


def try_app(options):
    """Take one workunit through its life, on a clock of its own, and print each step."""
    with quietly(), tempfile.TemporaryDirectory(prefix="minigrid-try-") as scratch:
        settings = Settings(data=scratch, stock=1, purge_delay=0, min_sendwork_interval=0,
                            daily_result_quota=10**6)
        open_project(settings, random.Random(1))
        try:
            return try_in(options, Path(options.app))
        finally:
            minigrid.close_project()


def try_in(options, path):
    """Do the steps of `try` in the open scratch project."""
    now = 1_800_000_000
    faults = minigrid.sync_apps([path], now)
    if faults:
        raise PluginError(faults[0])
    (application,) = apps.values()
    step(f"load      {path.name}: {application.about}")
    given = application.hooks["workunit"](options.number)
    if given is None:
        raise PluginError(f"{path}: workunit({options.number}) is None: there is no such workunit")
    shown = {key: value for key, value in given.items() if key != "input"}
    step(f"generate  workunit({options.number}): input of {len(given['input'])} bytes: "
         f"{preview(given['input'])}", shown and f"with {shown}")
    again = application.hooks["workunit"](options.number)
    if again != given:
        raise PluginError(f"{path}: workunit({options.number}) gave something else the second "
                          f"time; it must be the same for the same number")
    wu = project.write(lambda: plugged("add_work")[-1](
        application, options.number, given, now))
    n_hosts = 0
    while wu.assimilate_state < 2 and n_hosts < wu.max_total_results + 2:
        n_hosts += 1
        now = three_passes(one_volunteer(application, n_hosts, now))
        wu = Workunit.get_or_none(id=wu.id)
        if wu is None or project.errors:
            break
    if project.errors:
        raise PluginError(project.errors[0][1])
    three_passes(now)
    answers = project.data / "results" / f"{application.name}.jsonl"
    if answers.exists():
        line = json.loads(answers.read_text().splitlines()[0])
        if line["errors"]:
            what = what_computes(application)
            more = DISAGREE.format(what=what, seeded=SEEDED if what == "compute()" else "") \
                if "TOO_MANY_SUCCESS_RESULTS" in line["errors"] else ""
            raise PluginError(f"{path}: the workunit failed: {', '.join(line['errors'])}{more}")
        step(f"kept      {preview(json.dumps(line['answer']).encode())}")
    made = [f.name for f in (project.data / "results").iterdir() if f.name != answers.name]
    if made:
        step(f"files     written to data/results: {', '.join(sorted(made))}")
    say("\nAll steps work. Next: minigrid run " + str(path))
    return 0


def three_passes(now):
    """Let three seconds go by, each with all stages but the generator; return the time."""
    stages = [stage for stage in minigrid.all_stages() if stage.__name__ != "generator"]
    for now in range(now + 1, now + 4):
        show_rules(lambda: minigrid.run_pass(now, stages))
    return now


def one_volunteer(application, n, now):
    """Let one more volunteer fetch, compute and report a copy; return the time when it is done."""
    (register,) = plugged("register")
    user = project.write(lambda: register(now, f"volunteer {n}"))
    asked = Request(user.authenticator, host_cpid=str(n), work_req_seconds=1,
                    platforms=["python", *volunteer_module().native_platforms()],
                    host={"p_fpops": 3e7, "p_ncpus": os.cpu_count() or 1})
    reply = show_rules(lambda: project.write(lambda: minigrid.schedule(asked, now)))
    if not reply.assignments:
        raise PluginError("nothing was sent to a volunteer: " + "; ".join(
            message["text"] for message in reply.messages))
    job = reply.assignments[0]
    directory = project.data / "volunteers" / str(n)
    directory.mkdir(parents=True)
    output, stderr, seconds = compute(job, directory)
    if output is None:
        own = stderr.strip().replace(str(directory / "slot" / "app.py"), str(application.path))
        what = what_computes(application, f" for {job.platform}")
        raise PluginError(f"{application.path}: {what} failed on {job.name}:\n{own}")
    step(f"compute   {job.name} in {seconds:.2f} s of processor time: {len(output)} bytes: "
         f"{preview(output)}")
    try:
        if job.command_line != "--invert":  # That gives back an input.
            application.hooks["parse"](output)
    except ValueError as error:
        (where,) = plugged("where_raised")
        raise PluginError(f"{application.path}: parse() refuses what {what_computes(application)} "
                          f"gave: {where(error, application.path)}") from None
    project.write(lambda: plugged("keep_file")[-1]("upload", job.output["name"], output))
    report = Report(job.name, client_state=5, elapsed_time=seconds, stderr_out=stderr)
    told = Request(user.authenticator, hostid=reply.hostid, rpc_seqno=1, reports=[report])
    now += math.ceil(seconds)  # Nobody is believed to have computed for longer than he had it.
    show_rules(lambda: project.write(lambda: minigrid.schedule(told, now)))
    return now


def what_computes(application, which=""):
    """Name what computes an application's copies: its compute(), or the program (which)."""
    python = any(version.platform == "python" for version in application.versions)
    return "compute()" if python else "the program" + which


def compute(job, directory):
    """Compute a copy as volunteers do, in a process of its own; return (output, stderr, seconds).

    Slot and harness are the volunteer's own: what works here works there.
    """
    volunteer, slot, files = volunteer_module(), directory / "slot", directory / "files"
    given = dataclasses.asdict(job)
    given["files"] = [file for file in job.files if "boinc" not in file]
    held = volunteer.parse_assignment(given, "http://localhost", (job.platform,))
    files.mkdir()
    for file in held.downloads:
        (files / file["name"]).write_bytes(plugged("file_content")[-1]("download", file["name"]))
    volunteer.prepare_slot(slot, held, files, 10**6)
    harness = directory / "harness.py"
    harness.write_text(volunteer.HARNESS)
    process = subprocess.Popen([sys.executable, "-s", "-B", str(harness), str(slot)],
                               env={**os.environ, "PYTHONHASHSEED": "0"}, stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    printed, stderr = wait_for(process)
    output, done = slot / "output", slot / "done.json"
    seconds = json.loads(done.read_text())["cpu_time"] if done.exists() else 0
    return (output.read_bytes() if process.returncode == 0 and output.exists() else None,
            (printed + stderr).decode(errors="replace"), seconds)


def wait_for(process):
    """Read what a process prints until it ends; its standard input stays open as long."""
    texts = {}
    readers = [threading.Thread(target=lambda n=name: texts.update(
        {n: getattr(process, n).read()})) for name in ("stdout", "stderr")]
    for reader in readers:
        reader.start()
    process.wait()
    for reader in readers:
        reader.join()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    return texts["stdout"], texts["stderr"]


def volunteer_module():
    """Load the volunteer's file for its harness; nothing of it runs here."""
    spec = importlib.util.spec_from_file_location("minigrid_volunteer", HERE / "volunteer.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show_rules(function):
    """Call a function and print the rules it fired, as the log would show them."""
    seen = []
    with watching(seen):
        value = function()
    for text in seen:
        say(f"            {text}")
    return value


@contextlib.contextmanager
def watching(seen):
    """Collect the log lines of fired rules."""
    class Collect(logging.Handler):
        def emit(self, record):
            if record.levelno == logging.INFO:
                seen.append(record.getMessage())

    handler, level = Collect(), minigrid.log.level
    minigrid.log.addHandler(handler)
    minigrid.log.setLevel(logging.INFO)
    try:
        yield
    finally:
        minigrid.log.removeHandler(handler)
        minigrid.log.setLevel(level)


def step(text, more=""):
    """Print one step of `try`."""
    say(f"  {text} {more or ''}".rstrip())


def preview(content, length=60):
    """Show the beginning of a file."""
    text = content.decode("utf-8", "backslashreplace") if content[:1] in b'[{"-0123456789tfn' \
        else content[:20].hex(" ") + " ..."
    return text if len(text) <= length else text[:length] + " ..."


# ---- join, status, cancel, check, backup -------------------------------------


def join(options):
    """Become a volunteer: hand everything to the client."""
    return subprocess.call([sys.executable, str(HERE / "volunteer.py"), *options.arguments])


@contextlib.contextmanager
def store_only(options):
    """Open an existing store, beside a running server or without one."""
    settings = settings_of(options)
    if not (Path(settings.data) / "minigrid.db").exists():
        raise StoreError(f"there is no project in {settings.data}: start one with 'minigrid "
                         f"serve', or name another directory with --data")
    with quietly():
        open_project(settings, random.Random(0), lock=False)
        try:
            yield settings
        finally:
            minigrid.close_project()


def show_status(options):
    """Print how a project is doing."""
    with store_only(options) as settings:
        try:
            minigrid.lock_directory(Path(settings.data)).close()
            note = "no server is running"
        except StoreError:
            note = f"a server is running {minigrid.server_note(Path(settings.data))}"
        say(f"{settings.name} in {settings.data}; {note}")
        (status,) = plugged("status")
        report = status(wall_clock())
        say(f"{'application':20} {'unsent':>8} {'out':>8} {'done':>8} {'failed':>8}")
        for app in [*report["apps"], {**report["total"], "name": "all"}]:
            say(f"{app['name']:20} {app['unsent']:>8} {app['in_progress']:>8} {app['done']:>8} "
                f"{app['failed']:>8}")
        say(f"{report['hosts']['total']} computers, {report['hosts']['active']} of them active in "
            f"the last ten minutes")
    return 0


def cancel(options):
    """Give up workunits, or all unfinished ones of an application."""
    with store_only(options):
        ids, unknown = [], []
        for name in options.names:
            app = App.get_or_none(name=name)
            found = [row[0] for row in Workunit.select(Workunit.id).where(
                Workunit.app == app if app else Workunit.name == name,
                Workunit.assimilate_state == 0).tuples()]
            known = app or Workunit.select().where(Workunit.name == name).exists()
            ids += found
            unknown += [] if known else [name]
        if unknown:
            raise ClientError(f"no workunit or application is called {', '.join(unknown)}; "
                              f"nothing was cancelled")
        (cancel_all,), now, n = plugged("cancel_workunits"), wall_clock(), 0
        for i in range(0, len(ids), 100):
            n += project.write(lambda: cancel_all(ids[i:i + 100], now))
        say(f"{n} workunits cancelled; volunteers who hold copies are told at their next contact")
    return 0


def check(options):
    """Check store and files; exit status 1 if something is wrong."""
    with store_only(options):
        (violations,) = plugged("violations")
        found = violations()
        for text in found:
            say(f"wrong: {text}")
        n = Meta.get_by_id("schema").value
        say(f"{'nothing wrong' if not found else f'{len(found)} things wrong'} (schema {n}, "
            f"{Workunit.select().count()} workunits, {Result.select().count()} results)")
    return 1 if found else 0


def save_copy(options):
    """Copy the store."""
    with store_only(options):
        (copy,) = plugged("backup")
        name = time.strftime("minigrid-%Y-%m-%d-%H%M%S.db", time.gmtime(wall_clock()))
        target = Path(options.file) if options.file else project.data / "backup" / name
        try:
            say(f"copied to {copy(target)}")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot write {target}: {error}") from None
    return 0
