"""Dialogues: each recorded request gets a sensible reply, and the one that BOINC's server gave.

captures/ holds what the client 7.20.5 sent, replies/ dialogues with the real BOINC server: request,
reply, and the rows of its database afterwards. Directories: MINIGRID_CAPTURES and MINIGRID_REPLIES,
or captures and replies of ../shared beside the project.
"""

import calendar
import dataclasses
import gzip
import hashlib
import http.client
import math
import os
import re
import socket
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import make
import pytest
import waitress

import minigrid as m

SHARED = Path(__file__).resolve().parents[4] / "shared"
CAPTURES = Path(os.environ.get("MINIGRID_CAPTURES", SHARED / "captures"))
REPLIES = Path(os.environ.get("MINIGRID_REPLIES", SHARED / "replies"))
CAPTURED = sorted(p.name[:-len(".request.xml")] for p in CAPTURES.glob("[0-9]*.request.xml"))
CASES = sorted(p.name[:-len(".request.xml")] for p in REPLIES.glob("[0-9]*.request.xml"))
NOW = 1_795_221_600  # when the captures were made
WEEK = 7 * 86400
PATIENCE = 60  # seconds until something that does not end is a failure

needs_recordings = pytest.mark.skipif(
    not (CAPTURED and CASES) and not os.environ.get("CI"),
    reason=f"no recordings in {CAPTURES} and {REPLIES} (MINIGRID_CAPTURES, MINIGRID_REPLIES)")


@needs_recordings
def test_all_recordings_are_there():
    assert (len(CAPTURED), len(CASES)) == (43, 27)


# ---- 1. What a client reads: an own reading of WIRE 7.2 and 7.4 ----------------

WHOLE, NUMBER = "(0|[1-9][0-9]{0,15})", r"(0|[1-9][0-9]{0,30})(\.[0-9]+)?"  # 010 would be octal
MD5, NAME, FLAG = "[0-9a-f]{32}", "[A-Za-z0-9._-]{1,255}", ""
REF = {"file_name": NAME, "open_name": NAME, "copy_file": FLAG, "main_program": FLAG,
       "optional": FLAG}
FILE = {
    "name": NAME, "url*": 255, "upload_url*": 255, "download_url*": 255, "md5_cksum": MD5,
    "nbytes": WHOLE, "max_nbytes": "[1-9][0-9]{0,15}", "executable": FLAG, "sticky": FLAG,
    "file_signature": 4095, "xml_signature": 4095, "generated_locally": FLAG,
    "upload_when_present": FLAG, "no_delete": FLAG}
APP = {"name": NAME, "user_friendly_name": 255, "non_cpu_intensive": "[01]",
       "fraction_done_exact": "[01]"}
VERSION = {
    "app_name": NAME, "version_num": WHOLE, "platform": NAME, "plan_class": 63, "api_version": 15,
    "avg_ncpus": NUMBER, "flops": NUMBER, "cmdline": 255, "file_ref*": REF}
WORKUNIT = {
    "name": NAME, "app_name": NAME, "command_line": 65535, "rsc_fpops_est": NUMBER,
    "rsc_fpops_bound": NUMBER, "rsc_memory_bound": NUMBER, "rsc_disk_bound": NUMBER,
    "file_ref*": REF}
RESULT = {
    "name": NAME, "wu_name": NAME, "report_deadline": WHOLE, "platform": NAME, "version_num": WHOLE,
    "plan_class": 63, "report_immediately": FLAG, "file_ref*": REF}
REPLY = {  # element: how many bytes, which pattern, or what is in it; "*": any number of them
    "scheduler_version": WHOLE, "master_url": 255, "request_delay": NUMBER, "message*": 1023,
    "project_name": 255, "project_is_down": FLAG, "userid": WHOLE, "user_name": 255,
    "team_name": 255, "user_total_credit": NUMBER, "user_expavg_credit": NUMBER,
    "host_total_credit": NUMBER, "host_expavg_credit": NUMBER, "user_create_time": WHOLE,
    "host_create_time": WHOLE, "email_hash": MD5, "cross_project_id": MD5, "external_cpid": MD5,
    "hostid": "[1-9][0-9]{0,8}", "host_venue": 255, "global_preferences": None,
    "gui_urls": {"gui_url*": {"name": 255, "description": 255, "url": 255}}, "rss_feeds": None,
    "code_sign_key": 4095, "code_sign_key_signature": 4095, "app*": APP, "file_info*": FILE,
    "app_version*": VERSION, "workunit*": WORKUNIT, "result*": RESULT,
    "result_ack*": {"name": NAME}, "result_abort*": {"name": NAME},
    "result_abort_if_not_started*": {"name": NAME},
    "delete_file_info*": NAME, "message_ack": FLAG, "dont_use_dcf": FLAG,
    "trickle_down*": {"result_name": NAME, "time": WHOLE, "text": None}}


def read(text):
    """Parse a reply strictly, though the client is lenient; return its root."""
    assert text.startswith("<scheduler_reply>\n") and text.endswith("</scheduler_reply>\n")
    assert not re.search("[\0-\x08\x0b-\x1f]", text)
    return ElementTree.fromstring(text)


def check_elements(node, known):
    """Hold that the client knows every element and has room for its text."""
    tags = [child.tag for child in node]
    for child in node:
        several = child.tag + "*" in known
        assert several or child.tag in known, f"{child.tag} in {node.tag} is unknown"
        assert several or tags.count(child.tag) == 1, f"{child.tag} twice in {node.tag}"
        kind, text = known[child.tag + "*" * several], child.text or ""
        assert set(child.attrib) <= ({"priority"} if child.tag == "message" else set())
        if isinstance(kind, dict):
            check_elements(child, kind)
            continue
        assert kind is None or len(child) == 0, child.tag
        if isinstance(kind, str):
            assert re.fullmatch(kind, text), f"{child.tag}: {text!r}"
        elif kind is not None:
            assert len(text.encode()) <= kind, f"{child.tag} is too long: it would be ignored"


def values(node, path):
    """Return the texts of all elements at a path, without white space around them."""
    return [(found.text or "").strip() for found in node.findall(path)]


def value(node, path, default=""):
    return next(iter(values(node, path)), default)


def read_key(text):
    """Read a public key: modulus and exponent [WIRE 8.1]."""
    bits, digits = text.split(None, 1)
    digits = "".join(digits.split()).rstrip(".")
    assert bits.isdigit() and len(digits) == 512
    return int(digits[:256], 16), int(digits[256:], 16)


def is_signed(text, signature, key):
    """Verify a signature as the client does: bare RSA over the MD5's digits [WIRE 8.2]."""
    n, e = read_key(key)
    digits = "".join(signature.split())
    assert digits.endswith("."), "a signature ends with a dot"
    size = (n.bit_length() + 7) // 8
    block = b"\0\1" + b"\xff" * (size - 35) + b"\0" + text.encode()
    return pow(int(digits[:-1], 16), e, n) == int.from_bytes(block, "big")


# ---- 2. Requests as they were recorded -----------------------------------------


class Sent:
    """A recorded request: its bytes, and what a glance at its lines tells."""

    def __init__(self, body):
        self.body, self.text = body, body.decode("latin-1")
        self.user = self.one("authenticator")
        self.hostid, self.seqno = int(self.one("hostid", 0)), int(self.one("rpc_seqno", 0))
        self.cpid, self.ncpus = self.one("host_cpid"), int(self.one("p_ncpus", 1))
        self.wants = self.one("cpu_req_secs", 0) != 0 and float(self.one("cpu_req_secs", 0))
        self.instances = float(self.one("cpu_req_instances", 0))
        self.platforms = self.all(r"<(?:platform_name|alt_platform>\s*<name)>(.*?)<")
        found = self.all(r"<code_sign_key>\n(.*?)\n</code_sign_key>")
        self.key = found[0] if found else ""
        self.results = [(name, int(state), int(status)) for name, status, state in self.all(
            r"^<result>\s*<name>(.*?)</name>.*?<exit_status>(.*?)<.*?<state>(.*?)<")]
        self.reported = [name for name, _, _ in self.results]
        self.listed = self.all(r"<other_result>\s*<name>(.*?)<")
        self.messages = self.all(r"<msg_from_host>\s*<result_name>(.*?)<")
        self.sticky = self.all(r"<file_info>\s*<name>([^<]*)</name>\s*<nbytes>[^<]*</nbytes>\s*"
                               r"<status>")

    def all(self, pattern):
        return re.findall(pattern, self.text, re.S | re.M)

    def one(self, name, default=""):
        return next(iter(self.all(f"<{name}>(.*?)</{name}>")), default)

    def holding(self, key):
        """Return this request from a client that holds another signing key, if it holds one."""
        return Sent(self.body.replace(self.key.encode(), key.encode()) if self.key else self.body)


def check_reply(text, sent, key, now, base):
    """Hold that a reply is one that the client takes whole; return its root.

    `key` is the public key of the project.
    """
    root = read(text)
    check_elements(root, REPLY)
    assert all(node.get("priority") in ("low", "notice") for node in root.findall("message"))
    assert all(0 < len(text) and "Traceback" not in text for text in values(root, "message"))
    assert value(root, "master_url") == base + "/" and root.find("dont_use_dcf") is not None
    check_identity(root, sent, key)
    names = values(root, "result_ack/name")
    assert sorted(names) in ([], sorted(sent.reported)), "all reports of a request, or none"
    aborts = values(root, "result_abort/name") + values(root, "result_abort_if_not_started/name")
    assert set(aborts) <= set(sent.listed) and len(aborts) == len(set(aborts))
    assert set(values(root, "delete_file_info")) <= set(sent.sticky)
    assert sent.messages or root.find("message_ack") is None
    if root.find("project_is_down") is not None:
        assert not names and not root.findall("result"), "the client would not read them"
    check_files(root, sent.key or value(root, "code_sign_key"), base)
    check_jobs(root, sent, now)
    check_trickles(text, root, sent)
    return root


def check_identity(root, sent, key):
    """Hold that host id and key are told if they must be, and only then [WIRE 7.2, 8.3]."""
    hostid = value(root, "hostid")
    assert hostid != str(sent.hostid), "sent again, the client would rename itself"
    if root.find("userid") is None:
        assert not hostid and not root.findall("result_ack")
        return
    assert sent.hostid or hostid, "a new client must learn its id"
    told, signature = value(root, "code_sign_key"), value(root, "code_sign_key_signature")
    if sent.key:
        assert bool(told) == bool(signature)
        assert not told or is_signed(hashlib.md5(told.encode()).hexdigest(), signature, sent.key)
    else:
        assert told == key and not signature


def check_files(root, key, base):
    """Hold that each file is described once, and so that it can be fetched or uploaded."""
    signed = {name for name in values(root, "app_version/file_ref/file_name")}
    names = values(root, "file_info/name")
    assert len(names) == len(set(names))
    assert set(names) == signed | set(values(root, "workunit/file_ref/file_name")) \
        | set(values(root, "result/file_ref/file_name")), "files and references"
    for file in root.findall("file_info"):
        name = value(file, "name")
        if file.find("max_nbytes") is not None:
            assert file.find("url") is None, "it would be taken for a download"
            assert values(file, "upload_url")[0].startswith(base + "/")
            continue
        assert value(file, "url") == f"{base}/download/{name}"
        assert value(file, "nbytes") and value(file, "md5_cksum"), "the client shall check it"
        assert (name in signed) == (file.find("file_signature") is not None)
        if name in signed:
            assert is_signed(value(file, "md5_cksum"), value(file, "file_signature"), key)


def check_jobs(root, sent, now):
    """Hold that jobs are complete and refer to each other within the reply [WIRE 7.3]."""
    for kind in ("app", "workunit", "result"):
        names = values(root, f"{kind}/name")
        assert len(names) == len(set(names)), kind
    for version in root.findall("app_version"):
        mains = [ref for ref in version.findall("file_ref") if ref.find("main_program") is not None]
        assert len(mains) == 1
        (file,) = [f for f in root.findall("file_info")
                   if value(f, "name") == value(mains[0], "file_name")]
        assert file.find("executable") is not None
        assert value(version, "app_name") in values(root, "app/name")
        assert value(version, "platform") in sent.platforms
        assert float(value(version, "api_version", "0").split(".")[0]) >= 6, "messages by a file"
        assert float(value(version, "flops")) > 0 and float(value(version, "avg_ncpus")) > 0
    for unit in root.findall("workunit"):
        assert value(unit, "app_name") in values(root, "app/name")
        assert 0 < float(value(unit, "rsc_fpops_est")) <= float(value(unit, "rsc_fpops_bound"))
        assert unit.findall("file_ref"), "an input"
    units = {value(unit, "name"): value(unit, "app_name") for unit in root.findall("workunit")}
    versions = {version_of(v, value(v, "app_name")) for v in root.findall("app_version")}
    for result in root.findall("result"):
        assert version_of(result, units[value(result, "wu_name")]) in versions
        assert int(value(result, "report_deadline")) > now
        assert value(result, "name") not in sent.reported + sent.listed
        assert all(ref.find("copy_file") is not None for ref in result.findall("file_ref"))


def version_of(node, app):
    return (app, *(value(node, name) for name in ("platform", "version_num", "plan_class")))


def check_trickles(text, root, sent):
    """Hold that messages for jobs are told line by line, to jobs that the client has [WIRE 13]."""
    blocks = re.findall(r"^<trickle_down>\n(.*?)^</trickle_down>$", text, re.S | re.M)
    assert len(blocks) == len(root.findall("trickle_down"))
    marks = []
    for block in blocks:
        assert re.fullmatch(r"<result_name>[^<\n]+</result_name>\n<time>[0-9]+</time>\n"
                            r"<text>\n([^<]*\n)?</text>\n", block)
        marks.append(re.findall(">(.*)</(?:result_name|time)>", block))
        assert marks[-1][0] in sent.listed
    assert all(marks.count(mark) == 1 for mark in marks), "they become files of the same name"


@needs_recordings
@pytest.mark.parametrize("case", CASES)
def test_the_tables_know_what_the_real_server_says(case):
    """Else a wrong table would let wrong replies pass."""
    check_elements(real_reply(case), {**REPLY, "trickle_down*": None})


# ---- 3. Captured requests ------------------------------------------------------

WORKER = '''"""worker: what the captured clients worked on."""

min_quorum = 1
rsc_fpops_est = 1e9


def workunit(i):
    return None


def compute(input):
    return input


def trickle(workunit, text):
    return "<heard> & " + text
'''
LEFT = 12  # workunits that wait for a client
WHO = "Tom & <Ann>"
BASE = "http://grid.example:8080"


@pytest.fixture(scope="module")
def boinc(plugins):
    (found,) = [p for p in m.plugins if p.__name__ == "minigrid_plugin_boinc"]
    return found


@pytest.fixture(scope="module")
def keys(boinc, tmp_path_factory):
    """The signing keys of the project, drawn once."""
    return m.plugged("open_boinc_keys")[-1](tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def captured_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("captured")


@pytest.fixture
def scheduler(boinc, keys, monkeypatch):
    """The module of the scheduler with keys, on whatever project is open."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for name, known in (("keys", keys), ("settings", boinc.scheduler.Settings())):
        monkeypatch.setattr(boinc.scheduler, name, known)
    return boinc.scheduler


@pytest.fixture
def captured(captured_folder, scheduler):
    """An open project with the application `worker`."""
    with make.project(captured_folder, {"worker": WORKER}, stock=0, min_sendwork_interval=0,
                      delete_delay=WEEK):
        yield scheduler


def insert_host(sent, hostid, **fields):
    """Make the user and the host of a request, as after the one before it."""
    user, _ = m.User.get_or_create(authenticator=sent.user, defaults=dict(create_time=5, name=WHO))
    given = dict(id=hostid, user=user, create_time=6, host_cpid=sent.cpid,
                 rpc_seqno=max(sent.seqno - 1, 0), p_ncpus=sent.ncpus)
    m.Host.insert(**{**given, **fields}).execute()
    return user


def insert(name, app, now, host=None, before=(4, 0, 0, 0, 0), **fields):
    """Make a result with its workunit: `before` are its states, numbered as in the recordings."""
    wu, _ = m.Workunit.get_or_create(name=name.rpartition("_")[0], defaults={**dict(
        app=app.id, create_time=now - 100, transition_time=now - 10 + WEEK, delay_bound=WEEK,
        min_quorum=1, target_nresults=1,
        input_files=[m.file_entry(f"in_{name}", b"input")]), **fields})
    states = dict(zip(("server_state", "outcome", "client_state", "exit_status", "validate_state"),
                      before))
    held = dict(host=host.id, user=host.user, app_version=app.versions[0].id, sent_time=now - 10,
                report_deadline=now - 10 + wu.delay_bound) if host else {}
    over = dict(received_time=now - 5) if before[0] == 5 and before[1] != 4 else {}
    m.Result.insert(workunit=wu, app=app.id, name=name, create_time=now - 100,
                    **states, **held, **over).execute()


def lay_out(sent, known=True):
    """Make a state in which a captured request makes sense: host, its jobs, work that is left."""
    app = m.apps["worker"]
    if sent.hostid and known:
        insert_host(sent, sent.hostid)
        host = m.Host.get_by_id(sent.hostid)
        for name in sent.reported + sent.listed:
            insert(name, app, NOW, host)
            m.store_file("download", f"in_{name}", b"input")
    elif known:
        m.User.create(authenticator=sent.user, create_time=5, name=WHO)
    for number in range(LEFT):
        make.add("worker", number, NOW, min_quorum=1)


def capture(name):
    (path,) = CAPTURES.glob(f"{name}_*.request.xml")
    return Sent(path.read_bytes())


def ask(scheduler, keys, sent, now=NOW):
    """Send a request; return the reply, checked."""
    return check_reply(scheduler.answer(sent.body, now, BASE), sent, keys.public, now, BASE)


def check_amount(root, sent, held):
    """Hold that a client got as much as it asked for, no more, unless there is no more for it."""
    units = {value(u, "name"): float(value(u, "rsc_fpops_est")) for u in root.findall("workunit")}
    flops = float(value(root, "app_version/flops", "1"))
    given = [units[value(r, "wu_name")] / flops for r in root.findall("result")]
    first = sent.hostid == 0 and sent.wants == 1
    tasks = max(min(sent.ncpus if first else sent.instances, sent.ncpus), 1)
    most = min(LEFT, 8 * sent.ncpus, 16 * sent.ncpus - held)
    needed = max(tasks, math.ceil(sent.wants / given[0])) if given else 0
    assert len(given) == min(needed, most) > 0, "work"


@needs_recordings
@pytest.mark.parametrize("case", CAPTURED)
def test_a_captured_request_gets_a_sensible_reply(captured, keys, case):
    sent = Sent((CAPTURES / f"{case}.request.xml").read_bytes()).holding(keys.public)
    lay_out(sent, known=case != "32_unknown_authenticator")
    root = ask(captured, keys, sent)
    if case == "32_unknown_authenticator":
        assert root.find("message").get("priority") == "notice" and not root.findall("userid")
        assert float(value(root, "request_delay")) >= 3600 and not root.findall("result")
        return
    assert value(root, "user_name") == WHO
    assert sorted(values(root, "result_ack/name")) == sorted(sent.reported)
    assert (root.find("message_ack") is not None) == bool(sent.messages)
    assert values(root, "delete_file_info") == sent.sticky, "nothing here needs them"
    assert not root.findall("result_abort"), "all jobs are wanted"
    if sent.wants:
        check_amount(root, sent, len(sent.listed))
    else:
        assert not root.findall("result") and not root.findall("message")
    for name, state, status in sent.results:
        r = make.result(name)
        assert (r.server_state, r.outcome) == (5, 1 if (state, status) == (5, 0) else 3), name
        assert (r.client_state, r.exit_status) == (state, status)
        assert r.stderr_out == "" if r.outcome == 1 else r.stderr_out or "stderr_txt" not in case
    assert {make.result(name).server_state for name in sent.listed} <= {4}
    assert m.plugged("violations")[0]() == []


@needs_recordings
@pytest.mark.parametrize("case", [c for c in CAPTURED if b"<code_sign_key>" in
                                  (CAPTURES / f"{c}.request.xml").read_bytes()])
def test_a_client_with_another_key_byte_for_byte(captured, keys, case):
    """It could not check our files: its reports are taken, and it is told, but gets no work."""
    sent = Sent((CAPTURES / f"{case}.request.xml").read_bytes())
    lay_out(sent)
    root = ask(captured, keys, sent)
    assert sorted(values(root, "result_ack/name")) == sorted(sent.reported)
    assert not root.findall("result") and not root.findall("code_sign_key")
    assert any("key" in node.text for node in root.findall("message")
               if node.get("priority") == "notice")


@needs_recordings
@pytest.mark.parametrize("name", ["19", "26"])
def test_a_report_that_comes_again_is_acknowledged_and_changes_nothing(captured, keys, name):
    """The reply was lost, the client was stopped."""
    sent = capture(name).holding(keys.public)
    lay_out(sent)
    ask(captured, keys, sent)
    told = m.Result.select().where(m.Result.name.in_(sent.reported)).order_by(m.Result.id).dicts()
    before = list(told.clone())
    root = ask(captured, keys, sent, NOW + 60)
    assert sorted(values(root, "result_ack/name")) == sorted(sent.reported)
    assert list(told.clone()) == before


@needs_recordings
def test_a_client_with_a_former_key_is_led_to_the_new_one(captured, boinc, tmp_path, monkeypatch):
    """Captures 33 and 34: its next request has the new key, and may get work."""
    keys = m.plugged("open_boinc_keys")[-1](tmp_path / "keys")
    monkeypatch.setattr(captured, "keys", keys)
    sent = capture("33").holding(keys.public)
    keys.change()
    lay_out(sent)
    root = ask(captured, keys, sent)
    assert value(root, "code_sign_key") == keys.public and not root.findall("result")
    root = ask(captured, keys, capture("33").holding(keys.public), NOW + 60)
    assert not root.findall("code_sign_key") and root.findall("result")


@needs_recordings
def test_trickles_are_heard_once_and_answered(captured, keys):
    """Captures 20 and 21: the first of the two messages of 21 is that of 20, not acknowledged."""
    first, again = capture("20").holding(keys.public), capture("21").holding(keys.public)
    lay_out(first)
    root = ask(captured, keys, first)
    assert root.find("message_ack") is not None and not root.findall("trickle_down")
    m.run_pass(NOW + 1)
    root = ask(captured, keys, again, NOW + 2)
    assert values(root, "trickle_down/text") == ["<heard> & hello_from_app"]
    m.run_pass(NOW + 3)
    root = ask(captured, keys, again, NOW + 4)
    assert values(root, "trickle_down/text") == ["<heard> & second"]


@needs_recordings
def test_a_client_that_attached_again_is_the_host_it_was(captured, keys):
    """Capture 25, one of several on its machine: what it held may be another's and is left."""
    sent = capture("25")
    insert_host(sent, 7, rpc_seqno=9)
    insert("l1_0", m.apps["worker"], NOW, m.Host.get_by_id(7))
    root = ask(captured, keys, sent)
    assert value(root, "hostid") == "7"
    assert make.result("l1_0").server_state == 4
    assert m.Host.get_by_id(7).rpc_seqno == 0


@needs_recordings
def test_the_jobs_of_a_project_that_was_reset_are_sent_again(captured, keys):
    """Capture 22: the host id stays, the jobs are silently gone."""
    sent = capture("22").holding(keys.public)
    insert_host(sent, sent.hostid)
    insert("l1_0", m.apps["worker"], NOW, m.Host.get_by_id(sent.hostid))
    root = ask(captured, keys, sent)
    assert values(root, "result/name") == ["l1_0"]


@needs_recordings
def test_three_clients_of_one_machine_are_three_hosts(captured, keys):
    """Captures 41 to 43; all say the same of their computer."""
    lay_out(capture("41"))
    roots = [ask(captured, keys, capture(name)) for name in ("41", "42", "43")]
    assert len({value(root, "hostid") for root in roots}) == 3
    names = sum((values(root, "result/name") for root in roots), [])
    assert len(names) == len(set(names)) == LEFT


@needs_recordings
def test_a_new_host_id_is_used_with_a_new_cpid(captured, keys):
    """Captures 27 and 28: the count of requests went back, as in a copied directory."""
    sent = capture("27").holding(keys.public)
    insert_host(sent, sent.hostid, rpc_seqno=9)
    told = value(ask(captured, keys, sent), "hostid")
    assert int(told) not in (0, sent.hostid)
    other = capture("28").holding(keys.public)
    used = Sent(other.body.replace(b"<hostid>99<", f"<hostid>{told}<".encode()))
    assert ask(captured, keys, used, NOW + 9).find("hostid") is None
    assert m.Host.get_by_id(int(told)).host_cpid == other.cpid != sent.cpid


@needs_recordings
def test_preferences_go_on_to_the_users_other_computers(captured, keys):
    """Capture 29 brings them, capture 41 has none yet."""
    sent = capture("29").holding(keys.public)
    lay_out(sent)
    m.User.update(email_addr="t@example.org").execute()  # They name it, as an MD5.
    assert ask(captured, keys, sent).find("global_preferences") is None, "it has them"
    told = ask(captured, keys, capture("41")).find("global_preferences")
    (brought,) = sent.all("</working_global_preferences>.*?(<global_preferences>.*?"
                          "</global_preferences>)")
    assert leaves(told) == leaves(ElementTree.fromstring(brought)) != []


def leaves(node):
    return [(leaf.tag, leaf.text.strip()) for leaf in node.iter() if not len(leaf)]


# ---- 4. Dialogues with the real server -----------------------------------------


def real_reply(case):
    """Return the root of a real reply, without what only a lenient reader takes.

    Its rss_feeds hold a bare &; each workunit has two command lines, of which the last one counts.
    """
    text = (REPLIES / f"{case}.reply.xml").read_text()
    text = re.sub(r"<command_line>\s*</command_line>", "", text)
    return ElementTree.fromstring(re.sub("(?s)<rss_feeds>.*?</rss_feeds>", "<rss_feeds/>", text))


@dataclasses.dataclass
class Case:
    """A recorded dialogue: what was sent, what came back, the host's rows afterwards."""

    name: str

    def __post_init__(self):
        context = (REPLIES / f"{self.name}.context.txt").read_text()
        self.sent = Sent((REPLIES / f"{self.name}.request.xml").read_bytes())
        self.reply = real_reply(self.name)
        date = re.search("^Date: (.* GMT)$", context, re.M)[1]
        self.now = calendar.timegm(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT"))
        self.rows = {name: tuple(map(int, numbers.split(", "))) for name, numbers in re.findall(
            r"^  \(\d+, '(\w+)', ((?:\d+, ){4}\d+), \d+\)", context, re.M)}
        self.host = next(iter(re.findall(r"^host: \(\((\d+), (\d+), (\d+), '(\w+)'", context,
                                         re.M)), None)
        self.given = set(values(self.reply, "result/name"))

    @property
    def number(self):
        return self.name[:2]


TASK = dict(rsc_fpops_est=3.6e12, rsc_fpops_bound=3.6e15, rsc_memory_bound=1e8, rsc_disk_bound=1e8,
            delay_bound=WEEK, command_line="-cpu_time 30", input_files=[
                {"name": "bench_in", "md5": "06bb1666d945d3177818594a82964c0a", "sha256": "0" * 64,
                 "nbytes": 12, "open_name": "in", "sticky": True}])
PROGRAM = "example_app_1.0_x86_64-pc-linux-gnu.sh"


@pytest.fixture(scope="module")
def bench_folder(tmp_path_factory):
    """The application of the recorded project: a native program for one platform."""
    folder = tmp_path_factory.mktemp("bench")
    version = folder / "example_app" / "versions" / "x86_64-pc-linux-gnu"
    version.mkdir(parents=True)
    (version / PROGRAM).write_bytes(b"#!/bin/sh\ncp in out\n")
    (version / "version.ini").write_text("[version]\nboinc_api = yes\n")
    return folder


@pytest.fixture
def bench(bench_folder, scheduler):
    """The open project of the recordings, without rows."""
    (bench_folder / "example_app" / "app.py").write_text(
        '"""Example Application"""\n\n\ndef workunit(i):\n    return None\n')
    with make.project(bench_folder, {}, name="Bench project", stock=0, request_delay=0,
                      min_sendwork_interval=0, max_wus_to_send=2):
        m.project.errors.clear()
        yield scheduler


SETTINGS = {  # case: what its note and its rows say of config.xml then
    "26": dict(max_wus_to_send=10), "30": dict(min_sendwork_interval=30),
    "32": dict(max_wus_in_progress=1)}
OTHERS_RESULT = "refB_0_1"  # of HOST#1006 of USER#2003, in case 21


def restore(case, boinc):
    """Bring the store into the state before a recorded request, from the rows after it."""
    app, sent = m.apps["example_app"], case.sent
    if case.host:
        restore_host(case, boinc)
    host = m.Host.get_or_none(id=int(case.host[0])) if case.host else None
    for name, after in case.rows.items():
        before, holder = after, host
        if name in case.given and case.number != "11":
            before, holder = (2, 0, 0, 0, 0), None
        elif name in sent.reported or after[1] == 7:  # It was detached just now.
            before = (4, 0, 0, 0, 0)
        insert(name, app, case.now, before=before, host=holder, **TASK)
        if name in case.given:  # Which of equally urgent ones goes first is free.
            m.Result.update(priority=1).where(m.Result.name == name).execute()
    if case.number == "21":
        m.User.insert(id=2003, authenticator="other", create_time=5, name="other").execute()
        m.Host.insert(id=1006, user=2003, create_time=5).execute()
        insert(OTHERS_RESULT, app, case.now, m.Host.get_by_id(1006), **TASK)
    for n in range(0 if case.number == "22" else 40):
        insert(f"more_{n}_0", app, case.now, before=(2, 0, 0, 0, 0), **TASK)
    make.settings(**SETTINGS.get(case.number, {}))


def restore_host(case, boinc):
    """Make user and host as the recorded reply describes them."""
    hostid, userid, seqno, domain = case.host
    known = {**USER_2002, **{node.tag: (node.text or "").strip() for node in case.reply}}
    key = case.sent.user if case.number not in ("03", "04") else "known"
    m.User.insert(
        id=int(userid), authenticator=key, create_time=int(known["user_create_time"]),
        name=f"user{userid}", email_addr=f"user{userid}@example.org",
        total_credit=float(known["user_total_credit"]),
        expavg_credit=float(known["user_expavg_credit"]), expavg_time=case.now).execute()
    boinc.scheduler.BoincUser.insert(
        user=int(userid), cross_project_id=known["cross_project_id"]).execute()
    if case.number == "01":  # Before it there is another host: the next one is this.
        m.Host.insert(id=int(hostid) - 1, user=int(userid), create_time=5, host_cpid="x").execute()
        return
    m.Host.insert(
        id=int(hostid), user=int(userid), create_time=int(known["host_create_time"]),
        host_cpid=case.sent.cpid, domain_name=domain, p_ncpus=4,
        rpc_seqno=max(min(case.sent.seqno - 1, int(seqno)), 0), expavg_time=case.now,
        total_credit=float(known["host_total_credit"]),
        expavg_credit=float(known["host_expavg_credit"])).execute()


USER_2002 = dict(user_create_time=1795221913, host_create_time=1795221954, user_total_credit=0,
                 user_expavg_credit=0, host_total_credit=0, host_expavg_credit=0,
                 cross_project_id="498fcf62b5e7b912612b23f4b999a779")


def prepare(case, boinc, monkeypatch):
    """Do what was done to the real server before one of its requests."""
    if case.number == "15":
        (trickles,) = [p for p in m.plugins if p.__name__ == "minigrid_plugin_trickles"]
        trickles.MsgToHost.create(
            create_time=int(value(case.reply, "trickle_down/time")), host=int(case.host[0]),
            result=make.result("refA_16_0"), text="slow down")
    if case.number == "16":
        m.Workunit.update(error_mask=m.ErrorMask.CANCELLED).where(
            m.Workunit.name == "refA_16").execute()
    if case.number == "30":  # 18 of 30 s are left.
        m.Host.update(work_time=case.now - 12).execute()
    if case.number == "33":
        monkeypatch.setattr(boinc.scheduler, "settings",
                            boinc.scheduler.Settings(min_client_version="8.4.0"))
    if case.number == "36":
        (m.project.data / "paused").write_text("down for maintenance")
    if case.number == "37":
        def broken(writer, function):
            raise m.StoreError("the disk is away")
        monkeypatch.setattr(m.Writer, "__call__", broken)


# How each element is compared. `equal`: the same texts, those of jobs job by job. `number`: the
# same numbers. `presence`: there or not in both. `at least`: where it is there, too, with the same
# text. `default`: there with the default, here left out. `ours`: never there, and here why. `left
# out`: not compared.
TABLE = {
    "scheduler_version": ("left out", "the client only logs it"),
    "dont_use_dcf": ("left out", "there in all but refusals; here always: it is reset by its "
                                 "absence [WIRE 7.2]; check_reply() holds that"),
    "master_url": ("at least", "here in every reply, also while the project is down"),
    "project_name": ("at least", "the same"),
    "request_delay": ("delay", "nothing, seconds, an hour or a day: the very number is ours"),
    "message": ("message", "texts are ours; MESSAGES says which mean the same"),
    "project_is_down": ("presence", ""),
    "userid": ("equal", ""), "user_name": ("equal", ""), "user_create_time": ("equal", ""),
    "host_create_time": ("equal", ""),
    "user_total_credit": ("number", ""), "user_expavg_credit": ("number", ""),
    "host_total_credit": ("number", ""), "host_expavg_credit": ("number", ""),
    "email_hash": ("presence", "of an address that was not recorded"),
    "cross_project_id": ("equal", ""),
    "external_cpid": ("presence", "made with that address"),
    "hostid": ("equal", "only where it differs from the request's"),
    "host_venue": ("default", "no locations here; an empty one would reset the user's [WIRE 17]"),
    "team_name": ("default", "no teams here"),
    "gui_urls": ("presence", "each has its own pages"),
    "rss_feeds": ("left out", "no news feed here"),
    "result_ack": ("names", ""), "result_abort": ("names", ""),
    "result_abort_if_not_started": ("names", ""),
    "message_ack": ("presence", ""),
    "trickle_down/result_name": ("equal", ""), "trickle_down/time": ("equal", ""),
    "trickle_down/text": ("equal", ""),
    "app/name": ("equal", ""), "app/user_friendly_name": ("equal", ""),
    "app/non_cpu_intensive": ("default", ""), "app/fraction_done_exact": ("default", ""),
    "app_version/app_name": ("equal", ""), "app_version/version_num": ("equal", ""),
    "app_version/platform": ("equal", ""), "app_version/avg_ncpus": ("number", ""),
    "app_version/flops": ("number", ""),
    "app_version/api_version": ("ours", "jobs and client talk through a file [WIRE 11.4]"),
    "app_version/file_ref": ("left out", "one, the main program: check_reply() holds that"),
    "program/name": ("left out", "here with a sum in it: new content, new name [WIRE 17]"),
    "program/url": ("left out", "check_reply() holds that it is one"),
    "program/executable": ("presence", ""), "program/nbytes": ("equal", ""),
    "program/file_signature": ("presence", "by another key; check_reply() verifies it"),
    "program/md5_cksum": ("ours", "says no more than the signature, and no less"),
    "input/name": ("equal", ""), "input/md5_cksum": ("equal", ""), "input/nbytes": ("equal", ""),
    "input/sticky": ("presence", ""),
    "input/url": ("left out", "check_reply() holds that it is one"),
    "input/no_delete": ("left out", "obsolete [WIRE 7.4]"),
    "workunit/name": ("equal", ""), "workunit/app_name": ("equal", ""),
    "workunit/rsc_fpops_est": ("number", ""), "workunit/rsc_fpops_bound": ("number", ""),
    "workunit/rsc_memory_bound": ("number", ""), "workunit/rsc_disk_bound": ("number", ""),
    "workunit/command_line": ("equal", ""),
    "workunit/file_ref": ("equal", "but copy_file: theirs are opened by BOINC's library"),
    "result/name": ("equal", ""), "result/wu_name": ("equal", ""),
    "result/report_deadline": ("equal", ""), "result/platform": ("equal", ""),
    "result/version_num": ("equal", ""), "result/plan_class": ("equal", ""),
    "result/report_immediately": ("ours", "a setting"),
    "result/file_ref": ("left out", "names of outputs have a random part there"),
    "output/name": ("left out", "random part"), "output/generated_locally": ("presence", ""),
    "output/upload_when_present": ("left out", "obsolete"),
    "output/max_nbytes": ("left out", "from a template there, here rsc_disk_bound"),
    "output/url": ("left out", "here upload_url, which cannot be mistaken [WIRE 17]"),
    "output/upload_url": ("ours", "see url"),
    "output/xml_signature": ("ours", "config.xml had dont_generate_upload_certificates"),
}
AGREED = {  # (case, element): how it is compared there instead, and why
    ("01", "tasks"): (4, "the first request means one for each processor [WIRE 7.5]"),
    ("24", "tasks"): (4, "the same: it comes back as new"),
    ("11", "tasks"): (8, "all seven that were lost come again at once, there two in a reply; and "
                         "one more, up to max_wus_to_send for each processor: it asked for weeks"),
    ("11", "result/report_deadline"): ("left out", "made anew there; a job that is sent again is "
                                                   "due when it was due [C43]"),
    ("12", "request_delay"): ("left out", "a day there, an hour here: a small project may soon "
                                          "have a program for that platform, too"),
    ("13", "request_delay"): ("left out", "the same: here both cases are one"),
    ("37", "project_is_down"): ("left out", "here the store cannot be written: what was recorded "
                                            "already is acknowledged, and that would be lost"),
    ("37", "request_delay"): ("left out", "a minute here, an hour there: a full disk is looked "
                                          "after, and nobody is told twice"),
}
MESSAGES = {  # case: (words there, words here, priority here); nothing: none
    "03": ("account key", "account key", "notice"),  # low there, but only a person can mend it
    "04": ("account key", "account key", "notice"),
    "07": ("", "no_such_job_17_0 is not known", "low"),
    "10": ("no longer usable", "", ""),  # The client itself says that it ends a job.
    "11": ("Resent lost task", "", ""),  # and which tasks it gets
    "12": ("support computers of type", "no application here runs on your computer", "notice"),
    "13": ("No tasks sent", "no application here runs on your computer", "notice"),
    "16": ("no longer usable", "", ""),
    "21": ("", "refB_0_1 was never sent to you", "low"),
    "22": ("no tasks available", "there is none at the moment", "low"),
    "30": ("wait 18 seconds", "in 18 s", "low"),
    "32": ("limit on tasks in progress", "the limit here", "low"),
    "33": ("too old", "needs BOINC 8.4.0 or later", "notice"),
    "34": ("no end tag", "cut off", "low"),
    "35": ("Error in request message", "no scheduler request", "low"),
    "36": ("maintenance", "maintenance", "low"),
    "37": ("Server error", "problem on its side", "notice"),
}


def delay_class(node):
    """Say how long a client is asked to wait."""
    seconds = float(value(node, "request_delay", "0"))
    return next(text for limit, text in (
        (0, "nothing"), (120, "seconds"), (3600, "an hour"), (86400, "a day")) if seconds <= limit)


def same_message(case, theirs, ours):
    there, here, priority = MESSAGES.get(case, ("", "", ""))
    told = [(node.get("priority"), node.text) for node in ours.findall("message")]
    assert bool(there) == bool(theirs.findall("message"))
    assert not there or any(there in text for text in values(theirs, "message")), "a wrong table"
    assert bool(here) == bool(told), told
    assert all(p == priority and here in text for p, text in told), told


def compare(how, path, theirs, ours):
    """Hold that two nodes agree in one element, in the way that the table says."""
    there, here = values(theirs, path), values(ours, path)
    if how == "equal":
        assert here == there, path
    elif how == "number":
        assert list(map(float, here)) == pytest.approx(list(map(float, there)), abs=1e-6), path
    elif how == "presence":
        assert bool(here) == bool(there), path
    elif how == "at least":
        assert here == there or not there, path
    elif how == "default":
        assert set(there) <= {"", "0"} and not here, path
    elif how == "ours":
        assert not there, f"{path}: then why not compare it?"
    elif how == "names":
        assert sorted(values(ours, f"{path}/name")) == sorted(values(theirs, f"{path}/name")), path
    elif how == "delay":
        assert delay_class(ours) == delay_class(theirs)
    else:
        assert how == "left out"


KINDS = ("app", "app_version", "workunit", "result", "file_info", "trickle_down")
NAMES = {path.split("/")[0] for path in TABLE if "/" not in path}


def same_reply(case, theirs, ours):
    """Hold that two replies agree in every element of either, and that the table knows them."""
    for tag in sorted({node.tag for root in (theirs, ours) for node in root} - set(KINDS)):
        how, _ = AGREED.get((case, tag)) or TABLE[tag]
        same_message(case, theirs, ours) if how == "message" else compare(how, tag, theirs, ours)
    there, here = objects(theirs), objects(ours)
    assert set(there) <= set(here)
    n, _ = AGREED.get((case, "tasks")) or (len(theirs.findall("result")), "")
    assert len(ours.findall("result")) == n
    for kind, name in there:
        same_object(case, kind, there[kind, name], here[kind, name])


def objects(root):
    """Return what a reply describes, under names that mean the same in both: {(kind, name)}."""
    found = {}
    for kind in KINDS[:-2]:
        for node in root.findall(kind):
            found[kind, value(node, "name") or value(node, "app_name")] = node
    inputs = set(values(root, "workunit/file_ref/file_name"))
    results = {value(node, "file_ref/file_name"): value(node, "name")
               for node in root.findall("result")}
    for node in root.findall("file_info"):
        name = value(node, "name")
        kind = "input" if name in inputs else "output" if name in results else "program"
        found[kind, "" if kind == "program" else results.get(name, name)] = node
    for node in root.findall("trickle_down"):
        found["trickle_down", value(node, "result_name")] = node
    return found


def same_object(case, kind, theirs, ours):
    """Compare two descriptions of the same thing."""
    for tag in sorted({child.tag for node in (theirs, ours) for child in node}):
        how, _ = AGREED.get((case, f"{kind}/{tag}")) or TABLE[f"{kind}/{tag}"]
        if f"{kind}/{tag}" == "workunit/file_ref":
            for name in ("file_name", "open_name"):
                assert values(theirs, f"{tag}/{name}") == values(ours, f"{tag}/{name}")
        else:
            compare(how, tag, theirs, ours)


def same_store(case):
    """Hold that the rows of the host are those of the real server afterwards."""
    for name, after in case.rows.items():
        r = make.result(name)
        states = (r.server_state, r.outcome, r.client_state, r.exit_status, r.validate_state)
        assert states == after, name
        assert after[1] == 7 or r.host_id == int(case.host[0]), name
    if case.host:
        hostid, userid, seqno, domain = case.host
        host = m.Host.get_by_id(int(hostid))
        assert (host.user_id, host.domain_name) == (int(userid), domain)
        # The real server turns away a platform before it has looked at the host, this one after.
        assert host.rpc_seqno == int(seqno) + (case.number == "12")
    if case.number == "21":
        assert make.result(OTHERS_RESULT).server_state == 4, "it is not this host's"


@needs_recordings
@pytest.mark.parametrize("name", CASES)
def test_a_dialogue_with_the_real_server(bench, boinc, keys, monkeypatch, name):
    case = Case(name)
    restore(case, boinc)
    prepare(case, boinc, monkeypatch)
    base = "http://127.0.0.1:8081/bench"
    sent = case.sent.holding(keys.public)
    body = b"" if case.number == "35" else sent.body
    reply = check_reply(bench.answer(body, case.now, base), sent, keys.public, case.now, base)
    same_reply(case.number, case.reply, reply)
    same_store(case)


@needs_recordings
def test_the_tables_name_nothing_that_does_not_occur():
    """Else a row would stay when its reason is gone."""
    assert {case for case, _ in AGREED} | set(MESSAGES) <= {case[:2] for case in CASES}
    assert {path for _, path in AGREED} - {"tasks"} <= set(TABLE)
    assert all(why for how, why in TABLE.values() if how in ("left out", "ours"))


# ---- 5. Whole HTTP messages ----------------------------------------------------


@pytest.fixture
def web(captured):
    """The project of the captures behind a socket; yields a function that sends bytes to it.

    It returns status and body, unpacked as the client does.
    """
    app = m.make_app(lambda: NOW)

    def closing(environ, start_response):
        try:
            return app(environ, start_response)
        finally:
            m.db.close()

    m.project.write.start()
    server = waitress.create_server(closing, host="127.0.0.1", port=0, threads=2, ident=None)
    thread = threading.Thread(target=make.run_until_closed, args=(server,))
    thread.start()

    def send(request):
        with socket.create_connection(("127.0.0.1", server.effective_port), PATIENCE) as connection:
            connection.sendall(request)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            body, packed = answer.read(), answer.headers.get("Content-Encoding")
        return answer.status, gzip.decompress(body) if packed == "gzip" else body

    def stop():
        for channel in list(server.active_channels.values()):
            channel.handle_close()
        server.close()

    yield send
    server.trigger.pull_trigger(stop)  # in its own thread: it must not find them closed
    thread.join(PATIENCE)
    assert not thread.is_alive()
    server.task_dispatcher.shutdown(cancel_pending=True, timeout=5)


def message(name, path="", **changes):
    """Return a captured HTTP request, to another address or with other texts if need be."""
    raw = (CAPTURES / f"http_{name}.request.txt").read_bytes()
    head, _, body = raw.partition(b"\r\n\r\n")
    if path:
        head = re.sub(rb"^(\w+) \S+", lambda found: found[1] + b" " + path.encode(), head)
    for old, new in changes.items():
        body = body.replace(old.encode(), new.encode())
    head = re.sub(b"Content-Length: [0-9]+", b"Content-Length: %d" % len(body), head)
    return head + b"\r\n\r\n" + body


def recorded(name):
    """Return status and body of a recorded HTTP reply."""
    text = (CAPTURES / f"http_{name}.reply.txt").read_text()
    return int(text.split("\n", 1)[0]), text.partition("\n\n")[2]


def scheduler_of(page):
    """Find the scheduler in a master page as the client does: line by line [WIRE 4]."""
    lines = [line[:255] for line in page.split("\n")]
    found = [match[1] for line in lines for match in [
        re.search('<link rel="boinc_scheduler" href="([^"]+)">', line)
        or re.search("<scheduler>(.*?)</scheduler>", line)] if match]
    return found[0]


@needs_recordings
def test_the_master_page_names_a_scheduler(web):
    status, page = web(message("master_page_1"))
    their_status, theirs = recorded("master_page_1")
    assert scheduler_of(theirs) == "http://127.0.0.1:8085/cgi", "the test finds what they meant"
    assert status == their_status
    assert scheduler_of(page.decode()) == "http://127.0.0.1:8085/boinc/scheduler"


@needs_recordings
def test_the_project_tells_how_it_is_joined(web):
    status, body = web(message("get_project_config_1"))
    their_status, text = recorded("get_project_config_1")
    ours, theirs = ElementTree.fromstring(body), ElementTree.fromstring(text.encode())
    assert status == their_status
    assert value(theirs, "name") == "Proto" and value(ours, "name") == m.project.settings.name
    for name in ("master_url", "web_rpc_url_base"):
        assert value(ours, name) == value(theirs, name)
    assert int(value(ours, "min_passwd_length")) >= int(value(theirs, "min_passwd_length"))
    path = "platforms/platform/platform_name"
    assert set(values(theirs, path)) <= set(values(ours, path))
    assert not ours.findall("account_creation_disabled") and value(ours, "sched_stopped") == "0"


@needs_recordings
def test_accounts_are_made_and_found(web):
    def answer(name):
        status, body = web(message(name))
        assert status == recorded(name)[0]
        return ElementTree.fromstring(body), ElementTree.fromstring(recorded(name)[1])

    ours, theirs = answer("create_account_1")
    assert ours.tag == theirs.tag == "account_out"
    assert re.fullmatch(MD5, value(ours, "authenticator"))
    assert value(answer("create_account_1")[0], "authenticator") == value(ours, "authenticator")
    (user,) = m.User.select()
    assert (user.name, user.email_addr) == ("New User", "new@example.org")
    proof = re.search(rb"passwd_hash=(\w+)", message("lookup_account_1"))[1].decode()
    other = m.plugged("create_account")[-1](NOW, "t@example.org", proof, "t")
    ours, theirs = answer("lookup_account_1")
    assert ours.tag == theirs.tag and value(ours, "authenticator") == other.authenticator
    ours, theirs = answer("lookup_account_2")
    assert ours.tag == theirs.tag and value(ours, "error_num") == value(theirs, "error_num")
    assert value(ours, "error_msg")


@needs_recordings
def test_scheduler_requests_over_http(web, captured):
    """First contact; the same host with its key; two reports."""
    path = scheduler_of(web(message("master_page_1"))[1].decode())[len("http://127.0.0.1:8085"):]
    first = Sent(message("scheduler_rpc_1"))
    m.User.create(id=2, authenticator=first.user, create_time=5, name="New User")
    for number in range(LEFT):
        make.add("worker", number, NOW, min_quorum=1)
    names = []
    for n in (1, 2, 3):
        name, key = f"scheduler_rpc_{n}", captured.keys.public
        changes = {Sent(message(name)).key: key} if n > 1 else {}
        changes.update(dict(zip(("j1_0", "j2_0"), names)) if n == 3 else {})
        raw = message(name, path, **changes)
        status, body = web(raw)
        their_status, text = recorded(name)
        theirs, sent = ElementTree.fromstring(text), Sent(raw)
        ours = check_reply(body.decode(), sent, key, NOW, "http://127.0.0.1:8085")
        assert status == their_status
        for tag in ("master_url", "userid", "user_name", "hostid"):
            assert value(ours, tag) == value(theirs, tag)
        assert len(ours.findall("result_ack")) == len(theirs.findall("result_ack"))
        assert bool(ours.findall("result")) == bool(sent.wants), "there, it had none left in 2, 3"
        names += values(ours, "result/name")
        m.Host.update(work_time=0).execute()
    assert m.Result.select().where(m.Result.server_state == 5).count() == 2


@needs_recordings
def test_uploads_over_http(web, boinc):
    sent = Sent(capture("02").body)
    insert_host(sent, 1)
    for name in ("j1_0", "j2_0"):
        insert(name, m.apps["worker"], NOW, m.Host.get_by_id(1))
        certificate = boinc.uploads.keys.certificate(f"{name}_out", 1000000)
        changes = {f"{name}_0": f"{name}_out",
                   "<xml_signature>\n": f"<xml_signature>\n{certificate}"}
        for n in {"j1_0": (1,), "j2_0": (2, 3)}[name]:
            status, body = web(message(
                f"file_upload_{n}", "/boinc/upload/file_upload_handler", **changes))
            their_status, theirs = recorded(f"file_upload_{n}")
            assert (status, body.decode().split()) == (their_status, theirs.split())
    assert make.kept("upload", "j1_0_out") == b"HELLO\n"
    assert len(make.kept("upload", "j2_0_out")) == 9000


@needs_recordings
def test_a_download_over_http(web):
    status, theirs = recorded("download_1")
    m.store_file("download", "worker_1.00.py", theirs.encode())
    assert web(message("download_1")) == (status, theirs.encode())
    m.file_path("download", "worker_1.00.py").unlink()
    assert web(message("download_1"))[0] == 404, "permanent: the next address, or an error"


@needs_recordings
def test_a_browser_at_the_schedulers_address(web, keys):
    raw = (REPLIES / "35-browser-get.request.xml").read_bytes()
    status, body = web(raw.replace(b"/bench_cgi/cgi", b"/boinc/scheduler").replace(b"\n", b"\r\n"))
    root = check_reply(body.decode(), Sent(b""), keys.public, NOW, "http://127.0.0.1:8081")
    assert status == 200 and len(root.findall("message")) == 1
