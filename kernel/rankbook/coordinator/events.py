"""What can happen to a cluster, as far as its decisions go.

Owns: the events that go into the state machine. Refuses: anything that does something.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankbook.coordinator.actions import Step
from rankbook.coordinator.deadlock import CollectiveReport


@dataclass(frozen=True)
class LaunchRanks:
    """These ranks shall be there, anew where they are there already."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankConnected:
    """A rank's process has dialled home."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class RankGone:
    """A rank's process has ended; `words` tell how, for people."""

    rank: int
    incarnation: int
    words: str


@dataclass(frozen=True)
class Submit:
    """Somebody wants `cell` run on `ranks`. `fills`: it may give them variables, as a cell, a call and a push do."""

    cell: int
    ranks: tuple[int, ...]
    fills: bool = True


@dataclass(frozen=True)
class CellDone:
    """A rank has answered. `words` tell what it raised if it `failed`; it began `collectives` collectives there."""

    rank: int
    incarnation: int
    cell: int
    failed: bool = False
    words: str = ""
    collectives: int = 0


@dataclass(frozen=True)
class StateRestored:
    """The new `ranks` have the state of `donor`."""

    ranks: tuple[int, ...]
    donor: int


@dataclass(frozen=True)
class CollectivesReceived:
    """A rank has answered `RequestCollectives`."""

    rank: int
    incarnation: int
    told: CollectiveReport


@dataclass(frozen=True)
class CheckCollectives:
    """It is time to see whether somebody waits in vain. `now` is in seconds, on any clock that only goes forward."""

    now: float


@dataclass(frozen=True)
class InterruptCell:
    """The person, or a timeout, wants the cell to stop. A second time: control back, whoever still runs."""

    cell: int


@dataclass(frozen=True)
class TimerFired:
    """The time that `StartTimer` set is over."""

    cell: int
    step: Step


@dataclass(frozen=True)
class Stop:
    """Everything shall end."""


_OfRanks = LaunchRanks | RankConnected | RankGone | StateRestored
Event = _OfRanks | Submit | CellDone | CollectivesReceived | CheckCollectives | InterruptCell | TimerFired | Stop
