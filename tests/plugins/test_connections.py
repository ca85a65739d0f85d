"""The thread of the network: requests that come together are answered together, with one commit."""

import contextlib
import gzip
import json
import re
import socket
import sys
import threading
import types

import pytest

import minigrid as m

NOW = 1_800_000_000
PATIENCE = 60  # seconds until something that does not end is a failure
APP = '''"""echo: i for i."""


def workunit(i):
    return {"input": i} if i < 40 else None


def compute(input):
    return input
'''


@pytest.fixture
def server(tmp_path, plugins, monkeypatch):
    """A server in this process: its address, the sizes of its groups, and who answered."""
    (tmp_path / "echo.py").write_text(APP)
    (tmp_path / "setup.cfg").write_text("[accounts]\njoins_per_hour = 0\n")
    monkeypatch.chdir(tmp_path)
    seen = types.SimpleNamespace(groups=[], threads=[], open=[])
    seen.stopped = lambda now: seen.threads.append(threading.current_thread().name)
    commit = m.Writer._commit

    def counted(self, tasks):
        seen.groups.append(sum(future is None for future, _ in tasks))
        commit(self, tasks)

    monkeypatch.setattr(m.Writer, "_commit", counted)
    m.plugins.append(seen)
    try:
        with m.running(m.Settings(data="data", host="127.0.0.1", port=0), ["echo.py"],
                       lambda: NOW) as url:
            seen.port = int(re.search(r":(\d+)$", url)[1])
            yield seen
    finally:
        m.plugins.remove(seen)
        for connection in seen.open:
            connection.close()


class Volunteer:
    """Somebody who has joined, and one connection."""

    def __init__(self, server, name):
        self.connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        server.open.append(self.connection)
        self.rest = b""
        self.send("/register", {"nickname": name})
        self.key = self.answer()[1]["authenticator"]

    def send(self, path, body, **headers):
        """Send a request; a dict is sent as JSON."""
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}",
                 *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items())]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def ask(self, **more):
        """Ask for a job."""
        self.send("/scheduler", {"authenticator": self.key, "host_cpid": self.key,
                                 "work_req_seconds": 1, **more})

    def answer(self):
        """Return the status and the body of the next answer."""
        while b"\r\n\r\n" not in self.rest:
            self.rest += self.more()
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
        while len(self.rest) < length:
            self.rest += self.more()
        body, self.rest = self.rest[:length], self.rest[length:]
        return int(head.split()[1]), json.loads(body)

    def more(self):
        data = self.connection.recv(1 << 16)
        assert data, "the server has closed the connection"
        return data


@contextlib.contextmanager
def busy():
    """Keep the writer busy, which is the thread of the network; what comes meanwhile waits."""
    ready, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=m.project.write, args=[
        lambda: (ready.set(), release.wait(PATIENCE))])
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield
    finally:
        release.set()
        thread.join(PATIENCE)


def test_requests_that_come_together_share_a_commit(server):
    volunteers = [Volunteer(server, f"volunteer {i}") for i in range(36)]
    with busy():
        del server.groups[:], server.threads[:]
        for volunteer in volunteers:
            volunteer.ask()
    answers = [volunteer.answer() for volunteer in volunteers]
    assert [status for status, _ in answers] == [200] * 36
    names = [job["name"] for _, answer in answers for job in answer["assignments"]]
    assert len(names) == len(set(names)) == 36
    assert [n for n in server.groups if n] == [32, 4], "so that nobody waits long"
    assert set(server.threads) == {"http"}


def test_one_that_is_wrong_disturbs_nobody(server):
    first, wrong, gone, last = (Volunteer(server, name) for name in "abcd")
    with busy():
        first.ask()
        wrong.send("/scheduler", b"no JSON")
        gone.ask()
        gone.connection.close()
        last.ask()
    assert wrong.answer()[0] == 400
    assert [len(each.answer()[1]["assignments"]) for each in (first, last)] == [1, 1]
    first.ask()  # on the same connection
    assert first.answer()[0] == 200
    assert not m.project.counts["server errors"]


def test_large_and_packed_requests_have_threads_of_their_own(server):
    """Reading them takes long; all others would wait."""
    volunteer = Volunteer(server, "a")
    for kind in ("small", "large", "packed"):
        del server.threads[:]
        if kind == "packed":
            xml = b"<scheduler_request><authenticator>x</authenticator></scheduler_request>"
            volunteer.send("/boinc/scheduler", gzip.compress(xml), Content_Encoding="gzip")
            while b"</scheduler_reply>" not in volunteer.rest:
                volunteer.rest += volunteer.more()
        else:
            volunteer.ask(padding="x" * (70_000 * (kind == "large")))
            assert volunteer.answer()[0] == 200
        assert [name == "http" for name in server.threads] == [kind == "small"], kind


def test_requests_sent_in_one_go_are_answered_in_their_order(server):
    volunteer = Volunteer(server, "a")
    with busy():
        volunteer.ask()
        volunteer.send("/scheduler", b"{}")
        volunteer.ask(work_req_seconds=0)
    assert [volunteer.answer()[0] for _ in range(3)] == [200, 400, 200]


def test_nothing_is_sent_before_it_is_durable(server, monkeypatch):
    """An answer that the store cannot keep is another one: it says so, and gives nothing."""
    volunteer = Volunteer(server, "a")
    with monkeypatch.context() as patch:
        patch.setattr(m, "count_firings", lambda done: done and m.db.execute_sql("SELECT no"))
        volunteer.ask()
        status, answer = volunteer.answer()
    assert status == 200 and answer["assignments"] == []
    assert "has a problem on its side" in answer["messages"][0]["text"]
    volunteer.ask()
    assert len(volunteer.answer()[1]["assignments"]) == 1


def test_a_fault_in_an_answer_is_its_own(server, monkeypatch):
    """Whatever happens while one is prepared, the thread of the network goes on."""
    connections = sys.modules["minigrid_plugin_connections"]
    volunteers = [Volunteer(server, name) for name in "ab"]
    service = connections.WSGITask.service

    def broken(self):
        if self.request.path == "/scheduler" and b"break me" in self.request.get_body_stream(
                ).getvalue():
            raise RuntimeError("a fault of ours")
        service(self)

    with monkeypatch.context() as patch:
        patch.setattr(connections.WSGITask, "service", broken)
        with busy():
            volunteers[0].ask(client_version="break me")
            volunteers[1].ask()
        assert len(volunteers[1].answer()[1]["assignments"]) == 1
        data = volunteers[0].more()
    assert b" 500 " in data.split(b"\r\n")[0]
