"""Where the views get what they show, and whom they tell what was clicked.

Owns: the two seams, as Protocols. Refuses: to implement them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from rankbook.protocol.telemetry import CheckpointFolder


class Feed(Protocol):
    """What the ranks tell. Every method may be called on any thread."""

    def watch(self, kind: str, callback: Callable[[Struct], None], **options: object) -> Callable[[], None]:
        """Have `callback` called with each state of `kind`, at most ten times a second, the last one always.

        "placement" gives `Placement`, "saves" gives `Saves`. The callback comes on any thread. What is returned
        ends it.
        """
        ...

    def ask(self, kind: str, **options: object) -> Struct:
        """Ask the ranks once; also while a cell runs, and up to 2 s long.

        "detail" with `rank` gives `RankDetail`, "shards" with `name` gives `ShardMap`, "statistic" with `name`, `key`
        and `rank` gives `Statistic`. Raises `RankbookError`.
        """
        ...

    def act(self, kind: str, rank: int | None) -> str:
        """Do "interrupt" or "restart" and say in a sentence what was done. Raises `RankbookError`."""
        ...


class Shelf(Protocol):
    """A folder of checkpoints. Every method may be called on any thread, and raises `RankbookError`."""

    def look(self) -> CheckpointFolder:
        """What lies there now; reads no tensor's data."""
        ...

    def verify(self, name: str) -> str:
        """Check every byte of one checkpoint and say in a sentence how it is; `look` knows it from then on."""
        ...

    def load(self, name: str) -> str:
        """Load one checkpoint, or say in a sentence how to."""
        ...

    def delete(self, name: str) -> str:
        """Remove one checkpoint and say so."""
        ...
