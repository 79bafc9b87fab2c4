from __future__ import annotations

import json
import random
import zlib

import pytest

from rankbook.checkpoint.format.manifest import (
    PIECE,
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
    decode,
    encode,
    now,
    piece_bytes,
)
from rankbook.errors import CheckpointError

CREATED = now()


def chunk(**fields):
    defaults = {
        "offset": (4, 0),
        "shape": (4, 8),
        "file": 0,
        "start": 100,
        "length": 700,
        "data": 320,
        "nbytes": 128,
        "pieces": (7,),
        "envelope": 9,
        "rank": 1,
    }
    return Chunk(**defaults | fields)


def manifest(**fields):
    defaults = {
        "step": 40,
        "world_size": 2,
        "tensors": {"model.w": StoredTensor("float32", (8, 8), (chunk(), chunk(offset=(0, 0), rank=0)))},
        "objects": {"rng/shard_0_2": StoredObject(0, 800, 100, 5, 0)},
        "files": (StoredFile("__RANK_0.distcp", 900, None, 0), StoredFile("common.pt", 20, 3, 0)),
        "metadata": {"loss": 0.5, "names": ["a", "ü"]},
        "created": CREATED,
    }
    return Manifest(**defaults | fields)


def test_manifest_survives_a_round_trip():
    assert decode(encode(manifest()), "m") == manifest()
    assert manifest().nbytes == 920


def test_manifest_is_valid_json():
    read = json.loads(encode(manifest()))
    assert read["tensors"]["model.w"]["chunks"][0]["offset"] == [4, 0]
    assert set(read) == {*Manifest.__struct_fields__, "crc32"}


def test_contiguous_chunk_is_encoded_without_strides():
    chunks = (chunk(), chunk(offset=(0, 0), strides=(1, 4)))
    original = manifest(tensors={"model.w": StoredTensor("float32", (8, 8), chunks)})
    in_order, other = json.loads(encode(original))["tensors"]["model.w"]["chunks"]
    assert "strides" not in in_order
    assert other["strides"] == [1, 4]
    assert decode(encode(original), "m") == original


def test_every_flipped_bit_is_found():
    data = encode(manifest())
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match=r"run/manifest\.json"):
            decode(bytes(damaged), "run/manifest.json")


def test_every_truncation_and_every_addition_is_found():
    data = encode(manifest())
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"run/manifest\.json"):
            decode(data[:length], "run/manifest.json")
    generator = random.Random(0)
    for _ in range(50):
        with pytest.raises(CheckpointError, match=r"run/manifest\.json"):
            decode(data + generator.randbytes(generator.randint(1, 30)), "run/manifest.json")


def test_a_newer_format_and_an_unknown_field_are_refused():
    with pytest.raises(CheckpointError, match=r"m: .*format 2, but this version reads format 1.*newer Rankbook"):
        decode(encode(manifest(format=2)), "m")
    body = encode(manifest())[:1] + b'"surprise":1,' + encode(manifest())[1:-21]
    with pytest.raises(CheckpointError, match=r"m: not a manifest: .*surprise"):
        decode(body + b'"crc32":"%08x"}\n' % zlib.crc32(body), "m")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"loss": float("nan")}, r"metadata\['loss'\] is nan"),
        ({"a": [{"b": object()}]}, r"metadata\['a'\]\[0\]\['b'\] is of type object"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1"),
        ({"a": 2**64}, "64 bits"),
        ({"a": "\ud800"}, "cannot be written"),
    ],
)
def test_metadata_that_json_would_change_is_refused(metadata, message):
    with pytest.raises(CheckpointError, match=message):
        encode(manifest(metadata=metadata))


def test_large_chunk_may_have_one_checksum_or_one_per_piece():
    foreign = chunk(nbytes=2 * PIECE + 10, pieces=(1,))
    assert piece_bytes(foreign) == 2 * PIECE + 10
    assert piece_bytes(chunk(nbytes=2 * PIECE + 10, pieces=(1, 2, 3))) == PIECE
    assert piece_bytes(chunk(pieces=())) == PIECE
