"""BOINC's way of handing out work: by priority, then age, if the host can do it in time [D8].

A dispatch policy chooses among the unsent results and says why it gave none, resends what was lost,
and names what need not be done any more; `send()` of the core changes the states. What a host
cannot do is counted, and ends when too many could not [S0-13].
"""

from collections import Counter

from peewee import SQL, fn

from minigrid import (COULDNT_SEND, UNSENT, AppVersion, AssimilateState, ErrorMask, HostAppVersion,
                      Result, Workunit, apps, assignment, fire, project, say_to, send, working)


def look_at_held(request, reply, held, lost_some, changed, now):
    """Tell a host what to drop of its results in progress, and send again what it has lost.

    `held` are the results the store believes it to have; `lost_some` says that it reported
    something twice, so a reply of ours may not have arrived [C43].
    """
    if project.settings.send_result_abort:
        tell_what_to_drop(request, reply, held)
    if request.other_results is not None and (project.settings.resend_lost_results or lost_some):
        resend_lost(request, reply, held, changed, now)


def tell_what_to_drop(request, reply, held):
    """Name the results in the client's hands that nobody needs any more [C42]."""
    wanted = {r.name for r in held if r.workunit.assimilate_state != AssimilateState.DONE
              and not r.workunit.error_mask & ErrorMask.CANCELLED}
    names = [name for name in request.other_results or [] if name not in wanted]
    rows = {r.name: r for r in Result.select(Result, Workunit).join(Workunit)
            .where(Result.name.in_(names))} if names else {}
    for name in names:
        r = rows.get(name)
        if r is None or r.host_id != reply.hostid or r.workunit.error_mask & ErrorMask.CANCELLED:
            reply.aborts.append(name)
        else:
            reply.aborts_if_not_started.append(name)


def resend_lost(request, reply, held, changed, now):
    """Send again what the host should hold and does not list, or give it up at once [C43].

    What nobody needs, or cannot be done by its deadline any more, is given to others instead.
    """
    listed = set(request.other_results)
    for r in held:
        if r.name in listed:
            continue
        wu, application = r.workunit, next((a for a in apps.values() if a.id == r.app_id), None)
        needed = not wu.error_mask and not wu.canonical_resultid
        if needed and application and r.report_deadline - now > wu.delay_bound / 2:
            version = AppVersion.get_by_id(r.app_version_id)
            reply.assignments.append(assignment(r, wu, application, version))
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
    seconds, taken, passed_over = 0.0, set(), []
    if room <= 0:
        reasons[f"you hold {n_held} tasks, the limit here"] += 1
    usable = {a.id: a for a in working(now).values() if set(a.versions) & set(request.platforms)}
    for r in unsent_for(host, usable) if room > 0 else ():
        wu, application = r.workunit, usable[r.app_id]
        if wu.id in taken:
            continue  # The other copy is for another host.
        version = next(v for p, v in application.versions.items() if p in request.platforms)
        quota = versions.get(version.id) or HostAppVersion(
            host=host.id, app_version=version.id, max_jobs_per_day=settings.daily_result_quota)
        runtime = estimated_runtime(wu, host, quota)
        reason = infeasible(wu, host, request.estimated_delay + seconds / ncpus, runtime)
        if reason:
            reasons[f"{application.name}: {reason}"] += 1
            passed_over.append((r, reason))
            continue
        if not within_quota(quota, ncpus, now):
            reasons[f"{application.name}: you have had today's {quota.n_jobs_today} tasks; "
                    f"the number shrinks with errors and grows with good results"] += 1
            continue
        send(r, wu, host, version, now)
        quota.n_jobs_today += 1
        versions[version.id] = quota
        changed += [r, wu]
        reply.assignments.append(assignment(r, wu, application, version))
        taken.add(wu.id)
        seconds += runtime
        if len(taken) >= room or (len(taken) >= wanted and seconds >= request.work_req_seconds):
            break
    refuse(passed_over, host, changed, now)
    if not reply.assignments:
        why = "; ".join(f"{n} times: {text}" if n > 1 else text
                        for text, n in reasons.most_common(5))
        host.why_no_work = why or why_nothing(host, usable)
        say_to(reply, f"no work sent: {host.why_no_work}")
    elif host.why_no_work:
        host.why_no_work = ""


def unsent_for(host, usable):
    """Walk through the unsent results a host may get: no two copies of a workunit to one host."""
    mine = Result.alias()
    twin = mine.user == host.user_id if project.settings.one_result_per_user_per_wu \
        else mine.host == host.id
    return (Result.select(Result, Workunit).join(Workunit)
            .where(UNSENT, Result.app.in_(list(usable)),
                   ~fn.EXISTS(mine.select(SQL("1")).where(mine.workunit == Result.workunit, twin)))
            .order_by(Result.priority.desc(), Result.id).limit(1000).iterator())


def estimated_runtime(wu, host, quota):
    """Estimate how many seconds a host takes, from what it took before or its benchmark."""
    pace = quota.et_avg if quota.et_n and quota.et_avg else 1 / max(host.p_fpops, 1e6)
    return wu.rsc_fpops_est * pace


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
    if not usable:
        return "no application here runs on your computer"
    if Result.select().where(UNSENT, Result.app.in_(list(usable))).exists():
        return "what is left waits for other computers: you have a copy of each already"
    return "there is none at the moment; it comes when others have reported or more is made"
