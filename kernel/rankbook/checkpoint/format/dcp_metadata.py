"""Read checkpoints of torch.distributed.checkpoint (DCP) and Megatron-Core with a restricted unpickler.

`read_metadata` parses the pickled `.metadata` file, `manifest_from_dcp` builds a `Manifest` from it. The unpickler
accepts about two dozen names and maps every class to a stand-in that only holds values, so nothing that a pickle names
is imported or run.

The position of a chunk's data comes from the directory of its zip, so it can be read by range and verified against the
zip's checksum. The headers and padding of the zips have no checksum in this format.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from rankbook.checkpoint.format import pickle_opcodes
from rankbook.checkpoint.format.manifest import (
    ITEM_BYTES,
    METADATA,
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
)
from rankbook.checkpoint.format.structure import find_problems
from rankbook.checkpoint.format.torch_zip import locate_tensor
from rankbook.checkpoint.storage.base import Storage, read_all
from rankbook.errors import CheckpointingException

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_PLANS = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SHARDED_OBJECT = re.compile(r".*/shard_[\d.]*_[\d.]*", re.DOTALL)
_RANK = re.compile(r"__(?:RANK_)?(\d{1,9})(?:_\d+)?\.distcp")

OnDamage = Callable[[str, str, int, str], None]
"""Callback for damage in a checkpoint that Rankbook did not write: (file, key, rank, description)."""


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """The position of a blob: bytes [`start`, `start` + `length`) of a file."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as `.metadata` describes it: torch's dtype name, the shape, and (offset, shape) per chunk."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The content of `.metadata` as plain data.

    `places` maps (key, chunk offset) to the position of the blob; the offset is None for an object. `paths` maps a key
    to its path in the nested state dict that was saved, for example ("model", "layers", 0).
    """

    tensors: dict[str, DescribedTensor]
    objects: tuple[str, ...]
    places: dict[tuple[str, tuple[int, ...] | None], BlobLocation]
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse the bytes of the `.metadata` file `where`.

    Raises `CheckpointingException` if they are damaged, or name a class that DCP does not write there.
    """
    try:
        pickle_opcodes.check_opcodes(data)
        return _plain(_MetadataUnpickler(io.BytesIO(data)).load())
    except CheckpointingException as error:
        raise CheckpointingException(f"{where}: {error}") from error
    except Exception as error:
        # A pickle is a program: a damaged one may raise any exception, also from stand-ins given wrong arguments.
        raise CheckpointingException(f"{where}: damaged, or not DCP's: {type(error).__name__}: {error}") from error


def manifest_from_dcp(storage: Storage, folder: str = "", on_damage: OnDamage | None = None) -> Manifest:
    """Build the manifest of a checkpoint of DCP or Megatron-Core.

    Reads `.metadata` and the ends of every chunk's zip, which hold its headers and directory. The manifest's `format`
    is 0. Raises `CheckpointingException` naming file and key if a blob is damaged or cannot be read by range; with
    `on_damage`, calls it instead and leaves the chunk out.
    """
    base = f"{folder}/" if folder else ""
    where = f"{storage}/{base}{METADATA}"
    try:
        metadata = read_metadata(read_all(storage, base + METADATA), where)
    except FileNotFoundError as error:
        raise CheckpointingException(f"{where} is missing: {storage}/{folder} is no checkpoint") from error
    sizes = {name: size for name, size in sorted(storage.list(folder).items()) if size is not None}
    maker = _Maker(storage, base, sizes, on_damage or _raise(storage, base))
    tensors = {}
    for key, tensor in metadata.tensors.items():
        chunks = [maker.chunk(key, tensor, offset, shape, metadata.places) for offset, shape in tensor.chunks]
        tensors[key] = StoredTensor(tensor.dtype, tensor.shape, tuple(chunk for chunk in chunks if chunk is not None))
    objects = {}
    for key in metadata.objects:
        if (place := maker.place(key, None, metadata.places)) is not None:
            number = maker.numbers[place.file]
            objects[key] = StoredObject(number, place.start, place.length, None, rank_of(place.file))
    files = tuple(StoredFile(name, size, None, rank_of(name)) for name, size in sizes.items())
    ranks = {file.rank for file in files} - {-1}
    made = Manifest(
        format=0,
        step=None,
        world_size=max(ranks, default=0) + 1,
        tensors=tensors,
        objects=objects,
        files=files,
        values={key: metadata.paths.get(key) or (key,) for key in objects if not _SHARDED_OBJECT.fullmatch(key)},
    )
    for problem in list(find_problems(made)):
        maker.on_damage(METADATA, problem.key, problem.rank, problem.what)
        made.tensors.pop(problem.key, None)
        made.objects.pop(problem.key, None)
    return made


def rank_of(file: str) -> int:
    """Return the rank that wrote a file, parsed from its name; -1 if the name does not say."""
    match = _RANK.fullmatch(file)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class _Maker:
    storage: Storage
    base: str
    sizes: Mapping[str, int]
    on_damage: OnDamage

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.sizes)}

    def place(
        self,
        key: str,
        offset: tuple[int, ...] | None,
        places: Mapping[tuple[str, tuple[int, ...] | None], BlobLocation],
    ) -> BlobLocation | None:
        place = places.get((key, offset))
        if place is None:
            self.on_damage(METADATA, key, -1, f"does not say where the chunk at {offset} lies")
        elif place.file not in self.sizes:
            self.on_damage(place.file, key, rank_of(place.file), "the file is missing")
        elif place.start < 0 or place.length < 0 or place.start + place.length > self.sizes[place.file]:
            problem = f"the blob ends at byte {place.start + place.length}, and the file at {self.sizes[place.file]}"
            self.on_damage(place.file, key, rank_of(place.file), problem)
        else:
            return place
        return None

    def chunk(
        self,
        key: str,
        tensor: DescribedTensor,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        places: Mapping[tuple[str, tuple[int, ...] | None], BlobLocation],
    ) -> Chunk | None:
        if (place := self.place(key, offset, places)) is None:
            return None
        rank = rank_of(place.file)
        try:
            view = locate_tensor(self.storage, self.base + place.file, place.start, place.length)
        except CheckpointingException as error:
            self.on_damage(place.file, key, rank, f"the blob at byte {place.start} cannot be read: {error}")
            return None
        if (view.dtype, view.shape) != (tensor.dtype, shape):
            actual = f"the blob at byte {place.start} holds {view.dtype} of shape {view.shape}"
            self.on_damage(place.file, key, rank, f"{actual}, and {METADATA} says {tensor.dtype} of shape {shape}")
            return None
        return Chunk(
            offset=offset,
            shape=shape,
            file=self.numbers[place.file],
            start=place.start,
            length=place.length,
            data=view.data,
            nbytes=view.nbytes,
            pieces=() if view.crc is None or not view.nbytes else (view.crc,),
            envelope=None,
            rank=rank,
            strides=view.strides,
        )


def _raise(storage: Storage, base: str) -> OnDamage:
    def fail(file: str, key: str, rank: int, what: str) -> None:
        wrote = f", written by rank {rank}" if rank >= 0 else ""
        raise CheckpointingException(f"{storage}/{base}{file}: {key}{wrote}: {what}")

    return fail


class _Record:
    """Stand-in for a class of DCP: holds the pickled state, without behaviour."""

    values: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401 - any pickled state
        self.values = state if isinstance(state, dict) else dict(enumerate(state))


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _BytesMetadata(_Record):
    """Stand-in without state: the class has no fields, so its pickle sets none."""


class _Index(_Record):
    """Key of DCP's storage table; hashes and compares by content, so that lookups work."""

    def __hash__(self) -> int:
        return hash(self.place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.place == other.place

    @property
    def place(self) -> tuple[str, tuple[int, ...] | None]:
        return self.values["fqn"], self.values.get("offset")


def _text(*parts: object) -> str:
    if not all(isinstance(part, str | int) for part in parts):
        raise CheckpointingException("it makes a name of something that is no text")
    return "/".join(str(part)[:1000] for part in parts)


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA, "Metadata"): _Metadata,
    (_MEGATRON, "MCoreMetadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _BytesMetadata,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _text,
    (_OLD, "TensorProperties"): _Record,
    (_OLD, "MEM_FORMAT_ENCODING"): _text,
    (_FILES, "_StorageInfo"): _Record,
    # Megatron also pickles every rank's plan into the metadata.
    (_PLANS, "SavePlan"): _Record,
    (_MEGATRON, "MCoreSavePlan"): _Record,
    (_PLANS, "WriteItem"): _Record,
    (_PLANS, "WriteItemType"): _text,
    (_PLANS, "TensorWriteData"): _Record,
    (_FILES, "_StoragePrefix"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _text,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any stand-in
        if (stand_in := _STAND_INS.get((module, name))) is not None:
            return stand_in
        if module == "torch" and name in ITEM_BYTES:
            return name
        raise CheckpointingException(
            f"it names {module}.{name}, which torch.distributed.checkpoint does not write there: nothing was run; "
            "the file is damaged, or not to be trusted"
        )


def _plain(found: object) -> DcpMetadata:
    if not isinstance(found, _Metadata):
        raise CheckpointingException(f"it holds a {type(found).__name__}, and not DCP's metadata")
    tensors, objects = {}, []
    for key, value in found.values["state_dict_metadata"].items():
        if isinstance(value, _BytesMetadata):
            objects.append(_name(key))
        elif isinstance(value, _Tensor):
            tensors[_name(key)] = _tensor(_name(key), value.values)
        else:
            raise CheckpointingException(f"{_name(key)} is a {type(value).__name__}")
    places = {}
    for index, info in found.values["storage_data"].items():
        values = info.values
        if values.get("transform_descriptors"):
            raise CheckpointingException(
                f"{index.place[0]} was stored through {', '.join(values['transform_descriptors'])}; read it with "
                "torch.distributed.checkpoint, whose extensions can undo that, and save it again"
            )
        key, offset = index.place
        where = None if offset is None else _numbers(offset)
        start, length = _numbers((values["offset"], values["length"]))
        places[_name(key), where] = BlobLocation(_name(values["relative_path"]), start, length)
    paths = found.values.get("planner_data")
    nested = {_name(key): _steps(path) for key, path in paths.items()} if isinstance(paths, dict) else {}
    return DcpMetadata(tensors, tuple(objects), places, nested)


def _tensor(key: str, values: Mapping[str, Any]) -> DescribedTensor:
    properties = values["properties"].values
    dtype = properties.get(0, properties.get("dtype"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointingException(f"{key} has the dtype {dtype}, which cannot be read by its bytes alone")
    chunks = [(_numbers(chunk.values["offsets"]), _numbers(chunk.values["sizes"])) for chunk in values["chunks"]]
    return DescribedTensor(dtype, _numbers(values["size"]), tuple(chunks))


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    items: tuple[object, ...] = tuple(values)
    numbers = tuple(value for value in items if isinstance(value, int) and -(2**62) < value < 2**62)
    if len(numbers) < len(items) or len(items) > 64:
        raise CheckpointingException("it has an offset, a size or a length that is no number of bytes or elements")
    return numbers


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointingException(f"it has a {type(value).__name__} where a name belongs")
    return value


def _steps(path: Sequence[str | int]) -> tuple[str | int, ...]:
    if isinstance(path, str) or not all(isinstance(step, str | int) for step in path):
        raise CheckpointingException("it has a path that is not of names and numbers")
    return tuple(path)
