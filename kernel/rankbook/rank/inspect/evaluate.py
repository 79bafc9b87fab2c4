"""Evaluates an expression beside the cell that runs.

Owns: the threads of peeks, what they may see, and that each ends or is given up in time. Refuses: the main thread, the
control thread, locks of ours while user code runs, and collectives: the other ranks would take them for the cell's.

What keeps the interpreter to itself, like `sum(range(10**12))`, keeps it from every thread of the rank: nothing in the
process can end that, and the notebook tells of a rank that does not answer.
"""

from __future__ import annotations

import _thread
import ctypes
import inspect
import signal
import sys
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from IPython.lib.pretty import pretty

from rankbook.formatting import suggest
from rankbook.protocol.queries import GetValue, ValueReply
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.tracebacks import is_users

_MOST = 2000
"""Characters of an answer."""
_MOST_ITEMS = 100
_MOST_GIVEN_UP = 4
"""Peeks that may go on after they were given up, before another one is refused."""
_MAKES_OF_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})


class EvaluationSource(Protocol):
    """What the main thread does, seen from outside. Any thread."""

    running: int | None

    def namespace(self) -> dict[str, object]:
        """A copy of the variables."""


class Evaluator:
    """Peeks at a rank that computes on `device`. Any thread."""

    def __init__(self, work: EvaluationSource, device: torch.device) -> None:
        self._work = work
        self._device = device
        self._given_up: list[_Evaluation] = []

    def answer(self, question: GetValue) -> ValueReply:
        """What the expression gives, after `question.seconds` at most."""
        cell = self._work.running
        self._given_up = [each for each in self._given_up if not each.ended.is_set()]
        if len(self._given_up) >= _MOST_GIVEN_UP:
            trouble = f"{len(self._given_up)} peeks that were given up have not ended yet"
            return ValueReply(question.token, "", trouble, cell)
        try:
            code = compile(question.source, "<peek>", "eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            return ValueReply(question.token, "", f"{type(error).__name__}: {error}", cell)
        namespace = self._work.namespace()
        if cell is not None:
            namespace.update(read_locals(names_in(code)))
        evaluation = _Evaluation(code, namespace, self._device)
        del namespace  # what it holds shall not outlive the evaluation
        if evaluation.wait_end(timeout=question.seconds):
            return ValueReply(question.token, evaluation.text, evaluation.trouble, cell)
        self._given_up.append(evaluation)
        waits_for = "; what reads a CUDA tensor waits for all that is queued before it"
        trouble = f"given up after {question.seconds:g} s{waits_for if self._device.type == 'cuda' else ''}"
        return ValueReply(question.token, "", trouble, cell)


class _EvaluationTimeout(BaseException):
    """Nobody waits for this evaluation any more."""


class _Evaluation:
    """One expression on a thread of its own. `text` or `trouble` is there once `ended` is set."""

    def __init__(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        self.ended = threading.Event()
        self.text = self.trouble = ""
        self._lock = threading.Lock()
        self._inside = True
        self._ident = _thread.start_new_thread(self._run, (code, namespace, device))

    def wait_end(self, *, timeout: float) -> bool:
        """Whether it has ended after `timeout` seconds; if not, Python code of it is ended from here."""
        if self.ended.wait(timeout):
            return True
        with self._lock:  # so that no other thread, which may have the number by then, gets it
            if self._inside:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._ident), ctypes.py_object(_EvaluationTimeout)
                )
        return False

    def _run(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
        interruptible_work.here.only_looks = True
        try:
            self._try(code, namespace, device)
            _take_pending()
        except _EvaluationTimeout:
            pass  # it came between two lines of ours
        finally:
            self.ended.set()

    def _try(self, code: types.CodeType, namespace: dict[str, object], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own current one
            with torch.no_grad():
                self.text = describe(eval(code, namespace))  # noqa: S307 - the person's own expression, on request
        except BaseException as error:  # noqa: BLE001 - whatever the expression raises is the answer
            self.trouble = tell_error(error, namespace)
        finally:
            with self._lock:
                self._inside = False


def _take_pending() -> None:
    """A call: there the interpreter raises what another thread has asked it to."""


def describe(value: object) -> str:
    """`value` as IPython shows it, at most `_MOST` characters and a note of how many there were."""
    if isinstance(value, (str, bytes)) and len(value) > _MOST:
        return f"{value[:_MOST]!r}\n… {len(value):,} characters in all"  # its whole repr would hold up the cell
    text = pretty(value, max_width=110, max_seq_length=_MOST_ITEMS)
    return text if len(text) <= _MOST else f"{text[:_MOST]}\n… {len(text):,} characters in all"


def tell_error(error: BaseException, names: Mapping[str, object]) -> str:
    """One error in one line."""
    try:
        value = " ".join(str(error).split())[:500]
    except Exception as failure:  # noqa: BLE001 - the user's __str__ may do anything; what it did is said
        value = f"<{type(failure).__name__} while it was put into words>"
    near = suggest(error.name, names) if isinstance(error, NameError) and error.name else ""
    return f"{type(error).__name__}: {value}".removesuffix(": ") + near


def names_in(code: types.CodeType) -> set[str]:
    """The names that an expression looks up, also in its comprehensions and lambdas."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(names_in(each) for each in inner))


def read_locals(names: Iterable[str], ident: int | None = None) -> dict[str, object]:
    """Those of `names` that are local to functions of the user that thread `ident` (the main one) is in.

    The innermost function goes first. Nothing else of theirs is touched or kept.
    """
    wanted, found = set(names), dict[str, object]()
    frame: types.FrameType | None = sys._current_frames().get(ident or threading.main_thread().ident or 0)
    while frame is not None and wanted:
        code = frame.f_code
        has = wanted.intersection(code.co_varnames + code.co_cellvars + code.co_freevars)
        if has and code.co_flags & inspect.CO_OPTIMIZED and is_users(code.co_filename):
            there = frame.f_locals
            taken = {name: there[name] for name in has if name in there}
            found |= taken
            wanted -= taken.keys()
            _let_go(frame, there)
        frame = frame.f_back
    return found


def _let_go(frame: types.FrameType, snapshot: Any) -> None:  # noqa: ANN401 - a dict, or from 3.13 on a view
    """Up to Python 3.12 a frame keeps the snapshot of its variables, and with it what they held, until it ends.

    A debugger writes such a snapshot back, and a function that names `locals` may have it as its own.
    """
    if isinstance(snapshot, dict) and frame.f_trace is None and not _MAKES_OF_LOCALS & set(frame.f_code.co_names):
        snapshot.clear()
