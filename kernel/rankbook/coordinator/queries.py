"""Queries to ranks that they answer while running a cell, and matching of the replies by token."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection

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
