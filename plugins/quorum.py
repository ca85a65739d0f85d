"""The validation policy of BOINC, made strict: a quorum of matching results [D9, C20].

A policy looks and compares; it changes nothing. It returns a Verdict, and the core applies the
rules that follow. An application chooses its policy by `validation = "quorum"`, the default.
"""

import contextlib
import os

from minigrid import Verdict, candidates, output_files, place_of, plugged


def judge(wu, results, application):
    """Let the application read and compare the outputs of a workunit; return a Verdict.

    Reads files, changes nothing. ValueError from parse() means unreadable, from compare() no
    match; OSError from either means that it may work later. Raises whatever else the hooks raise.
    """
    canonical = next((r for r in results if r.id == wu.canonical_resultid), None)
    chosen = candidates(results, bool(canonical))
    verdict, answers = Verdict(seen={r.id for r in chosen}), {}
    if not canonical and len(chosen) < wu.min_quorum:
        return verdict
    for r in chosen:
        read_answer(r, application, answers, verdict)
    if canonical:
        compare_stragglers(canonical, application, answers, verdict)
    elif len(answers) >= wu.min_quorum:
        find_consensus(wu, application, answers, verdict)
    return verdict


def read_answer(r, application, answers, verdict):
    """Read and parse one output into `answers`, or note in the verdict why not [S4-48]."""
    name = output_files(r)[0]["name"]
    try:
        answers[r.id] = application.hooks["parse"](plugged("file_content")[-1]("upload", name))
    except (ValueError, RecursionError):
        verdict.unreadable.add(r.id)
    except FileNotFoundError:  # Reported as uploaded, and is not here [WIRE 17.7, D13].
        (verdict.unreadable if os.path.exists(os.path.dirname(place_of("upload", name)))
         else verdict.unsure).add(r.id)
    except OSError:
        verdict.unsure.add(r.id)


def agree(application, a, b):
    """Compare two parsed outputs [S2-21 S2-23 S2-24]; True, False, or None: ask again later."""
    try:
        return application.hooks["compare"](a, b)
    except ValueError:
        return False
    except OSError:
        return None


def compare_stragglers(canonical, application, answers, verdict):
    """Compare late results with the canonical one [S0-37 S0-39 S2-25].

    If its output is lost or spoilt, they are too late, which is not their fault; if it cannot be
    read just now, they wait [V9].
    """
    probe = Verdict()
    read_answer(canonical, application, base := {}, probe)
    if probe.unreadable:
        verdict.late = set(answers)
        return
    for rid in sorted(answers):
        match = agree(application, answers[rid], base[canonical.id]) if base else None
        if match is None:  # The first that must wait ends this look [V15].
            verdict.unsure.update(r for r in answers if r >= rid)
            break
        if match:
            verdict.matching.add(rid)
    if verdict.unsure:
        first = min(verdict.unsure)
        verdict.unreadable -= {r for r in verdict.unreadable if r > first}
        verdict.matching -= {r for r in verdict.matching if r > first}
        verdict.unsure |= {r for r in verdict.seen if r > first}
    others = set(answers) - verdict.matching - verdict.unsure
    verdict.groups = [{canonical.id} | verdict.matching] + [{rid} for rid in sorted(others)]


def find_consensus(wu, application, answers, verdict):
    """Find the largest group of agreeing answers, if it is large enough [C20 S3-37 S3-38].

    The group of an answer is all that match it [V10]. With two largest groups that contradict
    each other nobody wins, and one more copy is asked for; a project with quorum 1 asked for one
    answer and takes the first [V2].
    """
    check_set = application.hooks["check_set"]
    if check_set:  # Replaces the vote [S2-21 S2-22].
        order, index = choose(check_set, answers, wu.min_quorum, verdict)
        if isinstance(index, tuple):
            index, verdict.credit = index
        groups = {} if index is None else {order[index]: order}
    else:
        groups = answers
    found = {}
    for rid in sorted(groups):
        found[rid] = {rid}
        for other in sorted(answers):
            match = other == rid or agree(application, answers[rid], answers[other])
            if match is None:  # A vote without one voice would be another vote: wait.
                verdict.unsure |= {rid, other}
                return
            if match:
                found[rid].add(other)
    for rid in sorted(found):
        if found[rid] not in verdict.groups:
            verdict.groups.append(found[rid])
    size = max(map(len, found.values()), default=0)
    best = [rid for rid in sorted(found) if len(found[rid]) == size]
    rivals = [rid for rid in best if rid not in found[best[0]]] if best else []
    enough = check_set or size >= wu.min_quorum // 2 + 1
    if best and enough and (not rivals or wu.min_quorum == 1):
        verdict.canonical, verdict.matching = best[0], found[best[0]]
        if size == 1 and (not check_set or len(answers) == 1):  # Its word is all there is [S3-42].
            verdict.unchecked = {best[0]}


def choose(check_set, answers, min_quorum, verdict):
    """Return the ids of answers in order, and what check_set() said of them.

    If it cannot take them all, but all but one, that one is as good as unreadable, and taken out.
    Else, or if too few are left, one more copy may help.
    """
    order = sorted(answers)
    with contextlib.suppress(ValueError):
        return order, check_set([answers[rid] for rid in order])
    found = []
    for spoilt in order if len(order) > 1 else ():
        rest = [rid for rid in order if rid != spoilt]
        with contextlib.suppress(ValueError):
            found.append((spoilt, rest, check_set([answers[rid] for rid in rest])))
    if len(found) != 1:
        return order, None
    (spoilt, rest, index), = found
    verdict.unreadable.add(spoilt)
    del answers[spoilt]
    return rest, index if len(rest) >= min_quorum else None


VALIDATION = {"quorum": judge}
