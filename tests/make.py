"""Builders: rows that are in no store, small projects in a directory, and clients of them."""

import contextlib
import itertools
import os
import random
from dataclasses import dataclass

import minigrid as m

S, O, V = m.ServerState, m.Outcome, m.ValidateState
NOW = 1_700_000_000
DAY, RETRY = 86400, 6 * 3600


# ---- Rows in memory ------------------------------------------------------------


def wu(**changes):
    """A workunit of quorum 2 whose deadline is 1000 s after sending, looked at just now."""
    return m.Workunit(**{**dict(
        id=1, app=1, name="unit_7", number=7, create_time=NOW - 5000, mod_time=NOW - 5000,
        input_files=[], delay_bound=1000, transition_time=NOW - 1, canonical_credit=10), **changes})


def row(**changes):
    """A result without name and id: numbered() gives them."""
    return m.Result(**{**dict(workunit=1, app=1, create_time=NOW - 5000), **changes})


def unsent(**changes):
    return row(**changes)


def sent(deadline=NOW + 500, **changes):
    """A result in progress with a deadline."""
    return row(**{**dict(server_state=S.IN_PROGRESS, sent_time=deadline - 1000,
                         report_deadline=deadline), **changes})


def over(outcome, validate_state=V.INIT, **changes):
    """A result that ended: reported 100 s ago, unless nothing was."""
    reported = outcome in (O.SUCCESS, O.CLIENT_ERROR, O.VALIDATE_ERROR, O.CLIENT_DETACHED)
    return row(**{**dict(
        server_state=S.OVER, outcome=outcome, validate_state=validate_state,
        sent_time=NOW - 900, report_deadline=NOW - 50 if outcome == O.NO_REPLY else NOW + 100,
        received_time=(NOW - 100) * reported), **changes})


def success(validate_state=V.INIT, **changes):
    return over(O.SUCCESS, validate_state, **changes)


def error(exit_status=1, **changes):
    return over(O.CLIENT_ERROR, V.INVALID, exit_status=exit_status, **changes)


def lost(**changes):
    return over(O.NO_REPLY, **changes)


def numbered(unit, results):
    """Give results the ids 1, 2 ... and the names of copies of the unit; return them."""
    for n, r in enumerate(results):
        r.id, r.name = n + 1, f"{unit.name}_{n}"
    return results


def states(rows, name):
    """The values of one field."""
    return [getattr(r, name) for r in rows]


# ---- Projects ------------------------------------------------------------------

KEPT = ("strong_private.pem", "strong_public")  # Drawing them takes longer than most tests.

COUNT = '''"""count: i for i, two must agree."""


def workunit(i):
    return {"input": i} if i < 3 else None


def compute(input):
    return input
'''

NEAR = COUNT + '''

def parse(output):
    """Strings are troubles: "away" for now, any other for ever; a list is odd company."""
    if output == "away":
        raise OSError("the disk is away")
    if isinstance(output, str):
        raise ValueError("not a number")
    return output


def compare(a, b):
    if a == [] or b == []:
        raise ValueError("nothing compares to this")
    if a == {} or b == {}:
        raise OSError("cannot be compared just now")
    return abs(a - b) <= 1


def assimilate(workunit, answer):
    """Files in the results folder make it fail, or ask for patience."""
    if (workunit.folder / "fail").exists():
        raise RuntimeError("I do not like it")
    if (workunit.folder / "defer").exists():
        return "defer"
    return [answer, workunit.input]
'''


@contextlib.contextmanager
def project(folder, apps, **settings):
    """Open a project in a folder, empty though an older one may have left directories there."""
    old = [os.path.join(place, file) for place, _, files in os.walk(folder / "data")
           for file in files if file not in KEPT]
    for path in [*old, *folder.glob("*.py")]:
        os.unlink(path)
    for name, text in apps.items():
        (folder / f"{name}.py").write_text(text)
    restart(folder, **settings)
    yield m.project
    m.close_project()


@contextlib.contextmanager
def clocked(folder, apps):
    """Open a project that has a clock, for passes(); at the end all must be well with it."""
    with project(folder, apps, stock=0, min_sendwork_interval=0) as grid:
        assert not grid.errors
        grid.clock = NOW
        yield grid
        assert m.plugged("violations")[0]() == []
        assert grid.counts["stage errors"] == 0


def passes(grid, n=3):
    """Let seconds go by, each with a pass; a second one in the same second changes nothing."""
    for _ in range(n):
        grid.clock += 1
        m.run_pass(grid.clock)
        before = m.db.connection().total_changes
        m.run_pass(grid.clock)
        assert m.db.connection().total_changes == before


def restart(folder, **settings):
    """Open a project as a new process would, with whatever application files lie in its folder."""
    m.open_project(m.Settings(data=str(folder / "data"), **settings), random.Random(1), lock=False)
    m.db.execute_sql("PRAGMA synchronous = OFF")
    return m.sync_apps([folder], NOW - DAY)


def run_until_closed(server):
    """Run a server of waitress in a thread of its own, until its sockets are closed."""
    with contextlib.suppress(OSError):  # which its thread may be waiting for just then
        server.run()


def settings(**changes):
    """Change settings of the open project."""
    m.project.settings = m.dataclasses.replace(m.project.settings, **changes)


def add(app="near", number=0, now=NOW, **parameters):
    """Make one workunit in the store, with its first copies; return it."""
    given = {"input": b"%d" % number, **parameters}
    return m.project.write(lambda: m.plugged("add_work")[-1](m.apps[app], number, given, now))


def units():
    """All workunits, as the store has them."""
    return list(m.Workunit.select().order_by(m.Workunit.id))


def copies(**where):
    """All results, as the store has them."""
    return list(m.Result.select().filter(**where).order_by(m.Result.id))


def result(name):
    return m.Result.get(name=name)


def dump():
    """Everything the store holds."""
    return {table: m.db.execute_sql(f'SELECT * FROM "{table}" ORDER BY 1').fetchall()
            for table in m.db.get_tables()}


def output(name):
    """Where the output of a result lies, if it is none of the small ones."""
    return m.file_path("upload", f"{name}_out")


def kept(folder, name):
    """The bytes of an input or output, wherever it lies."""
    return m.plugged("file_content")[-1](folder, name)


# ---- Clients -------------------------------------------------------------------


serial = itertools.count()


@dataclass
class Client:
    """A client directory of a user: remembers its host id and counts its requests."""

    key: str = "ann"
    cpid: str = ""
    hostid: int = 0
    seqno: int = 0

    def __post_init__(self):
        m.User.get_or_create(authenticator=self.key, defaults=dict(create_time=0, name=self.key))
        self.cpid = self.cpid or f"client {next(serial)}"

    def ask(self, now=NOW, **more):
        """Send one request; return the reply."""
        request = m.Request(**{**dict(
            authenticator=self.key, hostid=self.hostid, rpc_seqno=self.seqno, host_cpid=self.cpid),
            **more})
        reply = m.project.write(lambda: m.schedule(request, now))
        if reply.hostid != self.hostid:
            self.hostid, self.seqno = reply.hostid, 0
        self.seqno += 1
        return reply

    def fetch(self, now=NOW, **more):
        """Ask for work; return the names of the results given."""
        reply = self.ask(now, **{**dict(work_req_seconds=1), **more})
        return [a.name for a in reply.assignments]

    def report(self, name, answer=None, now=NOW, **more):
        """Report a result, with its output, or without as an error; return the reply."""
        if answer is not None:
            output(name).write_text(answer)
        told = m.Report(name, client_state=3 if answer is None else 5,
                        exit_status=1 if answer is None else 0, elapsed_time=1)
        return self.ask(now, reports=[told], **more)

    def host(self):
        return m.Host.get_by_id(self.hostid)


def do(grid, client, answer):
    """Let a client do one task, whatever it is given, and the server look at it; its name."""
    names = client.fetch(grid.clock)
    assert len(names) == 1, client.host().why_no_work
    client.report(names[0], answer, grid.clock)
    passes(grid)
    return names[0]


def answered(*answers, clients=(), now=NOW, **parameters):
    """Make a workunit and have its copies answered, None being an error; return its name.

    The answers come from the clients given, or each from a user and a host of its own.
    """
    unit = add(now=now, **{**dict(min_quorum=len(answers)), **parameters})
    for n, answer in enumerate(answers):
        client = clients[n] if clients else Client(f"user {n}")
        (name,) = client.fetch(now)
        assert result(name).workunit_id == unit.id, "an older workunit has copies to send"
        client.report(name, answer, now)
    return unit.name
