"""Background threads that answer queries while the main thread runs a cell.

`QueryThreads` is the thread for repeated queries (one for status, one for completion, one for pauses at a step),
started by the first query. An expression to evaluate and a statistic get a thread of their own (`answer_in_thread`).
What answers is imported by the first query.
"""

from __future__ import annotations

import _thread
import queue
import signal
import traceback
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rankbook.errors import ProtocolError
from rankbook.protocol.queries import Answer, GetValue, Hint, Hold, Look, QueryFailed
from rankbook.rank.tracebacks import name_of

_Q = TypeVar("_Q", bound=Look | Hint | GetValue | Hold)
_Q_contra = TypeVar("_Q_contra", bound=Look | Hint | GetValue | Hold, contravariant=True)


class QueryHandler(Protocol[_Q_contra]):
    """Interface of an object that answers queries."""

    def answer(self, question: _Q_contra) -> Answer:
        """Answer a query, or return `QueryFailed` with the reason."""


class RepeatedQueryHandler(QueryHandler[_Q_contra], Protocol[_Q_contra]):
    """A handler for queries that are repeated all the time."""

    def cheap_answer(self, question: _Q_contra) -> Answer | None:
        """Return the answer if it is cheap, else None."""


class QueryThreads(Generic[_Q]):
    """A background thread that answers queries with `send`.

    `make_handler` creates the handler once, on that thread: it imports modules that a rank needs for nothing else.
    """

    def __init__(self, send: Callable[[Answer], None], make_handler: Callable[[], RepeatedQueryHandler[_Q]]) -> None:
        self._send = send
        self._make_handler = make_handler
        self._questions: queue.SimpleQueue[_Q] = queue.SimpleQueue()
        # Acquired once and never released, so that exactly one thread is started.
        self._started = _thread.allocate_lock()
        self._handler: RepeatedQueryHandler[_Q] | None = None
        # Two counters with one writer each, so that they need no lock. They are equal while the thread has nothing to
        # do.
        self._queued_count = self._answered_count = 0

    def put(self, question: _Q) -> None:
        """Queue `question` for the thread. Called on the control thread.

        A cheap answer is given on the control thread itself, which saves waking another thread beside a computing cell.
        """
        handler = self._handler
        # Not while the thread is at work, because a handler answers on one thread at a time.
        if handler is not None and self._queued_count == self._answered_count:
            answer = self._try(handler.cheap_answer, question)
            if answer is not None:
                _send(self._send, "query", question, answer)
                return
        # Counted before it is queued, so that the thread cannot have answered more than was asked.
        self._queued_count += 1
        self._questions.put(question)
        if self._started.acquire(blocking=False):
            _thread.start_new_thread(self._run, ())  # Thread.start would wait for the new thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        while True:
            question = self._questions.get()
            answer = self._try(self._answer, question)
            assert answer is not None
            _send(self._send, "query", question, answer)
            self._answered_count += 1

    def _answer(self, question: _Q) -> Answer:
        # Made on this thread: its imports take long, and the control thread must not wait for them.
        self._handler = self._handler or self._make_handler()
        return self._handler.answer(question)

    def _try(self, answer: Callable[[_Q], Answer | None], question: _Q) -> Answer | None:
        try:
            return answer(question)
        except BaseException as error:  # noqa: BLE001 - reported to the notebook; the next query may succeed
            return _failed("query", question, error)


def answer_in_thread(
    send: Callable[[Answer], None], make_handler: Callable[[], QueryHandler[_Q]], question: _Q
) -> None:
    """Answer a query on a thread of its own, because it may be slow and other queries would wait. Any thread."""
    kind = "peek" if isinstance(question, GetValue) else "query"

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            answer = make_handler().answer(question)
        except BaseException as error:  # noqa: BLE001 - as above
            answer = _failed(kind, question, error)
        _send(send, kind, question, answer)

    _thread.start_new_thread(run, ())


def _send(send: Callable[[Answer], None], kind: str, question: Look | Hint | GetValue | Hold, answer: Answer) -> None:
    """Send an answer, or the reason why it cannot be encoded: user code may have given an object odd names."""
    try:
        send(answer)
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        send(_failed(kind, question, error))


def _failed(kind: str, question: Look | Hint | GetValue | Hold, error: BaseException) -> Answer:
    """Return the answer that reports `error`. Called in the `except` block of `error`."""
    try:
        message = f"{error}\n{traceback.format_exc()}"
    except BaseException:  # noqa: BLE001 - the error's own __str__ is user code
        message = name_of(error)
    return QueryFailed(question.token, f"the {kind} failed on the rank: {message}")
