"""Widgets that live on ranks, in the notebook's front end.

Owns: the kernel's end of each such comm, which passes on what comes; that a page which is reloaded finds them again.
Refuses: to know what a widget is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from comm.base_comm import BaseComm

from rankbook.comms import CommHeard, CommSaid
from rankbook.coordinator.cluster import Cluster
from rankbook.magics.widget_states import WidgetStates

_WIDGET = "jupyter.widget"
_CONTROL = "jupyter.widget.control"


class _Proxy(BaseComm):
    """Where the kernel looks for a comm whose other end is on a rank."""

    def __init__(self, bridge: Bridge, name: str, target: str) -> None:
        self._bridge = bridge
        super().__init__(target_name=target, comm_id=name, primary=False)

    def publish_msg(self, *_: object, **__: object) -> None:
        """Nothing: it says nothing of its own."""

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """The front end has said something."""
        self._bridge.heard("msg", self.comm_id, msg)

    def handle_close(self, msg: dict[str, Any]) -> None:
        """The front end has closed it."""
        self._bridge.heard("close", self.comm_id, msg)


class _WithTheRanks:
    """A comm on which ipywidgets tells a reloaded page of the notebook's own widgets, and with them of the ranks'."""

    def __init__(self, comm: BaseComm, states: WidgetStates) -> None:
        self._comm = comm
        self._states = states

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a comm has
        return getattr(self._comm, name)

    def send(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[bytes] | None = None,
    ) -> None:
        """See `comm.base_comm.BaseComm`."""
        if data.get("method") == "update_states":
            ranks = self._states.everything()
            states, paths = {**data["states"], **ranks.states}, [*data.get("buffer_paths", ()), *ranks.paths]
            data, buffers = {**data, "states": states, "buffer_paths": paths}, [*(buffers or ()), *ranks.buffers]
        self._comm.send(data, metadata, buffers=list(buffers or ()))


class _Finder:
    """Stands before ipywidgets where a page asks which widgets there are."""

    def __init__(self, stock: Callable[[Any, dict[str, Any]], None]) -> None:
        self._stock = stock
        self.states = WidgetStates()

    def __call__(self, comm: BaseComm, message: dict[str, Any]) -> None:
        """A page opens a comm to ask."""
        self._stock(_WithTheRanks(comm, self.states), message)


def _finder_for(manager: Any) -> _Finder:  # noqa: ANN401 - a CommManager, whose target's type is narrower than ours
    """The kernel's, which is made for the first widget."""
    import ipywidgets  # noqa: F401 - later it would put itself in the place of what stands before it

    target = manager.targets[_CONTROL]
    if not isinstance(target, _Finder):
        target = manager.targets[_CONTROL] = _Finder(target)
    return target


class Bridge:
    """Between the ranks of `cluster` and the front end of `kernel`, from now on. `parent` is the cell's message."""

    def __init__(self, cluster: Cluster, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self.cluster, self._kernel = cluster, kernel
        self.parent: Any = None
        self._states = WidgetStates()
        cluster.comms.listener = self._said

    def heard(self, kind: Any, name: str, message: dict[str, Any]) -> None:  # noqa: ANN401 - "msg" or "close"
        """The front end has said something: pass it on."""
        data, frames = message["content"].get("data", {}), message.get("buffers", ())
        if kind == "close":
            self._states.close(name)
        elif data.get("method") == "request_state" and (known := self._states.update_of(name)) is not None:
            answer, buffers = known  # whoever asks waits for an answer to this very message
            self._send("comm_msg", {"comm_id": name, "data": answer}, {}, message, buffers)
            return
        else:
            self._states.change(name, data, frames)
        content, metadata = json.dumps(data), json.dumps(message.get("metadata", {}), default=str)
        self.cluster.comms.tell(CommHeard(kind, name, content, metadata), frames)

    def _said(self, _rank: int, message: CommSaid, frames: Sequence[memoryview]) -> None:
        manager, data = self._kernel.comm_manager, json.loads(message.content)
        content = {"comm_id": message.comm, "data": data}
        match message.kind:
            case "open":
                manager.register_comm(_Proxy(self, message.comm, message.target))
                content |= {"target_name": message.target, "target_module": None}
                if message.target == _WIDGET:
                    self._states = _finder_for(manager).states
                    self._states.open(message.comm, data, frames)
            case "msg":
                self._states.change(message.comm, data, frames)
            case "close":
                self._states.close(message.comm)
                if message.comm in manager.comms:
                    manager.unregister_comm(manager.comms[message.comm])
        buffers = [bytes(each) for each in frames]
        self._send(f"comm_{message.kind}", content, json.loads(message.metadata), self.parent, buffers)

    def _send(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any], parent: object, buffers: list[bytes]
    ) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            kind,
            content,
            metadata=metadata,
            parent=parent,
            ident=f"comm-{content['comm_id']}".encode(),
            buffers=buffers,
        )
