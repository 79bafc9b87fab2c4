"""How long a rank stands still for the others.

Owns: the time between the start and the end of waits, less what the main thread computed meanwhile. Refuses: to run
unless somebody asked.

What Python waits for is told by `Wait`. DDP's reducer waits in C++, for the future of a work: there the whole time from
its start to its end counts, but for the main thread's processor time, which is what it overlapped with.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Clock = Callable[[], float]


class WaitClock:
    """Counts what is under way. Any thread. `cpu` is the main thread's processor time, `wall` everybody's; seconds."""

    def __init__(self, cpu: Clock, wall: Clock = time.perf_counter) -> None:
        self._cpu = cpu
        self._wall = wall
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = (0.0, 0.0)
        self._ended = False
        self._waited = 0.0

    @contextlib.contextmanager
    def during(self, word: str) -> Iterator[None]:  # noqa: ARG002 - see `waits.Watcher`
        """A thread waits."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def promised(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """C++ will wait for it."""
        self._begin()
        future.add_done_callback(lambda _: self._end())

    def stop(self) -> float:
        """The seconds that were waited. What is under way counts up to now."""
        with self._lock:
            if self._under_way and not self._ended:
                self._add()
            self._ended = True
            return self._waited

    def _begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = (self._wall(), self._cpu())
            self._under_way += 1

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way and not self._ended:
                self._add()

    def _add(self) -> None:
        wall, cpu = self._since
        self._waited += max(0.0, self._wall() - wall - (self._cpu() - cpu))


def cpu_clock_of(thread: int) -> Clock:
    """The processor time of a thread. Where the system tells of none but the caller's (macOS) it counts as waiting."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
