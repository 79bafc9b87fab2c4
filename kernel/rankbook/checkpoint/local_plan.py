"""Describe one rank's shards and objects as compact arrays, for exchange between ranks.

A rank sends its `LocalPlan` to the others, or only the plan's digests if the ranks already know it. The arrays are
cheap to serialize and to compare.

`covers_exactly_once` tests that the chunks of all ranks fill every tensor exactly once; `coverage_errors` then explains
the faults of one tensor.

The test is randomized. Every coordinate of an axis gets a pseudo-random 64-bit number; the measure of an interval is
the difference of the numbers at its ends, and the measure of a box is the product over its axes, modulo 2^64. If boxes
fill a tensor exactly once, their measures add up to the tensor's, for any choice of numbers. If they do not, the sums
agree only by coincidence, with a probability of about 2^-60. So the test takes one product per box, without sorting or
comparing pairs, for regular and irregular grids alike.
"""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankbook.formatting import truncate_list
from rankbook.ranks import abbreviate_ranks

Integers: TypeAlias = npt.NDArray[np.int64]


class LocalShard(NamedTuple):
    """A chunk of a global tensor, or an element of a grid of objects, as the planner sees it.

    Shapes and offsets are in elements. `local_shape` has the global tensor's axes, with extent 1 for prepended ones; an
    object needs neither a local shape nor a dtype. Any object with these attributes can be used instead.
    """

    key: str
    global_shape: Sequence[int]
    global_offset: Sequence[int]
    local_shape: Sequence[int] = ()
    dtype_name: str = "object"
    is_main: bool = True


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes per element of the dtype with this name, such as "float32" or "float8_e4m3fn".

    Returns 1 for dtypes that pack several elements into a byte.
    """
    # The first number in the name is the number of bits. "bool" has none, and takes a byte.
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True, eq=False, slots=True)
class ChunkTable:
    """A rank's chunks as arrays, one row per chunk, in the rank's order.

    The arrays of shapes and offsets are (rows, max axes); a row with fewer axes is padded with extent 1 and offset 0.
    `key_digest` is a digest of what must not differ between ranks (key, dtype, global shape), row by row; `layout` is a
    digest of the key digest, offsets and shapes. What is stored depends on `layout` and `main` alone.
    """

    names: bytes
    # Example of a table with two chunks, one of "w" with two axes and one of "b" with one axis:
    #
    #     names = b"wb"         name_ends = [1, 2]          dtypes = ("float32",)      dtype = [0, 0]
    #     axes = [2, 1]         global_shape = [[4, 2],     offset = [[2, 0],          shape = [[2, 2],
    #                                           [2, 1]]               [0, 0]]                   [2, 1]]
    name_ends: Integers
    dtypes: tuple[str, ...]
    dtype: npt.NDArray[np.uint16]
    axes: npt.NDArray[np.uint8]
    global_shape: Integers
    offset: Integers
    shape: Integers
    main: npt.NDArray[np.bool_]
    key_digest: bytes = b""
    layout: bytes = b""

    def __post_init__(self) -> None:
        if not self.key_digest:
            key_digest = _digest(self.names, self.name_ends, repr(self.dtypes).encode(), self.dtype, self.axes)
            object.__setattr__(
                self, "key_digest", _digest(key_digest, repr(self.global_shape.shape).encode(), self.global_shape)
            )
            # The key digest goes into the layout, so that equal layouts mean equal keys as well.
            object.__setattr__(self, "layout", _digest(self.key_digest, self.offset, self.shape))

    def __len__(self) -> int:
        return len(self.axes)

    @property
    def width(self) -> int:
        """Return the number of axes of the padded arrays."""
        return int(self.offset.shape[1])

    def keys(self) -> list[str]:
        """Return the keys, one per row."""
        ends = self.name_ends.tolist()
        return [self.names[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], bool]]) -> ChunkTable:
        """Build a table from tuples (key, dtype, global shape, offset, shape, is main), one per chunk.

        A chunk's two shapes and its offset have the same number of axes.
        """
        rows = list(rows)
        # All names in one bytes object with their end positions: pickling one object is much faster than one per chunk.
        names = [key.encode() for key, *_ in rows]
        dtypes = tuple(sorted({row[1] for row in rows}))
        # A dtype is stored as its index in `dtypes`, two bytes per chunk.
        code = {name: number for number, name in enumerate(dtypes)}
        axes = [len(row[2]) for row in rows]
        width = max(axes, default=0)
        padding = {count: (width - count) for count in set(axes)}
        ones = {count: (1,) * more for count, more in padding.items()}
        zeros = {count: (0,) * more for count, more in padding.items()}
        # Global shapes, offsets and shapes, each padded to the same number of axes and converted by one call of NumPy:
        # converting row by row takes ten times as long.
        extents = np.empty((3, len(rows), width), np.int64)
        for number, fill in enumerate((ones, zeros, ones)):
            values = [(*row[2:5][number], *fill[count]) for row, count in zip(rows, axes, strict=True)]
            extents[number] = np.asarray(values, np.int64).reshape(len(rows), width)
        return cls(
            b"".join(names),
            np.cumsum([len(name) for name in names], dtype=np.int64),
            dtypes,
            np.asarray([code[row[1]] for row in rows], np.uint16),
            np.asarray(axes, np.uint8),
            extents[0],
            extents[1],
            extents[2],
            np.asarray([row[5] for row in rows], np.bool_),
        )


@dataclass(frozen=True, eq=False, slots=True)
class LocalPlan:
    """The contents of one rank: chunks of tensors, objects, and digests of the common part by path."""

    tensors: ChunkTable
    objects: ChunkTable
    common: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Iterable[LocalShard],
        objects: Iterable[LocalShard] = (),
        common: Mapping[str, str] | str = "",
    ) -> LocalPlan:
        """Build the plan of a rank from its shards, in the rank's order.

        `common` is a digest per path of the common part, or one digest of all of it. Raises `ValueError` if a shard's
        shapes and offset have different numbers of axes.
        """
        return cls(
            ChunkTable.of(
                (shard.key, shard.dtype_name, shard.global_shape, shard.global_offset, shard.local_shape, shard.is_main)
                for shard in tensors
            ),
            ChunkTable.of(
                (
                    shard.key,
                    "object",
                    shard.global_shape,
                    shard.global_offset,
                    # An object is a box of one element in its grid of objects.
                    (1,) * len(shard.global_shape),
                    shard.is_main,
                )
                for shard in objects
            ),
            common if isinstance(common, Mapping) else {"": common},
        )

    def pack(self) -> bytes:
        """Serialize the plan for other ranks: about 9 bytes per chunk, a tenth of a plain pickle."""
        # Level 1: the arrays are very regular, and time matters more than the last percent.
        return zlib.compress(pickle.dumps(self, pickle.HIGHEST_PROTOCOL), 1)

    @staticmethod
    def unpack(data: bytes) -> LocalPlan:
        """Deserialize a plan that another rank packed.

        Uses pickle, so the bytes must come from a rank of the same job.
        """
        declared = pickle.loads(zlib.decompress(data))
        assert isinstance(declared, LocalPlan)
        return declared

    def digest(self) -> str:
        """Return a digest of everything that decides which bytes this rank stores where.

        The common part is not included, because it may change between saves.
        """
        # `main` is not part of the layout, but decides who stores a chunk.
        tables = (self.tensors, self.objects)
        return _digest(*(part for table in tables for part in (table.layout, table.main))).hex()

    def common_digest(self) -> str:
        """Return a digest of the common part, which must be equal on all ranks."""
        return _digest(repr(sorted(self.common.items())).encode()).hex()

    def signature(self) -> tuple[str, str]:
        """Return both digests, which identify the plan in a `PlanCache`."""
        return self.digest(), self.common_digest()


def _digest(*parts: bytes | npt.NDArray[np.generic]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).data
        # The length in front keeps apart parts that would be equal when joined.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


BLOCK = 1 << 15
"""Rows processed at a time, so that the working set fits into the cache of a core."""

MAX_CELLS = 1 << 22
"""Maximum cells of the grid of all cuts; beyond that, missing elements are counted and not located."""

MAX_LISTED = 4
"""Maximum number of faults of one kind that a message describes."""


def covers_exactly_once(rows: Integers, offset: Integers, shape: Integers, extents: Integers) -> npt.NDArray[np.bool_]:
    """Return a mask over the tensors: True if a tensor's boxes fill it exactly once.

    `extents` (tensors, axes) are the global shapes, `rows` (boxes,) is the tensor of every box, `offset` and `shape`
    are (boxes, axes). A tensor without elements is filled by zero boxes.
    """
    volume, measure = np.zeros(len(extents), np.int64), np.zeros(len(extents), np.uint64)
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        np.add.at(volume, rows[part], chunk_volumes(shape[part]))
        np.add.at(measure, rows[part], _measures(offset[part], offset[part] + shape[part]))
    # The volume is compared as well. It costs little, and excludes the most common fault, a missing chunk, with
    # certainty.
    same = (volume == chunk_volumes(extents)) & (measure == _measures(np.zeros_like(extents), extents))
    return np.asarray(same, np.bool_)


def chunk_volumes(shape: Integers) -> Integers:
    """Return the number of elements of every row of shapes (rows, axes)."""
    return np.asarray(np.prod(shape, axis=1, dtype=np.int64), np.int64)


def _measures(low: Integers, high: Integers) -> npt.NDArray[np.uint64]:
    # Example on one axis: boxes [0, 2) and [2, 5) have the measures h(2) - h(0) and h(5) - h(2). Their sum is
    # h(5) - h(0), the measure of [0, 5), whatever h is. With a hole or an overlap, terms of h do not cancel. Unsigned
    # integers of NumPy wrap around, which is the arithmetic modulo 2^64 that is wanted.
    product = np.ones(len(low), np.uint64)
    for axis in range(low.shape[1]):
        product *= _scattered(high[:, axis], axis) - _scattered(low[:, axis], axis)
    return product


def _scattered(numbers: Integers, axis: int) -> npt.NDArray[np.uint64]:
    """Return the Splitmix64 hash (Steele, Lea and Flood 2014) of all numbers, with a different sequence per axis."""
    mixed = numbers.astype(np.uint64)
    mixed += np.uint64((axis + 1) * 0xD1B54A32D192ED03 % 2**64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class ChunkBoxes(NamedTuple):
    """Non-empty chunks of one tensor: offset and shape (boxes, axes), ranks (boxes,)."""

    offset: Integers
    shape: Integers
    ranks: Integers


def coverage_errors(global_shape: Sequence[int], main_chunks: ChunkBoxes, other_chunks: ChunkBoxes) -> list[str]:
    """Describe the coverage errors of one tensor's main chunks, with ranks and offsets; empty if there are none.

    `global_shape` is (axes,); `other_chunks` are the replicas that are not main, named if they lie in a hole.
    """
    offset, shape, ranks = main_chunks
    # Faults are described one kind after the other. Boxes of one kind are removed before the next is looked for, so
    # that one cause is reported once.
    outside = (offset < 0).any(axis=1) | (offset + shape > np.asarray(global_shape, np.int64)).any(axis=1)
    errors = [
        f"rank {ranks[row]}'s chunk {format_box(offset[row], shape[row])} is outside the global shape"
        for row in np.flatnonzero(outside)
    ]
    offset, shape, ranks = offset[~outside], shape[~outside], ranks[~outside]
    # Equal boxes become neighbours, and boxes are sorted by the first axis, which `_overlaps` requires.
    order = np.lexsort((ranks, *shape.T[::-1], *offset.T[::-1]))
    offset, shape, ranks = offset[order], shape[order], ranks[order]
    errors += _second_mains(offset, shape, ranks)
    first = np.ones(len(ranks), np.bool_)
    first[1:] = (offset[1:] != offset[:-1]).any(axis=1) | (shape[1:] != shape[:-1]).any(axis=1)
    offset, shape, ranks = offset[first], shape[first], ranks[first]
    errors += _overlaps(offset, shape, ranks)
    errors += _holes(global_shape, offset, shape, other_chunks)
    return errors


def format_box(offset: Iterable[int], shape: Iterable[int]) -> str:
    """Format a box in slice notation: "[4:8, 0:8]", or "[()]" for a tensor without axes."""
    slices = [f"{start}:{start + extent}" for start, extent in zip(offset, shape, strict=True)]
    return f"[{', '.join(slices) or '()'}]"


def _second_mains(offset: Integers, shape: Integers, ranks: Integers) -> list[str]:
    """Describe equal boxes; the boxes are sorted."""
    same = (offset[1:] == offset[:-1]).all(axis=1) & (shape[1:] == shape[:-1]).all(axis=1)
    # `same[i]` compares box i with box i + 1. A run of equal boxes is reported once, with all its ranks; `end` is the
    # end of the last run.
    errors, end = [], 0
    for row in np.flatnonzero(same).tolist():
        if row < end:
            continue
        end = row + 1
        while end < len(same) and same[end]:
            end += 1
        holders = ranks[row : end + 1].tolist()
        where, once = format_box(offset[row], shape[row]), len(set(holders))
        subject = f"{abbreviate_ranks(holders)} all hold" if once > 1 else f"{abbreviate_ranks(holders)} holds"
        times = f" {len(holders)} times" if once < len(holders) else ""
        errors.append(f"{subject} the main replica of {where}{times}: only one may have replica_id 0")
    return truncate_list(errors, MAX_LISTED)


def _overlaps(offset: Integers, shape: Integers, ranks: Integers) -> list[str]:
    """Describe pairs of boxes that share elements; the boxes are distinct and sorted by offset."""
    if not offset.shape[1]:
        return []
    errors: list[str] = []
    end = offset + shape
    # Only later boxes that begin before this one's end on the first axis can overlap it.
    for row in range(len(ranks)):
        last = int(np.searchsorted(offset[:, 0], end[row, 0], side="left"))
        following = slice(row + 1, last)
        meets = ((offset[following] < end[row]) & (end[following] > offset[row])).all(axis=1)
        errors += [
            f"rank {ranks[row]}'s main chunk {format_box(offset[row], shape[row])} overlaps "
            f"rank {ranks[other]}'s {format_box(offset[other], shape[other])}"
            for other in (np.flatnonzero(meets) + row + 1).tolist()
        ]
        # If everything overlaps, the number of pairs is quadratic; a few are enough for the message.
        if len(errors) > 20 * MAX_LISTED:
            break
    return truncate_list(errors, MAX_LISTED)


def _holes(global_shape: Sequence[int], offset: Integers, shape: Integers, other_chunks: ChunkBoxes) -> list[str]:
    """Describe boxes that no chunk covers, found on the grid of all cuts."""
    if 0 in global_shape:
        return []
    cuts = [
        np.unique(np.concatenate([offset[:, axis], offset[:, axis] + shape[:, axis], [0, extent]]))
        for axis, extent in enumerate(global_shape)
    ]
    cells = tuple(len(edges) - 1 for edges in cuts)
    if np.prod([float(count) for count in cells]) > MAX_CELLS:
        covered = int(chunk_volumes(shape).sum())
        total = int(np.prod(np.asarray(global_shape, np.int64)))
        return [f"the main replicas cover {covered} of {total} elements"] if covered < total else []
    # Cut every axis at all chunk boundaries: a chunk then covers whole cells of the grid. Mark them, and grow boxes
    # greedily, last axis first, from the first cell that is not covered.
    filled = np.zeros(cells, np.bool_)
    lows = [np.searchsorted(edges, offset[:, axis]) for axis, edges in enumerate(cuts)]
    highs = [np.searchsorted(edges, offset[:, axis] + shape[:, axis]) for axis, edges in enumerate(cuts)]
    for row in range(len(offset)):
        filled[tuple(slice(low[row], high[row]) for low, high in zip(lows, highs, strict=True))] = True
    errors: list[str] = []
    while not filled.all() and len(errors) <= MAX_LISTED:
        # The first free cell in row-major order. The box that grows from it is then marked, so that the next round
        # finds another hole.
        first = np.unravel_index(int(np.argmin(filled)), cells)
        hole = [slice(int(at), int(at) + 1) for at in first]
        for axis in reversed(range(len(cells))):
            while hole[axis].stop < cells[axis]:
                wider = slice(hole[axis].start, hole[axis].stop + 1)
                if filled[(*hole[:axis], wider, *hole[axis + 1 :])].any():
                    break
                hole[axis] = wider
        filled[tuple(hole)] = True
        low = np.asarray([edges[part.start] for edges, part in zip(cuts, hole, strict=True)], np.int64)
        high = np.asarray([edges[part.stop] for edges, part in zip(cuts, hole, strict=True)], np.int64)
        overlapping = ((other_chunks.offset < high) & (other_chunks.offset + other_chunks.shape > low)).all(axis=1)
        replicas = (
            f"; other replicas are on {abbreviate_ranks(other_chunks.ranks[overlapping])}" if overlapping.any() else ""
        )
        errors.append(f"no main replica covers {format_box(low, high - low)}{replicas}")
    return [*errors[:MAX_LISTED], "and more holes"] if len(errors) > MAX_LISTED else errors
