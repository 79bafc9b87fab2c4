"""Public API of a set of ranks: `Cluster`.

Three classes build on one another: `ClusterTasks` submits tasks to the ranks and collects their results,
`ClusterQueries` answers questions about the ranks while they run, and `Cluster` adds the public methods that run, move
and recover things. `RankStatus` is one row of `Cluster.status`. Decisions are made in state_machine.py and performed by
driver.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from rankbook.coordinator import events as ev
from rankbook.coordinator.channels import CommChannels, DapChannels
from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.liveness import describe_unresponsive, has_ended_itself
from rankbook.coordinator.monitor import ANSWER_TIMEOUT, NonBlockingMonitor, StatusMonitor
from rankbook.coordinator.queries import COMPLETION_TIMEOUT, CompletionClient, Peeked, StepHold, peek
from rankbook.coordinator.reattach import ReattachedProcesses
from rankbook.coordinator.recovery import (
    Healed,
    Protection,
    ProtectionStatus,
    choose_random,
    choose_snapshot,
    copy_variables,
    describe_no_snapshot,
    describe_places,
    describe_protection,
    heal_record,
    read_heal_record,
    read_record,
    remove_heal_record,
    summarize_recovery,
    summarize_restore,
    write_record,
)
from rankbook.coordinator.resize import (
    PendingResize,
    Resized,
    check_room,
    describe_failure,
    forget_handovers,
    forget_pending,
    handover_folder,
    keep_devices,
    plan_resize,
    read_pending,
    shrunk_devices,
    store_pending,
    with_folder,
)
from rankbook.coordinator.running_cell import RunningCell, Sink, StatusHeader
from rankbook.coordinator.states import GracePeriods, RankState, choose_donor
from rankbook.coordinator.sync_check import (
    EqualHistory,
    HashComparison,
    SyncReport,
    add_differences,
    compare_hashes,
)
from rankbook.coordinator.wait import Ask, ask_in_terminal, deferred_interrupts, wait_for_cell
from rankbook.errors import (
    CellError,
    CellTimeout,
    ClusterStopped,
    InvalidArgument,
    ProtocolError,
    RankbookError,
    RankLostError,
    StartError,
)
from rankbook.formatting import is_variable_name, plural, python_name
from rankbook.launch.hosts import HostOptions, Hosts, HostStatus
from rankbook.launch.placement import changed_variables
from rankbook.launch.registry import ClusterRecord
from rankbook.numerics import active_words, watch_numbers
from rankbook.numerics.norms import GradientTable, merge_gradients
from rankbook.numerics.settings import parse_conditions
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import OutputView
from rankbook.protocol.messages import (
    AdoptState,
    Assign,
    CallFunction,
    CheckResize,
    DescribeRandom,
    ExportState,
    FetchValue,
    HandOver,
    ListSnapshots,
    ListState,
    Message,
    Payload,
    Protect,
    RestoreReplicas,
    RestoreSnapshot,
    RunCell,
    Stack,
    TakeOver,
    decode_to_rank,
    encode,
)
from rankbook.protocol.queries import (
    Completion,
    HashState,
    MeasureDifferences,
    MeasureGradients,
    PieceDifference,
    StateHashes,
)
from rankbook.protocol.telemetry import Measure, Placement, RankDetail, ShardMap, Statistic, Variable
from rankbook.ranks import format_ranks, name_ranks, parse_ranks
from rankbook.snapshot_files import SnapshotHeader, merge_headers, read_headers, remove_all
from rankbook.transport.serialization import Packed, pack, unpack

_WHILE_PAUSED = 1.0
"""Seconds between two checks whether a debugger has a cell paused; its timeout is extended by the time paused."""
RankSelection = str | int | Sequence[int] | None
RaiseError = Callable[[RunningCell, CellResult], None]


class ClusterTasks:
    """Submit tasks to the ranks and collect their results. A subclass calls `_set_processes` first."""

    key: str
    _pending: PendingResize | None = None
    """A resize that has begun to change the ranks."""
    _resizing = False

    def _set_processes(self, processes: ClusterProcesses) -> None:
        self._processes = processes
        self._state = self._processes.state
        self._segments = self._processes.segments
        self._monitor = StatusMonitor(processes)
        self._completion = CompletionClient(processes)
        self._equal_history = EqualHistory()
        self._all_ranks = tuple(self._state.ranks)
        self.key = self._processes.key

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self._all_ranks)

    @property
    def stopped(self) -> bool:
        """Return True if `stop` was called."""
        return self._processes.stopped

    def select(self, ranks: RankSelection) -> tuple[int, ...]:
        """Return the ranks of a selection; None selects all ranks. Raises `InvalidArgument`."""
        if ranks is None:
            return self._all_ranks
        if isinstance(ranks, str):
            return parse_ranks(ranks, self.world_size)
        numbers = _numbers_of(ranks)
        # The frequent case, without formatting and parsing a text.
        if numbers == self._all_ranks:
            return numbers
        if not numbers:
            raise InvalidArgument(f"the selection of ranks is empty; valid ranks are {format_ranks(self._all_ranks)}")
        return parse_ranks(",".join(map(str, numbers)), self.world_size)

    def wait(
        self,
        cell: RunningCell,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        ask: Ask = ask_in_terminal,
    ) -> None:
        """Wait until `cell` ends. SIGINT interrupts the cell on its ranks; `ask` answers their `input()`.

        After `timeout` seconds the cell is interrupted, or removed if it is still queued. After `patience` seconds this
        method returns, whatever the state of the cell.
        """
        # The block of the caller, if there is one, is the outermost. It began before the cell was submitted, so an
        # interrupt in between is not lost.
        patience = None if patience is None else _check_timeout(patience)
        with deferred_interrupts() as interrupts:
            if timeout is not None:
                self.interrupt_after(cell, timeout)
            hosts = self._processes.hosts
            wait_for_cell(
                self._processes.driver,
                cell,
                interrupts,
                patience=patience,
                ask=ask,
                describe_transfers=None if hosts is None else hosts.describe_transfers,
            )
            # An interrupt that arrived while the cell was ending has nothing left to interrupt. Not taken, it would be
            # raised as KeyboardInterrupt at the end of the block.
            interrupts.take()

    def interrupt_after(self, cell: RunningCell, seconds: float) -> None:
        """Interrupt `cell` in `seconds`, unless it has ended by then.

        Time that a running cell spends paused in the front end's debugger does not count. Raises `InvalidArgument` if
        `seconds` is not a number.
        """
        seconds = _check_timeout(seconds)
        # A timer on the driver thread that polls: time between two calls in which the cell was paused is added to the
        # deadline.
        driver, paused, was_paused = self._processes.driver, 0.0, False
        start = before = time.monotonic()

        def check() -> None:
            nonlocal paused, before, was_paused
            now, is_paused = time.monotonic(), not driver.liveness.debugs.paused.keys().isdisjoint(cell.ranks)
            if cell.started is not None and (is_paused or was_paused):
                paused += now - before
            before, was_paused = now, is_paused
            remaining = start + seconds + paused - now
            if cell.result is not None:
                return
            if remaining > 0:
                driver.after(_WHILE_PAUSED if is_paused else min(remaining, _WHILE_PAUSED), check)
            else:
                # Set before the event is posted, which may end the cell: `_check` tells a timeout from the user's
                # interrupt by it.
                cell.timed_out = seconds
                driver.post(ev.InterruptCell(cell.cell))

        driver.after(0.0, check)

    def _exchange(
        self,
        packed: Packed,
        kind: Callable[..., CallFunction | Assign],
        ranks: RankSelection,
        timeout: float | None,
        label: str,
        *,
        sink: Sink | None = None,
        ask: Ask = ask_in_terminal,
        raise_error: RaiseError | None = None,
    ) -> dict[int, Any]:
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        try:
            make = lambda cell: kind(cell=cell, payload=packed.payload)  # noqa: E731 - used once
            tasks = dict.fromkeys(self.select(ranks), (make, packed.frames))
            return self._collect(tasks, timeout, label, sink=sink, ask=ask, raise_error=raise_error)
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
        raise_error: RaiseError | None = None,
        queue_hint: str = "",
        on_submit: Callable[[RunningCell], None] = lambda _: None,
    ) -> dict[int, Any]:
        __tracebackhide__ = True
        # Before the ranks get the task, which nobody would wait for.
        timeout = None if timeout is None else _check_timeout(timeout)
        # Around both calls. A KeyboardInterrupt between them would leave a running cell that nobody waits for.
        with deferred_interrupts():
            cell = self._submit(tasks, number=0, sink=sink, label=label)
            # Nothing else shows that the caller waits, possibly for hours.
            cell.queue_hint = queue_hint
            on_submit(cell)
            self.wait(cell, timeout=timeout, ask=ask)
        try:
            self._check(cell, raise_error)
        except BaseException:
            # The values of the other ranks will not be unpacked, which would have removed their shared memory.
            cell.discard_values(self._segments.discard)
            if (hosts := self._processes.hosts) is not None:
                hosts.abandon(cell.cell)
            raise
        try:
            values = self.take_values(cell)
        except BaseException:  # one that cannot be unpickled
            cell.discard_values(self._segments.discard)
            raise
        return {rank: values.get(rank) for rank in cell.ranks}

    def take_values(self, cell: RunningCell) -> dict[int, Any]:
        """Return the values sent by the ranks that have answered. A second call returns only newer ones."""
        folder = self._segments.folder
        values = {}
        for rank in sorted(cell.values):
            # Removed before it is unpacked: the file is removed by the reader, so a second attempt could not succeed.
            payload, frames = cell.values.pop(rank)
            values[rank] = unpack(payload, frames, unlink=True, folder=folder)
        return values

    def _check(self, cell: RunningCell, raise_error: RaiseError | None = None) -> CellResult:
        """Return the cell's result. Raises the error of a cell that failed, by `raise_error` if given."""
        __tracebackhide__ = True
        result = cell.result
        assert result is not None
        if result.ok:
            return result
        report = describe_errors(result.outcomes, plain=True)
        # The order matters. A timeout and `stop` interrupt the cell, so its result would also fit the later cases,
        # which say less.
        if cell.timed_out is not None:
            raise CellTimeout(f"{cell.describe_timeout()}\n{report}")
        if self.stopped:
            raise ClusterStopped(f"the ranks were stopped before {cell.label} had ended\n{report}")
        if raise_error is not None:
            raise_error(cell, result)
        result.raise_for_status()
        return result

    def _submit(
        self,
        tasks: Mapping[int, tuple[Callable[[int], Message], Any]],
        *,
        number: int,
        sink: Sink | None,
        label: str,
        view: OutputView | None = None,
        make_header: Callable[[RunningCell], StatusHeader] | None = None,
        has_other_output: bool = False,
    ) -> RunningCell:
        with deferred_interrupts():
            driver = self._processes.driver
            self._check_available(tuple(tasks))
            # The state machine has no lock of its own.
            with driver.changed:
                key = self._state.new_cell()
            # Ranks with the same task get the same object, which the driver sends them encoded once.
            messages_by_factory = {make: make(key) for make in {make for make, _ in tasks.values()}}
            # A message that cannot be encoded, or that ranks would not decode, is refused here. Once the state machine
            # has sent it, its ranks are busy.
            for message in messages_by_factory.values():
                try:
                    decode_to_rank(encode(message))
                except ProtocolError as error:
                    raise InvalidArgument(f"{label}: invalid argument: {error.__cause__}") from error
            messages = {rank: (messages_by_factory[make], frames) for rank, (make, frames) in tasks.items()}
            cell = RunningCell(
                key,
                number,
                messages,
                cluster_key=self.key,
                sink=sink,
                label=label,
                view=view,
                make_header=make_header,
                has_other_output=has_other_output,
            )
            driver.submit(cell)
            return cell

    def _check_available(self, ranks: tuple[int, ...]) -> None:
        if self._pending is not None and not self._resizing:
            raise RankLostError(
                f"the resize to {plural(self._pending.world_size, 'rank')} has not ended; "
                "%distributed heal completes it",
                (),
            )
        self._state.check_available(ranks)

    def _discard(self, *packed: Packed) -> None:
        for item in packed:
            for segment in item.segments:
                self._segments.discard(segment)


SYNC_TIMEOUT = 30.0
"""Seconds within which a busy rank has to end its cell, to take part in a check."""
STACK_TIMEOUT = 1.0
"""Seconds for the ranks' control threads to reply, which takes about a millisecond."""


class ClusterQueries(ClusterTasks):
    """Query the ranks of a cluster, also while they run."""

    def watch(self, kind: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback` with every new state of the ranks, until the returned function is called.

        `kind` is "placement" for `Placement`, "status" for `Placement` without models, optimizers and loaders, or
        "saves" for `Saves`. The callback runs on a thread of its own, at most ten times a second. A slow callback
        misses intermediate states but always gets the last one. Raises `InvalidArgument`.
        """
        return self._monitor.watch(kind, callback)

    def placement(self, *, timeout: float = ANSWER_TIMEOUT) -> Placement:
        """Return the current state of all ranks, with their models, optimizers and loaders, also while they run.

        Ranks that do not reply within `timeout` seconds are reported as unresponsive.
        """
        return self._monitor.placement(timeout=_check_timeout(timeout))

    @property
    def comms(self) -> CommChannels:
        """Return the comms of widgets that live on the ranks, for forwarding to a front end."""
        return self._processes.driver.liveness.comms

    @property
    def debugs(self) -> DapChannels:
        """Return the channels to the ranks' debuggers, for forwarding to a front end."""
        return self._processes.driver.liveness.debugs

    def glance(self) -> NonBlockingMonitor:
        """Return a non-blocking monitor, for the status header of a cell (`head`)."""
        return self._monitor.non_blocking()

    def detail(self, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> RankDetail:
        """Return the stack, recent output and variables of `rank`, also while it runs.

        Raises `RankLostError` if the rank does not reply within `timeout` seconds.
        """
        return self._monitor.detail(rank, timeout=_check_timeout(timeout))

    def variables(
        self, ranks: RankSelection = None, *, timeout: float = ANSWER_TIMEOUT
    ) -> dict[int, tuple[Variable, ...]]:
        """Return the variables of `ranks` and their storage, also while they run.

        Ranks that do not reply within `timeout` seconds are missing from the result.
        """
        return self._monitor.variables(self.select(ranks), timeout=_check_timeout(timeout))

    def sync_check(
        self, names: str | Sequence[str] = (), *, ranks: RankSelection = None, timeout: float = SYNC_TIMEOUT
    ) -> SyncReport:
        """Compare state that is meant to be equal on `ranks`, and return the differences.

        Args:
            names: variables (models, optimizers, tensors, containers), parts of a model such as `model.fc`, patterns
                such as `model.*.bias`, or `rng` for the random states. Without names, all that the layout keeps equal
                is compared: models under DDP and FSDP2 and with DTensors, their optimizers and schedulers, loss
                scalers, seeds of loaders, and the random states of tensor-parallel ranks that drop activations.
            ranks: the ranks to compare.
            timeout: seconds within which a busy rank has to reach the end of an optimizer step, or of its cell. Ranks
                that do not are named in the report.

        Every rank hashes its tensors between two cells. While a cell runs, all ranks pause at the end of the same
        optimizer step, and continue when they have been compared. Only blocks of 1 MiB with different hashes are sent
        to other ranks, to measure the difference; for that, all ranks have to be in the process group. Shards are
        compared with their replicas. Raises `InvalidArgument` for a name that no rank knows.

        Example::

            report = cluster.sync_check()
            assert report.ok, report
        """
        chosen, requested_names = self.select(ranks), (names,) if isinstance(names, str) else tuple(names)
        timeout = _check_timeout(timeout)
        start = time.monotonic()
        self._check_available(chosen)
        if self._any_busy(chosen):
            with StepHold(self._processes.driver, chosen, timeout) as hold:
                replies, unanswered = self._hash_held(requested_names, hold)
                return self._compare_state(requested_names, start, timeout, hold, replies, unanswered)
        replies, unanswered = self._ask_separately(
            chosen, lambda cell: HashState(cell, requested_names), timeout, "sync-check"
        )
        return self._compare_state(requested_names, start, timeout, None, replies, unanswered)

    def _any_busy(self, ranks: Sequence[int]) -> bool:
        return any(self._processes.driver.cell_of(rank) is not None for rank in ranks)

    @staticmethod
    def _hash_held(names: tuple[str, ...], hold: StepHold) -> tuple[dict[int, StateHashes], dict[int, str]]:
        """Return the hashes of the ranks that pause at a step, and why others have not answered."""
        replies, reasons = hold.check(HashState(0, names), SYNC_TIMEOUT)
        hashes = {rank: reply.hashes for rank, reply in replies.items() if reply.hashes is not None}
        return hashes, {**hold.unanswered, **reasons}

    def _compare_state(
        self,
        names: tuple[str, ...],
        start: float,
        timeout: float,
        hold: StepHold | None,
        replies: Mapping[int, StateHashes],
        unanswered: Mapping[int, str],
    ) -> SyncReport:
        """Compare the ranks' answers to `HashState`, and measure the differences while nothing changes."""
        for name in names:
            reasons = [reply.missing[name] for reply in replies.values() if name in reply.missing]
            if replies and len(reasons) == len(replies):
                raise InvalidArgument(f"sync-check: {reasons[0]}")
        comparison, note = compare_hashes(replies), ""
        differences: list[PieceDifference] = []
        if comparison.pieces:
            remaining = max(1.0, start + timeout - time.monotonic())
            differences, note = self._measure_differences(names, comparison, remaining, hold, tuple(replies))
        findings = add_differences(comparison, differences)
        steps = max((reply.steps for reply in replies.values() if reply.steps is not None), default=None)
        return SyncReport(
            tuple(replies),
            self._equal_history.update(comparison, findings, time.time(), steps),
            compared=comparison.compared,
            nbytes=comparison.nbytes,
            seconds=time.monotonic() - start,
            unanswered=unanswered,
            skipped={name: reason for reply in replies.values() for name, reason in reply.skipped.items()},
            unreadable={name: reason for reply in replies.values() for name, reason in reply.unreadable.items()},
            note=note,
            place=hold.place if hold is not None else "",
        )

    def gradients(self, name: str = "model", *, timeout: float = SYNC_TIMEOUT) -> GradientTable:
        """Return the norms of the gradients of the model `name`, by module and over all ranks.

        Replicas count once, and shards are added up: the norms are those of a run on one device, under DDP, FSDP2,
        tensor parallelism and meshes of these. While a cell runs, they are those of the end of one optimizer step. All
        ranks have to reach it, or the end of their cells, within `timeout` seconds. Raises `InvalidArgument` if the
        variable is not a model, `CellTimeout`, `RankLostError`.

        Example::

            table = cluster.gradients("model")
            table.norm, table["blocks.0"], table.parameters["blocks.0.fc.weight"].norm
        """
        timeout = _check_timeout(timeout)
        if self._any_busy(self._all_ranks):
            return self._gradients_at_step(name, timeout)
        make = lambda cell: MeasureGradients(cell, name)  # noqa: E731 - used once
        return merge_gradients(self._collect(dict.fromkeys(self._all_ranks, (make, ())), timeout, "gradients"))

    def _gradients_at_step(self, name: str, timeout: float) -> GradientTable:
        with StepHold(self._processes.driver, self._all_ranks, timeout) as hold:
            if hold.unanswered:
                raise CellTimeout(f"gradients: {'; '.join(f'rank {r}: {t}' for r, t in hold.unanswered.items())}")
            replies, reasons = hold.check(MeasureGradients(0, name), timeout)
        if reasons:
            raise InvalidArgument(f"gradients: {next(iter(reasons.values()))}")
        return merge_gradients(
            {rank: reply.gradients for rank, reply in replies.items() if reply.gradients is not None}
        )

    def _measure_differences(
        self,
        names: tuple[str, ...],
        comparison: HashComparison,
        timeout: float,
        hold: StepHold | None,
        answered: tuple[int, ...],
    ) -> tuple[list[PieceDifference], str]:
        """Return the measured differences, or the reason why they could not be measured.

        `answered` are the ranks that have sent their hashes.
        """
        if not self._state.grouped:
            return [], "the differences were not measured: not all ranks are in the process group"
        if hold is not None:
            if set(hold.held) != set(self._all_ranks):
                return [], "the differences were not measured: not all ranks have reached the same step"
            # A rank without hashes may not pause any more: the broadcasts of the others would meet those of its loop.
            if set(answered) != set(self._all_ranks):
                return [], "the differences were not measured: not all ranks have answered"
            replies, reasons = hold.check(MeasureDifferences(0, names, tuple(comparison.pieces)), timeout)
            if reasons:
                return [], f"the differences were not measured: {next(iter(reasons.values()))}"
            return [difference for reply in replies.values() for difference in reply.differences], ""
        if any(cell.started is not None for cell in self._processes.driver.active_cells()):
            return [], "the differences were not measured: a cell is running"
        pieces = tuple(comparison.pieces)
        make = lambda cell: MeasureDifferences(cell, names, pieces)  # noqa: E731 - used once
        try:
            tasks = dict.fromkeys(self._all_ranks, (make, ()))
            measured = self._collect(tasks, timeout, "sync-check")
        except (CellError, CellTimeout) as error:
            return [], f"the differences were not measured: {error}"
        return [difference for of_rank in measured.values() for difference in of_rank or ()], ""

    def _ask_separately(
        self, ranks: Sequence[int], make: Callable[[int], Message], timeout: float, label: str
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Submit one task per rank, so that a busy rank does not delay the others.

        Return the answers, and the reasons of the ranks that have not answered in time.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        unanswered: dict[int, str] = {}
        with deferred_interrupts():
            cells = {rank: self._submit({rank: (make, ())}, number=0, sink=None, label=label) for rank in ranks}
            try:
                for cell in cells.values():
                    self.wait(cell, timeout=max(0.05, deadline - time.monotonic()))
                    if cell.timed_out is None and cell.result is not None and cell.result.status == "interrupted":
                        break  # by the user
            finally:
                for cell in cells.values():
                    if cell.result is None:
                        self._processes.driver.post(ev.InterruptCell(cell.cell))
        for rank, cell in cells.items():
            try:
                self._check(cell)
                answers[rank] = self.take_values(cell)[rank]
            except CellTimeout:
                running = self._processes.driver.cell_of(rank)
                doing = (
                    f"it is running {running.label}" if running is not None and running is not cell else "it is busy"
                )
                unanswered[rank] = f"{doing} (asked for {timeout:g} s)"
            except RankLostError as error:
                unanswered[rank] = str(error)
            except CellError as error:
                unanswered[rank] = error.errors[rank].value if rank in error.errors else str(error)
        return answers, unanswered

    def shards(self, name: str, *, timeout: float = ANSWER_TIMEOUT) -> ShardMap:
        """Return which shard of which tensor of the variable `name` lies on which rank, also while they run.

        `name` refers to a model, optimizer, state dict, DTensor or `ShardedTensor`. Raises `InvalidArgument`.
        """
        return self._monitor.shards(name, timeout=_check_timeout(timeout))

    def statistic(self, name: str, key: str, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> Statistic:
        """Return minimum, mean, maximum and number of NaNs of `rank`'s part of the tensor `key` of `name`.

        Raises `InvalidArgument`, and `RankLostError` if the rank does not reply within `timeout` seconds.
        """
        return self._monitor.statistic(name, key, rank, timeout=_check_timeout(timeout))

    def complete(
        self,
        text: str,
        cursor: int,
        *,
        ranks: RankSelection = None,
        variables: bool = False,
        timeout: float = COMPLETION_TIMEOUT,
    ) -> tuple[int, tuple[Completion, ...]]:
        """Return completions for the name before the cursor, as `(start, completions)`.

        A completion replaces `text[start:cursor]`. Only one rank is asked: the first of `ranks` that can reply. It
        looks at its live objects, also while it runs, and runs no user code. `variables` restricts the completions to
        the variables of cells. Without a reply within `timeout` seconds there are no completions.
        """
        timeout = _check_timeout(timeout)
        return self._completion.complete(text, cursor, self.select(ranks), variables=variables, timeout=timeout)

    def inspect(
        self,
        text: str,
        cursor: int | None = None,
        *,
        ranks: RankSelection = None,
        source: bool = False,
        timeout: float = COMPLETION_TIMEOUT,
    ) -> str:
        """Return a description of the name under the cursor, as text for the user; "" if there is none.

        Only one rank is asked: the first of `ranks` that can reply. `cursor` None is the end of `text`. `source` adds
        the source code.
        """
        at = len(text) if cursor is None else cursor
        timeout = _check_timeout(timeout)
        return self._completion.inspect(text, at, self.select(ranks), source=source, timeout=timeout)

    def peek(self, expression: str, *, ranks: RankSelection = None, timeout: float = ANSWER_TIMEOUT) -> list[Peeked]:
        """Evaluate a Python expression on `ranks`, in rank order, also while they run.

        It is evaluated on a background thread of the rank, within `timeout` seconds, and may refer to local variables
        of the functions that are running. An error on a rank is reported in its `Peeked`. The expression may call
        functions with side effects, but cannot start a collective. C code that holds the GIL blocks the evaluation.
        Raises `InvalidArgument` if it is not an expression.
        """
        return peek(self._processes.driver, self.select(ranks), expression, timeout=_check_timeout(timeout))

    def stacks(self, *, timeout: float = STACK_TIMEOUT) -> dict[int, Stack | None]:
        """Return the stack of every rank's main thread.

        A rank that does not reply within `timeout` seconds maps to None.
        """
        answers = self._processes.driver.wait_stacks(timeout=_check_timeout(timeout))
        return {rank: answers.get(rank) for rank in self._state.ranks}


START_TIMEOUT = 180.0
_RESIZE_ATTEMPTS = 4
"""Attempts to complete a resize during which ranks die."""
_resizes = itertools.count(1)
_NUMBER_WATCH = "number-watch"
"""Name of the record with the conditions of the number watch."""
HOSTS_TIMEOUT = 600.0
"""Seconds that a start waits for the agents of other hosts by default: a user or a job scheduler starts them."""
_ANSWER_TIMEOUT = 1.0
"""Seconds for the ranks' control threads to reply, which takes about a millisecond."""


class Cluster(ClusterQueries):
    """A set of `n` ranks: processes that keep their variables from one call to the next.

    `n` None: one rank per CUDA device, or two ranks on the CPU; the environment variable RANKBOOK_RANKS overrides this.
    `backend` is a torch.distributed backend; the default is nccl plus gloo if every rank has a CUDA device of its own,
    otherwise gloo. `device`: "cpu" puts the ranks on the CPU and hides CUDA devices from them, "cuda" raises an error
    if torch can use no CUDA device; None is "cuda" if it can use one, and otherwise "cpu". `timeout` is in seconds.
    `keep`: the seconds that the ranks outlive this process, for another one to attach to them. `grace`: the grace
    periods. `hosts`: how ranks on other hosts are started.
    Raises `StartError`, `InvalidArgument`.

    A cluster is a context manager that stops its ranks on exit.

    Example::

        with Cluster(2) as cluster:
            cluster.run("x = torch.ones(3)")
            tensors = cluster.pull("x")  # one per rank
    """

    missed: tuple[CellResult, ...] = ()
    """Results of the cells that ended while no notebook was attached. Empty for a new cluster."""
    _number_watch: tuple[str, ...] = ()
    """Conditions of the number watch, for ranks that are started later."""

    def __init__(
        self,
        n: int | None = None,
        *,
        backend: str | None = None,
        device: str | None = None,
        timeout: float = START_TIMEOUT,
        keep: float | None = None,
        grace: GracePeriods | None = None,
        hosts: HostOptions | None = None,
    ) -> None:
        timeout = _check_timeout(timeout)
        self._set_processes(
            ClusterProcesses(n, backend=backend, device=device, timeout=timeout, keep=keep, grace=grace, hosts=hosts)
        )

    @classmethod
    def adopt(cls, record: ClusterRecord, *, sink: Sink | None = None) -> Self:
        """Attach to the detached cluster of `record` and show the missed output in `sink`.

        Raises `InvalidArgument` while another notebook owns it, and `StartError` if it does not answer.
        """
        # Not `cls(...)`: the constructor starts new ranks.
        self = cls.__new__(cls)
        processes = ReattachedProcesses(record, sink=sink)
        self._set_processes(processes)
        self.missed = tuple(processes.missed)
        # The debugger of the previous notebook has gone with it. A rank that was paused in it would wait forever.
        self.debugs.disconnect(self._all_ranks)
        self._pending = pending = read_pending(self._segments.folder)
        if pending is not None:
            new = tuple(rank for rank in self._all_ranks if rank not in pending.staying)
            processes.discard(new, "was not completed because the notebook's process ended during a resize")
        elif self._all_idle():  # nobody hands over any more
            forget_handovers(self._segments.folder)
        restoring = read_heal_record(self._segments.folder)
        processes.discard(restoring, "was not restored because the notebook's process ended during a heal")
        remove_heal_record(self._segments.folder)
        self._number_watch = read_record(self._segments.folder, _NUMBER_WATCH, tuple[str, ...]) or ()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        # A traceback of a failed start can show the local variables of the constructor.
        if "_processes" not in vars(self):
            return "<Cluster: not started>"
        if self.stopped:
            return "<Cluster: stopped>"
        states = ", ".join(f"{rank}: {self._state_of(rank)}" for rank in self._state.ranks)
        return f"<Cluster of {self.world_size} on {self.device}, {self.backend}; {states}>"

    @property
    def device(self) -> str:
        """Return the type of the ranks' devices: "cuda" if a rank has a CUDA device, otherwise "cpu"."""
        return "cpu" if set(self._processes.assignment.devices) == {"cpu"} else "cuda"

    @property
    def backend(self) -> str:
        """Return the process group's backend."""
        return self._processes.assignment.backend

    @property
    def keep(self) -> float | None:
        """Return the seconds that the ranks stay without a notebook; None if they exit with it."""
        return self._processes.keep

    def changed_variables(self) -> dict[str, str | None]:
        """Return the environment variables that this process has changed since it started the ranks, or attached.

        The value is None for a variable that was removed. The ranks still have the old values.
        """
        changed = changed_variables(self._processes.environment, os.environ)
        # Ranks on other hosts have the environment of their agents, and few variables of this process.
        return changed if self._processes.hosts is None else self._processes.inherited(changed)

    # Work

    def run(
        self, code: str, *, ranks: RankSelection = None, timeout: float | None = None, sink: Sink | None = None
    ) -> CellResult:
        """Run `code` as a cell on `ranks` and wait for it.

        Returns the text and display output of the ranks. Raises the first failed rank's error, as a `CellError` that is
        also an instance of that built-in type and has the tracebacks of all ranks in its text. Raises `RankLostError`
        if a rank died, and `CellTimeout` after `timeout` seconds, including the time in the queue.

        Example::

            result = cluster.run("total = rank + 10; total", timeout=60)
            result.text(1)  # '11'
        """
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        # See `_collect`.
        timeout = None if timeout is None else _check_timeout(timeout)
        with deferred_interrupts():
            cell = self.submit_code(code, number=0, ranks=ranks, sink=sink)
            self.wait(cell, timeout=timeout)
        return self._check(cell)

    def apply(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,  # noqa: ANN401 - any argument of the function
        ranks: RankSelection = None,
        timeout: float | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on `ranks`; return the list of the results, in rank order.

        Functions, lambdas, closures and classes are pickled by value (cloudpickle). `ranks` and `timeout` are those of
        the call; `functools.partial` gives the function arguments with these names. Raises the errors of `run`, and
        `TransferError` for arguments that cannot be pickled.

        Example::

            def rank_plus(offset):
                import torch.distributed as dist

                return dist.get_rank() + offset


            cluster.apply(rank_plus, 10)  # [10, 11]
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
        raise_error: RaiseError | None = None,
    ) -> list[Any]:
        """Call `function` as `apply` does, on all ranks; show output in `sink`, and let `ask` answer `input()`.

        `raise_error` raises the error of a call that failed on a rank (default: that of `run`).

        Example::

            cluster.call(divmod, (7, 3), sink=None)  # [(2, 1), (2, 1)]
        """
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        packed = pack((function, tuple(args), {}), store=self._segments)
        values = self._exchange(packed, CallFunction, None, None, label, sink=sink, ask=ask, raise_error=raise_error)
        return list(values.values())

    def watch_numbers(self, *conditions: str, timeout: float | None = None) -> None:
        """Call `rankbook.watch_numbers(*conditions)` on all ranks, and on ranks that replace them later.

        `conditions` are `"nan"`, `"inf"` and `"norm > X"`, or `"off"`. Ranks that run a cell do so at its end. Raises
        `InvalidArgument` for an unknown condition.

        Example::

            with Cluster(2) as cluster:
                cluster.watch_numbers("nan", "norm > 100")
                cluster.watched_numbers  # 'nan, norm > 100'
        """
        __tracebackhide__ = True
        parse_conditions(*conditions)
        self._call_watch(watch_numbers, conditions, None, timeout)
        self._number_watch = conditions if parse_conditions(*conditions) else ()
        write_record(self._segments.folder, _NUMBER_WATCH, self._number_watch)

    @property
    def watched_numbers(self) -> str:
        """Return the conditions of `watch_numbers` as text, such as "nan, norm > 100"; "off" without any."""
        return str(parse_conditions(*(self._number_watch or ("off",))))

    def _renew_number_watch(self, ranks: tuple[int, ...]) -> None:
        """Let new ranks watch what the others do: the ranks exchange a flag in every step that is watched."""
        others = [entry for rank, entry in self._state.ranks.items() if rank not in ranks]
        idle = next((entry.rank for entry in others if entry.state is RankState.IDLE), None)
        # A cell may have changed the watch since the last command.
        words = self._number_watch if idle is None else self._call_watch(active_words, (), idle)[idle]
        if words:
            self._call_watch(watch_numbers, words, ranks)

    def _call_watch(
        self,
        function: Callable[..., Any],
        args: tuple[str, ...],
        ranks: RankSelection,
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Call a function of the number watch. A restarted rank that has run nothing else is still empty."""
        __tracebackhide__ = True
        packed = pack((function, args, {}), store=self._segments)
        return self._exchange(packed, partial(CallFunction, defines_variables=False), ranks, timeout, "watch")

    def push(self, values: Mapping[str, object], *, ranks: RankSelection = None, timeout: float | None = None) -> None:
        """Assign the variables `values` on `ranks`. All ranks read one copy in shared memory.

        A function of the notebook brings copies of the global variables that it uses: what a cell assigns to these
        names on the ranks later does not reach it. Define functions for the ranks in a cell of theirs.

        Example::

            cluster.push({"scale": 0.5, "labels": ["cat", "dog"]})
            cluster.pull("scale")  # [0.5, 0.5]
        """
        packed = pack(dict(zip(_check_names(values), values.values(), strict=True)), store=self._segments)
        self._exchange(packed, Assign, ranks, timeout, "a push")

    def pull(self, name: str, *, ranks: RankSelection = None, timeout: float | None = None) -> list[Any]:
        """Return the variable `name` (or `model.weight`) of `ranks`, in rank order. Tensors arrive on the CPU.

        Raises `InvalidArgument`, which suggests similar names, if a rank does not have the name.

        Example::

            cluster.pull("rank")  # [0, 1]
            (weight,) = cluster.pull("model.weight", ranks=0)
            weight.shape  # torch.Size([1, 8])
        """
        chosen = self.select(ranks)
        if not isinstance(name, str):
            raise InvalidArgument(f"pull expects the name of one variable, got {type(name).__name__}")
        name = python_name(name)
        tasks = dict.fromkeys(chosen, (lambda cell: FetchValue(cell=cell, name=name), ()))
        hint = f"; %distributed peek {name} reads it while a cell runs"
        return list(self._collect(tasks, timeout, f"a pull of {name}", queue_hint=hint).values())

    def scatter(
        self, name: str, values: Sequence[object], *, ranks: RankSelection = None, timeout: float | None = None
    ) -> None:
        """Assign `values[i]` to `name` on the i-th of `ranks`. Raises `InvalidArgument` if the lengths differ.

        Example::

            cluster.scatter("file", ["train-0.csv", "train-1.csv"])
            cluster.pull("file")  # ['train-0.csv', 'train-1.csv']
        """
        chosen = self.select(ranks)
        if ranks is not None and not isinstance(ranks, str):
            order = _numbers_of(ranks)  # `select` sorts them
            if len(order) != len(chosen):
                raise InvalidArgument(f"scatter expects every rank once, got {', '.join(map(str, order))}")
            chosen = order
        if len(values) != len(chosen):
            raise InvalidArgument(
                f"scatter expects one value per rank, got {len(values)} values for {len(chosen)} ranks"
                f" ({format_ranks(chosen)})"
            )
        (name,) = _check_names((name,))
        packed: list[Packed] = []
        # Values are packed one by one. If one cannot be packed, or cannot be sent, the segments of the others must be
        # removed.
        try:
            packed += (pack({name: value}, store=self._segments) for value in values)
            tasks = {
                # A default argument, because a closure would see the last item only.
                rank: (lambda cell, p=item: Assign(cell=cell, payload=p.payload), item.frames)
                for rank, item in zip(chosen, packed, strict=True)
            }
            self._collect(tasks, timeout, f"a scatter of {name}")
        finally:
            self._discard(*packed)

    def gather(self, name: str, *, ranks: RankSelection = None, timeout: float | None = None) -> list[Any]:
        """Return the same as `pull`, but join lists and tuples of the ranks into one list, in rank order.

        Example::

            cluster.run("names = [f'sample-{rank}']")
            cluster.gather("names")  # ['sample-0', 'sample-1']
        """
        pulled = self.pull(name, ranks=ranks, timeout=timeout)
        if pulled and all(isinstance(part, (list, tuple)) for part in pulled):
            return [item for part in pulled for item in part]
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
        session: bool = False,
        has_other_output: bool = False,
    ) -> RunningCell:
        """Submit `code` as a cell and return at once; `wait` waits for it.

        `number` is the notebook's execution count, for tracebacks. `page` is the `view` of `RunningCell`, `head` its
        `make_header`, `has_other_output` the same there. With `measure`, `take_values` then returns a `Measured` per
        rank. `file` is the file name under which a debugger knows the cell. `session`: the ranks keep the cell in `In`
        and its value in `Out`.
        """
        chosen = self.select(ranks)
        # Ranks of one host get the same object, which is encoded once.
        makers: dict[Measure | None, Callable[[int], Message]] = {}
        tasks: dict[int, tuple[Callable[[int], Message], Any]] = {}
        for rank in chosen:
            of_rank = None if measure is None else self._measure_on(rank, measure)
            make = lambda cell, m=of_rank: RunCell(cell, code, number, m, file, session)  # noqa: E731
            tasks[rank] = (makers.setdefault(of_rank, make), ())
        return self._submit(
            tasks, number=number, sink=sink, label="", view=page, make_header=head, has_other_output=has_other_output
        )

    def _measure_on(self, rank: int, measure: Measure) -> Measure:
        """Return `measure` by the clocks of the rank's host, so that the times of all hosts have one axis."""
        if (hosts := self._processes.hosts) is None:
            return measure
        offset = hosts.clock_offset(rank)
        return Measure(measure.profile, measure.epoch + round(1e9 * offset.wall), offset.monotonic)

    def interrupt_cell(self, cell: RunningCell) -> None:
        """Interrupt one cell on its ranks; remove it if it is still queued."""
        self._processes.driver.post(ev.InterruptCell(cell.cell))

    def interrupt(self, ranks: RankSelection = None) -> tuple[int, ...]:
        """Interrupt the cells that `ranks` run, and remove the cells that are queued for them.

        Returns all ranks of the cells that were running.

        Example::

            interrupted = cluster.interrupt(ranks=[0])  # in another thread than the one that runs the cell
        """
        driver = self._processes.driver
        chosen = self.select(ranks)
        # Under the lock, so that none of the queued cells starts between the look and the interrupt.
        with driver.changed:
            waiting = [cell for cell in driver.active_cells() if cell.started is None]
            for queued in waiting:
                if not set(chosen).isdisjoint(queued.ranks):
                    driver.post(ev.InterruptCell(queued.cell))
        # A copy of the items: the driver thread may change the dict, and this thread does not hold the lock here.
        internal = {number for number, entry in tuple(self._state.cells.items()) if entry.internal}
        cells = {self._state.ranks[rank].cell for rank in chosen} - {None} - internal
        # An interrupt ends a cell on all of its ranks, also on those that were not chosen.
        hit = tuple(rank for rank in self._state.ranks if self._state.ranks[rank].cell in cells)
        for cell in cells:
            if cell is not None:
                driver.post(ev.InterruptCell(cell))
        return hit

    def wake(self) -> None:
        """Wake the driver thread."""
        self._processes.driver.wake()

    def cells(self) -> list[RunningCell]:
        """Return the cells that are running or queued, oldest first."""
        return self._processes.driver.active_cells()

    # Ranks

    def status(self, *, timeout: float = _ANSWER_TIMEOUT) -> list[RankStatus]:
        """Return the status of every rank. Busy and idle ranks have `timeout` seconds to reply.

        Example::

            for entry in cluster.status():
                print(entry.rank, entry.state, entry.device, entry.pid)
        """
        driver = self._processes.driver
        unresponsive = driver.liveness.wait_unresponsive(driver.live_ranks(), timeout=_check_timeout(timeout))
        statuses = []
        hosts = self._processes.hosts
        for rank, entry in self._state.ranks.items():
            cell = driver.cell_of(rank)
            state = describe_unresponsive(unresponsive[rank]) if rank in unresponsive else self._state_of(rank)
            if hosts is not None and (seconds := hosts.unreachable(rank)) is not None:
                state = f"{self._state_of(rank)}, {hosts.name_of(rank)} not reachable for {seconds:.0f} s"
            if entry.lost_device and rank not in unresponsive:
                state += ", device lost"
            device = self._processes.assignment.devices[rank]
            statuses.append(
                RankStatus(
                    rank,
                    state,
                    device,
                    driver.rank_processes[rank].pid,
                    cell.label if cell else None,
                    entry.loss,
                    entry.empty,
                    unresponsive[rank].silence if rank in unresponsive else 0.0,
                    entry.lost_device,
                    "" if hosts is None else hosts.name_of(rank),
                )
            )
        return statuses

    def _state_of(self, rank: int) -> str:
        state = self._state.ranks[rank].state
        if state is not RankState.BUSY:
            return state.name.lower()
        return self._processes.driver.liveness.debugs.paused.get(rank, "running")

    def restart(self, ranks: RankSelection = None, *, timeout: float = START_TIMEOUT) -> tuple[int, ...]:
        """Start new processes with empty namespaces for `ranks`; return the restarted ranks.

        The other ranks keep their variables. The process group is formed anew once every rank has connected and is
        idle. Raises `StartError`.

        Example::

            with Cluster(2) as cluster:
                cluster.run("x = rank")
                cluster.restart(1)
                cluster.pull("x", ranks=0)  # rank 1 has no x any more
        """
        chosen, timeout = self.select(ranks), _check_timeout(timeout)
        try:
            self._processes.launch(chosen, timeout=timeout)
        finally:
            # The variables of these ranks are gone: `heal` must not complete a resize as if they had stayed.
            emptied = {rank for rank in chosen if self._state.ranks[rank].empty}
            if self._pending is not None and emptied:
                staying = tuple(rank for rank in self._pending.staying if rank not in emptied)
                self._pending = replace(self._pending, staying=staying)
                store_pending(self._segments.folder, self._pending)
        self._renew_number_watch(chosen)
        self._renew_protection(chosen, timeout)
        return chosen

    def _renew_protection(
        self, new: tuple[int, ...], timeout: float, headers: Mapping[int, list[SnapshotHeader]] | None = None
    ) -> None:
        """Protect new ranks as well: the others would wait for their snapshots. It ends if all ranks are new.

        While other ranks run a cell, nothing is done, because that may take as long as the cell. `headers` are those of
        all snapshots, where they are known already.
        """
        status = self.protection() if headers is None else self._describe_protection(headers)
        if status is not None and self._all_idle():
            self.protect(status.every if len(new) < self.world_size else 0, timeout=timeout)

    def _all_idle(self) -> bool:
        return all(entry.state is RankState.IDLE for entry in self._state.ranks.values())

    def resize(self, n: int, *, timeout: float = START_TIMEOUT) -> Resized:
        """Change the number of ranks to `n`, in place; return what has become of the state.

        Ranks below `n` keep their processes and variables, ranks from `n` on end, and new ranks get the variables of
        another rank as in `heal`. Prepared models, optimizers and schedulers continue at the same step, and prepared
        loaders with the samples that no rank has had in this epoch. Shards move through shared memory, by the plan with
        which a checkpoint is loaded on another number of ranks. Gradients that have not been applied are dropped.

        Everything is checked before anything changes. Raises `InvalidArgument`, with the arithmetic, if a device mesh,
        a loader or the devices do not fit `n` ranks, if shared memory has no room for the shards, and for ranks on
        other hosts; `RankLostError` if a rank is dead. A rank that dies later on is replaced. If that fails too, `heal`
        completes the resize.

        Example::

            with Cluster(2) as cluster:
                cluster.resize(3)
                cluster.world_size  # 3
        """
        timeout = _check_timeout(timeout)
        if self._processes.hosts is not None:
            raise InvalidArgument(
                "resize requires all ranks on the notebook's host; with other hosts save a checkpoint and start again"
            )
        if self._pending is not None:
            return self._complete_resize(self._pending, timeout)
        self._processes.assign(n)  # raises
        if n == self.world_size:
            return Resized(n, n)
        self._processes.wait_exits()
        self._check_available(self._all_ranks)
        make = lambda cell: CheckResize(cell=cell, world_size=n)  # noqa: E731 - used once
        # Up to the assignment of `self._pending` nothing has changed, and an error leaves everything as it was. After
        # it the resize goes forward only: the shards of the former ranks are in the folder, and any attempt can begin
        # from them.
        pending = plan_resize(self._collect(dict.fromkeys(self._all_ranks, (make, ())), timeout, "resize"), n)
        folder = handover_folder(self._segments.folder, next(_resizes))
        try:
            if pending.meshes and pending.size:
                forget_handovers(folder.parent)
                check_room(folder.parent, pending.size)
                folder.mkdir(mode=0o700)
                pending = with_folder(pending, folder)
                give = lambda cell: HandOver(cell=cell, folder=str(folder))  # noqa: E731 - used once
                self._collect(dict.fromkeys(self._all_ranks, (give, ())), timeout, "resize")
            staying = tuple(rank for rank in self._all_ranks if rank < n)
            self._pending = pending = replace(pending, staying=staying)
            return self._complete_resize(pending, timeout)
        finally:
            if self._pending is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _shrink(self, timeout: float) -> Resized | None:
        """Go on with the ranks that live. None if no rank is dead."""
        if self._processes.hosts is not None:
            raise InvalidArgument("heal --shrink requires all ranks on the notebook's host")
        self._processes.wait_exits()
        entries = self._state.ranks
        dead = [rank for rank, entry in entries.items() if entry.state is RankState.DEAD or entry.lost_device]
        if not dead:
            return None
        alive = tuple(rank for rank in entries if rank not in dead)
        n = len(alive)
        make = lambda cell: CheckResize(cell=cell, world_size=n)  # noqa: E731 - used once
        checks = self._collect(dict.fromkeys(alive, (make, ())), timeout, "heal")
        pending = plan_resize(checks, n)
        # A dead rank's shards are in its snapshot or in a replica, which only heal can read. And a new rank is filled
        # from one that keeps its number.
        if pending.meshes or not any(rank < n for rank in alive):
            healed = self.heal(timeout=timeout)
            assert isinstance(healed, Healed)
            if pending.meshes and not healed.restored_from:
                raise RankLostError(
                    f"the shards of {name_ranks(dead)} are lost, so that there is no smaller layout to go on with: "
                    f"{healed}\nload a checkpoint",
                    tuple(dead),
                )
            return replace(self.resize(n, timeout=timeout), restored=healed.restored)
        self._processes.discard(tuple(dead), "has lost its device")
        devices = shrunk_devices(self._processes.assignment.devices, dead)
        staying = tuple(rank for rank in alive if rank < n)
        self._pending = replace(pending, former=len(entries), devices=devices, staying=staying)
        return replace(self._complete_resize(self._pending, timeout), died=tuple(dead), replaced=())

    def _complete_resize(self, pending: PendingResize, timeout: float) -> Resized:
        """Change the ranks, and repeat that if a rank dies meanwhile."""
        self._resizing = True
        resized: Resized | None = None
        unprotected = ""
        try:
            # An attempt that fails is repeated with the ranks that live. Ranks that died count as new in the next
            # attempt, and those that were new before are started again, because they may have a part of the state. What
            # is never repeated is the hand-over: the files outlive the ranks that wrote them.
            for attempt in range(_RESIZE_ATTEMPTS):
                try:
                    resized = self._change_ranks(pending, timeout)
                    remove_all(self._segments.folder)
                    # Before the shards are removed, which a rank needs that dies before it has a snapshot.
                    unprotected = self._protect_again(pending.every, timeout)
                except (CellError, RankLostError, StartError, CellTimeout) as error:
                    pending, live = self._pending or pending, self._state.live_ranks()
                    if attempt + 1 == _RESIZE_ATTEMPTS or not live:
                        raise RankLostError(describe_failure(pending, error, live), ()) from error
                else:
                    break
            assert resized is not None
            self._pending = None
            forget_pending(self._segments.folder, pending)
            if unprotected:  # now there is the memory of the shards
                unprotected = self._protect_again(pending.every, timeout)
                resized = replace(resized, unprotected=unprotected)
            if resized.healed is not None:
                self._renew_number_watch(resized.healed.ranks)
            return resized
        finally:
            self._resizing = False

    def _protect_again(self, every: int, timeout: float) -> str:
        """Protect the ranks as before the resize. Return the reason if they have too little memory for that."""
        try:
            if every:
                self.protect(every, timeout=timeout)
        except InvalidArgument as error:
            return next(iter(error.errors.values())).value if isinstance(error, CellError) else str(error)
        return ""

    def _change_ranks(self, pending: PendingResize, timeout: float) -> Resized:
        deadline = time.monotonic() + timeout
        self._processes.wait_exits()
        live = self._state.live_ranks()
        staying = tuple(rank for rank in pending.staying if rank in live)
        self._pending = replace(pending, staying=staying)
        # Before the first rank leaves: another notebook process can complete the resize from the record.
        store_pending(self._segments.folder, self._pending)
        new = tuple(rank for rank in range(pending.world_size) if rank not in staying)
        # Those of an attempt before may have got a part of the state.
        self._processes.discard(tuple(rank for rank in new if rank in live), "is started again by the resize")
        try:
            assignment = self._processes.assign(pending.world_size)
            kept = keep_devices(assignment.devices, self._processes.assignment.devices, staying)
            assignment = replace(assignment, devices=pending.devices or kept)
            try:
                self._processes.resize(assignment, new, timeout=timeout)
            finally:
                self._all_ranks = tuple(self._state.ranks)
            entering = {
                rank: (pending.make_enter(rank, assignment.threads, is_new=rank in new), ()) for rank in self._all_ranks
            }
            entered = self._collect(entering, deadline - time.monotonic(), "resize")
            healed = None
            if new:
                donor = self._choose_donor(new)
                healed = self._copy_state(donor, new, {}, (), deadline - time.monotonic(), handed_over=True)
            else:
                adopting = (lambda cell: AdoptState(cell=cell), ())
                self._collect(dict.fromkeys(self._all_ranks, adopting), deadline - time.monotonic(), "resize")
            if pending.folder:
                take = lambda cell: TakeOver(cell=cell, folder=pending.folder)  # noqa: E731 - used once
                self._collect(dict.fromkeys(self._all_ranks, (take, ())), deadline - time.monotonic(), "resize")
        except BaseException:
            # A rank with a part of the state would look healthy.
            alive = tuple(rank for rank in new if rank in self._state.ranks)
            self._processes.discard(alive, "was not completed because the resize failed or was interrupted")
            raise
        self._equal_history = EqualHistory()
        return Resized(
            pending.former,
            pending.world_size,
            step=pending.step,
            healed=healed,
            differing=pending.differing,
            groups=pending.groups,
            replaced=tuple(rank for rank in new if rank < pending.former),
            notes=tuple(dict.fromkeys(note for notes in entered.values() for note in notes)),
        )

    def _choose_donor(self, new: tuple[int, ...]) -> int:
        donor = choose_donor([entry for rank, entry in self._state.ranks.items() if rank not in new])
        if donor is None:
            raise RankLostError("no rank with variables to copy is left", new)
        return donor

    def heal(
        self,
        ranks: RankSelection = None,
        *,
        empty: bool = False,
        shrink: bool = False,
        timeout: float = START_TIMEOUT,
    ) -> Healed | Resized | None:
        """Replace dead ranks by new ones with the variables of a healthy rank. None if there is nothing to do.

        A rank whose device has failed for good counts as dead, although its process lives.
        The other ranks keep their variables, and process groups that they share with the new ranks are recreated. The
        donor is the healthy rank whose variables are the oldest. With `empty`, no variables are copied. Without a dead
        rank, the ranks that are empty since their restart are healed. `ranks` may also name
        a rank that has run cells since it was restarted alone; it loses the variables that these defined. If no rank is
        to be replaced, and a cell has left the ranks of a protected training at different steps, all return to their
        last common snapshot. After an error the new ranks are dead.

        With `shrink`, the cluster goes on without the dead ranks instead, as after `resize`: where their devices are
        gone. The highest ranks take the numbers of dead ones, in new processes on their own devices. Shards come from
        the snapshots of `protect` or from replicas. To read them, and if no rank keeps its number, the dead rank is
        replaced for the time of the move, which needs a device that can be shared, as the CPU.

        Raises `StartError`; `RankLostError` if there is no healthy rank left; `InvalidArgument` for a rank that is
        alive and was not restarted alone.

        Example::

            import os
            import signal

            with Cluster(2) as cluster:
                cluster.run("step = 100")
                os.kill(cluster.status()[1].pid, signal.SIGKILL)
                print(cluster.heal())  # the new rank 1 has the variables of rank 0
        """
        timeout = _check_timeout(timeout)
        if self._pending is not None:
            return self._complete_resize(self._pending, timeout)
        if shrink:
            if ranks is not None or empty:
                raise InvalidArgument("shrink goes on without the dead ranks: it takes no ranks, and not empty=True")
            return self._shrink(timeout)
        # The forkserver reports an exit with a delay. Without this, a rank that the user has just killed would count as
        # healthy, or even as the donor.
        self._processes.wait_exits()
        ranks_now = self._state.ranks
        dead = tuple(rank for rank, entry in ranks_now.items() if entry.state is RankState.DEAD or entry.lost_device)
        chosen = dead if ranks is None else self.select(ranks)
        # Nothing is dead, so the call can only mean the ranks that were restarted alone.
        if ranks is None and not dead and not empty and choose_donor(ranks_now.values()) is not None:
            chosen = tuple(rank for rank in ranks_now if ranks_now[rank].empty)
        # A rank that is being replaced cannot be the donor.
        hosts = self._processes.hosts
        nearby = () if hosts is None else hosts.ranks_near(chosen)
        candidates = [entry for rank, entry in ranks_now.items() if rank not in chosen]
        donor = None if empty else choose_donor(candidates, nearby)

        def is_replaceable(rank: int) -> bool:
            restarted = donor is not None and ranks_now[rank].since > ranks_now[donor].since
            return rank in dead or ranks_now[rank].empty or restarted

        if alive := [rank for rank in chosen if not is_replaceable(rank)]:
            verb = "is" if len(alive) == 1 else "are"
            raise InvalidArgument(f"{name_ranks(alive)} {verb} not dead; %distributed restart starts a new process")
        if not chosen:
            return None if empty or ranks is not None else self._return_to_snapshot(timeout)
        if donor is None and not empty:
            raise RankLostError(
                "no rank with variables to copy is left; %distributed heal --empty starts with empty namespaces", chosen
            )
        if donor is not None and (others := [rank for rank in dead if rank not in chosen]):
            raise InvalidArgument(
                f"{name_ranks(others)} died as well, and all ranks take part; %distributed heal replaces all dead ones"
            )
        # From here on there are ranks whose state is of no step. The record says so to the next notebook process, if
        # this one is killed: it discards them. If this process lives, the `except` below does the same.
        headers = None
        with heal_record(self._segments.folder, () if donor is None else chosen):
            try:
                self._processes.launch(chosen, timeout=timeout)
                if donor is None:
                    healed = Healed(chosen, None)
                else:
                    headers = self._snapshot_headers(timeout)
                    healed = self._restore(donor, chosen, headers, timeout)
            except BaseException:
                # A rank with a part of the variables would look healthy and could become the donor of a later heal. As
                # a dead rank it can be healed again.
                self._processes.discard(chosen, "was not restored because heal failed or was interrupted")
                raise
        self._renew_number_watch(chosen)
        if healed.restored_from != "snapshot":  # from a snapshot, the new ranks are protected already
            self._renew_protection(chosen, timeout, headers)
        return healed

    def _restore(
        self, donor: int, ranks: tuple[int, ...], headers: dict[int, list[SnapshotHeader]], timeout: float
    ) -> Healed:
        healed = self._copy_state(donor, ranks, headers, ranks, timeout)
        if healed.was_refused:
            # The new ranks have sharded models without their shards. Begin again, without these models.
            self._processes.discard(ranks, "could not be restored from its snapshot")
            self._processes.launch(ranks, timeout=timeout)
            healed = replace(self._copy_state(donor, ranks, {}, self._all_ranks, timeout), restored=healed.restored)
        return healed

    def _copy_state(
        self,
        donor: int,
        ranks: tuple[int, ...],
        headers: dict[int, list[SnapshotHeader]],
        replaced: tuple[int, ...],
        timeout: float,
        *,
        handed_over: bool = False,
    ) -> Healed:
        """Copy the variables of `donor` to the new `ranks`, and return all ranks to the last common snapshot.

        Without a snapshot, shards come from replicas without any of the `replaced` ranks, if there are some. With
        `handed_over`, the caller restores them.
        """
        deadline = time.monotonic() + timeout
        version, every = choose_snapshot(headers)
        make_list = lambda cell: ListState(cell, version, replaced, handed_over)  # noqa: E731 - used once
        # Heal has two phases. In the first one the new ranks get the variables of one donor, without the shards that
        # only the dead ranks had (`attempt`). In the second one all ranks, old and new, return to one step: to the last
        # snapshot that is complete, or to the state of replicas (`make_restore`). The first phase copies to the new
        # ranks only. The second one changes all ranks, so it comes last, and it begins with a check on every rank: all
        # of them return to that step, or none does (`RankSnapshots.restore`).
        listed = self._collect({donor: (make_list, ())}, timeout, "heal")[donor]
        random, seeded = b"", False
        if not handed_over:  # a resize has its own
            others = [rank for rank, entry in self._state.ranks.items() if rank not in ranks and not entry.empty]
            describe = (lambda cell: DescribeRandom(cell=cell), ())
            random, seeded = choose_random(self._collect(dict.fromkeys(others, describe), timeout, "heal"), donor)
        adopted: dict[str, Any] = {}
        lost_saves: list[str] = []

        def attempt(names: Sequence[str]) -> str:
            nonlocal adopted
            # A dead rank's background save is reported once by every survivor, in whichever attempt comes first, so the
            # messages of all attempts are collected.
            make_export = lambda cell, stays: ExportState(  # noqa: E731 - used once
                cell, tuple(names), stays, version, replaced, handed_over
            )

            def make_adopt(cell: int, rank: int, payload: Payload) -> AdoptState:
                return AdoptState(cell=cell, payload=payload, random=random, seeded=rank if seeded else None)

            try:
                adopted, lost = self._try_restore(donor, ranks, make_export, make_adopt, deadline - time.monotonic())
            except RankLostError:
                losses = [self._state.ranks[rank].loss or "" for rank in ranks]
                crashes = [loss for loss in losses if has_ended_itself(loss)]
                # A resize replaces lost ranks itself.
                if handed_over or not names or not crashes:
                    raise
                # Probably the code that unpickles a variable. New ranks for the search for that variable.
                self._processes.discard(ranks, "was not restored because heal begins again")
                self._processes.launch(ranks, timeout=deadline - time.monotonic())
                attempt(())  # raises if the ranks end without any variable too
                return f"the rank that unpickled it {crashes[0]}"
            lost_saves.extend(lost)
            return str(adopted["refused"])

        # All variables travel in one pickle, because they share objects: an optimizer refers to the parameters of a
        # model, and a closure to both. If one cannot be unpickled, all are refused, and `copy_variables` searches for
        # it with fewer names.
        refused = copy_variables(listed["names"], attempt)
        outcome, restored_from = describe_no_snapshot(headers, listed["last_saved"]), ""
        # The second phase. Without a snapshot or replicas there is nothing to return to: the new ranks go on with the
        # donor's state, and the others with theirs.
        if version is not None or listed["replicas"]:

            def make_restore(cell: int) -> Message:
                if version is None:
                    return RestoreReplicas(cell=cell, replaced=ranks)
                return RestoreSnapshot(cell=cell, version=version, every=every)

            tasks = dict.fromkeys(self._all_ranks, (make_restore, ()))
            outcome, refused_snapshot = summarize_restore(
                self._collect(tasks, deadline - time.monotonic(), "heal"), ranks
            )
            if refused_snapshot:
                return Healed(ranks, donor, restored=outcome, was_refused=True)
            restored_from = "replicas" if version is None else "snapshot"
        # Only after the last attempt: until then the new ranks must not count as donors.
        self._processes.note_restored(ranks, donor)
        missing = {**listed["missing"], **refused}
        healed = summarize_recovery(ranks, donor, adopted, missing, next(iter(lost_saves), ""))
        return replace(healed, restored=outcome, restored_from=restored_from)

    def _return_to_snapshot(self, timeout: float) -> Healed | None:
        """Return all ranks to their last common snapshot if a cell has left them at different places of the training.

        None if they are together, or not protected.
        """
        if self.protection() is None or any(map(self._state.is_busy, self._state.ranks.values())):
            return None
        deadline = time.monotonic() + timeout

        def ask(make: Callable[[int], Message]) -> dict[int, Any]:
            return self._collect(dict.fromkeys(self._all_ranks, (make, ())), deadline - time.monotonic(), "heal")

        places = {rank: report["place"] for rank, report in ask(lambda cell: Protect(cell=cell, every=None)).items()}
        if None in places.values() or not describe_places(places):
            return None
        headers = self._snapshot_headers(deadline - time.monotonic())
        version, every = choose_snapshot(headers)
        if version is None:
            return Healed((), None, restored=describe_no_snapshot(headers, ""), was_refused=True)
        # The reducers of DDP models are made anew, as at the step of the snapshot.
        ask(lambda cell: AdoptState(cell=cell))
        answers = ask(lambda cell: RestoreSnapshot(cell=cell, version=version, every=every))
        text, was_refused = summarize_restore(answers, ())
        return Healed((), None, restored=text, was_refused=was_refused, restored_from="" if was_refused else "snapshot")

    def _snapshot_headers(self, timeout: float) -> dict[int, list[SnapshotHeader]]:
        """Return the headers of the snapshots of all ranks. Those of other hosts are read by ranks of these hosts."""
        hosts = self._processes.hosts
        if hosts is None:
            return read_headers(self._segments.folder, self._all_ranks)
        return merge_headers(self._list_snapshots(hosts, timeout))

    def _list_snapshots(
        self, hosts: Hosts, timeout: float, *, remove: bool = False
    ) -> list[dict[int, list[SnapshotHeader]]]:
        # One rank of each host reads the files of all. The oldest is the last: a new one has to import modules first.
        newest_first = sorted(self._all_ranks, key=lambda rank: self._state.ranks[rank].since, reverse=True)
        readers = {hosts.seats[rank].host: rank for rank in newest_first}
        tasks = dict.fromkeys(readers.values(), (lambda cell: ListSnapshots(cell, remove), ()))
        return list(self._collect(tasks, timeout, "protect").values())

    def _try_restore(
        self,
        donor: int,
        ranks: tuple[int, ...],
        make_export: Callable[[int, bool], ExportState],
        make_adopt: Callable[[int, int, Payload], AdoptState],
        timeout: float,
    ) -> tuple[Any, list[str]]:
        """Export variables from `donor` by the message that `make_export` returns, and adopt them on the new `ranks`.

        Return one of the replies (`rank.recovery.AdoptedState`), and the other ranks' messages about a lost save.
        """
        # See `_collect`. The values are not taken here: the payload is passed on without being opened.
        with deferred_interrupts():
            hosts = self._processes.hosts
            stays = hosts is not None and hosts.on_one_agent((donor, *ranks))
            make = lambda cell: make_export(cell, stays)  # noqa: E731 - used once
            export = self._submit({donor: (make, ())}, number=0, sink=None, label="heal")
            self.wait(export, timeout=timeout)
        try:
            self._check(export)
        except CellError as error:
            return {"refused": error.errors[donor].value if donor in error.errors else str(error)}, []
        except BaseException:  # `timeout` has passed, or the ranks were stopped; the donor may still answer
            export.discard_values(self._segments.discard)
            if hosts is not None:
                hosts.abandon(export.cell)
            raise
        payload, frames = export.values.pop(donor)  # not kept in memory with the cell
        try:
            restarted_ranks = {
                rank: (lambda cell, rank=rank: make_adopt(cell, rank, payload), frames) for rank in ranks
            }
            # The other ranks take part without a payload: they rebuild the reducers of their DDP models, so that all
            # ranks agree on the buckets.
            adopting = {
                rank: (lambda cell: AdoptState(cell=cell), ()) for rank in self._state.ranks if rank not in ranks
            }
            answers = self._collect({**adopting, **restarted_ranks}, timeout, "heal")
        # The exported buffers have several readers, so none of them removes the files.
        finally:
            for segment in payload.segments:
                self._segments.discard(segment)
        lost_saves = [answers[rank]["lost_save"] for rank in adopting if answers[rank]["lost_save"]]
        return next((answers[rank] for rank in ranks if answers[rank]["refused"]), answers[ranks[0]]), lost_saves

    def protect(self, every: int | None = 1, *, timeout: float = START_TIMEOUT) -> Protection:
        """Keep a snapshot of the training state of all ranks in shared memory, from which `heal` restores dead ranks.

        A snapshot is taken after every `every` steps of the prepared optimizers, and one now. `every=0` ends the
        protection and frees the memory; None only reports. After an error the interval is that of before. Raises
        `InvalidArgument`, with the arithmetic, if there is too little shared memory, and the errors of `run`.

        Example::

            cluster.run("model, optimizer = accelerator.prepare(model, optimizer)")
            print(cluster.protect(every=10))
            cluster.protect(0)  # ends it
        """
        timeout = _check_timeout(timeout)
        before = self.protection() if every else None
        submitted: list[RunningCell] = []
        try:
            answers = self._send_protect(every, timeout, on_submit=submitted.append)
        except BaseException:
            # All ranks are protected, or none is. A call that was removed from the queue has changed nothing, and what
            # it has waited for may still run.
            if every and any(cell.started is not None and cell.ended for cell in submitted):
                self._set_protection_back(0 if before is None else before.every, timeout)
            raise
        if every == 0:
            # Also of ranks that have been restarted since they took them.
            remove_all(self._segments.folder)
            if (hosts := self._processes.hosts) is not None:
                self._list_snapshots(hosts, timeout, remove=True)
        first = answers[0]
        status = self.protection()
        if status is None and first["every"]:
            status = ProtectionStatus(first["every"])
        return Protection(status, first["unprotected"])

    def _set_protection_back(self, every: int, timeout: float) -> None:
        for interval in dict.fromkeys((every, 0)):  # without protection if a rank fails once more
            with contextlib.suppress(RankbookError):
                self._send_protect(interval, timeout)
                return

    def _send_protect(
        self, every: int | None, timeout: float | None, *, on_submit: Callable[[RunningCell], None] = lambda _: None
    ) -> dict[int, Any]:
        __tracebackhide__ = True
        tasks = dict.fromkeys(self._all_ranks, (lambda cell: Protect(cell=cell, every=every), ()))
        return self._collect(tasks, timeout, "protect", on_submit=on_submit)

    def protection(self) -> ProtectionStatus | None:
        """Return the status of the protection, None if no rank has a snapshot.

        The files of this host are read without asking a rank. If there are other hosts, the ranks are asked for theirs.

        Example::

            cluster.run("model, optimizer = accelerator.prepare(model, optimizer)")
            cluster.protect(every=10)
            cluster.protection().every  # 10
            cluster.protect(0)
            cluster.protection() is None  # True
        """
        if self._processes.hosts is None:
            headers = read_headers(self._segments.folder, self._all_ranks)
        else:
            headers = self._monitor.snapshots()
        return self._describe_protection(headers)

    def _describe_protection(self, headers: Mapping[int, list[SnapshotHeader]]) -> ProtectionStatus | None:
        processes = self._processes
        return describe_protection(
            headers, time.time(), copies=processes.snapshot_copies, clock_offset=processes.clock_offset
        )

    def stop(self) -> None:
        """Stop all ranks and remove their files except the logs. A second call does nothing."""
        self._processes.stop()

    def describe(self) -> str:
        """Describe devices, backend and threads, for the user."""
        devices = sorted(set(self._processes.assignment.devices))
        alone = self._processes.hosts is None
        shared = " (shared)" if alone and len(devices) < self.world_size and devices[0] != "cpu" else ""
        threads = plural(self._processes.assignment.threads, "thread")
        hosts = self.hosts()
        where = f" on {plural(len(hosts), 'host')}" if hosts else ""
        return f"{', '.join(devices)}{shared}{where}, {self.backend}, {threads} per rank"

    def hosts(self) -> list[HostStatus]:
        """Return the status of the hosts that agents represent. Empty if all ranks run on this host."""
        hosts = self._processes.hosts
        return [] if hosts is None else hosts.status()

    def describe_launcher(self) -> str:
        """Describe what the launcher of the other hosts has reported: a queue, the end of their time, errors."""
        return self._processes.engine_status

    @property
    def launcher(self) -> str:
        """Return the name of the launcher that has started the other hosts; empty if all ranks run on this one."""
        return self._processes.launcher

    @property
    def ended_because(self) -> str:
        """Return why the ranks were stopped although nobody has asked for it; empty otherwise."""
        return self._processes.ended_because

    def take_notes(self) -> list[str]:
        """Return what the other hosts and their launcher have reported while no cell was running, once."""
        return self._processes.take_notes()

    def describe_refusals(self) -> str:
        """Describe the connections and packets that the link to other hosts has refused; empty without one."""
        hosts = self._processes.hosts
        if hosts is None:
            return ""
        refused, dropped = hosts.hub.refusals, hosts.hub.dropped
        parts = [f"{plural(refused, 'connection')} without the key refused"] if refused else []
        return ", ".join([*parts, f"{plural(dropped, 'packet')} dropped"] if dropped else parts)

    def describe_group(self) -> str:
        """Describe whether all ranks are in one process group, for the user."""
        if self._state.grouped:
            return "all ranks are in one process group"
        dead = [rank.rank for rank in self._state.ranks.values() if rank.state is RankState.DEAD]
        hint = f"run %distributed heal or %distributed restart {format_ranks(dead)}"
        return f"the process group waits for {name_ranks(dead)}; {hint}"


def _numbers_of(ranks: int | Sequence[int]) -> tuple[int, ...]:
    """Return the ranks in the order given. NumPy's integers and arrays are taken too. Raises `InvalidArgument`."""
    with contextlib.suppress(TypeError):
        return (operator.index(cast("int", ranks)),)
    try:
        return tuple(map(operator.index, cast("Sequence[int]", ranks)))
    except TypeError as error:
        raise InvalidArgument(f"invalid ranks {ranks!r}: expected numbers, or a text such as '0,2-3'") from error


def _check_timeout(timeout: object) -> float:
    """Convert a number of seconds of any type. Raises `InvalidArgument` for other values, NaN among them."""
    try:
        # Unlike `float`, it takes no text.
        if not math.isnan(timeout):  # type: ignore[arg-type]  # raises TypeError for other values
            # Beyond TIMEOUT_MAX, the waits of Python raise OverflowError. Half of it leaves room for additions.
            return min(float(timeout), threading.TIMEOUT_MAX / 2)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(f"timeout must be a number of seconds, got {timeout!r}")


def _check_names(names: Iterable[object]) -> list[str]:
    """Return the names as Python stores them. Raises `InvalidArgument` for what is no name of a variable."""
    checked = []
    for name in names:
        if not isinstance(name, str) or not is_variable_name(name):
            raise InvalidArgument(f"invalid variable name {name!r}: expected a Python identifier")
        checked.append(python_name(name))
    return checked


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank at one moment.

    `state` is idle, running, starting, leaving, dead or absent; for a live rank that does not reply, it is like
    `unresponsive for 12 s, process running, 3.1 s of CPU time`; for a rank paused in a debugger, the place where it is
    paused. `loss` says how the rank died. `empty`: it was restarted, or healed without variables, and has run nothing
    successfully since, so `heal` does not copy from it. `silence`: how long an unresponsive rank has been silent, in
    seconds. `lost_device`: the error of the rank's device, if it has failed for good; `heal` replaces such a rank.
    `host`: the name of the rank's host, empty for the notebook's host.
    """

    rank: int
    state: str
    device: str
    pid: int | None
    cell: str | None
    loss: str | None
    empty: bool = False
    silence: float = 0.0
    lost_device: str = ""
    host: str = ""
