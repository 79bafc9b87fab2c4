"""Messages of measured cells: times, op statistics and traces.

A rank sends them only for a cell that was started with `Measure`, as the payload of the cell's `Done`.
"""

from __future__ import annotations

import msgspec


class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request that a cell's times are measured.

    `profile`: also trace ops with the torch profiler. `epoch` is the zero of the trace's time axis, in nanoseconds
    since the Unix epoch.
    """

    profile: bool
    epoch: int


class Times(msgspec.Struct, frozen=True):
    """Times of one cell on one rank, in seconds.

    `wall` is elapsed time, `cpu` the CPU time of all threads of the process, `main_cpu` that of the main thread.
    `waited` is the time that the main thread was blocked in a pending collective. On CUDA, collectives run on the
    device and block the host only where it needs their result; device time is not included. `collectives` is a count.
    """

    wall: float
    cpu: float
    main_cpu: float
    waited: float
    collectives: int


class OpTime(msgspec.Struct, frozen=True):
    """Total self time (without called ops) of all calls of one op, in seconds.

    `where` is "cpu", or the device that ran the kernel.
    """

    name: str
    where: str
    calls: int
    seconds: float


class Profile(msgspec.Struct, frozen=True):
    """Op statistics and trace of one cell. `events` is part of a Chrome trace: comma-separated JSON objects."""

    ops: tuple[OpTime, ...]
    events: bytes


class Measured(msgspec.Struct, frozen=True):
    """Measurements of one cell on one rank.

    `trouble` explains why `profile` is None although a profile was requested.
    """

    times: Times
    profile: Profile | None = None
    trouble: str = ""
