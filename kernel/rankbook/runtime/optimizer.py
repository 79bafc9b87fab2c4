"""An optimizer that acts when the gradients are whole.

Owns: `AcceleratedOptimizer`. Refuses: to decide when gradients sync, which `GradientState` knows, and to scale a loss.

A learning-rate scheduler that steps with its optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankbook.runtime.state import GradientState

_HERE_ONLY = {"step", "before_step", "gradient_state", "scaler"}
"""What belongs to this process: torch's schedulers put a `step` of their own on it, the rest is shared with others."""


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer`: `step` and `zero_grad` do nothing while gradients accumulate.

    `step_was_skipped` tells whether the last real step was left out, because fp16 gradients overflowed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # No super().__init__(): it would copy the parameter groups, and every field is the wrapped optimizer's.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self.before_step: Callable[[], None] | None = None
        self.steps = 0
        self._was_skipped = False
        self._unscaled = False

    # What an optimizer has

    @property
    def state(self) -> Any:  # noqa: ANN401 - as torch's
        """As the optimizer's."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:  # noqa: ANN401
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As the optimizer's."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """As the optimizer's."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For optimizers that know it, those without a schedule."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """For optimizers that know it, those without a schedule."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    # What it does

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, where this batch ends its window."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Step, where this batch ends its window. Returns what the optimizer returns, None while gradients gather."""
        if not self.gradient_state.sync_gradients:
            return None
        if self.before_step is not None:
            self.before_step()
        if self.scaler is not None:
            return self._scaled_step(closure)
        result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self.steps += 1
        self._was_skipped = False
        return result

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401 - as torch's
        assert self.scaler is not None
        stepped: list[bool] = []
        handle = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            # The scaler takes no closure: it could not tell whether the loss in it was scaled.
            result = (
                self.scaler.step(self.optimizer, closure) if closure is not None else self.scaler.step(self.optimizer)
            )
        finally:
            handle.remove()
            self._unscaled = False
        self.scaler.update()
        self._was_skipped = not stepped
        self.steps += len(stepped)
        return result

    def unscale(self) -> None:
        """Take fp16's scale off the gradients; a second time before the next step changes nothing."""
        assert self.scaler is not None
        if not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last real step was left out, because fp16 gradients overflowed."""
        return self._was_skipped

    # A copy on another rank

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - hooks and whatever else a subclass has
        if name == "optimizer":  # not there yet: this one is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _HERE_ONLY}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, before_step=None, scaler=None, gradient_state=GradientState())

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


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
