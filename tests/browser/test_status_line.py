"""The status line of a cell in a page: beside an open question, and after a reload, when no more messages come."""

from __future__ import annotations

import re

import pytest

from rankbook.widgets.rendering import line
from tests.conftest import Gate

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]


def test_a_line_that_is_not_replaced_says_that_it_is_stale(browser):
    page = browser.new_page()
    page.set_content(line("cell [3]", "running", stale_after=3600.0)["text/html"])
    note = page.locator("strong")
    expect(note).to_be_hidden()
    page.set_content(line("cell [3]", "running", stale_after=0.1)["text/html"])
    expect(note).to_be_visible()
    expect(note).to_contain_text("not updated any more: the page was reloaded")
    page.close()


@pytest.mark.full
def test_a_question_stays_open_when_the_line_appears(opened):
    notebook = opened(
        "%load_ext rankbook\n%distributed start -n 1",
        "%%distributed\nprint('pick a rate')\nrate = input('rate? ')\nprint('chosen', rate)",
    )
    notebook.run(1)
    notebook.start(2)
    cell = notebook.cell(2)
    box = cell.locator(".jp-Stdin-input")
    expect(box).to_be_visible()
    expect(cell).to_contain_text(re.compile(r"on rank 0 · [1-9]"))  # its second update: the first one is 1 s old
    expect(box).to_be_visible()
    box.fill("0.1")
    box.press("Enter")
    expect(cell).to_contain_text("chosen 0.1")
    expect(cell).to_contain_text("ok after")
    expect(cell).to_contain_text("pick a rate")
    expect(cell).to_contain_text("rate? 0.1")  # the answer that JupyterLab shows


@pytest.mark.full
def test_cells_of_buttons_show_all_their_output_and_no_status_line_in_an_output_widget(opened, tmp_path):
    going, ending = Gate(tmp_path / "going"), Gate(tmp_path / "ending")
    code = f"print('load', end='', flush=True)\n{going.wait}\nprint('ed')\nprint('end', rank)"
    notebook = opened(
        "%load_ext rankbook\n%distributed start -n 2",
        f"""import ipywidgets
from IPython.display import display
out = ipywidgets.Output()
code = {code!r}
def run(button):
    with out: get_ipython().run_cell_magic("distributed", options[button.description], code)
@out.capture()
def start(_):
    display(get_ipython().run_cell_magic("distributed", "--background", {ending.wait!r}))
options = {{"stream": "", "panel": "--view tabs"}}
show = [ipywidgets.Button(description=name) for name in options]
for button in show: button.on_click(run)
background = ipywidgets.Button(description="background")
background.on_click(start)
ipywidgets.VBox([*show, background, out])""",
    )
    notebook.run(1)
    notebook.run(2)
    cell = notebook.cell(2)
    output = cell.locator(".widget-output")
    cell.get_by_role("button", name="stream").click()
    notebook.page.wait_for_timeout(1500)  # after which there would be a status line
    going.open()
    expect(output).to_contain_text("end 1")
    expect(output).to_contain_text("[0-1] loaded")
    expect(output).not_to_contain_text("running")
    cell.get_by_role("button", name="panel").click()
    ended = output.locator(".jp-RenderedHTMLCommon", has_text="by rank")  # the widget before has another class
    expect(ended).to_contain_text("end 1")
    expect(ended).to_contain_text("loaded")
    cell.get_by_role("button", name="background").click()
    expect(output).to_contain_text("on ranks 0-1: running")
    ending.open()
    expect(output).to_contain_text("on ranks 0-1: ok after")
    expect(output).to_contain_text("loaded")  # output that the front end has captured stays
