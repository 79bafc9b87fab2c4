"""Registry of prepared models, and of the parameters that their preparation has replaced.

All references are weak: running a cell again leaves nothing of the previous model behind. The module also defines
`PrepareContext`, the settings of one `prepare` call, and reports prepared objects to telemetry.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from rankbook import snapshot_files
from rankbook.protocol import telemetry
from rankbook.runtime.config import TorchDynamoPlugin
from rankbook.runtime.gradient_state import settle_before_training
from rankbook.runtime.strategies.base import Strategy, StrategySetup


@dataclass
class PreparedModel:
    """State of a prepared model. It must be prepared again when `signature` changes."""

    wrapped: weakref.ref[nn.Module]
    strategy: Strategy
    signature: tuple[Any, ...]
    name: str


# The key is the user's own model, which exists once, however often it is prepared. The value must not refer to the key
# strongly, or neither would be freed; so the wrapper is referenced weakly.
_prepared_models: weakref.WeakKeyDictionary[nn.Module, PreparedModel] = weakref.WeakKeyDictionary()
# By identity, because tensors compare elementwise. The values are `TensorWeakRef`s: a plain weak reference to a tensor
# dies if only C++ code still holds the tensor.
_replacements: WeakIdKeyDictionary = WeakIdKeyDictionary()
replacement_count = 0
"""How often parameters of a model have been replaced."""


# All prepared and registered objects of the process by kind, in the order of their preparation. All ranks prepare the
# same objects in the same order, from the same `snapshot_files.next_serial` on, so an object has the same serial number
# on all of them.
_registered: dict[str, list[tuple[int, Callable[[], Any]]]] = {}


def note_registered(kind: str, item: object, serial: int | None = None) -> None:
    """Record a prepared object (kind "model", "optimizer", "scheduler", "loader") or a registered one ("custom").

    Prepared again, an object keeps its number, as a model does that gets another wrapper. `serial` is the number of an
    object that arrived from another process.
    """
    entries = _registered.setdefault(kind, [])
    identity = unwrap_registered(item) if isinstance(item, nn.Module) else item
    kept, number = [], serial
    for known, reference in entries:
        alive = reference()
        if alive is None:
            continue
        if alive is item or (isinstance(alive, nn.Module) and unwrap_registered(alive) is identity):
            number = known if number is None else number
        else:
            kept.append((known, reference))
    number = snapshot_files.next_serial if number is None else number
    if serial is None:
        # Also if the object keeps its number: on another rank it may be new, and the next one has one number on both.
        snapshot_files.next_serial += 1
    try:
        kept.append((number, weakref.ref(item)))
    except TypeError:  # an object of the user without weak references, which the Accelerator holds as well
        kept.append((number, lambda: item))
    entries[:] = kept


def registered(kind: str) -> dict[int, Any]:
    """Return the objects of this kind that are still referenced, by serial number. See `note_registered`."""
    return {number: item for number, reference in tuple(_registered.get(kind, ())) if (item := reference()) is not None}


def serials_of(kind: str, items: Iterable[object]) -> list[int | None]:
    """Return the serial numbers of objects of this kind."""
    numbers = {id(item): number for number, item in registered(kind).items()}
    return [numbers.get(id(item)) for item in items]


def current_models() -> dict[int, tuple[Strategy, nn.Module]]:
    """Return the original models that are prepared, with their strategies, by serial number."""
    models = {}
    for number, wrapped in registered("model").items():
        raw = unwrap_registered(wrapped)
        preparation = _prepared_models.get(raw)
        if preparation is not None and preparation.wrapped() is wrapped:
            models[number] = (preparation.strategy, raw)
    return models


def unwrap_registered(model: nn.Module) -> nn.Module:
    """Return the original model, if `model` was returned by `prepare`, otherwise `model`."""
    if isinstance(model, DistributedDataParallel):
        # A wrapper without a reducer was released by a later `prepare`. A DDP model that the user has made is not
        # unwrapped: it is a model in its own right.
        inner: nn.Module = model.module
        if "reducer" not in model.__dict__ or inner in _prepared_models:
            return inner
    return model


def prepared_model_of(raw: nn.Module) -> PreparedModel | None:
    """Return the current preparation of the original model `raw`, otherwise None."""
    return _prepared_models.get(raw)


def strategy_of(model: nn.Module) -> Strategy | None:
    """Return the strategy that `model` was prepared with, otherwise None."""
    # A user-made DDP wrapper and an unknown model have no strategy.
    preparation = _prepared_models.get(unwrap_registered(model))
    return preparation.strategy if preparation is not None else None


def register_model(raw: nn.Module, preparation: PreparedModel) -> None:
    """Record `preparation` as the current preparation of `raw`, which may have to be settled before it trains."""
    _prepared_models[raw] = preparation
    if (wrapped := preparation.wrapped()) is not None:
        settle_before_training(wrapped)


def unregister_model(raw: nn.Module) -> PreparedModel | None:
    """Remove the preparation of `raw` from the registry and return it."""
    return _prepared_models.pop(raw, None)


def prepared_models() -> list[tuple[Strategy, nn.Module]]:
    """Return the prepared models that are still referenced, with their strategies."""
    pairs = [(preparation.strategy, preparation.wrapped()) for preparation in tuple(_prepared_models.values())]
    return [(strategy, wrapped) for strategy, wrapped in pairs if wrapped is not None]


def count_prepared() -> int:
    """Return the number of prepared models."""
    return len(_prepared_models)


@contextmanager
def track_replaced_parameters(model: nn.Module) -> Iterator[None]:
    """Record which parameters of `model` are replaced within the block.

    A parameter can be replaced repeatedly, by preparing its model again. The map of successors is kept free of chains
    and cycles: every older parameter leads directly to the current one.
    """
    before = [
        (submodule, name, parameter)
        for submodule in model.modules()
        for name, parameter in submodule._parameters.items()
    ]
    yield
    global replacement_count
    # Compare by position (module and name). Strategies replace `_parameters` entries and keep modules and names.
    pairs = [(old, module._parameters.get(name)) for module, name, old in before]
    replaced = {id(old): (old, new) for old, new in pairs if old is not None and new is not None and new is not old}
    # Redirect predecessors of a replaced parameter to the new one: the replaced one is about to be freed. Example: the
    # user's weight `w` was sharded to `s1`, and an optimizer that was made before still has `w`. Now the model is
    # prepared again, which replaces `s1` by `s2`: both `w` and `s1` must lead to `s2`.
    for earlier, reference in list(_replacements.items()):
        middle = reference()
        if middle is not None and id(middle) in replaced:
            _replacements[earlier] = TensorWeakRef(replaced[id(middle)][1])
    for old, new in replaced.values():
        _replacements[old] = TensorWeakRef(new)
        _replacements.pop(new, None)  # otherwise two parameters could lead to each other
    replacement_count += bool(replaced)


def replacement_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that has replaced `parameter` in its model, otherwise `parameter`."""
    reference = _replacements.get(parameter)
    replacement: torch.Tensor | None = reference() if reference is not None else None
    return parameter if replacement is None else replacement  # None: the model was freed, and its successor with it


@dataclass
class PrepareContext:
    """Settings of one `prepare` call.

    Every prepared optimizer calls `before_step` with its parameters before a step that is not skipped by accumulation.
    """

    setup: StrategySetup
    strategy: Strategy
    precision: str
    dynamo: TorchDynamoPlugin
    scaler: torch.amp.GradScaler | None
    move_models: bool
    move_batches: bool
    step_with_optimizer: bool
    steps_times_num_processes: bool
    loader_options: Any
    rng_types: list[str] | None
    before_step: Callable[[Iterable[torch.Tensor]], None]


def report_model(name: str, model: nn.Module, context: PrepareContext, *, wrapper: str) -> None:
    """Report a prepared model to telemetry, if anything listens."""
    # Outside of a Rankbook rank nobody listens, and the numbers below cost a pass over all parameters.
    if telemetry.listener is None:
        return
    parameters = [parameter for parameter in model.parameters() if not isinstance(parameter, UninitializedParameter)]
    telemetry.report_value(
        telemetry.Prepared(
            kind="model",
            name=name,
            class_name=own_class_name(model),
            wrapper=wrapper,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            # Bytes of this rank; the numbers of parameters are those of the whole model, as DTensors report global
            # sizes.
            bytes=sum(_local_tensor(parameter).nbytes for parameter in parameters),
            dtypes=_dtypes(parameters),
            device=str(context.setup.device),
            precision=context.precision,
            layout=_layout(parameters),
        )
    )


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in the state of the optimizer's parameters."""
    states: dict[Any, Any] = optimizer.state  # some optimizers keep numbers under a name
    return [
        value
        for key, values in states.items()
        if isinstance(key, torch.Tensor)
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]


def report_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Report a prepared optimizer to telemetry, if anything listens."""
    if telemetry.listener is None:
        return
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [parameter for parameter in listed if not isinstance(parameter, UninitializedParameter)]
    telemetry.report_value(
        telemetry.Prepared(
            kind="optimizer",
            name=type(optimizer).__name__,
            class_name=type(optimizer).__name__,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            bytes=sum(_local_tensor(tensor).nbytes for tensor in state_tensors(optimizer)),
            dtypes=_dtypes(parameters),
            device=str(parameters[0].device) if parameters else "",
            layout=_layout(parameters),
        )
    )


def report_loader(name: str, loader: object) -> None:
    """Report a prepared loader to telemetry, if anything listens."""
    if telemetry.listener is None:
        return
    try:
        batches: int | None = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # an iterable dataset has no length
        batches = None
    telemetry.report_value(
        telemetry.Prepared(kind="loader", name=name, class_name=type(loader).__name__, batches=batches)
    )


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dtypes(parameters: list[nn.Parameter]) -> tuple[str, ...]:
    return tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))


def _layout(parameters: list[nn.Parameter]) -> dict[str, int]:
    return dict(
        Counter(", ".join(map(repr, tensor.placements)) for tensor in parameters if isinstance(tensor, DTensor))
    )


def own_class_name(model: nn.Module) -> str:
    """Return the name of the model's own class, rather than of the subclass that `fully_shard` creates."""
    # `fully_shard` makes a class FSDPLinear of FSDPModule and Linear. By name, since FSDP2 is imported only when used.
    return next(
        base.__name__ for base in type(model).__mro__ if all(parent.__name__ != "FSDPModule" for parent in base.__mro__)
    )
