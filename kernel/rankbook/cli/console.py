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
_REMEMBERED = 65_536  # characters of a frame that are kept for rewriting it; no terminal shows more
_HEADER_WIDTH = 100


@dataclass(eq=False)
class _Frame:
    """A text that later text replaces. `held` waits for the interval to pass; `shown` is on the terminal."""

    cell: int
    held: list[tuple[str, bool]] = field(default_factory=list)
    holding: bool = False
    turn: float = float("-inf")  # when its text was last printed
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
        self._colour = {stream: stream.isatty() and "NO_COLOR" not in os.environ for stream in (out, err)}
        self._rewrites = out.isatty()
        self._interval = TERMINAL_INTERVAL if self._rewrites else LOG_INTERVAL
        self._foreground: int | None = None
        self._open: tuple[object, TextIO] | None = None  # the source of an unfinished line, and its stream
        self._halves: dict[tuple[int, bool], str] = {}  # unfinished lines of background cells
        self._frames: dict[object, _Frame] = {}
        self._cleared: dict[int, _Frame] = {}  # cells that have called clear_output
        self._waiting: list[_Frame] = []  # frames that hold text
        self._bottom: object = None  # the source of the last text on the terminal

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
        return max(0.0, min(frame.turn for frame in self._waiting) + self._interval - self._clock())

    def tick(self) -> None:
        """Print the frames whose interval has passed."""
        if self._waiting:
            late = self._clock() - self._interval
            self._release([frame for frame in self._waiting if frame.turn <= late])

    def finish(self, cell: int | None = None) -> None:
        """Print the held output of `cell`, or of all cells: the last state of frames, and unfinished lines."""
        self._release([frame for frame in self._waiting if cell in (None, frame.cell)])
        for owner, error in list(self._halves):
            if cell in (None, owner):
                self._label(owner, self._halves.pop((owner, error)) + "\n", error)
        if cell is None:
            self._close_line()

    def _replace(self, frame: _Frame) -> None:
        if frame.held:
            frame.held.clear()
            self._waiting.remove(frame)
        frame.holding = self._clock() < frame.turn + self._interval
        if not frame.holding:
            self._erase(frame)

    def _frame_text(self, frame: _Frame, text: str, error: bool) -> None:
        if frame.holding:
            if not frame.held:
                self._waiting.append(frame)
            frame.held.append((text, error))
            return
        frame.turn = self._clock()
        self._put(frame.cell, frame, text, error)

    def _release(self, frames: list[_Frame]) -> None:
        for frame in frames:
            self._waiting.remove(frame)
            texts, frame.held, frame.holding = frame.held, [], False
            self._erase(frame)
            for text, error in texts:
                self._frame_text(frame, text, error)

    def _erase(self, frame: _Frame) -> None:
        """Erase the frame's text from the terminal, if it is still the last text and fits on the screen."""
        text, frame.shown = frame.shown, ""
        if not (self._rewrites and text and self._bottom is frame):
            return
        self._close_line()
        size = shutil.get_terminal_size()
        rows = count_rows(text, size.columns)
        if rows < size.lines and len(text) < _REMEMBERED:
            self._out.write(f"\x1b[{rows}F\x1b[J")

    # Lines ----------------------------------------------------------------------------------------------------------

    def _put(self, cell: int, source: object, text: str, error: bool) -> None:
        if cell == self._foreground:
            self._write(source, text, self._err if error else self._out)
            return
        whole, newline, half = (self._halves.pop((cell, error), "") + text).rpartition("\n")
        if half:
            self._halves[cell, error] = half
        if newline:
            self._label(cell, whole + newline, error)

    def _label(self, cell: int, lines: str, error: bool) -> None:
        if cell != self._foreground:
            lines = "".join(f"cell [{cell}]: {last_state(line)}\n" for line in lines[:-1].split("\n"))
        self._write(cell, lines, self._err if error else self._out)

    def _write(self, source: object, text: str, stream: TextIO) -> None:
        if not text:
            return
        if self._open and (self._open[0] != source or (self._open[1] is not stream and self._rewrites)):
            self._close_line()
        stream.write(text if self._colour[stream] else strip_ansi(text))
        stream.flush()
        self._open = None if text.endswith("\n") else (source, stream)
        self._bottom = source
        if isinstance(source, _Frame) and self._rewrites and len(source.shown) < _REMEMBERED:
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
        rows += max(1, -(-cells // max(1, columns)))
    return rows
