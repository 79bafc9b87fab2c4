"""State machine and driver of a cluster after reattachment.

`RecoveredState` is the initial state as reattach.py finds it. `RecoveredClusterState` brings the ranks and cells into
it by the regular steps of the transition tables, and is an ordinary `ClusterState` from then on. `ReattachedDriver`
also acknowledges finished cells to the ranks, which keep their messages until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankbook.coordinator import actions as act
from rankbook.coordinator.deadlock import LOOK_AFTER_END
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.running_cell import RunningCell
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import CellEntry as CellOfState
from rankbook.coordinator.states import CellStep, RankStep
from rankbook.launch.environment import abort_grace
from rankbook.launch.launcher import Launcher
from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import Done, FromRank
from rankbook.protocol.reattach import Acknowledge
from rankbook.transport.link import HubLink, Sender


@dataclass(frozen=True)
class RecoveredRank:
    """A rank as it was found. `loss` says how its process ended, if it has."""

    rank: int
    incarnation: int
    loss: str | None = None


@dataclass(frozen=True)
class RecoveredCell:
    """A cell of `ranks` that `running` still run. `internal`: it forms the group. See `states.CellEntry`."""

    cell: int
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    answers: Mapping[int, str]
    collectives: int = 0
    internal: bool = False


@dataclass(frozen=True)
class RecoveredState:
    """Initial state of a reattached cluster.

    `grouped`: all ranks are in one process group or about to be. `stale`: a cell failed meanwhile that may have left
    the ranks at different collectives.
    """

    ranks: tuple[RecoveredRank, ...]
    cells: tuple[RecoveredCell, ...]
    last_cell: int
    generation: int
    grouped: bool
    stale: bool = False


class RecoveredClusterState(ClusterState):
    """A `ClusterState` that starts with live ranks and running cells."""

    def __init__(self, inventory: RecoveredState) -> None:
        super().__init__(len(inventory.ranks), grace=GracePeriods(raised=abort_grace()))
        self._last_cell, self.generation = inventory.last_cell, inventory.generation
        for recovered in inventory.ranks:
            rank = self.ranks[recovered.rank]
            rank.incarnation, rank.loss = recovered.incarnation, recovered.loss
            self._move(rank, RankStep.FORK)
            self._move(rank, RankStep.HELLO if recovered.loss is None else RankStep.EXIT)
        for task in inventory.cells:
            cell = CellOfState(task.cell, task.ranks, internal=task.internal, running=set(task.running))
            cell.answers, cell.collectives = dict(task.answers), task.collectives
            self._step(cell, CellStep.DISPATCH)
            self.cells[task.cell] = cell
            for number in task.running:
                self._move(self.ranks[number], RankStep.TASK)
                self.ranks[number].cell = task.cell
        self.grouped, self._stale = inventory.grouped, inventory.stale

    def resume(self) -> list[act.Action]:
        """Return the first actions: form the group anew if needed, and check collectives soon.

        While no notebook was attached, a rank of a cell may have failed, with others waiting for it since.
        """
        watched = [act.ScheduleCheck(LOOK_AFTER_END)] if any(not cell.internal for cell in self.cells.values()) else []
        return [*watched, *self._regroup_if_complete(), *self._dispatch()]


class ReattachedDriver(Driver):
    """Driver of a kept cluster, whose ranks keep messages until they are acknowledged.

    A cell is acknowledged to its ranks once its end has been shown, and to stragglers once their late `Done` has
    arrived.
    """

    kept = True

    def __init__(
        self, state: ClusterState, hub: HubLink, launcher: Launcher, request: Callable[[int, int, str], ForkRank]
    ) -> None:
        super().__init__(state, hub, launcher, request)
        self._unseen: list[tuple[act.EndCell, tuple[int, ...]]] = []

    def resume(
        self,
        state: RecoveredClusterState,
        cells: Iterable[RunningCell],
        ended: Iterable[RunningCell],
        later: Iterable[tuple[Sender, FromRank, list[memoryview]]],
    ) -> None:
        """Acknowledge the `ended` cells, continue `cells`, handle the `later` messages. Called before `start`."""
        for cell in ended:
            self._say_seen(cell.cell, cell.ranks)
        with self.changed:
            for cell in cells:
                self._cells[cell.cell] = cell
                self._fed.add(cell.cell)
            for action in state.resume():
                self._perform(action)
        for parcel in later:
            self._inbox.take(*parcel)

    def _perform(self, action: act.Action) -> None:
        super()._perform(action)
        if isinstance(action, act.EndCell):
            self._unseen.append((action, self._cells[action.cell].ranks))

    def _end_cells(self) -> None:
        super()._end_cells()
        for pending in [pending for pending in self._unseen if pending[0] not in self._ending]:
            self._unseen.remove(pending)
            action, ranks = pending
            self._say_seen(action.cell, [rank for rank in ranks if rank not in action.stragglers])

    def _done(self, rank: int, incarnation: int, message: Done, frames: list[memoryview]) -> None:
        cell = self._cells.get(message.cell)
        late = cell is None or cell.result is not None
        super()._done(rank, incarnation, message, frames)
        if late:
            self._say_seen(message.cell, (rank,))

    def _say_seen(self, cell: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._hub.send(rank, Acknowledge(cell=cell))
