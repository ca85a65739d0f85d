"""The real server process on loopback: what only sockets show."""

import contextlib
import http.client
import json
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def serving(directory, settings=""):
    """A server with the smallest application; yields a function that sends one request."""
    (directory / "setup.cfg").write_text(f"[minigrid]\n{settings}\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--host", "127.0.0.1", "--port", "0",
         "--apps", str(ROOT / "plugins" / "apps" / "squares.py")],
        cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.strip() for line in process.stdout if line.startswith("  http://"))
        netloc = urllib.parse.urlsplit(url).netloc

        def send(method, path, body=None, headers={}):
            connection = http.client.HTTPConnection(netloc, timeout=60)
            with contextlib.closing(connection):
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()

        yield send
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
        process.stdout.close()


def ask_for_work(send, headers):
    """Join and ask for work; return the address of the first input."""
    _, text = send("POST", "/register", json.dumps({"nickname": "a"}))
    key = json.loads(text)["authenticator"]
    _, text = send("POST", "/scheduler", json.dumps(
        {"authenticator": key, "work_req_seconds": 1, "host": {"p_fpops": 3e7}}), headers)
    return json.loads(text)["assignments"][0]["input"]["url"]


FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "grid.example.org"}


@pytest.mark.parametrize("settings, seen", [("", "http://127.0.0.1:"),
                                            ("proxy = 127.0.0.1", "https://grid.example.org/")])
def test_a_server_in_front_is_believed_if_the_settings_name_it(tmp_path, settings, seen):
    """Addresses are those by which the client came [D5]; anybody could send these headers."""
    with serving(tmp_path, settings) as send:
        assert ask_for_work(send, FORWARDED).startswith(seen)


def test_a_body_of_100_megabytes_is_refused_and_the_server_lives_on(tmp_path):
    with serving(tmp_path, "upload_bytes_max = 1000000") as send:
        for path in ("/scheduler", "/register", "/upload/squares_0_0_out"):
            method = "PUT" if path.startswith("/upload") else "POST"
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                assert send(method, path, bytes(100_000_000))[0] == 413
        status, text = send("GET", "/status.json")
        assert status == 200 and json.loads(text)["apps"][0]["name"] == "squares"


def test_half_sent_requests_keep_nobody_waiting(tmp_path):
    """Twenty clients that never finish their request do not occupy the server's workers."""
    with serving(tmp_path) as send, contextlib.ExitStack() as stack:
        url = urllib.parse.urlsplit(ask_for_work(send, {}))
        for _ in range(20):
            slow = stack.enter_context(contextlib.closing(
                http.client.HTTPConnection(url.netloc, timeout=60)))
            slow.putrequest("POST", "/scheduler")
            slow.putheader("Content-Length", "1000")
            slow.endheaders()
            slow.send(b"{")
        assert send("GET", "/status.json")[0] == 200
