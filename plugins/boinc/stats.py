"""What programs read about the project: the daily lists of credit, and how the server is doing.

Statistics sites fetch stats/user.gz, host.gz, team.gz and tables.xml, and server_status.php?xml=1.
All have BOINC's names and elements. None tells who a volunteer is outside of this project.
"""

import functools
import gzip
import hashlib
import os
import re
from contextlib import nullcontext
from xml.sax.saxutils import escape

import bottle
from peewee import fn

import minigrid
from minigrid import (FILES_READY, FILES_STUCK, IN_PROGRESS, TO_ASSIMILATE, TO_VALIDATE, UNSENT,
                      App, ClientError, Host, Result, User, ValidateState, Workunit, base_url, db,
                      plugged, project, settle)

FILES = {  # what is written and served, and as what
    "user.gz": "application/gzip", "host.gz": "application/gzip", "team.gz": "application/gzip",
    "tables.xml": "text/xml; charset=utf-8",
}
DAY = 86400  # s
CREDIT_FPOPS = 1e8  # estimated operations for which add_work() grants one credit, if not told else
SAMPLE = 5000  # copies made last, in which recent run times are looked for
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HEAD = '<?xml version="1.0" encoding="utf-8"?>\n'


def routes(app, clock):
    """Add the addresses that statistics sites know."""

    @app.get("/stats/<name>")
    def _(name):
        if name not in FILES:
            raise ClientError(f"there are only {', '.join(FILES)} here", 404)
        answer = bottle.static_file(name, root=str((project.data / "stats").resolve()),
                                    mimetype=FILES[name])
        if answer.status_code == 404:
            raise ClientError(f"{name} was not written yet", 404)
        return answer

    @app.get("/server_status.php")
    def _():
        if bottle.request.query.get("xml", "0") in ("", "0"):
            return bottle.HTTPResponse(status=302, headers={"Location": "/"})
        text = server_status(clock(), bottle.request.urlparts.hostname if base_url() else "")
        return xml_answer(text)


# ---- XML ---------------------------------------------------------------------


def xml_answer(text):
    """Return a text as the body of an answer in XML."""
    headers = {"Content-Type": "text/xml; charset=utf-8", "X-Content-Type-Options": "nosniff",
               "Cache-Control": "no-cache"}
    return bottle.HTTPResponse((HEAD + text).encode("utf-8"), headers=headers)


def element(name, value):
    """Write one element on a line: numbers as BOINC prints them, texts with what XML forbids gone.

    Strict readers refuse a whole list for one control character in one nickname.
    """
    text = f"{value:.6f}" if isinstance(value, float) else escape(NO_XML.sub("\ufffd", str(value)))
    return f"<{name}>{text}</{name}>\n"


def elements(name, values):
    """Write an element that holds others, given as {name: value}."""
    return f"<{name}>\n{''.join(element(*pair) for pair in values.items())}</{name}>\n"


def recent_credit(holder, now):
    """Return a host's or user's recent credit per day at `now`: it decays since it was kept."""
    return plugged("faded")[-1](holder, now)


# ---- The lists of credit -------------------------------------------------------


def user_values(user, now):
    """Return what is told of a user, as BOINC's exports and show_user.php name it."""
    return {
        "id": user.id, "name": plugged("volunteer_name")[-1](user),
        "create_time": user.create_time, "total_credit": user.total_credit,
        "expavg_credit": recent_credit(user, now), "expavg_time": float(now),
        "cpid": plugged("cpid_of")[-1](user) or own_cpid(user),
    }


def own_cpid(user):
    """Return a name for a volunteer who is known in this project only: sites want one for each."""
    text = f"{project.settings.name} {user.id} {user.create_time}"
    return hashlib.md5(text.encode()).hexdigest()


def host_values(host, now):
    """Return what is told of a host: its hardware and credit, but not its name."""
    known = {name: host.details.get(name) for name in (
        "timezone", "p_iops", "p_membw", "m_cache", "m_swap", "n_bwup", "n_bwdown")}
    more = {name: float(value) if isinstance(value, (int, float)) else 0.0
            for name, value in known.items()}
    return {
        "id": host.id, "userid": host.user_id, "total_credit": host.total_credit,
        "expavg_credit": recent_credit(host, now), "expavg_time": float(now),
        "p_vendor": host.p_vendor, "p_model": host.p_model, "os_name": host.os_name,
        "os_version": host.os_version, "create_time": host.create_time, "rpc_time": host.rpc_time,
        "ncpus": host.p_ncpus, "p_fpops": host.p_fpops, "m_nbytes": host.m_nbytes,
        "d_total": host.d_total, "d_free": host.d_free, "avg_turnaround": host.avg_turnaround,
        **more, "timezone": int(more["timezone"]), "host_cpid": public_cpid(host),
    }


def public_cpid(host):
    """Return the name by which sites know one computer in several projects.

    It is the MD5 of the client's own name for it and the user's e-mail address, as in BOINC, so
    that who reads the list cannot pass for that client.
    """
    return hashlib.md5((host.host_cpid + (host.user.email_addr or "")).encode()).hexdigest()


def export(now):
    """Write the lists of credit if they are a day old, or were never written."""
    try:
        age = now - (project.data / "stats" / "tables.xml").stat().st_mtime
    except OSError:
        age = DAY
    if 0 <= age < DAY - 60:  # A minute's slack, or hourly looks would make it 25 hours.
        return
    try:
        write_lists(now)
    except OSError as error:
        minigrid.remember(now, f"the statistics cannot be written: {error}")


def write_lists(now):
    """Write the lists anew under data/stats; each is replaced when it is whole. May raise OSError.

    Reads one state of the store, a row at a time; like BOINC leaves out who has no credit.
    """
    folder = project.data / "stats"
    folder.mkdir(exist_ok=True)
    users = User.select().where(User.total_credit > 0).order_by(User.id)
    hosts = (Host.select(Host, User).join(User).where(Host.total_credit > 0).order_by(Host.id))
    with db.atomic("DEFERRED"):
        nusers = write_list(folder / "user.gz", "users", now, (
            elements("user", user_values(user, now)) for user in users.iterator()))
        nhosts = write_list(folder / "host.gz", "hosts", now, (
            elements("host", host_values(host, now)) for host in hosts.iterator()))
        write_list(folder / "team.gz", "teams", now, ())  # There are none, and sites ask for them.
        total = User.select(fn.SUM(User.total_credit)).scalar() or 0
        names = [app.name for app in App.select().order_by(App.name)]
    told = {"nusers_total": nusers, "nteams_total": 0, "nhosts_total": nhosts,
            "total_credit": float(total)}
    parts = [element("update_time", now), *(element(*pair) for pair in told.items()),
             "<applications>\n", *(elements("application", {"name": n}) for n in names),
             "</applications>\n"]
    write_list(folder / "tables.xml", "tables", now, parts)  # the last: it says that all are here


def write_list(path, name, now, parts):
    """Write an element of many parts to a file, packed if it ends in .gz; return how many."""
    n, temporary = 0, path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        packing = path.suffix == ".gz"
        with gzip.GzipFile("", "wb", 6, file, now) if packing else nullcontext(file) as out:
            out.write(f"{HEAD}<{name}>\n".encode())
            for n, part in enumerate(parts, 1):
                out.write(part.encode())
            out.write(f"</{name}>\n".encode())
        file.flush()
        os.fsync(file.fileno())
    os.utime(temporary, (now, now))
    settle(temporary, path)
    return n


# ---- How the server is doing -----------------------------------------------------


def server_status(now, host):
    """Return <server_status>: the programs of a BOINC server, which are stages here, and counts."""
    working = "not running" if project.write.trouble else "running"
    programs = ["Download server", "Upload server", "Scheduler"]
    programs += [stage.__name__ for stage in minigrid.all_stages()]
    paused = any(stopped(now) for stopped in plugged("stopped"))
    daemons = "".join(elements("daemon", {
        "host": host, "command": name,
        "status": "disabled" if paused and name == "Scheduler" else working}) for name in programs)
    at, counts, apps = count(now // 60, project.write)
    return (f"<server_status>\n{element('update_time', at)}"
            f"{element('software_version', 'minigrid ' + minigrid.__version__)}"
            f"<daemon_status>\n{daemons}</daemon_status>\n<database_file_states>\n"
            f"{''.join(element(*pair) for pair in counts.items())}"
            f"<tasks_by_app>\n{''.join(elements('app', app) for app in apps)}</tasks_by_app>\n"
            f"</database_file_states>\n</server_status>\n")


@functools.lru_cache(maxsize=1)
def count(minute, opened):
    """Count what server_status tells, once a minute: (time, {name: value}, [{...} of each app]).

    `opened` changes with the project that is open, and is not looked at.
    """
    now = minute * 60

    def number(model, *conditions):
        return model.select().where(*conditions).count()

    with db.atomic("DEFERRED"):
        counts = {
            "results_ready_to_send": number(Result, UNSENT),
            "results_in_progress": number(Result, IN_PROGRESS),
            "workunits_waiting_for_validation": number(Workunit, TO_VALIDATE),
            "workunits_waiting_for_assimilation": number(Workunit, TO_ASSIMILATE),
            "workunits_waiting_for_deletion":
                number(Workunit, FILES_READY) + number(Workunit, FILES_STUCK),
            "results_waiting_for_deletion":
                number(Result, FILES_READY) + number(Result, FILES_STUCK),
            "transitioner_backlog_hours": plugged("lag")[-1](now) / 3600,
        }
        for name, model in (("users", User), ("hosts", Host)):
            recent = [recent_credit(row, now) for row in model.select(
                model.expavg_credit, model.expavg_time).where(model.expavg_credit > 1).iterator()]
            counts[f"{name}_with_recent_credit"] = sum(credit > 1 for credit in recent)
            counts[f"{name}_with_credit"] = number(model, model.total_credit > 1)
            counts[f"{name}_registered_in_past_24_hours"] = number(
                model, model.create_time > now - DAY)
        # BOINC divides by 200 credits a day for a GFLOPS; credit of this project is finer.
        counts["current_floating_point_speed"] = sum(recent) * CREDIT_FPOPS / DAY / 1e9
        paces = run_times(now)
        apps = [{"id": app.id, "name": app.name,
                 "unsent": number(Result, UNSENT, Result.app == app),
                 "in_progress": number(Result, IN_PROGRESS, Result.app == app),
                 **paces.get(app.id, {})} for app in App.select().order_by(App.id)]
    return now, counts, apps


def run_times(now):
    """Return hours of run time and users of the last day by application, from the last copies."""
    last = (Result.select(Result.app, Result.user, Result.elapsed_time, Result.validate_state,
                          Result.received_time).order_by(Result.id.desc()).limit(SAMPLE).alias("r"))
    hours = last.c.elapsed_time / 3600
    rows = (Result.select(last.c.app_id, fn.AVG(hours), fn.MIN(hours), fn.MAX(hours),
                          fn.COUNT(last.c.user_id.distinct())).from_(last)
            .where(last.c.validate_state == ValidateState.VALID, last.c.received_time > now - DAY)
            .group_by(last.c.app_id).tuples())
    return {app: {"avg_runtime": mean, "min_runtime": least, "max_runtime": most, "users": users}
            for app, mean, least, most, users in rows}
