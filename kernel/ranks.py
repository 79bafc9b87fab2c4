"""Rank selections ("0,2-3", "0:4:2", "all", "main") and how to say them back.

Owns: the grammar of a selection. Refuses: anything but integers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankbook.errors import BadRequest

_FORMS = "0 · 0,2 · 1-3 · 0:4:2 · main · all"


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """The ranks that `text` selects out of `range(world_size)`, ascending, each once.

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


def format_ranks(ranks: Iterable[int]) -> str:
    """The shortest text for a set of ranks: `0-3`, `0,2-3`. The empty set is `none`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2` or `ranks 0-1,3`, for sentences."""
    ranks = sorted(set(ranks))
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
