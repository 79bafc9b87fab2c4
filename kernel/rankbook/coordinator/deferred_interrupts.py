"""Interrupts of the notebook's main thread, held until it is safe to act on them.

Owns: the SIGINT handler while Rankbook waits. Refuses: to lose one. Without this, KeyboardInterrupt could be raised in
the middle of a decision and leave it half made.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator


class DeferredInterrupts:
    """Interrupts that came in. `take()` gives and forgets them; what nobody took is raised at the end."""

    def __init__(self) -> None:
        self.count = 0
        self.on_interrupt: Callable[[], None] = lambda: None

    def take(self) -> bool:
        """Whether there was one."""
        count, self.count = self.count, 0
        return count > 0


_holding: DeferredInterrupts | None = None


RESTART_GRACE = 0.1
"""Seconds in which a request to shut down follows the interrupt that jupyter_client sends before it: 3 ms measured."""

JUST_BEFORE = 5.0
"""Seconds before the end of a kernel in which an interrupt may have been part of a restart."""

_is_ending: Callable[[], bool] | None = None


def set_ending_check(is_ending: Callable[[], bool]) -> None:
    """Set the function that tells whether this process was asked to end, as a kernel that restarts is."""
    global _is_ending
    _is_ending = is_ending


def wait_ending(*, timeout: float = RESTART_GRACE) -> bool:
    """Wait until this process is asked to end; return whether it was, at once where nothing could tell."""
    deadline = time.monotonic() + timeout
    while _is_ending is not None and not _is_ending():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        threading.Event().wait(min(left, 0.005))
    return _is_ending is not None


_last: tuple[str, float] | None = None


def note_interrupt(label: str) -> None:
    """Remember that the cell `label`, of ranks that are kept, is interrupted now."""
    global _last
    _last = label, time.monotonic()


def describe_interrupt() -> str:
    """Return which cell was interrupted just before this process ends; empty if none was."""
    if _last is None or (seconds := time.monotonic() - _last[1]) > JUST_BEFORE:
        return ""
    return f"{_last[0]} was interrupted {seconds:.1f} s before the kernel ended"


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """Within it, SIGINT only counts; what nobody took is raised as KeyboardInterrupt at the end of the outermost one.

    On any but the main thread it does nothing: signals do not come there.
    """
    global _holding
    if threading.current_thread() is not threading.main_thread():
        yield DeferredInterrupts()
        return
    if _holding is not None:
        held = _holding
        outer = held.on_interrupt
        try:
            yield held
        finally:
            held.on_interrupt = outer
        return
    held = DeferredInterrupts()

    def count(_number: int, _frame: types.FrameType | None) -> None:
        held.count += 1
        held.on_interrupt()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, count)
    _holding = held
    try:
        yield held
    finally:
        _holding = None
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
    if held.take():
        raise KeyboardInterrupt


@contextlib.contextmanager
def immediate_interrupts() -> Iterator[None]:
    """Within it, SIGINT raises KeyboardInterrupt again: for prompts, which have their own way with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
