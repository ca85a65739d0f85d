"""Several projects in one client, and projects with several addresses, against scripted servers."""

import json

import pytest
from volunteer_world import (NOW, Server, crash, drive, make_client, open_job, project, reports, v)


@pytest.fixture
def other():
    """A second project."""
    s = Server()
    yield s
    s.close()


def restart(tmp_path, *servers, **options):
    """A client in the same directory, as at its next start."""
    return make_client(tmp_path, *servers, **options)


def test_two_projects_with_files_of_one_name(tmp_path, server, other, clock):
    """Names are a server's own business: neither file, nor result, nor output is mixed up."""
    server.add(2)
    other.add(2, b"def compute(input):\n    return input * input\n", b"5")
    other.work[0]["input"]["name"] = server.work[0]["input"]["name"]
    client = make_client(tmp_path, server, other)
    drive(client, clock, lambda: server.store and other.store)
    assert [bytes(s.uploads["wu_2_0"]) for s in (server, other)] == [b"4", b"25"]
    assert len(list((tmp_path / "client" / "projects").iterdir())) == 2
    assert {r["authenticator"] for r in server.requests} == {"%032x" % 1}


def test_one_project_that_fails_does_not_stop_the_other(tmp_path, server, other, clock):
    server.trouble = {"POST scheduler": [503] * 99, "POST register": [None]}
    other.add(1)
    client = make_client(tmp_path, server, other)
    drive(client, clock, lambda: other.store)
    assert client.projects[0].n_rpc_failures == 1 and not client.projects[1].n_rpc_failures
    assert "scripted trouble" in client.projects[0].trouble


def test_a_project_that_refuses_us_is_left_alone_in_this_run(tmp_path, server, other, clock):
    server.trouble = {"POST register": [403]}
    other.add(1)
    client = make_client(tmp_path, server, other, once=True)
    drive(client, clock, client.finished)
    assert reports(other) == {"wu_1_0": (5, 0)} and not client.fatal
    assert v.standing(client.projects[0], clock.now)[0] == "the server refuses: scripted trouble"


STUCK = b"import threading\ndef compute(input): threading.Event().wait()\n"


def test_who_is_not_named_rests_but_reports_what_is_finished(tmp_path, server, other, clock):
    for s in (server, other):
        s.add(1)
        s.add(2, STUCK)
    client = make_client(tmp_path, server, other, n_cpus=4)
    other.trouble = {"POST scheduler": [None] + [503] * 99}
    drive(client, clock, lambda: any(j.over for j in client.projects[1].jobs) and server.store,
          True)
    client.urgent = True
    client._save()
    crash(client)
    other.trouble.clear()
    n = len(other.requests)
    again = restart(tmp_path, server)
    clock.now += 20000
    drive(again, clock, lambda: other.store, True)
    assert [p.resting for p in again.projects] == [False, True]
    assert {job.project.url for job in again.tasks} == {server.url}
    assert all(r["work_req_seconds"] == 0 for r in other.requests[n:])
    crash(again)
    third = restart(tmp_path)  # No name at all: as last time.
    assert [p.resting for p in third.projects] == [False, True]
    assert [p.resting for p in restart(tmp_path, other, server).projects] == [False, False]


def test_shares_are_kept_and_can_be_changed(tmp_path, server, other):
    def shares(*wanted):
        client = v.Client(tmp_path / "client", list(wanted), v.Options(nickname="x"), None, None,
                          v.Voice(True))
        v.save_state(client.state, tmp_path / "client")
        return [p.resource_share for p in client.projects]

    assert shares((server.url, None), (other.url, 25.0)) == [100.0, 25.0]
    assert shares((server.url, 50.0)) == [50.0, 25.0]
    assert shares() == [50.0, 25.0]


def test_a_server_that_moved_takes_its_jobs_along(tmp_path, server, clock):
    """The user says so [D5 boinc#5946]; what points elsewhere stays as it is."""
    server.add(1)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.jobs)
    crash(client)
    old = server.url
    server.url = server.url.replace("127.0.0.1", "localhost")
    again = restart(tmp_path, server, moved=True)
    assert [p.url for p in again.projects] == [server.url] != [old]
    clock.now += 100
    drive(again, clock, lambda: server.store)
    assert reports(server) == {"wu_1_0": (5, 0)} and len(server.registered) == 1


def test_addresses_of_files_are_kept_without_the_servers():
    old, elsewhere = "http://10.0.0.1:8080", "http://10.0.0.1:80800/f"
    job = v.Job("pi_0_0", files=[{"url": old + "/download/pi.py"}, {"url": elsewhere}],
                input={"url": old + "/download/pi_0_in"},
                output={"url": old + "/upload/pi_0_0_out"})
    v.localise(job, old)
    assert [f["url"] for f in (*job.downloads, job.output)] == [
        "/download/pi.py", elsewhere, "/download/pi_0_in", "/upload/pi_0_0_out"]
    p = project(addresses=["http://a", "http://b"])
    assert v.places(p, "/f") == ["http://a/f", "http://b/f"]
    assert v.places(p, elsewhere) == [elsewhere]


def test_the_state_of_a_client_that_knew_one_project_is_taken_over(tmp_path, server, clock):
    """Version 0.2.0 kept its files in the directory itself, and whole addresses."""
    a = server.add(1)
    a["files"][0]["open_name"] = a["files"][0]["name"]
    job = v.parse_assignment(a, server.url)
    old = v.plain_fields(project(url=server.url, nickname="otter"), jobs=[v.plain_fields(job)])
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "client.json").write_text(json.dumps(
        {"project": old, "host_cpid": "c" * 32, "p_fpops": 2e7, "saved_at": NOW}))
    client = make_client(tmp_path, server)
    assert [p.url for p in client.projects] == [server.url]
    drive(client, clock, lambda: server.store)
    assert reports(server) == {"wu_1_0": (5, 0)} and not server.registered


def test_another_address_is_tried_when_one_fails(tmp_path, server, other, clock):
    """[S1-22]: for scheduler, downloads and uploads; the one that works comes first from then."""
    other.add(1)
    client = make_client(tmp_path, server)
    server.do_register = other.do_register
    client.projects[0].addresses = [server.url, other.url]
    server.trouble = {"POST scheduler": [503] * 99, "GET download": [503] * 9,
                      "PUT upload": [503] * 9}
    drive(client, clock, lambda: other.store)
    assert client.projects[0].addresses == [other.url, server.url]
    assert server.log.count("POST /scheduler") == 1 and client.projects[0].n_rpc_failures == 0


def test_addresses_that_the_server_tells_are_kept_for_later(tmp_path, server, other, clock):
    server.extra = [{"addresses": [server.url, other.url, 7, "ftp://x", "http://a b", None]}]
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: server.requests)
    drive(client, clock, lambda: not client.op.action)
    assert client.projects[0].addresses == [server.url, other.url]


def test_the_front_page_is_read_when_all_has_failed_often(tmp_path, server, other, clock):
    """[S1-05 S1-26 S1-27 S1-29 C26]: at the tenth failure; the new address is tried at once."""
    server.trouble = {"POST scheduler": [503] * 99}
    server.addresses = [other.url]
    other.add(1)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: other.store)
    assert server.log.count("POST /scheduler") == 10 and server.log.count("GET /") == 1
    assert client.projects[0].addresses[0] == other.url
    assert "names other addresses" in client.voice.stream.getvalue()


def test_a_front_page_that_says_nothing_is_one_more_failure(tmp_path, server, clock):
    """[S1-28]"""
    server.trouble = {"POST scheduler": [503] * 99}
    server.do_ = lambda h, body, fault: b"<html>It works!</html>"
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.projects[0].n_rpc_failures == 11)
    assert server.log.count("GET /") == 1 and "names no scheduler" in client.projects[0].trouble


HOME = "https://grid.example"
LINKS = {  # href -> address
    "/scheduler": HOME, "https://b.example:99/sub/scheduler": "https://b.example:99/sub",
    "http://b.example/scheduler": None, "//c.example/scheduler": "https://c.example",
    "/elsewhere": None, "ftp://c/scheduler": None, "": None, "https://u:p@c/scheduler": None,
    "javascript:/scheduler": None, "https://[/scheduler": None,
}


@pytest.mark.parametrize("href", LINKS)
def test_what_a_front_page_may_name(href):
    """What came encrypted is not continued in the open; no passwords, no other schemes."""
    page = '<html><LINK href="%s" rel="icon minigrid_scheduler"><link rel=icon href=/i>' % href
    if LINKS[href]:
        assert v.read_master(page, HOME + "/") == [LINKS[href]]
    else:
        with pytest.raises(ValueError, match="names no scheduler"):
            v.read_master(page, HOME + "/")


def test_a_project_can_be_left(tmp_path, server, other, clock):
    """What is finished is reported, the rest given back, nothing stays."""
    for s in (server, other):
        s.add(1, STUCK)
    client = make_client(tmp_path, server, other)
    drive(client, clock, lambda: len(client.tasks) == 2, True)
    crash(client)
    clock.now += 9
    again = restart(tmp_path, forget=server.url)
    drive(again, clock, lambda: len(again.projects) == 1, True)
    assert reports(server) == {"wu_1_0": (6, 203)} and not other.store
    assert len(list((tmp_path / "client" / "projects").iterdir())) == 1
    crash(again)
    assert [p.url for p in v.load_state(tmp_path / "client").projects] == [other.url]


def test_a_project_that_is_gone_can_be_left(tmp_path, server, clock):
    server.add(1, STUCK)
    client = make_client(tmp_path, server)
    drive(client, clock, lambda: client.tasks, True)
    crash(client)
    server.trouble = {"POST scheduler": [503] * 9}
    clock.now += 9
    again = restart(tmp_path, forget=server.url)
    drive(again, clock, again.finished)
    assert not again.projects and not again.fatal and not v.load_state(tmp_path / "client").projects


def test_a_job_that_was_not_started_by_its_deadline_is_given_back(tmp_path, server, clock):
    """[S1-06]: nobody waits for it. One that has begun goes on: it may still count."""
    server.add(1, STUCK)
    server.add(2, STUCK)
    client = make_client(tmp_path, server, n_cpus=1)
    drive(client, clock, lambda: client.tasks, True)
    running, = client.tasks
    clock.now += 2e5
    drive(client, clock, lambda: server.store, True)
    assert list(reports(server).values()) == [(6, 200)] and running in client.tasks
    crash(client)


def test_which_job_next():
    """By debt; what would be late if it were last goes first, by its deadline [S1-06 S1-10]."""
    bounds = v.Limits(1, 1e7)
    a, b = project(open_job("a"), resource_share=1), project(open_job("b"), resource_share=2)
    ready = a.jobs + b.jobs

    def first(running=()):
        return v.next_job(ready, list(running), bounds, NOW).name

    assert first() == "b"  # Infinite debt both: the larger share.
    v.devote(a, 100, NOW), v.devote(b, 300, NOW)
    assert first() == "a"  # 1/100 against 2/300.
    running = open_job("c", est=2e9)
    a.adopt(running)
    assert first([running]) == "b"  # 200 s more are promised to a.
    b.jobs[0].report_deadline = NOW + 250  # Needs 100 s, and 200 s wait before it.
    assert first() == "b"
    b.jobs[0].report_deadline = NOW + 350
    assert first() == "a"
    assert v.next_job([], [], bounds, NOW) is None
