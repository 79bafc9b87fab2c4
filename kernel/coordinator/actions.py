"""What the state machine wants done.

Owns: the actions that come out of it. Refuses: to do them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fork:
    """Fork this incarnation of the rank."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """Make this incarnation of the rank end: politely if it is `idle`, and with its children in any case."""

    rank: int
    incarnation: int
    idle: bool


@dataclass(frozen=True)
class Regroup:
    """Make `cell` the task that puts all ranks into generation `generation` of the process group."""

    cell: int
    generation: int


@dataclass(frozen=True)
class SendTask:
    """Send the cell's task to these ranks."""

    cell: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendInterrupt:
    """Interrupt the cell on these ranks."""

    cell: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SetGrace:
    """Hand in `GraceOver(cell, release)` in `seconds`."""

    cell: int
    seconds: float
    release: bool


@dataclass(frozen=True)
class TellQueued:
    """The cell waits, because these of its ranks are not idle or are wanted by a cell before it."""

    cell: int
    busy: tuple[int, ...]


@dataclass(frozen=True)
class TellLoss:
    """A rank's process is gone; it ran `cell`. `expected`: it was asked to go."""

    rank: int
    words: str
    cell: int | None
    expected: bool


@dataclass(frozen=True)
class EndCell:
    """The cell is over for whoever waits for it; `stragglers` still run."""

    cell: int
    stragglers: tuple[int, ...]
    interrupted: bool


Action = Fork | Kill | Regroup | SendTask | SendInterrupt | SetGrace | TellQueued | TellLoss | EndCell
