"""Every notebook in `examples/` runs from top to bottom, and shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(notebook: Path, output: Path, *options: str) -> str:
    """What `rankbook run` prints of `notebook`; the executed one is in `output`."""
    command = [sys.executable, "-m", "rankbook.cli", "run", str(notebook), "--output", str(output), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def pictures(notebook: NotebookNode) -> list[str]:
    """The PNG images among all outputs, in base64."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_there_is_a_test_for_every_example() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == ["quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_is_stored_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "world"),
    [
        pytest.param((), "0-1", id="default"),
        pytest.param(("-n", "3"), "0-2", id="3 ranks", marks=pytest.mark.slow),
    ],
)
def test_quickstart_learns_digits_on_all_ranks(options: tuple[str, ...], world: str, tmp_path: Path) -> None:
    printed = run(EXAMPLES / "quickstart.ipynb", tmp_path / "out.ipynb", *options)
    losses = [float(loss) for loss in re.findall(rf"^\[{world}\] epoch +\d+  loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 12, printed
    assert losses[-1] < losses[0] / 10
    on_ranks, in_notebook = map(float, re.findall(r"^(?:\[.*\] )?test accuracy ([\d.]+)%$", printed, re.MULTILINE))
    assert on_ranks == in_notebook >= 95
    assert re.search(rf"^{int(world[-1]) + 1} ranks agree on all 29,\d+ weights$", printed, re.MULTILINE)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert len(pictures(executed)) == 1
    assert not [
        output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]
