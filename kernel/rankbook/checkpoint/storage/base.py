"""What a storage is: five methods between a checkpoint and the place it lies in, and what some can do beside them.

Owns: the protocol, which paths are allowed, how errors name them. Refuses: any storage.
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
"""The files that make a folder a checkpoint. Where a folder cannot be moved or removed at once, they are moved last and
removed first: what is left of a folder half way is not taken for a checkpoint."""

ASIDE = ".old"
"""Added to the name of a folder that is being replaced, where two folders cannot be exchanged. Whoever finds it and
not the folder itself reads it instead: the move was broken off."""

_NUMBERS: dict[type[OSError], int] = {
    # what fsspec raises with nothing but a path
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
}


class Storage(Protocol):
    """Five methods between a checkpoint and the place it lies in."""

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """Write all parts into a new file, making its folders; it is durable on return. Returns the bytes written.

        A file that is there is replaced. Where it fails nothing of the file is left.
        """
        ...

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Read bytes from `start` into a buffer. Returns how many: fewer than it holds only at the file's end."""
        ...

    def list(self, path: str = "") -> dict[str, int | None]:
        """The names in a folder with their sizes in bytes, None for folders. Empty where there is no such folder."""
        ...

    def move(self, source: str, target: str) -> None:
        """Give a file or folder another name, in place of what has that name now."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it. Nothing happens where there is none."""
        ...


@contextmanager
def locked_folder(storage: Storage) -> Iterator[None]:
    """Hold a storage against all others that change which steps there are, as far as it can be held.

    A storage with a method `locked` decides how; in any other only this process's own threads wait for each other. A
    thread that holds it already goes on.
    """
    held: set[str] = _held.__dict__.setdefault("names", set())
    name = f"{type(storage).__name__} {storage}"
    if name in held:
        yield
        return
    lock = getattr(storage, "locked", None)
    with _in_this_process if lock is None else lock():
        held.add(name)
        try:
            yield
        finally:
            held.discard(name)


_held = threading.local()
_in_this_process = threading.RLock()


def is_link(storage: Storage, path: str) -> bool:
    """Return whether a name is a symbolic link; a storage without a method `is_link` has none."""
    check = getattr(storage, "is_link", None)
    return check is not None and bool(check(path))


class NewFiles:
    """A storage for files that must not be there yet: `write` raises FileExistsError where the file is there.

    A storage with a method `create` decides at once; with any other the check comes before the write.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return str(self._storage)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all else is the storage's own
        return getattr(self._storage, name)

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """Write a new file."""
        create = getattr(self._storage, "create", None)
        if create is not None:
            create(path, parts)
            return 0
        folder, _, name = path.rpartition("/")
        if name in self._storage.list(folder):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        return self._storage.write(path, parts)


def read_all(storage: Storage, path: str) -> bytes:
    """A whole file. For small ones: it is read until its end, in steps that grow."""
    found, step = bytearray(), 64 * 1024
    while True:
        buffer = memoryview(bytearray(step))
        count = storage.read(path, len(found), buffer)
        found += buffer[:count]
        if count < step:
            return bytes(found)
        step = min(step * 4, 64 * 1024 * 1024)


def read_range(storage: Storage, path: str, start: int, length: int) -> bytearray:
    """`length` bytes, or fewer at the file's end. Memory is taken as they come: a length may be anything."""
    found, step = bytearray(), 64 * 1024
    while len(found) < length:
        buffer = memoryview(bytearray(min(step, length - len(found))))
        count = storage.read(path, start + len(found), buffer)
        found += buffer[:count]
        if count < len(buffer):
            break
        step = min(step * 4, 64 * 1024 * 1024)
    return found


def check_path(path: str) -> str:
    """A manifest that was tampered with must not lead out of the storage."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the checkpoint's folder", path)
    return "/".join(parts.parts)


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Calls on a descriptor raise errors that do not say which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or _NUMBERS.get(type(error), errno.EIO)
        raise OSError(number, error.strerror or str(error), str(path)) from error
