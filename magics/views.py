"""The live views of the notebook's ranks: `rankbook.placement()`, `shards`, `checkpoints` and `dashboard`.

Owns: which cluster and which folder a view shows. Refuses: to draw, and to ask the ranks by itself.
"""

from __future__ import annotations

import os

from rankbook.checkpoint.format.manifest import Manifest
from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster_source import ClusterFeed
from rankbook.magics.checkpoint_browser import FolderShelf
from rankbook.widgets.checkpoints import CheckpointsView
from rankbook.widgets.dashboard import Dashboard
from rankbook.widgets.placement import PlacementView
from rankbook.widgets.shards import ShardsView

Folder = str | os.PathLike[str]

OF_ACCELERATOR = "rankbook.runtime"
"""The metadata that `Accelerator.save_state` leaves in a checkpoint."""


def placement() -> PlacementView:
    """Hosts, devices and ranks, live: what each rank does, what its memory holds, how fast it trains.

    Raises `NoCluster`.
    """
    return PlacementView(_feed())


def shards(name: str, *, search: str = "") -> ShardsView:
    """Where every part of the ranks' variable `name` lies: a model, an optimizer, a state dict, or one tensor.

    `search` shows only parameters with that in their name. Raises `NoCluster`.
    """
    return ShardsView(_feed(), name, search=search)


def checkpoints(folder: Folder) -> CheckpointsView:
    """Saves as they happen, and what lies in `folder`, to be verified, loaded and deleted. Raises `NoCluster`."""
    return CheckpointsView(_feed(), _shelf(folder))


def dashboard(folder: Folder | None = None, *, variable: str = "") -> Dashboard:
    """The three as tabs, one for a notebook: opened again it moves here. Raises `NoCluster`.

    `folder`: whose checkpoints stand beside the saves. `variable`: whose shards are shown until another is typed in.
    """
    return Dashboard.reopen(_feed(), None if folder is None else _shelf(folder), variable=variable)


def _feed() -> ClusterFeed:
    return ClusterFeed(default_cluster.current())


def _shelf(folder: Folder) -> FolderShelf:
    return FolderShelf(folder, _load)


def _load(where: str, manifest: Manifest) -> str | None:
    """Have the ranks load what their `Accelerator` has saved; of others nobody knows into what."""
    if OF_ACCELERATOR not in manifest.metadata:
        return None
    default_cluster.current().run(f"accelerator.load_state({where!r})")
    return f"{where} is loaded into what the ranks' accelerator has prepared"
