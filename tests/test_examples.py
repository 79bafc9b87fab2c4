"""Test that every example runs from top to bottom and shows what it promises."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
RENDERED = Path(__file__).parents[1] / "docs" / "examples"
LOSE_A_RANK = {"checkpoints": ["interrupted"], "protection": ["protect-10", "protect-14"]}
"""Cells of examples that fail because a rank is killed in them."""
SCRIPT = EXAMPLES / "train_digits.py"
CHECKS = Path(__file__).parents[1] / ".ci" / "run"
README = Path(__file__).parents[1] / "README.md"


def run(notebook: Path, output: Path, *options: str) -> str:
    """Return the output of `rankbook run` for `notebook`; the executed notebook is written to `output`."""
    command = [sys.executable, "-m", "rankbook.cli", "run", str(notebook), "--output", str(output), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def run_python(*arguments: str, cwd: Path) -> str:
    """Return the output of Python for these arguments. It must exit with status 0."""
    one_thread = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # threads that spin for each other take minutes on a busy machine
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=cwd, env=one_thread, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def pictures(notebook: NotebookNode) -> list[str]:
    """The PNG images among all outputs, in base64."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_every_example_has_a_test() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == [
        "accelerator.ipynb",
        "checkpoints.ipynb",
        "numbers.ipynb",
        "protection.ipynb",
        "quickstart.ipynb",
        "trackers.ipynb",
    ]
    assert sorted(EXAMPLES.glob("*.py")) == [SCRIPT]


def runs_without_full(test: Any) -> int:
    """Return how many times `pytest -m "not full"` runs a test of this module."""
    marks = getattr(test, "pytestmark", [])
    if any(mark.name == "full" for mark in marks):
        return 0
    tables = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    is_full = lambda row: any(mark.name == "full" for mark in getattr(row, "marks", ()))  # noqa: E731 - used once
    return math.prod(sum(not is_full(row) for row in table) for table in tables)


def test_every_notebook_is_executed_once_by_the_checks_of_a_change() -> None:
    # .ci/full runs the commands of README.md that call these programs.
    (programs,) = re.findall(r'^ *for program in (".+"); do$', CHECKS.read_text(), re.MULTILINE)
    commands = re.findall(r"^pip install .* && (.+) examples/(\w+)\.ipynb$", README.read_text(), re.MULTILINE)
    assert [program for program, _ in commands] == re.findall(r'"(.+?)"', programs)
    executed = Counter(re.findall(r'rankbook" run "\$root/examples/(\w+)\.ipynb"$', CHECKS.read_text(), re.MULTILINE))
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            (notebook,) = re.findall(r'\brun\(EXAMPLES / "(\w+)\.ipynb"', inspect.getsource(test)) or [""]
            executed[notebook] += runs_without_full(test)
    del executed[""]
    assert executed == Counter(path.stem for path in NOTEBOOKS)


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_documentation_shows_the_cells_of_an_example_with_their_outputs(path: Path) -> None:
    notebook, rendered = (nbformat.read(file, as_version=4) for file in (path, RENDERED / path.name))
    cells = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (notebook, rendered)]
    assert cells[0] == cells[1], f"run `python docs/render.py {path.stem}`"
    assert len(pictures(rendered)) == (0 if path.stem in {"accelerator", "numbers"} else 1)
    outputs = [output for cell in rendered.cells for output in cell.get("outputs", [])]
    assert len(outputs) > (4 if path.stem == "trackers" else 8)
    errors = [cell.id for cell in rendered.cells for item in cell.get("outputs", []) if item.output_type == "error"]
    assert errors == LOSE_A_RANK.get(path.stem, [])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "world"),
    [
        pytest.param((), "0-1", id="default", marks=pytest.mark.full),  # .ci/run executes it from the wheel
        pytest.param(("-n", "3"), "0-2", id="3 ranks", marks=pytest.mark.full),
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
    assert len(re.findall(r"^model \(model\): 6 tensors; 116 kB per rank$", printed, re.MULTILINE)) == 1
    assert len(re.findall(r"^\d ranks: ", printed, re.MULTILINE)) == 1, "a view once, also where the run takes long"
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert len(pictures(executed)) == 1
    assert not [
        output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "world"),
    [
        pytest.param((), "0-1", id="default"),
        pytest.param(("-n", "3"), "0-2", id="3 ranks", marks=pytest.mark.full),
    ],
)
def test_accelerator_trains_resumes_and_changes_precision_on_all_ranks(
    options: tuple[str, ...], world: str, tmp_path: Path
) -> None:
    printed = run(EXAMPLES / "accelerator.ipynb", tmp_path / "out.ipynb", *options)
    losses = [float(loss) for loss in re.findall(r"^\[0\] epoch +\d+  loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 10, printed
    assert losses[-1] < losses[0] / 5
    matches = re.findall(rf"^\[{world}\] test accuracy ([\d.]+)% (of 451 images|in bf16)", printed, re.MULTILINE)
    assert [what for _, what in matches] == ["of 451 images", "in bf16"]
    assert min(float(accuracy) for accuracy, _ in matches) >= 95
    assert re.search(rf"^\[{world}\] the same weights after batches \d+ to \d+, twice$", printed, re.MULTILINE)
    assert re.search(rf"^rank {world[-1]} in precision 'no': \[.+\]$", printed, re.MULTILINE)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert not [
        output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_outlives_a_killed_rank_and_three_go_on(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "checkpoints.ipynb", tmp_path / "out.ipynb")
    (first, last) = re.findall(r"^\[0-1\] 37 batches, loss ([\d.]+) to ([\d.]+)$", printed, re.MULTILINE)[0]
    assert float(last) < float(first) / 5
    # One line of both ranks or, where one of them was late, a line of each; the plan of the save has its name.
    assert re.search(r"^\[(0-1|0)\] batch 25: <save of (state|a checkpoint) to ", printed, re.MULTILINE), printed
    assert re.search(r"^1 +dead .*was killed by SIGKILL", printed, re.MULTILINE)
    assert "state: intact (" in printed
    resumed = re.search(r"^\[0-2\] 22 batches were left, loss [\d.]+ to ([\d.]+)$", printed, re.MULTILINE)
    assert resumed is not None, printed
    assert float(resumed[1]) == pytest.approx(float(last), abs=2e-4)
    assert re.search(r"^the losses differ by \de-\d\d at most$", printed, re.MULTILINE)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert len(pictures(executed)) == 1
    errors = [cell.id for cell in executed.cells for item in cell.get("outputs", []) if item.output_type == "error"]
    assert errors == LOSE_A_RANK["checkpoints"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_protected_training_has_the_losses_of_one_without_a_death(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "protection.ipynb", tmp_path / "out.ipynb", "-n", "2")
    assert len(re.findall(r"^back at step [24]0: 1 step to repeat$", printed, re.MULTILINE)) == 2, printed
    assert "60 steps, bitwise equal: True" in printed
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert len(pictures(executed)) == 1
    errors = [cell.id for cell in executed.cells for item in cell.get("outputs", []) if item.output_type == "error"]
    assert errors == ["protect-10", "protect-14"], "the two that lose a rank"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_main_rank_logs_what_all_ranks_have_trained(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "trackers.ipynb", tmp_path / "out.ipynb")
    assert len(re.findall(r"^\[0\] epoch \d  test accuracy [\d.]+%$", printed, re.MULTILINE)) == 6, printed
    assert "{'lr': 0.005, 'batch_size': 32, 'epochs': 6}" in printed
    # 22 batches per rank and epoch: a line for every fifth step, one per epoch, and the settings.
    assert "33 lines, all of rank 0" in printed
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(executed)
    assert len(pictures(executed)) == 1
    assert not [
        output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [
        pytest.param((), 1, id="alone", marks=pytest.mark.full),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            2,
            id="torchrun",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_script_learns_digits(launcher: tuple[str, ...], world_size: int, tmp_path: Path) -> None:
    printed = run_python(*launcher, str(SCRIPT), cwd=tmp_path)
    assert len(re.findall(r"^epoch +\d+  loss [\d.]+$", printed, re.MULTILINE)) == 10, printed
    (match,) = re.findall(r"^test accuracy ([\d.]+)% of 451 images, world size (\d+)$", printed, re.MULTILINE)
    assert float(match[0]) >= 95
    assert int(match[1]) == world_size


IN_A_NOTEBOOK = """
import rankbook
from train_digits import main
print("returned", rankbook.notebook_launcher(main, (1,), num_processes=2))
rankbook.stop()
"""


@pytest.mark.slow
def test_the_script_runs_on_the_ranks_of_a_notebook() -> None:
    printed = run_python("-c", IN_A_NOTEBOOK, cwd=EXAMPLES)
    (accuracy,) = re.findall(r"^\[0\] test accuracy ([\d.]+)% of 451 images, world size 2$", printed, re.MULTILINE)
    returned = re.search(r"^returned \[([\d.]+), ([\d.]+)\]$", printed, re.MULTILINE)
    assert returned is not None, printed
    assert returned[1] == returned[2]
    assert f"{float(returned[1]):.1%}" == f"{accuracy}%"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_planted_bugs_are_found(tmp_path: Path) -> None:
    run(EXAMPLES / "numbers.ipynb", tmp_path / "out.ipynb", "-n", "2")
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    text = "\n".join(
        str(output.get("text") or output.get("data", {}).get("text/plain"))
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    for found in (
        "1 entry will be equal again",
        "model.mean  buffer  1",
        "tied to model.embed.weight on rank 0; not tied on rank 1",
        "optimizer.state.fc.weight.exp_avg",
        "is in the optimizer on rank 1 only",
        "32 samples lost",
        "gradient norm 1 over 3 parameters",
    ):
        assert found in text, found


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["numbers", "protection"])
def test_an_example_fails_only_where_a_rank_is_killed(name: str, tmp_path: Path) -> None:
    run(EXAMPLES / f"{name}.ipynb", tmp_path / "out.ipynb")
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    errors = [cell.id for cell in executed.cells for item in cell.get("outputs", []) if item.output_type == "error"]
    assert errors == LOSE_A_RANK.get(name, [])
