"""No class of ours defines a private name of the standard library's or third party's class that it extends.

The base class is free to add private names in any version: Python 3.13 gave `threading.Thread` a `_handle` that every
instance has, and it hid a method of ours. What the installed versions have is read from the classes and their source;
what other supported versions of Python have is in `OTHER_VERSIONS`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Iterator

import pytest

import rankbook

OTHER_VERSIONS: dict[type, set[str]] = {
    # The private names of a base class that not every supported Python has: 3.11 to 3.13.
    argparse.ArgumentParser: {"_warning"},
    argparse.HelpFormatter: {"_get_actions_usage_parts"},
    threading.Thread: {
        *("_after_fork", "_handle", "_is_stopped", "_os_thread_handle", "_reset_internal_locks", "_set_tstate_lock"),
        *("_stop", "_tstate_lock", "_wait_for_tstate_lock"),
    },
}

DELIBERATE: dict[tuple[str, str], str] = {
    # (class, name): why it overrides the base class's
    (
        "rankbook.magics.arguments._HelpFormatter",
        "_action_max_length",
    ): "argparse has no public way to set where help begins",
    (
        "rankbook.rank.process_groups.recoverable_group.RecoverableProcessGroup",
        "_end_coalescing",
    ): "torch calls it on a process group",
    (
        "rankbook.rank.process_groups.recoverable_group.RecoverableProcessGroup",
        "_get_backend",
    ): "torch calls it on a process group",
    (
        "rankbook.rank.process_groups.recoverable_group.RecoverableProcessGroup",
        "_start_coalescing",
    ): "torch calls it on a process group",
    ("rankbook.rank.shell.RankShell", "_showtraceback"): "IPython's hook for a shell that shows errors elsewhere",
    ("rankbook.rank.shell.RankShell", "_tee"): "IPython's history would keep all text that was ever printed",
    (
        "rankbook.runtime.optimizer.LayoutGradScaler",
        "_unscale_grads_",
    ): "torch's own ShardedGradScaler extends it too: there is no public way to unscale some of the gradients",
    ("rankbook.widgets.live_view.LiveView", "_repr_mimebundle_"): "IPython's display protocol",
}


def private(name: str) -> bool:
    """Return True if the name is private, but neither special (`__init__`) nor mangled with its class."""
    return name.startswith("_") and not name.startswith("__") and not name.endswith("__")


@functools.cache
def classes_in_source(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes that a module's source defines, by qualified name; none if it has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    found = {}
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"{prefix}{node.name}" if named else prefix
            if isinstance(node, ast.ClassDef):
                found[name] = node
            pending.append((f"{name}." if named else prefix, node))
    return found


def names_in_source(cls: type) -> set[str]:
    """Return the private names that the class's source defines, in its body or on `self`; none if it has no source."""
    tree = classes_in_source(cls.__module__).get(cls.__qualname__.replace(".<locals>.", "."))
    if tree is None:
        return set()
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for node in tree.body:
        names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and node_binds(node, name)}
    return {name for name in names if private(name)}


def node_binds(statement: ast.stmt, name: ast.Name) -> bool:
    """Return True if `statement`, of the body of a class, assigns to `name`."""
    return isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(name.ctx, ast.Store)


@functools.cache
def foreign_names(cls: type) -> set[str]:
    """Return the private names of a foreign class: what it has, what its source sets on instances, `OTHER_VERSIONS`."""
    return {name for name in vars(cls) if private(name)} | names_in_source(cls) | OTHER_VERSIONS.get(cls, set())


def is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "rankbook" or cls.__module__ == __name__


def collisions(cls: type) -> Iterator[tuple[str, type]]:
    """Yield each private name of one of our classes that a foreign class above it has too, with that class."""
    for base in cls.__mro__[1:]:
        if base is object or is_ours(base):
            continue
        yield from ((name, base) for name in sorted(names_in_source(cls) & foreign_names(base)))


def our_classes() -> Iterator[type]:
    """Yield every class of the package's modules; those of modules that need torch only where it is installed."""
    for info in pkgutil.walk_packages(rankbook.__path__, "rankbook.", onerror=lambda _: None):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] != "torch":
                raise
            continue
        yield from classes_in(module, info.name)


def classes_in(namespace: object, module: str) -> Iterator[type]:
    for value in vars(namespace).values():
        if isinstance(value, type) and value.__module__ == module and value is not namespace:
            yield value
            yield from classes_in(value, module)


@pytest.mark.slow  # inspects every class of the package
def test_no_class_hides_a_private_name_of_the_foreign_class_it_extends():
    hidden_names = {
        (f"{cls.__module__}.{cls.__qualname__}", name): f"{base.__module__}.{base.__qualname__}"
        for cls in our_classes()
        for name, base in collisions(cls)
    }
    undeclared = {key: base for key, base in hidden_names.items() if key not in DELIBERATE}
    assert not undeclared


class HasHandle(threading.Thread):
    def _handle(self) -> None:
        """Do nothing; Python 3.13's own method has the same name."""


class SetsStarted(threading.Thread):
    def run(self) -> None:
        self._started = True  # type: ignore[assignment]


class KeepsToItself(threading.Thread):
    def _dispatch(self) -> None:
        self._ours = 1


@pytest.mark.parametrize(("cls", "names"), [(HasHandle, ["_handle"]), (SetsStarted, ["_started"]), (KeepsToItself, [])])
def test_a_collision_is_found(cls, names):
    assert [name for name, _ in collisions(cls)] == names
