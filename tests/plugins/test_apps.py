"""The five shipped applications: right by what is known elsewhere, and safe to repeat."""

import ast
import csv
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

APPS = Path(__file__).parents[2] / "plugins" / "apps"
WORKUNITS = {"squares": 20, "pi": 100, "mandelbrot": 64, "primes": 50}
PARAMETERS = {
    "min_quorum", "delay_bound", "rsc_fpops_est", "rsc_fpops_bound", "rsc_memory_bound",
    "rsc_disk_bound",
}


def load(name):
    """The application as a new module, as after a restart of the server."""
    spec = importlib.util.spec_from_file_location(f"app_{name}", APPS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


squares, pi, primes = load("squares"), load("pi"), load("primes")


class Checkpoint:
    """What the volunteer's client hands to compute: keeps JSON, may stop it after some calls."""

    class Stop(Exception):
        pass

    def __init__(self, kept=None, calls=math.inf):
        self.kept, self.calls = kept, calls

    @property
    def state(self):
        return None if self.kept is None else json.loads(self.kept)

    def __call__(self, state):
        self.kept = json.dumps(state)
        self.calls -= 1
        if self.calls == 0:
            raise self.Stop


def unit(app, number, folder, input=None, errors=()):
    return SimpleNamespace(name=f"{app}_{number}", number=number, input=input, app=app,
                           folder=folder, errors=list(errors))


def files(folder):
    """What is in a folder: name -> content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- All four

@pytest.mark.parametrize("name", WORKUNITS)
def test_header(name):
    module, source = load(name), (APPS / f"{name}.py").read_text(encoding="utf-8")
    assert module.__doc__.startswith(f"{name}: ")
    assert module.about.endswith(".") and "\n" not in module.about
    assert module.min_quorum == 2
    assert 10 * module.rsc_fpops_est <= module.rsc_fpops_bound
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported <= set(sys.stdlib_module_names)
    wanted = ["input", "progress", "checkpoint"]
    assert list(inspect.signature(module.compute).parameters) == wanted[:{
        "squares": 1, "primes": 3}.get(name, 2)]


def test_the_smallest_is_small():
    assert len((APPS / "squares.py").read_text(encoding="utf-8").splitlines()) <= 25


@pytest.mark.parametrize("name", WORKUNITS)
def test_workunits(name):
    module, again, count = load(name), load(name), WORKUNITS[name]
    units = [module.workunit(i) for i in range(count)]
    assert [again.workunit(i) for i in reversed(range(count))] == units[::-1]
    assert module.workunit(count) is module.workunit(count + 1) is module.workunit(10 ** 9) is None
    assert all(set(u) <= {"input"} | PARAMETERS for u in units)
    assert len({json.dumps(u["input"]) for u in units}) == count
    assert [json.loads(json.dumps(u)) for u in units] == units


NAMES = st.sampled_from(["", "x", "samples", "mean", "gaps", "\u03c0", "1e999"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=5)
NEARLY = st.fixed_dictionaries(
    {}, optional={key: JSON | st.just([[1, 2]]) | st.just(10 ** 400) for key in (
        "samples", "mean", "variance", "primes", "twins", "mod4_1", "mod4_3", "gaps")})


@pytest.mark.parametrize("module", [pi, primes], ids=lambda module: module.__name__)
@settings(deadline=None, database=None, max_examples=80, derandomize=True)
@given(output=JSON | NEARLY)
def test_parse_raises_nothing_but_value_error(module, output):
    try:
        answer = module.parse(output)
    except ValueError:
        return
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


@settings(deadline=None, database=None, max_examples=80, derandomize=True)
@given(st.integers() | st.just(10 ** 400), st.floats(), st.floats())
def test_pi_what_parse_accepts_never_breaks_the_table(samples, mean, variance):
    try:
        answer = pi.parse({"samples": samples, "mean": mean, "variance": variance})
    except ValueError:
        return
    assert "1 of 100" in pi.table({"0": answer})


# ---- squares

def test_squares():
    assert squares.compute(squares.workunit(1)["input"]) == [
        100, 121, 144, 169, 196, 225, 256, 289, 324, 361]
    everything = [n for i in range(20) for n in squares.compute(squares.workunit(i)["input"])]
    assert sum(everything) == 199 * 200 * 399 // 6  # the sum of squares up to n, by formula


# ---- pi

@pytest.fixture(scope="module")
def estimates():
    return [pi.compute({"seed": i, "samples": 20_000}, lambda part: None) for i in range(12)]


def test_pi_is_pi(estimates):
    samples, estimate, bar = pi.combine(estimates)
    assert samples == 240_000
    variance = 32 / 3 - math.pi ** 2  # 16 * (1 - x * x) is 32 / 3 on average
    assert bar == pytest.approx(math.sqrt(variance / samples), rel=0.01)
    assert abs(estimate - math.pi) < 4 * bar
    z = [(a["mean"] - math.pi) / math.sqrt(variance / 20_000) for a in estimates]
    assert 0.4 < sum(x * x for x in z) / len(z) < 2  # The scatter is the one that was promised.


def test_pi_replicas_agree_whatever_happened_before(estimates):
    random.seed("other")
    told = []
    again = pi.compute({"seed": 3, "samples": 20_000}, told.append)
    assert again == estimates[3] and told == [1.0]
    assert not any(pi.compare(a, b) for a, b in itertools.combinations(estimates, 2))


def test_pi_agrees_with_pythons_that_add_more_exactly(estimates, monkeypatch):
    monkeypatch.setattr(pi, "sum", math.fsum, raising=False)
    exact = pi.compute({"seed": 3, "samples": 20_000}, lambda part: None)
    assert exact != estimates[3] and pi.compare(exact, estimates[3])


def test_pi_progress_and_the_last_short_part(monkeypatch):
    whole = pi.compute({"seed": 1, "samples": 250}, lambda part: None)
    monkeypatch.setattr(pi, "PART", 100)
    told = []
    assert pi.compare(pi.compute({"seed": 1, "samples": 250}, told.append), whole)
    assert told == [0.4, 0.8, 1.0]


@pytest.mark.parametrize("key", ["mean", "variance"])
def test_pi_compare(estimates, key):
    a = estimates[0]
    for factor, same in [(1, True), (1 + 0.9e-9, True), (1 - 0.9e-9, True),
                         (1 + 1.1e-9, False), (1 - 1.1e-9, False)]:
        b = {**a, key: a[key] * factor}
        assert pi.compare(a, b) is pi.compare(b, a) is same
    assert not pi.compare(a, {**a, "samples": a["samples"] + 1})


GOOD_PI = {"samples": 10, "mean": 3.1, "variance": 0.8}


@pytest.mark.parametrize("output", [
    None, [], "3.14", 3.14, {}, {"mean": 3.1}, {**GOOD_PI, "more": 1}, {**GOOD_PI, "samples": 0},
    {**GOOD_PI, "samples": True}, {**GOOD_PI, "samples": 10.0}, {**GOOD_PI, "mean": 4.1},
    {**GOOD_PI, "mean": 3}, {**GOOD_PI, "mean": math.nan}, {**GOOD_PI, "mean": math.inf},
    {**GOOD_PI, "variance": 0.0}, {**GOOD_PI, "samples": 10 ** 400},
    {**GOOD_PI, "variance": math.nan},
], ids=str)
def test_pi_parse(output):
    assert pi.parse(GOOD_PI) == GOOD_PI
    with pytest.raises(ValueError):
        pi.parse(output)


def test_pi_table(estimates, tmp_path):
    assert pi.assimilate(unit("pi", 0, tmp_path), estimates[0]) == estimates[0]
    pi.assimilate(unit("pi", 2, tmp_path), estimates[2])
    failed = unit("pi", 1, tmp_path, errors=["TOO_MANY_ERROR_RESULTS"])
    assert pi.assimilate(failed, None) == {"failed": ["TOO_MANY_ERROR_RESULTS"]}
    text = (tmp_path / "pi.txt").read_text(encoding="utf-8")
    assert "2 of 100, 1 failed" in text and "40,000" in text and "3.1415927" in text
    samples, estimate, bar = pi.combine([estimates[0], estimates[2]])
    assert f"{estimate:.7f} +- {bar:.7f}" in text


def test_pi_table_of_failures_only(tmp_path):
    pi.assimilate(unit("pi", 0, tmp_path, errors=["COULDNT_SEND"]), None)
    assert "0 of 100, 1 failed" in (tmp_path / "pi.txt").read_text(encoding="utf-8")


def test_pi_drawing():
    assert pi.draw(math.pi, 0.1, 1) == " " * 18 + "--o--" + " " * 18
    assert pi.draw(math.pi + 0.5, 0.1, 1).rstrip() == " " * 20 + ":" + " " * 7 + "--o--"
    assert len(pi.draw(0.0, 0.1, 1)) == len(pi.draw(9.0, 0.1, 1)) == 41


# ---- primes

RECORDS = [  # the maximal gaps below 5 million, as in every table of them
    (1, 2), (2, 3), (4, 7), (6, 23), (8, 89), (14, 113), (18, 523), (20, 887), (22, 1129),
    (34, 1327), (36, 9551), (44, 15683), (52, 19609), (72, 31397), (86, 155921), (96, 360653),
    (112, 370261), (114, 492113), (118, 1349533), (132, 1357201), (148, 2010733), (154, 4652353)]


def block(start, stop, checkpoint=None, progress=lambda part: None):
    return primes.compute({"from": start, "to": stop}, progress, checkpoint or Checkpoint())


@pytest.fixture(scope="module")
def blocks():
    """Five blocks of a million: (input, answer)."""
    edges = range(0, 5_000_001, 1_000_000)
    return [({"from": a, "to": b}, block(a, b)) for a, b in zip(edges, edges[1:])]


@pytest.mark.parametrize("stop, count, twins", [
    (100, 25, 8), (1000, 168, 35), (10_000, 1229, 205), (100_000, 9592, 1224),
    (1_000_000, 78_498, 8169)])
def test_primes_known_counts(stop, count, twins):
    answer = block(0, stop)
    assert (answer["primes"], answer["twins"]) == (count, twins)
    assert answer["mod4_1"] + answer["mod4_3"] + 1 == count


def test_primes_known_gaps(blocks):
    assert [tuple(gap) for gap in blocks[0][1]["gaps"]] == [r for r in RECORDS if r[1] < 10 ** 6]
    assert [154, 4652353] in blocks[4][1]["gaps"]
    assert block(1_294_000_000, 1_295_000_000)["gaps"][-1] == [288, 1_294_268_491]


def test_primes_chebyshev():
    """Class 1 takes the lead for the first time at 26861 and loses it at 26863."""
    assert block(0, 26_860)["mod4_1"] == block(0, 26_860)["mod4_3"] == 1472
    assert block(0, 26_864)["mod4_1"] == block(0, 26_864)["mod4_3"] == 1473
    behind = (block(0, stop) for stop in range(4, 3000, 52))
    assert all(answer["mod4_1"] <= answer["mod4_3"] for answer in behind)
    with_26861 = primes.sieve(26_860, 26_864, primes.odd_primes(200))
    assert list(with_26861) == [1, 1]


def slow_block(start, stop):
    """The same by trial division, gap by gap."""
    def is_prime(n):
        return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))

    found = [n for n in range(start, stop + 1000) if is_prime(n)]
    mine = [n for n in found if n < stop]
    gaps = [(b - a, a) for a, b in zip(found, found[1:]) if a < stop]
    records = [list(gap) for i, gap in enumerate(gaps) if gap[0] > max(gaps[:i], default=(0,))[0]]
    return {
        "primes": len(mine), "twins": sum(gap == 2 for gap, _ in gaps), "gaps": records,
        "mod4_1": sum(n % 4 == 1 for n in mine), "mod4_3": sum(n % 4 == 3 for n in mine)}


@pytest.mark.parametrize("start, stop", [
    (0, 4), (0, 8), (4, 8), (0, 120), (8, 12), (24, 28), (112, 128), (1324, 1328), (1328, 1360),
    (1360, 1364), (1000, 1600), (9548, 9600)])
@pytest.mark.parametrize("segment", [4, 40, 1000])
def test_primes_against_trial_division(start, stop, segment, monkeypatch):
    monkeypatch.setattr(primes, "SEGMENT", segment)
    assert block(start, stop) == slow_block(start, stop)


def test_primes_following():
    assert primes.following(0, [3, 5, 7]) == 3
    assert primes.following(88, [3, 5, 7]) == 89
    # With N the product of all primes up to 1009, no N + k has a new factor before k = 1013.
    divisors = primes.odd_primes(1009)
    number = 2 * math.prod(divisors)
    assert primes.following(number + 2, divisors) == number + 1013
    assert primes.following(number + 12, divisors) == number + 1013


def test_primes_checkpoint(monkeypatch):
    """Stopped after any number of segments and begun again: the same answer, no work twice."""
    monkeypatch.setattr(primes, "SEGMENT", 1000)
    told = []
    whole = block(8000, 12_000, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]
    for calls in (1, 2, 3, 4):
        first = Checkpoint(calls=calls)
        with pytest.raises(Checkpoint.Stop):
            block(8000, 12_000, first)
        told = []
        assert block(8000, 12_000, Checkpoint(first.kept), told.append) == whole
        assert len(told) == 4 - calls


GOOD_PRIMES = {"primes": 2, "twins": 1, "mod4_1": 0, "mod4_3": 1, "gaps": [[1, 2], [2, 3]]}


@pytest.mark.parametrize("output", [
    None, 7, "2 3 5", [], {}, {**GOOD_PRIMES, "more": 1}, {**GOOD_PRIMES, "primes": -1},
    {**GOOD_PRIMES, "primes": 2.0}, {**GOOD_PRIMES, "twins": True}, {**GOOD_PRIMES, "gaps": None},
    {**GOOD_PRIMES, "mod4_1": 10 ** 18}, {**GOOD_PRIMES, "gaps": [[1]]},
    {**GOOD_PRIMES, "gaps": [[1, "2"]]}, {**GOOD_PRIMES, "gaps": [1, 2]},
], ids=str)
def test_primes_parse(output):
    assert primes.parse(GOOD_PRIMES) == GOOD_PRIMES
    with pytest.raises(ValueError):
        primes.parse(output)


def test_primes_table(blocks, tmp_path):
    for number in (3, 1, 4, 0, 2):
        input, answer = blocks[number]
        record = primes.assimilate(unit("primes", number, tmp_path, input), answer)
        assert record == {**input, **answer}
    with open(tmp_path / "primes.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [row["block"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[-1]["primes_so_far"] == "348513"  # pi(5,000,000)
    gaps = " ".join(row["maximal_gaps"] for row in rows).split()
    assert gaps == [f"{gap}@{prime}" for gap, prime in RECORDS]
    text = (tmp_path / "primes.txt").read_text(encoding="utf-8")
    assert "below 5,000,000" in text and "348,513" in text and "4,652,353" in text


def test_primes_hole(blocks, tmp_path):
    """After a missing or failed block nothing is said about all numbers so far."""
    for number in (0, 1, 3):
        primes.assimilate(unit("primes", number, tmp_path, blocks[number][0]), blocks[number][1])
    failed = unit("primes", 4, tmp_path, blocks[4][0], ["TOO_MANY_TOTAL_RESULTS"])
    assert primes.assimilate(failed, None) == {
        "from": 4_000_000, "to": 5_000_000, "failed": ["TOO_MANY_TOTAL_RESULTS"]}
    with open(tmp_path / "primes.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [row["primes_so_far"] for row in rows] == ["78498", "148933", "", ""]
    assert [row["failed"] for row in rows] == ["", "", "", "TOO_MANY_TOTAL_RESULTS"]
    text = (tmp_path / "primes.txt").read_text(encoding="utf-8")
    assert "below 2,000,000" in text and "3 of 50, 1 failed, 2 without a hole" in text


def test_primes_blocks_are_sorted_as_numbers(blocks, tmp_path):
    for number in (10, 9):
        primes.assimilate(unit("primes", number, tmp_path, blocks[0][0]), blocks[0][1])
    lines = (tmp_path / "primes.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines] == ["block", "9", "10"]
    assert "0 without a hole" in (tmp_path / "primes.txt").read_text(encoding="utf-8")


def test_primes_table_of_failures_only(blocks, tmp_path):
    primes.assimilate(unit("primes", 0, tmp_path, blocks[0][0], ["COULDNT_SEND"]), None)
    assert "0 of 50, 1 failed" in (tmp_path / "primes.txt").read_text(encoding="utf-8")


# ---- mandelbrot

@pytest.fixture
def mandelbrot():
    """The application with a picture of 24 x 16 pixels in 16 tiles."""
    return small(load("mandelbrot"))


def small(module):
    module.WIDTH, module.HEIGHT, module.TILE_WIDTH, module.TILE_HEIGHT = 24, 16, 6, 4
    return module


@pytest.fixture(scope="module")
def tiles():
    """The inputs and outputs of the small picture's 16 tiles."""
    module = small(load("mandelbrot"))
    inputs = [module.workunit(i)["input"] for i in range(16)]
    return [(input, module.compute(input, lambda part: None)) for input in inputs]


def pixels(path):
    """A PNG of ours as rows of (red, green, blue); every checksum is verified."""
    data, position, parts = path.read_bytes(), 8, []
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        body = data[position + 8:position + 8 + length]
        assert struct.unpack_from(">I", data, position + 8 + length)[0] == zlib.crc32(kind + body)
        parts.append((kind, body))
        position += 12 + length
    (_, size), (_, packed), (_, end) = parts
    assert [kind for kind, _ in parts] == [b"IHDR", b"IDAT", b"IEND"] and end == b""
    width, height, *rest = struct.unpack(">IIBBBBB", size)
    assert rest == [8, 2, 0, 0, 0]
    raw, row = zlib.decompress(packed), 1 + 3 * width
    assert len(raw) == height * row and set(raw[::row]) == {0}
    lines = [raw[y * row + 1:(y + 1) * row] for y in range(height)]
    return [[tuple(line[3 * x:3 * x + 3]) for x in range(width)] for line in lines]


@pytest.mark.parametrize("re, im", [
    (0, 0), (-1, 0), (0.2, 0.1), (-2, 0), (0, 1), (0, -1), (-0.12, 0.75), (-1.31, 0), (-1.7549, 0)])
def test_mandelbrot_points_of_the_set(mandelbrot, re, im):
    """Centres, an antenna's tip (-2), the end of a branch (i), and copies of the whole."""
    assert mandelbrot.steps(re, im, 1000) == 0


@pytest.mark.parametrize("re, im", [(1, 0), (0.3, 0.0), (0.5, 0.6), (-2.01, 0), (-0.75, 0.3)])
def test_mandelbrot_points_outside(mandelbrot, re, im):
    z, n = 0j, 0
    while abs(z) <= 16:
        z, n = z * z + complex(re, im), n + 1
    whole = n + 1 - math.log(math.log(abs(z)) / math.log(16), 2)
    assert abs(mandelbrot.steps(re, im, 1000) / mandelbrot.UNITS - whole) < 1 / mandelbrot.UNITS
    assert mandelbrot.steps(re, im, 1000) == mandelbrot.steps(re, -im, 1000)
    assert mandelbrot.steps(re, im, n - 1) == 0


def test_mandelbrot_steps_near_the_neck_make_pi(mandelbrot):
    """At -0.75 + e * i it takes about pi / e steps, which David Boll saw in 1991."""
    assert mandelbrot.steps(-0.75, 0.005, 1000) / mandelbrot.UNITS * 0.005 == pytest.approx(
        math.pi, abs=0.03)


def test_mandelbrot_smooth(mandelbrot):
    """No jump where the whole number of steps changes."""
    along = [mandelbrot.steps(0.5 + k / 1000, 0.3, 1000) for k in range(1000)]
    assert max(abs(a - b) for a, b in zip(along, along[1:])) <= 3 and along[0] - along[-1] > 200


def test_mandelbrot_area(mandelbrot, tiles):
    inside = sum(mandelbrot.parse(output).count(0) for _, output in tiles)
    assert inside * tiles[0][0]["step"] ** 2 == pytest.approx(1.5066, rel=0.03)


def test_mandelbrot_spiral_covers_the_picture():
    module = load("mandelbrot")
    inputs = [module.workunit(i)["input"] for i in range(64)]
    corners = {(i["left"], i["top"]) for i in inputs}
    assert corners == set(itertools.product(range(0, 960, 120), range(0, 640, 80)))
    first = {(i["left"], i["top"]) for i in inputs[:4]}
    assert first == set(itertools.product((360, 480), (240, 320)))
    for a, b in zip(inputs, inputs[1:]):  # Neighbours touch, at least at a corner.
        assert abs(a["left"] - b["left"]) <= 120 and abs(a["top"] - b["top"]) <= 80


def test_mandelbrot_tiles_join(tiles):
    """The last sample of a tile and the first of the next are one step apart."""
    by_corner = {(i["left"], i["top"]): i for i, _ in tiles}
    here, right, below = by_corner[0, 0], by_corner[6, 0], by_corner[0, 4]
    assert right["re"] - here["re"] == pytest.approx(here["columns"] * here["step"])
    assert here["im"] - below["im"] == pytest.approx(here["rows"] * here["step"])
    middle_re = here["re"] + (48 - 1) / 2 * here["step"]
    middle_im = here["im"] - (32 - 1) / 2 * here["step"]
    assert (middle_re, middle_im) == (pytest.approx(-0.72), pytest.approx(0))


def test_mandelbrot_output(mandelbrot, tiles):
    told = []
    input, output = tiles[0]
    assert mandelbrot.compute(input, told.append) == output
    assert told == [k / 8 for k in range(1, 9)]
    samples = mandelbrot.parse(output)
    assert output[:2] == bytes([samples[0] % 256, samples[0] // 256])
    last = mandelbrot.steps(
        input["re"] + 11 * input["step"], input["im"] - 7 * input["step"], input["limit"])
    assert len(samples) == 96 and samples[95] == last


def test_mandelbrot_compare(mandelbrot, tiles):
    a = mandelbrot.parse(tiles[9][1])
    place = next(k for k, sample in enumerate(a) if sample)
    for by, same in [(0, True), (1, True), (-1, True), (2, False), (-2, False)]:
        b = a[:place] + (a[place] + by,) + a[place + 1:]
        assert mandelbrot.compare(a, b) is mandelbrot.compare(b, a) is same
    assert not mandelbrot.compare(a, a[:-1])
    assert min(sample for sample in a if sample) >= mandelbrot.UNITS  # in and out never mix


@pytest.mark.parametrize("output", [
    b"", b"\0" * 191, b"\0" * 193, b"\xff" * 192, None, "\0" * 192, [0] * 96], ids=repr)
def test_mandelbrot_parse(mandelbrot, output):
    assert mandelbrot.parse(b"\0" * 192) == (0,) * 96
    with pytest.raises(ValueError):
        mandelbrot.parse(output)


def test_mandelbrot_parse_knows_the_limit(mandelbrot):
    top = (mandelbrot.LIMIT + 1) * mandelbrot.UNITS
    assert mandelbrot.parse(struct.pack("<96H", *[top] * 96)) == (top,) * 96
    with pytest.raises(ValueError):
        mandelbrot.parse(struct.pack("<96H", *[top + 1] * 96))


def paint(module, folder, tiles, numbers):
    return [module.assimilate(unit("mandelbrot", n, folder, tiles[n][0]), module.parse(tiles[n][1]))
            for n in numbers]


def test_mandelbrot_picture(mandelbrot, tiles, tmp_path):
    records = paint(mandelbrot, tmp_path, tiles, range(16))
    assert [record["tile"] for record in records] == list(range(16))
    assert len(json.dumps(records[0])) < 100
    picture = pixels(tmp_path / "mandelbrot.png")
    assert (len(picture), len(picture[0])) == (16, 24)
    assert picture == picture[::-1]  # The set is its own mirror image.
    assert picture[8][14] == mandelbrot.SET
    corner = picture[0][0]
    assert corner[2] > corner[0] and corner[2] > corner[1]  # blue far outside


def test_mandelbrot_pixel_is_the_average_of_four_samples(mandelbrot, tmp_path):
    half = mandelbrot.STOPS[-1][0] * mandelbrot.UNITS  # the last stop's colour, from here on
    samples = ((half, 0) + (0,) * 10) + ((half, half) + (0,) * 10) + (0,) * 72
    mandelbrot.assimilate(unit("mandelbrot", 0, tmp_path, {"left": 6, "top": 4}), samples)
    picture = pixels(tmp_path / "mandelbrot.png")
    assert picture[4][6] == tuple(3 * light // 4 for light in mandelbrot.STOPS[-1][1])
    assert picture[4][7] == picture[5][6] == mandelbrot.SET


def test_mandelbrot_waiting_and_failed_tiles_look_different(mandelbrot, tiles, tmp_path):
    paint(mandelbrot, tmp_path, tiles, [0])
    failed = unit("mandelbrot", 5, tmp_path, tiles[5][0], ["TOO_MANY_ERROR_RESULTS"])
    record = mandelbrot.assimilate(failed, None)
    assert record["failed"] == ["TOO_MANY_ERROR_RESULTS"] and record["tile"] == 5
    picture = pixels(tmp_path / "mandelbrot.png")

    def colours(number):
        left, top = tiles[number][0]["left"], tiles[number][0]["top"]
        return {picture[y][x] for y in range(top, top + 4) for x in range(left, left + 6)}

    assert colours(5) <= {mandelbrot.FAILED, mandelbrot.STRIPE}
    assert colours(6) == {mandelbrot.WAITING, mandelbrot.FRAME}
    assert not colours(0) & (colours(5) | colours(6))


def test_mandelbrot_palette_never_jumps(mandelbrot):
    for light, inside in zip(mandelbrot.palette(), mandelbrot.SET):
        assert len(light) == 65536 and light[0] == inside
        assert max(abs(a - b) for a, b in zip(light[1:], light[2:])) <= 4
    assert tuple(light[60_000] for light in mandelbrot.palette()) == mandelbrot.STOPS[-1][1]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "one bit", "other size"])
def test_mandelbrot_damaged_picture(mandelbrot, tiles, tmp_path, damage):
    """Begin with an empty picture, whether the module is new or has the old one in memory."""
    path = tmp_path / "mandelbrot.png"
    for module in (mandelbrot, small(load("mandelbrot"))):
        paint(module, tmp_path, tiles, [0])
        only_first = path.read_bytes()
        paint(mandelbrot, tmp_path, tiles, [1, 2])
        data = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "cut":
            path.write_bytes(data[:-40])
        elif damage == "one bit":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        else:
            path.write_bytes(data.replace(struct.pack(">II", 24, 16), struct.pack(">II", 16, 24)))
        paint(module, tmp_path, tiles, [0])
        assert path.read_bytes() == only_first
        path.unlink()


def test_mandelbrot_two_folders(mandelbrot, tiles, tmp_path):
    """Taken in turns, each folder has its own tiles."""
    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    for folder in (a, b, both):
        folder.mkdir()
    for n in range(0, 16, 2):
        paint(mandelbrot, a, tiles, [n])
        paint(mandelbrot, b, tiles, [n + 1])
    paint(mandelbrot, both, tiles, range(16))
    left, right, whole = (pixels(folder / "mandelbrot.png") for folder in (a, b, both))
    for n in range(16):
        x, y = tiles[n][0]["left"], tiles[n][0]["top"]
        assert (whole[y][x] == left[y][x]) == (n % 2 == 0)
        assert (whole[y][x] == right[y][x]) == (n % 2 == 1)


# ---- What assimilate leaves behind, for the three that write files

@pytest.fixture(params=["pi", "primes", "mandelbrot"])
def finished(request, estimates, blocks, tiles):
    """name, a maker of new modules, and some (number, input, answer); one of them failed."""
    name = request.param
    if name == "pi":
        answers = [(n, {}, answer) for n, answer in enumerate(estimates[:5])]
        new = load
    elif name == "primes":
        answers = [(n, input, answer) for n, (input, answer) in enumerate(blocks)]
        new = load
    else:
        def new(name):
            return small(load(name))
        answers = [(n, input, new(name).parse(output))
                   for n, (input, output) in enumerate(tiles[:5])]
    answers[3] = answers[3][:2] + (None,)
    return name, new, answers


def assimilate(module, name, folder, answer):
    number, input, output = answer
    errors = [] if output else ["TOO_MANY_ERROR_RESULTS"]
    return module.assimilate(unit(name, number, folder, input, errors), output)


def test_any_order_any_repetition_any_restart(finished, tmp_path):
    """The same files, byte by byte, and the same records, whatever the server went through."""
    name, new, answers = finished
    plain, wild = tmp_path / "plain", tmp_path / "wild"
    plain.mkdir()
    wild.mkdir()
    module = new(name)
    wanted = {answer[0]: assimilate(module, name, plain, answer) for answer in answers}
    chance = random.Random(name)
    for _ in range(3):  # The same folder again: nothing may change any more in rounds 2 and 3.
        order = answers + chance.sample(answers, 3)
        chance.shuffle(order)
        for answer in order:
            if chance.random() < 0.5:
                module = new(name)
            assert assimilate(module, name, wild, answer) == wanted[answer[0]]
        assert files(wild) == files(plain)
    assert json.loads(json.dumps(list(wanted.values()))) == list(wanted.values())


def test_a_crash_before_the_rename_changes_nothing(finished, tmp_path, monkeypatch):
    """Power fails at each os.replace in turn; the files stay whole, a repetition puts it right."""
    name, new, answers = finished
    module = new(name)
    assimilate(module, name, tmp_path, answers[0])
    assimilate(module, name, tmp_path, answers[1])
    after = files(tmp_path)
    for crash_at in range(3):
        for path in tmp_path.iterdir():
            path.unlink()
        assimilate(module, name, tmp_path, answers[0])
        before, calls = files(tmp_path), itertools.count()
        with monkeypatch.context() as patch:
            real = os.replace

            def replace(old, new):
                if next(calls) == crash_at:
                    raise OSError("power failure")
                real(old, new)

            patch.setattr(os, "replace", replace)
            try:
                assimilate(module, name, tmp_path, answers[1])
            except OSError:
                pass
        for file, content in files(tmp_path).items():
            assert file.endswith(".part") or content in (before[file], after[file])
        assimilate(new(name), name, tmp_path, answers[1])
        assert files(tmp_path) == after


def test_an_answer_with_errors_beside_it_is_an_answer(finished, tmp_path):
    name, new, answers = finished
    number, input, output = answers[0]
    module, plain, both = new(name), tmp_path / "plain", tmp_path / "both"
    plain.mkdir()
    both.mkdir()
    record = module.assimilate(unit(name, number, plain, input), output)
    errors = unit(name, number, both, input, ["TOO_MANY_TOTAL_RESULTS"])
    assert module.assimilate(errors, output) == record
    assert files(both) == files(plain)


@pytest.mark.parametrize("name", ["pi", "primes"])
def test_damaged_state_is_set_aside(name, estimates, blocks, tmp_path):
    module = load(name)
    input, answer = blocks[0] if name == "primes" else ({}, estimates[0])
    module.assimilate(unit(name, 0, tmp_path, input), answer)
    whole, kept = files(tmp_path), tmp_path / f"{name}.answers.json"
    kept.write_bytes(b'{"0": {"sam')
    module.assimilate(unit(name, 0, tmp_path, input), answer)
    assert files(tmp_path) == {**whole, f"{name}.answers.json.damaged": b'{"0": {"sam'}


@pytest.mark.parametrize("name", ["pi", "primes", "mandelbrot"])
def test_a_copy_of_the_application_has_its_own_files(name, estimates, blocks, tiles, tmp_path):
    module = small(load(name)) if name == "mandelbrot" else load(name)
    input, answer = {"pi": ({}, estimates[0]), "primes": blocks[0],
                     "mandelbrot": (tiles[0][0], (0,) * 96)}[name]
    module.assimilate(unit("mine", 0, tmp_path, input), answer)
    assert {file.split(".")[0] for file in files(tmp_path)} == {"mine"}


# ---- collatz, the native one

COLLATZ = APPS / "collatz"
SCRIPT = COLLATZ / "versions" / "x86_64-pc-linux-gnu__sh" / "collatz.sh"
AWKS = [name for name in ("mawk", "gawk", "original-awk", "busybox") if shutil.which(name)]


@pytest.fixture(scope="module")
def collatz():
    spec = importlib.util.spec_from_file_location("app_collatz", COLLATZ / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collatz_by_hand(start, stop):
    """The same in Python, the slow and sure way."""
    chains = []
    for first in range(start, stop):
        n, chain = first, [first]
        while n != 1:
            n = 3 * n + 1 if n % 2 else n // 2
            chain.append(n)
        chains.append(chain)
    longest, highest = max(chains, key=len), max(chains, key=max)
    return (longest[0], len(longest) - 1, highest[0], max(highest))


def run_collatz(program, text, folder):
    """Run a collatz program as volunteers do: (exit status, output, what it complains of)."""
    done = subprocess.run(program, input=text.encode(), cwd=folder, capture_output=True, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module", params=["sh", *AWKS, "cc"])
def program(request, tmp_path_factory):
    """The script with each awk that is here, and the C program where there is a compiler."""
    folder = tmp_path_factory.mktemp("program")
    if request.param == "sh":
        return ["sh", str(SCRIPT)]
    if request.param == "cc":
        compiler = shutil.which("cc") or pytest.skip("no C compiler")
        source = COLLATZ / "source" / "collatz.c"
        subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-o", folder / "collatz", source],
                       check=True)
        return [str(folder / "collatz")]
    awk = request.param + (" awk" if request.param == "busybox" else "")
    (folder / "collatz.sh").write_text(SCRIPT.read_text().replace("exec awk", f"exec {awk}"))
    return ["sh", str(folder / "collatz.sh")]


KNOWN = {  # starts -> output; the records are OEIS A006877 and A006884
    "1 1000": "871 178 703 250504\n", "1 2": "1 0 1 1\n", "7 8": "7 16 7 52\n",
    "837799 837800": "837799 524 837799 2974984576\n",
    "9663 9664": "9663 184 9663 27114424\n",
    "8400511 8400512": "8400511 685 8400511 159424614880\n",
    "6631675 6631676": "6631675 576 6631675 60342610919632\n",
}


@pytest.mark.parametrize("text", KNOWN)
def test_collatz_programs_know_what_is_known(program, tmp_path, text):
    assert run_collatz(program, text, tmp_path) == (0, KNOWN[text], "")


def test_collatz_programs_agree_with_python(program, tmp_path):
    """Any programs that volunteers run must give the same bytes."""
    for start, stop in [(1, 300), (26, 28), (5000, 5400)]:
        output = run_collatz(program, f"{start} {stop}\n", tmp_path)[1]
        assert output == "%d %d %d %d\n" % collatz_by_hand(start, stop)


@pytest.mark.parametrize("text", ["", "x", "5", "5 3", "5 5", "0 5", "-1 5", "a b"])
def test_collatz_programs_refuse_nonsense(program, tmp_path, text):
    status, output, complaint = run_collatz(program, text, tmp_path)
    assert status != 0 and not output and "two whole numbers" in complaint


def test_collatz_tells_how_far_it_is(tmp_path):
    assert run_collatz(["sh", str(SCRIPT)], "1 4000", tmp_path)[0] == 0
    assert (tmp_path / "fraction_done").read_text() == "0.750\n"


def test_collatz_workunits(collatz):
    units = [collatz.workunit(i)["input"].decode().split() for i in range(collatz.WORKUNITS)]
    assert units[0][0] == "1" and units[-1][1] == "10000000"
    assert [u[1] for u in units[:-1]] == [u[0] for u in units[1:]]
    assert collatz.workunit(collatz.WORKUNITS) is None


BAD_COLLATZ = [b"", b"1 2 3", b"1 2 3 4 5", b"1 2 3 x", b"1 2 3 -4", b"1 2 3 4.0", b"\xff 2 3 4",
               b"1 2 3 " + b"9" * 20, "1 2 3 \u0664".encode()]


@pytest.mark.parametrize("output", BAD_COLLATZ)
def test_collatz_parse_refuses(collatz, output):
    with pytest.raises(ValueError):
        collatz.parse(output)


def test_collatz_assimilate_in_any_order_and_twice(collatz, tmp_path):
    blocks = {0: b"871 178 703 250504\n", 1: b"1161 181 1819 1276936\n", 2: None,
              3: b"3711 237 3000 41\n"}
    for number in (3, 1, 0, 1, 2, 3):
        answer = blocks[number] and collatz.parse(blocks[number])
        told = unit("collatz", number, tmp_path, errors=[] if answer else ["LOST"])
        assert collatz.assimilate(told, answer) == (answer or {"failed": ["LOST"]})
    lines = (tmp_path / "collatz.txt").read_text().splitlines()
    assert "3 of 100, 1 failed" in lines[2]
    assert [line.split() for line in lines[5:]] == [
        ["871", "178", "703", "250,504"], ["1,161", "181", "1,819", "1,276,936"],
        ["3,711", "237"]]
    (tmp_path / "collatz.answers.json").write_text("{")
    collatz.assimilate(unit("collatz", 0, tmp_path), collatz.parse(blocks[0]))
    assert (tmp_path / "collatz.answers.json.damaged").exists()


def test_collatz_is_loaded_with_its_platforms(grid):
    minigrid = sys.modules["minigrid"]
    assert minigrid.sync_apps([COLLATZ], 1_800_000_000) == []
    scripts = [v for v in minigrid.apps["collatz"].versions if v.plan_class == "sh"]
    found = {v.platform for v in scripts}
    assert {"x86_64-pc-linux-gnu", "arm64-apple-darwin", "aarch64-unknown-linux-gnu"} <= found
    assert not any(name.startswith("windows") for name in found)  # No sh there.
    assert {f["open_name"] for v in scripts for f in v.files if f.get("main")} == {"collatz.sh"}
