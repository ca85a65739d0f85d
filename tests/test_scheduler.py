"""The scheduler: who asks, what is reported, what is handed out, and why not."""

import pytest
from make import (DAY, NOW, Client, add, copies, dump, restart, result, settings, states,
                  units)

import minigrid as m

A, E, O, S, V = m.AssimilateState, m.ErrorMask, m.Outcome, m.ServerState, m.ValidateState


def said(reply):
    return "; ".join(message["text"] for message in reply.messages)


def outcomes():
    return [(r.server_state, r.outcome) for r in copies()]


UNSENT, SENT = (S.UNSENT, O.INIT), (S.IN_PROGRESS, O.INIT)
GOOD, ERROR, LOST, DETACHED = ((S.OVER, o) for o in (
    O.SUCCESS, O.CLIENT_ERROR, O.NO_REPLY, O.CLIENT_DETACHED))

# ---- Who asks ------------------------------------------------------------------


def test_new_host_is_made_and_known_again(grid):
    ann = Client("ann")
    assert ann.ask(host=dict(p_ncpus=4, domain_name="kitchen")).hostid == 1
    assert ann.ask(host=dict(p_ncpus=2)).hostid == 1
    host = ann.host()
    assert (host.p_ncpus, host.domain_name, host.rpc_seqno, host.rpc_time) == (2, "kitchen", 1, NOW)
    assert (host.create_time, host.host_cpid, host.user.name) == (NOW, ann.cpid, "ann")


def test_a_host_sets_only_what_is_its_own(grid):
    ann = Client("ann")
    ann.ask(host=dict(total_credit=1e9, id=77, user=9, nonsense=1, p_ncpus=3))
    assert (ann.host().total_credit, ann.host().p_ncpus, ann.host().user_id) == (0, 3, 1)


def test_several_clients_on_one_computer_are_several_hosts(grid):
    first, second = Client("ann", "cpid 1"), Client("ann", "cpid 2")
    computer = dict(host=dict(domain_name="kitchen"), allow_multiple_clients=True)
    assert first.ask(**computer).hostid != second.ask(**computer).hostid
    assert Client("ann", "").ask().hostid == 3  # and one that has no name yet


def test_unknown_key_is_turned_away(grid):
    Client("ann")
    before = dump()
    reply = m.project.write(lambda: m.schedule(m.Request("bob", work_req_seconds=1), NOW))
    assert (reply.hostid, reply.userid, reply.request_delay) == (0, 0, 3600)
    assert "account key" in said(reply) and reply.messages[0]["priority"] == "notice"
    assert dump() == before


def test_another_users_host_id_makes_a_host_of_ones_own(grid):
    ann, bob = Client("ann"), Client("bob")
    ann.ask()
    bob.hostid = ann.hostid
    assert bob.ask(host=dict(domain_name="mine")).hostid == 2
    assert (ann.host().domain_name, bob.host().user.name) == ("", "bob")


def test_an_unknown_host_id_makes_a_new_host(grid):
    ann = Client("ann", hostid=99)
    assert ann.ask().hostid == 1


@pytest.mark.parametrize("seqno, hostid", [(8, 1), (7, 1), (6, 2)])
def test_requests_that_count_backwards_come_from_a_copy(seqno, hostid, grid):
    """A lost reply repeats a number (7); a copied directory goes back (6)."""
    ann = Client("ann")
    ann.ask()
    ann.seqno = 7
    ann.ask()
    ann.seqno = seqno
    assert ann.ask().hostid == hostid
    assert m.Host.get_by_id(hostid).rpc_seqno == (seqno if hostid == 1 else 0)


def test_of_several_copies_the_newest_is_who_comes_back(grid):
    """D-09: a directory that was copied, and now comes without its number."""
    ann = Client("ann")
    ann.ask()
    ann.ask()
    ann.seqno = 0
    assert ann.ask().hostid == 2
    ann.hostid, ann.seqno = 0, 0
    assert ann.ask().hostid == 2


DETACH = {  # id: (what the client says when it comes back without host id, outcome of its result)
    "it lists nothing": (dict(other_results=[]), DETACHED),
    "it does not say": ({}, DETACHED),
    "it lists what it holds": (dict(other_results=["near_0_0"]), SENT),
    "several clients allowed": (dict(allow_multiple_clients=True), SENT),
    "another client": (dict(host_cpid="another"), SENT),
}


@pytest.mark.parametrize("case", DETACH)
def test_detached_host(case, grid):
    """C14."""
    says, outcome = DETACH[case]
    add()
    ann = Client("ann")
    assert ann.fetch() == ["near_0_0"]
    ann.hostid = ann.seqno = 0
    reply = ann.ask(NOW + 5, **says)
    assert outcomes() == [outcome, UNSENT]
    assert reply.hostid == (2 if "host_cpid" in says else 1)
    if outcome == DETACHED:
        assert units()[0].transition_time == copies()[0].received_time == NOW + 5
        assert reply.assignments == []  # What was ended is not sent again.
        ann.report("near_0_0", "5", NOW + 9)  # C11: decided one way
        assert copies()[0].outcome == O.CLIENT_DETACHED


def test_a_detached_host_gets_new_work(grid):
    """What it held is not counted against it, nor given to it again."""
    settings(max_wus_in_progress=1)
    add(number=0), add(number=1)
    ann = Client("ann")
    assert ann.fetch() == ["near_0_0"]
    ann.hostid = ann.seqno = 0
    assert ann.fetch(NOW + 5, other_results=[]) == ["near_1_0"]


def test_a_host_without_id_may_report(grid):
    """What it reports it has not lost: only the rest was."""
    add(number=0), add(number=1)
    ann = Client("ann")
    names = ann.fetch(work_req_seconds=1e6)
    ann.hostid = ann.seqno = 0
    ann.report(names[0], "5", NOW + 5, other_results=[])
    assert outcomes() == [GOOD, UNSENT, DETACHED, UNSENT]
    counts = {f.rule: f.n for f in m.Firing.select()}
    assert (counts["report success"], counts["host detached"]) == (1, 1)


# ---- Reports -------------------------------------------------------------------


def given(*keys):
    """Make one workunit and give a copy to each client; return clients and names."""
    add(min_quorum=len(keys))
    clients = [Client(key) for key in keys]
    return clients, [name for client in clients for name in client.fetch()]


REPORTS = {  # id: (client_state, exit_status, outcome, validate_state)
    "S0-07 uploaded": (5, 0, O.SUCCESS, V.INIT),
    "S4 uploaded, exit status 1": (5, 1, O.CLIENT_ERROR, V.INVALID),
    "S4 not uploaded": (4, 0, O.CLIENT_ERROR, V.INVALID),
    "S0-05 compute error": (3, 1, O.CLIENT_ERROR, V.INVALID),
    "aborted": (6, 203, O.CLIENT_ERROR, V.INVALID),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", REPORTS)
def test_report(case, late, grid):
    """Also after the deadline: C11."""
    client_state, exit_status, outcome, validate_state = REPORTS[case]
    (ann,), (name,) = given("ann")
    now = NOW + 2 * DAY if late else NOW + 5
    if late:
        m.run_pass(now)
        assert result(name).outcome == O.NO_REPLY
    told = m.Report(name, client_state, exit_status, cpu_time=3, elapsed_time=4, stderr_out="help")
    reply = ann.ask(now, reports=[told])
    r, unit = result(name), units()[0]
    assert reply.acks == [name]
    assert (r.server_state, r.outcome, r.validate_state) == (S.OVER, outcome, validate_state)
    assert (r.client_state, r.exit_status, r.received_time) == (client_state, exit_status, now)
    assert (r.cpu_time, r.elapsed_time) == (3, 4)
    assert r.stderr_out == ("" if outcome == O.SUCCESS else "help")
    assert (unit.transition_time, unit.need_validate) == (now, False)  # C12


def test_the_end_of_what_a_job_has_said_is_kept(grid):
    """S2-34: the last lines say why it failed."""
    (ann,), (name,) = given("ann")
    told = m.Report(name, 3, 1, stderr_out="began\n" + "x" * 20000 + "\nTraceback")
    ann.ask(reports=[told])
    kept = result(name).stderr_out
    assert len(kept) == 16384 and kept.endswith("x\nTraceback")


def test_times_are_bounded_by_the_servers_clock(grid):
    """C34."""
    (ann, bob), names = given("ann", "bob")
    for client, name, elapsed in zip((ann, bob), names, (1e9, -5)):
        client.ask(NOW + 7, reports=[m.Report(name, 5, 0, cpu_time=-1, elapsed_time=elapsed)])
    assert states(copies(), "elapsed_time") == [7, 0]
    assert states(copies(), "cpu_time") == [0, 0]


@pytest.mark.parametrize("name", ["near_99_0", "near_1_0", "near_0_1"])
def test_odd_reports_are_acknowledged_and_change_nothing(name, grid):
    """C43: unknown; never sent; in bob's hands."""
    ann, bob = given("ann", "bob")[0]
    add(number=1)
    before = dump()
    assert ann.report(name, "5").acks == [name]
    after = dump()
    assert (after["result"], after["workunit"]) == (before["result"], before["workunit"])
    assert bob.ask(other_results=["near_0_1"]).aborts == []


def test_a_repeated_report_changes_nothing(grid):
    (ann,), (name,) = given("ann")
    ann.report(name, "5", NOW + 1)
    assert ann.report(name, None, NOW + 2).acks == [name]
    r = result(name)
    assert (r.outcome, r.received_time, units()[0].transition_time) == (O.SUCCESS, NOW + 1, NOW + 1)


def test_the_first_of_two_reports_in_one_request_counts(grid):
    (ann,), (name,) = given("ann")
    reply = ann.ask(reports=[m.Report(name, 5, 0), m.Report(name, 3, 1)])
    assert reply.acks == [name, name]
    assert outcomes() == [GOOD]


def test_the_same_users_other_host_may_report(grid):
    """C43."""
    (ann,), (name,) = given("ann")
    laptop = Client("ann")
    laptop.report(name, "5", NOW + 1)
    assert (result(name).outcome, result(name).host_id) == (O.SUCCESS, laptop.hostid)
    assert ann.host().avg_turnaround == 0


def test_the_other_host_gets_no_copy_of_what_it_reports(grid):
    """And the report wakes the workunit, whatever else the request changes."""
    add()
    desktop, laptop = Client("ann"), Client("ann")
    (name,) = desktop.fetch()
    assert laptop.fetch(NOW + 5, reports=[m.Report(name, 5, 0)]) == []
    assert units()[0].transition_time == NOW + 5


@pytest.mark.parametrize("reporter", [0, 1, 2])
def test_reports_of_two_copies_of_one_workunit(reporter, grid):
    """One user's computers may hold both, and one reports both: still not two on one host."""
    add()
    computers = [Client("ann"), Client("ann"), Client("ann")]
    names = [name for client in computers[:2] for name in client.fetch()]
    reply = computers[reporter].ask(NOW + 5, reports=[m.Report(name, 5, 0) for name in names])
    assert reply.acks == names and outcomes() == [GOOD, GOOD]
    assert len({r.host_id for r in copies()}) == 2
    assert units()[0].transition_time == NOW + 5


def test_turnaround_is_an_average(grid):
    """0.3 of the newest, the rest of what was before."""
    ann = Client("ann")
    for number, seconds, average in ((0, 100, 100), (1, 200, 130), (2, 130, 130)):
        add(number=number)
        (name,) = ann.fetch(NOW + 1000 * number)
        ann.report(name, "5", NOW + 1000 * number + seconds)
        assert ann.host().avg_turnaround == pytest.approx(average)


# ---- Quotas and speed ----------------------------------------------------------


QUOTAS = [(8, "e", 7), (2, "e", 1), (1, "e", 1), (8, "s", 10), (5, "s", 10), (4, "s", 8),
          (1, "s", 2), (10, "s", 10), (8, "ess", 10), (50, "e", 9), (0, "s", 2), (8, "ta", 8)]


@pytest.mark.parametrize("before, reports, after", QUOTAS)
def test_quota_shrinks_with_errors_and_grows_with_successes(before, reports, after, grid):
    """By one, down to one; to its double, up to the setting, which may have been lowered."""
    settings(daily_result_quota=10)
    ann = Client("ann")
    for number in range(len(reports)):
        add(number=number)
    names = ann.fetch(work_req_seconds=1e6)
    m.HostAppVersion.update(max_jobs_per_day=before).execute()
    for name, kind in zip(names, reports):
        if kind in "ta":  # ended on our own order, before it had begun or amid its work
            ann.ask(reports=[m.Report(name, client_state=5 + (kind == "a"), exit_status=202)])
        else:
            ann.report(name, "5" if kind == "s" else None)
    assert m.HostAppVersion.get().max_jobs_per_day == after


def test_a_day_has_a_limit_and_an_end(grid):
    settings(daily_result_quota=1)
    ann, morning = Client("ann"), NOW - NOW % DAY
    for number in range(9):
        add(number=number)
    assert len(ann.fetch(morning, work_req_seconds=1e6, host=dict(p_ncpus=2))) == 2
    reply = ann.ask(morning + DAY - 2, work_req_seconds=1)
    assert reply.assignments == [] and "today's 2 tasks" in said(reply)
    assert len(ann.fetch(morning + DAY, work_req_seconds=1e6)) == 2


def test_speed_is_learnt(grid):
    """The average of what was measured; then each new one counts a tenth."""
    ann = Client("ann")
    for number in range(3):
        add(number=number, rsc_fpops_est=100)
    names = ann.fetch(work_req_seconds=1e6)
    for name, seconds in zip(names, (200, 100, 300)):
        ann.ask(NOW + 900, reports=[m.Report(name, 5, 0, elapsed_time=seconds)])
    version = m.HostAppVersion.get()
    assert (version.et_n, version.et_avg) == (3, pytest.approx(2.0))
    m.HostAppVersion.update(et_n=50).execute()
    add(number=3, rsc_fpops_est=100)
    ann.ask(NOW + 990, reports=[m.Report(*ann.fetch(NOW + 950), 5, 0, elapsed_time=0)])
    assert m.HostAppVersion.get().et_avg == pytest.approx(1.8)


# ---- What a host holds ---------------------------------------------------------


def test_lost_results_are_sent_again(grid):
    add(number=0), add(number=1)
    ann = Client("ann")
    names = ann.fetch(work_req_seconds=1e6)
    first = ann.ask(NOW + 5).assignments  # It does not say what it holds.
    again = ann.ask(NOW + 5, other_results=names[:1]).assignments
    assert first == [] and [a.name for a in again] == names[1:]
    assert again[0].report_deadline == NOW + DAY
    assert outcomes() == [SENT, UNSENT] * 2


@pytest.mark.parametrize("change", [
    dict(canonical_resultid=2), dict(error_mask=E.CANCELLED), dict(delay_bound=2 * DAY + 1)])
def test_lost_and_of_no_use_any_more(change, grid):
    """It is given up at once, so that others get it."""
    (ann,), (name,) = given("ann")
    m.Workunit.update(**change).execute()
    reply = ann.ask(NOW + 5, other_results=[])
    assert reply.assignments == [] and name in said(reply)
    m.run_pass(NOW + 6)
    assert result(name).outcome == O.NO_REPLY


@pytest.mark.parametrize("later, again", [(DAY // 2 - 1, True), (DAY // 2, False)])
def test_lost_with_little_time_left(later, again, grid):
    (ann,), (name,) = given("ann")
    assert bool(ann.ask(NOW + later, other_results=[]).assignments) == again


def test_resending_can_be_turned_off_until_a_reply_was_lost(grid):
    """C43: a report that comes twice shows that something went astray."""
    settings(resend_lost_results=False)
    add(number=0), add(number=1)
    ann = Client("ann")
    names = ann.fetch(work_req_seconds=1e6)
    ann.report(names[0], "5")
    assert ann.ask(other_results=[]).assignments == []
    assert [a.name for a in ann.report(names[0], "5", other_results=[]).assignments] == names[1:]


def test_resent_results_count_once(grid):
    settings(max_wus_in_progress=3)
    ann = Client("ann")
    for number in range(2):
        add(number=number)
    names = ann.fetch(work_req_seconds=1e6)
    add(number=2)
    assert len(names) == 2
    assert ann.fetch(NOW + 5, work_req_seconds=1e6, other_results=[]) == [*names, "near_2_0"]


def test_what_is_sent_again_is_enough_if_no_more_is_asked_for(grid):
    for number in range(3):
        add(number=number)
    ann = Client("ann")
    names = ann.fetch()
    assert len(names) == 1 and ann.fetch(NOW + 5, other_results=[]) == names


def test_resent_results_fill_a_reply(grid):
    settings(max_wus_to_send=2)
    for number in range(4):
        add(number=number)
    ann = Client("ann")
    names = ann.fetch(work_req_seconds=1e6)
    assert ann.fetch(NOW + 5, work_req_seconds=1e6, other_results=[]) == names
    more = ann.fetch(NOW + 9, work_req_seconds=1e6, other_results=names[1:])
    assert more == [names[0], "near_2_0"]


def test_what_is_reported_is_not_lost(grid):
    (ann,), (name,) = given("ann")
    assert ann.report(name, "5", other_results=[]).assignments == []


DROPS = {  # id: (what became of the workunit or result, aborted, aborted if not started)
    "C42 still wanted": ({}, {}, [], []),
    "failed, not told yet": (dict(error_mask=1), {}, [], []),
    "decided, not assimilated yet": (dict(canonical_resultid=9), {}, [], []),
    "cancelled": (dict(error_mask=E.CANCELLED | 1), {}, ["near_0_0"], []),
    "assimilated": (dict(assimilate_state=A.DONE), {}, [], ["near_0_0"]),
    "timed out": ({}, dict(server_state=S.OVER, outcome=O.NO_REPLY), [], ["near_0_0"]),
    "somebody else's": ({}, dict(host=2), ["near_0_0"], []),
}


@pytest.mark.parametrize("case", DROPS)
def test_what_to_drop(case, grid):
    unit, result, aborts, aborts_if_not_started = DROPS[case]
    (ann,), (name,) = given("ann")
    Client("bob").ask()
    if unit:
        m.Workunit.update(**unit).execute()
    if result:
        m.Result.update(**result).execute()
    reply = ann.ask(NOW + 5, other_results=[name])
    assert (reply.aborts, reply.aborts_if_not_started) == (aborts, aborts_if_not_started)
    settings(send_result_abort=False)
    reply = ann.ask(NOW + 6, other_results=[name])
    assert (reply.aborts, reply.aborts_if_not_started) == ([], [])


def test_unknown_results_are_dropped(grid):
    assert Client("ann").ask(other_results=["near_7_0"]).aborts == ["near_7_0"]


# ---- Work ----------------------------------------------------------------------


def test_send(grid):
    """S0-03, S0-04, C22: the client is told a deadline, the server waits a little longer."""
    settings(report_grace_period=100)
    add(delay_bound=1000)
    ann = Client("ann")
    reply = ann.ask(work_req_seconds=1)
    r, unit = copies()[0], units()[0]
    assert reply.assignments[0].report_deadline == NOW + 1000
    assert r.report_deadline == unit.transition_time == NOW + 1100
    assert (r.sent_time, r.host_id, r.user_id) == (NOW, ann.hostid, 1)
    assert r.app_version_id == m.AppVersion.get(app=r.app_id).id
    again = ann.ask(NOW + 1, other_results=[]).assignments
    assert again == reply.assignments
    Client("bob").fetch(NOW + 50)
    assert units()[0].transition_time == NOW + 1100  # never later


def test_grace_period_is_over(grid):
    settings(report_grace_period=100)
    add(delay_bound=1000)
    Client("ann").fetch()
    for now, outcome in ((NOW + 1100, O.INIT), (NOW + 1101, O.NO_REPLY)):
        m.run_pass(now)
        assert copies()[0].outcome == outcome


def test_what_is_assigned(grid):
    add("count", 7, rsc_disk_bound=5000)
    (a,) = Client("ann").ask(work_req_seconds=1).assignments
    assert (a.name, a.workunit, a.app) == ("count_7_0", "count_7", "count")
    assert a.input["url"] == "/download/count_7_in" and a.input["nbytes"] == 1
    assert a.output == {"name": "count_7_0_out", "url": "/upload/count_7_0_out",
                        "nbytes_max": 5000}
    assert m.file_path("download", a.files[0]["name"]).read_bytes().startswith(b'"""count')
    settings(upload_bytes_max=100)
    assert Client("bob").ask(work_req_seconds=1).assignments[0].output["nbytes_max"] == 100


def test_one_copy_for_each_host(grid):
    """Also within one request, and after it is over."""
    add(target_nresults=3)
    ann, bob = Client("ann"), Client("bob")
    (name,) = ann.fetch(work_req_seconds=1e6)
    ann.report(name, None)
    assert ann.fetch(NOW + 5) == []
    assert "you have a copy of each" in ann.host().why_no_work
    assert bob.fetch() == ["near_0_1"]
    assert Client("ann").fetch() == ["near_0_2"]  # her other computer


def test_one_copy_for_each_user(grid):
    settings(one_result_per_user_per_wu=True)
    add(target_nresults=3)
    assert len(Client("ann").fetch()) == 1
    assert Client("ann").fetch() == []
    assert len(Client("bob").fetch()) == 1


def test_urgent_ones_first_then_old_ones(grid):
    for number, priority in enumerate((0, 5, 0, 5, -1)):
        add(number=number, priority=priority)
    names = Client("ann").fetch(work_req_seconds=1e6)
    assert names == ["near_1_0", "near_3_0", "near_0_0", "near_2_0", "near_4_0"]


WANTED = [  # (request, number of results given, each estimated at 100 s)
    (dict(work_req_seconds=0), 0), (dict(work_req_seconds=1), 1), (dict(work_req_seconds=100), 1),
    (dict(work_req_seconds=101), 2), (dict(work_req_seconds=1, cpu_req_instances=3), 3),
    (dict(work_req_seconds=1, cpu_req_instances=99), 4), (dict(work_req_seconds=1e9), 8)]


@pytest.mark.parametrize("asked, n", WANTED)
def test_as_much_as_is_asked_for(asked, n, grid):
    for number in range(8):
        add(number=number, rsc_fpops_est=1e11)
    assert len(Client("ann").fetch(**asked, host=dict(p_ncpus=4, p_fpops=1e9))) == n


def test_limits_of_a_request_and_of_a_host(grid):
    settings(max_wus_to_send=2, max_wus_in_progress=3)
    for number in range(9):
        add(number=number)
    ann = Client("ann")
    much = dict(work_req_seconds=1e9, host=dict(p_ncpus=2))
    assert [len(ann.fetch(NOW + 9 * k, **much)) for k in range(3)] == [4, 2, 0]
    assert "you hold 6 tasks, the limit here" in ann.host().why_no_work
    ann.report("near_0_0", "5")
    assert len(ann.fetch(NOW + 99, **much)) == 1


def test_not_too_often(grid):
    settings(min_sendwork_interval=10, request_delay=3)
    for number in range(3):
        add(number=number)
    ann = Client("ann")
    assert len(ann.fetch()) == 1
    reply = ann.ask(NOW + 8, work_req_seconds=1)
    assert (reply.assignments, reply.request_delay) == ([], 3) and "too recent" in said(reply)
    assert ann.ask(NOW + 4, work_req_seconds=1).request_delay == 6
    assert len(ann.fetch(NOW + 10)) == 1


def test_request_delay_is_told(grid):
    settings(request_delay=7)
    assert Client("ann").ask().request_delay == 7


def test_only_for_ones_own_platform(grid):
    add()
    reply = Client("ann").ask(work_req_seconds=1, platforms=["abacus"])
    assert reply.assignments == [] and "no application here runs" in said(reply)
    assert copies()[0].refusals is None


def test_each_platform_gets_its_own_version(grid):
    add()
    version = m.AppVersion.create(app=m.apps["near"].id, create_time=NOW, platform="abacus",
                                  version_num=1, files=[])
    m.apps["near"].versions.insert(0, version)
    for key, platform, extra in (("ann", "python", []), ("bob", "abacus", ["toaster"])):
        client = Client(key)
        (a,) = client.ask(work_req_seconds=1, platforms=[platform, *extra]).assignments
        assert (a.app_version == version.id) == (platform == "abacus")
        assert result(a.name).app_version_id == a.app_version
        (again,) = client.ask(other_results=[]).assignments
        assert again == a


# ---- What a host cannot do -----------------------------------------------------


FITS = dict(p_fpops=1e9, m_nbytes=1e9, d_free=1e9)
NEEDS = dict(rsc_fpops_est=5e11, delay_bound=1000, rsc_memory_bound=1e9, rsc_disk_bound=1e9)
FEASIBLE = {  # id: (what the host has, what the request says, why not)
    "it just fits": ({}, {}, ""),
    "memory": (dict(m_nbytes=1e9 - 1), {}, "needs 1 GB of memory, you have 1"),
    "memory unknown": (dict(m_nbytes=0), {}, ""),
    "disk": (dict(d_free=1e9 - 1), {}, "needs 1 GB of disk"),
    "disk unknown": (dict(d_free=0), {}, ""),
    "just in time": (dict(p_fpops=5.01e8), {}, ""),
    "too slow": (dict(p_fpops=4.99e8), {}, "the deadline is in"),
    "just in time after other work": ({}, dict(estimated_delay=500), ""),
    "too much other work": ({}, dict(estimated_delay=501), "the deadline is in"),
    "on half of the time": (dict(on_frac=0.51), {}, ""),
    "on less": (dict(on_frac=0.49), {}, "the deadline is in"),
    "active half of the time": (dict(active_frac=0.51), {}, ""),
    "active less": (dict(active_frac=0.49), {}, "the deadline is in"),
    "both": (dict(on_frac=0.7, active_frac=0.7), {}, "the deadline is in"),
    "never on, it says": (dict(on_frac=0), {}, "the deadline is in"),
    "more than always on": (dict(on_frac=7), dict(estimated_delay=501), "the deadline is in"),
}


@pytest.mark.parametrize("case", FEASIBLE)
def test_feasible(case, grid):
    has, says, why = FEASIBLE[case]
    add(**NEEDS)
    ann = Client("ann")
    reply = ann.ask(host={**FITS, **has}, work_req_seconds=1, **says)
    assert bool(reply.assignments) == (not why)
    assert why in said(reply) and why in ann.host().why_no_work
    assert [x[1:2] for x in copies()[0].refusals or []] == ([[ann.hostid]] if why else [])


def test_what_is_given_in_one_request_takes_time_too(grid):
    for number in range(5):
        add(number=number, **{**NEEDS, "delay_bound": 1100})
    assert len(Client("ann").fetch(work_req_seconds=1e9, host=FITS)) == 2
    assert len(Client("bob").fetch(work_req_seconds=1e9, host={**FITS, "p_ncpus": 2})) == 3


def test_measured_speed_counts_more_than_the_benchmark(grid):
    add(number=0, **NEEDS), add(number=1, **NEEDS)
    ann = Client("ann")
    (name,) = ann.fetch(host=FITS)
    ann.ask(NOW + 2000, reports=[m.Report(name, 5, 0, elapsed_time=1500)])
    assert "the deadline is in" in said(ann.ask(NOW + 2000, work_req_seconds=1))


def test_the_reason_is_kept_until_there_is_work(grid):
    ann = Client("ann")
    assert "there is none at the moment" in said(ann.ask(work_req_seconds=1))
    assert "there is none at the moment" in ann.host().why_no_work
    add()
    ann.fetch(NOW + 5)
    assert ann.host().why_no_work == ""


def test_what_no_host_can_do_fails(grid):
    """S0-10..S0-13: the third refusal ends the result, its workunit, and the other copy."""
    settings(infeasible_max=3)
    add(rsc_memory_bound=1e9, target_nresults=2)
    small = dict(work_req_seconds=1, host=dict(m_nbytes=1e8))
    for n, key in enumerate(("ann", "bob")):
        Client(key).ask(NOW + n, **small)
    assert outcomes() == [UNSENT, UNSENT] and units()[0].transition_time > NOW + 2
    Client("cyd").ask(NOW + 2, **small)
    assert outcomes()[0] == (S.OVER, O.COULDNT_SEND)
    assert units()[0].transition_time == NOW + 2
    assert [(at, hostid) for at, hostid, why in copies()[0].refusals] == [
        (NOW, 1), (NOW + 1, 2), (NOW + 2, 3)]
    m.run_pass(NOW + 3)
    assert units()[0].error_mask == E.COULDNT_SEND_RESULT
    assert [server_state for server_state, _ in outcomes()] == [S.OVER, S.OVER]


def test_one_host_counts_once_an_hour(grid):
    add(rsc_memory_bound=1e9)
    ann = Client("ann")
    for now, n in ((NOW, 1), (NOW + 5, 1), (NOW + 3599, 1), (NOW + 3600, 2), (NOW + 7000, 2)):
        ann.ask(now, work_req_seconds=1, host=dict(m_nbytes=1e8))
        assert len(copies()[0].refusals) == n


def test_a_small_host_gets_what_is_behind(grid):
    add(number=0, rsc_memory_bound=1e9, priority=5), add(number=1)
    ann = Client("ann")
    assert ann.fetch(host=dict(m_nbytes=5e8)) == ["near_1_0"]
    assert copies()[0].refusals[0][:2] == [NOW, ann.hostid]


# ---- Versions, plan classes, shared files ----------------------------------------


def version(app="near", platform="python", plan_class="", number=9, **options):
    """Give an application one more version; return it."""
    row = m.AppVersion.create(app=m.apps[app].id, create_time=NOW, platform=platform, files=[],
                              version_num=number, plan_class=plan_class, options=options)
    m.apps[app].versions.append(row)
    return row


def classes(client, now=NOW, **more):
    asked = {**dict(work_req_seconds=0.01), **more}
    return [a.plan_class for a in client.ask(now, **asked).assignments]


def measured(client, row, seconds):
    """Note how long a version takes a host for each operation."""
    m.HostAppVersion.replace(host=client.hostid, app_version=row.id, et_n=1, et_avg=seconds,
                             max_jobs_per_day=1000).execute()


def test_every_version_is_tried_once_a_day_until_it_is_measured(grid):
    for number in range(12):
        add(number=number)
    m.apps["near"].versions = []
    rows = {name: version(plan_class=name) for name in "abc"}
    ann = Client("ann")
    assert [classes(ann, NOW + k) for k in range(4)] == [["a"], ["b"], ["c"], ["a"]]
    measured(ann, rows["b"], 5e-10)  # twice as fast as the benchmark says
    assert [classes(ann, NOW + 9 + k) for k in range(2)] == [["b"], ["b"]]
    assert [classes(ann, NOW + DAY + k) for k in range(3)] == [["a"], ["c"], ["b"]]
    assert classes(Client("bob")) == ["a"]


def test_trials_within_one_request(grid):
    for number in range(6):
        add(number=number)
    m.apps["near"].versions = []
    for name in "abc":
        version(plan_class=name)
    assert classes(Client("ann"), work_req_seconds=1, cpu_req_instances=5,
                   host=dict(p_ncpus=5)) == ["a", "b", "c", "a", "a"]


def test_a_version_without_quota_gives_way_to_the_next(grid):
    settings(daily_result_quota=1)
    for number in range(5):
        add(number=number)
    m.apps["near"].versions = []
    version(plan_class="a"), version(plan_class="b")
    ann = Client("ann")
    assert [classes(ann, NOW + k) for k in range(3)] == [["a"], ["b"], []]
    assert "today's" in ann.host().why_no_work


def test_a_version_with_several_processors(grid):
    add(rsc_fpops_est=1e11), add(number=1, rsc_fpops_est=1e11), add(number=2, rsc_fpops_est=1e11)
    m.apps["near"].versions = []
    version(plan_class="mt", ncpus=4, command_line="--all")
    ann = Client("ann")
    jobs = ann.ask(host=dict(p_ncpus=2, p_fpops=1e9), work_req_seconds=100).assignments
    # Half the processors it could use; 50 s on both of them are the 100 s asked for.
    assert [(a.ncpus, a.flops, a.command_line) for a in jobs] == [
        (2, pytest.approx(2e9), "--all")]


def test_arguments_of_version_and_workunit(grid):
    add(command_line="-n 3", files={"table": b"1"})
    m.apps["near"].versions = []
    version(command_line="--fast")
    (a,) = Client("ann").ask(work_req_seconds=1).assignments
    assert a.command_line == "--fast -n 3"
    (shared,) = a.inputs
    assert (shared["open_name"], shared["sticky"], shared["nbytes"]) == ("table", True, 1)
    assert shared["url"] == f"/download/{shared['name']}"


def test_what_a_protocol_knows_of_versions_counts(grid):
    """Its plugin may say that a client cannot have one, and why."""
    add(), add(number=1)
    row = version(plan_class="a")

    class More:
        def why_not(self, asked):
            return "" if asked.id == row.id else "not for you"

    ann = Client("ann")
    assert classes(ann, more=More()) == ["a"]
    m.apps["near"].versions.remove(row)
    reply = ann.ask(work_req_seconds=1, more=More())
    assert reply.assignments == [] and "near: not for you" in said(reply)
    assert "near: not for you" in ann.host().why_no_work


def test_lost_results_that_cannot_be_had_any_more_go_to_others(grid):
    add()
    ann = Client("ann")
    ann.fetch()

    class More:
        def why_not(self, asked):
            return "not signed"

    assert ann.ask(other_results=[], more=More()).assignments == []
    assert copies()[0].report_deadline == NOW - 1


def test_our_volunteers_and_boinc_clients_measure_other_things(grid):
    """A hundred floating-point operations of a benchmark are one operation of Python."""
    add(), add(number=1)
    version(platform="x86")
    flops = {}
    for name, client_version in (("ours", "minigrid 1"), ("boinc", "7.20.5")):
        for platform in ("python", "x86"):
            add(number=len(flops) + 5)
            (a,) = Client(name).ask(work_req_seconds=0.001, client_version=client_version,
                                    platforms=[platform], host=dict(p_fpops=1e9)).assignments
            flops[name, platform] = a.flops
    assert flops == pytest.approx({("ours", "python"): 1e9, ("ours", "x86"): 1e11,
                                   ("boinc", "python"): 1e7, ("boinc", "x86"): 1e9})


def test_a_foreign_host_id_leads_to_the_host_of_the_same_cpid(grid):
    """The reply that told the new id may be lost: not one more host for each try."""
    ann, bob = Client("ann"), Client("bob")
    ann.ask()
    for _ in range(3):
        bob.hostid = ann.hostid
        assert bob.ask().hostid == 2
    bob.hostid = 99
    assert bob.ask().hostid == 2 and m.Host.select().count() == 2


def test_all_shared_inputs_of_a_workunit_are_its_own(grid):
    """Sticky ones, with a row each; they go when nobody needs them [WIRE 17.11]."""
    unit = add(number=7, min_quorum=1, files={"table": b"one", "map": b"two"})
    paths = [m.file_path("download", row.name) for row in m.SharedFile.select()]
    assert [path.read_bytes() for path in paths] == [b"one", b"two"]
    assert [file.get("sticky", False) for file in unit.input_files] == [False, True, True]
    ann = Client("ann")
    ann.report(*ann.fetch(), "5")
    for now in range(NOW + 1, NOW + 9):
        m.run_pass(now)
    assert not any(path.exists() for path in paths) and not m.SharedFile.select().exists()


def test_shared_inputs_go_with_the_last_workunit(grid, folder):
    for number in range(3):
        add(number=number, min_quorum=1, files={"table": b"shared"} if number else {})
    name = m.SharedFile.select().first().name
    path = m.file_path("download", name)
    clients = [Client(f"user {n}") for n in range(3)]
    for n, client in enumerate(clients):
        assert client.fetch() == [f"near_{n}_0"]
        if n == 1:
            restart(folder, stock=0, min_sendwork_interval=0)
        client.report(f"near_{n}_0", "5")
        for now in range(NOW + 1, NOW + 9):
            m.run_pass(now)
        assert path.exists() == (n < 2)
        assert [row.workunit_id for row in m.SharedFile.select()] == [2, 3][n:]
        assert m.plugged("violations")[-1]() == []
    path.unlink(missing_ok=True)
