"""Interrupts of the notebook's main thread, held until it is safe to act on them.

Owns: the SIGINT handler while Rankbook waits. Refuses: to lose one. Without this, KeyboardInterrupt could be raised in
the middle of a decision and leave it half made.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator


class Held:
    """Interrupts that came in. `take()` gives and forgets them; what nobody took is raised at the end."""

    def __init__(self) -> None:
        self.count = 0
        self.on_interrupt: Callable[[], None] = lambda: None

    def take(self) -> bool:
        """Whether there was one."""
        count, self.count = self.count, 0
        return count > 0


_holding: list[Held] = []


@contextlib.contextmanager
def held_interrupts() -> Iterator[Held]:
    """Within it, SIGINT only counts; what nobody took is raised as KeyboardInterrupt at the end of the outermost one.

    On any but the main thread it does nothing: signals do not come there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Held()
        return
    if _holding:
        held = _holding[-1]
        outer = held.on_interrupt
        try:
            yield held
        finally:
            held.on_interrupt = outer
        return
    held = Held()

    def count(_number: int, _frame: types.FrameType | None) -> None:
        held.count += 1
        held.on_interrupt()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, count)
    _holding.append(held)
    try:
        yield held
    finally:
        _holding.pop()
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
    if held.take():
        raise KeyboardInterrupt


@contextlib.contextmanager
def plain_interrupts() -> Iterator[None]:
    """Within it, SIGINT raises KeyboardInterrupt again: for prompts, which have their own way with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
