"""Run a cell (or call, push, pull) from submission to result: its tasks, output, input questions and result.

The state machine decides when a cell starts and ends; `RunningCell` holds everything else. Output is merged and shown
on the driver thread only. The waiting thread is notified through the queue `RunningCell.inbox`, so that the notebook's
main thread can wait for the end and for questions (`input()`) in one place. `OutputFlusher` tracks which cells have
output to show.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankbook.output.cell_result import CellResult, ResultBuilder
from rankbook.output.merger import Emit, OutputMerger, OutputView, Stream
from rankbook.protocol.messages import (
    MAX_CELL_OUTPUT,
    Assign,
    CallFunction,
    Clear,
    Display,
    Done,
    InputReply,
    InputRequest,
    Message,
    OutputBarrier,
    Payload,
    RunCell,
    Text,
    TextCut,
)
from rankbook.ranks import name_ranks

Frames = Sequence[bytes | memoryview]

SHOW_EVERY = 0.05
"""Seconds between two messages of a cell's output: Jupyter's front ends drop messages above 1,000 per second."""
HEADER_DELAY, HEADER_INTERVAL, HEADER_FIRST_INTERVAL = 1.0, 1.0, 0.2
"""Seconds until a cell shows its status header, between updates, and from the first to the second one."""
_TAIL = 4096
"""Bytes of a rank's most recent output that are kept for the detail view."""


class Sink(Protocol):
    """Destination of a cell's output. Called on the driver thread.

    One that cannot clear what it has shown has the attribute `can_clear` with the value False, and one that cannot
    update it `shows_live`.
    """

    def emit(self, items: Sequence[Emit]) -> None:
        """Show the items, in order."""


class StatusHeader(Protocol):
    """Status shown above the output of a long-running cell. Called on the driver thread."""

    def current_bundle(self) -> Mapping[str, str]:
        """Return a MIME bundle with the current status of the ranks."""

    def final_bundle(self, result: CellResult) -> Mapping[str, str]:
        """Return the MIME bundle that remains after the cell's end."""


@dataclass(frozen=True)
class InputQuestion:
    """A rank is waiting for the user's answer to `input()`."""

    rank: int
    request: InputRequest


@dataclass(frozen=True)
class CellEnded:
    """The cell has ended and its result is available."""


class RunningCell:
    """One cell, call, push or pull. `tasks[rank]` is the message for that rank.

    `number` is the notebook's execution count, 0 for a call, negative for an internal task. `view` is the view in which
    the output is shown, by default a single stream. `make_header` makes the status header, shown above the output once
    the cell takes a while. `has_other_output`: the notebook's cell shows more than the ranks' output, such as a message
    about the start of the ranks. Any thread may set it later. Unless noted otherwise, the methods are called on the
    driver thread.
    """

    def __init__(
        self,
        cell: int,
        number: int,
        tasks: Mapping[int, tuple[Message, Frames]],
        *,
        cluster_key: str,
        sink: Sink | None,
        label: str = "",
        view: OutputView | None = None,
        make_header: Callable[[RunningCell], StatusHeader] | None = None,
        has_other_output: bool = False,
    ) -> None:
        self.cell = cell
        self.number = number
        self.ranks = tuple(sorted(tasks))
        self.tasks = tasks
        # True if the cell may define variables on its ranks.
        self.defines_variables = any(
            message.defines_variables if isinstance(message, CallFunction) else isinstance(message, (RunCell, Assign))
            for message, _ in tasks.values()
        )
        self.label = label or (f"cell [{number}]" if number else "a call")
        # A SimpleQueue, because the handler of SIGINT puts into it, possibly in the middle of a `get` on the same
        # thread. `put` of the other queues takes a lock and is not reentrant.
        self.inbox: queue.SimpleQueue[InputQuestion | CellEnded | None] = queue.SimpleQueue()
        # Ranks whose question was not answered yet. The waiting thread removes them.
        self.asking: set[int] = set()
        self.values: dict[int, tuple[Payload, list[memoryview]]] = {}
        self._discard: Callable[[str], None] | None = None
        self.result: CellResult | None = None
        self.ended = False
        self.started: float | None = None
        self.stragglers: tuple[int, ...] = ()
        self.timed_out: float | None = None
        self.waiting_behind: tuple[int, ...] = ()
        # Who waits for the cell says so with this text at its end, if the cell stays in the queue. None: says nothing.
        self.queue_hint: str | None = None
        self.on_change: list[Callable[[], None]] = []
        self.has_other_output = has_other_output
        self.received_bytes: Counter[tuple[int, str]] = Counter()
        self._tails: dict[int, bytes] = {}
        # Ranks that may still send something for this cell, stragglers included.
        self._open = set(self.ranks)
        self._sink = sink
        self._view = view
        self._merger = OutputMerger(
            self.ranks,
            key=f"{cluster_key}-{cell}",
            cluster_key=cluster_key,
            view=view,
            can_clear=getattr(sink, "can_clear", True),
            shows_live=getattr(sink, "shows_live", True),
        )
        self._make_header = make_header
        self._header: StatusHeader | None = None
        self._header_due: float | None = None
        self._builder = ResultBuilder(cell, number, self.ranks)
        self._submitted = time.monotonic()
        # Nothing is merged for a cell without a sink, such as a push.
        self._quiet = sink is None
        self._unshown_reported = False
        self._noted: set[str] = set()
        self._shown_at = 0.0
        self._shown_size = 0
        self._limited = False

    @property
    def state(self) -> str:
        """Return `queued`, `running` or `ended`."""
        return "ended" if self.result is not None else "queued" if self.started is None else "running"

    @property
    def closed(self) -> bool:
        """Return True if the cell has ended and no rank will send more for it."""
        return self.result is not None and not self._open

    def describe_timeout(self, option: str = "") -> str:
        """Return how the time limit has ended the cell. `option` stands before the limit, such as `--timeout `."""
        assert self.timed_out is not None
        if self.started is not None:
            return f"{self.label} was interrupted after {option}{self.timed_out:g} s"
        busy = f" (waiting for {name_ranks(self.waiting_behind)})" if self.waiting_behind else ""
        return f"{self.label} did not start within {self.timed_out:g} s{busy} and was removed from the queue"

    def describe_queue(self, blocking_ranks: tuple[int, ...] | None = None) -> str:
        """Return which ranks the queued cell waits for, by default those in `waiting_behind`."""
        behind = self.waiting_behind if blocking_ranks is None else blocking_ranks
        return f"{self.label} on {name_ranks(self.ranks)}: queued, waiting for {name_ranks(behind)}"

    def notify_change(self) -> None:
        """Call the callbacks in `on_change`. Their errors are reported, and do not affect the cell. Any thread."""
        for callback in tuple(self.on_change):
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - shown in full
                sys.excepthook(type(error), error, error.__traceback__)

    def start(self) -> bool:
        """Mark the cell as running; output may already arrive. Called on the thread that sends the tasks.

        Returns True if `flush` is due even without output, because of the status header.
        """
        self.started = time.monotonic()
        # No header for a short cell: it would only flicker.
        if self._make_header is not None:
            self._header_due = self.started + HEADER_DELAY
        self.notify_change()
        return self._make_header is not None

    # Messages of the ranks

    def add_output(self, rank: int, message: Text | TextCut | Display | Clear | OutputBarrier) -> None:
        """Merge text or display output of a rank."""
        if isinstance(message, Text):
            self.received_bytes[rank, message.stream] += len(message.data)
            self._tails[rank] = (self._tails.get(rank, b"") + message.data[-_TAIL:])[-_TAIL:]
        # The result keeps output that was cleared, so it is not told of clears, and keeps the ranks apart.
        if not isinstance(message, Clear | OutputBarrier):
            self._builder.add_output(rank, message)
        if not self._quiet:
            self._merger.add_output(rank, message, time.monotonic())

    def tail(self, rank: int) -> bytes:
        """Return the last bytes that a rank printed in this cell, both streams as they arrived. Any thread."""
        return self._tails.get(rank, b"")

    def rank_done(self, rank: int, message: Done, frames: list[memoryview]) -> None:
        """Record that a rank has finished, with its result."""
        self._open.discard(rank)
        # The result is final once it is built. The answer of a straggler comes too late for it, but its value and its
        # output are still taken.
        if self.result is None:
            self._builder.rank_done(rank, message)
        if message.payload is not None:
            self.values[rank] = (message.payload, frames)
            self._discard_values()
        self._show(lambda now: self._merger.finish(rank, now))

    def discard_values(self, discard: Callable[[str], None]) -> None:
        """Remove the segments of the values, and of those that still arrive, with `discard`. Any thread."""
        self._discard = discard
        self._discard_values()

    def _discard_values(self) -> None:
        # Two threads may come here at once: each value is taken by one of them.
        while self._discard is not None and self.values:
            with contextlib.suppress(KeyError):
                for segment in self.values.popitem()[1][0].segments:
                    self._discard(segment)

    def rank_lost(self, rank: int, reason: str) -> None:
        """Record that a rank's process has ended. `reason` is a whole sentence."""
        self._open.discard(rank)
        if self.result is None:
            self._builder.rank_lost(rank, reason)
        # First what the rank has sent, without waiting for equal lines of other ranks; then its end, upon which the
        # others no longer wait for it.
        self._show(lambda now: self._merger.drain_rank(rank, now))
        self._show(lambda now: self._merger.finish(rank, now))

    def forget_widget(self, comm: str) -> None:
        """Do not show a widget again that is closed."""
        self._merger.forget_widget(comm)

    def ask(self, rank: int, request: InputRequest) -> None:
        """Queue a rank's question, after showing what the rank printed before."""
        self._show(lambda now: self._merger.drain_rank(rank, now))
        # The front end shows a box for the answer in the cell, and later the answer. To clear the cell would remove the
        # box, and nobody could answer.
        self.has_other_output = True
        self.asking.add(rank)
        self.inbox.put(InputQuestion(rank, request))
        self.notify_change()

    def flush(self) -> None:
        """Show the output that is due, and the status header."""
        self._shown_at = now = time.monotonic()
        if self._header_due is None or now < self._header_due or self._make_header is None:
            self._show(self._merger.flush)
            return
        self._header_due = now + HEADER_INTERVAL
        if self._header is None:
            # The first header has no data of the ranks yet: it sends the first queries. The second one follows soon.
            self._header = self._make_header(self)
            self._header_due = now + HEADER_FIRST_INTERVAL
        header = self._header
        may_clear = not self.has_other_output
        self._show(lambda now: self._merger.set_header(header.current_bundle(), now, may_clear=may_clear))

    def take_flood(self) -> tuple[int, ...]:
        """Return the ranks to limit if more than `MAX_CELL_OUTPUT` was shown; once, then none."""
        shown_size = self._shown_size + (0 if self._view is None else self._view.text_size)
        if self._limited or shown_size < MAX_CELL_OUTPUT:
            return ()
        self._limited = True
        return tuple(sorted(self._open))

    @property
    def deadline(self) -> float | None:
        """Return the time at which `flush` is due, on the monotonic clock."""
        due = None if self._quiet else self._merger.deadline
        # Without output only the header is due.
        if due is None:
            return self._header_due
        due = max(due, self._shown_at + SHOW_EVERY)  # rate limit
        return due if self._header_due is None else min(due, self._header_due)

    # Notes, and the end

    def note(self, text: str) -> None:
        """Show a note on stderr between the ranks' output, unless the cell has ended."""
        if self.result is None:
            self.has_other_output = True
            self._show(lambda _: [Stream("stderr", text)])

    def note_once(self, text: str) -> None:
        """Show a note as `note` does, unless it was shown by an earlier call."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def fail(self, reason: str) -> None:
        """Make the cell fail with `reason` although all ranks have succeeded: their results are wrong."""
        self._builder.fail(reason)

    def end(self, stragglers: tuple[int, ...], describe: Callable[[int], str] = "rank {} still runs".format) -> None:
        """End the cell: show the remaining output, build the result, notify the waiting thread.

        `stragglers` are ranks that still run, and `describe` describes them. Their output is still shown in this cell.
        """
        now = time.monotonic()
        # `close` would end the unfinished lines of stragglers, which may continue them.
        self._show(self._merger.flush if stragglers else self._merger.close)
        self.stragglers = stragglers
        # Ranks to which a queued cell was never sent have nothing to send for it.
        self._open.intersection_update(stragglers)
        # A rank has one outcome. A rank that was recorded as lost before stays so.
        for rank in stragglers:
            self._builder.rank_lost(rank, describe(rank), still_running=True)
        self.result = self._builder.build(now - (self.started or self._submitted))
        self.tasks = {}  # large values may be in them, and the cell is kept for a while
        self._header_due = None
        if self._header is not None:
            bundle = self._header.final_bundle(self.result)
            self._show(lambda now: self._merger.set_header(bundle, now))
        self.notify_change()
        # `result` is set earlier: the callbacks of `notify_change` read it.
        self.ended = True  # last: the waiting thread returns on it, after which nothing may be shown
        self.inbox.put(CellEnded())

    def _show(self, merge: Callable[[float], Sequence[Emit] | None]) -> None:
        """Show the items that `merge` returns for the current time.

        Items that cannot be shown are skipped with a report, and the cell continues.
        """
        if self._quiet or self._sink is None:
            return
        try:
            # Merging and showing are two steps, with different consequences of an error. The merger may be in an
            # inconsistent state after one, so that it is not used again. A front end may refuse one item and accept the
            # next.
            items = merge(time.monotonic()) or ()
        except Exception as error:  # noqa: BLE001 - shown in full by `_report_unshown`; the merger is not used again
            self._quiet = True
            self._report_unshown(error)
            return
        for item in items:
            if isinstance(item, Stream):
                self._shown_size += len(item.text)
            try:
                self._sink.emit((item,))
            except Exception as error:  # noqa: BLE001 - shown in full by `_report_unshown`
                self._report_unshown(error)

    def _report_unshown(self, error: Exception) -> None:
        """Report output that cannot be shown, once per cell."""
        if self._unshown_reported or self._sink is None:
            return
        self._unshown_reported = self.has_other_output = True
        sys.excepthook(type(error), error, error.__traceback__)
        text = f"dropped output of {self.label} that cannot be shown ({type(error).__name__}: {error})\n"
        with contextlib.suppress(Exception):  # the front end has disconnected; the error itself was reported
            self._sink.emit((Stream("stderr", text),))


class OutputFlusher:
    """Track which of `cells` have output to show. Driver thread only.

    `limit` is called with a cell and those of its ranks that may still print, when enough of it was shown.
    """

    def __init__(self, cells: Mapping[int, RunningCell], limit: Callable[[int, tuple[int, ...]], None]) -> None:
        self._cells = cells
        self._limit = limit
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        """Mark the cell as having unflushed output."""
        self._numbers.add(number)

    def discard(self, number: int) -> None:
        """Stop tracking the cell."""
        self._numbers.discard(number)

    @property
    def deadline(self) -> float | None:
        """Return the time at which `flush` is due, on the monotonic clock."""
        # A copy: another thread may add a cell that it has just started.
        due = [moment for number in tuple(self._numbers) if (moment := self._cells[number].deadline) is not None]
        return min(due, default=None)

    def flush(self, now: float) -> None:
        """Flush the cells that are due."""
        for number in tuple(self._numbers):
            cell = self._cells[number]
            deadline = cell.deadline
            if deadline is not None and deadline <= now:
                cell.flush()
                if flooding := cell.take_flood():
                    self._limit(number, flooding)
                deadline = cell.deadline
            # Without a deadline, nothing is waiting. The next output adds the cell again.
            if deadline is None:
                self._numbers.discard(number)


def input_unavailable(cell: int) -> InputReply:
    """Return the reply to a question from a cell that has ended."""
    return InputReply(cell=cell, reason="the cell has ended, so input is not available")
