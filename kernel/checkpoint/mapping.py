"""The sharding map: which part of which global tensor or object a local one is.

Owns: `ShardedTensor`, `ShardedObject`, `LocalNonpersistentObject`; the names, fields and methods of Megatron-Core's
`dist_checkpointing.mapping`. Refuses: to know other ranks; whether all shards fit together is the plan's to say.

A `ShardedTensorFactory` and what is done with it are in factories.py, and can be imported from here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rankbook.checkpoint import layout
from rankbook.checkpoint.factories import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from rankbook.checkpoint.sharded_base import (
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from rankbook.errors import CheckpointingException

__all__ = [
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
    "logger",
]

logger = logging.getLogger(__name__)
_logged_deprecations: dict[str, bool] = {}


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor as a part of a global one, which all ranks' parts make up.

    key: names the global tensor. data: the local part, or None where only the map matters. dtype: of the data.
    local_shape, global_shape, global_offset: in elements; the global ones count the prepended axes.
    axis_fragmentations: how many chunks each global axis is cut into, None for an irregular grid. replica_id: which of
    the copies it is (see `is_main_replica`). prepend_axis_num: how many axes of the global tensor come before the local
    ones; the local part has one element along each. allow_shape_mismatch: on load the stored tensor may have another
    global shape: what overlaps is copied into zeros. flattened_range: a part of a flattened shard; the field is kept
    for its name's sake, its use has ended.

    Raises `CheckpointingException`, when it is made, where these do not agree.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raises `CheckpointingException` for the first of the attributes that does not fit the others."""
        if self.data is not None:
            if self.data.dtype != self.dtype:
                raise self._error(f"its data is {self.data.dtype}, not {self.dtype}")
            if self.flattened_range is None and tuple(self.data.shape) != tuple(self.local_shape):
                raise self._error(f"its data has the shape {tuple(self.data.shape)}, not {tuple(self.local_shape)}")
        if len(self.global_shape) != len(self.global_offset):
            raise self._error(
                f"{len(self.global_shape)} axes of its global shape != {len(self.global_offset)} of its global offset"
            )
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            raise self._error(
                f"{len(self.local_shape)} local axes + {self.prepend_axis_num} prepended != "
                f"{len(self.global_shape)} global axes"
            )
        if self.axis_fragmentations is not None and (
            complaint := layout.off_the_grid(self.global_offset, self.local_shape, self.prepend_axis_num)
        ):
            raise self._error(f"{complaint}; for an irregular grid, give axis_fragmentations=None")
        if self.flattened_range is not None:
            raise self._error(
                "flattened_range is no longer supported: give each rank's part its own shape and offset, with "
                "axis_fragmentations=None"
            )
        self._validate_chunk()

    def _validate_chunk(self) -> None:
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        if self.allow_shape_mismatch:
            return
        if complaint := layout.outside(self.global_shape, self.global_offset, shape):
            raise self._error(f"it does not lie within its global tensor: {complaint}")
        if self.axis_fragmentations is not None and (
            complaint := layout.wrong_fragments(self.global_shape, self.global_offset, shape, self.axis_fragmentations)
        ):
            raise self._error(f"{complaint}; for an irregular grid, give axis_fragmentations=None")

    def _error(self, complaint: str) -> CheckpointingException:
        return CheckpointingException(f"shard of {self.key!r}: {complaint} ({self})")

    @property
    def has_regular_grid(self) -> bool:
        """Whether all chunks of the global tensor have the same shape, on a grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Which part of the global tensor it is: `global_tensor[shard.global_slice()]`. Prepended axes are integers."""
        inner = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (
            *self.global_offset[: self.prepend_axis_num],
            *(slice(offset, offset + size) for offset, size in inner),
        )

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Which chunk it is in the grid of all chunks, per global axis.

        Raises `CheckpointingException` for an offset that is no multiple of the local shape.
        """
        try:
            return layout.chunk_index(self.global_offset, self.local_shape, self.prepend_axis_num)
        except CheckpointingException as error:
            raise self._error(str(error)) from error

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """How many elements a chunk has along each global axis.

        Raises `CheckpointingException` for an irregular grid, and, unless `allow_shape_mismatch`, where a global axis
        does not divide into its fragments.
        """
        if self.axis_fragmentations is None:
            raise self._error("its grid is irregular, its chunks have no one size")
        try:
            return layout.chunk_sizes(self.global_shape, self.axis_fragmentations, rounded=self.allow_shape_mismatch)
        except CheckpointingException as error:
            raise self._error(str(error)) from error

    def without_data(self) -> ShardedTensor:
        """A new one with `data=None`."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,  # noqa: ANN401 - more of the fields
    ) -> ShardedTensor:
        """A shard whose place is told in ranks, on a regular grid.

        Each of `rank_offsets`, `(axis, offset, fragments)`, says that this global axis (prepended ones count) is cut
        into `fragments` chunks, of which `data` is number `offset`. Other axes are whole. `init_kwargs`: more fields.
        Raises `CheckpointingException` for an axis that is negative, too large or named twice, fewer than one
        fragment, an offset not below its fragments, or a `flattened_range`.
        """
        if flattened_range is not None:
            raise CheckpointingException(
                f"shard of {key!r}: flattened_range is no longer supported, and cannot be placed by rank offsets"
            )
        try:
            grid = layout.place_by_ranks(tuple(data.shape), rank_offsets, prepend_axis_num)
        except CheckpointingException as error:
            raise CheckpointingException(f"shard of {key!r}: {error}") from error
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            grid.global_shape,
            grid.offset,
            grid.fragments,
            replica_id,
            prepend_axis_num,
            flattened_range=flattened_range,
            **init_kwargs,
        )

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Make its data, where it has none, as `init_fn(local_shape, dtype=, device=)`."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """As `torch.narrow`, where every rank narrows its local tensor likewise: a list of one, on the same storage.

        `dim` does not count prepended axes. The global shape and offset shrink as `length` to the local size. Raises
        `CheckpointingException` for a dim or a range that is not there, and where the global size or the offset is no
        multiple of the local size: the ranks' parts would no longer fit together.
        """
        size = self.local_shape[dim] if -len(self.local_shape) <= dim < len(self.local_shape) else -1
        if not 0 <= start <= start + length <= size:
            raise self._error(f"no narrow(dim={dim}, start={start}, length={length}) of {tuple(self.local_shape)}")
        dim %= len(self.local_shape)
        axis = dim + self.prepend_axis_num
        whole = layout.scaled(self.global_shape[axis], length, size)
        offset = layout.scaled(self.global_offset[axis], length, size)
        if whole is None or offset is None:
            raise self._error(
                f"narrow of axis {axis}: its global size {self.global_shape[axis]} and offset "
                f"{self.global_offset[axis]} must be multiples of its local size {size}"
            )
        return [
            replace(
                self,
                data=None if self.data is None else self.data.narrow(dim, start, length),
                local_shape=_with(self.local_shape, dim, length),
                global_shape=_with(self.global_shape, axis, whole),
                global_offset=_with(self.global_offset, axis, offset),
            )
        ]


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class LocalNonpersistentObject:
    """An object that is not stored; on load the local one is put back into its place."""

    def __init__(self, obj: Any) -> None:  # noqa: ANN401 - anything
        self.obj = obj

    def unwrap(self) -> Any:  # noqa: ANN401 - anything
        """The object itself."""
        return self.obj


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one element of a grid of objects, which all ranks' objects make up.

    key: names the grid. data: the object, or None where only the map matters. global_shape, global_offset: the grid's
    shape and the place in it, in objects; unlike a tensor it cannot be loaded onto another grid. replica_id: which of
    the copies it is.

    Raises `CheckpointingException`, when it is made, where shape and offset have different numbers of axes.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raises `CheckpointingException` where shape and offset have different numbers of axes."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(
                f"object {self.key!r}: its global shape {tuple(self.global_shape)} and its global offset "
                f"{tuple(self.global_offset)} have different numbers of axes"
            )

    def without_data(self) -> ShardedObject:
        """A new one with `data=None`."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """What it is stored under: `<key>/shard_<offset joined by .>_<shape joined by .>`."""
        offset, shape = (".".join(map(str, each)) for each in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The object that has this `unique_key`, with `data=None`.

        The key itself may contain "/". Where the shape has fewer axes than the offset, as in old checkpoints, it is
        filled with −1. Raises `CheckpointingException` for what is no unique key.
        """
        key, slash, shard = unique_key.rpartition("/")
        try:
            word, offsets, shapes = shard.split("_")
            offset, shape = (tuple(map(int, each.split("."))) if each else () for each in (offsets, shapes))
        except ValueError:
            word, offset, shape = "", (), ()
        if not slash or word != "shard" or len(shape) > len(offset):
            raise CheckpointingException(
                f"{unique_key!r} is no object's unique key: <key>/shard_<offset joined by .>_<shape joined by .>"
            )
        return cls(key, None, shape + (-1,) * (len(offset) - len(shape)), offset, replica_id)
