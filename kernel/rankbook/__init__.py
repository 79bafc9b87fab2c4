"""Rankbook: a notebook cell that runs on every accelerator at once.

Owns: the public names, imported when they are used. Refuses: to import torch into the notebook.

The rooms, from the wire up; imports point upwards in this list, never down:

lazy_imports.py   imports public names when they are first used
telemetry.py      what a rank can tell about itself
ownership.py      which process owns a file or folder, and whether it lives
wire.py           what a message is
formatting.py     numbers, names and terminal text for people
keeping.py        the vocabulary of ranks that outlive the notebook
looking.py        the vocabulary of looks at the ranks while they work
comms.py          the vocabulary of widgets that live on ranks
debugging.py      the vocabulary of ranks under a debugger
measuring.py      the vocabulary of cells that are measured
forking.py        the vocabulary of the forkserver
errors.py         one tree; the class names the culprit
messages.py       the rest of the wire's vocabulary
sources.py        the cells that functions were defined in, which travel with them
ranks.py          rank selections, "0,2-3"
lines.py          bytes to lines and progress bars
queues.py         lines the ranks up: which of their outputs are the same
record.py         what stands in the notebook, to be shown again without some ranks' part
output.py         merges what the ranks print into what the notebook shows
pieces.py         the same kept apart by rank
results.py        folds what the ranks send into one CellResult
transport/        links, pickles, shared memory
launch/           how ranks come to be
coordinator/      the notebook side: decisions (pure), their driver, the public Cluster
checkpoint/       sharded checkpoints: saved on any number of ranks, loaded on any other
runtime/          training code for one device and for many, with or without a notebook
rank/             the rank side: forkserver, the process that runs cells
launched.py       a function that a launcher runs on a rank
widgets/          what a person sees of it: live views, HTML, text
magics/           %%distributed and %distributed
jupyter/          the kernel whose plain cells run on the ranks
cli/              the `rankbook` command, which also runs a notebook without a browser

Coordinator and rank never import each other: they share messages.py and meet on the wire. tests/test_layers.py holds
all of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook import runtime
from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from rankbook.coordinator.cluster import Cluster, RankStatus
    from rankbook.coordinator.default_cluster import attach, current, start, stop
    from rankbook.coordinator.evaluate import Peeked
    from rankbook.coordinator.recovery import Healed
    from rankbook.errors import (
        BadRequest,
        CellError,
        CellTimeout,
        ClusterStopped,
        CollectiveAborted,
        LostRank,
        NoCluster,
        RankbookError,
        StartError,
        TransferError,
    )
    from rankbook.magics import load_ipython_extension, unload_ipython_extension
    from rankbook.magics.launchers import debug_launcher, notebook_launcher
    from rankbook.magics.views import checkpoints, dashboard, placement, shards
    from rankbook.output.cell_result import CellResult, RankOutcome
    from rankbook.runtime import *  # noqa: F403 - its list of names is the only one

__version__ = "0.1.0"

__all__ = [
    "BadRequest",
    "CellError",
    "CellResult",
    "CellTimeout",
    "Cluster",
    "ClusterStopped",
    "CollectiveAborted",
    "Healed",
    "LostRank",
    "NoCluster",
    "Peeked",
    "RankOutcome",
    "RankStatus",
    "RankbookError",
    "StartError",
    "TransferError",
    "attach",
    "checkpoints",
    "current",
    "dashboard",
    "debug_launcher",
    "load_ipython_extension",
    "notebook_launcher",
    "placement",
    "shards",
    "start",
    "stop",
    "unload_ipython_extension",
]
__all__ += runtime.__all__

__getattr__, __dir__ = lazy_imports(
    __name__,
    {
        "rankbook.coordinator.cluster": ("Cluster", "RankStatus"),
        "rankbook.coordinator.recovery": ("Healed",),
        "rankbook.coordinator.evaluate": ("Peeked",),
        "rankbook.coordinator.default_cluster": ("attach", "current", "start", "stop"),
        "rankbook.errors": (
            "BadRequest",
            "CellError",
            "CellTimeout",
            "ClusterStopped",
            "CollectiveAborted",
            "LostRank",
            "NoCluster",
            "RankbookError",
            "StartError",
            "TransferError",
        ),
        "rankbook.output.cell_result": ("CellResult", "RankOutcome"),
        "rankbook.magics.views": ("checkpoints", "dashboard", "placement", "shards"),
        "rankbook.magics.launchers": ("debug_launcher", "notebook_launcher"),
        "rankbook.magics": ("load_ipython_extension", "unload_ipython_extension"),
        "rankbook.runtime": runtime.__all__,
    },
)
