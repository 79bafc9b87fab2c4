"""Notebooks written for Accelerate run, with the lines changed that docs/howto/from-accelerate.md names."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.conftest import MARK, check_nothing_left, ipython_folder, leftovers

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "howto" / "from-accelerate.md").read_text()
EPOCH = re.compile(r"^(?:\[0\] )?(epoch \d+: loss [\d.]+, accuracy ([\d.]+))$", re.MULTILINE)

pytestmark = pytest.mark.slow


def changes() -> dict[str, str]:
    """Return the changes of lines that the page documents: their old and new beginnings."""
    rows = re.findall(r"^\| `([^`…]+)…?` \| `([^`…]+)…?` \|$", PAGE.partition("\n## ")[0], re.MULTILINE)
    assert rows
    return dict(rows)


def upstream(tool: str) -> NotebookNode:
    return nbformat.read(ROOT / "tests" / "upstream" / f"{tool.lower()}.ipynb", as_version=4)


def changed(tool: str) -> NotebookNode:
    """The tool's notebook with these lines changed, and no other."""
    notebook, used = upstream(tool), set()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = cell.source.split("\n")
            for at, line in enumerate(lines):
                for old, new in changes().items():
                    if line.startswith(old):
                        lines[at] = new + line.removeprefix(old)
                        used.add(old)
            cell.source = "\n".join(lines)
    assert used == set(changes()), "the page names a line that the notebook has not"
    assert not any(re.search(rf"\b{tool.lower()}\b", c.source) for c in notebook.cells[1:])
    return notebook


def run(notebook: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the output of every cell, by its id. Check that the kernel leaves nothing behind."""
    before, mark = leftovers(), f"upstream-{folder.name}"
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("IPYTHONDIR", ipython_folder())
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    check_nothing_left(mark, before, timeout=5)
    return {
        cell.id: "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_notebook_written_for_accelerate(tmp_path, monkeypatch):
    printed = run(changed("Accelerate"), tmp_path, monkeypatch)
    accuracies = [float(accuracy) for _, accuracy in EPOCH.findall(printed["launch"])]
    assert len(accuracies) == 5, printed["launch"]
    assert accuracies[-1] > 95
    assert float(re.findall(r"all images: ([\d.]+)", printed["check"])[0]) > 95


@pytest.mark.timeout(300)
@pytest.mark.full
def test_script_gives_the_numbers_of_accelerate(tmp_path, monkeypatch):
    """Compare all but the order that `shuffle=True` draws, and schedules, which step once per process in Accelerate."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    original, changed_notebook = upstream("Accelerate"), changed("Accelerate")
    for notebook in (original, changed_notebook):
        (loaders,) = [cell for cell in notebook.cells if cell.id == "loaders"]
        loaders.source = loaders.source.replace("shuffle=True", "shuffle=False")
    (loop,) = [cell for cell in changed_notebook.cells if cell.id == "training-loop"]
    option = "mixed_precision=mixed_precision, scheduler_steps_times_num_processes=True"
    loop.source = loop.source.replace("mixed_precision=mixed_precision", option)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    expected = EPOCH.findall(run(original, tmp_path, monkeypatch)["launch"])
    assert len(expected) == 5
    assert EPOCH.findall(run(changed_notebook, tmp_path, monkeypatch)["launch"]) == expected
