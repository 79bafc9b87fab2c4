"""State machine of a cluster: `ClusterState` turns events into actions.

It is pure: no sockets, processes, clocks or threads. `ClusterState.handle` takes an event (events.py), changes the
states of ranks and cells, and returns the actions (actions.py) that driver.py performs. The transitions are in the two
tables of states.py; a pair that is missing there raises `IllegalTransition`, whose message contains the recent events
from the `Journal`.

A rank's process is forked, then connects. Once every rank has connected, an internal *regroup* cell puts all ranks into
one process group, ahead of the queued cells. The same cell reconnects the group after an abort, and after any error
that may have left the ranks at different collectives.

After a reattachment, `RecoveredClusterState` starts with the ranks and cells that reattach.py finds (`RecoveredState`).
It brings them into their states by the regular steps of the tables, and is an ordinary `ClusterState` from then on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import CHECK_AFTER_DONE, CHECK_INTERVAL, CollectiveMonitor
from rankbook.coordinator.recovery import describe_places
from rankbook.coordinator.states import (
    CELL_TABLE,
    RANK_TABLE,
    CellEntry,
    CellState,
    CellStep,
    GracePeriods,
    RankEntry,
    RankState,
    RankStep,
)
from rankbook.errors import IllegalTransition, RankLostError
from rankbook.ranks import format_ranks, name_ranks

_REQUEST_INTERVAL = 0.05
"""Seconds between two requests for reports that follow from exits; less than half of `GracePeriods.death_interrupt`."""
_INTERRUPTED = "the cell was interrupted"
_SPARED = (
    "until the device has executed what is queued; a second interrupt (■) cuts that short, and may cost the optimizer "
    "steps in it"
)
_REGROUPED = "the process group is re-formed, and models and optimizers continue to use it\n"


class ClusterState:
    """State of one cluster of `world_size` ranks.

    `grouped`: all ranks are in one process group, or a regroup cell for it is queued or running. `_stale`: the ranks
    may be at different collectives, so the group is formed anew as soon as all ranks are idle.
    """

    def __init__(self, world_size: int, *, grace: GracePeriods | None = None) -> None:
        self.grace = grace or GracePeriods()
        self.ranks = {rank: RankEntry(rank) for rank in range(world_size)}
        # Number of ranks per state, so that an event of one rank does not look at all ranks.
        self._state_counts = Counter({RankState.ABSENT: world_size})
        self.cells: dict[int, CellEntry] = {}
        self.grouped = False
        self.generation = 0
        self._stale = False
        # Why ranks have exited, of which their peers were not told yet.
        self._unreported_losses: dict[int, str] = {}
        self._next_request = -math.inf
        self._collective_monitor = CollectiveMonitor(self.grace)
        # Whether a check was scheduled after a `Done` and has not come yet: another one would not be earlier.
        self._check_is_near = False
        self._queue: list[int] = []
        self._last_cell = 0
        self._launches = 0
        # True from a change of the number of ranks until all ranks have left the groups of the number before.
        self._anew = False
        # Ended cells of which some ranks still wait for their devices, see `CellEntry.spared`.
        self._spared: set[int] = set()
        # The last incarnations of ranks that do not exist any more: their numbers must not be used again.
        self._former_incarnations: dict[int, int] = {}
        self._journal = Journal()

    def new_cell(self) -> int:
        """Return a number for a cell, unique in this cluster."""
        self._last_cell += 1
        return self._last_cell

    def unavailable(self, ranks: Iterable[int]) -> dict[int, RankEntry]:
        """Return those of `ranks` that cannot run a cell and are not being restarted."""
        # A rank that leaves in order to be restarted (`refork`) will run the cell later, so it counts as available.
        unavailable = (RankState.ABSENT, RankState.DEAD, RankState.LEAVING)
        return {
            rank: self.ranks[rank]
            for rank in ranks
            if self.ranks[rank].state in unavailable and not self.ranks[rank].refork
        }

    def check_available(self, ranks: Iterable[int]) -> None:
        """Raise `RankLostError` if some of `ranks` are `unavailable`."""
        unavailable = self.unavailable(ranks)
        if not unavailable:
            return
        first = next(iter(unavailable.values()))
        reason = f"rank {first.rank} {first.loss or 'is not running'}"
        more = (
            f" (and {name_ranks([rank for rank in unavailable if rank != first.rank])})" if len(unavailable) > 1 else ""
        )
        # The ranks that a selection could name instead.
        alive = [rank for rank in self.ranks if rank not in self.unavailable(self.ranks)]
        pronoun = "it" if len(unavailable) == 1 else "them"
        rest = f", --ranks {format_ranks(alive)} runs without {pronoun}" if alive else ""
        empty = f"%distributed restart {format_ranks(unavailable)} starts {pronoun} with an empty namespace"
        # Without another rank, there are no variables to restore.
        heal = f"%distributed heal restores {pronoun}, " if alive else ""
        raise RankLostError(f"{reason}{more}; {heal}{empty}{rest}", tuple(unavailable))

    def handle(self, event: ev.Event) -> list[act.Action]:
        """Apply `event` and return the actions to perform. Raises `IllegalTransition`."""
        # Recorded before it is handled, so that the message of an `IllegalTransition` ends with the event that raised
        # it.
        self._journal.record(event)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalTransition(f"no handler for {event!r}\n{self._journal.recent_events()}")
        actions = handler(self, event)
        for action in actions:
            self._journal.record(action)
        return actions

    # Ranks
    #
    # A process is forked, connects (`RankConnected`) and ends (`RankGone`). An event names the incarnation that it is
    # about, and events of earlier ones are ignored, because their processes may still send when the new one runs.

    def _launch(self, event: ev.LaunchRanks) -> list[act.Action]:
        actions: list[act.Action] = []
        self._launches += 1
        # Ranks that start together have the same (empty) namespace. A rank that starts alone lacks what the others have
        # defined, so that `heal` must not copy from it.
        partial = len(event.ranks) < len(self.ranks)
        for number in event.ranks:
            rank = self.ranks[number]
            rank.empty, rank.since = partial, self._launches
            if rank.state in (RankState.ABSENT, RankState.DEAD):
                actions += self._fork(rank)
            # The old process has to end first: both would use the same devices, and the forkserver reports exits by
            # rank. `_rank_exited` forks the new one.
            else:
                rank.refork = True
                actions += self._remove(rank)
        return actions

    def _fork(self, rank: RankEntry) -> list[act.Action]:
        self._move(rank, RankStep.FORK)
        rank.incarnation += 1
        rank.refork, rank.loss, rank.cell, rank.lost_device = False, None, None, ""
        # The new process is in no group, and the others cannot use theirs without it.
        self.grouped = False
        return [act.Fork(rank.rank, rank.incarnation)]

    def _remove(self, rank: RankEntry) -> list[act.Action]:
        previous = rank.state
        self._move(rank, RankStep.REMOVE)
        # It has no process, or was already told to exit.
        if rank.state is RankState.ABSENT or previous is RankState.LEAVING:
            return []
        # An idle rank can exit gracefully. In a busy one the user's code has the main thread, so it is killed.
        return [act.Kill(rank.rank, rank.incarnation, idle=previous is RankState.IDLE)]

    def _rank_connected(self, event: ev.RankConnected) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation:
            return []
        self._move(rank, RankStep.HELLO)
        return self._regroup_if_complete() + self._dispatch()

    # After heal the rank has the variables of the donor, so for the choice of a later donor it is as old as that one.
    def _state_restored(self, event: ev.StateRestored) -> list[act.Action]:
        for rank in event.ranks:
            self.ranks[rank].empty, self.ranks[rank].since = False, self.ranks[event.donor].since
        return []

    def _has_lost_device(self) -> bool:
        return any(rank.lost_device for rank in self.ranks.values())

    def _regroup_if_complete(self) -> list[act.Action]:
        # Every rank has to run. The method is called again when the last missing one has connected.
        idle = self._state_counts[RankState.IDLE]
        if idle + self._state_counts[RankState.BUSY] < len(self.ranks):
            return []
        # A rank without its device cannot be connected. The others go on without the group until it is replaced.
        if self._has_lost_device():
            return []
        # A stale group waits until all ranks are idle. If one never is, the queued cells run in the stale group.
        if self.grouped and not (self._stale and idle == len(self.ranks)):
            return []
        # The keys of a group in the store begin with its generation, so that two generations cannot be confused.
        self.generation += 1
        self.grouped, self._stale = True, False
        cell = CellEntry(self.new_cell(), tuple(self.ranks), internal=True)
        self.cells[cell.cell] = cell
        # Ahead of the queued cells, which need the group. All ranks take part, so no other cell runs at the same time.
        self._queue.insert(0, cell.cell)
        return [act.FormGroup(cell.cell, self.generation, self._anew)]

    def reserve_incarnations(self, incarnations: Mapping[int, int]) -> None:
        """Note processes of ranks that do not exist: later ones of these ranks have higher numbers."""
        self._former_incarnations.update(incarnations)

    def _remove_ranks(self, event: ev.RemoveRanks) -> list[act.Action]:
        return [action for number in event.ranks for action in self._remove(self.ranks[number])]

    # A new table instead of a changed one: other threads may iterate over it.
    def _resize_world(self, event: ev.ResizeWorld) -> list[act.Action]:
        for number, rank in self.ranks.items():
            if number >= event.world_size:
                if rank.state not in (RankState.ABSENT, RankState.DEAD):
                    raise IllegalTransition(f"rank {number} is {rank.state.name}\n{self._journal.recent_events()}")
                self._state_counts[rank.state] -= 1
                self._former_incarnations[number] = rank.incarnation
        new = range(len(self.ranks), event.world_size)
        self._state_counts[RankState.ABSENT] += len(new)
        added = {number: RankEntry(number, incarnation=self._former_incarnations.get(number, 0)) for number in new}
        self.ranks = {number: rank for number, rank in self.ranks.items() if number < event.world_size} | added
        self.grouped, self._anew = False, True
        self._unreported_losses.clear()  # nobody is in a group with these ranks any more
        return [act.ReplaceRanks(), *self._regroup_if_complete(), *self._dispatch()]

    # A process has ended: the rank leaves its cell and the group, its peers are told, and the cells that need it fail
    # or, if the rank is being restarted, wait.
    def _rank_exited(self, event: ev.RankGone) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation or rank.state in (RankState.ABSENT, RankState.DEAD):
            return []
        # A rank in state LEAVING was asked or forced to exit. Any other end is a loss, which the user is told.
        expected = rank.state is RankState.LEAVING
        self._move(rank, RankStep.EXIT)
        self.grouped = False
        cell, rank.cell = rank.cell, None
        rank.loss = None if expected else event.reason
        # `restart` kills a busy rank. Its signal would read as if memory had run out.
        reason = "was restarted" if expected and rank.refork else event.reason
        actions: list[act.Action] = [act.NotifyRankLost(rank.rank, reason, cell, expected)]
        self._collective_monitor.forget(rank.rank)
        # Not `live_ranks`: with 1,000 ranks it takes as long as the rest of this method.
        if not rank.refork and self._state_counts[RankState.IDLE] + self._state_counts[RankState.BUSY]:
            self._unreported_losses[rank.rank] = f"rank {rank.rank} {event.reason}"
            actions.append(act.ScheduleLossReport())
        # Queued cells wait for a rank that is being restarted. They fail if it is gone for good.
        waiting = () if rank.refork else tuple(self._queue)
        for number in (cell, *waiting):
            if number in self.cells and rank.rank in self.cells[number].ranks:
                actions += self._lose_rank(self.cells[number], rank.rank)
        if rank.refork:
            # After the running cell has lost the rank, so that it does not count the new process among its ranks.
            actions += self._fork(rank)
        return actions + self._dispatch()

    # Many ranks may exit at once, and every message that follows from an exit goes to all others. One report of all
    # exits that have been received makes the costs of many exits linear in the number of ranks.
    def _report_losses(self, event: ev.LossReportDue) -> list[act.Action]:
        causes, self._unreported_losses = tuple(self._unreported_losses.items()), {}
        live = self.live_ranks()
        if not causes or not live:
            return []
        # The peers learn the causes at once: a wait that then breaks by itself reports them.
        actions: list[act.Action] = [act.SendLosses(live, causes)]
        # The reports tell `_interrupt_after_death` later which ranks wait for the dead ones. Those of a moment ago say
        # the same, unless a rank has begun its wait since; the next check requests newer ones.
        if event.now >= self._next_request:
            self._next_request = event.now + _REQUEST_INTERVAL
            actions.append(act.RequestCollectives(live))
        else:
            actions.append(act.ScheduleCheck(self._next_request - event.now))
        return actions

    # Cells
    #
    # A cell is queued, dispatched to all of its ranks at once, and ends when the last rank has answered. If it is
    # interrupted or loses a rank, it is ENDING: the timers of the grace periods interrupt it, abort its collectives and
    # at last release it. Released, it ends for the user, while some ranks (stragglers) may still run it. Those ranks
    # stay BUSY, so no later cell is sent to them.

    def _submit(self, event: ev.Submit) -> list[act.Action]:
        self.cells[event.cell] = CellEntry(event.cell, event.ranks, defines_variables=event.defines_variables)
        self._queue.append(event.cell)
        actions = [] if self.grouped else self._regroup_if_complete()  # an earlier attempt failed: try again
        actions += self._dispatch()
        if self.cells.get(event.cell) and self.cells[event.cell].state is CellState.QUEUED:
            busy = tuple(rank for rank in event.ranks if self.is_busy(self.ranks[rank]))
            actions.append(act.NotifyQueued(event.cell, busy))
        return actions

    def is_busy(self, rank: RankEntry) -> bool:
        """Return True if the rank is busy from the user's point of view, who does not see internal cells."""
        cell = self.cells.get(rank.cell) if rank.cell is not None else None
        return rank.state is not RankState.IDLE and not (cell is not None and cell.internal)

    def _are_idle(self, ranks: Iterable[int]) -> bool:
        return all(self.ranks[rank].state is RankState.IDLE for rank in ranks)

    def live_ranks(self) -> tuple[int, ...]:
        """Return the ranks that can answer a query: those that are idle or busy."""
        # Called after every death. The look-up of a state's name would take most of the time.
        idle, busy = RankState.IDLE, RankState.BUSY
        return tuple([rank.rank for rank in self.ranks.values() if rank.state is idle or rank.state is busy])

    # Example: a cell runs on ranks 0-1; a cell for ranks 0-3 is queued, and after it one for ranks 2-3. The last one
    # could run at once, but it waits. Otherwise a stream of cells for ranks 2-3 could keep the cell for all ranks from
    # ever starting.
    def _dispatch(self) -> list[act.Action]:
        """Start every queued cell whose ranks are all idle and not needed by an earlier cell.

        A cell that cannot start reserves its ranks, so that later cells do not overtake it. Cells on disjoint ranks run
        at the same time.
        """
        actions: list[act.Action] = []
        needed: set[int] = set()
        for number in tuple(self._queue):
            cell = self.cells[number]
            # The number first: the states of 1,000 ranks would be looked at after the reply of each of them.
            too_few = self._state_counts[RankState.IDLE] < len(cell.ranks)
            if too_few or not needed.isdisjoint(cell.ranks) or not self._are_idle(cell.ranks):
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
                self._check_is_near = False  # it replaces a check that is due
                actions.append(act.ScheduleCheck(CHECK_INTERVAL))
        return actions

    def _cell_done(self, event: ev.CellDone) -> list[act.Action]:
        rank = self.ranks[event.rank]
        if event.incarnation != rank.incarnation or rank.cell != event.cell:
            return []
        self._move(rank, RankStep.DONE)
        rank.cell = None
        rank.lost_device = event.lost_device or rank.lost_device
        actions: list[act.Action] = []
        # None: the cell was released or stopped, and the rank was a straggler.
        cell = self.cells.get(event.cell)
        if cell is not None:
            cell.running.discard(event.rank)
            cell.answers[event.rank] = event.reason if event.failed else ""
            if event.place is not None:
                cell.places[event.rank] = event.place
            # Summed over all ranks. Zero means that no rank can have diverged from the others.
            cell.collectives += event.collectives
            self._collective_monitor.record_groups(event.rank, event.groups)
            # The rank has run a cell of its own and so has variables that are worth keeping. It may be a donor from now
            # on.
            if cell.defines_variables and not event.failed and not rank.refork:
                rank.empty = False
            # The group could not be formed. The next submitted cell tries again (`_submit`), not this event: an error
            # that persists would repeat without end. After a death, the next attempt may be queued already.
            if cell.internal and event.failed:
                self.grouped = any(other.internal for other in self.cells.values() if other is not cell)
            actions += self._end_if_complete(cell)
            if cell.internal and event.failed and cell.state is CellState.RUNNING:
                # The others would wait for it until their timeouts.
                self._step(cell, CellStep.RANK_FAILED)
                actions += self._start_death_timers(cell)
            # The other ranks may now wait for this one in a collective, so they are checked soon.
            if cell.running and not cell.internal and not self._check_is_near:
                self._check_is_near = True
                actions.append(act.ScheduleCheck(CHECK_AFTER_DONE))
        elif event.collectives:  # late reply: the rank may have diverged, so the group is stale
            self._stale = True
        # All ranks may be idle now, which is what a stale group waits for.
        if self._stale:
            actions += self._regroup_if_complete()
        return actions + self._dispatch()

    def _lose_rank(self, cell: CellEntry, rank: int) -> list[act.Action]:
        # It has not run anywhere, so there are no peers to interrupt. It ends at once.
        if cell.state is CellState.QUEUED:
            self._queue.remove(cell.cell)
            self._step(cell, CellStep.RANK_LOST)
            return self._end(cell)
        cell.running.discard(rank)
        # A second death finds the cell ENDING already. Its timers run, and must not be started twice.
        first = cell.state is CellState.RUNNING
        self._step(cell, CellStep.RANK_LOST)
        ended = self._end_if_complete(cell)
        if ended or not first:
            return ended
        # The first death in a running cell.
        return self._start_death_timers(cell)

    def _start_death_timers(self, cell: CellEntry) -> list[act.Action]:
        """End a cell that one of its ranks cannot complete.

        The other ranks may end by themselves, for example with the error of a broken connection. Those that do not are
        interrupted, then aborted, then left behind as stragglers.
        """
        return [
            act.StartTimer(cell.cell, self.grace.death_interrupt, "interrupt"),
            act.StartTimer(cell.cell, self.grace.death_abort, "abort"),
            act.StartTimer(cell.cell, self.grace.death_release, "release"),
        ]

    def _interrupt(self, event: ev.InterruptCell) -> list[act.Action]:
        cell = self.cells.get(event.cell)
        if cell is None:  # released already: interrupt its stragglers once more
            stragglers = tuple(rank.rank for rank in self.ranks.values() if rank.cell == event.cell)
            actions: list[act.Action] = [act.SendInterrupt(event.cell, stragglers)] if stragglers else []
            if stragglers and event.cell in self._spared:
                self._spared.discard(event.cell)
                self._stale = True
                actions.append(act.SendAbort(stragglers, (), _INTERRUPTED))
            return actions
        # The user's interrupt must not break the formation of the group, which the ranks need to become usable again.
        if cell.internal:
            return []
        previous = cell.state
        self._step(cell, CellStep.INTERRUPT)
        cell.interrupted = True
        # Removed from the queue before `_dispatch` below, which would start it.
        if previous is CellState.QUEUED:
            self._queue.remove(cell.cell)
        # Either it was queued, or this is the second interrupt. It ends at once for the user, and ranks that still run
        # it become stragglers.
        if cell.state is CellState.ENDED:
            # Whoever interrupts again, after a look at `_SPARED`, does not want to wait for a device.
            aborts = self._abort(cell, tuple(sorted(cell.running))) if cell.spared else []
            cell.spared = False
            return [*self._interrupt_running(cell), *aborts, *self._end(cell), *self._dispatch()]
        return [
            *self._interrupt_running(cell),
            *self._collective_monitor.request(self.ranks),  # for `_abort_unreached`
            act.StartTimer(cell.cell, self.grace.interrupt_abort, "abort"),
            act.StartTimer(cell.cell, self.grace.interrupt_release, "release"),
        ]

    def _timer_fired(self, event: ev.TimerFired) -> list[act.Action]:
        # Timers are not cancelled. One that fires too late finds the cell gone and does nothing.
        cell = self.cells.get(event.cell)
        if cell is None or cell.state is not CellState.ENDING:
            return []
        match event.step:
            case "interrupt":
                return self._interrupt_after_death(cell)
            case "abort":
                return self._abort_unreached(cell)
            case "release":
                self._step(cell, CellStep.RELEASE)
                return self._end(cell)

    def _interrupt_after_death(self, cell: CellEntry) -> list[act.Action]:
        """After the death of a rank, abort the ranks that wait for it in a collective and interrupt the others."""
        # An aborted wait raises an error that names the dead rank, which tells the user more than KeyboardInterrupt.
        lost_ranks = self._lost_ranks(cell)
        waiting = tuple(sorted(cell.running & self._collective_monitor.waiting_for(lost_ranks)))
        not_waiting = tuple(sorted(cell.running.difference(waiting)))
        interrupts: list[act.Action] = [act.SendInterrupt(cell.cell, not_waiting)] if not_waiting else []
        return self._abort(cell, waiting) + interrupts

    def _abort_unreached(self, cell: CellEntry) -> list[act.Action]:
        """Abort the ranks that an interrupt has not reached, except those that wait for a device that is only behind.

        The latter are looked at again, until the cell is released.
        """
        behind = self._collective_monitor.only_behind(cell.running)
        actions = self._abort(cell, tuple(sorted(cell.running - behind)))
        if behind:
            if not cell.spared:
                text = f"{name_ranks(sorted(behind))} {'waits' if len(behind) == 1 else 'wait'} {_SPARED}\n"
                actions.append(act.NotifyUser(cell.cell, text))
            cell.spared = True
            actions += self._collective_monitor.request(self.ranks)
            actions.append(act.StartTimer(cell.cell, self.grace.interrupt_abort, "abort"))
        return actions

    def _abort(self, cell: CellEntry, ranks: tuple[int, ...]) -> list[act.Action]:
        if not ranks:
            return []
        lost_rank = min(self._lost_ranks(cell), default=None)
        if lost_rank is not None:
            reason = f"rank {lost_rank} {self.ranks[lost_rank].loss or 'was restarted'}"
        elif cell.internal:  # a rank could not form the group
            reason = next((f"rank {rank} {failure}" for rank, failure in cell.answers.items() if failure), _INTERRUPTED)
        else:
            reason = _INTERRUPTED
        cell.aborted = True
        return [act.SendAbort(ranks, (), reason)]

    def _lost_ranks(self, cell: CellEntry) -> set[int]:
        """Return the cell's ranks that are dead, or whose process ended during the cell and may have been replaced."""
        dead = {rank for rank in cell.ranks if self.ranks[rank].state is RankState.DEAD}
        return dead | set(cell.ranks).difference(cell.running, cell.answers)

    # The detection itself is in deadlock.py. These methods pass the states of ranks and cells to it.
    def _collectives_received(self, event: ev.CollectivesReceived) -> list[act.Action]:
        if event.incarnation == self.ranks[event.rank].incarnation:
            self._collective_monitor.record_report(event.rank, event.report)
            return self._collective_monitor.react(event.rank, self.ranks, self.cells)
        return []

    def _check_collectives(self, event: ev.CheckCollectives) -> list[act.Action]:
        self._check_is_near = False
        actions = self._collective_monitor.check(event.now, self.ranks, self.cells)
        if any(isinstance(action, act.RequestCollectives) for action in actions):
            self._next_request = event.now + _REQUEST_INTERVAL  # an exit need not request the same again
        return actions

    def _interrupt_running(self, cell: CellEntry) -> list[act.Action]:
        return [act.SendInterrupt(cell.cell, tuple(sorted(cell.running)))] if cell.running else []

    def _end_if_complete(self, cell: CellEntry) -> list[act.Action]:
        if cell.running:
            return []
        self._step(cell, CellStep.LAST_DONE)
        return self._end(cell)

    def _end(self, cell: CellEntry) -> list[act.Action]:
        # First: from now on an answer for this cell is late, and events for it are ignored.
        del self.cells[cell.cell]
        if cell.spared and cell.running:
            self._spared.add(cell.cell)
        if cell.internal and not cell.failed and len(cell.answers) == len(cell.ranks):
            self._anew = False
        mismatch, notices = self._compare_collectives(cell)
        # If not all ranks have answered successfully, they may have started different numbers of collectives. A later
        # collective would then hang or pair up wrongly, so the group is formed anew.
        unsure = cell.failed or cell.interrupted or bool(cell.running) or len(cell.answers) < len(cell.ranks)
        # Not after an attempt to form it that has failed: see `_cell_done`.
        self._stale = self._stale or (not cell.internal and (cell.aborted or (unsure and cell.collectives > 0)))
        broken = cell.aborted or any("CollectiveAborted" in answer for answer in cell.answers.values())
        # If a rank or its device is missing, the group is not formed before the rank is replaced.
        is_complete = self.live_ranks() == tuple(self.ranks) and not self._has_lost_device()
        if (broken or mismatch) and is_complete and not cell.internal:
            why = "collectives were aborted" if broken else "collectives did not match"
            notices.append(act.NotifyUser(cell.cell, f"{why}: {_REGROUPED}"))
        # A rank that is dead or still runs the cell has no place. `heal` is needed anyway, or can do nothing yet.
        if unsure and len(cell.places) == len(cell.ranks) and (text := describe_places(cell.places)):
            notices.append(act.NotifyUser(cell.cell, f"{text}\n"))
        return [*notices, act.EndCell(cell.cell, tuple(sorted(cell.running)), cell.interrupted, mismatch)]

    def _compare_collectives(self, cell: CellEntry) -> tuple[str, list[act.Action]]:
        """Compare the collectives of a cell that ends, also those that the ranks have completed.

        Return the reason why the cell fails although no rank has raised, and the notes that are due.
        """
        if cell.internal or not cell.collectives:
            return "", []
        succeeded = not (cell.failed or cell.interrupted or cell.running) and len(cell.answers) == len(cell.ranks)
        mismatch = self._collective_monitor.finished_mismatch(cell, len(self.ranks))
        if mismatch is None:
            return "", []
        # The ranks may be at different collectives, even if none of them has raised.
        self._stale = True
        # No rank noticed the mismatch, so the cell must fail: its results are wrong. If a rank has raised, the cell
        # fails anyway, and the mismatch is shown as a note unless the user has seen it while the cell ran.
        if succeeded:
            return mismatch.describe(), []
        if self._collective_monitor.was_reported(mismatch):
            return "", []
        return "", [act.NotifyUser(cell.cell, f"{mismatch.describe()}\n")]

    # All cells end first, without stragglers: the callers that wait for them return at once. Then the ranks are
    # removed.
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
            raise IllegalTransition(
                f"rank {rank.rank} is {rank.state.name} and does not accept {step.name}\n"
                f"{self._journal.recent_events()}"
            )
        self._state_counts[rank.state] -= 1
        self._state_counts[after] += 1
        rank.state = after

    def _step(self, cell: CellEntry, step: CellStep) -> None:
        after = CELL_TABLE[cell.state].get(step)
        if after is None:
            raise IllegalTransition(
                f"cell {cell.cell} is {cell.state.name} and does not accept {step.name}\n"
                f"{self._journal.recent_events()}"
            )
        cell.state = after


_HANDLERS: dict[type, Callable[[ClusterState, Any], list[act.Action]]] = {
    ev.LaunchRanks: ClusterState._launch,
    ev.RankConnected: ClusterState._rank_connected,
    ev.RankGone: ClusterState._rank_exited,
    ev.LossReportDue: ClusterState._report_losses,
    ev.StateRestored: ClusterState._state_restored,
    ev.RemoveRanks: ClusterState._remove_ranks,
    ev.ResizeWorld: ClusterState._resize_world,
    ev.Submit: ClusterState._submit,
    ev.CellDone: ClusterState._cell_done,
    ev.CollectivesReceived: ClusterState._collectives_received,
    ev.CheckCollectives: ClusterState._check_collectives,
    ev.InterruptCell: ClusterState._interrupt,
    ev.TimerFired: ClusterState._timer_fired,
    ev.Stop: ClusterState._stop,
}


class Journal:
    """Ring buffer of the last `length` events and actions, for error messages."""

    def __init__(self, length: int = 200) -> None:
        self._entries: deque[object] = deque(maxlen=length)

    def record(self, entry: object) -> None:
        """Store one event or action. It is formatted only when `recent_events` is called."""
        self._entries.append(entry)

    def recent_events(self, newest: int = 20) -> str:
        """Return the newest entries, oldest first, one per line."""
        return "\n".join(f"  {entry!r}" for entry in list(self._entries)[-newest:])


# Reattachment ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecoveredRank:
    """A rank as it was found. `loss` says how its process ended, if it has. For the others see `states.RankEntry`."""

    rank: int
    incarnation: int
    loss: str | None = None
    since: int = 0
    empty: bool = False


@dataclass(frozen=True)
class RecoveredCell:
    """A cell of `ranks` that `running` still run. `internal`: it forms the group. See `states.CellEntry`."""

    cell: int
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    answers: Mapping[int, str]
    collectives: int = 0
    internal: bool = False
    defines_variables: bool = False


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

    def __init__(self, recovered: RecoveredState, *, grace: GracePeriods | None = None) -> None:
        super().__init__(len(recovered.ranks), grace=grace)
        # The numbers continue, because the ranks identify their messages by them.
        self._last_cell, self.generation = recovered.last_cell, recovered.generation
        self._launches = max((rank.since for rank in recovered.ranks), default=0)
        for recovered_rank in recovered.ranks:
            rank = self.ranks[recovered_rank.rank]
            rank.incarnation, rank.loss = recovered_rank.incarnation, recovered_rank.loss
            # A rank that was restarted has less state than the others, and is not the donor of a later heal.
            rank.since, rank.empty = recovered_rank.since, recovered_rank.empty
            # By the regular steps, so that no state can be set that the tables do not allow.
            self._move(rank, RankStep.FORK)
            self._move(rank, RankStep.HELLO if recovered_rank.loss is None else RankStep.EXIT)
        for task in recovered.cells:
            # The cell keeps its number. Ranks that have ended it are in `answers`.
            cell = CellEntry(task.cell, task.ranks, internal=task.internal, running=set(task.running))
            cell.answers, cell.collectives = dict(task.answers), task.collectives
            cell.defines_variables = task.defines_variables
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
