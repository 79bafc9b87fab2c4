"""A rank's variables, as a person lists them.

Owns: what is told of each without asking it. Refuses: reprs, properties and lengths of the person's own classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy
import torch

from rankbook.formatting import plural
from rankbook.protocol.telemetry import Variable
from rankbook.rank.inspect import tensor_introspection
from rankbook.rank.inspect.tensor_introspection import Breath, is_a

MOST = 500
_LONGEST_VALUE = 80
_NO_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_SIZED = (dict, list, tuple, set, frozenset)


def list_variables(namespace: Mapping[str, object], hidden: Collection[str], breath: Breath) -> tuple[Variable, ...]:
    """The variables that cells have made, in the order of their making; at most `MOST`."""
    found: list[Variable] = []
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or issubclass(type(value), _NO_DATA):
            continue
        if len(found) == MOST:
            break
        breath()
        found.append(tell(name, value, breath))
    return tuple(found)


def tell(name: str, value: object, breath: Breath) -> Variable:
    """One of them."""
    kind = type(value).__name__
    if is_a(value, torch.Tensor):
        assert isinstance(value, torch.Tensor)
        return Variable(
            name,
            kind,
            tensor_introspection.shape_of(value),
            tensor_introspection.dtype_of(value),
            tensor_introspection.device_of(value),
            tensor_introspection.nbytes(value),
            "",
        )
    if type(value) is numpy.ndarray:
        return Variable(name, kind, value.shape, str(value.dtype), "cpu", value.nbytes, "")
    if is_a(value, torch.nn.Module):
        assert isinstance(value, torch.nn.Module)
        return _tell_tensors(name, kind, list(_tensors_of(value, breath)))
    if is_a(value, torch.optim.Optimizer):
        assert isinstance(value, torch.optim.Optimizer)
        return _tell_tensors(
            name, kind, [each.tensor for each in tensor_introspection.parts_of_optimizer(value, {}, breath)]
        )
    return Variable(name, kind, None, "", "", None, preview(value))


def _tensors_of(model: torch.nn.Module, breath: Breath) -> Iterator[torch.Tensor]:
    for part in tensor_introspection.parts_of_modules(list(tensor_introspection.modules_of(model, breath)), breath):
        yield part.tensor


def _tell_tensors(name: str, kind: str, tensors: list[torch.Tensor]) -> Variable:
    dtypes = ", ".join(sorted(set(map(tensor_introspection.dtype_of, tensors))))
    devices = ", ".join(sorted(set(map(tensor_introspection.device_of, tensors))))
    return Variable(
        name, kind, None, dtypes, devices, sum(map(tensor_introspection.nbytes, tensors)), f"{len(tensors)} tensors"
    )


def preview(value: object) -> str:
    """Its text where it is plain and short, a container's length, or else ""."""
    if type(value) in _PLAIN:
        if type(value) in {str, bytes}:
            value = value[:_LONGEST_VALUE]  # type: ignore[index]
        elif type(value) is int and value.bit_length() > 256:
            return f"{value.bit_length()} bits"
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    base = next((each for each in _SIZED if is_a(value, each)), None)
    if base is None:
        return ""
    return plural(base.__len__(value), "item")  # type: ignore[arg-type]
