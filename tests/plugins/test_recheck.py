"""The re-check coefficient, and BOINC's adaptive replication [S3-35..S3-43]."""

import math
import random
import sys
from collections import Counter
from types import SimpleNamespace

import make
import pytest
from make import NOW, Client, add, copies, do, passes, result, states, units

import minigrid as m

V, O, S = m.ValidateState, m.Outcome, m.ServerState
OFF = '\n\nblack_list, spot_checks = "off", 0\n'  # No copies are kept for spot checks.
AGAIN = make.NEAR + OFF + 'validation = "recheck"\nrecheck = 1.3\n'
PROVEN = make.NEAR + OFF + 'validation = "adaptive"\n'
SINGLE = make.NEAR + '\n\nmin_quorum = 1\n'


@pytest.fixture
def grid(folder, no_fsync):
    with make.clocked(folder, {"again": AGAIN, "proven": PROVEN, "single": SINGLE}) as project:
        yield project


def recheck():
    return sys.modules["minigrid_plugin_recheck"]


# ---- Way 4: recomputation ----------------------------------------------------------


@pytest.mark.parametrize("r", [1, 1.3, 2, 2.5, 3.7])
def test_mean_number_of_copies(r):
    """S3-35 S3-36 S3-40 S3-41: r in every case; S3-42: from a seeded generator."""
    n, rng = 100_000, random.Random(7)
    drawn = [recheck().copies(r, rng) for _ in range(n)]
    assert set(drawn) <= {math.floor(r), math.ceil(r)}
    part = r - math.floor(r)
    assert abs(sum(drawn) / n - r) <= 3 * math.sqrt(part * (1 - part) / n)
    rng = random.Random(7)
    assert [recheck().copies(r, rng) for _ in range(100)] == drawn[:100]


CHANCES = {  # S3-40, S3-41: r, what the generator gives -> copies
    (1.3, 0.29): 2, (1.3, 0.31): 1, (2.5, 0.49): 3, (2.5, 0.51): 2, (1, 0.0): 1, (3, 0.0): 3,
    (3.7, 0.69): 4, (3.7, 0.71): 3}


@pytest.mark.parametrize("case", CHANCES)
def test_draw(case):
    r, given = case

    class Rng:
        def random(self):
            return given

    assert recheck().copies(r, Rng()) == CHANCES[case]


def test_copies_are_drawn_once_at_creation(grid):
    """S3-42: for each workunit of the application, from the project's generator, never again."""
    same = random.Random()
    same.setstate(grid.rng.getstate())
    numbers = [add("again", n).target_nresults for n in range(300)]
    assert numbers == [recheck().copies(1.3, same) for _ in range(300)]
    assert abs(sum(numbers) / 300 - 1.3) < 3 * math.sqrt(0.3 * 0.7 / 300)
    assert [unit.min_quorum for unit in units()] == numbers
    assert len(copies()) == sum(numbers)
    passes(grid)
    assert [unit.target_nresults for unit in units()] == numbers


@pytest.mark.parametrize("r, number", [("1", 1), ("1.0", 1), ("20", 20)])
def test_whole_coefficients(r, number, folder):
    """S3-36 S3-42: so many copies for each; one means that nothing is checked."""
    text = AGAIN.replace("1.3", r) + "max_success_results = max_total_results = 20\n"
    with make.project(folder, {"whole": text}) as project:
        assert not project.errors
        assert {add("whole", n).target_nresults for n in range(20)} == {number}


def drawing(monkeypatch, n):
    monkeypatch.setattr(recheck(), "copies", lambda r, rng: n)


def test_one_copy_is_way_1(grid, monkeypatch):
    """S3-42: r = 1 takes the answer as it is."""
    drawing(monkeypatch, 1)
    add("again", 1)
    name = do(grid, Client("ann"), "99")
    assert result(name).validate_state == V.VALID and units()[0].canonical_resultid == 1


VOTES = {  # copies drawn, answers one after the other -> who is valid; None: not decided
    "S3-37 all agree": (3, ["5", "5", "5"], "vvv"),
    "S3-37 voting decides": (3, ["5", "9", "5"], "viv"),
    "S3-38 a tie of two": (2, ["5", "9"], None),
    "S3-38 a tie is ended by an additional check": (2, ["5", "9", "9"], "ivv"),
    "S3-38 a tie of three": (3, ["1", "5", "9"], None),
    "S3-38 a third opinion of three, and one more": (2, ["1", "5", "9", "5"], "iviv"),
    "S3-38 a tie of four": (4, ["5", "5", "9", "9"], None),
    "S3-38 and its end": (4, ["5", "5", "9", "9", "9"], "iivvv"),
}


@pytest.mark.parametrize("case", VOTES)
def test_vote(case, grid, monkeypatch):
    n, outputs, wanted = VOTES[case]
    drawing(monkeypatch, n)
    add("again", 1)
    for k, answer in enumerate(outputs):
        do(grid, Client(f"host {k}"), answer)
    found = "".join({V.VALID: "v", V.INVALID: "i"}.get(r.validate_state, "?") for r in copies())
    if wanted:
        assert found == wanted
    else:  # One more at a time [S3-43].
        assert found == "?" * (len(outputs) + 1) and copies()[-1].server_state == S.UNSENT


def test_a_tie_has_an_end(grid, monkeypatch):
    """S3-43: beyond max_success_results the packet is an error."""
    drawing(monkeypatch, 2)
    add("again", 1, max_success_results=3)
    for k, answer in enumerate("147"):
        do(grid, Client(f"host {k}"), answer)
    assert units()[0].error_mask == m.ErrorMask.TOO_MANY_SUCCESS_RESULTS
    assert len(copies()) == 3


BAD = {
    "S3-42 below one": (AGAIN.replace("1.3", "0.99"), "recheck: must be a number from 1 to"),
    "nothing": (AGAIN.replace("1.3", "0"), "recheck: must be a number"),
    "too many": (AGAIN.replace("1.3", "21"), "from 1 to 20"),
    "not a number": (AGAIN.replace("1.3", "float('nan')"), "recheck: must be a number"),
    "infinite": (AGAIN.replace("1.3", "float('inf')"), "recheck: must be a number"),
    "a text": (AGAIN.replace("1.3", "'2'"), "found '2'"),
    "yes": (AGAIN.replace("1.3", "True"), "recheck: must be a number"),
    "left out": (AGAIN.replace("recheck = 1.3", ""), "such as recheck = 1.3"),
    "another policy": (make.NEAR + "\n\nrecheck = 2\n", "validation = 'recheck'"),
    "a quorum": (AGAIN + "min_quorum = 2\n", "min_quorum must be left out"),
    "a target": (AGAIN + "target_nresults = 2\n", "target_nresults must be left out"),
    "bounds that the larger number breaks": (AGAIN + "max_total_results = 1\n"
                                             "max_success_results = 1\n", "must not be above"),
    "adaptive, and never compared": (PROVEN + "min_quorum = 1\n", "min_quorum must be at least 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_applications_that_are_refused(case, folder):
    text, words = BAD[case]
    with make.project(folder, {"bad": text}) as project:
        assert [words in error for _, error in project.errors] == [True], project.errors


def test_workunits_that_are_refused(grid):
    with pytest.raises(m.PluginError, match="target_nresults must be left out"):
        add("again", 1, target_nresults=2)
    with pytest.raises(m.PluginError, match="min_quorum must stand in the file"):
        add("proven", 1, min_quorum=3)
    grid.rng = random.Random(7)
    for number in range(20):  # Whatever is drawn: a batch must not fail at its hundredth workunit.
        with pytest.raises(m.PluginError, match="must not be above max_success_results"):
            add("again", number, max_success_results=1)


def test_the_draw_is_explained(grid, monkeypatch):
    drawing(monkeypatch, 2)
    said = []
    generator = sys.modules["minigrid_plugin_generator"]
    monkeypatch.setattr(generator, "explain", lambda row, text: said.append((row.name, text)))
    add("again", 1)
    assert said == [("again_1", "drawn: 2 copies, 1.3 on average")]


GROUPS = {  # quorum, canonical, answers -> groups of those who agree, unchecked
    "all agree": (2, 0, ["5", "6"], [{1, 2}], set()),
    "one lost": (3, 0, ["5", "9", "5"], [{1, 3}, {2}], set()),
    "undecided": (2, 0, ["5", "9"], [{1}, {2}], set()),
    "alone": (1, 0, ["5"], [{1}], {1}),
    "one was wanted, two agree": (1, 0, ["5", "5"], [{1, 2}], set()),
    "alone, and contradicted": (1, 0, ["5", "9"], [{1}, {2}], {1}),
    "near each other in a row": (2, 0, ["1", "2", "3"], [{1, 2}, {1, 2, 3}, {2, 3}], set()),
    "one cannot be read": (2, 0, ["5", "{", "5"], [{1, 3}], set()),
    "below the quorum": (2, 0, ["5"], [], set()),
    "late ones": (2, 1, ["5", "6", "9", "9"], [{1, 2}, {3}, {4}], set()),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_verdict_says_who_agrees_with_whom(case, grid):
    """S3-39: so that it can be told who has lost against whom."""
    quorum, canonical, outputs, groups, unchecked = GROUPS[case]
    unit = make.wu(min_quorum=quorum, canonical_resultid=canonical)
    results = make.numbered(unit, [make.success() for _ in outputs])
    for r, text in zip(results, outputs):
        make.output(r.name).write_text(text)
    if canonical:
        results[0] = make.numbered(unit, [make.success(V.VALID)])[0]
    application = m.apps["again"]
    verdict = application.judge(unit, results, application)
    assert (verdict.groups, verdict.unchecked) == (groups, unchecked)


# ---- Adaptive replication -------------------------------------------------------------


def prove(client, run, app="proven"):
    """Let a host have a run of compared right answers."""
    client.ask()
    version = m.AppVersion.get(app=m.App.get(name=app))
    recheck().Proof.replace(host=client.hostid, app_version=version, run=run).execute()


def run_of(client):
    return {row.host_id: row.run for row in recheck().Proof.select()}.get(client.hostid, 0)


def lot(monkeypatch, value):
    """Let the generator draw a number."""
    monkeypatch.setattr(m.project.rng, "random", lambda: value)


def test_a_workunit_begins_with_one_copy_and_a_new_host_is_compared(grid):
    unit = add("proven", 1)
    assert (unit.min_quorum, unit.target_nresults, len(copies())) == (1, 1, 1)
    ann, bob = Client("ann"), Client("bob")
    (first,) = ann.fetch(grid.clock)
    assert (units()[0].min_quorum, units()[0].target_nresults) == (2, 2)
    passes(grid)
    assert len(copies()) == 2
    ann.report(first, "5", grid.clock)
    passes(grid)
    assert result(first).validate_state == V.INIT  # It waits to be compared.
    do(grid, bob, "5")
    assert states(copies(), "validate_state") == [V.VALID, V.VALID]
    assert (run_of(ann), run_of(bob)) == (1, 1)


def test_a_proven_host_is_believed(grid, monkeypatch):
    ann = Client("ann")
    prove(ann, 10)
    lot(monkeypatch, 0.1)
    add("proven", 1)
    name = do(grid, ann, "5")
    assert len(copies()) == 1 and result(name).validate_state == V.VALID
    assert units()[0].assimilate_state == m.AssimilateState.DONE
    assert m.HostAppVersion.get().consecutive_valid == 1
    assert run_of(ann) == 10  # What nobody compared proves nothing.


SENT = {  # run of right answers, what is drawn -> copies that are wanted
    "new": (0, 0.999, 2), "almost proven": (9, 0.999, 2), "proven": (10, 0.1, 1),
    "proven, drawn": (10, 0.0999, 2), "for long": (50, 0.02, 1), "for long, drawn": (50, 0.0199, 2),
    "for years": (10_000, 0.01, 1), "for years, drawn": (10_000, 0.0099, 2),
}


@pytest.mark.parametrize("case", SENT)
def test_proven_hosts_are_still_checked_at_random(case, grid, monkeypatch):
    """BOINC's chance, 1 in the number of right answers in a row."""
    run, drawn, wanted = SENT[case]
    ann = Client("ann")
    prove(ann, run)
    add("proven", 1)
    lot(monkeypatch, drawn)
    ann.fetch(grid.clock)
    passes(grid, 1)
    assert (units()[0].target_nresults, units()[0].min_quorum, len(copies())) == (wanted,) * 3


def test_how_many_others_mean_is_the_applications(grid, folder, monkeypatch):
    (folder / "proven.py").write_text(PROVEN + "min_quorum = 3\ntarget_nresults = 4\n")
    make.restart(folder, stock=0, min_sendwork_interval=0)
    add("proven", 1)
    assert len(copies()) == 1
    Client("ann").fetch(grid.clock)
    assert (units()[0].min_quorum, units()[0].target_nresults) == (3, 4)


@pytest.mark.parametrize("answer", ["99", None, "{"])
def test_a_wrong_answer_or_an_error_ends_the_run(answer, grid, monkeypatch):
    ann = Client("ann")
    prove(ann, 50)
    lot(monkeypatch, 0)  # It is drawn for a check.
    add("proven", 1)
    do(grid, ann, answer)
    for name in ("bob", "cyd"):
        do(grid, Client(name), "5")
    assert run_of(ann) == 0


@pytest.mark.parametrize("status, left", [(1, 0), (202, 50)])
def test_what_we_have_ended_ourselves_is_no_error_of_the_host(status, left, grid):
    """A cancelled workunit must not cost hosts the proof of weeks."""
    ann = Client("ann")
    prove(ann, 50)
    add("proven", 1)
    (name,) = ann.fetch(grid.clock)
    m.project.write(lambda: m.plugged("cancel_workunits")[0]([1], grid.clock))
    assert ann.ask(grid.clock, other_results=[name]).aborts == [name]
    ann.ask(grid.clock + 1, reports=[m.Report(name, client_state=6, exit_status=status)])
    assert run_of(ann) == left


def overdue(grid, monkeypatch, *hosts):
    """Prove hosts; let the first keep a copy beyond its deadline, and return the copy's name."""
    for host in hosts:
        prove(host, 50)
    lot(monkeypatch, 0.5)
    add("proven", 1)
    (late,) = hosts[0].fetch(grid.clock)
    grid.clock += 86400
    passes(grid)
    return late


def test_neither_a_vanished_nor_an_uncompared_answer_changes_the_run(grid, monkeypatch):
    ann, bob = Client("ann"), Client("bob")
    overdue(grid, monkeypatch, ann, bob)
    do(grid, bob, "5")
    assert (run_of(ann), run_of(bob)) == (50, 50)


def test_another_application_proves_nothing(grid):
    ann = Client("ann")
    add("single", 1)
    do(grid, ann, "5")
    assert run_of(ann) == 0


def test_a_late_first_copy_and_a_single_answer(grid, monkeypatch):
    """Both of proven hosts: the first answer settles, the late one is compared with it."""
    ann, bob = Client("ann"), Client("bob")
    late = overdue(grid, monkeypatch, ann, bob)
    (repeat,) = bob.fetch(grid.clock)
    ann.report(late, "5", grid.clock)
    passes(grid, 2)
    assert result(late).validate_state == V.VALID
    bob.report(repeat, "6", grid.clock)
    passes(grid, 1)
    assert result(repeat).validate_state == V.VALID
    assert (run_of(ann), run_of(bob)) == (50, 51)


def test_a_copy_sent_to_a_new_host_while_the_first_is_judged(grid, monkeypatch):
    """The verdict that was under way stands; the copy that was sent is compared with it."""
    ann, bob = Client("ann"), Client("bob")
    late = overdue(grid, monkeypatch, ann)
    ann.report(late, "5", grid.clock)
    judge, sent = m.apps["proven"].judge, []

    def and_meanwhile(*args):
        verdict = judge(*args)
        sent.extend(bob.fetch(grid.clock))
        return verdict

    monkeypatch.setattr(m.apps["proven"], "judge", and_meanwhile)
    passes(grid, 1)
    monkeypatch.setattr(m.apps["proven"], "judge", judge)
    passes(grid)
    assert result(late).validate_state == V.VALID and len(sent) == 1 and len(copies()) == 2
    bob.report(*sent, "5", grid.clock)
    passes(grid)
    assert result(*sent).validate_state == V.VALID and run_of(bob) == 1


def test_a_copy_sent_to_a_new_host_before_the_first_is_judged(grid, monkeypatch):
    ann, bob, cyd = Client("ann"), Client("bob"), Client("cyd")
    late = overdue(grid, monkeypatch, ann)
    ann.report(late, "9", grid.clock)
    m.run_pass(grid.clock + 1, [m.transitioner])
    bob.report(*bob.fetch(grid.clock), "5", grid.clock)
    passes(grid)
    if len(copies()) == 2:
        assert units()[0].canonical_resultid == 0
    do(grid, cyd, "5")
    assert states(copies(), "validate_state") == [V.INVALID, V.VALID, V.VALID]
    assert run_of(ann) == 0


def test_a_settled_workunit_is_not_changed_by_who_gets_a_copy(grid):
    """Such as a spot check of a policy."""
    unit = m.Workunit(min_quorum=1, target_nresults=1, canonical_resultid=5, number=1)
    offer = SimpleNamespace(application=m.apps["proven"], version=m.AppVersion(id=1))
    recheck().at_send(m.Result(), unit, m.Host(id=9), offer, NOW)
    assert (unit.min_quorum, unit.target_nresults) == (1, 1)


def test_liars_prove_nothing_and_honest_hosts_are_spared(grid):
    """Twelve hosts, two of which lie one by one: nobody wrong is believed, and copies are saved."""
    hosts = [Client(f"host {n}") for n in range(12)]
    rng, made = random.Random(3), 0
    for round_ in range(40):
        for client in hosts:
            if not copies(server_state=S.UNSENT):
                add("proven", made := made + 1, grid.clock)
            for name in client.fetch(grid.clock):
                right = str(10 * result(name).workunit.number)
                wrong = str(10**6 + rng.randrange(10**6))
                client.report(name, wrong if client in hosts[:2] else right, grid.clock)
            passes(grid, 1)
    decided = [unit for unit in units() if unit.canonical_resultid]
    for unit in decided:
        r = m.Result.get_by_id(unit.canonical_resultid)
        assert r.host_id not in (hosts[0].hostid, hosts[1].hostid)
    assert [run_of(client) for client in hosts[:2]] == [0, 0]
    made = Counter(r.workunit_id for r in copies())
    single = sum(made[unit.id] == 1 for unit in decided)
    assert single > len(decided) / 3
