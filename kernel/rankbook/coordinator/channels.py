"""Comms of widgets and debugger messages, between ranks and a front end.

`CommChannels` forwards the comms of widgets that live on ranks; the widgets of a rank that has exited stay on the page.
`DapChannels` forwards the messages of the ranks' debuggers (Debug Adapter Protocol) and knows which ranks are paused.
Both forward to a `listener`; without one, messages from ranks are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from rankbook.protocol.messages import CommFromRank, CommToRank, DapFromRank, DapToRank

CommListener = Callable[[int, CommFromRank, Sequence[memoryview]], None]


class CommChannels:
    """Open comms of widgets on the ranks of one cluster.

    `send` sends a message to a rank. `message_received` and `forget` are called on the driver thread, the other methods
    on any thread.
    """

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self._open: dict[str, int] = {}
        self.listener: CommListener | None = None

    def message_received(self, rank: int, message: CommFromRank, frames: Sequence[memoryview]) -> None:
        """Record and forward a comm message from a rank."""
        if message.kind == "open":
            self._open[message.comm] = rank
        elif message.kind == "close":
            self._open.pop(message.comm, None)
        if self.listener is not None:
            self.listener(rank, message, frames)

    def send(self, message: CommToRank, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Send a comm message to the rank that opened the comm. Dropped if the rank has exited."""
        # A message about closing is the last one of its comm.
        rank = self._open.get(message.comm) if message.kind == "msg" else self._open.pop(message.comm, None)
        if rank is not None:
            self._send(rank, message, frames)

    def forget(self, rank: int) -> None:
        """Send no more messages to a rank whose process has ended. Its widgets stay on the page as they are."""
        # A new dict instead of a change in place: other threads may be reading the old one.
        self._open = {name: owner for name, owner in self._open.items() if owner != rank}


DapListener = Callable[[int, str | None], None]
"""Called with a rank and its debugger's message; None when the rank's process has ended."""


class DapChannels:
    """Debugger messages of the ranks of one cluster.

    `send` sends a message to a rank. `message_received` and `forget` are called on the driver thread, the other methods
    on any thread.
    """

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self.listener: DapListener | None = None
        self.paused: dict[int, str] = {}
        """Places where ranks are paused, in words, by rank. Maintained by the listener."""

    def message_received(self, rank: int, message: DapFromRank) -> None:
        """Forward a message from a rank's debugger."""
        if self.listener is not None:
            self.listener(rank, message.content)

    def send(self, rank: int, content: str) -> bool:
        """Send a message to a rank's debugger. Return False if the rank has exited."""
        return self._send(rank, DapToRank(content))

    def disconnect(self, ranks: Iterable[int]) -> None:
        """Disconnect the debuggers of these ranks, whose client has left, so that paused cells continue."""
        # The sequence number 0 marks a request of ours; nobody waits for its response.
        content = json.dumps({"type": "request", "seq": 0, "command": "disconnect", "arguments": {}})
        for rank in ranks:
            self.send(rank, content)

    def forget(self, rank: int) -> None:
        """Report to the listener that a rank's process has ended."""
        self.paused.pop(rank, None)
        if self.listener is not None:
            self.listener(rank, None)
