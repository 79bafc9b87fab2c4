"""Ranks under a debugger: who hears what theirs say, and which are paused.

Owns: that whoever listens is told when a rank is gone. Refuses: to know what is said; without a listener nothing is
passed on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from rankbook.protocol.comm import DebugHeard, DebugSaid

DapListener = Callable[[int, str | None], None]
"""Called with a rank and what its debugger says; None when the rank's process is gone, and its debugger with it."""


class Debugs:
    """Those of one cluster; `send` sends to a rank. `said` and `forget` are the driver's, the rest is any thread's."""

    def __init__(self, send: Callable[..., bool]) -> None:
        self._send = send
        self.listener: DapListener | None = None
        self.paused: dict[int, str] = {}
        """Where each rank that is paused is, in words; whoever listens keeps it."""

    def said(self, rank: int, message: DebugSaid) -> None:
        """A rank's debugger has said something."""
        if self.listener is not None:
            self.listener(rank, message.content)

    def tell(self, rank: int, content: str) -> bool:
        """Tell a rank's debugger. False where the rank is gone."""
        return self._send(rank, DebugHeard(content))

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
