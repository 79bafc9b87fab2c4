"""What is written about the code is what the code says."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rankbook.magics import arguments

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def load_draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["wire.md", "states.md"])
def test_a_drawn_page_is_what_the_code_draws(page):
    drawn = load_draw().PAGES[page]()
    assert (ROOT / "docs" / page).read_text() == drawn, "run `python docs/draw.py`"


def test_every_drawn_page_is_compared():
    assert set(load_draw().PAGES) == {"wire.md", "states.md"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/coming-from.md"])
def test_every_link_within_the_repository_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    folder = (ROOT / page).parent
    assert [each for each in targets if "://" not in each and not (folder / each).exists()] == []


def test_the_magics_that_replace_those_of_nbdistributed_exist():
    page = (ROOT / "docs" / "nbdistributed.md").read_text()
    lines = re.findall(r"`(%{1,2})distributed ([^`]+)`", page)
    assert len(lines) >= 8
    for marks, line in lines:
        (arguments.parse_line if marks == "%" else arguments.parse_cell_line)(line)  # raises on an unknown one


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/coming-from.md"])
def test_every_file_that_a_page_names_is_there(page):
    names = re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|ipynb|md|toml))`", (ROOT / page).read_text())
    names += re.findall(
        r"(?:python|pytest|bash|run) ((?:tests|docs|examples|\.ci)/[\w./-]+)", (ROOT / page).read_text()
    )
    assert names
    assert [
        each for each in names if not (ROOT / each).exists() and not (ROOT / "kernel" / "rankbook" / each).exists()
    ] == []


def test_the_readme_names_the_two_commands():
    assert 'pip install -c constraints.txt ".[notebook]" && rankbook run examples/quickstart.ipynb\n' in README
    assert 'pip install -c constraints.txt -e ".[test]" && pytest\n' in README


def test_the_readme_names_every_option_of_a_cell_and_no_other():
    parser = arguments._cell_parser
    shown = {max(each.option_strings, key=len) for each in parser._actions if each.help is not argparse.SUPPRESS}
    assert set(re.findall(r"^\| `(--\w+)", README, flags=re.MULTILINE)) == shown


def test_the_readme_names_every_command_and_no_other():
    section = README.partition("| `%distributed …` |")[2].partition("`%distributed?`")[0]
    assert list(dict.fromkeys(re.findall(r"^\| `(\w+)", section, flags=re.MULTILINE))) == list(arguments.COMMANDS)


def test_the_readme_names_the_environment_variables_that_the_code_reads():
    code = "".join(
        file.read_text() for folder in ("kernel", "magics", "widgets") for file in (ROOT / folder).rglob("*.py")
    )
    assert set(re.findall(r"\bRANKBOOK_[A-Z_]+", README)) == set(re.findall(r"\bRANKBOOK_[A-Z_]+", code))


@pytest.mark.processes
def test_the_example_of_the_python_interface_runs_and_returns_what_it_says():
    example = next(
        each for each in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "rankbook.start" in each
    )
    checked = []
    for line in example.splitlines():
        call, _, value = line.partition("#")
        promised = re.search(r"\[.*\]", value)
        name = re.match(r"\s*(\w+) = ", call)
        if promised and name:
            checked.append(f"{call}\n    assert {name[1]} == {promised[0]}, {name[1]}")
        elif promised:
            checked.append(f"    assert {call.strip()} == {promised[0]}")
        else:
            checked.append(call)
    assert sum("assert" in line for line in checked) == 3
    program = "\n".join(checked)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, ""), program


TRAINED = """
import rankbook, torch
with rankbook.start(2) as cluster:
    cluster.run(
        "torch.manual_seed(0)\\nx = torch.randn(64, 3)\\nmodel = torch.nn.Linear(3, 1)\\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\\n"
        "loader = torch.utils.data.DataLoader(list(zip(x, x.sum(1, keepdim=True))), batch_size=4)\\n"
        "before = model.weight.detach().clone()"
    )
    cluster.run(cell)
    cluster.run("after = accelerator.unwrap_model(model).weight.detach()\\nassert len(loader) == 8")
    before, after = cluster.pull("before"), cluster.pull("after")
    assert torch.equal(after[0], after[1])
    assert (after[0] - 1).norm() < 0.5 * (before[0] - 1).norm()
    assert cluster.pull("accelerator.mixed_precision") == ["bf16"] * 2
"""


@pytest.mark.slow
def test_the_example_of_the_accelerator_trains_on_ranks():
    (example,) = [
        each for each in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "Accelerator(" in each
    ]
    magic, _, cell = example.partition("\n")
    assert magic == "%%distributed"
    program = f"cell = {cell!r}\n{TRAINED}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, ""), program


SAVED = """
import os, tempfile, rankbook, torch
os.chdir(tempfile.mkdtemp())
with rankbook.start(2) as cluster:
    cluster.run(
        "torch.manual_seed(0)\\nmodel = torch.nn.Linear(3, 1)\\noptimizer = torch.optim.Adam(model.parameters())\\n"
        "model(torch.ones(3)).sum().backward()\\noptimizer.step()\\nthen = model.weight.detach().clone()"
    )
    cluster.run(cell)
    cluster.run("now, name = model.weight.detach(), saving.wait().name")
    assert all(torch.equal(*each) for each in zip(cluster.pull("then"), cluster.pull("now")))
    assert cluster.pull("name") == ["step-40"] * 2
"""


@pytest.mark.slow
def test_the_example_of_checkpoints_saves_and_loads():
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "save(" in each]
    magic, _, cell = example.partition("\n")
    assert magic == "%%distributed"
    cell = cell.replace("\nload_", "\nmodel.weight.data.zero_()\nload_")
    assert "zero_" in cell
    program = f"cell = {cell!r}\n{SAVED}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, ""), program


def test_the_contributing_page_names_arguments_that_the_benchmarks_take():
    lines = re.findall(
        r"^python (tests/benchmarks/\w+\.py.*?)(?:  +#.*)?$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(lines) == 3
    for line in lines:
        script, *arguments = shlex.split(line)
        source = (ROOT / script).read_text()
        assert [each for each in arguments if each.startswith("--") and f'"{each}"' not in source] == []


@pytest.mark.parametrize("script", ["matrix", "pythons"])
def test_every_test_file_that_a_check_names_is_there(script):
    text = (ROOT / ".ci" / script).read_text()
    named = re.findall(r"\btests/[\w/{},.]+", text)
    assert len(named) > 4
    for name in named:
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            assert (ROOT / f"{before}{choice}{after}").exists(), f".ci/{script} names {before}{choice}{after}"
