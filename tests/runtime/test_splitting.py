"""Test that the shares of all processes contain every element once, in order."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankbook.errors import InvalidArgument
from rankbook.runtime.process_state import split_for_rank


@given(st.integers(0, 12), st.integers(1, 5))
def test_the_shares_put_together_are_the_whole_and_differ_by_one_at_most(length, count):
    data = list(range(length))
    shares = [split_for_rank(data, index, count) for index in range(count)]
    assert [element for share in shares for element in share] == data
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 5))
def test_padding_repeats_the_last_element(length, count):
    data = list(range(length))
    for kind in (list, tuple, torch.tensor, np.array):
        shares = [list(split_for_rank(kind(data), index, count, pad=True)) for index in range(count)]
        assert {len(part) for part in shares} == {-(-length // count)}
        for index, share in enumerate(shares):
            unpadded = split_for_rank(data, index, count)
            assert share == unpadded + [data[-1]] * (len(share) - len(unpadded))


def test_a_range_is_split_into_ranges_and_padded_as_a_list():
    assert [split_for_rank(range(5), index, 2) for index in range(2)] == [range(3), range(3, 5)]
    assert [split_for_rank(range(5), index, 2, pad=True) for index in range(2)] == [[0, 1, 2], [3, 4, 4]]
    assert split_for_rank({"a": range(2), "b": ["x", "y"]}, 1, 2) == {"a": range(1, 2), "b": ["y"]}
    assert split_for_rank(range(0), 0, 2, pad=True) == []


def test_a_dicts_values_are_split_alike_and_the_inputs_stay():
    inputs = {"a": ["x", "y", "z"], "b": torch.arange(6).view(3, 2), "name": "run"}
    second = split_for_rank(inputs, 1, 2, pad=True)
    assert second["a"] == ["z", "z"]
    assert second["b"].tolist() == [[4, 5], [4, 5]]
    assert second["name"] == "run"
    assert inputs["a"] == ["x", "y", "z"]


def test_values_of_other_lengths_are_an_error_that_shows_them():
    with pytest.raises(InvalidArgument, match=r"'a': 1, 'b': 2"):
        split_for_rank({"a": [1], "b": [1, 2]}, 0, 2)


def test_values_without_slices_are_passed_unchanged():
    for value in ("text", 7, torch.tensor(3)):
        assert split_for_rank(value, 1, 2) is value


def test_table_is_sliced_by_rows():
    class Table(Sized):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def select(self, indices):
            return Table([self.rows[index] for index in indices])

    table = Table(["a", "b", "c"])
    assert split_for_rank(table, 1, 2).rows == ["c"]
    assert split_for_rank(table, 1, 2, pad=True).rows == ["c", "c"]


def test_one_process_gets_the_same_object():
    data = [1, 2]
    assert split_for_rank(data, 0, 1) is data
