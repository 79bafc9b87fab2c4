"""Find the models, optimizers and data loaders of this rank, and measure them and their gradients.

The search covers the namespace, a few levels below its variables, and the objects that `rankbook.runtime` has prepared.
It runs no user code and keeps no object alive. It does not look into running functions, because that would prolong the
life of their local variables.

`GradientMeter` measures the norms of gradients by module, for the views, at the end of optimizer steps and between
cells. The norm of a sharded gradient is known only if all ranks have measured their shards at the same step. They do so
without asking one another, at the steps whose number is a multiple of `every`, which the notebook chooses from the
speed of the training. It adds the squares of the shards. Measuring is one pass over the gradients, on the thread that
has stepped; a view only requests it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from rankbook.lazy_imports import loaded_module
from rankbook.numerics import step_ends
from rankbook.numerics.hashing import place_of
from rankbook.protocol.queries import GradientEntry, LocalGradients, ModelGradients
from rankbook.protocol.telemetry import Holding
from rankbook.rank.inspect import tensor_introspection
from rankbook.rank.inspect.tensor_introspection import GilYield, NamedTensor, instance_dict, is_a

_MAX_DEPTH = 3
"""Maximum steps from a variable: `trainers[0].model` takes two."""
_MAX_OBJECTS = 5_000
_MAX_ITEMS = 200
# Values that lead to no model, which are most of what a namespace holds.
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


def discover_objects(namespace: Mapping[str, object], gil_yield: GilYield) -> DiscoveredObjects:
    """Return the objects that `namespace` leads to. A submodule of a discovered model is not listed on its own."""
    objects = DiscoveredObjects()
    # Variables first, so that a prepared object that is also a variable has the variable's name.
    for name, value in _walk(namespace, gil_yield):
        _classify(objects, name, value)
    for name, value in _prepared():
        _classify(objects, name, value)
    trees = {name: list(tensor_introspection.modules_of(model, gil_yield)) for name, model in _unique(objects.models)}
    # Of `model` and `block = model.blocks[0]` only `model` is listed: the block is part of its tree.
    inner = {id(module) for tree in trees.values() for _, module in tree[1:]}
    objects.models = {name: model for name, model in _unique(objects.models) if id(model) not in inner}
    objects.trees = {name: trees[name] for name in objects.models}
    # The optimizer inside a prepared one is the same thing to the user.
    wrapped = {id(instance_dict(optimizer).get("optimizer")) for optimizer in objects.optimizers.values()}
    objects.optimizers = {
        name: optimizer for name, optimizer in _unique(objects.optimizers) if id(optimizer) not in wrapped
    }
    objects.loaders = dict(_unique(objects.loaders))
    return objects


def _classify(objects: DiscoveredObjects, name: str, value: object) -> None:
    if is_a(value, torch.nn.Module):
        objects.models[name] = value  # type: ignore[assignment]
    elif is_a(value, torch.optim.Optimizer):
        objects.optimizers[name] = value  # type: ignore[assignment]
    elif is_a(value, DataLoader):
        objects.loaders[name] = value  # type: ignore[assignment]


def _unique(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    ids: set[int] = set()
    for name, value in named.items():
        if id(value) not in ids:
            ids.add(id(value))
            yield name, value


def _walk(namespace: Mapping[str, object], gil_yield: GilYield) -> Iterator[tuple[str, object]]:
    """Search breadth-first, so that the shortest name of an object comes first."""
    queue = deque((name, value, 0) for name, value in namespace.items())
    visited: set[int] = set()
    objects: list[object] = []  # keeps the objects alive, so that no id is reused
    # A bound on the time of a search, however many variables there are.
    remaining = _MAX_OBJECTS
    while queue and remaining:
        name, value, depth = queue.popleft()
        # Example: with `trainers = [Trainer(model)]` the queue holds ("trainers", list, 0), then ("trainers[0]",
        # Trainer, 1), then ("trainers[0].model", model, 2), which is yielded.
        remaining -= 1
        gil_yield()
        # The search does not look into these. A model's parts are found by its tree.
        if is_a(value, torch.nn.Module) or is_a(value, torch.optim.Optimizer) or is_a(value, DataLoader):
            yield name, value
        elif depth < _MAX_DEPTH and id(value) not in visited and not issubclass(type(value), _OPAQUE):
            visited.add(id(value))
            objects.append(value)
            queue.extend((below, child, depth + 1) for below, child in _children(name, value))


def _children(name: str, value: object) -> Iterator[tuple[str, object]]:
    if is_a(value, dict):
        yield from (
            (f"{name}[{key!r}]", item)
            for key, item in tensor_introspection.items(value)[:_MAX_ITEMS]
            if type(key) is str
        )
    elif is_a(value, list) or is_a(value, tuple):
        first: list[object] = list(islice((list if is_a(value, list) else tuple).__iter__(value), _MAX_ITEMS))  # type: ignore[arg-type]
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(first))
    # Objects of the standard library are not searched: there are very many of them.
    elif type(value).__module__ not in sys.stdlib_module_names:
        yield from (
            (f"{name}.{key}", item)
            for key, item in tensor_introspection.items(instance_dict(value))
            if type(key) is str
        )


def _prepared() -> Iterator[tuple[str, object]]:
    """Yield the objects that the runtime has prepared, which may be local variables of a function."""
    # Not imported by any cell: nothing was prepared.
    models = loaded_module("rankbook.runtime.prepared")
    optimizers = loaded_module("rankbook.runtime.prepare")
    if models is None or optimizers is None:
        return
    for number, (_, model) in enumerate(models.prepared_models()):
        yield f"prepared model {number}", model
    for number, optimizer in enumerate(optimizers.prepared_optimizers()):
        yield f"prepared optimizer {number}", optimizer


@dataclass(frozen=True)
class MeasuredObjects:
    """Sizes and descriptions of the discovered objects, in bytes.

    `trainable` are the parameters that may have gradients, `models` those of every model by name, and `counters` the
    optimizers, as weak references.
    """

    holdings: tuple[Holding, ...]
    parameters: int
    optimizer: int
    trainable: tuple[weakref.ref[torch.Tensor], ...]
    models: dict[str, tuple[tuple[str, weakref.ref[torch.Tensor]], ...]]
    counters: tuple[weakref.ref[torch.optim.Optimizer], ...]


def measure_objects(objects: DiscoveredObjects, device: str, gil_yield: GilYield) -> MeasuredObjects:
    """Describe every object, and count the bytes on `device` (`cpu`, `cuda:0`). A shared tensor counts once."""
    tensors: dict[int, torch.Tensor] = {}
    # Bytes by kind, "parameters" and "optimizer".
    sizes: Counter[str] = Counter()

    # By identity, so that a parameter that two models share counts once.
    def count(kind: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in tensors and tensor_introspection.device_of(tensor) == device:
            tensors[id(tensor)] = tensor
            sizes[kind] += tensor_introspection.nbytes(tensor)

    holdings = []
    models = {}
    for name, model in objects.models.items():
        tree = objects.trees[name]
        parameters = [
            entry for entry in tensor_introspection.tensors_of_modules(tree, gil_yield) if entry.kind == "parameter"
        ]
        for entry in parameters:
            gil_yield()
            count("parameters", entry.tensor)
        models[name] = tuple((entry.name, weakref.ref(entry.tensor)) for entry in parameters)
        holdings.append(_describe_model(name, model, parameters, [module for _, module in tree]))
    # Weak references, because a view must not keep a model alive.
    trainable = tuple(weakref.ref(tensor) for tensor in tensors.values() if tensor.requires_grad)
    for name, optimizer in objects.optimizers.items():
        state = tensor_introspection.tensors_of_optimizer(optimizer, {}, gil_yield)
        for entry in state:
            gil_yield()
            count("optimizer", entry.tensor)
        holdings.append(_describe_optimizer(name, optimizer, state))
    holdings += [_describe_loader(name, loader) for name, loader in objects.loaders.items()]
    return MeasuredObjects(
        tuple(holdings),
        sizes["parameters"],
        sizes["optimizer"],
        trainable,
        models,
        tuple(weakref.ref(counter) for counter in objects.optimizers.values()),
    )


def _describe_model(
    name: str, model: torch.nn.Module, parameters: list[NamedTensor], modules: list[torch.nn.Module]
) -> Holding:
    tensors = [parameter.tensor for parameter in parameters]
    kinds = {type(module).__name__ for module in modules}
    ddp = tensor_introspection.loaded_class("torch.nn.parallel", "DistributedDataParallel")
    wrapper = ""
    if ddp is not None and any(is_a(module, ddp) for module in modules):
        wrapper = "DDP"
    elif any(map(tensor_introspection.is_fsdp, modules)):
        wrapper = "FSDP2"
    elif any(map(tensor_introspection.is_dtensor, tensors)):
        wrapper = "tp"
    # In words, for the view: "compiled, Shard(dim=0): 12, Replicate(): 3".
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


def _describe_optimizer(name: str, optimizer: torch.optim.Optimizer, state: list[NamedTensor]) -> Holding:
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


def _describe_loader(name: str, loader: DataLoader[Any]) -> Holding:
    attributes = instance_dict(loader)
    details = []
    position = instance_dict(attributes.get("position"))
    if type(position.get("delivered")) is int:
        details.append(f"epoch {position.get('epoch', 0)}, {position['delivered']} batches delivered")
    if type(attributes.get("batch_size")) is int:
        details.append(f"batch size {attributes['batch_size']}")
    if type(attributes.get("num_workers")) is int and attributes["num_workers"]:
        details.append(f"{attributes['num_workers']} workers")
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


_WATCHED_SECONDS = 5.0
"""Seconds after the last request for which gradients are measured."""

_UNCOUNTED_PAUSE = 2.0
"""Seconds between two measurements for an optimizer that does not count its steps."""

Parameters = Sequence[tuple[str, weakref.ref[torch.Tensor]]]
"""Parameters of a model by name."""


class GradientMeter:
    """Measures the gradients of the models that a view shows, while it is open."""

    def __init__(self, run_when_idle: Callable[[Callable[[], None]], None], cell: Callable[[], int]) -> None:
        self._run_when_idle, self._cell = run_when_idle, cell
        self._main = threading.main_thread().ident
        self._models: Mapping[str, Parameters] = {}
        self._every, self._until = 0, 0.0
        self._listens = self._waits_for_idle = False
        self._measured_after: int | None = None
        self._next_uncounted = 0.0
        self._latest: dict[str, ModelGradients] = {}
        self._failed: set[str] = set()
        self._changed = threading.Event()
        self.version = 0
        self.seconds = 0.0

    @property
    def latest(self) -> tuple[ModelGradients, ...]:
        """Return the last measurements of all models."""
        return tuple(self._latest.copy().values())

    def request(self, every: int) -> None:
        """Measure at the ends of steps whose number is a multiple of `every`, in the next seconds. Any thread."""
        self._every, self._until = every, time.monotonic() + _WATCHED_SECONDS
        if not self._listens:
            self._listens = True
            step_ends.listen(self._after_step)
        if not self._waits_for_idle and self._measured_after != self._cell():
            self._waits_for_idle = True
            self._run_when_idle(self._when_idle)

    def set_models(self, models: Mapping[str, Parameters]) -> None:
        """Measure these models from now on. Any thread."""
        # A variable may have got another model, whose gradients are not known yet.
        known = {name: [id(reference()) for _, reference in parameters] for name, parameters in self._models.items()}
        same = {
            name
            for name, parameters in models.items()
            if known.get(name) == [id(reference()) for _, reference in parameters]
        }
        if same != models.keys():
            self._measured_after = None
        self._models = models
        self._failed &= same
        latest = {name: norms for name, norms in self._latest.items() if name in same}
        if latest.keys() != self._latest.keys():
            self._latest = latest
            self.version += 1

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a new measurement."""
        self._changed.clear()
        if self._models and (self._waits_for_idle or not self._latest):
            self._changed.wait(timeout)

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._every or time.monotonic() > self._until or threading.get_ident() != self._main:
            return
        step = step_ends.step_of(optimizer)
        if step is not None and step % self._every:
            return
        if step is None:  # a step that nobody counts: the first one after a pause, on every rank
            if time.monotonic() < self._next_uncounted:
                return
            self._next_uncounted = time.monotonic() + max(_UNCOUNTED_PAUSE, 50 * self.seconds)
        stepped = set(map(id, tensor_introspection.parameters_of_optimizer(optimizer)))
        self._measure(lambda parameters: any(id(parameter) in stepped for _, parameter in parameters), step or 0)

    def _when_idle(self) -> None:
        self._waits_for_idle = False
        self._measured_after = self._cell()
        # After a training all gradients may be cleared. The last norms are of more use than none.
        self._measure(lambda parameters: any(parameter.grad is not None for _, parameter in parameters), None)

    def _measure(self, wanted: Callable[[list[tuple[str, torch.Tensor]]], bool], step: int | None) -> None:
        start = time.perf_counter()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # no user code
            for name, references in self._models.items():
                if name in self._failed:
                    continue
                parameters = [(key, tensor) for key, reference in references if (tensor := reference()) is not None]
                parameters = [(key, tensor) for key, tensor in parameters if tensor.is_leaf and tensor.requires_grad]
                try:
                    if parameters and wanted(parameters):
                        self._latest[name] = ModelGradients(name, step, measure(parameters))
                        self.version += 1
                except Exception:  # noqa: BLE001 - a view must not end the rank: shown in full, once
                    self._failed.add(name)
                    told = f"Rankbook cannot measure the gradients of `{name}` for a view:\n{traceback.format_exc()}"
                    sys.stderr.write(told)
        self.seconds = time.perf_counter() - start
        self._changed.set()


def measure(parameters: Sequence[tuple[str, torch.Tensor]]) -> LocalGradients:
    """Return the norms of the gradients by module and place. No collective.

    A gradient that the ranks have yet to sum up has no norm of its own: it is left out, and `reduced` is False. So is
    one on the meta device, which has no values.
    """
    norms: list[tuple[tuple[str, str], torch.Tensor, float]] = []
    scales = _loss_scales([parameter for _, parameter in parameters])
    elements: dict[tuple[str, str], int] = {}
    reduced = True
    for key, parameter in parameters:
        gradient = parameter.grad
        sharded, place = parameter if gradient is None else gradient, ""
        if tensor_introspection.is_dtensor(sharded):
            spec = tensor_introspection.spec_of(sharded)
            if any(placement.is_partial() for placement in spec.placements):
                reduced, gradient = False, None
            else:
                place = place_of(spec.mesh, spec.placements)
        entry = (key.rpartition(".")[0], place)
        elements[entry] = elements.get(entry, 0) + tensor_introspection.local_shard(parameter).numel()
        if gradient is not None and not (shard := tensor_introspection.local_shard(gradient)).is_meta:
            norms.append((entry, _norm(shard), scales.get(id(parameter), 1.0)))
    squares: dict[tuple[str, str], list[float]] = {}
    for (entry, _, scale), value in zip(norms, _read([norm for _, norm, _ in norms]), strict=True):
        norm = value / scale
        squares.setdefault(entry, []).append(norm * norm)  # `**` would raise OverflowError
    return LocalGradients(
        tuple(
            GradientEntry(*entry, _root(squares[entry]) if entry in squares else None, 0.0, count)
            for entry, count in elements.items()
        ),
        reduced,
        max(scales.values(), default=1.0),
    )


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    # Half precision would overflow.
    wide = torch.float32 if gradient.dtype.itemsize < 4 else None
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm.float()


def _read(norms: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of the norms, with one wait for a device."""
    if len({norm.device for norm in norms}) == 1:
        return [float(value) for value in torch.stack(list(norms)).tolist()]
    return [norm.item() for norm in norms]


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _loss_scales(parameters: Sequence[torch.Tensor]) -> dict[int, float]:
    if "rankbook.runtime.prepare" not in sys.modules:  # no optimizer was prepared, so there is no scaler
        return {}
    from rankbook.numerics.gradients import loss_scales

    return loss_scales(parameters)
