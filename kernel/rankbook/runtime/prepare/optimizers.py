"""Optimizers: they follow their parameters, and act when gradients sync.

Owns: which optimizer is wrapped by what, and the exchange of parameters that were sharded or gathered, with the state
that belongs to them. Refuses: to make a second wrapper for an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rankbook.errors import BadRequest
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.prepare import registry
from rankbook.runtime.prepare.context import Context
from rankbook.runtime.prepare.reports import report_optimizer
from rankbook.runtime.strategies.gather import full

_wrappers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[AcceleratedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, context: Context, *, place: bool | None = None
) -> AcceleratedOptimizer:
    """The optimizer's one wrapper, with the settings of now. A collective where its parameters changed their layout."""
    raw = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    wrapper = wrapper_of(optimizer)
    follow(raw)
    if wrapper is None:
        wrapper = AcceleratedOptimizer(raw)
    _wrappers[raw] = weakref.ref(wrapper)
    wrapper.scaler = context.scaler
    wrapper.device_placement = context.place_models if place is None else place
    wrapper.before_step = context.before_step
    if wrapper.device_placement:
        _move_state(raw)
    report_optimizer(raw)
    return wrapper


def wrapper_of(optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer | None:
    """The wrapper of an optimizer that was prepared."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer
    reference = _wrappers.get(optimizer)
    return reference() if reference is not None else None


def living() -> list[AcceleratedOptimizer]:
    """The wrappers that somebody still holds."""
    return [wrapper for reference in tuple(_wrappers.values()) if (wrapper := reference()) is not None]


def check_sharded(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `BadRequest` where two optimizers come for one model that is to be sharded."""
    if len(models) == 1 and len(optimizers) > 1:
        raise BadRequest(
            f"{len(optimizers)} optimizers came with one model that is sharded by fully_shard: prepare one optimizer, "
            "with a parameter group for each set of options"
        )


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer` hold what stands for its parameters in their model now, with its state in the same layout."""
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = registry.successor_of(old)
            if new is not old:
                state = {name: _like(value, old, new) for name, value in optimizer.state.get(old, {}).items()}
                group["params"][place] = new
                optimizer.state.pop(old, None)
                if state:
                    optimizer.state[new] = state


def _like(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:  # noqa: ANN401 - what an optimizer keeps
    """A tensor of the parameter's shape in the layout of its successor; anything else as it is. A collective."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    whole = full(value)
    if isinstance(new, DTensor):
        return distribute_tensor(whole.to(new.device), new.device_mesh, new.placements)
    return whole.to(new.device)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """To where the parameters are, for an optimizer that has stepped before its model was placed."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)
