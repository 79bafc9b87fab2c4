"""Whom the code at a cursor is for: the ranks, the notebook, or a magic's own line.

Owns: pure text, and what may stand on the two magics' lines. Refuses: names of variables; it is given them.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankbook.errors import BadRequest
from rankbook.magics import options
from rankbook.magics.auto import stays_local

_CODE_BEHIND = re.compile(r"[ \t]*%(?:time|timeit|prun)\b")
_QUESTION = re.compile(r"(\?{0,2})[ \t]*([^\W\d]\w*(?:\.\w+|\[[\w'\"-]+\])*)[ \t]*(\?{0,2})")
_LINE_MAGIC = re.compile(r"[ \t]*(?:\w+[ \t]*=[ \t]*)?%distributed[ \t]+")
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


@dataclass(frozen=True)
class OnRanks:
    """Code for `ranks`: `text`, of which the cell has `offset` characters more in front."""

    text: str
    offset: int
    ranks: str | None


@dataclass(frozen=True)
class OnLine:
    """A line of `%%distributed` (`command` None) or `%distributed`: the words before the cursor, and the one there."""

    command: str | None
    words: tuple[str, ...]
    begun: str


def place_of(cell: str, cursor: int, *, auto: bool) -> OnRanks | OnLine | None:
    """Whom it is for; None: the notebook."""
    start = cell.rfind("\n", 0, cursor) + 1
    line = cell[start:cursor]
    head, newline, body = cell.partition("\n")
    if (found := _LINE_MAGIC.match(line)) is not None:
        words = line[found.end() :].split(" ")
        known = words[0] if len(words) > 1 else ""
        return OnLine(known, tuple(words[1:-1]) if known else (), words[-1])
    if head.startswith("%%distributed"):
        if not start:
            words = line.removeprefix("%%distributed").split(" ")
            return OnLine(None, tuple(words[1:-1]), words[-1]) if len(words) > 1 else None
        return _on_ranks(body, len(head) + len(newline), start, line, _ranks_of(head))
    if not auto or stays_local(cell):
        return None
    return _on_ranks(cell, 0, start, line, None)


def _on_ranks(text: str, offset: int, start: int, line: str, ranks: str | None) -> OnRanks | None:
    begin = start - offset
    if line.lstrip().startswith("%"):
        behind = _CODE_BEHIND.match(line)
        if behind is None:
            return None
        end = behind.end()
        text = text[:begin] + " " * end + text[begin + end :]
    return None if line.lstrip().startswith("!") else OnRanks(text, offset, ranks)


def _ranks_of(head: str) -> str | None:
    """The selection on a `%%distributed` line that may not be whole yet."""
    try:
        found: str | None = options.parse_cell_line(head.removeprefix("%%distributed")).ranks
    except BadRequest:
        return None
    return found


def asked_about(cell: str) -> tuple[str, bool] | None:
    """Of a cell that is `x?`, `x??` or `?x`: the expression, and whether its source is wanted."""
    found = _QUESTION.fullmatch(cell.strip())
    if found is None or not (found[1] or found[3]):
        return None
    return found[2], "??" in (found[1], found[3])


def may_stand(
    place: OnLine, world_size: int, own: Callable[[], Iterable[str]], theirs: Callable[[], Iterable[str]]
) -> list[str]:
    """What may take the place of `place.begun`: options, rank selections, variables `own` and `theirs`."""
    if place.command == "":
        found: Iterable[str] = options.COMMANDS
    else:
        actions = options.actions_of(place.command)
        before = place.words[-1] if place.words else ""
        valued = next((each for each in actions if before in each.option_strings and each.nargs != 0), None)
        if valued is not None:
            found = _values(valued, place.begun, world_size)
        elif place.begun.startswith("-"):
            found = [name for each in actions for name in each.option_strings if name not in place.words]
        else:
            given = sum(not each.startswith("-") for each in place.words)
            found = _positional(place.command, actions, given, place.begun, world_size, own, theirs)
    return sorted({each for each in found if each.startswith(place.begun)}, key=_order)


def _order(text: str) -> tuple[bool, int, str]:
    number = text.rsplit(",", 1)[-1]
    return text.startswith("-"), int(number) if number.isdecimal() else -1, text


def _values(action: argparse.Action, begun: str, world_size: int) -> Iterable[str]:
    if action.dest == "ranks":
        return _selections(begun, world_size)
    return _BACKENDS if action.dest == "backend" else ()


def _positional(
    command: str | None,
    actions: list[argparse.Action],
    given: int,
    begun: str,
    world_size: int,
    own: Callable[[], Iterable[str]],
    theirs: Callable[[], Iterable[str]],
) -> Iterable[str]:
    named = [name for each in actions for name in each.option_strings[:1]]
    wanted = [each for each in actions if not each.option_strings]
    many = bool(wanted) and wanted[0].nargs in {"+", "*"}
    if not wanted or (given >= len(wanted) and not many):
        return named
    action = wanted[0 if many else given]
    if action.dest == "ranks":
        return [*_selections(begun, world_size), *named]
    if action.choices is not None:
        return [str(each) for each in action.choices]
    if command in {"push", "pull", "vars"}:
        return own() if command == "push" else theirs()
    return named


def _selections(begun: str, world_size: int) -> list[str]:
    """Selections of ranks that begin so: each rank's number behind the last comma; the words alone."""
    before, comma, _ = begun.rpartition(",")
    numbers = [f"{before}{comma}{rank}" for rank in range(world_size) if str(rank) not in before.split(",")]
    return numbers if comma else [*numbers, "all", "main"]


def without_ranks(text: str, cursor: int) -> tuple[int, list[str]]:
    """Where no rank is there to ask: the language's own names."""
    start = cursor
    while start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    begun = text[start:cursor]
    if not begun or text[:start].rstrip().endswith("."):
        return cursor, []
    names = {*keyword.kwlist, *vars(builtins)}
    return start, sorted(each for each in names if each.startswith(begun) and (begun[0] == "_" or each[0] != "_"))
