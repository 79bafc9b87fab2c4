"""Test norms of gradients over all ranks: pure code."""

from __future__ import annotations

import math

import pytest
import torch

from rankbook.errors import InvalidArgument
from rankbook.numerics.gradients import local_gradients
from rankbook.numerics.norms import merge_gradients
from rankbook.protocol.queries import GradientEntry, LocalGradients


def merged(*ranks, **options):
    return merge_gradients({rank: LocalGradients(tuple(entries), **options) for rank, entries in enumerate(ranks)})


def test_replicas_count_once_and_shards_add_up():
    replicated = GradientEntry("a.w", "", 3.0, 1.0, 10)
    table = merged(
        *(
            [replicated, GradientEntry("b.w", f"S(0) dp {rank // 2}", 2.0 * (1 + rank // 2), 1.0, 5)]
            for rank in range(4)
        )
    )
    assert table.norm == pytest.approx(math.sqrt(9 + 4 + 16))
    assert table["b"] == table["b.w"] == pytest.approx(math.sqrt(20))
    assert table.parameters["b.w"].elements == 10
    assert table.modules() == pytest.approx({"a": 3.0, "b": math.sqrt(20)})


def test_table_says_what_is_wrong_with_gradients():
    table = merged(
        [
            GradientEntry("a.w", "", 3.0, 1.0, 10),
            GradientEntry("a.b", "", None, 1.0, 1),
            GradientEntry("c", "", math.nan, 1.0, 4, 2),
        ],
        [
            GradientEntry("a.w", "", 4.0, 1.0, 10),
            GradientEntry("a.b", "", 1.0, 1.0, 1),
            GradientEntry("c", "", math.nan, 1.0, 4, 2),
        ],
        reduced=False,
        scale=8.0,
    )
    text = str(table)
    assert "differs between replicas: 3 on rank 0, 4 on rank 1" in text and "no gradient on rank 0" in text
    assert "2 NaN or infinite" in text and "not reduced yet" in text and "loss scale 8" in text
    assert math.isnan(table.norm)
    with pytest.raises(InvalidArgument, match="did you mean: a"):
        table["aa"]


def test_model_without_gradients_says_so():
    table = merged([GradientEntry("w", "", None, 1.0, 10)])
    assert "no parameter has a gradient" in str(table) and table.norm == 0
    assert "(root)" in str(table)


def test_sparse_gradients_are_counted_too():
    net = torch.nn.Embedding(5, 3, sparse=True)
    net.weight.grad = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0] * 3, [math.nan, 1.0, 1.0], [2.0] * 3], (5, 3))
    (entry,) = local_gradients(net, "net").entries
    assert math.isnan(entry.norm) and entry.nonfinite == 1
