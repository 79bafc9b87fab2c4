"""Widgets of real ranks in a real JupyterLab: moved by a person, captured into, and found again after a reload."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(240)]

START = "%load_ext rankbook\n%distributed start -n 2"
MAKE = """%%distributed
import ipywidgets
from IPython.display import HTML, display
slider, out = ipywidgets.IntSlider(value=10 * rank + 3, description=f"rank {rank}"), ipywidgets.Output()
def hear(change):
    with out:
        print("moved to", change.new)
slider.observe(hear, "value")
with out:
    print("made on", rank)
    display(HTML("<b>bold</b>"))
ipywidgets.VBox([slider, out])"""


@pytest.mark.parametrize(
    "notebook_cell", ["", "import ipywidgets; own = ipywidgets.Text(value='of the notebook'); own"]
)
def test_widgets_are_restored_after_a_reload_and_control_their_rank(opened, notebook_cell):
    notebook = opened(START, MAKE, "%%distributed\nslider.value", notebook_cell or "None")
    page, cell = notebook.page, notebook.cell(2)
    for number in (1, 2, 4):
        notebook.run(number, timeout=60)
    for rank in (0, 1):
        expect(cell).to_contain_text(f"made on {rank}")
    expect(cell.locator(".widget-output b")).to_have_count(2)

    def move(rank: int) -> None:
        handle = cell.locator(".widget-slider").nth(rank).get_by_role("slider")
        handle.focus()
        handle.press("ArrowRight")

    move(1)
    expect(cell).to_contain_text("moved to 14")
    notebook.save()
    page.reload()
    notebook.wait_open()
    expect(cell.locator(".widget-slider")).to_have_count(2)
    expect(cell.locator(".widget-slider").nth(1)).to_contain_text("14")
    expect(cell).to_contain_text("made on 0")
    expect(cell).to_contain_text("moved to 14")
    expect(cell.locator(".widget-output b")).to_have_count(2)
    if notebook_cell:
        expect(notebook.cell(4).locator("input[type=text]")).to_have_value("of the notebook")
    move(0)
    expect(cell).to_contain_text("moved to 4")
    notebook.run(3)
    expect(notebook.cell(3)).to_contain_text("[0] 4")
    expect(notebook.cell(3)).to_contain_text("[1] 14")
