"""Which models are prepared now, and what became of their parameters.

Owns: for each model of the person's the one generation that is prepared, and for each parameter that was replaced its
successor. Refuses: to keep any of them alive: a cell that is run again leaves nothing behind.

What an `Accelerator` was asked for, as the modules of `prepare` read it.

Tells what was prepared.
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
    """A model as it was prepared last. `signature`: what would have to be done again, were it different."""

    wrapped: weakref.ref[nn.Module]
    strategy: Strategy
    signature: tuple[Any, ...]
    name: str


_generations: weakref.WeakKeyDictionary[nn.Module, PreparedModel] = weakref.WeakKeyDictionary()
_successors: WeakIdKeyDictionary = WeakIdKeyDictionary()


def unwrap_registered(model: nn.Module) -> nn.Module:
    """The person's own model, of one that `prepare` returned; any other model as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        if "reducer" not in model.__dict__ or inner in _generations:
            return inner
    return model


def generation_of(raw: nn.Module) -> PreparedModel | None:
    """How the model is prepared now, if it is."""
    return _generations.get(raw)


def strategy_of(model: nn.Module) -> Strategy | None:
    """The way the model was prepared, if it was."""
    found = _generations.get(unwrap_registered(model))
    return found.strategy if found is not None else None


def register_model(raw: nn.Module, generation: PreparedModel) -> None:
    """This is the model's generation from now on."""
    _generations[raw] = generation


def unregister_model(raw: nn.Module) -> PreparedModel | None:
    """The model is the person's own again."""
    return _generations.pop(raw, None)


def prepared_models() -> list[tuple[Strategy, nn.Module]]:
    """The prepared models that somebody still holds, with their strategies."""
    found = [(each.strategy, each.wrapped()) for each in tuple(_generations.values())]
    return [(strategy, wrapped) for strategy, wrapped in found if wrapped is not None]


def count_prepared() -> int:
    """How many models are prepared now."""
    return len(_generations)


@contextmanager
def track_replaced_parameters(model: nn.Module) -> Iterator[None]:
    """Note which parameters of `model` are replaced within the block."""
    before = [(each, name, parameter) for each in model.modules() for name, parameter in each._parameters.items()]
    yield
    pairs = [(old, module._parameters.get(name)) for module, name, old in before]
    replaced = {id(old): (old, new) for old, new in pairs if old is not None and new is not None and new is not old}
    # Whoever holds what an old one has replaced is sent to the new one at once: the old one itself is about to go.
    for earlier, reference in list(_successors.items()):
        middle = reference()
        if middle is not None and id(middle) in replaced:
            _successors[earlier] = TensorWeakRef(replaced[id(middle)][1])
    for old, new in replaced.values():
        _successors[old] = TensorWeakRef(new)
        _successors.pop(new, None)  # or two of them could lead to each other


def replacement_of(parameter: torch.Tensor) -> torch.Tensor:
    """What stands for `parameter` in its model now: itself, unless it was replaced."""
    reference = _successors.get(parameter)
    found: torch.Tensor | None = reference() if reference is not None else None
    return parameter if found is None else found  # None: its model is gone, and with it who would need this


@dataclass
class PrepareContext:
    """One `prepare` call's view. `before_step` is called by each optimizer ahead of a real step."""

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
    """Tell the listener, if there is one."""
    if telemetry.listener is None:
        return
    parameters = list(model.parameters())
    telemetry.report_value(
        telemetry.Prepared(
            kind="model",
            name=name,
            class_name=_class_of(model),
            wrapper=wrapper,
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in parameters if each.requires_grad),
            bytes=sum(_local(each).nbytes for each in parameters),
            dtypes=tuple(sorted({str(each.dtype).removeprefix("torch.") for each in parameters})),
            device=str(context.setup.device),
            precision=context.precision,
            layout=_layout(parameters),
        )
    )


def report_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Tell the listener, if there is one."""
    if telemetry.listener is None:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    telemetry.report_value(
        telemetry.Prepared(
            kind="optimizer",
            name=type(optimizer).__name__,
            class_name=type(optimizer).__name__,
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in parameters if each.requires_grad),
            bytes=sum(_local(each).nbytes for each in state),
            dtypes=tuple(sorted({str(each.dtype).removeprefix("torch.") for each in parameters})),
            device=str(parameters[0].device) if parameters else "",
            layout=_layout(parameters),
        )
    )


def report_loader(name: str, loader: object) -> None:
    """Tell the listener, if there is one."""
    if telemetry.listener is None:
        return
    try:
        batches: int | None = len(loader)  # type: ignore[arg-type]
    except TypeError:  # nobody knows, an iterable dataset has no length
        batches = None
    telemetry.report_value(
        telemetry.Prepared(kind="loader", name=name, class_name=type(loader).__name__, batches=batches)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(parameters: list[nn.Parameter]) -> dict[str, int]:
    return dict(Counter(", ".join(map(repr, each.placements)) for each in parameters if isinstance(each, DTensor)))


def _class_of(model: nn.Module) -> str:
    """The person's own class, and not the one that `fully_shard` made of it."""
    names = [
        each.__name__
        for each in type(model).__mro__
        if each.__module__ != "torch.distributed.fsdp._fully_shard._fsdp_init"
    ]
    return names[0] if not names[0].startswith("FSDPModule") else names[1]
