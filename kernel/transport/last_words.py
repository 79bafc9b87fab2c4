"""What a rank has sent of its output, in a file that outlives it.

Owns: that file, which the rank writes and the notebook reads once the rank is dead. Refuses: to send anything.

A rank takes what was printed out of its pipes and hands it to ZeroMQ, whose own thread puts it on the wire. A process
that ends in between takes it along. So what was taken last is also written here, with its place in the cell's output.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STREAMS = ("stdout", "stderr")
_HEAD = struct.Struct("<qQ")  # the cell, and how many bytes of the stream it has sent
_ROOM = 1 << 20  # as much as a pipe holds, and so as much as is taken at once


@dataclass(frozen=True)
class Said:
    """The end of one stream of one cell: `total` bytes were sent in all, `tail` are the last of them."""

    cell: int
    stream: str
    total: int
    tail: bytes

    def missing(self, heard: int) -> bytes:
        """What has not come where `heard` bytes have."""
        lost = min(self.total - heard, len(self.tail))
        return self.tail[-lost:] if lost > 0 else b""


class LastWords:
    """The rank's end. A file that cannot be written, in a full folder, is given up: nothing else depends on it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._cells = dict.fromkeys(_STREAMS, 0)
        self._totals = dict.fromkeys(_STREAMS, 0)

    def note(self, cell: int, stream: str, data: bytes) -> None:
        """`data` is about to be sent."""
        if self._path is None:
            return
        try:
            self._write(self._path, cell, stream, data)
        except OSError:
            self._path = None
            if self._file is not None:
                os.ftruncate(self._file, 0)
                os.close(self._file)

    def _write(self, path: Path, cell: int, stream: str, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if self._cells[stream] != cell:
            self._cells[stream], self._totals[stream] = cell, 0
        place, end = _STREAMS.index(stream) * (_HEAD.size + _ROOM), self._totals[stream] + len(data)
        kept = data[-_ROOM:]
        start = (end - len(kept)) % _ROOM
        os.pwrite(self._file, kept[: _ROOM - start], place + _HEAD.size + start)
        if len(kept) > _ROOM - start:
            os.pwrite(self._file, kept[_ROOM - start :], place + _HEAD.size)
        os.pwrite(self._file, _HEAD.pack(cell, end), place)  # last: until then it does not count
        self._totals[stream] = end


def words_of(folder: Path, rank: int, incarnation: int) -> Path:
    """The file of one life of a rank."""
    return folder / f"words-{rank}.{incarnation}"


def take_last_words(file: Path) -> Iterator[Said]:
    """What a rank that is dead has sent last; the file is removed. Nothing where there is none."""
    try:
        content = file.read_bytes()
    except OSError:
        return
    file.unlink(missing_ok=True)
    for index, stream in enumerate(_STREAMS):
        part = content[index * (_HEAD.size + _ROOM) :][: _HEAD.size + _ROOM]
        if len(part) > _HEAD.size:
            cell, total = _HEAD.unpack_from(part)
            ring, end = part[_HEAD.size :], total % _ROOM
            tail = ring[end:] + ring[:end] if total > _ROOM else ring[:total]
            yield Said(cell, stream, total, tail)
