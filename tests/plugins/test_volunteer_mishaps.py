"""What goes wrong on the volunteer's own computer: kills, full disks, clocks, damaged files."""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from volunteer_world import (NOW, PATIENCE, Server, crash, drive, folder_of,
                             make_client, reports, v)

C = v.ClientState
STUCK = b"import threading\ndef compute(input): threading.Event().wait()\n"


@pytest.fixture
def other():
    """A second project."""
    s = Server()
    yield s
    s.close()


def fails(function, number, times=1, unless=lambda *args: False):
    """A function that raises an OSError the first so many times."""
    left = [times]

    @functools.wraps(function)
    def wrapper(*args, **more):
        if left[0] and not unless(*args):
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return function(*args, **more)

    return wrapper


def keep(client):
    """Have a client write its state now."""
    client.dirty = client.urgent = True
    client._save()


# ---- 1. Killed at the worst moment -------------------------------------------


def test_an_upload_that_is_done_but_not_kept_is_done_again(tmp_path, server, clock):
    """kill -9 between the end of an upload and the next writing of the state: still a success."""
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: any(job.client_state == C.UPLOADING for job in client.jobs))
    keep(client)
    client._save = lambda: None  # Nothing is kept from here on.
    drive(client, clock, lambda: client.jobs[0].over)
    crash(client)
    again = make_client(tmp_path, server, n_cpus=1)
    assert again.jobs[0].client_state == C.UPLOADING
    clock.now += 9
    drive(again, clock, lambda: server.store)
    assert reports(server) == {"wu_1_0": (5, 0)}
    drive(again, clock, lambda: not again.jobs)
    assert not list((folder_of(tmp_path) / "outputs").iterdir())


def test_a_finished_output_is_found_though_its_end_was_not_kept(tmp_path, server, clock):
    """kill -9 just after a job's end: it is not even computed again from its checkpoint."""
    server.add(1, b"def compute(input, checkpoint):\n    first = checkpoint.state is None\n"
                  b"    checkpoint('half way')\n    return first\n")
    server.trouble = {"PUT upload": [503]}
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks)
    keep(client)
    client._save = lambda: None
    drive(client, clock, lambda: any(job.client_state == C.UPLOADING for job in client.jobs))
    crash(client)
    again = make_client(tmp_path, server, n_cpus=1)
    clock.now += 9
    drive(again, clock, lambda: server.store)
    assert bytes(server.uploads["wu_1_0"]) == b"true"
    keep(again)
    assert not list((tmp_path / "client" / "slots").iterdir())


def test_an_output_cut_short_by_a_power_cut_is_never_sent(tmp_path, server, clock):
    server.add(1)
    server.trouble = {"PUT upload": [503] * 9}
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: any(job.client_state == C.UPLOADING for job in client.jobs))
    keep(client)
    crash(client)
    (folder_of(tmp_path) / "outputs" / "wu_1_0").write_bytes(b"")
    server.trouble, server.uploads = {}, {}
    again = make_client(tmp_path, server, n_cpus=1)
    clock.now += 600
    drive(again, clock, lambda: server.store)
    assert reports(server) == {"wu_1_0": (7, -187)} and not server.uploads
    assert "power cut" in server.store["wu_1_0"]["stderr_out"]


def test_the_end_of_an_old_job_leaves_a_new_one_of_its_name_alone(tmp_path, server, clock):
    """The server has forgotten a running job and gives it again; the old process is slow to end."""
    a = server.add(1, STUCK)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    (old, task), = client.tasks.items()
    p = client.projects[0]
    task.kill, kill = lambda *args: None, task.kill
    client._forget(p, {"wu_1_0"})
    new = v.parse_assignment(dict(a, files=[dict(a["files"][0])]), server.url)
    p.adopt(new)
    new.client_state = C.UPLOADING
    output = client._place(p, "outputs", new.name)
    output.write_bytes(b"new")
    kill()
    while client.tasks:
        client.wait(PATIENCE)
        client._hear()
    assert old.slot == -1 and output.read_bytes() == b"new"


# ---- 2. No room, no processes ------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_jobs_wait_when_the_computer_is_short_of_something(tmp_path, server, clock, monkeypatch,
                                                           number):
    for n in range(3):
        server.add(n)
    client = make_client(tmp_path, server, n_cpus=2, once=True)
    monkeypatch.setattr(v, "prepare_slot", fails(v.prepare_slot, number, 2))
    begun = clock.now
    drive(client, clock, lambda: client.start_time)
    assert not client.tasks and {job.slot for job in client.jobs} == {-1}
    shown = client.snapshot()
    assert os.strerror(number) in shown["waiting"] and shown["until"] == client.start_time
    drive(client, clock, client.finished)
    assert set(reports(server).values()) == {(5, 0)} and len(server.store) == 3
    assert clock.now - begun >= 60
    assert client.voice.errors.getvalue().count("no job can be started now") == 1
    assert client.start_time == 0.0  # The next time it will be said again.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_an_output_that_cannot_be_taken_at_once_is_taken_later(tmp_path, server, clock, monkeypatch,
                                                               number):
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1, once=True)
    drive(client, clock, lambda: client.tasks)
    monkeypatch.setattr(os, "replace", fails(os.replace, number, 3,
                                             lambda old, new: Path(old).name != "output"))
    monkeypatch.setattr(v, "prepare_slot", None)  # It is not computed again.
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (5, 0)} and not client.untaken
    assert "cannot take the output of wu_1_0" in client.voice.errors.getvalue()


def test_an_aborted_job_whose_output_waits_is_dropped(tmp_path, server, clock, monkeypatch):
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks)
    monkeypatch.setattr(os, "replace", fails(os.replace, errno.ENOSPC, 99,
                                             lambda old, new: Path(old).name != "output"))
    drive(client, clock, lambda: client.untaken)
    client._abort(client.projects[0], {"wu_1_0"}, set())
    drive(client, clock, lambda: server.store)
    assert reports(server) == {"wu_1_0": (6, 202)} and not client.untaken


def test_a_slot_that_cannot_be_deleted_is_left_alone(tmp_path, server, clock, monkeypatch):
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1, once=True)
    (tmp_path / "client" / "slots" / "0" / "in").mkdir(parents=True)
    monkeypatch.setattr(v, "remove_tree", lambda path: False)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (5, 0)}


def test_a_file_damaged_again_and_again_ends_its_job(tmp_path, server, clock, monkeypatch):
    """Bad memory or a bad disk: the server is not asked for the file without end."""
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1, once=True)

    def damaged(slot, job, files, seconds):
        raise v.BadFile(job.input["name"])

    monkeypatch.setattr(v, "prepare_slot", damaged)
    drive(client, clock, client.finished)
    assert reports(server) == {"wu_1_0": (1, -186)}
    assert "damaged on this computer's disk" in server.store["wu_1_0"]["stderr_out"]


# ---- 3. Several projects -----------------------------------------------------


def test_max_jobs_is_for_the_projects_that_are_named(tmp_path, server, other, clock):
    """The jobs of one that rests neither count nor are given back."""
    for n in range(5):
        other.add(n, STUCK)
    client = make_client(tmp_path, other, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    keep(client)
    crash(client)
    for n in range(2):
        server.add(n)
    again = make_client(tmp_path, server, n_cpus=1, max_jobs=1)
    clock.now += 9
    drive(again, clock, again.finished)
    assert sorted(reports(server).values()) in ([(5, 0)], [(5, 0), (6, 203)])
    assert len(again.projects[0].jobs) == 5 and not other.store


def test_transfers_that_nobody_needs_any_more_leave_nothing(tmp_path, server, clock):
    server.add(1)
    server.trouble = {"GET download": [503] * 99}
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: len(client.retries) == 2)
    p = client.projects[0]
    f = client.jobs[0].input
    client.now = clock.now
    client._forget(p, {"wu_1_0"})
    assert not client.retries
    n = len(client.voice.errors.getvalue())
    client._downloaded(p, f, None, v.TransportError(503, "x"))  # It was under way.
    assert not client.retries and len(client.voice.errors.getvalue()) == n


def test_all_addresses_hear_of_a_farewell(tmp_path, server, other, clock):
    """The first address fails: the project is left only when the second was asked, too."""
    server.add(1, STUCK)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.tasks, True)
    client.projects[0].addresses = [server.url, other.url]
    keep(client)
    crash(client)
    server.trouble = {"POST scheduler": [503] * 99}
    clock.now += 9
    again = make_client(tmp_path, forget=server.url)
    drive(again, clock, lambda: not again.projects)
    assert reports(other) == {"wu_1_0": (6, 203)}


# ---- 4. Ends -----------------------------------------------------------------


def test_a_keeper_that_hangs_does_not_outlive_the_client(tmp_path, server, clock, monkeypatch):
    monkeypatch.setattr(v, "KILL_SECONDS", 10 * PATIENCE)
    server.add(1, STUCK)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    task, = client.tasks.values()
    os.kill(task.process.pid, signal.SIGSTOP)
    client.wait = lambda seconds: None

    def ticking():
        clock.now += 1
        return clock.now

    client.leave(ticking)
    assert task.process.wait(PATIENCE) == -signal.SIGKILL


def test_a_job_over_its_bound_is_ended_once(tmp_path, server, clock):
    """Not with a new timer at each look."""
    import threading

    server.add(1, STUCK)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    task, = client.tasks.values()
    os.kill(task.process.pid, signal.SIGSTOP)
    before = threading.active_count()
    task.job.elapsed_time = 1e9
    for n in range(20):
        task.look(clock.now + n)
    assert threading.active_count() - before == 1
    task.kill_keeper()
    crash(client)


def test_a_clock_set_back_voids_all_waiting(tmp_path, server, clock):
    """[C34]: for files, front pages and the start of jobs as well."""
    server.add(1)
    server.trouble = {"GET download": [503] * 9}
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.retries)
    client.start_time = client.op.master_time = clock.now + 50
    for retry in client.retries.values():
        retry.at = clock.now + 50
    server.trouble = {}
    clock.now -= 1e6
    drive(client, clock, lambda: server.store)
    assert clock.now < NOW - 9e5


# ---- 5. The state ------------------------------------------------------------

WRONG = {  # what somebody has made of client.json
    "a list": [], "a number": 3, "no projects": {"projects": 3}, "no project": {"projects": [3]},
    "no url": {"projects": [{"jobs": []}]}, "a number as text": {"saved_at": "x", "projects": []},
    "a number as url": {"projects": [{"url": 3, "jobs": []}]},
    "no name": {"projects": [{"url": "u", "jobs": [{}]}]},
    "a job that is none": {"projects": [{"url": "u", "jobs": [None]}]},
    "an odd count": {"projects": [{"url": "u", "jobs": [], "n_rpc_failures": "many"}]},
    "a truth": {"projects": [{"url": "u", "jobs": [], "min_rpc_time": True}]},
    "not a number": {"projects": [{"url": "u", "jobs": [], "exp_avg_cpu": float("nan")}]},
    "files that are none": {"projects": [{"url": "u", "jobs": [{"name": "n", "files": [3]}]}]},
    "a file without url": {"projects": [{"url": "u", "jobs": [{"name": "n", "input": {"a": 1}}]}]},
    "an odd url": {"projects": [{"url": "u", "jobs": [{"name": "n", "output": {"url": 3}}]}]},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_with_wrong_types_is_set_aside_and_that_is_said(tmp_path, server, case):
    path = tmp_path / "client" / "client.json"
    path.parent.mkdir()
    path.write_text(json.dumps(WRONG[case]))
    client = make_client(tmp_path, server)
    assert [p.url for p in client.projects] == [server.url] and not client.jobs
    assert path.with_name("client.json.bad").exists()
    assert "client.json.bad" in client.voice.errors.getvalue()


def test_a_state_nested_without_end_is_set_aside(tmp_path):
    (tmp_path / "client.json").write_text("[" * 200000)
    assert v.load_state(tmp_path) is None


def test_what_cannot_be_cleaned_up_does_not_stop_the_start(tmp_path, server, monkeypatch):
    client = make_client(tmp_path, server)
    keep(client)
    stray = folder_of(tmp_path) / "outputs" / "stray"
    stray.write_text("x")
    monkeypatch.setattr(Path, "unlink", fails(Path.unlink, errno.EACCES, 99))
    make_client(tmp_path, server)
    assert stray.exists()


# ---- 6. The command line -----------------------------------------------------


def test_a_place_without_locks_is_not_taken_for_another_client(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fails(fcntl.flock, errno.ENOLCK, 9))
    with pytest.raises(SystemExit, match="cannot use .*No locks available"):
        v.choose_directory("http://h:80", str(tmp_path))


def test_a_user_without_a_home(tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    directory, held = v.choose_directory("http://h:80", str(tmp_path))
    held.close()
    assert directory == tmp_path and v.hidden_paths()
    with pytest.raises(SystemExit, match="--dir"):
        v.choose_directory("http://h:80", "")


@pytest.mark.parametrize("argv", [["h:80", "--low-water", "inf"], ["h:80", "--high-water", "nan"],
                                  ["h:80", "--moved"], ["--dir", "x", "--moved"]])
def test_arguments_that_make_no_sense(argv, capsys):
    with pytest.raises(SystemExit):
        v.parse_arguments(argv)
    assert re.search("are positive numbers|needs the new URL", capsys.readouterr().err)


def test_moved_needs_one_project_that_is_not_named(tmp_path, server, other):
    """Else a new account would be made at the new address, and the jobs would stay behind."""
    client = make_client(tmp_path, server, other, moved=True)  # There is nothing yet to move.
    keep(client)
    client.projects[0].url = "http://new"
    with pytest.raises(SystemExit, match="nothing is changed"):
        make_client(tmp_path, client.projects[0], moved=True)
    assert [p.url for p in v.load_state(tmp_path / "client").projects] == [server.url, other.url]


def test_a_full_disk_at_the_start_is_said_in_plain_words(tmp_path, monkeypatch):
    monkeypatch.setattr(v, "write_safely", fails(v.write_safely, errno.ENOSPC))
    args = v.parse_arguments(["127.0.0.1:1", "--no-sandbox"])
    with pytest.raises(SystemExit, match="cannot use .*: No space left on device"):
        v.build_client(args, tmp_path, v.Voice(True))


def test_only_the_second_signal_ends_it_at_once(tmp_path, server):
    """The end of standard input is no signal."""
    client = make_client(tmp_path, server)
    names = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD")]
    before = [signal.getsignal(number) for number in names]
    try:
        v.obey_signals(client)
        client.stop()
        os.kill(os.getpid(), signal.SIGTERM)  # Would end the tests.
        assert client.stopped
    finally:
        for number, handler in zip(names, before):
            signal.signal(number, handler)


def test_the_view_goes_on_while_leaving(tmp_path, server, clock):
    server.add(1, STUCK)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    shown = []
    client.leave(lambda: clock.now, turned=lambda now: shown.append(client.snapshot()["stopping"]))
    assert shown and all(shown)


def test_a_fault_of_the_client_itself_is_in_its_log(tmp_path, monkeypatch):
    def spoiled(client, screen, page):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(v, "run", spoiled)
    monkeypatch.setattr(v, "obey_signals", lambda client: None)
    monkeypatch.setattr(v, "choose_directory", lambda *args: (tmp_path, None))
    with pytest.raises(ZeroDivisionError):
        v.main(["127.0.0.1:1", "--no-sandbox", "--quiet"])
    assert "ZeroDivisionError: oops" in (tmp_path / "log.txt").read_text()


def test_files_in_use_are_not_old(tmp_path, server, clock):
    """What is kept for the next jobs is deleted when no job has needed it for long."""
    server.add(1)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.jobs and client.jobs[0].client_state == C.READY or
          client.tasks)
    main = folder_of(tmp_path) / "files" / "kept"
    main.write_bytes(b"x")
    os.utime(main, (1, 1))
    digest = hashlib.sha256(b"x").hexdigest()
    job = v.Job("j", workunit="j", files=[{"name": "kept", "sha256": digest, "main": True}],
                input={"name": "kept", "open_name": "in", "sha256": digest})
    v.prepare_slot(tmp_path / "slot", job, main.parent, 1.0)
    assert main.stat().st_mtime > 1e9
    crash(client)
