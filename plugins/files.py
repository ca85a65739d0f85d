"""The files of all protocols: downloads, and outputs that are uploaded in pieces.

A download never changes under its name, so it may be kept for ever. An output is taken only for a
result that still may be reported; its pieces are appended to NAME.part, and the file gets its name
when it is complete, its sum is right, and it would survive a power cut.

Most inputs and outputs are small. As files each would cost two flushes of the disk, which is more
than all else that is done for a workunit; so the small ones are kept in the store, and come and go
with what else a transaction says of them [D13]. What is read may lie in either place.
"""

import contextlib
import hashlib
import io
import os
import re
import threading

import bottle
from peewee import BlobField, CharField, fn

import minigrid
from minigrid import (ClientError, ErrorMask, Outcome, Record, ServerState, db, file_path,
                      output_files, place_of, prepared, project, results_named, settle,
                      store_file)

PIECE = 1 << 16  # bytes read at once
SMALL_BYTES = 1 << 14  # of a file that is kept in the store
WHOLE = re.compile(r"bytes (?:0-(\d{1,6})/(\d{1,6})|\*/0)")  # a Content-Range, if both numbers fit
uploading, uploading_lock = set(), threading.Lock()  # names: one uploader each, in all protocols


class SmallFile(Record):
    """A small input or output; its name is that of the folder where it else would be, and its own.

    `download/NAME` or `upload/NAME`.
    """

    name = CharField(primary_key=True)
    content = BlobField()

    class Meta:
        without_rowid = True


TABLES = (SmallFile,)


def routes(app, clock):
    """Add the downloads, and the uploads of the JSON protocol."""

    @app.get("/download/<name>")
    def _(name):
        return send_file("download", name)

    @app.get("/upload/<name>")
    def _(name):
        nbytes, complete = uploaded(name)
        return {"nbytes": nbytes, "complete": complete}

    @app.put("/upload/<name>")
    def _(name):
        return upload(name, bottle.request, clock())


def at_once(request):
    """Say whether a request is about a small output, so that no thread of its own need flush it."""
    if not request.path.startswith("/upload/") or request.body_bytes_received > SMALL_BYTES:
        return False
    piece = WHOLE.fullmatch(request.headers.get("CONTENT_RANGE", "bytes */0"))
    return piece is not None and (not piece[1] or int(piece[1]) + 1 == int(piece[2]))


def send_file(folder, name):
    """Send a file with Range and ETag; its content never changes under its name [WIRE 9]."""
    place = file_path(folder, name)
    found = small_file.first(f"{folder}/{name}")
    answer = send_bytes(found[0]) if found else bottle.static_file(
        place.name, str(place.parent), mimetype="application/octet-stream")
    if answer.status_code == 404:
        raise ClientError(f"there is no file {name} here (any more)", 404)
    if answer.status_code < 400:
        answer.set_header("Cache-Control", "public, max-age=31536000, immutable")
    return answer


def send_bytes(content):
    """Send a small file as bottle sends others."""
    asked, tag = bottle.request.environ, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
    if asked.get("HTTP_IF_NONE_MATCH", "") == tag:
        return bottle.HTTPResponse(status=304, **headers)
    if "HTTP_RANGE" in asked:
        ranges = list(bottle.parse_range_header(asked["HTTP_RANGE"], len(content)))
        if not ranges:
            return bottle.HTTPError(416, "Requested Range Not Satisfiable")
        start, end = ranges[0]
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return bottle.HTTPResponse(content[start:end], 206, **headers)
    return bottle.HTTPResponse(content, **headers)


# ---- Inputs and outputs, small and large -------------------------------------


@prepared
def small_file(name):
    """Find the content of a small file."""
    return SmallFile.select(SmallFile.content).where(SmallFile.name == name).tuples()


@prepared
def small_size(name):
    """Find the size of a small file in bytes."""
    return SmallFile.select(fn.LENGTH(SmallFile.content)).where(SmallFile.name == name).tuples()


@prepared
def small_among(names):
    """Find which of some files are small ones."""
    return SmallFile.select(SmallFile.name).where(SmallFile.name.in_(names)).tuples()


def keep_file(folder, name, content):
    """Keep an input or output, in the store if it is small. Runs in the writer."""
    if len(content) > SMALL_BYTES:
        return store_file(folder, name, content)
    db.connection().execute("INSERT OR REPLACE INTO small_file (name, content) VALUES (?, ?)",
                            (f"{folder}/{name}", content))


def file_content(folder, name, nbytes=-1):
    """Return an input or output, or its first bytes. Raises OSError, as of a file."""
    found = small_file.first(f"{folder}/{name}")
    if found:
        return found[0][:nbytes] if nbytes >= 0 else found[0]
    with open(place_of(folder, name), "rb") as file:
        return file.read(nbytes)


def file_size(folder, name):
    """Return how many bytes an input or output has; None if there is none. Raises OSError."""
    found = small_size.first(f"{folder}/{name}")
    if found:
        return found[0]
    with contextlib.suppress(FileNotFoundError):
        return os.stat(place_of(folder, name)).st_size


def forget_files(names):
    """Delete small files, `folder/name`; none need be there. Runs in the writer."""
    db.connection().executemany("DELETE FROM small_file WHERE name = ?", [(n,) for n in names])


# ---- Outputs, whatever the protocol ------------------------------------------


def part_of(path):
    """Return where the beginning of an unfinished upload lies."""
    return path.with_name(path.name + ".part")


def uploaded(name):
    """Return how many bytes of an output are stored, and whether it is complete.

    Raises ClientError for a name that is none.
    """
    path = file_path("upload", name)
    nbytes = file_size("upload", name)
    if nbytes is not None:
        return nbytes, True
    with contextlib.suppress(FileNotFoundError):
        return part_of(path).stat().st_size, False
    return 0, False


def result_of_upload(name):
    """Return the result whose output has this name. Raises ClientError (404) if there is none."""
    stem = name[:-4] if name.endswith("_out") else ""
    result = results_named.first([stem]) if stem and "\0" not in stem else None
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


def store_upload(result, name, start, total, stream, nbytes, now, kind, wanted):
    """Store up to nbytes of a stream at byte `start` of an output of `total` bytes.

    `wanted` is its sum of a `kind` of file_sum(), or empty. Returns how many bytes are there now;
    `total` means that it is complete, that its sum is right, and that it would survive a power cut.
    If the sum is wrong all is dropped: None, else no repetition would ever help. What came of a
    stream that ends early is kept.

    Raises ClientError: 413 if it is too large; 409 if it is being uploaded already or bytes are
    missing before `start` (`nbytes`: where to go on); 507 if the disk does not take it. Raises
    StoreError if the store does not.
    """
    limit = upload_limit(result)
    if total > limit:
        raise ClientError(f"{name} has {total} bytes, at most {limit} are taken", 413)
    path = file_path("upload", name)
    with only_uploader(name):
        try:
            if is_complete(name, total, kind, wanted):
                return total
            if start == 0 and total <= min(nbytes, SMALL_BYTES):
                content = read_fully(stream, total)
                if len(content) == total:
                    return store_small(result, name, content, kind, wanted)
                stream = io.BytesIO(content)  # It has ended early.
            there = append_piece(part_of(path), start, min(nbytes, total - start), stream)
            if there == total:
                if wanted and file_sum(part_of(path), kind) != wanted:
                    return part_of(path).unlink()
                project.write(lambda: make_way(result, name))
                settle(part_of(path), path)
            return there
        except OSError as error:
            minigrid.remember(now, f"cannot store the upload {name}: {error.strerror}")
            raise ClientError(f"the server cannot store {name}: {error.strerror}; try again later",
                              507) from None


def store_small(result, name, content, kind, wanted):
    """Store a whole small output; return its size, None if its sum is wrong."""
    right = not wanted or hashlib.new(kind, content).hexdigest() == wanted

    def keep():
        still_wanted(result, name)
        keep_file("upload", name, content)

    if right:
        project.write(keep)
    place = place_of("upload", name)
    for old in (f"{place}.part", place) if right else (f"{place}.part",):  # of an attempt before
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
    return len(content) if right else None


def make_way(result, name):
    """Forget a small output in whose place a large one comes. Runs in the writer."""
    path = file_path("upload", name)
    try:
        still_wanted(result, name)
    except ClientError:
        part_of(path).unlink()
        raise
    forget_files([f"upload/{name}"])


def still_wanted(result, name):
    """Hold that an output is wanted, now. Raises ClientError (403).

    Slowly sent, it must not take the place of what was judged meanwhile.
    """
    row = results_named.first([result.name])
    why = unwanted(row) if row else "belongs to no result of this project (any more)"
    if why:
        raise ClientError(f"{name} {why}", 403)


def is_complete(name, total, kind, wanted):
    """Say whether an output is here, as it is sent once more after a lost answer."""
    if file_size("upload", name) != total:
        return False
    found = small_file.first(f"upload/{name}")
    return not wanted or wanted == (hashlib.new(kind, found[0]).hexdigest() if found
                                    else file_sum(place_of("upload", name), kind))


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


def read_fully(stream, nbytes):
    """Read n bytes, fewer only if the stream ends."""
    pieces = []
    while nbytes > 0 and (piece := stream.read(nbytes)):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


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
        max(request.content_length, 0), now, "sha256", wanted)
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
