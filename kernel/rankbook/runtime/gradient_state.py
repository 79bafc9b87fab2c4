"""Gradient accumulation, and which loader is being read.

Owns: `GradientState`. Refuses: to keep a loader alive, or one whose loop was left active.

Which batches make one optimizer step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

_DEFAULTS: Mapping[str, Any] = {
    "num_steps": 1,
    "adjust_scheduler": False,
    "sync_with_dataloader": True,
    "sync_each_batch": False,
}


class GradientState:
    """What accumulation is doing now. All instances in a process share what the first one has.

    `gradient_accumulation_plugin`: new settings, a `GradientAccumulationPlugin` or any object with its fields; an
    instance without one keeps the shared settings.

    `sync_gradients`: whether the gradients are synchronised at this step. A loader is *active* from the start of a loop
    over it to its end, however it ends; the innermost loop's counts.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    plugin_kwargs: dict[str, Any]
    sync_gradients: bool
    _active: list[tuple[weakref.ref[Any], weakref.ref[Any]]]

    def __init__(self, gradient_accumulation_plugin: object | None = None) -> None:
        settings = None if gradient_accumulation_plugin is None else _settings(gradient_accumulation_plugin)
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

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what is not there has no type
        if name not in GradientState.__annotations__ and not hasattr(GradientState, name):
            raise AttributeError(f"'GradientState' object has no attribute {name!r}")
        raise AttributeError(f"GradientState has no {name!r} now: its state was reset. Build it first: GradientState()")

    def __reduce__(self) -> tuple[Any, ...]:
        """On another rank it is that rank's own; one that is fresh takes the settings over."""
        return _arrive, (dict(GradientState._shared_state.get("plugin_kwargs", {})),)

    @staticmethod
    def _reset_state() -> None:
        """Forget settings and loaders."""
        GradientState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether an instance was made since the last reset."""
        return bool(GradientState._shared_state)

    # Settings

    @property
    def num_steps(self) -> int:
        """Over how many steps gradients are accumulated."""
        return int(self._setting("num_steps"))

    @property
    def adjust_scheduler(self) -> bool:
        """As it was given, for programs that read it: here a scheduler steps with its optimizer either way."""
        return bool(self._setting("adjust_scheduler"))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch ends a window, however short it is."""
        return bool(self._setting("sync_with_dataloader"))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are synchronised at each batch, which takes less memory and more time."""
        return bool(self._setting("sync_each_batch"))

    def _setting(self, name: str) -> Any:  # noqa: ANN401 - the setting's
        return self.plugin_kwargs.get(name, _DEFAULTS[name])

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    # Loaders

    @property
    def active_dataloader(self) -> Any:  # noqa: ANN401 - whatever has `end_of_dataloader` and `remainder`
        """The loader of the innermost loop; None outside of any."""
        return self.dataloader_references[-1]

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the active loaders from the outermost loop to the innermost."""
        self._active[:] = [each for each in self._active if each[0]() is not None and each[1]() is not None]
        return [None, *(loader() for loader, _ in self._active)]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """How many samples of the active loader's last global batch are its own; -1 where nobody knows."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _add_dataloader(self, dataloader: object, iteration: object | None = None) -> None:
        """Make `dataloader` the active one. Only weak references are kept.

        `iteration` is what gives the batches, an iterator or a generator: once it is gone, the loop was left. A loader
        that is active already has started anew, its earlier loop is over.
        """
        self._remove_dataloader(dataloader)
        self._active.append((weakref.ref(dataloader), weakref.ref(dataloader if iteration is None else iteration)))

    def _remove_dataloader(self, dataloader: object) -> None:
        """Its loop is over. Nothing happens where it was not active."""
        self._active[:] = [each for each in self._active if each[0]() is not dataloader]

    @contextmanager
    def iterating(self, dataloader: object) -> Iterator[None]:
        """`dataloader` is active within the block, also when it is left by `break`, by an exception or by an interrupt.

        For a loader whose `__iter__` is a generator: its body stands in this block, and Python closes the generator as
        the loop is left.
        """
        try:
            self._add_dataloader(dataloader)
            yield
        finally:
            if self.initialized:
                self._remove_dataloader(dataloader)


def _arrive(settings: dict[str, Any]) -> GradientState:
    fresh = not GradientState._shared_state
    state = GradientState()
    if fresh:
        state.plugin_kwargs.update(settings)
    return state


def _settings(plugin: object) -> dict[str, Any]:
    """The plugin's fields that are set."""
    if dataclasses.is_dataclass(plugin):
        found = {each.name: getattr(plugin, each.name) for each in dataclasses.fields(plugin)}
    elif hasattr(plugin, "to_kwargs"):
        found = dict(plugin.to_kwargs())
    else:
        found = {name: getattr(plugin, name) for name in _DEFAULTS if hasattr(plugin, name)}
    return {name: value for name, value in found.items() if value is not None}


class AccumulationWindow:
    """The window that is open now; one for the process, as there is one `GradientState`.

    `divisor` is what a loss is divided by. `scaler` is that of the optimizers that are prepared now. `parameters` gives
    theirs; `drop` clears every gradient of what is prepared; `agree` makes the ranks' copies alike again after a
    collective `was_broken_off`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.batches = 0
        self.divisor = 1
        self.inside = False
        self.scaler: torch.amp.GradScaler | None = None
        self.parameters: Callable[[], list[torch.Tensor]] = list
        self.drop: Callable[[], None] = lambda: None
        self.agree: Callable[[], None] = lambda: None
        self.was_broken_off = False
        self._position = 0
        self._length: int | None = None
        self._loop: object | None = None
        self._open = False
        self._stale = False
        self._rescale = 1.0

    def __reduce__(self) -> str:
        return "window"  # a process has one: on another rank it is that rank's

    def begin_batch(self, gradients: GradientState) -> bool:
        """Count one batch. Returns whether gradients sync at it, which `gradients` tells from now on."""
        self.batches += 1
        steps = gradients.num_steps
        loop = gradients._active[-1] if gradients._active else None
        if loop is not self._loop:
            self._begin_loop(loop, gradients)
        if self._stale:
            self.drop()
            if self.was_broken_off:
                self.agree()
            self._stale = self.was_broken_off = False
        if not self._open:
            self.count = 0
            self._rescale = 1.0
            left = self._length - self._position if self._length is not None else steps
            self.divisor = left if 0 < left < steps else steps
        self._open = True
        self.count += 1
        self._position += 1
        ended = loop is not None and gradients.sync_with_dataloader and gradients.end_of_dataloader
        sync = ended or self.count >= steps
        if sync:
            self._open = False
            self._rescale = self.divisor / self.count
        gradients._set_sync_gradients(sync)
        return sync

    def _begin_loop(self, loop: Any, gradients: GradientState) -> None:  # noqa: ANN401 - GradientState's own entry
        self._loop, self._position, self._length = loop, 0, None
        if not gradients.sync_with_dataloader or loop is None:
            return
        if self._open:  # the last loop was left in the middle of a window
            self._open = False
            self._stale = True
        loader = loop[0]()
        try:
            self._length = len(loader)
        except TypeError:  # an iterable dataset: nobody knows
            self._length = None
        # A loop that was resumed, or one in which an error was caught, is not at its start any more.
        delivered = getattr(getattr(loader, "position", None), "delivered", 1)
        self._position = max(0, delivered - 1 - getattr(loader, "skip_batches", 0))

    def settle(self) -> None:
        """Ahead of a step or of clipping: scale the gradients of a window that was shorter than foreseen. Once."""
        if self._rescale != 1.0:
            factor, self._rescale = self._rescale, 1.0
            for each in self.parameters():
                if each.grad is not None:
                    each.grad.mul_(factor)

    def abandon(self, gradients: GradientState) -> None:
        """An error came out of a batch: its window is over, and what it gathered is dropped before the next batch.

        The other ranks may have been at another batch, and all have to begin alike.
        """
        self._open = False
        self._stale = True
        self._rescale = 1.0
        self.inside = False
        self._loop = None
        gradients._set_sync_gradients(True)


window = AccumulationWindow()
"""This process's."""


class AccumulateContext:
    """The block of one batch. `set_sync` is told whether the models reduce their gradients in it."""

    __slots__ = ("_gradients", "_held", "_set_sync")

    def __init__(self, gradients: GradientState, set_sync: Callable[[bool], None]) -> None:
        self._gradients = gradients
        self._set_sync = set_sync
        self._held = False

    def __enter__(self) -> None:
        if not window.begin_batch(self._gradients) and not self._gradients.sync_each_batch:
            self._held = True
            self._set_sync(False)
        window.inside = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        window.inside = False
        if self._held:
            self._set_sync(True)
        if kind is not None:
            window.abandon(self._gradients)
