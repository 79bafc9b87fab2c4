"""Parse rank selections ("0,2-3", "0:4:2", "all", "main"), format ranks, and group them by a value."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

from rankbook.errors import InvalidArgument

_K = TypeVar("_K", bound=Hashable)
_FORMS = "0 · 0,2 · 1-3 · 0:4:2 · main · all"


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that `text` selects out of `range(world_size)`, in ascending order.

    `text` is a comma-separated list of `3`, `1-3` (both ends), `a:b` or `a:b:step` (a Python slice), `all`, `main`
    (rank 0). Raises `InvalidArgument`, in one line that names the valid ranks, for anything else and for an empty
    selection.
    """
    # A set, because the parts of a selection may overlap.
    chosen: set[int] = set()
    for item in re.sub(r"\s*([,:-])\s*", r"\1", text.strip()).split(","):  # "0 1" is not rank 1
        chosen.update(_parse_item(item, text, world_size))
    if not chosen:
        raise InvalidArgument(
            f"invalid ranks {text!r}: the selection is empty; valid ranks are {format_ranks(range(world_size))}"
        )
    return tuple(sorted(chosen))


def _parse_item(item: str, text: str, world_size: int) -> Iterable[int]:
    valid = format_ranks(range(world_size))
    if item == "all":
        return range(world_size)
    if item == "main":
        return (0,)
    if ":" in item and re.fullmatch(r"-?\d*:-?\d*(:-?\d*)?", item):
        bounds = [int(number) if number else None for number in item.split(":")]
        if len(bounds) == 3 and bounds[2] == 0:
            raise InvalidArgument(f"invalid ranks {text!r}: the step of a slice cannot be 0; valid forms are {_FORMS}")
        # A slice of a range follows Python's rules for negative and missing bounds.
        return range(world_size)[slice(*bounds)]
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
    if not matched:
        raise InvalidArgument(
            f"invalid ranks {text!r}: cannot parse {item!r}; valid forms are {_FORMS}; valid ranks are {valid}"
        )
    first, last = int(matched[1]), int(matched[2] or matched[1])
    if last < first:
        raise InvalidArgument(
            f"invalid ranks {text!r}: the range {item} is reversed; write {last}-{first}; valid ranks are {valid}"
        )
    # Slices are cut to the valid ranks as in Python. A rank that is named must exist.
    if last >= world_size:
        missing = last if first < world_size else first
        raise InvalidArgument(f"invalid ranks {text!r}: rank {missing} does not exist; valid ranks are {valid}")
    return range(first, last + 1)


def format_ranks(ranks: Iterable[int], *, max_ranges: int | None = None) -> str:
    """Format a set of ranks in the shortest form that `parse_ranks` reads: "0-3", "0,2-3"; "none" for the empty set.

    If there are more than `max_ranges` ranges, the rest is counted: "0,2,4 and more, 8 in all".
    """
    unique = sorted(set(ranks))
    # [0, 1, 2, 5] becomes the ranges [[0, 2], [5, 5]], and the text "0-2,5".
    ranges: list[list[int]] = []
    for rank in unique:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:max_ranges])
    return f"{text} and more, {len(unique)} in all" if max_ranges and len(ranges) > max_ranges else text or "none"


def name_ranks(ranks: Iterable[int], *, max_ranges: int | None = None) -> str:
    """Format ranks for a sentence, as `format_ranks` does: "rank 2", "ranks 0-1,3"."""
    # A set, because `ranks` may be an iterator, and is used twice.
    unique = set(ranks)
    return f"rank{'' if len(unique) == 1 else 's'} {format_ranks(unique, max_ranges=max_ranges)}"


def abbreviate_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as `name_ranks` does, for an error that may concern thousands of them: at most eight ranges."""
    return name_ranks(ranks, max_ranges=8)


def group_ranks(values: Iterable[tuple[int, _K]]) -> dict[_K, list[int]]:
    """Group ranks by their value, in the order in which the values first occur. `values` are (rank, value) pairs."""
    groups: dict[_K, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups
