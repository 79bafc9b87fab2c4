"""Events of the state machine: everything that can change the state of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from rankbook.coordinator.actions import Step
from rankbook.coordinator.deadlock import CollectiveReport


@dataclass(frozen=True)
class LaunchRanks:
    """These ranks should run, with a new process if they already do."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankConnected:
    """A rank's process has connected."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class RankGone:
    """A rank's process has ended. `words` describe how, for the user."""

    rank: int
    incarnation: int
    words: str


@dataclass(frozen=True)
class Submit:
    """A cell is submitted for `ranks`. `fills`: it may define variables there, as a cell, a call and a push do."""

    cell: int
    ranks: tuple[int, ...]
    fills: bool = True


@dataclass(frozen=True)
class CellDone:
    """A rank has finished a cell. `words` say what it raised if it `failed`; it started `collectives` collectives."""

    rank: int
    incarnation: int
    cell: int
    failed: bool = False
    words: str = ""
    collectives: int = 0


@dataclass(frozen=True)
class StateRestored:
    """The new `ranks` have received the variables of `donor`."""

    ranks: tuple[int, ...]
    donor: int


@dataclass(frozen=True)
class CollectivesReceived:
    """A rank has replied to `RequestCollectives`."""

    rank: int
    incarnation: int
    told: CollectiveReport


@dataclass(frozen=True)
class CheckCollectives:
    """The ranks' waits are due for a check. `now` is in seconds, on any monotonic clock."""

    now: float


@dataclass(frozen=True)
class InterruptCell:
    """The user or a timeout interrupts a cell. The second interrupt ends it, even if ranks still run."""

    cell: int


@dataclass(frozen=True)
class TimerFired:
    """A timer set by `StartTimer` has expired."""

    cell: int
    step: Step


@dataclass(frozen=True)
class Stop:
    """The cluster should stop."""


_OfRanks = LaunchRanks | RankConnected | RankGone | StateRestored
Event = _OfRanks | Submit | CellDone | CollectivesReceived | CheckCollectives | InterruptCell | TimerFired | Stop
