"""Asking the ranks where they are, and waiting for what they say.

Owns: questions that are out, and their answers. Refuses: words for them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable

from rankbook.messages import AskStack, Message, Stack


class StackDesk:
    """`changed` is notified of each answer; `send(rank, message)` says whether the rank is there."""

    def __init__(self, changed: threading.Condition, send: Callable[[int, Message], bool]) -> None:
        self._changed = changed
        self._send = send
        self._answers: dict[int, dict[int, Stack]] = {}
        self._tokens = itertools.count()

    def ask(self, ranks: Iterable[int], *, timeout: float) -> dict[int, Stack]:
        """What came back within `timeout` seconds. Any thread but the driver's."""
        token = next(self._tokens)
        with self._changed:
            self._answers[token] = {}
        asked = [rank for rank in ranks if self._send(rank, AskStack(token=token))]
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(self._answers[token]) < len(asked) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._answers.pop(token)

    def hear(self, rank: int, answer: Stack) -> None:
        """A rank has answered; nobody waits any more for one that comes late."""
        with self._changed:
            if answer.token in self._answers:
                self._answers[answer.token][rank] = answer
                self._changed.notify_all()
