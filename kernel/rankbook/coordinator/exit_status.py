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
from rankbook.formatting import signal_name
from rankbook.protocol.forkserver import JournalTail, RankExited
from rankbook.protocol.messages import Done, Text
from rankbook.transport.output_journal import journal_path, read_crash, read_journal
from rankbook.transport.serialization import cell_number

_CELL_FILE = re.compile(r'File "(<ipython-input-.*?|.*?/ipykernel_\d+/\d+\.py)"')
"""File name of a cell, in a rank's tracebacks and in ipykernel's debugger."""
_OWN_END = re.compile(r"exited with code |was killed by SIG(SEGV|BUS|ABRT|FPE|ILL|SYS|TRAP)\b")


@dataclass(frozen=True)
class CrashRemains:
    """Files left behind by a rank's process: the output journal's tails, and the stacks of a crash."""

    journal: tuple[JournalTail, ...] = ()
    crash: str = ""


def read_remains(message: RankExited, segments: str) -> CrashRemains:
    """Read and remove the files left behind by the rank's process."""
    # The process was never forked, so it has no files; or it ran on another host, whose agent has read them.
    if not segments:
        return CrashRemains(message.journal, message.crash)
    path = journal_path(Path(segments), message.rank, message.incarnation)
    return CrashRemains(tuple(read_journal(path)), read_crash(path))


def replay_remains(
    message: RankExited, remains: CrashRemains, cells: Mapping[int, RunningCell], running: RunningCell | None
) -> None:
    """Feed the cells the output that was sent but did not arrive, then the pipes' contents, then the crash stacks.

    The journal counts the bytes of a cell's stream, and `RunningCell.received_bytes` those that arrived; the difference
    is missing.
    """
    # In the order in which the rank wrote them: what it sent came before what is still in the pipes, and the crash
    # report is the last thing that a process writes.
    for tail in remains.journal:
        cell = cells.get(tail.cell)
        if cell is not None and (data := tail.missing(cell.received_bytes[message.rank, tail.stream])):
            cell.add_output(message.rank, Text(cell=cell.cell, stream=tail.stream, data=data))  # type: ignore[arg-type]
    if running is not None:
        # Only for a process that a signal has ended. After a regular exit the file is empty, or belongs to a crash that
        # was survived.
        crash = describe_crash(remains.crash).encode() if message.code < 0 else b""
        for stream, data in (("stdout", message.stdout), ("stderr", message.stderr), ("stderr", crash)):
            if data:
                running.add_output(message.rank, Text(cell=running.cell, stream=stream, data=data))  # type: ignore[arg-type]


def describe_crash(text: str) -> str:
    """Return faulthandler's report reduced to the frames of the cell, or all threads if it contains none.

    See https://docs.python.org/3/library/faulthandler.html: the frames of every thread, the innermost first.
    """
    if not text.strip():
        return ""
    # faulthandler separates threads by empty lines, after a heading such as `Fatal Python error: Segmentation fault`.
    heading, _, rest = text.strip().partition("\n\n")
    blocks = rest.partition("\n\nExtension modules:")[0].split("\n\n")
    for block in blocks:
        header, *frames = block.splitlines() or [""]
        # The thread that has crashed is marked as current. Its innermost frame comes first, so the frames after the
        # cell's last one are those of IPython and Rankbook.
        cells = [number for number, frame in enumerate(frames) if _CELL_FILE.search(frame)]
        if header.startswith("Current thread") and cells:
            lines = [_CELL_FILE.sub(_name_cell, frame) for frame in frames[: cells[-1] + 1]]
            return "\n".join([f"{heading}, innermost call first:", *lines]) + "\n"
    return "\n".join([heading, *blocks]).strip() + "\n"


def _name_cell(file: re.Match[str]) -> str:
    """Name a cell as tracebacks do. A cell of another notebook keeps its file name."""
    number = cell_number(file[1])
    return file[0] if number is None else f"Cell In[{number}]"


def describe_exit(message: RankExited) -> str:
    """Describe how a rank's process exited, worded to follow `rank 2`."""
    if message.reason:
        return message.reason
    if message.code >= 0:
        return f"exited with code {message.code}"
    # `subprocess` and `os.waitstatus_to_exitcode` report the end by a signal as its negative number.
    number = -message.code
    # The counter proves that the OOM killer has been at work in this control group, but not in which process. Without
    # it, the message only asks.
    if message.memory_kills > 0 and number == signal.SIGKILL:
        return "was killed by the operating system because memory ran out (SIGKILL)"
    hints = {
        signal.SIGKILL: " (out of memory?)",
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGBUS: " (bus error)",
    }
    return f"was killed by {signal_name(number)}{hints.get(number, '')}"  # type: ignore[call-overload]


def has_ended_itself(loss: str) -> bool:
    """Return True if a description by `describe_exit` is of a process that its own code has ended, as by a crash.

    Nobody ends a process by these exit codes and signals from outside.
    """
    return bool(_OWN_END.match(loss))


def describe_failure(done: Done, cell: RunningCell | None) -> str:
    """Describe an error, as in `raised ValueError at cell [5] line 3`; empty if the cell succeeded.

    A call has no lines of its own: `raised ValueError at line 3 of cell 2`.
    """
    if done.status == "ok":
        return ""
    name, line, memory = ("", None, "") if done.error is None else (done.error.name, done.error.line, done.error.memory)
    raised = "was interrupted" if done.status == "interrupted" else f"raised {name}"
    if memory and "MemoryError" not in name:  # torch has no error class for it on the CPU; peers look for these words
        raised += " (out of memory)"
    numbered = cell is not None and cell.number > 0
    positions = [cell.label if cell is not None and numbered else "", f"line {line}" if line is not None else ""]
    position = " ".join(filter(None, positions))
    # A call has no number, so the place of the innermost line of the user's code is named instead.
    if not numbered and done.error is not None and done.error.place:
        position = done.error.place
    return raised + (f" at {position}" if position else "")
