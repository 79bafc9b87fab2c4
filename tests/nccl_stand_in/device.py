"""The stand-in for a CUDA device: a queue of operations, and a thread that executes them in order, later."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

QUEUE_LENGTH = 1024
"""Number of operations that a device takes before it has executed them, as a CUDA stream does."""
_PAUSE = 0.0002
_LONGEST_PAUSE = 0.002
PATIENCE = 30.0
"""Seconds that a wait goes on after an exception has arrived."""


class DeviceError(RuntimeError):
    """A sticky error of the device, as `torch.AcceleratorError` is."""


class Operation:
    """Operation of the device. `began` is the time at which its execution began, or None."""

    __slots__ = ("began", "done", "name", "run")

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self.run: Callable[[], None] | None = run
        self.began: float | None = None
        self.done = False


class Event:
    """A place in the queue, as `torch.cuda.Event` records it."""

    def __init__(self, device: Device, operation: Operation | None, graph: Graph | None = None) -> None:
        self._device = device
        self._operation = operation
        self._graph = graph

    def query(self) -> bool:
        """Return True if everything before the event has been executed. Raises the device's sticky error.

        Hangs while `Device.queries_hang` is set, as a query of CUDA does while another thread has the context's lock.
        """
        self._device.check_capture(self._graph)
        wait_as_in_c(lambda: not self._device.queries_hang)
        self._device.raise_error()
        return self._operation is None or self._operation.done

    @property
    def is_done(self) -> bool:
        """Return True if everything before the event has been executed. For the stand-in itself: never hangs."""
        return self._operation is None or self._operation.done

    def synchronize(self) -> None:
        """Wait for everything before the event. Raises the device's sticky error."""
        self._device.check_capture(self._graph)
        operation = self._operation
        if operation is not None:
            wait_as_in_c(lambda: operation.done or self._device.error is not None)
        self._device.raise_error()


class Graph:
    """Operations that were recorded and not executed, as in a CUDA graph. `error`: why the recording is invalid."""

    def __init__(self, device: Device) -> None:
        self.operations: list[Operation] = []
        self.error = ""
        self._device = device

    def replay(self) -> Event:
        """Queue all operations, as one."""
        if self.error:
            raise DeviceError(self.error)
        return self._device.submit("graph", self._run)

    def _run(self) -> None:
        for operation in self.operations:
            assert operation.run is not None
            operation.run()


class Device:
    """A queue of operations, and the thread that executes them in order.

    `held`: nothing further begins. `delay`: seconds before every operation. `queries_hang`: see `Event.query`.
    `aborts_hang`: an abort of a group does not return. `refusal`: the error of NCCL with which launches and connections
    fail. Tests set these at any time, on any thread.
    """

    def __init__(self) -> None:
        self.held = False
        self.delay = 0.0
        self.queries_hang = False
        self.aborts_hang = False
        self.refusal = ""
        self.error: str | None = None
        self._graph: Graph | None = None
        self._capturing_thread = 0
        self._relaxed_threads: set[int] = set()
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._operations: deque[Operation] = deque()
        self._last: Operation | None = None
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    # What programs do with a device

    def submit(self, name: str, run: Callable[[], None]) -> Event:
        """Queue an operation, and return the event behind it. Raises the device's sticky error.

        Waits while `QUEUE_LENGTH` operations are queued.
        """
        self.raise_error()
        if self.is_capturing:
            assert self._graph is not None
            self._graph.operations.append(operation := Operation(name, run))
            return Event(self, operation, self._graph)
        if len(self._operations) >= QUEUE_LENGTH:
            wait_as_in_c(lambda: len(self._operations) < QUEUE_LENGTH or self.error is not None)
            self.raise_error()
        if self._owner != os.getpid():
            raise RuntimeError("Cannot re-initialize the stand-in device in forked subprocess")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stand-in-device", daemon=True)
            self._thread.start()
        self._last = operation = Operation(name, run)
        self._operations.append(operation)
        self._queue.put(operation)
        return Event(self, operation)

    def record(self) -> Event:
        """Return an event behind everything that is queued now."""
        return Event(self, None, self._graph) if self.is_capturing else Event(self, self._last)

    def synchronize(self) -> None:
        """Wait for everything that is queued. Raises the device's sticky error. No exception ends the wait."""
        self.record().synchronize()

    def raise_error(self) -> None:
        """Raise the device's sticky error, if it has one."""
        if self.error is not None:
            raise DeviceError(self.error)

    # Graphs

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what this thread submits during the block in a graph.

        As with the mode "global" of CUDA, a query or a wait of any thread makes the recording invalid, except queries
        of threads that have called `relax_thread`.
        """
        self._capturing_thread = threading.get_ident()
        self._graph = graph = Graph(self)
        try:
            yield graph
        finally:
            self._graph = None
        if graph.error:
            raise DeviceError("CUDA error: operation failed due to a previous error during capture")

    @property
    def is_capturing(self) -> bool:
        """Return True while what this thread submits is recorded."""
        return self._graph is not None and self._capturing_thread == threading.get_ident()

    def relax_thread(self) -> None:
        """Let this thread ask for events while another one records, as the mode "thread_local" of CUDA does."""
        self._relaxed_threads.add(threading.get_ident())

    def check_capture(self, graph: Graph | None = None) -> None:
        """Raise an error, and make a recording invalid, if this thread asks for an event that it may not ask for.

        `graph` is the recording to which the event belongs.
        """
        thread = threading.get_ident()
        if self._graph is not None and (self.is_capturing or thread not in self._relaxed_threads):
            graph = self._graph
        if graph is not None:
            graph.error = "CUDA error: operation not permitted when stream is capturing"
            raise DeviceError(graph.error)

    @property
    def is_idle(self) -> bool:
        """Return True if an operation that is submitted now would be executed at once."""
        if self.is_capturing:
            return False
        return not (self._operations or self.held or self.delay or self.error) or self._owner != os.getpid()

    @property
    def pending(self) -> list[str]:
        """Return the names of the operations that have not been executed, the one under way included."""
        return [operation.name for operation in self._operations.copy()]

    # What tests do with it

    def poison(self, error: str = "CUDA error: device-side assert triggered") -> None:
        """Fail as after a device-side assert: drop what is queued; everything from now on raises this error."""
        self.error = self.error or error

    def watch(self, timeout: float, end: Callable[[str], None] | None = None) -> None:
        """Start a watchdog, which ends the process once an operation has been under way for `timeout` seconds.

        `end` is called with the reason instead of `end_process`.
        """
        arguments = (timeout, end or end_process)
        threading.Thread(target=self._watch, args=arguments, name="stand-in-watchdog", daemon=True).start()

    def end(self) -> None:
        """End the device's thread, once the operation under way has ended."""
        self.poison("the device has ended")
        self._queue.put(None)

    # Threads

    def _work(self) -> None:
        # As on a stream there is no autograd here: the thread that has queued an operation has recorded it.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            while (operation := self._queue.get()) is not None:
                self._pause(lambda: not self.held)
                if self.delay:
                    start = time.monotonic()
                    self._pause(lambda start=start: time.monotonic() >= start + self.delay)
                if self.error is None and operation.run is not None:
                    operation.began = time.monotonic()
                    try:
                        operation.run()
                    except BaseException as error:  # noqa: BLE001 - whoever waits for the device gets it
                        self.poison(f"CUDA error: {operation.name} failed: {type(error).__name__}: {error}")
                operation.run = None  # frees its tensors
                operation.done = True
                self._operations.popleft()
                del operation

    def _pause(self, is_over: Callable[[], bool]) -> None:
        poll(lambda: is_over() or self.error is not None)

    def _watch(self, timeout: float, end: Callable[[str], None]) -> None:
        while self.error is None:
            for operation in list(self._operations)[:1]:
                if operation.began is not None and time.monotonic() - operation.began > timeout:
                    end(f"watchdog: {operation.name} ran longer than {timeout} s")
                    return
            time.sleep(timeout / 10)


def end_process(reason: str) -> None:
    """End the process with SIGABRT, as the watchdog of NCCL does."""
    os.write(2, f"{reason}\n".encode())
    os.kill(os.getpid(), signal.SIGABRT)


def poll(is_over: Callable[[], bool]) -> None:
    """Wait until `is_over()`."""
    pause = _PAUSE
    while not is_over():
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)


def wait_as_in_c(is_over: Callable[[], bool]) -> None:
    """Wait until `is_over()`, as C++ code does: exceptions that arrive meanwhile are raised afterwards.

    These are KeyboardInterrupt, what a signal's handler raises, and exceptions that another thread sets. The time limit
    of a test is one of them, so the wait ends `PATIENCE` seconds after the first one at the latest.
    """
    late: BaseException | None = None
    deadline = math.inf

    def is_enough() -> bool:
        return is_over() or time.monotonic() > deadline

    while True:
        try:
            poll(is_enough)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            late = error
            deadline = min(deadline, time.monotonic() + PATIENCE)
    if late is not None:
        raise late


_current: Device | None = None


def current_device() -> Device:
    """Return the device of this process. A forked child has a new one."""
    global _current
    if _current is None or _current._owner != os.getpid():
        _current = Device()
    return _current
