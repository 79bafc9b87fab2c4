"""The sharding map: which part of which global tensor or object a local one is.

The names, fields and methods are those of Megatron-Core's `dist_checkpointing.mapping`. An entry knows nothing of other
ranks: whether all shards fit together is found by the plan of the save.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from rankbook.checkpoint.state_dict import layout
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

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]
FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]
Path: TypeAlias = tuple[str | int, ...]

_NOTHING = object()


class ShardedBase(ABC):
    """An entry of a sharded state dict: a local object, and what of which global object it is."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` where its attributes do not agree."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a new one with `data=None`."""


def is_main_replica(replica_id: ReplicaId | Iterable[int]) -> bool:
    """Return True for the id of the replica that is stored: the integer 0, or zeros only, `()` included."""
    if isinstance(replica_id, Iterable):
        return all(each == 0 for each in replica_id)
    return replica_id == 0


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
        if complaint := layout.is_outside(self.global_shape, self.global_offset, shape):
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


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Turns a tensor into a sharded state dict before it is saved, and back after it was loaded.

    `build_fn(key, data, replica_id, flattened_range)` makes the sharded state dict and must depend on nothing else, so
    that an optimizer can apply it to its state as to the parameter. `merge_fn(loaded)` is its inverse. What is built
    may hold factories again.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """The sharded state dict that stands for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing to check: what counts is what it builds."""

    def without_data(self) -> ShardedTensorFactory:
        """A new one with `data=None`."""
        return replace(self, data=None)  # type: ignore[arg-type]  # as for all entries


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Put what each factory builds into its place, in dicts, lists and tuples, at any depth.

    Dicts and lists are changed in place; a tuple is replaced by a new one where it holds a factory. Raises
    `CheckpointingException` where the outermost object is itself a factory or such a tuple.
    """
    if _applied(sharded_state_dict) is not sharded_state_dict:
        raise CheckpointingException(
            f"a {type(sharded_state_dict).__name__} cannot be changed in place: put it into a dict or a list"
        )


def _applied(value: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(value, ShardedTensorFactory):
        built = value.build()
        # What is merged later has to know what was built inside; no field, for the fields are the map's.
        vars(value)["_inner"] = factories_of(built)
        return _applied(built)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _applied(each)
    elif isinstance(value, list):
        value[:] = map(_applied, value)
    elif isinstance(value, tuple):
        new = [_applied(each) for each in value]
        if any(one is not other for one, other in zip(new, value, strict=True)):
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def factories_of(sharded_state_dict: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    """Its factories, as `apply_factory_merges` wants them: dicts and lists as dicts, with nothing else in them.

    A factory alone is returned as it is; `{}` where there is none.
    """
    if isinstance(sharded_state_dict, ShardedTensorFactory):
        return sharded_state_dict
    if isinstance(sharded_state_dict, dict):
        items = list(sharded_state_dict.items())
    elif isinstance(sharded_state_dict, list | tuple):
        items = list(enumerate(sharded_state_dict))
    else:
        return {}
    return {key: found for key, each in items if (found := factories_of(each)) != {}}


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: Path = ()) -> StateDict:
    """Merge what was loaded into `x1` where `x2` has a factory; `x1` is changed in place and returned.

    `x2` has factories at some of the places of `x1`; a list or tuple of `x1` may stand there as a list of the same
    length, or as a dict by integers. `key` is the path to here, for messages. Raises `CheckpointingException` with
    the whole path for a key that is missing, lists of different lengths, a key of a list that is no integer or out of
    bounds, and for anything else that is no factory.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(loaded: Any, factories: Any, key: Path) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(factories, ShardedTensorFactory):
        return factories.merge_fn(_merged_inside(loaded, factories, key))
    if isinstance(loaded, dict) and isinstance(factories, dict):
        for name, below in factories.items():
            if name not in loaded:
                raise CheckpointingException(
                    f"{format_path(key)}: no key {name!r} among what was loaded: {list(loaded)}"
                )
            loaded[name] = _merged(loaded[name], below, (*key, name))
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(factories, list | tuple | dict):
        merged = _merged_list(list(loaded), factories, key)
        if isinstance(loaded, list):
            loaded[:] = merged
            return loaded
        return type(loaded)(*merged) if hasattr(loaded, "_fields") else type(loaded)(merged)
    raise CheckpointingException(
        f"{format_path(key)}: a {type(loaded).__name__} was loaded "
        f"where the factories have a {type(factories).__name__}"
    )


def _merged_list(loaded: list[Any], factories: Any, key: Path) -> list[Any]:  # noqa: ANN401 - a list, tuple or dict
    if not isinstance(factories, dict):
        if len(loaded) != len(factories):
            raise CheckpointingException(
                f"{format_path(key)}: {len(loaded)} elements were loaded where the factories have {len(factories)}"
            )
        factories = dict(enumerate(factories))
    for index, below in factories.items():
        if not isinstance(index, int):
            raise CheckpointingException(f"{format_path(key)}: {index!r} is no index of the list that was loaded")
        if not 0 <= index < len(loaded):
            raise CheckpointingException(f"{format_path(key)}: {index} is out of the bounds of {len(loaded)} elements")
        loaded[index] = _merged(loaded[index], below, (*key, index))
    return loaded


def _merged_inside(loaded: Any, factory: ShardedTensorFactory, key: Path) -> Any:  # noqa: ANN401 - any part
    inner = vars(factory).get("_inner", _NOTHING)
    if inner is _NOTHING:
        inner = factories_of(factory.build())
    return _merged(loaded, inner, key) if inner != {} else loaded


def format_path(path: Iterable[object]) -> str:
    """Format the path of an entry as the subscripts after the state dict's name."""
    return "".join(f"[{key!r}]" for key in path) or "the state dict"
