"""Comms of widgets that live on ranks: which are open, and who passes them on.

Owns: that a comm is closed when its rank is gone. Refuses: to know what a front end is; without a listener nothing is
passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankbook.protocol.comm import CommHeard, CommSaid

CommListener = Callable[[int, CommSaid, Sequence[memoryview]], None]


class Comms:
    """Those of one cluster; `send` sends to a rank. `said` and `forget` are the driver's, the rest is any thread's."""

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self._open: dict[str, int] = {}
        self.listener: CommListener | None = None

    def said(self, rank: int, message: CommSaid, frames: Sequence[memoryview]) -> None:
        """A rank has said something."""
        if message.kind == "open":
            self._open[message.comm] = rank
        elif message.kind == "close":
            self._open.pop(message.comm, None)
        if self.listener is not None:
            self.listener(rank, message, frames)

    def tell(self, message: CommHeard, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Tell the rank whose comm it is; one that is gone hears nothing."""
        rank = self._open.get(message.comm) if message.kind == "msg" else self._open.pop(message.comm, None)
        if rank is not None:
            self._send(rank, message, frames)

    def forget(self, rank: int) -> None:
        """The rank's process is gone, and its widgets with it."""
        for name in [name for name, whose in self._open.items() if whose == rank]:
            self.said(rank, CommSaid("close", name, "", "{}", "{}"), ())
