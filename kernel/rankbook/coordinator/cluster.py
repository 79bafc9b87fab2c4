"""The public face of a set of ranks.

Owns: `Cluster` and what its methods promise. Refuses: decisions (state.py) and how they are performed (driver.py).
"""

from __future__ import annotations

import keyword
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rankbook.coordinator import events as ev
from rankbook.coordinator.cluster_processes import Crew
from rankbook.coordinator.cluster_queries import Sight
from rankbook.coordinator.cluster_tasks import RankSelection
from rankbook.coordinator.deferred_interrupts import held_interrupts
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.reattach.processes import AdoptedCrew
from rankbook.coordinator.recovery import Healed, hand_over, segments_of, summarize
from rankbook.coordinator.running_cell import Cell, Head, Sink
from rankbook.coordinator.states import RankState, choose_donor
from rankbook.coordinator.status import RankStatus
from rankbook.coordinator.unresponsive import describe_silence
from rankbook.coordinator.wait import Ask, ask_in_terminal
from rankbook.errors import BadRequest, CellError, LostRank
from rankbook.formatting import plural
from rankbook.launch.registry import Record
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Page
from rankbook.protocol.messages import AdoptState, Assign, CallFunction, ExportState, Fetch, ListState, RunCell
from rankbook.protocol.profiling import Measure
from rankbook.ranks import format_ranks, name_ranks
from rankbook.transport.serialization import Packed, pack

START_TIMEOUT = 180.0
_ANSWER_TIMEOUT = 1.0
"""Seconds for the ranks' second threads to answer, which takes them a millisecond."""


class Cluster(Sight):
    """`n` ranks: processes that keep their variables from one call to the next.

    `n` None: one rank per CUDA device, or two on the CPU (environment variable RANKBOOK_RANKS overrides). `backend` is
    torch.distributed's; by default nccl beside gloo when every rank has a CUDA device of its own, else gloo. `keep`:
    the seconds that the ranks outlive this process, for another to attach. `grace`: how long ranks are given before
    something is done about them. A context manager: leaving it stops them. Raises `StartError`, `BadRequest`.
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
        grace: GracePeriods | None = None,
    ) -> None:
        self._move_in(Crew(n, backend=backend, timeout=timeout, keep=keep, grace=grace))

    @classmethod
    def adopt(cls, record: Record, *, sink: Sink | None = None) -> Self:
        """Take over a kept cluster; what nobody has seen is shown in `sink`. Raises `BadRequest`, `StartError`."""
        self = cls.__new__(cls)
        crew = AdoptedCrew(record, sink=sink)
        self._move_in(crew)
        self.missed = tuple(crew.missed)
        self.debugs.let_go(self._everyone)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return "<Cluster: stopped>"
        states = ", ".join(f"{rank}: {self._state_of(rank)}" for rank in self._state.ranks)
        return f"<Cluster of {self.world_size} on {self._place.devices[0].split(':')[0]}, {self.backend}; {states}>"

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return self._place.backend

    @property
    def keep(self) -> float | None:
        """The seconds that the ranks stay without a notebook; None: they end with it."""
        return self._crew.keep

    # Work

    def run(
        self, code: str, *, ranks: RankSelection = None, timeout: float | None = None, sink: Sink | None = None
    ) -> CellResult:
        """Run `code` as a cell on `ranks` and wait for it.

        Returns what each rank printed and showed. Raises the first failed rank's error, as a `CellError` that also is
        of that built-in type, with every rank's traceback in its text; `LostRank`; `CellTimeout` after `timeout` s, in
        which waiting for ranks that are busy counts.
        """
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
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
        __tracebackhide__ = True
        packed = pack((function, args, kwargs), store=self._segments)
        return list(self._exchange(packed, CallFunction, ranks, timeout, "a call").values())

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        sink: Sink | None,
        ask: Ask = ask_in_terminal,
        label: str = "a call",
    ) -> list[Any]:
        """As `apply` on all ranks; what they print goes to `sink`, and `ask` answers what they ask."""
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        packed = pack((function, tuple(args), {}), store=self._segments)
        return list(self._exchange(packed, CallFunction, None, None, label, sink=sink, ask=ask).values())

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

    def submit_code(
        self,
        code: str,
        *,
        number: int,
        ranks: RankSelection,
        sink: Sink | None,
        page: Page | None = None,
        head: Callable[[Cell], Head] | None = None,
        measure: Measure | None = None,
        file: str = "",
    ) -> Cell:
        """Send `code` on its way; `wait` waits for it. `number` is the notebook's, for tracebacks.

        See `Cell` for `page` and `head`. With `measure`, `take_values` then has what each rank `Measured`. A debugger
        knows the cell as `file`.
        """
        chosen = self.select(ranks)
        make = lambda cell: RunCell(cell, code, number, measure, file)  # noqa: E731 - used once
        tasks = dict.fromkeys(chosen, (make, ()))
        return self._submit(tasks, number=number, sink=sink, label="", page=page, head=head)

    def interrupt_cell(self, cell: Cell) -> None:
        """Interrupt one cell on its ranks; where it still waits, it never begins."""
        self._crew.driver.post(ev.InterruptCell(cell.cell))

    def interrupt(self, ranks: RankSelection = None) -> tuple[int, ...]:
        """Interrupt what `ranks` run, and remove the cells that wait for them; the ranks that ran something."""
        driver = self._crew.driver
        chosen = self.select(ranks)
        with driver.changed:
            waiting = [cell for cell in driver.active_cells() if cell.started is None]
            for each in waiting:
                if not set(chosen).isdisjoint(each.ranks):
                    driver.post(ev.InterruptCell(each.cell))
        cells = {self._state.ranks[rank].cell for rank in chosen} - {None}
        hit = tuple(rank for rank in self._state.ranks if self._state.ranks[rank].cell in cells)
        for cell in cells:
            if cell is not None:
                driver.post(ev.InterruptCell(cell))
        return hit

    def wake(self) -> None:
        """Have the driver's thread look at what there is to do."""
        self._crew.driver.wake()

    def cells(self) -> list[Cell]:
        """The cells that run or wait, oldest first."""
        return self._crew.driver.active_cells()

    # Ranks

    def status(self, *, timeout: float = _ANSWER_TIMEOUT) -> list[RankStatus]:
        """Every rank, as it is now; those that run are asked, and have `timeout` seconds to answer."""
        driver = self._crew.driver
        silent = driver.presence.wait_silent(driver.answering(), timeout=timeout)
        found = []
        for rank, each in self._state.ranks.items():
            cell = driver.cell_of(rank)
            state = describe_silence(silent[rank]) if rank in silent else self._state_of(rank)
            device = self._place.devices[rank]
            found.append(
                RankStatus(
                    rank, state, device, driver.infos[rank].pid, cell.label if cell else None, each.loss, each.empty
                )
            )
        return found

    def _state_of(self, rank: int) -> str:
        state = self._state.ranks[rank].state
        if state is not RankState.BUSY:
            return state.name.lower()
        return self._crew.driver.presence.debugs.paused.get(rank, "running")

    def restart(self, ranks: RankSelection = None, *, timeout: float = START_TIMEOUT) -> tuple[int, ...]:
        """Give `ranks` fresh processes with empty namespaces; the others keep everything. Returns who was restarted.

        The process group is formed anew once every rank is there and idle. Raises `StartError`.
        """
        chosen = self.select(ranks)
        self._crew.launch(chosen, timeout=timeout)
        return chosen

    def heal(
        self, ranks: RankSelection = None, *, empty: bool = False, timeout: float = START_TIMEOUT
    ) -> Healed | None:
        """Put new ranks in the place of dead ones, with the variables of a healthy one; None if no rank is dead.

        The others keep everything, and the new ones make the groups that they share with them. `empty`: without the
        variables. The rank whose state is the oldest gives it. Named in `ranks`, a rank that is empty since its restart
        is healed too. Raises `StartError`, `LostRank` when no healthy rank is left to ask, `BadRequest` for a rank
        that lives and is not empty. After an error the ranks are dead, as before.
        """
        self._crew.wait_exits()
        ranks_now = self._state.ranks
        dead = tuple(rank for rank in ranks_now if ranks_now[rank].state is RankState.DEAD)
        chosen = dead if ranks is None else self.select(ranks)
        living = [rank for rank in chosen if rank not in dead and not ranks_now[rank].empty]
        if living:
            verb = "is" if len(living) == 1 else "are"
            raise BadRequest(f"{name_ranks(living)} {verb} not dead; %distributed restart gives a fresh process")
        if not chosen:
            return None
        donor = None if empty else choose_donor([each for rank, each in ranks_now.items() if rank not in chosen])
        if donor is None and not empty:
            raise LostRank("no rank is left that has the state; %distributed heal --empty starts without it", chosen)
        try:
            self._crew.launch(chosen, timeout=timeout)
            return Healed(chosen, None) if donor is None else self._restore(donor, chosen, timeout)
        except BaseException:
            self._crew.discard(chosen, "was not restored, for heal failed or was interrupted")
            raise

    def _restore(self, donor: int, ranks: tuple[int, ...], timeout: float) -> Healed:
        """Give the new `ranks` the state of `donor`."""
        deadline = time.monotonic() + timeout
        listed = self._collect({donor: (lambda cell: ListState(cell=cell), ())}, timeout, "heal")[donor]
        adopted: dict[str, Any] = {}

        def attempt(names: Sequence[str]) -> str:
            nonlocal adopted
            adopted = self._try_restore(donor, ranks, tuple(names), deadline - time.monotonic())
            return str(adopted["refused"])

        refused = hand_over(listed["names"], attempt)
        self._crew.driver.post(ev.StateRestored(ranks, donor))
        return summarize(ranks, donor, adopted, {**listed["missing"], **refused})

    def _try_restore(self, donor: int, ranks: tuple[int, ...], names: tuple[str, ...], timeout: float) -> Any:  # noqa: ANN401 - rank.heal.Adopted
        """Have `donor` export the variables `names` and the new `ranks` adopt them; return one of their answers."""
        with held_interrupts():
            make_export = lambda cell: ExportState(cell=cell, names=names)  # noqa: E731 - used once
            export = self._submit({donor: (make_export, ())}, number=0, sink=None, label="heal")
            self.wait(export, timeout=timeout)
        try:
            self._check(export)
        except CellError as error:
            return {"refused": error.errors[donor].value if donor in error.errors else str(error)}
        payload, frames = export.values[donor]
        try:
            newcomers = {rank: (lambda cell: AdoptState(cell=cell, payload=payload), frames) for rank in ranks}
            others = {rank: (lambda cell: AdoptState(cell=cell), ()) for rank in self._state.ranks if rank not in ranks}
            answers = self._collect({**others, **newcomers}, timeout, "heal")
        finally:
            for segment in segments_of(payload):
                self._segments.discard(segment)
        return next((answers[rank] for rank in ranks if answers[rank]["refused"]), answers[ranks[0]])

    def stop(self) -> None:
        """End all ranks and remove everything of theirs but the logs. A second time does nothing."""
        self._crew.stop()

    def describe(self) -> str:
        """Devices, backend and threads, for people."""
        devices = sorted(set(self._place.devices))
        shared = " (shared)" if len(devices) < self.world_size and devices[0] != "cpu" else ""
        threads = plural(self._place.threads, "thread")
        return f"{', '.join(devices)}{shared}, {self.backend}, {threads} each"

    def describe_group(self) -> str:
        """Whether all ranks are in one process group."""
        if self._state.grouped:
            return "all ranks are in one process group"
        dead = [rank.rank for rank in self._state.ranks.values() if rank.state is RankState.DEAD]
        back = f"%distributed heal, or %distributed restart {format_ranks(dead)}"
        return f"the process group waits for {name_ranks(dead)}: {back}"


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadRequest(f"{name!r} is no name for a variable")
