"""The map of a variable's shards, folded without a process."""

from __future__ import annotations

from rankbook.coordinator.monitor import merge_shards
from rankbook.protocol.queries import Box, QueryFailed, RankTensor, ShardsReply

DEVICES = {0: "cpu", 1: "cpu", 2: "cpu", 3: "cuda:3"}
TWO_BY_TWO = (Box(0, (0, 0), (2, 4)), Box(1, (2, 0), (2, 4)), Box(2, (0, 0), (2, 4)), Box(3, (2, 0), (2, 4)))


def told(rank, *boxes, kind="model", trouble="", device="cpu"):
    tensor = RankTensor("w", "float32", 4, device, (4, 4), 0)
    return ShardsReply(1, kind, (tensor,), (boxes,), trouble)


def placed(found):
    return [(each.rank, each.offset, each.shape, each.replica) for each in found.tensors[0].shards]


def test_replicas_are_counted_by_rank():
    found = merge_shards("m", {rank: told(rank, *TWO_BY_TWO) for rank in range(4)}, range(4), DEVICES)
    assert (found.name, found.kind, found.trouble) == ("m", "model", "")
    assert placed(found) == [
        (0, (0, 0), (2, 4), 0),
        (1, (2, 0), (2, 4), 0),
        (2, (0, 0), (2, 4), 1),
        (3, (2, 0), (2, 4), 1),
    ]
    assert [each.bytes for each in found.tensors[0].shards] == [32] * 4


def test_what_was_computed_stands_for_a_rank_that_is_silent_and_for_no_other():
    answers = {0: told(0, *TWO_BY_TWO), 1: told(1, Box(1, (3, 0), (1, 4))), 2: QueryFailed(1, "no variable 'm'")}
    found = merge_shards("m", answers, range(4), DEVICES)
    assert placed(found) == [
        (0, (0, 0), (2, 4), 0),
        (1, (3, 0), (1, 4), 0),
        (2, (0, 0), (2, 4), 1),
        (3, (2, 0), (2, 4), 0),
    ]
    assert found.tensors[0].shards[3].device == "cuda:3"
    assert found.trouble == "rank 2: no variable 'm'; rank 3: no answer; its parts are as the others computed them"


def test_a_rank_that_answers_without_a_tensor_does_not_hold_it():
    other = ShardsReply(1, "model", (), (), "it holds no tensors yet")
    found = merge_shards("m", {0: told(0, *TWO_BY_TWO), 1: other}, range(2), DEVICES)
    assert [each.rank for each in found.tensors[0].shards] == [0, 2, 3]
    assert found.trouble == "rank 1: it holds no tensors yet"


def test_a_replica_that_has_a_number_keeps_it_and_empty_shards_are_there():
    answers = {0: told(0, Box(0, (0,), (4,), 1)), 1: told(1, Box(1, (0,), (4,))), 2: told(2, Box(2, (4,), (0,)))}
    found = merge_shards("m", answers, range(3), DEVICES)
    assert placed(found) == [(0, (0,), (4,), 1), (1, (0,), (4,), 0), (2, (4,), (0,), 0)]
    assert found.tensors[0].shards[2].bytes == 0


def test_ranks_that_have_different_things_are_told():
    answers = {0: told(0, Box(0, (0,), (4,))), 1: told(1, Box(1, (0,), (4,)), kind="tensor")}
    assert "not the same kind of thing" in merge_shards("m", answers, range(2), DEVICES).trouble
