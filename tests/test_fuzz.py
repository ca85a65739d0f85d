"""Anything at all, to every address, through the real sockets: nothing breaks, nobody is robbed.

Good requests of Anna, who takes part, are spoilt in all places, from the first line to the last
byte of the body, and sent to a server in this process. Whatever comes, an answer comes back, and
none says that the server is to blame; who is refused has changed nothing; what Berta holds and has
sent stays hers. At the end the store is sound and all work can still be done.

The server's clock stands still, so that only requests can change its store. MINIGRID_FUZZ=N sends N
spoilt requests (300), MINIGRID_SEED says which. What was once found stands in FOUND.
"""

import contextlib
import hashlib
import http.client
import io
import json
import logging
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import make
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import minigrid as m

NOW = 1_800_000_000
PATIENCE = 60  # seconds until an answer that does not come is a failure
EXAMPLES = int(os.environ.get("MINIGRID_FUZZ", "300"))
SEED = int(os.environ.get("MINIGRID_SEED", "1"))
CAPTURES = Path(__file__).parent / "plugins" / "boinc" / "captures"
DECLARED = (501, 503, 507)  # no such method or coding, come again, the disk is full
APP = '''"""echo: gives back what it got."""


def workunit(i):
    return {"input": i, "files": {"more": b"0123456789"}} if i < 40 else None


def compute(input):
    return input
'''

# Bottle leaves a file to the collector where a range is out of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# ---- The world -----------------------------------------------------------------


class Complaints(logging.Handler):
    """Keeps what the server logs with a traceback: a fault, whatever was answered."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        if record.exc_info:
            self.texts.append(self.format(record))


@pytest.fixture(scope="module")
def world(tmp_path_factory, plugins):
    """A server with two volunteers, each with results sent, uploaded in part and in full."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "echo.py").write_text(APP)
    (folder / "setup.cfg").write_text("[accounts]\njoins_per_hour = 0\n")
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = m.Settings(data="data", host="127.0.0.1", port=0, stock=1000, request_delay=0,
                             min_sendwork_interval=0, max_wus_in_progress=1000)
        with m.running(options, ["echo.py"], lambda: NOW) as url:
            wait_for_first_pass()
            host, port = re.search(r"//([\d.]+):(\d+)", url).groups()
            world = SimpleNamespace(address=(host, int(port)), complaints=complaints)
            world.anna, world.berta = (join(world, name) for name in ("anna", "berta"))
            world.templates = templates(world)
            world.hers = belongings(world.berta)
            yield world
    logging.getLogger().removeHandler(complaints)


def wait_for_first_pass():
    for _ in range(100 * PATIENCE):
        if m.project.counts["passes"] > 2:
            return
        threading.Event().wait(0.01)
    raise AssertionError("no pass")


def request(world, method, path, body=None, **headers):
    """Send a good request; return its JSON or text."""
    connection = http.client.HTTPConnection(*world.address, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
    assert answer.status == 200, (method, path, text)
    return json.loads(text) if "json" in answer.getheader("Content-Type", "") else text


def join(world, name):
    """Make a volunteer who holds six results: one sent, one begun, one uploaded, one reported."""
    key = request(world, "POST", "/register", json.dumps({"nickname": name}))["authenticator"]
    asked = {"authenticator": key, "host_cpid": name, "host": {"p_ncpus": 6, "p_fpops": 3e7},
             "work_req_seconds": 1, "cpu_req_instances": 6}
    reply = request(world, "POST", "/scheduler", json.dumps(asked))
    who = SimpleNamespace(name=name, key=key, hostid=reply["hostid"], userid=reply["userid"],
                          jobs=[job["name"] for job in reply["assignments"]],
                          files=[file["url"] for job in reply["assignments"]
                                 for file in (job["input"], *job["inputs"], *job["files"])],
                          input=reply["assignments"][0]["input"]["url"])
    assert len(who.jobs) == 6
    for job, nbytes in zip(who.jobs[1:4], (3, 9, 9)):
        request(world, "PUT", f"/upload/{job}_out", b"[1, 2, 3]"[:nbytes],
                Authorization=f"Bearer {key}", Content_Range=f"bytes 0-{nbytes - 1}/9")
    request(world, "POST", "/scheduler", json.dumps({
        **asked, "work_req_seconds": 0, "hostid": who.hostid, "rpc_seqno": 1,
        "other_results": who.jobs[:3] + who.jobs[4:], "reports": [dict(
            name=who.jobs[3], client_state=5, exit_status=0, elapsed_time=1)]}))
    return who


def belongings(who):
    """Return all that is somebody's: rows, and the bytes that were sent."""
    rows = [m.db.execute_sql(f"SELECT * FROM {table} WHERE {column} = ? ORDER BY 1",
                             (who.userid,)).fetchall()
            for table, column in (("user", "id"), ("host", "user_id"), ("result", "user_id"))]
    files = {path: path.read_bytes() for name in who.jobs for path in sorted(
        m.file_path("upload", f"{name}_out").parent.glob(f"{name}_out*"))}
    return rows, files


# ---- Good requests -------------------------------------------------------------


def templates(world):
    """Return good requests of Anna: (method, path, {header: value}, body), as bytes."""
    anna, found = world.anna, []

    def add(method, path, body=b"", **headers):
        found.append((method.encode(), path.encode(), {
            k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}, body))

    for route in m.make_app(lambda: NOW).routes:
        rule = route.rule.replace("<name:path>", "<name>")
        for name in {"echo.jsonl", f"{anna.jobs[1]}_out", "echo_0", "user.gz"} \
                if "<name>" in rule else {""}:
            add(route.method, rule.replace("<name>", name), b"a=b" * (route.method == "POST"))
    for file in anna.files:
        add("GET", file, Range="bytes=2-5", If_None_Match='"a"', Cookie="a=b; session=1")
    for page in ("show_user.php?userid=1", "show_host_detail.php?hostid=1", "workunit.php?wuid=1",
                 "results.php?hostid=1&offset=0&show_names=1", "result.php?resultid=3",
                 "top_hosts.php?sort_by=total_credit&offset=20", "why?host=1", "trust?host=1",
                 "show_user.php?userid=1&format=xml", "join?user_name=a&email_addr=b@c"):
        add("GET", f"/{page}", Cookie="a=b", Referer="/", X_Forwarded_For="::1")
    add_json(add, anna)
    add_uploads(add, anna)
    add_accounts(add)
    for path in sorted(CAPTURES.glob("*.request.xml")):
        body = path.read_bytes()
        for name, value in (("authenticator", anna.key), ("hostid", str(anna.hostid)),
                            ("rpc_seqno", "5")):
            body = re.sub(f"<{name}>[^<]*<".encode(), f"<{name}>{value}<".encode(), body)
        names = iter(anna.jobs * 50)
        body = re.sub(rb"<(name|result_name)>[^<]*_[0-9]<", lambda match: b"<%s>%s<" % (
            match[1], next(names).encode()), body)
        add("POST", "/boinc/scheduler", body, Content_Type="application/x-www-form-urlencoded")
    return found


def add_json(add, anna):
    """Add requests of our own volunteer."""
    add("POST", "/register", json.dumps({"nickname": "x", "email_addr": "x@y.z",
                                         "password": "secret", "invitation": "1"}).encode())
    asked = {"authenticator": anna.key, "hostid": anna.hostid, "rpc_seqno": 9, "host_cpid": "anna",
             "allow_multiple_clients": True, "platforms": ["python", "x86_64-pc-linux-gnu"],
             "host": {"p_ncpus": 6, "p_fpops": 3e7, "os_name": "Linux", "p_features": "sse avx"},
             "work_req_seconds": 1, "cpu_req_instances": 2, "estimated_delay": 5,
             "other_results": anna.jobs, "client_version": "minigrid 1", "signing_key": "",
             "trickles": [{"result": anna.jobs[0], "time": 5, "text": "half"}],
             "reports": [{"name": anna.jobs[2], "client_state": 5, "exit_status": 0,
                          "elapsed_time": 2.5, "cpu_time": 1, "stderr_out": ""},
                         {"name": anna.jobs[4], "client_state": 3, "exit_status": 195,
                          "stderr_out": "no"}]}
    add("POST", "/scheduler", json.dumps(asked).encode(), Content_Type="application/json")


def add_uploads(add, anna):
    """Add uploads of both protocols: of what is to come, is there, and is over."""
    for job in anna.jobs:
        content = b"[1, 2, 3, 4]"
        add("PUT", f"/upload/{job}_out", content, Authorization=f"Bearer {anna.key}",
            Content_Range=f"bytes 0-{len(content) - 1}/{len(content)}",
            X_Sha256=hashlib.sha256(content).hexdigest())
        limit = m.plugged("upload_limit")[-1](m.Result.get(name=job))
        keys = m.plugged("open_boinc_keys")[-1](m.project.data / "keys")
        head = (f"<data_server_request>\n<file_upload>\n<file_info>\n<name>{job}_out</name>\n"
                f"<xml_signature>\n{keys.certificate(job + '_out', limit)}\n</xml_signature>\n"
                f"<max_nbytes>{limit}</max_nbytes>\n</file_info>\n<nbytes>{len(content)}</nbytes>\n"
                f"<md5_cksum>{hashlib.md5(content).hexdigest()}</md5_cksum>\n<offset>0</offset>\n"
                f"<data>\n")
        for path in ("", f"{job}_out/"):
            add("POST", f"/boinc/upload/{path}file_upload_handler", head.encode() + content,
                Expect="" if path else "100-continue")
        add("POST", "/boinc/upload/file_upload_handler", (
            f"<data_server_request>\n<get_file_size>{job}_out</get_file_size>\n"
            f"</data_server_request>\n").encode())


def add_accounts(add):
    """Add forms and queries."""
    proof = hashlib.md5(b"secret" + b"a@b.c").hexdigest()
    form = f"email_addr=a%40b.c&passwd_hash={proof}&user_name=A%20B&invite_code=1"
    for name in ("create_account.php", "lookup_account.php"):
        add("GET", f"/{name}?{form}")
        add("POST", f"/{name}", form.encode(), Content_Type="application/x-www-form-urlencoded")
    add("POST", "/join", b"email_addr=a%40b.c&password=secret&user_name=A", Origin="http://evil")


# ---- Spoiling ------------------------------------------------------------------

TOKENS = [
    b"\0", b"%00", b"../", b"%2e%2e%2f", b"..%5c", b"/etc/passwd", b"\xff\xfe", b"\xed\xa0\x80",
    b"\xe2\x80\xae", b"%ff%fe", b"%ed%a0%80", b"%", b"%zz", b"-1", b"9" * 20, b"9" * 400, b"1e400",
    b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'{"a":1}', b'"', b"'", b"\\", b"\\ud800",
    b"<", b">", b"</", b"<!--", b"<![CDATA[", b"]]>", b"&#0;", b"&#x110000;", b"&lt;", b"&", b"=",
    b"<result>", b"</result>", b"<name>", b"</scheduler_request>", b"<stderr_out>", b"</data>",
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b"a" * 300, b"/" * 300, b"a" * 70_000,
    b"gzip", b"chunked", b"bytes=-1", b"bytes=5-2,0-", b"bytes */0", b"W/", b"*", b"Bearer ", b";",
    b"%s%n", b"${x}", b"SELECT", b"0x10", b"1_000", b"\xc2\xa0", b"\xd9\xa3", b"echo_0_0",
    b"echo_1", b"GET / HTTP/1.1\r\n\r\n"]
HEADERS = [
    b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"Accept-Encoding", b"Host",
    b"Content-Range", b"Range", b"Authorization", b"Cookie", b"Expect", b"If-None-Match",
    b"If-Modified-Since", b"X-Sha256", b"Content-Type", b"Connection", b"X-Forwarded-Host",
    b"X-Forwarded-For", b"Upgrade", b"Accept-Language"]
METHODS = b"GET POST PUT HEAD OPTIONS DELETE PATCH CONNECT get".split() + [b""]
tokens = st.sampled_from(TOKENS) | st.binary(max_size=8)


@st.composite
def spoilt(draw, data):
    """Return bytes with slices deleted, doubled, swapped, flipped, or put in."""
    for _ in range(draw(st.integers(1, 3))):
        a, b, c = sorted(draw(st.integers(0, len(data))) for _ in range(3))
        what = draw(st.sampled_from("insert insert replace delete double swap cut flip".split()))
        data = {
            "insert": lambda: data[:a] + draw(tokens) + data[a:],
            "replace": lambda: data[:a] + draw(tokens) + data[min(b, a + 12):],
            "delete": lambda: data[:a] + data[b:], "double": lambda: data[:b] + data[a:],
            "swap": lambda: data[:a] + data[b:c] + data[a:b] + data[c:], "cut": lambda: data[:c],
            "flip": lambda: data[:a] + bytes(byte ^ 1 << draw(st.integers(0, 7))
                                             for byte in data[a:a + 1]) + data[a + 1:],
        }[what]()[:200_000]
    return data


@st.composite
def requests(draw, templates):
    """Return the bytes of a request, spoilt in one to three of its parts."""
    method, path, headers, body = draw(st.sampled_from(templates))
    headers, whole = dict(headers), None
    for what in draw(st.lists(st.sampled_from(
            "path path header name method body body body field whole".split()),
            min_size=1, max_size=3)):
        if what == "path":
            path = draw(spoilt(path))
        elif what == "header":
            headers[draw(st.sampled_from(HEADERS))] = draw(tokens)
        elif what == "name" and headers:
            name = draw(st.sampled_from(sorted(headers)))
            headers[name] = draw(spoilt(headers[name]))
        elif what == "method":
            method = draw(st.sampled_from(METHODS))
        elif what == "body":
            body = draw(spoilt(body))
        elif what == "field":
            body = spoil_field(draw, body)
        else:
            whole = draw(st.integers(0, 2**32))
    lines = [method + b" " + path + b" HTTP/1.1"]
    if b"Content-Length" not in headers and (body or method == b"POST"):
        lines.append(b"Content-Length: %d" % len(body))
    lines += [name + b": " + value for name, value in headers.items()]
    raw = b"\r\n".join([*lines, b"", b""]) + body
    return raw if whole is None else draw(spoilt(raw))


def spoil_field(draw, body):
    """Put another value into one field of JSON, XML or a form, and leave its form as it is."""
    fields = list(re.finditer(rb'(?<=": )("[^"]*"|[\d.]+)|(?<=>)[^<>]+(?=</)|(?<==)[^&]*', body))
    if not fields:
        return body
    field = draw(st.sampled_from(fields))
    value = draw(tokens | st.integers().map(lambda n: b"%d" % n) | st.floats().map(
        lambda x: repr(x).encode()) | st.text().map(lambda text: json.dumps(text).encode()))
    return body[:field.start()] + value + body[field.end():]


# ---- Sending and judging -------------------------------------------------------


class Said:
    """What came back, for http.client: a socket that holds nothing else."""

    def __init__(self, data):
        self.stream = io.BytesIO(data)
        self.stream.close, self.length = lambda: None, len(data)

    def makefile(self, mode):
        return self.stream


def send(world, raw):
    """Send bytes and hang up; return the statuses of all answers, and what came in all."""
    with contextlib.closing(socket.create_connection(world.address, PATIENCE)) as s:
        with contextlib.suppress(OSError):  # It may be closed already.
            s.sendall(raw)
            s.shutdown(socket.SHUT_WR)
        said = []
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(1 << 16):
                said.append(piece)
    said, statuses = Said(b"".join(said).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")), []
    method = raw.lstrip().split(b" ")[0].decode("latin-1")
    while said.stream.tell() < said.length:
        answer = http.client.HTTPResponse(said, method=method)
        with contextlib.suppress(http.client.IncompleteRead):  # It hung up, or we did.
            answer.begin()
            answer.read()
        statuses.append(answer.status)
        if answer.will_close:
            break  # waitress sends a body also where HEAD asked for none.
        method = ""  # Whatever follows was in the middle of it.
    return statuses


def changes(write=True):
    """Return how many rows the server's writer has changed."""
    return m.project.write(lambda: m.db.connection().total_changes)


def check(world, raw):
    """Send a request and hold what must hold for any."""
    rows, before = changes(), make.dump()
    world.complaints.texts.clear()
    statuses = send(world, raw)
    assert all(status < 500 or status in DECLARED for status in statuses), statuses
    assert not world.complaints.texts, world.complaints.texts[0]
    assert m.project.counts["stage errors"] == 0
    if statuses and all(status >= 400 for status in statuses) and changes() != rows:
        assert make.dump() == before, "refused, and done"
    assert belongings(world.berta) == world.hers
    return statuses


FOUND = [  # what has broken something once, or might
    b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"\0" * 100, b"GET /\r\n\r\n",
    b"POST * HTTP/1.1\r\n\r\n",
    b"GET /why/" + b"%2e%2e%2f" * 20 + b" HTTP/1.1\r\n\r\n",
    b"GET /download/%00 HTTP/1.1\r\n\r\n", b"GET /upload/%ff HTTP/1.1\r\n\r\n",
    b"GET /results/..%2f..%2fminigrid.db HTTP/1.1\r\n\r\n",
    b"GET /get_passwd.php HTTP/1.1\r\nHost: []\r\n\r\n",
    b"GET /account_finish.php HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\n\r\n", b"GET //evil/x HTTP/1.1\r\nHost: [\r\n\r\n",
]


@pytest.mark.parametrize("raw", FOUND)
def test_found(world, raw):
    check(world, raw)


def test_good_requests_are_answered(world):
    """Else the fuzzer would spoil what is spoilt already."""
    ways = {}
    for method, path, headers, body in world.templates:
        raw = b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Content-Length: %d" % len(body),
                            *(k + b": " + v for k, v in headers.items()), b"", b""]) + body
        (status,) = check(world, raw)[-1:]
        ways.setdefault(status, []).append(path)
    assert len(ways[200]) > 60, ways
    assert set(ways) <= {200, 206, 301, 302, 303, 304, 400, 403, 404, 409, 416}, ways


# ---- Names that are paths, and what is somebody else's -------------------------

NAMES = ["..", ".", "%2e%2e", "..%2fminigrid.db", "%2e%2e%2f%2e%2e%2fsetup.cfg", "echo_0_in%00",
         "..%5c..%5csetup.cfg", "%00", "a" * 300, "a" * 5000, "%e2%80%ae", "%ff", "%ed%a0%80",
         "%c0%ae%c0%ae/",
         "/etc/passwd", "%2fetc%2fpasswd", "~root", "CON", "a:b", "-rf", "*", "echo_0_in.part",
         "echo_0_in.new", ".hidden", "echo_0_0_out%2f", "echo_0_0_out%20", "echo_0_0_out.part"]


def test_no_name_leads_anywhere(world):
    """Whatever stands where an address has a name: nothing is found, made, or given away."""
    rules = {(route.method, route.rule) for route in m.make_app(lambda: NOW).routes
             if "<name" in route.rule}
    assert len(rules) >= 6
    before = changes(), files()
    for method, rule in rules:
        for name in NAMES:
            path = rule.replace("<name:path>", "<name>").replace("<name>", name)
            raw = f"{method} {path} HTTP/1.1\r\nContent-Length: 1\r\n\r\n0".encode()
            (status,) = check(world, raw)
            xml = "file_upload_handler" in rule  # whose errors are in its text
            empty = (method, rule) == ("GET", "/upload/<name>")  # "nothing is here yet"
            assert 400 <= status < 500 or xml or (status == 200 and empty), (path, status)
            assert changes() == before[0], path
    assert files() == before[1]


def files():
    return sorted(path for folder in ("upload", "download", "results")
                  for path in (m.project.data / folder).glob("**/*") if path.is_file())


def test_nobody_reports_uploads_or_drops_for_another(world):
    """By our protocol: with one's own key, or no key, and every name and number of hers."""
    anna, berta = world.anna, world.berta
    told = [dict(name=job, client_state=5, exit_status=0, elapsed_time=1) for job in berta.jobs]
    for hostid in (anna.hostid, berta.hostid, 0):
        asked = {"authenticator": anna.key, "hostid": hostid, "rpc_seqno": 50,
                 "host_cpid": "berta", "reports": told, "other_results": berta.jobs,
                 "trickles": [{"result": berta.jobs[0], "time": 1, "text": "x"}]}
        reply = request(world, "POST", "/scheduler", json.dumps(asked))
        assert reply["hostid"] != berta.hostid and reply["userid"] == anna.userid
        assert not {given["name"] for given in reply["assignments"]} & set(berta.jobs)
        assert set(reply["aborts"]) >= set(berta.jobs)
        assert belongings(berta) == world.hers
    for key in (anna.key, "", f"{berta.userid}_{'0' * 32}", str(berta.userid)):
        for job in berta.jobs:
            raw = f"PUT /upload/{job}_out HTTP/1.1\r\nAuthorization: Bearer {key}\r\n" \
                  f"Content-Length: 2\r\n\r\n42"
            assert check(world, raw.encode()) == [403]


FORGED = {  # what is wrong with an upload: what is changed in it
    "another's file": dict(name=lambda a, b: b), "no certificate": dict(signature=lambda a, b: ""),
    "another's certificate": dict(signature=lambda a, b: certificate(b)),
    "a larger file": dict(max_nbytes=lambda a, b: 10**9),
    "a smaller file": dict(max_nbytes=lambda a, b: 1),
    "one more digit": dict(signature=lambda a, b: certificate(a).replace("\n", "0\n")),
    "two certificates": dict(signature=lambda a, b: f"{certificate(b)}\n{certificate(a)}"),
    "two names": dict(name=lambda a, b: f"{b}</name>\n<name>{a}"),
}


def certificate(name):
    keys = m.plugged("open_boinc_keys")[-1](m.project.data / "keys")
    return keys.certificate(name, m.plugged("upload_limit")[-1](m.Result.get(name=name[:-4])))


@pytest.mark.parametrize("case", FORGED)
def test_no_upload_without_its_own_certificate(world, case):
    """By BOINC's protocol [WIRE 10.4]; nothing of it is kept."""
    mine, hers = f"{world.anna.jobs[0]}_out", f"{world.berta.jobs[0]}_out"
    given = dict(name=mine, signature=certificate(mine),
                 max_nbytes=m.plugged("upload_limit")[-1](m.Result.get(name=mine[:-4])))
    given.update({key: make(mine, hers) for key, make in FORGED[case].items()})
    body = (f"<data_server_request>\n<file_upload>\n<file_info>\n<name>{given['name']}</name>\n"
            f"<xml_signature>\n{given['signature']}\n</xml_signature>\n"
            f"<max_nbytes>{given['max_nbytes']}</max_nbytes>\n</file_info>\n<nbytes>3</nbytes>\n"
            f"<md5_cksum>{hashlib.md5(b'bad').hexdigest()}</md5_cksum>\n<offset>0</offset>\n"
            f"<data>\nbad")
    before = files()
    said = request(world, "POST", "/boinc/upload/file_upload_handler", body.encode())
    assert b"<status>-1</status>" in said
    assert files() == before and belongings(world.berta) == world.hers


def test_what_was_sent_is_not_taken_twice(world):
    """An output after its report, the same or another; a report; a request as it was."""
    anna = world.anna
    reported, held = anna.jobs[3], anna.jobs[2]
    kept = make.kept("upload", f"{reported}_out")
    for content in (kept, b"[9, 9, 9]"):
        raw = f"PUT /upload/{reported}_out HTTP/1.1\r\nAuthorization: Bearer {anna.key}\r\n" \
              f"Content-Length: {len(content)}\r\n\r\n".encode() + content
        assert check(world, raw) == [403] and make.kept("upload", f"{reported}_out") == kept
    asked = json.dumps({"authenticator": anna.key, "hostid": anna.hostid, "rpc_seqno": 1,
                        "host_cpid": "anna", "other_results": [held], "reports": [
                            dict(name=reported, client_state=3, exit_status=1)]})
    row = m.Result.get(name=reported).__data__
    for _ in range(3):
        assert request(world, "POST", "/scheduler", asked)["acks"] == [reported]
        assert m.Result.get(name=reported).__data__ == row


# ---- Anything ------------------------------------------------------------------


def test_anything(world):
    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[
        Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    @given(raw=requests(world.templates))
    def storm(raw):
        for status in check(world, raw):
            seen[status] = seen.get(status, 0) + 1

    seen = {}
    storm()
    print(f"{EXAMPLES} requests, answers: {dict(sorted(seen.items()))}")
    assert seen[200] and seen[400] and seen[404]


def test_afterwards_all_is_well(world):
    """The store is sound, and Berta goes on with her work."""
    assert m.plugged("violations")[0]() == []
    for job in world.berta.jobs[:2]:
        content = json.dumps(int(job.split("_")[1])).encode()
        got = request(world, "PUT", f"/upload/{job}_out", content,
                      Authorization=f"Bearer {world.berta.key}")
        assert got["complete"]
    reply = request(world, "POST", "/scheduler", json.dumps({
        "authenticator": world.berta.key, "hostid": world.berta.hostid, "rpc_seqno": 2,
        "reports": [dict(name=job, client_state=5, exit_status=0, elapsed_time=1)
                    for job in world.berta.jobs[:3]]}))
    assert reply["acks"] == world.berta.jobs[:3]
