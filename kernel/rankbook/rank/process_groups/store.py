"""Rendezvous store of a cluster: a `torch.distributed.Store` without a server.

`open_store` opens the cluster's store: its folder on the notebook's host, or the agent's socket on another host. Both
have the same keys, see `transport.store_keys`. A process that waits for a key polls.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rankbook.errors import CollectiveAborted
from rankbook.transport.store_keys import KeyFolder, RemoteKeys, StoreKeys

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02
_REMOTE_PAUSE = 0.005
_CANCEL_INTERVAL = 0.05
"""Seconds of waiting for a reply after which `cancel` is checked."""
_LENGTH = struct.Struct("<I")


# Examples of keys, in generation 3 and a group that torch calls `g`:
#
#     generation-3/agreement/0                     the groups of rank 0, see `GroupManager._agree_on_groups`
#     generation-3/group-g.1/here-0                member 0 is present; the group is created for the first time
#     generation-3/group-g.1/gloo/attempt-0/...    what gloo's first attempt to connect stores
def generation_prefix(generation: int) -> str:
    """Return the prefix of the keys of one generation of the process groups."""
    return f"generation-{generation}"


def open_store(folder: Path, agent: str, cancel: threading.Event) -> RendezvousStore:
    """Return the cluster's store: in `folder`, or through the Unix socket `agent` if that is not empty.

    A set `cancel` ends all waits for keys.
    """
    if agent:
        return RendezvousStore(RemoteKeys(_AgentConnection(agent, cancel).ask), cancel, _REMOTE_PAUSE)
    return RendezvousStore(KeyFolder(folder), cancel)


class RendezvousStore(dist.Store):
    """A `dist.Store` over `keys`, shared by all processes that open them. A set `cancel` ends all waits for keys.

    `pause` is the seconds between the first two checks for a key.
    """

    def __init__(self, keys: StoreKeys, cancel: threading.Event, pause: float = _FIRST_PAUSE) -> None:
        super().__init__()
        self._keys = keys
        self._cancel = cancel
        self._pause = pause

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._keys.write(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting until it is set."""
        # On another host an operation is a round trip, and mostly the key is set already.
        if (value := self._keys.read(key)) is not None:
            return value
        self.wait([key])
        if (value := self._keys.read(key)) is None:
            raise dist.DistStoreError(f"the key {key} was deleted while a rank read it")
        return value

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set, in one operation: on another host, each one is a round trip."""
        values = [value for value in self._keys.read_all(keys) if value is not None]
        if len(values) < len(keys):
            raise dist.DistStoreError("a key was deleted while a rank read it")
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raise `DistStoreError` after `timeout`.

        Raises `CollectiveAborted` once `cancel` is set.
        """
        allowed: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined, unused-ignore]
        seconds = allowed.total_seconds()
        # Short pauses first: the ranks of one machine are mostly ready at the same time.
        pause, deadline = self._pause, time.monotonic() + seconds
        while not self.check(keys):
            if self._cancel.wait(pause):
                raise CollectiveAborted("the other ranks will not join the process group")
            if time.monotonic() > deadline:
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {missing}")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return self._keys.check(keys)

    def add(self, key: str, value: int) -> int:
        """Add a number to the value of a key, and return the sum."""
        return self._keys.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._keys.append(key, _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `torch.distributed.Store`: an empty `expected` also matches a key that is not set."""
        return self._keys.compare_set(key, _as_bytes(expected), _as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return True if it was set."""
        return self._keys.delete(key)

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        return self._keys.count()

    def clone(self) -> RendezvousStore:
        """Return this store: it needs no connection of its own."""
        return self

    # C++ calls these methods by other names.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def forget_generations(self, before: int) -> None:
        """Delete the keys of the generations below `before`."""
        self._keys.forget_generations(before)


class _AgentConnection:
    """Connection to the agent of this host, which relays the requests of one process to the store."""

    def __init__(self, address: str, cancel: threading.Event) -> None:
        self._address = address
        self._cancel = cancel
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> bytes:
        """Send a request and return the reply. Raises `CollectiveAborted` once `cancel` is set."""
        # One request at a time: the reply is that of the last request.
        with self._lock:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_CANCEL_INTERVAL)
                self._socket.connect(self._address)
            try:
                self._socket.sendall(_LENGTH.pack(len(request)) + request)
                return self._receive(_LENGTH.unpack(self._receive(_LENGTH.size))[0])
            except BaseException:
                # A reply that arrives later must not be taken for that of the next request.
                self._socket.close()
                self._socket = None
                raise

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            # In steps, because the host may be cut off from the notebook's for as long as a minute.
            try:
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                if self._cancel.is_set():
                    raise CollectiveAborted("the other ranks will not join the process group") from None
                continue
            if not part:
                raise ConnectionResetError("the agent of this host has ended")
            data += part
        return bytes(data)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
