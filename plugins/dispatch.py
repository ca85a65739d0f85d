"""BOINC's way of handing out work: by priority, then age, if the host can do it in time [D8].

A dispatch policy chooses among the unsent results and says why it gave none, resends what was lost,
and names what need not be done any more; `send()` of the core changes the states. What a host
cannot do is counted, and ends when too many could not [S0-13]. Repeats go to reliable hosts first.
"""

import functools
from collections import Counter
from dataclasses import dataclass

from peewee import SQL, BigIntegerField, FloatField, fn

import minigrid
from minigrid import (COULDNT_SEND, UNSENT, AppVersion, AssimilateState, ClientError,
                      ErrorMask, HostAppVersion, Record, Result, Rule, Workunit, apps, db, explain,
                      fire, output_files, plugged, prepared, project, results_named, say_to,
                      send, setting, working)

PYTHON_SHARE = 0.01  # Python operations for each floating-point operation of a usual benchmark
UNFIT_DELAY = 3600  # s, for a computer that nothing here runs on
PACE_GAIN_MAX = 20  # nobody is taken for more times faster than the benchmark says
ERROR_RATE, ERROR_WEIGHT = 0.1, 0.05  # BOINC's: what a new host is taken for, weight of a result
TOLD_TO_STOP = 202  # exit status of a task that was ended on our own order: nobody's fault
GOOD_ENDS = ("valid",)  # rules by which a result ends well for its host's reputation, or badly
BAD_ENDS = ("invalid", "wrong", "unreadable output", "report error", "report error late",
            "time out")


@dataclass(frozen=True)
class DispatchSettings:
    """The [dispatch] section of setup.cfg: which hosts are reliable, and what that is good for."""

    reliable_max_avg_turnaround: int = setting(
        0, "a reliable host reports within so many s on average; 0: repeats may go to any host")
    reliable_max_error_rate: float = setting(
        0.05, "and has no larger share of errors; a new host begins with 0.1")
    reliable_reduced_delay_bound: float = setting(
        0.5, "share of the usual time that a reliable host gets for a repeat")
    reliable_head_start: int = setting(
        3600, "s that a repeat waits for a reliable host before anybody may have it")


class Reputation(Record):
    """The share of a host's results that went wrong lately, as BOINC reckons it."""

    host = BigIntegerField(primary_key=True)
    error_rate = FloatField()


@dataclass
class Assignment:
    """One result for a host; addresses are paths, made whole by whoever knows the host's view."""

    name: str
    workunit: str
    app: str
    about: str
    app_version: int
    version_num: int
    platform: str
    plan_class: str
    ncpus: float  # processors that it keeps busy
    flops: float  # estimated operations a second that this host does with all of them
    command_line: str  # arguments: the version's, then the workunit's
    files: list
    input: dict
    inputs: list  # further input files, each with the open_name by which the job knows it
    output: dict
    report_deadline: int  # s UTC on the server's clock, without the grace period [C22 C34]
    delay_bound: int
    rsc_fpops_est: float
    rsc_fpops_bound: float
    rsc_memory_bound: float
    rsc_disk_bound: float


TABLES = (Reputation,)
settings = DispatchSettings()


def routes(app, clock):
    """Read the settings. Raises ClientError."""
    global settings
    settings = minigrid.read_settings("setup.cfg", DispatchSettings, "dispatch")
    if not 0 < settings.reliable_reduced_delay_bound <= 1:
        raise ClientError("setup.cfg: setting 'reliable_reduced_delay_bound' of [dispatch] must be "
                          "a share of the usual time, above 0 and at most 1")


def look_at_held(request, reply, host, versions, held, lost_some, changed, now):
    """Tell a host what to drop of its results in progress, and send again what it has lost.

    `held` are the results the store believes it to have; `lost_some` says that it reported
    something twice, so a reply of ours may not have arrived [C43].
    """
    if project.settings.send_result_abort:
        tell_what_to_drop(request, reply, held)
    if request.other_results is not None and (project.settings.resend_lost_results or lost_some):
        resend_lost(request, reply, host, versions, held, changed, now)


def tell_what_to_drop(request, reply, held):
    """Name the results in the client's hands that nobody needs any more [C42]."""
    wanted = {r.name for r in held if r.workunit.assimilate_state != AssimilateState.DONE
              and not r.workunit.error_mask & ErrorMask.CANCELLED} | still_wanted(held)
    names = [name for name in request.other_results or [] if name not in wanted]
    rows = {r.name: r for r in results_named(names)}
    for name in names:
        r = rows.get(name)
        if r is None or r.host_id != reply.hostid or r.workunit.error_mask & ErrorMask.CANCELLED:
            reply.aborts.append(name)
        else:
            reply.aborts_if_not_started.append(name)


def still_wanted(held):
    """Return the names of results that a policy wants answered, though their workunits are done."""
    return {name for wanted in plugged("wanted_after_all") for name in wanted(held)}


def resend_lost(request, reply, host, versions, held, changed, now):
    """Send again what the host should hold and does not list, or give it up at once [C43].

    What nobody needs, or cannot be done by its deadline any more, is given to others instead.
    """
    listed, kept = set(request.other_results), still_wanted(held)
    for r in held:
        if r.name in listed:
            continue
        wu, application = r.workunit, next((a for a in apps.values() if a.id == r.app_id), None)
        needed = not wu.error_mask and not wu.canonical_resultid or r.name in kept
        version = AppVersion.get_by_id(r.app_version_id)
        own = (request.versions or {}).get(r.app_id, ())
        can = version.platform != "anonymous" or version in own
        can = can and not not_for(request, version)
        if needed and application and can and r.report_deadline - now > wu.delay_bound / 2:
            flops = 1 / pace(versions.get(version.id), version, host)
            reply.assignments.append(assignment(r, wu, application, version, host, flops))
        else:
            r.report_deadline = now - 1
            wu.transition_time = min(wu.transition_time, now)
            changed += [r, wu]
            say_to(reply, f"{r.name} is not sent again: it is no longer needed or too late")


def give_work(request, reply, host, versions, n_held, changed, now):
    """Hand out unsent results, by priority, then age, and say why where there are none [D8].

    No queue in memory is needed: the partial index of unsent results is one, and inside the one
    writer it can never be stale [S2-29].
    """
    settings, reasons = project.settings, Counter()
    ncpus = min(max(host.p_ncpus, 1), 128)
    room = min(settings.max_wus_to_send * ncpus - len(reply.assignments),  # lost ones, sent again
               settings.max_wus_in_progress * ncpus - n_held)
    wanted = max(min(request.cpu_req_instances, ncpus), 1)
    taken, passed_over = set(), []
    seconds = sum(a.rsc_fpops_est / a.flops * a.ncpus for a in reply.assignments)
    if reply.assignments and len(reply.assignments) >= wanted \
            and seconds >= request.work_req_seconds:
        return  # What it had lost is enough.
    if room <= 0:
        reasons[f"you hold {n_held} tasks, the limit here"] += 1
    usable = {a.id: offers for a in working(now).values()
              if (offers := offers_for(request, host, a, versions, reasons))}
    for r in offered(host, usable, reasons, now) if room > 0 else ():
        wu = r.workunit
        if wu.id in taken:
            continue  # The other copy is for another host.
        if reason := withheld(r, host, now):
            reasons[f"{usable[r.app_id][0].application.name}: {reason}"] += 1
            continue
        fitting, reason = fit_for(wu, usable[r.app_id])
        if not fitting:
            reasons[f"{usable[r.app_id][0].application.name}: {reason}"] += 1
            continue
        offer = best_offer(fitting, ncpus, now)
        if offer is None:
            quota = usable[r.app_id][0].quota
            reasons[f"{usable[r.app_id][0].application.name}: you have had today's "
                    f"{quota.n_jobs_today} tasks; the number shrinks with errors and grows with "
                    f"good results"] += 1
            continue
        runtime = wu.rsc_fpops_est * offer.pace
        reason = infeasible(wu, host, request.estimated_delay + seconds / ncpus, runtime)
        if reason:
            reasons[f"{offer.application.name}: {reason}"] += 1
            passed_over.append((r, reason))
            continue
        send(r, wu, host, offer.version, now)
        for look in plugged("at_send"):
            look(r, wu, host, offer, now)
        offer.quota.n_jobs_today += 1
        versions[offer.version.id] = offer.quota
        changed += [r, wu]
        reply.assignments.append(assignment(
            r, wu, offer.application, offer.version, host, 1 / offer.pace))
        taken.add(wu.id)
        seconds += runtime * ncpus_of(offer.version, host)
        if len(taken) >= room or (len(taken) >= wanted and seconds >= request.work_req_seconds):
            break
    refuse(passed_over, host, changed, now)
    say_why(reply, host, usable, reasons)
    for note in plugged("at_answer"):
        note(request, reply, host, reasons, now)


def offered(host, usable, reasons, now):
    """Walk through what a host might get, in order: results with their workunits, unsent.

    Policies know what comes before all else (a check), before anything new (a task whose host is
    late) and when nothing else is left; a copy they have only just made is saved if it is sent. Who
    is barred gets nothing but checks.
    """
    for results in plugged("urgent"):
        yield from results(host, usable, now)
    barred = next(filter(None, (bar(host, now) for bar in plugged("barred"))), "")
    if barred:
        reasons[barred] += 1
        return
    for results in plugged("late_tasks"):
        yield from results(host, usable, now)
    yield from unsent_for(host, usable)
    for results in plugged("left_over"):
        yield from results(host, usable, now)


def withheld(r, host, now):
    """Say why a policy keeps a result for other hosts; empty if none does."""
    return next(filter(None, (keep(r, r.workunit, host, now) for keep in plugged("withhold"))), "")


def say_why(reply, host, usable, reasons):
    """Keep and tell why a host that asked for work got none [D-04]."""
    if not reply.assignments and not usable and not reasons and apps:
        host.why_no_work = "no application here runs on your computer"
        say_to(reply, f"no work sent: {host.why_no_work}", "notice")
        reply.request_delay = max(reply.request_delay, UNFIT_DELAY)
    elif not reply.assignments:
        why = "; ".join(f"{n} times: {text}" if n > 1 else text
                        for text, n in reasons.most_common(5))
        host.why_no_work = why or why_nothing(host, usable)
        say_to(reply, f"no work sent: {host.why_no_work}")
    elif host.why_no_work:
        host.why_no_work = ""


# ---- Versions ----------------------------------------------------------------


@dataclass
class Offer:
    """A version of an application that a host can run, and how fast it does."""

    application: object
    version: AppVersion
    quota: HostAppVersion
    pace: float  # s for each estimated operation


def offers_for(request, host, application, versions, reasons):
    """Return what a host can run of an application; note why not what it cannot [WIRE 6]."""
    fitting = []
    allowed = application.versions if request.versions is None else \
        request.versions.get(application.id, ())
    for platform in request.platforms:
        for version in allowed:
            if version.platform == platform:
                reason = not_for(request, version) or unfit(version, host)
                if reason:
                    reasons[f"{application.name}: {reason}"] += 1
                else:
                    fitting.append(version)
    offers = []
    for version in fitting:
        quota = versions.get(version.id) or HostAppVersion(
            host=host.id, app_version=version.id,
            max_jobs_per_day=project.settings.daily_result_quota)
        offers.append(Offer(application, version, quota, pace(quota, version, host)))
    return offers


def fit_for(wu, offers):
    """Return those of a host's offers that can do a workunit, and why one cannot."""
    why_not = [next(filter(None, (look(wu, offer.version) for look in plugged("cannot_run"))), "")
               for offer in offers]
    return [offer for offer, why in zip(offers, why_not) if not why], max(why_not)


def best_offer(offers, ncpus, now):
    """Return the fastest version that may be given today; None if there is none.

    What was never measured on this host comes first, once a day: nobody knows how fast it is.
    """
    open_ones = [offer for offer in offers if within_quota(offer.quota, ncpus, now)]
    return min(open_ones, default=None, key=lambda offer: (
        offer.quota.et_n > 0 or offer.quota.n_jobs_today > 0, offer.pace))


def not_for(request, version):
    """Say why the client behind a request cannot have a version; empty if it can.

    Only the plugin of its protocol knows: it may have put a function `why_not` into `more`.
    """
    why_not = getattr(request.more, "why_not", None)
    return why_not(version) if why_not else ""


def unfit(version, host):
    """Say why a host cannot run a version at all; empty if it can. `options` say what it needs."""
    wants = version.options
    if wants.get("min_ncpus", 0) > host.p_ncpus:
        return f"its program for {version.plan_class or version.platform} needs " \
               f"{wants['min_ncpus']:g} processors, you have {host.p_ncpus}"
    if host.m_nbytes and wants.get("min_memory", 0) > host.m_nbytes:
        return f"its program for {version.plan_class or version.platform} needs " \
               f"{wants['min_memory'] / 1e9:.3g} GB of memory, you have {host.m_nbytes / 1e9:.3g}"
    known = str(host.details.get("p_features", "")).lower().split()
    missing = [word for word in wants.get("features", ()) if word.lower() not in known]
    if missing:
        return f"its program for {version.plan_class or version.platform} needs a processor " \
               f"with {', '.join(missing)}"
    return ""


def ncpus_of(version, host):
    """Return how many processors of a host a task of a version keeps busy."""
    return min(version.options.get("ncpus", 1.0), max(host.p_ncpus, 1))


def pace(quota, version, host):
    """Estimate a host's seconds for each operation: from what it took before, or its benchmark."""
    # Our volunteer measures Python operations, a BOINC client floating-point ones; an application
    # counts in those that its programs do.
    speed = max(host.p_fpops, 1e6) * ncpus_of(version, host)
    python_host = not host.client_version[:1].isdigit()
    if python_host != (version.platform == "python"):
        speed = speed / PYTHON_SHARE if python_host else speed * PYTHON_SHARE
    if quota and quota.et_n and quota.et_avg:
        return max(quota.et_avg, 1 / speed / PACE_GAIN_MAX)
    return 1 / speed


def learn(quota, r, good):
    """Adjust a host's daily quota and measured speed for a version to one report."""
    # Errors take one from the quota, never the last one; successes double it, up to the setting.
    most = project.settings.daily_result_quota
    if good:
        quota.max_jobs_per_day = min(max(quota.max_jobs_per_day, 1) * 2, most)
        quota.et_n += 1
        found = r.elapsed_time / r.workunit.rsc_fpops_est
        quota.et_avg += max(0.1, 1 / quota.et_n) * (found - quota.et_avg)
    elif r.exit_status != TOLD_TO_STOP:
        quota.max_jobs_per_day = max(1, min(quota.max_jobs_per_day, most) - 1)


def assignment(r, wu, application, version, host, flops):
    """Describe a result to the host that will compute it."""
    output = output_files(r)[0]["name"]
    nbytes_max = int(min(wu.rsc_disk_bound, project.settings.upload_bytes_max))
    first, *more = [{**file, "url": f"/download/{file['name']}"} for file in wu.input_files]
    return Assignment(
        name=r.name, workunit=wu.name, app=application.name, about=application.about,
        app_version=version.id, version_num=version.version_num, platform=version.platform,
        plan_class=version.plan_class, ncpus=ncpus_of(version, host), flops=flops,
        command_line=f"{version.options.get('command_line', '')} {wu.command_line}".strip(),
        files=[{**file, "url": f"/download/{file['name']}"} for file in version.files],
        input=first, inputs=more,
        output={"name": output, "url": f"/upload/{output}", "nbytes_max": nbytes_max},
        report_deadline=r.report_deadline - project.settings.report_grace_period,
        **{name: getattr(wu, name) for name in (
            "delay_bound", "rsc_fpops_est", "rsc_fpops_bound", "rsc_memory_bound",
            "rsc_disk_bound")})


# ---- What is left, and for whom ----------------------------------------------


def unsent_for(host, usable):
    """Walk through the unsent results a host may get: no two copies of a workunit to one host."""
    if project.settings.one_result_per_user_per_wu:
        return unsent_without(Result.user).each(list(usable), host.user_id)
    return unsent_without(Result.host).each(list(usable), host.id)


@prepared
def unsent_of(app_ids):
    """Find an unsent result of these applications."""
    return Result.select(Result.id).where(UNSENT, Result.app.in_(app_ids)).limit(1).tuples()


@functools.lru_cache(maxsize=None)
def unsent_without(field):
    """Return the query for unsent results of applications whose workunits have no copy of one."""
    @prepared
    def unsent(app_ids, holder):
        mine = Result.alias()  # "+ 0": through the few of the workunit, not all it ever had.
        twin = mine.select(SQL("1")).where(
            mine.workunit == Result.workunit, getattr(mine, field.name) + 0 == holder)
        return (Result.select(Result, Workunit).join(Workunit)
                .where(UNSENT, Result.app.in_(app_ids), ~fn.EXISTS(twin))
                .order_by(Result.priority.desc(), Result.id).limit(1000))
    return unsent


def infeasible(wu, host, delay, runtime):
    """Say why a host cannot do a workunit; empty if it can. `delay`, `runtime` in s."""
    if host.m_nbytes and wu.rsc_memory_bound > host.m_nbytes:
        return f"needs {wu.rsc_memory_bound / 1e9:.3g} GB of memory, you have " \
               f"{host.m_nbytes / 1e9:.3g}"
    if host.d_free and wu.rsc_disk_bound > host.d_free:
        return f"needs {wu.rsc_disk_bound / 1e9:.3g} GB of disk, you have " \
               f"{host.d_free / 1e9:.3g} free"
    available = min(max(host.on_frac, 0.01), 1) * min(max(host.active_frac, 0.01), 1)
    days = (delay + runtime) / available / 86400
    if days * 86400 > wu.delay_bound:
        return f"would take you {days:.3g} days, the deadline is in " \
               f"{wu.delay_bound / 86400:.3g}"
    return ""


def within_quota(quota, ncpus, now):
    """Say whether a host may get one more task of a version today; starts a new day's count."""
    if quota.quota_day != now // 86400:
        quota.quota_day, quota.n_jobs_today = now // 86400, 0
    return quota.n_jobs_today < quota.max_jobs_per_day * ncpus


def refuse(passed_over, host, changed, now):
    """Count that a host was too small for these results; too many refusals end one [S0-10..S0-13].

    One host counts once an hour: a moment's trouble on one computer must not end a workunit.
    """
    for r, reason in passed_over:
        if r.id is None:
            continue  # made for this host only
        refusals = r.refusals or []
        if any(hostid == host.id and now - at < 3600 for at, hostid, _ in refusals):
            continue
        r.refusals = refusals + [[now, host.id, reason]]
        if len(r.refusals) >= project.settings.infeasible_max:
            fire(COULDNT_SEND, r)
            r.workunit.transition_time = now  # [S0-12]
        changed += [r, r.workunit]


def why_nothing(host, usable):
    """Explain an empty hand to a host that was refused nothing in particular [D-04]."""
    if unsent_of.first(list(usable)):
        return "what is left waits for other computers: you have a copy of each already"
    return "there is none at the moment; it comes when others have reported or more is made"


# ---- Repeats for reliable hosts ------------------------------------------------


def withhold(r, wu, host, now):
    """Say why a repeat must wait for a faster, surer host; empty if it need not.

    It waits for reliable_head_start at most, so that it is done where no host is reliable.
    """
    left = r.create_time + settings.reliable_head_start - now
    if r.id is None or left <= 0 or not is_repeat(r, wu) or is_reliable(host):
        return ""
    return f"a repeat is kept for {left} s more for hosts that are known to be fast and right"


def is_repeat(r, wu):
    """Say whether a copy was made after the first ones, since something had gone wrong [T10]."""
    return settings.reliable_max_avg_turnaround > 0 and r.create_time > wu.create_time


def is_reliable(host):
    """Say whether a host answers soon and has made few errors."""
    if not 0 < host.avg_turnaround <= settings.reliable_max_avg_turnaround:
        return False
    row = reputations.first([host.id])
    return row is not None and row.error_rate <= settings.reliable_max_error_rate


def at_send(r, wu, host, offer, now):
    """Shorten the deadline of a repeat for a reliable host, if that can keep it."""
    shorter = int(wu.delay_bound * settings.reliable_reduced_delay_bound)
    if is_repeat(r, wu) and is_reliable(host) \
            and max(host.avg_turnaround, wu.rsc_fpops_est * offer.pace) <= shorter:
        r.report_deadline = now + shorter + project.settings.report_grace_period
        wu.transition_time = min(wu.transition_time, r.report_deadline)
        explain(r, f"a repeat, for a reliable host (it takes {host.avg_turnaround:.0f} s on "
                   f"average): {shorter} s instead of {wu.delay_bound}")


@prepared
def reputations(host_ids):
    """Find what is known of hosts."""
    return Reputation.select().where(Reputation.host.in_(host_ids))


def at_commit(done, now):
    """Learn how reliable hosts are from the results that ended well or badly."""
    rates = {}
    ends = [(rule.name in BAD_ENDS, row.host_id) for rule, row in done if isinstance(rule, Rule)
            and rule.name in GOOD_ENDS + BAD_ENDS and row.host_id
            and row.exit_status != TOLD_TO_STOP]
    if ends:
        rates = {row.host: row.error_rate for row in reputations(
            list({host_id for _, host_id in ends}))}
    for bad, host_id in ends:
        rate = rates.get(host_id, ERROR_RATE)
        rates[host_id] = rate + ERROR_WEIGHT * (bad - rate)
    db.connection().executemany("REPLACE INTO reputation (host, error_rate) VALUES (?, ?)",
                                rates.items())
