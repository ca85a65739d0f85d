"""The JSON protocol and the files, through WSGI without sockets; what each bad input gets.

Whatever comes over the wire: an answer below 500 with a JSON body, and nothing changed by a request
that was refused [DESIGN 5].
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import json
import random
import string
import sys
import threading
from types import SimpleNamespace
from urllib.parse import unquote_to_bytes

import make
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minigrid as m

NOW = 1_800_000_000
PATIENCE = 20  # seconds until something that does not end is a failure
ECHO = '''"""echo: gives back what it got."""

rsc_disk_bound = 1000


def workunit(i):
    return {"input": i} if i < 6 else None


def compute(input):
    return input
'''


# ---- 1. A client without sockets -----------------------------------------------


class Web:
    """The application as a server sees it: one call for each request."""

    def __init__(self):
        self.now = NOW
        self.app = m.make_app(lambda: self.now)

    def __call__(self, method, path, body=b"", host="grid.example:8080", **headers):
        """Send a request; return status, headers, body, and the JSON in it if there is any."""
        path, _, query = path.partition("?")
        stream = body if hasattr(body, "read") else io.BytesIO(body)
        environ = {
            "REQUEST_METHOD": method, "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "SCRIPT_NAME": "", "QUERY_STRING": query, "SERVER_PROTOCOL": "HTTP/1.1",
            "SERVER_NAME": "localhost", "SERVER_PORT": "80", "HTTP_HOST": host,
            "wsgi.url_scheme": "http", "wsgi.input": stream, "wsgi.errors": sys.stderr,
            "wsgi.version": (1, 0), "wsgi.multithread": True, "wsgi.multiprocess": False,
            "wsgi.run_once": False}
        if "CONTENT_LENGTH" not in headers and not hasattr(body, "read"):
            environ["CONTENT_LENGTH"] = str(len(body))
        for name, value in headers.items():
            name = name.upper()
            environ[name if name == "CONTENT_LENGTH" else f"HTTP_{name}"] = value
        got = SimpleNamespace()

        def start_response(status, headers, exc_info=None):
            got.status = int(status.split()[0])
            got.headers = {name.title(): value for name, value in headers}

        answer = self.app(environ, start_response)
        got.body = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        if got.headers.get("Content-Type") == "application/json" and got.body:
            got.json = json.loads(got.body)
        return got

    def post(self, path, value, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self("POST", path, body, **headers)

    def answer(self, path, value, **headers):
        """Post what must be accepted; return the answer."""
        got = self.post(path, value, **headers)
        assert got.status == 200, got.body
        return got.json


class Volunteer:
    """Speaks the protocol as a client does."""

    def __init__(self, web, name="anna", hostid=0):
        self.web, self.hostid, self.rpc_seqno = web, hostid, 0
        self.key = web.answer("/register", {"nickname": name})["authenticator"]

    def request(self, **more):
        asked = {"authenticator": self.key, "hostid": self.hostid, "rpc_seqno": self.rpc_seqno,
                 "host_cpid": self.key, "host": {"p_fpops": 3e7}, "platforms": ["python"]}
        self.rpc_seqno += 1
        return {**asked, **more}

    def __call__(self, **more):
        reply = self.web.answer("/scheduler", self.request(**more))
        self.hostid = reply["hostid"]
        return reply

    def fetch(self, n=1):
        """Get n results."""
        jobs = self(work_req_seconds=1, cpu_req_instances=n, host={"p_ncpus": n, "p_fpops": 3e7})
        assert len(jobs["assignments"]) >= n, jobs["messages"]
        return jobs["assignments"]

    def put(self, job, body, start=0, total=None, sha256=None, key=None, **headers):
        """Upload a piece of an output."""
        name = job["output"]["name"] if isinstance(job, dict) else job
        total = start + len(body) if total is None else total
        given = {"Authorization": f"Bearer {key or self.key}",
                 "Content_Range": f"bytes {start}-{start + len(body) - 1}/{total}" if body else
                 "bytes */0"}
        if sha256 is not None:
            given["X_Sha256"] = sha256
        return self.web("PUT", f"/upload/{name}", body, **{**given, **headers})

    def report(self, *jobs, **more):
        told = dict(client_state=5, exit_status=0, elapsed_time=1.5)
        return self(reports=[{"name": job["name"], **told, **more} for job in jobs])


@pytest.fixture
def web(folder):
    """A project with one application and six workunits, and its web application."""
    with make.project(folder, {"echo": ECHO}, min_sendwork_interval=0):
        m.run_pass(NOW)
        web = Web()
        yield web
        assert not m.project.counts["server errors"]


@pytest.fixture
def anna(web):
    return Volunteer(web)


@pytest.fixture
def job(anna):
    return anna.fetch()[0]


def state():
    """Return all that a request could change: every row, every file."""
    tables = [name for (name,) in m.db.execute_sql(
        "SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {name: list(m.db.execute_sql(f'SELECT * FROM "{name}"')) for name in tables}
    files = {path: path.read_bytes() for folder in ("upload", "download")
             for path in (m.project.data / folder).glob("*/*")}
    return rows, files


def refused(got, status, before):
    """Hold that an answer is one plain sentence, and that nothing has changed."""
    assert got.status == status, got.body
    assert set(got.json) <= {"error", "nbytes"}
    sentence = got.json["error"]
    assert 5 < len(sentence) < 500 and "Traceback" not in sentence and "\n" not in sentence
    assert state() == before
    return sentence


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# ---- 2. Accounts ---------------------------------------------------------------


def test_a_nickname_is_enough(web):
    """[D-01]"""
    got = web.answer("/register", {"nickname": "  blue \t fox "})
    assert set(got) == {"authenticator", "userid", "name"}
    assert got["name"] == "blue fox" and len(got["authenticator"]) == 32
    again = web.answer("/register", {"nickname": "blue fox"})
    assert again["userid"] != got["userid"] and again["authenticator"] != got["authenticator"]
    assert web.answer("/register", {})["name"] == "anonymous"
    assert web.answer("/register", {"nickname": "x" * 200})["name"] == "x" * 60


def test_an_account_is_made_once_and_kept_by_its_password(web):
    asked = {"email_addr": "Anna@Example.org", "password": "secret", "nickname": "anna"}
    first = web.answer("/register", asked)
    again = web.answer("/register", {**asked, "nickname": "", "email_addr": "anna@example.org "})
    assert again == first
    before = state()
    assert "wrong" in refused(web.post("/register", {**asked, "password": "Secret"}), 403, before)
    refused(web.post("/register", {**asked, "password": ""}), 400, before)


def test_no_password_is_kept(web):
    web.answer("/register", {"email_addr": "a@example.org", "password": "open sesame"})
    web.answer("/register", {"email_addr": "b@example.org", "password": "open sesame"})
    one, two = (user.passwd_hash for user in m.User.select())
    assert one != two and "sesame" not in one + two
    assert hashlib.md5(b"open sesamea@example.org").hexdigest() not in one


ODD = [1, True, None, 1.5, [], {}, ["anna"], "a\0b", "\ud800", "x" * 201]
REGISTER = {
    **{f"{key}: {value!r:.20}": {"email_addr": "a@b", "password": "secret", key: value}
       for key in ("nickname", "email_addr", "password") for value in ODD},
    "no @": {"email_addr": "anna", "password": "secret"},
    "two @": {"email_addr": "a@b@c", "password": "secret"},
    "a blank in it": {"email_addr": "a b@c", "password": "secret"},
    "a short password": {"email_addr": "a@b", "password": "12345"},
    "a key nobody knows": {"nickname": "a", "admin": True},
    "the name of an argument": {"nickname": "a", "now": 1},
}


def test_register_refuses(web):
    before = state()
    for case in REGISTER:
        refused(web.post("/register", REGISTER[case]), 400, before)


# ---- 3. The whole conversation -------------------------------------------------


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


# ---- 4. Bad requests -----------------------------------------------------------

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
HOST_TEXTS = sorted(set(m.HOST_FIELDS) - set(HOST_NUMBERS))
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
    ('"reports": [{}]', "name"), ('"reports": [{"exit_status": 0}]', "name"),
    ('"other_results": [' + ", ".join(['"x"'] * 100_000) + "]", "other_results"),
    ('"reports": [' + ", ".join(['{"name": "x"}'] * 100_000) + "]", "reports"),
    ('"platforms": [' + ", ".join(['"x"'] * 100_000) + "]", "platforms"),
]


def test_the_tables_name_every_field():
    """A new field must be refused, too, where its type is wrong."""
    known = {*WHOLE, *REAL, *TEXTS, "allow_multiple_clients", "platforms", "other_results",
             "reports", "host"}
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


# ---- 5. Downloads --------------------------------------------------------------


@pytest.fixture
def file(job):
    """A file to download: (path, content)."""
    name = job["files"][0]["name"]
    return f"/download/{name}", m.file_path("download", name).read_bytes()


RANGES = {  # Range: (status, slice)
    "bytes=0-3": (206, slice(0, 4)), "bytes=5-": (206, slice(5, None)),
    "bytes=-4": (206, slice(-4, None)), "bytes=0-999999": (206, slice(0, None)),
    "bytes=999999-": (416, None), "bytes=9-3": (416, None), "bytes=-0": (416, None),
    "bytes=0-0": (206, slice(0, 1)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("header", RANGES)
def test_ranges(web, file, header):
    path, content = file
    status, part = RANGES[header]  # Bottle leaves the file of a wrong range to the collector.
    got = web("GET", path, Range=header)
    assert got.status == status
    if status == 206:
        assert got.body == content[part]
        start = content.index(content[part])
        assert got.headers["Content-Range"] == \
            f"bytes {start}-{start + len(got.body) - 1}/{len(content)}"


def test_a_file_comes_whole_and_may_be_kept_for_ever(web, file):
    path, content = file
    got = web("GET", path)
    assert (got.status, got.body) == (200, content)
    assert got.headers["Content-Length"] == str(len(content))
    assert "immutable" in got.headers["Cache-Control"]
    assert got.headers["Content-Type"] == "application/octet-stream"
    again = web("GET", path, If_None_Match=got.headers["Etag"])
    assert (again.status, again.body) == (304, b"")
    other = web("GET", path, If_None_Match='"something else"')
    assert (other.status, other.body) == (200, content)
    head = web("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(content))


def test_the_volunteers_client_is_served(web):
    got = web("GET", "/volunteer.py")
    assert got.body.startswith(b"#!") and b"minigrid" in got.body
    compile(got.body, "volunteer.py", "exec")


PATHS = [
    "..%2fminigrid.db", "%2e%2e%2fminigrid.db", "../minigrid.db", "..%5cminigrid.db",
    "%2fetc%2fpasswd", "/etc/passwd", "C:%5cboot.ini", "echo_0_in%00", "%00", "..", ".", "%20",
    "a%0a", "a%0d%0aX:%20y", ".hidden", "-rf", "a" * 201, "a" * 5000, "%c3%a9", "%ff",
    "echo_0_in/", "echo_0_in%2f", "a?b=c", "minigrid.db", "server.lock", "no_such_file", "*",
    "~root", "$HOME", "a;b", "a:b",
]


def test_names_that_are_paths_find_nothing(web, anna, job):
    before = state()
    for name in PATHS:
        for method, folder in (("GET", "download"), ("HEAD", "download"), ("PUT", "upload")):
            got = web(method, f"/{folder}/{name}", b"x", Authorization=f"Bearer {anna.key}")
            assert got.status in (400, 404, 405), (name, got.status)
            assert b"SQLite" not in got.body
        got = web("GET", f"/upload/{name}")
        assert got.status in (400, 404) or got.json == {"nbytes": 0, "complete": False}, name
        assert state() == before, name


# ---- 6. Uploads ----------------------------------------------------------------


def test_uploads_that_are_not_ones_own_or_not_wanted(web, anna):
    mine, reported, cancelled, failed = anna.fetch(4)
    berta = Volunteer(web, "berta")
    (hers,) = berta.fetch()
    anna.report(reported)
    anna.report(failed, client_state=3, exit_status=195)
    m.project.write(lambda: m.plugged("cancel_workunits")[0](
        [m.Workunit.get(name=cancelled["workunit"]).id], NOW))
    unsent = m.Result.get(server_state=m.ServerState.UNSENT)
    before = state()
    for name, status in {
            hers["output"]["name"]: 403, reported["output"]["name"]: 403,
            failed["output"]["name"]: 403, cancelled["output"]["name"]: 403,
            f"{unsent.name}_out": 403, "echo_99_0_out": 404, mine["name"]: 404, "_out": 404,
            "out": 404, mine["input"]["name"]: 404, f"{mine['name']}_out_out": 404,
            f"{mine['name']}_out.part": 404}.items():
        refused(anna.put(name, b"x"), status, before)
    refused(anna.put(mine, b"x", Authorization="Bearer \xff"), 400, before)
    for key in ("nobody", "", berta.key, anna.key.upper(), "Bearer " + anna.key, "\0"):
        refused(anna.put(mine, b"x", Authorization=f"Bearer {key}"), 403, before)
    for header in ("", anna.key[:-1], "Basic " + anna.key, "Bearer é".encode().decode("latin-1")):
        refused(anna.put(mine, b"x", Authorization=header), 403, before)
    assert anna.put(mine, b"x").status == 200


def test_an_output_given_up_may_still_come(web, anna, job):
    """[C11] It counts while it can be compared."""
    web.now = job["report_deadline"] + 1
    m.run_pass(web.now)
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.NO_REPLY
    assert anna.put(job, b"1").json["complete"]
    assert anna.report(job)["acks"] == [job["name"]]
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.SUCCESS


def test_an_output_may_be_as_large_as_the_assignment_says(web, anna, job):
    limit = job["output"]["nbytes_max"]
    assert limit == 1000
    before = state()
    assert "at most 1000" in refused(anna.put(job, b"x" * 1001), 413, before)
    refused(anna.put(job, b"x", total=10**14), 413, before)
    assert anna.put(job, b"x" * 1000).json == {"nbytes": 1000, "complete": True}


def test_a_piece_in_the_wrong_place(web, anna, job):
    """[WIRE 9] The answer says where to go on."""
    before = state()
    got = anna.put(job, b"cd", start=2, total=4)
    refused(got, 409, before)
    assert got.json["nbytes"] == 0
    assert anna.put(job, b"abc", total=6).json == {"nbytes": 3, "complete": False}
    before = state()
    got = anna.put(job, b"f", start=5, total=6)
    refused(got, 409, before)
    assert got.json["nbytes"] == 3
    assert anna.put(job, b"BCDEF", start=1, total=6).json == {"nbytes": 6, "complete": True}
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b"aBCDEF"


def test_starting_again_from_the_beginning(web, anna, job):
    """A client that has lost its place, or computed something else meanwhile."""
    anna.put(job, b"x" * 90, total=100)
    assert anna.put(job, b"abc", total=6).json == {"nbytes": 3, "complete": False}
    assert anna.put(job, b"def", start=3, total=6, sha256=sha256(b"abcdef")).json["complete"]
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b"abcdef"


@pytest.mark.parametrize("wrong", ["0" * 64, "nonsense", sha256(b"1").upper()[:-1],
                                   "é".encode().decode("latin-1")])
def test_a_sum_that_is_wrong(web, anna, job, wrong):
    """The damaged file is forgotten, else no repetition would ever help."""
    before = state()
    got = anna.put(job, b"1", sha256=wrong)
    assert "damaged" in refused(got, 409, before) and got.json["nbytes"] == 0
    assert anna.put(job, b"1", sha256=sha256(b"1").upper()).json["complete"]


RANGE_NONSENSE = [
    "", "bytes", "bytes 0-0", "bytes 0-0/0", "bytes 0-0/*", "bytes */1", "bytes 1-0/2",
    "bytes 0-1/1", "bytes 0-2/3", "bytes -1-0/1", "bytes 0-0/1 ", "0-0/1", "bytes=0-0/1",
    "items 0-0/1", "bytes 0x0-0x0/1", "bytes ٠-٠/١".encode().decode("latin-1"), "bytes 0-0/1\xff",
    "bytes 0-0/" + "9" * 400, "bytes " + "9" * 400 + "-0/1", "bytes 0-0/1\0"]


def test_a_range_that_is_none(web, anna, job):
    before = state()
    for header in RANGE_NONSENSE:
        refused(anna.put(job, b"x", Content_Range=header), 400, before)


def test_without_a_range_the_body_is_the_file(web, anna, job):
    name = job["output"]["name"]
    got = web("PUT", f"/upload/{name}", b"whole", Authorization=f"Bearer {anna.key}")
    assert got.json == {"nbytes": 5, "complete": True}
    assert m.file_path("upload", name).read_bytes() == b"whole"


def test_a_body_that_ends_early_is_half_an_upload(web, anna, job):
    got = anna.put(job, b"abc", content_length="6", Content_Range="bytes 0-5/6")
    assert got.json == {"nbytes": 3, "complete": False}
    assert not m.file_path("upload", job["output"]["name"]).exists()
    assert anna.put(job, b"def", start=3).json == {"nbytes": 6, "complete": True}


def test_a_body_that_goes_on_is_cut(web, anna, job):
    got = anna.put(job, b"abcdef", content_length="3", Content_Range="bytes 0-2/3")
    assert got.json == {"nbytes": 3, "complete": True}
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b"abc"


def test_a_length_that_is_not_the_ranges(web, anna, job):
    before = state()
    refused(anna.put(job, b"abc", Content_Range="bytes 0-5/6"), 400, before)
    refused(anna.put(job, b"abc", Content_Range="bytes 0-0/1"), 400, before)


def test_an_empty_output(web, anna, job):
    assert anna.put(job, b"", sha256=sha256(b"")).json == {"nbytes": 0, "complete": True}
    assert web("GET", f"/upload/{job['output']['name']}").json == {"nbytes": 0, "complete": True}
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b""


def test_a_second_time_after_a_lost_answer(web, anna, job):
    anna.put(job, b"abc")
    before = state()
    assert anna.put(job, b"abc").json == {"nbytes": 3, "complete": True}
    assert anna.put(job, b"c", start=2, total=3).json == {"nbytes": 3, "complete": True}
    assert state() == before


def test_twice_at_once(web, anna, job):
    """One of them is refused and told to wait; the other one's file is whole."""
    class Slow(io.BytesIO):
        started, go_on = threading.Event(), threading.Event()

        def read(self, *size):
            self.started.set()
            assert self.go_on.wait(PATIENCE)
            return super().read(*size)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        name = job["output"]["name"]
        first = pool.submit(
            web, "PUT", f"/upload/{name}", Slow(b"first"), Authorization=f"Bearer {anna.key}",
            content_length="5")
        assert Slow.started.wait(PATIENCE)
        second = anna.put(job, b"second")
        Slow.go_on.set()
        assert first.result(PATIENCE).json == {"nbytes": 5, "complete": True}
        pool.submit(m.db.close).result(PATIENCE)
    assert second.status == 409 and "already" in second.json["error"]
    assert m.file_path("upload", name).read_bytes() == b"first"
    assert anna.put(job, b"again!").status == 200, "the next one may"


def test_a_place_where_nothing_can_be_stored(web, anna, job):
    """Their work is not lost: 507 says that it is the server's trouble."""
    path = m.file_path("upload", job["output"]["name"])
    path.with_name(path.name + ".part").mkdir()
    got = anna.put(job, b"abc")
    assert got.status == 507 and "cannot store" in got.json["error"]
    path.with_name(path.name + ".part").rmdir()
    assert anna.put(job, b"abc").json["complete"]


def test_a_store_that_takes_no_change_acknowledges_what_it_has(web, anna):
    """[DESIGN 5] No new work, and nobody is told to forget what is not recorded."""
    old, new = anna.fetch(2)
    anna.put(old, b"1")
    anna.report(old)
    m.db.execute_sql("PRAGMA query_only = ON")
    before = state()
    try:
        reply = anna(reports=[{"name": old["name"], "client_state": 5},
                              {"name": new["name"], "client_state": 5}], work_req_seconds=10)
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


# ---- 7. Anything at all --------------------------------------------------------

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
    "other_results": st.lists(st.sampled_from(["echo_0_0", "x"])) | VALUES})
ACCOUNTS = st.dictionaries(st.sampled_from(["nickname", "email_addr", "password"]), VALUES)
ANYTHING = settings(max_examples=150, deadline=None, database=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def sound(got):
    """Hold that an answer is JSON, below 500."""
    assert got.status < 500, got.body
    assert got.headers["Content-Type"].startswith("application/json")
    assert isinstance(got.json, dict) and (got.status == 200) == ("error" not in got.json)


@ANYTHING
@given(value=REQUESTS | VALUES)
def test_any_json_to_the_scheduler(web, anna, value):
    body = json.dumps(value).replace('"KEY"', json.dumps(anna.key)).encode()
    sound(web.post("/scheduler", body))


@ANYTHING
@given(value=ACCOUNTS | VALUES)
def test_any_json_to_register(web, value):
    sound(web.post("/register", value))


@ANYTHING
@given(body=st.binary() | st.text().map(str.encode), path=st.sampled_from(
    ["/scheduler", "/register"]), kind=st.text(string.printable, max_size=20))
def test_any_bytes(web, body, path, kind):
    sound(web.post(path, body, content_type=kind))


@ANYTHING
@given(body=st.binary(max_size=50),
       name=st.sampled_from(["echo_0_0_out", "echo_1_0_out"]) | st.text(),
       header=st.none() | st.text(st.characters(max_codepoint=255)) | st.tuples(
           *[st.integers(-1, 60)] * 3).map(lambda t: "bytes %d-%d/%d" % t),
       checksum=st.none() | st.text(st.characters(max_codepoint=255)))
def test_any_upload(web, anna, body, name, header, checksum):
    if not m.Result.select().where(m.Result.server_state == 4).exists():
        anna.fetch(2)
    path = "/upload/" + "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    headers = {"Authorization": f"Bearer {anna.key}"}
    headers.update({} if header is None else {"Content_Range": header})
    headers.update({} if checksum is None else {"X_Sha256": checksum})
    got = web("PUT", path, body, **headers)
    sound(got)
    there = sum(path.stat().st_size for path in (m.project.data / "upload").glob("*/*"))
    assert there <= 2 * 1000, "no upload is larger than allowed"


def test_a_storm_of_everything_leaves_a_sound_store(web):
    """Good requests between bad ones, as seeded volunteers mix them; then all is done."""
    rng = random.Random(7)
    volunteers = [Volunteer(web, name) for name in "abc"]
    held = {v: [] for v in volunteers}
    for step in range(150):
        v = rng.choice(volunteers)
        web.now = NOW + step
        text, _ = rng.choice(WRONG[:-3])
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
