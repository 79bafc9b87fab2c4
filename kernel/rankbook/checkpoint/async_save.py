"""Save asynchronously: stage copies of the data and write them in a background thread while training continues.

Theory of operation
===================

The thread that calls `save` runs, on every rank: `join_previous`, which waits for the previous save and raises its
error; `_meet`, in which the ranks meet in the saving group; and `_staged`, which copies the data to be written. Then it
starts the thread `rankbook-checkpoint` and returns a `SaveHandle`. The thread plans, writes and commits
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
it on every rank. A rank that cannot take part, or whose group breaks, destroys its group at once (`_let_go`): the
closed connections end the waiting of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rankbook.checkpoint.local_state import FailedStaging, LocalState, LocalTensor
from rankbook.checkpoint.progress import SaveProgress
from rankbook.checkpoint.state_dict.replicas import control_device
from rankbook.errors import CheckpointingException

if TYPE_CHECKING:
    from rankbook.checkpoint.saving import Saved

NICENESS = 8
"""Niceness of the save thread, added to that of the process: a tenth of a core that training wants all of."""

MEETING = timedelta(seconds=60)
"""Timeout for creating the group, in which a rank that dies is not noticed."""

PATIENCE = timedelta(hours=6)
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

    `save(..., async_=True)` returns it:

        handle = save(state_dict, "checkpoints", step=100, async_=True)
        ...
        saved = handle.wait()
    """

    def __init__(self, telling: SaveProgress) -> None:
        self._telling = telling
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        self._announced = False
        self.heard = False

    @property
    def done(self) -> bool:
        """Return True if the save has ended, with or without an error."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Return the error of the save; None while it runs and after success."""
        return self._failure

    @property
    def progress(self) -> Any:  # noqa: ANN401 - a telemetry.CheckpointSave
        """Return a snapshot of this rank's progress, a `CheckpointSave`."""
        return self._telling.now()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait for the save to end, and return the checkpoint.

        Raises the error of the save, and TimeoutError after `timeout` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self._telling.folder} has not ended within {timeout:g} s")
        self.heard = True
        self._telling.withdraw()
        if self._failure is not None:
            raise self._failure
        assert self._saved is not None
        return self._saved

    def __repr__(self) -> str:
        progress = self.progress
        if progress.phase == "writing" and progress.total:
            return f"<save of {progress.name} to {progress.folder}: writing, {progress.written / progress.total:.0%}>"
        return f"<save of {progress.name or 'a checkpoint'} to {progress.folder}: {progress.error or progress.phase}>"

    def _run(self, work: Callable[[], Saved]) -> None:
        _step_back()
        try:
            self._saved = work()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`, or by the next save
            self._failure = error
        finally:
            self._ended.set()


def _step_back() -> None:
    """Lower the priority of this thread, so that training gets the CPU first.

    Linux has a niceness per thread, which threads started by it inherit. Other systems do nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def join_previous(*, refuse: bool) -> None:
    """Wait for the previous asynchronous save to end. A collective.

    With `refuse`, raise instead if it is still running. Raises `CheckpointingException` on every rank if the previous
    save failed and its error was not retrieved on some rank.
    """
    handle, busy, failed = _process.current, "", ""
    if handle is not None:
        if refuse and not handle.done:
            busy = f"{handle!r} is still under way: wait for it, or save without busy='refuse'"
        else:
            handle._ended.wait()
            if handle.error is not None and not handle.heard:
                failed = f"the save before this one failed in the background: {handle.error}"
    # Every rank takes part in this collective before it raises, and all ranks then raise or none does.
    have_group, no_complaint = _least(_has_group(), not (busy or failed))
    if not have_group and no_complaint:  # some rank lacks the group: `_meet` creates a new one on all ranks
        _let_go()
    if not busy:
        if handle is not None:
            handle._telling.withdraw()
        _process.current = None
    if not no_complaint:
        raise CheckpointingException(_first(busy or failed))


def _least(*values: bool) -> list[bool]:
    """Return the logical AND over all ranks of every value. A collective."""
    if not dist.is_initialized():
        return list(values)
    flags = torch.tensor(values, dtype=torch.int32, device=control_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in flags.tolist()]


def _first(complaint: str) -> str:
    """Return the complaint of the lowest rank that has one, on all ranks. A collective."""
    if not dist.is_initialized():
        return complaint
    complaints: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    return next(message for message in complaints if message)


def current_save() -> SaveHandle | None:
    """Return the asynchronous save that is running, or whose error was not retrieved; None otherwise."""
    handle = _process.current
    return handle if handle is not None and not (handle.done and (handle.heard or handle.error is None)) else None


def lost_saves() -> str:
    """Return a message about a failed save whose error was not retrieved; "" if there is none.

    The message is returned only once per save.
    """
    handle = _process.current
    if handle is None or handle.error is None or handle.heard or handle._announced:
        return ""
    handle._announced = True
    return f"rankbook: {handle!r}. What was saved before is untouched."


def wait_for_saves(timeout: float | None = None) -> bool:
    """Wait until no asynchronous save is running. Return False if `timeout` seconds pass before."""
    return _process.current is None or _process.current._ended.wait(timeout)


def start_save(
    contents: LocalState, telling: SaveProgress, perform: Callable[[LocalState, Any], Saved], *, everything: bool
) -> SaveHandle:
    """Copy what this rank writes and run `perform(copies, group)` in a thread. A collective.

    With `everything`, replicas are copied too, since the plan may choose any of them. If this rank cannot copy, the
    save fails on all ranks.
    """
    handle = SaveHandle(telling)
    try:
        _meet()
    except BaseException as error:
        telling.failed(f"{type(error).__name__}: {error}")
        telling.withdraw()  # the error is raised here, so telemetry need not show it
        raise
    taken: list[torch.Tensor] = []
    failure: BaseException | None = None
    try:
        telling.enter("staging")
        staged = _staged(contents, everything, taken)
    except BaseException as error:  # noqa: BLE001 - raised in the plan, on every rank
        staged, failure = FailedStaging(error), error

    def work() -> Saved:
        try:
            return perform(staged, _process.group)
        except (CheckpointingException, KeyboardInterrupt):  # raised on all ranks; the group is intact
            raise
        except BaseException as error:
            # The connections close with the last reference to the group, and the frames of the traceback hold one.
            traceback.clear_frames(error.__traceback__)
            _let_go()
            raise
        finally:
            _process.pool.extend(taken)

    thread = threading.Thread(target=handle._run, args=(work,), name="rankbook-checkpoint")
    _process.current = handle
    try:
        thread.start()
    except BaseException:
        if thread.ident is None:
            _process.current = None
            _let_go()
        raise
    if failure is not None and not isinstance(failure, Exception):  # an interrupt ends the user's cell at once
        raise failure
    return handle


def _has_group() -> bool:
    return _process.group is not None and _process.world is dist.group.WORLD


def _meet() -> None:
    """Wait for all ranks in the saving group, and create the group if this rank has none. A collective.

    `join_previous` has made sure that either all ranks have the group or none has. A rank that fails here leaves the
    group, which ends the waiting of the others.
    """
    if not dist.is_initialized():
        return
    try:
        if _process.group is None:
            # the short timeout applies to the creation only: see MEETING and PATIENCE
            _process.group, _process.world = dist.new_group(backend="gloo", timeout=MEETING), dist.group.WORLD
            _set_pg_timeout(PATIENCE, _process.group)
            if hasattr(_process.group, "background"):  # a notebook's ranks
                _process.group.background = True
        dist.all_reduce(torch.zeros(1), group=_process.group)
    except BaseException:
        _let_go()
        raise


def _let_go() -> None:
    """Destroy this rank's end of the group, so that no other rank waits in it."""
    group, _process.group, _process.world = _process.group, None, None
    if group is not None and dist.is_initialized():
        if hasattr(group, "break_off"):  # a notebook's ranks: dropping the reference would not close the connections
            group.break_off("a rank gave up the save")
        with contextlib.suppress(ValueError):  # destroyed together with its default group
            dist.destroy_process_group(group)


def _staged(contents: LocalState, everything: bool, taken: list[torch.Tensor]) -> LocalState:
    """Return a copy of the state that the caller cannot change.

    The buffers that hold the copies are appended to `taken`. Tensors that this rank will not write are not copied.
    """
    copies: list[LocalTensor] = []
    for tensor in contents.tensors:
        if not (tensor.is_main or everything) or not tensor.nbytes:
            copies.append(tensor)
            continue
        buffer = _buffer(tensor.nbytes)
        taken.append(buffer)
        copy = buffer[: tensor.nbytes].view(tensor.data.dtype).view(tensor.data.shape)
        copy.copy_(tensor.data.detach(), non_blocking=True)
        copies.append(replace(tensor, data=copy))
    _process.pool.clear()  # the remaining buffers have sizes that are not needed now
    staged = contents.frozen(copies, is_coordinator=not dist.is_initialized() or dist.get_rank() == 0)
    # the copies from a device are asynchronous: they must end before the caller changes the tensors
    if torch.cuda.is_available() and any(tensor.data.is_cuda for tensor in contents.tensors):
        torch.cuda.synchronize()
    return staged


def _buffer(size: int) -> torch.Tensor:
    """Take a buffer of at least `size` bytes from the pool, or allocate one: pinned if CUDA is available."""
    for number, buffer in enumerate(_process.pool):
        if size <= buffer.numel() <= size + size // 4:
            return _process.pool.pop(number)
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _last_words() -> None:
    """Write an error that was not retrieved to stderr. Called at exit, after the threads have ended."""
    handle = _process.current
    if handle is not None and handle.error is not None and not handle.heard:
        sys.stderr.write(f"rankbook: {handle!r}\n")


def _in_child() -> None:
    """Forget the running save in a forked child, which does not have the thread.

    The child keeps the group: destroying it would close the parent's connections.
    """
    _process.current = None


atexit.register(_last_words)
os.register_at_fork(after_in_child=_in_child)
