"""One task on its way through the ranks.

Owns: what the task is, its output, its waiters and its result. Refuses: to decide when it starts or ends.

Output is handled on the driver's thread only. Waiters are told through a queue, so that the notebook's main thread can
wait for the end and for questions (`input()`) in one place.
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
    Assign,
    CallFunction,
    Clear,
    Display,
    Done,
    InputReply,
    InputRequest,
    Message,
    Payload,
    RunCell,
    Text,
    TextCut,
)

Frames = Sequence[bytes | memoryview]

SHOW_EVERY = 0.05
"""Seconds between two messages of a cell's output: a front end drops what comes in more than 1,000 a second."""
HEAD_AFTER, HEAD_EVERY, HEAD_AGAIN = 1.0, 1.0, 0.2
"""Seconds that a cell runs until its head is shown, between two updates of it, and till the first, which knows more."""
_TAIL = 4096
"""Bytes of a rank's output that are kept for whoever asks what it printed last."""


class Sink(Protocol):
    """Where a cell's output goes. Called from the driver's thread."""

    def emit(self, items: Sequence[Emit]) -> None:
        """Show these, in order."""


class StatusHeader(Protocol):
    """What stands above the output of a cell that takes a while. Called from the driver's thread."""

    def now(self) -> Mapping[str, str]:
        """A mime bundle of what its ranks do."""

    def end(self, result: CellResult) -> Mapping[str, str]:
        """What stays there."""


@dataclass(frozen=True)
class InputQuestion:
    """A rank waits for a line from the person."""

    rank: int
    request: InputRequest


@dataclass(frozen=True)
class CellEnded:
    """The cell is over; its result is there."""


class RunningCell:
    """One cell, call, push or pull. `tasks[rank]` is what that rank is sent.

    `page` is what its output is shown on, by default one stream; `head` makes what stands above that, once it takes a
    while.
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
        page: OutputView | None = None,
        head: Callable[[RunningCell], StatusHeader] | None = None,
    ) -> None:
        self.cell = cell
        self.number = number
        self.ranks = tuple(sorted(tasks))
        self.tasks = tasks
        self.label = label or (f"cell [{number}]" if number else "a call")
        self.inbox: queue.SimpleQueue[InputQuestion | CellEnded | None] = queue.SimpleQueue()
        self.values: dict[int, tuple[Payload, list[memoryview]]] = {}
        self.result: CellResult | None = None
        self.ended = False
        self.started: float | None = None
        self.stragglers: tuple[int, ...] = ()
        self.timed_out: float | None = None
        self.waiting_behind: tuple[int, ...] = ()
        self.on_change: list[Callable[[], None]] = []
        self.heard: Counter[tuple[int, str]] = Counter()
        self._tails: dict[int, bytes] = {}
        self._open = set(self.ranks)
        self._sink = sink
        self._merger = OutputMerger(self.ranks, key=f"{cluster_key}-{cell}", cluster_key=cluster_key, page=page)
        self._make_head = head
        self._head: StatusHeader | None = None
        self._head_due: float | None = None
        self._builder = ResultBuilder(cell, number, self.ranks)
        self._submitted = time.monotonic()
        self._quiet = sink is None
        self._left_out = False
        self._shown_at = 0.0

    @property
    def fills(self) -> bool:
        """Whether it may give its ranks variables."""
        return any(isinstance(message, (RunCell, CallFunction, Assign)) for message, _ in self.tasks.values())

    @property
    def state(self) -> str:
        """`queued`, `running` or `ended`, for people."""
        return "ended" if self.result is not None else "queued" if self.started is None else "running"

    @property
    def closed(self) -> bool:
        """Whether no rank has anything left to say to it."""
        return self.result is not None and not self._open

    def tell(self) -> None:
        """Tell whoever watches that the state changed."""
        for callback in tuple(self.on_change):
            callback()

    def start(self) -> bool:
        """Its tasks have been sent, so that output may arrive meanwhile. Whether `flush` is due if none does."""
        self.started = time.monotonic()
        if self._make_head is not None:
            self._head_due = self.started + HEAD_AFTER
        self.tell()
        return self._make_head is not None

    def feed(self, rank: int, message: Text | TextCut | Display | Clear) -> None:
        """A rank has printed or shown something."""
        if isinstance(message, Text):
            self.heard[rank, message.stream] += len(message.data)
            self._tails[rank] = (self._tails.get(rank, b"") + message.data[-_TAIL:])[-_TAIL:]
        if not isinstance(message, Clear):
            self._builder.feed(rank, message)
        if not self._quiet:
            self._merger.feed(rank, message, time.monotonic())

    def tail(self, rank: int) -> bytes:
        """The last bytes that a rank has printed here, both streams as they came. Any thread."""
        return self._tails.get(rank, b"")

    def done(self, rank: int, message: Done, frames: list[memoryview]) -> None:
        """A rank has answered."""
        self._open.discard(rank)
        if self.result is None:
            self._builder.done(rank, message)
        if message.payload is not None:
            self.values[rank] = (message.payload, frames)
        self._show(lambda now: self._merger.finish(rank, now))

    def lost(self, rank: int, words: str) -> None:
        """A rank's process is gone; `words` is the whole sentence."""
        self._open.discard(rank)
        if self.result is None:
            self._builder.lost(rank, words)
        self._show(lambda now: self._merger.drain_rank(rank, now))
        self._show(lambda now: self._merger.finish(rank, now))

    def ask(self, rank: int, request: InputRequest) -> None:
        """A rank waits for a line: what it printed before is shown first."""
        self._show(lambda now: self._merger.drain_rank(rank, now))
        self.inbox.put(InputQuestion(rank, request))

    def flush(self) -> None:
        """Show what may be shown by now."""
        self._shown_at = now = time.monotonic()
        if self._head_due is None or now < self._head_due or self._make_head is None:
            self._show(self._merger.flush)
            return
        self._head_due = now + HEAD_EVERY
        if self._head is None:
            self._head = self._make_head(self)
            self._head_due = now + HEAD_AGAIN
        head = self._head
        self._show(lambda now: self._merger.head(head.now(), now))

    @property
    def deadline(self) -> float | None:
        """When `flush` is due, on the monotonic clock."""
        due = None if self._quiet else self._merger.deadline
        if due is None:
            return self._head_due
        due = max(due, self._shown_at + SHOW_EVERY)
        return due if self._head_due is None else min(due, self._head_due)

    def note(self, text: str) -> None:
        """Say something of our own beside what the ranks print, while it runs. The driver thread."""
        if self.result is None:
            self._show(lambda _: [Stream("stderr", text)])

    def end(self, stragglers: tuple[int, ...], tell: Callable[[int], str] = "rank {} still runs".format) -> None:
        """It is over. `stragglers` still run, of which `tell` tells; their output still comes here."""
        now = time.monotonic()
        self._show(self._merger.flush if stragglers else self._merger.close)
        self.stragglers = stragglers
        for rank in stragglers:
            self._builder.lost(rank, tell(rank))
        self.result = self._builder.build(now - (self.started or self._submitted))
        self._head_due = None
        if self._head is not None:
            bundle = self._head.end(self.result)
            self._show(lambda now: self._merger.head(bundle, now))
        self.tell()
        self.ended = True  # last: a thread that waits for it returns, and nothing may be shown after that
        self.inbox.put(CellEnded())

    def _show(self, merge: Callable[[float], Sequence[Emit] | None]) -> None:
        """Show what `merge` gives for the present time. Output that cannot be shown is left out; the cell goes on."""
        if self._quiet or self._sink is None:
            return
        try:
            items = merge(time.monotonic()) or ()
        except Exception as error:  # noqa: BLE001 - shown as a whole by `_leave_out`; the merger is used no more
            self._quiet = True
            self._leave_out(error)
            return
        for item in items:
            try:
                self._sink.emit((item,))
            except Exception as error:  # noqa: BLE001 - shown as a whole by `_leave_out`
                self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        """Report output that cannot be shown, once in this cell."""
        if self._left_out or self._sink is None:
            return
        self._left_out = True
        sys.excepthook(type(error), error, error.__traceback__)
        text = f"output of {self.label} cannot be shown, so it is left out ({type(error).__name__}: {error})\n"
        with contextlib.suppress(Exception):  # the front end is gone; the error itself was shown
            self._sink.emit((Stream("stderr", text),))


class OutputFlusher:
    """The cells that have output to show, by their numbers in `cells`. The driver's thread."""

    def __init__(self, cells: Mapping[int, RunningCell]) -> None:
        self._cells = cells
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        """It got some."""
        self._numbers.add(number)

    def discard(self, number: int) -> None:
        """It is gone."""
        self._numbers.discard(number)

    @property
    def deadline(self) -> float | None:
        """When `flush` is due, on the monotonic clock."""
        due = [each for number in tuple(self._numbers) if (each := self._cells[number].deadline) is not None]
        return min(due, default=None)

    def flush(self, now: float) -> None:
        """Show what is due."""
        for number in tuple(self._numbers):
            cell = self._cells[number]
            deadline = cell.deadline
            if deadline is not None and deadline <= now:
                cell.flush()
                deadline = cell.deadline
            if deadline is None:
                self._numbers.discard(number)


def input_unavailable(cell: int) -> InputReply:
    """The answer to a question of a cell that has ended."""
    return InputReply(cell=cell, reason="the cell has ended, so nobody answers here")
