"""minigrid simulate: a function of its seed, tempers that do what they say, a watch that sees."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minigrid as m

ROOT = Path(__file__).resolve().parents[2]
QUICK = dict(hosts=6, workunits=8, ncpus=2, days=12)


def simulate():
    return sys.modules["minigrid_plugin_simulate"]


def world(folder, constants=None, kinds=None, **plan):
    """Return a small world that is open."""
    plan = simulate().world.Plan(**{**QUICK, "shares": {}, **plan})
    folder = folder / f"world {len(list(folder.iterdir()))}"
    folder.mkdir()
    return simulate().prepared(plan, folder, constants=constants, kinds=kinds)


def live(folder, constants=None, kinds=None, **plan):
    """Live a small world to its end; return its figures."""
    with world(folder, constants, kinds, **plan) as (w, name):
        w.live()
        return simulate().report.figures(w, name)


def command(*arguments, seed="0", cwd=None):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "minigrid.py"), "simulate", *arguments], capture_output=True,
        cwd=cwd or ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=300)


# ---- One seed, one history -----------------------------------------------------------

TROUBLED = ("--json --hosts 8 --workunits 16 --ncpus 2 --seed 5 --liars 0.25 --clones 0.2 --lost "
            "0.1 --repeated 0.1 --reordered 0.1 --crashes 6 --disk-full 1 --raising 2 --cancels 1 "
            "--arrivals 3/day --lifetime 5 --set validation=recheck --set recheck=1.5").split()


def test_the_same_seed_gives_the_same_output_byte_for_byte():
    """In separate processes, with sets and dicts in other orders; another seed gives another."""
    one, two = command(*TROUBLED, seed="1"), command(*TROUBLED, seed="2")
    assert one.returncode == 0, one.stderr.decode()
    assert one.stdout == two.stdout
    found = json.loads(one.stdout)
    assert found["answers"] + found["failed"] == 16 and found["crashes"] > 0
    assert re.search(rb"\d events/s, \d+ results/s", one.stderr)
    other = command(*[{"5": "6"}.get(word, word) for word in TROUBLED])
    assert other.stdout != one.stdout


# ---- Tempers -------------------------------------------------------------------------

SHOWN = {  # kind -> cause under which its computing shows up
    "liars": "wrong", "careless": "wrong", "crashers": "errors", "garblers": "errors",
    "quitters": "errors", "forgetters": "errors", "full-disks": "errors", "vanishers": "lost",
    "hoarders": "lost", "reattaching": "lost", "late": "late"}
SELDOM = {"careless": 30, "reattaching": 30}  # kind -> workunits until it shows


def test_honest_hosts_waste_nothing(tmp_path):
    found = live(tmp_path, workunits=20)
    assert found["copies"] == found["copies_by_cause"]["used"] == 40
    assert found["hours"] == found["hours_by_cause"]["used"] > 0


@pytest.mark.parametrize("kind", SHOWN)
def test_what_a_temper_spoils_shows_under_its_cause(kind, tmp_path):
    found = live(tmp_path, dict(delay_bound=6 * 3600), ["honest"] * 4 + [kind] * 4,
                 workunits=SELDOM.get(kind, 12), purged=kind == "late")
    if kind == "late":  # They come while nothing is lost, or when it is.
        assert found["copies_by_cause"]["late"] + found["copies_by_cause"]["not needed"] > 0
        assert found["rules"]["report success late"] > 0
    else:
        assert found["copies_by_cause"][SHOWN[kind]] > 0
    if kind not in ("hoarders", "vanishers"):  # They compute nothing, or one cannot know.
        assert found["hours_by_cause"][SHOWN[kind]] > 0
    assert found["answers"] == found["workunits"] and found["wrong"] == 0


def test_colluders_who_meet_are_believed_and_liars_are_not(tmp_path):
    kinds = ["colluders"] * 4 + ["honest"] * 2
    assert live(tmp_path, kinds=kinds)["wrong"] > 0
    kinds = ["liars"] * 3 + ["honest"] * 5
    assert live(tmp_path, kinds=kinds)["wrong"] == 0


def test_slow_hosts_take_longer_and_sleepers_ask_by_day_only(tmp_path):
    usual = live(tmp_path)
    assert live(tmp_path, kinds=["slow"] * 6)["hours"] > 4 * usual["hours"]
    with world(tmp_path, kinds=["sleepers"] * 6, workunits=30) as (w, _):
        w.live()
        hours = {(simulate().watch.START + 600 * k) // 3600 % 24 for k in w.load if k >= 60}
    assert hours and hours <= set(range(8, 22)), "after their first visits"


def test_a_clone_is_found_out_and_gets_a_host_of_its_own(tmp_path):
    with world(tmp_path, kinds=["honest"] * 4 + ["clones"] * 2) as (w, _):
        w.live()
        assert m.User.select().count() == 4
        assert m.Host.select().count() == 6


def test_a_wrong_clock_does_no_harm(tmp_path):
    """[C34] What a host says of times is bounded by what the server has seen."""
    with world(tmp_path, kinds=["wrong-clocks"] * 4) as (w, _):
        w.live()
        told = [r.cpu_time for r in m.Result.select() if r.outcome == 1]
        assert {0, 1e9} <= set(told)  # kept as they were told, for nobody pays by them
        for r in m.Result.select().where(m.Result.outcome == 1):
            assert 0 <= r.elapsed_time <= r.received_time - r.sent_time
        assert len(w.watch.answers) == 8


def test_hosts_arrive_and_leave_for_good(tmp_path):
    found = live(tmp_path, hosts=2, workunits=30, arrivals=8, lifetime=0.4)
    assert found["hosts"] > 4 and found["hosts_gone"] > 2
    assert found["hours_by_cause"]["lost"] > 0


@pytest.mark.parametrize("trouble", ["lost", "repeated", "reordered"])
def test_a_network_that_loses_repeats_or_reorders_costs_no_answer(trouble, tmp_path):
    """[C43] The rows of the store stay sound, see the watch; what was done is not done again."""
    usual = live(tmp_path, workunits=20)
    found = live(tmp_path, workunits=20, **{trouble: 0.4})
    assert found["answers"] == 20 and found["wrong"] == 0 and found["stage_errors"] == 0
    assert (found["requests"], found["days_to_last"]) \
        != (usual["requests"], usual["days_to_last"]), "it makes a difference"
    assert found["copies_by_cause"]["used"] == usual["copies_by_cause"]["used"] == 40


# ---- Faults of the machine -------------------------------------------------------------


def test_a_server_that_is_killed_again_and_again_comes_to_the_same_end(tmp_path):
    """[C23] What was acknowledged is kept: the watch reads all rows after each crash."""
    found = live(tmp_path, workunits=30, crashes=600)
    assert found["crashes"] > 3
    assert (found["answers"], found["wrong"], found["stage_errors"]) == (30, 0, 0)


def test_a_full_disk_and_faulty_programs_cost_time_only(tmp_path):
    found = live(tmp_path, workunits=30, disk_full=24)
    assert found["answers"] == 30 and found["requests_refused"] > 0
    with world(tmp_path, disk_full=1) as (w, _):
        w.faults.fill()
        with pytest.raises(OSError, match="No space left"):
            m.store_file("download", "x_in", b"5")
        with pytest.raises(m.StoreError, match="full"):
            m.project.write(lambda: m.Meta.create(name="x", value=1))
        w.faults.make_room()
        m.project.write(lambda: m.Meta.create(name="x", value=1))
    found = live(tmp_path, workunits=30, raising=24)
    assert found["answers"] == 30 and found["requests_refused"] + found["stage_errors"] > 0
    found = live(tmp_path, workunits=30, unreadable=1)
    assert found["answers"] == 30 and found["rules"].get("files not deleted")


# ---- The watch -------------------------------------------------------------------------

SPOILT = {  # statement -> what the watch says
    "UPDATE result SET report_deadline = 0 WHERE server_state = 4": "S4-33",
    "UPDATE result SET outcome = 0 WHERE server_state = 5": "S4-41",
    "UPDATE result SET validate_state = 1 WHERE server_state = 4": "S4-54",
    "UPDATE result SET server_state = 2, outcome = 0 WHERE outcome = 1 AND validate_state = 0":
        "S4-61",
    "UPDATE result SET validate_state = 2 WHERE validate_state = 1": "S4-55",
    "UPDATE result SET granted_credit = 1 WHERE server_state = 4": "S0-39",
    "UPDATE result SET granted_credit = granted_credit + id WHERE validate_state = 1": "S0-45",
    "UPDATE result SET granted_credit = 2 * granted_credit WHERE validate_state = 1":
        "another credit",
    "UPDATE result SET host_id = 1 WHERE host_id IS NOT NULL": "two copies on one host",
    "UPDATE workunit SET max_total_results = 1": "C5",
    "UPDATE workunit SET assimilate_state = 1 WHERE assimilate_state = 2": "C23",
    "UPDATE workunit SET canonical_resultid = 9999 WHERE canonical_resultid > 0": "S4-01",
    "UPDATE workunit SET assimilate_state = 2 WHERE assimilate_state = 0": "S4-31",
    "UPDATE workunit SET file_delete_state = 1 WHERE assimilate_state = 0": "S4-32",
    "UPDATE workunit SET transition_time = 2147483647 WHERE assimilate_state = 0": "S4-30|S0-34",
    "DELETE FROM result WHERE server_state = 4": "is gone",
    "UPDATE workunit SET name = name || 'x' WHERE assimilate_state = 0": "before it was done",
}


def test_whatever_is_spoilt_in_the_store_is_named(tmp_path):
    """[S4-29..S4-32 S4-61 S4-62 C23] And nothing is said of what is sound."""
    with world(tmp_path, dict(min_quorum=3), ["honest"] * 6 + ["liars"], workunits=20,
               task_hours=3) as (w, _):
        while len(w.watch.answers) < 8:
            w.step()
        everything = {wu.id for wu in m.Workunit.select()}
        for statement, words in SPOILT.items():
            m.db.execute_sql("SAVEPOINT spoilt")
            assert m.db.execute_sql(statement).rowcount, statement
            if words == "S0-45":  # Else it would be seen first that they have changed.
                w.watch.known.clear()
            w.watch.touched = set(everything)
            with pytest.raises(simulate().watch.Violation, match=words):
                w.watch.look(w.now)
            m.db.execute_sql("ROLLBACK TO spoilt")
            w.watch.touched = set(everything)
            w.watch.look(w.now)


def test_files_and_credit_and_a_second_pass_are_looked_at(tmp_path, monkeypatch):
    violation, small = simulate().watch.Violation, sys.modules["minigrid_plugin_files"].SmallFile
    with world(tmp_path, workunits=20) as (w, _):
        while len(w.watch.answers) < 8:
            w.step()
        (wu,) = m.Workunit.select().where(m.Workunit.file_delete_state == 0).limit(1)
        monkeypatch.setattr(simulate().watch, "FILES_OF", 1)
        (row,) = small.select().where(small.name == f"download/{wu.name}_in")
        row.delete_instance()
        with pytest.raises(violation, match="missing"):
            w.watch.scan()
        w.watch.known.clear()
        w.watch.touched = {wu.id}
        with pytest.raises(violation, match="missing"):
            w.watch.look(w.now)
        row.save(force_insert=True)
        m.db.execute_sql("UPDATE user SET total_credit = total_credit + 1 WHERE id = 1")
        with pytest.raises(violation, match="user 1 has"):
            w.watch.look_at_all(w.now)

        def busy(now):
            m.db.execute_sql("UPDATE host SET rpc_time = rpc_time + 1")
            return 0

        stages, m.STAGES = m.STAGES, (*m.STAGES, busy)
        try:
            with pytest.raises(violation, match="second pass"):
                w.watch.second_pass(w.now)
        finally:
            m.STAGES = stages


def test_a_violation_ends_the_command_with_the_way_to_see_it_again(tmp_path, monkeypatch, capsys):
    plugin, parser = simulate(), argparse.ArgumentParser()
    plugin.commands(parser.add_subparsers())
    words = "simulate --hosts 3 --workunits 4 --seed 7 --late 0.5".split()
    monkeypatch.setattr(sys, "argv", ["minigrid", *words])
    monkeypatch.setattr(plugin.watch, "wrong_of", lambda unit, copies, now: ["is odd [S9-99]"])
    options = parser.parse_args(words)
    assert options.run(options) == 1
    said = capsys.readouterr().err
    assert "seed 7" in said and "is odd [S9-99]" in said
    assert f"replay: minigrid {' '.join(words)}" in said


# ---- The command -------------------------------------------------------------------------


def test_a_file_lends_its_numbers_and_policies_and_is_not_computed(tmp_path):
    (tmp_path / "mine.py").write_text('''"""mine: what must not run here."""

min_quorum = 3
rsc_fpops_est = 2.16e11
validation = "quorum"


def workunit(i):
    return {"input": {"x": i}, "delay_bound": 7 * 86400 + i} if i < 5 else None


def compute(input):
    raise SystemExit("computed")


def parse(output):
    raise SystemExit("parsed")


def assimilate(workunit, answer):
    raise SystemExit("assimilated")
''')
    place = tmp_path / "world"
    place.mkdir()
    plan = simulate().world.Plan(hosts=5, shares={})
    with simulate().prepared(plan, place, tmp_path / "mine.py") as (w, name):
        w.live()
        assert name == "mine" and len(w.watch.answers) == 5
        assert {wu.min_quorum for wu in m.Workunit.select()} == {3}
        bounds = sorted(wu.delay_bound for wu in m.Workunit.select())
        assert bounds == [7 * 86400 + i for i in range(5)]
        assert simulate().report.figures(w, name)["hours"] > 15  # two hours each


REFUSED = {
    "--liars 1.5": "must not be above 1 together",
    "--hosts 0": "--hosts must be above 0",
    "--lost 2": "--lost must be a share from 0 to 1",
    "--arrivals many": "--arrivals must be a number",
    "--set min_quorum": "--set must be NAME=VALUE",
    "--set min_quorum=0": "min_quorum must be",
    "--crashes=-1": "--crashes must not be negative",
    "--raising nan": "--raising must not be negative",
    "nothing.py": "nothing.py",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_simulated_is_refused_in_one_line(words, monkeypatch, capsys, tmp_path):
    parser = argparse.ArgumentParser()
    simulate().commands(parser.add_subparsers())
    options = parser.parse_args(["simulate", *words.split()])
    with pytest.raises((m.ClientError, m.PluginError, OSError), match=REFUSED[words]):
        options.run(options)


def test_the_page_says_what_a_planner_asks(tmp_path):
    found = live(tmp_path, kinds=["honest"] * 5 + ["liars"])
    page = simulate().report.text(found)
    for words in ("8 of 8, half of them after", "for each answer", "accepted (0.00%)",
                  "hours of a processor", "wrong answers", "black list", "requests", "#", "days"):
        assert words in page, words
    assert all(len(line) <= 130 for line in page.splitlines())


def test_the_page_says_why_workunits_failed(tmp_path):
    """A deadline that no computer can meet is what a planner must see first."""
    found = live(tmp_path, {"delay_bound": 60}, workunits=2, days=4)
    assert (found["failed"], found["answers"], found["copies"]) == (2, 0, 0)
    page = simulate().report.text(found)
    assert "failed         2 workunits: 2 times one result could not be sent; a computer was " \
           "told: would take you" in page
    assert "half of all decided after" in page and "0 of 2" in page
    assert "half of them" not in page


@pytest.mark.parametrize("missing", [[], ["time out"]])
def test_standard_worlds_say_which_rule_has_not_fired(missing, monkeypatch, capsys):
    """The worlds themselves are lived in test_simulation.py."""
    standard, parser = simulate().standard, argparse.ArgumentParser()
    rules = {name: 2 for name in m.RULES if name not in {*missing, *standard.UNREACHABLE}}
    monkeypatch.setattr(standard, "run", lambda name, seed, folder: rules)
    simulate().commands(parser.add_subparsers())
    options = parser.parse_args("simulate --standard --seed 4".split())
    assert options.run(options) == len(missing)
    said = capsys.readouterr().out
    assert said.count("seed 4: ") == len(standard.WORLDS) and "6  send" in said
    assert f"never fired: {missing[0] if missing else 'none'}" in said
