"""Compares bytes in files with their checksums, many at a time.

Owns: the order of the reads, their size, the threads. Refuses: to know what the bytes mean.

Both the reads and the checksums leave Python's lock, so threads share the work. Small neighbours come in one read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from rankbook.checkpoint.format.checksums import crc32
from rankbook.checkpoint.storage.base import Storage

WINDOW = 16 * 1024 * 1024
"""Bytes in one read, and in each thread's buffer."""

CHANGED = "do not match their checksum"
MISSING = "are missing: the file ends before"


@dataclass(frozen=True, slots=True)
class Blob:
    """What bytes belong to: [`start`, `start` + `length`) of a file, of a key, as `label` calls it."""

    file: str
    key: str
    rank: int
    start: int
    length: int
    label: str


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes whose CRC-32 is known: `spans` of (start, length), one after the other. `part` names them in the blob."""

    blob: Blob
    part: str
    spans: tuple[tuple[int, int], ...]
    crc: int

    @property
    def begin(self) -> int:
        """Where its first bytes are."""
        return min(start for start, _ in self.spans)

    @property
    def end(self) -> int:
        """Where its last bytes end."""
        return max(start + length for start, length in self.spans)


def run_checks(
    storage: Storage, prefix: str, checks: Sequence[Check], threads: int | None = None
) -> list[tuple[Check, str]]:
    """Those that fail, with the reason, in the order of files and bytes. `prefix` stands before the files' names."""
    kept = threading.local()

    def run(window: list[Check]) -> list[tuple[Check, str]]:
        if not hasattr(kept, "buffer"):
            kept.buffer = bytearray(largest)
        path = prefix + window[0].blob.file
        try:
            with memoryview(kept.buffer) as buffer:
                if window[0].end - window[0].begin > WINDOW:
                    return [found for check in window for found in _in_steps(storage, path, check, buffer)]
                return list(_in_one_read(storage, path, window, buffer))
        except OSError as error:
            return [(check, f"cannot be read: {error.strerror or error}") for check in window]

    windows = list(_windows(checks))
    extents = (max(check.end for check in window) - window[0].begin for window in windows)
    largest = min(max(extents, default=0), WINDOW)
    with ThreadPoolExecutor(max_workers=threads or min(4, os.cpu_count() or 1)) as pool:
        return [found for each in pool.map(run, windows) for found in each]


def _windows(checks: Sequence[Check]) -> Iterator[list[Check]]:
    """Neighbours that fit into one read together; those that do not fit alone are alone."""
    ordered = sorted(checks, key=lambda check: (check.blob.file, check.begin))
    for _, of_file in groupby(ordered, key=lambda check: check.blob.file):
        window: list[Check] = []
        furthest = 0
        for check in of_file:
            furthest = max(furthest, check.end)
            if window and furthest - window[0].begin > WINDOW:
                yield window
                window, furthest = [], check.end
            window.append(check)
        if window:
            yield window


def _in_one_read(storage: Storage, path: str, window: list[Check], buffer: memoryview) -> Iterator[tuple[Check, str]]:
    begin = window[0].begin
    count = storage.read(path, begin, buffer[: max(check.end for check in window) - begin])
    for check in window:
        if check.end > begin + count:
            yield check, MISSING
            continue
        crc = 0
        for start, length in check.spans:
            crc = crc32(buffer[start - begin : start - begin + length], crc)
        if crc != check.crc:
            yield check, CHANGED


def _in_steps(storage: Storage, path: str, check: Check, buffer: memoryview) -> Iterator[tuple[Check, str]]:
    crc = 0
    for start, length in check.spans:
        for at in range(start, start + length, len(buffer)):
            wanted = min(len(buffer), start + length - at)
            if storage.read(path, at, buffer[:wanted]) < wanted:
                yield check, MISSING
                return
            crc = crc32(buffer[:wanted], crc)
    if crc != check.crc:
        yield check, CHANGED
