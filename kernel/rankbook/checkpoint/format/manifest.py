"""What a checkpoint says about itself: every chunk, the place of its bytes, and their checksums.

Owns: the manifest's fields, its bytes, the geometry of pieces. Refuses: torch, reading any file.

The manifest is JSON, with one line more at its end: a CRC-32 of all before it. A folder without it is no finished
checkpoint.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rankbook.checkpoint.format import checksums
from rankbook.errors import CheckpointingException

PIECE = checksums.PIECE
MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1

ITEM_BYTES = {
    # by torch's names; what is not here cannot be stored by its bytes alone
    **dict.fromkeys(("bool", "int8", "uint8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

_TAIL = re.compile(rb'"crc32":"([0-9a-f]{8})"\}\n')
_TAIL_LENGTH = len(b'"crc32":"00000000"}\n')


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stored part of a tensor. All positions and lengths are in bytes, positions from the file's start.

    `offset` and `shape` place it in the tensor. Its blob is a `torch.save` zip at [`start`, `start` + `length`) of
    file number `file`, its raw data at [`data`, `data` + `nbytes`), row-major unless `strides` (in elements, dense)
    says otherwise, as in chunks that others wrote. `pieces` are CRC-32s, one for every `PIECE` bytes of the data, or
    one for all of it, see `piece_bytes`; none where nobody computed them. `envelope` is the CRC-32 of the blob's
    bytes before and after the data, in that order. `rank` wrote it, -1 where that is not known. A manifest has one of
    these for every chunk there is, so in JSON fields that have their default are left out.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    start: int
    length: int
    data: int
    nbytes: int
    pieces: tuple[int, ...]
    envelope: int | None
    rank: int
    strides: tuple[int, ...] | None = None


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`dtype` is torch's name without "torch."; `shape` is the whole tensor's."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `torch.save` of `[value]`; `crc` is the CRC-32 of the blob, None where nobody computed it."""

    file: int
    start: int
    length: int
    crc: int | None
    rank: int


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`crc` is the CRC-32 of a small file, and None where every byte of it lies in some blob."""

    name: str
    size: int
    crc: int | None
    rank: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole checkpoint. `created` is an ISO time in UTC, `metadata` the person's own, JSON.

    The keys of `objects` are those of the blobs; a sharded object's is its `unique_key`. `format` is the number of
    this layout; a checkpoint that Rankbook did not write has the number 0. It may lack a common part, and keep values
    as objects of their own: `values` says where each of those belongs in the state dict, ("optim", "groups", 0, "lr").
    """

    step: int | None
    world_size: int
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    files: tuple[StoredFile, ...]
    metadata: dict[str, Any] = {}
    created: str = ""
    rankbook: str = ""
    torch: str = ""
    format: int = FORMAT
    values: dict[str, tuple[str | int, ...]] = {}

    @property
    def foreign(self) -> bool:
        """Whether somebody else wrote it: then it was made up from what that checkpoint tells, see pickles.py."""
        return self.format == 0

    @property
    def nbytes(self) -> int:
        """Of all files that it names."""
        return sum(file.size for file in self.files)


def now() -> str:
    """The time in UTC, as `created` has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def piece_bytes(chunk: Chunk) -> int:
    """The bytes under each of the chunk's checksums: `PIECE`, or all of them where there is one checksum for all."""
    return max(chunk.nbytes, 1) if len(chunk.pieces) == 1 else PIECE


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their bytes, each once, in some order of the axes."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest file. Raises `CheckpointingException` where `metadata` is not JSON."""
    check_json(manifest.metadata, "metadata")
    try:
        body = msgspec.json.encode(manifest)[:-1] + b",\n"
    except (TypeError, ValueError) as error:
        raise CheckpointingException(f"the manifest cannot be written: {error}") from error
    return body + b'"crc32":"%08x"}\n' % zlib.crc32(body)


def decode(data: bytes, where: str) -> Manifest:
    """A manifest from the bytes of the file `where`. Raises `CheckpointingException`, naming it, if a bit is wrong."""
    if (tail := _TAIL.fullmatch(data, max(len(data) - _TAIL_LENGTH, 0))) is None:
        raise CheckpointingException(
            f"{where}: its last line, with the checksum, is damaged or missing: the file was cut off or changed "
            f"({len(data)} bytes are there)"
        )
    body = memoryview(data)[: tail.start()]
    if (found := zlib.crc32(body)) != (said := int(tail[1], 16)):
        raise CheckpointingException(
            f"{where}: the file was changed: its CRC-32 is {found:08x}, and it says {said:08x}"
        )
    try:
        text = bytes(body).rstrip(b",\n") + b"}"
        written = msgspec.json.decode(text, type=_Format).format
        if written not in (0, FORMAT):
            raise CheckpointingException(
                f"{where}: the checkpoint has format {written}, and this version reads format {FORMAT}: "
                "it was written by a newer Rankbook"
            )
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointingException(f"{where}: not a manifest: {error}") from error


class _Format(msgspec.Struct):
    format: int


def check_json(value: object, path: str) -> None:
    """Raises `CheckpointingException`, naming the path, for what would not come back from JSON as it is.

    JSON would turn a NaN into null, a number as a key into text, and a large integer into a rounded one.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise CheckpointingException(f"{path} has the key {key!r}: keys must be text")
            check_json(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            check_json(each, f"{path}[{index}]")
    elif isinstance(value, bool | str | None):
        return
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise CheckpointingException(f"{path} is {value}, which does not fit into 64 bits")
    elif not isinstance(value, float):
        raise CheckpointingException(f"{path} is of type {type(value).__name__}: it must be JSON")
    elif not math.isfinite(value):
        raise CheckpointingException(f"{path} is {value}, which JSON cannot hold")
