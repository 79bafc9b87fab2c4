"""Pauses of the main thread at the end of an optimizer step, in which the ranks' numbers are checked.

The ranks of a training loop are never at the same step when the notebook asks them. A check of what they hold has to
read it at the end of one and the same step. So the notebook names a step that no rank has reached yet, every rank
pauses at its end, and when all of them do, the checks run on their main threads: also those that are collectives. The
coordinator's half is `coordinator/queries.py`.

The main thread pauses inside of `optimizer.step()`, after the optimizer has done its work, or between two cells. It
continues when the notebook says so, when it names a later step, and after the limit. An interrupt ends the pause and
the cell, as everywhere.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from rankbook.errors import InvalidArgument
from rankbook.numerics import step_ends
from rankbook.protocol.queries import (
    Answer,
    CheckNumbers,
    HashState,
    Hold,
    HoldAtStep,
    HoldReply,
    LocalGradients,
    MeasureDifferences,
    MeasureGradients,
    NumbersReply,
    QueryFailed,
    StateHashes,
)
from rankbook.queues import get_within

Check = HashState | MeasureDifferences | MeasureGradients


class HoldingThread(Protocol):
    """Interface of the main thread's work."""

    def run_when_idle(self, function: Callable[[], None]) -> None:
        """Call `function` on the main thread between two tasks: now, if no task runs."""

    def check_numbers(self, check: Check) -> object:
        """Perform a check. Main thread."""


@dataclass(frozen=True)
class _End:
    """An end of a step: the optimizer's steps, None if it does not count them, and the group's collectives.

    `advances`: there were collectives since the end before.
    """

    steps: int | None
    collectives: int
    advances: bool


@dataclass
class _Work:
    """A check for the main thread. `done` is set when it has a result or an error."""

    check: Check
    value: object = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class HoldHandler:
    """Pause the main thread, and run checks on it while it pauses."""

    def __init__(self, main_thread: HoldingThread) -> None:
        self._main_thread = main_thread
        self._main = threading.main_thread().ident
        # Protects what follows. Held for a few statements only.
        self._lock = threading.Lock()
        self._clock, self._position, self._until = "", 0, 0.0
        self._last: _End | None = None
        self._ends = 0
        self._holds = self._idle = self._asked_idle = False
        # None wakes the main thread up, to look whether it still has to pause.
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        step_ends.listen(self._after_step)

    def cheap_answer(self, question: Hold) -> Answer | None:
        """Answer requests to pause, which never wait. See `RepeatedQueryHandler`."""
        return self._request(question) if isinstance(question, HoldAtStep) else None

    def answer(self, question: Hold) -> Answer:
        """Answer a query, or return `QueryFailed` with the reason."""
        return self._request(question) if isinstance(question, HoldAtStep) else self._perform(question)

    def _request(self, question: HoldAtStep) -> HoldReply:
        with self._lock:
            now = time.monotonic()
            if self._until <= now:  # a new check: what an earlier one has seen is of no use
                self._last, self._ends = None, 0
            self._clock, self._position = question.clock, question.position
            self._until = now + question.seconds if question.seconds > 0 else 0.0
            ask_idle = self._until > 0 and not self._asked_idle
            self._asked_idle = self._asked_idle or ask_idle
            if self._holds:
                self._work.put(None)
            last = self._last
            # The main thread, which this has just woken up, goes on if a later step is named now.
            stays = self._holds and (self._idle or self._is_reached())
            reply = HoldReply(
                question.token,
                stays,
                self._idle,
                last.steps if last is not None else None,
                last.collectives if last is not None and last.advances else None,
                self._ends,
            )
        if ask_idle:
            self._main_thread.run_when_idle(self._when_idle)
        return reply

    def _perform(self, question: CheckNumbers) -> Answer:
        work = _Work(question.check)
        with self._lock:
            if not self._holds:
                return QueryFailed(question.token, "it does not pause any more")
            remaining = self._until - time.monotonic()
            self._work.put(work)
        # The limit ends the pause and the work that has not begun. Work that has begun takes the time that it needs.
        work.done.wait(remaining + 60.0)
        if work.error is not None:
            text = str(work.error) or type(work.error).__name__
            return QueryFailed(question.token, text)
        if not work.done.is_set():
            return QueryFailed(question.token, "the check has not ended in time")
        value = work.value
        if isinstance(value, StateHashes):
            # Within `step()`, a prepared optimizer has not counted the step yet.
            last = self._last
            if last is not None and last.steps is not None and not self._idle:
                value = msgspec.structs.replace(value, steps=max(value.steps or 0, last.steps))
            return NumbersReply(question.token, hashes=value)
        if isinstance(value, LocalGradients):
            return NumbersReply(question.token, gradients=value)
        assert isinstance(value, list)
        return NumbersReply(question.token, differences=tuple(value))

    # Main thread

    def _after_step(self, optimizer: Optimizer) -> None:
        # The usual case: nothing is requested.
        if not self._until or threading.get_ident() != self._main:
            return
        if self._until <= time.monotonic():
            return
        log = getattr(dist.group.WORLD, "log", None) if dist.is_initialized() else None
        count, steps = getattr(log, "count", 0), step_ends.step_of(optimizer)
        with self._lock:
            advances = self._last is not None and count > self._last.collectives
            self._last = _End(steps, count, advances)
            self._ends += 1
        self._pause(idle=False)

    def _when_idle(self) -> None:
        with self._lock:
            self._asked_idle = False
        self._pause(idle=True)

    def _pause(self, *, idle: bool) -> None:
        """Perform checks until the pause is over."""
        try:
            while True:
                with self._lock:
                    remaining = self._until - time.monotonic()
                    if remaining <= 0 or not (idle or self._is_reached()):
                        return
                    self._holds, self._idle = True, idle
                with contextlib.suppress(queue.Empty):
                    work = get_within(self._work, min(remaining, 1.0))
                    if work is not None:
                        self._run(work)
        finally:
            with self._lock:
                self._holds = self._idle = False
                with contextlib.suppress(queue.Empty):
                    while True:
                        rest = self._work.get_nowait()
                        if rest is not None:
                            rest.error = InvalidArgument("it does not pause any more")
                            rest.done.set()

    def _is_reached(self) -> bool:
        last = self._last
        if not self._clock or last is None:
            return False
        value = last.steps if self._clock == "steps" else last.collectives
        return self._clock == "any" or (value is not None and value >= self._position)

    def _run(self, work: _Work) -> None:
        try:
            work.value = self._main_thread.check_numbers(work.check)
        except BaseException as error:
            work.error = error
            if not isinstance(error, Exception):  # an interrupt ends the cell
                raise
            error.__traceback__ = None  # a cycle with `work`, whose frames would keep the user's optimizer
        finally:
            work.done.set()
