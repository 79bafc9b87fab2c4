"""Find the models, optimizers and data loaders of this rank, and measure them.

The search covers the namespace, a few levels below its variables, and the objects that `rankbook.runtime` has prepared.
It runs no user code and keeps no object alive. It does not look into running functions, because that would prolong the
life of their local variables.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from rankbook.protocol.telemetry import Holding
from rankbook.rank.inspect import tensor_introspection
from rankbook.rank.inspect.tensor_introspection import GilYield, NamedTensor, instance_dict, is_a

_DEEPEST = 3
"""Maximum steps from a variable: `trainers[0].model` takes two."""
_MOST = 5_000
_MOST_ITEMS = 200
_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type(None), type),
    *(ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, numpy.ndarray),
)


@dataclass
class DiscoveredObjects:
    """The objects by name. `trees` has the modules of every model with their name prefixes."""

    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    loaders: dict[str, DataLoader[Any]] = field(default_factory=dict)
    trees: dict[str, list[tuple[str, torch.nn.Module]]] = field(default_factory=dict)


def discover_objects(namespace: Mapping[str, object], breath: GilYield) -> DiscoveredObjects:
    """Return the objects that `namespace` leads to. A submodule of a discovered model is not listed on its own."""
    objects = DiscoveredObjects()
    for name, value in _walk(namespace, breath):
        _sort(objects, name, value)
    for name, value in _prepared():
        _sort(objects, name, value)
    trees = {name: list(tensor_introspection.modules_of(model, breath)) for name, model in _once(objects.models)}
    inner = {id(module) for tree in trees.values() for _, module in tree[1:]}
    objects.models = {name: model for name, model in _once(objects.models) if id(model) not in inner}
    objects.trees = {name: trees[name] for name in objects.models}
    wrapped = {id(instance_dict(optimizer).get("optimizer")) for optimizer in objects.optimizers.values()}
    objects.optimizers = {
        name: optimizer for name, optimizer in _once(objects.optimizers) if id(optimizer) not in wrapped
    }
    objects.loaders = dict(_once(objects.loaders))
    return objects


def _sort(found: DiscoveredObjects, name: str, value: object) -> None:
    if is_a(value, torch.nn.Module):
        found.models[name] = value  # type: ignore[assignment]
    elif is_a(value, torch.optim.Optimizer):
        found.optimizers[name] = value  # type: ignore[assignment]
    elif is_a(value, DataLoader):
        found.loaders[name] = value  # type: ignore[assignment]


def _once(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in named.items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _walk(namespace: Mapping[str, object], breath: GilYield) -> Iterator[tuple[str, object]]:
    """Search breadth-first, so that the shortest name of an object comes first."""
    queue = deque((name, value, 0) for name, value in namespace.items())
    seen: set[int] = set()
    objects: list[object] = []  # keeps the objects alive, so that no id is reused
    remaining = _MOST
    while queue and remaining:
        name, value, depth = queue.popleft()
        remaining -= 1
        breath()
        if is_a(value, torch.nn.Module) or is_a(value, torch.optim.Optimizer) or is_a(value, DataLoader):
            yield name, value
        elif depth < _DEEPEST and id(value) not in seen and not issubclass(type(value), _OPAQUE):
            seen.add(id(value))
            objects.append(value)
            queue.extend((below, child, depth + 1) for below, child in _below(name, value))


def _below(name: str, value: object) -> Iterator[tuple[str, object]]:
    if is_a(value, dict):
        yield from (
            (f"{name}[{key!r}]", item)
            for key, item in tensor_introspection.items(value)[:_MOST_ITEMS]
            if type(key) is str
        )
    elif is_a(value, list) or is_a(value, tuple):
        first: list[object] = list(islice((list if is_a(value, list) else tuple).__iter__(value), _MOST_ITEMS))  # type: ignore[arg-type]
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(first))
    elif type(value).__module__ not in sys.stdlib_module_names:
        yield from (
            (f"{name}.{key}", item)
            for key, item in tensor_introspection.items(instance_dict(value))
            if type(key) is str
        )


def _prepared() -> Iterator[tuple[str, object]]:
    """Yield the objects that the runtime has prepared, which may be local variables of a function."""
    models = sys.modules.get("rankbook.runtime.prepared")
    optimizers = sys.modules.get("rankbook.runtime.prepare")
    if models is None or optimizers is None:
        return
    for number, (_, model) in enumerate(models.prepared_models()):
        yield f"prepared model {number}", model
    for number, optimizer in enumerate(optimizers.prepared_optimizers()):
        yield f"prepared optimizer {number}", optimizer


@dataclass(frozen=True)
class MeasuredObjects:
    """Sizes and descriptions of the discovered objects, in bytes.

    `trainable` are the parameters that may have gradients, and `counters` the optimizers, as weak references.
    """

    holdings: tuple[Holding, ...]
    parameters: int
    optimizer: int
    trainable: tuple[weakref.ref[torch.Tensor], ...]
    counters: tuple[weakref.ref[torch.optim.Optimizer], ...]


def measure_objects(found: DiscoveredObjects, device: str, breath: GilYield) -> MeasuredObjects:
    """Describe every object, and count the bytes on `device` (`cpu`, `cuda:0`). A shared tensor counts once."""
    tensors: dict[int, torch.Tensor] = {}
    sizes: Counter[str] = Counter()

    def count(kind: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in tensors and tensor_introspection.device_of(tensor) == device:
            tensors[id(tensor)] = tensor
            sizes[kind] += tensor_introspection.nbytes(tensor)

    holdings = []
    for name, model in found.models.items():
        tree = found.trees[name]
        parameters = [
            entry for entry in tensor_introspection.tensors_of_modules(tree, breath) if entry.kind == "parameter"
        ]
        for part in parameters:
            breath()
            count("parameters", part.tensor)
        holdings.append(_tell_model(name, model, parameters, [module for _, module in tree]))
    trainable = tuple(weakref.ref(tensor) for tensor in tensors.values() if tensor.requires_grad)
    for name, optimizer in found.optimizers.items():
        state = tensor_introspection.tensors_of_optimizer(optimizer, {}, breath)
        for part in state:
            breath()
            count("optimizer", part.tensor)
        holdings.append(_tell_optimizer(name, optimizer, state))
    holdings += [_tell_loader(name, loader) for name, loader in found.loaders.items()]
    return MeasuredObjects(
        tuple(holdings),
        sizes["parameters"],
        sizes["optimizer"],
        trainable,
        tuple(weakref.ref(counter) for counter in found.optimizers.values()),
    )


def _tell_model(name: str, model: torch.nn.Module, held: list[NamedTensor], modules: list[torch.nn.Module]) -> Holding:
    tensors = [parameter.tensor for parameter in held]
    kinds = {type(module).__name__ for module in modules}
    ddp = tensor_introspection.loaded_class("torch.nn.parallel", "DistributedDataParallel")
    wrapper = ""
    if ddp is not None and any(is_a(module, ddp) for module in modules):
        wrapper = "DDP"
    elif any(map(tensor_introspection.is_fsdp, modules)):
        wrapper = "FSDP2"
    elif any(map(tensor_introspection.is_dtensor, tensors)):
        wrapper = "tp"
    details = ["compiled"] if "OptimizedModule" in kinds else []
    layouts = Counter(_placements(tensor) for tensor in tensors if tensor_introspection.is_dtensor(tensor))
    details += [f"{layout}: {count}" for layout, count in layouts.items()]
    return Holding(
        kind="model",
        name=name,
        class_name=_class_name(tensor_introspection.unwrapped(model)),
        wrapper=wrapper,
        parameters=sum(map(tensor_introspection.numel, tensors)),
        bytes=sum(map(tensor_introspection.nbytes, tensors)),
        dtypes=tuple(sorted(set(map(tensor_introspection.dtype_of, tensors)))),
        device=_devices(tensors),
        detail=", ".join(details),
    )


def _tell_optimizer(name: str, optimizer: torch.optim.Optimizer, state: list[NamedTensor]) -> Holding:
    parameters = tensor_introspection.parameters_of_optimizer(optimizer)
    tensors = [entry.tensor for entry in state]
    return Holding(
        kind="optimizer",
        name=name,
        class_name=type(tensor_introspection.bare_optimizer(optimizer)).__name__,
        parameters=sum(map(tensor_introspection.numel, parameters)),
        bytes=sum(map(tensor_introspection.nbytes, tensors)),
        dtypes=tuple(sorted(set(map(tensor_introspection.dtype_of, tensors)))),
        device=_devices(tensors or parameters),
        detail="" if state or not parameters else "no state yet",
    )


def _tell_loader(name: str, loader: DataLoader[Any]) -> Holding:
    has = instance_dict(loader)
    details = []
    position = instance_dict(has.get("position"))
    if type(position.get("delivered")) is int:
        details.append(f"epoch {position.get('epoch', 0)}, {position['delivered']} batches delivered")
    if type(has.get("batch_size")) is int:
        details.append(f"batch size {has['batch_size']}")
    if type(has.get("num_workers")) is int and has["num_workers"]:
        details.append(f"{has['num_workers']} workers")
    return Holding("loader", name, type(loader).__name__, detail=", ".join(details))


def _placements(tensor: torch.Tensor) -> str:
    return ", ".join(map(repr, tensor_introspection.spec_of(tensor).placements))


def _class_name(model: torch.nn.Module) -> str:
    """Return the name of the user's class instead of the subclass that `fully_shard` creates."""
    names = [base.__name__ for base in type(model).__mro__ if not base.__module__.startswith("torch.distributed.fsdp")]
    return (
        names[0]
        if not tensor_introspection.is_fsdp(model) or len(names) < 2 or not names[0].startswith("FSDP")
        else names[1]
    )


def _devices(tensors: list[torch.Tensor]) -> str:
    return ", ".join(sorted(set(map(tensor_introspection.device_of, tensors))))
