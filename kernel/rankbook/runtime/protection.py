"""Protection of training state: snapshots in shared memory after optimizer steps, and the return to one of them.

`protect` switches it on. After every N-th step each rank copies what it holds of the prepared models, optimizers,
schedulers, the scaler, registered objects, random states and loader positions. `snapshot_files.py` has the files.

Which moment. A snapshot is taken at the end of `optimizer.step`, where the random state is that in which the next batch
begins. With several optimizers, it is taken when all of them have stepped. A scheduler steps after its optimizer, so
its step updates the snapshot (`updates` of the version); the tensors of models and optimizers are not copied again.

Some loops are ahead of the step. One that reads the next batch before `optimizer.step` has another position than that
of the batches that the step has used, so the positions of loaders are noted at the backward pass. And a scheduler may
step at the beginning of the next iteration, when its loader has delivered the next batch. That is part of the next
step, which is repeated with it.

Which copy. The main thread copies the tensors into mapped memory before it goes on. A thread could copy during the next
forward and backward pass, if nothing but the optimizer changed the weights. But a loop may exchange them for their
average and evaluate, or clip them, and nobody sees a change through `parameter.data`: the version counter of a tensor
does not count it. Such a copy would have the values of two moments, and only a heal would show it. Where all cores
compute, the thread would also gain nothing: 100 MB take 5.5 ms of a core's time, of which 4.7 ms are the `memcpy`.

Two generations are written in turn. While a rank writes one, all ranks have the other one complete: `wait_for_peers`
makes sure of it, and the collectives of a step do so before. With several hosts, the ranks tell one another which
generations are complete, and the snapshot is copied to another host (snapshot_copies.py).

Restoring writes into the tensors that exist. So models, optimizers and meshes stay the same objects.
"""

from __future__ import annotations

import gc
import io
import mmap
import pickle
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar

import cloudpickle
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rankbook import snapshot_files
from rankbook.checkpoint.state_dict.models import has_divided_state, inner_optimizers
from rankbook.checkpoint.state_dict.state_dicts import local_part
from rankbook.control_collectives import gather_objects as gather
from rankbook.errors import InvalidArgument
from rankbook.runtime import optimizer as optimizers
from rankbook.runtime import prepared
from rankbook.runtime.data.rng import random_state, restore_random_state
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.memory import collect_left_over
from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.snapshot_copies import (
    Announcement,
    SnapshotCopies,
    choose_generation,
    fetch_missing,
    gather_hosts,
    latest_complete,
    view_bytes,
)
from rankbook.runtime.strategies.base import bucket_indices, set_buckets
from rankbook.snapshot_files import SnapshotFile, SnapshotHeader, SnapshotPlace, SnapshotVersion, TrainingPlace

_T = TypeVar("_T")
PEER_TIMEOUT = 60.0
"""Seconds to wait for the previous snapshot of the other ranks."""
_STALE_AFTER = 100
"""Steps of one optimizer after which another one that has not stepped does not count any more."""
_SHARDED = "sharded"
"""Marks the local part of a DTensor in an optimizer's state."""


class ProtectionReport(TypedDict):
    """State of the protection. `every` is 0 and `place` None if it is off, `step` None if there is no snapshot yet."""

    every: int
    step: int | None
    size: int
    unprotected: dict[str, str]
    place: TrainingPlace | None


class RestoredSnapshot(TypedDict):
    """Result of a restore: the step that all ranks are at now, and the number of steps that this rank has lost.

    `refused` is the reason why nothing was restored; empty otherwise.
    """

    step: int
    lost: int
    refused: str


def check_interval(every: object) -> None:
    """Raise `InvalidArgument` if `every` is no number of steps; 0 stands for no protection."""
    if type(every) is not int or every < 0:
        raise InvalidArgument(f"expected a number of steps, 1 or more, got every={every!r}")


def protect(every: int) -> None:
    """Take a snapshot after every `every` steps, and one now; 0 ends the protection. Called on all ranks.

    Raises `InvalidArgument` if the process is no rank, for too little shared memory, and for an optimizer whose state
    is divided between the ranks.
    """
    check_interval(every)
    if every == 0:
        end()
        return
    for wrapper in prepared.registered("optimizer").values():
        if has_divided_state(wrapper.optimizer):
            raise InvalidArgument(
                "a ZeroRedundancyOptimizer cannot be protected, because every rank has the state of other parameters "
                "and a new process could not take the place of one; shard the model with FSDP2, or use save_state()"
            )
        if inner_optimizers(wrapper.optimizer):
            raise InvalidArgument(
                f"a {type(wrapper.optimizer).__name__} cannot be protected, because it keeps state in an optimizer "
                "that it wraps; use save() with its state_dict() in a ShardedObject"
            )
    if _active is not None:
        _active.every = every
        # As below: a rank that was restarted is not protected yet.
        _active.find_hosts(_active.latest.version if _active.latest is not None else None)
        _active.begin()
        return
    place = snapshot_files.this_place
    if place is None:
        raise InvalidArgument(
            "protection requires ranks of Rankbook: in a script, a process has no shared memory that outlives it; use "
            "save_state()"
        )
    snapshot_files.remove_rank(place.folder, place.rank)  # what a process before this one has left
    snapshots = RankSnapshots(place, every)
    snapshots.find_hosts(None)
    snapshots.begin()
    _activate(snapshots)


def end() -> None:
    """End the protection and free its memory."""
    global _active
    if _active is not None:
        _active.remove()
    elif (place := snapshot_files.this_place) is not None:
        # What a process before this one has left: a rank that was restarted need not be protected.
        snapshot_files.remove_rank(place.folder, place.rank)
    _active = optimizers.after_step = optimizers.after_scheduler = None
    window.before_backward = window.after_partner_ended = None


def _activate(snapshots: RankSnapshots) -> None:
    global _active
    _active = snapshots
    optimizers.after_step, optimizers.after_scheduler = snapshots.after_step, snapshots.update
    window.before_backward = snapshots.note_positions
    window.after_partner_ended = snapshots.end_pass


def after_load() -> None:
    """Take a snapshot of state that was loaded: the last one is of the state before."""
    for wrapper in prepared.registered("optimizer").values():
        wrapper.is_stepping = False
    if _active is not None:
        _active.is_restoring = False
        _active.begin()


def next_number() -> int:
    """Return the number of the last snapshot or step; 0 without protection. The ranks agree on the highest."""
    return _active.number if _active is not None else 0


def continue_numbers(number: int) -> None:
    """Count on from the highest number of all ranks, after they may have stopped at different steps."""
    if _active is not None:
        _active.continue_numbers(number)


def interval() -> int:
    """Return the number of steps from one snapshot to the next; 0 without protection."""
    return _active.every if _active is not None else 0


def set_interval(every: int) -> None:
    """Take a snapshot after every `every` steps from now on."""
    if _active is not None:
        _active.every = every


def models_in(version: SnapshotVersion) -> set[int]:
    """Return the serial numbers of the models in this rank's snapshot `version`."""
    state = _active.read(version) if _active is not None else None
    return set() if state is None else set(state["models"])


def report(namespace: Mapping[str, Any], hidden: Mapping[str, Any]) -> ProtectionReport:
    """Describe the protection, and the variables of `namespace` that it does not cover, with the reasons."""
    latest = _active.latest if _active is not None else None
    return ProtectionReport(
        every=_active.every if _active is not None else 0,
        step=latest.version.step if latest is not None else None,
        size=latest.size if latest is not None else 0,
        unprotected=find_unprotected(namespace, hidden),
        place=training_place(),
    )


def training_place() -> TrainingPlace | None:
    """Return where this rank is in the training; None without protection."""
    return _active.place() if _active is not None else None


class RankSnapshots:
    """The snapshots of this rank. `find_hosts` has to be called before the first one."""

    def __init__(self, place: SnapshotPlace, every: int) -> None:
        self.every = every
        self.latest: SnapshotHeader | None = None
        self._place = place
        self._peers = [rank for rank in range(place.world_size) if rank != place.rank]
        self._areas = [_Area(place, generation) for generation in snapshot_files.GENERATIONS]
        # The copies on other hosts; None if all ranks are on one.
        self._copies: SnapshotCopies | None = None
        # The versions of complete generations, with their second copies.
        self._complete: dict[int, SnapshotVersion] = {}
        self.number = 0
        # The number from which the intervals count, which all ranks share: that of the last `begin` or `restore`.
        self._first_number = 0
        self._serial = -1
        # The steps since the last round of the optimizers that take part, and those that the last round went without.
        self._counts: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakSet[AcceleratedOptimizer] = weakref.WeakSet()
        # The serial numbers of the optimizers that all ranks had at the last `begin` or `restore`, and the next one.
        self._shared: set[int] = set()
        self._next_serial = 0
        self._updates = 0
        # The steps of schedulers since the last step, also those of the next step, which are no updates.
        self._scheduled = 0
        # The updates since the last step that are ends of passes: not every step has one.
        self._ended_passes = 0
        # The updates that the last step had.
        self._usual_updates: int | None = None
        self._has_stepped = False
        # True while the last snapshot is of the current step.
        self._is_current = False
        self.is_restoring = False
        """True while a return to a snapshot changes the objects, and after one that did not end."""
        # The number of backward passes and the positions of loaders at the last step, and the loaders that it has read.
        self._progress: _Progress = (0, {})
        self._read: set[int] = set()
        # The loaders whose loops have called the last backward pass, None if that is not known.
        self._looping: set[int] | None = None
        # The positions and states of loaders at the backward pass, which the next snapshot contains.
        self._positions: dict[int, tuple[_Position, Any]] = {}

    # Called by prepared optimizers and schedulers

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Count a step of `optimizer`, and take a snapshot if it completes the N-th step of all."""
        self._is_current = False
        self._collect_garbage()
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if not self._is_round_complete():
            return
        if self._counts[optimizer] > 1:
            # It has waited in vain for another one. This step is the first of a round without that one.
            self._begin_round(self._counts)
            self._counts[optimizer] = 1
            if min(self._counts.values()) == 0:
                return
        self._begin_round(self._counts)
        self.number += 1
        before, self._progress = self._progress, _progress()
        if before[0] == self._progress[0]:  # the backward pass was not that of the Accelerator
            self._positions.clear()
            self._looping = None
        self._read = {
            serial
            for serial, at in self._progress[1].items()
            if before[1].get(serial) != at and (self._looping is None or serial in self._looping)
        }
        if self._has_stepped:
            self._usual_updates = self._updates - self._ended_passes
        elif self._usual_updates is None:
            self._usual_updates = len(prepared.registered("scheduler"))
        self._updates, self._scheduled, self._ended_passes, self._has_stepped = 0, 0, 0, True
        if (self.number - self._first_number) % self.every == 0:
            self.take()

    def update(self) -> None:
        """Store the state that a scheduler has changed after the step of the last snapshot."""
        self._scheduled += 1
        if self._has_begun():
            return
        self._updates += 1
        if self._is_current:
            self.take(only_update=True)

    def end_pass(self, position: object) -> None:
        """Store that the pass of the loader at `position` is over, although the loader has batches left."""
        loaders = prepared.registered("loader").items()
        serials = [serial for serial, item in loaders if getattr(item, "position", None) is position]
        if not serials:
            return
        # It may have delivered a batch since the last step, with which no step has begun.
        for serial in serials:
            self._positions.pop(serial, None)
        self._updates += 1
        self._ended_passes += 1
        if self._is_current:
            self.take(only_update=True)

    def note_positions(self) -> None:
        """Note the loaders whose loops run, and the positions of those that the next step may read.

        The positions are noted only if the step has a snapshot.
        """
        # A loop for an evaluation that has ended before is no part of the step. By their positions, which a loader of
        # `skip_first_batches` shares with the registered one.
        active = [getattr(loader, "position", loader) for loader in GradientState().dataloader_references]
        self._looping = {
            serial
            for serial, loader in prepared.registered("loader").items()
            if any(getattr(loader, "position", loader) is position for position in active)
        }
        if (self.number + 1 - self._first_number) % self.every == 0:
            loaders, (_, before) = prepared.registered("loader"), self._progress
            self._positions = {
                serial: (at, loaders[serial].state_dict())
                for serial, at in _positions().items()
                if serial in self._read or before.get(serial) != at
            }

    def _has_begun(self) -> bool:
        """Return True if a loader of the last step has delivered a batch since, or a backward pass has begun."""
        backwards, positions = _progress()
        return backwards != self._progress[0] or any(
            positions.get(serial) != self._progress[1].get(serial) for serial in self._read
        )

    def _is_round_complete(self) -> bool:
        """Return True if all optimizers have stepped since the last round that take part in the training.

        An optimizer that has not stepped since the protection began takes part until another one has made its second
        step, and one that has stepped until another one has made `_STALE_AFTER` more.
        """
        counts = dict(self._counts)
        most = max(counts.values())
        if most == 1 and self._find_unknown():
            gc.collect()  # the answer must not depend on when a rank frees an optimizer that nothing refers to
            counts |= dict.fromkeys(self._find_unknown(), 0)
        if most >= _STALE_AFTER:
            for each in [each for each, count in counts.items() if count == 0]:
                del self._counts[each], counts[each]
        return min(counts.values()) > 0

    def _find_unknown(self) -> list[AcceleratedOptimizer]:
        """Return the optimizers of all ranks that may take part, although they have not stepped yet."""
        return [
            each
            for serial, each in prepared.registered("optimizer").items()
            if (serial in self._shared or serial >= self._next_serial)
            and each not in self._counts
            and each not in self._idle
        ]

    def _note_shared(self, serials: Iterable[set[int]]) -> None:
        """Note which objects all ranks have, from the serial numbers of the objects of every rank."""
        self._shared, self._next_serial = set.intersection(*serials), snapshot_files.next_serial

    def _begin_round(self, stepping: Iterable[AcceleratedOptimizer]) -> None:
        """Begin a round in which the optimizers `stepping` take part; others do if they step, or if there are none."""
        self._counts = weakref.WeakKeyDictionary(dict.fromkeys(stepping, 0))
        others: Iterable[AcceleratedOptimizer] = prepared.registered("optimizer").values() if self._counts else ()
        self._idle = weakref.WeakSet(each for each in others if each not in self._counts)

    def continue_numbers(self, number: int) -> None:
        """Count on from `number`, the highest of all ranks, and begin the round anew, as the others do."""
        self.number = number
        self._counts = weakref.WeakKeyDictionary(dict.fromkeys(self._counts, 0))
        self._idle.clear()

    def stepping(self) -> list[AcceleratedOptimizer]:
        """Return the optimizers that take part in the training, as far as they have stepped."""
        return list(self._counts)

    def place(self) -> TrainingPlace:
        """Return where this rank is in the training."""
        wrappers = {
            serial: wrapper
            for serial, wrapper in prepared.registered("optimizer").items()
            if wrapper in self._counts or not wrapper.steps
        }
        return TrainingPlace(
            step=steps_made(),
            steps={serial: wrapper.steps for serial, wrapper in wrappers.items()},
            updates=self._scheduled,
            has_begun=self._has_begun(),
            is_mixed=self.is_restoring or any(wrapper.is_stepping for wrapper in wrappers.values()),
            snapshots=snapshot_files.read_own_headers(self._place),
        )

    # Snapshots

    def find_hosts(self, kept: SnapshotVersion | None) -> None:
        """Find out on which hosts the ranks are. Copies of others than the version `kept` are dropped. A collective."""
        hosts = gather_hosts(self._place)
        self._copies = SnapshotCopies(self._place, hosts, kept) if len(hosts) > 1 else None
        received = 0 if self._copies is None else self._copies.count_received(self._place.rank)
        for area in self._areas:
            area.ranks_here = next(len(ranks) for ranks in hosts if self._place.rank in ranks) + received

    def begin(self) -> None:
        """Take a snapshot outside of a step, if there is anything to protect. A collective."""
        # A rank may have been restarted since the others were protected. It may have prepared nothing yet, but takes a
        # snapshot with them: they wait for it before the next one.
        serials = set(prepared.registered("optimizer"))
        numbers, prepared_any, found = zip(*gather((self.number, self._has_objects(), serials)), strict=True)
        self._note_shared(found)
        self.number = self._first_number = max(numbers) + 1
        self._updates, self._scheduled, self._ended_passes, self._has_stepped = 0, 0, 0, False
        self._positions.clear()
        if any(prepared_any):
            self.take()
            self._progress, self._read = _progress(), set(prepared.registered("loader"))

    def _has_objects(self) -> bool:
        return bool(prepared.registered("optimizer") or prepared.registered("model"))

    def take(self, *, only_update: bool = False) -> None:
        """Copy the protected state into shared memory.

        With `only_update`, into the last generation, which has the tensors of models and optimizers already.
        """
        self._collect_garbage()
        state = {**collect(), "stepping": prepared.serials_of("optimizer", self._counts)}
        # Of loaders that have delivered more since the backward pass.
        now = _positions() if self._positions else {}
        state["others"] |= {serial: then for serial, (at, then) in self._positions.items() if now.get(serial) != at}
        content, tensors, main = _flatten(state)
        version = SnapshotVersion(self.number, self._updates, steps_made())
        generation = self._last_generation() if only_update else self._prepare(tensors)
        area = self._areas[generation]
        if only_update:  # an interrupt leaves the other generation, which all ranks have, as the last one
            others = [self._areas[number].file.header for number in self._complete if number != generation]
            self.latest = snapshot_files.read_header(others[0]) if others else None
            self._is_current = False
        try:
            self._complete.pop(generation, None)
            area.file.invalidate()
            start = area.write(tensors, first=main if only_update else 0)
            updates = self._updates - self._ended_passes
            is_final = not self._has_stepped or updates >= (self._usual_updates or 0)
            header = SnapshotHeader(version, time.time(), area.size, self.every, is_final)
            area.file.commit(header, content)
        except OSError as error:
            area.free()
            raise self._describe(error) from error
        if self._copies is not None:
            self._copies.exchange(header, content, area.data, start)
        self._complete[generation] = version
        self.latest, self._is_current = header, True

    def _collect_garbage(self) -> None:
        """Free what cells that were run again have left: objects, with all their memory, that a collection frees."""
        if (serial := snapshot_files.next_serial) != self._serial:
            collect_left_over()  # a rank would wait for an optimizer that only the other ranks have freed
            self._serial = serial

    def _prepare(self, tensors: list[torch.Tensor]) -> int:
        """Return the generation to overwrite, after all ranks have completed the other one, and allocate memory."""
        layout = _layout_of(tensors)
        if self._copies is None:
            generation = choose_generation(self._complete, self._wait_for_common())
            try:
                self._areas[generation].prepare(layout)
            except OSError as error:
                raise self._describe(error) from error
            return generation
        allocates = self._copies.allocates() or any(area.layout != layout for area in self._areas)
        _, size = _offsets_of(layout)
        announcements = gather(Announcement(self._complete, size, allocates))
        kept = latest_complete(announcements)
        generation = choose_generation(self._complete, kept)
        problem: InvalidArgument | None = None
        try:
            self._areas[generation].prepare(layout)
            self._copies.allocate(announcements, kept)
        except InvalidArgument as error:
            problem = error
        except OSError as error:
            problem = self._describe(error)
        # Before anything is sent: no rank may wait for data of one that has failed.
        if any(announcement.allocates for announcement in announcements):
            problems = gather(str(problem) if problem is not None else "")
            if text := next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), ""):
                raise InvalidArgument(text)
        return generation

    def _wait_for_common(self) -> SnapshotVersion | None:
        """Wait until all ranks have the last snapshot, or one after it. Return the newest one that all ranks have.

        That is an earlier one if others were interrupted before they had taken the last one.
        """
        if self.latest is None:
            return None
        last = self.latest.version
        peers = snapshot_files.wait_for_peers(self._place.folder, self._peers, last, timeout=PEER_TIMEOUT)
        return max(set(self._complete.values()).intersection(*peers), default=last)

    def _last_generation(self) -> int:
        assert self.latest is not None
        return next(number for number, version in self._complete.items() if version == self.latest.version)

    def _describe(self, error: OSError) -> InvalidArgument:
        return InvalidArgument(f"cannot write a snapshot into {self._place.folder}: {error.strerror}")

    def remove(self) -> None:
        """Remove the snapshots of this rank, and the copies that it keeps."""
        self._complete.clear()
        for area in self._areas:
            area.free()
        if self._copies is not None:
            self._copies.remove()

    # Restoring

    def restore(self, version: SnapshotVersion) -> RestoredSnapshot:
        """Return to the snapshot `version`, on all ranks or on none. A collective."""
        lost = max(0, self.number - version.number) + self._has_begun()
        if self.read(version) is None:
            self._areas[0].free()  # its file will be another one
        problem = fetch_missing(self._place, version)
        state = self.read(version) if not problem else None
        problem = problem or ("its snapshot does not exist any more" if state is None else find_difference(state))
        content = contents_of(state) if state is not None else SnapshotContents(set(), set(), {})
        answers = gather((problem, content))
        contents = [answer[1] for answer in answers]
        refused = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text), "")
        refused = refused or find_missing_object(contents)
        if refused or state is None:
            return RestoredSnapshot(step=0, lost=0, refused=refused)
        self.is_restoring = True
        try:
            restore_state(state)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # as in `collect_left_over`
            raise
        self.is_restoring = False
        for serial, wrapped in prepared.registered("model").items():
            set_buckets(wrapped, contents[0].buckets.get(serial))
        self._complete = {
            generation: version
            for generation, area in enumerate(self._areas)
            if (header := snapshot_files.read_header(area.file.header)) is not None and header.version == version
        }
        for generation, area in enumerate(self._areas):
            if generation in self._complete:
                self.latest = snapshot_files.read_header(area.file.header)
            else:  # of steps that are repeated now
                area.file.invalidate()
        assert self.latest is not None
        # As on all ranks. Some may have another one from a call of `protect` in which a rank has died.
        self.every = self.latest.every
        self.number = self._first_number = version.number
        self._updates, self._ended_passes = version.updates, 0
        self._scheduled = version.updates
        self._is_current = self._has_stepped = False
        self._positions.clear()
        self._note_shared(content.prepared for content in contents)
        self._begin_round(_optimizers_of(state["stepping"]))
        self._progress, self._read = _progress(), set(prepared.registered("loader"))
        self.find_hosts(version)
        if self._copies is not None:
            # Ranks may have moved: the second copies are made anew.
            self.begin()
        return RestoredSnapshot(step=version.step, lost=lost, refused="")

    def read(self, version: SnapshotVersion) -> dict[str, Any] | None:
        """Return the content of the snapshot `version`, None if there is none."""
        found = next((found for area in self._areas if (found := area.file.read(version)) is not None), None)
        return None if found is None else _unflatten(*found)


_active: RankSnapshots | None = None


def restore(version: SnapshotVersion, every: int) -> RestoredSnapshot:
    """Return to a snapshot, on a rank that has taken it or that replaces the one that has."""
    if _active is None:
        assert snapshot_files.this_place is not None
        _activate(RankSnapshots(snapshot_files.this_place, every))
    assert _active is not None
    return _active.restore(version)


class _Area:
    """Memory of one generation, with one view per tensor to copy to. `data` is all of it, as bytes."""

    def __init__(self, place: SnapshotPlace, generation: int) -> None:
        self.file = SnapshotFile(place.folder, place.rank, generation)
        self.size = 0
        self.ranks_here = 1
        """The number of ranks whose snapshots are in the memory of this host."""
        self.layout: _Layout = []
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._place = place
        self._views: list[torch.Tensor] = []
        self._offsets: list[int] = []

    def prepare(self, layout: _Layout) -> None:
        """Allocate memory for tensors of this layout. Raises `InvalidArgument` for too little memory, and OSError."""
        if layout == self.layout and self._views:
            return
        offsets, size = _offsets_of(layout)
        # The other generation is allocated at the next step.
        snapshot_files.check_memory(self._place.folder, size, self.ranks_here)
        self.free()
        memory = self.file.allocate(size)
        self._views = _views_of(memory, layout, offsets)
        self.data = view_bytes(memory, size)
        self.layout, self.size, self._offsets = layout, size, offsets

    def write(self, tensors: list[torch.Tensor], *, first: int) -> int:
        """Copy the tensors from the number `first` on. Return the offset of the bytes that were written.

        Raises `InvalidArgument` for too little memory, and OSError.
        """
        layout = _layout_of(tensors)
        if layout != self.layout:  # an update, such as the first step of a scheduler, has other tensors
            self.prepare(layout)
            first = 0
        if tensors[first:]:
            torch._foreach_copy_(self._views[first:], tensors[first:])
        return self._offsets[first] if first < len(tensors) else self.size

    def free(self) -> None:
        """Free the memory."""
        self._views, self.layout, self.size, self._offsets = [], [], 0, []
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.file.remove()


_Layout: TypeAlias = list[tuple[torch.Size, torch.dtype]]


def _layout_of(tensors: list[torch.Tensor]) -> _Layout:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _bytes_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _offsets_of(layout: _Layout) -> tuple[list[int], int]:
    return snapshot_files.offsets_of([_bytes_of(*entry) for entry in layout])


def _views_of(memory: mmap.mmap | bytearray, layout: _Layout, offsets: list[int]) -> list[torch.Tensor]:
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        raw[offset : offset + _bytes_of(shape, dtype)].view(dtype).view(shape)
        for (shape, dtype), offset in zip(layout, offsets, strict=True)
    ]


# Content of a snapshot ------------------------------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    """Return the state of all prepared and registered objects, by their serial numbers.

    Tensors are not copied. Shards are plain tensors: the parts that this rank holds.
    """
    models = {}
    for serial, (strategy, raw) in prepared.current_models().items():
        strategy.restore_parameters(raw)
        models[serial] = {name: local_part(tensor) for name, tensor in _named_tensors(raw)}
    return {
        "models": models,
        "optimizers": {serial: _optimizer_state(item) for serial, item in prepared.registered("optimizer").items()},
        # From here on, an update copies the tensors again, see `_flatten`.
        "others": {serial: item.state_dict() for serial, item in _others().items()},
        "buckets": {serial: bucket_indices(wrapped) for serial, wrapped in prepared.registered("model").items()},
        "scaler": window.scaler.state_dict() if window.scaler is not None else None,
        "batches": window.batches,
        # Pickled by itself: bytes, which are faster than tensors.
        "random": _random_state(),
    }


def _others() -> dict[int, Any]:
    """Return schedulers, registered objects and loaders, by serial number."""
    items = {
        serial: item for kind in ("scheduler", "custom", "loader") for serial, item in prepared.registered(kind).items()
    }
    # Plain loaders such as `SkipDataLoader` have no position.
    return {serial: item for serial, item in sorted(items.items()) if hasattr(item, "state_dict")}


def _named_tensors(raw: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and all buffers, also those that are not part of a state dict."""
    yield from raw.named_parameters()
    yield from raw.named_buffers()


def _optimizer_state(wrapper: AcceleratedOptimizer) -> dict[str, Any]:
    values = [
        [
            {
                name: _divided(value, parameter) if isinstance(value, DTensor) else value
                for name, value in wrapper.state.get(parameter, {}).items()
            }
            for parameter in group["params"]
        ]
        for group in wrapper.param_groups
    ]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in wrapper.param_groups]
    return {
        "values": values,
        "named": {key: value for key, value in wrapper.state.items() if not isinstance(key, torch.Tensor)},
        "others": _other_state(wrapper.optimizer),
        "groups": groups,
        "steps": wrapper.steps,
        "skipped": wrapper.step_was_skipped,
    }


def _other_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the `state_dict()` of an optimizer class has beyond torch's: counters of its own, for example."""
    if type(optimizer).state_dict.__module__.startswith("torch."):
        return {}
    state = optimizer.state_dict()
    return {name: value for name, value in state.items() if name not in ("state", "param_groups")}


def _divided(value: DTensor, parameter: torch.Tensor) -> tuple[object, ...]:
    """Return the local part of a state tensor, and its layout if it is on the mesh of its parameter."""
    same_mesh = isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh
    # Adafactor has a number for each row, and one for each column, which all ranks have.
    return _SHARDED, local_part(value), (value.placements, value.shape, value.stride()) if same_mesh else None


def _random_state() -> bytes:
    state = random_state()
    state["torch"] = state["torch"].numpy().tobytes()
    state["cuda"] = [each.numpy().tobytes() for each in state.get("cuda", ())]
    kind, keys, *rest = state["numpy"]
    state["numpy"] = (kind, keys.numpy().tobytes(), *rest)
    return pickle.dumps(state)


def _restore_random_state(stored: bytes) -> None:
    state = pickle.loads(stored)
    state["torch"] = _tensor_of(state["torch"], torch.uint8)
    state["cuda"] = [_tensor_of(each, torch.uint8) for each in state["cuda"]]
    kind, keys, *rest = state["numpy"]
    state["numpy"] = (kind, _tensor_of(keys, torch.int64), *rest)
    restore_random_state(state)


def _tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@dataclass(frozen=True)
class _DTensorLayout:
    """Layout of a DTensor. `mesh` is its key in `_meshes`: a new rank has a mesh of its own."""

    mesh: tuple[Any, ...]
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def _mesh_key(mesh: DeviceMesh) -> tuple[Any, ...]:
    # Without the ranks: those of a replica may take over the state of another one.
    return mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names


def _meshes() -> dict[tuple[Any, ...], DeviceMesh]:
    """Return the meshes of prepared models."""
    tensors = [tensor for _, raw in prepared.current_models().values() for _, tensor in _named_tensors(raw)]
    return {_mesh_key(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}


class _SnapshotPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """A pickler that takes all tensors out of the pickle, in order. Of DTensors it takes the local parts."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._meshes: Mapping[tuple[Any, ...], DeviceMesh] | None = None  # collected for the first DTensor

    def persistent_id(self, value: object) -> int | tuple[int, _DTensorLayout] | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(local_part(value))
        number = len(self.tensors) - 1
        if not isinstance(value, DTensor):
            return number
        mesh = _mesh_key(value.device_mesh)
        if self._meshes is None:
            self._meshes = _meshes()
        if mesh not in self._meshes:
            raise InvalidArgument(f"it has a DTensor on {value.device_mesh}, which is no mesh of a prepared model")
        return number, _DTensorLayout(mesh, value.placements, value.shape, value.stride())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self.problem = ""
        self.copies = False

    def persistent_load(self, identifier: int | tuple[int, _DTensorLayout]) -> torch.Tensor:
        number, layout = (identifier, None) if isinstance(identifier, int) else identifier
        tensor = self._tensors[number].clone() if self.copies else self._tensors[number]
        if layout is None:
            return tensor
        mesh = _meshes().get(layout.mesh)
        if mesh is None:
            self.problem = "no prepared model has the mesh of a DTensor in the snapshot"
            return tensor
        return DTensor.from_local(
            tensor,
            mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )


def _flatten(state: dict[str, Any]) -> tuple[bytes, list[torch.Tensor], int]:
    """Return the pickled state, the tensors in it, and the number of those of models and optimizers, which come first.

    The layout of the tensors is part of the pickle. Raises `InvalidArgument` if the state cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _SnapshotPickler(file)
    try:
        pickler.dump((state["models"], state["optimizers"]))
        main = len(pickler.tensors)
        pickler.dump({name: value for name, value in state.items() if name not in ("models", "optimizers")})
    except Exception as error:
        raise InvalidArgument(
            f"cannot take a snapshot, since a state_dict() cannot be pickled: {type(error).__name__}: {error}"
        ) from error
    return pickle.dumps((_layout_of(pickler.tensors), file.getvalue())), pickler.tensors, main


def _unflatten(content: bytes, data: mmap.mmap | bytearray) -> dict[str, Any]:
    layout, pickled = pickle.loads(content)
    offsets, _ = _offsets_of(layout)
    unpickler = _Unpickler(io.BytesIO(pickled), _views_of(data, layout, offsets))
    models, states = unpickler.load()
    # The views lie in memory that a later snapshot overwrites. Models and optimizers are copied from them; other
    # objects keep these tensors, which may be anywhere in them.
    unpickler.copies = True
    return {"models": models, "optimizers": states, **unpickler.load(), "problem": unpickler.problem}


# Restoring ------------------------------------------------------------------------------------------------------------


def _optimizers_of(serials: Sequence[int]) -> list[AcceleratedOptimizer]:
    """Return the optimizers with these serial numbers.

    A variable of the caller would keep them in its frame, which the traceback of an aborted return refers to.
    """
    return [wrapper for serial, wrapper in prepared.registered("optimizer").items() if serial in serials]


def find_difference(state: dict[str, Any]) -> str:
    """Return why the stored state does not fit the objects of this rank; mostly nothing."""
    if state["problem"]:
        return str(state["problem"])
    for serial, (_, raw) in prepared.current_models().items():
        stored = state["models"].get(serial)
        for name, tensor in _named_tensors(raw) if stored is not None else ():
            if name not in stored or stored[name].shape != local_part(tensor).shape:
                shape = tuple(stored[name].shape) if name in stored else "no tensor of this name"
                return f"{name} has the shape {tuple(local_part(tensor).shape)}, but the snapshot has {shape}"
    for serial, wrapper in prepared.registered("optimizer").items():
        stored = state["optimizers"].get(serial)
        sizes = [len(group["params"]) for group in wrapper.param_groups]
        if stored is not None and [len(values) for values in stored["values"]] != sizes:
            return f"{type(wrapper.optimizer).__name__} has parameter groups of {sizes} parameters, unlike the snapshot"
    return ""


@dataclass(frozen=True)
class SnapshotContents:
    """Serial numbers of the models and optimizers of a rank, and of those in its snapshot, with the buckets of DDP."""

    prepared: set[int]
    stored: set[int]
    buckets: dict[int, Any]


def contents_of(state: dict[str, Any]) -> SnapshotContents:
    """Return what this rank has prepared, and what its snapshot has."""
    live = prepared.current_models().keys() | prepared.registered("optimizer").keys()
    return SnapshotContents(set(live), state["models"].keys() | state["optimizers"].keys(), state["buckets"])


def find_missing_object(contents: Sequence[SnapshotContents]) -> str:
    """Return which rank's snapshot lacks an object that those of other ranks have; mostly nothing.

    Such a rank would keep the state of another step. It has prepared objects in another order, or some of them only.
    """
    stored = set[int]().union(*(content.stored for content in contents))
    for rank, content in enumerate(contents):
        if content.prepared & stored - content.stored:
            return f"rank {rank}: its snapshot has other objects than those of the other ranks; prepare them again"
    return ""


def restore_state(state: dict[str, Any]) -> None:
    """Write the state into the prepared objects, which it fits.

    An object without stored state was prepared after the snapshot, or is left of a cell that was run again.
    """
    with torch.no_grad():
        for serial, (_, raw) in prepared.current_models().items():
            if (stored := state["models"].get(serial)) is not None:
                for name, tensor in _named_tensors(raw):
                    local_part(tensor).copy_(stored[name])
        for serial, wrapper in prepared.registered("optimizer").items():
            if (stored := state["optimizers"].get(serial)) is not None:
                _restore_optimizer(stored, wrapper)
    if window.scaler is not None and state["scaler"] is not None:
        window.scaler.load_state_dict(state["scaler"])
    for serial, item in _others().items():
        if serial in state["others"]:
            item.load_state_dict(state["others"][serial])
    window.batches = state["batches"]
    end_step()
    # At last, so that nothing of the above draws from it.
    if state["random"]:
        _restore_random_state(state["random"])


def end_step() -> None:
    """Drop the gradients of a step that has not ended, and begin a new window, on all ranks alike."""
    window.drop_gradients()
    window.abort(GradientState())
    optimizers.end_rounds()


def pack_state() -> tuple[bytes, bytes]:
    """Return the content of a snapshot as bytes, without the random state and the positions of loaders.

    A loader may have delivered batches since the step, and nobody knows how many of them belong to the next one.
    """
    state = {**collect(), "random": b""}
    for serial in prepared.registered("loader"):
        state["others"].pop(serial, None)
    content, tensors, _ = _flatten(state)
    layout = _layout_of(tensors)
    offsets, size = _offsets_of(layout)
    memory = mmap.mmap(-1, max(size, 1))
    views = _views_of(memory, layout, offsets)
    if views:
        torch._foreach_copy_(views, tensors)
    return content, memory[:]


def restore_packed(packed: tuple[bytes, bytes]) -> None:
    """Write the state that `pack_state` has returned on another rank into the prepared objects of this one."""
    content, data = packed
    restore_state(_unflatten(content, bytearray(data)))


def _restore_optimizer(stored: dict[str, Any], wrapper: AcceleratedOptimizer) -> None:
    if stored["others"]:
        # Before the state, which it may round to the dtype of the parameters, and for which it makes new groups.
        optimizer, groups = wrapper.optimizer, wrapper.optimizer.param_groups
        optimizer.load_state_dict({**optimizer.state_dict(), **_cloned(stored["others"])})
        groups[:] = optimizer.param_groups
        optimizer.param_groups = groups
    for group, options, values in zip(wrapper.param_groups, stored["groups"], stored["values"], strict=True):
        for name, option in _cloned(options).items():
            group[name] = _on_device_of(group.get(name), option)
        for parameter, entries in zip(group["params"], values, strict=True):
            if not entries:  # the optimizer creates it in its first step
                wrapper.state.pop(parameter, None)
                continue
            # Not indexed: the optimizer's dict of states may create an entry.
            live = wrapper.state.get(parameter, {})
            wrapper.state[parameter] = live
            for name in [name for name in live if name not in entries]:
                del live[name]
            for name, value in entries.items():
                # As in torch's `load_state_dict`: a counter of steps is on the CPU, except for these kernels.
                is_on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
                device = torch.device("cpu") if is_on_host else parameter.device
                live[name] = _restored(live.get(name), value, parameter, device)
    # Some optimizers keep numbers under a name.
    named = {key: value for key, value in wrapper.state.items() if not isinstance(key, torch.Tensor)}
    for key in named:
        del wrapper.state[key]
    for key, value in _cloned(stored["named"]).items():
        wrapper.state[key] = _on_device_of(named.get(key), value)
    wrapper.steps, wrapper._was_skipped, wrapper.is_stepping = stored["steps"], stored["skipped"], False


def _on_device_of(live: Any, value: Any) -> Any:  # noqa: ANN401 - any values
    """Return `value`; a tensor, which comes from the host's memory, on the device of the tensor that it replaces."""
    both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
    return value.to(live.device) if both else value


def _restored(live: Any, stored: Any, parameter: torch.Tensor, device: torch.device) -> Any:  # noqa: ANN401 - a value of an optimizer's state
    """Return the stored value on `device`, written into the tensor that exists if possible."""
    is_shard = isinstance(stored, tuple) and len(stored) == 3 and stored[0] == _SHARDED
    tensor = stored[1] if is_shard else stored
    if not isinstance(tensor, torch.Tensor):
        # Copies of the tensors in lists, dicts and other objects: the stored ones lie in memory that a later snapshot
        # overwrites.
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda inner: inner.to(device), _cloned(stored))
    if isinstance(live, torch.Tensor) and local_part(live).shape == tensor.shape and live.dtype == tensor.dtype:
        local_part(live).copy_(tensor)
        return live
    copied = tensor.to(device, copy=True)
    if is_shard and isinstance(parameter, DTensor):
        # Not by `as_dtensor`, which returns the parameter itself for an empty shard.
        placements, shape, stride = stored[2] or (parameter.placements, parameter.shape, parameter.stride())
        return DTensor.from_local(
            copied, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return copied


def _cloned(value: _T) -> _T:
    """Return a copy with tensors of its own, wherever they are in the value."""
    file = io.BytesIO()
    pickler = _SnapshotPickler(file)
    pickler.dump(value)
    unpickler = _Unpickler(io.BytesIO(file.getvalue()), pickler.tensors)
    unpickler.copies = True
    copied: _T = unpickler.load()
    return copied


def steps_made() -> int:
    """Return the number of optimizer steps to show: of several optimizers, that of the one with the fewest.

    The protection knows which ones take part in the training. A variable may still refer to one of an earlier training.
    """
    stepping = _active.stepping() if _active is not None else []
    wrappers = stepping or prepared.registered("optimizer").values()
    return min((wrapper.steps for wrapper in wrappers if wrapper.steps), default=0)


_Position: TypeAlias = tuple[int, int]
"""Epoch of a loader, and the number of batches that it has delivered in it."""
_Progress: TypeAlias = tuple[int, dict[int, _Position]]


def _progress() -> _Progress:
    """Return what changes when a step begins: the number of backward passes, and the positions of loaders."""
    return window.backwards, _positions()


def _positions() -> dict[int, _Position]:
    """Return the positions of the prepared loaders that have one, by serial number."""
    positions = {serial: getattr(item, "position", None) for serial, item in prepared.registered("loader").items()}
    return {serial: (at.epoch, at.delivered) for serial, at in positions.items() if at is not None}


# What is not protected ------------------------------------------------------------------------------------------------

_NO_STATE = (types.ModuleType, types.FunctionType, type, AcceleratorSettings)


def find_unprotected(namespace: Mapping[str, Any], hidden: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that no snapshot contains, with the reasons. `hidden` are defined on every rank."""
    is_covered = covered()
    found = {}
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or isinstance(value, _NO_STATE) or id(value) in is_covered:
            continue
        found[name] = _reason(value)
    return found


def covered() -> set[int]:
    """Return the identities of the objects that a snapshot contains."""
    objects: list[Any] = []
    for _, raw in prepared.current_models().values():
        objects += raw.modules()
    objects += prepared.registered("model").values()
    for kind, inner in (("optimizer", "optimizer"), ("scheduler", "scheduler"), ("custom", ""), ("loader", "")):
        for item in prepared.registered(kind).values():
            objects += [item, getattr(item, inner, None)]
    return {id(item) for item in objects if item is not None}


_REASONS: list[tuple[Callable[[object], bool], str]] = [
    (lambda value: isinstance(value, nn.Module), "a module outside prepare()"),
    (lambda value: isinstance(value, torch.optim.Optimizer), "an optimizer outside prepare()"),
    (lambda value: isinstance(value, torch.optim.lr_scheduler.LRScheduler), "a scheduler outside prepare()"),
    (lambda value: isinstance(value, AcceleratedScheduler), "a scheduler that is not registered"),
    (lambda value: isinstance(value, torch.Tensor), "a tensor"),
]


def _reason(value: object) -> str:
    return next((reason for fits, reason in _REASONS if fits(value)), f"a variable ({type(value).__name__})")
