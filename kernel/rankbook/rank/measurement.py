"""Measurement of one cell: wall time, CPU time, time waiting for other ranks, and optionally a profile.

Exists only for a cell that is measured; other cells pay nothing. `WaitClock` computes the waiting time, and
`SpanRecorder` records the times of every collective, from which the notebook sees for which ranks the others waited.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rankbook.protocol.telemetry import CollectiveSpan, Measure, Measured, Profile, Times
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.process_groups.collective_log import CollectiveCall

if TYPE_CHECKING:
    from rankbook.rank.profiler import Profiling


class Measurement:
    """Measure one cell on `rank`. Main thread; also a `WaitObserver` of collectives, called from any thread.

    `launched` is the number of collectives that the process groups have launched before the cell.
    """

    def __init__(self, request: Measure, rank: int, device: torch.device, launched: int) -> None:
        # The clock of the thread that makes this object, which is the main thread.
        self._main_cpu = cpu_clock_of(threading.get_ident())
        self._clock = WaitClock(self._main_cpu)
        self._spans = SpanRecorder()
        self._launched = launched
        self._ahead = request.ahead
        self._profiling: Profiling | None = None
        self._start_times = (time.perf_counter(), time.process_time(), time.thread_time())
        self._times: Times | None = None
        self._error = ""
        if request.profile:
            # Imported only for a cell that is profiled.
            from rankbook.rank.profiler import Profiling

            self._profiling = Profiling(request.epoch, rank, device)

    def start(self) -> None:
        """Start measuring. A profiler that cannot start is reported in the result."""
        if self._profiling is not None:
            try:
                self._profiling.start()
            except RuntimeError as error:
                self._profiling, self._error = None, f"cannot start torch's profiler: {error}"
        # After the profiler has started, whose own start takes time.
        interruptible_work.active_observer.value = self
        self._start_times = (time.perf_counter(), time.process_time(), time.thread_time())

    def stop(self, launched: int) -> None:
        """Stop measuring; later calls have no effect. `launched` is the number of collectives by now."""
        # Called again by the executor if an interrupt has ended the first call.
        if self._times is not None:
            return
        wall, cpu, main_cpu = self._start_times
        self._times = Times(
            wall=time.perf_counter() - wall,
            cpu=time.process_time() - cpu,
            main_cpu=time.thread_time() - main_cpu,
            waited=self._clock.stop(),
            collectives=launched - self._launched,
            spans=shift_spans(self._spans.stop(), -self._ahead),
        )
        # Before the profiler stops, so that no span begins in a stopped profiler.
        interruptible_work.active_observer.value = None
        if self._profiling is not None:
            try:
                self._profiling.stop()
            except RuntimeError as error:
                self._profiling, self._error = None, f"torch's profiler could not record the cell: {error}"

    def result(self) -> Measured:
        """Return the measurement, after `stop`."""
        assert self._times is not None
        profile: Profile | None = None
        if self._profiling is not None:
            try:
                profile = self._profiling.result()
            except Exception as error:  # noqa: BLE001 - reported; a profile must not fail its cell
                self._error = f"cannot return the profile of the cell: {type(error).__name__}: {error}"
        return Measured(self._times, profile, self._error)

    # WaitObserver

    @contextlib.contextmanager
    def launching(self, call: CollectiveCall, group: str) -> Iterator[None]:
        """Note that a thread launches a collective."""
        self._spans.launch(group, call.number)
        with self._span(call.op):
            yield

    @contextlib.contextmanager
    def waiting(self, call: CollectiveCall, group: str) -> Iterator[None]:
        """Note that a thread waits for a collective."""
        self._spans.begin_wait(group, call.number)
        try:
            with self._span(f"{call.op}: wait"), self._clock.waiting(call.op):
                yield
        finally:
            self._spans.end_wait(group, call.number)

    def waiting_for_future(self, call: CollectiveCall, group: str, future: Any) -> None:  # noqa: ANN401 - torch's
        """Note that C++ code will wait for a collective, until `future` is done."""
        self._clock.waiting_for_future(future)
        self._spans.begin_wait(group, call.number)
        future.add_done_callback(lambda _: self._spans.end_wait(group, call.number))

    def _span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._profiling is None else self._profiling.span(name)


Clock = Callable[[], float]


# Example: one thread waits from 0 to 3 s and another one from 1 to 5 s, while the main thread uses 2 s of CPU time. At
# least one wait is in progress for 5 s. Of these, 2 s were computation, so 3 s count as waiting.
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
        self._open_waits = 0
        self._wait_start = (0.0, 0.0)
        self._ended = False
        self._total = 0.0

    @contextlib.contextmanager
    def waiting(self, op: str) -> Iterator[None]:  # noqa: ARG002 - see `interruptible_work.WaitObserver`
        """Count the time of the context as waiting."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def waiting_for_future(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """Count the time until `future` is done as waiting."""
        self._begin()
        future.add_done_callback(lambda _: self._end())

    def stop(self) -> float:
        """Return the seconds of waiting. Waits in progress count up to now."""
        with self._lock:
            if self._open_waits and not self._ended:
                self._add()
            self._ended = True
            return self._total

    def _begin(self) -> None:
        with self._lock:
            # The first of several overlapping waits starts the clock, and the last one stops it.
            if not self._open_waits:
                self._wait_start = (self._wall(), self._cpu())
            self._open_waits += 1

    def _end(self) -> None:
        with self._lock:
            self._open_waits -= 1
            if not self._open_waits and not self._ended:
                self._add()

    def _add(self) -> None:
        wall, cpu = self._wait_start
        # CPU time is subtracted, because a thread that computes while another one waits has lost nothing. Clocks of
        # different resolution may give a tiny negative difference.
        self._total += max(0.0, self._wall() - wall - (self._cpu() - cpu))


_MAX_SPANS = 20_000
"""Number of collectives whose times are recorded: some MB per rank."""


class SpanRecorder:
    """Record when this rank launched every collective, and when it waited for it. Any thread.

    `clock` must be the same for all ranks of a host.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._spans: dict[tuple[str, int], list[float]] = {}
        self._ended = False

    def launch(self, group: str, number: int) -> None:
        """Record a launch. A send or recv has the number 0 and is not recorded: only one other rank takes part."""
        # No lock: every key is written by the thread that launches, and reading copies the dict.
        if number and len(self._spans) < _MAX_SPANS:
            self._spans[group, number] = [self._clock(), 0.0, 0.0]

    def begin_wait(self, group: str, number: int) -> None:
        """Record the first wait for a collective."""
        if (span := self._spans.get((group, number))) is not None and not span[1]:
            span[1] = self._clock()

    def end_wait(self, group: str, number: int) -> None:
        """Record the end of a wait."""
        if (span := self._spans.get((group, number))) is not None and not self._ended:
            span[2] = self._clock()

    def stop(self) -> tuple[CollectiveSpan, ...]:
        """Return the spans. Waits in progress count up to now."""
        # Set first: a wait that ends from here on must not change the result.
        self._ended, now = True, self._clock()
        return tuple(
            CollectiveSpan(group, number, launched, waits, ends or (now if waits else 0.0))
            for (group, number), (launched, waits, ends) in self._spans.copy().items()
        )


def cpu_clock_of(thread: int) -> Clock:
    """Return a clock of a thread's CPU time.

    Where the system cannot read another thread's clock (macOS), CPU time counts as waiting.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def shift_spans(spans: tuple[CollectiveSpan, ...], seconds: float) -> tuple[CollectiveSpan, ...]:
    """Return the spans with `seconds` added to their times. 0.0 stands for a time that there is not."""
    if not seconds:
        return spans
    return tuple(
        CollectiveSpan(
            span.group,
            span.number,
            span.launched + seconds,
            span.waits and span.waits + seconds,
            span.ends and span.ends + seconds,
        )
        for span in spans
    )
