"""Crash-safe journal of a rank's output: files that outlive the process and are read by the notebook after its death.

A rank reads its pipes and hands the text to ZeroMQ, whose own thread writes it to the wire; text that has not left when
the process ends would be lost. So the kernel moves the text from the pipe into a file (`splice`, in one call, so that
at every moment it is in one of the two), and the rank sends the text that it reads back from the file.

There is one file per stream. It begins with a header (`_HEADER`) and is started again with every cell, and after
`_MAX_SIZE` bytes. The notebook knows how many bytes of the cell it has received, and takes the missing ones from the
end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from rankbook.protocol.forkserver import JournalTail

_STREAMS = ("stdout", "stderr")
_HEADER = struct.Struct("<qQ")  # the cell, and the number of bytes that it had sent before those in the file
_MAX_SIZE = 4 << 20
"""Size in bytes after which a file is truncated: its earlier content has long arrived."""


class OutputJournal:
    """The writing end, in the rank. It disables itself if a file cannot be written or the system has no `splice`."""

    def __init__(self, path: Path | None) -> None:
        # macOS has no `splice`. There, text that was read from the pipe and not sent is lost if the rank crashes.
        self._path = path if hasattr(os, "splice") else None
        self._files: dict[str, _File] = {}

    def transfer(self, pipe: int, stream: str, cell: int, most: int) -> bytes | None:
        """Read up to `most` bytes from `pipe`, which is readable, through the file. None: read by other means."""
        if self._path is None:
            return None
        try:
            file = self._files.get(stream)
            if file is None:
                file = self._files[stream] = _File(_stream_path(self._path, stream))
            return file.transfer(pipe, cell, most)
        # For example a full disk, or a file system that cannot splice. A splice that has failed has moved nothing, so
        # the text is still in the pipe.
        except OSError:
            self.end()
            self._path = None
            return None

    def end(self) -> None:
        """Truncate the files: the text that follows is not sent."""
        for file in self._files.values():
            if file.cell is not None:  # a flood calls this for every piece
                os.ftruncate(file.descriptor, 0)
                file.cell = None


class _File:
    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.cell: int | None = None
        self._size = 0
        self._total = 0

    def transfer(self, pipe: int, cell: int, most: int) -> bytes:
        # At the start of a cell, and after 4 MiB. The header then says how many bytes of the cell came before, so that
        # the count of bytes continues.
        if cell != self.cell or self._size > _MAX_SIZE:  # start the file again
            self._total = self._total if cell == self.cell else 0
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, _HEADER.pack(cell, self._total), 0)
            self.cell, self._size = cell, _HEADER.size
        # From the pipe to the file in the kernel: a process that is killed here has the text either in the pipe or in
        # the file, and both are read after its death.
        taken = os.splice(pipe, self.descriptor, most, offset_dst=self._size)
        # Read back for sending. The pages are still in the cache, so no disk is involved.
        data = os.pread(self.descriptor, taken, self._size)
        self._size += taken
        self._total += taken
        return data


def journal_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Return the common part of the file names for one incarnation of a rank; the stream's name is appended."""
    return folder / f"output-{rank}.{incarnation}"


def _stream_path(path: Path, stream: str) -> Path:
    return path.with_name(f"{path.name}.{stream}")


def crash_path(path: Path) -> Path:
    """Return the file to which the interpreter writes when it crashes (faulthandler)."""
    return _stream_path(path, "crash")


def read_crash(path: Path) -> str:
    """Read and remove the crash report; empty if none exists."""
    crash = crash_path(path)
    try:
        text = crash.read_text(errors="replace")
    except OSError:
        return ""
    crash.unlink(missing_ok=True)
    return text


def read_journal(path: Path) -> Iterator[JournalTail]:
    """Read and remove the journals of a dead rank."""
    for stream in _STREAMS:
        part = _stream_path(path, stream)
        try:
            content = part.read_bytes()
        except OSError:
            continue
        part.unlink(missing_ok=True)
        if len(content) > _HEADER.size:
            cell, before = _HEADER.unpack_from(content)
            tail = content[_HEADER.size :]
            yield JournalTail(cell, stream, before + len(tail), tail)
