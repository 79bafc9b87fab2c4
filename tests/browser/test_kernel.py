"""Rankbook's own kernel in a real JupyterLab: the outputs of every other runner, and the ranks behind Tab."""

from __future__ import annotations

import nbformat
import pytest

from tests.jupyter.test_runners import CELLS, EXPECTED, outputs_of

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(240)]


def test_a_notebook_gives_the_outputs_that_it_gives_everywhere_and_tab_knows_the_ranks(own_kernel):
    notebook = own_kernel(CELLS)
    for number in range(len(CELLS)):
        notebook.run(number, timeout=60)
    notebook.save()
    file = notebook.server.folder / notebook.name
    assert outputs_of(nbformat.read(file, as_version=4)) == EXPECTED

    page = notebook.page
    notebook.cell(1).locator(".cm-content").first.click()
    page.keyboard.press("Control+a")
    page.keyboard.type("total.requires_gr")
    page.keyboard.press("Tab")
    expect(page.locator(".jp-Completer")).to_contain_text("requires_grad_")
    page.keyboard.press("Escape")
    notebook.cell(1).locator(".cm-content").first.click()
    page.keyboard.press("Control+a")
    page.keyboard.type("dist.all_reduce(")
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".jp-Tooltip")).to_contain_text("Signature: dist.all_reduce(tensor")
