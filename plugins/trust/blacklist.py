"""The black list: who is believed no more, why, for how long, and how they come back [D10 C36].

Two levels: no work but spot checks; no connection at all. Each entry has a reason, evidence, and an
end. It is followed by how often each host was right, for each application, which costs two small
rows for each verdict and never a scan.
"""

import re
import time
from dataclasses import dataclass

from peewee import SQL, BigIntegerField, CharField, FloatField, IntegerField, TextField

from minigrid import (IN_PROGRESS, ClientError, Host, Outcome, Record, Result, ServerState,
                      ValidateState, Workunit, canonical_json, db, explain, fire, output_files,
                      plugged, prepared, rule, setting)

OPEN = SQL("ended = 0")
NO_WORK, REFUSED = 1, 2  # the levels [C36]
SERVED = "its time is over"
REPEATED = "wrong again: see the next entry"
AT_ONCE = ("none", "check", "inverse", "recheck")  # X-Com's ways: one wrong answer is enough
ALONE = ("recheck", "adaptive")  # may take one host's word, and need not
HALF_LIFE = 30 * 86400  # s after which an answer counts half in the error rate of an application
EPOCH = 1_600_000_000  # a moment as good as any, not far in the past
LAST, VOTES = 20, 10  # answers that are remembered one by one; those that votes are judged by
HOSTS_MIN = 4  # judged hosts that it takes to doubt an application
DAYS_MAX = 36500  # of any entry: later dates are beyond what systems can write
SAID_BYTES = 80  # of a wrong output that the evidence shows

BLACK_LIST = rule(
    "black-list", "validator", "S3-29 S3-33 S3-39 C36",
    "its host gave a wrong answer: it gets no more tasks, but spot checks, or is refused",
    dict(validate_state={ValidateState.INVALID}), {})
EARNED_BACK = rule(
    "earn trust back", "validator", "C36",
    "enough right answers to spot checks: the entry in the black list ends",
    dict(validate_state={ValidateState.VALID}), {})


@dataclass(frozen=True)
class Settings:
    """The [trust] section of setup.cfg."""

    black_list: str = setting("normal", "normal; literal: one wrong answer and never again; off")
    days: float = setting(7, "of a first entry; each further one in a row is twice as long")
    entries_until_refused: int = setting(3, "entries in a row after which a host is refused; 0: no")
    right_wanted: int = setting(3, "spot checks answered right in a row that end an entry; 0: none")
    votes_lost: int = setting(3, "wrong ones of the last ten answers that make an entry by quorum")
    spot_check_rate: float = setting(0.01, "share of requests for work that get a spot check")
    pool: int = setting(20, "settled workunits of an application kept for spot checks")
    pool_days: float = setting(1, "for how long one is kept")


settings = Settings()


def check_settings(given):
    """Return settings that make sense. Raises ClientError."""
    for name in ("days", "pool_days"):
        if not getattr(given, name) <= DAYS_MAX:
            raise ClientError(f"setup.cfg: section [trust]: {name} must be at most {DAYS_MAX}, a "
                              f"century; found {getattr(given, name):g}")
    try:
        check_mode(given.black_list), check_rate(given.spot_check_rate)
    except ValueError as error:
        raise ClientError(f"setup.cfg: section [trust]: {error}; found black_list = "
                          f"{given.black_list[:50]}, spot_check_rate = "
                          f"{given.spot_check_rate:g}") from None
    return given


def check_mode(value):
    """Return a value of `black_list`. Raises ValueError."""
    if value not in ("normal", "literal", "off"):
        raise ValueError("black_list must be 'normal', 'literal' or 'off'")
    return value


def check_rate(value):
    """Return a share of requests. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError("the share of spot checks must be a number between 0 and 1")
    return float(value)


def black_list_mode(application):
    """Say how strict an application is: "normal", "literal" [S3-29 S3-39] or "off"."""
    return application.policies.get("black_list", settings.black_list)


# ---- Tables --------------------------------------------------------------------


class BlackEntry(Record):
    """One entry of the black list; it stays as history when it has ended."""

    host = IntegerField(index=True)
    user = IntegerField()
    app = IntegerField(null=True)  # None: all applications
    level = IntegerField()
    rule = CharField()  # the id of RULES.md, or who has entered it
    reason = TextField()  # a sentence
    evidence = TextField(default="{}")  # JSON: workunit, result, what it said, who disagreed
    begin = BigIntegerField()
    end = BigIntegerField(default=0)  # 0: only a pardon, or right spot checks, end it
    ended = BigIntegerField(default=0)  # 0: it is in force
    ended_why = TextField(default="")
    right = IntegerField(default=0)  # spot checks in a row
    wanted = IntegerField(default=0)  # so many end it; 0: none do
    parent = IntegerField(default=0)  # the entry of another host of the user that it follows


BlackEntry.add_index(BlackEntry.index(BlackEntry.user, where=OPEN, name="black_entry_open"))


class Standing(Record):
    """How often a host was right in an application, where its answers were compared."""

    host = IntegerField()
    app = IntegerField()
    checked = IntegerField(default=0)
    wrong = IntegerField(default=0)
    run = IntegerField(default=0)  # right ones since the last wrong one
    recent = IntegerField(default=0)  # the last twenty as bits, the last one lowest; 1 is wrong
    spot_right = IntegerField(default=0)
    spot_wrong = IntegerField(default=0)
    fresh_checked = FloatField(default=0)  # its part in the error rate of the application, in
    fresh_wrong = FloatField(default=0)  # the measure of weight()

    class Meta:
        indexes = ((("host", "app"), True),)


class Measured(Record):
    """The same for all hosts of an application together, without those on the black list."""

    app = IntegerField(unique=True)
    hosts = IntegerField(default=0)  # that were ever right
    losers = IntegerField(default=0)  # those of them with wrong ones among the last twenty
    fresh_checked = FloatField(default=0)
    fresh_wrong = FloatField(default=0)
    spot_right = IntegerField(default=0)
    spot_wrong = IntegerField(default=0)


class HandedOn(Record):
    """A task that another computer of its volunteer reported than was given it [C43].

    Who was given it answers for it, or a liar would report by a fresh host each time, and stay in
    good standing itself.
    """

    result = CharField(unique=True)
    host = IntegerField()
    time = IntegerField()


TABLES = (BlackEntry, Standing, Measured, HandedOn)


# ---- How often hosts are right ---------------------------------------------------


COUNT = f"""INSERT INTO standing (host, app, checked, wrong, run, recent, spot_right, spot_wrong,
fresh_checked, fresh_wrong) VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (host, app) DO UPDATE
SET checked = checked + 1, wrong = wrong + excluded.wrong, run = (run + 1) * excluded.run,
recent = (recent << 1 | excluded.wrong) & {(1 << LAST) - 1},
spot_right = spot_right + excluded.spot_right,
spot_wrong = spot_wrong + excluded.spot_wrong, fresh_checked = fresh_checked +
excluded.fresh_checked, fresh_wrong = fresh_wrong + excluded.fresh_wrong"""
ADD = """INSERT INTO measured (app, hosts, losers, fresh_checked, fresh_wrong, spot_right,
spot_wrong)
VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (app) DO UPDATE SET hosts = hosts + excluded.hosts,
losers = losers + excluded.losers, fresh_checked = fresh_checked + excluded.fresh_checked,
fresh_wrong = fresh_wrong + excluded.fresh_wrong, spot_right = spot_right + excluded.spot_right,
spot_wrong = spot_wrong + excluded.spot_wrong"""


def weight(now):
    """Return what an answer of this moment weighs: twice as much as one a month before.

    So all that is old counts less and less without being written again.
    """
    return 2.0 ** ((now - EPOCH) / HALF_LIFE)


def count(app_id, answers, now):
    """Count the compared answers of one workunit: [(host id, wrong, a spot check, trusted)].

    Each verdict pays for this, so it is one look-up and two statements. Runs in the writer.
    """
    hosts = [answer[0] for answer in answers]
    before = {host: rest for host, *rest in db.execute_sql(
        "SELECT host, recent, checked > wrong FROM standing WHERE app = ? AND host IN "
        f"({'?, ' * len(hosts)}NULL)", (app_id, *hosts)).fetchall()}
    rows, sums = [], [0] * 6
    for host, wrong, spot, trusted in answers:
        fresh = weight(now) * trusted  # A known liar says nothing about the others.
        rows.append((host, app_id, wrong, 1 - wrong, wrong, spot * (1 - wrong), spot * wrong,
                     fresh, fresh * wrong))
        # Who was never right is no sign of a faulty application: a thousand new liars are none.
        recent, known = before.get(host, (0, 0))
        later, known_now = (recent << 1 | wrong) & (1 << LAST) - 1, known or not wrong
        parts = (known_now - known, bool(later and known_now) - bool(recent and known), fresh,
                 fresh * wrong, spot * (1 - wrong), spot * wrong)
        sums = [total + part for total, part in zip(sums, parts)]
    db.connection().executemany(COUNT, rows)
    db.execute_sql(ADD, (app_id, *sums))


def figures_of(host_id, app_id):
    """Return what is known of a host in an application, and of the application."""
    return (Standing.get(Standing.host == host_id, Standing.app == app_id),
            Measured.get(Measured.app == app_id))


def forget(host_id, app_id):
    """Take a host that is black-listed out of the error rate of an application, or of all."""
    for mine in Standing.select().where(
            Standing.host == host_id, *[Standing.app == app_id] * (app_id is not None)):
        all_ = Measured.get(Measured.app == mine.app)
        all_.fresh_checked = max(all_.fresh_checked - mine.fresh_checked, 0)
        all_.fresh_wrong = max(all_.fresh_wrong - mine.fresh_wrong, 0)
        all_.save()
        mine.fresh_checked = mine.fresh_wrong = 0
        mine.save()


def standing_of(host_ids, app_id):
    """Return what is known of hosts in an application: {host id: Standing}."""
    return {row.host: row for row in Standing.select().where(
        Standing.host.in_(list(host_ids)), Standing.app == app_id)}


def error_rate(app_id, now):
    """Return (wrong, compared) answers of hosts in good standing; a month old, they count half."""
    row = Measured.get_or_none(Measured.app == app_id)
    if row is None:
        return 0.0, 0.0
    return row.fresh_wrong / weight(now), row.fresh_checked / weight(now)


def is_doubtful(all_):
    """Say whether so many hosts lose votes that the application itself must be at fault."""
    return all_.hosts >= HOSTS_MIN and 2 * all_.losers > all_.hosts


# ---- Entries ---------------------------------------------------------------------


def date(t):
    """Write a time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t))


def entries_of(host, now):
    """Return the entries in force for a host. Runs in the writer.

    A new host of a volunteer who has one on the list begins with an entry of its own: to attach
    anew is no way out. Its way back is the short one, right spot checks.
    """
    if not anybody():
        return []
    rows = [entry for entry in BlackEntry.select().where(OPEN, BlackEntry.user == host.user_id)
            if not 0 < entry.end <= now]
    own = [entry for entry in rows if entry.host == host.id]
    for entry in rows:
        if entry.host != host.id and not entry.parent and entry.begin < host.create_time \
                and not in_force(own, entry.app) and not BlackEntry.select().where(
                    BlackEntry.host == host.id, BlackEntry.parent == entry.id).exists():
            own.append(enter(host, entry.app, NO_WORK, "C36", f"it is new, and the same "
                             f"volunteer's computer {entry.host} is on the black list",
                             dict(entry=entry.id), now, entry.end, entry.id))
    return own


def open_entries(host_ids, now):
    """Return the entries in force of some hosts as they stand in the store."""
    return [entry for entry in BlackEntry.select().where(BlackEntry.host.in_(host_ids), OPEN)
            if not 0 < entry.end <= now] if anybody() else []


def anybody():
    """Say whether there is any entry in force: one look into an index that is mostly empty."""
    return db.connection().execute(
        "SELECT EXISTS (SELECT 1 FROM black_entry WHERE ended = 0)").fetchone()[0]


def in_force(entries, app_id):
    """Return the entry that counts for an application; None: there is none."""
    return next((e for e in entries if e.app is None or e.app == app_id), None)


def enter(host, app_id, level, rule_id, reason, evidence, now, end, parent=0, wanted=None):
    """Make an entry; return it. Runs in the writer."""
    entry = BlackEntry.create(
        host=host.id, user=host.user_id, app=app_id, level=level, rule=rule_id, reason=reason,
        evidence=canonical_json(evidence), begin=now, end=end, parent=parent,
        wanted=settings.right_wanted if wanted is None else wanted)
    forget(host.id, app_id)
    if level == REFUSED:
        take_back(host.id, now)
    explain(host, f"black list: {says(entry)}")
    return entry


def take_back(host_id, now):
    """Let others have at once what a host holds that is refused: its reports are not taken."""
    held = (IN_PROGRESS, Result.host == host_id)
    Workunit.update(transition_time=now).where(
        Workunit.id.in_(Result.select(Result.workunit).where(*held)),
        Workunit.transition_time > now).execute()
    Result.update(report_deadline=now).where(*held, Result.report_deadline > now).execute()


def close(entry, why, now):
    """End an entry, and those that only followed from it. Runs in the writer."""
    BlackEntry.update(ended=now, ended_why=why).where(
        OPEN, (BlackEntry.id == entry.id) | (BlackEntry.parent == entry.id)).execute()
    entry.ended, entry.ended_why = now, why


def replace(entry, by, why, now):
    """End an entry for a newer one of its host, which those that followed from it follow now.

    Else a volunteer's further computers would be free as soon as the first is wrong again. Runs in
    the writer.
    """
    BlackEntry.update(parent=by.id, end=by.end).where(OPEN, BlackEntry.parent == entry.id).execute()
    close(entry, why, now)


def says(entry):
    """Put an entry into a sentence: what, until when, why."""
    what = "refused" if entry.level == REFUSED else "no work but spot checks" if entry.wanted \
        else "no work"
    until = f"until {date(entry.end)}" if entry.end else "with no end of its own"
    return f"{what} {until}: {entry.reason}"


def way_back(entry):
    """Say what ends an entry before its time."""
    if entry.level == REFUSED or not entry.wanted:
        return "a pardon by the project"
    return f"{entry.right} of {entry.wanted} right answers to spot checks in a row"


def served(now):
    """End the entries whose time is over; return how many. Runs in the writer."""
    return BlackEntry.update(ended=now, ended_why=SERVED).where(
        OPEN, BlackEntry.end > 0, BlackEntry.end <= now).execute()


def pardon(host_id, why, now):
    """End all entries of a host; return how many there were. Runs in the writer."""
    rows = open_entries([host_id], now)
    for entry in rows:
        close(entry, why, now)
        explain(Host(id=host_id), f"black list: the entry of {date(entry.begin)} has ended: {why}")
    return len(rows)


# ---- Offences --------------------------------------------------------------------


@dataclass
class Case:
    """A wrong answer and all that is known of it."""

    application: object
    wu: Workunit
    r: Result
    host: object
    told: bool  # by the application or a known answer, not by a vote
    against: list  # ids of the hosts that agree on another answer


def offend(case, known, is_check, now):
    """Decide what a wrong answer means for its host [S3-29 S3-33 S3-39 C36]."""
    mode, policy = black_list_mode(case.application), case.application.policies["validation"]
    mine, all_ = figures_of(case.host.id, case.wu.app_id)
    if known and is_check:  # The way back is of right answers in a row.
        known.right = 0
        known.save()
    lost = bin(mine.recent & (1 << VOTES) - 1).count("1")
    if mode == "off":
        why_not = "this application has no black list"
    elif mode == "literal":
        why_not = "" if known is None or known.level < REFUSED else "it is refused already"
    elif known and case.r.sent_time <= known.begin:
        why_not = f"it was sent before the entry of {date(known.begin)}"
    elif not case.told and is_doubtful(all_) and lost < VOTES:
        why_not = f"{all_.losers} of {all_.hosts} hosts lose votes: the application is in doubt, " \
                  f"and an entry takes {VOTES} wrong answers in a row"
    elif not case.told and not known and policy not in AT_ONCE and lost < settings.votes_lost:
        why_not = f"{lost} of its last {min(mine.checked, VOTES)} answers are wrong, an entry " \
                  f"takes {settings.votes_lost}"
    else:
        why_not = ""
    if why_not:
        explain(case.r, f"wrong, but no new entry in the black list: {why_not}")
        return
    sentence(case, mode, policy, lost, mine, known, now)


def sentence(case, mode, policy, lost, mine, known, now):
    """Enter a host for a wrong answer: longer each time, in the end refused [C36]."""
    others = "1 other says" if len(case.against) == 1 else f"{len(case.against)} others agree on"
    by = {"check": "S3-29", "inverse": "S3-33"}.get(policy, "S3-29") if case.told else "S3-39"
    reason = f"its answer {case.r.name} is wrong: " + (
        "the application says so" if case.told and policy == "check" else
        "it did not stand the test" if case.told else
        f"{others} another one" + f", and {lost} of its last {min(mine.checked, VOTES)} answers "
        f"are wrong" * (lost > 1))
    evidence = dict(workunit=case.wu.name, result=case.r.name, said=said(case.r),
                    against=case.against, wrong=mine.wrong, checked=mine.checked)
    if mode == "literal":
        level, end, app_id, wanted = REFUSED, 0, None, 0
    else:
        n = in_a_row(case.host.id, case.wu.app_id)
        refuse = 0 < settings.entries_until_refused <= n + 1
        level, app_id, wanted = REFUSED if refuse else NO_WORK, case.wu.app_id, None
        end = now + int(settings.days * 86400 * 2 ** min(n, 10))
    entry = enter(case.host, app_id, level, by, reason, evidence, now, end, wanted=wanted)
    if known:
        replace(known, entry, REPEATED, now)
    fire(BLACK_LIST, case.r)
    explain(case.r, f"its host {case.host.id} is on the black list: {says(entry)}")
    if policy in ALONE:
        doubt_what_it_holds(case.host.id, case.wu.app_id, now)


def in_a_row(host_id, app_id):
    """Count the last entries of a host that nobody and nothing has pardoned."""
    n = 0
    for entry in (BlackEntry.select().where(BlackEntry.host == host_id, BlackEntry.app == app_id,
                                            BlackEntry.parent == 0, BlackEntry.rule != "operator")
                  .order_by(BlackEntry.id.desc()).limit(12)):
        if entry.ended and entry.ended_why not in (SERVED, REPEATED):
            break
        n += 1
    return n


def said(r):
    """Return how a wrong output begins, as text."""
    try:
        text = plugged("file_content")[-1]("upload", output_files(r)[0]["name"], SAID_BYTES + 1)
    except OSError:
        return ""
    shown = re.sub(r"[^ -~]", "?", text[:SAID_BYTES].decode("ascii", "replace"))
    return shown + " ..." * (len(text) > SAID_BYTES)


def doubt_what_it_holds(host_id, app_id, now):
    """Let others check what a host found out still holds, where its word alone would have done."""
    alone = Result.select(Result.workunit).where(
        Result.host == host_id, Result.app == app_id,
        (Result.server_state == ServerState.IN_PROGRESS)
        | (Result.outcome == Outcome.SUCCESS) & (Result.validate_state == ValidateState.INIT))
    Workunit.update(min_quorum=2, target_nresults=2, transition_time=now).where(
        Workunit.id.in_(alone), Workunit.min_quorum == 1, Workunit.canonical_resultid == 0,
        Workunit.error_mask == 0, Workunit.number.is_null(False),
        Workunit.max_success_results > 1).execute()


def reward(r, host, now):
    """Count a right answer to a spot check; enough of them end the host's entry [C36]."""
    for entry in BlackEntry.select().where(OPEN, BlackEntry.host == host.id):
        if entry.wanted and entry.app in (None, r.app_id) and r.sent_time >= entry.begin:
            entry.right += 1
            entry.save()
            if entry.right >= entry.wanted and entry.level == NO_WORK:
                close(entry, f"earned back: {entry.right} right answers to spot checks in a row",
                      now)
                fire(EARNED_BACK, r)
                explain(host, f"black list: {entry.ended_why}")


def handed_on(r, host, now):
    """Note who was given a task, before the row says who has reported it. In the writer."""
    HandedOn.replace(result=r.name, host=r.host_id, time=now).execute()
    explain(r, f"computer {host.id} reports what its volunteer's computer {r.host_id} was given, "
               f"which answers for it")


def answerable(compared):
    """Return [(result, host)] with the hosts that were given the tasks, whoever reported them."""
    given = dict(handed_on_of([r.name for r, _ in compared]))
    rows = {host.id: host for host in Host.select().where(
        Host.id.in_(list(given.values())))} if given else {}
    return [(r, rows.get(given.get(r.name), host)) for r, host in compared]


@prepared
def handed_on_of(names):
    """Find which of these results were handed on, and to whom they had been given."""
    return HandedOn.select(HandedOn.result, HandedOn.host).where(
        HandedOn.result.in_(names)).tuples()


def forget_old(now):
    """Forget what is over: entries that ended more than a year ago. Runs in the writer."""
    HandedOn.delete().where(HandedOn.time < now - 365 * 86400).execute()
    BlackEntry.delete().where(BlackEntry.ended > 0, BlackEntry.ended < now - 365 * 86400).execute()
