"""Credit: how much a valid copy earns, and what hosts and users have of it [S2-04 S2-22].

All valid copies of a workunit earn the same: one number is settled with the canonical result, and
late copies get it, too [S0-39 S0-45]. Where it comes from is the application's choice, `credit_by`:

    workunit    its parameter `credit`, or a credit for 1e8 estimated operations (the default)
    runtime     run time x processors x speed of the copies that agree, in BOINC's unit
    check_set   what check_set() of the application says beside the index: (index, credit)
"""

import math

from minigrid import (Outcome, PluginError, ServerState, ValidateState, apps, explain, plugged,
                      project)

S, O, V = ServerState, Outcome, ValidateState
CREDIT_BY = ("workunit", "runtime", "check_set")
CREDIT_FPOPS = 1e8  # estimated operations for which add_work() grants one credit, if not told else
COBBLESTONE_FPOPS = 86400 * 1e9 / 200  # a day at 1 GFLOPS earns 200: BOINC's unit
FPOPS_MAX = 1e12  # operations a second; no processor does more, whatever its client says
HALF_LIFE = 7 * 86400  # s, of recent credit


def check_credit_by(value):
    """Return the constant `credit_by` of an application. Raises ValueError."""
    if value not in CREDIT_BY:
        raise ValueError(f"must be one of {', '.join(map(repr, CREDIT_BY))}")
    return value


CONSTANTS = {"credit_by": check_credit_by}


def check_application(application):
    """Refuse a choice that could never be carried out. Raises ValueError."""
    if credit_by(application) == "check_set" and not application.hooks["check_set"]:
        raise ValueError("credit_by = 'check_set' needs a function check_set(answers) that returns "
                         "(index, credit)")


def credit_by(application):
    """Return where the credit of an application comes from."""
    return application.policies.get("credit_by", "workunit")


# ---- How much ------------------------------------------------------------------


def around_judge(judge):
    """Have a validation policy say, too, what each valid copy earns."""
    def judge_and_reckon(wu, results, application):
        verdict, by = judge(wu, results, application), credit_by(application)
        if by != "check_set" and application.hooks["check_set"] and verdict.credit is not None:
            raise PluginError(f"{application.path}: check_set() gave a credit, which would not "
                              f"count; wanted: credit_by = 'check_set', or only the index")
        if by == "check_set" and verdict.credit is not None:
            verdict.credit_why = "as check_set() of the application says"
        if by == "runtime" and verdict.canonical:
            matching = [r for r in results if r.id in verdict.matching]
            verdict.credit, verdict.credit_why = from_run_times(wu, matching)
        if any(r.validate_state == V.VALID for r in results):
            # Its canonical result was lost, and answers vote again: what was granted stays [S0-45].
            verdict.credit, verdict.credit_why = None, ""
        return verdict
    return judge_and_reckon


def from_run_times(wu, matching):
    """Return the credit that the run times of matching results amount to, and why."""
    # One claim for each volunteer, the smallest: two computers of one user confirm nothing.
    claims, estimates = {}, []
    for r in matching:
        if r.host_id is None or r.elapsed_time <= 0:
            continue  # Who tells no time claims nothing, and so takes nothing from the others.
        claim = claimed(r, wu)
        claims[r.user_id] = min(claim, claims.get(r.user_id, claim))
        estimates.append(in_cobblestones(wu.rsc_fpops_est, r.app_version))
    return settle_claims(list(claims.values()), min(estimates, default=0))


def claimed(r, wu):
    """Return what the run time of a result is worth: seconds x processors x speed of its host.

    No job may do more than rsc_fpops_bound operations, so no claim counts for more.
    """
    seconds_of_processor = r.elapsed_time * plugged("ncpus_of")[-1](r.app_version, r.host)
    return min(seconds_of_processor * flops_of(r.host) / COBBLESTONE_FPOPS,
               in_cobblestones(wu.rsc_fpops_bound, r.app_version))


def in_cobblestones(operations, version):
    """Return what operations of an application's own kind are worth in BOINC's unit."""
    share = plugged("PYTHON_SHARE")[-1] if version.platform == "python" else 1
    return operations / share / COBBLESTONE_FPOPS


def flops_of(host):
    """Return the floating-point operations a second of one processor, as its client measured."""
    # Our volunteer counts Python operations, of which a processor does far fewer.
    python_host = not host.client_version[:1].isdigit()
    share = plugged("PYTHON_SHARE")[-1] if python_host else 1
    return min(max(host.p_fpops, 0) / share, FPOPS_MAX)


def settle_claims(claims, estimate):
    """Return the credit for results that claim these amounts, and why in words.

    The extremes do not count, so nobody gains by lying about time or speed: of two claims the
    smaller counts, of more the mean without lowest and highest, which is never above what somebody
    else claims. A claim that nobody confirms counts up to what the project has estimated.
    """
    claims = sorted(claims)
    if not claims:
        return 0.0, "no copy that agrees tells a run time"
    told = ", ".join(map(amount, claims[:5])) + ", ..." * (len(claims) > 5)
    if len(claims) == 1:
        return min(claims[0], estimate), f"its run time x speed claims {told}, which counts up " \
                                         f"to the estimate, {amount(estimate)}"
    if len(claims) == 2:
        return claims[0], f"run time x speed claims {told}, of which the smaller counts"
    middle = claims[1:-1]
    return sum(middle) / len(middle), f"run time x speed claims {told}; without lowest and " \
                                      f"highest the mean counts"


# ---- Who has it ----------------------------------------------------------------


def at_verdict(wu, judged, verdict, hosts, now):
    """Reward the hosts and users of results that were just found valid or invalid."""
    for r in judged:
        reward(r, *hosts[r.id], now)
    valid = [r for r in judged if r.validate_state == V.VALID]
    if valid and verdict.canonical:
        explain(wu, f"{amount(wu.canonical_credit)} credit for each valid copy: "
                    f"{verdict.credit_why or why_so_much(wu)}{at_limit(wu)}")
    for r in valid if not verdict.canonical else ():
        explain(r, f"{amount(r.granted_credit)} credit, as for each valid copy of it")


def reward(r, host, user, version, now):
    """Add a verdict to what is known of a host, its user, and how it does with the version."""
    valid = r.validate_state == V.VALID
    if version:
        version.consecutive_valid = version.consecutive_valid + 1 if valid else 0
    for holder in filter(None, (host, user) if valid else ()):
        holder.total_credit += r.granted_credit
        add_to_average(holder, r.granted_credit, now)


def add_to_average(holder, credit, now):
    """Add credit to the recent average of a host or user: credit per day, half-life a week."""
    holder.expavg_credit = faded(holder, now) + credit * math.log(2) * 86400 / HALF_LIFE
    holder.expavg_time = now


def faded(holder, now):
    """Return a host's or user's recent credit per day at `now`: it fades since it was kept."""
    if not holder.expavg_time:
        return 0.0
    return holder.expavg_credit * 0.5 ** (max(now - holder.expavg_time, 0) / HALF_LIFE)


# ---- In words ------------------------------------------------------------------

NOTHING = {  # why a copy that is over earns nothing
    O.CLIENT_ERROR: "it could not be computed", O.NO_REPLY: "it was not reported by its deadline",
    O.DIDNT_NEED: "it was not needed any more", O.COULDNT_SEND: "no computer could do it",
    O.VALIDATE_ERROR: "its output was missing, or could not be read",
    O.CLIENT_DETACHED: "its computer left the project",
}
UNREWARDED = {  # the same of one that came back
    V.INVALID: "its answer was wrong", V.NO_CHECK: "its workunit was given up, nobody compares it",
    V.TOO_LATE: "it came when the answer to compare it with was gone; nobody is to blame",
}


def credit_sentence(r, wu):
    """Say what credit a result has got, or may get, and why."""
    if r.server_state != S.OVER:
        return "none yet: a computer has it" if r.server_state == S.IN_PROGRESS else \
            "none yet: it waits for a computer"
    if r.outcome != O.SUCCESS:
        return f"none: {NOTHING.get(r.outcome, 'it is over')}"
    if r.validate_state == V.VALID:
        return f"{amount(r.granted_credit)} credit, the same for each valid copy: " \
               f"{why_so_much(wu)}{at_limit(wu)}"
    if r.validate_state in (V.INIT, V.INCONCLUSIVE):
        return "pending: its answer waits to be compared with others"
    return f"none: {UNREWARDED[r.validate_state]}"


def why_so_much(wu):
    """Say where the credit of a decided workunit came from, as far as its row still tells."""
    by = next((credit_by(a) for a in apps.values() if a.id == wu.app_id), "workunit")
    if by == "runtime":
        return "from run time x speed of the copies that agreed, the extremes left out"
    if math.isclose(wu.canonical_credit, wu.rsc_fpops_est / CREDIT_FPOPS):
        return f"{wu.rsc_fpops_est:g} operations estimated, at {CREDIT_FPOPS:g} a credit"
    return "as check_set() of the application said" if by == "check_set" else \
        "as the application has set for it"


def at_limit(wu):
    """Say that a credit was bounded; empty if it was not."""
    most = project.settings.max_granted_credit
    return f"; {amount(most)} is the most that is granted here" \
        if wu.canonical_credit >= most else ""


def amount(credit):
    """Write an amount of credit, small ones with the digits that count."""
    return f"{credit:,.2f}" if credit >= 0.1 or credit == 0 else f"{credit:.2g}"
