"""A cell's output by rank in a real JupyterLab and Notebook 7, with real ranks: live, switched, saved, opened again."""

from __future__ import annotations

import re

import pytest

from rankbook.output.by_rank import BlockAdded, OutputBlock
from rankbook.widgets.output_panel import CellPanel
from tests.browser.test_looks import GRAVE, PICTURES, differs
from tests.browser.test_vscode import OPEN, PAGE
from tests.conftest import Gate

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

START = "%load_ext rankbook\n%distributed start -n 2"
RUNS = """%%distributed --view tabs
import os, time
print('same'); print('of', rank)
{gate.wait}
print('last', rank)"""
CHART = """%%distributed --view grid
from IPython.display import SVG, display
display(SVG(f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><title>of {rank}</title></svg>'))"""


def texts(panel):
    """Return the visible lines, without the labels."""
    return [line for text in panel.locator("pre:visible").all_inner_texts() for line in text.strip().split("\n")]


def shows(panel, *expected, in_order=True):
    """Return True if the panel shows these lines, now or soon."""
    order = list if in_order else sorted
    for _ in range(300):
        if order(texts(panel)) == order(expected):
            return True
        panel.page.wait_for_timeout(100)
    print(texts(panel))
    return False


@pytest.mark.parametrize("front_end", ["lab", pytest.param("notebook", marks=pytest.mark.full)])
def test_the_reader_switches_while_the_cell_runs_and_after(opened, tmp_path, front_end):
    gate = Gate(tmp_path / "gate")
    notebook = opened(START, RUNS.format(gate=gate), front_end=front_end)
    page = notebook.page
    notebook.run(1, timeout=60)
    notebook.start(2)
    panel = page.locator(".rankbook-panel")
    expect(panel).to_contain_text("of 1")
    expect(panel.locator(".rb-head")).to_contain_text("at line 4")
    assert shows(panel, "same", "of 0")
    panel.get_by_text("rank 1", exact=True).click()
    assert shows(panel, "same", "of 1")
    panel.locator("input:checked").focus()
    page.keyboard.press("ArrowLeft")
    assert shows(panel, "same", "of 0")
    page.keyboard.press("ArrowRight")
    assert shows(panel, "same", "of 1")
    line = panel.locator(".rb-head").inner_text()
    later = "a second later Python has heard of the choice"
    expect(panel.locator(".rb-head"), later).not_to_have_text(line, use_inner_text=True)
    assert notebook.running(2)
    gate.open()
    expect(panel.locator(".rb-head")).to_contain_text("ok after")
    panel = page.locator(".rankbook-panel")
    expect(panel).to_have_count(1)
    assert shows(panel, "same", "of 1", "last 1")  # what the reader had chosen
    panel.get_by_text("merged", exact=True).click()
    assert shows(panel, "last 0", "last 1", "of 0", "of 1", "same", in_order=False)
    panel.get_by_text("grid", exact=True).click()
    first, second = (panel.locator(f"pre:has-text('of {rank}')").bounding_box() for rank in (0, 1))
    assert first["x"] < second["x"]
    assert abs(first["y"] - second["y"]) < 4


@pytest.mark.full
def test_saved_notebook_shows_the_panel_without_a_kernel(opened, tmp_path):
    gate = Gate(tmp_path / "gate")
    gate.open()
    notebook = opened(START, RUNS.format(gate=gate), CHART)
    for cell in (1, 2, 3):
        notebook.run(cell, timeout=60)
    expect(notebook.page.locator(".rankbook-panel img[src^='data:image/svg']")).to_have_count(2)
    notebook.save()
    outputs = [cell["outputs"] for cell in notebook.server.read(notebook.name)["cells"]]
    for output in outputs[2] + outputs[3]:
        assert set(output["data"]) == {"text/html", "text/plain"}
    notebook.shut_down()
    notebook.page.reload()
    notebook.wait_open()
    panel = notebook.page.locator(".rankbook-panel").first
    expect(panel).to_be_visible()
    panel.get_by_text("rank 1", exact=True).click()
    assert shows(panel, "same", "of 1", "last 1")
    assert "model" not in notebook.page.locator(".jp-OutputArea").nth(2).inner_text()


SCRIPT = """<svg xmlns="http://www.w3.org/2000/svg" width="60" height="20"><defs><linearGradient id="g">
<stop stop-color="%s"/></linearGradient></defs><rect width="60" height="20" fill="url(#g)"/>
<image href="missing" onerror="window.ran = true"/></svg>"""
ISOLATED = "<style>.rankbook-panel { outline: 7px solid red }</style><p>a page of its own</p>"
MARKUP = [
    *(OutputBlock(rank, (rank,), data={"image/svg+xml": SCRIPT % ("red", "blue")[rank]}) for rank in (0, 1)),
    *(OutputBlock(2 + rank, (rank,), data={"text/html": f"</div><div><b>loss of {rank}"}) for rank in (0, 1)),
    OutputBlock(4, (0,), data={"text/html": ISOLATED}, metadata={"isolated": True}),
    *(OutputBlock(5 + rank, (rank,), text=f"line of {rank}\n") for rank in (0, 1)),
]
PIXEL = """async (image) => {
  await image.decode();
  const canvas = new OffscreenCanvas(60, 20).getContext("2d");
  canvas.drawImage(image, 0, 0);
  return [...canvas.getImageData(30, 10, 1, 1).data];
}"""


def test_markup_of_a_rank_stays_in_its_block(browser):
    panel = CellPanel("rankbook-panel-1", "cell [3]", (0, 1), "merged")
    sent: list[object] = []
    panel.send = sent.append
    page = browser.new_page()

    def check():
        pieces = page.locator(".rb-pieces")
        assert [pieces.locator("img").nth(rank).evaluate(PIXEL) for rank in (0, 1)] == [
            [255, 0, 0, 255],
            [0, 0, 255, 255],
        ]
        expect(page.frame_locator(".rb-pieces iframe").locator("p")).to_have_text("a page of its own")
        assert page.locator(".rankbook-panel").evaluate("(panel) => getComputedStyle(panel).outlineStyle") == "none"
        assert pieces.evaluate("(pieces) => pieces.children.length") == len(MARKUP)
        assert pieces.locator("pre").last.evaluate("(text) => getComputedStyle(text).fontWeight") == "400"
        for rank, other in ((0, 1), (1, 0)):
            page.get_by_text(f"rank {rank}", exact=True).click()
            for text in ("loss of", "line of"):
                expect(page.get_by_text(f"{text} {rank}")).to_be_visible()
                expect(page.get_by_text(f"{text} {other}")).to_be_hidden()
        assert page.evaluate("window.ran") is None

    def open_live():
        page.set_content(PAGE % ("", ""))
        state = {name: getattr(panel, name) for name in ("name", "skeleton", "whole")}
        page.evaluate(OPEN, {"source": str(panel._esm), "state": state})

    panel.bundle()
    open_live()
    panel.apply([BlockAdded(block) for block in MARKUP])
    page.evaluate("(message) => hear(message)", sent[0])
    check()
    panel._handle({"op": "all"})
    open_live()
    check()
    page.set_content(PAGE % ("", panel.end(MARKUP)["text/html"]))
    check()
    page.close()


TRAINS = """%%distributed --view grid
from IPython.display import SVG
print(f"{world_size} ranks train")
losses = [2 / (1 + step) + rank / 4 for step in range(12)]
for step in range(0, 12, 4):
    print(f"step {step:2}   loss {losses[step]:.3f}")
points = " ".join(f"{20 * step},{120 - 45 * loss:.0f}" for step, loss in enumerate(losses))
SVG(f'<svg xmlns="http://www.w3.org/2000/svg" width="230" height="120" role="img" aria-label="loss of rank {rank}">'
    f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="3"/></svg>')"""


@pytest.mark.full
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_panel_matches_its_picture_and_has_no_grave_violation(opened, axe, theme, shots):
    notebook = opened(START, TRAINS, theme=theme)
    page = notebook.page
    notebook.run(1, timeout=60)
    notebook.run(2)
    panel = page.locator(".rankbook-panel")
    expect(panel.locator("img")).to_have_count(2)
    panel.locator("img").evaluate_all("images => Promise.all(images.map((image) => image.decode()))")
    page.evaluate(axe)
    report = page.evaluate("axe.run('.rankbook-panel')")
    grave = [violation for violation in report["violations"] if violation["impact"] in GRAVE]
    assert not grave, grave
    assert report["passes"]
    picture = f"panel-{theme.lower()}.png"
    page.mouse.move(2, 2)
    panel.screenshot(path=shots / picture)
    wrong = differs(shots / picture, PICTURES / picture)
    assert not wrong, f"{wrong}: look at {shots}; RANKBOOK_PICTURES=write keeps it as it is now"


def test_a_line_stands_above_a_cell_that_runs_and_stays_with_its_time(opened, tmp_path):
    gate = Gate(tmp_path / "gate")
    notebook = opened(START, RUNS.format(gate=gate).replace(" --view tabs", ""))
    notebook.run(1, timeout=60)
    notebook.start(2)
    area = notebook.cell(2).locator(".jp-OutputArea").first
    expect(area).to_contain_text("at line 4")
    for rank in (0, 1):
        expect(area).to_contain_text(f"of {rank}")
    text = area.inner_text()
    assert re.match(r"\s*● cell \[\d+\] on ranks 0-1 · ", text), text
    assert text.count("same") == 1
    gate.open()
    expect(area).to_contain_text("ok after")
    expect(area).to_contain_text("[1] last 1")
