"""Questions that the ranks answer whatever they run, and their answers.

Owns: which answer belongs to whom. Refuses: to ask by itself, and to wait for a rank that is gone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection

from rankbook.protocol.queries import Answer, Question

_LOOK_EVERY = 0.1
"""Seconds between two looks at whether the ranks that owe an answer are still there."""

Deliver = Callable[[int, Answer], None]


class QueryClient:
    """Asks through `send`. Any thread."""

    def __init__(self, send: Callable[[int, Question], bool]) -> None:
        self._send = send
        self._tokens = itertools.count(1)
        self._open: dict[int, Deliver] = {}

    def open(self, deliver: Deliver) -> int:
        """A token for questions; `deliver(rank, answer)` is called on the driver thread, and must be quick."""
        token = next(self._tokens)
        self._open[token] = deliver
        return token

    def close(self, token: int) -> None:
        """Nobody waits for the answers any more."""
        self._open.pop(token, None)

    def ask(self, rank: int, question: Question) -> bool:
        """Send it. False where the rank is gone."""
        return self._send(rank, question)

    def take(self, rank: int, answer: Answer) -> None:
        """A rank has answered; what nobody waits for any more is dropped."""
        deliver = self._open.get(answer.token)
        if deliver is not None:
            deliver(rank, answer)

    def wait_answers(
        self,
        ranks: Collection[int],
        make: Callable[[int, int], Question],
        *,
        timeout: float,
        there: Callable[[], Collection[int]],
    ) -> dict[int, Answer]:
        """Send `make(token, rank)` to each; what came back within `timeout` seconds. Any thread but the driver's.

        `there` tells which ranks can answer at all: nobody waits for one that died meanwhile.
        """
        changed = threading.Condition()
        answers: dict[int, Answer] = {}

        def deliver(rank: int, answer: Answer) -> None:
            with changed:
                answers[rank] = answer
                changed.notify_all()

        token = self.open(deliver)
        deadline = time.monotonic() + timeout
        try:
            asked = {rank for rank in ranks if self._send(rank, make(token, rank))}
            with changed:
                while asked - answers.keys() and (left := deadline - time.monotonic()) > 0:
                    changed.wait(min(left, _LOOK_EVERY))
                    asked &= set(there()) | answers.keys()
                return dict(answers)
        finally:
            self.close(token)
