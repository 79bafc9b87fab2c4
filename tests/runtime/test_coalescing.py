"""Test which tensors are sent together, and that every tensor arrives unchanged."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankbook.runtime import collectives
from rankbook.runtime.collectives import as_bytes, make_buckets, rows_from_bytes, split_like

TYPES = (torch.bool, torch.int16, torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float8_e4m3fn)
SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=3)


def filled(shape: list[int], kind: torch.dtype, start: int) -> torch.Tensor:
    return (torch.arange(start, start + torch.Size(shape).numel()) % 2).view(shape).to(kind)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(TYPES)), min_size=1, max_size=5), st.integers(1, 3))
def test_each_rank_s_rows_come_out_in_order(what, ranks):
    tensors_by_rank = [
        [filled(shape, kind, rank + index) for index, (shape, kind) in enumerate(what)] for rank in range(ranks)
    ]
    columns = rows_from_bytes(torch.stack([as_bytes(tensors) for tensors in tensors_by_rank]), tensors_by_rank[0])
    for index, rows in enumerate(columns):
        expected = torch.cat([tensors[index] for tensors in tensors_by_rank])
        assert rows.dtype == expected.dtype
        assert rows.shape == expected.shape
        assert torch.equal(rows.to(torch.complex64), expected.to(torch.complex64))


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=12))
def test_every_tensor_is_in_one_bucket_of_its_kind_within_the_size_limit(sizes):
    tensors = [torch.empty(size, dtype=torch.uint8) for size, _ in sizes]
    collectives.MAX_BUCKET_BYTES, before = 200, collectives.MAX_BUCKET_BYTES
    try:
        buckets = make_buckets(tensors, [kind for _, kind in sizes])
    finally:
        collectives.MAX_BUCKET_BYTES = before
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for indexes in buckets:
        assert indexes == sorted(indexes)
        assert len({sizes[index][1] for index in indexes}) == 1
        assert len(indexes) == 1 or sum(sizes[index][0] for index in indexes) <= 200


def test_pieces_do_not_share_memory():
    like = [torch.empty(2, 2), torch.empty(()), torch.empty(0, 3)]
    pieces = split_like(torch.arange(5.0), like)
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [2, 3]], 4, []]
    pieces[0].zero_()
    assert pieces[1].item() == 4
    assert pieces[1].untyped_storage().nbytes() == 4
