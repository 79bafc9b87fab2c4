"""Process groups that survive an aborted collective: theory of operation.

torch has no way to replace the connections of a process group. After an interrupt, an error or the death of a peer in
the middle of a collective, the group is unusable, and so is every model, DeviceMesh, DTensor and optimizer that holds a
reference to it. This module therefore splits a group in two:

- `RecoverableProcessGroup`, the outer group, is the object that torch and the user hold. It lives as long as they need
  it, owns no connection, and forwards every call.
- `BackendGroup`, the inner group, is an ordinary torch ProcessGroup with gloo and NCCL backends. It lives for one
  *generation*: it is aborted when a collective cannot complete, and another one takes its place.

The notebook process decides when to abort and when to re-form. A single rank cannot tell a slow peer from one that will
never come, and all ranks have to move to the same generation. `manager.py` carries the decision out on the rank.

Threads of a rank
    main thread       Runs cells. Launches collectives (`_launch`), waits for them (`InterruptibleWork.wait`), and
                      performs the `Regroup` task between two cells (`GroupManager.join`).
    control thread    Receives the notebook's messages whatever the main thread does. Calls `GroupManager.abort` and
                      `report`. It never waits for a peer.
    rankbook-wait     Waits in C++ for operations that must be waited for in one call (send, recv, reduce_scatter), so
                      that the main thread stays interruptible and can leave a wait behind.
    rankbook-join     Connects the backends of a new generation, while the main thread stays interruptible.
    rankbook-connect  Makes the first attempt to connect gloo; may be left behind. rankbook-admit filters connections
                      in the second attempt (see `gloo.py`).
    rankbook-end      Destroys an old inner group: its destructor joins gloo's threads, which may never end.
    gloo*, pt_gloo*   C++ threads of gloo and torch. When one calls std::terminate(), the handler in `gloo.py` calls
                      `GroupManager.rescue` on it.
    save thread       Uses groups of its own that are marked `background`: neither an interrupt nor an error of a cell
                      aborts them, and a regroup leaves them alone. Only the death of a member does.

Messages (`protocol/messages.py`)
    GetCollectives, Collectives  The notebook asks every rank for its collective logs and compares them.
    Abort(shut=False)            Gives the reason why a collective may fail soon: `explain`.
    Abort(shut=True)             Ends the collectives of the named groups: `break_off`.
    Interrupt                    Raises KeyboardInterrupt in the main thread.
    Done                         Reports the end of a cell, and how many collectives it launched.
    Regroup(generation)          A task for the main thread: join this generation.

From the event to the abort
    Interrupt. The main thread raises KeyboardInterrupt within 0.25 s if it waits for gloo, because no such wait stays
        in C++ for longer. A rank that is still in its cell after `GracePeriods.interrupt_abort` gets Abort(shut=True).
    Error. The rank that raised sends Done. The notebook's `CollectiveMonitor` compares the logs. When a rank has waited
        for `GracePeriods.raised` in a collective that the failed rank will not launch, the waiting ranks get
        Abort(shut=True) for that group, and the others get the reason.
    Death. The notebook at once sends Abort(shut=False, lost=True) with the reason. The kernel closes the dead process'
        sockets, so gloo mostly fails by itself. `GracePeriods.death_interrupt` later the ranks that wait for the dead
        one get Abort(shut=True) and the others an Interrupt; after `death_abort` every remaining rank is aborted.
    Mismatched tensors. gloo's thread throws where no caller catches. The terminate handler parks that thread forever,
        and `sink` breaks off every group with a pending collective.

What `break_off` does, on the control thread:

1. It records the reason, so that calls from now on raise `CollectiveAborted` at once, and starts the clock of
   `broken_for`.
2. It shuts down the TCP sockets of the inner group (gloo has no abort) and calls NCCL's abort. Every operation under
   way fails, on the peers as well. The sockets are shut down and not closed: gloo's threads still use the descriptors,
   whose numbers would be given to other files.
3. A wait that raises goes through `error_for`. It recognizes the backends' messages about broken connections, waits up
   to one second for the reason to arrive, and raises `CollectiveAborted` with the reason, the collective and the line.
4. gloo forgets some operations when their socket fails. Such a wait is left behind 0.5 s after the abort: the caller
   raises, and the inner group is kept forever (`_wrecks`), because its destructor would wait for that operation.
5. C++ code that holds only a future, as DDP's reducer does in `backward()`, is reached by no exception. After 0.5 s a
   timer completes those futures with an empty tensor, on which the reducer raises; `GroupManager.translate` turns that
   error into `CollectiveAborted`.

From the abort to the re-formed group:

1. Every rank sends Done. The notebook marks the group stale if the cell was aborted, or if it failed or was interrupted
   after it had launched collectives: then the ranks may be at different collectives even though every connection works.
   The death of a rank has the same effect, once its replacement has connected.
2. Once all ranks are idle, the notebook increments the generation and sends Regroup to all ranks, before any queued
   cell. The first generation is formed in the same way.
3. The ranks agree, through the store, on the groups to keep: those that exist on all of their members, where a fresh
   process counts as having every group (`GroupManager._agree`). A group that a rank failed to create is aborted for
   good.
4. For every kept group, in the order of creation, the members announce themselves in the store, wait for one another,
   connect a new inner group, and `renew` the outer one. The logs count from 0 again. A fresh process calls
   `init_process_group` and then creates the groups that its peers have.
5. Models are reset to the start of a step (`model_reset.reset_after_abort`). If the regroup fails on a rank, the
   cluster counts as ungrouped, and the next regroup begins with another generation.

The store (`store.py`) is a folder of files. It carries no tensor. It is used for the agreement of step 3, to wait for
the members of a group, for gloo's addresses and NCCL's unique id, and for what torch itself stores while it creates a
group. Its keys begin with `generation-N/`, so that a rank that is late in an old generation never reads or writes keys
of the new one; rank 0 deletes older keys once all ranks have agreed. torch's TCPStore is not used because every user of
the machine can reach its port, and because its server would die with the rank that runs it. All waits for a key poll,
so that an interrupt and `GroupManager.abort` can end them.
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
"""Error messages of gloo and NCCL that mean a broken connection, and not an invalid call."""
_EMPTY = re.compile(r"size \(?0\b")
"""torch's error message for an empty tensor in a bucket of gradients, see `_forsake`."""
_CAUSE_WITHIN = 1.0
"""Seconds to wait for the notebook's reason after a connection broke."""


class BackendGroup:
    """The connections of one generation: a torch ProcessGroup, its sockets, and the abort functions of its backends."""

    def __init__(self, group: dist.ProcessGroup, sockets: Opened, aborts: list[Callable[[], None]]) -> None:
        self.group = group
        self.sunk = False
        self._sockets = sockets
        self._aborts = aborts

    @property
    def waits_in_steps(self) -> bool:
        """Return True if waits must be cut into steps: gloo waits end only by completion or timeout."""
        return not self._aborts

    def abort(self) -> None:
        """Make every call that waits in this group raise. Any thread."""
        shutdown_sockets(self._sockets)
        for abort in self._aborts:
            abort()

    def leave_behind(self) -> None:
        """Keep the group alive forever: its destructor would wait for a thread that never ends."""
        if self not in _wrecks:
            _wrecks.append(self)

    def end(self) -> None:
        """Abort the group and destroy it.

        The destructor joins the group's threads, and one of them may wait for an operation that gloo has forgotten, so
        it runs on a thread of its own.
        """
        self.abort()
        if self in _wrecks:
            return
        last = [self.group]
        del self.group
        thread = threading.Thread(target=last.clear, name="rankbook-end", daemon=True)
        thread.start()
        thread.join(ENDS_WITHIN / 2)  # usually enough to free its descriptors before the next group is connected


_wrecks: list[BackendGroup] = []


class RecoverableProcessGroup(dist.ProcessGroup):
    """The process group that torch and the user hold, in front of a replaceable inner group; see the module docstring.

    `ranks` are the global ranks of the members. `where` returns the line of the running cell.
    """

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
        """True for a group that only a thread beside the cells uses, as an asynchronous save does: an error of a cell
        does not abort it, and a regroup leaves its connections alone. Set by the creator of the group."""
        self._store = store
        self.ledger = ledger
        self._inner: BackendGroup = inner
        self._where = where
        self._cause: str | None = None
        self._broken_at: float | None = None
        self._forsaken = False
        self._told = threading.Event()

    # Failure and recovery

    def renew(self, inner: BackendGroup) -> None:
        """Replace the inner group by `inner`, which has fresh connections, and restart the log."""
        self._inner.end()
        self._inner = inner
        self._cause = None
        self._broken_at = None
        self._forsaken = False
        self._told = threading.Event()
        self.ledger.restart()

    def explain(self, cause: str) -> None:
        """Record the reason that later errors and calls report. The first reason wins. Any thread."""
        self._cause = self._cause or cause
        self._told.set()

    def break_off(self, cause: str) -> None:
        """Make every waiting call raise `CollectiveAborted` with this reason. Any thread.

        Futures that C++ still holds after `ENDS_WITHIN` seconds are completed by a timer, see `_forsake`.
        """
        # The order matters: a thread whose wait the abort ends must find the cause, and the log must say `broken`.
        self.explain(cause)
        self._note_broken()
        self._inner.abort()
        promised = [call.work for call in self.ledger.pending() if isinstance(call.work, FutureWork)]
        if promised and self.waits_in_steps:
            timer = threading.Timer(ENDS_WITHIN, self._forsake, (self._inner, promised))
            timer.daemon = True
            timer.start()

    def _forsake(self, inner: BackendGroup, promised: list[FutureWork]) -> None:
        """Complete the futures that C++ still waits for with an empty tensor, on which DDP's reducer raises."""
        for work in promised:
            if work.forsake([torch.empty(0)]):
                self._forsaken = True
                inner.leave_behind()

    def _note_broken(self) -> None:
        self._broken_at = self._broken_at or time.monotonic()
        self.ledger.broken = True

    def sink(self, cause: str) -> None:
        """Abort the group after gloo's thread has failed: no wait in C++ will end any more. Any thread."""
        self._inner.sunk = True
        self._inner.leave_behind()
        self.break_off(cause)

    def leave_behind(self) -> None:
        """Keep the inner group alive forever: a thread is blocked in it."""
        self._inner.leave_behind()

    @property
    def sunk(self) -> bool:
        """Return True if gloo's thread has failed, so that no wait in C++ will end."""
        return self._inner.sunk

    @property
    def broken_for(self) -> float:
        """Return the seconds since the group was aborted; 0 while it works."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    @property
    def cause(self) -> str | None:
        """Return the reason why the group cannot be used until it is renewed, or None."""
        return self._cause

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """Return the exception to raise where `launched` failed with `error`.

        A broken connection becomes `CollectiveAborted`, after a wait of up to `_CAUSE_WITHIN` seconds for the reason;
        any other error is returned unchanged.
        """
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

    # The interface that torch calls

    def _launch(self, name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a Work
        if here.only_looks:
            raise BadRequest(f"a peek cannot begin {op.word}, for the ranks would no longer be at the same collective")
        if self._cause is not None:
            raise self._aborted(f", so this rank cannot begin {op.word}")
        # Logged before the call, which may block: the notebook has to see a rank that waits in it. A call that torch
        # refuses is withdrawn, because the other ranks have not seen it; one that fails on the network has ended.
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
            raise other from None  # gloo's own message would hide the reason
        except BaseException:
            self.ledger.withdraw(key)
            raise
        if work is None:
            self.ledger.end(key)
            return None
        return InterruptibleWork(work, self, key, launched)

    @property
    def waits_in_steps(self) -> bool:
        """Return True if waits must be cut into steps, see `BackendGroup`."""
        return self._inner.waits_in_steps

    def name(self) -> str:
        """Return the name of the inner group's backend."""
        return str(self._inner.group.name())

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ calls
        """Return a name that torch has no C++ class for: of "gloo", DDP's logger casts the registered backend to it."""
        return "rankbook"

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was created with."""
        return self._store

    def shutdown(self) -> None:
        """Shut down the inner group."""
        self._inner.group.shutdown()

    def abort(self) -> None:
        """Abort the group as `torch.distributed.ProcessGroup.abort` does: waiting calls raise."""
        self.break_off("the process group was aborted")

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401 - torch's
        return self._inner.group._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:  # noqa: ANN401
        self._inner.group._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:  # noqa: ANN401
        return self._inner.group._end_coalescing(device)

    def set_timeout(self, timeout: Any) -> None:  # noqa: ANN401
        """Set the timeout of the inner group's backends."""
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
