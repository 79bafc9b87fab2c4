"""The examples in the docstrings of public names run, and return what their comments say."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Notebook, running_kernel

PACKAGES = ("rankbook", "rankbook.checkpoint")
BLOCK = re.compile(r"^Example::\n\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
VALUE = re.compile(r"tensor\(|torch\.\w+(?:\(|$)|[\[({'\"\d-]|True$|False$|None$")
"""Comments that are values. Others are remarks."""
NOT_RUN = {"attach": "it needs the ranks of another notebook"}
NEEDS = {"WandBTracker": "wandb", "MLflowTracker": "mlflow", "TensorBoardTracker": "tensorboard"}
WITHOUT = {
    # Called by IPython.
    "load_ipython_extension",
    "unload_ipython_extension",
    # Types of results and states, whose function has the example.
    "Finding",
    "GradientState",
    "GradientTable",
    "Healed",
    "ParameterGradient",
    "Peeked",
    "RankOutcome",
    "RankStatus",
    "SeenSamples",
    "SyncReport",
    # Made by `prepare`, or by the function that prepares a loader.
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SkipBatchSampler",
    "SkipDataLoader",
    # Base classes and enumerations. docs/howto/experiment-trackers.md has a tracker of one's own.
    "DDPCommunicationHookType",
    "DynamoBackend",
    "GeneralTracker",
    "KwargsHandler",
    "StrictHandling",
    "Tracker",
    # docs/tutorials/tensor-parallel.md has a model with a plan.
    "TorchTensorParallelConfig",
    # Megatron-Core's interface for its own layers.
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
}
ON_RANKS = """\
%%distributed
from rankbook import *
from rankbook.checkpoint import *
import shutil
from datetime import timedelta

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="no")
state = PartialState()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
optimizer.zero_grad()
loader = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)
loss, threshold, prompts = torch.tensor(0.5), 1.0, ["a", "b", "c"]
generate = str.upper
download_and_cache = list
if rank == 0:
    shutil.rmtree("checkpoints", ignore_errors=True)
dist.barrier()
state_dict = sharded_state_dict(model, optimizer)
save(state_dict, "checkpoints", step=100)
"""
"""Names that the examples on ranks refer to."""


class Example(NamedTuple):
    """An example of a public name, or of a method of a class."""

    name: str
    code: str

    @property
    def in_notebook(self) -> bool:
        """Return True if the example runs in the notebook process and not on the ranks."""
        return "rankbook." in self.code or "Cluster(" in self.code


def public() -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes with their names, once each, and without exceptions."""
    visited = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            error = inspect.isclass(value) and issubclass(value, BaseException)
            if (inspect.isfunction(value) or inspect.isclass(value)) and not error and id(value) not in visited:
                visited.add(id(value))
                yield name, value


def examples(names: Iterable[tuple[str, Any]]) -> list[Example]:
    """Return the examples of these functions and classes, and of their methods."""
    collected = []
    for name, value in names:
        members = {name: value}
        if inspect.isclass(value):
            members |= {f"{name}.{member}": vars(value)[member] for member in vars(value) if member[0] != "_"}
        for member_name, member in members.items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not inspect.isfunction(function) and not inspect.isclass(function):
                continue
            docstring = inspect.cleandoc(function.__doc__ or "") + "\n"
            blocks = [textwrap.dedent(block).strip() for block in BLOCK.findall(docstring)]
            collected += [Example(f"{member_name}-{number}" if number else member_name, block)
                      for number, block in enumerate(blocks)]  # fmt: skip
    return collected


def checked(code: str) -> str:
    """Return the code with an assertion for every expression whose comment is a value."""
    lines = code.split("\n")
    for node in ast.parse(code).body:
        line = lines[node.end_lineno - 1] if node.end_lineno else ""
        comment = line[node.end_col_offset :].strip().removeprefix("# ")
        if isinstance(node, ast.Expr) and node.lineno == node.end_lineno and VALUE.match(comment):
            expression = ast.get_source_segment(code, node)
            lines[node.lineno - 1] = f"found = {expression}; assert repr(found) == {comment!r}, repr(found)"
    return "\n".join(lines)


def of_engines() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of `rankbook.engines` and `rankbook.testing`, those for internal use too."""
    package = importlib.import_module("rankbook.engines")
    modules = [f"rankbook.engines.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for module in (*modules, "rankbook.testing"):
        for name, value in vars(importlib.import_module(module)).items():
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module:
                yield name, value


EXAMPLES = examples(public())
ENGINE_EXAMPLES = examples(of_engines())


@pytest.fixture(scope="module")
def example_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Return a notebook whose working folder is empty, since examples write files."""
    with running_kernel(cwd=Path(tmp_path_factory.mktemp("examples")), ranks=2) as notebook:
        yield notebook


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_returns_what_it_says(example: Example, example_notebook: Notebook) -> None:
    name = example.name.partition("-")[0]
    if name in NOT_RUN:
        pytest.skip(NOT_RUN[name])
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    example_notebook.ok(ON_RANKS)  # starts the ranks again where an example has stopped them
    head = "import rankbook\nfrom rankbook import Cluster\n" if example.in_notebook else "%%distributed\n"
    outcome = example_notebook.run(head + checked(example.code))
    assert outcome.status == "ok", f"{example.code}\n{outcome.text}{outcome.traceback}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", ENGINE_EXAMPLES, ids=lambda example: example.name)
def test_an_example_of_an_engine_runs_and_returns_what_it_says(example: Example, tmp_path: Path) -> None:
    owner = example.name.partition("-")[0].partition(".")[0]
    module = {name: value.__module__ for name, value in of_engines()}[owner]
    code = f"""\
import rankbook
from pathlib import Path
from rankbook.engines import AgentConnection
from {module} import *
from {module} import {owner}
connection = AgentConnection("a key", Path("file"))
{checked(example.code)}
rankbook.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{example.code}\n{done.stdout}{done.stderr}"


def test_engines_have_examples_that_are_compared():
    assert {"FakeEngine", "check_engine", "AgentConnection.command", "split_arguments"} <= {
        example.name for example in ENGINE_EXAMPLES
    }
    compared = [example.name for example in ENGINE_EXAMPLES if "assert repr(found)" in checked(example.code)]
    assert len(compared) >= len(ENGINE_EXAMPLES) - 3


def test_public_functions_and_settings_have_an_example():
    with_example = {example.name.partition("-")[0] for example in EXAMPLES}
    names = {name for name, _ in public()}
    assert sorted(names - with_example - WITHOUT) == []
    assert sorted(WITHOUT - names | WITHOUT & with_example) == [], "names that are gone, or that have an example now"


def test_values_in_comments_are_compared_and_remarks_are_not():
    code = checked("x = 1  # [1]\nx + 1  # 2\nx.real  # the real part\nx.bit_count()  # True")
    assert code.split("\n")[0] == "x = 1  # [1]" and code.split("\n")[2] == "x.real  # the real part"
    exec(code.rsplit("\n", 1)[0], {})
    with pytest.raises(AssertionError):
        exec(code, {})
    compared = [example.name for example in EXAMPLES if "assert repr(found)" in checked(example.code)]
    assert len(compared) > 20
