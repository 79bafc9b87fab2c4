from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.format.manifest import PIECE, combine_checksums, combine_pieces, pieces


@settings(max_examples=60)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_two_parts_is_that_of_both(one, other):
    assert combine_checksums(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_checksum_of_a_chunk_is_combined_from_its_pieces(data, piece):
    assert combine_pieces(pieces(data, piece), len(data), piece) == zlib.crc32(data)


def test_a_chunk_has_one_checksum_for_every_piece_and_the_last_is_shorter():
    data = np.random.default_rng(0).integers(0, 256, 2 * PIECE + 5, dtype=np.uint8)
    data = memoryview(data)
    assert pieces(data) == tuple(
        zlib.crc32(part) for part in (data[:PIECE], data[PIECE : 2 * PIECE], data[2 * PIECE :])
    )
    assert combine_pieces(pieces(data), data.nbytes) == zlib.crc32(data)


def test_bytes_count_and_not_elements():
    data = memoryview(np.arange(10, dtype=np.float64))
    assert pieces(data, 32) == pieces(data.tobytes(), 32)
    assert len(pieces(data, 32)) == 3


def test_empty_data_has_no_checksums():
    assert pieces(b"") == ()
    assert pieces(memoryview(np.empty((0, 4)))) == ()
    assert combine_pieces((), 0) == zlib.crc32(b"") == 0


def test_combining_checksums_of_long_parts_takes_constant_time():
    one, other = zlib.crc32(b"a" * 17), zlib.crc32(bytes(1_000_000))
    assert combine_checksums(one, other, 1_000_000) == zlib.crc32(b"a" * 17 + bytes(1_000_000))
