"""Saving, and the checkpoint's commit: either the whole of a step becomes visible, or what was there before stays.

Theory of operation: the commit
===============================

A step is written into `step-N.partial` and becomes visible by one rename to `step-N`. Readers look at `step-N` alone,
so until that rename a save can stop anywhere without anybody loading half a checkpoint. What a process leaves behind
when it is killed depends on how far it came; nothing of it is cleaned up by the process that dies, only by the next
save into the same folder.

1. All ranks agree on the arguments (`agreed`), and the asynchronous save before this one has ended. On disk: nothing.

2. **Plan.** Every rank declares which chunks it holds (`Writer.declare`); rank 0 gathers the declarations, checks that
   they make up every tensor exactly once, decides who writes what, and scatters a task to every rank (`Writer.plan`).
   A rank whose declaration is that of the save before sends its digests alone; if rank 0 does not know them (it is a
   new process), it answers None and all declare once more. Before rank 0 answers, it takes the folder's lock, sweeps
   what killed saves have left (see below), chooses the step, and claims it: the file `step-N.partial.owner` names this
   process and is created only where there is none, so of two jobs that save the same step one gets an error. Then it
   removes the rest of an earlier attempt.
   *A crash here leaves* the owner file.

3. **Write.** Every rank writes its one file, `step-N.partial/__R_0.distcp`, and syncs the file and its folder.
   *A crash here leaves* the owner file and a partial folder, with files cut off anywhere.

4. **Describe.** Rank 0 gathers what the ranks have written, and checks that it sees every file with its whole size.
   It writes `common.pt`, `metadata.json` and `.metadata`, which other programs read, and last `manifest.json`, which
   has every chunk's place and checksum. Each file is synced before the next one is begun, so a folder with a manifest
   is complete.
   *A crash here leaves* a partial folder; even with a manifest no step is loaded from it, since it has the wrong name.

5. **Rename.** Under the folder's lock rank 0 checks that the claim is still its own, writes the next `latest` to
   `step-N.latest` (the last operation that needs room on the disk), renames `step-N.partial` to `step-N`, and renames
   `step-N.latest` to `latest`. Where step N was there before, Linux exchanges the two folders in one system call, and
   the old one is removed afterwards. Where folders cannot be exchanged, the old one is put aside as `step-N.old`, which
   readers take in the place of `step-N` while that is missing.
   *A crash before the rename leaves* what it left in 4, and `step-N.latest`. *After it* step N is complete and can be
   loaded by its number; `latest` names the step before until the second rename. The old folder may be left, under the
   partial or the `.old` name, and the owner file.

6. Rank 0 removes the owner file, then old steps as `keep` says, and tells every rank. A failure to remove old steps is
   no failure of the save: the next one tries again. Where only `latest` cannot be replaced, the save fails and says
   that the step is complete.

**Who cleans up.** A save that fails while its processes live is cleaned up by rank 0 at once
(`CheckpointLocation.abandon`): the partial folder, the next `latest` and the claim go, and every rank raises the same
error. What a killed process has left is swept by the next save into the folder (`folders.sweep`, in step 2). The owner
file tells the two apart: a partial folder is swept only if its owner is dead (its process is gone, or another one has
its number now; on another machine, if its claim is a day old). A step that was put aside and has no successor gets its
name back.

A checkpoint with a name of its own, as `Accelerator.save_state` makes them, goes the same way as `NAME.partial`,
without `latest` and without a sweep: the next save of that name removes what is left, and so does the Accelerator for
its numbered folders.

**Errors.** No rank raises between two collectives. What a rank's work raises travels in the place of its result
(`agreement.RankGroup`), so all ranks end the phase together and raise one error that names every rank that failed with
its reason. A rank that dies breaks the group's connections; the others get torch's error, with a note. Only rank 0
changes anything outside of the partial folder, and only in steps 2, 5 and 6.

An asynchronous save copies the data first, and does all from step 2 in a thread, over a process group of its own
(`async_save.py`).

One rank's part in one save: what it declares, the file it writes, and on rank 0 the plan and the description.

`saving.py` calls a `Writer`'s methods in turn on all ranks, and has the theory of how a checkpoint is committed.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rankbook.checkpoint import async_save
from rankbook.checkpoint.async_save import SaveHandle
from rankbook.checkpoint.consistency import RankGroup, RanksFailed, check_same_arguments, folder_key
from rankbook.checkpoint.format import torch_zip
from rankbook.checkpoint.format.checksums import crc32, whole
from rankbook.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    PIECE,
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
    check_json,
    encode,
    now,
)
from rankbook.checkpoint.local_state import LocalState, local_state_of
from rankbook.checkpoint.planning.local_plan import LocalPlan
from rankbook.checkpoint.planning.save_plan import Assignment, PlanCache, SavePlan, plan_save
from rankbook.checkpoint.progress import SaveProgress
from rankbook.checkpoint.storage.base import Storage
from rankbook.checkpoint.storage.local import storage_of
from rankbook.checkpoint.storage.steps import CheckpointLocation, RetentionPolicy, check_int
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.protocol.telemetry import CheckpointSave

MEGATRON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron-Core reads first of a checkpoint, as its `metadata.json`."""

MOST_LOOKED_AT = 1 << 20
"""Bytes of the largest pickle that is looked through while it is saved."""

logger = logging.getLogger(__name__)
_told_unsafe: set[str] = set()

COMMON = "common.pt"
OF_MEGATRON = "metadata.json"


Signature = tuple[str, str]
"""The two digests of a `LocalPlan`."""


class WriteTask(NamedTuple):
    """What rank 0 has planned for a rank: what it writes, in which partial folder, of which checkpoint and step."""

    assignment: Assignment
    partial: str
    name: str
    step: int | None


@dataclass
class WrittenFile:
    """What one rank has written: its file, and where in it each chunk and each object lies."""

    rank: int
    name: str
    size: int = 0
    tensors: list[tuple[str, Chunk]] = field(default_factory=list)
    objects: list[tuple[str, StoredObject]] = field(default_factory=list)


class PlanHistory:
    """What this process keeps of the save before: rank 0 its plan, every rank the signature that it sent to rank 0."""

    def __init__(self) -> None:
        self.cache = PlanCache()
        self.sent: Signature | None = None

    def clear(self) -> None:
        """Forget all of it, after a save that failed."""
        self.__init__()  # type: ignore[misc]


class Writer:
    """One rank's part in a save. Called in this order: `declare`, `plan` on rank 0, `write`, `commit` on rank 0."""

    def __init__(
        self,
        rank: int,
        contents: LocalState,
        place: CheckpointLocation,
        telling: SaveProgress,
        history: PlanHistory,
        *,
        metadata: dict[str, Any],
        fully_parallel: bool,
    ) -> None:
        self._rank = rank
        self._contents = contents
        self._place = place
        self._telling = telling
        self._history = history
        self._metadata = metadata
        self._fully_parallel = fully_parallel
        self._plan: SavePlan | None = None
        self._partial = ""

    def declare(self, *, whole: bool) -> Signature | bytes:
        """Return what this rank holds, for rank 0 to plan; the signature alone where it is that of the save before.

        With `whole` all of it in any case.
        """
        self._telling.check()
        declared = self._contents.declared()
        signature = declared.signature()
        known = not whole and self._history.sent == signature
        self._history.sent = signature
        return signature if known else declared.packed()

    def plan(self, declarations: list[Signature | bytes]) -> list[WriteTask | None]:
        """Plan the save, and make the partial folder. Returns a task for every rank.

        None for every rank where one has sent a signature that this process does not know: all are to declare anew.
        Raises `CheckpointingException` where the ranks' parts do not fit together.
        """
        parts = [LocalPlan.unpacked(part) if isinstance(part, bytes) else part for part in declarations]
        signatures = [part.signature() if isinstance(part, LocalPlan) else part for part in parts]
        cache, parallel = self._history.cache, self._fully_parallel
        plan = cache.recall(signatures, fully_parallel=parallel)
        if plan is None:
            declared = [part for part in parts if isinstance(part, LocalPlan)]
            if len(declared) < len(parts):
                return [None] * len(parts)
            plan = plan_save(declared, fully_parallel=parallel)
            cache.keep(plan, signatures, fully_parallel=parallel)
        self._plan = plan
        partial = self._place.begin()
        name, step = self._place.shown, self._place.step
        return [WriteTask(plan.of_rank(rank), partial, name, step) for rank in range(len(parts))]

    def write(self, task: WriteTask) -> WrittenFile:
        """Write this rank's file. Raises OSError."""
        telling, assignment = self._telling, task.assignment
        self._partial, telling.name, telling.step = task.partial, task.name, task.step
        telling.total = sum(self._contents.tensors[number].nbytes for number in assignment.tensors)
        telling.enter("writing")
        telling.check()
        for number in assignment.tensors:
            if (tensor := self._contents.tensors[number]).data.is_meta:
                raise CheckpointingException(
                    f"tensor {tensor.key!r}, the chunk at {tensor.global_offset}: rank {self._rank} is to store it "
                    "and has no data for it"
                )
        file = WrittenFile(self._rank, f"__{self._rank}_0.distcp")
        if len(assignment.tensors) or len(assignment.objects):
            file.size = self._place.storage.write(f"{self._partial}/{file.name}", self._parts(file, assignment))
        telling.enter("committing")
        telling.check()
        return file

    def _parts(self, file: WrittenFile, assignment: Assignment) -> Iterator[memoryview | bytes]:
        at = 0
        for number in assignment.tensors:
            tensor = self._contents.tensors[number]
            envelope = torch_zip.make_envelope(tensor.data.dtype, tensor.local_shape)
            yield envelope.before
            data = torch_zip.raw_bytes(tensor.data)
            pieces = []
            for begin in range(0, len(data), PIECE):
                piece = data[begin : begin + PIECE]
                pieces.append(crc32(piece))
                yield piece
                self._telling.wrote(len(piece))
            ending = envelope.ending(whole(pieces, len(data)))
            yield ending
            begin, after = at + len(envelope.before), len(data) + len(ending)
            around = crc32(ending, crc32(envelope.before))
            chunk = Chunk(
                offset=tensor.global_offset,
                shape=tensor.local_shape,
                file=0,
                start=at,
                length=begin + after - at,
                data=begin,
                nbytes=len(data),
                pieces=tuple(pieces),
                envelope=around,
                rank=file.rank,
            )
            file.tensors.append((tensor.key, chunk))
            at = begin + after
        for number in assignment.objects:
            stored = self._contents.objects[number]
            blob = stored.blob()
            _tell_unsafe(f"object {stored.unique_key!r}", blob)
            yield blob
            file.objects.append((stored.unique_key, StoredObject(0, at, len(blob), crc32(blob), file.rank)))
            at += len(blob)

    def _check_visible(self, written: list[WrittenFile]) -> None:
        sizes = self._place.storage.list(self._partial)
        for file in written:
            if file.size and sizes.get(file.name) != file.size:
                path = f"{self._place.folder}/{self._partial}/{file.name}"
                raise CheckpointingException(
                    f"rank {file.rank} wrote {file.size} bytes to {path}, and rank {self._rank} finds "
                    f"{sizes.get(file.name, 'no such file')} there: all ranks must write to the same place, a file "
                    "system that they share"
                )

    def commit(self, written: list[WrittenFile]) -> list[None]:
        """Describe the files of all ranks, and make the checkpoint the newest one. Returns a None for every rank.

        Raises `CheckpointingException` where this rank does not see what another one has written.
        """
        assert self._plan is not None
        self._check_visible(written)
        nonempty = [file for file in written if file.size]
        files = [StoredFile(file.name, file.size, None, file.rank) for file in nonempty]
        numbers = {file.rank: number for number, file in enumerate(nonempty)}
        tensors: dict[str, StoredTensor] = {}
        chunks: dict[str, list[Chunk]] = {}
        for file in nonempty:
            for key, chunk in file.tensors:
                chunks.setdefault(key, []).append(msgspec.structs.replace(chunk, file=numbers[file.rank]))
        for key, planned in self._plan.tensors().items():
            tensors[key] = StoredTensor(
                planned.dtype, planned.shape, tuple(sorted(chunks.get(key, ()), key=lambda chunk: chunk.offset))
            )
        objects = {
            key: msgspec.structs.replace(stored, file=numbers[file.rank])
            for file in nonempty
            for key, stored in file.objects
        }
        common = self._contents.common_file()
        _tell_unsafe("the common part", common)
        small = {
            COMMON: common,
            OF_MEGATRON: msgspec.json.encode(MEGATRON),
            METADATA: pickle.dumps(for_torch(tensors, objects, [file.name for file in files])),
        }
        for name, content in small.items():
            self._place.storage.write(f"{self._partial}/{name}", [content])
            files.append(StoredFile(name, len(content), crc32(content), self._rank))
        manifest = Manifest(
            created=now(),
            world_size=len(written),
            tensors=tensors,
            objects=objects,
            files=tuple(files),
            step=self._place.step,
            metadata=self._metadata,
            rankbook=version("rankbook"),
            torch=str(torch.__version__),
        )
        self._place.storage.write(f"{self._partial}/{MANIFEST}", [encode(manifest)])
        self._place.commit()
        return [None] * len(written)


def _tell_unsafe(what: str, blob: bytes) -> None:
    """Warn, once, of an object that no load will take unasked: the person may not be asked then, or not know."""
    if len(blob) > MOST_LOOKED_AT or what in _told_unsafe:
        return
    if names := torch_zip.unsafe_globals(blob):
        _told_unsafe.add(what)
        asked = f"a load takes it with allow={names} only"
        if never := torch_zip.NEVER.intersection(names):
            asked = f"torch cannot load {' and '.join(sorted(never))} again, allowed or not: make it a list or a dict"
        logger.warning(
            "%s holds %s. It is stored, and %s; numbers, strings, tensors, and dicts, lists and tuples of them are "
            "loaded unasked",
            what,
            ", ".join(names),
            asked,
        )


def for_torch(tensors: dict[str, StoredTensor], objects: dict[str, StoredObject], files: list[str]) -> Metadata:
    """The same, as `torch.distributed.checkpoint` describes a checkpoint to itself."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.shape)) for each in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, chunk in enumerate(tensor.chunks):
            index = MetadataIndex(key, torch.Size(chunk.offset), number)
            places[index] = _StorageInfo(files[chunk.file], chunk.start, chunk.length)
    for key, stored in objects.items():
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(files[stored.file], stored.start, stored.length)
    return Metadata(described, planner_data={key: (key,) for key in described}, storage_data=places, version="1.0.0")


Folder = str | os.PathLike[str] | Storage


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its `step` and `name` in the `folder`, this rank's bytes, the seconds that it took."""

    folder: str
    name: str
    step: int | None
    bytes: int
    seconds: float


@dataclass
class _SaveHistory:
    """What this process keeps from one save to the next."""

    history: PlanHistory = field(default_factory=PlanHistory)
    last: Saved | None = None


_process = _SaveHistory()


def last_save() -> Saved | None:
    """Return the last checkpoint that this process has saved with the others; None if there is none."""
    return _process.last


def save(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: int | None = None,
    metadata: dict[str, Any] | None = None,
    async_: bool = False,
    on_progress: Callable[[CheckpointSave], None] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    fully_parallel: bool = False,
    busy: Literal["wait", "refuse"] = "wait",
) -> Saved | SaveHandle:
    """Save what all ranks hold as `step` of `folder`, the next step if None. Every rank calls it.

    The state dict may hold ShardedTensors, ShardedObjects, factories, DTensors, plain tensors (rank 0's are stored)
    and values, which must be equal on all ranks. `metadata`, rank 0's, is kept beside it, as JSON; all other arguments
    but `on_progress` must be the same on all ranks. `keep` and `keep_every` say which older steps stay: the newest, and
    those that the second number divides; all by default.
    With `fully_parallel` the replicas of a chunk share out who stores it, by bytes; else the main replica is stored.
    `on_progress` is called with this rank's progress, in the thread that saves; where it fails it is logged,
    and not called again.

    With `async_` the data is copied, and a `SaveHandle` returned; a save that is still under way is waited for first,
    or refused with `busy="refuse"`.

    Raises `BadRequest` for arguments that are wrong or not the same, and `CheckpointingException` when the parts do not
    fit together, when one rank cannot write, and when a save in the background has failed of which nobody was told:
    the same on every rank. What was saved before is untouched.
    """

    def checked() -> tuple[dict[str, Any], CheckpointLocation]:
        if busy not in {"wait", "refuse"}:
            raise BadRequest(f'busy={busy!r}: "wait" for the save before this one, or "refuse"')
        number = None if step is None else check_int("step", step, 0)
        retention = RetentionPolicy(keep, keep_every)
        return _metadata(metadata), CheckpointLocation(storage_of(folder), str(folder), number, retention=retention)

    given, place = check_same_arguments(
        "save",
        checked,
        folder=folder_key(folder),
        step=step,
        async_=async_,
        keep=keep,
        keep_every=keep_every,
        fully_parallel=fully_parallel,
        busy=busy,
    )
    return save_contents(
        local_state_of(sharded_state_dict),
        place,
        metadata=given,
        async_=async_,
        on_progress=on_progress,
        fully_parallel=fully_parallel,
        busy=busy,
    )


def save_contents(
    contents: LocalState,
    place: CheckpointLocation,
    *,
    metadata: dict[str, Any],
    async_: bool = False,
    on_progress: Callable[[CheckpointSave], None] | None = None,
    fully_parallel: bool = False,
    busy: str = "wait",
) -> Saved | SaveHandle:
    """Save what has been taken apart, in a place of any name. See `save`."""
    async_save.join_previous(refuse=busy == "refuse")
    telling = SaveProgress(place.folder, background=async_, on_progress=on_progress)

    def run(held: LocalState, group: Any) -> Saved:  # noqa: ANN401 - a process group
        return run_save(held, place, telling, metadata=metadata, fully_parallel=fully_parallel, group=group)

    if not async_:
        return run(contents, None)
    return async_save.start_save(contents, telling, run, everything=fully_parallel)


def run_save(
    contents: LocalState,
    place: CheckpointLocation,
    telling: SaveProgress,
    *,
    metadata: dict[str, Any],
    fully_parallel: bool = False,
    group: Any = None,  # noqa: ANN401 - a process group
) -> Saved:
    """Save on the calling thread, with every rank of `group`: plan, write and commit, as described above.

    Raises `CheckpointingException`, the same on every rank.
    """
    began = time.monotonic()
    ranks = RankGroup(group)
    writer = Writer(
        ranks.rank, contents, place, telling, _process.history, metadata=metadata, fully_parallel=fully_parallel
    )
    try:
        task = ranks.exchange(lambda: writer.declare(whole=False), writer.plan)
        if task is None:
            task = ranks.exchange(lambda: writer.declare(whole=True), writer.plan)
        assert task is not None
        own = task
        ranks.exchange(lambda: writer.write(own), writer.commit)
    except BaseException as error:
        _process.history.clear()
        if ranks.rank == 0:
            place.abandon()
        if isinstance(error, RanksFailed):
            telling.failed(error.message("save"))
            error.reraise("save")
        telling.failed(f"{type(error).__name__}: {error}")  # the ranks have lost each other
        error.add_note(f"The save to {place.folder} was broken off; what was saved before is untouched.")
        raise
    saved = Saved(place.folder, telling.name, telling.step, telling.written, time.monotonic() - began)
    _process.last = saved
    telling.enter("done")
    telling.check()  # the checkpoint is complete; what the listener raised is raised all the same
    return saved


def _metadata(given: dict[str, Any] | None) -> dict[str, Any]:
    try:
        check_json(given or {}, "metadata")
        return msgspec.json.decode(msgspec.json.encode(given or {}), type=dict[str, Any])
    except (CheckpointingException, TypeError, msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"metadata= is written as JSON, which this cannot be: {error}") from error
