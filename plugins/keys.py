"""Code signing: keys, signatures of application files, change of the key, upload certificates.

Volunteers run no application file without a signature by the project's key. They take the first
key they are told and keep it; a later one must be signed by the one they hold [D11, WIRE 8]. There
are two kinds of keys: STRONG for our own volunteers, BOINC for BOINC clients, whose format cannot
be chosen: RSA of at most 1024 bits over the MD5 of a file.

    data/keys/strong_private.pem, code_sign_private.pem   sign; may stay on another machine, with
                                                          `minigrid sign`
    data/keys/strong_public,      code_sign_public        what volunteers are told
    data/keys/strong_history,     history                 former keys, each with the next one
                                                          signed by it
    data/keys/strong_signatures,  signatures              lines: what was signed, signature in hex,
                                                          name of the file
    data/keys/upload_secret                               makes upload certificates; of this server
                                                          alone

Files changed by a command, or copied in from elsewhere, are taken up without a restart.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import minigrid
from minigrid import ClientError, StoreError, apps, log, plugged, project, remember, settle

SECRET = "upload_secret"
FINGERPRINT = re.compile("([0-9a-f]{64})?")


# ---- The two kinds of keys ---------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A kind of keys: whom it is for, its files, and the forms that its readers want."""

    clients: str  # who checks these signatures, in words
    private: str  # file names
    public: str
    history: str
    signatures: str
    bits: int  # of a key that is made here
    bits_min: int
    bits_max: int
    hash: str  # of what is signed; its hex digits stand for it everywhere here
    tail: Callable  # (digest in hex) -> what ends the block that a signature hides, bytes
    numbers: Callable  # (text of a public key) -> (n, e). Raises ValueError
    write: Callable  # (Key) -> its text
    written: Callable  # (signature in hex) -> its text
    key_prefix: str = ""  # stands before the text of a new key when the old one signs it
    secret: str = ""  # file of what makes upload certificates

    @property
    def digest(self):
        """The pattern of what is signed."""
        return "[0-9a-f]{%d}" % (2 * hashlib.new(self.hash).digest_size)

    def read(self, text):
        """Read the text of a public key, from anybody. Raises ValueError."""
        key = Key(*self.numbers(text), self)
        if not self.bits_min <= key.n.bit_length() <= self.bits_max or not key.n & key.e & 1 \
                or key.e < 3:
            raise ValueError(f"these are not the numbers of an RSA key of {self.bits_min} to "
                             f"{self.bits_max} bits")
        return key

    def digest_of_key(self, text):
        """Return what is signed of the text of a new key [WIRE 8.3]."""
        return hashlib.new(self.hash, (self.key_prefix + text).encode()).hexdigest()


@dataclass(frozen=True)
class Key:
    """A public key; two texts are the same key if their numbers are the same."""

    n: int
    e: int
    scheme: Scheme

    @functools.cached_property
    def text(self):
        """The key as clients are told."""
        return self.scheme.write(self)


def joined(text):
    """Return the digits of a text in hex: no white space, no final dot, lower case."""
    digits = "".join(text.split()).lower()
    return digits[:-1] if digits.endswith(".") else digits


def padded(digest, key):
    """Return the number that a signature hides: PKCS #1 v1.5, block type 1 [WIRE 8.2]."""
    size, tail = nbytes(key), key.scheme.tail(digest)
    return int.from_bytes(b"\0\1" + b"\xff" * (size - 3 - len(tail)) + b"\0" + tail, "big")


def nbytes(key):
    """Return the size of a key, and of what it signs, in bytes."""
    return (key.n.bit_length() + 7) // 8


def sign(digest, key, d):
    """Sign a digest (lower-case hex) with the private exponent; return the text.

    A bare power [WIRE 8.2]: libraries put a DigestInfo into the block, which BOINC's client
    refuses; ours wants one, which is part of its scheme's tail.
    """
    number = pow(padded(digest, key), d, key.n)
    return key.scheme.written(number.to_bytes(nbytes(key), "big").hex())


def verifies(digest, signature, key):
    """Say whether a signature text is that of a digest by a key, as the client would."""
    digits = joined(signature)
    if not re.fullmatch("[0-9a-f]{2,%d}" % (2 * nbytes(key)), digits) or int(digits, 16) >= key.n:
        return False
    return pow(int(digits, 16), key.e, key.n) == padded(digest, key)


# ---- BOINC's kind: as its client reads it --------------------------------------


def broken(digits):
    """Break hex digits into lines and end them as the client's texts end."""
    return "\n".join(digits[i:i + 64] for i in range(0, len(digits), 64)) + "\n."


def boinc_text(key):
    """Write a key as BOINC clients are told, LF and 64 digits a line [WIRE 8.1]."""
    return f"{key.n.bit_length()}\n{broken(f'{key.n:0256x}{key.e:0256x}')}"


def boinc_numbers(text):
    """Read the numbers of a key, from anybody [WIRE 8.1]. Raises ValueError."""
    bits, _, digits = " ".join(text[:8192].split()).partition(" ")
    digits = joined(digits)
    if not re.fullmatch("[0-9]{1,9}", bits) or not re.fullmatch("[0-9a-f]{512}", digits):
        raise ValueError("it must be a number of bits and 512 hex digits")
    return int(digits[:256], 16), int(digits[256:], 16)


BOINC = Scheme(
    "BOINC clients", "code_sign_private.pem", "code_sign_public", "history", "signatures",
    bits=1024, bits_min=512, bits_max=1024,  # The client has room for no more [WIRE 8.1].
    hash="md5", tail=lambda digest: digest.encode("ascii"), numbers=boinc_numbers,
    write=boinc_text, written=broken, secret=SECRET)


# ---- The strong kind: as volunteer.py reads it ---------------------------------
#
# RSA and not Ed25519, and PKCS #1 v1.5 and not PSS, because a volunteer has only Python's standard
# library: checking is one power and one comparison with the whole block, nothing to be parsed.

SHA256_INFO = bytes.fromhex("3031300d060960864801650304020105000420")  # its DigestInfo [RFC 8017]


def strong_text(key):
    """Write a key as our volunteers are told: one line, and one way only to write a key."""
    return f"minigrid-rsa-1 {key.n:x} {key.e:x}"


def strong_numbers(text):
    """Read the numbers of a key. Raises ValueError."""
    match = re.fullmatch("minigrid-rsa-1 ([1-9a-f][0-9a-f]{511,2047}) ([1-9a-f][0-9a-f]{0,7})",
                         text.strip())
    if not match:
        raise ValueError("it must be 'minigrid-rsa-1' and two numbers in hex")
    return int(match[1], 16), int(match[2], 16)


STRONG = Scheme(
    "our own volunteers", "strong_private.pem", "strong_public", "strong_history",
    "strong_signatures", bits=3072, bits_min=2048, bits_max=8192, hash="sha256",
    tail=lambda digest: SHA256_INFO + bytes.fromhex(digest), numbers=strong_numbers,
    write=strong_text, written=str, key_prefix="minigrid key 1\n")
SCHEMES = (STRONG, BOINC)


def digest_of_file(app, platform, file):
    """Return what the strong key signs of an application's file, as a digest.

    The text binds it to its use: whoever has taken the server can make no program of a data file,
    and no file of one application or platform one of another. No field can hold a line feed
    without there being too many of them, so the text has one meaning only.
    """
    text = (f"minigrid file 1\n{app}\n{platform}\n{file.get('open_name') or file['name']}\n"
            f"{int(file.get('main') is True)}\n{int(file.get('executable') is True)}\n"
            f"{file['sha256']}\n")
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(text):
    """Return the SHA-256 of a public key's text; people compare the first 32 digits."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- Files -------------------------------------------------------------------


def opened(path, flags, private=False):
    """Open a file to be written, never readable by others if private; return it in binary."""
    return open(path, flags, opener=lambda name, mode: os.open(
        name, mode, 0o600 if private else 0o644))


def write_file(path, content, private=False):
    """Write a small file that survives a power cut, or none. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with opened(temporary, "xb", private) as file:  # "x": nobody else's file, nobody's link
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())
    settle(temporary, path)


def read_file(path, private=False):
    """Read a small file as text, None if there is none. Raises StoreError.

    A private one that others can read is refused: whoever has the key has our volunteers.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if private and os.name == "posix" and mode & 0o077:
                raise StoreError(f"{path} can be read by other users: chmod 600 {path}")
            return file.read(16 << 20).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None


def read_public(folder, scheme):
    """Return the public Key in a folder, None if there is none. Raises StoreError."""
    path = folder / scheme.public
    text = read_file(path)
    try:
        return None if text is None else scheme.read(text)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}; put it back from a copy") from None


def read_private(folder, scheme):
    """Return (Key, private exponent), (None, None) if the key is not here. Raises StoreError."""
    # Imported where needed: it takes longer than all the rest, and few commands want it.
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    path = folder / scheme.private
    text = read_file(path, private=True)
    if text is None:
        return None, None
    try:
        # Its own check, of primes that nobody has changed, takes longer than all the rest.
        found = load_pem_private_key(text.encode(), None, unsafe_skip_rsa_key_validation=True)
    except TypeError:
        raise StoreError(f"{path} wants a password: minigrid reads keys without one") from None
    except Exception as error:  # ValueError, and classes of the library's own.
        raise StoreError(f"{path} is damaged: {error}; put it back from a copy") from None
    if not isinstance(found, RSAPrivateKey) \
            or not scheme.bits_min <= found.key_size <= scheme.bits_max:
        raise StoreError(f"{path} is no RSA key of {scheme.bits_min} to {scheme.bits_max} bits: "
                         f"{scheme.clients} take no other")
    numbers = found.private_numbers()
    n, e = numbers.public_numbers.n, numbers.public_numbers.e
    if numbers.p * numbers.q != n or any((e * numbers.d - 1) % (prime - 1)
                                         for prime in (numbers.p, numbers.q)):
        raise StoreError(f"{path} is damaged: its numbers do not belong together; put it back "
                         f"from a copy")
    return Key(n, e, scheme), numbers.d


def draw_private(scheme):
    """Draw a new key pair; return (Key, private exponent, PEM text)."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    private = rsa.generate_private_key(65537, scheme.bits)
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                serialization.NoEncryption()).decode()
    numbers = private.private_numbers()
    return Key(numbers.public_numbers.n, numbers.public_numbers.e, scheme), numbers.d, pem


def read_history(folder, scheme):
    """Return the changes of the key, oldest first: [{old, new, signature}]. Raises StoreError."""
    path = folder / scheme.history
    text = read_file(path)
    try:
        found = json.loads(text) if text else []
        if not isinstance(found, list):
            raise ValueError("not a list")
        for change in found:
            scheme.read(change["old"]), scheme.read(change["new"]), joined(change["signature"])
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StoreError(f"{path} is damaged: put it back from a copy, or clients that hold a "
                         f"former key are lost") from None


def next_keys(history, current):
    """Return {former Key: (text of the next one, signature)} for all that lead to the current.

    A change that led elsewhere (interrupted, or undone from a copy) is no part of the chain.
    """
    scheme = current.scheme
    changes = [(scheme.read(c["old"]), scheme.read(c["new"]), c["new"].strip(),
                c["signature"].strip()) for c in history]
    found, reached, n = {}, {current}, 0
    while n < len(reached):
        n = len(reached)
        for old, new, text, signature in changes:
            if new in reached and old not in reached \
                    and verifies(scheme.digest_of_key(text), signature, old):
                found[old] = text, signature
                reached.add(old)
    return found


def has_pair(folder, scheme):
    """Say whether a folder has keys of a kind, or half of a pair."""
    return (folder / scheme.public).exists() or (folder / scheme.private).exists()


def make_pair(folder, scheme):
    """Make the first key pair of a folder, the public half last. Raises StoreError, OSError."""
    left = [name for name in (scheme.history, scheme.signatures) if (folder / name).exists()]
    if left:  # Clients hold a key of ours: a new one that it has not signed would lose them.
        raise StoreError(f"{folder / scheme.public} is missing beside {' and '.join(left)}: put it "
                         f"back from a copy")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, _, pem = draw_private(scheme)
    write_file(folder / scheme.private, pem, private=True)
    write_file(folder / scheme.public, key.text + "\n")


def make_missing(folder, scheme, first=True):
    """Make a pair that is not there, where a private key may lie. Raises StoreError, OSError.

    That is beside the private key of the other kind, or where there are no keys at all and the
    `first` may be made. Whoever keeps one kind's private key elsewhere wants no other one here.
    """
    others = [other for other in SCHEMES if other != scheme and has_pair(folder, other)]
    trusted = any((folder / other.private).exists() for other in others) if others else first
    if trusted and not has_pair(folder, scheme):
        make_pair(folder, scheme)


def finish_change(folder, scheme):
    """Write the public key that a crash kept from following its private one.

    Where history knows no such step, the two are of different copies: left as they are.
    """
    public, (private, _) = read_public(folder, scheme), read_private(folder, scheme)
    steps = [(scheme.read(c["old"]), scheme.read(c["new"])) for c in read_history(folder, scheme)]
    if private and ((public, private) in steps or public is None and not steps):
        (folder / scheme.signatures).unlink(missing_ok=True)
        write_file(folder / scheme.public, private.text + "\n")


# ---- The keys of a project ---------------------------------------------------


def open_keys(folder, scheme, make=True, signatures=None):
    """Open the keys of a kind in a folder; make them if there are none; return Keys.

    `signatures` is a directory to have the signatures in, other than the keys' own. Raises
    StoreError: damaged, unmatched or badly kept keys, or none that may be made here.
    """
    folder = Path(folder)
    try:
        if make:
            make_missing(folder, scheme)
        if make and scheme.secret and not (folder / scheme.secret).exists():
            # Not project.rng: tests and commands seed that one, and this must not be guessed.
            write_file(folder / scheme.secret, secrets.token_hex(32) + "\n", private=True)
        finish_change(folder, scheme)
        return Keys(folder, Path(signatures or folder) / scheme.signatures, scheme)
    except OSError as error:
        raise StoreError(f"cannot write keys in {folder}: {error}") from None


open_boinc_keys = functools.partial(open_keys, scheme=BOINC)  # for the plugin of their protocol


class Keys:
    """The keys of a kind in a folder and the signatures made with them; for use by many threads."""

    def __init__(self, folder, signatures, scheme):
        self.folder, self.path, self.scheme = folder, signatures, scheme
        self._files = [folder / name for name in (scheme.public, scheme.private, scheme.history)]
        self._lock = threading.RLock()
        self._reported = set()  # troubles that were logged once
        self._lines = {}  # digest -> signatures that the file has for it, good or bad
        self._good = {}  # digest -> signature text, verified
        self._stamp = self._lines_stamp = self._looked = None
        self._steady = False
        self._load()
        secret = read_file(folder / SECRET, private=True) if scheme.secret else None
        if secret is not None and not re.fullmatch("[0-9a-f]{64}", secret.strip()):
            raise StoreError(f"{folder / SECRET} is damaged: delete it, and a new one is made; "
                             f"outputs of work that is out now will be refused then")
        self._secret = bytes.fromhex(secret or "")

    def _load(self):
        """Read key pair and history. Raises StoreError, with nothing changed."""
        scheme, stamp = self.scheme, list(map(stamp_of, self._files))
        key, (private, d) = read_public(self.folder, scheme), read_private(self.folder, scheme)
        if key is None and private:
            raise StoreError(f"{self.folder / scheme.public} is missing: put it back from a copy")
        if key is None:
            raise StoreError(f"there are no keys for {scheme.clients} in {self.folder}: "
                             f"{how_to_make(self.folder, scheme)}")
        if private and private != key:
            raise StoreError(f"{scheme.private} and {scheme.public} in {self.folder} do not belong "
                             f"together: put both back from one copy")
        found = next_keys(read_history(self.folder, scheme), key)
        self._key, self._d, self._next, self._stamp = key, d, found, stamp
        self._good, self._lines, self._lines_stamp = {}, {}, None

    @contextlib.contextmanager
    def steady(self):
        """Let keys and signatures stay as they are for some calls, whose answers belong together.

        It also looks for changes only once for all of them.
        """
        with self._lock:
            self._refresh()
            self._steady = True
            try:
                yield
            finally:
                self._steady = False

    def _refresh(self):
        """Take up what has changed in the folder, and keep what we have if it is no good."""
        if self._steady:
            return
        if project.write.working is threading.current_thread():
            if self._looked is project.write.done:
                return  # Once for all requests of a transaction: it costs more than to sign.
            self._looked = project.write.done
        if self._stamp != list(map(stamp_of, self._files)):
            try:
                self._load()
            except StoreError as error:  # Or we came in the middle of a change: see next time.
                self._report(f"{error}; going on with the keys as they were")
        stamp = stamp_of(self.path)
        if stamp != self._lines_stamp:
            try:
                self._lines = self._read_lines()
                self._lines_stamp = stamp
            except StoreError as error:
                self._report(str(error))

    def _read_lines(self):
        """Return {digest: [signatures]} of the signatures file; nothing is verified yet."""
        pattern = re.compile("(%s) ([0-9a-f]{2,%d})( .*)?" % (
            self.scheme.digest, self.scheme.bits_max // 4))
        found, lines = {}, (read_file(self.path) or "").split("\n")
        for n, line in enumerate(lines, 1):
            match = pattern.fullmatch(line.rstrip())
            if match:
                found.setdefault(match[1], []).append(match[2])
            elif line.strip() and n < len(lines):  # The last, if torn, may still be growing.
                self._report(f"{self.path} line {n} is no signature: ignored")
        return found

    def _report(self, text):
        """Log a trouble the first time it is met."""
        if text not in self._reported:
            self._reported.add(text)
            log.warning("%s", text)

    @property
    def public(self):
        """The text of the public key, to be sent as it is."""
        with self._lock:
            self._refresh()
            return self._key.text

    @property
    def bits(self):
        """The size of the key."""
        with self._lock:
            self._refresh()
            return self._key.n.bit_length()

    @property
    def can_sign(self):
        """Is the private key here?"""
        with self._lock:
            self._refresh()
            return self._d is not None

    @property
    def former(self):
        """How many former keys lead to this one."""
        with self._lock:
            self._refresh()
            return len(self._next)

    @property
    def signed(self):
        """The digests of all that has a good signature in the signatures file."""
        with self._lock:
            self._refresh()
            return {digest for digest in self._lines if self._stored(digest)}

    def signature(self, digest, name=""):
        """Return the signature of a digest (lower-case hex: a file's MD5 for BOINC), or None.

        It comes from the signatures file if that has a good one, else it is made and added there;
        None if the private key is elsewhere and did not sign this yet. Raises ValueError.
        """
        with self._lock:
            self._refresh()
            if digest in self._good:
                return self._good[digest]
            if not re.fullmatch(self.scheme.digest, digest):
                raise ValueError(f"{digest!r:.60} is no {self.scheme.hash} in lower-case hex")
            found = self._stored(digest)
            if found or self._d is None:
                return found
            try:
                return self.add(digest, name)
            except OSError as error:  # A full disk is no reason to stop: it can be made again.
                self._report(f"cannot write {self.path}: {error.strerror}")
                self._good[digest] = sign(digest, self._key, self._d)
                return self._good[digest]

    def _stored(self, digest):
        """Return the text of a good signature in the signatures file, or None; report bad ones."""
        # Verified, for a client that gets a bad one throws the job away, and asks for the next.
        candidates = self._lines.get(digest, ())
        for signature in candidates:
            if verifies(digest, signature, self._key):
                self._good[digest] = self.scheme.written(signature.zfill(2 * nbytes(self._key)))
                return self._good[digest]
        if candidates:
            self._report(f"{self.path}: the signature of {digest} is not by the key in "
                         f"{self.folder / self.scheme.public}: ignored; sign that file again")
        return None

    def add(self, digest, name):
        """Sign a digest and add the line to the signatures file; return the signature.

        Raises OSError, and ClientError without the private key.
        """
        with self._lock:
            self.need_private("sign")
            text = sign(digest, self._key, self._d)
            # In one piece at the end, so that a server and a command may both add. The first line
            # feed ends what a crash may have torn; that line counts for nothing from then on.
            shown = " ".join(name.encode("ascii", "backslashreplace").decode().split())[:200]
            line = f"{digest} {joined(text)} {shown}".rstrip().encode() + b"\n"
            with opened(self.path, "ab") as file:
                file.write(line if ends_whole(self.path) else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
            self._good[digest] = text
            return text

    def need_private(self, purpose):
        """Raise ClientError if the private key is not here."""
        if self._d is None:
            raise ClientError(f"the private key is not in {self.folder} ({self.scheme.private}): "
                              f"{purpose} on the machine that has it, or name its directory with "
                              f"--keys")

    def answer(self, client_key):
        """Say what a client that holds a key is told: (status, key text, signature text).

        "none": it has no key, tell it ours; "current": nothing; "old": a former key of ours, tell
        it the next one with its signature, and give no work until it has the current one;
        "unknown": never ours, it will take nothing of us. What is empty is not sent [WIRE 8.3].
        """
        with self._lock:
            self._refresh()
            if not client_key.strip():
                return "none", self._key.text, ""
            if client_key == self._key.text:
                return "current", "", ""
            try:
                key = self.scheme.read(client_key)
            except ValueError:
                return "unknown", "", ""
            if key == self._key:
                return "current", "", ""
            return ("old", *self._next[key]) if key in self._next else ("unknown", "", "")

    def changes_from(self, held):
        """Return the changes from a former key, by its fingerprint, to the current one.

        [{"key": text, "signature": by the key before it}], empty for the current key; None for one
        that never was ours.
        """
        with self._lock:
            self._refresh()
            key = next((key for key in (self._key, *self._next)
                        if fingerprint(key.text) == held), None)
            found = []
            while key not in (self._key, None):
                text, signature = self._next[key]
                found.append({"key": text, "signature": signature})
                key = self.scheme.read(text)
            return key and found

    def change(self):
        """Change the key: draw a new pair and sign it with the one that clients hold.

        Raises ClientError without the private key, StoreError if it cannot be written.
        """
        with self._lock:
            self._refresh()
            self.need_private("change the key")
            scheme = self.scheme
            new, _, pem = draw_private(scheme)
            step = {"old": self._key.text, "new": new.text, "signature": sign(
                scheme.digest_of_key(new.text), self._key, self._d)}
            history = read_history(self.folder, scheme) + [step]
            # What clients need to follow comes first, what they are told last. Between the two
            # the old key counts; finish_change() does the rest once the new private key is there.
            try:
                write_file(self.folder / scheme.history, json.dumps(history, indent=1) + "\n")
                write_file(self.folder / scheme.private, pem, private=True)
                self.path.unlink(missing_ok=True)
                write_file(self.folder / scheme.public, new.text + "\n")
            except OSError as error:
                raise StoreError(f"cannot write keys in {self.folder}: {error}") from None
            self._load()

    # ---- Upload certificates, of BOINC clients ----

    def certificate(self, name, max_nbytes):
        """Return the <xml_signature> of an output file: it may be uploaded, so large at most.

        The client passes it on unread, and this server alone checks it [WIRE 10.4]. So it need not
        be the reference's RSA of 1024 bits over an MD5: an HMAC over the same text is stronger, and
        cheap enough to make for every job.
        """
        if not self._secret:
            raise StoreError(f"there is no {SECRET} in {self.folder}")
        text = f"<name>{name}</name><max_nbytes>{int(max_nbytes)}</max_nbytes>"
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"),
                        hashlib.sha256).hexdigest() + "\n."

    def certifies(self, text, name, max_nbytes):
        """Say whether a text is the certificate of a name and a size in bytes; takes anything."""
        wanted = joined(self.certificate(name, max_nbytes)).encode()
        return hmac.compare_digest(joined(text).encode("utf-8", "replace"), wanted)


def how_to_make(folder, scheme):
    """Say how a folder without keys of a kind gets some."""
    if any(has_pair(folder, other) for other in SCHEMES if other != scheme):
        return "run 'minigrid sign' where the private keys are, and copy here what it names"
    return "the server makes them at its first start, or make them with 'minigrid keys --make DIR'"


def stamp_of(path):
    """Return what changes when a file does, None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def ends_whole(path):
    """Say whether a file ends with a whole line, as one that is empty or not there does."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read(1) in (b"", b"\n")
    except FileNotFoundError:
        return True


# ---- Our own volunteers ------------------------------------------------------

held = {}  # directory -> Keys of the strong kind, of the open project
unsigned_told = set()  # ids of the versions that the operator was told of


def routes(app, clock):
    """Open the strong keys of the project; no address is added. Raises StoreError."""
    held.clear()
    unsigned_told.clear()
    folder = project.data / "keys"
    try:
        make_missing(folder, STRONG)
    except OSError as error:
        raise StoreError(f"cannot write keys in {folder}: {error}") from None
    if not own_keys():
        remember(clock(), f"there are no keys for our own volunteers in {folder}, and they get no "
                          f"work until then: {how_to_make(folder, STRONG)}")


def own_keys():
    """Return the strong Keys of the open project; None while there are none."""
    folder = project.data / "keys"
    if folder not in held and has_pair(folder, STRONG):
        held[folder] = open_keys(folder, STRONG, make=False)
    return held.get(folder)


def signing_fingerprint():
    """Return the fingerprint of the key that signs for our own volunteers, for people; or ""."""
    keys = own_keys()
    return fingerprint(keys.public)[:32] if keys else ""


def signing(request, has, now):
    """Have a request of our own volunteer get signed files only: its `more` does it.

    `has` is the fingerprint of the key that it holds, "" if none. Raises ClientError, StoreError.
    """
    if not isinstance(has, str) or not FINGERPRINT.fullmatch(has):
        raise ClientError("signing_key must be the SHA-256 of the key you hold in lower-case hex, "
                          "or empty if you hold none")
    request.more = Signing(has, now)  # It may make signatures, for which the writer has no time.
    if request.more.changes is None:  # It could check no file of ours: no work this time.
        request.work_req_seconds, request.other_results = 0, None


@dataclass
class Signing:
    """What a volunteer is told of keys and signatures; passes the core unseen."""

    has: str
    now: int
    key: str = ""  # the current one
    changes: list = ()  # to it from the key that the volunteer has; None: they do not lead there
    signatures: dict = field(default_factory=dict)  # digest -> signature

    def __post_init__(self):
        self.keys = own_keys()
        if not self.keys:
            return
        with self.keys.steady():
            self.key = self.keys.public
            self.changes = self.keys.changes_from(self.has) if self.has else ()
            for application in list(apps.values()):
                for version in application.versions:
                    self.sign(application.name, version)

    def sign(self, name, version):
        """Find the signatures of a version's files; return the names of those without one."""
        missing = []
        for file in version.files if self.keys else ():
            if "boinc" not in file:  # The start program is for BOINC clients alone.
                digest = digest_of_file(name, version.platform, file)
                if digest not in self.signatures:
                    self.signatures[digest] = self.keys.signature(
                        digest, label(name, version.platform, file))
                if not self.signatures[digest]:
                    missing.append(file["open_name"])
        return missing

    def why_not(self, version):
        """Say why a volunteer cannot have a version; empty if it can. Asked by dispatch policies.

        It runs nothing that is not signed [D11]. The operator is told once.
        """
        missing = self.sign(version.app.name, version)
        if self.keys and not missing:
            return ""
        if version.id not in unsigned_told:
            unsigned_told.add(version.id)
            what = f": {', '.join(missing)[:200]}" if missing else ""
            remember(self.now, f"{version.app.name} version {version.version_num} for "
                               f"{version.platform} is not signed{what}. Our own volunteers do not "
                               f"get it; run 'minigrid sign' where the private key is")
        return "its program is not signed yet; the people of this project have been told"

    def write(self, reply):
        """Add key and signatures to a reply, as a dict."""
        for given in reply["assignments"]:
            for file in given["files"]:
                file["signature"] = self.signatures.get(
                    digest_of_file(given["app"], given["platform"], file)) or ""
        if self.keys and self.has != fingerprint(self.key):
            reply["signing_key"], reply["signing_key_changes"] = self.key, list(self.changes or ())
        if self.changes is None:
            reply["messages"].append({"priority": "notice", "text": (
                "your client holds another signing key for this project, and would take no work "
                "from here; if you trust this server, join it anew with another --dir")})


def label(app, platform, file):
    """Name a file of a version for people."""
    return f"{app} {platform} {file['open_name']}"


# ---- Commands ----------------------------------------------------------------


def commands(parsers):
    """Add the commands sign and keys to the command line."""
    parser = parsers.add_parser(
        "sign", help="sign application files, wherever the private keys are",
        description="Sign application files for volunteers. Where the server has the private keys "
        "it does so itself; this is for keys that are kept elsewhere.",
        epilog="The files of the start program, which BOINC clients run, are always included.")
    parser.set_defaults(run=sign_files)
    parser.add_argument("files", nargs="+", metavar="FILE", help="application file, or a directory "
                        "of applications: all files of them that volunteers get")
    parser.add_argument("--signatures", metavar="DIR", help="directory to have the signatures in "
                        "(default: that of the keys)")
    add_folder(parser)
    parser = parsers.add_parser(
        "keys", help="show, make or change the keys that sign application files",
        description="Show the keys that sign application files for volunteers.")
    parser.set_defaults(run=manage_keys)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--make", metavar="DIR", help="make the first keys of a project in a "
                       "directory, on a machine other than the server")
    which.add_argument("--change", action="store_true", help="replace the keys by new ones, signed "
                       "by the old ones so that clients take them")
    add_folder(parser)


def add_folder(parser):
    """Add the option that both commands share."""
    parser.add_argument("--keys", metavar="DIR", help="directory of the keys (default: data/keys)")


def folder_of(options):
    """Return the directory of the keys."""
    return Path(options.keys or Path(minigrid.read_settings("setup.cfg").data) / "keys")


def schemes():
    """Return the kinds of keys that this project uses."""
    return SCHEMES if plugged("scheduler_path") else (STRONG,)  # Without BOINC, none for it.


def open_all(folder, signatures=None):
    """Open the keys of all kinds, with their private halves; return [Keys]. Raises StoreError.

    A kind that is newer than these keys is made here: whoever may sign with one may with both.
    """
    try:
        for scheme in schemes():
            make_missing(folder, scheme, first=False)
    except OSError as error:
        raise StoreError(f"cannot write keys in {folder}: {error}") from None
    return [open_keys(folder, scheme, False, signatures) for scheme in schemes()]


def sign_files(options):
    """Sign files, and those of the start program, with the private keys that are here."""
    paths, opened = list(map(Path, options.files)), open_all(folder_of(options), options.signatures)
    for keys in opened:
        keys.need_private("sign")
    own = dict(statements(paths))
    if schemes() == (STRONG,) and not own:
        raise ClientError(f"{' '.join(map(str, paths))}: there is no application file")
    wanted = {STRONG: own}
    if BOINC in schemes():
        wanted[BOINC] = {md5: name for name, md5 in contents(paths)}
    for keys in opened:
        sign_all(keys, wanted[keys.scheme])
    say_what_to_copy(opened)
    return 0


def sign_all(keys, wanted):
    """Sign all of {digest: name} with the keys of one kind, and say so. Raises StoreError."""
    print(f"for {keys.scheme.clients}:")
    known = keys.signed
    for digest, name in wanted.items():
        try:
            digest in known or keys.add(digest, name)
        except OSError as error:
            raise StoreError(f"cannot write {keys.path}: {error.strerror}") from None
        print(f"  {'signed already' if digest in known else 'signed':14}  {name}")
    n_new = len(wanted.keys() - known)
    print(f"{n_new} new signatures, {len(wanted)} files in all: {keys.path}")


def statements(paths):
    """Yield (digest, name) of all that the strong key signs of applications at some paths.

    What an application ships is asked of its loader, so that it is what the server enters. A path
    within one stands for the files at or below it. Raises ClientError, PluginError, OSError.
    """
    for path in paths:
        if not path.exists():
            raise ClientError(f"there is no file or directory {path}")
        path = path.resolve()
        inside = next((p.parent for p in path.parents[:2]
                       if p.name == "versions" and (p.parent / "app.py").is_file()), None)
        for version in versions_at(inside or path):
            app, platform = version["app"], version["platform"]
            for source, file in zip(version["sources"], version["files"]):
                if not inside or path in (source, *source.parents):
                    file = {**file, "sha256": hashlib.sha256(file["content"]).hexdigest()}
                    yield digest_of_file(app, platform, file), label(app, platform, file)


def versions_at(path):
    """Yield what the applications at a path ship, version by version."""
    for plugin in minigrid.plugins:
        if hasattr(plugin, "versions_of"):
            for app in plugin.find(path):
                yield from plugin.versions_of(app)


def contents(paths):
    """Yield (name, MD5) of each file to sign. Raises ClientError before any is signed."""
    for path in [file for path in paths for file in files_at(path)]:
        try:
            digest = hashlib.md5()
            with open(path, "rb") as file:
                for piece in iter(lambda: file.read(1 << 20), b""):
                    digest.update(piece)
        except OSError as error:
            raise ClientError(f"cannot read {path}: {error.strerror}") from None
        yield path.name, digest.hexdigest()
    for start_files in plugged("start_files")[-1:]:
        for file in start_files("both"):
            yield file["name"], hashlib.md5(file["content"]).hexdigest()


def files_at(path):
    """Return the files that volunteers get of what is at a path. Raises ClientError.

    Of applications as the loaders find them: a Python file as it is, of a native application what
    its versions/ hold. Of anything else the file, or all files below the directory.
    """
    if not path.exists():
        raise ClientError(f"there is no file or directory {path}")
    inside_native = path.resolve().parent.name == "versions"
    apps = [] if inside_native else [app for find in plugged("find") for app in find(path)]
    found = [file for app in apps for file in (
        [app] if app.is_file() else app.glob("versions/*/*"))]
    found = found or ([path] if path.is_file() else path.rglob("*"))
    found = sorted(file for file in found if file.is_file() and file.name[0] != "." and
                   file.name != "version.ini" and file.parent.name != "__pycache__")
    if not found:
        raise ClientError(f"{path} holds no application file")
    return found


def say_what_to_copy(opened):
    """Say what a server on another machine needs; public keys last, for they say what counts."""
    paths = [keys.path for keys in opened]
    paths += [keys.folder / keys.scheme.history for keys in opened]
    paths += [keys.folder / keys.scheme.public for keys in opened]
    shown = " ".join(str(path) for path in paths if path.exists())
    private = " and ".join(keys.scheme.private for keys in opened)
    print(f"If the server is another machine, copy to its data/keys, in this order:\n  {shown}\n"
          f"{private} stay{'s' * (len(opened) == 1)} here.")


def manage_keys(options):
    """Make, change or show the keys."""
    folder = Path(options.make) if options.make else folder_of(options)
    if options.make:
        make_all(folder)
    if options.change:
        opened = open_all(folder)
        for keys in opened:  # All or none of them.
            keys.need_private("change the key")
        for keys in opened:
            keys.change()
    print(f"keys in {folder}")
    there = [scheme for scheme in schemes() if has_pair(folder, scheme)]
    for scheme in schemes():
        if scheme in there or not there:  # Of none at all the error says what to do.
            show_keys(open_keys(folder, scheme, make=False))
        else:
            print(f"for {scheme.clients}:\n  none yet: 'minigrid sign' makes them where the "
                  f"private keys are, and so does\n  the next start of a server that has them")
    if options.make:
        print(f"Next: 'minigrid sign --keys {folder} FILE...' with your applications.")
    if options.change:
        print("The keys were changed; volunteers take the new ones when they next ask. A server "
              "that has the\nprivate keys signs all files again by itself. Otherwise sign them "
              f"now: 'minigrid sign --keys {folder} FILE...'")
    return 0


def make_all(folder):
    """Make the first keys of a project in a directory. Raises ClientError, StoreError."""
    if any(has_pair(folder, scheme) for scheme in SCHEMES):
        raise ClientError(f"there are keys in {folder} already: show them with 'minigrid keys "
                          f"--keys {folder}'")
    try:
        for scheme in schemes():
            make_pair(folder, scheme)
    except OSError as error:
        raise StoreError(f"cannot write keys in {folder}: {error}") from None


def show_keys(keys):
    """Print what is known of the keys of one kind."""
    print(f"for {keys.scheme.clients}:")
    print(f"  public key    RSA {keys.bits}, fingerprint {fingerprint(keys.public)[:32]}")
    print("  private key   " + ("here" if keys.can_sign else "elsewhere: 'minigrid sign' there"))
    print(f"  former keys   {keys.former}")
    print(f"  signed files  {len(keys.signed)}")
