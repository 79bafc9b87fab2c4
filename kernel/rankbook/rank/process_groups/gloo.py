"""gloo backend that connects only to processes of the same user.

gloo listens on a TCP port, which every user of the machine can reach, and trusts the first connection that names a pair
of ranks. It accepts no socket from outside, so the operating system is asked who is connected, and a group forms in one
of two ways:

1. Open, the normal case. Once gloo is connected, the rank looks up the user at the other end of every connection that
   its listener has accepted. The ranks exchange the result in the store, and use the group only if none of them has
   seen another user.
2. Guarded, if one has. A socket filter (BPF) on a new listener cuts the payload off every segment: connections are
   established, but nothing is read from them. Connections whose other end belongs to this user are freed of the filter,
   and TCP retransmits the payload 0.2 s later; the others are shut down. So gloo never reads a byte of another user.

Every attempt has a time limit, and all ranks try again after an attempt that has failed on one of them: a thread of
gloo may have ended, or a queue of connections have been full.

From then on the listener drops every segment, so that no other user can exhaust the rank's descriptors. Where the
system has no socket filters and does not report the owner of a connection (macOS), nothing is checked.

The second part lists the TCP sockets of this process, finds the user of a peer (sock_diag, /proc/net/tcp), and shuts
sockets down to end the waits on them. The last part, `install_terminate_handler`, keeps the process alive when a thread
of gloo calls std::terminate().
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

_ATTEMPT_TIMEOUTS = 2.0, 5.0, 10.0, 20.0
"""Seconds for the ranks to connect, in each attempt. The first one is ample unless another user interferes."""
_POLL_INTERVAL = 0.002
_FAILED_INTERVAL = 0.05
"""Seconds between two looks at the key `failed`, which for ranks of other hosts is a question to the notebook's.

The keys with which gloo connects take the same way, and must not wait behind those looks of all ranks."""
_MAX_LISTENERS = 100
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python has no names for
_DROP_ALL, _CUT_PAYLOAD = 0, 1
"""Number of bytes of a segment that a filter lets pass, not counting the headers that belong to them (socket(7))."""
_FAILED = "failed"
_lost_thread = threading.Event()
"""Set once a thread of gloo has called std::terminate(), as it may after a message of another user."""
_abandoned: list[object] = []
"""Devices of failed attempts, kept if a thread was lost: their destructor waits for the thread and holds the GIL."""


def make_gloo(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    wait: Callable[[dist.Store, list[str]], None],
    given_up: threading.Event,
) -> Any:  # noqa: ANN401 - torch has no type for it
    """Return a `ProcessGroupGloo` whose peers are ranks of this user.

    The first attempt is open, the others are guarded. A rank that could not connect, or has seen another user in the
    open way, sets the key `failed`, on which the others give up the attempt as well. Then all ranks write that theirs
    has ended, and wait for one another: so all of them use the group, or all of them try again.

    `wait` waits for keys of a store. `given_up` ends an attempt. Raises RuntimeError if the last attempt has failed.
    """
    for number, limit in enumerate(_ATTEMPT_TIMEOUTS):
        guarded = number > 0
        # Every attempt has keys of its own, so that a late rank does not take a key of the last attempt for one of
        # this.
        keys = dist.PrefixStore(f"attempt-{number}", store)
        with (
            _closed_after(_guarded_listeners() if guarded else _Listeners()) as listeners,
            track_new_sockets() as opened,
        ):
            attempt = _Attempt(listeners, keys, rank, size, min(timeout, timedelta(seconds=limit)))
            # The loop watches; the connecting itself runs on the thread of the attempt.
            deadline = time.monotonic() + limit
            next_look = time.monotonic() + _FAILED_INTERVAL
            while not attempt.ended.wait(_POLL_INTERVAL) and time.monotonic() < deadline and not given_up.is_set():
                if guarded:
                    listeners.admit_same_user()
                elif listeners.has_foreign_connections():
                    break
                if time.monotonic() >= next_look:
                    if keys.check([_FAILED]):
                        break
                    next_look = time.monotonic() + _FAILED_INTERVAL
            # Checked once more, because a foreign connection may have come between the last look and the end of the
            # attempt.
            if not attempt.backends or (not guarded and listeners.has_foreign_connections()):
                keys.set(_FAILED, "")
        try:
            # What all ranks do next follows from the key `failed`, which none of them sets any more once all have
            # ended.
            keys.set(f"ended-{rank}", "")
            wait(keys, [f"ended-{peer}" for peer in range(size)])
            if not keys.check([_FAILED]):
                return attempt.take(timeout)
        finally:
            # Also when the wait raises: half an attempt must not keep its sockets.
            if not attempt.taken:
                attempt.destroy(opened)
    raise RuntimeError(
        f"the ranks could not connect to each other in {len(_ATTEMPT_TIMEOUTS)} attempts ({sum(_ATTEMPT_TIMEOUTS):g} s)"
        ": the machine is overloaded, or another user of it interferes (see `ss -tnp`)"
    )


def make_unconnected() -> Any:  # noqa: ANN401
    """Return a backend without connections, descriptors and threads.

    torch wants a backend registered for the life of a group and offers no way to replace it. A
    `RecoverableProcessGroup` overrides every method through which a call would reach the registered one.
    """
    return FakeProcessGroup._create_internal(0, 1)


class _Attempt:
    """A connection attempt on another thread: a foreign connection can end gloo's thread, so that `_connect` hangs."""

    def __init__(self, listeners: _Listeners, *arguments: Any) -> None:  # noqa: ANN401 - those of `_connect`
        self.ended = threading.Event()
        self.backends: list[Any] = []
        self.taken = False
        self._listeners = listeners
        threading.Thread(target=self._run, args=arguments, name="rankbook-connect", daemon=True).start()

    def _run(self, *arguments: Any) -> None:  # noqa: ANN401
        try:
            self.backends.append(_connect(self._listeners, *arguments))
        except RuntimeError:  # too slow, or aborted
            pass
        finally:
            self.ended.set()

    def take(self, timeout: timedelta) -> Any:  # noqa: ANN401
        """Return the backend for use, with the timeout of its collectives."""
        self.taken = True
        backend = self.backends.pop()
        backend._set_default_timeout(timeout)
        return backend

    def destroy(self, sockets: Opened) -> None:
        """Shut down the sockets of the attempt, and destroy its backend once there is one.

        The destructor may wait for gloo's thread, without end if that is lost, so it is called on another thread.
        """
        shutdown_sockets(sockets)
        threading.Thread(target=self._destroy, name="rankbook-end", daemon=True).start()

    def _destroy(self) -> None:
        self.ended.wait()
        self.backends.clear()
        if _lost_thread.is_set():
            _abandoned.append(self._listeners)


def _connect(listeners: _Listeners, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._devices = listeners.devices
    # torch's own default is two threads per device.
    options._threads = 2 * len(listeners.devices)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


class _Listeners:
    """gloo's devices, one per network interface to use, and their listening sockets."""

    def __init__(self) -> None:
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        # gloo does not tell its descriptors. They are what is open afterwards and was not before.
        with track_new_sockets() as opened:
            gloo = dist.ProcessGroupGloo
            self.devices = (
                [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
                if names
                else [gloo.create_default_device(lazy_init=False)]
            )
        self._sockets: Opened = {}
        self._addresses: set[Address] = set()
        self._decided: Opened = {}
        for descriptor, identity in opened.items():
            with duplicate(descriptor, identity) as same:
                if same is not None and same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._sockets[descriptor] = identity
                    self._addresses.add(same.getsockname()[:2])

    def filter(self, length: int) -> None:
        """Let `length` bytes of every segment pass, on the listeners and on connections that they will accept."""
        for descriptor, identity in self._sockets.items():
            with duplicate(descriptor, identity) as same:
                if same is not None:
                    _attach(same, length)

    def are_connected(self) -> bool:
        """Return True if any process has connected to one of the listeners."""
        return any(has_connections(address) for address in self._addresses)

    def has_foreign_connections(self) -> bool:
        """Return True if a listener has accepted a connection from another user."""
        return not all(_is_same_user(local, remote) for _, _, local, remote in self._accepted())

    def admit_same_user(self) -> None:
        """Remove the filter from new connections of this user, and shut down those of others.

        gloo accepts connections on its own thread, so this is to be called again and again. gloo waits until the filter
        of its peers' connections is removed, and never sees a byte of the others.
        """
        # Every connection is decided once, by its identity, because descriptors are used again.
        for descriptor, identity, local, remote in self._accepted():
            if self._decided.get(descriptor) == identity:
                continue
            self._decided[descriptor] = identity
            if not _is_same_user(local, remote):
                shutdown_sockets({descriptor: identity})
                continue
            with duplicate(descriptor, identity) as same:
                if same is not None:
                    same.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _accepted(self) -> Iterator[tuple[int, tuple[int, int], Address, Address | None]]:
        # Accepted connections have the local address of the listener.
        for descriptor, identity in tcp_sockets().items():
            with duplicate(descriptor, identity) as same:
                if same is None or descriptor in self._sockets or same.getsockname()[:2] not in self._addresses:
                    continue
                try:
                    remote = same.getpeername()[:2]
                except OSError:  # the peer has disconnected, so that its user is unknown
                    remote = None
                yield descriptor, identity, same.getsockname()[:2], remote


def _guarded_listeners() -> _Listeners:
    """Return listeners without any connection, whose future connections deliver no payload."""
    for _ in range(_MAX_LISTENERS):
        listeners = _Listeners()
        # Drop everything first: then no connection can be established between the check and the second filter. If
        # another user was faster, try new listeners on other ports.
        listeners.filter(_DROP_ALL)
        if not listeners.are_connected():
            listeners.filter(_CUT_PAYLOAD)
            return listeners
    raise RuntimeError("another user of this machine connects to every port that gloo listens on; see `ss -tnp`")


@contextlib.contextmanager
def _closed_after(listeners: _Listeners) -> Iterator[_Listeners]:
    try:
        yield listeners
    finally:
        # The group is connected, or has failed. Either way the listener is not needed any more.
        listeners.filter(_DROP_ALL)


def _is_same_user(local: Address, remote: Address | None) -> bool:
    """Return True if the other end of a connection belongs to this user, or the system does not tell.

    It does not tell for a peer on another host: the network between the hosts must be private, see SECURITY.md.
    """
    if remote is not None and remote[0] != local[0]:
        return True
    return remote is not None and user_of_peer(local, remote) in {os.geteuid(), None}


def _attach(listener: socket.socket, length: int) -> None:
    """Attach the one-instruction filter `BPF_RET | BPF_K`."""
    # Kept in a variable until the call is over: the structure holds only its address.
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, length))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    with contextlib.suppress(OSError):  # this system has no such filters
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


Address = tuple[str, int]
"""A numeric host address and a port."""
NOBODY = -1
_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _ENOENT = 4, 20, -2  # sock_diag(7)
_LISTEN_STATE = "0A"
Opened = dict[int, tuple[int, int]]
"""Descriptors, with the device and inode that identify the socket even if the number is reused."""


def tcp_sockets() -> Opened:
    """Return all TCP sockets that are open now."""
    sockets: Opened = {}
    for entry in Path("/dev/fd").iterdir():
        descriptor = int(entry.name)
        identity = _identity(descriptor)
        if identity is not None and _is_tcp(descriptor):
            sockets[descriptor] = identity
    return sockets


@contextlib.contextmanager
def track_new_sockets() -> Iterator[Opened]:
    """Collect the sockets that any thread opens during the block; the dict is filled at the end of the block."""
    before = tcp_sockets()
    opened: Opened = {}
    try:
        yield opened
    finally:
        # A number that is open before and after may still be another socket, which its identity tells.
        opened.update((file, identity) for file, identity in tcp_sockets().items() if before.get(file) != identity)


@contextlib.contextmanager
def duplicate(descriptor: int, identity: tuple[int, int]) -> Iterator[socket.socket | None]:
    """Yield a duplicate of the socket for the time of the block, or None if the socket has been closed."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    # The number may have been closed and used again since it was listed. The duplicate cannot be: it is compared before
    # it is used.
    if _identity(copy) != identity:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as same:
        yield same


def shutdown_sockets(opened: Opened) -> None:
    """Shut down reading and writing on these sockets, which ends every wait on them. Closed sockets are skipped."""
    for descriptor, identity in opened.items():
        with duplicate(descriptor, identity) as same:
            if same is not None:
                with contextlib.suppress(OSError):  # the peer may have disconnected
                    same.getpeername()  # raises for a listener: gloo ends the process if that is shut down
                    same.shutdown(socket.SHUT_RDWR)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:  # it has been closed
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _is_tcp(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            return same.family in (socket.AF_INET, socket.AF_INET6) and same.type == socket.SOCK_STREAM
    except OSError:
        return False


def user_of_peer(local: Address, remote: Address) -> int | None:
    """Return the user at the other end of a connection to this machine: `NOBODY` if closed, None if unknown.

    The kernel is asked for that one socket (sock_diag). If it does not know even our own end, sock_diag is missing, and
    the whole table is read, which takes tens of milliseconds on a large machine.
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
            return int(row[7]) if row[9] != "0" else NOBODY  # a closed socket is listed as root's
    return NOBODY if rows else None


def has_connections(listener: Address) -> bool:
    """Return True if a connection to this address exists, accepted or not."""
    return any(row[1] == _in_hex(listener) and row[3] != _LISTEN_STATE for row in _rows(_family(listener)))


def _diagnose(local: Address, remote: Address) -> int | None:
    """Return the user of the socket with these addresses, or None if it does not exist.

    Sends one inet_diag request over a sock_diag netlink socket. The request names the socket exactly: address family
    and protocol, any state, then the ports, the addresses padded to 16 bytes, the interface (0) and no cookie. The
    reply has the user id and the inode at a fixed offset; inode 0 means a socket that its process has closed.
    """
    family = _family(local)
    hosts = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (local, remote))
    which = struct.pack("!HH", local[1], remote[1]) + hosts + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + which
    # macOS has no netlink sockets: the AttributeError is handled by the caller.
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
    except OSError:  # not Linux
        return []


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _in_hex(address: Address) -> str:
    # The kernel prints the address as words in the byte order of the machine.
    packed = socket.inet_pton(_family(address), address[0])
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{address[1]:04X}"


_GLOO = "gloo"
"""Prefix of the names of gloo's threads, which read the sockets. They have names since torch 2.13."""
TORCH = "pt_gloo"
"""Prefix of the names of torch's threads, which execute gloo collectives. They have names since torch 2.11."""
_Handler = ctypes.CFUNCTYPE(None)
_handlers: list[object] = []
"""The handlers, kept alive because C++ holds only their addresses."""


def install_terminate_handler(rescue: Callable[[str], bool]) -> bool:
    """Install a std::terminate() handler that calls `rescue(name)` on a thread of gloo or torch.

    The name is empty for a thread without a name of its own that executes no Python code: with older versions of torch
    it is one of these, in all likelihood. If `rescue` returns True, the thread sleeps forever, and the process lives
    on. Otherwise, and on any other thread, the previous handler ends the process. Return False if the system's C++
    library has no such handler.
    """
    if sys.platform != "linux":
        return False
    try:
        # The mangled name of `std::set_terminate(void (*)())`.
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return False
    set_terminate.argtypes = [_Handler]
    set_terminate.restype = ctypes.c_void_p

    # Runs on the thread that fails, outside of any Python call. ctypes takes the GIL for it.
    def terminate() -> None:
        name = _name_of(threading.get_native_id())
        if name == _name_of(os.getpid()) and sys._getframe().f_back is None:  # that of the main thread, inherited
            name = ""
        if (not name or name.startswith((_GLOO, TORCH))) and rescue(name):
            _lost_thread.set()
            # The thread must not return from here: C++ would end the process.
            threading.Event().wait()
        before()

    handler = _Handler(terminate)
    address = set_terminate(handler)
    before = _Handler(address) if address else _Handler(lambda: None)  # C++ ends the process when a handler returns
    _handlers.extend((handler, before))
    return True


def _name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
