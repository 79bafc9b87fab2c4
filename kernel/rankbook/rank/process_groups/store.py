"""Rendezvous store of a cluster: a torch key-value store in a folder that only its user can enter.

A key is a file. A value is written to another file and renamed, so a process that is killed meanwhile leaves no partial
value. Read-modify-write operations hold a file lock. There is no server whose death the ranks would notice, and no port
that other users of the machine could reach, as torch's TCPStore has. A process that waits for a key polls.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from rankbook.errors import CollectiveAborted

_LONGEST_NAME = 200
_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02


# Examples of keys, in generation 3 and a group that torch calls `g`:
##
#     generation-3/agreement/0                     the groups of rank 0, see `GroupManager._agree_on_groups`
#     generation-3/group-g.1/here-0                member 0 is present; the group is created for the first time
#     generation-3/group-g.1/gloo/attempt-0/...    what gloo's first attempt to connect stores
def generation_prefix(generation: int) -> str:
    """Return the prefix of the keys of one generation of the process groups."""
    return f"generation-{generation}"


class FolderStore(dist.Store):
    """A `dist.Store` in `folder`, shared by all processes that open it. A set `cancel` ends all waits for keys."""

    def __init__(self, folder: Path, cancel: threading.Event) -> None:
        super().__init__()
        self._path = folder
        self._opened = _open_private(folder)
        self._cancel = cancel

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._write(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting until it is set."""
        self.wait([key])
        value = self._read(key)
        if value is None:
            raise dist.DistStoreError(f"the key {key} was deleted while a rank read it")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raise `DistStoreError` after `timeout`.

        Raises `CollectiveAborted` once `cancel` is set.
        """
        allowed: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined, unused-ignore]
        seconds = allowed.total_seconds()
        # Short pauses first: the ranks of one machine are mostly ready at the same time.
        pause, deadline = _FIRST_PAUSE, time.monotonic() + seconds
        while not self.check(keys):
            if self._cancel.wait(pause):
                raise CollectiveAborted("the other ranks will not join the process group")
            if time.monotonic() > deadline:
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {missing}")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return all(self._is_set(key) for key in keys)

    def add(self, key: str, value: int) -> int:
        """Add a number to the value of a key, and return the sum."""
        total = 0

        def change(before: bytes | None) -> bytes:
            nonlocal total
            total = int(before or 0) + value
            return str(total).encode()

        self._change(key, change)
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        more = value.encode() if isinstance(value, str) else bytes(value)
        self._change(key, lambda before: (before or b"") + more)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `torch.distributed.Store`: an empty `expected` also matches a key that is not set."""
        old, new = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        result = new

        def change(before: bytes | None) -> bytes | None:
            nonlocal result
            if before == old or (before is None and not old):
                return new
            result = old if before is None else before
            return None

        self._change(key, change)
        return result

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return True if it was set."""
        try:
            os.unlink(_name(key), dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return True

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        return sum(name.startswith("key-") for name in self._names())

    def clone(self) -> FolderStore:
        """Return this store: it has no connection to duplicate."""
        return self

    # C++ calls these methods by other names.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def forget_generations(self, before: int) -> None:
        """Delete the keys of the generations below `before`."""
        for name in self._names():
            # The slash of the prefix is quoted in file names.
            match = re.match(r"key-generation-(\d+)%2F", name)
            if match and int(match[1]) < before:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder)

    # Files

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

    def _read(self, key: str) -> bytes | None:
        try:
            descriptor = os.open(_name(key), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def _write(self, key: str, value: bytes) -> None:
        # One name per thread, so that two writers never share a file. `rename` replaces the old value in one step.
        fresh = f"fresh-{os.getpid()}-{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=self._folder), "wb") as file:
            file.write(value)
        os.rename(fresh, _name(key), src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a value by `change(value)` under the file lock; `change` returns None to leave it."""
        with self._locked():
            value = change(self._read(key))
            if value is not None:
                self._write(key, value)

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
