"""Test which replica is stored, with ranks that are threads."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.state_dict import state_dicts
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor
from rankbook.checkpoint.state_dict.state_dicts import ReplicatedEntry, assign_replica_ids
from rankbook.errors import CheckpointError


def copy(key, holders, index=0, count=1, nbytes=4, storage_group=None):
    return ReplicatedEntry(
        ShardedTensor.from_rank_offsets(key, torch.zeros(1)), holders, index, count, nbytes, storage_group
    )


def settled(ranks, errors=None):
    """Return every rank's replica ids by key, or the error that it raised, and the number of exchanges."""
    world, local = len(ranks), threading.local()
    barrier, board, exchanges = threading.Barrier(world), [None] * world, []

    def gather(value):
        board[local.rank] = value
        if barrier.wait(10) == 0:
            exchanges.append(1)
        contributions = list(board)
        barrier.wait(10)
        return contributions

    def work(rank):
        local.rank = rank
        try:
            assign_replica_ids(ranks[rank], gather, error=(errors or {}).get(rank))
        except CheckpointError as error:
            return str(error)
        return {item.entry.key: item.entry.replica_id for item in ranks[rank]}

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        patch.setattr(state_dicts, "world_size", lambda: world)
        patch.setattr(state_dicts, "this_rank", lambda: local.rank)
        return list(pool.map(work, range(world))), len(exchanges)


def test_the_same_on_all_ranks_is_stored_by_rank_0_after_one_exchange():
    ids, exchanges = settled([[copy("a", (rank,)), copy("b", (rank,))] for rank in range(3)])
    assert ids == [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 2}]
    assert exchanges == 1


def test_key_of_some_ranks_is_stored_by_the_first_of_them():
    ids, exchanges = settled([[copy("a", (0,))], [copy("b", (1,))], [copy("a", (2,)), copy("b", (2,))]])
    assert ids == [{"a": 0}, {"b": 0}, {"a": 1, "b": 1}]
    assert exchanges == 2


def test_meshes_that_hold_the_same_are_copies_of_each_other():
    """Shard a layer that tensor parallelism leaves whole over (0, 2) and over (1, 3)."""
    meshes = [(0, 2), (1, 3), (0, 2), (1, 3)]
    ids, _ = settled([[copy("norm", mesh), copy("w", (0, 1, 2, 3))] for mesh in meshes])
    assert ids == [{"norm": 0, "w": 0}, {"norm": 1, "w": 0}, {"norm": 0, "w": 0}, {"norm": 1, "w": 0}]


def test_copies_within_meshes_and_of_meshes_are_counted_together():
    ranks = [[copy("x", (0, 1), rank % 2, 2) if rank < 2 else copy("x", (2, 3), rank % 2, 2)] for rank in range(4)]
    assert [item["x"] for item in settled(ranks)[0]] == [0, 1, 2, 3]


def test_failure_of_one_rank_is_raised_on_all_ranks():
    errors = {1: CheckpointError("'w' is partial"), 2: ValueError("no")}
    results, exchanges = settled([[copy("a", (0,))], [], []], errors=errors)
    assert results == ["the state dict cannot be stored: rank 1: 'w' is partial; rank 2: ValueError: no"] * 3
    assert exchanges == 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_groups_are_spread_and_stay_together(sizes, world):
    ranks = [
        [
            copy(f"{name}{part}", (rank,), nbytes=size, storage_group=str(name))
            for name, size in enumerate(sizes)
            for part in "ab"
        ]
        for rank in range(world)
    ]
    ids, _ = settled(ranks)
    owner = {key: rank for rank, item in enumerate(ids) for key, replica in item.items() if replica == 0}
    mains = Counter(key for element in ids for key, replica in element.items() if replica == 0)
    assert set(mains.values()) == {1} and len(mains) == 2 * len(sizes)
    assert all(owner[f"{name}a"] == owner[f"{name}b"] for name in range(len(sizes)))
    loads = Counter(dict.fromkeys(range(world), 0))
    for name, size in enumerate(sizes):
        loads[owner[f"{name}a"]] += 2 * size
    assert max(loads.values()) - min(loads.values()) <= 2 * max(sizes)
    assert all(set(entry.values()) <= set(range(world)) for entry in ids)
