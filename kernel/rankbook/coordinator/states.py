"""States and transition tables of ranks and cells, and the grace periods between their steps.

The tables are drawn in docs/states.md. `RankEntry` and `CellEntry` hold the state of one rank and one cell;
state_machine.py changes it. `GracePeriods` says how long the coordinator waits for ranks before it interrupts, aborts
or kills them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from rankbook.snapshot_files import TrainingPlace


class RankState(Enum):
    """State of a rank's process."""

    # A member is unique. Enum's own method hashes the name, in Python: a third of the time of a step for 1,000 ranks.
    __hash__ = object.__hash__

    ABSENT = auto()
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    LEAVING = auto()
    DEAD = auto()


class RankStep(Enum):
    """Steps of a rank, which move it to another state."""

    __hash__ = object.__hash__

    FORK = auto()
    HELLO = auto()
    TASK = auto()
    DONE = auto()
    REMOVE = auto()
    EXIT = auto()


class CellState(Enum):
    """State of a cell. ENDING: it has been interrupted or lost a rank, and some of its ranks still run."""

    QUEUED = auto()
    RUNNING = auto()
    ENDING = auto()
    ENDED = auto()


class CellStep(Enum):
    """Steps of a cell, which move it to another state."""

    DISPATCH = auto()
    LAST_DONE = auto()
    RANK_LOST = auto()
    RANK_FAILED = auto()
    """A rank cannot form the process group, for which the others wait."""
    INTERRUPT = auto()
    RELEASE = auto()


# A pair that is missing is an error. LEAVING accepts HELLO and DONE, because the process may have sent them before it
# was told to exit. REMOVE is accepted in every state, because the user may stop or restart any rank at any time.
RANK_TABLE: dict[RankState, dict[RankStep, RankState]] = {
    RankState.ABSENT: {RankStep.FORK: RankState.STARTING, RankStep.REMOVE: RankState.ABSENT},
    RankState.STARTING: {
        RankStep.HELLO: RankState.IDLE,
        RankStep.EXIT: RankState.DEAD,
        RankStep.REMOVE: RankState.LEAVING,
    },
    RankState.IDLE: {
        RankStep.TASK: RankState.BUSY,
        RankStep.EXIT: RankState.DEAD,
        RankStep.REMOVE: RankState.LEAVING,
    },
    RankState.BUSY: {
        RankStep.DONE: RankState.IDLE,
        RankStep.EXIT: RankState.DEAD,
        RankStep.REMOVE: RankState.LEAVING,
    },
    RankState.LEAVING: {
        RankStep.HELLO: RankState.LEAVING,
        RankStep.DONE: RankState.LEAVING,
        RankStep.REMOVE: RankState.LEAVING,
        RankStep.EXIT: RankState.ABSENT,
    },
    # A dead rank keeps its entry, so that its loss can be reported until it is replaced or removed.
    RankState.DEAD: {RankStep.FORK: RankState.STARTING, RankStep.REMOVE: RankState.ABSENT},
}

# A cell needs only the first step of an ending to be ENDING. From there, whichever comes first ends it: the last
# answer, the second interrupt, or the release after the grace period.
CELL_TABLE: dict[CellState, dict[CellStep, CellState]] = {
    CellState.QUEUED: {
        CellStep.DISPATCH: CellState.RUNNING,
        CellStep.INTERRUPT: CellState.ENDED,
        CellStep.RANK_LOST: CellState.ENDED,
    },
    CellState.RUNNING: {
        CellStep.LAST_DONE: CellState.ENDED,
        CellStep.RANK_LOST: CellState.ENDING,
        CellStep.RANK_FAILED: CellState.ENDING,
        CellStep.INTERRUPT: CellState.ENDING,
    },
    CellState.ENDING: {
        CellStep.LAST_DONE: CellState.ENDED,
        CellStep.RANK_LOST: CellState.ENDING,
        CellStep.INTERRUPT: CellState.ENDED,
        CellStep.RELEASE: CellState.ENDED,
    },
    CellState.ENDED: {},
}


@dataclass
class RankEntry:
    """State of one rank, across restarts of its process, which `incarnation` counts.

    `refork`: start a new process when the current one has ended. `empty`: the process was started alone, and neither
    heal nor a cell has given it variables. `since` is the number of the launch that the rank's variables date from,
    which orders ranks by age. `lost_device` is the error of a device that has failed for good; the process lives, and
    its variables on the CPU are intact.
    """

    rank: int
    state: RankState = RankState.ABSENT
    incarnation: int = 0
    cell: int | None = None
    refork: bool = False
    loss: str | None = None
    empty: bool = False
    since: int = 0
    lost_device: str = ""


def choose_donor(ranks: Iterable[RankEntry], nearby: Collection[int] = ()) -> int | None:
    """Return the rank to copy variables from: the oldest ones, preferably of an idle rank, never an empty one.

    Of equal ranks, one of those `nearby` is preferred, which share a host with the ranks that will get the variables.

    Nor one that has lost its device: its tensors there cannot be read.
    A rank that was restarted and has run a cell has fewer variables than one that has run since the start.
    """
    # An empty rank has nothing to copy, and a starting or leaving one cannot answer.
    alive = [rank for rank in ranks if rank.state in (RankState.IDLE, RankState.BUSY)]
    healthy = [rank for rank in alive if not rank.empty and not rank.lost_device]
    best = min(
        healthy,
        key=lambda rank: (rank.since, rank.state is not RankState.IDLE, rank.rank not in nearby, rank.rank),
        default=None,
    )
    return None if best is None else best.rank


@dataclass
class CellEntry:
    """State of one cell. `running` are the ranks that have not finished it.

    `answers` maps the other ranks to their errors, in words; empty if they succeeded. Together the ranks started
    `collectives` collectives, and `aborted` says that some were aborted. `defines_variables`: see `events.Submit`.
    `places` says where the ranks of a protected training are. `spared`: an interrupt has aborted no collectives of some
    ranks, because their devices were only behind.
    """

    cell: int
    ranks: tuple[int, ...]
    internal: bool = False
    defines_variables: bool = False
    state: CellState = CellState.QUEUED
    running: set[int] = field(default_factory=set)
    interrupted: bool = False
    answers: dict[int, str] = field(default_factory=dict)
    collectives: int = 0
    aborted: bool = False
    spared: bool = False
    places: dict[int, TrainingPlace] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Return True if a rank has raised."""
        return any(self.answers.values())


@dataclass(frozen=True)
class GracePeriods:
    """Grace periods of a cluster, in seconds.

    The defaults suit interactive work. `Cluster(2, grace=GracePeriods(leave=3.0))` changes one.
    """

    raised: float = 1.0
    """Seconds from a rank's error until peers that wait for it in a collective are aborted (`RANKBOOK_ABORT_GRACE`)."""
    finished: float = 5.0
    """Seconds from a rank's end of a cell until the user is warned that a peer waits for it in a collective."""
    death_interrupt: float = 0.15
    """Seconds from a rank's death until the other ranks of its cell are interrupted."""
    death_abort: float = 0.4
    """Seconds from a rank's death until collectives that still wait are aborted."""
    death_release: float = 0.8
    """Seconds from a rank's death until the cell ends in the notebook, even if ranks still run it."""
    interrupt_abort: float = 0.5
    """Seconds from an interrupt until the collectives that ranks wait in are aborted."""
    interrupt_release: float = 5.0
    """Seconds from an interrupt until the cell ends in the notebook, even if ranks still run it."""
    leave: float = 1.5
    """Seconds from a shutdown request to an idle rank until it is killed."""
    save: float = 30.0
    """Time for a rank that exits to finish background saves and to call its exit functions."""
    last_save: float = 2.0
    """Like `save`, at kernel exit. Jupyter Server kills a kernel after half of `shutdown_wait_time`, which is 5 s."""
