"""What statistics sites fetch, read as they do: unpacked, with a strict reader of XML."""

import gc
import gzip
import hashlib
import re
import sys
from xml.etree import ElementTree

import make
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make import NOW
from web import Web

import minigrid as m

DAY = 86400
STATES = ("results_ready_to_send results_in_progress workunits_waiting_for_validation "
          "workunits_waiting_for_assimilation workunits_waiting_for_deletion "
          "results_waiting_for_deletion transitioner_backlog_hours users_with_recent_credit "
          "users_with_credit users_registered_in_past_24_hours hosts_with_recent_credit "
          "hosts_with_credit hosts_registered_in_past_24_hours "
          "current_floating_point_speed").split()
TRICKY = ["<b>&amp;", "]]>", "Zoë \N{FOX FACE}", "a\tb", "\x00\x0b\ufffe", "'\"", " x "]


def stats():
    """The module under test, as the process has loaded it."""
    return sys.modules["minigrid_plugin_boinc.stats"]


@pytest.fixture
def web(grid):
    """A server whose user.gz and so on of earlier tests are gone."""
    for path in (grid.data / "stats").glob("*"):
        path.unlink()
    web = Web()
    web.now = NOW
    return web


def user(name, total=10.0, recent=4.0, at=NOW, **more):
    """Make a user with a host; both have the credit given."""
    client = make.Client(f"key {next(make.serial)}")
    client.ask(NOW - 5, host={"domain_name": "johns-laptop", "p_model": name, "p_ncpus": 4},
               client_version="7.20.5")
    credit = dict(total_credit=total, expavg_credit=recent, expavg_time=at)
    m.project.write(lambda: [
        m.User.update(name=name, **credit, **more).where(m.User.authenticator == client.key)
        .execute(), m.Host.update(**credit).where(m.Host.id == client.hostid).execute()])
    return m.User.get(authenticator=client.key)


def fetch(web, name):
    """Fetch a list as a site does; return its root."""
    got = web("GET", f"/stats/{name}")
    assert got.status == 200, got.body
    packed = name.endswith(".gz")
    assert got.headers["Content-Type"] == (
        "application/gzip" if packed else "text/xml; charset=utf-8")
    assert "Content-Encoding" not in got.headers, "or the site would unpack it twice"
    return ElementTree.fromstring(gzip.decompress(got.body) if packed else got.body)


# ---- The lists of credit -------------------------------------------------------


def test_the_lists_hold_what_the_store_holds(web):
    for n, name in enumerate(TRICKY):
        user(name, total=n + 0.5, recent=n, email_addr=f"{n}@example.org")
    stats().write_lists(NOW)
    users, hosts = fetch(web, "user.gz"), fetch(web, "host.gz")
    assert (users.tag, hosts.tag, fetch(web, "team.gz").tag) == ("users", "hosts", "teams")
    for root, model in ((users, m.User), (hosts, m.Host)):
        assert len(root) == len(TRICKY) and {child.tag for child in root} == {root.tag[:-1]}
        for child, row in zip(root, model.select().order_by(model.id)):
            assert int(child.findtext("id")) == row.id
            assert float(child.findtext("total_credit")) == row.total_credit
            assert float(child.findtext("expavg_credit")) == row.expavg_credit
            assert int(child.findtext("create_time")) == row.create_time
    assert [child.findtext("name") for child in users] == [
        re.sub("[\x00\x0b\ufffe]", "\ufffd", name) for name in TRICKY]
    for child in hosts:
        assert child.findtext("ncpus") == "4" and child.findtext("userid") == child.findtext("id")
        assert int(child.findtext("rpc_time")) == NOW - 5
    assert len({child.findtext("cpid") for child in users}) == len(TRICKY)
    assert len(fetch(web, "team.gz")) == 0


def test_the_table_of_contents_adds_up(web):
    user("ann", total=10)
    user("bob", total=2.5)
    stats().write_lists(NOW)
    root = fetch(web, "tables.xml")
    assert root.tag == "tables" and int(root.findtext("update_time")) == NOW
    assert [root.findtext(f"n{kind}_total") for kind in ("users", "teams", "hosts")] == [
        "2", "0", "2"]
    assert float(root.findtext("total_credit")) == 12.5
    assert [app.findtext("name") for app in root.find("applications")] == ["count", "near"]


def test_who_has_no_credit_is_left_out_as_boinc_does(web):
    user("ann")
    user("none", total=0)
    stats().write_lists(NOW)
    assert [child.findtext("name") for child in fetch(web, "user.gz")] == ["ann"]
    assert [child.findtext("id") for child in fetch(web, "host.gz")] == ["1"]


@pytest.mark.parametrize("age, part", [(0, 1), (7 * DAY, 0.5), (14 * DAY, 0.25), (-DAY, 1)])
def test_recent_credit_is_that_of_the_day(web, age, part):
    user("ann", recent=8.0, at=NOW)
    stats().write_lists(NOW + age)
    for name in ("user.gz", "host.gz"):
        (child,) = fetch(web, name)
        assert float(child.findtext("expavg_credit")) == pytest.approx(8 * part, abs=1e-6)
        assert float(child.findtext("expavg_time")) == NOW + age


def test_nothing_personal_is_exported(web):
    row = user("ann@example.org", email_addr="ann@example.org", passwd_hash="salt and hash")
    stats().write_lists(NOW)
    host = m.Host.get()
    text = b"".join(gzip.decompress(web("GET", f"/stats/{name}.gz").body)
                    for name in ("user", "host", "team"))
    for secret in ("ann@example.org", "johns-laptop", "salt and hash", row.authenticator,
                   host.host_cpid):
        assert secret not in text.replace(b"<p_model>ann@example.org", b"").decode()
    told = fetch(web, "host.gz")[0].findtext("host_cpid")
    assert told == hashlib.md5((host.host_cpid + "ann@example.org").encode()).hexdigest()
    assert fetch(web, "user.gz")[0].findtext("name") == "volunteer 1"


def test_a_volunteer_without_an_address_has_a_name_of_its_own(web):
    first, second = user("ann"), user("ann 2")
    stats().write_lists(NOW)
    cpids = [child.findtext("cpid") for child in fetch(web, "user.gz")]
    assert len(set(cpids)) == 2 and all(re.fullmatch("[0-9a-f]{32}", cpid) for cpid in cpids)
    assert {hashlib.md5(row.authenticator.encode()).hexdigest() for row in (first, second)} \
        .isdisjoint(cpids)


@given(text=st.text(max_size=30), number=st.floats() | st.integers())
@settings(max_examples=200, deadline=None, database=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture])
def test_any_text_makes_an_element_that_strict_readers_take(web, text, number):
    root = ElementTree.fromstring(
        (stats().HEAD + stats().elements("user", {"name": text, "id": number})).encode(
            "utf-8", "strict"))
    known = "".join(c if c in "\t\n\r" or " " <= c < "\ud800" or "\udfff" < c < "\ufffe"
                    or c > "\uffff" else "\ufffd" for c in text)
    assert root.findtext("name") == known.replace("\r\n", "\n").replace("\r", "\n")


def test_the_lists_are_written_once_a_day(web):
    user("ann")
    written = []
    for now in range(NOW, NOW + 3 * DAY, 3600):
        stats().export(now)
        written.append(int(fetch(web, "tables.xml").findtext("update_time")))
    assert sorted(set(written)) == [NOW, NOW + DAY, NOW + 2 * DAY]
    stats().export(NOW)  # The clock was put back: better twice than not for years.
    assert int(fetch(web, "tables.xml").findtext("update_time")) == NOW


def test_a_list_that_cannot_be_written_leaves_the_old_one_and_is_told(web, monkeypatch):
    user("ann")
    stats().export(NOW)
    user("bob")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stats().os, "fsync", full)
    stats().export(NOW + DAY)
    assert [child.findtext("name") for child in fetch(web, "user.gz")] == ["ann"]
    assert int(fetch(web, "tables.xml").findtext("update_time")) == NOW
    assert "No space left" in m.project.errors[-1][1]


def test_a_list_is_not_held_in_memory(web, monkeypatch):
    alive, values = [], stats().user_values

    def watched(row, now):
        if row.id == 500:
            alive.append(sum(type(thing) is m.User for thing in gc.get_objects()))
            alive.append((m.project.data / "stats" / "user.gz.new").stat().st_size)
        return values(row, now)

    monkeypatch.setattr(stats(), "user_values", watched)
    rows = [dict(create_time=NOW, name=f"{n} {hashlib.sha512(b'%d' % n).hexdigest()}",
                 authenticator=f"key {n}", total_credit=1) for n in range(500)]
    m.project.write(lambda: m.User.insert_many(rows).execute())
    stats().write_lists(NOW)
    assert len(fetch(web, "user.gz")) == 500
    assert alive[0] < 5, "rows are read one at a time"
    assert alive[1] > 10_000, "the file grows meanwhile"


@pytest.mark.parametrize("name", ["", "user", "user.gz.new", "..", "../minigrid.db", "%2e%2e",
                                  "..%2fminigrid.db", "tables.xml%00", "db_dump.xml"])
def test_no_other_file_is_given_away(web, name):
    user("ann")
    stats().write_lists(NOW)
    assert web("GET", f"/stats/{name}").status == 404
    assert m.project.counts["server errors"] == 0


def test_before_the_first_day_there_are_no_lists(web):
    assert web("GET", "/stats/user.gz").status == 404


# ---- How the server is doing -----------------------------------------------------


def server_status(web):
    got = web("GET", "/server_status.php?xml=1")
    assert (got.status, got.headers["Content-Type"]) == (200, "text/xml; charset=utf-8")
    return ElementTree.fromstring(got.body)


def test_people_are_sent_to_the_status_page(web):
    for path in ("/server_status.php", "/server_status.php?xml=0"):
        got = web("GET", path)
        assert (got.status, got.headers["Location"]) == (302, "/")


def test_the_states_are_counted_as_the_store_has_them(web):
    clients = [make.Client(f"user {n}") for n in range(4)]
    web.now = NOW // 60 * 60 + 600
    make.answered("1", "1", clients=clients[:2], now=NOW, app="count", number=0)
    for n in (1, 2):
        make.add("count", n)
    (name,) = clients[2].fetch(NOW + 1)
    m.project.write(lambda: [
        m.Workunit.update(need_validate=True, transition_time=web.now - 7201).where(
            m.Workunit.number == 1).execute(),
        m.Workunit.update(assimilate_state=1, file_delete_state=1).where(
            m.Workunit.number == 2).execute(),
        m.Result.update(file_delete_state=3).where(m.Result.id == 1).execute(),
        m.User.update(total_credit=5, expavg_credit=3, expavg_time=NOW - 14 * DAY).where(
            m.User.id == 1).execute(),
        m.Host.update(total_credit=5, expavg_credit=864000, expavg_time=web.now).where(
            m.Host.id == 2).execute()])
    root = server_status(web)
    told = {child.tag: child.text for child in root.find("database_file_states")}
    assert set(told) - {"tasks_by_app"} == set(STATES)
    assert {key: float(told[key]) for key in STATES} == pytest.approx({
        "results_ready_to_send": 3, "results_in_progress": 1,
        "workunits_waiting_for_validation": 1, "workunits_waiting_for_assimilation": 1,
        "workunits_waiting_for_deletion": 1, "results_waiting_for_deletion": 1,
        "transitioner_backlog_hours": 2, "users_with_recent_credit": 0, "users_with_credit": 1,
        "users_registered_in_past_24_hours": 0, "hosts_with_recent_credit": 1,
        "hosts_with_credit": 1, "hosts_registered_in_past_24_hours": 3,
        "current_floating_point_speed": 1})
    apps = {app.findtext("name"): app for app in root.iter("app")}
    assert {name: (app.findtext("unsent"), app.findtext("in_progress"))
            for name, app in apps.items()} == {"count": ("3", "1"), "near": ("0", "0")}


def test_run_times_are_those_of_valid_copies_of_the_last_day(web):
    make.answered("1", "1", now=NOW - 2 * DAY, app="count", number=0)
    make.answered("1", "1", now=NOW - DAY // 2, app="count", number=1)
    web.now = NOW
    m.run_pass(NOW - 1)
    m.project.write(lambda: [m.Result.update(elapsed_time=3600 * r.id).where(
        m.Result.id == r.id).execute() for r in m.Result.select()])
    valid = m.Result.select().where(m.Result.validate_state == 1)
    assert [r.id for r in valid.order_by(m.Result.id)] == [1, 2, 3, 4]
    (app,) = [app for app in server_status(web).iter("app") if app.findtext("name") == "count"]
    assert {name: float(app.findtext(name)) for name in (
        "avg_runtime", "min_runtime", "max_runtime", "users")} == {
        "avg_runtime": 3.5, "min_runtime": 3, "max_runtime": 4, "users": 2}
    (app,) = [app for app in server_status(web).iter("app") if app.findtext("name") == "near"]
    assert app.find("avg_runtime") is None


def test_the_programs_of_the_server_are_listed_and_say_when_the_store_fails(web):
    def daemons():
        return {d.findtext("command"): d.findtext("status") for d in server_status(web).iter(
            "daemon")}

    assert {"Scheduler", "Download server", "transitioner", "validator", "assimilator",
            "file_deleter"} <= set(daemons())
    assert set(daemons().values()) == {"running"}
    assert {d.findtext("host") for d in server_status(web).iter("daemon")} == {"grid.example"}
    m.project.write.trouble = "disk full"
    assert set(daemons().values()) == {"not running"}


def test_counting_is_done_once_a_minute(web):
    def unsent():
        return server_status(web).find("database_file_states/results_ready_to_send").text

    web.now = NOW // 60 * 60
    assert unsent() == "0"
    make.add()
    web.now += 59
    assert unsent() == "0" and int(server_status(web).findtext("update_time")) == web.now - 59
    web.now += 1
    assert unsent() == "2" and int(server_status(web).findtext("update_time")) == web.now


@pytest.mark.parametrize("host", ["", "a b", "<script>", "x" * 999, "[::1", "[::1]:80", ":", "a:x"])
def test_no_host_header_breaks_it(web, host):
    got = web("GET", "/server_status.php?xml=1", host=host)
    assert got.status == 200 and b"<script" not in got.body
    ElementTree.fromstring(got.body)
