"""Names for what a check reports: the path of a module in its model, of a parameter, and the line of the cell.

Also `tensors_in`: the tensors that a module takes or returns have no names of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankbook.formatting import is_users
from rankbook.lazy_imports import loaded_module

_MAX_FRAMES = 100


def namespace() -> dict[str, Any]:
    """Return the variables of the cells; those of `__main__` in a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell.user_ns if shell is not None else vars(sys.modules["__main__"])


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers: lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):  # without a generator of its own: the watch asks for every module
                yield item
            else:
                yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def executed_lines() -> list[tuple[str, int]]:
    """Return the file and the line of every frame of this thread, innermost first, for `cell_line` at a later time."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


def cell_line(lines: Iterable[tuple[str, int]] | None = None) -> str:
    """Return the line that the running cell executes: `line 14`; in a script `train.py line 7`.

    If that line calls the user's code of another cell or of a module, its innermost line follows in parentheses:
    `line 14 (cell [2] line 3)`. With `lines` of `executed_lines`, return the line that was executed then.
    """
    numbers: dict[str, int] = {}
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        from rankbook.ipython_compat import cell_numbers

        numbers = cell_numbers(shell.compile)
    executed = executed_lines() if lines is None else lines
    found = [(file, line) for file, line in executed if file in numbers or _is_users(file)]
    if not found:
        return ""
    innermost, line = found[0]
    name = f"cell [{numbers[innermost]}]" if innermost in numbers else innermost.rpartition("/")[2]
    cells = [file for file, _ in found if file in numbers]
    if not cells:
        return f"{name} line {line}"
    running = cells[-1]  # the outermost frame of a cell is that of the cell which runs
    inside = f" ({name} line {line})" if innermost != running else ""
    return f"line {next(line for file, line in found if file == running)}{inside}"


_is_users = functools.cache(is_users)  # the watch asks in every step, for the same files


class ModuleNames:
    """Names of the modules and parameters of all models that the user's variables hold, and of `others`."""

    def __init__(self, variables: dict[str, Any], others: Iterable[nn.Module] = ()) -> None:
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._parents: dict[int, nn.Module] = {}
        self._keep: list[nn.Module] = []
        # Larger models first, so that a module has its path in the whole model, whatever other variables hold it.
        models = [(name, value) for name, value in tuple(variables.items()) if isinstance(value, nn.Module)]
        models += [("", model) for model in (*_prepared(), *others)]
        models = [(name, _unwrapped(model)) for name, model in models]
        for name, model in sorted(models, key=lambda item: (-sum(1 for _ in item[1].modules()), not item[0])):
            self._add(model, name)

    def _add(self, model: nn.Module, variable: str) -> None:
        self._keep.append(model)
        for path, module in model.named_modules():
            self._names.setdefault(id(module), path or variable or type(module).__name__)
            for child in module.children():
                self._parents.setdefault(id(child), module)
        for path, parameter in model.named_parameters():
            self._parameters.setdefault(id(parameter), path)

    def module(self, module: nn.Module) -> str:
        """Return the path of `module`, or the name of its class."""
        return self._names.get(id(_unwrapped(module)), type(_unwrapped(module)).__name__)

    def parameter(self, parameter: torch.Tensor) -> str:
        """Return the path of `parameter`, or its shape."""
        return self._parameters.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    def parents(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules around `module`, innermost first."""
        parent = self._parents.get(id(module))
        while parent is not None:
            yield parent
            parent = self._parents.get(id(parent))

    def encloses(self, outer: nn.Module, inner: nn.Module) -> bool:
        """Return True if `outer` is around `inner`."""
        outer, inner = _unwrapped(outer), _unwrapped(inner)
        return any(parent is outer for parent in self.parents(inner))


def _prepared() -> list[nn.Module]:
    prepared = loaded_module("rankbook.runtime.prepared")
    return [model for _, model in prepared.prepared_models()] if prepared is not None else []


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (original := model.__dict__.get("_modules", {}).get("_orig_mod")) is not None:  # torch.compile
            model = original
        else:
            return model
