"""Comms of the widgets that are created on this rank.

Outgoing comm messages are sent to the notebook. Incoming ones are handled on a thread of their own, which the first
message starts: a slider that is moved while a cell runs changes its value at once, and its observers run beside the
cell.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import queue
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import comm
from comm.base_comm import BaseComm, CommManager

from rankbook.protocol.comm import CommFromRank, CommToRank
from rankbook.rank.tracebacks import text_of
from rankbook.transport.link import RankLink

_Kind = Literal["open", "msg", "close"]


class RankComm(BaseComm):
    """The rank's end of a comm."""

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[bytes | memoryview] | None = None,
        **_keys: Any,  # noqa: ANN401 - comm's own
    ) -> None:
        """Send a comm message to the notebook, see `comm.base_comm.BaseComm`."""
        if _office.link is not None:
            if msg_type not in ("comm_open", "comm_msg", "comm_close"):
                raise ValueError(f"invalid msg_type={msg_type!r}: expected 'comm_open', 'comm_msg' or 'comm_close'")
            if msg_type == "comm_open" and _office.opening is not None:
                _office.opening(data or {})
            kind = cast("_Kind", msg_type.removeprefix("comm_"))
            message = CommFromRank(
                kind,
                text_of(self.comm_id),
                text_of(self.target_name),
                json.dumps(data or {}),
                json.dumps(metadata or {}),
            )
            _office.link.send(message, [memoryview(buffer).cast("B") for buffer in buffers or ()])

    def __del__(self) -> None:
        """Send no message: the garbage collector may run in the middle of another message."""


class _CommRegistry:
    """The comms of this process, and the thread that handles incoming messages."""

    def __init__(self) -> None:
        self.manager = CommManager()
        self.link: RankLink | None = None
        self.opening: Callable[[dict[str, Any]], None] | None = None
        self.heard: queue.SimpleQueue[tuple[CommToRank, Sequence[memoryview]]] = queue.SimpleQueue()
        self.started = _thread.allocate_lock()

    def run(self) -> None:
        """Handle incoming messages forever."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        while True:
            message, frames = self.heard.get()
            end = self.manager.comms.get(message.comm)
            if end is None:
                continue
            content = {"comm_id": message.comm, "data": json.loads(message.content)}
            msg = {"content": content, "metadata": json.loads(message.metadata), "buffers": list(frames)}
            try:
                if message.kind == "close":
                    self.manager.unregister_comm(end)
                    end.handle_close(msg)
                else:
                    end.handle_msg(msg)
            except BaseException as error:  # noqa: BLE001 - user code; printed to the rank's stderr
                with contextlib.suppress(BaseException):  # sys.stderr may be a user's object
                    traceback.print_exception(error, file=sys.stderr)


_office = _CommRegistry()


def prepare_comms() -> None:
    """Make the `comm` package create `RankComm` objects.

    Called in the forkserver, before anything imports ipywidgets.
    """
    comm.create_comm = RankComm
    comm.get_comm_manager = lambda: _office.manager


def attach_comms(link: RankLink, opening: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Send the comm messages of this process over `link`. A forked child process sends none: the link is its parent's.

    `opening` is called with the data of every comm_open message.
    """
    _office.link, _office.opening = link, opening
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    _office.link = None


def receive_comm(message: CommToRank, frames: Sequence[memoryview]) -> None:
    """Queue a message for the comm thread."""
    _office.heard.put((message, frames))
    if _office.started.acquire(blocking=False):
        _thread.start_new_thread(_office.run, ())  # Thread.start would wait for the new thread


def is_open(name: object) -> bool:
    """Return True if a comm with this id is open."""
    return isinstance(name, str) and name in _office.manager.comms
