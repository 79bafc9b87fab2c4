"""torch's backends for a group.

Owns: which kind of device gets which, and how each is made. Refuses: to know when, or what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankbook.rank.process_groups.gloo import make_gloo


def backends_of(backend: str) -> dict[str, str]:
    """The backend of each kind of device."""
    if backend == "undefined":
        return {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}
    return dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def make_backend(
    backend: str,
    store: dist.Store,
    name: str,
    ranks: tuple[int, ...],
    rank: int,
    timeout: timedelta,
    wait: Callable[[dist.Store, list[str]], None],
) -> Any:  # noqa: ANN401 - torch has no type for it
    """Return a gloo or nccl backend for the group `name` of the world's `ranks`, in which this one is number `rank`.

    `wait` waits for keys of a store.
    """
    if backend == "gloo":
        made: Any = make_gloo(store, rank, len(ranks), timeout, wait)
        made.options.global_ranks_in_group = list(ranks)
        made.options.group_name = c10d.GroupName(name)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = c10d.GroupName(name)
        made = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    made._set_sequence_number_for_group()
    return made
