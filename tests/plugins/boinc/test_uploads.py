"""Uploads of BOINC clients, through WSGI without sockets: what each answer is, what is kept."""

import concurrent.futures
import hashlib
import importlib
import io
import os
import re
import string
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import kept
from web import ANYTHING, HEADER, PATIENCE, PLAIN, QUERY, Volunteer, serving, state

import minigrid as m

CAPTURES = Path(os.environ.get("MINIGRID_CAPTURES",
                               Path(__file__).resolve().parents[4] / "shared" / "captures"))
LIMIT = 1000  # of the application echo


# ---- 1. A client without sockets -----------------------------------------------


class Answer:
    """What a client makes of an answer: it looks for its elements as texts."""

    def __init__(self, text):
        (self.status,) = map(int, re.findall(r"^    <status>(-?\d+)</status>$", text, re.M))
        self.message = "".join(re.findall(r"^    <message>(.+)</message>$", text, re.M))
        self.size = next(map(int, re.findall(r"^    <file_size>(\d+)</file_size>$", text, re.M)),
                         None)
        lines = text.splitlines()
        assert lines[0] == "<data_server_reply>" and lines[-1] == "</data_server_reply>"
        assert len(lines) == 3 + bool(self.message) + (self.size is not None), text
        assert len(text) < 8192 and text.isascii()


class Uploader:
    """Uploads as the client does, with the certificate that the job came with."""

    def __init__(self, web, uploads):
        self.web, self.uploads = web, uploads

    def send(self, body, path=PLAIN, **headers):
        got = self.web("POST", path, body, **headers)
        assert got.status == 200 and got.headers["Content-Type"].startswith("text/plain")
        return Answer(got.body.decode("ascii"))

    def head(self, name, content, offset=0, **changes):
        """Return a header: `content` is the whole file."""
        given = dict(name=name, max_nbytes=LIMIT, nbytes=len(content), offset=offset,
                     md5=hashlib.md5(content).hexdigest())
        given.update(changes)
        if "signature" not in given:
            given["signature"] = self.uploads.keys.certificate(name, given["max_nbytes"])
        return HEADER.format(**given).encode("latin-1")

    def put(self, name, content, offset=0, data=None, path=PLAIN, length=None, **changes):
        """Upload a file from `offset` on; `data` is what comes in place of the rest of it."""
        head = self.head(name, content, offset, **changes)
        body = head + (content[offset:] if data is None else data)
        headers = {} if length is None else {"content_length": str(len(head) + length)}
        return self.send(body, path, **headers)

    def size(self, name, path=PLAIN):
        return self.send(QUERY.format(name).encode("latin-1"), path)


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def uploads():
    module = importlib.import_module("minigrid_plugin_boinc.uploads")
    module.damaged.clear()
    return module


@pytest.fixture
def client(web, uploads):
    return Uploader(web, uploads)


@pytest.fixture
def anna(web):
    return Volunteer(web)


@pytest.fixture
def name(anna):
    """The name of an output that a client holds."""
    return anna.fetch()[0]["output"]["name"]


def stored(name):
    return kept("upload", name)


def exists(name):
    return m.plugged("uploaded")[-1](name)[1]


def refused(answer, status, before, *words):
    """Hold that an answer has a status and says why in plain words, and nothing has changed."""
    assert (answer.status, answer.size) == (status, None), answer.message
    assert 10 < len(answer.message) <= 300 and "Traceback" not in answer.message
    assert all(word in answer.message for word in words), answer.message
    assert state() == before


# ---- 2. The captured requests --------------------------------------------------


@pytest.mark.skipif(not CAPTURES.is_dir(), reason=f"no captures: {CAPTURES} (MINIGRID_CAPTURES)")
def test_the_requests_of_these_tests_are_those_of_the_real_client():
    md5 = {n: hashlib.md5(n).hexdigest() for n in (b"HELLO\n", b"")}
    same = dict(max_nbytes=1000000, signature="", offset=0)
    for file, text in {
            "u1_upload_small.header": HEADER.format(
                name="u1_0_0", nbytes=6, md5=md5[b"HELLO\n"], **same),
            "u2_get_file_size.request": QUERY.format("u7_0_0"),
            "u6_upload_empty_file.header": HEADER.format(
                name="u11_0_0", nbytes=0, md5=md5[b""], **same),
            "u7_upload_signed.header": HEADER.format(
                name="u12_0_0", nbytes=6, md5=md5[b"HELLO\n"], offset=0, max_nbytes=100000,
                signature="0123\nabcd\n.")}.items():
        assert (CAPTURES / f"{file}.xml").read_text() == text


@pytest.mark.skipif(not CAPTURES.is_dir(), reason=f"no captures: {CAPTURES} (MINIGRID_CAPTURES)")
def test_the_captured_requests_byte_for_byte_but_their_names(client, anna, monkeypatch):
    """u3 was cut after 61035 bytes, u4 asks, u5 goes on there."""
    monkeypatch.setattr(client.uploads.keys, "certifies", lambda *_: True)
    m.Workunit.update(rsc_disk_bound=1e6).execute()
    names = dict(zip(["u1_0_0", "u7_0_0", "u11_0_0", "u12_0_0"],
                     [job["output"]["name"] for job in anna.fetch(4)]))

    def request(file):
        text = (CAPTURES / f"{file}.xml").read_text()
        old = re.search(r"<(?:name|get_file_size)>(.*?)<", text)[1]
        return text.replace(old, names[old]).encode()

    def replied(file):
        return Answer((CAPTURES / f"{file}.reply.xml").read_text())

    assert client.send(request("u1_upload_small.header") + b"HELLO\n").status \
        == replied("u1_upload_small").status == 0
    got = client.send(request("u2_get_file_size.request"))
    assert (got.status, got.size) == (0, replied("u2_get_file_size").size)
    data = b"X" * 200000
    head = request("u3_upload_from_start.header")
    cut = client.send(head + data[:61035], content_length=str(len(head) + len(data)))
    assert cut.status == 1, "nobody is there to read it"
    got, then = client.send(request("u4_get_file_size_partial.request")), \
        replied("u4_get_file_size_partial")
    assert (got.status, got.size) == (then.status, then.size - 1), "the last byte is kept back"
    with monkeypatch.context() as patch:  # What was in the captured file is not known.
        patch.setattr(importlib.import_module("minigrid_plugin_files"), "file_sum",
                      lambda *_: "876d4b26b5a3cd9c7874e4ab020c3df3")
        assert client.send(request("u5_upload_resumed.header") + data[61035:]).status == 0
    assert stored(names["u7_0_0"]) == data
    assert client.send(request("u6_upload_empty_file.header")).status == 0
    assert stored(names["u11_0_0"]) == b""
    assert client.send(request("u7_upload_signed.header") + b"HELLO\n").status == 0
    assert [stored(names[n]) for n in ("u1_0_0", "u12_0_0")] == [b"HELLO\n"] * 2


# ---- 3. What is taken ----------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"1", b"x" * LIMIT, b"<data>\n</data>\0\xff"])
def test_an_output_is_stored(client, name, content):
    assert client.put(name, content).status == 0
    assert stored(name) == content and exists(name)
    assert client.size(name).size == len(content)


def test_an_upload_to_the_address_that_names_it(client, name):
    path = f"/boinc/upload/{name}/file_upload_handler"
    assert client.size(name, path).size == 0
    assert client.put(name, b"1", path=path).status == 0
    before = state()
    refused(client.put(name, b"2", path=path.replace("_0_out", "_1_out")), -1, before, "address")
    strange = "/boinc/upload/%3Cmessage%3E%00&/file_upload_handler"
    refused(client.put(name, b"2", path=strange), -1, before, "?message???")


def test_a_cut_upload_goes_on_where_it_ended(client, name):
    """[WIRE 10.2] The client asks for the size first, then goes on there."""
    content = bytes(range(250)) * 4
    got = client.put(name, content, data=content[:600], length=1000)
    assert got.status == 1 and not exists(name)
    at = client.size(name).size
    assert at == 599
    got = client.put(name, content, at, data=content[at:700], length=1000 - at)
    assert got.status == 1 and "700 of 1000" in got.message
    assert client.put(name, content, client.size(name).size).status == 0
    assert stored(name) == content


def test_a_server_that_died_before_the_last_check_loses_no_upload(client, name):
    """All bytes are in the part file, but the client was not told; a size that is its own would
    make it take the upload as done [WIRE 10.1]."""
    path = m.file_path("upload", name)
    path.with_name(path.name + ".part").write_bytes(b"all of it")
    at = client.size(name).size
    assert at < len(b"all of it")
    assert client.put(name, b"all of it", at).status == 0
    assert stored(name) == b"all of it"


def test_a_second_time_after_a_lost_answer(client, name):
    assert client.put(name, b"abc").status == 0
    before = state()
    assert client.put(name, b"abc").status == 0
    assert client.put(name, b"abc", 2).status == 0
    assert state() == before


def test_more_than_the_file_is_not_stored(client, name, either):
    assert client.put(name, b"abc", data=b"abcdef").status == 0
    assert stored(name) == b"abc"


def test_more_than_the_request_is_not_read(client, name):
    assert client.put(name, b"abcdef", length=3).status == 1
    assert client.put(name, b"abcdef", 3, data=b"DEF").status == 1, "damaged: not abcdef any more"
    assert client.size(name).size == 0


def test_both_protocols_go_on_with_the_same_part(client, anna, name):
    assert anna.put(name, b"abc", total=6).json == {"nbytes": 3, "complete": False}
    assert client.put(name, b"abcdef", client.size(name).size).status == 0
    assert anna.web("GET", f"/upload/{name}").json == {"nbytes": 6, "complete": True}


def test_an_output_given_up_may_still_come(client, web, anna):
    """[C11] It counts while it can be compared."""
    (job,) = anna.fetch()
    web.now = job["report_deadline"] + 1
    m.run_pass(web.now)
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.NO_REPLY
    assert client.put(job["output"]["name"], b"1").status == 0
    assert stored(job["output"]["name"]) == b"1"


@pytest.mark.parametrize("reported", [dict(client_state=3, exit_status=1), dict()])
def test_what_comes_after_the_report_is_dropped_in_silence(client, anna, reported):
    """[C46, WIRE 12] The client stops trying, and its user sees no error where there is none."""
    (job,) = anna.fetch()
    name = job["output"]["name"]
    anna.report(job, **reported)
    before = state()
    assert client.size(name).size > 1e9, "so that it need not send it at all"
    got = client.put(name, b"1" * 500)
    assert (got.status, got.message) == (0, "")
    assert state() == before


def test_a_success_without_its_output_is_none(client, anna, web):
    """[WIRE 12, 17] State 5 and exit status 0 do not prove that the output has come."""
    mine, berta = anna.fetch()[0], Volunteer(web, "berta")
    before = state()
    refused(client.put(mine["output"]["name"], b"1", signature="wrong"), -1, before)
    (hers,) = berta.fetch()
    assert client.put(hers["output"]["name"], b'"echo_0"').status == 0
    anna.report(mine)
    berta.report(hers)
    assert m.Result.get(name=mine["name"]).outcome == m.Outcome.SUCCESS
    for web.now in range(web.now + 1, web.now + 4):
        m.run_pass(web.now)
    lost = m.Result.get(name=mine["name"])
    assert (lost.outcome, lost.granted_credit) == (m.Outcome.VALIDATE_ERROR, 0)
    copies = m.Result.select().where(m.Result.workunit == lost.workunit_id)
    assert [r.server_state for r in copies.order_by(m.Result.id)][2:] == [m.ServerState.UNSENT]


# ---- 4. What is refused --------------------------------------------------------


def test_refused_for_good(client, web, anna):
    mine, cancelled = (job["output"]["name"] for job in anna.fetch(2))
    wu = m.Result.get(name=cancelled[:-4]).workunit_id
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([wu], web.now))
    unsent = m.Result.get(server_state=m.ServerState.UNSENT).name
    before = state()
    for name, word in {cancelled: "cancelled", f"{unsent}_out": "given back",
                       mine[:-4]: "no result", "echo_99_0_out": "no result",
                       f"{mine}.part": "no result", "../minigrid.db": "no result",
                       "_out": "no result", "<b>&_out": "name"}.items():
        refused(client.put(name, b"1"), -1, before, word)
        refused(client.size(name), -1, before, word)
    good = client.uploads.keys.certificate(mine, LIMIT)
    for wrong in ("", "0123\nabcd\n.", good[:-3], good.replace(good[0], "x"),
                  client.uploads.keys.certificate(mine, LIMIT + 1),
                  client.uploads.keys.certificate(mine + "x", LIMIT)):
        refused(client.put(mine, b"1", signature=wrong), -1, before, "certificate")
    refused(client.put(mine, b"1" * (LIMIT + 1)), -1, before, "too large")
    refused(client.put(mine, b"1" * (LIMIT + 1), max_nbytes=5000), -1, before, f"at most {LIMIT}")
    refused(client.put(mine, b"12", max_nbytes=1), -1, before, "too large")
    refused(client.put(mine, b"1", offset=2), -1, before, "offset")
    refused(client.put(mine, b"1", md5=""), -1, before, "md5_cksum")
    assert client.put(mine, b"1").status == 0


@pytest.mark.parametrize("body", [
    b"", b"hello", b"<data_server_request>\n</data_server_request>\n", b"\0" * 20000,
    QUERY.format("").encode(), QUERY.format("echo_0_0_out").encode()[30:],
    HEADER[:-8].encode(), HEADER.encode(), HEADER.replace("<data>", "x" * 9000).encode()])
def test_bodies_that_are_no_upload(client, name, body):
    refused(client.send(body), -1, state())


@pytest.mark.parametrize("length", ["", "0", "-5", "3"])
def test_a_length_that_is_none(client, name, length):
    before = state()
    refused(client.send(client.head(name, b"1") + b"1", content_length=length), -1, before)


def test_pieces_that_do_not_follow_come_again(client, name):
    """Status 1: the client asks for the size before its next attempt [WIRE 10.1]."""
    before = state()
    refused(client.put(name, b"abcdef", 3), 1, before, "continue at byte 0")
    client.put(name, b"abcdef", data=b"ab", length=6)
    before = state()
    refused(client.put(name, b"abcdef", 3), 1, before, "continue at byte 2")


def test_a_damaged_file_is_dropped_and_comes_again_but_not_for_ever(client, name):
    before = state()
    for status in (1, 1):
        refused(client.put(name, b"abc", data=b"abx"), status, before, "damaged")
    assert client.put(name, b"abc").status == 0, "a good one in between"
    assert stored(name) == b"abc" and not client.uploads.damaged
    before = state()
    for status in (1, 1, -1, -1):
        refused(client.put(name, b"abcd", data=b"abcx"), status, before, "damaged")
    assert stored(name) == b"abc", "what was right stays"


def test_another_file_of_the_same_size_replaces_the_first(client, name):
    """The job was computed again, with another outcome; it is not reported yet."""
    assert client.put(name, b"abc").status == 0
    assert client.put(name, b"xyz").status == 0
    assert stored(name) == b"xyz"


def test_a_store_that_takes_nothing(client, name, monkeypatch):
    """D13: a small output is a row; the client comes again with it."""
    before = state()
    with monkeypatch.context() as patch:
        patch.setattr(m, "count_firings", lambda done: m.db.execute_sql("SELECT no"))
        refused(client.put(name, b"abc"), 1, before, "cannot be written")
    assert client.put(name, b"abc").status == 0 and stored(name) == b"abc"


def test_a_place_where_nothing_can_be_stored(client, name):
    path = m.file_path("upload", name)
    part = path.with_name(path.name + ".part")
    part.mkdir()
    got = client.put(name, b"abc")
    assert got.status == 1 and "try again later" in got.message
    part.rmdir()
    assert client.put(name, b"abc").status == 0


def test_twice_at_once(client, web, name):
    """One of them is told to come later; the other one's file is whole."""
    class Slow(io.BytesIO):
        started, go_on = threading.Event(), threading.Event()

        def read(self, *size):
            if self.tell() >= 8192:
                self.started.set()
                assert self.go_on.wait(PATIENCE)
            return super().read(*size)

    m.Workunit.update(rsc_disk_bound=1e6).execute()
    content = b"first" * 4000
    body = client.head(name, content, max_nbytes=30000) + content
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.send, Slow(body), content_length=str(len(body)))
        assert Slow.started.wait(PATIENCE)
        before = state()
        second = client.put(name, b"second")
        Slow.go_on.set()
        assert first.result(PATIENCE).status == 0
        pool.submit(m.db.close).result(PATIENCE)
    assert second.status == 1 and "already" in second.message
    assert stored(name) == content and before[0] == state()[0]
    assert client.put(name, b"again!").status == 0, "the next one may"


# ---- 5. Before the body --------------------------------------------------------


def early(client, name, head=b"", length=10**6, path=None, method="POST"):
    path = f"/boinc/upload/{name}/file_upload_handler" if path is None else path
    before = state()
    got = client.uploads.early_answer(method, path, length, head)
    assert state() == before
    return got and Answer(got).status


def test_an_upload_is_refused_by_its_address(client, anna):
    mine, reported = anna.fetch(2)
    anna.report(reported)
    m.Workunit.update(rsc_disk_bound=1e6).execute()
    name = mine["output"]["name"]
    assert early(client, name) is None
    assert early(client, name, length=10**6 + 9000) == -1
    assert early(client, "echo_99_0_out") == -1
    assert early(client, reported["output"]["name"]) == 0
    assert early(client, "", path=PLAIN) is None, "what file? the header will say"
    assert early(client, name, method="GET", length=10**9) is None
    for path in ("/scheduler", "/", "", f"/upload/{name}", PLAIN + "/x", f"/boinc/upload/{name}"):
        assert early(client, "", path=path, head=b"x" * 9000, length=10**9) is None


def test_an_upload_is_refused_by_its_header(client, name):
    for path in (None, PLAIN):
        assert early(client, name, client.head(name, b"x" * LIMIT), path=path) is None
        assert early(client, name, client.head(name, b"x", signature="0\n."), path=path) == -1
        assert early(client, name, client.head("echo_99_0_out", b"x"), path=path) == -1
        large = client.head(name, b"x" * 2000, max_nbytes=2000)
        assert early(client, name, large, path=path) == -1
        assert early(client, name, b"x" * 9000, path=path) == -1
        assert early(client, name, QUERY.format(name).encode(), path=path) is None


# ---- 6. Anything at all --------------------------------------------------------


def mutated(draw, body):
    """Cut a piece out of a body, or put one in."""
    at, n = draw(st.integers(0, len(body))), draw(st.integers(0, 30))
    return body[:at] + draw(st.binary(max_size=20)) + body[at + n:]


@pytest.fixture
def elsewhere(web):
    """What lies outside of data/upload stays as it is."""
    def found():
        return {p for p in m.project.data.rglob("*") if p.parent.parent.name != "upload"}
    before = found()
    yield
    assert found() == before


@ANYTHING
@given(data=st.data())
def test_any_body_gets_an_answer_and_nothing_is_stored_elsewhere(
        web, elsewhere, anna, uploads, data):
    if not m.Result.select().where(m.Result.server_state == 4).exists():
        anna.fetch(2)
    client = Uploader(web, uploads)
    name = data.draw(st.sampled_from(["echo_0_0_out", "echo_1_0_out"]) | st.text(max_size=30))
    name = name.encode("utf-8", "replace").decode("latin-1")
    content = data.draw(st.binary(max_size=40))
    head = client.head(name, content, data.draw(st.integers(-2, 42)))
    body = data.draw(st.sampled_from([head + content, QUERY.format(name).encode("latin-1")]))
    for _ in range(data.draw(st.integers(0, 2))):
        body = mutated(data.draw, body)
    body = data.draw(st.just(body) | st.binary())
    path = data.draw(st.just(PLAIN) | st.text(string.ascii_letters + "_.%0", min_size=1, max_size=9)
                     .map(lambda n: f"/boinc/upload/{n}/file_upload_handler"))
    early = uploads.early_answer("POST", path, len(body), body[:data.draw(st.integers(0, 9000))])
    assert early is None or Answer(early)
    client.send(body, path)
    there = sum(path.stat().st_size for path in (m.project.data / "upload").glob("*/*"))
    ((small,),) = m.db.execute_sql("SELECT total(length(content)) FROM small_file "
                                   "WHERE name LIKE 'upload/%'")
    there += small
    assert there <= 2 * LIMIT, "no upload is larger than allowed"


@settings(ANYTHING, max_examples=60)
@given(content=st.binary(min_size=1, max_size=60),
       steps=st.lists(st.tuples(st.sampled_from("cut damage ahead again size json".split()),
                                st.integers(0, 60)), max_size=8))
def test_whatever_breaks_off_the_right_file_is_there_in_the_end(web, anna, uploads, content, steps):
    client = Uploader(web, uploads)
    (job,) = anna.fetch() if not m.Result.select().where(m.Result.server_state == 4).exists() \
        else [dict(output=dict(name=m.Result.get(server_state=4).name + "_out"))]
    name = job["output"]["name"]
    for path in m.file_path("upload", name).parent.glob("*"):
        path.unlink()
    m.db.execute_sql("DELETE FROM small_file")
    uploads.damaged.clear()
    for step, n in steps:
        at, n = client.size(name).size, n % (len(content) + 1)
        if step == "cut" and at < len(content):
            got = client.put(name, content, at, data=content[at:at + n], length=len(content) - at)
            assert got.status == (0 if at + n >= len(content) else 1)
        elif step == "damage" and at < len(content):
            wrong = bytes(255 - byte for byte in content[at:])
            assert client.put(name, content, at, data=wrong).status in (1, -1)
        elif step == "ahead":
            assert client.put(name, content, n).status in (0, 1)
        elif step == "again":
            assert client.put(name, content).status == 0
        elif step == "json":
            anna.put(name, content[:n] or b"?", total=len(content))
        assert not exists(name) or stored(name) in (content, b"?")
    while (at := client.size(name).size) < len(content) or stored(name) != content:
        client.put(name, content, at if at < len(content) else 0)
    assert stored(name) == content
