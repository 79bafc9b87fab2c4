"""CRC-32 checksums of a chunk's pieces, and of the whole chunk from those of its pieces.

CRC-32 is the checksum of the zip format. The checksum of a concatenation follows from those of its parts: appending n
bytes multiplies a checksum, taken as a polynomial over GF(2), by x^(8n) modulo the CRC polynomial (the method of Mark
Adler's `crc32_combine` in zlib). So the bytes are read once, for the pieces, and the zip's checksum of the whole chunk
costs microseconds more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # isal has no wheel for this processor
    _crc32 = zlib.crc32

Buffer = bytes | bytearray | memoryview

crc32: Callable[..., int] = _crc32
"""`zlib.crc32`, or isal's, which is five times as fast: CRC-32 dominates the CPU time of a checked save or load."""

PIECE = 1024 * 1024
"""Bytes under one checksum. Verifying a slice of a chunk reads at most two pieces more than the slice itself."""

_POLYNOMIAL = 0xEDB88320  # bit-reversed: bit 31 is the coefficient of x^0
_ONE = 0x80000000


def pieces(buffer: Buffer, piece: int = PIECE) -> tuple[int, ...]:
    """Return the CRC-32 of every `piece` bytes of a contiguous buffer; the last piece may be shorter."""
    flat = as_bytes(buffer)
    return tuple(crc32(flat[start : start + piece]) for start in range(0, len(flat), piece))


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the same memory as a one-dimensional view of bytes.

    An empty buffer is handled apart: `memoryview.cast` rejects an array that has an axis of size 0.
    """
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def combine_checksums(crc1: int, crc2: int, length2: int) -> int:
    """Return the CRC-32 of A + B, given those of A and B and the length of B in bytes."""
    return _multiply(_shift(length2), crc1) ^ crc2


def combine_pieces(crcs: Iterable[int], nbytes: int, piece: int = PIECE) -> int:
    """Return the CRC-32 of `nbytes` bytes, given that of every `piece` bytes; 0 if there are none."""
    # Example with pieces of 4 bytes and 10 bytes of data: three checksums, of 4, 4 and 2 bytes. The first step combines
    # the checksum of nothing (0) with the first one, and so on; the length of the right part is what the shift needs.
    crc, remaining = 0, nbytes
    for piece_crc in crcs:
        length = min(remaining, piece)
        crc, remaining = combine_checksums(crc, piece_crc, length), remaining - length
    return crc


@lru_cache(maxsize=4096)  # one entry for whole pieces, one per length of a last piece
def _shift(length: int) -> int:
    """Return x^(8 * length) modulo the CRC polynomial, by repeated squaring."""
    # `_ONE >> 8` is x^8: in the bit-reversed form a shift to the right multiplies by x.
    # About 2 * log2(length) multiplications of 32 steps. The cache makes the shift of a whole piece free.
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    # Multiply two polynomials over GF(2) modulo the CRC polynomial: shift and add (XOR), and reduce at every step.
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
