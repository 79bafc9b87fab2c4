"""The line above a cell in a page that was reloaded, to which no more messages come."""

from __future__ import annotations

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
