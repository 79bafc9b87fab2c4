"""A browser, a Jupyter server, notebooks in pages. Where there is no Chromium they skip, and in CI they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHOTS = Path(__file__).resolve().parent.parent.parent / "build" / "screenshots"


def without(what: str) -> None:
    """Skip the test because `what` is missing; in CI, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI has to have it")
    pytest.skip(what)


@pytest.fixture(scope="session")
def has_browser() -> None:
    """Skip, or in CI fail, where playwright or Chromium is missing."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError)
    from tests.browser.jupyter import chromium

    if chromium() is None:
        without("there is no Chromium on PATH: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(has_browser):
    """Start Chromium for one file's tests.

    Not for longer: playwright keeps an event loop running in this thread meanwhile, and a test of another file on the
    same worker could not call `asyncio.run`.
    """
    from playwright import sync_api

    from tests.browser.jupyter import launch

    sync_api.expect.set_options(timeout=30_000)  # what is there sooner costs nothing
    with sync_api.sync_playwright() as started:
        running = launch(started)
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(has_browser, tmp_path_factory):
    """Start one Jupyter server for all browser tests of a worker."""
    from tests.browser.jupyter import Server

    started = Server(tmp_path_factory.mktemp("jupyter"))
    yield started
    started.close()


@pytest.fixture
def opened(browser, server, tmp_path, request) -> Iterator[Callable]:
    """Provide `opened(*cells, front_end=..., theme=...)`: open a notebook of these cells and run its first cell."""
    from contextlib import ExitStack

    from tests.browser.jupyter import Notebook, open_page

    with ExitStack() as stack:
        notebooks: list[Notebook] = []

        def make(*cells: str, front_end: str = "lab", theme: str = "Light") -> Notebook:
            server.theme(f"JupyterLab {theme}")
            name = server.write(f"{request.node.name.translate(str.maketrans('[]/', '__-'))}-{len(notebooks)}", *cells)
            page = stack.enter_context(open_page(browser, tmp_path))
            notebooks.append(Notebook(page, server, name, front_end))
            notebooks[-1].run(0)
            return notebooks[-1]

        yield make
        for notebook in notebooks:
            notebook.shut_down()


@pytest.fixture
def own_kernel(browser, tmp_path, monkeypatch) -> Iterator[Callable]:
    """Provide `own_kernel(sources)`: open a notebook of these cells with Rankbook's own kernel and two ranks."""
    from contextlib import ExitStack

    from tests.browser.jupyter import Notebook, Server, open_page
    from tests.jupyter.test_runners import write_notebook

    install = [sys.executable, "-m", "rankbook.jupyter", "install", "--prefix", str(tmp_path), "-n", "2"]
    subprocess.run(install, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    folder = tmp_path / "server"
    folder.mkdir()
    with ExitStack() as stack:

        def make(sources: list[str]) -> Notebook:
            server = Server(folder)
            stack.callback(server.close)
            server.theme("JupyterLab Light")
            write_notebook(folder / "own.ipynb", sources)
            page = stack.enter_context(open_page(browser, tmp_path))
            opened = Notebook(page, server, "own.ipynb", kernel="Python 3 (Rankbook, 2 ranks)")
            stack.callback(opened.shut_down)
            return opened

        yield make


@pytest.fixture(scope="session")
def shots() -> Path:
    """Return the folder for screenshots."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core: `RANKBOOK_AXE` names axe.min.js, or npm's package as a .tgz."""
    path = os.environ.get("RANKBOOK_AXE", "")
    if not path or not Path(path).is_file():
        without("RANKBOOK_AXE names no axe-core: `npm pack axe-core`, then RANKBOOK_AXE=axe-core-*.tgz")
    if not path.endswith(".tgz"):
        return Path(path).read_text(encoding="utf-8")
    with tarfile.open(path) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()
