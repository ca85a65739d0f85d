"""What BOINC clients send, read into dataclasses: scheduler requests, upload headers, preferences.

A request looks like XML and is none [WIRE 3.1]: names are not escaped, and the stderr of a job and
the text of a trickle are copied in as they are. So this is a scanner, not an XML parser. It reads
bytes as Latin-1, which cannot fail, skips what it does not know, looks at every character a bounded
number of times, and raises nothing but ClientError.

**Where raw text ends.** A stderr may hold `]]>`, `</result>`, `<hostid>99</hostid>` or the end of
the request. It ends at the first `]]>` and `</stderr_out>` after which the request goes on, to its
end, as a client writes it: the result's files, `</result>`, further results, trickles, and then
what holds no raw text. Trickles are read the same way. So a stderr can forge nothing of the head
or the tail of a request. What cannot be told apart is one that writes the proper end of its own
result, a whole further result, and the beginning of that one's stderr: the real end then closes
the forged one (or the same with a trickle, if a real one follows). It comes from a program the
project itself sent out and can name nothing but results and trickles of its own host. Who acts on
`results` must look whose they are; a name may come twice, and may stand in `other_results`, too,
which a client never does by itself.
"""

import bisect
import codecs
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from minigrid import ClientError

NAME_MAX = 256  # characters of a name; the client itself has room for 255 [WIRE 3.2]
NAMES_MAX = 10_000  # results, jobs in progress, files of one request
VERSIONS_MAX = 1000
PLATFORMS_MAX = 64
MESSAGES_MAX = 1000
TEXT_MAX = 1 << 16  # characters of a stderr, a trickle or preferences
ENTRIES_MAX, VALUE_MAX = 200, 4096  # of host_info: entries, characters of a value
NUMBER_MAX = 2.0 ** 62  # fits the store's integers
NUMBER_LENGTH = 400  # characters; %f writes 317 at most
UPLOAD_HEADER_MAX = 8191  # bytes [WIRE 10.2]
PREFS_MAX = 8192  # characters of what read_prefs() returns

TAG = re.compile(r"<(/?)([A-Za-z_0-9]{1,40})(/?)>")
NEXT_TAG = re.compile(r"\s*" + TAG.pattern)
LEAF = re.compile(r"<([A-Za-z_0-9]{1,40})>([^<]*)</\1>")
CLOSE = re.compile(r"</([A-Za-z_0-9]{1,40})>")
SPACE = re.compile(r"\s*")
CDATA = "<![CDATA["
STDERR_END, MESSAGE_END = "</stderr_out>", "</msg_from_host>"
STDERR_ENDS = re.compile(STDERR_END)
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
USUAL_NUMBER = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,9})?")  # as clients write it, within bounds
INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]+")  # all but line ends and tabs
CONTROL_BYTES = bytes(c for c in range(128) if CONTROL.match(chr(c)))
NO_UTF8 = re.compile(rb"(?:[\x80-\xc1\xf5-\xff]|[\xc2-\xf4](?![\x80-\xbf]))+")
ENTITY = re.compile(r"&(?:#([0-9]{1,3})|(lt|gt|amp|quot|apos));")
HIGH_BYTE = re.compile(r"&#(12[89]|1[3-9][0-9]|2[0-4][0-9]|25[0-5]);")
ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
MESSAGE = re.compile(r"\s*<message>(.*?)</message>\s*", re.S)
MD5 = re.compile(r"[0-9a-fA-F]{32}")
# Top-level containers: one of these inside another means that the other was never closed.
CONTAINERS = frozenset((
    "scheduler_request", "working_global_preferences", "global_preferences", "time_stats",
    "net_stats", "host_info", "disk_usage", "alt_platform", "result", "msg_from_host", "file_info",
    "app_versions", "other_results"))
# Plain elements that follow one another, which is most of a request, are read at once. What has a
# reader of its own is left to it, even where it looks plain. The bound is for the matcher, which
# keeps notes of every element.
RUN = re.compile(r"(?:\s*<(?!(?:%s)>)([A-Za-z_0-9]{1,40})>[^<]*</\1>){1,200}" % "|".join(
    sorted(CONTAINERS | {"stderr_out", "app_version"})))
LEAVES = frozenset((
    "authenticator", "hostid", "rpc_seqno", "core_client_major_version",
    "core_client_minor_version", "core_client_release", "allow_multiple_clients",
    "dont_send_work", "work_req_seconds", "cpu_req_secs", "cpu_req_instances", "estimated_delay",
    "platform_name", "code_sign_key", "cross_project_id", "global_prefs_source_email_hash"))


@dataclass
class ClientFile:
    """An output file of a result, or a file the client keeps ("sticky") [WIRE 6, 6.2]."""

    name: str
    nbytes: int = 0
    md5: str = ""  # 32 hex digits, or "" if none were told
    error_msg: str = ""  # why an upload failed for good; then the server has no such file
    status: int = 0  # of a sticky file: 1 = it is there


@dataclass
class ClientResult:
    """A finished job as its client reports it; states and exit codes are BOINC's [WIRE 6.2, 12]."""

    name: str
    final_cpu_time: float = 0.0  # s
    final_elapsed_time: float = 0.0  # s
    exit_status: int = 0
    state: int = 0  # 5 = success, 3 = error, 6 = aborted, 1 = a download failed
    platform: str = ""
    version_num: int = 0
    plan_class: str = ""
    peak_memory: int = 0  # bytes, 0 if not measured
    stderr_out: str = ""  # the client's own message, then the job's stderr; no control characters
    output_files: list = field(default_factory=list)  # ClientFile; only those uploaded or given up


@dataclass
class ClientMessage:
    """A trickle-up [WIRE 13]."""

    result_name: str
    time: int  # s UTC, the client's clock
    text: str


@dataclass
class ClientRequest:
    """A scheduler request; what the client left out has the default [WIRE 6]."""

    complete: bool = False  # the end tag was found; if not, nothing may be changed
    authenticator: str = ""
    hostid: int = 0
    rpc_seqno: int = 0
    client_version: str = "0.0.0"
    client_numbers: tuple = (0, 0, 0)
    allow_multiple_clients: bool = False
    dont_send_work: bool = False
    work_req_seconds: float = 0.0
    cpu_req_secs: float = 0.0
    cpu_req_instances: float = 0.0
    estimated_delay: float = 0.0  # s
    platforms: list = field(default_factory=list)  # names, best first
    code_sign_key: str = ""
    cross_project_id: str = ""
    prefs: str = ""  # as it came: hand out again only what read_prefs() makes of it
    prefs_time: float = 0.0  # its mod_time, s UTC
    working_prefs: str = ""
    prefs_email_hash: str = ""
    time_stats: dict = field(default_factory=dict)  # name -> float
    net_stats: dict = field(default_factory=dict)
    host_info: dict = field(default_factory=dict)  # name -> text
    disk_usage: dict = field(default_factory=dict)  # name -> float, bytes
    results: list = field(default_factory=list)  # ClientResult
    messages: list = field(default_factory=list)  # ClientMessage
    sticky_files: list = field(default_factory=list)  # ClientFile
    app_versions: list = field(default_factory=list)  # dicts; other_results count positions here
    other_results: Optional[list] = None  # names in progress; None: not told, or not all of them


@dataclass
class UploadRequest:
    """The header of a request to the upload handler [WIRE 10]."""

    kind: str  # "query": how much of the file is there? "upload": here it comes
    name: str  # may hold anything but control characters: compare it, make no path of it
    nbytes: int = 0  # of the whole file
    md5: str = ""  # of the whole file, lower case; "" if none was told
    offset: int = 0
    max_nbytes: int = 0
    xml_signature: str = ""
    header_bytes: int = 0  # where the data begin; 0 for a query


# ---- Values ------------------------------------------------------------------


def number(text):
    """Read what printf %f or %d wrote as a float; 0.0 if it is no finite number."""
    if USUAL_NUMBER.fullmatch(text):
        return float(text)
    text = text.strip()
    value = float(text) if len(text) <= NUMBER_LENGTH and NUMBER.fullmatch(text) else 0.0
    return max(-NUMBER_MAX, min(NUMBER_MAX, value)) if math.isfinite(value) else 0.0


def integer(text):
    """Read an integer, or the integer part of a number; 0 if it is none."""
    if len(text) < 19 and text.isdecimal():
        return int(text)
    text = text.strip()
    value = int(text) if INTEGER.fullmatch(text) else int(number(text))  # %d, or %f of bytes
    return max(-(1 << 62), min(1 << 62, value))


def line(text, length=NAME_MAX):
    """Return the text without space around it; "" if it is too long or has control characters."""
    text = text.strip()
    return text if len(text) <= length and text.isprintable() else ""


def md5_of(text):
    """Return an MD5 in lower case, or "" if it is none."""
    text = text.strip()
    return text.lower() if MD5.fullmatch(text) else ""


def _latin_1(error):
    """Decode bytes that are no UTF-8 as Latin-1, as many as can be in one go."""
    run = NO_UTF8.match(error.object, error.start)
    end = run.end() if run else error.end
    return error.object[error.start:end].decode("latin-1"), end


codecs.register_error("minigrid.latin-1", _latin_1)


def join_utf8(text):
    """Join bytes, one per character, to UTF-8 where they are; drop control characters but LF, TAB.

    Characters above 255 do not occur in what was read as Latin-1.
    """
    if text.isascii():  # a stderr of 64 KB at ten times the speed of the other way
        return text.encode().translate(None, CONTROL_BYTES).decode()
    return CONTROL.sub("", text.encode("latin-1").decode("utf-8", "minigrid.latin-1"))


def unescape(text):
    """Decode the entities of escaped text, one byte per number [WIRE 3.1], to readable text."""
    if text.isprintable() and text.isascii() and "&" not in text:
        return text  # as nearly always
    return join_utf8(ENTITY.sub(_entity, text))


def _entity(match):
    if match[2]:
        return ENTITIES[match[2]]
    return chr(int(match[1])) if int(match[1]) < 256 else match[0]


def high_bytes(text):
    """Decode the text of a CDATA section: only bytes above 127 were written as `&#N;`."""
    if "&#" in text:
        text = HIGH_BYTE.sub(lambda match: chr(int(match[1])), text)
    return join_utf8(text)


def readable(raw, decode=high_bytes):
    """Return a stderr_out as text for people, the last TEXT_MAX characters of it.

    The client's own words (`<message>`) come first, then the stderr without its wrapping.
    """
    raw = raw[-6 * TEXT_MAX:]  # A byte takes six characters at most.
    said, pos = [], 0
    while (match := MESSAGE.match(raw, pos)):
        said.append(match[1].strip())
        pos = match.end()
    stderr = raw[pos:].strip()
    if stderr.startswith("<stderr_txt>"):
        end = stderr.rfind("</stderr_txt>")
        end = end if end >= 0 else len(stderr)
        after = MESSAGE.match(stderr, end + len("</stderr_txt>"))
        said += [after[1].strip()] if after else []
        stderr = stderr[len("<stderr_txt>"):end].strip("\r\n")
    return decode("\n".join(part for part in (*said, stderr) if part))[-TEXT_MAX:]


# ---- Scheduler requests ------------------------------------------------------


def read_request(body):
    """Read the body of a scheduler request [WIRE 6].

    A request without its end tag, or with a raw text that never ends, is `complete=False`.
    Raises ClientError if the body is no scheduler request at all.
    """
    text = body.decode("latin-1")
    start = text.find("<scheduler_request>")
    if start < 0:
        raise ClientError("this is the scheduler of a BOINC project, for BOINC clients: "
                          "no <scheduler_request> found")
    return _Scanner(text, start + len("<scheduler_request>")).read()


_NO_END = object()  # a raw text that never ends: what follows it cannot be told from it


class _Scanner:
    """One pass over a request; every method reads from `self.pos` and moves it."""

    def __init__(self, text, pos):
        self.text, self.pos = text, pos
        self.request = ClientRequest()
        self.found = {}  # leaves of the top level; the first of a name counts
        self.seen = set()  # containers that may come only once
        self.too_many = False  # some result was left out, so other_results proves nothing

    def read(self):
        """Read all; return the ClientRequest."""
        containers = {
            "result": self.result, "msg_from_host": self.message, "file_info": self.sticky_file,
            "alt_platform": self.alt_platform}
        once = {
            "working_global_preferences": self.working_preferences,
            "global_preferences": self.preferences,
            "time_stats": self.numbers, "net_stats": self.numbers, "disk_usage": self.numbers,
            "host_info": self.host_info, "app_versions": self.app_versions,
            "other_results": self.other_results}
        while (tag := TAG.search(self.text, self.pos)):
            self.pos = tag.end()
            closing, name, empty = tag.groups()
            if closing:
                if name == "scheduler_request":
                    self.request.complete = True
                    break
            elif empty:
                self.keep(name, "1")
            elif name in containers:
                if containers[name](name) is _NO_END:
                    break
            elif name in once:
                if name not in self.seen:
                    self.seen.add(name)
                    once[name](name)
            else:
                self.leaves_or_skip(tag)
        return self.finish()

    def keep(self, name, value):
        if name in LEAVES:
            self.found.setdefault(name, value)

    def leaves_or_skip(self, tag):
        """Keep the elements that hold plain text; step over one that holds others."""
        leaves = RUN.match(self.text, tag.start())
        if leaves:
            self.pos = leaves.end()
            for name, value in LEAF.findall(self.text, tag.start(), self.pos):
                self.keep(name, value)
        else:
            self.inside(tag[2])

    def finish(self):
        """Fill in what the leaves of the top level say."""
        given, request = self.found, self.request
        numbers = tuple(integer(given.get(f"core_client_{part}", "")) for part in (
            "major_version", "minor_version", "release"))
        request.client_numbers = numbers
        request.client_version = "%d.%d.%d" % numbers
        for name in ("authenticator", "cross_project_id"):
            setattr(request, name, line(given.get(name, "")))
        request.prefs_email_hash = line(given.get("global_prefs_source_email_hash", ""))
        for name in ("hostid", "rpc_seqno"):
            setattr(request, name, integer(given.get(name, "")))
        for name in ("work_req_seconds", "cpu_req_secs", "cpu_req_instances", "estimated_delay"):
            setattr(request, name, number(given.get(name, "")))
        for name in ("allow_multiple_clients", "dont_send_work"):
            setattr(request, name, number(given.get(name, "")) != 0)
        key = given.get("code_sign_key", "").strip()
        request.code_sign_key = key if len(key) <= VALUE_MAX and "\0" not in key else ""
        names = [line(given.get("platform_name", "")), *request.platforms]
        request.platforms = list(dict.fromkeys(filter(None, names)))
        if self.too_many:
            request.other_results = None
        return request

    # -- Elements

    @cached_property
    def closes(self):
        """Where the last end tag of each name is: made when one was not found, then asked first.

        Without it a thousand tags that are never closed would cost a thousand searches to the end.
        """
        return {m[1]: m.start() for m in CLOSE.finditer(self.text)}

    @cached_property
    def last_stderr(self):
        return self.text.rfind(STDERR_END)

    @cached_property
    def last_message(self):
        return self.text.rfind(MESSAGE_END)

    def inside(self, name):
        """Step over an element's content and end tag; return the content, None if it has no end."""
        start, end = self.pos, -1
        if "closes" not in vars(self) or self.closes.get(name, -1) >= start:
            end = self.text.find(f"</{name}>", start)
        if end < 0:
            self.closes  # From now on it is known what is never closed.
            return None
        self.pos = end + len(name) + 3
        return self.text[start:end]

    def elements(self, name, parts=()):
        """Yield (name, content) of each element up to the end tag of `name`, then (None, None).

        Without an end tag it stops before what cannot stand inside, and that last pair is missing.
        An element that holds others gives its raw content; the `parts` are given as (name, None)
        and read by the caller before the next step.
        """
        while (tag := TAG.search(self.text, self.pos)):
            closing, inner, empty = tag.groups()
            if inner == "scheduler_request" or inner in CONTAINERS and not closing and (
                    inner not in parts):
                return
            self.pos = tag.end()
            if closing:
                if inner == name:
                    yield None, None
                    return
            elif empty:
                yield inner, "1"
            elif inner in parts:
                yield inner, None
            elif (leaves := RUN.match(self.text, tag.start())):
                self.pos = leaves.end()
                yield from LEAF.findall(self.text, tag.start(), self.pos)
            else:
                content = self.inside(inner)
                if content is not None:
                    yield inner, content

    def leaves(self):
        """Step over the plain elements that stand here; return {name: text}, the first counts."""
        leaves = RUN.match(self.text, self.pos)
        if not leaves:
            return {}
        self.pos = leaves.end()
        return dict(LEAF.findall(self.text, leaves.start(), self.pos)[::-1])

    def values(self, name):
        """Read a container of plain elements: (dict of name -> text, was there an end tag)."""
        found = self.leaves()
        tag = NEXT_TAG.match(self.text, self.pos)
        if tag and tag.groups() == ("/", name, ""):  # as nearly always
            self.pos = tag.end()
            return found, True
        for inner, content in self.elements(name):
            if inner is None:
                return found, True
            if len(found) < ENTRIES_MAX:
                found.setdefault(inner, content)
        return found, False

    # -- Containers of the top level

    def alt_platform(self, name):
        """Read the name of a further platform."""
        platform = line(self.values(name)[0].get("name", ""))
        if platform and len(self.request.platforms) < PLATFORMS_MAX:
            self.request.platforms.append(platform)

    def working_preferences(self, name):
        """Read the preferences in force, which stand in a container of their own."""
        text = self.inside(name) or ""
        start, end = text.find("<global_preferences>"), text.rfind("</global_preferences>")
        text = text[start + len("<global_preferences>"):end] if 0 <= start < end else ""
        self.request.working_prefs = text if len(text) <= TEXT_MAX else ""

    def preferences(self, name):
        """Read the preferences that a server sent last, as they came."""
        text = self.inside(name) or ""
        self.request.prefs = text if len(text) <= TEXT_MAX else ""
        self.request.prefs_time = prefs_mod_time(self.request.prefs)

    def numbers(self, name):
        """Read a container of numbers into the request's field of the same name."""
        usual, given = USUAL_NUMBER.fullmatch, self.values(name)[0]
        setattr(self.request, name, {key: float(value) if usual(value) else number(value)
                                     for key, value in given.items()})

    def host_info(self, name):
        """Read what the client says of its computer; parts with elements of their own are not."""
        self.request.host_info = {
            key: unescape(value).strip()[:VALUE_MAX] for key, value in self.values(name)[0].items()
            if "<" not in value}

    def sticky_file(self, name):
        """Read one file that the client keeps."""
        given, ended = self.values(name)
        file = _file(given) if ended else None
        if file and len(self.request.sticky_files) < NAMES_MAX:
            self.request.sticky_files.append(file)

    def app_versions(self, name):
        """Read the app versions; an unreadable one keeps its place, which others refer to."""
        for inner, content in self.elements(name, ("app_version",)):
            if inner == "app_version" and content is None:
                given, _ = self.values(inner)
                if len(self.request.app_versions) < VERSIONS_MAX:
                    self.request.app_versions.append({
                        "app_name": line(given.get("app_name", "")),
                        "version_num": integer(given.get("version_num", "")),
                        "platform": line(given.get("platform", "")),
                        "plan_class": line(given.get("plan_class", "")),
                        "avg_ncpus": number(given.get("avg_ncpus", "")),
                        "flops": number(given.get("flops", "")),
                        "api_version": line(given.get("api_version", ""))})

    def other_results(self, name):
        """Read the jobs in progress; half a list would say that the other half is lost."""
        names, ended = [], False
        for inner, content in self.elements(name, ("other_result",)):
            if inner == "other_result" and content is None:
                names.append(line(self.values(inner)[0].get("name", "")))
            ended = inner is None
        if ended and len(names) <= NAMES_MAX:
            self.request.other_results = [name for name in names if name]

    # -- Results and trickles: raw text

    def result(self, name):
        """Read one result; one that has no end tag or no name is left out."""
        given, files, stderr = self.leaves(), [], None
        for inner, content in self.elements(name, ("stderr_out", "file_info")):
            if inner is None:
                self.add_result(given, files, stderr or "")
            elif inner == "stderr_out" and content is None:
                text = self.stderr()
                if text is None:
                    return _NO_END
                stderr = text if stderr is None else stderr
            elif inner == "file_info" and content is None:
                file, ended = self.values(inner)
                if ended and len(files) < NAMES_MAX:
                    files.append(_file(file))
            elif len(given) < ENTRIES_MAX:
                given.setdefault(inner, content)

    def add_result(self, given, files, stderr):
        """Keep a result that was read whole, if it has a name."""
        name = line(given.get("name", ""))
        if not name:
            return
        if len(self.request.results) >= NAMES_MAX:
            self.too_many = True
            return
        self.request.results.append(ClientResult(
            name, number(given.get("final_cpu_time", "")),
            number(given.get("final_elapsed_time", "")), integer(given.get("exit_status", "")),
            integer(given.get("state", "")), line(given.get("platform", "")),
            integer(given.get("version_num", "")), line(given.get("plan_class", "")),
            integer(given.get("final_peak_working_set_size", "")), stderr,
            [file for file in files if file]))

    def stderr_start(self, pos):
        """Return where the text of a stderr begins, and its kind: "cdata", "empty" or "bare"."""
        pos = self.skip_space(pos)
        version = LEAF.match(self.text, pos)
        if version and version[1] == "core_client_version":
            pos = self.skip_space(version.end())
        if self.text.startswith(CDATA, pos):
            return pos + len(CDATA), "cdata"
        return pos, "empty" if self.text.startswith(STDERR_END, pos) else "bare"

    def stderr(self):
        """Read a stderr up to its end tag; return it readable, None if it does not end."""
        pos, kind = self.stderr_start(self.pos)
        if kind == "empty":
            self.pos = pos + len(STDERR_END)
            return ""
        for ends in self.stderr_ends:
            end = _next(ends[kind], pos)
            if end is not None:
                self.pos = end + len(STDERR_END)
                raw = self.text[pos:end].rstrip()
                return readable(raw[:-len("]]>")]) if kind == "cdata" else readable(raw, unescape)
        return None

    @cached_property
    def stderr_ends(self):
        """Where a stderr may end: (well, at a pinch), each by kind of stderr, positions in order.

        Looked for once and for all results, from the last to the first: then the look ahead from
        one need not get past the next, and all together cost one pass.
        """
        well, pinch = {"cdata": [], "bare": []}, {"cdata": [], "bare": []}
        for end in [m.start() for m in STDERR_ENDS.finditer(self.text)][::-1]:
            goes_on = self.goes_on(end + len(STDERR_END), well)
            if goes_on is not None:
                ends = well if goes_on else pinch
                ends["bare"].append(end)
                if self.text[max(0, end - 16):end].rstrip().endswith("]]>"):
                    ends["cdata"].append(end)
        for positions in (*well.values(), *pinch.values()):
            positions.reverse()
        return well, pinch

    def goes_on(self, pos, later):
        """Say whether the request goes on here as after a stderr: True, not quite (False), None.

        None: not even the rest of this result stands here. False: that does, but then comes what
        no client writes. `later` are the ends found behind this one, the last found the nearest.
        """
        in_result, ended = True, False
        while True:
            tag = NEXT_TAG.match(self.text, pos)
            if not tag:
                break
            closing, name, empty = tag.groups()
            if not in_result and name != "result":
                return self.well_after_results(tag, pos) or False
            if name == "stderr_out" and not closing and not empty:
                start, kind = self.stderr_start(tag.end())
                found = later["bare"][-1:] == [start] if kind == "empty" else bool(later[kind])
                return found or False if ended else None
            leaves = RUN.match(self.text, pos)
            if name == "result":
                if in_result is not bool(closing):
                    break
                in_result, ended = not in_result, True
            elif not leaves and name != "file_info":
                break
            pos = (leaves or tag).end()
        return False if ended else None

    def well_after_results(self, tag, pos):
        """Say whether this tag, at `pos`, may follow the last result of the request."""
        if tag[2] == "msg_from_host" and not tag[1]:
            return self.last_message > self.last_stderr
        return pos > self.last_stderr and (not tag[1] or tag[2] == "scheduler_request")

    def message(self, name):
        """Read a trickle-up: two elements, then raw text [WIRE 13]."""
        given = {}
        for wanted in ("result_name", "time"):
            leaf = LEAF.match(self.text, self.skip_space(self.pos))
            if leaf and leaf[1] == wanted:
                given[wanted], self.pos = leaf[2], leaf.end()
        end = _next(self.message_ends, self.pos)
        if end is None:
            return _NO_END
        text = join_utf8(self.text[self.pos:end].strip()[:TEXT_MAX])
        self.pos = end + len(MESSAGE_END)
        result_name = line(given.get("result_name", ""))
        if result_name and len(self.request.messages) < MESSAGES_MAX:
            self.request.messages.append(
                ClientMessage(result_name, integer(given.get("time", "")), text))

    @cached_property
    def message_ends(self):
        """Where a trickle may end: before the next one, and the last end tag of all."""
        ends, last = [], self.last_message
        for match in re.finditer(MESSAGE_END, self.text):
            tag = NEXT_TAG.match(self.text, match.end())
            if match.start() == last or tag and tag.groups() == ("", "msg_from_host", "") and (
                    self.text.startswith("<result_name>", self.skip_space(tag.end()))):
                ends.append(match.start())
        return ends

    def skip_space(self, pos):
        return SPACE.match(self.text, pos).end()


def _next(positions, pos):
    """Return the first of the sorted positions from `pos` on, or None."""
    i = bisect.bisect_left(positions, pos)
    return positions[i] if i < len(positions) else None


def _file(given):
    """Make a ClientFile of what a file_info holds; None without a name."""
    name = line(given.get("name", ""))
    error_msg = join_utf8(given.get("error_msg", "").strip()[:VALUE_MAX])
    return ClientFile(
        name, integer(given.get("nbytes", "")), md5_of(given.get("md5_cksum", "")), error_msg,
        integer(given.get("status", ""))) if name else None


# ---- Uploads -----------------------------------------------------------------


def read_upload(head):
    """Read the header of a request to the upload handler [WIRE 10.1, 10.2].

    `head` is the beginning of the body, at least UPLOAD_HEADER_MAX bytes of it or all there are.
    Raises ClientError if that is no upload request, or not a whole header, or if a number is none.
    """
    text = head[:UPLOAD_HEADER_MAX].decode("latin-1")
    start = text.find("<data_server_request>")
    if start < 0:
        raise ClientError("this takes uploads of BOINC clients: no <data_server_request> found")
    query, upload = text.find("<get_file_size>", start), text.find("<file_upload>", start)
    if query >= 0 and (upload < 0 or query < upload):
        leaf = LEAF.match(text, query)
        return UploadRequest("query", _upload_name(leaf[2] if leaf else ""))
    end = text.find("<data>\n", upload)
    if upload < 0 or end < 0:
        raise ClientError(f"no whole header of an upload within {UPLOAD_HEADER_MAX} bytes")
    given = {}
    for leaf in LEAF.finditer(text, upload, end):
        given.setdefault(leaf[1], leaf[2])
    if "nbytes" not in given:
        raise ClientError("the header of an upload lacks nbytes")
    nbytes, offset, max_nbytes = (
        _upload_number(name, given.get(name, "0")) for name in ("nbytes", "offset", "max_nbytes"))
    return UploadRequest(
        "upload", _upload_name(given.get("name", "")), nbytes, md5_of(given.get("md5_cksum", "")),
        offset, max_nbytes, given.get("xml_signature", "").strip(), end + len("<data>\n"))


def _upload_name(text):
    name = line(text)
    if not name:
        raise ClientError("an upload request without a proper file name")
    return name


def _upload_number(name, text):
    text = text.strip()
    if not NUMBER.fullmatch(text) or not 0 <= float(text) < NUMBER_MAX:
        raise ClientError(f"{name} of an upload: not a number of bytes: {text[:40]!r}")
    return integer(text)


# ---- Preferences -------------------------------------------------------------

PREF = re.compile(r"[a-z_0-9]{1,40}")
PREF_VALUE = re.compile(r"[-0-9A-Za-z.+:/_ ]{1,64}")
PREF_TAG = re.compile(r'<(/?)([A-Za-z_0-9]{1,40})(?: name="([a-z]{1,10})")?(/?)>')
VENUES = ("home", "work", "school")
PREF_CONTAINERS = {None: ("venue", "day_prefs"), "venue": ("day_prefs",), "day_prefs": ()}
PREFS_NO_LEAF = ("global_preferences", "venue", "day_prefs")


def read_prefs(text):
    """Rebuild the content of `<global_preferences>` from what is harmless in it [WIRE 14].

    Plain elements, `day_prefs`, and the `venue`s home, work and school are kept, one element to a
    line, PREFS_MAX characters at most; all else is dropped. Returns "" if nothing is left. What
    this returns it reads as the same.
    """
    items, length = [], 0
    for item in _prefs(text, 0, "    ")[0]:
        length += len(item)
        if length > PREFS_MAX:
            break
        items.append(item)
    return "".join(items)


def _prefs(text, pos, indent, within=None):
    """Read elements up to the end tag of `within`: (their new texts, position after it or None).

    A container that is never closed, or stands where it cannot, ends all: what follows in the text
    could be its content.
    """
    items = []
    while (tag := PREF_TAG.search(text, pos)):
        closing, name, venue, empty = tag.groups()
        pos = tag.end()
        if closing:
            if name == within:
                return items, pos
        elif empty:
            items += _pref(indent, name, "1") if venue is None else []
        elif name in PREF_CONTAINERS:
            inner, pos = _prefs(text, pos, indent + "    ", name) if (
                name in PREF_CONTAINERS[within]) else ([], None)
            if pos is None:
                break
            if inner and (venue in VENUES if name == "venue" else venue is None):
                opening = f'{name} name="{venue}"' if name == "venue" else name
                items.append(f"{indent}<{opening}>\n{''.join(inner)}{indent}</{name}>\n")
        else:
            end = text.find(f"</{name}>", pos)
            if end < 0:
                break
            items += _pref(indent, name, text[pos:end].strip()) if venue is None else []
            pos = end + len(name) + 3
    return items, None


def _pref(indent, name, value):
    if name in PREFS_NO_LEAF or not PREF.fullmatch(name) or not PREF_VALUE.fullmatch(value):
        return []
    return [f"{indent}<{name}>{value}</{name}>\n"]


def prefs_mod_time(text):
    """Return the mod_time of preferences, s UTC; 0.0 if they have none."""
    match = re.search(r"<mod_time>([^<]{1,64})</mod_time>", text)
    return number(match[1]) if match else 0.0
