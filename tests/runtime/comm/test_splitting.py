"""Each process's share: nothing lost, nothing twice, in order."""

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
    whole = list(range(length))
    shares = [split_for_rank(whole, index, count) for index in range(count)]
    assert [each for share in shares for each in share] == whole
    sizes = [len(each) for each in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 5))
def test_padding_makes_them_equal_with_the_last_element(length, count):
    whole = list(range(length))
    for kind in (list, tuple, torch.tensor, np.array):
        shares = [list(split_for_rank(kind(whole), index, count, pad=True)) for index in range(count)]
        assert {len(each) for each in shares} == {-(-length // count)}
        for index, share in enumerate(shares):
            own = split_for_rank(whole, index, count)
            assert share == own + [whole[-1]] * (len(share) - len(own))


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


def test_what_cannot_be_sliced_is_given_whole():
    for value in ("text", 7, torch.tensor(3)):
        assert split_for_rank(value, 1, 2) is value


def test_a_table_is_asked_for_its_rows():
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
    whole = [1, 2]
    assert split_for_rank(whole, 0, 1) is whole
