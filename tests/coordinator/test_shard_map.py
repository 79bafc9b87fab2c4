"""Test how the ranks' shards are merged into one map, without a process."""

from __future__ import annotations

import msgspec

from rankbook.coordinator.monitor import merge_shards
from rankbook.protocol.queries import Box, QueryFailed, RankTensor, ShardsReply

DEVICES = {0: "cpu", 1: "cpu", 2: "cpu", 3: "cuda:3"}
TWO_BY_TWO = (Box(0, (0, 0), (2, 4)), Box(1, (2, 0), (2, 4)), Box(2, (0, 0), (2, 4)), Box(3, (2, 0), (2, 4)))


def shards_reply(rank, *boxes, kind="model", trouble="", device="cpu"):
    tensor = RankTensor("w", "float32", 4, device, (4, 4), 0)
    return ShardsReply(1, kind, (tensor,), (boxes,), trouble)


def placed(shard_map):
    return [(shard.rank, shard.offset, shard.shape, shard.replica) for shard in shard_map.tensors[0].shards]


def test_replicas_are_counted_by_rank():
    shard_map = merge_shards("m", {rank: shards_reply(rank, *TWO_BY_TWO) for rank in range(4)}, range(4), DEVICES)
    assert (shard_map.name, shard_map.kind, shard_map.trouble) == ("m", "model", "")
    assert placed(shard_map) == [
        (0, (0, 0), (2, 4), 0),
        (1, (2, 0), (2, 4), 0),
        (2, (0, 0), (2, 4), 1),
        (3, (2, 0), (2, 4), 1),
    ]
    assert [shard.bytes for shard in shard_map.tensors[0].shards] == [32] * 4


def test_computed_regions_are_used_only_for_ranks_without_a_reply():
    answers = {
        0: shards_reply(0, *TWO_BY_TWO),
        1: shards_reply(1, Box(1, (3, 0), (1, 4))),
        2: QueryFailed(1, "'m' is not defined"),
    }
    shard_map = merge_shards("m", answers, range(4), DEVICES)
    assert placed(shard_map) == [
        (0, (0, 0), (2, 4), 0),
        (1, (3, 0), (1, 4), 0),
        (2, (0, 0), (2, 4), 1),
        (3, (2, 0), (2, 4), 0),
    ]
    assert shard_map.tensors[0].shards[3].device == "cuda:3"
    assert shard_map.trouble == (
        "rank 2: 'm' is not defined; rank 3: no reply; its shards are shown as computed by the other ranks"
    )


def test_a_rank_that_answers_without_a_tensor_does_not_hold_it():
    other = ShardsReply(1, "model", (), (), "no tensors yet")
    shard_map = merge_shards("m", {0: shards_reply(0, *TWO_BY_TWO), 1: other}, range(2), DEVICES)
    assert [shard.rank for shard in shard_map.tensors[0].shards] == [0, 2, 3]
    assert shard_map.trouble == "rank 1: no tensors yet"


def test_a_replica_that_has_a_number_keeps_it_and_empty_shards_are_there():
    answers = {
        0: shards_reply(0, Box(0, (0,), (4,), 1)),
        1: shards_reply(1, Box(1, (0,), (4,))),
        2: shards_reply(2, Box(2, (4,), (0,))),
    }
    shard_map = merge_shards("m", answers, range(3), DEVICES)
    assert placed(shard_map) == [(0, (0,), (4,), 1), (1, (0,), (4,), 0), (2, (4,), (0,), 0)]
    assert shard_map.tensors[0].shards[2].bytes == 0


def test_the_size_that_a_rank_reports_is_of_its_own_part():
    reply = shards_reply(0, *TWO_BY_TWO)
    tensor = msgspec.structs.replace(reply.tensors[0], bytes=20)
    shard_map = merge_shards("m", {0: msgspec.structs.replace(reply, tensors=(tensor,))}, range(4), DEVICES)
    assert [shard.bytes for shard in shard_map.tensors[0].shards] == [20, 32, 32, 32]


def test_ranks_that_have_different_things_are_reported():
    answers = {0: shards_reply(0, Box(0, (0,), (4,))), 1: shards_reply(1, Box(1, (0,), (4,)), kind="tensor")}
    assert "the type differs between ranks" in merge_shards("m", answers, range(2), DEVICES).trouble


def test_tensors_of_one_name_and_different_shapes_are_no_shards_of_one_tensor():
    other = RankTensor("w", "float32", 4, "cpu", (9, 4), 0)
    answers = {
        0: shards_reply(0, Box(0, (0, 0), (4, 4))),
        1: ShardsReply(1, "model", (other,), ((Box(1, (0, 0), (9, 4)),),), ""),
        2: shards_reply(2, Box(2, (0, 0), (4, 4))),
    }
    shard_map = merge_shards("m", answers, range(3), DEVICES)
    assert placed(shard_map) == [(0, (0, 0), (4, 4), 0), (2, (0, 0), (4, 4), 1)]
    assert shard_map.trouble == "rank 1: another shape or dtype, which is not shown: w"


def test_a_rank_whose_shards_no_other_rank_can_compute_is_not_said_to_be_shown():
    shard_map = merge_shards("m", {0: shards_reply(0, Box(0, (0,), (4,)))}, range(2), DEVICES)
    assert [shard.rank for shard in shard_map.tensors[0].shards] == [0]
    assert shard_map.trouble == "rank 1: no reply"
