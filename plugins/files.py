"""The files of all protocols: downloads, and outputs that are uploaded in pieces.

A download never changes under its name, so it may be kept for ever. An output is taken only for a
result that still may be reported; its pieces are appended to NAME.part, and the file gets its name
when it is complete, its sum is right, and it would survive a power cut.
"""

import contextlib
import hashlib
import os
import re
import threading

import bottle

import minigrid
from minigrid import (ClientError, ErrorMask, Outcome, Result, ServerState, file_path, output_files,
                      project, settle)

PIECE = 1 << 16  # bytes read at once
uploading, uploading_lock = set(), threading.Lock()  # names: one uploader each, in all protocols


def routes(app, clock):
    """Add the downloads, and the uploads of the JSON protocol."""

    @app.get("/download/<name>")
    def _(name):
        return send_file(file_path("download", name))

    @app.get("/upload/<name>")
    def _(name):
        nbytes, complete = uploaded(name)
        return {"nbytes": nbytes, "complete": complete}

    @app.put("/upload/<name>")
    def _(name):
        return upload(name, bottle.request, clock())


def send_file(path):
    """Send a file with Range and ETag; its content never changes under its name [WIRE 9]."""
    answer = bottle.static_file(path.name, str(path.parent), mimetype="application/octet-stream")
    if answer.status_code == 404:
        raise ClientError(f"there is no file {path.name} here (any more)", 404)
    if answer.status_code < 400:
        answer.set_header("Cache-Control", "public, max-age=31536000, immutable")
    return answer


# ---- Outputs, whatever the protocol ------------------------------------------


def part_of(path):
    """Return where the beginning of an unfinished upload lies."""
    return path.with_name(path.name + ".part")


def uploaded(name):
    """Return how many bytes of an output are stored, and whether it is complete.

    Raises ClientError for a name that is none.
    """
    path = file_path("upload", name)
    for place in (path, part_of(path)):
        with contextlib.suppress(FileNotFoundError):
            return place.stat().st_size, place == path
    return 0, False


def result_of_upload(name):
    """Return the result whose output has this name. Raises ClientError (404) if there is none."""
    stem = name[:-4] if name.endswith("_out") else ""
    result = Result.get_or_none(name=stem) if stem and "\0" not in stem else None
    if result is None or all(file["name"] != name for file in output_files(result)):
        raise ClientError(f"{name[:256]} belongs to no result of this project (any more)", 404)
    return result


def unwanted(result):
    """Say why an output of a result is not taken (any more); empty while it is [C11 C46].

    One that was given up is: it counts while it can be compared.
    """
    if result.server_state != ServerState.IN_PROGRESS and result.outcome != Outcome.NO_REPLY:
        return "was reported or given back already"
    if result.workunit.error_mask & ErrorMask.CANCELLED:
        return "is cancelled"
    return ""


def upload_limit(result):
    """Return how many bytes an output of a result may have, as its assignment says."""
    return int(min(result.workunit.rsc_disk_bound, project.settings.upload_bytes_max))


def store_upload(result, name, start, total, stream, nbytes, now, check):
    """Store up to nbytes of a stream at byte `start` of an output of `total` bytes.

    Returns how many bytes are there now; `total` means that it is complete, that `check(path)` has
    found its sum right, and that it would survive a power cut. If the sum is wrong all is dropped:
    None, else no repetition would ever help. What came of a stream that ends early is kept.

    Raises ClientError: 413 if it is too large; 409 if it is being uploaded already or bytes are
    missing before `start` (`nbytes`: where to go on); 507 if the disk does not take it.
    """
    limit = upload_limit(result)
    if total > limit:
        raise ClientError(f"{name} has {total} bytes, at most {limit} are taken", 413)
    path = file_path("upload", name)
    with only_uploader(name):
        try:
            if path.exists() and path.stat().st_size == total and check(path):
                return total  # Sent again after a lost answer.
            there = append_piece(part_of(path), start, min(nbytes, total - start), stream)
            if there == total:
                if not check(part_of(path)):
                    return part_of(path).unlink()
                # Slowly sent, it must not take the place of what was judged meanwhile.
                if why := unwanted(Result.get_by_id(result.id)):
                    part_of(path).unlink()
                    raise ClientError(f"{name} {why}", 403)
                settle(part_of(path), path)
            return there
        except OSError as error:
            minigrid.remember(now, f"cannot store the upload {name}: {error.strerror}")
            raise ClientError(f"the server cannot store {name}: {error.strerror}; try again later",
                              507) from None


@contextlib.contextmanager
def only_uploader(name):
    """Hold a name while its file is written. Raises ClientError (409) if somebody else does."""
    with uploading_lock:
        if name in uploading:
            raise ClientError(f"{name} is being uploaded already", 409, nbytes=uploaded(name)[0])
        uploading.add(name)
    try:
        yield
    finally:
        with uploading_lock:
            uploading.discard(name)


def append_piece(part, start, nbytes, stream):
    """Write a piece where the last one ended; return how many bytes there are. May raise OSError.

    Raises ClientError with the right place (409) if pieces are missing.
    """
    there = part.stat().st_size if part.exists() else 0
    if start > there:
        raise ClientError(f"continue at byte {there}", 409, nbytes=there)
    with open(part, "r+b" if there else "wb") as file:
        file.truncate(start)  # First: a crash must not leave new bytes in front of old ones.
        file.seek(start)
        while nbytes > 0 and (piece := stream.read(min(nbytes, PIECE))):
            file.write(piece)
            nbytes -= len(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def file_sum(path, kind):
    """Return the checksum of a file in hexadecimal; `kind` is "md5" or "sha256"."""
    found = hashlib.new(kind)
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


# ---- Uploads of the JSON protocol --------------------------------------------


def upload(name, request, now):
    """Take (a piece of) an output file; refuse what is not wanted before a byte is kept.

    `Content-Range: bytes START-END/TOTAL` says which piece it is, `X-Sha256` what the whole file
    must be. Returns the answer. Raises ClientError.
    """
    file_path("upload", name)  # No other name goes any further.
    key = (header(request, "Authorization") or "").removeprefix("Bearer ").strip()
    result = may_upload(name, key)
    start, total = content_range(request)
    wanted = (header(request, "X-Sha256") or "").lower()
    nbytes = store_upload(
        result, name, start, total, request.environ["wsgi.input"],  # .body would copy it once more
        max(request.content_length, 0), now,
        lambda path: not wanted or file_sum(path, "sha256") == wanted)
    if nbytes is None:
        raise ClientError("the file was damaged on its way; send it again", 409, nbytes=0)
    return {"nbytes": nbytes, "complete": nbytes == total}


def may_upload(name, key):
    """Return the result whose output this is, if the user of the account key may upload it.

    Raises ClientError: 404 for what is not known, 403 for what is not yours or not wanted.
    """
    result = result_of_upload(name)
    user = minigrid.plugged("user_of_key")[-1](key)
    if user is None or result.user_id != user.id:
        raise ClientError(f"{name} is not yours to upload", 403)
    why = unwanted(result)
    if why:
        raise ClientError(f"{name} {why}", 403)
    return result


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
