"""What one rank holds, as compact arrays that travel well and are compared by digest.

Owns: `LocalPlan`, its tables and their digests, and the size of a dtype's element. Refuses: torch, other ranks.
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

Integers: TypeAlias = npt.NDArray[np.int64]


class LocalShard(NamedTuple):
    """One chunk of a global tensor, or one element of a grid of objects, as the plan sees it.

    Shapes and offsets count elements. `local_shape` has the global tensor's axes, of which those that were prepended
    count 1; an object needs neither it nor a dtype. Anything with these attributes will do in its place.
    """

    key: str
    global_shape: Sequence[int]
    global_offset: Sequence[int]
    local_shape: Sequence[int] = ()
    dtype_name: str = "object"
    is_main: bool = True


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of the dtype with this name, "float32" or "float8_e4m3fn"; 1 where a byte holds several."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True, eq=False, slots=True)
class ChunkTable:
    """Chunks, one a row, in the rank's own order.

    The arrays of shapes and offsets are (rows, most axes); a row with fewer axes ends in axes of extent 1 at offset 0.
    `head` is the digest of what must not differ between ranks (key, dtype, global shape), row by row, and `layout`
    that of the head with offsets and shapes. What is stored depends on `layout` and `main` alone.
    """

    names: bytes
    name_ends: Integers
    dtypes: tuple[str, ...]
    dtype: npt.NDArray[np.uint16]
    axes: npt.NDArray[np.uint8]
    global_shape: Integers
    offset: Integers
    shape: Integers
    main: npt.NDArray[np.bool_]
    head: bytes = b""
    layout: bytes = b""

    def __post_init__(self) -> None:
        if not self.head:
            head = _digest(self.names, self.name_ends, repr(self.dtypes).encode(), self.dtype, self.axes)
            object.__setattr__(self, "head", _digest(head, repr(self.global_shape.shape).encode(), self.global_shape))
            object.__setattr__(self, "layout", _digest(self.head, self.offset, self.shape))

    def __len__(self) -> int:
        return len(self.axes)

    @property
    def width(self) -> int:
        """Axes of the arrays."""
        return int(self.offset.shape[1])

    def keys(self) -> list[str]:
        """Each row's key."""
        ends = self.name_ends.tolist()
        return [self.names[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], bool]]) -> ChunkTable:
        """Of (key, dtype, global shape, offset, shape, main) per chunk; the three have the same number of axes."""
        rows = list(rows)
        names = [key.encode() for key, *_ in rows]
        dtypes = tuple(sorted({row[1] for row in rows}))
        code = {name: number for number, name in enumerate(dtypes)}
        axes = [len(row[2]) for row in rows]
        width = max(axes, default=0)
        padding = {count: (width - count) for count in set(axes)}
        ones = {count: (1,) * more for count, more in padding.items()}
        zeros = {count: (0,) * more for count, more in padding.items()}
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
    """What one rank holds: its chunks of tensors, its objects, and digests of its common part by path."""

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
        """Of a rank's shards, in its own order. `common` is a digest for each path of the common part, or one of all.

        Raises `ValueError` where a shard's shapes and offset have different numbers of axes.
        """
        return cls(
            ChunkTable.of(
                (each.key, each.dtype_name, each.global_shape, each.global_offset, each.local_shape, each.is_main)
                for each in tensors
            ),
            ChunkTable.of(
                (each.key, "object", each.global_shape, each.global_offset, (1,) * len(each.global_shape), each.is_main)
                for each in objects
            ),
            common if isinstance(common, Mapping) else {"": common},
        )

    def packed(self) -> bytes:
        """Its bytes for the way to other ranks: about 9 for each chunk, a tenth of what a pickle takes."""
        return zlib.compress(pickle.dumps(self, pickle.HIGHEST_PROTOCOL), 1)

    @staticmethod
    def unpacked(data: bytes) -> LocalPlan:
        """From the bytes that another rank packed; they come from a peer of the same job, and from nowhere else."""
        declared = pickle.loads(zlib.decompress(data))
        assert isinstance(declared, LocalPlan)
        return declared

    def digest(self) -> str:
        """Of all that decides which bytes this rank stores where. The common part is not among it: it may change."""
        tables = (self.tensors, self.objects)
        return _digest(*(part for table in tables for part in (table.layout, table.main))).hex()

    def common_digest(self) -> str:
        """Of the common part: equal on all ranks of a sound save."""
        return _digest(repr(sorted(self.common.items())).encode()).hex()

    def signature(self) -> tuple[str, str]:
        """Both digests: by these a plan is known again."""
        return self.digest(), self.common_digest()


def _digest(*parts: bytes | npt.NDArray[np.generic]) -> bytes:
    made = blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).data
        made.update(len(part).to_bytes(8, "little"))
        made.update(data)
    return made.digest()
