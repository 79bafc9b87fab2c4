"""Survives gloo's giving up.

Owns: what happens when one of gloo's own threads throws. Refuses: any other thread: those end the process, as C++ has
it.

gloo checks the size of what arrives on the thread that reads its sockets, and throws there, where nobody can catch it:
a collective whose tensors differ in size from rank to rank would end the process, with all that it holds. Here that
thread is stopped for good instead, and whoever waits for it is told. torch's threads, which carry out collectives for
gloo, throw when one ends that has been given up. Linux only, where a thread is told by its name.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path

GLOO = "gloo"
"""How the names of gloo's threads begin, those that read its sockets."""
_TORCH = "pt_gloo"
"""And those of torch's."""
_Handler = ctypes.CFUNCTYPE(None)
_kept: list[object] = []
"""The handler, and those before it: C++ holds but their addresses."""


def board(rescue: Callable[[str], bool]) -> bool:
    """Call `rescue` on gloo's thread, with its name, when that gives up; if it returns True it sleeps from there on.

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
        name = _name()
        if name.startswith((GLOO, _TORCH)) and rescue(name):
            threading.Event().wait()
        before()

    handler = _Handler(terminate)
    address = set_terminate(handler)
    before = _Handler(address) if address else _Handler(lambda: None)  # then C++ itself ends the process
    _kept.extend((handler, before))
    return True


def _name() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
