"""minigrid's own protocol: JSON over HTTP.

`POST /scheduler` is the dataclasses of the core as they are; the README documents them field by
field. What is downloaded and uploaded is the business of files.py.
"""

import dataclasses
import hashlib
import ipaddress
import json
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import bottle
from peewee import FloatField, IntegerField

import minigrid
from minigrid import (ClientError, Report, Request, Result, ServerState, StoreError, base_url,
                      plugged, project, schedule, setting)

REQUEST_BYTES_MAX = 16 << 20  # a thousand reports with their stderr
NAMES_MAX = 10_000  # results in one request
TEXT_MAX = 1 << 16
TRICKLES_MAX = 200
PAUSE_DELAY = 600  # s
OURS = ("versions", "more")  # fields of a Request that no client may fill
ADDRESSES_MAX, ADDRESS_CHARS_MAX = 8, 150  # BOINC's clients cut lines of the page at 255 [WIRE 4]


@dataclass(frozen=True)
class ApiSettings:
    """The [api] section of setup.cfg."""

    addresses: str = setting("", "where else the project is reached, or will be: http://host:port "
                                 "..., with blanks between")


def at_once(request):
    """Say whether a request has no need of a thread of its own."""
    return request.path == "/scheduler"


def routes(app, clock):
    """Read the settings, and add the routes of the JSON protocol. Raises ClientError."""
    global own_addresses
    own_addresses = check_addresses(
        minigrid.read_settings("setup.cfg", ApiSettings, "api").addresses)

    @app.post("/register")
    def _():
        given = read_json(4096)
        unknown = set(given) - {"nickname", "email_addr", "password", "invitation"}
        if unknown:
            raise ClientError(f"unknown: {', '.join(sorted(unknown))[:200]}; "
                              f"known are nickname, email_addr, password, invitation")
        caller = bottle.request.environ.get("REMOTE_ADDR", "")
        user = plugged("register")[-1](clock(), **given, caller=caller)
        return {"authenticator": user.authenticator, "userid": user.id, "name": user.name}

    @app.post("/scheduler")
    def _():
        given, now = read_json(REQUEST_BYTES_MAX), clock()
        request = parse_request(given)
        if "signing_key" in given:  # It runs signed files only; others may, as before [D11].
            plugged("signing")[-1](request, given["signing_key"], now)
        base = base_url()
        reply = written(serve(request, now), base)
        if request.more:
            request.more.write(reply)
        return {**reply, "addresses": all_addresses(base)}

    @app.get("/volunteer.py")
    def _():
        return send_volunteer(bottle.request)


def send_volunteer(request):
    """Send the volunteer's client, or say that who asks has this one already.

    Its SHA-256 is told beside it, so that people can compare; it is looked at for each request, so
    that a new one is given out without a new start of the server.
    """
    text = (Path(__file__).resolve().parent / "volunteer.py").read_bytes()
    sha256 = hashlib.sha256(text).hexdigest()
    headers = {"ETag": f'"{sha256}"', "X-Sha256": sha256, "Cache-Control": "no-cache",
               "X-Content-Type-Options": "nosniff"}
    known = request.environ.get("HTTP_IF_NONE_MATCH", "")  # some with W/: packed on the way
    if sha256 in re.findall(r'"([^"]*)"', known) or known.strip() == "*":
        return bottle.HTTPResponse(status=304, headers=headers)
    headers["Content-Type"] = "text/x-python; charset=utf-8"
    return bottle.HTTPResponse(text, headers=headers)


# ---- Addresses ---------------------------------------------------------------


def all_addresses(seen):
    """Return where clients may look for this project: as this one does just now, and the others.

    A project that moves names its new place before it goes: whoever asks until then knows both
    [S1-05 S1-22 D5, boinc#5946].
    """
    return list(dict.fromkeys(filter(None, (seen, *own_addresses))))


def check_addresses(text):
    """Return the addresses that a project gives itself, in their order. Raises ClientError."""
    found = list(dict.fromkeys(address.rstrip("/") for address in text.split()))
    for address in found:
        if not is_address(address):
            raise ClientError(f"setup.cfg: setting 'addresses' of [api] must be addresses such as "
                              f"http://192.168.1.5:8080 or https://grid.example.org, without a "
                              f"path, with blanks between; found '{address[:200]}'")
    if len(found) > ADDRESSES_MAX:
        raise ClientError(f"setup.cfg: setting 'addresses' of [api] must be at most "
                          f"{ADDRESSES_MAX} addresses; found {len(found)}")
    return found


def is_address(text):
    """Say whether a text is scheme, host and perhaps port of a server, and nothing more."""
    match = re.fullmatch(r"https?://([\w-]+(?:\.[\w-]+)*|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?", text, re.A)
    if not match or len(text) > ADDRESS_CHARS_MAX:
        return False
    try:
        if match[1].startswith("["):  # urlsplit() of older Pythons takes anything there.
            ipaddress.IPv6Address(match[1][1:-1])
        return urllib.parse.urlsplit(text).port != 0  # ValueError if it is above 65535
    except ValueError:
        return False


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
    request = build(Request, {k: v for k, v in given.items() if k not in OURS})
    request.host = build_host(given.get("host") or {})
    request.trickles = build_trickles(given.get("trickles") or [])
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
        if name in given and name != "details":
            if isinstance(column, (FloatField, IntegerField)):
                values[name] = max(number(name, given[name], float), 0)
            elif not is_text(given[name], 4096):
                raise ClientError(f"host.{name} must be a text")
            else:
                values[name] = given[name][:200]
    features = given.get("p_features", "")
    if not is_text(features, 4096):
        raise ClientError("host.p_features must be a text")
    if features:  # which plan classes ask for
        values["details"] = {"p_features": features}
    if "p_ncpus" in values:
        values["p_ncpus"] = int(min(max(values["p_ncpus"], 1), 4096))
    return values


def build_trickles(given):
    """Check the messages of running jobs: [{result, time, text}]."""
    def is_trickle(t):
        return isinstance(t, dict) and is_text(t.get("result"), 256) \
            and is_text(t.get("text"), TEXT_MAX)

    if not isinstance(given, list) or len(given) > TRICKLES_MAX or not all(map(is_trickle, given)):
        raise ClientError(f"trickles must be a list of at most {TRICKLES_MAX} objects with result, "
                          f"time and text")
    return [{"result": t["result"], "time": number("time", t.get("time", 0), float),
             "text": t["text"]} for t in given]


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


def serve(request, now):
    """Hand a request to the core; return the reply, also while the project cannot serve it."""
    down = [text for stopped in plugged("stopped") if (text := stopped(now))]
    if down:  # Nothing is acknowledged, so nothing is lost.
        reply = minigrid.Reply(hostid=request.hostid, project_name=project.settings.name,
                               server_time=now, request_delay=PAUSE_DELAY)
        return minigrid.say_to(reply, down[0], "notice")
    try:
        return project.write(lambda: schedule(request, now))
    except StoreError as error:
        return acknowledge_only(request, now, error)


def written(reply, base):
    """Return a reply as a dict, the address by which the client came before every path [D5]."""
    # No dataclasses.asdict(): it copies every text and number, at half the cost of the request.
    def whole(file):
        return {**file, "url": base + file["url"]}

    return {**vars(reply), "assignments": [{
        **vars(a), "files": [whole(file) for file in a.files if "boinc" not in file],
        "input": whole(a.input), "inputs": list(map(whole, a.inputs)), "output": whole(a.output),
    } for a in reply.assignments]}


def acknowledge_only(request, now, error):
    """Answer while the store takes no change: only what is recorded already is acknowledged."""
    names = [report.name for report in request.reports]
    user = plugged("user_of_key")[-1](request.authenticator)
    over = Result.select(Result.name).where(
        Result.name.in_(names), Result.server_state == ServerState.OVER,
        Result.received_time > 0, Result.user == user) if user else []
    reply = minigrid.Reply(hostid=request.hostid, server_time=now, request_delay=60,
                           acks=[r.name for r in over])
    return minigrid.say_to(reply, f"the project has a problem on its side ({error}); "
                                  f"keep your results and try again later", "notice")


own_addresses = []  # of setup.cfg, in their order
