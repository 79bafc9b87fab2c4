"""Test reading stored chunks into tensors of any layout, and the verification of what is read."""

from __future__ import annotations

import pytest
import torch

from rankbook.checkpoint.format import tensor_io
from rankbook.checkpoint.format.manifest import PIECE, Chunk, pieces
from rankbook.checkpoint.format.tensor_io import ChunkDamage, data_matches, dtype_named, envelope_matches, read_into
from rankbook.checkpoint.load_plan import ChunkRead, ReadItem

START = 100


class File:
    """A chunk's data at byte 100 of a file; which bytes of it were read."""

    def __init__(self, tensor, **fields):
        data = tensor.numpy().tobytes()
        self.bytes = bytearray(START) + data
        self.reads = []
        defaults = {
            "offset": (0,) * tensor.ndim,
            "shape": tuple(tensor.shape),
            "file": 0,
            "start": 0,
            "length": len(self.bytes),
            "data": START,
            "nbytes": len(data),
            "pieces": pieces(data),
            "envelope": None,
            "rank": 3,
        }
        self.chunk = Chunk(**defaults | fields)
        self.itemsize, self.shape = tensor.element_size(), tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.strides = tensor.stride()

    def read(self, start, into):
        part = self.bytes[start : start + len(into)]
        into[: len(part)] = part
        self.reads.append((start, len(into)))
        return len(part)

    def into(self, target, source, *, check=True):
        """Fill `target` with the box of its shape that begins at `source`."""
        first = sum(at * step for at, step in zip(source, self.strides, strict=True))
        part = ReadItem(0, (0,) * target.ndim, source, tuple(target.shape), first)
        chunk = ChunkRead("w", "f", self.chunk, self.dtype, self.itemsize, self.strides, (part,))
        read_into(target, chunk, part, self.read, check)
        return target


TENSOR = torch.arange(3 * PIECE // 4, dtype=torch.int32).reshape(-1, 1024)  # three pieces


@pytest.mark.parametrize("check", [True, False])
def test_rows_are_read_directly_into_the_target(check):
    file = File(TENSOR)
    assert torch.equal(file.into(torch.zeros_like(TENSOR), (0, 0), check=check), TENSOR)
    assert file.reads == [(START, TENSOR.nbytes)]
    file.reads.clear()
    rows = file.into(torch.zeros(300, 1024, dtype=torch.int32), (250, 0), check=check)
    assert torch.equal(rows, TENSOR[250:550])
    if check:  # the first piece and the last are wanted in part, and read whole
        assert file.reads == [(START, PIECE), (START + PIECE, PIECE), (START + 2 * PIECE, PIECE)]
    else:
        assert file.reads == [(START + 250 * 4096, 300 * 4096)]


@pytest.mark.parametrize("slab", [tensor_io.SLAB_BYTES, PIECE, 5000])
def test_columns_come_in_slabs_of_any_size(slab, monkeypatch):
    monkeypatch.setattr(tensor_io, "SLAB_BYTES", slab)
    file = File(TENSOR)
    columns = file.into(torch.zeros(768, 10, dtype=torch.int32), (0, 700))
    assert torch.equal(columns, TENSOR[:, 700:710])
    turned = torch.zeros(10, 768, dtype=torch.int32).t()
    assert torch.equal(file.into(turned, (0, 700), check=False), TENSOR[:, 700:710])


def test_a_wrong_bit_in_any_piece_is_found_where_it_is_read_and_nowhere_else():
    file = File(TENSOR)
    file.bytes[START + PIECE + 5] ^= 1
    file.into(torch.zeros(256, 1024, dtype=torch.int32), (0, 0))
    file.into(torch.zeros(256, 1024, dtype=torch.int32), (512, 0))
    for target, source in (((400, 1024), (0, 0)), ((1, 1024), (300, 0)), ((768, 1), (0, 9))):
        with pytest.raises(
            ChunkDamage, match=f"bytes {PIECE} to {2 * PIECE - 1} of its data do not match their checksum"
        ):
            file.into(torch.zeros(target, dtype=torch.int32), source)
        file.into(torch.zeros(target, dtype=torch.int32), source, check=False)


def test_a_file_that_ends_too_early_is_found():
    file = File(TENSOR)
    del file.bytes[-1:]
    with pytest.raises(ChunkDamage, match=f"is truncated after {TENSOR.nbytes - 1} of {TENSOR.nbytes} bytes"):
        file.into(torch.zeros_like(TENSOR), (0, 0), check=False)


def test_a_cast_and_memory_with_gaps_are_filled_as_well():
    file = File(torch.arange(12.0).reshape(3, 4))
    assert file.into(torch.zeros(2, 4, dtype=torch.float64), (1, 0)).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    gaps = torch.zeros(3, 8)
    file.into(gaps[:, ::2], (0, 0))
    assert gaps.tolist()[1] == [4, 0, 5, 0, 6, 0, 7, 0]
    one = torch.zeros(4)
    file.into(one[::2][:1].reshape(1, 1), (2, 3))
    assert one.tolist() == [11, 0, 0, 0]


def test_an_unknown_dtype_is_reported():
    with pytest.raises(ChunkDamage, match="dtype float5, which this version of torch does not support"):
        dtype_named("float5")


def test_single_checksum_of_a_chunk_is_compared_in_slabs(monkeypatch):
    monkeypatch.setattr(tensor_io, "SLAB_BYTES", 1000)
    tensor = torch.arange(5000, dtype=torch.uint8)
    file = File(tensor, pieces=pieces(tensor.numpy().tobytes(), 5000))
    assert data_matches(file.chunk, file.read)
    assert max(length for _, length in file.reads) == 1000
    file.bytes[-1] ^= 1
    assert not data_matches(file.chunk, file.read)
    del file.bytes[-1:]
    assert not data_matches(file.chunk, file.read)


def test_bytes_around_the_data_are_verified():
    import zlib

    file = File(torch.zeros(3), envelope=zlib.crc32(bytes(START) + b"end"), length=START + 15)
    file.bytes += b"end"
    assert envelope_matches(file.chunk, file.read)
    file.bytes[7] ^= 4
    assert not envelope_matches(file.chunk, file.read)
