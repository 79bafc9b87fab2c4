"""One rank's part in one save: what it declares, the file it writes, and on rank 0 the plan and the description.

`saving.py` calls a `Writer`'s methods in turn on all ranks, and has the theory of how a checkpoint is committed.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

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

from rankbook.checkpoint.format import torch_blobs
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
    encode,
    now,
)
from rankbook.checkpoint.local_state import Contents
from rankbook.checkpoint.planning.local_plan import Declared
from rankbook.checkpoint.planning.save_plan import Assignment, PlanCache, SavePlan, plan_save
from rankbook.checkpoint.progress import Telling
from rankbook.checkpoint.storage.steps import Place
from rankbook.errors import CheckpointingException

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
"""The two digests of a `Declared`."""


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
        contents: Contents,
        place: Place,
        telling: Telling,
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
        parts = [Declared.unpacked(part) if isinstance(part, bytes) else part for part in declarations]
        signatures = [part.signature() if isinstance(part, Declared) else part for part in parts]
        cache, parallel = self._history.cache, self._fully_parallel
        plan = cache.recall(signatures, fully_parallel=parallel)
        if plan is None:
            declared = [part for part in parts if isinstance(part, Declared)]
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
            envelope = torch_blobs.envelope(tensor.data.dtype, tensor.local_shape)
            yield envelope.before
            data = torch_blobs.raw(tensor.data)
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
    if names := torch_blobs.unsafe(blob):
        _told_unsafe.add(what)
        asked = f"a load takes it with allow={names} only"
        if never := torch_blobs.NEVER.intersection(names):
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
