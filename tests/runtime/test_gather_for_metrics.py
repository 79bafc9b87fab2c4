"""Test that gathered metrics omit the samples that only fill up the last round."""

from __future__ import annotations

import pytest
import torch

from rankbook.errors import InvalidArgument
from rankbook.runtime import Accelerator
from rankbook.runtime.collectives import trim
from rankbook.runtime.data.samplers import WHOLE, RoundPadding

UNEVEN = RoundPadding((2, 1, 0), 2, (0, 1))


def test_each_ranks_real_rows_stay_in_their_order():
    gathered = torch.arange(12).reshape(6, 2)
    assert trim(gathered, UNEVEN)[:, 0].tolist() == [0, 2, 4]
    assert trim(gathered, RoundPadding((2, 2, 1), 2, (0, 1, 2)))[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert trim(gathered, RoundPadding((WHOLE, 0, WHOLE), WHOLE, (0, 1, 2)))[:, 0].tolist() == [0, 2, 8, 10]
    assert trim(gathered, RoundPadding((1, 2, 2), 2, (0, 1, 2)))[:, 0].tolist() == [0, 4, 6, 8, 10]
    assert trim(gathered, None) is gathered


def test_several_rows_per_sample_stay_with_their_sample():
    gathered = torch.arange(18)  # three for each of two samples, on three ranks
    assert trim(gathered, UNEVEN).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert trim(gathered[:15], RoundPadding((1, 1, 0), 1, (0, 1, 2))).tolist() == list(range(10))
    assert trim(gathered[:3], RoundPadding((4, 2, 0), 4, (0, 1, 2))).tolist() == [0, 1], "one row per batch"
    with pytest.raises(InvalidArgument, match="5 rows per rank were gathered from batches of 2 samples, some of which"):
        trim(torch.arange(15), UNEVEN)


def test_containers_of_tensors_and_lists_of_objects_are_trimmed():
    nested = {"a": torch.arange(6), "b": [torch.arange(6), (torch.arange(6), "label")]}
    trimmed = trim(nested, UNEVEN)
    assert trimmed["a"].tolist() == trimmed["b"][0].tolist() == trimmed["b"][1][0].tolist() == [0, 1, 2]
    assert trimmed["b"][1][1] == "label"
    assert trim(["r0", "r0", "r1", "r1", "r2", "r2"], UNEVEN) == ["r0", "r0", "r1"]


def test_rows_of_the_last_uneven_round_stay_on_their_device():
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")  # plays a GPU
    share = RoundPadding((1,), 1, (0,))  # of this rank alone, which has nobody to wait for
    rows = accelerator._gather_from_ranks_with_batch({"x": torch.ones(1), "y": [torch.zeros(1)]}, share)
    assert (rows["x"].tolist(), rows["y"][0].tolist()) == ([1.0], [0.0])


def test_rows_that_are_not_the_same_number_for_each_rank_are_an_error():
    with pytest.raises(
        InvalidArgument, match=r"the number of gathered rows \(7\) is not divisible by the number of ranks \(3\)"
    ):
        trim(torch.arange(7), UNEVEN)
