"""The volunteer's transport on real sockets: servers that hang, drip, lie, redirect and break off;
proxies; HTTPS. Every server is scripted byte by byte and lives on loopback.

Where time matters the transport gets a clock that moves by itself, or bounds of a fraction of a
second; nothing is waited for that does not come.
"""

import base64
import contextlib
import datetime
import errno
import hashlib
import ipaddress
import json
import os
import re
import resource
import socket
import ssl
import stat
import struct
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from volunteer_world import FILE, v

PATIENCE = 20  # seconds until a connection that does not end is a failure
KEY = "a" * 32


# ---- A server that does what it is told --------------------------------------


class Talk:
    """One connection: the request's head is read, the rest is up to the script."""

    def __init__(self, sock, file):
        self.sock, self.file = sock, file
        line = self.file.readline().decode("latin-1")
        self.method, self.target = (line.split() + ["", ""])[:2]
        self.headers = {}
        for line in iter(lambda: self.file.readline().decode("latin-1").strip(), ""):
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    def body(self):
        return self.file.read(int(self.headers.get("content-length", 0)))

    def send(self, data):
        self.sock.sendall(data)

    def answer(self, data=b"", status="200 OK", **headers):
        if isinstance(data, dict):
            data = json.dumps(data).encode()
        headers.setdefault("Content_Length", len(data))
        lines = ["HTTP/1.1 " + status] + ["%s: %s" % (name.replace("_", "-"), value)
                                          for name, value in headers.items() if value is not None]
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data)

    def hang(self):
        """Say nothing until the client gives up."""
        with contextlib.suppress(OSError):
            while self.sock.recv(1 << 16):
                pass

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Peer:
    """A server whose script(talk) answers each connection, in a thread of its own."""

    def __init__(self, script, context=None):
        self.script, self.context, self.log, self.threads = script, context, [], []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.place = "127.0.0.1:%d" % self.port
        self.url = ("https://" if context else "http://") + self.place
        self.main = threading.Thread(target=self.run, daemon=True)
        self.main.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                sock = self.sock.accept()[0]
                self.threads.append(threading.Thread(target=self.serve, args=(sock,), daemon=True))
                self.threads[-1].start()

    def serve(self, sock):
        sock.settimeout(PATIENCE)
        try:
            if self.context:
                sock = self.context.wrap_socket(sock, server_side=True)
            with sock.makefile("rb") as file:
                talk = Talk(sock, file)
                self.log.append(talk)
                self.script(talk)
        except OSError:
            pass  # The client has gone, as it should in many of these tests.
        finally:
            sock.close()

    def close(self):
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        for thread in [self.main] + self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


class Blunt(Peer):
    """A server that takes no TLS greeting for a request."""

    def serve(self, sock):
        with sock:
            sock.recv(1000)
            sock.sendall(http_answer(b"", "400 Bad Request"))


@pytest.fixture
def peer():
    """Make servers: of bytes that are the whole answer, or of a function."""
    peers = []

    def make(script, context=None, cls=Peer):
        if isinstance(script, bytes):
            data = script

            def script(talk):
                talk.body()
                talk.send(data)
        peers.append(cls(script, context))
        return peers[-1]

    yield make
    for p in peers:
        p.close()


@pytest.fixture(autouse=True)
def no_proxy_of_ours(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def quick(**more):
    return v.Transport(**dict(dict(timeout=0.3), **more))


class Ticking:
    """A clock that moves a second whenever it is looked at."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def failing(call, *args):
    with pytest.raises(v.TransportError) as caught:
        call(*args)
    return caught.value


# ---- Requests for JSON -------------------------------------------------------


def http_answer(data, status="200 OK", **headers):
    sent = []
    talk = Talk.__new__(Talk)
    talk.send = sent.append
    talk.answer(data, status, **headers)
    return sent[0]


def drip(talk):
    talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(3000):  # Until the client closes, that is.
        talk.send(b"{")
        time.sleep(0.001)


def drip_headers(talk):
    talk.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
    for _ in range(3000):
        talk.send(b"x")
        time.sleep(0.001)


def hang_after_headers(talk):
    talk.answer(b"{", Content_Length=50)
    talk.hang()


def reset_in_body(talk):
    talk.body()
    talk.answer(b"{", Content_Length=50)
    talk.reset()


def trailers_without_end(talk):
    talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    for _ in range(500):
        talk.send(b"X-More: %s\r\n" % (b"x" * 60000))


PAGE = b"<html>Log in to HotelNet</html>"
GARBAGE = {  # what is answered -> status, words of the message
    "hang before the headers": (Talk.hang, 0, "no connection: no answer for 0.3 s"),
    "hang after the headers": (hang_after_headers, 0, "no answer for 0.3 s"),
    "reset in the body": (reset_in_body, 0, "the connection broke"),
    "closed without a word": (lambda talk: talk.body(), 0, "the connection broke"),
    "reset without a word": (Talk.reset, 0, "the connection broke"),
    "shorter than its length": (http_answer(b"{}", Content_Length=9), 0, "broke at byte 2 of 9"),
    "longer than its length": (http_answer(b'{"a": 1}', Content_Length=3), 500, "no JSON object"),
    "chunks cut off": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
                       0, "the connection broke"),
    "no last chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
                      0, "the connection broke"),
    "a chunk of nonsense": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
                            0, "the connection broke"),
    "trailers without end": (trailers_without_end, 0, "more headers or padding"),
    "garbage": (b"\x00\xff\x07garbage\r\n\r\n", 0, "the answer is not HTTP"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", 0, "the answer is not HTTP"),
    "10 MB of headers": (b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"x" * 10 ** 7 + b"\r\n\r\n{}", 0,
                         "the answer is not HTTP"),
    "10,000 headers": (b"HTTP/1.1 200 OK\r\n" + b"X-A: x\r\n" * 10000 + b"\r\n{}", 0,
                       "the answer is not HTTP"),
    "500": (http_answer({"error": "oops"}, "500 X"), 500, "problem on its side: oops"),
    "503 of a front": (http_answer(PAGE, "503 Busy", Content_Type="text/html"), 503,
                       "problem on its side: HTTP 503 Busy"),
    "404 in its own words": (http_answer({"error": "no such"}, "404 X"), 404, "refuses: no such"),
    "404 of somebody else": (http_answer(PAGE, "404 Not Found", Content_Type="text/html"), 0,
                             "HTTP 404 Not Found; the answer is a web page, not minigrid"),
    "401 of somebody else": (http_answer(b"", "401 Unauthorized"), 0, "HTTP 401 Unauthorized"),
    "511": (http_answer(PAGE, "511 Login", Content_Type="text/html"), 511, "want a login first"),
    "a login page": (http_answer(PAGE, Content_Type="text/html; charset=utf-8"), 0,
                     "no connection: the answer is a web page, not minigrid"),
    "no JSON": (http_answer(b"{"), 500, "no JSON object"),
    "a list": (http_answer(b"[]"), 500, "no JSON object"),
    "no UTF-8": (http_answer(b'{"a": "\xff"}'), 500, "no JSON object"),
    "deep": (http_answer(b"[" * 10 ** 6), 500, "no JSON object"),
    "nothing": (http_answer(b"", "204 No Content"), 500, "no JSON object"),
    "304": (http_answer(b"", "304 Not Modified"), 304, "HTTP 304"),
    "packed": (http_answer(b"\x1f\x8b", Content_Encoding="gzip"), 500, "packed (gzip)"),
    "terminal codes": (http_answer({"error": "\x1b[2J"}, "403 X"), 403, "refuses: [2J"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_trouble_is_told_in_plain_words(peer, monkeypatch, case):
    monkeypatch.setattr(v, "REPLY_BYTES_MAX", 1_500_000)
    script, status, words = GARBAGE[case]
    error = failing(quick().post_json, peer(script).url + "/scheduler", {"a": 1})
    assert (error.status, words in str(error)) == (status, True), str(error)
    assert len(str(error)) < 300 and "\x1b" not in str(error)
    assert error.lasting == (400 <= status < 500)


@pytest.mark.parametrize("script", [drip, drip_headers])
def test_who_drips_is_left(peer, script):
    """By the bound for the whole, and by the speed; the clock moves with each look at it."""
    url = peer(script).url
    for bounds, words in (({"total": 40.0, "slow": 1e9}, "more than 40 s in all"),
                          ({"total": 1e9, "slow": 30.0}, "less than 1024 bytes in 30 s")):
        error = failing(v.Transport(clock=Ticking(), **bounds).post_json, url, {})
        assert error.status == 0 and words in str(error)


def test_who_is_slow_but_steady_is_not():
    now = [0.0]
    patience = v.Patience(lambda: now[0], 30.0, 60.0, 1e9)
    for _ in range(100):
        now[0] += 29
        assert 0 < patience.seconds() <= 30
        patience.moved(600)
    now[0] += 59
    assert 0 < patience.seconds() <= 1
    now[0] += 1
    with pytest.raises(socket.timeout):
        patience.seconds()


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        place = "127.0.0.1:%d" % sock.getsockname()[1]
    error = failing(quick().post_json, "http://%s/x" % place, {})
    assert str(error) == ("no connection: nothing answers at %s; is the server running?" % place)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "http://", "http://h:99999/",
                                 "http://[::1/", "http://a\0b/", "http://%s/" % ("x" * 70), "", "x",
                                 "http://" + "é" * 64 + "/"])
def test_addresses_that_are_none(url):
    assert failing(quick().get_text, url).status == 0


def test_a_reply_too_large_is_an_error(peer, monkeypatch):
    monkeypatch.setattr(v, "REPLY_BYTES_MAX", 1000)
    for headers in ({}, {"Content_Length": None}):
        for n, fine in ((1000, True), (1001, False)):
            data = b'{"a": "%s"}' % (b"x" * (n - 9))
            url = peer(http_answer(data, **headers)).url
            if fine:
                assert len(quick().post_json(url, {})["a"]) == n - 9
            else:
                assert "larger than 1000 bytes" in str(failing(quick().post_json, url, {}))
    error = failing(quick().post_json, peer(http_answer(b"{}", Content_Length=10 ** 12)).url, {})
    assert "larger than 1000 bytes" in str(error)


def test_what_is_said_and_heard(peer):
    def script(talk):
        assert json.loads(talk.body()) == {"name": "öäü", "n": 1}
        talk.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
                  b"Date: Mon, 21 Sep 2026 13:06:40 GMT\r\n\r\n")
        for piece in (b'{"x"', b': "\xc3', b'\xa4"}', b""):
            talk.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        talk.hang()  # It need not close: the last chunk is the end.

    server = peer(script)
    value = quick().post_json(server.url + "/a b/é?q=1 2#part", {"name": "öäü", "n": 1})
    assert value == {"x": "ä", "http_date": 1789996000.0}
    head = server.log[0]
    assert (head.method, head.target) == ("POST", "/a%20b/%C3%A9?q=1%202")
    assert head.headers["host"] == server.place and head.headers["user-agent"] == v.VERSION
    assert head.headers["accept-encoding"] == "identity"
    assert head.headers["content-type"] == "application/json"


DATES = {"Mon, 21 Sep 2026 13:06:40 GMT": 1789996000.0, "": None, "yesterday": None,
         "Mon, 99 Sep 99999999999 13:06:40 GMT": None}


@pytest.mark.parametrize("text", DATES)
def test_the_servers_time(peer, text):
    """[C34]"""
    url = peer(http_answer({"a": 1}, Date=text)).url
    assert quick().post_json(url, {}).get("http_date") == DATES[text]
    own = peer(http_answer({"http_date": 7}, Date=text)).url
    assert quick().post_json(own, {})["http_date"] == 7


WAITS = {  # Retry-After, Date -> seconds
    "120": 120, "0": 0, "-5": 0, "1e3": 0, "9" * 9: 86400, "9" * 99: 0, "soon": 0,
    "Mon, 21 Sep 2026 13:08:40 GMT": 120, "Mon, 21 Sep 2020 13:08:40 GMT": 0,
    "Mon, 21 Sep 2099 13:08:40 GMT": 86400}


@pytest.mark.parametrize("status", ["503 Busy", "429 Too Many"])
@pytest.mark.parametrize("text", WAITS)
def test_retry_after(peer, text, status):
    url = peer(http_answer({"error": "later"}, status, Retry_After=text,
                           Date="Mon, 21 Sep 2026 13:06:40 GMT")).url
    error = failing(quick().post_json, url, {})
    assert error.retry_after == WAITS[text] and not error.lasting
    no_date = peer(http_answer({"error": "later"}, status, Retry_After=text)).url
    wait = WAITS[text] if text.isdigit() else 0
    assert failing(quick().post_json, no_date, {}).retry_after == wait


def test_the_front_page(peer):
    server = peer(http_answer("<html>é".encode(), Content_Type="text/html"))
    assert quick().get_text(server.url + "/x") == ("<html>é", server.url + "/x")
    assert "larger than 5 bytes" in str(failing(quick().get_text, server.url, 5))


# ---- Redirects ---------------------------------------------------------------


def mover(status, to):
    """A server that sends the path /from elsewhere, and answers the rest."""
    def script(talk):
        talk.got = talk.body()
        if talk.target == "/from":
            talk.answer(b"", "%d Moved" % status, Location=to)
        else:
            talk.answer(json.dumps({"nbytes": 0, "complete": True}).encode())
    return script


@pytest.mark.parametrize("status, followed", [(301, True), (302, False), (303, False), (307, True),
                                              (308, True)])
def test_a_body_goes_on_at_the_same_host_only(peer, status, followed):
    here = peer(mover(status, "/to"))
    if followed:
        assert quick().post_json(here.url + "/from", {"a": 1})["complete"] is True
        assert [(t.method, t.target, t.got) for t in here.log] == [
            ("POST", "/from", b'{"a": 1}'), ("POST", "/to", b'{"a": 1}')]
    else:
        assert failing(quick().post_json, here.url + "/from", {}).moved_to == ""
    there = peer(http_answer({}))
    here = peer(mover(status, there.url + "/to"))
    error = failing(quick().post_json, here.url + "/from", {"authenticator": KEY})
    assert (error.status, error.moved_to) == (status, there.url + "/to")
    assert not error.lasting and str(error).startswith("the server sends us to http://127.0.0.1:")
    assert there.log == []


def test_the_authenticator_stays_here(peer, tmp_path):
    there = peer(http_answer({"nbytes": 0, "complete": False}))
    (tmp_path / "f").write_bytes(b"x" * 100)
    for resume in (True, False):  # a GET with the header, a PUT with it
        here = peer(mover(307, there.url + "/to"))
        error = failing(quick().upload, here.url + "/from", tmp_path / "f", KEY, resume)
        assert error.moved_to == there.url + "/to" and there.log == []
        assert [t.headers["authorization"] for t in here.log] == ["Bearer " + KEY]
    same = peer(mover(308, "/to"))
    quick().upload(same.url + "/from", tmp_path / "f", KEY, False)
    assert [t.got for t in same.log] == [b"x" * 100] * 2
    assert {t.headers["authorization"] for t in same.log} == {"Bearer " + KEY}


def test_pages_and_files_are_followed(peer, tmp_path):
    there = peer(http_answer(b"hello"))
    here = peer(mover(302, there.url + "/to"))
    assert quick().get_text(here.url + "/from") == ("hello", there.url + "/to")
    quick().download(of(b"hello", here.url + "/from"), tmp_path / "p", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"hello"


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://127.0.0.1/", "http://:80/x",
                                "data:,x"])
def test_redirects_to_nowhere(peer, to):
    url = peer(mover(302, to)).url + "/from"
    assert "where we do not go" in str(failing(quick().get_text, url))
    assert "where we do not go" in str(failing(quick().post_json, url, {}))


def test_a_circle_ends(peer):
    def script(talk):
        talk.answer(b"", "302 Found", Location=talk.target + "x")

    server = peer(script)
    assert "in a circle" in str(failing(quick().get_text, server.url + "/"))
    assert len(server.log) == 6


class Answer:
    """The head of an answer."""

    def __init__(self, location, status=301):
        self.location, self.status = location, status

    def getheader(self, name):
        return self.location


REDIRECTS = {  # from, to -> may a page be followed there?
    ("http://grid.example.org/a", "https://grid.example.org/a"): True,
    ("https://grid.example.org/a", "http://grid.example.org/a"): False,
    ("https://grid.example.org/a", "//other.example.org/b"): True,
    ("http://grid.example.org/a", "http://192.168.1.1/reboot"): False,
    ("http://grid.example.org/a", "http://localhost:631/"): False,
    ("http://192.168.1.5:8080/a", "http://192.168.1.6:8080/a"): True,
}


@pytest.mark.parametrize("old, new", REDIRECTS)
def test_where_redirects_may_lead(old, new):
    if REDIRECTS[old, new]:
        assert v.redirected(Answer(new), old, False, False) == v.urllib.parse.urljoin(old, new)
        with pytest.raises(v.TransportError) as caught:  # To another server; also from 80 to 443.
            v.redirected(Answer(new), old, True, True)
        assert caught.value.moved_to
    else:
        with pytest.raises(v.TransportError) as caught:
            v.redirected(Answer(new), old, False, False)
        assert caught.value.moved_to == ""


# ---- Downloads ---------------------------------------------------------------


def of(data, url, **more):
    return dict({"url": url, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
                **more)


DATA = os.urandom(300_000)
HALF = DATA[:150_000]
OTHER = os.urandom(300_000)


def ranged(data, shift=0, status="206 Partial Content", total=None, **headers):
    """A server that knows Range; `shift`: it sends another part than asked for."""
    def script(talk):
        at = re.match(r"bytes=(\d+)-", talk.headers.get("range", ""))
        if not at:
            return talk.answer(data)
        at = int(at.group(1)) + shift
        talk.answer(data[at:], status, Content_Range="bytes %d-%d/%s" % (
            at, len(data) - 1, total or len(data)), **headers)
    return script


def plain_server(data):
    return lambda talk: talk.answer(data)


def no_such_range(talk):
    if "range" in talk.headers:
        talk.answer(b"", "416 Range Not Satisfiable")
    else:
        talk.answer(DATA)


def no_content_range(talk):
    if "range" in talk.headers:
        talk.answer(DATA[150_000:], "206 Partial Content")
    else:
        talk.answer(DATA)


RESUMING = {  # what lies there, server -> number of requests until the file is right
    "goes on": (HALF, ranged(DATA), 1),
    "of unknown length": (HALF, ranged(DATA, total="*"), 1),
    "from the start": (b"", ranged(DATA), 1),
    "complete already": (DATA, ranged(DATA), 0),
    "complete but damaged": (OTHER, ranged(DATA), 1),
    "damaged": (OTHER[:9], ranged(DATA), 2),
    "longer than the file": (DATA + b"x", ranged(DATA), 1),
    "a server without ranges": (HALF, plain_server(DATA), 1),
    "another part": (HALF, ranged(DATA, shift=-1), 2),
    "a part of another file": (HALF, ranged(DATA, total=7), 2),
    "a part of who knows what": (HALF, no_content_range, 2),
    "416": (HALF, no_such_range, 2),
}


@pytest.mark.parametrize("case", RESUMING)
def test_downloads_resume(peer, tmp_path, case):
    there, script, n_requests = RESUMING[case]
    server = peer(script)
    partial, path = tmp_path / "p", tmp_path / "f"
    if there:
        partial.write_bytes(there)
    quick().download(of(DATA, server.url), partial, path)
    assert path.read_bytes() == DATA and not partial.exists()
    assert len(server.log) == n_requests
    assert stat.S_IMODE(path.stat().st_mode) & 0o177 == 0 or there
    quick().download(of(DATA, server.url), partial, path)
    assert len(server.log) == n_requests  # It is there.


def cut_at(n, end=None):
    def script(talk):
        talk.answer(DATA[:n], Content_Length=len(DATA))
        if end:
            end(talk)
    return script


BROKEN = {"truncated": cut_at(200_000), "reset": cut_at(200_000, Talk.reset),
          "hanging": cut_at(200_000, Talk.hang),
          "chunks": lambda talk: talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                                           b"%x\r\n%s\r\n" % (200_000, DATA[:200_000])),
          "without a length": lambda talk: talk.answer(DATA[:200_000], Content_Length=None)}


@pytest.mark.parametrize("case", BROKEN)
def test_what_has_come_is_kept(peer, tmp_path, case):
    partial, path = tmp_path / "p", tmp_path / "f"
    error = failing(quick().download, of(DATA, peer(BROKEN[case]).url), partial, path)
    assert error.status == 0 and not path.exists()
    have = partial.read_bytes()
    assert DATA.startswith(have) and (have or case == "reset")
    if case != "reset":  # A reset may overtake what was sent before it.
        assert len(have) == 200_000
    assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    server = peer(ranged(DATA))
    quick().download(of(DATA, server.url), partial, path)
    assert path.read_bytes() == DATA
    assert server.log[0].headers.get("range") == ("bytes=%d-" % len(have) if have else None)


def test_what_was_there_before_does_not_stay_behind_a_new_beginning(peer, tmp_path):
    (tmp_path / "p").write_bytes(OTHER[:250_000])
    failing(quick().download, of(DATA, peer(cut_at(200_000)).url), tmp_path / "p", tmp_path / "f")
    assert (tmp_path / "p").read_bytes() == DATA[:200_000]


def endless(talk):
    talk.send(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(1000):
        talk.send(b"x" * 10000)


WRONG = {  # server -> what is raised, number of requests
    "other content": (plain_server(OTHER), v.BadFile, 1),
    "other content, resumed": (ranged(OTHER), v.BadFile, 2),
    "shorter": (plain_server(DATA[:-1]), v.BadFile, 1),
    "longer": (plain_server(DATA + b"x"), v.BadFile, 1),
    "without an end": (endless, v.BadFile, 1),
    "always another part": (lambda talk: talk.answer(
        DATA, "206 X", Content_Range="bytes 1-300000/300001"), v.TransportError, 1),
    "404": (lambda talk: talk.answer(PAGE, "404 X", Content_Type="text/html"), v.TransportError, 1),
    "a login page": (lambda talk: talk.answer(PAGE, Content_Type="text/html"), v.TransportError, 1),
    "a login page in chunks": (lambda talk: talk.answer(
        PAGE, Content_Type="text/html", Content_Length=None), v.TransportError, 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_nothing_wrong_gets_the_name(peer, tmp_path, case):
    script, kind, n_requests = WRONG[case]
    server = peer(script)
    resumed = n_requests > 1
    if resumed:
        (tmp_path / "p").write_bytes(HALF)
    with pytest.raises((v.BadFile, v.TransportError)) as caught:
        quick().download(of(DATA, server.url), tmp_path / "p", tmp_path / "f")
    assert type(caught.value) is kind and not (tmp_path / "f").exists()
    assert len(server.log) == n_requests
    if kind is v.TransportError:
        assert caught.value.lasting == (case == "404")
        assert ("web page" in str(caught.value)) == ("login" in case or case == "404")
    assert (tmp_path / "p").stat().st_size == 0  # Nothing wrong is built upon.


def test_a_page_may_be_a_file(peer, tmp_path):
    server = peer(http_answer(PAGE, Content_Type="text/html"))
    quick().download(of(PAGE, server.url), tmp_path / "p", tmp_path / "f")
    quick().download(of(b"", "http://127.0.0.1:1/never/asked"), tmp_path / "p", tmp_path / "empty")
    assert (tmp_path / "f").read_bytes() == PAGE and (tmp_path / "empty").read_bytes() == b""


def test_several_sources(peer, tmp_path):
    gone = peer(lambda talk: talk.answer({"error": "gone"}, "404 X"))
    wrong, cut, good = peer(plain_server(OTHER)), peer(cut_at(200_000)), peer(ranged(DATA))
    urls = [wrong.url, 7, None, gone.url, cut.url, good.url, good.url + "/never"]
    quick().download(of(DATA, gone.url, urls=urls), tmp_path / "p", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert [len(p.log) for p in (gone, wrong, cut, good)] == [1, 1, 1, 1]
    assert good.log[0].headers["range"] == "bytes=200000-"
    for urls, lasting in (([gone.url], True), ([cut.url, gone.url], False),
                          ([gone.url, cut.url], False)):
        error = failing(quick().download, of(DATA, urls[0], urls=urls), tmp_path / "p",
                        tmp_path / "f2")
        assert error.lasting == lasting
    with pytest.raises(v.TransportError):
        quick().download(of(DATA, "", urls="no list"), tmp_path / "p", tmp_path / "f2")


def test_our_files_are_plain_files(peer, tmp_path):
    """What a job may have put in the place of a file is neither read nor written through [D11]."""
    server = peer(ranged(DATA))
    precious = tmp_path / "precious"
    for name in ("p", "f"):
        for make in (Path.symlink_to, lambda path, to: os.link(to, path),
                     lambda path, to: os.mkfifo(path)):
            precious.write_bytes(HALF)
            make(tmp_path / name, precious)
            quick().download(of(DATA, server.url), tmp_path / "p", tmp_path / "f")
            assert precious.read_bytes() == HALF
            assert (tmp_path / "f").read_bytes() == DATA
            assert stat.S_ISREG(os.lstat(tmp_path / "f").st_mode)
            (tmp_path / "f").unlink()
    (tmp_path / "f").symlink_to(precious)
    precious.write_bytes(DATA)
    with pytest.raises(v.BadFile):
        quick().upload(server.url, tmp_path / "f", KEY, False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(v.BadFile):
        quick().upload(server.url, tmp_path / "pipe", KEY, False)
    with pytest.raises(FileNotFoundError):
        quick().upload(server.url, tmp_path / "nothing", KEY, False)


def test_a_link_made_just_now_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_bytes(DATA)
    monkeypatch.setattr(v.os.path, "lexists", lambda path: False)  # It was not there when we looked
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError):
            v.open_plain(tmp_path / "link", flags)


def test_a_disk_without_room_is_our_own_trouble(peer, tmp_path):
    """The bound on the size of files stands for a full disk; what has come is kept."""
    server = peer(ranged(DATA))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(v.LocalError) as caught:
            quick().download(of(DATA, server.url), tmp_path / "p", tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.full
    assert str(caught.value) == "this computer's disk is full: no room for %s" % (tmp_path / "p")
    assert DATA.startswith((tmp_path / "p").read_bytes())
    quick().download(of(DATA, server.url), tmp_path / "p", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)):
        assert v.LocalError("x", OSError(number, "words")).full == full


def test_other_trouble_with_our_own_files(peer, tmp_path):
    server = peer(ranged(DATA))
    with pytest.raises(v.LocalError) as caught:
        quick().download(of(DATA, server.url), tmp_path / "no" / "p", tmp_path / "f")
    assert not caught.value.full and "cannot use" in str(caught.value) and server.log == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(v.LocalError):
        quick().download(of(DATA, server.url), tmp_path / "p", tmp_path / "folder")


# ---- Uploads -----------------------------------------------------------------


class Store:
    """A server that takes uploads; `faults` are functions to be called instead, one a PUT."""

    def __init__(self, *faults):
        self.data, self.faults = b"", list(faults)

    def __call__(self, talk):
        if talk.method == "PUT" and self.faults:
            fault = self.faults.pop(0)
            if fault:
                return fault(self, talk)
        if talk.method == "PUT":
            span, total = talk.headers["content-range"][6:].split("/")
            at = 0 if span == "*" else int(span.split("-")[0])
            if at > len(self.data):
                return talk.answer({"error": "gap", "nbytes": len(self.data)}, "409 Conflict")
            self.data = self.data[:at] + talk.body()
            return talk.answer({"nbytes": len(self.data), "complete": len(self.data) == int(total)})
        talk.answer({"nbytes": len(self.data), "complete": False})


def stops_in_the_middle(store, talk):
    store.data += talk.file.read(70_000)
    talk.reset()


@pytest.fixture
def output(tmp_path):
    (tmp_path / "out").write_bytes(DATA)
    return tmp_path / "out"


def test_an_upload_goes_on_after_a_stop(peer, output, monkeypatch):
    monkeypatch.setattr(v, "PIECE_BYTES", 100_000)
    store = Store(None, stops_in_the_middle)
    server = peer(store)
    assert failing(quick().upload, server.url, output, KEY, False).status == 0
    assert len(store.data) == 170_000
    quick().upload(server.url, output, KEY, True)
    assert store.data == DATA
    assert [t.headers["content-range"] for t in server.log if t.method == "PUT"] == [
        "bytes 0-99999/300000", "bytes 100000-199999/300000", "bytes 170000-269999/300000",
        "bytes 270000-299999/300000"]


def has_more_than_we_know(store, talk):
    store.data = DATA[:120_000]
    talk.body()
    talk.answer({"error": "continue elsewhere"}, "409 Conflict")


def test_an_upload_goes_on_where_the_server_says(peer, output):
    store = Store(has_more_than_we_know)
    server = peer(store)
    quick().upload(server.url, output, KEY, False)
    assert store.data == DATA
    assert [t.headers.get("content-range") for t in server.log] == [
        "bytes 0-299999/300000", None, "bytes 120000-299999/300000"]


def refuses_at_once(store, talk):
    talk.answer({"error": "not yours"}, "403 Forbidden")
    talk.file.read(1000)  # and no more of what is being sent


def refuses_and_waits(store, talk):
    talk.answer({"error": "not yours"}, "403 Forbidden")
    talk.hang()


@pytest.mark.parametrize("fault, secure", [(refuses_at_once, False), (refuses_and_waits, False),
                                           (refuses_and_waits, True)])
def test_a_refusal_is_heard_while_we_are_still_sending(peer, tmp_path, pair, fault, secure):
    """Else 100 MB would be sent again and again. (Under TLS a reset may overtake the answer.)"""
    (tmp_path / "big").write_bytes(bytes(4_000_000))
    server = peer(Store(*[fault] * 9), pair.server("good") if secure else None)
    transport = quick(timeout=5.0, ca_file=str(pair.ca))
    error = failing(transport.upload, server.url, tmp_path / "big", KEY, False)
    assert (error.status, error.lasting) == (403, True) and "not yours" in str(error)


def test_an_early_answer_stops_the_sending():
    """The body is not sent to the end when the answer is there; that nobody takes it is no error
    yet, as the answer may tell why."""
    for closed in (False, True):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # Room for several blocks.
        with ours, theirs:
            wire = v.Wire(ours, v.Patience(Ticking(), 0.3, 1e6, 1e6), 1e9)
            theirs.sendall(b"HTTP/1.1 403 X\r\n\r\n")
            if closed:
                theirs.close()
            wire.send_body(bytes(10 ** 7))  # Nobody reads: it would never end.
            assert wire.buffered.readline() == b"HTTP/1.1 403 X\r\n"
            if not closed:
                ours.shutdown(socket.SHUT_WR)
                assert len(theirs.makefile("rb").read()) == v.BLOCK_BYTES


def test_little_is_hidden_in_the_systems_buffer():
    """With a slow uplink it would be sent for minutes after the last byte has left us."""
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        patience = v.Patience(lambda: now[0], 0.2, 60.0, 60.0)
        with v.dial("127.0.0.1", server.getsockname()[1], patience) as sock:
            with pytest.raises(OSError):
                v.Wire(sock, patience, 1e9).sendall(bytes(10 ** 7))  # Nobody reads.
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 300_000


def answering(*values):
    values = list(values)

    def script(talk):
        talk.body()
        answer = values.pop(0) if len(values) > 1 else values[0]
        talk.answer(*(answer if talk.method == "PUT" else answer[:1]))
    return script


STRANGE = {"nothing": [({},)], "wrong types": [({"nbytes": "7", "complete": "yes"},)],
           "a list": [({"nbytes": [1], "complete": 1},)],
           "less than nothing": [({"nbytes": -1},)], "more than there is": [({"nbytes": 1e9},)],
           "always 409": [({"error": "busy", "nbytes": 5}, "409 Conflict")],
           "up and down": [({"nbytes": n % 2 * 10 + n // 1000},) for n in range(200)]}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_answers_end_an_upload(peer, output, monkeypatch, case):
    monkeypatch.setattr(v, "PIECE_BYTES", 1000)
    server = peer(answering(*STRANGE[case]))
    error = failing(quick().upload, server.url, output, KEY, True)
    assert "does not take the upload" in str(error) and not error.lasting
    assert len(server.log) <= 20


def test_a_server_that_nibbles_is_left(peer, output):
    """A byte more with each piece is no way to take an upload."""
    n = iter(range(1, 10 ** 6))
    server = peer(lambda talk: (talk.body(), talk.answer({"nbytes": next(n)})))
    assert "does not take" in str(failing(quick().upload, server.url, output, KEY, False))
    assert len(server.log) <= 8


UPLOAD_ERRORS = {"busy": ({"error": "later"}, "503 Busy", 503, False),
                 "full": ({"error": "no room"}, "507 Full", 507, False),
                 "refused": ({"error": "too large"}, "413 Large", 413, True),
                 "a filter": (PAGE, "413 Large", 0, False), "a portal": (PAGE, "200 OK", 0, False)}


@pytest.mark.parametrize("case", UPLOAD_ERRORS)
def test_only_the_server_ends_a_result(peer, output, case):
    data, status, code, lasting = UPLOAD_ERRORS[case]
    kind = "text/html" if data is PAGE else "application/json"
    server = peer(lambda talk: (talk.body(), talk.answer(
        data, status, Content_Type=kind, Retry_After="77")))
    error = failing(quick().upload, server.url, output, KEY, False)
    assert (error.status, error.lasting) == (code, lasting)
    assert error.retry_after == (77 if status != "200 OK" else 0)


# ---- Proxies -----------------------------------------------------------------


class Proxy:
    """A proxy for which every name is one server; `password`: what it wants to hear."""

    def __init__(self, target, password=""):
        self.target, self.password = target, password

    def __call__(self, talk):
        wanted = "Basic " + base64.b64encode(self.password.encode()).decode()
        if self.password and talk.headers.get("proxy-authorization") != wanted:
            return talk.answer(b"<html>", "407 Authentication Required", Content_Type="text/html")
        with socket.create_connection(("127.0.0.1", self.target.port), PATIENCE) as there:
            if talk.method == "CONNECT":
                talk.send(b"HTTP/1.1 200 Connected\r\nX-Proxy: yes\r\n\r\n")
            else:
                path = "/" + talk.target.partition("://")[2].partition("/")[2]
                headers = "".join("%s: %s\r\n" % h for h in talk.headers.items()
                                  if h[0] != "proxy-authorization")
                there.sendall(("%s %s HTTP/1.1\r\n%s\r\n" % (talk.method, path, headers)).encode())
            back = threading.Thread(target=copy, args=(there.recv, talk.sock), daemon=True)
            back.start()
            copy(talk.file.read1, there)
            back.join(PATIENCE)


def copy(read, to):
    with contextlib.suppress(OSError):
        while True:
            data = read(1 << 16)
            if not data:
                break
            to.sendall(data)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


def echo(talk):
    talk.answer({"host": talk.headers["host"], "path": talk.target, "body": len(talk.body()),
                 "nbytes": 0, "complete": True,
                 "secret": "proxy-authorization" in talk.headers})


def test_an_explicit_proxy_is_for_everything(peer, output, tmp_path):
    server = peer(echo)
    proxy = peer(Proxy(server, "ann:p@ss/ä"))
    for address in ("http://ann:p%40ss%2F%C3%A4@" + proxy.place, "ann:p%40ss%2Fä@" + proxy.place):
        transport = quick(proxy=address)
        for url in ("http://grid.example.org/a?b=1", server.url + "/a?b=1"):
            answer = transport.post_json(url, {"x": 1})
            assert (answer["path"], answer["body"], answer["secret"]) == ("/a?b=1", 8, False)
            assert answer["host"] == url.split("/")[2]
        transport.upload("http://grid.example.org/u", output, KEY, False)
    assert [t.method for t in proxy.log] == ["POST", "POST", "PUT"] * 2
    assert proxy.log[0].target == "http://grid.example.org/a?b=1"
    quick(proxy="none").post_json(server.url, {})
    assert len(proxy.log) == 6


ENVIRONMENT = {  # environment, url -> through the proxy?
    "lower case": ({"http_proxy": "P"}, "http://grid.example.org/", True),
    "upper case": ({"HTTP_PROXY": "P"}, "http://grid.example.org/", True),
    "of the other kind": ({"https_proxy": "P"}, "http://grid.example.org/", False),
    "not for this one": ({"http_proxy": "P", "no_proxy": "example.org"},
                         "http://grid.example.org/", False),
    "not for that one": ({"http_proxy": "P", "NO_PROXY": "example.com, .example.net"},
                         "http://grid.example.org/", True),
    "for none": ({"http_proxy": "P", "NO_PROXY": "*"}, "http://grid.example.org/", False),
    "not in the same room": ({"http_proxy": "P"}, "http://192.168.1.5:8080/", False),
    "nor for a name of the room": ({"http_proxy": "P"}, "http://raspberrypi:8080/", False),
    "nor here": ({"http_proxy": "P"}, "http://[::1]:8080/", False),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_proxies_of_the_environment(monkeypatch, case):
    environment, url, used = ENVIRONMENT[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, "http://10.0.0.9:3128" if value == "P" else value)
    proxy = v.Transport()._proxy(v.urllib.parse.urlsplit(url))
    assert proxy == (("10.0.0.9", 3128, {}) if used else None)
    assert v.Transport(proxy="none")._proxy(v.urllib.parse.urlsplit(url)) is None
    assert v.Transport(proxy="x:1")._proxy(v.urllib.parse.urlsplit(url)) == ("x", 1, {})


def test_a_proxy_of_the_environment_is_used(peer, monkeypatch):
    proxy = peer(Proxy(peer(echo)))
    monkeypatch.setenv("HTTP_PROXY", "http://" + proxy.place)
    assert quick().post_json("http://grid.example.org/x", {})["host"] == "grid.example.org"
    assert len(proxy.log) == 1


def test_a_proxy_that_refuses_blames_nobody_else(peer, pair):
    proxy = peer(Proxy(peer(echo), "ann:right"))
    transport = quick(proxy="http://ann:wrong@" + proxy.place)
    for url in ("http://grid.example.org/x", "https://grid.example.org/x"):
        error = failing(transport.post_json, url, {})
        assert (error.status, error.lasting) == (0, False)
        assert "the proxy wants a name and a password" in str(error) and "wrong" not in str(error)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        place = "127.0.0.1:%d" % sock.getsockname()[1]
    error = failing(quick(proxy=place).post_json, "http://grid.example.org/x", {})
    assert "through the proxy: nothing answers at " + place in str(error)


@pytest.mark.parametrize("text", ["socks5://h:1", "https://h:1", "http://", "http://h:port",
                                  "http://u:secret@:1"])
def test_a_proxy_that_is_none(text):
    with pytest.raises(ValueError, match="the proxy's address is not like") as caught:
        v.Transport(proxy=text)
    assert "secret" not in str(caught.value)


# ---- HTTPS -------------------------------------------------------------------


class Pair:
    """A certificate authority and servers' certificates of it, as files."""

    def __init__(self, folder):
        self.folder, self.ca = folder, folder / "ca.pem"
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        days = [datetime.timedelta(days=n) for n in (-20, -10, 10, 20)]
        self.times = [datetime.datetime.now(datetime.timezone.utc) + d for d in days]
        self.ca.write_bytes(self.certificate(self.key, self.name, [], (0, 3), True))
        self.make("good", "127.0.0.1", (0, 3))
        self.make("expired", "127.0.0.1", (0, 1))
        self.make("early", "127.0.0.1", (2, 3))
        self.make("other", "127.0.0.2", (0, 3))

    def certificate(self, key, name, names, times, is_ca=False):
        usage = dict.fromkeys("content_commitment key_encipherment data_encipherment key_agreement "
                              "encipher_only decipher_only".split(), False)
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self.name)
            .public_key(key.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(self.times[times[0]]).not_valid_after(self.times[times[1]])
            .add_extension(x509.BasicConstraints(is_ca, None), True)
            .add_extension(x509.KeyUsage(True, key_cert_sign=is_ca, crl_sign=is_ca, **usage), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(
                self.key.public_key()), False))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def make(self, name, address, times):
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("grid.example.org")]
        if name == "other":
            names = [x509.DNSName("elsewhere.example.org")]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        (self.folder / name).write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                              serialization.NoEncryption())
            + self.certificate(key, subject, names, times))

    def server(self, name):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / name)
        return context


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("tls"))


def test_https_with_the_projects_own_certificate(peer, pair, tmp_path, output, monkeypatch):
    server = peer(echo, pair.server("good"))
    assert quick(ca_file=str(pair.ca)).post_json(server.url + "/x", {})["path"] == "/x"
    big = peer(ranged(DATA), pair.server("good"))
    (tmp_path / "p").write_bytes(HALF)
    quick(ca_file=str(pair.ca)).download(of(DATA, big.url), tmp_path / "p", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    store = Store()
    quick(ca_file=str(pair.ca)).upload(peer(store, pair.server("good")).url, output, KEY, False)
    assert store.data == DATA
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.ca))
    assert quick().post_json(server.url + "/x", {})["path"] == "/x"


REFUSED = {"expired": "has expired", "early": "is not valid yet", "other": "is for another name",
           "good": "comes from nobody this computer trusts"}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_certificates_are_refused_in_plain_words(peer, pair, name):
    server = peer(echo, pair.server(name))
    transport = quick(ca_file=str(pair.ca) if name != "good" else "")
    error = failing(transport.post_json, server.url + "/x", {"authenticator": KEY})
    assert str(error).startswith("no connection: the certificate of %s %s" % (server.place,
                                                                              REFUSED[name]))
    assert (error.status, error.lasting, error.retry_after) == (0, False, 3600)
    assert ("--ca-file" in str(error)) == (name == "good")
    assert server.log == []  # Nothing was said to it.


def test_https_through_a_proxy(peer, pair):
    server = peer(echo, pair.server("good"))
    proxy = peer(Proxy(server, "ann:secret"))
    transport = quick(ca_file=str(pair.ca), proxy="http://ann:secret@" + proxy.place)
    answer = transport.post_json("https://grid.example.org/x", {"x": 1})
    assert answer["host"] == "grid.example.org" and answer["secret"] is False
    assert [(t.method, t.target) for t in proxy.log] == [("CONNECT", "grid.example.org:443")]
    error = failing(transport.post_json, "https://other.example.org/x", {})
    assert "the certificate of other.example.org is for another name" in str(error)


def test_no_https_there_or_nothing_but(peer, pair):
    url = peer(None, cls=Blunt).url.replace("http:", "https:")
    assert "is it http:// there?" in str(failing(quick().post_json, url, {}))
    url = peer(echo, pair.server("good")).url.replace("https:", "http:")
    assert failing(quick().post_json, url, {}).status == 0
    hanging = peer(Talk.hang)
    assert "no answer for 0.3 s" in str(
        failing(quick().post_json, hanging.url.replace("http:", "https:"), {}))


def test_a_file_without_certificates(tmp_path):
    (tmp_path / "x").write_text("no certificate")
    for path in (tmp_path / "x", tmp_path / "nothing"):
        with pytest.raises(ValueError, match="cannot read certificates from"):
            v.Transport(ca_file=str(path))


def test_checking_cannot_be_switched_off(pair):
    source = FILE.read_text(encoding="utf-8")
    for word in ("CERT_NONE", "CERT_OPTIONAL", "check_hostname", "_create_unverified"):
        assert word not in source
    context = v.safety(str(pair.ca))
    assert context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname


def test_a_python_without_ssl(monkeypatch, peer):
    monkeypatch.setattr(v, "ssl", None)
    assert quick().post_json(peer(echo).url, {})["path"] == "/"
    assert "no module ssl" in str(failing(quick().post_json, "https://127.0.0.1:1/", {}))
