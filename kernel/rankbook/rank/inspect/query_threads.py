"""The threads that look: a rank's third and fourth, each made by the first question of its kind; a peek has its own.

Owns: questions in their order, and that each gets an answer. Refuses: to hold up the control thread, which must be free
for interrupts, by more than an answer that is there already takes.
"""

from __future__ import annotations

import _thread
import queue
import signal
import traceback
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rankbook.errors import ProtocolError
from rankbook.protocol.queries import Answer, AskPeek, Hint, Look, NothingTold
from rankbook.rank.tracebacks import name_of

_Q = TypeVar("_Q", bound=Look | Hint | AskPeek)
_Q_contra = TypeVar("_Q_contra", bound=Look | Hint | AskPeek, contravariant=True)


class Answers(Protocol[_Q_contra]):
    """What looks."""

    def answer(self, question: _Q_contra) -> Answer:
        """The answer, or why there is none."""


class Looks(Answers[_Q_contra], Protocol[_Q_contra]):
    """What is asked again and again."""

    def at_once(self, question: _Q_contra) -> Answer | None:
        """The answer, if it takes next to nothing; else None."""


class Inquiries(Generic[_Q]):
    """Answers with `send`. `make` makes what looks, once; it imports what a rank needs for nothing else."""

    def __init__(self, send: Callable[[Answer], None], make: Callable[[], Looks[_Q]]) -> None:
        self._send = send
        self._make = make
        self._questions: queue.SimpleQueue[_Q] = queue.SimpleQueue()
        self._started = _thread.allocate_lock()
        self._looks: Looks[_Q] | None = None
        self._asked = self._answered = 0

    def put(self, question: _Q) -> None:
        """Answer `question`, soon, on another thread. The control thread."""
        looks = self._looks
        if looks is not None and self._asked == self._answered:
            answer = self._try(looks.at_once, question)  # a thread less that wakes up beside a cell that computes
            if answer is not None:
                _send(self._send, "look", question, answer)
                return
        self._asked += 1
        self._questions.put(question)
        if self._started.acquire(blocking=False):
            _thread.start_new_thread(self._run, ())  # Thread.start would wait

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
        while True:
            question = self._questions.get()
            answer = self._try(self._answer, question)
            assert answer is not None
            _send(self._send, "look", question, answer)
            self._answered += 1

    def _answer(self, question: _Q) -> Answer:
        self._looks = self._looks or self._make()
        return self._looks.answer(question)

    def _try(self, answer: Callable[[_Q], Answer | None], question: _Q) -> Answer | None:
        try:
            return answer(question)
        except BaseException as error:  # noqa: BLE001 - the notebook is told all of it, and the next one may go well
            return _failed("look", question, error)


def answer_apart(send: Callable[[Answer], None], make: Callable[[], Answers[AskPeek]], question: AskPeek) -> None:
    """Have it answered on a thread of its own: it may take its time, and other questions would wait. Any thread."""

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            answer = make().answer(question)
        except BaseException as error:  # noqa: BLE001 - as above
            answer = _failed("peek", question, error)
        _send(send, "peek", question, answer)

    _thread.start_new_thread(run, ())


def _send(send: Callable[[Answer], None], what: str, question: Look | Hint | AskPeek, answer: Answer) -> None:
    """Send an answer, or why it cannot be sent: user code may have given an object odd names."""
    try:
        send(answer)
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        send(_failed(what, question, error))


def _failed(what: str, question: Look | Hint | AskPeek, error: BaseException) -> Answer:
    """The answer that says so. In the handler of `error`."""
    try:
        told = f"{error}\n{traceback.format_exc()}"
    except BaseException:  # noqa: BLE001 - the error's own __str__ is user code
        told = name_of(error)
    return NothingTold(question.token, f"a {what} at the rank failed: {told}")
