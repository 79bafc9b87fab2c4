"""Convert checkpoints to safetensors files and back.

`to_safetensors` holds one tensor in memory at a time; `from_safetensors` maps the files into memory. Objects and the
common part are not converted, because safetensors cannot hold them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankbook.checkpoint import inspection
from rankbook.checkpoint.format import safetensors
from rankbook.checkpoint.format.dcp_metadata import read_manifest
from rankbook.checkpoint.format.manifest import (
    COMMON,
    ITEM_BYTES,
    MAX_LISTED,
    Chunk,
    Manifest,
    piece_bytes,
    sizes_match,
)
from rankbook.checkpoint.load_plan import find_coverage_errors
from rankbook.checkpoint.storage import Buffer, Storage, steps
from rankbook.checkpoint.storage.backends import Folder, storage_of
from rankbook.errors import CheckpointError
from rankbook.formatting import truncate_list

MAX_BYTES = 5_000_000_000
"""Maximum bytes of data per safetensors file; a single larger tensor gets a file of its own."""
PARTIAL = ".partial"
"""Suffix of a file that is being written."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion: the written files, the number of tensors, and their bytes of data.

    `left_out` names the objects and files that safetensors cannot hold.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def read_tensor(storage: Storage, path: str, manifest: Manifest, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read a whole tensor as bytes and verify all of them. The result has shape (*tensor shape, bytes per element).

    Raises `CheckpointError` if a chunk is damaged, with the message of `verify`, or if chunks are missing.
    """
    stored = manifest.tensors[key]
    item = ITEM_BYTES[stored.dtype]
    # Example: a bfloat16 tensor of shape (4, 6) is an array of bytes of shape (4, 6, 2). A chunk of 2 rows at offset
    # (2, 0) fills full[2:4, 0:6].
    full = np.empty((*stored.shape, item), dtype=np.uint8)
    # `full` is not initialized, so gaps would be filled with old memory. Overlaps are excluded by the caller.
    covered = sum(math.prod(chunk.shape) for chunk in stored.chunks)
    if covered != math.prod(stored.shape):
        raise CheckpointError(
            f"{storage}/{path}: {key} of shape {stored.shape} has {math.prod(stored.shape)} elements, but its "
            f"{len(stored.chunks)} chunks have {covered}"
        )
    for chunk in stored.chunks:
        # Bytes are an axis of their own, the last one, so that dtypes without a NumPy equivalent, such as bfloat16,
        # work.
        data = _read_chunk(storage, path, manifest, key, chunk)
        if chunk.strides is None:
            shaped = data.reshape(*chunk.shape, item)
        else:
            strides = (*(stride * item for stride in chunk.strides), 1)
            shaped = np.lib.stride_tricks.as_strided(data, (*chunk.shape, item), strides)
        where = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape, strict=True))
        full[where] = shaped
    return full


def _read_chunk(
    storage: Storage, path: str, manifest: Manifest, key: str, chunk: Chunk
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.empty(chunk.nbytes, dtype=np.uint8)
    file = manifest.files[chunk.file].name
    if storage.read(f"{path}/{file}" if path else file, chunk.data, data.data) < chunk.nbytes:
        raise CheckpointError(f"{storage}/{path}/{file}: key {key!r}: the file is truncated")
    # Rounded up. A chunk of another program may have no checksums at all; then nothing is compared.
    count = -(-chunk.nbytes // piece_bytes(chunk))
    if bad := inspection.check_pieces(chunk, 0, count, data.data):
        raise CheckpointError(f"{storage}: {inspection.damaged_pieces(manifest, key, chunk, bad, path)}")
    return data


def to_safetensors(
    folder: Folder, target: Folder, *, step: int | None = None, most_bytes: int = MAX_BYTES
) -> Converted:
    """Write all tensors of a checkpoint, by default the latest, as safetensors files with an index.

    Files have at most `most_bytes` of data, except for a single larger tensor. One tensor is in memory at a time. The
    files of an earlier conversion to `target` are replaced when all new ones are complete, and the index is written
    last. Objects and the common part are left out and listed in the result. Raises `CheckpointError` if a chunk is
    damaged, or if safetensors does not support a dtype; then an earlier conversion is unchanged. Raises it too if
    `target` has such files that no conversion has written.
    """
    source, destination = storage_of(folder), storage_of(target)
    path = steps.locate(source, step)
    manifest = read_manifest(source, path)
    sizes_match(manifest, source.list(path), f"{source}/{path}" if path else str(source))
    if errors := [f"{key}: {error}" for key, error in find_coverage_errors(manifest, manifest.tensors)]:
        raise CheckpointError(f"{source}/{path}: " + "\n  ".join(errors[:MAX_LISTED]))
    # Which tensors go to which file is decided before anything is read, because every header precedes its data.
    shares = _shares(manifest, most_bytes)
    names = [_file_name(number, len(shares)) for number in range(len(shares))]
    headers = [_header(manifest, keys) for keys in shares]
    weight_map = {key: name for name, keys in zip(names, shares, strict=True) for key in keys}
    total = sum(safetensors.nbytes_of(tensor.dtype, tensor.shape) for tensor in manifest.tensors.values())
    for name in destination.list():
        if _FILE_NAME.fullmatch(name) and not name.endswith(PARTIAL) and not _is_converted(destination, name):
            raise CheckpointError(
                f"{destination}/{name} was not written by a conversion, which would replace it: choose another folder"
            )
    # Everything that may fail because of the source comes before the first change of an earlier conversion.
    try:
        for name, header, keys in zip(names, headers, shares, strict=True):
            destination.write(name + PARTIAL, _file_parts(header, source, path, manifest, keys))
        # Readers begin with the index, so an interrupted conversion is not taken for a complete one.
        destination.remove(safetensors.INDEX)
        for name in names:
            destination.move(name + PARTIAL, name)
    except BaseException:
        with suppress(OSError):  # the next conversion removes them
            for name in names:
                destination.remove(name + PARTIAL)
        raise
    destination.write(safetensors.INDEX, [safetensors.index(dict(sorted(weight_map.items())), total)])
    # What an earlier conversion has left: readers would prefer its `model.safetensors` to the index.
    for name in destination.list():
        if _FILE_NAME.fullmatch(name) and name not in names:
            destination.remove(name)
    left_out = [*manifest.objects, *(file.name for file in manifest.files if file.name == COMMON)]
    return Converted((*names, safetensors.INDEX), len(manifest.tensors), total, tuple(left_out))


def _header(manifest: Manifest, keys: Sequence[str]) -> bytes:
    entries = {key: (manifest.tensors[key].dtype, manifest.tensors[key].shape) for key in keys}
    return safetensors.encode_header(entries, {"format": "pt", _WRITER: "1"})


def _is_converted(storage: Storage, name: str) -> bool:
    """Return True if `to_safetensors` has written the file. The metadata is at its beginning."""
    beginning = bytearray(256)
    return _WRITER.encode() in beginning[: storage.read(name, 0, memoryview(beginning))]


def _file_parts(
    beginning: bytes, source: Storage, path: str, manifest: Manifest, keys: Sequence[str]
) -> Iterator[Buffer]:
    yield beginning
    for key in keys:
        yield read_tensor(source, path, manifest, key).data


def _shares(manifest: Manifest, most_bytes: int) -> list[list[str]]:
    # In the order of the manifest, a file is filled until the next tensor would exceed the limit. A tensor is never
    # split: safetensors cannot do that.
    shares: list[list[str]] = [[]]
    nbytes = 0
    for key, tensor in manifest.tensors.items():
        size = safetensors.nbytes_of(tensor.dtype, tensor.shape)
        if shares[-1] and nbytes + size > most_bytes:
            shares.append([])
            nbytes = 0
        shares[-1].append(key)
        nbytes += size
    return shares


_WRITER = "rankbook.conversion"
"""Key in the metadata of the files that `to_safetensors` writes, which readers ignore."""
_FILE_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.partial)?")


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def from_safetensors(source: str | os.PathLike[str], folder: Folder, *, step: int | None = None) -> Converted:
    """Write the tensors of a safetensors file, or of a folder with an index, as one step of a checkpoint folder.

    The step looks like one saved by a single rank, and any number of ranks can load it. It becomes the latest one.
    Without a `step` it is step 0 of a folder without steps. The files are mapped into memory, so they may be larger
    than it. Raises `CheckpointError` if a file is damaged, if the folder has steps and none is given, or if it has this
    one.
    """
    # Imported here: these modules import torch, which the other direction does not need.
    from rankbook.checkpoint.async_save import SaveProgress
    from rankbook.checkpoint.local_state import LocalState, LocalTensor
    from rankbook.checkpoint.saving import PlanHistory, Writer
    from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor
    from rankbook.checkpoint.storage.steps import CheckpointLocation

    finished = steps.finished_steps(storage_of(folder))
    if step in finished:
        raise CheckpointError(f"{folder} has a step {step} already: choose another number, or remove it first")
    if step is None and finished:
        raise CheckpointError(
            f"{folder} has the steps {', '.join(truncate_list(list(map(str, finished)), MAX_LISTED))}: choose the step "
            "to write with --step or step=; it becomes the latest one"
        )
    path = os.fspath(source)
    parent, name = os.path.split(path) if path.endswith(safetensors.SUFFIX) else (path, "")
    tensors = safetensors.read_tensors(storage_of(parent or "."), name)
    local_tensors = [LocalTensor.of(ShardedTensor.from_rank_offsets(key, tensor)) for key, tensor in tensors.items()]
    location, progress = CheckpointLocation(storage_of(folder), str(folder), step or 0), SaveProgress(str(folder))
    writer = Writer(
        0, LocalState(local_tensors, []), location, progress, PlanHistory(), metadata={}, fully_parallel=False
    )
    # one rank's save without collectives, see `saving.run_save`
    try:
        (task,) = writer.plan([writer.declare(full=True)])
        assert task is not None
        writer.commit([writer.write(task)])
    except BaseException:
        location.abandon()
        raise
    finally:
        progress.withdraw()
    return Converted((location.display_name,), len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
