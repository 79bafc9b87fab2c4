"""Collectives that a device executes later: what has been launched and is not finished, as far as the host knows.

NCCL queues a collective on a stream and returns. Neither the return of the call nor that of `Work.wait` says that it
has completed, and an aborted one completes without an error. So the log of a group keeps such a call until the device
has executed it. To ask a device takes a CUDA call, which may hang while another thread waits for the device. Only the
thread of `DeviceWatcher` does that. All other threads read the flags that it sets.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from rankbook.rank.process_groups.collective_log import CollectiveCall, CollectiveLog

_PAUSE = 0.05
"""Seconds between two rounds of queries while nobody waits. Every round takes the GIL from the main thread, which gives
it up at almost every operation of torch."""
_PAUSE_OF_TENSORS = 0.005
"""The same while an asynchronous call keeps its output alive, or a function of `DeviceWatcher.run_when_done` waits."""
_SHORT_PAUSE = 0.0005
"""The same while a thread waits in `DeviceWatcher.wait`."""
_LAST_ROUNDS = 20
"""Rounds without a call until the thread waits to be woken. To wake it takes longer than a launch."""

_DRIVER = "libcuda.so.1"
_CAPTURE_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the CUDA driver."""
_SUCCESS, _NOT_READY = 0, 600
"""CUDA_SUCCESS and CUDA_ERROR_NOT_READY of the CUDA driver."""

Query = Callable[[], bool]


class DeviceInterface(Protocol):
    """Interface of the device of a rank. `type` is the device type of its tensors."""

    type: str

    def bind_thread(self) -> None:
        """Make the rank's device the current one of this thread. Called before the first query of a thread."""

    def record(self) -> Query:
        """Return a query that is True once the device has executed what this thread has queued so far.

        The query raises the error of a device that has failed for good.
        """

    def is_capturing(self) -> bool:
        """Return True while what this thread queues is recorded in a graph and not executed."""


class Cuda:
    """The CUDA device of a rank."""

    type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bind_thread(self) -> None:
        """See `DeviceInterface`. Without this, the first CUDA call of a thread creates a context on device 0."""
        torch.cuda.set_device(self._device)
        _allow_queries_during_captures()

    def record(self) -> Query:
        """See `DeviceInterface`."""
        # An event is executed in the order of its stream, so that it is complete once everything before it is. It has
        # no timing, which would make it slower.
        event = torch.cuda.Event()
        event.record()
        query, handle = _driver_function("cuEventQuery"), event.cuda_event
        if query is None or not handle:
            return event.query

        def is_done() -> bool:
            # A query waits for the lock of the CUDA context, which another thread may have while it frees memory. torch
            # keeps the GIL meanwhile, and the rank would not even receive an abort; ctypes releases it.
            code = query(ctypes.c_void_p(handle))
            return False if code == _NOT_READY else code == _SUCCESS or event.query()  # which raises the error

        return is_done

    def is_capturing(self) -> bool:
        """See `DeviceInterface`."""
        return torch.cuda.is_current_stream_capturing()


def _allow_queries_during_captures() -> None:
    """Let this thread query events while another one captures a graph.

    `torch.cuda.graph` captures in the mode "global", in which a query of any thread fails and makes the capture
    invalid. torch's watchdog of NCCL changes the mode of its thread too, but torch has no Python function for that.
    """
    if (exchange := _driver_function("cuThreadExchangeStreamCaptureMode")) is not None:
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_THREAD_LOCAL)))


@functools.cache
def _driver_function(name: str) -> Callable[..., int] | None:
    """Return a function of the CUDA driver; None with another driver, such as that of ROCm."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(_DRIVER), name)
    except (OSError, AttributeError):
        return None
    return function


class DeviceCall:
    """A call that the device has not finished. `is_awaited`: the program relies on its result.

    `keeps_tensors`: its query is that of a work of torch, which refers to the output of the call.

    It takes the place of a work in the log, see `CollectiveCall.work`.
    """

    __slots__ = ("_query", "done", "is_awaited", "keeps_tensors", "key", "launched")

    on_device = True
    """Marks the call in reports, see `CollectiveLaunch`."""

    def __init__(
        self, key: int, launched: CollectiveCall, query: Query, *, is_awaited: bool, keeps_tensors: bool
    ) -> None:
        self.key = key
        self.launched = launched
        self.is_awaited = is_awaited
        self.keeps_tensors = keeps_tensors
        self.done = False
        self._query: Query | None = query

    def __call__(self) -> DeviceCall:
        """Return this object, as a weak reference to a work would."""
        return self

    def is_completed(self) -> bool:
        """Return True if the watcher has seen that the device has finished the call."""
        return self.done

    def query(self) -> bool:
        """Ask the device. The watcher's thread only."""
        query = self._query
        return query is None or query()

    def release_tensors(self, query: Query) -> None:
        """Ask with `query` from now on, which does not keep the output alive. The thread that has launched the call."""
        if not self.done:
            self._query = query
            self.keeps_tensors = False

    def finish(self) -> None:
        """Set the flag, and release the work with its tensors."""
        self.done = True
        self._query = None


class DeviceQueue:
    """The unfinished calls of one inner group, oldest first.

    The device executes the calls of a group in the order of their launches, so a finished one has no unfinished
    predecessor.

    `get_error` returns the name of an error that the backend itself has found, or an empty string. `on_error` is called
    with it, once, on the watcher's thread.
    """

    def __init__(self, watcher: DeviceWatcher) -> None:
        self.watcher = watcher
        self.log: CollectiveLog | None = None
        self.is_paused = False
        """True while the backend aborts its communicator, whose lock a query of a work would wait for with the GIL."""
        self.get_error: Callable[[], str] = lambda: ""
        self.on_error: Callable[[str], None] = lambda _error: None
        self._has_reported = False
        self._calls: deque[DeviceCall] = deque()
        self._is_watched = False

    def add(
        self, key: int, launched: CollectiveCall, query: Query, *, is_awaited: bool, keeps_tensors: bool
    ) -> DeviceCall:
        """Follow a call until `query` is True. The thread that has launched it."""
        launched.work = call = DeviceCall(key, launched, query, is_awaited=is_awaited, keeps_tensors=keeps_tensors)
        self._calls.append(call)
        if not self._is_watched:
            self.watcher.watch(self)
        return call

    def unfinished(self) -> list[DeviceCall]:
        """Return the calls that the device has not finished. Any thread."""
        return [call for call in self._calls.copy() if not call.done]

    @property
    def is_awaited(self) -> bool:
        """Return True if the program relies on the result of an unfinished call. Any thread."""
        return any(call.is_awaited for call in self.unfinished())

    @property
    def keeps_tensors(self) -> bool:
        """Return True if an unfinished call keeps its output alive. Any thread."""
        return any(call.keeps_tensors for call in self._calls.copy())

    def update(self) -> None:
        """Ask the device what it has finished. Raises its error. The watcher's thread only."""
        count = len(self._calls)
        if not count or self.is_paused:
            return
        # Mostly everything is finished, or nothing is. In between, the first unfinished call is searched for.
        # One query for the newest call is enough if the device keeps up, and one more if it does not. Every query is a
        # CUDA call.
        if self._calls[count - 1].query():
            finished = count
        elif not self._calls[0].query():
            return
        else:
            finished, unfinished = 1, count - 1
            while finished < unfinished:
                middle = (finished + unfinished) // 2
                if self._calls[middle].query():
                    finished = middle + 1
                else:
                    unfinished = middle
        for _ in range(finished):
            self._drop()

    def report_error(self) -> None:
        """Call `on_error` if the backend has found an error. The watcher's thread only."""
        if not self._has_reported and not self.is_paused and (error := self.get_error()):
            self._has_reported = True
            self.on_error(error)

    def forget(self) -> None:
        """Drop all calls: the device will not finish them. The watcher's thread only."""
        # As if they had finished: what waits for them ends, and then finds the error of the device.
        while self._calls:
            self._drop()

    def _drop(self) -> None:
        call = self._calls[0]
        call.finish()
        if self.log is not None:
            self.log.end(call.key)
        self._calls.popleft()  # last, so that the queue is empty only once nothing of it is in the log


class _Waiting:
    """Functions that wait until the device has executed what was queued before, with the query of every one.

    They may belong to several streams, so that every one is asked for.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Query, Callable[[], None]]] = deque()
        self._is_watched = False

    def add(self, query: Query, function: Callable[[], None]) -> None:
        """Wait with `function` until `query` is True. Any thread."""
        self._calls.append((query, function))

    @property
    def keeps_tensors(self) -> bool:
        """Return True if a function waits, which may be about to free tensors."""
        return bool(self._calls)

    def report_error(self) -> None:
        """Do nothing: there is no backend that finds errors."""

    def update(self) -> None:
        """Call the functions whose time has come. Raises the error of the device."""
        for _ in range(len(self._calls)):
            query, function = self._calls[0]
            is_done = query()
            self._calls.popleft()
            if is_done:
                _call(function)
            else:
                self._calls.append((query, function))

    def forget(self) -> None:
        """Call all functions: the device executes nothing any more, as they will see."""
        while self._calls:
            _call(self._calls.popleft()[1])


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:  # noqa: BLE001 - an error of the function is none of the device
        traceback.print_exc()


class DeviceWatcher:
    """The thread that asks the device which calls it has finished.

    `error` is the error of a device that has failed for good, upon which `on_lost` is called on the watcher's thread.
    """

    def __init__(self, accelerator: DeviceInterface, on_lost: Callable[[Exception], None]) -> None:
        self.accelerator = accelerator
        self.error: Exception | None = None
        self._on_lost = on_lost
        self._queues: list[DeviceQueue | _Waiting] = []
        self._functions = _Waiting()
        self._changed = threading.Condition()
        self._work = threading.Event()
        self._hurry = threading.Event()  # ends a pause
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def run_when_done(self, function: Callable[[], None]) -> None:
        """Call `function` on the watcher's thread once the device has executed what this thread has queued so far.

        It is also called if the device fails, so that nobody waits for it in vain. It must not take long: the watcher
        looks after collectives. Any thread that has called `bind_thread`. Raises the error of a failed device.
        """
        self._functions.add(self.accelerator.record(), function)
        self.watch(self._functions)
        self._hurry.set()

    def watch(self, queue: DeviceQueue | _Waiting) -> None:
        """Query `queue` until it is empty."""
        with self._changed:
            if not queue._is_watched:
                queue._is_watched = True
                self._queues.append(queue)
            # A rank without a device, or one that never uses it in a collective, has no such thread.
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankbook-device", daemon=True)
                self._thread.start()
        self._work.set()

    def wait(self, seconds: float) -> None:
        """Wait until the device has finished further calls, for at most `seconds`. Signals are handled meanwhile."""
        with self._changed:
            # The watcher asks more often while somebody waits, and less often beside a computing main thread.
            self._waiting += 1
            self._hurry.set()
            try:
                if any(queue._calls for queue in self._queues):
                    self._changed.wait(seconds)
            finally:
                self._waiting -= 1

    def probe(self) -> Exception | None:
        """Return the error of a device that has failed for good, or None. Does not wait for the device."""
        if self.error is None:
            try:
                # The error of a device that has failed is raised by every call. Neither recording nor asking waits for
                # the device.
                self.accelerator.record()()
            except Exception as error:  # noqa: BLE001 - the error is the answer
                self._lose(error)
        return self.error

    def _lose(self, error: Exception) -> None:
        # Only the first error: every later call of a failed device raises another one that explains less.
        if self.error is None:
            self.error = error
            self._on_lost(error)

    def _run(self) -> None:
        self.accelerator.bind_thread()
        while True:
            self._work.wait()
            self._work.clear()
            for _ in self._rounds():
                if self._waiting:
                    threading.Event().wait(_SHORT_PAUSE)  # nobody sets it: a sleep
                else:
                    keeps_tensors = any(queue.keeps_tensors for queue in self._queues.copy())
                    self._hurry.wait(_PAUSE_OF_TENSORS if keeps_tensors else _PAUSE)
                    self._hurry.clear()

    def _rounds(self) -> Iterator[None]:
        """Query all queues again and again; return once they have been empty for `_LAST_ROUNDS` rounds."""
        empty = 0
        while True:
            empty = 0 if any(queue._calls for queue in self._queues) else empty + 1
            for queue in self._queues.copy():
                try:
                    # Before the update: once NCCL's watchdog has aborted the communicator, the device finishes the
                    # calls without an error.
                    queue.report_error()
                    queue.update()
                except Exception as error:  # noqa: BLE001 - it stays: this device executes nothing any more
                    self._lose(error)
                    queue.forget()
            with self._changed:
                for queue in self._queues.copy() if empty > _LAST_ROUNDS else ():
                    if not queue._calls:
                        queue._is_watched = False
                        self._queues.remove(queue)
                        # The main thread may have added a call before the flag was cleared.
                        if queue._calls:
                            queue._is_watched = True
                            self._queues.append(queue)
                self._changed.notify_all()
                if not self._queues:
                    return
            yield
