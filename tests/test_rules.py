"""The table of rules: complete, cited truly, the only writer of a state, numbered as BOINC's."""

import ast
import re
import tokenize
from pathlib import Path

import make
import pytest
from make import NOW
from rules import DEVIATIONS, FAMILIES, RULES, VOLUNTEER

import minigrid as m

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "minigrid.py"
PLUGINS = sorted(path for kind in ("*.py", "*.html") for path in (ROOT / "plugins").rglob(kind))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# ---- Citations -----------------------------------------------------------------

ONE = r"(?:S[0-4]-\d+|C\d+)"
CITATION = re.compile(rf"\b({ONE})(?:\.\.({ONE}))?\b(?!-)")
DECISION = r"T\d+|V\d+|A[12]|F[123]|P[123]|S[1-4]|L1"  # rows of section 7 of RULES.md


def family(rule_id):
    return next(name for name in FAMILIES if rule_id.startswith(name))


def ids(text):
    """The rule ids a text cites; `S0-05..S0-09` stands for all five."""
    found = set()
    for first, last in CITATION.findall(text):
        name = family(first)
        found.add(first)
        if last:
            width, begin, end = len(first) - len(name), *(int(i[len(name):]) for i in (first, last))
            assert family(last) == name and begin < end, f"no range: {first}..{last}"
            found |= {f"{name}{n:0{width}}" for n in range(begin, end + 1)}
    return found


def explained(path):
    """The comments and docstrings of a file, as one text."""
    with open(path, encoding="utf-8") as file:
        texts = [t.string for t in tokenize.generate_tokens(file.readline)
                 if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            texts.append(ast.get_docstring(node) or "")
    return "\n".join(texts)


CITED_BY_RULES = {i for rule in m.RULES.values() for i in ids(rule.cites)}
CITED_IN_TEXTS = {i for path in [CORE, *PLUGINS] if path.suffix == ".py"
                  for i in ids(explained(path))}


def test_ids_are_understood():
    assert ids("[S0-05..S0-09 C2], C20; not C99x, XC1, S9-01") == {
        "S0-05", "S0-06", "S0-07", "S0-08", "S0-09", "C2", "C20"}
    assert ids("C9..C11") == {"C9", "C10", "C11"}


def test_rules_as_data_are_complete():
    wanted = [f"{name}{n:02}" for name in ("S0-", "S2-", "S4-")
              for n in range(1, FAMILIES[name] + 1)]
    wanted += [f"C{n}" for n in [*range(1, 24), *range(34, 47)]]
    assert list(RULES) == wanted
    assert all(RULES.values())


def test_every_rule_is_cited_or_a_deviation():
    nowhere = set(RULES) - CITED_BY_RULES - CITED_IN_TEXTS - set(DEVIATIONS)
    assert not nowhere, "\n".join(f"{i}: {RULES[i]}" for i in sorted(nowhere))


NO_BEHAVIOUR = {"S1-02", "S1-16"}  # a table of contents, and a note on a word


def test_every_rule_of_the_client_is_cited_in_the_volunteer_and_its_tests():
    wanted = [f"S1-{n:02}" for n in range(1, FAMILIES["S1-"] + 1)]
    assert list(VOLUNTEER) == wanted + [f"C{n}" for n in range(24, 36)]
    client = ids(explained(ROOT / "plugins" / "volunteer.py"))
    tests = {i for path in TESTS if "volunteer" in path.name for i in ids(explained(path))}
    for cited in (client | NO_BEHAVIOUR, tests):
        nowhere = set(VOLUNTEER) - cited
        assert not nowhere, "\n".join(f"{i}: {VOLUNTEER[i]}" for i in sorted(nowhere))


def test_every_rule_of_xcom_is_cited_in_the_code_and_by_a_test():
    wanted = {f"S3-{n:02}" for n in range(1, FAMILIES["S3-"] + 1)}
    tests = {i for path in TESTS for i in ids(path.read_text("utf-8").split('"""', 2)[-1])}
    assert sorted(wanted - CITED_BY_RULES - CITED_IN_TEXTS) == []
    assert sorted(wanted - tests) == []  # A module's docstring is no test.


def test_no_rule_is_carried_out_and_a_deviation():
    assert not CITED_BY_RULES & set(DEVIATIONS)
    assert not [i for i, why in DEVIATIONS.items() if i not in RULES or len(why) < 15]


@pytest.mark.parametrize("path", [CORE, *PLUGINS, *TESTS], ids=lambda path: path.name)
def test_nothing_cites_a_rule_that_does_not_exist(path):
    wrong = [i for i in ids(path.read_text(encoding="utf-8"))
             if not 1 <= int(i[len(family(i)):]) <= FAMILIES[family(i)]
             or len(i) != len(family(i)) + 2 and "-" in i]
    assert not wrong


def test_a_rule_cites_ids_and_decisions_only():
    for rule in m.RULES.values():
        assert rule.why and rule.cites
        for word in rule.cites.split():
            assert re.fullmatch(rf"{ONE}|{DECISION}", word), f"{rule.name}: {word}"


# ---- Writers of states ---------------------------------------------------------

STATES = {"server_state", "outcome", "validate_state", "file_delete_state", "assimilate_state",
          "need_validate", "error_mask"}
WRITERS = {"update", "insert", "insert_many", "replace", "create", "get_or_create", "Workunit",
           "Result"}


def writes(tree):
    """The lines of a module that give a state field a value."""
    for node in ast.walk(tree):
        targets, names = [], []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.withitem):
            targets = [node.optional_vars] if node.optional_vars else []
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = list(node.args) + [k.value for k in node.keywords if k.arg is None]
            if called == "setattr":
                names = [getattr(a, "value", None) for a in node.args[1:2]]
            elif called in WRITERS:
                names = [k.arg for k in node.keywords]
                names += [getattr(key, "attr", getattr(key, "value", None))
                          for d in given if isinstance(d, ast.Dict) for key in d.keys]
                names += [k.arg for d in given if isinstance(d, ast.Call) for k in d.keywords
                          if getattr(d.func, "id", "") == "dict"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"(?:\bSET\b|,)\s*(\w+)\s*=", node.value)
        names += [part.attr for target in targets for part in ast.walk(target)
                  if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
        if STATES.intersection(name for name in names if isinstance(name, str)):
            yield node.lineno


@pytest.mark.parametrize("line", [
    "r.outcome = 1", "wu.error_mask |= 2", "a, r.server_state = 1, 2", "r.outcome: int = 3",
    "setattr(r, 'outcome', 1)", "Result.update(server_state=5)", "Workunit(error_mask=0)",
    "Workunit.update({Workunit.error_mask: 1})", "Result.insert_many({'outcome': 1})",
    "Result.update(**dict(outcome=1))", "db.execute_sql('UPDATE result SET outcome = 1')"])
def test_writers_are_recognised(line):
    assert list(writes(ast.parse(line))) == [1]


def test_readers_are_no_writers():
    text = "x = r.outcome\nf(outcome=1)\nif r.outcome == 1: r.priority = r.server_state"
    assert list(writes(ast.parse(text))) == []


@pytest.mark.parametrize("path", [CORE] + [path for path in PLUGINS if path.suffix == ".py"],
                         ids=lambda path: path.name)
def test_only_rules_write_states(path):
    text = path.read_text(encoding="utf-8")
    section = re.search(r"# ---- 2\. Rules .*?(?=# ---- 3\. )", text, re.S)
    first, last = (text[:end].count("\n") + 1 for end in section.span()) if section else (0, 0)
    assert bool(section) == (path == CORE)
    assert [line for line in writes(ast.parse(text)) if not first <= line <= last] == []


# ---- The table -----------------------------------------------------------------

FIELDS = {name: getattr(model, name) for model in (m.Result, m.Workunit) for name in STATES
          if hasattr(model, name)}
ERROR_BITS = [bit for bit in m.ErrorMask if bit]


def values(name):
    """All values a state field can hold."""
    if name == "need_validate":
        return {False, True}
    return set(getattr(m, "".join(part.title() for part in name.split("_"))))


def subject(rule):
    """A row that a rule may be fired on: a result if only results have its fields."""
    only_results = {"server_state", "outcome", "validate_state"}
    make_row = make.row if only_results & {*rule.before, *rule.after} else make.wu
    return make_row(**{name: min(allowed) for name, allowed in rule.before.items()})


def test_the_table_holds_every_rule_once():
    constants = [value for value in vars(m).values() if isinstance(value, m.Rule)]
    assert constants == list(m.RULES.values())[:len(constants)]  # Those of plugins follow.
    for rule in m.RULES.values():
        assert m.RULES[rule.name] is rule
        assert {*rule.before, *rule.after} <= STATES
        assert rule.by in ("scheduler", "transitioner", "validator", "assimilator", "file deleter",
                           "purger", "operator")
        assert all(allowed and allowed <= values(name) for name, allowed in rule.before.items())


@pytest.mark.parametrize("name", m.RULES)
def test_a_rule_moves_what_it_names_and_nothing_else(name, fired):
    rule = m.RULES[name]
    for field, allowed in [*rule.before.items(), ("id", {7})]:
        for value in allowed:
            row = subject(rule)
            setattr(row, field, value)
            before = dict(row.__data__)
            m.fire(rule, row)
            assert row.__data__ == {**before, **rule.after}
            assert m.fired.pop() == (rule, row)


@pytest.mark.parametrize("name", m.RULES)
def test_a_rule_refuses_every_other_state(name, fired):
    rule = m.RULES[name]
    for field, allowed in rule.before.items():
        for value in values(field) - allowed:
            row = subject(rule)
            setattr(row, field, value)
            before = dict(row.__data__)
            with pytest.raises(m.IllegalMove, match=field):
                m.fire(rule, row)
            assert row.__data__ == before
            assert not m.fired


@pytest.mark.parametrize("name", [n for n, rule in m.RULES.items() if "error_mask" in rule.after])
def test_error_bits_are_added_and_never_lost(name, fired):
    for mask in range(64):
        row = make.wu(error_mask=m.ErrorMask(mask))
        m.fire(m.RULES[name], row)
        assert row.error_mask == mask | m.RULES[name].after["error_mask"]


@pytest.mark.parametrize("name", [n for n, rule in m.RULES.items() if "error_mask" in rule.after])
def test_an_error_happens_once(name, fired):
    """C18: each look at a failed workunit finds it again; it is told and counted the first time."""
    row = make.wu()
    for _ in range(3):
        m.fire(m.RULES[name], row)
    assert fired() == [name]


def test_no_rule_takes_an_error_away():
    assert all(rule.after.get("error_mask", 1) for rule in m.RULES.values())


MOVES = {  # field -> all the moves the rules allow together
    "server_state": "UNSENT-UNSENT UNSENT-IN_PROGRESS IN_PROGRESS-OVER UNSENT-OVER INACTIVE-OVER "
                    "UNSENT-INACTIVE",
    "outcome": "INIT-SUCCESS INIT-CLIENT_ERROR INIT-CLIENT_DETACHED INIT-NO_REPLY INIT-DIDNT_NEED "
               "INIT-COULDNT_SEND NO_REPLY-SUCCESS NO_REPLY-CLIENT_ERROR SUCCESS-VALIDATE_ERROR",
    "file_delete_state": "INIT-READY READY-DONE READY-ERROR ERROR-DONE ERROR-ERROR",
    "assimilate_state": "INIT-READY READY-DONE READY-INIT",
}


@pytest.mark.parametrize("field", MOVES)
def test_moves(field):
    """There is no way back, but for late reports and deferred assimilations [C11 C23]."""
    moves = set()
    for rule in m.RULES.values():
        if field in rule.after:
            fresh = m.ServerState.OVER not in rule.before.get("server_state", {m.ServerState.OVER})
            starts = {m.Outcome.INIT} if field == "outcome" and fresh else rule.before[field]
            moves |= {f"{start.name}-{rule.after[field].name}" for start in starts}
    assert moves == set(MOVES[field].split())


# ---- Numbers -------------------------------------------------------------------

NUMBERS = {  # table 5 of RULES.md
    m.ServerState: "INACTIVE 1, UNSENT 2, IN_PROGRESS 4, OVER 5",
    m.Outcome: "INIT 0, SUCCESS 1, COULDNT_SEND 2, CLIENT_ERROR 3, NO_REPLY 4, DIDNT_NEED 5, "
               "VALIDATE_ERROR 6, CLIENT_DETACHED 7",
    m.ValidateState: "INIT 0, VALID 1, INVALID 2, NO_CHECK 3, INCONCLUSIVE 4, TOO_LATE 5",
    m.FileDeleteState: "INIT 0, READY 1, DONE 2, ERROR 3",
    m.AssimilateState: "INIT 0, READY 1, DONE 2",
    m.ErrorMask: "NONE 0, COULDNT_SEND_RESULT 1, TOO_MANY_ERROR_RESULTS 2, "
                 "TOO_MANY_SUCCESS_RESULTS 4, TOO_MANY_TOTAL_RESULTS 8, CANCELLED 16, "
                 "NO_CANONICAL_RESULT 32",
}


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.__name__)
def test_numbers_are_boincs(kind):
    members = kind.__members__.items()
    assert ", ".join(f"{name} {member.value}" for name, member in members) == NUMBERS[kind]
    assert m.NEVER == 2**31 - 1  # [C9]


def test_new_rows_stand_at_the_beginning():
    unit, r = m.Workunit(create_time=NOW), m.Result(create_time=NOW)
    assert (unit.transition_time, unit.canonical_resultid, unit.error_mask, unit.need_validate,
            unit.assimilate_state, unit.file_delete_state) == (0, 0, 0, False, 0, 0)
    assert (r.server_state, r.outcome, r.validate_state, r.file_delete_state) == (2, 0, 0, 0)
