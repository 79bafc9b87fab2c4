"""Test what one rank holds and requests, before anything is written or read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rankbook.checkpoint.format.manifest import Manifest, StoredObject, StoredTensor
from rankbook.checkpoint.local_state import (
    LoadRequest,
    LocalObject,
    LocalTensor,
    local_state_of,
    request_everything,
    state_digests,
)
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor


def test_a_shard_is_seen_with_all_axes_of_its_global_tensor():
    tensor = LocalTensor.of(
        ShardedTensor.from_rank_offsets("k", torch.zeros(3, 5).half(), (0, 1, 4), replica_id=(0, 1), prepend_axis_num=1)
    )
    assert (tensor.global_shape, tensor.global_offset, tensor.local_shape) == ((4, 3, 5), (1, 0, 0), (1, 3, 5))
    assert (tensor.dtype_name, tensor.nbytes, tensor.is_main) == ("float16", 30, False)
    assert tensor.read_request().shape == (1, 3, 5)
    assert LocalTensor.of(ShardedTensor.from_rank_offsets("k", torch.zeros(2)).without_data()).data.is_meta
    local_object = LocalObject.of(ShardedObject("o", 3, (2,), (1,), replica_id=(0, 0)))
    assert (local_object.unique_key, local_object.is_main) == ("o/shard_1_2", True)


def test_every_leaf_of_the_common_part_has_its_own_digest():
    value = {"a": [1, {"b": 2.0}], "t": torch.ones(2), "c": (None, b"x"), "empty": {}, "o": slice(1)}
    digests = dict(state_digests(value))
    assert list(digests) == ["a[0]", "a[1].b", "t", "c[0]", "c[1]", "empty", "o"]
    for key, other in (("t", torch.zeros(2)), ("empty", []), ("o", slice(2)), ("a", [True, {"b": 2.0}])):
        assert dict(state_digests({**value, key: other})) != digests, key
    assert dict(state_digests({**value, "t": torch.ones(2)})) == digests


@pytest.mark.slow
def test_sets_have_the_same_digest_in_every_process():
    value = "{'s': {*'abcdef'}, 'f': frozenset({(1, frozenset('xyz')), 'b', 2.0})}"
    code = f"from rankbook.checkpoint.local_state import state_digests; print(dict(state_digests({value})))"
    digests = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    values = ({1, 2}, {1, 3}, {(1, 2)}, {(2, 1)}, {1}, {True}, set(), frozenset())
    assert len({dict(state_digests({"s": other}))["s"] for other in values}) == len(values)


def test_the_layout_and_the_common_part_are_reported_apart():
    def signature(values, rate):
        return local_state_of({"w": torch.tensor(values), "lr": rate}).local_plan().signature()

    layout, common = signature([1.0, 2.0], 0.1)
    assert signature([3.0, 4.0], 0.1) == (layout, common)
    assert signature([1.0, 2.0], 0.2)[0] == layout
    assert signature([1.0, 2.0], 0.2)[1] != common
    assert signature([1.0], 0.1)[0] != layout


MANIFEST = Manifest(
    step=1,
    world_size=1,
    tensors={"w": StoredTensor("bfloat16", (2, 3), ())},
    objects={"a/b/shard_1_2": StoredObject(0, 0, 1, None, 0), "epoch": StoredObject(0, 1, 1, None, 0)},
    files=(),
    values={"epoch": ("epoch",), "optim.0.lr": ("optim", "0", "lr")},
)


def test_request_everything_requests_unsharded_tensors():
    request = request_everything(MANIFEST)
    assert request.keys() == {"w", "a/b/shard_1_2"}
    assert (request["w"].dtype, request["w"].local_shape) == (torch.bfloat16, (2, 3))
    assert (request["a/b/shard_1_2"].key, request["a/b/shard_1_2"].global_offset) == ("a/b", (1,))
    assert LoadRequest(request, MANIFEST, all_values=True).values(MANIFEST.values).keys() == MANIFEST.values.keys()


def test_plain_values_are_requested_under_the_paths_of_the_state_dict():
    request = LoadRequest({"optim": {0: {"lr": 0.1}}, "w": torch.zeros(2)}, MANIFEST)
    assert request.values(MANIFEST.values) == {"optim.0.lr": ("optim", 0, "lr")}
    assert request.nest([(("optim", 0, "lr"), 3)]) == {"optim": {0: {"lr": 3}}}
    state = request.assemble({}, {"optim": {0: {"lr": 3}}, "more": 1}, skipped={"w"})
    assert state == {"optim": {0: {"lr": 3}}, "more": 1}
