"""Background threads that answer queries while the main thread runs a cell, and the evaluation of expressions.

`QueryThreads` is the thread for repeated queries (one for status, one for completion, one for pauses at a step),
started by the first query. What answers is imported by the first query. A statistic gets a thread of its own
(`answer_in_thread`).

So does an expression to evaluate (`Evaluator`), which is given up after a time limit.
It sees a copy of the namespace and the local variables of the functions that the main thread is in. It must not launch
collectives, because the other ranks would match them with the cell's. An expression that never releases the GIL, like
`sum(range(10**12))`, blocks all threads of the rank. Nothing inside the process can end it; the notebook reports that
the rank does not respond.
"""

from __future__ import annotations

import _thread
import ctypes
import inspect
import queue
import signal
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from IPython.lib.pretty import pretty

from rankbook.errors import ProtocolError
from rankbook.formatting import is_users, suggest
from rankbook.protocol.queries import Answer, GetValue, Hint, Hold, Look, QueryFailed, ValueReply
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.tracebacks import name_of, pause_gc, thread_frames

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


_MAX_TEXT = 2000
"""Maximum characters of an answer."""
_MAX_ITEMS = 100
_MAX_TIMED_OUT = 4
"""Number of evaluations that may still run after they were given up, before new ones are refused."""
# Functions that give a frame's snapshot of its variables to user code, or that read it.
_LOCALS_READERS = frozenset({"locals", "vars", "dir", "eval", "exec"})


class EvaluationSource(Protocol):
    """Interface of the main thread's work, seen from other threads."""

    running: int | None

    def namespace(self) -> dict[str, object]:
        """Return a copy of the variables."""


class Evaluator:
    """Evaluates expressions on a rank that computes on `device`. Any thread."""

    def __init__(self, main_thread: EvaluationSource, device: torch.device) -> None:
        self._main_thread = main_thread
        self._device = device
        self._timed_out: list[_Evaluation] = []

    def answer(self, question: GetValue) -> ValueReply:
        """Evaluate the expression, for at most `question.seconds`."""
        cell = self._main_thread.running
        # Those that have ended meanwhile make room.
        self._timed_out = [peek for peek in self._timed_out if not peek.ended.is_set()]
        if len(self._timed_out) >= _MAX_TIMED_OUT:
            trouble = f"{len(self._timed_out)} earlier peeks have timed out and are still running; try again later"
            return ValueReply(question.token, "", trouble, cell)
        try:
            code = compile(question.source, "<peek>", "eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            return ValueReply(question.token, "", f"{type(error).__name__}: {error}", cell)
        # A copy, so that names which the expression binds do not become variables.
        namespace = self._main_thread.namespace()
        if cell is not None:
            # Only the names that occur in the expression: reading locals keeps their values alive.
            namespace.update(read_locals(names_in(code)))
        evaluation = _Evaluation(code, namespace, self._device)
        del namespace  # its objects must not outlive the evaluation
        if evaluation.wait_end(timeout=question.seconds):
            return ValueReply(question.token, evaluation.text, evaluation.trouble, cell)
        self._timed_out.append(evaluation)
        waits_for = "; reading a CUDA tensor waits for all operations queued before it"
        trouble = f"timed out after {question.seconds:g} s{waits_for if self._device.type == 'cuda' else ''}"
        return ValueReply(question.token, "", trouble, cell)


class _EvaluationTimeout(BaseException):
    """Raised in an evaluation that was given up."""


class _Evaluation:
    """Evaluation of one expression on a thread of its own. `text` or `trouble` is set before `ended`."""

    def __init__(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        self.ended = threading.Event()
        self.text = self.trouble = ""
        self._lock = threading.Lock()
        self._in_expression = True
        # Not `threading.Thread`, whose `start` waits for the new thread to run, which a busy main thread delays.
        self._ident = _thread.start_new_thread(self._run, (code, namespace, device))

    def wait_end(self, *, timeout: float) -> bool:
        """Return True if the evaluation ends within `timeout` seconds.

        Otherwise `_EvaluationTimeout` is raised in its thread, which ends Python code but not a call into C.
        """
        if self.ended.wait(timeout):
            return True
        with self._lock:  # the thread still exists, so its id cannot belong to another thread
            # The exception must not hit this thread after the expression: `_run` would end without setting `ended`.
            if self._in_expression:
                # Python has no other way to end another thread's code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._ident), ctypes.py_object(_EvaluationTimeout)
                )
        return False

    def _run(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        interruptible_work.thread_state.collectives_forbidden = True
        try:
            # The exception of `wait_end` is asynchronous: it may be raised after the expression, up to the call of
            # `_raise_pending`. `_in_expression` ensures that none is requested after that.
            self._try(code, namespace, device)
            _raise_pending()
        except _EvaluationTimeout:
            pass  # it was raised outside of the expression
        finally:
            self.ended.set()

    def _try(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device belongs to the thread
            with torch.no_grad():
                self.text = describe(eval(code, namespace))  # noqa: S307 - the user's own expression, on request
        except BaseException as error:  # noqa: BLE001 - an exception of the expression is the answer
            self.trouble = format_error(error, namespace)
        finally:
            with self._lock:
                self._in_expression = False


def _raise_pending() -> None:
    """Make a function call, in which the interpreter raises a pending asynchronous exception."""


def describe(value: object) -> str:
    """Return the text of `value` as IPython shows it, at most `_MAX_TEXT` characters and a note of the full length."""
    if isinstance(value, (str, bytes)) and len(value) > _MAX_TEXT:
        return f"{value[:_MAX_TEXT]!r}\n… {len(value):,} characters in total"  # the whole repr would delay the cell
    text = pretty(value, max_width=110, max_seq_length=_MAX_ITEMS)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}\n… {len(text):,} characters in total"


def format_error(error: BaseException, names: Mapping[str, object]) -> str:
    """Return the error in one line, with a suggestion for a misspelt name."""
    try:
        value = " ".join(str(error).split())[:500]
    except Exception as failure:  # noqa: BLE001 - a user's __str__ may do anything; its failure is reported
        value = f"<{type(failure).__name__} while formatting this {type(error).__name__}>"
    suggestion = suggest(error.name, names) if isinstance(error, NameError) and error.name else ""
    return f"{type(error).__name__}: {value}".removesuffix(": ") + suggestion


def names_in(code: types.CodeType) -> set[str]:
    """Return the globals and attributes that code looks up, also in its comprehensions, functions and classes."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(names_in(constant) for constant in inner))


def read_locals(names: Iterable[str], ident: int | None = None) -> dict[str, object]:
    """Return the variables in `names` that are local to user functions on the stack of thread `ident` (default: main).

    An inner function takes precedence. Other variables of the frames are neither read nor kept.
    """
    # From the innermost function outwards, until all names are found.
    remaining, values = set(names), dict[str, object]()
    with pause_gc():
        for frame in thread_frames(ident or threading.main_thread().ident):
            if not remaining:
                break
            code = frame.f_code
            captured = remaining.intersection(code.co_varnames + code.co_cellvars + code.co_freevars)
            # Only functions keep their variables in frames of their own. The frame of a cell shares the namespace.
            if captured and code.co_flags & inspect.CO_OPTIMIZED and is_users(code.co_filename):
                variables = frame.f_locals
                frame_values = {name: variables[name] for name in captured if name in variables}
                values |= frame_values
                remaining -= frame_values.keys()
                _clear_snapshot(frame, variables)
    return values


def _clear_snapshot(frame: types.FrameType, snapshot: Any) -> None:  # noqa: ANN401 - a dict, or from 3.13 on a view
    """Clear the snapshot of a frame's variables, so that it does not keep their values alive.

    Up to Python 3.12 a frame keeps such a snapshot until it ends. It is left alone if a debugger traces the frame,
    which writes the snapshot back, or if the function calls `locals` or the like and may use it as its own.
    """
    if isinstance(snapshot, dict) and frame.f_trace is None and not _LOCALS_READERS & set(frame.f_code.co_names):
        snapshot.clear()
