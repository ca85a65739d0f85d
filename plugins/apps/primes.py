"""primes: counts primes and twins block by block and finds the maximal gaps between primes.

A gap is maximal if no gap before it was as long: 1 after 2, 2 after 3, 4 after 7, 6 after 23 ...
A block owns the gaps, and so the twins (gaps of 2), that begin in it. We count apart the primes
that leave 1 and 3 when divided by 4: Chebyshev saw that 3 is nearly always ahead. Whole numbers
are the same on every machine, so replicas are compared for equality, as they are by default.
"""

import csv
import io
import json
import math
import os
from itertools import compress

about = "Counts prime numbers and looks for the longest gaps between them."
min_quorum = 2
delay_bound = 6 * 3600  # seconds
rsc_fpops_est = 6e7  # about two seconds of a usual PC, which does 3e7 Python operations a second
rsc_fpops_bound = 6e9
rsc_memory_bound = 200e6
rsc_disk_bound = 1e6

WORKUNITS = 50  # up to 10 ** 10
BLOCK = 200_000_000  # numbers in one workunit
SEGMENT = 10_000_000  # numbers in memory at once, between two checkpoints; a multiple of 4


def workunit(i):
    """The numbers from i * BLOCK up to, and without, (i + 1) * BLOCK."""
    return {"input": {"from": i * BLOCK, "to": (i + 1) * BLOCK}} if i < WORKUNITS else None


def compute(input, progress, checkpoint):
    """Sieve the block ("from" and "to" are multiples of 4) segment by segment.

    What is known after a segment goes into `state`, a JSON value. After an interruption the next
    call finds it in `checkpoint.state` and goes on there.
    """
    start, stop = input["from"], input["to"]
    state = checkpoint.state or {
        "next": start, "last": None,  # the first number not sieved, the last prime found
        "primes": 0, "twins": 0, "mod4_1": 0, "mod4_3": 0,
        "gaps": [],  # [length, prime before it]: those longer than all before them in the block
    }
    divisors = odd_primes(math.isqrt(stop) + 1000)
    for low in range(state["next"], stop, SEGMENT):
        high = min(low + SEGMENT, stop)
        count(state, low, sieve(low, high, divisors))
        state["next"] = high
        checkpoint(state)
        progress((high - start) / (stop - start))
    if state["last"]:
        add_gaps(state, [following(stop, divisors) - state["last"]])
    return {key: state[key] for key in ("primes", "twins", "mod4_1", "mod4_3", "gaps")}


def sieve(low, high, divisors):
    """Eratosthenes: one byte for every odd number from `low` (even) to `high`, 1 if it is prime."""
    size = (high - low) // 2
    flags = bytearray(b"\1") * size
    if low == 0:
        flags[0] = 0  # the number 1
    for p in divisors:
        if p * p >= high:
            break
        first = max(p, (low // p + 1) | 1) * p  # the first odd multiple worth crossing out
        gone = range((first - low) // 2, size, p)
        flags[gone.start::p] = bytes(len(gone))
    return flags


def odd_primes(limit):
    """The odd primes up to `limit`."""
    divisors = odd_primes(math.isqrt(limit)) if limit >= 9 else []
    return list(compress(range(1, limit + 1, 2), sieve(0, (limit + 1) // 2 * 2, divisors)))


def following(number, divisors):
    """The first prime after `number` (a multiple of 4)."""
    while 1 not in (flags := sieve(number, number + 1000, divisors)):
        number += 1000
    return number + 1 + 2 * flags.index(1)


def count(state, low, flags):
    """Add one segment to the state. All that runs over single numbers is done by C code."""
    if low == 0:
        state.update(primes=1, last=2)  # The only even prime has no byte.
    state["mod4_1"] += flags[0::2].count(1)
    state["mod4_3"] += flags[1::2].count(1)
    runs = [len(run) for run in bytes(flags).split(b"\1")]  # of composites before, between, after
    if len(runs) == 1:
        return
    state["primes"] += len(runs) - 1
    gaps = [2 * run + 2 for run in runs[1:-1]]
    first = low + 1 + 2 * runs[0]
    if state["last"]:
        gaps.insert(0, first - state["last"])
    else:
        state["last"] = first  # The gap before it belongs to another block.
    add_gaps(state, gaps)


def add_gaps(state, gaps):
    """Add the gaps that follow the last prime: look for twins and for longer gaps than before."""
    state["twins"] += gaps.count(2)
    prime, longest = state["last"], state["gaps"][-1][0] if state["gaps"] else 0
    if max(gaps, default=0) > longest:
        for gap in gaps:
            if gap > longest:
                longest = gap
                state["gaps"].append([gap, prime])
            prime += gap
    state["last"] += sum(gaps)


def parse(output):
    """Refuse what cannot come from `compute`."""
    whole = {"primes", "twins", "mod4_1", "mod4_3"}
    if type(output) is not dict or set(output) != whole | {"gaps"}:
        raise ValueError("wanted a dict of primes, twins, mod4_1, mod4_3, gaps")
    if not all(is_count(output[key]) for key in whole):
        raise ValueError("counts must be whole numbers, 0 or more")
    gaps = output["gaps"]
    if type(gaps) is not list or not all(
            type(gap) is list and len(gap) == 2 and all(map(is_count, gap)) for gap in gaps):
        raise ValueError("gaps must be a list of pairs of whole numbers")
    return output


def is_count(value):
    """Is it an int (True is not), and one that fits into a table?"""
    return type(value) is int and 0 <= value < 10 ** 18


def assimilate(workunit, answer):
    """Keep the answer by block number and write the tables anew; repeating changes nothing [C23].

    `answer` tells success from failure: there may be errors beside an answer [S2-36].
    """
    kept = workunit.folder / f"{workunit.app}.answers.json"
    blocks = load(kept)
    block = {**workunit.input, **(answer or {"failed": workunit.errors})}
    blocks[str(workunit.number)] = block
    save(kept, json.dumps(blocks, sort_keys=True))
    rows = in_order(blocks)
    save(workunit.folder / f"{workunit.app}.csv", table(rows))
    save(workunit.folder / f"{workunit.app}.txt", summary(rows))
    return block


def in_order(blocks):
    """The blocks by number, each with the totals so far and the maximal gaps that begin in it.

    Blocks arrive in any order, but only what is known of all smaller numbers makes a gap maximal:
    from the first block that is missing or failed, these columns stay away.
    """
    rows = [{"block": number, **blocks[str(number)]} for number in sorted(map(int, blocks))]
    sure, primes, twins, longest = True, 0, 0, 0
    for i, row in enumerate(rows):
        if row.get("gaps"):
            row["longest_gap"], row["after_prime"] = row["gaps"][-1]
        sure = sure and row["block"] == i and "failed" not in row
        if sure:
            primes, twins = primes + row["primes"], twins + row["twins"]
            row["primes_so_far"], row["twins_so_far"] = primes, twins
            row["maximal"] = [gap for gap in row["gaps"] if gap[0] > longest]
            longest = max([longest] + [length for length, prime in row["maximal"]])
    return rows


def table(rows):
    """What spreadsheets read: a line a block; maximal gaps as gap@prime, separated by blanks."""
    columns = ["block", "from", "to", "primes", "twins", "mod4_1", "mod4_3", "longest_gap",
               "after_prime", "primes_so_far", "twins_so_far", "maximal_gaps", "failed"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        gaps = " ".join(f"{gap}@{prime}" for gap, prime in row.get("maximal", []))
        failed = " ".join(row.get("failed", []))
        writer.writerow({**row, "maximal_gaps": gaps, "failed": failed})
    return text.getvalue()


def summary(rows):
    """What people read: totals and maximal gaps of all numbers before the first missing block."""
    sure = [row for row in rows if "maximal" in row]
    failed = sum("failed" in row for row in rows)
    lines = [f"Prime numbers below {sure[-1]['to']:,}" if sure else "Prime numbers", ""]
    lines.append(f"  blocks      {len(rows) - failed} of {WORKUNITS}"
                 + f", {failed} failed" * (failed > 0)
                 + f", {len(sure)} without a hole" * (len(sure) < len(rows)))
    if sure:
        ones, threes = (sum(row[key] for row in sure) for key in ("mod4_1", "mod4_3"))
        lead = "3 leads by" if threes > ones else "1 leads by" if ones > threes else "a draw,"
        lines += [
            f"  primes      {sure[-1]['primes_so_far']:,}",
            f"  twins       {sure[-1]['twins_so_far']:,}",
            f"  modulo 4    {ones:,} leave 1, {threes:,} leave 3: {lead} {abs(threes - ones):,}",
            "", "  maximal gap      after prime",
        ]
        lines += [f"  {gap:11}  {prime:15,}" for row in sure for gap, prime in row["maximal"]]
    return "\n".join(lines) + "\n"


def load(path):
    """The blocks kept so far, by number."""
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
    with open(part, "w", encoding="utf-8", newline="") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    if os.name == "posix":  # The new name must be on disk before the server notes us as done.
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
