"""Validation without a vote: no check at all, the application's own check, known answers [S3-25].

`validation = "none"` hands the first readable answer to the application [S3-26]. With "check" the
application's hook `check(input, output)` says whether an answer is right [S3-27]: True or False; a
ValueError means that it is wrong, an OSError that it can only be told later. Under any policy the
hook `known(i)` may give the right answer of workunit(i), as compare() gets it: copies of that
workunit are compared with it instead of each other; to volunteers it looks like any other.

Every wrong answer, whoever found it out, is kept for later study [S3-28]: in
data/wrong/APPLICATION.wrong.jsonl, which no address leads to.
"""

import codecs
import contextlib
import os

from minigrid import (Meta, PluginError, Rule, ValidateState, Verdict, Workunit, append_exactly,
                      apps, candidates, canonical_json, explain, output_files, plugged,
                      project, remember)

HOOKS = {"check": ("input", "output"), "known": ("i",)}
FOUND_OUT = ("wrong", "invalid", "unreadable output")  # the rules that make a result INVALID
OUTPUT_BYTES, TAKEN_BYTES = 1 << 16, 1 << 20  # kept of one wrong answer; of those of one moment
LOG_BYTES_MAX = 10 << 20  # of an application's wrong answers, in two files


def check_application(application):
    """Refuse an application whose policy would not find what it needs. Raises ValueError."""
    policy, check = application.policies["validation"], application.hooks.get("check")
    if policy == "check" and not check:
        raise ValueError("validation = 'check' needs the function that does it; wanted: "
                         "def check(input, output)")
    if check and policy != "check":
        raise ValueError(f"check() would never be called; wanted: validation = 'check', found "
                         f"{policy!r}")
    if policy in ("none", "check"):
        one_answer(application, application.parameters)


def shape_work(application, given):
    """Let one answer be enough where nothing is voted on [S3-26 S3-27]."""
    if application.policies["validation"] in ("none", "check"):
        return one_answer(application, given)
    return given


def one_answer(application, given):
    """Return the parameters of a workunit that one answer settles. Raises ValueError."""
    if given.get("min_quorum", 1) != 1:
        raise ValueError(f"min_quorum must be left out or 1, since validation = "
                         f"'{application.policies['validation']}' takes one answer at a time; "
                         f"found {given['min_quorum']!r}")
    return {**given, "min_quorum": 1}


# ---- Policies ------------------------------------------------------------------


def read_answers(wu, results, application):
    """Return a Verdict on what can be read, and the parsed answers: {result id: answer}."""
    decided = any(r.id == wu.canonical_resultid for r in results)
    chosen = candidates(results, decided)
    verdict, answers = Verdict(seen={r.id for r in chosen}), {}
    for r in chosen:
        plugged("read_answer")[-1](r, application, answers, verdict)
    return verdict, answers


def settle(wu, results, answers, right, verdict):
    """Note who is right, the others being wrong; the first one right becomes canonical."""
    verdict.matching = right
    verdict.wrong = set(answers) - right - verdict.unsure
    if right and not any(r.id == wu.canonical_resultid for r in results):
        verdict.canonical = min(right)
    return verdict


def judge_none(wu, results, application):
    """Take whatever can be read [S3-26]."""
    verdict, answers = read_answers(wu, results, application)
    verdict.unchecked = set(answers)
    return settle(wu, results, answers, set(answers), verdict)


def judge_check(wu, results, application):
    """Let the application say which answers are right [S3-27].

    Raises OSError if it cannot say so now: the workunit waits, and nobody computes it again.
    """
    verdict, answers = read_answers(wu, results, application)
    right = set()
    for rid, answer in answers.items():
        content = plugged("file_content")[-1]("download", wu.input_files[0]["name"])
        try:  # Each gets an input of its own, whatever the hook does to it.
            said = application.hooks["check"](application.hooks["read_input"](content), answer)
        except ValueError:  # An answer that no check was written for is none.
            continue
        if said:
            right.add(rid)
    return settle(wu, results, answers, right, verdict)


VALIDATION = {"none": judge_none, "check": judge_check}


def around_judge(judge):
    """Compare with the answer that is known beforehand, where there is one; any policy."""
    def judged(wu, results, application):
        known = application.hooks.get("known")
        right_answer = known(wu.number) if known and wu.number is not None else None
        if right_answer is None:
            return judge(wu, results, application)
        check_known(application, wu.number, right_answer)
        verdict, answers = read_answers(wu, results, application)
        right = set()
        for rid, answer in answers.items():
            match = plugged("agree")[-1](application, right_answer, answer)
            (verdict.unsure if match is None else right if match else set()).add(rid)
        verdict.known = True
        return settle(wu, results, answers, right, verdict)
    return judged


def check_known(application, number, right_answer):
    """Refuse a known answer that is none, such as NaN or a generator. Raises PluginError.

    It would differ from whatever comes, and put honest hosts on the black list.
    """
    try:
        fits = plugged("agree")[-1](application, right_answer, right_answer)
    except (TypeError, RecursionError):
        fits = False
    if fits is False:
        raise PluginError(f"{application.path}: known({number}) must return an answer as compare() "
                          f"gets it, or None; found {right_answer!r:.80}, which compares to "
                          f"nothing, not even to itself")


def at_verdict(wu, judged, verdict, hosts, now):
    """Say for each result that was just judged on what grounds."""
    policy = next((a.policies["validation"] for a in apps.values() if a.id == wu.app_id), "")
    for r in judged:
        if r.id in verdict.unreadable or wu.number is None:
            continue
        right = r.validate_state == ValidateState.VALID
        if verdict.known:
            explain(r, f"its answer is {'' if right else 'not '}the one known beforehand")
        elif policy == "check":
            word = "right" if right else "wrong"
            explain(r, f"check() of the application calls its answer {word}")
        elif r.id in verdict.unchecked:
            explain(r, "accepted with nothing to compare it with")
        elif verdict.groups:
            mine = max((len(group) for group in verdict.groups if r.id in group), default=1)
            most = max(map(len, verdict.groups))
            explain(r, f"{mine} of {len(set().union(*verdict.groups))} answers agree with it, "
                       f"itself included" + ("" if right else f"; {most} agree with each other"))


# ---- Wrong answers, for later study [S3-28] --------------------------------------


def at_commit(done, now):
    """Keep the answers that were found wrong in this transaction, and how they were found out."""
    wrong = {row.id: (rule.name, row) for rule, row in done
             if isinstance(rule, Rule) and rule.name in FOUND_OUT}
    if not wrong:
        return
    why = {rid: [text for text, row in done if isinstance(text, str) and row == wrong[rid][1]]
           for rid in wrong}
    units = {wu.id: wu for wu in Workunit.select(Workunit.id, Workunit.name, Workunit.number).where(
        Workunit.id.in_(list({r.workunit_id for _, r in wrong.values()})))}
    lines, room = {}, TAKEN_BYTES
    for rid, (rule, r) in wrong.items():
        application = next((a for a in apps.values() if a.id == r.app_id), None)
        if application:
            wu = units[r.workunit_id]
            record = dict(
                time=now, workunit=wu.name, number=wu.number, result=r.name, host=r.host_id,
                user=r.user_id, validation=application.policies["validation"], rule=rule,
                why=why[rid], **begin_of(r, min(OUTPUT_BYTES, room)))
            room -= len(canonical_json(record["output"]))  # six times as long, if it is odd
            lines.setdefault(application.name, []).append(canonical_json(record) + "\n")
    for name, records in lines.items():
        try:
            keep(project.data / "wrong" / f"{name}.wrong.jsonl", "".join(records).encode())
        except OSError as error:  # No reason to stop everything else.
            remember(now, f"wrong answers of {name} are not kept: {error}")


def begin_of(r, nbytes):
    """Return the beginning of a result's output as text, or in hexadecimal digits if it is none."""
    name = output_files(r)[0]["name"]
    try:
        content = plugged("file_content")[-1]("upload", name, max(nbytes, 0))
        size = plugged("file_size")[-1]("upload", name)
    except OSError as error:
        return dict(output="", nbytes=None, note=f"not read: {error.strerror}")
    try:  # It may be cut within a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(content, size == len(content))
        return dict(output=text, nbytes=size)
    except UnicodeDecodeError:
        return dict(output=content.hex(), nbytes=size, note="in hexadecimal digits")


def keep(path, data):
    """Append to a log as part of the transaction; the older half goes when it is too long."""
    known = Meta.get_or_none(name=f"size of {path.name}")  # as append_exactly() knows it
    if known and known.value + len(data) > LOG_BYTES_MAX // 2:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, path.with_name(path.name.replace(".wrong.", ".wrong.old.")))
        Meta.delete().where(Meta.name == known.name).execute()
    append_exactly(path, data)
