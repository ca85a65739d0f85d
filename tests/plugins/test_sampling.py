"""X-Com's sampling: whose task is handed out once more, after what wait, in what order.

Waits are computed from what hosts have reported, so most tests first let hosts report: `measured()`
makes a host that needs so many seconds for a unit and so many for what comes and goes.
"""

import contextlib
import heapq
import json
import random
import sys

import make
import pytest
from conftest import NOTES
from make import DAY, NOW, Client

import minigrid as m

O, S = m.Outcome, m.ServerState
sampling = sys.modules["minigrid_plugin_sampling"] if "minigrid_plugin_sampling" in sys.modules \
    else None
PLAIN = '''
min_quorum = 1
delay_bound = 86400
max_total_results = 10
{constants}

def workunit(i):
    return {{"input": i, **({more})}} if i < {n} else None

def compute(input):
    return input
'''


@pytest.fixture(autouse=True)
def the_plugin(plugins):
    global sampling
    sampling = sys.modules["minigrid_plugin_sampling"]


def app_text(constants="", n=100, more="{}"):
    return PLAIN.format(constants=constants, n=n, more=more)


@contextlib.contextmanager
def grid_of(folder, constants="", n=100, more="{}", **settings):
    """A project with one application of quorum 1, which has n portions, and no waits."""
    with make.project(folder, {"a": app_text(constants, n, more)},
                      **{**dict(stock=5, min_sendwork_interval=0), **settings}) as project:
        assert list(m.apps) == ["a"], project.errors
        yield m.apps["a"]


def pass_at(now):
    m.run_pass(now)
    assert m.project.errors == []


def back(client, name, elapsed, sent=NOW, wait=0, answer="1"):
    """Report a task after so many seconds of computing and so many of all else."""
    make.output(name).write_text(answer)
    told = m.Report(name, 5, 0, elapsed_time=elapsed)
    return client.ask(sent + int(elapsed + wait), reports=[told])


def measured(key, elapsed, wait=0, now=NOW, answer="1"):
    """A host that has reported one task."""
    client = Client(key)
    (name,) = client.fetch(now)
    back(client, name, elapsed, now, wait, answer)
    return client


def handout(name):
    return sampling.Handout.get_or_none(result=make.result(name).id)


def holders(number):
    """The hosts that hold or held copies of a workunit, in order."""
    return [r.host_id for r in make.copies() if r.workunit.number == number]


# ---- The whole: a batch with hosts that vanish ----------------------------------------------


class Batch:
    """Hosts of various speeds work on a batch; some vanish with what they hold."""

    def __init__(self, hosts, vanish, seed):
        self.rng, self.now = random.Random(seed), NOW
        self.clients = [Client(f"user {n}") for n in range(hosts)]
        self.speeds = [self.rng.uniform(0.5, 2) for _ in self.clients]
        self.until = {n: self.rng.randrange(1, 5) for n in self.rng.sample(range(hosts), vanish)}
        self.jobs = {n: [] for n in range(hosts)}
        self.idle = dict.fromkeys(range(hosts), 60)  # s until the next request, longer each time
        self.events = [(NOW + n, n) for n in range(hosts)]

    def run(self, n, app):
        """Run until n workunits are assimilated; return the seconds that took, and all copies."""
        passed = 0
        while True:
            self.now, number = heapq.heappop(self.events)
            assert self.now < NOW + 5 * DAY, "no end"
            self.visit(number)
            if self.now - passed < 60:
                continue  # A real server passes each second; here that would only take longer.
            pass_at(passed := self.now)
            done = m.Workunit.select().where(m.Workunit.assimilate_state == 2).count()
            if done == n:
                return self.now - NOW, m.Result.select().where(m.Result.sent_time > 0).count()

    def visit(self, number):
        client, jobs = self.clients[number], self.jobs[number]
        for name, _ in jobs:
            make.output(name).write_text("1")
        reply = client.ask(self.now, work_req_seconds=1, reports=[
            m.Report(name, 5, 0, elapsed_time=took) for name, took in jobs])
        jobs[:] = [(a.name, 600 / self.speeds[number] * self.rng.uniform(0.8, 1.25))
                   for a in reply.assignments]
        if jobs and number in self.until:
            self.until[number] -= 1
            if not self.until[number]:
                return  # never seen again
        self.idle[number] = 60 if jobs else min(2 * self.idle[number], 14400)
        later = sum(took for _, took in jobs) + 20 if jobs else self.idle[number]
        heapq.heappush(self.events, (self.now + int(later), number))


def batch(folder, constants, seed):
    with grid_of(folder, constants, n=300, stock=50) as app:
        return Batch(hosts=40, vanish=4, seed=seed).run(300, app)


@pytest.mark.parametrize("seed", [1])
def test_a_batch_ends_in_half_the_time_with_few_extra_copies(folder, monkeypatch, seed):
    """[C38 S3-03 S3-13] Learned waits against a fixed deadline of one day; 10 % of hosts vanish."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    slow, copies = batch(folder, "", seed)
    fast, more = batch(folder, 'dispatch = "xcom3"', seed)
    NOTES.append(f"sampling, seed {seed}: deadline {slow} s, {copies} copies of 300; "
                 f"learned waits {fast} s, {more} copies")
    print(NOTES[-1])
    assert fast <= slow / 2
    assert more - 300 < 0.15 * 300


# ---- What an application says ---------------------------------------------------------------

REFUSED = {  # constants -> what the message says
    'dispatch = "xcom4"': "dispatch: must be one of 'boinc', 'xcom1', 'xcom2', 'xcom3'; found",
    "k_wait = 4.0": "k_wait_dead (4) must be greater than k_wait (4)",
    "k_wait = 3\nk_wait_dead = 2.5": "k_wait_dead (2.5) must be greater than k_wait (3)",
    "k_wait = 0": "k_wait: must be a number above 0; found 0",
    "k_wait = float('inf')": "k_wait: must be a number above 0",
    "window = -1": "window: must be a whole number",
    "window = 1.5": "window: must be a whole number",
    "in_order = 1": "in_order: must be True or False",
}


@pytest.mark.parametrize("constants", REFUSED)
def test_what_cannot_work_is_refused_at_the_start(folder, constants):
    """[S3-20 D6 D8] k_wait_dead must be greater than k_wait."""
    with make.project(folder, {"a": app_text(constants)}) as project:
        assert m.apps == {} and REFUSED[constants] in project.errors[0][1]


def test_constants_have_defaults(folder):
    with grid_of(folder) as app:
        assert {k: app.policies[k] for k in sampling.CONSTANTS} == dict(
            dispatch="boinc", k_wait=2, k_wait_dead=4, window=0, in_order=False)
    with grid_of(folder, 'dispatch = "xcom1"') as app:
        assert app.policies["window"] == 1000


# ---- Waits ------------------------------------------------------------------------------------


def test_the_wait_is_what_the_node_has_needed_times_k_wait(folder):
    """[S3-08 S3-09 S3-10 S3-11 S3-13 S3-19] size / bandwidth + complexity x unit, x K."""
    with grid_of(folder, 'dispatch = "xcom3"\nk_wait = 3\nk_wait_dead = 7',
                 more='{"complexity": 5.0, "input": "x" * 18, "files": {"more": b"y" * 30}} if i '
                      'else {"complexity": 4.0}'):
        pass_at(NOW)
        ann = measured("ann", 100, wait=50)  # complexity 4, 1 byte in and 1 byte out
        figures = sampling.node_figures([ann.hostid, 99])
        assert figures == {99: {}, ann.hostid: {"a": dict(
            seconds_per_unit=25, bandwidth=2 / 50, reports=1)}}
        (name,) = ann.fetch(NOW + 1000)  # complexity 5, 20 and 30 bytes in
        row = handout(name)
        assert row.wait_until == NOW + 1000 + 3 * (50 / (2 / 50) + 5 * 25) == row.due
        assert row.dead_after == 7 * (1250 + 125) and not row.guessed


def test_figures_are_running_averages(folder):
    """[S3-09 S3-12 S3-13] The second report weighs a half, later ones 0.3; complexity is 1."""
    with grid_of(folder, 'dispatch = "xcom1"'):
        pass_at(NOW)
        ann = Client("ann")
        for elapsed, wanted in ((100, 100), (200, 150), (50, 150 - 100 / 3), (50, None)):
            (name,) = ann.fetch(NOW)
            back(ann, name, elapsed, wait=10)
            found = sampling.node_figures([ann.hostid])[ann.hostid]["a"]["seconds_per_unit"]
            assert found == pytest.approx(wanted or (150 - 100 / 3) * 0.7 + 50 * 0.3)


def test_a_new_node_starts_with_the_median_and_nobody_with_the_deadline(folder):
    """[S3-13] The median over all nodes; before there is one, no early copies."""
    with grid_of(folder, 'dispatch = "xcom3"'):
        pass_at(NOW)
        first, new = Client("first"), Client("new")
        (early,) = first.fetch(NOW)
        assert (handout(early).wait_until, handout(early).due) == (None, m.NEVER)
        measured("b", 10, wait=1, now=NOW + 30)
        for n, elapsed in enumerate((100, 300)):
            measured(f"c{n}", elapsed, wait=2, now=NOW + 50)
        assert handout(early).due == m.NEVER
        pass_at(NOW + 400)  # Now who was given his task before gets a wait, too.
        assert handout(early).due == handout(early).wait_until == NOW + 2 * (100 + 1)
        (name,) = new.fetch(NOW + 400)
        assert make.result(name).workunit_id == make.result(early).workunit_id  # it is late


@pytest.mark.parametrize("elapsed, early", [(499, True), (501, False)])
def test_nobody_waits_beyond_the_deadline(folder, elapsed, early):
    """[C38 C22] wait <= delay_bound, without the grace; then the deadline alone decides."""
    with grid_of(folder, 'dispatch = "xcom3"', more='{"delay_bound": 1000}',
                 report_grace_period=500):
        pass_at(NOW)
        ann = measured("ann", elapsed, wait=0)
        (name,) = ann.fetch(NOW + 600)
        row = handout(name)
        assert row.wait_until <= NOW + 1600 == make.result(name).report_deadline - 500
        assert (row.due < m.NEVER) == early


@pytest.mark.parametrize("k_wait, again", [(1.5, True), (2.4, True), (2.6, False), (3.9, False)])
def test_a_larger_k_wait_makes_a_second_node_less_likely(folder, k_wait, again):
    """[S3-14] A node that takes 2.5 times as long as it should: does another get its task?"""
    with grid_of(folder, f'dispatch = "xcom3"\nk_wait = {k_wait}'):
        pass_at(NOW)
        ann = measured("ann", 100, wait=0)
        (name,) = ann.fetch(NOW + 200)
        (given,) = Client("bob").fetch(NOW + 200 + 250)
        assert (make.result(given).workunit_id == make.result(name).workunit_id) == again


@pytest.mark.parametrize("k_wait, size", [(1.5, 5), (3.5, 9)])
def test_a_larger_k_wait_makes_a_larger_window(folder, k_wait, size):
    """[S3-15] The window grows for as long as the task that another holds is awaited."""
    with grid_of(folder, f'dispatch = "xcom3"\nk_wait = {k_wait}', stock=50) as app:
        pass_at(NOW)
        lost = measured("lost", 100, wait=0)
        lost.fetch(NOW + 200)  # and is never heard of again
        swift = Client("swift")
        for n in range(10):  # A task each 50 s, until the lost one is among them.
            (name,) = swift.fetch(NOW + 200 + 50 * n)
            if make.result(name).workunit.number == 1:
                break
            make.output(name).write_text("1")
            swift.ask(NOW + 200 + 50 * n, reports=[m.Report(name, 5, 0, elapsed_time=0)])
            pass_at(NOW + 201 + 50 * n)
        assert sampling.window_of(app)["size"] == size


# ---- Variants ---------------------------------------------------------------------------------


def late_task(constants, folder, n=100, **more):
    """A project where host 1, measured at 100 s, took a task at NOW + 200; its name."""
    stack = contextlib.ExitStack()
    stack.enter_context(grid_of(folder, constants, n, **more))
    pass_at(NOW)
    ann = measured("ann", 100, wait=0)
    pass_at(NOW + 150)
    (name,) = ann.fetch(NOW + 200)
    return stack, ann, name, handout(name).wait_until


def test_variant_3_hands_over_as_soon_as_the_wait_is_over(folder):
    """[S3-03 S3-04 S3-05 S3-06 C38] Before new portions, at the second, never cancelling."""
    stack, ann, name, until = late_task('dispatch = "xcom3"', folder)
    with stack:
        bob, eve = Client("bob"), Client("eve")
        assert bob.fetch(until - 1) == ["a_2_0"]  # One second early: something new.
        assert bob.fetch(until) == ["a_1_1"]
        first, extra = make.result(name), make.result("a_1_1")
        assert (first.server_state, first.outcome) == (S.IN_PROGRESS, O.INIT)
        assert first.report_deadline == NOW + 200 + DAY
        assert (extra.server_state, extra.host_id) == (S.IN_PROGRESS, bob.hostid)
        assert m.Workunit.get(number=1).target_nresults == 1
        assert eve.fetch(until) == ["a_3_0"]  # It is awaited from bob now,
        assert Client("kim").fetch(until + 61) == ["a_4_0"]  # for as long as he may take.
        assert "hand over" in {f.rule for f in m.Firing.select()}
        back(bob, "a_1_1", 10, until)
        pass_at(until + 20)
        back(ann, name, 300, NOW + 200)  # The late answer serves as a check, and is stored once.
        pass_at(until + 1000)
        assert {r.validate_state for r in make.copies() if r.workunit.number == 1} == {1}
        lines = (m.project.data / "results" / "a.jsonl").read_text().splitlines()
        assert [json.loads(line)["number"] for line in lines].count(1) == 1


def test_the_asking_node_never_gets_what_it_has(folder):
    """[S3-07] Nor does another host of its user where that is the rule."""
    stack, ann, name, until = late_task('dispatch = "xcom3"', folder)
    with stack:
        assert ann.fetch(until) == ["a_2_0"]
        make.settings(one_result_per_user_per_wu=True)
        assert Client("ann").fetch(until) == ["a_3_0"]
        make.settings(one_result_per_user_per_wu=False)
        assert Client("ann").fetch(until) == ["a_1_1"]


def test_no_copy_beyond_max_total_results(folder):
    """[S3-06] One more would end the workunit."""
    limit = '{"max_total_results": 1, "max_success_results": 1}'
    stack, ann, name, until = late_task('dispatch = "xcom3"', folder, more=limit)
    with stack:
        assert Client("bob").fetch(until) == ["a_2_0"]
        assert handout(name).due == m.NEVER  # Nobody looks at it again.


NEEDS = {  # changes of the workunit, its copies -> is one more wanted?
    "S3-03 its only node is late": ({}, "late", True),
    "nobody is late": ({}, "in time", False),
    "S3-06 another has it, too": ({}, "late, in time", False),
    "another will have it": ({}, "late, unsent", False),
    "two are wanted, one is late": (dict(target_nresults=2), "late, in time", True),
    "two are wanted, one is back": (dict(target_nresults=2), "late, good", True),
    "two are wanted, one is back, one in time": (
        dict(target_nresults=2), "late, in time, good", False),
    "what was wrong does not count": ({}, "late, wrong", True),
    "S3-06 it was answered": (dict(canonical_resultid=9), "late", False),
    "it was given up": (dict(error_mask=m.ErrorMask.CANCELLED), "late", False),
    "T9 nothing is to be made": (dict(transitioner_flags=2), "late", False),
    "the limit is reached": (dict(max_total_results=2), "late, lost", False),
    "one below the limit": (dict(max_total_results=3), "late, lost", True),
    "a policy's own question": (dict(number=None), "late", False),
    "it ended just now, in the same commit": ({}, "failed", False),
}
COPIES = {"late": make.sent, "failed": make.error, "in time": make.sent, "unsent": make.unsent,
          "good": make.success, "lost": make.lost,
          "wrong": lambda: make.success(m.ValidateState.INVALID)}


@pytest.mark.parametrize("case", NEEDS)
def test_when_an_extra_copy_is_wanted(folder, case):
    changes, kinds, wanted = NEEDS[case]
    with grid_of(folder, 'dispatch = "xcom3"') as app:
        unit = make.wu(**{**dict(app=app.id, min_quorum=1, target_nresults=1), **changes})
        results = make.numbered(unit, [COPIES[kind]() for kind in kinds.split(", ")])
        for r, kind in zip(results, kinds.split(", ")):
            if kind in ("late", "failed", "in time"):
                until = NOW + (kind == "in time")
                sampling.Handout.insert(
                    result=r.id, workunit=unit.id, app=app.id, host=r.id, size=1, complexity=1,
                    sent_time=NOW - 900, bound=1000, guessed=False, wait_until=until,
                    dead_after=9, due=until).execute()
        extra = sampling.extra_copy(unit, results, NOW)
        assert (extra is not None) == wanted
        assert not wanted or extra.name == f"unit_7_{len(results)}"


def test_a_late_task_that_fails_while_another_host_asks(folder):
    """One commit may hold both; the second request must not suffer from it."""
    stack, ann, name, until = late_task('dispatch = "xcom3"', folder)
    with stack:
        bob = Client("bob")
        assert m.project.write(lambda: (ann.report(name, None, until), bob.fetch(until))[1]) \
            == ["a_2_0"]
        pass_at(until + 1)
        assert make.result("a_1_1").server_state == S.UNSENT  # as after any error


def test_what_is_left_for_others_is_not_nothing(folder):
    """[S3-01 S3-02] A portion that this host cannot do comes before others' tasks all the same."""
    big = '{"rsc_memory_bound": 8e9} if i else {}'
    with grid_of(folder, 'dispatch = "xcom2"', n=2, more=big):
        pass_at(NOW)
        ann, bob = Client("ann"), Client("bob")
        assert ann.fetch(NOW + 1, host=dict(m_nbytes=1e9)) == ["a_0_0"]
        assert bob.fetch(NOW + 2, host=dict(m_nbytes=1e9)) == []
        assert Client("eve").fetch(NOW + 3, host=dict(m_nbytes=9e9)) == ["a_1_0"]
        assert bob.fetch(NOW + 4, host=dict(m_nbytes=1e9)) == ["a_0_1"]


def test_variant_2_does_not_wait_for_who_has_given_up(folder):
    """[S3-02] The second node fails: the next one that asks gets the task at once."""
    with grid_of(folder, 'dispatch = "xcom2"', n=1):
        pass_at(NOW)
        ann, bob = Client("ann"), Client("bob")
        assert ann.fetch(NOW + 1) == ["a_0_0"] and bob.fetch(NOW + 2) == ["a_0_1"]
        bob.report("a_0_1", None, NOW + 3)
        pass_at(NOW + 4)
        assert Client("eve").fetch(NOW + 5) == ["a_0_2"]


def test_boincs_dispatch_hands_nothing_over(folder):
    """[S3-01 S3-03] Nor is anything kept for it: neither table nor figures of its hosts."""
    with grid_of(folder, n=2) as app:
        pass_at(NOW)
        ann = measured("ann", 100)
        pass_at(NOW + 150)
        assert ann.fetch(NOW + 200) == ["a_1_0"]
        assert Client("bob").fetch(NOW + 10000) == []
        assert [table.select().count() for table in sampling.TABLES] == [0, 0, 0, 0]
        assert sampling.window_of(app) is None


def test_variant_2_takes_all_portions_then_the_oldest_first(folder):
    """[S3-02 S3-07] What was just handed over goes to the end; a node's state does not matter."""
    with grid_of(folder, 'dispatch = "xcom2"', n=2, stock=2):
        pass_at(NOW)
        ann, bob, eve, joe = (Client(name) for name in ("ann", "bob", "eve", "joe"))
        assert ann.fetch(NOW + 1) == ["a_0_0"]
        assert bob.fetch(NOW + 2) == ["a_1_0"]
        assert eve.fetch(NOW + 2) == []  # Nobody knows yet whether there will be more.
        pass_at(NOW + 3)
        assert eve.fetch(NOW + 3) == ["a_0_1"]
        assert joe.fetch(NOW + 4) == ["a_1_1"]
        assert Client("kim").fetch(NOW + 5) == ["a_0_2"]
        assert bob.fetch(NOW + 6) == ["a_0_3"]


def test_variant_1_waits_for_the_mark(folder):
    """[S3-01 S3-18 S3-19 S3-21 S3-22] All portions first, then only what inactive nodes hold."""
    stack, ann, name, until = late_task('dispatch = "xcom1"', folder, n=3)
    with stack:
        bob, limit = Client("bob"), NOW + 200 + int(handout(name).dead_after)
        assert bob.fetch(limit) == ["a_2_0"]
        pass_at(limit)  # At the limit, not beyond it.
        assert sampling.node_states([ann.hostid, bob.hostid]) == {1: True, bob.hostid: True}
        assert Client("eve").fetch(limit + 1) == []
        pass_at(limit + 59)  # Not more than once a minute.
        assert sampling.node_states([ann.hostid]) == {ann.hostid: True}
        before = make.result(name).__data__
        pass_at(limit + 60)
        assert sampling.node_states([ann.hostid, bob.hostid]) == {1: False, bob.hostid: True}
        assert make.result(name).__data__ == before  # Nothing else happens to it [S3-16].
        assert Client("eve").fetch(limit + 61) == ["a_1_1"]
        assert Client("kim").fetch(limit + 125) == []  # Eve is not inactive.
        ann.ask(limit + 126)
        assert sampling.node_states([ann.hostid]) == {ann.hostid: True}
        assert Client("joe").fetch(limit + 200) == []


def test_variant_1_does_not_take_from_who_came_back(folder):
    """[S3-01 S3-22] Marked, and heard of again before anybody asked."""
    stack, ann, name, until = late_task('dispatch = "xcom1"', folder, n=2)
    with stack:
        pass_at(NOW + 5000)
        assert sampling.node_states([ann.hostid]) == {ann.hostid: False}
        ann.ask(NOW + 5001)
        assert Client("bob").fetch(NOW + 5002) == []


# ---- The table of current computations -------------------------------------------------------


def test_the_table_holds_what_is_in_nodes_hands(folder):
    """[S3-18] A report, an error, a deadline: each takes its row away."""
    with grid_of(folder, 'dispatch = "xcom1"'):
        pass_at(NOW)
        clients = [Client(f"c{n}") for n in range(4)]
        names = [client.fetch(NOW)[0] for client in clients]
        assert sampling.Handout.select().count() == 4
        back(clients[0], names[0], 5)
        clients[1].report(names[1], None, NOW + 5)
        assert {row.host for row in sampling.Handout.select()} == {c.hostid for c in clients[2:]}
        pass_at(NOW + DAY + 1)
        assert sampling.Handout.select().count() == 0


def test_a_node_may_be_silent_for_as_long_as_its_longest_task_takes(folder):
    """[S3-19 S3-21]"""
    with grid_of(folder, 'dispatch = "xcom1"\nk_wait_dead = 5',
                 more='{"complexity": 9.0} if i == 1 else {}'):
        pass_at(NOW)
        ann = measured("ann", 100, wait=0)
        ann.ask(NOW + 200, work_req_seconds=9, cpu_req_instances=2, host=dict(p_ncpus=2))
        limits = [row.dead_after for row in sampling.Handout.select()]
        assert len(limits) == 2 and min(limits) < 600 < 4500 < max(limits)
        pass_at(NOW + 200 + 4500)
        assert sampling.node_states([ann.hostid]) == {ann.hostid: True}
        pass_at(NOW + 200 + 4600)
        assert sampling.node_states([ann.hostid]) == {ann.hostid: False}


def test_a_spot_check_is_in_the_table_like_any_other_task(folder):
    """[S3-18 C36] Under its own number, or its row would stay for ever, and its node be marked."""
    voted = 'dispatch = "xcom3"\nvalidation = "recheck"\nrecheck = 2\nspot_checks = 1.0'
    with make.project(folder, {"a": app_text(voted).replace("min_quorum = 1\n", "")}, stock=5,
                      min_sendwork_interval=0) as project:
        assert not project.errors
        pass_at(NOW)
        for key in ("ann", "bob"):
            measured(key, 10)
        for later in range(20, 24):
            pass_at(NOW + later)
        eve = Client("eve")
        (name,) = eve.fetch(NOW + 30)
        assert name == "a_0_2" and handout(name).host == eve.hostid
        back(eve, name, 10, NOW + 30)
        assert sampling.Handout.select().count() == 0


# ---- The window and the order -----------------------------------------------------------------


def test_the_window_is_bounded_behind_the_oldest_missing_answer(folder):
    """[S3-15] Others' answers open nothing while the oldest is missing."""
    with grid_of(folder, "window = 3") as app:
        pass_at(NOW)
        assert app.hooks and [wu.number for wu in make.units()] == [0, 1, 2]
        clients = [Client(f"c{n}") for n in range(3)]
        names = [client.fetch(NOW + 1)[0] for client in clients]
        assert sampling.window_of(app) == dict(oldest_missing=0, size=3, bound=3)
        for client, name in list(zip(clients, names))[1:]:
            back(client, name, 5, NOW + 1)
        pass_at(NOW + 10)
        pass_at(NOW + 11)
        assert len(make.units()) == 3
        back(clients[0], names[0], 5, NOW + 1)
        pass_at(NOW + 20)
        pass_at(NOW + 21)
        assert [wu.number for wu in make.units()] == [0, 1, 2, 3, 4, 5]
        assert sampling.window_of(app) == dict(oldest_missing=3, size=0, bound=3)


def test_a_portion_that_failed_is_not_missing(folder):
    """[S3-15] It will never be answered: the window goes on behind it."""
    with grid_of(folder, "window = 2", more='{"max_error_results": 0}') as app:
        pass_at(NOW)
        ann = Client("ann")
        ann.report(ann.fetch(NOW + 1)[0], None, NOW + 2)
        pass_at(NOW + 3)
        pass_at(NOW + 4)
        assert sampling.window_of(app)["oldest_missing"] == 1
        assert [wu.number for wu in make.units()] == [0, 1, 2]


def test_a_smaller_window_holds_for_what_was_made_before(folder):
    with grid_of(folder, "window = 5") as app:
        pass_at(NOW)
        app.policies["window"] = 2
        pass_at(NOW + 1)
        bob = Client("bob")
        reply = bob.ask(NOW + 2, work_req_seconds=9, cpu_req_instances=9, host=dict(p_ncpus=9))
        assert [a.name for a in reply.assignments] == ["a_0_0", "a_1_0"]
        assert bob.fetch(NOW + 3) == [] and "window of 2" in bob.host().why_no_work


ORDERED = "in_order = True\n\ndef assimilate(workunit, answer):\n" \
          "    if (workunit.folder / f'{workunit.number} fails').exists():\n" \
          "        raise RuntimeError('no')\n" \
          "    if (workunit.folder / f'{workunit.number} later').exists():\n" \
          "        return 'defer'\n" \
          "    return answer\n"


def told():
    path = m.project.data / "results" / "a.jsonl"
    return [json.loads(line)["number"] for line in path.read_text().splitlines()] \
        if path.exists() else []


@pytest.mark.parametrize("trouble", ["", "1 fails", "1 later"])
def test_answers_come_in_order(folder, trouble):
    """What is missing, failing or deferred keeps its place, and all others wait behind it."""
    with grid_of(folder, ORDERED, n=4):
        pass_at(NOW)
        clients = [Client(f"c{n}") for n in range(4)]
        names = [client.fetch(NOW)[0] for client in clients]
        for n in (3, 1, 2):
            back(clients[n], names[n], 5)
        m.run_pass(NOW + 10)
        assert told() == []
        waits = {unit.number: [text for more in m.plugged("waits_for")
                               for text in more(unit, [], NOW)] for unit in make.units()}
        assert waits[0] == [] and waits[3] == ["its application takes answers in their order, and "
                                               "that of a_0 is missing"]
        note = m.project.data / "results" / trouble if trouble else None
        if note:
            note.write_text("")
        back(clients[0], names[0], 5)
        m.run_pass(NOW + 20)
        m.run_pass(NOW + 30)
        assert told() == ([0] if trouble else [0, 1, 2, 3])
        if note:
            note.unlink()
            for later in range(3):
                m.run_pass(NOW + 7 * 3600 + later)
            assert told() == [0, 1, 2, 3]


def test_failures_keep_their_place(folder):
    with grid_of(folder, ORDERED, n=2, more='{"max_error_results": 0}'):
        pass_at(NOW)
        ann, bob = Client("ann"), Client("bob")
        (first,), (second,) = ann.fetch(NOW), bob.fetch(NOW)
        back(bob, second, 5)
        ann.report(first, None, NOW + 6)
        pass_at(NOW + 7)
        pass_at(NOW + 8)
        assert told() == [0, 1]


def fetch(path):
    """GET an address of the open project; return (status, headers, body)."""
    found = {}
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path.partition("?")[0],
               "QUERY_STRING": path.partition("?")[2], "wsgi.input": None,
               "wsgi.errors": sys.stderr, "SERVER_NAME": "x", "SERVER_PORT": "80",
               "wsgi.url_scheme": "http"}
    body = b"".join(m.make_app(lambda: NOW)(environ, lambda status, headers, *_: found.update(
        status=int(status[:3]), headers=dict(headers))))
    return found["status"], found["headers"], body


def test_answers_can_be_followed(folder, monkeypatch):
    with grid_of(folder):
        assert fetch("/answers/a")[0::2] == (200, b"")
        lines = [b'{"n":%d}\n' % n for n in range(2500)]
        m.append_exactly(m.project.data / "results" / "a.jsonl", b"".join(lines))
        with open(m.project.data / "results" / "a.jsonl", "ab") as file:
            file.write(b"not committed\n")
        monkeypatch.setattr(sampling, "ANSWER_BYTES", 100)
        status, headers, body = fetch("/answers/a?from=2100")
        assert headers["Content-Type"].startswith("application/x-ndjson")
        count = body.count(b"\n")
        assert body == b"".join(lines[2100:2100 + count]) and 100 <= len(body) < 120
        assert headers["Next-From"] == str(2100 + count)
        assert fetch("/answers/a?from=2499")[2] == lines[-1]
        for first in (2500, 9999):
            assert fetch(f"/answers/a?from={first}")[2] == b""
            assert fetch(f"/answers/a?from={first}")[1]["Next-From"] == str(first)
        assert fetch("/answers/nothing")[0] == 404
        assert fetch("/answers/a?from=-1")[0] == fetch("/answers/a?from=x")[0] == 400


def test_only_an_applications_own_answers_are_given_away(folder):
    with grid_of(folder):
        results = m.project.data / "results"
        m.append_exactly(results / "a.jsonl", b"{}\n")
        m.append_exactly(results / "b.jsonl", b"no application's\n")
        (m.project.data / "wrong").mkdir(exist_ok=True)
        (m.project.data / "wrong" / "a.wrong.jsonl").write_text("hush")
        (results / "a.txt").write_text("hush")
        assert fetch("/answers/a")[2] == b"{}\n"
        for name in ("b", "a.jsonl", "a.txt", "../results/a", "../wrong/a.wrong", "..", "", "A",
                     "a/", "a\0", "x" * 5000, "' OR 1=1 --"):
            status, _, body = fetch(f"/answers/{name}")
            assert status == 404 and b"hush" not in body and len(body) < 300, name
        for first in ("", "1e3", "9" * 16, "0x1", "+1", " 1", "-0"):
            status, _, body = fetch(f"/answers/a?from={first}")
            assert status == 400 and len(body) < 150, first
        assert m.project.counts["server errors"] == 0


def test_a_reply_with_answers_is_bounded(folder):
    """About a megabyte; a line that is longer comes alone, and nobody has to wait for ever."""
    with grid_of(folder):
        small, large = b"[%s]\n" % (b"1" * 100_000), b"[%s]\n" % (b"2" * 3_000_000)
        m.append_exactly(m.project.data / "results" / "a.jsonl", small * 15 + large + small)
        first, sizes = 0, []
        while body := fetch(f"/answers/a?from={first}")[2]:
            sizes.append(body.count(b"\n"))
            assert len(body) <= max(sampling.ANSWER_BYTES + len(small), len(large) + 4 * len(small))
            first += sizes[-1]
        assert (first, sizes) == (17, [11, 5, 1])


def test_answers_can_be_kept_private(folder, monkeypatch):
    """[C36] Else a spot check could be answered by looking it up."""
    status = sys.modules["minigrid_plugin_status"]
    with grid_of(folder) as app:
        m.append_exactly(m.project.data / "results" / "a.jsonl", b"hush\n")
        monkeypatch.setattr(m, "read_settings", lambda path, kind=m.Settings, *more, **given: kind(
            **dict(public_results=False) if kind is status.StatusSettings else given))
        for path in ("/answers/a", "/results/a.jsonl"):
            code, _, body = fetch(path)
            assert code == 403 and b"public_results" in body and b"hush" not in body
        assert status.status(NOW)["files"] == [] and app.name == "a"


# ---- Repeats for reliable hosts ----------------------------------------------------------------


@pytest.fixture
def reliable(monkeypatch):
    dispatch = sys.modules["minigrid_plugin_dispatch"]
    monkeypatch.setattr(dispatch, "settings", dispatch.DispatchSettings(
        reliable_max_avg_turnaround=500, reliable_head_start=1000))
    return dispatch


@pytest.mark.parametrize("rate, turnaround, after, given", [
    (0.04, 400, 0, True), (0.06, 400, 0, False), (0.04, 600, 0, False), (None, 400, 0, False),
    (0.06, 400, 999, False), (0.06, 400, 1000, True)])
def test_repeats_go_to_reliable_hosts_first(folder, reliable, rate, turnaround, after, given):
    """[T10] A fast host with few errors gets a repeat at once, with half the time; others later."""
    with grid_of(folder, n=1):
        pass_at(NOW)
        ann, bob = Client("ann"), Client("bob")
        ann.report(ann.fetch(NOW)[0], None, NOW + 1)
        pass_at(NOW + 5)
        bob.ask(NOW + 5)
        m.Host.update(avg_turnaround=turnaround).where(m.Host.id == bob.hostid).execute()
        if rate is not None:
            reliable.Reputation.create(host=bob.hostid, error_rate=rate)
        assert bob.fetch(NOW + 5 + after) == ["a_0_1"] * given
        if given:
            r = make.result("a_0_1")
            assert r.report_deadline - r.sent_time == (DAY if after else DAY // 2)
        else:
            assert "kept for" in bob.host().why_no_work


def test_a_deadline_that_it_could_not_keep_is_not_shortened(folder, reliable):
    """[T10] Half the usual time is enough for who is fast enough."""
    with grid_of(folder, n=1, more='{"rsc_fpops_est": 5e10}'):
        pass_at(NOW)
        ann, bob = Client("ann"), Client("bob")
        ann.report(ann.fetch(NOW)[0], None, NOW + 1)
        pass_at(NOW + 5)
        bob.ask(NOW + 5)
        m.Host.update(avg_turnaround=400).where(m.Host.id == bob.hostid).execute()
        reliable.Reputation.create(host=bob.hostid, error_rate=0)
        assert bob.fetch(NOW + 5, host=dict(p_fpops=1e6)) == ["a_0_1"]  # 50,000 s
        assert make.result("a_0_1").report_deadline == NOW + 5 + DAY


ENDS = {  # rule, exit status -> the share of errors, 0.1 before
    ("valid", 0): 0.095, ("invalid", 0): 0.145, ("wrong", 0): 0.145,
    ("unreadable output", 0): 0.145, ("report error", 1): 0.145, ("report error late", 1): 0.145,
    ("time out", 0): 0.145, ("report success", 0): None, ("not needed: decided", 0): None,
    ("report error", 202): None,  # We have told it to stop.
}


@pytest.mark.parametrize("case", ENDS)
def test_what_counts_for_reputation(folder, reliable, case):
    name, status = case
    with grid_of(folder):
        r = make.row(id=1, host=7, exit_status=status)
        m.project.write(lambda: reliable.at_commit([(m.RULES[name], r), ("why", r)], NOW))
        assert {row.host: row.error_rate for row in reliable.Reputation.select()} == (
            {7: pytest.approx(ENDS[case])} if ENDS[case] else {})


def test_reputation_is_learned(folder, reliable):
    """Each result weighs 1/20, as in BOINC; a new host begins with 0.1."""
    with grid_of(folder):
        pass_at(NOW)
        ann = measured("ann", 5)
        pass_at(NOW + 10)
        assert reliable.Reputation.get().error_rate == pytest.approx(0.095)
        ann.report(ann.fetch(NOW + 20)[0], None, NOW + 21)
        assert reliable.Reputation.get().error_rate == pytest.approx(0.095 * 0.95 + 0.05)
