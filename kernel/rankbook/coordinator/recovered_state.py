"""State machine and driver of a cluster after reattachment.

`RecoveredState` is the initial state as reattach.py finds it. `RecoveredClusterState` brings the ranks and cells into
it by the regular steps of the transition tables, and is an ordinary `ClusterState` from then on. `ReattachedDriver`
also acknowledges finished cells to the ranks, which keep their messages until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankbook.coordinator import actions as act
from rankbook.coordinator.deadlock import CHECK_AFTER_DONE
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.running_cell import RunningCell
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import CellEntry as CellOfState
from rankbook.coordinator.states import CellStep, GracePeriods, RankStep
from rankbook.launch.local import Launcher
from rankbook.launch.placement import abort_grace
from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import Acknowledge, Done, FromRank
from rankbook.transport import HubLink, Sender


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

    def __init__(self, recovered: RecoveredState) -> None:
        super().__init__(len(recovered.ranks), grace=GracePeriods(raised=abort_grace()))
        # The numbers continue, because the ranks identify their messages by them.
        self._last_cell, self.generation = recovered.last_cell, recovered.generation
        for recovered_rank in recovered.ranks:
            rank = self.ranks[recovered_rank.rank]
            rank.incarnation, rank.loss = recovered_rank.incarnation, recovered_rank.loss
            # By the regular steps, so that no state can be set that the tables do not allow.
            self._move(rank, RankStep.FORK)
            self._move(rank, RankStep.HELLO if recovered_rank.loss is None else RankStep.EXIT)
        for task in recovered.cells:
            # The cell keeps its number. Ranks that have ended it are in `answers`.
            cell = CellOfState(task.cell, task.ranks, internal=task.internal, running=set(task.running))
            cell.answers, cell.collectives = dict(task.answers), task.collectives
            self._step(cell, CellStep.DISPATCH)
            self.cells[task.cell] = cell
            for number in task.running:
                self._move(self.ranks[number], RankStep.TASK)
                self.ranks[number].cell = task.cell
        self.grouped, self._stale = recovered.grouped, recovered.stale

    def resume(self) -> list[act.Action]:
        """Return the first actions: form the group anew if needed, and check collectives soon.

        While no notebook was attached, a rank of a cell may have failed, with others waiting for it since.
        """
        checks = [act.ScheduleCheck(CHECK_AFTER_DONE)] if any(not cell.internal for cell in self.cells.values()) else []
        return [*checks, *self._regroup_if_complete(), *self._dispatch()]


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
        self._unacknowledged: list[tuple[act.EndCell, tuple[int, ...]]] = []

    def resume(
        self,
        state: RecoveredClusterState,
        cells: Iterable[RunningCell],
        ended: Iterable[RunningCell],
        later: Iterable[tuple[Sender, FromRank, list[memoryview]]],
    ) -> None:
        """Acknowledge the `ended` cells, continue `cells`, handle the `later` messages. Called before `start`."""
        # Their output has been shown, so the ranks can drop their copies.
        for cell in ended:
            self._acknowledge(cell.cell, cell.ranks)
        # As in `Driver.submit`, the cells are stored before actions are performed on them.
        with self.changed:
            for cell in cells:
                self._cells[cell.cell] = cell
                self._flusher.add(cell.cell)
            for action in state.resume():
                self._perform(action)
        # At last: they are newer than everything that was recovered.
        for received in later:
            self._receiver.take(*received)

    def _perform(self, action: act.Action) -> None:
        super()._perform(action)
        if isinstance(action, act.EndCell):
            # Acknowledged when the driver thread has ended the cell, not now: if this process died in between, the
            # output would be lost.
            self._unacknowledged.append((action, self._cells[action.cell].ranks))

    def _end_cells(self) -> None:
        super()._end_cells()
        # `_ending` contains the cells that are still to be ended.
        for pending in [pending for pending in self._unacknowledged if pending[0] not in self._ending]:
            self._unacknowledged.remove(pending)
            action, ranks = pending
            self._acknowledge(action.cell, [rank for rank in ranks if rank not in action.stragglers])

    def _done(self, rank: int, incarnation: int, message: Done, frames: list[memoryview]) -> None:
        cell = self._cells.get(message.cell)
        # Read before the message is handled, which may end the cell.
        late = cell is None or cell.result is not None
        super()._done(rank, incarnation, message, frames)
        if late:
            self._acknowledge(message.cell, (rank,))

    def _acknowledge(self, cell: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._hub.send(rank, Acknowledge(cell=cell))
