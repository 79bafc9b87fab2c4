"""What the state machine wants done.

Owns: the actions that come out of it. Refuses: to do them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal["nudge", "abort", "release"]
"""What is done to a cell that does not end: interrupt its ranks, break off their collectives, let the person go."""


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
class FormGroup:
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
class StartTimer:
    """Hand in `TimerFired(cell, step)` in `seconds`."""

    cell: int
    seconds: float
    step: Step


@dataclass(frozen=True)
class ScheduleCheck:
    """Hand in `CheckCollectives` in `seconds`, or earlier."""

    seconds: float


@dataclass(frozen=True)
class RequestCollectives:
    """Ask these ranks where they are in their process groups."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendAbort:
    """Break off what these ranks wait for in `groups` (all, if none is named); the other ranks are told the `cause`.

    `lost`: a rank that is gone; only the groups that it is a member of are meant.
    """

    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    cause: str
    lost: int | None = None


@dataclass(frozen=True)
class NotifyUser:
    """Say this in the cell, on stderr."""

    cell: int
    text: str


@dataclass(frozen=True)
class NotifyQueued:
    """The cell waits, because these of its ranks are not idle or are wanted by a cell before it."""

    cell: int
    busy: tuple[int, ...]


@dataclass(frozen=True)
class NotifyRankLost:
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


Action = (
    Fork
    | Kill
    | FormGroup
    | SendTask
    | SendInterrupt
    | StartTimer
    | ScheduleCheck
    | RequestCollectives
    | SendAbort
    | NotifyUser
    | NotifyQueued
    | NotifyRankLost
    | EndCell
)
