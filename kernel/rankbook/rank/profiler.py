"""PyTorch's profiler around one cell, and its trace as part of a trace of all ranks.

`Profiling` runs the profiler. `RankTrace` moves the events to a common time base, with one process per rank.
`sum_op_times` computes the times of the ops.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rankbook.formatting import format_bytes
from rankbook.protocol.telemetry import OpTime, Profile

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
