"""Attacks on trust: whoever lies, loses, crashes or meddles, nothing waits for ever.

First single attacks, each with what it aims at; in the end all at once, at random.
MINIGRID_SEED begins the random numbers, MINIGRID_STORMS says how many such worlds (2).
"""

import collections
import contextlib
import gzip
import json
import os
import random
import sys

import make
import pytest
from make import NOW, Client, add, copies, output, result, settings, units
from test_inverse import TWICE

import minigrid as m

V, O, S = m.ValidateState, m.Outcome, m.ServerState
PLAIN = '''
min_quorum = 1
{constants}

def workunit(i):
    return {{"input": i}} if i < 100 else None


def compute(input):
    return input
'''


def module(name):
    return sys.modules[f"minigrid_plugin_{name}"]


@pytest.fixture
def open_grid(folder, monkeypatch):
    """Open a project with one application, a, of this text; each pass is a second later."""
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    monkeypatch.setattr(module("trust.blacklist"), "settings", module("trust.blacklist").Settings())
    opened = []

    def start(text, **more):
        opened.append(make.project(folder, {"a": text}, **{**dict(
            stock=0, min_sendwork_interval=0), **more}))
        grid = opened[0].__enter__()
        assert list(m.apps) == ["a"], grid.errors
        grid.clock = NOW
        return grid

    yield start
    assert m.plugged("violations")[0]() == []
    assert m.project.counts["stage errors"] == 0
    opened[0].__exit__(None, None, None)


def passes(grid, n=3):
    for _ in range(n):
        grid.clock += 1
        m.run_pass(grid.clock)


def do(grid, client, answer):
    """Let a client do one task, whatever it is given, and the server look at it; its name."""
    (name,) = client.fetch(grid.clock)
    client.report(name, answer, grid.clock)
    passes(grid)
    return name


def cancel(ids, now):
    m.project.write(lambda: m.plugged("cancel_workunits")[0](ids, now))


# ---- Inverse tasks -------------------------------------------------------------------


@pytest.mark.parametrize("recovered, wanted", [("5", V.VALID), ("4", V.INVALID)])
def test_the_output_of_a_check_is_lost_while_others_are_asked(open_grid, recovered, wanted):
    """[C36] It counts no more, and nobody waits for it once the result is judged."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    first = do(grid, Client("computes"), "10")
    lost = do(grid, Client("bob"), "4")
    output(lost).unlink()
    for n in range(2 if wanted == V.INVALID else 1):  # Two must agree that it is wrong.
        last = do(grid, Client(f"cyd {n}"), recovered)
    assert grid.errors == []
    assert [result(name).validate_state for name in (first, last)] == [wanted, V.VALID]
    if wanted == V.INVALID:
        for name, answer in (("dan", "10"), ("eve", "5")):
            do(grid, Client(name), answer)
    assert Client("zoe").fetch(grid.clock) == [] and grid.errors == []
    assert result(lost).outcome == O.VALIDATE_ERROR and m.plugged("violations")[0]() == []
    settings(purge_delay=0)
    passes(grid, 5)
    assert units() == []


def test_the_output_of_a_check_is_lost_when_another_one_says_the_same(open_grid):
    """[C36] The result is wrong, as both said; what is lost is nobody's answer to build on."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    first, lost = do(grid, Client("computes"), "11"), do(grid, Client("bob"), "55")
    cyd = Client("cyd")
    cyd.report(*cyd.fetch(grid.clock), "55", grid.clock)
    m.run_pass(grid.clock + 1, [m.transitioner, m.validator])
    output(lost).unlink()
    passes(grid)
    assert result(first).validate_state == V.INVALID and grid.errors == []
    assert result(lost).outcome == O.VALIDATE_ERROR


def test_an_answer_is_lost_and_a_late_one_comes_in_its_place(open_grid):
    """[C11 C36] What the lost one said counts no more."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    first, slow = do(grid, Client("computes"), "10"), Client("slow")
    (late,) = slow.fetch(grid.clock)
    grid.clock += make.DAY
    passes(grid)
    lost = do(grid, Client("bob"), "4")
    output(lost).unlink()
    slow.report(late, "5", grid.clock)
    passes(grid)
    assert [result(name).validate_state for name in (first, late)] == [V.VALID] * 2
    assert grid.errors == [] and result(lost).outcome == O.VALIDATE_ERROR


@pytest.mark.parametrize("other", ["an ordinary workunit", "another question"])
def test_a_check_gives_up_no_workunit_but_its_own_question(open_grid, other):
    """Its question was purged, and SQLite has given its number to another workunit."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    add("a", 6, NOW)
    ann, checks = Client("ann"), module("inverse").InverseCheck
    for name, answer in zip(ann.fetch(NOW, work_req_seconds=1e6), ("10", "12")):
        ann.report(name, answer, NOW)
    passes(grid)
    (taken,) = [unit.id for unit in units() if unit.name == "a_6" or unit.id == checks.get(
        workunit=2).question][other == "another question":][:1]
    checks.update(question=taken).where(checks.workunit == 1).execute()
    cancel([1], grid.clock)
    passes(grid)
    assert m.Workunit.get_by_id(taken).error_mask == 0
    assert not checks.get(workunit=1).open


def test_the_number_of_a_purged_question_is_given_to_another_one(open_grid):
    """SQLite does so with the highest one; answers must not be taken for those of the old check."""
    grid = open_grid(TWICE, purge_delay=0)
    add("a", 5, NOW)
    do(grid, Client("computes"), "11")
    asked = set()
    for _ in range(module("inverse").CHECKS_MAX):
        asked |= {unit.id for unit in units()[1:]}
        cancel(list(asked), grid.clock)
        passes(grid, 6)
    assert len(units()) == 1 and len(asked) > 1
    do(grid, Client("second"), "10")
    assert units()[1].id in asked
    do(grid, Client("bob"), "5")
    passes(grid, 5)
    assert units() == [] and grid.errors == []
    assert '"answer":10,"errors":[]' in (grid.data / "results" / "a.jsonl").read_text()


def test_a_question_whose_check_is_purged_is_dropped(open_grid):
    grid = open_grid(TWICE, purge_delay=0)
    add("a", 5, NOW)
    add("a", 6, NOW)
    ann, bob = Client("ann"), Client("bob")
    for name, answer in zip(ann.fetch(NOW, work_req_seconds=1e6), ("10", "12")):
        ann.report(name, answer, NOW)
    passes(grid)
    (name,) = bob.fetch(grid.clock)
    m.Result.delete().where(m.Result.workunit.in_([1, 2])).execute()
    m.Workunit.delete().where(m.Workunit.id.in_([1, 2])).execute()
    m.db.execute_sql("DELETE FROM small_file WHERE name IN ('download/a_5_in', 'download/a_6_in')")
    eve = Client("eve")
    assert eve.fetch(grid.clock) == [] and "nobody needs" in eve.host().why_no_work
    bob.report(name, "5", grid.clock)
    passes(grid, 5)
    assert len(units()) == 1 and grid.errors == []


def test_many_checks_end_before_their_workunits_are_purged(open_grid):
    grid = open_grid(TWICE, purge_delay=0, max_wus_in_progress=1000, max_wus_to_send=1000)
    for number in range(120):
        add("a", number, NOW)
    ann = Client("ann")
    names = ann.fetch(NOW, work_req_seconds=1e6)
    for name in names:
        output(name).write_text(str(2 * int(name.split("_")[1])))
    ann.ask(NOW, reports=[m.Report(name, 5, 0) for name in names])
    passes(grid, 3)
    assert len(units()) == 240
    cancel(list(range(1, 121)), grid.clock)
    passes(grid, 8)
    assert units() == [] and not module("inverse").InverseCheck.select().exists()


class Desk:
    """The request of a BOINC client that brings its own program for the application."""

    why_not = None


def test_a_volunteers_own_program_gets_no_check(open_grid):
    """[S3-31] It may not know --invert, and would compute: an honest host would be called wrong."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    add("a", 6, NOW)
    do(grid, Client("computes"), "10")
    own = m.AppVersion.create(app=m.apps["a"].id, create_time=NOW, platform="anonymous",
                              version_num=0, files=[])
    bob = Client("bob")
    given = dict(platforms=["anonymous"], versions={m.apps["a"].id: [own]})
    assert bob.fetch(grid.clock, **given) == ["a_6_0"]
    assert bob.fetch(grid.clock, **given) == []
    assert "not by yours" in bob.host().why_no_work
    (question,) = Client("eve").fetch(grid.clock)
    assert "_check_" in question


# ---- Whose answer it is ----------------------------------------------------------------


def test_lies_reported_by_a_fresh_host_are_those_of_the_host_that_got_the_task(open_grid):
    """[C43 S3-29] Or a liar would stay in good standing, and its throw-away hosts be listed."""
    grid = open_grid(PLAIN.format(constants='validation = "check"\n\n\ndef check(input, output):\n'
                                            '    return input == output\n'))
    add("a", 5, NOW)
    liar, fresh = Client("liz"), Client("liz")
    (name,) = liar.fetch(NOW)
    fresh.report(name, "6", NOW)
    passes(grid)
    (entry,) = module("trust.blacklist").BlackEntry.select()
    assert entry.host == liar.hostid and result(name).validate_state == V.INVALID
    assert result(name).host_id == fresh.hostid  # as BOINC has it
    assert liar.fetch(grid.clock) == []


def test_nobody_is_believed_alone_by_another_ones_proof(open_grid):
    """[C43] Nor keeps it who does not report what it was given."""
    grid = open_grid(PLAIN.format(constants='validation = "adaptive"\nmin_quorum = 2'))
    proofs, liar = module("recheck").Proof, Client("liz")
    add("a", 4, NOW)
    liar.report(*liar.fetch(NOW), "4", NOW)
    version = result("a_4_0").app_version_id
    proofs.insert(host=liar.hostid, app_version=version, run=50, time=NOW).execute()
    grid.rng.random = lambda: 0.99  # not drawn for a check
    add("a", 5, NOW)
    (name,) = [name for name in liar.fetch(NOW + 9) if name.startswith("a_5")]
    assert result(name).workunit.min_quorum == 1
    Client("liz").report(name, "6", NOW + 9)
    grid.clock = NOW + 10
    passes(grid)
    assert result(name).workunit.min_quorum == 2 and not result(name).workunit.canonical_resultid
    assert proofs.get(host=liar.hostid).run == 0


def test_a_check_is_not_answered_by_who_was_not_sent_it(open_grid):
    """[S3-34] Names may be guessed, or told by a friend."""
    grid = open_grid(TWICE)
    add("a", 5, NOW)
    ann, bob = Client("ann"), Client("bob")
    first = do(grid, ann, "11")
    question = copies()[1].name
    ann.report(question, "5", grid.clock)  # not sent to anybody yet
    assert bob.fetch(grid.clock) == [question]
    ann.report(question, "5", grid.clock)  # in bob's hands
    passes(grid)
    assert result(question).server_state == S.IN_PROGRESS
    assert result(first).validate_state == V.INCONCLUSIVE


class Slow:
    """A stream of three bytes, in the midst of which something happens."""

    def __init__(self, happens):
        self.happens = happens

    def read(self, nbytes):
        self.happens()
        return b"666"


def test_an_answer_is_not_replaced_once_it_is_judged(open_grid):
    """A right one is uploaded and reported while a second upload of it is still on its way."""
    grid = open_grid(PLAIN.format(constants=""))
    add("a", 5, NOW)
    ann = Client("ann")
    (name,) = ann.fetch(NOW)
    (store,) = m.plugged("store_upload")

    def happens():
        ann.report(name, "5", NOW)
        m.run_pass(grid.clock + 1, [m.transitioner, m.validator])

    with pytest.raises(m.ClientError, match="was reported"):
        store(result(name), f"{name}_out", 0, 3, Slow(happens), 3, NOW, "md5", "")
    assert output(name).read_text() == "5" and result(name).validate_state == V.VALID
    assert not output(name).with_name(f"{name}_out.part").exists()


# ---- Black list and spot checks ---------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_what_a_refused_host_holds_is_given_to_others_at_once(open_grid, level):
    """[C36] It cannot report any more; who only gets no work can, and keeps its deadline."""
    grid = open_grid(PLAIN.format(constants=""))
    add("a", 5, NOW)
    ann, bob = Client("ann"), Client("bob")
    (name,) = ann.fetch(NOW)
    black = module("trust.blacklist")
    m.project.write(lambda: black.enter(ann.host(), None, level, "operator", "x", {}, NOW, 0))
    assert m.plugged("violations")[0]() == []
    passes(grid, 1)
    refused = level == black.REFUSED
    assert (result(name).outcome == O.NO_REPLY) == refused
    assert bob.fetch(grid.clock) == ["a_5_1"] * refused
    m.project.write(lambda: black.pardon(ann.hostid, "x", grid.clock))
    ann.report(name, "5", grid.clock)  # A pardon comes in time: it counts [C11].
    passes(grid)
    assert result(name).validate_state == V.VALID


def test_a_spot_check_is_entered_in_the_table_of_current_computations(open_grid):
    """[S3-18 C36] By the copy's own id, so that its row goes with its report."""
    grid = open_grid(PLAIN.format(
        constants='dispatch = "xcom3"\nvalidation = "quorum"\nspot_checks = 1.0'))
    add("a", 5, NOW, min_quorum=2)
    for name in ("ann", "bob"):
        client = Client(name)
        client.report(*client.fetch(NOW), "5", NOW)
    passes(grid)
    eve = Client("eve")
    (name,) = eve.fetch(grid.clock)
    handout = module("sampling").Handout
    assert [row.result for row in handout.select()] == [result(name).id]
    eve.report(name, "5", grid.clock)
    assert not handout.select().exists()


VOTES = '"recheck"\nrecheck = 3\nmax_success_results, max_total_results = 30, 30'


def test_a_crowd_of_new_liars_does_not_put_an_application_in_doubt(open_grid):
    """A hundred accounts with one wrong answer each: who was never right is no sign of a fault."""
    open_grid(PLAIN.replace("min_quorum = 1", "").format(constants=f"validation = {VOTES}"))
    black, app = module("trust.blacklist"), m.apps["a"].id
    for host in range(5):
        m.project.write(lambda: black.count(app, [(host, 0, False, True)], NOW))
    for host in range(100, 200):
        m.project.write(lambda: black.count(app, [(host, 1, False, True)], NOW))
    all_ = black.Measured.get(app=app)
    assert (all_.hosts, all_.losers) == (5, 0) and not black.is_doubtful(all_)
    for host in range(5):
        m.project.write(lambda: black.count(app, [(host, 1, False, True)], NOW))
    assert black.is_doubtful(black.Measured.get(app=app))
    for _ in range(black.LAST):
        m.project.write(lambda: black.count(app, [(0, 0, False, True)], NOW))
    assert black.Measured.get(app=app).losers == 4


def test_who_is_always_wrong_is_listed_though_the_application_is_in_doubt(open_grid):
    """Somebody may have brought the doubt about; a fault of the application spares some answers."""
    grid = open_grid(PLAIN.replace("min_quorum = 1", "").format(constants=f"validation = {VOTES}"),
                     daily_result_quota=10**6)
    black = module("trust.blacklist")
    clients = [Client(name) for name in ("ann", "bob", "liz")]
    black.Measured.create(app=m.apps["a"].id, hosts=70, losers=60)
    for number in range(black.VOTES):
        assert not black.BlackEntry.select().exists()
        add("a", number, grid.clock)
        for client, answer in zip(clients, ("1", "1", "2")):
            client.report(*client.fetch(grid.clock), answer, grid.clock)
        passes(grid)
    (entry,) = black.BlackEntry.select()
    assert entry.host == clients[2].hostid


def test_copies_sent_before_an_application_chose_x_coms_ways_are_handed_over(open_grid, folder):
    """[S3-03 S3-18] They are in the table of current computations, too; answers end their rows."""
    open_grid(PLAIN.format(constants=""), stock=2)
    ann, bob, handout = Client("ann"), Client("bob"), module("sampling").Handout
    m.run_pass(NOW)
    (name,) = ann.fetch(NOW)
    for constants, n in (('dispatch = "xcom3"', 1), ("", 0), ('dispatch = "xcom3"', 1)):
        (folder / "a.py").write_text(PLAIN.format(constants=constants))
        make.restart(folder, stock=2, min_sendwork_interval=0)
        m.Meta.delete().where(m.Meta.name == "nodes checked").execute()
        m.run_pass(NOW)
        assert handout.select().count() == n
    (other,) = bob.fetch(NOW)
    output(other).write_text("1")
    bob.ask(NOW + 101, reports=[m.Report(other, 5, 0, elapsed_time=100)])
    m.run_pass(NOW + 200)
    assert bob.fetch(NOW + 200) == ["a_2_0"] and bob.fetch(NOW + 201) == ["a_0_1"]
    ann.report(name, "1", NOW + 203)
    assert sorted(handout.select(handout.workunit).tuples()) == [(1,), (3,)]


# ---- Hooks that misbehave ----------------------------------------------------------------

NOT_KNOWN = {"NaN": "float('nan')", "infinity": "[1, float('inf')]", "no JSON": "{1}",
             "a generator": "(n for n in [i])", "bytes": "b'5'"}


@pytest.mark.parametrize("case", NOT_KNOWN)
@pytest.mark.parametrize("compare", ["", "\n\ndef compare(a, b):\n    a == b\n"])
def test_a_known_answer_that_is_none_condemns_nobody(case, compare, open_grid, folder):
    """[S3-28 S3-29] Every honest host would be black-listed for a fault of the application."""
    text = PLAIN.format(constants=f"\n\ndef known(i):\n    return {NOT_KNOWN[case]}\n{compare}")
    grid = open_grid(text)
    add("a", 5, NOW)
    name = do(grid, Client("ann"), "5")
    assert result(name).validate_state == V.INIT and len(grid.errors) == 1
    assert "a.py: known(5) must return an answer" in grid.errors[0][1]
    assert not module("trust.blacklist").BlackEntry.select().exists()
    (folder / "a.py").write_text(PLAIN.format(constants="\n\ndef known(i):\n    return i\n"))
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.run_pass(grid.clock + 1)
    assert result(name).validate_state == V.VALID


ODD = {"raises": "raise KeyError(1)", "ends the process": "import sys; sys.exit(0)",
       "hangs": "import threading; threading.Event().wait()", "NaN": "return float('nan')",
       "yes": "return 'yes'", "a generator": "yield True", "nothing": "print('hello')"}
HOOKS = {"check": ('validation = "check"', "check(input, output)"),
         "same": ('validation = "inverse"\n\n\ndef invert(output):\n    return output\n',
                  "same(input, recovered)"),
         "compare": ('validation = "quorum"\n\n\ndef known(i):\n    return i\n', "compare(a, b)"),
         "check_set": ('validation = "quorum"', "check_set(answers)")}


@pytest.mark.parametrize("name, case", [(name, case) for name in HOOKS for case in ODD if (
    name, case) != ("check_set", "nothing")])  # There None means that none is right yet.
def test_a_hook_that_misbehaves_costs_its_own_workunit_and_no_host(name, case, open_grid, folder):
    """Told once; nobody is called wrong; once the file is mended, all goes on."""
    constants, signature = HOOKS[name]
    constants += f"\n\n\ndef {signature}:\n    "
    grid = open_grid(PLAIN.format(constants=constants + ODD[case]), hook_seconds=0.05)
    right = {"check_set": "0"}.get(name, "True")
    add("a", 5, NOW)
    do(grid, Client("ann"), "5")
    if name == "same":
        do(grid, Client("bob"), "5")
    passes(grid)
    assert all(r.validate_state in (V.INIT, V.INCONCLUSIVE, V.VALID) for r in copies())
    assert not module("trust.blacklist").BlackEntry.select().exists()
    assert len(grid.errors) <= 1
    (folder / "a.py").write_text(PLAIN.format(constants=constants + f"return {right}"))
    make.restart(folder, stock=0, min_sendwork_interval=0)
    m.project.clock = grid.clock
    passes(m.project)
    assert {r.validate_state for r in copies()} == {V.VALID} and m.project.errors == []


# ---- Hostile numbers --------------------------------------------------------------------------


def test_try_measures_run_times(tmp_path, monkeypatch, capsys):
    """[S2-04] credit_by = "runtime" would show nothing else than 0."""
    path = tmp_path / "a.py"
    path.write_text(PLAIN.format(constants='credit_by = "runtime"').replace(
        "    return input\n", "    return sum(range(10**6)) * 0 + input\n"))
    monkeypatch.chdir(tmp_path)
    seen = []
    plugin = module("credit")
    monkeypatch.setattr(plugin, "settle_claims", lambda claims, estimate: (
        seen.extend(claims), (1.0, ""))[1])
    parser = m.argparse.ArgumentParser()
    module("commands").commands(parser.add_subparsers())
    options = parser.parse_args(["try", str(path)])
    assert not options.run(options)
    assert "All steps work" in capsys.readouterr().out and len(seen) == 1 and seen[0] > 0


NUMBERS = [1e18, -1e18, 4e18, -1, 0, 1e-300, True, "1", [], None, 1e300, float("nan"), float("inf")]


@pytest.mark.parametrize("credit_by", ["workunit", "runtime"])
def test_no_number_in_a_report_makes_odd_credit_or_an_exception(open_grid, credit_by):
    """[S3-09 S3-13] Run times, speeds and sizes from the wire: refused, or bounded."""
    grid = open_grid(PLAIN.format(
        constants=f'dispatch = "xcom3"\ncredit_by = "{credit_by}"'), daily_result_quota=10**6)
    (parse,), clients = m.plugged("parse_request"), [Client("liz"), Client("ann")]
    taken = 0
    for number, value in enumerate(NUMBERS):
        add("a", number, grid.clock, target_nresults=2)
        for client in clients:
            (name,) = client.fetch(grid.clock)
            output(name).write_text("1")
            odd = client is clients[0]
            sent = dict(authenticator=client.key, hostid=client.hostid, rpc_seqno=client.seqno,
                        host_cpid=client.cpid, reports=[dict(
                            name=name, client_state=5, exit_status=0,
                            elapsed_time=value if odd else 1, cpu_time=value if odd else 1)],
                        host=dict(p_fpops=value, p_ncpus=value) if odd else {})
            try:
                request = parse(sent)
            except m.ClientError:
                sent["reports"][0].update(elapsed_time=1, cpu_time=1)
                request = parse({**sent, "host": {}})
            else:
                taken += odd
            m.project.write(lambda: m.schedule(request, grid.clock + 5))
            client.seqno += 1
        passes(grid, 7)
    assert 5 < taken < len(NUMBERS) and grid.errors == []
    assert all(0 <= r.granted_credit <= 1e6 and 0 <= r.elapsed_time <= 5 for r in copies())
    pace = module("sampling").Pace
    assert all(0 <= p.seconds_per_unit <= 5 and 0 < p.seconds_per_byte <= 6 for p in pace.select())


def test_one_host_does_not_poison_what_others_are_awaited_for(open_grid):
    """[S3-13] A new host starts with the median: one among three is not it, whatever it says."""
    open_grid(PLAIN.format(constants='dispatch = "xcom3"'))
    for n, elapsed in enumerate((100, 110, 90000)):
        add("a", n, NOW)
        client = Client(f"host {n}")
        (name,) = client.fetch(NOW)
        output(name).write_text("1")
        client.ask(NOW + elapsed + 1, reports=[m.Report(name, 5, 0, elapsed_time=elapsed)])
    assert module("sampling").typical_of(m.apps["a"].id, anew=True).seconds_per_unit == 110


# ---- All at once --------------------------------------------------------------------------------

SEED, STORMS = (int(os.environ.get(f"MINIGRID_{name}", n)) for name, n in (
    ("SEED", "1"), ("STORMS", "2")))
N = 6  # workunits of each application
NAMES = ("a", "b", "c")
LARGE = """
delay_bound = 20000
max_total_results, max_success_results, max_error_results = 40, 12, 8
{constants}

def workunit(i):
    return {{"input": i}} if i < 6 else None


def compute(input):
    return 2 * input
"""
WAYS = {
    "none": "", "quorum": "", "adaptive": "", "recheck": "recheck = 1.5",
    "check": "\n\ndef check(input, output):\n    return output == 2 * input\n",
    "inverse": TWICE[TWICE.index("\ndef invert"):]}
GIVEN_OUT = ("", 'dispatch = "xcom1"', 'dispatch = "xcom2"\nwindow, in_order = 4, True',
             'dispatch = "xcom3"\nwindow = 3', "in_order = True")
OFTEN = dict(fetch=20, lost=6, right=16, wrong=6, error=2, twin=2, forge=2, vanish=2, reattach=1,
             second=22, day=2, cancel=1, ban=1, pardon=1, policy=2, crash=5)


class Crash(BaseException):
    """The process ends here, whatever it was about to do."""


class Storm:
    """A project in which anything may happen at any time; then honest hosts come."""

    def __init__(self, folder, seed):
        self.folder, self.rng, self.now = folder, random.Random(seed), NOW
        self.settings = dict(stock=10, min_sendwork_interval=0, daily_result_quota=10**6,
                             purge_delay=self.rng.choice([0, 100, make.DAY]))
        self.clients, self.held = [], collections.defaultdict(list)

    def text(self):
        policy = self.rng.choice(list(WAYS))
        budget = "recheck = 1.5" if self.rng.random() < 0.5 else "wrong_answers_at_most = 0.01"
        given = f'validation = "{policy}"\n{self.rng.choice(GIVEN_OUT)}\n' + \
            WAYS[policy].replace("recheck = 1.5", budget)
        return LARGE.format(constants=given)

    def restart(self):
        assert m.project.counts["stage errors"] == 0, m.project.errors
        assert [text for _, text in m.project.errors if "no application here" not in text] == []
        make.restart(self.folder, **self.settings)
        m.project.rng = random.Random(self.rng.random())

    def answer(self, name, lie=0):
        r = m.Result.get_or_none(name=name)
        if r is None or m.plugged("unwanted")[-1](r):
            return None
        value = 0  # It is late, and nobody's.
        with contextlib.suppress(FileNotFoundError):
            value = json.loads(make.kept("download", r.workunit.input_files[0]["name"]))
        return str((value // 2 if r.workunit.number is None else 2 * value) + lie)

    def report(self, client, name, lie=0, error=False):
        answer = None if error else self.answer(name, lie)
        return name in client.report(name, answer, self.now).acks

    def step(self, what):
        client = self.rng.choice(self.clients)
        mine = self.held[client.cpid]
        if what in ("fetch", "lost"):
            more = dict(other_results=list(mine)) if what == "lost" else {}
            mine += set(client.fetch(self.now, cpu_req_instances=1, **more)) - set(mine)
        elif what in ("right", "wrong", "error", "twin") and mine:
            name = mine[self.rng.randrange(len(mine))]
            if what == "twin":
                client = next((c for c in self.clients if c.key == client.key), client)
            if self.report(client, name, self.rng.randrange(1, 3) * (what == "wrong"),
                           what == "error"):
                mine.remove(name)
        elif what == "forge" and copies():
            client.ask(self.now, reports=[m.Report(self.rng.choice(copies()).name, 5, 0)])
        elif what in ("vanish", "reattach"):
            mine.clear()
            client.hostid *= what == "vanish"
        elif what in ("second", "day"):
            self.now += self.rng.choice([1, 1, 10, 61, 5000]) if what == "second" else make.DAY
            m.run_pass(self.now)
        elif what == "cancel" and units():
            cancel([self.rng.choice(units()).id], self.now)
        elif what in ("ban", "pardon") and client.hostid:
            self.change_list(what, client)
        elif what == "policy":
            path = self.folder / f"{self.rng.choice(NAMES)}.py"
            path.write_text(self.text()) if not path.exists() or self.rng.random() < 0.5 else \
                path.unlink()
            self.restart()
        elif what == "crash":
            self.crash()

    def change_list(self, what, client):
        black, host = module("trust.blacklist"), client.host()
        m.project.write(lambda: black.pardon(host.id, "x", self.now))
        if what == "ban":
            m.project.write(lambda: black.enter(
                host, None, self.rng.choice([1, 2]), "operator", "x", {}, self.now,
                self.now + 5000, wanted=self.rng.choice([0, 1])))

    def crash(self):
        """Die at some statement of whatever comes next, and start again."""
        execute, left = m.db.execute_sql, self.rng.randrange(1, 60)

        def dying(*args, **more):
            nonlocal left
            left -= 1
            if not left:
                raise Crash
            return execute(*args, **more)

        m.db.execute_sql = dying
        try:
            self.step(self.rng.choice(["fetch", "right", "wrong", "second", "ban", "cancel"]))
        except Crash:
            pass
        finally:
            m.db.execute_sql, m.project.write.working = execute, None
        self.restart()

    def end(self):
        """Serve all again to honest hosts until nothing is left in the store."""
        for name in NAMES:
            if not (self.folder / f"{name}.py").exists():
                (self.folder / f"{name}.py").write_text(self.text())
        self.restart()
        make.settings(purge_delay=0)
        honest = [Client(f"honest {n}") for n in range(12)]
        for _ in range(400):
            self.now += self.rng.choice([60, 600, 20001])
            m.run_pass(self.now)
            for client in honest:
                for name in client.fetch(self.now, cpu_req_instances=1):
                    self.report(client, name)
            if not units() and all(len(told(name)) == N for name in NAMES):
                break
        for seconds in range(3):
            m.run_pass(self.now + make.DAY + seconds)


def told(name):
    """The numbers whose answers or failures an application was told of, in order."""
    path = m.project.data / "results" / f"{name}.jsonl"
    return [json.loads(line)["number"] for line in path.read_text().splitlines()] \
        if path.exists() else []


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm_leaves_nothing_behind(folder, monkeypatch, seed):
    """[S4-29..S4-31 C38] Each number is told once, credit is given once, no row is left over."""
    monkeypatch.setattr(m.os, "fsync", lambda file: None)
    monkeypatch.setattr(module("trust.blacklist"), "settings", module("trust.blacklist").Settings())
    storm = Storm(folder, seed)
    with make.project(folder, {name: storm.text() for name in NAMES}, **storm.settings) as project:
        assert project.errors == []
        storm.clients += [Client(f"user {n % 6}") for n in range(8)]
        for _ in range(250):
            storm.step(storm.rng.choices(list(OFTEN), list(OFTEN.values()))[0])
        storm.end()
        assert {name: sorted(told(name)) for name in NAMES} == dict.fromkeys(NAMES, list(range(N)))
        assert [unit.name for unit in units()] == [] and m.plugged("violations")[0]() == []
        for plugin, table in (("sampling", "Handout"), ("budget", "Waiting"),
                              ("inverse", "InverseCheck"), ("trust.spots", "Kept")):
            assert list(getattr(module(plugin), table).select().tuples()) == [], table
        assert m.project.counts["stage errors"] == 0 and m.project.errors == []
        archived = [json.loads(line) for path in (m.project.data / "archive").glob("*.gz")
                    for line in gzip.open(path, "rt")]
        names = [unit["name"] for unit in archived]
        assert len(names) == len(set(names))
        granted = sum(r["granted_credit"] for unit in archived for r in unit["results"])
        assert granted > 0
        assert granted == pytest.approx(sum(host.total_credit for host in m.Host.select()))
