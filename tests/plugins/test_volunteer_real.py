"""The client as people start it, with the real server: on loopback, each in a process of its own.

A Door stands between them where the way matters: a proxy, encryption, an address that moves.
"""

import contextlib
import datetime
import io
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from volunteer_world import FILE, PATIENCE, SQUARE, drive, make_client, v

import minigrid

ROOT = FILE.parents[1]
CLIENT_ERROR = int(minigrid.Outcome.CLIENT_ERROR)
WEB_NAME = "grid.example.org"
APP = '''"""quick: doubles."""

%s


def workunit(i):
    return {"input": i} if i < %d else None


def compute(input):
    import time
    time.sleep(%g)
    return 2 * input
'''
SETTINGS = "[minigrid]\nrequest_delay = 0.1\nmin_sendwork_interval = 0\nname = Real\n"


# ---- The processes -------------------------------------------------------------


class Grid:
    """A project's directory, and its real server while it runs."""

    def __init__(self, folder, n_jobs, seconds=0.0, more="", constants="min_quorum = 1"):
        self.folder, self.n_jobs, self.process = folder, n_jobs, None
        folder.mkdir()
        (folder / "quick.py").write_text(APP % (constants, n_jobs, seconds))
        self.configure(more)

    def configure(self, more):
        (self.folder / "setup.cfg").write_text(SETTINGS + more)

    def start(self):
        """Start the server; return its port, which is another one each time."""
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "minigrid.py"), "serve", "--host", "127.0.0.1",
             "--port", "0", "--apps", "quick.py"],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("  http://"):
                self.reader = threading.Thread(target=self.process.stdout.read, daemon=True)
                self.reader.start()
                self.url = line.strip()
                return int(self.url.rpartition(":")[2])
        pytest.fail("the server does not start: " + "".join(lines))

    def stop(self):
        if self.process:
            self.process.terminate()
            assert self.process.wait(timeout=PATIENCE) == 0
            self.reader.join(PATIENCE)
            self.process.stdout.close()
            self.process = None

    def answers(self):
        """The answers that the project has, by the number of the workunit."""
        path = self.folder / "data" / "results" / "quick.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        assert len({a["number"] for a in found}) == len(found), "an answer was taken twice"
        return {a["number"]: a["answer"] for a in found}

    def all_there(self):
        return len(self.answers()) == self.n_jobs

    def check(self, said):
        """Hold that all answers come, the right ones: the server takes reported ones in a while."""
        await_true(self.all_there, lambda: said)
        assert self.answers() == {n: 2 * n for n in range(self.n_jobs)}

    def ask(self, query):
        """What a query says of the server's store."""
        with contextlib.closing(sqlite3.connect(self.folder / "data" / "minigrid.db")) as store:
            return store.execute(query).fetchall()

    def trust(self):
        with urllib.request.urlopen(self.url + "/trust.json", timeout=PATIENCE) as answer:
            return json.load(answer)

    def hosts(self):
        return self.ask("SELECT count(*) FROM host")[0][0]


@pytest.fixture
def grid(tmp_path):
    """A function that makes a project and starts its server."""
    with contextlib.ExitStack() as stack:
        def function(n_jobs, seconds=0.0, more="", name="grid", **constants):
            made = Grid(tmp_path / name, n_jobs, seconds, more, **constants)
            stack.callback(made.stop)
            made.start()
            return made
        yield function


class Door:
    """An address that leads to a server's port, one request for each connection, and writes down
    the first lines of all requests. `page_only` lets nothing in but to the front page."""

    def __init__(self, port, tls=None, headers=()):
        self.port, self.tls, self.headers, self.page_only = port, tls, headers, False
        self.log = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if tls else "http"
        self.url = "%s://127.0.0.1:%d" % (scheme, self.listener.getsockname()[1])
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(PATIENCE)

    def serve(self):
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.attend, args=(caller,), daemon=True).start()

    def attend(self, caller):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(caller.close)
            caller.settimeout(PATIENCE)
            if self.tls:
                caller = self.tls.wrap_socket(caller, server_side=True)
                stack.callback(caller.close)
            request = stack.enter_context(caller.makefile("rb"))
            line = request.readline().decode()
            self.log.append(line.strip())
            method, target, _ = line.split(" ", 2)
            target = re.sub("^http://[^/]*", "", target)  # As a proxy gets it.
            if self.page_only and target != "/":
                return caller.sendall(b"HTTP/1.0 503 Gone\r\n\r\n")
            self.pass_on(caller, request, "%s %s HTTP/1.1\r\n" % (method, target))

    def pass_on(self, caller, request, first):
        head, length = first + "".join("%s\r\n" % header for header in self.headers), 0
        for line in iter(request.readline, b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
            head += line.decode("latin-1")
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as server:
            server.sendall((head + "\r\n").encode("latin-1") + request.read(length))
            for block in iter(lambda: server.recv(65536), b""):
                caller.sendall(block)


def command(*arguments, python=sys.executable, file=FILE):
    return [python, str(file), *map(str, arguments)]


def environment(home, **more):
    kept = {name: value for name, value in os.environ.items()
            if not name.upper().endswith("_PROXY") and not name.startswith("PYTHON")}
    return dict(kept, HOME=str(home), USERPROFILE=str(home), **more)


@pytest.fixture
def client(tmp_path):
    """A function that runs the client to its end: (exit status, what it said)."""
    def function(*arguments, python=sys.executable, **more):
        done = subprocess.run(command("--no-sandbox", *arguments, python=python), text=True,
                              env=environment(tmp_path, **more), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE)
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout
    return function


class Running:
    """A client that runs, and what it has said."""

    def __init__(self, home, arguments, file=FILE):
        self.text, self.changed = "", threading.Condition()
        self.process = subprocess.Popen(
            command("--no-sandbox", *arguments, file=file), env=environment(home), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self):
        for line in self.process.stdout:
            with self.changed:
                self.text += line
                self.changed.notify_all()

    def await_words(self, words):
        with self.changed:
            assert self.changed.wait_for(lambda: words in self.text, PATIENCE), self.text

    def interrupt(self):
        """Ctrl-C, once; return all that it has said."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=PATIENCE) == 0, self.text
        self.thread.join(PATIENCE)
        assert "Traceback" not in self.text, self.text
        return self.text


@pytest.fixture
def started(tmp_path):
    """A function that starts a client."""
    with contextlib.ExitStack() as stack:
        def function(*arguments, file=FILE):
            made = Running(tmp_path, arguments, file)
            stack.callback(made.process.stdout.close)
            stack.callback(made.thread.join, PATIENCE)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made
        yield function


def await_true(condition, why):
    """Look again and again whether something holds that another process brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.05)


# ---- Several clients -----------------------------------------------------------


def test_a_cloned_machine(tmp_path, grid, started):
    """The copy becomes another computer; every answer is taken once, and nobody has trouble."""
    project = grid(24, 0.2)
    first = started(project.url, "--cpus", 1, "--dir", tmp_path / "original")
    first.await_words("reported")
    said = first.interrupt()
    assert "stopping: what is not finished goes on at the next start" in said
    kept = v.load_state(tmp_path / "original")
    assert kept.projects[0].jobs and len(project.answers()) < 24
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    both = [started("--cpus", 1, "--dir", tmp_path / "original")]
    both[0].await_words("reported")  # Its count of requests is ahead now: so the copy is found out.
    both += [started("--cpus", 1, "--dir", tmp_path / "copy")]
    await_true(project.all_there, lambda: [client.text for client in both])
    for client in both:
        client.await_words("reported")
        client.interrupt()
    project.check("")
    # What one of them has kept of the other's is "not needed any more" there: told by the server.
    assert not project.ask("SELECT name, exit_status FROM result WHERE outcome = %d "
                           "AND exit_status != %d" % (CLIENT_ERROR, v.EXIT_ABORTED_BY_PROJECT))
    assert project.hosts() == 2
    states = [v.load_state(tmp_path / name) for name in ("original", "copy")]
    assert len({state.host_cpid for state in states}) == 2
    assert {state.projects[0].hostid for state in states} == {1, 2}


def test_twice_on_one_machine(tmp_path, grid, started):
    """Without --dir, each has a directory and a number of its own."""
    project = grid(40, 0.1)
    both = [started(project.url, "--cpus", 1) for _ in range(2)]
    for client in both:
        client.await_words("reported")
    await_true(project.all_there, lambda: [client.text for client in both])
    for client in both:
        client.interrupt()
    project.check("")
    assert project.hosts() == 2
    assert len(list((tmp_path / ".minigrid").iterdir())) == 2


# ---- The way to the server -----------------------------------------------------


@pytest.mark.parametrize("forced", [True, False])
def test_behind_a_proxy(grid, client, forced):
    """With --proxy all goes through it; with HTTP_PROXY all that is not in the same room."""
    project = grid(3)
    host = project.url[7:] if forced else WEB_NAME + ":8000"
    with Door(int(project.url.rpartition(":")[2])) as proxy:
        way = {} if forced else {"HTTP_PROXY": proxy.url, "http_proxy": proxy.url}
        more = ["--proxy", proxy.url] if forced else []
        status, said = client("http://" + host, "--max-jobs", 3, *more, **way)
    assert status == 0, said
    project.check(said)
    for kind in ("POST %s/register", "POST %s/scheduler", "GET %s/download/", "PUT %s/upload/"):
        assert any(line.startswith(kind % ("http://" + host)) for line in proxy.log), proxy.log


def certificate(folder):
    """Make a certificate for this machine, and a context that shows it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(2020, 1, 1)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a class")])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name)
            .public_key(key.public_key()).serial_number(7).not_valid_before(now)
            .not_valid_after(now + datetime.timedelta(days=40000))
            .add_extension(x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256()))
    pem, secret = folder / "ca.pem", folder / "secret.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return pem, context


def test_over_https(tmp_path, grid, client, started):
    """A web server with TLS in front. Every byte goes through it, and who has the certificate from
    nobody they trust is told what to do."""
    project = grid(3, more="proxy = 127.0.0.1\n")
    pem, context = certificate(tmp_path)
    with Door(int(project.url.rpartition(":")[2]), context, ["X-Forwarded-Proto: https"]) as door:
        stranger = started(door.url)
        stranger.await_words("--ca-file")
        stranger.interrupt()
        assert not door.log
        status, said = client(door.url, "--max-jobs", 3, "--ca-file", pem)
        assert status == 0, said
        project.check(said)
        assert {line.split("/")[1].split()[0] for line in door.log} == {
            "register", "scheduler", "download", "upload"}


def test_a_server_that_moves(tmp_path, grid, client):
    """--moved says so; account, host and jobs stay."""
    project = grid(6)
    folder = tmp_path / "d"
    assert client(project.url, "--max-jobs", 2, "--dir", folder)[0] == 0
    before = v.load_state(folder)
    project.stop()
    project.start()
    status, said = client(project.url, "--moved", "--max-jobs", 4, "--dir", folder)
    assert status == 0, said
    project.check(said)
    after = v.load_state(folder)
    assert [p.url for p in after.projects] == [project.url] and project.hosts() == 1
    assert after.projects[0].authenticator == before.projects[0].authenticator
    assert after.projects[0].hostid == before.projects[0].hostid == 1


def real_clock():
    """A clock that begins now; drive() moves it."""
    class Clock:
        now = time.time()
    return Clock()


def test_an_old_address_leads_to_the_new_one(tmp_path, grid):
    """Nobody does anything: after ten failures the front page is read, and it names the new one."""
    project = grid(30, more="max_wus_to_send = 1\n")
    port = int(project.url.rpartition(":")[2])
    with Door(port) as old, Door(port) as new:
        client, clock = make_client(tmp_path, old, n_cpus=1), real_clock()
        # With a file on its way from a dead address it would wait for that first, and ask rarely.
        drive(client, clock, lambda: client.projects[0].n_reported >= 1 and all(
            job.client_state not in (v.C.NEW, v.C.DOWNLOADING) for job in client.jobs))
        project.stop()
        project.configure("max_wus_to_send = 1\n[api]\naddresses = %s\n" % new.url)
        old.port = new.port = project.start()
        old.page_only, begun, n = True, clock.now, len(old.log)
        drive(client, clock, lambda: client.projects[0].n_reported >= 30)
        client.leave(lambda: clock.now, 0)
    assert old.log.count("GET / HTTP/1.1") == 1 and "POST /scheduler HTTP/1.1" in new.log
    before = old.log[n:old.log.index("GET / HTTP/1.1")]
    assert before.count("POST /scheduler HTTP/1.1") == 10
    assert clock.now - begun > 3600  # With all the waiting of ten failures.
    project.check("")
    assert project.hosts() == 1
    assert client.projects[0].addresses[0] == new.url


# ---- Liars -----------------------------------------------------------------------


def liar(folder, answer):
    """Our client with one change: its jobs say an answer of their own. Return its file."""
    path = folder / f"liar{answer}.py"
    text, n = re.subn(r'write\("output", ', f'write("output", b"-{answer}" or ', FILE.read_text())
    assert n >= 1
    path.write_text(text)
    return path


def test_two_liars_are_caught_and_it_shows(tmp_path, grid, started):
    """[S3-39 C36] Every answer is right in the end; the liars get no more, the honest ones do."""
    project = grid(80, 0.05, constants="validation = 'recheck'\nrecheck = 2")
    liars = {f"liar{n}": liar(tmp_path, n) for n in (1, 2)}
    names = ["anna", "ben", "cleo", *liars]
    for name in names:
        started(project.url, "--cpus", 1, "--dir", tmp_path / name, "--name", name,
                file=liars.get(name, FILE))
    project.check(project.trust)
    await_true(lambda: {entry["computer"].split()[0] for entry in
                        project.trust()["entries"]} == set(liars),
               project.trust)


# ---- The project's key ---------------------------------------------------------


def test_a_server_set_up_anew_is_not_trusted_by_itself(tmp_path, grid, client):
    """The same address, another key: refused, with a sentence that says how to go on [D11]."""
    project = grid(3)
    folder = tmp_path / "d"
    with Door(int(project.url.rpartition(":")[2])) as door:
        assert client(door.url, "--max-jobs", 3, "--dir", folder)[0] == 0
        project.stop()
        shutil.rmtree(project.folder / "data")
        door.port = project.start()
        status, said = client(door.url, "--max-jobs", 3, "--dir", folder)
        assert status == 1 and not project.answers(), said
        key = re.search("start once with --key ([0-9a-f]{32})", said)[1]
        status, said = client(door.url, "--max-jobs", 3, "--dir", folder, "--key", "0" * 32)
        assert status == 1 and not project.answers(), said
        status, said = client(door.url, "--max-jobs", 3, "--dir", folder, "--key", key)
        assert status == 0, said
        project.check(said)
        assert "has changed its key" in said


def test_a_change_of_key_that_the_old_one_signed_is_followed(tmp_path, grid, client):
    project = grid(6)
    folder = tmp_path / "d"
    with Door(int(project.url.rpartition(":")[2])) as door:
        assert client(door.url, "--max-jobs", 2, "--dir", folder)[0] == 0
        project.stop()
        done = subprocess.run([sys.executable, str(ROOT / "minigrid.py"), "keys", "--change"],
                              cwd=project.folder, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        door.port = project.start()
        status, said = client(door.url, "--max-jobs", 4, "--dir", folder)
    assert status == 0, said
    project.check(said)
    assert "has changed its key" in said and project.hosts() == 1


# ---- Other Pythons -------------------------------------------------------------


def other_pythons():
    """The interpreters from 3.9 on that are here, beside the one that runs the tests."""
    found = {}
    for minor in range(9, 15):
        name = "python3.%d" % minor
        places = [*map(str, Path.home().glob(".pyenv/versions/3.%d.*/bin/python3" % minor))]
        for place in filter(None, [shutil.which(name)] + places):  # The first may be a mere shim.
            if minor != sys.version_info[1] and not subprocess.run(
                    [place, "-c", ""], capture_output=True).returncode:
                found[name] = place
    return found


@pytest.mark.parametrize("name", sorted(other_pythons()) or ["none"])
def test_other_pythons(server, client, name):
    if name == "none":
        pytest.skip("no other Python is here")
    python = other_pythons()[name]
    assert client("--help", python=python)[1].startswith("usage: volunteer.py")
    server.add(7, SQUARE)
    status, said = client(server.url, "--once", python=python)
    assert status == 0 and bytes(server.uploads["wu_7_0"]) == b"49", said


# ---- What people are told ------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (["--onec"], "unrecognized arguments: --onec"),
    (["127.0.0.1:1", "--page", "99999"], "'99999' is no port"),
    (["127.0.0.1:1", "--page", "-1"], "--page"),
    (["127.0.0.1:1", "--cpus", "two"], "--cpus"),
    (["127.0.0.1:1=x"], "a share is a number")])
def test_a_mistake_is_named_in_one_line(arguments, words, capsys):
    """The list of all options would hide it."""
    with pytest.raises(SystemExit) as ended:
        v.parse_arguments(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1
    assert said.endswith("--help lists all options\n")


def test_forgetting_what_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("a", "b"):
        folder = tmp_path / ".minigrid" / name
        folder.mkdir(parents=True)
        v.save_state(v.State([v.Project("http://" + name)]), folder)
    (tmp_path / ".minigrid" / "b" / "client.json.bad").write_text("no matter")
    with pytest.raises(SystemExit, match="nothing to forget: no client in .* works for http://c"):
        v.choose_directory("", "", "http://c")
    directory, held = v.choose_directory("", "", "http://a")  # Whichever was used last.
    assert directory.name == "a"
    with pytest.raises(SystemExit, match="stop it first"):
        v.choose_directory("", "", "http://a")
    held.close()
    args = v.parse_arguments(["--forget", "http://c", "--dir", str(directory)])
    with pytest.raises(SystemExit, match="nothing to forget: the client in .* http://c"):
        v.build_client(args, directory, v.Voice(stream=io.StringIO()))


def test_max_jobs_leaves_the_jobs_of_resting_projects(tmp_path, server, clock):
    """They are no business of this run. What is given back is told in one line."""
    for n in range(6):
        server.add(n)
    client = make_client(tmp_path, server, n_cpus=1, max_jobs=1)
    resting = v.Project("http://127.0.0.1:1", "projects/resting", resting=True, authenticator="a")
    resting.adopt(v.Job("other_0", client_state=v.C.READY, report_deadline=clock.now + 9e4,
                        output={"name": "o", "url": "/o", "nbytes_max": 1}))
    client.projects.append(resting)
    drive(client, clock, client.finished)
    assert not resting.jobs[0].over
    said = [line for line in client.voice.stream.getvalue().splitlines() if "given back" in line]
    assert len(said) == 1 and "5 jobs given back: " in said[0] and said[0].endswith("and 1 more")


def test_who_mends_a_refusal_need_not_wait(tmp_path, server, clock):
    """A wrong password is mended by a new start, which then asks at once."""
    server.trouble = {"POST register": [403]}
    client = make_client(tmp_path, server)
    drive(client, clock, client.finished)
    assert client.fatal and len(server.log) == 1
    v.save_state(client.state, client.directory)
    server.add(1)
    again = make_client(tmp_path, server)
    begun = clock.now
    drive(again, clock, lambda: server.store)
    assert clock.now - begun < 30


def test_a_start_says_what_it_does(tmp_path, server, clock):
    client = make_client(tmp_path, server)
    client.introduce(clock.now)
    assert "joining %s as otter" % server.url in client.voice.stream.getvalue()
    assert client.snapshot()["waiting"] == "joining"
    client.projects[0].authenticator = "a" * 32
    client.projects[0].adopt(v.Job("r_0"))
    client.introduce(clock.now)
    assert "1 job kept from last time" in client.voice.stream.getvalue()
    assert client.snapshot()["waiting"] == ""


def test_leaving_is_shown(tmp_path, server, clock):
    """Ctrl-C may take seconds: the view says what goes on."""
    client, shown = make_client(tmp_path, server), []
    client.stop()
    client.leave(lambda: clock.now, 0, lambda now: shown.append(client.snapshot()["stopping"]))
    assert shown == [True] and "goes on at the next start" in client.voice.stream.getvalue()


def test_a_question_ends_before_what_is_done():
    assert v.again("is it there?") == "is it there? Trying again"
    assert v.again("no answer") == "no answer; trying again"


def test_one_reply_without_work_says_nothing_yet(tmp_path, server, clock):
    """The server may just have wanted a second between two requests."""
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.projects[0].n_empty == 1)
    assert "no work" not in client.voice.stream.getvalue()
    drive(client, clock, lambda: client.projects[0].n_empty == 3)
    assert client.voice.stream.getvalue().count("no work at the moment") == 1
