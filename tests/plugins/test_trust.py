"""Who is believed: the black list in two levels, spot checks as the way back, suspects [D10 C36].

Verdicts come from real workunits with a quorum, or are made up where a policy of another plugin
would give them; all the rest is the real schedule(), run_pass() and store.
"""

import contextlib
import json
import sys
from types import SimpleNamespace

import make
import pytest
from make import DAY, NOW, Client
from web import Web

import minigrid as m

V, O, S = m.ValidateState, m.Outcome, m.ServerState
X = '''"""x: i for i."""
validation = "quorum"
{constants}


def workunit(i):
    return {{"input": i}} if i < 500 else None


def compute(input):
    return input
'''


def module(name):
    return sys.modules[f"minigrid_plugin_trust.{name}"]


@pytest.fixture
def black(plugins):
    return module("blacklist")


@pytest.fixture
def spots(plugins):
    return module("spots")


@pytest.fixture(autouse=True)
def default_settings(plugins, monkeypatch):
    monkeypatch.setattr(module("blacklist"), "settings", module("blacklist").Settings())
    monkeypatch.setattr(module("suspects").known, "at", 0)


@pytest.fixture
def policy(grid):
    """Give the application `near` a policy and constants, as its file would."""
    return lambda name="quorum", **more: m.apps["near"].policies.update(validation=name, **more)


def change_settings(**changes):
    black = module("blacklist")
    black.settings = m.dataclasses.replace(black.settings, **changes)


clock = SimpleNamespace(now=NOW)


@pytest.fixture(autouse=True)
def reset_clock():
    clock.now = NOW


def passes(n=4):
    for _ in range(n):
        clock.now += 1
        m.run_pass(clock.now)


def decide(number, answers, clients, **parameters):
    """Have a workunit answered and judged; return its name."""
    clock.now += 10
    quorum = parameters.pop("min_quorum", len(answers))
    name = make.answered(*answers, number=number, clients=clients, now=clock.now,
                         min_quorum=quorum, **parameters)
    passes(2)
    return name


def entries(**where):
    return list(module("blacklist").BlackEntry.select().filter(**where)
                .order_by(module("blacklist").BlackEntry.id))


@pytest.fixture
def people(grid):
    """Clients of different users: anna and ben are right, liz lies, zoe and max come later."""
    people = SimpleNamespace(**{name: Client(name) for name in (
        "anna", "ben", "liz", "zoe", "max", "eve", "pia", "tom")})
    for client in vars(people).values():
        client.ask()
    return people


def three(people):
    return [people.anna, people.ben, people.liz]


def judge(rows, verdict, now=None):
    """Settle made-up verdicts as a stage does: {workunit's name: Verdict}."""
    now = clock.now if now is None else now
    units = {wu.name: wu for wu in make.units()}
    verdicts = {units[name].id: v for name, v in verdict.items()}
    m.Workunit.update(need_validate=True).where(m.Workunit.id.in_(list(verdicts))).execute()
    m.project.write(lambda: m_settle(verdicts, now))


def m_settle(verdicts, now):
    sys.modules["minigrid"].settle_all(verdicts, now)


def wrong_verdict(number, client, **parameters):
    """Have an answer of a client called wrong by the application; return the result's name."""
    clock.now += 10
    unit = make.add(number=number, now=clock.now, min_quorum=1, **parameters)
    (name,) = client.fetch(clock.now)
    client.report(name, "5", clock.now)
    rid = make.result(name).id
    judge(None, {unit.name: m.Verdict(seen={rid}, wrong={rid})})
    return name


# ---- Who gets on the list ------------------------------------------------------


@pytest.mark.parametrize("name", ["check", "inverse", "none", "quorum"])
def test_a_wrong_answer_puts_its_host_on_the_list_at_once(policy, people, name):
    """[S3-28 S3-29 S3-33 S3-39]: reason, evidence and an end [C36], and no more tasks."""
    policy(name)
    result = wrong_verdict(1, people.liz)
    (entry,) = entries()
    assert (entry.host, entry.level, entry.ended) == (people.liz.hostid, 1, 0)
    assert entry.end == entry.begin + 7 * DAY and entry.wanted == 3
    assert entry.rule == {"inverse": "S3-33"}.get(name, "S3-29")
    assert result in entry.reason
    found = json.loads(entry.evidence)
    assert (found["result"], found["said"], found["workunit"]) == (result, "5", "near_1")
    assert (found["wrong"], found["checked"]) == (1, 1)
    make.add(number=2, now=clock.now)
    assert people.liz.fetch(clock.now) == []
    assert "black list: no work but spot checks until" in people.liz.host().why_no_work
    assert "0 of 3 right answers" in people.liz.host().why_no_work
    assert people.anna.fetch(clock.now) == ["near_2_0"]


def test_all_who_are_wrong_get_on_the_list_by_recomputation(policy, people):
    """[S3-39]: all nodes that gave a wrong result, and none of the others."""
    policy("recheck")
    decide(1, ["1", "1", "1", "7", "9"],
           [people.anna, people.ben, people.zoe, people.liz, people.max])
    assert {e.host for e in entries()} == {people.liz.hostid, people.max.hostid}
    (first, _) = entries()
    against = json.loads(first.evidence)["against"]
    assert against == [people.anna.hostid, people.ben.hostid, people.zoe.hostid]
    assert "3 others agree" in first.reason and first.rule == "S3-39"


def test_literal_at_the_first_wrong_answer_refused_for_ever(policy, people):
    """[S3-29 S3-39]: connections are no longer accepted; a switch gives the rule [C36]."""
    policy("check", black_list="literal")
    wrong_verdict(1, people.liz)
    (entry,) = entries()
    assert (entry.level, entry.end, entry.app, entry.wanted) == (2, 0, None, 0)
    reply = people.liz.ask(clock.now + 10 * 365 * DAY, work_req_seconds=1)
    assert reply.assignments == [] and reply.request_delay == DAY
    (message,) = reply.messages
    assert message["priority"] == "notice" and "does not accept your computer" in message["text"]
    assert entry.reason in message["text"]


def test_literal_puts_both_nodes_of_an_inverse_task_on_the_list(policy, people):
    """[S3-33]: who computed and who checked, both, where the literal rule is chosen."""
    policy("inverse", black_list="literal")
    wrong_verdict(1, people.liz)
    wrong_verdict(2, people.max)
    assert [(e.host, e.level, e.rule) for e in entries()] == [
        (people.liz.hostid, 2, "S3-33"), (people.max.hostid, 2, "S3-33")]


def test_the_switch_of_the_project_and_of_an_application(policy, people):
    """A constant of the application wins over [trust] black_list [C36]."""
    policy("check")
    change_settings(black_list="off")
    wrong_verdict(1, people.liz)
    assert entries() == []
    policy("check", black_list="literal")
    wrong_verdict(2, people.liz)
    assert [e.level for e in entries()] == [2]


def test_a_quorum_forgives_single_lost_votes(people):
    """Floating point differs between machines: three of the last ten make an entry."""
    for number in (1, 2):
        decide(number, ["1", "1", "7"], three(people))
    assert entries() == []
    decide(3, ["1", "1", "7"], three(people))
    (entry,) = entries()
    assert entry.host == people.liz.hostid and entry.rule == "S3-39"
    assert "3 of its last 3 answers are wrong" in entry.reason


def test_old_lost_votes_are_forgotten(people, black):
    """Wrong ones longer ago than ten answers count no more."""
    black.Measured.create(app=m.apps["near"].id, hosts=1, losers=1)
    row = black.Standing.create(host=people.liz.hostid, app=m.apps["near"].id, checked=12, wrong=2,
                                recent=0b11 << 9)
    decide(1, ["1", "1", "7"], three(people))
    assert entries() == []
    black.Standing.update(recent=0b11 << 7).where(black.Standing.id == row.id).execute()
    decide(2, ["1", "1", "7"], three(people))
    assert len(entries()) == 1


@pytest.mark.parametrize("answer", [None, '"garbage"'])
def test_errors_are_no_lies(policy, people, answer):
    """What could not be computed or read is never a reason."""
    policy("recheck")
    for number in range(4):
        decide(number, ["1", "1", answer], three(people), min_quorum=2, target_nresults=3)
    assert entries() == []
    assert m.Result.select().where(m.Result.outcome.in_([3, 6])).count() == 4


def test_late_and_lost_answers_are_no_lies(policy, people):
    policy("recheck")
    unit = make.add(number=1, delay_bound=100)
    people.anna.fetch(NOW)
    clock.now = NOW + 200
    passes()
    assert make.result("near_1_0").outcome == O.NO_REPLY
    assert entries() == [] and unit.id


def test_an_application_that_nobody_can_satisfy_bars_nobody(policy, people, black):
    """Where more than half of the hosts lose votes, the application is in doubt, and says so."""
    policy("recheck")
    app = m.apps["near"].id
    black.Measured.create(app=app, hosts=7, losers=6)
    decide(1, ["1", "1", "7"], three(people))
    assert entries() == []
    assert "Does the application use the time or randomness" in page_text()
    policy("check")
    wrong_verdict(2, people.liz)  # What the application itself says is no vote.
    assert len(entries()) == 1


@pytest.mark.parametrize("hosts, losers, doubtful", [
    (3, 3, False), (4, 2, False), (4, 3, True), (100, 50, False), (100, 51, True)])
def test_when_an_application_is_in_doubt(black, hosts, losers, doubtful):
    assert black.is_doubtful(black.Measured(hosts=hosts, losers=losers)) is doubtful


def test_a_single_answer_proves_nothing(people, black):
    """What was accepted with nothing to compare it with counts for nobody."""
    decide(1, ["1"], [people.anna])
    assert not black.Standing.select().exists()
    assert not module("spots").Kept.select().exists()


COMPARED = {  # what a verdict says of copies 1 and 2 -> which of them were compared
    "two agree": (dict(matching={1, 2}), {1, 2}), "one lost": (dict(matching={1}), {2}),
    "a late one that nobody compares": (dict(matching={1, 2}, unchecked={1, 2}), set()),
    "alone, and contradicted": (dict(matching={1}, unchecked={1}), {2}),
    "the right one was known": (dict(matching={1}, wrong={2}, known=True), {1, 2}),
}


@pytest.mark.parametrize("case", COMPARED)
def test_what_counts_as_compared(people, black, case):
    """An answer is known to be right by another's word, or the project's; wrong ones always are."""
    given, counted = COMPARED[case]
    unit = make.add(number=1, now=clock.now)
    for client in (people.anna, people.ben):
        client.report(*client.fetch(clock.now), "1", clock.now)
    judge(None, {unit.name: m.Verdict(seen={1, 2}, canonical=1, **given)})
    assert {row.host for row in black.Standing.select()} == counted  # hosts are numbered likewise


def test_entries_of_two_applications_are_two(policy, people, black):
    """One that is barred elsewhere is measured here, and entered here when it is wrong."""
    ban(black, people.liz, app=m.apps["count"].id)
    policy("recheck")
    decide(1, ["1", "1", "1"], three(people))
    assert black.error_rate(m.apps["near"].id, clock.now)[1] == pytest.approx(3, rel=1e-3)
    decide(2, ["1", "1", "7"], three(people))
    assert [(e.app, e.ended) for e in entries()] == [
        (m.apps["count"].id, 0), (m.apps["near"].id, 0)]


def test_repeats_are_longer_and_end_in_a_refusal(policy, people):
    """[C36]: each entry in a row is twice as long, the third refuses."""
    policy("check")
    found = []
    for number in (1, 2, 3):
        wrong_verdict(number, people.liz)
        entry = entries()[-1]
        found.append((entry.level, (entry.end - entry.begin) // DAY))
        clock.now = entry.end
        passes()
        assert entries()[-1].ended_why == "its time is over"
    assert found == [(1, 7), (1, 14), (2, 28)]


def test_wrong_answers_to_spot_checks_end_in_a_refusal_too(policy, people):
    """[C36]: entries that follow each other while they last are in a row as well."""
    policy("recheck")
    decide(1, ["1", "1", "7"], three(people))
    for number in (2, 3):
        settled(people, number)
        clock.now += 10
        (name, *_) = people.liz.fetch(clock.now)
        people.liz.report(name, "9", clock.now)
        passes(2)
    assert [(e.level, (e.end - e.begin) // DAY, e.ended_why[:11]) for e in entries()] == [
        (1, 7, "wrong again"), (1, 14, "wrong again"), (2, 28, "")]


def test_nobody_is_refused_where_that_is_switched_off(policy, people):
    policy("check")
    change_settings(entries_until_refused=0)
    for number in (1, 2, 3, 4):
        wrong_verdict(number, people.liz)
        clock.now = entries()[-1].end
        passes()
    assert [e.level for e in entries()] == [1, 1, 1, 1]


def test_a_pardon_ends_the_row(policy, people, black):
    policy("check")
    for number in (1, 2, 3):
        wrong_verdict(number, people.liz)
        m.project.write(lambda: black.pardon(people.liz.hostid, "pardoned", clock.now))
    assert [e.level for e in entries()] == [1, 1, 1]
    assert {(e.end - e.begin) // DAY for e in entries()} == {7}


@pytest.mark.parametrize("seconds", [0, 5])
def test_what_it_held_before_makes_no_second_entry(policy, people, seconds):
    policy("check")
    clock.now += 10
    for number in (1, 2):
        make.add(number=number, now=clock.now, min_quorum=1)
    names = [people.liz.fetch(clock.now)[0] for _ in range(2)]
    for name in names:
        people.liz.report(name, "5", clock.now)
    clock.now += seconds
    for name in names:
        rid = make.result(name).id
        judge(None, {name[:6]: m.Verdict(seen={rid}, wrong={rid})})
    assert len(entries()) == 1


def test_what_a_liar_holds_alone_is_checked_by_others(policy, people):
    """Its word alone would have done; under a direct check it is looked at anyway."""
    for name, quorum in (("recheck", 2), ("check", 1)):
        policy(name)
        held = make.add(number=quorum, min_quorum=1, now=clock.now)
        people.liz.fetch(clock.now)
        wrong_verdict(10 + quorum, people.liz)
        held = m.Workunit.get_by_id(held.id)
        assert (held.min_quorum, held.target_nresults) == (quorum, quorum)
        m.project.write(lambda: module("blacklist").pardon(people.liz.hostid, "", clock.now))
    passes()
    assert m.Result.select().where(m.Result.workunit == m.Workunit.get(name="near_2")).count() == 2


def test_quotas_shrink_with_wrong_answers(people):
    """A report doubles the day's tasks, a wrong answer quarters them: half is left."""
    for number in (1, 2):
        decide(number, ["1", "1", "7"], three(people))
    quota = {r.host_id: r.max_jobs_per_day for r in m.HostAppVersion.select()}
    assert quota[people.anna.hostid] == 1000
    assert quota[people.liz.hostid] == 125  # 1000, 250, 500, 125


# ---- Level 1, level 2, and attaching anew ----------------------------------------


def ban(black, client, level=1, app=None, end=0, wanted=3):
    return m.project.write(lambda: black.enter(
        client.host(), app, level, "operator", "because", {}, clock.now, end, wanted=wanted))


def test_level_1_may_report_and_level_2_may_not(people, black):
    """[C36]: two levels; what a refused host sends is not even read."""
    make.add(number=1)
    (name,) = people.liz.fetch()
    ban(black, people.liz, level=2)
    assert people.liz.report(name, "1").acks == []
    assert make.result(name).server_state == S.IN_PROGRESS
    m.project.write(lambda: black.pardon(people.liz.hostid, "", NOW))
    ban(black, people.liz, level=1)
    assert people.liz.report(name, "1").acks == [name]


def test_an_entry_is_over_when_its_time_is(people, black):
    make.add(number=1)
    ban(black, people.liz, level=2, end=NOW + 100)
    assert people.liz.fetch(NOW + 99) == []
    assert people.liz.fetch(NOW + 100) == ["near_1_0"]  # No stage has run meanwhile.


def test_an_entry_for_one_application_leaves_the_others(people, black):
    make.add("near", number=1)
    make.add("count", number=1)
    ban(black, people.liz, app=m.apps["near"].id)
    assert people.liz.fetch() == ["count_1_0"]
    assert people.liz.fetch() == []
    why = people.liz.host().why_no_work
    assert "near: you are on its black list: no work but spot checks" in why


def test_attaching_anew_is_no_way_out(people, black):
    """A new computer of the volunteer starts at level 1; those it had before do not."""
    old = Client("liz")
    old.ask()
    clock.now = NOW + 10
    parent = ban(black, people.liz, level=2, end=NOW + 5 * DAY)
    make.add(number=1)
    make.add(number=2)
    assert old.fetch(NOW + 20) == ["near_1_0"]
    new = Client("liz")
    assert new.fetch(NOW + 20) == []
    (entry,) = entries(host=new.hostid)
    assert (entry.level, entry.parent, entry.end, entry.wanted) == (1, parent.id, NOW + 5 * DAY, 3)
    assert new.fetch(NOW + 30) == [] and len(entries()) == 2
    m.project.write(lambda: black.pardon(new.hostid, "earned back", NOW + 40))
    assert new.fetch(NOW + 40) == ["near_1_1"]  # not entered a second time
    other = Client("liz")
    other.ask(NOW + 50, work_req_seconds=1)
    m.project.write(lambda: black.pardon(people.liz.hostid, "pardoned", NOW + 60))
    assert other.fetch(NOW + 60) == ["near_2_0"]  # A pardon covers what followed from the entry.


def test_what_follows_from_an_entry_has_no_followers(people, black):
    """A third computer has its own way back, whatever becomes of the second."""
    ban(black, people.liz)
    clock.now += 10
    second = Client("liz")
    second.ask(clock.now)
    clock.now += 10
    third = Client("liz")
    third.ask(clock.now)
    assert [e.host for e in entries()] == [people.liz.hostid, second.hostid, third.hostid]
    m.project.write(lambda: black.close(entries()[-1], "earned back", clock.now))
    make.add(number=1, now=clock.now)
    assert third.fetch(clock.now) == ["near_1_0"] and len(entries(ended=0)) == 2


def test_another_wrong_answer_frees_no_other_computer(policy, people, black):
    """What followed from an entry follows from the next one of that host, until its end."""
    policy("recheck")
    decide(1, ["1", "1", "7"], three(people))
    clock.now += 10
    new = Client("liz")
    assert new.fetch(clock.now) == [] and entries(host=new.hostid)
    settled(people, 3)
    (name,) = people.liz.fetch(clock.now)
    people.liz.report(name, "9", clock.now)
    passes(2)
    (second,) = entries(host=people.liz.hostid, ended=0)
    assert second.rule == "S3-39" and second.begin == clock.now - 1
    (follows,) = entries(host=new.hostid)
    assert (follows.ended, follows.parent, follows.end) == (0, second.id, second.end)
    m.project.write(lambda: black.pardon(people.liz.hostid, "pardoned", clock.now))
    make.add(number=4, now=clock.now)
    assert new.fetch(clock.now) == ["near_4_0"]


def test_an_order_frees_no_other_computer(people, black, beside):
    clock.now = NOW + 10
    ban(black, people.liz)
    make.add(number=1)
    new = Client("liz")
    assert new.fetch(NOW + 20) == []
    command("ban", str(people.liz.hostid), "worse", "--refuse")
    (entry,) = entries(host=people.liz.hostid, ended=0)
    assert [(e.ended, e.parent) for e in entries(host=new.hostid)] == [(0, entry.id)]
    assert new.fetch(NOW + 30) == []
    command("pardon", str(people.liz.hostid))
    assert new.fetch(NOW + 40) == ["near_1_0"]


# ---- Spot checks ----------------------------------------------------------------


def settled(people, number, answer="1"):
    """A workunit that anna and ben have settled; the pool has it if somebody needs it."""
    return decide(number, [answer, answer], [people.anna, people.ben])


def test_the_way_back(policy, people, black, spots):
    """[C36]: an honest host outvoted by two who lie together is free after three right answers."""
    policy("recheck")
    decide(1, ["7", "7", "1"], [people.max, people.eve, people.liz])
    (entry,) = entries()
    assert entry.host == people.liz.hostid
    for number in range(2, 6):
        settled(people, number)
    assert spots.Kept.select().count() == 5  # With that which liz has lost, not for her.
    got = people.liz.fetch(clock.now, cpu_req_instances=8, host={"p_ncpus": 8})
    assert len(got) == 3 and all(name.rpartition("_")[2] == "2" for name in got)
    assert people.liz.fetch(clock.now) == []  # three are enough, and they are under way
    for n, name in enumerate(got):
        people.liz.report(name, "1", clock.now)
        passes(2)
        (entry,) = entries()
        assert (entry.right, bool(entry.ended)) == (n + 1, n == 2)
        row = black.standing_of([people.liz.hostid], m.apps["near"].id)[people.liz.hostid]
        assert row.fresh_checked == 0  # Who is on the list says nothing about the others.
    assert "earned back: 3 right answers" in entry.ended_why
    assert m.Firing.get(rule="earn trust back").n == 1
    make.add(number=9, now=clock.now)
    assert people.liz.fetch(clock.now) == ["near_9_0"]
    assert {r.granted_credit > 0 for r in make.copies() if r.name in got} == {True}


def test_a_wrong_answer_to_a_spot_check_begins_anew(policy, people, black, spots):
    """Right ones must come in a row, and a repeat counts as one."""
    policy("recheck")
    decide(1, ["1", "1", "7"], three(people))
    for number in range(2, 5):
        settled(people, number)
    clock.now += 100
    answers = iter(["1", "1", "9"])
    for name in people.liz.fetch(clock.now, cpu_req_instances=8, host={"p_ncpus": 8}):
        people.liz.report(name, next(answers), clock.now)
        passes(2)
    first, second = entries()
    assert first.ended_why.startswith("wrong again") and first.right == 0
    assert (second.level, second.right, second.ended) == (1, 0, 0)
    assert (second.end - second.begin) // DAY == 14
    row = black.standing_of([people.liz.hostid], m.apps["near"].id)[people.liz.hostid]
    assert (row.spot_right, row.spot_wrong, row.run) == (2, 1, 0)
    assert [check.found for check in spots.SpotCheck.select()] == [
        spots.RIGHT, spots.RIGHT, spots.WRONG]


@pytest.mark.parametrize("wanted", [0, 1, 3, 4])
def test_no_more_spot_checks_than_are_wanted(people, black, wanted):
    """Those answered right count as well as those under way; an operator's order wants none."""
    ban(black, people.liz, wanted=wanted, app=m.apps["near"].id)
    for number in range(1, 6):
        settled(people, number)
    for name in people.liz.fetch(clock.now):
        people.liz.report(name, "1", clock.now)
    passes(2)
    assert entries()[0].right == (wanted > 0)
    got = people.liz.fetch(clock.now, cpu_req_instances=8, host={"p_ncpus": 8})
    assert len(got) == max(wanted - 1, 0)


def test_no_spot_check_beyond_max_total_results(people, black):
    """[C5] The copy that is never sent counts, too."""
    ban(black, people.liz)
    ban(black, people.max)
    decide(1, ["1", "1"], [people.anna, people.ben], max_total_results=4, max_success_results=3)
    assert people.liz.fetch(clock.now) == ["near_1_2"]
    assert people.max.fetch(clock.now) == [] and len(make.copies()) == 4


def test_a_spot_check_that_was_sent_before_the_entry_is_no_way_back(policy, people):
    """It was answered in ignorance of the entry, and maybe with luck: those that follow count."""
    policy("recheck", spot_checks=1.0)
    settled(people, 1)
    (name,) = people.liz.fetch(clock.now)
    assert name == "near_1_2"
    policy("recheck", spot_checks=0.0)
    decide(2, ["1", "1", "7"], three(people))
    people.liz.report(name, "1", clock.now)
    passes(2)
    (entry,) = entries(ended=0)
    assert (entry.host, entry.right) == (people.liz.hostid, 0)


def test_only_spot_checks_are_a_way_back(people, black):
    """Not what a host was sent in the second in which it was entered."""
    unit = make.add(number=1, now=clock.now)
    names = [client.fetch(clock.now)[0] for client in (people.anna, people.liz)]
    ban(black, people.liz)
    for client, name in zip((people.anna, people.liz), names):
        client.report(name, "1", clock.now)
    passes(2)
    assert make.result(names[1]).validate_state == V.VALID and unit.id
    assert [entry.right for entry in entries()] == [0]


def test_right_answers_of_one_application_end_no_entry_of_another(policy, people, black):
    ban(black, people.liz, app=m.apps["count"].id)
    policy("recheck", spot_checks=1.0)
    settled(people, 1)
    (name,) = people.liz.fetch(clock.now)
    assert name == "near_1_2"
    people.liz.report(name, "1", clock.now)
    passes(2)
    assert [entry.right for entry in entries()] == [0]
    ban(black, people.liz)  # for all applications
    settled(people, 2)
    people.liz.report(*people.liz.fetch(clock.now), "1", clock.now)
    passes(2)
    assert [entry.right for entry in entries()] == [0, 1]


def test_a_spot_check_looks_like_any_other_task(people, black, spots):
    """And is nobody's who has seen the workunit, nor its volunteer's other computer's."""
    ban(black, people.liz)
    settled(people, 1)
    twin = Client("anna")
    twin.ask()
    ban(black, twin)
    ban(black, people.anna)
    assert twin.fetch(clock.now) == people.anna.fetch(clock.now) == []
    (job,) = people.liz.ask(clock.now, work_req_seconds=1).assignments
    assert job.name == "near_1_2" and job.input["name"] == "near_1_in"
    r = make.result(job.name)
    assert (r.server_state, r.host_id) == (S.IN_PROGRESS, people.liz.hostid)
    assert r.report_deadline == clock.now + m.Workunit.get_by_id(r.workunit_id).delay_bound
    (violations,) = m.plugged("violations")
    assert violations() == []
    reply = people.liz.ask(clock.now + 1, other_results=[job.name])
    assert reply.aborts == reply.aborts_if_not_started == []
    reply = people.liz.ask(clock.now + 2, other_results=[])  # lost on its way: sent again
    assert [a.name for a in reply.assignments] == [job.name]


def test_files_stay_until_the_last_spot_check_is_back(people, black, spots):
    ban(black, people.liz)
    settled(people, 1)
    (name,) = people.liz.fetch(clock.now)
    passes(4)
    wu = m.Workunit.get(name="near_1")
    canonical = m.Result.get_by_id(wu.canonical_resultid)
    assert wu.assimilate_state == 2 and wu.file_delete_state == canonical.file_delete_state == 0
    clock.now += DAY
    m.Result.update(report_deadline=clock.now + 500).where(m.Result.name == name).execute()
    passes(4)
    assert not spots.Kept.select().exists()
    holder = make.result("near_1_10")
    assert (holder.server_state, holder.outcome) == (S.OVER, O.DIDNT_NEED)
    assert m.Workunit.get(name="near_1").file_delete_state == 0
    people.liz.report(name, "1", clock.now)
    passes(6)
    assert make.result(name).validate_state == V.VALID
    assert m.Workunit.get(name="near_1").file_delete_state == 2
    clock.now += 8 * DAY
    passes()
    assert make.units() == [] and m.plugged("violations")[0]() == []


def test_a_lost_spot_check_is_no_lie(people, black, spots):
    ban(black, people.liz)
    settled(people, 1)
    (name,) = people.liz.fetch(clock.now)
    clock.now = make.result(name).report_deadline + 1
    passes()
    assert make.result(name).outcome == O.NO_REPLY
    (entry,) = entries()
    assert (entry.right, entry.ended) == (0, 0)
    settled(people, 2)
    assert people.liz.fetch(clock.now) == ["near_2_2"]


POOL = {  # what happens to be so -> is the workunit kept?
    "nobody needs it": (dict(need=False), False), "somebody needs it": (dict(), True),
    "no room": (dict(max_total_results=3, max_success_results=3), False),
    "room": (dict(max_total_results=4, max_success_results=3), True),
    "full": (dict(pool=0), False), "one answer": (dict(answers=["1"]), False),
}


@pytest.mark.parametrize("case", POOL)
def test_what_is_kept_for_spot_checks(people, black, spots, case):
    """Only certain answers, only while there is need and room [C5]."""
    given, kept = dict(POOL[case][0]), POOL[case][1]
    if given.pop("need", True):
        ban(black, people.liz)
    change_settings(pool=given.pop("pool", 20))
    decide(1, given.pop("answers", ["1", "1"]), [people.anna, people.ben], **given)
    assert spots.Kept.select().count() == kept
    last = f"near_1_{given.get('max_total_results', 10)}"  # No gap tells which ones are kept.
    assert [r.name for r in make.copies(server_state=S.INACTIVE)] == [last] * kept


@pytest.mark.parametrize("validation, matching, more, certain", [
    ("quorum", {1, 2}, {}, True), ("quorum", {1}, {}, False), ("check", {1}, {}, True),
    ("adaptive", {1, 2}, dict(unchecked={1}), False), ("none", {1}, dict(known=True), True)])
def test_which_answers_are_certain(spots, validation, matching, more, certain):
    """Two hosts' word, or the application's."""
    verdict = m.Verdict(canonical=1, matching=matching, **more)
    application = SimpleNamespace(policies={"validation": validation})
    assert spots.is_certain(application, verdict) is certain


def test_the_pool_is_bounded(people, black, spots):
    ban(black, people.liz)
    change_settings(pool=2)
    for number in range(1, 5):
        settled(people, number)
    assert spots.Kept.select().count() == 2


def test_a_kept_workunit_is_finished_for_all_others(people, black, spots):
    """The status page says finished, `cancel` passes over it, and it wakes nobody."""
    ban(black, people.liz)
    settled(people, 1)
    m.App.update(next_number=1).where(m.App.name == "near").execute()
    passes()
    (status,) = m.plugged("status")
    assert status(clock.now)["state"]["word"] == "finished"
    (cancel,) = m.plugged("cancel_workunits")
    wu = m.Workunit.get(name="near_1")
    assert m.project.write(lambda: cancel([wu.id], clock.now)) == 0
    assert wu.transition_time == m.NEVER


def test_an_answer_that_is_deferred_does_not_wait_for_spot_checks(people, black, spots):
    ban(black, people.liz)
    (m.project.data / "results" / "defer").write_text("")
    settled(people, 1)
    (m.project.data / "results" / "defer").unlink()
    passes(4)
    assert m.Workunit.get(name="near_1").assimilate_state == 2
    assert not spots.Kept.select().exists()


def test_a_restart_forgets_nothing(people, black, spots, folder):
    """All is in the store: entries, pool, and the copies under way."""
    ban(black, people.liz)
    for number in (1, 2, 3):
        settled(people, number)
    (name,) = people.liz.fetch(clock.now)
    m.close_project()
    make.restart(folder, stock=0, min_sendwork_interval=0)
    people.liz.report(name, "1", clock.now)
    passes(2)
    assert entries()[0].right == 1
    assert len(people.liz.fetch(clock.now)) == 1


@pytest.mark.parametrize("rate, lots", [(1, 1), (0, 0)])
def test_any_host_may_be_drawn(policy, people, black, spots, rate, lots):
    """A share of the requests for work gets a spot check before anything else."""
    policy("recheck", spot_checks=rate)
    settled(people, 1)
    make.add(number=2, now=clock.now)
    assert people.zoe.fetch(clock.now) == (["near_1_2"] if lots else ["near_2_0"])
    assert spots.SpotCheck.select().count() == lots
    if lots:
        people.zoe.report("near_1_2", "8", clock.now)
        passes(2)
        (entry,) = entries()
        assert entry.host == people.zoe.hostid
        assert json.loads(entry.evidence)["against"] == [people.anna.hostid, people.ben.hostid]


def test_the_share_of_requests(policy, people, spots, monkeypatch):
    """Each request is drawn with the rate; in the mean that share gets one."""
    policy("recheck", spot_checks=0.1)
    settled(people, 1)
    spots.Kept.get_or_create(workunit=m.Workunit.get(name="near_1").id,
                             defaults=dict(app=m.apps["near"].id, until=clock.now + DAY))
    asked = []
    monkeypatch.setattr(spots, "copies_for", lambda host, app, n, now: asked.append(n) or [])
    usable = {m.apps["near"].id: [SimpleNamespace(application=m.apps["near"])]}
    for _ in range(4000):
        list(spots.urgent(people.zoe.host(), usable, clock.now))
    assert 340 < len(asked) < 460 and set(asked) == {1}


RATES = [("quorum", {}, None, 0.0), ("recheck", {}, None, 0.01), ("adaptive", {}, None, 0.01),
         ("quorum", {"spot_checks": 0.5}, None, 0.5), ("recheck", {}, 0.2, 0.2),
         ("recheck", {"spot_checks": 0.0}, 0.2, 0.0), ("check", {}, None, 0.0)]


@pytest.mark.parametrize("validation, constants, budget, rate", RATES)
def test_who_chooses_the_rate(spots, monkeypatch, validation, constants, budget, rate):
    """The application, an error budget, or the settings, where answers go uncompared."""
    monkeypatch.setattr(spots, "plugged", lambda name: [lambda application: budget])
    application = SimpleNamespace(policies={"validation": validation, **constants})
    assert spots.rate_of(application) == rate


@pytest.mark.parametrize("line, fault", [
    ("black_list = 'strict'", "black_list must be"), ("spot_checks = 2", "between 0 and 1"),
    ("spot_checks = True", "between 0 and 1"), ("black_list = 'off'\nspot_checks = 0.5", "")])
def test_constants_of_an_application(folder, line, fault):
    with make.project(folder, {"x": X.format(constants=line)}):
        faults = [text for _, text in m.project.errors]
    assert fault in " ".join(faults) and bool(faults) == bool(fault)


@pytest.mark.parametrize("changes, fault", [
    (dict(black_list="strict"), "black_list"), (dict(days=1e14), "days must be at most 36500"),
    (dict(pool_days=36501), "pool_days"), (dict(days=float("nan")), "days"),
    (dict(spot_check_rate=1.5), "between 0 and 1")])
def test_settings_are_checked(black, changes, fault):
    with pytest.raises(m.ClientError, match=fault):
        black.check_settings(black.Settings(**changes))


# ---- How often answers are wrong --------------------------------------------------


def test_standing_and_error_rates(people, black):
    app = m.apps["near"].id
    for number in (1, 2):
        decide(number, ["1", "1", "7"], three(people))
    assert black.error_rate(app, clock.now) == (pytest.approx(2, rel=1e-3),
                                                pytest.approx(6, rel=1e-3))
    rows = black.standing_of([people.anna.hostid, people.liz.hostid], app)
    assert [(r.checked, r.wrong, r.run) for _, r in sorted(rows.items())] == [
        (2, 0, 2), (2, 2, 0)]
    assert rows[people.liz.hostid].recent == 0b11
    wrong, compared = black.error_rate(app, clock.now + 30 * DAY)
    assert (wrong, compared) == (pytest.approx(1, rel=1e-3), pytest.approx(3, rel=1e-3))
    decide(3, ["1", "1", "7"], three(people))  # Now liz is on the list, and counts no more.
    assert black.error_rate(app, clock.now) == (pytest.approx(0, abs=1e-3),
                                                pytest.approx(6, rel=1e-3))
    (row,) = black.Measured.select()
    assert (row.hosts, row.losers) == (2, 0)  # without liz, who was never right
    assert black.error_rate(99, NOW) == (0, 0)


# ---- Suspects ----------------------------------------------------------------------


def meet(groups, n=1):
    """Store n decided workunits in which groups of hosts stood against each other."""
    suspects = module("suspects")
    ids = [host for group in groups for host in group]
    hosts = {host: (m.Host(id=host), None, None) for host in ids}
    verdict = m.Verdict(canonical=ids[0], groups=[set(group) for group in groups])
    for _ in range(n):
        m.project.write(lambda: suspects.note(verdict, hosts, NOW))


def found():
    module("suspects").known.at = 0
    return [sorted(group.hosts) for group in module("suspects").suspects(NOW)]


def test_who_lies_together_is_suspect(grid):
    for one in range(1, 7):
        meet([(one, one % 6 + 1), (21, 22)])
        meet([(one, one % 6 + 1), (22, 23)])
        meet([(one, one % 6 + 1), (31,)])  # alone in its lies
    assert found() == [[21, 22, 23]]
    (group,) = module("suspects").suspects(NOW)
    assert (group.together, group.apart, len(group.against), group.outside) == (12, 48, 6, 0)


@pytest.mark.parametrize("more", [
    [[(21, 22, 1), (5,)]],  # They sided with somebody else once,
    [[(21, 5), (22,)]],  # one of them did,
    [[(21,), (22,), (1, 2)]],  # or against its companion.
])
def test_who_does_not_always_agree_is_not_suspect(grid, more):
    for one in range(1, 7):
        meet([(one, one % 6 + 1), (21, 22)])
    assert found() == [[21, 22]]
    for groups in more:
        meet(groups)
    assert found() == []


def test_few_meetings_prove_nothing(grid):
    meet([(1, 2), (21, 22)], n=9)
    meet([(2, 3), (4,)])
    assert found() == []  # They stood against two hosts only.
    meet([(3, 1), (21, 22)])
    assert found() == [[21, 22]]


@pytest.mark.parametrize("met", [True, False])
def test_who_has_met_nobody_else_makes_nobody_suspect(plugins, met):
    """Its meetings may be forgotten, or were not counted, being one too many."""
    honest = [(a, b, 9, 0) for a in range(1, 5) for b in range(a + 1, 5)]
    liars = [(21, 22, 5, 0), (22, 23, 5, 0), (1, 21, 0, 3), (2, 21, 0, 3), (3, 22, 0, 3)]
    found = module("suspects").find(honest + liars + [(1, 23, 0, 3)] * met)
    assert [sorted(group.hosts) for group in found] == [[21, 22, 23]] * met


def test_pairs_are_bounded_and_old_ones_forgotten(grid, monkeypatch):
    suspects = module("suspects")
    meet([tuple(range(1, 30)), (99,)])
    assert suspects.Pair.select().count() == 45
    monkeypatch.setattr(suspects, "PAIRS_MAX", 10)
    suspects.Pair.update(last=suspects.Pair.id).execute()
    suspects.forget_old(NOW - 2 * NOW)
    assert suspects.Pair.select().count() == 10
    suspects.forget_old(NOW)
    assert not suspects.Pair.select().exists()


def test_undecided_and_unanimous_workunits_tell_nothing(grid):
    suspects = module("suspects")
    hosts = {n: (m.Host(id=n), None, None) for n in (1, 2)}
    for verdict in (m.Verdict(groups=[{1}, {2}]), m.Verdict(canonical=1, groups=[{1, 2}])):
        suspects.note(verdict, hosts, NOW)
    assert not suspects.Pair.select().exists()


# ---- Commands and pages ----------------------------------------------------------


def command(*words):
    """As the command does, in this process."""
    parser = m.argparse.ArgumentParser()
    module("orders").commands(parser.add_subparsers())
    options = parser.parse_args([*words, "--data", str(m.project.data)])
    return options.run(options)


@pytest.fixture
def beside(monkeypatch):
    """Commands work in the store that is open already."""
    @contextlib.contextmanager
    def store(options):
        yield m.project.settings

    real = m.plugged
    monkeypatch.setattr(module("orders"), "plugged",
                        lambda name: [store] if name == "store_only" else real(name))
    monkeypatch.setattr(module("orders"), "wall_clock", lambda: clock.now)


def test_ban_and_pardon(people, black, beside, capsys):
    make.add(number=1)
    assert command("ban", str(people.liz.hostid), "a", "faulty  memory") == 0
    assert "no work with no end of its own: a faulty memory" in capsys.readouterr().out
    (entry,) = entries()
    assert (entry.level, entry.end, entry.rule, entry.wanted) == (1, 0, "operator", 0)
    assert people.liz.fetch() == [] and "faulty memory" in people.liz.host().why_no_work
    command("ban", f"host {people.liz.hostid}", "worse", "--days", "2", "--refuse")
    assert [(e.level, bool(e.ended)) for e in entries()] == [(1, True), (2, False)]
    assert entries()[1].end == clock.now + 2 * DAY
    assert people.liz.ask().messages[0]["priority"] == "notice"
    command("pardon", str(people.liz.hostid))
    assert "gets work again" in capsys.readouterr().out
    assert people.liz.fetch() == ["near_1_0"]
    command("pardon", str(people.liz.hostid))
    assert "is not on the black list" in capsys.readouterr().out


def test_an_order_is_told_with_its_time(people, beside):
    """A command is a process of its own, which has seen no request."""
    for words in (("ban", "3", "worse"), ("pardon", "3")):
        m.project.now = 0
        command(*words)
        clock.now += 60
    (title, parts, _) = m.plugged("tell")[0]("host 3", clock.now, False)
    assert [row for part in parts for row in part.get("rows", ()) if "black list" in row[1]] == [
        (f"@{NOW + 60}", "black list: the entry of 2023-11-14 22:13 UTC has ended: pardoned by the "
                         "project"),
        (f"@{NOW}", "black list: no work with no end of its own: worse")]


@pytest.mark.parametrize("words, fault", [
    (("ban", "999", "why"), "no computer '999'"), (("pardon", "x"), "no computer 'x'"),
    (("ban", "1", "why", "--days", "-1"), "--days")])
def test_commands_say_what_is_wrong(people, beside, words, fault):
    with pytest.raises(m.ClientError, match=fault):
        command(*words)


def test_several_computers_and_volunteers_at_once(people, beside, capsys):
    """All or nothing; a name stands for all computers of one volunteer."""
    second = Client("liz")
    second.ask()
    liz, max_ = people.liz.hostid, people.max.hostid
    assert command("ban", f"liz,{max_}", "they sit together") == 0
    assert f"'minigrid pardon {liz} {second.hostid} {max_}' ends it" in capsys.readouterr().out
    assert [e.host for e in entries(ended=0)] == [liz, second.hostid, max_]
    with pytest.raises(m.ClientError, match="nobody.*nothing was changed"):
        command("pardon", str(liz), "nobody")
    m.User.create(create_time=0, name="liz", authenticator="another")
    m.Host.create(user=m.User.get(authenticator="another"), create_time=0)
    with pytest.raises(m.ClientError, match=f"several volunteers.* of {liz}, {second.hostid}, "):
        command("pardon", "liz")
    assert len(entries(ended=0)) == 3
    command("pardon", str(liz), f"{second.hostid},{max_}")
    assert entries(ended=0) == []


def test_a_pardoned_liar_is_free_beside_a_running_server(people, black, beside):
    """What a command changes counts at the next request: all is in the store."""
    make.add(number=1)
    black.BlackEntry.insert(host=people.liz.hostid, user=people.liz.host().user_id, level=2,
                            rule="operator", reason="x", begin=NOW).execute()
    assert people.liz.ask(work_req_seconds=1).request_delay == DAY
    black.BlackEntry.update(ended=NOW).execute()
    assert people.liz.fetch() == ["near_1_0"]


def get(path):
    web = Web()
    web.now = clock.now
    return web("GET", path)


def page_text():
    return get("/trust").body.decode()


EVIL = "<script>alert(1)</script>"


def test_the_page_tells_it_and_escapes_it(policy, people, black):
    policy("check")
    m.Host.update(domain_name=EVIL).where(m.Host.id == people.liz.hostid).execute()
    wrong_verdict(1, people.liz)
    black.BlackEntry.update(reason=EVIL).execute()
    got = get("/trust")
    text = got.body.decode()
    assert got.status == 200 and EVIL not in text and "&lt;script" in text
    assert "default-src 'none'" in got.headers["Content-Security-Policy"]
    for word in ("0 of 3 right answers to spot checks", "no work", "it said 5", "S3-29",
                 "There are none", "near", f'<a href="/why/computer-{people.liz.hostid}">'):
        assert word in text
    assert "With each other" not in text, "no empty table of suspects"
    keys = [user.authenticator for user in m.User.select()]
    m.User.update(authenticator=m.User.authenticator.concat("SECRET")).execute()
    assert keys and "SECRET" not in page_text()


def test_real_names_of_boinc_computers_are_not_shown(people, black):
    m.Host.update(domain_name="lizs-laptop", client_version="8.0.2").where(
        m.Host.id == people.liz.hostid).execute()
    ban(black, people.liz)
    text = page_text()
    assert "lizs-laptop" not in text and f"computer {people.liz.hostid}" in text


def test_the_json_and_the_command_say_the_same(policy, people, black, beside, capsys):
    policy("check")
    wrong_verdict(1, people.liz)
    told = get("/trust.json").json
    (entry,) = told["entries"]
    assert entry["host"] == people.liz.hostid and entry["evidence"]["said"] == "5"
    assert told["error_rates"]["near"] == {"wrong": 0, "compared": 0}
    titles = [section["title"] for section in told["sections"]]
    assert titles[:2] == ["Black list", "Suspects"]
    assert all(len(row) == len(s["columns"]) for s in told["sections"] for row in s["rows"])
    command("trust")
    printed = capsys.readouterr().out
    assert all(title in printed for title in titles) and "near_1_0 is wrong" in printed
    (say,) = m.plugged("trust_of_host")
    first, second = say(people.liz.host(), clock.now)
    assert first.startswith("On the black list: no work but spot checks until")
    assert second == "near: 0 of 1 compared answers right, the last 0 in a row."
    (say,) = m.plugged("trust_of_hosts")
    assert say([people.liz.hostid, 99], clock.now) == {people.liz.hostid: [first, second], 99: []}


def test_old_things_are_forgotten(people, black, spots):
    entry = ban(black, people.liz)
    m.project.write(lambda: black.close(entry, "over", NOW))
    spots.SpotCheck.create(workunit=1, result="a", app=1, host=1, sent=NOW)
    hourly = sys.modules["minigrid_plugin_trust"].hourly
    hourly(NOW + 31 * DAY)
    assert spots.SpotCheck.get().found == spots.NOTHING and len(entries()) == 1
    hourly(NOW + 366 * DAY)
    assert not spots.SpotCheck.select().exists() and entries() == []


# ---- What strict reviewers tried ---------------------------------------------------


def test_hosts_that_fail_at_spot_checks_do_not_make_a_decided_workunit_fail(policy, people):
    policy("recheck", spot_checks=1.0)
    name = decide(1, ["5", "5"], [people.anna, people.ben], max_error_results=2)
    for n in range(6):
        client = Client(f"broken {n}")
        for task in client.fetch(clock.now):
            assert task.startswith(name)
            client.report(task, None, clock.now)
        passes(2)
    wu = next(wu for wu in make.units() if wu.name == name)
    assert not wu.error_mask and wu.assimilate_state == m.AssimilateState.DONE
    assert sum(r.outcome == O.CLIENT_ERROR for r in wu.results) == 2  # max_error_results


def test_an_entry_for_an_application_that_is_not_served_any_more(policy, people, folder):
    """Also where only one is left, an entry for another one is none for it."""
    policy("recheck")
    decide(1, ["5", "5", "77"], three(people))
    assert [entry.app for entry in entries()] == [m.apps["near"].id]
    (folder / "near.py").unlink()
    make.restart(folder, stock=0, min_sendwork_interval=0)
    assert list(m.apps) == ["count"]
    make.add("count", 1, clock.now)
    assert people.liz.fetch(clock.now + 5) == ["count_1_0"]
