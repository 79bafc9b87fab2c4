"""Registry of prepared models, and of the parameters that their preparation has replaced.

All references are weak: running a cell again leaves nothing of the previous model behind. The module also defines
`PrepareContext`, the settings of one `prepare` call, and reports prepared objects to telemetry.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from rankbook.protocol import telemetry
from rankbook.runtime.config import TorchDynamoPlugin
from rankbook.runtime.strategies.base import Strategy, StrategySetup


@dataclass
class PreparedModel:
    """State of a prepared model. It must be prepared again when `signature` changes."""

    wrapped: weakref.ref[nn.Module]
    strategy: Strategy
    signature: tuple[Any, ...]
    name: str


_generations: weakref.WeakKeyDictionary[nn.Module, PreparedModel] = weakref.WeakKeyDictionary()
_successors: WeakIdKeyDictionary = WeakIdKeyDictionary()


def unwrap_registered(model: nn.Module) -> nn.Module:
    """Return the original model, if `model` was returned by `prepare`, otherwise `model`."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        if "reducer" not in model.__dict__ or inner in _generations:
            return inner
    return model


def generation_of(raw: nn.Module) -> PreparedModel | None:
    """Return the current preparation of the original model `raw`, otherwise None."""
    return _generations.get(raw)


def strategy_of(model: nn.Module) -> Strategy | None:
    """Return the strategy that `model` was prepared with, otherwise None."""
    generation = _generations.get(unwrap_registered(model))
    return generation.strategy if generation is not None else None


def register_model(raw: nn.Module, generation: PreparedModel) -> None:
    """Record `generation` as the current preparation of `raw`."""
    _generations[raw] = generation


def unregister_model(raw: nn.Module) -> PreparedModel | None:
    """Remove the preparation of `raw` from the registry and return it."""
    return _generations.pop(raw, None)


def prepared_models() -> list[tuple[Strategy, nn.Module]]:
    """Return the prepared models that are still referenced, with their strategies."""
    pairs = [(generation.strategy, generation.wrapped()) for generation in tuple(_generations.values())]
    return [(strategy, wrapped) for strategy, wrapped in pairs if wrapped is not None]


def count_prepared() -> int:
    """Return the number of prepared models."""
    return len(_generations)


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
    pairs = [(old, module._parameters.get(name)) for module, name, old in before]
    replaced = {id(old): (old, new) for old, new in pairs if old is not None and new is not None and new is not old}
    # Redirect predecessors of a replaced parameter to the new one: the replaced one is about to be freed.
    for earlier, reference in list(_successors.items()):
        middle = reference()
        if middle is not None and id(middle) in replaced:
            _successors[earlier] = TensorWeakRef(replaced[id(middle)][1])
    for old, new in replaced.values():
        _successors[old] = TensorWeakRef(new)
        _successors.pop(new, None)  # otherwise two parameters could lead to each other


def replacement_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that has replaced `parameter` in its model, otherwise `parameter`."""
    reference = _successors.get(parameter)
    replacement: torch.Tensor | None = reference() if reference is not None else None
    return parameter if replacement is None else replacement  # None: the model was freed, and its successor with it


@dataclass
class PrepareContext:
    """Settings of one `prepare` call.

    Every prepared optimizer calls `before_step` before a step that is not skipped by accumulation.
    """

    setup: StrategySetup
    strategy: Strategy
    precision: str
    dynamo: TorchDynamoPlugin
    scaler: torch.amp.GradScaler | None
    place_models: bool
    place_batches: bool
    step_with_optimizer: bool
    steps_times_num_processes: bool
    loader_options: Any
    rng_types: list[str] | None
    before_step: Callable[[], None]


def report_model(name: str, model: nn.Module, context: PrepareContext, *, wrapper: str) -> None:
    """Report a prepared model to telemetry, if anything listens."""
    if telemetry.listener is None:
        return
    parameters = list(model.parameters())
    telemetry.report_value(
        telemetry.Prepared(
            kind="model",
            name=name,
            class_name=_class_of(model),
            wrapper=wrapper,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            bytes=sum(_local(parameter).nbytes for parameter in parameters),
            dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
            device=str(context.setup.device),
            precision=context.precision,
            layout=_layout(parameters),
        )
    )


def report_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Report a prepared optimizer to telemetry, if anything listens."""
    if telemetry.listener is None:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    telemetry.report_value(
        telemetry.Prepared(
            kind="optimizer",
            name=type(optimizer).__name__,
            class_name=type(optimizer).__name__,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            bytes=sum(_local(tensor).nbytes for tensor in state),
            dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
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
    except TypeError:  # an iterable dataset has no length
        batches = None
    telemetry.report_value(
        telemetry.Prepared(kind="loader", name=name, class_name=type(loader).__name__, batches=batches)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(parameters: list[nn.Parameter]) -> dict[str, int]:
    return dict(
        Counter(", ".join(map(repr, tensor.placements)) for tensor in parameters if isinstance(tensor, DTensor))
    )


def _class_of(model: nn.Module) -> str:
    """Return the name of the model's own class, rather than of the subclass that `fully_shard` creates."""
    names = [
        base.__name__
        for base in type(model).__mro__
        if base.__module__ != "torch.distributed.fsdp._fully_shard._fsdp_init"
    ]
    return names[0] if not names[0].startswith("FSDPModule") else names[1]
