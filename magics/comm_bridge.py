"""Comm bridge: forward comm messages between widgets on the ranks and the notebook's front end.

The kernel registers a proxy for every comm of a rank and forwards messages in both directions. It also caches the last
state of every widget from these messages, so that a reloaded page gets it at once, even while the rank is busy. A state
is JSON with its binary buffers separate: `buffer_paths` says where the buffers belong, as in the messages of
ipywidgets.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from comm.base_comm import BaseComm

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.running_cell import Sink
from rankbook.magics.output_panel import CapturedSink, JupyterSink
from rankbook.protocol.messages import CommFromRank, CommToRank

_WIDGET = "jupyter.widget"
_CONTROL = "jupyter.widget.control"
# ipywidgets sends "echo_update" for a change that a front end has made, so that all pages with the widget get it.
_UPDATES = frozenset({"update", "echo_update"})
Path = tuple[str | int, ...]


class WidgetState(NamedTuple):
    """The state of one widget, with its buffers by path."""

    plain: dict[str, Any]
    buffers: dict[Path, bytes]

    def update(self, data: dict[str, Any], frames: Sequence[bytes | memoryview]) -> WidgetState:
        """Return the state after a message, which replaces the keys that it contains."""
        # A message replaces whole top-level keys of the state, with the buffers that lie below them.
        paths = [tuple(path) for path in data.get("buffer_paths", ())]
        named = {*data.get("state", {}), *(path[0] for path in paths)}
        plain = {key: value for key, value in self.plain.items() if key not in named}
        buffers = {path: value for path, value in self.buffers.items() if path[0] not in named}
        new = {path: bytes(frame) for path, frame in zip(paths, frames, strict=False)}
        return WidgetState({**plain, **data.get("state", {})}, {**buffers, **new})


class AllStates(NamedTuple):
    """The states of all widgets by comm id, and their buffers, whose paths begin with the comm id."""

    states: dict[str, dict[str, Any]]
    paths: list[list[str | int]]
    buffers: list[bytes]


class WidgetStateCache:
    """The last state of every widget that lives on a rank. Thread-safe."""

    def __init__(self) -> None:
        self._states: dict[str, WidgetState] = {}
        self._lock = threading.Lock()

    def open(self, comm: str, data: dict[str, Any], frames: Sequence[bytes | memoryview]) -> None:
        """Add a new widget."""
        with self._lock:
            self._states[comm] = WidgetState({}, {}).update(data, frames)

    def update(self, comm: str, data: object, frames: Sequence[bytes | memoryview]) -> None:
        """Update a widget from a message in either direction; ignore messages that are not updates."""
        with self._lock:
            state = self._states.get(comm)
            if state is not None and isinstance(data, dict) and data.get("method") in _UPDATES:
                self._states[comm] = state.update(data, frames)

    def close(self, comm: str) -> None:
        """Forget a widget."""
        with self._lock:
            self._states.pop(comm, None)

    def state_message(self, comm: str) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return the answer to `request_state`, with its buffers; None if the comm is not a widget's."""
        # No lock: a `WidgetState` is never changed, only replaced.
        state = self._states.get(comm)
        if state is None:
            return None
        paths = [list(path) for path in state.buffers]
        return {"method": "update", "state": state.plain, "buffer_paths": paths}, list(state.buffers.values())

    def all_states(self) -> AllStates:
        """Return the widgets' part of the answer to `request_states`."""
        answer = AllStates({}, [], [])
        for comm, state in list(self._states.items()):
            answer.states[comm] = {
                "model_name": state.plain.get("_model_name"),
                "model_module": state.plain.get("_model_module"),
                "model_module_version": state.plain.get("_model_module_version"),
                "state": state.plain,
            }
            for path, buffer in state.buffers.items():
                answer.paths.append([comm, "state", *path])
                answer.buffers.append(buffer)
        return answer


class _Proxy(BaseComm):
    """Represent a comm of a rank in the kernel's comm manager."""

    def __init__(self, bridge: CommBridge, name: str, target: str) -> None:
        self._bridge = bridge
        # `primary=False`: the constructor must not open a comm, since the rank has opened it.
        super().__init__(target_name=target, comm_id=name, primary=False)

    def publish_msg(self, *_: object, **__: object) -> None:
        """Publish nothing: only the rank's end of the comm sends messages."""

    def handle_msg(self, msg: dict[str, Any]) -> None:
        self._bridge.front_end_message_received("msg", self.comm_id, msg)

    def handle_close(self, msg: dict[str, Any]) -> None:
        self._bridge.front_end_message_received("close", self.comm_id, msg)


class _MergedStatesComm:
    """A comm to a reloaded page that adds the ranks' widgets when ipywidgets sends the notebook's own."""

    def __init__(self, comm: BaseComm, states: WidgetStateCache) -> None:
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
        if data.get("method") == "update_states":
            # States and paths begin with the comm id, so the two answers have no key in common. The buffers follow in
            # the order of their paths.
            ranks = self._states.all_states()
            states, paths = {**data["states"], **ranks.states}, [*data.get("buffer_paths", ()), *ranks.paths]
            data, buffers = {**data, "states": states, "buffer_paths": paths}, [*(buffers or ()), *ranks.buffers]
        self._comm.send(data, metadata, buffers=list(buffers or ()))


class _ControlTarget:
    """Wrap ipywidgets' comm target with which a reloaded page asks for the existing widgets."""

    def __init__(self, stock: Callable[[Any, dict[str, Any]], None]) -> None:
        self._stock = stock
        self.states = WidgetStateCache()

    def __call__(self, comm: BaseComm, message: dict[str, Any]) -> None:
        # ipywidgets keeps this comm in `Widget._control_comm`, and sends the answer to `request_states` through it
        # later.
        self._stock(_MergedStatesComm(comm, self.states), message)


def _control_target(manager: Any) -> _ControlTarget:  # noqa: ANN401 - a CommManager, whose target's type is narrower than ours
    """Return the kernel's `_ControlTarget`, installing it for the first widget."""
    # The target belongs to ipywidgets, which registers it when it is imported.
    import ipywidgets  # noqa: F401 - a later import would replace our target with its own

    target = manager.targets[_CONTROL]
    if not isinstance(target, _ControlTarget):
        target = manager.targets[_CONTROL] = _ControlTarget(target)
    return target


def forward_comms(cluster: Cluster, sink: Sink) -> None:
    """Forward comm messages of the ranks to the front end of `sink`, from now on as output of its cell.

    Does nothing if `sink` is not that of a front end.
    """
    if isinstance(sink, JupyterSink | CapturedSink):
        bridge = cluster.comms.listener
        if not isinstance(bridge, CommBridge):
            bridge = cluster.comms.listener = CommBridge(cluster, sink.kernel)
        bridge.parent = sink.parent


class CommBridge:
    """Forward comm messages between the ranks of `cluster` and the front end of `kernel`.

    It is the listener of the cluster's comms. `parent` is the message of the cell whose output the widgets' messages
    belong to.
    """

    def __init__(self, cluster: Cluster, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self._cluster, self._kernel = cluster, kernel
        self.parent: Any = None
        self._states = WidgetStateCache()

    def front_end_message_received(self, kind: Any, name: str, message: dict[str, Any]) -> None:  # noqa: ANN401 - "msg" or "close"
        """Forward a comm message of the front end to the rank, or answer it from the cache."""
        data, frames = message["content"].get("data", {}), message.get("buffers", ())
        # The data of a widget is a dict; that of another comm may be any JSON value.
        asks_for_state = isinstance(data, dict) and data.get("method") == "request_state"
        # The rank may be busy, so a request for the state is answered from the cache.
        if kind == "close":
            self._states.close(name)
        elif asks_for_state and (update := self._states.state_message(name)) is not None:
            answer, buffers = update  # the sender waits for an answer whose parent is this message
            self._send("comm_msg", {"comm_id": name, "data": answer}, {}, message, buffers)
            return
        else:
            self._states.update(name, data, frames)
        # A page may still show widgets of ranks that have been stopped. Requests for their states are answered above.
        if self._cluster.stopped:
            return
        # `default=str`: the metadata may have values that JSON does not have.
        content, metadata = json.dumps(data), json.dumps(message.get("metadata", {}), default=str)
        self._cluster.comms.send(CommToRank(kind, name, content, metadata), frames)

    def __call__(self, _rank: int, message: CommFromRank, frames: Sequence[memoryview]) -> None:
        """Forward a comm message of a rank to the front end."""
        # Called by the coordinator's driver thread; the cache has a lock, and a session may send from any thread.
        manager, data = self._kernel.comm_manager, json.loads(message.content)
        content = {"comm_id": message.comm, "data": data}
        match message.kind:
            case "open":
                # Before the message is sent: the front end may answer at once, and the manager drops messages of
                # unknown comms.
                manager.register_comm(_Proxy(self, message.comm, message.target))
                content |= {"target_name": message.target, "target_module": None}
                if message.target == _WIDGET:
                    # From the first widget on, the cache is the one that answers reloaded pages.
                    self._states = _control_target(manager).states
                    self._states.open(message.comm, data, frames)
            case "msg":
                self._states.update(message.comm, data, frames)
            case "close":
                self._states.close(message.comm)
                if message.comm in manager.comms:
                    manager.unregister_comm(manager.comms[message.comm])
        buffers = [bytes(frame) for frame in frames]
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
