"""Wait for an item of a `SimpleQueue` with a time limit."""

from __future__ import annotations

import contextlib
import queue
from typing import TypeVar

_T = TypeVar("_T")


def get_within(source: queue.SimpleQueue[_T], timeout: float | None) -> _T:
    """Return the next item. Raises `queue.Empty` after `timeout` seconds; None waits without a limit.

    Up to Python 3.12, `SimpleQueue.get` may wait forever: if the thread stands still for longer than `timeout` before
    its wait has begun, the time that is left is negative, which C code takes for no limit
    (`_queue_SimpleQueue_get_impl` in Modules/_queuemodule.c). It happens only if the lock of the queue is free,
    as it is in a new queue and after a `put`. An attempt that does not wait takes the lock.
    """
    with contextlib.suppress(queue.Empty):
        return source.get_nowait()
    return source.get(timeout=timeout)
