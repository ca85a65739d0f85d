"""What a person looks at: the front page, which refreshes itself, and the same as JSON.

The page is filled twice from one report: here, for the first look and for browsers without
JavaScript, and by its own script from /status.json. What is said in words is worded here, once.
"""

import functools
import html
import itertools
import os
import re
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import bottle
from peewee import DatabaseError, fn

import minigrid
from minigrid import (ALL, DUE, GENERATOR, IN_PROGRESS, TO_ASSIMILATE, TO_VALIDATE, UNSENT, App,
                      ClientError, Firing, Host, Result, ServerState, User, Workunit, apps,
                      base_url, db, plugged, project, setting)

HERE = Path(__file__).resolve().parent
ACTIVE_SECONDS = 600  # a host is active if it was heard of in the last ten minutes
LAG_SECONDS = 60  # a server that far behind has a problem
HOSTS_SHOWN = 50  # those heard of last
FILES_LISTED = 200  # a directory with more is not searched: each request would pay for it
SHOWN = {  # suffixes of the result files that pages link to; not left to the system's own table
    ".png": "image/png", ".csv": "text/csv; charset=utf-8", ".txt": "text/plain; charset=utf-8",
    ".jsonl": "text/plain; charset=utf-8",
}
ADDRESS = re.compile(r"[^@\s]@[^@\s]+\.[^@\s]")  # of e-mail
CREATION = {  # who may make an account -> what to do in BOINC Manager's window
    "open": "choose an e-mail address and a password: that makes your account",
    "invitation": "sign in with your account; a new one needs an invitation",
    "closed": "sign in with your account; new ones are not made just now",
}
NEEDS = {  # the same -> what the line for a terminal needs besides Python
    "open": "nothing else: no account, no installation",
    "invitation": "an invitation code: write --invitation CODE behind the line, or --email and "
                  "--password of an account",
    "closed": "an account: write --email and --password behind the line",
}
SYSTEMS = {"Windows NT": "windows", "Macintosh": "macos", " Linux ": "linux"}  # in User-Agent
SCHEDULER_BYTES_MAX = 200  # BOINC's client cuts the lines of this page at 255 bytes [WIRE 4]
REFRESH = '<noscript><meta http-equiv="refresh" content="5"></noscript>\n'
ALLOW = {"img-src": "'self' data:", "connect-src": "'self'", "form-action": "'self'",
         "frame-ancestors": "*"}  # a wall of screens may show it in a frame
COUNTS = ("made", "open", "unsent", "in_progress", "to_validate", "to_assimilate", "done", "failed",
          "valid", "invalid", "errors", "no_reply", "too_late")


@dataclass(frozen=True)
class StatusSettings:
    """The [status] section of setup.cfg."""

    public_results: bool = setting(True, "all may read data/results; no: a cheat could look up "
                                         "there what a spot check wants to hear")


settings = StatusSettings()


# ---- The report ----------------------------------------------------------------


def status(now):
    """Return how the project is doing, as JSON values.

    The cost does not grow with what was done: what waits is counted in partial indexes, what is
    over was counted when its rule fired.
    """
    report, store = read_store(now)
    report = {
        "name": project.settings.name, "version": minigrid.__version__, "server_time": now,
        **report, "files": result_files(), "paused": paused(now),
        "troubles": [{"time": at, "ago": ago(now - at), "text": text}
                     for at, text in reversed(project.errors)],
        "store": store, "counts": dict(project.counts),
    }
    word, text = state(report)
    return {**report, "state": {"word": word, "text": text}, "problems": problems(report)}


def read_store(now):
    """Return what the store knows, and how it is: "fine", or what is wrong with it.

    One read transaction, so that the counts are of one moment; it keeps no writer waiting.
    """
    try:
        with db.atomic("DEFERRED"):
            rows = [app_status(app, now) for app in App.select().order_by(App.name)]
            hosts, behind = host_status(now), lag(now)
        store = project.write.trouble or "fine"
    except DatabaseError as error:  # Damaged or away: the page shall say so, not vanish.
        rows, behind, store = [], 0, str(error)
        hosts = {"total": 0, "active": 0, "users": 0, "recent": []}
    total = {key: sum(row[key] for row in rows) for key in COUNTS}
    return {"apps": rows, "total": total, "hosts": hosts, "transitioner_lag": behind}, store


def app_status(app, now):
    """Count one application's workunits (made, open, to_..., done, failed) and results."""
    fired = dict(Firing.select(Firing.rule, Firing.n).where(Firing.app == app).tuples())
    served = apps.get(app.name)

    def waiting(model, *conditions):
        return model.select().where(*conditions, model.app == app).count()

    own = Workunit.number.is_null(False)  # no policy's check of an answer: they were not counted
    to_validate, to_assimilate = (waiting(Workunit, waits, own)
                                  for waits in (TO_VALIDATE, TO_ASSIMILATE))
    failed = fired.get("hand over the failure", 0) + fired.get("fail: nothing to assimilate", 0)
    untold = waiting(Workunit, TO_ASSIMILATE, own, Workunit.error_mask != 0)
    done = max(fired.get("assimilated", 0) - max(failed - untold, 0), 0)
    return {
        "name": app.name, "about": served.about if served else "",
        "serving": bool(served) and (app.name, ALL) not in project.put_off, "note": note(app, now),
        "made": app.next_number,
        "open": max(app.next_number - to_validate - to_assimilate + untold - done - failed, 0),
        "unsent": waiting(Result, UNSENT), "in_progress": waiting(Result, IN_PROGRESS),
        "to_validate": to_validate, "to_assimilate": to_assimilate, "done": done, "failed": failed,
        "valid": fired.get("valid", 0), "invalid": fired.get("invalid", 0),
        "errors": sum(fired.get(rule, 0) for rule in (
            "report error", "report error late", "unreadable output")),
        "no_reply": fired.get("time out", 0), "too_late": fired.get("too late", 0),
        "window": plugged("window_of")[-1](served) if served else None,
    }


def note(app, now):
    """Say in words what is not as it should be with an application; empty if all is well."""
    if app.name not in apps:
        why = "its file has a fault (see the troubles below) or" if project.errors else "its file"
        return f"not served now: {why} is not among those that this server was given"
    until = {wu_id: at for (name, wu_id), at in list(project.put_off.items())
             if name in (app.name, str(app.id))}
    if ALL in until:
        return f"put off for {span(until[ALL] - now)}: it failed too often, see the troubles below"
    if GENERATOR in until:
        return f"makes no new work for {span(until[GENERATOR] - now)}: its workunit() failed, " \
               f"see the troubles below"
    return f"{plural(len(until), 'workunit')} put off after an error, see the troubles below" \
        if until else ""


def host_status(now):
    """Count the hosts and name the last ones heard of, in the order in which they joined."""
    recent = list(Host.select(Host, User).join(User).where(Host.rpc_time > now - 30 * 86400)
                  .order_by(Host.rpc_time.desc()).limit(HOSTS_SHOWN))
    held = dict(Result.select(Result.host, fn.COUNT(Result.id))
                .where(IN_PROGRESS, Result.host.in_([host.id for host in recent]))
                .group_by(Result.host).tuples())
    rows = [{
        "id": host.id, "userid": host.user_id, "volunteer": volunteer_name(host.user),
        "name": computer_name(host), "system": f"{host.os_name} {host.os_version}".strip(),
        "processors": host.p_ncpus,
        "last_contact": host.rpc_time, "contact": ago(now - host.rpc_time),
        "active": host.rpc_time > now - ACTIVE_SECONDS,
        "credit": round(host.total_credit, 2),
        "recent_credit": round(plugged("faded")[-1](host, now), 2),
        "in_progress": held.get(host.id, 0), "why_no_work": host.why_no_work,
    } for host in sorted(recent, key=lambda host: host.id)]
    return {"total": Host.select().count(),
            "active": Host.select().where(Host.rpc_time > now - ACTIVE_SECONDS).count(),
            "users": User.select().count(), "recent": rows}


def computer_name(host):
    """Name a computer in public. What BOINC's clients tell is its real name: nobody's business."""
    if host.client_version[:1].isdigit() or not host.domain_name:
        return f"computer {host.id}"
    return host.domain_name


def volunteer_name(user):
    """Name a user in public; some people give their e-mail address as their name."""
    return f"volunteer {user.id}" if ADDRESS.search(user.name) else user.name


def told(units):
    """Return the ids of those workunits of which all may know who computed them, and was right.

    That is told when a workunit is decided and no copy is out or waits, on all pages alike: who
    still computes one could arrange his answer, or see that his copy is a spot check.
    """
    decided = {wu.id for wu in units if wu.canonical_resultid or wu.error_mask}
    return decided - {row[0] for row in Result.select(Result.workunit).where(
        Result.workunit.in_(list(decided)), Result.server_state != ServerState.OVER).tuples()}


def result_files():
    """Return what the applications have written for people: [{name, nbytes, size, mtime}].

    `mtime` has fractions: a picture may change twice in a second, and be shown after the first.
    """
    if not settings.public_results:
        return []
    folder, found = project.data / "results", []
    names = {f"{app}{suffix}" for app in list(apps) for suffix in SHOWN}
    try:
        with os.scandir(folder) as entries:
            listed = [entry.name for entry in itertools.islice(entries, FILES_LISTED + 1)]
        names.update(listed if len(listed) <= FILES_LISTED else ())
    except OSError:
        return []
    for name in sorted(filter(is_shown, names)):
        try:
            info = (folder / name).stat()
        except OSError:
            continue  # Not written yet, or gone since it was listed.
        found.append({"name": name, "nbytes": info.st_size, "size": size(info.st_size),
                      "mtime": round(info.st_mtime, 3)})
    return found


def refuse_results():
    """Refuse to show answers where the project keeps them to itself. Raises ClientError."""
    if not settings.public_results:
        raise ClientError("this project keeps its results to itself (public_results in its "
                          "setup.cfg)", 403)


def is_shown(name):
    """Say whether a name can be that of a result file for people, whoever gave it."""
    return (Path(name).suffix in SHOWN and not name.startswith(".") and name.isprintable()
            and not set(name) & set("/\\:"))  # what some system takes for more than a name


def lag(now):
    """Return how many seconds the transitioner is behind."""
    first = Workunit.select(Workunit.transition_time).where(DUE).order_by(
        Workunit.transition_time).limit(1).scalar()
    return max(now - first - 1, 0) if first is not None else 0


# ---- Words ---------------------------------------------------------------------


def paused(now):
    """Return what volunteers are told while the project is paused; empty while it is not."""
    return " ".join(text for stopped in plugged("stopped") if (text := stopped(now)))


def state(report):
    """Say in one word and one line what goes on: out of work, waiting, or broken? [D-18]"""
    total, active = report["total"], report["hosts"]["active"]
    computers, out = plural(active, "computer"), plural(total["in_progress"], "task")
    if report["store"] != "fine":
        return "trouble", "the project has a problem on its side: its store cannot be used"
    if report["paused"]:
        return "waiting", f"paused: {report['paused']}"
    if not report["apps"]:
        return "empty", "no application is served yet"
    if active and (total["in_progress"] or total["unsent"]):
        return "working", f"working: {computers} active, {out} out"
    if total["in_progress"]:
        return "waiting", f"waiting: {out} out, no computer heard of for {span(ACTIVE_SECONDS)}"
    if total["unsent"]:
        return "waiting", f"waiting for computers: {plural(total['unsent'], 'task')} ready"
    if total["to_validate"] or total["to_assimilate"]:
        return "working", "comparing the last answers"
    if total["open"]:
        return "waiting", f"waiting: {plural(total['open'], 'workunit')} unfinished, no task is out"
    if not total["made"]:
        return "empty", "ready, but no work was made yet"
    failed = f", {total['failed']:,} failed" if total["failed"] else ""
    return "finished", f"finished: all {plural(total['made'], 'workunit')} made so far{failed}"


def problems(report):
    """Return sentences about what is wrong with the server itself just now [D-12]."""
    found, errors = [], report["counts"].get("server errors", 0)
    if report["store"] != "fine":
        found.append(f"Its store cannot be used: {report['store']}")
    if report["transitioner_lag"] > LAG_SECONDS:
        found.append(f"It is {span(report['transitioner_lag'])} behind with its work.")
    if errors:
        found.append(f"{plural(errors, 'request')} met an error of this server since it started; "
                     f"its log says more.")
    return found


def plural(n, noun):
    """Write a number of things."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def span(seconds):
    """Write a duration as people say it."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:,} {unit}s"
    return plural(max(seconds, 0), "second")


def ago(seconds):
    """Write how long something is past."""
    return f"{span(seconds)} ago" if seconds > 4 else "just now"


def size(nbytes):
    """Write the size of a file."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= length:
            return f"{nbytes / length:.1f} {unit}"
    return plural(nbytes, "byte")


# ---- Pages ---------------------------------------------------------------------


def routes(app, clock):
    """Read the settings and add the pages."""
    global settings
    settings = minigrid.read_settings("setup.cfg", StatusSettings, "status")

    @app.get("/status.json")
    def _():
        now = clock()
        bottle.response.set_header("Cache-Control", "no-store")
        return {**status(now), **invitation(now)}

    @app.get("/")
    def _():
        now = clock()
        system = system_of(bottle.request.environ.get("HTTP_USER_AGENT", ""))
        return page({**status(now), **invitation(now), "system": system,
                     "pages": dict(sum(plugged("NAV"), ()))})

    @app.get("/results/<name>")
    def _(name):
        refuse_results()
        if not is_shown(name):
            raise ClientError(f"there is no result file {name[:80]}", 404)
        answer = bottle.static_file(name, root=str((project.data / "results").resolve()),
                                    mimetype=SHOWN[Path(name).suffix])
        if answer.status_code < 400:
            answer.set_header("Cache-Control", "no-cache")
            answer.set_header("X-Content-Type-Options", "nosniff")
        return answer


def invitation(now):
    """Return how others reach this server, and the lines that make a volunteer of them [D-28].

    Who looks from the server itself knows it as localhost, which would lead others nowhere: they
    are told the addresses that its owner has named, and those in its network, if it listens there.
    """
    url, port, named = base_url(), project.settings.port, client_addresses("")
    try:
        seen = urllib.parse.urlsplit(url)
        host, port = seen.hostname or "localhost", seen.port or port
    except ValueError:  # The asking client may write anything there.
        url, host = "", "localhost"
    urls = [url or f"http://localhost:{port}", *named]
    if is_local(host):
        near = project.settings.host in ("0.0.0.0", "::")
        urls = [*named, *(network(port, now // 60)[::-1] if near else ())] or urls
    urls = list(dict.fromkeys(urls))
    local = is_local(host) and is_local(project.settings.host) and not named
    return {"url": urls[0], "urls": urls, "lines": join_lines(urls[0]), "only_here": local,
            "needs": NEEDS[creation()], "schedulers": schedulers(url, "/scheduler"),
            "boinc": boinc_invitation(url, urls, port, now)}


def client_addresses(seen):
    """Return where clients may look for this project: the address they see, then its others."""
    return plugged("all_addresses")[-1](seen) if plugged("all_addresses") else [seen] * bool(seen)


def schedulers(seen, path):
    """Return the addresses of a scheduler for clients that look for them in this page [S1-22].

    The first is the one by which they came. What would be cut is left out [WIRE 4].
    """
    return [url + path for url in client_addresses(seen)
            if len((url + path).encode()) <= SCHEDULER_BYTES_MAX]


def join_lines(url):
    """Return the lines that make a volunteer of a machine with Python, by way and system.

    The first way needs nothing but Python. With curl the program comes through a pipe: as an
    argument, `python3 -c "$(curl ...)"`, Linux takes no more than 128 KiB. The lines for Windows
    are the same in its two terminals: within the one pair of double quotes stands nothing that
    Command Prompt (% and !) or PowerShell ($, ` and quotes) would change.
    """
    file, here = quoted(f"{url}/volunteer.py"), quoted(url)
    fetch = (f"-c \"import urllib.request as u; "
             f"exec(u.urlopen('{url}/volunteer.py').read())\" {here}")
    return {
        "posix": f"python3 {fetch}", "curl": f"curl -fsS {file} | python3 - {here}",
        "fetch": f"curl -fO {file}", "start": f"python3 volunteer.py {here}",
        "windows": f"py {fetch}",
        "windows_fetch": f"curl.exe -fO {file}", "windows_start": f"py volunteer.py {here}",
    }


def quoted(url):
    """Quote an address for a shell if need be: zsh takes [::1] for a pattern of file names."""
    return f'"{url}"' if "[" in url else url


def system_of(agent):
    """Guess from a browser's User-Agent on which system it runs; "" for phones and the rest."""
    return next((system for word, system in SYSTEMS.items() if word in agent), "")


def creation():
    """Say who may make an account: "open", "invitation" or "closed"."""
    return plugged("account_creation")[-1]() if plugged("account_creation") else "open"


def boinc_invitation(seen, urls, port, now):
    """Return how BOINC's clients join, or None where no plugin speaks their language [WIRE 4].

    `url` is for people to paste: its host has a dot inside, or the client refuses it. `schedulers`
    are for the client, which looks for them in this page.
    """
    if not plugged("scheduler_path"):
        return None
    own = project.settings.host
    known = network(port, now // 60)[::-1] if own in ("0.0.0.0", "::") else [f"http://{own}:{port}"]
    url = next(filter(has_dot, [*urls, *known]), f"http://127.0.0.1:{port}") + "/"
    return {"url": url, "creation": creation(), "next": CREATION[creation()],
            "schedulers": schedulers(seen or url[:-1], plugged("scheduler_path")[-1]),
            "create": f"boinccmd --create_account {url} EMAIL PASSWORD NAME",
            "attach": f"boinccmd --project_attach {url} KEY"}


def has_dot(url):
    """Say whether BOINC's client takes a URL for one: a dot inside its host's name [WIRE 4]."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host != "0.0.0.0" and bool(re.fullmatch(r"[\w-]+(\.[\w-]+)+", host))


def is_local(host):
    """Say whether a host name means the machine that uses it."""
    return host in ("localhost", "::1") or host.startswith("127.")


@functools.lru_cache(maxsize=2)
def network(port, minute):
    """Return this server's addresses in its networks, looked up once a minute."""
    return [url for addresses in plugged("addresses") for url in addresses(port)]


def page(report):
    """Return the page with a report filled in."""
    nothing = {**dict.fromkeys(COUNTS, 0), **dict.fromkeys(("name", "about", "note"), "")}
    nobody = {**dict.fromkeys(("id", "userid", "volunteer", "name", "system", "processors",
                               "in_progress", "contact", "why_no_work", "active"), ""), "credit": 0}
    body = plugged("fill_in")[-1](
        HERE / "page.html", s=report, nothing=nothing, nobody=nobody, quote=urllib.parse.quote,
        utc=lambda t: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t)))
    head = "".join(f'<link rel="{kind}_scheduler" href="{html.escape(url)}">\n' for kind, known in (
        ("boinc", report["boinc"] or {}), ("minigrid", report))
                   for url in known.get("schedulers", ()))
    head += REFRESH
    return plugged("html_page")[-1](report["name"], body, head=head, style=HERE / "page.css",
                                    script=HERE / "page.js", allow=ALLOW)
