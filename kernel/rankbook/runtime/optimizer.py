"""Prepared optimizers and schedulers, which step once per window of gradient accumulation.

`GradientState` decides at which batches gradients are synchronized; the loss is scaled in training.py.

Rounds of the fp16 scaler. All optimizers of a process share one scaler, because a loss may have gradients for several
of them. Its scale may change only when all gradients that were scaled with it have been used, so `update` belongs after
the last optimizer that has gradients. The steps up to there are a round. An optimizer may also step twice before
another one that has gradients, such as the critic of a GAN, whose generator still has those of its last step. Then the
round ends before the second step, and gradients are converted to the new scale.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from rankbook import step_interrupts
from rankbook.errors import InvalidArgument
from rankbook.runtime import prepared
from rankbook.runtime.gradient_state import window
from rankbook.runtime.prepared import replacement_of
from rankbook.runtime.state import GradientState
from rankbook.runtime.strategies.base import group_by_layout, update_one_by_one_where_mixed

_log = logging.getLogger(__name__)

_NOT_PICKLED = {
    "step",
    "before_step",
    "gradient_state",
    "scaler",
    "_unscaled",
    "_unscaled_gradient",
    "_stepped_after",
    "_used_after",
    "_checked_replacements",
}
"""Attributes that are not pickled.

They belong to the process. `step` is among them because torch's schedulers patch it on the instance.
"""
_optimizers: weakref.WeakSet[AcceleratedOptimizer] = weakref.WeakSet()
"""Prepared optimizers of the process, for those that share a scaler."""


after_step: Callable[[AcceleratedOptimizer], None] | None = None
"""Called after a step that was not skipped, while the training state is protected (protection.py)."""
after_scheduler: Callable[[], None] | None = None
"""The same, called after the step of a scheduler."""


class LayoutGradScaler(torch.amp.GradScaler):
    """Gradient scaler whose ranks agree whether to skip a step, also if the gradients have several layouts.

    Such are those of a tensor-parallel model: DTensors on one or two meshes, and plain tensors outside the plan. torch
    unscales all of them in one call, which refuses the mix, and asks only the ranks of the first one's mesh.
    """

    def _unscale_grads_(
        self,
        optimizer: Any,  # noqa: ANN401 - one, or what has its groups of parameters
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        layouts = group_by_layout(parameter for group in optimizer.param_groups for parameter in group["params"])
        found: dict[torch.device, torch.Tensor] = {}
        for parameters in layouts:
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            for device, flag in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag
        # A rank that has overflowed in one layout has told only the ranks of its mesh. All have the same layouts.
        if len(layouts) > 1 and dist.is_initialized():
            for flag in found.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Optimizer wrapper whose `step` and `zero_grad` do nothing while gradients accumulate.

    Args:
        optimizer: the optimizer to wrap; other attributes are looked up on it.
        device_placement: whether the optimizer's state was moved to the rank's device.
        scaler: loss scaler for fp16.

    `step_was_skipped` is True if the last step was skipped because fp16 gradients overflowed.
    """

    # Of this round of the scaler: whether gradients were unscaled, and the first of them, to know whether they are
    # still the same. `_stepped_after` is the number of backward passes at the step, None before it.
    _unscaled: bool
    _unscaled_gradient: TensorWeakRef | None
    _stepped_after: int | None
    # Of the last step, whatever the round: the number of backward passes at it. Its gradients have no loss scale.
    _used_after: int | None
    # The `replacement_count` at which no parameter had been replaced.
    _checked_replacements: int

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
        self.before_step: Callable[[Iterable[torch.Tensor]], None] | None = None
        self.steps = 0
        self.is_stepping = False
        """True in the middle of a step, and after a step that did not end."""
        self._was_skipped = False
        self._used_after = None
        self._checked_replacements = 0
        self._begin_round()
        _optimizers.add(self)

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
        """Add a parameter group to the wrapped optimizer. Parameters that `prepare` has replaced are followed."""
        # Otherwise the group would have the full parameters of a model that is sharded, which get no gradients.
        parameters = param_group["params"]
        if isinstance(parameters, torch.Tensor):
            param_group["params"] = replacement_of(parameters)
        elif not isinstance(parameters, set):  # torch refuses a set
            param_group["params"] = [
                (entry[0], replacement_of(entry[1])) if isinstance(entry, tuple) else replacement_of(entry)
                for entry in parameters
            ]
        self.optimizer.add_param_group(param_group)
        update_one_by_one_where_mixed(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)
        self.is_stepping = False

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
        # In the middle of a window the gradients are part of a sum that the next batches continue.
        if self.gradient_state.sync_gradients:
            clear, of_class = self.optimizer.zero_grad, type(self.optimizer).zero_grad
            if of_class is torch.optim.Optimizer.zero_grad or "set_to_none" in inspect.signature(clear).parameters:
                clear(set_to_none=set_to_none)
            else:  # a class of the user's
                clear()
            self._unscaled_gradient = None  # zeroed in place, the gradient would still be the same tensor

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Step, if the current batch ends its window.

        Returns the wrapped optimizer's return value, None while gradients accumulate. Raises `InvalidArgument` for a
        closure under fp16: the optimizer would use the gradients of the closure without unscaling them. Raises it also
        if `prepare` has replaced parameters of this optimizer, which get no gradients any more.
        """
        if closure is not None and self.scaler is not None and self.scaler.is_enabled():
            raise InvalidArgument(
                "step(closure) is not supported with mixed_precision='fp16': its gradients are scaled, and may have "
                "overflowed; use 'bf16', or an optimizer that needs no closure"
            )
        # In the middle of a window. All ranks are at the same batch of their windows, so all skip the step.
        if not self.gradient_state.sync_gradients:
            return None
        if self._checked_replacements != prepared.replacement_count:
            self._check_parameters()
        # Rescales the gradients of a window that was shorter than its divisor, see
        # `AccumulationWindow.rescale_gradients`.
        if self.before_step is not None:
            self.before_step(parameter for group in self.optimizer.param_groups for parameter in group["params"])
        if self.scaler is not None:
            return self._scaled_step(self.scaler, closure)
        deferral = step_interrupts.deferral if closure is None else None  # a closure runs the passes
        if deferral is not None:
            deferral.defer(self)
        self.is_stepping = True
        result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self.steps += 1
        self.is_stepping = self._was_skipped = False
        if deferral is not None:
            deferral.deliver(self)
        if after_step is not None:
            after_step(self)
        return result

    def _check_parameters(self) -> None:
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        if any(replacement_of(parameter) is not parameter for parameter in parameters):
            raise InvalidArgument(
                "prepare() has replaced parameters of this optimizer since it was prepared: pass it to prepare() "
                "together with its model, or prepare it again"
            )
        self._checked_replacements = prepared.replacement_count

    def _scaled_step(self, scaler: torch.amp.GradScaler, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401 - as torch's
        # Without gradients nothing is to be unscaled, and the scaler goes on with what it has found in this round.
        has_others = self._unscaled and self._first_gradient() is not None and not self._is_unscaled()
        if self._stepped_after is not None or has_others:
            self._end_round_early(scaler)
        # A fused optimizer unscales in its own kernel. For all others the scaler would call `unscale_` in its `step`;
        # called here, it is known even if the step is interrupted.
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.unscale()
        stepped: list[bool] = []
        # The return value of `scaler.step` does not tell whether it stepped, because most optimizers return None. The
        # hook runs if the optimizer is called. A fused optimizer always is, and skips the step if `found_inf` is set,
        # which the scaler does for the duration of the call.
        handle = self.optimizer.register_step_post_hook(
            lambda optimizer, *_: stepped.append(not getattr(optimizer, "found_inf", False))
        )
        deferral = step_interrupts.deferral if closure is None else None
        if deferral is not None:
            deferral.defer(self)
        self.is_stepping, self._used_after = True, window.backwards
        try:
            # A disabled scaler passes the closure on.
            result = scaler.step(self.optimizer, closure) if closure is not None else scaler.step(self.optimizer)
        finally:
            handle.remove()
        self._unscaled, self._unscaled_gradient, self._stepped_after = False, None, window.backwards
        self._was_skipped = not any(stepped)
        self.steps += not self._was_skipped
        self.is_stepping = False
        sharing = _sharing(scaler)
        # An optimizer that has gradients and has not stepped will use them in this round.
        if all(optimizer._stepped_after is not None or optimizer._first_gradient() is None for optimizer in sharing):
            try:
                scaler.update()  # the number watch raises after it
            finally:
                for optimizer in sharing:
                    optimizer._begin_round()
        if deferral is not None:
            deferral.deliver(self)
        if after_step is not None and not self._was_skipped:
            after_step(self)
        return result

    def unscale(self) -> None:
        """Unscale fp16 gradients. Does nothing if they are unscaled, or were used by a step."""
        assert self.scaler is not None
        first = self._first_gradient()
        if first is None or self._is_unscaled() or self._stepped_after == window.backwards:
            return
        # The scaler unscales once per round. These gradients are others than those that it has unscaled.
        if self._unscaled or self._stepped_after is not None:
            self._end_round_early(self.scaler)
        self.scaler.unscale_(self.optimizer)
        self._unscaled, self._unscaled_gradient = True, TensorWeakRef(first)

    # Rounds of the scaler, see the top of this module

    def _begin_round(self) -> None:
        self._unscaled, self._unscaled_gradient, self._stepped_after = False, None, None

    def _gradients(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)

    def _first_gradient(self) -> torch.Tensor | None:
        return next(self._gradients(), None)

    def _is_unscaled(self) -> bool:
        """Return True if the gradients are those that were unscaled in this round, and not newer ones."""
        # Without gradients, the reference is dead, and leads to None as well.
        reference, first = self._unscaled_gradient, self._first_gradient()
        return reference is not None and first is not None and reference() is first

    def has_unscaled_gradients(self) -> bool:
        """Return True if the gradients have no loss scale any more: they were unscaled, or a step has used them."""
        return self._is_unscaled() or self._used_after == window.backwards

    def _end_round_early(self, scaler: torch.amp.GradScaler) -> None:
        """End the round before all optimizers have stepped, and convert the gradients that are still to be used.

        Scales are powers of two, unless the user has chosen other factors, so the conversion is exact.
        """
        before = scaler.get_scale()
        try:
            scaler.update()  # the number watch raises after it
        finally:
            _convert_gradients(scaler, before, self)

    def _is_in_round(self) -> bool:
        return self._unscaled or self._stepped_after is not None

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
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, before_step=None, scaler=None, gradient_state=GradientState(), _used_after=None)
        self._checked_replacements = 0
        self._begin_round()
        _optimizers.add(self)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _sharing(scaler: torch.amp.GradScaler) -> list[AcceleratedOptimizer]:
    return [optimizer for optimizer in tuple(_optimizers) if optimizer.scaler is scaler]


@contextmanager
def check_added_gradients(scaler: torch.amp.GradScaler) -> Iterator[None]:
    """Raise `InvalidArgument` if the backward pass in the block adds to gradients that were unscaled before."""
    unscaled = [wrapper for wrapper in _sharing(scaler) if wrapper._is_unscaled()] if scaler.is_enabled() else ()
    # The gradients are kept until they are compared: a new one could otherwise be at the address of a freed one.
    before = [[(gradient, _version(gradient)) for gradient in wrapper._gradients()] for wrapper in unscaled]
    yield
    for wrapper, earlier in zip(unscaled, before, strict=True):
        gradients = list(wrapper._gradients())
        if len(gradients) != len(earlier) or any(
            gradient is not old or _version(gradient) != version
            for gradient, (old, version) in zip(gradients, earlier, strict=True)
        ):
            raise InvalidArgument(
                "this backward pass added to gradients that were unscaled already: unscale or clip after the last "
                "backward pass before the step; optimizer.zero_grad() drops the gradients"
            )


def _version(gradient: torch.Tensor) -> int:
    """Return a number that changes when `gradient` is changed in place."""
    # `fully_shard` adds to the local part, past the DTensor.
    return gradient._version + (gradient._local_tensor._version if isinstance(gradient, DTensor) else 0)


def _convert_gradients(scaler: torch.amp.GradScaler, before: float, stepping: AcceleratedOptimizer | None) -> None:
    """Begin a new round of `scaler`, and convert the gradients that are still to be used from the scale `before`.

    `stepping` is the optimizer that is about to step: its gradients are new ones, though it has stepped in this round.
    """
    after = scaler.get_scale()
    # This optimizer first. Another one may have the same parameters, such as that of an earlier run of the cell,
    # which a variable still refers to: every gradient is converted once.
    converted: set[int] = set()
    for optimizer in sorted(_sharing(scaler), key=lambda other: other is not stepping):
        used = optimizer is not stepping and optimizer._stepped_after is not None
        unscaled = optimizer._is_unscaled()
        optimizer._begin_round()
        factor = after if unscaled else after / before if before else 1.0
        for gradient in optimizer._gradients() if factor != 1.0 and not used else ():
            if id(gradient) not in converted:
                converted.add(id(gradient))
                gradient.mul_(factor)
        # The scaler has forgotten whose gradients were unscaled, and whether they had overflowed.
        if unscaled:
            optimizer.unscale()


def restart_scaler(scaler: torch.amp.GradScaler, fresh: torch.amp.GradScaler) -> None:
    """Give `scaler` the settings and the scale of `fresh`. Gradients that are still to be used are converted."""
    before = scaler.get_scale()
    if any(optimizer._is_in_round() for optimizer in _sharing(scaler)):
        scaler.update(before)  # otherwise it would refuse to unscale the next gradients
    scaler.load_state_dict(fresh.state_dict())
    _convert_gradients(scaler, before, None)


def end_rounds() -> None:
    """End the rounds of the scaler in the middle, when all gradients have been dropped. The scale stays."""
    wrappers = tuple(_optimizers)
    for scaler in {wrapper.scaler for wrapper in wrappers if wrapper.scaler is not None and wrapper._is_in_round()}:
        scaler.update(scaler.get_scale())  # otherwise it would refuse to unscale the next gradients
    for wrapper in wrappers:
        wrapper._begin_round()


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
        self.steps_times_num_processes = steps_times_num_processes and not split_batches
        self.repeats = 1
        self.set_num_processes(num_processes)
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the scheduler's
        """Step, if the current batch ends its window and no optimizer skipped its step."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            if after_scheduler is not None:
                after_scheduler()
            return
        if not self.gradient_state.sync_gradients:
            return
        # torch warns if a scheduler steps before its optimizer's first step, which an overflow has left out.
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        # Accelerate steps a scheduler once per rank, for schedules that count the batches of all ranks. This is an
        # option here.
        for _ in range(self.repeats):
            total = getattr(self.scheduler, "total_steps", None)
            if total is not None and self.scheduler._step_count > total:
                return  # a one-cycle schedule keeps its last rate, and would raise
            self.scheduler.step(*args, **kwargs)
        if after_scheduler is not None:
            after_scheduler()

    def set_num_processes(self, num_processes: int) -> None:
        """Set the number of data-parallel ranks, which may change in place."""
        if self.steps_times_num_processes:
            self.repeats = num_processes

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


# A scheduler may be one step behind that of another rank, if a cell ended between `optimizer.step()` and
# `scheduler.step()`. Its schedule is its own state together with the options of its optimizers, such as the learning
# rates: torch's schedulers do not set these when they load a state, and some compute the next rate from the last one.


def schedule_checksum(scheduler: AcceleratedScheduler) -> int:
    """Return a checksum of the numbers in the schedule of `scheduler`: counters, and options such as rates."""
    leaves = pytree.tree_leaves((_state_of(scheduler), _options_of(scheduler)))
    scalars = [leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf for leaf in leaves]
    return zlib.crc32(repr([scalar for scalar in scalars if isinstance(scalar, int | float)]).encode())


def dump_schedule(scheduler: AcceleratedScheduler) -> bytes:
    """Return the pickled schedule of `scheduler`. The error takes the place of a state that cannot be pickled."""
    state, options = _state_of(scheduler), _options_of(scheduler)
    try:
        return pickle.dumps((state, None, options))
    except Exception as error:  # noqa: BLE001 - any object of the user, such as a lambda; shown by `load_schedule`
        return pickle.dumps((None, repr(error), options))


def load_schedule(scheduler: AcceleratedScheduler, schedule: bytes) -> None:
    """Load a schedule of `dump_schedule`. Logs a warning if the scheduler does not take over the state."""
    try:
        state, error, options = pickle.loads(schedule)
        for optimizer, groups in zip(scheduler.optimizers, options, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _set_options(group, values)
        if state is not None:
            scheduler.load_state_dict(state)
    except Exception as raised:  # noqa: BLE001 - a class of the user; shown below, and the recovery goes on
        error = repr(raised)
    if error is not None:
        _log.warning(
            "The state of %s could not be made equal on all ranks (%s), and their learning rates may differ: make the "
            "scheduler again, or load the last checkpoint.",
            _name_of(scheduler),
            error,
        )


def _set_options(group: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)  # a captured graph refers to this tensor
        else:
            group[name] = value


def _state_of(scheduler: AcceleratedScheduler) -> Any:  # noqa: ANN401 - the state of any scheduler
    try:
        state = scheduler.state_dict()
    except Exception as error:  # noqa: BLE001 - a class of the user, which may have no states; shown here
        _log.warning("%s has no state that could be compared with those of other ranks: %r", _name_of(scheduler), error)
        return None
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)


def _options_of(scheduler: AcceleratedScheduler) -> list[list[dict[str, Any]]]:
    """Return the numeric options of the parameter groups of all optimizers that `scheduler` follows."""
    return [[_numbers_in(group) for group in optimizer.param_groups] for optimizer in scheduler.optimizers]


def _numbers_in(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that are numbers, or tuples of numbers, such as betas."""
    options = {name: value for name, value in group.items() if name != "params"}
    plain = pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, options)
    return {
        name: value
        for name, value in plain.items()
        if all(isinstance(leaf, int | float) for leaf in pytree.tree_leaves(value))
    }


def _name_of(scheduler: AcceleratedScheduler) -> str:
    return type(scheduler.scheduler).__name__
