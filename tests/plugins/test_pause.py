"""Pausing a project: nobody gets work, nobody loses any, all are told why."""

import sys

import make
import pytest
from make import dump
from web import Volunteer, Web, serving

import minigrid as m


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def pause(web):
    return sys.modules["minigrid_plugin_pause"]


def pausing(*words):
    """As the command does, in this process: main() would load all plugins again."""
    pause = sys.modules["minigrid_plugin_pause"]
    parser = m.argparse.ArgumentParser()
    pause.commands(parser.add_subparsers())
    options = parser.parse_args([*words, "--data", str(m.project.data)])
    return options.run(options)


def said(reply):
    return [(e["priority"], e["text"]) for e in reply["messages"]]


def test_volunteers_are_told_and_nothing_is_acknowledged(web, pause, capsys):
    anna = Volunteer(web)
    (job,) = anna.fetch()
    anna.put(job, b"0")
    before = dump()
    pausing("pause", "moving to\nanother  room")
    assert "Paused" in capsys.readouterr().out
    reply = anna.report(job, work_req_seconds=1)
    assert said(reply) == [("notice", "moving to another room")]
    assert reply["acks"] == reply["assignments"] == [] and reply["request_delay"] > 0
    assert reply["hostid"] == anna.hostid and dump() == before
    pausing("resume")
    assert anna.report(job)["acks"] == [job["name"]]
    pausing("resume")  # Once more does no harm.


def test_uploads_and_stages_go_on(web, pause):
    anna, ben = Volunteer(web, "anna"), Volunteer(web, "ben")
    jobs = anna.fetch() + ben.fetch()
    assert jobs[0]["workunit"] == jobs[1]["workunit"]
    for volunteer, job in zip((anna, ben), jobs):
        volunteer.put(job, b"0"), volunteer.report(job)
    (more,) = anna.fetch()
    pausing("pause")
    assert anna.put(more, b"1").status == 200
    m.run_pass(web.now + 1)
    assert m.Workunit.get(name=jobs[0]["workunit"]).canonical_resultid
    pausing("resume")


TEXTS = {"": "the project is paused for maintenance; your work is safe", "  \n": None,
         "x" * 2000: "x" * 500, "a\tb\n\nc": "a b c"}


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_told(pause, text):
    (m.project.data / "paused").write_text(text)
    assert pause.stopped(0) == (TEXTS[text] or TEXTS[""])
    (m.project.data / "paused").write_bytes(b"\xff\xfe!")
    assert pause.stopped(0).endswith("!")
    (m.project.data / "paused").unlink()
    assert pause.stopped(0) == ""


def test_a_file_that_cannot_be_read_or_changed(pause):
    (m.project.data / "paused").mkdir()
    try:
        assert "problem on its side" in pause.stopped(0)
        for words in (("pause", "x"), ("resume",)):
            with pytest.raises(m.ClientError, match="cannot change .*paused"):
                pausing(*words)
    finally:
        (m.project.data / "paused").rmdir()


def test_no_project_no_pause(tmp_path, pause):
    parser = m.argparse.ArgumentParser()
    pause.commands(parser.add_subparsers())
    options = parser.parse_args(["pause", "--data", str(tmp_path / "nowhere")])
    with pytest.raises(m.ClientError, match="no project in .*--data"):
        options.run(options)
    assert not (tmp_path / "nowhere").exists()


def test_a_pause_outlives_the_process(folder, web):
    anna = Volunteer(web)
    pausing("pause", "back soon")
    make.restart(folder)
    again = Web()
    anna.web = again
    assert said(anna(work_req_seconds=1)) == [("notice", "back soon")]
    pausing("resume")
    assert said(anna()) == []
