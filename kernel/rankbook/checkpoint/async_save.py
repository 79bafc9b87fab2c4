"""Saving while training goes on.

Owns: the copies that training cannot change, the thread that writes them, the process group that this thread has for
itself, and the handle. Refuses: what a save does (`saving.py`).

The thread talks to the other ranks' threads through a gloo group of its own: in the training's group its collectives
would meet the training's. A group lives as long as all ranks have it; where one has not (its process is new), all make
a new one.

On a notebook's ranks an error in a cell breaks the training's groups off; the saving group is marked as `background`,
and stays as it is. So that no rank leaves `save` while another may still fail in it, the ranks meet in the saving group
once they have agreed to save: after that an error of one rank's cell finds all of them with a thread that saves.

A rank that has begun to save comes to the plan whatever happens, for the others' threads wait there for it. One that
cannot, or whose group breaks, lets go of it at once: that is what ends the waiting of the others.
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
"""Of the thread that saves, above the process's own: a tenth of a processor that training wants all of."""

MEETING = timedelta(seconds=60)
"""How long a rank waits for the others to make the group: one that dies meanwhile is not noticed there."""

PATIENCE = timedelta(hours=6)
"""How long a rank waits for the others: one may write for long. One that has died is noticed at once."""


@dataclass
class _AsyncSaves:
    """What this process keeps from one save to the next. `world`: the default group when `group` was made."""

    group: Any = None
    world: Any = None
    current: SaveHandle | None = None
    pool: list[torch.Tensor] = field(default_factory=list)


_process = _AsyncSaves()


class SaveHandle:
    """A save that goes on in the background, on this rank. Every rank has one."""

    def __init__(self, telling: SaveProgress) -> None:
        self._telling = telling
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        self._announced = False
        self.heard = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it failed with; None while it goes on, and where it did not."""
        return self._failure

    @property
    def progress(self) -> Any:  # noqa: ANN401 - a telemetry.CheckpointSave
        """How far this rank is."""
        return self._telling.now()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait for the end. Raises what the save failed with, and TimeoutError after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self._telling.folder} has not ended within {timeout:g} s")
        self.heard = True
        self._telling.withdraw()
        if self._failure is not None:
            raise self._failure
        assert self._saved is not None
        return self._saved

    def __repr__(self) -> str:
        told = self.progress
        if told.phase == "writing" and told.total:
            return f"<save of {told.name} to {told.folder}: writing, {told.written / told.total:.0%}>"
        return f"<save of {told.name or 'a checkpoint'} to {told.folder}: {told.error or told.phase}>"

    def _run(self, work: Callable[[], Saved]) -> None:
        _step_back()
        try:
            self._saved = work()
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits, or at the next save
            self._failure = error
        finally:
            self._ended.set()


def _step_back() -> None:
    """Let training have the processor first: Linux has a niceness for each thread, which those it starts inherit."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def join_previous(*, refuse: bool) -> None:
    """Have the save before this one be over: wait for it, or with `refuse` raise while it is not. A collective.

    Raises `CheckpointingException` on every rank if it failed and somebody has not been told.
    """
    handle, busy, failed = _process.current, "", ""
    if handle is not None:
        if refuse and not handle.done:
            busy = f"{handle!r} is still under way: wait for it, or save without busy='refuse'"
        else:
            handle._ended.wait()
            if handle.error is not None and not handle.heard:
                failed = f"the save before this one failed in the background: {handle.error}"
    have_group, no_complaint = _least(_has_group(), not (busy or failed))
    if not have_group and no_complaint:
        _let_go()
    if not busy:
        if handle is not None:
            handle._telling.withdraw()
        _process.current = None
    if not no_complaint:
        raise CheckpointingException(_first(busy or failed))


def _least(*values: bool) -> list[bool]:
    """Which of these hold on all ranks."""
    if not dist.is_initialized():
        return list(values)
    told = torch.tensor(values, dtype=torch.int32, device=control_device())
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return [bool(each) for each in told.tolist()]


def _first(complaint: str) -> str:
    """The first rank's complaint that there is, the same on all."""
    if not dist.is_initialized():
        return complaint
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, complaint)
    return next(each for each in told if each)


def current_save() -> SaveHandle | None:
    """The save in the background that is under way, or that nobody has been told the end of; None without one."""
    handle = _process.current
    return handle if handle is not None and not (handle.done and (handle.heard or handle.error is None)) else None


def lost_saves() -> str:
    """Return the words for a save that failed and of which nobody has heard; "" without one, and the second time."""
    handle = _process.current
    if handle is None or handle.error is None or handle.heard or handle._announced:
        return ""
    handle._announced = True
    return f"rankbook: {handle!r}. What was saved before is untouched."


def wait_for_saves(timeout: float | None = None) -> bool:
    """Wait until nothing is being saved in the background. Whether that is so, after `timeout` seconds."""
    return _process.current is None or _process.current._ended.wait(timeout)


def start_save(
    contents: LocalState, telling: SaveProgress, perform: Callable[[LocalState, Any], Saved], *, everything: bool
) -> SaveHandle:
    """Copy what this rank writes, and have `perform(copies, group)` run in a thread. A collective.

    `everything`: replicas too may be chosen to be written. Where this rank cannot copy, all handles fail for it.
    """
    handle = SaveHandle(telling)
    try:
        _meet()
    except BaseException as error:
        telling.failed(f"{type(error).__name__}: {error}")
        telling.withdraw()  # it is raised here
        raise
    taken: list[torch.Tensor] = []
    failure: BaseException | None = None
    try:
        telling.enter("staging")
        staged = _staged(contents, everything, taken)
    except BaseException as error:  # noqa: BLE001 - raised in the plan, where every rank learns of it
        staged, failure = FailedStaging(error), error

    def work() -> Saved:
        try:
            return perform(staged, _process.group)
        except (CheckpointingException, KeyboardInterrupt):  # told by a rank to all
            raise
        except BaseException as error:
            # the frames of the error hold the group, whose connections close with the last that holds it
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
    if failure is not None and not isinstance(failure, Exception):  # an interrupt
        raise failure
    return handle


def _has_group() -> bool:
    return _process.group is not None and _process.world is dist.group.WORLD


def _meet() -> None:
    """Meet in the group of the saving threads, which is made where `settle` found that a rank has none. A collective.

    A rank that leaves it with an error ends the waiting of the others.
    """
    if not dist.is_initialized():
        return
    try:
        if _process.group is None:
            _process.group, _process.world = dist.new_group(backend="gloo", timeout=MEETING), dist.group.WORLD
            _set_pg_timeout(PATIENCE, _process.group)
            if hasattr(_process.group, "background"):  # a notebook's ranks
                _process.group.background = True
        dist.all_reduce(torch.zeros(1), group=_process.group)
    except BaseException:
        _let_go()
        raise


def _let_go() -> None:
    """Leave the group, so that nobody waits in it for this rank."""
    group, _process.group, _process.world = _process.group, None, None
    if group is not None and dist.is_initialized():
        if hasattr(group, "break_off"):  # on a notebook's ranks its connections do not end with the last reference
            group.break_off("a rank gave up the save")
        with contextlib.suppress(ValueError):  # it went with the default group that it was made beside
            dist.destroy_process_group(group)


def _staged(contents: LocalState, everything: bool, taken: list[torch.Tensor]) -> LocalState:
    """The contents, of which the caller can change nothing. The buffers that they lie in come into `taken`."""
    copies: list[LocalTensor] = []
    for each in contents.tensors:
        if not (each.is_main or everything) or not each.nbytes:
            copies.append(each)
            continue
        buffer = _buffer(each.nbytes)
        taken.append(buffer)
        copy = buffer[: each.nbytes].view(each.data.dtype).view(each.data.shape)
        copy.copy_(each.data.detach(), non_blocking=True)
        copies.append(replace(each, data=copy))
    _process.pool.clear()  # of other sizes than are needed now
    staged = contents.frozen(copies, is_coordinator=not dist.is_initialized() or dist.get_rank() == 0)
    if torch.cuda.is_available() and any(each.data.is_cuda for each in contents.tensors):
        torch.cuda.synchronize()
    return staged


def _buffer(size: int) -> torch.Tensor:
    """One from the pool that fits without waste, or a new one: pinned where a device copies into it."""
    for number, each in enumerate(_process.pool):
        if size <= each.numel() <= size + size // 4:
            return _process.pool.pop(number)
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _last_words() -> None:
    """At the end of the process, when its threads have ended: say what nobody has asked for."""
    handle = _process.current
    if handle is not None and handle.error is not None and not handle.heard:
        sys.stderr.write(f"rankbook: {handle!r}\n")


def _in_child() -> None:
    """A fork has the handle, and not the thread. It keeps the group: to end it would end the parent's."""
    _process.current = None


atexit.register(_last_words)
os.register_at_fork(after_in_child=_in_child)
