"""Why? Events are kept with the changes, stay few, and are told in plain words [U-03]."""

import gzip
import json
import re
import sys
import time
from collections import Counter

import make
import pytest
from make import DAY, NOW, Client, add, answered, copies, result
from web import Web

import minigrid as m

EVIL = "<script>alert(1)</script>\x1b[31m"


def plugin():
    """The module under test, as the process has loaded it."""
    return sys.modules[m.plugged("at_answer")[0].__module__]


def events(**where):
    """The kept events: (rule, number of the copy, computer, text)."""
    return [(e.rule, e.copy, e.host, e.text)
            for e in plugin().Event.select().filter(**where).order_by(plugin().Event.id)]


def tell(name, now=NOW, public=False):
    """The story of a name: its title, its parts by title, is it known?"""
    title, parts, known = plugin().tell(name, now, public)
    return title, {part["title"]: part for part in parts}, known


def text(name, now=NOW, public=False):
    """The story of a name as a terminal shows it."""
    title, parts, _ = plugin().tell(name, now, public)
    return "\n".join(plugin().as_text(title, parts, now))


def now_of(name, now=NOW, public=False):
    """What is said of a name's present, as one text."""
    return " | ".join(tell(name, now, public)[1]["Now"]["texts"])


def passes(first, n=4):
    for now in range(first, first + n):
        m.run_pass(now)


@pytest.fixture
def few(monkeypatch):
    """few(n): keep n events at most."""
    return lambda n: monkeypatch.setattr(plugin(), "settings", plugin().WhySettings(events=n))


def web():
    """The pages, as of the time of the tests."""
    page = Web()
    page.now = NOW + 60
    return page


@pytest.fixture(autouse=True)
def no_trouble():
    """An event that could not be kept is a trouble: no test may pass with one unseen."""
    yield
    assert [error for _, error in m.project.errors if "events are not kept" in error] == []


# ---- What is kept ----------------------------------------------------------------


def test_every_rule_that_fires_is_an_event_with_its_numbers(grid):
    name = answered("5", "5")
    unit = m.Workunit.get(name=name)
    passes(NOW + 1)
    first, second = [r.host_id for r in copies()]
    kept = events(workunit=unit.id)
    assert kept[:2] == [("make a copy", 0, 0, ""), ("make a copy", 1, 0, "")]
    assert ("send", 0, first, f"deadline @{NOW + DAY}") in kept
    assert ("report success", 1, second, "ran 0 s") in kept
    assert ("ask for validation", -1, 0, "min_quorum 2") in kept
    assert ("valid", 0, first, "credit 10") in kept
    assert ("consensus", -1, 0, "credit 10 for each valid copy") in kept
    counted = {row.rule: row.n for row in m.Firing.select()}
    assert Counter(rule for rule, *_ in kept if rule) == counted
    times = [e.time for e in plugin().Event.select().order_by(plugin().Event.id)]
    assert times == sorted(times) and times[0] == NOW and times[-1] > NOW


def test_errors_and_time_outs_say_their_numbers(grid):
    unit, late = add(), Client("late")
    (name,), (lost,) = Client("bad").fetch(), late.fetch()
    Client("bad", hostid=1, seqno=1).report(name)
    m.run_pass(NOW + DAY + 1)
    late.report(lost, now=NOW + DAY + 2)
    kept = {rule: numbers for rule, _, _, numbers in events(workunit=unit.id)}
    assert kept["report error"] == "exit status 1, client state 3, ran 0 s"
    assert kept["time out"] == f"deadline was @{NOW + DAY}"
    assert kept["report error late"] == "exit status 1, client state 3, ran 1 s"


def test_new_copies_have_no_id_yet_and_are_told_by_their_number(grid):
    unit = add(min_quorum=3)
    assert [copy for rule, copy, *_ in events(workunit=unit.id)] == [0, 1, 2]
    assert [row[1][0] for row in tell("near_0_2")[1]["History"]["rows"]] == ["near_0_2"]


def test_explanations_are_kept_with_their_row(grid):
    unit, client = add(), Client("ann")
    (name,) = client.fetch()

    def act():
        m.explain(result(name), "drew 3 copies: r = 2.5, 0.3 < 0.5")
        m.explain(m.Workunit.get(), "a workunit's")
        m.explain(client.host(), "on the black list for 7 days")

    m.project.write(act)
    kept = [e for e in events() if e[0] == ""]
    assert kept == [("", 0, client.hostid, "drew 3 copies: r = 2.5, 0.3 < 0.5"),
                    ("", -1, 0, "a workunit's"),
                    ("", -1, client.hostid, "on the black list for 7 days")]
    assert [e.workunit for e in plugin().Event.select().where(plugin().Event.rule == "")] == [
        unit.id, unit.id, 0]
    assert "on the black list for 7 days" in text(f"host {client.hostid}")
    assert "black list" not in text(f"host {client.hostid}", public=True)
    assert "drew 3 copies: r = 2.5, 0.3 < 0.5" in text(name)


def test_what_is_undone_was_no_event(grid):
    unit = add()
    before = events()

    def act():
        m.fire(m.CANCEL, unit)
        raise ValueError("no")

    with pytest.raises(ValueError):
        m.project.write(act)
    assert events() == before


def test_a_fault_in_telling_stops_nothing(grid, monkeypatch):
    monkeypatch.setitem(plugin().NUMBERS, "make a copy", lambda r: r.no_such_field)
    assert add().id == 1 and len(copies()) == 2
    assert "events are not kept" in m.project.errors.pop()[1]
    assert m.project.errors == [] and events() == []


def test_a_store_that_takes_no_events_takes_no_change(grid, few):
    """As with any other part of a change: all or nothing, and the writer lives on."""
    m.db.execute_sql("ALTER TABLE event RENAME TO elsewhere")
    with pytest.raises(m.StoreError, match="no such table"):
        add()
    assert copies() == []
    m.db.execute_sql("ALTER TABLE elsewhere RENAME TO event")
    assert add()


def test_events_go_with_the_purge_and_only_then(grid):
    make.settings(purge_delay=100)
    old, young = answered("1", "1"), add(number=1)
    passes(NOW + 1, 6)
    assert events(workunit=1) and events(workunit=young.id)
    passes(NOW + 110, 2)
    assert not m.Workunit.select().where(m.Workunit.name == old).exists()
    assert not events(workunit=1) and events(workunit=young.id)
    assert not events(rule="purge")


def test_the_oldest_events_go_when_there_are_too_many(grid, few):
    for number in range(30):
        add(number=number)
    assert len(events()) == 60
    few(60)
    assert plugin().forget_events(NOW) == 0
    few(50)
    assert plugin().forget_events(NOW) == 15  # ten too many, and a tenth of 50
    assert len(events()) == 45
    assert min(e.workunit for e in plugin().Event.select()) == 8
    assert plugin().forget_events(NOW) == 0


def test_holes_in_the_ids_are_no_events(grid, few):
    units = [add(number=number) for number in range(30)]
    plugin().Event.delete().where(plugin().Event.workunit.between(2, 29)).execute()
    few(10)
    assert plugin().forget_events(NOW) == 0
    assert [wu for (wu,) in plugin().Event.select(plugin().Event.workunit).tuples()] == [
        units[0].id] * 2 + [units[29].id] * 2


def test_they_go_in_chunks(grid, few, monkeypatch):
    monkeypatch.setattr(plugin(), "FORGET_CHUNK", 7)
    for number in range(20):
        add(number=number)
    few(20)
    writes, write = [], m.project.write
    with monkeypatch.context() as patch:
        patch.setattr(m.project, "write", lambda f: writes.append(1) or write(f))
        assert plugin().forget_events(NOW) == 22
    assert len(writes) == 4


def test_no_events_if_none_are_wanted(grid, few):
    few(0)
    add()
    assert events() == []
    assert "Nothing is known of it (any more)." in text("near_0")


def test_the_setting_is_read_from_setup_cfg(tmp_path):
    (tmp_path / "setup.cfg").write_text("[why]\nevents = 7\n")
    assert m.read_settings(tmp_path / "setup.cfg", plugin().WhySettings, "why").events == 7
    assert plugin().WhySettings().events == 200_000


def test_a_pass_does_not_walk_through_the_events(grid, few):
    """Each second it asks how many there may be: by the ends of the table."""
    add()
    asked = []
    m.db.connection().set_trace_callback(asked.append)
    assert plugin().forget_events(NOW) == 0
    m.db.connection().set_trace_callback(None)
    plans = [row[3] for sql in asked for row in m.db.execute_sql("EXPLAIN QUERY PLAN " + sql)]
    assert plans and not [plan for plan in plans if not plan.startswith("SEARCH")]


def test_purge_and_look_ups_use_indexes(grid):
    add()

    def plan(sql):
        return " ".join(row[3] for row in m.db.execute_sql("EXPLAIN QUERY PLAN " + sql))

    assert "USING INDEX event_workunit" in plan("DELETE FROM event WHERE workunit = 1")
    assert "USING INDEX event_of_host" in plan(
        "SELECT * FROM event WHERE workunit = 0 AND host = 1 ORDER BY id DESC LIMIT 10")


# ---- Requests --------------------------------------------------------------------


def trace(client):
    row = plugin().HostTrace.get_or_none(host=client.hostid)
    return json.loads(row.requests) if row else []


def test_requests_for_work_are_kept_with_reasons_and_counts(grid):
    add(number=0, rsc_memory_bound=3e9)
    add(number=1, rsc_memory_bound=3e9)
    client = Client("ann")
    client.fetch(host={"m_nbytes": 1e9}, work_req_seconds=3600)
    (entry,) = trace(client)
    assert entry == {"first": NOW, "last": NOW, "n": 1, "seconds": 3600, "sent": [], "reasons": {
        "near: needs 3 GB of memory, you have 1": 4}}
    shown = text(f"host {client.hostid}")
    assert "work for 3600 s" in shown and "needs 3 GB of memory, you have 1 (4 times)" in shown


def test_what_it_got_is_kept(grid):
    add()
    client = Client("ann")
    assert client.fetch() == ["near_0_0"]
    assert trace(client)[0]["sent"] == ["near_0_0"]
    assert "1 copy: near_0_0" in text(f"host {client.hostid}")
    assert "near_0_0" not in text(f"host {client.hostid}", public=True)


def test_requests_are_kept_by_one_statement_and_survive_all(grid, monkeypatch):
    """A change that is taken back, another store or process, many hosts: the store is right."""
    monkeypatch.setattr(plugin(), "TRACES_KNOWN", 2)
    plugin().traces.clear()  # of other projects that this process has had open
    clients = [make.Client(f"host {n}") for n in range(3)]
    for client in clients:
        client.fetch(NOW)

    def written(client, now):
        seen = []
        m.db.connection().set_trace_callback(seen.append)
        client.fetch(now)
        m.db.connection().set_trace_callback(None)
        return [text.split()[0] for text in seen if '"host_trace"' in text]

    assert written(clients[2], NOW + 1) == ["UPDATE"]
    assert written(clients[0], NOW + 1) == ["SELECT", "REPLACE"]  # Forgotten, being one too many.
    assert [entry["n"] for entry in trace(clients[0])] == [2]
    with monkeypatch.context() as spoilt, pytest.raises(TypeError):
        spoilt.setattr(sys.modules["minigrid_plugin_sampling"], "at_contact", None)
        clients[0].fetch(NOW + 2)
    assert [entry["n"] for entry in trace(clients[0])] == [2]
    clients[0].fetch(NOW + 3)
    assert [entry["n"] for entry in trace(clients[0])] == [3]
    plugin().HostTrace.delete().execute()
    clients[0].fetch(NOW + 4)
    assert [entry["n"] for entry in trace(clients[0])] == [1]


def test_a_request_without_a_wish_for_work_is_none(grid):
    client = Client("ann")
    client.ask()
    assert trace(client) == []
    assert "None yet." in tell(f"host {client.hostid}")[1]["Its last requests for work"]["texts"]


def test_the_same_answer_again_is_counted(grid):
    client = Client("ann")
    for k in range(5):
        client.fetch(NOW + 10 * k)
    (entry,) = trace(client)
    assert (entry["n"], entry["first"], entry["last"]) == (5, NOW, NOW + 40)
    assert list(entry["reasons"]) == [client.host().why_no_work]
    add()
    assert client.fetch(NOW + 50)
    client.fetch(NOW + 60)
    assert [(e["n"], len(e["sent"])) for e in trace(client)] == [(1, 0), (1, 1), (5, 0)]
    assert "5 times since" in text(f"host {client.hostid}", NOW + 70)


def test_the_last_ten_are_kept(grid):
    client = Client("ann")
    for number in range(13):
        add(number=number)
        assert client.fetch(NOW + number)
    assert [e["last"] - NOW for e in trace(client)] == list(range(12, 2, -1))


def test_two_hosts_are_two(grid):
    a, b = Client("a"), Client("b")
    add()
    a.fetch()
    b.fetch()
    b.fetch()
    assert (len(trace(a)), len(trace(b))) == (1, 2)


def test_a_huge_wish_is_no_trouble(grid):
    client = Client("ann")
    client.fetch(work_req_seconds=float("inf"))
    assert trace(client)[0]["seconds"] == 10**9


# ---- What it waits for -------------------------------------------------------------


def test_it_waits_for_a_computer(grid):
    add()
    assert "near_0_0 waits for a computer; near_0_1 waits for a computer" in now_of("near_0")
    assert now_of("near_0_1") == "waits for a computer"


def test_it_says_who_was_refused_why(grid):
    add(rsc_memory_bound=3e9)
    for n in range(3):
        Client(f"user {n}").fetch(host={"m_nbytes": 1e9})
    for public in (False, True):
        assert "near_0_0 waits for a computer (asked for 3 times, refused because: needs 3 GB " \
               "of memory, you have 1 (3))" in now_of("near_0", public=public)
        assert "asked for 3 times" in text("near_0_0", public=public)


def test_it_waits_for_one_more_answer(grid):
    add()
    a, b = Client("a"), Client("b")
    (name,) = a.fetch()
    b.fetch()
    assert "waits for 2 more answers" in now_of("near_0")
    a.report(name, "5", NOW + 10)
    told = now_of("near_0", NOW + 100)
    assert "1 of at least 2 answers are in" in told
    assert f"waits for 1 more answer: near_0_1 is with computer {b.hostid} until @{NOW + DAY} " \
           f"(in 23 hours)" in told
    assert now_of("near_0_1", NOW + 100).startswith(f"waits for its computer until @{NOW + DAY}")
    assert "given up in the next pass" in now_of("near_0_1", NOW + DAY + 1)
    assert now_of("near_0_0") == "waits to be compared with another copy"


def test_it_waits_for_the_next_pass(grid):
    answered("5", "5")
    m.run_pass(NOW + 1, [m.transitioner])
    assert "waits for the comparison of 2 answers, in the next pass" in now_of("near_0", NOW + 1)
    assert "which should be over by now: either no server runs, or" in now_of("near_0", NOW + 61)
    assert now_of("near_0_0") == "waits to be compared"


def test_it_was_decided(grid):
    answered("5", "50", "5")
    m.run_pass(NOW + 1, [m.transitioner, m.validator])
    told = now_of("near_0", NOW + 1)
    assert told.startswith("decided: 2 of 3 agreed; the answer is that of near_0_0")
    assert "waits for its application to take the answer" in told
    m.apps.pop("near")
    assert "its application, which is not served now" in now_of("near_0", NOW + 1)
    assert now_of("near_0_1") == "is over: it waits for nothing"


def test_it_was_decided_by_one(grid):
    answered("5")
    passes(NOW + 1)
    assert now_of("near_0").startswith("decided: the only answer was taken, that of near_0_0")


def test_they_do_not_agree_and_one_more_is_asked_for(grid):
    answered("5", "50")
    passes(NOW + 1)
    told = now_of("near_0", NOW + 5)
    assert "2 of at least 2 answers are in, they do not agree" in told
    (row,) = [row for row in tell("near_0_2")[1]["History"]["rows"] if row[3] == "make a copy"]
    assert row[4] == "2 usable, 0 waiting or out, 0 of no use"


def test_a_repeat_says_what_became_of_the_others(grid):
    add(min_quorum=3)
    (name,) = Client("a").fetch()
    Client("b").fetch()
    Client("c", hostid=0).fetch()
    Client("a", hostid=1, seqno=1).report(name)
    passes(NOW + 1, 2)
    rows = tell("near_0")[1]["History"]["rows"]
    made = [(row[1][0], row[4]) for row in rows if row[3] == "make a copy"]
    assert made == [("near_0_0", ""), ("near_0_1", ""), ("near_0_2", ""),
                    ("near_0_3", "0 usable, 2 waiting or out, 1 of no use")]
    plugin().Event.delete().where(plugin().Event.id == 1).execute()
    assert "waiting or out" in text("near_0")  # It still begins with the making of copies.
    plugin().Event.delete().where(plugin().Event.rule == "make a copy",
                                  plugin().Event.copy < 3).execute()
    assert "waiting or out" not in text("near_0")  # What is left would count too few.


def test_it_was_given_up(grid):
    add(max_error_results=0)
    client = Client("a")
    client.report(client.fetch()[0], now=NOW + 1)
    passes(NOW + 2)
    assert "given up: too many copies ended in an error" in now_of("near_0", NOW + 10)
    (row,) = [r for r in tell("near_0")[1]["History"]["rows"] if r[3] == "hand over the failure"]
    assert row[4] == "too many copies ended in an error"


def test_it_was_put_off_after_an_error(grid):
    unit = answered("5", "5")
    (m.project.data / "results" / "fail").write_text("")
    passes(NOW + 1)
    assert m.project.put_off and unit
    assert "put off until" in now_of("near_0", NOW + 5)
    assert m.project.errors
    (m.project.data / "results" / "fail").unlink()


def test_it_is_finished(grid):
    answered("5", "5")
    passes(NOW + 1)
    assert "finished: the application has its answer, its files are gone; it moves to the " \
           "archive" in now_of("near_0", NOW + 5)


def test_plugins_add_what_they_wait_for(grid, monkeypatch):
    add()
    monkeypatch.setattr(plugin(), "waits_for", lambda wu, results, now: [
        f"{wu.name} waits for its turn"], raising=False)
    (say,) = m.plugged("credit_sentence")
    monkeypatch.setattr(sys.modules[say.__module__], "credit_sentence",
                        lambda r, wu: f"what {r.name} earns")
    monkeypatch.setattr(plugin(), "trust_of_host", lambda host, now: [f"{host.id} is trusted"],
                        raising=False)
    assert "near_0 waits for its turn" in now_of("near_0")
    shown = text("near_0_0")
    assert "Credit: what near_0_0 earns" in shown
    client = Client("a")
    client.ask()
    assert f"{client.hostid} is trusted" in text(f"host {client.hostid}")


# ---- Secrets -----------------------------------------------------------------------


def test_the_public_learns_who_and_what_when_all_copies_are_back(grid):
    answered("5", "5", min_quorum=2, target_nresults=3)
    client = Client("straggler")
    (name,) = client.fetch()
    passes(NOW + 1)
    assert "decided: 2 of 2 agreed" in now_of("near_0", NOW + 5)
    for one in ("near_0", "near_0_0", name):
        shown = text(one, NOW + 5, public=True)
        for word in ("decided", "agree", "consensus", "valid", "computer 1", "computer 2",
                     f"computer {client.hostid}", "redit"):
            assert word not in shown.replace(plugin().HIDDEN, ""), (one, word)
        assert "send" in shown and plugin().HIDDEN in shown and "make a copy" not in shown
        assert "Wanted" not in shown and "Wanted" in text("near_0", NOW + 5)
    assert f"{name} is with a computer until" in now_of("near_0", NOW + 5, True)
    assert name not in text(f"host {client.hostid}", NOW + 5, True)
    client.report(name, "5", NOW + 6)
    passes(NOW + 7)
    shown = text("near_0", NOW + 12, public=True)
    assert "decided: 3 of 3 agreed" in shown and f"computer {client.hostid}" in shown
    assert name in text(f"host {client.hostid}", NOW + 12, True)


def test_a_copy_kept_back_is_hidden(grid):
    answered("5", "5")
    passes(NOW + 1, 2)
    m.Result.insert(workunit=1, app=1, name="near_0_2", create_time=NOW, **{
        "server_state": m.ServerState.INACTIVE}).execute()
    assert "near_0_2" in text("near_0", NOW + 5)
    shown = text("near_0", NOW + 5, public=True)
    assert "near_0_2" not in shown and "decided: " not in shown and "not all copies" in shown
    m.Result.insert(workunit=1, app=1, name="near_0_3", create_time=NOW, **{
        "server_state": m.ServerState.OVER, "outcome": m.Outcome.DIDNT_NEED}).execute()
    for one in ("near_0", "near_0_3"):
        told = text(one, NOW + 5, public=True)
        assert "not needed" not in told and "waits for a computer" in told
    assert not tell("near_0_2", NOW + 5, public=True)[2] and tell("near_0_2", NOW + 5)[2]


def test_the_real_name_of_a_boinc_clients_computer_is_never_shown(grid):
    ours, theirs = Client("a"), Client("b")
    ours.ask(client_version="minigrid 1", host={"domain_name": "blue"})
    theirs.ask(client_version="8.0.2", host={"domain_name": "annas-laptop"})
    assert tell("blue")[0] == f"Computer {ours.hostid}" == tell("blue", public=True)[0]
    for public in (False, True):
        assert not tell("annas-laptop", public=public)[2]
        assert "annas-laptop" not in text(f"host {theirs.hostid}", public=public)
    for client in (ours, theirs):
        assert "ann" not in text(f"host {client.hostid}", public=True)


def test_no_address_and_no_key(grid):
    client = Client("secret-key")
    m.User.update(name="ann@example.org", email_addr="ann@example.org").execute()
    client.ask()
    for public in (False, True):
        shown = text(f"host {client.hostid}", public=public)
        assert "secret-key" not in shown and "ann@" not in shown and "volunteer 1" in shown


def test_what_a_program_wrote_is_for_the_command(grid):
    add()
    client = Client("a")
    (name,) = client.fetch()
    told = m.Report(name, client_state=3, exit_status=1, stderr_out="Trace\x1b[2Jback\nKeyError")
    client.ask(reports=[told])
    shown = text(name)
    assert "What its program wrote" in shown and "  Trace?[2Jback\n  KeyError" in shown
    assert "KeyError" not in text(name, public=True)


# ---- Names -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host 1", "computer 1", "host-1", "computer-1", "Host #1", "1",
                                  " host  1 "])
def test_a_computer_has_a_number(grid, name):
    Client("ann").ask()
    assert tell(name)[0] == "Computer 1"


def test_computers_of_one_name_are_listed(grid):
    for key in "abc":
        Client(key).ask(host={"domain_name": "lab"})
    title, parts, known = tell("lab")
    assert title == "3 computers" and known
    assert [row[0][0] for row in parts[""]["rows"]] == ["computer 3", "computer 2", "computer 1"]


@pytest.mark.parametrize("name, near", [
    ("near_7", "near_0"), ("Near_0", "near_0"), ("neer_0", "near_0"), ("near_0_9", "near_0_0"),
    ("near", "near_0"), ("NEAR_0_1", "near_0_1")])
def test_an_unknown_name_says_what_names_look_like(grid, name, near):
    add()
    title, parts, known = tell(name)
    assert not known and title == f"Nothing is called {name}"
    assert "A workunit is called like count_3" in parts[""]["texts"][0]
    assert near in [row[0][0] for row in parts["Near"]["rows"]]


@pytest.mark.parametrize("name", ["", "zzzz", "host 77", "%", "'; DROP TABLE event", "_", "~",
                                  "x" * 5000, EVIL, "\udcff", "9" * 400, "near_" + "9" * 30])
def test_any_name_is_answered(grid, name):
    add()
    title, parts, known = tell(name)
    assert not known and len(title) < 250 and parts
    assert "\x1b" not in text(name)


# ---- The archive -------------------------------------------------------------------


def purged(*answers):
    """A workunit that is in the archive."""
    make.settings(purge_delay=100)
    name = answered(*answers)
    passes(NOW + 1, 6)
    passes(NOW + 110, 2)
    assert not make.units()
    return name


@pytest.mark.parametrize("public", [False, True])
def test_the_archive_tells_of_what_was_purged(grid, public):
    name = purged("5", "50", "5")
    for one in (name, f"{name}_1"):
        title, parts, known = tell(one, NOW + 200, public)
        assert known and title == f"Workunit {name}"
        assert parts["Now"]["texts"][0] == f"decided: 2 of 3 agreed; the answer is that of {name}_0"
        assert f"purged @{NOW + 110}" in parts["Now"]["texts"][1]
        states = [row[4] for row in parts["Copies"]["rows"]]
        assert [s.partition(":")[0] for s in states] == ["valid", "invalid", "valid"]
    assert not tell("near_00")[2]


def test_a_file_in_the_archive_is_no_workunit(grid):
    make.settings(purge_delay=100)
    answered("5", files={"data": b"shared"})
    passes(NOW + 1, 6)
    shared = make.units()[0].input_files[1]["name"]
    passes(NOW + 110, 2)
    assert not make.units() and not tell(shared)[2] and tell("near_0")[2]


def test_the_archive_tells_of_failures(grid):
    make.settings(purge_delay=100)
    add(max_error_results=0, min_quorum=1)
    client = Client("a")
    client.report(client.fetch()[0], now=NOW + 1)
    passes(NOW + 2, 6)
    passes(NOW + 110, 2)
    assert "given up: too many copies ended in an error" in now_of("near_0", NOW + 200)


def test_a_large_archive_is_not_read_for_the_page(grid, monkeypatch):
    name = purged("5", "5")
    m.project.write(m.App.update(next_number=1).where(m.App.name == "near").execute)
    monkeypatch.setattr(plugin(), "ARCHIVE_BYTES", {True: 10, False: 10_000})
    assert "too large to be searched here" in now_of(name, public=True)
    assert "decided" in now_of(name)
    assert not tell("near_1", public=True)[2]  # never made


def test_a_damaged_archive_stops_nothing(grid):
    name = purged("5", "5")
    folder = m.project.data / "archive"
    (folder / "workunits-9999-01.jsonl.gz").write_bytes(gzip.compress(b'"name":"near_0" {')[:-9])
    (folder / "workunits-9999-02.jsonl.gz").write_bytes(b"nothing")
    assert tell(name)[2]


# ---- The page ----------------------------------------------------------------------


def test_the_page(grid):
    answered("5", "50", "5")
    passes(NOW + 1)
    page = web()
    got = page("GET", "/why/near_0")
    assert got.status == 200 and got.headers["Content-Type"] == "text/html; charset=utf-8"
    html = got.body.decode()
    assert "decided: 2 of 3 agreed" in html and 'href="/why/near_0_1"' in html
    assert 'href="/why/computer-2"' in html and "S0-43" in html
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW))
    assert f'<time datetime="{stamp}">' in html and f"@{NOW}" not in html
    policy = got.headers["Content-Security-Policy"]
    assert "form-action 'self'" in policy and "default-src 'none'" in policy
    assert page("GET", "/why?name=near_0").body == got.body
    assert page("GET", "/why/near_7").status == 404
    assert b"/why/near_0" in page("GET", "/why/near_7").body
    empty = page("GET", "/why")
    assert empty.status == 200 and b"<form" in empty.body and b"same as JSON" not in empty.body


def test_the_page_as_json(grid):
    answered("5", "5")
    passes(NOW + 1)
    got = web()("GET", "/why/near_0.json")
    assert got.status == 200 and got.json["title"] == "Workunit near_0"
    parts = {part["title"]: part for part in got.json["parts"]}
    sent = [row for row in parts["History"]["rows"] if row["What"] == "send"]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW))
    assert [row["When"] for row in sent] == [stamp] * 2
    assert [row["Of"] for row in sent] == ["near_0_0", "near_0_1"]
    assert sent[0]["Rules"] == m.SEND.cites
    assert "@" not in json.dumps(got.json)
    assert web()("GET", "/why/near_7.json").status == 404


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>",
                                  "'><svg/onload=alert(1)>", "{{1+1}}", "% import os", "Zoë"])
def test_nothing_from_outside_becomes_html(grid, evil):
    client = Client(evil)
    client.ask(host={"domain_name": evil})
    add(rsc_memory_bound=3e9)
    client.fetch(host={"m_nbytes": 1e9})
    m.Host.update(why_no_work=evil).execute()
    row = plugin().HostTrace.get()
    row.requests = json.dumps([{**json.loads(row.requests)[0], "reasons": {evil: 3}}])
    row.save()
    refused = result("near_0_0")
    refused.refusals = [[NOW, 1, evil]]
    refused.save()
    client.fetch()
    page = web()
    for path in ("/why/computer-1", "/why/near_0", "/why/near_0_0", "/why/" + evil.replace(
            "%", "%25").replace("?", "%3F"), "/why?name=" + evil.replace("&", "%26")):
        got = page("GET", path)
        assert got.status in (200, 404)
        html = got.body.decode()
        assert "<script>alert" not in html and "<img" not in html and "<svg" not in html
        assert html.count("<script>") == 1
        assert not re.findall(r"\bon(?:load|error)=(?![^<]*>alert)[^&]*\"", html)


def test_the_status_page_leads_here(grid):
    Client("ann").ask()
    html = web()("GET", "/").body.decode()
    assert 'href="/why/computer-1"' in html and 'action="/why"' in html
    assert '<a href="/why">' in html


# ---- The command -------------------------------------------------------------------


def run(capsys, folder, *name):
    status = m.main(["why", "--data", str(folder / "data"), *name])
    return status, capsys.readouterr().out


def test_the_command(grid, folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(m, "load_plugins", lambda names: None)  # They are loaded.
    monkeypatch.setattr(plugin(), "wall_clock", lambda: NOW + 60)
    answered("5", "50", "5")
    passes(NOW + 1)
    hostid = copies()[1].host_id
    quota = m.HostAppVersion.get(host=hostid).max_jobs_per_day  # It was wrong: less than 1000.
    m.close_project()
    status, out = run(capsys, folder, "near_0")
    assert status == 0 and out.startswith("Workunit near_0, as of ")
    assert "decided: 2 of 3 agreed" in out and f"computer {hostid}" in out
    line = next(line for line in out.splitlines() if " consensus " in line)
    clock = time.strftime("%H:%M:%S", time.localtime(NOW + 1))
    assert clock in line and "S0-43" in line and "credit 10" in line
    status, out = run(capsys, folder, "host", str(hostid))
    assert status == 0 and out.startswith(f"Computer {hostid}")
    assert "near_0_1" in out and "invalid" in out
    assert f"near 1 (python): 1 copy today of {quota} for each processor, 0 valid in a row" in out
    status, out = run(capsys, folder, "near_8")
    assert status == 1 and "Nothing is called near_8" in out and "near_0" in out


def test_times_of_other_days_have_their_date():
    t = int(time.mktime((2024, 3, 9, 12, 0, 0, 0, 0, -1)))
    assert plugin().clock(t, t + 3600) == "12:00:00"
    assert plugin().clock(t, t + DAY) == "2024-03-09 12:00:00"
