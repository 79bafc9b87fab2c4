"""Schedulers: they step with their optimizers.

Owns: which optimizers a scheduler follows. Refuses: schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.prepare.context import Context
from rankbook.runtime.prepare.optimizers import wrapper_of
from rankbook.runtime.scheduler import AcceleratedScheduler


def prepare_scheduler(
    scheduler: Any,  # noqa: ANN401 - anything with `step`
    context: Context,
    optimizers: Sequence[AcceleratedOptimizer],
) -> AcceleratedScheduler:
    """The scheduler, following its own optimizer where that is prepared, else all `optimizers`."""
    raw = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    own = getattr(raw, "optimizer", None)
    wrapper = wrapper_of(own) if own is not None else None
    followed = [wrapper] if wrapper is not None else list(optimizers)
    options = context.loader_options
    split = bool(getattr(options, "split_batches", False))
    made = AcceleratedScheduler(
        raw,
        followed,
        step_with_optimizer=context.step_with_optimizer,
        split_batches=split,
        steps_times_num_processes=context.steps_times_num_processes,
        num_processes=context.setup.data_parallel_size,
    )
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler.__dict__.update(made.__dict__)
        return scheduler
    return made
