"""Days on a virtual clock: volunteers of every temper against the real schedule() and run_pass().

The world is a function of its seed. All along the store and its files must be sound; at the end
everything must be settled, nothing assimilated twice, no file left, and every rule must have fired,
or else the world was too tame to prove anything.
"""

import contextlib
import gzip
import heapq
import json
import random
from collections import Counter

import pytest

import minigrid as m

START = 1_800_000_000
HOUR, DAY = 3600, 86400
UNREACHABLE = {"consensus after the end", "fail: nothing to assimilate"}  # see the tables

SUMS = '''
min_quorum = 2
target_nresults = 3
max_error_results = 2
max_success_results = 5
max_total_results = 8
delay_bound = 6 * 3600


def workunit(i):
    tight = {0: {"max_error_results": 0}, 1: {"max_total_results": 4, "max_success_results": 4}}
    return {"input": i, "priority": i % 3, **tight.get(i % 6, {})} if i < 60 else None


def compute(input):
    return input * input


def parse(output):
    if not isinstance(output, int):
        raise ValueError("not a number")
    return output


def assimilate(workunit, answer):
    first = workunit.name not in asked
    asked.add(workunit.name)
    return "defer" if first and workunit.number % 5 == 0 and answer is not None else answer


asked = set()
'''
DICE = '''
"""dice: no two answers agree."""
max_success_results = 4
delay_bound = 6 * 3600


def workunit(i):
    return {"input": i} if i < 4 else None


def compute(input):
    return "dice"
'''
HUGE = '''
"""huge: no computer has the memory for it."""
rsc_memory_bound = 1e15


def workunit(i):
    return {"input": i} if i < 2 else None


def compute(input):
    return input
'''
TEMPERS = ["honest"] * 5 + ["liar"] * 2 + [
    "crasher", "garbler", "vanisher", "late", "late crasher", "quitter", "forgetter", "detacher"]


class Volunteer:
    """A simulated host: asks, computes by its temper, reports."""

    def __init__(self, world, number, temper):
        self.world, self.rng, self.temper = world, world.rng, temper
        (register,) = m.plugged("register")
        self.user = m.project.write(lambda: register(world.now, f"{temper} {number}"))
        self.cpid, self.hostid, self.seqno, self.jobs = f"cpid{number}", 0, 0, {}

    def visit(self, now):
        """One request; returns the time of the next."""
        if self.temper == "detacher" and self.rng.random() < 0.1:
            self.hostid, self.seqno, self.jobs = 0, 0, {}
        done = [job for job, ready in self.jobs.values() if ready <= now]
        reports = [report for job in done if (report := self.finish(job))]
        told = {report.name for report in reports}
        reply = m.project.write(lambda: m.schedule(m.Request(
            self.user.authenticator, hostid=self.hostid, rpc_seqno=self.seqno, host_cpid=self.cpid,
            host={"p_fpops": 1e9, "m_nbytes": 8e9}, work_req_seconds=1, cpu_req_instances=2,
            reports=reports, other_results=[name for name in self.jobs if name not in told]), now))
        self.seqno, self.hostid = self.seqno + 1, reply.hostid
        if self.rng.random() < 0.05:  # The reply is lost: work that came with it is forgotten,
            return now + HOUR         # and what was reported is reported again.
        for name in (*reply.acks, *reply.aborts):
            self.jobs.pop(name, None)
        for job in reply.assignments:
            slow = {"late": 9 * HOUR, "late crasher": 9 * HOUR, "vanisher": 1000 * DAY}.get(
                self.temper, 0)
            self.jobs.setdefault(job.name, (job, now + slow + self.rng.randrange(HOUR, 2 * HOUR)))
        return now + self.rng.randrange(HOUR, 3 * HOUR)

    def finish(self, job):
        """Compute a job as the temper has it; return its report."""
        given = json.loads(m.file_path("download", job.input["name"]).read_bytes()) \
            if m.file_path("download", job.input["name"]).exists() else 0
        answer = given * given if job.app == "sums" else self.rng.random()
        wild = self.rng.random() < 0.7
        if wild and self.temper in ("crasher", "late crasher"):
            return m.Report(job.name, 3, 195, stderr_out="crashed")
        if wild and self.temper == "quitter":
            return m.Report(job.name, 6, 203)
        if wild and self.temper == "liar":
            answer = given * given + self.rng.randrange(1, 10**9)  # on its own, not with others
        if wild and self.temper == "garbler":
            answer = "garbage"
        if not (wild and self.temper == "forgetter"):
            m.file_path("upload", job.output["name"]).write_text(json.dumps(answer))
        return m.Report(job.name, 5, 0, elapsed_time=60)


class World:
    """A project, its volunteers, and a clock that jumps from event to event."""

    def __init__(self, seed, tmp_path):
        self.rng, self.now = random.Random(seed), START
        for name, text in (("sums", SUMS), ("dice", DICE), ("huge", HUGE)):
            (tmp_path / f"{name}.py").write_text(text)
        m.open_project(m.Settings(
            data=str(tmp_path / "data"), stock=20, report_grace_period=600, delete_delay=2 * HOUR,
            purge_delay=12 * HOUR, infeasible_max=5, min_sendwork_interval=0), self.rng)
        m.db.execute_sql("PRAGMA synchronous = OFF")
        assert m.sync_apps([tmp_path], self.now) == []
        self.rules = Counter()
        self.volunteers = [Volunteer(self, n, temper) for n, temper in enumerate(TEMPERS)]
        self.events = [(self.now + n, n) for n in range(len(TEMPERS))]

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
        """The next visit, and a pass a second after it."""
        at, number = heapq.heappop(self.events)
        self.now = max(at, self.now)
        heapq.heappush(self.events, (self.volunteers[number].visit(self.now), number))
        self.now += 1
        with self.trouble():
            m.run_pass(self.now)

    @contextlib.contextmanager
    def trouble(self):
        """Now and then an output cannot be read or deleted for the length of a pass."""
        waiting = "outcome = 1 AND validate_state IN (0, 4)"
        undecided = {name for name, in m.db.execute_sql(
            f"SELECT name FROM result WHERE {waiting} AND workunit_id IN (SELECT workunit_id "
            f"FROM result WHERE {waiting} GROUP BY workunit_id HAVING count(*) > 2)")}
        freed = {name for name, in m.db.execute_sql(
            "SELECT r.name FROM result r JOIN workunit w ON w.id = r.workunit_id "
            "WHERE w.assimilate_state = 2 AND r.file_delete_state = 0")}
        paths = [path for name in sorted(undecided or freed)
                 if (path := m.file_path("upload", f"{name}_out")).is_file()]
        if not paths or not undecided and self.rng.random() < 0.5:
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


@pytest.fixture(params=[1, 2])
def world(request, tmp_path):
    """A world with all its life behind it."""
    print(f"seed {request.param}")
    world = World(request.param, tmp_path)
    world.live(days=40)
    yield world
    m.close_project()


def test_a_world_settles_and_every_rule_has_fired(world):
    fired = {row.rule for row in m.Firing.select()}
    assert set(m.RULES) - fired == UNREACHABLE
    assert m.project.counts["stage errors"] == 0

    # Each workunit was assimilated once [S4-31 C23], and its line says what came out [S4-29].
    made = {"sums": 60, "dice": 4, "huge": 2}
    for app, n in made.items():
        path = m.project.data / "results" / f"{app}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(line["number"] for line in lines) == list(range(n))
        for line in lines:
            assert line["answer"] is not None or line["errors"]  # there may be both [S2-36]
            if app == "sums" and line["answer"] is not None:
                assert line["answer"] == line["number"] ** 2
            if app == "huge":
                assert line["errors"] == ["COULDNT_SEND_RESULT"]

    # Nothing is left but the archive [S4-30 S4-32 S4-61 S4-62].
    for folder in ("upload", "download"):
        left = [p.name for p in (m.project.data / folder).glob("*/*")
                if p.suffix not in (".py", ".sh", ".cmd")]  # of the applications
        assert left == []
    archived = [json.loads(line) for path in (m.project.data / "archive").glob("*.gz")
                for line in gzip.open(path, "rt")]
    assert Counter(wu["name"].split("_")[0] for wu in archived) == made
    for wu in archived:
        hosts = [r["host"] for r in wu["results"] if r["host"]]
        assert len(hosts) == len(set(hosts)) and len(wu["results"]) <= wu["max_total_results"]
        assert {r["server_state"] for r in wu["results"]} <= {5}
        assert len({r["granted_credit"] for r in wu["results"] if r["validate_state"] == 1}) <= 1
        assert wu["canonical_resultid"] or wu["error_mask"]

    # Credit is what was granted, to the last result.
    granted = Counter()
    for wu in archived:
        for r in wu["results"]:
            granted[r["user"]] += r["granted_credit"]
    for user in m.User.select():
        assert user.total_credit == pytest.approx(granted[user.id])


def test_a_second_pass_at_the_same_time_changes_nothing(tmp_path):
    world = World(3, tmp_path)
    for _ in range(60):
        world.event()
        m.run_pass(world.now)  # What a pass freed from trouble may still do.
        before = list(m.db.connection().iterdump())
        m.run_pass(world.now)
        assert list(m.db.connection().iterdump()) == before
    m.close_project()


def test_a_world_is_a_function_of_its_seed(tmp_path):
    histories = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        world = World(4, tmp_path / name)
        for _ in range(60):
            world.event()
        histories.append(list(m.db.connection().iterdump()))
        m.close_project()
    assert histories[0] == histories[1]
