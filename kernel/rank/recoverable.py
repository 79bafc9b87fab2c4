"""A process group that outlives its connections.

Owns: `RecoverableGroup`, which stands where torch expects a ProcessGroup and hands every call to an inner one that can
be replaced, so that models, meshes and optimizers that hold the outer one go on after an abort. Refuses: to decide
when; `process_group.py` makes, aborts and renews them.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankbook.errors import CollectiveAborted
from rankbook.rank.collectives import OPS, Launched, Ledger, Op, Promised
from rankbook.rank.sockets import Opened, shut_down

_BROKEN_LINK = re.compile(r"onnection (?:closed|reset|refused)|roken pipe|ocket|ransport|borted|NCCL")
"""What gloo and nccl say when it is the way to a peer that broke, and not the call that was wrong."""
_CAUSE_WITHIN = 1.0
"""Seconds that the notebook has to tell why a peer is gone."""
_LOOK_EVERY = timedelta(seconds=0.25)
"""How long a wait stays in C++ before it looks whether there still is somebody to end it."""


class Inner:
    """One life of a group: torch's ProcessGroup and what it takes to end whoever waits on it."""

    def __init__(self, group: dist.ProcessGroup, sockets: Opened, aborts: list[Callable[[], None]]) -> None:
        self.group = group
        self.sunk = False
        self._sockets = sockets
        self._aborts = aborts

    @property
    def waits_in_steps(self) -> bool:
        """Whether a wait may be cut into steps: gloo's, of which nothing but time ends."""
        return not self._aborts

    def abort(self) -> None:
        """Make every call that waits on it raise. Any thread."""
        shut_down(self._sockets)
        for abort in self._aborts:
            abort()


_wrecks: list[Inner] = []
"""Those whose thread sleeps for good: their end would wait for it."""


class RecoverableGroup(dist.ProcessGroup):
    """See above. `ranks` are the members' numbers in the world; `where` tells the line of the cell that runs."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: tuple[int, ...],
        inner: Inner,
        ledger: Ledger,
        where: Callable[[], int | None],
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg, unused-ignore]
        self._store = store
        self.ledger = ledger
        self._inner: Inner = inner
        self._where = where
        self._cause: str | None = None
        self._told = threading.Event()

    # What befalls it

    def renew(self, inner: Inner) -> None:
        """Go on with fresh connections."""
        self._inner.abort()  # what still waits in there would hold up its end
        if self._inner.sunk:
            _wrecks.append(self._inner)
        self._inner = inner
        self._cause = None
        self._told = threading.Event()
        self.ledger.restart()

    def explain(self, cause: str) -> None:
        """If a wait breaks, or a call comes, this is why. Any thread."""
        self._cause = self._cause or cause
        self._told.set()

    def break_off(self, cause: str) -> None:
        """Make every call that waits raise, for this reason. Any thread."""
        self.explain(cause)
        self.ledger.broken = True
        self._inner.abort()

    def sink(self, cause: str) -> None:
        """Gloo's thread has given up: whoever waits in Python raises, and so do the peers. Any thread."""
        self._inner.sunk = True
        self.break_off(cause)

    def leave_behind(self) -> None:
        """Something will wait in the inner group for good, so it is kept when it is replaced."""
        self._inner.sunk = True

    @property
    def sunk(self) -> bool:
        """Whether nobody will end a wait in C++ any more."""
        return self._inner.sunk

    @property
    def cause(self) -> str | None:
        """Why it cannot be used until it is renewed, if it cannot."""
        return self._cause

    def error_for(self, error: BaseException, launched: Launched) -> BaseException:
        """What to raise where `launched` failed with `error`."""
        if not _BROKEN_LINK.search(str(error)):
            return error
        self.ledger.broken = True
        self._told.wait(_CAUSE_WITHIN)
        if self._cause is None:
            self._cause = "another rank broke off, for a reason that its own error tells,"
        return self._aborted(f" while this rank waited in {launched}")

    def _aborted(self, doing: str) -> CollectiveAborted:
        line = self._where()
        return CollectiveAborted(f"{self._cause}{doing}" + (f" at line {line}" if line is not None else ""))

    # What torch calls

    def _launch(self, name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a Work
        if self._cause is not None:
            raise self._aborted(f", so this rank cannot begin {op.word}")
        key, launched = self.ledger.launch(op, args)
        try:
            work = getattr(self._inner.group, name)(*args, **kwargs)
        except RuntimeError as error:
            other = self.error_for(error, launched)
            if other is error:
                self.ledger.withdraw(key)
                raise
            self.ledger.end(key)
            raise other from None  # gloo's words would only hide it
        except BaseException:
            self.ledger.withdraw(key)
            raise
        if work is None:
            self.ledger.end(key)
            return None
        return Wait(work, self, key, launched)

    @property
    def waits_in_steps(self) -> bool:
        """See `Inner`."""
        return self._inner.waits_in_steps

    def name(self) -> str:
        """The backend's name."""
        return str(self._inner.group.name())

    def get_group_store(self) -> dist.Store:
        """The store it was made with."""
        return self._store

    def shutdown(self) -> None:
        """End the inner group."""
        self._inner.group.shutdown()

    def abort(self) -> None:
        """As torch's: whoever waits gets an error."""
        self.break_off("the process group was aborted")

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401 - torch's
        return self._inner.group._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:  # noqa: ANN401
        self._inner.group._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:  # noqa: ANN401
        return self._inner.group._end_coalescing(device)

    def set_timeout(self, timeout: Any) -> None:  # noqa: ANN401
        """As torch's."""
        self._inner.group.set_timeout(timeout)

    def _set_default_timeout(self, timeout: Any) -> None:  # noqa: ANN401
        self._inner.group._set_default_timeout(timeout)  # type: ignore[attr-defined, unused-ignore]


def _method(name: str, op: Op) -> Callable[..., Any]:
    def call(self: RecoverableGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return self._launch(name, op, args, kwargs)

    call.__name__ = name
    return call


for _name, _op in OPS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecoverableGroup, _name, _method(_name, _op))


class Wait(dist._Work):  # type: ignore[misc, name-defined, unused-ignore]
    """A collective that was launched. Its `wait` raises `CollectiveAborted` where the inner group was aborted."""

    def __init__(self, work: Any, group: RecoverableGroup, key: int, launched: Launched) -> None:  # noqa: ANN401 - torch's
        super().__init__()
        self._work = work
        self._group = group
        self._key = key
        self._launched = launched
        launched.work = weakref.ref(self)

    def wait(self, *timeout: Any) -> bool:  # noqa: ANN401 - a timedelta, or nothing
        """As torch's. Raises `CollectiveAborted`."""
        try:
            if not timeout and self._group.waits_in_steps:
                if self._launched.alone:
                    self._wait_in_steps()
                elif self._launched.from_anybody:
                    return self._wait_apart()
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
            if self._group.sunk:
                raise RuntimeError("the transport has given up")
            try:
                self._work.wait(_LOOK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    return  # it has failed, which the wait after this one tells

    def _wait_apart(self) -> bool:
        """Wait on a thread of its own: gloo ends a receive from anybody for nothing but a message."""
        ended = threading.Event()
        result: list[bool | RuntimeError] = []

        def wait() -> None:
            try:
                result.append(bool(self._work.wait()))
            except RuntimeError as error:
                result.append(error)
            ended.set()

        threading.Thread(target=wait, name="rankbook-receive", daemon=True).start()
        try:
            while not ended.wait(_LOOK_EVERY.total_seconds()):
                if self._group.ledger.broken:
                    raise RuntimeError("the transport is gone")
        finally:
            if not ended.is_set():
                self._group.leave_behind()
        if isinstance(result[0], RuntimeError):
            raise result[0]
        return result[0]

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
        """As torch's. What it raises in C++ is torch's own error; `GroupMember.translate` knows it."""
        self._launched.work = Promised(self._work)  # it outlives this object
        return self._work.get_future()


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Wait, *args: Any) -> Any:  # noqa: ANN401 - as torch's
        return getattr(self._work, name)(*args)

    call.__name__ = name
    return call


for _name in ("is_completed", "is_success", "exception", "source_rank", "_source_rank", "result"):
    setattr(Wait, _name, _passed_on(_name))
for _name in ("block_current_stream", "get_future_result", "_get_op_type", "_get_duration"):
    if hasattr(dist._Work, _name):  # type: ignore[attr-defined, unused-ignore]
        setattr(Wait, _name, _passed_on(_name))
