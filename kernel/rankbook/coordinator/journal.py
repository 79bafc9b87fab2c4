"""The story of how the coordinator got where it is.

Owns: the last few hundred events and actions. Refuses: to grow.
"""

from __future__ import annotations

from collections import deque


class Journal:
    """Keeps the last `length` entries; `story()` prints the newest of them."""

    def __init__(self, length: int = 200) -> None:
        self._entries: deque[object] = deque(maxlen=length)

    def record(self, entry: object) -> None:
        """Remember one event or action. It is formatted only if somebody asks."""
        self._entries.append(entry)

    def story(self, newest: int = 20) -> str:
        """The newest entries, oldest first, one a line."""
        return "\n".join(f"  {entry!r}" for entry in list(self._entries)[-newest:])
