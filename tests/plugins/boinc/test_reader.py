"""The reader of BOINC requests: captures of a real client, hostile texts, and any bytes at all.

captures/ holds requests of the client 7.20.5 as it sent them. More of them, in directories named by
the variable MINIGRID_CAPTURES, are read against the same simple reading.
"""

import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minigrid import ClientError

HERE = Path(__file__).resolve().parent


def load():
    """Load the module alone: it needs nothing of its package."""
    path = HERE.parents[2] / "plugins" / "boinc" / "reader.py"
    spec = importlib.util.spec_from_file_location("boinc_reader_tested", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = load()
FOLDERS = [HERE / "captures", *map(Path, filter(None, os.environ.get(
    "MINIGRID_CAPTURES", "").split(os.pathsep)))]
REQUESTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.request.xml"))
            if b"<scheduler_request>" in path.read_bytes()]
HEADERS = [path for folder in FOLDERS for path in sorted(folder.glob("u*.header.xml"))]
MIXED = HERE / "captures" / "05_report_many_mixed.request.xml"


def capture(name):
    (path,) = (HERE / "captures").glob(f"{name}_*.xml")
    return path.read_bytes()


# ---- Building requests as the client writes them ------------------------------


def result(name, stderr="", state=5, exit_status=0, files=(), head=""):
    """Write a result exactly as the client does."""
    text = f"<![CDATA[\n<stderr_txt>\n{stderr}\n</stderr_txt>\n]]>\n" if stderr else ""
    return "".join([
        f"<result>\n    <name>{name}</name>\n    <final_cpu_time>1.500000</final_cpu_time>\n"
        f"    <final_elapsed_time>2.250000</final_elapsed_time>\n"
        f"    <exit_status>{exit_status}</exit_status>\n    <state>{state}</state>\n"
        f"    <platform>x86_64-pc-linux-gnu</platform>\n    <version_num>100</version_num>\n{head}"
        f"<stderr_out>\n<core_client_version>7.20.5</core_client_version>\n{text}</stderr_out>\n",
        *(f"<file_info>\n    <name>{file}</name>\n    <nbytes>6.000000</nbytes>\n"
          f"    <md5_cksum>0084467710d2fc9d8a306e14efbe6d0f</md5_cksum>\n</file_info>\n"
          for file in files), "</result>\n"])


def trickle(name, text, sent=7):
    return (f"  <msg_from_host>\n      <result_name>{name}</result_name>\n"
            f"      <time>{sent}</time>\n{text}\n  </msg_from_host>\n")


def request(*parts, progress=("other_0",), head=""):
    """Write a request with these results and trickles, in the client's order."""
    others = "".join(f"    <other_result>\n        <name>{name}</name>\n"
                     f"        <app_version>0</app_version>\n    </other_result>\n"
                     for name in progress)
    return "".join([
        "<scheduler_request>\n    <authenticator>abc</authenticator>\n    <hostid>1</hostid>\n"
        f"    <rpc_seqno>3</rpc_seqno>\n{head}"
        "<host_info>\n    <p_ncpus>4</p_ncpus>\n</host_info>\n",
        *parts, "<app_versions>\n<app_version>\n    <app_name>worker</app_name>\n"
        "    <version_num>100</version_num>\n</app_version>\n</app_versions>\n"
        f"<other_results>\n{others}</other_results>\n</scheduler_request>\n"])


def read(*parts, **more):
    return reader.read_request(request(*parts, **more).encode("latin-1"))


def untouched(found):
    """Check all that no stderr and no trickle may change."""
    assert found.complete
    assert (found.authenticator, found.hostid, found.rpc_seqno) == ("abc", 1, 3)
    assert found.host_info == {"p_ncpus": "4"}
    assert [v["app_name"] for v in found.app_versions] == ["worker"]
    assert found.other_results == ["other_0"] and found.sticky_files == []
    assert found.code_sign_key == "" and found.prefs == "" and not found.dont_send_work


# ---- Captures ----------------------------------------------------------------


def simple(text):
    """Read results and jobs in progress by the client's indentation alone, line by line."""
    results, others, raw, inside = [], [], False, None
    for line in text.split("\n"):
        found = re.fullmatch(r"( +)<(\w+)>(.*)</\2>", line)
        if raw:
            raw = line != "</stderr_out>"
        elif line == "<stderr_out>":
            raw = True
        elif line == "<result>":
            results.append({"files": []})
            inside = results[-1]
        elif line == "<file_info>":
            inside = {}
            results[-1]["files"].append(inside)
        elif line.strip() == "<other_result>":
            inside = {}
            others.append(inside)
        elif line.strip() in ("<host_info>", "<app_version>", "<ip_result>"):
            inside = {}
        elif found and inside is not None:
            inside.setdefault(found[2], found[3])
    return results, [other["name"] for other in others]


@pytest.mark.parametrize("path", REQUESTS, ids=lambda p: p.name[:30])
def test_captures_are_read_as_a_simple_reading_does(path):
    text = path.read_bytes().decode("latin-1")
    results, others = simple(text)
    found = reader.read_request(path.read_bytes())
    assert found.complete == text.rstrip().endswith("</scheduler_request>")
    assert [(r.name, r.state, r.exit_status, f"{r.final_elapsed_time:.6f}", r.platform,
             f"{r.final_cpu_time:.6f}", str(r.version_num), r.plan_class, str(r.peak_memory),
             [(f.name, f"{f.nbytes}.000000", f.md5) for f in r.output_files])
            for r in found.results] == [
        (r["name"], int(r["state"]), int(r["exit_status"]), r["final_elapsed_time"],
         r["platform"], r["final_cpu_time"], r["version_num"], r.get("plan_class", ""),
         r.get("final_peak_working_set_size", "0"),
         [(f["name"], f["nbytes"], f["md5_cksum"]) for f in r["files"]]) for r in results]
    if found.complete:
        assert found.other_results == others
        assert f"<rpc_seqno>{found.rpc_seqno}</rpc_seqno>" in text
        assert f"<host_cpid>{found.host_info['host_cpid']}</host_cpid>" in text
        assert f"<work_req_seconds>{found.work_req_seconds:.6f}<" in text
        assert f"\n    <on_frac>{found.time_stats['on_frac']:.6f}<" in text
        assert f"<d_project_share>{found.disk_usage['d_project_share']:.6f}<" in text
        assert found.code_sign_key in text and len(found.code_sign_key) in (0, 526)
        major, minor, release = found.client_numbers
        assert f"<core_client_release>{release}<" in text
        assert found.client_version == f"{major}.{minor}.{release}" in ("7.20.5", "8.3.0")
        assert "<mod_time>0.0" in found.working_prefs or "<mod_time>17" in found.working_prefs


def test_first_contact():
    found = reader.read_request(capture("01"))
    assert (found.hostid, found.work_req_seconds, found.cpu_req_instances) == (0, 1.0, 0.0)
    assert (found.authenticator, found.code_sign_key) == ("04b0e061d49713b4b2d433e83e1841b5", "")
    assert found.platforms == ["x86_64-pc-linux-gnu"] and found.allow_multiple_clients
    assert found.results == found.messages == found.app_versions == found.other_results == []
    assert found.time_stats["connected_frac"] == -1 and len(found.time_stats) == 14
    assert len(found.net_stats) == 6 and len(found.disk_usage) == 3
    assert found.host_info["p_model"].startswith("Intel(R) Xeon(R) Processor @ 2.50GHz [")
    assert found.prefs == "" and found.prefs_time == 0


def test_a_mixed_report():
    found = {r.name: r for r in reader.read_request(capture("05")).results}
    assert len(found) == 18
    assert {name: (r.state, r.exit_status, len(r.output_files)) for name, r in found.items()
            if name in ("err255_0", "toobig_0", "multi_0", "optional_0", "e195_0")} == {
        "err255_0": (3, 255, 1), "toobig_0": (3, 0, 0), "multi_0": (5, 0, 2),
        "optional_0": (5, 0, 0), "e195_0": (3, 195, 1)}
    assert found["gzout_0"].output_files == [
        reader.ClientFile("gzout_0_0", 39, "6041954fa1d62432578af2e7ee590c58")]
    assert found["err255_0"].final_elapsed_time == 11.083416
    assert found["err255_0"].stderr_out == (
        "process exited with code 255 (0xff, -1)\nargs ['exit=255']\n"
        "resolved ../../projects/127.0.0.1_8201/err255_in")
    assert found["toobig_0"].stderr_out.startswith(  # The client wrote this one last.
        "upload failure: <file_xfer_error>\n  <file_name>toobig_0_0</file_name>\n  <error_code>-13")
    assert found["toobig_0"].stderr_out.endswith("args ['size=3000']\nresolved "
                                                 "../../projects/127.0.0.1_8201/toobig_in")


def test_stderr_that_is_no_xml():
    found = reader.read_request(capture("07"))
    assert [r.stderr_out.split("\n")[-2:] for r in found.results][1] == [
        "café € & <tag> ]]> end", "ctl "]
    assert found.other_results == ["s2_0"]
    (odd,) = reader.read_request(capture("09")).results
    assert odd.stderr_out.split("\n")[2] == "esc [31m bell  ff  latin é del  end"


def test_an_upload_given_up_is_told_by_its_message():
    (done,) = reader.read_request(capture("18")).results
    assert (done.state, done.exit_status) == (5, 0)
    assert [f.error_msg for f in done.output_files] == ["permanent upload error"]


def test_trickles():
    found = reader.read_request(capture("21"))
    assert found.messages == [
        reader.ClientMessage("t1_0", 1795220700,
                             "<variety>test</variety>\n<text>\nhello_from_app\n</text>"),
        reader.ClientMessage("t1_0", 1795220710,
                             "<variety>test</variety>\n<text>\nsecond\n</text>")]
    (other,) = reader.read_request(capture("r14")).messages
    assert (other.result_name, other.time) == ("refA_16_0", 1795221933)
    assert other.text.endswith("<fraction_done>0.25</fraction_done>\n</text>")


def test_preferences_and_a_sticky_file():
    found = reader.read_request(capture("29"))
    assert found.sticky_files == [reader.ClientFile("e0_in", 6, status=1)]
    assert found.prefs_time == 1.7e9
    assert found.prefs_email_hash == "ffbdaaf10de7e29648ac89125e1f9413"
    assert found.cross_project_id == "a46f121238dc4870dd4cdf7d7a36606d"
    assert reader.read_prefs(found.prefs) == """\
    <source_project>http://127.0.0.1:8201/</source_project>
    <source_scheduler>http://127.0.0.1:8201/cgi</source_scheduler>
    <mod_time>1700000000</mod_time>
    <work_buf_min_days>0.3</work_buf_min_days>
    <max_ncpus_pct>50</max_ncpus_pct>
    <run_if_user_active>1</run_if_user_active>
    <venue name="home">
        <max_ncpus_pct>100</max_ncpus_pct>
    </venue>
"""
    assert reader.prefs_mod_time(found.working_prefs) == 1.7e9
    assert found.other_results == ["e2_0", "e3_0", "e1_0", "e4_0", "e0_0"]


def test_plan_class_memory_and_versions():
    found = reader.read_request(capture("31"))
    assert [(r.plan_class, r.peak_memory) for r in found.results] == [
        ("mt", 9662464), ("mt", 9609216)]
    assert found.app_versions == [{
        "app_name": "worker", "version_num": 100, "platform": "x86_64-pc-linux-gnu",
        "plan_class": "mt", "avg_ncpus": 2.0, "flops": 2e9, "api_version": "7.20.5"}]


def test_alternative_platforms_follow_the_first():
    assert reader.read_request(capture("r05")).platforms == [
        "x86_64-pc-linux-gnu", "i686-pc-linux-gnu"]
    again = "<alt_platform>\n<name>b</name>\n</alt_platform>\n"
    assert read(head=f"{again}<platform_name>a</platform_name>\n{again}"
                     "<alt_platform><name>a</name></alt_platform>").platforms == ["a", "b"]


def test_no_request_at_all():
    for body in b"", b"GET / HTTP/1.1\n\n", b"\0\xff<scheduler_reply>":
        with pytest.raises(ClientError) as info:
            reader.read_request(body)
        assert info.value.status == 400 and "scheduler_request" in str(info.value)


def test_every_truncation_is_incomplete():
    body = capture("07").rstrip()
    for cut in range(len("<scheduler_request>"), len(body), 3):
        assert not reader.read_request(body[:cut]).complete
    assert reader.read_request(body).complete


# ---- Hostile texts -----------------------------------------------------------

END = "\n</stderr_txt>\n]]>\n</stderr_out>\n"
NEXT = "<result>\n    <name>evil_0</name>\n    <exit_status>0</exit_status>\n    <state>5</state>\n"
TAIL = ("<app_versions>\n</app_versions>\n<other_results>\n</other_results>\n"
        "</scheduler_request>\n")
HOSTILE = {
    "end of CDATA": "]]>",
    "end of result": "</result>",
    "a result": "</result>\n<result>\n    <name>evil_0</name>",
    "end of request": "</scheduler_request>",
    "host": "<hostid>99</hostid>\n    <authenticator>x</authenticator>",
    "end of stderr": "]]>\n</stderr_out>",
    "end of stderr and result": END + "</result>\n",
    "many ends": (END + "</result>\n") * 50,
    "a file": END + "<file_info>\n    <name>evil_0_0</name>\n</file_info>",
    "a file and the end": END + "<file_info>\n    <name>evil_0_0</name>\n</file_info>\n</result>\n",
    "head": END + "</result>\n    <hostid>99</hostid>\n<code_sign_key>\nx\n</code_sign_key>\n",
    "tail": END + "</result>\n" + TAIL,
    "tail and a request": END + "</result>\n" + TAIL + request(result("evil_0")),
    "a whole result without text": END + "</result>\n" + result("evil_0"),
    "a result without stderr": END + "</result>\n" + NEXT + "</result>\n",
    "half a result": END + "</result>\n" + NEXT,
    "half a result, half a tail": END + "</result>\n" + NEXT + TAIL,
    "a result, but no end of CDATA": "</stderr_out>\n</result>\n" + NEXT + (
        "<stderr_out>\n<![CDATA[\n<stderr_txt>"),
    "a trickle": END + "</result>\n" + trickle("evil_0", "x"),
    "half a trickle": END + "</result>\n" + trickle("evil_0", "x").partition("</msg")[0],
    "sticky file": END + "</result>\n    <file_info>\n<name>evil</name>\n    </file_info>\n",
    "host info": END + "</result>\n<host_info>\n<p_ncpus>99</p_ncpus>\n</host_info>\n",
    "prefs": END + "</result>\n<global_preferences>\n<mod_time>9</mod_time>\n"
                   "</global_preferences>\n<dont_send_work>1</dont_send_work>",
    "CDATA": "<![CDATA[ ]]> <![CDATA[",
    "stderr": "<stderr_out>\n<![CDATA[\n<stderr_txt>\n<message>\n</message>",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_stderr_is_never_taken_for_structure(text, place):
    parts = [result("a_0", "one", files=["a_0_0"]), result("b_0", state=3, exit_status=1),
             result("c_0", "three", files=["c_0_0"])]
    at = ["first", "middle", "last"].index(place)
    name = "abc"[at] + "_0"
    parts[at] = result(name, f"before\n{text}\nafter", 6, 203, [f"{name}_0"])
    found = read(*parts)
    untouched(found)
    assert [r.name for r in found.results] == ["a_0", "b_0", "c_0"]
    bad = found.results[at]
    assert (bad.state, bad.exit_status, bad.final_cpu_time) == (6, 203, 1.5)
    assert [f.name for f in bad.output_files] == [f"{name}_0"]
    assert bad.stderr_out.startswith("before") and bad.stderr_out.endswith("after")
    assert text.strip() in bad.stderr_out and found.messages == []
    assert [len(r.output_files) for r in found.results] == [
        1, 1 if at == 1 else 0, 1]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_trickle_is_never_taken_for_structure(text):
    text = "text\n" + text + "\n</msg_from_host>\n" + text + "\nafter"
    found = read(result("a_0", "one"), trickle("a_0", text, 5), trickle("b_0", "two", 6))
    untouched(found)
    assert [r.name for r in found.results] == ["a_0"]
    assert found.results[0].stderr_out == "one"
    ends = [(m.result_name, m.time) for m in found.messages]
    assert ends == [("a_0", 5), ("b_0", 6)] or (  # The known limit: a trickle, forged whole.
        "<msg_from_host>" in text and (ends[0], ends[-1]) == (("a_0", 5), ("b_0", 6)))
    assert ends[-1] == ("b_0", 6) and found.messages[0].text.startswith("text")


@pytest.mark.parametrize("text", [
    END + "</result>\n" + NEXT + "<stderr_out>\n<![CDATA[\n<stderr_txt>\nforged",
    END + "</result>\n" + NEXT + "<stderr_out>\n" + TAIL,
    END + "</result>\n" + result("evil_0", "x")], ids=["begun", "with a tail", "whole"])
def test_the_known_limit_forges_results_of_the_same_host_and_nothing_else(text):
    found = read(result("a_0", text), result("b_0", "two"), trickle("b_0", "three"))
    untouched(found)
    assert [r.name for r in found.results] == ["a_0", "evil_0", "b_0"]
    assert [m.result_name for m in found.messages] == ["b_0"]


LINES = ["]]>", "</stderr_txt>", "</stderr_out>", "</result>", "<result>", "<file_info>",
         "</file_info>", "    <name>evil_0</name>", "    <state>5</state>", "<stderr_out>",
         "    <hostid>99</hostid>", "<app_versions>", "</app_versions>", "<other_results>",
         "</other_results>", "</scheduler_request>", "<msg_from_host>", "</msg_from_host>",
         "      <result_name>evil_0</result_name>", "<code_sign_key>x</code_sign_key>",
         "<host_info>", "</host_info>", "<prefs/>", "<![CDATA[", "text", "", "<global_preferences>"]


@given(st.lists(st.sampled_from(LINES), max_size=25), st.lists(st.sampled_from(LINES), max_size=25))
@settings(max_examples=300, deadline=None)
def test_no_mixture_of_lines_changes_head_or_tail(first, second):
    found = read(result("a_0", "\n".join(["one", *first, "one"])),
                 result("b_0", "\n".join(["two", *second, "two"])))
    untouched(found)
    assert found.results[0].name == "a_0" and {r.name for r in found.results} <= {
        "a_0", "b_0", "evil_0"}
    if "<stderr_out>" not in first + second:
        assert [r.name for r in found.results] == ["a_0", "b_0"]
        assert [r.stderr_out[-3:] for r in found.results] == ["one", "two"]


def test_a_stderr_that_never_ends_makes_the_request_incomplete():
    body = request(result("a_0", "one")).replace("</stderr_out>", "")
    assert not reader.read_request(body.encode()).complete
    assert not reader.read_request(request(trickle("a", "b")).replace(
        "</msg_from_host>", "").encode()).complete


# ---- Texts for people ----------------------------------------------------------


@pytest.mark.parametrize("raw, shown", [
    ("&#195;&#169;", "é"), ("&#226;&#130;&#172;", "€"), ("&#233; &#195;&#169;", "é é"),
    ("&#240;&#159;&#152;&#128;", "\U0001f600"), ("&#195;", "Ã"), ("\xc3\xa9", "é"),
    ("&#65; &lt; &amp; &#300;", "&#65; &lt; &amp; &#300;"),  # Written so by the job itself.
    ("a\0b\x1b[0m\x07\tc\r\nd\x7f\x85", "ab[0m\tc\nd"),
    ("&#237;&#160;&#128;", "í\xa0"),  # A surrogate is no UTF-8.
])
def test_stderr_is_made_readable(raw, shown):
    assert read(result("a_0", raw)).results[0].stderr_out == shown


def test_stderr_in_other_forms():
    def stderr(text):
        body = request(result("a_0")).replace("7.20.5</core_client_version>\n", f"7{CLOSE}{text}")
        return reader.read_request(body.encode("latin-1")).results[0].stderr_out
    CLOSE = "</core_client_version>\n"
    assert stderr("") == ""
    assert stderr("<![CDATA[\n\n]]>\n") == ""
    assert stderr("plain &lt;b&gt; &#195;&#169; &#8364;\n") == "plain <b> é &#8364;"
    assert stderr("<![CDATA[plain]]>") == "plain"
    assert stderr("<![CDATA[<message>a</message><message>b</message><stderr_txt>c</stderr_txt>"
                  "<message>d</message>]]>") == "a\nb\nd\nc"
    assert stderr("<![CDATA[<stderr_txt>\na </stderr_txt> b]]>") == "a "
    assert stderr("<![CDATA[<stderr_txt>\na <stderr_txt> b]]>") == "a <stderr_txt> b"


def test_host_texts_are_decoded():
    head = ("<host_info>\n    <p_model>AMD&lt;&#82;&gt; &amp;amp; &#195;&#169; &#999;</p_model>\n"
            "    <p_vendor>a\x01b\n</p_vendor>\n    <coprocs>\n<p_ncpus>9</p_ncpus>\n</coprocs>\n"
            "    <p_ncpus>2</p_ncpus>\n    <p_ncpus>3</p_ncpus>\n</host_info>\n")
    assert read(head=head).host_info == {
        "p_model": "AMD<R> &amp; é &#999;", "p_vendor": "ab", "p_ncpus": "2"}


@given(st.binary())
def test_joined_text_is_harmless(data):
    text = reader.unescape(data.decode("latin-1"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
    try:
        assert text == reader.CONTROL.sub("", data.decode()) or b"&" in data
    except UnicodeDecodeError:
        pass


@given(st.text())
def test_utf8_comes_back_as_it_was(text):
    text = reader.CONTROL.sub("", text.encode("utf-8", "replace").decode())
    assert reader.join_utf8(text.encode().decode("latin-1")) == text


# ---- Values and bounds ---------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("34517.006123", 34517.006123), (" 5 ", 5.0), ("-1.000000", -1.0), ("1e3", 1000.0),
    ("", 0), ("nan", 0), ("inf", 0), ("-inf", 0), ("1e999", 0), ("0x10", 0), ("1_000", 0),
    ("1,5", 0), ("5 6", 0), ("\xb2", 0), ("9" * 20, 2.0 ** 62), ("1" * 300, 2.0 ** 62),
    ("-1e30", -2.0 ** 62),
    ("1" * 5000, 0)])
def test_numbers(text, value):
    assert read(head=f"<work_req_seconds>{text}</work_req_seconds>").work_req_seconds == value
    assert read(result("a_0", exit_status=text)).results[0].exit_status == int(value)


def test_large_integers_are_exact():
    assert reader.integer("9007199254740993") == 9007199254740993
    assert reader.integer("9" * 25) == 1 << 62 and reader.integer("-" + "9" * 25) == -(1 << 62)
    assert reader.integer("007") == 7


@pytest.mark.parametrize("name, ok", [
    ("a" * 256, True), ("a" * 257, False), ("", False), (" ", False), ("a\0b", False),
    ("a\nb", False), ("a\x1bb", False), ("../a", True), ("a b", True)])
def test_names(name, ok):
    found = read(result(name, "x", files=[name, "f"]), result("z_0", files=[name, "f"]),
                 trickle(name, "x"), f"<file_info><name>{name}</name></file_info>",
                 progress=[name, "o"])
    assert [r.name for r in found.results] == ([name] if ok else []) + ["z_0"]
    assert [f.name for f in found.results[-1].output_files] == ([name] if ok else []) + ["f"]
    assert [m.result_name for m in found.messages] == ([name] if ok else [])
    assert [f.name for f in found.sticky_files] == ([name] if ok else [])
    assert found.other_results == ([name] if ok else []) + ["o"]


def test_flags():
    for text, value in {"<x/>": True, "<x>1</x>": True, "<x>0</x>": False, "<x></x>": False,
                        "": False}.items():
        found = read(head=text.replace("x", "dont_send_work"))
        assert found.dont_send_work is value


def test_the_first_of_a_name_counts():
    found = read(head="<hostid>5</hostid><authenticator>x</authenticator>"
                      "<host_info><p_ncpus>7</p_ncpus></host_info>")
    assert (found.hostid, found.authenticator) == (1, "abc")
    assert found.host_info == {"p_ncpus": "7"}


def test_what_looks_plain_among_plain_elements_is_read_by_its_own_rules():
    found = read("<result><name>a_0</name><name>b_0</name><stderr_out>words</stderr_out>"
                 "<state>5</state></result>", "<result><name>c_0</name><net_stats>1</net_stats>"
                 "</result>", "<file_info><name>d</name><file_info/>",
                 head="<alt_platform><name>p</name><name>q</name></alt_platform><time_stats>1"
                      "</time_stats><time_stats><on_frac>1</on_frac></time_stats>")
    untouched(found)
    assert [(r.name, r.state, r.stderr_out) for r in found.results] == [("a_0", 5, "words")]
    assert found.platforms == ["p"] and found.time_stats == {}
    body = request().replace("<app_version>", "<x>1</x><app_version>5</app_version><app_version>")
    assert [v["app_name"] for v in reader.read_request(body.encode()).app_versions] == [
        "", "worker"]


def test_unknown_elements_are_skipped_with_their_content():
    found = read(result("a_0", head="<new><name>x</name><state>1</state></new><state>3</state>"),
                 head="<new>\n<hostid>9</hostid><result><name>x</name></result></new>\n"
                      "<other attribute='1'><coprocs>\n<name>x</name>\n</coprocs>\n<lost>\n")
    untouched(found)
    assert [(r.name, r.state) for r in found.results] == [("a_0", 5)]


def test_a_result_without_its_end_is_left_out():
    found = read(result("b_0", "y"), "<result>\n<name>c_0</name>\n", result("d_0"),
                 result("e_0").replace("</result>\n", ""))
    untouched(found)
    assert [r.name for r in found.results] == ["b_0", "d_0"]


def test_an_app_version_keeps_its_place():
    body = request().replace("<app_version>", "<app_version>\n</app_version>\n<app_version>")
    found = reader.read_request(body.encode())
    assert [v["app_name"] for v in found.app_versions] == ["", "worker"]


def test_jobs_in_progress_are_all_or_unknown():
    body = request()
    assert reader.read_request(body.encode()).other_results == ["other_0"]
    for cut in "</other_results>", "<other_results>":
        found = reader.read_request(body.replace(cut, "").encode())
        assert found.complete and found.other_results is None
    assert read(progress=[f"n{i}" for i in range(10_001)]).other_results is None
    assert len(read(progress=[f"n{i}" for i in range(10_000)]).other_results) == 10_000


def test_lists_are_bounded():
    found = read(*[result(f"r{i}") for i in range(10_001)])
    assert len(found.results) == 10_000 and found.other_results is None
    found = read(*[trickle("a_0", str(i)) for i in range(1001)])
    assert [m.text for m in found.messages] == [str(i) for i in range(1000)]
    found = reader.read_request(request().replace(
        "<app_versions>", "<app_versions>" + "<app_version>\n</app_version>" * 1001).encode())
    assert len(found.app_versions) == 1000
    found = read("<file_info><name>a</name></file_info>" * 10_001)
    assert len(found.sticky_files) == 10_000
    found = read(result("a_0", "x" * 70_000 + "end"), trickle("a_0", "y" * 70_000))
    assert len(found.results[0].stderr_out) == 65_536 == len(found.messages[0].text)
    assert found.results[0].stderr_out.endswith("xend")
    many = "".join(f"<x{i}>{'z' * 5000}</x{i}>" for i in range(300))
    found = read(head=f"<host_info>{many}</host_info><platform_name>p</platform_name>")
    assert len(found.host_info) == 200 and {*map(len, found.host_info.values())} == {4096}
    found = read(head="".join(f"<alt_platform><name>{i}</name></alt_platform>" for i in range(99)))
    assert len(found.platforms) == 64
    assert read(head=f"<global_preferences>{'<a>1</a>' * 9000}</global_preferences>").prefs == ""
    assert read(head=f"<code_sign_key>{'a' * 5000}</code_sign_key>").code_sign_key == ""


# ---- Any bytes -----------------------------------------------------------------

BODIES = [path.read_bytes() for path in REQUESTS[:13]]
PIECES = [b"<", b">", b"</", b"<result>", b"</result>", b"<stderr_out>", b"</stderr_out>",
          b"<![CDATA[", b"]]>", b"\0", b"\n", b"&#255;", b"<file_info>", b"</scheduler_request>",
          b"<msg_from_host>", b"</msg_from_host>", b"<other_results>", b"\xc3\xa9", b"nan"]


@st.composite
def mutated(draw):
    """A captured request with slices deleted, doubled, swapped or put in."""
    body = draw(st.sampled_from(BODIES))
    for _ in range(draw(st.integers(1, 6))):
        a, b, c = sorted(draw(st.integers(0, len(body))) for _ in range(3))
        what = draw(st.sampled_from(["delete", "double", "swap", "insert", "cut"]))
        body = {"delete": body[:a] + body[b:], "double": body[:b] + body[a:],
                "swap": body[:a] + body[b:c] + body[a:b] + body[c:], "cut": body[:c],
                "insert": body[:a] + draw(st.sampled_from(PIECES)) + body[a:]}[what][:60_000]
    return body


def check_bounds(found):
    """Check what holds for any request, however broken."""
    assert all(isinstance(r.name, str) and 0 < len(r.name) <= 256 and r.name.isprintable()
               and abs(r.exit_status) <= 1 << 62 and abs(r.state) <= 1 << 62
               and abs(r.final_elapsed_time) < 1e19 and len(r.stderr_out) <= 65_536
               and "\0" not in r.stderr_out and "" not in [f.name for f in r.output_files]
               for r in found.results)
    values = [*found.time_stats.values(), *found.net_stats.values(), *found.disk_usage.values(),
              found.work_req_seconds, found.prefs_time, found.hostid, found.rpc_seqno]
    assert all(abs(value) < 1e19 for value in values)
    prefs = reader.read_prefs(found.prefs)
    assert len(prefs) <= 8192 and reader.read_prefs(prefs) == prefs


@given(mutated())
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_mutated_request_raises_nothing_but_client_error(body):
    try:
        check_bounds(reader.read_request(body))
    except ClientError:
        assert b"<scheduler_request>" not in body


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=5))))
def test_random_bytes_raise_nothing_but_client_error(pieces):
    body = b"".join(pieces)
    check_bounds(reader.read_request(b"<scheduler_request>" + body))
    for start in b"", b"<data_server_request>", b"<data_server_request><file_upload><name>a</name>":
        try:
            found = reader.read_upload(start + body)
            assert found.name and found.nbytes >= 0 and found.offset >= 0
        except ClientError:
            pass


# ---- Work grows with the length and no faster --------------------------------

UNIT = "<result><name>a</name><stderr_out><![CDATA[x]]></stderr_out>"
GROWING = {
    "less than": "<", "open tags": "<result>", "unknown tags": "<foo>", "new tags": None,
    "ends": "]]>", "ends of stderr": "]]></stderr_out></result>", "ends only": "</stderr_out>",
    "results": result("a_0", "x"), "results without end": UNIT, "empty results": result("a_0"),
    "stderr starts": "]]></stderr_out></result><result><stderr_out></stderr_out>",
    "half results": "]]></stderr_out></result><result><name>a</name></result>",
    "files": "<file_info><name>a</name></file_info>", "half files": "<file_info><name>a",
    "CDATA": "<stderr_out><![CDATA[", "space": " \n", "messages": trickle("a_0", "x"),
    "message starts": "<msg_from_host><result_name>", "message ends": "</msg_from_host>",
    "versions": "<app_versions><app_version>", "entities": "&#233;&", "high": "\xe9\xe0\x80",
    "message texts": "<message>", "preferences": "<global_preferences><a>", "hosts": "<host_info>",
    "others": "<other_results><other_result>", "leaves": "<hostid>5</hostid>", "digits": "9",
    "nested": "<a><result><b>", "last": "</result>", "ends of tags": "</a>"}


def seconds(body):
    best = 1e9
    for _ in range(3):
        start = time.thread_time()  # Of this thread alone: other programs count little.
        reader.read_request(body)
        best = min(best, time.thread_time() - start)
    return best


def adversarial(name, size, before, after):
    unit = GROWING[name]
    text = "".join(f"<t{i}>" for i in range(size // 7)) if unit is None else (
        unit * (size // len(unit)))
    return f"<scheduler_request>{before}{text}{after}".encode("latin-1")


OPENED = "<result><name>a</name><stderr_out><![CDATA[<stderr_txt>"
CLOSED = "</stderr_txt>]]></stderr_out></result></scheduler_request>"


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("around", [("", ""), (OPENED, CLOSED), ("<hostid>", CLOSED)],
                         ids=["bare", "stderr", "leaf"])
def test_four_times_the_length_is_not_ten_times_the_work(name, around):
    small, large = (adversarial(name, size, *around) for size in (25_000, 100_000))
    for _ in range(5):  # A ratio: disturbed upwards only, by caches and other programs.
        ratio = seconds(large) / max(seconds(small), 2e-4)
        if ratio < 10:
            return
    pytest.fail(f"{ratio:.1f} times the work for 4 times the length")


# ---- Uploads -------------------------------------------------------------------


def upload(**changes):
    values = {"name": "j1_0_0", "xml_signature": "\n", "max_nbytes": "1000000", "nbytes": "6",
              "md5_cksum": "0084467710d2fc9d8a306e14efbe6d0f", "offset": "0", **changes}
    fields = {key: "" if value is None else f"<{key}>{value}</{key}>\n"
              for key, value in values.items()}
    return (
        "<data_server_request>\n    <core_client_major_version>7</core_client_major_version>\n"
        "<file_upload>\n<file_info>\n{name}{xml_signature}{max_nbytes}</file_info>\n"
        "{nbytes}{md5_cksum}{offset}<data>\n").format(**fields).encode("latin-1")


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.name[:20])
def test_upload_headers(path):
    head = path.read_bytes()
    found = reader.read_upload(head + b"<nbytes>7</nbytes><data>\n\0\xff")
    assert found.kind == "upload" and found.header_bytes == len(head)
    for name in "name", "nbytes", "offset", "max_nbytes", "md5_cksum":
        value = getattr(found, "md5" if name == "md5_cksum" else name)
        assert f"<{name}>{value}</{name}>\n".encode() in head


def test_the_captured_uploads():
    assert reader.read_upload(capture("u1")) == reader.UploadRequest(
        "upload", "u1_0_0", 6, "0084467710d2fc9d8a306e14efbe6d0f", 0, 1000000, "",
        len(capture("u1")))
    assert reader.read_upload(capture("u5")).offset == 61035
    assert reader.read_upload(capture("u6")).nbytes == 0
    assert reader.read_upload(capture("u7")).xml_signature == "0123\nabcd\n."
    assert reader.read_upload(capture("u2")) == reader.UploadRequest("query", "u7_0_0")


@pytest.mark.parametrize("head", [
    b"", b"x" * 9000, b"<scheduler_request>", b"<data_server_request>",
    b"<data_server_request><file_upload><data>", upload()[:-1],
    upload(xml_signature="a" * 8192), b" " * 8000 + upload(),
    upload(name=""), upload(name="a" * 257), upload(name="a\0"), upload(name=None),
    upload(nbytes="x"), upload(nbytes="-1"), upload(nbytes="nan"), upload(nbytes="1e400"),
    upload(nbytes="9" * 30), upload(nbytes=""), upload(nbytes=None), upload(offset="0x1"),
    upload(max_nbytes="inf"), b"<data_server_request><get_file_size></get_file_size>",
    b"<data_server_request><get_file_size>a", b"<data_server_request><get_file_size>a\0b</get_file_"
    b"size>"], ids=range(24))
def test_no_upload(head):
    with pytest.raises(ClientError) as info:
        reader.read_upload(head)
    assert info.value.status == 400


def test_upload_fields_that_may_be_missing():
    found = reader.read_upload(upload(offset=None, max_nbytes=None, md5_cksum="no", nbytes="6.00"))
    assert (found.nbytes, found.offset, found.max_nbytes, found.md5) == (6, 0, 0, "")


def test_the_data_of_an_upload_are_not_read():
    found = reader.read_upload(upload() + b"<get_file_size>x</get_file_size><name>y</name>")
    assert (found.kind, found.name, found.header_bytes) == ("upload", "j1_0_0", len(upload()))


def test_the_longest_header():
    spare = 8191 - len(upload())
    assert reader.read_upload(upload(xml_signature="a" * (spare + 1))).header_bytes == 8191
    with pytest.raises(ClientError):
        reader.read_upload(upload(xml_signature="a" * (spare + 2)))


@given(st.data())
def test_every_truncated_header_is_refused(data):
    head = data.draw(st.sampled_from([path.read_bytes() for path in HEADERS]))
    with pytest.raises(ClientError):
        reader.read_upload(head[:data.draw(st.integers(0, len(head) - 1))])


# ---- Preferences -----------------------------------------------------------------


@pytest.mark.parametrize("text, kept", [
    ("", ""), ("words", ""), ("<a>1</a>", "    <a>1</a>\n"), ("<a/>", "    <a>1</a>\n"),
    ("<a>\n 1.5 \n</a>", "    <a>1.5</a>\n"), ("<a></a>", ""), ("<A>1</A>", ""),
    ("<a>1</b>", ""), (f"<a>{'1' * 64}</a>", f"    <a>{'1' * 64}</a>\n"),
    (f"<a>{'1' * 65}</a>", ""), ("<a>&lt;</a>", ""), ("<a>\xe9</a>", ""), ("<a>1\0</a>", ""),
    ("<a b='1'>1</a>", ""), ("<a><b>1</b></a><c>2</c>", "    <c>2</c>\n"),
    (f"<{'a' * 41}>1</{'a' * 41}>", ""),
    ("<global_preferences>1</global_preferences>", ""),
    ("<a>1</a></global_preferences><scheduler_reply><b>2</b>", "    <a>1</a>\n"),
    ('<venue name="home"><a>1</a></venue>',
     '    <venue name="home">\n        <a>1</a>\n    </venue>\n'),
    ('<venue name="moon"><a>1</a></venue><b>2</b>', "    <b>2</b>\n"),
    ('<venue><a>1</a></venue><venue>5</venue><day_prefs/><b>2</b>', "    <b>2</b>\n"),
    ('<venue name="home"></venue>', ""), ('<b>2</b><venue name="home"><a>1</a>', "    <b>2</b>\n"),
    ('<venue name="home"><venue name="work"><a>1</a></venue></venue>', ""),
    ('<venue name="work"><day_prefs><day_of_week>1</day_of_week></day_prefs></venue>',
     '    <venue name="work">\n        <day_prefs>\n            <day_of_week>1</day_of_week>\n'
     '        </day_prefs>\n    </venue>\n'),
    ('<day_prefs><venue name="home"><a>1</a></venue></day_prefs>', ""),
    ("<!-- x --><a>1</a><?b?><![CDATA[<c>1</c>]]>", "    <a>1</a>\n    <c>1</c>\n")])
def test_preferences(text, kept):
    assert reader.read_prefs(text) == kept
    assert reader.read_prefs(kept) == kept


def test_preferences_end_before_they_are_too_long():
    kept = reader.read_prefs("".join(f"<a{i}>1</a{i}>" for i in range(5000)))
    assert 8160 < len(kept) <= 8192 and kept.endswith(">\n")
    assert reader.read_prefs(f'<a>1</a><venue name="home">{kept * 2}</venue>') == "    <a>1</a>\n"


PREF_PIECES = ["<a>", "</a>", "1", "<b>2</b>", '<venue name="home">', "</venue>", "<day_prefs>",
               "</day_prefs>", "<venue>", "</global_preferences>", "<c/>", "<mod_time>5</mod_time>",
               " ", "\n", "&", "<global_preferences>", "<venue/>", '<d name="work">', "<", ">"]


@given(st.lists(st.sampled_from(PREF_PIECES), max_size=40).map("".join))
@example('<venue name="home"><a></venue><a>1</a>')
@settings(max_examples=400)
def test_kept_preferences_are_well_formed_and_stay_as_they_are(text):
    kept = reader.read_prefs(text)
    assert reader.read_prefs(kept) == kept
    stack = []
    for line in kept.splitlines():
        opening = re.fullmatch(r' +<(venue) name="(?:home|work|school)">| +<(day_prefs)>', line)
        if opening:
            stack.append(opening[1] or opening[2])
        elif line.strip() in ("</venue>", "</day_prefs>"):
            assert stack.pop() == line.strip()[2:-1]
        else:
            assert re.fullmatch(r" {4,12}<([a-z_0-9]{1,40})>[-0-9A-Za-z.+:/_ ]{1,64}</\1>", line)
    assert stack == []


def test_mod_time():
    assert reader.prefs_mod_time("<mod_time>1700000000.5</mod_time>") == 1700000000.5
    for text in "", "<mod_time>x</mod_time>", "<mod_time>5", "<mod_time>nan</mod_time>":
        assert reader.prefs_mod_time(text) == 0.0
