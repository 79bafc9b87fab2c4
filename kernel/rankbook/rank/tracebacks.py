"""Error reports with short tracebacks: the user's frames, and a count of the library frames left out.

An error's class is user code, which may raise, return odd types, or run for long. So the error's built-in attributes
are read through `BaseException`'s own descriptors, strings are converted to plain `str`, and the functions that call
user code say so.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import linecache
import os
import sys
import threading
import tokenize
import traceback as tb
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rankbook.formatting import PACKAGE_FOLDERS, is_users, strip_ansi
from rankbook.ipython_compat import IS_IPYTHON_7, name_cells
from rankbook.protocol.messages import ErrorReport, Frame

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_DEBUGGER = str(Path("debugpy", "_vendored", "pydevd"))
_MAX_FRAMES = 12
_MAX_VALUE, _MAX_TEXT = 32 << 10, 256 << 10
"""Maximum characters of an error's message, and of its traceback."""
_MAX_PLACE = 200
_MAX_LINES = 1 << 31
# The descriptors of the built-in classes themselves, taken before any user code runs. `error.__traceback__` would call
# a property that the user's class defines.
_class_name = type.__dict__["__name__"].__get__
_get_traceback = BaseException.__dict__["__traceback__"].__get__
_get_cause = BaseException.__dict__["__cause__"].__get__
_get_context = BaseException.__dict__["__context__"].__get__
_get_members = BaseExceptionGroup.__dict__["exceptions"].__get__


def text_of(value: object) -> str:
    """Return `str(value)` as a plain `str`.

    A subclass of `str` could run user code wherever it is used.
    """
    # `str()` may return an instance of a subclass, which `str.__str__` turns into a plain string.
    return str.__str__(str(value))


def name_of(error: BaseException) -> str:
    """Return the name of the error's class. Bypasses a metaclass."""
    return str.__str__(_class_name(type(error)))


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return the error's `__traceback__`. Bypasses overrides."""
    traceback: types.TracebackType | None = _get_traceback(error)
    return traceback


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error's `__cause__`. Bypasses overrides."""
    cause: BaseException | None = _get_cause(error)
    return cause


def context_of(error: BaseException) -> BaseException | None:
    """Return the error's `__context__`. Bypasses overrides."""
    context: BaseException | None = _get_context(error)
    return context


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; an empty tuple for other errors."""
    members: tuple[BaseException, ...] = _get_members(error) if issubclass(type(error), BaseExceptionGroup) else ()
    return members


def referenced_errors(error: BaseException) -> list[BaseException]:
    """Return the error and all exceptions that it references: causes, contexts and members of groups."""
    exceptions: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        exception = waiting.pop()
        if exception is not None and all(exception is not other for other in exceptions):
            exceptions.append(exception)
            waiting += [cause_of(exception), context_of(exception), *members_of(exception)]
    return exceptions


def error_report(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int = 0) -> ErrorReport:
    """Return the report of `error`, with a traceback and the line of cell `number` where it was raised.

    `cells` maps the file names of cells to their numbers. Calls user code (`__str__`); raises KeyboardInterrupt if that
    does.
    """
    name = name_of(error)
    shortened, hidden = _shorten(traceback_of(error))
    value = value_of(error)
    try:
        _parse_no_libraries()
        # A SyntaxError carries its own place, in attributes. IPython has another formatter for it.
        if issubclass(type(error), SyntaxError):
            value = text_of(error.msg)  # type: ignore[attr-defined] # the traceback shows the rest
            if not any(is_users(frame.f_code.co_filename) for frame, _ in tb.walk_tb(shortened)):
                shortened, hidden = None, _Hidden()  # the cell itself, which IPython has compiled
            lines = shell.SyntaxTB.structured_traceback(type(error), error, shortened, tb_offset=0)
        elif any(issubclass(type(each), BaseExceptionGroup) for each in referenced_errors(error)):
            # IPython does not show the members of a group.
            lines = [_format_group(error, shortened, cells)]
        else:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, shortened, tb_offset=0)
        text = name_cells("\n".join(map(text_of, lines)), cells)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - named in the text: every error needs a report
        text = f"{name}: {value}\n(no traceback: {name_of(failure)} while formatting it)"
    if hidden.libraries or hidden.own:
        text += f"\n({hidden})"
    line = _cell_line(error, cells, number)
    return as_report(name, value, text, line, _innermost_place(traceback_of(error), cells, number))


@cache
def _parse_no_libraries() -> None:
    """Make IPython's formatter parse only the function of a library's frame, and keep nothing of it.

    It would parse the whole file and keep the syntax tree: 16 MB and 0.3 s for torch's `distributed_c10d.py`. What it
    shows of a function stays the same.
    """
    if IS_IPYTHON_7:
        return  # its formatter does not parse
    from stack_data.core import Source

    stock = Source.executing
    uncached = inspect.unwrap(Source.statements_at_line)  # the cache would keep the source

    def executing(place: types.TracebackType | types.FrameType) -> object:
        frame = place.tb_frame if isinstance(place, types.TracebackType) else place
        if is_users(frame.f_code.co_filename):
            return stock(place)

        # A new class for every frame, because `stock` keeps what it finds in attributes of the class.
        class LibrarySource(Source):
            statements_at_line = uncached

            @classmethod
            def for_frame(cls, frame: types.FrameType, *_: object) -> LibrarySource:
                code = frame.f_code
                linecache.checkcache(code.co_filename)
                lines = linecache.getlines(code.co_filename, frame.f_globals)
                function = _function_lines(code, lines)
                source = cls(code.co_filename, function)
                if not function:
                    # Without a syntax tree, the lines around the current one are shown.
                    source.tree, source.lines = None, [line.rstrip("\r\n") for line in lines]
                return source

            def code_qualname(self, code: types.CodeType) -> str:
                return code.co_qualname

        return stock.__func__(LibrarySource, place)  # type: ignore[attr-defined]

    Source.executing = executing  # type: ignore[method-assign, assignment]


def _function_lines(code: types.CodeType, lines: list[str]) -> list[str]:
    """Return the lines of a file up to the end of a function, with the lines before the function empty.

    Empty if `code` is not that of a `def`, or does not match the file.
    """
    first = code.co_firstlineno
    if not (code.co_flags & inspect.CO_OPTIMIZED and code.co_name.isidentifier()):
        return []
    try:
        block = inspect.getblock(lines[first - 1 :])
    except (SyntaxError, tokenize.TokenError):
        return []
    if not block or any(line is not None and line >= first + len(block) for _, _, line in code.co_lines()):
        return []  # the file has changed since it was imported
    before = ["\n"] * (first - 1)
    if block[0][:1].isspace():
        before[-1:] = ["if True:\n"]  # an indented function is not valid by itself
    return [*before, *block]


def _format_group(error: BaseException, shortened: types.TracebackType | None, cells: dict[str, int]) -> str:
    """Return the traceback of an error with exception groups, as Python writes it."""
    text = "".join(tb.format_exception(type(error), error, shortened)).rstrip("\n")
    for file, number in cells.items():
        text = text.replace(f'File "{file}"', f"Cell In[{number}]")
    return text


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
        value = _unprintable(failure, name)
    line = _line_in(traceback_of(error), cells, number)
    location = _innermost_place(traceback_of(error), cells, number)
    return as_report(name, value, f"{name}: {value}".removesuffix(": "), line, location)


def value_of(error: BaseException) -> str:
    """Return the error's message, or a note why it has none.

    Calls user code; raises KeyboardInterrupt if that does.
    """
    try:
        return text_of(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 - the user's __str__ may raise anything; its error is named
        return _unprintable(failure, name_of(error))


def _unprintable(failure: BaseException, name: str) -> str:
    return f"<{name_of(failure)} while formatting this {name}>"


def as_report(name: str, value: str, text: str, line: int | None, place: str = "") -> ErrorReport:
    """Return an `ErrorReport`; `text` is its traceback. Long texts are truncated."""
    # A message can be as long as a tensor's repr. Every rank would send and keep it.
    text = _shorten_text(text, _MAX_TEXT)
    return ErrorReport(
        name=_shorten_text(name, _MAX_VALUE),
        value=_shorten_text(value, _MAX_VALUE),
        traceback=text,
        plain=strip_ansi(text),
        line=line,
        place=_shorten_text(place, _MAX_PLACE),
    )


def _shorten_text(text: str, most: int) -> str:
    """Return `text`, reduced to its beginning and end if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half_length = most // 2
    return (
        f"{text[:half_length]}\n… ({len(text) - 2 * half_length:,} characters left out here) …\n{text[-half_length:]}"
    )


@dataclass(frozen=True)
class _Hidden:
    """Numbers of frames that a traceback leaves out: those of libraries, and the user's own."""

    libraries: int = 0
    own: int = 0

    def __str__(self) -> str:
        if not self.own:
            one = self.libraries == 1
            return "1 frame of a library is left out" if one else f"{self.libraries} frames of libraries are left out"
        libraries = f" and {self.libraries} of libraries" if self.libraries else ""
        return f"{self.own} of your frames{libraries} are left out"


def _shorten(traceback: types.TracebackType | None) -> tuple[types.TracebackType | None, _Hidden]:
    """Return a traceback of the user's frames and the innermost frame, and the numbers of frames left out.

    At most `_MAX_FRAMES` frames, the outermost and the innermost ones. Frames above the user's first one are not
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
    # The frames above the user's first one are IPython's and ours.
    first = next((i for i, entry in enumerate(entries) if is_users(entry.tb_frame.f_code.co_filename)), 0)
    entries = entries[first:]
    # The innermost frame stays even if it is a library's: it is where the error was raised.
    shortened = [e for i, e in enumerate(entries) if i == len(entries) - 1 or is_users(e.tb_frame.f_code.co_filename)]
    libraries, own = len(entries) - len(shortened), max(0, len(shortened) - _MAX_FRAMES)
    if own:
        shortened = [*shortened[: _MAX_FRAMES // 2], *shortened[-_MAX_FRAMES // 2 :]]
    chain: types.TracebackType | None = None
    # A traceback object is a linked list that cannot be shortened in place, so a new one is built from its end.
    for entry in reversed(shortened):
        chain = types.TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain, _Hidden(libraries, own)


def _cell_line(error: BaseException, cells: dict[str, int], number: int) -> int | None:
    if issubclass(type(error), SyntaxError):
        file, line = error.filename, error.lineno  # type: ignore[attr-defined]
        # A user may raise a SyntaxError with any values in these attributes.
        if type(file) is str and type(line) is int and 0 < line < _MAX_LINES and _is_cell(file, cells, number):
            return line
    return _line_in(traceback_of(error), cells, number)


def _line_in(traceback: types.TracebackType | None, cells: dict[str, int], number: int) -> int | None:
    """Return the innermost line of cell `number` in a traceback."""
    line: int | None = None
    # To the end of the chain, because the innermost line of the cell is wanted: the last call that it has made.
    while traceback is not None:
        if _is_cell(traceback.tb_frame.f_code.co_filename, cells, number):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _innermost_place(traceback: types.TracebackType | None, cells: dict[str, int], number: int) -> str:
    """Return the innermost line of the user's code in a traceback; empty if there is none.

    It is that of cell `number` as in "line 3", of another cell as in "line 3 of cell 5", or of a file.
    """
    location = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file in cells:
            location = f"line {_line_of_cell(traceback.tb_lineno, cells[file], number)}"
        elif is_users(file) and Path(file).is_absolute():  # a file of Cython, as of the debugger, is not
            location = f"line {traceback.tb_lineno} of {Path(file).name}"
        traceback = traceback.tb_next
    return location


def _line_of_cell(line: int, cell: int, number: int) -> int | str:
    """Return a line of `cell` as messages name it that are about cell `number`."""
    return line if cell == number else f"{line} of cell {cell}"


def _is_cell(file: str | None, cells: dict[str, int], number: int) -> bool:
    """Return True if the file is cell `number`, or any cell if `number` is 0.

    A function that another cell defined has that cell's line numbers.
    """
    return file in cells and number in (0, cells[file])


def main_thread_frames(cells: dict[str, int]) -> tuple[Frame, ...]:
    """Return the main thread's stack from the first frame of a cell on, outermost first.

    Without a cell's frame, return the user's frames. The file of a cell is `Cell In[5]`. Any thread.
    """
    # Only while the frame objects are created. Once they exist, reading them is safe.
    with pause_gc():
        stack = thread_frames(threading.main_thread().ident)
    frames: list[Frame] = []
    for frame in stack:
        code = frame.f_code
        file = f"Cell In[{cells[code.co_filename]}]" if code.co_filename in cells else code.co_filename
        line = _line(frame)
        # linecache knows the cells' sources. A file is read when it is needed for the first time.
        source = linecache.getline(code.co_filename, line).strip()
        frames.insert(0, Frame(file=file, line=line, function=code.co_name, source=source))
        # Everything above, in order from the outside, is dropped, and what follows on the inside as well.
        if _DEBUGGER in code.co_filename:
            frames.clear()  # the debugger's own frames, while the rank is paused
    # The frames before the first one of a cell are IPython's and ours.
    first = next((i for i, entry in enumerate(frames) if entry.file.startswith("Cell In[")), None)
    return tuple(frames[first:]) if first is not None else tuple(entry for entry in frames if is_users(entry.file))


def main_thread_line(cells: dict[str, int], number: int | None = None) -> int | str | None:
    """Return the innermost line of cell `number`, or of any cell if None, that the main thread executes. Any thread.

    If it executes no line of that cell, as in a call, return the innermost line of any cell, as in "3 of cell 5".
    """
    # A thread's own frames cannot disappear while it looks at them.
    if threading.current_thread() is threading.main_thread():
        stack = thread_frames(threading.get_ident())
    else:
        with pause_gc():
            stack = thread_frames(threading.main_thread().ident)
    # Innermost first, as `thread_frames` returns them.
    cell_frames = [frame for frame in stack if frame.f_code.co_filename in cells]
    current_frames = [frame for frame in cell_frames if cells[frame.f_code.co_filename] == number]
    for frame in current_frames or cell_frames:
        cell = cells[frame.f_code.co_filename]
        return _line_of_cell(_line(frame), cell, cell if number is None else number)
    return None


_pause_lock = threading.Lock()
_gc_paused = False


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Collect no garbage in the context, in which a thread reads the frames of another one.

    Python creates a frame object, and the dict of its variables, when it is first requested. Before 3.12, the
    allocation may collect garbage, a destructor may then release the GIL, and the other thread may return from the
    function whose frame is being read: the frame object points to memory that is used again, and the process crashes.
    From 3.12 on, Python collects only between two instructions of the interpreter.
    """
    global _gc_paused
    if sys.version_info >= (3, 12):
        yield
        return
    # Two threads may pause at once; the second one must not see the collector as disabled by the user.
    with _pause_lock:
        _gc_paused = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if _gc_paused:
                gc.enable()
            _gc_paused = False


def thread_frames(ident: int | None) -> list[types.FrameType]:
    """Return the stack of the thread `ident`, innermost frame first; empty if the thread does not exist.

    Call it within `pause_gc`, except for the thread's own stack.
    """
    frame = sys._current_frames().get(ident) if ident is not None else None
    frames: list[types.FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _in_child() -> None:
    """Restore the state of a child that was forked while another thread had paused the garbage collector."""
    global _pause_lock, _gc_paused
    _pause_lock = threading.Lock()
    if _gc_paused:
        gc.enable()
    _gc_paused = False


os.register_at_fork(after_in_child=_in_child)


def _line(frame: types.FrameType) -> int:
    """Return the line of a frame.

    The jump at the end of a loop may have no line; then return the line of the instruction before it.
    """
    current: int | None = frame.f_lineno
    if current is not None:
        return current
    lines = [line for start, _, line in frame.f_code.co_lines() if start <= frame.f_lasti and line is not None]
    return lines[-1] if lines else frame.f_code.co_firstlineno
