"""The simulated world: a project with its store and files, its hosts, and a clock that jumps.

The real schedule() and run_pass() on a virtual clock. One generator of random numbers for the
project and one for the world, both made from the seed: a world is a function of its plan.
"""

import contextlib
import heapq
import itertools
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import minigrid
from minigrid import (PluginError, Settings, apps, close_project, db, open_project, plugged,
                      plugins, project, run_pass, schedule, sync_apps)

from . import faults, tempers, watch
from .hosts import PYTHON_SPEED, Computer
from .watch import START

HOUR, DAY = 3600, 86400
LIE = 10**6  # what colluders add to the truth; liars on their own add more, each another number
FEW, MANY = 100, 400  # workunits that a pass handles, between which its distance stays as it is
PASS_SECONDS_MAX = 600


@dataclass(frozen=True)
class Plan:
    """What is simulated; the options of the command, by the same names."""

    seed: int = 1
    hosts: int = 100
    workunits: int = 1000
    days: float = 30  # at most
    shares: dict = field(default_factory=lambda: dict(tempers.USUAL))  # kind -> share of the hosts
    lies: float = 1  # share of a liar's answers that are wrong
    arrivals: float = 0  # new hosts a day
    lifetime: float = 0  # days that a host stays on average; 0: for ever
    ncpus: int = 4
    task_hours: float = 2  # on a usual processor
    cache_hours: float = 6  # of work that a host keeps for each processor
    lost: float = 0  # share of the requests whose reply never arrives
    repeated: float = 0  # share of the requests that arrive twice
    reordered: float = 0  # share of the requests that arrive after the next one
    crashes: float = 0  # of the server, a day
    disk_full: float = 0  # hours with a full disk, a day
    raising: float = 0  # hours in which hooks and plugins raise, a day
    unreadable: float = 0  # share of the passes during which an output can be neither read nor ...
    cancels: float = 0  # times a day that the owner cancels two workunits
    purged: bool = False  # go on until all is purged, not only answered


class World:
    """A project, its hosts, and a clock that jumps from event to event.

    `texts` maps names of applications to the texts of their files, `answers` to what is right:
    f(input, rng); "NAME --invert" to the input that has an output. `hooks` are used in place of
    those of the text: {name: {hook: function}}.
    """

    def __init__(self, plan, folder, texts, answers, hooks=None, **settings):
        self.plan, self.folder, self.answers, self.now = plan, folder, answers, START
        self.rng, self.project_rng = random.Random(plan.seed), random.Random(plan.seed + 1)
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        self.settings = Settings(**{**dict(
            stock=max(200, plan.hosts), min_sendwork_interval=0, purge_delay=DAY, backups=0,
            daily_result_quota=10**4), **settings, "data": str(folder / "data")})
        self.hooks = hooks or {}
        self.load, self.requests = Counter(), 0  # requests in each ten minutes, in all
        self.steps = self.passes = self.refused = self.gone = self.in_vain = 0
        self.core_seconds = self.own_seconds = 0.0  # of the processor: the server's, and ours
        self.pass_at, self.pass_gap = START, 1
        self.second_look, self.second_look_factor = 0, 1.4  # when a pass is done twice
        self.next_hour = START + HOUR
        self.watch, self.faults = watch.Watch(self), faults.Faults(self)
        self.computers, self.honest = [], None
        self.serial, self.events = itertools.count(), []  # (time, serial, what, arguments)

    def open(self):
        """Open the project, or open it again as a new process would."""
        open_project(self.settings, self.project_rng)
        db.execute_sql("PRAGMA synchronous = OFF")  # Processes die here, machines do not.
        troubles = sync_apps(sorted(self.folder.glob("*.py")), self.now)
        if troubles:
            raise PluginError("; ".join(troubles))
        for name, hooks in self.hooks.items():
            apps[name].hooks.update(hooks)
        self.faults.attach()

    def populate(self, kinds):
        """Let the first hosts come within an hour, and whatever else comes from time to time."""
        for kind in kinds:
            self.arrive(kind, self.now + self.rng.randrange(HOUR))
        if self.plan.arrivals:
            self.later(DAY / self.plan.arrivals, self.arrival)
        self.faults.begin()

    def later(self, mean_seconds, what, *arguments):
        """Enter an event that comes after so many seconds on average."""
        at = self.now + max(int(self.rng.expovariate(1 / mean_seconds)), 1)
        heapq.heappush(self.events, (at, next(self.serial), what, arguments))

    def arrive(self, kind, at):
        """Let a host come into being and make its first visit."""
        try:
            computer = Computer(self, len(self.computers), kind, at)
        except Exception:  # The store is full just now: this one is lost for us.
            if not self.faults.at_work():
                raise
            return
        self.computers.append(computer)
        if computer.temper.honest:
            self.honest = computer
        heapq.heappush(self.events, (at, next(self.serial), self.visit, (computer,)))

    def arrival(self):
        """A new host comes, and later another one."""
        self.arrive(tempers.draw(self.plan.shares, self.rng), self.now)
        self.later(DAY / self.plan.arrivals, self.arrival)

    # ---- Events ------------------------------------------------------------------

    def step(self):
        """Let the next thing happen, and look at what it has done."""
        at, passes = self.events[0][0], self.passes
        self.steps += 1
        try:
            if min(self.pass_at, self.next_hour) <= at:
                self.work(min(self.pass_at, self.next_hour))
            else:
                at, _, what, arguments = heapq.heappop(self.events)
                self.now = max(at, self.now)
                what(*arguments)
        except faults.Crash:
            pass
        if self.faults.crashed:
            self.faults.restart()
        if self.passes > passes or len(self.watch.touched) > MANY:
            with self.faults.spared():
                self.watch.look(self.now)

    def visit(self, computer):
        """Let a host ask; one that the server died on comes again."""
        again = self.now + HOUR
        try:
            again = computer.visit(self.now)
        finally:
            if again is not None:
                heapq.heappush(self.events, (again, next(self.serial), self.visit, (computer,)))

    def ask(self, computer, request, now):
        """Bring a request to the server and the reply back; None if no reply arrives."""
        plan, stray = self.plan, computer.stray
        if computer.chance(plan.reordered):
            computer.stray = request
            return None
        replies = [self.serve(request, now)]
        if computer.chance(plan.repeated):
            replies.append(self.serve(request, now))
        if stray:
            computer.stray = None
            self.serve(stray, now)
        if computer.chance(plan.lost):
            return None
        reply = replies[0] if len(replies) == 1 else self.rng.choice(replies)
        if reply and request.work_req_seconds and not reply.assignments:
            self.in_vain += 1
            if not all(application.drained for application in apps.values()):
                self.pass_at = min(self.pass_at, now + 1)  # A server looks every second.
        return reply

    def serve(self, request, now):
        """Let the real scheduler serve a request; None if the server could not."""
        self.requests += 1
        self.load[(now - START) // 600] += 1
        try:
            return self.timed(project.write, lambda: schedule(request, now))
        except Exception:
            if not self.faults.at_work():
                raise
            self.refused += 1
            return None
        finally:
            if self.watch.touched:  # There may be something to do now.
                self.pass_at = min(self.pass_at, now + self.pass_gap)

    def work(self, at):
        """The real pass: the more seldom the less it finds, at most ten minutes after a request.

        A real server looks each second. Here one pass has the work of many, and there is none while
        nothing is due.
        """
        self.now = max(at, self.now) + 1
        with self.faults.unreadable():
            n = max(self.timed(run_pass, self.now).values(), default=0)
        self.passes += 1
        self.faults.count_errors()
        if self.now >= self.next_hour:
            self.next_hour = self.now + HOUR
            self.hourly()
        if n > MANY:
            self.pass_gap = max(self.pass_gap // 2, 1)
        elif n < FEW:
            self.pass_gap = min(self.pass_gap * 2, PASS_SECONDS_MAX)
        self.pass_at = self.now + self.pass_gap
        (due,), = db.execute_sql("SELECT min(transition_time) FROM workunit WHERE "
                                 "transition_time < 2147483647").fetchall()
        if not n:
            self.pass_at = max(self.pass_at, self.next_hour if due is None else due)
        if n < FEW / 2 and self.passes >= self.second_look and not self.faults.at_work():
            self.second_look = self.passes * self.second_look_factor
            self.timed(self.watch.second_pass, self.now)

    def hourly(self):
        """The work of each hour, as the real server's job loop has it."""
        for work in plugged("hourly"):
            try:
                self.timed(work, self.now)
            except Exception:
                if not self.faults.at_work():
                    raise

    def timed(self, function, *arguments):
        """Call a function of the server; add up the time of the processor that it takes."""
        began = time.process_time()
        try:
            return function(*arguments)
        finally:
            self.core_seconds += time.process_time() - began

    # ---- Answers -----------------------------------------------------------------

    def answer(self, task, given, computer):
        """Return what a host answers: the truth, or what its temper makes of it."""
        inverse, temper = "--invert" in task.command_line, computer.temper
        right = self.answers[f"{task.app} --invert" if inverse else task.app]
        if not computer.chance(self.plan.lies if temper.lies else temper.wrong):
            return right(given, self.rng)
        lie = LIE if temper.together else self.rng.randrange(LIE + 1, 10**9)
        if inverse:  # Colluders cover for each other.
            return right(given - lie, self.rng)
        return right(given, self.rng) + lie

    # ---- From beginning to end -----------------------------------------------------

    def finished(self):
        """Has all come to its end that the plan waits for?"""
        if self.plan.purged:
            return self.watch.answers and not self.watch.known and not self.faults.at_work() \
                and all(application.drained for application in apps.values())
        return len(self.watch.answers) >= self.plan.workunits

    def live(self):
        """Let time go by until the end of the plan; raises watch.Violation if anything is wrong."""
        end, began = START + self.plan.days * DAY, time.process_time() - self.core_seconds
        while not self.finished() and self.now < end and self.events:
            self.step()
        self.own_seconds = time.process_time() - self.core_seconds - began
        with self.faults.spared():
            self.watch.look_at_all(self.now)


@contextlib.contextmanager
def running_world(plan, folder, texts, answers, hooks=None, kinds=None, **settings):
    """Yield a world whose project is open; close it again, whatever happens.

    `kinds` are those of the first hosts; without them they are drawn as the plan says.
    """
    world = World(plan, folder, texts, answers, hooks, **settings)
    fsync, level = os.fsync, minigrid.log.level
    os.fsync = world.faults.fsync
    minigrid.log.setLevel("CRITICAL")
    plugins.append(world.watch)
    try:
        world.faults.prepare()
        world.open()
        world.populate(tempers.crowd(plan.hosts, plan.shares, world.rng)
                       if kinds is None else kinds)
        yield world
    finally:
        plugins.remove(world.watch)
        world.faults.detach()
        os.fsync = fsync
        minigrid.log.setLevel(level)
        close_project()


# ---- The built-in application ------------------------------------------------------


TOY = '''"""{name}: one right answer for each number."""

{constants}


def workunit(i):
    return {{"input": i}} if i < {n} else None


def compute(input):
    return 3 * input + 1
'''
HOOKS = {  # what some ways of validation need besides
    "check": '''

def check(input, output):
    return output == 3 * input + 1
''',
    "inverse": '''

def invert(output):
    return (output - 1) / 3


def same(input, recovered):
    return input == recovered
'''}
NAME = "task"


def toy(plan, constants=None, name=NAME):
    """Return the text of the built-in application, and its right answers."""
    constants = {"rsc_fpops_est": plan.task_hours * HOUR * PYTHON_SPEED, **(constants or {})}
    text = TOY.format(name=name, n=plan.workunits, constants="\n".join(
        f"{key} = {value!r}" for key, value in constants.items()))
    return ({name: text + HOOKS.get(constants.get("validation"), "")},
            {name: truth, f"{name} --invert": inverse})


def truth(given, rng):
    """The right answer of the built-in application."""
    return 3 * given + 1


def inverse(output, rng):
    """The input that has an output."""
    return (output - 1) / 3


def results_of(name):
    """Return the lines that an application has kept: [{number, answer, errors}]."""
    path = project.data / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
