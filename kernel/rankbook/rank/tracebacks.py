"""Error reports with short tracebacks: the user's frames, and a count of the library frames left out.

An error's class is user code, which may raise, return odd types, or run for long. So the error's built-in attributes
are read through `BaseException`'s own descriptors, strings are converted to plain `str`, and the functions that call
user code say so.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbook.formatting import strip_ansi
from rankbook.package_folders import PACKAGE_FOLDERS
from rankbook.protocol.messages import ErrorReport, Frame

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_LIBRARIES = tuple({*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"})
_DEBUGGER = str(Path("debugpy", "_vendored", "pydevd"))
_MOST_FRAMES = 12
_MOST_VALUE, _MOST_TEXT = 32 << 10, 256 << 10
"""Maximum characters of an error's message, and of its traceback."""
_MOST_LINES = 1 << 31
_class_name = type.__dict__["__name__"].__get__
_own_traceback = BaseException.__dict__["__traceback__"].__get__
_own_cause = BaseException.__dict__["__cause__"].__get__
_own_context = BaseException.__dict__["__context__"].__get__
_own_members = BaseExceptionGroup.__dict__["exceptions"].__get__


def is_users(file: str) -> bool:
    """Return True if a file is the user's: a cell or module of theirs, not part of a library."""
    return not file.startswith((*_LIBRARIES, *PACKAGE_FOLDERS)) and "site-packages" not in file


def text_of(value: object) -> str:
    """Return `str(value)` as a plain `str`.

    A subclass of `str` could run user code wherever it is used.
    """
    return str.__str__(str(value))


def name_of(error: BaseException) -> str:
    """Return the name of the error's class. Bypasses a metaclass."""
    return str.__str__(_class_name(type(error)))


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return the error's `__traceback__`. Bypasses overrides."""
    found: types.TracebackType | None = _own_traceback(error)
    return found


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error's `__cause__`. Bypasses overrides."""
    found: BaseException | None = _own_cause(error)
    return found


def context_of(error: BaseException) -> BaseException | None:
    """Return the error's `__context__`. Bypasses overrides."""
    found: BaseException | None = _own_context(error)
    return found


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; an empty tuple for other errors."""
    found: tuple[BaseException, ...] = _own_members(error) if issubclass(type(error), BaseExceptionGroup) else ()
    return found


def error_report(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int = 0) -> ErrorReport:
    """Return the report of `error`, with a traceback and the line of cell `number` where it was raised.

    `cells` maps the file names of cells to their numbers. Calls user code (`__str__`); raises KeyboardInterrupt if that
    does.
    """
    name = name_of(error)
    shortened, hidden = _shorten(traceback_of(error))
    value = value_of(error)
    try:
        if issubclass(type(error), SyntaxError):
            hidden, value = 0, text_of(error.msg)  # type: ignore[attr-defined] # the traceback shows the rest
            lines = shell.SyntaxTB.structured_traceback(type(error), error, None)
        else:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, shortened, tb_offset=0)
        text = "\n".join(map(text_of, lines))
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - named in the text: every error needs a report
        text = f"{name}: {value}\n(no traceback: {name_of(failure)} while it was made)"
    if hidden:
        text += (
            "\n(1 frame of a library is left out)" if hidden == 1 else f"\n({hidden} frames of libraries are left out)"
        )
    return as_report(name, value, text, _cell_line(error, cells, number))


def one_line_error(error: BaseException) -> ErrorReport:
    """Return a report of `error` without a traceback.

    Calls user code; raises KeyboardInterrupt if that does.
    """
    name = name_of(error)
    value = value_of(error)
    return as_report(name, value, f"{name}: {value}".removesuffix(": "), None)


def brief_report(
    error: BaseException, failure: BaseException | None, cells: dict[str, int], number: int = 0
) -> ErrorReport:
    """Return a report of `error` without calling user code.

    `failure` is the exception that ended the attempt to make a full report.
    """
    name, value = name_of(error), ""
    if failure is not None and failure is not error:
        value = _no_words(failure, name)
    line = _line_in(traceback_of(error), cells, number)
    return as_report(name, value, f"{name}: {value}".removesuffix(": "), line)


def value_of(error: BaseException) -> str:
    """Return the error's message, or a note why it has none.

    Calls user code; raises KeyboardInterrupt if that does.
    """
    try:
        return text_of(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - the user's __str__ may raise anything; its error is named
        return _no_words(failure, name_of(error))


def _no_words(failure: BaseException, name: str) -> str:
    return f"<{name_of(failure)} while this {name} was put into words>"


def as_report(name: str, value: str, text: str, line: int | None) -> ErrorReport:
    """Return an `ErrorReport`; `text` is its traceback. Long texts are truncated."""
    text = _cut(text, _MOST_TEXT)
    return ErrorReport(
        name=_cut(name, _MOST_VALUE), value=_cut(value, _MOST_VALUE), traceback=text, plain=strip_ansi(text), line=line
    )


def _cut(text: str, most: int) -> str:
    """Return `text`, reduced to its beginning and end if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half:,} characters left out here) …\n{text[-half:]}"


def _shorten(traceback: types.TracebackType | None) -> tuple[types.TracebackType | None, int]:
    """Return a traceback of the user's frames and the innermost frame, and the number of frames left out.

    At most `_MOST_FRAMES` frames, the outermost and the innermost ones. Frames above the user's first one are not
    counted.
    """
    entries: list[types.TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for index, entry in enumerate(entries):
        if "pydevd" in entry.tb_frame.f_code.co_filename:  # interrupted while paused in the debugger
            del entries[index:]
            if index > 1 and entries[-1].tb_frame is entries[-2].tb_frame:  # one for the line, one for its tracing
                entries.pop()
            break
    while entries and entries[-1].tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDERS):
        entries.pop()  # KeyboardInterrupt is raised in our signal handler
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
    if issubclass(type(error), SyntaxError):
        file, line = error.filename, error.lineno  # type: ignore[attr-defined]
        if type(file) is str and type(line) is int and 0 < line < _MOST_LINES and _is_of(file, cells, number):
            return line
    return _line_in(traceback_of(error), cells, number)


def _line_in(traceback: types.TracebackType | None, cells: dict[str, int], number: int) -> int | None:
    """Return the innermost line of cell `number` in a traceback."""
    line: int | None = None
    while traceback is not None:
        if _is_of(traceback.tb_frame.f_code.co_filename, cells, number):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _is_of(file: str | None, cells: dict[str, int], number: int) -> bool:
    """Return True if the file is cell `number`, or any cell if `number` is 0.

    A function that another cell defined has that cell's line numbers.
    """
    return file in cells and number in (0, cells[file])


def main_thread_frames(cells: dict[str, int]) -> tuple[Frame, ...]:
    """Return the main thread's stack from the first frame of a cell on, outermost first.

    Without a cell's frame, return the user's frames. The file of a cell is `Cell In[5]`. Any thread.
    """
    import linecache

    ident = threading.main_thread().ident
    frame: Any = sys._current_frames().get(ident) if ident is not None else None
    frames: list[Frame] = []
    while frame is not None:
        code = frame.f_code
        file = f"Cell In[{cells[code.co_filename]}]" if code.co_filename in cells else code.co_filename
        line = _line(frame)
        source = linecache.getline(code.co_filename, line).strip()
        frames.insert(0, Frame(file=file, line=line, function=code.co_name, source=source))
        if _DEBUGGER in code.co_filename:
            frames.clear()  # the debugger's own frames, while the rank is paused
        frame = frame.f_back
    first = next((i for i, entry in enumerate(frames) if entry.file.startswith("Cell In[")), None)
    return tuple(frames[first:]) if first is not None else tuple(entry for entry in frames if is_users(entry.file))


def main_thread_line(cells: dict[str, int], number: int = 0) -> int | None:
    """Return the innermost line of cell `number`, or of any cell if 0, that the main thread executes. Any thread."""
    ident = threading.main_thread().ident
    frame: Any = sys._current_frames().get(ident) if ident is not None else None
    while frame is not None and not _is_of(frame.f_code.co_filename, cells, number):
        frame = frame.f_back
    return None if frame is None else _line(frame)


def _line(frame: types.FrameType) -> int:
    """Return the line of a frame.

    The jump at the end of a loop may have no line; then return the line of the instruction before it.
    """
    current: int | None = frame.f_lineno
    if current is not None:
        return current
    lines = [line for start, _, line in frame.f_code.co_lines() if start <= frame.f_lasti and line is not None]
    return lines[-1] if lines else frame.f_code.co_firstlineno
