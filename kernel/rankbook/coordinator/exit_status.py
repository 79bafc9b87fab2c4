"""Description of how a rank exited or a cell failed on it, and recovery of the rank's last output.

The output of a crashed rank that never arrived is in three places: its output journal, the pipes of its process (read
by the forkserver), and the stacks that Python's faulthandler wrote.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankbook.coordinator.running_cell import RunningCell
from rankbook.protocol.forkserver import RankExited
from rankbook.protocol.messages import Done, Text
from rankbook.transport.cell_sources import cell_number
from rankbook.transport.output_journal import JournalTail, journal_path, read_crash, read_journal

_OF_A_CELL = re.compile(r'File "(<ipython-input-.*?|.*?/ipykernel_\d+/\d+\.py)"')
"""File name of a cell, in a rank's tracebacks and in ipykernel's debugger."""


@dataclass(frozen=True)
class CrashRemains:
    """Files left behind by a rank's process: the output journal's tails, and the stacks of a crash."""

    said: tuple[JournalTail, ...] = ()
    crash: str = ""


def read_remains(message: RankExited, segments: str) -> CrashRemains:
    """Read and remove the files left behind by the rank's process."""
    if not segments:
        return CrashRemains()
    path = journal_path(Path(segments), message.rank, message.incarnation)
    return CrashRemains(tuple(read_journal(path)), read_crash(path))


def replay_remains(
    message: RankExited, left: CrashRemains, cells: Mapping[int, RunningCell], running: RunningCell | None
) -> None:
    """Feed the cells the output that was sent but did not arrive, then the pipes' contents, then the crash stacks.

    The journal counts the bytes of a cell's stream, and `RunningCell.heard` those that arrived; the difference is
    missing.
    """
    for tail in left.said:
        cell = cells.get(tail.cell)
        if cell is not None and (data := tail.missing(cell.heard[message.rank, tail.stream])):
            cell.feed(message.rank, Text(cell=cell.cell, stream=tail.stream, data=data))  # type: ignore[arg-type]
    if running is not None:
        crash = describe_crash(left.crash).encode() if message.code < 0 else b""
        for stream, data in (("stdout", message.stdout), ("stderr", message.stderr), ("stderr", crash)):
            if data:
                running.feed(message.rank, Text(cell=running.cell, stream=stream, data=data))  # type: ignore[arg-type]


def describe_crash(text: str) -> str:
    """Return faulthandler's report reduced to the frames of the cell, or all threads if it contains none.

    See https://docs.python.org/3/library/faulthandler.html: the frames of every thread, the innermost first.
    """
    if not text.strip():
        return ""
    heading, _, rest = text.strip().partition("\n\n")
    blocks = rest.partition("\n\nExtension modules:")[0].split("\n\n")
    for block in blocks:
        head, *frames = block.splitlines() or [""]
        cells = [number for number, frame in enumerate(frames) if _OF_A_CELL.search(frame)]
        if head.startswith("Current thread") and cells:
            lines = [_OF_A_CELL.sub(_name_cell, frame) for frame in frames[: cells[-1] + 1]]
            return "\n".join([f"{heading}, innermost call first:", *lines]) + "\n"
    return "\n".join([heading, *blocks]).strip() + "\n"


def _name_cell(file: re.Match[str]) -> str:
    """Name a cell as tracebacks do. A cell of another notebook keeps its file name."""
    number = cell_number(file[1])
    return file[0] if number is None else f"Cell In[{number}]"


def describe_exit(message: RankExited) -> str:
    """Describe how a rank's process exited, worded to follow `rank 2`."""
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


def describe_failure(done: Done, cell: RunningCell | None) -> str:
    """Describe an error, as in `raised ValueError at cell [5] line 3`; empty if the cell succeeded."""
    if done.status == "ok":
        return ""
    name, line, memory = ("", None, "") if done.error is None else (done.error.name, done.error.line, done.error.memory)
    raised = "was interrupted" if done.status == "interrupted" else f"raised {name}"
    if memory and "MemoryError" not in name:  # torch has no error class for it on the CPU; peers look for these words
        raised += " (out of memory)"
    numbered = cell is not None and cell.number > 0
    places = [cell.label if cell is not None and numbered else "", f"line {line}" if line is not None else ""]
    where = " ".join(filter(None, places))
    return raised + (f" at {where}" if where else "")
