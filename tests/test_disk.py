"""A disk that is full, fails, or may only be read, under the real process and real traffic.

A library in front of the system's one makes writing fail while a file says so; it is compiled by
the test. Nothing that was acknowledged may be lost, also if the process is killed meanwhile, and
the server must go on by itself when the disk is well again.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest
from test_crash import (PATIENCE, Volunteer, address_of, everything_is_there_once, finish,
                        kept_uploads, start, world)

import minigrid as m

TROUBLES = {  # what the file says: what then happens in the server, and no other process
    "fsync": "flushing a file to the disk fails",
    "full": "writing to a file fails",
    "short": "the first part of what is written still finds room",
}
LIBRARY = r'''
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int trouble(void) {  /* its first letter, 0 if there is none */
    char text[2] = {0};
    const char *path = getenv("TROUBLE");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return 0;
    if (read(file, text, 1) < 1) text[0] = 0;
    close(file);
    return text[0];
}

static int concerns(int file) {  /* not the network, not what is printed */
    struct stat found;
    return file > 2 && fstat(file, &found) == 0 && S_ISREG(found.st_mode);
}

static long room(int file, size_t n) {  /* for how many of n bytes there is room; -1: for none */
    int what = concerns(file) ? trouble() : 0;
    if (what == 'f' || (what == 's' && n < 2)) { errno = ENOSPC; return -1; }
    return what == 's' ? n / 2 : n;
}

ssize_t write(int file, const void *data, size_t n) {
    long most = room(file, n);
    return most < 0 ? -1 : syscall(SYS_write, file, data, most);
}

ssize_t pwrite64(int file, const void *data, size_t n, off_t at) {
    long most = room(file, n);
    return most < 0 ? -1 : syscall(SYS_pwrite64, file, data, most, at);
}

ssize_t pwrite(int file, const void *data, size_t n, off_t at) {
    return pwrite64(file, data, n, at);
}

static int flush(int file, long call) {
    if (trouble() == 'x') { errno = EIO; return -1; }
    return syscall(call, file);
}

int fsync(int file) { return flush(file, SYS_fsync); }
int fdatasync(int file) { return flush(file, SYS_fdatasync); }
'''
LETTERS = {"fsync": "x", "full": "f", "short": "s"}
ROUNDS = int(os.environ.get("MINIGRID_TROUBLES", "3"))  # of each kind

__all__ = ["world"]  # a fixture
needs_compiler = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs Linux and cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    (folder / "trouble.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "trouble.so", "trouble.c"], cwd=folder,
                   check=True)
    return folder / "trouble.so"


@pytest.fixture
def troubled(world, library):
    """A world whose disk has troubles while a file says so."""
    world.trouble = world.data.parent / "trouble"
    world.set_work(40 + 20 * ROUNDS)
    world.env = {**os.environ, "LD_PRELOAD": str(library), "TROUBLE": str(world.trouble)}
    return world


def live_through(world, volunteers, kind, rng, die):
    """Let a server have a trouble under load; kill it in the midst of it, or see it recover."""
    with start(world) as process:
        guard = threading.Timer(2 * PATIENCE, process.kill)
        guard.start()
        world.open_to(address_of(process), process)
        wait_for(world, answers=rng.randint(20, 80))
        world.trouble.write_text(LETTERS[kind])
        wait_for(world, answers=rng.randint(10, 60))
        threading.Event().wait(rng.uniform(0, 1.2))  # Passes have it, too.
        if not die:
            world.trouble.unlink()
            recorded = len(world.reported)
            wait_for(world, lambda: len(world.reported) > recorded + 5)
        world.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        guard.cancel()
    world.trouble.unlink(missing_ok=True)
    world.address = None


def wait_for(world, found=None, answers=0):
    """Wait until something is so, or for so many more answers."""
    wanted = world.n_answers + answers
    for _ in range(100 * PATIENCE):
        if found() if found else world.n_answers >= wanted:
            return
        assert world.process.poll() is None, (world.data.parent / "stderr.txt").read_text()
        assert not world.troubles, world.troubles
        threading.Event().wait(0.01)
    raise AssertionError("not in time")


@needs_compiler
@pytest.mark.parametrize("kind", TROUBLES)
def test_what_is_acknowledged_is_kept_and_the_server_recovers(troubled, kind):
    rng = random.Random(kind)
    volunteers = [Volunteer(troubled, f"v{n}", random.Random(f"{kind} {n}"), may_refuse=(503, 507))
                  for n in range(3)]
    for volunteer in volunteers:
        volunteer.start()
    for n in range(ROUNDS):
        live_through(troubled, volunteers, kind, rng, die=n % 3 == 2)
        assert not troubled.troubles, troubled.troubles
        kept_uploads(troubled)
    finish(troubled)
    for volunteer in volunteers:
        volunteer.join(PATIENCE)
    print(kind, "refused:", [volunteer.n_refused for volunteer in volunteers])
    assert sum(volunteer.n_refused for volunteer in volunteers), "there was no trouble"
    everything_is_there_once(troubled)


@needs_compiler
@pytest.mark.parametrize("kind", ["full", "short"])
def test_a_server_that_cannot_write_says_so_and_does_not_start(troubled, kind):
    """As one sentence; and it starts when there is room."""
    for n in range(2):  # A new store, and one that is there.
        troubled.trouble.write_text(LETTERS[kind])
        with start(troubled) as process:
            assert process.wait(PATIENCE) == 1
        (line,) = (troubled.data.parent / "stderr.txt").read_text().splitlines()[n:]
        assert line.startswith("minigrid: cannot ") and str(troubled.data) in line
        troubled.trouble.unlink()
        with start(troubled) as process:
            assert address_of(process)
            process.terminate()
            assert process.wait(PATIENCE) == 0


# ---- A directory that may only be read -----------------------------------------


@pytest.fixture
def obedient(world, monkeypatch):
    """A server that may not write where the modes forbid it, also if we are root."""
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv")
        popen = subprocess.Popen
        wrapper = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
        monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(
            [*wrapper, *command], **more))
    world.set_work(30)
    return world


def may_be_written(folder, yes):
    """Change the modes of a directory and of all below it; not of files that lie there."""
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        path.chmod(0o755 if yes else 0o555)


def test_directories_that_may_only_be_read(obedient):
    """Outputs and answers are refused or wait, the page says why, and all goes on afterwards."""
    volunteers = [Volunteer(obedient, f"v{n}", random.Random(n), may_refuse=(503, 507))
                  for n in range(3)]
    for volunteer in volunteers:
        volunteer.start()
    with start(obedient) as process:
        obedient.open_to(address_of(process), process)
        wait_for(obedient, answers=20)
        may_be_written(obedient.data, False)
        wait_for(obedient, lambda: sum(volunteer.n_refused for volunteer in volunteers) > 20)
        page = urllib.request.urlopen("http://{}:{}/".format(*obedient.address), timeout=PATIENCE)
        with page:
            assert b"cannot store the upload" in page.read()
        may_be_written(obedient.data, True)
        obedient.kill()
        process.wait(PATIENCE)
    obedient.address = None
    finish(obedient)
    everything_is_there_once(obedient)


def test_a_server_whose_directory_may_only_be_read_does_not_start(obedient):
    obedient.data.mkdir()
    may_be_written(obedient.data, False)
    with start(obedient) as process:
        assert process.wait(PATIENCE) == 1
    (line,) = (obedient.data.parent / "stderr.txt").read_text().splitlines()
    assert line.startswith("minigrid: cannot write to ") and "Permission denied" in line


# ---- What must be flushed before it counts -------------------------------------


def test_a_file_that_is_not_flushed_is_none(grid, monkeypatch):
    """Not for its readers either: it gets its name when it would survive a power cut [D13]."""
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="it burns"):
        m.store_file("download", "a", b"content")
    assert not m.file_path("download", "a").exists()


@pytest.mark.skipif(not hasattr(os, "O_DIRECTORY"), reason="Windows cannot flush a directory")
def test_a_name_that_is_not_flushed_is_told(grid, monkeypatch):
    temporary = m.file_path("download", "a.new")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(b"content")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="it burns"):
        m.settle(temporary, m.file_path("download", "a"))


def test_a_line_that_is_not_flushed_is_not_counted(grid, monkeypatch):
    """The store must not say that it is there [C23]; the next one takes its place."""
    path = grid.data / "results" / "a.jsonl"
    grid.write(lambda: m.append_exactly(path, b"1\n"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="it burns"):
            grid.write(lambda: m.append_exactly(path, b"two\n"))
    grid.write(lambda: m.append_exactly(path, b"3\n"))
    assert path.read_bytes() == b"1\n3\n"


def failing(file):
    raise OSError(5, "it burns")
