"""Run notebook cells on all accelerators at once: interactive distributed PyTorch in any Jupyter front end.

`%load_ext rankbook` defines the cell magic `%%distributed`, which runs a cell on every rank. A rank is a process: one
per GPU, or two on the CPU. Ranks keep their variables from cell to cell. `%distributed?` shows all commands.

Run a cell on all ranks:

    %%distributed
    x = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(x)
    print("sum", x.tolist())

Train the same loop on one device and on many; names and signatures are those of Hugging Face Accelerate:

    %%distributed
    from rankbook import Accelerator
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

Use the ranks from Python, in a notebook or in a script:

    with rankbook.start(4) as cluster:
        cluster.push({"scale": 0.5})
        result = cluster.run("print(rank, scale)")
        cluster.pull("scale")    # [0.5, 0.5, 0.5, 0.5]

The public names are imported when they are first used: `import rankbook` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook import runtime
from rankbook.accelerate_names import explain_missing
from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    # For type checkers and editors, which do not run `lazy_imports`. tests/test_public_surface.py holds the names.
    from rankbook.coordinator.cluster import Cluster, RankStatus
    from rankbook.coordinator.default_cluster import attach, current, start, stop
    from rankbook.coordinator.queries import Peeked
    from rankbook.coordinator.recovery import Healed
    from rankbook.coordinator.resize import Resized
    from rankbook.coordinator.sync_check import Finding, SyncReport
    from rankbook.errors import (
        BadRequest,
        CellError,
        CellTimeout,
        ClusterStopped,
        CollectiveAborted,
        InvalidArgument,
        LostRank,
        NoCluster,
        NoClusterError,
        NumericalError,
        RankbookError,
        RankLostError,
        StartError,
        TransferError,
    )
    from rankbook.magics import load_ipython_extension, unload_ipython_extension
    from rankbook.magics.launchers import debug_launcher, notebook_launcher
    from rankbook.magics.views import checkpoints, dashboard, gradients, placement, shards
    from rankbook.numerics import compare, watch_numbers
    from rankbook.numerics.norms import GradientTable, ParameterGradient
    from rankbook.numerics.settings import Layout
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
    "Finding",
    "GradientTable",
    "Healed",
    "InvalidArgument",
    "Layout",
    "LostRank",
    "NoCluster",
    "NoClusterError",
    "NumericalError",
    "ParameterGradient",
    "Peeked",
    "RankLostError",
    "RankOutcome",
    "RankStatus",
    "RankbookError",
    "Resized",
    "StartError",
    "SyncReport",
    "TransferError",
    "attach",
    "checkpoints",
    "compare",
    "current",
    "dashboard",
    "debug_launcher",
    "gradients",
    "load_ipython_extension",
    "notebook_launcher",
    "placement",
    "shards",
    "start",
    "stop",
    "unload_ipython_extension",
    "watch_numbers",
]
__all__ += runtime.__all__

# Names and the modules that define them. A type checker sees the imports above instead.
__getattr__, __dir__ = lazy_imports(
    __name__,
    {
        "rankbook.coordinator.cluster": ("Cluster", "RankStatus"),
        "rankbook.coordinator.recovery": ("Healed",),
        "rankbook.coordinator.resize": ("Resized",),
        "rankbook.coordinator.sync_check": ("Finding", "SyncReport"),
        "rankbook.numerics.norms": ("GradientTable", "ParameterGradient"),
        "rankbook.coordinator.queries": ("Peeked",),
        "rankbook.coordinator.default_cluster": ("attach", "current", "start", "stop"),
        "rankbook.errors": (
            "BadRequest",
            "CellError",
            "CellTimeout",
            "ClusterStopped",
            "CollectiveAborted",
            "InvalidArgument",
            "LostRank",
            "NoCluster",
            "NoClusterError",
            "NumericalError",
            "RankLostError",
            "RankbookError",
            "StartError",
            "TransferError",
        ),
        "rankbook.numerics": ("compare", "watch_numbers"),
        "rankbook.numerics.settings": ("Layout",),
        "rankbook.output.cell_result": ("CellResult", "RankOutcome"),
        "rankbook.magics.views": ("checkpoints", "dashboard", "gradients", "placement", "shards"),
        "rankbook.magics.launchers": ("debug_launcher", "notebook_launcher"),
        "rankbook.magics": ("load_ipython_extension", "unload_ipython_extension"),
        "rankbook.runtime": runtime.__all__,
    },
    explain_missing,
)
