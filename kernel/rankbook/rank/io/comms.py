"""Widgets made on this rank: their comms go to the notebook, and what comes back is heard at once.

Owns: the comms that are open here, and the thread that hears, made by the first message. Refuses: to wait for the main
thread: a slider that is moved while a cell runs has its new value there. What listens to it runs beside the cell.
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
    """One comm's end on this rank."""

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[bytes | memoryview] | None = None,
        **_keys: Any,  # noqa: ANN401 - comm's own
    ) -> None:
        """See `comm.base_comm.BaseComm`."""
        if _office.link is not None:
            if msg_type not in ("comm_open", "comm_msg", "comm_close"):
                raise ValueError(f"invalid msg_type={msg_type!r}: expected 'comm_open', 'comm_msg' or 'comm_close'")
            if msg_type == "comm_open" and _office.opening is not None:
                _office.opening(data or {})
            kind = cast("_Kind", msg_type.removeprefix("comm_"))
            said = CommFromRank(
                kind,
                text_of(self.comm_id),
                text_of(self.target_name),
                json.dumps(data or {}),
                json.dumps(metadata or {}),
            )
            _office.link.send(said, [memoryview(each).cast("B") for each in buffers or ()])

    def __del__(self) -> None:
        """Nothing is said: garbage is collected anywhere, in the midst of a message that is sent too."""


class _CommRegistry:
    """The comms of this process."""

    def __init__(self) -> None:
        self.manager = CommManager()
        self.link: RankLink | None = None
        self.opening: Callable[[dict[str, Any]], None] | None = None
        self.heard: queue.SimpleQueue[tuple[CommToRank, Sequence[memoryview]]] = queue.SimpleQueue()
        self.started = _thread.allocate_lock()

    def run(self) -> None:
        """The thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
        while True:
            message, frames = self.heard.get()
            end = self.manager.comms.get(message.comm)
            if end is None:
                continue
            content = {"comm_id": message.comm, "data": json.loads(message.content)}
            told = {"content": content, "metadata": json.loads(message.metadata), "buffers": list(frames)}
            try:
                if message.kind == "close":
                    self.manager.unregister_comm(end)
                    end.handle_close(told)
                else:
                    end.handle_msg(told)
            except BaseException as error:  # noqa: BLE001 - user code; told where the rank prints
                with contextlib.suppress(BaseException):  # the stream is the user's too
                    traceback.print_exception(error, file=sys.stderr)


_office = _CommRegistry()


def prepare_comms() -> None:
    """Whoever makes a comm from here on makes one of ours. In the forkserver, before anything imports ipywidgets."""
    comm.create_comm = RankComm
    comm.get_comm_manager = lambda: _office.manager


def attach_comms(link: RankLink, opening: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Comms go out here, but for those of a subprocess that user code forks: the link is not its own.

    `opening` hears what each says as it opens.
    """
    _office.link, _office.opening = link, opening
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    _office.link = None


def receive_comm(message: CommToRank, frames: Sequence[memoryview]) -> None:
    """Have it heard, soon, on another thread."""
    _office.heard.put((message, frames))
    if _office.started.acquire(blocking=False):
        _thread.start_new_thread(_office.run, ())  # Thread.start would wait


def is_open(name: object) -> bool:
    """Whether a front end knows what is called so."""
    return isinstance(name, str) and name in _office.manager.comms
