"""Execution of tasks on a rank's main thread, and the error reports of tasks that fail.

A task is a message for the main thread: run a cell, call a function, assign or fetch variables, list, export or adopt
state, form the process group. A task ends with exactly one `Done` message, after its output. An error in user code
fails the task and never ends the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from bdb import BdbQuit
from collections.abc import Callable, Collection
from functools import partial
from os import getpid
from pathlib import Path
from subprocess import CalledProcessError
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.error import UsageError

from rankbook.errors import BadRequest, CollectiveAborted, RankbookError, StartError
from rankbook.formatting import suggest
from rankbook.protocol.comm import DapToRank
from rankbook.protocol.messages import (
    Abort,
    AdoptState,
    Assign,
    CallFunction,
    Clear,
    Collectives,
    Display,
    Done,
    ErrorReport,
    ExportState,
    FetchValue,
    Frame,
    InputReply,
    InputRequest,
    ListState,
    Message,
    Payload,
    Regroup,
    RunCell,
    Stack,
    ToRank,
)
from rankbook.protocol.profiling import Measure
from rankbook.protocol.queries import GetCompletions, GetInspection, GetValue, Hint, Look, Question
from rankbook.rank import (
    originals,
    os_utils,
    recovery,
    shutdown,
    tracebacks,
)
from rankbook.rank.control_thread import Interrupts, Task
from rankbook.rank.debugger import Debuggee
from rankbook.rank.inspect import oom
from rankbook.rank.inspect.completion import CompletionHandler
from rankbook.rank.inspect.query_threads import QueryThreads, answer_in_thread
from rankbook.rank.io.output_capture import OutputCapture
from rankbook.rank.io.output_widget import OutputWidgetTarget
from rankbook.rank.process_groups.manager import GroupManager
from rankbook.rank.shell import RankShell
from rankbook.transport.link import Frames, RankLink
from rankbook.transport.serialization import Packed, pack, unpack
from rankbook.transport.shared_memory import SegmentStore

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rankbook.rank.inspect.evaluate import Evaluator
    from rankbook.rank.inspect.query_handlers import StatusHandler
    from rankbook.rank.measurement import Measurement


_USES_ACCELERATOR = re.compile(r"(?<![\w.])accelerator\b")
_NAMES_ONE = re.compile(r"(?<![\w.])accelerator\s*(?::[^=\n]*)?=[^=]|\bas accelerator\b|\bimport accelerator\b")


class Executor:
    """Run tasks in `shell`, one at a time, and answer queries about them from other threads.

    Also the shell's `ShellSession` and the control thread's `MainThreadControl`.
    """

    def __init__(
        self,
        shell: RankShell,
        link: RankLink,
        capture: OutputCapture,
        interrupts: Interrupts,
        group: GroupManager,
        segments: Path,
    ) -> None:
        self.cell = 0
        self.running: int | None = None
        self._number = 0
        self.wait_reply: Callable[[], InputReply] | None = None
        self.run_when_idle: Callable[[Callable[[], None]], None] = lambda _: None
        self._shell = shell
        self._link = link
        self._capture = capture
        self._interrupts = interrupts
        self._group = group
        self._segments = SegmentStore(segments)
        self._pid = getpid()
        self._looks = QueryThreads[Look](link.send, self._lookout)
        self._hints = QueryThreads[Hint](link.send, self._guide)
        self._peeks: Evaluator | None = None
        self._measurement: Measurement | None = None
        self._debuggee = Debuggee(link.send, group.be_patient)
        shell.attach(self)
        group.where = self.line

    @property
    def interrupted(self) -> bool:
        """Return True if an interrupt has reached the running task."""
        return self._interrupts.delivered

    def execute(self, task: Task) -> None:
        """Run one task and send its `Done`, whatever happens."""
        message, frames = task
        self.cell = self.running = _cell_of(message)
        self._number = message.number if isinstance(message, RunCell) else 0
        try:
            done, answer = self._run(message, frames)
        except BaseException as error:  # noqa: BLE001 - user code may have broken our own code: reported in Done
            done, answer = self._give_up(error), ()
        self.running = None
        try:
            self._link.send(done, answer)
        except BaseException as error:  # noqa: BLE001 - as above
            self._link.send(self._give_up(error))

    def _run(self, message: ToRank, frames: list[memoryview]) -> tuple[Done, Frames]:
        """Perform a task and return its `Done` with the payload's frames.

        User code runs until `disarm`, also after the task itself: an error's `__str__`, a stream's `flush`.
        """
        began, launched = perf_counter(), self._group.launched
        packed: Packed | None = None
        error: BaseException | None = None
        report: ErrorReport | None = None
        self._capture.begin(self.cell)
        if self._debuggee.attached:
            self._debuggee.begin()
        # The inner `try` runs the task and explains its error while interrupts are armed, because an error's `__str__`
        # is user code too. The outer one catches whatever is raised meanwhile, an interrupt included. The report then
        # comes from `brief_report`, which calls no user code.
        try:
            try:
                self._interrupts.arm(self.cell)
                packed = self._perform(message, frames)
                self._capture.flush()
            except BaseException as caught:  # noqa: BLE001 - any error of user code is reported in Done
                error = caught
                self._end_if_forked()
                error = self._translate(error)
                report = self._explain(error)
            finally:
                self._interrupts.disarm()
        except BaseException as caught:  # noqa: BLE001 - as above
            error = caught if error is None else error
            report = report or tracebacks.brief_report(error, caught, self._cell_files(), self._number)
        self._interrupts.disarm()  # an interrupt may have ended the first call
        self._debuggee.end()
        self._end_if_forked()
        if self._measurement is not None:
            packed = self._tell_measured(self._measurement)
        self._capture.end()
        done = Done(
            cell=self.cell,
            status=task_status(error),
            seconds=perf_counter() - began,
            error=report,
            payload=packed.payload if packed else None,
            collectives=self._group.launched - launched,
        )
        return done, packed.frames if packed else ()

    def _translate(self, error: BaseException) -> BaseException:
        """Return the exception to report in place of `error`."""
        with self._interrupts.shield():
            self._debuggee.end()
        error = self._group.translate(error)
        if self._interrupts.delivered and is_aftermath(error):
            return KeyboardInterrupt().with_traceback(tracebacks.traceback_of(error))
        return error

    def _explain(self, error: BaseException) -> ErrorReport:
        if issubclass(type(error), KeyboardInterrupt):
            cancel_leftovers()
        else:  # after an interrupt a flush could block again: it may be the call that was interrupted
            self._capture.flush()
        return explain_error(self._shell, error, self._cell_files(), self._number)

    def _give_up(self, error: BaseException) -> Done:
        """Restore a working rank after an error in our own code, and return the task's `Done`."""
        replaced = originals.restore_originals()
        self._end_if_forked()
        self._interrupts.disarm()
        self._measurement = None
        report = tracebacks.brief_report(error, None, self._cell_files(), self._number)
        with contextlib.suppress(BaseException):  # remaining output is then sent with the next cell's
            if replaced:
                self._capture.tell(originals.describe_restored(replaced))
            self._capture.end()
        return Done(cell=self.cell, status=task_status(error), seconds=0.0, error=report)

    def _end_if_forked(self) -> None:
        """Exit if this process is a child that user code forked and that has left the cell."""
        if self._forked:
            os._exit(1)

    def _cell_files(self) -> dict[str, int]:
        files: dict[str, int] = self._shell.compile._filename_map
        return files

    def _perform(self, message: ToRank, frames: list[memoryview]) -> Packed | None:
        match message:
            case RunCell():
                if "accelerator" in message.source:
                    self._provide_accelerator(message.source)
                shutdown.report_lost_saves()
                try:
                    if message.measure is None:
                        self._shell.run(message.source, message.number, message.file)
                    else:
                        self._run_measured(message, message.measure)
                finally:
                    shutdown.report_lost_saves()
            case CallFunction():
                function, args, kwargs = self._unpack(message.payload, frames)
                return pack(function(*args, **kwargs), store=self._segments)
            case Assign():
                self._shell.user_ns.update(self._unpack(message.payload, frames))
            case FetchValue():
                return pack(self._fetch(message.name), store=self._segments)
            case ListState():
                return pack(recovery.list_state(self._shell.user_ns, self._shell.user_ns_hidden), store=None)
            case ExportState(names=names):
                return recovery.export_state(self._shell.user_ns, self._shell.user_ns_hidden, names, self._segments)
            case AdoptState(payload=payload):
                open_state = None if payload is None else partial(self._unpack, payload, frames)
                return pack(recovery.adopt_state(self._shell.user_ns, open_state), store=None)
            case Regroup():
                try:
                    self._group.join(message.generation)
                except (RuntimeError, OSError) as error:
                    raise StartError(f"the process group could not be formed: {error}") from error
                os_utils.malloc_trim()  # the old group's threads left free memory in the allocator's arenas
            case _:
                raise BadRequest(f"a rank has no task {type(message).__name__}")
        return None

    def _run_measured(self, message: RunCell, asked: Measure) -> None:
        with self._interrupts.shield():
            from rankbook.rank.measurement import Measurement

            self._measurement = measurement = Measurement(
                asked, self._group.rank, self._group.device, self._group.launched
            )
            measurement.start()
        try:
            self._shell.run(message.source, message.number, message.file)
        finally:
            with self._interrupts.shield():
                measurement.stop(self._group.launched)

    def _tell_measured(self, measurement: Measurement) -> Packed:
        """Return the packed measurement. Called after `disarm`, when no interrupt can arrive."""
        self._measurement = None
        measurement.stop(self._group.launched)  # an interrupt may have prevented the first call
        return pack(measurement.tell(), store=self._segments)

    def _provide_accelerator(self, source: str) -> None:
        """Define `accelerator` for a cell that uses the name without assigning it."""
        namespace = self._shell.user_ns
        if "accelerator" not in namespace and _USES_ACCELERATOR.search(source) and not _NAMES_ONE.search(source):
            from rankbook.runtime import Accelerator

            namespace["accelerator"] = Accelerator()

    def _unpack(self, payload: Payload, frames: list[memoryview]) -> Any:  # noqa: ANN401 - any value
        return unpack(payload, frames, unlink=False, folder=self._segments.folder)

    def _fetch(self, name: str) -> object:
        first, *rest = name.split(".")
        if first not in self._shell.user_ns:
            raise BadRequest(f"there is no variable {first!r} on this rank{suggest(first, self.namespace())}")
        value: object = self._shell.user_ns[first]
        for attribute in rest:
            if not hasattr(value, attribute):
                raise BadRequest(f"{first!r} has no attribute {attribute!r}{suggest(attribute, dir(value))}")
            value = getattr(value, attribute)
        return value

    # ShellSession

    def display(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> None:
        """See `shell.ShellSession`."""
        if self._forked:
            print(data.get("text/plain", ""))  # noqa: T201 - a subprocess reaches the notebook only through its stdout
            return
        widget = self._place()
        if widget is not None and widget.display(kind, data, metadata, display_id):
            return
        self._send_in_order(
            Display(cell=self.cell, kind=kind, data=data, metadata=metadata, display_id=display_id)  # type: ignore[arg-type]
        )

    def clear(self, *, wait: bool) -> None:
        """See `shell.ShellSession`."""
        widget = self._place()
        if widget is not None:
            widget.clear(wait=wait)
        elif not self._forked:
            self._send_in_order(Clear(cell=self.cell, wait=wait))

    def _place(self) -> OutputWidgetTarget | None:
        """Return the Output widget that captures this thread's output, or None.

        Flushes the output so far first, so that it is stored before what follows.
        """
        redirect = self._capture.diverted()
        if redirect is not None:
            self._capture.flush()
            self._capture.drain()
        return redirect if isinstance(redirect, OutputWidgetTarget) else None

    def tell(self, error: BaseException) -> ErrorReport:
        """Return the report of an error that does not end its cell. Main thread."""
        error = self._group.translate(error)
        return tracebacks.error_report(self._shell, error, self._cell_files())

    def ask(self, prompt: str, *, password: bool) -> str:
        """See `shell.ShellSession`. Raises EOFError if the front end cannot ask for input."""
        if self._forked:
            raise EOFError("a subprocess of a rank cannot ask")
        self._send_in_order(InputRequest(cell=self.cell, prompt=prompt, password=password))
        assert self.wait_reply is not None
        reply = self.wait_reply()
        while reply.cell != self.cell:  # the reply to an input() call that was interrupted
            reply = self.wait_reply()
        if reply.text is None:
            raise EOFError(reply.reason)
        return reply.text

    @property
    def _forked(self) -> bool:
        """Return True in a child that user code forked, which must not use the link."""
        return getpid() != self._pid

    # What was printed before a display or an input prompt must be shown before it. So flush Python's streams, then hold
    # the capture's lock while the pipes are drained and the message is sent: the control thread cannot read in between.
    def _send_in_order(self, message: Message) -> None:
        self._capture.flush()
        with self._interrupts.shield(), self._capture.lock:
            self._capture.drain()
            self._link.send(message)

    def stack(self, token: int) -> Stack:
        """Return the main thread's stack and state. Any thread."""
        return Stack(token, self.running, self.frames(), self.waits()[0], self._debuggee.paused)

    def frames(self) -> tuple[Frame, ...]:
        """Return the main thread's stack frames; empty between tasks. Any thread."""
        return tracebacks.main_thread_frames(self._cell_files()) if self.running is not None else ()

    def waits(self) -> tuple[str, float]:
        """Return the oldest unfinished collective as text, and its age in seconds. Any thread."""
        waits_for = self._group.waits_for()
        return (str(waits_for), time.monotonic() - waits_for.began) if waits_for is not None else ("", 0.0)

    def line(self) -> int | None:
        """Return the line of the running cell that the main thread executes. Any thread."""
        if self.running is None:
            return None
        return tracebacks.main_thread_line(self._cell_files(), self._number)

    def collectives(self, token: int) -> Collectives:
        """Return the pending collectives of the process groups. Any thread."""
        return Collectives(token=token, cell=self.running, line=self.line(), groups=self._group.report())

    def namespace(self) -> dict[str, object]:
        """Return a copy of the cells' variables. Any thread.

        Leaves out keys that are not strings, which `globals()` allows.
        """
        return {name: value for name, value in dict.copy(self._shell.user_ns).items() if type(name) is str}

    def hidden(self) -> Collection[str]:
        """Return the names that were defined before the first cell. Any thread."""
        return frozenset(dict.copy(self._shell.user_ns_hidden))

    def inquire(self, question: Question) -> None:
        """Queue a query for a background thread, which sends the answer. Any thread."""
        if isinstance(question, GetValue):
            answer_in_thread(self._link.send, self._make_peeks, question)
        elif isinstance(question, (GetCompletions, GetInspection)):  # a thread of its own: a status query may take long
            self._hints.put(question)
        else:
            self._looks.put(question)

    def debug(self, message: DapToRank) -> None:
        """Queue a Debug Adapter Protocol message for the debugger's thread. Any thread."""
        self._debuggee.hear(message)

    def _guide(self) -> CompletionHandler:
        return CompletionHandler(self, self._group.rank)

    def _lookout(self) -> StatusHandler:
        from rankbook.rank.inspect.query_handlers import StatusHandler

        return StatusHandler(self, self._group.rank, self._group.device)

    def _make_peeks(self) -> Evaluator:
        from rankbook.rank.inspect.evaluate import Evaluator

        self._peeks = self._peeks or Evaluator(self, self._group.device)
        return self._peeks

    def abort(self, message: Abort) -> None:
        """Abort the collectives that wait for ranks which will not join. Any thread."""
        self._group.abort(message)


def _cell_of(message: ToRank) -> int:
    cell: int = getattr(message, "cell")  # noqa: B009 - every task has `cell`; other members of the union are not tasks
    return cell


def explain_error(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int) -> ErrorReport:
    """Return the report of an error.

    For an out-of-memory error, also report which variables hold the memory, and free what the failed code held.
    """
    kind = type(error)
    if issubclass(kind, (RankbookError, UsageError, BdbQuit)) and not issubclass(kind, CollectiveAborted):
        return tracebacks.one_line_error(error)
    report = tracebacks.error_report(shell, error, cells, number)
    if oom.is_out_of_memory(error):
        report = oom.report_and_free(shell, error, report)
    elif oom.is_peer_oom(error):
        oom.free_memory(shell, error)
    return report


def is_aftermath(error: BaseException) -> bool:
    """Return True if `error` may be a consequence of an interrupt.

    `%%bash`, a debugger and a DataLoader whose workers received SIGINT raise other errors than KeyboardInterrupt.
    """
    of_workers = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
    return of_workers or isinstance(error, (CalledProcessError, BdbQuit))


def task_status(error: BaseException | None) -> Literal["ok", "error", "interrupted"]:
    """Return how a task ended.

    Compares the type: `isinstance` would read the error's own `__class__`, which user code can define.
    """
    if error is None:
        return "ok"
    return "interrupted" if issubclass(type(error), KeyboardInterrupt) else "error"


def cancel_leftovers() -> None:
    """Cancel the tasks that an interrupted `await` left in the event loop.

    Otherwise the next `await` would resume them.
    """
    from IPython.core.async_helpers import get_asyncio_loop

    loop = get_asyncio_loop()
    if loop.is_running() or not (tasks := asyncio.all_tasks(loop)):
        return
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))  # user code may ignore the cancellation
