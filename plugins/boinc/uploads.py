"""Uploads of BOINC clients: a size query, or a header in XML and raw bytes behind it [WIRE 10].

Everything about a request is decided by its header; only then are the bytes read, straight into the
part file that both protocols share (plugins/files.py). A request has no account key: the upload
certificate proves that whoever sends it was given the job [WIRE 10.4].

What a client does with a status decides which it gets: -1 makes it give the file up, so it is for
what will never be taken; 1 makes it come again later; 0 makes it delete its copy.
"""

import re
from collections import Counter

import bottle

from minigrid import ClientError, ServerState, StoreError, plugged

from . import reader

TAKEN, TRANSIENT, PERMANENT = 0, 1, -1
MAY_PASS = (409, 503, 507)  # in use, bytes missing, damaged, disk full: worth another try
HEAD_BYTES = 8192  # a header has at most 8191
DAMAGED_MAX = 3  # wrong sums in a row: what the client holds is not what it says
ADDRESS = re.compile(r"/boinc/upload/(?:([^/]+)/)?file_upload_handler")

damaged = Counter()  # name of an output -> how often its sum was wrong
keys = None  # the Keys of the project, set by the package before the routes are made


def routes(app, clock):
    """Add the upload handler.

    An address that names its file lets a server refuse a request by the address alone; clients want
    to read `file_upload_handler` in it [WIRE 17].
    """

    @app.post("/boinc/upload/file_upload_handler")
    @app.post("/boinc/upload/<name>/file_upload_handler")
    def _(name=""):
        bottle.response.content_type = "text/plain"
        # Not request.body, which would copy the whole body once more.
        stream, length = bottle.request.environ["wsgi.input"], bottle.request.content_length
        return answer(stream, length, name, clock())


def answer(stream, length, named, now):
    """Handle one request of `length` bytes; return the XML of its answer, whatever it is.

    `named` is the file that the address names, empty if it names none.
    """
    head = plugged("read_fully")[-1](stream, min(length, HEAD_BYTES))
    try:
        asked = read_head(head, named)
        result = wanted(asked.name)
        if asked.kind == "query":
            return reply(TAKEN, file_size=bytes_stored(asked.name, result))
        check_upload(asked)
        if result:
            rest = Rest(head[asked.header_bytes:], stream)
            take(result, asked, rest, length - asked.header_bytes, now)
        return reply(TAKEN)
    except ClientError as error:
        return refusal(error)
    except StoreError as error:
        return reply(TRANSIENT, str(error))


def early_answer(method, path, length, head):
    """Answer a request before its body is kept, if it is an upload that is not wanted.

    `head` is the beginning of the body, empty while nothing of it has come: then the address
    must do. Returns XML, or None: read on. Only reads the store, and changes nothing.
    """
    match = ADDRESS.fullmatch(path) if method == "POST" else None
    named = match and match[1] or ""
    if not match or not head and not named:
        return None
    try:
        if head:
            asked = read_head(head, named)
            if asked.kind == "query":
                return None
            check_upload(asked)
            return None if wanted(asked.name, asked.nbytes) else reply(TAKEN)
        return None if wanted(named, length - HEAD_BYTES) else reply(TAKEN)
    except ClientError as error:
        return refusal(error)


def at_once(request):
    """Say whether a request, as waitress knows it, is quickly answered: no large file, no piece."""
    if not ADDRESS.fullmatch(request.path):
        return False
    stream = request.get_body_stream()
    head = stream.read(HEAD_BYTES)
    stream.seek(0)  # It is read again by whoever answers.
    try:
        asked = reader.read_upload(head)
    except ClientError:
        return True
    return asked.kind != "upload" or asked.offset == 0 \
        and asked.nbytes <= plugged("SMALL_BYTES")[-1]


# ---- What is decided ---------------------------------------------------------


def read_head(head, named):
    """Read the header of a request. Raises ClientError if it is none, or of another file."""
    asked = reader.read_upload(head)
    if asked.kind not in ("query", "upload"):
        raise ClientError("this is neither an upload nor a question for a size")
    if named and named != asked.name:
        raise ClientError(f"the address is that of {named}, not of {asked.name}")
    return asked


def wanted(name, nbytes=0):
    """Return the result whose output this is, None if it is not needed any more.

    Nothing is wrong with a result reported before its uploads were over [WIRE 12]: its client is
    told that all is well, so that it stops trying, and nothing is kept [C46]. Raises ClientError
    for an output that nobody knows, that is cancelled, or has more bytes than are taken.
    """
    result = plugged("result_of_upload")[-1](name)
    why = plugged("unwanted")[-1](result)
    if why and result.server_state == ServerState.OVER:
        return None
    if why:
        raise ClientError(f"{name} {why}", 403)
    limit = plugged("upload_limit")[-1](result)
    if nbytes > limit:
        raise ClientError(f"{name} is too large, at most {limit} bytes are taken", 413)
    return result


def check_upload(asked):
    """Check what the header of an upload says of itself. Raises ClientError."""
    if not keys.certifies(asked.xml_signature, asked.name, asked.max_nbytes):
        raise ClientError(f"the upload certificate of {asked.name} is missing or wrong", 403)
    if asked.nbytes > asked.max_nbytes:
        raise ClientError(f"{asked.name} is too large, its certificate is for "
                          f"{asked.max_nbytes} bytes", 413)
    if not 0 <= asked.offset <= asked.nbytes or not asked.md5:
        raise ClientError("nbytes, offset and md5_cksum must be those of a file")


def bytes_stored(name, result):
    """Return the number of bytes that answers a size query [WIRE 10.1].

    A client whose file has no more bytes than this takes its upload as done. So of an unfinished
    one the last byte is kept back: the server may have died between the last byte and the check of
    the sum. And where nothing is needed the answer is as many bytes as there may be.
    """
    if result is None:
        return 1 << 40
    nbytes, complete = plugged("uploaded")[-1](name)
    return nbytes if complete else max(nbytes - 1, 0)


# ---- What is done ------------------------------------------------------------


def take(result, asked, stream, nbytes, now):
    """Store the bytes behind a header. Raises ClientError if the file is not complete then.

    The reference does not compare the sum of the file, this does [WIRE 10.3]. One that stays wrong
    is given up: the client would send it for months.
    """
    name = asked.name
    stored = plugged("store_upload")[-1](
        result, name, asked.offset, asked.nbytes, stream, nbytes, now, "md5", asked.md5)
    if stored is None:
        damaged[name] += 1
        raise ClientError(f"{name} was damaged on its way",
                          400 if damaged[name] >= DAMAGED_MAX else 409)
    if stored != asked.nbytes:
        raise ClientError(f"{name} ended early: {stored} of {asked.nbytes} bytes are here", 409)
    damaged.pop(name, None)


class Rest:
    """What is left of a stream: the bytes read too far with the header, then the others."""

    def __init__(self, begun, stream):
        self.begun, self.stream = begun, stream

    def read(self, nbytes):
        piece, self.begun = self.begun[:nbytes], self.begun[nbytes:]
        return piece or self.stream.read(nbytes)


def refusal(error):
    """Return the answer that tells a client of a ClientError."""
    return reply(TRANSIENT if error.status in MAY_PASS else PERMANENT, str(error))


def reply(status, message="", file_size=None):
    """Return an answer in XML; its message is shown to the user of the client as it is."""
    lines = ["<data_server_reply>", f"    <status>{status}</status>"]
    if message:
        plain = re.sub(r"[^ -~]|[<>&]", "?", message)[:300]
        lines.append(f"    <message>{plain}</message>")
    if file_size is not None:
        lines.append(f"    <file_size>{file_size}</file_size>")
    return "\n".join([*lines, "</data_server_reply>", ""])
