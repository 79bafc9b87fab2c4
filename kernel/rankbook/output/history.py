"""What stands in a cell's output, and whose it is, so that it can be shown again without some ranks' part.

Owns: how much is remembered, and of whom something was forgotten. Refuses: to show anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rankbook.output.interleave import DisplayItem, Ranks, Rows
from rankbook.output.terminal import StreamName
from rankbook.protocol.messages import Display

_MOST_TEXT, _MOST = 256 << 10, 200
"""Characters and entries of the cell's output that are kept in case some ranks clear theirs."""
_LARGEST = 16 << 10
"""Characters after which lines go to a new entry, so that little is forgotten at a time."""


@dataclass(eq=False)
class HistoryEntry:
    """Lines of one stream, each with the ranks that printed it, or one display."""

    stream: StreamName | None
    ranks: set[int] = field(default_factory=set)
    size: int = 0
    rows: list[tuple[Ranks, str]] = field(default_factory=list)
    shown: DisplayItem | None = None


class OutputHistory:
    """What stands in the notebook, and whose it is, so that it can be shown again without some ranks' part.

    `forgotten` are the ranks of which something stands there that is not in the record any more.
    """

    def __init__(self) -> None:
        self.entries: deque[HistoryEntry] = deque()
        self.forgotten: set[int] = set()
        self._size = 0

    def add_lines(self, stream: StreamName, rows: Rows) -> None:
        """Lines were shown."""
        ranks = set().union(*{ranks for ranks, _ in rows})
        while (size := sum(len(line) + 1 for _, line in rows)) > _MOST_TEXT:
            rows = rows[(len(rows) + 1) // 2 :]
            self.forgotten |= ranks
        last = self.entries[-1] if self.entries else None
        if last is None or last.stream != stream or last.size > _LARGEST:
            last = HistoryEntry(stream)
            self.entries.append(last)
        last.ranks |= ranks
        last.rows += rows
        self._grow(last, size)

    def add_display(self, shown: DisplayItem, ranks: Ranks) -> None:
        """A display was shown. It counts a sixteenth: figures are large, and are to survive another rank's clearing."""
        entry = HistoryEntry(None, set(ranks), shown=shown)
        self.entries.append(entry)
        self._grow(entry, shown.size // 16)

    def update(self, rank: int, message: Display) -> None:
        """A display of `rank` has changed."""
        for entry in reversed(self.entries):
            if entry.shown and entry.ranks == {rank} and entry.shown.message.display_id == message.display_id:
                entry.shown = entry.shown.updated(message)
                return

    def _grow(self, entry: HistoryEntry, size: int) -> None:
        entry.size += size
        self._size += size
        while self._size > _MOST_TEXT or len(self.entries) > _MOST:
            old = self.entries.popleft()
            self._size -= old.size
            self.forgotten |= old.ranks
