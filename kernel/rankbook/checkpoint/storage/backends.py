"""Store checkpoints in local and mounted folders, and in the file systems of fsspec.

`storage_of` returns the storage for a path or a URL.

`Folder`, for local and mounted folders, has durable writes, ranged reads and the atomic exchange of folders. A file is
durable after one fsync of the file and one of every folder with a new name in it. A folder is replaced in one system
call where Linux and the file system support it (renameat2 with RENAME_EXCHANGE), otherwise in steps that can be
interrupted at any point (`_move_in_steps`).

`RemoteStorage`, for the file systems of fsspec (object stores, memory, remote hosts), has no atomic move or removal of
a folder. Both are done file by file, in an order that can be interrupted at any point: a new folder gets its seals
(`CHECKPOINT_FILES`) last, and an old one loses them first.
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
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from rankbook.checkpoint.format.manifest import as_bytes
from rankbook.checkpoint.storage import ASIDE, CHECKPOINT_FILES, Buffer, Storage, add_filename, check_path

_MAX_PARTS, _MAX_BYTES = 512, 1024 * 1024  # per writev, except for a single larger part; IOV_MAX is 1024
_FLUSH_INTERVAL = 32 * 1024 * 1024  # bytes after which a flush to disk is started
_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
_RENAME_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100  # AT_FDCWD
_LOCK_TIMEOUT = 300.0
"""Seconds to wait for the lock of a folder. It is held while old steps are removed, which may take long."""
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors from file systems that cannot lock folders, such as NFS."""


Folder = str | os.PathLike[str] | Storage
"""A place for checkpoints: a local path, a URL of fsspec, or an object with the methods of `Storage`."""


def storage_of(folder: Folder) -> Storage:
    """Return the storage for a local path or a URL such as "s3://bucket/run"; return a storage unchanged.

    A path may begin with `~`.
    """
    if isinstance(folder, str) and "://" in folder and not folder.startswith(("file://", "local://")):
        return RemoteStorage(folder)
    if isinstance(folder, str | os.PathLike):
        path = os.fspath(folder).removeprefix("file://").removeprefix("local://")
        return LocalStorage(Path(os.path.expanduser(path)))  # noqa: PTH111 - raises for no name of a user
    return folder


class LocalStorage:
    """Storage in a local or mounted folder.

    A relative path means the working directory of now, also if a save in the background goes on after `os.chdir`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._given = root

    def __str__(self) -> str:
        return str(self._given)

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """See `Storage`. One fsync for the file, and one for every folder with a new name in it."""
        target = self._full_path(path)
        self._make_folder(target.parent)
        target.unlink(missing_ok=True)  # do not overwrite the content of a hard link
        with add_filename(target):
            # `O_EXCL` after the unlink: if two processes write the same file, one of them fails instead of mixing their
            # data.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with _Flusher(descriptor) as flusher:
                    written = _write_all(descriptor, parts, flusher.add_written)
                # The file's data first, then its name in the folder. A name without data would look like a truncated
                # file after a crash.
                os.fsync(descriptor)
            except BaseException:
                # No part of the file may remain, see `Storage.write`.
                target.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            _sync_folder(target.parent)
        return written

    def create(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a whole file durably. Raises FileExistsError if it exists.

        Of two concurrent calls one succeeds. The content is written to a draft, which gets its name by a hard link:
        link() fails if the name exists, and no reader sees a partial file. Without hard links the name is reserved with
        O_EXCL first.
        """
        draft = f"{path}.{uuid.uuid4().hex}"
        self.write(draft, parts)
        source, target = self._full_path(draft), self._full_path(path)
        try:
            with add_filename(target):
                os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                raise
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))  # no hard links
            source.replace(target)
        finally:
            source.unlink(missing_ok=True)
        _sync_folder(target.parent)

    @contextmanager
    def locked(self, *, timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
        """Hold an exclusive lock (flock) on the root folder, and create it if it is missing.

        Excludes other processes and other threads. Does nothing if the file system has no locks. Raises TimeoutError.
        """
        if not self.root.is_dir():
            # A lock needs a folder to be held on.
            self._make_folder(self.root)
        with add_filename(self.root):
            # The folder itself is locked. A lock file would have to be created, and would be left behind.
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                acquired = _lock(descriptor, self.root, timeout)
                try:
                    yield
                finally:
                    if acquired:  # closing is not enough: a child forked meanwhile shares the descriptor and the lock
                        fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

    def is_link(self, path: str) -> bool:
        """Return True if the name is a symbolic link, also a dangling one."""
        return self._full_path(path).is_symlink()

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`. Reads straight into the buffer."""
        source = self._full_path(path)
        done, flat = 0, as_bytes(into)
        with add_filename(source):
            # `O_NONBLOCK`: opening a named pipe would wait for a writer. It has no effect on regular files.
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or device has no end
                    raise OSError(errno.EINVAL, "not a regular file", str(source))
                while done < len(flat) and (count := os.preadv(descriptor, [flat[done:]], start + done)):
                    done += count
            finally:
                os.close(descriptor)
        return done

    def list(self, path: str = "") -> dict[str, int | None]:
        """See `Storage`."""
        folder = self._full_path(path)
        sizes: dict[str, int | None] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        kind = entry.stat()
                    except FileNotFoundError:  # removed meanwhile, or a dangling link
                        continue
                    except OSError:
                        if not entry.is_symlink():
                            raise
                        kind = entry.stat(follow_symlinks=False)  # a link to itself, or to what cannot be reached
                    sizes[entry.name] = None if stat.S_ISDIR(kind.st_mode) else kind.st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def move(self, source: str, target: str) -> None:
        """See `Storage`. Atomic by rename or exchange; without exchange, in steps by way of `ASIDE`.

        An old folder that cannot be removed is no error: its rest remains under the name `source` or the `ASIDE` name.
        """
        old, new = self._full_path(source), self._full_path(target)
        self._make_folder(new.parent)
        with add_filename(old):
            if old.is_dir() and new.is_dir():
                # After an exchange the old content has the name `source`, and is removed under it.
                if not _exchange(old, new):
                    self._move_in_steps(old, new)
                else:
                    _sync_folder(new.parent)  # the exchange must be durable before the old content is removed
                    with suppress(OSError):  # the move is done; the next save tries again
                        _remove_folder(old)
            else:
                # A file, or a name that is not in use: rename(2) replaces it in one step. It never replaces a folder
                # by a file.
                old.replace(new)
            for folder in {old.parent, new.parent}:
                _sync_folder(folder)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        target = self._full_path(path)
        with add_filename(target):
            try:
                if target.is_dir() and not target.is_symlink():
                    _remove_folder(target)
                else:
                    target.unlink()
            except FileNotFoundError:
                return
            _sync_folder(target.parent)

    def _move_in_steps(self, old: Path, new: Path) -> None:
        """Replace a folder where two folders cannot be exchanged.

        At every moment either the old or the new folder is complete, under its name or aside.
        """
        aside = new.with_name(new.name + ASIDE)
        if any((new / name).exists() for name in CHECKPOINT_FILES):
            _remove_folder(aside)
            new.rename(aside)
            _sync_folder(new.parent)
        else:  # an incomplete folder from an interrupted move, whose only complete copy may be aside: keep that
            _remove_folder(new)
        old.rename(new)
        _sync_folder(new.parent)
        with suppress(OSError):  # the move is done; the next one tries again
            _remove_folder(aside)

    def _full_path(self, path: str) -> Path:
        return self.root / check_path(path)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and its missing parents durably."""
        # Every new folder is a new name in its parent, which has to be synced, from the top down.
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)  # another rank may make it at the same time
            _sync_folder(directory.parent)


class _Flusher:
    """Start writing to disk while more data arrives.

    The system by itself would begin only at the final fsync. One background thread at a time calls fdatasync.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def add_written(self, count: int) -> None:
        """Count bytes that were passed to the system, and start a flush if they are many."""
        self._written += count
        # fdatasync on the same descriptor in another thread: the writes go on while the disk works. One flush runs at a
        # time; the next one begins after its end.
        if self._written >= _FLUSH_INTERVAL and (self._thread is None or not self._thread.is_alive()):
            self._raise()
            self._written = 0
            self._thread = threading.Thread(target=self._flush, name="rankbook-flush", daemon=True)
            self._thread.start()

    def _flush(self) -> None:
        try:
            _flush(self._descriptor)
        except OSError as error:  # reported only once: the final fsync would not raise it again
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(self, *failure: object) -> None:
        if self._thread is not None:
            self._thread.join()
        # The exception of the block is more important than that of a flush.
        if failure[0] is None:
            self._raise()


def _write_all(descriptor: int, parts: Iterable[Buffer], add_written: Callable[[int], None]) -> int:
    """Write all parts with writev, without copying; small parts together. Release a part once it is written."""
    written = 0
    for batch in _batches(parts):
        while batch:
            count = os.writev(descriptor, batch)
            written += count
            add_written(count)
            # writev may write less than asked for. Drop the parts that are written, and shorten the next one.
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            # A part of the first remaining buffer was written.
            if count:
                batch[0] = batch[0][count:]
    return written


def _batches(parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    nbytes = 0
    for part in parts:
        # Small parts, such as the zip headers around small tensors, share a system call. A piece of a large tensor has
        # 1 MiB and ends the batch.
        if view := as_bytes(part):
            batch.append(view)
            nbytes += len(view)
        if nbytes >= _MAX_BYTES or len(batch) == _MAX_PARTS:
            del part, view  # keep no reference to a part while it is written
            yield batch
            batch, nbytes = [], 0
    yield batch


def _sync_folder(folder: Path) -> None:
    """Sync a folder, which makes the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported and unnecessary on some network file systems
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, timeout: float) -> bool:
    """Take the lock. Return False if the file system has no locks."""
    deadline, pause = time.monotonic() + timeout, 0.001
    while True:
        try:
            # Polled, because a waiting flock has no timeout and could not be interrupted by a timeout of ours.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"timed out after {timeout:g} s: another process holds the lock of the folder",
                    str(folder),
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except OSError as error:
            # Without a lock, the exclusive creation of claims still keeps two saves of one step apart
            # (`steps.claim_step`).
            if error.errno in _NO_LOCKS:
                return False
            raise
        else:
            return True


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():  # remove the link, not its target
        folder.unlink()
        return
    if not folder.is_dir():
        return
    # If the removal is interrupted, no reader takes the rest of the folder for a checkpoint.
    for name in CHECKPOINT_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically. Return False if the system or file system cannot."""
    call = _renameat2()
    if call is None:
        return False
    # With both paths absolute or relative to the working directory, as `AT_FDCWD` says.
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    # ENOSYS comes from an old kernel, EINVAL from a file system without the flag, EPERM from a container's filter of
    # system calls.
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


@cache
def _renameat2() -> Any:  # noqa: ANN401 - a C function
    if not sys.platform.startswith("linux"):
        return None
    # Python has no function for renameat2. glibc has it since version 2.28.
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call


class RemoteStorage:
    """Storage at a URL that fsspec can open."""

    remote = True
    """A second read of the same bytes costs as much as the first."""

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
        """See `Storage`. The file is durable when the service has accepted it."""
        target = self._full_path(path)
        written = 0
        with self._translate_errors(path):
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                with self._filesystem.open(target, "wb") as file:
                    for part in parts:
                        view = memoryview(part)
                        file.write(view)
                        written += view.nbytes
            except BaseException:
                # Closing the file in `with` may have uploaded the part that was written.
                self._discard(target)
                raise
        return written

    def create(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a whole file. Raises FileExistsError if it exists.

        Of two concurrent calls one succeeds, if the service supports conditional creation (S3, Google Cloud Storage,
        memory).
        """
        target, content = self._full_path(path), b"".join(bytes(part) for part in parts)
        with self._translate_errors(path):
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self._filesystem.pipe_file(target, content, mode="create")
            except (NotImplementedError, TypeError, ValueError):  # the service, or this version of fsspec, lacks it
                # fsspec caches listings; another process may have created the file since.
                self._filesystem.invalidate_cache(target)
                if self._filesystem.exists(target):
                    raise FileExistsError(errno.EEXIST, "File exists", f"{self.url}/{path}") from None
                self._filesystem.pipe_file(target, content)

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`. Uses one ranged request and one copy."""
        target = self._full_path(path)
        flat = as_bytes(into)
        with self._translate_errors(path):
            data = self._filesystem.cat_file(target, start=start, end=start + len(flat))
            flat[: len(data)] = data
        return len(data)

    def list(self, path: str = "") -> dict[str, int | None]:
        """See `Storage`."""
        folder = self._full_path(path)
        with self._translate_errors(path):
            try:
                # Other processes write into the folder.
                self._filesystem.invalidate_cache(folder)
                entries = self._filesystem.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        names = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries if entry["name"] != folder}
        return {name: None if entry["type"] == "directory" else entry["size"] for name, entry in names.items()}

    def move(self, source: str, target: str) -> None:
        """See `Storage`. Copies, then removes the source; an existing target is kept under `ASIDE` meanwhile.

        At any point of the sequence either the old or the new folder is complete with its seals, under its name or
        the old one.
        """
        existing = self.list(target)
        # A single file: object stores replace an object atomically.
        if not self._is_folder(source):
            with self._translate_errors(source):
                self._filesystem.cp_file(self._full_path(source), self._full_path(target))
            self.remove(source)
            return
        old_path = check_path(target) + ASIDE
        # The target is a complete checkpoint. It is copied to `old_path` before it loses its files, so that a reader
        # always finds one.
        if existing.keys() & set(CHECKPOINT_FILES):
            self.remove(old_path)
            self._copy_folder(target, old_path)
        self.remove(target)  # without a seal: an incomplete folder, whose complete copy may be at `old_path`
        # A crash in here leaves a target without a manifest. Readers then use the copy at `old_path`, if there was an
        # old checkpoint.
        self._copy_folder(source, target)
        self.remove(source)
        self.remove(old_path)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        if self._is_folder(path):
            self._remove_folder(path)
        else:
            with self._translate_errors(path):
                self._discard(self._full_path(path))

    def _remove_folder(self, path: str) -> None:
        # File by file: `rm` of fsspec takes a path with "*", "?" or "[" for a pattern of names, as `copy` does.
        entries = self.list(path)
        # First the files that make the folder a checkpoint. An interrupted removal then leaves a folder that no
        # reader accepts.
        for name in reversed(_seals_last(entries)):
            inner = f"{path}/{name}" if path else name
            if entries[name] is None:
                self._remove_folder(inner)
                continue
            with self._translate_errors(inner):
                self._discard(self._full_path(inner))
        with suppress(OSError, NotImplementedError):  # object stores have no empty folders
            self._filesystem.rmdir(self._full_path(path))

    def _copy_folder(self, source: str, target: str) -> None:
        entries = self.list(source)
        for name in _seals_last(entries):
            if entries[name] is None:
                self._copy_folder(f"{source}/{name}", f"{target}/{name}")
                continue
            with self._translate_errors(f"{source}/{name}"):
                self._filesystem.makedirs(self._full_path(target), exist_ok=True)
                self._filesystem.cp_file(self._full_path(f"{source}/{name}"), self._full_path(f"{target}/{name}"))

    def _is_folder(self, path: str) -> bool:
        with self._translate_errors(path):
            return bool(self._filesystem.isdir(self._full_path(path)))

    def _discard(self, target: str) -> None:
        try:
            self._filesystem.rm_file(target)
        except FileNotFoundError:
            pass  # it was never created

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}".rstrip("/")

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        """Convert an exception of the service's client to an OSError that names the path."""
        try:
            with add_filename(f"{self.url}/{path}"):
                yield
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{self.url}/{path}") from error


def _seals_last(names: Iterable[str]) -> list[str]:
    """Return the names in a folder in order, with `CHECKPOINT_FILES` last, and `manifest.json` last of all."""
    return sorted(names, key=lambda name: (name in CHECKPOINT_FILES, name == CHECKPOINT_FILES[0], name))
