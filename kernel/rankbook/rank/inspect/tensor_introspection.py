"""Metadata of tensors and variables: names, local shards, shapes and sizes, without running user code.

No user code runs (hooks, properties, reprs). The main thread may change everything meanwhile, and must not be delayed:
see `GilYield`.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

from rankbook.errors import InvalidArgument
from rankbook.formatting import plural
from rankbook.protocol.telemetry import Variable

_WORK_SECONDS = 0.0003
"""Seconds of work after which the GIL is released for the main thread."""
# Seconds of a pause: a scan then has the GIL for about 0.3 ms of every 0.8 ms.
_YIELD_SECONDS = 0.0005
_never = threading.Event()


class GilYield:
    """Yields the GIL periodically during a long scan: call the object once per item."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self) -> None:
        """Release the GIL if it is time to."""
        # CPython hands the GIL over only every 5 ms if another thread asks for it. Waiting gives it up at once.
        if time.perf_counter() - self._began > _WORK_SECONDS:
            _never.wait(_YIELD_SECONDS)
            self._began = time.perf_counter()


@dataclass(frozen=True)
class NamedTensor:
    """A tensor with its name in a model or an optimizer. `kind` is "parameter", "buffer" or "state"."""

    name: str
    tensor: torch.Tensor
    kind: str


def is_a(value: object, kind: type) -> bool:
    """Check an instance by its type alone; isinstance would ask a proxy for its `__class__`."""
    return issubclass(type(value), kind)


def instance_dict(value: object) -> dict[str, Any]:
    """Return the instance's `__dict__` without running properties."""
    try:
        # The method of `object` itself, because the user's class may define `__getattribute__`.
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if is_a(attributes, dict) else {}


def items(mapping: object) -> list[tuple[Any, Any]]:
    """Return the items of a dict that another thread may be changing; empty for any other object."""
    if not is_a(mapping, dict):
        return []
    # A dict that changes all the time is left out of the look.
    for _ in range(5):
        try:
            return list(dict.items(mapping))  # type: ignore[arg-type]
        except RuntimeError:  # the dict was changed during the iteration
            continue
    return []


def loaded_class(module: str, name: str) -> type | None:
    """Return a class if its module has been imported, else None: then no instance of it exists."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if is_a(kind, type) else None


# Classes are looked up among the modules that are loaded. Importing torch.distributed.tensor takes a second, which a
# rank that uses none must not pay for being watched.
def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor."""
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and is_a(tensor, kind)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, and any other tensor itself."""
    return object.__getattribute__(tensor, "_local_tensor") if is_dtensor(tensor) else tensor


def spec_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - torch's, which is private to it
    """Return the mesh and placements of a DTensor."""
    return object.__getattribute__(tensor, "_spec")


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the local shard."""
    shard = local_shard(tensor)
    # Inside, torch calls no `__torch_function__` of a subclass, which is user code.
    with torch._C.DisableTorchFunctionSubclass():
        return sum(part.numel() * part.element_size() for part in _stored_parts(shard))


MemoryRegion = tuple[int, int, int]
"""Identity of a storage, and the offset and the size of a part of it in bytes."""


def regions_of(tensor: torch.Tensor) -> list[MemoryRegion]:
    """Return the regions of memory of the local shard. Equal ones are the same memory while the tensors exist."""
    shard = local_shard(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        sizes = [(part, part.element_size()) for part in _stored_parts(shard)]
        # The identity: the address is that of all empty storages too.
        return [
            (part.untyped_storage()._cdata, int(part.storage_offset()) * size, part.numel() * size)
            for part, size in sizes
        ]


def _stored_parts(tensor: torch.Tensor, depth: int = 4) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that a sparse or a quantized tensor consists of, and any other tensor itself."""
    # A wrapper of other tensors has a shape and a dtype, and no memory of its own. `__tensor_flatten__` is user code.
    kind = type(tensor)
    plain = kind is torch.Tensor or kind is torch.nn.Parameter
    if not plain and depth and inspect.getattr_static(kind, "__tensor_flatten__", None) is not None:
        inner = {id(value): value for _, value in items(instance_dict(tensor)) if is_a(value, torch.Tensor)}
        if inner:
            return tuple(part for value in inner.values() for part in _stored_parts(local_shard(value), depth - 1))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of the global tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.numel()


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the dtype as in `float32`."""
    with torch._C.DisableTorchFunctionSubclass():
        return str(tensor.dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor. Raises `InvalidArgument` if it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tuple(int(size) for size in tensor.shape)
        except (RuntimeError, NotImplementedError):
            raise InvalidArgument("no shape: the tensor is nested, or its lazy module has not run yet") from None


def device_of(tensor: torch.Tensor) -> str:
    """Return the device of the local shard."""
    with torch._C.DisableTorchFunctionSubclass():
        return str(local_shard(tensor).device)


def children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the child modules. The name of a module inside a wrapper is empty."""
    # Names without wrappers, so that `model.fc.weight` has the same name before and after `prepare`.
    transparent = _wrapped_name(module)
    return [
        ("" if name == transparent else str(name), child)
        for name, child in items(instance_dict(module).get("_modules"))
        if child is not None and is_a(child, torch.nn.Module)
    ]


def _wrapped_name(module: torch.nn.Module) -> str | None:
    ddp = loaded_class("torch.nn.parallel", "DistributedDataParallel")
    compiled = loaded_class("torch._dynamo.eval_frame", "OptimizedModule")
    if ddp is not None and is_a(module, ddp):
        return "module"
    if compiled is not None and is_a(module, compiled):
        return "_orig_mod"
    return (
        "_checkpoint_wrapped_module"
        if "_checkpoint_wrapped_module" in instance_dict(instance_dict(module).get("_modules"))
        else None
    )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside the wrappers of DDP and torch.compile."""
    while _wrapped_name(module) is not None and (inside := [child for name, child in children(module) if not name]):
        module = inside[0]
    return module


def modules_of(model: torch.nn.Module, gil_yield: GilYield) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the model and all its submodules without duplicates, with the prefixes of their tensors' names."""
    visited = {id(model)}
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        yield prefix, module
        gil_yield()
        below = [(f"{prefix}{name}." if name else prefix, child) for name, child in children(module)]
        # A stack, so that the children come off in their order.
        for name, child in reversed(below):
            if id(child) not in visited:
                visited.add(id(child))
                waiting.append((name, child))


def tensors_of_modules(modules: list[tuple[str, torch.nn.Module]], gil_yield: GilYield) -> list[NamedTensor]:
    """Return the parameters and buffers without duplicates. For FSDP2 these are the shards, even while unsharded."""
    tensors: dict[int, NamedTensor] = {}
    # By identity: of tied parameters the first name counts, as in `named_parameters`.
    shards = fsdp_shards([module for _, module in modules])
    for prefix, module in modules:
        gil_yield()
        for kind in ("parameter", "buffer"):
            for name, tensor in items(instance_dict(module).get(f"_{kind}s")):
                shard = shards.get((id(module), name), tensor)
                if shard is not None and is_a(shard, torch.Tensor):
                    tensors.setdefault(id(shard), NamedTensor(f"{prefix}{name}", shard, kind))
    return list(tensors.values())


def is_fsdp(module: torch.nn.Module) -> bool:
    """Return True if `fully_shard` was applied to the module."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return kind is not None and is_a(module, kind)


def fsdp_shards(modules: list[torch.nn.Module]) -> Mapping[tuple[int, str], torch.Tensor]:
    """Return the shards of all parameters that FSDP2 manages, by module id and name.

    While a module is unsharded, its attributes hold the gathered parameters instead.
    """
    state_of = getattr(
        sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state"), "_get_module_fsdp_state", None
    )
    shards: dict[tuple[int, str], torch.Tensor] = {}
    # No cell has imported FSDP, so no model is sharded.
    if state_of is None:
        return shards
    for module in modules:
        state = instance_dict(state_of(module)) if is_fsdp(module) else {}
        groups = state.get("_fsdp_param_groups", [state.get("_fsdp_param_group")])  # one, before torch 2.12
        for parameter in [fsdp_param for group in groups for fsdp_param in instance_dict(group).get("fsdp_params", ())]:
            module_info = instance_dict(instance_dict(parameter).get("_module_info"))
            shard = instance_dict(parameter).get("sharded_param")
            places = [
                (module_info.get("module"), module_info.get("param_name")),
                *zip(module_info.get("shared_modules", ()), module_info.get("shared_param_names", ()), strict=False),
            ]
            if shard is not None:
                shards.update({(id(owner), str(name)): shard for owner, name in places})
    return shards


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the innermost of nested optimizers, which has the state."""
    # A bound, because an optimizer may contain itself.
    for _ in range(4):
        inner = instance_dict(optimizer).get("optimizer")
        if inner is None or not is_a(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def parameters_of_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups without duplicates."""
    groups = instance_dict(bare_optimizer(optimizer)).get("param_groups", ())
    parameters = {
        id(parameter): parameter for group in tuple(groups) for parameter in tuple(dict.get(group, "params", ()))
    }
    return [parameter for parameter in parameters.values() if is_a(parameter, torch.Tensor)]


def tensors_of_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], gil_yield: GilYield
) -> list[NamedTensor]:
    """Return the state tensors without duplicates. `names` maps ids of parameters to names."""
    tensors: dict[int, NamedTensor] = {}
    numbers = {id(tensor): number for number, tensor in enumerate(parameters_of_optimizer(optimizer))}
    for parameter, state in items(instance_dict(bare_optimizer(optimizer)).get("state")):
        gil_yield()
        of = names.get(id(parameter), numbers.get(id(parameter), "?"))
        for name, value in items(state):
            if is_a(value, torch.Tensor):
                tensors.setdefault(id(value), NamedTensor(f"state.{of}.{name}", value, "state"))
    return list(tensors.values())


def steps_of_optimizer(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the number of steps taken, if a counter is in CPU memory."""
    counted = instance_dict(optimizer).get("steps")
    if type(counted) is int:  # the wrapper of a prepared optimizer counts
        return counted
    try:
        # Any parameter's counter does: all are stepped together.
        _, state = next(iter(dict.items(instance_dict(bare_optimizer(optimizer)).get("state", {}))))
        step: Any = dict.get(state, "step")
    except (StopIteration, RuntimeError, TypeError):  # no state yet, or changed by another thread
        return None
    # A counter on the device would have to be copied, which waits for the queued kernels.
    if is_a(step, torch.Tensor) and device_of(step) == "cpu" and numel(step) == 1 and not is_dtensor(step):
        with torch._C.DisableTorchFunctionSubclass():
            return int(step.item())
    return int(step) if type(step) in {int, float} else None


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
        try:
            shape, size = shape_of(value), nbytes(value)
        except InvalidArgument as error:
            return Variable(name, kind, None, dtype_of(value), "", None, str(error))
        return Variable(name, kind, shape, dtype_of(value), device_of(value), size, "")
    # A subclass may compute `shape` in a property.
    if type(value) is numpy.ndarray:
        return Variable(name, kind, value.shape, str(value.dtype), "cpu", value.nbytes, "")
    if is_a(value, torch.nn.Module):
        assert isinstance(value, torch.nn.Module)
        return _describe_tensors(name, kind, list(_tensors_of(value, gil_yield)))
    if is_a(value, torch.optim.Optimizer):
        assert isinstance(value, torch.optim.Optimizer)
        return _describe_tensors(name, kind, [state.tensor for state in tensors_of_optimizer(value, {}, gil_yield)])
    return Variable(name, kind, None, "", "", None, preview_value(value))


def _tensors_of(model: torch.nn.Module, gil_yield: GilYield) -> Iterator[torch.Tensor]:
    for entry in tensors_of_modules(list(modules_of(model, gil_yield)), gil_yield):
        yield entry.tensor


def _describe_tensors(name: str, kind: str, tensors: list[torch.Tensor]) -> Variable:
    dtypes = ", ".join(sorted(set(map(dtype_of, tensors))))
    devices = ", ".join(sorted(set(map(device_of, tensors))))
    return Variable(name, kind, None, dtypes, devices, sum(map(nbytes, tensors)), f"{len(tensors)} tensors")


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
