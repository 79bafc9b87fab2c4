"""Where files go: a local folder, or whatever fsspec can reach.

Owns: durable writes, reads by range, the exchange of folders, and what a half-done one leaves. Refuses: to know what
a checkpoint is, except which file makes one: it comes last and goes first.

Paths are joined by "/" and relative to the storage's root. Every error is an OSError that names the path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from rankbook.checkpoint.checksums import Buffer, as_bytes

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
_MOST_PARTS, _MOST_BYTES = 512, 1024 * 1024  # in one call, but for a single larger part; the system takes 1024 parts
_EXCHANGE = 2  # RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD


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


def storage_of(folder: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a local folder or of a URL, "memory://x" or "s3://bucket/run"; a storage is returned as it is."""
    if isinstance(folder, str) and "://" in folder and not folder.startswith("file://"):
        return RemoteStorage(folder)
    if isinstance(folder, str | os.PathLike):
        return LocalStorage(Path(os.fspath(folder).removeprefix("file://")))
    return folder


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


def _checked(path: str) -> str:
    """A manifest that was tampered with must not lead out of the storage."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the checkpoint's folder", path)
    return "/".join(parts.parts)


@contextmanager
def _naming(path: object) -> Iterator[None]:
    """Calls on a descriptor raise errors that do not say which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or _NUMBERS.get(type(error), errno.EIO)
        raise OSError(number, error.strerror or str(error), str(path)) from error


class LocalStorage:
    """A folder of this machine, or one that is mounted here."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """See `Storage`: one fsync for the file, and one for each folder that has a new name in it."""
        target = self._at(path)
        self._make(target.parent)
        target.unlink(missing_ok=True)  # a hard link elsewhere keeps its bytes
        with _naming(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                written = _write_all(descriptor, parts)
                os.fsync(descriptor)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            _sync_folder(target.parent)
        return written

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`: straight from the file into the buffer."""
        source = self._at(path)
        done, flat = 0, as_bytes(into)
        with _naming(source):
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < len(flat) and (count := os.preadv(descriptor, [flat[done:]], start + done)):
                    done += count
            finally:
                os.close(descriptor)
        return done

    def list(self, path: str = "") -> dict[str, int | None]:
        """See `Storage`."""
        folder = self._at(path)
        found: dict[str, int | None] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        kind = entry.stat()
                    except FileNotFoundError:  # gone since, or a link to nothing
                        continue
                    found[entry.name] = None if stat.S_ISDIR(kind.st_mode) else kind.st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def move(self, source: str, target: str) -> None:
        """See `Storage`: at once, by rename or exchange; without exchange, by way of `ASIDE`."""
        old, new = self._at(source), self._at(target)
        self._make(new.parent)
        with _naming(old):
            if new.is_dir():
                if not _exchange(old, new):
                    self._move_in_steps(old, new)
                else:
                    _sync_folder(new.parent)
                    _remove_folder(old)
            else:
                old.replace(new)
            for folder in {old.parent, new.parent}:
                _sync_folder(folder)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        target = self._at(path)
        with _naming(target):
            try:
                if target.is_dir() and not target.is_symlink():
                    _remove_folder(target)
                else:
                    target.unlink()
            except FileNotFoundError:
                return
            _sync_folder(target.parent)

    def _move_in_steps(self, old: Path, new: Path) -> None:
        """Where two folders cannot be exchanged: at every moment one of the two is there, under its name or aside."""
        aside = new.with_name(new.name + ASIDE)
        if any((new / seal).exists() for seal in SEALS):
            _remove_folder(aside)
            new.rename(aside)
            _sync_folder(new.parent)
        else:  # the rest of a folder; what was put aside may be all that is left of it
            _remove_folder(new)
        old.rename(new)
        _sync_folder(new.parent)
        _remove_folder(aside)

    def _at(self, path: str) -> Path:
        return self.root / _checked(path)

    def _make(self, folder: Path) -> None:
        """The folder, durable like those above it that were missing too."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)  # another rank may make it at the same time
            _sync_folder(each.parent)


def _write_all(descriptor: int, parts: Iterable[Buffer]) -> int:
    """Straight out of the parts' own memory, small ones together; a part that is written is let go."""
    written = 0
    for batch in _batches(parts):
        while batch:
            count = os.writev(descriptor, batch)
            written += count
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            if count:
                batch[0] = batch[0][count:]
    return written


def _batches(parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    held = 0
    for part in parts:
        if view := as_bytes(part):
            batch.append(view)
            held += len(view)
        if held >= _MOST_BYTES or len(batch) == _MOST_PARTS:
            del part, view
            yield batch
            batch, held = [], 0
    yield batch


def _sync_folder(folder: Path) -> None:
    """A new name lasts once the folder that holds it is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def _remove_folder(folder: Path) -> None:
    if not folder.is_dir():
        return
    for seal in SEALS:
        (folder / seal).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once. False where this system or file system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:  # noqa: ANN401 - a C function
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call


class RemoteStorage:
    """A place that fsspec knows. What it cannot do at once is done in an order that can be broken off anywhere."""

    def __init__(self, url: str, filesystem: Any = None) -> None:  # noqa: ANN401 - fsspec has no types
        self.url = url.rstrip("/")
        if filesystem is None:
            from fsspec.core import url_to_fs

            filesystem, root = url_to_fs(self.url)
        else:
            root = filesystem._strip_protocol(self.url)
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """See `Storage`: durable once the service has taken it."""
        target = self._at(path)
        written = 0
        with self._telling(path):
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                with self._filesystem.open(target, "wb") as file:
                    for part in parts:
                        view = memoryview(part)
                        file.write(view)
                        written += view.nbytes
            except BaseException:
                self._discard(target)
                raise
        return written

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`: by a ranged request, copied once."""
        target = self._at(path)
        flat = as_bytes(into)
        with self._telling(path):
            found = self._filesystem.cat_file(target, start=start, end=start + len(flat))
            flat[: len(found)] = found
        return len(found)

    def list(self, path: str = "") -> dict[str, int | None]:
        """See `Storage`."""
        folder = self._at(path)
        with self._telling(path):
            try:
                self._filesystem.invalidate_cache(folder)
                entries = self._filesystem.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        names = {each["name"].rstrip("/").rpartition("/")[2]: each for each in entries if each["name"] != folder}
        return {name: None if each["type"] == "directory" else each["size"] for name, each in names.items()}

    def move(self, source: str, target: str) -> None:
        """See `Storage`: copies and removes, by way of `ASIDE` where the target is there."""
        there = self.list(target)
        if not self._is_folder(source):
            with self._telling(source):
                self._filesystem.copy(self._at(source), self._at(target))
            self.remove(source)
            return
        aside = _checked(target) + ASIDE
        if there.keys() & set(SEALS):
            self.remove(aside)
            self._copy_folder(target, aside)
        self.remove(target)  # without a seal it is the rest of a folder, which may be whole aside
        self._copy_folder(source, target)
        self.remove(source)
        self.remove(aside)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        if self._is_folder(path):
            for seal in SEALS:
                self._discard(f"{self._at(path)}/{seal}")
        with self._telling(path):
            try:
                self._filesystem.rm(self._at(path), recursive=True)
            except FileNotFoundError:
                return

    def _copy_folder(self, source: str, target: str) -> None:
        entries = self.list(source)
        for name in sorted(entries, key=lambda name: (name in SEALS, name == SEALS[0], name)):
            if entries[name] is None:
                self._copy_folder(f"{source}/{name}", f"{target}/{name}")
                continue
            with self._telling(f"{source}/{name}"):
                self._filesystem.makedirs(self._at(target), exist_ok=True)
                self._filesystem.copy(self._at(f"{source}/{name}"), self._at(f"{target}/{name}"))

    def _is_folder(self, path: str) -> bool:
        with self._telling(path):
            return bool(self._filesystem.isdir(self._at(path)))

    def _discard(self, target: str) -> None:
        try:
            self._filesystem.rm_file(target)
        except FileNotFoundError:
            pass  # it never came to be there

    def _at(self, path: str) -> str:
        return f"{self._root}/{_checked(path)}".rstrip("/")

    @contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        """What the service's own client raises becomes an OSError that names the place."""
        try:
            with _naming(f"{self.url}/{path}"):
                yield
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{self.url}/{path}") from error
