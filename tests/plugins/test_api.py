"""The JSON protocol, through WSGI without sockets; what each bad input gets.

Whatever comes over the wire: an answer below 500 with a JSON body, and nothing changed by a request
that was refused [DESIGN 5].
"""

import dataclasses
import json
import random
import string
import sys

import make
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web import ANYTHING, ECHO, NOW, Volunteer, Web, refused, serving, sha256, sound, state

import minigrid as m


# ---- 1. A client without sockets -----------------------------------------------


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def anna(web):
    return Volunteer(web)


@pytest.fixture
def job(anna):
    return anna.fetch()[0]


# ---- 2. The whole conversation -------------------------------------------------


def test_from_registration_to_a_valid_answer(web):
    """Download in two ranges, upload in two pieces with a resume, report, validate."""
    anna, berta = Volunteer(web, "anna"), Volunteer(web, "berta")
    for volunteer in (anna, berta):
        reply = volunteer(work_req_seconds=1, cpu_req_instances=1)
        assert reply["project_name"] == "minigrid" and reply["server_time"] == NOW
        (job,) = reply["assignments"]
        assert job["workunit"] == "echo_0" and job["report_deadline"] == NOW + job["delay_bound"]
        for file in (*job["files"], job["input"]):
            content = download(web, file["url"])
            assert (len(content), sha256(content)) == (file["nbytes"], file["sha256"])
        output = b'{"answer": 42}'
        assert web("GET", path_of(job["output"]["url"])).json == {"nbytes": 0, "complete": False}
        sent = volunteer.put(job, output[:5], total=len(output), sha256=sha256(output))
        assert (sent.status, sent.json) == (200, {"nbytes": 5, "complete": False})
        assert web("GET", path_of(job["output"]["url"])).json == {"nbytes": 5, "complete": False}
        assert not m.file_path("upload", job["output"]["name"]).exists()
        sent = volunteer.put(job, output[5:], start=5, sha256=sha256(output))
        assert (sent.status, sent.json) == (200, {"nbytes": 14, "complete": True})
        assert m.file_path("upload", job["output"]["name"]).read_bytes() == output
        assert web("GET", path_of(job["output"]["url"])).json == {"nbytes": 14, "complete": True}
        web.now += 10
        reply = volunteer.report(job, cpu_time=3.5, app_version=job["app_version"])
        assert reply["acks"] == [job["name"]] and not reply["messages"]
        web.now = NOW
    for now in range(NOW + 11, NOW + 14):
        m.run_pass(now)
    rows = list(m.Result.select().where(m.Result.workunit == 1))
    assert [r.validate_state for r in rows] == [m.ValidateState.VALID] * 2
    assert [(r.cpu_time, r.elapsed_time, r.received_time) for r in rows] == [
        (3.5, 1.5, NOW + 10)] * 2
    line = (m.project.data / "results" / "echo.jsonl").read_text()
    assert json.loads(line)["answer"] == {"answer": 42}
    web.now = NOW + 20
    assert anna()["user_total_credit"] == anna()["host_total_credit"] > 0


def path_of(url, base="http://grid.example:8080"):
    assert url.startswith(base + "/"), url
    return url.removeprefix(base)


def download(web, url):
    first = web("GET", path_of(url), Range="bytes=0-9")
    assert first.status == 206 and len(first.body) <= 10
    total = int(first.headers["Content-Range"].rpartition("/")[2])
    if len(first.body) == total:
        return first.body
    rest = web("GET", path_of(url), Range="bytes=10-")
    assert rest.headers["Content-Range"] == f"bytes 10-{total - 1}/{total}"
    return first.body + rest.body


HOSTS = {
    "grid.example:8080": "http://grid.example:8080", "10.0.0.7": "http://10.0.0.7",
    "[::1]:99": "http://[::1]:99", "new-name.local:1": "http://new-name.local:1",
    "evil\"><script>": "", "a b": "", "a" * 300: "", "x/y": "", "user@host": "",
}


def test_addresses_are_those_by_which_the_client_came(web):
    """[D5, boinc#5946]; from a name that is none come paths."""
    for host, base in HOSTS.items():
        anna = Volunteer(web)
        reply = web.answer("/scheduler", anna.request(work_req_seconds=1), host=host)
        job = reply["assignments"][0]
        for file, folder in ((job["files"][0], "download"), (job["input"], "download"),
                             (job["output"], "upload")):
            assert file["url"] == f"{base}/{folder}/{file['name']}"


@pytest.fixture
def api(web):
    """The plugin, of a project that serves."""
    return sys.modules["minigrid_plugin_api"]


def test_a_reply_names_every_address_of_the_project(web, api, anna, monkeypatch):
    """[S1-22 D-06, boinc#5946] A client knows them before it needs them."""
    here, home, away = "http://grid.example:8080", "http://10.0.0.7", "https://new.example"
    assert anna()["addresses"] == [here]
    monkeypatch.setattr(api, "own_addresses", [home, here, away])
    assert anna()["addresses"] == [here, home, away]
    assert web.answer("/scheduler", anna.request(), host="10.0.0.7")["addresses"] == [
        home, here, away]
    assert web.answer("/scheduler", anna.request(), host="a b")["addresses"] == [home, here, away]
    assert anna(authenticator="nobody's")["addresses"] == [here, home, away]


ADDRESSES = {  # of setup.cfg: as they are kept, None if they are refused
    "": [], "http://192.168.1.5:8080 https://grid.example.org/\n  http://[::1]:80": [
        "http://192.168.1.5:8080", "https://grid.example.org", "http://[::1]:80"],
    "http://a http://a/ http://b": ["http://a", "http://b"], "http://my_pc.local": [
        "http://my_pc.local"], "http://a:65535": ["http://a:65535"],
    "http://" + "a" * 143: ["http://" + "a" * 143],
    "grid.example.org": None, "ftp://a": None, "http://": None, "http:///": None, "https:a": None,
    "http://a/path": None, "http://a/../b": None, "http://a?q": None, "http://a#x": None,
    "http://user@a": None, "http://user:pw@a": None, "http://a:0": None, "http://a:65536": None,
    "http://a:x": None, "http://a:": None, "http://a..b": None, "http://.a": None,
    "http://a.": None,
    "http://[::1": None, "http://[1:2]": None, "http://::1": None, 'http://a"><b>': None,
    "http://a,http://b": None, "http://\u00e4.example": None, "http://a\\b": None,
    "http://a http://b;c": None, "javascript:alert(1)": None, "http://" + "a" * 144: None,
    " ".join(f"http://a{n}" for n in range(8)): [f"http://a{n}" for n in range(8)],
    " ".join(f"http://a{n}" for n in range(9)): None,
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses_of_the_settings(api, tmp_path, monkeypatch, text):
    (tmp_path / "setup.cfg").write_text(f"[api]\naddresses = {text}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if ADDRESSES[text] is not None:
        Web()
        assert api.own_addresses == ADDRESSES[text]
    else:
        with pytest.raises(m.ClientError, match=r"^setup.cfg: setting 'addresses' of \[api\] must"):
            Web()
    monkeypatch.undo()
    Web()
    assert api.own_addresses == []


def test_a_lost_reply_costs_nothing(web, anna, job):
    """The client that does not list what it holds gets the same again [C43]."""
    (again,) = anna(other_results=[])["assignments"]
    assert again == job
    assert anna(other_results=[job["name"]])["assignments"] == []
    anna.put(job, b"1")
    assert anna.report(job)["acks"] == [job["name"]]
    before = state()[0]["result"]
    again = anna.report(job)
    assert again["acks"] == [job["name"]] and state()[0]["result"] == before


def test_keys_that_nobody_knows_are_ignored(web, anna):
    """A newer client may say more."""
    reply = anna(speed="of light", host={"p_fpops": 3e7, "colour": "red", "id": 77, "user": 99},
                 reports=[{"name": "x", "feeling": "good"}])
    host = m.Host.get()
    assert reply["hostid"] == host.id == 1 and host.user_id == 1 and host.p_fpops == 3e7


def test_what_is_the_servers_own_cannot_be_filled(web, anna):
    """The versions that are offered, what protocols pass on, details that nobody has checked."""
    (job,) = anna(work_req_seconds=1, versions={}, more={"why_not": 1},
                  host={"p_fpops": 3e7, "details": {"p_features": "all"}})["assignments"]
    assert job["name"] == "echo_0_0" and m.Host.get().details == {}


def test_an_unknown_key_is_told_to_join_again(web, anna):
    before = state()
    for key in ("", "0" * 32, anna.key.upper() + "x", "' OR 1=1 --", "%"):
        reply = web.answer("/scheduler", {**anna.request(), "authenticator": key})
        assert "join again" in reply["messages"][0]["text"] and not reply["assignments"]
        assert reply["request_delay"] >= 3600
    assert state() == before


def test_work_of_others_is_not_ones_to_report(web, anna, job):
    berta = Volunteer(web, "berta")
    before = state()[0]["result"]
    reply = berta.report(job, {"name": "echo_99_0"}, {"name": "../../etc/passwd"})
    assert reply["acks"] == [job["name"], "echo_99_0", "../../etc/passwd"]
    assert ["never sent to you" in message["text"] for message in reply["messages"]] == [
        True, False, False]
    assert state()[0]["result"] == before


def test_two_reports_of_one_result_in_one_request(web, anna, job):
    reply = anna(reports=[{"name": job["name"], "client_state": 5},
                          {"name": job["name"], "client_state": 3, "exit_status": 195}])
    assert reply["acks"] == [job["name"]] * 2
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.SUCCESS


# ---- 3. Bad requests -----------------------------------------------------------

BODIES = {
    "nothing": b"", "no JSON": b"hello", "half": b'{"authenticator": "', "XML": b"<xml/>",
    "a list": b"[]", "a number": b"7", "null": b"null", "a text": b'"x"', "two": b"{} {}",
    "deep lists": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "deep and closed":
    b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "not UTF-8": b'{"nickname": "\xff"}',
    "UTF-16 cut": b"\xff\xfe{\0}", "NUL": b"\0", "a huge number": b'{"nickname": ' + b"9" * 5000 +
    b"}",
}


@pytest.mark.parametrize("path", ["/scheduler", "/register"])
def test_a_body_that_is_no_request(web, path):
    before = state()
    for body in BODIES.values():
        status = 413 if len(body) > 4096 and path == "/register" else 400
        refused(web.post(path, body), status, before)


@pytest.mark.parametrize("path, nbytes", [("/scheduler", 100 << 20), ("/register", 5000)])
def test_a_body_that_is_too_long_is_not_read(web, path, nbytes):
    class Unreadable:
        def read(self, *_):
            raise AssertionError("it was read")

    before = state()
    assert "at most" in refused(
        web("POST", path, Unreadable(), content_length=str(nbytes)), 413, before)


WHOLE = [f.name for f in dataclasses.fields(m.Request) if f.type is int]
REAL = [f.name for f in dataclasses.fields(m.Request) if f.type is float]
TEXTS = [f.name for f in dataclasses.fields(m.Request) if f.type is str]
NO_NUMBER = ["null", "true", '"1"', "[]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "-1e999",
             "1e300", "9" * 400, "-" + "9" * 400, str(2**63)]
NO_TEXT = ["null", "true", "1", "1.5", "[]", "{}", '"a\\u0000b"', '"\\ud800"', '"\\udfff\\ud800"',
           '"' + "x" * 70_000 + '"']
NO_NAMES = ["null", "true", "1", '"python"', "{}", "[1]", "[null]", '[["a"]]', '["\\ud800"]',
            '["a\\u0000"]', '["' + "x" * 300 + '"]']
NO_LIST = ["true", "1", '"x"', '{"name": "x"}', "[1]", "[null]", '["x"]', "[[]]"]
HOST_NUMBERS = ["p_ncpus", "p_fpops", "m_nbytes", "d_free", "d_total", "on_frac", "active_frac"]
HOST_TEXTS = sorted(set(m.HOST_FIELDS) - {"details", *HOST_NUMBERS})
WRONG = [
    *((f'"{name}": {value}', name) for name in WHOLE for value in [*NO_NUMBER, "1.5"]),
    *((f'"{name}": {value}', name) for name in REAL for value in NO_NUMBER),
    *((f'"{name}": {value}', name) for name in TEXTS for value in NO_TEXT),
    *((f'"allow_multiple_clients": {value}', "allow_multiple_clients")
      for value in ("null", "1", '"true"', "[]")),
    *((f'"platforms": {value}', "platforms") for value in NO_NAMES),
    *((f'"other_results": {value}', "other_results") for value in NO_NAMES if value != "null"),
    *((f'"reports": {value}', "reports") for value in NO_LIST),
    *((f'"host": {value}', "host") for value in ("1", '"x"', "true", "[1]")),
    *((f'"host": {{"{name}": {value}}}', name) for name in HOST_NUMBERS for value in NO_NUMBER),
    *((f'"host": {{"{name}": {value}}}', name) for name in HOST_TEXTS
      for value in NO_TEXT),
    *((f'"reports": [{{"name": "x", "{f.name}": {value}}}]', f.name)
      for f in dataclasses.fields(m.Report) for value in
      (NO_TEXT if f.type is str else NO_NUMBER)),
    *((f'"trickles": {value}', "trickles") for value in [
        *NO_LIST, '[{"result": "x"}]', '[{"text": "x"}]', '[{"result": 1, "text": "x"}]']),
    *((f'"trickles": [{{"result": {value}, "text": ""}}]', "trickles") for value in NO_TEXT),
    *((f'"trickles": [{{"result": "x", "text": {value}}}]', "trickles") for value in NO_TEXT),
    *((f'"trickles": [{{"result": "x", "text": "", "time": {value}}}]', "time")
      for value in NO_NUMBER),
    ('"reports": [{}]', "name"), ('"reports": [{"exit_status": 0}]', "name"),
    ('"other_results": [' + ", ".join(['"x"'] * 100_000) + "]", "other_results"),
    ('"reports": [' + ", ".join(['{"name": "x"}'] * 100_000) + "]", "reports"),
    ('"platforms": [' + ", ".join(['"x"'] * 100_000) + "]", "platforms"),
    ('"trickles": [' + ", ".join(['{"result": "x", "text": ""}'] * 201) + "]", "trickles"),
]


def test_the_tables_name_every_field():
    """A new field must be refused, too, where its type is wrong."""
    known = {*WHOLE, *REAL, *TEXTS, "allow_multiple_clients", "platforms", "other_results",
             "reports", "host", "trickles", "versions", "more"}  # the last two are not a client's
    assert known == {f.name for f in dataclasses.fields(m.Request)}
    assert {f.type for f in dataclasses.fields(m.Report)} == {int, float, str}


def test_every_field_of_a_wrong_type_is_named(web, anna):
    """A few hundred requests, each wrong in one place."""
    anna.fetch()
    before, good = state(), json.dumps(anna.request())[:-1]
    for text, name in WRONG:
        body = f"{good}, {text}}}".encode()  # The last of two equal keys counts.
        got = web.post("/scheduler", body)
        assert got.status == 400 and name in got.json["error"], (text[:80], got.body[:200])
        assert len(got.json["error"]) < 200
    assert state() == before
    assert m.project.counts["refused requests"] == len(WRONG)


def test_a_request_without_a_key(web):
    assert "authenticator is missing" in refused(web.post("/scheduler", {"hostid": 1}), 400,
                                                 state())


def test_ten_thousand_names_are_taken(web, anna):
    """The limit itself: answered, each acknowledged, nothing found."""
    names = [f"echo_{i}_0" for i in range(100, 10_100)]
    reply = anna(other_results=names, reports=[{"name": name} for name in names])
    assert reply["acks"] == names and len(reply["aborts"]) == len(names)


EXTREMES = {
    "negative": dict(hostid=-1, rpc_seqno=-5, work_req_seconds=-1.0, cpu_req_instances=-3,
                     estimated_delay=-1e9),
    "large": dict(hostid=2**62, rpc_seqno=2**62, work_req_seconds=1e18, cpu_req_instances=1e18),
    "negative host": dict(host={name: -1 for name in HOST_NUMBERS}, work_req_seconds=1),
    "large host": dict(host={name: 2**62 for name in HOST_NUMBERS}, work_req_seconds=1e18),
    "tiny host": dict(host={name: 5e-324 for name in HOST_NUMBERS}, work_req_seconds=1),
    "negative report": dict(reports=[dict(
        name="echo_0_0", exit_status=-2**62, client_state=-1, cpu_time=-1e18, elapsed_time=-1,
        peak_memory=-1, app_version=-1)]),
    "large report": dict(reports=[dict(
        name="echo_0_0", exit_status=2**62, client_state=2**62, cpu_time=1e18, elapsed_time=1e18,
        peak_memory=1e18, app_version=2**62, stderr_out="\U0001f40c" * 65536)]),
    "long texts": dict(host_cpid="x" * 65536, client_version="\u202e" * 65536, host={
        name: "x" * 4096 for name in HOST_TEXTS}),
    "odd texts": dict(host_cpid="'; DROP TABLE host; --", host={
        name: "<script>\r\n\x1b[31m\ufffe" for name in HOST_TEXTS}),
}


@pytest.mark.parametrize("case", EXTREMES)
def test_extremes_that_are_no_errors_leave_a_sound_store(web, anna, case):
    anna.fetch()
    got = web.post("/scheduler", anna.request(**EXTREMES[case]))
    assert got.status in (200, 400), got.body
    for now in range(NOW + 1, NOW + 5):
        assert m.run_pass(now)
    assert not m.project.counts["stage errors"] and not m.project.errors
    assert m.plugged("violations")[0]() == []
    for host in m.Host.select():
        assert 1 <= host.p_ncpus <= 4096
        assert all(value >= 0 for name, value in host.__data__.items() if name in HOST_NUMBERS)
    for r in m.Result.select():
        assert r.cpu_time >= 0 and 0 <= r.elapsed_time <= NOW
    web.now += 100
    assert anna(hostid=1, rpc_seqno=2**62)["hostid"], "the next request is served"


NOWHERE = ["/", "/scheduler", "/nothing", "/download", "/download/", "/%00", "/%ff%fe", "//x",
           "/<script>alert(1)</script>", "/" + "a" * 9999, "/download/a/b", "/..%2f..",
           "/register?x=%"]


def test_addresses_that_are_none(web):
    """One sentence as JSON, whatever was asked: never a page that carries what the caller wrote."""
    before = state()
    for path in NOWHERE:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            got = web(method, path, b"")
            assert got.status < 500 and state() == before, (method, path)
            if got.status >= 400:
                assert got.headers["Content-Type"] == "application/json", (method, path, got.body)
                assert method == "HEAD" or got.json["error"]


def test_the_volunteers_client_is_served(web):
    got = web("GET", "/volunteer.py")
    assert got.body.startswith(b"#!") and b"minigrid" in got.body
    compile(got.body, "volunteer.py", "exec")
    assert got.headers["Content-Type"] == "text/x-python; charset=utf-8"
    assert got.headers["X-Sha256"] == sha256(got.body), "so that people can compare"


def test_the_volunteers_client_is_sent_once(web):
    got = web("GET", "/volunteer.py")
    tag = got.headers["Etag"]
    assert tag == f'"{sha256(got.body)}"' and got.headers["Cache-Control"] == "no-cache"
    head = web("HEAD", "/volunteer.py")
    assert (head.status, head.body) == (200, b"")
    for name in ("Content-Length", "Content-Type", "Etag", "X-Sha256"):
        assert head.headers[name] == got.headers[name]
    assert int(head.headers["Content-Length"]) == len(got.body)
    for known in (tag, f"W/{tag}", f'"another", {tag}', "*"):
        again = web("GET", "/volunteer.py", If_None_Match=known)
        assert (again.status, again.body, again.headers["Etag"]) == (304, b"", tag), known
    for other in ('"another"', tag.strip('"'), f'"{tag[2:-1]}"', "", '"', "\xff"):
        assert web("GET", "/volunteer.py", If_None_Match=other).body == got.body, other


def test_a_store_that_takes_no_change_acknowledges_what_it_has(web, anna):
    """[DESIGN 5] No new work, and nobody is told to forget what is not recorded."""
    old, new, lost = anna.fetch(3)
    anna.put(old, b"1")
    anna.report(old)
    m.Result.update(server_state=m.ServerState.OVER, outcome=m.Outcome.NO_REPLY).where(
        m.Result.name == lost["name"]).execute()  # Given up: its report would still count [C11].
    m.db.execute_sql("PRAGMA query_only = ON")
    before = state()
    try:
        reply = anna(reports=[{"name": old["name"], "client_state": 5},
                              {"name": new["name"], "client_state": 5},
                              {"name": lost["name"], "client_state": 5}], work_req_seconds=10)
        register = web.post("/register", {"nickname": "x"})
        stranger = Volunteer.__new__(Volunteer)
        stranger.web, stranger.key, stranger.hostid, stranger.rpc_seqno = web, "0" * 32, 0, 0
        told = stranger(reports=[{"name": old["name"]}])
    finally:
        m.db.execute_sql("PRAGMA query_only = OFF")
    assert reply["acks"] == [old["name"]] and not reply["assignments"]
    assert "problem on its side" in reply["messages"][0]["text"]
    assert reply["hostid"] == anna.hostid and reply["request_delay"] >= 60
    assert told["acks"] == []
    assert register.status == 503 and "try again" in register.json["error"]
    assert state() == before
    assert anna.report(new)["acks"] == [new["name"]]


# ---- 4. Shared files, arguments, trickles, pauses ------------------------------

TALKING = ECHO.replace("echo:", "talking:") + '''

def trickle(workunit, text):
    return f"{workunit.name} heard {text}"
'''


@pytest.fixture
def talking(folder):
    """A project whose workunits have arguments and share a file, and listen to their jobs."""
    with make.project(folder, {"talking": TALKING}, stock=0, min_sendwork_interval=0):
        web = Web()
        for number in range(2):
            make.add("talking", number, NOW, files={"table.dat": b"1 2 3"}, command_line="-n 5")
        yield web
        assert not m.project.counts["server errors"]


def test_further_inputs_and_arguments(talking):
    anna = Volunteer(talking)
    one, two = anna(work_req_seconds=1e6)["assignments"]
    (file,) = one["inputs"]
    assert two["inputs"] == [file] and one["command_line"] == "-n 5"
    assert file["open_name"] == "table.dat" and file["sticky"] is True
    assert file["url"] == f"http://grid.example:8080/download/{file['name']}"
    assert download(talking, file["url"]) == b"1 2 3" and file["sha256"] == sha256(b"1 2 3")
    assert one["input"]["name"] == "talking_0_in" and "open_name" not in one["input"]
    assert [f.get("main") for f in one["files"]] == [True]  # No start program of BOINC clients.
    assert one["platform"] == "python" and one["plan_class"] == "" and one["ncpus"] == 1


def test_trickles(talking):
    anna, berta = Volunteer(talking, "anna"), Volunteer(talking, "berta")
    (name, _) = [job["name"] for job in anna(work_req_seconds=1e6)["assignments"]]
    told = [dict(result=name, time=n, text=text) for n, text in ((1, "<a>"), (2.5, "b\nc"))]
    for trickles in (told, told, told[1:]):
        reply = anna(trickles=trickles, other_results=[name])
        assert reply["trickles_taken"] is True and reply["trickles"] == []
    assert berta(trickles=told)["trickles_taken"] is True
    m.run_pass(NOW + 1)
    assert berta(other_results=[name])["trickles"] == []
    assert anna(other_results=[])["trickles"] == []
    assert anna(other_results=[name])["trickles"] == [
        dict(result=name, time=NOW + 1, text="talking_0 heard <a>"),
        dict(result=name, time=NOW + 2, text="talking_0 heard b\nc")]
    reply = anna(other_results=[name])
    assert reply["trickles"] == [] and reply["trickles_taken"] is False
    assert anna(trickles=None)["trickles_taken"] is False


def test_messages_of_a_refused_request_are_not_taken(talking):
    anna = Volunteer(talking)
    anna(work_req_seconds=1)
    before = state()
    refused(talking.post("/scheduler", anna.request(
        trickles=[dict(result="talking_0_0", time=1, text="x"), {"result": "y"}])), 400, before)


# ---- 5. Anything at all --------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(
    st.characters() | st.sampled_from("\0\ud800\udfff/.%")) | st.sampled_from(
    [10**400, -2**63, 2**63, 1e308, "echo_0_0", "python", "../x"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.text(max_size=8), inner, max_size=4), max_leaves=12)
REPORTS = st.fixed_dictionaries({"name": st.just("echo_0_0") | VALUES}, optional={
    f.name: VALUES for f in dataclasses.fields(m.Report) if f.name != "name"})
REQUESTS = st.fixed_dictionaries({"authenticator": st.just("KEY") | VALUES}, optional={
    **{f.name: VALUES for f in dataclasses.fields(m.Request) if f.name != "authenticator"},
    "host": st.dictionaries(st.sampled_from(sorted(m.HOST_FIELDS)), VALUES) | VALUES,
    "reports": st.lists(REPORTS, max_size=3) | VALUES,
    "trickles": st.lists(st.fixed_dictionaries({"result": st.just("echo_0_0") | VALUES},
                         optional={"time": VALUES, "text": VALUES}), max_size=3) | VALUES,
    "other_results": st.lists(st.sampled_from(["echo_0_0", "x"])) | VALUES})


@ANYTHING
@given(value=REQUESTS | VALUES)
def test_any_json_to_the_scheduler(web, anna, value):
    body = json.dumps(value).replace('"KEY"', json.dumps(anna.key)).encode()
    sound(web.post("/scheduler", body))


@ANYTHING
@given(body=st.binary() | st.text().map(str.encode), path=st.sampled_from(
    ["/scheduler", "/register"]), kind=st.text(string.printable, max_size=20))
def test_any_bytes(web, body, path, kind):
    sound(web.post(path, body, content_type=kind))


def test_a_storm_of_everything_leaves_a_sound_store(web):
    """Good requests between bad ones, as seeded volunteers mix them; then all is done."""
    rng = random.Random(7)
    volunteers = [Volunteer(web, name) for name in "abc"]
    held = {v: [] for v in volunteers}
    for step in range(150):
        v = rng.choice(volunteers)
        web.now = NOW + step
        text, _ = rng.choice(WRONG[:-4])
        assert web.post("/scheduler", f'{{"authenticator": "{v.key}", {text}}}'.encode()
                        ).status == 400
        other = rng.choice(volunteers)
        if other is not v and held[other]:
            assert v.put(rng.choice(held[other]), b"stolen").status == 403
        if held[v]:
            job = held[v].pop()
            assert v.put(job, json.dumps(job["workunit"]).encode()).json["complete"]
            assert v.report(job)["acks"] == [job["name"]]
        else:
            held[v] = v(work_req_seconds=1, other_results=[])["assignments"]
        m.run_pass(web.now)
    for now in range(web.now + 1, web.now + 5):
        m.run_pass(now)
    lines = (m.project.data / "results" / "echo.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["answer"] for line in lines) == [f"echo_{i}" for i in range(6)]
    assert m.plugged("violations")[0]() == []
