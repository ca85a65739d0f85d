"""Floods against the real process: whatever strangers send, or do not read, others are served.

One server for all of it, on loopback. Everything is bounded in number and in bytes; a stop in the
server shows as a socket's timeout, a leak in the memory it has used at most.
"""

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="needs limits as Unix has them")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60  # seconds until somebody who waits was not served
MEMORY_MAX = 200  # MB that the server may have used at most, with the 60 it needs at the start
CONNECTIONS = 1100  # more than the server takes
BIG = 20 << 20  # bytes of a file to download: more than waitress keeps for a slow reader by itself
APP = f'''"""echo: gives back what it got; a large file comes with each task."""

FILES = {{"big": bytes({BIG})}}


def workunit(i):
    return {{"input": i, "files": FILES}} if i < 8 else None


def compute(input):
    return input
'''


class Server:
    """The process, and ways to talk to it."""

    def __init__(self, process, host, port):
        self.process, self.address = process, (host, port)

    def connect(self, receive_bytes=None):
        """Open a connection, with a small window for one that shall not be read."""
        s = socket.socket()
        if receive_bytes:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        s.settimeout(PATIENCE)
        s.connect(self.address)
        return s

    def ask(self, method, path, body=None, **headers):
        """Send a request as usual; return status and body."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, {k.replace("_", "-"): v
                                                    for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def serves(self):
        """Hold that a volunteer can join, gets an answer to a request, and sees the page."""
        assert self.process.poll() is None
        status, text = self.ask("POST", "/register", b'{"nickname": "somebody"}')
        assert status == 200, text
        status, text = self.ask("POST", "/scheduler", json.dumps(
            {"authenticator": json.loads(text)["authenticator"], "work_req_seconds": 1,
             "host": {"p_fpops": 3e7}}))
        assert status == 200 and json.loads(text)["hostid"], text
        assert self.ask("GET", "/status.json")[0] == 200
        return json.loads(text)

    def memory(self):
        """Return the MB that the process has used at most; 0 where the system does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        text = status.read_text() if status.exists() else "VmHWM: 0"
        return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) >> 10


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flood")
    (folder / "echo.py").write_text(APP)
    (folder / "setup.cfg").write_text("[minigrid]\nmin_sendwork_interval = 0\n"
                                      "[accounts]\njoins_per_hour = 0\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--host", "127.0.0.1", "--port", "0",
         "--apps", "echo.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, preexec_fn=usual_limits)
    try:
        line = next(line for line in process.stdout if line.startswith("  http://"))
        host, port = re.search(r"//([\d.]+):(\d+)", line).groups()
        yield Server(process, host, int(port))
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        process.stdout.close()


def usual_limits():
    """Give a process as many files as most systems do."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


@pytest.fixture(autouse=True)
def sound(server):
    """Hold that the server is as it was, however a test has ended its connections."""
    yield
    server.serves()
    assert server.process.poll() is None
    assert server.memory() < MEMORY_MAX


@contextlib.contextmanager
def many(server, n, **options):
    """Open connections; close them at the end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < n + 200:
        pytest.skip(f"this system allows only {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(n + 200, 1024), most))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(server.connect(**options)))
               for _ in range(n)]


def answer_of(s, method="POST"):
    """Read an answer from a socket; return its status and body."""
    answer = http.client.HTTPResponse(s, method=method)
    answer.begin()
    return answer.status, answer.read()


# ---- Connections ---------------------------------------------------------------


@pytest.mark.parametrize("begun", [
    b"", b"POST /scheduler HTTP/1.1\r\nHost: a\r\n",
    b"POST /scheduler HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{",
    b"PUT /upload/echo_0_0_out HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n0"])
def test_more_connections_than_there_is_room_for(server, begun):
    """The one that was silent for longest makes room; nobody waits until they end."""
    with many(server, CONNECTIONS) as connections:
        for s in connections:
            with contextlib.suppress(OSError):  # Some are closed already.
                s.sendall(begun)
        server.serves()
        for s in random.Random(1).sample(connections, 300):
            with contextlib.suppress(OSError):
                s.sendall(b"X")  # They are not silent.
        server.serves()


def test_a_connection_that_is_used_is_not_the_one_that_makes_room(server):
    with contextlib.closing(server.connect()) as used, many(server, 700):
        for _ in range(5):
            with many(server, 150):
                used.sendall(b"GET /status.json HTTP/1.1\r\n\r\n")
                assert answer_of(used, "GET")[0] == 200


def test_one_byte_at_a_time_is_a_request_like_any_other(server):
    body = b'{"nickname": "on a very slow line"}'
    request = b"POST /register HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with many(server, 20) as connections:
        for n in range(len(request)):
            for s in connections:
                s.sendall(request[n:n + 1])
            if n % 50 == 0:
                server.serves()
        keys = [json.loads(answer_of(s)[1])["authenticator"] for s in connections]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("asked", ["GET /volunteer.py", "GET /", "GET /big", "GET /big+range"])
def test_who_asks_and_never_reads_holds_nobody_up(server, asked):
    """Many requests on each connection, and more connections than the server has workers."""
    (name,) = {file["url"].rpartition("/")[2] for job in server.serves()["assignments"]
               for file in job["inputs"]} or {"none"}
    path = asked.replace("/big", f"/download/{name}").partition("+")[0]
    line = f"{path} HTTP/1.1\r\n{'Range: bytes=1-' if 'range' in asked else 'A: b'}\r\n\r\n"
    with many(server, 24, receive_bytes=4096) as connections:
        for s in connections:
            s.sendall(line.encode() * 100)
        for _ in range(3):
            server.serves()


def test_requests_in_a_row_are_answered_in_their_order(server):
    """Some with a body, on one connection, without waiting for an answer."""
    names = [f"number {n}" for n in range(30)]
    with contextlib.closing(server.connect()) as s:
        for name in names:
            body = json.dumps({"nickname": name}).encode()
            s.sendall(b"POST /register HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
                      % (len(body), body) + b"\r\n" * (name[-1] == "7"))
        s.sendall(b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: s.recv(1 << 16), b"")).decode()
    assert re.findall(r'"name": ?"(.+?)"', said) == names
    assert re.findall("HTTP/1.1 ([0-9]+)", said) == ["200"] * len(names) + ["404"]


def test_who_goes_in_the_middle_of_an_answer_harms_nobody(server):
    for _ in range(50):
        with contextlib.closing(server.connect(receive_bytes=4096)) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
            s.sendall(b"GET /volunteer.py HTTP/1.1\r\n\r\n" * 20)
            s.recv(1000)


# ---- Bodies and headers --------------------------------------------------------

ADDRESSES = ["POST /scheduler", "POST /boinc/scheduler", "POST /register", "POST /join",
             "PUT /upload/echo_0_0_out", "POST /boinc/upload/file_upload_handler",
             "POST /create_account.php", "GET /", "POST /nowhere"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_hundred_megabytes(server, address):
    """Announced, sent in full, sent in chunks without a length, and left off in the middle."""
    piece = bytes(1 << 20)
    method, path = address.split()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        status, text = server.ask(method, path, bytes(100 << 20))
        assert status in (404, 413) or b"<status>-1</status>" in text
    for head, chunk in ((f"Content-Length: {100 << 20}", piece),
                        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (len(piece), piece))):
        with contextlib.closing(server.connect()) as s:
            s.sendall(f"{address} HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n".encode())
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(100):
                    s.sendall(chunk)
                status, text = answer_of(s, method)
                assert status in (404, 413) or b"<status>-1</status>" in text


@pytest.mark.parametrize("head", [
    b"A: " + b"x" * (2 << 20), b"A: b\r\n" * 300_000, b"A" * (2 << 20), b"A:\r\n" * 300_000,
    b"Content-Length: " + b"9" * 100_000, b"Cookie: " + b"a=b;" * 300_000])
def test_headers_without_end(server, head):
    with contextlib.closing(server.connect()) as s:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            s.sendall(b"POST /scheduler HTTP/1.1\r\n" + head + b"\r\n\r\n")
            assert answer_of(s)[0] in (400, 413, 431)


def test_headers_that_come_byte_by_byte_end_soon(server):
    with contextlib.closing(server.connect()) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.sendall(b"GET / HTTP/1.1\r\nA: ")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1 << 16):
                s.send(b"x")
            assert answer_of(s, "GET")[0] == 431


@pytest.mark.parametrize("head", [
    "Content-Length: 5\r\nTransfer-Encoding: chunked", "Content-Length: -1", "Content-Length: 1e3",
    "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, chunked", "Content-Length: 5, 5", "Content-Length: +5",
    "Transfer-Encoding: \x0bchunked", "Content-Length : 5", "Transfer-Encoding: identity"])
def test_lengths_that_contradict_each_other_hide_no_second_request(server, head):
    """What one reader takes for a body another would take for a request."""
    hidden = b"POST /register HTTP/1.1\r\nContent-Length: 22\r\n\r\n" + b'{"nickname": "hidden"}'
    before = json.loads(server.ask("POST", "/register", b"{}")[1])["userid"]
    with contextlib.closing(server.connect()) as s:
        s.sendall(f"POST /register HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n".encode("latin-1")
                  + b"0\r\n\r\n" + hidden)
        s.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(1 << 16):
                said += piece
    assert re.findall(b"HTTP/1.1 ([0-9]+)", said) in ([], [b"400"], [b"411"], [b"413"], [b"501"])
    assert json.loads(server.ask("POST", "/register", b"{}")[1])["userid"] == before + 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_body_that_unpacks_to_far_too_much(server, layers):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = b"".join([packer.compress(b"<scheduler_request>"),
                     *(packer.compress(bytes(16 << 20)) for _ in range(20)), packer.flush()])
    if layers == 2:
        body = gzip.compress(body)
    for _ in range(3):
        status, text = server.ask("POST", "/boinc/scheduler", body, Content_Encoding="gzip")
        assert status == 413 if layers == 1 else b"scheduler_reply" in text


@pytest.mark.parametrize("path", ["/scheduler", "/register"])
@pytest.mark.parametrize("body", [
    b"[" * 1_000_000, b'{"a":' * 200_000, b"1" * 4_000_000, b'"' + b"\\u0000" * 600_000 + b'"',
    b'{"authenticator": "a", "reports": [' + b'{"name": "a"},' * 100_000 + b"{}]}"],
    ids=["lists", "objects", "digits", "escapes", "reports"])
def test_json_that_costs_more_than_it_weighs(server, path, body):
    status, text = server.ask("POST", path, body)
    assert status in (400, 413) and set(json.loads(text)) == {"error"}


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_nothing_stays_open(server):
    """Connections, and the files in which large bodies wait, go when their clients do."""
    def open_files():
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    server.serves()
    before = open_files()
    with many(server, 60) as connections:
        for s in connections:
            s.sendall(b"POST /scheduler HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n"
                      + bytes(700_000))
        server.serves()
        assert open_files() >= before + 60
    for _ in range(600):
        server.serves()
        if open_files() <= before + 8:
            break
    assert open_files() <= before + 8  # Each worker may have opened the store by now.
