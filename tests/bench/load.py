"""A load of volunteers, in one lean process: what the benches send to a server.

    python tests/bench/load.py < SPEC.json

Hosts ask for work, put down its outputs, and report it with the next request, which asks for more.
Each request has a TCP connection of its own, as many as `connections` at a time. A request is what
the real BOINC client has sent (a capture of the tests, with its names replaced), 8 KB with one
report, or what volunteer.py sends as JSON. Prints what it has counted and measured, as JSON; see
Load for what a SPEC holds.
"""

import hashlib
import json
import re
import selectors
import socket
import sys
import time
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

CAPTURE = Path(__file__).resolve().parents[1].joinpath(
    "plugins", "boinc", "captures", "r05_report_success.request.xml")
REQUEST_BYTES = 8000  # of a request with one report, as in the measurements of BOINC's server
KEY_BYTES = 530  # of the project's signing key, which a request repeats
OUTPUT = b"1"
DRY_SECONDS = 0.25  # a connection rests so long when there was no work
JOB = re.compile(rb"<result>\s*<name>([^<]+)</name>")
CERTIFICATE = re.compile(rb"<name>([^<]+)_out</name>\s*<generated_locally/>\s*<max_nbytes>(\d+)"
                         rb"<.*?<xml_signature>(.*?)</xml_signature>", re.S)
UPLOAD = b"""<data_server_request>
    <core_client_major_version>8</core_client_major_version>
    <core_client_minor_version>3</core_client_minor_version>
    <core_client_release>0</core_client_release>
<file_upload>
<file_info>
    <name>%s_out</name>
    <xml_signature>%s</xml_signature>
    <max_nbytes>%s</max_nbytes>
</file_info>
<nbytes>%d</nbytes>
<md5_cksum>%s</md5_cksum>
<offset>0</offset>
<data>
%s"""


@dataclass
class Host:
    """One client: what it knows, and the jobs it holds, to be reported with its next request."""

    key: str
    cpid: str
    hostid: int = 0
    seqno: int = 0
    held: list = field(default_factory=list)  # names of results
    certificates: dict = field(default_factory=dict)  # name -> (max_nbytes, signature)


class Xml:
    """BOINC's protocol: requests as a real client has sent them."""

    def __init__(self, jobs):
        self.signing_key = b""
        text = CAPTURE.read_bytes()
        start, end = text.index(b"<result>"), text.index(b"</result>\n") + 10
        self.report = re.sub(rb"refA_38_0_r\d+_0", b"@NAME@_out", text[start:end]).replace(
            b"refA_38_0", b"@NAME@")
        head, tail = text[:start], text[end:]
        tail = re.sub(rb" *<other_result>.*</other_result>\n", b"", tail, flags=re.S)
        for tag, value in (
                ("authenticator", "@KEY@"), ("hostid", "@HOSTID@"), ("rpc_seqno", "@SEQNO@"),
                ("host_cpid", "@CPID@"), ("cross_project_id", "@CPID@"), ("p_ncpus", "16"),
                ("cpu_req_secs", "@WORK@"), ("work_req_seconds", "@WORK@"),
                ("cpu_req_instances", "@JOBS@"), ("code_sign_key", "@SIGN@")):
            head = re.sub(rb"<%b>[^<]*<" % tag.encode(), f"<{tag}>{value}<".encode(), head)
        self.jobs = jobs
        self.head, self.tail = head, tail
        sample = Host("k" * 32, "c" * 32, 100, 10, [b"bench_12345_0"])
        spare = len(self.request(sample, True).partition(b"\r\n\r\n")[2]) - REQUEST_BYTES
        features = re.search(rb"<p_features>([^<]*)<", head)[1]
        self.head = head.replace(features, features[:-max(spare + KEY_BYTES, 1)])

    def request(self, host, ask):
        """Return the bytes of a host's next request."""
        text = self.head
        for mark, value in (
                (b"@KEY@", host.key), (b"@CPID@", host.cpid), (b"@HOSTID@", str(host.hostid)),
                (b"@SEQNO@", str(host.seqno)), (b"@WORK@", "0.000001" if ask else "0.0"),
                (b"@JOBS@", f"{self.jobs * ask}.0")):
            text = text.replace(mark, value.encode())
        body = b"".join([text.replace(b"@SIGN@", self.signing_key), *(
            self.report.replace(b"@NAME@", name) for name in host.held), self.tail])
        return http("POST", "/boinc/scheduler", body,
                    "User-Agent: BOINC client (x86_64-pc-linux-gnu 8.3.0)\r\n"
                    "Accept-Encoding: deflate, gzip\r\n"
                    "Content-Type: application/x-www-form-urlencoded\r\n")

    def reply(self, host, body):
        """Take a reply; return the names of new jobs, and how many reports it acknowledges."""
        if not self.signing_key and b"<code_sign_key>" in body:
            self.signing_key = re.search(rb"<code_sign_key>(.*?)</code_sign_key>", body, re.S)[1]
        if not host.hostid:
            host.hostid = int(re.search(rb"<hostid>(\d+)<", body)[1])
        for name, nbytes, signature in CERTIFICATE.findall(body):
            host.certificates[name] = nbytes, signature
        return JOB.findall(body), body.count(b"<result_ack>")

    def upload(self, host, name):
        """Return the request that uploads the output of a job."""
        nbytes, signature = host.certificates.pop(name)
        body = UPLOAD % (name, signature, nbytes, len(OUTPUT),
                         hashlib.md5(OUTPUT).hexdigest().encode(), OUTPUT)
        return http("POST", f"/boinc/upload/{name.decode()}_out/file_upload_handler", body)


class Json:
    """minigrid's own protocol: requests as volunteer.py sends them."""

    def __init__(self, jobs):
        self.jobs, self.signing_key = jobs, ""
        features = re.search(rb"<p_features>([^<]*)<", CAPTURE.read_bytes())[1].decode()
        self.host = {
            "p_ncpus": 16, "p_vendor": "", "p_model": "Intel(R) Xeon(R) Processor @ 2.50GHz",
            "p_features": features, "m_nbytes": 1.6e10, "d_free": 1e11, "d_total": 2.5e11,
            "os_name": "Linux", "os_version": "6.1.0", "on_frac": 1.0, "active_frac": 1.0,
            "domain_name": "bench", "p_fpops": 3e7}

    def request(self, host, ask):
        """Return the bytes of a host's next request."""
        reports = [{"name": name.decode(), "exit_status": 0, "client_state": 5, "cpu_time": 3570.1,
                    "elapsed_time": 3600.5, "stderr_out": "", "peak_memory": 123456789,
                    "app_version": 1} for name in host.held]
        body = json.dumps({
            "authenticator": host.key, "hostid": host.hostid, "rpc_seqno": host.seqno,
            "host_cpid": host.cpid, "allow_multiple_clients": True, "host": self.host,
            "platforms": ["python"], "client_version": "minigrid",
            "work_req_seconds": 1e-6 if ask else 0, "cpu_req_instances": self.jobs,
            "estimated_delay": 0, "reports": reports, "other_results": [], "trickles": [],
            "signing_key": self.signing_key})
        return http("POST", "/scheduler", body.encode(), "Content-Type: application/json\r\n")

    def reply(self, host, body):
        """Take a reply; return the names of new jobs, and how many reports it acknowledges."""
        given = json.loads(body)
        host.hostid = given["hostid"]
        if "signing_key" in given:
            self.signing_key = hashlib.sha256(given["signing_key"].encode()).hexdigest()
        return [job["name"].encode() for job in given["assignments"]], len(given["acks"])

    def upload(self, host, name):
        """Return the request that uploads the output of a job."""
        return http("PUT", f"/upload/{name.decode()}_out", OUTPUT,
                    f"Authorization: Bearer {host.key}\r\n")


def http(method, path, body, headers=""):
    """Return a request as it goes over the wire."""
    return (f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


@dataclass
class Load:
    """What is sent, to whom, how long; and what came of it."""

    port: int
    protocol: str  # xml or json
    hosts: list  # [authenticator, host_cpid] of each
    connections: int = 1
    jobs: int = 1  # asked for with each request
    seconds: float = 1e9  # of measuring, after the warm-up ...
    reports: int = 1 << 60  # ... or until so many jobs were reported
    warm_up: int = 0  # requests that are not measured; all hosts have jobs after len(hosts)
    outputs: str = "none"  # put (uploaded), or the directory data/upload: written there, or none
    limit: bool = False  # an empty route answers: each request reports `jobs` made-up jobs

    def __post_init__(self):
        self.talk = {"xml": Xml, "json": Json}[self.protocol](self.jobs)
        self.idle, self.ready = deque(Host(*told) for told in self.hosts), deque()
        if self.limit:
            for number, host in enumerate(self.idle):
                host.hostid, host.held = number, [b"bench_%d_%d_0" % (number, k)
                                                  for k in range(self.jobs)]
        self.dry_until, self.times, self.counts = 0.0, [], Counter()
        self.begun = self.ended = self.cpu = 0.0
        self.asking = True  # afterwards hosts only report what they hold

    def session(self):
        """Let one connection after the other be used: yields requests, gets answers.

        Yields None where there is nothing to send just now.
        """
        while True:
            host = self.pick()
            if host is None:
                yield None
                continue
            for name in host.held if self.outputs != "none" and not self.limit else ():
                if self.outputs == "put":
                    self.counts["uploads"] += 1
                    yield self.talk.upload(host, name)
                else:
                    self.put_down(name.decode() + "_out")
            asking, begun = self.asking, time.perf_counter()
            body = yield self.talk.request(host, asking)
            self.count(host, body, asking, time.perf_counter() - begun)

    def pick(self):
        """Return the host that comes next; None if there is none."""
        dry = not self.asking or time.perf_counter() < self.dry_until
        if self.idle and not dry:
            return self.idle.popleft()
        return self.ready.popleft() if self.ready else None

    def put_down(self, name):
        """Place an output where an upload would have placed it."""
        folder = hashlib.md5(name.encode()).hexdigest()[:2]
        with open(f"{self.outputs}/{folder}/{name}", "wb") as file:
            file.write(OUTPUT)

    def count(self, host, body, asking, seconds):
        """Take a reply and the time it took; start and stop the measuring."""
        self.counts["requests"] += 1
        if self.limit:
            self.idle.append(host)
        else:
            self.take(host, body, asking)
        now = time.perf_counter()
        if self.begun:
            self.times.append(seconds)
        elif self.counts["requests"] >= self.warm_up:
            self.begun, self.cpu = now, time.process_time()
            print("begun", file=sys.stderr, flush=True)
            self.before = Counter(self.counts)
        if self.asking and self.begun and (now - self.begun > self.seconds
                                           or self.counts["reported"] >= self.reports):
            self.ended, self.cpu, self.asking = now, time.process_time() - self.cpu, False
            self.measured = self.counts - self.before
            print("ended", file=sys.stderr, flush=True)

    def take(self, host, body, asking):
        """Take what a reply brings."""
        names, acks = self.talk.reply(host, body)
        assert acks == len(host.held), body[:2000]
        self.counts["reported"] += acks
        self.counts["jobs"] += len(names)
        host.held, host.seqno = names, host.seqno + 1
        if asking and not names:
            self.counts["without work"] += 1
            self.dry_until = time.perf_counter() + DRY_SECONDS
        (self.ready if names else self.idle).append(host)

    def run(self):
        """Send until all is done; return the figures."""
        selector, slots = selectors.DefaultSelector(), [self.session() for _ in range(
            self.connections)]
        resting = [(slot, None) for slot in slots]
        while self.asking or self.ready or selector.get_map():
            for slot, answer in resting[:]:
                resting.remove((slot, answer))
                self.go_on(slot, answer, selector, resting)
            for key, _ in selector.select(0.01 if resting else 1):
                slot, pieces = key.data
                piece = key.fileobj.recv(1 << 18)
                pieces.append(piece)
                answer = complete(pieces, not piece)
                if answer is not None:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self.go_on(slot, answer, selector, resting)
        return self.figures()

    def go_on(self, slot, answer, selector, resting):
        """Give an answer to a session, and send what it wants to send next."""
        request = slot.send(answer)
        if request is None:
            resting.append((slot, None))
            return
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, (slot, []))

    def figures(self):
        """Return what was measured between warm-up and end, and what was counted in all."""
        times = sorted(self.times)
        return dict(
            begun=self.begun, ended=self.ended, requests=self.measured["requests"],
            jobs_given=self.measured["jobs"], without_work=self.measured["without work"],
            generator_cpu=self.cpu, median_ms=1e3 * times[len(times) // 2],
            p99_ms=1e3 * times[len(times) * 99 // 100],
            worst_ms=1e3 * times[-1], total=dict(self.counts))


def complete(pieces, closed):
    """Return the body of an answer once all of it has come, else None."""
    head, gap, body = b"".join(pieces).partition(b"\r\n\r\n")
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if not closed and not (gap and match and len(body) >= int(match[1])):
        return None
    status = head[9:12]
    assert status == b"200", (status, body[:500])
    return zlib.decompress(body, 31) if re.search(rb"(?i)content-encoding: gzip", head) else body


def main():
    print(json.dumps(Load(**json.load(sys.stdin)).run()))


if __name__ == "__main__":
    main()
