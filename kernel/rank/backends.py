"""torch's backends for a group.

Owns: which kind of device gets which, and how each is made. Refuses: to know when, or what becomes of them.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def backends_of(backend: str) -> dict[str, str]:
    """The backend of each kind of device."""
    if backend == "undefined":
        return {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}
    return dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def make_backend(
    backend: str, store: dist.Store, name: str, ranks: tuple[int, ...], rank: int, timeout: timedelta
) -> Any:  # noqa: ANN401 - torch has no type for it
    """A gloo or nccl backend for the group `name` of the world's `ranks`, in which this one is number `rank`."""
    if backend == "gloo":
        made: Any = dist.ProcessGroupGloo(store, rank, len(ranks), timeout=timeout)
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


def host_stores_of_users() -> None:
    """Have rank 0 host the store of `init_process_group(init_method="tcp://...")`.

    While `TORCHELASTIC_USE_AGENT_STORE` is set, as below torchrun, torch takes a store at any address for the agent's:
    no rank would host it, and all would wait for it. Only the address that the rank was started with is the cluster's.
    """
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # `torch.distributed` has a function of that name
    original = rendezvous._create_c10d_store
    if original.__module__ == __name__:
        return
    cluster = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> dist.Store:
        if (hostname, str(port)) == cluster:
            store: dist.Store = original(hostname, port, rank, world_size, timeout, use_libuv)
            return store
        options: Any = {"multi_tenant": True, "use_libuv": use_libuv}
        return dist.TCPStore(hostname, port, world_size, rank == 0, timeout, **options)

    rendezvous._create_c10d_store = create
