"""Actions of the state machine, which the driver performs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal["interrupt", "abort", "release"]
"""Escalation for a cell that does not end: interrupt its ranks, abort their collectives, return control to the user."""


@dataclass(frozen=True)
class Fork:
    """Fork this incarnation of the rank."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """Stop this incarnation of the rank and its children: ask it to exit if it is `idle`, otherwise kill it."""

    rank: int
    incarnation: int
    idle: bool


@dataclass(frozen=True)
class FormGroup:
    """Make `cell` the task that puts all ranks into generation `generation` of the process group.

    `anew`: the number of ranks has changed, and with it all groups.
    """

    cell: int
    generation: int
    anew: bool = False


@dataclass(frozen=True)
class ReplaceRanks:
    """Use the table of ranks that the state has now."""


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
    """Post `TimerFired(cell, step)` in `seconds`."""

    cell: int
    seconds: float
    step: Step


@dataclass(frozen=True)
class ScheduleCheck:
    """Post `CheckCollectives` in `seconds`, or earlier."""

    seconds: float


@dataclass(frozen=True)
class RequestCollectives:
    """Request reports of these ranks' collectives."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendAbort:
    """Abort these ranks' collectives in `groups` (all groups, if none is named); send all ranks the `cause`.

    `mismatch`: the cause names the collective.
    """

    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    cause: str
    mismatch: bool = False


@dataclass(frozen=True)
class ScheduleLossReport:
    """Post `LossReportDue` when all exits that have been received are handled."""


@dataclass(frozen=True)
class SendLosses:
    """Tell `ranks` which ranks have exited; `causes` has a sentence per lost rank."""

    ranks: tuple[int, ...]
    causes: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class NotifyUser:
    """Show this text on stderr in the cell."""

    cell: int
    text: str


@dataclass(frozen=True)
class NotifyQueued:
    """Report that the cell is queued. `busy` are its ranks that run another cell or are not ready."""

    cell: int
    busy: tuple[int, ...]


@dataclass(frozen=True)
class NotifyRankLost:
    """Report that a rank's process has ended; it was running `cell`. `expected`: it was asked to exit."""

    rank: int
    reason: str
    cell: int | None
    expected: bool


@dataclass(frozen=True)
class EndCell:
    """End the cell for its waiting thread. `stragglers` still run it.

    `mismatch` says which results are wrong although no rank raised, because the ranks gave different things to the same
    collective; empty otherwise.
    """

    cell: int
    stragglers: tuple[int, ...]
    interrupted: bool
    mismatch: str = ""


Action = (
    Fork
    | Kill
    | FormGroup
    | ReplaceRanks
    | SendTask
    | SendInterrupt
    | StartTimer
    | ScheduleCheck
    | RequestCollectives
    | SendAbort
    | ScheduleLossReport
    | SendLosses
    | NotifyUser
    | NotifyQueued
    | NotifyRankLost
    | EndCell
)
