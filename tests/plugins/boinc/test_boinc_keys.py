"""Keys that BOINC clients know: their own format, crashes in the middle, keys kept elsewhere."""

import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import minigrid as m

PATH = Path(__file__).resolve().parents[3] / "plugins" / "keys.py"
SPEC = importlib.util.spec_from_file_location("keys_under_test", PATH)
keys = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(keys)
open_keys, read_key = keys.open_boinc_keys, keys.BOINC.read
pytestmark = pytest.mark.usefixtures("no_fsync")  # The order of writes is tested, not the disk.
posix = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")

# What a real client 7.20.5 accepted: it replaced the first key by the second, and ran a file.
ZEROS = "0" * 64
EXPONENT = f"{ZEROS}\n{ZEROS}\n{ZEROS}\n{'10001'.zfill(64)}\n."
OLD = f"""1024
e1c26384918a28c2ea95b025199f112b699bd0803a9253d3faf8ea31501c5b64
81db64fdbf2103701916728f6dcfe5c8117bd3268e5a443b133d7a22b7967479
16525b4be1f385f97252ccf4cd9487539aebe9d6448903d55d6442a311a5721e
8f9d56dba43dc285ba61287802671e63c85c7e429fdcc47165b571b7e7b9303d
{EXPONENT}"""
NEW = f"""1024
d73ba5b44d8b927502396cf2c745212dcff4b5e4826f0b19ef287ea7bb5489e7
16f4e948c5797dfa060b671d9e0d8e96ffc7eeb35a5921df4687e2185b0b8046
62c297068288d7e3e4e818e1f95e7fa6349045b5739f45a0e07f0ae571df57f1
bf58d3d318b1a78d25b8baac86758e6823c5e6bb05d4b23783e70144d2cec9f5
{EXPONENT}"""
NEW_SIGNED_BY_OLD = """8fad7cd8730781d21bc85b73552a6db1830ec3983165ec8989367d03487915cb
2567941ec3e7b36b551749e233925a76906db8349eaa69d8adc0bb13d891f9f2
6b7657a1fa4480245abd48068e175e885b73243b5cc6a3479a812ae160afc3dd
92d783048d859b06b701fa2c4bf03a9161424a7d367db6aee5cf117e85d2b2db
."""
FIRST = f"""1024
d66467bbaa6fdb89aa09af2fdcaf9340691662fc1b6ddf00b40097893fd73d08
cd38e37d56146a562c0435251f9ab1c740d178e904b381009dbceff295ac154e
6f0d710fac623b1b1d6d42a060a8ad641a1b201d1c27d537176e486a9320bfd3
6699fdb5379769d26f7bf846257dd58fb6b27cca6f9293c38797d6baec3e5213
{EXPONENT}"""
FILE = "83d314ee62a8edc4f54bbfa3b3feda92"
FILE_SIGNED_BY_FIRST = """3c1d0163ff3abc97f75dc6fbdb26d15b8e029b858fbfd59d1538c26ffc3ea2d5
db65dc8bf7e29740f3888ede6426521fa68442b0dae3beddc301e184bb56c612
db8334fd2aa79536ef767c3297962d8e205334e0c4d80566f2c5694bdb8630c0
ef0defcca3ff73048ddcb05ddfd96468062fe8c13bbe0b98a53355b2c070c3ff
."""
A, B = (hashlib.md5(text).hexdigest() for text in (b"a", b"b"))


@pytest.fixture
def folder(made_keys, tmp_path):
    return Path(shutil.copytree(made_keys, tmp_path / "data" / "keys"))


@pytest.fixture
def warnings(caplog):
    """What was logged, in one text."""
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def client_accepts(signature, md5, key_text):
    """Do what the client does with a signature, on our own reading of WIRE 8."""
    lines = key_text.split("\n")
    assert lines[0].isdigit() and lines[-1] == "." and {len(x) for x in lines[1:-1]} == {64}
    modulus, exponent = (int("".join(lines[n:n + 4]), 16) for n in (1, 5))
    assert len(lines) == 10 and signature.endswith("\n.") and "\r" not in signature
    raw = bytes.fromhex("".join(signature[:-1].split()))
    block = pow(int.from_bytes(raw, "big"), exponent, modulus).to_bytes(len(raw), "big")
    return block == b"\0\1" + b"\xff" * (len(raw) - 35) + b"\0" + md5.encode()


def lines(folder):
    return (folder / "signatures").read_text().splitlines()


def public_only(folder):
    """Take away what a server without the private keys does not have."""
    for path in folder.glob("*_private.pem"):
        path.unlink()


# ---- The client's format -----------------------------------------------------


def test_what_the_real_client_accepted_is_accepted_and_nothing_beside_it():
    old, new, first = map(read_key, (OLD, NEW, FIRST))
    assert (old.text, new.text, first.text) == (OLD, NEW, FIRST)
    assert keys.verifies(keys.BOINC.digest_of_key(NEW), NEW_SIGNED_BY_OLD, old)
    assert keys.verifies(FILE, FILE_SIGNED_BY_FIRST, first)
    assert not keys.verifies(keys.BOINC.digest_of_key(NEW + "\n"), NEW_SIGNED_BY_OLD, old)
    assert not keys.verifies(keys.BOINC.digest_of_key(NEW), NEW_SIGNED_BY_OLD, new)
    assert not keys.verifies(FILE, FILE_SIGNED_BY_FIRST.replace("3c1d", "3c1e"), first)


def test_keys_are_made_in_the_clients_format(folder):
    opened = open_keys(folder)
    assert opened.can_sign and opened.public.startswith("1024\n") and opened.former == 0
    assert client_accepts(opened.signature(A, "a.py"), A, opened.public)
    assert opened.signature(A) != opened.signature(B)
    assert lines(folder)[0] == f"{A} {keys.joined(opened.signature(A))} a.py"


@pytest.mark.skipif(not shutil.which("openssl") and not os.environ.get("CI"), reason="no openssl")
def test_openssl_agrees_on_key_and_signature(folder, tmp_path):
    """openssl signs 32 digits with the private file and gets our bytes; its public key is ours."""
    opened = open_keys(folder)
    (tmp_path / "digits").write_text(A)
    private = str(folder / "code_sign_private.pem")
    raw = subprocess.run(
        ["openssl", "pkeyutl", "-sign", "-inkey", private, "-in", str(tmp_path / "digits"),
         "-pkeyopt", "rsa_padding_mode:pkcs1"], capture_output=True, check=True).stdout
    assert raw.hex() == keys.joined(opened.signature(A))
    shown = subprocess.run(["openssl", "rsa", "-in", private, "-noout", "-modulus"],
                           capture_output=True, text=True, check=True).stdout
    assert shown.strip().lower() == "modulus=" + "".join(opened.public.split("\n")[1:5])
    (tmp_path / "signature").write_bytes(raw)
    subprocess.run(["openssl", "rsa", "-in", private, "-pubout", "-out", str(tmp_path / "pub")],
                   capture_output=True, check=True)
    back = subprocess.run(["openssl", "pkeyutl", "-verifyrecover", "-pubin", "-inkey",
                           str(tmp_path / "pub"), "-in", str(tmp_path / "signature")],
                          capture_output=True, check=True).stdout
    assert back == A.encode()


@pytest.mark.parametrize("changed", [
    OLD.upper(), OLD.replace("\n", "\r\n"), OLD.replace("\n", " "), OLD[:-2], f"\n  {OLD}  \n\n",
    OLD.replace("1024", "999"), "1024\n" + OLD[5:].replace("\n", "")])
def test_the_same_key_in_other_clothes(changed):
    assert read_key(changed) == read_key(OLD)


@pytest.mark.parametrize("text", [
    "", " ", "1024", "1024\n.", OLD[5:], OLD.replace("e1c2", "e1g2"), OLD.replace(ZEROS, "0", 1),
    OLD.replace("e1c2", "e1c2e1c2"), "x" + OLD, OLD + "\n" + NEW, "\u0661" + OLD,
    OLD.replace("10001", "10000"), OLD.replace("10001", "00001"), OLD.replace("303d", "303e"),
    f"1024\n{'0' * 512}\n.", "1024\n" + "0" * 255 + "3" + "0" * 255 + "3\n."])
def test_what_is_no_key(text):
    with pytest.raises(ValueError):
        read_key(text)


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
@example(" " * 100_000)
@example("1024 " + "a " * 50_000)
def test_any_text_is_unknown_or_no_key_at_all(shared, text):
    assert shared.answer(text) == (("unknown", "", "") if text.strip() else
                                   ("none", shared.public, ""))
    assert shared.certifies(text, text.replace("\ud800", ""), 1) is False


@pytest.fixture(scope="module")
def shared(made_keys):
    """Keys that no test changes."""
    return open_keys(made_keys)


# ---- Files -------------------------------------------------------------------


@posix
def test_private_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = tmp_path / "deep" / "keys"
        opened = open_keys(folder)
        opened.signature(A)
        opened.change()
        opened.signature(A)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.iterdir()]}
    assert modes == {"keys": 0o700, "code_sign_private.pem": 0o600, "upload_secret": 0o600,
                     "code_sign_public": 0o644, "history": 0o644, "signatures": 0o644}


@posix
@pytest.mark.parametrize("name", ["code_sign_private.pem", "upload_secret"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_private_files_that_others_can_read_are_refused_with_advice(folder, name, mode):
    (folder / name).chmod(mode)
    with pytest.raises(m.StoreError, match=f"chmod 600 {re.escape(str(folder / name))}"):
        open_keys(folder)


def test_keys_are_made_once(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert open_keys(folder).public == open_keys(folder).public
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_two_first_starts_draw_different_secrets(tmp_path, monkeypatch):
    """However the generators for all else are seeded."""
    texts = []
    for name in ("one", "two"):
        random.seed(1)
        monkeypatch.setattr(m.project, "rng", random.Random(1))
        opened = open_keys(tmp_path / name)
        texts += [opened.public, (tmp_path / name / "upload_secret").read_text()]
    assert len(set(texts)) == 4


def test_no_keys_are_made_unless_asked(tmp_path):
    with pytest.raises(m.StoreError, match="no keys for BOINC clients in .*minigrid keys --make"):
        open_keys(tmp_path / "keys", make=False)
    assert not (tmp_path / "keys").exists()


def damage(name, text):
    return lambda folder: (folder / name).write_text(text)


def openssl_key(*arguments):
    def replace(folder):
        pem = subprocess.run(["openssl", *arguments], capture_output=True, check=True).stdout
        (folder / "code_sign_private.pem").write_bytes(pem)
    return replace


FAULTS = {  # id: (what is done to the folder, what is said)
    "public key damaged": (damage("code_sign_public", NEW[:200]), "code_sign_public is damaged"),
    "public key of another": (damage("code_sign_public", NEW), "do not belong together"),
    "private key damaged": (damage("code_sign_private.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n"),
                            "code_sign_private.pem is damaged"),
    "private key empty": (damage("code_sign_private.pem", ""), "code_sign_private.pem is damaged"),
    "secret damaged": (damage("upload_secret", "00ff\n"), "upload_secret is damaged"),
    "history no JSON": (damage("history", "[{"), "history is damaged"),
    "history of numbers": (damage("history", "[1]"), "history is damaged"),
    "history no list": (damage("history", '{"old": 1}'), "history is damaged"),
    "history without signature": (damage("history", json.dumps([{"old": OLD, "new": NEW}])),
                                  "history is damaged"),
    "history of other texts": (damage("history", json.dumps(
        [{"old": OLD, "new": "x", "signature": ""}])), "history is damaged"),
    "both keys lost": (lambda folder: [(folder / "signatures").touch(),
                                       (folder / "code_sign_private.pem").unlink(),
                                       (folder / "code_sign_public").unlink()],
                       "code_sign_public is missing beside signatures"),
    "public key lost": (lambda folder: [
        (folder / "history").write_text(json.dumps(
            [{"old": OLD, "new": NEW, "signature": NEW_SIGNED_BY_OLD}])),
        (folder / "code_sign_public").unlink()], "code_sign_public is missing: put it back"),
}
if shutil.which("openssl"):
    FAULTS["private key too large"] = openssl_key("genrsa", "2048"), "no RSA key of 512 to 1024"
    FAULTS["private key of another kind"] = (
        openssl_key("genpkey", "-algorithm", "ed25519"), "no RSA key")
    FAULTS["private key with password"] = (openssl_key(
        "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024", "-aes128", "-pass",
        "pass:x"), "wants a password")


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_told_in_one_plain_sentence_and_mends_nothing_by_guess(folder, fault):
    spoil, said = FAULTS[fault]
    spoil(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(m.StoreError, match=said) as caught:
        open_keys(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# ---- The signatures file -----------------------------------------------------


def test_a_server_without_the_private_key_uses_what_was_signed_elsewhere(folder):
    signature = open_keys(folder).signature(A, "a.py")
    public_only(folder)
    server = open_keys(folder)
    assert not server.can_sign
    assert (server.signature(A), server.signature(B)) == (signature, None)
    with pytest.raises(m.ClientError, match="private key is not in"):
        server.add(B, "b.py")
    with pytest.raises(m.ClientError, match="private key is not in"):
        server.change()


def test_signatures_copied_in_are_taken_without_a_restart(folder, made_keys, tmp_path):
    public_only(folder)
    server = open_keys(folder)
    assert server.signature(A) is None
    signer = open_keys(made_keys, signatures=tmp_path)
    text = signer.signature(A, "a.py")
    shutil.copy(tmp_path / "signatures", folder / "signatures")
    assert server.signature(A) == text
    assert server.signature(B) is None
    signer.signature(B)
    shutil.copy(tmp_path / "signatures", folder / "signatures")
    assert server.signature(B) == signer.signature(B)


def test_bad_signatures_are_ignored_reported_once_and_made_again(folder, warnings):
    opened = open_keys(folder)
    good = opened.signature(A, "a.py")
    bad = f"{B} {keys.joined(good)} b.py\nnonsense\n{B} {'f' * 256} b.py\n{A[:9]} 00 a\n"
    (folder / "signatures").write_text(bad + "\n".join(lines(folder)) + "\n")
    again = open_keys(folder)
    assert again.signature(A) == good
    for _ in range(3):
        assert client_accepts(again.signature(B, "b.py"), B, again.public)
    assert len(lines(folder)) == 6
    assert warnings().count(f"signature of {B} is not by the key") == 1
    assert warnings().count("line 2 is no signature") == 1 == warnings().count("line 4 is no")
    public_only(folder)
    (folder / "signatures").write_text(bad)
    assert open_keys(folder).signature(B) is None


def test_a_later_good_line_counts_beside_a_bad_one(folder):
    good = keys.joined(open_keys(folder).signature(A))
    public_only(folder)
    (folder / "signatures").write_text(f"{A} {good[::-1]} a\n{A} {good}\n{A} 00 a\n")
    assert keys.joined(open_keys(folder).signature(A)) == good


@pytest.mark.parametrize("kept", [0, 1, 40, 100, 287, 288, 289, 290, 294])
def test_a_torn_last_line_costs_nothing(folder, kept):
    """Whatever is left of a line after a crash: the file is signed again, its neighbours stay."""
    opened = open_keys(folder)
    first, second = opened.signature(A, "a.py"), opened.signature(B, "b.py")
    whole = (folder / "signatures").read_bytes()
    start = whole.index(b"\n") + 1
    (folder / "signatures").write_bytes(whole[:start + kept])
    after = open_keys(folder)
    assert (after.signature(B, "b.py"), after.signature(A, "a.py")) == (second, first)
    third = after.signature(FILE, "c.py")
    public_only(folder)
    server = open_keys(folder)
    assert [server.signature(x) for x in (A, B, FILE)] == [first, second, third]


def test_names_cannot_forge_lines(folder):
    opened = open_keys(folder)
    opened.signature(A, f"a.py\n{B} {'0' * 256} \udcffé\r\n\x85\u2028x")
    assert len((folder / "signatures").read_bytes().split(b"\n")) == 2
    assert open_keys(folder).signed == {A}


@pytest.mark.parametrize("md5", ["", "x", A.upper(), A + "0", A + "\n", A[:-1] + "\u0661"])
def test_only_an_md5_can_be_signed(shared, md5):
    with pytest.raises(ValueError):
        shared.signature(md5)


def test_a_full_disk_does_not_stop_signing(folder, monkeypatch, warnings):
    opened = open_keys(folder)
    (folder / "signatures").mkdir()
    assert client_accepts(opened.signature(A), A, opened.public)
    assert client_accepts(opened.signature(A), A, opened.public)
    assert warnings().count("cannot write") == 1


def test_a_key_with_a_short_modulus_works_as_the_client_wants_it():
    """512 bits: signatures are as long as the key, fields as long as ever [WIRE 8.1]."""
    p, q = 2 ** 255 + 95, 2 ** 256 + 297  # Both prime.
    assert pow(3, p - 1, p) == pow(3, q - 1, q) == 1
    key = keys.Key(p * q, 65537, keys.BOINC)
    d = pow(65537, -1, (p - 1) * (q - 1))
    signature = keys.sign(A, key, d)
    assert key.text.startswith("512\n" + "0" * 64) and len(keys.joined(signature)) == 128
    assert read_key(key.text) == key and keys.verifies(A, signature, key)
    assert client_accepts(signature, A, key.text)
    beside = f"{int(keys.joined(signature), 16) + key.n:0128x}"
    assert not keys.verifies(A, beside, key), "larger than the modulus: the client refuses it"


def test_a_signature_is_sent_in_full_length_though_it_was_written_without_zeros(folder):
    opened = open_keys(folder)
    found = ((md5, opened.signature(md5)) for n in range(2000)
             for md5 in [hashlib.md5(b"%d" % n).hexdigest()])
    md5, text = next((md5, text) for md5, text in found if text[0] == "0")
    public_only(folder)
    (folder / "signatures").write_text(f"{md5} {keys.joined(text).lstrip('0')} x\n")
    assert open_keys(folder).signature(md5) == text


def test_many_threads_sign_each_file_once(folder, monkeypatch):
    inside, together = [], []
    real = keys.sign

    def slow(*arguments):
        """Sign, and give others the time to come in, if they can."""
        inside.append(1)
        threading.Event().wait(0.002)
        together.append(len(inside))
        inside.pop()
        return real(*arguments)

    monkeypatch.setattr(keys, "sign", slow)
    opened = open_keys(folder)
    wanted = [hashlib.md5(b"%d" % n).hexdigest() for n in range(12)]
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        for md5 in wanted:
            opened.signature(md5, "x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.split()[0] for line in lines(folder)) == sorted(wanted)
    assert together == [1] * 12


# ---- Key change --------------------------------------------------------------


def follow(opened, held):
    """Be a client that holds a key: ask until told nothing; return (its key, how often told)."""
    for n in range(20):
        status, text, signature = opened.answer(held)
        if status in ("current", "unknown"):
            assert (text, signature) == ("", "")
            return held, n, status
        assert status == ("old" if held else "none")
        if held:
            digest = hashlib.md5(text.encode()).hexdigest()
            assert client_accepts(signature, digest, held), "the client refuses this key"
        held = text
    raise AssertionError("the chain never ends")


def test_clients_of_any_former_key_follow_step_by_step(folder):
    opened = open_keys(folder)
    held = [opened.public]
    for _ in range(3):
        opened.change()
        held.append(opened.public)
    assert len(set(held)) == 4 and opened.former == 3
    for n, key in enumerate(held):
        assert follow(opened, key) == (held[3], 3 - n, "current")
    assert follow(opened, "") == (held[3], 1, "current")
    assert opened.answer(held[0])[1] == held[1]
    assert opened.answer(held[2].replace("\n", "\r\n").upper())[1] == held[3]
    assert follow(opened, OLD)[2] == follow(opened, "nonsense")[2] == "unknown"
    assert open_keys(folder).answer(held[1]) == opened.answer(held[1])


def test_the_answer_of_the_recorded_exchange(folder):
    """A server with these files tells the client what it was told then, to the byte."""
    public_only(folder)
    (folder / "code_sign_public").write_bytes(NEW.replace("\n", "\r\n").encode())
    (folder / "history").write_text(json.dumps(
        [{"old": OLD, "new": NEW, "signature": NEW_SIGNED_BY_OLD}]))
    server = open_keys(folder)
    assert server.answer(OLD) == ("old", NEW, NEW_SIGNED_BY_OLD)
    assert server.answer(NEW) == ("current", "", "")
    assert server.answer("\n") == ("none", NEW, "")


def test_a_history_with_a_bad_signature_leads_nowhere(folder):
    public_only(folder)
    (folder / "code_sign_public").write_text(NEW)
    (folder / "history").write_text(json.dumps(
        [{"old": OLD, "new": NEW, "signature": NEW_SIGNED_BY_OLD.replace("8fad", "8fae")}]))
    assert open_keys(folder).answer(OLD)[0] == "unknown"


def test_signatures_start_anew_with_the_new_key(folder, warnings):
    opened = open_keys(folder)
    before, old = opened.signature(A, "a.py"), opened.public
    opened.change()
    assert opened.signed == set()
    after = opened.signature(A, "a.py")
    assert not client_accepts(after, A, old) and client_accepts(after, A, opened.public)
    assert after != before and opened.signed == {A} and warnings() == ""


def test_a_running_server_takes_up_a_change_by_a_command(folder):
    server, command = open_keys(folder), open_keys(folder)
    old = server.public
    server.signature(A)
    command.change()
    assert server.answer(old) == command.answer(old) and server.public == command.public != old
    assert client_accepts(server.signature(A), A, command.public)


def test_a_running_server_notices_that_the_private_key_was_taken_away(folder):
    server = open_keys(folder)
    server.signature(A)
    public_only(folder)
    assert not server.can_sign and server.signature(A) and server.signature(B) is None


def test_a_running_server_goes_on_while_its_files_are_wrong(folder, warnings):
    server = open_keys(folder)
    public = server.public
    (folder / "code_sign_public").write_text(NEW)
    for _ in range(3):
        assert server.public == public and server.answer(public)[0] == "current"
        assert client_accepts(server.signature(B), B, public)
    assert warnings().count("do not belong together") == 1
    (folder / "code_sign_public").write_text(public)
    assert server.answer(public)[0] == "current"


def test_files_that_did_not_change_are_not_read_again(folder, monkeypatch):
    """Each request asks for keys and signatures; checking a private key takes 10 ms."""
    server = open_keys(folder)
    text = server.signature(A)
    assert server.signed == {A}
    monkeypatch.setattr(keys, "read_file", None)
    assert server.signature(A) == text and server.answer("") == ("none", server.public, "")


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def crashes(monkeypatch):
    """Let the n-th step that changes a file be the last of the process."""
    real = {"settle": m.settle, "unlink": Path.unlink, "opened": keys.opened}
    left = []

    def dying(name):
        def function(*args, **kwargs):
            if left and left[0] == 0:
                raise Crash(name)
            if left:
                left[0] -= 1
            return real[name](*args, **kwargs)
        return function

    monkeypatch.setattr(keys, "settle", dying("settle"))
    monkeypatch.setattr(keys, "opened", dying("opened"))
    monkeypatch.setattr(Path, "unlink", dying("unlink"))
    return left


def until_it_survives(crashes, act, check):
    """Crash at the first step, the second ... until it goes through; check after each."""
    for n in range(60):
        crashes[:] = [n]
        try:
            act()
        except Crash:
            crashes.clear()
            check()
        else:
            crashes.clear()
            check()
            return n
    raise AssertionError("it never ends")


def test_a_crash_at_any_step_of_a_change_strands_no_client(made_keys, tmp_path, crashes):
    held, folder = [], tmp_path / "keys"
    public = open_keys(made_keys).public

    def act():
        crash = crashes.copy()
        crashes.clear()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made_keys, folder)
        opened = open_keys(folder)
        opened.signature(A, "a.py")
        crashes[:] = crash
        opened.change()

    def check():
        """Who held the old key, and whoever got one since, comes to the key that signs."""
        opened = open_keys(folder)
        now, n, status = follow(opened, public)
        assert (now, status) == (opened.public, "current") and n <= 1 and opened.can_sign
        assert client_accepts(opened.signature(A), A, opened.public)
        held.append(n)
        opened.change()  # And the next change works.
        assert follow(opened, public)[2] == follow(opened, now)[2] == "current"

    assert until_it_survives(crashes, act, check) >= 9
    assert set(held) == {0, 1}, "some crashes were before, some after the point of no return"


def test_a_crash_at_any_step_of_the_first_start_is_mended_by_the_next(tmp_path, crashes):
    folder = tmp_path / "keys"

    def check():
        opened = open_keys(folder)
        assert client_accepts(opened.signature(A), A, opened.public)
        assert opened.certifies(opened.certificate("x", 1), "x", 1)
        shutil.rmtree(folder)

    assert until_it_survives(crashes, lambda: open_keys(folder), check) >= 9


# ---- Upload certificates -----------------------------------------------------


def test_a_certificate_holds_for_one_name_and_one_size(shared):
    text = shared.certificate("a_0_0_out", 1000)
    assert re.fullmatch(r"[0-9a-f]{64}\n\.", text)
    for same in (text, text.strip("\n."), f"\n{text}\n", text.replace("\n", "\r\n"), text.upper()):
        assert shared.certifies(same, "a_0_0_out", 1000)
    assert shared.certifies(text, "a_0_0_out", 1000.0)
    for other in (("a_0_0_out", 1001), ("a_0_1_out", 1000), ("", 1000), ("A_0_0_out", 1000)):
        assert not shared.certifies(text, *other)
    for wrong in ("", ".", "\n.", text[1:], "0" * 64, "0123\nabcd\n.", "é" * 64, text + text):
        assert not shared.certifies(wrong, "a_0_0_out", 1000)


def test_a_certificate_cannot_be_stretched_by_the_name(shared):
    """The text under it is the one of WIRE 10.4; a name with tags in it is another text."""
    text = shared.certificate("a", 1)
    assert not shared.certifies(text, "a</name><max_nbytes>1</max_nbytes><name>a", 1)
    assert text != shared.certificate("a</name>", 1)


def test_certificates_outlive_a_change_of_the_key_but_not_of_the_secret(folder):
    opened = open_keys(folder)
    text = opened.certificate("a", 1)
    opened.change()
    assert open_keys(folder).certifies(text, "a", 1)
    (folder / "upload_secret").unlink()
    assert not open_keys(folder).certifies(text, "a", 1)


# ---- Commands ----------------------------------------------------------------


START = {"name": "start_1.py", "content": b"print(1)\n", "boinc": "both"}


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run a command as main() does, with only these two; return (status, text, error)."""
    import argparse
    monkeypatch.chdir(tmp_path)
    own = [p for p in m.plugins if not hasattr(p, "start_files")]
    monkeypatch.setattr(m, "plugins", own + [SimpleNamespace(
        start_files=lambda _: [START], scheduler_path="/boinc/scheduler")])

    def run(*arguments):
        parser = argparse.ArgumentParser(prog="minigrid")
        keys.commands(parser.add_subparsers(required=True))
        options = parser.parse_args([str(a) for a in arguments])
        try:
            status, error = options.run(options), ""
        except (m.ClientError, m.StoreError) as trouble:
            status, error = 1, str(trouble)
        return status, capsys.readouterr().out, error

    return run


NATIVE = SimpleNamespace(__name__="native_apps", find=lambda path: [
    p for p in (path.parent, path, *path.glob("*"))
    if (p / "versions").is_dir() and (p != path.parent or path.name == "app.py")])


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def apps(tmp_path):
    """A directory of applications: two Python files, one that is none, a native one."""
    for name in ("one.py", "two.py", "_draft.py", "collatz/app.py", "collatz/source/x.c",
                 "collatz/versions/x86_64-pc-linux-gnu/collatz",
                 "collatz/versions/x86_64-pc-linux-gnu/version.ini",
                 "collatz/versions/windows_x86_64/collatz.exe",
                 "collatz/versions/windows_x86_64/table.py",
                 "collatz/versions/windows_x86_64/.hidden",
                 "collatz/versions/windows_x86_64/__pycache__/table.pyc"):
        path = tmp_path / "apps" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[version]\n" if path.suffix == ".ini" else name)
    return tmp_path / "apps"


def test_the_private_key_never_comes_near_the_server(call, tmp_path, apps):
    """The whole way of README: make and sign there, copy, serve here, change there, copy.

    What our own volunteers see of it stands in ../test_keys.py.
    """
    there, here = tmp_path / "safe", tmp_path / "data" / "keys"
    assert call("keys", "--make", there)[0] == 0
    assert sorted(p.name for p in there.iterdir()) == [
        "code_sign_private.pem", "code_sign_public", "strong_private.pem", "strong_public"]
    status, text, _ = call("sign", "--keys", there, apps / "one.py", apps / "two.py")
    assert status == 0 and "3 new signatures, 3 files in all" in text
    here.mkdir(parents=True)

    def copy(text, seen=lambda: None):
        """Copy what the command says, in the order it says, and look after each file."""
        (line,) = re.findall(r"in this order:\n  (.+)\n", text)
        for path in line.split():
            shutil.copy(path, here)
            seen()

    copy(text)
    server = open_keys(here)
    assert not server.can_sign
    wanted = [md5(b"one.py"), md5(b"two.py"), md5(START["content"])]
    assert all(client_accepts(server.signature(x), x, server.public) for x in wanted)
    held = server.public
    assert call("keys", "--change", "--keys", there)[0] == 0
    told = []
    copy(call("sign", "--keys", there, apps / "one.py", apps / "two.py")[1],
         lambda: told.append(server.answer(held)[0]))
    assert told == ["current"] * 5 + ["old"], "in another order clients are sent away"
    assert follow(server, held) == (server.public, 1, "current") and server.public != held
    assert all(client_accepts(server.signature(x), x, server.public) for x in wanted)
    assert not (here / "code_sign_private.pem").exists()


def test_sign_takes_applications_as_the_loaders_find_them(call, folder, apps, monkeypatch):
    """With the loaders that are there, and whatever is not theirs as plain files."""
    own = [p for p in m.plugins if not hasattr(p, "start_files")]
    native = [] if any(p.__name__.endswith("native_apps") for p in own) else [NATIVE]
    boinc = [SimpleNamespace(scheduler_path="/boinc/scheduler")]  # without a start program
    monkeypatch.setattr(m, "plugins", own + native + boinc)

    def signed(*paths):
        for path in folder.glob("*signatures"):
            path.unlink()
        status, text, error = call("sign", *paths)
        assert (status, error) == (0, "")
        return set(re.findall(r"^  signed +(\S+)$", text, re.M))

    assert signed(apps) == {"one.py", "two.py", "table.py", "collatz", "collatz.exe"}
    found = open_keys(folder).signed
    assert md5(b"collatz/versions/windows_x86_64/collatz.exe") in found and len(found) == 5
    for path in ("collatz", "collatz/app.py"):
        assert signed(apps / path) == {"table.py", "collatz", "collatz.exe"}
    windows = apps / "collatz" / "versions" / "windows_x86_64"
    assert signed(windows) == {"table.py", "collatz.exe"}
    assert signed(windows / "table.py", windows / "collatz.exe") == {"table.py", "collatz.exe"}
    assert signed(apps / "collatz" / "source") == {"x.c"}
    assert signed(apps / "_draft.py") == {"_draft.py"}
    call("sign", windows)
    assert "signed already  table.py" in call("sign", windows)[1]


def test_signing_twice_adds_nothing_and_signatures_may_go_elsewhere(call, folder, apps, tmp_path):
    (tmp_path / "usb").mkdir()
    for _ in range(2):
        assert call("sign", apps / "one.py", "--signatures", tmp_path / "usb")[0] == 0
    assert len(lines(tmp_path / "usb")) == 2
    assert not (folder / "signatures").exists()
    assert "2 new" in call("sign", apps / "one.py")[1]


def test_sign_refuses_in_one_sentence_and_signs_nothing_then(call, folder, apps):
    cases = {("sign", apps / "one.py", apps / "none.py"): "there is no file or directory",
             ("sign", apps / "one.py", "--signatures", apps / "two.py"): "cannot write",
             ("sign", apps / "one.py", "--keys", apps): "there are no keys for"}
    (apps / "empty").mkdir()
    cases[("sign", apps / "empty")] = "holds no application file"
    for arguments, said in cases.items():
        status, text, error = call(*arguments)
        assert status == 1 and said in error and "\n" not in error, arguments
    public_only(folder)
    assert "private key is not in" in call("sign", apps / "one.py")[2]
    assert "private key is not in" in call("keys", "--change")[2]
    assert not (folder / "signatures").exists()


def test_keys_shows_what_is_where(call, folder):
    opened = open_keys(folder)
    opened.signature(A)
    status, text, _ = call("keys")
    assert status == 0 and f"keys in {Path('data') / 'keys'}" in text
    text = text[text.index("for BOINC clients"):]
    assert re.search(r"private key +here", text) and re.search(r"signed files +1\n", text)
    shown = re.search("fingerprint ([0-9a-f]{32})", text)[1]
    assert hashlib.sha256(opened.public.encode()).hexdigest().startswith(shown)
    text = call("keys", "--change")[1].partition("for BOINC clients")[2]
    assert shown not in text and re.search(r"former keys +1\n", text)
    public_only(folder)
    assert re.search(r"private key +elsewhere", call("keys")[1])


def test_keys_are_not_made_over_others(call, folder, tmp_path):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "there are keys in" in call("keys", "--make", folder)[2]
    (folder / "code_sign_public").unlink()
    assert "there are keys in" in call("keys", "--make", folder)[2]
    assert before["code_sign_private.pem"] == (folder / "code_sign_private.pem").read_bytes()
    assert "there are no keys for" in call("keys", "--keys", tmp_path / "nowhere")[2]
    assert not (tmp_path / "nowhere").exists()
