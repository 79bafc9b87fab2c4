"""Save asynchronously: stage copies of the data and write them in a background thread while training continues.

Theory of operation
===================

The thread that calls `save` runs, on every rank: `join_previous`, which waits for the previous save and raises its
error; `_ensure_group`, in which the ranks meet in the saving group; and `_stage`, which copies the data to be written.
Then it starts the thread `rankbook-checkpoint` and returns a `SaveHandle`. The thread plans, writes and commits
(`saving.run_save`), and sets the result or the error in the handle.

**Process group.** The threads of the ranks communicate over a gloo group of their own. In the default group their
collectives would be mixed with those of training. The group is kept from one save to the next. If a rank lacks it,
because its process is new or because it left the group after an error, all ranks create a new one; `join_previous`
finds this out with an all-reduce over the default group.

**Interrupts.** On the ranks of a notebook, an error in a cell aborts the process groups of training. The saving group
is marked as `background` and stays intact. After all ranks have agreed to save, they meet once more in the saving group
(an all-reduce), so that no rank returns from `save` while another one may still fail in it. An error in one rank's cell
after that point finds every rank with a save thread.

**No rank waits forever.** A rank that has begun to save always takes part in the plan, since the threads of the others
wait there for it. If staging fails, the plan receives the error instead of a declaration (`FailedStaging`) and raises
it on every rank. A rank that cannot take part, or whose group breaks, destroys its group at once (`_destroy_group`):
the closed connections end the waiting of the others.

**Errors are told once.** A rank whose own part failed raises the error in the next save, on all ranks, unless `wait`
has raised it before. A rank that only lost the others, because one of them died, says so in the next cell or in the
result of `heal` (`lost_saves`); the next save is not concerned.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rankbook.checkpoint.local_state import FailedStaging, LocalState, LocalTensor
from rankbook.control_collectives import all_min, gather_objects
from rankbook.errors import CheckpointError, CollectiveAborted
from rankbook.formatting import PACKAGE_FOLDERS
from rankbook.protocol import telemetry
from rankbook.protocol.telemetry import CheckpointSave

if TYPE_CHECKING:
    from rankbook.checkpoint.saving import Saved

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 0.1
"""Minimum time in seconds between two reports of written bytes."""

# Names of the telemetry sources. `next` on an iterator is atomic under the GIL, and saves start in several threads.
_numbers = iter(range(1, 1 << 62))


class SaveProgress:
    """Track and report the progress of one save on this rank.

    The thread that saves changes it; any thread may read it. `on_progress` is called in the thread that saves. If it
    raises an Exception, the error is logged and the callback is not called again.
    """

    def __init__(
        self, folder: str, *, background: bool = False, on_progress: Callable[[CheckpointSave], None] | None = None
    ) -> None:
        self.folder, self.background = folder, background
        self.name = ""
        self.step: int | None = None
        self.phase, self.error = "planning", ""
        self.written = self.total = 0
        self._start_time = self._last_report = time.monotonic()
        self._writing_start = 0.0
        self._writing_end: float | None = None
        self._end_time: float | None = None
        self._on_progress = on_progress
        self._interrupt: BaseException | None = None
        # A source of its own per save: a background save and the next one may exist at the same time.
        self._source = f"checkpoint {next(_numbers)}"
        telemetry.offer_source(self._source, self.snapshot)
        self._report()

    def check(self) -> None:
        """Raise the interrupt that occurred in the callback, if any.

        Called where an error of one rank is propagated to all ranks.
        """
        if self._interrupt is not None:
            raise self._interrupt

    def snapshot(self) -> CheckpointSave:
        """Return a snapshot of the progress, with durations in seconds and the rate in bytes per second."""
        now = time.monotonic()
        # Nothing changes after the end: a failed save may stay visible for hours.
        seconds = (self._end_time or now) - self._start_time
        # The rate counts from the first to the last byte of the file. Planning and waiting for other ranks are not
        # writing.
        writing = (self._writing_end or now) - self._writing_start if self._writing_start else 0.0
        return CheckpointSave(
            folder=self.folder,
            name=self.name,
            step=self.step,
            phase=self.phase,
            written=self.written,
            total=self.total,
            seconds=seconds,
            rate=self.written / writing if writing > 0 else None,
            background=self.background,
            error=self.error,
        )

    def enter(self, phase: str) -> None:
        """Begin a phase: planning, staging, writing, committing, done or failed."""
        self.phase = phase
        now = time.monotonic()
        if phase == "writing":
            self._writing_start, self._writing_end = now, None
        elif self._writing_start and self._writing_end is None:
            self._writing_end = now
        if phase in {"done", "failed"}:
            self._end_time = now
        # A failed background save stays visible until its error was reported; a failed save in the foreground has
        # raised already.
        if phase == "done" or (phase == "failed" and not self.background):
            telemetry.withdraw_source(self._source)
        self._report()

    def add_written(self, count: int) -> None:
        """Count `count` more written bytes."""
        self.written += count
        if time.monotonic() - self._last_report > REPORT_INTERVAL:
            self._report()

    def fail(self, error: str) -> None:
        """End the save without a checkpoint."""
        self.error = error
        self.enter("failed")

    def withdraw(self) -> None:
        """Stop showing a failed asynchronous save in telemetry, because its error was reported."""
        telemetry.withdraw_source(self._source)

    def _report(self) -> None:
        self._last_report = time.monotonic()
        progress = self.snapshot()
        telemetry.report_value(progress)
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception:  # a failing callback must not fail the save on all ranks
                logger.exception(
                    "on_progress raised an exception and is not called again during this save to %s", self.folder
                )
                self._on_progress = None
            except BaseException as error:  # noqa: BLE001 - `check` raises it: raised here, it could leave other ranks waiting
                self._interrupt, self._on_progress = error, None


NICENESS = 8
"""Niceness of the save thread, added to that of the process: a tenth of a core that training wants all of."""

GROUP_CREATION_TIMEOUT = timedelta(seconds=60)
"""Timeout for creating the group, in which a rank that dies is not noticed."""

COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""Timeout of collectives in the group: a rank may write for a long time. A dead rank is noticed at once."""


@dataclass
class _AsyncSaves:
    """State that this process keeps from one save to the next.

    `world` is the default group that existed when `group` was created; `pool` holds staging buffers for reuse.
    """

    group: Any = None
    world: Any = None
    current: SaveHandle | None = None
    pool: list[torch.Tensor] = field(default_factory=list)


_process = _AsyncSaves()


class SaveHandle:
    """Handle of an asynchronous save on this rank. Every rank has one.

    `save(..., async_=True)` returns it.

    Example::

        handle = save(state_dict, "checkpoints", step=100, async_=True)
        ...
        saved = handle.wait()
    """

    def __init__(self, telling: SaveProgress, target: str = "") -> None:
        self._save_progress = telling
        self._target = target
        self._called_at = _user_line()
        self._lost_peer = ""
        # Set by the saving thread, last. What it writes before, `_saved` and `_failure`, may be read by any thread
        # after it.
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        self._loss_reported = False
        self.error_retrieved = False

    @property
    def done(self) -> bool:
        """Return True if the save has ended, with or without an error.

        Example::

            handle = save(state_dict, "checkpoints", step=200, async_=True)
            handle.wait()
            handle.done  # True
        """
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Return the error of the save; None while it runs and after success."""
        return self._failure

    @property
    def progress(self) -> Any:  # noqa: ANN401 - a telemetry.CheckpointSave
        """Return a snapshot of this rank's progress, a `CheckpointSave`."""
        return self._save_progress.snapshot()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait for the save to end, and return the checkpoint.

        Raises the error of the save, and TimeoutError after `timeout` seconds.

        Example::

            handle = save(state_dict, "checkpoints", step=200, async_=True)
            ...  # train on
            handle.wait(timeout=60).step  # 200
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self._save_progress.folder} did not finish within {timeout:g} s")
        # Also if the user catches the error below and ignores it. The next save does not raise it again.
        self.error_retrieved = True
        self._save_progress.withdraw()
        if self._failure is not None:
            raise self._failure
        assert self._saved is not None
        return self._saved

    def __repr__(self) -> str:
        progress = self.progress
        if progress.phase == "writing" and progress.total:
            return f"<save of {progress.name} to {progress.folder}: writing, {progress.written / progress.total:.0%}>"
        return f"<save of {progress.name or 'a checkpoint'} to {progress.folder}: {progress.error or progress.phase}>"

    def _describe_loss(self, cells: Mapping[str, int]) -> str:
        """Describe the failed save. `cells` has the numbers of the cells by file."""
        if not self._lost_peer:
            return f"{self!r}. Existing checkpoints are unchanged."
        (file, line), progress = self._called_at, self.progress
        location = f"Cell In[{cells[file]}]" if file in cells else Path(file).name
        return (
            f"the save of {progress.name or self._target or 'a checkpoint'} to {progress.folder}, begun at line {line} "
            f"of {location}, was lost: {self._lost_peer}. Existing checkpoints are unchanged."
        )

    def _run(self, work: Callable[[], Saved]) -> None:
        _lower_priority()
        try:
            self._saved = work()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`, or by the next save
            self._failure = error
        finally:
            self._ended.set()


def _user_line() -> tuple[str, int]:
    """Return the file and the line of the caller outside of this package."""
    # Walk up the stack until a frame that is not of this package: the user's cell or script.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _lower_priority() -> None:
    """Lower the priority of this thread, so that training gets the CPU first.

    Linux has a niceness per thread, which threads started by it inherit. Other systems do nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def join_previous(*, refuse: bool) -> None:
    """Wait for the previous asynchronous save to end. A collective.

    With `refuse`, raise instead if it is still running. Raises `CheckpointError` on every rank if the previous
    save failed on some rank and its error was not retrieved there. A rank that only lost another one writes so to
    stderr if it was not said before.
    """
    # The previous save may have ended differently on every rank, and one rank may have none. So nothing is raised
    # before the collective below.
    handle, busy, failed = _process.current, "", ""
    if handle is not None:
        if refuse and not handle.done:
            busy = f"{handle!r} is still running; wait for it, or save without busy='refuse'"
        else:
            # Without a timeout: the save ends by itself, or with an error when a connection breaks.
            handle._ended.wait()
            if handle._lost_peer:
                if message := lost_saves():
                    sys.stderr.write(f"rankbook: {message}\n")
            elif handle.error is not None and not handle.error_retrieved:
                failed = f"the previous asynchronous save failed: {handle.error}"
    # Every rank takes part in this collective before it raises, and all ranks then raise or none does.
    # One collective for both questions, see `control_collectives.all_min`: each result is the minimum over all ranks,
    # so True only if it is True on all of them.
    have_group, all_ready = all_min(_has_group(), not (busy or failed))
    if not have_group and all_ready:  # some rank lacks the group: `_ensure_group` creates a new one on all ranks
        _destroy_group()
    if not busy:
        if handle is not None:
            handle._save_progress.withdraw()
        _process.current = None
    if not all_ready:
        raise CheckpointError(_lowest_rank_message(busy or failed))


def _lowest_rank_message(problem: str) -> str:
    """Return the error text of the lowest rank that has one, on all ranks. A collective."""
    # A second collective, only in the case of an error. All ranks come here, because `all_ready` is the same on all.
    return next(str(message) for message in gather_objects(problem) if message)


def current_save() -> SaveHandle | None:
    """Return the asynchronous save that is running, or whose error was not retrieved; None otherwise."""
    handle = _process.current
    return (
        handle
        if handle is not None and not (handle.done and (handle.error_retrieved or handle.error is None))
        else None
    )


def lost_saves(cells: Mapping[str, int] | None = None) -> str:
    """Return a message about a failed save whose error was not retrieved; "" if there is none.

    The message is returned only once per save. `cells` has the numbers of the cells by file.
    """
    handle = _process.current
    if handle is None or handle.error is None or handle.error_retrieved or handle._loss_reported:
        return ""
    handle._loss_reported = True
    # A rank that only lost another one has nothing to complain about in the next save.
    handle.error_retrieved = bool(handle._lost_peer)  # otherwise the next save raises it
    return handle._describe_loss(cells or {})


def wait_for_saves(timeout: float | None = None) -> bool:
    """Wait until no asynchronous save is running. Return False if `timeout` seconds pass before."""
    return _process.current is None or _process.current._ended.wait(timeout)


def start_save(
    contents: LocalState,
    progress: SaveProgress,
    run_save: Callable[[LocalState, Any], Saved],
    *,
    target: str,
    copy_replicas: bool,
) -> SaveHandle:
    """Copy what this rank writes and run `run_save(copies, group)` in a thread. A collective.

    `target` is the name of the checkpoint, "" if it is not yet known.

    With `copy_replicas`, replicas are copied too, since the plan may choose any of them. If this rank cannot copy, the
    save fails on all ranks.
    """
    # Created here and not in the thread: it records the line of the user's cell that called `save`.
    handle = SaveHandle(progress, target)
    try:
        _ensure_group()
    except BaseException as error:
        progress.fail(f"{type(error).__name__}: {error}")
        progress.withdraw()  # the error is raised here, so telemetry need not show it
        raise
    buffers: list[torch.Tensor] = []
    failure: BaseException | None = None
    try:
        progress.enter("staging")
        staged = _stage(contents, copy_replicas, buffers)
    except BaseException as error:  # noqa: BLE001 - raised in the plan, on every rank
        # The thread is started nevertheless: the threads of the other ranks wait for this rank in the plan.
        staged, failure = FailedStaging(error), error

    def work() -> Saved:
        # The group of this save: `_process.group` may be replaced before this function ends.
        group = _process.group
        try:
            return run_save(staged, group)
        except (CheckpointError, KeyboardInterrupt):  # raised on all ranks; the group is intact
            raise
        except BaseException as error:
            if isinstance(error, CollectiveAborted):
                handle._lost_peer = getattr(group, "cause", None) or str(error)
            del group
            # The connections close with the last reference to the group, and the frames of the traceback hold one.
            traceback.clear_frames(error.__traceback__)
            _destroy_group()
            raise
        finally:
            # Also after a failure. The next save has tensors of the same sizes.
            _process.pool.extend(buffers)

    thread = threading.Thread(target=handle._run, args=(work,), name="rankbook-checkpoint")
    _process.current = handle
    try:
        thread.start()
    except BaseException:
        # An interrupt may arrive while `start` waits for the thread. If the thread runs, it owns the save and the
        # group.
        if thread.ident is None:
            _process.current = None
            _destroy_group()
        raise
    # An interrupt ends the user's cell at once, and so does an abort, which a signal raises here once.
    if isinstance(failure, CollectiveAborted) or (failure is not None and not isinstance(failure, Exception)):
        raise failure
    return handle


def _has_group() -> bool:
    # A group of an earlier default group is dead, for example after a restart of a rank.
    return _process.group is not None and _process.world is dist.group.WORLD


def _ensure_group() -> None:
    """Wait for all ranks in the saving group, and create the group if this rank has none. A collective.

    `join_previous` has made sure that either all ranks have the group or none has. A rank that fails here leaves the
    group, which ends the waiting of the others.
    """
    if not dist.is_initialized():
        return
    try:
        if _process.group is None:
            # the short timeout applies to the creation only: see GROUP_CREATION_TIMEOUT and COLLECTIVE_TIMEOUT
            _process.group, _process.world = (
                dist.new_group(backend="gloo", timeout=GROUP_CREATION_TIMEOUT),
                dist.group.WORLD,
            )
            _set_pg_timeout(COLLECTIVE_TIMEOUT, _process.group)
            if hasattr(_process.group, "background"):  # a notebook's ranks
                _process.group.background = True
        # No rank passes this point before all have reached it.
        dist.all_reduce(torch.zeros(1, device="cpu"), group=_process.group)
    except BaseException:
        _destroy_group()
        raise


def _destroy_group() -> None:
    """Destroy this rank's end of the group, so that no other rank waits in it."""
    # Forget it first, so that a failure below leaves no half-destroyed group behind.
    group, _process.group, _process.world = _process.group, None, None
    if group is not None and dist.is_initialized():
        # In a notebook, dropping the reference to the group would not close its connections.
        if hasattr(group, "abort_with_cause"):
            group.abort_with_cause("a rank aborted the save")
        with contextlib.suppress(ValueError):  # destroyed together with its default group
            dist.destroy_process_group(group)


def _stage(contents: LocalState, copy_replicas: bool, buffers: list[torch.Tensor]) -> LocalState:
    """Return a copy of the state that the caller cannot change.

    The buffers that hold the copies are appended to `buffers`. Tensors that this rank will not write are not copied.
    """
    copies: list[LocalTensor] = []
    devices: set[torch.device] = set()
    for tensor in contents.tensors:
        if not (tensor.is_main or copy_replicas) or not tensor.nbytes:
            # Only its metadata is used: another rank writes this tensor, or it has no elements.
            copies.append(tensor)
            continue
        # One buffer per tensor. Pinned memory lets the device copy in the background, and allocating it takes long, so
        # buffers are kept for the next save.
        buffer = _buffer(tensor.nbytes)
        buffers.append(buffer)
        # A view of the bytes with the tensor's dtype and shape. Buffers of torch are aligned for every dtype.
        copy = buffer[: tensor.nbytes].view(tensor.data.dtype).view(tensor.data.shape)
        copy.copy_(tensor.data.detach(), non_blocking=True)
        copies.append(replace(tensor, data=copy))
        if tensor.data.is_cuda:
            devices.add(tensor.data.device)
    _process.pool.clear()  # the remaining buffers have sizes that are not needed now
    staged = contents.snapshot(copies, is_coordinator=not dist.is_initialized() or dist.get_rank() == 0)
    # The copies from a device are asynchronous: they must end before the caller changes the tensors. A model may be
    # spread over several devices, and without an argument only the current one would be waited for.
    for device in devices:
        torch.cuda.synchronize(device)
    return staged


def _buffer(size: int) -> torch.Tensor:
    """Take a buffer of at least `size` bytes from the pool, or allocate one: pinned if CUDA is available."""
    for number, buffer in enumerate(_process.pool):
        # A buffer at most a quarter larger than needed. Sizes rarely change between saves.
        if size <= buffer.numel() <= size + size // 4:
            return _process.pool.pop(number)
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def _write_lost_error() -> None:
    """Write an error that was not retrieved to stderr. Called at exit, after the threads have ended."""
    handle = _process.current
    if handle is not None and handle.error is not None and not handle.error_retrieved:
        sys.stderr.write(f"rankbook: {handle!r}\n")


def _reset_in_child() -> None:
    """Forget the running save in a forked child, which does not have the thread.

    The child keeps the group: destroying it would close the parent's connections.
    """
    _process.current = None


# Threads that are not daemons are joined before exit handlers run, so a save that is under way ends first.
atexit.register(_write_lost_error)
os.register_at_fork(after_in_child=_reset_in_child)
