"""Test that the bytes of a stored chunk are those that `torch.save` writes."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch

from rankbook.checkpoint.format.manifest import ITEM_BYTES, combine_pieces, pieces
from rankbook.checkpoint.format.tensor_io import dtype_named, make_envelope, object_blob, raw_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so at its first use


def blob(tensor):
    around, data = make_envelope(tensor.dtype, tuple(tensor.shape)), raw_bytes(tensor)
    return around.before + bytes(data) + around.ending(combine_pieces(pieces(data), len(data))), len(around.before)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_chunk_of_every_dtype_is_a_zip_that_torch_loads(name, shape):
    dtype = dtype_named(name)
    count = torch.Size(shape).numel()
    data = torch.arange(count * dtype.itemsize, dtype=torch.uint8)
    tensor = (data % 2 if name == "bool" else data).view(dtype).reshape(shape)
    encoded, start = blob(tensor)
    loaded = torch.load(io.BytesIO(encoded), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert bytes(raw_bytes(loaded)) == bytes(raw_bytes(tensor))
    with zipfile.ZipFile(io.BytesIO(encoded)) as archive:
        assert archive.testzip() is None  # every member has the CRC-32 that it says
        (member,) = (item for item in archive.infolist() if item.filename == "archive/data/0")
    assert zlib.crc32(raw_bytes(tensor)) == member.CRC
    assert start % 64 == 0


def test_more_than_one_piece_has_the_checksum_of_all():
    tensor = torch.arange(700_000)
    encoded, _ = blob(tensor)
    assert len(pieces(raw_bytes(tensor))) == 6
    with zipfile.ZipFile(io.BytesIO(encoded)) as archive:
        assert archive.testzip() is None


def test_a_flipped_bit_of_the_data_is_found_by_the_zip():
    encoded, start = blob(torch.zeros(10))
    damaged = bytearray(encoded)
    damaged[start + 3] ^= 1
    with zipfile.ZipFile(io.BytesIO(damaged)) as archive:
        assert archive.testzip() == "archive/data/0"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12)[::3],
        torch.arange(4.0)[::2][:1],  # contiguous, and its only axis has the stride 2
        torch.arange(3.0).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.arange(3.0)),
        torch.empty(0, 3),
    ],
    ids=["transposed", "strided", "one element", "expanded", "conjugated", "negated", "parameter", "empty"],
)
def test_the_bytes_are_the_values_in_row_major_order(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert bytes(raw_bytes(tensor)) == plain.numpy().tobytes()


def test_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(4)
    view = raw_bytes(tensor)
    tensor.fill_(1)
    assert bytes(view) == torch.ones(4).numpy().tobytes()


def test_an_object_is_a_list_of_one():
    assert torch.load(io.BytesIO(object_blob({"a": 1})), weights_only=True) == [{"a": 1}]
