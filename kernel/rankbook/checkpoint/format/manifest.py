"""The manifest of a checkpoint: every chunk, the position of its bytes, and their CRC-32 checksums.

Defines the manifest's fields, its encoding, the size of checksummed pieces, and the rules of a valid manifest; reads no
files.

The manifest is JSON, followed by a last line with the CRC-32 of everything before it. A folder without a manifest is
not a finished checkpoint.

A manifest with a correct checksum can still be malformed, by a defect or on purpose: wrong indices, extents, geometry
or strides (`find_problems`). A load refuses a malformed manifest before it allocates memory for what the manifest
describes (`decode_valid`); `verify` decodes it with `decode` and reports all problems.

CRC-32 is the checksum of the zip format. The checksum of a concatenation follows from those of its parts: appending n
bytes multiplies a checksum, taken as a polynomial over GF(2), by x^(8n) modulo the CRC polynomial (the method of Mark
Adler's `crc32_combine` in zlib). So the bytes are read once, for the pieces, and the zip's checksum of the whole chunk
costs microseconds more.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from rankbook.checkpoint.storage import Buffer, check_path
from rankbook.errors import CheckpointError
from rankbook.formatting import escape_unprintable, truncate_list

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # isal has no wheel for this processor
    _crc32 = zlib.crc32


crc32: Callable[..., int] = _crc32
"""`zlib.crc32`, or isal's, which is five times as fast: CRC-32 dominates the CPU time of a checked save or load."""

PIECE = 1024 * 1024
"""Bytes under one checksum. Verifying a slice of a chunk reads at most two pieces more than the slice itself."""

_POLYNOMIAL = 0xEDB88320  # bit-reversed: bit 31 is the coefficient of x^0
_ONE = 0x80000000


def pieces(buffer: Buffer, piece: int = PIECE) -> tuple[int, ...]:
    """Return the CRC-32 of every `piece` bytes of a contiguous buffer; the last piece may be shorter."""
    flat = as_bytes(buffer)
    return tuple(crc32(flat[start : start + piece]) for start in range(0, len(flat), piece))


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the same memory as a one-dimensional view of bytes.

    An empty buffer is handled apart: `memoryview.cast` rejects an array that has an axis of size 0.
    """
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def combine_checksums(crc1: int, crc2: int, length2: int) -> int:
    """Return the CRC-32 of A + B, given those of A and B and the length of B in bytes."""
    return _multiply(_shift(length2), crc1) ^ crc2


def combine_pieces(crcs: Iterable[int], nbytes: int, piece: int = PIECE) -> int:
    """Return the CRC-32 of `nbytes` bytes, given that of every `piece` bytes; 0 if there are none."""
    # Example with pieces of 4 bytes and 10 bytes of data: three checksums, of 4, 4 and 2 bytes. The first step combines
    # the checksum of nothing (0) with the first one, and so on; the length of the right part is what the shift needs.
    crc, remaining = 0, nbytes
    for piece_crc in crcs:
        length = min(remaining, piece)
        crc, remaining = combine_checksums(crc, piece_crc, length), remaining - length
    return crc


@lru_cache(maxsize=4096)  # one entry for whole pieces, one per length of a last piece
def _shift(length: int) -> int:
    """Return x^(8 * length) modulo the CRC polynomial, by repeated squaring."""
    # `_ONE >> 8` is x^8: in the bit-reversed form a shift to the right multiplies by x.
    # About 2 * log2(length) multiplications of 32 steps. The cache makes the shift of a whole piece free.
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    # Multiply two polynomials over GF(2) modulo the CRC polynomial: shift and add (XOR), and reduce at every step.
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


MANIFEST = "manifest.json"
METADATA = ".metadata"
COMMON = "common.pt"
"""File of the common part: the values of a state dict that are neither tensors nor sharded objects."""
FORMAT = 1

ITEM_BYTES = {
    # Bytes per element, by torch's dtype names. Other dtypes (quantized, for example) need more than raw bytes.
    **dict.fromkeys(("bool", "int8", "uint8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

# The last line of a manifest file. The file as a whole is one JSON object:
#
#     {"step":100, ... ,"values":{},
#     "crc32":"0a1b2c3d"}
_TAIL = re.compile(rb'"crc32":"([0-9a-f]{8})"\}\n')
_TAIL_LENGTH = len(b'"crc32":"00000000"}\n')


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored chunk of a tensor. Positions and lengths are in bytes, positions from the file's start.

    `offset` and `shape` give the chunk's place in the tensor, in elements. The blob is a `torch.save` zip at [`start`,
    `start` + `length`) of file number `file`; its raw data is at [`data`, `data` + `nbytes`), row-major unless
    `strides` (in elements, dense) says otherwise, as in chunks that other programs wrote. `pieces` are CRC-32s, one per
    `PIECE` bytes of the data or one for all of it (see `piece_bytes`), and empty if unknown. `envelope` is the CRC-32
    of the blob's bytes before and after the data, in that order. `rank` wrote the chunk; -1 if unknown. Fields that
    have their default are left out of the JSON, because a manifest holds one of these structs per chunk.
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
    """A stored tensor: torch's dtype name without the "torch." prefix, the global shape, and the chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored object, written by `torch.save([value])`; `crc` is the CRC-32 of the blob, None if unknown."""

    file: int
    start: int
    length: int
    crc: int | None
    rank: int


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the checkpoint; `crc` is the CRC-32 of a small file, None if blobs cover all of the file."""

    name: str
    size: int
    crc: int | None
    rank: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a whole checkpoint. `created` is an ISO time in UTC, `metadata` the user's own JSON.

    `objects` is keyed by blob; the key of a sharded object is its `unique_key`. `format` is the version of this layout,
    and 0 for a checkpoint that Rankbook did not write. Such a checkpoint may have no common part and keep values as
    objects of their own; `values` maps their keys to paths in the state dict, for example ("optim", "groups", 0, "lr").
    """

    step: int | None
    world_size: int
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    files: tuple[StoredFile, ...]
    # msgspec makes a new dict for every instance.
    metadata: dict[str, Any] = {}
    created: str = ""
    rankbook: str = ""
    torch: str = ""
    format: int = FORMAT
    values: dict[str, tuple[str | int, ...]] = {}

    @property
    def foreign(self) -> bool:
        """Return True if another program wrote the checkpoint and `dcp_metadata.py` built this manifest."""
        return self.format == 0

    @property
    def nbytes(self) -> int:
        """Return the total size of the checkpoint's files, in bytes."""
        return sum(file.size for file in self.files)


def now() -> str:
    """Return the current UTC time in the format of `Manifest.created`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def piece_bytes(chunk: Chunk) -> int:
    """Return the bytes under one of the chunk's checksums: `PIECE`, or all of them if it has a single checksum."""
    return max(chunk.nbytes, 1) if len(chunk.pieces) == 1 else PIECE


def known_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the known ones of the ranks in a manifest, which has -1 for an unknown one."""
    return tuple(sorted({rank for rank in ranks if rank >= 0}))


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements fill their memory without gaps or overlaps, in some order of the axes."""
    expected = 1
    # From the fastest axis to the slowest, every stride must be the product of the sizes below it. Example: shape (2,
    # 3) with strides (1, 2), a transposed matrix, is dense; strides (4, 1) leave a gap after every row.
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest file. Raises `CheckpointError` if `metadata` is not JSON."""
    check_json(manifest.metadata, "metadata")
    try:
        # The checksum is the last key of the same JSON object, so the file stays valid JSON. It covers all bytes before
        # that key.
        body = msgspec.json.encode(manifest)[:-1] + b",\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest cannot be written: {error}") from error
    # Eight hexadecimal digits: `_TAIL_LENGTH` relies on the fixed width.
    return body + b'"crc32":"%08x"}\n' % zlib.crc32(body)


def decode(data: bytes, where: str) -> Manifest:
    """Decode the bytes of the manifest file `where`.

    Raises `CheckpointError`, naming the file, if its checksum or format is wrong, or the type of a field. The values of
    the fields are not checked, see `find_problems`.
    """
    # Searched from a computed position: a search in the whole file would find a "crc32" key of the user's metadata.
    if (tail := _TAIL.fullmatch(data, max(len(data) - _TAIL_LENGTH, 0))) is None:
        raise CheckpointError(
            f"{where}: the last line, with the checksum, is damaged or missing: the file is truncated or was modified "
            f"({len(data)} bytes)"
        )
    body = memoryview(data)[: tail.start()]
    if (crc := zlib.crc32(body)) != (recorded := int(tail[1], 16)):
        raise CheckpointError(f"{where}: the file was modified: its CRC-32 is {crc:08x}, expected {recorded:08x}")
    try:
        # The checksum's key is taken off again: `Manifest` refuses unknown fields.
        text = bytes(body).rstrip(b",\n") + b"}"
        # The version first: a later format may have other fields, about which the error would be misleading.
        written = msgspec.json.decode(text, type=_Format).format
        if written not in (0, FORMAT):
            raise CheckpointError(
                f"{where}: the checkpoint has format {written}, but this version reads format {FORMAT}: "
                "it was written by a newer Rankbook"
            )
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a manifest: {error}") from error


class _Format(msgspec.Struct):
    format: int


def check_json(value: object, path: str) -> None:
    """Raise `CheckpointError`, naming the path, if a value would not survive a round trip through JSON.

    JSON turns NaN into null, a numeric key into text, and rounds a large integer.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}: keys must be strings")
            check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]")
    elif isinstance(value, bool | str | None):
        return
    elif isinstance(value, int):
        # Python's JSON has integers of any size. Other readers, and msgspec, have 64 bits.
        if not -(2**63) <= value < 2**64:
            raise CheckpointError(f"{path} is {value}, which does not fit into 64 bits")
    elif not isinstance(value, float):
        raise CheckpointError(f"{path} is of type {type(value).__name__}: it must be JSON-serializable")
    elif not math.isfinite(value):
        raise CheckpointError(f"{path} is {value}, which JSON does not support")


# Validation -----------------------------------------------------------------------------------------------------------


MAX_LISTED = 8
_MAX_NUMBER = 2**62  # limit of all numbers: the sum of two fits into 64 bits
_MAX_AXES = 64  # torch's limit
_MAX_RANKS = 2**31


class Problem(NamedTuple):
    """A rule that a manifest breaks. `key` is "" if no tensor or object is concerned, `rank` -1 if none is known."""

    key: str
    rank: int
    what: str

    def __str__(self) -> str:
        wrote = f" (written by rank {self.rank})" if self.rank >= 0 else ""
        return f"{escape_unprintable(self.key)}{wrote}: {self.what}" if self.key else self.what


def decode_valid(data: bytes, where: str) -> Manifest:
    """Decode and validate the manifest in the bytes of the file `where`.

    Raises `CheckpointError`, naming the file, if the bytes are damaged or the manifest breaks a rule.
    """
    manifest = decode(data, where)
    raise_problems(list(find_problems(manifest)), where)
    return manifest


def raise_problems(problems: list[Problem], where: str) -> None:
    """Raise `CheckpointError` if there are problems."""
    if problems:
        raise CheckpointError(
            f"{where}: the manifest is invalid, although its checksum is correct: "
            + "\n  ".join(truncate_list([str(problem) for problem in problems], MAX_LISTED))
        )


def sizes_match(manifest: Manifest, sizes: Mapping[str, int | None], where: str) -> None:
    """Raise `CheckpointError` if a file is missing or shorter than the manifest says."""
    short = [
        f"{file.name}, written by rank {file.rank}: "
        + (
            "the file is missing"
            if (size := sizes.get(file.name)) is None
            else f"has {size} bytes, expected {file.size}"
        )
        for file in manifest.files
        if (sizes.get(file.name) or 0) < file.size
    ]
    if short:
        raise CheckpointError(f"the checkpoint {where} is damaged:\n  " + "\n  ".join(truncate_list(short, MAX_LISTED)))


def find_problems(manifest: Manifest) -> Iterator[Problem]:
    """Yield the rules that a manifest breaks, except for chunks that do not fill their tensor exactly once.

    A load checks coverage itself, for the tensors that it reads; `load_plan.find_coverage_errors` checks all tensors.
    """
    if manifest.step is not None and not 0 <= manifest.step < 10**18:
        yield Problem("", -1, f"invalid step {_format_number(manifest.step)}")
    if not 0 <= manifest.world_size < _MAX_RANKS:
        yield Problem("", -1, f"invalid world size {_format_number(manifest.world_size)}")
    for file in manifest.files:
        try:
            good = bool(check_path(file.name))
        except OSError:
            good = False
        # A rank of -1 means that it is unknown, in manifests that were built for other programs' checkpoints.
        if not good or not 0 <= file.size < _MAX_NUMBER or not -1 <= file.rank < _MAX_RANKS:
            entry = (
                f"{file.name[:200]!r} of {_format_number(file.size)} bytes, written by rank {_format_number(file.rank)}"
            )
            yield Problem("", -1, f"invalid file entry: {entry}")
    # Sum of the blobs per file. Without this check, a small file could be described by any number of overlapping
    # chunks, for which a load would allocate memory.
    used_bytes = dict.fromkeys(range(len(manifest.files)), 0)
    for key, tensor in manifest.tensors.items():
        yield from _tensor_problems(manifest, key, tensor, used_bytes)
    for key, stored in manifest.objects.items():
        if problem := _location_problem(manifest, stored.file, stored.start, stored.length, stored.rank):
            yield Problem(key, stored.rank if 0 <= stored.rank < _MAX_RANKS else -1, problem)
        else:
            used_bytes[stored.file] += stored.length
    for number, nbytes in used_bytes.items():
        # Only of Rankbook's own files it is known that no two entries share bytes.
        if not manifest.foreign and nbytes > manifest.files[number].size:
            file = manifest.files[number]
            yield Problem(
                "",
                file.rank,
                f"{file.name} has {_format_number(file.size)} bytes, but its blobs have {_format_number(nbytes)}",
            )
    # Only manifests of other programs' checkpoints have `values`, see `Manifest`.
    for key, path in manifest.values.items():
        if key not in manifest.objects or not path:
            yield Problem(key, -1, f"the value at {path!r} is not an object of this checkpoint")


def _tensor_problems(
    manifest: Manifest, key: str, tensor: StoredTensor, used_bytes: dict[int, int]
) -> Iterator[Problem]:
    # The order matters: the shape is checked before it is multiplied, and the dtype before a chunk's bytes are compared
    # with it. `used_bytes` counts a chunk only if its location is valid.
    item = ITEM_BYTES.get(tensor.dtype)
    shape = tensor.shape
    if item is None:
        yield Problem(key, -1, f"has the unsupported dtype {tensor.dtype[:100]!r}")
        return
    if (
        len(shape) > _MAX_AXES
        or not all(0 <= size < _MAX_NUMBER for size in shape)
        or math.prod(shape) * item >= _MAX_NUMBER
    ):
        yield Problem(key, -1, "has an invalid shape")
        return
    for chunk in tensor.chunks:
        if problem := _chunk_problem(manifest, chunk, shape, item, tensor.dtype):
            yield Problem(key, chunk.rank if 0 <= chunk.rank < _MAX_RANKS else -1, problem)
        else:
            used_bytes[chunk.file] += chunk.length


def _chunk_problem(manifest: Manifest, chunk: Chunk, global_shape: tuple[int, ...], item: int, dtype: str) -> str:
    """Return what is wrong with a chunk, or ""."""
    offset, shape = chunk.offset, chunk.shape
    if not len(offset) == len(shape) == len(global_shape):
        return f"a chunk has {len(shape)} axes and an offset of {len(offset)}, but the tensor has {len(global_shape)}"
    # `at >= 0 <= size` is `at >= 0 and 0 <= size`.
    extents = zip(offset, shape, global_shape, strict=True)
    if not all(at >= 0 <= size and at + size <= extent for at, size, extent in extents):
        return f"{_describe_chunk(chunk)} is outside its tensor of shape {global_shape}"
    if problem := _location_problem(manifest, chunk.file, chunk.start, chunk.length, chunk.rank):
        return f"{_describe_chunk(chunk)}: {problem}"
    nbytes = math.prod(shape) * item
    # Number of checksums: one per piece, or one for all of the data.
    counts = {1, -(-nbytes // PIECE)} if nbytes else {0}
    if manifest.foreign:
        counts.add(0)
    # The data lies within the blob: start <= data, and the data ends before the blob does.
    inside = chunk.start <= chunk.data and chunk.data + chunk.nbytes <= chunk.start + chunk.length
    if nbytes != chunk.nbytes or len(chunk.pieces) not in counts or not inside:
        actual = (
            f"{_format_number(chunk.nbytes)} bytes at {_format_number(chunk.data)} with {len(chunk.pieces)} checksums"
        )
        return f"{_describe_chunk(chunk)}: {actual} do not match its shape and {dtype}"
    strides = chunk.strides
    if strides is not None and (len(strides) != len(shape) or not dense(shape, strides)):
        return f"{_describe_chunk(chunk)}: the strides {tuple(map(_format_number, strides))} have gaps or overlaps"
    return ""


def _location_problem(manifest: Manifest, file: int, start: int, length: int, rank: int) -> str:
    if not 0 <= file < len(manifest.files):
        return f"file number {_format_number(file)} is out of range for {len(manifest.files)} files"
    # One chain of comparisons: no negative start, no negative length, and the end within the file.
    if not 0 <= start <= start + length <= manifest.files[file].size < _MAX_NUMBER:
        size = _format_number(manifest.files[file].size)
        return (
            f"{_format_number(length)} bytes from byte {_format_number(start)} on are outside the file of {size} bytes"
        )
    if not -1 <= rank < _MAX_RANKS:
        return f"invalid rank {_format_number(rank)}"
    return ""


def _describe_chunk(chunk: Chunk) -> str:
    shape, offset = tuple(map(_format_number, chunk.shape)), tuple(map(_format_number, chunk.offset))
    return f"the chunk of shape ({', '.join(shape)}) at offset ({', '.join(offset)})"


def _format_number(number: int) -> str:
    # A manifest may hold a number of a million digits. Python refuses to format more than 4300, and a message needs
    # fewer.
    return str(number) if abs(number) < 2**64 else "a number of more than 64 bits"
