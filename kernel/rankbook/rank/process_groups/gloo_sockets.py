"""The TCP sockets of this process: which ones a call opened, whose their peers are, how to end whoever waits on them.

Owns: descriptors as the system knows them. Refuses: to know what a socket is for. gloo waits in C++, deaf to signals
and to its own abort; shutting its sockets down is what makes it raise, from any thread, within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]
"""A host, as digits, and a port."""
NOBODY = -1
_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _ENOENT = 4, 20, -2  # sock_diag(7)
_LISTENS = "0A"
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


@contextlib.contextmanager
def duplicate(descriptor: int, identity: tuple[int, int]) -> Iterator[socket.socket | None]:
    """Give the socket for the time of the block; None where it is closed by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    if _identity(copy) != identity:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as same:
        yield same


def shut_down(opened: Opened) -> None:
    """End all reading and writing on these sockets, for all who wait on them. Those closed by now are left alone."""
    for descriptor, identity in opened.items():
        with duplicate(descriptor, identity) as same:
            if same is not None:
                with contextlib.suppress(OSError):  # its other end may be gone
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


def user_of_peer(local: Address, remote: Address) -> int | None:
    """Return which user has the other end of a connection to this machine: `NOBODY`, or None where it cannot be told.

    The kernel is asked for that one socket (sock_diag). Where it does not know even our own end, sock_diag is missing,
    and the whole table is read, which takes tens of milliseconds on a large machine.
    """
    with contextlib.suppress(OSError, AttributeError):
        user = _diagnose(remote, local)
        if user is not None:
            return user
        if _diagnose(local, remote) is not None:
            return NOBODY
    rows = _rows(_family(local))
    for row in rows:
        if row[1:3] == [_in_hex(remote), _in_hex(local)]:
            return int(row[7]) if row[9] != "0" else NOBODY  # one that its process has closed is shown as root's
    return NOBODY if rows else None


def has_connections(listener: Address) -> bool:
    """Return whether anybody is connected to this address, accepted or not."""
    return any(row[1] == _in_hex(listener) and row[3] != _LISTENS for row in _rows(_family(listener)))


def _diagnose(local: Address, remote: Address) -> int | None:
    """Return the user of the socket with these addresses; None when there is none, or nobody to ask."""
    family = _family(local)
    hosts = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (local, remote))
    which = struct.pack("!HH", local[1], remote[1]) + hosts + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, 1, 0, 0) + request)
        answer = kernel.recv(1 << 13)
    if struct.unpack_from("=H", answer, 4)[0] != _SOCK_DIAG_BY_FAMILY:
        error = struct.unpack_from("=i", answer, 16)[0]
        if error == _ENOENT:
            return None
        raise OSError(-error, os.strerror(-error))
    user, inode = struct.unpack_from("=II", answer, 16 + 64)
    return int(user) if inode else NOBODY


def _rows(family: socket.AddressFamily) -> list[list[str]]:
    try:
        return [line.split() for line in _TABLES[family].read_text(encoding="ascii").splitlines()[1:]]
    except OSError:  # no Linux
        return []


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _in_hex(address: Address) -> str:
    packed = socket.inet_pton(_family(address), address[0])
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{address[1]:04X}"
