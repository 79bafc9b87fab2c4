"""SIGINT handling: interrupts of the main thread, deferred while Rankbook waits or decides.

Without this, KeyboardInterrupt could be raised in the middle of a decision of the state machine and leave it half made.
`wait_ending` tells an interrupt by the user from the one that jupyter_client sends before it restarts a kernel.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator


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
