"""Wait for a cell on the notebook's main thread: input questions, interrupts, timeout, liveness warnings.

`wait_for_cell` loops over the cell's queue. `_InputPrompter` asks the user the questions of the ranks, one at a time.
`LivenessWarning` warns in a long-running cell when one of its ranks stops responding.
"""

from __future__ import annotations

import contextlib
import getpass
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rankbook.coordinator import events as ev
from rankbook.coordinator.deferred_interrupts import (
    DeferredInterrupts,
    immediate_interrupts,
    note_interrupt,
    wait_ending,
)
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.liveness import UnresponsiveRank, describe_unresponsive
from rankbook.coordinator.running_cell import InputQuestion, RunningCell
from rankbook.protocol.messages import InputReply

Ask = Callable[[str, bool], str]
"""Callback that asks the user: (prompt, password) to the answer. Raises EOFError if no input is possible."""

_INTERRUPT_CHECK_INTERVAL = 0.05
"""Seconds between two checks for SIGINT, which may have arrived on another thread."""
_PROGRESS_INTERVAL = 0.5
_SAME_RANK_FIRST = 0.15
"""Seconds in which the rank answered last may ask again (as a debugger does) before other ranks do."""


def ask_in_terminal(prompt: str, password: bool) -> str:
    """Ask with Python's `input` or `getpass`."""
    return getpass.getpass(prompt) if password else input(prompt)


def wait_for_cell(
    driver: Driver,
    cell: RunningCell,
    interrupts: DeferredInterrupts,
    *,
    patience: float | None,
    ask: Ask,
    describe_transfers: Callable[[], str] | None = None,
) -> None:
    """Wait until `cell` has ended, or for `patience` seconds.

    SIGINT interrupts the cell on its ranks; the second one ends the cell at once. `describe_transfers` returns the
    progress of values on the way between hosts, which is shown on stderr.
    """
    progress = None if describe_transfers is None else _ProgressLine(describe_transfers)
    prompter = _InputPrompter(driver, cell, ask)
    # Called by the signal handler, possibly during `inbox.get` on this thread: SimpleQueue.put is reentrant.
    interrupts.on_interrupt = lambda: cell.inbox.put(None)
    deadline = None if patience is None else time.monotonic() + patience
    # The loop ends on `ended` and not on `result`, which is set while the last output is being shown.
    while not cell.ended and (deadline is None or time.monotonic() < deadline):
        prompter.wait_notice()
        prompter.liveness_warning.check()
        if progress is not None:
            progress.update()
        if interrupts.take():
            prompter.interrupt()
        prompter.serve()
    if progress is not None:
        progress.close()


class _ProgressLine:
    """Show the text that `describe` returns on stderr, in one line that is written again when it changes."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._width = 0
        self._next = time.monotonic() + _PROGRESS_INTERVAL

    def update(self) -> None:
        """Write the line again if that is due."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_INTERVAL
            if text := self._describe():
                # Spaces remove what is left of a longer text.
                sys.stderr.write(f"\r{text.ljust(self._width)}")
                sys.stderr.flush()
                self._width = max(self._width, len(text))

    def close(self) -> None:
        """End the line."""
        if self._width:
            sys.stderr.write("\n")
            sys.stderr.flush()


@contextlib.contextmanager
def _interrupted_at_end(cell: RunningCell) -> Iterator[None]:
    """Interrupt the main thread when `cell` ends inside the `with` block, to leave the prompt.

    The cell's answer would have no reader. The lock ensures that no signal is sent after the block.
    """
    # Only the main thread can be interrupted by a signal, and only it has the user's prompt.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lock, asking = threading.Lock(), [True]

    def interrupt_prompt() -> None:
        with lock:
            if asking and cell.result is not None:
                asking.clear()
                # To the main thread itself: a signal to the process may be delivered on any thread, and would not end
                # the system call of the prompt.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    cell.on_change.append(interrupt_prompt)
    try:
        # The cell may have ended just before the callback was added.
        interrupt_prompt()
        yield
    finally:
        with lock:
            asking.clear()
        cell.on_change.remove(interrupt_prompt)


class _InputPrompter:
    """Ask the user the ranks' questions, one at a time. A rank that was just answered comes first."""

    def __init__(self, driver: Driver, cell: RunningCell, ask: Ask) -> None:
        self.questions: list[InputQuestion] = []
        self.liveness_warning = LivenessWarning(driver, cell)
        self._driver = driver
        self._cell = cell
        self._ask = ask
        self._last: int | None = None
        self._answered = 0.0

    def wait_notice(self) -> None:
        """Wait a moment for questions, the end of the cell or an interrupt."""
        with contextlib.suppress(queue.Empty):
            # While questions wait, the wait is short: the next one becomes due after `_SAME_RANK_FIRST`, of which the
            # queue tells nothing.
            notice = self._cell.inbox.get(timeout=0.01 if self.questions else _INTERRUPT_CHECK_INTERVAL)
            # Take all that is in the queue. None is the wake-up of the signal handler.
            while True:
                if isinstance(notice, InputQuestion):
                    self.questions.append(notice)
                notice = self._cell.inbox.get_nowait()

    @property
    def due(self) -> bool:
        """Return True if a question should be asked now."""
        if self._last is None or any(question.rank == self._last for question in self.questions):
            return bool(self.questions)
        return bool(self.questions) and time.monotonic() - self._answered >= _SAME_RANK_FIRST

    def interrupt(self) -> None:
        """Interrupt the cell and drop the questions that its ranks have asked so far.

        For kept ranks, raise KeyboardInterrupt instead and let the cell run on if the kernel is being restarted:
        jupyter_client interrupts a kernel just before it asks it to shut down.
        """
        # Before anything is sent: an interrupt cannot be taken back.
        if self._driver.kept:
            if wait_ending():
                raise KeyboardInterrupt
            note_interrupt(self._cell.label)
        # Questions of the interrupted `input()` calls, also those that are still in the queue. Their ranks leave the
        # call by KeyboardInterrupt.
        self.questions.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._cell.inbox.get_nowait()
        self._driver.post(ev.InterruptCell(self._cell.cell))
        # The replies arrive during the grace period, so that the cell's end knows which ranks still respond.
        self.liveness_warning.ask()

    def serve(self) -> None:
        if not self.due:
            return
        same = [question for question in self.questions if question.rank == self._last]
        # A rank that was answered last comes first, as a debugger asks again and again. Otherwise the lowest rank, so
        # that the order is the same every time.
        question = same[0] if same else min(self.questions, key=lambda candidate: candidate.rank)
        self.questions.remove(question)
        rank, request = question.rank, question.request
        text, reason = None, ""
        try:
            # Inside, SIGINT raises KeyboardInterrupt, which is the only way to leave `input()`.
            with immediate_interrupts(), _interrupted_at_end(self._cell):
                text = self._ask(f"[{rank}] {request.prompt}", request.password)
        except KeyboardInterrupt:
            # If the cell has ended, `_interrupted_at_end` has sent the signal, and there is nothing to interrupt.
            if self._cell.result is None:
                self.interrupt()
            return
        # A front end without input: the rank gets the reason and raises EOFError.
        except (EOFError, RuntimeError, NotImplementedError) as error:
            reason = str(error) or "input is not available"
        self._last, self._answered = rank, time.monotonic()
        self._driver.reply(rank, InputReply(cell=request.cell, text=text, reason=reason))


WARNING_INTERVAL = 3.0
"""Seconds between two checks. A rank heard since the last one is not asked."""
_WARNING_PATIENCE = 8.0
"""Seconds without a reply before a warning: long calls into C are normal. A stopped process is reported at once."""


class LivenessWarning:
    """Warn, once per rank, about unresponsive ranks of `cell` until it has ended."""

    def __init__(self, driver: Driver, cell: RunningCell) -> None:
        self._driver = driver
        self._cell = cell
        self._warned: set[int] = set()
        self._next = time.monotonic() + WARNING_INTERVAL

    def check(self) -> None:
        """Check the ranks if a check is due, and request replies for the next one."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + WARNING_INTERVAL
        liveness, running = self._driver.liveness, self._running()
        for unresponsive_rank in liveness.unresponsive(running).values():
            if unresponsive_rank.rank not in self._warned and (
                unresponsive_rank.stopped or unresponsive_rank.seconds >= _WARNING_PATIENCE
            ):
                self._warned.add(unresponsive_rank.rank)
                self._warn(unresponsive_rank)
        liveness.ask(rank for rank in running if not liveness.received_within(rank, WARNING_INTERVAL))

    def ask(self) -> None:
        """Request replies now: after an interrupt, the cell's end reports which ranks still respond."""
        self._driver.liveness.ask(self._running())

    def _running(self) -> list[int]:
        # Ranks that have finished the cell, or run another one, are not of interest.
        return [rank for rank in self._cell.ranks if self._driver.cell_of(rank) is self._cell]

    def _warn(self, unresponsive_rank: UnresponsiveRank) -> None:
        text = f"rank {unresponsive_rank.rank}: {describe_unresponsive(unresponsive_rank)}\n"
        # Output may only be shown on the driver thread, and this is the main thread.
        self._driver.after(0.0, lambda: self._cell.note(text))
