"""Print the output of a notebook's cells to a terminal or a log: headers, colours, labels of background cells.

Two kinds of text are replaced by later text: a display that is updated under its `display_id`, and all output of a cell
after `clear_output`. Both are *frames*. On a terminal a frame is rewritten in place. In a log it is printed at most
every two seconds, and its last state always, so that a progress bar takes a few lines instead of thousands.

The console does not know Jupyter messages: its caller passes it their contents and a clock, and asks `due` when to call
`tick`.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from rankbook.formatting import strip_ansi

LOG_INTERVAL = 2.0  # seconds between two printed states of a frame in a log
TERMINAL_INTERVAL = 0.1  # the same on a terminal, where the next state replaces the last
_MAX_FRAME_TEXT = 65_536  # characters of a frame that are kept for rewriting it; no terminal shows more
_HEADER_WIDTH = 100


@dataclass(eq=False)
class _Frame:
    """A text that later text replaces. `pending` waits for the interval to pass; `shown` is on the terminal."""

    cell: int
    # The life of a frame, for a progress bar that is updated every 50 ms, in a log (interval 2 s):
    #
    #     0.00 s   text "1%"    printed at once
    #     0.05 s   text "2%"    `delayed`: goes to `pending`, and the frame to the console's `_waiting`
    #     0.10 s   text "3%"    replaces what is pending
    #     2.00 s   `tick`       prints "40%", which is pending by then
    #     end      `finish`     prints the last state
    pending: list[tuple[str, bool]] = field(default_factory=list)
    delayed: bool = False
    printed_at: float = float("-inf")  # when its text was last printed
    shown: str = ""
    latest: str | None = None  # the whole text of a display, to recognize a repetition


class Console:
    """Write the cells' output to `out` and `err` as it arrives.

    A cell is identified by its execution count. The text of the foreground cell is written unchanged; the text of any
    other cell is written in whole lines, with the label `cell [3]: `. Colours are kept only if the stream is a
    terminal.
    """

    def __init__(self, out: TextIO, err: TextIO, *, clock: Callable[[], float]) -> None:
        self._out, self._err, self._clock = out, err, clock
        plain = os.environ.get("TERM") == "dumb"  # a terminal that knows no escape sequences
        # NO_COLOR turns colours off, whatever its value: see https://no-color.org.
        self._colour = {stream: stream.isatty() and not plain and "NO_COLOR" not in os.environ for stream in (out, err)}
        self._is_terminal = out.isatty()
        self._can_erase = self._is_terminal and not plain
        self._interval = TERMINAL_INTERVAL if self._can_erase else LOG_INTERVAL
        self._foreground: int | None = None
        self._open: tuple[object, TextIO] | None = None  # the source of an unfinished line, and its stream
        self._unfinished_lines: dict[tuple[int, bool], str] = {}  # unfinished lines of background cells
        self._frames: dict[object, _Frame] = {}
        self._cleared: dict[int, _Frame] = {}  # cells that have called clear_output
        self._waiting: list[_Frame] = []  # frames that hold text
        self._last_source: object = None  # the source of the last text on the terminal

    # Incoming output --------------------------------------------------------------------------------------------

    def header(self, cell: int, source: str) -> None:
        """Print the header line of a cell that starts, and make it the foreground cell."""
        self._foreground = cell
        line = f"[{cell}] {title(source)}"
        self._write("header", f"\x1b[1;34m{line}\x1b[0m\n", self._out)

    def text(self, cell: int, text: str, *, error: bool = False) -> None:
        """Print a part of stdout or stderr."""
        cleared = self._cleared.get(cell)
        if cleared is None:
            self._put(cell, "stream", text, error)
        else:
            self._frame_text(cleared, text, error)

    def display(self, cell: int, text: str, *, error: bool = False, key: str | None = None) -> None:
        """Print a whole output: a result, a figure's text, a traceback. `key` is its `display_id`."""
        text = text if text.endswith("\n") else text + "\n"
        frame = None
        if key is not None:
            self._frames[key] = frame = _Frame(cell, latest=text)
        # After `clear_output` the cell's whole output is one frame, and displays belong to it.
        frame = self._cleared.get(cell, frame)
        if frame is None:
            self._put(cell, "display", text, error)
        else:
            self._frame_text(frame, text, error)

    def update(self, key: str, text: str) -> None:
        """Replace the text of display `key`. An unknown `key` is ignored, as in a notebook."""
        frame = self._frames.get(key)
        text = text if text.endswith("\n") else text + "\n"
        if frame is None or frame.latest == text:
            return
        frame.latest = text
        self._replace(frame)
        self._frame_text(frame, text, error=False)

    def clear(self, cell: int) -> None:
        """Let the cell's further output replace its output so far."""
        # Displays of the cell are gone. An update of one of them is ignored from here on.
        self._frames = {key: frame for key, frame in self._frames.items() if frame.cell != cell}
        self._replace(self._cleared.setdefault(cell, _Frame(cell)))

    def note(self, message: str) -> None:
        """Print a message of `rankbook run` itself to stderr."""
        self._write("note", f"rankbook: {message}\n", self._err)

    # Frames ---------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return the seconds until a held frame may be printed, or None when nothing is held."""
        if not self._waiting:
            return None
        return max(0.0, min(frame.printed_at for frame in self._waiting) + self._interval - self._clock())

    def tick(self) -> None:
        """Print the frames whose interval has passed."""
        if self._waiting:
            # A frame that was printed before this time may be printed again.
            late = self._clock() - self._interval
            self._release([frame for frame in self._waiting if frame.printed_at <= late])

    def finish(self, cell: int | None = None) -> None:
        """Print the held output of `cell`, or of all cells: the last state of frames, and unfinished lines."""
        self._release([frame for frame in self._waiting if cell in (None, frame.cell)])
        for owner, error in list(self._unfinished_lines):
            if cell in (None, owner):
                self._label(owner, self._unfinished_lines.pop((owner, error)) + "\n", error)
        if cell is None:
            self._close_line()

    def _replace(self, frame: _Frame) -> None:
        if frame.pending:
            frame.pending.clear()
            self._waiting.remove(frame)
        # Decided once per state: the parts of one state are printed together, or all of them wait.
        frame.delayed = self._clock() < frame.printed_at + self._interval
        if not frame.delayed:
            self._erase(frame)

    def _frame_text(self, frame: _Frame, text: str, error: bool) -> None:
        if frame.delayed:
            if not frame.pending:
                self._waiting.append(frame)
            frame.pending.append((text, error))
            return
        frame.printed_at = self._clock()
        self._put(frame.cell, frame, text, error)

    def _release(self, frames: list[_Frame]) -> None:
        for frame in frames:
            self._waiting.remove(frame)
            # Emptied before it is printed, because printing goes through `_frame_text` again.
            texts, frame.pending, frame.delayed = frame.pending, [], False
            self._erase(frame)
            for text, error in texts:
                self._frame_text(frame, text, error)

    def _erase(self, frame: _Frame) -> None:
        """Erase the frame's text from the terminal, if it is still the last text and fits on the screen."""
        text, frame.shown = frame.shown, ""
        if not (self._can_erase and text and self._last_source is frame):
            return
        self._close_line()
        size = shutil.get_terminal_size()
        rows = count_rows(text, size.columns)
        if rows < size.lines and len(text) < _MAX_FRAME_TEXT:
            # CPL moves the cursor to the beginning of the line `rows` above, ED erases from there to the end of the
            # screen. Rows that have scrolled off the screen cannot be reached, hence the condition.
            self._out.write(f"\x1b[{rows}F\x1b[J")

    # Lines ----------------------------------------------------------------------------------------------------------

    def _put(self, cell: int, source: object, text: str, error: bool) -> None:
        if cell == self._foreground:
            self._write(source, text, self._err if error else self._out)
            return
        # Output of a background cell is held until a line is complete, so that its label stands once per line and the
        # lines of two cells do not mix.
        complete, newline, unfinished = (self._unfinished_lines.pop((cell, error), "") + text).rpartition("\n")
        if unfinished:
            self._unfinished_lines[cell, error] = unfinished
        if newline:
            self._label(cell, complete + newline, error)

    def _label(self, cell: int, lines: str, error: bool) -> None:
        if cell != self._foreground:
            lines = "".join(f"cell [{cell}]: {last_state(line)}\n" for line in lines[:-1].split("\n"))
        self._write(cell, lines, self._err if error else self._out)

    def _write(self, source: object, text: str, stream: TextIO) -> None:
        if not text:
            return
        # Another source continues an unfinished line: end the line first. On a terminal stdout and stderr share the
        # screen, in a log they may be two files.
        if self._open and (self._open[0] != source or (self._open[1] is not stream and self._is_terminal)):
            self._close_line()
        stream.write(text if self._colour[stream] else strip_ansi(text))
        stream.flush()
        self._open = None if text.endswith("\n") else (source, stream)
        self._last_source = source
        if isinstance(source, _Frame) and self._can_erase and len(source.shown) < _MAX_FRAME_TEXT:
            source.shown += text

    def _close_line(self) -> None:
        if self._open:
            stream = self._open[1]
            self._open = None
            stream.write("\n")
            stream.flush()


def title(source: str) -> str:
    """Return a one-line title for a cell: its first line, and after a cell magic also the first line of the body."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    first, rest = (lines[0], lines[1:]) if lines else ("", [])
    body = next((line for line in rest if not line.startswith("#")), None)
    if first.startswith("%%") and body:
        first = f"{first} · {body}"
        rest = rest[rest.index(body) + 1 :]
    if len(first) > _HEADER_WIDTH:
        return first[: _HEADER_WIDTH - 2] + " …"
    return f"{first} …" if rest else first


def last_state(line: str) -> str:
    """Return the part of a line that remains visible after its carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


def count_rows(text: str, columns: int) -> int:
    """Return the number of terminal rows that `text` takes, with long lines folded at `columns`."""
    rows = 0
    for line in strip_ansi(text).removesuffix("\n").split("\n"):
        cells = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in last_state(line))
        # An empty line takes a row, and a long one is folded: rounded up.
        rows += max(1, -(-cells // max(1, columns)))
    return rows
