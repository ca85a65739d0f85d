"""Trust is earned, lost and regained: black list, spot checks, suspects [D10, C36].

The modules: `blacklist` who is believed no more and how hosts come back, `spots` the tasks with
known answers that are mixed in among the others, `suspects` groups that always agree with each
other, `pages` what people see of it, `orders` what they can command.
"""

from minigrid import Outcome, ValidateState, apps, project, read_settings

from . import blacklist, orders, pages, spots, suspects

TABLES = blacklist.TABLES + spots.TABLES + suspects.TABLES
STAGES = (spots.let_go,)
NAV = (("/trust", "who is trusted"),)
CONSTANTS = {"black_list": blacklist.check_mode, "spot_checks": blacklist.check_rate}
commands = orders.commands
refused, barred, withhold = spots.refused, spots.barred, spots.withhold
urgent, at_send, wanted_after_all = spots.urgent, spots.at_send, spots.wanted_after_all
black_list_mode, handed_on = blacklist.black_list_mode, blacklist.handed_on
standing_of, error_rate = blacklist.standing_of, blacklist.error_rate
trust_of_host, trust_of_hosts = pages.trust_of_host, pages.trust_of_hosts


def routes(app, clock):
    """Read the settings and add the pages."""
    blacklist.settings = blacklist.check_settings(
        read_settings("setup.cfg", blacklist.Settings, "trust"))
    pages.routes(app, clock)


def hourly(now):
    """Forget what is too old to tell anything."""
    def forget():
        for module in (blacklist, spots, suspects):
            module.forget_old(now)

    project.write(forget)


def at_verdict(wu, judged, verdict, hosts, now):
    """Learn from a verdict: what it says of its hosts, and whether it serves for spot checks."""
    application = next((a for a in apps.values() if a.id == wu.app_id), None)
    if application is None:
        return
    checks, compared = spots.asked(wu, verdict), []
    certain = not verdict.canonical or spots.is_certain(application, verdict)
    for r in judged:
        host, _, quota = hosts[r.id]
        if quota and r.validate_state == ValidateState.INVALID:
            shrink(quota)
        if host is None or r.outcome != Outcome.SUCCESS or r.id in verdict.unchecked \
                or not certain and r.id == verdict.canonical:
            continue  # An error is no lie; a single answer is not known to be right.
        compared.append((r, host))
    if compared:
        weigh(application, wu, blacklist.answerable(compared), verdict, hosts, checks, now)
    suspects.note(verdict, hosts, now)
    if verdict.canonical:
        spots.keep(application, wu, verdict, now)


def shrink(quota):
    """Take half of a host's daily tasks for an answer that is not right."""
    # Its report, an apparent success, had doubled them: a host that is wrong as often as right
    # falls behind, as one with errors does.
    quota.max_jobs_per_day = max(1, quota.max_jobs_per_day // 4)


def weigh(application, wu, compared, verdict, hosts, checks, now):
    """Count the compared answers of a workunit for their hosts, and see what follows from them."""
    entries = blacklist.open_entries([host.id for _, host in compared], now)
    barred = {e.host: e for e in entries if e.app in (None, wu.app_id)}
    blacklist.count(wu.app_id, [
        (host.id, int(r.validate_state == ValidateState.INVALID), r.name in checks,
         host.id not in barred) for r, host in compared], now)
    for r, host in compared:
        wrong, check = r.validate_state == ValidateState.INVALID, checks.get(r.name)
        if check:
            spots.settle(check, wrong)
        if wrong:
            against = [hosts[rid][0].id for rid in sorted(verdict.matching)
                       if rid in hosts and hosts[rid][0]] or holders(wu)
            blacklist.offend(blacklist.Case(application, wu, r, host, r.id in verdict.wrong,
                                            against), barred.get(host.id), check is not None, now)
        elif check:
            blacklist.reward(r, host, now)


def holders(wu):
    """Return the hosts that agreed on the answer of a workunit that was decided before."""
    return [r.host_id for r in wu.results if r.validate_state == ValidateState.VALID and r.host_id]
