"""Tasks for the ranks of one cluster, and what comes back.

Owns: selections, submission, waiting, the exchange of values. Refuses: to start or end ranks; that is the `Cluster`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankbook.coordinator import events as ev
from rankbook.coordinator.cluster_processes import Crew
from rankbook.coordinator.completion import Hints
from rankbook.coordinator.deferred_interrupts import held_interrupts
from rankbook.coordinator.monitor import Lookout
from rankbook.coordinator.running_cell import Cell, Head, Sink
from rankbook.coordinator.wait import Ask, ask_in_terminal, wait_for
from rankbook.errors import CellTimeout, ClusterStopped, LostRank
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import Page
from rankbook.protocol.messages import Assign, CallFunction, Message
from rankbook.ranks import format_ranks, name_ranks, parse_ranks
from rankbook.transport.serialization import Packed, unpack

_WHILE_PAUSED = 1.0
"""Seconds between two looks whether a person has a cell paused, whose timeout is put off for that long."""
RankSelection = str | int | Sequence[int] | None


class Workplace:
    """What `Cluster` works with: its crew and the crew's state. `_move_in` comes first."""

    key: str

    def _move_in(self, crew: Crew) -> None:
        self._crew = crew
        self._state = self._crew.state
        self._segments = self._crew.segments
        self._place = self._crew.placement
        self._lookout = Lookout(crew)
        self._hints = Hints(crew)
        self._everyone = tuple(range(len(self._place.devices)))
        self.key = self._crew.key

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._place.devices)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._crew.stopped

    def select(self, ranks: RankSelection) -> tuple[int, ...]:
        """The ranks that a selection means; None means all. Raises `BadRequest`."""
        if ranks is None or ranks == self._everyone:
            return self._everyone
        text = ranks if isinstance(ranks, str) else str(ranks) if isinstance(ranks, int) else ",".join(map(str, ranks))
        return parse_ranks(text, self.world_size)

    def wait(
        self, cell: Cell, *, timeout: float | None = None, patience: float | None = None, ask: Ask = ask_in_terminal
    ) -> None:
        """Wait until `cell` ends. An interrupt interrupts it on its ranks; `ask` answers what they ask.

        `timeout` seconds from now the cell is interrupted, or removed where it still waits for its ranks; after
        `patience` seconds this returns, whatever the cell does.
        """
        with held_interrupts() as held:
            if timeout is not None:
                self.interrupt_after(cell, timeout)
            wait_for(self._crew.driver, cell, held, patience=patience, ask=ask)
            held.take()

    def interrupt_after(self, cell: Cell, seconds: float) -> None:
        """Interrupt `cell` `seconds` from now, unless it has ended by then. Time in a debugger does not count."""
        driver, paused, was_held = self._crew.driver, 0.0, False
        began = before = time.monotonic()

        def look() -> None:
            nonlocal paused, before, was_held
            now, held = time.monotonic(), not driver.presence.debugs.paused.keys().isdisjoint(cell.ranks)
            if cell.started is not None and (held or was_held):
                paused += now - before
            before, was_held = now, held
            left = began + seconds + paused - now
            if cell.result is not None:
                return
            if left > 0:
                driver.after(_WHILE_PAUSED if held else min(left, _WHILE_PAUSED), look)
            else:
                cell.timed_out = seconds
                driver.post(ev.InterruptCell(cell.cell))

        driver.after(0.0, look)

    def _exchange(
        self,
        packed: Packed,
        kind: type[CallFunction | Assign],
        ranks: RankSelection,
        timeout: float | None,
        label: str,
        *,
        sink: Sink | None = None,
        ask: Ask = ask_in_terminal,
    ) -> dict[int, Any]:
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        try:
            make = lambda cell: kind(cell=cell, payload=packed.payload)  # noqa: E731 - one line, used once
            tasks = dict.fromkeys(self.select(ranks), (make, packed.frames))
            return self._collect(tasks, timeout, label, sink=sink, ask=ask)
        finally:
            self._discard(packed)

    def _collect(
        self,
        tasks: Mapping[int, tuple[Callable[[int], Message], Any]],
        timeout: float | None,
        label: str,
        *,
        sink: Sink | None = None,
        ask: Ask = ask_in_terminal,
    ) -> dict[int, Any]:
        __tracebackhide__ = True
        with held_interrupts():
            cell = self._submit(tasks, number=0, sink=sink, label=label)
            self.wait(cell, timeout=timeout, ask=ask)
        try:
            self._check(cell)
        except BaseException:
            for payload, _ in cell.values.values():
                for buffer in payload.buffers:
                    if buffer.segment is not None:
                        self._segments.discard(buffer.segment)
            raise
        values = self.take_values(cell)
        return {rank: values.get(rank) for rank in cell.ranks}

    def take_values(self, cell: Cell) -> dict[int, Any]:
        """What the ranks that have answered sent with their answers, once."""
        folder = self._segments.folder
        taken = {}
        for rank in sorted(cell.values):
            payload, frames = cell.values.pop(rank)
            taken[rank] = unpack(payload, frames, unlink=True, folder=folder)
        return taken

    def _check(self, cell: Cell) -> CellResult:
        """The cell's result. Raises what went wrong."""
        __tracebackhide__ = True
        result = cell.result
        assert result is not None
        if result.ok:
            return result
        story = describe_errors(result.outcomes, plain=True)
        if cell.timed_out is not None and cell.started is None:
            busy = f" behind {name_ranks(cell.waiting_behind)}" if cell.waiting_behind else ""
            raise CellTimeout(f"{cell.label} was removed: it still waited{busy} after {cell.timed_out:g} s\n{story}")
        if cell.timed_out is not None:
            raise CellTimeout(f"{cell.label} was interrupted after {cell.timed_out:g} s\n{story}")
        if self.stopped:
            raise ClusterStopped(f"the ranks were stopped before {cell.label} had ended\n{story}")
        result.raise_for_status()
        return result

    def _submit(
        self,
        tasks: Mapping[int, tuple[Callable[[int], Message], Any]],
        *,
        number: int,
        sink: Sink | None,
        label: str,
        page: Page | None = None,
        head: Callable[[Cell], Head] | None = None,
    ) -> Cell:
        with held_interrupts():
            driver = self._crew.driver
            self._check_available(tuple(tasks))
            with driver.changed:
                key = self._state.new_cell()
            made = {rank: (make(key), frames) for rank, (make, frames) in tasks.items()}
            cell = Cell(key, number, made, cluster_key=self.key, sink=sink, label=label, page=page, head=head)
            driver.submit(cell)
            return cell

    def _check_available(self, ranks: tuple[int, ...]) -> None:
        gone = self._state.unavailable(ranks)
        if not gone:
            return
        first = next(iter(gone.values()))
        told = f"rank {first.rank} {first.loss or 'is not running'}"
        more = f" (and {name_ranks([rank for rank in gone if rank != first.rank])})" if len(gone) > 1 else ""
        alive = [rank for rank in self._state.ranks if rank not in self._state.unavailable(self._state.ranks)]
        rest = f", --ranks {format_ranks(alive)} does without" if alive else ""
        empty = f"%distributed restart {format_ranks(gone)} with an empty namespace"
        raise LostRank(f"{told}{more}: %distributed heal brings it back, {empty}{rest}", tuple(gone))

    def _discard(self, *packed: Packed) -> None:
        for each in packed:
            for segment in each.segments:
                self._segments.discard(segment)
