"""Rankbook's own kernel in a real JupyterLab: the outputs of every other runner, and the ranks behind Tab."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import pytest

from tests.jupyter.test_runners import CELLS, EXPECTED, shown, write_notebook

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture
def notebook(browser, tmp_path, monkeypatch):
    from tests.browser.jupyter import Notebook, Server, open_page

    install = [sys.executable, "-m", "rankbook.jupyter", "install", "--prefix", str(tmp_path), "-n", "2"]
    subprocess.run(install, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder)
    try:
        write_notebook(folder / "kernel.ipynb")
        with open_page(browser, tmp_path) as page:
            opened = Notebook(page, server, "kernel.ipynb")
            yield opened
            opened.shut_down()
    finally:
        server.close()


def test_a_notebook_gives_the_outputs_that_it_gives_everywhere_and_tab_knows_the_ranks(notebook):
    for number in range(len(CELLS)):
        notebook.run(number, timeout=60)
    notebook.save()
    file = notebook.server.folder / notebook.name
    assert shown(nbformat.read(file, as_version=4)) == EXPECTED

    page = notebook.page
    notebook.cell(1).locator(".cm-content").first.click()
    page.keyboard.press("Control+a")
    page.keyboard.type("total.requires_gr")
    page.keyboard.press("Tab")
    expect(page.locator(".jp-Completer")).to_contain_text("requires_grad_", timeout=10_000)
    page.keyboard.press("Escape")
    notebook.cell(1).locator(".cm-content").first.click()
    page.keyboard.press("Control+a")
    page.keyboard.type("dist.all_reduce(")
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".jp-Tooltip")).to_contain_text("Signature: dist.all_reduce(tensor", timeout=10_000)
