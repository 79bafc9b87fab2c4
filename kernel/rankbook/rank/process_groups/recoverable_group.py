"""A process group that outlives its connections.

Owns: `RecoverableProcessGroup`, which stands where torch expects a ProcessGroup and hands every call to an inner one
that can be replaced, so that models, meshes and optimizers that hold the outer one go on after an abort. Refuses: to
decide when; `process_group.py` makes, aborts and renews them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rankbook.errors import BadRequest, CollectiveAborted
from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog, FutureWork, Op
from rankbook.rank.process_groups.gloo import Opened, shutdown_sockets
from rankbook.rank.process_groups.interruptible_work import ENDS_WITHIN, InterruptibleWork, here, watching

_BROKEN_LINK = re.compile(r"onnection (?:closed|reset|refused)|roken pipe|ocket|ransport|borted|NCCL")
"""What gloo and nccl say when it is the way to a peer that broke, and not the call that was wrong."""
_EMPTY = re.compile(r"size \(?0\b")
"""What torch says of an empty tensor that is given to it for a bucket of gradients."""
_CAUSE_WITHIN = 1.0
"""Seconds that the notebook has to tell why a peer is gone."""


class BackendGroup:
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
        shutdown_sockets(self._sockets)
        for abort in self._aborts:
            abort()

    def leave_behind(self) -> None:
        """Keep it for good: one of its threads will never end, and its own end would wait for that."""
        if self not in _wrecks:
            _wrecks.append(self)

    def end(self) -> None:
        """Abort it and let it go.

        torch waits there for the group's threads, and one of them may wait for what gloo has forgotten, so this is
        done on a thread of its own.
        """
        self.abort()
        if self in _wrecks:
            return
        last = [self.group]
        del self.group
        thread = threading.Thread(target=last.clear, name="rankbook-end", daemon=True)
        thread.start()
        thread.join(ENDS_WITHIN / 2)  # so that it mostly is gone before anything is made anew


_wrecks: list[BackendGroup] = []


class RecoverableProcessGroup(dist.ProcessGroup):
    """See above. `ranks` are the members' numbers in the world; `where` tells the line of the cell that runs."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: tuple[int, ...],
        inner: BackendGroup,
        ledger: CollectiveLog,
        where: Callable[[], int | None],
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg, unused-ignore]
        self.background = False
        """Whether only a thread beside the cells uses it, as a save does: an error of a cell does not break it off, and
        a regroup leaves its connections alone. Whoever makes such a group sets it."""
        self._store = store
        self.ledger = ledger
        self._inner: BackendGroup = inner
        self._where = where
        self._cause: str | None = None
        self._broken_at: float | None = None
        self._forsaken = False
        self._told = threading.Event()

    # What befalls it

    def renew(self, inner: BackendGroup) -> None:
        """Go on with fresh connections."""
        self._inner.end()
        self._inner = inner
        self._cause = None
        self._broken_at = None
        self._forsaken = False
        self._told = threading.Event()
        self.ledger.restart()

    def explain(self, cause: str) -> None:
        """If a wait breaks, or a call comes, this is why. Any thread."""
        self._cause = self._cause or cause
        self._told.set()

    def break_off(self, cause: str) -> None:
        """Make every call that waits raise, for this reason. Any thread."""
        self.explain(cause)
        self._note_broken()
        self._inner.abort()
        promised = [each.work for each in self.ledger.pending() if isinstance(each.work, FutureWork)]
        if promised and self.waits_in_steps:
            timer = threading.Timer(ENDS_WITHIN, self._forsake, (self._inner, promised))
            timer.daemon = True
            timer.start()

    def _forsake(self, inner: BackendGroup, promised: list[FutureWork]) -> None:
        """End what C++ still waits for, with a value for which it raises."""
        for each in promised:
            if each.forsake([torch.empty(0)]):
                self._forsaken = True
                inner.leave_behind()

    def _note_broken(self) -> None:
        self._broken_at = self._broken_at or time.monotonic()
        self.ledger.broken = True

    def sink(self, cause: str) -> None:
        """Gloo's thread has given up: whoever waits in Python raises, and so do the peers. Any thread."""
        self._inner.sunk = True
        self._inner.leave_behind()
        self.break_off(cause)

    def leave_behind(self) -> None:
        """Something will wait in the inner group for good."""
        self._inner.leave_behind()

    @property
    def sunk(self) -> bool:
        """Whether nobody will end a wait in C++ any more."""
        return self._inner.sunk

    @property
    def broken_for(self) -> float:
        """Seconds since it was broken off; 0 while it is whole."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    @property
    def cause(self) -> str | None:
        """Why it cannot be used until it is renewed, if it cannot."""
        return self._cause

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """What to raise where `launched` failed with `error`."""
        if not _BROKEN_LINK.search(str(error)) and not (self._forsaken and _EMPTY.search(str(error))):
            return error
        self._note_broken()
        self._told.wait(_CAUSE_WITHIN)
        if self._cause is None:
            self._cause = "another rank broke off, for a reason that its own error tells,"
        return self._aborted(f" while this rank waited in {launched}")

    def _aborted(self, doing: str) -> CollectiveAborted:
        line = self._where()
        return CollectiveAborted(f"{self._cause}{doing}" + (f" at line {line}" if line is not None else ""))

    # What torch calls

    def _launch(self, name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a Work
        if here.only_looks:
            raise BadRequest(f"a peek cannot begin {op.word}, for the ranks would no longer be at the same collective")
        if self._cause is not None:
            raise self._aborted(f", so this rank cannot begin {op.word}")
        key, launched = self.ledger.launch(op, args)
        watcher = watching.by
        try:
            if watcher is None:
                work = getattr(self._inner.group, name)(*args, **kwargs)
            else:
                with watcher.begins(op.word):
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
        return InterruptibleWork(work, self, key, launched)

    @property
    def waits_in_steps(self) -> bool:
        """See `BackendGroup`."""
        return self._inner.waits_in_steps

    def name(self) -> str:
        """The backend's name."""
        return str(self._inner.group.name())

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ calls
        """Return a name that torch has no C++ class for: of "gloo", DDP's logger casts the registered backend to it."""
        return "rankbook"

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
    def call(self: RecoverableProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return self._launch(name, op, args, kwargs)

    call.__name__ = name
    return call


for _name, _op in OPS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecoverableProcessGroup, _name, _method(_name, _op))
