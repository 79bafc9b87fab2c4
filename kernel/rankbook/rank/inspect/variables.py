"""List the variables of a rank: name, class, shape, dtype, device, bytes and a short preview of each value.

No repr or property of a user's class runs: all information is read from stored attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy
import torch

from rankbook.formatting import plural
from rankbook.protocol.telemetry import Variable
from rankbook.rank.inspect import tensor_introspection
from rankbook.rank.inspect.tensor_introspection import GilYield, is_a

MAX_VARIABLES = 500
_MAX_VALUE_LENGTH = 80
_NO_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_SIZED = (dict, list, tuple, set, frozenset)


def list_variables(
    namespace: Mapping[str, object], hidden: Collection[str], gil_yield: GilYield
) -> tuple[Variable, ...]:
    """Return the variables that cells have defined, in order of definition; at most `MAX_VARIABLES`."""
    variables: list[Variable] = []
    for name, value in namespace.items():
        # `issubclass` of the exact type: `isinstance` would run code of a proxy.
        if name.startswith("_") or name in hidden or issubclass(type(value), _NO_DATA):
            continue
        if len(variables) == MAX_VARIABLES:
            break
        # A look takes the GIL from the cell. It is given back regularly, see `GilYield`.
        gil_yield()
        variables.append(format_info(name, value, gil_yield))
    return tuple(variables)


def format_info(name: str, value: object, gil_yield: GilYield) -> Variable:
    """Return the description of one variable."""
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
    # A subclass may compute `shape` in a property.
    if type(value) is numpy.ndarray:
        return Variable(name, kind, value.shape, str(value.dtype), "cpu", value.nbytes, "")
    if is_a(value, torch.nn.Module):
        assert isinstance(value, torch.nn.Module)
        return _describe_tensors(name, kind, list(_tensors_of(value, gil_yield)))
    if is_a(value, torch.optim.Optimizer):
        assert isinstance(value, torch.optim.Optimizer)
        return _describe_tensors(
            name, kind, [state.tensor for state in tensor_introspection.tensors_of_optimizer(value, {}, gil_yield)]
        )
    return Variable(name, kind, None, "", "", None, preview_value(value))


def _tensors_of(model: torch.nn.Module, gil_yield: GilYield) -> Iterator[torch.Tensor]:
    for entry in tensor_introspection.tensors_of_modules(
        list(tensor_introspection.modules_of(model, gil_yield)), gil_yield
    ):
        yield entry.tensor


def _describe_tensors(name: str, kind: str, tensors: list[torch.Tensor]) -> Variable:
    dtypes = ", ".join(sorted(set(map(tensor_introspection.dtype_of, tensors))))
    devices = ", ".join(sorted(set(map(tensor_introspection.device_of, tensors))))
    return Variable(
        name, kind, None, dtypes, devices, sum(map(tensor_introspection.nbytes, tensors)), f"{len(tensors)} tensors"
    )


def preview_value(value: object) -> str:
    """Return the repr of a short plain value, the length of a container, or ""."""
    if type(value) in _PLAIN:
        if type(value) in {str, bytes}:
            # The rest is never shown, and its repr could be megabytes.
            value = value[:_MAX_VALUE_LENGTH]  # type: ignore[index]
        elif type(value) is int and value.bit_length() > 256:
            return f"{value.bit_length()} bits"
        text = repr(value)
        return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"
    # Containers show their length only: a preview of the items would run their `repr`.
    base = next((kind for kind in _SIZED if is_a(value, kind)), None)
    if base is None:
        return ""
    # The built-in method, because a subclass may define `__len__` itself.
    return plural(base.__len__(value), "item")  # type: ignore[arg-type]
