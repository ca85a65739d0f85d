"""Code signing for BOINC clients: keys, signatures, change of the key, upload certificates.

A BOINC client runs no application file without a signature by the project's key. It takes the first
key it is told and keeps it; a later one must be signed by the one it holds [WIRE 8]. The format is
the client's and cannot be chosen: RSA of at most 1024 bits over the MD5 of a file [D11].

    data/keys/code_sign_private.pem   signs; may stay on another machine, with `minigrid sign`
    data/keys/code_sign_public        what clients are told
    data/keys/history                 former keys, each with the next one signed by it
    data/keys/signatures              lines: MD5 of a file, signature in hex, name of the file
    data/keys/upload_secret           makes upload certificates; of this server alone

Files changed by a command, or copied in from elsewhere, are taken up without a restart.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

import minigrid
from minigrid import ClientError, StoreError, log, plugged, settle

PRIVATE, PUBLIC, HISTORY = "code_sign_private.pem", "code_sign_public", "history"
SIGNATURES, SECRET = "signatures", "upload_secret"
BITS = 1024  # the client has room for no more [WIRE 8.1]
BITS_MIN = 512
MD5 = re.compile("[0-9a-f]{32}")
LINE = re.compile("([0-9a-f]{32}) ([0-9a-f]{2,256})( .*)?")


# ---- Keys and signatures as the client reads them ----------------------------


@dataclass(frozen=True)
class Key:
    """A public key; two texts are the same key if their numbers are the same."""

    n: int
    e: int

    @property
    def text(self):
        """The key as clients are told, LF and 64 digits a line [WIRE 8.1]."""
        return f"{self.n.bit_length()}\n{broken(f'{self.n:0256x}{self.e:0256x}')}"


def broken(digits):
    """Break hex digits into lines and end them as the client's texts end."""
    return "\n".join(digits[i:i + 64] for i in range(0, len(digits), 64)) + "\n."


def joined(text):
    """Return the digits of such a text: no white space, no final dot, lower case."""
    digits = "".join(text.split()).lower()
    return digits[:-1] if digits.endswith(".") else digits


def read_key(text):
    """Read the text of a public key, from anybody [WIRE 8.1]. Raises ValueError."""
    bits, _, digits = " ".join(text[:8192].split()).partition(" ")
    digits = joined(digits)
    if not re.fullmatch("[0-9]{1,9}", bits) or not re.fullmatch("[0-9a-f]{512}", digits):
        raise ValueError("it must be a number of bits and 512 hex digits")
    key = Key(int(digits[:256], 16), int(digits[256:], 16))
    if key.n.bit_length() < BITS_MIN or not key.n & key.e & 1 or key.e < 3:
        raise ValueError(f"these are not the numbers of an RSA key of {BITS_MIN} to {BITS} bits")
    return key


def padded(md5, key):
    """Return the number that a signature hides: 32 hex digits as text, padded [WIRE 8.2]."""
    size = nbytes(key)
    return int.from_bytes(b"\0\1" + b"\xff" * (size - 35) + b"\0" + md5.encode("ascii"), "big")


def nbytes(key):
    """Return the size of a key, and of what it signs, in bytes."""
    return (key.n.bit_length() + 7) // 8


def sign(md5, key, d):
    """Sign an MD5 (32 lower-case hex digits) with the private exponent; return the text.

    A bare power [WIRE 8.2]: libraries put a DigestInfo into the block, which the client refuses.
    """
    number = pow(padded(md5, key), d, key.n)
    return broken(number.to_bytes(nbytes(key), "big").hex())


def verifies(md5, signature, key):
    """Say whether a signature text is that of an MD5 by a key, as the client would."""
    digits = joined(signature)
    if not re.fullmatch("[0-9a-f]{2,256}", digits) or int(digits, 16) >= key.n:
        return False
    return pow(int(digits, 16), key.e, key.n) == padded(md5, key)


def md5_of(text):
    """Return the MD5 of a text, in hex: what is signed of a key [WIRE 8.3]."""
    return hashlib.md5(text.encode()).hexdigest()


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


def read_public(folder):
    """Return the Key in code_sign_public, None if there is none. Raises StoreError."""
    text = read_file(folder / PUBLIC)
    try:
        return None if text is None else read_key(text)
    except ValueError as error:
        raise StoreError(f"{folder / PUBLIC} is damaged: {error}; put it back from a "
                         f"copy") from None


def read_private(folder):
    """Return (Key, private exponent), (None, None) if the key is not here. Raises StoreError."""
    # Imported where needed: it takes longer than all the rest, and few commands want it.
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    path = folder / PRIVATE
    text = read_file(path, private=True)
    if text is None:
        return None, None
    try:
        found = load_pem_private_key(text.encode(), None)
    except TypeError:
        raise StoreError(f"{path} wants a password: minigrid reads keys without one") from None
    except Exception as error:  # ValueError, and classes of the library's own.
        raise StoreError(f"{path} is damaged: {error}; put it back from a copy") from None
    if not isinstance(found, RSAPrivateKey) or not BITS_MIN <= found.key_size <= BITS:
        raise StoreError(f"{path} is no RSA key of {BITS_MIN} to {BITS} bits: BOINC clients take "
                         f"no other")
    numbers = found.private_numbers()
    return Key(numbers.public_numbers.n, numbers.public_numbers.e), numbers.d


def draw_private():
    """Draw a new key pair; return (Key, private exponent, PEM text)."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    private = rsa.generate_private_key(65537, BITS)
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                serialization.NoEncryption()).decode()
    numbers = private.private_numbers()
    return Key(numbers.public_numbers.n, numbers.public_numbers.e), numbers.d, pem


def read_history(folder):
    """Return the changes of the key, oldest first: [{old, new, signature}]. Raises StoreError."""
    text, path = read_file(folder / HISTORY), folder / HISTORY
    try:
        found = json.loads(text) if text else []
        if not isinstance(found, list):
            raise ValueError("not a list")
        for change in found:
            read_key(change["old"]), read_key(change["new"]), joined(change["signature"])
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StoreError(f"{path} is damaged: put it back from a copy, or clients that hold a "
                         f"former key are lost") from None


def next_keys(history, current):
    """Return {former Key: (text of the next one, signature)} for all that lead to the current.

    A change that led elsewhere (interrupted, or undone from a copy) is no part of the chain.
    """
    changes = [(read_key(c["old"]), read_key(c["new"]), c["new"].strip(), c["signature"].strip())
               for c in history]
    found, reached, n = {}, {current}, 0
    while n < len(reached):
        n = len(reached)
        for old, new, text, signature in changes:
            if new in reached and old not in reached and verifies(md5_of(text), signature, old):
                found[old] = text, signature
                reached.add(old)
    return found


def make_pair(folder):
    """Make the first key pair of a folder, the public half last. Raises StoreError, OSError."""
    left = [name for name in (HISTORY, SIGNATURES) if (folder / name).exists()]
    if left:  # Clients hold a key of ours: a new one that it has not signed would lose them.
        raise StoreError(f"{folder / PUBLIC} is missing beside {' and '.join(left)}: put it back "
                         f"from a copy")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, _, pem = draw_private()
    write_file(folder / PRIVATE, pem, private=True)
    write_file(folder / PUBLIC, key.text + "\n")


def finish_change(folder):
    """Write the public key that a crash kept from following its private one.

    Where history knows no such step, the two are of different copies: left as they are.
    """
    public, (private, _), history = read_public(folder), read_private(folder), read_history(folder)
    steps = [(read_key(c["old"]), read_key(c["new"])) for c in history]
    if private and ((public, private) in steps or public is None and not steps):
        (folder / SIGNATURES).unlink(missing_ok=True)
        write_file(folder / PUBLIC, private.text + "\n")


# ---- The keys of a project ---------------------------------------------------


def open_keys(folder, make=True, signatures=None):
    """Open the keys in a folder; make them if there are none; return Keys.

    `signatures` is a file other than the folder's own. Raises StoreError: damaged, unmatched or
    badly kept keys, or none while `make` is False.
    """
    folder = Path(folder)
    try:
        if make and not (folder / PUBLIC).exists() and not (folder / PRIVATE).exists():
            make_pair(folder)
        if make and not (folder / SECRET).exists():
            # Not project.rng: tests and commands seed that one, and this must not be guessed.
            write_file(folder / SECRET, secrets.token_hex(32) + "\n", private=True)
        finish_change(folder)
        return Keys(folder, Path(signatures) if signatures else folder / SIGNATURES)
    except OSError as error:
        raise StoreError(f"cannot write keys in {folder}: {error}") from None


class Keys:
    """The keys in a folder and the signatures made with them; for use by many threads."""

    def __init__(self, folder, signatures):
        self.folder, self.path = folder, signatures
        self._lock = threading.RLock()
        self._reported = set()  # troubles that were logged once
        self._lines = {}  # MD5 -> signatures that `signatures` has for it, good or bad
        self._good = {}  # MD5 -> signature text, verified
        self._stamp = self._lines_stamp = None
        self._load()
        secret = read_file(folder / SECRET, private=True)
        if secret is not None and not re.fullmatch("[0-9a-f]{64}", secret.strip()):
            raise StoreError(f"{folder / SECRET} is damaged: delete it, and a new one is made; "
                             f"outputs of work that is out now will be refused then")
        self._secret = bytes.fromhex(secret or "")

    def _load(self):
        """Read key pair and history. Raises StoreError, with nothing changed."""
        stamp = [stamp_of(self.folder / name) for name in (PUBLIC, PRIVATE, HISTORY)]
        key, (private, d) = read_public(self.folder), read_private(self.folder)
        if key is None and private:
            raise StoreError(f"{self.folder / PUBLIC} is missing: put it back from a copy")
        if key is None:
            raise StoreError(f"there are no keys in {self.folder}: the server makes them at its "
                             f"first start, or make them with 'minigrid keys --make DIR'")
        if private and private != key:
            raise StoreError(f"{PRIVATE} and {PUBLIC} in {self.folder} do not belong together: put "
                             f"both back from one copy")
        found = next_keys(read_history(self.folder), key)
        self._key, self._d, self._next, self._stamp = key, d, found, stamp
        self._good, self._lines, self._lines_stamp = {}, {}, None

    def _refresh(self):
        """Take up what has changed in the folder, and keep what we have if it is no good."""
        if self._stamp != [stamp_of(self.folder / name) for name in (PUBLIC, PRIVATE, HISTORY)]:
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
        """Return {MD5: [signatures]} of the signatures file; nothing is verified yet."""
        found, lines = {}, (read_file(self.path) or "").split("\n")
        for n, line in enumerate(lines, 1):
            match = LINE.fullmatch(line.rstrip())
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
        """The MD5s of all files with a good signature in the signatures file."""
        with self._lock:
            self._refresh()
            return {md5 for md5 in self._lines if self._stored(md5)}

    def signature(self, md5, name=""):
        """Return the signature of a file by its MD5 (32 lower-case hex digits), or None.

        It comes from `signatures` if that has a good one, else it is made and added there; None
        if the private key is elsewhere and did not sign this file yet. Raises ValueError.
        """
        if not MD5.fullmatch(md5):
            raise ValueError(f"{md5!r:.60} is no MD5 in lower-case hex")
        with self._lock:
            self._refresh()
            found = self._good.get(md5) or self._stored(md5)
            if found or self._d is None:
                return found
            try:
                return self.add(md5, name)
            except OSError as error:  # A full disk is no reason to stop: it can be made again.
                self._report(f"cannot write {self.path}: {error.strerror}")
                return sign(md5, self._key, self._d)

    def _stored(self, md5):
        """Return the text of a good signature in the signatures file, or None; report bad ones."""
        # Verified, for a client that gets a bad one throws the job away, and asks for the next.
        candidates = self._lines.get(md5, ())
        for signature in candidates:
            if verifies(md5, signature, self._key):
                self._good[md5] = broken(signature.zfill(2 * nbytes(self._key)))
                return self._good[md5]
        if candidates:
            self._report(f"{self.path}: the signature of {md5} is not by the key in "
                         f"{self.folder / PUBLIC}: ignored; sign that file again")
        return None

    def add(self, md5, name):
        """Sign a file and add the line to the signatures file; return the signature.

        Raises OSError, and ClientError without the private key.
        """
        with self._lock:
            self.need_private("sign")
            text = sign(md5, self._key, self._d)
            # In one piece at the end, so that a server and a command may both add. The first line
            # feed ends what a crash may have torn; that line counts for nothing from then on.
            shown = " ".join(name.encode("ascii", "backslashreplace").decode().split())[:200]
            line = f"{md5} {joined(text)} {shown}".rstrip().encode() + b"\n"
            with opened(self.path, "ab") as file:
                file.write(line if ends_whole(self.path) else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
            self._good[md5] = text
            return text

    def need_private(self, purpose):
        """Raise ClientError if the private key is not here."""
        if self._d is None:
            raise ClientError(f"the private key is not in {self.folder}: {purpose} on the machine "
                              f"that has it, or name its directory with --keys")

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
            try:
                key = read_key(client_key)
            except ValueError:
                return "unknown", "", ""
            if key == self._key:
                return "current", "", ""
            return ("old", *self._next[key]) if key in self._next else ("unknown", "", "")

    def change(self):
        """Change the key: draw a new pair and sign it with the one that clients hold.

        Raises ClientError without the private key, StoreError if it cannot be written.
        """
        with self._lock:
            self._refresh()
            self.need_private("change the key")
            new, _, pem = draw_private()
            step = {"old": self._key.text, "new": new.text,
                    "signature": sign(md5_of(new.text), self._key, self._d)}
            history = read_history(self.folder) + [step]
            # What clients need to follow comes first, what they are told last. Between the two
            # the old key counts; finish_change() does the rest once the new private key is there.
            try:
                write_file(self.folder / HISTORY, json.dumps(history, indent=1) + "\n")
                write_file(self.folder / PRIVATE, pem, private=True)
                self.path.unlink(missing_ok=True)
                write_file(self.folder / PUBLIC, new.text + "\n")
            except OSError as error:
                raise StoreError(f"cannot write keys in {self.folder}: {error}") from None
            self._load()

    # ---- Upload certificates ----

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


def stamp_of(path):
    """Return what changes when a file does, None if it is not there."""
    try:
        found = path.stat()
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


# ---- Commands ----------------------------------------------------------------


def commands(parsers):
    """Add the commands sign and keys to the command line."""
    parser = parsers.add_parser(
        "sign", help="sign application files for BOINC clients, wherever the private key is",
        description="Sign application files for BOINC clients. Where the server has the private "
        "key it does so itself; this is for a key that is kept elsewhere.",
        epilog="The files of the start program, which BOINC clients run, are always included.")
    parser.set_defaults(run=sign_files)
    parser.add_argument("files", nargs="+", metavar="FILE", help="application file, or a directory "
                        "of applications: all files of them that volunteers get")
    parser.add_argument("--signatures", metavar="FILE", help="file to add the signatures to "
                        "(default: signatures, beside the keys)")
    add_folder(parser)
    parser = parsers.add_parser(
        "keys", help="show, make or change the keys that sign files for BOINC clients",
        description="Show the keys that sign application files for BOINC clients.")
    parser.set_defaults(run=manage_keys)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--make", metavar="DIR", help="make the first keys of a project in a "
                       "directory, on a machine other than the server")
    which.add_argument("--change", action="store_true", help="replace the key by a new one, signed "
                       "by the old one so that clients take it")
    add_folder(parser)


def add_folder(parser):
    """Add the option that both commands share."""
    parser.add_argument("--keys", metavar="DIR", help="directory of the keys (default: data/keys)")


def folder_of(options):
    """Return the directory of the keys."""
    return Path(options.keys or Path(minigrid.read_settings("setup.cfg").data) / "keys")


def sign_files(options):
    """Sign files, and those of the start program, with the private key that is here."""
    keys = open_keys(folder_of(options), make=False, signatures=options.signatures)
    keys.need_private("sign")
    wanted = {md5: name for name, md5 in contents(map(Path, options.files))}
    known = keys.signed
    for md5, name in wanted.items():
        try:
            md5 in known or keys.add(md5, name)
        except OSError as error:
            raise StoreError(f"cannot write {keys.path}: {error.strerror}") from None
        print(f"  {'signed already' if md5 in known else 'signed':14}  {name}")
    n_new = len(wanted.keys() - known)
    print(f"{n_new} new signatures, {len(wanted)} files in all: {keys.path}")
    say_what_to_copy(keys)
    return 0


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


def say_what_to_copy(keys):
    """Say what a server on another machine needs; the public key last, for it says what counts."""
    paths = [keys.path] + [keys.folder / name for name in (HISTORY, PUBLIC)]
    shown = " ".join(str(path) for path in paths if path.exists())
    print(f"If the server is another machine, copy to its data/keys, in this order:\n  {shown}\n"
          f"{PRIVATE} stays here.")


def manage_keys(options):
    """Make, change or show the keys."""
    folder = Path(options.make) if options.make else folder_of(options)
    if options.make:
        if any((folder / name).exists() for name in (PUBLIC, PRIVATE)):
            raise ClientError(f"there are keys in {folder} already: show them with 'minigrid keys "
                              f"--keys {folder}'")
        try:
            make_pair(folder)
        except OSError as error:
            raise StoreError(f"cannot write keys in {folder}: {error}") from None
    keys = open_keys(folder, make=False)
    if options.change:
        keys.change()
    print(f"keys in {folder}")
    print(f"  public key    RSA {keys.public.split()[0]}, fingerprint {fingerprint(keys.public)}")
    print("  private key   " + ("here" if keys.can_sign else "elsewhere: 'minigrid sign' there"))
    print(f"  former keys   {keys.former}")
    print(f"  signed files  {len(keys.signed)}")
    if options.make:
        print(f"Next: 'minigrid sign --keys {folder} FILE...' with your applications.")
    if options.change:
        print("The key was changed; BOINC clients take the new one when they next ask. A server "
              "that has the\nprivate key signs all files again by itself. Otherwise sign them now: "
              f"'minigrid sign --keys {folder} FILE...'")
    return 0


def fingerprint(text):
    """Return the beginning of the SHA-256 of a public key, for people to compare."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
