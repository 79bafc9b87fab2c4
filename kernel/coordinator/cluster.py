"""The public face of a set of ranks.

Owns: `Cluster` and what its methods promise. Refuses: decisions (state.py) and how they are performed (driver.py).
"""

from __future__ import annotations

import keyword
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rankbook.coordinator import events as ev
from rankbook.coordinator.cell import Cell, Sink
from rankbook.coordinator.crew import Crew
from rankbook.coordinator.interrupts import held_interrupts
from rankbook.coordinator.reattach import AdoptedCrew
from rankbook.coordinator.state import RankState
from rankbook.coordinator.wait import Ask, ask_in_terminal, wait_for
from rankbook.errors import BadRequest, CellTimeout, ClusterStopped, LostRank
from rankbook.launch.records import Record
from rankbook.messages import Assign, CallFunction, Fetch, Message, RunCell, Stack
from rankbook.ranks import format_ranks, name_ranks, parse_ranks
from rankbook.results import CellResult, describe_errors
from rankbook.transport.payload import Packed, pack, unpack

START_TIMEOUT = 180.0
_STACK_TIMEOUT = 1.0

RankSelection = str | int | Sequence[int] | None


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment. `state` is idle, running, starting, leaving, dead or absent; `loss` how it died."""

    rank: int
    state: str
    device: str
    pid: int | None
    cell: str | None
    loss: str | None


class Cluster:
    """`n` ranks: processes that keep their variables from one call to the next.

    `n` None: one rank per CUDA device, or two on the CPU (environment variable RANKBOOK_RANKS overrides). `backend` is
    torch.distributed's; by default nccl beside gloo when every rank has a CUDA device of its own, else gloo. `keep`:
    the seconds that the ranks outlive this process, for another to attach. A context manager: leaving it stops them.
    Raises `StartError`, `BadRequest`.
    """

    missed: tuple[CellResult, ...] = ()
    """Of a cluster that was attached: what became of the cells that ended while no notebook was there."""

    def __init__(
        self,
        n: int | None = None,
        *,
        backend: str | None = None,
        timeout: float = START_TIMEOUT,
        keep: float | None = None,
    ) -> None:
        self._man(Crew(n, backend=backend, timeout=timeout, keep=keep))

    @classmethod
    def adopt(cls, record: Record, *, sink: Sink | None = None) -> Self:
        """Take over a kept cluster; what nobody has seen is shown in `sink`. Raises `BadRequest`, `StartError`."""
        self = cls.__new__(cls)
        crew = AdoptedCrew(record, sink=sink)
        self._man(crew)
        self.missed = tuple(crew.missed)
        return self

    def _man(self, crew: Crew) -> None:
        self._crew = crew
        self._state = self._crew.state
        self._segments = self._crew.segments
        self._place = self._crew.placement
        self.key = self._crew.key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return "<Cluster: stopped>"
        states = ", ".join(f"{each.rank}: {each.state}" for each in self.status())
        return f"<Cluster of {self.world_size} on {self._place.devices[0].split(':')[0]}, {self.backend}; {states}>"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._place.devices)

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return self._place.backend

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._crew.stopped

    @property
    def keep(self) -> float | None:
        """The seconds that the ranks stay without a notebook; None: they end with it."""
        return self._crew.keep

    def select(self, ranks: RankSelection) -> tuple[int, ...]:
        """The ranks that a selection means; None means all. Raises `BadRequest`."""
        if ranks is None:
            return tuple(range(self.world_size))
        text = ranks if isinstance(ranks, str) else str(ranks) if isinstance(ranks, int) else ",".join(map(str, ranks))
        return parse_ranks(text, self.world_size)

    # Work

    def run(
        self, code: str, *, ranks: RankSelection = None, timeout: float | None = None, sink: Sink | None = None
    ) -> CellResult:
        """Run `code` as a cell on `ranks` and wait for it.

        Returns what each rank printed and showed. Raises the first failed rank's error, as a `CellError` that also is
        of that built-in type, with every rank's traceback in its text; `LostRank`; `CellTimeout` after `timeout` s.
        """
        with held_interrupts():
            cell = self.submit_code(code, number=0, ranks=ranks, sink=sink)
            self.wait(cell, timeout=timeout)
        return self._check(cell)

    def apply(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,  # noqa: ANN401 - whatever the function takes
        ranks: RankSelection = None,
        timeout: float | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on each rank; the list of what each returned, in rank order.

        Functions, lambdas, closures and classes travel by value (cloudpickle). Raises as `run`, and `TransferError`
        for what cannot be pickled.
        """
        packed = pack((function, args, kwargs), store=self._segments)
        return list(self._exchange(packed, CallFunction, ranks, timeout, "a call").values())

    def push(self, values: Mapping[str, object], *, ranks: RankSelection = None, timeout: float | None = None) -> None:
        """Put the variables `values` on `ranks`. One copy in shared memory serves all ranks."""
        _check_names(values)
        packed = pack(dict(values), store=self._segments)
        self._exchange(packed, Assign, ranks, timeout, "a push")

    def pull(self, name: str, *, ranks: RankSelection = None, timeout: float | None = None) -> list[Any]:
        """The variable `name` (or `model.weight`) of each rank, in rank order. Tensors arrive on the CPU.

        Raises `BadRequest`, with near matches, on a name that a rank does not have.
        """
        chosen = self.select(ranks)
        tasks = {rank: (lambda cell: Fetch(cell=cell, name=name), ()) for rank in chosen}
        return list(self._collect(tasks, timeout, f"a pull of {name}").values())

    def scatter(
        self, name: str, values: Sequence[object], *, ranks: RankSelection = None, timeout: float | None = None
    ) -> None:
        """Put `values[i]` on the i-th of `ranks` as `name`. Raises `BadRequest` if their numbers differ."""
        chosen = self.select(ranks)
        if len(values) != len(chosen):
            raise BadRequest(f"scatter: {len(values)} values for {len(chosen)} ranks ({format_ranks(chosen)})")
        _check_names((name,))
        packed: list[Packed] = []
        try:
            packed += (pack({name: value}, store=self._segments) for value in values)
            tasks = {
                rank: (lambda cell, p=each: Assign(cell=cell, payload=p.payload), each.frames)
                for rank, each in zip(chosen, packed, strict=True)
            }
            self._collect(tasks, timeout, f"a scatter of {name}")
        finally:
            self._discard(*packed)

    def gather(self, name: str, *, ranks: RankSelection = None, timeout: float | None = None) -> list[Any]:
        """As `pull`, with lists and tuples on the ranks joined into one list in rank order."""
        pulled = self.pull(name, ranks=ranks, timeout=timeout)
        if pulled and all(isinstance(each, (list, tuple)) for each in pulled):
            return [item for each in pulled for item in each]
        return pulled

    # Cells

    def submit_code(self, code: str, *, number: int, ranks: RankSelection, sink: Sink | None) -> Cell:
        """Send `code` on its way; `wait` waits for it. `number` is the notebook's, for tracebacks."""
        chosen = self.select(ranks)
        tasks = {rank: (lambda cell: RunCell(cell=cell, source=code, number=number), ()) for rank in chosen}
        return self._submit(tasks, number=number, sink=sink, label="")

    def wait(
        self, cell: Cell, *, timeout: float | None = None, patience: float | None = None, ask: Ask = ask_in_terminal
    ) -> None:
        """Wait until `cell` ends. An interrupt interrupts it on its ranks; `ask` answers what they ask.

        `timeout` seconds after its start the cell is interrupted; after `patience` seconds this returns, whatever the
        cell does.
        """
        with held_interrupts() as held:
            if timeout is not None:
                self.interrupt_after(cell, timeout)
            wait_for(self._crew.driver, cell, held, patience=patience, ask=ask)
            held.take()

    def interrupt_cell(self, cell: Cell) -> None:
        """Interrupt one cell on its ranks; where it still waits, it never begins."""
        self._crew.driver.post(ev.InterruptCell(cell.cell))

    def interrupt(self, ranks: RankSelection = None) -> tuple[int, ...]:
        """Interrupt what `ranks` run; the ranks that ran something."""
        driver = self._crew.driver
        chosen = self.select(ranks)
        cells = {self._state.ranks[rank].cell for rank in chosen} - {None}
        hit = tuple(rank for rank in self._state.ranks if self._state.ranks[rank].cell in cells)
        for cell in cells:
            if cell is not None:
                driver.post(ev.InterruptCell(cell))
        return hit

    def interrupt_after(self, cell: Cell, seconds: float) -> None:
        """Interrupt `cell` `seconds` after its start, unless it has ended by then."""
        driver = self._crew.driver

        def look() -> None:
            left = seconds if cell.started is None else cell.started + seconds - time.monotonic()
            if cell.result is not None:
                return
            if left > 0:
                driver.after(left, look)
            else:
                cell.timed_out = seconds
                driver.post(ev.InterruptCell(cell.cell))

        driver.after(0.0, look)

    def cells(self) -> list[Cell]:
        """The cells that run or wait, oldest first."""
        return self._crew.driver.active_cells()

    # Ranks

    def status(self) -> list[RankStatus]:
        """Every rank, as it is now."""
        driver = self._crew.driver
        found = []
        for rank, each in self._state.ranks.items():
            cell = driver.cell_of(rank)
            state = "running" if each.state is RankState.BUSY else each.state.name.lower()
            device = self._place.devices[rank]
            found.append(
                RankStatus(rank, state, device, driver.infos[rank].pid, cell.label if cell else None, each.loss)
            )
        return found

    def restart(self, ranks: RankSelection = None, *, timeout: float = START_TIMEOUT) -> tuple[int, ...]:
        """Give `ranks` fresh processes with empty namespaces; the others keep everything. Returns who was restarted.

        The process group is formed anew once every rank is there and idle. Raises `StartError`.
        """
        chosen = self.select(ranks)
        self._crew.launch(chosen, timeout=timeout)
        return chosen

    def stacks(self, *, timeout: float = _STACK_TIMEOUT) -> dict[int, Stack | None]:
        """Where each rank's main thread is; None for a rank that did not answer within `timeout` seconds."""
        answers = self._crew.driver.wait_stacks(timeout=timeout)
        return {rank: answers.get(rank) for rank in self._state.ranks}

    def stop(self) -> None:
        """End all ranks and remove everything of theirs but the logs. A second time does nothing."""
        self._crew.stop()

    def describe(self) -> str:
        """Devices, backend and threads, for people."""
        devices = sorted(set(self._place.devices))
        shared = " (shared)" if len(devices) < self.world_size and devices[0] != "cpu" else ""
        threads = self._place.threads
        return f"{', '.join(devices)}{shared}, {self.backend}, {threads} thread{'s' if threads > 1 else ''} each"

    def describe_group(self) -> str:
        """Whether all ranks are in one process group."""
        if self._state.grouped:
            return "all ranks are in one process group"
        dead = [rank.rank for rank in self._state.ranks.values() if rank.state is RankState.DEAD]
        return f"the process group waits for {name_ranks(dead)}: %distributed restart {format_ranks(dead)}"

    # Inside

    def _exchange(
        self,
        packed: Packed,
        kind: type[CallFunction | Assign],
        ranks: RankSelection,
        timeout: float | None,
        label: str,
    ) -> dict[int, Any]:
        try:
            make = lambda cell: kind(cell=cell, payload=packed.payload)  # noqa: E731 - one line, used once
            return self._collect(dict.fromkeys(self.select(ranks), (make, packed.frames)), timeout, label)
        finally:
            self._discard(packed)

    def _collect(
        self, tasks: Mapping[int, tuple[Callable[[int], Message], Any]], timeout: float | None, label: str
    ) -> dict[int, Any]:
        with held_interrupts():
            cell = self._submit(tasks, number=0, sink=None, label=label)
            self.wait(cell, timeout=timeout)
        folder = self._segments.folder
        try:
            self._check(cell)
        except BaseException:
            for payload, _ in cell.values.values():
                for buffer in payload.buffers:
                    if buffer.segment is not None:
                        self._segments.discard(buffer.segment)
            raise
        return {
            rank: unpack(cell.values[rank][0], cell.values[rank][1], unlink=True, folder=folder)
            if rank in cell.values
            else None
            for rank in cell.ranks
        }

    def _check(self, cell: Cell) -> CellResult:
        """The cell's result. Raises what went wrong."""
        result = cell.result
        assert result is not None
        if result.ok:
            return result
        story = describe_errors(result.outcomes, plain=True)
        if cell.timed_out is not None:
            raise CellTimeout(f"{cell.label} was interrupted after {cell.timed_out:g} s\n{story}")
        if self.stopped:
            raise ClusterStopped(f"the ranks were stopped before {cell.label} had ended\n{story}")
        result.raise_for_status()
        return result

    def _submit(
        self, tasks: Mapping[int, tuple[Callable[[int], Message], Any]], *, number: int, sink: Sink | None, label: str
    ) -> Cell:
        with held_interrupts():
            driver = self._crew.driver
            self._check_available(tuple(tasks))
            with driver.changed:
                key = self._state.new_cell()
            made = {rank: (make(key), frames) for rank, (make, frames) in tasks.items()}
            cell = Cell(key, number, made, cluster_key=self.key, sink=sink, label=label)
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
        raise LostRank(f"{told}{more}: %distributed restart {format_ranks(gone)} brings it back{rest}", tuple(gone))

    def _discard(self, *packed: Packed) -> None:
        for each in packed:
            for segment in each.segments:
                self._segments.discard(segment)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadRequest(f"{name!r} is no name for a variable")
