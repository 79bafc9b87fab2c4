"""Tells what was prepared.

Owns: what of a model or an optimizer is worth telling. Refuses: to compute any of it where nobody listens.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rankbook.protocol import telemetry
from rankbook.runtime.prepare.context import Context


def report_model(name: str, model: nn.Module, context: Context, *, wrapper: str) -> None:
    """Tell the listener, if there is one."""
    if telemetry.listener is None:
        return
    parameters = list(model.parameters())
    telemetry.report(
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
    telemetry.report(
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
    telemetry.report(telemetry.Prepared(kind="loader", name=name, class_name=type(loader).__name__, batches=batches))


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
