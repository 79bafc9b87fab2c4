"""The states of a rank and of a cell, and what may follow on what.

Owns: the two tables, from which docs/states.md is drawn, and what is known of one rank and one cell. Refuses: to move
anything; `state.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto


class RankState(Enum):
    """What a rank's process is doing."""

    ABSENT = auto()
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    LEAVING = auto()
    DEAD = auto()


class RankStep(Enum):
    """What can happen to a rank."""

    FORK = auto()
    HELLO = auto()
    TASK = auto()
    DONE = auto()
    REMOVE = auto()
    EXIT = auto()


class CellState(Enum):
    """Where a cell is. ENDING: its end is decided, some of its ranks still run."""

    QUEUED = auto()
    RUNNING = auto()
    ENDING = auto()
    ENDED = auto()


class CellStep(Enum):
    """What can happen to a cell."""

    DISPATCH = auto()
    LAST_DONE = auto()
    RANK_LOST = auto()
    INTERRUPT = auto()
    RELEASE = auto()


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
    RankState.DEAD: {RankStep.FORK: RankState.STARTING, RankStep.REMOVE: RankState.ABSENT},
}

CELL_TABLE: dict[CellState, dict[CellStep, CellState]] = {
    CellState.QUEUED: {
        CellStep.DISPATCH: CellState.RUNNING,
        CellStep.INTERRUPT: CellState.ENDED,
        CellStep.RANK_LOST: CellState.ENDED,
    },
    CellState.RUNNING: {
        CellStep.LAST_DONE: CellState.ENDED,
        CellStep.RANK_LOST: CellState.ENDING,
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
    """One place in the world: its state outlives its processes, which `incarnation` counts.

    `empty`: its process was started alone, and neither heal nor a cell has given it variables. `since` orders the ranks
    by the age of their variables: the number of the launch that they are from.
    """

    rank: int
    state: RankState = RankState.ABSENT
    incarnation: int = 0
    cell: int | None = None
    refork: bool = False
    loss: str | None = None
    empty: bool = False
    since: int = 0


def choose_donor(ranks: Iterable[RankEntry]) -> int | None:
    """Return which of `ranks` heal takes the state from: the oldest state, rather of an idle rank; never an empty one.

    A rank that was restarted and has run a cell has less than one that has been there from the start.
    """
    healthy = [rank for rank in ranks if rank.state in (RankState.IDLE, RankState.BUSY) and not rank.empty]
    best = min(healthy, key=lambda rank: (rank.since, rank.state is not RankState.IDLE, rank.rank), default=None)
    return None if best is None else best.rank


@dataclass
class CellEntry:
    """One task for some ranks. `running` are the ranks that have it and have not answered.

    `answers` tells what each other one raised, in words; empty if it went well. Together they began `collectives`
    collectives, and `aborted` is whether some of those were broken off. `fills`: see `events.Submit`.
    """

    cell: int
    ranks: tuple[int, ...]
    internal: bool = False
    fills: bool = False
    state: CellState = CellState.QUEUED
    running: set[int] = field(default_factory=set)
    interrupted: bool = False
    answers: dict[int, str] = field(default_factory=dict)
    collectives: int = 0
    aborted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a rank has raised."""
        return any(self.answers.values())
