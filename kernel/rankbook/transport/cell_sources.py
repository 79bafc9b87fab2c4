"""Sources of notebook cells, pickled along with the functions that were defined in them.

With them, a traceback in another process shows the lines of the cell. Functions from files bring no source: it is read
from the file where it is needed.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from typing import Any

_numbers: dict[str, int] | None = None


def set_cell_numbers(numbers: dict[str, int]) -> None:
    """Use IPython's table of cell numbers by file name. Cells that arrive from other processes are added to it."""
    global _numbers
    _numbers = numbers


def cell_number(file: str) -> int | None:
    """Return the number of the cell with this file name, or None for any other file."""
    return None if _numbers is None else _numbers.get(file)


class CellSources:
    """The cells of one pickle, which contains their sources once."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def reduce(self, code: types.CodeType, plain: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the reduction `plain` of `code`, extended by the source of its cell if it comes from one."""
        source = self._source_of(code.co_filename)
        if not source:
            return plain
        return restore_code, (code.co_filename, source, cell_number(code.co_filename) or 0, *plain)

    def _source_of(self, file: str) -> str:
        if file not in self._found:
            match linecache.cache.get(file):
                case (_, None, lines, _):  # linecache has no modification time for a source without a file
                    self._found[file] = "".join(lines)
                case _:
                    self._found[file] = ""
        return self._found[file]


def restore_code(file: str, source: str, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """Return `make(*args)` and register the source of its cell for tracebacks."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    if number and _numbers is not None:
        _numbers[file] = number
    return make(*args)
