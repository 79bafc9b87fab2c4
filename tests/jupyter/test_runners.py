"""The same notebook through everything that runs notebooks without a browser: the same outputs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.conftest import MARK, check_nothing_left, ipython_folder, leftovers

pytestmark = pytest.mark.slow

CELLS = [
    "value = rank * 10\nprint('on rank', rank)\nvalue",
    "total = torch.tensor([rank + 1.0])\ndist.all_reduce(total)\ntotal",
    "%%local\nhere = 'rank' in globals()\nhere",
    "print('a', 'line')\nworld_size",
    "from IPython.display import HTML, display\nif rank == 0:\n    display(HTML('<b>bold</b>'))",
    "%distributed pull value",
    "%%local\nvalue",
]

EXECUTE = "import sys; from nbclient.cli import main; sys.argv[0] = 'jupyter-execute'; main()"
CONVERT = ("-m", "nbconvert", "--to", "notebook", "--execute", "--inplace")
RUNNERS = {
    "jupyter execute": ["-c", EXECUTE, "--kernel_name={kernel}", "--inplace", "{file}"],
    "nbconvert": [*CONVERT, "--ExecutePreprocessor.kernel_name={kernel}", "{file}"],
    "papermill": ["-m", "papermill", "{file}", "{file}", "--kernel", "{kernel}", "--no-progress-bar"],
    "rankbook run": ["-m", "rankbook.cli", "run", "{file}", "--output", "{file}"],
    "nbmake": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", "--overwrite", "{file}"],
}
_PACKAGE = {"jupyter execute": "nbclient", "rankbook run": "nbclient"}


def write_notebook(file: Path, sources: list[str] = CELLS) -> None:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    kernel = {"name": "rankbook-2", "display_name": "Rankbook", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), file)


def shown(notebook: NotebookNode) -> list[list[tuple[str, str]]]:
    """Each cell's outputs: their kind, and text with streams joined, as a runner may cut them anywhere."""
    told = []
    for cell in notebook.cells:
        outputs: list[tuple[str, str]] = []
        for each in cell.outputs:
            if each.output_type != "stream":
                html = each.data.get("text/html", "").rsplit("</div>", 1)[-1]  # behind the rank's label
                outputs.append((each.output_type, html or each.data["text/plain"]))
            elif outputs and outputs[-1][0] == each.name:
                outputs[-1] = (each.name, outputs[-1][1] + each.text)
            else:
                outputs.append((each.name, each.text))
        told.append(outputs)
    return told


EXPECTED = [
    [("stdout", "[0] on rank 0\n[1] on rank 1\n"), ("execute_result", "[0] 0"), ("execute_result", "[1] 10")],
    [("execute_result", "[0-1] tensor([3.])")],
    [("execute_result", "False")],
    [("stdout", "[0-1] a line\n"), ("execute_result", "[0-1] 2")],
    [("display_data", "<b>bold</b>")],
    [("stdout", "value: a list with the value of ranks 0-1, in that order\n")],
    [("execute_result", "[0, 10]")],
]


@pytest.mark.parametrize(
    "runner", [runner if runner == "nbconvert" else pytest.param(runner, marks=pytest.mark.full) for runner in RUNNERS]
)
def test_a_notebook_gives_the_same_outputs(runner, install, tmp_path):
    package = _PACKAGE.get(runner, runner)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert install("-n", "2").returncode == 0
    file = tmp_path / "notebook.ipynb"
    write_notebook(file)
    before, mark = leftovers(), f"runner-{runner}"
    command = [each.format(kernel="rankbook-2", file=file) for each in RUNNERS[runner]]
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, MARK: mark, "IPYTHONDIR": ipython_folder()},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert shown(nbformat.read(file, as_version=4)) == EXPECTED
    check_nothing_left(mark, before, timeout=5)
