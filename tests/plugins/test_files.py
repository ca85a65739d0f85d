"""Files over HTTP: downloads with ranges, uploads that resume; what each bad input gets."""

import concurrent.futures
import io
import os
import stat
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import kept
from web import ANYTHING, NOW, PATIENCE, Volunteer, refused, serving, sha256, sound, state

import minigrid as m


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def anna(web):
    return Volunteer(web)


@pytest.fixture
def job(anna):
    return anna.fetch()[0]


# ---- 1. Downloads --------------------------------------------------------------


@pytest.fixture(params=["application", "small"])
def file(job, request):
    """A file to download: (path, content)."""
    name = job["files"][0]["name"]
    content = m.file_path("download", name).read_bytes()
    if request.param == "small":
        name, content = "small_1_in", content[:3000]
        m.project.write(lambda: m.plugged("keep_file")[-1]("download", name, content))
        assert not m.file_path("download", name).exists()
    yield f"/download/{name}", content
    m.db.execute_sql("DELETE FROM small_file WHERE name = 'download/small_1_in'")


RANGES = {  # Range: (status, slice)
    "bytes=0-3": (206, slice(0, 4)), "bytes=5-": (206, slice(5, None)),
    "bytes=-4": (206, slice(-4, None)), "bytes=0-999999": (206, slice(0, None)),
    "bytes=999999-": (416, None), "bytes=9-3": (416, None), "bytes=-0": (416, None),
    "bytes=0-0": (206, slice(0, 1)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("header", RANGES)
def test_ranges(web, file, header):
    path, content = file
    status, part = RANGES[header]  # Bottle leaves the file of a wrong range to the collector.
    got = web("GET", path, Range=header)
    assert got.status == status
    if status == 206:
        assert got.body == content[part]
        start = content.index(content[part])
        assert got.headers["Content-Range"] == \
            f"bytes {start}-{start + len(got.body) - 1}/{len(content)}"


def test_a_file_comes_whole_and_may_be_kept_for_ever(web, file):
    path, content = file
    got = web("GET", path)
    assert (got.status, got.body) == (200, content)
    assert got.headers["Content-Length"] == str(len(content))
    assert "immutable" in got.headers["Cache-Control"]
    assert got.headers["Content-Type"] == "application/octet-stream"
    again = web("GET", path, If_None_Match=got.headers["Etag"])
    assert (again.status, again.body) == (304, b"")
    other = web("GET", path, If_None_Match='"something else"')
    assert (other.status, other.body) == (200, content)
    head = web("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(content))


def test_an_empty_file(web, job):
    """[WIRE 9]"""
    m.store_file("download", "nothing", b"")
    m.db.execute_sql("INSERT INTO small_file VALUES ('download/small', x'')")
    for method in ("GET", "HEAD"):
        for name in ("nothing", "small"):
            got = web(method, f"/download/{name}")
            assert (got.status, got.body, got.headers["Content-Length"]) == (200, b"", "0")
    m.db.execute_sql("DELETE FROM small_file WHERE name = 'download/small'")


def test_a_file_that_is_gone(web, job):
    m.db.execute_sql("DELETE FROM small_file")
    for method in ("GET", "HEAD"):
        assert web(method, f"/download/{job['input']['name']}", Range="bytes=1-").status == 404


def test_the_beginning_of_a_file(web, either):
    """D13: who shows or keeps only that need not take all of what a stranger has sent."""
    m.project.write(lambda: m.plugged("keep_file")[-1]("upload", "x_out", b"abcdef"))
    (read,) = m.plugged("file_content")
    assert [read("upload", "x_out", n) for n in (0, 2, 9, -1)] == [b"", b"ab"] + [b"abcdef"] * 2
    m.db.execute_sql("DELETE FROM small_file WHERE name = 'upload/x_out'")
    m.file_path("upload", "x_out").unlink(missing_ok=True)


PATHS = [
    "..%2fminigrid.db", "%2e%2e%2fminigrid.db", "../minigrid.db", "..%5cminigrid.db",
    "%2fetc%2fpasswd", "/etc/passwd", "C:%5cboot.ini", "echo_0_in%00", "%00", "..", ".", "%20",
    "a%0a", "a%0d%0aX:%20y", ".hidden", "-rf", "a" * 201, "a" * 5000, "%c3%a9", "%ff",
    "echo_0_in/", "echo_0_in%2f", "a?b=c", "minigrid.db", "server.lock", "no_such_file", "*",
    "~root", "$HOME", "a;b", "a:b",
]


def test_names_that_are_paths_find_nothing(web, anna, job):
    before = state()
    for name in PATHS:
        for method, folder in (("GET", "download"), ("HEAD", "download"), ("PUT", "upload")):
            got = web(method, f"/{folder}/{name}", b"x", Authorization=f"Bearer {anna.key}")
            assert got.status in (400, 404, 405), (name, got.status)
            assert b"SQLite" not in got.body
        got = web("GET", f"/upload/{name}")
        assert got.status in (400, 404) or got.json == {"nbytes": 0, "complete": False}, name
        assert state() == before, name


# ---- 2. Uploads ----------------------------------------------------------------


def test_uploads_that_are_not_ones_own_or_not_wanted(web, anna):
    mine, reported, cancelled, failed = anna.fetch(4)
    berta = Volunteer(web, "berta")
    (hers,) = berta.fetch()
    anna.report(reported)
    anna.report(failed, client_state=3, exit_status=195)
    m.project.write(lambda: m.plugged("cancel_workunits")[0](
        [m.Workunit.get(name=cancelled["workunit"]).id], NOW))
    unsent = m.Result.get(server_state=m.ServerState.UNSENT)
    before = state()
    for name, status in {
            hers["output"]["name"]: 403, reported["output"]["name"]: 403,
            failed["output"]["name"]: 403, cancelled["output"]["name"]: 403,
            f"{unsent.name}_out": 403, "echo_99_0_out": 404, mine["name"]: 404, "_out": 404,
            "out": 404, mine["input"]["name"]: 404, f"{mine['name']}_out_out": 404,
            f"{mine['name']}_out.part": 404}.items():
        refused(anna.put(name, b"x"), status, before)
    refused(anna.put(mine, b"x", Authorization="Bearer \xff"), 400, before)
    for key in ("nobody", "", berta.key, anna.key.upper(), "Bearer " + anna.key, "\0"):
        refused(anna.put(mine, b"x", Authorization=f"Bearer {key}"), 403, before)
    for header in ("", anna.key[:-1], "Basic " + anna.key, "Bearer é".encode().decode("latin-1")):
        refused(anna.put(mine, b"x", Authorization=header), 403, before)
    assert anna.put(mine, b"x").status == 200


def test_an_output_given_up_may_still_come(web, anna, job):
    """[C11] It counts while it can be compared."""
    web.now = job["report_deadline"] + 1
    m.run_pass(web.now)
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.NO_REPLY
    assert anna.put(job, b"1").json["complete"]
    assert anna.report(job)["acks"] == [job["name"]]
    assert m.Result.get(name=job["name"]).outcome == m.Outcome.SUCCESS


def test_an_output_may_be_as_large_as_the_assignment_says(web, anna, job):
    limit = job["output"]["nbytes_max"]
    assert limit == 1000
    before = state()
    assert "at most 1000" in refused(anna.put(job, b"x" * 1001), 413, before)
    refused(anna.put(job, b"x", total=10**14), 413, before)
    assert anna.put(job, b"x" * 1000).json == {"nbytes": 1000, "complete": True}


def test_a_piece_in_the_wrong_place(web, anna, job):
    """[WIRE 9] The answer says where to go on."""
    before = state()
    got = anna.put(job, b"cd", start=2, total=4)
    refused(got, 409, before)
    assert got.json["nbytes"] == 0
    assert anna.put(job, b"abc", total=6).json == {"nbytes": 3, "complete": False}
    before = state()
    for start in (4, 5):
        got = anna.put(job, b"f", start=start, total=6)
        refused(got, 409, before)
        assert got.json["nbytes"] == 3
    assert anna.put(job, b"BCDEF", start=1, total=6).json == {"nbytes": 6, "complete": True}
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b"aBCDEF"


def test_starting_again_from_the_beginning(web, anna, job):
    """A client that has lost its place, or computed something else meanwhile."""
    anna.put(job, b"x" * 90, total=100)
    assert anna.put(job, b"abc", total=6).json == {"nbytes": 3, "complete": False}
    assert anna.put(job, b"def", start=3, total=6, sha256=sha256(b"abcdef")).json["complete"]
    assert m.file_path("upload", job["output"]["name"]).read_bytes() == b"abcdef"


@pytest.mark.parametrize("wrong", ["0" * 64, "nonsense", sha256(b"1").upper()[:-1],
                                   "é".encode().decode("latin-1")])
def test_a_sum_that_is_wrong(web, anna, job, wrong, either):
    """The damaged file is forgotten, else no repetition would ever help."""
    before = state()
    got = anna.put(job, b"1", sha256=wrong)
    assert "damaged" in refused(got, 409, before) and got.json["nbytes"] == 0
    assert anna.put(job, b"1", sha256=sha256(b"1").upper()).json["complete"]


RANGE_NONSENSE = [
    "", "bytes", "bytes 0-0", "bytes 0-0/0", "bytes 0-0/*", "bytes */1", "bytes 1-0/2",
    "bytes 0-1/1", "bytes 0-2/3", "bytes -1-0/1", "bytes 0-0/1 ", "0-0/1", "bytes=0-0/1",
    "items 0-0/1", "bytes 0x0-0x0/1", "bytes ٠-٠/١".encode().decode("latin-1"), "bytes 0-0/1\xff",
    "bytes 0-0/" + "9" * 400, "bytes " + "9" * 400 + "-0/1", "bytes 0-0/1\0"]


def test_a_range_that_is_none(web, anna, job):
    before = state()
    for header in RANGE_NONSENSE:
        refused(anna.put(job, b"x", Content_Range=header), 400, before)


def test_without_a_range_the_body_is_the_file(web, anna, job):
    name = job["output"]["name"]
    got = web("PUT", f"/upload/{name}", b"whole", Authorization=f"Bearer {anna.key}")
    assert got.json == {"nbytes": 5, "complete": True}
    assert kept("upload", name) == b"whole"
    assert not m.file_path("upload", name).exists()


def test_a_large_output_is_a_file(web, anna, job, monkeypatch):
    """D13: each takes the place of what came before, until it is reported."""
    monkeypatch.setattr(sys.modules["minigrid_plugin_files"], "SMALL_BYTES", 100)
    name, large = job["output"]["name"], b"x" * 101
    for content in (b"small", large, b"small", large[:-1], large):
        assert anna.put(job, content, sha256=sha256(content)).json["complete"]
        assert kept("upload", name) == content
        assert m.file_path("upload", name).exists() == (content == large)
    assert m.db.execute_sql("SELECT count(*) FROM small_file WHERE name = ?",
                            (f"upload/{name}",)).fetchone() == (0,)


def test_what_is_left_of_an_attempt_goes(web, anna, job):
    """A small output comes whole: no piece of it, right or damaged, is gone on with."""
    name = job["output"]["name"]
    for content, status in ((b"abx", 409), (b"abc", 200)):
        anna.put(job, b"a", total=3)
        assert m.plugged("uploaded")[-1](name) == (1, False)
        assert anna.put(job, content, sha256=sha256(b"abc")).status == status
        assert m.plugged("uploaded")[-1](name) == (3 * (status == 200), status == 200)
        assert not list(m.file_path("upload", name).parent.glob(f"{name}*"))
    assert kept("upload", name) == b"abc"


def test_a_body_that_ends_early_is_half_an_upload(web, anna, job):
    got = anna.put(job, b"abc", content_length="6", Content_Range="bytes 0-5/6")
    assert got.json == {"nbytes": 3, "complete": False}
    assert not m.file_path("upload", job["output"]["name"]).exists()
    assert anna.put(job, b"def", start=3).json == {"nbytes": 6, "complete": True}


def test_a_body_that_goes_on_is_cut(web, anna, job):
    got = anna.put(job, b"abcdef", content_length="3", Content_Range="bytes 0-2/3")
    assert got.json == {"nbytes": 3, "complete": True}
    assert kept("upload", job["output"]["name"]) == b"abc"


def test_a_length_that_is_not_the_ranges(web, anna, job):
    before = state()
    refused(anna.put(job, b"abc", Content_Range="bytes 0-5/6"), 400, before)
    refused(anna.put(job, b"abc", Content_Range="bytes 0-0/1"), 400, before)


def test_an_empty_output(web, anna, job):
    assert anna.put(job, b"", sha256=sha256(b"")).json == {"nbytes": 0, "complete": True}
    assert web("GET", f"/upload/{job['output']['name']}").json == {"nbytes": 0, "complete": True}
    assert kept("upload", job["output"]["name"]) == b""


def test_a_second_time_after_a_lost_answer(web, anna, job):
    anna.put(job, b"abc")
    before = state()
    assert anna.put(job, b"abc").json == {"nbytes": 3, "complete": True}
    assert anna.put(job, b"c", start=2, total=3).json == {"nbytes": 3, "complete": True}
    assert state() == before


def test_another_file_of_the_same_size(web, anna, job):
    """Its sum shows that it is another: it replaces the first, until that one is reported."""
    name = job["output"]["name"]
    anna.put(job, b"abcd")
    assert anna.put(job, b"abcd", sha256=sha256(b"abcd")).json["complete"]
    assert anna.put(job, b"wx", total=4, sha256=sha256(b"wxyz")).json == {
        "nbytes": 2, "complete": False}
    assert kept("upload", name) == b"abcd", "whole until the other one is"
    assert anna.put(job, b"yz", start=2, total=4, sha256=sha256(b"wxyz")).json["complete"]
    assert kept("upload", name) == b"wxyz"
    anna.report(job)
    before = state()
    refused(anna.put(job, b"1234", sha256=sha256(b"1234")), 403, before)


def test_a_damaged_repetition_does_not_harm_what_is_there(web, anna, job):
    anna.put(job, b"abc")
    before = state()
    assert "damaged" in refused(anna.put(job, b"abx", sha256=sha256(b"xyz")), 409, before)


def test_a_disk_that_fails_in_the_middle(web, anna, job, on_disk):
    """New bytes never lie in front of old ones: what is left is the beginning of one file."""
    class Failing(io.BytesIO):
        def read(self, *size):
            if self.tell():
                raise OSError(28, "No space left on device")
            return super().read(3)

    name = job["output"]["name"]
    anna.put(job, b"x" * 90, total=100)
    got = web("PUT", f"/upload/{name}", Failing(b"abcdef"), Authorization=f"Bearer {anna.key}",
              content_length="6")
    assert got.status == 507 and "No space left" in got.json["error"]
    path = m.file_path("upload", name)
    assert path.with_name(path.name + ".part").read_bytes() == b"abc"
    assert web("GET", f"/upload/{name}").json == {"nbytes": 3, "complete": False}
    assert anna.put(job, b"def", start=3, total=6, sha256=sha256(b"abcdef")).json["complete"]


def test_twice_at_once(web, anna, job):
    """One of them is refused and told to wait; the other one's file is whole."""
    class Slow(io.BytesIO):
        started, go_on = threading.Event(), threading.Event()

        def read(self, *size):
            self.started.set()
            assert self.go_on.wait(PATIENCE)
            return super().read(*size)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        name = job["output"]["name"]
        anna.put(job, b"fi", total=5)
        first = pool.submit(
            web, "PUT", f"/upload/{name}", Slow(b"rst"), Authorization=f"Bearer {anna.key}",
            content_length="3", Content_Range="bytes 2-4/5")
        assert Slow.started.wait(PATIENCE)
        second = anna.put(job, b"second")
        Slow.go_on.set()
        assert first.result(PATIENCE).json == {"nbytes": 5, "complete": True}
        pool.submit(m.db.close).result(PATIENCE)
    assert second.status == 409 and "already" in second.json["error"]
    assert second.json["nbytes"] == 2, "so much was there"
    assert m.file_path("upload", name).read_bytes() == b"first"
    assert anna.put(job, b"again!").status == 200, "the next one may"


def test_a_report_while_the_output_is_on_its_way(web, anna, job):
    """C46: slowly sent, it must not take the place of what was judged meanwhile."""
    class Slow(io.BytesIO):
        def read(self, *size):
            if not self.tell():
                anna.report(job)
            return super().read(*size)

    name = job["output"]["name"]
    got = web("PUT", f"/upload/{name}", Slow(b"late"), Authorization=f"Bearer {anna.key}",
              content_length="4")
    assert got.status == 403 and "reported" in got.json["error"]
    assert m.plugged("uploaded")[-1](name) == (0, False)


@pytest.mark.parametrize("directory", [False, True])
def test_an_output_counts_when_it_would_survive_a_power_cut(
        web, anna, job, directory, monkeypatch, on_disk):
    """D13: its bytes are flushed, and then its name."""
    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode) == directory:
            raise OSError(5, "it burns")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        got = anna.put(job, b"abc")
    assert got.status == 507 and "it burns" in got.json["error"]
    assert anna.put(job, b"abc").json["complete"]


def test_a_place_where_nothing_can_be_stored(web, anna, job):
    """Their work is not lost: 507 says that it is the server's trouble."""
    path = m.file_path("upload", job["output"]["name"])
    path.with_name(path.name + ".part").mkdir()
    got = anna.put(job, b"abc")
    assert got.status == 507 and "cannot store" in got.json["error"]
    path.with_name(path.name + ".part").rmdir()
    assert anna.put(job, b"abc").json["complete"]


@ANYTHING
@given(body=st.binary(max_size=50),
       name=st.sampled_from(["echo_0_0_out", "echo_1_0_out"]) | st.text(),
       header=st.none() | st.text(st.characters(max_codepoint=255)) | st.tuples(
           *[st.integers(-1, 60)] * 3).map(lambda t: "bytes %d-%d/%d" % t),
       checksum=st.none() | st.text(st.characters(max_codepoint=255)))
def test_any_upload(web, anna, body, name, header, checksum):
    if not m.Result.select().where(m.Result.server_state == 4).exists():
        anna.fetch(2)
    path = "/upload/" + "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    headers = {"Authorization": f"Bearer {anna.key}"}
    headers.update({} if header is None else {"Content_Range": header})
    headers.update({} if checksum is None else {"X_Sha256": checksum})
    got = web("PUT", path, body, **headers)
    sound(got)
    there = sum(path.stat().st_size for path in (m.project.data / "upload").glob("*/*"))
    assert there <= 2 * 1000, "no upload is larger than allowed"
