"""Where files go: the local storage, and which one a folder means.

Owns: durable writes, reads by range, the exchange of folders, and what a half-done one leaves. Refuses: to know what
a checkpoint is, except which file makes one: it comes last and goes first.

Paths are joined by "/" and relative to the storage's root. Every error is an OSError that names the path.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

from rankbook.checkpoint.format.checksums import Buffer, as_bytes
from rankbook.checkpoint.storage.base import ASIDE, SEALS, Storage, check_path, naming_file

_MOST_PARTS, _MOST_BYTES = 512, 1024 * 1024  # in one call, but for a single larger part; the system takes 1024 parts
_FLUSHED = 32 * 1024 * 1024  # bytes after which the disk may begin
_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has no other
_EXCHANGE = 2  # RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD
_LOCK_TIMEOUT = 300.0
"""Seconds to wait for the lock of a folder. It is held while old steps are removed, which may take long."""
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What a file system answers that has no locks on folders, as NFS."""


def storage_of(folder: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a local folder or of a URL, "memory://x" or "s3://bucket/run"; a storage is returned as it is."""
    if isinstance(folder, str) and "://" in folder and not folder.startswith("file://"):
        from rankbook.checkpoint.storage.fsspec import RemoteStorage

        return RemoteStorage(folder)
    if isinstance(folder, str | os.PathLike):
        return LocalStorage(Path(os.fspath(folder).removeprefix("file://")))
    return folder


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
        with naming_file(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with _Flusher(descriptor) as flusher:
                    written = _write_all(descriptor, parts, flusher.wrote)
                os.fsync(descriptor)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            _sync_folder(target.parent)
        return written

    def create(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a file whole and durable. Raises FileExistsError where there is one: of two that try one succeeds."""
        draft = f"{path}.{uuid.uuid4().hex}"
        self.write(draft, parts)
        source, target = self._at(draft), self._at(path)
        try:
            with naming_file(target):
                os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                raise
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))  # without hard links
            source.replace(target)
        finally:
            source.unlink(missing_ok=True)
        _sync_folder(target.parent)

    @contextmanager
    def locked(self, *, timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
        """Hold the folder against every other process and thread that locks it; it is made where it is missing.

        Where the file system has no locks nothing is held. Raises TimeoutError.
        """
        if not self.root.is_dir():
            self._make(self.root)
        with naming_file(self.root):
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                held = _lock(descriptor, self.root, timeout)
                try:
                    yield
                finally:
                    if held:  # a child that was forked meanwhile has the descriptor too, and would keep the lock
                        fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

    def is_link(self, path: str) -> bool:
        """Return whether the name is a symbolic link, whatever it points to."""
        return self._at(path).is_symlink()

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`: straight from the file into the buffer."""
        source = self._at(path)
        done, flat = 0, as_bytes(into)
        with naming_file(source):
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device would give bytes without an end
                    raise OSError(errno.EINVAL, "not a regular file", str(source))
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
        with naming_file(old):
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
        with naming_file(target):
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
        return self.root / check_path(path)

    def _make(self, folder: Path) -> None:
        """The folder, durable like those above it that were missing too."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)  # another rank may make it at the same time
            _sync_folder(each.parent)


class _Flusher:
    """Has the disk begin while more is being written, which the system by itself would not do before the fsync."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def wrote(self, count: int) -> None:
        """More bytes are in the system's memory."""
        self._written += count
        if self._written >= _FLUSHED and (self._thread is None or not self._thread.is_alive()):
            self._raise()
            self._written = 0
            self._thread = threading.Thread(target=self._flush, name="rankbook-flush", daemon=True)
            self._thread.start()

    def _flush(self) -> None:
        try:
            _flush(self._descriptor)
        except OSError as error:  # the system tells of it once, and the fsync at the end would not hear of it
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(self, *failure: object) -> None:
        if self._thread is not None:
            self._thread.join()
        if failure[0] is None:
            self._raise()


def _write_all(descriptor: int, parts: Iterable[Buffer], wrote: Callable[[int], None]) -> int:
    """Straight out of the parts' own memory, small ones together; a part that is written is let go."""
    written = 0
    for batch in _batches(parts):
        while batch:
            count = os.writev(descriptor, batch)
            written += count
            wrote(count)
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


def _lock(descriptor: int, folder: Path, timeout: float) -> bool:
    """Take the lock. Return False where the file system has none."""
    deadline, pause = time.monotonic() + timeout, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has held its lock for {timeout:g} s", str(folder)
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        else:
            return True


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
        return
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
