"""Wait for a cell on the notebook's main thread: input questions, interrupts, timeout, liveness warnings.

`wait_for_cell` loops over the cell's queue. `_InputPrompter` asks the user the questions of the ranks, one at a time.
`LivenessWarning` warns in a long-running cell when one of its ranks stops responding.

SIGINT is deferred while Rankbook waits or decides (`deferred_interrupts`). Without this, KeyboardInterrupt could be
raised in the middle of a decision of the state machine and leave it half made. `wait_ending` tells an interrupt by the
user from the one that jupyter_client sends before it restarts a kernel.
"""

from __future__ import annotations

import contextlib
import getpass
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

from rankbook.coordinator import events as ev
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.liveness import UnresponsiveRank, describe_unresponsive
from rankbook.coordinator.running_cell import InputQuestion, RunningCell
from rankbook.errors import InvalidArgument
from rankbook.protocol.messages import InputReply
from rankbook.queues import get_within


class DeferredInterrupts:
    """Interrupts that have arrived.

    `take` returns and resets them; those not taken are raised at the end of `deferred_interrupts`. The signal handler
    calls `on_interrupt`. If `ignore_repeats` is set and an interrupt was taken, further ones are ignored for
    `REPEAT_WINDOW` seconds from the end of `deferred_interrupts`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_interrupt: Callable[[], None] = lambda: None
        self.ignore_repeats = False
        self.was_taken = False

    def take(self) -> bool:
        """Return True if an interrupt has arrived since the last call."""
        # One statement without a call: from Python 3.11 on, the interpreter runs signal handlers only at calls, at the
        # start of a function and at backward jumps. So no interrupt can be counted between reading and resetting.
        count, self.count = self.count, 0
        self.was_taken |= count > 0
        return count > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if an interrupt has arrived since the last call."""
        if self.take():
            raise KeyboardInterrupt


# The outermost block. Only the main thread reads and writes it, so it needs no lock.
_active: DeferredInterrupts | None = None


REPEAT_WINDOW = 0.5
"""Seconds after the end of an interrupted cell in which another press of ■ was meant for this cell."""

RESTART_GRACE = 0.1
"""Seconds to wait for the shutdown request that jupyter_client sends after its interrupt (measured: 3 ms)."""

RESTART_WINDOW = 5.0
"""Seconds before the end of a kernel in which an interrupt may have been part of a restart."""

_is_ending: Callable[[], bool] | None = None


def set_ending_check(is_ending: Callable[[], bool]) -> None:
    """Set the function that returns True if this process was asked to exit, as by a kernel restart."""
    global _is_ending
    _is_ending = is_ending


def wait_ending(*, timeout: float = RESTART_GRACE) -> bool:
    """Wait up to `timeout` seconds until this process is asked to exit; return True if it was.

    Returns False at once if `set_ending_check` was not called.
    """
    deadline = time.monotonic() + timeout
    while _is_ending is not None and not _is_ending():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        threading.Event().wait(min(remaining, 0.005))
    return _is_ending is not None


_last_interrupt: tuple[str, float] | None = None


def note_interrupt(label: str) -> None:
    """Remember that the cell `label`, of a kept cluster, is interrupted now."""
    global _last_interrupt
    _last_interrupt = label, time.monotonic()


def describe_interrupt() -> str:
    """Return which cell was interrupted just before the end of this process; empty if none was."""
    if _last_interrupt is None or (seconds := time.monotonic() - _last_interrupt[1]) > RESTART_WINDOW:
        return ""
    return f"{_last_interrupt[0]} was interrupted {seconds:.1f} s before the kernel ended"


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """Defer SIGINT inside the `with` block; raise KeyboardInterrupt at the end if one was not taken.

    Nested blocks share the interrupts of the outermost one, which raises. On threads other than the main thread this
    does nothing, because signals arrive only there.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield DeferredInterrupts()
        return
    # Nested: share the count. The handler's callback is that of the innermost block, and the outer one gets its own
    # back.
    if _active is not None:
        interrupts = _active
        outer = interrupts.on_interrupt
        try:
            yield interrupts
        finally:
            interrupts.on_interrupt = outer
        return
    interrupts = DeferredInterrupts()

    # The handler must not raise: it may run in the middle of a decision of the state machine.
    def count(_number: int, _frame: types.FrameType | None) -> None:
        interrupts.count += 1
        interrupts.on_interrupt()

    # None if the handler was not installed by Python. It cannot be restored then.
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, count)
    _active = interrupts
    try:
        yield interrupts
    finally:
        # Before the handler is restored, so that no later block shares this count.
        _active = None
        handler = previous if previous is not None else signal.default_int_handler
        if interrupts.ignore_repeats and interrupts.was_taken:
            handler = _ignoring_repeats(handler)
        signal.signal(signal.SIGINT, handler)
    # After the handler has been restored, and not if the block has raised: that exception must not be replaced.
    if interrupts.take():
        raise KeyboardInterrupt


_Handler = Callable[[int, types.FrameType | None], object] | int


def _ignoring_repeats(handler: _Handler) -> _Handler:
    # ipykernel sends no reply for a cell if SIGINT arrives after the cell's code and before the reply. It sets its own
    # handler again once it has replied.
    until = time.monotonic() + REPEAT_WINDOW

    def handle(number: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= until:
            signal.signal(signal.SIGINT, handler)
            if callable(handler):
                handler(number, frame)

    return handle


@contextlib.contextmanager
def immediate_interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt inside the `with` block, for prompts that handle it themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ctrl-C in a prompt has to raise at once, even inside `deferred_interrupts`.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous if previous is not None else signal.default_int_handler)


Ask = Callable[[str, bool], str]
"""Callback that asks the user: (prompt, password) to the answer. Raises EOFError if no input is possible."""

_INTERRUPT_CHECK_INTERVAL = 0.05
"""Seconds between two checks for SIGINT, which may have arrived on another thread."""
_PROGRESS_INTERVAL = 0.5
_QUEUE_PATIENCE = 0.5
"""Seconds in the queue that are not reported: the cell before may be about to end."""
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
    progress of values on the way between hosts, which is shown on stderr. A cell with a `queue_hint` that stays in the
    queue is reported there too.
    """
    start = time.monotonic()
    progress = None if describe_transfers is None else _ProgressLine(describe_transfers)
    prompter = _InputPrompter(driver, cell, ask)
    # Called by the signal handler, possibly during `inbox.get` on this thread: SimpleQueue.put is reentrant.
    interrupts.on_interrupt = lambda: cell.inbox.put(None)
    deadline = None if patience is None else time.monotonic() + patience
    # The loop ends on `ended` and not on `result`, which is set while the last output is being shown.
    while not cell.ended and (deadline is None or time.monotonic() < deadline):
        prompter.wait_notice()
        prompter.liveness_warning.check()
        if cell.started is None and cell.queue_hint is not None and time.monotonic() - start >= _QUEUE_PATIENCE:
            sys.stderr.write(f"{cell.describe_queue()}{cell.queue_hint}\n")
            sys.stderr.flush()
            cell.queue_hint = None
        if progress is not None:
            progress.update()
        if interrupts.take():
            prompter.interrupt()
        prompter.serve()
    # The cell goes on without its questions answered: whoever waits next asks them.
    for question in prompter.questions:
        cell.inbox.put(question)
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
            notice = get_within(self._cell.inbox, 0.01 if self.questions else _INTERRUPT_CHECK_INTERVAL)
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
        self._cell.asking.clear()
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
        self._cell.asking.discard(rank)
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
        try:
            self._driver.reply(rank, InputReply(cell=request.cell, text=text, reason=reason))
        except InvalidArgument as error:  # a terminal whose encoding is not UTF-8 may return lone surrogates
            self._driver.reply(rank, InputReply(cell=request.cell, reason=str(error)))


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
