"""Test screenshots of the views in both themes, and the findings of axe-core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(240)]

VIEWS = {
    "placement": "from rankbook.widgets.placement import PlacementView\nPlacementView(feed)",
    "shards": "from rankbook.widgets.shards import ShardsView\nShardsView(feed, 'model')",
    "checkpoints": "from rankbook.widgets.checkpoints import CheckpointsView\nCheckpointsView(feed, FakeCheckpoints())",
    "dashboard": "from rankbook.magics.views import Dashboard\nDashboard.reopen(feed, FakeCheckpoints())",
}
FEED = "feed = FakeFeed(8, 20)\nfeed.last['saves'] = saves(0.5)"
GRAVE = {"serious", "critical"}
PICTURES = Path(__file__).resolve().parent / "pictures"  # of made-up ranks; docs/pictures.py takes those of real ones
PIXELS, SHADE = 8, 4.0  # how much a picture's sides, and its mean shade of 255, may differ: fonts are not all the same


def differs(new: Path, reference: Path) -> list[str]:
    """Return the differences of a picture, compared at a quarter of its size."""
    if os.environ.get("RANKBOOK_PICTURES") == "write":
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_bytes(new.read_bytes())
    with Image.open(new) as one, Image.open(reference) as other:
        if max(abs(a - b) for a, b in zip(one.size, other.size, strict=True)) > PIXELS:
            return [f"{new.name} is {one.size}, not {other.size}"]
        small = (one.width // 4, one.height // 4)
        pair = [image.convert("RGB").resize(small, Image.Resampling.BOX) for image in (one, other)]
    shade = sum(ImageStat.Stat(ImageChops.difference(*pair)).mean) / 3
    return [f"{new.name} differs by {shade:.1f} of 255 on average"] if shade > SHADE else []


def test_different_picture_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("RANKBOOK_PICTURES", raising=False)
    Image.new("RGB", (400, 300), "white").save(tmp_path / "a.png")
    Image.new("RGB", (402, 299), "#fefefe").save(tmp_path / "alike.png")
    Image.new("RGB", (400, 330), "white").save(tmp_path / "higher.png")
    Image.new("RGB", (400, 300), "#f0f0f0").save(tmp_path / "darker.png")
    assert differs(tmp_path / "a.png", tmp_path / "alike.png") == []
    assert differs(tmp_path / "a.png", tmp_path / "higher.png") == ["a.png is (400, 300), not (400, 330)"]
    assert differs(tmp_path / "a.png", tmp_path / "darker.png") == ["a.png differs by 15.0 of 255 on average"]


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_views_have_pictures_and_no_grave_violation(opened, shots, axe, theme):
    notebook = opened(FEED, *VIEWS.values(), theme=theme)
    page = notebook.page
    notebook.run(1)
    assert page.evaluate("document.body.dataset.jpThemeLight") == ("true" if theme == "Light" else "false")
    page.evaluate(axe)
    wrong: list[str] = []
    for number, name in enumerate(VIEWS, start=2):
        notebook.run(number)
        view = notebook.cell(number).locator(".rankbook-view")
        expect(view).to_contain_text({"shards": "offset [0, 0]", "checkpoints": "step-30"}.get(name, "8 ranks of main"))
        if name == "placement":
            view.locator("[data-rank='2']").click()
            expect(view.locator(".rb-near")).to_contain_text("loss.backward()")
        view.scroll_into_view_if_needed()
        page.mouse.move(2, 2)
        page.wait_for_timeout(200)
        picture = f"{name}-{theme.lower()}.png"
        view.screenshot(path=shots / picture)
        wrong += differs(shots / picture, PICTURES / picture)
        report = page.evaluate("selector => axe.run(selector)", f".rankbook-{name}")
        grave = {
            violation["id"]: [node["html"][:200] + " " + node["failureSummary"] for node in violation["nodes"][:2]]
            for violation in report["violations"]
            if violation["impact"] in GRAVE
        }
        assert not grave, f"{name}: {grave}"
        assert report["passes"]
        page.keyboard.press("Escape")
    assert not wrong, f"{wrong}: look at {shots}; RANKBOOK_PICTURES=write keeps them as they are now"
