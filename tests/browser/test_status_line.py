"""The status line of a cell in a page: beside an open question, and after a reload, when no more messages come."""

from __future__ import annotations

import re

import pytest

from rankbook.widgets.rendering import line

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
