"""Checksums of a chunk's bytes, piece by piece, and the whole's from its pieces'.

Owns: CRC-32, as zip files have it, and its arithmetic. Refuses: files, and to know what the bytes mean.

The checksum of a concatenation follows from those of its parts: to append n bytes multiplies a checksum, taken as a
polynomial over GF(2), by x^(8n) modulo the CRC's own (Mark Adler's `crc32_combine` in zlib does the same). So bytes
are read once for the pieces, and the zip's checksum of the whole chunk costs microseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no wheel for this processor
    _crc32 = zlib.crc32

Buffer = bytes | bytearray | memoryview

crc32: Callable[..., int] = _crc32
"""`zlib.crc32`, five times as fast where it can be: it is the greater part of what a checked save or load computes."""

PIECE = 1024 * 1024
"""Bytes under one checksum: a slice of a chunk is verified with at most two pieces more than it has itself."""

_POLYNOMIAL = 0xEDB88320  # bit 31 is x^0, as in all tables of the reflected CRC-32
_ONE = 0x80000000


def pieces(buffer: Buffer, piece: int = PIECE) -> tuple[int, ...]:
    """The CRC-32 of every `piece` bytes of a contiguous buffer, the last one shorter. Empty for an empty buffer."""
    flat = as_bytes(buffer)
    return tuple(crc32(flat[start : start + piece]) for start in range(0, len(flat), piece))


def as_bytes(buffer: Buffer) -> memoryview:
    """The same memory as a row of bytes. Python cannot cast an array that has an axis of size 0."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def combine_checksums(crc1: int, crc2: int, length2: int) -> int:
    """The CRC-32 of A + B from those of A and B; `length2` is the length of B in bytes."""
    return _times(_shift(length2), crc1) ^ crc2


def whole(crcs: Iterable[int], nbytes: int, piece: int = PIECE) -> int:
    """The CRC-32 of `nbytes` bytes from that of every `piece` bytes of them; 0, that of nothing, if there are none."""
    crc, left = 0, nbytes
    for each in crcs:
        length = min(left, piece)
        crc, left = combine_checksums(crc, each, length), left - length
    return crc


@lru_cache(maxsize=4096)  # one entry for whole pieces, one for each length of a last piece
def _shift(length: int) -> int:
    """x^(8·length), by squaring."""
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _times(power, square)
        square = _times(square, square)
        length >>= 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
