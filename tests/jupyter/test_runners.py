"""Test that tools which run notebooks without a browser give the same outputs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
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
_PACKAGE = {"jupyter execute": "nbclient", "rankbook run": "nbclient", "rankbook run --kernel": "nbclient"}
_KERNEL_OPTION = {"rankbook run --kernel": ("--kernel", "{kernel}")}  # the notebook itself names python3
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def write_notebook(file: Path, sources: list[str] = CELLS) -> None:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    kernel = {"name": "rankbook-2", "display_name": "Rankbook", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), file)


def outputs_of(notebook: NotebookNode) -> list[list[tuple[str, str]]]:
    """Return the kinds and texts of the outputs of every cell, with streams joined, as a runner may split them."""
    reported = []
    for cell in notebook.cells:
        outputs: list[tuple[str, str]] = []
        for output in cell.outputs:
            if output.output_type != "stream":
                html = output.data.get("text/html", "").rsplit("</div>", 1)[-1]  # behind the rank's label
                outputs.append((output.output_type, html or output.data["text/plain"]))
            elif outputs and outputs[-1][0] == output.name:
                outputs[-1] = (output.name, outputs[-1][1] + output.text)
            else:
                outputs.append((output.name, output.text))
        reported.append(outputs)
    return reported


EXPECTED = [
    [("stdout", "[0] on rank 0\n[1] on rank 1\n"), ("execute_result", "[0] 0"), ("execute_result", "[1] 10")],
    [("execute_result", "[0-1] tensor([3.])")],
    [("execute_result", "False")],
    [("stdout", "[0-1] a line\n"), ("execute_result", "[0-1] 2")],
    [("display_data", "<b>bold</b>")],
    [("stdout", "value: a list with the values of ranks 0-1, in this order\n")],
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
    execute(RUNNERS[runner], file)
    assert outputs_of(nbformat.read(file, as_version=4)) == EXPECTED


@pytest.mark.full  # .ci/run executes the quickstart with `rankbook run`
@pytest.mark.timeout(400)
@pytest.mark.parametrize("runner", ["papermill", "nbconvert", "rankbook run --kernel"])
def test_the_quickstart_runs_as_it_is_in_the_rankbook_kernel(runner, install, tmp_path):
    if importlib.util.find_spec(_PACKAGE.get(runner, runner)) is None:
        pytest.skip(f"{runner} is not installed")
    assert install("-n", "2").returncode == 0
    file = Path(shutil.copy(QUICKSTART, tmp_path))
    execute([*RUNNERS[runner.removesuffix(" --kernel")], *_KERNEL_OPTION.get(runner, ())], file, timeout=300)
    executed = nbformat.read(file, as_version=4)
    outputs = {cell.id: as_text(cell.get("outputs", ())) for cell in executed.cells}
    pushed = "train_images, train_labels, test_images, test_labels"
    assert outputs["push"] == f"{pushed}: nothing to copy, are not in the notebook but already on ranks 0-1\n"
    assert "model (model): 6 tensors" in outputs["shards"] and "2 ranks: " in outputs["placement"]
    assert re.fullmatch(r"2 ranks agree on all 29,066 weights\ntest accuracy 9\d\.\d%\n", outputs["check"])


def as_text(outputs) -> str:
    return "".join(
        output.text if output.output_type == "stream" else output.data["text/plain"] + "\n" for output in outputs
    )


def execute(options: list[str], file: Path, *, timeout: float = 100) -> None:
    """Run a notebook in place. Nothing may be left of it."""
    before, mark = leftovers(), f"runner-{file.parent.name}"
    ended = subprocess.run(
        [sys.executable, *(option.format(kernel="rankbook-2", file=file) for option in options)],
        cwd=file.parent,
        env={**os.environ, MARK: mark, "IPYTHONDIR": ipython_folder(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    check_nothing_left(mark, before, timeout=5)
