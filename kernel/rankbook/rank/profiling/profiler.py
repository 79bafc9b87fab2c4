"""torch's profiler around one cell.

Owns: its start and its end, and what of its trace is told. Refuses: to read a trace that would hold up the rank.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rankbook.formatting import format_bytes
from rankbook.protocol.profiling import Profile
from rankbook.rank.profiling.trace import RankTrace

_MOST = 400_000_000
"""Bytes of a trace: reading it keeps the interpreter for some seconds, in which the rank answers nobody."""
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_OURS = 1
"""What torch's note of whether a profiler runs is set to: true, and not the True that another one's start sets."""


class Profiling:
    """Of one cell on `rank`. `epoch` is the zero of its times, in unix nanoseconds."""

    def __init__(self, epoch: int, rank: int, device: torch.device) -> None:
        self._epoch = epoch
        self._rank = rank
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)

    def start(self) -> None:
        """From here on. Raises RuntimeError where somebody else profiles already."""
        if torch.autograd._profiler_enabled():
            raise RuntimeError("one that an earlier cell has started still runs, and there can be but one")
        with _quiet():
            self._profiler.start()
        torch.autograd.profiler._is_profiler_enabled = _OURS  # type: ignore[assignment]

    def stop(self) -> None:
        """Up to here. Raises RuntimeError where the cell has started a profiler itself: that ends this one.

        torch would say so in C++, and with a segmentation fault where the trace is read.
        """
        if not torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled is not _OURS:
            raise RuntimeError("the cell has started one itself, and there can be but one")
        with _quiet():
            self._profiler.stop()

    def note(self, word: str) -> AbstractContextManager[object]:
        """A span with a name of `torch.distributed`'s."""
        return record_function(f"dist.{word}")

    def tell(self) -> Profile:
        """What ran. Raises ValueError where that was too much, or cannot be read; OSError."""
        with tempfile.TemporaryDirectory(prefix="rankbook-profile-") as folder:
            file = Path(folder) / "trace.json"
            with _quiet():
                self._profiler.export_chrome_trace(str(file))
            size = file.stat().st_size
            if size > _MOST:
                raise ValueError(f"it is {format_bytes(size)}, more than {format_bytes(_MOST)}: profile fewer steps")
            text = file.read_bytes()
        trace = RankTrace(
            json.loads(text, strict=False),
            rank=self._rank,
            device=str(self._device),
            pid=os.getpid(),
            epoch=self._epoch,
        )
        ops = trace.ops()
        events = json.dumps(trace.events(), separators=(",", ":"))  # all at once is C code, and twice as fast
        return Profile(ops, events[1:-1].encode())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that kineto writes to standard error at its start and end."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
