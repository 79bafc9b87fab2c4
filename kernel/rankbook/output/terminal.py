r"""Terminal emulation for output streams: decode bytes to lines, apply carriage returns, and show unfinished rows live.

A `TerminalStream` is one stream of one rank. It decodes UTF-8 across chunk borders, and handles `\r`, `\b` and the
escape sequences for moving the cursor up and erasing text. Plain text takes a fast path, a block at a time. Only rows
that can still change are kept: the current row, and those that the cursor can return to, since tqdm draws its second
bar as `\n`, `\r`, the bar, and `\x1b[A` to go back to the first.

A row that stays unfinished is shown in a `LiveDisplay`: a display that is updated in place, with one row per progress
bar and rank. `LiveDisplays` manages those of a cell.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Literal

from rankbook.formatting import ANSI_ESCAPE, strip_ansi

StreamName = Literal["stdout", "stderr"]

WIDEST = 1000
"""Maximum number of characters of a live row. No terminal is wider, so a longer row is not a progress bar."""
_REACH = 16
"""Number of rows above the current one that the cursor can return to."""
_TALLEST = 4
"""Maximum number of rows of one stream in one live display; more would make its updates expensive."""

_CONTROL = re.compile(r"\n|\r|\x08|\x1b\[(\d*)([AK])")
_MOVES = re.compile(r"\x1b\[\d*[AK]")
_HALF_ESCAPE = re.compile(r"\x1b(?:\[[\d;]*)?")


LiveRows = tuple[tuple[int, str], ...]
"""Content of a live display: the rank and the text of every row."""


class TerminalRow:
    """One row of a `TerminalStream`.

    `column` is the cursor position, None at the end of the text. `since` is the time of the first write. `returned` is
    True once a carriage return, backspace or erasure has marked the row as one to be overwritten. `region` is the live
    display that shows it, if any. `live` is False for rows above the cursor, and `kept` is True while the cursor can
    return to the row.
    """

    __slots__ = (
        "_more",
        "_text",
        "blank",
        "column",
        "kept",
        "length",
        "live",
        "nth",
        "region",
        "returned",
        "screen",
        "since",
    )

    def __init__(self, screen: TerminalStream) -> None:
        self.screen = screen
        self.column: int | None = None
        self.blank = True
        self.length = 0
        self.live = self.kept = True
        self.nth = 0
        self.region: LiveDisplay | None = None
        self.returned = False
        self.since = 0.0
        self._text = ""
        self._more: list[str] = []

    @property
    def text(self) -> str:
        """Text as a terminal shows it, including spaces that have overwritten other text."""
        if self._more:
            self._text += "".join(self._more)
            self._more.clear()
        return self._text

    @property
    def final(self) -> str:
        """Text of the row as a line."""
        return self.text.rstrip(" ") if self.returned else self.text

    @property
    def empty(self) -> bool:
        """True if nothing visible is left in the row."""
        return not self.length or (self.blank and (self.returned or "\x1b" in self.text))

    def write(self, text: str, now: float) -> None:
        """Write `text` at the cursor, over existing text.

        `text` must not contain control characters other than colour escapes.
        """
        if self.region is not None:
            self.region.changed = True
        if not self.length:
            self.since = now
        if self.column is None:
            self._more.append(text)
            self.length += len(text)
            self.blank = self.blank and _is_blank(text)
            return
        old, end = self.text, self.column + _width(text)
        tail = old[_offset(old, end, past_colours=True) :]
        self._set(old[: _offset(old, self.column)] + text + tail)
        self.column = end if tail else None

    def move(self, control: str, number: str = "") -> None:
        """Apply a carriage return, a backspace, or an erasure (`number` 0: to the end of the row; 2: the whole row)."""
        if control == "\r":
            self.column, self.returned = 0, True
        elif self.length > WIDEST:
            return
        elif control == "\b":
            self.column = max(0, (_width(self.text) if self.column is None else self.column) - 1)
            self.returned = True
        elif number == "2":
            self._set(" " * (_width(self.text) if self.column is None else self.column))
            self.column, self.returned = None, True
        elif self.column is not None and number in ("", "0"):
            self._set(self.text[: _offset(self.text, self.column)])
            self.column = None

    def _set(self, text: str) -> None:
        self._text, self.length, self.blank = text, len(text), _is_blank(text)
        if self.region is not None:
            self.region.changed = True


def _count(digits: str) -> int:
    """Return how many rows a cursor movement means: 1 without a number, at most a billion.

    `int` refuses more than 4,300 digits, and takes quadratic time for them.
    """
    return int(digits or 1) if len(digits) < 10 else 1_000_000_000


def _is_blank(text: str) -> bool:
    return not strip_ansi(text).strip(" ")


def _width(text: str) -> int:
    return len(strip_ansi(text))


def _offset(text: str, width: int, *, past_colours: bool = False) -> int:
    """Return the index in `text` after its first `width` visible characters.

    The index is before the colour escapes at this position, or after them with `past_colours`.
    """
    if "\x1b" not in text:
        return min(width, len(text))
    used = start = 0
    for match in ANSI_ESCAPE.finditer(text):
        plain = match.start() - start
        if used + plain > width or (used + plain == width and not past_colours):
            break
        used += plain
        start = match.end()
    return min(len(text), start + width - used)


class TerminalStream:
    """One stream of one rank: takes bytes, returns blocks of whole lines.

    The lines of a block are joined by newlines; the last line has none.
    """

    __slots__ = ("_bytes", "_escape", "_rows", "_y", "rank", "stream")

    def __init__(self, rank: int, stream: StreamName) -> None:
        self.rank = rank
        self.stream = stream
        self._bytes = b""
        self._escape = ""
        self._rows = [TerminalRow(self)]
        self._y = 0

    def feed(self, data: bytes, now: float) -> str | None:
        """Process a chunk; return the lines it completes, without those shown in a live display, or None."""
        text, used = codecs.utf_8_decode(self._bytes + data if self._bytes else data, "replace", False)
        self._bytes = (self._bytes + data)[used:]
        row = self._rows[self._y]
        if "\x1b" in text or self._escape:
            text = self._hold_escape(self._escape + text)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        plain = row.region is None and not row.returned  # false if others are below
        if not plain or "\r" in text or "\b" in text or ("\x1b" in text and _MOVES.search(text)):
            return self._feed_controls(text, now)
        whole, newline, rest = text.rpartition("\n")
        block = None
        if newline:
            block = row.text + whole if row.length else whole
            self._reset()
        if rest:
            self._rows[self._y].write(rest, now)
        return block

    def end(self, now: float) -> str | None:
        """End the stream: return the unfinished rows that are not shown in a live display, as lines."""
        text = self._escape + self._bytes.decode("utf-8", "replace")
        self._escape, self._bytes = "", b""
        if text:
            self._rows[self._y].write(text, now)
        while self._rows and self._rows[-1].empty:
            row = self._rows.pop()
            row.live = row.kept = False
        self._y = len(self._rows)
        block = self._commit()
        self._reset()
        return block

    def end_half(self) -> str | None:
        """End the current row if it is a plain unfinished line that is not shown live, and return it.

        Called when something else follows in the rank's output.
        """
        row = self._rows[self._y]
        if not row.length or row.returned or row.region is not None:
            return None
        self._reset()
        return row.text

    def hidden(self) -> list[TerminalRow]:
        """Return the non-blank rows that are not shown in a live display yet."""
        return [row for row in self._rows if row.region is None and not row.blank]

    def _reset(self) -> None:
        for row in self._rows:
            row.live = row.kept = False
        self._rows, self._y = [TerminalRow(self)], 0

    def _hold_escape(self, text: str) -> str:
        # Keep an incomplete escape sequence at the end of a chunk until the next chunk completes it.
        start = text.rfind("\x1b", -16)
        if start < 0 or not _HALF_ESCAPE.fullmatch(text, start):
            start = len(text)
        self._escape = text[start:]
        return text[:start]

    # Slow path of `feed`, for text with control characters. `_rows[_y]` is the row with the cursor. Rows above it are
    # kept only while they are shown live and within `_REACH`, and rows below it exist after a cursor movement up.

    def _feed_controls(self, text: str, now: float) -> str | None:
        position = 0
        for match in _CONTROL.finditer(text):
            if match.start() > position:
                self._write(text[position : match.start()], now)
            position = match.end()
            if match[0] == "\n":
                self._down()
            elif match[2] == "A":
                self._y = max(0, self._y - _count(match[1]))
                self._rows[self._y].move("\r")  # programs return to the first column after moving up
            else:
                self._rows[self._y].move(match[0], match[1] or "")
        if position < len(text):
            self._write(text[position:], now)
        return self._commit()

    def _write(self, text: str, now: float) -> None:
        row = self._rows[self._y]
        if row.column is not None and row.length > WIDEST:
            self._down()
        self._rows[self._y].write(text, now)

    def _down(self) -> None:
        self._y += 1
        if self._y == len(self._rows):
            self._rows.append(TerminalRow(self))
        else:
            self._rows[self._y].move("\r")

    def _commit(self) -> str | None:
        """Return the rows above the cursor as lines, and forget them.

        Rows in a live display are kept while the cursor can return to them, and are not returned.
        """
        lines = []
        gone = max(0, self._y - _REACH)
        for index, row in enumerate(self._rows[: self._y]):
            row.live = False
            if row.region is not None and row.length > WIDEST:  # a live display shows only its last WIDEST characters
                row.region.drop(row)
            if row.region is None:
                lines.append(row.final)
                gone = index + 1
        for row in self._rows[:gone]:
            row.kept = False
        del self._rows[:gone]
        self._y -= gone
        for row in self._rows[self._y :]:
            row.live = True
        return "\n".join(lines) if lines else None


class LiveDisplay:
    """A display of rows that are unfinished, or were when they were added."""

    __slots__ = ("buried", "changed", "display_id", "rows", "shown")

    def __init__(self, display_id: str, rows: list[TerminalRow]) -> None:
        self.display_id = display_id
        self.rows = rows
        self.changed = True
        self.buried = False
        self.shown: LiveRows | None = None
        for row in rows:
            row.region = self

    @property
    def live(self) -> bool:
        """True if at least one row is unfinished."""
        return any(row.live for row in self.rows)

    def drop(self, row: TerminalRow) -> None:
        """Remove `row` from the display."""
        self.rows.remove(row)
        row.region = None
        self.changed = True

    def draw(self) -> LiveRows:
        """Return the rows to show, after removing blank rows."""
        for row in [row for row in self.rows if row.blank]:
            self.drop(row)
        self.changed = False
        return tuple((row.screen.rank, _clip(row.final)) for row in self.rows)


def _clip(text: str) -> str:
    return text if len(text) <= WIDEST else "…" + text[1 - WIDEST :]


class LiveDisplays:
    """The live displays of one cell. Their display ids start with `prefix`.

    `after` is the age, in seconds, at which an unfinished plain line is shown, and `every` the minimum interval between
    two updates. `turn` is the earliest time of the next update.
    """

    def __init__(self, prefix: str, *, after: float, every: float) -> None:
        self.turn = float("-inf")
        self._prefix = prefix
        self._after = after
        self._every = every
        self._count = 0
        self._regions: list[LiveDisplay] = []

    def when(self, row: TerminalRow) -> float:
        """Return the time from which a hidden row can be shown: at once for a progress bar, later for a plain line."""
        return row.since if row.returned else row.since + self._after

    @property
    def changed(self) -> bool:
        """True if the content of a live display differs from what is shown."""
        return any(region.changed for region in self._regions)

    @property
    def shown(self) -> bool:
        """True if the cell has live displays."""
        return bool(self._regions)

    def place(self, row: TerminalRow) -> None:
        """Add `row` to the last live display, or to a new one if that is finished and other output has followed."""
        region = self._regions[-1] if self._regions else None
        row.nth = sum(other.screen is row.screen for other in region.rows) if region is not None else 0
        if region is None or row.nth >= _TALLEST or (region.buried and not region.live):
            row.nth = 0
            self._open([row])
            return
        region.rows.append(row)
        region.rows.sort(key=lambda entry: (entry.nth, entry.screen.rank))
        region.changed, row.region = True, region

    def bury(self) -> None:
        """Record that output was printed below the existing live displays."""
        for region in self._regions:
            region.buried = True

    def updates(self, now: float) -> list[tuple[str, LiveRows, bool]]:
        """Return what to display as (display id, rows, True for an update of an existing display)."""
        changes = []
        for region in self._regions:
            if region.changed:
                rows, first = region.draw(), region.shown is None
                if rows != (region.shown or ()):
                    changes.append((region.display_id, rows, not first))
                    region.shown = rows
        if changes:
            self.turn = now + self._every
        return changes

    def retire(self) -> list[TerminalRow]:
        """Forget live displays that will not change any more, and return their rows."""
        old = [
            region for region in self._regions[:-1] if not region.changed and not any(row.kept for row in region.rows)
        ]
        if old:
            self._regions = [region for region in self._regions if region not in old]
        return [row for region in old for row in region.rows]

    def clear(self, ranks: Iterable[int]) -> None:
        """Handle a cleared cell: all live displays are gone; open a new one for the rows that are not of `ranks`."""
        gone = set(ranks)
        rows = [row for region in self._regions for row in region.rows]
        remaining = [row for row in rows if row.screen.rank not in gone]
        for row in rows:
            row.region = None
        self._regions = []
        if remaining:
            self._open(remaining)
            self.turn = float("-inf")

    def _open(self, rows: list[TerminalRow]) -> None:
        self._regions.append(LiveDisplay(f"{self._prefix}-{self._count}", rows))
        self._count += 1
