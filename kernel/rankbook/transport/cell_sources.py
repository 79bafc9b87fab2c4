"""The cells that functions were defined in. They travel with the functions, so that a traceback shows their lines.

Owns: which code brings its cell along, and that it is known where it arrives. Refuses: files, which are read where they
are needed.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from typing import Any

_numbers: dict[str, int] | None = None


def set_cell_numbers(numbers: dict[str, int]) -> None:
    """Have cells told by these numbers, by their file names; those that arrive are added. IPython's own table."""
    global _numbers
    _numbers = numbers


def cell_number(file: str) -> int | None:
    """The number of the cell that is this file; None for any other file."""
    return None if _numbers is None else _numbers.get(file)


class CellSources:
    """Of one pickle: each cell goes into it once."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def reduce(self, code: types.CodeType, plain: tuple[Any, ...]) -> tuple[Any, ...]:
        """`plain`, the reduction of `code`; or one that brings its cell along, if it comes from one."""
        source = self._source_of(code.co_filename)
        if not source:
            return plain
        return restore_code, (code.co_filename, source, cell_number(code.co_filename) or 0, *plain)

    def _source_of(self, file: str) -> str:
        if file not in self._found:
            match linecache.cache.get(file):
                case (_, None, lines, _):  # of a file that is nowhere, linecache knows no time
                    self._found[file] = "".join(lines)
                case _:
                    self._found[file] = ""
        return self._found[file]


def restore_code(file: str, source: str, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """What `make(*args)` gives, and its cell where tracebacks look for it."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    if number and _numbers is not None:
        _numbers[file] = number
    return make(*args)
