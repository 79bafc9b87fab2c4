"""The vocabulary of cells that are measured.

Owns: what is asked of a rank with such a cell, and what it tells at its end. Refuses: to be there for any other cell.
"""

from __future__ import annotations

import msgspec


class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measure the cell's times; `profile`: trace its ops too. `epoch` is the trace's zero, in unix nanoseconds."""

    profile: bool
    epoch: int


class Times(msgspec.Struct, frozen=True):
    """Of one cell on one rank, in seconds.

    `cpu` is that of all threads of the process, `main_cpu` of the main one. `waited` is how long the main thread stood
    still while a collective that it waits for was under way. On CUDA collectives are the device's work, for which only
    who needs the result waits: that is not in here.
    """

    wall: float
    cpu: float
    main_cpu: float
    waited: float
    collectives: int


class OpTime(msgspec.Struct, frozen=True):
    """All calls of one op, without what they called in turn, in seconds. `where` is cpu, or the device of a kernel."""

    name: str
    where: str
    calls: int
    seconds: float


class Profile(msgspec.Struct, frozen=True):
    """What ran, and when: `events` is a piece of a Chrome trace, JSON objects with commas between them."""

    ops: tuple[OpTime, ...]
    events: bytes


class Measured(msgspec.Struct, frozen=True):
    """What a rank tells of a cell. `trouble` says why there is no profile, where one was asked for."""

    times: Times
    profile: Profile | None = None
    trouble: str = ""
