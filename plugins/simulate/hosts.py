"""A simulated host: asks for work, computes by its temper, reports; its time is virtual."""

import json
import statistics

from minigrid import Report, Request, db, file_path, plugged, project

from .tempers import DAY, HOUR, TEMPERS

PYTHON_SPEED = 3e7  # Python operations a second of a usual processor; what hosts measure, too
IDLE_SECONDS, IDLE_DOUBLINGS = 900, 4  # a host without work asks ever more seldom: every 4 h
FAILED_SHARE = 0.3  # of the time of a task goes by until it fails
WRONG_TIMES = (0, -5, 1e9)  # s, as told by a host with a wrong clock


class Job:
    """One copy in the hands of a host: when it is computed, and what will be reported."""

    __slots__ = ("task", "given", "processor", "start", "ready", "seconds", "report")

    def __init__(self, task, given, processor, start, seconds, delay):
        self.task, self.given, self.processor = task, given, processor
        self.start, self.seconds, self.ready = start, seconds, start + seconds + delay
        self.report = None  # made once: what is reported again is the same


class Computer:
    """A simulated host; `visit(now)` is one request and gives the time of the next."""

    def __init__(self, world, number, kind, now):
        plan = world.plan
        self.world, self.rng, self.number, self.kind = world, world.rng, number, kind
        self.temper = TEMPERS[kind]
        self.cpid, self.hostid, self.hostids, self.seqno = f"cpid{number}", 0, set(), 0
        self.jobs, self.idle, self.stray = {}, 0, None
        self.free = [now] * plan.ncpus  # when each processor is done with what it has
        self.speed = self.rng.lognormvariate(0, 0.3) / self.temper.slow
        self.leaves = now + self.rng.expovariate(1 / plan.lifetime) * DAY if plan.lifetime else None
        self.original = world.honest if self.temper.clone else None  # None: a liar's copy
        if self.original:  # has no claim to be believed.
            self.user, self.cpid = self.original.user, self.original.cpid
        else:
            self.user = world.timed(project.write, lambda: plugged("register")[-1](
                world.now, f"{kind} {number}"))

    def chance(self, share):
        """Draw whether something happens that does in this share of cases."""
        return share > 0 and self.rng.random() < share

    def visit(self, now):
        """Report, ask for work, take it; return when to ask again, or None: never."""
        if self.leaves and now >= self.leaves:
            return self.leave(now)
        if self.chance(self.temper.detach):
            self.drop(list(self.jobs), now)
            self.hostid, self.seqno = 0, 0
        if self.original:  # Its copy of the directory is as old as that host's first request.
            self.hostid, self.original = self.original.hostid, None
        full = self.chance(self.temper.full)
        reports = self.finish(now, full)
        reply = self.world.ask(self, self.request(reports, full, now), now)
        self.seqno += 1
        if reply is None:  # Lost, or refused for the time being: all of it is said again.
            return now + self.rng.randrange(HOUR // 6, HOUR)
        self.hostid = reply.hostid or self.hostid
        self.hostids.add(self.hostid)
        self.drop(reply.acks + reply.aborts, now)
        self.drop([name for name in reply.aborts_if_not_started
                   if name in self.jobs and self.jobs[name].start > now], now)
        for task in reply.assignments:
            if task.name not in self.jobs:
                self.jobs[task.name] = self.take(task, now)
        if self.chance(self.temper.leave):
            return self.leave(now)
        return self.rest(now, reply)

    def request(self, reports, full, now):
        """Say what is done, what is here, and what is wanted to keep the processors busy."""
        told = {report.name for report in reports}
        plan, rest = self.world.plan, [max(free - now, 0) for free in self.free]
        asleep = 14 / 24 if self.temper.asleep else 1
        return Request(
            self.user.authenticator, hostid=self.hostid, rpc_seqno=self.seqno, host_cpid=self.cpid,
            host={"p_fpops": PYTHON_SPEED * self.speed, "m_nbytes": 8e9, "p_ncpus": plan.ncpus,
                  "d_free": 1e6 if full else 1e11, "on_frac": asleep},
            reports=reports, cpu_req_instances=rest.count(0), estimated_delay=min(rest),
            work_req_seconds=sum(max(plan.cache_hours * HOUR - s, 0) for s in rest),
            other_results=[name for name in self.jobs if name not in told])

    def take(self, task, now):
        """Download the input of a task and put it in the queue of the next free processor."""
        try:
            given = json.loads(plugged("file_content")[-1]("download", task.input["name"]))
        except FileNotFoundError:
            self.world.watch.broken(f"{task.name} was sent and its input is missing [S4-32]")
        k = self.free.index(min(self.free))
        start = max(self.free[k], now)
        pace = 1 / (PYTHON_SPEED * self.speed * self.rng.uniform(0.8, 1.2))
        job = Job(task, given, k, start, max(int(task.rsc_fpops_est * pace), 1), self.temper.delay)
        self.free[k] = start + job.seconds
        return job

    def finish(self, now, full):
        """Upload what is done; return the reports."""
        done = [job for job in self.jobs.values() if job.ready <= now]
        if not done or self.world.faults.disk_full:
            return []  # An upload that the server could not take is tried again later.
        # The server takes the outputs of some only, as its routes have it: what is under way, or
        # was given up. A clone may have sent it, or the task is over.
        names = [job.task.name for job in done]
        wanted = {name for name, in db.execute_sql(
            f"SELECT name FROM result WHERE name IN ({', '.join('?' * len(names))}) "
            f"AND (server_state = 4 OR outcome = 4)", names)}
        for job in done:
            if job.report is None:
                job.report, answer = self.compute(job, full)
                if answer is not None and job.task.name in wanted:
                    self.upload(job.task.output["name"], answer)
        return [job.report for job in done]

    def upload(self, name, answer):
        """Put an output where the server keeps small ones; every fourth as if it were large."""
        if self.number % 4 == 0:
            file_path("upload", name).write_bytes(answer)
        else:
            with self.world.faults.spared():
                plugged("keep_file")[-1]("upload", name, answer)

    def compute(self, job, full):
        """Return the report of a job, and its output if one is uploaded, as the temper has it."""
        temper, name, failure = self.temper, job.task.name, None
        if full:
            failure = Report(name, 3, 196, stderr_out="no space left on device")
        elif self.chance(temper.crash):
            failure = Report(name, 3, 195, stderr_out="crashed")
        elif self.chance(temper.quit):
            failure = Report(name, 6, 203)
        if failure:
            job.seconds = int(job.seconds * FAILED_SHARE)
        self.world.watch.spent[name] += job.seconds
        if failure:
            return failure, None
        answer = json.dumps(self.world.answer(job.task, job.given, self)).encode()
        if self.chance(temper.garbage):
            answer = b"{garbage"
        if self.chance(temper.forget):
            answer = None
        seconds = self.rng.choice(WRONG_TIMES) if temper.clock else job.seconds
        return Report(name, 5, 0, elapsed_time=seconds, cpu_time=seconds), answer

    def drop(self, names, now):
        """Forget jobs; what was computed of those that are not done was in vain."""
        for name in names:
            job = self.jobs.pop(name, None)
            if job is None or job.report:
                continue
            self.world.watch.spent[name] += min(max(now - job.start, 0), job.seconds)
            self.free[job.processor] = max(
                [other.start + other.seconds for other in self.jobs.values()
                 if other.processor == job.processor], default=now)

    def leave(self, now):
        """Go for good, with all that is here."""
        self.drop(list(self.jobs), now)
        self.world.gone += 1

    def rest(self, now, reply):
        """Return when to ask again: when half of the tasks are done; ever later without any."""
        self.idle = 0 if self.jobs else min(self.idle + 1, IDLE_DOUBLINGS)
        at = now + IDLE_SECONDS * 2 ** self.idle
        if self.jobs:
            at = max(int(statistics.median_low(job.ready for job in self.jobs.values())), now + 60)
            at = min(at, now + DAY)  # A hoarder asks, too.
        if reply.request_delay > HOUR:  # refused
            at = max(at, now + int(reply.request_delay))
        if self.chance(self.temper.vanish):
            at += self.rng.randrange(DAY, 3 * DAY)
        if self.temper.asleep and not 8 * HOUR <= at % DAY < 22 * HOUR:
            at += (8 * HOUR - at) % DAY
        return at
