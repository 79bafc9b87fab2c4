"""Record of recently shown output and its ranks, for replay after a partial clear.

A front end can clear only a whole cell. When some ranks clear their output, `_MergedView` (merger.py) clears the cell
and shows again what the other ranks had there, from this record. It is bounded, and tracks which ranks have output in
the notebook that is no longer in the record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rankbook.output.interleave import DisplayItem, Ranks, Rows
from rankbook.protocol.base import StreamName
from rankbook.protocol.messages import Display

_MAX_TEXT, _MAX_ENTRIES = 256 << 10, 200
"""Limits of the record of a cell: characters and entries."""
_MAX_ENTRY_TEXT = 16 << 10
"""Characters after which lines go to a new entry. Entries are dropped as a whole, so small ones lose less at a time."""


@dataclass(eq=False)
class HistoryEntry:
    """Lines of one stream with the ranks that printed them, or one display."""

    stream: StreamName | None
    ranks: set[int] = field(default_factory=set)
    size: int = 0
    rows: list[tuple[Ranks, str]] = field(default_factory=list)
    display: DisplayItem | None = None


class OutputHistory:
    """Bounded record of the output shown in a cell, oldest first.

    `forgotten` are the ranks with output in the notebook that has been dropped from the record.
    """

    def __init__(self) -> None:
        self.entries: deque[HistoryEntry] = deque()
        self.forgotten: set[int] = set()
        self._size = 0

    def add_lines(self, stream: StreamName, rows: Rows) -> None:
        """Record lines that were shown. If they alone exceed the limit, their first half is dropped until they fit."""
        # Lines that exceed the record by themselves: keep the last ones, which are nearest to what follows.
        ranks = set().union(*{ranks for ranks, _ in rows})
        while (size := sum(len(line) + 1 for _, line in rows)) > _MAX_TEXT:
            rows = rows[(len(rows) + 1) // 2 :]
            self.forgotten |= ranks
        last = self.entries[-1] if self.entries else None
        # Lines join the last entry, as long as it is small.
        if last is None or last.stream != stream or last.size > _MAX_ENTRY_TEXT:
            last = HistoryEntry(stream)
            self.entries.append(last)
        last.ranks |= ranks
        last.rows += rows
        self._add_size(last, size)

    def add_display(self, display: DisplayItem, ranks: Ranks) -> None:
        """Record a display that was shown.

        It counts a sixteenth of its size: figures are large, and should survive a clear by another rank.
        """
        entry = HistoryEntry(None, set(ranks), display=display)
        self.entries.append(entry)
        self._add_size(entry, display.size // 16)

    def update(self, rank: int, message: Display) -> None:
        """Apply an update to a recorded display of `rank`."""
        # The display with this id that was shown last is the one that the front end updates.
        for entry in reversed(self.entries):
            if entry.display and entry.ranks == {rank} and entry.display.message.display_id == message.display_id:
                entry.display = entry.display.updated(message)
                return

    def _add_size(self, entry: HistoryEntry, size: int) -> None:
        entry.size += size
        self._size += size
        while self._size > _MAX_TEXT or len(self.entries) > _MAX_ENTRIES:
            old = self.entries.popleft()
            self._size -= old.size
            # What is dropped here can never be shown again. `set_header` and `_clear` ask for it.
            self.forgotten |= old.ranks
