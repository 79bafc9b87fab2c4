"""The line above a cell that runs for longer than a moment.

Owns: whom it asks, and that it stops. Refuses: its words (widgets/strip.py) and when it is shown (coordinator/cell.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from rankbook.coordinator.cell import Cell, Head
from rankbook.coordinator.cluster import Cluster
from rankbook.results import CellResult
from rankbook.widgets.handle import HandleView
from rankbook.widgets.strip import StripView

SWITCH = "RANKBOOK_STRIP"
"""The environment variable that is "off" where nobody wants such lines."""


class Strip:
    """See `Head`."""

    def __init__(self, cluster: Cluster, cell: Cell) -> None:
        self._cell = cell
        self._paused = cluster.debugs.paused
        self._glance = cluster.glance()

    def now(self) -> Mapping[str, str]:
        """See `Head`."""
        cell = self._cell
        seconds = time.monotonic() - (cell.started or 0.0)
        return StripView(cell.number, cell.ranks, seconds, self._glance.placement().ranks, self._paused).bundle()

    def end(self, result: CellResult) -> Mapping[str, str]:
        """See `Head`."""
        self._glance.close()
        return HandleView(self._cell.number, self._cell.ranks, result.status, result.seconds).bundle()


def strip_of(cluster: Cluster) -> Callable[[Cell], Head] | None:
    """What makes the strips of the cluster's cells; None where nobody wants any."""
    if os.environ.get(SWITCH) == "off":
        return None
    return lambda cell: Strip(cluster, cell)
