"""One save, as `torch.distributed.checkpoint` drives it: the plan that all ranks agree on, and the files they write.

Owns: the planner and the writer of a save, what each rank's file holds, and the order in which a checkpoint comes to be
complete. Refuses: to choose the step and the folder (`saving.py`), and threads (`async_save.py`).
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from rankbook.checkpoint import blobs
from rankbook.checkpoint.checksums import crc32, whole
from rankbook.checkpoint.contents import Contents
from rankbook.checkpoint.declared import Declared
from rankbook.checkpoint.manifest import (
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
from rankbook.checkpoint.place import Place
from rankbook.checkpoint.plan import Assignment, PlanCache, plan_save
from rankbook.checkpoint.plan import SavePlan as Plan
from rankbook.checkpoint.telling import Telling
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


class PlanAgain(Exception):
    """Rank 0 does not know the plan that another rank referred to; it is to be sent whole."""


@dataclass
class RankFile:
    """What one rank has written: its file, and where in it each chunk and each object lies."""

    rank: int
    name: str
    size: int = 0
    tensors: list[tuple[str, Chunk]] = field(default_factory=list)
    objects: list[tuple[str, StoredObject]] = field(default_factory=list)


class Plans:
    """What this process remembers of the save before: rank 0 the plan, each rank what it has told rank 0."""

    def __init__(self) -> None:
        self.kept = PlanCache()
        self.told: tuple[str, str] | None = None

    def forget(self) -> None:
        """The save has failed: the next one begins anew."""
        self.__init__()  # type: ignore[misc]


class Planner(SavePlanner):
    """Has rank 0 plan for all ranks. A rank whose part is what it was the last time sends its digests alone."""

    def __init__(self, contents: Contents, plans: Plans, *, fully_parallel: bool, whole: bool) -> None:
        self._contents = contents
        self._plans = plans
        self._fully_parallel = fully_parallel
        self._whole = whole
        self.plan: Plan | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        """Called by torch; the state dict is not needed."""

    def create_local_plan(self) -> SavePlan:
        """This rank's part."""
        declared = self._contents.declared()
        signature = declared.signature()
        known = not self._whole and self._plans.told == signature
        self._plans.told = signature
        return SavePlan([], planner_data=signature if known else declared.packed())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: who writes what. Raises `CheckpointingException` where the ranks' parts do not fit."""
        told = [each.planner_data for each in all_plans]
        parts = [Declared.unpacked(each) if isinstance(each, bytes) else each for each in told]
        signatures = [each.signature() if isinstance(each, Declared) else each for each in parts]
        kept, parallel = self._plans.kept, self._fully_parallel
        plan = kept.recall(signatures, fully_parallel=parallel)
        if plan is None:
            if not all(isinstance(each, Declared) for each in parts):
                raise PlanAgain
            plan = plan_save(parts, fully_parallel=parallel)
            kept.keep(plan, signatures, fully_parallel=parallel)
        self.plan = plan
        return [SavePlan([], planner_data=plan.of_rank(rank)) for rank in range(len(parts))], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As rank 0 said."""
        return new_plan

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:  # noqa: ANN401
        """Not asked for: `Writer` knows the contents."""
        raise NotImplementedError


class Writer(StorageWriter):
    """Writes a rank's part to `partial`, a folder of `storage`; rank 0 completes it there, and `commit` moves it."""

    def __init__(
        self, place: Place, contents: Contents, planner: Planner, telling: Telling, metadata: dict[str, Any]
    ) -> None:
        self._place = place
        self._contents = contents
        self._planner = planner
        self._telling = telling
        self._metadata = metadata
        self.rank = 0
        self.is_coordinator = True
        self._partial = ""

    def reset(self, checkpoint_id: Any = None) -> None:  # noqa: ANN401
        """Called by torch; there is a writer for each save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ANN401
        """Whether torch may choose this writer by itself: no."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Called by torch with this process's `rank`."""
        self.rank, self.is_coordinator = kwargs.get("rank", 0), is_coordinator
        self._telling.check()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the partial folder, and tell all ranks its name."""
        partial = self._place.begin()
        told = (partial, self._place.shown, self._place.step)
        return [replace(each, storage_data=told) for each in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OSError."""
        own: Assignment = plan.planner_data
        telling = self._telling
        self._partial, telling.name, telling.step = plan.storage_data
        telling.total = sum(self._contents.tensors[number].nbytes for number in own.tensors)
        telling.enter("writing")
        telling.check()
        for number in own.tensors:
            if (tensor := self._contents.tensors[number]).data.is_meta:
                raise CheckpointingException(
                    f"tensor {tensor.key!r}, the chunk at {tensor.global_offset}: rank {self.rank} is to store it and "
                    "has no data for it"
                )
        file = RankFile(self.rank, f"__{self.rank}_0.distcp")
        if len(own.tensors) or len(own.objects):
            file.size = self._place.storage.write(f"{self._partial}/{file.name}", self._parts(file, own))
        telling.enter("committing")
        telling.check()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(file.name), file.size, file)])
        return done

    def _parts(self, file: RankFile, own: Assignment) -> Iterator[memoryview | bytes]:
        at = 0
        for number in own.tensors:
            tensor = self._contents.tensors[number]
            envelope = blobs.envelope(tensor.data.dtype, tensor.local_shape)
            yield envelope.before
            data = blobs.raw(tensor.data)
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
        for number in own.objects:
            stored = self._contents.objects[number]
            blob = stored.blob()
            _tell_unsafe(f"object {stored.unique_key!r}", blob)
            yield blob
            file.objects.append((stored.unique_key, StoredObject(0, at, len(blob), crc32(blob), file.rank)))
            at += len(blob)

    def _find(self, written: list[RankFile]) -> None:
        """Raises `CheckpointingException` where rank 0 does not see what a rank has written."""
        there = self._place.storage.list(self._partial)
        for each in written:
            if each.size and there.get(each.name) != each.size:
                path, found = f"{self._place.folder}/{self._partial}/{each.name}", there.get(each.name, "no such file")
                raise CheckpointingException(
                    f"rank {each.rank} wrote {each.size} bytes to {path}, and rank {self.rank} finds {found} there: "
                    "all ranks must write to the same place, a file system that they share"
                )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, once all files are there: describe them, and make the checkpoint the newest one."""
        written: list[RankFile] = [each.storage_data for result in results for each in result]
        plan = self._planner.plan
        assert plan is not None
        self._find(written)
        files = [StoredFile(each.name, each.size, None, each.rank) for each in written if each.size]
        places = {each.rank: number for number, each in enumerate(each for each in written if each.size)}
        tensors: dict[str, StoredTensor] = {}
        chunks: dict[str, list[Chunk]] = {}
        for each in written:
            for key, chunk in each.tensors:
                chunks.setdefault(key, []).append(msgspec.structs.replace(chunk, file=places[each.rank]))
        for key, planned in plan.tensors().items():
            tensors[key] = StoredTensor(
                planned.dtype, planned.shape, tuple(sorted(chunks.get(key, ()), key=lambda each: each.offset))
            )
        objects = {
            key: msgspec.structs.replace(stored, file=places[each.rank])
            for each in written
            for key, stored in each.objects
        }
        common = self._contents.common_file()
        _tell_unsafe("the common part", common)
        small = {
            COMMON: common,
            OF_MEGATRON: msgspec.json.encode(MEGATRON),
            METADATA: pickle.dumps(for_torch(tensors, objects, [each.name for each in files])),
        }
        for name, content in small.items():
            self._place.storage.write(f"{self._partial}/{name}", [content])
            files.append(StoredFile(name, len(content), crc32(content), self.rank))
        manifest = Manifest(
            created=now(),
            world_size=len(results),
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


def _tell_unsafe(what: str, blob: bytes) -> None:
    """Warn, once, of an object that no load will take unasked: the person may not be asked then, or not know."""
    if len(blob) > MOST_LOOKED_AT or what in _told_unsafe:
        return
    if names := blobs.unsafe(blob):
        _told_unsafe.add(what)
        asked = f"a load takes it with allow={names} only"
        if never := blobs.NEVER.intersection(names):
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
