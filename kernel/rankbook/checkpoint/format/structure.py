"""Validate the structure of a manifest: indices, extents, geometry and strides.

A manifest with a correct checksum can still be malformed, by a defect or on purpose. A load refuses a malformed
manifest before it allocates memory for what the manifest describes; `verify` reports all problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from rankbook.checkpoint.format import manifest as manifests
from rankbook.checkpoint.format.manifest import ITEM_BYTES, PIECE, Chunk, Manifest, StoredTensor, dense
from rankbook.checkpoint.storage import check_path
from rankbook.errors import CheckpointError
from rankbook.formatting import escape_unprintable, truncate_list

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


def decode(data: bytes, where: str) -> Manifest:
    """Decode and validate the manifest in the bytes of the file `where`.

    Raises `CheckpointError`, naming the file, if the bytes are damaged or the manifest breaks a rule.
    """
    manifest = manifests.decode(data, where)
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
        or prod(shape) * item >= _MAX_NUMBER
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
    nbytes = prod(shape) * item
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
