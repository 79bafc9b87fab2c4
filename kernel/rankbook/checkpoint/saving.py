"""Save a checkpoint: plan, write and commit one step on all ranks.

`save` is the public function. A `Writer` is one rank's part in one save: its declaration, its file, and on rank 0 the
plan and the manifest. `run_save` calls the writer's methods in turn on every rank. An asynchronous save runs the same
code in a thread (`async_save.py`).

Theory of operation: the commit
===============================

A commit is atomic: either a whole step becomes visible, or the folder stays as it was. A step is written into
`step-N.partial` and becomes visible by one rename to `step-N`. Readers open `step-N` only, so a save can stop at any
moment before the rename and no reader loads half a checkpoint (for `step-N.replaced` see 5). A killed process cleans up
nothing; the next save into the same folder removes its files.

**Threads and ranks.** Every rank calls `save`. A synchronous save does everything in the calling thread. In an
asynchronous save the calling thread does step 1, copies the data to be written, and starts the thread
`rankbook-checkpoint`, which does steps 2 to 6 over a gloo process group of its own. Steps 2 to 6 are two calls of
`RankGroup.exchange`: every rank computes a value, rank 0 gathers all values, computes a reply per rank, and scatters
the replies. Step 2 is the first exchange, steps 3 to 6 are the second. Only rank 0 changes anything outside the partial
folder, and only in steps 2, 5 and 6.

**Order of events.**

1. **Agree.** All ranks compare their arguments (`check_same_arguments`), take the state dict apart, and wait for the
   previous asynchronous save. *A kill here leaves* nothing on disk.

2. **Plan.** Every rank declares its chunks (`Writer.declare`). Rank 0 gathers the declarations, checks that they cover
   every tensor exactly once, assigns the chunks to ranks, and scatters one task per rank (`Writer.plan`). A rank whose
   declaration equals that of the previous save sends only its digests; if rank 0 does not know them (its process is
   new), it replies None to all ranks and all of them declare in full. Before it sends the tasks, rank 0 takes the
   folder's lock, sweeps the leftovers of killed saves (see below), chooses the step number, and claims it: it creates
   the file `step-N.partial.owner`, which identifies this process, and which must not exist before. If two jobs save the
   same step, one of them gets an error. Then rank 0 removes the partial folder of an earlier attempt. *A kill here
   leaves* the owner file, or a draft of it.

3. **Write.** Every rank writes one file, `step-N.partial/__R_0.distcp` (R is the rank), and syncs the file and its
   folder. *A kill here leaves* the owner file, and a partial folder with truncated files.

4. **Describe.** Rank 0 gathers the positions and checksums of what the ranks have written, and checks that it sees
   every file with its full size. It writes `common.pt`, then `metadata.json` and `.metadata`, which other programs
   read, and `manifest.json` last, which holds the place and checksum of every chunk. Every file is synced before the
   next one is begun, so a folder with a manifest is complete. *A kill here leaves* the owner file and a partial folder.
   No step is loaded from it, even if it has a manifest, because it has the wrong name.

5. **Rename.** Under the folder's lock, rank 0 checks that it still owns the claim, writes the next `latest` to
   `step-N.latest` (the last operation that needs disk space), renames `step-N.partial` to `step-N`, and renames
   `step-N.latest` to `latest`. If step N exists already, Linux exchanges the two folders in one system call, and the
   old one is removed afterwards. Where folders cannot be exchanged, the old one is first renamed to
   `step-N.replaced`, which readers use while `step-N` is missing. A `step-N` without a manifest is not Rankbook's and
   is never replaced. *A kill before the rename leaves* the files of 4, and `step-N.latest`. *A kill after it leaves* a
   complete step N, which can be loaded by its number; `latest` names the previous step until the second rename. The
   owner file may remain, and the old folder under the partial or the `.replaced` name.

6. **Finish.** Rank 0 removes the owner file, then old steps according to `keep` and `keep_every`, and scatters the end
   of the save. A failure to remove old steps does not fail the save: the next save tries again. If only `latest` cannot
   be replaced, the save fails, and the error says that the step is complete. *A kill here leaves* a complete step, and
   possibly an old one without its manifest beside the file `step-N.removed`; the next save sweeps both. The other ranks
   then raise an error although the step can be loaded.

**Cleanup.** If a save fails while its processes live, rank 0 cleans up at once (`CheckpointLocation.abandon`): it
removes the partial folder, the next `latest` and the claim, and every rank raises the same error. The leftovers of a
killed process are swept in step 2 of the next save into the folder (`storage.steps.sweep`). The owner file tells the
two cases apart: a partial folder is swept only if its owner is dead, that is, its process has ended or its PID belongs
to another process; an owner on another machine is considered dead if its claim is a day old. A step that was renamed to
`step-N.replaced` and has no successor gets its name back.

A checkpoint with a custom name, as `Accelerator.save_state` makes them, is committed in the same way through
`NAME.partial`, but without `latest` and without a sweep: the next save of the same name removes the leftovers, and so
does the Accelerator for its numbered folders.

**Errors.** No rank raises between two collectives, since the others would wait for it. An exception in a rank's work is
sent in place of its result (`control_collectives.RankGroup`), so all ranks end the exchange together and raise one
error that names every failed rank with its reason. If a rank dies, the connections of the process group break; the
other ranks raise torch's error, with a note.
"""

from __future__ import annotations

import logging
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from rankbook.checkpoint.async_save import SaveHandle, SaveProgress
from rankbook.checkpoint.format import tensor_io
from rankbook.checkpoint.format.manifest import (
    COMMON,
    MANIFEST,
    METADATA,
    PIECE,
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
    check_json,
    combine_pieces,
    crc32,
    encode,
    now,
)
from rankbook.checkpoint.local_plan import LocalPlan
from rankbook.checkpoint.local_state import LocalState, local_state_of
from rankbook.checkpoint.save_plan import Assignment, PlanCache, SavePlan, plan_save
from rankbook.checkpoint.storage import SHARED_FOLDER, sees_file
from rankbook.checkpoint.storage.backends import Folder, storage_of
from rankbook.checkpoint.storage.steps import OWNER, CheckpointLocation, RetentionPolicy, check_int
from rankbook.control_collectives import RankGroup, RanksFailed, check_same_arguments, folder_key
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.process_identity import package_version
from rankbook.protocol.telemetry import CheckpointSave

# Rankbook writes the layout of Megatron-Core's "torch_dist" backend, version 1.
MEGATRON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of `metadata.json`, the file by which Megatron-Core recognizes a checkpoint format."""

MAX_SCANNED_BYTES = 1 << 20
"""Size limit in bytes of a pickle that is scanned for unsafe globals while it is saved."""

logger = logging.getLogger(__name__)
_warned_unsafe: set[str] = set()

MEGATRON_METADATA = "metadata.json"


Signature = tuple[str, str]
"""Two digests that identify a `LocalPlan`."""


class WriteTask(NamedTuple):
    """Work that rank 0 has planned for one rank.

    The `partial` folder is where the rank writes; `name` and `step` identify the finished checkpoint. `host` is
    the name of rank 0's host, which has claimed the folder.
    """

    assignment: Assignment
    partial: str
    name: str
    step: int | None
    host: str


@dataclass
class WrittenFile:
    """File of one rank, with the position of every chunk and object in it."""

    rank: int
    name: str
    size: int = 0
    tensors: list[tuple[str, Chunk]] = field(default_factory=list)
    objects: list[tuple[str, StoredObject]] = field(default_factory=list)


class PlanHistory:
    """Data that this process keeps from one save to the next, so that an equal save is not planned again.

    Rank 0 keeps the plan in `cache`; every rank keeps in `last_signature` the signature that it last sent to rank 0.
    """

    def __init__(self) -> None:
        self.cache = PlanCache()
        self.last_signature: Signature | None = None

    def clear(self) -> None:
        """Forget the plan and the signature, after a save that failed."""
        # The plan of a failed save may not be the one that the other ranks have. All ranks declare in full next time.
        self.__init__()  # type: ignore[misc]


class Writer:
    """Save one rank's part of a checkpoint.

    The methods are called in this order: `declare`, `plan` on rank 0, `write`, `commit` on rank 0.
    """

    def __init__(
        self,
        rank: int,
        contents: LocalState,
        location: CheckpointLocation,
        progress: SaveProgress,
        history: PlanHistory,
        *,
        metadata: dict[str, Any],
        fully_parallel: bool,
    ) -> None:
        self._rank = rank
        self._contents = contents
        self._location = location
        self._progress = progress
        self._history = history
        self._metadata = metadata
        self._fully_parallel = fully_parallel
        self._plan: SavePlan | None = None
        self._partial = ""

    def declare(self, *, full: bool) -> Signature | bytes:
        """Return this rank's declaration for rank 0: its digests if it equals that of the previous save.

        With `full`, return the full declaration in any case.
        """
        # Here an interrupt of the user's callback can be raised: `RankGroup.exchange` passes it to all ranks.
        self._progress.check()
        declared = self._contents.local_plan()
        signature = declared.signature()
        unchanged = not full and self._history.last_signature == signature
        self._history.last_signature = signature
        return signature if unchanged else declared.pack()

    def plan(self, declarations: list[Signature | bytes]) -> list[WriteTask | None]:
        """Plan the save, claim the partial folder, and return one task per rank.

        Return None for every rank if one of them sent digests that this process does not know: all ranks must then
        declare in full. Raises `CheckpointError` if the declarations do not fit together.
        """
        # A declaration is bytes, digests are a tuple of two texts.
        parts = [LocalPlan.unpack(part) if isinstance(part, bytes) else part for part in declarations]
        signatures = [part.signature() if isinstance(part, LocalPlan) else part for part in parts]
        cache, parallel = self._history.cache, self._fully_parallel
        plan = cache.get(signatures, fully_parallel=parallel)
        if plan is None:
            declared = [part for part in parts if isinstance(part, LocalPlan)]
            # Nothing was claimed yet, so declaring again has no cost but time.
            if len(declared) < len(parts):
                return [None] * len(parts)
            plan = plan_save(declared, fully_parallel=parallel)
            cache.put(plan, signatures, fully_parallel=parallel)
        self._plan = plan
        # After planning: shards that do not fit together must not touch the folder.
        partial = self._location.begin()
        name, step = self._location.display_name, self._location.step
        return [WriteTask(plan.of_rank(rank), partial, name, step, platform.node()) for rank in range(len(parts))]

    def write(self, task: WriteTask) -> WrittenFile:
        """Write this rank's file and return the positions and checksums in it. Raises OSError."""
        progress, assignment = self._progress, task.assignment
        # The step number is chosen by rank 0, so the other ranks know it only now.
        self._partial, progress.name, progress.step = task.partial, task.name, task.step
        if not sees_file(self._location.storage, task.partial + OWNER):
            raise CheckpointError(
                f"rank {self._rank} on {platform.node()} does not see {self._location.folder}/{task.partial}, which"
                f" rank 0 on {task.host} has created: {SHARED_FOLDER}"
            )
        progress.total = sum(self._contents.tensors[number].nbytes for number in assignment.tensors)
        progress.enter("writing")
        progress.check()
        for number in assignment.tensors:
            # Checked before the file is created. The data is a meta tensor if the entry was made without data.
            if (tensor := self._contents.tensors[number]).data.is_meta:
                raise CheckpointError(
                    f"tensor {tensor.key!r}: rank {self._rank} must store the chunk at {tensor.global_offset}, but "
                    "its ShardedTensor has data=None, or data on the meta device"
                )
        file = WrittenFile(self._rank, f"__{self._rank}_0.distcp")
        # A rank with nothing to write creates no file.
        if len(assignment.tensors) or len(assignment.objects):
            file.size = self._location.storage.write(f"{self._partial}/{file.name}", self._file_parts(file, assignment))
        progress.enter("committing")
        progress.check()
        return file

    def _file_parts(self, file: WrittenFile, assignment: Assignment) -> Iterator[memoryview | bytes]:
        # The file is a sequence of blobs without gaps. Every blob is a zip as `torch.save` writes it. The blob of a
        # tensor consists of the beginning of this envelope, the raw data, and the ending. The data is written straight
        # from the tensor's memory, in pieces of PIECE bytes, and the manifest has a CRC-32 per piece. The ending must
        # contain the CRC-32 of the whole data; it is combined from those of the pieces, so the data is read only once.
        at = 0
        for number in assignment.tensors:
            tensor = self._contents.tensors[number]
            envelope = tensor_io.make_envelope(tensor.data.dtype, tensor.local_shape)
            yield envelope.before
            data = tensor_io.raw_bytes(tensor.data)
            pieces = []
            for begin in range(0, len(data), PIECE):
                piece = data[begin : begin + PIECE]
                pieces.append(crc32(piece))
                yield piece
                self._progress.add_written(len(piece))
            ending = envelope.ending(combine_pieces(pieces, len(data)))
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
            _warn_unsafe(f"object {stored.unique_key!r}", blob)
            yield blob
            file.objects.append((stored.unique_key, StoredObject(0, at, len(blob), crc32(blob), file.rank)))
            at += len(blob)

    def _check_visible(self, written: list[WrittenFile]) -> None:
        # Rank 0 lists the folder. On a network file system it may see the other machines' files late, or, if the path
        # is a local disk of every machine, not at all.
        sizes = self._location.storage.list(self._partial)
        for file in written:
            if file.size and sizes.get(file.name) != file.size:
                path = f"{self._location.folder}/{self._partial}/{file.name}"
                visible = f"{sizes[file.name]} bytes" if file.name in sizes else "no such file"
                raise CheckpointError(
                    f"rank {file.rank} wrote {file.size} bytes to {path}, but rank {self._rank} sees {visible}: all "
                    "ranks must write to the same folder on a shared file system"
                )

    def commit(self, written: list[WrittenFile]) -> list[None]:
        """Write the manifest for the files of all ranks and commit the checkpoint. Return one None per rank.

        Raises `CheckpointError` if this rank does not see the file of another rank, or sees it with another
        size.
        """
        # A rank does not know the number of its file: the manifest numbers the files with content, in order of ranks.
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
        _warn_unsafe("the common part", common)
        small = {
            COMMON: common,
            MEGATRON_METADATA: msgspec.json.encode(MEGATRON),
            METADATA: pickle.dumps(to_dcp_metadata(tensors, objects, [file.name for file in files])),
        }
        for name, content in small.items():
            self._location.storage.write(f"{self._partial}/{name}", [content])
            files.append(StoredFile(name, len(content), crc32(content), self._rank))
        manifest = Manifest(
            created=now(),
            world_size=len(written),
            tensors=tensors,
            objects=objects,
            files=tuple(files),
            step=self._location.step,
            metadata=self._metadata,
            rankbook=package_version("rankbook"),
            torch=str(torch.__version__),
        )
        # The manifest is last: a folder with a manifest has all other files.
        self._location.storage.write(f"{self._partial}/{MANIFEST}", [encode(manifest)])
        self._location.commit()
        return [None] * len(written)


def _warn_unsafe(what: str, blob: bytes) -> None:
    """Log a warning, once per object name, if `load` will refuse the object without `allow=`.

    The user can still change the object now; at load time it may be too late.
    """
    if len(blob) > MAX_SCANNED_BYTES or what in _warned_unsafe:
        return
    if names := tensor_io.unsafe_globals(blob):
        _warned_unsafe.add(what)
        advice = f"load() requires allow={names} for it"
        if never := tensor_io.NEVER.intersection(names):
            advice = (
                f"torch cannot load {' and '.join(sorted(never))}, even with allow=: convert it to a list or a dict"
            )
        logger.warning(
            "%s contains %s. It is saved, but %s. Numbers, strings, tensors, and dicts, lists and tuples of them are "
            "loaded without allow=",
            what,
            ", ".join(names),
            advice,
        )


def to_dcp_metadata(tensors: dict[str, StoredTensor], objects: dict[str, StoredObject], files: list[str]) -> Metadata:
    """Return the metadata of the checkpoint in the format of `torch.distributed.checkpoint`."""
    described: dict[str, Any] = {}
    # `.metadata` lets `torch.distributed.checkpoint` and Megatron-Core load the checkpoint. `_StorageInfo` is private
    # in torch.
    locations: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, chunk in enumerate(tensor.chunks):
            # The third field is a hint only: DCP looks for the chunk at this position of the list first.
            index = MetadataIndex(key, torch.Size(chunk.offset), number)
            locations[index] = _StorageInfo(files[chunk.file], chunk.start, chunk.length)
    for key, stored in objects.items():
        described[key] = BytesStorageMetadata()
        locations[MetadataIndex(key)] = _StorageInfo(files[stored.file], stored.start, stored.length)
    return Metadata(described, planner_data={key: (key,) for key in described}, storage_data=locations, version="1.0.0")


@dataclass(frozen=True)
class Saved:
    """Complete checkpoint, as `save` returns it.

    `bytes` counts what this rank wrote, `seconds` is the duration of the save on this rank.

    Example::

        saved = save(sharded_state_dict(model, optimizer), "checkpoints", step=300)
        saved.name  # 'step-300'
    """

    folder: str
    name: str
    step: int | None
    bytes: int
    seconds: float


@dataclass
class _SaveHistory:
    """State that this process keeps from one save to the next."""

    history: PlanHistory = field(default_factory=PlanHistory)
    last: Saved | None = None


_process = _SaveHistory()


def last_save() -> Saved | None:
    """Return the last checkpoint that this process has saved together with the other ranks, or None."""
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
    """Save the state of all ranks as one step of a checkpoint folder. A collective: every rank calls it.

    The state dict may hold ShardedTensors, ShardedObjects, factories, DTensors, plain tensors (those of rank 0 are
    stored) and plain values, which must be equal on all ranks. `folder` is a path, a URL such as "s3://bucket/run", or
    a storage. `step` defaults to the highest finished step plus one. `metadata`, taken from rank 0, is stored with the
    checkpoint as JSON. All other arguments except `on_progress` must be the same on all ranks.

    `keep` and `keep_every` say which older steps remain: the `keep` newest, and the multiples of `keep_every`. By
    default all steps remain. With `fully_parallel` the ranks that hold replicas of a chunk share the writing, balanced
    by bytes; otherwise the main replica is written. `on_progress` is called with this rank's progress, in the thread
    that saves. If it raises, the error is logged and it is not called again.

    With `async_` the data is copied and a `SaveHandle` is returned; otherwise a `Saved`. If the previous asynchronous
    save is still running, this call waits for it, or raises with `busy="refuse"`.

    Raises `InvalidArgument` if arguments are invalid or differ between ranks. Raises `CheckpointError` if the parts
    of the ranks do not fit together, if a rank cannot write, or if an earlier asynchronous save failed and its error
    was not retrieved. The error is the same on every rank, and existing checkpoints stay unchanged.

    Example::

        save(sharded_state_dict(model, optimizer), "checkpoints", step=100, keep=3)
    """

    # Runs inside `check_same_arguments`, so that a rank with invalid arguments does not leave the others waiting.
    def check_arguments() -> tuple[dict[str, Any], CheckpointLocation]:
        if busy not in {"wait", "refuse"}:
            raise InvalidArgument(f"unknown busy {busy!r}; choose from wait (for the previous save), refuse")
        number = None if step is None else check_int("step", step, 0)
        retention = RetentionPolicy(keep, keep_every)
        return _metadata(metadata), CheckpointLocation(storage_of(folder), str(folder), number, retention=retention)

    checked_metadata, location = check_same_arguments(
        "save",
        check_arguments,
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
        location,
        metadata=checked_metadata,
        async_=async_,
        on_progress=on_progress,
        fully_parallel=fully_parallel,
        busy=busy,
    )


def save_contents(
    contents: LocalState,
    location: CheckpointLocation,
    *,
    metadata: dict[str, Any],
    async_: bool = False,
    on_progress: Callable[[CheckpointSave], None] | None = None,
    fully_parallel: bool = False,
    busy: str = "wait",
) -> Saved | SaveHandle:
    """Save a state dict that has been taken apart, to a step or to a folder of any name. See `save`."""
    # Two saves at the same time would share the process group, the plan history and possibly the step.
    async_save.join_previous(refuse=busy == "refuse")
    progress = SaveProgress(location.folder, background=async_, on_progress=on_progress)

    def run(staged: LocalState, group: Any) -> Saved:  # noqa: ANN401 - a process group
        return run_save(staged, location, progress, metadata=metadata, fully_parallel=fully_parallel, group=group)

    # Without a group: the default group, in the calling thread.
    if not async_:
        return run(contents, None)
    return async_save.start_save(contents, progress, run, target=location.display_name, copy_replicas=fully_parallel)


def save_aside(contents: LocalState, location: CheckpointLocation) -> None:
    """Save as `save_contents` does, but not as a checkpoint of the user: `last_save` stays as it is."""
    last = _process.last
    try:
        save_contents(contents, location, metadata={})
    finally:
        _process.last = last


def run_save(
    contents: LocalState,
    location: CheckpointLocation,
    progress: SaveProgress,
    *,
    metadata: dict[str, Any],
    fully_parallel: bool = False,
    group: Any = None,  # noqa: ANN401 - a process group
) -> Saved:
    """Save on the calling thread, together with every rank of `group`: plan, write and commit.

    The module docstring describes the order of events. Raises `CheckpointError`, the same on every rank.
    """
    start = time.monotonic()
    ranks = RankGroup(group)
    writer = Writer(
        ranks.rank, contents, location, progress, _process.history, metadata=metadata, fully_parallel=fully_parallel
    )
    try:
        task = ranks.exchange(lambda: writer.declare(full=False), writer.plan)
        if task is None:  # rank 0 does not know the digests of some rank
            task = ranks.exchange(lambda: writer.declare(full=True), writer.plan)
        assert task is not None
        assigned = task
        ranks.exchange(lambda: writer.write(assigned), writer.commit)
    except BaseException as error:
        # `RanksFailed` is raised on all ranks together. Any other exception comes from the collectives themselves; this
        # rank then raises alone, since it can no longer reach the others.
        _process.history.clear()
        # Only rank 0 has claimed anything. The other ranks' files are in the partial folder, which it removes.
        if ranks.rank == 0:
            location.abandon()
        if isinstance(error, RanksFailed):
            progress.fail(error.message("save"))
            error.reraise("save")
        progress.fail(f"{type(error).__name__}: {error}")  # the process group has broken
        error.add_note(
            f"The save to {location.folder} was aborted. Existing checkpoints are unchanged, or the save has completed."
        )
        raise
    saved = Saved(location.folder, progress.name, progress.step, progress.written, time.monotonic() - start)
    _process.last = saved
    progress.enter("done")
    progress.check()  # the checkpoint is complete, but an interrupt of the callback must still be raised
    return saved


def _metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    try:
        check_json(metadata or {}, "metadata")
        return msgspec.json.decode(msgspec.json.encode(metadata or {}), type=dict[str, Any])
    except (CheckpointError, TypeError, msgspec.MsgspecError, ValueError) as error:
        raise InvalidArgument(f"metadata must be JSON-serializable: {error}") from error
