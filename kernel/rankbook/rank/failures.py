"""Turns the exception that ended a task into the report that is sent.

Owns: which errors are one line, which have a traceback, and what an interrupt looks like that user code changed.
Refuses: to hold anything back that user code raises here (`__str__`, `__class__`): the executor does, and falls back to
`tracebacks.brief`.
"""

from __future__ import annotations

import asyncio
from bdb import BdbQuit
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Literal

from IPython.core.error import UsageError

from rankbook.errors import CollectiveAborted, RankbookError
from rankbook.protocol.messages import ErrorReport
from rankbook.rank import tracebacks
from rankbook.rank.inspect import oom

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def explain(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int) -> ErrorReport:
    """Return the report of an error; where memory ran out, say what held it and let go of it."""
    kind = type(error)
    if issubclass(kind, (RankbookError, UsageError, BdbQuit)) and not issubclass(kind, CollectiveAborted):
        return tracebacks.in_one_line(error)
    report = tracebacks.report(shell, error, cells, number)
    if oom.is_out_of_memory(error):
        report = oom.tell_and_free(shell, error, report)
    elif oom.is_of_a_peer(error):
        oom.free(shell, error)
    return report


def is_aftermath(error: BaseException) -> bool:
    """Whether it is what an interrupt becomes in `%%bash`, in a debugger, in a DataLoader whose workers heard it."""
    of_workers = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
    return of_workers or isinstance(error, (CalledProcessError, BdbQuit))


def status_of(error: BaseException | None) -> Literal["ok", "error", "interrupted"]:
    """Return how a task ended. `isinstance` would ask the error's own `__class__`."""
    if error is None:
        return "ok"
    return "interrupted" if issubclass(type(error), KeyboardInterrupt) else "error"


def cancel_leftovers() -> None:
    """Cancel what an interrupted `await` left in the event loop, or the next one would run it on."""
    from IPython.core.async_helpers import get_asyncio_loop

    loop = get_asyncio_loop()
    if loop.is_running() or not (tasks := asyncio.all_tasks(loop)):
        return
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))  # user code may do as it likes about it
