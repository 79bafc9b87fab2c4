"""Comms of the widgets that are created on this rank.

Outgoing comm messages are sent to the notebook. Incoming ones are handled on a thread of their own, which the first
message starts: a slider that is moved while a cell runs changes its value at once, and its observers run beside the
cell.

The page may answer the opening of a comm while the cell is still constructing its widget, as ipympl's page does for a
figure. So the messages for a comm that a cell opens are held until the widget is displayed, until another widget refers
to it, or until the cell ends.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import comm
from comm.base_comm import BaseComm, CommManager

from rankbook.ipython_compat import replace_ipykernel_comm
from rankbook.protocol.messages import CommFromRank, CommToRank
from rankbook.rank.tracebacks import text_of
from rankbook.transport.link import RankLink

_Kind = Literal["open", "msg", "close"]

_REFERENCE = re.compile("IPY_MODEL_([0-9a-zA-Z-]+)")
"""Reference to another widget in the state of a widget."""


# The way of a message, from a slider in the browser to its observer on the rank and back:
#
#     browser -> notebook's kernel -> magics/comm_bridge.py -> CommToRank -> control thread -> `receive_comm`
#     comm thread: `_CommRegistry.run` -> ipywidgets sets the trait and calls observers
#     an observer changes another trait -> `publish_msg` -> CommFromRank -> the notebook -> browser
class RankComm(BaseComm):
    """The rank's end of a comm."""

    kernel: object = "rankbook"
    """ipywidgets 7 sends messages only over a comm that has a kernel."""

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[bytes | memoryview] | None = None,
        **_keys: Any,  # noqa: ANN401 - comm's own
    ) -> None:
        """Send a comm message to the notebook, see `comm.base_comm.BaseComm`."""
        # None in the forkserver and in a forked child.
        if _registry.link is not None:
            if msg_type not in ("comm_open", "comm_msg", "comm_close"):
                raise ValueError(f"invalid msg_type={msg_type!r}: expected 'comm_open', 'comm_msg' or 'comm_close'")
            if msg_type == "comm_open" and _registry.on_open is not None:
                _registry.on_open(data or {})
            kind = cast("_Kind", msg_type.removeprefix("comm_"))
            name, content = text_of(self.comm_id), json.dumps(data or {})
            # Before the opening leaves: the front end's answer must already find its comm held.
            _registry.held.message_sent(kind, name, content)
            message = CommFromRank(kind, name, text_of(self.target_name), content, json.dumps(metadata or {}))
            _registry.link.send(message, [memoryview(buffer).cast("B") for buffer in buffers or ()])

    def __del__(self) -> None:
        """Send no message: the garbage collector may run in the middle of another message."""


_Received = tuple[CommToRank, Sequence[memoryview]]


class HeldMessages:
    """The messages for comms that the running cell has opened and whose widgets may not be complete. Any thread.

    `deliver` takes the messages that are not held, in the order in which they came.
    """

    def __init__(self, deliver: Callable[[_Received], None]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        # By comm id. An entry without messages is a comm whose messages will be held.
        self._held: dict[str, list[_Received]] = {}
        self._in_cell = False
        self.comm_thread = 0
        """The thread that handles the messages, which cannot come before it has constructed a widget itself."""

    def begin_cell(self) -> None:
        """Hold the messages for comms that are opened from now on."""
        self._in_cell = True

    def end_cell(self) -> None:
        """Deliver everything, and hold nothing until the next cell begins."""
        self._in_cell = False
        self.release()

    def message_sent(self, kind: str, name: str, content: str) -> None:
        """Record what the rank sends: an opening begins to hold; a state that refers to a widget releases that."""
        # The frequent case is that nothing is held.
        if self._held:
            self.release(_REFERENCE.findall(content))
        if kind == "open" and self._in_cell and threading.get_ident() != self.comm_thread:
            with self._lock:
                self._held[name] = []

    def message_received(self, received: _Received) -> None:
        """Hold or deliver a message."""
        # Delivering under the lock keeps the order of the messages of a comm. `deliver` only puts into a queue.
        with self._lock:
            pending = self._held.get(received[0].comm)
            if pending is None:
                self._deliver(received)
            else:
                pending.append(received)

    def release(self, names: Iterable[str] | None = None) -> None:
        """Deliver the messages of the comms `names`, by default of all, and hold no more of them."""
        with self._lock:
            for name in self._held.copy() if names is None else names:
                for received in self._held.pop(name, ()):
                    self._deliver(received)


class _CommRegistry:
    """The comms of this process, and the thread that handles incoming messages."""

    def __init__(self) -> None:
        self.manager = CommManager()
        self.link: RankLink | None = None
        self.on_open: Callable[[dict[str, Any]], None] | None = None
        self.inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self.held = HeldMessages(self.inbox.put)
        # Acquired once and never released, so that exactly one thread is started, by the first message.
        self.started = _thread.allocate_lock()

    def run(self) -> None:
        """Handle incoming messages forever."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        self.held.comm_thread = threading.get_ident()
        while True:
            message, frames = self.inbox.get()
            end = self.manager.comms.get(message.comm)
            # The rank has closed the comm meanwhile.
            if end is None:
                continue
            content = {"comm_id": message.comm, "data": json.loads(message.content)}
            msg = {"content": content, "metadata": json.loads(message.metadata), "buffers": list(frames)}
            try:
                if message.kind == "close":
                    # Before the handlers run, as in `CommManager.comm_close`.
                    self.manager.unregister_comm(end)
                    end.handle_close(msg)
                else:
                    end.handle_msg(msg)
            except BaseException as error:  # noqa: BLE001 - user code; printed to the rank's stderr
                with contextlib.suppress(BaseException):  # sys.stderr may be a user's object
                    traceback.print_exception(error, file=sys.stderr)


_registry = _CommRegistry()


def prepare_comms() -> None:
    """Make the `comm` package create `RankComm` objects.

    Called in the forkserver, before anything imports ipywidgets.
    """
    # These two functions of the package `comm` exist to be replaced.
    comm.create_comm = RankComm
    comm.get_comm_manager = lambda: _registry.manager
    replace_ipykernel_comm(RankComm, CommManager)


def attach_comms(link: RankLink, on_open: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Send the comm messages of this process over `link`. A forked child process sends none: the link is its parent's.

    `on_open` is called with the data of every comm_open message.
    """
    _registry.link, _registry.on_open = link, on_open
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    _registry.link = None
    _registry.held = HeldMessages(_registry.inbox.put)  # another thread may have held the lock of the old one


def receive_comm(message: CommToRank, frames: Sequence[memoryview]) -> None:
    """Queue a message for the comm thread."""
    _registry.held.message_received((message, frames))
    if _registry.started.acquire(blocking=False):
        _thread.start_new_thread(_registry.run, ())  # Thread.start would wait for the new thread


def begin_cell() -> None:
    """Hold the messages for the comms that the cell opens until their widgets are complete."""
    _registry.held.begin_cell()


def release_messages() -> None:
    """Deliver the messages that are held: a widget is displayed."""
    _registry.held.release()


def end_cell() -> None:
    """Deliver the messages that are held, and hold no more."""
    _registry.held.end_cell()


def is_open(name: object) -> bool:
    """Return True if a comm with this id is open."""
    return isinstance(name, str) and name in _registry.manager.comms
