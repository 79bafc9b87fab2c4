"""Parse rank selections ("0,2-3", "0:4:2", "all", "main"), format ranks, and group them by a value."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

from rankbook.errors import BadRequest

_K = TypeVar("_K", bound=Hashable)
_FORMS = "0 · 0,2 · 1-3 · 0:4:2 · main · all"


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that `text` selects out of `range(world_size)`, in ascending order.

    `text` is a comma-separated list of `3`, `1-3` (both ends), `a:b` or `a:b:step` (a Python slice), `all`, `main`
    (rank 0). Raises `BadRequest`, in one line that names the valid ranks, for anything else and for an empty selection.
    """
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        chosen.update(_parse_part(part, text, world_size))
    if not chosen:
        raise BadRequest(f"ranks {text} selects no rank; valid ranks are {format_ranks(range(world_size))}")
    return tuple(sorted(chosen))


def _parse_part(part: str, text: str, world_size: int) -> Iterable[int]:
    valid = format_ranks(range(world_size))
    if part == "all":
        return range(world_size)
    if part == "main":
        return (0,)
    if ":" in part and re.fullmatch(r"-?\d*:-?\d*(:-?\d*)?", part):
        bounds = [int(number) if number else None for number in part.split(":")]
        if len(bounds) == 3 and bounds[2] == 0:
            raise BadRequest(f"ranks {text}: a step of 0 selects nothing; forms: {_FORMS}")
        return range(world_size)[slice(*bounds)]
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if not matched:
        raise BadRequest(f"ranks {text}: {part!r} is no rank selection; forms: {_FORMS}; valid ranks are {valid}")
    first, last = int(matched[1]), int(matched[2] or matched[1])
    if last < first:
        raise BadRequest(f"ranks {text}: {part} runs backwards; write {last}-{first}; valid ranks are {valid}")
    if last >= world_size:
        missing = last if first < world_size else first
        raise BadRequest(f"ranks {text}: there is no rank {missing}; valid ranks are {valid}")
    return range(first, last + 1)


def format_ranks(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Format a set of ranks in the shortest form that `parse_ranks` reads: "0-3", "0,2-3"; "none" for the empty set.

    If there are more than `most` ranges, the rest is counted: "0,2,4 and more, 8 in all".
    """
    unique = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in unique:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most])
    return f"{text} and more, {len(unique)} in all" if most and len(ranges) > most else text or "none"


def name_ranks(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Format ranks for a sentence, as `format_ranks` does: "rank 2", "ranks 0-1,3"."""
    unique = set(ranks)
    return f"rank{'' if len(unique) == 1 else 's'} {format_ranks(unique, most=most)}"


def group_ranks(values: Iterable[tuple[int, _K]]) -> dict[_K, list[int]]:
    """Group ranks by their value, in the order in which the values first occur. `values` are (rank, value) pairs."""
    groups: dict[_K, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups
