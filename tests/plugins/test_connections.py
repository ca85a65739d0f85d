"""The thread of the network: requests that come together are answered together, with one commit."""

import contextlib
import gzip
import hashlib
import json
import re
import socket
import sys
import threading
import types

import pytest
from web import HEADER, NOW, PATIENCE, PLAIN, QUERY

import minigrid as m

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

    def send(self, path, body, method="POST", **headers):
        """Send a request; a dict is sent as JSON."""
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [f"{method} {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}",
                 *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items())]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def ask(self, **more):
        """Ask for a job."""
        self.send("/scheduler", {"authenticator": self.key, "host_cpid": self.key,
                                 "work_req_seconds": 1, **more})

    def job(self):
        """Ask for a job; return it."""
        self.ask()
        (job,) = self.answer()[1]["assignments"]
        return job

    def upload(self, job, content, **headers):
        """Send an output."""
        self.send(f"/upload/{job['output']['name']}", content, "PUT",
                  Authorization=f"Bearer {self.key}", **headers)

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


FULL = b"x" * (1 << 14)  # the largest small output
OUTPUTS = {  # content, Content-Range: status, is it answered in the thread of the network?
    "whole": (b"123", "bytes 0-2/3", 200, True),
    "without a range": (b"123", None, 200, True),
    "empty": (b"", "bytes */0", 200, True),
    "the largest": (FULL, f"bytes 0-{len(FULL) - 1}/{len(FULL)}", 200, True),
    "too large": (FULL + b"x", f"bytes 0-{len(FULL)}/{len(FULL) + 1}", 200, False),
    "too large, without a range": (FULL + b"x", None, 200, False),
    "a beginning": (b"123", "bytes 0-2/9", 200, False),
    "an end": (b"123", "bytes 6-8/9", 409, False),
    "no range": (b"123", "bytes 0-2", 400, False)}


@pytest.mark.parametrize("case", OUTPUTS)
def test_small_outputs_are_answered_at_once(server, monkeypatch, case):
    """What is flushed to a file would hold up all others; what the store keeps does not [D13]."""
    content, span, wanted, at_once = OUTPUTS[case]
    volunteer, files, threads = Volunteer(server, "a"), sys.modules["minigrid_plugin_files"], []
    job, may_upload = volunteer.job(), files.may_upload
    monkeypatch.setattr(files, "may_upload", lambda *given: threads.append(
        threading.current_thread().name) or may_upload(*given))
    volunteer.upload(job, content, **({"Content_Range": span} if span else {}))
    status, answer = volunteer.answer()
    assert (status, [name == "http" for name in threads]) == (wanted, [at_once])
    if answer.get("complete"):
        assert files.file_content("upload", job["output"]["name"]) == content
    assert answer.get("complete") == (None if status != 200 else case != "a beginning")


@pytest.mark.parametrize("offset, nbytes, at_once", [
    (0, 3, True), (0, len(FULL), True), (0, len(FULL) + 1, False), (1, 3, False)])
def test_small_outputs_of_boinc_are_answered_at_once(
        server, monkeypatch, offset, nbytes, at_once):
    """[WIRE 10] The same with the other protocol, and a question for a size always."""
    volunteer, uploads, threads = Volunteer(server, "a"), boinc().uploads, []
    name, content, wanted = volunteer.job()["output"]["name"], FULL * 2, uploads.wanted
    monkeypatch.setattr(uploads, "wanted", lambda *given: threads.append(
        threading.current_thread().name) or wanted(*given))
    content = content[:nbytes]
    body = HEADER.format(name=name, nbytes=nbytes, offset=offset, max_nbytes=10**6,
                         signature=uploads.keys.certificate(name, 10**6),
                         md5=hashlib.md5(content).hexdigest()).encode() + content[offset:]
    for text in (body, QUERY.format(name).encode()):
        volunteer.send(PLAIN, text)
        while b"</data_server_reply>" not in volunteer.rest:
            volunteer.rest += volunteer.more()
        told, volunteer.rest = volunteer.rest, b""
    assert [thread == "http" for thread in threads] == [at_once, True]
    size = 0 if offset else nbytes  # The beginning of that one never came.
    assert f"<file_size>{size}</file_size>".encode() in told


def boinc():
    return sys.modules["minigrid_plugin_boinc"]


def test_outputs_share_a_commit_and_are_durable_before_they_are_acknowledged(server, monkeypatch):
    """[D4 D13] What the store refuses was not taken, and is when it comes again."""
    ann, bob = Volunteer(server, "ann"), Volunteer(server, "bob")
    jobs = ann.job(), bob.job()
    with monkeypatch.context() as patch:
        patch.setattr(m, "count_firings", lambda done: m.db.execute_sql("SELECT no"))
        ann.upload(jobs[0], b"1")
        assert ann.answer()[0] == 503
    (uploaded,) = m.plugged("uploaded")
    assert uploaded(jobs[0]["output"]["name"]) == (0, False)
    with busy():
        del server.groups[:]
        ann.upload(jobs[0], b"1")
        bob.upload(jobs[1], b"22")
    assert [each.answer()[1] for each in (ann, bob)] == [
        {"nbytes": 1, "complete": True}, {"nbytes": 2, "complete": True}]
    assert [n for n in server.groups if n] == [2]
    assert [uploaded(job["output"]["name"]) for job in jobs] == [(1, True), (2, True)]


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
