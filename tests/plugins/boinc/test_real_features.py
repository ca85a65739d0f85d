"""What the real BOINC client makes of the rarer features: trickles, keys, pauses, clones ..."""

import hashlib
import random
import re
import signal

import pytest
import world

COUNTED = '''"""{name}: gives each number a sign."""

min_quorum = 1
rsc_fpops_est = 3e6


def workunit(i):
    return {{"input": i}} if i < {count} else None


def compute(input):
    return "{sign} %d" % input
'''
TALK = '''"""talk: asks twice while it runs, and returns what it was told."""

import time

min_quorum = 1
rsc_fpops_est = 3e6


def workunit(i):
    return {"input": i} if i < 1 else None


def compute(input, trickle):
    told = trickle("1st <text> & \\u00e9")
    told += trickle("2nd\\n</text>")
    while len(told) < 2:
        time.sleep(0.2)
        told += trickle()
    return told


def trickle(workunit, text):
    return f"{workunit.name} heard: {text} &amp; <\\u00fc>"
'''
TOOL = '''"""tool: a native program with files of its own, and one that all tasks share."""

takes = returns = "bytes"


def workunit(i):
    given = {{"input": b"%d" % i, "files": {{"table.txt": b"shared" * 1000}},
             "command_line": f"--number {{i}}", "min_quorum": 1 if i else 2}}
    return given if i < {count} else None


def assimilate(workunit, answer):
    return answer and answer.decode()
'''
TOOL_SH = """#!/bin/sh
echo {version} "$@" $(cat) $(./beside.sh words.txt) $(wc -c <table.txt)
"""
TOOL_INI = """[version]
main = run_me
command_line = --always
ncpus = 0.5
min_ncpus = 2
also_for = aarch64-unknown-linux-gnu i686-pc-linux-gnu
"""
MINE = '''"""mine: has a program for Windows only."""

takes = returns = "bytes"
min_quorum = 1


def workunit(i):
    return {"input": b"%d" % i} if i < 2 else None


def assimilate(workunit, answer):
    return answer.decode()
'''
MINE_SH = """#!/bin/sh
echo "my own program: $(cat in)" >out
echo 0 >boinc_finish_called
"""
APP_INFO = """<app_info>
<app><name>mine</name></app>
<file_info><name>mine.sh</name><executable/></file_info>
<app_version><app_name>mine</app_name><version_num>7</version_num>
<file_ref><file_name>mine.sh</file_name><main_program/></file_ref></app_version>
</app_info>
"""
NAP = '''"""nap: sleeps on BOINC clients until somebody calls, and not at all elsewhere."""

import os
import time

rsc_fpops_est = 3e6


def workunit(i):
    return {{"input": i, "min_quorum": {quorum}, "target_nresults": {copies}}} if i < {count} \\
        else None


def compute(input):
    while os.path.exists("init_data.xml") and not os.path.exists({call!r}):
        time.sleep(0.1)
    return input
'''
LARGE = '''"""large: 3 MB that cannot be compressed."""

import hashlib
import random

returns = "bytes"
min_quorum = 1
rsc_fpops_est = 3e6


def workunit(i):
    return {"input": i} if i < 1 else None


def compute(input):
    return random.Random(input).randbytes(3_000_000)


def assimilate(workunit, answer):
    return hashlib.sha256(answer).hexdigest()
'''
ELSEWHERE = """<global_preferences>
<source_project>http://elsewhere.example/</source_project>
<mod_time>1700000000.000000</mod_time>
<run_on_batteries/>
<run_if_user_active/>
<idle_time_to_run>7.500000</idle_time_to_run>
<suspend_cpu_usage>0</suspend_cpu_usage>
</global_preferences>
"""

pytestmark = world.MARKS


@pytest.fixture
def closed(tmp_path):
    """A world with nothing in it yet."""
    with world.World(tmp_path) as found:
        yield found


def write(folder, name, text):
    """Write a file, and the folders above it; a script may be run. Return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if text.startswith("#!") else 0o644)
    return path


def test_a_running_job_and_its_application_talk_to_each_other(closed, tmp_path):
    closed.serve(write(tmp_path, "talk.py", TALK))
    closed.client("anna", ncpus=1)
    closed.hurry("SELECT count(*) FROM workunit WHERE assimilate_state = 2")
    assert closed.kept("talk") == {0: ["talk_0 heard: 1st <text> & \u00e9 &amp; <\u00fc>",
                                       "talk_0 heard: 2nd\n</text> &amp; <\u00fc>"]}
    assert closed.rows("SELECT count(*) FROM msg_from_host") == [2]  # What came twice was known.


def test_a_key_kept_elsewhere_signs_and_is_changed_while_a_client_is_attached(closed, tmp_path):
    apps, keys = tmp_path / "apps", tmp_path / "data" / "keys"
    write(apps, "alone.py", COUNTED.format(name="alone", sign="+", count=2))
    write(apps, "hidden.py", COUNTED.format(name="hidden", sign="?", count=1))
    keys.mkdir(parents=True)
    do(closed, "keys", "--make", "safe")
    sign_and_copy(closed, keys, apps / "alone.py")
    closed.serve(apps)
    client = closed.client("anna")
    closed.hurry("SELECT count(*) = 2 FROM workunit WHERE assimilate_state = 2")
    closed.nag(lambda: "hidden: its program is not signed yet" in client.log(), 40, "it says why")
    assert closed.rows("SELECT DISTINCT w.name FROM result r JOIN workunit w "
                       "ON w.id = r.workunit_id WHERE r.host_id > 0 ORDER BY 1") \
        == ["alone_0", "alone_1"]
    assert "run 'minigrid sign'" in closed.get("/status.json")
    first = key_of(client)
    assert first == "".join((keys / "code_sign_public").read_text().split())

    closed.stop()
    write(apps, "alone.py", COUNTED.format(name="alone", sign="-", count=4))
    do(closed, "keys", "--change", "--keys", "safe")
    sign_and_copy(closed, keys, apps)
    closed.serve()
    closed.hurry("SELECT count(*) = 5 FROM workunit WHERE assimilate_state = 2")
    assert closed.kept("alone") == {0: "+ 0", 1: "+ 1", 2: "- 2", 3: "- 3"}
    assert closed.kept("hidden") == {0: "? 0"}
    assert key_of(client) == "".join((keys / "code_sign_public").read_text().split()) != first
    assert closed.rows("SELECT count(*) FROM result WHERE outcome = 3") == [0]
    assert not list(keys.glob("*private*"))


def do(closed, *arguments):
    """Run a minigrid command that must succeed; return what it said."""
    status, text = closed.minigrid(*arguments)
    assert status == 0, text
    return text


def sign_and_copy(closed, keys, *paths):
    """Sign applications with the key in `safe`, and copy what the command says, as it says."""
    said = do(closed, "sign", "--keys", "safe", *paths)
    for name in re.search(r"in this order:\n  (.*)", said)[1].split():
        (keys / (closed.folder / name).name).write_bytes((closed.folder / name).read_bytes())


def key_of(client):
    """Return the signing key that a client holds, as it writes its state once in a while."""
    state = (client.folder / "client_state.xml").read_text()
    return "".join(re.search(r"<code_sign_key>(.*?)</code_sign_key>", state, re.S)[1].split())


def test_native_programs_shared_files_and_a_program_of_the_users_own(closed, tmp_path):
    version = tmp_path / "tool" / "versions" / "x86_64-pc-linux-gnu__two"
    write(version, "run_me", TOOL_SH.format(version="v1"))
    write(version, "beside.sh", '#!/bin/sh\nset -- $(cat "$1"); echo "$2"\n')
    write(version, "words.txt", "one two three\n")
    write(version, "version.ini", TOOL_INI)
    write(tmp_path, "tool/app.py", TOOL.format(count=3))
    write(tmp_path, "mine/versions/windows_x86_64/mine.exe", "MZ")
    write(tmp_path, "mine/app.py", MINE)
    closed.serve(tmp_path / "tool", tmp_path / "mine")
    project = world.PROJECT_FOLDER
    anna = closed.client("anna")
    closed.client("ben", {f"{project}/app_info.xml": APP_INFO, f"{project}/mine.sh": MINE_SH})
    closed.hurry("SELECT count(*) = 4 FROM workunit WHERE assimilate_state = 2")
    assert closed.kept("mine") == {0: "my own program: 0\n", 1: "my own program: 1\n"}
    assert closed.kept("tool") == {n: f"v1 --always --number {n} {n} two 6000\n" for n in (1, 2)}

    closed.stop()
    write(version, "run_me", TOOL_SH.format(version="v2"))
    write(tmp_path, "tool/app.py", TOOL.format(count=5))
    closed.serve()
    closed.hurry("SELECT count(*) = 6 FROM workunit WHERE assimilate_state = 2")
    assert closed.kept("tool") == {
        n: f"v{1 if n < 3 else 2} --always --number {n} {n} two 6000\n" for n in (1, 2, 3, 4)}
    assert closed.rows(
        "SELECT DISTINCT u.name, v.platform, v.version_num, v.plan_class FROM result r "
        "JOIN user u ON u.id = r.user_id JOIN app_version v ON v.id = r.app_version_id "
        "WHERE r.validate_state = 1 AND v.platform NOT LIKE 'i686%' ORDER BY u.name, 3") == [
        ("anna", "x86_64-pc-linux-gnu", 1, "two"), ("anna", "x86_64-pc-linux-gnu", 2, "two"),
        ("ben", "anonymous", 0, "")]
    once = re.findall(r"Started download of (tool_.*_(?:table|words)\.txt)", anna.log())
    assert len(once) == 2 and set(once) <= set(anna.files)  # Also kept by name for version 2.

    (table,) = [name for name in once if name.endswith("table.txt")]
    do(closed, "cancel", "tool_0", "--data", tmp_path / "data")
    closed.nag(lambda: table not in anna.files, 40, "the shared file is given up")
    assert not list((tmp_path / "data" / "download").glob(f"*/{table}"))


def nap(folder, **numbers):
    """Write an application whose jobs wait on BOINC clients; return its path, and how to call."""
    call = folder / "call"
    given = {"quorum": 1, "copies": 1, "count": 1, "call": str(call), **numbers}
    return write(folder, "nap.py", NAP.format(**given)), call.touch


def test_a_pause_loses_nothing(closed, tmp_path):
    app, call = nap(tmp_path)
    closed.serve(app)
    client = closed.client("anna")
    world.until(lambda: "EXECUTING" in client.tasks(), 60, "it runs", closed.tell)
    do(closed, "pause", "back at <eight> & not earlier", "--data", tmp_path / "data")
    call()
    world.until(lambda: "uploaded" in client.tasks(), 60, "uploads are taken", closed.tell)
    closed.nag(lambda: "back at <eight> & not earlier" in client.log(), 30, "it is told")
    assert "Project requested delay of 3600 seconds" in client.log()
    assert "uploaded" in client.tasks()
    assert closed.rows("SELECT server_state FROM result") == [4]
    do(closed, "resume", "--data", tmp_path / "data")
    closed.hurry("SELECT count(*) FROM workunit WHERE assimilate_state = 2")
    assert closed.rows("SELECT server_state, outcome, validate_state FROM result") == [(5, 1, 1)]
    assert closed.rows("SELECT count(*) FROM host") == [1]


def test_a_large_upload_survives_a_server_that_is_killed(closed, tmp_path):
    closed.serve(write(tmp_path, "large.py", LARGE))
    client = closed.client("anna", flags="<file_xfer_debug>1</file_xfer_debug>",
                           prefs="<max_bytes_sec_up>300000</max_bytes_sec_up>")
    wait_for_bytes(closed, client, 1)
    closed.stop(signal.SIGKILL)  # In the middle of it.
    closed.serve()
    world.until(lambda: "active: no" in transfers(client), 30, "it has noticed", closed.tell)
    client.command("--network_available")
    wait_for_bytes(closed, client, 2)
    client.command("--set_network_mode", "never")  # Cut: what has come is kept.
    world.until(lambda: part_bytes(tmp_path) > 500_000, 30, "the part is kept", closed.tell)
    closed.stop(signal.SIGKILL)
    there = part_bytes(tmp_path)
    closed.serve()
    client.command("--set_network_mode", "always")
    client.command("--network_available")
    closed.hurry("SELECT count(*) FROM workunit WHERE assimilate_state = 2")
    right = hashlib.sha256(random.Random(0).randbytes(3_000_000)).hexdigest()
    assert closed.kept("large") == {0: right}
    offsets = [int(n) for n in re.findall(r"upload_offset (\d+)", client.log())]
    assert offsets[-1] == there - 1  # Less one byte: had it been the last, nothing would come.


def transfers(client):
    """Return what a client says of its uploads."""
    return client.command("--get_file_transfers")[1]


def wait_for_bytes(closed, client, times):
    """Wait until a client has begun so many times, and has sent a third of its file."""
    def sent():
        text = transfers(client)
        begun = "active: yes" in text and client.log().count("upload_offset 0") == times
        return float(re.search(r"bytes_xferred: ([\d.]+)", text)[1]) if begun else 0
    world.until(lambda: 900_000 < sent() < 2_500_000, 90, "it uploads", closed.tell)


def part_bytes(folder):
    """Return how many bytes of unfinished uploads a server has."""
    return sum(path.stat().st_size for path in (folder / "data" / "upload").glob("*/*.part"))


def test_what_nobody_needs_is_dropped_and_what_a_reset_lost_comes_again(closed, tmp_path):
    app, call = nap(tmp_path, copies=2, count=3)
    closed.serve(app)
    anna = closed.client("anna", ncpus=1)
    world.until(lambda: "EXECUTING" in anna.tasks(), 60, "it runs", closed.tell)
    mine = "SELECT name FROM result WHERE host_id = 1 AND server_state = 4 ORDER BY name"
    before = closed.rows(mine)
    assert len(before) == 3
    anna.project("reset")
    world.until(lambda: "name: nap" not in anna.tasks(), 20, "all is lost")
    closed.nag(lambda: "EXECUTING" in anna.tasks(), 60, "it runs again")
    assert closed.rows(mine) == before
    assert sorted(set(re.findall(r"name: (nap_\d_\d)\n", anna.tasks()))) == before

    # A client knows what has begun only when it has chosen once more what to run.
    anna.command("--read_global_prefs_override")
    closed.volunteer("ben", "--cpus", "3")  # Who has the same, and is done at once.
    closed.wait("SELECT count(*) = 3 FROM workunit WHERE assimilate_state = 2")
    over = "FROM result WHERE host_id = 1 AND server_state = 5"
    closed.hurry(f"SELECT count(*) = 2 {over}")
    assert closed.rows(f"SELECT exit_status, client_state, outcome {over}") == 2 * [(202, 6, 3)]
    call()
    closed.hurry(f"SELECT count(*) {over} AND validate_state = 1")  # What had begun still counts.


def test_preferences_reach_the_users_other_computer_and_a_copied_directory_is_another_host(
        closed, tmp_path):
    app, call = nap(tmp_path, quorum=2, copies=2, count=4)
    closed.serve(app, settings="[minigrid]\nmax_wus_in_progress = 1\n")
    anna = closed.client("anna", {"global_prefs.xml": ELSEWHERE})
    closed.wait("SELECT count(*) = 2 FROM result WHERE server_state = 4 AND host_id = 1")
    ben = closed.client("ben", key=anna.key)
    ben.attach()
    anna.stop()
    twin = closed.clone(anna, "twin")
    anna.start()
    (asked,) = closed.rows("SELECT rpc_seqno FROM host WHERE id = 1")
    closed.hurry("SELECT rpc_seqno > ? FROM host WHERE id = 1", asked + 1)
    twin.start()  # Its count is behind now.
    closed.hurry("SELECT count(DISTINCT host_id) = 3 FROM result WHERE server_state = 4")
    call()
    closed.hurry("SELECT count(*) = 4 FROM workunit WHERE assimilate_state = 2", seconds=150)

    assert "General prefs: from http://elsewhere.example/" in ben.log()
    assert "<idle_time_to_run>7.5" in (ben.folder / "global_prefs.xml").read_text()
    assert closed.rows("SELECT prefs_time FROM boinc_user") == [1700000000]
    assert closed.rows("SELECT DISTINCT host_id FROM result WHERE validate_state = 1 "
                       "ORDER BY 1") == [1, 2, 3]
    assert closed.rows("SELECT count(*) FROM result WHERE host_id > 0 GROUP BY workunit_id, "
                       "host_id HAVING count(*) > 1") == []
    assert closed.rows("SELECT count(DISTINCT host_cpid) FROM host") == [3]
    assert closed.rows("SELECT count(*) FROM user") == [1]


HALVES = '''"""halves: doubles numbers; another computer halves what came of it."""

validation = "inverse"
dispatch = "xcom3"
rsc_fpops_est = 3e6


def workunit(i):
    return {"input": i} if i < 3 else None


def compute(input):
    return 2 * input


def invert(output):
    return output // 2


def same(input, recovered):
    return input == recovered
'''


def test_answers_are_checked_by_their_inverse_and_nobody_checks_his_own(closed, tmp_path):
    """[S3-30..S3-34] Clients and a volunteer compute, and compute back what another one did."""
    closed.serve(write(tmp_path, "halves.py", HALVES))
    closed.client("anna", ncpus=1)
    closed.client("ben", ncpus=1)
    closed.volunteer("vera")
    closed.hurry("SELECT count(*) = 3 FROM workunit WHERE number IS NOT NULL "
                 "AND assimilate_state = 2")
    assert closed.kept("halves") == {i: 2 * i for i in range(3)}
    assert closed.rows("SELECT count(*) FROM inverse_check c JOIN result r ON r.id = c.result_id "
                       "JOIN result a ON a.id = c.answer WHERE a.host_id = r.host_id") == [0]
    assert closed.rows("SELECT count(*) FROM black_entry") == [0]
