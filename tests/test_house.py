"""The house: order and budgets of sections, who imports whom, and a README that runs.

Run as a script it writes the table of rules into the README.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import conftest
import pytest

import minigrid

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CORE = (ROOT / "minigrid.py").read_text(encoding="utf-8")
PLUGINS = sorted(p for p in (ROOT / "plugins").rglob("*.py") if p.parent.name != "apps")
SERVER_PLUGINS = [p for p in PLUGINS if p.name != "volunteer.py"]
BEGIN, END = "<!-- rules: ", "<!-- end of rules -->"


# ---- Structure ---------------------------------------------------------------


def test_sections_stand_in_order_and_in_the_docstring():
    banners = re.findall(r"^# ---- (\d+)\. (.+?) -+$", CORE, re.M)
    assert [int(n) for n, _ in banners] == list(range(1, 14))
    listed = dict(re.findall(r"(\d+) ([A-Z][A-Za-z ]+?)(?:  |\n)", minigrid.__doc__ + "\n"))
    assert listed == dict(banners)
    assert all(len(line) == 80 for line in CORE.splitlines() if line.startswith("# ---- "))


def test_core_stays_small_enough_to_be_read():
    assert len(CORE.splitlines()) < 2000


@pytest.mark.parametrize("path", [ROOT / "minigrid.py", *PLUGINS], ids=lambda p: p.stem)
def test_functions_are_short_and_documented(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    methods = (n for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body)
    for node in [*tree.body, *methods]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            length = node.end_lineno - node.lineno + 1
            if isinstance(node, ast.FunctionDef):
                assert length <= 60, f"{path.name}: {node.name} has {length} lines"
            if length > 4 and not node.name.startswith("_") and node.name != "Meta":
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_core_names_no_plugin():
    imported = {a.name for node in ast.walk(ast.parse(CORE)) if isinstance(node, ast.Import)
                for a in node.names}
    assert not imported & {p.stem for p in PLUGINS}


@pytest.mark.parametrize("path", SERVER_PLUGINS, ids=lambda p: p.stem)
def test_plugins_use_only_what_the_core_offers(path):
    tree, offered = ast.parse(path.read_text(encoding="utf-8")), set(minigrid.__all__)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "minigrid":
            assert {a.name for a in node.names} <= offered
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [
                a.name for a in node.names]
            assert not any((n or "").startswith("minigrid_plugin") for n in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) \
                and node.value.id == "minigrid" and not node.attr.startswith("__"):
            assert node.attr in offered, f"{path.name} uses minigrid.{node.attr}"


def test_all_lists_what_exists():
    assert [name for name in minigrid.__all__ if not hasattr(minigrid, name)] == []
    assert len(set(minigrid.__all__)) == len(minigrid.__all__)


def test_applications_import_only_the_standard_library():
    for path in (ROOT / "plugins" / "apps").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {n.split(".")[0] for n in names} <= {
                "csv", "functools", "io", "itertools", "json", "math", "os", "random", "struct",
                "zlib"}, path.name


# ---- README ------------------------------------------------------------------


def rules_table():
    """Return the table of rules as the README shows it."""
    lines = ["| rule | who | when | from -> to | ids |", "| --- | --- | --- | --- | --- |"]
    for rule in minigrid.RULES.values():
        def show(changes):
            return ", ".join(
                f"{name} {'/'.join(getattr(v, 'name', str(v)) for v in sorted(values))}"
                for name, values in changes.items())
        before = show(rule.before)
        after = show({name: [value] for name, value in rule.after.items()})
        lines.append(f"| {rule.name} | {rule.by} | {rule.why} | "
                     f"{before or 'any'} -> {after or 'the same'} | {rule.cites} |")
    return "\n".join(lines)


def blocks(kind):
    """Return the README's code blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.M | re.S)


def test_readme_shows_the_rules_the_program_runs():
    shown = README[README.index(BEGIN):README.index(END)].split("\n", 1)[1].strip()
    assert shown == rules_table(), "run: python3 tests/test_house.py"


def test_readme_reaches_the_demo_in_its_first_screen():
    head = README.splitlines()[:25]
    assert any("minigrid demo" in line and "pip install" in line for line in head)
    assert any("pytest" in line and "pip install" in line for line in head)


def test_readme_settings_are_settings():
    (text,) = blocks("ini")
    names = [line.partition("=")[0].strip() for line in text.splitlines() if "=" in line]
    assert names and set(names) <= set(minigrid.Settings.__dataclass_fields__)


def test_readme_sections_of_plugins_can_be_read(tmp_path):
    """As they stand, for they are copied: a comment behind a value would be part of it."""
    kinds = [kind for plugin in minigrid.plugins for kind in vars(plugin).values()
             if isinstance(kind, type) and kind.__name__.endswith("Settings")]
    shown = [text for text in blocks("text") if text.startswith("[")]
    assert shown
    for text in shown:
        (tmp_path / "setup.cfg").write_text(text)
        section, names = re.match(r"\[(\w+)\]", text)[1], set(re.findall(r"^(\w+) =", text, re.M))
        (kind,) = [k for k in kinds if names <= set(k.__dataclass_fields__)]
        minigrid.read_settings(tmp_path / "setup.cfg", kind, section)


def test_what_a_worker_reports_keeps_its_kind():
    """The place of a skip must be a tuple, or all ends in an error where something is skipped."""
    assert conftest.sendable({"place": ("a", 1), "log": ["\udc80"]}) \
        == {"place": ("a", 1), "log": ["\\udc80"]}


def test_readme_names_every_command():
    shown = subprocess.run([sys.executable, str(ROOT / "minigrid.py"), "--help"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^    (\w+) ", shown, re.M)
    assert len(commands) >= 9
    assert [c for c in commands if f"minigrid {c}" not in README] == []


def test_readme_application_and_its_commands(tmp_path):
    (code,) = blocks("python")
    (tmp_path / "darts.py").write_text(code)
    lines = [line[2:] for block in blocks("console") for line in block.splitlines()
             if line.startswith("$ ") and "darts.py" in line]
    assert lines == ["minigrid try darts.py", "minigrid run darts.py"]
    for line in lines:
        done = subprocess.run([sys.executable, str(ROOT / "minigrid.py"), *line.split()[1:]],
                              cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    kept = (tmp_path / "data" / "results" / "darts.jsonl").read_text().splitlines()
    shown = json.loads(blocks("json")[0])
    assert len(kept) == 10 and shown in map(json.loads, kept)


def test_readme_exchange_is_the_real_one(tmp_path):
    """Send the README's requests to the server; every field shown must come back, and no other."""
    register, scheduler, upload = [b for b in blocks("http") if b.startswith(("POST", "PUT"))]
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "minigrid.py"), "serve", "--port", "0", "--host", "127.0.0.1",
         "--apps", str(ROOT / "plugins" / "apps" / "squares.py"), "--data", str(tmp_path / "data")],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.strip() for line in server.stdout if line.startswith("  http://"))
        given, shown = split_exchange(register)
        user = ask(url + "/register", given)
        assert set(user) == set(shown)
        given, shown = split_exchange(scheduler)
        got = ask(url + "/scheduler", {**given, "authenticator": user["authenticator"]})
        assert shape(got) == shape(shown)
        assert got["assignments"][0]["name"] == shown["assignments"][0]["name"]
        target = got["assignments"][0]["output"]["url"]
        body = upload.split("\n\n")[1].encode()
        answer = ask(target, body, {"Authorization": f"Bearer {user['authenticator']}",
                                    "Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"})
        assert answer == json.loads(upload.split("\n\n")[2])
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0
        server.stdout.close()


def split_exchange(block):
    """Split 'POST /path', request and reply of a README block."""
    request, reply = block.split("\n", 1)[1].split("\n\n")
    return json.loads(request), json.loads(reply)


def shape(value):
    """Reduce a JSON value to its keys and types."""
    if isinstance(value, dict):
        return {key: shape(v) for key, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value[:1]]
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def ask(url, body, headers={}):
    """Send a request with the standard library; return its JSON."""
    import urllib.request
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "PUT" if isinstance(body, bytes) else "POST"
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    minigrid.load_plugins(minigrid.Settings.plugins.split())  # They have rules of their own.
    start, end = README.index(BEGIN), README.index(END)
    first = README[start:].split("\n", 1)[0]
    (ROOT / "README.md").write_text(f"{README[:start]}{first}\n{rules_table()}\n{README[end:]}")
