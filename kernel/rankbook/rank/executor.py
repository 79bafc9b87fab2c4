"""Execution of tasks on a rank's main thread, and the error reports of tasks that fail.

A task is a message for the main thread: run a cell, call a function, assign or fetch variables, list, export or adopt
state, hash or compare tensors, form the process group. A task ends with exactly one `Done` message, after its output.
An error in user code fails the task and never ends the rank.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Collection, Mapping
from functools import partial
from os import getpid
from pathlib import Path
from subprocess import CalledProcessError
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from IPython.core.error import UsageError

from rankbook import snapshot_files
from rankbook.errors import CollectiveAborted, InvalidArgument, RankbookError, StartError
from rankbook.formatting import plural, suggest
from rankbook.ipython_compat import asyncio_loop, cell_numbers
from rankbook.lazy_imports import loaded_module
from rankbook.protocol import WIDGET_VIEW
from rankbook.protocol.messages import (
    Abort,
    AdoptState,
    Assign,
    CallFunction,
    CheckResize,
    Clear,
    Collectives,
    DapToRank,
    DescribeRandom,
    Display,
    Done,
    EnterWorld,
    ErrorReport,
    ExportState,
    FetchValue,
    Frame,
    HandOver,
    InputReply,
    InputRequest,
    ListSnapshots,
    ListState,
    Message,
    OutputBarrier,
    Payload,
    Protect,
    RanksLost,
    Regroup,
    RestoreReplicas,
    RestoreSnapshot,
    RunCell,
    Stack,
    TakeOver,
    ToRank,
)
from rankbook.protocol.queries import (
    CheckNumbers,
    GetCompletions,
    GetInspection,
    GetStatistic,
    GetValue,
    HashState,
    Hint,
    Hold,
    HoldAtStep,
    Look,
    MeasureDifferences,
    MeasureGradients,
    Question,
)
from rankbook.protocol.telemetry import Measure
from rankbook.rank import comms, os_utils, recovery, tracebacks
from rankbook.rank.comms import OutputWidgetTarget
from rankbook.rank.control_thread import Interrupts, Task
from rankbook.rank.debugger import Debuggee
from rankbook.rank.inspect import oom, tensor_introspection
from rankbook.rank.inspect.completion import CompletionHandler
from rankbook.rank.inspect.query_threads import Evaluator, QueryThreads, answer_in_thread, names_in
from rankbook.rank.inspect.tensor_introspection import GilYield
from rankbook.rank.output_capture import OutputCapture
from rankbook.rank.process_groups.manager import GroupManager
from rankbook.rank.shell import RankShell
from rankbook.snapshot_files import SnapshotHeader, TrainingPlace
from rankbook.transport import Frames, RankLink, sending
from rankbook.transport.serialization import Packed, identify_classes, pack, unpack
from rankbook.transport.shared_memory import SegmentStore

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rankbook.rank.inspect.query_handlers import StatisticHandler, StatusHandler
    from rankbook.rank.inspect.step_hold import HoldHandler
    from rankbook.rank.measurement import Measurement
    from rankbook.rank.process_groups.device_calls import DeviceWatcher


_Protection = Protect | ListSnapshots | RestoreSnapshot | RestoreReplicas
_Resize = CheckResize | HandOver | EnterWorld | TakeOver
# A text search before anything is compiled, because every cell is searched.
_USES_ACCELERATOR = re.compile(r"(?<![\w.])accelerator\b")
# For cells with magics, whose arguments may be code. A line may be the second one of a call.
_ASSIGNS_ACCELERATOR = re.compile(
    r"^\s*(?:%\w+\s+)?accelerator\s*(?::[^=\n]*)?=(?!=|\s*accelerator\b)|\bas accelerator\b|\bimport accelerator\b",
    re.MULTILINE,
)


_PROTECTION = "rankbook.runtime.protection"
_GRADIENT_STATE = "rankbook.runtime.gradient_state"
_WATCH = "rankbook.numerics.watch"
_REPORT_TIME = 2.0
"""Seconds by which an interrupt is postponed while the report of an error is made."""


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
        segments: SegmentStore,
    ) -> None:
        self.cell = 0
        self.running: int | None = None
        self._number = 0
        self._told_lost = False
        self.wait_reply: Callable[[], InputReply] | None = None
        self.return_reply: Callable[[InputReply], None] | None = None
        self.run_when_idle: Callable[[Callable[[], None]], None] = lambda _: None
        self._shell = shell
        self._link = link
        self._capture = capture
        self._interrupts = interrupts
        self._group = group
        self._segments = segments
        self._pid = getpid()
        self._status_queries = QueryThreads[Look](link.send, self._make_status_handler)
        self._completion_queries = QueryThreads[Hint](link.send, self._make_completion_handler)
        self._hold_queries = QueryThreads[Hold](link.send, self._make_hold_handler)
        self._evaluator: Evaluator | None = None
        self._measurement: Measurement | None = None
        self._debuggee = Debuggee(link.send, group.suspend_timeouts)
        shell.attach(self)
        group.current_line = self.line
        group.on_break = lambda: link.send(self.collectives(0))
        group.on_cut = interrupts.raise_error
        group.on_stuck = capture.send_stderr
        group.cell.files = self._cell_files()

    @property
    def interrupted(self) -> bool:
        """Return True if an interrupt has reached the running task."""
        return self._interrupts.delivered

    def execute(self, task: Task) -> None:
        """Run one task and send its `Done`, whatever happens."""
        message, frames = task
        # `cell` stays after the end of the task: output of background threads belongs to it. `running` tells other
        # threads whether a task runs.
        self.cell = self.running = _cell_of(message)
        self._number = self._group.cell.number = message.number if isinstance(message, RunCell) else 0
        comms.begin_cell()
        try:
            done, answer = self._run(message, frames)
        except BaseException as error:  # noqa: BLE001 - user code may have broken our own code: reported in Done
            done, answer = self._recover_from(error), ()
        # Before `Done` is sent: a query that the notebook sends after it must find the rank idle.
        self.running = None
        comms.end_cell()
        # Encoding checks the message, and user code may have put odd values into it. A second `Done` without them then
        # takes its place, because the notebook waits for one.
        try:
            self._link.send(done, answer)
        except BaseException as error:  # noqa: BLE001 - as above
            self._link.send(self._recover_from(error))

    def _run(self, message: ToRank, frames: list[memoryview]) -> tuple[Done, Frames]:
        """Perform a task and return its `Done` with the payload's frames.

        User code runs until `disarm`, also after the task itself: an error's `__str__`, a stream's `flush`.
        """
        start, launched = perf_counter(), self._launched()
        packed: Packed | None = None
        error: BaseException | None = None
        report: ErrorReport | None = None
        # Before user code runs: what background threads have printed since the last cell still belongs to that one.
        self._capture.begin(self.cell)
        if self._debuggee.attached:
            self._debuggee.begin()
        # The inner `try` runs the task and explains its error while interrupts are armed, because an error's `__str__`
        # is user code too. The outer one catches whatever is raised meanwhile, an interrupt included. The report then
        # comes from `brief_report`, which calls no user code. An interrupt waits for a moment, because it is often a
        # consequence of the same failure as the error, whose text must not be lost.
        try:
            try:
                self._interrupts.arm(self.cell)
                packed = self._perform(message, frames)
                # A collective that the cell has waited for belongs to the cell, also if only a device has to wait.
                self._group.wait_for_device()
                if self._measurement is not None and self._group.wait_for_queue():
                    self._measurement.device_done()
                # The streams' `flush` may be user code, so it is called while interrupts are armed.
                self._capture.flush()
            except BaseException as caught:  # noqa: BLE001 - any error of user code is reported in Done
                error = caught
                # User code has forked, and the child has left the cell by an exception. It must not report anything on
                # the rank's link.
                self._end_if_forked(error)
                with self._interrupts.postponed(_REPORT_TIME):
                    error = self._translate(error)
                    report = self._report_failure(error)
            finally:
                self._interrupts.disarm()
        except BaseException as caught:  # noqa: BLE001 - as above
            error = caught if error is None else error
            report = report or tracebacks.brief_report(error, caught, self._cell_files(), self._number)
        self._interrupts.disarm()  # an interrupt may have ended the first call
        self._debuggee.end()
        self._end_if_forked()
        lost_device = "" if error is None else self._lost_device()
        if error is not None and self._launched() > launched:
            self._group.note_failed_cell()
        # Also after an error: the times of a failed cell are of interest.
        if self._measurement is not None:
            packed = self._pack_measurement(self._measurement)
        self._capture.end()
        done = Done(
            cell=self.cell,
            status=task_status(error),
            seconds=perf_counter() - start,
            error=report,
            payload=packed.payload if packed else None,
            collectives=self._launched() - launched,
            groups=self._group.report_used(),
            lost_device=lost_device,
            place=self._place() if isinstance(message, (RunCell, CallFunction)) else None,
        )
        return done, packed.frames if packed else ()

    def _launched(self) -> int:
        """Return the number of collectives and of batches of gradient accumulation so far.

        After different numbers of either, the ranks have to begin anew together.
        """
        gradient_state = loaded_module(_GRADIENT_STATE)
        batches = gradient_state.window.batches if gradient_state is not None else 0
        return self._group.launched + batches

    @staticmethod
    def _place() -> TrainingPlace | None:
        """Return where this rank is in a protected training."""
        protection = loaded_module(_PROTECTION)  # not imported if nothing was ever protected
        return protection.training_place() if protection is not None else None

    def _tell_steps(self) -> None:
        """Tell the user which weights a regroup has replaced, or could not."""
        group = self._group
        text = recovery.describe_steps(
            self._shell.user_ns, group.restored_from, group.notes, group.untrusted, group.untrusted_statistics
        )
        group.restored_from, group.notes, group.untrusted, group.untrusted_statistics = None, [], [], []
        if text:
            sys.stderr.write(text)

    def _lost_device(self) -> str:
        """Return the error of a device that has failed for good, and tell the user once what that means."""
        failure = self._group.lost_device()
        if failure and not self._told_lost:
            self._told_lost = True
            self._capture.send_stderr(
                f"{self._group.device} has failed and executes nothing any more for this process ({failure}).\n"
                f"%distributed heal replaces rank {self._group.rank}; pull still reads its variables on the CPU.\n"
            )
        return failure

    def _translate(self, error: BaseException) -> BaseException:
        """Return the exception to report in place of `error`."""
        # A second interrupt must not leave the debugger half detached.
        with self._interrupts.shield():
            self._debuggee.end()
        error = self._group.translate(error)
        # The interrupt is the cause, and the error only its effect.
        if self._interrupts.delivered and is_interrupt_consequence(error):
            return KeyboardInterrupt().with_traceback(tracebacks.traceback_of(error))
        return error

    def _report_failure(self, error: BaseException) -> ErrorReport:
        if issubclass(type(error), KeyboardInterrupt):
            cancel_pending_tasks()
        else:  # after an interrupt a flush could block again: it may be the call that was interrupted
            self._capture.flush()
        return failure_report(self._shell, error, self._cell_files(), self._number)

    def _recover_from(self, error: BaseException) -> Done:
        """Restore a working rank after an error in our own code, and return the task's `Done`."""
        # First of all: the code below needs builtin functions.
        replaced = os_utils.restore_originals()
        self._end_if_forked(error)
        self._interrupts.disarm()
        # The state of the failed task must not reach the next one.
        self._measurement = None
        report = tracebacks.brief_report(error, None, self._cell_files(), self._number)
        with contextlib.suppress(BaseException):  # remaining output is then sent with the next cell's
            if replaced:
                self._capture.send_stderr(os_utils.describe_restored(replaced))
            self._capture.end()
        return Done(cell=self.cell, status=task_status(error), seconds=0.0, error=report)

    def _end_if_forked(self, error: BaseException | None = None) -> None:
        """Exit if this process is a child that user code forked and that has left the cell, by `error` if given."""
        if not self._forked:
            return
        code = 1
        with contextlib.suppress(BaseException):  # its streams and its error are the user's
            if type(error) is SystemExit:
                code = _exit_code(error)
            elif error is not None:
                report = failure_report(self._shell, error, self._cell_files(), self._number)
                sys.stderr.write(f"{report.plain}\n")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _cell_files(self) -> dict[str, int]:
        return cell_numbers(self._shell.compile)

    def _perform(self, message: ToRank, frames: list[memoryview]) -> Packed | None:
        match message:
            case RunCell():
                self._begin_cell(message.source)
                self._tell_steps()
                # Before and after the cell: a background save may fail between two cells or during one.
                _report_lost_saves(self._cell_files())
                try:
                    if message.measure is None:
                        self._shell.run(message.source, message.number, message.file, session=message.session)
                    else:
                        self._run_measured(message, message.measure)
                    _report_paused_tasks(message.source)
                finally:
                    identify_classes(self._shell.user_ns, message.source, self.cell)
                    _report_lost_saves(self._cell_files())
            case CallFunction():
                self._group.begin_cell()
                with self._shell.reloading():
                    function, args, kwargs = self._unpack(message.payload, frames)
                    return pack(function(*args, **kwargs), store=self._segments)
            case Assign():
                with self._shell.reloading():
                    self._shell.user_ns.update(self._unpack(message.payload, frames))
            case FetchValue():
                return pack(self._fetch(message.name), store=self._segments)
            case ListState() | ExportState():
                namespace, hidden = self._shell.user_ns, self._shell.user_ns_hidden
                shards = recovery.Shards(message.snapshot, message.replaced, message.handed_over)
                if isinstance(message, ListState):
                    return pack(recovery.list_state(namespace, hidden, shards=shards), store=None)
                return recovery.export_state(namespace, hidden, message.names, self._segments, shards=shards)
            case DescribeRandom():
                return pack(recovery.seeded_random_state(), store=None)
            case AdoptState(payload=payload):
                open_state = None if payload is None else partial(self._unpack, payload, frames)
                adopted = recovery.adopt_state(self._shell.user_ns, open_state)
                recovery.continue_random(message.random, message.seeded)
                adopted["lost_save"] = _lost_saves(self._cell_files())
                return pack(adopted, store=None)
            case HashState() | MeasureDifferences() | MeasureGradients():
                return pack(self.check_numbers(message), store=self._segments)
            case (
                Protect()
                | ListSnapshots()
                | RestoreSnapshot()
                | RestoreReplicas()
                | CheckResize()
                | HandOver()
                | EnterWorld()
                | TakeOver()
            ):
                return pack(self._move_state(message), store=None)
            case Regroup():
                self._regroup(message)
            case _:
                raise InvalidArgument(f"expected a task, got the message {type(message).__name__}")
        return None

    def _regroup(self, message: Regroup) -> None:
        if message.places:
            self._group.enter_place(message.places[self._group.rank])
        try:
            self._group.join(message.generation, message.world_size, anew=message.anew)
        except (RuntimeError, OSError) as error:
            raise StartError(f"cannot form the process group: {error}") from error
        # The old group's threads left free memory in the allocator's arenas.
        os_utils.malloc_trim()

    def check_numbers(self, message: HashState | MeasureDifferences | MeasureGradients) -> object:
        """Return the result of a check of numbers. Main thread, between cells or at the end of an optimizer step."""
        # Imported here: a rank whose numbers nobody checks loads nothing.
        if isinstance(message, MeasureGradients):
            from rankbook.numerics.gradients import local_gradients
            from rankbook.rank.inspect.shard_map import resolve_variable

            return local_gradients(resolve_variable(self.namespace(), message.name, GilYield()), message.name)
        from rankbook.rank.inspect.state_inventory import hash_state, measure_differences

        if isinstance(message, HashState):
            return hash_state(self.namespace(), message.names)
        return measure_differences(self.namespace(), message.names, message.pieces)

    @staticmethod
    def _list_snapshots(*, remove: bool) -> dict[int, list[SnapshotHeader]]:
        place = snapshot_files.this_place
        assert place is not None
        if remove:
            snapshot_files.remove_all(place.folder)
        return snapshot_files.read_headers(place.folder, range(place.world_size))

    def _protect(self, message: _Protection) -> object:
        if isinstance(message, ListSnapshots):
            return self._list_snapshots(remove=message.remove)
        from rankbook.runtime import protection

        if isinstance(message, RestoreReplicas):
            from rankbook.runtime.strategies import transfer

            return transfer.restore_from_replicas(message.replaced)
        if isinstance(message, RestoreSnapshot):
            restored = protection.restore(message.version, message.every)
            unprotected = protection.find_unprotected(self._shell.user_ns, self._shell.user_ns_hidden)
            return {**restored, "unprotected": list(unprotected)}
        if message.every is not None:
            protection.protect(message.every)
        return protection.report(self._shell.user_ns, self._shell.user_ns_hidden)

    def _move_state(self, message: _Protection | _Resize) -> object:
        if isinstance(message, (Protect, ListSnapshots, RestoreSnapshot, RestoreReplicas)):
            return self._protect(message)
        namespace, hidden = self._shell.user_ns, self._shell.user_ns_hidden
        match message:
            case CheckResize():
                return recovery.check_resize(namespace, hidden, message.world_size)
            case HandOver():
                recovery.hand_over(message.folder)
            case EnterWorld():
                notes = recovery.enter_world(namespace, hidden, message)
                self._shell.define_names({**self._shell.predefined_names, "world_size": message.world_size}, keep=True)
                return notes
            case TakeOver():
                recovery.take_over(message.folder)
        return None

    def _run_measured(self, message: RunCell, request: Measure) -> None:
        with self._interrupts.shield():
            from rankbook.rank.measurement import Measurement

            self._measurement = measurement = Measurement(
                request, self._group.rank, self._group.device, self._group.launched
            )
            measurement.start()
        try:
            self._shell.run(message.source, message.number, message.file, session=message.session)
        finally:
            with self._interrupts.shield():
                measurement.stop(self._group.launched)

    def _pack_measurement(self, measurement: Measurement) -> Packed:
        """Return the packed measurement. Called after `disarm`, when no interrupt can arrive."""
        self._measurement = None
        measurement.stop(self._group.launched)  # an interrupt may have prevented the first call
        return pack(measurement.result(), store=self._segments)

    def _begin_cell(self, source: str) -> None:
        self._group.begin_cell()
        if "accelerator" in source:
            self._provide_accelerator(source)
        watch: Any = loaded_module(_WATCH)  # not imported if nothing was ever watched
        if watch is not None:
            watch.cell += 1

    def _provide_accelerator(self, source: str) -> None:
        """Define `accelerator` for a cell that uses the name without assigning it."""
        namespace = self._shell.user_ns
        # The user's own variable of this name is never replaced.
        if "accelerator" not in namespace and self._uses_accelerator(source):
            from rankbook.runtime import Accelerator

            namespace["accelerator"] = Accelerator()

    def _uses_accelerator(self, source: str) -> bool:
        if not _USES_ACCELERATOR.search(source):
            return False
        with contextlib.suppress(Exception):  # the run of the cell reports it
            transformed = self._shell.transform_cell(source)
            if "get_ipython()" in transformed:
                return not _ASSIGNS_ACCELERATOR.search(source)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            tree = compile(transformed, "<cell>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
            # Not the declaration `accelerator: Accelerator`, which gives no value.
            declared = {
                id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node.value is None
            }
            if any(_binds_accelerator(node) for node in ast.walk(tree) if id(node) not in declared):
                return False
            # Not for a comment, or a parameter.
            return "accelerator" in names_in(compile(tree, "<cell>", "exec", flags, dont_inherit=True))
        return False

    def _unpack(self, payload: Payload, frames: list[memoryview]) -> Any:  # noqa: ANN401 - any value
        return unpack(payload, frames, unlink=False, folder=self._segments.folder)

    def _fetch(self, name: str) -> object:
        first, *rest = name.split(".")
        if first not in self._shell.user_ns:
            raise InvalidArgument(f"variable {first!r} is not defined on this rank{suggest(first, self.namespace())}")
        value: object = self._shell.user_ns[first]
        for attribute in rest:
            if not hasattr(value, attribute):
                raise InvalidArgument(f"{first!r} has no attribute {attribute!r}{suggest(attribute, dir(value))}")
            value = getattr(value, attribute)
        return plain_module(name, value) if isinstance(value, torch.nn.Module) else value

    # ShellSession

    @property
    def host_folder(self) -> Path:
        """See `shell.ShellSession`."""
        return self._segments.folder

    def display(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> None:
        """See `shell.ShellSession`."""
        if self._forked:
            print(data.get("text/plain", ""))  # noqa: T201 - a subprocess reaches the notebook only through its stdout
            return
        # The widget is complete when it is displayed, so its comms' messages may be delivered.
        if WIDGET_VIEW in data:
            comms.release_messages()
        widget = self._widget_target()
        if widget is not None and widget.display(kind, data, metadata, display_id):
            return
        self._send_in_order(
            Display(cell=self.cell, kind=kind, data=data, metadata=metadata, display_id=display_id)  # type: ignore[arg-type]
        )

    def clear(self, *, wait: bool) -> None:
        """See `shell.ShellSession`."""
        widget = self._widget_target()
        if widget is not None:
            widget.clear(wait=wait)
        elif not self._forked:
            self._send_in_order(Clear(cell=self.cell, wait=wait))

    def mark_output(self, name: str) -> None:
        """Mark a place in the output by `name`, see `OutputBarrier`. Main thread."""
        if not self._forked and self.running is not None:
            self._send_in_order(OutputBarrier(cell=self.cell, name=name))

    def _widget_target(self) -> OutputWidgetTarget | None:
        """Return the Output widget that captures this thread's output, or None.

        Flushes the output so far first, so that it is stored before what follows.
        """
        redirect = self._capture.current_redirect()
        if redirect is not None:
            self._capture.flush()
            self._capture.drain()
        return redirect if isinstance(redirect, OutputWidgetTarget) else None

    def error_report(self, error: BaseException) -> ErrorReport:
        """Return the report of an error that does not end its cell. Main thread."""
        error = self._group.translate(error)
        return tracebacks.error_report(self._shell, error, self._cell_files())

    def ask(self, prompt: str, *, password: bool) -> str:
        """See `shell.ShellSession`. Raises EOFError if the front end cannot ask for input."""
        if self._forked:
            raise EOFError("input() is not available in a subprocess of a rank")
        cell = self.cell
        self._send_in_order(InputRequest(cell=cell, prompt=prompt, password=password))
        assert self.wait_reply is not None and self.return_reply is not None
        reply = self.wait_reply()
        while reply.cell != cell:  # the reply to an input() call that was interrupted
            if reply.cell > cell:  # of a later cell: this is a thread whose cell has ended
                self.return_reply(reply)
                raise EOFError("the cell has ended, so input is not available")
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
        if sending.active:  # a finalizer displays something in the middle of a send
            self._link.send(message)
            return
        self._capture.flush()
        with self._interrupts.shield(), self._capture.lock:
            self._capture.drain()
            self._link.send(message)

    def stack(self, token: int) -> Stack:
        """Return the main thread's stack and state. Any thread."""
        return Stack(token, self.running, self.frames(), self.pending_collective()[0], self._debuggee.paused)

    def frames(self) -> tuple[Frame, ...]:
        """Return the main thread's stack frames; empty between tasks. Any thread."""
        return tracebacks.main_thread_frames(self._cell_files()) if self.running is not None else ()

    def pending_collective(self) -> tuple[str, float]:
        """Return the oldest unfinished collective as text, and its age in seconds. Any thread."""
        pending = self._group.oldest_pending()
        return (str(pending), time.monotonic() - pending.began) if pending is not None else ("", 0.0)

    def line(self) -> int | str | None:
        """Return the line that the main thread executes, see `main_thread_line`. Any thread."""
        if self.running is None:
            return None
        return tracebacks.main_thread_line(self._cell_files(), self._number)

    def collectives(self, token: int) -> Collectives:
        """Return the pending collectives of the process groups. Any thread."""
        line = self.line()
        return Collectives(token=token, cell=self.running, line=line, groups=self._group.report(line))

    def namespace(self) -> dict[str, object]:
        """Return a copy of the cells' variables. Any thread.

        Leaves out keys that are not strings, which `globals()` allows.
        """
        # `dict.copy` is one call into C, during which the main thread cannot change the dict.
        return {name: value for name, value in dict.copy(self._shell.user_ns).items() if type(name) is str}

    def hidden(self) -> Collection[str]:
        """Return the names that were defined before the first cell. Any thread.

        Leaves out names of the rank, such as `dist`, to which a cell has given another value.
        """
        values, defined = dict.copy(self._shell.user_ns), self._shell.predefined_names
        replaced = {name for name, value in defined.items() if values.get(name, value) is not value}
        return frozenset(dict.copy(self._shell.user_ns_hidden).keys() - replaced)

    def query(self, question: Question) -> None:
        """Queue a query for a background thread, which sends the answer. Any thread."""
        if isinstance(question, GetValue):
            answer_in_thread(self._link.send, self._make_evaluator, question)
        elif isinstance(question, GetStatistic):  # it may wait for the device
            answer_in_thread(self._link.send, self._make_statistic_handler, question)
        elif isinstance(question, (GetCompletions, GetInspection)):  # a thread of its own: a status query may take long
            self._completion_queries.put(question)
        elif isinstance(question, (HoldAtStep, CheckNumbers)):
            self._hold_queries.put(question)
        else:
            self._status_queries.put(question)

    def debug(self, message: DapToRank) -> None:
        """Queue a Debug Adapter Protocol message for the debugger's thread. Any thread."""
        self._debuggee.queue_message(message)

    def _make_completion_handler(self) -> CompletionHandler:
        return CompletionHandler(self, self._group.rank)

    def _make_hold_handler(self) -> HoldHandler:
        from rankbook.rank.inspect.step_hold import HoldHandler

        return HoldHandler(self)

    def _make_status_handler(self) -> StatusHandler:
        from rankbook.rank.inspect.query_handlers import StatusHandler

        return StatusHandler(self, self._group.rank, self._group.device)

    def _make_statistic_handler(self) -> StatisticHandler:
        from rankbook.rank.inspect.query_handlers import StatisticHandler

        return StatisticHandler(self, self._group.rank)

    def device_watcher(self) -> DeviceWatcher | None:
        """Return the watcher of the rank's device; None if the rank computes on the CPU. Any thread."""
        return self._group.device_watcher()

    def _make_evaluator(self) -> Evaluator:
        self._evaluator = self._evaluator or Evaluator(self, self._group.device)
        return self._evaluator

    def abort(self, message: Abort) -> None:
        """Abort the collectives that wait for ranks which will not join. Any thread."""
        self._group.abort(message)

    def record_losses(self, message: RanksLost) -> None:
        """Record why ranks have exited. Any thread."""
        self._group.record_losses(message)


def plain_module(name: str, model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside the wrappers of DDP and torch.compile, which only a rank can use.

    Raises `InvalidArgument` for a model of DTensors, as `fully_shard` makes them: no rank has all of its weights, and
    to gather them is a collective, which the ranks of a pull need not be able to join.
    """
    module = tensor_introspection.unwrapped(model)
    gil_yield = tensor_introspection.GilYield()
    tensors = tensor_introspection.tensors_of_modules(
        list(tensor_introspection.modules_of(module, gil_yield)), gil_yield
    )
    # A copy of one rank's shards would look like the whole model.
    if any(tensor_introspection.is_dtensor(named.tensor) for named in tensors):
        raise InvalidArgument(
            f"{name!r} is a model whose weights are divided among the ranks: gather them with "
            "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict; "
            f"weights = get_model_state_dict({name}, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) "
            "on all ranks, then %distributed pull weights --ranks 0"
        )
    return module


def _cell_of(message: ToRank) -> int:
    cell: int = getattr(message, "cell")  # noqa: B009 - every task has `cell`; other members of the union are not tasks
    return cell


def failure_report(shell: InteractiveShell, error: BaseException, cells: dict[str, int], number: int) -> ErrorReport:
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


def _exit_code(error: SystemExit) -> int:
    """Return the exit code that Python gives a process that ends by `error`. A text as its code is printed."""
    if error.code is None or type(error.code) is int:
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def is_interrupt_consequence(error: BaseException) -> bool:
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


def cancel_pending_tasks() -> None:
    """Cancel the tasks that an interrupted `await` left in the event loop.

    Otherwise the next `await` would resume them.
    """
    loop = asyncio_loop()
    # In a running loop, `run_until_complete` would raise.
    if loop.is_running() or not (tasks := asyncio.all_tasks(loop)):
        return
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))  # user code may ignore the cancellation


def _report_paused_tasks(source: str) -> None:
    """Print how many asyncio tasks a cell has left. In the kernel they go on, but a rank has no loop between cells."""
    if "await" not in source and "async" not in source:
        return
    loop = asyncio_loop()
    if not loop.is_running() and (waiting := [task for task in asyncio.all_tasks(loop) if not task.done()]):
        _print_note(f"{plural(len(waiting), 'asyncio task')} paused: on a rank, tasks run only while a cell awaits")


def _report_lost_saves(cells: Mapping[str, int]) -> None:
    """Print the error of a failed background save to the running cell's stderr."""
    if message := _lost_saves(cells):
        _print_note(message)


def _print_note(text: str) -> None:
    with contextlib.suppress(Exception):  # the cell may have replaced sys.stderr
        print(f"rankbook: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the cell's output


def _lost_saves(cells: Mapping[str, int]) -> str:
    """Return a message about a background save that failed, once; `cells` has the numbers of the cells by file."""
    # Only a cell that saves in the background has imported the module.
    saving = loaded_module("rankbook.checkpoint.async_save")
    return "" if saving is None else str(saving.lost_saves(cells))


def _binds_accelerator(node: ast.AST) -> bool:
    """Return True for the part of a syntax tree that gives a value to the name `accelerator`."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name == "accelerator"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name == "accelerator"
        case ast.alias(name=imported, asname=renamed):
            return (renamed or imported.partition(".")[0]) == "accelerator"
    return False
