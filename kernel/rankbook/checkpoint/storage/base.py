"""Define the storage protocol of checkpoints, and helpers that work with any storage.

A `Storage` has five methods: write, read, list, move, remove. Three optional ones are found by name: `locked` (a lock
for the whole storage), `create` (exclusive creation of a file) and `is_link`. Paths are relative to the storage's root
and use "/". Every error is an OSError that names the path.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Protocol

from rankbook.checkpoint.format.checksums import Buffer

SEALS = ("manifest.json", ".metadata")
"""Files that make a folder a checkpoint. When a folder cannot be moved or removed in one operation, these files are
moved last and removed first, so that a half-moved folder is never mistaken for a checkpoint."""

ASIDE = ".old"
"""Suffix of a folder that is being replaced, where two folders cannot be exchanged. If a reader finds it but not the
folder itself, the replacement was interrupted, and the reader uses this folder."""

_NUMBERS: dict[type[OSError], int] = {
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
    names: set[str] = _held.__dict__.setdefault("names", set())
    name = f"{type(storage).__name__} {storage}"
    if name in names:
        yield
        return
    lock = getattr(storage, "locked", None)
    with _in_this_process if lock is None else lock():
        names.add(name)
        try:
            yield
        finally:
            names.discard(name)


_held = threading.local()
_in_this_process = threading.RLock()


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
        """Write a new file. Return 0 if the storage has a method `create`, otherwise the bytes written."""
        create = getattr(self._storage, "create", None)
        if create is not None:
            create(path, parts)
            return 0
        folder, _, name = path.rpartition("/")
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
        if count < step:
            return bytes(data)
        step = min(step * 4, 64 * 1024 * 1024)


def read_range(storage: Storage, path: str, start: int, length: int) -> bytearray:
    """Return `length` bytes from offset `start`, or fewer at end of file.

    Memory is allocated as the bytes arrive, because the length may come from a damaged file.
    """
    data, step = bytearray(), 64 * 1024
    while len(data) < length:
        buffer = memoryview(bytearray(min(step, length - len(data))))
        count = storage.read(path, start + len(data), buffer)
        data += buffer[:count]
        if count < len(buffer):
            break
        step = min(step * 4, 64 * 1024 * 1024)
    return data


def check_path(path: str) -> str:
    """Return a normalized relative path. Raise OSError if it leads out of the storage.

    Paths come from manifests, which may have been tampered with.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the checkpoint's folder", path)
    return "/".join(parts.parts)


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Add the path to an OSError that has none, such as one from a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or _NUMBERS.get(type(error), errno.EIO)
        raise OSError(number, error.strerror or str(error), str(path)) from error
