"""How a cell's failure looks in the notebook.

Owns: the exceptions that end a cell, with the ranks' tracebacks in place of our own. Refuses: the words (results.py).
"""

from __future__ import annotations

from rankbook.coordinator.cell import Cell
from rankbook.errors import CellError, CellTimeout, RankbookError
from rankbook.results import CellResult, describe_errors


def raise_for(cell: Cell, result: CellResult) -> None:
    """Raise what `result.raise_for_status` does, or `CellTimeout`, unless it went well."""
    if result.ok:
        return
    text = describe_errors(result.outcomes)
    if cell.timed_out is not None:
        _raise_shown(CellTimeout(f"{cell.label} was interrupted after --timeout {cell.timed_out:g} s"), text)
    try:
        result.raise_for_status()
    except (KeyboardInterrupt, RankbookError) as error:
        _raise_shown(error, text)


def _raise_shown(error: BaseException, text: str) -> None:
    if isinstance(error, CellTimeout):
        text = f"{error}\n{text}"
    if isinstance(error, CellError) and SyntaxError in type(error).__mro__:  # for these IPython shows our own frames
        error = type("SyntaxError", (CellError,), {})(error.message, error.errors)
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    raise error from None
