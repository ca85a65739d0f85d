"""A hostile project against the volunteer's client: it signs its own files, so its programs do run,
and an honest project lives beside it. Whatever it tries, the honest one's jobs are done, nothing
outside its own directory is written, and the client goes on [D11 S1]."""

import functools
import io
import json
import os
import random
import stat
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from volunteer_world import (NOW, PATIENCE, C, Server, Signer, assignment, crash, make_client,
                             open_job, project, reply, v)

EVIL = Signer()


class Hostile(Server):
    """A project that has a key of its own and turns its replies into something else: `twist` gets
    the good reply and the request, and returns JSON or bytes, or answers by itself (None)."""

    def __init__(self):
        super().__init__()
        self.signer, self.twist, self.raw = EVIL, lambda answer, request: answer, {}

    def do_register(self, h, body, fault):
        return dict(super().do_register(h, body, fault), authenticator="e" * 32)

    def do_scheduler(self, h, body, fault):
        return self.twist(super().do_scheduler(h, body, fault), json.loads(body))

    def handle(self, h):
        kind = "%s %s" % (h.command, h.path.split("/")[1])
        if kind not in self.raw:
            return super().handle(h)
        h.rfile.read(int(h.headers.get("Content-Length") or 0))
        self.log.append("%s %s" % (h.command, h.path))
        h.close_connection = True
        self.raw[kind](h)


@pytest.fixture
def evil():
    s = Hostile()
    yield s
    s.close()


def seen(root, but=()):
    """All that is below a directory: type, mode and content of each entry, no link followed."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in but]
        for name in folders + names:
            path = os.path.join(folder, name)
            kind = os.lstat(path)
            content = os.readlink(path) if stat.S_ISLNK(kind.st_mode) else (
                Path(path).read_bytes() if stat.S_ISREG(kind.st_mode) else "")
            found[path] = stat.S_IFMT(kind.st_mode), stat.S_IMODE(kind.st_mode), content
    return found


@pytest.fixture
def world(tmp_path, monkeypatch):
    """What lies around the client: a home with a secret, a neighbour's file; none may change."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    (tmp_path / "neighbour.txt").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    before = seen(tmp_path)
    yield tmp_path
    assert seen(tmp_path, [str(tmp_path / "client")]) == before


def check_client(client, evil, honest, clean=True):
    """Nothing is in the client's directory but what belongs there; the state can be read."""
    folder = client.directory
    assert {p.name for p in folder.iterdir()} <= {"client.json", "harness.py", "slots", "projects"}
    bad, good = [p.folder for p in client.projects]
    assert {str(p.relative_to(folder)) for p in (folder / "projects").iterdir()} == {bad, good}
    for f in (folder / good / "files").iterdir():
        assert f.read_bytes() == honest.files[f.name]
    for path in (folder / bad).rglob("*"):
        assert path.parent.parent == folder / bad or path.parent == folder / bad
    if clean:
        assert list((folder / "slots").iterdir()) == []
    client.dirty = client.urgent = True
    client._save()
    assert (folder / "client.json").stat().st_size < 30e6
    json.dumps(client.snapshot())
    assert len(v.load_state(folder).projects) == 2


def live(client, clock, until, pace=2.0):
    """Turn the client until something holds, without waiting for what may never end."""
    for _ in range(1500):
        client.step(clock.now)
        if until():
            return
        client.wait(0.01)
        clock.now += pace
    pytest.fail("it never happened; " + client.voice.errors.getvalue()[-2000:])


def honest_done(client, clock, honest, n=3, first=900, pace=2.0):
    """The honest project's jobs get done."""
    for i in range(first, first + n):
        honest.add(i)
    names = {"wu_%d_0" % i for i in range(first, first + n)}
    live(client, clock, lambda: names <= set(honest.store), pace)
    assert {honest.store[name]["exit_status"] for name in names} == {0}


# ---- Replies: every field of every object, replaced by everything it is not ----------------------


class Scripted:
    """A transport without a network: the hostile project's replies are as told, no file comes."""

    def __init__(self, value):
        self.value = value

    def post_json(self, url, value):
        return self.value

    def get_text(self, url, nbytes_max=0):
        return "", url

    def download(self, *args):
        raise v.TransportError(404, "none", told=True)

    def upload(self, *args):
        raise v.TransportError(404, "none", told=True)


def good_reply():
    """A reply with all that a reply may have."""
    one = assignment("ev_1_0", b"def compute(input): return 1\n", base="http://evil")
    more = dict(one["input"], name="more.dat", open_name="more.dat",
                url="http://evil/download/more.dat")
    one.update(platform="python", ncpus=1.0, command_line="a b", inputs=[more])
    one["files"][0].update(open_name="main.py", executable=False)
    one = EVIL.sign_files(one)
    return reply(
        assignments=[one], acks=["ev_0_0"], aborts=["ev_5_0"], aborts_if_not_started=["ev_6_0"],
        messages=[{"text": "hello", "priority": "notice"}], signing_key=EVIL.text,
        trickles=[{"result": "ev_1_0", "text": "go on"}], trickles_taken=True,
        signing_key_changes=[{"key": EVIL.text, "signature": "00"}], userid=4,
        addresses=["http://evil", "http://evil2"], user_total_credit=3.5, http_date=NOW)


DEEP = "so deep that it can just be read, by a thread"
WRONG = [None, True, -1, 0, 1e308, 10 ** 4000, float("inf"), float("nan"), "", "../../x",
         "\0\ud800", "x" * 10 ** 5, [], [[]], {}, {"x": [None]}, DEEP, ["a"] * 1000]


def places_in(value, path=()):
    """The paths of all values in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(
        value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places_in(part, path + (key,))


def replaced(value, path, wrong):
    """A copy of a JSON value with another one at a place."""
    if not path:
        return wrong
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], wrong)
    return copy


def quiet():
    return v.Voice(stream=io.StringIO(), errors=io.StringIO())


def scripted_client(tmp_path):
    v_client = v.Client(tmp_path / "client", [("http://evil", None), ("http://honest", None)],
                        v.Options(nickname="x"), Scripted({}), random.Random(1), quiet())
    for p in v_client.projects:
        p.authenticator, p.hostid = "a" * 32, 3
    return v_client


def hear(client, value):
    """Let the client hear a reply of the hostile project, and turn."""
    evil, honest = client.projects
    evil.jobs = []
    for name in ("ev_0_0", "ev_5_0"):
        evil.adopt(open_job(name))
    honest.jobs = []
    honest.adopt(open_job("ev_0_0"))  # The same names, but another project's jobs.
    honest.adopt(open_job("ev_5_0"))
    evil.fatal, evil.key, evil.min_rpc_time, evil.authenticator = "", "", 0.0, "a" * 32
    client.op.session, client.op.left = "get-work", []
    client.op.action = v.Action("rpc", evil, evil.url, v.Request([], 10.0, 1))
    if isinstance(value, dict):  # Other JSON does not come this far.
        client._replied(client.op.action, NOW, value, None)
    client.now = NOW
    client._start_transfers()
    v.queue_of(client.projects, client._limits())
    v.next_for_work(client.projects, client._limits(), NOW)
    assert [(job.name, job.over) for job in honest.jobs] == [("ev_0_0", False), ("ev_5_0", False)]
    assert honest.min_rpc_time == 0 and honest.key == "" and len(evil.jobs) < 5
    assert evil.min_rpc_time <= NOW + v.WAIT_MAX
    for p in client.projects:
        v.next_job([job for job in p.jobs if job.to_compute], [], client._limits(), NOW)
        for job in p.jobs:
            assert v.local_deadline(job, p) < 1e12
    json.loads(json.dumps(client.snapshot()))


@functools.lru_cache(1)
def deepest():
    """The deepest JSON that the thread of a request can read here."""
    low, high = 1, 200000
    while high - low > 1:
        n = (low + high) // 2
        read = in_thread(lambda: v.json_object(b'{"x":' + b"[" * n + b"]" * n + b"}"))
        low, high = (n, high) if read else (low, n)
    return b"[" * (low - 20) + b"]" * (low - 20)


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def over_the_wire(value):
    """What arrives of a JSON value."""
    data = json.dumps(value).encode().replace(json.dumps(DEEP).encode(), deepest())
    return in_thread(lambda: v.json_object(data)) if b"[[[[[" in data else v.json_object(data)


def test_every_value_of_a_reply_replaced_by_every_wrong_one(tmp_path):
    """The files are signed before and after: what is signed comes through, as does what is not."""
    client, good = scripted_client(tmp_path), good_reply()
    client._begin = lambda key, work, done: None
    hear(client, over_the_wire(good))
    assert [job.name for job in client.projects[0].jobs][-1:] == ["ev_1_0"]
    for path in places_in(good):
        for wrong in WRONG:
            value = replaced(good, path, wrong)
            hear(client, over_the_wire(value))
            try:
                value["assignments"] = [EVIL.sign_files(a) for a in value["assignments"]]
            except (TypeError, ValueError, KeyError, AttributeError):
                continue
            hear(client, over_the_wire(value))
    client.dirty = client.urgent = True
    client._save()
    assert v.load_state(tmp_path / "client")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["ev_0_0", "ev_5_0", "http://evil", "python", "a.py", EVIL.text]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        sorted({str(key) for path in places_in(good_reply()) for key in path[-1:]})), inner,
        max_size=6), max_leaves=20)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None,
          derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(good_reply())), VALUES, max_size=8),
       st.lists(VALUES, max_size=3))
def test_any_json_is_heard(tmp_path, more, assignments):
    if not hasattr(test_any_json_is_heard, "client"):
        test_any_json_is_heard.client = scripted_client(tmp_path)
        test_any_json_is_heard.client._begin = lambda key, work, done: None
    hear(test_any_json_is_heard.client, dict({"hostid": 3}, **dict(more, assignments=assignments)))
    hear(test_any_json_is_heard.client, dict(good_reply(), **more))


# ---- Replies over the wire -----------------------------------------------------------------------


def with_(**more):
    """A twist that puts something into every reply."""
    return lambda answer, request: dict(answer, **more)


def as_bytes(data):
    return lambda answer, request: data


def job_with(**more):
    """A twist that gives jobs without end, each with something odd, asked or not."""
    def twist(answer, request):
        n = request["rpc_seqno"]
        a = assignment("ev_%d_0" % n, b"def compute(input): return 1\n", base="http://127.0.0.1:1")
        return dict(answer, assignments=[EVIL.sign_files(dict(a, **more))])
    return twist


def many(n, **more):
    a = dict(assignment("x", base="http://127.0.0.1:1"), **more)
    return [dict(a, name="ev_%d_0" % i) for i in range(n)]


def send(h, head, blocks):
    """Answer by blocks of bytes until nobody listens any more."""
    try:
        h.wfile.write(b"HTTP/1.1 " + head + b"\r\n\r\n")
        for block in blocks:
            h.wfile.write(block)
    except OSError:
        pass


def endless(block, seconds=0.0, head=b"200 OK"):
    def answer(h):
        def blocks():
            while True:
                time.sleep(seconds)
                yield block
        send(h, head, blocks())
    return answer


def key_chain(n):
    return [{"key": EVIL.text, "signature": "0" * 512}] * n


NAMES = ["../../../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "con", "NUL.txt", ".", "..", ".hidden",
         "a.", "job.json", "x" * 300, "\ud800", "a\nb", "C:x", "client.json/../x", ""]
REPLIES = {
    "100,000 jobs": with_(assignments=many(20000, files=[])),
    "jobs by the hundred, for ever": lambda answer, request: dict(answer, assignments=[
        dict(a, name="%s_%d" % (a["name"], request["rpc_seqno"])) for a in many(200, files=[])]),
    "the same job 100,000 times": with_(assignments=[EVIL.sign_files(many(1)[0])] * 20000),
    "too large": as_bytes(b'{"hostid": 3, "x": "' + b"x" * 33 * 2 ** 20),
    "deep": as_bytes(b'{"hostid": 3, "x": ' + b"[" * 10 ** 6),
    "deep below": with_(messages=DEEP, acks=DEEP, trickles=[{"text": DEEP}], addresses=[DEEP]),
    "lists without end": as_bytes(b'{"hostid": 3, "x": [' + b"[]," * 5 * 10 ** 6 + b"0]}"),
    "10**5000": as_bytes(b'{"hostid": 1' + b"0" * 5000 + b"}"),
    "infinite": as_bytes(b'{"hostid": 1e400, "request_delay": Infinity, "server_time": NaN}'),
    "infinite delay": as_bytes(b'{"hostid": 3, "request_delay": 1e400, "server_time": -1e400}'),
    "a long delay": with_(request_delay=1e9),
    "another time": with_(server_time=9e10),
    "no object": as_bytes(b"[1, 2]"),
    "100,000 messages": with_(messages=[{"text": "\33[2J\7 buy %d" % i, "priority": "notice"}
                                        for i in range(100000)]),
    "the neighbour's jobs": with_(acks=["wu_%d_0" % i for i in range(900, 910)],
                                  aborts=["wu_%d_0" % i for i in range(900, 910)],
                                  aborts_if_not_started=["wu_%d_0" % i for i in range(900, 910)]),
    "a chain of keys": with_(signing_key=Signer().text, signing_key_changes=key_chain(10 ** 4)),
    "a weak key": with_(signing_key="minigrid-rsa-1 %x %x" % (EVIL.n >> 1024, 65537)),
    "an empty key": with_(signing_key="minigrid-rsa-1 0 0"),
    "100,000 addresses": with_(addresses=["http://127.0.0.1:1/%d" % i for i in range(100000)]),
    "trickles of 30 MB": with_(trickles=[{"result": "x", "text": "y" * 10 ** 6}] * 30),
    "names": lambda answer, request: dict(answer, assignments=[
        dict(many(1)[0], name=name) for name in NAMES] + [EVIL.sign_files(dict(
            many(1)[0], name="ev_%d_%d" % (request["rpc_seqno"], i), workunit=name,
            output={"name": name, "url": "http://127.0.0.1:1/", "nbytes_max": 9},
            input=dict(many(1)[0]["input"], name=name))) for i, name in enumerate(NAMES)]),
    "10,000 files": job_with(files=many(1)[0]["files"] * 10000),
    "10**15 bytes": job_with(input=dict(many(1)[0]["input"], nbytes=10 ** 15)),
    "past deadlines": job_with(report_deadline=5.0),
    "no deadline": job_with(report_deadline=float("inf"), delay_bound=1e9),
    "bounds": job_with(rsc_fpops_est=float("inf"), rsc_fpops_bound=-1, rsc_memory_bound=-1,
                       rsc_disk_bound=float("inf"), ncpus=1e9),
    "huge estimates": job_with(rsc_fpops_est=1e30, rsc_fpops_bound=1e30, ncpus=4096),
    "files of others": job_with(input=dict(many(1)[0]["input"], url="file:///etc/passwd")),
    "acknowledges nothing": lambda answer, request: dict(answer, acks=[], request_delay=0),
}


@pytest.mark.parametrize("case", REPLIES)
def test_replies(world, evil, server, clock, case):
    def twist(answer, request):
        value = REPLIES[case](answer, request)
        return value if isinstance(value, bytes) else json.dumps(value).encode().replace(
            json.dumps(DEEP).encode(), deepest())

    evil.twist = twist
    for i in range(4):
        evil.add(i)
    client = make_client(world, evil, server)
    live(client, clock, lambda: len(evil.requests) > 0)
    honest_done(client, clock, server)
    honest_done(client, clock, server, 2, 910)
    assert {r["authenticator"] for r in server.requests} == {"%032x" % 1}
    assert len(evil.requests) < 60, "asked again and again"
    assert len(client.voice.errors.getvalue()) + len(client.voice.stream.getvalue()) < 10 ** 5
    assert "\33" not in client.voice.errors.getvalue() + client.voice.stream.getvalue()
    check_client(client, evil, server, clean=False)
    crash(client)


def moved(to):
    return lambda h: send(h, b"307 Moved\r\nContent-Length: 0\r\nLocation: " + to.encode(), [])


def page(data):
    return lambda h: send(h, b"200 OK\r\nContent-Type: text/html", [data])


CONNECTIONS = {  # id: what the hostile server does instead of answering
    "endless reply": {"POST scheduler": endless(b" " * 65536)},
    "a drip": {"POST scheduler": endless(b" ", 0.02)},
    "endless headers": {"POST scheduler": endless(b"X-A: b\r\n" * 50, head=b"200 OK\r\nX: y")},
    "chunks of 2**70": {"POST scheduler": endless(
        b"fffffffffffffffff\r\nxx", 0.01, b"200 OK\r\nTransfer-Encoding: chunked")},
    "a length below zero": {"POST scheduler": endless(
        b" " * 999, 0.001, b"200 OK\r\nContent-Length: -5")},
    "joining for ever": {"POST register": endless(b" ", 0.02)},
    "downloads that drip": {"GET download": endless(b"x", 0.05)},
    "downloads without end": {"GET download": endless(b"x" * 65536)},
    "uploads that drip": {"PUT upload": endless(b" ", 0.05)},
    "a front page that is none": {"POST scheduler": moved("http://127.0.0.1:1/scheduler"),
                                  "GET ": page(b"<![<!" * 9999 + b"<!DOCTYPE [<![x")},
    "a front page of a gigabyte": {"POST scheduler": moved("http://127.0.0.1:1/scheduler"),
                                   "GET ": endless(b"<a b=" * 9999)},
}


@pytest.mark.parametrize("case", CONNECTIONS)
def test_connections(world, evil, server, clock, case):
    for i in range(4):
        evil.add(i)
    client = make_client(world, evil, server)
    client.transport = v.Transport(timeout=1.0, slow=1.0, total=1.0)
    evil.raw = CONNECTIONS[case]
    kinds = {kind.replace(" ", " /") for kind in evil.raw}
    honest_done(client, clock, server)
    live(client, clock, lambda: all(any(line.startswith(kind) for line in evil.log)
                                    for kind in kinds))
    honest_done(client, clock, server, 2, 910)
    check_client(client, evil, server, clean=False)
    sizes = [p.stat().st_size for p in (world / "client").rglob("*") if p.is_file()]
    assert sum(sizes) < 10 ** 6
    crash_now(client)


def crash_now(client):
    """As crash(), but transfers that never end are not waited for."""
    client.busy = {key for key in client.busy if key[0] == "run"}
    for task in client.tasks.values():
        task.kill()
    while client.busy:
        client.busy.discard(client.events.get(timeout=PATIENCE)[0])


def test_nobody_is_shown_our_secret(world, evil, server, clock):
    """Sent to the neighbour or to a service of this computer, the client does not go there with the
    authenticator, and not with a body."""
    heard = []
    service = Hostile()
    service.handle = lambda h: heard.append((h.command, h.path, dict(h.headers)))
    client = make_client(world, evil, server)
    for there in (server.url, service.url):
        evil.raw = {"POST scheduler": moved(there + "/scheduler"),
                    "PUT upload": moved(there + "/upload/wu_900_0")}
        evil.add(1)
        honest_done(client, clock, server, 1, 900 + len(server.store))
        evil.raw.pop("POST scheduler")
        client.projects[0].min_rpc_time = client.projects[0].work_time = 0.0
        live(client, clock, lambda: any(line.startswith("PUT") for line in evil.log))
    service.close()
    assert heard == [] and "e" * 32 not in str(server.requests)
    crash_now(client)


NEAR = ["http://127.0.0.1/", "http://localhost:631/", "http://localhost./", "http://127.1/",
        "http://2130706433/", "http://0x7f.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/",
        "http://192.168.1.1/reboot", "http://10.0.0.1/", "http://router/", "http://nas.local/",
        "http://169.254.169.254/latest/meta-data", "http://0.0.0.0:8080/"]


@pytest.mark.parametrize("url", NEAR)
def test_the_internet_does_not_send_us_to_our_neighbours(url):
    """A router's page, say: opened by a mere request. Among neighbours it is usual."""
    for base in ("http://example.org", "https://8.8.8.8:8443"):
        with pytest.raises(ValueError, match="network|web address"):
            v.web_address(base, url)
        assert v.usable_addresses([url.rstrip("/")], base.replace("https", "http")) == []
    assert v.web_address("http://192.168.1.5:8080", url) == url
    assert v.web_address("http://example.org", "http://files.example.org/x")
    assert v.web_address("http://example.org", "/x") == "http://example.org/x"


def test_a_file_that_changes_its_content(world, evil, server, clock):
    """Each job computes with what was announced for it, whatever has the same name, or fails: jobs
    that take the file from each other do so a few times only."""
    for n in range(4):
        evil.add(n, data=b"%d" % n)
        evil.work[-1]["input"]["name"] = "same.in"
    evil.twist = lambda answer, request: dict(answer, assignments=[
        dict(a, input=dict(a["input"], url="%s/download/wu_%s.in" % (evil.url, a["name"][3:])))
        for a in answer["assignments"]])
    client = make_client(world, evil, server)
    honest_done(client, clock, server)
    live(client, clock, lambda: len(evil.store) == 4)
    right = {"wu_%d_0" % n: b"%d" % n ** 2 for n in range(4)}
    came = {name: bytes(data) for name, data in evil.uploads.items()}
    assert came and came.items() <= right.items()
    assert {name for name, report in evil.store.items() if report["exit_status"] == 0} == set(came)
    check_client(client, evil, server)


# ---- Jobs ----------------------------------------------------------------------------------------
#
# Signed by their project, so they run. What only the sandbox stops is tried with a sandbox only.

HEAD = """import ctypes, json, os, resource, signal, socket, stat, sys, threading, time
def attempt(what):
    try:
        return what() or True
    except (OSError, ValueError) as e:
        return False
def compute(given):
    HERE, CLIENT = os.getcwd(), given["client"]
"""
INSIDE = {  # id: (body, (client_state, exit_status), more of the assignment)
    "output is a link": ("os.symlink(CLIENT, 'output'); os._exit(0)", (3, 195), {}),
    "output is a pipe": ("os.mkfifo('output'); os._exit(0)", (3, 195), {}),
    "output is a directory": ("os.mkdir('output'); os._exit(0)", (3, 195), {}),
    "output has two names": ("""
        open('x', 'w').close()
        os.link('x', 'output'); os._exit(0)""", (3, 195), {}),
    "no output": ("os._exit(0)", (3, 195), {}),
    "stderr is a link": ("""
        os.remove('stderr.txt')
        os.symlink(CLIENT, 'stderr.txt'); os._exit(7)""", (3, 195), {}),
    "stderr is a pipe": ("os.remove('stderr.txt'); os.mkfifo('stderr.txt'); os._exit(7)",
                         (3, 195), {}),
    "progress is a pipe": ("os.mkfifo('progress.txt'); time.sleep(0.3)", (5, 0), {}),
    "progress is nonsense": ("""
        for text in (b'nan', b'-inf', b'9' * 9999, b'\\xff\\0', b'1_0'):
            with open('progress.txt', 'wb') as f: f.write(text)
            time.sleep(0.1)""", (5, 0), {}),
    "messages are links and pipes": ("""
        os.symlink(CLIENT, 'trickle_up.0'); os.mkfifo('trickle_up.1'); os.mkdir('trickle_up.2')
        open('trickle_up.999999999999999', 'wb').write(b'\\xff\\0' * 99999)
        open('trickle_up.' + '9' * 200, 'w').close(); open('trickle_up.-1', 'w').close()
        os.mkdir('trickle_down.0'); time.sleep(0.3)""", (5, 0), {}),
    "checkpoint is a link": ("os.symlink(CLIENT, 'checkpoint.json')", (5, 0), {}),
    "a note that is nonsense": ("""
        open('done.json', 'w').write('[' * 4000); os.mkdir('done.json.new'); os._exit(9)""",
                                (3, 195), {}),
    "a note that lies": ("""
        open('done.json', 'w').write('{"cpu_time": 1e999, "peak_memory": [[]]}')
        open('output', 'w').write('1'); os._exit(0)""", (5, 0), {}),
    "odd names": ("""
        for name in (b'\\xff\\n\\x1b[2J', 'a' * 255, '\\n', ' ', '-rf', '\\u202e', 'CON', 'In'):
            os.mkdir(name)
            open(os.path.join(name, name), 'w').close()""", (5, 0), {}),
    "closed directories": ("""
        for n in range(5):
            os.makedirs('d%d/e/f' % n)
            open('d%d/e/x' % n, 'w').close()
            os.chmod('d%d/e/f' % n, 0); os.chmod('d%d/e' % n, 0); os.chmod('d%d' % n, 0)
        os.chmod(HERE, 0); os.chdir('/'); os._exit(3)""", (3, 195), {}),
    "a deep tree": ("""
        for n in range(400):
            os.mkdir('d' * 200); os.chdir('d' * 200)
        os._exit(3)""", (3, (195, 196)), {}),
    "prints without end": ("while True: print('x' * 65536); sys.stderr.write('y' * 65536)",
                           (3, 196), {}),
    "files without end": ("""
        n = 0
        while True:
            open('f%d' % n, 'w').close(); n += 1; time.sleep(0.0005)""", (3, 196), {}),
    "a file without end": ("""
        with open('big', 'wb') as f:
            while True: f.write(bytes(65536))""", (3, 196), {"rsc_disk_bound": 3e6}),
    "a file without a name": ("""
        f = open('big', 'wb'); os.remove('big')
        while True: f.write(bytes(65536)); f.flush(); time.sleep(0.001)""",
                              (3, 196), {"rsc_disk_bound": 3e6}),
    "too much memory": ("x = [bytearray(10 ** 7) for _ in range(30)]; time.sleep(9)", (3, 198),
                        {"rsc_memory_bound": 1e8}),
    "processes without end": ("""
        for _ in range(40):
            if os.fork() == 0: time.sleep(99)
        time.sleep(99)""", (3, 195), {}),
    "daemons": ("""
        for n in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork(): os._exit(0)
                for s in range(1, 30): attempt(lambda: signal.signal(s, signal.SIG_IGN))
                while True:
                    attempt(lambda: os.makedirs(HERE + '/again/and/again'))
                    attempt(lambda: open(HERE + '/again/x%d' % n, 'w').close())
        time.sleep(0.3)""", (5, 0), {}),
    "never ends": ("""
        for s in range(1, 30): attempt(lambda: signal.signal(s, signal.SIG_IGN))
        while True: time.sleep(1)""", (3, 197), {"rsc_fpops_bound": 1.0}),
    "closes everything": ("os.closerange(0, 1000)", (5, 0), {}),
    "writes into everything": ("""
        for n in range(100):
            attempt(lambda: os.write(n, b'{"code": 0, "stopped": [0, "x"]}'))
        os._exit(5)""", (3, 195), {}),
    "a result that is too large": ("return 'x' * 2000000", (7, -187), {}),
    "a number too long to read": ("return 10 ** 4000", (5, 0), {}),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    return v.probe_sandbox(tmp_path_factory.mktemp("probe"))


@pytest.fixture(params=["best", "none"])
def kind(request, probed):
    return probed if request.param == "best" else v.Protection()


def job_of(n, body, given, **more):
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return dict(n=n, source=(HEAD + lines + "\n    return 1\n").encode(),
                data=json.dumps(given).encode(), **more)


@pytest.mark.skipif(os.name == "nt", reason="POSIX")
def test_jobs_that_stay_inside(world, evil, server, clock, kind, monkeypatch):
    """All at once, two at a time. None gets the client's secrets, none is left."""
    monkeypatch.setattr(v, "SLOT_FILES_MAX", 300)
    monkeypatch.setattr(v, "PRINTED_MAX", 3e5)
    monkeypatch.setattr(v, "PROCESSES_MAX", 12)
    client = make_client(world, evil, server, n_cpus=3)
    client.protection = kind
    given_ = {"client": str(client.directory / "client.json")}
    for n, (body, _, more) in enumerate(INSIDE.values()):
        evil.add(**job_of(n, body, given_, **more))
    live(client, clock, lambda: client.tasks, 0.2)
    honest_done(client, clock, server, pace=0.1)
    live(client, clock, lambda: len(evil.store) == len(INSIDE), 0.1)
    honest_done(client, clock, server, 2, 910)
    got = {case: (evil.store["wu_%d_0" % n]["client_state"], evil.store["wu_%d_0" % n][
        "exit_status"]) for n, case in enumerate(INSIDE)}
    wanted = {case: (state, got[case][1] if isinstance(status, tuple) and got[case][1] in status
                     else status) for case, (_, (state, status), _) in INSIDE.items()}
    assert got == wanted
    told = json.dumps(evil.requests) + str(evil.uploads)
    assert "host_cpid" not in told.replace('"host_cpid": "%s"' % client.state.host_cpid, "")
    assert "%032x" % 1 not in told and all(len(r["stderr_out"]) <= v.STDERR_CHARS
                                           for r in evil.store.values())
    check_client(client, evil, server)


OUTSIDE = """
    outside = [given["neighbour"], given["secret"], CLIENT, given["good"] + "/files/x",
               given["good"], given["slots"] + "/7", given["harness"], HERE + "/../x"]
    done = []
    for path in outside:
        for name, what in (
                ("read", lambda: open(path).read()), ("list", lambda: os.listdir(path)),
                ("append", lambda: open(path, "r+").write("x")),
                ("delete", lambda: os.remove(path)), ("mode", lambda: os.chmod(path, 0o777)),
                ("rename", lambda: os.rename(path, HERE + "/stolen")),
                ("link", lambda: os.link(path, HERE + "/linked")),
                ("make", lambda: os.mkdir(path + ".dir")),
                ("symlink", lambda: (os.symlink(path, HERE + "/s"), os.remove(HERE + "/s"),
                                     open(HERE + "/s").read()))):
            if attempt(what):
                done.append([name, path])
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (given["pid"], os.getppid()):
        if attempt(lambda: os.kill(pid, 0)) and given["alone"] and pid == given["pid"]:
            done.append(["signal", pid])
        if attempt(lambda: open("/proc/%d/mem" % pid, "r+b")):
            done.append(["memory", pid])
        if pid == given["pid"] and libc.ptrace(16, pid, 0, 0) == 0:
            done.append(["ptrace", pid])
    if given["alone"]:
        attempt(lambda: os.kill(-1, 9))
    return done
"""


def test_jobs_that_want_out(world, evil, server, clock, probed):
    """What only a sandbox stops: the files of others, their authenticators, the client itself."""
    if probed.files != "mount":
        pytest.skip("this system has no such sandbox: " + probed.words)
    client = make_client(world, evil, server)
    client.protection = probed
    folder = client.directory
    good = folder / client.projects[1].folder
    evil.add(**job_of(1, OUTSIDE, {
        "client": str(folder / "client.json"), "neighbour": str(world / "neighbour.txt"),
        "secret": str(world / "home" / ".ssh" / "id"), "good": str(good), "pid": os.getpid(),
        "slots": str(folder / "slots"), "harness": str(folder / "harness.py"),
        "alone": probed.namespaces}))
    honest_done(client, clock, server, pace=0.1)
    live(client, clock, lambda: evil.store, 0.1)
    assert bytes(evil.uploads["wu_1_0"]) == b"[]", evil.store
    honest_done(client, clock, server, 2, 910)
    assert (folder / "harness.py").read_text() == v.HARNESS
    check_client(client, evil, server)


def test_a_slot_that_is_moved_away(world, evil, server, clock):
    """Without a sandbox a job can do this; the client survives, and follows no link it has left."""
    client = make_client(world, evil, server)
    good = client.directory / client.projects[1].folder
    evil.add(**job_of(1, """
        os.rename(HERE, HERE + '-moved')
        os.symlink(CLIENT, HERE)""", {"client": str(good)}))
    evil.add(**job_of(2, "os.kill(os.getppid(), 9)", {"client": ""}))
    honest_done(client, clock, server, pace=0.1)
    live(client, clock, lambda: len(evil.store) == 2, 0.1)
    assert {r["client_state"] for r in evil.store.values()} == {C.COMPUTE_ERROR}
    honest_done(client, clock, server, 2, 910)
    assert {p.name for p in good.iterdir()} == {"files", "partial", "outputs"}


# ---- Who gets the processors ---------------------------------------------------------------------

FOREVER = b"import threading\ndef compute(input): threading.Event().wait()\n"
KEEPS = (b"import threading\ndef compute(input, checkpoint):\n    checkpoint(1)\n"
         b"    threading.Event().wait()\n")


@pytest.mark.parametrize("source", [FOREVER, KEEPS])
@pytest.mark.parametrize("more", [
    {}, {"rsc_fpops_est": 1e30}, {"ncpus": 4096}, {"ncpus": 0.01}, {"rsc_fpops_est": 1},
    {"report_deadline": NOW + 10 * 86400, "delay_bound": 1e9}], ids=str)
def test_jobs_that_never_end_make_way(world, evil, server, clock, source, more, monkeypatch):
    """They hold all processors, and when their turn is over the honest project gets one."""
    monkeypatch.setattr(v, "TURN_SECONDS", 300.0)
    monkeypatch.setattr(v, "TURN_LOST_SECONDS", 600.0)
    for n in range(8):
        evil.add(n, source, **dict({"rsc_fpops_bound": 1e30, "report_deadline": NOW + 9e8}, **more))
    client = make_client(world, evil, server)
    bad, good = client.projects
    good.min_rpc_time = NOW + 5.0
    live(client, clock, lambda: len(client.tasks) >= 2 or client.tasks and "ncpus" in more, 0.1)
    assert sum(job.ncpus for job in client.tasks) >= 0.25 and not server.store
    server.add(900, report_deadline=NOW + 9e8)
    live(client, clock, lambda: server.store, 9.9)
    assert clock.now - NOW > (300 if source is KEEPS else 600)
    assert bad.exp_avg_cpu > good.exp_avg_cpu
    assert all(not job.over for job in bad.jobs), "it goes on later"
    crash(client)


def test_bounds_that_a_project_cannot_lift(tmp_path):
    job = open_job(rsc_fpops_bound=1e30, rsc_memory_bound=1e15, rsc_disk_bound=1e15)
    assert v.time_bound(job, 1e7) == v.RUN_SECONDS_MAX
    job.delay_bound = 3600.0
    assert v.time_bound(job, 1e7) == v.RUN_SECONDS
    v.own_bounds(job, tmp_path, 2)
    assert job.rsc_memory_bound <= v.memory_bytes() and job.rsc_disk_bound <= v.disk_room(tmp_path)


def test_files_that_do_not_come_hold_nobody_up():
    jobs = [v.Job("r_%d" % n, client_state=C.DOWNLOADING, received=NOW, rsc_fpops_est=1e30,
                  report_deadline=NOW + 9e5) for n in range(2)]
    p, one = project(*jobs), v.Limits(2, 1e7)
    assert v.queue_of([p], one, NOW + v.FETCH_SECONDS).idle == 0
    assert v.next_for_work([p], one, NOW + v.FETCH_SECONDS) is p
    assert v.queue_of([p], one, NOW + v.FETCH_SECONDS + 1).idle == 2
    assert v.next_for_work([p], one, NOW + v.FETCH_SECONDS + 1) is None
    jobs[0].stuck_since = NOW
    assert v.queue_of([p], one, NOW + v.STALL_SECONDS).idle == 0
    assert v.queue_of([p], one, NOW + v.STALL_SECONDS + 1).idle == 1


@pytest.mark.parametrize("case", [
    dict(given=1e6, first="a"),  # An honest one is in time, though a project is owed all [S1-06].
    dict(given=1e6, elapsed_time=401, first="b"), dict(given=390, elapsed_time=401, first="a"),
    dict(given=410, elapsed_time=401, first="b"), dict(given=1e6, elapsed_time=399, first="a"),
    dict(given=1e6, rsc_fpops_est=1e30, first="b"), dict(given=1e6, delay_bound=90, first="b"),
    dict(given=1e6, delay_bound=110, first="a")], ids=str)
def test_deadlines_do_not_buy_more_than_was_fetched(case):
    """A job of 100 s by its estimate; debts are equal when both were given 100 s."""
    case = dict(case)
    hasty, calm = project(open_job("a"), url="http://a"), project(open_job("b"), url="http://b")
    hasty.jobs[0].report_deadline = NOW + 100
    for p, seconds in ((hasty, case.pop("given")), (calm, 100)):
        p.exp_avg_cpu, p.avg_time = seconds, NOW
    first = case.pop("first")
    vars(hasty.jobs[0]).update(case)
    assert v.next_job(hasty.jobs + calm.jobs, [], v.Limits(1, 1e7), NOW).name == first


@pytest.mark.parametrize("seconds, wait", [(30, 0), (40, 40), (300, 1080), (9999, 1080)])
def test_who_holds_us_up_is_left_alone(seconds, wait):
    """Other projects are not talked to meanwhile [S1-32]."""
    p = project()
    v.take_reply(p, v.State(), reply(), v.Request([]), 0, NOW - seconds, NOW, random.Random(1))
    assert p.min_rpc_time == (NOW + wait if wait else 0)


def test_one_project_does_not_take_all_room():
    greedy = project(*[open_job("r_%d" % n) for n in range(32)], url="http://a")
    other = project(url="http://b")
    assert v.queue_of([greedy], v.Limits(1, 1e7)).room == 0
    assert v.queue_of([greedy, other], v.Limits(1, 1e7)).room == 16
    assert v.next_for_work([greedy], v.Limits(1, 1e7), NOW) is None


def test_the_disk_is_for_all(tmp_path, monkeypatch):
    """A hundredth of what is free is for everybody; else a project has its part."""
    client = scripted_client(tmp_path)
    evil = client.projects[0]
    (client._place(evil, "files", "x")).write_bytes(bytes(400))
    monkeypatch.setattr(v, "disk_room", lambda directory: 1000.0)
    for nbytes, error in ((300, v.TransportError), (301, v.LocalError), (10 ** 15, v.LocalError)):
        with pytest.raises(error):
            client._download(evil, {"name": "y", "url": "/y", "nbytes": nbytes})


def test_texts_and_errors_that_wait_have_an_end(tmp_path):
    client = scripted_client(tmp_path)
    evil = client.projects[0]
    for n in range(200):
        evil.adopt(open_job("r_%d" % n))
    client._take_down(evil, [{"result": "r_%d" % n, "text": "y" * 10 ** 5} for n in range(200)] * 9)
    assert sum(len(text) for job in evil.jobs for text in job.down) <= v.DOWN_KEPT
    for job in list(evil.jobs):
        client._end(job, C.COMPUTE_ERROR, 195, "x", "z" * 10 ** 6)
    assert sum(len(job.stderr_out) for job in evil.jobs) <= v.STDERR_KEPT + 2e5
    assert v.next_for_work([evil], v.Limits(1, 1e7), NOW + 1e9) is None
    evil.jobs = evil.jobs[:v.JOBS_KEPT_PER_CPU - 1]
    assert v.next_for_work([evil], v.Limits(1, 1e7), NOW + 1e9) is evil


def test_processor_time_that_was_not_announced_is_paid(tmp_path):
    job = open_job(ncpus=0.25, elapsed_time=110.0)
    task = v.Task.__new__(v.Task)
    task.job, task.began, task.used = job, 10.0, {"cpu_time": 90.0}
    assert task.unpaid() == 65.0
    task.used = {"cpu_time": 20.0}
    assert task.unpaid() == 0.0


def test_a_link_whose_name_only_looks_different_goes(tmp_path):
    """On many a Mac it is the same name, and would be followed."""
    for name in ("IN", "Job.json", "checkpoint"):
        (tmp_path / name).write_text("x")
    (tmp_path / "\u017ftderr.txt").symlink_to(tmp_path / "elsewhere")
    assert v.empty_slot(tmp_path, True, {"in"})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_acknowledged_is_not_finished(tmp_path):
    """A project that acknowledges what it never got does not end the others' run (--max-jobs)."""
    client = scripted_client(tmp_path)
    client.projects[0].adopt(open_job("r_0"))
    client._forget(client.projects[0], {"r_0"})
    assert client.projects[0].n_reported == 0 and client.projects[0].jobs == []


def test_who_takes_no_reports_is_not_asked_again_and_again(tmp_path):
    client = scripted_client(tmp_path)
    evil, done = client.projects[0], v.Job("r_0", over=True, client_state=C.UPLOADED)
    evil.adopt(done)
    client.now, client.op.action = NOW, v.Action("rpc", evil, evil.url, v.Request([done]))
    client._replied(client.op.action, NOW, reply(acks=[]), None)
    assert evil.min_rpc_time >= NOW + v.DELAY_MIN


def test_an_output_that_vanishes_is_a_failed_job(tmp_path):
    client = scripted_client(tmp_path)
    job, task = open_job("r_0"), v.Task.__new__(v.Task)
    job.output = {"nbytes_max": 9}
    client.projects[0].adopt(job)
    vars(task).update(job=job, slot=tmp_path / "gone", looked=NOW, began=0.0, used={}, taken=[],
                      makes_way=False, verdict=(0, "nonsense"))
    client.tasks[job], client.now = task, NOW
    client._exited(task, 0, None)
    assert (job.over, job.client_state) == (True, C.COMPUTE_ERROR)
