"""Show failed cells: raise the cell's exception with the tracebacks of the ranks instead of the notebook's own frames.

Also names the variables that exist only in the notebook, and the `%distributed push` that copies them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator

from rankbook.coordinator.running_cell import RunningCell
from rankbook.errors import CellError, CellTimeout, RankbookError
from rankbook.output.cell_result import CellResult, describe_errors

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


def raise_cell_error(cell: RunningCell, result: CellResult, notebook_names: Collection[str] = ()) -> None:
    """Raise the exception of `result.raise_for_status` or `CellTimeout`, unless the cell succeeded.

    `notebook_names` are the names of the notebook's variables, for a hint about names that the ranks lack.
    """
    if result.ok:
        return
    text = describe_errors(result.outcomes) + _describe_notebook_names(result, notebook_names)
    if cell.timed_out is not None:
        _raise_with_text(CellTimeout(f"{cell.label} was interrupted after --timeout {cell.timed_out:g} s"), text)
    try:
        result.raise_for_status()
    except (KeyboardInterrupt, RankbookError) as error:
        _raise_with_text(error, text)


def _describe_notebook_names(result: CellResult, notebook_names: Collection[str]) -> str:
    """Return a line about undefined names that are the notebook's variables, which ranks do not see; empty if none."""
    undefined = (_UNDEFINED.match(error.value) for error in result.errors.values() if error.name == "NameError")
    names = sorted({match[1] for match in undefined if match and match[1] in notebook_names})
    if not names:
        return ""
    predicate, pronoun = ("is a variable", "it") if len(names) == 1 else ("are variables", "them")
    push = f"%distributed push {' '.join(names)}"
    return f"\n{', '.join(names)} {predicate} of the notebook: {push} copies {pronoun} to the ranks"


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Let IPython show Rankbook's own errors as their text only, without a Python traceback."""
    # IPython and pytest omit frames that have this local variable.
    __tracebackhide__ = True
    try:
        yield
    except RankbookError as error:
        # IPython shows what this method returns in place of a traceback. An error of a cell has its own text already.
        if not hasattr(error, "_render_traceback_"):
            lines = f"{type(error).__name__}: {error}".splitlines()
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise


def _raise_with_text(error: BaseException, text: str) -> None:
    if isinstance(error, CellTimeout):
        text = f"{error}\n{text}"
    # For an instance of SyntaxError, IPython would ignore `_render_traceback_` and show our own frames.
    if isinstance(error, CellError) and SyntaxError in type(error).__mro__:
        error = type("SyntaxError", (CellError,), {})(error.message, error.errors)
    # `from None`: the notebook's own frames and causes say nothing about the user's code.
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    raise error from None
