"""Queries, comms of widgets and debugger messages, which pass between the notebook and the ranks beside tasks.

`CommChannels` forwards the comms of widgets that live on ranks; the widgets of a rank that has exited stay on the page.
`DapChannels` forwards the messages of the ranks' debuggers (Debug Adapter Protocol) and knows which ranks are paused.
Both forward to a `listener`; without one, messages from ranks are dropped.

`QueryClient` sends queries that ranks answer while they run a cell, and matches the replies by token.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rankbook.protocol.messages import CommFromRank, CommToRank, DapFromRank, DapToRank
from rankbook.protocol.queries import Answer, Question

_LIVENESS_CHECK_INTERVAL = 0.1
"""Seconds between two checks whether the ranks that owe a reply are still running."""

Deliver = Callable[[int, Answer], None]


class QueryClient:
    """Send queries to ranks and deliver the replies. Any thread."""

    def __init__(self, send: Callable[[int, Question], bool]) -> None:
        self._send = send
        self._tokens = itertools.count(1)
        self._open: dict[int, Deliver] = {}

    def open(self, deliver: Deliver) -> int:
        """Return a token for queries. `deliver(rank, answer)` is called with their replies.

        It runs on the driver thread and must be quick.
        """
        token = next(self._tokens)
        self._open[token] = deliver
        return token

    def close(self, token: int) -> None:
        """Drop all later replies to this token."""
        self._open.pop(token, None)

    def ask(self, rank: int, question: Question) -> bool:
        """Send a query. Return False if the rank has exited."""
        return self._send(rank, question)

    def take(self, rank: int, answer: Answer) -> None:
        """Deliver a reply. Replies to closed tokens are dropped."""
        # Called by the driver thread. Reading a dict is atomic, so no lock is needed.
        deliver = self._open.get(answer.token)
        if deliver is not None:
            deliver(rank, answer)

    def wait_answers(
        self,
        ranks: Collection[int],
        make: Callable[[int, int], Question],
        *,
        timeout: float,
        live_ranks: Callable[[], Collection[int]],
    ) -> dict[int, Answer]:
        """Send `make(token, rank)` to every rank; return the replies within `timeout` seconds.

        Any thread but the driver's. `live_ranks` returns the ranks that can reply at all, so that a rank that dies
        meanwhile is not waited for.
        """
        # A condition of its own: the driver's would wake up for every message.
        changed = threading.Condition()
        answers: dict[int, Answer] = {}

        def deliver(rank: int, answer: Answer) -> None:
            with changed:
                answers[rank] = answer
                changed.notify_all()

        # Before the queries are sent, because replies may arrive at once.
        token = self.open(deliver)
        deadline = time.monotonic() + timeout
        try:
            requested = {rank for rank in ranks if self._send(rank, make(token, rank))}
            with changed:
                while requested - answers.keys() and (remaining := deadline - time.monotonic()) > 0:
                    changed.wait(min(remaining, _LIVENESS_CHECK_INTERVAL))
                    # A rank that dies will not reply, and is not waited for. A reply that it sent before counts.
                    requested &= set(live_ranks()) | answers.keys()
                return dict(answers)
        finally:
            self.close(token)


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
        # `send` finds the rank by it, also for a listener that came after the comm was opened.
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
