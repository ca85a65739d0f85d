"""The pages that links in BOINC Manager open: what is so, and no more than people may know.

They are read as a browser reads them; a second, simple reading of the store says what to expect.
"""

import itertools
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import make
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make import NOW
from web import Web

import minigrid as m

O, S, V = m.Outcome, m.ServerState, m.ValidateState
EVIL = "<script>alert(1)</script>"
BOINC = dict(client_version="7.20.5", host={
    "domain_name": "johns-laptop", "p_ncpus": 8, "p_vendor": "GenuineIntel", "p_model": "i7 <9700>",
    "p_fpops": 4.2e9, "m_nbytes": 16e9, "d_free": 2e11, "os_name": "Linux", "os_version": "Debian"})
LISTS = ("/top_users.php", "/top_hosts.php", "/apps.php", "/home.php")
ONE = {"/show_user.php": "userid", "/hosts_user.php": "userid", "/show_host_detail.php": "hostid",
       "/results.php": "userid", "/result.php": "resultid", "/workunit.php": "wuid"}


def pages():
    """The module under test, as the process has loaded it."""
    return sys.modules["minigrid_plugin_boinc.pages"]


class Page(HTMLParser):
    """The title, facts, tables (rows as dicts by the head's words), texts and links of a page."""

    def __init__(self, body):
        super().__init__()
        self.facts, self.rows, self.links, self.tags, self.text = {}, [], [], [], ""
        self.name, self.inside, self.titles, self.output = "", [], [], ""
        self.feed(body.decode())
        assert self.inside == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        assert not [name for name in attrs if name.startswith("on")]
        if tag in ("meta", "link", "input"):
            return
        self.inside.append(tag)
        if tag == "a":
            self.links.append(attrs["href"])
        elif tag == "dt":
            self.name = ""
        elif tag == "tr":
            self.rows.append({})
        elif tag == "td":
            self.name = attrs["data-label"]
            self.rows[-1][self.name] = ""

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "dt" in self.inside:
            self.name += data
        elif "dd" in self.inside:
            self.facts[self.name] = self.facts.get(self.name, "") + data.rstrip("\n")
        elif "td" in self.inside:
            self.rows[-1][self.name] += data
        elif "pre" in self.inside:
            self.output += data
        elif {"h1", "h2"} & set(self.inside):
            self.titles.append(data)

    @property
    def table(self):
        return [row for row in self.rows if row]


@pytest.fixture
def web(grid):
    web = Web()
    web.now = NOW + 1000
    return web


def look(web, path, status=200):
    """Open a page; return it as a browser reads it."""
    got = web("GET", path)
    assert (got.status, got.headers["Content-Type"]) == (status, "text/html; charset=utf-8")
    policy = got.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script" not in policy
    return Page(got.body)


def all_back(clients):
    """The last copy of the world comes back, too: now its story may be told."""
    clients[3].report("count_0_3", now=NOW + 300)
    passes(NOW + 301)


def passes(now, n=3):
    for k in range(1, n + 1):
        m.run_pass(now + k)


@pytest.fixture
def world(web):
    """Two BOINC clients of ann and bob agree on a workunit, carl's fails, dora's holds one."""
    make.add("count", min_quorum=2, target_nresults=4)
    clients = [make.Client(name) for name in ("ann", "bob", "carl", "dora")]
    for client, text in zip(clients, ("5", "5", None, "")):
        (name,) = client.fetch(NOW, **BOINC)
        told = dict(client_state=3, exit_status=195, stderr_out=f"{EVIL} at /home/john/app.py\n"
                    f"johns-laptop says C:\\Users\\John Smith\\x") if text is None else dict(
                        client_state=5, elapsed_time=61, cpu_time=59.25)
        if text:
            make.output(name).write_text(text)
        if text != "":
            client.ask(NOW + 100, reports=[m.Report(name, **told)], **BOINC)
    m.project.write(lambda: m.User.update(email_addr=m.User.authenticator.concat("@example.org"),
                                          passwd_hash="salt and hash").execute())
    passes(NOW + 200)
    return clients


# ---- What they tell ------------------------------------------------------------


def test_a_computer_is_described(web, world):
    page = look(web, f"/show_host_detail.php?hostid={world[0].hostid}")
    host = world[0].host()
    assert page.titles[0] == f"computer {host.id}"
    assert page.facts["Processors"] == "8 x GenuineIntel i7 <9700>"
    assert page.facts["Operating system"] == "Linux Debian" and page.facts["Memory"] == "16.0 GB"
    assert page.facts["Measured speed"].startswith("4.20 billion")
    assert page.facts["Client"] == "BOINC 7.20.5" and page.facts["Volunteer"] == "ann"
    assert page.facts["Credit"] == f"{host.total_credit:,.1f}" != "0.0"
    assert page.facts["Last contact"].endswith("(15 minutes ago)")
    assert page.facts["From sending to report"] == "100 seconds"
    assert page.facts["valid"] == "1" and "error" not in page.facts
    assert look(web, f"/show_host_detail.php?hostid={world[2].hostid}").facts["error"] == "1"
    assert look(web, f"/show_host_detail.php?hostid={world[3].hostid}").facts["in progress"] == "1"


def test_a_computer_is_told_why_it_got_no_work(web):
    client = make.Client()
    client.fetch(NOW, **BOINC)
    client.fetch(NOW, **BOINC)
    why = client.host().why_no_work
    assert why and look(web, "/show_host_detail.php?hostid=1").facts["Got no work last time"] == why


def test_recent_credit_decays_with_the_clock(web, world):
    def shown(path, name="Credit a day, recently"):
        return float(look(web, path).facts[name].replace(",", ""))

    path = f"/show_user.php?userid={world[0].host().user_id}"
    first = shown(path)
    assert first == round(m.User.get_by_id(1).expavg_credit, 1) > 0.5
    web.now += 7 * 86400
    assert shown(path) == pytest.approx(first / 2, abs=0.06)
    assert shown("/show_host_detail.php?hostid=1") == pytest.approx(first / 2, abs=0.06)


def test_tasks_of_a_computer_and_of_a_volunteer_are_listed(web, world):
    (row,) = look(web, "/results.php?hostid=4").table
    assert row["State"] == "in progress" and row["Credit"] == row["Run time"] == ""
    assert row["Reported (UTC)"].startswith("due 2023-11-15")
    all_back(world)
    for path in ("/results.php?hostid=1", "/results.php?userid=1"):
        (row,) = look(web, path).table
        r = m.Result.get(host=1)
        assert row["Task"] == r.name and row["State"] == "valid" and row["Run time"] == "61 seconds"
        assert row["CPU time"] == "59 seconds" and row["Credit"] == f"{r.granted_credit:.1f}"
        assert row["Application"] == "count 1, python"


def test_a_long_list_is_turned_over(web):
    for n in range(45):
        make.add("near", n, min_quorum=1)
    client = make.Client()
    while client.fetch(NOW, work_req_seconds=1e9, cpu_req_instances=32,
                       host={"p_ncpus": 32, "p_fpops": 1e9}):
        pass
    make.Client("bob").fetch(NOW)
    names = [r.name for r in m.Result.select().where(m.Result.host == 1).order_by(-m.Result.id)]
    assert len(names) == 45
    for whose in ("hostid=1", "userid=1"):
        shown, path = [], f"/results.php?{whose}"
        while path:
            page = look(web, path)
            shown.append([row["Task"] for row in page.table])
            path = next((link for link in page.links if re.fullmatch(
                rf"/results.php\?{whose}&offset={20 * len(shown)}", link)), None)
        assert [len(part) for part in shown] == [20, 20, 5] and sum(shown, []) == names
    page = look(web, "/results.php?hostid=1&offset=20")
    assert "/results.php?hostid=1&offset=0" in page.links
    assert look(web, "/results.php?hostid=1&offset=999999999999").table == []


def test_a_failed_task_says_what_its_program_said(web, world):
    r = m.Result.get(host=3)
    page = look(web, f"/result.php?resultid={r.id}")
    assert page.facts["State"] == "error: Its computer could not compute it."
    assert page.facts["Why"] == "the program failed (exit status 195)"
    assert page.output == f"{EVIL} at /home/.../app.py\ncomputer 3 says C:\\Users\\...\\x"
    assert "script" not in page.tags
    all_back(world)
    page = look(web, f"/result.php?resultid={m.Result.get(host=1).id}")
    assert page.facts["State"].startswith("valid: ") and page.output == ""
    assert page.facts["Volunteer"] == "ann" and page.facts["Workunit"] == "count_0"


def test_a_workunit_shows_its_copies_and_where_its_answer_comes_from(web, world):
    all_back(world)
    page = look(web, "/workunit.php?wuid=1")
    wu = m.Workunit.get_by_id(1)
    assert page.facts["State"] == "done: enough copies agree"
    assert page.facts["Answer taken from"] == m.Result.get_by_id(wu.canonical_resultid).name
    copies = make.copies()
    assert [row["Task"] for row in page.table] == [r.name for r in copies]
    assert [row["State"] for row in page.table][:4] == ["valid", "valid", "error", "error"]
    assert [row["Volunteer"] for row in page.table][:4] == ["ann", "bob", "carl", "dora"]
    assert page.table[0]["Computer"] == "computer 1"


@pytest.mark.parametrize("bit, words", [
    (m.ErrorMask.CANCELLED, "given up: the project does not want it any more"),
    (m.ErrorMask.TOO_MANY_ERROR_RESULTS, "given up: too many copies ended in an error")])
def test_a_workunit_that_was_given_up_says_why(web, bit, words):
    make.add()
    m.project.write(lambda: m.Workunit.update(error_mask=bit).execute())
    assert look(web, "/workunit.php?wuid=1").facts["State"] == words


def test_every_state_a_result_can_have_has_words(grid):
    for server, outcome, verdict in itertools.product(S, O, V):
        word, sentence = pages().standing(server, outcome, verdict)
        assert word and sentence.endswith(".")
    assert set(pages().GIVEN_UP) == {bit for bit in m.ErrorMask if bit}
    words = [word for word, _ in [*pages().JUDGED.values(), *pages().ENDED.values()]]
    assert len(set(words)) == len(words), "two states that read the same"


@pytest.mark.parametrize("status, words", [
    (197, "it took too long"), (202, "the project ended it"), (203, "its user ended it"),
    (-186, "a file could not be downloaded"), (0, "its output was missing"),
    (1, "the program ended with an error"), (99999, "the program ended with an error")])
def test_an_exit_status_is_told_in_words(status, words):
    told = pages().why_failed(make.error(status))
    assert told.startswith(words) and told.endswith(f"(exit status {status})")
    assert pages().why_failed(make.success()) == ""


def test_the_first_are_those_with_most_credit_recently_or_altogether(web):
    credit = {"ann": (500, 90, NOW - 70 * 86400), "bob": (20, 10, NOW), "carl": (9, 0, 0),
              "none": (0, 0, 0)}  # ann's recent credit is ten half-lives old
    for name, (total, recent, at) in credit.items():
        make.Client(name).ask(NOW)
        m.project.write(lambda: [
            model.update(total_credit=total, expavg_credit=recent, expavg_time=at).where(
                model.id == m.User.get(name=name).id).execute() for model in (m.User, m.Host)])
    for path, column in (("/top_users.php", "Volunteer"), ("/top_hosts.php", "Volunteer")):
        shown = [row[column] for row in look(web, path).table]
        assert shown == ["bob", "ann", "carl"]
        shown = [row[column] for row in look(web, f"{path}?sort_by=total_credit").table]
        assert shown == ["ann", "bob", "carl"]
    assert [row["Credit a day, recently"] for row in look(web, "/top_users.php").table] == [
        "10.0", "0.1", "0.0"]


def test_lists_of_the_first_are_looked_up_once_a_minute(web):
    make.Client("ann").ask(NOW)
    m.project.write(lambda: m.User.update(total_credit=5).execute())
    web.now = NOW // 60 * 60
    assert len(look(web, "/top_users.php").table) == 1
    make.Client("bob").ask(NOW)
    m.project.write(lambda: m.User.update(total_credit=5).execute())
    assert len(look(web, "/top_users.php").table) == 1
    web.now += 60
    assert len(look(web, "/top_users.php").table) == 2


def test_applications_are_listed_with_their_versions(web):
    make.add("near")
    page = look(web, "/apps.php")
    assert page.titles[1:] == ["count", "near"]
    assert page.facts["Tasks ready to send"] == "02", "0 of one application, 2 of the other"
    assert [(row["Platform"], row["Version"]) for row in page.table] == [("python", "1")] * 2


def test_a_user_as_xml_is_what_boincs_page_gives(web, world):
    got = web("GET", "/show_user.php?userid=1&format=xml")
    assert got.headers["Content-Type"] == "text/xml; charset=utf-8"
    root = ElementTree.fromstring(got.body)
    user = m.User.get_by_id(1)
    assert root.tag == "user" and root.findtext("id") == "1" and root.findtext("name") == "ann"
    assert float(root.findtext("total_credit")) == pytest.approx(user.total_credit)
    assert re.fullmatch("[0-9a-f]{32}", root.findtext("cpid"))
    got = web("GET", "/show_user.php?userid=99&format=xml")
    assert ElementTree.fromstring(got.body).findtext("error_num") == "-136"


def test_links_of_boinc_manager_open_and_every_link_of_a_page_leads_on(web, world):
    seen, todo = set(), {f"{path}?{name}=1" for path, name in ONE.items()} | set(LISTS)
    todo |= {"/results.php?hostid=1", "/hosts_user.php?userid=4"}
    while todo:
        path = todo.pop()
        seen.add(path)
        got = web("GET", path)
        assert got.status == 200, path
        if path != "/":
            todo |= set(Page(got.body).links) - seen
    assert {"/", "/show_host_detail.php?hostid=4", "/workunit.php?wuid=1"} <= seen


# ---- What they do not tell -------------------------------------------------------


def test_no_page_tells_a_secret(web, world):
    make.Client("eve@example.org").ask(NOW, **BOINC)
    paths = [f"{path}?{name}={n}" for path, name in ONE.items() for n in range(1, 7)]
    paths += [f"/results.php?hostid={n}" for n in range(1, 7)] + [
        f"/show_user.php?userid={n}&format=xml" for n in range(1, 6)]
    m.project.write(lambda: m.User.update(total_credit=5).execute())
    secrets = {b"@example.org", b"salt and hash", b"johns-laptop", b"/home/john", b"John Smith"}
    keys = {key: f"key of user {n}" for n, key in enumerate(("ann", "bob", "carl", "dora"))}
    for old, new in keys.items():
        m.project.write(lambda: m.User.update(authenticator=new).where(
            m.User.authenticator == old).execute())
    secrets |= {key.encode() for key in keys.values()} | {
        host.host_cpid.encode() for host in m.Host.select()}
    for path in [*paths, *LISTS, "/", "/status.json", "/server_status.php?xml=1"]:
        body = web("GET", path).body
        assert not [secret for secret in secrets if secret in body], path


def test_who_else_has_a_copy_is_told_when_the_workunit_is_decided(web):
    make.add()
    clients = [make.Client("ann"), make.Client("bob")]
    names = [client.fetch(NOW, **BOINC)[0] for client in clients]
    for path in ("/workunit.php?wuid=1", "/result.php?resultid=1"):
        page = look(web, path)
        assert "ann" not in page.text and "bob" not in page.text
        assert not [link for link in page.links if "hostid=" in link or "userid=" in link]
    for client, name in zip(clients, names):
        client.report(name, "1", NOW + 5)
    passes(NOW + 10)
    assert [row["Volunteer"] for row in look(web, "/workunit.php?wuid=1").table] == ["ann", "bob"]
    assert look(web, "/result.php?resultid=1").facts["Volunteer"] == "ann"


def test_what_was_found_is_told_when_no_copy_is_out(web, world):
    """A workunit that is decided looks like one that is not: its last copy may be a spot check."""
    holder = dict(workunit=1, app=1, name="count_0_10", create_time=NOW,
                  server_state=S.INACTIVE)
    m.project.write(lambda: m.Result.insert(**holder).execute())
    (kept,) = make.copies(server_state=S.INACTIVE)
    assert look(web, f"/result.php?resultid={kept.id}", 404)
    unit = look(web, "/workunit.php?wuid=1")
    assert [row["State"] for row in unit.table] == [
        "came back", "came back", "error", "in progress", "unsent"]  # not: not needed any more
    paths = [f"/result.php?resultid={n}" for n in range(1, 5)]
    paths += [f"/results.php?{who}id={n}" for n in range(1, 5) for who in ("host", "user")]
    for path in ["/workunit.php?wuid=1", *paths]:
        text = look(web, path).text
        assert "count_0_10" not in text and "agree" not in text.replace("arrange", ""), path
        assert not re.search(r"\bvalid|done: |\b10\.0\b|as the application", text), path
    for path in paths[:4]:
        assert {"Made", "Credit", "Why this credit"}.isdisjoint(look(web, path).facts)
    assert not {"Answer taken from", "Copies that must agree", "Credit for each valid copy"
                } & set(unit.facts)
    m.project.write(lambda: m.Result.delete().where(m.Result.id == kept.id).execute())
    all_back(world)
    assert "done: enough copies agree" in look(web, "/workunit.php?wuid=1").text


def test_nothing_that_others_wrote_becomes_html(web, world):
    m.project.write(lambda: [
        m.User.update(name=EVIL).execute(), m.Result.update(stderr_out=EVIL * 2).execute(),
        m.Host.update(p_model=EVIL, os_name=EVIL, why_no_work=EVIL, client_version=EVIL).execute()])
    make.settings(name=EVIL)
    for path in [*(f"{path}?{name}=3" for path, name in ONE.items() if "workunit" not in path),
                 "/workunit.php?wuid=1", "/results.php?hostid=1", *LISTS]:
        page = look(web, path)
        assert "script" not in page.tags and EVIL in page.text


# ---- What they are asked ---------------------------------------------------------


@pytest.mark.parametrize("path", ONE)
@pytest.mark.parametrize("value", ["", "0", "-1", "999999999999999", "9" * 16, "9" * 400, "1.5",
                                   "x", "1'--", "%00", "%FF", "%D9%A1", "1%20OR%201", "1&format=x"])
def test_a_number_that_is_none_gets_a_page_that_says_so(web, path, value):
    page = look(web, f"{path}?{ONE[path]}={value}", 404 if re.fullmatch(
        "[0-9]{1,15}|1&.*", value) else 400)
    assert page.text.count("Sorry: ") == 1
    assert m.project.counts["server errors"] == 0


@given(path=st.sampled_from([*ONE, *LISTS]), query=st.lists(st.tuples(
    st.sampled_from(["userid", "hostid", "resultid", "wuid", "offset", "format", "sort_by"]),
    st.sampled_from(["1", "0", "-1", "", "xml", "total_credit", "99999999999999999999", "%ff"])
    | st.text("0123456789%&=;+<\"'", max_size=9)), max_size=4))
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_query_gets_an_answer(web, path, query):
    text = "&".join(f"{name}={value}" for name, value in query)
    assert web("GET", f"{path}?{text}").status in (200, 400, 404)
    assert m.project.counts["server errors"] == 0


def test_a_page_costs_the_same_however_much_is_in_the_store(web, world):
    def cost(path):  # in tens of instructions of SQLite's virtual machine
        steps = itertools.count()
        connection = m.db.connection()
        connection.set_progress_handler(lambda: next(steps) and 0, 10)
        look(web, path)
        connection.set_progress_handler(None, 0)
        return next(steps)

    paths = ["/result.php?resultid=2", "/workunit.php?wuid=1", "/show_user.php?userid=2",
             "/show_host_detail.php?hostid=2", "/results.php?hostid=2", "/results.php?userid=2",
             "/hosts_user.php?userid=2", "/results.php?hostid=1", "/results.php?userid=1"]
    before = {path: cost(path) for path in paths}
    unit, old = m.Workunit.get_by_id(1), m.Result.get_by_id(1)
    make.add("near", 0)
    columns = {k: v for k, v in old.__data__.items() if k != "id"}
    rows = [{**columns, "name": f"other_{n}", "workunit": unit.id + 1} for n in range(5000)]
    m.project.write(lambda: [m.Result.insert_many(rows[i:i + 500]).execute()
                             for i in range(0, 5000, 500)])
    after = {path: cost(path) for path in paths}
    assert {path: n for path, n in after.items() if n > 2 * before[path] + 200} == {}  # a full page
