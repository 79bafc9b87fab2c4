"""How a cell's failure looks in the notebook.

Owns: the exceptions that end a cell, with the ranks' tracebacks in place of our own, and what is said of names that
only the notebook has. Refuses: the other words (results.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rankbook.coordinator.running_cell import RunningCell
from rankbook.errors import CellError, CellTimeout, RankbookError
from rankbook.output.cell_result import CellResult, describe_errors

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


def raise_cell_error(cell: RunningCell, result: CellResult, own: Collection[str] = ()) -> None:
    """Raise what `result.raise_for_status` does, or `CellTimeout`, unless it went well.

    `own`: the notebook's variables. Of one that the ranks lack it is said how they get it.
    """
    if result.ok:
        return
    text = describe_errors(result.outcomes) + _only_here(result, own)
    if cell.timed_out is not None:
        _raise_shown(CellTimeout(f"{cell.label} was interrupted after --timeout {cell.timed_out:g} s"), text)
    try:
        result.raise_for_status()
    except (KeyboardInterrupt, RankbookError) as error:
        _raise_shown(error, text)


def _only_here(result: CellResult, own: Collection[str]) -> str:
    """That a name is the notebook's, whose variables the ranks do not see: a line of its own, or nothing."""
    lacking = (_UNDEFINED.match(each.value) for each in result.errors.values() if each.name == "NameError")
    names = sorted({each[1] for each in lacking if each and each[1] in own})
    if not names:
        return ""
    what, it = ("is a variable", "it") if len(names) == 1 else ("are variables", "them")
    push = f"%distributed push {' '.join(names)}"
    return f"\n{', '.join(names)} {what} of the notebook: {push} copies {it} to the ranks"


def _raise_shown(error: BaseException, text: str) -> None:
    if isinstance(error, CellTimeout):
        text = f"{error}\n{text}"
    if isinstance(error, CellError) and SyntaxError in type(error).__mro__:  # for these IPython shows our own frames
        error = type("SyntaxError", (CellError,), {})(error.message, error.errors)
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    raise error from None
