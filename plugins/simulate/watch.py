"""What must hold all along [S4-29..S4-32 S4-61 S4-62 C23], and what became of every copy.

After each pass the rows that were touched are read from the store and compared with what they
were: that costs the same in a store of any size. Everything is looked at now and then, and at the
end.
"""

from collections import Counter, namedtuple

from minigrid import NEVER, Firing, Result, Rule, db, plugged, run_pass

START = 1_579_248_000  # the first second of every world, in the past: no file looks old in it
FILES_OF = 8  # files are looked at for one workunit of so many

Unit = namedtuple("Unit", "id name number app_id transition_time canonical_resultid error_mask "
                  "need_validate assimilate_state file_delete_state max_total_results")
Copy = namedtuple("Copy", "id workunit_id name host_id user_id server_state outcome "
                  "validate_state file_delete_state sent_time report_deadline received_time "
                  "granted_credit")
CHUNK = 500  # workunits read at once
OVER, IN_PROGRESS, NO_REPLY, SUCCESS, DETACHED, DIDNT_NEED = 5, 4, 4, 1, 7, 5
VALID, INVALID, TOO_LATE, READY, DONE = 1, 2, 5, 1, 2
CAUSES = {  # what the computing time of a copy was good for -> in words
    "used": "answers, and copies that confirmed them",
    "checks": "spot checks, and checks of other answers",
    "not needed": "right, but the answer was known already",
    "late": "came when nobody could use it any more",
    "wrong": "wrong answers",
    "errors": "failed, or could not be read",
    "lost": "never reported",
    "failed": "for workunits that were given up",
    "under way": "not settled at the end",
}


class Violation(Exception):
    """Something that must never be."""


class Watch:
    """A plugin that hears of every commit, and looks at what was changed; it changes nothing."""

    def __init__(self, world):
        self.world, self.touched, self.fired = world, set(), 0
        self.known = {}  # workunit id -> (Unit, {id: Copy}) as they were last seen
        self.decided = {}  # workunit id -> ids of the copies that made its answer
        self.spent, self.hours = Counter(), Counter()  # s of a copy's name; s by cause
        self.copies, self.answers = Counter(), []  # answers: when each was taken
        self.credit = Counter()  # of users, from copies that are purged
        self.at_commit = self.note  # where plugins are asked for their functions
        self.next_scan = 200
        self.looks = 0

    def note(self, done, now):
        """Note whose rows a transaction has touched."""
        self.fired += len(done)
        for rule, row in done:
            if isinstance(rule, Rule):
                self.touched.add(row.workunit_id if isinstance(row, Result) else row.id)

    def broken(self, text):
        """Say that something is wrong, and when. Raises Violation."""
        raise Violation(f"{(self.world.now - START) / 86400:.4f} days after the start: {text}")

    # ---- All along -----------------------------------------------------------------

    def look(self, now):
        """Compare what was touched with what it was; look at everything now and then."""
        ids, self.touched = sorted(self.touched), set()
        for k in range(0, len(ids), CHUNK):
            self.compare(read(ids[k:k + CHUNK]), ids[k:k + CHUNK], now)
        self.looks += 1
        if self.looks >= self.next_scan:  # As often as it costs no more than all the rest.
            self.next_scan = self.looks + max(200, len(self.known))
            self.scan()

    def compare(self, found, ids, now):
        """Hold that each workunit is sound, and has come from where it was in a way it may."""
        for wu_id in ids:
            unit, copies = found.get(wu_id, (None, {}))
            old_unit, old_copies = self.known.get(wu_id, (None, {}))
            if old_unit and (unit is None or unit.name != old_unit.name):
                self.purged(old_unit, old_copies)  # SQLite may give its number to another one.
                old_unit, old_copies = None, {}
            if unit is None:
                continue
            for text in (*wrong_changes(old_unit, old_copies, unit, copies),
                         *wrong_of(unit, copies, now)):
                self.broken(f"{unit.name}: {text}")
            if wu_id % FILES_OF == 0:
                self.look_at_files(old_unit, old_copies, unit, copies)
            if unit.canonical_resultid and wu_id not in self.decided:
                self.decided[wu_id] = {c.id for c in copies.values() if c.validate_state == VALID}
            if unit.assimilate_state == DONE and unit.number is not None \
                    and not (old_unit and old_unit.assimilate_state == DONE):
                self.answers.append(now)
            self.known[wu_id] = unit, copies

    def look_at_files(self, old_unit, old_copies, unit, copies):
        """Hold that files are there while they are needed, and gone once the store says so.

        Only where a state has changed; scan() looks at all files, now and then and at the end.
        """
        if old_unit is None or old_unit.file_delete_state != unit.file_delete_state:
            if unit.file_delete_state in (0, DONE):
                self.file("download", f"{unit.name}_in", unit.file_delete_state == 0)
        for copy in copies.values():
            old = old_copies.get(copy.id)
            if copy.file_delete_state == DONE and not (old and old.file_delete_state == DONE):
                self.file("upload", f"{copy.name}_out", False)
            elif copy.validate_state == VALID and copy.file_delete_state == 0 \
                    and not (old and old.validate_state == VALID):
                self.file("upload", f"{copy.name}_out", True)

    def file(self, folder, name, wanted):
        """Hold that a file is there, or is not."""
        if (plugged("file_size")[-1](folder, name) is not None) != wanted:
            self.broken(f"file {name} is {'missing' if wanted else 'still there'} [S4-32 S4-62]")

    def purged(self, unit, copies):
        """Hold that a workunit was done when it went; count what its copies were good for."""
        if unit.assimilate_state != DONE or unit.file_delete_state != DONE:
            self.broken(f"{unit.name} was purged before it was done [S4-31 S4-32]")
        for copy in copies.values():
            if copy.server_state != OVER:
                self.broken(f"{copy.name} was purged before it was over [S4-61]")
            self.credit[copy.user_id] += copy.granted_credit
        self.settle(unit, copies)
        del self.known[unit.id]
        self.decided.pop(unit.id, None)

    def second_pass(self, now):
        """Hold that a second pass at the same time changes nothing and fires nothing."""
        changes, fired = db.connection().total_changes, self.fired
        run_pass(now)
        if (db.connection().total_changes, self.fired) != (changes, fired):
            self.broken("a second pass at the same time has changed the store")

    def scan(self):
        """Hold the invariants of `minigrid check` over the whole store and all files."""
        found = plugged("violations")[-1]()
        if found:
            self.broken("; ".join(found))

    # ---- At the end ------------------------------------------------------------------

    def look_at_all(self, now):
        """Look at everything at the end; count what the copies that are left were good for."""
        for computer in self.world.computers:  # What they hold now was computed in vain.
            computer.drop(list(computer.jobs), now)
        self.look(now)
        self.scan()
        credit = Counter(self.credit)
        for user, granted in db.execute_sql("SELECT user_id, sum(granted_credit) FROM result "
                                            "WHERE user_id IS NOT NULL GROUP BY user_id"):
            credit[user] += granted
        for user, total in db.execute_sql("SELECT id, total_credit FROM user"):
            if abs(total - credit[user]) > 1e-6 * max(total, 1):
                self.broken(f"user {user} has {total} of credit and was granted {credit[user]} "
                            f"[S0-45]")
        for unit, copies in self.known.values():
            self.settle(unit, copies)
        for seconds in self.spent.values():  # of copies whose workunits were purged before
            self.hours["late"] += seconds / 3600
        self.spent.clear()

    def settle(self, unit, copies):
        """Count the computing time of a workunit's copies by what it was good for."""
        used = self.decided.get(unit.id, ())
        for copy in copies.values():
            if copy.sent_time:
                cause = cause_of(unit, copy, used)
                self.copies[cause] += 1
                self.hours[cause] += self.spent.pop(copy.name, 0) / 3600


def cause_of(unit, copy, used):
    """Return what a copy was good for: a key of CAUSES."""
    if copy.server_state != OVER:
        return "under way"
    if copy.outcome == NO_REPLY or copy.outcome == DETACHED:
        return "lost"
    if copy.outcome != SUCCESS:
        return "errors"
    if copy.validate_state == INVALID:
        return "wrong"
    if copy.validate_state == TOO_LATE:
        return "late"
    if unit.number is None:
        return "checks"
    if copy.validate_state == VALID:
        return "used" if copy.id in used else \
            "late" if copy.received_time > copy.report_deadline else "not needed"
    return "failed" if unit.error_mask else "under way"


def read(ids):
    """Read workunits and their copies from the store: {id: (Unit, {id: Copy})}."""
    listed = ", ".join(map(str, ids))
    found = {row[0]: (Unit(*row), {}) for row in db.execute_sql(
        f"SELECT {', '.join(Unit._fields)} FROM workunit WHERE id IN ({listed})")}
    for row in db.execute_sql(f"SELECT {', '.join(Copy._fields)} FROM result "
                              f"WHERE workunit_id IN ({listed}) ORDER BY id"):
        found[row[1]][1][row[0]] = Copy(*row)
    return found


def wrong_of(unit, copies, now):
    """Yield what is wrong with a workunit and its copies as they stand."""
    hosts, credits = [], set()
    for c in copies.values():
        if c.host_id is not None:
            hosts.append(c.host_id)
        if c.server_state == IN_PROGRESS:
            if c.host_id is None or not c.sent_time or not c.report_deadline:
                yield f"{c.name} is in progress without host, time or deadline [S4-33]"
            if unit.assimilate_state != READY \
                    and unit.transition_time > max(c.report_deadline, now):
                yield f"nothing waits for the deadline of {c.name} [S0-34]"
        if (c.server_state == OVER) != (c.outcome != 0):
            yield f"{c.name} is over without an outcome, or has one and is not [S4-41]"
        if c.validate_state and c.outcome not in (1, 3, 6):
            yield f"{c.name} has a verdict and was never reported [S4-54]"
        if c.validate_state == VALID:
            credits.add(c.granted_credit)
        elif c.granted_credit:
            yield f"{c.name} has credit and is not valid [S0-39]"
    if len(hosts) != len(set(hosts)):
        yield "two copies on one host [D8]"
    if credits and max(credits) - min(credits) > 1e-9:
        yield "valid copies have unequal credit [S0-45]"
    if len(copies) > unit.max_total_results:
        yield "more copies than max_total_results [C5]"
    canonical = copies.get(unit.canonical_resultid)
    if unit.canonical_resultid and not (canonical and canonical.outcome == SUCCESS
                                        and canonical.validate_state == VALID):
        yield "its canonical result is none of its valid ones [S4-01]"
    if unit.assimilate_state and not unit.canonical_resultid and not unit.error_mask:
        yield "assimilated without answer or error [S4-29 S4-31]"
    if unit.file_delete_state and (unit.assimilate_state != DONE or any(
            c.server_state != OVER for c in copies.values())):
        yield "inputs freed while a copy is under way [S4-32]"
    if unit.transition_time == NEVER and not unit.need_validate and not unit.assimilate_state:
        yield "nothing will ever wake it [S4-29 S4-30]"


def wrong_changes(old, old_copies, unit, copies):
    """Yield what cannot have become of a workunit and its copies since they were last seen."""
    if old is None:
        return
    if old.assimilate_state == DONE != unit.assimilate_state:
        yield "was assimilated and waits for it again [S4-31 C23]"
    if old.canonical_resultid and unit.canonical_resultid != old.canonical_resultid:
        yield "has another canonical result than before [S4-01]"
    if old.error_mask & ~unit.error_mask:
        yield "has lost an error bit [C18]"
    for rid, before in old_copies.items():
        c = copies.get(rid)
        if c is None:
            yield f"{before.name} is gone"
        elif before.granted_credit and c.granted_credit != before.granted_credit:
            yield f"{c.name} has another credit than it was granted [C23]"
        elif before.server_state == OVER != c.server_state:
            yield f"{c.name} was over and is not any more [S4-61]"
        elif before.validate_state == VALID != c.validate_state:
            yield f"{c.name} was valid and is not any more [S4-55]"


def fired():
    """Return how often each rule has fired: {name: n}."""
    counts = Counter()
    for row in Firing.select():
        counts[row.rule] += row.n
    return counts


def black_listed(now):
    """Return the ids of the hosts that are black-listed now, and of those that ever were."""
    listed, ever = set(), set()
    for model in sum(plugged("TABLES"), ()):
        if model.__name__ == "BlackEntry":
            for entry in model.select():
                ever.add(entry.host)
                if not entry.ended and (not entry.end or entry.end > now):
                    listed.add(entry.host)
    return listed, ever
