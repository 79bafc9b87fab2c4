"""Which batches make one optimizer step.

Owns: the window of batches that is open, what each loss in it is divided by, and what becomes of a window that was left
early. Refuses: collectives: every rank counts alike, because every rank sees the same batches.

A window divides by its own length. Where a loader knows its length the last, shorter window is known as it begins.
Where it does not, its losses are divided by the full length, and its gradients are scaled once, ahead of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankbook.runtime.gradient_state import GradientState


class Window:
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


window = Window()
"""This process's."""


class Accumulating:
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
