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
    rankbook-connect  Makes an attempt to connect gloo (see `gloo.py`); may be left behind.
    rankbook-device   Asks the device which collectives it has finished, see "NCCL" below. Only with NCCL.
    rankbook-abort    Calls NCCL's abort for one inner group. It may hang, and is then left behind.
    rankbook-error    Aborts a group after an error that NCCL's watchdog has found.
    rankbook-end      Destroys the inner group of an old generation, or of a group that the user has destroyed: the
                      destructor joins gloo's threads, which may never end.
    gloo*, pt_gloo*   C++ threads of gloo and torch. When one calls std::terminate(), the handler in `gloo.py` calls
                      `GroupManager.rescue` on it.
    save thread       Uses groups of its own that are marked `background`: neither an interrupt nor an error of a cell
                      aborts them, and a regroup leaves them alone. Only the death of a member does.

Messages (`protocol/messages.py`)
    GetCollectives, Collectives  The notebook asks every rank for its collective logs and compares them. A rank also
                                 sends its logs unasked when a connection breaks and it does not know why.
    Abort(shut=False)            Gives the reason why a collective may fail soon: `set_cause`.
    Abort(shut=True)             Ends the collectives of the named groups: `abort_with_cause`.
    RanksLost                    Gives the reasons why collectives of some ranks' groups may fail soon: `set_cause`.
    Interrupt                    Raises KeyboardInterrupt in the main thread.
    Done                         Reports the end of a cell, and the logs of the groups that it has used.
    Regroup(generation)          A task for the main thread: join this generation.

From the event to the abort
    Interrupt. The main thread raises KeyboardInterrupt within 0.25 s if it waits for gloo, because no such wait stays
        in C++ for longer. A rank that is still in its cell after `GracePeriods.interrupt_abort` gets Abort(shut=True),
        unless it only waits for a device to execute what all members have launched. A second interrupt ends that.
    Error. The rank that raised sends Done. The notebook's `CollectiveMonitor` compares the logs. When a rank has waited
        for `GracePeriods.raised` in a collective that the failed rank will not launch, the waiting ranks get
        Abort(shut=True) for that group, and the others get the reason.
    Death. The notebook at once sends RanksLost with the reason. The kernel closes the dead process' sockets, so gloo
        mostly fails by itself. `GracePeriods.death_interrupt` later the ranks that wait for the dead
        one get Abort(shut=True) and the others an Interrupt; after `death_abort` every remaining rank is aborted.
    Mismatch. The ranks gave different operations or tensors to the same collective, which `CollectiveMonitor` sees in
        the logs. The ranks that wait in this group get Abort(shut=True), with the collective and the values of all
        ranks as the reason. gloo may notice at the same time: its thread throws where no caller catches. The terminate
        handler parks that thread forever, and `fail_transport` breaks off every group with a pending collective. The
        waits that end wait for the reason. If all ranks have completed the collective, their results are wrong: the
        notebook compares the logs once more at the end of the cell, and makes it an error.

What `abort_with_cause` does, on the control thread:

1. It records the reason, so that calls from now on raise `CollectiveAborted` at once, and starts the clock of
   `seconds_since_abort`.
2. It shuts down the TCP sockets of the inner group (gloo has no abort) and starts NCCL's abort. Every operation of gloo
   under way fails, on the peers as well. The sockets are shut down and not closed: gloo's threads still use the
   descriptors, whose numbers would be given to other files.
3. A wait that raises goes through `error_for`. It recognizes the backends' messages about broken connections, waits up
   to one second for the reason to arrive, and raises `CollectiveAborted` with the reason, the collective and the line.
4. gloo forgets some operations when their socket fails. Such a wait is left behind 0.5 s after the abort: the caller
   raises, and the inner group is kept forever (`_leaked`), because its destructor would wait for that operation.
5. C++ code that holds only a future, as DDP's reducer does in `backward()`, is reached by no exception. After 0.5 s a
   timer completes those futures with an empty tensor, on which the reducer raises; `GroupManager.translate` turns that
   error into `CollectiveAborted`.

NCCL. The above describes gloo, whose collectives wait on the host. NCCL's are queued on the device:

1. A synchronous call returns no work and goes on, and `Work.wait` returns at once. Whether a collective has completed,
   only the device knows. So the log keeps a call until the device has finished it (`device_calls.py`), and the main
   thread waits for those that the cell relies on before it sends Done. Thereby the notebook sees who waits for whom,
   as with gloo. The decision is made for every call, by the device of its tensors: a group may have both backends.
2. What waits is `.item()`, a synchronize or a barrier: a CUDA call that neither an exception nor a signal ends. Only
   the end of the collective does. An abort ends it, without an error and with partial data, and everything that is
   queued behind it is executed with that data. So, before the abort, `Interrupts.raise_error` has `CollectiveAborted`
   raised in the main thread: its signal is pending when the CUDA call returns, and no further line of the cell is
   executed.
3. A CUDA call may hang while another thread waits for the device. The control thread makes none: the thread
   `rankbook-device` asks the device, and other threads read what it has noted. An abort may hang as well, so that it
   has a thread of its own. After `ABORT_LIMIT` seconds the user is told to restart the rank.
4. The host is ahead of the device. An optimizer step that was queued behind an aborted collective has used its partial
   data. The regroup copies the weights and states of replicas from a rank that has not begun such a step
   (`model_reset.py`). The next cell names the models if there is no such rank, or if they are no replicas.
5. A communicator is connected when its group is formed, and not in the first collective: there, neither an abort nor an
   interrupt would reach the wait for a rank that comes late. NCCL's watchdog neither ends the process nor writes dumps
   (`launch/placement.py`); after `TORCH_NCCL_ASYNC_ERROR_HANDLING=2` it only aborts a communicator, a minute after it
   has found a timeout or a broken connection. The device would then go on with partial data. So `rankbook-device` asks
   for such errors, and the group is aborted with a reason (`_on_backend_error`).
6. A device that has reported an error such as a failed assertion executes nothing any more in this process
   (`DeviceWatcher.error`). The rank reports it in Done, its log counts as broken, and `heal` replaces it.

From the abort to the re-formed group:

1. Every rank sends Done. The notebook marks the group stale if the cell was aborted, or if it failed or was interrupted
   after it had launched collectives: then the ranks may be at different collectives even though every connection works.
   The death of a rank has the same effect, once its replacement has connected.
2. Once all ranks are idle, the notebook increments the generation and sends Regroup to all ranks, before any queued
   cell. The first generation is formed in the same way.
3. The devices finish the calls that all members have launched (`GroupManager._finish_device_calls`), so that an error
   after a loop costs none of its steps. The ranks abort the others: while one waits for its peers, CUDA can connect
   nothing. Then they agree, through the store, on the groups to keep: those that exist on all of their members, where
   a fresh process counts as having every group (`GroupManager._agree_on_groups`). A group that a rank failed to create
   is aborted for good, and its connections are freed.
4. For every kept group, in the order of creation, the members announce themselves in the store, wait for one another,
   connect a new inner group, and `renew` the outer one. The logs count from 0 again. A fresh process calls
   `init_process_group` and then creates the groups that its peers have.
5. Models are reset to the start of a step (`model_reset.reset_after_abort`), weights are restored (NCCL, 4), and
   replicas that have made different numbers of steps are made equal (`GroupManager._align_steps`). If the
   regroup fails on a rank, the cluster counts as ungrouped, and the next regroup begins with another generation.

The store (`store.py`) is a folder of files. It carries no tensor. It is used for the agreement of step 3, to wait for
the members of a group, for gloo's addresses and NCCL's unique id, and for what torch itself stores while it creates a
group. Its keys begin with `generation-N/`, so that a rank that is late in an old generation never reads or writes keys
of the new one; rank 0 deletes older keys once all ranks have agreed. torch's TCPStore is not used because every user of
the machine can reach its port, and because its server would die with the rank that runs it. All waits for a key poll,
so that an interrupt and `GroupManager.abort` can end them.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankbook.errors import CollectiveAborted, InvalidArgument
from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog, FutureWork, Op
from rankbook.rank.process_groups.device_calls import DeviceCall, DeviceQueue, Query
from rankbook.rank.process_groups.gloo import Opened, shutdown_sockets
from rankbook.rank.process_groups.interruptible_work import (
    ABORT_TIMEOUT,
    DeviceWork,
    InterruptibleWork,
    active_observer,
    thread_state,
)

_BROKEN_LINK = re.compile(r"onnection (?:closed|reset|refused)|roken pipe|ocket|ransport|borted")
"""Error messages of gloo that mean a broken connection, and not an invalid call."""
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms|(\[Rank 0\]: Ranks? .* failed to pass monitoredBarrier in \d+ ms)")
"""Error messages of gloo after a timeout, by which it closes the connections."""
_NCCL = re.compile(r"NCCL|nccl[A-Z]")
_GLOO = re.compile(r"gloo/")
"""Part of the path of a source file, with which the messages of gloo begin."""
_NCCL_BROKEN_LINK = re.compile(
    r"ncclRemoteError|communicator was aborted|onnection (?:closed|reset|refused)|roken pipe"
)
"""Error messages of NCCL that mean a broken connection. It mentions sockets and transports in other errors as well."""
_NCCL_DETAIL = re.compile(r"Last error:\n(.+)")
_NCCL_HINTS = (
    ("shared memory segment", "/dev/shm is full: enlarge it (docker run --shm-size=1g), or set NCCL_SHM_DISABLE=1"),  # noqa: S108
    ("CUDA calloc", "the device has no memory left for NCCL: free some of it, or use smaller batches"),
)
"""Hints for some errors of NCCL."""
_BARRIER_TAG = 0x7FFF0000
"""Tag of the messages of `monitored_barrier`, which those of programs hardly have."""
_EMPTY = re.compile(r"size \(?0\b")
"""torch's error message for an empty tensor in a bucket of gradients, see `_complete_futures`."""
ABORT_LIMIT = 5.0
"""Seconds for the abort of a device's collectives, after which the rank needs to be restarted."""
_CAUSE_TIMEOUT = 1.5
"""Seconds to wait for the notebook's reason after a connection broke."""
_DIFFERENT_TENSORS = "the tensors of a collective differ in size or type between ranks; it was aborted"
_SUCCESS = 0
"""c10d's WorkResult::SUCCESS. The result of a work is set after the work counts as completed, unless it is an error."""
_BACKEND_ERRORS = {"TIMEOUT": "a collective has taken longer than the timeout of its process group"}
_ABORTED_ELSEWHERE = "another rank aborted the collective (see the error of that rank)"


class BackendGroup:
    """The connections of one generation: a torch ProcessGroup, its sockets, and the abort functions of its backends.

    `queued_types` are the device types whose backend queues collectives on the device, as NCCL does, and `queue` has
    the unfinished ones. `aborts` are the abort functions of these backends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: Opened,
        aborts: list[Callable[[], None]],
        queued_types: frozenset[str] = frozenset(),
        queue: DeviceQueue | None = None,
    ) -> None:
        self.group = group
        self.transport_failed = False
        self.queued_types = queued_types
        self.queue = queue
        self.finds_errors = False
        """True if the backends notice timeouts and broken connections themselves, and their works have results."""
        self.on_stuck: Callable[[], None] = lambda: None
        """Called on another thread when an abort has not returned within `ABORT_LIMIT` seconds."""
        self._sockets = sockets
        self._aborts = aborts
        self._lock = threading.Lock()
        self._abort_ended: threading.Event | None = None

    def abort(self) -> None:
        """Make every call that waits in this group raise or end. Any thread.

        Does not wait for the abort of a device's collectives, which may hang.
        """
        # The sockets first, which takes microseconds: gloo's waits end by it, whatever becomes of the device's.
        shutdown_sockets(self._sockets)
        with self._lock:
            if not self._aborts or self._abort_ended is not None:
                return
            # Any thread may abort the group, and several do at the same time. Only the first one aborts the backends.
            self._abort_ended = ended = threading.Event()
        timer = threading.Timer(ABORT_LIMIT, self._report_stuck)
        timer.daemon = True
        timer.start()
        arguments = (self._aborts, ended, timer)
        threading.Thread(target=self._abort_backends, args=arguments, name="rankbook-abort", daemon=True).start()

    def _abort_backends(self, aborts: list[Callable[[], None]], ended: threading.Event, timer: threading.Timer) -> None:
        # A device that has failed says so in the cell.
        with contextlib.suppress(RuntimeError):
            if self.queue is not None:
                self.queue.watcher.accelerator.bind_thread()
                self.queue.is_paused = True
            for abort in aborts:
                abort()
        if self.queue is not None:
            self.queue.is_paused = False
        timer.cancel()
        ended.set()

    def _report_stuck(self) -> None:
        self.leak()
        self.on_stuck()

    @property
    def is_aborted(self) -> bool:
        """Return True if the abort of a device's collectives has begun."""
        return self._abort_ended is not None

    def wait_aborted(self) -> None:
        """Abort the group, and wait until its device has left the collectives, for at most `ABORT_LIMIT` seconds."""
        self.abort()
        deadline = time.monotonic() + ABORT_LIMIT
        if self._abort_ended is not None and not self._abort_ended.wait(ABORT_LIMIT):
            self.leak()
        queue = self.queue
        while queue is not None and queue.unfinished() and time.monotonic() < deadline:
            queue.watcher.wait(0.1)

    def runs_on_device(self, op: Op, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Return True if a device executes this call of a group that has `queued_types`."""
        value: Any = None
        if op.tensors is not None:
            value = args[op.tensors] if len(args) > op.tensors else None
            while isinstance(value, (list, tuple)):
                value = value[0] if value else None
        else:  # a barrier
            value = options["opts"] if "opts" in options else args[0] if args else None
        device = getattr(value, "device", None)
        if device is None:  # without a tensor, torch takes NCCL
            return True
        return device.type in self.queued_types

    def leak(self) -> None:
        """Keep the group alive forever: its destructor would wait for a thread that never ends."""
        # A list that nobody empties: not even the interpreter's shutdown runs the destructor, for a rank ends by
        # `os._exit`.
        if self not in _leaked:
            _leaked.append(self)

    def end(self) -> None:
        """Abort the group and destroy it.

        The destructor joins the group's threads, and one of them may wait for an operation that gloo has forgotten, so
        it runs on a thread of its own.
        """
        self.wait_aborted()
        self.destroy()

    def destroy(self) -> None:
        """Destroy the group, once it has completed its operations. A second call does nothing."""
        if self in _leaked or not hasattr(self, "group"):
            return
        # The list holds the only reference that is left, so that `clear` runs the destructor on the new thread.
        last = [self.group]
        del self.group
        self._aborts = []  # the methods of the backends refer to them
        if self.queue is not None:
            self.queue.get_error = lambda: ""
        thread = threading.Thread(target=last.clear, name="rankbook-end", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT / 2)  # usually enough to free its descriptors before the next group is connected

    def unfinished(self) -> list[DeviceCall]:
        """Return the calls that a device has not finished. Any thread."""
        return [] if self.queue is None else self.queue.unfinished()


_leaked: list[BackendGroup] = []


class _WorkQuery:
    """Query of an asynchronous call: True once the device has executed it.

    NCCL counts a work with an error as completed, although the device executes it until the abort.
    """

    __slots__ = ("_inner", "_work")

    def __init__(self, work: Any, inner: BackendGroup) -> None:  # noqa: ANN401 - torch's
        self._work = work
        self._inner = inner

    def __call__(self) -> bool:
        if not self._work.is_completed():
            return False
        if not self._inner.finds_errors or self._inner.is_aborted:
            return True
        try:
            result = self._work.get_future_result()
            return not result.done() or bool(result.value() == _SUCCESS)
        except RuntimeError:  # a work without a result
            return True


class RecoverableProcessGroup(dist.ProcessGroup):
    """The process group that torch and the user hold, in front of a replaceable inner group; see the module docstring.

    `ranks` are the global ranks of the members. `current_line` returns the line of the running cell.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: tuple[int, ...],
        inner: BackendGroup,
        log: CollectiveLog,
        current_line: Callable[[], int | str | None],
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg, unused-ignore]
        self.background = False
        """True for a group that only a thread beside the cells uses, as an asynchronous save does: an error of a cell
        does not abort it, and a regroup leaves its connections alone. Set by the creator of the group."""
        self.is_shut_down = False
        self._store = store
        self.log = log
        self.on_break: Callable[[], None] = lambda: None
        """Called when a connection has broken and the reason is not known."""
        self.on_cut: Callable[[CollectiveAborted], None] = lambda _error: None
        """Called when calls that a device has not finished are about to be aborted, with the error to raise."""
        self.cut_since: float | None = None
        """Time of the launch of the oldest call that was aborted while a device had not finished it."""
        self._inner: BackendGroup = inner
        self._batch: list[tuple[int, CollectiveCall]] | None = None
        self._current_line = current_line
        self._cause: str | None = None
        self._mismatch = False
        self._broken_at: float | None = None
        self._futures_completed = False
        self._cause_set = threading.Event()
        self._use_queue(inner)

    # Failure and recovery

    def _use_queue(self, inner: BackendGroup) -> None:
        if inner.queue is not None:
            inner.queue.log = self.log
            inner.queue.on_error = self._on_backend_error

    def renew(self, inner: BackendGroup, generation: int) -> None:
        """Replace the inner group by `inner`, which has fresh connections, and restart the log."""
        former = self._inner
        try:
            # First of all: its descriptors are free for the connections of the next group, and threads that still wait
            # in it find the cause.
            former.end()
        finally:  # an interrupt must not leave a group that has no connections and cannot be renewed
            self._inner = inner
            self._use_queue(inner)
            self._batch = None
            # torch leaves its list of the collectives of a batch behind if one of them raises, and would append later
            # ones to it.
            c10d._world.pg_coalesce_state.pop(self, None)
            self._cause = None
            self._mismatch = False
            self._broken_at = None
            self._futures_completed = False
            self.is_shut_down = False
            # A new event, and not a cleared one: a thread that has been left behind may still wait for the old one.
            self._cause_set = threading.Event()
            self.log.restart(generation)
            former.destroy()  # unless `end` has done it

    def set_cause(self, cause: str, *, mismatch: bool = False) -> None:
        """Record the reason that later errors and calls report. The first reason wins. Any thread.

        `mismatch`: the reason names the collective, so that the error of a wait repeats neither this nor the line.
        """
        # The mismatch flag before the reason, which readers look at first.
        if self._cause is None:
            self._mismatch = mismatch
            self._cause = cause
        self._cause_set.set()

    def abort_with_cause(self, cause: str, *, mismatch: bool = False) -> None:
        """Make every waiting call raise `CollectiveAborted` with this reason. Any thread.

        Futures that C++ still holds after `ABORT_TIMEOUT` seconds are completed by a timer, see `_complete_futures`.
        """
        # The order matters: a thread whose wait the abort ends must find the cause, and the log must say `broken`.
        self.set_cause(cause, mismatch=mismatch)
        self._break_off()

    def _break_off(self) -> None:
        """End every waiting call."""
        # The log first, so that a report that is made from now on says that the connections are broken.
        self._mark_broken()
        # Before the abort, which lets the main thread go on with partial results.
        self._note_cut()
        self._inner.abort()
        # Works that Python waits for notice the abort themselves (`InterruptibleWork._check`). Those that C++ holds as
        # futures do not.
        futures = [call.work for call in self.log.pending() if isinstance(call.work, FutureWork)]
        if futures:
            timer = threading.Timer(ABORT_TIMEOUT, self._complete_futures, (self._inner, futures))
            timer.daemon = True
            timer.start()

    def _note_cut(self) -> None:
        """Remember which calls an abort is about to cut short, and have the error raised in the cell."""
        unfinished = self._inner.unfinished()
        if unfinished:
            self._remember_cut(unfinished[0].launched)
            self.on_cut(self.abort_error(unfinished[0].launched))

    def _remember_cut(self, launched: CollectiveCall) -> None:
        if self.cut_since is None:
            self.cut_since = launched.began

    def _on_backend_error(self, error: str) -> None:
        """Abort the group, whose backend has found an error itself. The watcher's thread.

        NCCL's watchdog would abort it a minute later, and the device finish the calls with partial data.
        """
        inner, unfinished = self._inner, self._inner.unfinished()
        if unfinished and not inner.is_aborted:
            self._remember_cut(unfinished[0].launched)
            arguments = (inner, unfinished[0].launched, error)
            threading.Thread(target=self._abort_after, args=arguments, name="rankbook-error", daemon=True).start()

    def _abort_after(self, inner: BackendGroup, launched: CollectiveCall, error: str) -> None:
        """Abort the group after an error that its backend has found, with the notebook's reason if there is one."""
        self.log.broken = True
        self.on_break()
        self._cause_set.wait(_CAUSE_TIMEOUT)
        if inner is not self._inner or inner.is_aborted:
            return
        self.set_cause(_BACKEND_ERRORS.get(error, f"NCCL has reported an error ({error}; see its messages)"))
        if not inner.unfinished():  # the watchdog was faster
            self.on_cut(self.abort_error(launched))
        self._break_off()

    def unfinished(self) -> list[DeviceCall]:
        """Return the calls that the device has not finished. Any thread."""
        return self._inner.unfinished()

    def record_device(self) -> Query | None:
        """Return a query of what the current stream has been given so far; None while it is recorded in a graph."""
        queue = self._inner.queue
        if queue is None or queue.watcher.error is not None or queue.watcher.accelerator.is_capturing():
            return None
        return queue.watcher.accelerator.record()

    def abort_device_calls(self) -> None:
        """Begin to abort what a device has not finished, before a regroup or when the rank leaves. Main thread."""
        if self._inner.queue is not None and not self.is_shut_down:
            self._note_cut()
            self._inner.abort()

    def wait_device_calls(self) -> None:
        """Wait until the device has left what `abort_device_calls` has aborted. Main thread."""
        if self._inner.queue is not None and not self.is_shut_down:
            self._inner.wait_aborted()

    def mark_lost(self, cause: str) -> None:
        """Note that the device has failed for good, so that it completes no collective any more. Any thread."""
        if self._inner.queue is not None:
            self.set_cause(cause)
            self.log.broken = True  # the others wait in vain, also in what this rank has launched

    def waits_for_device(self) -> bool:
        """Return True if the device has not finished a call on whose result the program relies."""
        queue = self._inner.queue
        return queue is not None and queue.is_awaited

    def _complete_futures(self, inner: BackendGroup, futures: list[FutureWork]) -> None:
        """Complete the futures that C++ still waits for with an empty tensor, on which DDP's reducer raises."""
        for work in futures:
            # The operation itself goes on in gloo's thread, which the destructor of the inner group would join.
            if work.complete_early([torch.empty(0, device="cpu")]):
                self._futures_completed = True
                inner.leak()

    def _mark_broken(self) -> None:
        # The first time stays: the clock of `seconds_since_abort` must not start again.
        self._broken_at = self._broken_at or time.monotonic()
        self.log.broken = True

    def fail_transport(self) -> None:
        """Abort the group after gloo's thread has failed: no wait in C++ will end any more. Any thread.

        The tensors of a collective do not match. The notebook will say which ones.
        """
        # Before the waits end, which look at this flag.
        self._inner.transport_failed = True
        self._inner.leak()
        self._break_off()

    def leak(self) -> None:
        """Keep the inner group alive forever: a thread is blocked in it."""
        self._inner.leak()

    @property
    def timeout(self) -> timedelta:
        """Return the timeout of the collectives that gloo executes."""
        timeout: timedelta = self._inner.group._get_backend(torch.device("cpu")).options._timeout
        return timeout

    @property
    def transport_failed(self) -> bool:
        """Return True if gloo's thread has failed, so that no wait in C++ will end."""
        return self._inner.transport_failed

    @property
    def seconds_since_abort(self) -> float:
        """Return the seconds since the group was aborted; 0 while it works."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    @property
    def cause(self) -> str | None:
        """Return the reason why the group cannot be used until it is renewed, or None."""
        return self._cause

    def may_have_raised(self, error: RuntimeError) -> bool:
        """Return True if `error` may be one of this group's backend, which C++ code has passed on.

        An error of the user's own may mention sockets or an abort as well. It is left alone.
        """
        text = str(error)
        return bool(_GLOO.search(text) or _NCCL.search(text) or (self._futures_completed and _EMPTY.search(text)))

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:
        """Return the exception to raise where `launched` failed with `error`.

        A broken connection becomes `CollectiveAborted`, after a wait of up to `_CAUSE_TIMEOUT` seconds for the reason;
        any other error is returned unchanged.
        """
        # Invalid arguments raise RuntimeError too, and have to reach the user as they are.
        text = str(error)
        of_nccl = _NCCL.search(text) is not None
        link = _NCCL_BROKEN_LINK if of_nccl else _BROKEN_LINK
        timed_out = _TIMED_OUT.search(text)
        if not timed_out and not link.search(text) and not (self._futures_completed and _EMPTY.search(text)):
            return describe_nccl_error(error) if of_nccl else error
        self._mark_broken()
        if timed_out:
            milliseconds, text_of_barrier = timed_out.groups()
            self.set_cause(
                text_of_barrier
                or f"a wait of {int(milliseconds) / 1000:g} s has reached the timeout of its process group"
            )
        # The connection broke before the notebook has said why. It is told that this rank does not know, and asks the
        # others.
        if self._cause is None:
            self.on_break()
            self._cause_set.wait(_CAUSE_TIMEOUT)
        if self._cause is None and of_nccl:  # no rank has failed, so its words are all that is known
            return describe_nccl_error(error)
        # Only if no reason has come in time, because the first one stays.
        self.set_cause(_DIFFERENT_TENSORS if self.transport_failed else _ABORTED_ELSEWHERE)
        return self.abort_error(launched)

    def abort_error(self, launched: CollectiveCall) -> CollectiveAborted:
        """Return the exception to raise where `launched` waits in this group, which has a `cause`."""
        if self._mismatch:
            return CollectiveAborted(self._cause)
        return self._abort_error(f" while this rank waited in {launched}")

    def _abort_error(self, doing: str) -> CollectiveAborted:
        line = self._current_line()
        return CollectiveAborted(f"{self._cause}{doing}" + (f" at line {line}" if line is not None else ""))

    # The interface that torch calls

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as `torch.distributed.monitored_barrier` does; rank 0 names those that do not come.

        The other ranks wait for rank 0 as long as the timeout of the group. gloo's own waits there as long as the
        backend may take to connect, and an interrupt does not reach it.
        """
        op = OPS["monitored_barrier"]
        self._check_launch(op)
        key, launched = self.log.launch(op, ())
        try:
            self._meet(launched, timeout or self.timeout, wait_all_ranks)
        except RuntimeError as error:
            raise self.error_for(error, launched) from None
        finally:
            self.log.end(key)

    def _meet(self, launched: CollectiveCall, timeout: timedelta, wait_all_ranks: bool) -> None:
        inner = self._inner.group

        def message(method: Callable[..., Any], peer: int) -> InterruptibleWork:
            work = InterruptibleWork(method([torch.zeros(1, device="cpu")], peer, _BARRIER_TAG), self, -1, launched)
            launched.work = None  # the barrier does not end with its messages
            return work

        if inner.rank():
            message(inner.send, 0).wait_on_thread(self.timeout)
            message(inner.recv, 0).wait_on_thread(self.timeout)
            return
        deadline = time.monotonic() + timeout.total_seconds()
        late: list[str] = []
        for peer in range(1, inner.size()):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                message(inner.recv, peer).wait_on_thread(left)
            except RuntimeError as error:
                if not _TIMED_OUT.search(str(error)):
                    raise
                late.append(str(self.log.ranks[peer]))
                if not wait_all_ranks:
                    break
        if late:
            ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
            milliseconds = round(1000 * timeout.total_seconds())
            raise RuntimeError(f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {milliseconds} ms")
        for peer in range(1, inner.size()):
            message(inner.send, peer).wait_on_thread(self.timeout)

    def _check_launch(self, op: Op) -> None:
        # A `peek` runs beside the cell. Its collective would be matched with one of the cell on the other ranks.
        if thread_state.collectives_forbidden:
            raise InvalidArgument(
                f"a peek cannot begin {op.function}: the ranks would no longer be at the same collective"
            )
        if self._cause is not None:
            raise self._abort_error(f", so this rank cannot begin {op.function}")

    def _launch(self, name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a Work
        self._check_launch(op)
        # Logged before the call, which may block: the notebook has to see a rank that waits in it. A call that torch
        # refuses is withdrawn, because the other ranks have not seen it; one that fails on the network has ended.
        key, launched = self.log.launch(op, args, kwargs)
        observer = active_observer.value
        # The inner group is looked up at every launch, because a regroup replaces it.
        inner = self._inner
        try:
            if observer is None:
                work = getattr(inner.group, name)(*args, **kwargs)
            else:
                with observer.launching(launched, self.log.name):
                    work = getattr(inner.group, name)(*args, **kwargs)
        except RuntimeError as error:
            other = self.error_for(error, launched)
            if self._broken_at is None:  # also an error of NCCL, as of memory that it could not allocate
                self.log.withdraw(key)
            else:
                self.log.end(key)
            if other is error:
                raise
            raise other from None  # gloo's own message would hide the reason
        except BaseException:
            self.log.withdraw(key)
            raise
        if inner.queued_types and inner.runs_on_device(op, args, kwargs):
            return self._follow(work, inner, key, launched)
        # torch returns no work for some calls.
        if work is None:
            self.log.end(key)
            return None
        return InterruptibleWork(work, self, key, launched)

    def _follow(self, work: Any, inner: BackendGroup, key: int, launched: CollectiveCall) -> DeviceWork | None:  # noqa: ANN401 - torch's
        """Keep a call that was queued on the device in the log until the device has finished it.

        Return a work for an asynchronous call, and None for a synchronous one, which torch does not wait for either.
        """
        queue = inner.queue
        assert queue is not None
        accelerator = queue.watcher.accelerator
        if self._batch is not None:  # its end is that of the batch
            self._batch.append((key, launched))
            return None if work is None else DeviceWork(work, self, launched)
        if accelerator.is_capturing():  # the graph will execute it, as often as it is replayed
            self.log.end(key)
            return None if work is None else DeviceWork(work, self, launched)
        try:
            query = accelerator.record() if work is None else _WorkQuery(work, inner)
        except RuntimeError:  # the device has failed
            self.log.end(key)
            raise
        queue.add(key, launched, query, is_awaited=work is None, keeps_tensors=work is not None)
        # The abort may have come while torch queued the call, or have ended a call in which torch waits, as a barrier.
        if self._broken_at is not None:
            raise self.abort_error(launched)
        return None if work is None else DeviceWork(work, self, launched)

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
        """Free the connections. `dist.destroy_process_group` calls it.

        The threads and descriptors of the inner group are free soon after, whoever still holds a reference to this
        group. Later collectives raise `CollectiveAborted`.
        """
        if not self.is_shut_down:
            self.is_shut_down = True
            if not self._inner.is_aborted:  # NCCL's own would wait for an aborted communicator
                self._inner.group.shutdown()
            self.set_cause("the process group was destroyed")
            self._inner.destroy()

    def leave(self) -> None:
        """Free the connections without the other ranks: NCCL's own `shutdown` waits for them."""
        if self._inner.queue is not None and not self.is_shut_down:
            self.is_shut_down = True
            self.set_cause("the rank has left")
            self._inner.end()

    def abort(self) -> None:
        """Abort the group as `torch.distributed.ProcessGroup.abort` does: waiting calls raise."""
        self.abort_with_cause("the process group was aborted")

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401 - torch's
        return self._inner.group._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:  # noqa: ANN401
        if device.type in self._inner.queued_types:
            self._batch = []
        self._inner.group._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:  # noqa: ANN401
        batch, self._batch = self._batch, None
        inner = self._inner
        try:
            work = inner.group._end_coalescing(device)
        except RuntimeError as error:
            other = error if not batch else self.error_for(error, batch[-1][1])
            remove = self.log.withdraw if self._broken_at is None else self.log.end
            for key, _ in reversed(batch or ()):  # the newest first, which `withdraw` requires
                remove(key)
            if other is error:
                raise
            raise other from None
        if not batch:
            return work
        # All of them end with the batch, whose work is that of the last.
        works = [self._follow(work, inner, key, launched) for key, launched in batch]
        return works[-1]

    def set_timeout(self, timeout: Any) -> None:  # noqa: ANN401
        """Set the timeout of the inner group's backends."""
        self._inner.group.set_timeout(timeout)

    def _set_default_timeout(self, timeout: Any) -> None:  # noqa: ANN401
        self._inner.group._set_default_timeout(timeout)  # type: ignore[attr-defined, unused-ignore]


def describe_nccl_error(error: BaseException) -> BaseException:
    """Return an error of NCCL with its reason as the first line, and what to do where that is known.

    torch puts the place in its own source, the version and general words before the reason.
    """
    text = str(error)
    match = _NCCL_DETAIL.search(text)
    hints = [hint for words, hint in _NCCL_HINTS if words in text]
    first = ": ".join(filter(None, [match[1].strip() if match else "", *hints]))
    if not first or text.startswith(first):
        return error
    try:
        return type(error)(f"{first}\n{text}").with_traceback(error.__traceback__)
    except TypeError:
        return error


def _compile_never(code: types.CodeType) -> None:
    """Let torch.compile neither trace `code` nor what it calls.

    Where DDP itself is compiled, its reducer calls collectives from C++, whose Python frames would be traced.
    """
    with contextlib.suppress(ImportError):  # another version of torch
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


# The methods are generated, because every one does the same: log, forward, wrap the work.
def _method(name: str, op: Op) -> Callable[..., Any]:
    def call(self: RecoverableProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return self._launch(name, op, args, kwargs)

    call.__name__ = name
    _compile_never(call.__code__)
    return call


for _name, _op in OPS.items():
    # Some versions of torch lack some of them.
    if hasattr(dist.ProcessGroup, _name) and _name not in vars(RecoverableProcessGroup):
        setattr(RecoverableProcessGroup, _name, _method(_name, _op))
