"""Comms of widgets that live on ranks: which are open, and who passes them on.

Owns: that a comm is closed when its rank is gone. Refuses: to know what a front end is; without a listener nothing is
passed on.

Ranks under a debugger: who hears what theirs say, and which are paused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from rankbook.protocol.comm import CommFromRank, CommToRank, DapFromRank, DapToRank

CommListener = Callable[[int, CommFromRank, Sequence[memoryview]], None]


class CommChannels:
    """Those of one cluster; `send` sends to a rank. `said` and `forget` are the driver's, the rest is any thread's."""

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self._open: dict[str, int] = {}
        self.listener: CommListener | None = None

    def said(self, rank: int, message: CommFromRank, frames: Sequence[memoryview]) -> None:
        """A rank has said something."""
        if message.kind == "open":
            self._open[message.comm] = rank
        elif message.kind == "close":
            self._open.pop(message.comm, None)
        if self.listener is not None:
            self.listener(rank, message, frames)

    def tell(self, message: CommToRank, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Tell the rank whose comm it is; one that is gone hears nothing."""
        rank = self._open.get(message.comm) if message.kind == "msg" else self._open.pop(message.comm, None)
        if rank is not None:
            self._send(rank, message, frames)

    def forget(self, rank: int) -> None:
        """The rank's process is gone, and its widgets with it."""
        for name in [name for name, whose in self._open.items() if whose == rank]:
            self.said(rank, CommFromRank("close", name, "", "{}", "{}"), ())


DapListener = Callable[[int, str | None], None]
"""Called with a rank and what its debugger says; None when the rank's process is gone, and its debugger with it."""


class DapChannels:
    """Those of one cluster; `send` sends to a rank. `said` and `forget` are the driver's, the rest is any thread's."""

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self.listener: DapListener | None = None
        self.paused: dict[int, str] = {}
        """Where each rank that is paused is, in words; whoever listens keeps it."""

    def said(self, rank: int, message: DapFromRank) -> None:
        """A rank's debugger has said something."""
        if self.listener is not None:
            self.listener(rank, message.content)

    def tell(self, rank: int, content: str) -> bool:
        """Tell a rank's debugger. False where the rank is gone."""
        return self._send(rank, DapToRank(content))

    def let_go(self, ranks: Iterable[int]) -> None:
        """Whoever debugged these is gone: what is paused there goes on, freely."""
        content = json.dumps({"type": "request", "seq": 0, "command": "disconnect", "arguments": {}})
        for rank in ranks:
            self.tell(rank, content)

    def forget(self, rank: int) -> None:
        """The rank's process is gone."""
        self.paused.pop(rank, None)
        if self.listener is not None:
            self.listener(rank, None)
