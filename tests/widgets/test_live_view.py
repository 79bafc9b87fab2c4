"""Test a view with and without a kernel: visibility, messages, and actions during a cell."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree as ET

import ipykernel
import pytest
from anywidget._util import enable_custom_widget_manager_once
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.events import EventManager, available_events

from rankbook.magics.output_panel import as_message
from rankbook.magics.views import Dashboard
from rankbook.output.merger import RichOutput
from rankbook.protocol import RESULT, WIDGET_VIEW
from rankbook.widgets import live_view
from rankbook.widgets.checkpoints import CheckpointsView
from rankbook.widgets.placement import PlacementView
from rankbook.widgets.shards import ShardsView
from tests.conftest import wait_until
from tests.widgets.fakes import FakeCheckpoints, FakeFeed, placement

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def feed():
    fake_feed = FakeFeed()
    yield fake_feed
    fake_feed.stop()


def look(view, op="look", **more):
    view._message_received({"rankbook": f"{time.monotonic_ns()}", "view": "page", "op": op, **more})


@pytest.mark.parametrize(
    "make",
    [
        PlacementView,
        lambda feed: ShardsView(feed, "model", search="norm"),
        lambda feed: CheckpointsView(feed, FakeCheckpoints()),
        lambda feed: Dashboard(feed, FakeCheckpoints(), variable="model"),
    ],
    ids=["placement", "shards", "checkpoints", "dashboard"],
)
def test_every_view_has_its_state_in_the_bundle_and_as_a_picture(feed, make, tmp_path):
    view = make(feed)
    data, _metadata = view._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    for name in view._models:
        word = {"placement": "4 ranks of main", "shards": "6 tensors", "checkpoints": "3 checkpoints"}[name]
        assert word in data["text/html"] and word in data["text/plain"] and word in view.summary()
    assert ET.parse(view.save(tmp_path / "x.svg")).getroot().tag.endswith("svg")
    view.close()
    assert not any(feed.watchers.values())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (PlacementView, "4 ranks of main"),
        (lambda feed: ShardsView(feed, "model"), "6 tensors"),
        (lambda feed: CheckpointsView(feed, FakeCheckpoints()), "3 checkpoints"),
        (lambda feed: Dashboard(feed, FakeCheckpoints()), "4 ranks of main"),
    ],
    ids=["placement", "shards", "checkpoints", "dashboard"],
)
def test_a_view_that_was_never_shown_asks_the_ranks_before_it_is_saved(feed, make, text, tmp_path):
    view = make(feed)
    assert text in view.save(tmp_path / "x.svg").read_text(encoding="utf-8")
    assert not any(feed.watchers.values())
    view.close()


def test_view_watches_only_while_it_is_visible(feed, monkeypatch):
    view = PlacementView(feed)
    reported = []
    monkeypatch.setattr(view, "send", reported.append)
    assert not feed.watchers["placement"]
    look(view, parts=["placement"])
    wait_until(lambda: [*map(list, reported)] == [["seen"]], timeout=10, what="the browser hears that it was heard")
    wait_until(lambda: len(feed.watchers["placement"]) == 1, timeout=10, what="it is watched")
    look(view, "away")
    wait_until(lambda: not feed.watchers["placement"], timeout=10, what="it is not")
    look(view, parts=["placement"])
    wait_until(lambda: len(feed.watchers["placement"]) == 1, timeout=10, what="it is watched again")
    look(view, "away")
    wait_until(lambda: not feed.watchers["placement"], timeout=10, what="it is not")
    view._handle({"rankbook": "second", "view": "other", "op": "away", "arrived": 1_000_001})
    view._handle({"rankbook": "first", "view": "other", "op": "look", "arrived": 1_000_000, "parts": ["placement"]})
    assert not feed.watchers["placement"]  # who has gone has gone, whichever thread was faster
    view.close()
    look(view, parts=["placement"])
    wait_until(lambda: len(reported) == 4, timeout=10, what="it is heard")
    assert not feed.watchers["placement"]  # of a page that does not know yet


def test_browser_without_recent_heartbeat_counts_as_hidden(feed, monkeypatch):
    monkeypatch.setattr(live_view, "LEASE", 0.3)
    view = PlacementView(feed)
    look(view, parts=["placement"])
    wait_until(lambda: feed.ended == 1, timeout=10, what="silence is nobody looking")
    assert not feed.watchers["placement"]
    view.close()


class Shell:
    """The events of a shell, which runs no cells."""

    def __init__(self):
        self.events = EventManager(self, available_events)


def test_no_lease_ends_during_a_cell_where_no_browser_can_be_heard_meanwhile(feed, monkeypatch):
    monkeypatch.setattr(live_view, "LEASE", 0.3)
    monkeypatch.setattr(PlacementView, "_hook_early_messages", lambda view: setattr(view, "_delivered_late", True))
    shell = Shell()
    monkeypatch.setattr(live_view, "get_ipython", lambda: shell)
    view = PlacementView(feed)
    look(view, parts=["placement"])
    expired = Event()
    schedule = view._schedule_expiry
    monkeypatch.setattr(view, "_schedule_expiry", lambda: (expired.set(), schedule()))
    for _ in range(6):
        assert expired.wait(10)
        expired.clear()
    assert feed.watchers["placement"], "the cell that shows it runs for longer than a lease"
    shell.events.trigger("post_execute")
    wait_until(lambda: not feed.watchers["placement"], timeout=10, what="silence between two cells is nobody looking")
    view.close()


def test_renewed_html_is_no_output_of_a_cell_that_captures(feed, monkeypatch):
    sent, publisher = [], CapturingDisplayPublisher()
    session = SimpleNamespace(send=lambda _, kind, content, **__: sent.append((kind, content["transient"])))
    kernel = SimpleNamespace(session=session, iopub_socket=None)
    shell = SimpleNamespace(kernel=kernel, display_pub=publisher, parent_header={})
    monkeypatch.setattr(live_view, "get_ipython", lambda: shell)
    live_view.show_display({"text/html": "<p>new</p>"}, "still", update=True)
    assert (sent, publisher.outputs) == ([("update_display_data", {"display_id": "still"})], [])


def test_a_bundle_that_no_browser_takes_up_is_watched_for_a_while_only(feed, monkeypatch):
    monkeypatch.setattr(live_view, "LEASE", 0.3)
    view = PlacementView(feed)
    view._repr_mimebundle_()
    wait_until(lambda: feed.ended == 1, timeout=10, what="it was watched, and nobody came")
    assert not feed.watchers["placement"]
    view.close()


def test_the_last_state_is_always_sent(feed):
    view = PlacementView(feed)
    look(view, parts=["placement"])
    wait_until(lambda: bool(feed.watchers["placement"]), timeout=10, what="it is watched")
    for tick in range(500):
        feed.push("placement", placement(4, tick=tick, at=float(tick)))
    wait_until(lambda: '"at":499.0' in view.placement_state, timeout=10, what="the last one")
    view.close()


def test_older_state_is_not_sent_after_a_newer_one(feed, monkeypatch):
    view = PlacementView(feed)
    look(view, parts=["placement"])
    wait_until(lambda: bool(feed.watchers["placement"]), timeout=10, what="it is watched")
    part = view._models["placement"]
    state = part.dynamic_json

    def slow() -> str:
        old = state()
        monkeypatch.setattr(part, "dynamic_json", state)
        feed.push("placement", placement(4, at=7.0))
        Event().wait(0.3)  # in which the other thread would send it
        return old

    monkeypatch.setattr(part, "dynamic_json", slow)
    view._send_state()  # as a cell's thread does that shows it
    wait_until(lambda: '"at":7.0' in view.placement_state, timeout=10, what="the last one")
    view.close()


def test_an_error_is_the_answer(feed, monkeypatch):
    view = PlacementView(feed)
    answers = []
    monkeypatch.setattr(view, "send", answers.append)
    look(view, "detail", part="placement", rank=99)
    look(view, "detail", part="nowhere", rank=0)
    wait_until(lambda: len(answers) == 2, timeout=10, what="both are answered")
    assert {next(iter(answer["error"].split(":"))) for answer in answers} == {
        "there is no detail of {'rank'",
        "KeyError",
    }
    view.close()


def test_duplicate_message_is_handled_once(feed):
    view = PlacementView(feed)
    message = {"rankbook": "m1", "op": "act", "part": "placement", "kind": "interrupt", "rank": 1}
    view._message_received(message, early=True)
    view._message_received(dict(message))
    wait_until(lambda: bool(feed.acts), timeout=10, what="it is heard")
    assert feed.acts == [("interrupt", 1)] and not view._handled_early
    for noise in (None, {}, {"rankbook": 3}, "text"):
        view._message_received(noise)
    view.close()


def test_a_view_that_was_closed_is_its_last_state(feed, monkeypatch):
    bundles = []
    monkeypatch.setattr(live_view, "show_display", lambda bundle, *_, **__: bundles.append(bundle))
    view = PlacementView(feed)
    view._repr_mimebundle_()
    view.close()
    view._ipython_display_()
    assert "4 ranks of main" in bundles[-1]["text/html"]
    assert not feed.watchers["placement"]


def test_the_static_html_says_how_old_a_tab_is_that_nobody_sees(feed):
    view = Dashboard(feed, FakeCheckpoints(), variable="model")
    view._repr_mimebundle_()
    assert "as of" not in view.html() + view.text()
    look(view, parts=["placement"])
    wait_until(lambda: view._opened == {"placement"}, timeout=10, what="one tab is shown")
    for said in (view.html(), view.text()):
        assert "placement as of" not in said
        assert "shards as of 20" in said and "checkpoints as of 20" in said
    look(view, parts=["checkpoints"])
    wait_until(lambda: view._opened == {"checkpoints"}, timeout=10, what="another tab is shown")
    assert "checkpoints as of" not in view.html() and "placement as of 20" in view.html()
    view.close()


def test_reopening_leaves_one_dashboard(feed):
    first = Dashboard.reopen(feed)
    second = Dashboard.reopen(feed)
    assert first is not second and first.comm is None and second.comm is not None
    second.close()


class FakeColab(ModuleType):
    """The part of `google.colab.output` that widgets need."""

    def __init__(self):
        super().__init__("google.colab.output")
        self._widgets = SimpleNamespace(_installed_url=None)
        self.calls = 0

    def enable_custom_widget_manager(self):
        self.calls += 1
        self._widgets._installed_url = "https://colab.example/manager.js"


@pytest.fixture
def colab(monkeypatch):
    module = FakeColab()
    monkeypatch.setitem(sys.modules, "google.colab.output", module)
    enable_custom_widget_manager_once.cache_clear()
    return module


IN_COLAB = {WIDGET_VIEW: {"colab": {"custom_widget_manager": {"url": "https://colab.example/manager.js"}}}}


def test_the_first_view_switches_colabs_widget_manager_on(feed, colab, monkeypatch):
    displayed = []
    monkeypatch.setattr(live_view, "display", lambda data, **options: displayed.append((data, options.get("metadata"))))
    monkeypatch.setattr(live_view, "has_front_end", lambda: True)
    view = PlacementView(feed)
    view._ipython_display_()
    view.close()
    (metadata,) = [metadata for data, metadata in displayed if WIDGET_VIEW in data]
    assert metadata == {**IN_COLAB, "rankbook_still": view.still}
    assert colab.calls == 1


def test_panels_and_widgets_of_ranks_reach_colabs_widget_manager(colab):
    assert as_message(RichOutput({"text/plain": "text"}, {}))[1]["metadata"] == {}
    assert colab.calls == 0, "it is needed for widgets only"
    for number in (None, 3):
        _, content = as_message(RichOutput({WIDGET_VIEW: {"model_id": "m"}}, {RESULT: True}), number)
        assert content["metadata"] == IN_COLAB
    assert colab.calls == 1


def test_other_front_ends_get_widgets_without_metadata(monkeypatch):
    monkeypatch.delitem(sys.modules, "google.colab.output", raising=False)
    assert as_message(RichOutput({WIDGET_VIEW: {"model_id": "m"}}, {}))[1]["metadata"] == {}


@pytest.mark.parametrize("late", [True, False])
def test_late_delivery_of_clicks_is_reported_once(feed, monkeypatch, late):
    texts = []
    monkeypatch.setattr(live_view, "show_display", lambda bundle, *_, **__: texts.append(bundle["text/plain"]))
    monkeypatch.setattr(live_view, "has_front_end", lambda: True)
    monkeypatch.setattr(live_view, "_late_messages_reported", False)
    for _ in range(2):
        view = PlacementView(feed)
        view._delivered_late = late
        view._ipython_display_()
        view.close()
    line = "With this version of ipykernel, views answer clicks after the running cell."
    assert texts.count(line) == int(late)


def test_the_last_state_is_in_the_saved_notebook_also_if_it_came_soon_after_another_one(feed, monkeypatch):
    htmls = []
    monkeypatch.setattr(live_view, "show_display", lambda bundle, *_, **__: htmls.append(bundle.get("text/html", "")))
    monkeypatch.setattr(live_view, "has_front_end", lambda: True)
    monkeypatch.setattr(live_view, "LEASE", 1.5)
    monkeypatch.setattr(live_view, "STATIC_HTML_INTERVAL", 1.0)
    view = PlacementView(feed)
    view._ipython_display_()

    def last_state_is_shown() -> bool:
        look(view, parts=["placement"])  # the page stays open
        return "line 17" in htmls[-1]

    feed.push("placement", placement(4, tick=7))
    wait_until(last_state_is_shown, timeout=10, what="it is renewed without another state")
    view.close()


# IPython 7 has a package `tests` on the path, which would hide ours
VIEW = f"""import sys; sys.path.insert(0, {str(ROOT / "tests" / "widgets")!r})
from fakes import FakeFeed
from rankbook.widgets.placement import PlacementView
feed = FakeFeed()
view = PlacementView(feed)
view.comm.comm_id"""
BLOCKED = """import select
feed.tick()
for _ in range(3000):
    if len(feed.acts) == 2: break
    select.select([], [], [], 0.01)
feed.stop()
feed.acts"""


@pytest.mark.processes
@pytest.mark.skipif(
    ipykernel.version_info[:2] < (7, 4), reason="before 7.4 the kernel reads nothing from the shell channel meanwhile"
)
def test_a_click_acts_while_a_cell_runs_and_never_again(module_notebook):
    """Deliver all clicks again at the end of the cell, as a front end without subshells does."""
    notebook = module_notebook
    view_output = notebook.ok(VIEW)
    comm_id = view_output.text.strip().strip("'")
    blocking = notebook.send(BLOCKED)
    client = notebook.client

    def send(number, **message):
        content = {"rankbook": f"c{number}", "view": "v", **message}
        data = {"comm_id": comm_id, "data": {"method": "custom", "content": content}}
        client.shell_channel.send(client.session.msg("comm_msg", data))

    send(0, op="act", part="placement", kind="interrupt", rank=3)
    for number in range(1, 1001):
        send(number, op="away")
    send(1001, op="act", part="placement", kind="interrupt", rank=2)
    outcome = notebook.finish(blocking)
    assert "[('interrupt', 3), ('interrupt', 2)]" in outcome.text
    assert outcome.seconds < 20
    assert "[('interrupt', 3), ('interrupt', 2)]" in notebook.ok("feed.acts").text


@pytest.mark.processes
def test_the_stored_outputs_are_the_view_and_its_html(module_notebook):
    outcome = module_notebook.ok(f"{VIEW}\nview")
    live_one, still = [data for data in outcome.displays if "widget-view" in str(data) or "ranks" in str(data)][:2]
    assert set(live_one) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert live_one["text/plain"] == "", "where only text can be shown, the other output says it"
    assert "<table>" in still["text/html"] and "4 ranks of main" in still["text/plain"]
