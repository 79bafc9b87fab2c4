"""The views in a narrow page, on paper and with nothing to show: every column within reach, and no word cut off."""

from __future__ import annotations

import re

import msgspec
import pytest

from rankbook.output.by_rank import BlockAdded, OutputBlock
from rankbook.protocol.telemetry import CheckpointFolder, GradientNorms, Placement, RankSave, Saves
from rankbook.widgets.checkpoints import CheckpointsView, folder_data, saves_data
from rankbook.widgets.live_view import STATIC, to_json
from rankbook.widgets.output_panel import CellPanel
from rankbook.widgets.placement import PlacementView, dynamic_data, static_data
from rankbook.widgets.shards import ShardsView
from tests.browser.test_vscode import OPEN, PAGE
from tests.widgets import fakes

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(240)]

BLOCKS = [OutputBlock(key, (rank,), text=f"of {rank}\n") for key, rank in enumerate((7, 0, 1, 2, 3, 4, 5, 6, 0))]
COMMON = OutputBlock(20, tuple(range(8)), text="of all\n")
LATER = OutputBlock(21, (5,), text="later\n")
BOXES = """(pieces) => [...pieces.querySelectorAll(".rb-piece")].map((piece) => {
  const box = piece.getBoundingClientRect();
  return [piece.dataset.ranks, Math.round(box.left), Math.round(box.top)];
})"""
UNREACHABLE = """([scroller, selector]) => [...document.querySelectorAll(selector)].filter((cell) => {
  const area = document.querySelector(scroller), edges = area.getBoundingClientRect();
  area.scrollLeft = 0;
  const right = cell.getBoundingClientRect().right;
  area.scrollLeft = area.scrollWidth;
  return edges.right > innerWidth || (right > edges.right && cell.getBoundingClientRect().right > edges.right + 1);
}).length"""


@pytest.fixture
def page(browser):
    new_page = browser.new_page(viewport={"width": 600, "height": 800})
    yield new_page
    new_page.close()


def opened_panel() -> CellPanel:
    panel = CellPanel("rankbook-panel-1", "cell [3]", range(8), "grid")
    panel.apply([BlockAdded(block) for block in (*BLOCKS, COMMON, LATER)])
    panel.bundle()
    return panel


def check_rows(boxes) -> None:
    left_edges = {ranks: left_edges for ranks, left_edges, _ in boxes}
    tops = {ranks: top for ranks, _, top in reversed(boxes)}
    assert (
        left_edges["0"]
        == left_edges["4"]
        < left_edges["1"]
        == left_edges["5"]
        < left_edges["2"]
        == left_edges["6"]
        < left_edges["3"]
        == left_edges["7"]
    )
    assert tops["0"] == tops["1"] == tops["2"] == tops["3"] < tops["4"] == tops["5"] == tops["6"] == tops["7"]
    assert tops["0"] < boxes[8][2] < tops["4"], "what rank 0 says next is in its own row of ranks"
    assert tops["7"] < tops["0 1 2 3 4 5 6 7"] < boxes[-1][2]


def test_the_grid_of_eight_ranks_has_two_rows_live_and_afterwards(page):
    panel = opened_panel()
    page.set_content(PAGE % ("", ""))
    state = {name: getattr(panel, name) for name in ("name", "skeleton", "whole")}
    page.evaluate(OPEN, {"source": str(panel._esm), "state": state})
    live = page.locator(".rb-pieces").evaluate(BOXES)
    check_rows(live)
    page.set_content(PAGE % ("", panel.end([*BLOCKS, COMMON, LATER])["text/html"]))
    check_rows(page.locator(".rb-pieces").evaluate(BOXES))
    assert page.evaluate(UNREACHABLE, [".rb-pieces", ".rb-piece:not([data-place=''])"]) == 0


def test_every_column_of_the_table_of_ranks_can_be_scrolled_to(page):
    feed = fakes.FakeFeed(4)
    view = PlacementView(feed)
    view._repr_mimebundle_()
    page.set_content(PAGE % ((STATIC / "view.css").read_text(encoding="utf-8"), ""))
    state = {name: getattr(view, name) for name in ("placement_fixed", "placement_state", "still")}
    page.evaluate(OPEN, {"source": str(view._esm), "state": state})
    page.wait_for_selector(".rb-row[data-rank='3']")
    assert page.evaluate(UNREACHABLE, [".rb-ranks", ".rb-row > *"]) == 0
    view.close()
    feed.stop()


BEYOND = """(view) => {
  const edge = view.getBoundingClientRect().right + 1, scroller = ".rb-ranks, .rb-scroll, .rb-totals, .rb-list, pre";
  return [...view.querySelectorAll("*")]
    .filter((each) => !each.closest(scroller) && !each.closest("svg"))
    .filter((each) => each.getBoundingClientRect().right > edge || each.scrollWidth > view.clientWidth + 1)
    .map((each) => each.outerHTML.slice(0, 120));
}"""
LONG = "/lustre/projects/a-team-with-a-long-name/checkpoints/" + "run_" * 30


class LongPathCheckpoints(fakes.FakeCheckpoints):
    """The same three checkpoints in a folder with a very long name."""

    def list_checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(LONG, super().list_checkpoints().checkpoints, "")


def show(page, view) -> None:
    """Open a view in a plain page, with the state that it has now."""
    view._repr_mimebundle_()
    page.set_content(PAGE % ((STATIC / "view.css").read_text(encoding="utf-8"), ""))
    names = [f"{part}_{kind}" for part in view._models for kind in ("fixed", "state")]
    state = {name: getattr(view, name) for name in (*names, "still")}
    page.evaluate(OPEN, {"source": str(view._esm), "state": state})


@pytest.fixture
def views():
    feed = fakes.FakeFeed(4)
    feed.last["saves"] = fakes.saves(0.5)
    views_by_name = {
        "placement": PlacementView(feed),
        "shards": ShardsView(feed, "model"),
        "checkpoints": CheckpointsView(feed, LongPathCheckpoints()),
    }
    yield views_by_name
    for view in views_by_name.values():
        view.close()
    feed.stop()


@pytest.mark.parametrize("width", [320, 600])
@pytest.mark.parametrize(
    ("name", "expected_text"), [("placement", "4 ranks"), ("shards", "6 tensors"), ("checkpoints", "step-30")]
)
def test_narrow_view_has_no_content_beyond_its_edge(page, views, name, expected_text, width):
    page.set_viewport_size({"width": width, "height": 800})
    show(page, views[name])
    view = page.locator(".rankbook-view")
    expect(view).to_contain_text(expected_text)
    assert view.evaluate(BEYOND) == []


def test_a_rank_s_share_of_a_save_stays_in_one_line(page, views):
    page.set_viewport_size({"width": 320, "height": 800})
    show(page, views["checkpoints"])
    rename = msgspec.structs.replace
    save = rename(fakes.saves().saves[0].save, written=1_230_000_000, total=12_300_000_000)
    state = to_json(saves_data(Saves((RankSave(0, save),), 0.0)))
    page.evaluate("state => change('checkpoints_state', state)", state)
    amount = page.locator(".rb-totals > span").filter(has_text=" of ").first
    label = page.locator(".rb-totals > span").filter(has_text="rank 0").first
    expect(amount).to_have_text("1.23 GB of 12.3 GB")
    assert amount.bounding_box()["height"] == label.bounding_box()["height"]


def test_the_ranks_of_a_save_are_in_order_also_if_a_lower_one_reports_later(page, views):
    show(page, views["checkpoints"])
    labels = page.locator(".rb-totals > span").filter(has_text="rank ")
    save = msgspec.structs.replace(fakes.saves().saves[0].save, name="late")
    for ranks in ((0, 3), (0, 1, 2, 3)):
        state = to_json(saves_data(Saves(tuple(RankSave(rank, save) for rank in ranks), 0.0)))
        page.evaluate("state => change('checkpoints_state', state)", state)
    expect(labels).to_have_text([f"rank {rank}" for rank in range(4)])
    expect(labels.first).to_be_visible()
    done = to_json(saves_data(Saves((RankSave(0, msgspec.structs.replace(save, phase="done")),), 0.0)))
    page.evaluate("state => change('checkpoints_state', state)", done)
    expect(page.get_by_text("late in /ckpt")).to_be_visible()
    expect(labels.first).to_be_hidden()  # full bars say nothing more


def test_a_save_of_fewer_ranks_under_the_same_name_has_fewer_bars(page, views):
    show(page, views["checkpoints"])
    labels = page.locator(".rb-totals > span").filter(has_text="rank ")
    for ranks in (4, 2):
        page.evaluate("state => change('checkpoints_state', state)", to_json(saves_data(fakes.saves(ranks=ranks))))
        expect(labels).to_have_text([f"rank {rank}" for rank in range(ranks)])
    expect(page.locator(".rb-totals .rb-bar")).to_have_count(2)


def test_all_ranks_are_printed(page):
    feed = fakes.FakeFeed(64)
    view = PlacementView(feed)
    show(page, view)
    expect(page.locator("[data-rank='63']")).to_be_attached()
    cut = "ranks => ranks.scrollHeight > ranks.clientHeight + 1"
    assert page.locator(".rb-ranks").evaluate(cut)
    page.emulate_media(media="print")
    assert not page.locator(".rb-ranks").evaluate(cut)
    assert page.locator(".rb-parameters").first.evaluate("each => getComputedStyle(each).printColorAdjust") == "exact"
    view.close()
    feed.stop()


def test_empty_views_show_a_message_only(page, views):
    show(page, views["placement"])
    page.evaluate("state => change('placement_fixed', state)", to_json(static_data(Placement((), 0.0, ""))))
    page.evaluate("state => change('placement_state', state)", to_json(dynamic_data(Placement((), 0.0, ""))))
    expect(page.locator(".rankbook-view h2")).to_have_text("no rank has replied yet")
    expect(page.get_by_role("grid")).to_be_hidden()
    show(page, views["checkpoints"])
    empty = to_json(folder_data(CheckpointFolder("/ckpt", (), "")))
    page.evaluate("state => change('checkpoints_fixed', state)", empty)
    expect(page.locator(".rankbook-view h2")).to_have_text("0 checkpoints in /ckpt")
    expect(page.get_by_text("There is no checkpoint yet.")).to_be_visible()
    expect(page.get_by_role("table")).to_be_hidden()
    show(page, ShardsView(fakes.FakeFeed(), ""))
    expect(page.get_by_text("Enter the name of a variable of the ranks")).to_be_visible()
    expect(page.get_by_role("listbox")).to_be_hidden()


def test_parameters_of_cpu_ranks_can_be_seen_and_the_course_is_drawn(page):
    feed = fakes.FakeFeed(2)
    gb = fakes.GB
    small = fakes.MemoryUse(24 * gb, gb // 10, gb // 10, gb // 5, gb // 10, 24 * gb - gb // 2, 0)

    def placement(at: float) -> Placement:
        ranks = [fakes.rank_placement(rank, device="cpu", memory=small, rate=1.0 + at) for rank in range(2)]
        return Placement(tuple(ranks), at, "main")

    feed.last["placement"] = placement(100.0)
    view = PlacementView(feed)
    show(page, view)
    row = page.locator("[data-rank='1']")
    bar = row.locator(".rb-bar").first.bounding_box()
    assert row.locator(".rb-parameters").bounding_box()["width"] > 0.15 * bar["width"]
    thin = row.locator(".rb-thin i").bounding_box()
    assert thin["width"] < 0.05 * bar["width"]
    expect(page.get_by_text("scaled to the largest rank")).to_be_visible()
    line = row.locator("polyline").last
    assert line.get_attribute("points") is None, "one point is no line"
    page.evaluate("state => change('placement_state', state)", to_json(dynamic_data(placement(103.0))))
    expect(line).to_have_attribute("points", "43.2,1.3 48.0,1.0")
    view.close()
    feed.stop()


def test_gradient_norms_are_shown_by_module_with_their_course(page):
    norms = GradientNorms("model", 1, 5.0, (("embed", 3.0), ("blocks.0", 4.0)), "blocks.0: differs")

    def state(step: int, norm: float) -> str:
        changed = msgspec.structs.replace(norms, step=step, norm=norm)
        return to_json(dynamic_data(msgspec.structs.replace(fakes.placement(2), gradients=(changed,))))

    feed = fakes.FakeFeed(2)
    view = PlacementView(feed)
    show(page, view)
    panel = page.get_by_role("region", name="gradient norms")
    expect(panel).to_be_hidden()
    for step, norm in ((1, 4.0), (2, 5.0)):
        page.evaluate("state => change('placement_state', state)", state(step, norm))
        # Only what was drawn is part of the course.
        expect(panel.locator("summary")).to_contain_text(f"gradients of model at step {step}: norm {norm:g}")
    expect(panel.locator("summary")).to_contain_text("▲ blocks.0: differs")
    expect(panel.locator("polyline")).to_have_attribute("points", re.compile(r"^0\.0,.* 48\.0,"))
    panel.locator("summary").click()
    expect(panel.get_by_role("row", name="blocks.0 4 64 %")).to_be_visible()
    page.evaluate("state => change('placement_state', state)", to_json(dynamic_data(fakes.placement(2))))
    expect(panel).to_be_hidden()
    view.close()
    feed.stop()
