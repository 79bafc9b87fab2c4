"""Gradient accumulation, and which loader is being read.

Owns: `GradientState`. Refuses: to keep a loader alive, or one whose loop was left active.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

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
