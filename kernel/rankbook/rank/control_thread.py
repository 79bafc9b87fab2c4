"""The control thread of a rank, and the interrupts that it raises in the main thread.

The control thread alone receives from the notebook. It handles interrupts, aborts and queries at once, whatever the
main thread does, and hands tasks to the main thread through a queue, in the order in which they arrive. It also reads
the pipes of stdout and stderr, and kills the process group when the forkserver is gone. It never runs user code.

An interrupt names its cell, so that a late one never hits the next cell. It travels in these steps:

1. `request` (control thread) stores the cell in `_target` and, if that cell runs, sends SIGINT to the main thread. If
   the cell has not begun, `arm` raises KeyboardInterrupt when it does.
2. `_on_signal` (main thread) clears `_target` and raises KeyboardInterrupt, unless the cell has ended. If this moment
   is protected (`shield`, a fork, a lock that is being taken or released), it is raised a little later.
3. `remind` (control thread) repeats the signal as long as `_target` is set, because a signal can get lost.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Protocol

from rankbook.protocol.comm import CommToRank, DapToRank
from rankbook.protocol.messages import (
    Abort,
    Collectives,
    GetCollectives,
    GetStack,
    InputReply,
    Interrupt,
    Shutdown,
    Stack,
    ToRank,
)
from rankbook.protocol.queries import QueryRequest, Question
from rankbook.rank import originals, os_utils
from rankbook.rank.io import comms
from rankbook.rank.io.output_capture import OutputCapture
from rankbook.transport.link import RankLink

READ_AFTER = 0.01
"""Seconds from the first output in the pipes to reading it. Reading takes the GIL from the main thread.

Output that a rank writes just before it dies is then still in the pipes, where the forkserver finds it. Once read, it
may be lost with the process.
"""

_SOON = 0.005
"""Seconds until an unnoticed interrupt is signalled again; doubled every time, up to one second."""

_RETRY_AFTER = (0.001, 0.0017, 0.0029, 0.0049, 0.0083)
"""Seconds until an interrupt that arrived at a protected moment is raised again, used in turn.

With a constant delay, the retries of a loop that forks could hit the fork hooks every time.
"""

FAILURES_APART = 1.0
"""Minimum seconds between two errors of a thread; if they come closer, the thread gives up."""

_TAKING = frozenset({"__enter__", "__exit__", "_acquire_restore", "_release_save"})
"""Functions of `threading` and `multiprocessing` that take or release a lock."""

_MOST_PUT_OFF = 40
"""Maximum number of delays, of some milliseconds, for these functions: only a blocked thread takes longer."""

Task = tuple[ToRank, list[memoryview]]


class MainThreadControl(Protocol):
    """Interface of the control thread to the main thread's work. Safe to call from any thread."""

    def stack(self, token: int) -> Stack:
        """Return the main thread's stack."""

    def collectives(self, token: int) -> Collectives:
        """Return the pending collectives of the process groups."""

    def inquire(self, question: Question) -> None:
        """Queue a query, to be answered on another thread."""

    def debug(self, message: DapToRank) -> None:
        """Queue a message for the debugger, to be handled on another thread."""

    def abort(self, message: Abort) -> None:
        """Abort the collectives that wait for ranks which will not join."""


class Interrupts:
    """Raise KeyboardInterrupt in the main thread, in the intended cell and in no other."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._handler = self._on_signal
        self._armed: int | None = None
        self._target: int | None = None
        self._shields = 0
        self._forking = False
        self._held = False
        self._retries = itertools.cycle(_RETRY_AFTER)
        self._patience = _SOON
        self._reminder = 0.0
        self._reminded = False
        self.delivered = False
        self._tell_unraisable = sys.unraisablehook
        self._of_children: Callable[[int, types.FrameType | None], object] | None = None
        self._lost_child = ""
        self._put_off = 0

    def guard(self) -> None:
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
            if self._held and not self._shields and not self._forking:
                self._held = False
                raise KeyboardInterrupt

    def request(self, cell: int) -> None:
        """Interrupt `cell`, now or as soon as it begins. Control thread."""
        with self._lock:
            self._target = cell
            running = self._armed == cell
        if running:
            self._signal()

    def remind(self) -> float | None:
        """Signal again if the main thread has not noticed; return the seconds until the next check, or None.

        Control thread. A signal that arrives between the interpreter's last check and a blocking system call is noticed
        by neither.
        """
        with self._lock:
            unheard = self._target is not None and self._target == self._armed
        if not unheard:
            return None
        remaining = self._reminder - time.monotonic()
        if remaining > 0:
            return remaining
        self._reminded = True
        signal.pthread_kill(self._main, signal.SIGINT)
        self._patience = min(2 * self._patience, 1.0)  # long-running C code should not be slowed down
        self._reminder = time.monotonic() + self._patience
        return self._patience

    def _signal(self) -> None:
        self._patience = _SOON
        self._reminder = time.monotonic() + self._patience
        signal.pthread_kill(self._main, signal.SIGINT)  # only a signal to this thread ends its system call
        os_utils.interrupt_group()  # the cell's subprocesses get SIGINT too, as they would at a terminal

    def arm(self, cell: int) -> None:
        """Begin `cell`: interrupts for it are raised from here on. Main thread.

        Raises KeyboardInterrupt if the cell was interrupted before it began.
        """
        if signal.getsignal(signal.SIGINT) is not self._handler:  # user code may have installed its own handler
            signal.signal(signal.SIGINT, self._handler)
        self.delivered = self._reminded = False
        self._put_off = 0
        self._hear_of_children()
        with self._lock:
            self._armed = cell
            early = self._target == cell
            if early:
                self._target = None
        if early:
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """End the cell: no interrupt is raised any more. Main thread."""
        self._armed = None
        self._held = False
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._on_child:
            self._of_children = handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def _on_child(self, number: int, frame: types.FrameType | None) -> None:
        if self._of_children is not None:
            try:
                self._of_children(number, frame)
            except RuntimeError as error:
                self._lost_child = f"Between two cells: {error}\n"

    def _hear_of_children(self) -> None:
        """Restore a cell's SIGCHLD handler, and print the errors that it raised between cells.

        torch's handler raises RuntimeError for a DataLoader worker that was killed. Outside a cell this would end the
        rank.
        """
        handler, self._of_children = self._of_children, None
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        errors, self._lost_child = self._lost_child, ""
        if errors:
            sys.stderr.write(errors)

    # Takes no lock: the handler runs in the main thread, which may hold `_lock` in `arm`.
    def _on_signal(self, _number: int, frame: types.FrameType | None) -> None:
        target, self._target = self._target, None
        if self._armed is None or target not in (None, self._armed):
            return
        if target is None and self._reminded:  # a reminder of an interrupt that was raised already
            self._reminded = False
            return
        self.delivered = self.delivered or target is not None
        if self._shields or self._forking:
            self._held = True
        elif self._is_taking(frame):
            self._again()
        else:
            raise KeyboardInterrupt

    def _is_taking(self, frame: types.FrameType | None) -> bool:
        """Return True if `frame` is taking or releasing a lock.

        Left half way, the lock would be held forever (bpo-29988). `threading` and `multiprocessing` do this in Python
        code. A thread that blocks there is interrupted all the same, after `_MOST_PUT_OFF` delays.
        """
        if frame is None or frame.f_code.co_name not in _TAKING or self._put_off >= _MOST_PUT_OFF:
            return False
        self._put_off += 1
        return True

    # An interrupt may end one of these hooks before its first line. So they set a flag: a counter could stay too high.

    def _before_fork(self) -> None:
        if threading.get_ident() == self._main:
            self._forking = True

    def _after_fork(self) -> None:
        if threading.get_ident() == self._main:
            self._forking = False
            if self._held and not self._shields:
                self._held = False
                self._again()

    def _in_child(self) -> None:
        if threading.get_ident() == self._main:
            self._forking = self._held = False

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt and threading.get_ident() == self._main and self._armed is not None:
            self._again()
        else:
            self._tell_unraisable(lost)

    def _again(self) -> None:
        """Interrupt the cell again in a few milliseconds.

        The signal also goes to the children that the cell has by then.
        """
        cell = self._armed
        if cell is not None:
            _thread.start_new_thread(self._repeat, (cell,))  # Thread.start waits, and could be interrupted there

    def _repeat(self, cell: int) -> None:
        threading.Event().wait(next(self._retries))
        with self._lock:
            running = self._armed == cell
            if running:
                self._target = cell
        if running:
            self._signal()


class ControlThread(threading.Thread):
    """Receive and handle the notebook's messages until Shutdown arrives or the notebook is gone.

    Tasks for the main thread go to `tasks`, in which None ends the main thread's loop.
    """

    def __init__(
        self,
        link: RankLink,
        capture: OutputCapture,
        interrupts: Interrupts,
        answers: MainThreadControl,
        liveness: int,
    ) -> None:
        super().__init__(name="rankbook-control", daemon=True)
        self.pydev_do_not_trace = True  # pydevd must not pause this thread: it always answers
        self.tasks: queue.SimpleQueue[Task | Callable[[], None] | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._link = link
        self._capture = capture
        self._interrupts = interrupts
        self._answers = answers
        self._liveness = liveness
        self._left = False
        self.patience = 0.0
        self._due: float | None = None
        self._told: set[str] = set()

    def next_task(self) -> Task | None:
        """Return the next task, or None when it is time to exit. Main thread.

        Calls the functions that it finds in the queue.
        """
        while callable(task := self.tasks.get()):
            task()
        if task is None:
            self.join()
        return task

    def run(self) -> None:
        """Serve messages. An error is reported and the thread continues; errors in quick succession end the process."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # SIGINT must wake the main thread
            self._serve()
        except BaseException as error:  # noqa: BLE001 - reported; without this thread the rank would seem to hang
            self._die(error)

    def _serve(self) -> None:
        failed = -FAILURES_APART
        while not self._left:
            try:
                self._turn()
            except Exception as error:
                if replaced := originals.restore_originals():
                    self._capture.tell(originals.describe_restored(replaced))
                    continue
                failed, before = time.monotonic(), failed
                if failed - before < FAILURES_APART:
                    raise
                self.tell("Rankbook's control thread went wrong here, and goes on:", error)

    # `_due` is the time at which to read the pipes, or None while they are empty. Only then are they polled: once they
    # have data, polling would return at once until `READ_AFTER` is over.
    def _turn(self) -> None:
        due = self._due
        pause = None if due is None else max(0.0, due - time.monotonic())
        watched = (self._liveness, *self._capture.files) if due is None else (self._liveness,)
        times = [seconds for seconds in (pause, self._interrupts.remind()) if seconds is not None]
        received, readable = self._link.wait(min(times, default=None), watched)
        if self._liveness in readable:
            os.killpg(0, signal.SIGKILL)
        if received:
            self._receive()
        if self._left:
            return
        if readable:
            self._due = time.monotonic() + READ_AFTER
        elif due is not None and due <= time.monotonic():
            self._due = None  # set before reading, which may fail: poll reports remaining data again
            more = self._capture.drain_at_pace()
            self._due = time.monotonic() + more if more else None

    def _receive(self) -> None:
        while (parcel := self._link.receive()) is not None:
            try:
                self._dispatch(*parcel)
            except Exception as error:  # noqa: BLE001 - shown to the user; the notebook repeats its query
                self.tell(f"Rankbook could not answer {type(parcel[0]).__name__}:", error)

    def tell(self, words: str, error: BaseException) -> None:
        """Show an error to the user, once per text.

        Does not write to the stderr pipe: it may be full, and this is the thread that empties it.
        """
        text = f"{words}\n{''.join(traceback.format_exception(error))}"
        if text not in self._told:
            self._told.add(text)
            self._capture.tell(text)

    def _die(self, error: BaseException) -> None:
        """Exit the process, leaving the reason in the stderr pipe, where the forkserver reads it."""
        try:
            message = f"Rankbook's control thread cannot go on:\n{''.join(traceback.format_exception(error))}"
            with contextlib.suppress(Exception):  # the error may come from here
                self._capture.drain()
            os.set_blocking(2, False)  # no thread empties the pipe any more
            os.write(2, message.encode(errors="replace"))
        finally:
            os._exit(1)

    def _dispatch(self, message: ToRank, frames: list[memoryview]) -> None:
        match message:
            case Shutdown():
                self._left, self.patience = True, message.patience
                self.tasks.put(None)
            case Interrupt():
                self._interrupts.request(message.cell)
            case InputReply():
                self.replies.put(message)
            case GetStack():
                self._link.send(self._answers.stack(message.token))
            case GetCollectives():
                self._link.send(self._answers.collectives(message.token))
            case Abort():
                self._answers.abort(message)
            case CommToRank():
                comms.receive_comm(message, frames)
            case DapToRank():
                self._answers.debug(message)
            case QueryRequest():
                self._answers.inquire(message)
            case _:
                self.tasks.put((message, frames))
