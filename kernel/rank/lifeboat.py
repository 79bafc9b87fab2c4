"""Survives gloo's giving up.

Owns: what happens when gloo's own thread throws. Refuses: any other thread: those end the process, as C++ has it.

gloo checks the size of what arrives on the thread that reads its sockets, and throws there, where nobody can catch it:
a collective whose tensors differ in size from rank to rank would end the process, with all that it holds. Here that
thread is stopped for good instead, and whoever waits for it is told. Linux only, where a thread is told by its name.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_GLOO = "gloo"
_Handler = ctypes.CFUNCTYPE(None)
_kept: list[object] = []
"""The handler, and those before it: C++ holds but their addresses."""


def board(rescue: Callable[[], bool]) -> bool:
    """Call `rescue` on gloo's thread when that gives up; if it returns True the thread sleeps from there on.

    Otherwise, and on any other thread, what was to happen before happens: the process ends. False where the system's
    C++ library has no such handler.
    """
    if sys.platform != "linux":
        return False
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return False
    set_terminate.argtypes = [_Handler]
    set_terminate.restype = ctypes.c_void_p

    def terminate() -> None:
        if _is_gloos() and rescue():
            threading.Event().wait()
        before()

    handler = _Handler(terminate)
    address = set_terminate(handler)
    before = _Handler(address) if address else _Handler(lambda: None)  # then C++ itself ends the process
    _kept.extend((handler, before))
    return True


def _is_gloos() -> bool:
    task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    return task.read_text().startswith(_GLOO)
