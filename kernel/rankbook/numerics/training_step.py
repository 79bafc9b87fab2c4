"""A training step made of a loss function, and the batch for it: for `compare` without a step of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rankbook.errors import InvalidArgument
from rankbook.numerics import recording
from rankbook.runtime.data.loader_base import PreparedLoader
from rankbook.runtime.optimizer import AcceleratedOptimizer


def step_with_loss(loss: Callable[..., Any] | None) -> Callable[[Any, Any, Any], None]:
    """Return a step that computes `loss`, its gradients, and the optimizer's update. See `compare`."""

    def step(model: torch.nn.Module, optimizer: Any, batch: Any) -> None:  # noqa: ANN401 - an optimizer or its wrapper
        value = _loss_of(model, batch, loss)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InvalidArgument(f"expected a loss of one element with a gradient, got {_describe(value)}")
        scaler = optimizer.scaler if isinstance(optimizer, AcceleratedOptimizer) else None
        (value if scaler is None else scaler.scale(value)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _loss_of(model: torch.nn.Module, batch: Any, loss: Callable[..., Any] | None) -> Any:  # noqa: ANN401
    rest: tuple[Any, ...] = ()
    if isinstance(batch, Mapping):
        output, rest = model(**batch), (batch,)
    elif isinstance(batch, (tuple, list)):
        inputs = list(batch)
        if loss is not None:
            rest = (inputs.pop(),)
        output = model(*inputs)
    else:
        output = model(batch)
    if loss is not None:
        return loss(output, *rest)
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without one")


def first_batch(loader: Iterable[Any]) -> Any:  # noqa: ANN401 - a batch
    """Return the first batch of a loader's next pass. Its position and the random states stay. A collective.

    Raises `InvalidArgument` for a loader without a batch.
    """
    states = recording.random_states()
    try:
        if isinstance(loader, PreparedLoader):
            return loader.peek()
        for batch in loader:
            return batch
    finally:
        recording.set_random_states(states)
    raise InvalidArgument("the loader has no batch on this rank")
