"""The golden vectors: what the real BOINC back end did to thousands of states.

Each vector is loaded into the real store, the real stage runs with the clock at the vector's
second, and every field is compared. The only differences allowed are the rows of RULES.md
section 7, here the functions of section 3: each names its row, looks at the vector, and says what
comes instead. Directory: MINIGRID_GOLDEN, or ../shared/golden beside the project.
"""

import copy
import dataclasses
import gzip
import json
import os
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from conftest import NOTES

import minigrid as m

GOLDEN = Path(os.environ.get("MINIGRID_GOLDEN",
                             Path(__file__).resolve().parents[2] / "shared" / "golden"))
BASE = 1_600_000_000  # the real second behind the vectors' 0
ABSENT = 15  # the vectors' id of a canonical result that does not exist

needs_vectors = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no golden vectors: {GOLDEN} is not there (MINIGRID_GOLDEN)")

# ---- 1. Loading a vector into the store --------------------------------------

BITWISE = 'takes = "json"\nreturns = "bytes"\n\n\ndef workunit(i):\n    return None\n\n\n' \
          'def compute(input):\n    return b""\n'
FUZZY = BITWISE + '''

def parse(output):
    kind, _, number = output.decode().partition(" ")
    if kind == "T":
        raise OSError("not readable just now")
    if kind == "P":
        raise ValueError("not readable at all")
    return kind, float(number)


def compare(a, b):
    kinds = a[0] + b[0]
    if "X" in kinds:
        raise ValueError("never comparable")
    if "Y" in kinds:
        raise OSError("not comparable just now")
    return abs(a[1] - b[1]) <= 1
'''
DEFER = BITWISE + '''

def assimilate(workunit, answer):
    return "defer" if workunit.number else None
'''
WU_FIELDS = ("min_quorum target_nresults max_error_results max_total_results max_success_results "
             "delay_bound priority canonical_credit error_mask file_delete_state assimilate_state "
             "need_validate transitioner_flags").split()
RESULT_FIELDS = ("server_state outcome client_state validate_state file_delete_state exit_status "
                 "granted_credit priority").split()
TIMES = ("report_deadline", "sent_time", "received_time")


@pytest.fixture
def grid(tmp_path):
    """An open project whose applications compare as the vectors' validators did."""
    for name, text in (("bitwise", BITWISE), ("fuzzy", FUZZY), ("defer", DEFER)):
        # BOINC has no black list; the liars of one vector would change the next ones.
        (tmp_path / f"{name}.py").write_text(text + '\nblack_list, spot_checks = "off", 0\n')
    m.open_project(m.Settings(data=str(tmp_path / "data"), purge_delay=0), random.Random(1))
    m.db.execute_sql("PRAGMA synchronous = OFF")  # The vectors test rules, not the disk.
    assert m.sync_apps([tmp_path], BASE - 10**7) == []
    yield m.project
    m.close_project()


def to_time(t):
    return 0 if t is None else m.NEVER if t == "never" else BASE + t


def from_time(t):
    return None if t == 0 else "never" if t == m.NEVER else t - BASE


def load(state, key, app="bitwise", users=None):
    """Insert a vector's rows; return the workunit's id. Result ids become key * 100 + local id."""
    wu = state["wu"]
    values = {name: wu[name] for name in WU_FIELDS}
    canonical = wu["canonical_resultid"]
    m.Workunit.insert(
        id=key, app=m.apps[app].id, name=f"wu{key}", number=int(app == "defer"),
        create_time=BASE - 10**6, mod_time=BASE + wu.get("mod_time", -10**6), input_files=[],
        transition_time=to_time(wu["transition_time"]),
        canonical_resultid=key * 100 + canonical if canonical else 0, **values).execute()
    for r in state["results"]:
        host = r["hostid"]
        if host:
            user = (users or {}).get(r["id"], host)
            m.User.insert(id=user, create_time=0, name="", authenticator=f"key{user}") \
                .on_conflict_ignore().execute()
            m.Host.insert(id=host, user=user, create_time=0, host_cpid=f"host{host}") \
                .on_conflict_ignore().execute()
        m.Result.insert(
            id=key * 100 + r["id"], workunit=key, app=m.apps[app].id,
            name=f"wu{key}_{r['name_suffix']}", create_time=BASE - 10**6, host=host or None,
            user=user if host else None, **{name: r[name] for name in RESULT_FIELDS},
            **{name: to_time(r[name]) for name in TIMES}).execute()
    return key


def read(key, like):
    """Read a vector's rows back in the form of the vectors; `like` = results it began with."""
    names = ", ".join(WU_FIELDS)
    row = m.db.execute_sql(f"SELECT transition_time, canonical_resultid, {names} FROM workunit "
                           "WHERE id = ?", (key,)).fetchone()
    if row is None:
        return {"wu": None, "results": []}
    wu = {"transition_time": from_time(row[0]),
          "canonical_resultid": max(row[1] - key * 100, 0), **dict(zip(WU_FIELDS, row[2:]))}
    fields, results = RESULT_FIELDS + list(TIMES), []
    for r in m.db.execute_sql(f"SELECT id, name, host_id, {', '.join(fields)} FROM result "
                              "WHERE workunit_id = ? ORDER BY id", (key,)):
        result = dict(zip(fields, r[3:]), hostid=r[2] or 0, name_suffix=int(r[1].split("_")[-1]))
        result.update({name: from_time(result[name]) for name in TIMES})
        result.update({"id": r[0] - key * 100} if len(results) < like else {"new": True})
        results.append(result)
    return {"wu": wu, "results": results}


def clear():
    for model in (m.Result, m.Workunit, m.HostAppVersion, m.Host, m.User):
        model.delete().execute()


def output_path(key, result):
    return m.file_path("upload", f"wu{key}_{result['name_suffix']}_out")


def write_outputs(vector, key):
    """Put the outputs of a validator or life vector where volunteers would have uploaded them."""
    for r in vector["results"]:
        content = vector["files"].get(str(r["id"]))
        if content is not None:
            path = output_path(key, r)
            path.write_bytes(b"" if content == "D" else content.encode())


def difference(expected, got):
    """Name the fields that differ: [(place, expected, got)]; T6's two fields are not compared."""
    if expected["wu"] is None or got["wu"] is None:
        return [] if expected["wu"] == got["wu"] else [("workunit", expected["wu"], got["wu"])]
    skip = ("hr_class", "app_version_id", "mod_time")
    found = [(name, value, got["wu"][name]) for name, value in expected["wu"].items()
             if name not in skip and got["wu"][name] != value]
    if len(expected["results"]) != len(got["results"]):
        found.append(("number of results", len(expected["results"]), len(got["results"])))
    for n, (want, have) in enumerate(zip(expected["results"], got["results"])):
        found += [(f"result {n + 1} {name}", value, have.get(name))
                  for name, value in want.items() if name != "id" and have.get(name) != value]
    return found


# ---- 2. What comes instead where RULES.md section 7 says "ours" or "skip" ----
#
# Each function takes a vector (or a step of a life: same keys) and a copy of BOINC's `after`,
# which it changes to what minigrid does; it returns False if its row does not apply to this state.
# They are tried only on vectors that carry the code of their row.

SKIP = {"V12": "hosts cannot be missing here", "V13": "no notion of a suspicious result",
        "V16": "not a state that arises here",
        "S2": "not reachable here", "S3": "not reachable here"}
SUCCESS, VALIDATE_ERROR = 1, 6
INIT, VALID, INVALID, NO_CHECK, INCONCLUSIVE, TOO_LATE = range(6)


def pairs(vector, after):
    return zip(vector["before"]["results"], after["results"])


def settled(results):
    """All over, none waiting for validation, no deadline of a given-up copy ahead [C17]."""
    return all(r["server_state"] == 5
               and not (r["outcome"] == 4 and (r["report_deadline"] or 0) > 0)
               and not (r["outcome"] == SUCCESS and r["validate_state"] == INIT) for r in results)


def t1(vector, after):
    """C16: the outputs of VALIDATE_ERROR results are freed."""
    changed = False
    for r in after["results"]:
        canonical = r.get("id") == after["wu"]["canonical_resultid"]
        if (r["outcome"], r["server_state"], r["file_delete_state"]) == (VALIDATE_ERROR, 5, 0) \
                and (not canonical or settled(after["results"])):
            r["file_delete_state"] = changed = 1
    return changed


def t3(vector, after):
    """Only OVER results are freed."""
    changed = False
    for old, new in pairs(vector, after):
        if new["server_state"] != 5 and new["file_delete_state"] != old["file_delete_state"]:
            new["file_delete_state"], changed = old["file_delete_state"], True
    return changed


def t4(vector, after):
    """C4, C5: a decided or failed workunit needs no copy, so it gets no bit 8 for lack of one."""
    after["wu"]["error_mask"] &= ~8
    if after["wu"]["error_mask"]:
        return True
    # Without an error nothing of the workunit is abandoned.
    for old, new in pairs(vector, after):
        if (old["server_state"], new["outcome"]) in ((2, 5), (1, 5)):
            new.update(server_state=old["server_state"], outcome=old["outcome"])
        if new["validate_state"] == NO_CHECK:
            new["validate_state"] = old["validate_state"]
            if old["file_delete_state"] == 0 and new["validate_state"] == INIT:
                new["file_delete_state"] = 0
    whole = settled(after["results"])
    if vector["before"]["wu"]["assimilate_state"] == 0:
        after["wu"]["assimilate_state"] = int(whole)  # T5, if all is settled
    if after["wu"]["assimilate_state"] == 2 and not whole:
        for old, new in [(vector["before"]["wu"], after["wu"]), *(
                (o, n) for o, n in pairs(vector, after)
                if n["id"] == after["wu"]["canonical_resultid"])]:
            new["file_delete_state"] = old["file_delete_state"]
    return True


def t8(vector, after):
    """C1: the safety net applies only when nothing is in progress."""
    after["wu"]["transition_time"] = min(r["report_deadline"] or 0 for r in after["results"]
                                         if r["server_state"] == 4)
    return True


def our_groups(vector):
    """Return the results that vote here, and for each that can be read the group of its answer."""
    before, fuzzy = vector["before"], vector["config"].get("compare") == "fuzzy"
    voters = [r for r in before["results"] if r["server_state"] == 5 and r["outcome"] == SUCCESS
              and r["validate_state"] in (INIT, VALID, INCONCLUSIVE)]
    texts = {r["id"]: before["files"][str(r["id"])] for r in voters}
    answers = {rid: text for rid, text in texts.items() if text is not None and text[0] not in "TP"}

    def match(a, b):
        if not fuzzy or a is b:
            return a == b
        return "X" not in a[0] + b[0] and abs(float(a[2:]) - float(b[2:])) <= 1

    groups = {i: {j for j in answers if i == j or match(answers[i], answers[j])} for i in answers}
    if fuzzy and len(answers) > 1 and any(text[0] == "Y" for text in answers.values()):
        groups = {}
    return voters, texts, groups


def our_vote(vector, after):
    """C20: INIT, INCONCLUSIVE and VALID results vote; the largest group wins; rivals: no winner."""
    before, quorum = vector["before"], vector["before"]["wu"]["min_quorum"]
    voters, texts, groups = our_groups(vector)
    after.update(copy.deepcopy({k: before[k] for k in ("wu", "results")}))
    wu, results = after["wu"], {r["id"]: r for r in after["results"]}
    wu["need_validate"] = 0
    if len(voters) < quorum:
        return True
    unreadable = {rid for rid, text in texts.items() if text is None or text[0] == "P"}
    unsure = {rid for rid, text in texts.items() if text is not None and text[0] in "TY"}
    for rid in unreadable:
        results[rid].update(outcome=VALIDATE_ERROR, validate_state=INVALID)
    readable = [rid for rid in texts if rid not in unreadable]
    answered = [rid for rid in readable if texts[rid][0] != "T"]
    size = max(map(len, groups.values()), default=0)
    best = [rid for rid in groups if len(groups[rid]) == size]
    rivals = [rid for rid in best if rid not in groups[best[0]]]
    if best and len(answered) >= quorum and size > quorum // 2 and (not rivals or quorum == 1):
        credit = 0 if vector["config"].get("credit_mode") == "no_credit" else wu["canonical_credit"]
        wu.update(canonical_resultid=best[0], canonical_credit=credit, transition_time="never")
        wu["assimilate_state"] = wu["assimilate_state"] or 1
        for rid in readable:
            if texts[rid][0] == "T":
                results[rid]["validate_state"], wu["transition_time"] = INIT, 6 * 3600
            elif rid in groups[best[0]]:
                results[rid].update(validate_state=VALID)
                results[rid]["granted_credit"] = credit or results[rid]["granted_credit"]
            else:
                results[rid]["validate_state"] = INVALID
        for r in results.values():
            if r["server_state"] in (1, 2):
                r.update(server_state=5, outcome=5)
        return True
    for rid in readable:
        results[rid]["validate_state"] = INCONCLUSIVE
    if unreadable:
        wu["transition_time"] = 0
    elif unsure:
        t = wu["transition_time"]
        wu["transition_time"] = 6 * 3600 if t == "never" else min(
            t if t is not None else -BASE, 6 * 3600)
        wu["transition_time"] = None if wu["transition_time"] == -BASE else wu["transition_time"]
    return one_more(wu, len(readable))


def one_more(wu, usable):
    """C21, S4-29: ask for one more copy within the limits, or give up at once."""
    if usable > wu["max_success_results"] or usable >= wu["target_nresults"]:
        wu["transition_time"] = 0
        if usable < min(wu["max_success_results"], wu["max_total_results"]):
            wu["target_nresults"] = usable + 1
        else:
            wu["error_mask"] |= 4
    return True


def v5(vector, after):
    """S4-16, S4-31: READY only from INIT; nothing is assimilated twice."""
    after["wu"]["assimilate_state"] = vector["before"]["wu"]["assimilate_state"]
    return True


def v8(vector, after):
    """S4-34: INACTIVE results count with the UNSENT ones, so a consensus ends them, too."""
    for r in after["results"]:
        if r["server_state"] == 1 and after["wu"]["canonical_resultid"]:
            r.update(server_state=5, outcome=5)
    return True


def v9(vector, after):
    """C3: a straggler is not blamed for a lost canonical output: TOO_LATE, no penalty."""
    own = {r["id"]: vector["before"]["files"][str(r["id"])] for r in vector["before"]["results"]}
    waits, looked_at = False, False
    for old, new in pairs(vector, after):
        if old["server_state"] != 5 or old["outcome"] != SUCCESS \
                or old["validate_state"] not in (INIT, INCONCLUSIVE):
            continue
        text, looked_at = own[old["id"]], True
        new.update(outcome=old["outcome"], granted_credit=old["granted_credit"])
        if text is None or text[0] == "P":
            new.update(outcome=VALIDATE_ERROR, validate_state=INVALID)
        elif text[0] == "T":
            new["validate_state"], waits = old["validate_state"], True
        else:
            new["validate_state"] = TOO_LATE
    if waits:
        old = vector["before"]["wu"]["transition_time"]
        after["wu"]["transition_time"] = 6 * 3600 if old == "never" else old and min(old, 6 * 3600)
    elif looked_at:
        after["wu"]["transition_time"] = 0
    return looked_at


def v11(vector, after):
    """S0-52: need_validate is cleared."""
    after["wu"]["need_validate"] = 0
    return True


def purge_later(vector, after):
    """P1, P3: purge only when all results are over and no file is READY or ERROR."""
    after.update({k: v for k, v in copy.deepcopy(vector["before"]).items() if k != "files"})
    return any(r["server_state"] != 5 or r["file_delete_state"] in (1, 3)
               for r in vector["before"]["results"])


def l1(vector, after):
    """Nothing is left on disk after the purge; so it waits for outputs to be deleted [P1]."""
    if purge_later(vector, after):
        after["files"] = copy.deepcopy(vector["before"]["files"])
        return True
    after.update(copy.deepcopy({k: vector["after"][k] for k in ("wu", "results")}))
    after["files"] = {name: "missing" if name == "in" else None for name in after["files"]}
    return after["wu"] is None


INSTEAD = {"T1": t1, "T3": t3, "T4": t4, "T11": t4, "T8": t8, "V1": our_vote, "V3": our_vote,
           "V4": our_vote, "V5": v5, "V6": our_vote, "V8": v8, "V9": v9, "V10": our_vote,
           "V17": our_vote, "V11": v11, "P1": purge_later, "P3": purge_later, "L1": l1}
BOTH = ("T2", "T5", "T6", "T7", "T9", "T10", "V2", "V7", "V14", "V15", "A1", "A2", "F1", "F2", "F3",
        "P2", "S1", "S4")  # rows that say "BOINC", or leave fields out (T6): nothing comes instead
ORDER = [code for code in INSTEAD if INSTEAD[code] is our_vote] + [
    code for code in INSTEAD if INSTEAD[code] is not our_vote]


def expectation(vector, taken):
    """Return what minigrid must make of a vector, or None to leave it out; counts the rows."""
    after = copy.deepcopy(vector["after"])
    codes = vector["deviation"]
    assert set(codes) <= {*SKIP, *INSTEAD, *BOTH}, f"{vector['id']}: unknown code in {codes}"
    done = set()
    for code in codes:
        if code in SKIP:
            taken[f"{code} skip"] += 1
            return None
    for code in sorted(set(codes) & set(INSTEAD), key=ORDER.index):
        if INSTEAD[code] in done or INSTEAD[code](vector, after):
            taken[f"{code} ours"] += 1
            done.add(INSTEAD[code])
    return after


# ---- 3. The stages -----------------------------------------------------------

def vectors(stage):
    with gzip.open(GOLDEN / f"{stage}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def stage(name):
    """Return a stage of the pass, whoever brings it."""
    return next(s for s in m.all_stages() if s.__name__ == name)


def configure(config):
    """Set what a vector was recorded with; return the application that compares as it did."""
    names = {field.name for field in dataclasses.fields(m.Settings)}
    given = {key: value for key, value in config.items() if key in names}
    if config.get("credit_mode") == "no_credit":
        given["max_granted_credit"] = 0
    m.project.settings = dataclasses.replace(
        m.project.settings, purge_delay=config.get("min_age_days", 0) * 86400, **given)
    m.project.retry_files_at = m.NEVER if config.get("retry_errors") == 0 else 0
    return {"fuzzy": "fuzzy", "defer": "defer"}.get(
        config.get("compare") or config.get("handler"), "bitwise")


def batches(stage, size):
    """Yield (application, vectors) with the settings made and the store empty."""
    groups = defaultdict(list)
    for vector in vectors(stage):
        groups[json.dumps(vector["config"], sort_keys=True)].append(vector)
    for config, members in groups.items():
        for i in range(0, len(members), size):
            app = configure(json.loads(config))
            yield app, members[i:i + size]
            sweep_up()


def sweep_up():
    with m.db.atomic():
        clear()
    for folder in ("upload", "download"):
        for directory, inside, names in os.walk(m.project.data / folder, topdown=False):
            for name in names:
                os.unlink(os.path.join(directory, name))
            for name in inside:
                if len(name) > 2:  # a directory in a file's place
                    os.rmdir(os.path.join(directory, name))


def check(stage, run, prepare=lambda vector, key: None, also=lambda want, key: [], size=100):
    """Run all vectors of a stage and compare; print how many each row of section 7 took.

    Up to `size` vectors are in the store at once: they do not interact, and must not.
    """
    taken, wrong, n = Counter(), [], 0
    for app, members in batches(stage, size):
        with m.db.atomic():
            for key, vector in enumerate(members, 1):
                load(vector["before"], key, app)
                prepare(vector, key)
        run(BASE)
        for key, vector in enumerate(members, 1):
            n += 1
            want = expectation(vector, taken)
            if want:
                got = read(key, len(vector["before"]["results"]))
                found = difference(want, got) + also(want, key)
                wrong += [(vector["id"], vector["deviation"], found)] * bool(found)
    report(stage, n, taken, wrong)


def report(stage, n, taken, wrong):
    rows = ", ".join(f"{row} {count}" for row, count in sorted(taken.items()))
    NOTES.append(f"golden {stage}: {n} compared; different or left out on purpose: "
                 f"{rows or 'none'}")
    assert n and not wrong, f"{len(wrong)} of {n} differ; the first: {wrong[:3]}"


@needs_vectors
def test_transitioner(grid):
    check("transitioner", m.transitioner)


@needs_vectors
def test_validator(grid):
    check("validator", m.validator, lambda vector, key: write_outputs(vector["before"], key))


@needs_vectors
def test_assimilator(grid):
    def canonical_output(vector, key):  # BOINC's handler does not open it; ours is given it.
        files = {str(vector["before"]["wu"]["canonical_resultid"]): "A"}
        write_outputs({**vector["before"], "files": files}, key)

    check("assimilator", sys.modules["minigrid_plugin_assimilate"].assimilator, canonical_output)


@needs_vectors
def test_purger(grid):
    check("db_purge", stage("purger"))


@needs_vectors
def test_file_deleter(grid):
    placed, gone = {}, []

    def place(vector, key):
        """Make each file as the vector says, and tell the rows their names."""
        while gone:
            gone.pop().mkdir()
        placed.clear()
        free, lost = iter(range(10**6)), set()
        for owner, states in vector["before"]["files"].items():
            folder, files = ("download" if owner == "in" else "upload"), []
            for state in states:
                path = None
                while path is None or path.parent in lost or any(path.parent.iterdir()):
                    name = f"{owner}_{next(free)}"  # A lost directory holds no others.
                    path = m.file_path(folder, name)
                lost.add(path.parent)
                if state == "undeletable":  # Unlinking a directory is refused, to root, too.
                    path.mkdir()
                elif state.startswith("present"):
                    path.write_bytes(b"x")
                more = {"no_delete": True} if "no_delete" in state else {}
                files.append({"name": name, **more})
                placed.setdefault(owner, []).append((path, state))
            if owner == "in":
                m.Workunit.update(input_files=files).where(m.Workunit.id == key).execute()
            else:
                m.Result.update(output_files=files).where(
                    m.Result.id == key * 100 + int(owner)).execute()
        for path, state in (slot for slots in placed.values() for slot in slots):
            if state == "nodir":
                path.parent.rmdir()
                gone.append(path.parent)

    def files(want, key):
        there = {owner: [path.exists() for path, _ in placed.get(owner, ())]
                 for owner in want["files"]}
        wanted = {owner: [state not in ("missing", "nodir") for state in states]
                  for owner, states in want["files"].items()}
        return [("files", wanted, there)] if there != wanted else []

    check("file_deleter", stage("file_deleter"), place, files, size=1)


def request(host, user, **more):
    return m.Request(authenticator=f"key{user}", hostid=host, host_cpid=f"host{host}",
                     rpc_seqno=m.Host.get_by_id(host).rpc_seqno + 1, **more)


@pytest.fixture
def scheduler(grid):
    """The settings of the recorded scheduler: one job at a time, nothing resent or aborted."""
    m.project.settings = dataclasses.replace(
        m.project.settings, one_result_per_user_per_wu=True, max_wus_to_send=1,
        min_sendwork_interval=0, resend_lost_results=False, send_result_abort=False)


@needs_vectors
def test_scheduler_report(scheduler):
    taken, wrong, n = Counter(), [], 0
    for app, (vector,) in batches("scheduler_report", 1):
        n += 1
        action, host = vector["action"], vector["action"]["host"]
        owner = 7  # the user of the reporting host, unless it is another user's
        users = {r["id"]: owner if r["id"] == action["result"] else 8
                 for r in vector["before"]["results"]}
        load(vector["before"], 1, app, users)
        user = 9 if action["who"] == "other_user" else owner
        for key in (owner, user):
            m.User.insert(id=key, create_time=0, name="", authenticator=f"key{key}") \
                .on_conflict_ignore().execute()
        m.Host.insert(id=host, user=user, create_time=0).on_conflict_ignore().execute()
        m.Host.update(user=user).where(m.Host.id == host).execute()
        suffix = {r["id"]: r["name_suffix"] for r in vector["before"]["results"]}
        name = f"wu1_{suffix[action['result']]}" if action["result"] in suffix else "no_such_result"
        told = m.Report(name, action["client_state"], action["exit_status"])
        reply = m.project.write(lambda: m.schedule(request(host, user, reports=[told]), BASE))
        want = expectation(vector, taken)
        if want:
            found = difference(want, read(1, len(vector["before"]["results"])))
            found += [("ack", want["ack"], reply.acks)] * (want["ack"] != (reply.acks == [name]))
            wrong += [(vector["id"], vector["deviation"], found)] * bool(found)
    report("scheduler_report", n, taken, wrong)


# ---- 4. Whole lives ----------------------------------------------------------

STAGE = {"transitioner": "transitioner", "validator": "validator", "assimilator": "assimilator",
         "file_deleter": "file_deleter", "db_purge": "purger"}


def act(step, state, now):
    """Do one step of a life as it was done to the real server."""
    action = step["action"]
    if action in STAGE:
        return stage(STAGE[action])(now)
    host = step["host"]
    m.User.insert(id=host, create_time=0, name="", authenticator=f"key{host}") \
        .on_conflict_ignore().execute()
    m.Host.insert(id=host, user=host, create_time=0, host_cpid=f"host{host}") \
        .on_conflict_ignore().execute()
    if action == "detach":
        asked = m.Request(authenticator=f"key{host}", host_cpid=f"host{host}", other_results=[])
    elif action == "send":
        # Which of equally urgent results goes first is free: let it be the recorded one.
        chosen = m.Result.get_by_id(100 + step["result"])
        m.Result.update(priority=chosen.priority + 1).where(m.Result.id == chosen.id).execute()
        asked = request(host, host, work_req_seconds=1)
    else:
        result = next(r for r in state["results"] if r["id"] == step["result"])
        if step["output"] is not None:
            write_outputs({"results": [result], "files": {str(result["id"]): step["output"]}}, 1)
        asked = request(host, host, reports=[m.Report(
            f"wu1_{result['name_suffix']}", step["client_state"], step["exit_status"])])
    reply = m.project.write(lambda: m.schedule(asked, now))
    if action == "send":
        assert [a.name for a in reply.assignments] == [chosen.name], reply.messages
        m.Result.update(priority=chosen.priority).where(m.Result.id == chosen.id).execute()


def lay_out(state, known):
    """Put a recorded state into the store, rows and files."""
    with m.db.atomic():
        clear()
    for path in [m.file_path("download", "wu1_in"), *(output_path(1, r) for r in known)]:
        path.unlink(missing_ok=True)
    if state["wu"]:
        load(state, 1)
        path = m.file_path("download", "wu1_in")
        m.Workunit.update(input_files=[{"name": path.name}]).execute()
        if state["files"]["in"] == "present":
            path.write_bytes(b"0")
        write_outputs(state, 1)


def files_now(state, known):
    """Read back what is on disk, in the form of the vectors."""
    files = {"in": "present" if m.file_path("download", "wu1_in").exists() else "missing"}
    for r in known:
        path = output_path(1, r)
        content = path.read_text() or "D" if path.exists() else None
        files[str(r["id"])] = content
    return files


@needs_vectors
def test_life(scheduler):
    taken, wrong, n = Counter(), [], 0
    for life in vectors("life"):
        configure(life["config"])
        state, known, fits = life["before"], {}, False
        for step in life["steps"]:
            n += 1
            known.update({r["id"]: r for r in state["results"]})
            if not fits:
                lay_out(state, known.values())
            act(step, state, BASE + step["t"])
            want = after = state if step.get("unchanged") else step["after"]
            codes = step.get("deviation", [])
            if codes:
                vector = {"id": life["id"], "config": life["config"], "deviation": codes,
                          "before": at(state, -step["t"]), "after": at(after, -step["t"])}
                want = at(expectation(vector, taken), step["t"])
            known.update({r["id"]: r for r in want["results"] if "id" in r})
            got = read(1, len(want["results"]))
            found = difference(want, got)
            files = files_now(want, known.values())
            found += [("files", want["files"], files)] * (files != want["files"])
            wrong += [(life["id"], step["t"], step["action"], codes, found)] * bool(found)
            fits = not found and want is after and len(after["results"]) == len(state["results"])
            state = after
        sweep_up()
    report("life", n, taken, wrong)


def at(state, shift):
    """Move the times of a life's state, which count from its start, to another origin."""
    if state is None or state["wu"] is None:
        return state
    moved = copy.deepcopy(state)
    for row, names in [(moved["wu"], ["transition_time"]), *((r, TIMES) for r in moved["results"])]:
        for name in names:
            if isinstance(row[name], (int, float)):
                row[name] += shift
    return moved
