"""What is to be done later.

Owns: the order of deadlines. Refuses: a thread of its own; the driver thread asks when the next is due, and runs it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Timers:
    """Callbacks and when they are due. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def add(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back in `seconds`."""
        with self._lock:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._count), callback))

    @property
    def next(self) -> float | None:
        """When the first is due, on the monotonic clock."""
        with self._lock:
            return self._heap[0][0] if self._heap else None

    def run_due(self) -> None:
        """Call back everything that is due."""
        while (due := self.next) is not None and due <= time.monotonic():
            with self._lock:
                callback = heapq.heappop(self._heap)[2]
            callback()
