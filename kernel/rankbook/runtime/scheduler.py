"""A learning-rate scheduler that steps with its optimizers.

Owns: `AcceleratedScheduler`, and how often it steps. Refuses: to know any schedule.

A schedule is counted in optimizer steps: `scheduler.step()` after each batch moves it once per real step of the
optimizer, not for batches that only accumulate and not for an fp16 step that was skipped. Accelerate moves it once per
rank instead, so that a schedule written for one process and its number of batches ends at the same sample; where that
is wanted, `steps_times_num_processes=True` says so.
"""

from __future__ import annotations

from typing import Any

from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.state import GradientState


class AcceleratedScheduler:
    """Wraps `scheduler`; `optimizers` are those whose steps it follows.

    `step_with_optimizer` False: each call steps. `num_processes` is what `steps_times_num_processes` multiplies by.
    """

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - anything with `step`
        optimizers: AcceleratedOptimizer | list[AcceleratedOptimizer] | tuple[AcceleratedOptimizer, ...],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        steps_times_num_processes: bool = False,
        num_processes: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.repeats = num_processes if steps_times_num_processes and not split_batches else 1
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the scheduler's
        """Step, if the optimizers have."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(each.step_was_skipped for each in self.optimizers):
            return
        for _ in range(self.repeats):
            total = getattr(self.scheduler, "total_steps", None)
            if self.repeats > 1 and total is not None and self.scheduler._step_count > total:
                return  # a one-cycle schedule refuses to go on past its end
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:  # noqa: ANN401 - as torch's
        """As the scheduler's."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """As the scheduler's."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the scheduler's."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the scheduler has
        if name == "scheduler":  # not there yet: this one is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient_state=GradientState())
