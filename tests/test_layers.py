"""Imports point one way, and tensors name their device: read from the source, never from a run.

Each check is a function from sources to complaints. One test applies it to the package, another one to a source that is
made up to break it.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

NEVER_IMPORTS = [
    # No chain of imports, however long, leads from one folder to the other.
    ("coordinator", "rank"),  # they share the protocol and meet on the wire
    ("launch", "rank"),  # it starts `python -m rankbook.rank.forkserver` by name
    ("agent", "rank"),
    ("engines", "rank"),  # an engine starts `python -m rankbook.agent`, and knows nothing of ranks and links
    ("engines", "transport"),
    ("engines", "coordinator"),
    ("engines", "launch"),
    ("coordinator", "testing"),
    ("agent", "coordinator"),
    ("coordinator", "agent"),  # a user or a scheduler starts `python -m rankbook.agent`
    ("launch", "agent"),
    ("rank", "agent"),
    ("magics", "rank"),
    ("widgets", "coordinator"),
    ("rank", "coordinator"),
    ("rank", "launch"),
    ("rank", "magics"),
    ("runtime", "rank"),  # the same code runs under torchrun
    ("runtime", "transport"),
    ("numerics", "rank"),  # both the notebook and the ranks use it
    ("numerics", "coordinator"),
]
ZMQ_ONLY_IN = "transport"
CONSTRUCTORS = {
    # functions of torch that use the default device, see `torch.utils._device._device_constructors`
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
DISTRIBUTION_OF = {
    # imported package: the requirement in pyproject.toml that brings it, where that has another name
    "IPython": "ipython",
    "_pydevd_bundle": "debugpy",
    "fsspec": "torch",
    "jupyter_client": "ipykernel",
    "nbformat": "nbclient",
    "pydevd": "debugpy",
    "stack_data": "ipython",
    "traitlets": "ipython",
    "zmq": "pyzmq",
}
INSTALLED_BY_THE_USER = {"ray", "torchdata"}  # an option asks for it, and its error says how to install it

FOLDERS = {"rankbook": "kernel/rankbook", "rankbook.magics": "magics", "rankbook.widgets": "widgets"}

Sources = Mapping[str, str]


def read_sources() -> dict[str, str]:
    """Return the text of the package's modules by dotted name; a package is `name.__init__`."""
    sources = {}
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):  # which does not follow the links below kernel/rankbook
            dotted = ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts))
            sources[dotted] = file.read_text()
    return sources


@dataclass(frozen=True)
class Import:
    """An import of `target` by `module` in `line`."""

    module: str
    line: int
    target: str
    types_only: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def folder_of(module: str) -> str:
    """Return the first folder of a module of the package, or its own name; "" for the package itself."""
    return [*module.removesuffix(".__init__").split("."), ""][1]


def imports_of(sources: Sources) -> Iterator[Import]:
    """Yield every import statement, and every module of ours that a `from` import names."""
    modules = frozenset(sources)
    for module, source in sources.items():
        yield from _imports_of_module(module, source, modules)


@functools.cache  # several checks read the same sources
def _imports_of_module(module: str, source: str, modules: frozenset[str]) -> tuple[Import, ...]:
    return tuple(_imports_below(ast.parse(source), module, modules, types_only=False))


def _imports_below(node: ast.AST, module: str, modules: frozenset[str], *, types_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        types_only = True
    if isinstance(node, ast.Import | ast.ImportFrom):
        for target in _targets(node, modules):
            yield Import(module, node.lineno, target, types_only)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # an expression holds no import
            yield from _imports_below(child, module, modules, types_only=types_only)


def _targets(node: ast.Import | ast.ImportFrom, modules: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    start = "." * node.level + (node.module or "")
    names = {f"{start}.{name.name}" for name in node.names}
    ours = {name for name in names if name in modules or f"{name}.__init__" in modules}
    return sorted(ours) + ([start] if len(ours) < len(names) else [])


def import_cycles(sources: Sources) -> Iterator[str]:
    """Yield modules that import themselves by way of others; an import inside a function counts too."""
    edges: dict[str, set[str]] = {module: set() for module in sources}
    for statement in imports_of(sources):
        target = statement.target if statement.target in sources else f"{statement.target}.__init__"
        if target in sources and not statement.types_only:
            edges[statement.module].add(target)
    for start in sources:
        paths = [(start, target) for target in edges[start]]
        visited: set[str] = set()
        while paths:
            path = paths.pop()
            if path[-1] == start:
                yield " → ".join(path)
                break
            if path[-1] not in visited:
                visited.add(path[-1])
                paths += [(*path, target) for target in edges[path[-1]]]


def forbidden_chains(sources: Sources) -> Iterator[str]:
    """Yield folders of `NEVER_IMPORTS` that lead to each other at run time, over any number of imports."""
    reach: dict[str, set[str]] = {folder_of(module): set() for module in sources}
    for statement in imports_of(sources):
        if statement.target.startswith("rankbook.") and not statement.types_only:
            reach[folder_of(statement.module)].add(folder_of(statement.target))
    for _ in reach:
        for targets in reach.values():
            targets |= {further for target in targets for further in reach.get(target, set())}
    for folder, other in NEVER_IMPORTS:
        if other in reach.get(folder, set()):
            yield f"{folder} reaches {other}"


def zmq_outside_transport(sources: Sources) -> Iterator[str]:
    """Yield imports of zmq outside the folder that wraps it."""
    for statement in imports_of(sources):
        if statement.target.split(".")[0] == "zmq" and folder_of(statement.module) != ZMQ_ONLY_IN:
            yield f"{statement}: only {ZMQ_ONLY_IN} may"


def relative_imports(sources: Sources) -> Iterator[str]:
    """Yield relative imports: a search for the whole name must find every importer."""
    for statement in imports_of(sources):
        if statement.target.startswith("."):
            yield f"{statement}: write the whole name"


def undeclared_packages(sources: Sources) -> Iterator[str]:
    """Yield imports of packages that pyproject.toml does not ask for."""
    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *extras["notebook"]]
    names = {re.split(r"[<>=\[; ]", line)[0] for line in required} | INSTALLED_BY_THE_USER
    for statement in imports_of(sources):
        package = statement.target.split(".")[0]
        if package in {"rankbook", ""} or package in sys.stdlib_module_names:
            continue
        if DISTRIBUTION_OF.get(package, package) not in names:
            yield f"{statement}: pyproject.toml does not ask for it"


def classes_of_one_name(sources: Sources) -> Iterator[str]:
    """Yield names of classes that several modules define: a name means one thing in the whole package."""
    modules: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    for name, defined in modules.items():
        if len(defined) > 1:
            yield f"{name}: {', '.join(defined)}"


def tensors_of_the_default_device(sources: Sources) -> Iterator[str]:
    """Yield tensors that are created without a device: a cell may have called `torch.set_default_device("cuda")`."""
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CONSTRUCTORS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and not {"device", None} & {keyword.arg for keyword in node.keywords}
            ):
                yield f"{module}:{node.lineno}: {ast.unparse(node)}"


CHECKS = [
    import_cycles,
    forbidden_chains,
    zmq_outside_transport,
    relative_imports,
    undeclared_packages,
    classes_of_one_name,
    tensors_of_the_default_device,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_to_its_layers(check):
    complaints = "\n".join(check(read_sources()))
    assert not complaints, f"\n{complaints}"


VIOLATIONS = [
    (import_cycles, {"ranks": "import rankbook.formatting", "formatting": "import rankbook.ranks"}),
    (import_cycles, {"rank.a": "from rankbook.rank import b", "rank.b": "def f():\n  import rankbook.rank.a"}),
    (forbidden_chains, {"coordinator.a": "from rankbook.rank import main", "rank.main": ""}),
    (forbidden_chains, {"magics.a": "import rankbook.launch.b", "launch.b": "import rankbook.rank.c", "rank.c": ""}),
    (zmq_outside_transport, {"coordinator.a": "import zmq.asyncio"}),
    (relative_imports, {"rank.a": "from ..coordinator import cluster"}),
    (classes_of_one_name, {"rank.a": "class Message: ...", "launch.a": "class Message(str): ..."}),
    (undeclared_packages, {"rank.a": "import requests"}),
    (tensors_of_the_default_device, {"rank.a": "flag = torch.zeros(1, dtype=torch.int64)"}),
    (undeclared_packages, {"rank.a": "def f():\n  from requests import get"}),
]


@pytest.mark.parametrize(("check", "made_up"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_violation_is_found(check, made_up):
    assert list(check({f"rankbook.{name}": source for name, source in made_up.items()}))


def test_sources_that_keep_to_the_rules_pass():
    made_up = {
        "rankbook.errors": "if TYPE_CHECKING:\n  from rankbook.protocol.messages import ErrorReport",
        "rankbook.protocol.messages": "from rankbook.errors import ProtocolError",
        "rankbook.rank.__init__": "",
        "rankbook.rank.main": "import torch.distributed\nfrom rankbook.errors import StartError",
        "rankbook.transport": "import zmq",
        "rankbook.runtime": "flag = torch.zeros(1, device=device), torch.empty(1, **options), torch.frombuffer(data)",
    }
    assert {check.__name__: list(check(made_up)) for check in CHECKS} == {check.__name__: [] for check in CHECKS}


def test_every_folder_with_modules_is_a_package():
    modules = read_sources()
    assert {f"{module.rpartition('.')[0]}.__init__" for module in modules} - modules.keys() == set()


@pytest.mark.processes
def test_notebook_process_imports_no_torch():
    """Neither the extension with its imports nor a public name outside the runtime brings torch or the ranks' code."""
    code = (
        "import sys, rankbook, rankbook.magics.magics, rankbook.magics.views, rankbook.jupyter.kernel\n"
        "from rankbook.coordinator import cluster\n"
        "for name in set(rankbook.__all__) - set(rankbook.runtime.__all__):\n    getattr(rankbook, name)\n"
        "print(*sorted(name for name in ('torch', 'rankbook.rank') if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


@pytest.mark.processes
def test_import_of_the_package_loads_few_modules():
    code = "import sys, rankbook; print(sorted({'IPython', 'msgspec', 'numpy', 'zmq'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
