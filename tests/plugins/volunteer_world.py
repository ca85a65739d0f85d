"""What tests of the volunteer's client share: its module, builders, a scripted server, a clock.

The clock is a number that drive() moves; only processes and sockets are waited for.
"""

import functools
import hashlib
import http.server
import importlib.util
import io
import json
import random
import re
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

FILE = Path(__file__).resolve().parents[2] / "plugins" / "volunteer.py"
NOW = 1_790_000_000.0  # 14:13:20 UTC
PATIENCE = 60  # seconds until a process or a connection that does not end is a failure


def load():
    spec = importlib.util.spec_from_file_location("volunteer", FILE)
    module = sys.modules["volunteer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


v = load()
C = v.ClientState


class Rng:
    """A generator stuck at one value, to reach the ends of a range."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


LOW, HIGH = Rng(0.0), Rng(0.999999)


def ended(name="r_0", at=NOW, **more):
    return v.Job(name, over=True, client_state=C.UPLOADED, ended_at=at,
                 **dict({"report_deadline": NOW + 9e4}, **more))


def open_job(name="r_9", est=1e9, **more):
    return v.Job(name, client_state=C.READY, rsc_fpops_est=est,
                 **dict({"report_deadline": NOW + 9e4}, **more))


def project(*jobs, url="http://x", **more):
    p = v.Project(url, **dict(dict(authenticator="a" * 32, hostid=3), **more))
    for job in jobs:
        p.adopt(job)
    return p


def limits(n_cpus=1, **more):
    return v.Limits(n_cpus, 1e7, **more)  # 1e9 operations take 100 s


def assignment(name="sq_0_0", source=b"", data=b"3", base="http://x", **more):
    def entry(file_name, content, **extra):
        return dict(name=file_name, url=base + "/download/" + file_name, nbytes=len(content),
                    sha256=hashlib.sha256(content).hexdigest(), **extra)

    app = "sq_" + hashlib.sha256(source).hexdigest()[:8] + ".py"
    return dict({
        "name": name, "workunit": name.rpartition("_")[0], "app": "sq", "about": "squares",
        "app_version": 1, "version_num": 1, "files": [entry(app, source, main=True)],
        "input": entry(name + ".in", data),
        "output": {"name": name, "url": base + "/upload/" + name, "nbytes_max": 1e6},
        "report_deadline": NOW + 9e4, "delay_bound": 9e4, "rsc_fpops_est": 1e7,
        "rsc_fpops_bound": 1e13, "rsc_memory_bound": 5e8, "rsc_disk_bound": 1e8}, **more)


def reply(**more):
    return dict({"hostid": 3, "server_time": NOW, "request_delay": 0, "project_name": "P"}, **more)


class Signer:
    """A project's key."""

    def __init__(self):
        numbers = rsa.generate_private_key(65537, 2048).private_numbers()
        self.n, self.d = numbers.public_numbers.n, numbers.d
        self.text = "minigrid-rsa-1 %x %x" % (self.n, 65537)
        self.sign = functools.lru_cache(None)(self.sign)

    def sign(self, data):
        """The signature of some bytes, in hex."""
        tail = v.SHA256_INFO + hashlib.sha256(data).digest()
        block = b"\0\1" + b"\xff" * (256 - 3 - len(tail)) + b"\0" + tail
        return "%0512x" % pow(int.from_bytes(block, "big"), self.d, self.n)

    def sign_files(self, a):
        """A copy of an assignment, its files signed for what they are used there."""
        files = a.get("files")
        if not isinstance(files, list):
            return a
        return dict(a, files=[dict(f, signature=self.sign(v.file_statement(a, f)))
                              for f in files])


SIGNER = Signer()


def converse(projects, answer, bounds=None, now=NOW, op=None, most=99):
    """Let the policy talk until it has nothing to say at this moment; return what it did, as pairs
    of kind and address. `answer(action)` is the transport: False for a failure, "offline" if the
    network is down; else what came: new jobs, or a pair of them and fields of the reply, or the
    addresses in a front page. Does with it what Client does."""
    op, bounds, state = op or v.SchedulerOp(LOW), bounds or limits(), v.State(projects, "c")
    said, silent = [], 0
    while silent < 2:  # The end of a session is silent as well.
        action = op.poll(projects, bounds, now)
        silent = 0 if action else silent + 1
        if not action:
            continue
        said.append((action.kind, action.url))
        assert len(said) <= most, "a session that never ends"
        value, p = answer(action), action.project
        if value is False or value == "offline":
            op.failed(now, network_down=bool(value))
            continue
        if action.kind == "master":
            v.take_master(p, value)
        elif action.kind == "join":
            p.authenticator, p.min_rpc_time = "a" * 32, 0.0
        else:
            jobs, fields = value if isinstance(value, tuple) else (value, {})
            v.take_reply(p, state, reply(**fields), action.request, len(jobs), now, now, LOW)
            p.jobs = [job for job in p.jobs if job not in action.request.reports]
            for job in jobs:
                p.adopt(job)
        op.succeeded()
    return said


SQUARE = b"def compute(input):\n    return input * input\n"


class Server:
    """A minigrid server in miniature, with faults on order. `trouble` maps 'METHOD kind' to a list
    of things to do instead of answering: a status, 'cut', 'lost' or None (answer)."""

    def __init__(self):
        self.files, self.uploads, self.complete, self.store = {}, {}, set(), {}
        self.work, self.requests, self.log, self.registered = [], [], [], []
        self.trouble, self.extra, self.given = {}, [], []
        self.restart_at_0, self.addresses, self.signer = set(), [], SIGNER
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def handle_any(self):
                server.handle(self)

            do_GET = do_POST = do_PUT = handle_any

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.httpd.server_port
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self):
        self.httpd.shutdown()
        self.httpd.server_close()

    def add(self, n, source=SQUARE, data=None, **more):
        """Add a workunit with the number n; its only result is wu_<n>_0."""
        data = json.dumps(n).encode() if data is None else data
        a = assignment("wu_%d_0" % n, source, data, self.url, **more)
        self.files[a["files"][0]["name"]], self.files[a["input"]["name"]] = source, data
        self.work.append(a)
        return a

    def handle(self, h):
        body = h.rfile.read(int(h.headers.get("Content-Length") or 0))
        kind = h.path.split("/")[1]
        self.log.append("%s %s" % (h.command, h.path))
        trouble = self.trouble.get("%s %s" % (h.command, kind))
        fault = trouble.pop(0) if trouble else None
        if isinstance(fault, int):
            return self.answer(h, {"error": "scripted trouble"}, fault)
        value = getattr(self, "do_" + kind)(h, body, fault)
        if fault in ("lost", "cut"):
            h.close_connection = True
        elif isinstance(value, tuple):
            self.answer(h, *value)
        else:
            self.answer(h, value)

    def answer(self, h, value, status=200):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        h.send_response(status)
        h.send_header("Content-Length", str(len(data)))
        h.end_headers()
        h.wfile.write(data)

    def do_(self, h, body, fault):
        """The front page."""
        return ("<p>hello" + "".join('<link rel="minigrid_scheduler" href="%s/scheduler">' % url
                                     for url in self.addresses or [self.url])).encode()

    def do_register(self, h, body, fault):
        self.registered.append(json.loads(body))
        return {"authenticator": "%032x" % len(self.registered), "userid": 7,
                "name": self.registered[-1]["nickname"]}

    def do_scheduler(self, h, body, fault):
        request = json.loads(body)
        self.requests.append(request)
        acks = [report["name"] for report in request["reports"]]
        for report in request["reports"]:
            self.store.setdefault(report["name"], report)
        held = set(self.store) | set(request["other_results"])
        given = [a for a in self.given if a["name"] not in held]  # Lost on their way: once more.
        if request["work_req_seconds"] > 0:
            given += self.work
            self.given += self.work
            self.work = []
        if self.signer:
            given = [self.signer.sign_files(a) for a in given]
        answer = reply(acks=acks, assignments=given, request_delay=1.0)
        if self.signer and request["signing_key"] != v.fingerprint(self.signer.text):
            answer["signing_key"] = self.signer.text
        answer.update(self.extra.pop(0) if self.extra else {})
        return answer

    def do_download(self, h, body, fault):
        data = self.files[h.path.rsplit("/", 1)[1]]
        begin = re.match(r"bytes=(\d+)-", h.headers.get("Range") or "")
        if fault == "cut":
            h.send_response(200)
            h.send_header("Content-Length", str(len(data)))
            h.end_headers()
            h.wfile.write(data[:len(data) // 2])
            return data
        return (data[int(begin.group(1)):], 206) if begin else data

    def do_upload(self, h, body, fault):
        name = h.path.rsplit("/", 1)[1]
        have = self.uploads.setdefault(name, bytearray())
        if h.command == "GET":
            return {"nbytes": len(have), "complete": name in self.complete}
        assert re.fullmatch("Bearer [0-9a-f]{32}", h.headers["Authorization"])
        span, total = h.headers["Content-Range"][6:].split("/")
        at = 0 if span == "*" else int(span.split("-")[0])
        if at == 0 and name in self.restart_at_0:
            have.clear()
        if at != len(have) or name in self.complete:
            return {"error": "wrong offset", "nbytes": len(have)}, 409
        have += body[:len(body) // 2] if fault == "cut" else body
        complete = len(have) == int(total)
        if complete:
            self.complete.add(name)
            assert hashlib.sha256(have).hexdigest() == h.headers["X-Sha256"]
        return {"nbytes": len(have), "complete": complete}


class Clock:
    def __init__(self):
        self.now = NOW


def make_client(tmp_path, *servers, **options):
    options = dict(dict(nickname="otter", n_cpus=2), **options)
    voice = v.Voice(stream=io.StringIO(), errors=io.StringIO())
    client = v.Client(tmp_path / "client", [(server.url, None) for server in servers],
                      v.Options(**options), v.Transport(), random.Random(1), voice,
                      lambda: {"p_ncpus": 2})
    client.state.p_fpops = 2e7
    return client


def drive(client, clock, until, endless=False):
    """Turn the client until something holds: blocks where it waits for others, else moves time.
    Jobs that are `endless` are not waited for."""
    for _ in range(3000):
        client.step(clock.now)
        if until():
            return
        if [key for key in client.busy if not (endless and key[0] == "run")]:
            client.wait(PATIENCE)
        else:
            clock.now = next_event(client, clock.now)
    pytest.fail("it never happened; " + client.voice.errors.getvalue())


def next_event(client, now):
    """When something will happen by itself: a client that only waits need not be turned until."""
    times = [t for p in client.projects for t in (p.min_rpc_time, p.work_time)]
    times += [retry.at for retry in client.retries.values()]
    waits = not any(job.over for job in client.jobs) and not client.tasks
    ahead = [t for t in times if t > now]
    return min(ahead) if waits and ahead else now + client.pause(now)


def folder_of(tmp_path):
    """Where the only project of a client of make_client() keeps its files."""
    folder, = (tmp_path / "client" / "projects").iterdir()
    return folder


def reports(server):
    return {name: (r["client_state"], r["exit_status"]) for name, r in server.store.items()}


def attend(client, clock, until):
    """Turn the client until something holds, while its jobs take their own time."""
    for _ in range(100 * PATIENCE):
        client.step(clock.now)
        if until():
            return
        client.wait(0.01)
        clock.now += 0.1
    pytest.fail("it never happened; " + client.voice.errors.getvalue())


def crash(client):
    """What kill -9 does: jobs die with the client, nothing is saved, no outcome is heard."""
    for task in client.tasks.values():
        task.kill()
    while client.busy:
        key = client.events.get(timeout=PATIENCE)[0]  # Threads of a dead process are gone, too.
        client.busy.discard(key)
