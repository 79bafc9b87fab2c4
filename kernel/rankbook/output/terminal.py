r"""Terminal emulation for output streams: decode bytes to lines, apply carriage returns, and show unfinished rows live.

A `TerminalStream` is one stream of one rank. It decodes UTF-8 across chunk borders, and handles `\r`, `\b` and the
escape sequences for moving the cursor up and erasing text. Plain text takes a fast path, a block at a time. Only rows
that can still change are kept: the current row, those above it that are shown live, and those that the cursor has come
back to. tqdm draws a bar at position 2 as `\n\n`, `\r`, the bar, and `\x1b[A\x1b[A` to go back, and does so again
for every update. So the way back counts from where it began, also if the rows on the way have been printed as lines.

A row that stays unfinished is shown in a `LiveDisplay`: a display that is updated in place, with one row per progress
bar and rank. `LiveDisplays` manages those of a cell.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container

from rankbook.formatting import ANSI_ESCAPE, strip_ansi
from rankbook.protocol import StreamName

MAX_LIVE_WIDTH = 1000
"""Maximum number of characters of a live row. No terminal is wider, so a longer row is not a progress bar."""
_LIVE_INTERVAL = 0.1
"""Minimum seconds between two updates of the live displays."""
_MAX_CURSOR_UP = 16
"""Number of rows above the current one that the cursor can return to."""
_MAX_DISPLAY_ROWS = 4
"""Maximum number of rows of one stream in one live display; more would make its updates expensive."""

_CONTROL = re.compile(r"\n|\r|\x08|\x1b\[(\d*)([AK])")
_MOVES = re.compile(r"\x1b\[\d*[AK]")
_INCOMPLETE_ESCAPE = re.compile(r"\x1b(?:\[[\d;]*)?")


LiveRows = tuple[tuple[int, str], ...]
"""Content of a live display: the rank and the text of every row."""


class TerminalRow:
    """One row of a `TerminalStream`.

    `column` is the cursor position, None at the end of the text. `since` is the time of the first write. `rewritten` is
    True once a carriage return, backspace or erasure has marked the row as one to be overwritten. `display` is the live
    display that shows it, if any. `live` is False for rows above the cursor, and `reachable` is True while the cursor
    can return to the row. `kept`: the cursor has moved up to the row, past it or from it, and may come back to it.
    `returned`: the row was returned as a line before, and is blank since the cursor has come back to it.
    """

    __slots__ = (
        "_more",
        "_text",
        "blank",
        "column",
        "display",
        "index",
        "kept",
        "length",
        "live",
        "reachable",
        "returned",
        "rewritten",
        "since",
        "terminal",
    )

    def __init__(self, terminal: TerminalStream) -> None:
        self.terminal = terminal
        self.column: int | None = None
        self.blank = True
        self.length = 0
        self.live = self.reachable = True
        self.index = 0
        self.display: LiveDisplay | None = None
        self.rewritten = self.kept = self.returned = False
        self.since = 0.0
        self._text = ""
        # Text that was appended at the end. It is joined only when the text is needed, because a row may grow by many
        # small pieces.
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
        # Programs overwrite a longer text with spaces, which are no part of the line.
        return self.text.rstrip(" ") if self.rewritten else self.text

    @property
    def unused(self) -> bool:
        """True if nothing was ever written to the row."""
        return not (self.length or self.rewritten) and self.column is None and self.display is None

    @property
    def empty(self) -> bool:
        """True if nothing visible is left in the row."""
        # A row that was rewritten to blanks, or that has only colours, shows nothing.
        return not self.length or (self.blank and (self.rewritten or "\x1b" in self.text))

    def write(self, text: str, now: float) -> None:
        """Write `text` at the cursor, over existing text.

        `text` must not contain control characters other than colour escapes.
        """
        if self.display is not None:
            self.display.changed = True
        if not self.length:
            self.since = now
        # The frequent case: the cursor is at the end.
        if self.column is None:
            self._more.append(text)
            self.length += len(text)
            self.blank = self.blank and _is_blank(text)
            return
        # Overwrite as many visible characters as the text has. Escape sequences take no columns.
        old, end = self.text, self.column + _width(text)
        tail = old[_offset(old, end, past_colours=True) :]
        self._set(old[: _offset(old, self.column)] + text + tail)
        self.column = end if tail else None

    def move(self, control: str, number: str = "") -> None:
        """Apply a carriage return, a backspace, or an erasure (`number` 0: to the end of the row; 2: the whole row)."""
        if control == "\r":
            self.column, self.rewritten = 0, True
        # A row of this length is not a progress bar. Counting its columns for every backspace would take quadratic
        # time.
        elif self.length > MAX_LIVE_WIDTH:
            return
        elif control == "\b":
            self.column = max(0, (_width(self.text) if self.column is None else self.column) - 1)
            self.rewritten = True
        elif number == "2":
            # The cursor keeps its column in a terminal, so the erased part becomes spaces.
            self._set(" " * (_width(self.text) if self.column is None else self.column))
            self.column, self.rewritten = None, True
        elif self.column is not None and number in ("", "0"):
            self._set(self.text[: _offset(self.text, self.column)])
            self.column = None

    def _set(self, text: str) -> None:
        self._more.clear()
        self._text, self.length, self.blank = text, len(text), _is_blank(text)
        if self.display is not None:
            self.display.changed = True


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

    __slots__ = ("_bytes", "_escape", "_has_kept", "_returned", "_rows", "_y", "rank", "stream")

    def __init__(self, rank: int, stream: StreamName) -> None:
        self.rank = rank
        self.stream = stream
        self._bytes = b""
        self._escape = ""
        self._rows = [TerminalRow(self)]
        self._y = 0
        self._has_kept = False
        self._returned = 0  # rows above the first one, which have been returned as lines; at most _MAX_CURSOR_UP

    def process(self, data: bytes, now: float) -> str | None:
        """Process a chunk; return the lines it completes, without those shown in a live display, or None."""
        # Incremental: a chunk may end in the middle of a character, whose first bytes wait for the next chunk.
        text, used = codecs.utf_8_decode(self._bytes + data if self._bytes else data, "replace", False)
        self._bytes = (self._bytes + data)[used:]
        row = self._rows[self._y]
        if "\x1b" in text or self._escape:
            text = self._hold_escape(self._escape + text)
        # The end of a line on Windows is not a carriage return that rewrites the row.
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        # False if there are rows below.
        plain = row.display is None and not (row.rewritten or self._has_kept)
        # The slow path only for text that moves the cursor. Colours alone do not.
        if not plain or "\r" in text or "\b" in text or ("\x1b" in text and _MOVES.search(text)):
            return self._process_controls(text, now)
        # The block is not split into lines here: that is done on first use, and often never.
        complete, newline, rest = text.rpartition("\n")
        block = None
        if newline:
            block = row.text + complete if row.length else complete
            if self._returned < _MAX_CURSOR_UP:
                self._returned = min(_MAX_CURSOR_UP, self._returned + complete.count("\n") + 1)
            self._reset()
        if rest:
            self._rows[self._y].write(rest, now)
        return block

    def end(self, now: float) -> str | None:
        """End the stream: return the unfinished rows that are not shown in a live display, as lines."""
        if not (self._escape or self._bytes) and len(self._rows) == 1 and self._rows[0].unused:
            return None
        # An incomplete character or escape sequence will not be completed any more.
        text = self._escape + self._bytes.decode("utf-8", "replace")
        self._escape, self._bytes = "", b""
        if text:
            self._rows[self._y].write(text, now)
        # Blank rows at the end remain from a bar that was erased.
        while self._rows and self._rows[-1].empty:
            row = self._rows.pop()
            row.live = row.reachable = False
        self._y = len(self._rows)
        block = self._commit(last=True)
        self._reset()
        return block

    def end_plain_line(self) -> str | None:
        """End the current row if it is a plain unfinished line that is not shown live, and return it.

        Called when something else follows in the rank's output. Rows above it that were kept come along.
        """
        # A row that has been rewritten is a progress bar. It stays unfinished, because it goes on after the other
        # output. If it stands below the cursor, the rows above the cursor belong to it, and stay as well.
        row = self._rows[self._y]
        if not row.length or row.rewritten or row.display is not None:
            has_bar = any(not other.blank for other in self._rows[self._y :])
            return None if has_bar or not self._has_kept else self._commit(last=True)
        above = self._commit(last=True)
        self._reset()
        return row.text if above is None else f"{above}\n{row.text}"

    @property
    def unfinished(self) -> bool:
        """True if the stream has a row that is not blank, shown in a live display or not."""
        return any(not row.blank for row in self._rows)

    def hidden_rows(self) -> list[TerminalRow]:
        """Return the non-blank rows that are not shown in a live display yet."""
        return [row for row in self._rows if row.display is None and not row.blank]

    # A new row object, because the live display keeps the old one.
    def _reset(self) -> None:
        for row in self._rows:
            row.live = row.reachable = False
        self._rows, self._y, self._has_kept = [TerminalRow(self)], 0, False

    def _hold_escape(self, text: str) -> str:
        # Keep an incomplete escape sequence at the end of a chunk until the next chunk completes it.
        start = text.rfind("\x1b", -16)
        if start < 0 or not _INCOMPLETE_ESCAPE.fullmatch(text, start):
            # At most 16 characters are held back: a longer sequence is not one that is handled here.
            start = len(text)
        self._escape = text[start:]
        return text[:start]

    # Slow path of `process`, for text with control characters. `_rows[_y]` is the row with the cursor. Rows above it
    # are kept only while they are shown live, or the cursor has come back to them, and within `_MAX_CURSOR_UP`. Rows
    # below it exist after a cursor movement up.

    def _process_controls(self, text: str, now: float) -> str | None:
        position = 0
        for match in _CONTROL.finditer(text):
            if match.start() > position:
                self._write(text[position : match.start()], now)
            position = match.end()
            if match[0] == "\n":
                self._line_feed()
            elif match[2] == "A":
                self._move_up(_count(match[1]))
            else:
                self._rows[self._y].move(match[0], match[1] or "")
        if position < len(text):
            self._write(text[position:], now)
        return self._commit()

    def _write(self, text: str, now: float) -> None:
        row = self._rows[self._y]
        # Overwriting in a very long row is as costly as a backspace in it.
        if row.column is not None and row.length > MAX_LIVE_WIDTH:
            self._line_feed()
        self._rows[self._y].write(text, now)

    def _line_feed(self) -> None:
        self._y += 1
        if self._y == len(self._rows):
            self._rows.append(TerminalRow(self))
        else:
            self._rows[self._y].move("\r")

    def _move_up(self, count: int) -> None:
        """Move the cursor up by `count` rows, to the first column, as programs mean it."""
        # The rows that have been returned as lines take their place again, but cannot be changed any more.
        missing = min(count - self._y, self._returned, _MAX_CURSOR_UP + 1 - len(self._rows))
        if missing > 0:
            above = [TerminalRow(self) for _ in range(missing)]
            for row in above:
                row.returned = True
            self._rows[:0] = above
            self._y += missing
            self._returned -= missing
        start, self._y = self._y, max(0, self._y - count)
        for row in self._rows[self._y : start + 1]:
            row.kept = self._has_kept = True
        self._rows[self._y].move("\r")

    def _commit(self, *, last: bool = False) -> str | None:
        """Return the rows above the cursor as lines, and forget them.

        Rows in a live display are kept while the cursor can return to them, and are not returned. So are rows that it
        has come back to, except if this is the `last` time.
        """
        # Rows that are too far up cannot be reached any more, whether they are shown live or not.
        dropped = max(0, self._y - _MAX_CURSOR_UP)
        for index, row in enumerate(self._rows[: self._y]):
            row.live = False
            # A live display shows only the last MAX_LIVE_WIDTH characters of a row.
            if row.length > MAX_LIVE_WIDTH:
                row.kept = False
                if row.display is not None:
                    row.display.drop(row)
            if row.display is None and (last or not row.kept):
                dropped = index + 1
        gone = self._rows[:dropped]
        lines = [row.final for row in gone if row.display is None and not (row.returned and row.blank)]
        for row in gone:
            row.reachable = False
        # Rows are removed from the top only, so that the distances for the cursor stay right.
        del self._rows[:dropped]
        self._y -= dropped
        self._returned = min(_MAX_CURSOR_UP, self._returned + dropped)
        self._has_kept = self._has_kept and any(row.kept for row in self._rows)
        for row in self._rows[self._y :]:
            row.live = True
        return "\n".join(lines) if lines else None


class LiveDisplay:
    """A display of rows that are unfinished, or were when they were added."""

    __slots__ = ("changed", "display_id", "has_output_below", "rows", "shown_rows")

    def __init__(self, display_id: str, rows: list[TerminalRow]) -> None:
        self.display_id = display_id
        self.rows = rows
        self.changed = True
        self.has_output_below = False
        self.shown_rows: LiveRows | None = None
        for row in rows:
            row.display = self

    @property
    def live(self) -> bool:
        """True if at least one row is unfinished."""
        return any(row.live for row in self.rows)

    def drop(self, row: TerminalRow) -> None:
        """Remove `row` from the display."""
        self.rows.remove(row)
        row.display = None
        self.changed = True

    def draw(self) -> LiveRows:
        """Return the rows to show, after removing blank rows."""
        # A bar that has erased itself leaves no blank row behind.
        for row in [row for row in self.rows if row.blank]:
            self.drop(row)
        self.changed = False
        return tuple((row.terminal.rank, _clip(row.final)) for row in self.rows)


def _clip(text: str) -> str:
    return text if len(text) <= MAX_LIVE_WIDTH else "…" + text[1 - MAX_LIVE_WIDTH :]


class LiveDisplays:
    """The live displays of one cell. Their display ids start with `prefix`.

    `after` is the age, in seconds, at which an unfinished plain line is shown. `next_update` is the earliest time of
    the next update.
    """

    def __init__(self, prefix: str, *, after: float) -> None:
        self.next_update = float("-inf")
        self._prefix = prefix
        self._after = after
        self._count = 0
        self._displays: list[LiveDisplay] = []

    def visible_at(self, row: TerminalRow) -> float:
        """Return the time from which a hidden row can be shown: at once for a progress bar, later for a plain line."""
        return row.since if row.rewritten else row.since + self._after

    @property
    def changed(self) -> bool:
        """True if the content of a live display differs from what is shown."""
        return any(display.changed for display in self._displays)

    @property
    def has_displays(self) -> bool:
        """True if the cell has live displays."""
        return bool(self._displays)

    def add_row(self, row: TerminalRow) -> None:
        """Add `row` to the last live display, or to a new one if that is finished and other output has followed."""
        # Rows of one stream have an index, so that the bars of all ranks that are in the same place stand together, in
        # the order of the ranks.
        display = self._displays[-1] if self._displays else None
        row.index = sum(other.terminal is row.terminal for other in display.rows) if display is not None else 0
        # A live display that is finished, with output below it, is history: a new row belongs to the end.
        if display is None or row.index >= _MAX_DISPLAY_ROWS or (display.has_output_below and not display.live):
            row.index = 0
            self.open([row])
            return
        display.rows.append(row)
        display.rows.sort(key=lambda entry: (entry.index, entry.terminal.rank))
        display.changed, row.display = True, display

    def mark_output_below(self) -> None:
        """Record that output was printed below the existing live displays."""
        for display in self._displays:
            display.has_output_below = True

    def updates(self, now: float) -> list[tuple[str, LiveRows, bool]]:
        """Return what to display as (display id, rows, True for an update of an existing display)."""
        changes = []
        for display in self._displays:
            if display.changed:
                rows, first = display.draw(), display.shown_rows is None
                # The text may be what it was, if a row was written with the same content.
                if rows != (display.shown_rows or ()):
                    changes.append((display.display_id, rows, not first))
                    display.shown_rows = rows
        if changes:
            self.next_update = now + _LIVE_INTERVAL
        return changes

    def remove_finished(self) -> list[LiveDisplay]:
        """Forget live displays that will not change any more, and return them."""
        old = [
            display
            # The last live display stays, because new rows are added to it.
            for display in self._displays[:-1]
            if not display.changed and not any(row.reachable for row in display.rows)
        ]
        if old:
            self._displays = [display for display in self._displays if display not in old]
        return old

    def clear(self, ranks: Container[int]) -> None:
        """Remove the rows of `ranks`, which have cleared their output, from the live displays."""
        # Without a display, a row is a hidden row again if it still changes.
        for display in self._displays:
            for row in [row for row in display.rows if row.terminal.rank in ranks]:
                display.drop(row)

    def take(self) -> dict[str, list[TerminalRow]]:
        """Forget the live displays of a cleared cell, and return their rows, for `open`, by display id."""
        displays, self._displays = self._displays, []
        return {display.display_id: display.rows for display in displays if display.rows}

    def open(self, rows: list[TerminalRow]) -> None:
        """Open a live display for `rows` at the end of the output."""
        self._displays.append(LiveDisplay(f"{self._prefix}-{self._count}", rows))
        self._count += 1
