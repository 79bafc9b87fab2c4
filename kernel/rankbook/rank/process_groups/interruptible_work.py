"""Interruptible waits for collectives, which end when their process group is aborted.

`InterruptibleWork` replaces torch's Work. It never waits in C++ for longer than `_CHECK_INTERVAL` without a look at the
state of its group, for two reasons. Python delivers KeyboardInterrupt only between calls into C++. And gloo does not
end every wait of a broken connection: it forgets a send that its socket refuses (EPIPE, or a transfer under way), so
that the wait lasts until the group's timeout of half an hour (`Pair::signalException` in gloo's transport/tcp/pair.cc
signals operations that wait to begin, but not those under way). A wait that has not ended `ABORT_TIMEOUT` seconds after
the abort is left behind.

There are two ways to wait. Most collectives complete in gloo's threads, so the caller waits in steps with a timeout
(`_wait_in_steps`). Send, recv and reduce_scatter (`Op.completes_alone` is False) must be waited for in a single call,
so a helper thread makes that call while the caller waits for the thread (`wait_on_thread`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rankbook.rank.process_groups.collective_log import CollectiveCall, CollectiveLog, FutureWork
from rankbook.rank.process_groups.device_calls import DeviceCall, Query

_CHECK_INTERVAL = timedelta(seconds=0.25)
"""The longest time that a wait stays in C++ before it checks for interrupts and for an aborted group."""
ABORT_TIMEOUT = 0.5
"""Seconds that gloo has to end the waits of an aborted group before they are left behind."""


class _ThreadState(threading.local):
    """Thread-local state of the thread that uses a process group."""

    collectives_forbidden = False
    """True on a thread that evaluates an expression beside the cell. It must not launch collectives: the other ranks
    would match them with the cell's."""


thread_state = _ThreadState()


class WaitObserver(Protocol):
    """Interface of the profiler that measures the collectives of a cell. Any thread.

    `call` is the collective, and `group` the name of its process group.
    """

    def launching(self, call: CollectiveCall, group: str) -> AbstractContextManager[None]:
        """Measure the launch of a collective."""

    def waiting(self, call: CollectiveCall, group: str) -> AbstractContextManager[None]:
        """Measure the wait for a collective."""

    def waiting_for_future(self, call: CollectiveCall, group: str, future: Any) -> None:  # noqa: ANN401 - torch's
        """Note that C++ will wait for a collective through its future."""


@dataclass
class _ActiveObserver:
    value: WaitObserver | None = None


active_observer = _ActiveObserver()


class Group(Protocol):
    """Interface of the process group that a wait needs."""

    log: CollectiveLog

    @property
    def transport_failed(self) -> bool:
        """Return True if gloo's thread has failed, so that no wait in C++ will end."""

    def record_device(self) -> Query | None:
        """Return a query of what the current stream has been given so far; None while it is recorded in a graph."""

    @property
    def seconds_since_abort(self) -> float:
        """Return the seconds since the group was aborted; 0 while it works."""

    @property
    def cause(self) -> str | None:
        """Return the reason why the group cannot be used until it is renewed, or None."""

    @property
    def timeout(self) -> timedelta:
        """Return the timeout of the group's collectives."""

    def leak(self) -> None:
        """Keep the inner group alive forever: a thread is blocked in it."""

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """Return the exception to raise where `launched` failed with `error`."""

    def abort_error(self, launched: CollectiveCall) -> BaseException:
        """Return the exception to raise where `launched` waits in a group that has a `cause`."""


class InterruptibleWork(dist._Work):  # type: ignore[misc, name-defined, unused-ignore]
    """A launched collective. Its `wait` raises `CollectiveAborted` if the inner group is aborted."""

    def __init__(self, work: Any, group: Group, key: int, launched: CollectiveCall) -> None:  # noqa: ANN401 - torch's
        super().__init__()
        self._work = work
        self._group = group
        self._key = key
        self._launched = launched
        # A weak reference, so that the log does not keep the tensors of a work alive.
        launched.work = weakref.ref(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's Work does; a timeout of 0 is none. Raises `CollectiveAborted`."""
        arguments = (timeout,) if timeout else ()
        observer = active_observer.value
        if observer is None:
            return self._wait(*arguments)
        with observer.waiting(self._launched, self._group.log.name):
            return self._wait(*arguments)

    def _wait(self, *timeout: timedelta) -> bool:
        self._launched.is_waited_for = True
        try:
            # With a timeout of its own, the caller's wait ends by itself.
            if not timeout:
                if not self._launched.completes_alone:
                    return self.wait_on_thread(self._group.timeout)
                self._wait_in_steps()
            # After `_wait_in_steps` the work is complete, and this raises its error, if it has one.
            return bool(self._work.wait(*timeout))
        except RuntimeError as error:
            other = self._group.error_for(error, self._launched)
            if other is error:
                raise
            raise other from None  # gloo's own message would hide the reason
        except KeyboardInterrupt:
            # After a death the notebook interrupts the ranks of which it does not know yet that they wait.
            if self._group.cause is None:
                raise
            raise self._group.abort_error(self._launched) from None
        finally:
            self._launched.is_waited_for = False
            # What was waited for in vain is not pending any more, unless only the caller's timeout has ended the wait.
            if not timeout or self._work.is_completed():
                self._group.log.end(self._key)

    def _wait_in_steps(self) -> None:
        """Wait in steps until the collective has completed, or `_check` raises.

        Only for operations that gloo completes without a waiting thread, see `Op`.
        """
        while not self._work.is_completed():
            # Before every step, so that a group that is already broken is not waited for.
            self._check()
            try:
                self._work.wait(_CHECK_INTERVAL)
            except RuntimeError:
                if self._work.is_completed():
                    return  # it has failed; the caller's wait raises the error

    def wait_on_thread(self, timeout: timedelta) -> bool:
        """Wait on a helper thread that can be left behind, so that this thread stays interruptible.

        Raises torch's own errors, such as that of the timeout.
        """
        try:
            # `pop` and `append` of a list are atomic, so the threads of user code need no lock here.
            waiter = _idle.pop()
        except IndexError:
            waiter = _Waiter()
        waiter.begin(self._work, timeout)
        try:
            # An Event is waited for in Python, where an interrupt is raised at once.
            while not waiter.ended.wait(_CHECK_INTERVAL.total_seconds()):
                self._check()
            return waiter.result()
        finally:
            if waiter.ended.is_set():  # its result was taken, so that another thread may reuse the waiter at once
                _idle.append(waiter)
            else:
                # The thread may be in C++ forever, so it is not used again.
                waiter.stop()

    def _check(self) -> None:
        """Raise an error that `error_for` recognizes if this wait will never end."""
        if self._group.transport_failed:
            raise RuntimeError("the transport has failed")
        if self._launched.is_any_source:
            if self._group.seconds_since_abort > 0:  # only a message ends it: gloo ignores broken connections here
                raise RuntimeError("the transport is closed")
        elif self._group.seconds_since_abort > ABORT_TIMEOUT:
            # The inner group's destructor would wait for the operation that is left behind.
            self._group.leak()
            raise RuntimeError("the transport is closed")

    def synchronize(self) -> None:
        """Synchronize as torch's Work does. Raises `CollectiveAborted`."""
        try:
            self._work.synchronize()
        except RuntimeError as error:
            other = self._group.error_for(error, self._launched)
            if other is error:
                raise
            raise other from None

    def get_future(self) -> Any:  # noqa: ANN401 - torch's
        """Return the future of the collective.

        C++ code that waits for it raises torch's own error, which `GroupManager.translate` recognizes.
        """
        future = self._work.get_future()
        self._launched.work = FutureWork(self._work, future)  # it outlives this object
        if (observer := active_observer.value) is not None:
            observer.waiting_for_future(self._launched, self._group.log.name, future)
        return future


class DeviceWork(InterruptibleWork):
    """A launched collective that a device executes, as those of NCCL: `wait` orders, and does not wait on the host.

    The log keeps the call until the device has finished it (`device_calls.py`), whatever is called here.
    """

    def __init__(self, work: Any, group: Group, launched: CollectiveCall) -> None:  # noqa: ANN401 - torch's
        dist._Work.__init__(self)
        self._work = work
        self._group = group
        self._launched = launched

    def _rely(self) -> None:
        """Note that the program relies on the result from now on."""
        if isinstance(call := self._launched.work, DeviceCall):
            call.is_awaited = True

    def _wait(self, *timeout: timedelta) -> bool:
        self._rely()
        try:
            result = bool(self._work.wait(*timeout))
        except RuntimeError as error:
            other = self._group.error_for(error, self._launched)
            if other is error:
                raise
            raise other from None
        # NCCL's wait returns normally after an abort.
        if self._group.seconds_since_abort > 0:
            raise self._group.abort_error(self._launched)
        # The stream waits for the collective now. So an event on it comes later, and the work of torch is not needed,
        # which would keep the output alive for as long as the device is behind.
        call = self._launched.work
        if isinstance(call, DeviceCall) and not call.done and (query := self._group.record_device()) is not None:
            call.release_tensors(query)
        return result

    def synchronize(self) -> None:
        """Synchronize as torch's Work does. Raises `CollectiveAborted`."""
        self._rely()
        super().synchronize()
        if self._group.seconds_since_abort > 0:
            raise self._group.abort_error(self._launched)

    def get_future(self) -> Any:  # noqa: ANN401 - torch's
        """Return the future of the collective. NCCL's is ordered as `wait` is, and holds up nobody."""
        self._rely()
        future = self._work.get_future()
        if (observer := active_observer.value) is not None:
            observer.waiting_for_future(self._launched, self._group.log.name, future)
        return future


class _Waiter:
    """A reusable thread that waits for one work at a time."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._result: bool | BaseException = False
        self._works: SimpleQueue[tuple[Any, timedelta, tuple[bool, bool], Any] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="rankbook-wait", daemon=True).start()

    def begin(self, work: Any, timeout: timedelta) -> None:  # noqa: ANN401 - torch's
        """Wait for `work` on the thread, for at most `timeout`; it sets `ended` afterwards."""
        self.ended.clear()
        # gloo writes the result of a reduce_scatter in the thread that waits.
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        # gloo orders the result of a CUDA tensor on the current stream of the thread that waits.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._works.put((work, timeout, modes, stream))

    def result(self) -> bool:
        """Return the result of the wait, or raise its exception, once.

        The waiter keeps neither: a traceback would keep all of its frames alive.
        """
        result, self._result = self._result, False
        try:
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            del result

    def stop(self) -> None:
        """End the thread after its current wait, if that ever ends."""
        self._works.put(None)

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            work, timeout, (is_inference, has_grad), stream = item
            try:
                if stream is not None:
                    torch.cuda.set_stream(stream)  # and with it the device; every wait sets its own
                # Without an argument, a send or recv waits as long as gloo may take to connect (`make_gloo`).
                with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                    self._result = bool(work.wait(timeout))
            except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
                self._result = error
            del item, work  # frees its tensors
            self.ended.set()


_idle: list[_Waiter] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked child does not inherit the threads


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: InterruptibleWork, *args: Any) -> Any:  # noqa: ANN401 - as torch's
        return getattr(self._work, name)(*args)

    call.__name__ = name
    return call


# Forwarded unchanged. Those of the second list exist in some versions of torch only.
for _name in ("is_completed", "is_success", "exception", "source_rank", "_source_rank", "result"):
    setattr(InterruptibleWork, _name, _forwarded(_name))
for _name in ("block_current_stream", "get_future_result", "_get_op_type", "_get_duration"):
    if hasattr(dist._Work, _name):  # type: ignore[attr-defined, unused-ignore]
        setattr(InterruptibleWork, _name, _forwarded(_name))
