"""Faults of the server's machine and of its programs, at times that the seed says."""

import contextlib
import errno
import os
import sqlite3
from types import SimpleNamespace

from minigrid import PluginError, Workunit, apps, db, file_path, plugged, plugins, project

HOUR, DAY = 3600, 86400
STATEMENTS = 400  # a crash comes at one of so many statements and flushes after it was armed
HOOKS = ("workunit", "parse", "compare", "assimilate")
SEAMS = ("at_contact", "at_send", "at_verdict", "at_commit")  # of plugins


class Crash(BaseException):
    """The server's process ends here, whatever it was about to do."""


class Cursor(sqlite3.Cursor):
    """Counts statements, and dies at one of them, before or after it was carried out."""

    def execute(self, sql, *arguments):
        """Carry out a statement; none can be committed while the disk is full."""
        after = self.connection.faults.count()
        if sql == "COMMIT" and self.connection.faults.disk_full:
            raise sqlite3.OperationalError("database or disk is full")
        super().execute(sql, *arguments)
        if after:
            raise Crash
        return self

    def executemany(self, *arguments):
        """Carry out a statement many times."""
        after = self.connection.faults.count()
        super().executemany(*arguments)
        if after:
            raise Crash
        return self


class Connection(sqlite3.Connection):
    """A connection whose statements are counted; `faults` is set by those."""

    faults = None

    def cursor(self, *arguments):
        """Return a cursor that counts."""
        return super().cursor(Cursor)

    def executemany(self, *arguments):
        """Carry out a statement many times."""
        return self.cursor().executemany(*arguments)


class Faults:
    """What is wrong just now, and when something goes wrong next."""

    def __init__(self, world):
        self.world, self.left, self.after, self.crashed = world, 0, False, False
        self.disk_full, self.raising, self.until = False, None, 0
        self.crashes = self.errors = self.errors_seen = 0

    def at_work(self):
        """Say whether something may fail just now that otherwise must not."""
        return self.crashed or self.disk_full or self.raising is not None \
            or self.world.now <= self.until

    # ---- How it is done --------------------------------------------------------------

    def prepare(self):
        """Let the store be opened by connections that can die; only where any will."""
        if self.world.plan.crashes or self.world.plan.disk_full:
            Connection.faults = self
            db.connect_params["factory"] = Connection

    def attach(self):
        """Begin anew with a store that was just opened."""
        self.errors_seen = 0

    def detach(self):
        """Let things be as they were."""
        db.connect_params.pop("factory", None)
        if self.raising in plugins:
            plugins.remove(self.raising)
        Connection.faults, self.left = None, 0

    def count(self):
        """Count one statement or flush; raise Crash if it is the last one, or say: after it."""
        if not self.left:
            return False
        self.left -= 1
        if self.left:
            return False
        self.crashed = True
        if self.after:
            return True
        raise Crash

    def fsync(self, file):
        """Stand for os.fsync(): nothing waits for the disk here, but it may be full, or the end."""
        if self.disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.count():
            raise Crash

    @contextlib.contextmanager
    def spared(self):
        """Context: what the simulator itself does is no statement of the server's."""
        left, self.left = self.left, 0
        yield
        self.left = left

    # ---- What happens when -------------------------------------------------------------

    def begin(self):
        """Enter the first fault of each kind among the world's events."""
        plan = self.world.plan
        for rate, what in ((plan.crashes, self.crash), (plan.disk_full, self.fill),
                           (plan.raising, self.break_plugin), (plan.cancels, self.cancel)):
            if rate:
                self.world.later(DAY / rate, what)

    def crash(self):
        """Let the process be killed at some statement or flush from now on."""
        rng = self.world.rng
        self.left, self.after = self.left or rng.randrange(1, STATEMENTS), rng.random() < 0.5
        self.world.later(DAY / self.world.plan.crashes, self.crash)

    def restart(self):
        """Start the server again after a crash, as a new process would."""
        self.crashed, self.left, project.write.working = False, 0, None
        self.disk_full = False  # Whoever starts it again makes room first.
        self.crashes += 1
        was, self.raising = self.raising, None
        if was in plugins:
            plugins.remove(was)
        self.world.watch.touched.update(self.world.watch.known)
        self.world.open()
        self.until = self.world.now

    def fill(self):
        """Let the disk be full for an hour: nothing can be written to store or files."""
        self.disk_full = True
        self.world.later(HOUR, self.make_room)

    def make_room(self):
        """Let there be room again."""
        self.disk_full, self.until = False, self.world.now
        self.world.later(DAY / self.world.plan.disk_full, self.fill)

    def break_plugin(self):
        """Let a hook of an application, or a plugin, raise an exception for an hour."""
        rng = self.world.rng
        if rng.random() < 0.5:
            application = apps[rng.choice(sorted(apps))]
            name = rng.choice(HOOKS)
            self.raising = SimpleNamespace(hook=(application.name, name,
                                                 application.hooks[name]))
            application.hooks[name] = self.hook_fails
        else:
            self.raising = SimpleNamespace(hook=None, **{rng.choice(SEAMS): self.plugin_fails})
            plugins.append(self.raising)
        self.world.later(HOUR, self.mend)

    def hook_fails(self, *arguments):
        """Stand for a hook of an application that has a fault."""
        raise PluginError("the simulated fault of an application")

    def plugin_fails(self, *arguments):
        """Stand for a plugin that has a fault, but not each time."""
        if self.world.rng.random() < 0.2:
            raise RuntimeError("the simulated fault of a plugin")

    def mend(self):
        """Let hooks and plugins work again, as after a new start of the server."""
        if self.raising in plugins:
            plugins.remove(self.raising)
        elif self.raising and self.raising.hook:
            app, name, hook = self.raising.hook
            apps[app].hooks[name] = hook
        self.raising, self.until = None, self.world.now
        self.world.later(DAY / self.world.plan.raising, self.break_plugin)

    def cancel(self):
        """Let the owner cancel two workunits that are not done."""
        some = Workunit.select(Workunit.id).where(Workunit.assimilate_state == 0).limit(2)
        ids = [row.id for row in some]
        with self.refusal():
            project.write(lambda: plugged("cancel_workunits")[-1](ids, self.world.now))
        self.world.later(DAY / self.world.plan.cancels, self.cancel)

    @contextlib.contextmanager
    def refusal(self):
        """Context: what fails may fail if something is wrong just now."""
        try:
            yield
        except Exception:
            if not self.at_work():
                raise

    def count_errors(self):
        """Hold that a stage has failed only where something was wrong."""
        errors = project.counts["stage errors"]
        if errors > self.errors_seen and not self.at_work():
            self.world.watch.broken(f"a stage has failed: {project.errors[-1][1]}")
        self.errors += errors - self.errors_seen
        self.errors_seen = errors

    @contextlib.contextmanager
    def unreadable(self):
        """Now and then an output cannot be read or deleted for the length of a pass."""
        world = self.world
        path = self.choose() if world.plan.unreadable \
            and world.rng.random() < world.plan.unreadable else None
        if path is None:
            yield
            return
        hidden = path.with_name("hidden")
        path.rename(hidden)
        path.mkdir()  # Neither readable nor deletable, also for root.
        try:
            yield
        finally:
            path.rmdir()
            hidden.rename(path)
            self.until = world.now  # What was put off has its turn in the next pass.
            project.retry_files_at = 0

    def choose(self):
        """Return the output that the next pass will want to read, or to delete."""
        waiting = "outcome = 1 AND validate_state IN (0, 4)"
        undecided = {name for name, in db.execute_sql(
            f"SELECT name FROM result WHERE {waiting} AND workunit_id IN (SELECT workunit_id "
            f"FROM result WHERE {waiting} GROUP BY workunit_id HAVING count(*) > 2)")}
        freed = {name for name, in db.execute_sql(
            "SELECT r.name FROM result r JOIN workunit w ON w.id = r.workunit_id "
            "WHERE w.assimilate_state = 2 AND r.file_delete_state = 0 AND w.transition_time < ?",
            (self.world.now,))}
        wanted = freed if freed and self.world.rng.random() < 0.5 else undecided
        paths = [path for name in sorted(wanted)
                 if (path := file_path("upload", f"{name}_out")).is_file()]
        return self.world.rng.choice(paths) if paths else None
