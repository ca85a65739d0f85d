"""The loader of Python applications: what it refuses, and what becomes of hooks that misbehave."""

import concurrent.futures
import json
import re
import sys
import threading
import types

import make
import pytest

import minigrid as m

NOW = 1_800_000_000
GOOD = '''"""good: i for i."""


def workunit(i):
    return {"input": i} if i < 3 else None


def compute(input):
    return input
'''


@pytest.fixture
def loader(plugins):
    """The plugin; its hook thread is left behind with whatever hangs in it."""
    plugin = sys.modules["minigrid_plugin_python_apps"]
    yield plugin
    plugin.bounded.tasks = None


@pytest.fixture
def grid(folder):
    """An open project without applications, whose hooks may take a minute."""
    with make.project(folder, {}, hook_seconds=60) as project:
        project.errors.clear()  # There is no application here, it says.
        yield project


@pytest.fixture
def load(loader, tmp_path):
    """Return a function that writes a file and loads it as an application."""
    def function(source, name="good.py"):
        path = tmp_path / name
        path.write_bytes(source) if isinstance(source, bytes) else path.write_text(source)
        return loader.load(path)

    return function


def refused(load, source, name="good.py"):
    """Return the sentence that refuses a file; it begins with the file's name."""
    with pytest.raises(m.PluginError) as caught:
        load(source, name)
    text = str(caught.value)
    assert re.match(rf"\S*/{re.escape(name)}: ", text), text
    return text.partition(f"{name}: ")[2]


# ---- 1. The file ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.py", "Good_2.py", "a" * 40 + ".py"])
def test_names_that_are_good(load, name):
    assert load(GOOD, name).name == name[:-3]


@pytest.mark.parametrize("name", ["2fast.py", "my-app.py", "my app.py", "über.py", "a.b.py",
                                  "a" * 41 + ".py", "_a.py"])
def test_names_that_are_not(load, name):
    assert "letters, digits and _" in refused(load, GOOD, name)


def without(hook):
    return re.sub(rf"(?s)def {hook}\(.*?\n\n\n|def {hook}\(.*$", "", GOOD)


BAD = {  # what is wrong: (source, parts of the sentence)
    "no workunit": (without("workunit"), ("workunit is missing", "wanted: def workunit(i)")),
    "no compute": (without("compute"), ("compute is missing", "def compute(input)", "progress")),
    "an empty file": ("", ("workunit is missing",)),
    "a number for a hook": (GOOD + "compute = 3\n", ("compute is not a function",)),
    "a class for a hook": (GOOD + "class parse:\n    pass\n", ("parse is not a function",
                                                               "def parse(output)")),
    "None for a hook that must be there": (GOOD + "compute = None\n", ("compute is missing",)),
    "workunit without i": (GOOD + "def workunit():\n    pass\n",
                           ("workunit() has the wrong parameters", "wanted: def workunit(i)",
                            "found: workunit()")),
    "workunit with more": (GOOD + "def workunit(i, j):\n    pass\n", ("found: workunit(i, j)",)),
    "compute with more": (GOOD + "def compute(input, speed):\n    pass\n",
                          ("found: compute(input, speed)", "progress and checkpoint")),
    "compute with anything": (GOOD + "def compute(*args):\n    pass\n", ("compute(*args)",)),
    "parse without output": (GOOD + "def parse():\n    pass\n", ("def parse(output)",)),
    "compare of one": (GOOD + "def compare(a):\n    pass\n", ("def compare(a, b)",)),
    "check_set of none": (GOOD + "def check_set():\n    pass\n", ("def check_set(answers)",)),
    "assimilate of one": (GOOD + "def assimilate(workunit):\n    pass\n",
                          ("def assimilate(workunit, answer)",)),
    "takes what nobody knows": (GOOD + "takes = 'xml'\n", ("takes must be 'json' or 'bytes'",
                                                           "'xml'")),
    "returns a type": (GOOD + "returns = bytes\n", ("returns must be 'json' or 'bytes'",)),
    "returns a list": (GOOD + "returns = ['json']\n", ("returns must be",)),
    "a policy that nobody has": (GOOD + "validation = 'luck'\n",
                                 ("validation must be one of", "'quorum'", "'luck'")),
    "a policy that is no name": (GOOD + "validation = []\n", ("validation must be one of", "[]")),
    "a syntax error": (GOOD + "def f(:\n    pass\n", ("SyntaxError", "(line 10)")),
    "a line not indented": (GOOD + "def f():\npass\n", ("IndentationError", "(line 11)")),
    "a NUL": (b"x = 1\0\n", ("null bytes",)),
    "not UTF-8": (b"x = '\xff'\n", ("SyntaxError",)),
    "an import that fails": ("import no_such_module_anywhere\n",
                             ("ModuleNotFoundError", "no_such_module_anywhere", "(line 1)")),
    "an error at import": (GOOD + "x = 1\ny = {}['key']\n", ("KeyError: 'key'", "(line 11)")),
    "an exit at import": (GOOD + "raise SystemExit(3)\n", ("SystemExit: 3", "(line 10)")),
    "recursion at import": (GOOD + "def f():\n    f()\n\n\nf()\n", ("RecursionError", "(line ")),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_line(grid, load, case):
    source, parts = BAD[case]
    text = refused(load, source)
    for part in parts:
        assert part in text
    assert len(text.splitlines()) == 1


def test_a_file_that_hangs_at_import_is_bounded(folder, load, release):
    with make.project(folder, {}, hook_seconds=0.5):
        assert "no answer within 0.5 s" in refused(load, "import gate\ngate.wait()\n" + GOOD)


FINE = {
    "parameters by other names": "def workunit(k):\n    return None\n",
    "more parameters with defaults": "def workunit(i, step=2):\n    return None\n",
    "compute with progress": "def compute(input, progress):\n    pass\n",
    "compute with both": "def compute(input, checkpoint, progress):\n    pass\n",
    "compute with both, by name": "def compute(input, *, checkpoint, progress=None):\n    pass\n",
    "an optional hook that is None": "parse = None\n",
    "a function made elsewhere": "compute = lambda input: input\n",
    "a dataclass": "import dataclasses\n\n\n@dataclasses.dataclass\nclass P:\n    x: 'int'\n",
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_fine(grid, load, case):
    assert load(GOOD + FINE[case]).hooks["workunit"]


def test_a_dataclass_with_postponed_annotations(grid, load):
    """Dataclasses look their module up; it must be where they look."""
    load("from __future__ import annotations\nfrom dataclasses import dataclass\n"
         "import typing\n\n\n@dataclass\nclass Point:\n    x: typing.ClassVar[int] = 1\n"
         "    y: int = 0\n\n\n" + GOOD)


def test_about(grid, load):
    assert load(GOOD).about == "good: i for i."
    assert load(GOOD + "about = 'Counts sheep.'\n").about == "Counts sheep."
    assert load(GOOD.partition("\n")[2]).about == ""


def test_loading_leaves_nothing_beside_the_file(grid, load, tmp_path):
    load(GOOD)
    assert [path.name for path in tmp_path.iterdir()] == ["good.py"]


def test_an_edit_within_the_second_is_seen(grid, load):
    """What is loaded is what stands in the file, whatever an interpreter has cached of it."""
    for n in range(3, 9):
        hooks = load(GOOD.replace("3", str(n))).hooks
        assert [hooks["workunit"](i) is None for i in (n - 1, n)] == [False, True]


# ---- 2. Numbers ----------------------------------------------------------------

NUMBERS = {  # module constants: parts of the sentence; empty = they are fine
    "min_quorum = 1": (), "min_quorum = 2.0": (), "max_error_results = 0": (), "credit = 0": (),
    "priority = -5": (), "rsc_fpops_est = 1": (), "delay_bound = 1": (), "credit = 0.5": (),
    "min_quorum = 30": (), "max_total_results = 100": (), "rsc_fpops_est = 1e30": (),
    "min_quorum, target_nresults, max_success_results, max_total_results, max_error_results = "
    "3, 3, 3, 3, 3": (),
    "min_quorum = 0": ("min_quorum must be a whole number between 1 and 2147483647", "found 0"),
    "target_nresults = 0": ("target_nresults", "found 0"),
    "max_total_results = 0": ("max_total_results",),
    "max_success_results = 0": ("max_success_results",),
    "max_error_results = -1": ("max_error_results", "between 0 and", "found -1"),
    "delay_bound = 0": ("delay_bound",),
    "delay_bound = -86400": ("delay_bound", "found -86400"),
    "rsc_fpops_est = 0": ("rsc_fpops_est must be a number between 1 and 1e+30",),
    "rsc_fpops_bound = 0": ("rsc_fpops_bound",), "rsc_memory_bound = 0": ("rsc_memory_bound",),
    "rsc_disk_bound = 0.0": ("rsc_disk_bound", "found 0.0"),
    "min_quorum = True": ("min_quorum must be a number", "True"),
    "min_quorum = '2'": ("min_quorum must be a number", "'2'"),
    "min_quorum = None": ("min_quorum must be a number", "None"),
    "min_quorum = 2j": ("min_quorum",),
    "min_quorum = 1.5": ("min_quorum must be a whole number", "1.5"),
    "priority = 0.5": ("priority must be a whole number",),
    "min_quorum = 10 ** 40": ("min_quorum",), "priority = 2 ** 31": ("priority",),
    "delay_bound = 1e300": ("delay_bound",), "rsc_fpops_est = 10 ** 400": ("rsc_fpops_est",),
    "rsc_disk_bound = float('inf')": ("rsc_disk_bound", "inf"),
    "delay_bound = float('inf')": ("delay_bound", "inf"),
    "rsc_fpops_est = float('nan')": ("rsc_fpops_est", "nan"),
    "min_quorum = float('nan')": ("min_quorum", "nan"),
    "credit = -1": ("credit",), "credit = float('nan')": ("credit",),
    "min_quorum, target_nresults = 3, 2": ("min_quorum (3) must not be above target_nresults (2)",),
    "target_nresults, max_success_results = 5, 4":
    ("target_nresults (5) must not be above max_success_results (4)",),
    "max_success_results, max_total_results = 9, 8":
    ("max_success_results (9) must not be above max_total_results (8)",),
    "max_error_results, max_total_results = 12, 11":
    ("max_error_results (12) must not be above max_total_results (11)",),
    "rsc_fpops_est, rsc_fpops_bound = 1e9, 1e8": ("rsc_fpops_est", "rsc_fpops_bound"),
}


@pytest.mark.parametrize("line", NUMBERS)
def test_numbers_that_could_never_end_a_workunit(grid, load, line):
    """[S0-03 S0-21 S0-22 S0-23]"""
    if not NUMBERS[line]:
        assert load(f"{GOOD}{line}\n").parameters
        return
    text = refused(load, f"{GOOD}{line}\n")
    for part in NUMBERS[line]:
        assert part in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("given, parts", [
    ('{"input": 1, "min_quorum": 0}', ("workunit(1)", "min_quorum", "found 0")),
    ('{"input": 1, "min_quorum": 9, "target_nresults": 8}', ("workunit(1)", "must not be above")),
    ('{"input": 1, "deadline": 5}', ("workunit(1)", "unknown 'deadline'", "delay_bound")),
    ('{"input": 1, 5: 5, "deadline": 5}', ("workunit(1)", "unknown", "deadline")),
    ('{"input": {1: {2}}}', ("workunit(1)", "input")),
    ('{"inputs": 1}', ("workunit(1) must return a dict with 'input', or None", "inputs")),
    ("[1]", ("workunit(1) must return a dict",)), ("False", ("workunit(1) must return a dict",)),
    ('{"input": float("nan")}', ("workunit(1)", "input")),
    ('{"input": "\\ud800"}', ("workunit(1)", "input")),
    ('{"input": b"raw"}', ("workunit(1)", "input")),
    ('{"input": (lambda x: [x.append(x), x][1])([])}', ("workunit(1)", "input")),
    ('{"input": __import__("functools").reduce(lambda x, _: [x], range(10**5), 1)}',
     ("workunit(1)", "input")),
    ("1 / 0", ("workunit() failed: ZeroDivisionError: division by zero (line 12)",)),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_workunit_that_is_wrong_stops_its_application_only(folder, given, parts):
    """It is put off with the reason; the others go on."""
    bad = GOOD + f"\ndef workunit(i):\n    return {given} if i else {{'input': 0}}\n"
    with make.project(folder, {"bad": bad, "good": GOOD}, stock=2) as project:
        for now in range(NOW, NOW + 3):
            m.run_pass(now)
        assert m.Workunit.select().where(m.Workunit.name.startswith("good")).exists()
        ((_, text),) = project.errors
        assert "bad.py: " in text and len(text.splitlines()) == 1 and len(text) < 1000
        for part in parts:
            assert part in text
        assert [name for name, _ in project.put_off] == ["bad"]
        assert not project.counts["stage errors"]


# ---- 3. Calling hooks ----------------------------------------------------------


@pytest.fixture
def release():
    """Let applications `import gate` and wait at it; they go on when the test is over."""
    event = threading.Event()
    gate = sys.modules["gate"] = types.ModuleType("gate")
    gate.wait, gate.passed = event.wait, []
    yield event
    event.set()
    del sys.modules["gate"]


def test_a_hook_that_hangs_is_bounded_and_the_next_one_works(folder, load, release):
    with make.project(folder, {}, hook_seconds=0.5):
        app = load("import gate\n\n\n" + GOOD.replace('return {"input": i} if i < 3 else None',
                                                      "gate.wait() if i == 1 else None\n"
                                                      '    return {"input": i}'))
        with pytest.raises(m.PluginError, match=r"workunit\(\) failed: .*within 0.5 s"):
            app.hooks["workunit"](1)
        assert app.hooks["workunit"](2) == {"input": b"2"}
        with pytest.raises(m.PluginError, match="within 0.5 s"):
            app.hooks["workunit"](1)
        assert app.hooks["workunit"](3) == {"input": b"3"}


def test_many_workunits_are_asked_for_in_one_go(load):
    several = load(GOOD).hooks["workunit"].several
    assert several(0, 2) == ([{"input": b"0"}, {"input": b"1"}], None)
    assert several(1, 50) == ([{"input": b"1"}, {"input": b"2"}], None), "there are no more"
    batch, error = load(GOOD.replace("if i < 3 else None", "if i != 2 else 5")).hooks[
        "workunit"].several(0, 9)
    assert batch == [{"input": b"0"}, {"input": b"1"}] and "workunit(2) must return" in str(error)
    batch, error = load(GOOD.replace("if i < 3 else None", "if i != 2 else 1 / 0")).hooks[
        "workunit"].several(0, 9)
    assert len(batch) == 2 and "workunit() failed: ZeroDivisionError" in str(error)


def test_many_workunits_may_take_long_but_each_is_bounded(folder, load, release):
    """What was made before one that hangs is not lost; what is slow but gets on is waited for."""
    with make.project(folder, {}, hook_seconds=0.5):
        app = load("import gate\n\n\n" + GOOD.replace('return {"input": i} if i < 3 else None',
                                                      "gate.wait(9) if i == 4 else gate.wait(0.2)\n"
                                                      '    return {"input": i}'))
        batch, error = app.hooks["workunit"].several(0, 9)
        assert [given["input"] for given in batch] == [b"0", b"1", b"2", b"3"]
        assert "within 0.5 s" in str(error)


def test_a_hook_that_ends_just_when_its_time_is_up_has_ended(grid, load, monkeypatch):
    result = concurrent.futures.Future.result

    def late(self, timeout=None):
        value = result(self)
        if timeout is not None:
            raise concurrent.futures.TimeoutError
        return value

    app = load(GOOD)
    monkeypatch.setattr(concurrent.futures.Future, "result", late)
    assert app.hooks["workunit"](1) == {"input": b"1"}


def test_a_hook_that_hangs_costs_its_own_workunit(folder, release):
    """[C13] The validator's pass ends, the other workunit is settled."""
    slow = "import gate\n\n\n" + GOOD + \
        "\n\ndef compare(a, b):\n    gate.wait() if a == 1 else None\n    return a == b\n"
    with make.project(folder, {"slow": slow}, hook_seconds=0.5, stock=3) as project:
        do_all(2, lambda job: job.input)
        assert answers("slow") == [0, 2]
        assert [text for _, text in project.errors if "slow_1" in text and "within" in text]


def do_all(n_hosts, output, passes=6):
    """Let hosts fetch, compute and report all there is; `output(job)` gives bytes or a value."""
    now = NOW
    m.run_pass(now)
    for k in range(n_hosts):
        user = m.User.create(create_time=now, name=f"u{k}", authenticator=f"key{k}")
        ask = dict(authenticator=user.authenticator, host_cpid=str(k), host={"p_ncpus": 8})
        reply = m.project.write(lambda: m.schedule(m.Request(work_req_seconds=1e6, **ask), now))
        for job in reply.assignments:
            value = output(types.SimpleNamespace(
                name=job.name, input=json.loads(make.kept("download", job.input["name"]))))
            m.store_file("upload", job.output["name"], value if isinstance(value, bytes)
                         else json.dumps(value).encode())
        told = m.Request(hostid=reply.hostid, rpc_seqno=1, reports=[
            m.Report(job.name, client_state=5) for job in reply.assignments], **ask)
        m.project.write(lambda: m.schedule(told, now))
        for _ in range(passes):
            now += 1
            m.run_pass(now)


def answers(app):
    path = m.project.data / "results" / f"{app}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((json.loads(line)["answer"] for line in lines), key=repr)


@pytest.mark.parametrize("what", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()",
                                  "RecursionError()", "MemoryError()", "StopIteration()",
                                  "TimeoutError()", "BaseException('odd')"])
def test_whatever_a_hook_raises_is_a_fault_of_the_application(grid, load, what):
    app = load(f"{GOOD}\n\ndef parse(output):\n    raise {what}\n")
    name = what.partition("(")[0]
    with pytest.raises(m.PluginError, match=rf"good.py: parse\(\) failed: .*{name}.*\(line 13\)"):
        app.hooks["parse"](b"1")
    assert app.hooks["workunit"](0) == {"input": b"0"}, "the next hook works"


SPOILT = {  # hook -> its body, for an answer that is a number; what it is given
    "parse(output)": ("return output + 1", [b"1"], [b'"word"']),
    "compare(a, b)": ("return abs(a - b) < 1", [1, 1], [1, [2]]),
    "check_set(answers)": ("return answers.index(min(answers))", [[1, 2]], [[1, "word"]]),
}


@pytest.mark.parametrize("hook", SPOILT)
def test_nobody_stops_an_application_by_nonsense(grid, load, hook):
    """What a hook raises that has worked with other outputs is the fault of the output."""
    body, good, bad = SPOILT[hook]
    app, name = load(f"{GOOD}\n\ndef {hook}:\n    {body}\n"), hook.partition("(")[0]
    with pytest.raises(m.PluginError, match=rf"{name}\(\) failed: TypeError") as caught:
        app.hooks[name](*bad)  # Nobody knows yet whose fault it is, so it is asked again soon.
    assert caught.value.seconds == 600
    app.hooks[name](*good)
    with pytest.raises(ValueError, match=rf"{name}\(\) failed: TypeError"):
        app.hooks[name](*bad)


@pytest.mark.parametrize("what", ["NameError()", "ImportError()", "MemoryError()",
                                  "TimeoutError()"])
def test_a_mistake_is_one_however_often_the_hook_worked(grid, load, what):
    app = load(f"{GOOD}\n\ndef compare(a, b):\n"
               f"    if b == 2:\n        raise {what}\n    return a\n")
    assert app.hooks["compare"](1, 1) is True
    with pytest.raises(m.PluginError, match=what[:-2]) as caught:
        app.hooks["compare"](1, 2)
    assert not hasattr(caught.value, "seconds")


def test_an_infinite_recursion_is_a_fault_of_the_application(grid, load):
    app = load(f"{GOOD}\n\ndef compare(a, b):\n    return compare(b, a)\n")
    with pytest.raises(m.PluginError, match=r"compare\(\) failed: RecursionError.*\(line 13\)"):
        app.hooks["compare"](1, 2)


@pytest.mark.parametrize("hook, error", [("parse", "ValueError('x')"), ("parse", "OSError('x')"),
                                         ("compare", "ValueError('x')"),
                                         ("compare", "FileNotFoundError('x')")])
def test_errors_that_mean_something_reach_the_judge(grid, load, hook, error):
    """[S4-48 V9] Unreadable, never comparable, not just now."""
    app = load(f"{GOOD}\n\ndef {hook}({'output' if hook == 'parse' else 'a, b'}):\n"
               f"    raise {error}\n")
    with pytest.raises((ValueError, OSError), match="x"):
        app.hooks[hook](*([b"1"] if hook == "parse" else [1, 2]))


def test_the_same_errors_from_other_hooks_mean_nothing(grid, load):
    app = load(f"{GOOD}\n\ndef assimilate(workunit, answer):\n    raise OSError('disk')\n")
    told = types.SimpleNamespace(name="a", number=0, input=b"0", errors=[])
    with pytest.raises(m.PluginError, match=r"assimilate\(\) failed: OSError: disk \(line 13\)"):
        app.hooks["assimilate"](told, b"1")


def test_the_line_named_is_in_the_application_not_in_what_it_calls(grid, load):
    app = load(f"import json\n{GOOD}\n\ndef parse(output):\n    return json.loads({{}})\n")
    with pytest.raises(m.PluginError, match=r"TypeError.*\(line 14\)$"):
        app.hooks["parse"](b"1")


# ---- 4. Values on their way ----------------------------------------------------


@pytest.mark.parametrize("output", [
    b"", b"{", b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"1e999", b"[-1e999]", b"nothing",
    b"\xff\xfe", b'"\\ud800"', b'"\xed\xa0\x80"', b'{"\\udfff": 1}', b"1 2", b"'a'", b"[" * 10**5,
    b"1" * 5000, b"\0"], ids=lambda output: repr(output[:12]))
def test_outputs_that_are_not_json_are_unreadable(grid, load, output):
    """What the store could not keep is refused while it is still its volunteer's fault."""
    app = load(GOOD)
    with pytest.raises((ValueError, RecursionError)):
        app.hooks["parse"](output)


@pytest.mark.parametrize("output", [b"NaN", b"1e999", b'"\\ud800"', b"[" * 10**5, b""],
                         ids=lambda output: repr(output[:12]))
@pytest.mark.parametrize("quorum", [1, 2])
def test_volunteers_who_agree_on_nonsense_stop_nothing(folder, output, quorum):
    """All other workunits are settled; this one's copies were unreadable [S4-48]."""
    app = GOOD + f"min_quorum, max_error_results = {quorum}, 1\n"
    with make.project(folder, {"good": app}, stock=9) as project:
        do_all(3, lambda job: output if job.input == 1 else job.input)
        found = answers("good")
        assert [a for a in found if a is not None] == [0, 2]
        assert not [text for _, text in project.errors], project.errors
        assert m.Result.select().where(m.Result.outcome == m.Outcome.VALIDATE_ERROR).exists()


@pytest.mark.parametrize("value", [None, True, 0, -1.5e-300, "é\u2028\0", [], {}, [[{"a": None}]],
                                   10**30])
def test_json_values_come_through_whole(grid, load, value):
    """From workunit() to the file, from the output to parse()."""
    app = load(f"{GOOD}\n\ndef workunit(i):\n    return {{'input': {value!r}}}\n")
    content = app.hooks["workunit"](0)["input"]
    assert json.loads(content) == value
    assert app.hooks["parse"](content) == value


def test_applications_of_bytes(folder):
    app = '''takes = returns = "bytes"


def workunit(i):
    return {"input": b"\\xff" * i} if i < 3 else None


def compute(input):
    return input


def compare(a, b):
    assert isinstance(a, bytes)
    return a.lower() == b.lower()


def assimilate(workunit, answer):
    return answer + workunit.input
'''
    with make.project(folder, {"raw": app}, stock=9) as project:
        now = NOW
        m.run_pass(now)
        assert make.kept("download", "raw_2_in") == b"\xff\xff"
        for wu in m.Workunit.select():
            for n, text in enumerate((b"AbC\0", b"aBc\0")):
                m.store_file("upload", f"{wu.name}_{n}_out", text)
        user = m.User.create(create_time=now, name="u", authenticator="k")
        hosts = [m.Host.create(user=user, create_time=now) for _ in range(2)]
        for r in m.Result.select():
            r.server_state, r.outcome, r.host = 5, 1, hosts[int(r.name[-1])]
            r.save()
        for now in range(NOW + 20 * 86400, NOW + 20 * 86400 + 4):
            m.run_pass(now)
        assert answers("raw") == [b"AbC\0".hex(), (b"AbC\0\xff").hex(), (b"AbC\0\xff\xff").hex()]
        assert not project.errors


def test_applications_of_bytes_must_give_bytes(grid, load):
    app = load(GOOD + "takes = 'bytes'\n")
    with pytest.raises(m.PluginError, match=r"workunit\(1\): input: must be bytes.*found 1"):
        app.hooks["workunit"](1)
    assert load(GOOD + "returns = 'bytes'\n").hooks["parse"](b"\xff{") == b"\xff{"


COMPARED = {  # two outputs: do they agree by default?
    (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}'): True, (b"1", b"1.0"): False, (b"1.50", b"1.5"): True,
    (b'"\\u00e9"', '"é"'.encode()): True, (b"[1, 2]", b"[2, 1]"): False, (b"1", b"true"): False,
    (b"0", b"false"): False, (b"null", b"0"): False,
}


@pytest.mark.parametrize("returned, found", [
    ("0", 0), ("1", 1), ("None", None), ("2", ...), ("-1", ...), ("1.0", ...), ("True", ...),
    ("'0'", ...), ("[0]", ...)])
def test_check_set_names_one_of_its_answers(grid, load, returned, found):
    app = load(f"{GOOD}\n\ndef check_set(answers):\n    return {returned}\n")
    if found is ...:
        with pytest.raises(m.PluginError, match=r"good.py: check_set\(\) must return the index"):
            app.hooks["check_set"](["a", "b"])
    else:
        assert app.hooks["check_set"](["a", "b"]) == found
    assert load(GOOD).hooks["check_set"] is None


@pytest.mark.parametrize("pair", COMPARED)
def test_equal_values_agree_however_they_are_written(grid, load, pair):
    app = load(GOOD)
    a, b = map(app.hooks["parse"], pair)
    assert app.hooks["compare"](a, b) is app.hooks["compare"](b, a) is COMPARED[pair]


KEPT = {  # what assimilate() does: what is kept of an answer 1; an exception = a PluginError
    "return answer": 1, "return {'a': [answer, workunit.number]}": {"a": [1, 0]},
    "return workunit.input": 0, "return b'\\xff'": "ff", "return None": None, "return 'defer'":
    "defer", "return {1, 2}": m.PluginError, "return float('nan')": m.PluginError,
    "return '\\ud800'": m.PluginError, "return object()": m.PluginError, "return 0": 0,
    "return ''": "", "return False": False,
}


@pytest.mark.parametrize("body", KEPT)
def test_what_assimilate_returns_is_kept(grid, load, body):
    app = load(f"{GOOD}\n\ndef assimilate(workunit, answer):\n    {body}\n")
    told = types.SimpleNamespace(name="good_0", number=0, input=b"0", errors=[])
    if KEPT[body] is m.PluginError:
        with pytest.raises(m.PluginError, match=r"assimilate\(\) must return a JSON value"):
            app.hooks["assimilate"](told, b"1")
        return
    text = app.hooks["assimilate"](told, b"1")
    if KEPT[body] in (None, "defer"):
        assert text == KEPT[body]
    else:
        assert json.loads(text) == {"workunit": "good_0", "number": 0, "errors": [],
                                    "answer": KEPT[body]}


def test_without_assimilate_the_answer_is_kept_even_if_it_is_a_word(grid, load):
    """Only the hook may ask to be called again; an answer that reads so is an answer."""
    told = types.SimpleNamespace(name="good_0", number=0, input=b"0", errors=[])
    assert json.loads(load(GOOD).hooks["assimilate"](told, b'"defer"'))["answer"] == "defer"


def test_a_failure_is_kept_with_its_reasons(grid, load):
    told = types.SimpleNamespace(name="good_0", number=0, input=b"0", errors=["CANCELLED"])
    line = json.loads(load(GOOD).hooks["assimilate"](told, None))
    assert (line["answer"], line["errors"]) == (None, ["CANCELLED"])


# ---- 5. Files and versions -----------------------------------------------------


def versions(app="good"):
    row = m.App.get(name=app)
    return [(v.version_num, v.files[0]["name"]) for v in m.AppVersion.select()
            .where(m.AppVersion.app == row).order_by(m.AppVersion.id)]


def test_new_content_is_a_new_version_with_a_new_file(grid, loader, tmp_path):
    """[WIRE 17] Clients keep files by name."""
    path = tmp_path / "good.py"
    contents = [GOOD, GOOD, GOOD + "# edited\n", GOOD]
    for content in contents:
        path.write_text(content)
        assert m.sync_apps([path], NOW) == []
    found = versions()
    assert [number for number, _ in found] == [1, 2, 3]
    assert len({name for _, name in found}) == 3
    for (number, name), content in zip(found, [GOOD, GOOD + "# edited\n", GOOD]):
        assert re.fullmatch(rf"good_{number}_[0-9a-f]{{8}}\.py", name)
        assert m.file_path("download", name).read_text() == content
    assert [v.version_num for v in m.apps["good"].versions] == [3]


def test_the_file_of_a_version_is_put_back_if_it_is_lost(grid, tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    m.sync_apps([tmp_path], NOW)
    path = m.file_path("download", versions()[0][1])
    path.unlink()
    m.sync_apps([tmp_path], NOW)
    assert path.read_text() == GOOD and len(versions()) == 1


def test_folders_and_what_is_hidden_in_them(grid, tmp_path):
    """A faulty file costs that application only."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "also.py").write_text(GOOD)
    (tmp_path / "_helper.py").write_text("raise SystemExit")
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.py").write_text(GOOD)
    (fault,) = m.sync_apps([tmp_path], NOW)
    assert "broken.py: SyntaxError" in fault
    assert list(m.apps) == ["also", "good"]
    assert [text for _, text in m.project.errors] == [fault]
    assert {app.name for app in m.App.select()} == {"also", "good"}


@pytest.mark.parametrize("name", ["nowhere", "nowhere.py", "notes.txt", "empty"])
def test_where_there_is_no_application(grid, tmp_path, name):
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "empty").mkdir()
    (fault,) = m.sync_apps([tmp_path / name], NOW)
    assert name in fault and len(fault.splitlines()) == 1
    assert not m.apps


def test_two_applications_of_one_name_are_a_fault(grid, tmp_path):
    """Else the second would quietly take the first one's place, in the store too."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "good.py").write_text(f"{GOOD}# {place}\n")
    (fault,) = m.sync_apps([tmp_path / "a", tmp_path / "b"], NOW)
    assert "good" in fault and len(versions()) == 1


def test_the_shipped_applications_are_right(grid, loader):
    for path in loader.find(loader.Path(loader.__file__).with_name("apps")):
        app = loader.load(path)
        assert app.about and app.hooks["workunit"](0)["input"]
