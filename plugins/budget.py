"""An error budget instead of parameters: how much to check follows from what is measured.

An application says `validation = "recheck"` and, in place of `recheck`, how many of its answers may
be wrong: `wrong_answers_at_most = 1e-4`. Then:

* The answer of a host that is not *proven* is always compared with another's. Proven is who was
  right PROVEN times in a row where it was compared; a proof is good for a month. A single answer
  is believed only if its host is proven when the answer is judged.
* A workunit has two copies with probability r - 1, else one, drawn when it is made [S3-40 S3-42].
  A host cannot know which it got, so compared answers are a fair sample of all.
* p is the rate of wrong answers among compared ones of proven hosts: its upper bound (95 %), as
  few answers prove little. Of all answers at most (2 - r) p are believed and wrong, so
  r = 2 - budget / p is enough, if errors are few and scattered.
* t is the rate (upper bound) of proven hosts that turn bad, for each answer. Before one is noticed
  it gives (1 - c) / c wrong answers where c is the share of answers that are checked: no more than
  the budget if c = t / (t + budget). What r - 1 leaves of c is done by spot checks (known answers,
  where no vote can be won), up to SPOT_MAX; the rest by more second copies.
* Evidence decays with a half-life of 30 days, and a little is always checked.

Two equal answers are believed if one of the hosts was right before, and no more such hosts
contradict; three where nobody is known, and one more for each contradiction. All this takes errors
to be independent. Hosts that agree to lie give equal wrong answers: p and t are not what limits
those, but that they seldom are right before, spot checks, and the black list.

What was believed alone stays on a list until its host is compared the next time. Was it wrong then,
these answers are reported as doubtful, for they were handed over long ago.
"""

import time

from peewee import (SQL, BigIntegerField, BooleanField, Case, CharField, FloatField,
                    ForeignKeyField, IntegerField)

from minigrid import (CHUNK, CHUNKS_MAX, RULES, App, Host, Record, Result, ValidateState, Workunit,
                      append_exactly, apps, canonical_json, change, explain, fire, plugged,
                      prepared, project, remember, save_all)

V = ValidateState
PROVEN = 10  # right answers in a row, as BOINC's adaptive replication asks for
PROOF_SECONDS = 30 * 86400  # without a comparison until a proof is none any more
HALF_LIFE = 30 * 86400  # s, of the evidence
RECHECK_MIN = 0.02  # share of workunits with two copies, however good the hosts are
SPOT_MIN, SPOT_MAX = 0.01, 0.05  # a spot check costs as much as a second copy and checks one host
STRANGERS_ENOUGH = 3  # equal answers of hosts that were never right before
HOSTS_FEW = 10  # in a project so small there may be no third host: two are enough
PATIENCE = 1 / 8  # of the delay_bound: so long equal answers of strangers wait ...
LOOK_SECONDS = 600  # ... looked at so often
SURE = 1.645  # standard deviations: 95 % of upper bounds hold
DOUBTFUL_SHOWN = 30  # on the page; all are in a file, and each workunit's history has it


class Evidence(Record):
    """How the answers of a host to an application have stood up to comparison."""

    host = ForeignKeyField(Host, index=False)
    app = ForeignKeyField(App)
    run = IntegerField(default=0)  # right ones since the last wrong one
    singles = IntegerField(default=0)  # believed without comparison since the last one
    checked_time = BigIntegerField(default=0)  # the last comparison

    class Meta:
        indexes = ((("host", "app"), True),)


class Budget(Record):
    """What is known of an application's proven hosts together, decaying; and simple totals."""

    app = ForeignKeyField(App, unique=True)
    time = BigIntegerField(default=0)  # until which it has decayed
    checked = FloatField(default=0)  # answers of proven hosts that were compared
    wrong = FloatField(default=0)  # of these
    answers = FloatField(default=0)  # of proven hosts, compared or not
    found = FloatField(default=0)  # proven hosts that gave a wrong answer
    hosts = BigIntegerField(default=0)  # whose answers were ever judged
    settled = BigIntegerField(default=0)  # workunits with an answer, ever
    judged = BigIntegerField(default=0)  # answers judged for them, ever
    single = BigIntegerField(default=0)  # workunits whose answer was compared with nothing
    doubtful = BigIntegerField(default=0)  # of these, from hosts that were wrong the next time


class Waiting(Record):
    """A workunit whose equal answers wait until one of their hosts is found right elsewhere."""

    workunit = BigIntegerField(unique=True)
    until = BigIntegerField()  # then one more copy is asked for
    again = BigIntegerField(index=True)  # the next look


class Single(Record):
    """An answer that was believed alone; it goes with the next right one of its host.

    After a wrong one it stays, as doubtful: the application has long taken the answer.
    """

    host = BigIntegerField()
    app = IntegerField()
    workunit = CharField()
    number = BigIntegerField()  # the i of workunit(i)
    time = BigIntegerField()
    doubtful = BooleanField(default=False)

    class Meta:
        indexes = ((("host", "app"), False),)


Single.add_index(Single.index(Single.id, where=SQL("doubtful"), name="single_doubtful"))
TABLES = (Evidence, Budget, Waiting, Single)


# ---- What an application says --------------------------------------------------


def check_share(value):
    """Return an error budget as a number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= value <= 0.5:
        raise ValueError("must be a share between 1e-9 and 0.5, such as 1e-4")
    return float(value)


CONSTANTS = {"wrong_answers_at_most": check_share}


def budget_of(application):
    """Return the error budget of an application, or None."""
    return application.policies.get("wrong_answers_at_most") if application else None


def check_application(application):
    """Refuse an error budget beside what would contradict it. Raises ValueError."""
    if budget_of(application) is None:
        return
    policies = application.policies
    if policies["validation"] != "recheck":
        raise ValueError(f"wrong_answers_at_most needs validation = \"recheck\"; found "
                         f"validation = {policies['validation']!r}")
    given = [name for name in ("recheck", "spot_checks") if name in policies]
    if given:
        raise ValueError(f"wrong_answers_at_most chooses how much is checked: leave out "
                         f"{' and '.join(given)}, or wrong_answers_at_most")
    check_room(application.parameters)


def check_room(given):
    """Check that parameters leave room for the copies that may be needed. Raises ValueError."""
    full = plugged("check_parameters")[-1]({**given, "min_quorum": 2, "target_nresults": 2})
    if full["max_success_results"] < 3:
        raise ValueError("wrong_answers_at_most may need a third answer: max_success_results must "
                         "be 3 or more")


# ---- How much to check ---------------------------------------------------------


def upper_bound(n):
    """Return the mean of events that n seen ones do not exceed, with 95 % (Wilson, Hilferty)."""
    k = n + 1
    return k * (1 - 1 / (9 * k) + SURE / (3 * k ** 0.5)) ** 3


def rates(known):
    """Return the upper bounds p (wrong, of checked) and t (turned bad, of all answers)."""
    return (min(1, upper_bound(known.wrong) / known.checked) if known.checked else 1,
            min(1, upper_bound(known.found) / known.answers) if known.answers else 1)


def choose(budget, p, t):
    """Return the re-check coefficient r and the spot-check rate s for measured rates p, t."""
    c = max(t / (t + budget), RECHECK_MIN)
    second = max(1 - budget / p, RECHECK_MIN)
    s = min(max(c - second, SPOT_MIN), SPOT_MAX)
    return 1 + min(max(second, c - s), 1), s


def known_of(application_id, now):
    """Return what is known of an application's hosts as of now, unsaved; empty if nothing is."""
    known = Budget.get_or_none(app=application_id) or Budget(app=application_id, time=now)
    if now > known.time:
        left = 0.5 ** ((now - known.time) / HALF_LIFE)
        for name in ("checked", "wrong", "answers", "found"):
            setattr(known, name, getattr(known, name) * left)
        known.time = now
    return known


def chosen_for(application, now):
    """Return r, s, p and t for an application with a budget."""
    p, t = rates(known_of(application.id, now))
    return (*choose(budget_of(application), p, t), p, t)


def spot_check_rate(application):
    """Return the share of requests that a spot check is for; None without a budget."""
    return None if budget_of(application) is None else chosen_for(application, project.now)[1]


# ---- How many copies -----------------------------------------------------------


def shape_work(application, given):
    """Draw whether a workunit has one copy or two [S3-35 S3-40 S3-42]."""
    if budget_of(application) is None:
        return given
    check_room(given)
    copies = 1 + (project.rng.random() < chosen_for(application, project.now)[0] - 1)
    return {**given, "min_quorum": copies, "target_nresults": copies}


def at_send(r, wu, host, offer, now):
    """Ask for a second copy at once where the first goes to a host that is not proven."""
    if budget_of(offer.application) is None or wu.number is None or wu.canonical_resultid:
        return
    if wu.min_quorum > 1:
        if r.name.endswith("_0"):
            explain(wu, f"two copies, {say_chosen(offer.application, now)}")
        return
    known = evidence_of([host.id], wu.app_id)[host.id]
    if is_proven(known, now):
        explain(wu, f"one copy: host {host.id} is proven, {known.run} right answers in a row; "
                    f"{say_chosen(offer.application, now)}")
    else:
        ask_second(wu, now, f"host {host.id} is not proven, {known.run} of {PROVEN} right "
                            f"answers in a row")


def say_chosen(application, now):
    """Say which coefficient is in force, and why, in a clause."""
    r, _, p, t = chosen_for(application, now)
    return f"r = {r:.2f} for a budget of {budget_of(application):g} (wrong at most {p:.2g}, " \
           f"turning bad {t:.2g})"


def ask_second(wu, now, why):
    """Raise a workunit from one copy to two."""
    wu.min_quorum = 2
    wu.target_nresults = max(wu.target_nresults, 2)
    wu.transition_time = min(wu.transition_time, now)
    explain(wu, f"two copies instead of one: {why}")


def ask_another(wu, verdict, now):
    """Say why answers that could be believed elsewhere are not, and what happens instead."""
    equal = max(map(len, verdict.groups), default=0)
    strangers = f"{equal} equal answers, but none of their hosts was found right elsewhere"
    if wu.min_quorum == 1:
        ask_second(wu, now, "the host of the only answer is not proven, or not any more")
    elif not verdict.pending and equal > 1:
        explain(wu, "one more copy: equal answers, but not of more hosts that were found right "
                    f"elsewhere than contradict them, nor of {STRANGERS_ENOUGH} that were not, "
                    f"and one more for each contradiction")
    elif verdict.pending and not Waiting.select().where(Waiting.workunit == wu.id).exists():
        patience = int(PATIENCE * wu.delay_bound)
        Waiting.create(workunit=wu.id, until=now + patience, again=now + LOOK_SECONDS)
        explain(wu, f"waits {patience} s at most: {strangers}")


@prepared
def to_vouch_for(now):
    """Find the workunits whose hosts may be known by now."""
    return Waiting.select(Waiting.workunit).order_by(Waiting.again).where(
        Waiting.again <= now).limit(CHUNK * CHUNKS_MAX).tuples()


def vouching(now):
    """Stage: look again at equal answers of strangers, of whom somebody may be known by now."""
    ids = [wu_id for wu_id, in to_vouch_for(now)]
    return sum(project.write(lambda: look_again(ids[k:k + CHUNK], now))
               for k in range(0, len(ids), CHUNK))


def look_again(ids, now):
    """Wake workunits of which a host is known by now, forget those decided; runs in the writer."""
    undecided = {wu.id for wu in Workunit.select(Workunit.id).where(
        Workunit.id.in_(ids), Workunit.canonical_resultid == 0, Workunit.error_mask == 0)}
    Waiting.delete().where(Waiting.workunit.in_([i for i in ids if i not in undecided])).execute()
    # The last time is when patience has ended; the row stays until somebody sees it decided.
    again = Case(None, [(Waiting.until > now, now + LOOK_SECONDS)], now + 86400)
    Waiting.update(again=again).where(Waiting.workunit.in_(list(undecided))).execute()
    # To judge costs files and hooks: only where it may end otherwise than the last time.
    over = {row.workunit for row in Waiting.select(Waiting.workunit).where(
        Waiting.workunit.in_(list(undecided)), Waiting.until <= now)}
    known = {row[0] for row in Result.select(Result.workunit).distinct().join(
        Evidence, on=(Evidence.host == Result.host) & (Evidence.app == Result.app))
        .where(Result.workunit.in_(list(undecided)), Evidence.run > 0).tuples()}
    return change([i for i in ids if i in over | known], lambda wu: True,
                  lambda wu, results: fire(RULES["ask for validation"], wu), now)


FIRST_STAGES = (vouching,)  # before the validator, which is to see what it wakes


def around_judge(judge):
    """Believe one answer only if its host is proven now, several by who is known among them."""
    def with_budget(wu, results, application):
        verdict = judge(wu, results, application)
        if budget_of(application) is None or not verdict.groups or verdict.known \
                or wu.canonical_resultid:
            return verdict
        group = choose_group(wu, results, verdict)
        if not group:
            verdict.canonical, verdict.matching, verdict.unchecked = 0, set(), set()
            verdict.pending = may_wait(wu, results, verdict)
        elif group != verdict.matching:
            verdict.canonical, verdict.matching, verdict.unchecked = min(group), group, set()
        return verdict
    return with_budget


def choose_group(wu, results, verdict):
    """Return the ids of the answers to believe: equal ones, or that of a proven host; or none.

    Strangers may all be one person: where somebody is known, those alone have votes.
    """
    evidence = evidence_by_result(wu, results, verdict)
    if len(evidence) == 1:
        proven = all(is_proven(mine, project.now) for mine in evidence.values())
        return verdict.matching if proven else set()
    if known_of(wu.app_id, project.now).hosts < HOSTS_FEW:
        return verdict.matching - verdict.unchecked

    def rank(group):
        return sum(evidence[rid].run > 0 for rid in group), len(group)

    group = max(verdict.groups, key=rank)
    (known, n), rivals = rank(group), [rank(g) for g in verdict.groups if not g & group]
    if len(evidence) >= min(wu.max_success_results, wu.max_total_results):  # the last chance
        enough = n >= (2 if known else STRANGERS_ENOUGH) and all(r < (known, n) for r in rivals)
    elif known:
        enough = n > 1 and all(votes < known for votes, _ in rivals)
    else:  # Each contradiction asks for one more.
        enough = n >= STRANGERS_ENOUGH + len(evidence) - n
    return group if enough else set()


def may_wait(wu, results, verdict):
    """Return equal answers of strangers, while somebody may still come to be known of them."""
    equal = max(verdict.groups, key=len)
    waiting = Waiting.get_or_none(workunit=wu.id)
    if len(equal) < 2 or waiting and project.now >= waiting.until or any(
            mine.run for mine in evidence_by_result(wu, results, verdict).values()):
        return set()
    return equal


def evidence_by_result(wu, results, verdict):
    """Return the evidence behind each usable answer: {result id: Evidence}."""
    chosen = [r for r in results if r.id in usable(verdict)]
    evidence = evidence_of([r.host_id for r in chosen], wu.app_id)
    return {r.id: evidence[r.host_id] for r in chosen}


def usable(verdict):
    """Return the ids of the answers that could be read, and of which nobody knows better."""
    return verdict.seen - verdict.unreadable - verdict.unsure - verdict.wrong


# ---- Evidence ------------------------------------------------------------------


def evidence_of(host_ids, app_id):
    """Return the evidence of hosts, new and unsaved where there is none: {host id: Evidence}."""
    found = {row.host_id: row for row in Evidence.select().where(
        Evidence.app == app_id, Evidence.host.in_(host_ids))}
    return {i: found.get(i) or Evidence(host=i, app=app_id) for i in host_ids}


def handed_on(r, host, now):
    """Let the run of a host end whose task another one of its volunteer reports [C43]."""
    Evidence.update(run=0).where(Evidence.host == r.host_id, Evidence.app == r.app_id).execute()


def is_proven(evidence, now):
    """Has a host been right often enough, and lately?"""
    return evidence.run >= PROVEN and now <= evidence.checked_time + PROOF_SECONDS


def at_verdict(wu, judged, verdict, hosts, now):
    """Count what was compared, and who was right; runs in the writer, last of a verdict."""
    application = next((a for a in apps.values() if a.id == wu.app_id), None)
    if budget_of(application) is None:
        return
    if not wu.canonical_resultid and usable(verdict):
        ask_another(wu, verdict, now)
    if not judged:
        return
    known, rows = known_of(wu.app_id, now), []
    by_host = evidence_of([r.host_id for r in judged], wu.app_id)
    if verdict.canonical and usable(verdict) - verdict.matching:
        n = sum(by_host[r.host_id].run > 0 for r in judged if r.id in verdict.matching)
        explain(wu, f"{len(verdict.matching)} of {len(usable(verdict))} answers are believed; of "
                    f"their hosts {n or 'none'} had been found right elsewhere")
    for r in judged:
        evidence = by_host[r.host_id]
        known.hosts += evidence.id is None
        if r.id in verdict.unchecked:
            believe(evidence, known, wu, now)
        else:
            compare(evidence, known, r, r.validate_state == V.VALID,
                    r.id in verdict.unreadable, now)
        rows.append(evidence)
    if verdict.canonical:
        known.settled += 1
        # The store may give the number of a workunit that is purged to the next one.
        Waiting.delete().where(Waiting.workunit == wu.id).execute()
    elif late := late_copies(wu, judged, verdict):
        rows += recheck_single(wu, late, known, now)
    known.judged += len(judged)
    save_all([known, *rows])


def believe(evidence, known, wu, now):
    """Count an answer that was compared with nothing, and remember it until its host is."""
    evidence.singles += 1
    known.answers += 1
    known.single += 1
    Single.create(host=evidence.host_id, app=wu.app_id, workunit=wu.name, number=wu.number,
                  time=now)


def compare(evidence, known, r, right, unreadable, now):
    """Count an answer that was compared; one that cannot be read only ends a run."""
    proven = is_proven(evidence, now)
    if proven and not unreadable:
        known.checked += 1
        known.answers += 1
        if not right:
            known.wrong += 1
            known.found += 1
            explain(r, f"host {evidence.host_id} was proven by {evidence.run} right answers and is "
                       f"no longer")
    evidence.run = evidence.run + 1 if right else 0
    evidence.checked_time = now
    if evidence.singles and not unreadable:
        known.doubtful += 0 if right else doubt(evidence, r, now)
        evidence.singles = 0
        Single.delete().where(Single.host == evidence.host_id, Single.app == evidence.app_id,
                              ~Single.doubtful).execute()


def doubt(evidence, r, now):
    """Tell all who may care which answers of a host, believed alone, are doubtful; return how many.

    In the histories of those still in the store, and in a file beside the wrong answers.
    """
    mine = (Single.host == evidence.host_id) & (Single.app == evidence.app_id) & ~Single.doubtful
    rows = list(Single.select().where(mine).order_by(Single.id))
    why = f"host {evidence.host_id}, whose word alone was taken for it, was wrong in {r.name}, " \
          f"the next of its answers that was compared"
    for wu in Workunit.select().where(Workunit.name.in_([row.workunit for row in rows[-CHUNK:]])):
        explain(wu, f"doubtful: {why}")
    explain(r, f"doubtful: {len(rows)} answers of host {evidence.host_id} that were believed "
               f"alone since it was compared last")
    path = project.data / "wrong" / f"{App.get_by_id(evidence.app_id).name}.doubtful.jsonl"
    lines = [canonical_json(dict(workunit=row.workunit, number=row.number, host=row.host,
                                 believed=row.time, time=now, why=why)) for row in rows]
    try:
        append_exactly(path, "".join(line + "\n" for line in lines).encode())
    except OSError as error:  # No reason to leave the verdict undone.
        remember(now, f"doubtful answers are not noted in {path}: {error}")
    Single.update(doubtful=True).where(mine).execute()
    return len(rows)


def hourly(now):
    """Forget what is too old to be of use."""
    project.write(lambda: Single.delete().where(
        Single.time < now - 365 * 86400).execute())


def late_copies(wu, judged, verdict):
    """Return the copies that came after an answer which had been believed alone."""
    if wu.min_quorum > 1 or not wu.canonical_resultid or verdict.known:
        return []
    return [r for r in judged if r.id in usable(verdict)]


def recheck_single(wu, judged, known, now):
    """Compare the answer that was believed alone with late ones; return its evidence, changed.

    Where they differ nobody knows who is wrong: the run of either ends.
    """
    r = Result.get_by_id(wu.canonical_resultid)
    evidence = evidence_of([r.host_id], wu.app_id)[r.host_id]
    right = all(late.validate_state == V.VALID for late in judged)
    compare(evidence, known, r, right, False, now)
    return [evidence]


# ---- What is shown -------------------------------------------------------------


def trust_facts(now):
    """Return sections of the page of trust: what budgets choose and cost; what is in doubt."""
    rows = []
    for application in apps.values():
        if budget_of(application) is not None:
            known = known_of(application.id, now)
            r, s, p, t = chosen_for(application, now)
            rows.append([
                application.name, f"{budget_of(application):g}", f"{r:.2f}", f"{s:.1%}",
                f"{known.wrong:.3g} of {known.checked:,.0f}, at most {p:.2g}",
                f"{known.found:.3g} in {known.answers:,.0f}, at most {t:.2g}",
                f"{known.judged / known.settled:.2f} (expected {r + s:.2f} from proven hosts)"
                if known.settled else f"expected {r + s:.2f}",
                f"{known.single} of {known.settled}", known.doubtful])
    budgets = dict(
        title="Error budgets",
        text="How much is checked follows from what is measured: r is the mean number of copies "
             "of a workunit, spot checks are mixed into so many requests. This assumes that "
             "computers err independently of each other. Those who agree to give the same wrong "
             "answer can exceed the budget until a spot check finds them.",
        columns=["application", "wrong at most", "r", "spot checks", "wrong, of proven hosts",
                 "turned bad", "answers for each workunit", "believed alone", "doubtful"],
        rows=rows)
    return [budgets] * bool(rows) + doubtful_answers()


def doubtful_answers():
    """Return the section of the page of trust with the last doubtful answers, if there are any."""
    names = dict(App.select(App.id, App.name).tuples())
    rows = [[row.workunit, row.number, names.get(row.app, "?"), f"computer {row.host}",
             time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(row.time))]
            for row in Single.select().where(SQL("doubtful")).order_by(Single.id.desc())
            .limit(DOUBTFUL_SHOWN)]
    return [dict(
        title="Doubtful answers",
        text="Believed alone, from a computer whose next compared answer was wrong. They stay as "
             "they are: compute them again where it matters. Here are the last ones, in "
             "data/wrong all of them.",
        columns=["workunit", "number", "application", "computer", "believed"], rows=rows)] \
        if rows else []
