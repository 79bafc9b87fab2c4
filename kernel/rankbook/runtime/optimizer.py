"""Prepared optimizers and schedulers, which step once per window of gradient accumulation.

`GradientState` decides at which batches gradients are synchronized; the loss is scaled in training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankbook.runtime.state import GradientState

_HERE_ONLY = {"step", "before_step", "gradient_state", "scaler"}
"""Attributes that are not pickled.

They belong to the process. `step` is among them because torch's schedulers patch it on the instance.
"""


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Optimizer wrapper whose `step` and `zero_grad` do nothing while gradients accumulate.

    Args:
        optimizer: the optimizer to wrap; other attributes are looked up on it.
        device_placement: whether the optimizer's state was moved to the rank's device.
        scaler: loss scaler for fp16.

    `step_was_skipped` is True if the last step was skipped because fp16 gradients overflowed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # super().__init__() is not called: it would copy the parameter groups, which belong to the wrapped optimizer.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self.before_step: Callable[[], None] | None = None
        self.steps = 0
        self._was_skipped = False
        self._unscaled = False

    # The interface of torch.optim.Optimizer

    @property
    def state(self) -> Any:  # noqa: ANN401 - as torch's
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:  # noqa: ANN401
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the default options of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Call `train()` of the wrapped optimizer, if defined (schedule-free optimizers have it)."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Call `eval()` of the wrapped optimizer, if defined (schedule-free optimizers have it)."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, if the current batch ends its window."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Step, if the current batch ends its window.

        Returns the wrapped optimizer's return value, None while gradients accumulate. The fp16 scaler accepts no
        closure.
        """
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
            # The scaler raises for a closure: it cannot know whether the loss in it was scaled.
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
        """Unscale fp16 gradients. Calls after the first one before a step do nothing."""
        assert self.scaler is not None
        if not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    @property
    def step_was_skipped(self) -> bool:
        """Return True if the last step was skipped because fp16 gradients overflowed."""
        return self._was_skipped

    # Attribute lookup and pickling

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - attributes of any optimizer class
        if name == "optimizer":  # not set yet while the wrapper is unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _HERE_ONLY}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, before_step=None, scaler=None, gradient_state=GradientState())

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


class AcceleratedScheduler:
    """Learning-rate scheduler that steps when its optimizers step.

    Args:
        scheduler: the scheduler to wrap; other attributes are looked up on it.
        optimizers: optimizers whose steps it follows.
        step_with_optimizer: if False, every call steps.
        split_batches: see `DataLoaderConfiguration`.
        steps_times_num_processes: step `num_processes` times per optimizer step, unless batches are split.
        num_processes: number of data-parallel ranks.
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
        """Step, if the current batch ends its window and no optimizer skipped its step."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.repeats):
            total = getattr(self.scheduler, "total_steps", None)
            if self.repeats > 1 and total is not None and self.scheduler._step_count > total:
                return  # a one-cycle schedule raises for steps past its end
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:  # noqa: ANN401 - as torch's
        """Return the last learning rates of the wrapped scheduler."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - attributes of any scheduler class
        if name == "scheduler":  # not set yet while the wrapper is unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient_state=GradientState())
