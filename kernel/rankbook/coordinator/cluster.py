"""The public face of a set of ranks.

Owns: `Cluster` and what its methods promise. Refuses: decisions (state.py) and how they are performed (driver.py).

What can be asked of the ranks whatever they run.

Tasks for the ranks of one cluster, and what comes back.

What is told of a rank.
"""

from __future__ import annotations

import keyword
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rankbook.coordinator import completion
from rankbook.coordinator import events as ev
from rankbook.coordinator.channels import CommChannels, DapChannels
from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.completion import CompletionClient
from rankbook.coordinator.deferred_interrupts import deferred_interrupts
from rankbook.coordinator.evaluate import Peeked, peek
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.liveness import describe_unresponsive
from rankbook.coordinator.monitor import ANSWER_TIMEOUT, NonBlockingMonitor, StatusMonitor
from rankbook.coordinator.reattach import ReattachedProcesses
from rankbook.coordinator.recovery import Healed, hand_over, payload_segments, summarize_recovery
from rankbook.coordinator.running_cell import RunningCell, Sink, StatusHeader
from rankbook.coordinator.states import RankState, choose_donor
from rankbook.coordinator.wait import Ask, ask_in_terminal, wait_for_cell
from rankbook.errors import BadRequest, CellError, CellTimeout, ClusterStopped, LostRank
from rankbook.formatting import plural
from rankbook.launch.registry import ClusterRecord
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import OutputView
from rankbook.protocol.messages import (
    AdoptState,
    Assign,
    CallFunction,
    ExportState,
    FetchValue,
    ListState,
    Message,
    RunCell,
    Stack,
)
from rankbook.protocol.profiling import Measure
from rankbook.protocol.queries import Completion
from rankbook.protocol.telemetry import Placement, RankDetail, ShardMap, Statistic, Variable
from rankbook.ranks import format_ranks, name_ranks, parse_ranks
from rankbook.transport.serialization import Packed, pack, unpack

_WHILE_PAUSED = 1.0
"""Seconds between two looks whether a person has a cell paused, whose timeout is put off for that long."""
RankSelection = str | int | Sequence[int] | None


class ClusterTasks:
    """What `Cluster` works with: its crew and the crew's state. `_move_in` comes first."""

    key: str

    def _move_in(self, crew: ClusterProcesses) -> None:
        self._crew = crew
        self._state = self._crew.state
        self._segments = self._crew.segments
        self._place = self._crew.placement
        self._lookout = StatusMonitor(crew)
        self._hints = CompletionClient(crew)
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
        self,
        cell: RunningCell,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        ask: Ask = ask_in_terminal,
    ) -> None:
        """Wait until `cell` ends. An interrupt interrupts it on its ranks; `ask` answers what they ask.

        `timeout` seconds from now the cell is interrupted, or removed where it still waits for its ranks; after
        `patience` seconds this returns, whatever the cell does.
        """
        with deferred_interrupts() as held:
            if timeout is not None:
                self.interrupt_after(cell, timeout)
            wait_for_cell(self._crew.driver, cell, held, patience=patience, ask=ask)
            held.take()

    def interrupt_after(self, cell: RunningCell, seconds: float) -> None:
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
        with deferred_interrupts():
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

    def take_values(self, cell: RunningCell) -> dict[int, Any]:
        """What the ranks that have answered sent with their answers, once."""
        folder = self._segments.folder
        taken = {}
        for rank in sorted(cell.values):
            payload, frames = cell.values.pop(rank)
            taken[rank] = unpack(payload, frames, unlink=True, folder=folder)
        return taken

    def _check(self, cell: RunningCell) -> CellResult:
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
        page: OutputView | None = None,
        head: Callable[[RunningCell], StatusHeader] | None = None,
    ) -> RunningCell:
        with deferred_interrupts():
            driver = self._crew.driver
            self._check_available(tuple(tasks))
            with driver.changed:
                key = self._state.new_cell()
            made = {rank: (make(key), frames) for rank, (make, frames) in tasks.items()}
            cell = RunningCell(key, number, made, cluster_key=self.key, sink=sink, label=label, page=page, head=head)
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


STACK_TIMEOUT = 1.0
"""Seconds for the ranks' second threads to answer, which takes them a millisecond."""


class ClusterQueries(ClusterTasks):
    """Looks at the ranks of a cluster."""

    def watch(self, kind: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call back with each new picture of the ranks until what this returns is called; the last one always comes.

        `kind`: "placement" gives `Placement`, "status" the same without what lives on the ranks, "saves" gives `Saves`.
        At most ten times a second, on a thread of its own. Raises `BadRequest`.
        """
        return self._lookout.watch(kind, callback)

    def placement(self, *, timeout: float = ANSWER_TIMEOUT) -> Placement:
        """What every rank does and holds now, also while it runs; who does not answer in time is unresponsive."""
        return self._lookout.placement(timeout=timeout)

    @property
    def comms(self) -> CommChannels:
        """Those of widgets that live on the ranks, for whoever passes them on to a front end."""
        return self._crew.driver.presence.comms

    @property
    def debugs(self) -> DapChannels:
        """Those of the ranks, for whoever passes them on to a front end."""
        return self._crew.driver.presence.debugs

    def glance(self) -> NonBlockingMonitor:
        """For a cell's `head`: looks at the ranks without waiting for them."""
        return self._lookout.glance()

    def detail(self, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> RankDetail:
        """The stack, the last output and the variables of `rank`, also while it runs. Raises `LostRank`."""
        return self._lookout.detail(rank, timeout=timeout)

    def variables(
        self, ranks: RankSelection = None, *, timeout: float = ANSWER_TIMEOUT
    ) -> dict[int, tuple[Variable, ...]]:
        """What is stored of each variable of `ranks`, also while they run; without those that do not answer in time."""
        return self._lookout.variables(self.select(ranks), timeout=timeout)

    def shards(self, name: str, *, timeout: float = ANSWER_TIMEOUT) -> ShardMap:
        """Which part of which tensor of the variable `name` lies on which rank, also while they run.

        `name` is that of a model, optimizer, state dict, DTensor or `ShardedTensor`. Raises `BadRequest`.
        """
        return self._lookout.shards(name, timeout=timeout)

    def statistic(self, name: str, key: str, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> Statistic:
        """Of what `rank` holds of the tensor `key` of `name`: minimum, mean, maximum, NaNs. Raises `BadRequest`."""
        return self._lookout.statistic(name, key, rank, timeout=timeout)

    def complete(
        self,
        text: str,
        cursor: int,
        *,
        ranks: RankSelection = None,
        variables: bool = False,
        timeout: float = completion.SOON,
    ) -> tuple[int, tuple[Completion, ...]]:
        """What may take the place of `text[start:cursor]` on the first of `ranks` that answers, and that `start`.

        From its live objects, also while it runs; no user code is run for it. `variables`: the cells' variables alone.
        Nothing, where there is no answer within `timeout` seconds.
        """
        return self._hints.complete(text, cursor, self.select(ranks), variables=variables, timeout=timeout)

    def inspect(
        self,
        text: str,
        cursor: int | None = None,
        *,
        ranks: RankSelection = None,
        source: bool = False,
        timeout: float = completion.SOON,
    ) -> str:
        """What the name under the cursor is on the first of `ranks` that answers, for people; "" if nobody knows."""
        at = len(text) if cursor is None else cursor
        return self._hints.inspect(text, at, self.select(ranks), source=source, timeout=timeout)

    def peek(self, expression: str, *, ranks: RankSelection = None, timeout: float = ANSWER_TIMEOUT) -> list[Peeked]:
        """What a Python expression gives on each of `ranks`, in rank order, also while they run.

        Evaluated beside the cell, within `timeout` seconds; local variables of the functions that run count too. What
        goes wrong on a rank is in its `Peeked`. It may call functions, and what these change is changed, but it cannot
        begin a collective. C code that keeps the interpreter keeps it from the cell too. Raises `BadRequest` for what
        is no expression.
        """
        return peek(self._crew.driver, self.select(ranks), expression, timeout=timeout)

    def stacks(self, *, timeout: float = STACK_TIMEOUT) -> dict[int, Stack | None]:
        """Where each rank's main thread is; None for a rank that did not answer within `timeout` seconds."""
        answers = self._crew.driver.wait_stacks(timeout=timeout)
        return {rank: answers.get(rank) for rank in self._state.ranks}


START_TIMEOUT = 180.0
_ANSWER_TIMEOUT = 1.0
"""Seconds for the ranks' second threads to answer, which takes them a millisecond."""


class Cluster(ClusterQueries):
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
        self._move_in(ClusterProcesses(n, backend=backend, timeout=timeout, keep=keep, grace=grace))

    @classmethod
    def adopt(cls, record: ClusterRecord, *, sink: Sink | None = None) -> Self:
        """Take over a kept cluster; what nobody has seen is shown in `sink`. Raises `BadRequest`, `StartError`."""
        self = cls.__new__(cls)
        crew = ReattachedProcesses(record, sink=sink)
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
        with deferred_interrupts():
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
        tasks = {rank: (lambda cell: FetchValue(cell=cell, name=name), ()) for rank in chosen}
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
        page: OutputView | None = None,
        head: Callable[[RunningCell], StatusHeader] | None = None,
        measure: Measure | None = None,
        file: str = "",
    ) -> RunningCell:
        """Send `code` on its way; `wait` waits for it. `number` is the notebook's, for tracebacks.

        See `RunningCell` for `page` and `head`. With `measure`, `take_values` then has what each rank `Measured`. A
        debugger knows the cell as `file`.
        """
        chosen = self.select(ranks)
        make = lambda cell: RunCell(cell, code, number, measure, file)  # noqa: E731 - used once
        tasks = dict.fromkeys(chosen, (make, ()))
        return self._submit(tasks, number=number, sink=sink, label="", page=page, head=head)

    def interrupt_cell(self, cell: RunningCell) -> None:
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

    def cells(self) -> list[RunningCell]:
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
            state = describe_unresponsive(silent[rank]) if rank in silent else self._state_of(rank)
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
        return summarize_recovery(ranks, donor, adopted, {**listed["missing"], **refused})

    def _try_restore(self, donor: int, ranks: tuple[int, ...], names: tuple[str, ...], timeout: float) -> Any:  # noqa: ANN401 - rank.heal.Adopted
        """Have `donor` export the variables `names` and the new `ranks` adopt them; return one of their answers."""
        with deferred_interrupts():
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
            for segment in payload_segments(payload):
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


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment. `state` is idle, running, starting, leaving, dead or absent; `loss` how it died.

    `empty`: it was restarted, or healed without a state, and nothing was run on it since with success. `heal` takes no
    state from it.

    That of a rank that lives and does not answer is `unresponsive for 12 s, process running, 3.1 s of CPU time`, that
    of one under a debugger where it is paused.
    """

    rank: int
    state: str
    device: str
    pid: int | None
    cell: str | None
    loss: str | None
    empty: bool = False
