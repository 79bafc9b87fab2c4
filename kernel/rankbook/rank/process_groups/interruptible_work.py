"""Waiting for a collective, so that the wait ends when the group is broken off.

Owns: `InterruptibleWork`, which stands where torch expects a Work; the threads that wait in a rank's stead, and which
begin nothing. Refuses: to break anything off; `recoverable.py` does.

gloo ends a broken wait only most of the time: a send that its socket refuses (EPIPE, or a transfer under way) is
forgotten, and the wait for it goes on until the group's timeout, half an hour (`Pair::signalException` in gloo's
transport/tcp/pair.cc tells those that wait to begin, not those that are under way). So no wait here is longer than a
look at whether the group is broken, and one that does not end then is left behind.
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
"""How long a wait stays in C++ before it looks whether there still is somebody to end it."""
ENDS_WITHIN = 0.5
"""Seconds that gloo has to end what waits in a group that is broken off."""


class _Here(threading.local):
    """The thread that asks."""

    only_looks = False
    """Whether it is a peek's, which must not begin a collective: the other ranks would take it for the cell's."""


here = _Here()


class WaitObserver(Protocol):
    """Who measures a cell is told of its collectives. Any thread. `word` is torch.distributed's name of one."""

    def begins(self, word: str) -> AbstractContextManager[None]:
        """A thread begins one."""

    def waits_for(self, word: str) -> AbstractContextManager[None]:
        """A thread waits for one."""

    def promised(self, future: Any) -> None:  # noqa: ANN401 - torch's
        """C++ will wait for one, by its future."""


@dataclass
class _Watching:
    by: WaitObserver | None = None


watching = _Watching()


class Group(Protocol):
    """What a wait needs of the group that it waits in."""

    ledger: CollectiveLog

    @property
    def waits_in_steps(self) -> bool:
        """Whether a wait may be cut into steps."""

    @property
    def sunk(self) -> bool:
        """Whether nobody will end a wait in C++ any more."""

    @property
    def broken_for(self) -> float:
        """Seconds since it was broken off; 0 while it is whole."""

    def leave_behind(self) -> None:
        """Something will wait in it for good."""

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """What to raise where `launched` failed with `error`."""


class InterruptibleWork(dist._Work):  # type: ignore[misc, name-defined, unused-ignore]
    """A collective that was launched. Its `wait` raises `CollectiveAborted` where the inner group was aborted."""

    def __init__(self, work: Any, group: Group, key: int, launched: CollectiveCall) -> None:  # noqa: ANN401 - torch's
        super().__init__()
        self._work = work
        self._group = group
        self._key = key
        self._launched = launched
        launched.work = weakref.ref(self)

    def wait(self, *timeout: Any) -> bool:  # noqa: ANN401 - a timedelta, or nothing
        """As torch's. Raises `CollectiveAborted`."""
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
            raise other from None  # gloo's words would only hide it
        finally:
            self._group.ledger.end(self._key)

    def _wait_in_steps(self) -> None:
        """Wait until it has ended, or nobody is left to end it. Not for what does not end alone, see `Op`."""
        while not self._work.is_completed():
            self._check()
            try:
                self._work.wait(_LOOK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    return  # it has failed, which the wait after this one tells

    def _wait_apart(self) -> bool:
        """Wait on a thread that can be left behind: this one would be deaf in there."""
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
            if waiter.ended.is_set():  # and its result taken: another thread may have the waiter at once
                _idle.append(waiter)
            else:
                waiter.dismiss()

    def _check(self) -> None:
        """Raise, in words that `error_for` knows, if nothing will end this wait."""
        if self._group.sunk:
            raise RuntimeError("the transport has given up")
        if self._launched.from_anybody:
            if self._group.broken_for > 0:  # gloo ends it for nothing but a message
                raise RuntimeError("the transport is gone")
        elif self._group.broken_for > ENDS_WITHIN:
            self._group.leave_behind()
            raise RuntimeError("the transport is gone")

    def synchronize(self) -> None:
        """As torch's. Raises `CollectiveAborted`."""
        try:
            self._work.synchronize()
        except RuntimeError as error:
            other = self._group.error_for(error, self._launched)
            if other is error:
                raise
            raise other from None

    def get_future(self) -> Any:  # noqa: ANN401 - torch's
        """As torch's. What it raises in C++ is torch's own error; `GroupManager.translate` knows it."""
        future = self._work.get_future()
        self._launched.work = FutureWork(self._work, future)  # it outlives this object
        if (watcher := watching.by) is not None:
            watcher.promised(future)
        return future


class _Waiter:
    """A thread that waits for one work after the other."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._result: bool | BaseException = False
        self._works: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="rankbook-wait", daemon=True).start()

    def begin(self, work: Any) -> None:  # noqa: ANN401 - torch's
        """Wait for it; `ended` is set at its end."""
        self.ended.clear()
        self._works.put(work)

    def result(self) -> bool:
        """What the wait gave, once. Raises what it raised and keeps none of it: that leads to the frames of all."""
        result, self._result = self._result, False
        try:
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            del result

    def dismiss(self) -> None:
        """End after this wait, should it ever end."""
        self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                self._result = bool(work.wait())
            except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
                self._result = error
            del work  # and its tensors
            self.ended.set()


_idle: list[_Waiter] = []
os.register_at_fork(after_in_child=_idle.clear)  # their threads are not there


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
