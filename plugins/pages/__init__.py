"""One look for all pages: other plugins say what is on them, here it becomes HTML.

Most pages consist of parts, which their plugins hand over as dicts of what `Part` lists: they are
made by `show_page`. A page with a body of its own is put into the same frame by `html_page`. All
that is filled in is escaped here; no script runs in a page but its own, whatever slips in.
"""

import base64
import functools
import hashlib
import html
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import bottle

from minigrid import plugged, project

HERE = Path(__file__).resolve().parent
POLICY = {"default-src": "'none'", "style-src": "'unsafe-inline'", "base-uri": "'none'",
          "form-action": "'none'", "frame-ancestors": "'none'"}
FOLDED = 40  # letters of a list that are seen without a click


@dataclass
class Part:
    """One part of a page.

    A cell is a text; (text, address), a link; or a list of texts, which is folded if it is long.
    """

    title: str = ""
    texts: tuple = ()  # cells
    numbers: tuple = ()  # (name, text), in large letters
    facts: tuple = ()  # (name, cell); an empty one is left out
    caption: str = ""  # of the table
    head: tuple = ()
    kinds: dict = field(default_factory=dict)  # column -> "number", "when", "name" or "why"
    rows: tuple = ()  # of cells
    output: str = ""  # what a program wrote
    forms: tuple = ()  # (address, parameter, label, {attribute of the field: value})
    links: tuple = ()
    lead: bool = False  # the texts are what matters most here


def show_page(title, parts, now, status=200, times=None, json="", **more):
    """Answer with a page of parts, as of `now`; `json` is the address of the same as JSON.

    Where `times` is given, what this pattern finds in texts are times, as seconds; a script shows
    them as the reader's clock does. `more` is as for html_page().
    """
    body = fill_in(
        HERE / "parts.html", title=title, parts=[Part(**part) for part in parts], now=now,
        json=json, project=project.settings.name, nav=sum(plugged("NAV"), ()),
        write=functools.partial(write_cell, times=times), write_time=write_time,
        write_row=functools.partial(write_row, times=times))
    return html_page(f"{title} - {project.settings.name}", body, status,
                     script=HERE / "times.js" if times else None, **more)


def html_page(title, body, status=200, cache="no-cache", allow=(), head="", style=None,
              script=None):
    """Answer with a page around a body; body and head are HTML, escaped where need be.

    `allow` is what this page needs beyond POLICY, as {directive: sources}; `style` and `script` are
    files with more of that.
    """
    allow, script = dict(allow), read(script) if script else ""
    text = fill_in(
        HERE / "frame.html", title=title, body=body, head=head, script=script,
        style=read(HERE / "style.css") + (read(style) if style else ""),
        icon="data:" in allow.get("img-src", ""))
    return bottle.HTTPResponse(text.encode("utf-8", "replace"), status, headers={
        "Content-Type": "text/html; charset=utf-8", **page_headers(cache, allow, script)})


def page_headers(cache="no-cache", allow=(), script=""):
    """Return the headers of a page, which tell browsers what it may do."""
    known = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    policy = {**POLICY, **({"script-src": f"'sha256-{known}'"} if script else {}), **dict(allow)}
    return {"Cache-Control": cache, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": "; ".join(map(" ".join, policy.items()))}


def fill_in(path, **values):
    """Fill in a template, which escapes all that is not marked as safe."""
    return template(path).render(**values)


@functools.lru_cache(maxsize=None)
def template(path):
    """Read a template."""
    return bottle.SimpleTemplate(read(path))


@functools.lru_cache(maxsize=None)
def read(path):
    """Read a file that a page consists of."""
    return path.read_text(encoding="utf-8")


def write_cell(cell, times=None):
    """Write a cell as HTML; see Part."""
    if isinstance(cell, tuple):
        text, address = cell
        return f'<a href="{html.escape(address)}">{html.escape(str(text))}</a>'
    if isinstance(cell, list):
        whole, texts = "; ".join(cell), "".join(f"<div>{html.escape(text)}</div>" for text in cell)
        short = html.escape(textwrap.shorten(whole, FOLDED, placeholder=" ..."))
        return f"<details><summary>{short}</summary>{texts}</details>" if len(whole) > FOLDED \
            else html.escape(whole)
    text = html.escape(str(cell))
    return times.sub(lambda found: write_time(int(found[1])), text) if times else text


def write_row(head, cells, kinds, times=None, active=True):
    """Write a row of a table as HTML; on small screens it stands as a block, with its heads."""
    shown = (write_cell(cell, times) for cell in cells)
    return f'<tr role="row" data-active="{str(active).lower()}">' + "".join(
        f'<td role="cell" data-label="{html.escape(name)}" class="{kinds.get(name, "")}">'
        f'{text and f"<span>{text}</span>"}</td>' for name, text in zip(head, shown)) + "</tr>\n"


def write_time(t):
    """Write a time for all time zones, and for programs."""
    stamp, text = (time.strftime(form, time.gmtime(t)) for form in (
        "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S UTC"))
    return f'<time datetime="{stamp}">{text}</time>'
