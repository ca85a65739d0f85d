"""The progress file: the table of all nodes, on disk and by HTTP [S3-23 S3-24].

data/progress/nodes.html and nodes.json show how many nodes are active, how many are in contact just
now, the computing power of all active ones, and the complete table of connected nodes. They are
written in the background: whatever goes wrong with them, computing goes on [S3-16 S3-17].
"""

import functools
import hashlib
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import bottle
from peewee import ForeignKeyField, IntegerField, fn

import minigrid
from minigrid import (IN_PROGRESS, ClientError, Host, HostAppVersion, Record, Result, User,
                      ValidateState, canonical_json, db, plugged, project, setting)

NAV = (("/nodes", "all computers"),)
FILES = {"/nodes": ("nodes.html", "text/html; charset=utf-8"),
         "/nodes.json": ("nodes.json", "application/json")}
CHUNK = 500  # hosts looked up together
COLUMNS = (Host.id, Host.user, Host.rpc_time, Host.domain_name, Host.client_version, Host.p_ncpus,
           Host.p_fpops, Host.on_frac, Host.active_frac, Host.avg_turnaround, Host.total_credit,
           Host.expavg_credit, Host.expavg_time, User.id, User.name)
BORROWED = ("computer_name", "volunteer_name", "flops_of", "faded", "span", "ago",
            "write_row")  # of others
JUST_NOW = 60  # s since its last request: a node is interacting with the server
ANYWAY = 60  # s after which files are written again though nothing has changed
ACTIVE_SECONDS = 600  # s since its last request: a node is active, as on the front page
NCPUS_MAX = 1024  # processors of a node that are believed in the sum
MEMORY = 1 << 20  # bytes of the table that are kept in memory while it is put together


class WrongAnswers(Record):
    """How many answers of a host were found wrong, for ever; hosts without any have no row."""

    host = ForeignKeyField(Host, unique=True, on_delete="CASCADE")
    n = IntegerField(default=0)


TABLES = (WrongAnswers,)


@dataclass(frozen=True)
class NodesSettings:
    """The [nodes] section of setup.cfg."""

    seconds: float = setting(60, "s between two looks at all nodes for the progress file; 0: none")
    days: float = setting(30, "days of silence after which a node is not connected any more")


state = SimpleNamespace(opened=None)  # what this process knows of its file: see routes()


def routes(app, clock):
    """Add the addresses of the progress file; from now on it is written. Raises ClientError."""
    # Where nobody can look, as in a test of rules, nothing is written.
    global state
    settings = minigrid.read_settings("setup.cfg", NodesSettings, "nodes")
    state = SimpleNamespace(opened=project.write, settings=settings, looked_at=None,
                            written_at=None, digest="", trouble="")
    for path, file in FILES.items():
        app.route(path, callback=functools.partial(serve, clock, *file))


def serve(clock, name, kind):
    """Return the progress file as it was written last."""
    answer = bottle.static_file(name, root=str((project.data / "progress").resolve()),
                                mimetype=kind)
    if answer.status_code == 404:
        why = "the table of nodes was not written yet" if state.settings.seconds else \
            "this project writes no table of nodes: [nodes] seconds is 0"
        if name == "nodes.json":
            raise ClientError(why, 404)
        return show([dict(texts=[f"Sorry: {why}."])], clock(), 404)
    if answer.status_code < 400:
        for header in plugged("page_headers")[-1]().items():
            answer.set_header(*header)
    return answer


def at_commit(done, now):
    """Count what was found wrong in the transaction that says so."""
    wrong = Counter(row.host_id for rule, row in done if not isinstance(rule, str)
                    and rule.after.get("validate_state") == ValidateState.INVALID
                    and "outcome" not in rule.after)  # An error is no answer.
    for host_id, n in wrong.items():
        (WrongAnswers.insert(host=host_id, n=n)
         .on_conflict(conflict_target=[WrongAnswers.host], update={
             WrongAnswers.n: WrongAnswers.n + n}).execute())


# ---- Writing -------------------------------------------------------------------


def progress(now):
    """Stage: write the progress file from time to time; never a reason to stop [S3-16 S3-23]."""
    if state.opened is not project.write or not state.settings.seconds:
        return 0
    if state.looked_at is not None and 0 <= now - state.looked_at < state.settings.seconds:
        return 0
    state.looked_at = now  # Also if it fails: a full disk is not tried every second.
    try:
        written, state.trouble = write_files(now), ""
        return written
    except Exception as error:
        if str(error) != state.trouble:  # once, however long it lasts
            state.trouble = str(error)
            minigrid.remember(now, f"the table of nodes cannot be written: {error}")
        return 0


def write_files(now):
    """Write both files if anything in them has changed, or anyway; return how many were written.

    Whoever reads sees the old file or the new one. A power cut may cost them: the next start writes
    them again, so nothing is flushed to the disk.
    """
    folder = project.data / "progress"
    folder.mkdir(exist_ok=True)
    with spool(folder) as rows, spool(folder) as lines:
        with db.atomic("DEFERRED"):  # one moment of the store
            sums, digest = write_rows(rows, lines, now)
        fresh = state.written_at is not None and 0 <= now - state.written_at < ANYWAY
        if fresh and digest == state.digest:
            return 0
        head = canonical_json({"project": project.settings.name, "time": now, **sums})[:-1]
        put(folder / "nodes.json", (head + ',"nodes":[\n', lines, "]}\n"), now)
        before, after = page(sums, now).split(plugged("write_row")[-1]((), (), {}))
        put(folder / "nodes.html", (before, rows, after), now)
    state.written_at, state.digest = now, digest
    return 2


def spool(folder):
    """Return a temporary file for text that goes to the disk only if it grows large."""
    return tempfile.SpooledTemporaryFile(MEMORY, "w+", encoding="utf-8", errors="replace",
                                         newline="", dir=folder)


def write_rows(rows, lines, now):
    """Write all nodes as rows of HTML and lines of JSON; return what they sum up to, and a digest.

    One node at a time: thousands of them shall not need memory.
    """
    sums = {"active": 0, "interacting": 0, "interacting_seconds": JUST_NOW, "power": 0.0,
            "connected": 0}
    digest, others = hashlib.sha256(), SimpleNamespace(**{
        name: plugged(name)[-1] for name in BORROWED}, pages=bool(plugged("scheduler_path")))
    for node in nodes(others, now):
        sums["active"] += node["active"]
        sums["interacting"] += node["last_contact"] > now - JUST_NOW
        sums["power"] += node["power"] * node["availability"] * node["active"]
        line = canonical_json(node)
        lines.write(",\n" * (sums["connected"] > 0) + line)
        rows.write(row_of(node, others, now))
        digest.update(line.encode("utf-8", "replace"))
        sums["connected"] += 1
    lines.write("\n")
    digest.update(canonical_json(sums).encode())
    return sums, digest.digest()


def put(path, parts, now):
    """Put a file together from texts and files, and give it its name when it is whole."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8", errors="replace", newline="") as file:
        for part in parts:
            if not isinstance(part, str):
                part.seek(0)
            file.writelines([part] if isinstance(part, str) else part)
    os.utime(temporary, (now, now))
    os.replace(temporary, path)


# ---- The nodes -----------------------------------------------------------------


def nodes(others, now):
    """Walk through all connected nodes in the order in which they joined, as JSON values."""
    last, since = 0, now - state.settings.days * 86400
    while True:
        hosts = list(Host.select(*COLUMNS).join(User).where(
            Host.id > last, Host.rpc_time > since).order_by(Host.id).limit(CHUNK))
        if not hosts:
            return
        known, last = facts_of([host.id for host in hosts], now), hosts[-1].id
        for host in hosts:
            yield node_of(host, known, others, now)


def facts_of(ids, now):
    """Return what else is known of hosts, one query each: {what: {host id: value}}."""
    held = Result.select(Result.host, fn.COUNT(Result.id)).where(
        IN_PROGRESS, Result.host.in_(ids)).group_by(Result.host)
    done = HostAppVersion.select(HostAppVersion.host, fn.SUM(HostAppVersion.et_n)).where(
        HostAppVersion.host.in_(ids)).group_by(HostAppVersion.host)
    wrong = WrongAnswers.select(WrongAnswers.host, WrongAnswers.n).where(
        WrongAnswers.host.in_(ids))
    found = {"held": dict(held.tuples()), "done": dict(done.tuples()),
             "wrong": dict(wrong.tuples())}
    for name in ("node_states", "node_figures"):  # what the dispatch policies have measured
        found[name] = {key: value for tell in plugged(name) for key, value in tell(ids).items()}
    found["standing"] = [tell(ids, now) for tell in plugged("trust_of_hosts")]
    return found


def node_of(host, known, others, now):
    """Describe one node, as JSON values.

    It is active if it was heard of lately or holds tasks, for who computes may be silent for hours;
    unless the node check has found it silent for too long [S3-21].
    """
    held, marked = known["held"].get(host.id, 0), not known["node_states"].get(host.id, True)
    ncpus = min(max(host.p_ncpus, 1), NCPUS_MAX)
    return {
        "id": host.id, "name": others.computer_name(host), "userid": host.user_id,
        "volunteer": others.volunteer_name(host.user), "processors": ncpus,
        "power": ncpus * others.flops_of(host),
        "availability": share(host.on_frac) * share(host.active_frac),
        "active": not marked and (host.rpc_time > now - ACTIVE_SECONDS or held > 0),
        "last_contact": host.rpc_time, "held": held, "done": known["done"].get(host.id, 0) or 0,
        "wrong": known["wrong"].get(host.id, 0), "avg_turnaround": round(host.avg_turnaround),
        "recent_credit": round(others.faded(host, now), 3),
        "figures": known["node_figures"].get(host.id) or {},
        "standing": [text for told in known["standing"] for text in told.get(host.id, ())],
    }


def share(fraction):
    """Return a share of time as it can be: clients may say anything."""
    return min(max(fraction, 0), 1)


# ---- The page ------------------------------------------------------------------


HEADS = ("Computer", "Volunteer", "State", "Last contact", "Processors", "GFLOPS", "Tasks held",
         "Done", "Wrong", "Turnaround", "Credit a day", "Measured", "Standing")
KINDS = {"Computer": "name", "Volunteer": "name", "State": "when", "Last contact": "when",
         "Measured": "why", "Standing": "why",
         **dict.fromkeys(("Processors", "GFLOPS", "Tasks held", "Done", "Wrong", "Turnaround",
                          "Credit a day"), "number")}


def page(sums, now):
    """Return the page with an empty row where the rows go."""
    parts = [dict(numbers=(
        ("active nodes", f"{sums['active']:,}"),
        (f"interacting with the server just now: a request within {JUST_NOW} seconds",
         f"{sums['interacting']:,}"),
        ("floating-point operations a second: the power of all active nodes, as their clients "
         "measure it, for the part of their time when they may compute", power(sums["power"])))),
        dict(title="Connected nodes", head=HEADS, kinds=KINDS, rows=[()],
             texts=() if sums["connected"] else ("None yet.",),
             caption=f"All {sums['connected']:,} that were heard of in the last "
                     f"{state.settings.days:g} days, in the order in which they joined. GFLOPS: "
                     "billions of operations a second, with all processors. Measured: seconds for "
                     "a unit of complexity, and bandwidth")]
    return show(parts, now).body.decode()


def show(parts, now, status=200):
    """Answer with a page that loads itself again."""
    again = max(int(state.settings.seconds), 5) if status == 200 else 5
    return plugged("show_page")[-1](
        "Nodes", parts, now, status, json="/nodes.json" if status == 200 else "",
        head=f'<meta http-equiv="refresh" content="{again}">\n')


def row_of(node, others, now):
    """Return a node as a row of the table, with all texts escaped."""
    name = node["name"]
    if others.pages:
        name = name, f"/show_host_detail.php?hostid={node['id']}"
    return others.write_row(HEADS, (
        name, node["volunteer"], "active" if node["active"] else "inactive",
        others.ago(now - node["last_contact"]), node["processors"],
        f'{node["power"] / 1e9:,.2f}', node["held"], f'{node["done"]:,}', f'{node["wrong"]:,}',
        others.span(node["avg_turnaround"]) if node["avg_turnaround"] else "",
        f'{node["recent_credit"]:,.2f}', figures(node["figures"]), node["standing"]),
        KINDS, active=node["active"])


def figures(by_app):
    """Write what was measured of a node: a text for each application."""
    return [f"{app}: {told.get('seconds_per_unit', 0):.3g} s"
            + (f", {told['bandwidth'] / 1000:,.3g} kB/s" if told.get("bandwidth") else "")
            for app, told in sorted(by_app.items())]


def power(flops):
    """Write a computing power in words."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if flops >= size:
            return f"{flops / size:,.1f} {word}"
    return f"{flops:,.0f}"


STAGES = (progress,)
