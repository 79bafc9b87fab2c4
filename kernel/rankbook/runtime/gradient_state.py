"""Gradient accumulation: the shared `GradientState`, and the window of batches that form one optimizer step.

Loaders are referenced weakly: the state does not keep a loader alive, and a loop that was left early ends with its
iterator.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from rankbook import snapshot_files

# Settings of a process without a plugin. They are looked up when they are read, since `plugin_kwargs` has only what was
# set.
_DEFAULTS: Mapping[str, Any] = {
    "num_steps": 1,
    "adjust_scheduler": False,
    "sync_with_dataloader": True,
    "sync_each_batch": False,
}


_ActiveLoop: TypeAlias = tuple[weakref.ref[Any], weakref.ref[Any]]
"""A loader with the iterator or generator of the loop over it."""


class GradientState:
    """Shared state of gradient accumulation.

    All instances in a process share the state of the first one.

    Args:
        gradient_accumulation_plugin: new settings, a `GradientAccumulationPlugin` or any object with its fields. An
            instance without one keeps the shared settings.

    `sync_gradients` is True if the current batch ends its window, that is if its gradients are synchronized between
    ranks. A loader is *active* from the start of a loop over it until the loop ends in any way; in nested loops the
    innermost loader counts.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    plugin_kwargs: dict[str, Any]
    sync_gradients: bool
    _active: list[_ActiveLoop]

    def __init__(self, gradient_accumulation_plugin: object | None = None) -> None:
        settings = None if gradient_accumulation_plugin is None else _settings(gradient_accumulation_plugin)
        # All instances share one dict, as in Accelerate.
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            GradientState._shared_state.update(sync_gradients=True, plugin_kwargs={}, _active=[])
        if settings is not None:
            self.plugin_kwargs = settings

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a missing attribute has no type
        if name not in GradientState.__annotations__ and not hasattr(GradientState, name):
            raise AttributeError(f"'GradientState' object has no attribute {name!r}")
        raise AttributeError(
            f"GradientState.{name} is not available: the state was reset. Create it again with GradientState()"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference to the receiving process's state.

        A process without one takes over the settings.
        """
        return _unpickle_state, (dict(GradientState._shared_state.get("plugin_kwargs", {})),)

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Return True if an instance was created since the last reset."""
        return bool(GradientState._shared_state)

    # Settings

    @property
    def num_steps(self) -> int:
        """Return the number of batches per optimizer step."""
        return int(self._setting("num_steps"))

    @property
    def adjust_scheduler(self) -> bool:
        """Return the setting; it has no effect, as schedulers step with their optimizers."""
        return bool(self._setting("adjust_scheduler"))

    @property
    def sync_with_dataloader(self) -> bool:
        """Return True if the last batch of a loader ends a window that is not full."""
        return bool(self._setting("sync_with_dataloader"))

    @property
    def sync_each_batch(self) -> bool:
        """Return True if gradients are synchronized at every batch, which saves memory and costs time."""
        return bool(self._setting("sync_each_batch"))

    def _setting(self, name: str) -> Any:  # noqa: ANN401 - type of the setting
        return self.plugin_kwargs.get(name, _DEFAULTS[name])

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    # Loaders

    @property
    def active_dataloader(self) -> Any:  # noqa: ANN401 - any object with `end_of_dataloader` and `remainder`
        """Return the loader of the innermost loop, None outside of loops."""
        return self.dataloader_references[-1]

    @property
    def dataloader_references(self) -> list[Any]:
        """Return None, followed by the active loaders from the outermost loop to the innermost."""
        # A loop that was left with `break` has no code that runs at its end. It is over when its iterator is garbage
        # collected, which is at once in CPython unless somebody holds it.
        self._keep([entry for entry in self._active if entry[0]() is not None and entry[1]() is not None])
        return [None, *(loader() for loader, _ in self._active)]

    @property
    def in_dataloader(self) -> bool:
        """Return True inside a loop over a loader."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return True if the active loader has returned its last batch."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Return the number of samples in the active loader's last global batch that are not padding.

        -1 if it is unknown, or outside of loops.
        """
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _add_dataloader(self, dataloader: object, iteration: object | None = None) -> _ActiveLoop:
        """Make `dataloader` the active loader, and return the entry of its loop.

        `iteration`, the iterator or generator that returns the batches, ends the loop when it is garbage collected. A
        loader that was active already has started a new loop, which ends the previous one.
        """
        # A second loop over the same loader begins before the iterator of the first one is freed, if a variable holds
        # that.
        self._remove_dataloader(dataloader)
        entry = weakref.ref(dataloader), weakref.ref(dataloader if iteration is None else iteration)
        self._active.append(entry)
        return entry

    def _remove_dataloader(self, dataloader: object) -> None:
        """End the loop over `dataloader`, if it is active."""
        self._keep([entry for entry in self._active if entry[0]() is not dataloader])

    def _keep(self, active: list[_ActiveLoop]) -> None:
        """End all loops but these."""
        if len(active) < len(self._active):
            self._active[:] = active
            window.end_loops(self)

    @contextmanager
    def iterating(self, dataloader: object) -> Iterator[None]:
        """Keep `dataloader` active within the block, which may end by `break`, an exception or an interrupt.

        For a loader whose `__iter__` is a generator: its body runs in this block, and Python closes the generator when
        the loop is left.
        """
        entry = None
        try:
            entry = self._add_dataloader(dataloader)
            yield
        finally:
            # The state may have been reset while the generator was alive. A generator that a variable or a traceback
            # holds ends late: a newer loop over the loader goes on then.
            if self.initialized:
                self._keep([other for other in self._active if other is not entry])


def _unpickle_state(settings: dict[str, Any]) -> GradientState:
    fresh = not GradientState._shared_state
    state = GradientState()
    if fresh:
        state.plugin_kwargs.update(settings)
    return state


def _settings(plugin: object) -> dict[str, Any]:
    """Return the plugin's fields that are not None."""
    if dataclasses.is_dataclass(plugin):
        settings = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}
    elif hasattr(plugin, "to_kwargs"):
        settings = dict(plugin.to_kwargs())
    else:
        settings = {name: getattr(plugin, name) for name in _DEFAULTS if hasattr(plugin, name)}
    # None is "not given" in Accelerate's own plugin, which is accepted as well.
    return {name: value for name, value in settings.items() if value is not None}


class AccumulationWindow:
    """Window of gradient accumulation; the process has one.

    Attributes:
        divisor: number that the loss of a batch is divided by.
        step: number of batches since the start or the last end of a loader.
        backwards: number of calls of `Accelerator.backward`.
        before_backward: called by `Accelerator.backward`, while the training state is protected (protection.py).
        after_partner_ended: called with the position of a loader whose loop was left because a loader that is read in
            turn with it has ended, while the training state is protected.
        count_steps: returns the number of steps of all prepared optimizers.
        scaler: loss scaler of the optimizers that are prepared now.
        drop_gradients: clears the gradients of all prepared models and optimizers.
        synchronize_replicas: makes the replicas on all ranks equal again, after the process groups were formed anew
            (`snapshot_files.replicas_may_differ`), or, with `to_most_steps`, after ranks have made different numbers of
            steps on purpose. A collective.
    """

    def __init__(self) -> None:
        self.count = 0
        self.batches = 0
        self.step = 0
        self.backwards = 0
        self.before_backward: Callable[[], None] | None = None
        self.after_partner_ended: Callable[[object], None] | None = None
        self.count_steps: Callable[[], int] = lambda: 0
        self.divisor = 1
        self.in_batch = False
        self.is_set_aside = False
        self.scaler: torch.amp.GradScaler | None = None
        self.drop_gradients: Callable[[], None] = lambda: None
        self.synchronize_replicas: Callable[..., None] = lambda **_: None
        self._position = 0
        self._length: int | None = None
        self._loop: object | None = None
        self._is_open = False
        self._stale = False
        self._has_failed = False  # the last batch, with an error
        self._rescale = 1.0
        self._rescaled: set[int] = set()

    @property
    def is_open(self) -> bool:
        """True after a batch that did not end the window, also if its loop was left then."""
        return self._is_open

    @property
    def has_unused_gradients(self) -> bool:
        """True if gradients of this window wait for more batches, or for the step of a batch that has failed."""
        return self._is_open or self._has_failed

    @property
    def updates(self) -> int:
        """Number of backward passes and optimizer steps, which tells whether a loop has trained."""
        return self.backwards + self.count_steps()

    def __reduce__(self) -> str:
        return "window"  # unpickled as the receiving process's window

    # Theory of operation. A window is the sequence of batches whose gradients are summed for one optimizer step. The
    # loss must be divided by the window's length before the length is certain: it is `num_steps`, or the number of
    # batches that the loader has left. If the loader ends earlier than its length promised, `rescale_gradients`
    # multiplies the gradients by divisor / count just before they are used. A window ends when it is full or its loader
    # ends. If a loop is left in the middle of one (`break`, an error), its gradients are dropped: at once, or, if the
    # loop cannot be seen to have ended, when the next batch begins. After an error that is caught inside of the loop,
    # the window goes on: the ranks without the error are in the middle of theirs.
    #
    # Example: `num_steps` is 4, and a loader has 6 batches. The losses of the first window are divided by 4, those of
    # the second by 2, because the loader's length says that 2 batches are left. If its length is unknown, they are
    # divided by 4, and the gradients multiplied by 4 / 2 before the step.

    def begin_batch(self, gradients: GradientState) -> bool:
        """Count one batch. Returns True if its gradients are synchronized.

        `gradients.sync_gradients` is set to the same value.
        """
        self.batches += 1
        steps = gradients.num_steps
        # A new entry is made for every loop, so its identity tells a new loop over the same loader from the current
        # one.
        loop = gradients._active[-1] if gradients._active else None
        if loop is not self._loop:
            self._begin_loop(loop, gradients)
        self._has_failed = False
        self.settle()
        # A new window begins. Fewer than `steps` batches may be left: then their number is the divisor.
        if not self._is_open:
            self.count = 0
            self._rescale = 1.0
            remaining = self._length - self._position if self._length is not None else steps
            self.divisor = remaining if 0 < remaining < steps else steps
        self._is_open = True
        self.count += 1
        self._position += 1
        # The last batch of a loader has been delivered before this call, so `end_of_dataloader` is true during its
        # block.
        ended = loop is not None and gradients.sync_with_dataloader and gradients.end_of_dataloader
        self.step = 0 if ended else self.step + 1
        sync = ended or self.count >= steps
        if sync:
            self._is_open = False
            # 1.0 unless the loader had fewer batches than its length promised.
            self._rescale = self.divisor / self.count
            self._rescaled = set()
        gradients._set_sync_gradients(sync)
        return sync

    def settle(self) -> None:
        """Drop the gradients of a window that was left early, and make the ranks' replicas equal again.

        All ranks call this before their next batch: it is a collective if the process groups have been formed anew.
        """
        if not self._stale and not snapshot_files.replicas_may_differ:
            return
        # Nothing has used these gradients.
        self.drop_gradients()
        if snapshot_files.replicas_may_differ:
            self.synchronize_replicas()
        self._stale = snapshot_files.replicas_may_differ = False

    def _begin_loop(self, loop: Any, gradients: GradientState) -> None:  # noqa: ANN401 - an entry of GradientState._active
        # Of two loaders that are read in turn, one may begin again while the loop over the other one goes on.
        # After an error, the traceback may keep the iterator of a loop that has ended.
        goes_on = not self._has_failed and self._is_in_loop(gradients)
        # If windows go on over the ends of loops, or there is no loop, the length of a window is always `num_steps`.
        self._loop, self._position, self._length = loop, 0, None
        if not gradients.sync_with_dataloader or loop is None:
            return
        if self._is_open and not goes_on:  # the previous loop was left in the middle of a window
            self._is_open = False
            self._stale = True
        loader = loop[0]()
        try:
            self._length = len(loader)
        except (TypeError, NotImplementedError):  # an iterable dataset has no length
            self._length = None
        # A resumed loop, or one that continues after a caught error, does not start at the first batch.
        # The current batch is included in `delivered`, since `begin_batch` runs after it was delivered.
        delivered = getattr(getattr(loader, "position", None), "delivered", 1)
        self._position = max(0, delivered - 1 - getattr(loader, "skip_batches", 0))

    def _is_in_loop(self, gradients: GradientState) -> bool:
        """Return True while the loop of this window goes on, or is not known to have ended."""
        return any(entry is self._loop for entry in gradients._active)

    def end_loops(self, gradients: GradientState) -> None:
        """Drop this window if its loop was left in the middle of it; optimizers may step outside of `accumulate`."""
        is_left = self._loop is not None and not self._is_in_loop(gradients)
        if is_left and self._is_open and not self.in_batch and gradients.sync_with_dataloader:
            self._is_open = False
            gradients._set_sync_gradients(True)
            # At once: they are not reduced, so that with a step on them the ranks would come apart.
            self.drop_gradients()

    def rescale_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Rescale the gradients of `parameters`, if the window was shorter than expected.

        Called before a step and before clipping; only the first call for a parameter has an effect. The gradients of
        another optimizer's parameters may still get a backward pass of the window.
        """
        if self._rescale == 1.0:
            return
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._rescaled:
                self._rescaled.add(id(parameter))
                parameter.grad.mul_(self._rescale)

    def end_rescaling(self) -> None:
        """Leave gradients as they are from now on: those of a backward pass that belongs to no window."""
        self._rescale = 1.0

    def fail_batch(self) -> None:
        """Note that a batch has failed on this rank, and perhaps on no other.

        If the error is caught inside of the loop, the window goes on, so that it ends at the same batch on all ranks.
        If it ends a cell, the window is dropped on all ranks, by `abort`.
        """
        self.in_batch = False
        self._has_failed = True
        if not self._is_open:  # the gradients of the window were to be used in this batch
            self._stale = True
            self._rescale = 1.0

    def abort(self, gradients: GradientState) -> None:
        """End the window after a cell that has failed; its gradients are dropped before the next batch.

        The other ranks may have failed at a different batch, and all ranks have to start with the same state.
        """
        self._is_open = self._has_failed = False
        self._stale = True
        self._rescale = 1.0
        self.in_batch = False
        # The next batch is treated as the beginning of a loop, so that its position is read from the loader again.
        self._loop = None
        gradients._set_sync_gradients(True)

    @contextmanager
    def set_aside(self, gradients: GradientState) -> Iterator[None]:
        """Run the block with batches that are windows by themselves and are not observed. Then this window goes on."""
        kept, sync, settings = dict(vars(self)), gradients.sync_gradients, gradients.plugin_kwargs
        differ, snapshot_files.replicas_may_differ = snapshot_files.replicas_may_differ, False
        self._is_open = self._stale = self.in_batch = False
        self.is_set_aside = True
        self._rescale = 1.0
        self.before_backward = self.after_partner_ended = None
        gradients.plugin_kwargs = {**settings, "num_steps": 1}
        gradients._set_sync_gradients(True)
        try:
            yield
        finally:
            vars(self).update(kept)
            snapshot_files.replicas_may_differ |= differ
            gradients.plugin_kwargs = settings
            gradients._set_sync_gradients(sync)


window = AccumulationWindow()
"""Accumulation window of this process."""


def settle_before_training(model: nn.Module) -> None:
    """After the process groups were formed anew, settle the window before the prepared `model` trains again.

    The first training forward in a loop over a prepared loader does so, on all ranks alike. A loop with `accumulate`
    has done so before. At any other time this function does nothing, so that a step calls no hook.
    """
    if not snapshot_files.replicas_may_differ:
        return
    remove_settling(model)
    if model._compiled_call_impl is None:
        # Before the hooks of `fully_shard`, which gather the parameters.
        model.register_forward_pre_hook(_settle_window, prepend=True)
    else:
        model._compiled_call_impl = _SettlingCall(model, model._compiled_call_impl)


class _SettlingCall:
    """Compiled call of a model that settles the window first; a hook would be compiled as well."""

    def __init__(self, model: nn.Module, compiled: Callable[..., Any]) -> None:
        self.model, self.compiled = model, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model's
        _settle_window(self.model, args)
        return self.compiled(*args, **kwargs)


def _settle_window(model: nn.Module, _inputs: object) -> None:
    is_training = model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not is_training or window.is_set_aside:
        return
    # Without such a loop it may be one rank alone that looks at an output, and no other rank would come.
    if GradientState._shared_state and GradientState().in_dataloader:
        remove_settling(model)
        window.settle()


def remove_settling(model: nn.Module) -> None:
    """Undo `settle_before_training`."""
    # By its function, and not by a handle: a rank that replaces a lost one receives the model with the hook.
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _settle_window]:
        del model._forward_pre_hooks[key]
    if isinstance(model._compiled_call_impl, _SettlingCall):
        model._compiled_call_impl = model._compiled_call_impl.compiled


class AccumulateContext:
    """Context manager for one batch.

    `set_sync` is called with False on entry and True on exit if the models do not reduce their gradients at this batch.
    """

    __slots__ = ("_gradients", "_set_sync", "_sync_disabled")

    def __init__(self, gradients: GradientState, set_sync: Callable[[bool], None]) -> None:
        self._gradients = gradients
        self._set_sync = set_sync
        self._sync_disabled = False

    def __enter__(self) -> None:
        # With `sync_each_batch` gradients are reduced at every batch, but optimizers still step at the end of the
        # window only.
        if not window.begin_batch(self._gradients) and not self._gradients.sync_each_batch:
            self._sync_disabled = True
            self._set_sync(False)
        window.in_batch = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        window.in_batch = False
        if self._sync_disabled:
            self._set_sync(True)
        # A `return`, `break` or `continue` in the block is no failure: `kind` is None.
        if kind is not None:
            window.fail_batch()
