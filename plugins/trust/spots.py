"""Spot checks: tasks whose answer is known, mixed in among the others [D10 C36].

Settled workunits are used again: one more copy that is never sent keeps inputs and answer where
they are for a day (INACTIVE, the state that BOINC has and nobody used). A spot check is a further
copy, sent and judged like any other, so that only its lateness could betray it.
"""

from types import SimpleNamespace

from peewee import BigIntegerField, CharField, IntegerField

from minigrid import (AssimilateState, FileDeleteState, Outcome, Record, Result, ServerState,
                      Workunit, apps, change, db, fire, plugged, project, rule)

from . import blacklist

S = ServerState
OPEN, RIGHT, WRONG, NOTHING = 0, 1, 2, 3  # what a spot check found
NEEDS_CHECKS = ("recheck", "adaptive")  # policies that leave answers uncompared
SURE = ("check", "inverse")  # policies that need no second answer to be sure of one

KEEP = rule(
    "keep for spot checks", "validator", "C36",
    "its answer is certain: a copy that is never sent keeps the files, so that others can be asked",
    dict(server_state={S.UNSENT}), dict(server_state=S.INACTIVE))
SPOT_CHECK = rule(
    "spot check", "scheduler", "C36 S3-39", "the answer is known, and shows what the host is worth",
    dict(server_state={S.IN_PROGRESS}), {})
LET_GO = rule(
    "no more spot checks", "validator", "C36",
    "it was kept for spot checks for a day, or its application asks for it again",
    dict(server_state={S.INACTIVE}), dict(server_state=S.OVER, outcome=Outcome.DIDNT_NEED))


class Kept(Record):
    """A settled workunit of the pool; its files stay because of one copy that is INACTIVE."""

    workunit = IntegerField(unique=True)
    app = IntegerField(index=True)
    until = BigIntegerField(index=True)


class SpotCheck(Record):
    """One spot check of a host."""

    workunit = IntegerField(index=True)
    result = CharField()
    app = IntegerField()
    host = IntegerField(index=True)
    sent = BigIntegerField(index=True)
    found = IntegerField(default=OPEN)


TABLES = (Kept, SpotCheck)


def rate_of(application):
    """Return the share of requests for work of an application that get a spot check."""
    chosen = application.policies.get("spot_checks")
    for choose in plugged("spot_check_rate") if chosen is None else ():
        chosen = choose(application)  # An error budget knows how much is needed.
    if chosen is None and application.policies["validation"] in NEEDS_CHECKS:
        chosen = blacklist.settings.spot_check_rate
    return chosen or 0.0  # Where every answer is compared, they would find nothing more.


# ---- The pool --------------------------------------------------------------------


def is_certain(application, verdict):
    """Say whether a canonical answer is more than one host's word."""
    return verdict.canonical not in verdict.unchecked and (
        verdict.known or len(verdict.matching) > 1 or application.policies["validation"] in SURE)


def keep(application, wu, verdict, now):
    """Keep a workunit that has just been decided for spot checks, sometimes. In the writer."""
    rate = rate_of(application)
    wanted = blacklist.anybody()  # Somebody is on the way back.
    if not wanted and not rate or wu.number is None or wu.error_mask \
            or wu.assimilate_state != AssimilateState.READY \
            or wu.file_delete_state != FileDeleteState.INIT or not is_certain(application, verdict):
        return
    if Kept.select().where(Kept.app == wu.app_id).count() >= blacklist.settings.pool \
            or not wanted and project.rng.random() >= 2 * rate:
        return  # Each serves several hosts, so twice as many as checks are plenty.
    names = [r.name for r in Result.select(Result.name).where(Result.workunit == wu.id)]
    if len(names) + 2 > wu.max_total_results:
        return  # No copy could be sent.
    holder = next_copy(wu, names, now)
    holder.name = f"{wu.name}_{wu.max_total_results}"  # A gap in the numbers would betray it.
    fire(KEEP, holder)
    holder.save(force_insert=True)
    Kept.create(workunit=wu.id, app=wu.app_id,
                until=now + int(blacklist.settings.pool_days * 86400))


def next_copy(wu, names, now):
    """Return one more copy of a workunit, unsaved, named like any other."""
    n = max(int(name.rpartition("_")[2]) for name in names) + 1
    return Result(workunit=wu.id, app=wu.app_id, name=f"{wu.name}_{n}", create_time=now,
                  priority=wu.priority)


def let_go(now):
    """Stage: let go of what was kept long enough, and end what is over on the black list.

    An application that deferred its answer waits until all copies are over: at once, then.
    """
    due = [row[0] for row in db.execute_sql(
        "SELECT k.workunit FROM kept k LEFT JOIN workunit w ON w.id = k.workunit "
        "WHERE k.until <= ? OR w.assimilate_state = 0 LIMIT 100", (now,))]
    (late,) = db.execute_sql("SELECT EXISTS (SELECT 1 FROM black_entry WHERE ended = 0 "
                             "AND end > 0 AND end <= ?)", (now,)).fetchone()
    n = project.write(lambda: blacklist.served(now)) if late else 0
    return n + (project.write(lambda: let_go_of(due, now)) if due else 0)


def let_go_of(ids, now):
    """Let go of workunits of the pool. Runs in the writer."""
    def act(wu, results):
        for r in results:
            if r.server_state == S.INACTIVE:
                fire(LET_GO, r)
        wu.transition_time = min(wu.transition_time, now)

    Kept.delete().where(Kept.workunit.in_(ids)).execute()
    return change(ids, lambda wu: True, act, now)


# ---- Sending ---------------------------------------------------------------------

desk = SimpleNamespace(host=None, entries=[], copies=set())  # what is known for one request


def look_up(host, now):
    """Return the entries in force for the host of a request; once for each request."""
    if desk.host is not host:  # Each request reads the row of its host anew.
        desk.host, desk.copies = host, set()
        desk.entries = blacklist.entries_of(host, now)
    return desk.entries


def urgent(host, usable, now):
    """Yield spot checks for a host: the only work there is on the black list, else by lot."""
    entries = look_up(host, now)
    for app_id, offers in usable.items():
        entry = blacklist.in_force(entries, app_id)
        if entry is None:
            rate = rate_of(offers[0].application)
            n = int(rate > 0 and project.rng.random() < rate)
        else:
            n = entry.wanted and entry.wanted - entry.right - under_way(host.id, app_id)
        if n > 0:
            yield from copies_for(host, app_id, n, now)


def under_way(host_id, app_id):
    """Count the spot checks that a host has not answered yet, or not to the end."""
    return (SpotCheck.select().join(Result, on=(Result.name == SpotCheck.result))
            .where(SpotCheck.host == host_id, SpotCheck.app == app_id, SpotCheck.found == OPEN,
                   (Result.server_state == S.IN_PROGRESS)
                   | (Result.outcome == Outcome.SUCCESS) & (Result.validate_state == 0))
            .count())


def copies_for(host, app_id, n, now):
    """Yield up to n further copies of what the pool has, none that this volunteer has seen."""
    units = {wu.id: wu for wu in Workunit.select().join(Kept, on=(Kept.workunit == Workunit.id))
             .where(Kept.app == app_id, Kept.until > now)}
    found = {wu_id: [] for wu_id in units}
    for r in Result.select().where(Result.workunit.in_(list(units))).order_by(Result.id):
        found[r.workunit_id].append(r)
    order = sorted(units)
    project.rng.shuffle(order)
    for wu_id in order:
        wu, results = units[wu_id], found[wu_id]
        if n > 0 and has_room(wu, results) and not any(
                r.user_id == host.user_id or r.host_id == host.id for r in results):
            r = next_copy(wu, [r.name for r in results if r.server_state != S.INACTIVE], now)
            r.workunit = wu
            desk.copies.add(r.name)
            yield r
            n -= r.server_state == S.IN_PROGRESS


def has_room(wu, results):
    """Say whether one more copy can be asked for, and cannot make a decided workunit fail."""
    may_fail = sum(r.server_state == S.IN_PROGRESS or r.outcome in (
        Outcome.CLIENT_ERROR, Outcome.VALIDATE_ERROR) for r in results)
    return len(results) < wu.max_total_results and may_fail < wu.max_error_results \
        and any(r.server_state == S.INACTIVE for r in results)


def at_send(r, wu, host, offer, now):
    """Note that a copy just sent is a spot check."""
    if desk.host is host and r.name in desk.copies:
        fire(SPOT_CHECK, r)
        r.save(force_insert=True)  # Who keeps a table of what is under way wants its number.
        SpotCheck.create(workunit=wu.id, result=r.name, app=wu.app_id, host=host.id, sent=now)


def wanted_after_all(held):
    """Return which results that a host holds are spot checks, though their workunits are done."""
    ids = [r.workunit_id for r in held if r.workunit.canonical_resultid]
    return {check.result for check in SpotCheck.select(SpotCheck.result).where(
        SpotCheck.workunit.in_(ids), SpotCheck.found == OPEN)} if ids else set()


def withhold(r, wu, host, now):
    """Keep everything but spot checks from hosts on the black list [S3-29 S3-39]."""
    entry = blacklist.in_force(look_up(host, now), r.app_id)
    if entry is None or r.name in desk.copies:
        return ""
    return f"you are on its black list: {whole(entry)}"


def barred(host, now):
    """Say why a host gets nothing but spot checks of any application."""
    entries = look_up(host, now)
    only = next(iter(apps.values())).id if len(apps) == 1 else None
    everywhere = blacklist.in_force(entries, only)
    if everywhere is None:
        return ""
    return f"you are on the black list: {whole(everywhere)}"


def whole(entry):
    """Say all that the owner of a host should know of an entry."""
    return f"{blacklist.says(entry)}; what ends it sooner: {blacklist.way_back(entry)}"


def refused(host, now):
    """Say why the requests of a host are refused altogether [S3-29]."""
    entry = next((e for e in look_up(host, now) if e.level == blacklist.REFUSED), None)
    if entry is None:
        return ""
    return f"this project does not accept your computer {host.id}: {blacklist.says(entry)}. " \
           f"If you think that this is wrong, ask the people of the project"


# ---- Verdicts --------------------------------------------------------------------


def asked(wu, verdict):
    """Return the open spot checks of a workunit that was decided before: {result's name: row}."""
    if not wu.canonical_resultid or verdict.canonical:
        return {}
    return {check.result: check for check in SpotCheck.select().where(
        SpotCheck.workunit == wu.id, SpotCheck.found == OPEN)}


def settle(check, wrong):
    """Note how a spot check ended. Runs in the writer."""
    check.found = WRONG if wrong else RIGHT
    check.save()


def forget_old(now):
    """Forget spot checks of long ago. Runs in the writer."""
    SpotCheck.delete().where(SpotCheck.sent < now - 90 * 86400).execute()
    SpotCheck.update(found=NOTHING).where(
        SpotCheck.found == OPEN, SpotCheck.sent < now - 30 * 86400).execute()
