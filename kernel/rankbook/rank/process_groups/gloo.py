"""gloo's backend, connected to ranks of this user only.

Owns: gloo's listening sockets while a group forms, and who may connect to them. Refuses: to know what the group is for.

gloo listens on a TCP port, which every user of the machine can reach, and believes the first connection that names a
pair of ranks. It takes no socket from outside, so the system is asked, and a group forms in one of two ways:

1. Openly, which is what happens unless somebody interferes. Once gloo is connected, the rank looks up which user is at
   the other end of each connection that its listener has accepted. The ranks tell each other in the store, and use the
   group only if none of them has seen another user.
2. Guarded, if one has. A socket filter on the new listener cuts the payload off every segment: connections come about,
   and nothing is read from them. Each connection whose other end is this user's is freed of the filter, and TCP sends
   again what was cut off, 0.2 s later; the others are shut down. gloo thus never reads a byte of another user.

From then on the listener drops every segment, so that nobody can use up the rank's descriptors.

Where the system has no socket filters and does not tell whose a connection is (macOS), nothing is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from rankbook.rank.process_groups.gloo_sockets import (
    Address,
    Opened,
    duplicate,
    has_connections,
    shut_down,
    tcp_sockets,
    user_of_peer,
    watch_opened,
)

_OPEN_TIMEOUT = timedelta(seconds=2)
"""How long ranks may take to connect openly, where nobody is seen to interfere."""
_LOOK_AGAIN = 0.002
_FRESH_LISTENERS = 100
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python has no names for
_DROP_ALL, _CUT_PAYLOAD = 0, 1
"""How many bytes of a segment a filter lets through; headers always stay with what is let through (socket(7))."""
_DISTRUSTED = "distrusted"


def make_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, wait: Callable[[dist.Store, list[str]], None]
) -> Any:  # noqa: ANN401 - torch has no type for it
    """Return a `ProcessGroupGloo` whose peers are ranks of this user. `wait` waits for keys of a store."""
    openly = dist.PrefixStore("open", store)
    with _closed_after(_Listeners()) as listeners, watch_opened() as opened:
        attempt = _Attempt(listeners, openly, rank, size, min(timeout, _OPEN_TIMEOUT))
        deadline = time.monotonic() + _OPEN_TIMEOUT.total_seconds()
        while not attempt.ended.wait(_LOOK_AGAIN) and time.monotonic() < deadline:
            if listeners.strangers() or openly.check([_DISTRUSTED]):
                break
        if not attempt.made or listeners.strangers():
            openly.set(_DISTRUSTED, "")
    openly.set(f"ended-{rank}", "")
    wait(openly, [f"ended-{other}" for other in range(size)])
    if not openly.check([_DISTRUSTED]):
        made = attempt.made[0]
        made._set_default_timeout(timeout)
        return made
    shut_down(opened)
    attempt.forget()
    with _closed_after(_guarded_listeners()) as listeners, listeners.admit_own():
        return _connect(listeners, dist.PrefixStore("guarded", store), rank, size, timeout)


def make_unconnected() -> Any:  # noqa: ANN401
    """Return a backend that is connected to nobody and holds no descriptor or thread.

    torch wants a backend registered for the life of a group and offers no way to replace it. A `RecoverableGroup`
    overrides every method through which a call would reach the registered one.
    """
    return FakeProcessGroup._create_internal(0, 1)


class _Attempt:
    """A connection on a thread of its own: a stranger can end gloo's thread, for which `_connect` waits forever."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - those of `_connect`
        self.ended = threading.Event()
        self.made: list[Any] = []
        threading.Thread(target=self._run, args=arguments, name="rankbook-connect", daemon=True).start()

    def _run(self, *arguments: Any) -> None:  # noqa: ANN401
        try:
            self.made.append(_connect(*arguments))
        except RuntimeError:  # it came about too slowly, or was broken off
            pass
        finally:
            self.ended.set()

    def forget(self) -> None:
        """Let go of what was made; that may wait for gloo's thread too."""
        threading.Thread(target=self.made.clear, name="rankbook-end", daemon=True).start()


def _connect(listeners: _Listeners, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._devices = listeners.devices
    options._threads = 2 * len(listeners.devices)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


class _Listeners:
    """gloo's devices, one for each network interface that it is to use, and the sockets that they listen on."""

    def __init__(self) -> None:
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        with watch_opened() as opened:
            gloo = dist.ProcessGroupGloo
            self.devices = (
                [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
                if names
                else [gloo.create_default_device(lazy_init=False)]
            )
        self._sockets: Opened = {}
        self._addresses: set[Address] = set()
        for descriptor, identity in opened.items():
            with duplicate(descriptor, identity) as same:
                if same is not None and same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._sockets[descriptor] = identity
                    self._addresses.add(same.getsockname()[:2])

    def filter(self, length: int) -> None:
        """Let through `length` bytes of what comes for the listeners, and for what they accept from now on."""
        for descriptor, identity in self._sockets.items():
            with duplicate(descriptor, identity) as same:
                if same is not None:
                    _attach(same, length)

    def are_connected(self) -> bool:
        """Return whether anybody has connected to one of them so far."""
        return any(has_connections(address) for address in self._addresses)

    def strangers(self) -> bool:
        """Return whether they have accepted a connection whose other end is not this user's."""
        return not all(_is_own(local, remote) for _, _, local, remote in self._accepted())

    @contextlib.contextmanager
    def admit_own(self) -> Iterator[None]:
        """Meanwhile, free connections of this user of the filter, and shut down those of others."""
        done = threading.Event()
        thread = threading.Thread(target=self._admit, args=(done,), name="rankbook-admit", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _admit(self, done: threading.Event) -> None:
        decided: Opened = {}
        while not done.wait(_LOOK_AGAIN):
            for descriptor, identity, local, remote in self._accepted():
                if decided.get(descriptor) == identity:
                    continue
                decided[descriptor] = identity
                if not _is_own(local, remote):
                    shut_down({descriptor: identity})
                    continue
                with duplicate(descriptor, identity) as same:
                    if same is not None:
                        same.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _accepted(self) -> Iterator[tuple[int, tuple[int, int], Address, Address | None]]:
        for descriptor, identity in tcp_sockets().items():
            with duplicate(descriptor, identity) as same:
                if same is None or descriptor in self._sockets or same.getsockname()[:2] not in self._addresses:
                    continue
                try:
                    remote = same.getpeername()[:2]
                except OSError:  # it was connected, by nobody knows whom
                    remote = None
                yield descriptor, identity, same.getsockname()[:2], remote


def _guarded_listeners() -> _Listeners:
    """Listeners to which nobody has connected yet, and of whose connections nothing is read."""
    for _ in range(_FRESH_LISTENERS):
        listeners = _Listeners()
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
        listeners.filter(_DROP_ALL)


def _is_own(local: Address, remote: Address | None) -> bool:
    """Return whether the other end of a connection is this user's, as far as the system tells."""
    return remote is not None and user_of_peer(local, remote) in {os.geteuid(), None}


def _attach(listener: socket.socket, length: int) -> None:
    """Attach the one-instruction filter `BPF_RET | BPF_K`."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, length))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    with contextlib.suppress(OSError):  # no such filters here
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
