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
    calls `on_interrupt`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_interrupt: Callable[[], None] = lambda: None

    def take(self) -> bool:
        """Return True if an interrupt has arrived since the last call."""
        count, self.count = self.count, 0
        return count > 0


_holding: DeferredInterrupts | None = None


RESTART_GRACE = 0.1
"""Seconds to wait for the shutdown request that jupyter_client sends after its interrupt (measured: 3 ms)."""

JUST_BEFORE = 5.0
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


_last: tuple[str, float] | None = None


def note_interrupt(label: str) -> None:
    """Remember that the cell `label`, of a kept cluster, is interrupted now."""
    global _last
    _last = label, time.monotonic()


def describe_interrupt() -> str:
    """Return which cell was interrupted just before the end of this process; empty if none was."""
    if _last is None or (seconds := time.monotonic() - _last[1]) > JUST_BEFORE:
        return ""
    return f"{_last[0]} was interrupted {seconds:.1f} s before the kernel ended"


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """Defer SIGINT inside the `with` block; raise KeyboardInterrupt at the end if one was not taken.

    Nested blocks share the interrupts of the outermost one, which raises. On threads other than the main thread this
    does nothing, because signals arrive only there.
    """
    global _holding
    if threading.current_thread() is not threading.main_thread():
        yield DeferredInterrupts()
        return
    if _holding is not None:
        interrupts = _holding
        outer = interrupts.on_interrupt
        try:
            yield interrupts
        finally:
            interrupts.on_interrupt = outer
        return
    interrupts = DeferredInterrupts()

    def count(_number: int, _frame: types.FrameType | None) -> None:
        interrupts.count += 1
        interrupts.on_interrupt()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, count)
    _holding = interrupts
    try:
        yield interrupts
    finally:
        _holding = None
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
    if interrupts.take():
        raise KeyboardInterrupt


@contextlib.contextmanager
def immediate_interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt inside the `with` block, for prompts that handle it themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
