r"""Bytes to lines, and the rows that are still being written on.

Owns: UTF-8 across the borders of chunks, what a terminal makes of `\r`, `\b` and cursor movements, the live regions
that show unfinished rows. Refuses: clocks, messages, other ranks' lines.

A *screen* is one stream of one rank. Plain text passes it by the block. Only the rows that can still change are kept:
the one being written, and those that the cursor can come back to, for tqdm draws its bar number 1 as `\n`, `\r`, the
bar, and `\x1b[A` to get back to bar number 0. A row that is unfinished for long is shown in a *region*, a display that
is updated, with a row for each bar of each rank.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Literal

from rankbook.formatting import ANSI_ESCAPE, strip_ansi

StreamName = Literal["stdout", "stderr"]

WIDEST = 1000
"""Characters that a live row may have. No terminal is wider, so nothing is overwritten in a row that is."""
_REACH = 16
"""Rows in a region that the cursor can come back to."""
_TALLEST = 4
"""Rows of one screen in one region: more would make its updates dear."""

_CONTROL = re.compile(r"\n|\r|\x08|\x1b\[(\d*)([AK])")
_MOVES = re.compile(r"\x1b\[\d*[AK]")
_HALF_ESCAPE = re.compile(r"\x1b(?:\[[\d;]*)?")


LiveRows = tuple[tuple[int, str], ...]
"""What a live region shows: ranks, each with the text of a row."""


class TerminalRow:
    """One row of a screen. `column` is where the cursor stands, None behind the text; `since` is its first write.

    `returned`: a carriage return or the like has made it a row to be overwritten. `region`: where it is shown live.
    `live`: it is not above the cursor. `kept`: the cursor can come back to it.
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
        """What a terminal shows, with the spaces that blank out what was there."""
        if self._more:
            self._text += "".join(self._more)
            self._more.clear()
        return self._text

    @property
    def final(self) -> str:
        """The row as a line."""
        return self.text.rstrip(" ") if self.returned else self.text

    @property
    def empty(self) -> bool:
        """Whether nothing is left of it, or nothing but the end of a colour."""
        return not self.length or (self.blank and (self.returned or "\x1b" in self.text))

    def write(self, text: str, now: float) -> None:
        """Write `text`, which holds no controls but colours, over what is there."""
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
        """Do what a carriage return, a backspace, or an erasure (`number` 0: to the end, 2: all) does in the row."""
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
    """Where in `text` its first `width` visible characters end, before or past the escapes that stand there."""
    if "\x1b" not in text:
        return min(width, len(text))
    seen = start = 0
    for match in ANSI_ESCAPE.finditer(text):
        plain = match.start() - start
        if seen + plain > width or (seen + plain == width and not past_colours):
            break
        seen += plain
        start = match.end()
    return min(len(text), start + width - seen)


class TerminalStream:
    """One stream of one rank: bytes in, blocks of whole lines out (joined by newlines, without the last one)."""

    __slots__ = ("_bytes", "_escape", "_rows", "_y", "rank", "stream")

    def __init__(self, rank: int, stream: StreamName) -> None:
        self.rank = rank
        self.stream = stream
        self._bytes = b""
        self._escape = ""
        self._rows = [TerminalRow(self)]
        self._y = 0

    def feed(self, data: bytes, now: float) -> str | None:
        """Take a chunk; the lines that it completes and that no region shows."""
        text, used = codecs.utf_8_decode(self._bytes + data if self._bytes else data, "replace", False)
        self._bytes = (self._bytes + data)[used:]
        row = self._rows[self._y]
        if "\x1b" in text or self._escape:
            text = self._hold_escape(self._escape + text)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        plain = row.region is None and not row.returned  # which a row with others below it always is
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
        """Nobody will write on these rows any more: those that no region shows become lines."""
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
        """Something else comes next in the rank's output: a plain half line that no region shows becomes a line."""
        row = self._rows[self._y]
        if not row.length or row.returned or row.region is not None:
            return None
        self._reset()
        return row.text

    def hidden(self) -> list[TerminalRow]:
        """The rows that no region shows yet."""
        return [row for row in self._rows if row.region is None and not row.blank]

    def _reset(self) -> None:
        for row in self._rows:
            row.live = row.kept = False
        self._rows, self._y = [TerminalRow(self)], 0

    def _hold_escape(self, text: str) -> str:
        start = text.rfind("\x1b", -16)
        if start < 0 or not _HALF_ESCAPE.fullmatch(text, start):
            start = len(text)
        self._escape = text[start:]
        return text[:start]

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
                self._rows[self._y].move("\r")  # whoever goes up returns next, or wants to
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
        """Part with the rows above the cursor, but for those in a region that it can still reach."""
        lines = []
        gone = max(0, self._y - _REACH)
        for index, row in enumerate(self._rows[: self._y]):
            row.live = False
            if row.region is not None and row.length > WIDEST:  # it was shown in part only
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
    """A display that shows unfinished rows, and those that were."""

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
        """Whether one of its rows is not finished."""
        return any(row.live for row in self.rows)

    def drop(self, row: TerminalRow) -> None:
        """Show `row` here no more."""
        self.rows.remove(row)
        row.region = None
        self.changed = True

    def draw(self) -> LiveRows:
        """Its rows. Those that were blanked out are gone."""
        for row in [row for row in self.rows if row.blank]:
            self.drop(row)
        self.changed = False
        return tuple((row.screen.rank, _clip(row.final)) for row in self.rows)


def _clip(text: str) -> str:
    return text if len(text) <= WIDEST else "…" + text[1 - WIDEST :]


class LiveDisplays:
    """The live regions of one cell. Their display ids start with `prefix`."""

    def __init__(self, prefix: str, *, after: float, every: float) -> None:
        self.turn = float("-inf")
        self._prefix = prefix
        self._after = after
        self._every = every
        self._count = 0
        self._regions: list[LiveDisplay] = []

    def when(self, row: TerminalRow) -> float:
        """When a hidden row may be shown: half lines get time to be completed, progress bars need none."""
        return row.since if row.returned else row.since + self._after

    @property
    def changed(self) -> bool:
        """Whether a region is not shown as it is."""
        return any(region.changed for region in self._regions)

    @property
    def shown(self) -> bool:
        """Whether there are any."""
        return bool(self._regions)

    def place(self, row: TerminalRow) -> None:
        """Show `row` from now on: in the last region, or below what has been printed since it was finished."""
        region = self._regions[-1] if self._regions else None
        row.nth = sum(other.screen is row.screen for other in region.rows) if region is not None else 0
        if region is None or row.nth >= _TALLEST or (region.buried and not region.live):
            row.nth = 0
            self._open([row])
            return
        region.rows.append(row)
        region.rows.sort(key=lambda each: (each.nth, each.screen.rank))
        region.changed, row.region = True, region

    def bury(self) -> None:
        """Something was printed: below the regions that there are."""
        for region in self._regions:
            region.buried = True

    def updates(self, now: float) -> list[tuple[str, LiveRows, bool]]:
        """What to display: (display id, rows, whether it is an update)."""
        found = []
        for region in self._regions:
            if region.changed:
                rows, first = region.draw(), region.shown is None
                if rows != (region.shown or ()):
                    found.append((region.display_id, rows, not first))
                    region.shown = rows
        if found:
            self.turn = now + self._every
        return found

    def retire(self) -> list[TerminalRow]:
        """Forget the regions that will not change any more; the rows that they show."""
        old = [
            region for region in self._regions[:-1] if not region.changed and not any(row.kept for row in region.rows)
        ]
        if old:
            self._regions = [region for region in self._regions if region not in old]
        return [row for region in old for row in region.rows]

    def clear(self, ranks: Iterable[int]) -> None:
        """All regions have vanished from the notebook; those rows that are not of `ranks` need a new one."""
        gone = set(ranks)
        rows = [row for region in self._regions for row in region.rows]
        kept = [row for row in rows if row.screen.rank not in gone]
        for row in rows:
            row.region = None
        self._regions = []
        if kept:
            self._open(kept)
            self.turn = float("-inf")

    def _open(self, rows: list[TerminalRow]) -> None:
        self._regions.append(LiveDisplay(f"{self._prefix}-{self._count}", rows))
        self._count += 1
