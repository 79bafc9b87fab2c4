"""Recover training state after an aborted collective, and connect the accumulation window to prepared objects.

The ranks may have failed at different batches: some may have taken an optimizer step that others did not. The sequence
is: the process groups are re-formed (rank/process_groups), rank/model_reset.py calls `restart_accumulation`, and at the
start of the next batch the window clears all gradients (`_drop`) and copies replicas that differ from rank 0
(`_agree`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rankbook.protocol import telemetry
from rankbook.runtime import prepare, prepared
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.strategies.ddp import DataParallel

_log = logging.getLogger(__name__)


def install() -> None:
    """Register this module's functions with the accumulation window, and a telemetry source for training steps."""
    window.parameters = _parameters
    window.drop = _drop
    window.agree = _agree
    telemetry.offer_source("training", _training)


def prepared_objects() -> tuple[list[Any], list[Any]]:
    """Return the prepared models and optimizers of all `Accelerator` instances that are not sharded.

    Their whole state is on every rank, so they can be sent to the replacement of a lost rank.
    """
    models = [wrapped for strategy, wrapped in prepared.prepared_models() if not strategy.shards]
    wrappers = [
        wrapper
        for wrapper in prepare.prepared_optimizers()
        if not any(isinstance(parameter, DTensor) for group in wrapper.param_groups for parameter in group["params"])
    ]
    return models, wrappers


def restart_accumulation() -> None:
    """Start a new window at the next batch, on this rank as on all others.

    The ranks may have failed at different batches.
    """
    if GradientState._shared_state:
        window.abandon(GradientState())
        window.was_broken_off = True


def _parameters() -> list[torch.Tensor]:
    return [
        parameter
        for wrapper in prepare.prepared_optimizers()
        for group in wrapper.param_groups
        for parameter in group["params"]
    ]


def _drop() -> None:
    for wrapper in prepare.prepared_optimizers():
        wrapper.optimizer.zero_grad()
    for strategy, wrapped in prepared.prepared_models():
        strategy.drop_gradients(wrapped)


def _agree() -> None:
    """Copy replicated models and optimizer states from rank 0, if the ranks have taken different steps. A collective.

    A rank may have failed before a step that others took.
    """
    copies = [wrapped for strategy, wrapped in prepared.prepared_models() if isinstance(strategy, DataParallel)]
    wrappers = prepare.prepared_optimizers()
    if not dist.is_initialized():
        return
    # All ranks take part in this collective, whatever they hold: a replacement rank may have fewer objects prepared.
    # If the counts differ, there is no common order for the broadcasts below, and nothing is copied.
    local_steps = [optimizer.steps for optimizer in wrappers]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (len(copies), local_steps))
    steps_by_rank = [steps for _, steps in rows]
    if all(rank_steps == steps_by_rank[0] for rank_steps in steps_by_rank) or any(
        (count, len(rank_steps)) != (len(copies), len(local_steps)) for count, rank_steps in rows
    ):
        return
    for model in copies:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
    for index, wrapper in enumerate(wrappers):
        box = [wrapper.state_dict()]
        dist.broadcast_object_list(box, 0)
        wrapper.load_state_dict(box[0])
        wrapper.steps = steps_by_rank[0][index]
    if dist.get_rank() == 0:
        steps = ", ".join(f"rank {rank}: {rank_steps}" for rank, rank_steps in enumerate(steps_by_rank))
        _log.warning("The ranks had taken different numbers of steps (%s); all go on from rank 0's weights.", steps)


class _Rate:
    steps = 0
    seconds = 0.0


def _training() -> telemetry.TrainingStep:
    import time

    steps, now = sum(wrapper.steps for wrapper in prepare.prepared_optimizers()), time.monotonic()
    rate = (steps - _Rate.steps) / (now - _Rate.seconds) if _Rate.seconds and now > _Rate.seconds else None
    _Rate.steps, _Rate.seconds = steps, now
    return telemetry.TrainingStep(steps=steps, batches=window.batches, rate=rate)
