"""The examples in docstrings run, and return what their comments say.

Those of public names run in a kernel or on its ranks, as a user runs them. Those of internal functions, which need no
ranks, run in the process of the tests.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Notebook, running_kernel

PACKAGES = ("rankbook", "rankbook.checkpoint", "rankbook.engines", "rankbook.testing")
ROOT = Path(__file__).parents[1]
SOURCES = [file for folder in ("kernel/rankbook", "magics", "widgets") for file in (ROOT / folder).rglob("*.py")]
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
    # docs/reference/api-engines.md has a complete engine, with the events that it reports; `AgentConnection.command`
    # has an example.
    "AgentConnection",
    "Engine",
    "HostEnded",
    "HostOutput",
    "HostQueued",
    "HostStarted",
    "Limits",
    "Notice",
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
IN_NOTEBOOK = """\
import rankbook
from pathlib import Path
from rankbook import Cluster
from rankbook.engines import AgentConnection, split_arguments
from rankbook.testing import FakeEngine, check_engine

cluster = rankbook.current()
connection = AgentConnection("", Path("connection.json"))
"""
"""Names that the examples in the notebook process refer to."""
BEFORE = {
    "Cluster.gradients": """\
cluster.run('''
model = torch.nn.Sequential()
model.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 1)})])
model.blocks[0]["fc"](torch.ones(4, 8)).sum().backward()
''')
""",
    "FakeEngine": "rankbook.stop()\n",
}
"""What runs before single examples."""
AFTER = {"FakeEngine": "\nrankbook.stop()"}
"""What runs after single examples."""


class Example(NamedTuple):
    """An example of a public name, or of a method of a class."""

    name: str
    code: str

    @property
    def in_notebook(self) -> bool:
        """Return True if the example runs in the notebook process and not on the ranks."""
        return (
            re.search(r"\brankbook\.|Cluster\(|\bcluster\.|_engine\(|connection\.|split_arguments", self.code)
            is not None
        )


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


def examples() -> list[Example]:
    """Return the examples of the public names and their methods, also of those that a class inherits."""
    collected, visited = [], set()
    for name, value in public():
        members = {name: value}
        if inspect.isclass(value):
            for owner in reversed([owner for owner in value.__mro__ if owner.__module__.startswith("rankbook.")]):
                members |= {f"{name}.{member}": vars(owner)[member] for member in vars(owner) if member[0] != "_"}
        for member_name, member in members.items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not (inspect.isfunction(function) or inspect.isclass(function)) or id(function) in visited:
                continue
            visited.add(id(function))
            docstring = inspect.cleandoc(function.__doc__ or "") + "\n"
            blocks = [textwrap.dedent(block).strip() for block in BLOCK.findall(docstring)]
            collected += [Example(f"{member_name}-{number}" if number else member_name, block)
                      for number, block in enumerate(blocks)]  # fmt: skip
    return collected


def internal_examples() -> list[Example]:
    """Return the examples in all modules that are not those of public names: "module:name"."""
    of_public = {example.code for example in EXAMPLES}
    collected = []
    for file in SOURCES:
        source = file.read_text()
        if "Example::" not in source:
            continue
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = module.removeprefix("kernel.") if module.startswith("kernel.") else f"rankbook.{module}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                name = getattr(node, "name", "")
                blocks = BLOCK.findall((ast.get_docstring(node) or "") + "\n")
                collected += [Example(f"{module}:{name}", textwrap.dedent(block).strip()) for block in blocks]
    return [example for example in collected if example.code not in of_public]


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


EXAMPLES = examples()


@pytest.fixture(scope="module")
def example_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Return a notebook whose working folder is empty, since examples write files."""
    folder = Path(tmp_path_factory.mktemp("examples"))
    with running_kernel(cwd=folder, env={"RANKBOOK_PRELOAD": "start"}, ranks=2) as notebook:
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
    head = IN_NOTEBOOK if example.in_notebook else "%%distributed\n"
    outcome = example_notebook.run(head + BEFORE.get(name, "") + checked(example.code) + AFTER.get(name, ""))
    assert outcome.status == "ok", f"{example.code}\n{outcome.text}{outcome.traceback}"


INTERNAL_EXAMPLES = internal_examples()


@pytest.mark.parametrize("example", INTERNAL_EXAMPLES, ids=lambda example: example.name)
def test_an_example_of_an_internal_function_returns_what_it_says(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "layers.py").write_text("...")
    module = importlib.import_module(example.name.partition(":")[0])
    exec(checked(example.code), {**vars(module), "loss": 0.5})


def test_every_example_in_the_package_runs() -> None:
    written = sum(file.read_text().count("Example::\n") for file in SOURCES)
    assert written == len(EXAMPLES) + len(INTERNAL_EXAMPLES)
    of_engines = [item for item in INTERNAL_EXAMPLES if item.name.startswith("rankbook.engines.")]
    assert len([item for item in of_engines if "assert repr(found)" in checked(item.code)]) >= len(of_engines) - 1


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
