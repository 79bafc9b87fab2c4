"""Test a cell's output by rank and its status line, in a real kernel with real ranks."""

from __future__ import annotations

import contextlib
import re
import sys
from threading import Event
from types import SimpleNamespace

import ipywidgets
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher, DisplayPublisher
from IPython.utils.capture import capture_output

from rankbook.magics import output_panel, views
from rankbook.magics.magics import _is_called_by_code
from rankbook.magics.output_panel import CapturedSink, JupyterSink, OutputWidgetSink, Panel, RequestedViews, sink_for
from rankbook.output.merger import ClearOutput, OutputMerger, RichOutput, Stream
from rankbook.protocol import RESULT
from rankbook.protocol.messages import Display, Text
from tests.conftest import Gate, wait_until

pytestmark = pytest.mark.processes

WIDGET = "application/vnd.jupyter.widget-view+json"
PRINTS = "\nprint('same'); print('of', rank); rank"


def panel(outcome):
    """The display that a front end shows in the end, after its updates."""
    (bundle,) = [display for display in outcome.displays if "rankbook-panel" in display.get("text/html", "")]
    assert WIDGET not in bundle
    return bundle


def by_rank(html):
    """Return the text of every rank from the static HTML."""
    text_by_rank = {0: "", 1: ""}
    for ranks, inner in re.findall(r'data-ranks="([\d ]+)".*?</p>(.*?)</div>', html, re.DOTALL):
        for rank in map(int, ranks.split()):
            text_by_rank[rank] += re.sub("<[^>]+>", "", inner)
    return text_by_rank


def test_widgets_are_live_below_the_panel(notebook):
    outcome = notebook.ok(
        "%%distributed --view tabs\nimport ipywidgets\nfrom IPython.display import display\n"
        "display(ipywidgets.IntSlider(value=3 + rank))\n"
        "chart = display({'application/x-chart': rank, 'text/plain': 'first'}, raw=True, display_id=True)\n"
        "chart.update({'application/x-chart': 5 + rank, 'text/plain': 'second'}, raw=True)"
    )
    bundle = panel(outcome)
    assert by_rank(bundle["text/html"]) == {rank: f"IntSlider(value={3 + rank})second" for rank in (0, 1)}
    below = [display for display in outcome.displays if display is not bundle]
    assert [list(item) for item in below[::2]] == [["text/plain"]] * 4
    assert sorted(element["text/plain"] for element in below[::2]) == ["[0]", "[0]", "[1]", "[1]"]
    assert len([entry for entry in below[1::2] if WIDGET in entry]) == 2
    assert sorted(member["application/x-chart"] for member in below[1::2] if WIDGET not in member) == [5, 6]


def test_cleared_displays_are_removed_below_the_panel(notebook):
    outcome = notebook.ok(
        "%%distributed --view tabs\nfrom IPython.display import clear_output, display\nimport time\n"
        "for step in range(3):\n    clear_output(wait=True)\n    time.sleep(0.1)\n"
        "    display({'application/x-chart': step + 10 * rank, 'text/plain': 'a chart'}, raw=True)"
    )
    bundle = panel(outcome)
    assert by_rank(bundle["text/html"]) == {0: "a chart", 1: "a chart"}
    below = [display for display in outcome.displays if display is not bundle and display["text/plain"]]
    assert sorted(item["application/x-chart"] for item in below if "application/x-chart" in item) == [2, 12]
    assert sorted(element["text/plain"] for element in below if "application/x-chart" not in element) == ["[0]", "[1]"]


@pytest.mark.parametrize(("view", "first"), [("tabs", "0"), ("grid", "grid"), ("merged", "merged")])
def test_a_panel_stays_as_html_and_text_that_need_nothing(notebook, view, first):
    outcome = notebook.ok(f"%%distributed --view {view}{PRINTS}")
    bundle = panel(outcome)
    assert by_rank(bundle["text/html"]) == {0: "same\nof 0\n0", 1: "same\nof 1\n1"}
    assert sorted(bundle["text/plain"].splitlines()) == ["[0-1] same", "[0] 0", "[0] of 0", "[1] 1", "[1] of 1"]
    assert re.findall(r'value="(\w+)" class="[\w-]+" checked', bundle["text/html"]) == [first]
    assert outcome.stdout == ""


def test_rich_outputs_stay_with_their_rank(notebook):
    bundle = panel(
        notebook.ok(
            "%%distributed --view tabs\nfrom IPython.display import HTML, display\n"
            "handle = display(HTML(f'<b>before {rank}</b>'), display_id=True)\n"
            "handle.update(HTML(f'<b>new {rank}</b>'))\n"
            "display({'image/png': 'iVBORw0K', 'text/plain': 'a picture'}, raw=True)\nprint('\\x1b[31mred\\x1b[0m <i>')"
        )
    )
    html_by_rank = by_rank(bundle["text/html"])
    assert "new 0" in html_by_rank[0]
    assert "new 1" in html_by_rank[1]
    assert "before" not in bundle["text/html"]
    assert '<img src="data:image/png;base64,iVBORw0K" alt="a picture">' in bundle["text/html"]
    assert '<span class="rb-red">red</span> &lt;i&gt;' in bundle["text/html"]


def test_a_cell_that_shows_nothing_has_no_panel(notebook):
    outcome = notebook.ok("%%distributed --view grid\nx = 1")
    assert outcome.displays == []


def test_an_error_is_reported_below_the_panel_and_what_was_printed_before_is_in_it(notebook):
    outcome = notebook.run("%%distributed --view tabs\nprint('before', rank)\n1 / rank")
    assert outcome.status == "error"
    assert "ZeroDivisionError" in outcome.traceback
    assert panel(outcome)["text/plain"].splitlines() == ["[0] before 0", "[1] before 1", "[1] 1.0"]


def test_output_of_a_thread_after_the_end_is_shown_below(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    message = notebook.send(
        "%%distributed --view tabs\nimport os, threading, time\nprint('now')\n"
        f"def late():\n    {gate.wait}\n    print('late')\n"
        "threading.Thread(target=late).start()"
    )
    outcome = notebook.finish(message)
    assert "late" not in panel(outcome)["text/plain"]
    gate.open()
    notebook.follow(message, outcome, lambda progress: "late" in progress.stdout)
    assert outcome.stdout.splitlines()[0] in ("[0-1] late", "[0] late", "[1] late")


def test_late_text_keeps_its_stream():
    items = []
    ended = SimpleNamespace(on_change=[], result=object())
    panel = Panel(SimpleNamespace(emit=items.extend), 3, (0, 1), "tabs")
    merger = OutputMerger([0, 1], key="k", cluster_key="c", view=panel.page)

    def show(data):
        merger.add_output(1, Text(cell=1, stream="stderr", data=data), 0.0)
        merger.drain_rank(1, 1.0)

    show(b"before\n")
    panel.follow(ended)
    items.clear()
    show(b"appended to a block of the panel\n")
    for _ in range(2):
        merger.add_output(0, Text(cell=1, stream="stderr", data=b"new\n"), 2.0)
        merger.drain_rank(0, 2.0)
    assert items == [
        Stream("stderr", "[1] appended to a block of the panel\n"),
        Stream("stderr", "[0] new\n"),
        Stream("stderr", "[0] new\n"),
    ]


def test_a_display_below_the_panel_gives_way_to_an_update_that_the_panel_shows():
    items = []
    panel = Panel(SimpleNamespace(emit=items.extend), 3, (0, 1), "tabs")
    merger = OutputMerger([0, 1], key="k", cluster_key="c", view=panel.page)

    def show(kind, data):
        items.clear()
        merger.add_output(1, Display(cell=1, metadata={}, display_id="d", kind=kind, data=data), 0.0)
        merger.drain_rank(1, 0.0)
        return [(item.data, item.update) for item in items if not item.display_id.endswith("-of")]

    markdown = {"text/plain": "<IPython.core.display.Markdown object>", "text/markdown": "running"}
    assert (markdown, False) in show("display", markdown)
    assert show("update", {"text/html": "<b>done</b>"}) == [({"text/plain": ""}, True)]
    assert show("update", markdown) == [(markdown, True)]


@pytest.fixture
def ended():
    """Return a panel whose cell has ended, and what it shows from then on."""
    items = []
    panel = Panel(SimpleNamespace(emit=items.extend), 3, (0, 1), "tabs")
    merger = OutputMerger([0, 1], key="k", cluster_key="c", view=panel.page)

    def show(**fields):
        message = Display(cell=1, metadata={}, display_id="figure", **fields)
        merger.add_output(1, message, 0.0)
        merger.drain_rank(1, 0.0)

    show(kind="display", data={"text/plain": "before"})
    panel.follow(SimpleNamespace(on_change=[], result=object()))
    items.clear()
    return SimpleNamespace(items=items, merger=merger, show=show)


def test_a_bar_after_the_end_is_updated_in_place(ended):
    for number in range(5):
        ended.merger.add_output(1, Text(cell=1, stream="stderr", data=b"\r%d%%" % number), float(number))
        ended.merger.flush(number + 0.5)
    assert [item.data for item in ended.items] == [{"text/plain": f"[1] {number}%"} for number in range(5)]
    assert [item.update for item in ended.items] == [False, True, True, True, True]
    assert len({item.display_id for item in ended.items}) == 1 and ended.items[0].display_id
    ended.merger.add_output(1, Text(cell=1, stream="stderr", data=b"\r      \r"), 6.0)
    ended.merger.flush(6.5)
    assert ended.items[-1] == RichOutput({"text/plain": ""}, {}, ended.items[0].display_id, update=True)


def test_a_display_after_the_end_is_updated_in_place(ended):
    for number in range(3):
        ended.show(kind="update", data={"text/plain": str(number)})
    label, *states = ended.items
    assert (label.data, label.update) == ({"text/plain": "[1]"}, False)
    assert [(item.data["text/plain"], item.update) for item in states] == [("0", False), ("1", True), ("2", True)]
    assert len({item.display_id for item in states}) == 1 and states[0].display_id


def test_a_view_that_a_clear_overtakes_is_shown_once(monkeypatch):
    asked, gate, published = [], Event(), []

    def outputs():
        asked.append(None)
        assert gate.wait(20)
        return [SimpleNamespace(data={"text/plain": "view"}, still=None, display_id="d")]

    monkeypatch.setattr(views, "make_requested", lambda _: SimpleNamespace(outputs=outputs))
    requested, request = RequestedViews(published.append), {"view": "placement"}
    requested.show(request)
    wait_until(lambda: asked, timeout=20, what="the first thread")
    requested.output_cleared()
    requested.show(request)
    gate.set()
    requested.wait_shown()
    assert len(published) == 1


def test_the_notebooks_view_shows_the_last_cell_so_and_those_that_follow(notebook):
    notebook.ok("%%distributed" + PRINTS)
    outcome = notebook.ok("%distributed view tabs")
    assert "rank by rank, in tabs" in outcome.stdout
    assert by_rank(panel(outcome)["text/html"]) == {0: "same\nof 0\n0", 1: "same\nof 1\n1"}
    assert panel(notebook.ok("%%distributed\nprint(rank)"))
    assert notebook.ok("%%distributed --quiet\nprint(rank)").displays == []
    notebook.ok("%distributed view merged")
    assert notebook.ok("%%distributed\nprint(rank)").stdout == "[0] 0\n[1] 1\n"


def test_panel_sends_little_more_than_the_text(notebook):
    outcome = notebook.ok("%%distributed --view tabs\nfor i in range(20_000): print(rank, i)", timeout=30)
    assert panel(outcome)["text/plain"].count("\n") == 39_999


def test_unknown_view_is_reported_with_the_valid_ones(notebook):
    outcome = notebook.run("%distributed view sideways")
    assert outcome.status == "error"
    assert "merged" in outcome.text
    assert "tabs" in outcome.text


# The line above ------------------------------------------------------------------------------------------------------

WAITS = """%%distributed{options}
import os, time
print('first')
{gate.wait}
print('last')"""


@pytest.fixture
def run_slow_cell(notebook, tmp_path):
    """Run a cell until what is shown of it fulfils a condition; its outcome."""

    def run(options, condition):
        gate = Gate(tmp_path / "gate")

        def look(outcome):
            if condition(outcome):
                gate.open()

        message = notebook.send(WAITS.format(options=options, gate=gate))
        outcome = notebook.finish(message, seen=look, timeout=60)
        assert outcome.status == "ok"
        return outcome

    return run


def strip(outcome):
    return [display["text/plain"] for display in outcome.displays if display.get("text/plain", "").startswith("cell [")]


def test_a_cell_that_takes_a_while_has_a_line_above_it_and_keeps_its_output(run_slow_cell):
    lines = []

    def at_line(outcome):
        lines.extend(strip(outcome))
        return any("at line 4" in item for item in strip(outcome))

    outcome = run_slow_cell("", at_line)
    assert re.fullmatch(r"cell \[\d+\] on ranks 0-1 · [1-9]\d*\.\d s · running", lines[0])
    assert re.fullmatch(r"cell \[\d+\] on ranks 0-1: ok after [1-9]\d*\.\d s", strip(outcome)[0])
    assert outcome.stdout == "[0-1] first\n[0-1] last\n"


@pytest.mark.slow
def test_status_line_keeps_the_message_about_the_start_of_the_ranks(notebook, run_slow_cell):
    notebook.ok("%distributed stop")
    outcome = run_slow_cell("", strip)
    assert outcome.cleared == 0
    assert re.fullmatch(r"2 ranks are ready: .*\n\[0-1\] first\n\[0-1\] last\n", outcome.stdout)


def test_status_line_keeps_the_message_of_a_queued_cell(notebook, run_slow_cell, tmp_path):
    gate = Gate(tmp_path / "other")
    notebook.ok(f"%%distributed --background\n{gate.wait}")

    def has_started_and_line(outcome):
        if "queued, waiting for" in outcome.stderr:
            gate.open()
        return strip(outcome)

    outcome = run_slow_cell("", has_started_and_line)
    assert outcome.cleared == 0
    assert outcome.stderr.endswith("queued, waiting for ranks 0-1\n")
    assert outcome.stdout == "[0-1] first\n[0-1] last\n"


def test_status_line_keeps_what_the_code_around_the_magic_has_printed(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    body = f"print('first')\n{gate.wait}\nprint('last')"
    message = notebook.send(f"print('before')\nget_ipython().run_cell_magic('distributed', '', {body!r})")
    outcome = notebook.finish(message, seen=lambda so_far: gate.open() if strip(so_far) else None, timeout=60)
    assert outcome.status == "ok" and outcome.cleared == 0
    assert outcome.stdout == "before\n[0-1] first\n[0-1] last\n"


def test_status_line_is_in_the_panel_of_its_cell(run_slow_cell):
    outcome = run_slow_cell(" --view tabs", lambda outcome: any(WIDGET in display for display in outcome.displays))
    assert "first" in panel(outcome)["text/plain"]
    assert "last" in panel(outcome)["text/plain"]


def test_a_quiet_cell_has_none(notebook):
    outcome = notebook.ok("%%distributed --quiet\nimport time; time.sleep(1.5)")
    assert outcome.displays == []
    assert outcome.stdout == ""


def test_cell_that_ended_before_it_was_followed_is_shown_completely():
    items = []
    cell = SimpleNamespace(on_change=[], result=None)
    panel = Panel(SimpleNamespace(emit=items.extend), 3, (0,), "tabs")
    merger = OutputMerger([0], key="k", cluster_key="c", view=panel.page)
    merger.add_output(0, Text(cell=1, stream="stdout", data=b"early\n"), 0.0)
    merger.close(1.0)
    cell.result = object()
    panel.follow(cell)
    assert [item.update for item in items] == [False, True]
    assert items[1].data["text/plain"] == "[0] early"
    cell.on_change[0]()
    assert len(items) == 2


# The sinks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def front_end():
    """Return a shell in a kernel that keeps what is sent to its front end."""
    sent = []
    session = SimpleNamespace(send=lambda _, kind, content, **__: sent.append((kind, content)))
    kernel = SimpleNamespace(session=session, iopub_socket=None, get_parent=lambda _: {})
    return SimpleNamespace(kernel=kernel, display_pub=DisplayPublisher(), sent=sent)


def test_text_that_the_notebook_printed_precedes_the_output_of_a_magic(front_end, monkeypatch):
    for name in ("stdout", "stderr"):
        stream = SimpleNamespace(flush=lambda name=name: front_end.sent.append(name))
        monkeypatch.setattr(sys, name, stream)
    sink_for(front_end).emit([Stream("stdout", "of a magic")])
    assert front_end.sent == ["stdout", "stderr", ("stream", {"name": "stdout", "text": "of a magic"})]


def test_capture_keeps_text_and_displays_and_the_front_end_gets_none(front_end):
    with capture_output(display=False) as captured:
        front_end.display_pub = CapturingDisplayPublisher()
        sink = sink_for(front_end, 3)
        sink.emit([Stream("stdout", "[0] text\n"), RichOutput({"text/plain": "[0] 5"}, {RESULT: True})])
        sink.emit([Stream("stderr", "late\n"), RichOutput({"text/plain": "new"}, {}, "d", update=True)])
    assert isinstance(sink, CapturedSink) and not front_end.sent
    assert (captured.stdout, captured.stderr) == ("[0] text\n", "late\n")
    assert front_end.display_pub.outputs == [
        {"data": {"text/plain": "[0] 5"}, "metadata": {}, "transient": {}, "update": False},
        {"data": {"text/plain": "new"}, "metadata": {}, "transient": {"display_id": "d"}, "update": True},
    ]


def test_what_is_not_captured_goes_to_the_front_end(front_end, tmp_path):
    shown = [("display_data", {"data": {"text/plain": "[0] 5"}, "metadata": {}, "transient": {}})]
    items = [Stream("stdout", "[0] text\n"), RichOutput({"text/plain": "[0] 5"}, {})]
    with capture_output(display=False) as captured:
        sink_for(front_end).emit(items)
    assert (captured.stdout, front_end.sent) == ("[0] text\n", shown)
    with (tmp_path / "log").open("w") as log, contextlib.redirect_stdout(log):
        sink_for(front_end).emit([*items, Stream("stderr", "of stderr\n")])
    assert (tmp_path / "log").read_text() == "[0] text\n"
    assert front_end.sent[1:] == [*shown, ("stream", {"name": "stderr", "text": "of stderr\n"})]
    with capture_output(stdout=False, display=False):
        front_end.display_pub = CapturingDisplayPublisher()
        sink_for(front_end).emit(items)
    assert front_end.sent[3:] == [("stream", {"name": "stdout", "text": "[0] text\n"})]
    assert len(front_end.display_pub.outputs) == 1


@pytest.fixture
def output_widget(front_end):
    """Return a widget that captures the output of the running cell, as in `with widget:`."""
    widget = ipywidgets.Output()
    front_end.kernel.get_parent = lambda _: {"header": {"msg_id": "click"}}
    widget.msg_id = "click"
    yield widget
    widget.close()


def test_only_an_output_widget_that_captures_this_cell_is_found(front_end, output_widget):
    sink = sink_for(front_end)
    assert isinstance(sink, OutputWidgetSink) and not sink.shows_live
    sink.emit([Stream("stdout", "text\n")])
    assert front_end.sent == [("stream", {"name": "stdout", "text": "text\n"})]
    for message_id in ("another", ""):
        output_widget.msg_id = message_id
        assert type(sink_for(front_end)) is JupyterSink
    output_widget.msg_id = "click"
    output_widget.close()
    assert type(sink_for(front_end)) is JupyterSink


def test_output_after_the_end_of_the_capture_is_added_to_the_widget(front_end, output_widget, monkeypatch):
    monkeypatch.setattr(output_panel, "_LATE_INTERVAL", 0.01)
    sink, shown = sink_for(front_end, 3), {"output_type": "stream", "name": "stdout", "text": "clicked\n"}
    output_widget.outputs = (shown,)  # set by the front end
    output_widget.msg_id = ""
    sink.emit([Stream("stdout", "late\n"), RichOutput({"text/plain": "a widget"}, {}, "panel")])
    late = {"output_type": "stream", "name": "stdout", "text": "late\n"}
    wait_until(lambda: len(output_widget.outputs) == 3, timeout=10, what="the widget shows the late output")
    sink.emit([RichOutput({"text/plain": "of a rank"}, {}, "d", update=True)])
    assert [kind for kind, _ in front_end.sent] == ["update_display_data"], "for the same display elsewhere"
    sink.emit([RichOutput({"text/plain": "its end"}, {RESULT: True}, "panel")])
    end = {"output_type": "display_data", "data": {"text/plain": "its end"}, "metadata": {}}
    wait_until(lambda: output_widget.outputs[2:] == (end,), timeout=10, what="the end replaces the panel")
    assert output_widget.outputs == (shown, late, end)
    sink.emit([ClearOutput(wait=True), Stream("stdout", "new\n")])
    wait_until(lambda: [o.get("text") for o in output_widget.outputs] == ["new\n"], timeout=10, what="a clear")


IN_OUTPUT = """import ipywidgets
with ipywidgets.Output(): get_ipython().run_cell_magic('distributed', {!r}, {!r})"""
LIVE = "import time\nprint('loading ...', end='', flush=True)\ntime.sleep(1.5)\nprint(' done')"


def test_in_an_output_widget_a_cell_updates_no_display(notebook):
    outcome = notebook.ok(IN_OUTPUT.format("", LIVE))
    assert outcome.text == "[0-1] loading ... done\n", "neither a status line nor an unfinished line"
    outcome = notebook.ok(IN_OUTPUT.format("--view tabs", LIVE))
    kinds = [message["msg_type"] for message in outcome.messages]
    assert "update_display_data" not in kinds
    assert WIDGET in outcome.displays[0], "the panel is live"
    assert "loading ... done" in by_rank(outcome.displays[-1]["text/html"])[1]


def test_capture_around_a_cell_for_the_ranks_keeps_its_output(notebook):
    code = "import time\nprint('caught', end=' ', flush=True)\ntime.sleep(1)\nprint('whole')\nrank + 5"
    assert notebook.ok(f"%%capture log\n%%distributed --ranks 0\n{code}").text == ""
    shown = notebook.ok("print(log.stdout, log.outputs[0].data['text/plain'])").stdout
    assert shown == "[0] caught whole\n [0] 5\n"
    outcome = notebook.ok(f"%%capture --no-display log\n%%distributed --ranks 0 --view tabs\n{code}")
    assert (outcome.stdout, outcome.displays[-1]["text/plain"]) == ("", "[0] 5")
    assert notebook.ok("print(log.stdout, end='')").stdout == "[0] caught whole\n"


@pytest.mark.parametrize(
    ("code", "is_called_by_code"),
    [
        ("%%distributed --ranks 0\nx", False),
        ("\n\n%%distributed\nx", False),
        ("for lr in rates: run(lr)", True),
        ("%run other.ipynb", True),
        ("%%time\n%%distributed\nx", True),
    ],
)
def test_code_around_the_magic_is_recognized(front_end, code, is_called_by_code):
    front_end.kernel.get_parent = lambda _: {"content": {"code": code}}
    assert _is_called_by_code(sink_for(front_end)) == is_called_by_code


def test_without_a_front_end_nothing_is_cleared_and_no_code_is_looked_for():
    assert not _is_called_by_code(sink_for(SimpleNamespace(kernel=None)))
