"""minigrid's own protocol: JSON over HTTP, and the files of both protocols.

`POST /scheduler` is the dataclasses of the core as they are; the README documents them field by
field. Uploads are resumable, bounded, and taken only for a result that still may be reported.
"""

import dataclasses
import hashlib
import json
import os
import re
import threading
from pathlib import Path

import bottle
from peewee import FloatField, IntegerField

import minigrid
from minigrid import (ClientError, ErrorMask, Outcome, Report, Request, Result, ServerState,
                      StoreError, User, base_url, file_path, project, schedule, settle)

REQUEST_BYTES_MAX = 16 << 20  # a thousand reports with their stderr
NAMES_MAX = 10_000  # results in one request
TEXT_MAX = 1 << 16


def routes(app, clock):
    """Add the routes of the JSON protocol and of the files."""

    @app.post("/register")
    def _():
        given = read_json(4096)
        unknown = set(given) - {"nickname", "email_addr", "password"}
        if unknown:
            raise ClientError(f"unknown: {', '.join(sorted(unknown))[:200]}; "
                              f"known are nickname, email_addr, password")
        user = project.write(lambda: register(clock(), **given))
        return {"authenticator": user.authenticator, "userid": user.id, "name": user.name}

    @app.post("/scheduler")
    def _():
        request = parse_request(read_json(REQUEST_BYTES_MAX))
        try:
            reply = project.write(lambda: schedule(request, clock()))
        except StoreError as error:
            reply = acknowledge_only(request, clock(), error)
        return make_absolute(dataclasses.asdict(reply), base_url())

    @app.get("/volunteer.py")
    def _():
        bottle.response.content_type = "text/x-python; charset=utf-8"
        return (Path(__file__).resolve().parent / "volunteer.py").read_bytes()

    @app.get("/download/<name>")
    def _(name):
        return send_file(file_path("download", name))

    @app.get("/upload/<name>")
    def _(name):
        path = file_path("upload", name)
        if path.exists():
            return {"nbytes": path.stat().st_size, "complete": True}
        part = part_of(path)
        return {"nbytes": part.stat().st_size if part.exists() else 0, "complete": False}

    @app.put("/upload/<name>")
    def _(name):
        return upload(name, bottle.request, clock())


# ---- Requests ----------------------------------------------------------------


def read_json(nbytes_max):
    """Read the body of a request as a JSON object. Raises ClientError."""
    if bottle.request.content_length > nbytes_max:
        raise ClientError(f"too long: at most {nbytes_max} bytes are read here", 413)
    try:
        value = json.loads(bottle.request.body.read(nbytes_max))
    except (ValueError, RecursionError):
        raise ClientError("the request is not JSON") from None
    if not isinstance(value, dict):
        raise ClientError("the request must be a JSON object")
    return value


def parse_request(given):
    """Make a Request of what came over the wire, whatever it is. Raises ClientError.

    Unknown keys are ignored: a newer client may say more. Nothing that is known is taken unchecked.
    """
    request = build(Request, given)
    request.host = build_host(given.get("host") or {})
    for name in ("platforms", "other_results"):
        value = getattr(request, name)
        if value is None and name == "other_results":
            continue  # It does not say.
        if not isinstance(value, list) or len(value) > NAMES_MAX \
                or not all(is_text(v, 256) for v in value):
            raise ClientError(f"{name} must be a list of at most {NAMES_MAX} names")
    reports = given.get("reports") or []
    if not isinstance(reports, list) or len(reports) > NAMES_MAX \
            or not all(isinstance(r, dict) for r in reports):
        raise ClientError(f"reports must be a list of at most {NAMES_MAX} objects")
    request.reports = [build(Report, r) for r in reports]
    return request


def build(kind, given):
    """Fill a dataclass from an object; its scalar fields are checked by their types."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.name not in given:
            continue
        value, wanted = given[field.name], field.type
        if wanted in (int, float):
            value = number(field.name, value, wanted)
        elif wanted is bool and not isinstance(value, bool):
            raise ClientError(f"{field.name} must be true or false")
        elif wanted is str and not is_text(value, TEXT_MAX):
            raise ClientError(f"{field.name} must be a text of at most {TEXT_MAX} characters")
        values[field.name] = value
    try:
        return kind(**values)
    except TypeError:
        missing = "authenticator" if kind is Request else "name"
        raise ClientError(f"{missing} is missing") from None


def build_host(given):
    """Check what a client says of its computer against the columns it may set."""
    if not isinstance(given, dict):
        raise ClientError("host must be an object")
    values = {}
    for name, column in minigrid.HOST_FIELDS.items():
        if name in given:
            if isinstance(column, (FloatField, IntegerField)):
                values[name] = max(number(name, given[name], float), 0)
            elif not is_text(given[name], 4096):
                raise ClientError(f"host.{name} must be a text")
            else:
                values[name] = given[name][:200]
    if "p_ncpus" in values:
        values["p_ncpus"] = int(min(max(values["p_ncpus"], 1), 4096))
    return values


def number(name, value, kind):
    """Check a number; NaN, infinities and what does not fit the store are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) \
            or not -2**62 <= value <= 2**62:
        raise ClientError(f"{name} must be a number")
    if kind is int and value != int(value):
        raise ClientError(f"{name} must be a whole number")
    return kind(value)


def is_text(value, length):
    """Say whether a value is a text that the store can hold."""
    if not isinstance(value, str) or len(value) > length or "\0" in value:
        return False
    return not any("\ud800" <= c <= "\udfff" for c in value)


def make_absolute(reply, base):
    """Put the address by which the client came in front of every path [D5]."""
    for assignment in reply["assignments"]:
        for file in (*assignment["files"], assignment["input"], assignment["output"]):
            file["url"] = base + file["url"]
    return reply


def acknowledge_only(request, now, error):
    """Answer while the store takes no change: only what is recorded already is acknowledged."""
    names = [report.name for report in request.reports]
    over = Result.select(Result.name).join(User).where(
        Result.name.in_(names), Result.server_state == ServerState.OVER,
        Result.received_time > 0, User.authenticator == request.authenticator)
    reply = minigrid.Reply(hostid=request.hostid, server_time=now, request_delay=60,
                           acks=[r.name for r in over])
    return minigrid.say_to(reply, f"the project has a problem on its side ({error}); "
                                  f"keep your results and try again later", "notice")


# ---- Accounts ----------------------------------------------------------------


def register(now, nickname="", email_addr="", password=""):
    """Make a user by nickname alone, or an account; return the user. Runs in the writer.

    An account that exists is returned if the password is right. Raises ClientError.
    """
    for value in (nickname, email_addr, password):
        if not is_text(value, 200):
            raise ClientError("nickname, email_addr and password must be texts")
    nickname = " ".join(nickname.split())[:60] or "anonymous"
    if not email_addr:
        return User.create(create_time=now, name=nickname, authenticator=new_key())
    email_addr = email_addr.strip().lower()
    if not re.fullmatch(r"[^@\s]{1,100}@[^@\s]{1,100}", email_addr):
        raise ClientError("that is not an e-mail address")
    if len(password) < 6:
        raise ClientError("the password must have at least 6 characters")
    proof = hashlib.md5((password + email_addr).encode()).hexdigest()  # BOINC's passwd_hash
    user = User.get_or_none(email_addr=email_addr)
    if user is None:
        salt = f"{project.rng.getrandbits(64):016x}"
        return User.create(create_time=now, name=nickname, email_addr=email_addr,
                           authenticator=new_key(), passwd_hash=hash_password(proof, salt))
    if hash_password(proof, user.passwd_hash[:16]) != user.passwd_hash:
        raise ClientError("there is an account with this address, and the password is wrong", 403)
    return user


def hash_password(proof, salt):
    """Hash slowly what proves a password, so that a stolen store does not give it away."""
    return salt + hashlib.scrypt(proof.encode(), salt=salt.encode(), n=4096, r=8, p=1).hex()


def new_key():
    """Draw an account key."""
    return f"{project.rng.getrandbits(128):032x}"


# ---- Files -------------------------------------------------------------------

uploading, uploading_lock = set(), threading.Lock()


def send_file(path):
    """Send a file with Range and ETag; its content never changes under its name."""
    answer = bottle.static_file(path.name, str(path.parent), mimetype="application/octet-stream")
    if answer.status_code == 404:
        raise ClientError(f"there is no file {path.name} here (any more)", 404)
    if answer.status_code < 400:
        answer.set_header("Cache-Control", "public, max-age=31536000, immutable")
    return answer


def part_of(path):
    """Return where the beginning of an unfinished upload lies."""
    return path.with_name(path.name + ".part")


def may_upload(name, authenticator, now):
    """Return the result whose output this is, if its user may still upload it.

    Raises ClientError: 404 for what is not known, 403 for what is not yours or not wanted.
    """
    stem = name[:-4] if name.endswith("_out") else ""
    result = Result.get_or_none(name=stem) if stem else None
    if result is None:
        raise ClientError(f"{name} belongs to no result of this project (any more)", 404)
    user = User.get_or_none(authenticator=authenticator)
    if user is None or result.user_id != user.id:
        raise ClientError(f"{name} is not yours to upload", 403)
    if result.server_state != ServerState.IN_PROGRESS and result.outcome != Outcome.NO_REPLY:
        raise ClientError(f"{name} was reported or given back already", 403)
    if result.workunit.error_mask & ErrorMask.CANCELLED:
        raise ClientError(f"{name} is cancelled", 403)
    return result


def upload(name, request, now):
    """Take (a piece of) an output file; refuse what is not wanted before a byte is kept.

    `Content-Range: bytes START-END/TOTAL` says which piece it is. A file gets its name only when it
    is complete, its sum is right, and it would survive a power cut.
    """
    path = file_path("upload", name)
    authenticator = (header(request, "Authorization") or "").removeprefix("Bearer ").strip()
    result = may_upload(name, authenticator, now)
    start, total = content_range(request)
    limit = int(min(result.workunit.rsc_disk_bound, project.settings.upload_bytes_max))
    if total > limit:
        raise ClientError(f"{name} has {total} bytes, at most {limit} are taken", 413)
    if path.exists() and path.stat().st_size == total:
        return {"nbytes": total, "complete": True}  # Sent again after a lost answer.
    with uploading_lock:
        if name in uploading:
            raise ClientError(f"{name} is being uploaded already", 409, nbytes=0)
        uploading.add(name)
    try:
        nbytes = append_piece(part_of(path), start, total, request)
        if nbytes == total:
            finish(part_of(path), path, (header(request, "X-Sha256") or "").lower())
        return {"nbytes": nbytes, "complete": nbytes == total}
    except OSError as error:
        minigrid.remember(now, f"cannot store the upload {name}: {error.strerror}")
        raise ClientError(f"the server cannot store {name}: {error.strerror}; try again later",
                          507) from None
    finally:
        with uploading_lock:
            uploading.discard(name)


def header(request, name):
    """Return a header, or None where there is none. Raises ClientError if it is no text."""
    try:
        return request.get_header(name)
    except UnicodeError:
        raise ClientError(f"the header {name} is not a text") from None


def content_range(request):
    """Read Content-Range; without one the body is the whole file. Raises ClientError."""
    text = header(request, "Content-Range")
    if text is None:
        return 0, max(request.content_length, 0)
    if text == "bytes */0":
        return 0, 0
    match = re.fullmatch(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})", text)
    start, end, total = map(int, match.groups()) if match else (0, 0, 0)
    if not match or not start <= end < total or end - start + 1 != request.content_length:
        raise ClientError("Content-Range must be 'bytes START-END/TOTAL', and the body that long")
    return start, total


def append_piece(part, start, total, request):
    """Write a piece where the last one ended; return how many bytes there are. May raise OSError.

    Raises ClientError with the right place (409) if pieces are missing.
    """
    there = part.stat().st_size if part.exists() else 0
    if start > there:
        raise ClientError(f"continue at byte {there}", 409, nbytes=there)
    with open(part, "r+b" if there else "wb") as file:
        file.seek(start)
        left, body = min(max(request.content_length, 0), total - start), request.body
        while left > 0 and (piece := body.read(min(left, 1 << 16))):
            file.write(piece)
            left -= len(piece)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def finish(part, path, sha256):
    """Give a complete upload its name, if its sum is what the client says."""
    if sha256:
        with open(part, "rb") as file:
            found = hashlib.sha256()
            while piece := file.read(1 << 20):
                found.update(piece)
        if found.hexdigest() != sha256:
            part.unlink()
            raise ClientError("the file was damaged on its way; send it again", 409, nbytes=0)
    settle(part, path)
