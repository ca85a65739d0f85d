"""Why? What happened to a workunit, a copy of it or a computer, when, by which rule [U-03].

Every rule that fires, and every decision that somebody explains, is an event here, written with
the change itself: what the store holds and what is told of it never differ. Events go when their
workunit is purged, and the oldest when there are too many. What is told is made once, as parts
of a story, and shown as text, page or JSON.
"""

import gzip
import json
import re
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches

import bottle
from peewee import SQL, BigIntegerField, CharField, DatabaseError, IntegerField, TextField, fn

import minigrid
from minigrid import (IN_PROGRESS, NEVER, PURGE, RULES, App, AppVersion, AssimilateState,
                      ErrorMask, FileDeleteState, Host, HostAppVersion, Outcome, Record, Result,
                      Rule, ServerState, ValidateState, Workunit, apps, canonical_json, db, plugged,
                      project, setting, wall_clock)

NAV = (("/why", "why?"),)
OVERDUE_SECONDS = 60  # after which what the next pass should have done has a reason
REQUESTS_KEPT = 10  # of each host, and as many copies and events of a host are shown
TRACES_KNOWN = 1000  # hosts whose requests are in memory, 6 kB each
EVENTS_SHOWN = 300  # of a workunit, the last ones
NEAR_SHOWN = 8  # names that are like an unknown one
HOSTS_SEARCHED = 5000  # those that came last, for one of a name
FORGET_CHUNK = 2000  # events in one transaction
ARCHIVE_BYTES = {True: 2 << 20, False: 256 << 20}  # of archives read for a page, for a command
HOST_NUMBER = re.compile(r"(?:host|computer)?[ #-]{0,2}([0-9]{1,15})", re.IGNORECASE)
TIME = re.compile(r"@([0-9]{9,11})\b")  # how a time stands in a text until it is shown
KINDS = dict.fromkeys(("Copy", "Of", "Computer"), "when")  # These columns stay in one line.
S, O, V, A, F = ServerState, Outcome, ValidateState, AssimilateState, FileDeleteState


@dataclass(frozen=True)
class WhySettings:
    """The [why] section of setup.cfg."""

    events: int = setting(200_000, "events kept at most, the oldest go; 0 keeps none")


settings = WhySettings()


class Event(Record):
    """One rule that fired, or one decision explained; of a copy, its workunit, or a host."""

    time = BigIntegerField()
    workunit = BigIntegerField(index=True)  # its id; 0: of a host
    copy = IntegerField()  # the number at the end of a result's name; -1: of the workunit itself
    host = BigIntegerField()  # 0: none
    rule = CharField()  # "" where a decision was explained
    text = TextField()


class HostTrace(Record):
    """The last requests of a host for work, the newest first, and what it got."""

    host = BigIntegerField(primary_key=True)
    requests = TextField()  # JSON: [{first, last, n, seconds, sent, reasons}]


OF_HOST = SQL("workunit = 0")
Event.add_index(Event.index(Event.host, where=OF_HOST, name="event_of_host"))
TABLES = (Event, HostTrace)


# ---- What is kept ----------------------------------------------------------------

NUMBERS = {  # rule -> what its row says about it
    "make a copy": lambda r: f"priority {r.priority}" if r.priority else "",
    "send": lambda r: f"deadline @{r.report_deadline}",
    "could not send": lambda r: f"{len(r.refusals or ())} refusals, the last: "
                                f"{r.refusals[-1][2]}" if r.refusals else "",
    "report success": lambda r: f"ran {r.elapsed_time:.4g} s",
    "report success late": lambda r: f"ran {r.elapsed_time:.4g} s, deadline was "
                                     f"@{r.report_deadline}",
    "report error": lambda r: f"exit status {r.exit_status}, client state {r.client_state}, ran "
                              f"{r.elapsed_time:.4g} s",
    "time out": lambda r: f"deadline was @{r.report_deadline}",
    "valid": lambda r: f"credit {r.granted_credit:.4g}",
    "ask for validation": lambda wu: f"min_quorum {wu.min_quorum}",
    "consensus": lambda wu: f"credit {wu.canonical_credit:.4g} for each valid copy",
    "fail: too many errors": lambda wu: f"at most {wu.max_error_results} are allowed",
    "fail: too many results": lambda wu: f"at most {wu.max_total_results} are allowed",
    "fail: no consensus": lambda wu: f"at most {wu.max_success_results} answers are allowed",
    "hand over the failure": lambda wu: given_up(wu),
}
NUMBERS["report error late"] = NUMBERS["report error"]
NUMBERS["consensus after the end"] = NUMBERS["consensus"]
INSERT = 'INSERT INTO "event" ("time", "workunit", "copy", "host", "rule", "text") ' \
         'VALUES (?, ?, ?, ?, ?, ?)'
DELETE = 'DELETE FROM "event" WHERE "workunit" = ?'


def at_commit(done, now):
    """Keep what was done in this transaction; forget what was purged. Runs in the writer."""
    # Nothing that is only told may stop what is done: a fault of ours costs these events alone.
    try:
        rows = [event(rule, row, now) for rule, row in done] if settings.events else ()
        gone = {row.id for rule, row in done if rule is PURGE}
        if gone:
            db.connection().executemany(DELETE, [(wu_id,) for wu_id in gone])
            rows = [row for row in rows if row[1] not in gone]
        if rows:
            db.connection().executemany(INSERT, rows)
    except sqlite3.Error as error:  # The store's trouble: the writer knows what to do.
        raise DatabaseError(str(error)) from error
    except Exception as error:
        minigrid.remember(now, f"events are not kept: {error!r}: please report this as a bug")


def event(rule, row, now):
    """Describe what happened to a row, as the columns of an event."""
    kept = row.__data__
    if isinstance(rule, Rule):
        numbers = NUMBERS.get(rule.name)
        name, text = rule.name, numbers(row) if numbers else ""
    else:
        name, text = "", rule[:500]
    if "workunit" in kept:
        # New results have no id yet, but their names end in a number that none shares.
        number = row.name.rpartition("_")[2]
        return (now, kept["workunit"], int(number) if number.isdecimal() else -1,
                kept.get("host") or 0, name, text)
    if isinstance(row, Workunit):
        return now, kept["id"], -1, 0, name, text
    return now, 0, -1, kept["id"] if isinstance(row, Host) else 0, name, text


first_event = minigrid.prepared(lambda: Event.select(fn.MIN(Event.id)).tuples())
last_event = minigrid.prepared(lambda: Event.select(fn.MAX(Event.id)).tuples())


def forget_events(now):
    """Stage: delete the oldest events when there are too many; return how many."""
    # One look at each end of the table; asked for together they would cost a walk through it.
    (first,), (last,) = first_event.first(), last_event.first()
    if first is None or last - first < settings.events:
        return 0  # There cannot be as many: no need to count.
    excess, n = Event.select().count() - settings.events, 0
    if excess > 0:  # A tenth more, so that this is no work of every second.
        excess += settings.events // 10
    while n < excess:
        oldest = Event.select(Event.id).order_by(Event.id).limit(min(FORGET_CHUNK, excess - n))
        n += project.write(lambda: Event.delete().where(Event.id.in_(oldest)).execute())
    return n


STAGES = (forget_events,)


def at_answer(request, reply, host, reasons, now):
    """Keep what a host that asked for work got, and why not more. Runs in the writer."""
    # What is repeated is counted: a host that gets nothing asks every minute.
    reasons = {text[:200]: n for text, n in reasons.most_common(20)}
    if not reply.assignments and not reasons:
        reasons = {host.why_no_work[:200]: 1}
    entry = {"first": now, "last": now, "n": 1, "reasons": reasons,
             "seconds": round(min(request.work_req_seconds, 1e9)),
             "sent": [job.name for job in reply.assignments[:50]]}
    keep_request(host.id, entry)


traces = {}  # host -> what was written last for it, as text and in parts; who asked last


def keep_request(host_id, entry):
    """Put a request before the former ones of its host: one statement, if memory serves."""
    known, entries = traces.pop(host_id, (None, None))
    text, entries = with_request(entries, entry) if known else (None, None)
    # What is remembered may have been taken back, or be of another store: the store has a say.
    if not known or not db.execute_sql(
            'UPDATE "host_trace" SET "requests" = ? WHERE "host" = ? AND "requests" = ?',
            (text, host_id, known)).rowcount:
        row = db.execute_sql('SELECT "requests" FROM "host_trace" WHERE "host" = ?',
                             (host_id,)).fetchone()
        text, entries = with_request([(given, canonical_json(given)) for given in json.loads(
            row[0] if row else "[]")], entry)
        db.execute_sql('REPLACE INTO "host_trace" ("host", "requests") VALUES (?, ?)',
                       (host_id, text))
    traces[host_id] = text, entries
    if len(traces) > TRACES_KNOWN:
        del traces[next(iter(traces))]


def with_request(entries, entry):
    """Return the requests of a host with one more, or its last one counted once more.

    As text for the store, and as [(entry, its JSON)].
    """
    last = entries[0][0] if entries else {"sent": True}
    if not entry["sent"] and not last["sent"] and last["reasons"].keys() == entry["reasons"].keys():
        entries = entries[1:]
        entry = {**entry, "first": last["first"], "n": last["n"] + 1}
    entries = [(entry, canonical_json(entry)), *entries[:REQUESTS_KEPT - 1]]
    return f"[{','.join(text for _, text in entries)}]", entries


# ---- Words -----------------------------------------------------------------------

JUDGED = {
    V.INIT: "came back, and waits to be compared", V.VALID: "valid: it agrees with the answer",
    V.INVALID: "invalid: it differs from the answer, or is wrong",
    V.NO_CHECK: "not compared: its workunit was given up",
    V.INCONCLUSIVE: "compared, but no agreement yet",
    V.TOO_LATE: "too late: the answer to compare it with was gone",
}
ENDED = {
    O.INIT: "over", O.COULDNT_SEND: "not sent: too many computers were too small or too slow",
    O.CLIENT_ERROR: "its computer could not compute it", O.NO_REPLY: "no reply by its deadline",
    O.DIDNT_NEED: "not needed: all was over before it was sent",
    O.VALIDATE_ERROR: "its output is missing, or cannot be read",
    O.CLIENT_DETACHED: "its computer left the project, or lost its files",
}
GIVEN_UP = {
    ErrorMask.COULDNT_SEND_RESULT: "no computer was large and fast enough",
    ErrorMask.TOO_MANY_ERROR_RESULTS: "too many copies ended in an error",
    ErrorMask.TOO_MANY_SUCCESS_RESULTS: "too many copies came back without agreeing",
    ErrorMask.TOO_MANY_TOTAL_RESULTS: "too many copies were made",
    ErrorMask.CANCELLED: "the project's owner cancelled it",
    ErrorMask.NO_CANONICAL_RESULT: "its answer was lost",
}
HIDDEN = "Who computes it, and what was found, is told here when it is decided and all copies " \
         "are back, so that nobody can arrange answers."
OPEN_RULES = {"send", "report success", "report error", "report success late", "report error late",
              "time out", "host detached"}  # not "make a copy": nobody makes those of spot checks


def part(title="", facts=(), **more):
    """Return a part of a story: texts, facts (name, value), a table, what a program wrote."""
    return {"title": title, "facts": [fact for fact in facts if fact[1]], "texts": (), "head": (),
            "rows": (), "output": "", "kinds": KINDS, "lead": title == "Now", **more}


def given_up(wu):
    """Say why a workunit was given up."""
    return ", ".join(why for bit, why in GIVEN_UP.items() if wu.error_mask & bit)


def lasting(seconds):
    """Write a duration as people say it."""
    return plugged("span")[-1](int(seconds))


def several(n, one, many):
    """Write a number of things."""
    return f"{n:,} {one if n == 1 else many}"


def moment(t, now):
    """Write a time, and how far away it is; empty for none."""
    if not t:
        return ""
    return f"@{t} ({f'in {lasting(t - now)}' if t > now else plugged('ago')[-1](now - t)})"


def some(items, most=5):
    """Write the first of many sentences' parts."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def link_to(name):
    """Return a link to the story of a name."""
    return name, address(name)


def host_link(host_id):
    """Return a link to a computer, empty for none."""
    return (f"computer {host_id}", address(f"computer-{host_id}")) if host_id else ""


def state_of(r, hide=False):
    """Say how a copy stands; `hide` what was found."""
    if r.server_state == S.IN_PROGRESS:
        return "with a computer"
    if r.server_state != S.OVER:
        return "waits for a computer" if r.server_state == S.UNSENT else "kept back"
    if hide and r.outcome in (O.SUCCESS, O.VALIDATE_ERROR):
        return "came back"
    if hide and r.outcome == O.DIDNT_NEED:
        return "waits for a computer"  # The truth would tell that the workunit is decided.
    return JUDGED[r.validate_state] if r.outcome == O.SUCCESS else ENDED[r.outcome]


def refusals(r):
    """Say why computers that asked did not get a copy."""
    given = r.refusals or []
    reasons = Counter(reason for _, _, reason in given).most_common(3)
    return f"asked for {several(len(given), 'time', 'times')}, refused because: " + "; ".join(
        f"{text} ({n})" if n > 1 else text for text, n in reasons) if given else ""


def hidden(wu, public):
    """Say whether the public must not know yet who computes a workunit and what was found."""
    return public and wu.id not in plugged("told")[-1]([wu])


# ---- What it waits for -------------------------------------------------------------


def outlook(wu, results, now, hide):
    """Say in sentences what was decided of a workunit, and what it waits for now."""
    found = []
    if wu.error_mask:
        found.append(f"given up: {given_up(wu)}")
    elif wu.canonical_resultid and not hide:
        found.append(decision(wu, results))
    elif not hide:
        found += undecided(wu, results, now)
    found += outstanding(wu, results, now, hide)
    if hide:
        return found or ["not decided yet, or not all copies are back"]
    for key in ((name, wu.id) for name in (str(wu.app_id), *apps)):
        if key in project.put_off:
            found.append(f"put off until {moment(project.put_off[key], now)} after an error: see "
                         f"the troubles on the first page")
    found += [text for more in plugged("waits_for") for text in more(wu, results, now)]
    return found + afterwards(wu, results, now)


def decision(wu, results):
    """Say by how many a workunit was decided."""
    valid, wrong = (sum(r.validate_state == state and r.outcome == O.SUCCESS for r in results)
                    for state in (V.VALID, V.INVALID))
    name = next((r.name for r in results if r.id == wu.canonical_resultid), "a copy that is gone")
    if valid == 1 and not wrong:
        return f"decided: the only answer was taken, that of {name}"
    return f"decided: {valid} of {valid + wrong} agreed; the answer is that of {name}"


def undecided(wu, results, now):
    """Say how far a workunit is from being decided."""
    usable = [r for r in results if r.outcome == O.SUCCESS and r.validate_state != V.INVALID]
    if wu.need_validate:
        return [f"waits for the comparison of "
                f"{several(len(usable), 'answer', 'answers')}, {next_pass(wu, now)}"]
    words = ["not decided yet"]
    if usable:
        words.append(f"{len(usable)} of at least {wu.min_quorum} answers are in")
    if sum(r.validate_state == V.INCONCLUSIVE for r in usable) > 1:
        words.append("they do not agree")
    return [", ".join(words)]


def next_pass(wu, now):
    """Say when what waits for the application will be done; it may have failed at it."""
    if now < wu.mod_time + OVERDUE_SECONDS:
        return "in the next pass"
    return "which should be over by now: either no server runs, or the application failed at it " \
           "(see the troubles on the first page), or takes its answers in their order"


def outstanding(wu, results, now, hide):
    """Say which copies are not back: who has them until when, and why nobody does."""
    out = [f"{r.name} is with {'a computer' if hide else f'computer {r.host_id}'} until "
           f"{moment(r.report_deadline, now)}" for r in results if r.server_state == S.IN_PROGRESS]
    unsent = [r for r in results if r.server_state == S.UNSENT]
    found = []
    if out:
        n = several(len(out), "more answer", "more answers")
        open_ = hide or not (wu.canonical_resultid or wu.error_mask)
        found.append(f"{f'waits for {n}' if open_ else 'still out'}: {some(out)}")
    if unsent:
        found.append(some([f"{r.name} waits for a computer" + (
            f" ({refusals(r)})" if r.refusals else "") for r in unsent]))
    return found


def afterwards(wu, results, now):
    """Say what comes when a workunit is decided, or when the transitioner looks at it again."""
    if wu.assimilate_state == A.READY:
        served = wu.app_id in {a.id for a in apps.values()} or not apps
        return [f"waits for its application to take the answer, {next_pass(wu, now)}"
                if served else "waits for its application, which is not served now"]
    if wu.assimilate_state == A.INIT:
        wait = "" if wu.transition_time >= NEVER else \
            "in the next pass" if wu.transition_time <= now else moment(wu.transition_time, now)
        return [f"looked at again {wait}, or when a copy is reported"] if wait else []
    if wu.file_delete_state == F.DONE:
        gone = wu.mod_time + project.settings.purge_delay
        return ["finished: the application has its answer, its files are gone; it moves to the "
                f"archive {moment(gone, now) if gone > now else 'in the next pass'}"]
    if all(r.server_state == S.OVER for r in results):
        return ["finished: the application has its answer; its files go next"]
    return ["the application has its answer; inputs stay until the last copy is back"]


# ---- Stories -----------------------------------------------------------------------


def tell(name, now, public):
    """Tell the story of a name: title, parts, and whether it is known. For the public or not."""
    name = " ".join(name.encode("utf-8", "replace").decode().split())[:200]
    with db.atomic("DEFERRED"):  # of one moment; it keeps no writer waiting
        if wu := Workunit.get_or_none(name=name):
            return f"Workunit {wu.name}", of_workunit(wu, copies_of(wu), now, public), True
        r = Result.get_or_none(name=name)
        if r and not (public and r.server_state == S.INACTIVE):  # kept for spot checks: a secret
            return f"Copy {r.name}", of_result(r, now, public), True
        number = HOST_NUMBER.fullmatch(name)
        host = number and Host.get_or_none(id=int(number[1]))
        hosts = [host] if host else [] if number else hosts_named(name)
        if len(hosts) == 1:
            return f"Computer {hosts[0].id}", of_host(hosts[0], now, public), True
    if hosts:
        return f"{len(hosts)} computers", [part(
            texts=(f"Which of them? All are called {name}.",), head=("Computer", "Last contact"),
            rows=[(host_link(h.id), moment(h.rpc_time, now)) for h in hosts])], True
    return (None if number else from_archive(name, now, public)) or unknown(name)


def copies_of(wu):
    """Read the copies of a workunit, in the order in which they were made."""
    return list(Result.select().where(Result.workunit == wu.id).order_by(Result.id))


def hosts_named(name):
    """Find computers by the name that all may see."""
    newest = Host.select(fn.MAX(Host.id)).scalar() or 0
    found = Host.select().where(Host.id > newest - HOSTS_SEARCHED, Host.domain_name == name)
    return [host for host in found.order_by(Host.id.desc()).limit(200)
            if plugged("computer_name")[-1](host) == name][:20]


def of_workunit(wu, results, now, public):
    """Tell of a workunit: what it waits for, its copies, its history."""
    hide = hidden(wu, public)
    app = App.get_or_none(id=wu.app_id)
    facts = (("Application", app.name if app else "?"), ("Made", moment(wu.create_time, now)),
             ("Wanted", f"at least {wu.min_quorum} answers, for now {wu.target_nresults} copies "
                        f"that may give one, never more than {wu.max_total_results}"),
             ("Time for each copy", lasting(wu.delay_bound)))
    shown = [r for r in results if not (hide and r.server_state == S.INACTIVE)]
    rows = [(link_to(r.name), "" if hide else host_link(r.host_id),
             f"@{r.sent_time}" if r.sent_time else "", back(r), state_of(r, hide),
             "" if hide else credit(r, wu)) for r in shown]
    if hide:  # The number wanted, beside that of copies, would tell a spot check.
        facts = tuple(fact for fact in facts if fact[0] != "Wanted")
    return [part("Now", texts=(*outlook(wu, results, now, hide), *[HIDDEN] * hide)),
            part(facts=facts),
            part("Copies", head=("Copy", "Computer", "Sent", "Back", "State", "Credit"), rows=rows,
                 texts=() if rows else ("None yet.",)),
            history(wu, None, hide)]


def back(r):
    """Say when a copy came back, or is due."""
    if r.received_time:
        return f"@{r.received_time}"
    return f"due @{r.report_deadline}" if r.report_deadline else ""


def credit(r, wu):
    """Say what credit a copy got, and why."""
    sentence = next((say(r, wu) for say in plugged("credit_sentence")), None)
    return sentence or (f"{r.granted_credit:.4g}" if r.granted_credit else "")


def of_result(r, now, public):
    """Tell of one copy: where it is or was, what became of it, its history."""
    wu = r.workunit
    hide = hidden(wu, public)
    facts = (
        ("Workunit", link_to(wu.name)), ("State", state_of(r, hide)),
        ("Computer", "told later" if hide and r.host_id
         else host_link(r.host_id)),
        ("Made", "" if hide else moment(r.create_time, now)), ("Sent", moment(r.sent_time, now)),
        ("Deadline", moment(r.report_deadline, now)), ("Back", moment(r.received_time, now)),
        ("Ran", f"{r.elapsed_time:.4g} s" if r.received_time else ""),
        ("Exit status", f"{r.exit_status}, client state {r.client_state}"
         if r.outcome == O.CLIENT_ERROR else ""),
        ("Not sent", refusals(r)),
        ("Credit", "" if hide else credit(r, wu)))
    output = "" if public else r.stderr_out[-4000:]
    return [part("Now", texts=(waits_of_copy(r, wu, now, hide), *[HIDDEN] * hide)),
            part(facts=facts), history(wu, r, hide),
            *([part("What its program wrote", output=output)] if output else [])]


def waits_of_copy(r, wu, now, hide):
    """Say what one copy waits for."""
    if r.server_state == S.IN_PROGRESS:
        late = r.report_deadline < now
        return f"waits for its computer until {moment(r.report_deadline, now)}" + \
            ", and is given up in the next pass" * late
    if r.server_state != S.OVER or hide and r.outcome == O.DIDNT_NEED:
        return "waits for a computer"
    if hide or (r.outcome, r.validate_state) not in ((O.SUCCESS, V.INIT),
                                                     (O.SUCCESS, V.INCONCLUSIVE)):
        return "is over: it waits for nothing"
    return "waits to be compared" + " with another copy" * (not wu.need_validate)


def history(wu, r, hide):
    """Return what happened to a workunit, or to one of its copies alone, in order."""
    events = list(Event.select().where(Event.workunit == wu.id)
                  .order_by(Event.id.desc()).limit(EVENTS_SHOWN))[::-1]
    reasons = reasons_of_copies(events)
    number = None if r is None else int(r.name.rpartition("_")[2])
    rows = [row_of(e, wu.name, reasons.get(e.id, ""), hide) for e in events
            if number in (None, e.copy) and not (hide and e.rule not in OPEN_RULES)]
    return part("History", texts=() if rows else ("Nothing is known of it (any more).",), rows=rows,
                head=("When", "Of", "Computer", "What", "Numbers", "Rules", "Meaning"))


def row_of(e, name, more, hide):
    """Return an event as a row of a table."""
    known = RULES.get(e.rule)
    copy = link_to(f"{name}_{e.copy}") if e.copy >= 0 else ""
    return (f"@{e.time}", copy, "" if hide else host_link(e.host), e.rule or "decision",
            "; ".join(filter(None, (e.text, more))), known.cites if known else "",
            known.why if known else "")


def reasons_of_copies(events):
    """Say why each repeat was made: how the other copies stood then, replayed from the events."""
    copies, reasons, before = {}, {}, Counter()
    if not events or events[0].rule != "make a copy":
        return {}  # The beginning was forgotten: what is left would count too few.
    for n, e in enumerate(events):
        if e.rule == "make a copy":
            if events[n - 1].rule != e.rule or n == 0:
                before = Counter(map(standing, copies.values()))
            if n and sum(before.values()):
                reasons[e.id] = f"{before['usable']} usable, {before['waiting']} waiting or out, " \
                                f"{before['useless']} of no use"
        if e.rule in RULES and e.copy >= 0:
            copies.setdefault(e.copy, {}).update(RULES[e.rule].after)
    return reasons


def standing(state):
    """Say what a copy is good for, from the state fields that rules have set."""
    if state.get("server_state") != S.OVER:
        return "waiting"
    good = state.get("outcome") == O.SUCCESS and state.get("validate_state") != V.INVALID
    return "usable" if good else "useless"


def of_host(host, now, public):
    """Tell of a computer: how it stands, what its last requests got, its last copies."""
    held = Result.select().where(IN_PROGRESS, Result.host == host.id).count()
    facts = (
        ("Name", plugged("computer_name")[-1](host)),
        ("Volunteer", plugged("volunteer_name")[-1](host.user)),
        ("Joined", moment(host.create_time, now)), ("Last contact", moment(host.rpc_time, now)),
        ("Processors", str(host.p_ncpus)), ("Holds", several(held, "copy", "copies")),
        ("Credit", f"{host.total_credit:,.4g}"),
        ("From sending to report", host.avg_turnaround and lasting(host.avg_turnaround)),
        ("Got nothing last time", host.why_no_work))
    standing = [text for say in plugged("trust_of_host") for text in say(host, now)]
    events = Event.select().where(OF_HOST, Event.host == host.id).order_by(
        Event.id.desc()).limit(REQUESTS_KEPT)
    return [part(facts=facts),
            part("Standing", texts=(*standing, *quotas(host, now)) or ("Nothing is known yet.",)),
            requests_of(host, now, public), last_copies(host, public),
            *([] if public or not events else [part(
                "Decisions about it", head=("When", "What"),
                rows=[(f"@{e.time}", e.text or e.rule) for e in events])])]


def quotas(host, now):
    """Say how many copies a host may have of each application today."""
    rows = HostAppVersion.select(HostAppVersion, AppVersion, App).join(AppVersion).join(App).where(
        HostAppVersion.host == host.id).order_by(HostAppVersion.id.desc()).limit(20)
    for row in rows:
        version = row.app_version
        today = row.n_jobs_today if row.quota_day == now // 86400 else 0
        yield f"{version.app.name} {version.version_num} ({version.platform}): " \
              f"{several(today, 'copy', 'copies')} today of {row.max_jobs_per_day} for each " \
              f"processor, {row.consecutive_valid} valid in a row"


def requests_of(host, now, public):
    """Tell what the last requests of a host for work got, and why not more."""
    row = HostTrace.get_or_none(host=host.id)
    rows = []
    for entry in json.loads(row.requests) if row else ():
        n = len(entry["sent"])
        names = "" if public or not n else ": " + ", ".join(entry["sent"][:3]) + " ..." * (n > 3)
        got = several(n, "copy", "copies") + names if n else "nothing"
        times = f"{entry['n']} times since @{entry['first']}" if entry["n"] > 1 else ""
        why = "; ".join(f"{text} ({k} times)" if k > 1 else text
                        for text, k in entry["reasons"].items())
        rows.append((moment(entry["last"], now), times, f"work for {entry['seconds']} s", got, why))
    return part("Its last requests for work", rows=rows, texts=() if rows else ("None yet.",),
                head=("When", "How often", "Asked for", "Got", "Why not more"))


def last_copies(host, public):
    """List the last copies of a host; the public sees those whose workunits are settled."""
    found = list(Result.select(Result, Workunit).join(Workunit).where(
        Result.host == host.id).order_by(Result.id.desc()).limit(REQUESTS_KEPT * 2))
    if public:
        known = plugged("told")[-1]([r.workunit for r in found])
        found = [r for r in found if r.workunit_id in known]
    rows = [(link_to(r.name), f"@{r.sent_time}", back(r), state_of(r), credit(r, r.workunit))
            for r in found]
    return part("Its last copies", rows=rows, head=("Copy", "Sent", "Back", "State", "Credit"),
                texts=(() if rows else ("None to show.",)) + (
                    ("Only those of decided workunits, with no copy out.",) if public else ()))


def unknown(name):
    """Say what names look like, and which ones are like this one."""
    near = list(dict.fromkeys(nearest(name)))[:NEAR_SHOWN]
    served = [app.name for app in App.select().limit(100)] or ["pi"]
    example = served[0]
    return f"Nothing is called {name}", [
        part(texts=(f"A workunit is called like {example}_3: its application, its number. A copy "
                    f"of it is called like {example}_3_0. A computer is called host 7, or by its "
                    f"name.",)),
        part("Near", rows=[(link_to(n),) for n in near], head=("Name",),
             texts=() if near else ("No name here is like it.",))], False


def nearest(name):
    """Find names like one: an application's, with its number; copies of the same workunit."""
    head, number = re.fullmatch(r"(.*?)((?:_[0-9]+)*)", name).groups()
    names = [app.name for app in App.select().limit(1000)]
    lower = {n.lower(): n for n in names}
    numbers = number.split("_")[1:]
    for app in (lower[n] for n in get_close_matches(head.lower(), lower, 3, 0.6)):
        for model, prefix in ((Workunit, "_".join([app, *numbers[:1]])),
                              (Result, "_".join([app, *numbers[:1]]) + "_" if numbers else "")):
            if prefix:  # The unique index of names has all with a prefix side by side.
                yield from (row.name for row in model.select(model.name).where(
                    model.name >= prefix, model.name < prefix + "~").order_by(model.name).limit(3))
        yield from (wu.name for wu in Workunit.select(Workunit.name).where(
            Workunit.name > f"{app}_", Workunit.name < f"{app}_~").order_by(Workunit.name).limit(3))


# ---- The archive -------------------------------------------------------------------


def from_archive(name, now, public):
    """Tell of a workunit that was purged, or of a copy of it, from the archive; None: not there."""
    owner = name.rpartition("_")[0]
    record, all_read = search_archive({name, owner} - {""}, ARCHIVE_BYTES[public])
    if record is None:
        app = App.get_or_none(name=owner)
        number = name.rpartition("_")[2]
        if all_read or not (app and number.isdecimal() and int(number[:15]) < app.next_number):
            return None
        return f"Workunit {name}", [part("Now", texts=(
            "It was finished and moved to the archive, which is too large to be searched here: "
            "the project's owner finds it in data/archive.",))], True
    purged, copies = record.pop("purge_time", 0), record.pop("results", [])
    wu = Workunit(**{k: v for k, v in record.items() if k in Workunit._meta.fields})
    results = [Result(**{k: v for k, v in r.items() if k in Result._meta.fields}) for r in copies]
    said = f"given up: {given_up(wu)}" if wu.error_mask else decision(wu, results)
    rows = [(r.name, host_link(r.host_id), f"@{r.sent_time}" if r.sent_time else "", back(r),
             state_of(r), f"{r.granted_credit:.4g}" if r.granted_credit else "") for r in results]
    return f"Workunit {wu.name}", [
        part("Now", texts=(said, f"purged {moment(purged, now)}: this is from the archive; its "
                                 f"history went with it")),
        part("Copies", head=("Copy", "Computer", "Sent", "Back", "State", "Credit"),
             rows=rows)], True


def search_archive(names, most):
    """Find the workunit of a name in the archives, the newest first; (it or None, all read?)."""
    # Up to `most` compressed bytes. The line is looked at before it is read as JSON: that is fast.
    wanted = [f'"name":{json.dumps(name)}'.encode() for name in names]
    for path in sorted((project.data / "archive").glob("workunits-*.jsonl.gz"), reverse=True):
        most -= path.stat().st_size
        if most < 0:
            return None, False
        try:
            with gzip.open(path) as file:
                for line in file:
                    if any(text in line for text in wanted):
                        record = json.loads(line)
                        if record["name"] in names:
                            return record, True
        except (OSError, EOFError, ValueError, KeyError):
            continue  # Damaged, or being written just now.
    return None, True


# ---- Shown -------------------------------------------------------------------------


def routes(app, clock):
    """Read the settings; add the page and the same as JSON."""
    global settings
    settings = minigrid.read_settings("setup.cfg", WhySettings, "why")

    @app.get("/why")
    def _():
        return page(bottle.request.query.getunicode("name") or "", clock())

    @app.get("/why/<name:path>")
    def _(name):
        if not name.endswith(".json"):
            return page(name, clock())
        title, parts, known = tell(name[:-5], clock(), True)
        body = json.dumps({"title": title, "parts": [as_json(part) for part in parts]})
        return bottle.HTTPResponse(body, 200 if known else 404, Content_Type="application/json",
                                   Cache_Control="no-store")


def page(name, now):
    """Return the page of a name, or the one that asks for a name."""
    title, parts, known = tell(name, now, True) if name.strip() else ("Why?", [], True)
    ask = dict(forms=[("/why", "name", "What happened to a workunit, a copy or a computer?", {
        "value": name, "maxlength": 200, "placeholder": "pi_3, pi_3_0, host 7",
        "autocapitalize": "none", "spellcheck": "false"})])
    return plugged("show_page")[-1](
        title, [ask, *parts], now, 200 if known else 404, times=TIME, cache="no-store",
        allow={"img-src": "data:", "form-action": "'self'"},
        json=address(name.strip() + ".json") if parts else "")


def address(name):
    """Return the address of a name's page."""
    return "/why/" + bottle.urlquote(name, safe="")


def utc(t):
    """Write a time for programs."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))


def as_json(part):
    """Return a part as JSON values; times as ISO 8601."""
    def plain(cell):
        text = cell[0] if isinstance(cell, tuple) else str(cell)
        return TIME.sub(lambda found: utc(int(found[1])), text)

    return {"title": part["title"], "texts": [plain(text) for text in part["texts"]],
            "facts": {name: plain(value) for name, value in part["facts"]},
            "rows": [dict(zip(part["head"], map(plain, row))) for row in part["rows"]]}


def commands(parsers):
    """Add the command why."""
    parser = parsers.add_parser(
        "why", help="tell what happened to a workunit, a copy or a computer, and what it waits for",
        description="Tell what happened to a workunit, a copy or a computer, when, by which rule, "
                    "and what it waits for now.")
    parser.add_argument("name", nargs="+", metavar="NAME",
                        help="such as pi_3 (a workunit), pi_3_0 (a copy), host 7 (a computer)")
    parser.add_argument("--data", metavar="DIR", help="data directory of the project")
    parser.set_defaults(run=run_why)


def run_why(options):
    """Print the story of a name; exit status 1 if nothing is called so."""
    now = wall_clock()
    with plugged("store_only")[-1](options):
        title, parts, known = tell(" ".join(options.name), now, False)
    print("\n".join(as_text(title, parts, now)))
    return 0 if known else 1


def as_text(title, parts, now):
    """Write a story as lines for a terminal."""
    yield plain(f"{title}, as of {clock(now, 0)}", now)
    for part in parts:
        yield f"\n{part['title']}" if part["title"] else ""
        yield from (f"  {plain(text, now)}" for text in part["texts"])
        yield from (f"  {name}: {plain(value, now)}" for name, value in part["facts"])
        yield from table(part, now) if part["rows"] else ()
        yield from (f"  {plain(line, now)}" for line in part["output"].splitlines())


def table(part, now):
    """Write a table as lines; what rules mean is left out, for it stands in the README."""
    head = [name for name in part["head"] if name != "Meaning"]
    rows = [head, *([plain(cell, now) for cell in row[:len(head)]] for row in part["rows"])]
    widths = [max(map(len, column)) for column in zip(*rows[1:])]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(max(width, len(name))) for cell, width, name in zip(
            row, widths, head) if width).rstrip()


def plain(cell, now):
    """Write a cell or sentence for a terminal; times as its clock shows them."""
    # Names and reasons come from strangers: nothing of theirs may steer the terminal.
    text = cell[0] if isinstance(cell, tuple) else str(cell)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return TIME.sub(lambda found: clock(int(found[1]), now), text)


def clock(t, now):
    """Write a time as clocks here show it, with its date unless it is today."""
    day, today = (time.strftime("%Y-%m-%d ", time.localtime(at)) for at in (t, now))
    return (day if day != today else "") + time.strftime("%H:%M:%S", time.localtime(t))
