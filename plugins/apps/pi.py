"""pi: estimates pi from random numbers; floating point with a tolerant compare.

A quarter of a circle of radius 1 has the area pi / 4, and that is its average height. So we take
4 * sqrt(1 - x * x) at many random x and average. Ten times the error bar less costs a hundred
times the samples: a job for many machines.
"""

import json
import math
import os
import random

about = "Estimates pi: measures a quarter circle at hundreds of millions of random places."
min_quorum = 2
delay_bound = 3600  # seconds
rsc_fpops_est = 6e7  # about two seconds of a usual PC, which does 3e7 Python operations a second
rsc_fpops_bound = 6e9
rsc_memory_bound = 100e6
rsc_disk_bound = 1e6

WORKUNITS = 100
SAMPLES = 8_000_000  # of one workunit
PART = 100_000  # samples between two reports of progress
TOLERANCE = 1e-9  # relative; rounding stays below 1e-12, another seed about 1e-4


def workunit(i):
    """The number is the seed, so that replicas look at the same places."""
    return {"input": {"seed": i, "samples": SAMPLES}} if i < WORKUNITS else None


def compute(input, progress):
    """Average `samples` heights; the seed is all that makes one workunit differ from another."""
    x = random.Random(input["seed"]).random  # the same numbers in every version of Python
    samples, total, squares = input["samples"], 0.0, 0.0
    for done in range(0, samples, PART):
        part = range(min(PART, samples - done))
        heights = [4 * math.sqrt(1 - x() ** 2) for _ in part]
        total += sum(heights)
        squares += sum([h * h for h in heights])
        progress((done + len(part)) / samples)
    mean = total / samples
    return {"samples": samples, "mean": mean, "variance": squares / samples - mean * mean}


def parse(output):
    """Refuse what cannot come from `compute` and would spoil the table for good, NaN above all."""
    wanted = {"samples": int, "mean": float, "variance": float}
    if type(output) is not dict or {key: type(value) for key, value in output.items()} != wanted:
        raise ValueError("wanted a dict of samples (int), mean and variance (float)")
    samples, mean, variance = (output[key] for key in wanted)
    if not (0 < samples <= 1e12 and 0 <= mean <= 4 and 1e-6 <= variance <= 4):
        raise ValueError("samples, mean or variance out of range")
    return output


def compare(a, b):
    """Same samples, and the same averages but for rounding.

    Exact equality would be wrong: since Python 3.12 sum() rounds less than before, and `**` is the
    C library's. Such differences are far below TOLERANCE, invented numbers far above.
    """
    return a["samples"] == b["samples"] and all(
        math.isclose(a[key], b[key], rel_tol=TOLERANCE) for key in ("mean", "variance")
    )


def assimilate(workunit, answer):
    """Keep the answer by workunit number and write the table anew; repeating changes nothing [C23].

    A running sum would count an answer twice if the server stops between this hook and its own
    commit. `answer` tells success from failure: there may be errors beside an answer [S2-36].
    """
    kept = workunit.folder / f"{workunit.app}.answers.json"
    answers = load(kept)
    answers[str(workunit.number)] = answer
    save(kept, json.dumps(answers, sort_keys=True))
    save(workunit.folder / f"{workunit.app}.txt", table(answers))
    return answer or {"failed": workunit.errors}


def combine(answers):
    """Weigh answers by their samples -> samples, estimate, error bar (one standard deviation)."""
    samples = sum(a["samples"] for a in answers)
    estimate = sum(a["samples"] * a["mean"] for a in answers) / samples
    variance = sum(a["samples"] * a["variance"] for a in answers) / samples
    return samples, estimate, math.sqrt(variance / samples)


def table(answers):
    """What the status page shows: where we are, and how the estimate got there."""
    # In the order of the numbers, because sums in the order of arrival would differ by rounding.
    good = [answers[key] for key in sorted(answers, key=int) if answers[key]]
    failed = len(answers) - len(good)
    lines = ["pi, the average height of a quarter circle times 4", ""]
    lines.append(f"  workunits    {len(good)} of {WORKUNITS}" + f", {failed} failed" * (failed > 0))
    if good:
        samples, estimate, bar = combine(good)
        off = (estimate - math.pi) / bar
        side = "high" if off > 0 else "low"
        lines += [
            f"  samples      {samples:,}",
            f"  estimate     {estimate:.7f} +- {bar:.7f}",
            f"  true value   {math.pi:.7f} (the estimate is {abs(off):.1f} error bars too {side})",
            "",
            f"  {'workunits':>9}  {'samples':>13}  {'estimate':>9}  {'error bar':>9}   {'pi':>22}",
        ]
        width = 3 * combine(good[:1])[2]  # half of the drawing: three error bars of the first row
        steps = [n for n in (1, 2, 5, 10, 20, 50, 100) if n < len(good)] + [len(good)]
        for n in steps:
            samples, estimate, bar = combine(good[:n])
            drawn = draw(estimate, bar, width)
            lines.append(f"  {n:9}  {samples:13,}  {estimate:9.7f}  {bar:9.7f}   {drawn}".rstrip())
    return "\n".join(lines) + "\n"


def draw(estimate, bar, width):
    """One error bar as text, 41 columns wide, with pi in the middle: `     :   --o--`."""
    columns = [" "] * 41
    low, middle, high = (
        min(max(round(20 + 20 * (x - math.pi) / width), 0), 40)
        for x in (estimate - bar, estimate, estimate + bar)
    )
    columns[low:high + 1] = "-" * (high + 1 - low)
    columns[20] = ":"
    columns[middle] = "o"
    return "".join(columns)


def load(path):
    """The answers kept so far, by workunit number."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:  # Spoilt from outside. The server's own record still has the answers.
        os.replace(path, f"{path}.damaged")
        return {}


def save(path, text):
    """Write so that a crash or a power cut leaves the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    if os.name == "posix":  # The new name must be on disk before the server notes us as done.
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
