"""What a running cell's ranks do, in one line.

Owns: its words. Refuses: to know when it is shown, and of cells that have ended (handle.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankbook.ranks import name_ranks
from rankbook.telemetry import RankPlacement
from rankbook.widgets import handle
from rankbook.words import digits, duration

_WORDS = {"unresponsive": "not answering", "starting": "starting", "dead": "dead", "idle": "done"}


@dataclass(frozen=True)
class StripView:
    """One moment of cell `number` on `ranks`, `seconds` after its start; `rows` may tell of other ranks too.

    `paused`: what is said of ranks that stand still in a debugger.
    """

    number: int
    ranks: tuple[int, ...]
    seconds: float
    rows: Sequence[RankPlacement]
    paused: Mapping[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """The line: who, for how long, where each rank is, optimizer steps per second."""
        rows = [row for row in self.rows if row.rank in self.ranks]
        groups: dict[str, list[int]] = {}
        for row in rows:
            groups.setdefault(self.paused.get(row.rank) or _doing(row), []).append(row.rank)
        words = [each if len(groups) == 1 else f"{name_ranks(ranks)} {each}" for each, ranks in groups.items()]
        rates = [row.rate for row in rows if row.rate]
        if rates:
            words.append(f"{digits(statistics.median(rates))} steps/s")
        return " · ".join([f"cell [{self.number}] on {name_ranks(self.ranks)}", duration(self.seconds), *words])

    def bundle(self) -> dict[str, str]:
        """The line as a mime bundle."""
        return handle.line(self.text(), "running", role="none")  # nobody wants it read out every second


def _doing(row: RankPlacement) -> str:
    """What a rank does."""
    if row.state == "waiting":
        return f"waiting in {row.waits_for}"
    words = _WORDS.get(row.state, "running" if row.line is None else f"at line {row.line}")
    return f"{words}, the others wait for it" if row.lags else words
