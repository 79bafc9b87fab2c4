"""Sends a small message without giving up the interpreter lock.

Owns: the way past pyzmq to libzmq's `zmq_send`. Refuses: to block, and what is large: its copy would hold up others.

pyzmq gives the lock up for every send. When a notebook's cell begins, the thread that publishes for the kernel waits
for just that, and keeps the lock for a third of a millisecond: between the first rank's task and the second's. It may
as well publish while the ranks work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

SMALL = 4096
"""Bytes of a message that is sent so."""
_MAPS = Path("/proc/self/maps")
_DONTWAIT = 1  # ZMQ_DONTWAIT in zmq.h

_Send = Callable[[int, bytes, int, int], int]


def send_quickly(socket: int, data: bytes) -> bool:
    """Send `data` on the socket at that address, as a message of one part.

    If that is not possible at once and in this way it is not sent, and the answer is False.
    """
    send = _zmq_send()
    return send is not None and len(data) <= SMALL and send(socket, data, len(data), _DONTWAIT) == len(data)


@cache
def _zmq_send() -> _Send | None:
    """What libzmq sends with, from the very library that pyzmq has loaded; None where it is not to be found (macOS)."""
    try:
        libraries = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "libzmq" in line}
    except OSError:
        return None
    if len(libraries) != 1:
        return None
    send: _Send = ctypes.PyDLL(libraries.pop()).zmq_send  # PyDLL: keeps the lock
    send.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)  # type: ignore[attr-defined]
    return send
