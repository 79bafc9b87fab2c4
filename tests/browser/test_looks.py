"""How the views look in both themes, in pictures, and what axe-core says of them."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

VIEWS = {
    "placement": "from rankbook.widgets.placement import PlacementView\nPlacementView(feed)",
    "shards": "from rankbook.widgets.shards import ShardsView\nShardsView(feed, 'model')",
    "checkpoints": "from rankbook.widgets.checkpoints import CheckpointsView\nCheckpointsView(feed, FakeShelf())",
    "dashboard": "from rankbook.widgets.dashboard import Dashboard\nDashboard.reopen(feed, FakeShelf())",
}
FEED = "feed = FakeFeed(8, 20)\nfeed.last['saves'] = saves(0.5)"
GRAVE = {"serious", "critical"}


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_views_have_pictures_and_no_grave_violation(opened, shots, axe, theme):
    notebook = opened(FEED, *VIEWS.values(), theme=theme)
    page = notebook.page
    notebook.run(1)
    assert page.evaluate("document.body.dataset.jpThemeLight") == ("true" if theme == "Light" else "false")
    page.evaluate(axe)
    for number, name in enumerate(VIEWS, start=2):
        notebook.run(number)
        view = notebook.cell(number).locator(".rankbook-view")
        expect(view).to_contain_text({"shards": "offset [0, 0]", "checkpoints": "step-30"}.get(name, "8 ranks of main"))
        if name == "placement":
            view.locator("[data-rank='2']").click()
            expect(view.locator(".rb-near")).to_contain_text("loss.backward()")
        view.scroll_into_view_if_needed()
        view.screenshot(path=shots / f"{name}-{theme.lower()}.png")
        found = page.evaluate("selector => axe.run(selector)", f".rankbook-{name}")
        grave = {
            each["id"]: [node["html"][:200] + " " + node["failureSummary"] for node in each["nodes"][:2]]
            for each in found["violations"]
            if each["impact"] in GRAVE
        }
        assert not grave, f"{name}: {grave}"
        assert found["passes"]
        page.keyboard.press("Escape")
