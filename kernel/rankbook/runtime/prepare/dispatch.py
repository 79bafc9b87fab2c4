"""Which module of `prepare` an object belongs to, and in what order.

Owns: the table of kinds. Refuses: what stands in no row; it passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from rankbook.errors import BadRequest
from rankbook.runtime.prepare.context import Context
from rankbook.runtime.prepare.optimizers import check_sharded
from rankbook.runtime.scheduler import AcceleratedScheduler

KINDS: list[tuple[str, tuple[type, ...]]] = [
    # in the order in which they are prepared: each one looks at those before it
    ("prepare_model", (nn.Module,)),
    ("prepare_optimizer", (torch.optim.Optimizer,)),
    ("prepare_data_loader", (DataLoader,)),
    ("prepare_scheduler", (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)),
]


def kind_of(thing: object) -> str | None:
    """The method that prepares `thing`; None for what passes through."""
    for method, types in KINDS:
        if isinstance(thing, types):
            return method
    return None


def prepare_all(
    accelerator: Any,  # noqa: ANN401 - an Accelerator, which imports this
    context: Context,
    things: Sequence[Any],
    placement: Sequence[bool] | None,
) -> Any:  # noqa: ANN401 - what was given
    """Each thing prepared, in the order in which they came; one alone bare, none for none."""
    kinds = [kind_of(each) for each in things]
    if context.strategy.shards:
        of = {name: [t for t, kind in zip(things, kinds, strict=True) if kind == name] for name, _ in KINDS}
        check_sharded(of["prepare_model"], of["prepare_optimizer"])
    prepared = list(things)
    for method, _ in KINDS:
        for place, kind in enumerate(kinds):
            if kind == method:
                options = (
                    {} if placement is None or kind == "prepare_scheduler" else {"device_placement": placement[place]}
                )
                prepared[place] = getattr(accelerator, method)(things[place], **options)
    if len(prepared) == 1:
        return prepared[0]
    return tuple(prepared) if prepared else None


def misplaced(given: int, things: int) -> BadRequest:
    """The error for a list of placements that is not as long as what is to be placed."""
    return BadRequest(f"device_placement has {given} entries for {things} arguments: give one for each")
