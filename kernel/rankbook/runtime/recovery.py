"""Recover training state after an aborted collective, and connect the accumulation window to prepared objects.

The ranks may have failed at different batches: some may have taken an optimizer step that others did not. The sequence
is: the process groups are re-formed (rank/process_groups), rank/model_reset.py calls `restart_accumulation`, and at the
start of the next batch the window clears all gradients (`_drop_gradients`) and copies replicas that differ from rank 0
(`_synchronize_replicas`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rankbook.protocol import telemetry
from rankbook.runtime import optimizer as optimizer_module
from rankbook.runtime import prepare, prepared
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.strategies.ddp import DataParallel

_log = logging.getLogger(__name__)


def install() -> None:
    """Register this module's functions with the accumulation window, and a telemetry source for training steps."""
    # The window is in a module that imports neither models nor optimizers, so it gets these functions from here.
    window.parameters = _parameters
    window.drop_gradients = _drop_gradients
    window.synchronize_replicas = _synchronize_replicas
    telemetry.offer_source("training", _training_step)


def prepared_objects() -> tuple[list[Any], list[Any]]:
    """Return the prepared models and optimizers of all `Accelerator` instances that are not sharded.

    Their whole state is on every rank, so they can be sent to the replacement of a lost rank.
    """
    models = [wrapped for strategy, wrapped in prepared.prepared_models() if not strategy.shards]
    return models, [wrapper for wrapper in prepare.prepared_optimizers() if not _is_sharded(wrapper)]


def restart_accumulation() -> None:
    """Start a new window at the next batch, on this rank as on all others.

    The ranks may have failed at different batches.
    """
    # Without a shared state no Accelerator exists in this process, and no window.
    if GradientState._shared_state:
        window.abort(GradientState())
        window.was_aborted = True


def _parameters() -> list[torch.Tensor]:
    return [
        parameter
        for wrapper in prepare.prepared_optimizers()
        for group in wrapper.param_groups
        for parameter in group["params"]
    ]


def _drop_gradients() -> None:
    for wrapper in prepare.prepared_optimizers():
        # The wrapped optimizer's method: that of the wrapper does nothing in the middle of a window.
        wrapper.optimizer.zero_grad()
    for strategy, wrapped in prepared.prepared_models():
        # FSDP keeps gradients that are not reduced yet outside of `grad`, where `zero_grad` does not find them.
        strategy.drop_gradients(wrapped)


def _synchronize_replicas() -> None:
    """Copy replicated models and optimizer states from rank 0, if the ranks have taken different steps. A collective.

    A rank may have failed before a step that others took. The scale of fp16 becomes that of rank 0 as well, because a
    rank may have skipped a step that others took. Shards are left as they are, with a warning: no other rank has what a
    rank lacks.
    """
    copies = [wrapped for strategy, wrapped in prepared.prepared_models() if isinstance(strategy, DataParallel)]
    wrappers = prepare.prepared_optimizers()
    if not dist.is_initialized():
        return
    # All ranks take part in this collective, whatever they hold: a replacement rank may have fewer objects prepared.
    # If the counts differ, there is no common order for the broadcasts below, and nothing is copied.
    local_steps = [wrapper.steps for wrapper in wrappers]
    scalers = {id(wrapper.scaler): wrapper.scaler for wrapper in wrappers if wrapper.scaler is not None}
    scales = [scaler.state_dict() for scaler in scalers.values()]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (len(copies), local_steps, scales))
    for scaler, scale in zip(scalers.values(), rows[0][2], strict=False):
        if scale != scaler.state_dict():  # gradients of different scales must not be averaged
            scaler.load_state_dict(scale)
    steps_by_rank = [steps for _, steps, _ in rows]
    if all(rank_steps == steps_by_rank[0] for rank_steps in steps_by_rank) or any(
        (count, len(rank_steps)) != (len(copies), len(local_steps)) for count, rank_steps, _ in rows
    ):
        return
    # All ranks have compared the same rows above, so all of them return there or all come here.
    for model in copies:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
    for index, wrapper in enumerate(wrappers):
        if _is_sharded(wrapper):
            continue
        state_list = [wrapper.state_dict()]
        dist.broadcast_object_list(state_list, 0)
        wrapper.load_state_dict(state_list[0])
        wrapper.steps = steps_by_rank[0][index]
    if dist.get_rank() == 0:
        counts = ", ".join(f"rank {rank}: {rank_steps}" for rank, rank_steps in enumerate(steps_by_rank))
        # Whether parameters are sharded is the same on all ranks, and so are the numbers of the others now.
        mixed = any(
            _is_sharded(wrapper) and any(rank_steps[index] != steps_by_rank[0][index] for rank_steps in steps_by_rank)
            for index, wrapper in enumerate(wrappers)
        )
        remedy = (
            "interrupt this cell, and %distributed heal brings all ranks back to the last snapshot"
            if optimizer_module.after_step is not None  # the training is protected
            else "load the last checkpoint with load_state"
        )
        _log.warning(
            "The ranks had made different numbers of optimizer steps (%s); %s",
            counts,
            f"the shards of a model are from different steps now: {remedy}."
            if mixed
            else "all continue with the weights of rank 0.",
        )


def _is_sharded(wrapper: AcceleratedOptimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in wrapper.param_groups for parameter in group["params"])


# Values at the last report, for the steps per second since then.
class _Rate:
    steps = 0
    seconds = 0.0


def _training_step() -> telemetry.TrainingStep:
    # Of all optimizers together: with two of them, such as those of a GAN, the rate is that of both.
    steps, now = sum(wrapper.steps for wrapper in prepare.prepared_optimizers()), time.monotonic()
    rate = (steps - _Rate.steps) / (now - _Rate.seconds) if _Rate.seconds and now > _Rate.seconds else None
    _Rate.steps, _Rate.seconds = steps, now
    return telemetry.TrainingStep(steps=steps, batches=window.batches, rate=rate)
