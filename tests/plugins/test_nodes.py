"""The progress file: what it shows, when it is written, and that it never stands in the way.

[S3-16 S3-17 S3-18 S3-23 S3-24]
"""

import json
import os
import re
import sys
from html.parser import HTMLParser

import make
import pytest
from make import DAY, NOW, Client
from web import Web

import minigrid as m

EVIL = "<script>alert(1)</script>"
TRICKY = [EVIL, "\"><img src=x onerror=alert(1)>", "{{1+1}}", "% import os", "Zoë \N{FOX FACE}"]


def plugin():
    """The module under test, as the process has loaded it."""
    return sys.modules["minigrid_plugin_nodes"]


@pytest.fixture
def web(grid, monkeypatch):
    """A project that people can look at."""
    monkeypatch.chdir(grid.data)  # no setup.cfg here
    web = Web()
    web.now = NOW
    return web


def host(n=1, **columns):
    """A host of a user of its own; the columns are set as if it had told them."""
    user = m.User.get_or_create(authenticator=f"user {n}", defaults=dict(
        create_time=NOW, name=columns.pop("volunteer", f"user {n}")))[0]
    return m.project.write(lambda: m.Host.create(**{**dict(
        user=user, create_time=NOW, rpc_time=NOW - 5, domain_name=f"pc {n}"), **columns}))


def write(now=NOW):
    """Run the stage; return what nodes.json says afterwards."""
    m.run_pass(now, [plugin().progress])
    return json.loads((m.project.data / "progress" / "nodes.json").read_text())


class Table(HTMLParser):
    """The rows of a page as {label: text}, the texts of dt and dd in turn, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.facts, self.tags, self.cell, self.fact = [], [], [], None, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append({})
        elif tag == "td":
            self.cell = attrs["data-label"]
            self.rows[-1][self.cell] = ""
        self.fact = tag in ("dt", "dd")
        if self.fact:
            self.facts.append("")

    def handle_endtag(self, tag):
        self.cell = None if tag == "td" else self.cell
        self.fact = self.fact and tag not in ("dt", "dd")

    def handle_data(self, text):
        if self.cell:
            self.rows[-1][self.cell] += text
        if self.fact:
            self.facts[-1] += text


def page(web):
    got = web("GET", "/nodes")
    assert got.status == 200
    table = Table(got.body.decode())
    table.rows = [row for row in table.rows if row]
    return table


# ---- What it shows ----------------------------------------------------------------


def test_exactly_four_things_are_shown(web):
    """[S3-24] (a) active nodes, (b) those in contact, (c) computing power, (d) the whole table."""
    host(1, p_fpops=2e9, p_ncpus=4, client_version="7.20.5")
    host(2, p_fpops=2e7, p_ncpus=2, rpc_time=NOW - 61)
    host(3, p_fpops=1e9, rpc_time=NOW - 601)
    told = write()
    assert {key: value for key, value in told.items() if key != "nodes"} == {
        "project": "minigrid", "time": NOW, "active": 2, "interacting": 1,
        "interacting_seconds": 60, "power": 12e9, "connected": 3}
    assert [node["id"] for node in told["nodes"]] == [1, 2, 3]
    shown = page(web)
    assert len(shown.rows) == 3
    assert shown.facts == [
        "active nodes", "2", "interacting with the server just now: a request within 60 seconds",
        "1", "floating-point operations a second: the power of all active nodes, as their clients "
        "measure it, for the part of their time when they may compute", "12.0 billion"]


CONTACT = [(0, 1, True), (59, 1, True), (60, 0, True), (599, 0, True), (600, 0, False)]


@pytest.mark.parametrize("silent, interacting, active", CONTACT)
def test_in_contact_and_active(web, silent, interacting, active):
    """[S3-24] To the second."""
    host(rpc_time=NOW - silent)
    told = write()
    assert (told["interacting"], told["nodes"][0]["active"]) == (interacting, active)
    assert told["active"] == active


def test_who_computes_is_active_though_silent(web):
    ann = Client("ann")
    make.add()
    (name,) = ann.fetch(NOW)
    (node,) = write(NOW + 3600)["nodes"]
    assert (node["active"], node["held"], node["last_contact"]) == (True, 1, NOW)
    ann.report(name, "5", NOW + 3601)
    (node,) = write(NOW + 9000)["nodes"]
    assert (node["active"], node["held"], node["done"], node["avg_turnaround"]) == (
        False, 0, 1, 3601)


def test_who_was_marked_inactive_is_shown_so(web, monkeypatch):
    """[S3-18 S3-21] The node check decides, where it has; who it has not marked must be heard of"""
    for n, silent in ((1, 5), (2, 5), (3, 5000)):
        host(n, rpc_time=NOW - silent)
    monkeypatch.setattr(plugin(), "node_states", lambda ids: {1: False, 2: True, 3: True},
                        raising=False)
    told = write()
    assert [node["active"] for node in told["nodes"]] == [False, True, False]
    assert told["active"] == 1


@pytest.mark.parametrize("columns, power", [
    (dict(p_fpops=1e9, p_ncpus=2, client_version="7.20.5"), 2e9),
    (dict(p_fpops=1e7, p_ncpus=2, client_version="python 0.3"), 2e9),  # Python operations
    (dict(p_fpops=1e9, on_frac=0.5, active_frac=0.5, client_version="7.1"), 0.25e9),
    (dict(p_fpops=1e9, on_frac=7, active_frac=-1, client_version="7.1"), 0),
    (dict(p_fpops=1e29, p_ncpus=10**9, client_version="7.1"), 1e12 * 1024),
    (dict(p_fpops=1e9, p_ncpus=-3, client_version="7.1"), 1e9),
    (dict(p_fpops=1e9, client_version="7.1", rpc_time=NOW - DAY), 0)])
def test_power_counts_what_active_nodes_can_give(web, columns, power):
    host(**columns)
    assert write()["power"] == pytest.approx(power)


@pytest.mark.parametrize("flops, words", [
    (0, "0"), (999, "999"), (3e7, "30.0 million"), (1.26e9, "1.3 billion"), (2e13, "20.0 trillion"),
    (1.5e16, "15,000.0 trillion")])
def test_power_in_words(flops, words):
    assert plugin().power(flops) == words


def test_the_table_is_complete(web, monkeypatch):
    """[S3-24] All hosts, also when they are looked up in several portions."""
    monkeypatch.setattr(plugin(), "CHUNK", 3)
    for n in range(1, 9):
        host(n)
    told = write()
    assert [node["id"] for node in told["nodes"]] == list(range(1, 9))
    assert [row["Computer"] for row in page(web).rows] == [f"pc {n}" for n in range(1, 9)]


@pytest.mark.parametrize("silent, shown", [(30 * DAY - 1, 1), (30 * DAY, 0)])
def test_who_is_silent_for_a_month_is_not_connected(web, silent, shown):
    host(rpc_time=NOW - silent)
    assert write()["connected"] == len(page(web).rows) == shown
    assert ("None yet." in web("GET", "/nodes").body.decode()) == (not shown)


def test_a_row_tells_how_a_node_does(web, monkeypatch):
    monkeypatch.setattr(plugin(), "node_figures", lambda ids: {1: {"near": dict(
        seconds_per_unit=2.5, bandwidth=40000.0, reports=3)}}, raising=False)
    monkeypatch.setattr(plugin(), "trust_of_hosts", lambda ids, now: {
        n: [f"{n} is fine", "so"] for n in ids}, raising=False)
    host(1, p_ncpus=4, p_fpops=1e9, client_version="minigrid 1", avg_turnaround=7300,
         expavg_credit=8, expavg_time=NOW - 7 * DAY)
    (node,) = write()["nodes"]
    assert node["recent_credit"] == 4 and {"1 is fine", "so"} <= set(node["standing"])
    (row,) = page(web).rows
    assert row == {
        "Computer": "pc 1", "Volunteer": "user 1", "State": "active", "Last contact": "5 seconds "
        "ago", "Processors": "4", "GFLOPS": "400.00", "Tasks held": "0", "Done": "0", "Wrong": "0",
        "Turnaround": "2 hours", "Credit a day": "4.00",
        "Measured": "near: 2.5 s, 40 kB/s", "Standing": row["Standing"]}
    assert "1 is fine; so" in row["Standing"]


def test_wrong_answers_are_counted_and_errors_are_not(web):
    ann, eve = Client("ann"), Client("eve")
    make.answered("5", "5", "9", clients=[ann, Client("bob"), eve], min_quorum=2, target_nresults=3)
    m.run_pass(NOW + 1, [m.transitioner, m.validator])
    make.answered("5", None, '"rubbish"', clients=[ann, Client("cyd"), eve], now=NOW + 2,
                  number=1, min_quorum=2, target_nresults=3)
    m.run_pass(NOW + 3, [m.transitioner, m.validator])
    nodes = {node["volunteer"]: (node["done"], node["wrong"]) for node in write(NOW + 4)["nodes"]}
    assert nodes == {"ann": (2, 0), "bob": (1, 0), "eve": (2, 1), "cyd": (0, 0)}
    make.answered("5", "5", "9", clients=[ann, Client("bob"), eve], now=NOW + 5, number=2,
                  min_quorum=2, target_nresults=3, priority=9)
    m.run_pass(NOW + 6, [m.transitioner, m.validator])
    assert {n["volunteer"]: n["wrong"] for n in write(NOW + 90)["nodes"]}["eve"] == 2


def test_nothing_private_is_shown(web):
    """BOINC's clients tell the real name of a computer, and some people give their address."""
    host(1, domain_name="kitchen-of-ann.home", client_version="7.20.5",
         volunteer="ann@example.org", host_cpid="secret cpid")
    write()
    for path in ("/nodes", "/nodes.json"):
        text = web("GET", path).body.decode()
        assert "computer 1" in text and "volunteer 1" in text
        for word in ("kitchen", "example.org", "secret", "user 1"):
            assert word not in text


@pytest.mark.parametrize("name", TRICKY)
def test_nothing_that_others_wrote_becomes_html(web, name, monkeypatch):
    monkeypatch.setattr(plugin(), "trust_of_hosts", lambda ids, now: dict.fromkeys(ids, [name]),
                        raising=False)
    plain = Table(plugin().page(dict(active=0, interacting=0, power=0, connected=1), NOW)).tags
    host(1, domain_name=name, volunteer=name)
    make.settings(name=name)
    (node,) = write()["nodes"]
    table = page(web)
    (row,) = table.rows
    assert (row["Computer"], row["Volunteer"]) == (name, name) and name in row["Standing"]
    assert (node["name"], node["volunteer"]) == (name, name)
    own = ["a"] + ["td"] * len(row) + ["span"] * sum(map(bool, row.values()))
    assert sorted(table.tags) == sorted(plain + own)


# ---- When it is written --------------------------------------------------------------


def written():
    return {name: (m.project.data / "progress" / name).stat().st_mtime
            for name in ("nodes.html", "nodes.json")}


def passes(now):
    return m.run_pass(now, [plugin().progress])["progress"]


def test_there_are_two_background_processes(web):
    """[S3-16 S3-17] The check of the nodes and the display: in each pass, after all work is done.

    A fault in either of them stops nothing.
    """
    stages = [stage.__name__ for stage in m.all_stages()]
    for name in ("node_check", "progress"):
        assert stages.index(name) > stages.index("assimilator")
    host()
    assert m.run_pass(NOW)["progress"] == 2 and "node_check" in m.run_pass(NOW + 1)


def test_it_is_written_every_minute(web):
    """[S3-23]"""
    host()
    assert passes(NOW) == 2
    assert written() == {"nodes.html": NOW, "nodes.json": NOW}
    host(2)
    assert [passes(NOW + s) for s in (0, 1, 59)] == [0, 0, 0]
    assert written()["nodes.html"] == NOW
    assert passes(NOW + 60) == 2
    assert written()["nodes.html"] == NOW + 60 and len(page(web).rows) == 2


def test_more_often_only_if_something_has_changed(web):
    settings("seconds = 10")
    host(rpc_time=NOW - 100)
    assert [passes(NOW + s) for s in (0, 9, 10, 20)] == [2, 0, 0, 0]
    host(2, rpc_time=NOW - 100)
    assert [passes(NOW + s) for s in (29, 30, 40, 79, 90, 101)] == [0, 2, 0, 0, 2, 0]


def test_a_clock_set_back_does_not_stop_it(web):
    assert [passes(now) for now in (NOW, NOW - DAY, NOW - DAY + 59, NOW - DAY + 60)] == [2, 2, 0, 2]


def settings(text):
    with open("setup.cfg", "w") as file:
        file.write(f"[nodes]\n{text}\n")
    plugin().routes(m.bottle.Bottle(), None)
    os.unlink("setup.cfg")


def test_it_can_be_switched_off(web):
    settings("seconds = 0")
    assert passes(NOW) == 0
    got = web("GET", "/nodes")
    assert got.status == 404
    assert b"this project writes no table of nodes: [nodes] seconds is 0" in got.body


def test_a_misspelt_setting_is_refused(web):
    with pytest.raises(m.ClientError, match="unknown setting 'second'; known are seconds, days"):
        settings("second = 5")
    os.unlink("setup.cfg")


def test_where_nobody_can_look_nothing_is_written(web, folder):
    passes(NOW)
    with make.project(folder, {"count": make.COUNT}):
        assert passes(NOW + 1000) == 0


def test_it_is_replaced_whole(web, monkeypatch):
    """[S3-23] A reader sees the old file or the new one, whatever happens amid writing."""
    host()
    write()
    before = [web("GET", path).body for path in ("/nodes.json", "/nodes")]
    replace, replaced = os.replace, []
    monkeypatch.setattr(os, "replace", lambda new, old: replaced.append(
        old.read_bytes()) or replace(new, old))
    host(2)
    assert len(write(NOW + 60)["nodes"]) == len(page(web).rows) == 2
    assert replaced == before
    assert os.listdir(m.project.data / "progress") in (
        ["nodes.html", "nodes.json"], ["nodes.json", "nodes.html"])


# ---- Never in the way ----------------------------------------------------------------


@pytest.mark.parametrize("what", ["disk", "plugin", "store"])
def test_a_failure_is_told_once_and_stops_nothing(web, what, monkeypatch):
    """[S3-16] Neither the pass nor the old file; when it is over, all goes on, or fails anew."""
    host()
    write()
    other = m.DatabaseError("malformed") if what == "store" else OSError(28, "No space left")
    place = {"disk": "put", "plugin": "node_of", "store": "facts_of"}[what]

    def fail(*args):
        raise other

    with monkeypatch.context() as patch:
        patch.setattr(plugin(), place, fail)
        for now in range(NOW + 60, NOW + 600, 20):
            assert m.run_pass(now, [plugin().progress, m.transitioner]) == {
                "progress": 0, "transitioner": 0}
    (trouble,) = m.project.errors
    assert trouble == (NOW + 60, f"the table of nodes cannot be written: {other}")
    assert m.project.counts["stage errors"] == 0
    assert len(page(web).rows) == 1 and written()["nodes.html"] == NOW
    assert passes(NOW + 660) == 2
    monkeypatch.setattr(plugin(), place, fail)
    passes(NOW + 720)
    assert len(m.project.errors) == 2


def test_a_failure_is_not_tried_again_every_second(web, monkeypatch):
    tried = []
    monkeypatch.setattr(plugin(), "write_files", lambda now: tried.append(now) or 1 / 0)
    for now in range(NOW, NOW + 120):
        passes(now)
    assert tried == [NOW, NOW + 60]


def test_it_changes_nothing_in_the_store(web):
    """[S3-16] The course of computing is the same with it and without."""
    make.answered("5", "5")
    before = make.dump()
    write(NOW + 3600)
    assert make.dump() == before


def test_the_cost_does_not_grow_with_what_was_done(web, monkeypatch):
    """One query of each kind for 500 hosts, each by an index."""
    for n in range(20):
        host(n)
    asked = []
    real = m.db.execute_sql
    monkeypatch.setattr(m.db, "execute_sql", lambda sql, *args: asked.append((sql, args)) or
                        real(sql, *args))
    own = ("node_states", "node_figures", "trust_of_hosts")  # others answer for what they ask
    monkeypatch.setattr(plugin(), "plugged", lambda name: [] if name in own else m.plugged(name))
    write()
    asked = [(sql, args) for sql, args in asked if sql.startswith("SELECT")]
    assert len(asked) == 5  # the hosts, three facts of them, and that there are no more
    for sql, args in asked:
        plan = " ".join(row[3] for row in real(f"EXPLAIN QUERY PLAN {sql}", *args))
        for table in ("result", "host_app_version", "wrong_answers"):
            assert not re.search(rf"SCAN (t\d )?\"?{table}\b", plan), plan


def test_what_others_tell_is_asked_for_many_hosts_at_once(web):
    """Who is trusted, who is marked, what was measured."""
    def cost(now):
        asked = []
        m.db.connection().set_trace_callback(asked.append)
        told = write(now)
        m.db.connection().set_trace_callback(None)
        return told["connected"], len(asked)

    host(1)
    one, few = cost(NOW)
    for n in range(2, 30):
        host(n)
    assert (one, cost(NOW + 90)) == (1, (29, few))


# ---- By HTTP ---------------------------------------------------------------------------


def test_the_files_are_served_as_they_were_written(web):
    """[S3-23] With the time they are of, and told to run nothing."""
    host()
    write()
    for path, name, kind in (("/nodes", "nodes.html", "text/html; charset=utf-8"),
                             ("/nodes.json", "nodes.json", "application/json")):
        got = web("GET", path)
        assert got.body == (m.project.data / "progress" / name).read_bytes()
        assert got.headers["Content-Type"] == kind
        assert got.headers["Cache-Control"] == "no-cache"
        assert got.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src")
        assert got.headers["X-Content-Type-Options"] == "nosniff"
        same = web("GET", path, If_Modified_Since=got.headers["Last-Modified"])
        assert same.status in (200, 304)
    text = web("GET", "/nodes").body.decode()
    assert 'as of <time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13:20 UTC</time>' in text
    assert '<meta http-equiv="refresh" content="60">' in text


def test_before_the_first_writing_that_is_said(web):
    why = "the table of nodes was not written yet"
    got = web("GET", "/nodes.json")
    assert got.status == 404 and got.json["error"] == why
    got = web("GET", "/nodes")
    assert got.status == 404 and got.headers["Content-Type"] == "text/html; charset=utf-8"
    text = got.body.decode()
    assert f"Sorry: {why}." in text and "nodes.json" not in text
    assert '<meta http-equiv="refresh" content="5">' in text
    host()
    write()
    assert len(page(web).rows) == 1
