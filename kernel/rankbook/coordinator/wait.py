"""Wait for a cell on the notebook's main thread: input questions, interrupts, timeout, liveness warnings.

`wait_for_cell` loops over the cell's queue. `_InputPrompter` asks the user the questions of the ranks, one at a time.
`LivenessWarning` warns in a long-running cell when one of its ranks stops responding.
"""

from __future__ import annotations

import contextlib
import getpass
import queue
import signal
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

_STEP = 0.05
"""Seconds between two checks for SIGINT, which may have arrived on another thread."""
_SAME_RANK_FIRST = 0.15
"""Seconds in which the rank answered last may ask again (as a debugger does) before other ranks do."""


def ask_in_terminal(prompt: str, password: bool) -> str:
    """Ask with Python's `input` or `getpass`."""
    return getpass.getpass(prompt) if password else input(prompt)


def wait_for_cell(
    driver: Driver, cell: RunningCell, held: DeferredInterrupts, *, patience: float | None, ask: Ask
) -> None:
    """Wait until `cell` has ended, or for `patience` seconds.

    SIGINT interrupts the cell on its ranks; the second one ends the cell at once.
    """
    desk = _InputPrompter(driver, cell, ask)
    # Called by the signal handler, possibly during `inbox.get` on this thread: SimpleQueue.put is reentrant.
    held.on_interrupt = lambda: cell.inbox.put(None)
    give_up = None if patience is None else time.monotonic() + patience
    while not cell.ended and (give_up is None or time.monotonic() < give_up):
        desk.wait_notice()
        desk.vigil.look()
        if held.take():
            desk.interrupt()
        desk.serve()


@contextlib.contextmanager
def _interrupted_at_end(cell: RunningCell) -> Iterator[None]:
    """Interrupt the main thread when `cell` ends inside the `with` block, to leave the prompt.

    The cell's answer would have no reader. The lock ensures that no signal is sent after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lock, asking = threading.Lock(), [True]

    def look() -> None:
        with lock:
            if asking and cell.result is not None:
                asking.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    cell.on_change.append(look)
    try:
        look()
        yield
    finally:
        with lock:
            asking.clear()
        cell.on_change.remove(look)


class _InputPrompter:
    """Ask the user the ranks' questions, one at a time. A rank that was just answered comes first."""

    def __init__(self, driver: Driver, cell: RunningCell, ask: Ask) -> None:
        self.questions: list[InputQuestion] = []
        self.vigil = LivenessWarning(driver, cell)
        self._driver = driver
        self._cell = cell
        self._ask = ask
        self._last: int | None = None
        self._answered = 0.0

    def wait_notice(self) -> None:
        """Wait a moment for questions, the end of the cell or an interrupt."""
        with contextlib.suppress(queue.Empty):
            notice = self._cell.inbox.get(timeout=0.01 if self.questions else _STEP)
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
        if self._driver.kept:
            if wait_ending():
                raise KeyboardInterrupt
            note_interrupt(self._cell.label)
        self.questions.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._cell.inbox.get_nowait()
        self._driver.post(ev.InterruptCell(self._cell.cell))
        self.vigil.ask()

    def serve(self) -> None:
        if not self.due:
            return
        same = [question for question in self.questions if question.rank == self._last]
        question = same[0] if same else min(self.questions, key=lambda candidate: candidate.rank)
        self.questions.remove(question)
        rank, request = question.rank, question.request
        text, reason = None, ""
        try:
            with immediate_interrupts(), _interrupted_at_end(self._cell):
                text = self._ask(f"[{rank}] {request.prompt}", request.password)
        except KeyboardInterrupt:
            if self._cell.result is None:
                self.interrupt()
            return
        except (EOFError, RuntimeError, NotImplementedError) as error:
            reason = str(error) or "nobody can be asked here"
        self._last, self._answered = rank, time.monotonic()
        self._driver.reply(rank, InputReply(cell=request.cell, text=text, reason=reason))


EVERY = 3.0
"""Seconds between two checks. A rank heard since the last one is not asked."""
_PATIENCE = 8.0
"""Seconds without a reply before a warning: long calls into C are normal. A stopped process is reported at once."""


class LivenessWarning:
    """Warn, once per rank, about unresponsive ranks of `cell` until it has ended."""

    def __init__(self, driver: Driver, cell: RunningCell) -> None:
        self._driver = driver
        self._cell = cell
        self._told: set[int] = set()
        self._next = time.monotonic() + EVERY

    def look(self) -> None:
        """Check the ranks if a check is due, and request replies for the next one."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        presence, running = self._driver.presence, self._running()
        for silence in presence.silent(running).values():
            if silence.rank not in self._told and (silence.stopped or silence.seconds >= _PATIENCE):
                self._told.add(silence.rank)
                self._tell(silence)
        presence.ask(rank for rank in running if not presence.heard_within(rank, EVERY))

    def ask(self) -> None:
        """Request replies now: after an interrupt, the cell's end reports which ranks still respond."""
        self._driver.presence.ask(self._running())

    def _running(self) -> list[int]:
        return [rank for rank in self._cell.ranks if self._driver.cell_of(rank) is self._cell]

    def _tell(self, silence: UnresponsiveRank) -> None:
        text = f"rank {silence.rank}: {describe_unresponsive(silence)}\n"
        self._driver.after(0.0, lambda: self._cell.note(text))
