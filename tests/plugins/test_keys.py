"""The strong keys: what they sign, who gets it, where they are made; both commands.

What is common to both kinds of keys, and crashes in the middle, stand in boinc/test_boinc_keys.py.
The volunteer of these tests believes what volunteer.py believes.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import make
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from web import ECHO, Volunteer, Web, serving

import minigrid as m

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


keys = load("strong_keys_under_test", PLUGINS / "keys.py")
v = load("volunteer_of_strong_keys", PLUGINS / "volunteer.py")
STRONG, BOINC = keys.STRONG, keys.BOINC
A, B = (hashlib.sha256(text).hexdigest() for text in (b"a", b"b"))
NATIVE = '''"""tool: a native program."""


def workunit(i):
    return {"input": i} if i < 3 else None
'''
PLATFORM = "x86_64-pc-linux-gnu"
pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def folder(made_keys, tmp_path):
    return Path(shutil.copytree(made_keys, tmp_path / "data" / "keys"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def without(folder, *patterns):
    """Take files away."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def good(statement, signature, key_text):
    """Say whether volunteer.py believes a signature."""
    return v.verifies(statement, signature, v.read_key(key_text))


# ---- The pair ----------------------------------------------------------------


def test_a_strong_pair_is_made_as_the_volunteer_wants_it(folder):
    opened = keys.open_keys(folder, STRONG)
    assert opened.bits == 3072 and opened.can_sign
    n, e = v.read_key(opened.public)
    assert (n.bit_length(), e) == (3072, 65537)
    assert keys.fingerprint(opened.public) == v.fingerprint(opened.public)
    signature = opened.signature(A, "a")
    assert good(b"a", signature, opened.public) and not good(b"b", signature, opened.public)
    assert (folder / "strong_signatures").read_text() == f"{A} {signature} a\n"
    assert stat.S_IMODE((folder / "strong_private.pem").stat().st_mode) == 0o600


@pytest.mark.skipif(not shutil.which("openssl") and not os.environ.get("CI"), reason="no openssl")
def test_openssl_makes_the_same_signature(folder, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    found = subprocess.run(
        ["openssl", "dgst", "-sha256", "-sign", str(folder / "strong_private.pem"),
         str(tmp_path / "a")], capture_output=True, check=True).stdout
    assert keys.open_keys(folder, STRONG).signature(A) == found.hex()


def test_the_two_kinds_know_nothing_of_each_others_files(folder):
    strong, boinc = (keys.open_keys(folder, scheme) for scheme in keys.SCHEMES)
    strong.signature(A)
    boinc.signature(A[:32])
    strong.change()
    assert keys.open_keys(folder, BOINC).former == 0 and boinc.signed == {A[:32]}
    assert keys.open_keys(folder, STRONG).former == 1 and strong.signed == set()
    with pytest.raises(ValueError, match="no sha256"):
        strong.signature(A[:32])


FAULTS = {  # id: (what is done to the folder, what is said)
    "public key damaged": (lambda f: (f / "strong_public").write_text("minigrid-rsa-1 5 3\n"),
                           "strong_public is damaged"),
    "private key damaged": (lambda f: (f / "strong_private.pem").write_text("-----BEGIN\n"),
                            "strong_private.pem is damaged"),
    "private key of BOINC's": (lambda f: (f / "strong_private.pem").write_bytes(
        (f / "code_sign_private.pem").read_bytes()), "no RSA key of 2048 to 8192 bits: our own"),
    "another pair's": (lambda f: keys.write_file(
        f / "strong_private.pem", keys.draw_private(STRONG)[2], True), "do not belong together"),
    "history damaged": (lambda f: (f / "strong_history").write_text("[{"), "strong_history is dam"),
    "public key lost": (lambda f: [(f / "strong_signatures").touch(), without(f, "strong_p*")],
                        "strong_public is missing beside strong_signatures"),
}
if os.name == "posix":
    FAULTS["open to others"] = (lambda f: (f / "strong_private.pem").chmod(0o640),
                                "chmod 600 .*strong_private.pem")


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_told_and_stops_the_start(folder, fault):
    spoil, said = FAULTS[fault]
    spoil(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(m.StoreError, match=said):
        keys.open_keys(folder, STRONG)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_numbers_of_a_private_key_that_do_not_belong_together_are_seen(folder):
    """The library is told not to look, for its way takes 100 ms."""
    numbers = serialization.load_pem_private_key(
        (folder / "strong_private.pem").read_bytes(), None).private_numbers()
    spoilt = rsa.RSAPrivateNumbers(numbers.p, numbers.q, numbers.d + 2, numbers.dmp1, numbers.dmq1,
                                   numbers.iqmp, numbers.public_numbers)
    (folder / "strong_private.pem").write_bytes(
        spoilt.private_key(unsafe_skip_rsa_key_validation=True).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption()))
    with pytest.raises(m.StoreError, match="strong_private.pem is damaged"):
        keys.open_keys(folder, STRONG)


# ---- Where a missing pair is made --------------------------------------------

PLACES = {  # id: (files of the other kind that are there, made at a start?, made by `sign`?)
    "nothing at all": ((), True, False),
    "the other private key": (("private", "public"), True, True),
    "a private key alone": (("private",), True, True),
    "a private key kept elsewhere": (("public",), False, False),
}


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=("strong", "boinc"))
@pytest.mark.parametrize("case", PLACES)
def test_a_missing_pair_is_made_only_where_a_private_key_may_lie(made_keys, tmp_path, case, scheme):
    there, at_start, by_sign = PLACES[case]
    other = BOINC if scheme == STRONG else STRONG
    for first, wanted in ((True, at_start), (False, by_sign)):
        folder = tmp_path / f"keys {first}"
        folder.mkdir()
        for half in there:
            shutil.copy(made_keys / getattr(other, half), folder)
        keys.make_missing(folder, scheme, first)
        assert keys.has_pair(folder, scheme) == wanted
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        keys.make_missing(folder, scheme, first)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# ---- What is signed ----------------------------------------------------------

FILE = {"name": "pi_1_x.py", "open_name": "app.py", "main": True, "sha256": A}


def test_what_is_signed_binds_a_file_to_its_use():
    text = f"minigrid file 1\npi\npython\napp.py\n1\n0\n{A}\n".encode()
    assert keys.digest_of_file("pi", "python", FILE) == hashlib.sha256(text).hexdigest()
    assert v.file_statement({"app": "pi", "platform": "python"}, FILE) == text
    others = [("pj", "python", FILE), ("pi", PLATFORM, FILE)] + [
        ("pi", "python", {**FILE, **more}) for more in (
            {"open_name": "b.py"}, {"main": False}, {"executable": True}, {"sha256": B})]
    assert len({keys.digest_of_file(*other) for other in [*others, ("pi", "python", FILE)]}) == 7
    for app, platform, file in others:
        assert hashlib.sha256(v.file_statement({"app": app, "platform": platform}, file)) \
            .hexdigest() == keys.digest_of_file(app, platform, file)


# ---- Volunteers --------------------------------------------------------------


class Careful(Volunteer):
    """A volunteer that runs signed files only."""

    held = ""

    def __call__(self, **more):
        given = {"signing_key": v.fingerprint(self.held) if self.held else ""}
        reply = super().__call__(**{**given, **more})
        self.held = v.follow_key(self.held, reply)
        for job in reply["assignments"]:
            v.check_signatures(job, self.held)
        return reply


@pytest.fixture
def web(folder_of_project):
    with serving(folder_of_project, stock=20) as web:
        yield web


@pytest.fixture(scope="module")
def folder_of_project(tmp_path_factory):
    """One place, whose keys are drawn once."""
    return tmp_path_factory.mktemp("project")


def of_project():
    """The loaded plugin, and the keys of the open project."""
    plugin = sys.modules["minigrid_plugin_keys"]
    return plugin, m.project.data / "keys"


def test_a_volunteer_gets_signed_files_of_every_kind(tmp_path):
    version = tmp_path / "tool" / "versions" / PLATFORM
    version.mkdir(parents=True)
    (tmp_path / "tool" / "app.py").write_text(NATIVE)
    for name, mode in (("tool", 0o644), ("helper", 0o755), ("table.bin", 0o644)):
        (version / name).write_text(name)
        (version / name).chmod(mode)
    with serving(tmp_path) as web:
        anna = Careful(web)
        jobs = anna(work_req_seconds=1, cpu_req_instances=8, platforms=["python", PLATFORM],
                    host={"p_ncpus": 8, "p_fpops": 3e7})["assignments"]
    assert {job["app"] for job in jobs} == {"echo", "tool"}
    files = next(job["files"] for job in jobs if job["app"] == "tool")
    uses = {f["open_name"]: (f.get("main"), f.get("executable")) for f in files}
    assert uses == {"tool": (True, True), "helper": (None, True), "table.bin": (None, None)}
    for file in files[1:]:  # A file of one use is none of another.
        spoilt = {"app": "tool", "platform": PLATFORM, "files": [{**file, "main": True}]}
        with pytest.raises(ValueError, match=f"{file['name']} is not signed"):
            v.check_signatures(spoilt, anna.held)


def test_the_key_is_told_to_who_does_not_hold_it(web):
    anna = Careful(web)
    reply = anna()
    plugin, folder = of_project()
    public = (folder / "strong_public").read_text().strip()
    assert (reply["signing_key"], reply["signing_key_changes"]) == (public, [])
    reply = anna(work_req_seconds=1)
    assert anna.held == public and "signing_key" not in reply and reply["assignments"]
    assert plugin.signing_fingerprint() == v.fingerprint(public)[:32]


def test_who_asks_for_no_signatures_gets_work_as_before(web):
    reply = Volunteer(web)(work_req_seconds=1)
    assert "signing_key" not in reply and "signing_key_changes" not in reply
    assert all("signature" not in file for job in reply["assignments"] for file in job["files"])
    assert reply["assignments"]
    without(of_project()[1], "strong_*")
    assert Volunteer(web, "bob")(work_req_seconds=1)["assignments"]


@pytest.mark.parametrize("wrong", [None, 5, [], {}, "x", "A" * 64, "a" * 63, "a" * 65, True,
                                   "a" * 64 + "\n"])
def test_a_fingerprint_is_64_digits_or_nothing(web, wrong):
    got = web.post("/scheduler", Volunteer(web).request(signing_key=wrong))
    assert got.status == 400 and "signing_key must be the SHA-256" in got.json["error"]


def test_volunteers_of_any_former_key_follow_within_one_reply(web):
    anna, bob = Careful(web), Careful(web, "bob")
    anna()
    bob()
    opened = of_project()[0].own_keys()
    opened.change()
    before = bob.held
    reply = bob(work_req_seconds=1)
    assert len(reply["signing_key_changes"]) == 1 and reply["assignments"]
    opened.change()
    reply = anna(work_req_seconds=1)
    assert len(reply["signing_key_changes"]) == 2 and reply["assignments"]
    assert anna.held == opened.public not in (before, bob.held)
    bob()
    assert bob.held == anna.held and "signing_key" not in bob()


def test_who_holds_an_unknown_key_gets_no_work_and_is_told(web):
    anna = Careful(web)
    jobs = anna.fetch(2)
    anna.held = "minigrid-rsa-1 another"
    asked = dict(work_req_seconds=1, signing_key="ab" * 32, other_results=[])
    reply = Volunteer.__call__(anna, reports=[{"name": jobs[0]["name"], "client_state": 3,
                                               "exit_status": 1}], **asked)
    assert reply["assignments"] == [] and reply["acks"] == [jobs[0]["name"]]
    assert reply["signing_key_changes"] == [] and len(reply["signing_key"]) > 700
    assert [t["priority"] for t in reply["messages"] if "signing key" in t["text"]] == ["notice"]
    assert make.result(jobs[1]["name"]).server_state == m.ServerState.IN_PROGRESS
    with pytest.raises(ValueError, match="shows another signing key"):
        v.follow_key("minigrid-rsa-1 another", reply)


def test_a_key_that_changes_within_a_request_does_not_mix(web, monkeypatch):
    anna, (plugin, folder) = Careful(web), of_project()
    opened = plugin.own_keys()
    original, changes, before = opened.signature, [], opened.public

    def signature(digest, name=""):
        if not changes:  # as the command does it, in a process of its own
            changes.append(plugin.open_keys(folder, plugin.STRONG, make=False).change())
        return original(digest, name)

    monkeypatch.setattr(opened, "signature", signature)
    assert anna(work_req_seconds=1)["assignments"] and anna.held == before
    assert anna(work_req_seconds=1)["assignments"] and anna.held == opened.public != before


def test_one_look_at_the_files_is_enough_for_a_transaction(web, monkeypatch):
    """[D4] A look lets the interpreter go: many requests share one, and the next ones look anew."""
    plugin, folder = of_project()
    opened, looks, stamp_of = plugin.own_keys(), [], plugin.stamp_of
    monkeypatch.setattr(plugin, "stamp_of", lambda path: looks.append(path) or stamp_of(path))
    n = len((opened.public, looks)[1])
    seen = m.project.write(lambda: [(opened.public, len(looks)) for _ in range(3)])
    assert n > 0 and seen == [(opened.public, 2 * n)] * 3
    plugin.open_keys(folder, plugin.STRONG, make=False).change()
    assert m.project.write(lambda: opened.public) != seen[0][0]


# ---- Private keys kept elsewhere ---------------------------------------------


@pytest.fixture
def offline(web):
    """A server whose private keys were moved away before anything was signed; and their place."""
    plugin, folder = of_project()
    safe = m.project.data.parent / "safe"
    shutil.rmtree(safe, ignore_errors=True)
    shutil.copytree(folder, safe)
    without(folder, "*_private.pem", "*signatures")
    without(safe, "*signatures", "upload_secret")
    yield safe
    for path in safe.glob("strong_p*"):
        shutil.copy(path, folder)  # for the next test


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command as main() does; return (status, text, error)."""
    def run(*arguments):
        parser = argparse.ArgumentParser(prog="minigrid")
        keys.commands(parser.add_subparsers(required=True))
        options = parser.parse_args([str(a) for a in arguments])
        try:
            status, error = options.run(options), ""
        except (m.ClientError, m.StoreError, m.PluginError) as trouble:
            status, error = 1, str(trouble)
        return status, capsys.readouterr().out, error

    return run


def copy(text, folder):
    """Copy what `sign` names, in its order."""
    (line,) = re.findall(r"in this order:\n  (.+)\n", text)
    for path in line.split():
        shutil.copy(path, folder)
    return [Path(path).name for path in line.split()]


def test_unsigned_work_is_kept_back_until_it_was_signed_elsewhere(web, offline, call):
    anna = Careful(web)
    for _ in range(2):
        reply = anna(work_req_seconds=1)
        assert reply["assignments"] == [] and anna.held
        assert "echo: its program is not signed yet" in reply["messages"][-1]["text"]
    told = [text for _, text in m.project.errors if "is not signed" in text]
    assert len(told) == 1 and "echo version 1 for python is not signed: app.py" in told[0]
    assert "run 'minigrid sign' where the private key is" in told[0]
    assert Volunteer(web, "bob")(work_req_seconds=1)["assignments"], "who does not ask gets it"
    app = m.project.data.parent / "echo.py"
    status, text, error = call("sign", "--keys", offline, app)
    assert (status, error) == (0, "") and "echo python app.py" in text
    named = copy(text, of_project()[1])
    assert named == ["strong_signatures", "signatures", "strong_public", "code_sign_public"]
    assert anna(work_req_seconds=1)["assignments"]
    assert not list(of_project()[1].glob("*private*"))


def test_a_result_that_was_lost_is_not_sent_again_unsigned(web, offline):
    bob = Volunteer(web, "bob")
    (job, *_) = bob.fetch()
    bob.__class__ = Careful
    reply = bob(other_results=[])
    assert reply["assignments"] == []
    assert any("is not sent again" in told["text"] for told in reply["messages"])


def test_a_project_of_before_gets_its_strong_pair_where_the_old_private_key_is(web, offline, call):
    """The server of a project with a private key elsewhere says what to do, and then goes on."""
    plugin, folder = of_project()
    kept = {path.name: path.read_bytes() for path in offline.glob("strong_p*")}
    without(folder, "strong_*")
    without(offline, "strong_*")
    web = Web()
    assert [text for _, text in m.project.errors if "no keys for our own volunteers" in text
            and "'minigrid sign' where the private keys are" in text]
    assert not list(folder.glob("strong_*")) and plugin.signing_fingerprint() == ""
    anna = Careful(web)
    reply = anna(work_req_seconds=1)
    assert reply["assignments"] == [] and anna.held == "" and "signing_key" not in reply
    assert "not signed yet" in reply["messages"][-1]["text"]
    assert "none yet" in call("keys", "--keys", offline)[1]
    assert not list(offline.glob("strong_*")), "showing keys makes none"
    status, text, error = call("sign", "--keys", offline, m.project.data.parent / "echo.py")
    assert (status, error) == (0, "")
    copy(text, folder)
    assert anna(work_req_seconds=1)["assignments"] and anna.held
    assert plugin.signing_fingerprint() in call("keys", "--keys", offline)[1]
    for name, content in kept.items():
        (offline / name).write_bytes(content)


def test_a_project_of_before_with_its_private_key_here_gets_the_pair_at_the_next_start(web):
    _, folder = of_project()
    kept = {path.name: path.read_bytes() for path in folder.glob("strong_p*")}
    without(folder, "strong_*")
    anna = Careful(Web())
    assert anna(work_req_seconds=1)["assignments"]
    assert names(folder)[-3:] == ["strong_public", "strong_signatures", "upload_secret"]
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def test_the_plugin_does_without_boinc(tmp_path, made_keys, monkeypatch, call):
    monkeypatch.setattr(m, "plugins", [p for p in m.plugins if not p.__name__.endswith("boinc")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    with make.project(tmp_path, {"echo": ECHO}, min_sendwork_interval=0):
        m.run_pass(1_800_000_000)
        anna = Careful(Web())
        assert anna(work_req_seconds=1)["assignments"]
        assert names(m.project.data / "keys") == [
            "strong_private.pem", "strong_public", "strong_signatures"]
    status, text, _ = call("sign", "echo.py")
    assert status == 0 and "BOINC" not in text and "signed already  echo python app.py" in text
    assert "code_sign" not in text and "strong_private.pem stays here" in text
    assert "BOINC" not in call("keys")[1]
    (tmp_path / "notes.txt").write_text("x")
    assert "there is no application file" in call("sign", "notes.txt")[2]


# ---- Commands ----------------------------------------------------------------


@pytest.fixture
def apps(tmp_path, monkeypatch):
    """A directory of applications, and where to stand."""
    monkeypatch.chdir(tmp_path)
    apps = tmp_path / "apps"
    for name in ("one.py", "_draft.py", "tool/app.py", f"tool/versions/{PLATFORM}/tool",
                 f"tool/versions/{PLATFORM}/words.txt", "tool/versions/windows_x86_64/tool.exe"):
        path = apps / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(0o644)
    (apps / "tool" / "versions" / PLATFORM / "version.ini").write_text(
        "[version]\nalso_for = i686-pc-linux-gnu\n")
    return apps


LINUX = [f"tool {PLATFORM} tool", f"tool {PLATFORM} words.txt",
         "tool i686-pc-linux-gnu tool", "tool i686-pc-linux-gnu words.txt"]
WINDOWS = ["tool windows_x86_64 tool.exe"]


def test_sign_signs_what_the_server_enters(call, folder, apps):
    def signed(*paths):
        without(folder, "strong_signatures")
        status, text, error = call("sign", *paths)
        assert (status, error) == (0, "")
        own = text.partition("for BOINC clients")[0]
        return sorted(re.findall(r"^  signed +(.+)$", own, re.M))

    everything = sorted(["one python app.py", *LINUX, *WINDOWS])
    assert signed(apps) == everything
    assert signed(apps / "tool") == signed(apps / "tool" / "app.py") == sorted(LINUX + WINDOWS)
    assert signed(apps / "tool" / "versions" / "windows_x86_64") == WINDOWS
    versions = apps / "tool" / "versions" / PLATFORM
    assert signed(versions / "words.txt") == sorted(LINUX[1::2])
    assert signed(apps / "one.py") == ["one python app.py"]
    assert "no application file" in call("sign", versions / "version.ini")[2]
    signed(versions)
    file = {"name": "x", "open_name": "tool", "main": True, "executable": True,
            "sha256": hashlib.sha256((versions / "tool").read_bytes()).hexdigest()}
    opened = keys.open_keys(folder, STRONG)
    assert keys.digest_of_file("tool", PLATFORM, file) in opened.signed
    assert keys.digest_of_file("tool", PLATFORM, {**file, "main": False}) not in opened.signed


def test_signing_twice_adds_nothing_and_signatures_may_go_elsewhere(call, folder, apps, tmp_path):
    (tmp_path / "usb").mkdir()
    for _ in range(2):
        assert call("sign", apps, "--signatures", tmp_path / "usb")[0] == 0
    assert len((tmp_path / "usb" / "strong_signatures").read_text().splitlines()) == 6
    assert "0 new signatures, 6 files in all" in call(
        "sign", apps, "--signatures", tmp_path / "usb")[1]
    assert not (folder / "strong_signatures").exists()


def test_sign_needs_both_private_keys_and_signs_nothing_without(call, folder, apps):
    (folder / "code_sign_private.pem").rename(folder / "elsewhere")
    assert "(code_sign_private.pem)" in call("sign", apps)[2]
    assert "(code_sign_private.pem)" in call("keys", "--change")[2]
    (folder / "elsewhere").rename(folder / "code_sign_private.pem")
    (folder / "strong_private.pem").unlink()
    assert "private key is not in" in call("sign", apps)[2]
    assert "(strong_private.pem)" in call("keys", "--change")[2]
    assert not list(folder.glob("*signatures")) and not list(folder.glob("*history"))
    for command in (("sign", apps), ("keys", "--change")):
        assert "there are no keys for" in call(*command, "--keys", folder / "nowhere")[2]
    assert not (folder / "nowhere").exists()


def test_both_keys_are_made_changed_and_shown(call, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("keys", "--make", "safe")[0] == 0
    assert names(tmp_path / "safe") == ["code_sign_private.pem", "code_sign_public",
                                        "strong_private.pem", "strong_public"]
    before = call("keys")[1]
    text = call("keys", "--change")[1]
    shown = [re.findall("RSA ([0-9]+), fingerprint ([0-9a-f]{32})$", t, re.M)
             for t in (before, text)]
    assert [size for size, _ in shown[0]] == [size for size, _ in shown[1]] == ["3072", "1024"]
    assert not {f for _, f in shown[0]} & {f for _, f in shown[1]}
    assert len(re.findall("former keys +1\n", text)) == 2
    assert shown[1][0][1] == v.fingerprint((folder / "strong_public").read_text().strip())[:32]


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=("strong", "boinc"))
def test_keys_are_not_made_over_those_of_either_kind(call, folder, scheme):
    without(folder, scheme.public, scheme.private)
    before = names(folder)
    assert "there are keys in" in call("keys", "--make", folder)[2]
    assert names(folder) == before
