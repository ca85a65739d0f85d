"""Planted faults: the list applies to the sources as they are, and a sample of it is caught.

tests/plant.py plants all of them; this plants a few, others for each version of the core, so that
the list stays true. MINIGRID_FAULTS=N says how many (10), MINIGRID_SEED which.
"""

import os
import random
import re
import zlib
from collections import Counter

import plant

FAULTS = plant.read_list()
SAMPLE = int(os.environ.get("MINIGRID_FAULTS", "10"))
SEED = int(os.environ.get("MINIGRID_SEED") or zlib.crc32((plant.ROOT / "minigrid.py").read_bytes()))
SLOW = ("tests/test_crash.py", "tests/test_disk.py", "tests/test_flood.py", "tests/test_fuzz.py",
        "tests/test_simulation.py", "tests/plugins/test_attacks.py")  # seconds, each of them


def test_every_fault_can_be_planted():
    """A line that has changed needs a new `old`, and to be planted again."""
    stale = [plant.describe(fault) for fault in FAULTS if not plant.applies(fault)]
    assert not stale, "\n".join(["see tests/plant.py --stale", *stale])
    assert all(fault["old"] != fault["new"] for fault in FAULTS)
    for fault in FAULTS:  # A file that cannot be read is no fault that a test has seen.
        text = (plant.ROOT / fault["file"]).read_text(encoding="utf-8")
        compile(text.replace(fault["old"], fault["new"]), plant.describe(fault), "exec")
    assert len({(fault["file"], fault["old"], fault["new"]) for fault in FAULTS}) == len(FAULTS)


def test_every_fault_was_caught_by_a_test_that_exists():
    for fault in FAULTS:
        assert fault["status"] == "caught", plant.describe(fault)
        path, _, name = fault["caught_by"].partition("::")
        text = (plant.ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.M), fault["caught_by"]


def test_there_are_enough_of_them():
    """In every part: at least 30 of the core, some of each plugin that decides something."""
    files = Counter(fault["file"] for fault in FAULTS)
    assert files["minigrid.py"] >= 100
    for name in ("accounts", "api", "checks", "cleanup", "credit", "dispatch", "files", "generator",
                 "hosts", "inverse", "keys", "quorum", "recheck", "sampling", "upkeep"):
        assert files[f"plugins/{name}.py"], name
    assert sum(n for file, n in files.items() if file.startswith("plugins/boinc/")) >= 20


def test_a_sample_is_caught():
    quick = [fault for fault in FAULTS if not fault["caught_by"].startswith(SLOW)]
    sample = random.Random(SEED).sample(quick, min(SAMPLE, len(quick)))
    missed = plant.plant_all(FAULTS, sample, jobs=2, save=False)
    assert not missed, f"MINIGRID_SEED={SEED}: " + "\n".join(map(plant.describe, missed))
