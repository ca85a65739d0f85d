"""What a person who plans a project wants to know of a simulated one."""

from collections import Counter

from minigrid import RULES, Result

from . import watch, world

DAY = 86400
CHART_WIDTH, CHART_HEIGHT = 60, 8


def figures(w, name):
    """Return what became of a world, whose application has this name, as JSON values."""
    lines = world.results_of(name)
    answers = [line for line in lines if line["answer"] is not None]
    wrong = sum(line["answer"] != world.truth(line["number"], None) for line in answers)
    times = sorted((at - watch.START) / DAY for at in w.watch.answers)
    listed, ever = watch.black_listed(w.now)
    honest, liars = ({i for c in w.computers if c.temper.honest == good for i in c.hostids}
                     for good in (True, False))
    total = sum(w.watch.hours.values())
    return {
        "seed": w.plan.seed, "days": round((w.now - watch.START) / DAY, 3),
        "hosts": len(w.computers), "hosts_gone": w.gone,
        "kinds": dict(sorted(Counter(c.kind for c in w.computers).items())),
        "workunits": w.plan.workunits, "answers": len(answers),
        "failed": len(lines) - len(answers), "wrong": wrong,
        "wrong_rate": wrong / max(len(answers), 1),
        "days_to_half": round(times[len(times) // 2], 3) if len(times) > w.plan.workunits // 2
        else None,
        "days_to_last": round(times[-1], 3) if len(times) >= w.plan.workunits else None,
        "copies": sum(w.watch.copies.values()),
        "copies_per_answer": round(sum(w.watch.copies.values()) / max(len(answers), 1), 4),
        "copies_by_cause": {cause: w.watch.copies[cause] for cause in watch.CAUSES},
        "hours": round(total, 1),
        "hours_by_cause": {cause: round(w.watch.hours[cause], 1) for cause in watch.CAUSES},
        "liars": len(liars), "liars_caught": len(liars & ever),
        "honest_listed": len(honest & listed), "honest_ever_listed": len(honest & ever),
        "requests": w.requests, "requests_refused": w.refused, "requests_in_vain": w.in_vain,
        "requests_per_second_peak": round(max(w.load.values(), default=0) / 600, 4),
        "passes": w.passes, "crashes": w.faults.crashes, "stage_errors": w.faults.errors,
        "progress": progress(times), "rules": dict(sorted(watch.fired().items())),
        "told": [r.refusals[-1][2] for r in Result.select().where(
            Result.refusals.is_null(False)).order_by(Result.id).limit(1)],
    }


def progress(times):
    """Return how many answers there were after each of a chart's equal spans of time."""
    span = max(times, default=0) / CHART_WIDTH
    return {"days_per_column": round(span, 5), "answers": [
        sum(t <= span * (k + 1) + 1e-9 for t in times) for k in range(CHART_WIDTH)]}


def text(found):
    """Return the figures as a page of text."""
    f = found
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in f["kinds"].items())
    last = f"the last after {f['days_to_last']:.2f} days" if f["days_to_last"] is not None \
        else f"not all after {f['days']:.2f} days"
    half = f"half of {'all decided' if f['failed'] else 'them'} after {f['days_to_half']:.2f} " \
           f"days, " if f["days_to_half"] is not None else ""
    rows = [
        ("computers", f"{f['hosts']:,} ({kinds})"
         + (f"; {f['hosts_gone']:,} went for good" if f["hosts_gone"] else "")),
        ("answers", f"{f['answers']:,} of {f['workunits']:,}, {half}{last}"),
        ("failed", f"{f['failed']:,} workunits{why_failed(f)}"),
        ("wrong answers", f"{f['wrong']:,} accepted ({f['wrong_rate']:.2%})"),
        ("copies", f"{f['copies']:,}, {f['copies_per_answer']:.2f} for each answer"),
        ("black list", f"{f['liars_caught']:,} of {f['liars']:,} liars; of the others "
         f"{f['honest_listed']:,} at the end, {f['honest_ever_listed']:,} ever"),
        ("server", f"{f['requests']:,} requests, at most {f['requests_per_second_peak']:.2f} a "
         f"second (mean of ten minutes), {f['requests_in_vain']:,} got no work; "
         f"{f['passes']:,} passes"),
    ]
    if f["crashes"] or f["stage_errors"] or f["requests_refused"]:
        rows.append(("troubles", f"{f['crashes']} crashes, {f['stage_errors']} failures of stages, "
                     f"{f['requests_refused']:,} requests that could not be served"))
    page = [f"{name:<15}{value}" for name, value in rows]
    return "\n".join([*page, "", *waste(f), "", *chart(f)])


def why_failed(f):
    """Say why workunits failed, by the rules that have given them up; empty if none has."""
    reasons = [f"{n:,} times {RULES[name].why}" for name, n in f["rules"].items()
               if "error_mask" in RULES[name].after and f["failed"]]
    told = [f"a computer was told: {reason}" for reason in f["told"] if reasons]
    return ": " + "; ".join(reasons + told) if reasons else ""


def waste(f):
    """Return the table of computing time by what it was good for, as lines."""
    lines = [f"computing time {f['hours']:,.1f} hours of a processor"]
    for cause, words in watch.CAUSES.items():
        hours, copies = f["hours_by_cause"][cause], f["copies_by_cause"][cause]
        if copies or hours:
            share = hours / max(f["hours"], 1e-9)
            lines.append(f"  {cause:<12} {hours:>11,.1f} h {share:>6.1%} {copies:>10,} copies   "
                         f"{words}")
    return lines


def chart(f):
    """Draw the answers over time, as lines."""
    heights, most = f["progress"]["answers"], max(f["answers"] + f["failed"], 1)
    lines = []
    for row in range(CHART_HEIGHT, 0, -1):
        label = f"{most * row // CHART_HEIGHT:>9,}" if row % 4 == 0 else " " * 9
        lines.append((label + " |" + "".join(
            "#" if n * CHART_HEIGHT >= most * (row - 0.5) else " " for n in heights)).rstrip())
    end = f["progress"]["days_per_column"] * CHART_WIDTH
    middle, right = f"{end / 2:.2f}", f"{end:.2f} days"
    lines.append(" " * 10 + "+" + "-" * CHART_WIDTH)
    lines.append(" " * 11 + "0" + middle.rjust(CHART_WIDTH // 2 - 1)
                 + right.rjust(CHART_WIDTH // 2))
    return lines
