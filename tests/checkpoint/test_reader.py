"""Test that all damage is found and named, and that files that are not needed are not read."""

from __future__ import annotations

import pytest
import torch

from rankbook.checkpoint.load_plan import plan_read
from rankbook.checkpoint.loading import MAX_LISTED, CheckpointRead, find_checkpoint
from rankbook.checkpoint.local_state import LoadRequest, LocalTensor
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor
from rankbook.errors import CheckpointError
from tests.checkpoint.simulated import InMemory, save_ranks

KEYS = [f"t{number}" for number in range(12)]


@pytest.fixture
def storage():
    memory = InMemory()
    state = {key: ShardedTensor.from_rank_offsets(key, torch.full((5,), float(at))) for at, key in enumerate(KEYS)}
    save_ranks([{**state, "o": ShardedObject("o", {"a": 1}, (1,), (0,)), "epoch": 3}], memory)
    return memory


def flip(storage, name, at):
    data = bytearray(storage.files[f"step-0/{name}"])
    data[at] ^= 8
    storage.files[f"step-0/{name}"] = bytes(data)


def fetched(storage, keys, **more):
    checkpoint = find_checkpoint(storage, "latest")
    tensors = [LocalTensor.of(ShardedTensor.from_rank_offsets(key, torch.zeros(5))) for key in keys]
    fetch = CheckpointRead(checkpoint, **{"verify": True} | more)
    fetch.read_tensors(
        plan_read([element.read_request() for element in tensors], checkpoint.manifest),
        tensors,
        fresh=range(len(tensors)),
    )
    return fetch, [item.data for item in tensors]


def test_error_counts_all_damage_and_names_the_first(storage):
    manifest = find_checkpoint(storage, "latest").manifest
    for key in KEYS[1:]:
        flip(storage, "__0_0.distcp", manifest.tensors[key].chunks[0].data + 1)
    fetch, (first, *_) = fetched(storage, KEYS)
    assert first.tolist() == [0] * 5
    assert len(fetch.damages) == 11
    with pytest.raises(CheckpointError, match=r"is damaged:\n.*'t1', the chunk at \(0,\) written by rank 0") as caught:
        fetch.raise_damage()
    assert str(caught.value).count("\n") == MAX_LISTED + 1
    assert str(caught.value).endswith("and 3 more")
    fetch, _ = fetched(storage, KEYS[:1])
    fetch.raise_damage()
    fetch, tensors = fetched(storage, KEYS, verify=False)
    fetch.raise_damage()
    assert tensors[0].tolist() == [0] * 5
    assert tensors[1].tolist() != [1] * 5


def test_objects_and_the_common_part_are_checked_before_they_are_unpickled(storage):
    checkpoint = find_checkpoint(storage, "latest")
    request = LoadRequest({"epoch": 0}, checkpoint.manifest)
    fetch = CheckpointRead(checkpoint, verify=True)
    assert fetch.read_objects(["o/shard_0_1", "unknown"]) == {"o/shard_0_1": {"a": 1}}
    assert fetch.read_common(request) == {"epoch": 3}
    flip(storage, "__0_0.distcp", checkpoint.manifest.objects["o/shard_0_1"].start + 70)
    flip(storage, "common.pt", 70)
    assert fetch.read_objects(["o/shard_0_1"]) == {}
    assert fetch.read_common(request) == {}
    assert [damage.split(":")[0] for damage in fetch.damages] == ["__0_0.distcp", "common.pt"]
    assert all("does not match its checksum" in item for item in fetch.damages)


def test_verify_checks_metadata_and_file_sizes(storage):
    flip(storage, ".metadata", 9)
    storage.files["step-0/__0_0.distcp"] += b"more"
    for verify, count in ((True, 2), (False, 0)):
        fetch = CheckpointRead(find_checkpoint(storage, "latest"), verify=verify)
        fetch.verify_small_files()
        assert len(fetch.damages) == count


def test_unfilled_chunk_is_zero_in_every_dtype():
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex128, torch.bfloat16):
        storage = InMemory()
        save_ranks([{"w": ShardedTensor.from_rank_offsets("w", torch.ones(2).to(dtype))}], storage)
        checkpoint = find_checkpoint(storage, "latest")
        entry = ShardedTensor.from_rank_offsets("w", torch.ones(4).to(dtype), allow_shape_mismatch=True)
        fetch = CheckpointRead(checkpoint, verify=True)
        fetch.read_tensors(
            plan_read([LocalTensor.of(entry).read_request()], checkpoint.manifest), [LocalTensor.of(entry)]
        )
        fetch.raise_damage()
        assert entry.data.to(torch.complex64).tolist() == [1, 1, 0, 0]
