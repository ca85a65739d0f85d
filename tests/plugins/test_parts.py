"""Pages of parts: all that is filled in is text, and what a browser may do with it."""

import base64
import hashlib
import re
import sys
from html.parser import HTMLParser

import pytest
from make import NOW

EVIL = "<script>alert(1)</script>"
TRICKY = [EVIL, "\"onload=\"alert(1)", "'><svg/onload=alert(1)>", "{{1+1}}", "% import os",
          "\udcff", "</tbody>", f"@{NOW}"]
TIME = re.compile(r"@(\d{9,11})\b")


def plugin():
    """The module under test, as the process has loaded it."""
    return sys.modules["minigrid_plugin_pages"]


def show(parts, title="Things", **more):
    return plugin().show_page(title, parts, NOW, **more)


class Tags(HTMLParser):
    """The tags of a page with their attributes' names, and its text."""

    def __init__(self, answer):
        super().__init__()
        self.tags, self.texts, self.values = [], [], []
        self.feed(answer.body.decode())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, *[name for name, _ in attributes]))
        self.values += [value for _, value in attributes]

    def handle_data(self, text):
        self.texts.append(text)


def everywhere(text):
    """A part with a text in every place that there is."""
    cells = [text, (text, text), [text, text * 50]]
    return dict(title=text, texts=cells, numbers=[(text, text)], facts=[(text, c) for c in cells],
                caption=text, head=[text, "b", "c"], rows=[cells], output=text, links=[cells[1]],
                forms=[(text, text, text, {"value": text})])


@pytest.mark.parametrize("text", TRICKY)
def test_nothing_that_is_filled_in_becomes_html(grid, text):
    page, plain = (Tags(show([everywhere(t)], t, json=t)) for t in (text, "plain"))
    assert page.tags == plain.tags
    shown = text.encode("utf-8", "replace").decode()
    assert page.texts.count(shown) == plain.texts.count("plain") > 15
    assert page.values.count(shown) == plain.values.count("plain") > 5


def test_a_part_that_is_misspelt_is_refused(grid):
    with pytest.raises(TypeError, match="tittle"):
        show([dict(tittle="x")])


def test_a_list_is_folded_if_it_is_long(grid):
    write = plugin().write_cell
    assert write([]) == "" and write(["a", "<b>"]) == "a; &lt;b&gt;"
    assert write(["x" * 20, "y" * 18]) == f"{'x' * 20}; {'y' * 18}"
    long = write(["one two " * 5, "<b>"])
    assert long.startswith("<details><summary>one two ") and " ...</summary>" in long
    assert long.endswith("<div>&lt;b&gt;</div></details>")


def test_times_are_told_to_the_script_only_where_a_page_wants_it(grid):
    part = dict(texts=[f"@{NOW} or so"], rows=[(f"at @{NOW}",)], head=("When",))
    answer = show([part], times=TIME)
    text = answer.body.decode()
    assert text.count('<time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13:20 UTC</time>') == 3
    (script,) = re.findall("<script>(.*?)</script>", text, re.S)
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"; script-src 'sha256-{known}'" in answer.headers["Content-Security-Policy"]
    answer = show([part])
    assert f"@{NOW} or so" in answer.body.decode() and b"<script" not in answer.body


def test_a_page_may_do_no_more_than_it_needs(grid):
    answer = show([], status=404)
    assert answer.status_code == 404 and answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["Content-Security-Policy"] == (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'")
    assert b'rel="icon"' not in answer.body  # The browser would not show it.
    more = show([], allow={"img-src": "data:", "form-action": "'self'"}, cache="no-store")
    assert more.headers["Cache-Control"] == "no-store" and b'rel="icon"' in more.body
    policy = more.headers["Content-Security-Policy"]
    assert "img-src data:" in policy and policy.count("form-action") == 1
    assert "form-action 'self'" in policy


def test_all_pages_lead_to_each_other(grid):
    text = show([]).body.decode()
    for address in ("/", "/top_users.php", "/home.php", "/nodes", "/trust", "/why"):
        assert f'<a href="{address}">' in text
