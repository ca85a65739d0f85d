"""The real BOINC client, unmodified, against a real server, in a network of its own."""

import os
import signal

import pytest
import world

APPS = world.ROOT / "plugins" / "apps"
PAIR = '''"""pair: doubles a number; two must agree."""

rsc_fpops_est = 3e6
max_error_results = 2
max_total_results = 8


def workunit(i):
    return {"input": i} if i < 4 else None


def compute(input):
    return 2 * input
'''
ALONE = PAIR.replace("pair:", "alone:").replace("rsc_fpops_est", "min_quorum = 1\nrsc_fpops_est")
BROKEN = ALONE.replace("return 2 * input", 'raise ValueError("the sky is green")')
SLOW = '''"""slow: takes its time, and goes on where it was."""

import time

min_quorum = 1
rsc_fpops_est = 3e6


def workunit(i):
    return {"input": i} if i < 1 else None


def compute(input, progress, checkpoint):
    done = checkpoint.state or 0
    begun = done
    while done < 150:
        time.sleep(0.1)
        done += 1
        checkpoint(done)
        progress(done / 150)
    return {"number": input, "begun": begun > 0}
'''
LATE = '''"""late: is due at once."""

import time

min_quorum = 1
delay_bound = 25
rsc_fpops_est = 3e6


def workunit(i):
    return {"input": i} if i < 1 else None


def compute(input):
    time.sleep(15)
    return input
'''
LIAR = """#!/bin/sh
# Stands where Python is looked for: lets the job run, then spoils what it has found out.
{python} "$@" || exit $?
[ -f out ] && printf '666' > out
exit 0
"""

pytestmark = world.MARKS


@pytest.fixture
def closed(tmp_path):
    """A world with nothing in it yet."""
    with world.World(tmp_path) as found:
        yield found


def write(folder, **apps):
    """Write application files; return their paths."""
    paths = []
    for name, text in apps.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text)
    return paths


def test_every_shipped_application_runs_and_is_voted_on_together_with_volunteers(closed):
    closed.serve(APPS, settings="[minigrid]\nstock = 4\n")
    client = closed.client("anna", ncpus=3)
    volunteer = closed.volunteer("ben", "--cpus", "2")
    names = sorted([p.stem for p in APPS.glob("[!_]*.py")]
                   + [p.parent.name for p in APPS.glob("*/versions")])
    both = """SELECT DISTINCT a.name FROM app a JOIN workunit w ON w.app_id = a.id
        JOIN result r ON r.workunit_id = w.id AND r.validate_state = 1
        JOIN host h ON h.id = r.host_id AND h.client_version LIKE '7.%'
        JOIN result s ON s.workunit_id = w.id AND s.validate_state = 1
        JOIN host g ON g.id = s.host_id AND g.client_version LIKE 'minigrid%' ORDER BY 1"""
    closed.hurry(f"SELECT count(*) = {len(names)} FROM ({both})", seconds=240)
    assert closed.rows(both) == names
    assert len(names) == 5
    wrong = closed.rows("SELECT name, stderr_out FROM result WHERE outcome IN (3, 6) "
                        "OR validate_state = 2")
    assert wrong == []
    (credit,) = closed.rows("SELECT total_credit FROM host WHERE client_version LIKE '7.%'")
    assert credit > 0
    client.project("update")
    world.until(lambda: shown_credit(client) > 0, 30, "the client shows its credit")
    assert "[unparsed_xml]" not in client.messages()  # It understood every element.
    client.stop()
    os.killpg(volunteer.pid, signal.SIGINT)
    volunteer.wait(30)
    closed.stop()
    status, text = closed.minigrid("check", "--data", closed.folder / "data")
    assert status == 0, text


def shown_credit(client):
    """Return the credit of this computer as its BOINC Manager would show it."""
    text = client.command("--get_project_status")[1]
    return float(text.partition("host_total_credit: ")[2].split("\n")[0] or 0)


def test_a_client_that_returns_wrong_answers_gets_nothing_and_the_others_do(closed, tmp_path):
    closed.serve(*write(tmp_path, pair=PAIR))
    fake = tmp_path / "fake"
    fake.mkdir()
    for name in ("python3", "python"):
        (fake / name).write_text(LIAR.format(python=world.sys.executable))
        (fake / name).chmod(0o755)
    for name, path in (("liar", str(fake)), ("anna", ""), ("ben", "")):
        closed.client(name, path=path, ncpus=2)
    closed.hurry("SELECT count(*) = 4 FROM workunit WHERE canonical_resultid > 0", seconds=200)
    verdicts = dict(closed.rows("SELECT u.name, group_concat(DISTINCT r.validate_state) FROM "
                                "result r JOIN user u ON u.id = r.user_id WHERE r.outcome = 1 "
                                "AND r.validate_state > 0 GROUP BY 1"))
    assert verdicts["liar"] == "2" and {verdicts["anna"], verdicts["ben"]} == {"1"}
    credit = dict(closed.rows("SELECT name, total_credit FROM user"))
    assert credit["liar"] == 0 and credit["anna"] > 0 and credit["ben"] > 0


def test_a_job_that_fails_tells_why_and_the_workunit_ends(closed, tmp_path):
    closed.serve(*write(tmp_path, broken=BROKEN))
    closed.client("anna")
    closed.wait("SELECT count(*) FROM result WHERE outcome = 3")
    (status, state, text), *_ = closed.rows(
        "SELECT exit_status, client_state, stderr_out FROM result WHERE outcome = 3")
    assert (status, state) == (195, 3)
    assert 'line 14, in compute\n' in text and "ValueError: the sky is green" in text


def test_progress_checkpoint_suspension_and_a_server_killed_in_between(closed, tmp_path):
    closed.serve(*write(tmp_path, slow=SLOW))
    client = closed.client("anna", ncpus=1, days=0.0001)
    world.until(lambda: fraction(client) > 0.05, 60, "progress is shown", closed.tell)
    name = client.tasks().partition("name: ")[2].split("\n")[0]
    client.command("--task", world.URL, name, "suspend")
    world.until(lambda: "suspended via GUI: yes" in client.tasks()
                and "EXECUTING" not in client.tasks(), 20, "the task stands still", client.tasks)
    closed.stop(signal.SIGKILL)
    client.stop()  # With a checkpoint in its directory.
    client.start()
    client.command("--task", world.URL, name, "resume")
    world.until(lambda: "uploading" in client.tasks() or "uploaded" in client.tasks(), 60,
                "the task is done while the server is away", closed.tell)
    closed.serve()
    client.command("--network_available")
    client.project("update")
    closed.wait("SELECT count(*) FROM workunit WHERE canonical_resultid > 0")
    kept = (tmp_path / "data" / "results" / "slow.jsonl")
    world.until(kept.exists, 20, "the answer is kept")
    assert '"begun":true' in kept.read_text().splitlines()[0]
    cpu, elapsed = closed.rows("SELECT cpu_time, elapsed_time FROM result WHERE outcome = 1")[0]
    assert cpu > 0 and elapsed > 5


def fraction(client):
    """Return how far the task is that has come farthest."""
    text = client.tasks()
    return max([float(line.split(":")[1]) for line in text.splitlines()
                if "fraction done" in line] or [0])


def test_a_cancelled_job_is_stopped_on_the_client(closed, tmp_path):
    closed.serve(*write(tmp_path, slow=SLOW.replace("< 150", "< 3000")))
    client = closed.client("anna", ncpus=1, days=0.0001)
    world.until(lambda: fraction(client) > 0.001, 60, "it runs", closed.tell)
    (unit,) = closed.rows("SELECT w.name FROM workunit w JOIN result r ON r.workunit_id = w.id "
                          "WHERE r.server_state = 4 LIMIT 1")
    status, text = closed.minigrid("cancel", unit, "--data", closed.folder / "data")
    assert status == 0, text
    closed.hurry("SELECT count(*) = 0 FROM result r JOIN workunit w ON w.id = r.workunit_id "
                 "WHERE w.name = ? AND r.server_state = 4", unit)
    (status,) = closed.rows("SELECT r.exit_status FROM result r JOIN workunit w "
                            "ON w.id = r.workunit_id WHERE w.name = ? AND r.host_id > 0", unit)
    assert status == 202


def test_a_client_that_vanishes_is_replaced_and_one_that_comes_back_is_known(closed, tmp_path):
    closed.serve(*write(tmp_path, late=LATE))
    anna = closed.client("anna")
    closed.wait("SELECT count(*) FROM result WHERE server_state = 4")
    os.killpg(anna.process.pid, signal.SIGKILL)
    anna.process.wait()
    ben = closed.client("ben")
    closed.wait("SELECT count(*) FROM result WHERE outcome = 4", seconds=60)
    closed.clients.remove(anna)
    closed.hurry("SELECT count(*) FROM workunit WHERE canonical_resultid > 0")
    before = closed.rows("SELECT id FROM host ORDER BY id")
    ben.project("detach")
    world.until(lambda: "name: late" not in ben.tasks(), 20, "it has left")
    ben.attach()
    closed.hurry("SELECT rpc_seqno < 3 FROM host WHERE id = ?", before[-1])
    world.until(lambda: "host_total_credit" in ben.command("--get_project_status")[1], 30, "hello")
    assert closed.rows("SELECT id FROM host ORDER BY id") == before
