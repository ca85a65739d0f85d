"""Plant one-line faults in copies of the repository, and see which test finds each.

tests/faults.json lists them, one a line: the file, `old` that stands there once and `new` in its
place, the tests that shall see it (`tests`: files or node ids, with blanks between) and the one
that did (`caught_by`).

    python3 tests/plant.py                          what was not planted yet
    python3 tests/plant.py --again                  all, by the test that caught it last time
    python3 tests/plant.py --file minigrid.py --rule C2     a part; beginnings count
    python3 tests/plant.py --sample 10 --seed 7     ten of them at random, and again those
    python3 tests/plant.py --table                  what caught what, as Markdown; plants nothing
    python3 tests/plant.py --stale                  what does not apply any more; plants nothing

The list is written after each fault, so that it can be stopped at any time and goes on from there.
The exit status is 1 if a fault survived, or does not apply any more: its line has changed.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "faults.json"
PATIENCE = 300  # s; a fault by which a test never ends is caught, too
ORDER = ("file", "rules", "old", "new", "tests", "caught_by", "status", "note")


def read_list():
    """Return all faults."""
    return json.loads(LIST.read_text(encoding="utf-8"))


def write_list(faults):
    """Write all faults, one a line, so that a difference shows what has changed."""
    lines = [json.dumps({key: fault[key] for key in ORDER if key in fault}, ensure_ascii=False)
             for fault in faults]
    temporary = LIST.with_suffix(".new")
    temporary.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    os.replace(temporary, LIST)


def applies(fault):
    """Say whether a fault can be planted: its line must stand in the file once."""
    path = ROOT / fault["file"]
    return path.exists() and path.read_text(encoding="utf-8").count(fault["old"]) == 1


def chosen(faults, options):
    """Return the faults that the options ask for."""
    found = [fault for fault in faults if fault["file"].startswith(options.file)
             and (not options.rule or any(rule.startswith(options.rule)
                                          for rule in fault["rules"].split()))]
    if options.sample:
        seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
        print(f"replay with: --sample {options.sample} --seed {seed}")
        return random.Random(seed).sample(found, min(options.sample, len(found)))
    return [fault for fault in found if options.again or fault["status"] != "caught"
            or "caught_by" not in fault]


# ---- Planting ------------------------------------------------------------------


def copy_tree(folder):
    """Copy what the tests need, without what they have left behind."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
        ".git", "__pycache__", ".*_cache", ".hypothesis", ".venv", "data", "build", "*.egg-info"))
    return folder


def plant(fault, folder):
    """Plant a fault in a copy and run its tests; return what became of it, and who saw it."""
    path = folder / fault["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(fault["old"]) != 1:
        return "gone", ""
    path.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        for tests in dict.fromkeys(filter(None, (fault.get("caught_by"), fault["tests"]))):
            status, seen_by = run(tests.split(), folder)
            if status != "survived":
                break
        return status, seen_by
    finally:
        path.write_text(text, encoding="utf-8")


def run(tests, folder):
    """Run tests in a copy until one fails; return what that says, and its node id."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-n", "0", "--tb=no", "-rfE",
               "-p", "no:cacheprovider", f"--basetemp={folder}-tmp", *tests]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # It is no worker.
    process = subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True,
                               env={**own, "PYTHONPATH": str(folder)})
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the servers that its tests have started
        process.communicate()
        # Of a whole file it proves nothing: the machine may be slow.
        return ("caught" if "::" in tests[0] else "endless"), tests[0]
    found = re.search(r"^(?:FAILED|ERROR) (tests/[\w/]+\.py(?:::\w+)+)", said, re.M)
    if process.returncode == 0:
        return "survived", ""
    if process.returncode == 1 and found:
        return "caught", found[1]
    return "broken", " ".join(said.split())[-200:]  # No test said anything: it does not even start.


def plant_all(faults, wanted, jobs, save=True):
    """Plant the wanted faults, some side by side; print and note what became of each."""
    with tempfile.TemporaryDirectory(prefix="plant-") as place, \
            concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        free = queue.SimpleQueue()
        for n in range(jobs):
            free.put(copy_tree(Path(place) / f"copy{n}"))

        def one(fault):
            folder = free.get()
            try:
                return plant(fault, folder)
            finally:
                free.put(folder)

        waiting = {pool.submit(one, fault): fault for fault in wanted}
        for future in concurrent.futures.as_completed(waiting):
            fault = waiting[future]
            fault["status"], seen_by = future.result()
            if fault["status"] == "caught":
                fault["caught_by"] = seen_by
            print(f"{fault['status']:9}{describe(fault)} | {seen_by}", flush=True)
            if save:
                write_list(faults)
    return [fault for fault in wanted if fault["status"] != "caught"]


def describe(fault):
    """Show a fault in a line."""
    old, new = (" ".join(fault[key].split()) for key in ("old", "new"))
    return f"{fault['file']} [{fault['rules']}] {old[:70]!r} -> {new[:70]!r}"


def table(faults):
    """Return the list as Markdown: what was spoilt, and which test saw it."""
    def cell(text):
        return "`" + " ".join(text.split()).replace("|", "\\|") + "`" if text.strip() else "nothing"

    lines = ["| file | ids | instead of | stands | caught by |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {fault['file']} | {fault['rules']} | {cell(fault['old'])} | "
              f"{cell(fault['new'])} | {fault.get('caught_by', '')} |" for fault in faults]
    return "\n".join(lines)


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", default="", help="only faults in this file, or folder")
    parser.add_argument("--rule", default="", help="only faults in what carries out this rule")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, at random")
    parser.add_argument("--seed", type=int, help="of the sample")
    parser.add_argument("--again", action="store_true", help="also what was caught before")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--table", action="store_true", help="print the list as Markdown")
    parser.add_argument("--stale", action="store_true", help="print what does not apply any more")
    options = parser.parse_args()
    faults = read_list()
    if options.stale:
        stale = [describe(fault) for fault in faults if not applies(fault)]
        print("\n".join([*stale, f"{len(stale)} of {len(faults)} do not apply"]))
        return 1 if stale else 0
    if options.table:
        print(table([fault for fault in faults if fault["file"].startswith(options.file)]))
        return 0
    missed = plant_all(faults, chosen(faults, options), options.jobs)
    for fault in missed:
        print(f"{fault['status']}: {describe(fault)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
