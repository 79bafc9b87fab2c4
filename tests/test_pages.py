"""Run every Python block of the documentation: the blocks of a page are the cells of one notebook.

The `text` block that follows a Python block is the output of its cell. It must be what the cell has printed, except for
what `VARIES` replaces, the last digits of numbers, the width of spaces and lines, and the places where a page writes …
A block of the class `by-hand` is not compared: it shows what a person has caused beside the cell, a live view that is
filled later, or an order that depends on the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from rankbook.formatting import strip_ansi
from tests.conftest import Notebook, SharedKernel

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(\{[\w-]+\} ?)?(\w+)?\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"(?::\w+:[^\n]*\n)+\n?")
VARIES = {
    r"(?m)^cell \[\d+\] on ranks? [\d,-]+: .*\n": "",  # the state of a cell, which is shown if it takes long
    r"\b\d[\d,]*(?:\.\d+)? ?(?:µs|ms|s|min)\b": "TIME",
    r"\b\d[\d,]*(?:\.\d+)? ?(?:bytes|kB|MB|GB)(?=\W|$)": "SIZE",
    r"\b\d{4}([-/])\d\d\1\d\d[ T]\d\d:\d\d:\d\d\b": "DATE",
    r"\b0x[0-9a-f]+\b": "ADDRESS",
    r"\b([Cc]ell(?:Result|)(?: In|)) ?\[\d+\]": r"\1 [N]",  # the kernel has run other pages before
    r"(?<= )#\d+\b": "#N",  # collectives of the process group, and those of Rankbook are counted as well
    r"\b(cpu|cuda:\d+|pid) +\d+\b": r"\1 PID",
}
"""What no two runs have in common, as regular expressions, and the words that are compared in its place."""
GAP_OR_NUMBER = re.compile(r"( ?… ?)|(-?\d+\.\d+(?:e[+-]?\d+)?)")
LABELLED = re.compile(r"(?m)^\[[\d,-]+\] .*\n(?:(?:\[[\d,-]+\]| {4,}).*\n)*")


class Cell(NamedTuple):
    """A block of a page. `raises`: its error is what the page shows. `output` is None if the page shows no output.

    `unseeded`: the numbers of the output are others in every run.
    """

    line: int
    code: str
    raises: bool
    output: str | None
    unseeded: bool


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
    blocks = list(BLOCK.finditer(text))
    for block, following in zip_longest(blocks, blocks[1:]):
        directive, language, code = block.groups()
        if language != "python" or (directive and "code-block" not in directive):
            continue
        options = OPTIONS.match(code) if directive else None
        classes = options[0] if options else ""
        packages = re.findall(r"needs-(\w+)", classes)
        if "no-run" not in classes and all(is_installed(package) for package in packages):
            line = text[: block.start()].count("\n") + 1
            output = following[3] if following is not None and following[2] == "text" else ""
            options = OPTIONS.match(output) if following is not None and following[1] else None
            if options:
                output = "" if "by-hand" in options[0] else output.removeprefix(options[0])
            unseeded = options is not None and "unseeded" in options[0]
            source = code.removeprefix(classes).rstrip("\n")
            page_cells.append(Cell(line, source, "raises" in classes, output or None, unseeded))
    return page_cells


def by_rank(block: re.Match[str]) -> str:
    """Return consecutive lines of ranks sorted by rank, since their order depends on the time."""
    labelled, label = [], ""
    for line in block[0].splitlines():
        found = re.match(r"\[[\d,-]+\] ", line)
        label = found[0] if found else label
        labelled.append((label, line.removeprefix(label)))
    labelled.sort(key=lambda pair: [int(rank) for rank in re.findall(r"\d+", pair[0])])
    groups = groupby(labelled, key=lambda pair: pair[0])
    return "".join(f"{label}{' '.join(line for _, line in lines)}\n" for label, lines in groups)


def comparable(text: str) -> str:
    """Return a text in one line, without what varies from run to run."""
    text = strip_ansi(text)
    for expression, word in VARIES.items():
        text = re.sub(expression, word, text)
    return " ".join(LABELLED.sub(by_rank, text).split())


def agree(shown: str, printed: str, *, unseeded: bool = False) -> bool:
    """Return True if a page shows what a cell has printed. … stands for any text, and numbers may differ by 1%."""
    # A gap may end in the middle of the lines of a rank, of which only the first one has the label here.
    shown, pattern, numbers, end = re.sub(r"… \[[\d,-]+\] ", "… ", comparable(shown)), "", [], 0
    for found in GAP_OR_NUMBER.finditer(shown):
        pattern += re.escape(shown[end : found.start()]) + (".*?" if found[1] else r"(-?\d+\.\d+(?:e[+-]?\d+)?)")
        numbers += [float(found[2])] if found[2] else []
        end = found.end()
    match = re.fullmatch(pattern + re.escape(shown[end:]), comparable(printed))
    if match is None or unseeded:
        return match is not None
    return [float(number) for number in match.groups()] == pytest.approx(numbers, rel=0.01)


PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if "_build" not in path.parts and cells(str(path.relative_to(DOCS)))
)


MORE_TIME = """\
from functools import partial
from rankbook.coordinator import cluster_processes
cluster_processes.GracePeriods = partial(cluster_processes.GracePeriods, death_release=30.0)
"""
"""A cell whose rank has died ends when the others have ended it, also where that takes more than a second."""

HAS_BEGUN = """\
import rankbook as _rankbook, time as _time
while any(_cell.started is None for _cell in _rankbook.current().cells()):
    _time.sleep(0.01)
"""


@pytest.fixture
def page_notebook(shared_kernel: SharedKernel, tmp_path: Path) -> Iterator[Notebook]:
    """Return a clean notebook without ranks, whose working folder is empty, since pages write files."""
    notebook = shared_kernel.take()
    before = notebook.ok("import os; print(os.getcwd())").stdout.strip()
    notebook.ok(f"%distributed stop\nos.chdir({str(tmp_path)!r})\n{MORE_TIME}%reset -f")
    try:
        yield notebook
    finally:
        notebook.ok("from rankbook.coordinator import cluster_processes as module")
        notebook.ok(f"module.GracePeriods = module.GracePeriods.func\nimport os; os.chdir({before!r})")
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
    differences = []
    for cell in todo:
        message = page_notebook.send(cell.code)
        outcome = page_notebook.finish(message, timeout=120)
        failed = outcome.status == "error" or "UsageError" in outcome.text
        assert failed == cell.raises, f"docs/{page}, line {cell.line}:\n{outcome.text}{outcome.traceback}"
        if "--background" in cell.code:  # a reader looks at it before the next cell, and it has begun by then
            page_notebook.ok(HAS_BEGUN)
        if cell.output is None:
            continue
        if "--background" in cell.code:
            page_notebook.follow(message, outcome, lambda seen, shown=cell.output: agree(shown, seen.text))
        printed = strip_ansi(outcome.text + outcome.traceback)
        if not agree(cell.output, printed, unseeded=cell.unseeded):
            differences.append(f"docs/{page}, line {cell.line}, shows\n{cell.output}but it prints\n{printed}")
    assert not differences, "\n".join(differences)


def test_pages_are_found_and_their_errors_are_marked():
    assert "tutorials/first-cell.md" in PAGES
    assert any(cell.raises for cell in cells("tutorials/when-something-goes-wrong.md"))
    assert cells("tutorials/first-cell.md")[1].output is not None


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("[0] loss 0.2097", "[0] loss 0.2098\n", True),
        ("[0] loss 0.2097", "[0] loss 0.2497\n", False),
        ("[0] loss 0.2097", "[1] loss 0.2097\n", False),
        ("[0] a\n    b\n[1] c\n    d\n", "[0] a\n[1] c\n[0] b\n[1] d\n", True),
        ("[0] a\n[1] c\n", "[0] c\n[1] a\n", False),
        ("[0] a\n    b\n", "[0] b\n    a\n", False),
        ("a\n…\nb in 3.2 s", "a\nx\ny\nb in 40 ms", True),
        ("a\n…\nb", "a\nx\nc", False),
        ("[0] a\n…\n[0] c\n", "[0] a\n[0] b\n[0] c\n", True),
        ("a", "a\nmore", False),
        ("waits for\n    Cell In[9]:5", "\x1b[31mwaits for Cell In[214]:5\x1b[0m", True),
        ("waits for Cell In[9]:5", "waits for Cell In[9]:6", False),
        ("1     dead   cpu     26178  exited", "1     dead   cpu     993  exited", True),
        ("6 files, 18,326 bytes", "6 files, 18,330 bytes", True),
        ("6 files, 18,326 bytes", "7 files, 18,326 bytes", False),
    ],
)
def test_a_shown_output_is_compared_without_what_varies(shown, printed, expected):
    assert agree(shown, printed) is expected
