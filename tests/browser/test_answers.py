"""The views in a page where the test is the kernel: answers that come late, in the wrong order, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from rankbook.magics.views import Dashboard
from rankbook.protocol.telemetry import Holding
from rankbook.widgets.live_view import to_json
from rankbook.widgets.placement import dynamic_data, static_data
from rankbook.widgets.shards import static_data as shards_of
from rankbook.widgets.shards import tensor_of
from tests.widgets import fakes

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(60)]

OPEN = """async ({source, state}) => {
  const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
  const heard = {}, sent = [];
  const on = (event, told) => (heard[event] ||= []).push(told);
  const send = (message) => {
    if (window.gone) throw new Error("Cannot send");  // as JupyterLab says it
    sent.push(message);
  };
  window.asked = (op) => sent.filter((each) => each.op === op).length;
  window.reply = ([op, told, back]) => {  // to the last question of that kind, or to one that many before it
    const {rankbook} = sent.filter((each) => each.op === op).at(-1 - (back || 0));
    heard["msg:custom"].forEach((hear) => hear({reply: rankbook, ...told}));
  };
  window.change = ([name, value]) => {
    state[name] = value;
    (heard[`change:${name}`] || []).forEach((told) => told());
  };
  const model = {get: (name) => state[name], on, off() {}, send};
  window.end = module.default.render({model, el: document.getElementById("live")});
}"""
IDS = "() => [...document.querySelectorAll('[id]')].map(each => each.id)"
DETAIL = {
    "rank": 1,
    "stack": ["loss.backward()"],
    "output": ["step 11"],
    "variables": [["x", "int", "", "", "", "", "3"]],
}
SHARDS = to_json({**shards_of(fakes.shard_map()), "asked": 1})
WEIGHT, CONV = (tensor_of(fakes.sharded_tensor(kind, ranks=4)) for kind in (0, 4))


class Opened:
    """The dashboard in a page whose clock the test turns."""

    def __init__(self, page) -> None:
        self.page = page
        page.clock.install(time=0)
        page.clock.pause_at(1)
        page.set_content('<!doctype html><html lang="en"><main id="live"></main></html>')
        self.render()

    def render(self) -> None:
        ranks = fakes.placement(4)
        state = {"placement_fixed": to_json(static_data(ranks)), "placement_state": to_json(dynamic_data(ranks))}
        source = str(Dashboard._esm)
        self.page.evaluate(OPEN, {"source": source, "state": {**state, "shards_fixed": SHARDS, "still": "none"}})

    def reply(self, op: str, back: int = 0, **fields: object) -> None:
        self.page.evaluate("reply", [op, fields, back])

    def asked(self, op: str) -> int:
        return self.page.evaluate("asked", op)

    def change(self, name: str, value: str) -> None:
        self.page.evaluate("change", [name, value])
        self.page.clock.run_for(50)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()


@pytest.fixture
def opened(browser) -> Iterator[Callable[[], Opened]]:
    pages = []

    def make() -> Opened:
        pages.append(browser.new_page())
        return Opened(pages[-1])

    yield make
    for page in pages:
        page.close()


@pytest.mark.full
def test_rank_detail_is_shown_again_after_a_missing_answer(opened):
    view = opened()
    page = view.page
    page.locator("[data-rank='1']").click()
    detail = page.locator(".rb-near")
    view.reply("detail", answer=DETAIL)
    stack = detail.get_by_label("stack")
    expect(stack).to_have_text("loss.backward()")
    page.evaluate("window.row = document.querySelector('.rb-near tbody tr')")
    for answer, expected_text in (
        ({"error": "rank 1 did not answer"}, "rank 1 did not answer"),
        ({"answer": DETAIL}, "loss.backward()"),
        ({"answer": {**DETAIL, "stack": ["loss.item()"]}}, "loss.item()"),
    ):
        page.clock.run_for(2000)
        view.reply("detail", **answer)
        expect(stack).to_have_text(expected_text)
    assert page.evaluate("window.row.isConnected")  # what its reader may be copying
    detail.get_by_role("button", name="Restart …").click()
    expect(detail).to_contain_text("A restart deletes the rank's variables")
    detail.get_by_role("button", name="No", exact=True).click()
    expect(detail).not_to_contain_text("A restart deletes the rank's variables")


@pytest.mark.full
def test_rank_detail_stays_selected_and_is_queried_only_while_visible(opened):
    view = opened()
    page = view.page
    page.locator("[data-rank='1']").click()
    view.reply("detail", answer=DETAIL)
    picture = fakes.placement(4)
    holding = Holding("model", "net", "Linear", "", 6, 24, ("float32",), "cuda:0", "")
    ranks = tuple(msgspec.structs.replace(rank, holdings=(holding,)) for rank in picture.ranks)
    view.change("placement_fixed", to_json(static_data(msgspec.structs.replace(picture, ranks=ranks))))
    expect(page.locator(".rb-near")).to_contain_text("model net: Linear")
    expect(page.locator("[data-rank='1']")).to_have_attribute("aria-selected", "true")
    expect(page.locator("[data-rank='1']")).to_be_focused()
    view.tab("shards")
    request_count = view.asked("detail")
    page.clock.run_for(10_000)
    assert view.asked("detail") == request_count
    view.tab("placement")
    page.clock.run_for(2000)
    assert view.asked("detail") == request_count + 1


def test_rank_detail_is_closed_when_a_resize_removes_the_rank(opened):
    view = opened()
    page = view.page
    page.locator("[data-rank='3']").click()
    detail = page.locator(".rb-near")
    expect(detail).to_contain_text("rank 3 on node-0")
    page.evaluate("document.activeElement.blur()")
    ranks = fakes.placement(2)
    view.change("placement_fixed", to_json(static_data(ranks)))
    view.change("placement_state", to_json(dynamic_data(ranks)))
    expect(detail).to_be_hidden()
    assert page.evaluate("document.activeElement === document.body")  # its reader may be typing in a cell
    page.locator("[data-rank='1']").click()
    expect(detail).to_contain_text("rank 1 on node-0")


def test_answers_that_overtake_each_other(opened):
    view = opened()
    shards = view.page.locator(".rankbook-part-shards")
    view.tab("shards")
    heading = shards.get_by_role("heading", level=3).first
    view.reply("tensor", answer=WEIGHT)
    expect(heading).to_contain_text("256 × 128")
    view.change("shards_fixed", SHARDS.replace('"asked":1', '"asked":2'))
    assert view.asked("tensor") == 2  # Show was pressed: its parts may lie elsewhere now
    view.change("shards_fixed", SHARDS.replace('"asked":1', '"asked":3'))
    view.reply("tensor", answer={**WEIGHT, "shape": [128, 128]})
    expect(heading).to_contain_text("128 × 128")
    view.reply("tensor", 1, answer=WEIGHT)
    expect(heading).to_contain_text("128 × 128")

    status, name = shards.locator(".rb-said"), shards.get_by_label("variable")
    for variable in ("slow", "fast"):
        name.fill(variable)
        name.press("Enter")
    view.reply("name", 1, answer="nobody has slow")
    view.change("shards_fixed", SHARDS)
    expect(status).to_have_text("waiting for the ranks …")
    view.reply("name", answer="nobody has fast")
    expect(status).to_have_text("nobody has fast")

    expect(shards.get_by_role("button", name="Statistic")).to_be_visible()
    view.change("shards_fixed", to_json({"name": "fast", "trouble": "nobody has fast", "tensors": [], "asked": 4}))
    view.reply("tensor", answer=WEIGHT)
    expect(shards.get_by_role("button", name="Statistic")).to_be_hidden()  # of what was shown before
    view.change("shards_fixed", SHARDS)
    view.reply("tensor", answer=WEIGHT)
    expect(shards.get_by_role("button", name="Statistic")).to_be_visible()


@pytest.mark.full
def test_a_tensors_dims_are_chosen_with_the_keyboard_and_its_statistic_asked_for_while_it_is_looked_at(opened):
    view = opened()
    page, shards = view.page, view.page.locator(".rankbook-part-shards")
    view.tab("shards")
    view.reply("tensor", answer=CONV)
    down = shards.get_by_label("down")
    down.focus()
    page.keyboard.press("ArrowDown")
    expect(down).to_be_focused()
    expect(down).to_have_value("1")
    replicated = tensor_of(fakes.sharded_tensor(2, ranks=4))
    view.change("shards_fixed", SHARDS.replace('"asked":1', '"asked":2'))
    view.reply("tensor", answer=replicated)
    shards.get_by_role("button", name="Statistic").click()
    view.reply("statistic", answer="min 0")
    assert view.asked("statistic") == 2  # of four that hold it
    view.change("shards_fixed", SHARDS.replace('"asked":1', '"asked":3'))
    view.reply("tensor", answer=WEIGHT)
    view.reply("statistic", answer="min 0")
    page.clock.run_for(100)
    assert view.asked("statistic") == 2


@pytest.mark.full
def test_two_views_of_a_page_share_no_id(opened):
    view = opened()
    once = view.page.evaluate(IDS)
    view.render()
    twice = view.page.evaluate(IDS)
    assert len(set(twice)) == len(twice) == 2 * len(once) - 1  # one is the page's own


@pytest.mark.full
def test_restarted_kernel_is_reported_and_ends_pending_requests(opened):
    view = opened()
    page, shards = view.page, view.page.locator(".rankbook-part-shards")
    view.tab("shards")
    shards.get_by_label("variable").fill("model")
    page.keyboard.press("Enter")
    expect(shards).to_contain_text("waiting for the ranks …")
    page.evaluate("window.gone = true")
    page.clock.run_for(5000)
    expect(page.locator(".rb-old")).to_have_text("This view is out of date: the kernel was restarted or has ended.")
    expect(shards.locator(".rb-said")).to_have_text("the kernel was restarted or has ended")
    page.evaluate("end()")
