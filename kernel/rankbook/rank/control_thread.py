"""The control thread of a rank, and the interrupts that it raises in the main thread.

The control thread alone receives from the notebook. It handles interrupts, aborts and queries at once, whatever the
main thread does, and hands tasks to the main thread through a queue, in the order in which they arrive. It also reads
the pipes of stdout and stderr, and kills the process group when the forkserver is gone. It never runs user code.

An interrupt names its cell, so that a late one never hits the next cell. It travels in these steps:

1. `request` (control thread) stores the cell in `_target_cell` and, if that cell runs, sends SIGINT to the main thread.
   If the cell has not begun, `arm` raises KeyboardInterrupt when it does.
2. `_on_signal` (main thread) clears `_target_cell` and raises KeyboardInterrupt, if that cell runs. If this moment is
   protected (`shield`, a fork, a lock that is being taken or released), it is raised a little later; in a step of an
   optimizer, at its end (`defer`, `deliver`).
3. `repeat_signal` (control thread) repeats the signal as long as `_target_cell` is set, because a signal can get lost.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import psutil

from rankbook import step_interrupts
from rankbook.protocol.messages import (
    Abort,
    Collectives,
    CommToRank,
    DapToRank,
    GetCollectives,
    GetStack,
    InputReply,
    Interrupt,
    LimitOutput,
    RanksLost,
    Shutdown,
    Stack,
    ToRank,
)
from rankbook.protocol.queries import QueryRequest, Question
from rankbook.rank import comms, os_utils
from rankbook.rank.output_capture import OutputCapture
from rankbook.transport import RankLink

READ_AFTER = 0.01
"""Seconds from the first output in the pipes to reading it. Reading takes the GIL from the main thread.

Output that a rank writes just before it dies is then still in the pipes, where the forkserver finds it. Once read, it
may be lost with the process.
"""

_FIRST_REPEAT = 0.005
"""Seconds until an unnoticed interrupt is signalled again; doubled every time, up to one second."""

_RETRY_AFTER = (0.001, 0.0017, 0.0029, 0.0049, 0.0083)
"""Seconds until an interrupt that arrived at a protected moment is raised again, used in turn.

With a constant delay, the retries of a loop that forks could hit the fork hooks every time.
"""

MIN_FAILURE_INTERVAL = 1.0
"""Minimum seconds between two errors of a thread; if they come closer, the thread gives up."""

_LOCK_FUNCTIONS = frozenset({"__enter__", "__exit__", "_acquire_restore", "_release_save"})
"""Functions of `threading` and `multiprocessing` that take or release a lock."""

_REPLACED_FUNCTIONS = frozenset({"_extract_tensors"})
"""Functions of torch that C++ code calls, as DDP's does, and whose exceptions it replaces by a RuntimeError."""

_NAMED_PROCESS = re.compile(r"\(pid (\d+)\)")
"""The subprocess that an error of torch's SIGCHLD handler is about."""

_WARNINGS_FILE = warnings.formatwarning.__code__.co_filename
_MAX_DELAYS = 40
"""Maximum number of delays, of some milliseconds, for such functions: only a blocked thread takes longer."""

Task = tuple[ToRank, list[memoryview]]


class MainThreadControl(Protocol):
    """Interface of the control thread to the main thread's work. Safe to call from any thread."""

    def stack(self, token: int) -> Stack:
        """Return the main thread's stack."""

    def collectives(self, token: int) -> Collectives:
        """Return the pending collectives of the process groups."""

    def query(self, question: Question) -> None:
        """Queue a query, to be answered on another thread."""

    def debug(self, message: DapToRank) -> None:
        """Queue a message for the debugger, to be handled on another thread."""

    def abort(self, message: Abort) -> None:
        """Abort the collectives that wait for ranks which will not join."""

    def record_losses(self, message: RanksLost) -> None:
        """Record why ranks have exited."""


class Interrupts:
    """Raise KeyboardInterrupt in the main thread, in the intended cell and in no other."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        # Held only for a few instructions, by the control thread, the retry threads and `arm`. The signal handler does
        # not take it, because it may interrupt `arm`.
        self._lock = threading.Lock()
        self._handler = self._on_signal
        self._armed_cell: int | None = None
        self._target_cell: int | None = None
        # What `raise_error` raises in place of KeyboardInterrupt, with its cell. Cleared by the main thread.
        self._error: tuple[int, BaseException] | None = None
        self._shields = 0
        self._forking = False
        self._pending = False
        self._retries = itertools.cycle(_RETRY_AFTER)
        self._repeat_delay = _FIRST_REPEAT
        self._next_repeat = 0.0
        self._repeated = False
        self.delivered = False
        self._previous_unraisablehook = sys.unraisablehook
        self._child_errors = ""
        # Subprocesses that an interrupt has ended, or will end: it may take them a while. Filled by the control thread.
        self._interrupted_processes: set[int] = set()
        self._delays = 0
        self._postponed_until = 0.0
        # The object whose step defers interrupts, by its id, and until when.
        self._deferring = 0
        self._deferred_until = 0.0

    def install_hooks(self) -> None:
        """Install hooks for the places where Python discards an exception: fork hooks and destructors.

        An interrupt there is raised again a moment later. Starting a DataLoader worker is such a moment, and a fork
        hook that is left half way keeps its lock.
        """
        sys.unraisablehook = self._on_unraisable
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Delay an interrupt until the end of the context. Any thread; has an effect on the main thread only.

        Keeps an interrupt from leaving half a message on the wire.
        """
        if threading.get_ident() != self._main:
            yield
            return
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
            if self._pending and not self._shields and not self._forking:
                self._pending = False
                self._raise_or_retry(sys._getframe())

    @contextlib.contextmanager
    def postponed(self, seconds: float) -> Iterator[None]:
        """Postpone interrupts in the context by at most `seconds`. Main thread.

        For user code that is expected to be short, such as an error's `__str__`. If the cell ends right after the
        context, the interrupt is dropped.
        """
        self._postponed_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._postponed_until = 0.0

    def defer(self, owner: object) -> None:
        """Defer interrupts of the user until `deliver(owner)`, by at most `LIMIT` seconds: see step_interrupts.py."""
        if threading.get_ident() != self._main:
            return
        now = time.monotonic()
        if now < self._deferred_until:  # also after a step that has raised an error, which nobody ends
            return
        self._raise_deferred()  # for which the last step has taken too long
        self._deferring, self._deferred_until = id(owner), now + step_interrupts.LIMIT

    def deliver(self, owner: object) -> None:
        """End what `defer(owner)` has begun, and raise the interrupt that has arrived since."""
        if threading.get_ident() == self._main and self._deferring == id(owner):
            self._raise_deferred()

    def _raise_deferred(self) -> None:
        self._deferring, self._deferred_until = 0, 0.0
        cell = self._armed_cell
        if cell is not None and self._target_cell == cell:
            self._on_signal(signal.SIGINT, sys._getframe())

    # Delivery: from the control thread to the main thread

    def request(self, cell: int) -> None:
        """Interrupt `cell`, now or as soon as it begins. Control thread."""
        # With `arm`, exactly one of two things happens: this thread sees the armed cell and sends the signal, or `arm`
        # sees the target and raises.
        with self._lock:
            self._target_cell = cell
            running = self._armed_cell == cell
        if running:
            self._signal()

    def raise_error(self, error: BaseException) -> None:
        """Raise `error` in the running cell at once, in the way of an interrupt. Any thread.

        An interrupt of the user that has not been raised yet takes precedence. Does nothing between two cells.
        """
        with self._lock:
            cell = self._armed_cell
            if cell is None or self._error is not None:
                return
            self._error = cell, error
        self._repeat_delay = _FIRST_REPEAT
        self._next_repeat = time.monotonic() + self._repeat_delay
        signal.pthread_kill(self._main, signal.SIGINT)

    def _take_exception(self) -> BaseException:
        """Return what a signal raises: the error of `raise_error`, unless the user has interrupted the cell."""
        error, self._error = self._error, None
        return error[1] if error is not None and not self.delivered else KeyboardInterrupt()

    def repeat_signal(self) -> float | None:
        """Signal again if the main thread has not noticed; return the seconds until the next check, or None.

        Control thread. A signal that arrives between the interpreter's last check and a blocking system call is noticed
        by neither.
        """
        with self._lock:
            error = self._error
            unnoticed = self._target_cell is not None and self._target_cell == self._armed_cell
            unnoticed = unnoticed or (error is not None and error[0] == self._armed_cell)
        if not unnoticed:
            return None
        # The handler of the user's code does not say that it has noticed; it may count the interrupts.
        if error is None and signal.getsignal(signal.SIGINT) not in (self._handler, signal.default_int_handler):
            return None
        remaining = self._next_repeat - time.monotonic()
        if remaining > 0:
            return remaining
        self._repeated = True
        signal.pthread_kill(self._main, signal.SIGINT)
        self._repeat_delay = min(2 * self._repeat_delay, 1.0)  # long-running C code should not be slowed down
        self._next_repeat = time.monotonic() + self._repeat_delay
        return self._repeat_delay

    def _signal(self) -> None:
        # Every interrupt begins with short repetitions.
        self._repeat_delay = _FIRST_REPEAT
        self._next_repeat = time.monotonic() + self._repeat_delay
        signal.pthread_kill(self._main, signal.SIGINT)  # only a signal to this thread ends its system call
        # The cell's subprocesses get SIGINT too, as they would at a terminal. They are recorded first: one that ends at
        # once must be known.
        processes = os_utils.started_processes()
        with self._lock:
            self._interrupted_processes.update(processes)
        os_utils.interrupt_processes(processes)

    def arm(self, cell: int) -> None:
        """Begin `cell`: interrupts for it are raised from here on. Main thread.

        Raises KeyboardInterrupt if the cell was interrupted before it began.
        """
        if signal.getsignal(signal.SIGINT) is not self._handler:  # user code may have installed its own handler
            signal.signal(signal.SIGINT, self._handler)
        # The flags belong to one cell.
        self.delivered = self._repeated = False
        self._deferring, self._deferred_until = 0, 0.0
        self._error = None
        self._delays = 0
        # In a cell, the user's handler of SIGCHLD runs as it was installed. Between cells it is wrapped, because its
        # error would end the rank, and after an interrupt, because it would tell this cell of another one's subprocess.
        with self._lock:
            self._interrupted_processes = {pid for pid in self._interrupted_processes if psutil.pid_exists(pid)}
        if not self._interrupted_processes:
            self._unwrap_child_handler()
        self._print_child_errors()
        with self._lock:
            self._armed_cell = cell
            # A rank has one task at a time, so that any other target is a cell that has ended. It would make
            # `_on_signal` ignore what is meant for this one.
            early, self._target_cell = self._target_cell == cell, None
        if early:
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """End the cell: no interrupt is raised any more. Main thread."""
        # The first statement: a signal that arrives after it raises nothing.
        self._armed_cell = None
        self._pending = False
        self._error = None
        self._wrap_child_handler()

    # SIGCHLD handlers of user code

    def _wrap_child_handler(self) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _ChildHandler):
            signal.signal(signal.SIGCHLD, _ChildHandler(self, handler))

    def _unwrap_child_handler(self) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        if isinstance(handler, _ChildHandler):
            signal.signal(signal.SIGCHLD, handler.wrapped)

    def _print_child_errors(self) -> None:
        """Print the errors that the SIGCHLD handler has raised between cells."""
        errors, self._child_errors = self._child_errors, ""
        if errors:
            sys.stderr.write(errors)

    def absorb_child_error(self, error: RuntimeError) -> bool:
        """Return True if an exception of the cell's SIGCHLD handler must not be raised. Main thread.

        Between cells it would end the rank, so the next cell prints it. In an interrupted cell it is dropped: the
        interrupt has ended the subprocesses too, and KeyboardInterrupt is the error to show. What is said later
        of a subprocess that was interrupted is dropped as well.
        """
        if any(int(pid) in self._interrupted_processes for pid in _NAMED_PROCESS.findall(str(error))):
            return True
        if self._armed_cell is None:
            self._child_errors = f"Between two cells: {error}\n"
            return True
        return self.delivered

    # Takes no lock: the handler runs in the main thread, which may hold `_lock` in `arm`.
    def _on_signal(self, _number: int, frame: types.FrameType | None) -> None:
        target, cell = self._target_cell, self._armed_cell
        # Between two cells, or too late for the cell that was meant. A target of None is a SIGINT from outside, such as
        # a user's `kill -INT`, and interrupts whatever runs. The target stays: it may be the next cell, which `arm`
        # interrupts, while this signal repeats an earlier one.
        if cell is None or target not in (None, cell):
            return
        if target is not None and self._error is None and time.monotonic() < self._deferred_until:
            # `deliver` raises it, or one of the signals that `repeat_signal` sends as long as the target is set. An
            # error that ends the step until then may be a consequence: the collectives are aborted meanwhile.
            self.delivered = True
            self._wrap_child_handler()  # the subprocesses of the cell have got the same interrupt
            return
        self._target_cell = None  # tells `repeat_signal` that the signal has been noticed
        if target is None and self._error is None and self._repeated:  # a reminder of what was raised already
            self._repeated = False
            return
        if (remaining := self._postponed_until - time.monotonic()) > 0:
            # Another error of the cell is being reported.
            if self._error is not None and target is None:
                self._error = None
                return
            self._retry_later(remaining)
            return
        self.delivered = self.delivered or target is not None
        self._wrap_child_handler()  # the subprocesses of the cell get the same interrupt
        # `shield` and `_after_fork` raise it later, on this thread.
        if self._shields or self._forking:
            self._pending = True
        else:
            self._raise_or_retry(frame)

    def _raise_or_retry(self, frame: types.FrameType | None) -> None:
        """Raise what is to be raised, or do it later where `frame` is unsafe. Main thread."""
        # A later attempt finds another frame, in all likelihood.
        if self._is_unsafe(frame):
            self._retry_later()
        else:
            raise self._take_exception()

    def _is_unsafe(self, frame: types.FrameType | None) -> bool:
        """Return True if an exception in `frame` would keep a lock for ever, or would be lost.

        Left half way, a function of `threading` or `multiprocessing` that takes or releases a lock in Python code holds
        it for ever (bpo-29988). C code that shows a warning may discard an exception that is raised meanwhile, such as
        `os.fork` of Python 3.12 in a process with threads, and C++ code of torch replaces some. After `_MAX_DELAYS`
        delays the frame is interrupted all the same: only a thread that blocks there takes so long.
        """
        if self._delays >= _MAX_DELAYS or frame is None:
            return False
        unsafe = frame.f_code.co_name in _LOCK_FUNCTIONS
        caller: types.FrameType | None = frame
        while caller is not None and not unsafe:
            code = caller.f_code
            unsafe = code.co_filename == _WARNINGS_FILE or code.co_name in _REPLACED_FUNCTIONS
            caller = caller.f_back
        self._delays += unsafe
        return unsafe

    # An interrupt may end one of these hooks before its first line. So they set a flag: a counter could stay too high.

    def _before_fork(self) -> None:
        if threading.get_ident() == self._main:
            self._forking = True

    def _after_fork(self) -> None:
        if threading.get_ident() == self._main:
            self._forking = False
            if self._pending and not self._shields:
                self._pending = False
                self._retry_later()

    def _in_child(self) -> None:
        if threading.get_ident() == self._main:
            # The child is a process of the user's code, in which no fork is under way and no interrupt is pending.
            self._forking = self._pending = False

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        # Python prints and discards an exception that a destructor or a fork hook raises. The interrupt would be lost
        # with it.
        if (
            unraisable.exc_type is KeyboardInterrupt
            and threading.get_ident() == self._main
            and self._armed_cell is not None
        ):
            self._retry_later()
        else:
            self._previous_unraisablehook(unraisable)

    def _retry_later(self, seconds: float | None = None) -> None:
        """Interrupt the cell again in `seconds`, by default in a few milliseconds.

        The signal also goes to the children that the cell has by then.
        """
        cell = self._armed_cell
        if cell is not None:  # Thread.start waits, and could be interrupted there
            _thread.start_new_thread(self._retry, (cell, next(self._retries) if seconds is None else seconds))

    def _retry(self, cell: int, seconds: float) -> None:
        threading.Event().wait(seconds)
        # The cell may have ended while this thread slept. Its successor must not be interrupted.
        with self._lock:
            running = self._armed_cell == cell
            error = self._error is not None and not self.delivered
            if running and not error:
                self._target_cell = cell
        if running and error:
            signal.pthread_kill(self._main, signal.SIGINT)
        elif running:
            self._signal()


class _ChildHandler:
    """Wrap a SIGCHLD handler of user code, and pass its RuntimeErrors to `Interrupts`.

    torch's handler raises one for a DataLoader worker that was killed, wherever the main thread is.
    """

    def __init__(self, interrupts: Interrupts, wrapped: Callable[[int, types.FrameType | None], object]) -> None:
        self._interrupts = interrupts
        self.wrapped = wrapped

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        try:
            self.wrapped(number, frame)
        except RuntimeError as error:
            if not self._interrupts.absorb_child_error(error):
                raise


class ControlThread(threading.Thread):
    """Receive and handle the notebook's messages until Shutdown arrives or the notebook is gone.

    Tasks for the main thread go to `tasks`, in which None ends the main thread's loop.
    """

    def __init__(
        self,
        link: RankLink,
        capture: OutputCapture,
        interrupts: Interrupts,
        main_thread: MainThreadControl,
        liveness: int,
    ) -> None:
        super().__init__(name="rankbook-control", daemon=True)
        self.pydev_do_not_trace = True  # pydevd must not pause this thread: it always answers
        self.tasks: queue.SimpleQueue[Task | Callable[[], None] | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._link = link
        self._capture = capture
        self._interrupts = interrupts
        self._main_thread = main_thread
        self._liveness = liveness
        self._shutting_down = False
        self.patience = 0.0
        self._drain_at: float | None = None
        self._reported_errors: set[str] = set()

    def next_task(self) -> Task | None:
        """Return the next task, or None when it is time to exit. Main thread.

        Calls the functions that it finds in the queue.
        """
        while callable(task := self.tasks.get()):
            # Functions come from other threads that need the main thread between two tasks, see
            # `Executor.run_when_idle`.
            task()
        # The control thread ends by itself after it has put None. Once it has, this thread alone uses the pipes.
        if task is None:
            self.join()
        return task

    def run(self) -> None:
        """Serve messages. An error is reported and the thread continues; errors in quick succession end the process."""
        try:
            # The system may deliver a signal to any thread that does not block it. A blocking call of the main thread
            # ends only if that thread gets it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # SIGINT must wake the main thread
            self._serve()
        except BaseException as error:  # noqa: BLE001 - reported; without this thread the rank would seem to hang
            self._die(error)

    def _serve(self) -> None:
        failed = -MIN_FAILURE_INTERVAL
        while not self._shutting_down:
            try:
                self._serve_once()
            except Exception as error:
                # The error may be caused by a cell that has replaced a builtin function. It is not counted then.
                if replaced := os_utils.restore_originals():
                    self._capture.send_stderr(os_utils.describe_restored(replaced))
                    continue
                failed, before = time.monotonic(), failed
                if failed - before < MIN_FAILURE_INTERVAL:
                    raise
                self.report_error("Error in Rankbook's control thread, which continues:", error)

    # `_drain_at` is the time at which to read the pipes, or None while they are empty. Only then are they polled: once
    # they have data, polling would return at once until `READ_AFTER` is over.
    def _serve_once(self) -> None:
        due = self._drain_at
        pause = None if due is None else max(0.0, due - time.monotonic())
        watched = (self._liveness, *self._capture.files) if due is None else (self._liveness,)
        times = [seconds for seconds in (pause, self._interrupts.repeat_signal()) if seconds is not None]
        received, readable = self._link.wait(min(times, default=None), watched)
        if self._liveness in readable:
            # The forkserver has died, and nobody would collect this rank. The whole group, because the cell's
            # subprocesses have no other watcher.
            os.killpg(0, signal.SIGKILL)
        if received:
            self._receive()
        # What is still in the pipes is sent by the main thread, in `OutputCapture.end`.
        if self._shutting_down:
            return
        # Not read at once, see `READ_AFTER`.
        if readable:
            self._drain_at = time.monotonic() + READ_AFTER
        elif due is not None and due <= time.monotonic():
            # Set before reading, which may fail: poll reports remaining data again.
            self._drain_at = None
            more = self._capture.drain_within_limit()
            self._drain_at = time.monotonic() + more if more else None

    def _receive(self) -> None:
        # Nothing after Shutdown: a notebook that attaches at this moment must not take the rank for one that goes on.
        while not self._shutting_down and (received := self._link.receive()) is not None:
            # One message at a time, so that an invalid one does not take its successors with it.
            try:
                self._dispatch(*received)
            except Exception as error:  # noqa: BLE001 - shown to the user; the notebook repeats its query
                self.report_error(f"Rankbook could not process the message {type(received[0]).__name__}:", error)

    def report_error(self, title: str, error: BaseException) -> None:
        """Show an error to the user, once per text.

        Does not write to the stderr pipe: it may be full, and this is the thread that empties it.
        """
        text = f"{title}\n{''.join(traceback.format_exception(error))}"
        if text not in self._reported_errors:
            self._reported_errors.add(text)
            self._capture.send_stderr(text)

    def _die(self, error: BaseException) -> None:
        """Exit the process, leaving the reason in the stderr pipe, where the forkserver reads it."""
        try:
            message = f"Rankbook's control thread cannot continue:\n{''.join(traceback.format_exception(error))}"
            with contextlib.suppress(Exception):  # the error may come from here
                self._capture.drain()
            os.set_blocking(2, False)  # no thread empties the pipe any more
            os.write(2, message.encode(errors="replace"))
        finally:
            os._exit(1)

    def _dispatch(self, message: ToRank, frames: list[memoryview]) -> None:
        match message:
            case Shutdown():
                # The patience is set before None is put, upon which the main thread reads it.
                self._shutting_down, self.patience = True, message.patience
                self.tasks.put(None)
            case Interrupt():
                self._interrupts.request(message.cell)
            case InputReply():
                self.replies.put(message)
            case LimitOutput():
                self._capture.limit(message.cell)
            case GetStack():
                self._link.send(self._main_thread.stack(message.token))
            case GetCollectives():
                self._link.send(self._main_thread.collectives(message.token))
            case Abort():
                self._main_thread.abort(message)
            case RanksLost():
                self._main_thread.record_losses(message)
            case CommToRank():
                comms.receive_comm(message, frames)
            case DapToRank():
                self._main_thread.debug(message)
            case QueryRequest():
                self._main_thread.query(message)
            case _:
                self.tasks.put((message, frames))
