"""Joining and leaving torch's default process group.

Owns: the rendezvous store and the default group's lifetime. Refuses: to decide when.

The store is a process of its own, so that no rank's death takes it along. It listens on the loopback interface only:
torch's own store would listen on every interface, and it answers whoever asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from rankbook.rank import host

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
        self._store: dist.TCPStore | None = None
        self._before: set[int] = set()

    def join(self, generation: int) -> None:
        """Leave the group of the generation before and join this one. Raises torch's errors when others do not come."""
        self.leave()
        self._store = None
        self._before = host.descriptors()
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=JOIN_TIMEOUT)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"generation-{generation}", self._store),
            rank=self._rank,
            world_size=self._world_size,
            device_id=self._device if "nccl" in self._backend and self._device.type == "cuda" else None,
        )

    def abort_join(self) -> None:
        """Make a `join` that waits for others in C++, where no signal reaches it, raise at once. Any thread."""
        for descriptor in host.descriptors() - self._before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)  # of its listening socket's end gloo would make an abort()

    @staticmethod
    def leave() -> None:
        """Leave the group, if in one."""
        if dist.is_initialized():
            dist.destroy_process_group()
