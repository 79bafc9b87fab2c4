"""Store checkpoints: the storage protocol, with its implementations and step directories in modules of this folder.

A `Storage` has five methods: write, read, list, move, remove. Three optional ones are found by name: `locked` (a lock
for the whole storage), `create` (exclusive creation of a file) and `is_link`. Paths are relative to the storage's root
and use "/". Every error is an OSError that names the path. The helpers here work with any storage.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview

CHECKPOINT_FILES = ("manifest.json", ".metadata")
"""Files that make a folder a checkpoint. When a folder cannot be moved or removed in one operation, these files are
moved last and removed first, so that a half-moved folder is never mistaken for a checkpoint."""

ASIDE = ".replaced"
"""Suffix of a folder that is being replaced, where two folders cannot be exchanged. If a reader finds it but not the
folder itself, the replacement was interrupted, and the reader uses this folder."""

_ERRNO_BY_TYPE: dict[type[OSError], int] = {
    # fsspec raises these with a path but without an errno
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
}


class Storage(Protocol):
    """Interface to the place where checkpoints are stored."""

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """Write all parts into a new file, and create its folders. Return the number of bytes written.

        The file is durable on return. An existing file is replaced. If the write fails, no part of the file remains.
        """
        ...

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Read bytes from offset `start` into a buffer. Return their number: less than its size only at end of file."""
        ...

    def list(self, path: str = "") -> dict[str, int | None]:
        """Return the names in a folder with their sizes in bytes, None for folders; {} if the folder is missing."""
        ...

    def move(self, source: str, target: str) -> None:
        """Rename a file or folder, replacing an existing target."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content. A missing path is not an error."""
        ...


@contextmanager
def locked_folder(storage: Storage) -> Iterator[None]:
    """Hold the lock of a storage, which guards all changes to its set of steps.

    A storage with a method `locked` implements the lock; for any other storage only the threads of this process exclude
    one another. The lock is reentrant per thread.
    """
    # Locks that this thread holds. `flock` is not reentrant: a second descriptor of the same folder would wait for the
    # first.
    names: set[str] = _held_locks.__dict__.setdefault("names", set())
    name = f"{type(storage).__name__} {storage}"
    if name in names:
        yield
        return
    lock = getattr(storage, "locked", None)
    # Without a lock of the storage, claims still decide which process may save a step (`steps.claim_step`).
    with _process_lock if lock is None else lock():
        # From here on this thread may enter again, for the same storage, without waiting for itself.
        names.add(name)
        try:
            yield
        finally:
            names.discard(name)


_held_locks = threading.local()
_process_lock = threading.RLock()


def is_link(storage: Storage, path: str) -> bool:
    """Return True if a name is a symbolic link; False for a storage without a method `is_link`."""
    check = getattr(storage, "is_link", None)
    return check is not None and bool(check(path))


class NewFiles:
    """Wrap a storage so that `write` raises FileExistsError for an existing file.

    A storage with a method `create` does this atomically; for any other storage the check precedes the write.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return str(self._storage)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - other attributes are the storage's
        return getattr(self._storage, name)

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """Write a new file. Return the bytes written."""
        create = getattr(self._storage, "create", None)
        if create is not None:
            contents = [memoryview(part) for part in parts]  # a storage may read them again
            # `create` fails if the file exists, without a gap between the check and the write.
            create(path, contents)
            return sum(content.nbytes for content in contents)
        folder, _, name = path.rpartition("/")
        # Between this check and the write another process may create the file. `claim_step` reads its claim back for
        # this reason.
        if name in self._storage.list(folder):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        return self._storage.write(path, parts)


def read_all(storage: Storage, path: str) -> bytes:
    """Return the content of a small file. It is read until end of file, in growing steps."""
    data, step = bytearray(), 64 * 1024
    while True:
        buffer = memoryview(bytearray(step))
        count = storage.read(path, len(data), buffer)
        data += buffer[:count]
        # Only the end of a file gives fewer bytes than asked for.
        if count < step:
            return bytes(data)
        step = min(step * 4, 64 * 1024 * 1024)


def read_range(storage: Storage, path: str, start: int, length: int) -> bytearray:
    """Return `length` bytes from offset `start`, or fewer at end of file.

    Memory is allocated as the bytes arrive, because the length may come from a damaged file.
    """
    data, step = bytearray(), 64 * 1024
    while len(data) < length:
        # Steps of 64 KiB, 256 KiB, 1 MiB and so on. With a length of 2**60 from a damaged file, the loop stops at the
        # end of the file, and never allocates more than a multiple of what it has read.
        buffer = memoryview(bytearray(min(step, length - len(data))))
        count = storage.read(path, start + len(data), buffer)
        data += buffer[:count]
        if count < len(buffer):
            break
        step = min(step * 4, 64 * 1024 * 1024)
    return data


SHARED_FOLDER = "all hosts must see the same folder; use one on a shared file system, or a URL"
"""Hint for a rank that does not see the files of another host."""
_VISIBLE_AFTER = 5.0
"""Seconds after which a network file system shows a file that another host has created."""


def sees_file(storage: Storage, path: str) -> bool:
    """Return True if the file `path` is visible on this host. Always True if all ranks are on one host."""
    # torchrun's variable, which other launchers set too.
    hosts = os.environ.get("GROUP_WORLD_SIZE", "")
    if not path or not hosts.isdecimal() or int(hosts) < 2:
        return True
    folder, _, name = path.rpartition("/")
    deadline = time.monotonic() + _VISIBLE_AFTER
    while name not in storage.list(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def check_path(path: str) -> str:
    """Return a normalized relative path. Raise OSError if it leads out of the storage.

    Paths come from manifests, which may have been tampered with.
    """
    # PurePosixPath drops empty parts and ".", but keeps "..". A NUL byte is refused here, since the functions of `os`
    # would raise ValueError for it.
    # Examples: "step-1/__0_0.distcp" passes, "./a//b" becomes "a/b"; "/etc/passwd", "../other" and "a/../../b" are
    # refused. Links are the storage's concern (`is_link`).
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the checkpoint's folder", path)
    return "/".join(parts.parts)


@contextmanager
def add_filename(path: object) -> Iterator[None]:
    """Add the path to an OSError that has none, such as one from a file descriptor."""
    try:
        yield
    except OSError as error:
        # The error names a file already, which is more precise than `path`.
        if error.filename is not None:
            raise
        # An OSError that was raised with a text only has neither errno nor strerror.
        number = error.errno or _ERRNO_BY_TYPE.get(type(error), errno.EIO)
        raise OSError(number, error.strerror or str(error), str(path)) from error
