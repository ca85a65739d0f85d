"""collatz: the longest Collatz chains; computed by a native program that knows nothing of us.

Halve an even number, make 3n + 1 of an odd one, and go on: every start that anybody has tried
comes down to 1. Which start below ten million takes the most steps, and which climbs highest?

A folder instead of a file, since the programs lie beside this part, which runs on the server:
versions/<platform>/ holds what the volunteers' computers run. Here it is a shell script, for all
platforms that have sh and awk. A compiled program is faster and may be added at any time; in this
folder, for Linux on a usual PC:

    mkdir versions/x86_64-pc-linux-gnu
    cc -O2 -static -o versions/x86_64-pc-linux-gnu/collatz source/collatz.c

After the next start of the server its volunteers get that one. Copies of one workunit may be
computed by either: whole numbers are the same.
"""

import json
import os

about = "Looks for the longest and highest Collatz chains, by a small program made for speed."
takes = returns = "bytes"  # of the files `in` and `out`: text for people, not JSON
min_quorum = 2
delay_bound = 3600  # seconds
rsc_fpops_est = 5e9  # operations of a processor; a usual PC does 3e9 in a second
rsc_fpops_bound = 5e12
credit = 0.5  # as the others give for two seconds
rsc_memory_bound = 100e6
rsc_disk_bound = 1e6

WORKUNITS = 100  # up to ten million
BLOCK = 100_000  # starts in one workunit


def workunit(i):
    """The program reads two numbers: the first start, and the one after the last."""
    if i < WORKUNITS:
        return {"input": b"%d %d\n" % (max(i * BLOCK, 1), (i + 1) * BLOCK)}


def parse(output):
    """Refuse what is not four numbers; return them by name."""
    words = output.decode("ascii").split()
    if len(words) != 4 or not all(word.isdigit() and len(word) < 20 for word in words):
        raise ValueError("wanted four whole numbers")
    return dict(zip(("long_start", "steps", "high_start", "highest"), map(int, words)))


def assimilate(workunit, answer):
    """Keep the answer by block number and write the tables anew; repeating changes nothing [C23].

    `answer` tells success from failure: there may be errors beside an answer [S2-36].
    """
    kept = workunit.folder / f"{workunit.app}.answers.json"
    blocks = load(kept)
    blocks[str(workunit.number)] = answer
    save(kept, json.dumps(blocks, sort_keys=True))
    save(workunit.folder / f"{workunit.app}.txt", table(blocks))
    return answer or {"failed": workunit.errors}


def table(blocks):
    """What the status page shows: the records, each longer or higher than all before it."""
    good = [blocks[key] for key in sorted(blocks, key=int) if blocks[key]]
    failed = len(blocks) - len(good)
    lines = [f"Collatz chains of starts below {WORKUNITS * BLOCK:,}", "",
             f"  blocks      {len(good)} of {WORKUNITS}" + f", {failed} failed" * (failed > 0), "",
             "     longest from       steps       highest from                 number"]
    # Of what is known: a block that is still missing may hold a record that outdoes later ones.
    longest, highest = records(good, "steps"), records(good, "highest")
    for row in range(max(len(longest), len(highest))):
        left = right = ""
        if row < len(longest):
            left = f"{longest[row]['long_start']:,}".rjust(17) \
                + f"{longest[row]['steps']:,}".rjust(12)
        if row < len(highest):
            right = f"{highest[row]['high_start']:,}".rjust(19) \
                + f"{highest[row]['highest']:,}".rjust(23)
        lines.append(f"{left:29}{right}".rstrip())
    return "\n".join(lines) + "\n"


def records(blocks, key):
    """The blocks whose number is larger than in all before them."""
    found = []
    for block in blocks:
        if not found or block[key] > found[-1][key]:
            found.append(block)
    return found


def load(path):
    """The answers kept so far, by block number."""
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
