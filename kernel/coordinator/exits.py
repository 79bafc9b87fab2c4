"""How a rank's process ended, and how a cell ended on a rank, in words.

Owns: the words. Refuses: to find out.
"""

from __future__ import annotations

import signal

from rankbook.coordinator.cell import Cell
from rankbook.messages import Done, RankExited


def describe_exit(message: RankExited) -> str:
    """How a rank ended, in plain words, to stand behind `rank 2`."""
    if message.code >= 0:
        return f"exited with code {message.code}"
    number = -message.code
    if message.memory_kills > 0 and number == signal.SIGKILL:
        return "was killed by the kernel because memory ran out (signal 9)"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hints = {
        signal.SIGKILL: " (out of memory?)",
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGBUS: " (bus error)",
    }
    return f"was killed by signal {number}{hints.get(number, f' ({name})')}"  # type: ignore[call-overload]


def describe_failure(done: Done, cell: Cell | None) -> str:
    """How a cell went wrong on a rank, as in `raised ValueError at cell [5] line 3`; empty if it went well."""
    if done.status == "ok":
        return ""
    raised = "was interrupted" if done.status == "interrupted" else f"raised {done.error.name if done.error else ''}"
    line = None if done.error is None else done.error.line
    numbered = cell is not None and cell.number > 0
    places = [cell.label if cell is not None and numbered else "", f"line {line}" if line is not None else ""]
    where = " ".join(filter(None, places))
    return raised + (f" at {where}" if where else "")
