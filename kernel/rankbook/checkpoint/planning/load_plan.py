"""A load, planned as data: which bytes of which file go where, from any grid to any grid.

Owns: the overlaps of what is wanted with what is stored, byte ranges, and what does not match. Refuses: torch, reading
a file, to raise about keys: what is missing or does not match is returned, and the strict mode decides.
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
from rankbook.checkpoint.planning.local_plan import Integers, itemsize
from rankbook.checkpoint.planning.validation import ChunkBoxes, coverage_errors, covers_exactly_once, format_box
from rankbook.checkpoint.state_dict.layout import Shape, byte_runs


class WantedChunk(NamedTuple):
    """One chunk that a rank wants of a tensor, in elements; prepended axes count 1 in `shape`.

    With `allow_shape_mismatch` the stored tensor may have another global shape: what both have is read, the rest is 0.
    """

    key: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    allow_shape_mismatch: bool = False


class ReadItem(NamedTuple):
    """A box that goes from a stored chunk into a wanted one.

    `wanted` is the position of the wanted chunk, `target` the box's offset in it, `source` its offset in the stored
    chunk. `first` is the place of its first element in the chunk's data; the others follow by the chunk's `strides`.
    """

    wanted: int
    target: Shape
    source: Shape
    shape: Shape
    first: int


class ChunkRead(NamedTuple):
    """All that is wanted of one stored chunk, whose dtype it is; `strides` counts elements, `itemsize` bytes."""

    key: str
    file: str
    chunk: Chunk
    dtype: str
    itemsize: int
    strides: Shape
    reads: tuple[ReadItem, ...]

    def span(self, read: ReadItem) -> tuple[int, int]:
        """The bytes [start, stop) of the chunk's data from the first to the last element of a box."""
        last = read.first + sum((size - 1) * step for size, step in zip(read.shape, self.strides, strict=True))
        return read.first * self.itemsize, (last + 1) * self.itemsize

    def runs(self, gap: int = 0) -> list[tuple[int, int]]:
        """Ranges (start, length) of the chunk's data that hold all that is wanted, in rising order, in bytes.

        Ranges that are at most `gap` bytes apart are one, so a contiguous slice is one range.
        """
        order = sorted(range(len(self.strides)), key=lambda axis: (-self.strides[axis], axis))
        laid = [self.chunk.shape[axis] for axis in order]
        found = [
            run
            for read in self.reads
            for run in byte_runs(
                laid, [read.source[axis] for axis in order], [read.shape[axis] for axis in order], self.itemsize
            )
        ]
        if len(found) < 2:
            return found
        starts, lengths = np.asarray(sorted(found), np.int64).T
        ends = np.maximum.accumulate(starts + lengths)
        begins = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1] + gap]))
        stops = ends[np.concatenate([begins[1:] - 1, [len(ends) - 1]])]
        return list(zip(starts[begins].tolist(), (stops - starts[begins]).tolist(), strict=True))

    def parts(self, read: ReadItem, most: int) -> Iterator[ReadItem]:
        """The box in smaller ones, each spanning at most `most` bytes where it has more than one element."""
        start, stop = self.span(read)
        axes = [axis for axis, size in enumerate(read.shape) if size > 1]
        if stop - start <= most or not axes:
            yield read
            return
        axis = max(axes, key=lambda each: self.strides[each])
        step = self.strides[axis] * self.itemsize
        rest = (stop - start) - (read.shape[axis] - 1) * step  # what one row of that axis spans
        rows = max(1, 1 + (most - rest) // step) if most > rest else 1
        for begin in range(0, read.shape[axis], rows):
            part = ReadItem(
                read.wanted,
                _moved(read.target, axis, begin),
                _moved(read.source, axis, begin),
                (*read.shape[:axis], min(rows, read.shape[axis] - begin), *read.shape[axis + 1 :]),
                read.first + begin * self.strides[axis],
            )
            yield from self.parts(part, most) if rows == 1 else (part,)


class Mismatch(NamedTuple):
    """A wanted chunk, by its position, that the checkpoint cannot give as asked, and why, naming the key."""

    wanted: int
    key: str
    what: str


@dataclass(frozen=True)
class ReadPlan:
    """What a rank reads, ordered by file and position, and what it cannot.

    `zeros` are positions of wanted chunks that reads do not fill: 0 before anything is copied. `unexpected` are
    positions of those whose key is not in the checkpoint.
    """

    chunks: list[ChunkRead] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    unexpected: list[int] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the boxes that are copied, as they are stored."""
        return sum(prod(read.shape) * each.itemsize for each in self.chunks for read in each.reads)


def plan_read(wanted: Sequence[WantedChunk], manifest: Manifest, *, cast: bool = False) -> ReadPlan:
    """Which bytes to read for what one rank wants. With `cast` another dtype is no mismatch: the reader converts."""
    stored = _StoredTensors(manifest, {each.key for each in wanted})
    plan = ReadPlan()
    found: dict[tuple[str, int], list[ReadItem]] = {}
    for position, each in enumerate(wanted):
        held = stored.tensors.get(each.key)
        if held is None:
            plan.unexpected.append(position)
        elif what := held.mismatch(each, cast=cast):
            plan.mismatches.append(Mismatch(position, each.key, f"tensor {each.key!r}: {what}"))
        else:
            filled = 0
            for row, read in held.overlaps(position, each):
                filled += prod(read.shape)
                found.setdefault((each.key, row), []).append(read)
            if filled < prod(each.shape):
                plan.zeros.append(position)
    for (key, row), reads in found.items():
        held = stored.tensors[key]
        chunk = held.stored.chunks[held.rows[row]]
        name = manifest.files[chunk.file].name
        strides = held.strides_of(row)
        plan.chunks.append(ChunkRead(key, name, chunk, held.stored.dtype, held.itemsize, strides, tuple(reads)))
    plan.chunks.sort(key=lambda each: (each.chunk.file, each.chunk.data))
    return plan


class _Held:
    """One stored tensor, its chunks as arrays (chunks, axes); chunks without elements are in none of them."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.rows = [row for row, chunk in enumerate(stored.chunks) if 0 not in chunk.shape]
        self.sound = True
        first = stored.chunks[self.rows[0]] if self.rows else None
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
        """Elements between neighbours along each axis of each chunk's data."""
        steps = np.ones_like(self.shape)
        np.cumprod(self.shape[:, :0:-1], axis=1, out=steps[:, -2::-1])
        for at, row in enumerate(self.rows):
            if (own := self.stored.chunks[row].strides) is not None:
                steps[at] = own
        return steps

    def strides_of(self, at: int) -> Shape:
        """Those of one chunk."""
        return tuple(self.strides[at].tolist())

    def mismatch(self, wanted: WantedChunk, *, cast: bool) -> str:
        """Why this is not what is wanted, "" if it is."""
        shape = self.stored.shape
        if len(wanted.global_shape) != len(shape) or (
            tuple(wanted.global_shape) != shape and not wanted.allow_shape_mismatch
        ):
            return f"its global shape in the checkpoint is {shape}, and {tuple(wanted.global_shape)} was asked for"
        if wanted.dtype != self.stored.dtype and not cast:
            return (
                f"its dtype in the checkpoint is {self.stored.dtype}, and {wanted.dtype} was asked for: "
                "ask for a cast if that is meant"
            )
        past = any(a + n > size for a, n, size in zip(wanted.offset, wanted.shape, shape, strict=True))
        if past and not wanted.allow_shape_mismatch:
            return f"the chunk {format_box(wanted.offset, wanted.shape)} lies outside of its global shape {shape}"
        return "" if self.sound else self.misfit()

    def misfit(self) -> str:
        """Which elements no chunk has, or more than one."""
        shape = self.stored.shape
        ranks = np.asarray([self.stored.chunks[row].rank for row in self.rows], np.int64)
        none = np.zeros((0, len(shape)), np.int64)
        wrong = coverage_errors(
            shape, ChunkBoxes(self.offset, self.shape, ranks), ChunkBoxes(none, none, none[:, :0].reshape(0))
        )
        return f"its chunks in the checkpoint do not fit together: {'; '.join(wrong)}"

    def overlaps(self, position: int, wanted: WantedChunk) -> Iterator[tuple[int, ReadItem]]:
        """The chunks, by row of the arrays, that share elements with what is wanted, each with the box shared."""
        start = np.asarray(wanted.offset, np.int64)
        low = np.maximum(self.offset, start)
        high = np.minimum(self.offset + self.shape, start + np.asarray(wanted.shape, np.int64))
        meets = np.flatnonzero((low < high).all(axis=1))
        low, high = low[meets], high[meets]
        source = low - self.offset[meets]
        columns = (
            map(tuple, (low - start).tolist()),
            map(tuple, source.tolist()),
            map(tuple, (high - low).tolist()),
            (source * self.strides[meets]).sum(axis=1).tolist(),
        )
        yield from zip(meets.tolist(), map(ReadItem, repeat(position), *columns), strict=True)


class _StoredTensors:
    """Those of a manifest's tensors that are wanted, with the knowledge of which of them have all their elements."""

    def __init__(self, manifest: Manifest, keys: Iterable[str]) -> None:
        self.tensors = {key: _Held(manifest.tensors[key]) for key in keys if key in manifest.tensors}
        for axes in {len(held.stored.shape) for held in self.tensors.values()}:
            group = [held for held in self.tensors.values() if len(held.stored.shape) == axes]
            sound = covers_exactly_once(
                np.repeat(np.arange(len(group)), [len(held.rows) for held in group]),
                np.concatenate([held.offset for held in group]),
                np.concatenate([held.shape for held in group]),
                np.asarray([held.stored.shape for held in group], np.int64).reshape(len(group), axes),
            )
            for row in np.flatnonzero(~sound).tolist():
                group[row].sound = False


def describe_unsound(manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The tensors whose chunks do not fill them exactly once, each with what is wrong."""
    for key, held in _StoredTensors(manifest, keys).tensors.items():
        if not held.sound:
            yield key, held.misfit()


def _moved(place: Shape, axis: int, by: int) -> Shape:
    return (*place[:axis], place[axis] + by, *place[axis + 1 :])
