"""Interruptible waits for collectives, which end when their process group is aborted.

`InterruptibleWork` replaces torch's Work. It never waits in C++ for longer than `_LOOK_EVERY` without a look at the
state of its group, for two reasons. Python delivers KeyboardInterrupt only between calls into C++. And gloo does not
end every wait of a broken connection: it forgets a send that its socket refuses (EPIPE, or a transfer under way), so
that the wait lasts until the group's timeout of half an hour (`Pair::signalException` in gloo's transport/tcp/pair.cc
signals operations that wait to begin, but not those under way). A wait that has not ended `ENDS_WITHIN` seconds after
the abort is left behind.

There are two ways to wait. Most collectives complete in gloo's threads, so the caller waits in steps with a timeout
(`_wait_in_steps`). Send, recv and reduce_scatter (`Op.alone` is False) must be waited for in a single call, so a helper
thread makes that call while the caller waits for the thread (`_wait_apart`).
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

import torch.distributed as dist

from rankbook.rank.process_groups.collective_log import CollectiveCall, CollectiveLog, FutureWork

_LOOK_EVERY = timedelta(seconds=0.25)
"""The longest time that a wait stays in C++ before it checks for interrupts and for an aborted group."""
ENDS_WITHIN = 0.5
"""Seconds that gloo has to end the waits of an aborted group before they are left behind."""


class _Here(threading.local):
    """Thread-local state of the thread that uses a process group."""

    only_looks = False
    """True on a thread that evaluates an expression beside the cell. It must not launch collectives: the other ranks
    would match them with the cell's."""


here = _Here()


class WaitObserver(Protocol):
    """Interface of the profiler that measures the collectives of a cell. Any thread.

    `word` is the name of the function in torch.distributed.
    """

    def begins(self, word: str) -> AbstractContextManager[None]:
        """Measure the launch of a collective."""

    def waits_for(self, word: str) -> AbstractContextManager[None]:
        """Measure the wait for a collective."""

    def promised(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """Note that C++ will wait for a collective through its future."""


@dataclass
class _Watching:
    by: WaitObserver | None = None


watching = _Watching()


class Group(Protocol):
    """Interface of the process group that a wait needs."""

    ledger: CollectiveLog

    @property
    def waits_in_steps(self) -> bool:
        """Return True if waits must be cut into steps."""

    @property
    def sunk(self) -> bool:
        """Return True if gloo's thread has failed, so that no wait in C++ will end."""

    @property
    def broken_for(self) -> float:
        """Return the seconds since the group was aborted; 0 while it works."""

    def leave_behind(self) -> None:
        """Keep the inner group alive forever: a thread is blocked in it."""

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """Return the exception to raise where `launched` failed with `error`."""


class InterruptibleWork(dist._Work):  # type: ignore[misc, name-defined, unused-ignore]
    """A launched collective. Its `wait` raises `CollectiveAborted` if the inner group is aborted."""

    def __init__(self, work: Any, group: Group, key: int, launched: CollectiveCall) -> None:  # noqa: ANN401 - torch's
        super().__init__()
        self._work = work
        self._group = group
        self._key = key
        self._launched = launched
        launched.work = weakref.ref(self)

    def wait(self, *timeout: Any) -> bool:  # noqa: ANN401 - a timedelta, or nothing
        """Wait as torch's Work does. Raises `CollectiveAborted`."""
        watcher = watching.by
        if watcher is None:
            return self._wait(*timeout)
        with watcher.waits_for(self._launched.op):
            return self._wait(*timeout)

    def _wait(self, *timeout: Any) -> bool:  # noqa: ANN401 - as `wait`
        try:
            if not timeout and self._group.waits_in_steps:
                if not self._launched.alone:
                    return self._wait_apart()
                self._wait_in_steps()
            return bool(self._work.wait(*timeout))
        except RuntimeError as error:
            other = self._group.error_for(error, self._launched)
            if other is error:
                raise
            raise other from None  # gloo's own message would hide the reason
        finally:
            self._group.ledger.end(self._key)

    def _wait_in_steps(self) -> None:
        """Wait in steps until the collective has completed, or `_check` raises.

        Only for operations that gloo completes without a waiting thread, see `Op`.
        """
        while not self._work.is_completed():
            self._check()
            try:
                self._work.wait(_LOOK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    return  # it has failed; the caller's wait raises the error

    def _wait_apart(self) -> bool:
        """Wait on a helper thread that can be left behind, so that this thread stays interruptible."""
        try:
            waiter = _idle.pop()
        except IndexError:
            waiter = _Waiter()
        waiter.begin(self._work)
        try:
            while not waiter.ended.wait(_LOOK_EVERY.total_seconds()):
                self._check()
            return waiter.result()
        finally:
            if waiter.ended.is_set():  # its result was taken, so that another thread may reuse the waiter at once
                _idle.append(waiter)
            else:
                waiter.dismiss()

    def _check(self) -> None:
        """Raise an error that `error_for` recognizes if this wait will never end."""
        if self._group.sunk:
            raise RuntimeError("the transport has given up")
        if self._launched.from_anybody:
            if self._group.broken_for > 0:  # only a message ends it: gloo ignores broken connections here
                raise RuntimeError("the transport is gone")
        elif self._group.broken_for > ENDS_WITHIN:
            self._group.leave_behind()
            raise RuntimeError("the transport is gone")

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
        if (watcher := watching.by) is not None:
            watcher.promised(future)
        return future


class _Waiter:
    """A reusable thread that waits for one work at a time."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._result: bool | BaseException = False
        self._works: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="rankbook-wait", daemon=True).start()

    def begin(self, work: Any) -> None:  # noqa: ANN401 - torch's
        """Wait for `work` on the thread, which sets `ended` afterwards."""
        self.ended.clear()
        self._works.put(work)

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

    def dismiss(self) -> None:
        """End the thread after its current wait, if that ever ends."""
        self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                self._result = bool(work.wait())
            except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
                self._result = error
            del work  # frees its tensors
            self.ended.set()


_idle: list[_Waiter] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked child does not inherit the threads


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: InterruptibleWork, *args: Any) -> Any:  # noqa: ANN401 - as torch's
        return getattr(self._work, name)(*args)

    call.__name__ = name
    return call


for _name in ("is_completed", "is_success", "exception", "source_rank", "_source_rank", "result"):
    setattr(InterruptibleWork, _name, _passed_on(_name))
for _name in ("block_current_stream", "get_future_result", "_get_op_type", "_get_duration"):
    if hasattr(dist._Work, _name):  # type: ignore[attr-defined, unused-ignore]
        setattr(InterruptibleWork, _name, _passed_on(_name))
