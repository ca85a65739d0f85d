"""The start program as BOINC clients get it: files of this folder, made ready to be sent.

A client runs start.sh or start.cmd, which finds a Python and has start.py run the job by the
harness of volunteer.py: one harness, so that both kinds of volunteers compute alike.
"""

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACEHOLDER = 'HARNESS = ""  # filled in by the server with the harness of volunteer.py\n'


def build(start_source, harness):
    """Return start.py with the harness in it, as bytes. Raises ValueError if it has no place."""
    if start_source.count(PLACEHOLDER) != 1:
        raise ValueError("start.py has no line for the harness, or several")
    lines = "".join(f"    {line!r}\n" for line in harness.splitlines(keepends=True))
    return start_source.replace(PLACEHOLDER, f"HARNESS = (\n{lines})\n").encode()


def read_harness(source):
    """Return the harness in the text of volunteer.py, which is read and never imported.

    Raises ValueError if there is none.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["HARNESS"]:
            return ast.literal_eval(node.value)
    raise ValueError("volunteer.py has no HARNESS")


def start_files(which):
    """Return the files of the start program for clients on "unix" or "windows", or all ("both").

    Each is a dict: name, content (bytes; line ends as their readers want them, whatever a checkout
    has made of them), boinc (which clients get it) and open_name (its name in the slot: for
    start.cmd not the same, see there). The first one is the main program.
    """
    def text(name, folder=HERE):
        return (folder / name).read_text(encoding="utf-8")

    harness = read_harness(text("volunteer.py", HERE.parent))
    files = [
        dict(name="start.sh", content=text("start.sh").encode(), boinc="unix",
             open_name="start.sh"),
        dict(name="start.cmd", content=text("start.cmd").replace("\n", "\r\n").encode(),
             boinc="windows", open_name="projects.cmd"),
        dict(name="start.py", content=build(text("start.py"), harness), boinc="both",
             open_name="start.py")]
    return [file for file in files if "both" in (which, file["boinc"]) or which == file["boinc"]]
