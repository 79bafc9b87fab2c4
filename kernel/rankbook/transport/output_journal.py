"""What a rank has sent of its output, in files that outlive it.

Owns: those files, which the rank writes and the notebook reads once the rank is dead. Refuses: to send anything.

A rank takes what was printed out of its pipes and hands it to ZeroMQ, whose own thread puts it on the wire. A process
that ends in between takes it along. So the system moves it from the pipe into a file (`splice`, in one call: there is
no moment at which it is in neither), and what is sent is read from there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STREAMS = ("stdout", "stderr")
_HEAD = struct.Struct("<qQ")  # the cell, and how many bytes of the stream it had sent before those of the file
_MOST = 4 << 20
"""Bytes after which a file begins anew: what went before them has long arrived."""


@dataclass(frozen=True)
class JournalTail:
    """The end of one stream of one cell: `total` bytes were taken in all, `tail` are the last of them."""

    cell: int
    stream: str
    total: int
    tail: bytes

    def missing(self, heard: int) -> bytes:
        """What has not come where `heard` bytes have."""
        lost = min(self.total - heard, len(self.tail))
        return self.tail[-lost:] if lost > 0 else b""


class OutputJournal:
    """The rank's end. Where a file cannot be written, in a full folder, or nothing spliced, it says so and ends."""

    def __init__(self, path: Path | None) -> None:
        self._path = path if hasattr(os, "splice") else None
        self._files: dict[str, _File] = {}

    def take(self, pipe: int, stream: str, cell: int, most: int) -> bytes | None:
        """Up to `most` bytes out of `pipe`, which has some, kept in the file too; None: read it by other means."""
        if self._path is None:
            return None
        try:
            file = self._files.get(stream)
            if file is None:
                file = self._files[stream] = _File(_part(self._path, stream))
            return file.take(pipe, cell, most)
        except OSError:
            self.end()
            self._path = None
            return None

    def end(self) -> None:
        """Forget what was taken: what follows is not sent."""
        for file in self._files.values():
            if file.cell is not None:  # a flood says so at each of its pieces
                os.ftruncate(file.descriptor, 0)
                file.cell = None


class _File:
    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.cell: int | None = None
        self._size = 0
        self._total = 0

    def take(self, pipe: int, cell: int, most: int) -> bytes:
        if cell != self.cell or self._size > _MOST:
            self._total = self._total if cell == self.cell else 0
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, _HEAD.pack(cell, self._total), 0)
            self.cell, self._size = cell, _HEAD.size
        taken = os.splice(pipe, self.descriptor, most, offset_dst=self._size)
        data = os.pread(self.descriptor, taken, self._size)
        self._size += taken
        self._total += taken
        return data


def journal_path(folder: Path, rank: int, incarnation: int) -> Path:
    """The files of one life of a rank, but for the stream's name behind it."""
    return folder / f"words-{rank}.{incarnation}"


def _part(path: Path, stream: str) -> Path:
    return path.with_name(f"{path.name}.{stream}")


def crash_path(path: Path) -> Path:
    """Where the interpreter writes as it crashes."""
    return _part(path, "crash")


def read_crash(path: Path) -> str:
    """What it wrote; the file is removed. Empty where there is none."""
    crash = crash_path(path)
    try:
        text = crash.read_text(errors="replace")
    except OSError:
        return ""
    crash.unlink(missing_ok=True)
    return text


def read_journal(path: Path) -> Iterator[JournalTail]:
    """What a rank that is dead has taken last; its files are removed. Nothing where there are none."""
    for stream in _STREAMS:
        part = _part(path, stream)
        try:
            content = part.read_bytes()
        except OSError:
            continue
        part.unlink(missing_ok=True)
        if len(content) > _HEAD.size:
            cell, before = _HEAD.unpack_from(content)
            tail = content[_HEAD.size :]
            yield JournalTail(cell, stream, before + len(tail), tail)
