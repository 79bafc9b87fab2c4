"""Joining and leaving torch's default process group.

Owns: the rendezvous store and the default group's lifetime. Refuses: to decide when.

The store is a process of its own, so that no rank's death takes it along. It listens on the loopback interface only:
torch's own store would listen on every interface, and it answers whoever asks.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

JOIN_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the others to join."""


def serve_store(listener: int, port: int, liveness: int) -> None:
    """Host the store on the listening socket `listener` until `liveness` closes. Never returns before."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while os.read(liveness, 1):
        pass
    del store


class GroupMember:
    """One rank's membership. Its group's generations share one store under different prefixes."""

    def __init__(self, *, rank: int, world_size: int, backend: str, device: torch.device, port: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._device = device
        self._port = port

    def join(self, generation: int) -> None:
        """Leave the group of the generation before and join this one. Raises torch's errors when others do not come."""
        self.leave()
        # gloo waits for a rank that died meanwhile for half an hour, deaf to signals. So it waits on a thread, and an
        # interrupt leaves that behind, with its store, which is locked as long.
        connection = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=JOIN_TIMEOUT)
        store = dist.PrefixStore(f"generation-{generation}", connection)
        failed: list[BaseException] = []
        joining = threading.Thread(target=self._join, args=(store, failed), name="rankbook-join", daemon=True)
        joining.start()
        joining.join()
        if failed:
            raise failed[0]

    def _join(self, store: dist.Store, failed: list[BaseException]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            dist.init_process_group(
                self._backend,
                store=store,
                rank=self._rank,
                world_size=self._world_size,
                device_id=self._device if "nccl" in self._backend and self._device.type == "cuda" else None,
            )
        except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
            failed.append(error)

    @staticmethod
    def leave() -> None:
        """Leave the group, if in one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # a join that failed has counted too, and the ranks must agree
