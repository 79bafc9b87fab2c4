"""Widgets that live on ranks, in the notebook's front end.

Owns: the kernel's end of each such comm, which passes on what comes. Refuses: to know what a widget is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from comm.base_comm import BaseComm

from rankbook.comms import CommHeard, CommSaid
from rankbook.coordinator.cluster import Cluster


class _Proxy(BaseComm):
    """Where the kernel looks for a comm whose other end is on a rank."""

    def __init__(self, cluster: Cluster, name: str, target: str) -> None:
        self._cluster = cluster
        super().__init__(target_name=target, comm_id=name, primary=False)

    def publish_msg(self, *_: object, **__: object) -> None:
        """Nothing: it says nothing of its own."""

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """The front end has said something."""
        self._pass_on("msg", msg)

    def handle_close(self, msg: dict[str, Any]) -> None:
        """The front end has closed it."""
        self._pass_on("close", msg)

    def _pass_on(self, kind: Any, msg: dict[str, Any]) -> None:  # noqa: ANN401 - one of two words
        content, metadata = json.dumps(msg["content"].get("data", {})), json.dumps(msg.get("metadata", {}), default=str)
        self._cluster.comms.tell(CommHeard(kind, self.comm_id, content, metadata), msg.get("buffers", ()))


class Bridge:
    """Between the ranks of `cluster` and the front end of `kernel`, from now on. `parent` is the cell's message."""

    def __init__(self, cluster: Cluster, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self.cluster, self._kernel = cluster, kernel
        self.parent: Any = None
        cluster.comms.listener = self._said

    def _said(self, _rank: int, message: CommSaid, frames: Sequence[memoryview]) -> None:
        manager, content = self._kernel.comm_manager, {"comm_id": message.comm, "data": json.loads(message.content)}
        if message.kind == "open":
            manager.register_comm(_Proxy(self.cluster, message.comm, message.target))
            content |= {"target_name": message.target, "target_module": None}
        elif message.kind == "close" and message.comm in manager.comms:
            manager.unregister_comm(manager.comms[message.comm])
        self._kernel.session.send(
            self._kernel.iopub_socket,
            f"comm_{message.kind}",
            content,
            metadata=json.loads(message.metadata),
            parent=self.parent,
            ident=f"comm-{message.comm}".encode(),
            buffers=[bytes(each) for each in frames],
        )
