"""What a checkpoint will hold: every chunk that is stored, and by which rank.

Owns: the catalog as arrays, and as tuples for those who write it down. Refuses: to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rankbook.checkpoint.planning.local_plan import Integers, itemsize
from rankbook.checkpoint.planning.validation import volumes


class PlannedChunk(NamedTuple):
    """A chunk of a tensor, in elements, and the rank that stores it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int


class PlannedTensor(NamedTuple):
    """A tensor as it will be in the checkpoint; no chunk is empty, and one without elements has none."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True, eq=False)
class Catalog:
    """All chunks that are stored, as arrays: one row a chunk, ordered by rank and position.

    `whole` (keys, axes) are the global shapes, `key` (chunks,) tells the row of a chunk's key, `offset` and `shape`
    are (chunks, axes), and `position` is the chunk's place in the declaration of its rank.
    """

    keys: list[str]
    dtypes: list[str]
    axes: Integers
    whole: Integers
    key: Integers
    offset: Integers
    shape: Integers
    rank: Integers
    position: Integers

    def of_rank(self, rank: int) -> Integers:
        """The positions that a rank stores."""
        start, stop = np.searchsorted(self.rank, (rank, rank + 1))
        return self.position[start:stop]

    @cached_property
    def _order(self) -> tuple[Integers, Integers]:
        """Rows ordered by key and offset, and where each key's begin."""
        order = np.lexsort((*self.offset.T[::-1], self.key))
        return order, np.searchsorted(self.key[order], np.arange(len(self.keys) + 1))

    def chunks(self) -> Iterator[tuple[str, PlannedTensor]]:
        """Each key with what is stored under it, chunks in the order of their offsets."""
        order, starts = self._order
        for row, key in enumerate(self.keys):
            axes, mine = int(self.axes[row]), order[starts[row] : starts[row + 1]]
            offsets, shapes = self.offset[mine, :axes].tolist(), self.shape[mine, :axes].tolist()
            rows = zip(map(tuple, offsets), map(tuple, shapes), self.rank[mine].tolist(), strict=True)
            yield (
                key,
                PlannedTensor(
                    self.dtypes[row],
                    tuple(self.whole[row, :axes].tolist()),
                    tuple(PlannedChunk(*each) for each in rows),
                ),
            )

    def nbytes(self) -> Integers:
        """Of each chunk's data."""
        sizes = np.asarray([itemsize(dtype) for dtype in self.dtypes], np.int64)
        return volumes(self.shape) * sizes[self.key] if len(self.key) else np.zeros(0, np.int64)


def padded(extents: Integers, width: int, fill: int) -> Integers:
    """Rows of extents (rows, axes), with further axes up to `width`."""
    more = width - extents.shape[1]
    return np.pad(extents, ((0, 0), (0, more)), constant_values=fill) if more else extents
