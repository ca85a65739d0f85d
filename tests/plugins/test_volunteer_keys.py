"""What a volunteer believes of signatures and keys: as its file says, against an independent one.

All signatures here are made by the library `cryptography`, or by hand where it makes no such thing.
"""

import functools
import hashlib

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hypothesis import given
from hypothesis import strategies as st
from volunteer_world import v

SUM = "ab" * 32
ANY = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x:
                   st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=9), x, max_size=3))


@functools.lru_cache(maxsize=None)
def drawn(n, bits, e):
    """The n-th key of the tests; drawn once, for it takes time."""
    return rsa.generate_private_key(e, bits)


def private(n, bits=2048, e=65537):
    return drawn(n, bits, e)


def text(n, bits=2048, e=65537):
    numbers = private(n, bits, e).public_key().public_numbers()
    return f"minigrid-rsa-1 {numbers.n:x} {numbers.e:x}"


def sign(data, n=0, pad=padding.PKCS1v15(), hash=hashes.SHA256(), **kind):
    return private(n, **kind).sign(data, pad, hash).hex()


def change(old, new):
    """The old key says that the new one is the next."""
    return {"key": text(new), "signature": sign(b"minigrid key 1\n" + text(new).encode(), old)}


def statement(app="pi", platform="python", open_name="app.py", main=1, executable=0, sha256=SUM):
    return f"minigrid file 1\n{app}\n{platform}\n{open_name}\n{main}\n{executable}\n" \
           f"{sha256}\n".encode()


def assignment(**more):
    """An assignment with one file, signed by key 0; `more` changes the file afterwards."""
    return {"name": "pi_0_0", "app": "pi", "platform": "python", "files": [{**dict(
        name="pi_1_abababab.py", open_name="app.py", main=True, sha256=SUM,
        signature=sign(statement())), **more}]}


# ---- Keys --------------------------------------------------------------------


def test_read_key_takes_what_the_library_made():
    for bits in (2048, 3072):
        numbers = private(0, bits).public_key().public_numbers()
        assert v.read_key(text(0, bits)) == (numbers.n, numbers.e)
    assert v.read_key(text(0, 2048, 3))[1] == 3
    assert v.fingerprint(text(0)) == hashlib.sha256(text(0).encode()).hexdigest()


N = int(text(0).split()[1], 16)
NO_KEYS = {
    "1024 bits": f"minigrid-rsa-1 {'c' * 255}1 10001",
    "one bit too few": f"minigrid-rsa-1 {N >> 1 | 1:x} 10001",
    "too many bits": f"minigrid-rsa-1 1{'0' * 2047}1 10001",
    "even n": f"minigrid-rsa-1 {N - 1:x} 10001", "even e": f"minigrid-rsa-1 {N:x} 10000",
    "e is 1": f"minigrid-rsa-1 {N:x} 1", "huge e": f"minigrid-rsa-1 {N:x} {N:x}",
    "upper case": text(0).upper(), "another way to write it": text(0).replace(" ", " 0", 1),
    "line feed": text(0) + "\n", "other word": text(0).replace("rsa-1", "rsa-2"), "empty": "",
    "not hex": f"minigrid-rsa-1 {'g' * 512} 10001", "more": text(0) + " 1", "number": 5,
    "none": None, "list": [text(0)], "bytes": text(0).encode()}


@pytest.mark.parametrize("case", NO_KEYS)
def test_what_is_no_key(case):
    with pytest.raises(ValueError, match="no signing key"):
        v.read_key(NO_KEYS[case])


# ---- Signatures --------------------------------------------------------------


def test_the_librarys_signature_is_good_for_its_bytes_and_key_alone():
    good = sign(b"program")
    key = v.read_key(text(0))
    assert v.verifies(b"program", good, key) is True
    assert not v.verifies(b"programs", good, key)
    assert not v.verifies(b"program", good, v.read_key(text(1)))
    assert v.verifies(b"program", sign(b"program", bits=3072), v.read_key(text(0, 3072)))
    assert not v.verifies(b"program", sign(b"program", hash=hashes.SHA512()), key)
    assert not v.verifies(b"program", sign(b"program", hash=hashes.SHA1()), key)
    assert not v.verifies(b"program", sign(b"program", pad=padding.PSS(
        padding.MGF1(hashes.SHA256()), 32)), key)


GOOD = sign(b"program")


@pytest.mark.parametrize("wrong", [
    "", GOOD[:-2], GOOD + "00", "00" + GOOD, GOOD[:-1], GOOD.upper(), GOOD[:-1] + "g", GOOD + "\n",
    " " + GOOD, "0" * 512, "f" * 512, "0" * 511 + "1", None, 5, [GOOD], {"hex": GOOD},
    GOOD.encode(), int(GOOD, 16), True, "\u0661" + GOOD[1:]],
    ids=lambda w: type(w).__name__)
def test_what_is_no_signature(wrong):
    assert v.verifies(b"program", wrong, v.read_key(text(0))) is False


def test_a_second_number_for_a_signature_is_none():
    """Signature plus modulus has the same power; it must not count [malleability]."""
    key = (N, 65537)
    shifted = next(x for x in (int(sign(b"%d" % n), 16) + N for n in range(99)) if x < 1 << 2048)
    data = next(b"%d" % n for n in range(99) if int(sign(b"%d" % n), 16) + N == shifted)
    assert pow(shifted, 65537, N) == pow(shifted - N, 65537, N)
    assert not v.verifies(data, f"{shifted:0512x}", key)
    assert v.verifies(data, f"{shifted - N:0512x}", key)


def cube_root(number):
    low, high = 0, 1 << (number.bit_length() // 3 + 2)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle ** 3 <= number else (low, middle - 1)
    return low


def test_a_forged_padding_with_garbage_after_the_hash_is_refused():
    """With e = 3 anybody makes a cube that begins like a signature: only the whole block counts."""
    info = v.SHA256_INFO + hashlib.sha256(b"evil").digest()
    begin = b"\0\1" + b"\xff" * 8 + b"\0" + info
    wanted = int.from_bytes(begin + b"\xff" * (256 - len(begin)), "big")
    forged = cube_root(wanted)
    assert (forged ** 3).to_bytes(256, "big").startswith(begin), "the forgery is no good one"
    assert not v.verifies(b"evil", f"{forged:0512x}", v.read_key(text(0, 2048, 3)))
    assert v.verifies(b"evil", sign(b"evil", e=3), v.read_key(text(0, 2048, 3)))


def by_hand(block):
    """Sign a whole block with key 0, whatever is in it."""
    numbers = private(0).private_numbers()
    return f"{pow(int.from_bytes(block, 'big'), numbers.d, N):0512x}"


@pytest.mark.parametrize("begin, info", [
    (b"\0\2", v.SHA256_INFO), (b"\0\1", b""), (b"\0\0", v.SHA256_INFO),
    (b"\0\1", v.SHA256_INFO.replace(b"\x05\0", b"")), (b"\0\1\0", v.SHA256_INFO)])
def test_only_one_block_is_right(begin, info):
    tail = b"\0" + info + hashlib.sha256(b"x").digest()
    key = v.read_key(text(0))
    assert not v.verifies(b"x", by_hand(begin + b"\xff" * (256 - len(begin + tail)) + tail), key)
    right = b"\0\1" + b"\xff" * 202 + b"\0" + v.SHA256_INFO + hashlib.sha256(b"x").digest()
    assert v.verifies(b"x", by_hand(right), key)


# ---- Files of an assignment --------------------------------------------------


def test_signed_files_are_run():
    assert v.check_signatures(assignment(), text(0)) is None
    given = assignment(main=False, executable=True, open_name="",
                       signature=sign(statement("a", "x86_64", "pi_1_abababab.py", 0, 1)))
    v.check_signatures({**given, "app": "a", "platform": "x86_64"}, text(0))
    given = assignment()
    del given["platform"]  # as parse_assignment() takes it
    v.check_signatures(given, text(0))


OTHER_USES = {
    "other content": dict(sha256="cd" * 32), "a data file as program": dict(
        signature=sign(statement(main=0))), "a program as data": dict(main=False),
    "executable": dict(executable=True), "another name": dict(open_name="other.py"),
    "no name but that of the download": dict(open_name=None), "unsigned": dict(signature=None),
    "of another app": dict(signature=sign(statement("mandelbrot"))),
    "for another platform": dict(signature=sign(statement(platform="windows_x86_64"))),
    "by another key": dict(signature=sign(statement(), 1)),
    "the bare sum": dict(signature=sign(SUM.encode())), "of a key, not a file": dict(
        signature=sign(b"minigrid key 1\n" + statement())), "list": dict(signature=[GOOD]),
    "cut": dict(signature=sign(statement())[:-2])}


@pytest.mark.parametrize("case", OTHER_USES)
def test_a_file_without_a_signature_for_this_use_is_not_run(case):
    with pytest.raises(ValueError, match=r"the file pi_1_abababab\.py is not signed"):
        v.check_signatures(assignment(**OTHER_USES[case]), text(0))


def test_one_unsigned_file_among_signed_ones_is_enough():
    given = assignment()
    given["files"].append({"name": "table.bin", "open_name": "table.bin", "sha256": SUM,
                           "signature": given["files"][0]["signature"]})
    with pytest.raises(ValueError, match="table.bin is not signed"):
        v.check_signatures(given, text(0))
    given["files"][1]["signature"] = sign(statement(open_name="table.bin", main=0))
    v.check_signatures(given, text(0))


def test_nothing_is_run_without_a_key():
    with pytest.raises(ValueError, match="no signing key; unsigned programs are not run"):
        v.check_signatures(assignment(), "")
    with pytest.raises(ValueError, match="no signing key of"):
        v.check_signatures(assignment(), NO_KEYS["1024 bits"])


def test_line_feeds_cannot_move_the_parts_of_a_statement():
    whole = sign(statement("pi", "python", "app.py\n1\n0", 1, 0))
    with pytest.raises(ValueError, match="without name, use or sum"):
        v.check_signatures(assignment(open_name="app.py\n1\n0", signature=whole), text(0))
    with pytest.raises(ValueError, match="without name, use or sum"):
        v.check_signatures({**assignment(), "app": "pi\npython"}, text(0))


@pytest.mark.parametrize("files", [None, [], {}, "x", [None], [[]], [5], 7, ["app.py"]])
def test_no_list_of_files(files):
    with pytest.raises(ValueError, match="incomplete assignment"):
        v.check_signatures({**assignment(), "files": files}, text(0))


@given(ANY)
def test_whatever_comes_is_a_value_error(value):
    for given_ in (value, {"files": value}, {"files": [value]}, {"app": value, "files": [{}]},
                   {**assignment(), "platform": [value]}, assignment(signature=value),
                   assignment(sha256=[value]), assignment(open_name=[value])):
        with pytest.raises(ValueError) as caught:
            v.check_signatures(given_, text(0))
        assert str(caught.value).isprintable()
    for reply in ({"signing_key": [value]}, {"signing_key": text(1), "signing_key_changes": value},
                  {"signing_key": text(1), "signing_key_changes": [value]},
                  {"signing_key": text(1), "signing_key_changes": [
                      {"key": text(1), "signature": value}]}):
        with pytest.raises(ValueError):
            v.follow_key(text(0), reply)


# ---- Change of the key -------------------------------------------------------


def show(n, *changes):
    return {"signing_key": text(n), "signing_key_changes": list(changes)}


FOLLOWED = {  # id: key held, reply, key to hold
    "the first is taken": ("", show(0), 0), "even with changes": ("", show(1, change(0, 1)), 1),
    "the same": (text(0), show(0), 0), "not told": (text(0), {}, 0),
    "told nothing": (text(0), {"signing_key": ""}, 0),
    "one step": (text(0), show(1, change(0, 1)), 1),
    "two steps": (text(0), show(2, change(0, 1), change(1, 2)), 2),
    "back and forth": (text(0), show(0, change(0, 1), change(1, 0)), 0),
    "what comes after ours": (text(0), show(1, change(0, 1), change(1, 2)), 1),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_the_key_is_followed_where_it_leads(case):
    held, reply, n = FOLLOWED[case]
    assert v.follow_key(held, reply) == text(n)


def test_no_key_at_all_stays_none():
    assert v.follow_key("", {}) == v.follow_key("", {"signing_key": ""}) == ""
    with pytest.raises(ValueError, match="no signing key"):
        v.follow_key("", {"signing_key": NO_KEYS["1024 bits"]})


NOT_FOLLOWED = {  # id: reply to one that holds key 0
    "no chain": show(1), "no list": {"signing_key": text(1)},
    "a wrong step": show(2, change(0, 1), change(0, 2)),
    "a wrong first step": show(2, change(1, 1), change(1, 2)),
    "signed by the new one itself": show(1, change(1, 1)),
    "it leads elsewhere": show(2, change(0, 1)),
    "it begins elsewhere": show(2, change(1, 2)),
    "the wrong order": show(2, change(1, 2), change(0, 1)),
    "a signature cut": show(1, {**change(0, 1), "signature": change(0, 1)["signature"][:-2]}),
    "no signature": show(1, {"key": text(1)}),
    "a file's signature": show(1, {"key": text(1), "signature": sign(statement())}),
    "signed without its prefix": show(1, {"key": text(1), "signature": sign(text(1).encode())}),
    "too many": show(1, *[change(0, 0)] * 100, change(0, 1)),
}


@pytest.mark.parametrize("case", NOT_FOLLOWED)
def test_another_key_is_refused_and_both_are_named(case):
    with pytest.raises(ValueError, match="shows another signing key than before") as caught:
        v.follow_key(text(0), NOT_FOLLOWED[case])
    said = str(caught.value)
    assert all(v.fingerprint(text(n))[:32] in said for n in (
        0, 1 if NOT_FOLLOWED[case]["signing_key"] == text(1) else 2))


@pytest.mark.parametrize("middle", [NO_KEYS["1024 bits"], "", None, 5])
def test_a_weak_key_in_the_middle_is_refused(middle):
    step = {"key": middle, "signature": sign(b"minigrid key 1\n" + str(middle).encode())}
    with pytest.raises(ValueError):
        v.follow_key(text(0), show(1, step, change(0, 1)))
