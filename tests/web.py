"""A client of the web application without sockets: its requests go through WSGI."""

import contextlib
import hashlib
import io
import json
import sys
from types import SimpleNamespace
from urllib.parse import unquote_to_bytes

import make
from hypothesis import HealthCheck, settings

import minigrid as m

NOW = 1_800_000_000
PATIENCE = 60  # seconds until something that does not end is a failure
ANYTHING = settings(max_examples=150, deadline=None, database=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
VERSION = """<data_server_request>
    <core_client_major_version>7</core_client_major_version>
    <core_client_minor_version>20</core_client_minor_version>
    <core_client_release>5</core_client_release>
"""
HEADER = VERSION + """<file_upload>
<file_info>
<name>{name}</name>
<xml_signature>
{signature}</xml_signature>
<max_nbytes>{max_nbytes}</max_nbytes>
</file_info>
<nbytes>{nbytes}</nbytes>
<md5_cksum>{md5}</md5_cksum>
<offset>{offset}</offset>
<data>
"""
QUERY = VERSION + "    <get_file_size>{}</get_file_size>\n</data_server_request>\n"
PLAIN = "/boinc/upload/file_upload_handler"
ECHO = '''"""echo: gives back what it got."""

rsc_disk_bound = 1000


def workunit(i):
    return {"input": i} if i < 6 else None


def compute(input):
    return input
'''


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


@contextlib.contextmanager
def serving(folder, **settings):
    """A project with one application and six workunits, and its web application."""
    with make.project(folder, {"echo": ECHO}, min_sendwork_interval=0, **settings):
        m.run_pass(NOW)
        web = Web()
        yield web
        assert not m.project.counts["server errors"]


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


def sound(got):
    """Hold that an answer is JSON, below 500."""
    assert got.status < 500, got.body
    assert got.headers["Content-Type"].startswith("application/json")
    assert isinstance(got.json, dict) and (got.status == 200) == ("error" not in got.json)
