"""How a rank's process ended, and how a cell ended on a rank: in words, and its last output.

Owns: the words, and what of the output was still on its way. Refuses: to decide what follows.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from rankbook.coordinator.cell import Cell
from rankbook.messages import Done, RankExited, Text
from rankbook.transport.last_words import Said, take_last_words, words_of


def sent_last(message: RankExited, segments: str) -> list[Said]:
    """What the rank has taken out of its pipes last; its file is removed."""
    return [*take_last_words(words_of(Path(segments), message.rank, message.incarnation))] if segments else []


def feed_last(message: RankExited, sent: list[Said], cells: Mapping[int, Cell], running: Cell | None) -> None:
    """Give the cells what the rank sent and never came, and then what it left in its pipes."""
    for said in sent:
        cell = cells.get(said.cell)
        if cell is not None and (data := said.missing(cell.heard[message.rank, said.stream])):
            cell.feed(message.rank, Text(cell=cell.cell, stream=said.stream, data=data))  # type: ignore[arg-type]
    if running is not None:
        for stream, data in (("stdout", message.stdout), ("stderr", message.stderr)):
            if data:
                running.feed(message.rank, Text(cell=running.cell, stream=stream, data=data))  # type: ignore[arg-type]


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
