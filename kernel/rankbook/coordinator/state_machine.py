"""State machine of a cluster: `ClusterState` turns events into actions.

It is pure: no sockets, processes, clocks or threads. `ClusterState.handle` takes an event (events.py), changes the
states of ranks and cells, and returns the actions (actions.py) that driver.py performs. The transitions are in the two
tables of states.py; a pair that is missing there raises `IllegalTransition`, whose message contains the recent events
from the `Journal`.

A rank's process is forked, then connects. Once every rank has connected, an internal *regroup* cell puts all ranks into
one process group, ahead of the queued cells. The same cell reconnects the group after an abort, and after any error
that may have left the ranks at different collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import LOOK_AFTER_END, LOOK_EVERY, CollectiveMonitor
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.states import (
    CELL_TABLE,
    RANK_TABLE,
    CellEntry,
    CellState,
    CellStep,
    RankEntry,
    RankState,
    RankStep,
)
from rankbook.errors import IllegalTransition

_ANEW = "collectives were broken off: the process group is formed anew, and models and optimizers go on with it\n"


class ClusterState:
    """State of one cluster of `world_size` ranks.

    `grouped`: all ranks are in one process group, or a regroup cell for it is queued or running. `_stale`: the ranks
    may be at different collectives, so the group is formed anew as soon as all ranks are idle.
    """

    def __init__(self, world_size: int, *, grace: GracePeriods | None = None) -> None:
        self.grace = grace or GracePeriods()
        self.ranks = {rank: RankEntry(rank) for rank in range(world_size)}
        self.cells: dict[int, CellEntry] = {}
        self.grouped = False
        self.generation = 0
        self._stale = False
        self._supervisor = CollectiveMonitor(self.grace)
        self._queue: list[int] = []
        self._last_cell = 0
        self._launches = 0
        self._journal = Journal()

    def new_cell(self) -> int:
        """Return a number for a cell, unique in this cluster."""
        self._last_cell += 1
        return self._last_cell

    def unavailable(self, ranks: Iterable[int]) -> dict[int, RankEntry]:
        """Return those of `ranks` that cannot run a cell and are not being restarted."""
        gone = (RankState.ABSENT, RankState.DEAD, RankState.LEAVING)
        return {
            rank: self.ranks[rank] for rank in ranks if self.ranks[rank].state in gone and not self.ranks[rank].refork
        }

    def handle(self, event: ev.Event) -> list[act.Action]:
        """Apply `event` and return the actions to perform. Raises `IllegalTransition`."""
        self._journal.record(event)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalTransition(f"no handler for {event!r}\n{self._journal.story()}")
        actions = handler(self, event)
        for action in actions:
            self._journal.record(action)
        return actions

    # Ranks

    def _launch(self, event: ev.LaunchRanks) -> list[act.Action]:
        actions: list[act.Action] = []
        self._launches += 1
        alone = len(event.ranks) < len(self.ranks)
        for number in event.ranks:
            rank = self.ranks[number]
            rank.empty, rank.since = alone, self._launches
            if rank.state in (RankState.ABSENT, RankState.DEAD):
                actions += self._fork(rank)
            else:
                rank.refork = True
                actions += self._remove(rank)
        return actions

    def _fork(self, rank: RankEntry) -> list[act.Action]:
        self._move(rank, RankStep.FORK)
        rank.incarnation += 1
        rank.refork, rank.loss, rank.cell = False, None, None
        self.grouped = False
        return [act.Fork(rank.rank, rank.incarnation)]

    def _remove(self, rank: RankEntry) -> list[act.Action]:
        was = rank.state
        self._move(rank, RankStep.REMOVE)
        if rank.state is RankState.ABSENT or was is RankState.LEAVING:
            return []
        return [act.Kill(rank.rank, rank.incarnation, idle=was is RankState.IDLE)]

    def _said_hello(self, event: ev.RankConnected) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation:
            return []
        self._move(rank, RankStep.HELLO)
        return self._regroup_if_complete() + self._dispatch()

    def _state_restored(self, event: ev.StateRestored) -> list[act.Action]:
        for rank in event.ranks:
            self.ranks[rank].empty, self.ranks[rank].since = False, self.ranks[event.donor].since
        return []

    def _regroup_if_complete(self) -> list[act.Action]:
        states = {rank.state for rank in self.ranks.values()}
        if not states <= {RankState.IDLE, RankState.BUSY}:
            return []
        # A stale group waits until all ranks are idle. If one never is, the queued cells run in the stale group.
        if self.grouped and not (self._stale and states == {RankState.IDLE}):
            return []
        self.generation += 1
        self.grouped, self._stale = True, False
        cell = CellEntry(self.new_cell(), tuple(self.ranks), internal=True)
        self.cells[cell.cell] = cell
        self._queue.insert(0, cell.cell)
        return [act.FormGroup(cell.cell, self.generation)]

    def _exited(self, event: ev.RankGone) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation or rank.state in (RankState.ABSENT, RankState.DEAD):
            return []
        expected = rank.state is RankState.LEAVING
        self._move(rank, RankStep.EXIT)
        self.grouped = False
        cell, rank.cell = rank.cell, None
        rank.loss = None if expected else event.words
        actions: list[act.Action] = [act.NotifyRankLost(rank.rank, event.words, cell, expected)]
        self._supervisor.forget(rank.rank)
        if not rank.refork and self._alive():
            # The peers learn the cause at once: a wait that then breaks by itself reports it. The reports that are
            # requested here tell `_nudge_apart` later which ranks wait for the dead one.
            cause = f"rank {rank.rank} {event.words}"
            actions += [act.SendAbort((), (), cause, lost=rank.rank), act.RequestCollectives(self._alive())]
        waiting = () if rank.refork else tuple(self._queue)
        for number in (cell, *waiting):
            if number in self.cells and rank.rank in self.cells[number].ranks:
                actions += self._lose_rank(self.cells[number], rank.rank)
        if rank.refork:
            actions += self._fork(rank)
        return actions + self._dispatch()

    # Cells

    def _submit(self, event: ev.Submit) -> list[act.Action]:
        self.cells[event.cell] = CellEntry(event.cell, event.ranks, fills=event.fills)
        self._queue.append(event.cell)
        actions = self._dispatch()
        if self.cells.get(event.cell) and self.cells[event.cell].state is CellState.QUEUED:
            busy = tuple(rank for rank in event.ranks if self._is_busy(self.ranks[rank]))
            actions.append(act.NotifyQueued(event.cell, busy))
        return actions

    def _is_busy(self, rank: RankEntry) -> bool:
        """Return True if the rank is busy from the user's point of view, who does not see internal cells."""
        cell = self.cells.get(rank.cell) if rank.cell is not None else None
        return rank.state is not RankState.IDLE and not (cell is not None and cell.internal)

    def _alive(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks.values() if rank.state in (RankState.IDLE, RankState.BUSY))

    def _dispatch(self) -> list[act.Action]:
        """Start every queued cell whose ranks are all idle and not needed by an earlier cell.

        A cell that cannot start reserves its ranks, so that later cells do not overtake it. Cells on disjoint ranks run
        at the same time.
        """
        actions: list[act.Action] = []
        needed: set[int] = set()
        for number in tuple(self._queue):
            cell = self.cells[number]
            if not needed.isdisjoint(cell.ranks) or any(self.ranks[r].state is not RankState.IDLE for r in cell.ranks):
                needed.update(cell.ranks)
                continue
            self._queue.remove(number)
            self._step(cell, CellStep.DISPATCH)
            cell.running = set(cell.ranks)
            for rank in cell.ranks:
                self._move(self.ranks[rank], RankStep.TASK)
                self.ranks[rank].cell = number
            actions.append(act.SendTask(number, cell.ranks))
            if not cell.internal:
                actions.append(act.ScheduleCheck(LOOK_EVERY))
        return actions

    def _done(self, event: ev.CellDone) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation or rank.cell != event.cell:
            return []
        self._move(rank, RankStep.DONE)
        rank.cell = None
        actions: list[act.Action] = []
        cell = self.cells.get(event.cell)
        if cell is not None:
            cell.running.discard(event.rank)
            cell.answers[event.rank] = event.words if event.failed else ""
            cell.collectives += event.collectives
            if cell.fills and not event.failed and not rank.refork:
                rank.empty = False
            if cell.internal and event.failed:
                self.grouped = False
            actions += self._end_if_complete(cell)
            if cell.running and not cell.internal:
                actions.append(act.ScheduleCheck(LOOK_AFTER_END))
        elif event.collectives:  # late reply: the rank may have diverged, so the group is stale
            self._stale = True
        if self._stale:
            actions += self._regroup_if_complete()
        return actions + self._dispatch()

    def _lose_rank(self, cell: CellEntry, rank: int) -> list[act.Action]:
        if cell.state is CellState.QUEUED:
            self._queue.remove(cell.cell)
            self._step(cell, CellStep.RANK_LOST)
            return self._end(cell)
        cell.running.discard(rank)
        first = cell.state is CellState.RUNNING
        self._step(cell, CellStep.RANK_LOST)
        ended = self._end_if_complete(cell)
        if ended or not first:
            return ended
        # The first death in a running cell. The other ranks may end by themselves, for example with the error of a
        # broken connection. Those that do not are interrupted, then aborted, then left behind as stragglers.
        return [
            act.StartTimer(cell.cell, self.grace.death_interrupt, "nudge"),
            act.StartTimer(cell.cell, self.grace.death_abort, "abort"),
            act.StartTimer(cell.cell, self.grace.death_release, "release"),
        ]

    def _interrupt(self, event: ev.InterruptCell) -> list[act.Action]:
        cell = self.cells.get(event.cell)
        if cell is None:  # released already: interrupt its stragglers once more
            stragglers = tuple(rank.rank for rank in self.ranks.values() if rank.cell == event.cell)
            return [act.SendInterrupt(event.cell, stragglers)] if stragglers else []
        if cell.internal:
            return []
        was = cell.state
        self._step(cell, CellStep.INTERRUPT)
        cell.interrupted = True
        if was is CellState.QUEUED:
            self._queue.remove(cell.cell)
        if cell.state is CellState.ENDED:
            return [*self._nudge(cell), *self._end(cell), *self._dispatch()]
        return [
            *self._nudge(cell),
            act.StartTimer(cell.cell, self.grace.interrupt_abort, "abort"),
            act.StartTimer(cell.cell, self.grace.interrupt_release, "release"),
        ]

    def _grace_over(self, event: ev.TimerFired) -> list[act.Action]:
        cell = self.cells.get(event.cell)
        if cell is None or cell.state is not CellState.ENDING:
            return []
        match event.step:
            case "nudge":
                return self._nudge_apart(cell)
            case "abort":
                return self._abort(cell, tuple(sorted(cell.running)))
            case "release":
                self._step(cell, CellStep.RELEASE)
                return self._end(cell)

    def _nudge_apart(self, cell: CellEntry) -> list[act.Action]:
        """After the death of a rank, abort the ranks that wait for it in a collective and interrupt the others."""
        lost = self._lost(cell)
        waiting = tuple(sorted(cell.running & self._supervisor.waiting_for(lost)))
        others = tuple(sorted(cell.running.difference(waiting)))
        nudges: list[act.Action] = [act.SendInterrupt(cell.cell, others)] if others else []
        return self._abort(cell, waiting) + nudges

    def _abort(self, cell: CellEntry, ranks: tuple[int, ...]) -> list[act.Action]:
        if not ranks:
            return []
        lost = min(self._lost(cell), default=None)
        reason = (
            "the cell was interrupted" if lost is None else f"rank {lost} {self.ranks[lost].loss or 'was restarted'}"
        )
        cell.aborted = True
        return [act.SendAbort(ranks, (), reason)]

    def _lost(self, cell: CellEntry) -> set[int]:
        """Return the cell's ranks that are dead, or whose process ended during the cell and may have been replaced."""
        dead = {rank for rank in cell.ranks if self.ranks[rank].state is RankState.DEAD}
        return dead | set(cell.ranks).difference(cell.running, cell.answers)

    def _told(self, event: ev.CollectivesReceived) -> list[act.Action]:
        if event.incarnation == self.ranks[event.rank].incarnation:
            self._supervisor.hear(event.rank, event.told)
        return []

    def _look(self, event: ev.CheckCollectives) -> list[act.Action]:
        return self._supervisor.look(event.now, self.ranks, self.cells)

    def _nudge(self, cell: CellEntry) -> list[act.Action]:
        return [act.SendInterrupt(cell.cell, tuple(sorted(cell.running)))] if cell.running else []

    def _end_if_complete(self, cell: CellEntry) -> list[act.Action]:
        if cell.running:
            return []
        self._step(cell, CellStep.LAST_DONE)
        return self._end(cell)

    def _end(self, cell: CellEntry) -> list[act.Action]:
        del self.cells[cell.cell]
        # If not all ranks have answered successfully, they may have started different numbers of collectives. A later
        # collective would then hang or pair up wrongly, so the group is formed anew.
        unsure = cell.failed or cell.interrupted or bool(cell.running) or len(cell.answers) < len(cell.ranks)
        self._stale = self._stale or cell.aborted or (unsure and cell.collectives > 0 and not cell.internal)
        broken = cell.aborted or any("CollectiveAborted" in answer for answer in cell.answers.values())
        notices = [act.NotifyUser(cell.cell, _ANEW)] if broken and self._alive() == tuple(self.ranks) else []
        return [*notices, act.EndCell(cell.cell, tuple(sorted(cell.running)), cell.interrupted)]

    def _stop(self, _event: ev.Stop) -> list[act.Action]:
        actions: list[act.Action] = []
        for number in tuple(self.cells):
            cell = self.cells.pop(number)
            cell.interrupted = True
            actions.append(act.EndCell(number, (), interrupted=True))
        self._queue.clear()
        for rank in self.ranks.values():
            rank.refork = False
            actions += self._remove(rank)
        return actions

    # Tables

    def _move(self, rank: RankEntry, step: RankStep) -> None:
        after = RANK_TABLE[rank.state].get(step)
        if after is None:
            raise IllegalTransition(f"rank {rank.rank} is {rank.state.name}: no {step.name}\n{self._journal.story()}")
        rank.state = after

    def _step(self, cell: CellEntry, step: CellStep) -> None:
        after = CELL_TABLE[cell.state].get(step)
        if after is None:
            raise IllegalTransition(f"cell {cell.cell} is {cell.state.name}: no {step.name}\n{self._journal.story()}")
        cell.state = after


_HANDLERS: dict[type, Callable[[ClusterState, Any], list[act.Action]]] = {
    ev.LaunchRanks: ClusterState._launch,
    ev.RankConnected: ClusterState._said_hello,
    ev.RankGone: ClusterState._exited,
    ev.StateRestored: ClusterState._state_restored,
    ev.Submit: ClusterState._submit,
    ev.CellDone: ClusterState._done,
    ev.CollectivesReceived: ClusterState._told,
    ev.CheckCollectives: ClusterState._look,
    ev.InterruptCell: ClusterState._interrupt,
    ev.TimerFired: ClusterState._grace_over,
    ev.Stop: ClusterState._stop,
}


class Journal:
    """Ring buffer of the last `length` events and actions, for error messages."""

    def __init__(self, length: int = 200) -> None:
        self._entries: deque[object] = deque(maxlen=length)

    def record(self, entry: object) -> None:
        """Store one event or action. It is formatted only when `story` is called."""
        self._entries.append(entry)

    def story(self, newest: int = 20) -> str:
        """Return the newest entries, oldest first, one per line."""
        return "\n".join(f"  {entry!r}" for entry in list(self._entries)[-newest:])
