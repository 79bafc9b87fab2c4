"""Evaluate an expression on a rank beside the running cell.

Every evaluation runs on a thread of its own and is given up after a time limit. It sees a copy of the namespace and the
local variables of the functions that the main thread is in. It must not launch collectives, because the other ranks
would match them with the cell's.

An expression that never releases the GIL, like `sum(range(10**12))`, blocks all threads of the rank. Nothing inside the
process can end it; the notebook reports that the rank does not respond.
"""

from __future__ import annotations

import _thread
import ctypes
import inspect
import signal
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from IPython.lib.pretty import pretty

from rankbook.formatting import is_users, suggest
from rankbook.protocol.queries import GetValue, ValueReply
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.tracebacks import pause_gc, thread_frames

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
    """Return the names that an expression looks up, including its comprehensions and lambdas."""
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
