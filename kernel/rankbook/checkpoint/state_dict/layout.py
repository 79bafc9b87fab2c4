"""Where a shard lies in its global tensor, and where its bytes lie in a file.

Owns: the arithmetic of offsets, shapes and fragments. Refuses: torch, keys, files; it sees integers only.

Shapes and offsets are tuples, in elements. A *chunk* is a box `(offset, shape)` of a global tensor. Where a grid is
regular, `fragments` says into how many chunks each axis is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rankbook.errors import CheckpointingException

Shape = tuple[int, ...]


def shard_numel(shape: Sequence[int]) -> int:
    """How many elements a box of this shape has: 1 for `()`."""
    return prod(shape)


def byte_runs(
    stored_shape: Sequence[int], start: Sequence[int], shape: Sequence[int], itemsize: int
) -> list[tuple[int, int]]:
    """Which bytes of a row-major array of `stored_shape` hold its slice at `start` of `shape`.

    Returns `(byte offset in the array, length in bytes)` in rising order; runs never touch, so that a contiguous slice
    is one run. Raises `CheckpointingException` where the slice is not inside.
    """
    if complaint := is_outside(stored_shape, start, shape):
        raise CheckpointingException(f"no bytes for a slice at {tuple(start)} of shape {tuple(shape)}: {complaint}")
    if not shard_numel(shape):
        return []
    axis = len(shape)  # the last axis that is not taken whole ends a run
    while axis and shape[axis - 1] == stored_shape[axis - 1]:
        axis -= 1
    outer = max(axis - 1, 0)
    strides = [itemsize * prod(stored_shape[i + 1 :]) for i in range(len(shape))]
    length = itemsize * prod(shape[outer:])
    starts = np.array(sum(strides[i] * start[i] for i in range(len(shape))), dtype=np.int64)
    for i in range(outer):
        starts = starts[..., None] + strides[i] * np.arange(shape[i], dtype=np.int64)
    return [(each, length) for each in starts.ravel().tolist()]


def is_outside(global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> str:
    """What is wrong with the bounds of a chunk, with the arithmetic; "" for a chunk that lies inside."""
    if not len(global_shape) == len(offset) == len(shape):
        return f"{len(global_shape)}, {len(offset)} and {len(shape)} axes"
    for axis, (whole, start, size) in enumerate(zip(global_shape, offset, shape, strict=True)):
        if start < 0 or size < 0 or start + size > whole:
            return f"axis {axis}: offset {start} + size {size} is not within 0..{whole}"
    return ""


@dataclass(frozen=True)
class Grid:
    """Where a chunk of a regular grid lies: the global shape, the chunk's offset, the number of chunks of each axis."""

    global_shape: Shape
    offset: Shape
    fragments: Shape


def place_by_ranks(local_shape: Sequence[int], rank_offsets: Sequence[Sequence[int]], prepended: int = 0) -> Grid:
    """Where a local shard lies when each `(axis, offset, fragments)` cuts a global axis into equal fragments.

    Axes count the `prepended` ones, each of which has one element per fragment. Raises `CheckpointingException` for an
    axis that is negative, too large or named twice, fewer than one fragment, an offset not below its fragments.
    """
    if prepended < 0:
        raise CheckpointingException(f"prepend_axis_num {prepended} is negative")
    sizes = [1] * prepended + list(local_shape)
    global_shape, offsets, fragments = list(sizes), [0] * len(sizes), [1] * len(sizes)
    named = set()
    for given in rank_offsets:
        if len(given) != 3:
            raise CheckpointingException(f"{given!r} is not (axis, rank offset, fragments)")
        axis, offset, count = given
        if not 0 <= axis < len(sizes):
            raise CheckpointingException(f"axis {axis} of {tuple(given)} is not within 0..{len(sizes) - 1}")
        if count < 1:
            raise CheckpointingException(f"{tuple(given)} cuts axis {axis} into {count} fragments; at least 1")
        if not 0 <= offset < count:
            raise CheckpointingException(f"{tuple(given)}: offset {offset} is not within 0..{count - 1}")
        if axis in named:
            raise CheckpointingException(f"axis {axis} is named twice: {[tuple(each) for each in rank_offsets]}")
        named.add(axis)
        global_shape[axis], offsets[axis], fragments[axis] = count * sizes[axis], offset * sizes[axis], count
    return Grid(tuple(global_shape), tuple(offsets), tuple(fragments))


def off_the_grid(offset: Sequence[int], local_shape: Sequence[int], prepended: int = 0) -> str:
    """Which axis' offset is no multiple of the local size; "" where each is one. Axes of size 0 are skipped."""
    for axis, (start, size) in enumerate(zip(offset[prepended:], local_shape, strict=True), start=prepended):
        if size and start % size:
            return f"axis {axis}: offset {start} % local size {size} = {start % size}, not 0"
    return ""


def wrong_fragments(
    global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int], fragments: Sequence[int]
) -> str:
    """Where the fragments do not fit a chunk's shapes, all of the global tensor's axes; "" where they do.

    An axis of G elements in F fragments has chunks of G/F, rounded up.
    """
    if len(fragments) != len(global_shape):
        return f"{len(fragments)} fragmentations for {len(global_shape)} axes"
    for axis, (whole, start, size, count) in enumerate(zip(global_shape, offset, shape, fragments, strict=True)):
        if count < 1:
            return f"axis {axis}: {count} fragments; at least 1"
        if -(-whole // count) != size:
            return f"axis {axis}: {whole} elements in {count} fragments make chunks of {-(-whole // count)}, not {size}"
        if size and start // size >= count:
            return f"axis {axis}: offset {start} / local size {size} = chunk {start // size} of {count}"
    return ""


def chunk_index(offset: Sequence[int], local_shape: Sequence[int], prepended: int = 0) -> Shape:
    """Which chunk of the grid it is, per global axis; 0 along axes of size 0.

    Raises `CheckpointingException` for an offset that is no multiple of the local size.
    """
    if complaint := off_the_grid(offset, local_shape, prepended):
        raise CheckpointingException(f"a chunk that is not on a regular grid has no index: {complaint}")
    inner = zip(offset[prepended:], local_shape, strict=True)
    return (*offset[:prepended], *(start // size if size else 0 for start, size in inner))


def chunk_sizes(global_shape: Sequence[int], fragments: Sequence[int], *, rounded: bool = False) -> Shape:
    """How many elements a chunk has along each axis; with `rounded` what does not divide is rounded down.

    Raises `CheckpointingException` where an axis does not divide.
    """
    for axis, (whole, count) in enumerate(zip(global_shape, fragments, strict=True)):
        if whole % count and not rounded:
            raise CheckpointingException(f"axis {axis}: {whole} elements % {count} fragments = {whole % count}, not 0")
    return tuple(whole // count for whole, count in zip(global_shape, fragments, strict=True))


def scaled(value: int, length: int, size: int) -> int | None:
    """`value * length / size` where `value` counts whole chunks of `size`, else None; 0 chunks of size 0 stay 0."""
    if value % size if size else value:
        return None
    return value // size * length if size else 0


def run_of_cuts(size: int, cuts: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """Which elements of an axis are left after cuts, as `(offset, length)`; None where they do not lie together.

    Each cut is `(split factor, parts, index)`: the elements left are cut into as many pieces as the split factor says,
    each piece into `parts`, and the parts `index` of all pieces are kept. Pieces and parts are as `torch.chunk` makes
    them: of the size that is rounded up, the last ones smaller or empty. Where nothing is left the offset is `size`.
    """
    kept = [(0, size)]
    for factor, parts, index in cuts:
        total = sum(end - start for start, end in kept)
        piece = -(-total // factor)
        chosen = []
        for low in range(0, total, piece or 1):
            inside = min(piece, total - low)
            part = -(-inside // parts)
            chosen.append((low + index * part, low + min((index + 1) * part, inside)))  # or nothing
        kept = _merged_runs(_select(kept, chosen))
    if len(kept) > 1:
        return None
    return (kept[0][0], kept[0][1] - kept[0][0]) if kept else (size, 0)


def _select(runs: Sequence[tuple[int, int]], positions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of `runs` at these positions, which count the elements of all runs."""
    found = []
    for low, high in positions:
        before = 0
        for start, end in runs:
            a, b = max(low, before), min(high, before + end - start)
            if a < b:
                found.append((start + a - before, start + b - before))
            before += end - start
    return found


def _merged_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
