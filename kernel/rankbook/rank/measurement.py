"""Measurement of one cell: wall time, CPU time, time waiting for other ranks, and optionally a profile.

Exists only for a cell that is measured; other cells pay nothing. `WaitClock` computes the waiting time, and
`SpanRecorder` records the times of every collective, from which the notebook sees for which ranks the others waited.

A profile is that of PyTorch: `Profiling` runs the profiler. `RankTrace` moves the events to a common time base, with
one process per rank. `sum_op_times` computes the times of the ops.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rankbook.formatting import format_bytes
from rankbook.protocol.telemetry import CollectiveSpan, Measure, Measured, OpTime, Profile, Times
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.process_groups.collective_log import CollectiveCall

_MAX_TRACE_BYTES = 400_000_000
"""Maximum bytes of a trace. Parsing it holds the GIL for some seconds, during which the rank does not respond."""
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_OURS = 1
"""Value for torch's flag that a profiler runs. Another profiler's start sets True, which is distinct from 1."""


class Profiling:
    """Profile one cell on `rank`.

    `epoch` is the zero of the trace's times, in Unix nanoseconds.
    """

    def __init__(self, epoch: int, rank: int, device: torch.device) -> None:
        self._epoch = epoch
        self._rank = rank
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)

    def start(self) -> None:
        """Start profiling. Raises RuntimeError if another profiler is running."""
        if torch.autograd._profiler_enabled():
            raise RuntimeError("a profiler started by an earlier cell is still running, and only one can run at a time")
        with _quiet():
            self._profiler.start()
        torch.autograd.profiler._is_profiler_enabled = _OURS  # type: ignore[assignment]

    def stop(self) -> None:
        """Stop profiling. Raises RuntimeError if the cell has started a profiler itself, which ends this one.

        torch would report that from C++, and crash with a segmentation fault when the trace is read.
        """
        if not torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled is not _OURS:
            raise RuntimeError("the cell started a profiler itself, and only one can run at a time")
        with _quiet():
            self._profiler.stop()

    def span(self, op: str) -> AbstractContextManager[object]:
        """Return a context that records a span for a `torch.distributed` operation."""
        return record_function(f"dist.{op}")

    def result(self) -> Profile:
        """Return the op times and the trace.

        Raises ValueError if the trace is too large or cannot be parsed, and OSError.
        """
        # torch writes a trace to a file only.
        with tempfile.TemporaryDirectory(prefix="rankbook-profile-") as folder:
            file = Path(folder) / "trace.json"
            with _quiet():
                self._profiler.export_chrome_trace(str(file))
            size = file.stat().st_size
            if size > _MAX_TRACE_BYTES:
                limit = format_bytes(_MAX_TRACE_BYTES)
                raise ValueError(f"expected a trace of at most {limit}, got {format_bytes(size)}; profile fewer steps")
            text = file.read_bytes()
        trace = RankTrace(
            json.loads(text, strict=False),
            rank=self._rank,
            device=str(self._device),
            pid=os.getpid(),
            epoch=self._epoch,
        )
        ops = trace.ops()
        events = json.dumps(trace.events(), separators=(",", ":"))  # one call runs in C, twice as fast
        return Profile(ops, events[1:-1].encode())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the lines that Kineto prints to stderr at start and stop."""
    before = os.environ.get(_LOG_LEVEL)
    # A level that the user has set stays.
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


Event = dict[str, Any]

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NO_OPS = frozenset({"gpu_user_annotation", "Trace"})
"""Categories of events that only span other events."""
_FLOWS = frozenset({"s", "t", "f"})


class RankTrace:
    """The trace that PyTorch's profiler wrote in process `pid` of `rank`, which computes on `device`.

    `epoch` is the new zero of its times, in Unix nanoseconds. Raises ValueError if `trace` has no base time.
    """

    def __init__(self, trace: Mapping[str, Any], *, rank: int, device: str, pid: int, epoch: int) -> None:
        base = trace.get("baseTimeNanoseconds")
        if not isinstance(base, int):
            raise ValueError("this version of torch does not write baseTimeNanoseconds into traces")  # noqa: TRY004 - bad data
        self._rank = rank
        self._device = device
        self._pid = pid
        # Both in nanoseconds; the trace is in microseconds.
        self._time_offset = (base - epoch) / 1000
        self._events: list[Event] = [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]

    def events(self) -> list[Event]:
        """Return the events in process `rank`, after metadata that names the process and its threads.

        The main thread is the first one.
        """
        names = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in self._events if _names_thread(entry)}
        # The main thread has the id of the process, on Linux. It gets number 1.
        threads = {(self._pid, self._pid): 1}
        body = []
        for event in self._events:
            if event["ph"] == "M":
                continue
            thread = threads.setdefault((event["pid"], event["tid"]), len(threads) + 1)
            moved = {**event, "pid": self._rank, "tid": thread, "ts": round(event["ts"] + self._time_offset, 3)}
            if event["ph"] in _FLOWS:
                moved["id"] = (self._rank << 40) + int(event["id"])  # all ranks count from the same id
            body.append(moved)
        labels = {key: self._name(key, names) for key in threads}
        metadata_events = [
            self._metadata_event("process_name", 0, name=f"rank {self._rank} ({self._device}, process {self._pid})"),
            self._metadata_event("process_sort_index", 0, sort_index=self._rank),
        ]
        for key, thread in threads.items():
            metadata_events += [
                self._metadata_event("thread_name", thread, name=labels[key]),
                self._metadata_event("thread_sort_index", thread, sort_index=thread),
            ]
        return metadata_events + body

    def ops(self) -> tuple[OpTime, ...]:
        """Return the time per op, excluding the ops that it called."""
        return sum_op_times(event for event in self._events if event["ph"] == "X" and event.get("cat") not in _NO_OPS)

    def _name(self, key: tuple[int, int], names: Mapping[tuple[int, int], str]) -> str:
        if key == (self._pid, self._pid):
            return "main thread"
        return f"cuda:{key[0]} stream {key[1]}" if key[0] != self._pid else names.get(key, f"thread {key[1]}")

    def _metadata_event(self, what: str, thread: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": thread, "args": args}


# Example: `linear` lasts from 0 to 10 µs and calls `addmm` from 2 to 6 µs. `addmm` gets 4 µs, and `linear` the other 6.
def sum_op_times(events: Iterable[Event]) -> tuple[OpTime, ...]:
    """Return the total time per op, the longest first.

    `events` are complete events with `ts` and `dur` in microseconds. An op that starts within another op of the same
    thread was called by it, and its time is subtracted from the caller's. An op that ends later than its caller runs
    beside it, as gloo's collectives do, and is not subtracted.
    """
    threads: dict[tuple[object, object], list[Event]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    micros: dict[tuple[str, str], float] = defaultdict(float)
    # `open_` is the stack of calls in progress: end time and key.
    for thread_events in threads.values():
        # Parents before their children: earlier first, and of those that begin at once the longer first.
        thread_events.sort(key=lambda op: (op["ts"], -op["dur"]))
        open_: list[tuple[float, tuple[str, str]]] = []
        for event in thread_events:
            start, long = event["ts"], event["dur"]
            on_device = event.get("cat") in _ON_DEVICE
            key = (event["name"], f"cuda:{event['pid']}" if on_device else "cpu")
            calls[key] += 1
            micros[key] += long
            # Calls that have ended before this one begins.
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_ and start + long > open_[-1][0] + 0.001:  # tolerance: times are rounded to nanoseconds
                continue
            # The time of a call is its own minus that of the calls in it, so that the sum over all ops is the time of
            # the thread.
            if open_:
                micros[open_[-1][1]] -= long
            open_.append((start + long, key))
    ordered = sorted(micros.items(), key=itemgetter(1), reverse=True)
    return tuple(OpTime(name, where, calls[name, where], us / 1e6) for (name, where), us in ordered)


def _names_thread(event: Event) -> bool:
    return bool(event["ph"] == "M" and event["name"] == "thread_name")


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

    def device_done(self) -> None:
        """Note that the device has executed what the cell has queued. After `stop`."""
        assert self._times is not None
        self._times = msgspec.structs.replace(self._times, device=time.perf_counter() - self._start_times[0])

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
