"""Events of the state machine: everything that can change the state of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rankbook.coordinator.actions import Step
from rankbook.coordinator.deadlock import CollectiveReport
from rankbook.protocol.telemetry import GroupReport
from rankbook.snapshot_files import TrainingPlace


@dataclass(frozen=True)
class LaunchRanks:
    """Request that these ranks run, with a new process if they already do."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankConnected:
    """A rank's process has connected."""

    rank: int
    incarnation: int


@dataclass(frozen=True)
class RankGone:
    """A rank's process has ended. `reason` describes how, for the user."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class LossReportDue:
    """The exits received so far are handled. `now` is in seconds, on any monotonic clock."""

    now: float


@dataclass(frozen=True)
class Submit:
    """A cell is submitted for `ranks`. `defines_variables`: it may define variables there (cell, call or push)."""

    cell: int
    ranks: tuple[int, ...]
    defines_variables: bool = True


# A Struct: one is made for every rank of a cell, and a frozen dataclass takes ten times as long.
class CellDone(msgspec.Struct, frozen=True):
    """A rank has finished a cell. `reason` says what it raised if it `failed`; it started `collectives` collectives.

    `groups` are the process groups in which it started them. `lost_device` is the error of a device that has failed for
    good. `place` is where it is in a protected training.
    """

    rank: int
    incarnation: int
    cell: int
    failed: bool = False
    reason: str = ""
    collectives: int = 0
    groups: tuple[GroupReport, ...] = ()
    lost_device: str = ""
    place: TrainingPlace | None = None


@dataclass(frozen=True)
class StateRestored:
    """The new `ranks` have received the variables of `donor`."""

    ranks: tuple[int, ...]
    donor: int


@dataclass(frozen=True)
class RemoveRanks:
    """Request that the processes of these ranks end."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ResizeWorld:
    """The cluster has `world_size` ranks from now on. Those beyond have ended; new ones are launched later."""

    world_size: int


@dataclass(frozen=True)
class CollectivesReceived:
    """A rank has replied to `RequestCollectives`."""

    rank: int
    incarnation: int
    report: CollectiveReport


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


_OfRanks = LaunchRanks | RankConnected | RankGone | LossReportDue | StateRestored | RemoveRanks | ResizeWorld
Event = _OfRanks | Submit | CellDone | CollectivesReceived | CheckCollectives | InterruptCell | TimerFired | Stop
