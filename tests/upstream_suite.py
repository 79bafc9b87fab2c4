"""Run Accelerate's own tests with Accelerate, then with Rankbook in its place, and report how many pass.

    python tests/upstream_suite.py [SOURCE] [--only TEXT] [--version 1.15.0]

SOURCE is the unpacked source distribution of Accelerate; pip downloads it into a temporary folder if it is not given.
Nothing of it is copied into this project. The environment must have Accelerate's requirements: the extra `interop`.

In the second run an import of `accelerate` or of one of its modules gives a module with Rankbook's names. Only
`accelerate.test_utils`, and functions that say what is installed, remain Accelerate's. Rankbook's processes import in
the same way.

A test counts if it passes with Accelerate on the CPU, and if the test and all functions of the test files that it calls

- use a name of Accelerate that Rankbook has, and no other one,
- use no private name, such as `accelerator._models` or `GradientState._reset_state()`, and
- do not run the `accelerate` command, nor replace a name in a module of Accelerate.

Those that only a private name excludes run too; their number is printed, and does not count. Exits with 1 if fewer than
95 of 100 tests that count pass with Rankbook.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.95
SOURCE, REPLACE, ONLY = "UPSTREAM_SUITE_SOURCE", "UPSTREAM_SUITE_REPLACE", "UPSTREAM_SUITE_ONLY"
REPORT = "UPSTREAM_SUITE_REPORT"

COUNTED, PRIVATE = "counts", "uses a private name"
MISSING, COMMAND = "uses a name that Rankbook does not have", "runs the accelerate command or changes its modules"
UNRELATED = "uses no name of Rankbook"

OWN_MODULES = ("data_loader", "state", "utils")
SCAFFOLD = {"patch_environment", "clear_environment", "purge_accelerate_environment", "is_torch_version"}
"""Names of Accelerate that tests use to decide what to run, and to set environment variables."""
COMMANDS = {"DEFAULT_LAUNCH_COMMAND", "get_launch_command", "execute_subprocess_async", "run_command"}


# Names ---------------------------------------------------------------------------------------------------------------


def is_scaffold(name: str) -> bool:
    """Return True for a function of Accelerate that asks for installed packages, or sets the environment."""
    return name in SCAFFOLD or (name.startswith("is_") and name.endswith("_available"))


def replacements(module: str) -> list[str]:
    """Return the modules of Rankbook that have the names of a module of Accelerate."""
    second = module.split(".")[1:2]
    return [f"rankbook.{name}" for name in second if name in OWN_MODULES] + ["rankbook"]


def find_name(module: str, name: str) -> Any:
    """Return Rankbook's object for a name of a module of Accelerate. Raise AttributeError if there is none."""
    for replacement in map(importlib.import_module, replacements(module)):
        if name in replacement.__all__:
            return getattr(replacement, name)
    raise AttributeError(name)


@functools.cache
def has_name(module: str, name: str) -> bool:
    """Return True if Rankbook has a public name for this name of a module of Accelerate."""
    return any(name in importlib.import_module(replacement).__all__ for replacement in replacements(module))


# Selection -----------------------------------------------------------------------------------------------------------


@dataclass
class File:
    """The definitions and imports of a source file of tests."""

    path: Path
    tree: ast.Module
    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    own_private: set[str] = field(default_factory=set)

    @classmethod
    @functools.cache
    def read(cls, path: Path) -> File:
        """Parse a file."""
        file = cls(path, ast.parse(path.read_text()))
        for node in file.tree.body:
            file._define(node)
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_"):
                file.own_private.add(node.name)
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if stored and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                file.own_private.add(node.attr)
        return file

    def _define(self, node: ast.AST) -> None:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for below in ast.iter_child_nodes(node):
                self._define(below)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.update(imported_names(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        self.definitions.setdefault(name.id, []).append(node.value)


def imported_names(node: ast.AST) -> dict[str, tuple[str, str | None]]:
    """Return the names that an import of Accelerate defines, as the module and the name in it, or None for a module."""
    names: dict[str, tuple[str, str | None]] = {}
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "accelerate":
        for alias in node.names:
            names[alias.asname or alias.name] = (node.module, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "accelerate":
                names[alias.asname or "accelerate"] = (alias.name if alias.asname else "accelerate", None)
    return names


class Selection:
    """Finds reasons why a test does not count, in the names that it and its callees use."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def classify(self, path: Path, class_name: str | None, function: str, fixtures: Sequence[str] = ()) -> str:
        """Return COUNTED, or the reason why a test does not count."""
        file = File.read(path)
        self._reasons: set[str] = set()
        self._names: set[str] = set()
        self._seen: set[tuple[Path, int]] = set()
        nodes = list(self._members(file, class_name, function)) if class_name else file.definitions.get(function, [])
        for node in nodes:
            self._visit(file, class_name, node)
        tested = bool(self._names)  # what only `setUp` and fixtures use is not what is tested
        around = [definition for name in fixtures for definition in file.definitions.get(name, [])]
        if class_name:
            for name in ("setUp", "setUpClass", "tearDown", "tearDownClass", "get_inputs"):
                around += self._members(file, class_name, name)
        for node in around:
            self._visit(file, class_name, node)
        for reason in (MISSING, COMMAND):
            if reason in self._reasons:
                return reason
        if not tested:
            return UNRELATED
        return PRIVATE if PRIVATE in self._reasons else COUNTED

    def _members(self, file: File, class_name: str | None, name: str) -> Iterator[ast.AST]:
        """Yield the statements that define an attribute of a class, or of its bases in the same file."""
        for cls in file.definitions.get(class_name or "", []):
            if not isinstance(cls, ast.ClassDef):
                continue
            is_member = False
            for node in cls.body:
                names = [getattr(node, "name", None)]
                if isinstance(node, ast.Assign):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if name in names:
                    is_member = True
                    yield node
            if not is_member:
                for base in cls.bases:
                    if isinstance(base, ast.Name):
                        yield from self._members(file, base.id, name)

    def _visit(self, file: File, class_name: str | None, top: ast.AST) -> None:
        if (file.path, id(top)) in self._seen:
            return
        self._seen.add((file.path, id(top)))
        local = {name: ref for node in ast.walk(top) for name, ref in imported_names(node).items()}
        for node in ast.walk(top):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in {"getattr", "hasattr", "setattr"}:
                names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
                if any(str(name).startswith("_") for name in names):
                    self._reasons.add(PRIVATE)
            if isinstance(node, ast.Attribute):
                self._visit_attribute(file, class_name, node, local)
            elif isinstance(node, ast.Name):
                reference = local.get(node.id) or file.imports.get(node.id)
                if reference is not None:
                    self._use(*reference)
                for definition in file.definitions.get(node.id, []):
                    self._visit(file, node.id if isinstance(definition, ast.ClassDef) else class_name, definition)
            elif isinstance(node, ast.Constant) and str(node.value).startswith("accelerate."):
                self._reasons.add(COMMAND)

    def _visit_attribute(self, file: File, class_name: str | None, node: ast.Attribute, local: dict[str, Any]) -> None:
        name = node.attr
        if name.startswith("_") and not name.startswith("__") and name not in file.own_private:
            self._reasons.add(PRIVATE)
        if isinstance(node.value, ast.Name):
            if node.value.id in {"self", "cls"}:
                for member in list(self._members(file, class_name, name)):
                    self._visit(file, class_name, member)
            module, inside = local.get(node.value.id) or file.imports.get(node.value.id) or (None, None)
            if module is not None and inside is None:
                self._use(module, name)
            elif module is not None and (script := self._script(inside or "")).is_file():
                for definition in File.read(script).definitions.get(name, []):
                    self._visit(File.read(script), None, definition)

    def _script(self, name: str) -> Path:
        return self.source / "src" / "accelerate" / "test_utils" / "scripts" / f"{name}.py"

    def _use(self, module: str, name: str | None) -> None:
        if name is None or is_scaffold(name):
            return
        if module.startswith("accelerate.test_utils"):
            if name in COMMANDS:
                self._reasons.add(COMMAND)
        elif name.startswith("_"):
            self._reasons.add(PRIVATE)
        elif has_name(module, name):
            self._names.add(name)
        elif not self._is_module(module, name):
            self._reasons.add(MISSING)

    def _is_module(self, module: str, name: str) -> bool:
        path = self.source.joinpath("src", *module.split("."), name)
        return path.is_dir() or path.with_suffix(".py").is_file()


def files_that_count(source: Path) -> list[Path]:
    """Return the files with at least one test that counts, or that only a private name excludes."""
    selection, files = Selection(source), []
    for path in sorted((source / "tests").glob("test_*.py")):
        file = File.read(path)
        tests = [(None, name) for name in file.definitions if name.startswith("test_")]
        for name, nodes in file.definitions.items():
            members = [node for cls in nodes if isinstance(cls, ast.ClassDef) for node in cls.body]
            tests += [(name, node.name) for node in members if getattr(node, "name", "").startswith("test_")]
        if {COUNTED, PRIVATE} & {selection.classify(path, *test) for test in tests}:
            files.append(path)
    return files


# Replacement of Accelerate by Rankbook -------------------------------------------------------------------------------


class MissingNameError(Exception):
    """A test has used a name that Rankbook does not have."""


class Replacement(types.ModuleType):
    """A module of Accelerate with Rankbook's names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return find_name(self.__name__, name)
        except AttributeError:
            pass
        if is_scaffold(name):
            for module in ("imports", "environment", "versions"):
                value = getattr(importlib.import_module(f"accelerate_scaffold.utils.{module}"), name, None)
                if value is not None:
                    return value
        below = Path(str(self.__file__)).parent / name
        if below.is_dir() or below.with_suffix(".py").is_file():
            return importlib.import_module(f"{self.__name__}.{name}")
        where = f"{self.__name__}.{name}"

        def refuse(*_args: object, **_options: object) -> None:
            raise MissingNameError(f"Rankbook has no {where}")

        return type(name, (), {"__init__": refuse})


class ReplacementFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `accelerate` and its modules, except for those of its test helpers."""

    def __init__(self, source: Path) -> None:
        self.folder = source / "src" / "accelerate"

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module of Accelerate, and for the packages that its helpers are loaded from."""
        first, *rest = name.split(".")
        if first == "accelerate_scaffold" and rest in ([], ["utils"]):  # without what their __init__ imports
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(self.folder.joinpath(*rest))]
            return spec
        if first != "accelerate" or rest[:1] == ["test_utils"]:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.origin, spec.has_location = str(self.folder.joinpath(*rest, "__init__.py")), True
        spec.submodule_search_locations = [] if rest else [str(self.folder)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Return a module with Rankbook's names."""
        return Replacement(spec.name) if spec.name.split(".")[0] == "accelerate" else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it is."""


def replace_accelerate() -> None:
    """Import Rankbook's names as Accelerate's in this process, if the environment asks for that."""
    if REPLACE in os.environ:
        sys.meta_path.insert(0, ReplacementFinder(Path(os.environ[SOURCE])))


# Pytest's plugin, in the processes that run the tests ----------------------------------------------------------------


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Select the tests that count, and those that only a private name excludes; write the class of all of them."""
    selection = Selection(Path(os.environ[SOURCE]))
    verdicts: dict[str, str] = {}
    selected, deselected = [], []
    for item in items:
        class_name = item.cls.__name__ if item.cls is not None else None
        file = File.read(item.path)
        function = function_of(file, class_name, item.name)
        marks = [str(name) for mark in item.iter_markers("usefixtures") for name in mark.args]
        verdict = selection.classify(item.path, class_name, function, [*item.fixturenames, *marks])
        verdicts[item.nodeid.replace("\\", "/")] = verdict
        is_selected = verdict in {COUNTED, PRIVATE} and os.environ.get(ONLY, "") in item.nodeid
        (selected if is_selected else deselected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected
    Path(os.environ[REPORT]).write_text(json.dumps(verdicts))


def function_of(file: File, class_name: str | None, name: str) -> str:
    """Return the function in the source that a test comes from; parameters are appended to its name."""
    names = list(file.definitions)
    if class_name:
        classes, names = [class_name], []
        while classes:
            for cls in file.definitions.get(classes.pop(), []):
                if isinstance(cls, ast.ClassDef):
                    names += [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]
                    classes += [base.id for base in cls.bases if isinstance(base, ast.Name)]
    return max((item for item in names if name.startswith(item)), key=len, default=name)


# The two runs --------------------------------------------------------------------------------------------------------


def download(version: str, folder: Path) -> Path:
    """Download and unpack the source distribution of Accelerate, and return its folder."""
    pip = [sys.executable, "-m", "pip", "-q"]
    name = f"accelerate=={version}"
    subprocess.run([*pip, "download", name, "--no-deps", "--no-binary", ":all:", "-d", str(folder)], check=True)
    (archive,) = folder.glob("accelerate-*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return folder / f"accelerate-{version}"


def run_tests(source: Path, scratch: Path, only: str, *, replace: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Run the selected tests. Return the verdict of every test of the suite, and what failed of those that ran.

    The value is "" for a test that passed, the first line of the error for one that failed, and "skipped".
    """
    hook = scratch / "hook"
    hook.mkdir(exist_ok=True)
    shutil.copy(__file__, hook)
    (hook / "sitecustomize.py").write_text("import upstream_suite\nupstream_suite.replace_accelerate()\n")
    run = scratch / ("rankbook" if replace else "accelerate")
    run.mkdir()
    paths = [hook, scratch / "packages", ROOT / "kernel", source / "src"]
    environment = dict(os.environ)
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(run / "hub"),
        SOURCE: str(source),
        ONLY: only,
        REPORT: str(run / "verdicts.json"),
    }
    if replace:
        environment[REPLACE] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(source), "-p", "upstream_suite"]
    command += ["-p", "no:cacheprovider", "-p", "no:nbmake", "--continue-on-collection-errors", "--timeout", "300"]
    command += ["--tb", "short", "--junitxml", str(run / "junit.xml"), *map(str, files_that_count(source))]
    with (run / "output.txt").open("w") as output:
        subprocess.run(command, cwd=run, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    print(f"{'Rankbook' if replace else 'Accelerate'}: {(run / 'output.txt').read_text().splitlines()[-1]}")
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(run / "junit.xml").iter("testcase"):
        failed = case.find("failure") if case.find("failure") is not None else case.find("error")
        text = "" if failed is None else (failed.get("message") or "failed").strip()
        text = "skipped" if case.find("skipped") is not None else text
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = outcomes.get(name) or text
    verdicts = json.loads((run / "verdicts.json").read_text())
    return {junit_name(node): verdict for node, verdict in verdicts.items()}, outcomes


def junit_name(node: str) -> str:
    """Return the name that junit's report has for a test."""
    file, *rest = node.split("::")
    return ".".join([*file.removesuffix(".py").split("/"), *rest[:-1]]) + "::" + rest[-1]


def compare(source: Path, scratch: Path, only: str) -> float:
    """Run the tests with Accelerate and with Rankbook, print the result, and return the part that passes."""
    verdicts, with_accelerate = run_tests(source, scratch, only, replace=False)
    _, with_rankbook = run_tests(source, scratch, only, replace=True)
    print(f"\n{len(verdicts)} tests in the files with tests that count")
    for reason in (MISSING, COMMAND, UNRELATED):
        print(f"{list(verdicts.values()).count(reason):6} {reason}")
    ratio = 0.0
    for verdict in (PRIVATE, COUNTED):
        names = [name for name, item in verdicts.items() if item == verdict and name in with_accelerate]
        passed = [name for name in names if with_accelerate[name] == ""]
        failed = {name: with_rankbook.get(name, "not collected") for name in passed if with_rankbook.get(name) != ""}
        both = len(passed) - len(failed)
        print(f"{len(names):6} {verdict}: {len(passed)} pass with Accelerate, {both} of these with Rankbook")
        for name, error in failed.items():
            print(f"         {name}: {error.splitlines()[0][:200]}")
        ratio = both / len(passed) if passed else 0.0
    print(f"{100 * ratio:.1f} of 100 tests that count pass with Rankbook")
    return ratio


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="run only tests whose name contains this text")
    parser.add_argument("--version", default="1.15.0")
    parser.add_argument("--keep", type=Path, help="an empty folder for the output of both runs")
    args = parser.parse_args()
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="rankbook-upstream-"))
    try:
        scratch.mkdir(exist_ok=True)
        source = args.source.resolve() if args.source else download(args.version, scratch)
        packages = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", str(scratch / "packages")]
        subprocess.run([*packages, "parameterized"], check=True)  # Accelerate's tests need it
        return int(compare(source, scratch, args.only) < ENOUGH)
    finally:
        if args.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
