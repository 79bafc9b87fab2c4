"""The threads that look: a rank's third and fourth, each made by the first question of its kind; a peek has its own.

Owns: questions in their order, and that each gets an answer. Refuses: to hold up the control thread, which must be free
for interrupts, and the main thread, which takes what arrives between two cells.
"""

from __future__ import annotations

import _thread
import queue
import signal
import traceback
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rankbook.looking import Answer, AskPeek, Hint, Look, NothingTold

_Q = TypeVar("_Q", bound=Look | Hint | AskPeek)
_Q_contra = TypeVar("_Q_contra", bound=Look | Hint | AskPeek, contravariant=True)


class Answers(Protocol[_Q_contra]):
    """What looks."""

    def answer(self, question: _Q_contra) -> Answer:
        """The answer, or why there is none."""


class Inquiries(Generic[_Q]):
    """Answers with `send`. `make` makes what looks, once; it imports what a rank needs for nothing else."""

    def __init__(self, send: Callable[[Answer], None], make: Callable[[], Answers[_Q]]) -> None:
        self._send = send
        self._make = make
        self._questions: queue.SimpleQueue[_Q] = queue.SimpleQueue()
        self._started = _thread.allocate_lock()

    def put(self, question: _Q) -> None:
        """Have it answered. Any thread."""
        self._questions.put(question)
        if self._started.acquire(blocking=False):
            _thread.start_new_thread(self._run, ())  # Thread.start would wait, and the main thread be interrupted there

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
        looks: Answers[_Q] | None = None
        while True:
            question = self._questions.get()
            try:
                looks = looks or self._make()
                answer = looks.answer(question)
            except Exception as error:  # noqa: BLE001 - the notebook is told the whole of it, and the next one may go well
                answer = _failed("look", question, error)
            self._send(answer)


def answer_apart(send: Callable[[Answer], None], make: Callable[[], Answers[AskPeek]], question: AskPeek) -> None:
    """Have it answered on a thread of its own: it may take its time, and other questions would wait. Any thread."""

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            answer = make().answer(question)
        except Exception as error:  # noqa: BLE001 - as above
            answer = _failed("peek", question, error)
        send(answer)

    _thread.start_new_thread(run, ())


def _failed(what: str, question: Look | Hint | AskPeek, error: Exception) -> Answer:
    """The answer that says so. In the handler of `error`."""
    return NothingTold(question.token, f"a {what} at the rank failed: {error}\n{traceback.format_exc()}")
