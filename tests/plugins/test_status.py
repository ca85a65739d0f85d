"""What people look at: the report counts right, and nothing that others wrote becomes HTML.

The page is read as a browser without JavaScript reads it, and at the end by a real browser.
"""

import base64
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from wsgiref.validate import validator

import make
import pytest
import waitress
from make import NOW

import minigrid as m

ROOT = Path(__file__).resolve().parents[2]
HTML, SCRIPT, OWN, FRAME, STYLE = (
    (ROOT / "plugins" / name).read_text(encoding="utf-8") for name in (
        "status/page.html", "status/page.js", "status/page.css", "pages/frame.html",
        "pages/style.css"))
SOURCE = HTML + SCRIPT + OWN + FRAME + STYLE
BOINC_DOWNLOAD = "https://boinc.berkeley.edu/download.php"
PYTHON_DOWNLOAD = "https://www.python.org/downloads/"
EVIL = "<script>alert(1)</script>"
TRICKY = [EVIL, "\"><img src=x onerror=alert(1)>", "'><svg/onload=alert(1)>", "</template>{{1+1}}",
          "<!--", "% import os", "Zoë & Ôscar \N{FOX FACE}", "\udcff"]

PARTS = '''"""parts: parts of something; the second copy of most is asked for."""

about = "Puts <b>parts</b> together."
reliable = 1
PARAMETERS = [{}, {}, {"max_error_results": 0}, {"delay_bound": 100}, {}, {}, {}]


def workunit(i):
    return {"input": i, **PARAMETERS[i]} if i < len(PARAMETERS) else None


def compute(input):
    return input
'''


def plugin():
    """The module under test, as the process has loaded it."""
    return sys.modules[m.plugged("status")[0].__module__]


def status(now=NOW):
    return m.plugged("status")[0](now)


def row(name="parts"):
    (found,) = [a for a in status()["apps"] if a["name"] == name]
    return found


@pytest.fixture
def get():
    """The application as a server sees it: get(path) -> status, headers, body; strict WSGI."""
    app = validator(m.make_app(lambda: NOW))

    def get(path, method="GET", host="grid.example:8080", **headers):
        got = SimpleNamespace()
        environ = {
            "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": path, "QUERY_STRING": "",
            "SERVER_NAME": "localhost", "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": host, "wsgi.version": (1, 0), "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "wsgi.multithread": True,
            "wsgi.multiprocess": False, "wsgi.run_once": False, **headers}

        def start_response(line, headers, exc_info=None):
            got.status, got.headers = int(line.split()[0]), dict(headers)
            return lambda data: None

        answer = app(environ, start_response)
        got.body = b"".join(answer)
        answer.close()
        return got

    return get


class Page(HTMLParser):
    """What a page shows: the texts of what has data-k by the data-key they stand in, and by id."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.keyed, self.ids, self.hidden, self.attributes = [], {}, {}, set(), []
        self.open, self.key, self.templates = [], "", 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs.items()]
        self.templates += tag == "template"
        if tag in ("meta", "link", "img", "br", "hr", "input") or self.templates:
            return
        self.key = attrs.get("data-key", self.key)
        if "hidden" in attrs and "id" in attrs:
            self.hidden.add(attrs["id"])
        self.open.append((tag, self.key, attrs.get("data-k"), attrs.get("id")))

    def handle_endtag(self, tag):
        if tag == "template" or self.templates:
            self.templates -= tag == "template"
            return
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, key, name, identity in () if self.templates else self.open:
            if name:
                texts = self.keyed.setdefault(key, {})
                texts[name] = texts.get(name, "") + data
            if identity:
                self.ids[identity] = self.ids.get(identity, "") + data

    def counts(self, key):
        """The numbers shown of an application; one that stands twice must read the same twice."""
        texts = self.keyed.get(key, {})
        return {name: texts[name] for name in plugin().COUNTS if name in texts}


def shown(app):
    """How the page must show the counts of an application; two of them stand there twice."""
    return {name: f"{app[name]:,}" * (2 if name in ("made", "done") else 1)
            for name in plugin().COUNTS if name not in ("open", "too_late")}


# ---- The report ----------------------------------------------------------------


def compute(unit, *answers, now=NOW):
    """Have fresh computers fetch copies of a workunit; report the answers, None being an error.

    "keep" holds the copy and reports nothing.
    """
    for answer in answers:
        client = make.Client(f"user {next(make.serial)}")
        (name,) = client.fetch(now, host={"domain_name": "kitchen", "p_ncpus": 4})
        assert name.startswith(f"parts_{unit}_")
        if answer != "keep":
            client.report(name, answer, now)


def passes(now, *stages, n=3):
    """Run the stages named, or all, for some seconds: reports are looked at a second later."""
    for k in range(1, n + 1):
        m.run_pass(now + k, [stage for stage in m.all_stages() if stage.__name__ in stages] or None)


@contextlib.contextmanager
def small_world(folder, **settings):
    """Seven workunits: two done, one failed, one timed out and sent again, one waiting to be
    compared, one to be assimilated, one not sent."""
    with make.project(folder, {"parts": PARTS}, min_sendwork_interval=0,
                      reliable_priority_on_over=1, **settings) as project:
        m.run_pass(NOW)
        compute(0, "1", "1")
        compute(1, "1", "9")
        passes(NOW)
        compute(1, "1", now=NOW + 10)
        compute(2, None, now=NOW + 10)
        passes(NOW + 10)
        compute(3, "keep", now=NOW + 20)
        passes(NOW + 121, "transitioner")
        compute(3, "keep", "keep", now=NOW + 130)
        compute(4, "1", "1", now=NOW + 130)
        passes(NOW + 130, "transitioner", "validator")
        compute(5, "1", "1", now=NOW + 140)
        passes(NOW + 140, "transitioner")
        yield project


@pytest.fixture
def world(folder):
    with small_world(folder) as project:
        yield project


def test_every_state_is_counted(world):
    counts = {name: value for name, value in row().items() if name in plugin().COUNTS}
    assert counts == dict(made=7, open=2, unsent=2, in_progress=2, to_validate=1, to_assimilate=1,
                          done=2, failed=1, valid=6, invalid=1, errors=1, no_reply=1, too_late=0)
    assert status()["total"] == counts


def test_a_policys_own_workunits_are_not_counted_as_the_applications(world):
    before = row()
    for n, state in enumerate((dict(need_validate=True), dict(assimilate_state=1),
                               dict(assimilate_state=1, error_mask=m.ErrorMask.CANCELLED))):
        m.Workunit.create(app=m.apps["parts"].id, name=f"check_{n}", number=None, create_time=NOW,
                          input_files=[], transition_time=m.NEVER, **state)
    assert row() == before


def test_all_that_was_made_adds_up_until_the_end(world):
    def parts():
        app = row()
        return app["made"], sum(app[key] for key in (
            "open", "to_validate", "to_assimilate", "done", "failed"))

    assert parts() == (7, 7)
    for stage in ("transitioner", "validator", "assimilator"):
        passes(NOW + 150, stage, n=1)
        assert parts() == (7, 7)
    compute(6, "1", "1", now=NOW + 160)
    m.run_pass(NOW + 161)
    assert parts() == (7, 7) and row()["done"] == 5


def test_a_failure_the_application_was_not_told_is_not_taken_for_work_done(world):
    compute(6, "1", "2", now=NOW + 150)
    m.project.write(lambda: m.Workunit.update(max_total_results=2, max_success_results=2).where(
        m.Workunit.number == 6).execute())
    passes(NOW + 150, "transitioner", "validator")
    app = row()
    assert (app["open"], app["done"], app["failed"], app["to_assimilate"]) == (1, 2, 2, 3)
    passes(NOW + 160, "assimilator", n=1)
    app = row()
    assert (app["open"], app["done"], app["failed"], app["to_assimilate"]) == (1, 4, 2, 0)


def test_counts_outlive_the_purge(world):
    before = row()
    make.settings(purge_delay=0)
    passes(NOW + 8 * 86400, n=4)
    assert make.units() == [] or len(make.units()) < 7
    after = row()
    assert after["made"] == 7 and after["valid"] >= before["valid"] and after["done"] >= 4


def test_status_is_json(world):
    m.remember(NOW - 100, "something went wrong")
    report = status()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["troubles"] == [
        {"time": NOW - 100, "ago": "100 seconds ago", "text": "something went wrong"}]
    assert (report["name"], report["version"], report["store"]) == (
        "minigrid", m.__version__, "fine")


def test_computers_are_listed_as_they_are(world):
    hosts = status(NOW + 140)["hosts"]
    assert hosts["total"] == hosts["users"] == hosts["active"] == len(hosts["recent"]) == 13
    assert sum(host["in_progress"] for host in hosts["recent"]) == 2
    last = hosts["recent"][-1]
    assert last["name"] == "kitchen" and last["processors"] == 4
    assert last["contact"] == "just now" and last["active"]
    (idle,) = [make.Client("idle")]
    idle.fetch(NOW + 140)
    idle.fetch(NOW + 140)
    idle.fetch(NOW + 141, platforms=["none"])
    told = status(NOW + 141)["hosts"]["recent"][-1]
    assert told["why_no_work"] == idle.host().why_no_work != ""


def test_a_computer_is_active_for_ten_minutes_and_listed_for_a_month(grid):
    client = make.Client()
    client.ask(NOW)
    assert status(NOW + 599)["hosts"]["active"] == 1
    assert status(NOW + 600)["hosts"]["active"] == 0
    assert len(status(NOW + 30 * 86400 - 1)["hosts"]["recent"]) == 1
    assert status(NOW + 30 * 86400)["hosts"]["recent"] == []
    assert status(NOW + 30 * 86400)["hosts"]["total"] == 1


def test_looking_costs_the_same_however_many_computers_there_are(grid):
    def statements():
        seen = []
        m.db.connection().set_trace_callback(seen.append)
        status()
        m.db.connection().set_trace_callback(None)
        return len(seen)

    make.Client("first").ask()
    before = statements()
    for n in range(30):
        make.Client(f"pupil {n}").ask()
    assert statements() == before


def test_looking_waits_for_no_writer(grid):
    with contextlib.closing(sqlite3.connect(grid.data / "minigrid.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert status()["store"] == "fine"


def test_an_application_without_its_file_keeps_its_counts(world, folder):
    (folder / "parts.py").unlink()
    make.restart(folder)
    app = row()
    assert not app["serving"] and "not served" in app["note"] and app["made"] == 7
    m.project.errors = []
    assert "troubles below" not in row()["note"], "there are none"
    m.project.errors = [(NOW, "parts.py: line 1: invalid syntax")]
    assert "see the troubles below" in row()["note"]


def test_what_failed_is_said_beside_the_application(grid):
    assert [app["note"] for app in status()["apps"]] == ["", ""]
    m.project.put_off["near", 7] = NOW + 3600
    assert row("near")["note"].startswith("1 workunit put off") and row("near")["serving"]
    m.project.put_off["near", plugin().GENERATOR] = NOW + 3 * 3600
    assert row("near")["note"].startswith("makes no new work for 3 hours")
    m.project.put_off["near", plugin().ALL] = NOW + 4 * 3600
    assert row("near")["note"].startswith("put off for 4 hours") and not row("near")["serving"]
    assert row("count")["note"] == "" and row("count")["serving"]


def test_an_application_that_fails_is_noted_by_the_core_under_the_keys_read_here(folder):
    text = make.COUNT.replace('return {"input": i} if i < 3 else None', "raise OSError('no disk')")
    with make.project(folder, {"count": text}):
        m.run_pass(NOW)
        assert row("count")["note"].startswith("makes no new work for 6 hours")
        assert "no disk" in status()["troubles"][0]["text"]


def report(store="fine", active=0, apps=1, paused="", **counts):
    total = {**dict.fromkeys(plugin().COUNTS, 0), **counts}
    return {"store": store, "apps": [total] * apps, "total": total, "hosts": {"active": active},
            "paused": paused}


STATES = {
    "working: 3 computers active, 6 tasks out": dict(active=3, in_progress=6, made=9),
    "working: 1 computer active, 1 task out": dict(active=1, in_progress=1, made=9),
    "working: 2 computers active, 0 tasks out": dict(active=2, unsent=4, made=9),
    "waiting: 6 tasks out, no computer heard of for 10 minutes": dict(in_progress=6, made=9),
    "waiting for computers: 1,200 tasks ready": dict(unsent=1200, made=600),
    "comparing the last answers": dict(active=1, to_validate=1, made=9),
    "waiting: 2 workunits unfinished, no task is out": dict(active=1, open=2, made=9),
    "finished: all 9 workunits made so far": dict(active=1, done=9, made=9),
    "finished: all 9 workunits made so far, 2 failed": dict(done=7, failed=2, made=9),
    "ready, but no work was made yet": dict(active=1),
    "no application is served yet": dict(apps=0, active=1),
    "the project has a problem on its side: its store cannot be used":
        dict(store="disk full", active=3, in_progress=6, paused="back at eight"),
    "paused: back at eight": dict(active=3, in_progress=6, made=9, paused="back at eight"),
}


@pytest.mark.parametrize("text", STATES)
def test_the_line_says_whether_we_are_out_of_work_or_broken(text):
    assert plugin().state(report(**STATES[text]))[1] == text


def test_a_pause_is_shown_until_it_ends(grid):
    make.add("count")
    assert not status()["state"]["text"].startswith("paused")
    (m.project.data / "paused").write_text("back at eight\n")
    assert status()["state"] == {"word": "waiting", "text": "paused: back at eight"}
    (m.project.data / "paused").unlink()
    assert status()["paused"] == "" and not status()["state"]["text"].startswith("paused")


def test_the_line_follows_a_project_through_its_life(folder):
    texts = []
    with make.project(folder, {"count": make.COUNT}, min_sendwork_interval=0):
        texts.append(status()["state"]["text"])
        m.run_pass(NOW)
        texts.append(status()["state"]["text"])
        first, second = make.Client("ann"), make.Client("bob")
        for client in (first, second):
            while names := client.fetch():
                client.report(names[0], "1")
                texts.append(status()["state"]["text"])
        passes(NOW)
        texts.append(status()["state"]["text"])
    assert [key for key, _ in itertools.groupby(texts)] == [
        "ready, but no work was made yet", "waiting for computers: 6 tasks ready",
        "working: 1 computer active, 0 tasks out", "working: 2 computers active, 0 tasks out",
        "waiting: 3 workunits unfinished, no task is out", "finished: all 3 workunits made so far"]


def test_a_store_that_takes_no_change_is_shown(grid, get):
    make.Client().ask()
    m.db.execute_sql("PRAGMA query_only = ON")
    with pytest.raises(m.StoreError):
        make.Client(key="ann").ask()
    m.db.execute_sql("PRAGMA query_only = OFF")
    found = status()
    assert found["state"]["word"] == "trouble" and "readonly" in found["store"]
    assert "readonly" in found["problems"][0]
    page = Page(get("/").body.decode())
    assert "readonly" in page.ids["problem-list"] and "troubles" not in page.hidden
    make.Client(key="ann").ask()
    assert status()["state"]["word"] != "trouble" and status()["problems"] == []


def test_a_store_that_cannot_be_read_is_shown_and_no_error_page(grid, get):
    m.db.execute_sql("DROP TABLE firing")
    answer = get("/")
    assert answer.status == 200
    page = Page(answer.body.decode())
    assert "its store cannot be used" in page.ids["state"]
    assert "no such table" in page.ids["problem-list"]
    assert json.loads(get("/status.json").body)["total"]["done"] == 0


def test_a_server_that_is_behind_is_a_problem(grid):
    make.add()
    m.project.write(lambda: m.Workunit.update(transition_time=NOW - 3601).execute())
    assert status()["transitioner_lag"] == 3600
    assert status()["problems"] == ["It is 60 minutes behind with its work."]
    m.run_pass(NOW)
    assert status()["problems"] == []


def test_an_error_of_the_server_is_a_problem(grid, get):
    m.project.counts["server errors"] += 1
    assert "1 request met an error" in Page(get("/").body.decode()).ids["problem-list"]


@pytest.mark.parametrize("seconds, words", [
    (0, "0 seconds"), (1, "1 second"), (119, "119 seconds"), (120, "2 minutes"),
    (7199, "119 minutes"), (7200, "2 hours"), (2 * 86400, "2 days"), (-5, "0 seconds")])
def test_durations_are_in_words(seconds, words):
    assert plugin().span(seconds) == words


def test_the_past_and_sizes_are_in_words():
    assert [plugin().ago(s) for s in (-3, 4, 5)] == ["just now", "just now", "5 seconds ago"]
    assert [plugin().size(n) for n in (0, 1, 999, 1000, 2_500_000, 3e9)] == [
        "0 bytes", "1 byte", "999 bytes", "1.0 kB", "2.5 MB", "3.0 GB"]


# ---- The page without JavaScript -----------------------------------------------


def test_the_page_loads_with_an_empty_store(folder, get):
    with make.project(folder, {}):
        answer = get("/")
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/html")
        page = Page(answer.body.decode())
        assert "no application is served yet" in page.ids["state"]
        assert "there is no application here" in page.ids["list"]
        assert {"results", "silence"} <= page.hidden and "nobody" not in page.hidden


def test_a_page_without_trouble_shows_none(grid, get):
    make.Client().ask()
    page = Page(get("/").body.decode())
    assert {"troubles", "alarm", "silence", "results", "nobody"} <= page.hidden


def test_the_page_holds_every_count_of_every_application(world, folder, get):
    (folder / "count.py").write_text(make.COUNT)
    m.sync_apps([folder / "count.py"], NOW)
    page = Page(get("/").body.decode())
    report = status()
    assert [app["name"] for app in report["apps"]] == ["count", "parts"]
    for app in report["apps"]:
        assert page.counts(app["name"]) == shown(app)
        assert page.keyed[app["name"]]["about"] == app["about"] != ""
    assert report["state"]["text"] == page.ids["state"]
    assert page.ids["hosts"].count("kitchen") == 13


def test_large_numbers_are_grouped_as_the_script_groups_them(world, get):
    m.project.write(lambda: m.App.update(next_number=1234567).execute())
    assert Page(get("/").body.decode()).keyed["parts"]["made"] == "1,234,567" * 2


def test_without_javascript_the_page_loads_itself_again(grid, get):
    html = get("/").body.decode()
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in html
    assert html.index("<noscript>") < html.index("</head>")


def test_nothing_that_others_wrote_becomes_html(folder, get):
    apps = {"evil": PARTS.replace("Puts <b>parts</b> together.", EVIL)}
    with make.project(folder, apps, name=EVIL) as project:
        for n, text in enumerate(TRICKY):
            client = make.Client(f"key {n}")
            client.ask(host={"domain_name": text, "os_name": text, "os_version": text}
                       if text.isprintable() else {})
            if text.isprintable():
                m.project.write(lambda: m.User.update(name=text).where(
                    m.User.authenticator == f"key {n}").execute())
                m.project.write(lambda: m.Host.update(why_no_work=text).where(
                    m.Host.id == client.hostid).execute())
            m.remember(NOW, text)
        for name in (f"{EVIL.replace('/', '')}.png", "<b>.txt", "a&b #1?.csv", '"quoted".png'):
            (project.data / "results" / name).write_bytes(b"x")
        html = get("/").body.decode()
        page = Page(html)
        assert html.count("<script") == 1 and page.tags.count("script") == 1
        assert not {"svg", "b>"} & set(page.tags) and page.tags.count("img") == 3  # two, a template
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        report = json.loads(get("/status.json").body)
        assert page.keyed["evil"]["about"] == EVIL == page.ids["name"]
        for host in report["hosts"]["recent"]:
            row = page.keyed[str(host["id"])]
            told = ("volunteer", "name", "system", "why_no_work")
            assert {k: row.get(k, "") for k in told} == {k: host[k] for k in told}
        texts = [text for key, value in page.keyed.items() if key.startswith(str(NOW))
                 for text in [value["text"]]]
        assert texts == [text.encode("utf-8", "replace").decode() for text in reversed(TRICKY)]


def test_the_browser_is_told_to_run_no_other_script(grid, get):
    answer = get("/")
    policy = answer.headers["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", answer.body.decode(), re.S)
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{known}';" in policy and "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_the_script_makes_text_never_html():
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                "srcdoc", "new Function"):
        assert way not in SCRIPT
    assert "{{!" not in HTML  # SimpleTemplate's way not to escape


def test_the_page_is_whole_and_asks_nobody_else():
    addresses = re.findall(r"""(?:src|href|action)=["']?([^"'\s>]*)""", SOURCE)
    inner = ("/status.json", "/results/", "/join", "/top_users.php", "/top_hosts.php", "/apps.php",
             "/home.php", "/show_user.php?", "/show_host_detail.php?", "/why", "#", "data:",
             "{{")
    assert {a for a in addresses if not a.startswith(inner)} == {BOINC_DOWNLOAD, PYTHON_DOWNLOAD}
    assert set(re.findall(r"https?://[^'\"\s]*", SOURCE)) == {
        "http://www.w3.org/2000/svg", BOINC_DOWNLOAD, PYTHON_DOWNLOAD}
    for link in (BOINC_DOWNLOAD, PYTHON_DOWNLOAD):
        assert SOURCE.count(f'<a href="{link}">') == SOURCE.count(link), "followed by people only"
    assert "@import" not in SOURCE and "url(" not in SOURCE
    assert max(len(line.encode()) for line in SOURCE.splitlines()) <= 255


def colours():
    """Both palettes of the page: name -> colour."""
    light, dark = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(
        r":root \{(.*?)\}", STYLE, re.S)]
    return {"light": light, "dark": dark}


def luminance(colour):
    parts = [int(colour[k:k + 2], 16) / 255 for k in (1, 3, 5)]
    parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_that_accessibility_wants(scheme):
    palette = colours()[scheme]
    pairs = [(ink, ground) for ink in ("ink", "soft", "main") for ground in (
        "page", "card", "bad-page", "wait-page", "good-page", "code")]
    pairs += [("bad", "page"), ("bad", "card"), ("bad", "bad-page"), ("wait", "card"),
              ("good", "card"), ("card", "main")]
    for ink, ground in pairs:
        high, low = sorted((luminance(palette[ink]), luminance(palette[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{ink} on {ground}"


# ---- Joining -------------------------------------------------------------------


def test_the_line_to_join_leads_to_the_server_as_the_reader_sees_it(grid, get):
    report = json.loads(get("/status.json", host="grid.example:8080").body)
    assert report["url"] == "http://grid.example:8080" and not report["only_here"]
    assert report["lines"]["posix"] == (
        "python3 -c \"import urllib.request as u; exec(u.urlopen("
        "'http://grid.example:8080/volunteer.py').read())\" http://grid.example:8080")
    assert report["lines"]["windows"] == report["lines"]["posix"].replace("python3", "py", 1)
    page = Page(get("/", host="grid.example:8080").body.decode())
    shown = {id: page.ids[id] for system in ("linux", "macos", "windows")
             for id in (system, f"{system}-curl", f"{system}-fetch", f"{system}-start")
             if id in page.ids}
    posix = {"": "posix", "-curl": "curl", "-fetch": "fetch", "-start": "start"}
    wanted = {f"{system}{more}": report["lines"][line] for system in ("linux", "macos")
              for more, line in posix.items()}
    assert shown == {**wanted, **{f"windows{more}": report["lines"][f"windows{line}"] for more, line
                                  in {"": "", "-fetch": "_fetch", "-start": "_start"}.items()}}
    assert page.ids["address"] == report["url"] and "only-here" in page.hidden


URLS = ["http://192.168.1.5:8080", "https://grid.example.org", "http://[fe80::1]:8080"]


@pytest.mark.parametrize("url", URLS)
def test_shells_read_the_lines_as_they_are_meant(url):
    lines = plugin().join_lines(url)
    program = f"import urllib.request as u; exec(u.urlopen('{url}/volunteer.py').read())"
    file = f"{url}/volunteer.py"
    assert {way: shlex.split(line) for way, line in lines.items()} == {
        "posix": ["python3", "-c", program, url],
        "curl": ["curl", "-fsS", file, "|", "python3", "-", url],
        "fetch": ["curl", "-fO", file], "start": ["python3", "volunteer.py", url],
        "windows": ["py", "-c", program, url],
        "windows_fetch": ["curl.exe", "-fO", file], "windows_start": ["py", "volunteer.py", url]}
    for line in lines.values():  # zsh, which macOS has, takes a bare [ for a pattern.
        assert "[" not in re.sub(r'"[^"]*"', "", line)
        assert "\n" not in line, "it is pasted"


@pytest.mark.parametrize("url", URLS)
def test_both_terminals_of_windows_hand_the_line_on_unchanged(url):
    """Command Prompt hands on the text itself. PowerShell takes it apart and puts double quotes,
    and nothing before those inside, around what has blanks: as list2cmdline does."""
    for way, line in plugin().join_lines(url).items():
        if not way.startswith("windows"):
            continue
        for special in "%!^&|<>$`@#\\{}":
            assert special not in line, "one of the two would take it for its own"
        assert not set("();,'") & set(re.sub(r'"[^"]*"', "", line))
        argv = shlex.split(line)
        assert not any('"' in argument for argument in argv)
        assert subprocess.list2cmdline(argv).replace('"', "") == line.replace('"', "")
        assert all(f'"{a}"' in line for a in argv if " " in a)


AGENTS = {
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/120.0": "windows",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 Safari/605": "macos",
    "Mozilla/5.0 (X11; Linux x86_64; rv:120.0) Gecko/20100101 Firefox/120.0": "linux",
    "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:15.0) Gecko/20100101 Firefox/15.0": "linux",
    "Mozilla/5.0 (Linux; Android 13; Pixel 7) AppleWebKit/537.36 Mobile": "",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_0 like Mac OS X) Mobile/15E148": "",
    "Mozilla/5.0 (X11; CrOS x86_64 14541.0.0) Chrome/120.0": "", "curl/8.5": "", "": "",
    EVIL: "", "\xff": "",
}


@pytest.mark.parametrize("agent", AGENTS)
def test_the_system_of_the_reader_is_marked_and_none_is_hidden(grid, get, agent):
    answer = get("/", **({"HTTP_USER_AGENT": agent} if agent else {}))
    found = re.findall(r'<details class="system" (data-mine)? open>\s*<summary><h3 id="(\w+)-',
                       answer.body.decode())
    assert [id for _, id in found] == ["linux", "macos", "windows"]
    assert [id for mine, id in found if mine] == [AGENTS[agent]] * bool(AGENTS[agent])


def test_certificates_are_spoken_of_only_where_there_are_some(grid, get):
    page = get("/", **{"wsgi.url_scheme": "https"}).body.decode()
    assert "Install Certificates.command" in page
    assert "Install Certificates.command" not in get("/").body.decode()


def test_who_looks_from_the_server_itself_sees_its_address_in_the_network(grid, get):
    make.settings(host="0.0.0.0")
    (addresses,) = m.plugged("addresses")
    report = json.loads(get("/status.json", host="localhost:8123").body)
    assert report["urls"] == (addresses(8123)[::-1] or ["http://localhost:8123"])
    assert report["urls"][0] in report["lines"]["posix"] and not report["only_here"]


def test_a_server_for_its_own_machine_says_so(grid, get):
    make.settings(host="127.0.0.1")
    report = json.loads(get("/status.json", host="127.0.0.1:8123").body)
    assert report["url"] == "http://127.0.0.1:8123" and report["only_here"]
    assert "only-here" not in Page(get("/", host="127.0.0.1:8123").body.decode()).hidden


@pytest.mark.parametrize("host", ["localhost:99999", "localhost:x", "[::1", "[::1]:80", "", "a b",
                                  "'; rm -rf ~ #", EVIL, "x" * 999, "..", ":", "127.0.0.1"])
def test_no_host_header_breaks_the_page_or_the_line(grid, get, host):
    for path in ("/", "/status.json"):
        answer = get(path, host=host)
        assert answer.status == 200
    report = json.loads(answer.body)
    assert re.fullmatch(r"http://[\w.:\[\]-]+", report["url"])
    assert m.project.counts["server errors"] == 0


def without_boinc(monkeypatch):
    monkeypatch.setattr(m, "plugins", [p for p in m.plugins if not hasattr(p, "scheduler_path")])


def find_schedulers(page, kind="boinc"):
    """Find what BOINC's client finds: line by line, each cut at 255 bytes [WIRE 4]."""
    start = f'<link rel="{kind}_scheduler" href="'.encode()
    return [line.partition(start)[2].partition(b'"')[0].decode()
            for line in (whole[:255] for whole in page.split(b"\n"))
            if start in line and b'">' in line]


@pytest.mark.parametrize("host", ["grid.example:8080", "127.0.0.1:8123", "192.168.1.5:80",
                                  "grid.example", "a" * 60 + ".example:65535"])
def test_boincs_client_finds_the_scheduler_at_the_address_by_which_it_came(grid, get, host):
    answer = get("/", host=host)
    assert find_schedulers(answer.body) == [f"http://{host}/boinc/scheduler"]
    path = json.loads(get("/status.json", host=host).body)["boinc"]["schedulers"][0]
    assert b"<scheduler_reply>" in get(path.partition(host)[2], host=host).body
    assert "boinc-url" in Page(answer.body.decode()).ids


@pytest.fixture
def named(get, monkeypatch):
    """Name addresses of the project, as setup.cfg does."""
    def name(*addresses):
        monkeypatch.setattr(sys.modules["minigrid_plugin_api"], "own_addresses", list(addresses))
    return name


HERE, HOME, AWAY = "http://grid.example:8080", "http://192.168.1.5:8080", "https://new.example"


def test_clients_find_every_address_and_first_that_by_which_they_came(grid, get, named):
    """[S1-05 S1-22 D-06]"""
    assert find_schedulers(get("/").body, "minigrid") == [f"{HERE}/scheduler"]
    named(HOME, HERE, AWAY)
    page = get("/").body
    assert find_schedulers(page, "minigrid") == [
        f"{url}/scheduler" for url in (HERE, HOME, AWAY)]
    assert find_schedulers(page) == [f"{url}/boinc/scheduler" for url in (HERE, HOME, AWAY)]
    report = json.loads(get("/status.json").body)
    assert report["url"] == HERE and report["urls"] == [HERE, HOME, AWAY]
    assert Page(page.decode()).ids["addresses"] == f"{HOME}, {AWAY}"
    odd = get("/", host="a b").body
    assert find_schedulers(odd, "minigrid") == [f"{url}/scheduler" for url in (HOME, HERE, AWAY)]


def test_who_looks_from_the_server_itself_is_told_what_its_owner_named(
        grid, get, named, monkeypatch):
    named(AWAY, HOME)
    monkeypatch.setattr(plugin(), "network", lambda port, minute: [LAN])
    for listens, more in (("0.0.0.0", [LAN]), ("127.0.0.1", [])):  # the second behind a proxy
        make.settings(host=listens)
        report = json.loads(get("/status.json", host="localhost:8123").body)
        assert report["urls"] == [AWAY, HOME, *more] and not report["only_here"]
        assert report["lines"]["posix"].endswith(f" {AWAY}")


def test_a_tag_the_client_would_cut_is_left_out(grid, get, named):
    named("http://" + "y" * 143)
    assert find_schedulers(get("/").body)[1:] == ["http://" + "y" * 143 + "/boinc/scheduler"]
    named()
    for n in (120, 185, 186, 230):
        page = get("/", host="x" * n + ".org").body
        for kind, path in (("boinc", "/boinc/scheduler"), ("minigrid", "/scheduler")):
            lines = [line for line in page.split(b"\n") if f'"{kind}_scheduler'.encode() in line]
            assert len(lines) == (7 + n + 4 + len(path) <= 200)
            assert all(len(line) < 255 for line in lines)


def test_without_the_plugin_there_is_no_tag_and_no_word_of_boinc(grid, get, monkeypatch):
    make.Client().ask()
    without_boinc(monkeypatch)
    body = get("/").body
    html, _, script = body.partition(b"<script>")
    assert find_schedulers(body) == [] and json.loads(get("/status.json").body)["boinc"] is None
    assert b"BOINC" not in html and b".php" not in html


LAN = "http://192.0.2.7:8123"
PASTED = {  # (listens at, seen as): what people can paste into BOINC Manager
    ("0.0.0.0", "grid.example:8123"): "http://grid.example:8123/",
    ("0.0.0.0", "192.168.1.5:8123"): "http://192.168.1.5:8123/",
    ("0.0.0.0", "localhost:8123"): f"{LAN}/",
    ("0.0.0.0", "teacher:8123"): f"{LAN}/",
    ("0.0.0.0", "0.0.0.0:8123"): f"{LAN}/",
    ("0.0.0.0", "[::1]:8123"): f"{LAN}/",
    ("0.0.0.0", ".local:8123"): f"{LAN}/",
    ("127.0.0.1", "localhost:8123"): "http://127.0.0.1:8123/",
    ("127.0.0.1", "127.0.0.1:8123"): "http://127.0.0.1:8123/",
    ("192.168.1.5", "teacher:8123"): "http://192.168.1.5:8123/",
    ("127.0.0.1", "[::1"): "http://127.0.0.1:8123/",
}


@pytest.mark.parametrize("case", PASTED)
def test_the_address_to_paste_is_one_that_boinc_takes(grid, get, monkeypatch, case):
    listens, seen = case
    make.settings(host=listens, port=8123)
    monkeypatch.setattr(plugin(), "network", lambda port, minute: [LAN])
    page = Page(get("/", host=seen).body.decode())
    assert page.ids["boinc-url"] == PASTED[case]
    assert page.ids["boinc-attach"] == f"boinccmd --project_attach {PASTED[case]} KEY"
    assert PASTED[case] in page.ids["boinc-create"]


@pytest.mark.parametrize("creation, words", [
    ("open", "choose an e-mail address"), ("invitation", "needs an invitation"),
    ("closed", "not made just now")])
def test_the_page_says_who_may_make_an_account(grid, get, monkeypatch, creation, words):
    monkeypatch.setattr(m, "plugins", [
        *m.plugins, SimpleNamespace(account_creation=lambda: creation)])
    html = get("/").body.decode()
    page = Page(html)
    assert words in page.ids["boinc-next"] and '<a href="/join">' in html
    assert ("boinc-create" in page.ids) == (creation == "open")
    assert ("no account" in html) == (creation == "open")
    assert ("--invitation CODE" in html) == (creation == "invitation")


def test_the_real_name_of_a_computer_with_boinc_is_shown_to_nobody(grid, get):
    for name, version in (("johns-laptop", "7.20.5"), ("kitchen", "minigrid 0.1")):
        make.Client(name).ask(host={"domain_name": name}, client_version=version)
    shown = [host["name"] for host in status()["hosts"]["recent"]]
    assert shown == ["computer 1", "kitchen"]
    m.project.write(lambda: m.User.update(name="volunteer").execute())
    for path in ("/", "/status.json"):
        assert b"johns-laptop" not in get(path).body and b"kitchen" in get(path).body


@pytest.mark.parametrize("name, shown", [
    ("ann", "ann"), ("ann@home", "ann@home"), ("@ann", "@ann"), ("ann@example.org", "volunteer 1"),
    ("I am ann@example.org.", "volunteer 1"), ("a.b@c", "a.b@c")])
def test_who_gave_an_address_as_a_name_is_shown_without(grid, name, shown):
    make.Client().ask()
    m.project.write(lambda: m.User.update(name=name).execute())
    assert status()["hosts"]["recent"][0]["volunteer"] == shown


# ---- Result files --------------------------------------------------------------


ODD = ["C:secret.txt", "..\\secret.txt", "two\nlines.txt", "\udcff.txt"] \
    if os.name == "posix" else []  # elsewhere they are no names


@pytest.fixture
def results(grid):
    folder = grid.data / "results"
    (folder / "near.png").write_bytes(b"\x89PNG")
    (folder / "near.txt").write_text("one\ntwo\n")
    (folder / "near.csv").write_text("a,b\n")
    (folder / "near.jsonl").write_text("{}\n")
    for name in (".hidden.png", ".png", "near.answers.json", "near.png.part", "near.html",
                 "near.svg", "../secret.txt", *ODD):
        (folder / name).write_text("hush")
    (folder / "sub").mkdir()
    (folder / "sub" / "near.txt").write_text("hush")
    yield folder
    shutil.rmtree(folder)
    folder.mkdir()


def test_result_files_are_listed_with_size_and_time(results):
    os.utime(results / "near.png", ns=(0, NOW * 10**9 + 250_000_000))
    files = {file["name"]: file for file in status()["files"]}
    assert sorted(files) == ["near.csv", "near.jsonl", "near.png", "near.txt"]
    assert files["near.png"] == {
        "name": "near.png", "nbytes": 4, "size": "4 bytes", "mtime": NOW + 0.25}


def test_a_picture_that_changes_twice_in_a_second_is_loaded_twice(results, get):
    def address():
        return re.search(r'src="(/results/near.png\?v=[^"]*)"', get("/").body.decode()).group(1)

    seen = set()
    for fraction in (100_000_000, 700_000_000):
        os.utime(results / "near.png", ns=(0, NOW * 10**9 + fraction))
        seen.add(address())
    assert len(seen) == 2


@pytest.mark.parametrize("name, kind", [
    ("near.png", "image/png"), ("near.txt", "text/plain; charset=utf-8"),
    ("near.csv", "text/csv; charset=utf-8"), ("near.jsonl", "text/plain; charset=utf-8")])
def test_result_files_are_sent_as_what_they_are(results, get, name, kind):
    answer = get(f"/results/{name}")
    assert answer.status == 200 and answer.body == (results / name).read_bytes()
    assert answer.headers["Content-Type"].lower() == kind
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_beginning_of_a_text_can_be_asked_for(results, get):
    answer = get("/results/near.txt", HTTP_RANGE="bytes=0-3")
    assert (answer.status, answer.body) == (206, b"one\n")


@pytest.mark.parametrize("name", [
    "../secret.txt", "..", ".", "", "../results/near.png/../../secret.txt", "..\\secret.txt",
    "C:\\secret.txt", "C:secret.txt", "near.txt:x.txt", "/secret.txt", "//secret.txt",
    "sub/near.txt", "./near.txt", ".hidden.png", ".png", ".txt", "near.answers.json",
    "near.png.part", "near.html", "near.svg", "near", "missing.png", "near.png\0", "\0.png",
    "near.PNG", "near.txt ", "near\n.txt", "x" * 300 + ".txt", "%2e%2e/secret.txt"])
def test_no_other_file_is_given_away(results, get, name):
    answer = get(f"/results/{name}")
    assert answer.status == 404 and b"hush" not in answer.body
    assert m.project.counts["server errors"] == 0


def test_an_absolute_path_is_not_a_result_file(results, get):
    answer = get(f"/results/{(results / 'near.txt').resolve()}")
    assert answer.status == 404 and b"one" not in answer.body


def test_a_directory_full_of_files_costs_no_more_than_the_files_of_the_applications(results):
    for n in range(plugin().FILES_LISTED):
        (results / f"extra {n}.txt").write_text("")
    assert [file["name"] for file in status()["files"]] == [
        "near.csv", "near.jsonl", "near.png", "near.txt"]


def test_files_that_vanish_and_directories_that_are_gone_do_no_harm(results):
    (results / "gone.png").symlink_to(results / "nowhere")
    assert "gone.png" not in [file["name"] for file in status()["files"]]
    shutil.rmtree(results)
    assert status()["files"] == []
    results.mkdir()


def test_an_address_that_does_not_exist_is_no_page_of_the_asker(grid, get):
    answer = get(f"/{EVIL}")
    assert answer.status == 404
    assert EVIL.encode() not in answer.body or "html" not in answer.headers["Content-Type"]


# ---- A real browser ------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"))), None)


@contextlib.contextmanager
def serving(before_first_report):
    """Serve the open project on a free port; something happens between the page and its script."""
    app, first = m.make_app(lambda: NOW + 150), [before_first_report]

    def middle(environ, start_response):
        if environ["PATH_INFO"] == "/status.json" and first:
            first.pop()()
        try:
            return app(environ, start_response)
        finally:
            m.db.close()

    server = waitress.create_server(middle, host="127.0.0.1", port=0, threads=4)
    thread = threading.Thread(target=make.run_until_closed, args=(server,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}/"
    finally:
        server.close()
        server.task_dispatcher.shutdown(cancel_pending=True, timeout=5)
        thread.join()


def has_inner_dot(url):
    return re.fullmatch(r"http://[^/.:]+[.][^/:]+:[0-9]+/", url)


def dump(url, profile):
    """Load a page in a headless browser; return the document as it stands after some seconds."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", f"--user-data-dir={profile}", "--virtual-time-budget=6000",
         "--dump-dom", url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, check=True)
    return done.stdout.decode()


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM and not os.environ.get("CI"), reason="no Chromium is installed")
def test_a_browser_shows_what_the_report_says(folder, tmp_path):
    assert CHROMIUM, "where all is tested, Chromium must be installed"
    with small_world(folder, name=EVIL) as project:
        (project.data / "results" / "parts.txt").write_text(f"{EVIL}\n" * 30)
        (project.data / "results" / "later.png").write_bytes(b"no picture")
        m.remember(NOW, EVIL)

        def later():  # A computer comes and takes a copy, when the page is already loaded.
            client = make.Client(EVIL)
            assert client.fetch(NOW + 150, host={"domain_name": EVIL, "os_name": EVIL})
            m.project.write(lambda: m.App.update(next_number=1234567).execute())
            (folder / "count.py").write_text(make.COUNT)
            m.sync_apps([folder / "count.py"], NOW)

        with serving(later) as url:
            html = dump(url, tmp_path)
        page, report = Page(html), status(NOW + 150)
    assert [app["name"] for app in report["apps"]] == ["count", "parts"]
    assert report["total"]["in_progress"] == 3 and report["total"]["made"] == 1234567
    for app in report["apps"]:
        assert page.counts(app["name"]) == shown(app)
        assert page.keyed[app["name"]]["about"] == app["about"]
    assert page.ids["state-text"] == report["state"]["text"]
    assert page.ids["state-text"] == "working: 14 computers active, 3 tasks out"
    assert has_inner_dot(page.ids["boinc-url"])
    links = {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    for host in report["hosts"]["recent"]:
        assert {f"/show_user.php?userid={host['userid']}",
                f"/show_host_detail.php?hostid={host['id']}"} <= links
    for host in report["hosts"]["recent"]:
        row = page.keyed[str(host["id"])]
        assert row["volunteer"] == host["volunteer"] and row["contact"] == host["contact"]
        assert row["in_progress"] == str(host["in_progress"])
    assert report["hosts"]["recent"][-1]["volunteer"] == EVIL == page.ids["name"]
    assert html.count("<script") == 1 and "alert(1)" in html
    assert page.ids["texts"].count(EVIL) == 20, "the beginning of the text is shown"
    assert "silence" in page.hidden
    seen = re.findall(r'<details class="system"([^>]*)>\s*<summary><h3 id="(\w+)-', html)
    assert [id for attributes, id in seen if "open" in attributes] == ["linux"], "ours alone"


# ---- The lines, as they are pasted ---------------------------------------------

CURL, CI = shutil.which("curl"), os.environ.get("CI")
NEWER = [path for version in ("3.9.18", "3.13.0") if (
    path := Path.home() / ".pyenv" / "versions" / version / "bin" / "python3").exists()]
PASTED_LINES = {"one line": ["posix"], "curl": ["curl"], "kept": ["fetch", "start"]}


@pytest.mark.skipif(not CURL and not CI, reason="no curl is installed")
@pytest.mark.parametrize("python", [Path(sys.executable), *NEWER], ids=lambda path: path.parts[-3])
@pytest.mark.parametrize("way", PASTED_LINES)
def test_a_pasted_line_makes_a_volunteer(folder, tmp_path, way, python):
    """With nothing in the environment but where programs are, as in a bare terminal."""
    assert CURL, "where all is tested, curl must be installed"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python3"
    program.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    program.chmod(0o755)
    places = os.pathsep.join([str(program.parent), os.path.dirname(CURL), "/usr/bin", "/bin"])
    with make.project(folder, {"count": make.COUNT}, min_sendwork_interval=0):
        m.run_pass(NOW)
        with serving(lambda: None) as url:
            lines = plugin().join_lines(url.rstrip("/"))
            text = " && ".join(lines[name] for name in PASTED_LINES[way])
            done = subprocess.run(
                ["/usr/bin/env", "-i", f"PATH={places}", f"HOME={tmp_path}", "sh", "-c",
                 f"{text} --once --name pasted --dir {tmp_path / 'kept'}"],
                cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=120)
        assert done.returncode == 0, done.stdout
        assert [user.name for user in m.User.select()] == ["pasted"]
        assert m.Result.select().where(m.Result.outcome == m.Outcome.SUCCESS).exists()
