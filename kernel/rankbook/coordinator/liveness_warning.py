"""Tells, beside a cell that runs long, of a rank that has fallen silent.

Owns: when the ranks of a cell that somebody waits for are asked, and when a silence is told. Refuses: threads and
timers; it is called by whoever waits for the cell, and asks nobody in the first seconds.
"""

from __future__ import annotations

import time

from rankbook.coordinator.driver import Driver
from rankbook.coordinator.running_cell import Cell
from rankbook.coordinator.unresponsive import Silence, describe_silence

EVERY = 3.0
"""Seconds between two looks; a rank that was heard since the last one is not asked."""
_PATIENCE = 8.0
"""Seconds of silence after which it is told. A long call into C is no news before; a stopped process always is."""


class Vigil:
    """Watches over `cell` until it has ended; tells of each rank's silence once."""

    def __init__(self, driver: Driver, cell: Cell) -> None:
        self._driver = driver
        self._cell = cell
        self._told: set[int] = set()
        self._next = time.monotonic() + EVERY

    def look(self) -> None:
        """Look after the ranks, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        presence, running = self._driver.presence, self._running()
        for silence in presence.silent(running).values():
            if silence.rank not in self._told and (silence.stopped or silence.seconds >= _PATIENCE):
                self._told.add(silence.rank)
                self._tell(silence)
        presence.ask(rank for rank in running if not presence.heard_within(rank, EVERY))

    def ask(self) -> None:
        """Ask now: the cell was interrupted, and in the end it will be of interest who still answers."""
        self._driver.presence.ask(self._running())

    def _running(self) -> list[int]:
        return [rank for rank in self._cell.ranks if self._driver.cell_of(rank) is self._cell]

    def _tell(self, silence: Silence) -> None:
        text = f"rank {silence.rank}: {describe_silence(silence)}\n"
        self._driver.after(0.0, lambda: self._cell.note(text))
