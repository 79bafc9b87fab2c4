"""Test tools that read notebooks with the settings of docs/howto/linters.md."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from rankbook.jupyter.kernel import RankbookKernel

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "linters.md").read_text()
(SETTINGS,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
DECLARED, _ = re.findall(r"^```python\n%%distributed\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)

ON_RANKS = [
    DECLARED,
    "x =torch.ones( 2, device=device)*(rank+1)\nwork = dist.all_reduce( x )\nprint(x.sum(), world_size)\nlocal_rank",
    "import asyncio\n\nawait asyncio.sleep( 0 )\nx.shape",
]
FORMATTED = [
    DECLARED,
    "x = torch.ones(2, device=device) * (rank + 1)\nwork = dist.all_reduce(x)\nprint(x.sum(), world_size)\nlocal_rank",
    "import asyncio\n\nawait asyncio.sleep(0)\nx.shape",
]
FAULTS = ["import json\n\nwrong: int = 'text'\nprint(not_there)"]
KINDS = pytest.mark.parametrize("kind", ["rankbook", "python3"])

pytestmark = pytest.mark.timeout(300)


def cells(kind: str, on_ranks: list[str]) -> list[str]:
    """Return a notebook's cells: plain ones for our kernel, `%%distributed` ones for the stock kernel."""
    if kind == "rankbook":
        return [*on_ranks, "%%local\nhere = 1", "%distributed status"]
    magic = [f"%%distributed --ranks 0-1\n{code}" for code in on_ranks]
    return ["%load_ext rankbook", "%distributed start -n 2", *magic, "%distributed status"]


def write(folder: Path, kind: str, on_ranks: list[str]) -> Path:
    (folder / "pyproject.toml").write_text(SETTINGS)
    file = folder / "notebook.ipynb"
    code = [nbformat.v4.new_code_cell(source, id=f"c{at}") for at, source in enumerate(cells(kind, on_ranks))]
    kernel = {"name": kind, "display_name": kind, "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": dict(RankbookKernel.language_info)}
    nbformat.write(nbformat.v4.new_notebook(cells=code, metadata=metadata), file)
    return file


def sources(file: Path) -> list[str]:
    notebook: NotebookNode = nbformat.read(file, as_version=4)
    return [cell.source for cell in notebook.cells]


def tool(file: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a tool on this notebook, and what it says."""
    for name in (argument.split()[0] for argument in arguments[: 2 if arguments[0] == "nbqa" else 1]):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'rankbook[lint]'")
    plain = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "MYPY_FORCE_COLOR")}
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=file.parent,
        env={**plain, "NO_COLOR": "1", "PATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.processes
def test_ruff_knows_the_names_of_the_ranks_in_a_notebook_of_our_kernel(tmp_path):
    check = ("ruff", "check", "--output-format=concise", ".")
    output = tool(write(tmp_path, "rankbook", ON_RANKS), *check)
    assert output == (0, "All checks passed!\n")
    code, reported = tool(
        write(tmp_path, "rankbook", [*ON_RANKS, *FAULTS]), "ruff", "check", "--output-format=concise", "."
    )
    assert code == 1
    assert "F401" in reported
    assert "F821 Undefined name `not_there`" in reported


@pytest.mark.processes
def test_ruff_skips_magic_cells_as_documented(tmp_path):
    file = write(tmp_path, "python3", [*ON_RANKS, *FAULTS])
    assert tool(file, "ruff", "check", ".") == (0, "All checks passed!\n")
    before = sources(file)
    assert tool(file, "ruff", "format", ".")[0] == 0
    assert sources(file) == before


@pytest.mark.full
@KINDS
def test_nbqa_takes_ruff_into_the_cells_of_the_ranks(kind, tmp_path):
    check = ("nbqa", "ruff check", ".", "--output-format=concise")
    output = tool(write(tmp_path, kind, ON_RANKS), *check)
    assert output == (0, "All checks passed!\n")
    code, reported = tool(write(tmp_path, kind, [*ON_RANKS, *FAULTS]), *check)
    assert code == 1
    assert sorted(re.findall(r" ([A-Z]+\d+) ", reported)) == ["F401", "F821"], reported


@pytest.mark.full
@KINDS
@pytest.mark.parametrize("formatter", [("black", "."), ("nbqa", "ruff format", ".")], ids=["black", "nbqa ruff"])
def test_a_formatter_formats_the_cells_of_the_ranks_and_keeps_their_magics(formatter, kind, tmp_path):
    file = write(tmp_path, kind, ON_RANKS)
    code, reported = tool(file, *formatter)
    assert code == 0, reported
    assert sources(file) == cells(kind, FORMATTED)


@pytest.mark.full
@KINDS
def test_mypy_reads_the_cells_of_the_ranks_with_their_names_declared(kind, tmp_path):
    code, reported = tool(write(tmp_path, kind, [*ON_RANKS, *FAULTS]), "nbqa", "mypy", ".", "--no-color-output")
    assert code == 1, reported
    assert sorted(re.findall(r"\[([a-z-]+)\]$", reported, re.MULTILINE)) == ["assignment", "name-defined"], reported


@pytest.mark.full
@KINDS
def test_jupytext_gives_the_same_notebook_back(kind, tmp_path):
    file = write(tmp_path, kind, ON_RANKS)
    before = sources(file)
    code, reported = tool(file, "jupytext", "--to", "py:percent", "notebook.ipynb")
    assert code == 0, reported
    script = (tmp_path / "notebook.py").read_text()
    assert "\nwork = dist.all_reduce( x )\n" in script, "the code of the ranks is code there"
    compile(script.replace("await ", ""), "notebook.py", "exec")
    file.unlink()
    code, reported = tool(file, "jupytext", "--to", "ipynb", "notebook.py")
    assert code == 0, reported
    assert sources(file) == before


@pytest.mark.full
def test_the_formatted_notebook_runs(tmp_path):
    file = write(tmp_path, "python3", FORMATTED)
    code, reported = tool(file, "rankbook.cli", "run", "notebook.ipynb")
    assert code == 0, reported
    assert "[0-1] tensor(6.) 2\n" in reported, reported
