"""The scheduler RPC as BOINC clients see it: what each element of a request does [WIRE 6 7]."""

import gzip
import hashlib
import re
import sys
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path

import make
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import NOW, add, copies, dump, result, settings, units
from web import ANYTHING, Web

import minigrid as m

A, E, O, S = m.AssimilateState, m.ErrorMask, m.Outcome, m.ServerState
LINUX, WINDOWS = "x86_64-pc-linux-gnu", "windows_x86_64"
URL, BASE = "/boinc/scheduler", "http://grid.example:8080"
CAPTURES = sorted((Path(__file__).parent / "captures").glob("[0-9r]*.request.xml"))
TALK = make.NEAR + '''

def trickle(workunit, text):
    return f"{workunit.name} heard {text}"
'''


@pytest.fixture
def web(folder, monkeypatch):
    """An open project with two applications, and its web application."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    with make.project(folder, {"near": make.NEAR, "talk": TALK}, stock=0,
                      min_sendwork_interval=0):
        yield Web()
        assert not m.project.counts["server errors"]
        assert m.plugged("violations")[-1]() == []


@pytest.fixture
def rpc(web):
    """The module under test."""
    return sys.modules["minigrid_plugin_boinc.scheduler"]


def leaf(name, value):
    return f"<{name}>{value}</{name}>\n"


class Client:
    """A BOINC client's directory: writes requests as the real one, and reads replies."""

    def __init__(self, web, key="ann", cpid="", platform=LINUX):
        m.User.get_or_create(authenticator=key, defaults=dict(
            create_time=5, name=key, email_addr=f"{key}@example.org"))
        self.web, self.key, self.platform = web, key, platform
        self.cpid = cpid or f"{next(make.serial):032x}"
        self.hostid, self.seqno, self.sign_key, self.held = 0, 0, "", []

    def request(self, secs=0, reports=(), other=None, platforms=(), version=(7, 20, 5), top="",
                host="", end="</scheduler_request>\n", **more):
        """Write a request; `top` and `host` are further elements there."""
        given = dict(
            authenticator=self.key, hostid=self.hostid, rpc_seqno=self.seqno,
            core_client_major_version=version[0], core_client_minor_version=version[1],
            core_client_release=version[2], allow_multiple_clients=0, work_req_seconds=secs,
            cpu_req_secs=secs, cpu_req_instances=0, estimated_delay=0,
            platform_name=self.platform)
        given.update(more)
        lines = [leaf(*pair) for pair in given.items()]
        lines += [f"<alt_platform>\n{leaf('name', name)}</alt_platform>\n" for name in platforms]
        if self.sign_key:
            lines.append(f"<code_sign_key>\n{self.sign_key}\n</code_sign_key>\n")
        lines.append(f"<host_info>\n<host_cpid>{self.cpid}</host_cpid>\n<p_ncpus>2</p_ncpus>\n"
                     f"<p_fpops>1e9</p_fpops>\n{host}</host_info>\n{top}")
        lines += [f"<result>\n<name>{name}</name>\n<exit_status>0</exit_status>\n<state>5</state>\n"
                  f"<final_elapsed_time>1</final_elapsed_time>\n</result>\n" for name in reports]
        if other is not False:
            names = [name for name in self.held if name not in reports] if other is None else other
            lines.append("<other_results>\n" + "".join(
                f"<other_result>\n{leaf('name', name)}</other_result>\n" for name in names)
                + "</other_results>\n")
        return f"<scheduler_request>\n{''.join(lines)}{end}".encode()

    def __call__(self, secs=0, now=NOW, **more):
        """Send a request; return the reply, and do what it says."""
        self.web.now = now
        got = self.web("POST", URL, self.request(secs, **more))
        assert got.status == 200 and got.headers["Content-Type"].startswith("text/xml")
        reply = Reply(got.body)
        self.seqno += 1
        if reply.text("hostid"):
            self.hostid, self.seqno = int(reply.text("hostid")), 0
        self.sign_key = reply.text("code_sign_key").strip() or self.sign_key
        gone = reply.names("result_ack")
        self.held = [name for name in self.held + reply.jobs if name not in gone]
        return reply

    def host(self):
        return m.Host.get_by_id(self.hostid)


class Reply:
    """A reply, which must be whole and well-formed, each element within the client's room."""

    def __init__(self, body):
        self.xml = ET.fromstring(body)
        self.body = body.decode()
        assert self.xml.tag == "scheduler_reply" and "None" not in self.body
        assert len(self.xml.findall("dont_use_dcf")) == 1
        for text in re.findall(r"<message [^>]*>([^<]*)<", self.body):
            assert len(text.encode()) <= 1023
        for name in ("name", "user_name", "project_name", "user_friendly_name", "file_name"):
            for text in re.findall(f"<{name}>([^<]*)<", self.body):
                assert len(text.encode()) <= 255
        self.messages = [(e.get("priority"), e.text) for e in self.xml.findall("message")]
        self.said = "; ".join(text for _, text in self.messages)
        self.jobs = [e.findtext("name") for e in self.xml.findall("result")]
        self.check_links()

    def text(self, path):
        return self.xml.findtext(path) or ""

    def names(self, tag):
        return [e.findtext("name") for e in self.xml.findall(tag)]

    def check_links(self):
        """Hold that all that a job refers to stands in the reply, once, and complete."""
        files = {e.findtext("name"): e for e in self.xml.findall("file_info")}
        assert len(files) == len(self.xml.findall("file_info"))
        assert len(set(self.names("workunit"))) == len(self.names("workunit"))
        for tag in ("app_version", "workunit", "result"):
            for holder in self.xml.findall(tag):
                refs = [e.findtext("file_name") for e in holder.findall("file_ref")]
                assert refs and set(refs) <= set(files)
                if tag == "app_version":
                    assert len(holder.findall("file_ref/main_program")) == 1
                    assert all(len(files[n].findtext("file_signature").split()) > 2 for n in refs)
                if tag == "result":
                    assert int(files[refs[0]].findtext("max_nbytes")) > 0
        assert {e.findtext("wu_name") for e in self.xml.findall("result")} == set(
            self.names("workunit"))


@pytest.fixture
def ann(web):
    return Client(web, "ann")


def native(app, platform, plan_class="", number=1, **options):
    """Give an application a version of native files."""
    entry = m.file_entry(f"{app}_{platform}_{plan_class}_{number}", b"x%d" % number, main=True,
                         executable=True)
    row = m.AppVersion.create(app=m.apps[app].id, create_time=NOW, platform=platform,
                              version_num=number, plan_class=plan_class, files=[entry],
                              options={"boinc_api": True, **options})
    m.apps[app].versions.append(row)
    return row


# ---- 1. Hosts [WIRE 6.1 15.3] ----------------------------------------------------


HARDWARE = """<timezone>-3600</timezone><domain_name>kit&amp;chen</domain_name>
<ip_addr>10.0.0.7</ip_addr><p_vendor>Acme</p_vendor><p_model>A &lt;1&gt;</p_model>
<p_features>sse2 AVX2</p_features><p_iops>3e9</p_iops><p_membw>4e9</p_membw>
<m_nbytes>8e9</m_nbytes><m_cache>1e6</m_cache><m_swap>2e9</m_swap><d_total>1e12</d_total>
<d_free>5e11</d_free><os_name>Linux</os_name><os_version>6.1</os_version>
<product_name>Box</product_name><virtualbox_version>7.0</virtualbox_version>"""
STATS = """<time_stats><on_frac>0.5</on_frac><active_frac>0.25</active_frac></time_stats>
<net_stats><bwup>1000.5</bwup><bwdown>2000</bwdown></net_stats>
<disk_usage><d_project_share>1e9</d_project_share></disk_usage>"""


def test_a_host_is_filled_and_brought_up_to_date(ann):
    reply = ann(host=HARDWARE, top=STATS)
    host = ann.host()
    assert reply.text("hostid") == "1" and reply.text("userid") == str(host.user_id)
    assert (host.domain_name, host.p_vendor, host.p_model, host.os_name, host.os_version) == (
        "kit&chen", "Acme", "A <1>", "Linux", "6.1")
    assert (host.p_ncpus, host.p_fpops, host.m_nbytes, host.d_total, host.d_free) == (
        2, 1e9, 8e9, 1e12, 1e9)
    assert (host.on_frac, host.active_frac, host.client_version) == (0.5, 0.25, "7.20.5")
    assert host.details == {
        "p_features": "sse2 AVX2", "product_name": "Box", "virtualbox_version": "7.0",
        "p_iops": 3e9, "p_membw": 4e9, "m_swap": 2e9, "m_cache": 1e6, "n_bwup": 1000.5,
        "n_bwdown": 2000.0, "timezone": -3600}
    assert (host.rpc_seqno, host.rpc_time, host.host_cpid) == (0, NOW, ann.cpid)
    reply = ann(host="<os_name>Plan 9</os_name>", now=NOW + 7)
    assert reply.xml.find("hostid") is None  # Sent again it would make the client rename itself.
    assert (ann.host().os_name, ann.host().rpc_time, ann.host().d_free) == ("Plan 9", NOW + 7, 0)
    ann(host="<d_free>5e8</d_free>", top=STATS)
    assert ann.host().d_free == 5e8  # Its share may be more than there is.


def test_nonsense_about_a_computer_does_no_harm(ann):
    ann(host="<p_fpops>-1</p_fpops><p_ncpus>7</p_ncpus><m_nbytes>inf</m_nbytes><d_free>x</d_free>"
        "<timezone>1e9</timezone><p_iops>-2</p_iops>",
        top="<time_stats><on_frac>-1</on_frac><active_frac>9</active_frac></time_stats>")
    host = ann.host()
    assert (host.p_ncpus, host.p_fpops, host.m_nbytes, host.on_frac, host.active_frac) == (
        2, 1e9, 0, 1, 1)
    assert host.details == {"p_iops": 0}


def test_host_identity(ann, web):
    ann(), ann(), ann()
    assert (ann.hostid, ann.host().rpc_seqno) == (1, 1)
    ann.seqno += 5  # Replies were lost.
    ann()
    assert ann.hostid == 1 and ann.host().rpc_seqno == 7
    ann.cpid = "f" * 32  # Which clients do with a new host id.
    ann()
    assert ann.hostid == 1 and ann.host().host_cpid == "f" * 32
    ann.seqno = 3  # A copied directory.
    assert ann().text("hostid") == "2" and ann.host().host_cpid == "f" * 32
    bob = Client(web, "bob")
    bob.hostid = 1  # Somebody else's.
    assert bob().text("hostid") == "3" and m.Host.get_by_id(1).user.name == "ann"
    bob.hostid, bob.seqno = 1, 4  # The reply was lost: not one more host.
    assert bob().text("hostid") == "3" and m.Host.select().count() == 3
    bob.hostid = -5
    assert bob().text("hostid") == "3"


@pytest.mark.parametrize("several", [0, 1])
def test_a_client_that_comes_back_is_known_by_its_cpid(ann, web, several):
    add("near")
    ann(1)
    again = Client(web, "ann", ann.cpid)
    reply = again(allow_multiple_clients=several)
    assert reply.text("hostid") == str(ann.hostid) == "1"
    assert copies()[0].outcome == (O.INIT if several else O.CLIENT_DETACHED)
    assert reply.jobs == (["near_0_0"] if several else [])  # Lost, so sent again.
    assert Client(web, "bob", ann.cpid)().text("hostid") == "2"


def test_several_clients_on_one_machine(web):
    hosts = [Client(web, "ann")(allow_multiple_clients=1, host=HARDWARE).text("hostid")
             for _ in range(3)]
    assert hosts == ["1", "2", "3"]


def test_an_unknown_key(web):
    stranger = Client(web, "ann")
    stranger.key = "b<&b"
    before = dump()
    reply = stranger(1, reports=["near_0_0"])
    assert dump() == before
    assert reply.messages[0][0] == "notice" and "account key" in reply.said
    assert float(reply.text("request_delay")) == 3600
    assert not any(reply.xml.find(tag) is not None for tag in ("hostid", "result_ack", "userid"))


# ---- 2. Work requests [WIRE 7.5] -------------------------------------------------


WANTED = {  # what is asked of ten jobs of 100 s on two processors: how many come
    "nothing": (dict(secs=0), 0),
    "seconds": (dict(secs=250), 3),
    "instances": (dict(secs=1, cpu_req_instances=2), 2),
    "only instances": (dict(secs=0, cpu_req_instances=1, work_req_seconds=1), 1),
    "no new tasks": (dict(secs=250, dont_send_work=1), 0),
    "for a GPU only": (dict(work_req_seconds=250, cpu_req_secs=0), 0),
    "an old client that asks for all alike": (
        dict(work_req_seconds=250, cpu_req_secs=0, version=(6, 2, 1)), 3),
}


@pytest.mark.parametrize("case", WANTED)
def test_work_requests(ann, case):
    asked, n = WANTED[case]
    native("near", LINUX)
    m.apps["near"].versions = m.apps["near"].versions[-1:]
    for number in range(10):
        add("near", number, rsc_fpops_est=1e11)
    ann()
    assert len(ann(**asked).jobs) == n


def test_the_first_request_gets_one_job_for_each_processor(ann):
    for number in range(5):
        add("near", number)
    assert len(ann(1).jobs) == 2
    assert len(ann(1).jobs) == 1


def test_what_a_job_looks_like(ann):
    add("near", 3, rsc_disk_bound=5000, rsc_fpops_est=2e9, files={"tab.dat": b"table"},
        command_line="-x 1")
    reply = ann(1)
    version, wu, job = (reply.xml.find(tag) for tag in ("app_version", "workunit", "result"))
    (row,) = m.AppVersion.select().where(m.AppVersion.app == m.apps["near"].id)
    assert version.findtext("version_num") == job.findtext("version_num") == "100"
    assert version.findtext("platform") == job.findtext("platform") == LINUX
    assert version.findtext("api_version").startswith("7.")
    assert [e.findtext("open_name") for e in version.findall("file_ref")] == [
        "app.py", None, "start.py"]
    assert all((e.find("copy_file") is None) == (e.find("main_program") is not None)
               for e in version.findall("file_ref"))
    assert wu.findtext("command_line") == "python app.py -x 1"
    assert [e.findtext("open_name") for e in wu.findall("file_ref")] == ["in", "tab.dat"]
    assert float(wu.findtext("rsc_fpops_est")) == 2e9
    assert job.findtext("report_deadline") == str(NOW + 86400)
    assert job.find("report_immediately") is not None
    assert job.findtext("file_ref/open_name") == "out"
    files = {e.findtext("name"): e for e in reply.xml.findall("file_info")}
    given = files["near_3_in"]
    assert given.findtext("url") == f"{BASE}/download/near_3_in"
    assert given.findtext("md5_cksum") == hashlib.md5(b"3").hexdigest()
    assert given.findtext("nbytes") == "1" and given.find("sticky") is None
    (shared,) = [e for name, e in files.items() if name.endswith("_tab.dat")]
    assert shared.find("sticky") is not None and shared.find("file_signature") is None
    out = files["near_3_0_out"]
    assert out.findtext("max_nbytes") == "5000" and out.findtext("xml_signature").strip()
    assert "file_upload_handler" in out.findtext("upload_url")
    assert sorted(e.findtext("name").partition("_")[0] for e in reply.xml.findall("file_info")
                  if e.find("executable") is not None) == ["start"]


def test_addresses_are_those_by_which_the_client_came(web, ann):
    add("near")
    web.now = NOW
    got = web("POST", URL, ann.request(1), host="10.1.2.3:99")
    reply = Reply(got.body)
    assert reply.text("master_url") == "http://10.1.2.3:99/"
    assert {e.text.partition("/download")[0] for e in reply.xml.findall("file_info/url")} == {
        "http://10.1.2.3:99"}
    assert Reply(web("POST", URL, ann.request(), host="a b").body).xml.find("master_url") is None


def test_a_project_with_several_addresses_has_no_master_url(web, ann, monkeypatch):
    """[WIRE 4] A client that joined at another would warn its user with every reply."""
    api = sys.modules["minigrid_plugin_api"]
    assert ann().text("master_url") == "http://grid.example:8080/"
    monkeypatch.setattr(api, "own_addresses", ["http://grid.example:8080"])
    assert ann().text("master_url") == "http://grid.example:8080/", "the one it came by"
    monkeypatch.setattr(api, "own_addresses", ["http://10.1.2.3:99"])
    assert ann().xml.find("master_url") is None


def test_report_immediately_can_be_turned_off(ann, rpc, monkeypatch):
    monkeypatch.setattr(rpc, "settings", rpc.Settings(report_immediately=False))
    add("near")
    assert ann(1).xml.find("result/report_immediately") is None


def test_a_limit_is_never_below_two_minutes(ann):
    """[WIRE 7.4] The client would make twelve hours of it."""
    add("near", rsc_fpops_est=1, rsc_fpops_bound=2)
    reply = ann(1)
    speed = float(reply.text("app_version/flops"))
    assert float(reply.text("workunit/rsc_fpops_bound")) > 120 * speed


def test_names_of_applications_and_workunits_are_no_rivals(web, folder):
    """An application may be called like another one's workunit."""
    (folder / "near_1.py").write_text(make.NEAR)
    make.restart(folder, stock=0, min_sendwork_interval=0)
    ann = Client(Web())
    add("near_1", 0), add("near", 1)
    assert ann(1).jobs == ["near_1_0_0", "near_1_0"]  # The links are checked in Reply.


# ---- 3. Versions [WIRE 6, 7.4] ---------------------------------------------------


def test_platforms_with_alternates(web):
    add("near"), add("near", 1)
    m.apps["near"].versions = m.apps["talk"].versions = []
    native("near", "i686-pc-linux-gnu"), native("near", WINDOWS)
    reply = Client(web)(1, platforms=["i686-pc-linux-gnu"])
    assert reply.text("app_version/platform") == reply.text("result/platform") == \
        "i686-pc-linux-gnu"
    assert reply.text("workunit/command_line") == ""
    assert Client(web, "bob", platform=WINDOWS)(1).text("result/platform") == WINDOWS
    reply = Client(web, "cyd", platform="abacus")(1)
    assert reply.jobs == [] and "no application here runs on your computer" in reply.said


def test_python_applications_run_everywhere_but_on_android(web):
    for number in range(3):
        add("near", number, min_quorum=1)
    reply = Client(web, "ann", platform=WINDOWS)(1)
    assert reply.text("result/platform") == WINDOWS
    (main,) = [e.findtext("file_name") for e in reply.xml.findall("app_version/file_ref")
               if e.find("main_program") is not None]
    assert main.endswith(".cmd")
    assert Client(web, "bob", platform="arm-android-linux-gnu")(1).jobs == []


FITS = {  # options of a version: why a computer with 2 processors, 8 GB, avx2 cannot have it
    "nothing": ({}, ""), "features": (dict(features=["AVX2"]), ""),
    "other features": (dict(features=["avx2", "avx512f"]), "a processor with avx512f"),
    "processors": (dict(min_ncpus=2), ""), "more": (dict(min_ncpus=3), "needs 3 processors"),
    "memory": (dict(min_memory=8e9), ""), "more memory": (dict(min_memory=9e9), "9 GB of memory"),
}


@pytest.mark.parametrize("case", FITS)
def test_plan_classes_and_what_they_need(ann, case):
    options, why = FITS[case]
    add("near")
    m.apps["near"].versions = []
    native("near", LINUX, "fast", **options)
    reply = ann(1, host=HARDWARE)
    assert bool(reply.jobs) == (not why) and why in reply.said and why in ann.host().why_no_work
    if not why:
        assert reply.text("result/plan_class") == reply.text("app_version/plan_class") == "fast"


def test_processors_and_speed_of_a_version_are_told(ann):
    add("near")
    m.apps["near"].versions = []
    native("near", LINUX, "mt", ncpus=2.0, command_line="--threads 2")
    reply = ann(1)
    assert float(reply.text("app_version/avg_ncpus")) == 2
    assert float(reply.text("app_version/flops")) == 2e9
    assert reply.text("workunit/command_line") == "--threads 2"


def test_each_version_is_tried_and_the_fastest_is_kept(ann):
    settings(max_wus_in_progress=99)
    for number in range(9):
        add("near", number)
    m.apps["near"].versions = []
    slow, fast = native("near", LINUX, "slow"), native("near", LINUX, "fast")
    given = [e.findtext("plan_class") for e in ann(1).xml.findall("result")]
    assert given == ["slow", "fast"]  # Both of unknown speed: each is tried.
    rows = {row.app_version_id: row for row in m.HostAppVersion.select()}
    for version, seconds in ((slow, 3e-8), (fast, 1e-8)):
        row = rows[version.id]
        row.et_n, row.et_avg = 1, seconds
        row.save()
    assert {ann(1).text("result/plan_class") for _ in range(3)} == {"fast"}
    native("near", LINUX, "new")  # It seems slower than `fast`, by the benchmark alone.
    rows[fast.id].et_avg = 5e-10
    rows[fast.id].save()
    assert [ann(1).text("result/plan_class") for _ in range(2)] == ["new", "fast"]


def test_a_lost_result_comes_again_with_the_version_it_had(ann, web):
    add("near")
    old = native("near", LINUX, number=1)
    m.apps["near"].versions = [old]
    ann(1)
    m.apps["near"].versions = []
    native("near", LINUX, number=2)
    reply = ann(other=[])
    assert reply.jobs == ["near_0_0"] and reply.text("result/version_num") == "100"
    assert result("near_0_0").app_version_id == old.id
    assert Client(web, "bob")(1).text("result/version_num") == "200"


def test_programs_of_their_users(ann, web, rpc, monkeypatch):
    own = "".join(
        f"<app_version><app_name>{app}</app_name><version_num>{number}</version_num>"
        f"<platform>{LINUX}</platform><plan_class>{plan}</plan_class><flops>{flops}</flops>"
        f"</app_version>" for app, number, plan, flops in (
            ("near", 7, "", 1e9), ("near", 9, "mine", 2e9), ("alien", 1, "", 1e9)))
    top = f"<app_versions>{own}</app_versions>"
    ann.platform = "anonymous"
    add("near"), add("talk", 1)
    reply = ann(1, top=top, platforms=[LINUX])
    assert reply.jobs == ["near_0_0"] and reply.xml.find("app_version") is None
    assert not reply.xml.findall("file_info/file_signature")
    job = reply.xml.find("result")
    assert [job.findtext(n) for n in ("platform", "version_num", "plan_class")] == [
        LINUX, "9", "mine"]
    assert ann(other=[], top=top).jobs == ["near_0_0"]
    reply = ann(1, top="<app_versions></app_versions>")
    assert reply.jobs == [] and "app_info.xml" in reply.said
    monkeypatch.setattr(rpc, "settings", rpc.Settings(anonymous_platform=False))
    add("near", 2)
    reply = Client(web, "bob", platform="anonymous")(1, top=top)
    assert reply.jobs == [] and "programs that users bring" in reply.said


def test_what_is_not_signed_is_not_given_and_both_sides_are_told(ann, rpc, monkeypatch):
    add("near"), add("talk")
    (program, *_) = m.apps["near"].versions[0].files
    original, asked = rpc.keys.signature, []

    def signature(md5, name=""):
        asked.append(md5)
        return None if md5 == program["md5"] else original(md5, name)
    monkeypatch.setattr(rpc.keys, "signature", signature)
    reply = ann(1)
    assert reply.jobs == ["talk_0_0"]
    assert len(asked) == len(set(asked))  # Each once for a request.
    ann(reports=["talk_0_0"])
    reply = ann(1)
    assert "near: its program is not signed" in ann.host().why_no_work
    assert "near: its program is not signed" in reply.said
    assert [text for _, text in m.project.errors if "not signed" in text] == [
        "near version 1 for python is not signed: BOINC clients do not get it; "
        "run 'minigrid sign' where the private key is"]


def test_a_lost_result_whose_version_cannot_be_signed_any_more(ann, rpc, monkeypatch):
    add("near")
    ann(1)
    monkeypatch.setattr(rpc.keys, "signature", lambda md5, name="": None)
    assert ann(other=[]).jobs == []
    assert copies()[0].report_deadline == NOW - 1  # Somebody else may do it.


def test_versions_of_older_stores_have_no_sums(ann):
    add("near")
    (version,) = m.apps["near"].versions
    version.files = [{"name": "near_1.py", "sha256": "0", "nbytes": 3}]
    reply = ann(1)
    assert reply.jobs == [] and "not signed" in reply.said


# ---- 4. Reports and what is in progress ------------------------------------------


def test_acknowledgements_are_idempotent(ann, web):
    add("near"), add("near", 1)
    (mine,) = ann(1, cpu_req_instances=0, hostid=0).jobs[:1]
    bob = Client(web, "bob")
    theirs = bob(1).jobs[0]
    make.output(mine).write_text("5")
    names = [mine, theirs, "never_0_0", mine]
    for now in (NOW + 50, NOW + 60):
        reply = ann(now=now, reports=names)
        assert set(reply.names("result_ack")) == set(names)
        r, other = result(mine), result(theirs)
        assert (r.outcome, r.received_time, r.elapsed_time) == (O.SUCCESS, NOW + 50, 1)
        assert (other.server_state, other.received_time) == (S.IN_PROGRESS, 0)
        assert "never_0_0 is not known here" in reply.said


def test_an_error_is_kept_with_what_the_client_said(ann):
    add("near")
    ann(1)
    told = ("<result><name>near_0_0</name><exit_status>-186</exit_status><state>1</state>"
            "<final_cpu_time>7</final_cpu_time><stderr_out>\n<![CDATA[\n<message>bad & worse"
            "</message>]]>\n</stderr_out></result>")
    assert ann(top=told, other=[]).names("result_ack") == ["near_0_0"]
    r = copies()[0]
    assert (r.outcome, r.exit_status, r.client_state, r.cpu_time) == (O.CLIENT_ERROR, -186, 1, 7)
    assert r.stderr_out == "bad & worse"


def test_other_results(ann, web):
    for number in range(3):
        add("near", number, min_quorum=1)
    ann(1, cpu_req_instances=2), ann(1)
    m.project.write(lambda: m.plugged("cancel_workunits")[-1]([1], NOW))
    m.Workunit.update(assimilate_state=A.DONE, transition_time=m.NEVER).where(
        m.Workunit.id == 2).execute()
    reply = ann(other=["near_0_0", "near_1_0", "alien"])
    assert set(reply.names("result_abort")) == {"near_0_0", "alien"}
    assert reply.names("result_abort_if_not_started") == ["near_1_0"]
    assert reply.jobs == ["near_2_0"]
    deadline = result("near_2_0").report_deadline
    assert reply.text("result/report_deadline") == str(deadline)
    reply = ann(other=False)  # It does not say: then nothing is lost.
    assert reply.jobs == [] and not reply.names("result_abort")
    m.Workunit.update(assimilate_state=A.INIT, transition_time=0).where(
        m.Workunit.id == 2).execute()


# ---- 5. Preferences, credit, keys, sticky files ----------------------------------


def prefs(mod_time, text="<run_on_batteries>1</run_on_batteries>", email="ann@example.org"):
    mark = hashlib.md5(email.encode()).hexdigest()
    return (f"<global_preferences><mod_time>{mod_time}</mod_time>{text}</global_preferences>"
            f"<global_prefs_source_email_hash>{mark}</global_prefs_source_email_hash>")


def test_preferences_reach_the_users_other_computers(ann, web):
    assert ann(top=prefs(NOW - 9)).xml.find("global_preferences") is None
    other, bob = Client(web, "ann"), Client(web, "bob")
    found = other().xml.find("global_preferences")
    assert found.findtext("mod_time") == str(NOW - 9)
    assert found.findtext("run_on_batteries") == "1"
    assert bob().xml.find("global_preferences") is None
    # Older ones are neither kept nor, on a computer that has the same, sent.
    older = other(top=prefs(NOW - 10, "<run_on_batteries>0</run_on_batteries>"))
    assert older.text("global_preferences/run_on_batteries") == "1"
    assert other(top=prefs(NOW - 9)).xml.find("global_preferences") is None
    newer = other(top=prefs(NOW - 8, "<run_on_batteries>0</run_on_batteries>"))
    assert newer.xml.find("global_preferences") is None
    assert ann().text("global_preferences/run_on_batteries") == "0"


def test_preferences_of_somebody_else_are_not_taken(ann, web):
    ann(top=prefs(NOW - 9, email="eve@example.org"))
    assert Client(web, "ann")().xml.find("global_preferences") is None


def test_preferences_are_cleaned(ann, web):
    ann(top=prefs(NOW - 9, "<hostid>7</hostid><x>&lt;</x><cpu_usage_limit>50</cpu_usage_limit>"
                  "<venue name='home'><a></scheduler_reply>"))
    reply = Client(web, "ann")()
    assert reply.text("global_preferences/cpu_usage_limit") == "50"
    assert "scheduler_reply" not in ET.tostring(reply.xml.find("global_preferences")).decode()


def test_a_clock_ahead_does_not_rule_for_ever(ann, rpc):
    ann(top=prefs(NOW + 9e6))
    assert rpc.BoincUser.get().prefs_time == NOW


def test_credit_is_shown_as_it_is_now(ann):
    ann()
    for model in (m.User, m.Host):
        model.update(total_credit=70, expavg_credit=8, expavg_time=NOW).execute()
    reply = ann(now=NOW + 7 * 86400)
    for holder in ("user", "host"):
        assert float(reply.text(f"{holder}_total_credit")) == 70
        assert float(reply.text(f"{holder}_expavg_credit")) == pytest.approx(4)
    assert reply.text("user_create_time") == "5" and reply.text("host_create_time") == str(NOW)
    assert reply.text("email_hash") == hashlib.md5(b"ann@example.org").hexdigest()
    assert float(reply.text("request_delay")) == 5


def test_cross_project_id(ann, rpc):
    first = ann().text("cross_project_id")
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert ann(cross_project_id="not one").text("cross_project_id") == first
    assert ann(cross_project_id="a" * 32).text("cross_project_id") == "a" * 32
    assert ann().text("cross_project_id") == "a" * 32
    assert ann().text("external_cpid") == hashlib.md5(
        ("a" * 32 + "ann@example.org").encode()).hexdigest()


def test_the_key_is_told_once_and_changes_are_signed(ann, web, rpc):
    for number in range(3):
        add("near", number)
    keys = sys.modules["minigrid_plugin_keys"]
    reply = ann(1)
    assert reply.text("code_sign_key").strip() == rpc.keys.public and reply.jobs
    assert reply.xml.find("code_sign_key_signature") is None
    assert ann().xml.find("code_sign_key") is None
    old = keys.BOINC.read(ann.sign_key)
    rpc.keys.change()
    reply = ann(1)
    new = reply.text("code_sign_key").strip()
    assert new == rpc.keys.public and reply.jobs == []
    assert keys.verifies(keys.BOINC.digest_of_key(new), reply.text("code_sign_key_signature"), old)
    reply = ann(1)  # Now it has the new one, and its files are signed by that.
    program = reply.xml.find("file_info/file_signature/..")
    assert keys.verifies(program.findtext("md5_cksum"), program.findtext("file_signature"),
                         keys.BOINC.read(new))
    ann.sign_key = "1024\n" + "ab" * 256
    before = len(ann.held)
    assert before >= 2
    reply = ann(1, reports=ann.held[:1], other=[])  # What it has lost it could not check either.
    assert reply.jobs == [] and len(reply.names("result_ack")) == 1
    assert [p for p, text in reply.messages if "signing key" in text] == ["notice"]
    assert len(ann.held) == before - 1 and reply.xml.find("code_sign_key") is None


def test_a_key_that_changes_within_a_request(ann, rpc, monkeypatch):
    add("near")
    keys = sys.modules["minigrid_plugin_keys"]
    original, changes = rpc.keys.signature, []

    def signature(md5, name=""):
        if not changes:  # as the command does it, in a process of its own
            changes.append(keys.open_boinc_keys(rpc.keys.folder).change())
        return original(md5, name)
    monkeypatch.setattr(rpc.keys, "signature", signature)
    reply = ann(1)
    told = keys.BOINC.read(reply.text("code_sign_key"))
    signed = [e for e in reply.xml.findall("file_info") if e.find("file_signature") is not None]
    assert signed and all(keys.verifies(
        e.findtext("md5_cksum"), e.findtext("file_signature"), told) for e in signed)


def test_shared_files_live_as_long_as_somebody_needs_them(ann, web, folder):
    table = {"tab.dat": b"a long table"}
    for number in range(2):
        add("near", number, files=table, min_quorum=1)
    reply = ann(1)
    (name,) = [e.findtext("name") for e in reply.xml.findall("file_info")
               if e.find("sticky") is not None]
    assert reply.body.count(f"<name>{name}</name>") == 1 and len(reply.jobs) == 2
    path = m.file_path("download", name)
    kept = f"<file_info>{leaf('name', name)}<nbytes>12</nbytes><status>1</status></file_info>"
    alien = kept.replace(name, "alien_tab")
    for job, there in (("near_0_0", True), ("near_1_0", False)):
        make.output(job).write_text("5")
        ann(reports=[job], now=NOW + 50)
        for now in range(NOW + 100, NOW + 110):
            m.run_pass(now)
        assert path.exists() == there
        assert m.plugged("violations")[-1]() == []
        deleted = [e.text for e in ann(top=kept + alien).xml.findall("delete_file_info")]
        assert deleted == ["alien_tab"] + [name] * (not there)
        make.restart(folder, stock=0, min_sendwork_interval=0)
        ann.web = Web()
    assert units()[1].file_delete_state == m.FileDeleteState.DONE
    add("near", 2, files=table)  # It comes again, under the same name.
    assert path.read_bytes() == b"a long table" and name in ann(1).body


def test_many_sticky_files(ann):
    add("near", files={"tab.dat": b"needed"})
    names = [f"f{n:04}" for n in range(1200)] + [m.SharedFile.get().name]
    many = "".join(f"<file_info>{leaf('name', name)}</file_info>" for name in names)
    deleted = [e.text for e in ann(top=many).xml.findall("delete_file_info")]
    assert deleted == names[:-1]


# ---- 6. Trickles [WIRE 13] -------------------------------------------------------


def trickle(name, at, text):
    return (f"<msg_from_host>\n<result_name>{name}</result_name>\n<time>{at}</time>\n"
            f"<variety>x</variety>\n<text>\n{text}\n</text>\n</msg_from_host>\n")


def test_trickles_go_up_and_come_down_line_by_line(ann):
    add("talk")
    ann(1)
    assert ann().xml.find("message_ack") is None
    both = trickle("talk_0_0", 2, "]]> &amp;") + trickle("talk_0_0", 1, "a &lt; b")  # no order
    for _ in range(2):  # The second time because an answer was lost.
        assert ann(top=both).xml.find("message_ack") is not None
    m.run_pass(NOW + 1)
    reply = ann(now=NOW + 2)
    lines = reply.body.splitlines()
    start = lines.index("<trickle_down>")
    assert lines[start:start + 6] == [
        "<trickle_down>", "<result_name>talk_0_0</result_name>", f"<time>{NOW + 1}</time>",
        "<text>", "talk_0 heard a &lt; b", "</text>"]
    downs = reply.xml.findall("trickle_down")
    assert [e.findtext("text") for e in downs] == [
        "\ntalk_0 heard a < b\n", "\ntalk_0 heard ]]> &\n"]
    assert [e.findtext("time") for e in downs] == [str(NOW + 1), str(NOW + 2)]
    assert ann().xml.find("trickle_down") is None


# ---- 7. Trouble ------------------------------------------------------------------


def test_a_pause_acknowledges_nothing(ann):
    add("near")
    ann(1)
    before = dump()
    (m.project.data / "paused").write_text("back at <noon>\0 & not before\n")
    reply = ann(1, reports=["near_0_0"], now=NOW + 9)
    (m.project.data / "paused").unlink()
    assert reply.xml.find("project_is_down") is not None and dump() == before
    assert reply.said.startswith("back at <noon>") and not reply.names("result_ack")
    assert ann(reports=["near_0_0"]).names("result_ack") == ["near_0_0"]


def test_a_store_that_takes_nothing_acknowledges_what_it_has(ann):
    for number in range(2):
        add("near", number)
    first, second = ann(1).jobs
    ann(reports=[first])
    m.db.execute_sql("PRAGMA query_only = ON")
    try:
        reply = ann(1, reports=[first, second], other=[])
    finally:
        m.db.execute_sql("PRAGMA query_only = OFF")
    assert reply.names("result_ack") == [first] and reply.jobs == []
    assert "problem on its side" in reply.said and reply.xml.find("userid") is None
    assert float(reply.text("request_delay")) == 60


def test_a_store_that_refuses_in_the_end_tells_nothing_of_what_was_not_kept(ann, rpc, monkeypatch):
    """The commit is what fails: all was made ready by then."""
    add("near")
    original = rpc.serve

    def serve(request, now):
        assert original(request, now).hostid
        raise m.StoreError("disk full")
    monkeypatch.setattr(rpc, "serve", serve)
    before = dump()
    reply = ann(1, top=f"<file_info>{leaf('name', 'near_old')}</file_info>")
    assert dump() == before and "disk full" in reply.said
    for tag in ("userid", "hostid", "result", "delete_file_info", "host_total_credit"):
        assert reply.xml.find(tag) is None


@pytest.mark.parametrize("wanted, version, old", [
    ("7.20.6", (7, 20, 5), True), ("7.20.5", (7, 20, 5), False), ("8", (7, 99, 9), True),
    ("7.6", (7, 20, 0), False), ("", (1, 0, 0), False)])
def test_clients_that_are_too_old(ann, rpc, monkeypatch, wanted, version, old):
    monkeypatch.setattr(rpc, "settings", rpc.Settings(min_client_version=wanted))
    add("near")
    reply = ann(1, version=version, work_req_seconds=1)
    assert (not reply.jobs) == old == (f"needs BOINC {wanted}" in reply.said and wanted != "")
    assert (float(reply.text("request_delay")) == 86400) == old


def test_half_a_request_changes_nothing(ann):
    add("near")
    ann(1)
    before = dump()
    whole = ann.request(1, reports=["near_0_0"], top=prefs(NOW) + trickle("near_0_0", 1, "x"))
    for n in range(0, len(whole) - 2, 7):
        got = ann.web("POST", URL, whole[:n])
        assert Reply(got.body).names("result_ack") == []
    assert dump() == before


def test_texts_of_users_and_authors_are_escaped_and_fit(web, folder):
    nasty = "<hostid>7</hostid>&\0\x1b\ud800" + "&" * 300 + "é" * 300
    m.apps["near"].about = nasty[:30]
    settings(name=nasty)
    ann = Client(web)
    m.User.update(name=nasty.replace("\ud800", "")).execute()
    add("near")
    reply = ann(1)
    assert reply.text("hostid") == "1" and reply.jobs
    assert reply.text("user_name").startswith("<hostid>7</hostid>&  ")
    assert reply.text("app/user_friendly_name").startswith("<hostid>")
    (m.project.data / "paused").write_text("&" * 3000)
    assert ann().said.startswith("&&&")
    (m.project.data / "paused").unlink()


# ---- 8. HTTP ---------------------------------------------------------------------


def test_gzip_both_ways(ann, web, monkeypatch):
    add("near")
    web.now = NOW
    got = web("POST", URL, ann.request(0), Accept_Encoding="gzip")
    assert "Content-Encoding" not in got.headers, "it would take longer than it saves"
    monkeypatch.setattr(sys.modules["minigrid_plugin_boinc.scheduler"], "GZIP_FROM", 1000)
    got = web("POST", URL, gzip.compress(ann.request(1)), Content_Encoding="gzip",
              Accept_Encoding="deflate, gzip, br, zstd")
    assert got.headers["Content-Encoding"] == "gzip"
    assert Reply(gzip.decompress(got.body)).jobs == ["near_0_0"]
    for accepted in ("deflate", "gzip;q=0", "\xff"):
        got = web("POST", URL, ann.request(0), Accept_Encoding=accepted)
        assert "Content-Encoding" not in got.headers and Reply(got.body)


def test_packed_bodies_that_are_none_or_bombs(ann, web):
    before = dump()
    assert web("POST", URL, b"no gzip", Content_Encoding="gzip").status == 400
    bomb = gzip.compress(b"<scheduler_request>" + bytes(20 << 20))
    assert len(bomb) < 1 << 16
    assert web("POST", URL, bomb, Content_Encoding="gzip").status == 413
    torn = gzip.compress(ann.request(1))[:-30]
    assert Reply(web("POST", URL, torn, Content_Encoding="gzip").body).jobs == []
    assert web("POST", URL, b"", CONTENT_LENGTH=str(17 << 20)).status == 413
    assert dump() == before
    assert web("POST", URL, ann.request(), Content_Encoding="\xff").status == 200
    assert web("GET", URL).status == 200


def test_few_statements_for_a_plain_request(ann):
    """Report one, ask for one: as a client does a hundred times a day."""
    for number in range(3):
        add("near", number)
    ann(1)
    ann(reports=ann.held[:1])
    seen = []
    m.db.connection().set_trace_callback(seen.append)
    try:
        assert len(ann(1, reports=ann.held[:1]).jobs) == 1
    finally:
        m.db.connection().set_trace_callback(None)
    work = [text for text in seen if not re.match("BEGIN|COMMIT|SAVEPOINT|RELEASE|PRAGMA", text)]
    # Seven for user, host, quotas, report, what is held, what is unsent, preferences; seven that
    # save them (the host and its workunits before and after the hand-out); two totals of rules.
    # Then: is anybody on the black list? Two events and the request itself, for "why".
    assert len(work) <= 7 + 7 + 2 + 4, "\n".join(work)


# ---- 9. Anything -----------------------------------------------------------------


def test_captured_requests(web, rpc):
    assert len(CAPTURES) > 8
    for path in CAPTURES:
        reply = Reply(rpc.answer(path.read_bytes(), NOW, BASE).encode())
        assert reply.said or reply.text("userid"), path


@st.composite
def mutated(draw):
    """A captured request with pieces cut out, doubled, or replaced."""
    body = draw(st.sampled_from(CAPTURES)).read_bytes()[:30_000]
    for _ in range(draw(st.integers(1, 5))):
        i = draw(st.integers(0, len(body)))
        j = min(len(body), i + draw(st.integers(0, 400)))
        piece = draw(st.one_of(
            st.just(b""), st.binary(max_size=12), st.just(body[i:j] * 2),
            st.sampled_from([b"<result>", b"</result>", b"<stderr_out>", b"]]>", b"-1", b"1e308",
                             b"99999999999999999999", b"<hostid>0</hostid>", b"<name>&</name>",
                             b"<other_results>", b"<cpu_req_secs>nan</cpu_req_secs>"])))
        body = body[:i] + piece + body[j:]
    return body


@pytest.fixture
def captured(web):
    """The users of the captured requests, with something to do."""
    for path in CAPTURES:
        key = re.search(rb"<authenticator>(\w*)", path.read_bytes())
        if key:
            Client(web, key[1].decode())
    for number in range(4):
        add("near", number)


@ANYTHING
@given(body=mutated())
def test_any_mutated_request_gets_a_reply(captured, rpc, body):
    sent = sys.modules["minigrid_plugin_boinc.reader"]
    before = dump()
    reply = Reply(rpc.answer(body, NOW, BASE).encode())
    try:
        complete = sent.read_request(body).complete
    except m.ClientError:
        complete = False
    assert complete or dump() == before
    assert complete or not reply.names("result_ack") and not reply.jobs


@ANYTHING
@given(body=st.binary(max_size=200))
def test_any_bytes_get_a_reply_and_change_nothing(captured, rpc, body):
    before = dump()
    assert Reply(rpc.answer(body, NOW, escape(BASE)).encode()).said
    assert dump() == before
