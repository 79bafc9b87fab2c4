"""Dashboard: the views of placement, shards and checkpoints as tabs, with at most one dashboard per notebook."""

from __future__ import annotations

from typing import ClassVar

import traitlets

from rankbook.widgets.checkpoints import CheckpointsModel
from rankbook.widgets.live_view import CheckpointSource, ClusterSource, LiveView, script
from rankbook.widgets.placement import PlacementModel
from rankbook.widgets.shards import ShardsModel


class Dashboard(LiveView):
    """Placement, shards and checkpoints as tabs. Only the visible tab is updated."""

    _esm = script(
        "placement",
        "shards",
        "checkpoints",
        "dashboard",
        last='export default mount("dashboard", '
        "{placement: drawPlacement, shards: drawShards, checkpoints: drawCheckpoints}, tabs);",
    )
    # The traits of all three models, under the names that `LiveView` sets.
    placement_fixed = traitlets.Unicode("{}").tag(sync=True)
    placement_state = traitlets.Unicode("{}").tag(sync=True)
    shards_fixed = traitlets.Unicode("{}").tag(sync=True)
    shards_state = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_fixed = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_state = traitlets.Unicode("{}").tag(sync=True)

    # Of the notebook process: all cells share it.
    _open: ClassVar[Dashboard | None] = None

    def __init__(
        self, source: ClusterSource, checkpoint_source: CheckpointSource | None = None, *, variable: str = ""
    ) -> None:
        super().__init__(
            [PlacementModel(source), ShardsModel(source, variable), CheckpointsModel(source, checkpoint_source)]
        )

    @classmethod
    def reopen(
        cls, source: ClusterSource, checkpoint_source: CheckpointSource | None = None, *, variable: str = ""
    ) -> Dashboard:
        """Open the dashboard in this cell, and close the one that is open elsewhere in the notebook."""
        # Two open dashboards would query the ranks twice.
        if cls._open is not None:
            cls._open.replace_by_message("The dashboard was opened again in another cell.")
        cls._open = cls(source, checkpoint_source, variable=variable)
        return cls._open
