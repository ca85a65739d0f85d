"""The scheduler RPC: a BOINC client's request becomes a Request, its Reply becomes XML [WIRE 6 7].

All decisions are the core's; here is only what the two protocols say differently, and what BOINC
alone has: the signing key, preferences handed to a user's other computers, sticky files, and the
programs that a user has built (platform "anonymous").
"""

import gzip
import hashlib
import html
import re
import zlib
from dataclasses import dataclass, field

import bottle
from peewee import BigIntegerField, CharField, ForeignKeyField, TextField

from minigrid import (AppVersion, ClientError, Record, Report, Request, SharedFile, StoreError,
                      User, apps, base_url, plugged, prepared, project, remember, say_to, schedule,
                      setting)

from . import reader, stats

REQUEST_BYTES_MAX = 16 << 20  # a thousand reports with 64 KB of stderr would be more; sent in turn
GZIP_FROM = 1 << 14  # bytes of a reply that are worth compressing: not the usual job or two
REFUSED_DELAY = 86400  # s: what only a person can mend
DOWN_DELAY = 3600  # s
MESSAGE_BYTES, NAME_BYTES = 1023, 255  # the client drops longer ones silently [WIRE 3.2]
TEXT_BYTES, TRICKLE_BYTES = 4096, 1 << 18
NAMES_AT_ONCE = 500  # in one query; old SQLites take 999
TITLE_MAX = 40  # characters of an application's title; BOINC Manager has a column for it
API_VERSION = "7.20.5"  # from 6.0 on, jobs and client talk through a file in the slot [WIRE 11.4]
COMMON_PLATFORMS = (
    "x86_64-pc-linux-gnu", "i686-pc-linux-gnu", "aarch64-unknown-linux-gnu",
    "arm-unknown-linux-gnueabihf", "windows_x86_64", "windows_intelx86", "x86_64-apple-darwin",
    "arm64-apple-darwin", "x86_64-pc-freebsd__64")


@dataclass(frozen=True)
class Settings:
    """The section [boinc] of setup.cfg."""

    report_immediately: bool = setting(True, "clients report at once, not within the hour")
    anonymous_platform: bool = setting(True, "users may bring programs they have built themselves")
    min_client_version: str = setting("", "older clients get no work, for example 7.6")
    statistics: bool = setting(True, "write stats/ for statistics sites once a day")


class BoincUser(Record):
    """What BOINC clients keep with a user: preferences, and who this is at other projects."""

    user = ForeignKeyField(User, primary_key=True)
    cross_project_id = CharField()
    global_prefs = TextField(default="")  # checked XML, the inside of <global_preferences>
    prefs_time = BigIntegerField(default=0)  # its mod_time


TABLES = (BoincUser,)
boinc_user_of = prepared(lambda user_id: BoincUser.select().where(BoincUser.user == user_id))
settings = Settings()
keys = None  # the Keys that BOINC clients know, of the open project
unsigned_told = set()  # ids of the versions that the operator was told of


def routes(app, clock):
    """Add the scheduler's address."""
    unsigned_told.clear()

    @app.route("/boinc/scheduler", method=["POST", "GET"])
    def _():
        bottle.response.content_type = "text/xml; charset=utf-8"
        return packed(answer(body_of(bottle.request), clock(), base_url()))


def body_of(request):
    """Return the body of a request, unpacked if need be. Raises ClientError if it is too long."""
    if request.content_length > REQUEST_BYTES_MAX:
        raise ClientError(f"too long: at most {REQUEST_BYTES_MAX} bytes are read here", 413)
    data = request.body.read(REQUEST_BYTES_MAX)
    if header(request, "Content-Encoding").strip().lower() != "gzip":
        return data
    try:
        unpacker = zlib.decompressobj(31)
        data = unpacker.decompress(data, REQUEST_BYTES_MAX)
    except zlib.error:
        raise ClientError("the request says it is gzip, but it is not") from None
    if unpacker.unconsumed_tail:
        raise ClientError(f"too long: at most {REQUEST_BYTES_MAX} bytes are read here", 413)
    return data


def header(request, name):
    """Return a header; empty if there is none, or if it is no text."""
    try:
        return request.get_header(name, "")
    except UnicodeError:
        return ""


def packed(text):
    """Return a reply as bytes, compressed if it is long and the client takes it."""
    data = text.encode("utf-8", "replace")
    accepted = header(bottle.request, "Accept-Encoding")
    if len(data) < GZIP_FROM or not re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", accepted):
        return data
    bottle.response.set_header("Content-Encoding", "gzip")
    bottle.response.set_header("Vary", "Accept-Encoding")
    return gzip.compress(data, 1)


# ---- Requests ----------------------------------------------------------------


def answer(body, now, base):
    """Answer one scheduler request; return the XML.

    `base` is the server's address as this client knows it. Never raises for what a client sent: a
    client understands nothing but a reply.
    """
    try:
        sent = reader.read_request(body)
    except ClientError as error:
        return refusal(f"this is no scheduler request: {error}", base)
    if not sent.complete:  # Half a request may have lost half its reports: nothing is taken.
        return refusal("the request was cut off on its way", base)
    down = [text for stopped in plugged("stopped") if (text := stopped(now))]
    if down:
        return refusal(down[0], base, DOWN_DELAY, down=True)
    if settings.min_client_version and sent.client_numbers < numbers(settings.min_client_version):
        return refusal(f"this project needs BOINC {settings.min_client_version} or later; you have "
                       f"{sent.client_version}", base, REFUSED_DELAY, "notice")
    request = translate(sent)
    request.more = Extras(sent, now)  # It may make signatures, for which the writer has no time.
    try:
        reply = project.write(lambda: serve(request, now))
    except StoreError as error:
        reply = plugged("acknowledge_only")[-1](request, now, error)
        request.more = Extras(sent, now, tell_key=False)
    return write_reply(request, reply, base)


def numbers(text):
    """Read a version such as 7.20.5 as numbers that compare."""
    return tuple(map(int, re.findall(r"[0-9]{1,9}", text)))


@dataclass
class Extras:
    """What passes the core unseen, from a request to its reply."""

    sent: object  # reader.ClientRequest
    now: int
    tell_key: bool = True
    user: object = None
    host: object = None
    boinc_user: object = None
    prefs: str = ""  # preferences that are newer than the client's
    delete_files: list = ()  # sticky files that nobody needs any more
    key_status: str = "current"
    key: str = ""  # for the client to take over ...
    key_signature: str = ""  # ... signed with the one it has
    signatures: dict = field(default_factory=dict)  # MD5 of a file -> signature

    def __post_init__(self):
        if not self.tell_key:
            return
        with keys.steady():
            self.key_status, self.key, self.key_signature = keys.answer(self.sent.code_sign_key)
            for application in list(apps.values()):
                for version in application.versions:
                    self.sign(version)

    def sign(self, version):
        """Find the signatures of a version's files, once for all that this request will ask."""
        for file in version.files:
            if "md5" in file and file["md5"] not in self.signatures:
                self.signatures[file["md5"]] = keys.signature(file["md5"], file["name"])

    def why_not(self, version):
        """Say why this client cannot have a version; empty if it can. Asked by dispatch policies.

        It would refuse files that are not signed [WIRE 8.2]. The operator is told once.
        """
        if version.platform == "anonymous":
            return ""
        self.sign(version)  # One of former days, whose result was lost.
        if all(self.signatures.get(file.get("md5")) for file in version.files):
            return "" if main_file(version.files) else "its program lacks a main file"
        if version.id not in unsigned_told:
            unsigned_told.add(version.id)
            remember(self.now, f"{version.app.name} version {version.version_num} for "
                               f"{version.platform} is not signed: BOINC clients do not get it; "
                               f"run 'minigrid sign' where the private key is")
        return "its program is not signed yet; the people of this project have been told"


def serve(request, now):
    """Hand a complete request to the core; return the Reply. Runs in the writer."""
    extras = request.more
    if extras.key_status in ("old", "unknown"):  # It could not check our files: no work this time.
        request.work_req_seconds, request.other_results = 0, None
    if "anonymous" in extras.sent.platforms:
        request.versions = own_versions(extras.sent, now)
    reply = schedule(request, now)
    if request.versions == {} and request.work_req_seconds > 0:
        say_to(reply, "your app_info.xml has no program for an application of this project"
               if settings.anonymous_platform else
               "this project gives no work to programs that users bring along")
    if extras.key_status == "unknown":
        say_to(reply, "your client holds another signing key for this address, and would take no "
                      "work from here: remove the project and add it again", "notice")
    return reply


def translate(sent):
    """Make the core's Request of a client's [WIRE 6, 7.5]."""
    ncpus = whole(sent.host_info.get("p_ncpus"), 1, 4096)
    first = sent.hostid == 0 and sent.work_req_seconds == 1  # one job for each processor, please
    modern = sent.client_numbers >= (6, 7)  # tells apart what it wants for processors and GPUs
    seconds = sent.cpu_req_secs if modern else sent.work_req_seconds
    if sent.cpu_req_instances > 0:
        seconds = max(seconds, 1)
    return Request(
        authenticator=sent.authenticator, hostid=sent.hostid, rpc_seqno=sent.rpc_seqno,
        host_cpid=sent.host_info.get("host_cpid", "")[:64],
        allow_multiple_clients=sent.allow_multiple_clients, host=describe(sent, ncpus),
        platforms=platforms_of(sent), client_version=sent.client_version,
        work_req_seconds=0 if sent.dont_send_work else seconds,
        cpu_req_instances=ncpus if first else sent.cpu_req_instances,
        estimated_delay=max(sent.estimated_delay, 0),
        reports=[Report(name=r.name, client_state=r.state, exit_status=r.exit_status,
                        cpu_time=r.final_cpu_time, elapsed_time=r.final_elapsed_time,
                        peak_memory=r.peak_memory, stderr_out=r.stderr_out)
                 for r in sent.results],
        other_results=sent.other_results,
        trickles=[{"result": m.result_name, "time": m.time, "text": trickle_text(m.text)}
                  for m in sorted(sent.messages, key=lambda m: m.time)])  # as they lie in a folder


def platforms_of(sent):
    """Return the platforms of a client, and Python's where our start program can run."""
    known = list(sent.platforms)
    if known and "anonymous" not in known and "android" not in known[0]:
        known.append("python")
    return known


def describe(sent, ncpus):
    """Return the columns of Host that a request fills [WIRE 6.1]."""
    info, stats = sent.host_info, sent.time_stats
    texts = {name: info.get(name, "")[:200] for name in (
        "domain_name", "p_vendor", "p_model", "os_name", "os_version")}
    sizes = {name: amount(info.get(name)) for name in ("m_nbytes", "d_free", "d_total")}
    share = sent.disk_usage.get("d_project_share", 0)
    if 0 < share < sizes["d_free"]:
        sizes["d_free"] = share  # What its user lets us have of it.
    fractions = {name: stats[name] for name in ("on_frac", "active_frac")
                 if 0 <= stats.get(name, -1) <= 1}
    details = {name: info[name][:4096] for name in (
        "p_features", "product_name", "virtualbox_version") if info.get(name)}
    details.update({name: amount(info[name]) for name in (
        "p_iops", "p_membw", "m_swap", "m_cache") if name in info})
    details.update({f"n_{name}": max(sent.net_stats[name], 0.0) for name in (
        "bwup", "bwdown") if name in sent.net_stats})
    if re.fullmatch(r"-?[0-9]{1,5}", info.get("timezone", "")):
        details["timezone"] = int(info["timezone"])  # s east of UTC
    return {**texts, **sizes, **fractions, "p_ncpus": ncpus, "details": details,
            "p_fpops": amount(info.get("p_fpops")) or 1e9}


def amount(text):
    """Read a number that cannot be negative; 0 for anything else."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return 0.0
    return value if 0 <= value < 1e30 else 0.0


def whole(text, low, high):
    """Read a whole number between two bounds."""
    return int(min(max(amount(text), low), high))


def trickle_text(body):
    """Return the text of a trickle-up message, without the XML that usually wraps it."""
    match = re.search(r"<text>\n?(.*)</text>", body, re.S)
    return html.unescape(match[1].removesuffix("\n")) if match else body.strip()


def own_versions(sent, now):
    """Return the versions of a client with programs of its own: {app id: [AppVersion]}.

    One row for each application, whatever the programs are: it is the user's business which one
    runs. Runs in the writer.
    """
    found = {}
    for own in sent.app_versions if settings.anonymous_platform else ():
        application = apps.get(own["app_name"])
        if application and application.id not in found:
            version, _ = AppVersion.get_or_create(
                app=application.id, platform="anonymous", version_num=0, plan_class="",
                defaults={"create_time": now, "files": []})
            found[application.id] = [version]
    return found


def at_contact(request, reply, user, host, now):
    """Look after preferences and sticky files at each request. Runs in the writer."""
    extras = request.more
    if not isinstance(extras, Extras):
        return  # Another protocol's.
    sent, extras.user, extras.host = extras.sent, user, host
    row = extras.boinc_user = boinc_user(user)
    if re.fullmatch(r"[0-9a-f]{32}", sent.cross_project_id) \
            and sent.cross_project_id != row.cross_project_id:
        row.cross_project_id = sent.cross_project_id  # The oldest of all its projects'.
    ours = sent.prefs_email_hash in ("", email_hash(user))
    if sent.prefs and sent.prefs_time > row.prefs_time and ours:
        row.global_prefs = reader.read_prefs(sent.prefs)
        row.prefs_time = min(int(sent.prefs_time), now)
    elif row.prefs_time > sent.prefs_time:
        extras.prefs = row.global_prefs
    if row.dirty_fields:
        row.save()
    extras.delete_files = unneeded(sorted({file.name for file in sent.sticky_files}))


def unneeded(names):
    """Return which of these sticky files no workunit needs any more."""
    needed = set()
    for start in range(0, len(names), NAMES_AT_ONCE):
        needed.update(name for name, in SharedFile.select(SharedFile.name).distinct().where(
            SharedFile.name.in_(names[start:start + NAMES_AT_ONCE])).tuples())
    return [name for name in names if name not in needed]


def boinc_user(user):
    """Return a user's row of BOINC's own, made at the first contact. Runs in the writer."""
    row = boinc_user_of.first(user.id)
    if row is None:
        number = f"{project.rng.getrandbits(128):032x}"
        row = BoincUser.create(user=user, cross_project_id=number)
    return row


def email_hash(user):
    """Return by which clients know the same person at another project; empty for nicknames."""
    return hashlib.md5(user.email_addr.encode()).hexdigest() if user.email_addr else ""


def cpid_of(user):
    """Return a user's public cross-project ID, as statistics sites use it; empty if unknown."""
    row = BoincUser.get_or_none(user=user)
    return external_cpid(row, user) if row else ""


def external_cpid(row, user):
    """Return a hash that names a person across projects and tells nothing about them."""
    return hashlib.md5((row.cross_project_id + (user.email_addr or "")).encode()).hexdigest()


def boinc_platforms():
    """Return the names of the platforms that get work here."""
    known = {v.platform for a in apps.values() for v in a.versions}
    if "python" in known:
        known = (known - {"python"}) | set(COMMON_PLATFORMS)
    return sorted(known)


# ---- Replies -----------------------------------------------------------------

PLAIN = re.compile(r"[ !-%'-;=?-~]*")  # what needs no escape
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


GUI_URLS = "<gui_urls>\n%s\n</gui_urls>" % "\n".join(  # what BOINC Manager offers by the project
    f"<gui_url>\n<name>{name}</name>\n<description>{about}</description>\n"
    f"<url>{{base}}{path}</url>\n</gui_url>" for name, about, path in (
        ("Project", "How the whole project is doing", "/"),
        ("Your account", "Credit and computers of yours", "/show_user.php?userid={userid}"),
        ("Your tasks", "What your computers did and are doing", "/results.php?userid={userid}"),
        ("This computer", "What this computer did, and why it gets work or not",
         "/show_host_detail.php?hostid={hostid}")))


def head(base):
    """Return how every reply begins; its master_url if we know it.

    A project with several addresses has no one to tell: a client that joined at another would warn
    its user with every reply [WIRE 4].
    """
    lines = ["<scheduler_reply>", "<scheduler_version>722</scheduler_version>", "<dont_use_dcf/>"]
    several = any(len(addresses(base)) > 1 for addresses in plugged("all_addresses"))
    return lines + [element("master_url", f"{base}/")] * (bool(base) and not several)


def refusal(text, base, delay=0, priority="low", down=False):
    """Return a reply that holds nothing but a message."""
    lines = [*head(base), message(priority, text),
             element("project_name", project.settings.name, NAME_BYTES)]
    if delay:
        lines.append(element("request_delay", delay))
    if down:  # Also throws away acknowledgements: there are none.
        lines.append("<project_is_down/>")
    return "\n".join([*lines, "</scheduler_reply>\n"])


def element(name, value, nbytes=TEXT_BYTES):
    """Write one element; numbers plain, texts escaped and cut to what the client has room for."""
    if isinstance(value, float):
        return f"<{name}>{value:.6f}</{name}>"
    if type(value) is int:
        return f"<{name}>{value}</{name}>"
    return f"<{name}>{escaped(str(value), nbytes)}</{name}>"


def escaped(text, nbytes):
    """Escape a text and cut it to so many bytes, not in the middle of a character or an entity.

    Control characters become spaces: a zero would end the reply [WIRE 3.2].
    """
    if PLAIN.fullmatch(text) and len(text) <= nbytes:
        return text  # as nearly always
    text = html.escape(CONTROL.sub(" ", text), quote=False)
    data = text.encode("utf-8", "replace")
    if len(data) > nbytes:
        text = re.sub(r"&[a-z]*\Z", "", data[:nbytes].decode("utf-8", "ignore"))
    return text


def message(priority, text):
    """Write a message; `notice` is shown to the user, `low` goes to the log."""
    return f'<message priority="{priority}">{escaped(text, MESSAGE_BYTES)}</message>'


def write_reply(request, reply, base):
    """Write a Reply as the client reads it [WIRE 7.2]."""
    extras = request.more
    lines = [*head(base), element("request_delay", float(reply.request_delay))]
    lines += [message(told["priority"], told["text"]) for told in reply.messages]
    lines.append(element("project_name", project.settings.name, NAME_BYTES))
    if extras.user:
        lines += about_user(extras, reply, request.hostid, base)
    if extras.key:
        lines.append(f"<code_sign_key>\n{extras.key.strip()}\n</code_sign_key>")
    if extras.key_signature:
        lines.append(f"<code_sign_key_signature>\n{extras.key_signature.strip()}\n"
                     f"</code_sign_key_signature>")
    lines += write_assignments(request, reply.assignments, base)
    for name in reply.acks:
        lines.append(f"<result_ack>\n{element('name', name)}\n</result_ack>")
    for name in reply.aborts:
        lines.append(f"<result_abort>\n{element('name', name)}\n</result_abort>")
    for name in reply.aborts_if_not_started:
        lines.append(f"<result_abort_if_not_started>\n{element('name', name)}\n"
                     f"</result_abort_if_not_started>")
    lines += [element("delete_file_info", name) for name in extras.delete_files]
    if reply.trickles_taken:
        lines.append("<message_ack/>")
    lines += write_trickles(reply.trickles)
    return "\n".join([*lines, "</scheduler_reply>\n"])


def about_user(extras, reply, hostid, base):
    """Write what the client shows of user and host, and keeps [WIRE 7.2 #8-#18]."""
    user, host, row = extras.user, extras.host, extras.boinc_user
    lines = [element("userid", user.id), element("user_name", user.name, NAME_BYTES),
             element("user_total_credit", float(user.total_credit)),
             element("user_expavg_credit", float(stats.recent_credit(user, extras.now))),
             element("user_create_time", user.create_time)]
    if user.email_addr:
        lines.append(element("email_hash", email_hash(user)))
    lines += [element("cross_project_id", row.cross_project_id),
              element("external_cpid", external_cpid(row, user))]
    if host.id != hostid:  # Sent again, it would make the client rename itself [WIRE 17].
        lines.append(element("hostid", host.id))
    lines += [element("host_total_credit", float(host.total_credit)),
              element("host_expavg_credit", float(stats.recent_credit(host, extras.now))),
              element("host_create_time", host.create_time)]
    if extras.prefs:
        lines.append(f"<global_preferences>\n{extras.prefs.strip()}\n</global_preferences>")
    return [*lines, GUI_URLS.format(base=base, userid=user.id, hostid=host.id)]


def write_trickles(trickles):
    """Write messages for running jobs, line by line as the client reads them [WIRE 13]."""
    lines = []
    for told in trickles:
        lines += ["<trickle_down>", element("result_name", told["result"]),
                  element("time", told["time"]),  # becomes a file name in the job's directory
                  "<text>", escaped(told["text"], TRICKLE_BYTES), "</text>", "</trickle_down>"]
    return lines


# ---- Jobs --------------------------------------------------------------------


def write_assignments(request, assignments, base):
    """Write applications, files, versions, workunits and results, each once [WIRE 7.4]."""
    lines, written = [], set()

    def first(kind, name):
        """Say whether this is the first of its kind and name, and note it."""
        new = (kind, name) not in written
        written.add((kind, name))
        return new

    platform = request.platforms[0] if request.platforms else ""
    signatures = request.more.signatures
    for a in assignments:
        anonymous = a.platform == "anonymous"
        target = platform if a.platform == "python" else a.platform
        system = "windows" if target.startswith("windows") else "unix"
        files = [f for f in a.files if f.get("boinc", system) in (system, "both")]
        if first("app", a.app):
            title = a.about if 0 < len(a.about) <= TITLE_MAX else a.app
            lines.append(f"<app>\n{element('name', a.app)}\n"
                         f"{element('user_friendly_name', title)}\n</app>")
        if first("version", a.app_version) and not anonymous:
            lines += [write_file(f, base, signatures[f["md5"]]) for f in files
                      if first("file", f["name"])]
            lines += write_version(a, files, platform)
        lines += [write_file(f, base) for f in (a.input, *a.inputs) if first("file", f["name"])]
        if first("workunit", a.workunit):
            lines += write_workunit(a, files, anonymous)
        lines += write_result(a, request, platform, base)
    return lines


def write_file(f, base, signature=""):
    """Write a file to download; files of applications are signed, others have a sum."""
    lines = ["<file_info>", element("name", f["name"]), element("url", base + f["url"]),
             element("nbytes", f["nbytes"])]
    if "md5" in f:  # Rows of older stores have none: unchecked, then.
        lines.append(element("md5_cksum", f["md5"]))
    if f.get("executable") or f.get("boinc") in ("unix", "windows"):
        lines.append("<executable/>")
    if f.get("sticky"):
        lines.append("<sticky/>")
    if signature:
        lines.append(f"<file_signature>\n{signature}\n</file_signature>")
    return "\n".join([*lines, "</file_info>"])


def is_start(f):
    """Say whether a file is the one that BOINC clients start for programs that do not know them."""
    return f.get("boinc") in ("unix", "windows")


def main_file(files):
    """Return the file that a client starts: our start program if it is there; None if nothing."""
    return next((f for f in files if is_start(f)), None) or next(
        (f for f in files if f.get("main")), None)


def open_name(a, f):
    """Return the name by which a job finds a file of its version."""
    if a.platform == "python" and f.get("main"):
        return "app.py"
    return f.get("open_name") or f["name"]


def write_version(a, files, platform):
    """Write an application version: what is started, and the files beside it."""
    main = main_file(files)
    lines = ["<app_version>", element("app_name", a.app),
             element("version_num", 100 * a.version_num),
             element("platform", platform if a.platform == "python" else a.platform)]
    if a.plan_class:
        lines.append(element("plan_class", a.plan_class))
    lines += [element("avg_ncpus", float(a.ncpus)), element("flops", float(a.flops)),
              element("api_version", API_VERSION)]
    for f in files:
        lines.append("<file_ref>")
        lines.append(element("file_name", f["name"]))
        if f is main:
            lines.append("<main_program/>")
        if f is not main or f.get("boinc") == "windows":
            # Links would be files that only BOINC's own library understands [WIRE 11.3]; and a
            # batch file is looked for in the job's directory, by the first part of its path.
            lines += [element("open_name", open_name(a, f)), "<copy_file/>"]
        lines.append("</file_ref>")
    return [*lines, "</app_version>"]


def write_workunit(a, files, anonymous):
    """Write a workunit: limits, arguments, inputs."""
    lines = ["<workunit>", element("name", a.workunit), element("app_name", a.app)]
    # A limit below 120 s becomes one of 12 hours there [WIRE 7.4]: nobody shall wait so long.
    bound = max(a.rsc_fpops_bound, 121 * a.flops)
    lines += [element("rsc_fpops_est", float(a.rsc_fpops_est)),
              element("rsc_fpops_bound", float(bound)),
              element("rsc_memory_bound", float(a.rsc_memory_bound)),
              element("rsc_disk_bound", float(a.rsc_disk_bound))]
    command = a.command_line
    if not anonymous and any(map(is_start, files)):
        main = open_name(a, next(f for f in files if f.get("main")))
        command = f"{'python' if a.platform == 'python' else 'native'} {main} {command}".strip()
    lines.append(element("command_line", command))
    for f in (a.input, *a.inputs):
        lines += ["<file_ref>", element("file_name", f["name"]),
                  element("open_name", f.get("open_name", "in")), "<copy_file/>", "</file_ref>"]
    return [*lines, "</workunit>"]


def write_result(a, request, platform, base):
    """Write a result with the file it shall upload."""
    name, nbytes = a.output["name"], a.output["nbytes_max"]
    version, plan_class = 100 * a.version_num, a.plan_class
    shown = platform if a.platform == "python" else a.platform
    if a.platform == "anonymous":
        own = max((v for v in request.more.sent.app_versions if v["app_name"] == a.app),
                  key=lambda v: (v["flops"], v["version_num"]))  # The fastest, it thinks.
        shown, plan_class = own["platform"], own["plan_class"]
        version = whole(own["version_num"], 0, 2**31 - 1)
    lines = ["<file_info>", element("name", name), "<generated_locally/>",
             element("max_nbytes", nbytes),
             element("upload_url", f"{base}/boinc/upload/{name}/file_upload_handler"),
             f"<xml_signature>\n{keys.certificate(name, nbytes)}\n</xml_signature>",
             "</file_info>",
             "<result>", element("name", a.name), element("wu_name", a.workunit),
             element("report_deadline", a.report_deadline), element("platform", shown),
             element("version_num", version), element("plan_class", plan_class)]
    if settings.report_immediately:
        lines.append("<report_immediately/>")
    return [*lines, "<file_ref>", element("file_name", name), element("open_name", "out"),
            "<copy_file/>", "</file_ref>", "</result>"]
