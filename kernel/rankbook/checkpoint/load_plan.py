"""Plan a load as data: which bytes of which file a rank copies into which box of its tensors.

The stored chunks and the wanted chunks may be cut in any way, so a checkpoint can be loaded onto another number of
ranks or another layout. The plan holds the overlaps of wanted and stored chunks, with byte ranges. It is computed
without torch and without reading tensor data. Missing keys and mismatches are returned, not raised: the strict mode of
the load decides what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from math import prod
from typing import NamedTuple

import numpy as np

from rankbook.checkpoint.format.manifest import Chunk, Manifest, StoredTensor
from rankbook.checkpoint.local_plan import (
    ChunkBoxes,
    Integers,
    coverage_errors,
    covers_exactly_once,
    format_box,
    itemsize,
)
from rankbook.checkpoint.state_dict.layout import Shape, byte_runs

CAST_HINT = "to convert it, pass cast=True to load()"


class WantedChunk(NamedTuple):
    """A chunk of a tensor that a rank wants to load, in elements; prepended axes count 1 in `shape`.

    With `allow_shape_mismatch` the stored tensor may have another global shape: the overlap is read, the rest is 0.
    """

    key: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    allow_shape_mismatch: bool = False


# Example: a tensor of shape (4, 6) is stored as two chunks of rows, A = [0:2] and B = [2:4]. A rank wants the
# columns [0:4, 3:6], so it reads one box from each:
#
#     from A: source (0, 3), shape (2, 3), first 3, target (0, 0)
#     from B: source (0, 3), shape (2, 3), first 3, target (2, 0)
#
# In A, with row-major strides (6, 1), the box spans the elements 3 to 11; three of these nine lie between its rows
# and are not wanted. `ChunkRead.span` returns these bounds in bytes.
class ReadItem(NamedTuple):
    """A box to copy from a stored chunk into a wanted chunk, in elements.

    `wanted` is the position of the wanted chunk, `target` the box's offset in it, `source` its offset in the stored
    chunk. `first` is the index of its first element in the chunk's data; the other elements follow by the chunk's
    `strides`.
    """

    wanted: int
    target: Shape
    source: Shape
    shape: Shape
    first: int


class ChunkRead(NamedTuple):
    """The boxes to read from one stored chunk of dtype `dtype`; `strides` are in elements, `itemsize` in bytes."""

    key: str
    file: str
    chunk: Chunk
    dtype: str
    itemsize: int
    strides: Shape
    reads: tuple[ReadItem, ...]

    def span(self, read: ReadItem) -> tuple[int, int]:
        """Return the byte range [start, stop) of the chunk's data from the first to the last element of a box."""
        # The last element is at the highest index along every axis. Strides are positive, so it lies last in memory
        # too.
        last = read.first + sum((size - 1) * step for size, step in zip(read.shape, self.strides, strict=True))
        return read.first * self.itemsize, (last + 1) * self.itemsize

    def runs(self, gap: int = 0) -> list[tuple[int, int]]:
        """Return ranges (start, length) of the chunk's data, in bytes and ascending, that contain all wanted elements.

        Ranges at most `gap` bytes apart are merged, so a contiguous slice is one range.
        """
        # Permute the axes by descending stride, so that the chunk's data is row-major, as `byte_runs` expects.
        order = sorted(range(len(self.strides)), key=lambda axis: (-self.strides[axis], axis))
        permuted_shape = [self.chunk.shape[axis] for axis in order]
        spans = [
            run
            for read in self.reads
            for run in byte_runs(
                permuted_shape,
                [read.source[axis] for axis in order],
                [read.shape[axis] for axis in order],
                self.itemsize,
            )
        ]
        if len(spans) < 2:
            return spans
        # A merged range begins where a run starts beyond the end of all earlier runs, plus the gap.
        starts, lengths = np.asarray(sorted(spans), np.int64).T
        ends = np.maximum.accumulate(starts + lengths)
        begins = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1] + gap]))
        stops = ends[np.concatenate([begins[1:] - 1, [len(ends) - 1]])]
        return list(zip(starts[begins].tolist(), (stops - starts[begins]).tolist(), strict=True))

    def split(self, read: ReadItem, most: int) -> Iterator[ReadItem]:
        """Split the box into boxes that span at most `most` bytes, down to single elements if need be."""
        start, stop = self.span(read)
        axes = [axis for axis, size in enumerate(read.shape) if size > 1]
        if stop - start <= most or not axes:
            yield read
            return
        # Cut the axis with the largest stride; where even one row of it spans too much, cut the row again.
        # The largest stride separates the parts farthest, so that the spans of the parts do not overlap.
        axis = max(axes, key=lambda candidate: self.strides[candidate])
        step = self.strides[axis] * self.itemsize
        rest = (stop - start) - (read.shape[axis] - 1) * step  # bytes that one row of that axis spans
        # n rows span rest + (n - 1) * step bytes. The largest n for which that is at most `most`.
        rows = max(1, 1 + (most - rest) // step) if most > rest else 1
        for begin in range(0, read.shape[axis], rows):
            part = ReadItem(
                read.wanted,
                _shifted(read.target, axis, begin),
                _shifted(read.source, axis, begin),
                (*read.shape[:axis], min(rows, read.shape[axis] - begin), *read.shape[axis + 1 :]),
                read.first + begin * self.strides[axis],
            )
            yield from self.split(part, most) if rows == 1 else (part,)


class Mismatch(NamedTuple):
    """A wanted chunk, by its position, that the checkpoint cannot provide as requested, and the reason."""

    wanted: int
    key: str
    what: str


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one rank, ordered by file and position, and the chunks that cannot be read.

    `zeros` are positions of wanted chunks that the reads do not fill completely: they are zeroed before anything is
    copied. `unexpected` are positions of wanted chunks whose key is not in the checkpoint.
    """

    chunks: list[ChunkRead] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    unexpected: list[int] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all boxes that are copied, in the stored dtype."""
        return sum(prod(read.shape) * chunk.itemsize for chunk in self.chunks for read in chunk.reads)


def plan_read(
    requests: Sequence[WantedChunk], manifest: Manifest, *, cast: bool = False, dtype_hint: str = CAST_HINT
) -> ReadPlan:
    """Plan the reads for the chunks that one rank wants.

    With `cast`, a different dtype is not a mismatch: the reader converts. Otherwise the mismatch ends with
    `dtype_hint`, which says what to do.
    """
    # Only wanted tensors are indexed: a rank of a pipeline wants few of a checkpoint's thousands.
    stored = _StoredTensors(manifest, {request.key for request in requests})
    plan = ReadPlan()
    reads_by_chunk: dict[tuple[str, int], list[ReadItem]] = {}
    for position, request in enumerate(requests):
        tensor = stored.tensors.get(request.key)
        if tensor is None:
            plan.unexpected.append(position)
        elif mismatch := tensor.mismatch(request, None if cast else dtype_hint):
            plan.mismatches.append(Mismatch(position, request.key, f"tensor {request.key!r}: {mismatch}"))
        else:
            # Elements that the stored chunks provide. They can be fewer with `allow_shape_mismatch` only, because
            # stored chunks are checked to fill their tensor exactly once.
            filled = 0
            for row, read in tensor.overlaps(position, request):
                filled += prod(read.shape)
                reads_by_chunk.setdefault((request.key, row), []).append(read)
            if filled < prod(request.shape):
                plan.zeros.append(position)
    for (key, row), reads in reads_by_chunk.items():
        tensor = stored.tensors[key]
        chunk = tensor.stored.chunks[tensor.rows[row]]
        name = manifest.files[chunk.file].name
        strides = tensor.strides_of(row)
        plan.chunks.append(ChunkRead(key, name, chunk, tensor.stored.dtype, tensor.itemsize, strides, tuple(reads)))
    # In the order of the bytes on disk, so that reading is sequential.
    plan.chunks.sort(key=lambda chunk_read: (chunk_read.chunk.file, chunk_read.chunk.data))
    return plan


class _IndexedTensor:
    """A stored tensor, with its non-empty chunks as arrays (chunks, axes).

    `rows` are the positions of those chunks in `stored.chunks`. `is_covered` is False if the chunks do not fill the
    tensor exactly once.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.rows = [row for row, chunk in enumerate(stored.chunks) if 0 not in chunk.shape]
        self.is_covered = True
        first = stored.chunks[self.rows[0]] if self.rows else None
        # From the data where there is any. The dtype's name is parsed only for a tensor without elements.
        self.itemsize = first.nbytes // prod(first.shape) if first else itemsize(stored.dtype)

    def _extents(self, values: Iterable[Shape]) -> Integers:
        return np.asarray(list(values), np.int64).reshape(len(self.rows), len(self.stored.shape))

    @cached_property
    def offset(self) -> Integers:
        return self._extents(self.stored.chunks[row].offset for row in self.rows)

    @cached_property
    def shape(self) -> Integers:
        return self._extents(self.stored.chunks[row].shape for row in self.rows)

    @cached_property
    def strides(self) -> Integers:
        """Return the strides of every chunk's data, in elements: row-major unless the manifest says otherwise."""
        # Row-major strides of all chunks at once: the cumulated product of the sizes from the last axis to the second.
        steps = np.ones_like(self.shape)
        np.cumprod(self.shape[:, :0:-1], axis=1, out=steps[:, -2::-1])
        for at, row in enumerate(self.rows):
            if (chunk_strides := self.stored.chunks[row].strides) is not None:
                steps[at] = chunk_strides
        return steps

    def strides_of(self, at: int) -> Shape:
        """Return the strides of one chunk."""
        return tuple(self.strides[at].tolist())

    def mismatch(self, request: WantedChunk, dtype_hint: str | None) -> str:
        """Return why the stored tensor does not match the wanted chunk, or "".

        Another dtype is a mismatch unless `dtype_hint` is None.
        """
        shape = self.stored.shape
        if len(request.global_shape) != len(shape) or (
            tuple(request.global_shape) != shape and not request.allow_shape_mismatch
        ):
            return f"global shape is {shape} in the checkpoint, but {tuple(request.global_shape)} was requested"
        if request.dtype != self.stored.dtype and dtype_hint is not None:
            return f"dtype is {self.stored.dtype} in the checkpoint, but {request.dtype} was requested; {dtype_hint}"
        # The global shapes are equal here, unless `allow_shape_mismatch` is set; then what is outside becomes zero.
        past = any(a + n > size for a, n, size in zip(request.offset, request.shape, shape, strict=True))
        if past and not request.allow_shape_mismatch:
            return f"the chunk {format_box(request.offset, request.shape)} is outside the global shape {shape}"
        return "" if self.is_covered else self.describe_coverage()

    def describe_coverage(self) -> str:
        """Describe the elements that no chunk covers, or more than one."""
        shape = self.stored.shape
        ranks = np.asarray([self.stored.chunks[row].rank for row in self.rows], np.int64)
        none = np.zeros((0, len(shape)), np.int64)
        wrong = coverage_errors(
            shape, ChunkBoxes(self.offset, self.shape, ranks), ChunkBoxes(none, none, none[:, :0].reshape(0))
        )
        return f"chunks in the checkpoint do not cover it exactly once: {'; '.join(wrong)}"

    def overlaps(self, position: int, request: WantedChunk) -> Iterator[tuple[int, ReadItem]]:
        """Yield the chunks that overlap the wanted one, as (row of the arrays, box to copy)."""
        # Two boxes overlap if on every axis the larger lower bound is below the smaller upper bound. All chunks of the
        # tensor are compared at once; there are usually as many as ranks.
        start = np.asarray(request.offset, np.int64)
        low = np.maximum(self.offset, start)
        high = np.minimum(self.offset + self.shape, start + np.asarray(request.shape, np.int64))
        meets = np.flatnonzero((low < high).all(axis=1))
        low, high = low[meets], high[meets]
        # From here on all columns have one entry per overlapping chunk: the box's offset in the wanted chunk and in the
        # stored one, its shape, and the index of its first element in the stored data.
        source = low - self.offset[meets]
        columns = (
            map(tuple, (low - start).tolist()),
            map(tuple, source.tolist()),
            map(tuple, (high - low).tolist()),
            (source * self.strides[meets]).sum(axis=1).tolist(),
        )
        yield from zip(meets.tolist(), map(ReadItem, repeat(position), *columns), strict=True)


class _StoredTensors:
    """The wanted tensors of a manifest, checked for chunks that leave holes or overlap."""

    def __init__(self, manifest: Manifest, keys: Iterable[str]) -> None:
        self.tensors = {key: _IndexedTensor(manifest.tensors[key]) for key in keys if key in manifest.tensors}
        # One vectorized check per number of axes instead of one per tensor.
        for axes in {len(tensor.stored.shape) for tensor in self.tensors.values()}:
            group = [tensor for tensor in self.tensors.values() if len(tensor.stored.shape) == axes]
            # `rows` of that function is the number of the tensor in `group`, once per chunk.
            is_covered = covers_exactly_once(
                np.repeat(np.arange(len(group)), [len(tensor.rows) for tensor in group]),
                np.concatenate([tensor.offset for tensor in group]),
                np.concatenate([tensor.shape for tensor in group]),
                np.asarray([tensor.stored.shape for tensor in group], np.int64).reshape(len(group), axes),
            )
            for row in np.flatnonzero(~is_covered).tolist():
                group[row].is_covered = False


def find_coverage_errors(manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, description) for tensors whose chunks do not fill them exactly once."""
    for key, tensor in _StoredTensors(manifest, keys).tensors.items():
        if not tensor.is_covered:
            yield key, tensor.describe_coverage()


def _shifted(offset: Shape, axis: int, by: int) -> Shape:
    return (*offset[:axis], offset[axis] + by, *offset[axis + 1 :])
