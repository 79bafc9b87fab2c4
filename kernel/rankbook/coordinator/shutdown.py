"""Ranks that are to leave: asked first, killed when their time is over.

Owns: how long they may take. Refuses: to decide who has to leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rankbook.coordinator.grace import GracePeriods
from rankbook.launch.launcher import Launcher
from rankbook.protocol.messages import Leave
from rankbook.transport.link import HubLink


class Farewells:
    """`after(seconds, callback)` calls back later, on the driver thread."""

    def __init__(
        self,
        hub: HubLink,
        launcher: Launcher,
        after: Callable[[float, Callable[[], None]], None],
        grace: GracePeriods,
    ) -> None:
        self._hub, self._launcher, self._after = hub, launcher, after
        self._leave = grace.leave
        self._until: dict[tuple[int, int], float] = {}
        self.patience = grace.save

    def part(self, rank: int, incarnation: int, *, politely: bool) -> None:
        """Have the rank end: at once, or by itself where it can listen."""
        if politely and self._hub.send(rank, Leave(patience=self.patience)):
            self._until[rank, incarnation] = time.monotonic() + self._leave
            self._after(self._leave, lambda: self._look(rank, incarnation))
        else:
            self._launcher.kill(rank, incarnation)

    def linger(self, rank: int, incarnation: int, seconds: float) -> None:
        """The rank has asked for `seconds`."""
        if (rank, incarnation) in self._until:
            self._until[rank, incarnation] = time.monotonic() + min(seconds, self.patience) + self._leave

    @property
    def deadline(self) -> float:
        """When the last of them is killed, by `time.monotonic()`."""
        return max(self._until.values(), default=0.0)

    def _look(self, rank: int, incarnation: int) -> None:
        left = self._until[rank, incarnation] - time.monotonic()
        if left > 0:
            self._after(left, lambda: self._look(rank, incarnation))
        else:
            del self._until[rank, incarnation]
            self._launcher.kill(rank, incarnation)
