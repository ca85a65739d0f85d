"""Uploads on their way into the real server process: refused early, kept when they are cut."""

import contextlib
import hashlib
import http.client
import importlib
import json
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
from test_uploads import HEADER, PLAIN, QUERY, Answer

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60
CONTENT = bytes(range(256)) * 8192  # 2 MiB: clients ask before they send so much [WIRE 2]
BIG = 16 << 20  # with its header more than the smallest bound of the server
ECHO = f'''"""echo: gives back what it got."""

rsc_disk_bound = {BIG}


def workunit(i):
    return {{"input": i}} if i < 6 else None


def compute(input):
    return input
'''


class Server:
    """A server process; requests are written by hand, as nothing else shows when bytes go."""

    def __init__(self, folder, url):
        self.folder, self.netloc = folder, urllib.parse.urlsplit(url).netloc
        self.address = self.netloc.split(":")
        module = importlib.import_module("minigrid_plugin_keys")
        self.keys = module.open_boinc_keys(folder / "data" / "keys")

    def ask(self, method, path, body=None):
        """Send a request as usual; return its JSON or text."""
        with contextlib.closing(http.client.HTTPConnection(self.netloc, timeout=PATIENCE)) as c:
            c.request(method, path, body)
            answer = c.getresponse()
            text = answer.read()
        return json.loads(text) if "json" in answer.getheader("Content-Type") else Answer(
            text.decode())

    def outputs(self, n):
        """Take n results; return the names of their outputs."""
        key = self.ask("POST", "/register", b'{"nickname": "a"}')["authenticator"]
        reply = self.ask("POST", "/scheduler", json.dumps(dict(
            authenticator=key, platforms=["python"], work_req_seconds=1, cpu_req_instances=n,
            host={"p_fpops": 3e7, "p_ncpus": n})))
        return [job["output"]["name"] for job in reply["assignments"]][:n]

    def body(self, name, content=CONTENT, offset=0, **changes):
        """Return header and data of an upload, the largest that the workunit allows."""
        given = dict(name=name, max_nbytes=BIG, nbytes=len(content), offset=offset,
                     md5=hashlib.md5(content).hexdigest(),
                     signature=self.keys.certificate(name, BIG))
        return HEADER.format(**{**given, **changes}).encode() + content[offset:]

    def size(self, name):
        return self.ask("POST", PLAIN, QUERY.format(name).encode()).size

    @contextlib.contextmanager
    def connection(self, path, length, *headers):
        """Begin a request; yield its socket."""
        with contextlib.closing(socket.create_connection(self.address, PATIENCE)) as s:
            lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers]
            s.sendall("\r\n".join([*lines, "", ""]).encode())
            yield s

    def before_the_body(self, path, length):
        """Announce a body; return the status and the answer to that."""
        with self.connection(path, length, "Expect: 100-continue") as s:
            answer = http.client.HTTPResponse(s, method="POST")
            answer.begin()  # skips a status 100
            return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory, plugins):
    """A server whose uploads may have 16 MiB."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "echo.py").write_text(ECHO)
    (folder / "setup.cfg").write_text(f"[minigrid]\nupload_bytes_max = {BIG}\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--host", "127.0.0.1", "--port", "0",
         "--apps", "echo.py"], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(folder, next(line.strip() for line in process.stdout
                                  if line.startswith("  http://")))
    finally:
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0
        process.stdout.close()


@pytest.fixture
def name(server):
    return server.outputs(1)[0]


def address(name):
    return f"/boinc/upload/{name}/file_upload_handler"


def stored(server, name):
    with contextlib.closing(sqlite3.connect(server.folder / "data" / "minigrid.db")) as store:
        small = store.execute("SELECT content FROM small_file WHERE name = ?",
                              (f"upload/{name}",)).fetchall()
    found = [path.read_bytes() for path in (server.folder / "data" / "upload").glob(f"*/{name}")]
    (content,) = [row[0] for row in small] + found
    return content


def test_a_client_that_asks_first_sends_nothing_that_is_not_wanted(server, name):
    for wrong, length in (("echo_99_0_out", 2 << 20), (name, BIG + 9000), (name, 1 << 30)):
        status, text = server.before_the_body(address(wrong), length)
        assert status == 200 and Answer(text).status == -1


def test_a_client_that_does_not_ask_can_read_its_refusal(server, name):
    """All it sends is taken from the network, or it would see a broken connection instead."""
    for path, body in (
            (address("echo_99_0_out"), server.body("echo_99_0_out")),
            (address(name), server.body(name, signature="wrong\n.")),
            (PLAIN, server.body(name, signature="wrong\n."))):
        got = server.ask("POST", path, body)
        assert got.status == -1 and got.message
    assert server.size(name) == 0


@pytest.mark.parametrize("nbytes", [100, 1 << 17, BIG])
def test_what_is_wanted_is_taken(server, name, nbytes):
    """Also the largest one there may be, although its header comes on top."""
    content = (CONTENT * 8)[:nbytes]
    with server.connection(address(name), len(server.body(name, content)),
                           "Expect: 100-continue") as s:
        assert s.recv(100).startswith(b"HTTP/1.1 100 ")
        s.sendall(server.body(name, content))
        answer = http.client.HTTPResponse(s, method="POST")
        answer.begin()
        assert Answer(answer.read().decode()).status == 0
    assert stored(server, name) == content


def test_an_upload_that_is_cut_goes_on_where_it_ended(server, name):
    """[WIRE 10.2] As long as the connection lived, its bytes need not come again."""
    body = server.body(name)
    head = len(body) - len(CONTENT)
    with server.connection(address(name), len(body)) as s:
        s.sendall(body[:head + 1_000_000])
    deadline = time.monotonic() + PATIENCE
    while server.size(name) != 999_999:
        assert time.monotonic() < deadline, server.size(name)
        time.sleep(0.02)
    rest = server.body(name, offset=999_999)
    while (answer := server.ask("POST", PLAIN, rest)).status == 1:  # The cut one is written yet.
        assert time.monotonic() < deadline, answer.message
    assert answer.status == 0
    assert stored(server, name) == CONTENT


def test_a_cut_request_of_another_kind_is_forgotten(server):
    """Half a registration is none."""
    body = b'{"nickname": "half"}' + b" " * 100_000
    before = server.ask("GET", "/status.json")
    with server.connection("/register", 200_000) as s:
        s.sendall(body)
    assert server.ask("GET", "/status.json").keys() == before.keys()
    first, second = (server.ask("POST", "/register", b"{}")["userid"] for _ in range(2))
    assert second == first + 1


def test_other_large_bodies_are_refused_as_before(server):
    status, text = server.before_the_body("/scheduler", 100 << 20)
    assert status == 413
