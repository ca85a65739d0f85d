"""What volunteers see: the view as lines, on a real terminal, in a browser; the log; messages.

The terminal is a pseudo-terminal, read back through a small emulator of one, so that a test says
what stands on the screen and not which escape codes were sent.
"""

import base64
import contextlib
import ctypes
import fcntl
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import termios
import threading
import time
import unicodedata
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from volunteer_world import NOW, v

PATIENCE = 20  # seconds until what does not come is a failure


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    """Clock times are the same everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# ---- A realistic snapshot ------------------------------------------------------


def project(name="Mandelbrot at school", **more):
    return dict({
        "name": name, "url": "http://192.168.1.5:8080", "nickname": "blue-fox-42", "share": 1.0,
        "share_wanted": 1.0, "share_given": 1.0, "credit": 12.5, "n_reported": 31, "n_failed": 1,
        "state": "computing", "until": 0, "links": [{"name": "my results", "url":
                                                     "http://192.168.1.5:8080/home.php"}]}, **more)


def job(name="tile_17_0", **more):
    return dict({
        "name": name, "app": "mandelbrot", "about": "A tile of the Mandelbrot set.",
        "project": "Mandelbrot at school", "state": "running", "fraction": 0.52, "elapsed": 185.0,
        "remaining": 170.0, "deadline": NOW + 7200, "why": "", "until": 0}, **more)


def example(**more):
    """Three projects and a job of every kind, as the client describes them."""
    projects = [
        project(share_wanted=0.14, share_given=0.12),
        project("Primes", url="https://primes.example", share_wanted=0.29, share_given=0.31,
                credit=20140.25, n_reported=1204, n_failed=0, state="has no work",
                until=NOW + 180),
        project("", url="http://10.0.0.9:8080", share_wanted=0.57, share_given=0.57, credit=0.0,
                n_reported=0, n_failed=0, state="no connection: timed out", until=NOW + 3700)]
    jobs = [
        job("primes_8_1", project="Primes", app="primes", about="", state="finished", fraction=1.0,
            elapsed=61.0, remaining=0, why="to be reported"),
        job("primes_9_1", project="Primes", app="primes", about="", state="uploading", fraction=0.4,
            remaining=0, why="no connection", until=NOW + 90),
        job(), job("tile_18_0", fraction=0.07, elapsed=14.0, remaining=200.0),
        job("tile_19_1", state="waiting", fraction=0.0, elapsed=0.0, remaining=360.0),
        job("tile_20_0", state="waiting", fraction=0.31, elapsed=90.0, remaining=200.0,
            deadline=NOW + 100),
        job("tile_21_0", state="downloading", fraction=0.25, elapsed=0.0, remaining=None),
        job("tile_12_0", state="failed", fraction=0.9, elapsed=400.0, remaining=0,
            why="took more memory than its 500 MB")]
    messages = [[NOW - 60, "tell", "joined http://192.168.1.5:8080 as blue-fox-42"],
                [NOW - 30, "tell", "Primes: got 4 jobs"],
                [NOW - 5, "warn", "10.0.0.9:8080: no connection: timed out; again in 62 min"]]
    return dict({
        "now": NOW, "version": "minigrid 0.4.0", "directory": "/home/ada/.minigrid", "n_cpus": 2,
        "host": "blue-fox-42", "protection": "Jobs run as your user, without your environment, in "
        "namespaces of their own: no network, no files but theirs.", "waiting":
        "Both processors are busy; Mandelbrot is asked for more", "until": NOW + 75,
        "stopping": False, "projects": projects, "jobs": jobs, "messages": messages}, **more)


def alone(**more):
    """One project and nothing to do."""
    return dict(example(), jobs=[], messages=[], projects=[
        project(n_failed=0, state="has no work", until=NOW + 40)], **more)


EVIL = "<script>alert(1)</script>"
HOSTILE = {
    "markup": EVIL, "attribute": "\" onmouseover=\"alert(1)", "entity": "&lt;b&gt;",
    "escape codes": "\x1b[2J\x1b]0;title\x07\x9b31mred",
    "lines": "a\r\nb\n\n\tc\x0b\x0c\x85d\u2028e",
    "right to left": "abc\u202egpj.exe\u202c\u2066x\u2069\u200f", "null": "a\0b", "half": "\udcff",
    "wide": "\u8a08\u7b97" * 300, "long": "x" * 10000, "words": "many words " * 900,
    "combining": "e\u0301\u0300" * 200, "foxes": "\N{FOX FACE}" * 100, "nothing": "",
    "blanks": "  ",
    "percent": "100 %s %d %(x)s {0} {{}}", "tab": "a\tb"}


def spoiled(text, url="http://x"):
    """A snapshot in which others have written all that others can write."""
    texts = dict(name=text, app=text, about=text, project=text, why=text)
    jobs = [job(**dict(texts, state=state, until=NOW + 9)) for state in v.JOB_ORDER]
    projects = [project(text, nickname=text, state=text, until=NOW + 50 * (i % 2), url=url,
                        links=[{"name": text, "url": url}]) for i in range(4)]
    return example(jobs=jobs, projects=projects, host=text, waiting=text, directory=text,
                   protection=text, version=text, messages=[[NOW, "warn", text]] * 5)


def bare(line):
    return re.sub(r"\x1b\[\d*m", "", line)


def width_of(line):
    """Columns by the letter, not by the code under test."""
    return sum(0 if unicodedata.category(c)[0] == "M" else
               1 + (unicodedata.east_asian_width(c) in "WF") for c in line)


# ---- Words ---------------------------------------------------------------------

DURATIONS = {
    0: "0.0 s", 1.54: "1.5 s", 9.94: "9.9 s", 9.96: "10 s", 75: "75 s", 99.4: "99 s", 99.6: "2 min",
    180: "3 min", 3600: "60 min", 7140: "119 min", 7200: "2 h", 9000: "2 h 30 min",
    7200 + 300: "2 h 05 min", 12 * 3600: "12 h", 71.4 * 3600: "71 h", 3 * 86400: "3 days", 1e8:
    "1157 days", -5: "0.0 s", float("inf"): "0.0 s", float("nan"): "0.0 s"}


@pytest.mark.parametrize("seconds", DURATIONS)
def test_durations(seconds):
    assert v.duration(seconds) == DURATIONS[seconds]


UNTIL = {0: "", NOW - 1: "", NOW: "", NOW + 75: "until 14:14 (in 75 s)",
         NOW + 3 * 3600: "until 17:13 (in 3 h)", NOW + 30 * 3600: "until 22 Sep 20:13 (in 30 h)",
         NOW + 1e11: "until some day (in 0.0 s)"}


@pytest.mark.parametrize("until", [u for u in UNTIL if u < NOW * 2])
def test_until(until):
    assert v.until_words(until, NOW) == UNTIL[until]


def test_a_time_beyond_the_calendar(monkeypatch):
    def localtime(at):
        raise OSError("Windows")
    monkeypatch.setattr(time, "localtime", localtime)
    assert v.clock_time(1e11, NOW) == "some day"


DUE = {0: "", 1e11: "", NOW + 7200: "due in 2 h", NOW + 1: "due in 1.0 s",
       NOW: "overdue since 14:13", NOW - 7200: "overdue since 12:13"}


@pytest.mark.parametrize("deadline", DUE)
def test_due(deadline):
    assert v.due_words(deadline, NOW) == DUE[deadline]


PERCENT = {0: "0 %", 0.07: "7 %", 0.29: "29 %", 0.999: "99 %", 1: "100 %", 7: "0 %", -1: "0 %",
           float("nan"): "0 %"}


@pytest.mark.parametrize("fraction", PERCENT)
def test_percent_is_all_only_when_it_is_all(fraction):
    assert v.percent(fraction) == PERCENT[fraction]


CUTS = {  # text, width: what is left
    ("abcdef", 6): "abcdef", ("abcdefg", 6): "abc...", ("abcdefg", 3): "...", ("abcdefg", 2): "..",
    ("abcdefg", 0): "", ("abc defg", 7): "abc...", ("\u8a08\u7b97", 4): "\u8a08\u7b97",
    ("\u8a08\u7b97\u8a08", 5): "\u8a08...", ("\u8a08\u7b97\u8a08", 4): "...",
    ("e\u0301e\u0301", 2): "e\u0301e\u0301"}


@pytest.mark.parametrize("case", CUTS)
def test_cut(case):
    assert v.cut(*case) == CUTS[case]


# ---- The view as lines -----------------------------------------------------------

SIZES = [(1, 1), (7, 3), (20, 5), (39, 9), (40, 10), (50, 14), (60, 18), (80, 24), (132, 43),
         (300, 100)]


def check(lines, width, height):
    assert len(lines) <= height
    for line in lines:
        assert width_of(bare(line)) <= width and bare(line).isprintable(), repr(line)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("snapshot", [example(), alone(), dict(alone(), projects=[], waiting=""),
                                      example(stopping=True)])
def test_the_view_fits(snapshot, size):
    for colour in (True, False):
        for unicode in (True, False):
            lines = v.render(snapshot, *size, colour, unicode)
            check(lines, *size)
            assert unicode or "".join(lines).isascii()
            assert colour or "\x1b" not in "".join(lines)
    assert [bare(line) for line in v.render(snapshot, *size, True)] == v.render(
        snapshot, *size, False)


@pytest.mark.parametrize("kind", HOSTILE)
def test_texts_of_others_stay_texts(kind):
    for width, height in SIZES:
        for unicode in (True, False):
            lines = v.render(spoiled(HOSTILE[kind]), width, height, True, unicode)
            check(lines, width, height)
            assert len(set("".join(lines)) & set("\u202e\u2066\u200f\x9b\n\r\t")) == 0


@pytest.mark.parametrize("height", range(10, 50))
def test_nothing_is_wasted_nor_lost(height):
    """Every job is shown or counted, in every height; rows are left only if all is shown."""
    lines = v.render(example(), 80, height, False)
    text = "\n".join(lines)
    shown = sum(" %s " % j["name"] in text for j in example()["jobs"])
    hidden = re.findall("and ([0-9]+) more", text)
    assert shown + sum(map(int, hidden)) == 8
    if hidden:
        assert len(lines) == height
    assert "until 14:14" in text and "until 14:16" in text and "until 15:15" in text
    assert "Jobs: 2 running, 1 uploading" in text


def test_what_a_full_view_says():
    text = "\n".join(v.render(example(), 80, 40, False))
    for fact in ("minigrid 0.4.0", "blue-fox-42", "2 processors", "14:13:20", "Both processors are",
                 "until 14:14 (in 75 s)", "Mandelbrot at school", "credit 12.5", "1 failed",
                 "share 29 %, given 31 %", "1204 jobs done", "http://10.0.0.9:8080",
                 "  has no work, until 14:16 (in 3 min)", "no connection: timed out, until 15:15",
                 "\u2588" * 6 + "\u2591" * 6 + " 52 %  tile_17_0", "3 min left", "due in 2 h",
                 "took more memory", "no connection until 14:14 (in 90 s)", "no files but theirs",
                 "14:12 Primes: got 4 jobs", "14:13 10.0.0.9:8080", "Ctrl-C"):
        assert fact in text, fact


def test_what_a_small_view_still_says():
    text = "\n".join(v.render(example(), 40, 10, False))
    for fact in ("minigrid 0.4.0", "14:13:20", "until 14:14 (in 75 s)", "Mandelbrot at s", "Primes",
                 "until 14:16 (in 3 min)", "until 15:15", "credit 12.5", "Jobs: 2 running",
                 " 52 %  tile_17_0", "3 min left", "and 6 more"):
        assert fact in text, fact


def test_one_project_has_no_share_to_talk_of():
    text = "\n".join(v.render(alone(), 80, 24, False))
    assert "share" not in text and "credit 12.5" in text and "31 jobs done" in text
    assert "Jobs: none" in text


def test_what_runs_comes_first_and_what_is_over_last():
    states = [j["state"] for j in v.by_state(example()["jobs"])]
    assert states[0] == "running" and states[-2:] == ["failed", "finished"]
    assert [j["name"] for j in v.by_state(example()["jobs"])][:2] == ["tile_17_0", "tile_18_0"]


def test_who_waits_says_so_instead_of_figures_when_room_is_short():
    lines = v.render(example(), 60, 10, False)
    assert "Primes  has no work, until 14:16 (in 3 min)" in lines
    assert any(line.startswith("Mandelbrot at school") and "credit" in line for line in lines)


WAITS = {  # columns: what is left of "no connection" and its time; the time is what matters
    60: "no connection, until 15:15 (in 62 min)", 30: "no c\u2026, until 15:15 (in 62 min)",
    24: "until 15:15 (in 62 min)", 22: "no conne\u2026, until 15:15", 11: "until 15:15",
    9: "until 15:15"}


@pytest.mark.parametrize("room", WAITS)
def test_until_when_is_kept_longer_than_why(room):
    words = v.until_words(NOW + 3700, NOW)
    assert v.Pen(80, False, True).waits("no connection", words, room) == WAITS[room]
    assert v.Pen(80, False, True).waits("", words, 60) == words


def test_stopping_says_what_a_second_ctrl_c_does():
    text = " ".join(v.render(example(stopping=True), 40, 10, False))
    assert "Stopping" in text and "Ctrl-C again" in text and "Both processors" not in text


LATE = {"in time": (NOW + 171, False), "too late": (NOW + 169, True), "overdue": (NOW - 9, True),
        "no deadline": (0, False)}


@pytest.mark.parametrize("case", LATE)
def test_a_job_that_will_be_late_is_red(case):
    deadline, late = LATE[case]
    lines = v.render(dict(alone(), jobs=[job(deadline=deadline)]), 80, 24, True)
    (line,) = [line for line in lines if "tile_17_0" in line]
    assert ("\x1b[31m" in line) is late


# ---- Messages and their log --------------------------------------------------------


def voice(**more):
    return v.Voice(stream=io.StringIO(), errors=io.StringIO(), clock=lambda: NOW, **more)


def test_one_line_per_event():
    it = voice()
    it.tell("hello")
    it.warn("oh\nno\x1b[2J")
    assert it.stream.getvalue() == "14:13:20 hello\n"
    assert it.errors.getvalue() == "14:13:20 oh no [2J\n"
    assert list(it.messages) == [(NOW, "tell", "hello"), (NOW, "warn", "oh no [2J")]


def test_quiet_prints_what_went_wrong_and_keeps_all(tmp_path):
    it = voice(quiet=True, log=v.LogFile(tmp_path / "log.txt"))
    it.tell("hello")
    it.warn("oh no")
    assert it.stream.getvalue() == "" and it.errors.getvalue() == "14:13:20 oh no\n"
    assert (tmp_path / "log.txt").read_text() == (
        "2026-09-21 14:13:20 hello\n2026-09-21 14:13:20 warning: oh no\n")
    assert len(it.messages) == 2 and it.quiet


def test_the_last_messages_are_kept():
    it = voice()
    for i in range(250):
        it.tell(str(i))
    assert [text for _, _, text in it.messages] == [str(i) for i in range(150, 250)]


@pytest.mark.parametrize("encoding, shown", [("ascii", "Zo? ?"), ("latin-1", "Zo\xeb ?"),
                                             ("utf-8", "Zo\xeb \N{FOX FACE}")])
def test_every_encoding_shows_the_message(encoding, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    v.Voice(stream=stream, clock=lambda: NOW).tell("Zo\xeb \N{FOX FACE}")
    assert stream.buffer.getvalue().decode(encoding).strip() == "14:13:20 " + shown


def test_a_terminal_that_is_gone_stops_nobody(tmp_path):
    full = open("/dev/full", "w")
    it = v.Voice(stream=full, clock=lambda: NOW, log=v.LogFile(tmp_path / "log.txt"))
    it.tell("hello")
    with contextlib.suppress(OSError):
        full.close()
    it.tell("again")  # It is closed now.
    assert (tmp_path / "log.txt").read_text().count("\n") == 2


def test_the_log_is_rotated_once_and_never_larger_than_allowed(tmp_path):
    log = v.LogFile(tmp_path / "log.txt", 1000)
    for i in range(200):
        log.write("message number %03d" % i)
        assert (tmp_path / "log.txt").stat().st_size <= 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.old.txt", "log.txt"]
    old, new = [(tmp_path / name).read_text() for name in ("log.old.txt", "log.txt")]
    assert len(old) == 988  # The next line would have been too much.
    numbers = [int(n) for n in re.findall(r"^message number (\d+)$", old + new, re.M)]
    assert numbers == list(range(numbers[0], 200))
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    log.write("x" * 5000)
    assert (tmp_path / "log.txt").stat().st_size == 1000


def test_the_log_goes_on_where_the_last_run_ended(tmp_path):
    for text in ("first", "second"):
        v.LogFile(tmp_path / "log.txt").write(text)
    assert (tmp_path / "log.txt").read_text() == "first\nsecond\n"


def test_a_full_disk_loses_lines_of_the_log_only(tmp_path, monkeypatch):
    v.LogFile("/dev/full").write("nobody hears it")
    v.LogFile(tmp_path / "missing" / "log.txt").write("nor this")
    log, real = v.LogFile(tmp_path / "log.txt"), os.write
    monkeypatch.setattr(os, "write", lambda f, data: real(f, data[:4]))
    log.write("cut short")
    monkeypatch.setattr(os, "write", real)
    log.write("whole")
    log.write("again")
    assert (tmp_path / "log.txt").read_text() == "cut \nwhole\nagain\n"


def test_a_log_that_cannot_be_rotated_does_not_grow(tmp_path, monkeypatch):
    def replace(a, b):
        raise PermissionError("somebody has it open")
    monkeypatch.setattr(os, "replace", replace)
    log = v.LogFile(tmp_path / "log.txt", 100)
    for i in range(50):
        log.write("message")
    assert (tmp_path / "log.txt").stat().st_size <= 100


def test_the_log_follows_no_link(tmp_path):
    (tmp_path / "other").write_text("")
    (tmp_path / "log.txt").symlink_to(tmp_path / "other")
    v.LogFile(tmp_path / "log.txt").write("hello")
    assert (tmp_path / "other").read_text() == ""


# ---- A real terminal ---------------------------------------------------------------


class Terminal:
    """Emulates a terminal: rows (those above the screen as well), cursor, wrapping, its modes."""

    CODES = re.compile(r"\x1b\[(\?)?(\d*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")

    def __init__(self, width, height):
        self.width, self.height, self.rows, self.y, self.x = width, height, [""], 0, 0
        self.modes = {"25": True, "7": True}

    def feed(self, text):
        at = 0
        for found in self.CODES.finditer(text):
            assert found.start() == at, "unknown: %r" % text[at:at + 20]
            at = found.end()
            private, n, code, cr, lf, plain = found.groups()
            if plain:
                for c in plain:
                    self.put(c)
            elif cr:
                self.x = 0
            elif lf:
                self.down()
            elif private:
                assert n in self.modes and code in "hl"
                self.modes[n] = code == "h"
            elif code == "A":
                self.y = max(self.y - int(n), len(self.rows) - self.height, 0)
            elif code == "K":
                self.rows[self.y] = self.rows[self.y][:self.x]
            elif code == "J":
                self.rows[self.y] = self.rows[self.y][:self.x]
                del self.rows[self.y + 1:]
            else:
                assert code == "m"
        assert at == len(text)

    def put(self, c):
        if self.x >= self.width:
            if not self.modes["7"]:
                return
            self.x = 0
            self.down()
        row = self.rows[self.y].ljust(self.x)
        self.rows[self.y] = row[:self.x] + c + row[self.x + 1:]
        self.x += 1

    def down(self):
        self.y += 1
        if self.y == len(self.rows):
            self.rows.append("")

    def resize(self, width):
        """As most do it: longer rows are wrapped, the cursor moves with them."""
        rows = []
        for i, row in enumerate(self.rows):
            if i == self.y:
                self.y = len(rows)
            rows += [row[k:k + width] for k in range(0, max(1, len(row)), width)]
        self.rows, self.width = rows, width

    @property
    def text(self):
        return [row.rstrip() for row in self.rows]


class Pty:
    """A pseudo-terminal, its stream for programs, and what has come out of it."""

    def __init__(self, width=80, height=24, encoding="utf-8"):
        self.master, slave = os.openpty()
        self.stream = open(slave, "w", encoding=encoding)
        self.resize(width, height)
        self.data, self.n_fed, self.news = b"", 0, threading.Condition()
        self.terminal = Terminal(width, height)
        self.reader = None

    def resize(self, width, height):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read(self):
        """Begin to take what comes."""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # How the end of a pseudo-terminal shows.
            while True:
                data = os.read(self.master, 65536)
                if not data:
                    break
                with self.news:
                    self.data += data
                    self.news.notify_all()

    def frames(self, n):
        """Wait until n frames in all have come; return the terminal as it is then."""
        with self.news:
            assert self.news.wait_for(lambda: self.data.count(v.Screen.END.encode()) >= n, PATIENCE)
            assert self.data.count(v.Screen.END.encode()) == n
            new, self.n_fed = self.data[self.n_fed:], len(self.data)
        self.terminal.feed(new.decode("utf-8"))
        return self.terminal

    def close(self):
        with contextlib.suppress(OSError):
            self.stream.close()
        if self.reader:
            self.reader.join(PATIENCE)
        os.close(self.master)


@pytest.fixture
def pty():
    with contextlib.ExitStack() as stack:
        def make(*size, reading=True, **more):
            it = Pty(*size, **more)
            stack.callback(it.close)
            if reading:
                it.read()
            return it
        yield make


@pytest.fixture
def screen_on():
    """screen_on(pty) -> an open Screen, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda pty, **more: stack.enter_context(v.Screen(pty.stream, **more))


def view(width=80, height=24, snapshot=None):
    """What the screen must show; `height` is the terminal's."""
    s, gap = dict(snapshot or example(), messages=[]), [""] if height >= 20 else []
    return gap + v.render(s, width - 1, max(height * 2 // 3, min(height - 2, 12)) - len(gap), False)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (132, 60)])
def test_the_view_is_drawn_again_at_its_place(pty, screen_on, size):
    p = pty(*size)
    screen = screen_on(p)
    screen.show(example(), NOW)
    assert p.frames(1).text == view(*size) + [""]
    later = example(now=NOW + 1)
    screen.show(later, NOW + 1)
    assert p.frames(2).text == view(*size, later) + [""]
    assert "14:13:21" in "".join(p.terminal.text[:2])
    screen.show(alone(now=NOW + 2), NOW + 2)  # Fewer lines: nothing of the old ones is left.
    assert p.frames(3).text == view(*size, alone(now=NOW + 2)) + [""]
    assert p.terminal.y == len(p.terminal.rows) - 1


def test_messages_scroll_above_the_view_in_order(pty, screen_on):
    p = pty(80, 24)
    screen = screen_on(p)
    it = v.Voice(stream=p.stream, errors=p.stream, clock=lambda: NOW, screen=screen)
    it.tell("joined")
    assert p.frames(1).text == ["14:13:20 joined", ""]
    screen.show(example(), NOW)
    for i in range(40):
        (it.warn if i % 3 else it.tell)("message %d" % i)
    rows = p.frames(42).text
    said = ["14:13:20 joined"] + ["14:13:20 message %d" % i for i in range(40)]
    assert rows == said + view() + [""]
    assert b"\x1b[33m14:13:20 message 1\x1b[0m" in p.data


def test_a_long_message_wraps_and_leaves_nothing_behind(pty, screen_on):
    p = pty(40, 12)
    screen = screen_on(p)
    screen.show(example(), NOW)
    screen.say("x" * 100)
    assert p.frames(2).text == ["x" * 40, "x" * 40, "x" * 20] + view(40, 12) + [""]


def test_every_frame_leaves_the_terminal_in_order(pty, screen_on):
    """So nothing has to be repaired, whatever kills the client."""
    p = pty()
    screen = screen_on(p)
    for n in range(1, 4):
        screen.show(example(), NOW + n)
        assert p.frames(n).modes == {"25": True, "7": True} and p.terminal.x == 0
    assert b"\x1b[?1049h" not in p.data, "no alternate screen: the scrollback keeps the messages"


def test_a_frame_is_drawn_once_a_second(pty, screen_on):
    p = pty()
    screen = screen_on(p)
    assert screen.due(NOW)
    for at in (NOW, NOW + 0.5, NOW + 0.99, NOW + 1, NOW + 1.5, NOW - 500):  # The clock set back.
        screen.show(example(), at)
    assert not screen.due(NOW - 499.5) and screen.due(NOW - 499)
    p.frames(3)


@pytest.mark.parametrize("size", [(40, 24), (60, 12), (120, 40), (30, 9)])
def test_a_window_that_changes_its_size(pty, screen_on, size):
    p = pty(80, 100)
    screen = screen_on(p)
    screen.say("hello")
    screen.show(example(), NOW)
    p.frames(2)
    p.resize(size[0], 100)
    p.terminal.resize(size[0])
    screen.show(example(), NOW + 1)
    assert p.frames(3).text == ["hello"] + view(size[0], 100) + [""]
    p.resize(*size)
    screen.show(example(), NOW + 2)
    assert len(screen.lines) < size[1]


def test_close_wipes_the_view_and_keeps_what_was_said(pty, screen_on):
    p = pty()
    screen = screen_on(p)
    it = v.Voice(stream=p.stream, errors=p.stream, clock=lambda: NOW, screen=screen)
    it.tell("hello")
    screen.show(example(), NOW)
    screen.close()
    screen.close()
    screen.show(example(), NOW + 5)
    screen.say("nobody hears it")
    assert p.frames(3).text == ["14:13:20 hello", ""]
    assert not screen.thread.is_alive()
    it.tell("stopped")
    with p.news:
        assert p.news.wait_for(lambda: p.data.endswith(b"14:13:20 stopped\r\n"), PATIENCE)


def test_an_exception_finds_the_terminal_in_order(pty):
    p = pty()
    with pytest.raises(ZeroDivisionError):
        with v.Screen(p.stream) as screen:
            screen.show(example(), NOW)
            1 / 0
    assert p.frames(2).text == [""] and p.terminal.modes == {"25": True, "7": True}


def test_a_terminal_that_takes_nothing_does_not_hold_up_the_client(pty):
    """Ctrl-S, a text being marked, a lost connection: nobody reads."""
    p = pty(reading=False)
    screen = v.Screen(p.stream)
    for i in range(500):
        screen.show(example(), NOW + i)
    assert screen.frames.qsize() <= v.FRAMES_QUEUED + 1
    for i in range(3000):
        screen.say("message %d" % i)
    assert screen.frames.qsize() <= v.MESSAGES_QUEUED + 1
    screen.close()  # It waits a second, not for ever.
    assert screen.thread.is_alive()
    p.read()  # Ctrl-Q
    screen.thread.join(PATIENCE)
    assert not screen.thread.is_alive()


def test_a_terminal_that_is_closed_does_no_harm(pty):
    p = pty(reading=False)
    screen = v.Screen(p.stream)
    os.close(p.master)
    p.master = os.open("/dev/null", os.O_RDONLY)
    screen.show(example(), NOW)
    screen.say("hello")
    screen.close()
    assert not screen.thread.is_alive()


def test_in_the_background_the_terminal_is_the_shells(pty, screen_on, monkeypatch):
    p = pty()
    screen = screen_on(p)
    screen.show(example(), NOW)
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    screen.show(example(), NOW + 1)  # Nothing: the shell's prompt stands there now.
    screen.say("hello")
    assert p.frames(2).text == view() + ["hello", ""]
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
    screen.show(example(), NOW + 2)
    assert p.frames(3).text == view() + ["hello"] + view() + [""]


def test_a_terminal_that_is_not_ours_to_ask_is_drawn_on(monkeypatch):
    def tcgetpgrp(fd):
        raise OSError("not the controlling terminal")
    monkeypatch.setattr(os, "tcgetpgrp", tcgetpgrp)
    assert v.in_foreground(1)
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: 0)  # in a container
    assert v.in_foreground(1)


def test_after_ctrl_z_the_view_is_drawn_below(pty):
    before = signal.getsignal(signal.SIGCONT)
    p = pty()
    with v.Screen(p.stream) as screen:
        screen.show(example(), NOW)
        os.kill(os.getpid(), signal.SIGCONT)
        assert screen.lines == []
        screen.show(example(), NOW + 1)
        assert p.frames(2).text == view() + view() + [""]
    assert signal.getsignal(signal.SIGCONT) == before


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_unicode_gets_plain_signs(pty, screen_on, encoding):
    p = pty(encoding=encoding)
    screen = screen_on(p)
    assert not screen.unicode
    screen.say("\N{FOX FACE}!")
    screen.show(spoiled("Zo\xeb \N{FOX FACE}"), NOW)
    assert p.frames(2).text[0] == "?!"
    assert p.data.isascii() and b"Zo? ?" in p.data and b"###" in p.data


def test_colours_can_be_turned_off(pty):
    p = pty()
    with v.open_screen(False, False, p.stream, {"TERM": "xterm", "NO_COLOR": "1"}) as screen:
        screen.show(example(), NOW)
        screen.say("oh no", "warn")
    p.frames(3)
    assert not re.search(rb"\x1b\[\d*m", p.data)


NO_SCREEN = {
    "--quiet": (True, False, {"TERM": "xterm"}), "--plain": (False, True, {"TERM": "xterm"}),
    "dumb": (False, False, {"TERM": "dumb"}), "no TERM": (False, False, {})}


@pytest.mark.parametrize("case", NO_SCREEN)
def test_when_there_is_no_view(pty, case):
    quiet, lines_only, environ = NO_SCREEN[case]
    assert v.open_screen(quiet, lines_only, pty().stream, environ) is None


def test_no_view_but_on_a_terminal(tmp_path):
    for stream in (io.StringIO(), SimpleNamespace(), open(tmp_path / "f", "w")):
        assert v.open_screen(False, False, stream, {"TERM": "xterm"}) is None
    stream.close()
    assert v.open_screen(False, False, stream, {"TERM": "xterm"}) is None


def test_warnings_go_where_the_user_sent_them(pty, screen_on):
    """`2>errors.txt` with a view on the terminal."""
    p = pty()
    screen = screen_on(p)
    it = v.Voice(stream=p.stream, errors=io.StringIO(), clock=lambda: NOW, screen=screen)
    it.warn("oh no")
    it.tell("hello")
    assert p.frames(1).text == ["14:13:20 hello", ""]
    assert it.errors.getvalue() == "14:13:20 oh no\n"


@pytest.mark.parametrize("console", ["new", "old", "none"])
def test_the_console_of_windows(monkeypatch, console):
    modes = [3]

    def get_mode(handle, mode):
        mode._obj.value = modes[-1]
        return console != "none"

    def set_mode(handle, mode):
        if console == "new":
            modes.append(mode)
        return console == "new"

    def get_handle(number):
        return 7 if number == -11 else None

    kernel = SimpleNamespace(GetStdHandle=get_handle, GetConsoleMode=get_mode,
                             SetConsoleMode=set_mode)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    restore = v.enable_ansi()
    if console == "new":
        assert modes == [3, 7]
        restore()
        assert modes == [3, 7, 3]
    else:
        assert restore is None and modes == [3]


# ---- The page ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_page():
    it = v.Page(0, "minigrid on blue-fox-42")
    yield it
    it.close()


@pytest.fixture
def page(one_page):
    """The page before anything is published."""
    one_page.server.text = None
    return one_page


def ask(page, path="/", method="GET", hosts=None, http_version="HTTP/1.1"):
    """Ask with exactly these Host headers; give status, headers, body."""
    host, port = page.server.server_address
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name in ["127.0.0.1:%d" % port] if hosts is None else hosts:
            connection.putheader("Host", name)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


HOSTS = {  # {port} is the page's: status
    "127.0.0.1:{port}": 200, "localhost:{port}": 200, "[::1]:{port}": 200, "LocalHost:{port}": 200,
    "evil.example:{port}": 403, "evil.example": 403, "127.0.0.1": 403, "localhost:1": 403,
    "127.0.0.1:{port}.evil.example": 403, "": 403, "localhost.evil.example:{port}": 403,
    "127.0.0.1:{port}, evil": 403}


@pytest.mark.parametrize("host", HOSTS)
def test_only_its_own_name_opens_the_page(page, host):
    page.publish(example())
    host, status = host.format(port=page.server.server_address[1]), HOSTS[host]
    for path in ("/", "/status.json"):
        assert ask(page, path, hosts=[host])[0] == status
    assert "Primes" in ask(page, hosts=[host])[2] or status == 403


def test_no_host_or_two_of_them_open_nothing(page):
    page.publish(example())
    good = page.url[7:-1]
    assert ask(page, hosts=[])[0] == 403 and ask(page, hosts=[good, "evil"])[0] == 403
    assert ask(page, hosts=["evil", good])[0] == 403 and ask(page, hosts=[good])[0] == 200


@pytest.mark.parametrize("method", "POST PUT DELETE OPTIONS PATCH TRACE CONNECT FOO".split())
def test_nothing_but_reading(page, method):
    page.publish(example())
    status, headers, body = ask(page, method=method)
    assert status == 405 and headers["Allow"] == "GET, HEAD" and "Primes" not in body


PATHS = {"/": 200, "/?x=1": 200, "/status.json": 200, "/status.json?": 200, "//x": 404,
         "/../../etc/passwd": 404, "/client.json": 404, "http://127.0.0.1/": 404, "*": 404,
         "/" + "x" * 70000: 414}


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p[:20])
def test_there_are_two_things(page, path):
    page.publish(example())
    assert ask(page, path)[0] == PATHS[path]


@pytest.mark.parametrize("path, method", [("/", "GET"), ("/status.json", "GET"), ("/no", "GET"),
                                          ("/", "HEAD"), ("/", "POST")])
def test_every_answer_is_strict(page, path, method):
    page.publish(example())
    headers = ask(page, path, method)[1]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers and "Python" not in headers["Server"]


def test_head_is_get_without_a_body(page):
    page.publish(example())
    with connect(page, b"HEAD / HTTP/1.1\r\nHost: %s\r\n\r\n" % page.url[7:-1].encode()) as s:
        answer = s.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"\r\n\r\n")
    assert int(re.search(rb"Content-Length: (\d+)", answer).group(1)) > 1000


def test_garbage_gets_an_answer_without_itself(page):
    page.publish(example())
    for request in (b"\x16\x03\x01\x02\n\n", b"GET /<script> HTTP/9.9\r\n\r\n", b"<script>\r\n\r\n",
                    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n"):
        with socket.create_connection(page.server.server_address, PATIENCE) as s:
            s.sendall(request)
            answer = s.makefile("rb").read()
        assert b"script>" not in answer and b"Primes" not in answer
    assert ask(page)[0] == 200


def test_the_data_is_the_snapshot(page):
    assert ask(page)[0] == ask(page, "/status.json")[0] == 503
    snapshot = example()
    page.publish(snapshot)
    wanted = json.loads(json.dumps(snapshot))
    snapshot["jobs"].clear()  # What changes later is not seen before the next publish().
    status, headers, body = ask(page, "/status.json")
    assert json.loads(body) == wanted and headers["Content-Type"] == "application/json"
    page.publish(snapshot)
    assert json.loads(ask(page, "/status.json")[2])["jobs"] == []


class Tags(HTMLParser):
    """The tags and attributes of a page, and its texts outside of script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.stack = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "link"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] not in (["script"], ["style"]):
            self.texts.append(data)


def test_the_page_says_what_the_view_says():
    page = Tags(v.page_html(example(), "minigrid on blue-fox-42"))
    assert page.stack == [] and page.tags.count("progress") == 5
    text = " ".join(page.texts)
    for fact in ("minigrid on blue-fox-42", "minigrid 0.4.0", "2 processors", "/home/ada/.minigrid",
                 "until 14:14 (in 75 s)", "Mandelbrot at school", "credit 12.5", "1 failed",
                 "share 29 %, given 31 %", "1204 jobs done", "no connection: timed out, until 15",
                 "tile_17_0", "52 %, 3 min left, due in 2 h", "took more memory", "no network",
                 "A tile of the Mandelbrot set.", "14:12:50", "Primes: got 4 jobs", "my results"):
        assert fact in text, fact
    links = {value for tag, name, value in page.attributes if name == "href" and tag == "a"}
    assert links == {"http://192.168.1.5:8080", "https://primes.example", "http://10.0.0.9:8080",
                     "http://192.168.1.5:8080/home.php"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_texts_of_others_never_become_html(kind):
    text = HOSTILE[kind]
    page, clean = Tags(v.page_html(spoiled(text), text)), Tags(v.page_html(spoiled("x"), "x"))
    assert len(page.tags) == len(clean.tags) or not text.strip()
    assert page.tags.count("script") == 1 and page.stack == []
    assert {(tag, name) for tag, name, _ in page.attributes} <= {
        (tag, name) for tag, name, _ in clean.attributes}
    assert kind != "markup" or EVIL in page.texts
    assert not set("".join(page.texts)) & set("\x1b\u202e\u2066\x9b\0")


LINKS = {
    "http://x.example/a?b=c&d='e'": True, "https://x.example": True, "HTTP://X": True,
    "javascript:alert(1)": False, "java\nscript:alert(1)": False, "data:text/html,x": False,
    "file:///etc/passwd": False, "//x.example": False, "http:/x": False, "": False, None: False,
    " http://x": False, "http://x\" onclick=\"alert(1)": False, "http://x/<b>": False,
    "http://x/\u202e": False, "http://x\n": False, "http://" + "x" * 3000: False}


@pytest.mark.parametrize("url", LINKS, ids=lambda u: repr(u)[:30])
def test_only_addresses_of_the_web_become_links(url):
    page = Tags(v.page_html(spoiled("name", url), "x"))
    hrefs = {value for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert hrefs == ({url} if LINKS[url] else set())
    assert {name for tag, name, _ in page.attributes if tag == "a"} <= {"href", "rel", "target"}


def test_the_browser_is_told_to_obey_this_script_and_style_only(page):
    page.publish(example())
    headers, body = ask(page)[1:]
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall("<%s>(.*?)</%s>" % (tag, tag), body, re.S)
        known = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[tag + "-src"] == "'sha256-%s'" % known
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert "innerHTML =" not in body and "eval" not in body and " style=" not in body
    assert set(re.findall(r"https?://[^'\"\s<]*", v.PAGE_SCRIPT + v.PAGE_STYLE)) == set()


def test_the_page_works_without_scripts():
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in v.page_html(
        example(), "x")


def test_the_page_is_on_loopback_only(page):
    assert page.server.server_address[0] == "127.0.0.1"
    assert page.url == "http://127.0.0.1:%d/" % page.server.server_address[1]


@pytest.mark.parametrize("port", ["taken", 70000, -1])
def test_a_port_that_cannot_be_had(page, port):
    port = page.server.server_address[1] if port == "taken" else port
    with pytest.raises(SystemExit) as e:
        v.Page(port)
    text = str(e.value)
    assert text.startswith("cannot serve the page at 127.0.0.1:%d: " % port) and "another" in text


def test_the_port_is_free_again_at_once():
    first = v.Page(0)
    first.publish(example())
    assert ask(first)[0] == 200
    first.close()
    second = v.Page(first.server.server_address[1])
    second.close()
    assert not first.thread.is_alive()


def connect(page, text=b"GET / HT"):
    s = socket.create_connection(page.server.server_address, PATIENCE)
    s.sendall(text)
    return s


def all_served(page):
    """Wait until no connection is open any more."""
    for _ in range(100 * PATIENCE):
        if not page.server.connections:
            return
        threading.Event().wait(0.01)
    raise AssertionError("connections that do not end")


def test_slow_clients_do_not_pile_up(page, monkeypatch):
    monkeypatch.setattr(v, "PAGE_SECONDS", 1000.0)
    monkeypatch.setattr(v.PageHandler, "timeout", 1000.0)
    page.publish(example())
    all_served(page)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(page)) for _ in range(3 * v.PAGE_THREADS)]
        for s in slow[v.PAGE_THREADS:]:  # Too many: let go at once, the others being held.
            with contextlib.suppress(ConnectionResetError):
                assert s.recv(1) == b""
        assert len(page.server.connections) == v.PAGE_THREADS
        with page.server.guard:
            for request in page.server.connections:
                page.server.connections[request] = 0.0  # Their time is up: cut off. They have said
        for s in slow[:v.PAGE_THREADS]:  # nothing that could be answered.
            with contextlib.suppress(ConnectionResetError):
                assert s.recv(1) == b""
        all_served(page)
        assert ask(page)[0] == 200


def test_a_connection_is_for_one_request(page):
    page.publish(example())
    request = b"GET / HTTP/1.1\r\nHost: %s\r\nConnection: keep-alive\r\n\r\n" % (
        page.url[7:-1].encode())
    with connect(page, 2 * request) as s:
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := s.recv(65536):
                answer += data
    assert answer.count(b"200 OK") == 1


def test_who_sends_a_byte_now_and_then_is_cut_off_as_well(page, monkeypatch):
    monkeypatch.setattr(v, "PAGE_SECONDS", 1.0)
    monkeypatch.setattr(v.PageHandler, "timeout", 1000.0)  # It alone would wait for ever.
    page.publish(example())
    with connect(page) as s, pytest.raises(OSError):
        s.settimeout(0.1)
        for _ in range(10 * PATIENCE):
            s.sendall(b"x")
            with contextlib.suppress(socket.timeout):
                if s.recv(1) == b"":
                    raise OSError("cut off")
    all_served(page)
    assert ask(page)[0] == 200


# ---- A real browser ------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"))), None)


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM and not os.environ.get("CI"), reason="no Chromium is installed")
def test_a_browser_shows_the_page_and_keeps_it_up_to_date(page, tmp_path, monkeypatch):
    assert CHROMIUM, "where all is tested, Chromium must be installed"
    real, calls = v.page_html, []

    def later(s, title):
        calls.append(s)
        return real(s if len(calls) == 1 else dict(spoiled(EVIL), waiting="It has changed"), title)

    monkeypatch.setattr(v, "page_html", later)
    page.publish(example())
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--enable-logging=stderr", "--user-data-dir=%s" % tmp_path,
         "--virtual-time-budget=6000", "--dump-dom", page.url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, check=True)
    shown = Tags(done.stdout.decode())
    assert len(calls) >= 2 and EVIL in shown.texts and shown.tags.count("script") == 1
    assert any(text.startswith("It has changed") for text in shown.texts)
    assert ("p", "hidden", "") in shown.attributes, "it has not lost the client"
    assert "tile_17_0" not in " ".join(shown.texts)
    assert b"Content Security Policy" not in done.stderr, "style and script are the ones allowed"
