"""Test the files of one save: the positions of their bytes, and that all descriptions of them agree."""

from __future__ import annotations

import io
import json
import zlib

import torch

from rankbook.checkpoint.format.dcp_metadata import read_metadata
from rankbook.checkpoint.format.manifest import PIECE, decode
from rankbook.checkpoint.saving import MEGATRON
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor
from tests.checkpoint.simulated import InMemory, save_ranks


def state(rank):
    rows = torch.arange(6.0).reshape(3, 2) + 10 * rank
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows.t().contiguous().t(), (0, rank, 2)),
        "copy": ShardedTensor.from_rank_offsets("copy", torch.arange(PIECE // 8 + 1) + rank, replica_id=rank),
        "rng": ShardedObject("rng", {"rank": rank}, (2,), (rank,)),
        "lr": 0.1,
    }


def saved():
    storage = InMemory()
    save_ranks([state(0), state(1)], storage, step=4)
    files = {name.removeprefix("step-4/"): data for name, data in storage.files.items() if name != "latest"}
    return files, decode(files["manifest.json"], "m")


def test_every_byte_is_in_one_blob_and_under_its_checksum():
    files, manifest = saved()
    assert files.keys() == {item.name for item in manifest.files} | {"manifest.json"}
    spans = {number: [] for number in range(len(manifest.files))}
    for stored in manifest.tensors.values():
        for chunk in stored.chunks:
            data = files[manifest.files[chunk.file].name]
            spans[chunk.file].append((chunk.start, chunk.length))
            chunk_bytes = data[chunk.data : chunk.data + chunk.nbytes]
            assert chunk.data % 64 == chunk.start % 64
            assert chunk.pieces == tuple(
                zlib.crc32(chunk_bytes[at : at + PIECE]) for at in range(0, len(chunk_bytes), PIECE)
            )
            around = data[chunk.start : chunk.data] + data[chunk.data + chunk.nbytes : chunk.start + chunk.length]
            assert chunk.envelope == zlib.crc32(around)
    for stored in manifest.objects.values():
        data = files[manifest.files[stored.file].name]
        spans[stored.file].append((stored.start, stored.length))
        assert stored.crc == zlib.crc32(data[stored.start : stored.start + stored.length])
    for number, file in enumerate(manifest.files):
        assert file.size == len(files[file.name])
        at = 0
        for start, length in sorted(spans[number]):
            assert start == at
            at += length
        assert at == (file.size if file.crc is None else 0)
        assert file.crc in (None, zlib.crc32(files[file.name]))


def test_manifest_records_the_main_replica_and_the_rank_that_wrote_it():
    files, manifest = saved()
    (copy,) = manifest.tensors["copy"].chunks
    assert (copy.rank, manifest.files[copy.file].name, len(copy.pieces)) == (0, "__0_0.distcp", 2)
    loaded = torch.load(io.BytesIO(files["__0_0.distcp"][copy.start : copy.start + copy.length]), weights_only=True)
    assert torch.equal(loaded, torch.arange(PIECE // 8 + 1))
    assert [(chunk.offset, chunk.rank) for chunk in manifest.tensors["rows"].chunks] == [((0, 0), 0), ((3, 0), 1)]
    assert manifest.objects["rng/shard_1_2"].rank == 1
    assert (manifest.world_size, manifest.step, manifest.torch) == (2, 4, torch.__version__)


def test_dcp_metadata_agrees_with_the_manifest():
    files, manifest = saved()
    described = read_metadata(files[".metadata"], ".metadata")
    assert described.objects == tuple(manifest.objects)
    for key, stored in manifest.tensors.items():
        assert (described.tensors[key].dtype, described.tensors[key].shape) == (stored.dtype, stored.shape)
        assert described.tensors[key].chunks == tuple((chunk.offset, chunk.shape) for chunk in stored.chunks)
        for chunk in stored.chunks:
            location = described.locations[key, chunk.offset]
            assert (location.file, location.start, location.length) == (
                manifest.files[chunk.file].name,
                chunk.start,
                chunk.length,
            )
    assert json.loads(files["metadata.json"]) == MEGATRON
    assert torch.load(io.BytesIO(files["common.pt"]), weights_only=True) == {"lr": 0.1}


def test_a_rank_that_stores_nothing_has_no_file():
    storage = InMemory()
    states = [{"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=rank)} for rank in range(3)]
    save_ranks(states, storage)
    assert [name for name in storage.files if name.endswith(".distcp")] == ["step-0/__0_0.distcp"]


def test_fully_parallel_save_divides_replicated_chunks():
    storage = InMemory()
    states = [
        {key: ShardedTensor.from_rank_offsets(key, torch.ones(100), replica_id=rank) for key in "abcd"}
        for rank in range(2)
    ]
    save_ranks(states, storage, fully_parallel=True)
    sizes = [len(data) for name, data in storage.files.items() if name.endswith(".distcp")]
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
