"""The simulated world: volunteers of every temper against the real schedule() and run_pass().

A world is a function of its seed: a project, its volunteers, and a clock that jumps from event to
event. `World` looks at everything on the way; `Crowd` is made for thousands of hosts, runs a pass
only every ten minutes, and measures who was believed.
"""

import contextlib
import heapq
import itertools
import json
import os
import random
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import peewee

import minigrid as m

START = 1_800_000_000
HOUR, DAY = 3600, 86400
LIE = 10**6  # what colluders add to the truth; liars on their own add more, each another number


@dataclass(frozen=True)
class Temper:
    """What a kind of host is like; shares are of its answers, unless said otherwise."""

    wrong: float = 0
    together: bool = False  # wrong as all of its kind are, not on its own
    garbage: float = 0
    crash: float = 0
    quit: float = 0  # its user aborts the task
    forget: float = 0  # says that it has uploaded what it has not
    detach: float = 0  # of its visits: comes back as new
    vanish: float = 0  # of its visits: stays away for days
    delay: int = 0  # s more for each task
    slow: float = 1  # times the usual time for a task
    asleep: bool = False  # off from 22 to 8 o'clock
    clone: bool = False  # has the client directory of an honest volunteer before it
    honest: bool = True  # nobody may call it a liar


TEMPERS = {
    "honest": Temper(),
    "liar": Temper(wrong=0.7, honest=False),
    "careless": Temper(wrong=0.2, honest=False),
    "crasher": Temper(crash=0.7),
    "garbler": Temper(garbage=0.7),
    "vanisher": Temper(delay=1000 * DAY),
    "late": Temper(delay=9 * HOUR),
    "late crasher": Temper(delay=9 * HOUR, crash=0.7),
    "quitter": Temper(quit=0.7),
    "forgetter": Temper(forget=0.7),
    "detacher": Temper(detach=0.1),
    "always wrong": Temper(wrong=1, honest=False),
    "sometimes wrong": Temper(wrong=0.1, honest=False),
    "colluder": Temper(wrong=1, together=True, honest=False),
    "slow": Temper(slow=8),
    "flaky": Temper(vanish=0.05, crash=0.05),
    "asleep": Temper(asleep=True),
    "cloned": Temper(clone=True),
}


class Volunteer:
    """A simulated host: asks, computes by its temper, reports."""

    ncpus = 1

    def __init__(self, world, number, temper):
        self.world, self.rng = world, world.rng
        self.name, self.temper = temper, TEMPERS[temper]
        self.cpid, self.hostid, self.seqno, self.jobs = f"cpid{number}", 0, 0, {}
        self.hostids, self.idle, self.original = set(), 0, None
        honest = [v for v in world.volunteers if v.temper.honest]
        if self.temper.clone and honest:  # A liar's copy has no claim to be believed.
            self.original = honest[-1]
            self.user, self.cpid = self.original.user, self.original.cpid
        else:
            (register,) = m.plugged("register")
            self.user = m.project.write(lambda: register(world.now, f"{temper} {number}"))

    def chance(self, share):
        """Draw whether something happens that does in this share of cases."""
        return share > 0 and self.rng.random() < share

    def visit(self, now):
        """One request; returns the time of the next."""
        if self.chance(self.temper.detach):
            self.hostid, self.seqno, self.jobs = 0, 0, {}
        if self.original:  # Its copy of the directory is as old as that host's first request.
            self.hostid, self.original = self.original.hostid, None
        done = [job for job, ready in self.jobs.values() if ready <= now]
        reports = [report for job in done if (report := self.finish(job))]
        told = {report.name for report in reports}
        request = m.Request(
            self.user.authenticator, hostid=self.hostid, rpc_seqno=self.seqno, host_cpid=self.cpid,
            host={"p_fpops": 1e9, "m_nbytes": 8e9, "p_ncpus": self.ncpus}, reports=reports,
            work_req_seconds=1, cpu_req_instances=max(self.ncpus, 2),
            other_results=[name for name in self.jobs if name not in told])
        reply = m.project.write(lambda: m.schedule(request, now))
        self.seqno, self.hostid = self.seqno + 1, reply.hostid or self.hostid
        self.hostids.add(self.hostid)
        if self.rng.random() < self.world.lost_replies:  # The work that came with it is forgotten,
            return now + HOUR         # and what was reported is reported again.
        for name in (*reply.acks, *reply.aborts):
            self.jobs.pop(name, None)
        for job in reply.assignments:
            seconds = self.rng.randrange(HOUR, 2 * HOUR)
            self.jobs.setdefault(job.name, (
                job, now + self.temper.delay + int(self.temper.slow * seconds)))
        return self.rest(now, reply)

    def rest(self, now, reply):
        """Return when it asks again."""
        return now + self.rng.randrange(HOUR, 3 * HOUR)

    def finish(self, job):
        """Compute a job as the temper has it; return its report."""
        temper = self.temper
        path = m.file_path("download", job.input["name"])
        given = json.loads(path.read_bytes()) if path.exists() else 0
        answer = self.world.answer(job, given, self)
        if self.chance(temper.crash):
            return m.Report(job.name, 3, 195, stderr_out="crashed")
        if self.chance(temper.quit):
            return m.Report(job.name, 6, 203)
        if self.chance(temper.garbage):
            answer = "garbage"
        if not self.chance(temper.forget) and self.may_upload(job):
            m.file_path("upload", job.output["name"]).write_text(json.dumps(answer))
        return m.Report(job.name, 5, 0, elapsed_time=self.elapsed())

    def may_upload(self, job):
        """Does the server still take the output, as the routes ask? A clone may have sent it."""
        return m.db.execute_sql("SELECT 1 FROM result WHERE name = ? AND (server_state = 4 OR "
                                "outcome = 4)", (job.name,)).fetchone()

    def elapsed(self):
        """Return the seconds a task took, as it says."""
        return 60


class World:
    """A project, its volunteers, and a clock that jumps from event to event.

    `apps` maps names of applications to their texts, `answers` to what is right: f(input, rng);
    "NAME --invert" to the input that has an output.
    """

    kind, lost_replies = Volunteer, 0.05

    def __init__(self, seed, folder, apps, answers, tempers, **settings):
        self.rng, self.now, self.answers = random.Random(seed), START, answers
        for name, text in apps.items():
            (folder / f"{name}.py").write_text(text)
        m.open_project(m.Settings(data=str(folder / "data"), min_sendwork_interval=0, **settings),
                       self.rng)
        m.db.execute_sql("PRAGMA synchronous = OFF")
        faults = m.sync_apps([folder], self.now)
        assert faults == [], faults
        self.volunteers = []
        for n, temper in enumerate(tempers):
            self.volunteers.append(self.kind(self, n, temper))
        self.events = [(self.now + n, n) for n in range(len(self.volunteers))]

    def answer(self, job, given, volunteer):
        """Return what a volunteer answers: the truth, or what its temper makes of it."""
        inverse, temper = "--invert" in job.command_line, volunteer.temper
        right = self.answers[f"{job.app} --invert" if inverse else job.app]
        if not volunteer.chance(temper.wrong):
            return right(given, self.rng)
        lie = LIE if temper.together else self.rng.randrange(LIE + 1, 10**9)
        if inverse:  # Colluders cover for each other.
            return right(given - lie, self.rng)
        return right(given, self.rng) + lie

    def settled(self):
        """Everything made, over, assimilated, deleted and purged?"""
        return self.now > START + DAY and not m.Workunit.select().exists()

    def live(self, days):
        """Let time go by until all is settled; check that all is sound on the way."""
        (violations,) = m.plugged("violations")
        (cancel,) = m.plugged("cancel_workunits")
        n = 0
        while not self.settled():
            assert self.now < START + days * DAY, "not settled in time"
            n += 1
            self.event()
            if n == 40:
                some = m.Workunit.select(m.Workunit.id).where(m.Workunit.assimilate_state == 0)
                m.project.write(lambda: cancel([wu.id for wu in some.limit(2)], self.now))
            if n % 25 == 0:
                assert violations() == []
        assert violations() == []

    def event(self):
        """The next visit, and a pass a second after it; or not, for reports may come together."""
        self.visit()
        self.now += 1
        if self.rng.random() < 0.5:
            return
        with self.trouble():
            m.run_pass(self.now)

    def visit(self):
        """Let the volunteer whose turn it is ask."""
        at, number = heapq.heappop(self.events)
        self.now = max(at, self.now)
        heapq.heappush(self.events, (self.volunteers[number].visit(self.now), number))

    @contextlib.contextmanager
    def trouble(self):
        """Now and then an output cannot be read or deleted for the length of a pass."""
        waiting = "outcome = 1 AND validate_state IN (0, 4)"
        undecided = {name for name, in m.db.execute_sql(
            f"SELECT name FROM result WHERE {waiting} AND workunit_id IN (SELECT workunit_id "
            f"FROM result WHERE {waiting} GROUP BY workunit_id HAVING count(*) > 2)")}
        freed = {name for name, in m.db.execute_sql(
            "SELECT r.name FROM result r JOIN workunit w ON w.id = r.workunit_id "
            "WHERE w.assimilate_state = 2 AND r.file_delete_state = 0 AND w.transition_time < ?",
            (self.now,))}  # which this pass will delete
        wanted = freed if freed and self.rng.random() < 0.5 else undecided
        paths = [path for name in sorted(wanted)
                 if (path := m.file_path("upload", f"{name}_out")).is_file()]
        if not paths:
            yield
            return
        path = self.rng.choice(paths)
        hidden = path.with_name("hidden")
        path.rename(hidden)
        path.mkdir()  # Neither readable nor deletable, also for root.
        yield
        path.rmdir()
        hidden.rename(path)
        m.project.retry_files_at = 0


# ---- Thousands of hosts -------------------------------------------------------

TRUTH = '''"""truth: one right answer for each number."""


def workunit(i):
    return {{"input": i}} if i < {n} else None


def compute(input):
    return 3 * input + 1


{policy}
'''
CHECK = '''validation = "check"


def check(input, output):
    return output == 3 * input + 1
'''
INVERSE = '''validation = "inverse"


def invert(output):
    return (output - 1) / 3


def same(input, recovered):
    return input == recovered
'''
PASS_SECONDS = 600  # A real server looks every second, at far fewer hosts.
SHARES = {"slow": 0.1, "flaky": 0.05, "cloned": 0.02, "asleep": 0.1}  # of those who do not lie


class Worker(Volunteer):
    """A host that computes as much as it can: asks when its tasks are done, tells their times."""

    ncpus = 4  # Four tasks to a request: most of the time of a world goes into requests.

    def visit(self, now):
        """Ask, but seldom where nothing waits to be sent: most of the time would go into that."""
        if not self.jobs and self.chance(0.95) and not m.db.execute_sql(
                "SELECT 1 FROM result WHERE server_state = 2 LIMIT 1").fetchone():
            return now + HOUR
        return super().visit(now)

    def rest(self, now, reply):
        """Return when all its tasks are done; ever later where there are none."""
        self.idle = 0 if self.jobs else min(self.idle + 1, 4)
        at = max((ready for _, ready in self.jobs.values()), default=now + 900 * 2 ** self.idle)
        at = max(at, now + 60)
        if reply.request_delay > 3600:  # refused
            at = now + int(reply.request_delay)
        if self.chance(self.temper.vanish):
            at += self.rng.randrange(DAY, 3 * DAY)
        if self.temper.asleep and not 8 * HOUR <= at % DAY < 22 * HOUR:
            at += (8 * HOUR - at) % DAY
        return at

    def elapsed(self):
        return int(self.temper.slow * 1.5 * HOUR)


class Crowd(World):
    """Many hosts, one application, no trouble but what they make; measures who was believed.

    `policy` is what the application's file says of how its answers are checked.
    """

    kind, lost_replies = Worker, 0

    def __init__(self, seed, folder, tempers, n, policy="", **settings):
        self.n, self.next_pass, self.last_answer = n, 0, 0
        settings = {"stock": max(200, len(tempers)), "purge_delay": 1000 * DAY, **settings}
        super().__init__(seed, folder, {"truth": TRUTH.format(n=n, policy=policy)},
                         {"truth": lambda x, rng: 3 * x + 1,
                          "truth --invert": lambda y, rng: (y - 1) / 3}, tempers, **settings)
        for k in range(len(self.events)):  # They do not all come in the first second.
            self.events[k] = (self.now + self.rng.randrange(HOUR), k)
        heapq.heapify(self.events)
        m.run_pass(self.now)

    def event(self):
        """The next visit; a pass where ten minutes have gone by since the last."""
        if self.events[0][0] >= self.next_pass:
            self.now = max(self.now, self.next_pass)
            done = {"inverse_checks": 1}
            while done.get("inverse_checks"):  # fifty at a time: a server has a pass each second
                self.now += 1
                done = m.run_pass(self.now)
                if done.get("assimilator"):
                    self.last_answer = self.now
            self.next_pass = max(self.now, self.events[0][0]) + PASS_SECONDS
        self.visit()

    def finished(self):
        """Has the application taken all its answers and failures?"""
        return m.db.execute_sql("SELECT count(*) FROM workunit WHERE number IS NOT NULL AND "
                                "assimilate_state = 2").fetchone()[0] == self.n

    def run(self, days=30):
        """Let time go by until the last answer; return the measures."""
        for k in itertools.count():
            if k % 50 == 0 and self.finished():
                return self.measures()
            if self.now > START + days * DAY:
                return self.measures()  # They say how many answers are missing.
            self.event()

    def measures(self):
        """Return what became of it: {name: number}."""
        path = m.project.data / "results" / "truth.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] \
            if path.exists() else []
        answers = [line for line in lines if line["answer"] is not None]
        wrong = sum(line["answer"] != 3 * line["number"] + 1 for line in answers)
        sent = m.Firing.select(m.Firing.n).where(m.Firing.rule == "send").scalar() or 0
        now, ever = self.black_listed()
        honest = {i for v in self.volunteers if v.temper.honest for i in v.hostids}
        liars = {i for v in self.volunteers if not v.temper.honest for i in v.hostids}
        return dict(
            answers=len(answers), failed=self.n - len(answers), wrong=wrong,
            wrong_rate=wrong / max(len(answers), 1), copies=sent / self.n,
            hours=(self.last_answer - START) / HOUR, honest_listed=len(honest & now),
            honest_ever_listed=len(honest & ever), liars_caught=len(liars & ever),
            liars=len(liars))

    def black_listed(self):
        """Return the ids of the hosts that are black-listed now, and of those that ever were."""
        now, ever = set(), set()
        for model in sum(m.plugged("TABLES"), ()):
            if model.__name__ == "BlackEntry":
                for entry in model.select():
                    ever.add(entry.host)
                    if not entry.ended and (not entry.end or entry.end > self.now):
                        now.add(entry.host)
        return now, ever


def crowd(hosts, liars=0.0, colluders=0.0, temper="always wrong"):
    """Return the tempers of so many hosts, of which these shares lie, mixed like a real crowd."""
    false = [temper] * round(liars * hosts) + ["colluder"] * round(colluders * hosts)
    rest = hosts - len(false)
    others = [name for name, share in SHARES.items() for _ in range(round(share * rest))]
    tempers = false + others + ["honest"] * (rest - len(others))
    random.Random(hosts).shuffle(tempers)
    return tempers


@contextlib.contextmanager
def in_a_hurry():
    """Context: nothing waits for the disk, and columns are written without ceremony.

    Rules are tried, not power cuts; and peewee puts together the same names of columns again and
    again, with objects for each: a quarter of the time of a world.
    """
    def column(self, context):
        table = self.model._meta.table
        if context.scope == peewee.SCOPE_VALUES or table._alias:
            return context.sql(self.column)
        return context.literal(f'"{context.alias_manager[table]}"."{self.column_name}"')

    with mock.patch.object(os, "fsync", lambda file: None), \
            mock.patch.object(peewee.Field, "__sql__", column):
        yield


def fired():
    """Return how often each rule has fired."""
    return Counter({row.rule: row.n for row in m.Firing.select()})
