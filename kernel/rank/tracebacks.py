"""Errors for people: the user's frames, with the cell's lines, and one line for what lies between.

Owns: what is left out of a traceback. Refuses: to print.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbook.messages import ErrorReport, Frame

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OURS = (str(Path(__file__).parent.parent), str(Path(__file__).resolve().parent.parent))
_LIBRARIES = tuple({*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"})
_DEBUGGER = str(Path("debugpy", "_vendored", "pydevd"))
_MOST_FRAMES = 12


def is_users(file: str) -> bool:
    """Whether a file is the user's own: a cell or a module of theirs, not a library's."""
    return not file.startswith((*_LIBRARIES, *_OURS)) and "site-packages" not in file


def report(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int = 0) -> ErrorReport:
    """Tell `error`, and at which line of cell `number` it was. `cells`: the numbers of cells by their file names."""
    shortened, hidden = _shorten(error.__traceback__)
    try:
        value = str(error)
    except Exception as failure:  # noqa: BLE001 - the user's __str__ may do anything; what it did is said
        value = f"<{type(failure).__name__} while this {type(error).__name__} was put into words>"
    if isinstance(error, SyntaxError):
        hidden, value = 0, str(error.msg)  # what else it says, the traceback shows
        text = "\n".join(shell.SyntaxTB.structured_traceback(type(error), error, None))
    else:
        try:
            text = "\n".join(shell.InteractiveTB.structured_traceback(type(error), error, shortened, tb_offset=0))
        except Exception as failure:  # noqa: BLE001 - told below: an error must arrive whatever its repr does
            text = f"{type(error).__name__}: {value}\n(no traceback: {type(failure).__name__} while it was made)"
    if hidden:
        text += (
            "\n(1 frame of a library is left out)" if hidden == 1 else f"\n({hidden} frames of libraries are left out)"
        )
    return ErrorReport(
        name=type(error).__name__,
        value=value,
        traceback=text,
        plain=_ANSI.sub("", text),
        line=_cell_line(error, cells, number),
    )


def _shorten(traceback: types.TracebackType | None) -> tuple[types.TracebackType | None, int]:
    """The user's frames and the innermost one, at most `_MOST_FRAMES`; and how many others there were."""
    entries: list[types.TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for place, entry in enumerate(entries):
        if "pydevd" in entry.tb_frame.f_code.co_filename:  # interrupted while it was paused in the debugger
            del entries[place:]
            if place > 1 and entries[-1].tb_frame is entries[-2].tb_frame:  # once for the line, once for its tracing
                entries.pop()
            break
    while entries and entries[-1].tb_frame.f_code.co_filename.startswith(_OURS):
        entries.pop()  # an interrupt is raised in a handler of ours
    first = next((i for i, entry in enumerate(entries) if is_users(entry.tb_frame.f_code.co_filename)), 0)
    entries = entries[first:]
    kept = [e for i, e in enumerate(entries) if i == len(entries) - 1 or is_users(e.tb_frame.f_code.co_filename)]
    if len(kept) > _MOST_FRAMES:
        kept = [*kept[: _MOST_FRAMES // 2], *kept[-_MOST_FRAMES // 2 :]]
    chain: types.TracebackType | None = None
    for entry in reversed(kept):
        chain = types.TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain, len(entries) - len(kept)


def _cell_line(error: BaseException, cells: dict[str, int], number: int) -> int | None:
    if isinstance(error, SyntaxError) and _is_of(error.filename, cells, number):
        return error.lineno
    found: int | None = None
    traceback = error.__traceback__
    while traceback is not None:
        if _is_of(traceback.tb_frame.f_code.co_filename, cells, number):
            found = traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def _is_of(file: str | None, cells: dict[str, int], number: int) -> bool:
    """Whether the file is that cell, or for number 0 any cell: a function of another cell has lines of its own."""
    return file in cells and number in (0, cells[file])


def main_thread_frames(cells: dict[str, int]) -> tuple[Frame, ...]:
    """The main thread's stack below the outermost user's frame, outermost first; a cell's file is `Cell In[5]`."""
    import linecache

    ident = threading.main_thread().ident
    frame: Any = sys._current_frames().get(ident) if ident is not None else None
    found: list[Frame] = []
    while frame is not None:
        code = frame.f_code
        file = f"Cell In[{cells[code.co_filename]}]" if code.co_filename in cells else code.co_filename
        line = _line(frame)
        source = linecache.getline(code.co_filename, line).strip()
        found.insert(0, Frame(file=file, line=line, function=code.co_name, source=source))
        if _DEBUGGER in code.co_filename:
            found.clear()  # what it does there, while the rank is paused, is no part of the stack
        frame = frame.f_back
    first = next((i for i, each in enumerate(found) if each.file.startswith("Cell In[")), None)
    return tuple(found[first:]) if first is not None else tuple(each for each in found if is_users(each.file))


def main_thread_line(cells: dict[str, int], number: int = 0) -> int | None:
    """The line of cell `number` that the main thread is at, the innermost such; 0: of any cell. Any thread."""
    ident = threading.main_thread().ident
    frame: Any = sys._current_frames().get(ident) if ident is not None else None
    while frame is not None and not _is_of(frame.f_code.co_filename, cells, number):
        frame = frame.f_back
    return None if frame is None else _line(frame)


def _line(frame: types.FrameType) -> int:
    """The line a frame is at. The jump back in a loop may have none of its own: then that of what stands before it."""
    here: int | None = frame.f_lineno
    if here is not None:
        return here
    lines = [line for start, _, line in frame.f_code.co_lines() if start <= frame.f_lasti and line is not None]
    return lines[-1] if lines else frame.f_code.co_firstlineno
