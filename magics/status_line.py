"""The status line above a running cell: which ranks run it, for how long, and where each rank is."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.running_cell import Cell, Head
from rankbook.formatting import format_3g, format_duration
from rankbook.output.cell_result import CellResult
from rankbook.protocol.telemetry import RankPlacement
from rankbook.ranks import group_ranks, name_ranks
from rankbook.widgets.status_line import HandleView, line

_SWITCH = "RANKBOOK_STRIP"
"""The environment variable that turns status lines off, with the value "off"."""
_STATES = {"unresponsive": "not answering", "starting": "starting", "dead": "dead", "idle": "done"}


class StatusLine:
    """See `Head`."""

    def __init__(self, cluster: Cluster, cell: Cell) -> None:
        self._cell = cell
        self._paused = cluster.debugs.paused
        self._monitor = cluster.glance()

    def now(self) -> Mapping[str, str]:
        """See `Head`."""
        cell = self._cell
        seconds = time.monotonic() - (cell.started or 0.0)
        text = describe_running(cell.number, cell.ranks, seconds, self._monitor.placement().ranks, self._paused)
        return line(text, "running", role="none")  # a screen reader would read it out every second

    def end(self, result: CellResult) -> Mapping[str, str]:
        """See `Head`."""
        self._monitor.close()
        return HandleView(self._cell.number, self._cell.ranks, result.status, result.seconds).bundle()


def status_line_factory(cluster: Cluster) -> Callable[[Cell], Head] | None:
    """Return a function that makes the status line of a cell; None if status lines are turned off."""
    if os.environ.get(_SWITCH) == "off":
        return None
    return lambda cell: StatusLine(cluster, cell)


def describe_running(
    number: int, ranks: Sequence[int], seconds: float, rows: Sequence[RankPlacement], paused: Mapping[int, str]
) -> str:
    """Return the line of cell `number`: its ranks, its time, where each rank is, and optimizer steps per second.

    `rows` may contain other ranks too. `paused` describes the ranks that a debugger has stopped.
    """
    rows = [row for row in rows if row.rank in ranks]
    groups = group_ranks((row.rank, paused.get(row.rank) or _describe_rank(row)) for row in rows)
    parts = [text if len(groups) == 1 else f"{name_ranks(where)} {text}" for text, where in groups.items()]
    rates = [row.rate for row in rows if row.rate]
    if rates:
        parts.append(f"{format_3g(statistics.median(rates))} steps/s")
    return " · ".join([f"cell [{number}] on {name_ranks(ranks)}", format_duration(seconds), *parts])


def _describe_rank(row: RankPlacement) -> str:
    if row.state == "waiting":
        return f"waiting in {row.waits_for}"
    text = _STATES.get(row.state, "running" if row.line is None else f"at line {row.line}")
    return f"{text}, the others wait for it" if row.lags else text
