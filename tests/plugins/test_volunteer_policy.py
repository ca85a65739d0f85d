"""The volunteer's policy: pure code over a clock, as tables; the rules are S1-01 to S1-37, C24-C35.

No sockets, no processes, no files (but where a test takes `server`): the transport is a function
that answers or fails. What the policy does in a month is in test_volunteer_month.py.
"""

import json
import math
import random
import types

import pytest
from volunteer_world import (HIGH, LOW, NOW, C, assignment, converse, drive, ended, limits,
                             make_client, open_job, project, reply, v)

WEEK = 7 * 86400

# ---- Delays ------------------------------------------------------------------

BACKOFF = {1: (60, 120), 2: (120, 240), 3: (240, 480), 7: (3840, 7680), 8: (7200, 14400),
           9: (7200, 14400), 500: (7200, 14400)}


@pytest.mark.parametrize("n", BACKOFF)
def test_backoff_bounds(n):
    """[C30 S1-04 S1-37]: doubling, with a random factor."""
    low, high = BACKOFF[n]
    assert v.backoff(n, LOW) == low
    assert v.backoff(n, HIGH) == pytest.approx(high, rel=1e-4)
    assert len({v.backoff(n, random.Random(seed)) for seed in range(9)}) == 9


IDLE = {  # n, request_delay, rng -> seconds
    "at once about a second": (1, 0, HIGH, 1), "doubling": (4, 0, HIGH, 8),
    "a minute at most": (40, 0, HIGH, 60), "spread": (40, 0, LOW, 30),
    "the server's wish is the least": (1, 20, HIGH, 20), "even beyond a minute": (9, 90, LOW, 90),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_delay(case):
    n, delay, rng, seconds = IDLE[case]
    assert v.idle_delay(n, delay, rng) == pytest.approx(seconds, rel=1e-4)


def take(p, answer, asks=False, n_new=0):
    request = v.Request([], work_req_seconds=1.0 if asks else 0.0)
    v.take_reply(p, v.State([p], "c"), answer, request, n_new, NOW, NOW, HIGH)
    return p


def next_request(p, bounds, now):
    """What the policy says to a single project; None: nothing now."""
    action = v.SchedulerOp(LOW).poll([p], bounds, now)
    return action and action.request


def test_request_delay_is_applied_after_the_reset():
    """[S1-13 S1-23 C28]"""
    p = take(project(n_rpc_failures=4, min_rpc_time=NOW + 5000), reply(request_delay=60))
    assert (p.n_rpc_failures, p.min_rpc_time) == (0, NOW + 60)
    assert next_request(p, limits(), NOW + 59.9) is None
    assert next_request(p, limits(), NOW + 60) is not None  # [C27]


def test_no_delay_asked_means_at_once():
    """[C35]"""
    assert take(project(min_rpc_time=NOW + 5000), reply()).min_rpc_time == 0


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), -5, "60", None, True, 1e300])
def test_nonsense_as_delay_is_ignored(delay):
    assert take(project(), reply(request_delay=delay)).min_rpc_time == 0


def test_failures_back_off():
    """[S1-24 S1-25 C25]"""
    p = project()
    for n, (low, high) in ((1, (60, 120)), (2, (120, 240)), (3, (240, 480))):
        v.take_failure(p, NOW, random.Random(n))
        assert p.n_rpc_failures == n
        assert low <= p.min_rpc_time - NOW <= high


def test_no_work_holds_up_requests_for_work_only():
    """[C29]"""
    p = project()
    waits = []
    for _ in range(8):
        take(p, reply(), asks=True)
        waits.append(p.work_time - NOW)
    assert waits == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], rel=1e-4)
    assert next_request(p, limits(), NOW) is None
    p.adopt(ended())
    request = next_request(p, limits(), NOW)
    assert [j.name for j in request.reports] == ["r_0"] and not request.asks
    take(p, reply(), asks=True, n_new=1)
    assert (p.n_empty, p.work_time) == (0, 0)


def test_a_request_that_did_not_ask_learns_nothing_about_work():
    assert take(project(), reply(), asks=False).n_empty == 0


def test_the_first_bad_batch_is_forgiven_the_next_ones_are_not():
    """[S1-15]"""
    p = project()
    for _ in range(5):
        v.take_outcome(p, False, NOW, LOW)
    assert p.work_time == 0
    take(p, reply(), asks=True, n_new=3)
    v.take_outcome(p, False, NOW, LOW)
    assert p.work_time == NOW + 60
    take(p, reply(), asks=True, n_new=3)
    v.take_outcome(p, True, NOW, LOW)
    v.take_outcome(p, False, NOW, LOW)
    assert p.work_time == 0


@pytest.mark.parametrize("command_line, wait", [("", 60), ("--invert", 0)])
def test_a_check_that_fails_keeps_nobody_from_work(command_line, wait):
    """[S1-15 S3-31] It is another volunteer's output that is no good; liars must not slow us."""
    p = project(n_bad_batches=1)
    client = types.SimpleNamespace(now=NOW, rng=LOW, retries={}, tasks={},
                                   _drop_files=lambda job: None, _warn=lambda *told: None)
    job = v.Job("r_0", command_line=command_line)
    p.adopt(job)
    v.Client._end(client, job, C.COMPUTE_ERROR, 195, "it failed")
    assert job.over and p.work_time == (NOW + wait if wait else 0)


def test_a_clock_set_back_voids_all_waiting():
    """[C34]"""
    p = project(min_rpc_time=NOW + 9000, work_time=NOW + 9000)
    v.mind_clock(p, NOW, NOW - 59)
    assert p.min_rpc_time == NOW + 9000
    p.avg_time, p.jobs = NOW, []
    p.adopt(ended(at=NOW - 1, stuck_since=NOW - 2))
    v.mind_clock(p, NOW, NOW - 61)
    assert (p.min_rpc_time, p.work_time, p.avg_time) == (0, 0, NOW - 61)
    assert (p.jobs[0].ended_at, p.jobs[0].stuck_since) == (NOW - 61, NOW - 61)


def test_deadlines_are_shifted_to_our_clock():
    """[C34]: a client one hour fast, or slow; the delay of a request counts half."""
    for skew in (3600, -3600):
        p = take(project(open_job(), ended(report_deadline=NOW + 600)),
                 reply(server_time=NOW - skew))
        assert v.local_deadline(p.jobs[0], p) == NOW + 9e4 + skew
        p.jobs[1].report_deadline -= skew  # The server's clock; ten minutes ahead by ours:
        assert not v.is_overdue(p.jobs[1], NOW)  # no false alarm,
        assert v.is_overdue(p.jobs[1], NOW + 541)  # and none missed.
    v.take_reply(p, v.State([p]), reply(server_time=NOW), v.Request([]), 0, NOW - 4, NOW, LOW)
    assert p.clock_offset == 2


def numbers(p, n, state=None):
    state = state or v.State([p], "c")
    return [v.body_of(v.Request([]), p, state, {})["rpc_seqno"] for _ in range(n)]


def test_rpc_seqno_counts_requests_under_a_host_id():
    """[C35]: 0 as long as there is no host id; then one more with each request, answered or not."""
    p = v.Project("http://x")
    assert numbers(p, 3) == [0, 0, 0]
    take(p, reply(hostid=3))
    assert numbers(p, 3) == [1, 2, 3]
    take(p, reply(hostid=3))
    assert numbers(p, 1) == [4]


def test_a_number_is_kept_before_it_is_used(tmp_path, server, clock):
    """Else a client killed just then would use it twice, and be taken for a copy."""
    kept = []
    do_scheduler = server.do_scheduler

    def look_first(h, body, fault):
        kept.append(v.load_state(tmp_path / "client").projects[0].rpc_seqno)
        return do_scheduler(h, body, fault)

    server.do_scheduler = look_first
    server.add(1)
    client = make_client(tmp_path, server, once=True)
    drive(client, clock, client.finished)
    assert len(kept) > 1 and kept == [r["rpc_seqno"] for r in server.requests]


def test_a_new_host_id_starts_the_count_and_parts_from_a_copy():
    p = project(rpc_seqno=17)
    state = v.State([p], "c")
    v.take_reply(p, state, reply(hostid=8), v.Request([]), 0, NOW, NOW, HIGH)
    assert (p.hostid, p.rpc_seqno) == (8, 0) and len(state.host_cpid) == 32


WHEN = {  # project, limits, now -> reports, asks? (None: no request)
    "idle: ask": (project(), limits(), NOW, ([], True)),
    "idle, but too soon": (project(min_rpc_time=NOW + 1), limits(), NOW, None),
    "enough queued": (project(open_job()), limits(), NOW, None),
    "queue below the low mark: ask": (project(open_job(est=9e7)), limits(), NOW, ([], True)),
    "one of two processors idle": (project(open_job()), limits(2), NOW, ([], True)),
    "busy: a finished job waits to be bundled": (
        project(open_job(), ended(at=NOW - 0.9)), limits(), NOW, None),
    "for a second": (project(open_job(), ended(at=NOW - 1)), limits(), NOW, (["r_0"], False)),
    "or not at all": (
        project(open_job(), ended()), limits(report_wait=0.0), NOW, (["r_0"], False)),
    "idle: report at once, and ask": (project(ended()), limits(), NOW, (["r_0"], True)),
    "deadline near: report": (
        project(open_job(), ended(), clock_offset=9e4), limits(), NOW, (["r_0"], False)),
    "below the high mark: ask on the side": (
        project(open_job(est=2e8), ended(at=NOW - 1)), limits(), NOW, (["r_0"], True)),
    "leaving: only report": (project(ended()), limits(leaving=True), NOW, (["r_0"], False)),
    "leaving: nothing to say": (project(), limits(leaving=True), NOW, None),
    "no more wanted": (project(), limits(room=0), NOW, None),
    "an upload under way: wait half a second": (
        project(v.Job("u", client_state=C.UPLOADING, ended_at=NOW - 0.4)), limits(), NOW, None),
    "not longer": (
        project(v.Job("u", client_state=C.UPLOADING, ended_at=NOW - 0.6)), limits(), NOW,
        ([], True)),
    "too many held": (project(*[open_job(str(n), est=1) for n in range(32)]), limits(), NOW, None),
}


@pytest.mark.parametrize("case", WHEN)
def test_next_request(case):
    """[S1-01 S1-03 S1-06 S1-18 S1-33 S1-36]"""
    p, bounds, now, wanted = WHEN[case]
    request = next_request(p, bounds, now)
    assert (request and ([j.name for j in request.reports], request.asks)) == wanted


def test_how_much_is_asked_for():
    request = next_request(project(open_job(est=2e8)), limits(4), NOW)
    assert (request.work_req_seconds, request.cpu_req_instances) == (4 * 30 - 20, 3)
    assert request.estimated_delay == 5
    for correction in (0.01, 100):  # In real seconds: the server has learnt as much as we have.
        learned = project(correction=correction, typical=10)
        assert next_request(learned, limits(), NOW).work_req_seconds == 30
    slow = project(correction=4, typical=0.1)  # Jobs of 0.4 s, and not more of them than are held.
    assert next_request(slow, limits(), NOW).work_req_seconds == pytest.approx(32 * 0.4)
    few = next_request(project(typical=10), limits(4, room=2), NOW)
    assert (few.work_req_seconds, few.cpu_req_instances) == (20, 2)


def test_a_server_that_asks_for_calm_gets_it():
    assert v.water_marks(project(), limits()) == (10, 30)
    assert v.water_marks(project(request_delay=60), limits()) == (120, 360)


def test_what_does_not_fit_is_reported_later_and_listed_as_held():
    p = project(*[ended("r_%d" % n, stderr_out="x" * 65536) for n in range(9)])
    request = next_request(p, limits(), NOW)
    body = v.body_of(request, p, v.State([p], "c"), {})
    told = [r["name"] for r in body["reports"]]
    assert 1 <= len(told) < 9 and told + body["other_results"] == [j.name for j in p.jobs]


# ---- Shares ------------------------------------------------------------------

FADING = {0: 1, WEEK: 0.36788, 2 * WEEK: 0.13534, WEEK / 2: 0.60653, -5: 1}  # seconds: what is left


@pytest.mark.parametrize("seconds", FADING)
def test_the_average_fades_by_a_factor_of_e_per_week(seconds):
    """[S1-07 S1-08 C24]"""
    p = project(exp_avg_cpu=1000.0, avg_time=NOW)
    assert v.faded(p, NOW + seconds) == pytest.approx(1000 * FADING[seconds], rel=1e-4)
    v.devote(p, 50, NOW + max(0, seconds))
    assert p.exp_avg_cpu == pytest.approx(1000 * FADING[seconds] + 50, rel=1e-4)
    assert p.avg_time == NOW + max(0, seconds)


def shared(share, given=0.0, **more):
    return project(resource_share=share, exp_avg_cpu=given, avg_time=NOW,
                   url="http://p%g-%g" % (share, given), **more)


RANKS = {  # projects, the one owed most first
    "share over average": [shared(4, 100), shared(2, 90), shared(1, 50)],  # [S1-09 S1-10]
    "never served is infinite": [shared(1), shared(1000, 1e-9)],  # [C24 C35]
    "ties by share": [shared(3), shared(2), shared(1)],
    "share 0 is last, even if never served": [shared(1, 1e9), shared(0)],
    "those of share 0 take turns": [shared(0, 10), shared(0, 20)],
}


@pytest.mark.parametrize("case", RANKS)
def test_debt(case):
    ranks = RANKS[case]
    assert sorted(ranks[::-1], key=lambda p: v.resource_debt(p, NOW), reverse=True) == ranks


def test_debt_is_the_quotient():
    """[S1-09]; what runs already counts as given."""
    assert v.resource_debt(shared(4, 100), NOW)[0] == 0.04
    assert v.resource_debt(shared(4, 100), NOW + WEEK)[0] == pytest.approx(0.04 * math.e)
    assert v.resource_debt(shared(4, 100), NOW, 300)[0] == 0.01


ASKED = {  # projects -> which of them is asked for work
    "the greatest debt": ([shared(1, 5), shared(1, 4)], 1),  # [S1-10 S1-21]
    "its time has not come": ([shared(1, 5), shared(1, 4, min_rpc_time=NOW + 1)], 0),  # [S1-11]
    "its time is now": ([shared(1, 5), shared(1, 4, min_rpc_time=NOW)], 1),  # [C27]
    "0 is at once": ([shared(1, 5, min_rpc_time=NOW + 1), shared(1, 6, min_rpc_time=0)], 1),
    "it had no work": ([shared(1, 5), shared(1, 4, work_time=NOW + 1)], 0),  # [C29]
    "not joined": ([shared(1, 5), shared(1, 4, authenticator="")], 0),
    "resting": ([shared(1, 5), shared(1, 4, resting=True)], 0),
    "none may be asked": ([shared(1, 5, min_rpc_time=NOW + 1), shared(1, 4, resting=True)], None),
    "without share, another may be asked": ([shared(1, 5), shared(0)], 0),
    "... or soon": ([shared(1, 5, min_rpc_time=NOW + 60), shared(0)], None),
    "... not soon": ([shared(1, 5, min_rpc_time=NOW + 61), shared(0)], 1),
    "... had nothing": ([shared(1, 5, n_empty=1, work_time=NOW + 1), shared(0)], 1),
    "... is down": ([shared(1, 5, n_rpc_failures=1, min_rpc_time=NOW + 1), shared(0)], 1),
    "... rests": ([shared(1, 5, resting=True), shared(0)], 1),
    "cannot take back what it gave": (
        [shared(1, 5), project(*[v.Job(str(n), client_state=C.UPLOADING) for n in range(32)])], 0),
}


@pytest.mark.parametrize("case", ASKED)
def test_who_is_asked(case):
    """[S1-12 S1-16 C35]"""
    projects, wanted = ASKED[case]
    found = v.next_for_work(projects, limits(), NOW)
    assert found is (None if wanted is None else projects[wanted])


def test_a_fatal_project_is_left_alone():
    p = shared(1)
    p.fatal, p.fetch_master = "its key is wrong", True
    p.adopt(ended())
    assert converse([p], lambda action: []) == []


def job_of(share, given, name, seconds, deadline=9e4, **more):
    job = open_job(name, est=seconds * 1e7, report_deadline=NOW + deadline, **more)
    shared(share, given).adopt(job)
    return job


NEXT = {  # jobs that are ready, processors -> the one to start
    "greatest debt": ([job_of(1, 5, "a", 9), job_of(1, 4, "b", 9)], 1, "b"),
    "among equals as they came": (
        [job_of(1, 5, "a", 9, 8e4, received=2), job_of(1, 5, "b", 9, received=1)], 1, "b"),
    "would be late behind all others": (
        [job_of(1, 5, "a", 600, 1000), job_of(9, 4, "b", 600, 9e3)], 1, "a"),
    "would not": ([job_of(1, 5, "a", 600, 1900), job_of(9, 4, "b", 600, 9e3)], 1, "b"),
    "two processors halve that": (
        [job_of(1, 5, "a", 600, 1300), job_of(9, 4, "b", 600, 9e3)], 2, "b"),
    "half of its time is over": (
        [job_of(1, 5, "a", 9, 4e4, delay_bound=9e4), job_of(9, 4, "b", 9)], 1, "a"),
    "not yet": (
        [job_of(1, 5, "a", 9, 5e4, delay_bound=9e4), job_of(9, 4, "b", 9)], 1, "b"),
    "of two that are urgent the earlier": (
        [job_of(9, 4, "a", 600, 900), job_of(1, 5, "b", 600, 800)], 1, "b"),
    "nothing": ([], 1, None),
}


@pytest.mark.parametrize("case", NEXT)
def test_next_job(case):
    """[S1-06 S1-10]"""
    ready, n_cpus, wanted = NEXT[case]
    job = v.next_job(ready, [], limits(n_cpus), NOW)
    assert (job and job.name) == wanted


def test_what_runs_counts_as_given():
    running, same, other = (job_of(1, 50, "a", 9), job_of(1, 50, "b", 9), job_of(1, 55, "c", 9))
    same.project = running.project
    assert v.next_job([same, other], [], limits(2), NOW) is same
    assert v.next_job([same, other], [running], limits(2), NOW) is other
    running.elapsed_time = 8.0
    assert v.next_job([same, other], [running], limits(2), NOW) is same


# ---- The queue ---------------------------------------------------------------

LOADS = {  # processors, jobs -> seconds until each has nothing to do
    "nothing": (2, [], [0, 0]),
    "side by side": (2, [open_job(est=3e7), open_job(est=5e7)], [3, 5]),
    "the third goes where it is free first": (
        2, [open_job(est=n * 1e7) for n in (3, 5, 4)], [5, 7]),
    "what has begun comes first": (
        2, [open_job(est=1e7), open_job(est=5e7), open_job(est=9e7, slot=0)], [6, 9]),
    "one for all processors": (4, [open_job(est=3e7, ncpus=4)], [3, 3, 3, 3]),
    "for more than there are": (2, [open_job(est=3e7, ncpus=9)], [3, 3]),
    "waits until enough are free": (
        3, [open_job(est=3e7), open_job(est=2e7, ncpus=3)], [5, 5, 5]),
    "a part of one": (2, [open_job(est=3e7, ncpus=0.2)], [0, 3]),
    "nearly done is not idle": (
        1, [open_job(elapsed_time=50.0, fraction_done=1.0)], [1e-6]),
    "finished ones take none": (1, [ended()], [0]),
}


@pytest.mark.parametrize("case", LOADS)
def test_the_queue_is_measured_in_time(case):
    """[S1-36 C33]"""
    n_cpus, jobs, loads = LOADS[case]
    queue = v.queue_of([project(*jobs)], limits(n_cpus))
    assert sorted(queue.loads) == pytest.approx(loads)
    assert queue.idle == loads.count(0)
    assert queue.missing(6) == pytest.approx(sum(max(0, 6 - load) for load in loads))


ROOM = {  # projects -> how many more jobs
    "empty": ([project()], 32),
    "held": ([project(open_job("a"), open_job("b"))], 30),
    "of a resting project": ([project(*map(open_job, "abc"), resting=True), project()], 32),
    "waiting for an upload": ([project(v.Job("a", client_state=C.UPLOADING)), project()], 32),
}


@pytest.mark.parametrize("case", ROOM)
def test_room(case):
    """Neither an outage of one project nor one that rests keeps the others from giving work."""
    assert v.queue_of(ROOM[case][0], limits()).room == ROOM[case][1]


MARKS = {  # project, limits -> low, high
    "quick": (project(), limits(), (10, 30)),
    "as the server's delay says": (project(request_delay=60), limits(), (120, 360)),
    "within reason": (project(request_delay=WEEK), limits(), (8 * 3600, 24 * 3600)),
    "as the user says": (project(request_delay=60), limits(low_water=5, high_water=7), (5, 7)),
    "high is not below low": (project(), limits(low_water=9, high_water=7), (9, 9)),
    "no queue without a share": (project(resource_share=0), limits(low_water=9), (0, 0)),
}


@pytest.mark.parametrize("case", MARKS)
def test_water_marks(case):
    """[S1-20 S1-33 C33]: times, not numbers of jobs."""
    p, bounds, wanted = MARKS[case]
    assert v.water_marks(p, bounds) == wanted


LATER = {  # a finished job -> how long it waits for others
    "a short one": (ended(elapsed_time=5.0), limits(), 1),
    "one of an hour": (ended(elapsed_time=3600.0), limits(), 360),
    "one of a day": (ended(elapsed_time=86400.0), limits(), 600),
    "--report-at-once": (ended(elapsed_time=3600.0), limits(report_wait=0.0), 0),
}


@pytest.mark.parametrize("case", LATER)
def test_reports_are_bundled(case):
    """[S1-03]"""
    job, bounds, wanted = LATER[case]
    assert v.report_wait(job, bounds) == wanted


# ---- Sessions ----------------------------------------------------------------


def named(name, **more):
    return project(url="http://" + name, **more)


def test_one_thing_at_a_time():
    """[S1-17 S1-19 S1-32]"""
    a, b = named("a"), named("b", resource_share=50)
    b.adopt(ended(report_deadline=NOW))  # overdue
    op = v.SchedulerOp(LOW)
    first = op.poll([a, b], limits(), NOW)
    assert first.project is a
    assert op.poll([a, b], limits(), NOW + 9e9) is None
    op.failed(NOW)
    assert op.poll([a, b], limits(), NOW).project is b


def test_get_work_goes_on_until_the_high_mark():
    """[S1-02 S1-18 S1-20]: one job of 10 s at a time, each processor is to have 30 s."""
    a = named("a")
    said = converse([a], lambda action: [open_job(str(len(a.jobs)), est=1e8)], limits(2))
    assert len(said) == len(a.jobs) == 6


def test_get_work_asks_those_owed_most_and_goes_on_to_the_next():
    """[S1-21 C29]: one has no work, one is down, one has a single job, one all that is missing."""
    projects = [named(name, resource_share=share)
                for name, share in (("none", 9), ("down", 8), ("one", 7), ("rest", 6), ("no", 5))]

    def answer(action):
        if action.url == "http://down":
            return False
        if action.url == "http://rest":
            assert action.request.work_req_seconds == 30 - 10
            return [open_job("b", est=9e8)]
        return ([open_job("a", est=1e8)], {"request_delay": 5}) if action.url[7:] == "one" else []

    assert [url[7:] for _, url in converse(projects, answer)] == ["none", "down", "one", "rest"]
    assert projects[0].work_time == NOW + 0.5 and projects[1].min_rpc_time == NOW + 60


def test_get_work_ends_when_nobody_has_work():
    """[C29]: though every request succeeds."""
    projects = [named(name) for name in "abc"]
    assert len(converse(projects, lambda action: [])) == 3


def test_jobs_of_no_length_do_not_fill_the_disk():
    a = named("a")
    converse([a], lambda action: [open_job(str(len(a.jobs)), est=1)])
    assert len(a.jobs) == 32


def test_sessions_do_not_bar_each_other():
    """One project asks for calm, and so has a long queue; another is owed more, and has not. The
    reports of both go out, and neither is asked more than it should be."""
    calm, quick = named("calm", request_delay=3600.0, resource_share=1), named("quick")
    quick.adopt(open_job(est=1e9))  # 100 s: above the marks of one, below those of the other
    calm.adopt(ended())
    said = converse([calm, quick], lambda action: [], now=NOW + 2)
    assert said == [("rpc", "http://calm")]
    quick.min_rpc_time, calm.request_delay = NOW + 9, 3600.0
    assert converse([calm, quick], lambda action: ([open_job("x", est=1e13)], {}),
                    now=NOW + 3) == [("rpc", "http://calm")]


def test_a_project_without_share_fills_idle_processors_only():
    z = named("z", resource_share=0)
    sizes = []

    def answer(action):
        sizes.append((action.request.work_req_seconds, action.request.cpu_req_instances))
        return [open_job(str(n), est=1e7) for n in range(action.request.cpu_req_instances)]

    converse([z], answer, limits(3))
    assert sizes == [(1, 3)] and len(z.jobs) == 3


def test_addresses_are_tried_in_turn():
    """[S1-22 S1-23]: up to the first that answers; it is the first from then on."""
    a = named("a", addresses=["http://a1", "http://a2", "http://a3"], n_rpc_failures=4)
    said = converse([a], lambda action: action.url == "http://a2" and [open_job()])
    assert said == [("rpc", "http://a1"), ("rpc", "http://a2")]
    assert a.addresses == ["http://a2", "http://a1", "http://a3"]
    assert (a.n_rpc_failures, a.min_rpc_time) == (0, 0)


def test_addresses_left_are_those_of_the_same_project():
    """[S1-22]: even if another may be asked by then that is owed more."""
    a = named("a", addresses=["http://a1", "http://a2"])
    b = named("b", resource_share=900, min_rpc_time=NOW + 1)
    op = v.SchedulerOp(LOW)
    assert op.poll([a, b], limits(), NOW).url == "http://a1"
    assert op.failed(NOW) is False
    action = op.poll([a, b], limits(), NOW + 2)
    assert (action.project, action.url) == (a, "http://a2")
    assert op.failed(NOW + 2) is True
    assert op.poll([a, b], limits(), NOW + 2).url == "http://b"


@pytest.mark.parametrize("jobs", [[], [ended(at=NOW - 5), open_job()]])
def test_that_all_addresses_fail_is_one_failure(jobs):
    """[S1-14 S1-22 S1-24 S1-25 S1-30 C25 C31]: in both kinds of session."""
    a = named("a", addresses=["http://a1", "http://a2", "http://a3"])
    for job in jobs:
        a.adopt(job)
    assert len(converse([a], lambda action: False)) == 3
    assert (a.n_rpc_failures, a.min_rpc_time) == (1, NOW + 60)
    assert converse([a], lambda action: False, now=NOW + 59) == []


def test_a_refusal_is_not_carried_to_other_addresses():
    a = named("a", addresses=["http://a1", "http://a2"])
    op = v.SchedulerOp(LOW)
    op.poll([a], limits(), NOW)
    assert op.failed(NOW, least=500, final=True)
    assert (a.n_rpc_failures, a.min_rpc_time) == (1, NOW + 500)
    op.poll([a], limits(), NOW + 500)
    op.failed(NOW, least=1e30, final=True)
    assert a.min_rpc_time == NOW + WEEK


@pytest.mark.parametrize("reports", [False, True], ids=["get-work", "report-result"])
def test_every_tenth_failure_reads_the_front_page(reports):
    """[S1-05 S1-26 S1-27 S1-28 S1-31 C26 C31]: in both kinds of session, and then only once; a
    failure there counts as one more; 0 failures are no multiple of ten."""
    a = named("a", addresses=["http://s"])
    a.resting = reports
    if reports:
        a.adopt(ended())
    counts, now, op = [], NOW, v.SchedulerOp(LOW)
    for _ in range(22):
        for kind, _ in converse([a], lambda action: False, now=now, op=op):
            if kind == "master":
                counts.append(a.n_rpc_failures)
        assert not a.fetch_master
        now = a.min_rpc_time
    assert counts == [11, 21]
    assert a.n_rpc_failures == 24


def test_front_pages_are_read_before_the_next_session():
    """[S1-27]"""
    a, b = named("a", n_rpc_failures=9), named("b", resting=True)
    b.adopt(ended())
    assert converse([a, b], lambda action: action.url != "http://a" and []) == [
        ("rpc", "http://a"), ("master", "http://a"), ("rpc", "http://b")]


def test_failures_1_to_25():
    """[C26]: flags after 10 and 20."""
    p, flags = project(), []
    for n in range(1, 26):
        v.take_failure(p, NOW, LOW)
        if p.fetch_master:
            flags.append(n)
            p.fetch_master = False
    assert flags == [10, 20]


def test_a_front_page_that_fails_three_times_waits_for_a_day():
    """[C26 S1-28]"""
    p, waits = project(n_rpc_failures=9), []
    for _ in range(3):
        v.take_failure(p, NOW, LOW, master=True)
        waits.append(p.min_rpc_time - NOW)
        assert not p.fetch_master  # Also at the tenth: it is not read twice.
    assert waits == [7200, 7200, 86400]
    v.take_master(p, ["http://x"])
    v.take_failure(p, NOW, LOW, master=True)
    assert p.min_rpc_time == NOW + 7200


def test_new_addresses_are_tried_at_once():
    """[S1-29]; known ones are not new."""
    a = named("a", n_rpc_failures=9, addresses=["http://old"])

    def answer(action):
        return ["http://old", "http://new"] if action.kind == "master" else (
            action.url == "http://new" and [open_job()])

    said = converse([a], answer)
    assert said == [("rpc", "http://old"), ("master", "http://a"), ("rpc", "http://new")]
    assert (a.n_rpc_failures, a.addresses) == (0, ["http://new", "http://old"])
    b = named("b", n_rpc_failures=9)
    assert converse([b], lambda action: action.kind == "master" and ["http://b"]) == [
        ("rpc", "http://b"), ("master", "http://b")]
    assert (b.n_rpc_failures, b.min_rpc_time) == (10, NOW + 7200)


def test_new_addresses_find_room_among_old_ones():
    p = project(addresses=["http://o%d" % n for n in range(10)])
    v.take_master(p, ["http://new"])
    assert p.addresses[0] == "http://new" and len(p.addresses) == 10


def test_that_the_network_is_down_does_not_count():
    """[C31]: nor does a request that follows; but one address that answers shows it is up."""
    a = named("a", addresses=["http://a1", "http://a2"], n_rpc_failures=9)
    assert len(converse([a], lambda action: "offline")) == 2
    assert (a.n_rpc_failures, a.min_rpc_time, a.fetch_master) == (9, NOW + 60, False)
    later = NOW + 60
    said = converse([a], lambda action: action.url != "http://a1" and "offline", now=later)
    assert a.n_rpc_failures == 10
    assert said[-1] == ("master", "http://a")
    assert a.min_rpc_time == later + 7200 and a.fetch_master  # Its front page is still to be read,
    op = v.SchedulerOp(LOW)
    assert [kind for kind, _ in converse([a], lambda action: "offline", now=later, op=op)] == [
        "master"]
    assert converse([a], lambda action: "offline", now=later + 59, op=op) == []
    assert [kind for kind, _ in converse([a], lambda action: ["http://a1"], now=later + 60, op=op)
            ] == ["master"]  # ... and is, a minute later.
    assert not a.fetch_master


def test_clients_do_not_come_back_in_step_when_the_network_does():
    """[S1-04]"""
    p, times = named("a"), set()
    for seed in range(9):
        p.min_rpc_time, op = 0.0, v.SchedulerOp(random.Random(seed))
        op.poll([p], limits(), NOW)
        op.failed(NOW, network_down=True)
        times.add(p.min_rpc_time)
    assert len(times) == 9 and all(60 <= t - NOW <= 120 for t in times)


def busy(*projects):
    """The same projects, the first with so much work that none is asked for."""
    projects[0].adopt(open_job())
    return list(projects)


def test_overdue_results_are_reported_at_once():
    """[S1-06 S1-34]: the most urgent project first; a request for work comes before."""
    a, b, c = busy(named("a"), named("b"), named("c"))
    b.adopt(ended("b1", report_deadline=NOW + 50))
    c.adopt(ended("c1", report_deadline=NOW + 40))
    c.adopt(ended("c2"))
    reported = []

    def answer(action):
        reported.append([job.name for job in action.request.reports])
        return [open_job("more")] if action.request.asks else []

    assert converse([a, b, c], answer) == [("rpc", "http://c"), ("rpc", "http://b")]
    assert reported == [["c1", "c2"], ["b1"]]
    a.jobs.clear()
    c.jobs.clear()
    b.adopt(ended("b2", report_deadline=NOW))
    assert converse([a, b, c], answer)[0] == ("rpc", "http://a")  # [S1-33]


@pytest.mark.parametrize("share", [200, 50])
def test_a_report_session_asks_only_the_project_owed_most(share):
    """[S1-35]: 10 s are here, which is not below the low mark, and 30 s are the high mark."""
    a, b = named("a", exp_avg_cpu=1.0), named("b", exp_avg_cpu=1.0, resource_share=share)
    a.avg_time = b.avg_time = NOW
    a.adopt(open_job(est=1e8))
    b.adopt(ended(report_deadline=NOW))
    asked = []
    converse([a, b], lambda action: asked.append(action.request.work_req_seconds) or [])
    assert asked[0] == (20 if share == 200 else 0)


def test_a_resting_project_is_reported_to_and_nothing_else():
    a = named("a", resting=True)
    a.adopt(open_job())
    a.adopt(ended())
    said = []
    converse([a], lambda action: said.append(
        ([job.name for job in action.request.reports], action.request.asks)) or [])
    assert said == [(["r_0"], False)]


def test_who_leaves_reports_and_begins_nothing():
    a, b, c = named("a"), named("b", authenticator=""), named("c", fetch_master=True)
    a.adopt(ended())
    asked = []
    said = converse([a, b, c], lambda action: asked.append(action.request.asks) or [],
                    limits(leaving=True))
    assert said == [("rpc", "http://a")] and asked == [False]


def test_joining_fails_like_anything_else():
    """[S1-24 S1-26 C31]"""
    a = named("a", authenticator="", n_rpc_failures=9)
    assert [kind for kind, _ in converse([a], lambda action: False)] == ["join", "master"]
    assert a.n_rpc_failures == 11
    assert [kind for kind, _ in converse([a], lambda action: [open_job()], now=a.min_rpc_time)
            ] == ["join", "rpc"]


def test_bad_estimates_are_learnt_from_within_bounds():
    """Wildly wrong ones neither fetch without end nor starve a processor."""
    p = project()
    for elapsed, wanted in ((1e9, 1e4), (1e-9, 0.7e4 + 3e-5)):
        v.learn(open_job(est=1e7, elapsed_time=elapsed), p, 1e7)
        assert p.correction == pytest.approx(wanted)
    p.typical = 1.0
    request = next_request(p, limits(), NOW)
    assert request.work_req_seconds == 30  # The server has learnt how long its jobs take here.
    assert request.cpu_req_instances == 1


# ---- The client keeps to it --------------------------------------------------


def test_a_transfer_is_given_up_two_weeks_after_its_first_failure(tmp_path, server):
    """[C32]: counted from then, not from the start of the job; success forgets."""
    client = make_client(tmp_path, server)
    job = open_job()
    client.projects[0].adopt(job)
    key, error = ("put", client.projects[0].folder, job.name), v.TransportError(503, "busy")
    for at, goes_on in ((NOW, True), (NOW + 14 * 86400, True), (NOW + 14 * 86400 + 1, False)):
        client.now = at
        assert client._failed_transfer(key, [job], error, False) is goes_on
    assert job.stuck_since == NOW


UNFIT = {"refused": {"platform": "pdp11"}, "too late": {"report_deadline": NOW - 1}}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_jobs_are_not_fetched_without_end(case, tmp_path, server, clock):
    """[S1-15]: although the server asks for no delay, and gives new ones at every request."""
    server.extra = [{"request_delay": 0, "assignments": [
        assignment("wu_%d_0" % n, base=server.url, **UNFIT[case])]} for n in range(500)]
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: clock.now > NOW + 600)
    asked = [r for r in server.requests if r["work_req_seconds"]]
    assert 2 <= len(asked) <= 8


def test_what_the_policy_knows_survives(tmp_path):
    """[S1-11 S1-25 S1-26]: all of it is plain JSON, also where it is infinite or not yet known."""
    a = named("a", n_rpc_failures=7, min_rpc_time=NOW + 5e3, exp_avg_cpu=12.5, avg_time=NOW,
              fetch_master=True, addresses=["http://b"], work_time=NOW + 2, resource_share=0.5)
    a.adopt(open_job(delay_bound=86400.0))
    v.save_state(v.State([a]), tmp_path)
    b, = v.load_state(tmp_path).projects
    assert v.plain_fields(b, jobs=[]) == v.plain_fields(a, jobs=[])
    assert b.jobs[0].delay_bound == 86400
    assert json.loads((tmp_path / "client.json").read_text())["projects"][0]["url"] == "http://a"


def test_what_is_overdue_goes_first():
    """[S1-06 S1-34]: where not all reports fit into one request."""
    p = project(*[ended("r_%d" % n, stderr_out="x" * 65536) for n in range(9)])
    p.jobs[7].report_deadline = NOW
    assert next_request(p, limits(), NOW).reports[0].name == "r_7"


def test_earliest_deadline_first():
    jobs = [v.Job("late", report_deadline=9), v.Job("b", report_deadline=5),
            v.Job("c", report_deadline=5)]
    assert [job.name for job in v.by_deadline(jobs)] == ["b", "c", "late"]
