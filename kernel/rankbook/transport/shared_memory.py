"""Shared memory files, through which large buffers cross between processes of one host.

A segment is a file in the cluster's private folder. One process writes it once, and it never changes. Until it is
complete it has another name: what a process that died has left unfinished is known by it. A reader maps a segment
privately: arrays and tensors in the mapping can be changed in place, because the operating system copies the pages that
are written to, and no other reader or forked child sees the change. A mapping outlives its file, so a segment is
removed as soon as all receivers have mapped it; the memory is freed with the last value that rests on it.

`ensure_private_folder` creates the folder again if a cleaner of temporary files has removed it.

`SegmentSender` cuts the segments for one peer on another host into parts, and `SegmentReceiver` puts those of one peer
together. Both ends of a link have both, and neither sends anything itself: the caller takes the next part whenever the
link has sent most of what it was given. So a transfer can be given up in the middle, several advance at the same time,
and both ends know how far they are.

A transfer can fail at either end: the sender's segment was removed (`SegmentFailed`), or the receiver has no room for
it (`SegmentRefused`, upon which the sender stops). Either way the receiver stores the reason in place of the segment. A
message that refers to the segment is delivered, and who reads the value gets the reason as an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path

from rankbook.errors import ProtocolError, TransferError
from rankbook.formatting import format_bytes
from rankbook.protocol.forkserver import SegmentFailed, SegmentPart, SegmentRefused

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class DeferredBytes:
    """`size` bytes that `fetch` copies from another device when they are written, and not before."""

    size: int
    fetch: Callable[[], memoryview]

    def __len__(self) -> int:
        return self.size


Pieces = Sequence[Bytes | DeferredBytes]
"""A buffer, as pieces to concatenate."""


def present_bytes(piece: Bytes | DeferredBytes) -> Bytes:
    """Return the bytes of a piece, which may have to be fetched."""
    return piece.fetch() if isinstance(piece, DeferredBytes) else piece


MOST_IN_FRAMES = 64 << 20
"""Bytes that may cross to another host in the frames of a message, where every later message waits for them."""

_NAME = re.compile(r"segment-([0-9]+)-[0-9a-f]{16}")
_FAILURE = "failed-"
_UNFINISHED = "writing-"
_ALIGNMENT = 64  # bytes: a cache line, and torch's own alignment
_WRITE_AT_ONCE = 16 << 20  # bytes; an interrupt is handled between two writes
_HUGE_PAGE = 2 << 20  # bytes, on x86-64 and, with pages of 4 KiB, on ARM; any other size is refused by the system
_WORTH_HUGE_PAGES = 8 * _HUGE_PAGE  # bytes; `madvise` takes some 0.1 ms at least
_COLLAPSE_AT_ONCE = 32 * _HUGE_PAGE
_WORTH_A_THREAD = 16 << 20  # bytes, to free which takes 2 ms
_MADV_COLLAPSE = 25  # Linux 6.1; Python's `mmap` module lacks it
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_INVALID_FILE = {errno.ELOOP, errno.EMLINK, errno.ENXIO}  # a symbolic link (EMLINK on BSD), a socket
_MAP_FIXED = 0x10  # on Linux and macOS; Python's `mmap` module lacks it

# `mmap` of the C library, because Python's always makes a new mapping and keeps a descriptor, see `_map`.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Segment:
    """A shared memory file: its name, the offsets of its buffers, and its size in bytes."""

    name: str
    offsets: tuple[int, ...]
    size: int


class SegmentStore:
    """The segments in `folder`. Values below `least` bytes are not worth a file.

    Every process of a cluster has a store for the same folder, which only its owner can enter. Any thread may use it.
    `most_in_frames` is the size up to which a value may travel in frames where there is no room for a file.
    """

    def __init__(self, folder: Path, *, least: int = 64 << 10, most_in_frames: int | None = None) -> None:
        self.folder = folder
        self.least = least
        self.arriving: list[Mapping[str, Transfer]] = []
        """What other hosts are sending, by name: the `transfers` of the receivers that write into this folder."""
        self._most_in_frames = most_in_frames
        self._existed = folder.exists()
        # Threads that free the memory of removed segments.
        self._freeing: list[threading.Thread] = []

    def write(self, buffers: Sequence[Pieces]) -> Segment | None:
        """Write one file with `buffers`, given as lists of pieces to concatenate.

        Returns None if the file would take more than half of the free space, or does not fit. Half, because torch's
        DataLoader workers and NCCL use the same memory and die when it is full. Raises `TransferError` for any other
        error, and for a value without room that is larger than `most_in_frames`. No file is left behind on failure.
        """
        # Written, not copied into a mapping, except where the file has huge pages, see `_huge_pages`. Median rates for
        # 200 MB into tmpfs, in MB/s: pwrite 1,700; pwrite after posix_fallocate 1,500; copy into a mapping 1,000, no
        # better if it is populated or by two threads, because every page is faulted in. And a write fails with ENOSPC
        # where a mapping gets SIGBUS.
        offsets, size = _buffer_offsets(buffers)
        name = f"segment-{getpid()}-{secrets.token_hex(8)}"
        unfinished = self.folder / f"{_UNFINISHED}{name}"
        try:
            # Only if it was there once: a store for a folder that never existed is a mistake, and writing reports it.
            if self._existed and not self.folder.exists():  # it was removed under the cluster
                ensure_private_folder(self.folder)
            # The check comes before the write, so that a value that is too large is not written in vain. Another
            # process may fill the rest meanwhile; then the write fails.
            if size > _free_bytes(self.folder) // 2:
                self._check_frames(size)
                return None
            with _remove_on_error(unfinished):
                _write_file(unfinished, buffers, offsets, size)
                unfinished.rename(self.folder / name)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._check_frames(size)
                return None
            raise TransferError(f"cannot write shared memory in {self.folder}: {error.strerror or error}") from error
        return Segment(name, offsets, size)

    def write_part(self, name: str, offset: int, size: int, data: Bytes, *, reserved: int = 0) -> None:
        """Write bytes of a segment that comes in parts, in order, from another host.

        The first part reserves no space, but counts the bytes that are `reserved` for other segments. `TransferError`
        is raised when there is no more room, and the file is removed. Raises `ProtocolError` for an invalid name, or a
        part beyond the segment's `size`.
        """
        path = self._path(name)
        if not 0 <= offset <= offset + len(data) <= size:
            raise ProtocolError(f"invalid part of {name}: {len(data)} bytes at {offset} of {size}")
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if offset == 0 else 0)
        try:
            if offset == 0 and size > (_free_bytes(self.folder) - reserved) // 2:
                while self._freeing:  # what was removed must not count as taken
                    self._freeing.pop().join()
                if size > (_free_bytes(self.folder) - reserved) // 2:
                    raise TransferError(self._no_room(size))
            file = os.open(path, flags, 0o600)
            try:
                # Not on huge pages: `madvise` waits for a kernel thread of every core, which halved the rate of a
                # transfer beside other jobs.
                with _remove_on_error(path):
                    _write_at(file, data, offset)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise TransferError(self._no_room(size)) from error
            raise TransferError(f"cannot receive {name} in {self.folder}: {error.strerror or error}") from error

    def write_failure(self, name: str, reason: str) -> None:
        """Store why the segment `name` does not exist, for those who read it."""
        self._path(name)  # rejects an invalid name
        # Without room even for this text, the reader learns only that there is no segment.
        with contextlib.suppress(OSError):
            self._failure_path(name).write_text(reason, encoding="utf-8", errors="replace")

    def read(self, name: str, *, unlink: bool = False) -> memoryview:
        """Map the segment `name` and return its bytes, which may be changed without any other process seeing it.

        `unlink` removes the file; the memory stays until the last value that rests on it is freed. Raises
        `ProtocolError` for an invalid name or file, and `TransferError` if the segment is gone or cannot be mapped.
        """
        path = self._path(name)
        try:
            # No symbolic links, and no waiting for a pipe: the name came from a peer.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise TransferError(self._take_failure(name, unlink=unlink)) from error
        except OSError as error:
            if error.errno in _INVALID_FILE:
                raise ProtocolError(f"{name} is not a shared memory file: {error.strerror}") from error
            raise TransferError(f"cannot open shared memory in {self.folder}: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ProtocolError(f"{name} is not a regular file owned by this user")
            # Removed before it is mapped: the open descriptor keeps it. If the mapping fails, nobody could read the
            # value anyway.
            if unlink:
                path.unlink(missing_ok=True)
            return _map(file, status.st_size) if status.st_size else memoryview(bytearray())
        except OSError as error:
            raise TransferError(f"cannot map {name} into memory: {error.strerror}") from error
        finally:
            os.close(file)

    def discard(self, name: str, *, wait: bool = True) -> None:
        """Remove the segment `name`, if it exists. Raises `ProtocolError` for an invalid name.

        Without `wait`, another thread frees the memory of a large one, which takes 0.1 s for a gigabyte of small pages.
        """
        path = self._path(name)
        # The memory is freed with the last descriptor.
        file = None if wait else _open_large(path)
        path.unlink(missing_ok=True)
        self._failure_path(name).unlink(missing_ok=True)
        if file is not None:
            thread = threading.Thread(target=_free_later, args=(file,), name="rankbook-free", daemon=True)
            self._freeing = [thread, *(freeing for freeing in self._freeing if freeing.is_alive())]
            thread.start()

    def clear(self, pid: int | None = None, keep: Collection[str] = ()) -> None:
        """Remove all segments, or those of the dead process `pid`, except those named in `keep`."""
        with contextlib.suppress(FileNotFoundError):  # the folder has been removed
            for path in list(self.folder.iterdir()):
                name = path.name.removeprefix(_FAILURE).removeprefix(_UNFINISHED)
                match = _NAME.fullmatch(name)
                if match is not None and pid in {None, int(match[1])} and name not in keep:
                    path.unlink(missing_ok=True)

    def clear_unfinished(self, pid: int) -> None:
        """Remove what the dead process `pid` was writing. Its complete segments may still be read."""
        for path in list(self.folder.glob(f"{_UNFINISHED}segment-{pid}-*")):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:  # a peer sent the name: accept only a file name that this class generates
            raise ProtocolError(f"{name!r} is not the name of a shared memory file")
        return self.folder / name

    def _failure_path(self, name: str) -> Path:
        return self.folder / f"{_FAILURE}{name}"

    def _take_failure(self, name: str, *, unlink: bool) -> str:
        path = self._failure_path(name)
        try:
            reason = path.read_text(encoding="utf-8")
        except OSError:
            return f"the value no longer exists: {name} was removed before it was read"
        if unlink:
            path.unlink(missing_ok=True)
        return reason

    def _check_frames(self, size: int) -> None:
        """Raise `TransferError` if a value that has no room here is too large for frames."""
        if self._most_in_frames is not None and size > self._most_in_frames:
            raise TransferError(self._no_room(size))

    def _no_room(self, size: int) -> str:
        with contextlib.suppress(OSError):
            return (
                f"a value of {format_bytes(size)} does not fit into the shared memory of {platform.node()}:"
                f" {format_bytes(_free_bytes(self.folder))} are free in {self.folder}, and a value may take half of"
                " that; send it in smaller parts, or make /dev/shm larger there (in a container with --shm-size)"
            )
        return f"a value of {format_bytes(size)} does not fit into {self.folder}, which does not exist any more"


def _buffer_offsets(buffers: Sequence[Pieces]) -> tuple[tuple[int, ...], int]:
    offsets, end = [], 0
    for pieces in buffers:
        # Rounded up, so that every buffer is aligned like memory that torch has allocated.
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + sum(map(len, pieces))
    return tuple(offsets), end


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def _remove_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write_file(path: Path, buffers: Sequence[Pieces], offsets: Sequence[int], size: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        memory = _huge_pages(file, size) if size >= _WORTH_HUGE_PAGES else memoryview(b"")
        for pieces, offset in zip(buffers, offsets, strict=True):
            position = offset
            for piece in pieces:
                data = present_bytes(piece)
                copied = _copy(data, memory, position)
                _write_at(file, memoryview(data)[copied:], position + copied)
                position += len(piece)
                del data  # before the next piece is fetched
    finally:
        os.close(file)


def _huge_pages(file: int, size: int) -> memoryview:
    """Put the start of a new file on huge pages, as far as the system has any, and return the memory of that part.

    The file system would take pages of 4 KiB, and most of the time of a large write is spent on their allocation, and
    later on their release. For 1 GiB, with the release: 0.49 s by `pwrite`, and 0.11 s in this way. Whatever the system
    refuses (an old kernel, a container, fragmented memory) is left to `pwrite`.
    """
    end = size // _HUGE_PAGE * _HUGE_PAGE
    os.ftruncate(file, size)
    # Huge pages are made from what is in the file already, and a range with nothing in it is refused.
    for position in range(0, end, _HUGE_PAGE):
        os.pwrite(file, b"\0", position)
    memory = _map(file, end, shared=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for position in range(0, end, _COLLAPSE_AT_ONCE):
        length = min(_COLLAPSE_AT_ONCE, end - position)
        if _libc.madvise(address + position, length, _MADV_COLLAPSE) != 0:
            return memory[:position]
    # All of this memory exists by now: writing to it cannot fail for want of room.
    return memory


def _copy(data: Bytes, memory: memoryview, position: int) -> int:
    """Copy `data` to `position` in `memory`, as far as it reaches, and return the number of bytes copied."""
    view = memoryview(data)
    size = min(len(view), max(0, len(memory) - position))
    if not size:
        return 0
    # An assignment to a slice would hold the GIL, and with it up the threads that handle messages. numpy releases it.
    # It is imported here, because a notebook without large values does not need it.
    import numpy as np

    source, target = np.frombuffer(view, np.uint8), np.frombuffer(memory, np.uint8)
    for start in range(0, size, _WRITE_AT_ONCE):
        stop = min(start + _WRITE_AT_ONCE, size)
        target[position + start : position + stop] = source[start:stop]
    return size


def _write_at(file: int, data: Bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        # `pwrite` may write less than it is given.
        written = os.pwrite(file, view[:_WRITE_AT_ONCE], position)
        position += written
        view = view[written:]


def _free_later(file: int) -> None:
    os.close(file)


def _open_large(path: Path) -> int | None:
    """Return a descriptor of the file if it is so large that its removal takes time, else None."""
    with contextlib.suppress(OSError):
        if path.lstat().st_size >= _WORTH_A_THREAD:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    return None


def _map(file: int, size: int, *, shared: bool = False) -> memoryview:
    """Map the file, privately unless `shared`, without keeping a file descriptor.

    `mmap.mmap(file, …)` keeps a duplicate of the descriptor for as long as the mapping lives, that is one per received
    value, and a process may have no more than 1,024. So the object is given anonymous memory, over which the file is
    mapped. From Python 3.13 on `trackfd=False` does the same.

    The mapping is not populated: populating a writable private mapping copies all of it.
    """
    # The anonymous mapping reserves the addresses, and the object unmaps them when it is freed. MAP_FIXED replaces its
    # pages by those of the file. A huge page of the file can only be mapped at a multiple of its size.
    alignment = _HUGE_PAGE if size >= _HUGE_PAGE else mmap.PAGESIZE
    memory = mmap.mmap(-1, size + alignment - mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % alignment
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    # The descriptor may be closed after this: the mapping keeps the file.
    if _libc.mmap(address, size, protection, kind | _MAP_FIXED, file, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memoryview(memory)[start : start + size]


def ensure_private_folder(folder: Path) -> None:
    """Create `folder` with mode 0700 if it does not exist.

    Raises PermissionError if the existing one is open to other users, and OSError if it cannot be created.
    """
    # `mkdir` and not a test before it: between a test and the creation, another user could put a folder or a link
    # there.
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"expected {folder} to be a folder of this user with mode 0700") from None


PART_SIZE = 1 << 20
"""Bytes of a segment in one `SegmentPart`."""
AHEAD = 8 << 20
"""Bytes that the link should have been given at any time: more than its window, so that it never waits for a part."""


@dataclass
class Transfer:
    """A segment on the way, of which `done` of `size` bytes were sent or received. `began` is a monotonic time."""

    size: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)


class SegmentSender:
    """Segments of `store` on the way to one peer.

    Their parts are taken in turn, so that no segment waits for a larger one.
    """

    def __init__(self, store: SegmentStore) -> None:
        self.transfers: dict[str, Transfer] = {}
        self._store = store
        self._contents: dict[str, memoryview] = {}
        self._turns: deque[str] = deque()

    def add(self, name: str, *, unlink: bool = False) -> SegmentFailed | None:
        """Begin to send a segment; `unlink` removes its file. Return the message for the peer if that is impossible."""
        try:
            content = self._store.read(name, unlink=unlink)
        except (TransferError, ProtocolError) as error:
            return SegmentFailed(name, str(error))
        self._contents[name] = content
        self.transfers[name] = Transfer(len(content))
        self._turns.append(name)
        return None

    def next_part(self) -> tuple[SegmentPart, memoryview] | None:
        """Return the next part with its bytes, which are not copied; None if nothing is left."""
        if not self._turns:
            return None
        name = self._turns.popleft()
        transfer, offset = self.transfers[name], self.transfers[name].done
        data = self._contents[name][offset : offset + PART_SIZE]
        transfer.done += len(data)
        if transfer.done < transfer.size:
            self._turns.append(name)
        else:
            self.cancel(name)
        return SegmentPart(name, offset, transfer.size), data

    def cancel(self, name: str) -> None:
        """Send no more of a segment."""
        if self._contents.pop(name, None) is not None:
            del self.transfers[name]
        if name in self._turns:
            self._turns.remove(name)


class SegmentReceiver:
    """Segments that one peer sends, and that are put together in `store`.

    `settled` holds the names of those that have arrived or failed, until they are dropped.
    """

    def __init__(self, store: SegmentStore) -> None:
        self.settled: set[str] = set()
        self.transfers: dict[str, Transfer] = {}
        self._store = store
        store.arriving.append(self.transfers)
        # The sender answers a refusal, so that it is known when no more parts can come.
        self._refused: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Return the names of all segments that have arrived, in part at least."""
        return self.settled | self.transfers.keys()

    def receive(self, part: SegmentPart, data: Bytes) -> SegmentRefused | None:
        """Store a part. Return the message for the peer if there is no room for the segment.

        Raises `ProtocolError` for a part that is not the next one of its segment.
        """
        name, offset, size = part.name, part.offset, part.size
        if name in self._refused:
            return None
        transfer = self.transfers.get(name, Transfer(size))
        if (offset, size) != (transfer.done, transfer.size) or name in self.settled:
            raise ProtocolError(f"invalid part of {name}: bytes from {offset} of {size}")
        arriving = (other for transfers in self._store.arriving for other in transfers.values())
        others = sum(other.size - other.done for other in arriving if other is not transfer)
        try:
            self._store.write_part(name, offset, size, data, reserved=others)
        except TransferError as error:
            self._refused.add(name)
            self._settle(name)
            self._store.write_failure(name, str(error))
            return SegmentRefused(name)
        transfer.done += len(data)
        self.transfers[name] = transfer
        if transfer.done == size:
            self._settle(name)
        return None

    def fail(self, name: str, reason: str) -> None:
        """Handle the end of a segment of which no more will come: whoever reads it gets `reason` as an error."""
        if name in self._refused:
            self._refused.remove(name)
        else:
            if name in self.transfers:
                self._store.discard(name)
            self._settle(name)
            self._store.write_failure(name, reason)

    def drop(self, names: Iterable[str]) -> None:
        """Remove segments, whether they have arrived or not. The sender sends no more of them."""
        for name in names:
            self._store.discard(name, wait=False)
            self.transfers.pop(name, None)
            self.settled.discard(name)
            self._refused.discard(name)

    def give_up(self, name: str) -> SegmentRefused | None:
        """Remove a segment that nobody will read, and ignore what still comes of it.

        Return the message for the peer if it may still send some.
        """
        was_refused, is_complete = name in self._refused, name in self.settled
        self.drop((name,))
        if not is_complete or was_refused:  # until the sender has answered
            self._refused.add(name)
        return None if is_complete else SegmentRefused(name)

    def close(self) -> None:
        """Remove what has arrived in part: the rest will not come."""
        self.drop(tuple(self.transfers))
        # By identity: empty tables are equal.
        self._store.arriving = [table for table in self._store.arriving if table is not self.transfers]

    def _settle(self, name: str) -> None:
        self.transfers.pop(name, None)
        self.settled.add(name)
