"""What a person looks at: the front page, which refreshes itself, and the same as JSON."""

import mimetypes
from pathlib import Path

import bottle

import minigrid
from minigrid import (DUE, IN_PROGRESS, TO_ASSIMILATE, TO_VALIDATE, UNSENT, App, ClientError, Firing,
                      Host, Result, User, Workunit, apps, base_url, project)

HERE = Path(__file__).resolve().parent
ACTIVE_SECONDS = 600  # a host is active if it was heard of in the last ten minutes
SHOWN = (".png", ".csv", ".txt", ".jsonl")  # result files that pages link to
JOIN = ("python3 -c \"import urllib.request as u; "
        "exec(u.urlopen('{url}/volunteer.py').read())\" {url}")


def status(now):
    """Return how the project is doing, as JSON values.

    The cost does not grow with what was done: what waits is counted in partial indexes, what is
    over was counted when its rule fired.
    """
    rows = [app_status(app) for app in App.select().order_by(App.name)]
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key not in TEXTS} if rows else \
        dict.fromkeys(COUNTS, 0)
    return {
        "name": project.settings.name, "version": minigrid.__version__, "server_time": now,
        "apps": rows, "total": total, "hosts": host_status(now),
        "files": result_files(),
        "troubles": [{"time": at, "text": text} for at, text in reversed(project.errors)],
        "store": project.write.trouble or "fine",
        "transitioner_lag": lag(now), "counts": dict(project.counts),
    }


TEXTS = ("name", "about", "serving")
COUNTS = ("made", "unsent", "in_progress", "to_validate", "to_assimilate", "done", "failed",
          "valid", "invalid", "errors", "no_reply", "too_late")


def app_status(app):
    """Count one application's workunits and results."""
    fired = dict(Firing.select(Firing.rule, Firing.n).where(Firing.app == app).tuples())
    served = apps.get(app.name)

    def waiting(model, condition):
        return model.select().where(condition, model.app == app).count()

    failed = fired.get("hand over the failure", 0)
    return {
        "name": app.name, "about": served.about if served else "",
        "serving": bool(served) and (app.name, 0) not in project.put_off,
        "made": app.next_number, "unsent": waiting(Result, UNSENT),
        "in_progress": waiting(Result, IN_PROGRESS), "to_validate": waiting(Workunit, TO_VALIDATE),
        "to_assimilate": waiting(Workunit, TO_ASSIMILATE),
        "done": max(fired.get("assimilated", 0) - failed, 0), "failed": failed,
        "valid": fired.get("valid", 0), "invalid": fired.get("invalid", 0),
        "errors": sum(fired.get(rule, 0) for rule in (
            "report error", "report error late", "unreadable output")),
        "no_reply": fired.get("time out", 0), "too_late": fired.get("too late", 0),
    }


def host_status(now):
    """Count the hosts and name the last ones heard of."""
    recent = (Host.select(Host, User).join(User).where(Host.rpc_time > now - 30 * 86400)
              .order_by(Host.rpc_time.desc()).limit(50))
    rows = [{
        "id": host.id, "volunteer": host.user.name, "name": host.domain_name,
        "system": f"{host.os_name} {host.os_version}".strip(), "processors": host.p_ncpus,
        "last_contact": host.rpc_time, "active": host.rpc_time > now - ACTIVE_SECONDS,
        "credit": round(host.total_credit, 2), "recent_credit": round(host.expavg_credit, 2),
        "in_progress": Result.select().where(IN_PROGRESS, Result.host == host).count(),
        "why_no_work": host.why_no_work,
    } for host in recent]
    return {"total": Host.select().count(),
            "active": Host.select().where(Host.rpc_time > now - ACTIVE_SECONDS).count(),
            "users": User.select().count(), "recent": rows}


def result_files():
    """Return what the applications have written for people: [{name, nbytes, mtime}]."""
    found = [path for path in (project.data / "results").iterdir()
             if path.suffix in SHOWN and not path.name.startswith(".")]
    return [{"name": path.name, "nbytes": path.stat().st_size, "mtime": int(path.stat().st_mtime)}
            for path in sorted(found)]


def lag(now):
    """Return how many seconds the transitioner is behind."""
    first = Workunit.select(Workunit.transition_time).where(DUE).order_by(
        Workunit.transition_time).limit(1).scalar()
    return max(now - first - 1, 0) if first is not None else 0


def routes(app, clock):
    """Add the pages."""

    @app.get("/status.json")
    def _():
        return {**status(clock()), "join": JOIN.format(url=base_url()), "url": base_url()}

    @app.get("/")
    def _():
        return page("page.html", "text/html; charset=utf-8")

    @app.get("/results/<name>")
    def _(name):
        path = project.data / "results" / name
        if Path(name).suffix not in SHOWN or Path(name).name != name:
            raise ClientError(f"there is no result file {name[:80]}", 404)
        answer = bottle.static_file(name, root=str(path.parent.resolve()),
                                    mimetype=mimetypes.guess_type(name)[0] or "text/plain")
        if answer.status_code < 400:
            answer.set_header("Cache-Control", "no-cache")
        return answer


def page(name, kind):
    """Send a file of this directory."""
    bottle.response.content_type = kind
    return (HERE / name).read_bytes()
