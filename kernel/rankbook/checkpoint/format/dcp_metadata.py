"""Read checkpoints of torch.distributed.checkpoint (DCP) and Megatron-Core with a restricted unpickler.

`read_manifest` returns the manifest of any checkpoint, also of those that Rankbook wrote. `read_metadata` parses the
pickled `.metadata` file, `manifest_from_dcp` builds a `Manifest` from it. The unpickler
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

from rankbook.checkpoint.format import torch_zip
from rankbook.checkpoint.format.manifest import (
    ITEM_BYTES,
    MANIFEST,
    METADATA,
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
    decode_valid,
    find_problems,
)
from rankbook.checkpoint.format.torch_zip import locate_tensor
from rankbook.checkpoint.storage import Storage, read_all
from rankbook.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_PLANS = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# The key of a ShardedObject ends with its offset and shape in the grid of objects: "rng/shard_0.1_1.2" is object (0, 1)
# of a grid of shape (1, 2).
_SHARDED_OBJECT = re.compile(r".*/shard_[\d.]*_[\d.]*", re.DOTALL)
# File names: "__3_0.distcp" of torch and Rankbook, "__RANK_3.distcp" of older versions. Nine digits at most, so that
# the number of a damaged name stays small.
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

    `locations` maps (key, chunk offset) to the position of the blob; the offset is None for an object. `paths` maps a
    key to its path in the nested state dict that was saved, for example ("model", "layers", 0).
    """

    tensors: dict[str, DescribedTensor]
    objects: tuple[str, ...]
    locations: dict[tuple[str, tuple[int, ...] | None], BlobLocation]
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse the bytes of the `.metadata` file `where`.

    Raises `CheckpointError` if they are damaged, or name a class that DCP does not write there.
    """
    try:
        torch_zip.check_opcodes(data)
        return _plain(_MetadataUnpickler(io.BytesIO(data)).load())
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except Exception as error:
        # A pickle is a program: a damaged one may raise any exception, also from stand-ins given wrong arguments.
        raise CheckpointError(
            f"{where}: not metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}"
        ) from error


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest of the checkpoint in a folder; for other programs' checkpoints, one made from `.metadata`.

    Raises `CheckpointError`, which names the file, if it is damaged or missing.
    """
    path = f"{folder}/{MANIFEST}" if folder else MANIFEST
    try:
        return decode_valid(read_all(storage, path), f"{storage}/{path}")
    except FileNotFoundError:
        return manifest_from_dcp(storage, folder)


def manifest_from_dcp(storage: Storage, folder: str = "", on_damage: OnDamage | None = None) -> Manifest:
    """Build the manifest of a checkpoint of DCP or Megatron-Core.

    Reads `.metadata` and the ends of every chunk's zip, which hold its headers and directory. The manifest's `format`
    is 0. Raises `CheckpointError` naming file and key if a blob is damaged or cannot be read by range; with
    `on_damage`, calls it instead and leaves the chunk out.
    """
    base = f"{folder}/" if folder else ""
    where = f"{storage}/{base}{METADATA}"
    try:
        # The whole file is read: it has a few hundred bytes per chunk.
        metadata = read_metadata(read_all(storage, base + METADATA), where)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing: {storage}/{folder} is not a checkpoint") from error
    # Sorted, so that all processes number the files alike.
    sizes = {name: size for name, size in sorted(storage.list(folder).items()) if size is not None}
    # Everything that can be wrong is reported through one callback, so that a load (which raises at the first damage)
    # and `verify` (which collects all) share this code.
    builder = _ManifestBuilder(storage, base, sizes, on_damage or _raise_on_damage(storage, base))
    tensors = {}
    for key, tensor in metadata.tensors.items():
        chunks = [builder.chunk(key, tensor, offset, shape, metadata.locations) for offset, shape in tensor.chunks]
        tensors[key] = StoredTensor(tensor.dtype, tensor.shape, tuple(chunk for chunk in chunks if chunk is not None))
    objects = {}
    for key in metadata.objects:
        if (location := builder.location(key, None, metadata.locations)) is not None:
            number = builder.numbers[location.file]
            objects[key] = StoredObject(number, location.start, location.length, None, rank_of(location.file))
    files = tuple(StoredFile(name, size, None, rank_of(name)) for name, size in sizes.items())
    # The format does not record the world size. The highest rank that wrote a file is the best guess; -1 stands for a
    # file whose name has no rank, such as `common.pt`.
    ranks = {file.rank for file in files} - {-1}
    manifest = Manifest(
        format=0,
        step=None,
        world_size=max(ranks, default=0) + 1,
        tensors=tensors,
        objects=objects,
        files=files,
        # Objects whose key is not that of a ShardedObject are plain values; `planner_data` has their paths in the state
        # dict.
        values={key: metadata.paths.get(key) or (key,) for key in objects if not _SHARDED_OBJECT.fullmatch(key)},
    )
    # Entries that break a rule are left out of the manifest. `on_damage` raises for them unless the caller collects
    # damage.
    for problem in list(find_problems(manifest)):
        builder.on_damage(METADATA, problem.key, problem.rank, problem.what)
        manifest.tensors.pop(problem.key, None)
        manifest.objects.pop(problem.key, None)
    return manifest


def rank_of(file: str) -> int:
    """Return the rank that wrote a file, parsed from its name; -1 if the name does not say."""
    match = _RANK.fullmatch(file)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class _ManifestBuilder:
    storage: Storage
    base: str
    sizes: Mapping[str, int]
    on_damage: OnDamage

    @cached_property
    # A manifest refers to files by their position in its list of files.
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.sizes)}

    def location(
        self,
        key: str,
        offset: tuple[int, ...] | None,
        locations: Mapping[tuple[str, tuple[int, ...] | None], BlobLocation],
    ) -> BlobLocation | None:
        location = locations.get((key, offset))
        if location is None:
            self.on_damage(METADATA, key, -1, f"does not list the position of the chunk at {offset}")
        elif location.file not in self.sizes:
            self.on_damage(location.file, key, rank_of(location.file), "the file is missing")
        elif location.start < 0 or location.length < 0 or location.start + location.length > self.sizes[location.file]:
            problem = (
                f"the blob ends at byte {location.start + location.length}, but the file at {self.sizes[location.file]}"
            )
            self.on_damage(location.file, key, rank_of(location.file), problem)
        else:
            return location
        return None

    def chunk(
        self,
        key: str,
        tensor: DescribedTensor,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        locations: Mapping[tuple[str, tuple[int, ...] | None], BlobLocation],
    ) -> Chunk | None:
        if (location := self.location(key, offset, locations)) is None:
            return None
        rank = rank_of(location.file)
        try:
            view = locate_tensor(self.storage, self.base + location.file, location.start, location.length)
        except CheckpointError as error:
            self.on_damage(location.file, key, rank, f"the blob at byte {location.start} cannot be read: {error}")
            return None
        if (view.dtype, view.shape) != (tensor.dtype, shape):
            actual = f"the blob at byte {location.start} holds {view.dtype} of shape {view.shape}"
            self.on_damage(location.file, key, rank, f"{actual}, but {METADATA} says {tensor.dtype} of shape {shape}")
            return None
        return Chunk(
            offset=offset,
            shape=shape,
            file=self.numbers[location.file],
            start=location.start,
            length=location.length,
            data=view.data,
            nbytes=view.nbytes,
            # The zip has one checksum for all of the data, where Rankbook's own manifests have one per MiB. A chunk
            # without elements has no checksum, and neither has one that shares its storage with other tensors.
            pieces=() if view.crc is None or not view.nbytes else (view.crc,),
            envelope=None,
            rank=rank,
            strides=view.strides,
        )


def _raise_on_damage(storage: Storage, base: str) -> OnDamage:
    def raise_error(file: str, key: str, rank: int, what: str) -> None:
        wrote = f", written by rank {rank}" if rank >= 0 else ""
        raise CheckpointError(f"{storage}/{base}{file}: {key}{wrote}: {what}")

    return raise_error


# Stand-ins. The pickle's REDUCE and BUILD opcodes call a class and set its state. With these classes in place of
# torch's, both only store values.
class _Record:
    """Stand-in for a class of DCP: holds the pickled state, without behaviour."""

    values: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401 - any pickled state
        # A dataclass pickles its `__dict__`, a class with `__getstate__` of its own may pickle a tuple.
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
        return hash(self.location)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.location == other.location

    @property
    def location(self) -> tuple[str, tuple[int, ...] | None]:
        return self.values["fqn"], self.values.get("offset")


def _join_text(*parts: object) -> str:
    if not all(isinstance(part, str | int) for part in parts):
        raise CheckpointError("it builds a name from a value that is neither a string nor an integer")
    # Cut, because parts can be nested: text of text of text would grow with every level of a hostile pickle.
    return "/".join(str(part)[:1000] for part in parts)


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
# All names that a `.metadata` pickle may contain, besides torch's dtypes. Classes become records, functions build a
# text.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA, "Metadata"): _Metadata,
    (_MEGATRON, "MCoreMetadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _BytesMetadata,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _join_text,
    (_OLD_METADATA, "TensorProperties"): _Record,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _join_text,
    (_FILES, "_StorageInfo"): _Record,
    # Megatron also pickles every rank's plan into the metadata.
    (_PLANS, "SavePlan"): _Record,
    (_MEGATRON, "MCoreSavePlan"): _Record,
    (_PLANS, "WriteItem"): _Record,
    (_PLANS, "WriteItemType"): _join_text,
    (_PLANS, "TensorWriteData"): _Record,
    (_FILES, "_StoragePrefix"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _join_text,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any stand-in
        if (stand_in := _STAND_INS.get((module, name))) is not None:
            return stand_in
        # A dtype, such as torch.float32, is pickled as the name of an attribute of torch.
        if module == "torch" and name in ITEM_BYTES:
            return name
        raise CheckpointError(
            f"it names {module}.{name}, which torch.distributed.checkpoint does not write there: the file is damaged "
            "or untrustworthy; no code was executed"
        )


def _plain(metadata: object) -> DcpMetadata:
    if not isinstance(metadata, _Metadata):
        raise CheckpointError(
            f"it holds a {type(metadata).__name__}, expected the metadata of torch.distributed.checkpoint"
        )
    tensors, objects = {}, []
    for key, value in metadata.values["state_dict_metadata"].items():
        if isinstance(value, _BytesMetadata):
            objects.append(_name(key))
        elif isinstance(value, _Tensor):
            tensors[_name(key)] = _tensor(_name(key), value.values)
        else:
            raise CheckpointError(f"{_name(key)} has the unsupported type {type(value).__name__}")
    locations = {}
    for index, storage_info in metadata.values["storage_data"].items():
        values = storage_info.values
        # DCP's extensions compress or encrypt the blobs. They are code of the user's choice.
        if values.get("transform_descriptors"):
            raise CheckpointError(
                f"{index.location[0]} was stored with the extensions {', '.join(values['transform_descriptors'])}, "
                "which only torch.distributed.checkpoint supports; load it there and save it without them"
            )
        key, offset = index.location
        where = None if offset is None else _numbers(offset)
        start, length = _numbers((values["offset"], values["length"]))
        locations[_name(key), where] = BlobLocation(_name(values["relative_path"]), start, length)
    paths = metadata.values.get("planner_data")
    nested = {_name(key): _path_steps(path) for key, path in paths.items()} if isinstance(paths, dict) else {}
    return DcpMetadata(tensors, tuple(objects), locations, nested)


def _tensor(key: str, values: Mapping[str, Any]) -> DescribedTensor:
    properties = values["properties"].values
    # Depending on the version of torch, the state of TensorProperties is a tuple with the dtype first, or a dict.
    dtype = properties.get(0, properties.get("dtype"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{key} has the unsupported dtype {dtype}")
    chunks = [(_numbers(chunk.values["offsets"]), _numbers(chunk.values["sizes"])) for chunk in values["chunks"]]
    return DescribedTensor(dtype, _numbers(values["size"]), tuple(chunks))


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    items: tuple[object, ...] = tuple(values)
    # 62 bits: the sum of a start and a length then still fits into the 64 bits of a file position. 64 is torch's limit
    # of axes. `True` is an int for Python, and harmless here.
    numbers = tuple(value for value in items if isinstance(value, int) and -(2**62) < value < 2**62)
    if len(numbers) < len(items) or len(items) > 64:
        raise CheckpointError("it has an invalid offset, size or length")
    return numbers


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"it has a {type(value).__name__}, expected a string as name")
    return value


def _path_steps(path: Sequence[str | int]) -> tuple[str | int, ...]:
    if isinstance(path, str) or not all(isinstance(step, str | int) for step in path):
        raise CheckpointError("it has a path with an element that is neither a string nor an integer")
    return tuple(path)
