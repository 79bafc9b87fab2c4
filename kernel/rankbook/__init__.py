"""Rankbook: a Jupyter-native distributed kernel for PyTorch, whose cells run on all ranks of a process group.

The public names are imported when they are first used, so that `import rankbook` imports no torch into the notebook
process.

Subpackages:

protocol/       messages between the notebook process, the forkserver and the ranks
transport/      ZeroMQ links, serialization and shared memory that carry these messages
launch/         launchers: the forkserver's process, the ranks' environment, the registry of detached clusters
output/         merge, store and replay the ranks' output; `CellResult`
coordinator/    notebook side: the state machine, its driver thread, and the public `Cluster`
rank/           rank side: the forkserver and the processes that execute cells
runtime/        `Accelerator` and the rest of the training API, also for scripts under torchrun
checkpoint/     sharded checkpoints that are saved on N ranks and loaded on M
widgets/        live views of ranks, shards and checkpoints, with HTML, text and SVG versions
magics/         `%%distributed`, `%distributed` and `%%local`; debugger, completion and comms for cells on ranks
jupyter/        the Jupyter kernel that runs plain cells on the ranks
cli/            the `rankbook` command: run a notebook, inspect and convert checkpoints

Modules that every subpackage may import:

errors.py            the exceptions that Rankbook raises
ranks.py             rank selections such as "0,2-3": parse, format, group
formatting.py        bytes, counts, durations and terminal text
lazy_imports.py      import public names on first use
package_folders.py   the folders of the package's files, for tracebacks and debuggers
process_identity.py  owners of files and folders: identify a process, detect that it has ended

The coordinator and the rank side never import each other: they share protocol/ and communicate over transport/.
tests/test_layers.py enforces this and the other import rules.
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
