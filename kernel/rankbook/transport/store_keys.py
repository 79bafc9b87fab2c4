"""Keys of the cluster's rendezvous store: files in a private folder, and requests for them from another host.

A key is a file. A value is written to another file and renamed, so a process that is killed meanwhile leaves no partial
value. Read-modify-write operations hold a file lock. There is no server whose death the ranks would notice, and no port
that other users of the machine could reach, as torch's TCPStore has.

The ranks of the notebook's host use the folder itself (`KeyFolder`). The ranks of another host send `StoreOperation`
messages to their host's agent, over a Unix socket. The agent relays them to the notebook's host, which performs them on
the same folder (`perform`). `rank.process_groups.store` makes a `torch.distributed.Store` of either; this module does
not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import msgspec

from rankbook.errors import ProtocolError

_LONGEST_NAME = 200


class StoreKeys(Protocol):
    """Operations on the keys of a store."""

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it is not set."""

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, None for those that are not set."""

    def write(self, key: str, value: bytes) -> None:
        """Set the value of a key."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""

    def add(self, key: str, number: int) -> int:
        """Add a number to the value of a key, and return the sum."""

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See `torch.distributed.Store`: an empty `expected` also matches a key that is not set."""

    def delete(self, key: str) -> bool:
        """Delete a key. Return True if it was set."""

    def count(self) -> int:
        """Return the number of keys that are set."""

    def forget_generations(self, before: int) -> None:
        """Delete the keys of the generations below `before`."""


class KeyFolder:
    """Store keys in `folder`, which is created. Raises `PermissionError` if other users may enter it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._opened = _open_private(folder)

    def close(self) -> None:
        """Close the descriptor of the folder."""
        os.close(self._opened)

    def read(self, key: str) -> bytes | None:
        """See `StoreKeys`."""
        try:
            descriptor = os.open(_name(key), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `StoreKeys`."""
        return [self.read(key) for key in keys]

    def write(self, key: str, value: bytes) -> None:
        """See `StoreKeys`."""
        # One name per thread, so that two writers never share a file. `rename` replaces the old value in one step.
        fresh = f"fresh-{os.getpid()}-{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=self._folder), "wb") as file:
            file.write(value)
        os.rename(fresh, _name(key), src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def check(self, keys: Sequence[str]) -> bool:
        """See `StoreKeys`."""
        # In the given order, ending at the first one that is missing: callers poll, and mostly wait for the first.
        return all(self._is_set(key) for key in keys)

    def add(self, key: str, number: int) -> int:
        """See `StoreKeys`."""
        total = 0

        def change(before: bytes | None) -> bytes:
            nonlocal total
            total = int(before or 0) + number
            return str(total).encode()

        self._change(key, change)
        return total

    def append(self, key: str, value: bytes) -> None:
        """See `StoreKeys`."""
        self._change(key, lambda before: (before or b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See `StoreKeys`."""
        result = desired

        def change(before: bytes | None) -> bytes | None:
            nonlocal result
            if before == expected or (before is None and not expected):
                return desired
            result = expected if before is None else before
            return None

        self._change(key, change)
        return result

    def delete(self, key: str) -> bool:
        """See `StoreKeys`."""
        try:
            os.unlink(_name(key), dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return True

    def count(self) -> int:
        """See `StoreKeys`."""
        return sum(name.startswith("key-") for name in self._names())

    def forget_generations(self, before: int) -> None:
        """See `StoreKeys`."""
        for name in self._names():
            # The slash of the prefix is quoted in file names.
            match = re.match(r"key-generation-(\d+)%2F", name)
            if match and int(match[1]) < before:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder)

    @property
    def _folder(self) -> int:
        """Return a descriptor of the folder, which is created again if a cleaner of temporary files removed it."""
        # The descriptor of a removed folder stays valid, but nobody else finds what is written there. A link count of 0
        # is its sign.
        if os.fstat(self._opened).st_nlink == 0:
            fresh = _open_private(self._path)
            # The same number, because other threads may be about to use it.
            os.dup2(fresh, self._opened, inheritable=False)
            os.close(fresh)
        return self._opened

    def _names(self) -> list[str]:
        return os.listdir(self._folder)  # noqa: PTH208 - pathlib.Path takes no descriptor

    def _is_set(self, key: str) -> bool:
        try:
            os.stat(_name(key), dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a value by `change(value)` under the file lock; `change` returns None to leave it."""
        with self._locked():
            value = change(self.read(key))
            if value is not None:
                self.write(key, value)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened anew every time: the lock belongs to the open file, so that two threads of one process exclude each
        # other as well. Closing it releases the lock.
        descriptor = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _open_private(folder: Path) -> int:
    """Open a folder and create it and its parent if missing. Raise `PermissionError` if other users may enter it."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path} is open to other users: expected a folder of this user with mode 0700")
    # All later calls are relative to this descriptor, so a folder that is renamed or replaced by a link is not
    # followed.
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _name(key: str) -> str:
    name = quote(key, safe="")
    # File names have at most 255 bytes. The hash keeps long keys with equal beginnings apart.
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2]}-{hashlib.sha256(key.encode()).hexdigest()}"
    return f"key-{name}"


# Requests from another host -----------------------------------------------------------------------------------------


class StoreOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a method of `StoreKeys`, with the arguments that this method takes."""

    method: Literal[
        "read", "read_all", "write", "check", "add", "append", "compare_set", "delete", "count", "forget_generations"
    ]
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


class StoreResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a `StoreOperation`. `error` is the text of the error that it raised."""

    value: bytes | int | bool | list[bytes | None] | None = None
    error: str = ""


_operation = msgspec.msgpack.Decoder(StoreOperation)
_result = msgspec.msgpack.Decoder(StoreResult)


def perform(keys: StoreKeys, request: bytes) -> bytes:
    """Perform an encoded `StoreOperation` and return the encoded result. Raises `ProtocolError` if it is invalid."""
    try:
        operation = _operation.decode(request)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"invalid request to the store: {error}") from error
    try:
        result = StoreResult(_call(keys, operation))
    # An IndexError for a missing key, a ValueError for `add` on a value that is not a number.
    except (OSError, ValueError, IndexError) as error:
        result = StoreResult(error=f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(result)


def _call(keys: StoreKeys, operation: StoreOperation) -> bytes | int | bool | list[bytes | None] | None:
    match operation.method:
        case "read":
            return keys.read(operation.keys[0])
        case "read_all":
            return keys.read_all(operation.keys)
        case "write":
            keys.write(operation.keys[0], operation.value)
        case "check":
            return keys.check(operation.keys)
        case "add":
            return keys.add(operation.keys[0], operation.number)
        case "append":
            keys.append(operation.keys[0], operation.value)
        case "compare_set":
            return keys.compare_set(operation.keys[0], operation.expected, operation.value)
        case "delete":
            return keys.delete(operation.keys[0])
        case "count":
            return keys.count()
        case "forget_generations":
            keys.forget_generations(operation.number)
    return None


class RemoteKeys:
    """Perform the operations through `ask`, which sends an encoded `StoreOperation` and returns the encoded result.

    Raises `OSError` for an operation that failed on the notebook's host, and the errors of `ask`.
    """

    def __init__(self, ask: Callable[[bytes], bytes]) -> None:
        self._ask = ask

    def read(self, key: str) -> bytes | None:
        """See `StoreKeys`."""
        value: bytes | None = self._perform(StoreOperation("read", (key,)))
        return value

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `StoreKeys`."""
        return list(self._perform(StoreOperation("read_all", tuple(keys))))

    def write(self, key: str, value: bytes) -> None:
        """See `StoreKeys`."""
        self._perform(StoreOperation("write", (key,), value))

    def check(self, keys: Sequence[str]) -> bool:
        """See `StoreKeys`."""
        return bool(self._perform(StoreOperation("check", tuple(keys))))

    def add(self, key: str, number: int) -> int:
        """See `StoreKeys`."""
        return int(self._perform(StoreOperation("add", (key,), number=number)))

    def append(self, key: str, value: bytes) -> None:
        """See `StoreKeys`."""
        self._perform(StoreOperation("append", (key,), value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See `StoreKeys`."""
        return bytes(self._perform(StoreOperation("compare_set", (key,), desired, expected)))

    def delete(self, key: str) -> bool:
        """See `StoreKeys`."""
        return bool(self._perform(StoreOperation("delete", (key,))))

    def count(self) -> int:
        """See `StoreKeys`."""
        return int(self._perform(StoreOperation("count")))

    def forget_generations(self, before: int) -> None:
        """See `StoreKeys`."""
        self._perform(StoreOperation("forget_generations", number=before))

    def _perform(self, operation: StoreOperation) -> Any:  # noqa: ANN401 - as the method's
        result = _result.decode(self._ask(msgspec.msgpack.encode(operation)))
        if result.error:
            raise OSError(f"the store on the notebook's host reported {result.error}")
        return result.value
