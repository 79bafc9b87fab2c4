"""Imports point one way, and every room stays small and says what it is for: read from the source, never from a run.

Owns: the table of who may import whom. Refuses: exceptions that are not in it, with their reason.

Each check is a function from sources to complaints. One test applies it to the package, another one to a source made
up to break it: a check that cannot fail is no check.
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

MAY_IMPORT: dict[str, set[str]] = {
    # room: the rooms that it may import. The front door is "".
    "": {"coordinator", "magics", "runtime", "results", "errors"},
    "errors": {"messages"},  # for annotations only, see FOR_TYPES_ONLY
    "telemetry": set(),
    "wire": set(),
    "words": set(),
    "keeping": {"wire"},
    "looking": {"telemetry", "wire"},
    "comms": {"wire"},
    "debugging": {"wire"},
    "forking": {"wire"},
    "measuring": set(),
    "messages": {"comms", "debugging", "forking", "keeping", "looking", "measuring", "telemetry", "wire", "errors"},
    "ranks": {"errors"},
    "lines": set(),
    "queues": {"lines", "messages", "ranks"},
    "record": {"queues", "lines", "messages"},
    "output": {"record", "queues", "lines", "messages", "ranks", "errors"},
    "pieces": {"queues", "lines"},
    "results": {"output", "lines", "messages", "ranks", "errors"},
    "sources": set(),
    "ownership": set(),
    "transport": {"sources", "messages", "errors"},
    "launch": {"ownership", "transport", "forking", "messages", "keeping", "ranks", "errors"},
    "coordinator": {
        "forking",
        "comms",
        "debugging",
        "launch",
        "sources",
        "transport",
        "results",
        "output",
        "lines",
        "messages",
        "keeping",
        "looking",
        "measuring",
        "telemetry",
        "wire",
        "ranks",
        "errors",
    },
    "rank": {
        "forking",
        "ownership",
        "comms",
        "sources",
        "debugging",
        "transport",
        "messages",
        "keeping",
        "looking",
        "measuring",
        "telemetry",
        "wire",
        "ranks",
        "errors",
        "runtime",
        "checkpoint",
    },
    "runtime": {"telemetry", "errors", "checkpoint"},
    "checkpoint": {"ownership", "telemetry", "words", "errors"},
    "launched": {"runtime"},
    "widgets": {"telemetry", "results", "pieces", "ranks", "words", "errors"},
    "magics": {
        "words",
        "comms",
        "sources",
        "widgets",
        "coordinator",
        "checkpoint",  # what lies in a folder: the parts without torch
        "measuring",
        "telemetry",
        "results",
        "output",
        "pieces",
        "messages",
        "ranks",
        "errors",
        "launch",  # the forkserver starts as the extension loads
        "launched",
        "wire",
        "looking",
    },
    "jupyter": {"", "coordinator", "errors"},  # it has its extension loaded by name, as any kernel has
    "console": set(),
    "notebook_file": {"console", "errors"},
    "notebook_run": {"notebook_file", "console", "errors", "jupyter"},
    "cli": {"notebook_run", "notebook_file", "console", "words", "errors", "checkpoint"},
}

FOR_TYPES_ONLY = {
    ("errors", "messages"),  # a CellError carries reports; the vocabulary raises ProtocolError
    ("", "coordinator"),  # the front door's names are imported when they are used
    ("", "magics"),
    ("", "runtime"),
    ("", "results"),
    ("", "errors"),
}

LATE_ONLY = {
    ("cli", "notebook_run"),  # needs the extra `notebook`; `rankbook --help` does not
    ("cli", "notebook_file"),
    ("cli", "checkpoint"),  # with it comes torch, in part
    ("rank", "runtime"),  # a rank whose cells train without it pays nothing for it
    ("rank", "checkpoint"),  # nobody has asked how something is sharded
    ("launched", "runtime"),  # the notebook names it, and has no torch
}

NEVER_MEET = [
    # no chain of imports, however long, leads from one to the other
    ("coordinator", "rank"),  # they share messages and meet on the wire
    ("launch", "rank"),  # it starts `python -m rankbook.rank.forkserver` by name
    ("magics", "rank"),
    ("widgets", "coordinator"),
    ("rank", "coordinator"),
    ("rank", "launch"),
    ("rank", "magics"),
    ("runtime", "rank"),  # the same code runs under torchrun
    ("runtime", "transport"),
]

THIRD_PARTY: dict[str, set[str]] = {
    # package: the rooms, or single modules, that may import it
    "IPython": {"rank", "magics", "widgets.screen"},
    "anywidget": {"widgets.talking"},
    "comm": {"rank.comms", "magics.comms"},
    "debugpy": {"rank.debug"},  # only once somebody debugs; the two below are in it
    "pydevd": {"rank.debug"},
    "_pydevd_bundle": {"rank.debug"},
    "cloudpickle": {"transport", "rank.forks"},
    "fsspec": {"checkpoint.remote"},  # only once a folder is named by a URL
    "ipywidgets": {"magics.comms"},  # once a rank has made a widget
    "ipykernel": {"notebook_run", "magics", "jupyter"},
    "jupyter_client": {"notebook_run", "jupyter.spec"},
    "isal": {"checkpoint.checksums"},
    "msgspec": {
        "checkpoint.manifest",
        "checkpoint.saving",
        "checkpoint.writing",
        "looking",
        "measuring",
        "messages",
        "telemetry",
        "wire",
        "widgets.feed",
    },
    "nbclient": {"notebook_run"},
    "nbformat": {"notebook_run", "notebook_file"},
    "numpy": {"checkpoint", "rank", "runtime", "transport"},
    "platformdirs": {"launch"},
    "psutil": {"launch", "rank", "transport"},
    "torch": {
        "checkpoint.agreement",
        "checkpoint.async_save",  # the plan, the manifest, the storage and the steps are pure
        "checkpoint.blobs",
        "checkpoint.contents",
        "checkpoint.convert",  # once a checkpoint is made of safetensors
        "checkpoint.driving",
        "checkpoint.dtensors",
        "checkpoint.factories",
        "checkpoint.fetch",
        "checkpoint.found",
        "checkpoint.loading",
        "checkpoint.mapping",
        "checkpoint.models",
        "checkpoint.replicas",
        "checkpoint.saving",
        "checkpoint.several",
        "checkpoint.sharded_base",
        "checkpoint.state_dicts",
        "checkpoint.transfer",
        "checkpoint.writing",
        "rank",
        "runtime",
        "transport.tensors",  # the one place where a tensor crosses; imported only once there is a tensor
    },
    "torchdata": {"runtime.loader_options"},  # where it is installed; only once its loader is asked for
    "tqdm": {"runtime.progress"},  # where it is installed; only once a bar is asked for
    "traitlets": {"rank", "magics", "widgets"},
    "zmq": {"transport"},
}

ASKED_FOR_AS = {
    # package: the requirement in pyproject.toml that brings it, where that has another name
    "_pydevd_bundle": "debugpy",
    "pydevd": "debugpy",
    "IPython": "ipython",
    "fsspec": "torch",
    "jupyter_client": "ipykernel",  # whose interface it is part of, like the two below
    "nbformat": "nbclient",
    "traitlets": "ipython",
    "zmq": "pyzmq",
}

BROUGHT_BY_THE_PERSON = {"torchdata"}  # an option names it, and says so where it is missing

MAY_IMPORT_BY_NAME = {
    "rankbook.__init__",  # public names, when they are used
    "rankbook.checkpoint.__init__",  # public names, when they are used
    "rankbook.runtime.__init__",  # public names, when they are used
    "rankbook.rank.forkserver",  # other people's packages, so that they are there before a rank is forked
    "rankbook.rank.heal",  # what the cells of the dead rank had imported
}


Sources = Mapping[str, str]


def read_sources() -> dict[str, str]:
    """The package's modules by their dotted names, with their text."""
    sources = {}
    for package, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            dotted = ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts))
            sources[dotted if file.name != "__init__.py" else f"{dotted.removesuffix('.__init__')}.__init__"] = (
                file.read_text()
            )
    return sources


@dataclass(frozen=True)
class Import:
    """One import of `target` by `module`, in `line`."""

    module: str
    line: int
    target: str
    late: bool
    types_only: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def room_of(module: str) -> str:
    """The room of a module of the package: its first folder, or its own name; "" for the front door."""
    return [*module.removesuffix(".__init__").split("."), ""][1]


def imports_of(sources: Sources) -> Iterator[Import]:
    """Yield every import statement, and each name that a `from` import takes out of one of our own packages."""
    modules = frozenset(sources)
    for module, source in sources.items():
        yield from _imports_of_module(module, source, modules)


@functools.cache  # several checks read the same sources
def _imports_of_module(module: str, source: str, modules: frozenset[str]) -> tuple[Import, ...]:
    return tuple(_imports_below(ast.parse(source), module, modules, late=False, types_only=False))


def _imports_below(
    node: ast.AST, module: str, modules: frozenset[str], *, late: bool, types_only: bool
) -> Iterator[Import]:
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        types_only = True
    if isinstance(node, ast.Import | ast.ImportFrom):
        for target in _targets(node, modules):
            yield Import(module, node.lineno, target, late, types_only)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # an expression holds no import
            yield from _imports_below(child, module, modules, late=late, types_only=types_only)


def _targets(node: ast.Import | ast.ImportFrom, modules: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    start = "." * node.level + (node.module or "")
    below = {f"{start}.{name.name}" for name in node.names}
    modules = {each for each in below if each in modules or f"{each}.__init__" in modules}
    return sorted(modules) + ([start] if len(modules) < len(below) else [])


def wrong_layers(sources: Sources) -> Iterator[str]:
    """Imports of one of our rooms by another that may not, or not there."""
    for each in imports_of(sources):
        if each.target.startswith("."):
            yield f"{each}: write the whole name"
        if each.target.split(".")[0] != "rankbook":
            continue
        room, target = room_of(each.module), room_of(each.target)
        if room not in MAY_IMPORT:
            yield f"{each.module} is in no room of MAY_IMPORT"
        elif target not in MAY_IMPORT[room] | {room}:
            yield f"{each}: {room or 'the front door'} may import {sorted(MAY_IMPORT[room])}"
        elif (room, target) in FOR_TYPES_ONLY and not each.types_only:
            yield f"{each}: only below TYPE_CHECKING"
        elif (room, target) in LATE_ONLY and not each.late:
            yield f"{each}: only inside a function"


def wrong_packages(sources: Sources) -> Iterator[str]:
    """Imports of somebody else's package where it does not belong."""
    for each in imports_of(sources):
        package = each.target.split(".")[0]
        if package in {"rankbook", ""} or package in sys.stdlib_module_names:
            continue
        allowed = THIRD_PARTY.get(package, set())
        if room_of(each.module) not in allowed and each.module.removeprefix("rankbook.") not in allowed:
            yield f"{each}: allowed in {sorted(allowed) or 'no room'}"


def dynamic_imports(sources: Sources) -> Iterator[str]:
    """Imports that no reader of the source could follow."""
    for module, source in sources.items():
        if module not in MAY_IMPORT_BY_NAME and (found := re.search(r"import_module|__import__|runpy", source)):
            yield f"{module} uses {found[0]}"


def reachable(sources: Sources) -> dict[str, set[str]]:
    """For each room the rooms that its imports lead to at run time, over any number of steps."""
    reach: dict[str, set[str]] = {room_of(module): set() for module in sources}
    for each in imports_of(sources):
        if each.target.startswith("rankbook.") and not each.types_only:
            reach[room_of(each.module)].add(room_of(each.target))
    for _ in reach:
        for targets in reach.values():
            targets |= {further for target in targets for further in reach.get(target, set())}
    return reach


def meetings(sources: Sources) -> Iterator[str]:
    """Rooms that must never meet, and do."""
    reach = reachable(sources)
    for room, other in NEVER_MEET:
        if other in reach.get(room, set()):
            yield f"{room} reaches {other}"


def cycles(sources: Sources) -> Iterator[str]:
    """Modules that import themselves, at run time, by way of others; a late import is no way out."""
    edges: dict[str, set[str]] = {module: set() for module in sources}
    for each in imports_of(sources):
        target = each.target if each.target in sources else f"{each.target}.__init__"
        if target in sources and not each.types_only:
            edges[each.module].add(target)
    for start in sources:
        paths = [(start, target) for target in edges[start]]
        seen: set[str] = set()
        while paths:
            path = paths.pop()
            if path[-1] == start:
                yield " → ".join(path)
                break
            if path[-1] not in seen:
                seen.add(path[-1])
                paths += [(*path, target) for target in edges[path[-1]]]


def unsaid_purposes(sources: Sources) -> Iterator[str]:
    """Modules that do not open with what they own and what they refuse."""
    for module, source in sources.items():
        docstring = ast.get_docstring(ast.parse(source)) or ""
        yield from (
            f"{module}: no {word!r} in its docstring" for word in ("Owns:", "Refuses:") if word not in docstring
        )


def stale_maps(sources: Sources) -> Iterator[str]:
    """Each folder's front door names its modules and folders, by file name, and nothing that is not there."""
    for module, source in sources.items():
        package, _, last = module.rpartition(".")
        if last != "__init__":
            continue
        docstring = ast.get_docstring(ast.parse(source)) or ""
        named = set(re.findall(r"^(\w+(?:\.py|/))(?:\s|$)", docstring, flags=re.MULTILINE))
        there = set()
        for other in sources:
            below = other.removeprefix(f"{package}.").split(".")
            if other.startswith(f"{package}.") and below != ["__init__"]:
                there.add(f"{below[0]}.py" if len(below) == 1 else f"{below[0]}/")
        yield from (f"{module} does not name {name}" for name in sorted(there - named))
        yield from (f"{module} names {name}, which is not there" for name in sorted(named - there))


def downward_imports(sources: Sources) -> Iterator[str]:
    """Imports, at run time, of a room that stands further down in the front door's map."""
    front = ast.get_docstring(ast.parse(sources.get("rankbook.__init__", ""))) or ""
    order = re.findall(r"^(\w+)(?:\.py|/)(?:\s|$)", front, flags=re.MULTILINE)
    for each in imports_of(sources):
        room, target = room_of(each.module), room_of(each.target)
        known = each.target.startswith("rankbook.") and {room, target} <= set(order)
        if known and not each.types_only and order.index(target) > order.index(room):
            yield f"{each}: the front door's map has {target} below {room}"


CHECKS = [
    downward_imports,
    wrong_layers,
    wrong_packages,
    dynamic_imports,
    meetings,
    cycles,
    unsaid_purposes,
    stale_maps,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_to_its_layers(check):
    complaints = "\n".join(check(read_sources()))
    assert not complaints, f"\n{complaints}"


OWNS = '"""Owns: it. Refuses: all else."""\n'
VIOLATIONS = [
    (
        downward_imports,
        {
            "__init__": '"""Rooms.\n\nrank/  ranks\nerrors.py  one\n"""',
            "rank.a": "import rankbook.errors",
            "errors": "",
        },
    ),
    (wrong_layers, {"coordinator.a": "from rankbook.rank import main"}),
    (wrong_layers, {"rank.a": "def f():\n  import rankbook.coordinator.state"}),
    (wrong_layers, {"launch.a": "from rankbook.rank.forkserver import main"}),
    (wrong_layers, {"widgets.a": "from rankbook.coordinator.cluster import Cluster"}),
    (wrong_layers, {"rank.a": "from ..coordinator import cluster"}),
    (wrong_layers, {"coordinator.a": "from rankbook import rank", "rank.__init__": ""}),
    (wrong_layers, {"errors": "from rankbook.messages import ErrorReport"}),
    (wrong_layers, {"__init__": "from rankbook.coordinator.cluster import start"}),
    (wrong_layers, {"cli": "from rankbook import notebook_run", "notebook_run": ""}),
    (wrong_layers, {"attic": "import rankbook.errors"}),
    (wrong_packages, {"coordinator.a": "import zmq.asyncio"}),
    (wrong_packages, {"coordinator.a": "if TYPE_CHECKING:\n  import torch"}),
    (wrong_packages, {"transport.payload": "def f():\n  from torch import Tensor"}),
    (wrong_packages, {"widgets.a": "from IPython.display import display"}),
    (wrong_packages, {"rank.a": "import requests"}),
    (dynamic_imports, {"launch.a": "importlib.import_module('rankbook.rank')"}),
    (meetings, {"magics.a": "import rankbook.launch.b", "launch.b": "import rankbook.rank.c", "rank.c": ""}),
    (cycles, {"output": "import rankbook.lines", "lines": "import rankbook.output"}),
    (cycles, {"rank.a": "from rankbook.rank import b", "rank.b": "def f():\n  import rankbook.rank.a"}),
    (unsaid_purposes, {"ranks": '"""Owns: the grammar."""'}),
    (unsaid_purposes, {"ranks": "x = 1"}),
    (stale_maps, {"rank.__init__": OWNS, "rank.main": ""}),
    (stale_maps, {"rank.__init__": '"""The rank.\n\nmain.py  its life\n"""'}),
    (stale_maps, {"__init__": '"""Rooms.\n\nrank/  ranks\n"""', "rank.__init__": "", "launch.a": ""}),
]


@pytest.mark.parametrize(("check", "made_up"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_a_violation_is_found(check, made_up):
    assert list(check({f"rankbook.{name}": source for name, source in made_up.items()}))


def test_sources_that_keep_to_the_rules_are_let_through():
    made_up = {
        "rankbook.__init__": '"""Owns: names. Refuses: work.\n\nerrors.py  one\nrank/  ranks\n"""\nimport_module("x")',
        "rankbook.errors": OWNS + "if TYPE_CHECKING:\n  from rankbook.messages import ErrorReport",
        "rankbook.rank.__init__": '"""Owns: ranks. Refuses: the notebook.\n\nmain.py  its life\n"""',
        "rankbook.rank.main": OWNS + "import torch.distributed\nfrom rankbook.errors import StartError",
    }
    assert {check.__name__: list(check(made_up)) for check in CHECKS} == {check.__name__: [] for check in CHECKS}


def test_every_package_that_is_imported_is_asked_for():
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["notebook"]]
    names = {re.split(r"[<>=\[ ]", line)[0] for line in asked}
    assert {ASKED_FOR_AS.get(package, package) for package in THIRD_PARTY.keys() - BROUGHT_BY_THE_PERSON} <= names


def test_every_folder_of_the_package_is_packed():
    packages = {module.removesuffix(".__init__") for module in read_sources() if module.endswith(".__init__")}
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.processes
def test_the_notebook_side_imports_no_torch():
    """Nor does it fork anything: to import is not to start."""
    ours = [module.removesuffix(".__init__") for module in read_sources()]
    with_torch = THIRD_PARTY["torch"]
    notebook_side = [m for m in ours if not {room_of(m), m.removeprefix("rankbook.")} & with_torch]
    code = (
        f"import importlib, sys\nfor name in {notebook_side!r}:\n    importlib.import_module(name)\n"
        "import rankbook\nfor name in rankbook.__all__:\n    getattr(rankbook, name)\n"
        "print(*sorted(name for name in ('torch', 'rankbook.rank') if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


@pytest.mark.processes
def test_the_front_door_alone_loads_next_to_nothing():
    code = "import sys, rankbook; print(sorted({'IPython', 'msgspec', 'numpy', 'zmq'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
