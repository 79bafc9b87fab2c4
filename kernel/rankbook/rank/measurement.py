"""Measurement of one cell: wall time, CPU time, time waiting for other ranks, and optionally a profile.

Exists only for a cell that is measured; other cells pay nothing. `WaitClock` computes the waiting time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rankbook.protocol.profiling import Measure, Measured, Profile, Times
from rankbook.rank.process_groups import interruptible_work

if TYPE_CHECKING:
    from rankbook.rank.profiler import Profiling


class Measurement:
    """Measure one cell on `rank`. Main thread; also a `WaitObserver` of collectives, called from any thread.

    `launched` is the number of collectives that the process groups have launched before the cell.
    """

    def __init__(self, asked: Measure, rank: int, device: torch.device, launched: int) -> None:
        self._main_cpu = cpu_clock_of(threading.get_ident())
        self._clock = WaitClock(self._main_cpu)
        self._launched = launched
        self._profiling: Profiling | None = None
        self._began = (time.perf_counter(), time.process_time(), time.thread_time())
        self._times: Times | None = None
        self._trouble = ""
        if asked.profile:
            from rankbook.rank.profiler import Profiling

            self._profiling = Profiling(asked.epoch, rank, device)

    def start(self) -> None:
        """Start measuring. A profiler that cannot start is reported in the result."""
        if self._profiling is not None:
            try:
                self._profiling.start()
            except RuntimeError as error:
                self._profiling, self._trouble = None, f"torch's profiler did not start: {error}"
        interruptible_work.watching.by = self
        self._began = (time.perf_counter(), time.process_time(), time.thread_time())

    def stop(self, launched: int) -> None:
        """Stop measuring; later calls have no effect. `launched` is the number of collectives by now."""
        if self._times is not None:
            return
        wall, cpu, main_cpu = self._began
        self._times = Times(
            wall=time.perf_counter() - wall,
            cpu=time.process_time() - cpu,
            main_cpu=time.thread_time() - main_cpu,
            waited=self._clock.stop(),
            collectives=launched - self._launched,
        )
        interruptible_work.watching.by = None
        if self._profiling is not None:
            try:
                self._profiling.stop()
            except RuntimeError as error:
                self._profiling, self._trouble = None, f"torch's profiler did not see the cell: {error}"

    def tell(self) -> Measured:
        """Return the measurement, after `stop`."""
        assert self._times is not None
        profile: Profile | None = None
        if self._profiling is not None:
            try:
                profile = self._profiling.tell()
            except Exception as error:  # noqa: BLE001 - reported; a profile must not fail its cell
                self._trouble = f"what torch's profiler saw could not be told: {type(error).__name__}: {error}"
        return Measured(self._times, profile, self._trouble)

    # WaitObserver

    @contextlib.contextmanager
    def begins(self, word: str) -> Iterator[None]:
        """Note that a thread launches a collective."""
        with self._note(word):
            yield

    @contextlib.contextmanager
    def waits_for(self, word: str) -> Iterator[None]:
        """Note that a thread waits for a collective."""
        with self._note(f"{word}: wait"), self._clock.during(word):
            yield

    def promised(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """Note that C++ code will wait for a collective, until `future` is done."""
        self._clock.promised(future)

    def _note(self, word: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._profiling is None else self._profiling.note(word)


Clock = Callable[[], float]


class WaitClock:
    """Measure the time in which threads wait for collectives. Any thread.

    `cpu` is the main thread's CPU clock, `wall` the wall clock, in seconds. While at least one wait is in progress,
    wall time counts as waiting, less the CPU time that the main thread uses meanwhile. So overlapping waits count once,
    and a collective that overlaps with computation counts only for its remainder.
    """

    def __init__(self, cpu: Clock, wall: Clock = time.perf_counter) -> None:
        self._cpu = cpu
        self._wall = wall
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = (0.0, 0.0)
        self._ended = False
        self._waited = 0.0

    @contextlib.contextmanager
    def during(self, word: str) -> Iterator[None]:  # noqa: ARG002 - see `interruptible_work.WaitObserver`
        """Count the time of the context as waiting."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def promised(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """Count the time until `future` is done as waiting."""
        self._begin()
        future.add_done_callback(lambda _: self._end())

    def stop(self) -> float:
        """Return the seconds of waiting. Waits in progress count up to now."""
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
    """Return a clock of a thread's CPU time.

    Where the system cannot read another thread's clock (macOS), CPU time counts as waiting.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
