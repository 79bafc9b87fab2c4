"""Test a cell's panel without a kernel: its HTML, its messages, and the status line."""

from __future__ import annotations

import base64
import json
import re
import time

import pytest

from rankbook.output.by_rank import BlockAdded, BlockRemoved, OutputBlock, OutputHeader, TextAppended
from rankbook.widgets import output_panel
from rankbook.widgets.output_panel import (
    CellPanel,
    balanced_html,
    bundle_html,
    columns_per_row,
    is_live,
    piece_html,
    skeleton,
    text_of,
    with_rows,
)
from rankbook.widgets.rendering import to_html


@pytest.fixture
def panel():
    cell_panel = CellPanel("rankbook-panel-1", "cell [3]", (0, 1), "grid")
    cell_panel.sent = []
    cell_panel.send = cell_panel.sent.append
    yield cell_panel
    cell_panel.close()


def browser_state(panel):
    """Return the state of a browser that has received all messages."""
    return json.loads(panel.whole)


def test_output_before_the_display_is_in_the_first_bundle(panel):
    panel.apply(
        [
            BlockAdded(OutputBlock(0, (0,), text="one\n")),
            TextAppended(0, "two & three\n"),
            OutputHeader({"text/html": "<i>head</i>"}),
        ]
    )
    assert panel.sent == []
    bundle = panel.bundle()
    assert bundle["text/plain"] == "cell [3] on ranks 0-1"
    assert re.sub("<[^>]+>", "", browser_state(panel)["pieces"]) == "[0]one\ntwo &amp; three\n"
    assert browser_state(panel)["head"] == "<i>head</i>"


def test_later_changes_are_sent_once_with_numbers(panel):
    panel.bundle()
    panel.apply([BlockAdded(OutputBlock(0, (0,), text="x" * 500))])
    for _ in range(50):
        panel.apply([TextAppended(0, "y")])
    numbers = [message["number"] for message in panel.sent]
    assert numbers == list(range(1, 52))
    assert panel.sent[-1]["changes"] == [["more", 0, "y"]]
    assert browser_state(panel)["number"] <= 2  # not again for each


def test_late_browser_requests_the_whole_output(panel):
    panel.bundle()
    panel.apply([BlockAdded(OutputBlock(0, (0,), text="one"))])
    panel.apply([BlockAdded(OutputBlock(1, (1,), data={"text/html": "<b>two</b>"})), BlockRemoved(0)])
    panel._handle({"op": "all"})
    assert browser_state(panel)["number"] == 2
    assert "<b>two</b>" in browser_state(panel)["pieces"]
    assert "one" not in browser_state(panel)["pieces"]


def test_complete_state_is_sent_to_browsers_that_do_not_answer(panel, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(output_panel.time, "monotonic", lambda: clock[0])
    panel.bundle()
    wholes = []
    for tick in range(200):
        clock[0] = tick / 10
        panel.apply([TextAppended(0, "y")] if tick else [BlockAdded(OutputBlock(0, (0,), text="x"))])
        if (number := browser_state(panel)["number"]) not in wholes:
            wholes.append(number)
    assert 4 <= len(wholes) <= 10


def test_selection_of_the_reader_is_kept(panel):
    panel.apply([BlockAdded(OutputBlock(0, (1,), text="one"))])
    panel._handle({"op": "choose", "choice": "1", "arrived": 2})
    panel._handle({"op": "choose", "choice": "0", "arrived": 1})  # its thread was slower
    panel._handle({"op": "choose", "choice": "<script>", "arrived": 3})
    reloaded = panel.skeleton
    html = panel.end([OutputBlock(0, (1,), text="one")])["text/html"]
    for item in (reloaded, html):
        assert re.findall(r'value="(\w+)"[^>]* checked', item) == ["1"]


def test_forgotten_output_is_named(panel):
    panel.apply(
        [
            BlockAdded(OutputBlock(0, (0,), text="earlier")),
            BlockAdded(OutputBlock(1, (0,), text="new")),
            BlockRemoved(0, forgotten=True),
        ]
    )
    html = panel.end([])["text/html"]
    assert "previous output is omitted" in html
    assert "earlier" not in html


def test_text_is_never_markup():
    html = piece_html(OutputBlock(0, (0,), text="<script>alert(1)</script> & \x1b[1;31mred\x1b[0m"), (0, 1))
    assert "<script>" not in html
    assert '<span class="rb-bold rb-red">red</span>' in html
    assert "<script>" not in skeleton("n", "<script>", (0,), "merged")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("\x1b[32mgreen\x1b[39m not", '<span class="rb-green">green</span> not'),
        ("\x1b[38;5;196mfar\x1b[0m", "far"),
        ("\x1b[48;5;1mbehind\x1b[0m", "behind"),
        ("\x1b[38;2;1;2;3;1mfar\x1b[22m near", '<span class="rb-bold">far</span> near'),
        ("\x1b[2Kgone\x1b]0;title\x07", "gone"),
        ("\x1b[94mbright\x1b[m", '<span class="rb-blue">bright</span>'),
    ],
)
def test_a_terminals_colours_are_classes(text, html):
    assert to_html(text) == html


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "image/gif", "image/webp"])
def test_a_picture_cannot_leave_its_attribute(kind):
    html = piece_html(
        OutputBlock(0, (0,), data={kind: 'x" onerror="alert(1)', "text/plain": '" onload="alert(2)'}), (0,)
    )
    assert 'onerror="' not in html and 'onload="' not in html
    assert f'<img src="data:{kind};base64,x&quot; onerror=&quot;alert(1)"' in html


@pytest.mark.parametrize("text", ["\x1b[" + "9" * 5_000 + "mtext", "\x1b[" + "1;" * 500_000 + "mtext\x1b[m"])
def test_a_very_long_escape_sequence_costs_linear_time(text):
    start = time.perf_counter()
    assert "text" in to_html(text)
    assert time.perf_counter() - start < 5


def test_ranks_stand_in_their_columns():
    def columns(ranks):
        return re.search(r"--rb-columns:([\d/-]+)", piece_html(OutputBlock(0, ranks), (0, 2, 3)))[1]

    assert columns((2,)) == "2/3"
    assert columns((2, 3)) == "2/4"
    assert columns((0, 3)) == "1/-1"


def test_bundle_is_rendered_as_html():
    assert bundle_html({"text/plain": "a", "text/html": "<b>a</b>"}) == "<b>a</b>"
    assert bundle_html({"image/jpeg": "QUJD\n", "text/plain": '"x"'}).startswith(
        '<img src="data:image/jpeg;base64,QUJD"'
    )
    assert bundle_html({"application/x-own": {}}) == "<p>(application/x-own)</p>"
    retina = OutputBlock(0, (0,), data={"image/png": "QUJD"}, metadata={"image/png": {"width": 432, "height": 288}})
    assert 'alt="image" width="432">' in piece_html(retina, (0,))
    table = {"application/vnd.dataresource+json": {}, "text/html": "<table></table>", "text/plain": "t"}
    assert not is_live(table) and bundle_html(table) == "<table></table>"
    chart = {"application/vnd.plotly.v1+json": {}, "text/html": "<div></div><script>draw()</script>", "text/plain": "c"}
    assert is_live(chart) and bundle_html(chart) == "<pre>c</pre>"
    slider = {"application/vnd.jupyter.widget-view+json": {}, "text/html": "<p>3</p>", "text/plain": "s"}
    assert is_live(slider) and bundle_html(slider) == "<pre>s</pre>"
    assert text_of([OutputBlock(0, (0, 1), data={"application/x-own": {}})]) == "[0-1] (application/x-own)"
    heading = {"text/plain": "<IPython.core.display.Markdown object>", "text/markdown": "# Epoch 3"}
    assert is_live(heading) and bundle_html(heading) == "<pre># Epoch 3</pre>"
    formula = {"text/plain": "<IPython.core.display.Math object>", "text/latex": "$x^2$"}
    assert is_live(formula) and bundle_html(formula) == "<pre>$x^2$</pre>"
    symbols = {"text/plain": "x**2", "text/latex": "$x^2$"}
    assert is_live(symbols) and bundle_html(symbols) == "<pre>x**2</pre>"
    frame = {"text/plain": "t", "text/latex": "$t$", "text/html": "<table></table><script></script>"}
    assert not is_live(frame) and bundle_html(frame) == frame["text/html"]


SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9"><image href="x" onerror="alert(1)"/></svg>'


@pytest.mark.parametrize("text", [SVG, SVG.replace(' xmlns="http://www.w3.org/2000/svg"', "")])
def test_svg_is_an_image_of_its_own(text):
    html = bundle_html({"image/svg+xml": text, "text/plain": "<IPython.core.display.SVG object>"})
    content = re.fullmatch('<img src="data:image/svg\\+xml;base64,([^"]+)" alt="image">', html)[1]
    assert base64.b64decode(content).decode() == SVG
    assert 'alt="loss" width="40">' in bundle_html(
        {"image/svg+xml": text, "text/plain": "loss"}, {"image/svg+xml": {"width": 40}}
    )
    chart = {"application/javascript": "", "image/svg+xml": text, "text/plain": "c"}
    assert is_live(chart) and bundle_html(chart) == "<pre>c</pre>"


@pytest.mark.parametrize(
    ("metadata", "is_isolated"),
    [
        ({"isolated": True}, True),
        ({"text/html": {"isolated": True}}, True),
        ({"isolated": True, "text/html": {"isolated": False}}, False),
        ({"isolated": True, "text/html": {"width": 3}}, True),
        ({"image/svg+xml": {"isolated": True}}, False),
    ],
)
def test_isolated_html_is_a_page_of_its_own(metadata, is_isolated):
    html = bundle_html({"text/html": '<style>p {color: "red"}</style><p>'}, metadata)
    assert ("<style>" not in html) == is_isolated
    assert ("<iframe" in html) == is_isolated
    if is_isolated:
        assert 'sandbox="allow-scripts"' in html
        assert 'srcdoc="&lt;style&gt;p {color: &quot;red&quot;}&lt;/style&gt;&lt;p&gt;"' in html


@pytest.mark.parametrize(
    ("written", "balanced"),
    [
        ("<div class='alert'>loss", "<div class='alert'>loss</div>"),
        ("</div></div>loss</p>", "loss"),
        ("<p>one<p>two<br/>three", "<p>one<p>two<br/>three"),
        ("<p>one</p><b>two", "<p>one</p><b>two</b>"),
        ("<ul><li>a<li><div>b<li>c<ul><li>d", "<ul><li>a</li><li><div>b</div></li><li>c<ul><li>d</li></ul></li></ul>"),
        ("<dl><dt>a<dd><div>b<dt>c</dl>", "<dl><dt>a</dt><dd><div>b</div></dd><dt>c</dt></dl>"),
        ("<button><div><button>", "<button><div></div></button><button></button>"),
        ("<b><i>x</b></i>y", "<b><i>x</i></b>y"),
        ("<div>a<table><tr><td></div>b<td>c", "<div>a<table><tr><td>b</td><td>c</td></tr></table></div>"),
        ("<table><tr><td><div>a<tr><td>b</table>", "<table><tr><td><div>a</div></td></tr><tr><td>b</td></tr></table>"),
        ("<table><div><table>", "<table><div></div></table><table></table>"),
        ("<div/>a", "<div/>a</div>"),
        ("<svg viewBox='0 0 9 9'><path d='M'/><g>", "<svg viewBox='0 0 9 9'><path d='M'></path><g></g></svg>"),
        ("<svg><div/><br/></svg><math/>", "<svg><div></div><br/></svg><math></math>"),
        ("<math><mspace/><mi>x", "<math><mspace></mspace><mi>x</mi></math>"),
        ("<!doctype html><html><head><style>a>b{}</style></head><body>a<!-- b -->", "<style>a>b{}</style>a"),
        ("<script>a && b</script>&lt;b&gt; & c < d &copy;", "<script>a && b</script>&lt;b&gt; &amp; c &lt; d ©"),
        ("<plaintext>a</div>", "a"),
    ],
)
def test_html_is_balanced(written, balanced):
    assert balanced_html(written) == balanced
    assert balanced_html(balanced) == balanced
    assert bundle_html({"text/html": written}) == balanced


def test_very_deep_html_costs_linear_time():
    start = time.perf_counter()
    assert balanced_html("<div>" * 100_000) == "<div>" * 100_000 + "</div>" * 100_000
    assert time.perf_counter() - start < 5


def placed(*of: tuple[int, ...], ranks: int = 6) -> list[tuple[str, int]]:
    """The columns and rows of blocks in the grid."""
    chosen = range(ranks)
    htmls = [piece_html(OutputBlock(key, block, text="x"), chosen) for key, block in enumerate(of)]
    html = with_rows(htmls, of, chosen)
    rows = re.findall(r"--rb-columns:([^;\"]+)(?:;--rb-row:(\d+))?", html)
    return [(columns, int(row or 0)) for columns, row in rows]


@pytest.mark.parametrize(("count", "columns"), [(0, 1), (1, 1), (4, 4), (5, 3), (6, 3), (8, 4), (9, 3), (64, 4)])
def test_the_grid_has_at_most_four_columns(count, columns):
    assert columns_per_row(count) == columns


def test_up_to_four_ranks_are_in_one_row_of_the_grid():
    assert placed((0,), (3,), (0, 1, 2, 3), (0, 2), ranks=4) == [("1/2", 0), ("4/5", 0), ("1/5", 0), ("1/-1", 0)]


def test_more_ranks_are_below_and_a_block_of_both_rows_separates():
    assert placed((0,), (1,), (0,), (4,), (3,), (1, 2), (0, 1, 2, 3, 4, 5), (3,), (0,)) == [
        ("1/2", 2),
        ("2/3", 2),
        ("1/2", 3),
        ("2/3", 4),
        ("1/2", 4),
        ("2/4", 3),
        ("1/-1", 5),
        ("1/2", 7),
        ("1/2", 6),
    ]


def test_the_panel_that_stays_has_the_rows():
    panel = CellPanel("rankbook-panel-1", "cell [3]", range(5), "grid")
    blocks = [OutputBlock(key, (rank,), text=f"of {rank}\n") for key, rank in enumerate((4, 0))]
    panel.apply([BlockAdded(block) for block in blocks])
    html = panel.end(blocks)["text/html"]
    assert [row for _, row in re.findall(r"(--rb-columns:[^;\"]+);--rb-row:(\d+)", html)] == ["3", "2"]
