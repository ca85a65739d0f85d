"""Validation by the inverse task: another node computes the input from the output [S3-30..S3-34].

`validation = "inverse"` wants two functions of the application: `invert(output)`, which a volunteer
runs, and `same(input, recovered)`, which says on the server whether both are the same input.

The inverse of an output is put to a vote: the node that computed it claims that it is the input of
its workunit. A checking node that recovers the input proves it right. One that recovers something
else leaves both in doubt, and a third node decides [C36]: right is what two of them say. With
`black_list = "literal"` X-Com's own rule holds, and both are wrong at once [S3-33].

A question to a checking node is a workunit without a number. Its name does not tell what it checks,
for whoever knew that could fetch the input instead of computing it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from peewee import SQL, BigIntegerField, BooleanField, ForeignKeyField, JOIN

from minigrid import (CANCEL, CHUNK, CHUNKS_MAX, RULES, ErrorMask, Record, Result, ValidateState,
                      Verdict, Workunit, apps, candidates, change, explain, file_entry, fire,
                      output_files, plugged, prepared, project, put_off, save_all, transition)

HOOKS = {"invert": ("output", "?", "progress", "checkpoint", "trickle"),
         "same": ("input", "recovered")}
HEAD = 1 << 31  # the head of the list: more than any application can ask for [S3-30]
CHECKS_MAX = 4  # of one result; when they leave it in doubt, the workunit is computed again
OTHER_USER_SECONDS = 3600  # so long a check waits for who has computed nothing of it
V = ValidateState
JUDGED = (V.VALID, V.INVALID)


class InverseCheck(Record):
    """One question to another node: what input has this output?"""

    create_time = BigIntegerField()
    workunit = ForeignKeyField(Workunit, on_delete="CASCADE")  # whose result is checked
    result = ForeignKeyField(Result, on_delete="CASCADE")
    question = BigIntegerField(default=0, index=True)  # the workunit that asks; 0: to be made
    answer = BigIntegerField(default=0)  # the result that answered
    says = BooleanField(null=True)  # Was the input recovered? None: no answer
    backs = BigIntegerField(default=0)  # an earlier check that recovered the same other input
    open = BooleanField(default=True)  # neither judged nor given up
    wake = BigIntegerField(default=0)  # when something changed: whoever waits must look again


TABLES = (InverseCheck,)
OPEN = SQL("open")
InverseCheck.add_index(InverseCheck.index(InverseCheck.id, where=OPEN, name="inversecheck_open"))


@dataclass
class Found(Verdict):
    """A verdict on a check, with what it says of the result that was checked."""

    says: bool = None
    backs: int = 0
    answer: int = 0


def check_application(application):
    """Refuse an application that lacks what its policy needs. Raises ValueError."""
    policy, hooks = application.policies["validation"], application.hooks
    native = (application.path.parent / "versions").is_dir()  # Its programs know --invert.
    if policy == "inverse":
        plugged("one_answer")[-1](application, application.parameters)
        if not hooks.get("invert") and not native:
            raise ValueError("validation = 'inverse' needs the function that volunteers check "
                             "with; wanted: def invert(output)")
        if not hooks.get("same"):
            raise ValueError("validation = 'inverse' needs the function that compares inputs; "
                             "wanted: def same(input, recovered)")
    elif hooks.get("invert") or hooks.get("same"):
        raise ValueError(f"invert() and same() would never be called; wanted: validation = "
                         f"'inverse', found {policy!r}")


def shape_work(application, given):
    """Let one answer be enough, if its check is passed."""
    if application.policies["validation"] == "inverse":
        return plugged("one_answer")[-1](application, given)
    return given


def inverse(app_id):
    """Return the application of that id if it has its results checked by their inverse."""
    return next((a for a in apps.values()
                 if a.id == app_id and a.policies["validation"] == "inverse"), None)


def literal(application):
    """Say whether X-Com's rule for the black list holds to the letter [S3-33]."""
    return "literal" in [mode(application) for mode in plugged("black_list_mode")]


def checks_of(result_id):
    """Return all checks of a result, the oldest first."""
    return list(InverseCheck.select().where(InverseCheck.result == result_id)
                .order_by(InverseCheck.id))


def check_of(question_id):
    """Return the check that a question belongs to, or None.

    The newest one: the store may give the number of a workunit that is purged to another one.
    """
    return (InverseCheck.select().where(InverseCheck.question == question_id)
            .order_by(InverseCheck.id.desc()).first())


def question_of(check):
    """Return the workunit that asks for a check, None if it is not made yet or purged."""
    question = check.question and Workunit.get_or_none(id=check.question, number=None)
    return question if question and check_of(question.id) == check else None


def standing(checks, application):
    """Say what the checks of a result make of it: right, wrong, asked, unasked, in doubt.

    In doubt is also what computers could not compute back from: it may be no answer at all.
    """
    if any(check.says for check in checks):
        return "right"
    denied = [check for check in checks if check.says is False]
    if any(check.backs for check in denied) or denied and literal(application):
        return "wrong"
    if any(check.open and check.says is None for check in checks):
        return "asked"
    in_vain = Workunit.select().where(
        Workunit.id.in_([check.question for check in checks if check.says is None]),
        Workunit.error_mask.bin_and(ErrorMask.TOO_MANY_ERROR_RESULTS) != 0).exists()
    return "in doubt" if in_vain or len(checks) == CHECKS_MAX else "unasked"


# ---- The policy --------------------------------------------------------------------


def judge(wu, results, application):
    """Believe what another node has confirmed; return a Verdict."""
    if wu.number is None:
        return judge_check(wu, results, application)
    canonical = next((r for r in results if r.id == wu.canonical_resultid), None)
    verdict, answers = read(wu, results, application, Verdict())
    if canonical:
        plugged("compare_stragglers")[-1](canonical, application, answers, verdict)
        return verdict
    for rid in sorted(answers):
        found = standing(checks_of(rid), application)
        if found == "wrong":
            verdict.wrong.add(rid)
        elif found == "right" and not verdict.canonical:
            verdict.canonical = rid
        elif found in ("asked", "unasked"):
            verdict.pending.add(rid)
    if verdict.canonical:
        verdict.pending = set()
        believe(verdict.canonical, application, answers, verdict)
    return verdict


def read(wu, results, application, verdict):
    """Read what is to be judged into a verdict; return it, and the answers {result id: answer}."""
    chosen = candidates(results, any(r.id == wu.canonical_resultid for r in results))
    verdict.seen, answers = {r.id for r in chosen}, {}
    for r in chosen:
        plugged("read_answer")[-1](r, application, answers, verdict)
    return verdict, answers


def believe(rid, application, answers, verdict):
    """Make a result canonical; those that agree with it match."""
    verdict.canonical, verdict.matching = rid, {rid}
    for other in set(answers) - verdict.wrong - {rid}:
        match = plugged("agree")[-1](application, answers[rid], answers[other])
        if match is not False:
            (verdict.unsure if match is None else verdict.matching).add(other)


def judge_check(wu, results, application):
    """Judge the answers to a question: recovered inputs [S3-31 S3-32]."""
    check = check_of(wu.id)
    if check is None:
        return Verdict()  # What was to be checked is purged.
    asking = SimpleNamespace(hooks=dict(  # They are read and compared as inputs are.
        parse=application.hooks["read_input"], compare=application.hooks["same"]))
    canonical = next((r for r in results if r.id == wu.canonical_resultid), None)
    verdict, answers = read(wu, results, asking, Found(
        says=check.says, backs=check.backs, answer=check.answer))
    if canonical:
        plugged("compare_stragglers")[-1](canonical, asking, answers, verdict)
        return verdict
    if answers and check.answer not in answers:  # It has none, or its output was lost since.
        first_answer(wu, check, asking, answers, verdict)
    if verdict.answer not in answers:
        return verdict  # unreadable, or not readable now
    right = holds(check, verdict, application)
    if right:
        believe(verdict.answer, asking, answers, verdict)
    elif right is False:
        verdict.wrong.add(verdict.answer)
    else:
        verdict.pending.add(verdict.answer)
    return verdict


def first_answer(wu, check, asking, answers, verdict):
    """Note in a verdict what the first answer says of the checked result [S3-32]."""
    (agree,), rid = plugged("agree"), min(answers)
    file = check.workunit.input_files[0]["name"]
    told = asking.hooks["parse"](plugged("file_content")[-1]("download", file))
    says = agree(asking, told, answers[rid])
    if says is None:
        verdict.unsure.add(rid)
        return
    verdict.says, verdict.answer, verdict.backs = says, rid, 0
    for other in checks_of(check.result_id) if not says else ():
        if other.says is False and other.id != check.id and not verdict.backs:
            base, before = {}, Result.get_or_none(id=other.answer, workunit=other.question)
            if before:
                plugged("read_answer")[-1](before, asking, base, Verdict())
            if base and agree(asking, base[other.answer], answers[rid]):
                verdict.backs = other.id


def holds(check, verdict, application):
    """Say whether a check was done right: True, False, or None while that is not known [C36]."""
    if verdict.says or verdict.backs:
        return True  # Two nodes say the same.
    backed = {other.backs for other in checks_of(check.result_id)} - {0}
    if check.id in backed:
        return True
    if literal(application) or backed:
        return False
    state = check.result.validate_state
    return None if state not in JUDGED else state == V.INVALID


VALIDATION = {"inverse": judge}


# ---- What follows, in the writer ------------------------------------------------------


def at_verdict(wu, judged, verdict, hosts, now):
    """Note what a check says, or that a result needs one."""
    application = inverse(wu.app_id)
    if not application:
        return
    if wu.number is None:
        note_answer(wu, verdict, application, now)
        return
    for rid in verdict.pending:
        checks = checks_of(rid)
        if standing(checks, application) == "unasked":
            InverseCheck.create(create_time=now, workunit=wu.id, result=rid)
            explain(wu, f"another computer is asked to recover the input from the output of copy "
                        f"{rid}: check {len(checks) + 1} of at most {CHECKS_MAX}")
    if judged or verdict.late:
        InverseCheck.update(wake=now).where(InverseCheck.workunit == wu.id, OPEN).execute()
    for r in judged:
        said = [check.says for check in checks_of(r.id) if check.says is not None]
        if said:
            explain(r, f"{sum(said)} of {len(said)} checks recovered the input of the workunit "
                       f"from it")


def note_answer(wu, verdict, application, now):
    """Keep what a check says, for its result's sake; end a check that was done wrong."""
    check = check_of(wu.id)
    if check is None:
        return drop(wu, now, "what it was to check is purged")
    if not isinstance(verdict, Found):
        return
    if verdict.answer != check.answer:
        check.says, check.backs, check.answer = verdict.says, verdict.backs, verdict.answer
        found = "the input of the workunit" if check.says else \
            "another input, as a check before" if check.backs else "another input"
        explain(wu, f"the check of {check.result.name} recovered {found}")
    if verdict.answer in verdict.wrong:
        drop(wu, now, "the other checks say otherwise")
    elif verdict.answer in verdict.unreadable and check.result.validate_state in JUDGED:
        drop(wu, now, f"{check.result.name} is judged")
    check.wake = now  # Something follows for its result, or the check is done with.
    check.save()


def drop(question, now, why):
    """Give a check up that nobody needs any more; its computer is told at its next contact."""
    if not question.error_mask and not question.canonical_resultid:
        explain(question, f"the check is not needed any more: {why}")
        fire(CANCEL, question)
        question.transition_time = now


def withhold(r, wu, host, now):
    """Keep a check from whoever has computed the result, or checked it already [S3-34].

    Who has computed another copy knows the input, and need not compute: somebody else is awaited
    first. But in a small project, where tasks were handed over, there may be nobody else.
    """
    if wu.number is not None or not inverse(wu.app_id):
        return ""
    if host.client_version.startswith(("minigrid 0.1.", "minigrid 0.2.", "minigrid 0.3.")):
        return "your client is too old to check answers: it would compute them"
    check = check_of(wu.id)
    if check is None:
        return "nobody needs that check any more"
    asked = InverseCheck.select(InverseCheck.question).where(InverseCheck.result == check.result_id)
    had = list(Result.select().where(
        (Result.workunit == check.workunit_id) | Result.workunit.in_(asked),
        Result.host.is_null(False), Result.id != (r.id or 0)))
    mine = [other for other in had if other.host_id == host.id]
    if any(other.id == check.result_id or other.workunit_id != check.workunit_id for other in mine):
        return "nobody checks what he has computed himself"
    early = now < check.create_time + OTHER_USER_SECONDS
    if mine and early:
        return "a check waits first for a computer that has not computed the same"
    if host.user_id in [other.user_id for other in had if other not in mine] and (
            early or project.settings.one_result_per_user_per_wu):
        return "a check waits for somebody else's computer first"
    return ""


def cannot_run(wu, version):
    """Keep a check from a program that a volunteer brought along: it may not know --invert."""
    if wu.number is None and version.platform == "anonymous" and inverse(wu.app_id):
        return "answers are checked by the project's own programs, not by yours"
    return ""


# ---- The stage --------------------------------------------------------------------------


def inverse_checks(now):
    """Stage: make the checks that are wanted, wake who waits for one, drop what is not needed."""
    done = leave_checks(now)
    if not any(a.policies["validation"] == "inverse" for a in apps.values()):
        return done
    if not any_open.first():
        return done
    # As many as other stages can finish and purge in a pass, or questions would outlive checks.
    found = due_checks(now)
    for start in range(0, len(found), CHUNK):
        contents = {}
        for check in found[start:start + CHUNK]:
            try:
                contents[check.id] = None if check.question else content_of(check)
            except OSError as error:
                put_off(inverse(check.workunit.app_id), check.workunit_id, now,
                        f"{check.workunit.name}: {error}")
        done += project.write(lambda: sum(tend(check_id, contents, now) for check_id in contents)) \
            if contents else 0
    return done


def leave_checks(now):
    """Give up the checks of applications that have chosen another policy since; return how many.

    Nobody could answer them any more, and what they were to check would wait for ever.
    """
    if not any_open.first():
        return 0
    others = [a.id for a in apps.values() if not inverse(a.id)]
    rows = list(InverseCheck.select(InverseCheck, Workunit).join(Workunit)
                .where(OPEN, Workunit.app.in_(others)).limit(CHUNK))
    return project.write(lambda: sum(leave(check, now) for check in rows)) if rows else 0


@prepared
def any_open():
    """Find an open check."""
    return InverseCheck.select(InverseCheck.id).where(OPEN).limit(1).tuples()


def leave(check, now):
    """Give up one check; its workunit is judged as its application wants it now. In the writer."""
    application = next(a for a in apps.values() if a.id == check.workunit.app_id)

    def compute_again(wu, results):
        if application.policies["validation"] not in ("none", "check"):  # One answer is no vote.
            quorum = max(application.parameters.get("min_quorum", 2), 2)
            wu.min_quorum = wu.target_nresults = min(quorum, wu.max_success_results)
        wu.transition_time = now

    close(check, now, f"{application.name} has its answers checked in another way now")
    change([check.workunit_id], lambda wu: not (wu.canonical_resultid or wu.error_mask),
           compute_again, now)
    ask_validator(check.workunit_id, now)
    return 1


def close(check, now, why):
    """Give a check up, with its question. Runs in the writer."""
    if question := question_of(check):
        change([question.id], lambda unit: True, lambda unit, results: drop(unit, now, why), now)
    check.open = False
    check.save()


def due_checks(now):
    """Return the open checks about which something may be done since it changed.

    Not in the second in which it did: as with all stages a second pass then finds nothing to do.
    """
    question = Workunit.alias()
    off = [wu_id for _, wu_id in list(project.put_off) if wu_id > 0]
    served = [a.id for a in apps.values() if inverse(a.id)]
    return list(
        InverseCheck.select(InverseCheck, Workunit).join(Workunit)
        .join(question, JOIN.LEFT_OUTER, on=question.id == InverseCheck.question)
        .where(OPEN, Workunit.app.in_(served), Workunit.id.not_in(off),
               (InverseCheck.question == 0) & (InverseCheck.create_time < now)
               | (InverseCheck.wake > 0) & (InverseCheck.wake < now)
               | (Workunit.error_mask != 0) & (Workunit.mod_time < now)
               | (question.error_mask != 0) & (question.mod_time < now)
               | (InverseCheck.question != 0) & question.id.is_null())
        .order_by(InverseCheck.id).limit(CHUNK * CHUNKS_MAX))


def content_of(check):
    """Return the output that is to be checked; None if it is gone, as the judge will find, too."""
    try:
        return plugged("file_content")[-1]("upload", output_files(check.result)[0]["name"])
    except FileNotFoundError:
        return None


def tend(check_id, contents, now):
    """Do for one open check what is to be done. Runs in the writer, on rows read now."""
    check = InverseCheck.get_or_none(InverseCheck.id == check_id, OPEN)
    if check is None:
        return 0
    wu, r, question = check.workunit, check.result, question_of(check)
    settled = question is None or bool(question.canonical_resultid or question.error_mask)
    check.wake = 0
    if wu.error_mask or wu.canonical_resultid or r.validate_state in JUDGED:
        if not settled and check.says is False and r.validate_state in JUDGED:
            ask_validator(question.id, now)  # What it said can be judged now.
        else:
            close(check, now, f"{wu.name} is decided")
    elif not check.question and contents.get(check_id) is not None:
        ask(check, wu, contents[check_id], now)
    else:  # It has an answer, or will have none; the judge looks for what comes next.
        check.open = not settled
        ask_validator(wu.id, now)
    check.save()
    return 1


def ask_validator(wu_id, now):
    """Have the validator look at a workunit that is not decided."""
    change([wu_id], lambda wu: not (wu.canonical_resultid or wu.error_mask or wu.need_validate),
           lambda wu, results: fire(RULES["ask for validation"], wu), now)


def ask(check, wu, content, now):
    """Make the workunit that puts a check's question to another node [S3-30 S3-31]."""
    name = f"{inverse(wu.app_id).name}_check_{project.rng.getrandbits(48):012x}"
    plugged("keep_file")[-1]("download", f"{name}_in", content)
    kept = {key: getattr(wu, key) for key in (
        "app", "delay_bound", "max_total_results", "max_success_results",
        "rsc_fpops_est", "rsc_fpops_bound", "rsc_memory_bound", "rsc_disk_bound", "complexity",
        "canonical_credit")}
    question = Workunit(
        name=name, number=None, create_time=now, mod_time=now, priority=HEAD,
        input_files=[file_entry(f"{name}_in", content)], command_line="--invert",
        min_quorum=1, target_nresults=1, max_error_results=2, transition_time=now, **kept)
    question.save(force_insert=True)
    save_all(transition(question, [], now) + [question])
    explain(question, f"made to check {check.result.name}, by a computer that has not computed it")
    check.question = question.id


def waits_for(wu, results, now):
    """Say which checks a workunit waits for."""
    names = {r.id: r.name for r in results}
    asked = list(InverseCheck.select().where(
        InverseCheck.workunit == wu.id, OPEN, InverseCheck.says.is_null()))
    units = {unit.id: unit.name for unit in Workunit.select(Workunit.id, Workunit.name).where(
        Workunit.id.in_([check.question for check in asked]))}
    return [f"waits until another computer has checked {names[check.result_id]}: see "
            f"{units.get(check.question, 'the next pass, which asks')}"
            for check in asked if check.result_id in names]


FIRST_STAGES = (inverse_checks,)  # before the validator, which is to see what it wakes
