"""Test the formatting of numbers, names and terminal text."""

from __future__ import annotations

import pytest

from rankbook.formatting import (
    escape_unprintable,
    format_bytes,
    format_count,
    format_duration,
    plural,
    signal_name,
    strip_ansi,
    suggest,
    truncate_list,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_700, "1 MB"),
        (1_500_000, "1.5 MB"),
        (1_070_000_000, "1.07 GB"),
        (75_250_000_000, "75.2 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_given_in_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (999_700, "1 M"), (7_241_728, "7.24 M"), (3.2e15, "3200 T")]
)
def test_counts_are_given_in_the_largest_unit_that_fits(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (12, "12 s"), (185, "3 min 5 s"), (7440, "2 h 4 min")])
def test_durations_have_at_most_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_noun_is_singular_for_one():
    assert [plural(count, "rank") for count in (0, 1, 2, 12_000)] == ["0 ranks", "1 rank", "2 ranks", "12,000 ranks"]
    assert plural(2, "class", "classes") == "2 classes"


def test_public_names_that_resemble_a_misspelt_one_are_suggested():
    assert suggest("losse", ["loss", "losses", "_losse", "model"]) == "; did you mean: losses, loss?"
    assert suggest("losse", ["model"]) == ""


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "\x1b[1;31mplain\x1b[0m",
        "pl\x1b[2Kain\x1b[?25l",
        "\x1b]8;;http://x\x07plain\x1b]8;;\x1b\\",
        "\x1bMplain",
    ],
)
def test_escape_sequences_are_removed(text):
    assert strip_ansi(text) == "plain"


def test_control_characters_of_a_name_are_escaped():
    assert escape_unprintable("weight") == "weight"
    assert escape_unprintable("a\x1b[2Jb") == "a\\x1b[2Jb"


def test_a_signal_is_named_or_numbered():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


def test_a_long_list_is_cut_and_the_rest_counted():
    assert truncate_list(["a", "b"], 2) == ["a", "b"]
    assert truncate_list(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]
