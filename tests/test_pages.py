"""Run every Python block of the documentation: the blocks of a page are the cells of one notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import Notebook, SharedKernel

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(\{[\w-]+\} ?)?(\w+)?\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"(?::\w+:[^\n]*\n)+\n?")


class Cell(NamedTuple):
    """A block of a page. `raises`: its error is what the page shows."""

    line: int
    code: str
    raises: bool


def is_installed(package: str) -> bool:
    """Return True if `package` can be imported. A folder of this name does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def cells(page: str) -> list[Cell]:
    """Return the Python blocks of a page.

    A block of the class `no-run` needs a GPU or another program and is left out, and so is one of the class
    `needs-PACKAGE` where this package is not installed.
    """
    text = (DOCS / page).read_text()
    page_cells = []
    for block in BLOCK.finditer(text):
        directive, language, code = block.groups()
        if language != "python" or (directive and "code-block" not in directive):
            continue
        options = OPTIONS.match(code) if directive else None
        classes = options[0] if options else ""
        packages = re.findall(r"needs-(\w+)", classes)
        if "no-run" not in classes and all(is_installed(package) for package in packages):
            line = text[: block.start()].count("\n") + 1
            page_cells.append(Cell(line, code.removeprefix(classes).rstrip("\n"), "raises" in classes))
    return page_cells


PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if "_build" not in path.parts and cells(str(path.relative_to(DOCS)))
)


@pytest.fixture
def page_notebook(shared_kernel: SharedKernel, tmp_path: Path) -> Iterator[Notebook]:
    """Return a clean notebook without ranks, whose working folder is empty, since pages write files."""
    notebook = shared_kernel.take()
    before = notebook.ok("import os; print(os.getcwd())").stdout.strip()
    notebook.ok(f"%distributed stop\nos.chdir({str(tmp_path)!r})\n%reset -f")
    try:
        yield notebook
    finally:
        notebook.ok(f"import os; os.chdir({before!r})")
        shared_kernel.give_back()


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page.startswith("tutorials/") else pytest.mark.full) for page in PAGES]
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_blocks_of_a_page_run(page: str, page_notebook: Notebook) -> None:
    todo = cells(page)
    if not any(cell.code.startswith("%load_ext") for cell in todo):
        page_notebook.run("%load_ext rankbook\n%distributed start -n 2")
    for cell in todo:
        outcome = page_notebook.run(cell.code, timeout=120)
        failed = outcome.status == "error" or "UsageError" in outcome.text
        assert failed == cell.raises, f"docs/{page}, line {cell.line}:\n{outcome.text}{outcome.traceback}"


def test_pages_are_found_and_their_errors_are_marked():
    assert "tutorials/first-cell.md" in PAGES
    assert any(cell.raises for cell in cells("tutorials/when-something-goes-wrong.md"))
