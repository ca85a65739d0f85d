"""Validation by computing again: a re-check coefficient, or trust in proven hosts [S3-35..S3-43].

`validation = "recheck"` with `recheck = 1.3` makes two copies of three workunits in ten and one of
the others: 1.3 on average. `validation = "adaptive"` is BOINC's adaptive replication: a workunit
begins with one copy, and more are made unless the host that gets it has proven itself.
Answers vote as in a quorum, ties get one more copy at a time, up to max_success_results.
"""

import math

from peewee import BigIntegerField, ForeignKeyField, IntegerField

from minigrid import (AppVersion, Host, Record, Rule, ValidateState, apps, explain, plugged,
                      project)

RECHECK_MAX = 20
TOLD_TO_STOP = 202  # exit status of a task that was ended on our own order: nobody's fault
PROOF = 10  # right answers in a row make a host proven; the number is BOINC's


class Proof(Record):
    """How many answers of a host, in a row, were compared with another's and found right.

    What was accepted unchecked counts in consecutive_valid of the core, but proves nothing.
    """

    host = ForeignKeyField(Host, index=False)
    app_version = ForeignKeyField(AppVersion, index=False)
    run = IntegerField(default=0)
    time = BigIntegerField(default=0)  # of the last one

    class Meta:
        indexes = ((("host", "app_version"), True),)


TABLES = (Proof,)


def check_recheck(value):
    """Return a re-check coefficient; below one not even one copy would be made [S3-35 S3-42]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) \
            or not 1 <= value <= RECHECK_MAX:
        raise ValueError(f"must be a number from 1 to {RECHECK_MAX}, the mean number of copies")
    return float(value)


CONSTANTS = {"recheck": check_recheck}


def check_application(application):
    """Refuse what does not fit to its policy. Raises ValueError."""
    policies, given = application.policies, application.parameters
    policy = policies["validation"]
    if "recheck" in policies and policy != "recheck":
        raise ValueError(f"recheck means nothing with validation = {policy!r}; wanted: validation "
                         f"= 'recheck'")
    if policy == "recheck" and not {"recheck", "wrong_answers_at_most"} & set(policies):
        raise ValueError("validation = 'recheck' needs the mean number of copies; wanted: such as "
                         "recheck = 1.3")
    if policy == "recheck":
        most = math.ceil(policies.get("recheck", 2))
        completed(drawn(given, most))  # Not only when the larger number is drawn.
    elif policy == "adaptive":
        proven_only(given, given)


def shape_work(application, given):
    """Choose how many copies a new workunit begins with [S3-36 S3-40..S3-42]."""
    policy, r = application.policies["validation"], application.policies.get("recheck")
    if policy == "adaptive":
        return proven_only(given, application.parameters)
    if policy != "recheck" or r is None:
        return given
    completed(drawn(given, math.ceil(r)))  # Whatever is drawn, or only some would fail.
    n = copies(r, project.rng)
    return {**drawn(given, n), "why": f"drawn: {n} {'copy' if n == 1 else 'copies'}, {r:g} on "
                                      f"average"}


def copies(r, rng):
    """Draw how many copies a workunit gets; the mean is r in every case [S3-40 S3-41].

    The smaller whole number, and one more with the probability that is left over.
    """
    return math.floor(r) + (rng.random() < r - math.floor(r))


def drawn(given, n):
    """Return parameters with so many copies, all of which must come in. Raises ValueError."""
    for name in ("min_quorum", "target_nresults"):
        if name in given:
            raise ValueError(f"{name} must be left out: with validation = 'recheck' the re-check "
                             f"coefficient decides; found {given[name]!r}")
    return {**given, "min_quorum": n, "target_nresults": n}


def judge(wu, results, application):
    """Vote as a quorum does [S3-37 S3-38 S3-43]."""
    (vote,) = (table["quorum"] for table in plugged("VALIDATION") if "quorum" in table)
    return vote(wu, results, application)


VALIDATION = {"recheck": judge, "adaptive": judge}


def completed(given):
    """Return the numbers of a workunit checked and complete. Raises ValueError."""
    return plugged("check_parameters")[-1](given)


# ---- Adaptive replication --------------------------------------------------------


def proven_only(given, parameters):
    """Return parameters with one copy, for a proven host. Raises ValueError.

    How many copies others mean is the application's, as the workunit forgets it.
    """
    quorum = parameters.get("min_quorum", 2)
    if given.get("min_quorum", 2) != quorum:
        raise ValueError("min_quorum must stand in the file, not in what workunit(i) returns, with "
                         "validation = 'adaptive'")
    full = completed({**given, "min_quorum": quorum})
    if quorum < 2:
        raise ValueError("min_quorum must be at least 2 with validation = 'adaptive': nobody would "
                         "ever be compared")
    return {**full, "min_quorum": 1, "target_nresults": 1}


def at_send(r, wu, host, offer, now):
    """Have another compute the same, unless the host has proven itself and is not drawn."""
    application = offer.application
    if application.policies["validation"] != "adaptive" or wu.number is None \
            or wu.min_quorum > 1 or wu.canonical_resultid:
        return
    run = proof_of(host, offer.version)
    chance = chance_of_check(run)
    if chance < 1 and project.rng.random() >= chance:
        explain(r, f"no second copy: computer {host.id} gave {run} right answers in a row; it is "
                   f"checked once in {1 / chance:.3g} times")
        return
    parameters = application.parameters
    quorum = parameters.get("min_quorum", 2)
    ask_another(wu, quorum, max(quorum, parameters.get("target_nresults", 0)), now,
                f"computer {host.id} gave {run} compared right answers in a row, of {PROOF} wanted"
                if chance == 1 else f"computer {host.id} is proven, but drawn for a check, as once "
                f"in {1 / chance:.3g} times")


def handed_on(r, host, now):
    """Believe nobody alone whose task another computer of its volunteer reports [C43]."""
    application = next((a for a in apps.values() if a.id == r.app_id), None)
    if not application or not adaptive(r.app_id):
        return
    end_run(r)
    wu, quorum = r.workunit, application.parameters.get("min_quorum", 2)
    if wu.number is not None and not wu.canonical_resultid:
        ask_another(wu, quorum, quorum, now, f"computer {host.id} reports what computer "
                                             f"{r.host_id} was given")


def chance_of_check(run):
    """Return how likely a host is checked after a run of right answers: BOINC's 1/run, 1 at first.

    It never gets below 1 in 100: a computer may go bad after years.
    """
    return 1 if run < PROOF else max(1 / run, 0.01)


def ask_another(wu, quorum, target, now, why):
    """Have a workunit that was made for one copy computed by others, too. Runs in the writer.

    Should its first answer be judged just now, that verdict stands; else it waits for the others.
    """
    wu.min_quorum, wu.target_nresults = max(wu.min_quorum, quorum), max(wu.target_nresults, target)
    wu.transition_time = now  # The transitioner makes the copies.
    explain(wu, f"{wu.target_nresults} copies: {why}")


def proof_of(host, version):
    """Return how many compared answers of a host were right in a row."""
    row = Proof.get_or_none(host=host.id, app_version=version.id)
    return row.run if row else 0


def adaptive(app_id):
    """Say whether an application trusts proven hosts."""
    return any(a.id == app_id and a.policies["validation"] == "adaptive" for a in apps.values())


def at_verdict(wu, judged, verdict, hosts, now):
    """Count what was compared: one more in the run of a host, or its end."""
    for r in judged if adaptive(wu.app_id) else ():
        if r.validate_state == ValidateState.INVALID:
            end_run(r)
        elif r.id not in verdict.unchecked and r.app_version_id:
            (Proof.insert(host=r.host_id, app_version=r.app_version_id, run=1, time=now)
             .on_conflict(conflict_target=[Proof.host, Proof.app_version],
                          update={Proof.run: Proof.run + 1, Proof.time: now}).execute())


def at_commit(done, now):
    """End the run of a host that reports an error."""
    for rule, row in done:
        if isinstance(rule, Rule) and rule.name in ("report error", "report error late") \
                and adaptive(row.app_id) and row.exit_status != TOLD_TO_STOP:
            end_run(row)


def end_run(r):
    """Let a host begin anew with a version."""
    Proof.update(run=0).where(Proof.host == r.host_id,
                              Proof.app_version == r.app_version_id).execute()
