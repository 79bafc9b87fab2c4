"""The ranks' variables side by side.

Owns: which ranks have the same, and in what the others differ. Refuses: to fetch them, and to compare what tensors and
objects hold: only what was told of them is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from rankbook.errors import BadRequest
from rankbook.ranks import format_ranks, name_ranks
from rankbook.telemetry import Variable
from rankbook.words import size

HEADINGS = ("name", "ranks", "type", "shape", "dtype", "device", "size", "value", "differs in")
_MOST_VALUES = 4
_FIELDS = (("type", "type"), ("shape", "shape"), ("dtype", "dtype"), ("device", "device"), ("size", "bytes"))

Variables = Mapping[int, Sequence[Variable]]


def rows_of(variables: Variables, names: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The rows below `HEADINGS`: a variable has one, or one for each set of ranks where it is of another make.

    `names`: these alone, which may be patterns as `loss*`. Raises `BadRequest` for one that no rank has.
    """
    found: dict[str, dict[int, Variable]] = {}
    for rank, each in variables.items():
        for one in each:
            found.setdefault(one.name, {})[rank] = one
    for name in names:
        if not any(fnmatchcase(each, name) for each in found):
            near = get_close_matches(name, found, n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise BadRequest(f"there is no variable {name!r} on {name_ranks(tuple(variables))}{hint}")
    wanted = [each for each in found if not names or any(fnmatchcase(each, name) for name in names)]
    return [row for name in wanted for row in _rows(name, found[name], tuple(variables))]


def _rows(name: str, there: Mapping[int, Variable], ranks: tuple[int, ...]) -> Iterable[tuple[str, ...]]:
    makes: dict[tuple[object, ...], dict[int, Variable]] = {}
    for rank in ranks:
        if rank in there:
            makes.setdefault(tuple(getattr(there[rank], field) for _, field in _FIELDS), {})[rank] = there[rank]
    firsts = [next(iter(each.values())) for each in makes.values()]
    differs = [title for title, field in _FIELDS if len({getattr(each, field) for each in firsts}) > 1]
    if len({each.preview for each in there.values()}) > 1:
        differs.append("value")
    missing = tuple(rank for rank in ranks if rank not in there)
    if missing:
        differs.append(f"not on {name_ranks(missing)}")
    for number, have in enumerate(makes.values()):
        one = firsts[number]
        yield (
            name,
            "all" if len(have) == len(ranks) else format_ranks(tuple(have)),
            one.type,
            "" if one.shape is None else str(list(one.shape)),
            one.dtype,
            one.device,
            "" if one.bytes is None else size(one.bytes),
            _values(have),
            ", ".join(differs) if not number else "",
        )


def _values(have: Mapping[int, Variable]) -> str:
    """The value, or each with its ranks."""
    values: dict[str, list[int]] = {}
    for rank, each in have.items():
        values.setdefault(each.preview, []).append(rank)
    if len(values) == 1:
        return next(iter(values))
    told = [f"[{format_ranks(tuple(ranks))}] {value}" for value, ranks in list(values.items())[:_MOST_VALUES]]
    return " · ".join(told) + (" · …" if len(values) > _MOST_VALUES else "")
