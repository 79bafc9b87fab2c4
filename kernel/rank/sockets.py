"""The TCP sockets of this process: which ones a call opened, and how to end whoever waits on them.

Owns: descriptors as the system knows them. Refuses: to know what a socket is for. gloo waits in C++, deaf to signals
and to its own abort; shutting its sockets down is what makes it raise, from any thread, within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

Opened = dict[int, tuple[int, int]]
"""Descriptors, each with the device and inode that tell whether it still is the same socket."""


def tcp_sockets() -> Opened:
    """Every TCP socket that is open now."""
    found: Opened = {}
    for entry in Path("/dev/fd").iterdir():
        descriptor = int(entry.name)
        identity = _identity(descriptor)
        if identity is not None and _is_tcp(descriptor):
            found[descriptor] = identity
    return found


@contextlib.contextmanager
def watch_opened() -> Iterator[Opened]:
    """What is opened within it, by any thread, is in the dict that it gives, at the end of it."""
    before = tcp_sockets()
    opened: Opened = {}
    try:
        yield opened
    finally:
        opened.update((file, who) for file, who in tcp_sockets().items() if before.get(file) != who)


def shut_down(opened: Opened) -> None:
    """End all reading and writing on these sockets, for all who wait on them. Those closed by now are left alone."""
    for descriptor, identity in opened.items():
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        if _identity(copy) != identity:
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as same, contextlib.suppress(OSError):  # its other end may be gone
            same.getpeername()  # OSError for one that listens: gloo ends the process if that is shut down
            same.shutdown(socket.SHUT_RDWR)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed meanwhile
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _is_tcp(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            return same.family in (socket.AF_INET, socket.AF_INET6) and same.type == socket.SOCK_STREAM
    except OSError:
        return False
