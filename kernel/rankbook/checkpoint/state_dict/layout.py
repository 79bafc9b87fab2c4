"""Compute the position of a shard in its global tensor, and of a slice's bytes in a stored array.

Pure arithmetic on integers: offsets, shapes, fragments. Shapes and offsets are tuples, in elements. A *chunk* is a box
`(offset, shape)` of a global tensor. On a regular grid, `fragments` is the number of chunks along every axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rankbook.errors import CheckpointError

Shape = tuple[int, ...]


def shard_numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a box with this shape: 1 for `()`."""
    return prod(shape)


def byte_runs(
    stored_shape: Sequence[int], start: Sequence[int], shape: Sequence[int], itemsize: int
) -> list[tuple[int, int]]:
    """Return the byte ranges of a row-major array of `stored_shape` that hold its slice at `start` of `shape`.

    Ranges are `(byte offset in the array, length in bytes)`, ascending; adjacent ranges are merged, so a contiguous
    slice is one range. Raises `CheckpointError` if the slice is not inside the array.
    """
    if problem := bounds_error(stored_shape, start, shape):
        raise CheckpointError(f"slice at {tuple(start)} of shape {tuple(shape)} is outside the array: {problem}")
    if not shard_numel(shape):
        return []
    # Example: the slice at (1, 0, 2) of shape (2, 3, 2) of an array of shape (4, 3, 5). The last axis is cut, so a run
    # has 2 elements, and there are 2 * 3 runs, which start at 1*15 + 0*5 + 2 = 17 elements, 22, 27, 32 and so on. If
    # the last axis were taken whole, all of axis 1 would follow without a gap, and there would be one run.
    axis = len(shape)  # a run spans the axes that are taken whole, and one more
    while axis and shape[axis - 1] == stored_shape[axis - 1]:
        axis -= 1
    outer = max(axis - 1, 0)
    strides = [itemsize * prod(stored_shape[i + 1 :]) for i in range(len(shape))]
    length = itemsize * prod(shape[outer:])
    # All runs have the same length. Their starts are built axis by axis: one more axis of the array per axis of the
    # slice.
    starts = np.array(sum(strides[i] * start[i] for i in range(len(shape))), dtype=np.int64)
    for i in range(outer):
        starts = starts[..., None] + strides[i] * np.arange(shape[i], dtype=np.int64)
    return [(begin, length) for begin in starts.ravel().tolist()]


def bounds_error(global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> str:
    """Return an error message, with the arithmetic, if a chunk is not inside its global tensor, else ""."""
    if not len(global_shape) == len(offset) == len(shape):
        return f"global shape, offset and shape have {len(global_shape)}, {len(offset)} and {len(shape)} axes"
    for axis, (extent, start, size) in enumerate(zip(global_shape, offset, shape, strict=True)):
        if start < 0 or size < 0 or start + size > extent:
            return f"axis {axis}: offset {start} + size {size} is not within 0..{extent}"
    return ""


@dataclass(frozen=True)
class Grid:
    """The position of a chunk on a regular grid: global shape, the chunk's offset, and the chunks along every axis."""

    global_shape: Shape
    offset: Shape
    fragments: Shape


def grid_from_ranks(local_shape: Sequence[int], rank_offsets: Sequence[Sequence[int]], prepended: int = 0) -> Grid:
    """Compute the position of a local shard from `(axis, offset, fragments)` tuples.

    A tuple says that the axis of the global tensor is cut into `fragments` equal chunks, of which the shard is number
    `offset`. Axes are counted with the `prepended` ones, which have one element per fragment. Raises
    `CheckpointError` for an axis that is out of range or named twice, fewer than one fragment, or an offset that
    is not smaller than the number of fragments.
    """
    if prepended < 0:
        raise CheckpointError(f"prepend_axis_num must be >= 0, got {prepended}")
    # Example: a local shard of shape (2, 3) with the rank offset (0, 1, 4) is the second of four chunks along axis 0:
    # global shape (8, 3), offset (2, 0), fragments (4, 1).
    sizes = [1] * prepended + list(local_shape)
    global_shape, offsets, fragments = list(sizes), [0] * len(sizes), [1] * len(sizes)
    named = set()
    for entry in rank_offsets:
        if len(entry) != 3:
            raise CheckpointError(f"invalid rank offset {entry!r}: expected (axis, offset, fragments)")
        axis, offset, count = entry
        if not 0 <= axis < len(sizes):
            raise CheckpointError(f"axis {axis} of {tuple(entry)} is not within 0..{len(sizes) - 1}")
        if count < 1:
            raise CheckpointError(f"{tuple(entry)}: fragments must be >= 1, got {count}")
        if not 0 <= offset < count:
            raise CheckpointError(f"{tuple(entry)}: offset {offset} is not within 0..{count - 1}")
        if axis in named:
            raise CheckpointError(f"axis {axis} is named twice: {[tuple(entry) for entry in rank_offsets]}")
        named.add(axis)
        # Chunks are equal, so the global size is the number of chunks times the local size.
        global_shape[axis], offsets[axis], fragments[axis] = count * sizes[axis], offset * sizes[axis], count
    return Grid(tuple(global_shape), tuple(offsets), tuple(fragments))


def grid_error(offset: Sequence[int], local_shape: Sequence[int], prepended: int = 0) -> str:
    """Return an error message if an offset is not a multiple of the local size, else "".

    Axes of size 0 are skipped.
    """
    for axis, (start, size) in enumerate(zip(offset[prepended:], local_shape, strict=True), start=prepended):
        if size and start % size:
            return f"axis {axis}: offset {start} % local size {size} = {start % size}, not 0"
    return ""


def fragments_error(
    global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int], fragments: Sequence[int]
) -> str:
    """Return an error message if `fragments` does not match a chunk's shapes, else "".

    All arguments include prepended axes. An axis of G elements in F fragments has chunks of G / F elements, rounded up.
    """
    if len(fragments) != len(global_shape):
        return f"axis_fragmentations has {len(fragments)} elements for {len(global_shape)} axes"
    for axis, (extent, start, size, count) in enumerate(zip(global_shape, offset, shape, fragments, strict=True)):
        if count < 1:
            return f"axis {axis}: fragments must be >= 1, got {count}"
        # -(-a // b) is a / b rounded up.
        if (expected := -(-extent // count)) != size:
            return f"axis {axis}: {extent} elements in {count} fragments make chunks of {expected}, not {size}"
        if size and start // size >= count:
            return f"axis {axis}: offset {start} / local size {size} = chunk index {start // size}, expected < {count}"
    return ""


def chunk_index(offset: Sequence[int], local_shape: Sequence[int], prepended: int = 0) -> Shape:
    """Return the index of a chunk in the grid, per global axis; 0 along axes of size 0.

    Raises `CheckpointError` if an offset is not a multiple of the local size.
    """
    if problem := grid_error(offset, local_shape, prepended):
        raise CheckpointError(f"the chunk is not on a regular grid: {problem}")
    inner = zip(offset[prepended:], local_shape, strict=True)
    return (*offset[:prepended], *(start // size if size else 0 for start, size in inner))


def chunk_sizes(global_shape: Sequence[int], fragments: Sequence[int], *, rounded: bool = False) -> Shape:
    """Return the number of elements of a chunk along every axis; with `rounded`, remainders are rounded down.

    Raises `CheckpointError` if an axis does not divide evenly and `rounded` is not set.
    """
    for axis, (extent, count) in enumerate(zip(global_shape, fragments, strict=True)):
        if extent % count and not rounded:
            raise CheckpointError(f"axis {axis}: {extent} elements % {count} fragments = {extent % count}, not 0")
    return tuple(extent // count for extent, count in zip(global_shape, fragments, strict=True))


def rescale(value: int, length: int, size: int) -> int | None:
    """Return `value * length / size` if `value` is a multiple of `size`, else None; 0 of size 0 stays 0."""
    if value % size if size else value:
        return None
    return value // size * length if size else 0


def cut_range(size: int, cuts: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """Return the elements of an axis that remain after cuts, as `(offset, length)`, or None if not contiguous.

    A cut is `(split factor, parts, index)`: the remaining elements are split into as many pieces as the split factor,
    every piece into `parts`, and part `index` of all pieces is kept. Pieces and parts have the sizes of `torch.chunk`:
    rounded up, the last ones smaller or empty. If nothing remains, the offset is the axis' size.

    Where the split factors are the numbers of parts of the later cuts, as for FSDP over tensor parallelism, the later
    cuts were made first: they are taken in this order.
    """
    # Every cut works on what the earlier cuts have left, which is a list of ranges of the axis.
    #
    # Example: tensor parallelism cuts 8 elements into 2 parts, and FSDP cuts each of these into 2 more. DTensor lists
    # the FSDP cut first, with split factor 2. For index 1 of both, the cuts are (2, 2, 1) and (1, 2, 1):
    #
    #     2 pieces [0, 4) and [4, 8), part 1 of each      runs [(2, 4), (6, 8)]
    #     1 piece of these 4 elements, part 1 of it       runs [(6, 8)], so the result is offset 6, length 2
    #
    # In this case the order in which the cuts were made is known, the reverse one. Only that order is right if the axis
    # does not divide evenly: parts of FSDP that are shorter in one piece than in another would shift the second cut.
    later = [prod(parts for _, parts, _ in cuts[number + 1 :]) for number in range(len(cuts))]
    if [factor for factor, _, _ in cuts] == later:
        cuts = [(1, parts, index) for _, parts, index in reversed(cuts)]
    runs = [(0, size)]
    for factor, parts, index in cuts:
        total = sum(end - start for start, end in runs)
        piece = -(-total // factor)
        chosen = []
        # Positions are counted in the concatenation of the remaining ranges, and translated back by `_select_runs`.
        for low in range(0, total, piece or 1):
            inside = min(piece, total - low)
            part = -(-inside // parts)
            chosen.append((low + index * part, low + min((index + 1) * part, inside)))  # can be empty
        runs = _merge_runs(_select_runs(runs, chosen))
    if len(runs) > 1:
        return None
    return (runs[0][0], runs[0][1] - runs[0][0]) if runs else (size, 0)


def _select_runs(runs: Sequence[tuple[int, int]], positions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sections of `runs` at `positions`, which are ranges in the concatenation of all runs."""
    selected = []
    for low, high in positions:
        before = 0
        for start, end in runs:
            a, b = max(low, before), min(high, before + end - start)
            if a < b:
                selected.append((start + a - before, start + b - before))
            before += end - start
    return selected


def _merge_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
