"""The control thread of a rank, and the interrupts that it raises in the main thread.

The control thread alone receives from the notebook. It handles interrupts, aborts and questions at once, whatever the
main thread does, and hands tasks to the main thread through a queue, in the order in which they arrive. It also reads
the pipes of stdout and stderr, and ends the process once the notebook is gone. It never runs user code.

An interrupt names the cell that it is for, so that a late one never hits the next cell.
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
"""Seconds from something in the pipes to reading it, which costs the main thread a turn of the interpreter lock.

What a rank writes just before it dies is still in the pipes then, where the forkserver finds it; once it is read it may
be lost on its way out.
"""

_SOON = 0.005
"""Seconds until an interrupt that the main thread has not noticed is signalled again; doubled each time."""

_RETRY_AFTER = (0.001, 0.0017, 0.0029, 0.0049, 0.0083)
"""Seconds until an interrupt that came at an impossible moment comes again, in turn.

A constant pause may fall into step with a loop that forks, and hit the hooks of its fork every time.
"""

FAILURES_APART = 1.0
"""Seconds between two failures of one thread, below which there is no hope that a third will not come."""

_TAKING = frozenset({"__enter__", "__exit__", "_acquire_restore", "_release_save"})
"""Functions in which a lock is taken or given back."""

_MOST_PUT_OFF = 40
"""Times that an interrupt is put off for these, milliseconds each: no lock is taken for so long without waiting."""

Task = tuple[ToRank, list[memoryview]]


class MainThreadControl(Protocol):
    """What the thread can say and do about the main thread's work, from outside."""

    def stack(self, token: int) -> Stack:
        """Where it is."""

    def collectives(self, token: int) -> Collectives:
        """What its process groups wait for."""

    def inquire(self, question: Question) -> None:
        """Have it answered, soon, on another thread."""

    def debug(self, message: DapToRank) -> None:
        """Have the debugger hear it, soon, on another thread."""

    def abort(self, message: Abort) -> None:
        """Break off what waits for ranks that do not come."""


class Interrupts:
    """Raises KeyboardInterrupt in the main thread, in the cell it is meant for and in no other."""

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
        """Let no interrupt be lost where Python cannot raise one: in a fork's hooks, in a destructor.

        Each start of a DataLoader worker is such a moment, and a hook that is left half way keeps its lock.
        """
        sys.unraisablehook = self._on_unraisable
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Hold an interrupt back for a moment: half a message must not stay on the wire. Any thread."""
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
        """Interrupt `cell`, now or as soon as it begins. The control thread."""
        with self._lock:
            self._target = cell
            running = self._armed == cell
        if running:
            self._signal()

    def remind(self) -> float | None:
        """Signal again if nobody has heard, and the seconds until it is time to look again. The control thread.

        A signal between the interpreter's last look and the system call that then waits is noticed by neither.
        """
        with self._lock:
            unheard = self._target is not None and self._target == self._armed
        if not unheard:
            return None
        left = self._reminder - time.monotonic()
        if left > 0:
            return left
        self._reminded = True
        signal.pthread_kill(self._main, signal.SIGINT)
        self._patience = min(2 * self._patience, 1.0)  # it may be in C code for long, which should not suffer
        self._reminder = time.monotonic() + self._patience
        return self._patience

    def _signal(self) -> None:
        self._patience = _SOON
        self._reminder = time.monotonic() + self._patience
        signal.pthread_kill(self._main, signal.SIGINT)  # that very thread: another's signal would not end its sleep
        os_utils.interrupt_group()  # what the cell has started hears it too, as below a terminal

    def arm(self, cell: int) -> None:
        """`cell` runs from here on. Raises KeyboardInterrupt if it was interrupted before. The main thread."""
        if signal.getsignal(signal.SIGINT) is not self._handler:  # user code may have put its own there
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
        """No cell runs. The main thread."""
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
        """Give the children back to whom a cell has had watch them, and tell of those that ended between two cells.

        torch's handler raises for a DataLoader's worker that was killed: without a cell it would end the rank.
        """
        handler, self._of_children = self._of_children, None
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        said, self._lost_child = self._lost_child, ""
        if said:
            sys.stderr.write(said)

    def _on_signal(self, _number: int, frame: types.FrameType | None) -> None:
        target, self._target = self._target, None
        if self._armed is None or target not in (None, self._armed):
            return
        if target is None and self._reminded:  # it had been heard already
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
        """Whether a lock is being taken or given back: left half way it would be held for ever (bpo-29988).

        `threading` and `multiprocessing` do that in Python. Who waits for a lock there is interrupted all the same.
        """
        if frame is None or frame.f_code.co_name not in _TAKING or self._put_off >= _MOST_PUT_OFF:
            return False
        self._put_off += 1
        return True

    # An interrupt may end one of these hooks before its first line, so they set a flag: a counter would be left wrong.

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
        """Interrupt the cell once more, in a moment, and with it the children that it has by then."""
        cell = self._armed
        if cell is not None:
            _thread.start_new_thread(self._repeat, (cell,))  # Thread.start would wait, and could be interrupted there

    def _repeat(self, cell: int) -> None:
        threading.Event().wait(next(self._retries))
        with self._lock:
            running = self._armed == cell
            if running:
                self._target = cell
        if running:
            self._signal()


class ControlThread(threading.Thread):
    """Runs until the notebook says Leave or is gone. Tasks for the main thread go to `tasks`; None ends its loop."""

    def __init__(
        self,
        link: RankLink,
        capture: OutputCapture,
        interrupts: Interrupts,
        answers: MainThreadControl,
        liveness: int,
    ) -> None:
        super().__init__(name="rankbook-control", daemon=True)
        self.pydev_do_not_trace = True  # whatever a debugger pauses, this one always answers
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
        """Return the next task; None when it is time to leave. Functions in the queue are called. The main thread."""
        while callable(task := self.tasks.get()):
            task()
        if task is None:
            self.join()
        return task

    def run(self) -> None:
        """The thread. What goes wrong on it is told, and it goes on; what goes wrong over and over ends the process."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
            self._serve()
        except BaseException as error:  # noqa: BLE001 - told; a rank without this thread would count as hung, for ever
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

    def _turn(self) -> None:
        due = self._due
        pause = None if due is None else max(0.0, due - time.monotonic())
        watched = (self._liveness, *self._capture.files) if due is None else (self._liveness,)
        times = [each for each in (pause, self._interrupts.remind()) if each is not None]
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
            self._due = None  # also if this fails: what is still in there comes up again
            more = self._capture.drain_at_pace()
            self._due = time.monotonic() + more if more else None

    def _receive(self) -> None:
        while (parcel := self._link.receive()) is not None:
            try:
                self._dispatch(*parcel)
            except Exception as error:  # noqa: BLE001 - told to the person; the notebook asks once more
                self.tell(f"Rankbook could not answer {type(parcel[0]).__name__}:", error)

    def tell(self, words: str, error: BaseException) -> None:
        """To the person, once: not by way of the pipe, which may be full, and this is the thread that empties it."""
        text = f"{words}\n{''.join(traceback.format_exception(error))}"
        if text not in self._told:
            self._told.add(text)
            self._capture.tell(text)

    def _die(self, error: BaseException) -> None:
        """End the process, for a reason that the forkserver finds in the pipe."""
        try:
            words = f"Rankbook's control thread cannot go on:\n{''.join(traceback.format_exception(error))}"
            with contextlib.suppress(Exception):  # it may be just this that goes wrong
                self._capture.drain()
            os.set_blocking(2, False)  # nobody else empties the pipe
            os.write(2, words.encode(errors="replace"))
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
