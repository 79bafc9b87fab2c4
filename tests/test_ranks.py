"""Test the parsing and formatting of rank selections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.errors import InvalidArgument
from rankbook.ranks import abbreviate_ranks, format_ranks, group_ranks, name_ranks, parse_ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1,1", (1, 3)),
        ("0:4:2", (0, 2)),
        ("1:", (1, 2, 3, 4)),
        (":2", (0, 1)),
        ("-2:", (3, 4)),
        ("::2", (0, 2, 4)),
        ("main", (0,)),
        ("all", (0, 1, 2, 3, 4)),
        ("main,3:", (0, 3, 4)),
        (" 0 , 2 - 3 ", (0, 2, 3)),
    ],
)
def test_selections(text, expected):
    assert parse_ranks(text, 5) == expected


@pytest.mark.parametrize(
    "text", ["5", "3-7", "2-1", "", ",", "x", "1.5", "0:4:0", "9:", "-1", "all but 2", "1;2", "0 1"]
)
def test_nonsense_is_one_line_that_names_the_valid_ranks_or_forms(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_ranks(text, 5)
    message = str(caught.value)
    assert "\n" not in message
    assert "0-4" in message or "valid forms are" in message


@given(st.sets(st.integers(0, 40), min_size=1))
def test_formatted_ranks_are_parsed_back(ranks):
    assert parse_ranks(format_ranks(ranks), 41) == tuple(sorted(ranks))


def test_names_for_sentences():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([3, 0, 1]) == "ranks 0-1,3"
    assert format_ranks([]) == "none"


def test_many_ranges_are_cut_and_all_ranks_counted():
    assert name_ranks(range(0, 16, 2), max_ranges=3) == "ranks 0,2,4 and more, 8 in all"
    assert name_ranks(range(0, 6, 2), max_ranges=3) == "ranks 0,2,4"
    assert format_ranks(range(1000), max_ranges=3) == "0-999"
    assert abbreviate_ranks(range(0, 20, 2)) == "ranks 0,2,4,6,8,10,12,14 and more, 10 in all"


def test_ranks_are_grouped_by_their_value_in_order_of_appearance():
    assert group_ranks([(0, "b"), (1, "a"), (2, "b")]) == {"b": [0, 2], "a": [1]}
    assert list(group_ranks([(0, "b"), (1, "a"), (2, "b")])) == ["b", "a"]
