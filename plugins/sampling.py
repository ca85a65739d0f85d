"""X-Com's arbitrary sampling: whose task is handed out once more, and when [S3-01..S3-22].

An application says `dispatch = "xcom1"` (all portions first, then the tasks of inactive nodes),
"xcom2" (all portions first, then what has been computed longest) or "xcom3" (a task whose node is
late comes before new portions). How long a node may take is learned from its own reports. A task is
handed over as one extra copy; the first node keeps its own, with its deadline [S3-06 C38].

Nothing here costs an application with BOINC's dispatch anything: what follows is kept only where
it is asked for.

`window` bounds how far work runs ahead of the oldest missing answer [S3-15], and with
`in_order = True` answers are assimilated in the order of their numbers, to be read as a stream.
"""

import functools
import math
import operator
import threading
from types import SimpleNamespace

import bottle
from peewee import (SQL, BigIntegerField, BooleanField, CompositeKey, FloatField, IntegerField,
                    fn)

from minigrid import (CHUNK, IN_PROGRESS, NEVER, NOT_NOW, RULES, UNSENT, App, AssimilateState,
                      ClientError, Host, Meta, Outcome, Record, Result, Rule,
                      ServerState, ValidateState, Workunit, apps, db, explain, fire, load,
                      output_files, plugged, prepared, project, rule)

XCOM = ("xcom1", "xcom2", "xcom3")
DISPATCHES = ("boinc", *XCOM)
K_WAIT, K_WAIT_DEAD, WINDOW = 2.0, 4.0, 1000  # of an application with X-Com's dispatch
SMOOTHING = 0.3  # weight of a report in a node's running averages [S3-13]
TRANSFER_SECONDS_MIN = 1  # what is computed at once has taken at least so long to come and go
CHECK_SECONDS = 60  # between two checks of the nodes, and two looks at a task that can wait
LOOKED_AT = 200  # late tasks that one request may look at
STRIDE = 500  # workunits in one question for the oldest missing one
MARK = 1000  # lines between two known places of a file of answers
ANSWER_BYTES = 1 << 20  # of answers in one reply; a longer line still goes out whole

HAND_OVER = rule(
    "hand over", "scheduler", "S3-01 S3-02 S3-03 S3-04 S3-05 S3-06 S3-07 C38",
    "another node is late or inactive: one extra copy, whose host was just given it",
    dict(server_state={ServerState.IN_PROGRESS}, outcome={Outcome.INIT}), {})


class Handout(Record):
    """A copy in a node's hands: the table of current computations [S3-18]."""

    result = BigIntegerField(primary_key=True)
    workunit = BigIntegerField(index=True)
    app = IntegerField()
    host = BigIntegerField(index=True)
    size = BigIntegerField()  # bytes of its inputs, and of the output as far as it is known
    complexity = FloatField()
    sent_time = BigIntegerField()
    bound = BigIntegerField()  # s until its deadline, above which nobody waits [C38]
    guessed = BooleanField()  # the wait is not yet from the node's own reports
    wait_until = BigIntegerField(null=True)  # None: nobody knows yet how long such a task takes
    dead_after = FloatField()  # s of silence after which its node counts as inactive [S3-19]
    due = BigIntegerField()  # when to think of handing it over; NEVER where that has no sense

    class Meta:
        indexes = ((("app", "due"), False),)


Handout.add_index(Handout.index(Handout.app, where=SQL("guessed"), name="handout_guessed"))


class Pace(Record):
    """How fast one node is with one application, as running averages of its reports [S3-09]."""

    host = BigIntegerField()
    app = IntegerField()
    n = IntegerField(default=0)  # reports behind it
    seconds_per_unit = FloatField(default=0)  # of complexity
    # The mean of times, not of bandwidths: one report from the cache would spoil the latter.
    seconds_per_byte = FloatField(default=0)  # of all that is not computing, waiting included

    class Meta:
        primary_key = CompositeKey("host", "app")
        indexes = ((("app", "seconds_per_unit"), False), (("app", "seconds_per_byte"), False))


class Inactive(Record):
    """A node that was silent too long [S3-21]; the mark goes with its next request [S3-22]."""

    host = BigIntegerField(primary_key=True)
    since = BigIntegerField()


class Portions(Record):
    """How far an application's portions have come, so that nobody counts from zero again."""

    app = IntegerField(primary_key=True)
    missing = BigIntegerField(default=0)  # below it all are answered, or have failed
    told = BigIntegerField(default=0)  # below it the application was told of all
    newest = BigIntegerField(default=-1)  # the highest that was handed out, if the window is bound


TABLES = (Handout, Pace, Inactive, Portions)

# What this process, the only one that writes, knows of its store without asking it; see known().
kept = SimpleNamespace(opened=None, inactive=set(), typical={}, entered=set())


def known():
    """Return what is known of the open store: marked hosts, and the medians {app id: Pace}."""
    if kept.opened is not project.write:
        kept.opened, kept.typical, kept.entered = project.write, {}, set()
        kept.inactive = {row.host for row in Inactive.select()}
    return kept


# ---- What an application says --------------------------------------------------


def one_of(value):
    """Return the name of a dispatch policy. Raises ValueError."""
    if value not in DISPATCHES:
        raise ValueError(f"must be one of {', '.join(map(repr, DISPATCHES))}")
    return value


def positive(value):
    """Return a positive number that is one. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) \
            or not 0 < value < math.inf:
        raise ValueError("must be a number above 0")
    return float(value)


def whole(value):
    """Return a whole number, 0 or more. Raises ValueError."""
    if type(value) is not int or not 0 <= value < NEVER:
        raise ValueError("must be a whole number of workunits; 0 sets no bound")
    return value


def yes_or_no(value):
    """Return True or False. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


CONSTANTS = {"dispatch": one_of, "k_wait": positive, "k_wait_dead": positive, "window": whole,
             "in_order": yes_or_no}


def check_application(application):
    """Complete the constants of an application. Raises ValueError [S3-20].

    Only X-Com's dispatch bounds its window unless asked to: with BOINC's a task may well stay away
    for weeks, and must not stop all others.
    """
    policies = application.policies
    policies.setdefault("dispatch", "boinc")
    policies.setdefault("window", 0 if policies["dispatch"] == "boinc" else WINDOW)
    policies.setdefault("in_order", False)
    wait = policies.setdefault("k_wait", K_WAIT)
    dead = policies.setdefault("k_wait_dead", K_WAIT_DEAD)
    if dead <= wait:
        raise ValueError(f"k_wait_dead ({dead:g}) must be greater than k_wait ({wait:g}): a node "
                         f"is not called inactive while its answer is still awaited")


def with_dispatch(*names):
    """Return the applications with one of X-Com's ways, or with these: {id: Application}."""
    return {a.id: a for a in apps.values() if a.policies.get("dispatch") in (names or XCOM)}


# ---- Handing over ----------------------------------------------------------------


def late_tasks(host, usable, now):
    """Offer, before anything new, what other nodes are late with: variant 3 [S3-03..S3-05]."""
    ids = [app_id for app_id in with_dispatch("xcom3") if app_id in usable]
    if ids:
        yield from hand_over(host, ids, now)


def left_over(host, usable, now):
    """Offer others' tasks once an application has no new portion to give: variants 1 and 2.

    Variant 1 offers those of nodes marked inactive [S3-01], variant 2 what has been in the
    computing state longest, whatever its node does [S3-02 S3-07].
    """
    ids = [app_id for app_id, application in with_dispatch("xcom1", "xcom2").items()
           if app_id in usable and application.drained
           and not Result.select().where(UNSENT, Result.app == app_id).exists()]
    if ids:
        yield from hand_over(host, ids, now)


def hand_over(host, app_ids, now):
    """Walk through extra copies, unsaved, of the tasks that are due, the oldest first."""
    mine = Result.alias()  # "+ 0": through the few of the workunit, not all the host ever had.
    twin = mine.user + 0 == host.user_id if project.settings.one_result_per_user_per_wu \
        else mine.host + 0 == host.id  # No node gets what it has or had already [S3-07].
    rows = (Handout.select(Handout.workunit)
            .where(Handout.app.in_(app_ids), Handout.due <= now, ~fn.EXISTS(
                mine.select(SQL("1")).where(mine.workunit == Handout.workunit, twin)))
            .order_by(Handout.due, Handout.result).limit(LOOKED_AT))
    ids = list(dict.fromkeys(row.workunit for row in rows))
    for start in range(0, len(ids), 10):  # Most hosts take the first one.
        for wu, results in load(ids[start:start + 10]):
            r = extra_copy(wu, results, now)
            if r:
                yield r


def extra_copy(wu, results, now):
    """Make an extra copy of a workunit that waits for late nodes; None if it needs none [C38]."""
    if wu.canonical_resultid or wu.error_mask or wu.transitioner_flags \
            or len(results) >= wu.max_total_results or wu.number is None:
        return forget([wu.id])
    usable = sum(r.outcome == Outcome.SUCCESS and r.validate_state != ValidateState.INVALID
                 for r in results)
    open_ones = [r for r in results if r.server_state != ServerState.OVER]
    late = late_ones(wu, now)
    overdue = [late[r.id] for r in open_ones if r.id in late]  # none if it came back just now
    if not overdue or len(open_ones) - len(overdue) >= wu.target_nresults - usable:
        return look_later(wu, now + CHECK_SECONDS)  # The others, or a new copy, will do.
    first = 1 + max(int(r.name.rpartition("_")[2]) for r in results)
    r = Result(workunit=wu, app=wu.app_id, name=f"{wu.name}_{first}", create_time=now,
               priority=wu.priority)
    oldest = min(overdue, key=lambda handout: handout.sent_time)
    r.handed_over = f"extra copy of a task that host {oldest.host} has had for " \
                    f"{now - oldest.sent_time} s: {why_late(wu, oldest, now)}"
    return r


def late_ones(wu, now):
    """Return the copies of a workunit that nobody counts on any more: {result id: Handout}."""
    rows = list(Handout.select().where(Handout.workunit == wu.id))
    dispatch = with_dispatch()[wu.app_id].policies["dispatch"]
    if dispatch == "xcom1":
        gone = {row.host for row in Inactive.select().where(
            Inactive.host.in_([h.host for h in rows]))}
        rows = [h for h in rows if h.host in gone]
    elif dispatch == "xcom3":
        rows = [h for h in rows if h.wait_until is not None and h.wait_until <= now]
    return {h.result: h for h in rows}  # In variant 2 a node's state does not matter [S3-02].


def why_late(wu, handout, now):
    """Say by which variant a task is handed over, with its numbers."""
    dispatch = with_dispatch()[wu.app_id].policies["dispatch"]
    return {"xcom1": "the host is inactive, and there is nothing new",
            "xcom2": "the longest of all, and there is nothing new",
            "xcom3": f"it was awaited for {(handout.wait_until or now) - handout.sent_time} s",
            }[dispatch]


def forget(wu_ids):
    """Think no more of handing over the copies of workunits. Runs in the writer."""
    Handout.update(due=NEVER, guessed=False).where(Handout.workunit.in_(wu_ids)).execute()


def look_later(wu, when):
    """Leave a workunit's copies where they are until then. Runs in the writer."""
    Handout.update(due=when).where(Handout.workunit == wu.id).execute()


def at_send(r, wu, host, offer, now):
    """Enter an extra copy that was just sent; its task goes to the end of the line [S3-07]."""
    reason = vars(r).get("handed_over")
    if reason is None:
        return  # a first copy, or a repeat
    fire(HAND_OVER, r)
    r.save(force_insert=True)
    explain(r, reason)
    again = offer.application.policies["dispatch"] == "xcom2"
    look_later(wu, now if again else now + CHECK_SECONDS)


# ---- What is learned ---------------------------------------------------------------


def at_commit(done, now):
    """Keep the table of current computations, and learn from reports."""
    note_newest([row for rule, row in done if rule is RULES["send"]])
    served = with_dispatch()
    mine = [(rule, row) for rule, row in done if isinstance(rule, Rule) and row.app_id in served] \
        if served else ()
    if not mine:
        return
    sent = [row for rule, row in mine if rule is RULES["send"]]
    over = [row for rule, row in mine
            if rule.before.get("server_state") == {ServerState.IN_PROGRESS}
            and rule.after.get("server_state") == ServerState.OVER]
    learn_pace([row for rule, row in mine if rule in (
        RULES["report success"], RULES["report success late"]) and row.workunit.number is not None])
    if sent:
        enter(sent, served, done)
    if over:  # After those sent: one commit may hold both a sending and its report.
        Handout.delete().where(Handout.result.in_([r.id for r in over])).execute()
    if decided := [row.id for rule, row in mine
                   if rule in (RULES["consensus"], RULES["hand over the failure"])]:
        forget(decided)


# A new report weighs SMOOTHING, the first ones as much as those before.
LEARN = f"""INSERT INTO pace (host, app, n, seconds_per_unit, seconds_per_byte)
VALUES (?, ?, 1, ?, ?) ON CONFLICT (host, app) DO UPDATE SET n = n + 1, seconds_per_unit =
seconds_per_unit + max({SMOOTHING}, 1.0 / (n + 1)) * (excluded.seconds_per_unit - seconds_per_unit),
seconds_per_byte =
seconds_per_byte + max({SMOOTHING}, 1.0 / (n + 1)) * (excluded.seconds_per_byte - seconds_per_byte)
"""


def learn_pace(results):
    """Learn from reports how fast their nodes compute, and how fast work comes and goes [S3-09].

    What is not computing counts as transfer, waiting in the node's queue included [S3-13].
    """
    for r in results:
        transfer = max(r.received_time - r.sent_time - r.elapsed_time, TRANSFER_SECONDS_MIN)
        db.execute_sql(LEARN, (
            r.host_id, r.app_id, r.elapsed_time / r.workunit.complexity,
            transfer / max(input_size(r.workunit) + output_size(r), 1)))


def input_size(wu):
    """Return the bytes of a workunit's input files: the task's size [S3-10]."""
    return sum(file["nbytes"] for file in wu.input_files)


def output_size(r):
    """Return the bytes of a result's output, 0 where there is none."""
    try:
        return plugged("file_size")[-1]("upload", output_files(r)[0]["name"]) or 0
    except OSError:
        return 0  # The validator will see to that.


def typical_of(app_id, anew=False):
    """Return the median pace of all nodes of an application, where a new one starts [S3-13].

    None if no node has reported. It is sought anew with each check of the nodes.
    """
    medians = known().typical
    if anew or medians.get(app_id) is None:
        of_app = Pace.select().where(Pace.app == app_id)
        middle = (of_app.count() - 1) // 2
        medians[app_id] = Pace(**{
            field.name: of_app.select(field).order_by(field).offset(middle).limit(1).scalar()
            for field in (Pace.seconds_per_unit, Pace.seconds_per_byte)}) if middle >= 0 else None
    return medians[app_id]


def enter(sent, served, done):
    """Enter copies just sent into the table of current computations, with their waits."""
    paces = {(p.host, p.app): p for p in Pace.select().where(
        Pace.host.in_({r.host_id for r in sent}), Pace.app.in_({r.app_id for r in sent}))}
    rows = []
    for r in sent:
        pace, policies = paces.get((r.host_id, r.app_id)), served[r.app_id].policies
        bound = r.report_deadline - project.settings.report_grace_period - r.sent_time
        row = dict(result=r.id, workunit=r.workunit_id, app=r.app_id, host=r.host_id,
                   size=input_size(r.workunit), complexity=r.workunit.complexity,
                   sent_time=r.sent_time, bound=bound, guessed=pace is None)
        row.update(waiting(row, pace or typical_of(r.app_id), policies))
        if r.workunit.number is None:
            row["due"] = NEVER  # A policy's own question: that policy knows what to do.
        elif row["due"] < NEVER and policies["dispatch"] == "xcom3":
            done.append((why_awaited(row, pace, policies), r))
        rows.append(row)
    Handout.insert_many(rows).on_conflict_replace().execute()


def note_newest(sent):
    """Note the newest portion of each application with a window that was handed out [S3-15]."""
    bounded = {a.id for a in apps.values() if a.policies.get("window")}
    numbers = [(r.app_id, r.workunit.number) for r in sent
               if r.app_id in bounded and r.workunit.number is not None]
    for row in dict(sorted(numbers)).items():  # the last, and so the highest of each
        db.execute_sql("INSERT INTO portions (app, missing, told, newest) VALUES (?, 0, 0, ?) ON "
                       "CONFLICT (app) DO UPDATE SET newest = max(newest, excluded.newest)", row)


def waiting(handout, pace, policies):
    """Return until when a copy is awaited, when its node is dead, when it is due [S3-08 S3-19].

    wait = k_wait x (size / bandwidth + complexity x seconds per unit), never beyond the deadline:
    what would be awaited longer is the transitioner's [C38]. A larger k_wait means fewer needless
    copies, and a longer wait for a node that has really gone [S3-14 S3-15].
    """
    k_wait, k_dead, bound = policies["k_wait"], policies["k_wait_dead"], handout["bound"]
    estimate = bound / k_wait  # Nobody has measured: the deadline holds.
    if pace is not None:
        estimate = min(estimate, handout["size"] * pace.seconds_per_byte
                       + handout["complexity"] * pace.seconds_per_unit)
    wait_until = None if pace is None else handout["sent_time"] + math.ceil(estimate * k_wait)
    due = {"xcom2": handout["sent_time"], "xcom3": wait_until}.get(policies["dispatch"])
    if due is None or due >= handout["sent_time"] + bound:
        due = NEVER  # In variant 1 the check of the nodes says when.
    return dict(wait_until=wait_until, dead_after=k_dead * estimate, due=due)


def why_awaited(row, pace, policies):
    """Say for how long a copy is awaited, and from which numbers that comes."""
    source = f"{pace.n} reports of this host" if pace else "the median of all hosts"
    return f"awaited for {row['wait_until'] - row['sent_time']} s: {policies['k_wait']:g} times " \
           f"what {row['size']} bytes and complexity {row['complexity']:g} should take by {source}"


# ---- The check of the nodes ----------------------------------------------------------


def node_check(now):
    """Stage: mark nodes that have been silent too long, at most once a minute [S3-16..S3-21].

    It only marks: tasks are handed over by the variant in force, deadlines hold as before.
    """
    last = last_check.first()
    if last and 0 <= now - last[0] < CHECK_SECONDS \
            or known().entered.issuperset(with_dispatch()) and not any_handout.first():
        return 0
    return project.write(lambda: check_nodes(now))


last_check = prepared(lambda: Meta.select(Meta.value).where(Meta.name == "nodes checked").tuples())
any_handout = prepared(lambda: Handout.select(Handout.host).limit(1).tuples())


def check_nodes(now):
    """Mark silent nodes; bring medians and waits up to date; return how many. In the writer."""
    Meta.replace(name="nodes checked", value=now).execute()
    served = with_dispatch()
    Handout.delete().where(Handout.app.not_in(list(served))).execute()  # with BOINC's ways now
    for application in served.values():
        if application.id not in known().entered:
            enter_older(application, served)
        guess_again(application)
    marked = known().inactive = {row.host for row in Inactive.select()}
    silent = (Handout.select(Handout.host, Host.rpc_time, fn.MAX(Handout.dead_after))
              .join(Host, on=Host.id == Handout.host).where(Handout.host.not_in(
                  Inactive.select(Inactive.host)))
              .group_by(Handout.host).having(fn.MAX(Handout.dead_after) < now - Host.rpc_time))
    found = list(silent.tuples())
    for host_id, rpc_time, limit in found:
        Inactive.create(host=host_id, since=now)
        marked.add(host_id)
        explain(Host.get_by_id(host_id), f"marked inactive: silent for {now - rpc_time} s, the "
                                         f"limit for its longest task is {limit:.0f} s")
    give_up = list(with_dispatch("xcom1"))
    if found and give_up:  # What this node holds is due; if it needs nothing, that will be seen.
        Handout.update(due=now).where(Handout.host.in_([row[0] for row in found]),
                                      Handout.app.in_(give_up)).execute()
    return len(found)


def enter_older(application, served):
    """Enter the copies sent while the application had BOINC's ways; once. In the writer [S3-18]."""
    entered = Handout.select(Handout.result).where(Handout.app == application.id)
    rows = list(Result.select(Result, Workunit).join(Workunit).where(
        IN_PROGRESS, Result.app == application.id, Result.id.not_in(entered)))
    for start in range(0, len(rows), STRIDE):
        enter(rows[start:start + STRIDE], served, [])
    known().entered.add(application.id)


def guess_again(application):
    """Give copies of nodes without a history a wait by today's median [S3-13]. In the writer."""
    # The first reports come from the fastest nodes: the first medians are too small for most.
    typical = typical_of(application.id, anew=True)
    if typical is None:
        return
    for row in (Handout.select().where(SQL("guessed"), Handout.app == application.id)
                .limit(STRIDE * 4)):
        new = waiting(row.__data__, typical, application.policies)
        if row.due not in (row.wait_until, NEVER) or application.policies["dispatch"] != "xcom3":
            new.pop("due")  # Somebody else has it too, and the next look is fixed.
        if any(getattr(row, name) != value for name, value in new.items()):
            Handout.update(**new).where(Handout.result == row.result).execute()


def at_contact(request, reply, user, host, now):
    """Take the mark from a node that is heard of again [S3-22]."""
    marked = known().inactive
    if host.id not in marked:
        return
    if not Inactive.delete().where(Inactive.host == host.id).execute():
        marked.discard(host.id)  # Not sooner: a change that is taken back takes back this one, too.
    else:
        explain(host, "active again")
        Handout.update(due=NEVER).where(
            Handout.host == host.id, Handout.app.in_(list(with_dispatch("xcom1")))).execute()


def node_states(host_ids):
    """Say of hosts whether they are active: {id: False if marked inactive [S3-21 S3-22]}."""
    marked = {row.host for row in Inactive.select().where(Inactive.host.in_(list(host_ids)))}
    return {host_id: host_id not in marked for host_id in host_ids}


def node_figures(host_ids):
    """Return what was learned of hosts: {id: {app name: {seconds_per_unit, bandwidth, reports}}}.

    The bandwidth is in bytes a second and counts all that is not computing.
    """
    names, figures = {a.id: a.name for a in apps.values()}, {host_id: {} for host_id in host_ids}
    for pace in Pace.select().where(Pace.host.in_(list(host_ids)), Pace.app.in_(list(names))):
        figures[pace.host][names[pace.app]] = dict(
            seconds_per_unit=pace.seconds_per_unit, reports=pace.n,
            bandwidth=1 / pace.seconds_per_byte if pace.seconds_per_byte else 0)
    return figures


STAGES = (node_check,)


# ---- The window, and the order of answers ----------------------------------------------


OPEN = {  # column of Portions -> what a workunit is like that it does not pass
    "missing": (Workunit.canonical_resultid == 0) & (Workunit.error_mask == 0),
    "told": Workunit.assimilate_state != AssimilateState.DONE,
}


def oldest(application, kind):
    """Return the lowest number that is `missing` an answer, or not yet `told`; reads only.

    What was purged is past both. Names are looked up, by an index that there is anyway.
    """
    row = Portions.get_or_none(app=application.id)
    number, stride = getattr(row, kind) if row else 0, 8
    end = App.get_by_id(application.id).next_number
    while number < end:
        names = [f"{application.name}_{n}" for n in range(number, min(number + stride, end))]
        found = (Workunit.select(fn.MIN(Workunit.number))
                 .where(Workunit.name.in_(names), OPEN[kind]).scalar())
        if found is not None:
            return found
        number, stride = number + len(names), STRIDE
    return number


def note_place(application, kind, number):
    """Remember how far something has come, now and then: it is found again from there."""
    row = Portions.get_or_none(app=application.id) or Portions(app=application.id)
    if number - getattr(row, kind) >= STRIDE:
        change = {getattr(Portions, kind): number}
        project.write(lambda: Portions.insert(app=application.id, **{kind: number}).on_conflict(
            conflict_target=[Portions.app], update=change).execute())


def window_of(application):
    """Return an application's window: dict(oldest_missing, size, bound), None if it has no bound.

    Its size is that from the oldest missing answer to the newest portion handed out [S3-15].
    """
    if not application.policies.get("window"):
        return None
    missing, row = oldest(application, "missing"), Portions.get_or_none(app=application.id)
    return dict(oldest_missing=missing, bound=application.policies["window"],
                size=max(row.newest + 1 - missing, 0) if row else 0)


def room_for_work(application):
    """Return how many workunits an application may be asked for: its window is bounded [S3-15]."""
    window = application.policies.get("window")
    if not window:
        return CHUNK
    missing = oldest(application, "missing")
    note_place(application, "missing", missing)
    application.policies["window_end"] = missing + window  # for withhold(); it only ever grows
    return max(missing + window - App.get_by_id(application.id).next_number, 0)


def withhold(r, wu, host, now):
    """Say why a portion must wait that was made for a larger window; empty if it need not."""
    application = next((a for a in apps.values() if a.id == wu.app_id), None)
    end = application.policies.get("window_end") if application else None
    if end is None or wu.number is None or wu.number < end:
        return ""
    return f"its window of {application.policies['window']} workunits is full: number " \
           f"{end - application.policies['window']} is missing"


def not_yet(now):
    """Return what the assimilator may take: of some applications only what is next in order."""
    ordered = [a for a in apps.values() if a.policies.get("in_order")]
    if not ordered:
        return None
    conditions = [Workunit.number.is_null(), Workunit.app.not_in([a.id for a in ordered])]
    conditions += [(Workunit.app == a.id) & (Workunit.number < gap(a)) for a in ordered]
    return functools.reduce(operator.or_, conditions)


def gap(application):
    """Return the first number that stops an application's answers: not ready, or put off."""
    first = oldest(application, "told")
    note_place(application, "told", first)
    names = [f"{application.name}_{n}" for n in range(first, first + 2 * STRIDE)]
    off = {wu_id for _, wu_id in list(project.put_off)}
    stops = [number for wu_id, number, state in Workunit.select(
        Workunit.id, Workunit.number, Workunit.assimilate_state)
        .where(Workunit.name.in_(names)).tuples()
        if state == AssimilateState.INIT or wu_id in off]
    return min(stops, default=first + len(names))


def waits_for(wu, results, now):
    """Say which answer is missing before that of a workunit can be taken."""
    application = next((a for a in apps.values() if a.id == wu.app_id), None)
    if wu.assimilate_state != AssimilateState.READY or wu.number is None \
            or not application or not application.policies.get("in_order"):
        return []
    first = oldest(application, "told")
    return [f"its application takes answers in their order, and that of {application.name}_{first} "
            f"is missing"] if first < wu.number else []


def around_assimilate(assimilate):
    """Keep the order within a pass: behind one that failed or was deferred the others wait."""
    stopped = set()

    def in_order(wu, results, application):
        if wu.app_id in stopped and wu.number is not None:
            return NOT_NOW
        told = "defer"
        try:
            told = assimilate(wu, results, application)
        finally:
            if told == "defer" and application.policies.get("in_order"):
                stopped.add(wu.app_id)
        return told
    return in_order


# ---- Answers as a stream -----------------------------------------------------------------


def routes(app, clock):
    """Add the address at which an application's answers can be followed."""
    marks, lock = {}, threading.Lock()

    @app.get("/answers/<name>")
    def answers(name):
        for refuse in plugged("refuse_results"):
            refuse()  # where the project keeps them to itself
        if not App.select().where(App.name == name).exists():
            raise ClientError(f"there is no application '{name[:40]}' here", 404)
        given = bottle.request.query.get("from", "0")
        if not given.isascii() or not given.isdigit() or len(given) > 15:
            raise ClientError(f"from must be the number of a line, from 0 on; found '{given[:20]}'")
        with lock:
            content, following = read_lines(name, int(given), marks.setdefault(name, [0]))
        bottle.response.content_type = "application/x-ndjson; charset=utf-8"
        bottle.response.set_header("Next-From", str(following))
        return content


def read_lines(name, first, marks):
    """Return lines of an application's answers from a number on, and the number to go on from.

    `marks` are the places of every thousandth line, as far as they are known; more are added. Only
    what is committed is read: what lies behind it may be cut off again.
    """
    path = project.data / "results" / f"{name}.jsonl"
    known = Meta.get_or_none(name=f"size of {path.name}")
    size, found, total = known.value if known else 0, [], 0
    if marks[-1] > size:
        del marks[1:]
    try:
        with open(path, "rb") as file:
            number = MARK * min(first // MARK, len(marks) - 1)
            place = file.seek(marks[number // MARK])
            while place < size and total < ANSWER_BYTES and (line := file.readline()):
                place, number = place + len(line), number + 1
                if number == MARK * len(marks):
                    marks.append(place)
                if number > first:
                    found.append(line)
                    total += len(line)
    except FileNotFoundError:
        return b"", first  # nothing was answered yet
    return b"".join(found), first + len(found)
