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
from rankbook.checkpoint.storage.base import check_path
from rankbook.errors import CheckpointingException
from rankbook.formatting import escape_unprintable

MOST_SAID = 8
_MOST = 2**62  # limit of all numbers: the sum of two fits into 64 bits
_MOST_AXES = 64  # torch's limit
_MOST_RANKS = 2**31


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

    Raises `CheckpointingException`, naming the file, if the bytes are damaged or the manifest breaks a rule.
    """
    made = manifests.decode(data, where)
    raise_problems(list(find_problems(made)), where)
    return made


def raise_problems(found: list[Problem], where: str) -> None:
    """Raise `CheckpointingException` if there are problems."""
    if found:
        more = [f"and {len(found) - MOST_SAID} more"] if len(found) > MOST_SAID else []
        raise CheckpointingException(
            f"{where}: its checksum is right, and it cannot be: " + "\n  ".join([*map(str, found[:MOST_SAID]), *more])
        )


def sizes_match(manifest: Manifest, sizes: Mapping[str, int | None], where: str) -> None:
    """Raise `CheckpointingException` if a file is missing or shorter than the manifest says."""
    short = [
        f"{file.name}, written by rank {file.rank}: "
        + ("the file is missing" if (size := sizes.get(file.name)) is None else f"has {size} bytes, not {file.size}")
        for file in manifest.files
        if (sizes.get(file.name) or 0) < file.size
    ]
    if short:
        more = [f"and {len(short) - MOST_SAID} more"] if len(short) > MOST_SAID else []
        raise CheckpointingException(
            f"the checkpoint {where} is damaged:\n  " + "\n  ".join([*short[:MOST_SAID], *more])
        )


def find_problems(manifest: Manifest) -> Iterator[Problem]:
    """Yield the rules that a manifest breaks, except for chunks that do not fill their tensor exactly once.

    A load checks coverage itself, for the tensors that it reads; `load_plan.describe_unsound` checks all tensors.
    """
    if manifest.step is not None and not 0 <= manifest.step < 10**18:
        yield Problem("", -1, "a step that is no number of one")
    if not 0 <= manifest.world_size < _MOST_RANKS:
        yield Problem("", -1, f"a world of {_short(manifest.world_size)} ranks")
    for file in manifest.files:
        try:
            good = bool(check_path(file.name))
        except OSError:
            good = False
        if not good or not 0 <= file.size < _MOST or not -1 <= file.rank < _MOST_RANKS:
            yield Problem("", -1, f"the file {file.name[:200]!r} of {_short(file.size)} bytes is none of this folder")
    used = dict.fromkeys(range(len(manifest.files)), 0)
    for key, tensor in manifest.tensors.items():
        yield from _of_tensor(manifest, key, tensor, used)
    for key, stored in manifest.objects.items():
        if problem := _place(manifest, stored.file, stored.start, stored.length, stored.rank):
            yield Problem(key, stored.rank if 0 <= stored.rank < _MOST_RANKS else -1, problem)
        else:
            used[stored.file] += stored.length
    for number, nbytes in used.items():
        if not manifest.foreign and nbytes > manifest.files[number].size:
            file = manifest.files[number]
            yield Problem("", file.rank, f"{file.name} has {_short(file.size)} bytes, and its blobs {_short(nbytes)}")
    for key, path in manifest.values.items():
        if key not in manifest.objects or not path:
            yield Problem(key, -1, f"a value at {path!r} that is no object of this checkpoint")


def _of_tensor(manifest: Manifest, key: str, tensor: StoredTensor, held: dict[int, int]) -> Iterator[Problem]:
    item = ITEM_BYTES.get(tensor.dtype)
    shape = tensor.shape
    if item is None:
        yield Problem(key, -1, f"has the dtype {tensor.dtype[:100]!r}, which cannot be read by its bytes alone")
        return
    if len(shape) > _MOST_AXES or not all(0 <= size < _MOST for size in shape) or prod(shape) * item >= _MOST:
        yield Problem(key, -1, "has a shape that no tensor has")
        return
    for chunk in tensor.chunks:
        if problem := _wrong_chunk(manifest, chunk, shape, item, tensor.dtype):
            yield Problem(key, chunk.rank if 0 <= chunk.rank < _MOST_RANKS else -1, problem)
        else:
            held[chunk.file] += chunk.length


def _wrong_chunk(manifest: Manifest, chunk: Chunk, whole: tuple[int, ...], item: int, dtype: str) -> str:
    """Return what is wrong with a chunk, or ""."""
    offset, shape = chunk.offset, chunk.shape
    if not len(offset) == len(shape) == len(whole):
        return f"a chunk of {len(shape)} axes at an offset of {len(offset)}, in a tensor of {len(whole)}"
    if not all(at >= 0 <= size and at + size <= all_ for at, size, all_ in zip(offset, shape, whole, strict=True)):
        return f"{_chunk(chunk)} lies outside of its tensor of shape {whole}"
    if problem := _place(manifest, chunk.file, chunk.start, chunk.length, chunk.rank):
        return f"{_chunk(chunk)}: {problem}"
    nbytes = prod(shape) * item
    counts = {1, -(-nbytes // PIECE)} if nbytes else {0}
    if manifest.foreign:
        counts.add(0)
    inside = chunk.start <= chunk.data and chunk.data + chunk.nbytes <= chunk.start + chunk.length
    if nbytes != chunk.nbytes or len(chunk.pieces) not in counts or not inside:
        actual = f"{_short(chunk.nbytes)} bytes at {_short(chunk.data)} with {len(chunk.pieces)} checksums"
        return f"{_chunk(chunk)}: {actual} do not fit {dtype}"
    strides = chunk.strides
    if strides is not None and (len(strides) != len(shape) or not dense(shape, strides)):
        return f"{_chunk(chunk)}: the strides {tuple(map(_short, strides))} have gaps or overlaps"
    return ""


def _place(manifest: Manifest, file: int, start: int, length: int, rank: int) -> str:
    if not 0 <= file < len(manifest.files):
        return f"lies in file number {_short(file)} of {len(manifest.files)}"
    if not 0 <= start <= start + length <= manifest.files[file].size < _MOST:
        size = _short(manifest.files[file].size)
        return f"{_short(length)} bytes from {_short(start)}, in a file of {size}"
    if not -1 <= rank < _MOST_RANKS:
        return f"written by rank {_short(rank)}"
    return ""


def _chunk(chunk: Chunk) -> str:
    shape, offset = tuple(map(_short, chunk.shape)), tuple(map(_short, chunk.offset))
    return f"the chunk of shape ({', '.join(shape)}) at offset ({', '.join(offset)})"


def _short(number: int) -> str:
    return str(number) if abs(number) < 2**64 else "a number of more than 64 bits"
