"""Entries of a sharded state dict: the mapping from local tensors and objects to global ones.

The names, fields and methods are those of Megatron-Core's `dist_checkpointing.mapping`. An entry is validated on its
own; whether the shards of all ranks fit together is checked by `save_plan.plan_save`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from rankbook.checkpoint.state_dict import layout
from rankbook.errors import CheckpointError, InvalidStateDict

__all__ = [
    "CheckpointError",
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

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]
FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]
Path: TypeAlias = tuple[str | int, ...]

# Marks a missing attribute, for which None would be a value.
_NOTHING = object()


class ShardedBase(ABC):
    """Base class of the entries of a sharded state dict: a local object and its place in a global one."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointError` if the attributes are inconsistent."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy with `data=None`."""


def is_main_replica(replica_id: ReplicaId | Iterable[int]) -> bool:
    """Return True for the id of the replica that is stored: the integer 0, or zeros only, `()` included.

    Example::

        is_main_replica((0, 0)), is_main_replica(1)  # (True, False)
    """
    if isinstance(replica_id, Iterable):
        return all(index == 0 for index in replica_id)
    return replica_id == 0


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor as a shard of a global tensor.

    key: name of the global tensor. data: the local shard, or None if only the metadata is needed. dtype: dtype of the
    data. local_shape, global_shape, global_offset: in elements; the global ones include the prepended axes.
    axis_fragmentations: number of chunks along every global axis, None for an irregular grid. replica_id: which replica
    this is (see `is_main_replica`). prepend_axis_num: number of global axes before the local ones; the shard has one
    element along any of them. allow_shape_mismatch: on load, accept a stored tensor of another global shape: the
    overlap is copied, the rest is zero. flattened_range: not supported; kept for compatibility with Megatron-Core's
    signature.

    Raises `CheckpointError` on construction if the fields are inconsistent.

    Example::

        rows = ShardedTensor.from_rank_offsets("rows", torch.full((2, 3), float(rank)), (0, rank, world_size))
        rows.global_shape  # (4, 3)
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
        """Raise `CheckpointError` for the first inconsistent field."""
        # In the order of Megatron-Core, so that the same mistake gives an error about the same field.
        if self.data is not None:
            if self.data.dtype != self.dtype:
                raise self._error(f"data has dtype {self.data.dtype}, expected {self.dtype}")
            if self.flattened_range is None and tuple(self.data.shape) != tuple(self.local_shape):
                raise self._error(f"data has shape {tuple(self.data.shape)}, expected {tuple(self.local_shape)}")
        if len(self.global_shape) != len(self.global_offset):
            raise self._error(
                f"{len(self.global_shape)} axes in global_shape != {len(self.global_offset)} axes in global_offset"
            )
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            raise self._error(
                f"{len(self.local_shape)} local axes + {self.prepend_axis_num} prepended != "
                f"{len(self.global_shape)} global axes"
            )
        if self.axis_fragmentations is not None and (
            problem := layout.grid_error(self.global_offset, self.local_shape, self.prepend_axis_num)
        ):
            raise self._error(f"{problem}; for an irregular grid, pass axis_fragmentations=None")
        if self.flattened_range is not None:
            raise self._error(
                "flattened_range is no longer supported: declare the part of every rank with its own shape and offset, "
                "and axis_fragmentations=None"
            )
        self._validate_chunk()

    def _validate_chunk(self) -> None:
        # Along a prepended axis a shard has one element.
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        # The global shape is that of the request, which may differ from the stored one, so the chunk need not fit into
        # it.
        if self.allow_shape_mismatch:
            return
        if problem := layout.bounds_error(self.global_shape, self.global_offset, shape):
            raise self._error(f"outside the global tensor: {problem}")
        if self.axis_fragmentations is not None and (
            problem := layout.fragments_error(self.global_shape, self.global_offset, shape, self.axis_fragmentations)
        ):
            raise self._error(f"{problem}; for an irregular grid, pass axis_fragmentations=None")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"shard of {self.key!r}: {problem} ({self})")

    @property
    def has_regular_grid(self) -> bool:
        """Return True if all chunks of the global tensor have the same shape, on a regular grid."""
        return self.axis_fragmentations is not None

    # Example with a prepended axis: layer 2 of 4, a matrix of (3, 5) elements of which this rank has the columns 0 to
    # 1.
    #
    #     local_shape (3, 2)     global_shape (4, 3, 5)     global_offset (2, 0, 0)     prepend_axis_num 1
    #     global_slice() == (2, slice(0, 3), slice(0, 2))
    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the shard in its global tensor: `global_tensor[shard.global_slice()]`.

        Prepended axes are integers, the others slices.
        """
        inner = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (
            *self.global_offset[: self.prepend_axis_num],
            *(slice(offset, offset + size) for offset, size in inner),
        )

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of the shard in the grid of all chunks, per global axis.

        Raises `CheckpointError` if an offset is not a multiple of the local shape.
        """
        try:
            return layout.chunk_index(self.global_offset, self.local_shape, self.prepend_axis_num)
        except CheckpointError as error:
            raise self._error(str(error)) from error

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the number of elements of a chunk along every global axis.

        Raises `CheckpointError` for an irregular grid, and if a global axis does not divide evenly into its
        fragments, unless `allow_shape_mismatch` is set.
        """
        if self.axis_fragmentations is None:
            raise self._error("the grid is irregular: its chunks differ in size")
        try:
            return layout.chunk_sizes(self.global_shape, self.axis_fragmentations, rounded=self.allow_shape_mismatch)
        except CheckpointError as error:
            raise self._error(str(error)) from error

    def without_data(self) -> ShardedTensor:
        """Return a copy with `data=None`."""
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
        **init_kwargs: Any,  # noqa: ANN401 - further fields
    ) -> ShardedTensor:
        """Create a shard on a regular grid from its position in numbers of chunks.

        An element `(axis, offset, fragments)` of `rank_offsets` says that the global axis (prepended ones count) is cut
        into `fragments` chunks, of which `data` is number `offset`. Other axes are not sharded. `init_kwargs` are
        further fields. Raises `CheckpointError` for an axis that is out of range or named twice, fewer than one
        fragment, or an offset that is not smaller than the number of fragments, and `InvalidStateDict` for a
        `flattened_range`.
        """
        if flattened_range is not None:
            raise InvalidStateDict(f"shard of {key!r}: flattened_range is no longer supported")
        try:
            grid = layout.grid_from_ranks(tuple(data.shape), rank_offsets, prepend_axis_num)
        except CheckpointError as error:
            raise CheckpointError(f"shard of {key!r}: {error}") from error
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
        """Allocate missing data with `init_fn(local_shape, dtype=, device=)`."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrow the shard like `torch.narrow`; return a list of one shard, which shares the storage.

        All ranks must narrow their shards likewise. `dim` does not count prepended axes. The global shape and offset
        are scaled by `length` / local size. Raises `CheckpointError` for a dim or range out of bounds, and if
        the global size or offset is not a multiple of the local size, because the ranks' shards would no longer fit
        together.
        """
        size = self.local_shape[dim] if -len(self.local_shape) <= dim < len(self.local_shape) else -1
        if not 0 <= start <= start + length <= size:
            raise self._error(
                f"narrow(dim={dim}, start={start}, length={length}) is out of range for {tuple(self.local_shape)}"
            )
        # Negative dims count from the end, as in torch. Global axes come after the prepended ones.
        dim %= len(self.local_shape)
        axis = dim + self.prepend_axis_num
        global_size = layout.rescale(self.global_shape[axis], length, size)
        offset = layout.rescale(self.global_offset[axis], length, size)
        if global_size is None or offset is None:
            raise self._error(
                f"narrow of axis {axis}: its global size {self.global_shape[axis]} and offset "
                f"{self.global_offset[axis]} must be multiples of its local size {size}"
            )
        return [
            replace(
                self,
                data=None if self.data is None else self.data.narrow(dim, start, length),
                local_shape=_with(self.local_shape, dim, length),
                global_shape=_with(self.global_shape, axis, global_size),
                global_offset=_with(self.global_offset, axis, offset),
            )
        ]


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class LocalNonpersistentObject:
    """An object that is not stored: a load returns the local object in its place.

    Example::

        state = {"rank": LocalNonpersistentObject(rank), "epoch": 3}
        save(state, "objects", step=1)
        load(state, "objects", step=1) == {"rank": rank, "epoch": 3}  # True
    """

    def __init__(self, obj: Any) -> None:  # noqa: ANN401 - anything
        self.obj = obj

    def unwrap(self) -> Any:  # noqa: ANN401 - anything
        """Return the object."""
        return self.obj


@dataclass
class EqualTensor(ShardedTensor):
    """A whole tensor that must have the same values on all ranks. A save compares them."""


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one element of a global grid of objects.

    key: name of the grid. data: the object, or None if only the metadata is needed. global_shape, global_offset: shape
    of the grid and position in it, in objects; unlike a tensor, it cannot be loaded onto another grid. replica_id:
    which replica this is.

    Raises `CheckpointError` on construction if shape and offset have different numbers of axes.

    Example::

        state = {"seed": ShardedObject("seed", 7 + rank, (world_size,), (rank,))}
        save(state, "objects", step=2)
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointError` if shape and offset have different numbers of axes."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointError(
                f"object {self.key!r}: its global shape {tuple(self.global_shape)} and its global offset "
                f"{tuple(self.global_offset)} have different numbers of axes"
            )

    def without_data(self) -> ShardedObject:
        """Return a copy with `data=None`."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Return the key it is stored under: `<key>/shard_<offset joined by .>_<shape joined by .>`."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Create the object with this `unique_key` and `data=None`.

        The key itself may contain "/". If the shape has fewer axes than the offset, as in old checkpoints, it is padded
        with -1. Raises `CheckpointError` for an invalid unique key.
        """
        key, slash, shard = unique_key.rpartition("/")
        try:
            # Example: "rng/shard_0.1_1.2" gives the key "rng", the offset (0, 1) and the shape (1, 2). An empty text
            # between the underscores is a grid without axes.
            word, offsets, shapes = shard.split("_")
            offset, shape = (tuple(map(int, text.split("."))) if text else () for text in (offsets, shapes))
        except ValueError:
            word, offset, shape = "", (), ()
        if not slash or word != "shard" or len(shape) > len(offset):
            raise CheckpointError(
                f"invalid unique key {unique_key!r}: expected <key>/shard_<offset joined by .>_<shape joined by .>"
            )
        return cls(key, None, shape + (-1,) * (len(offset) - len(shape)), offset, replica_id)


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Transformation of a tensor into a sharded state dict on save, and back on load.

    `build_fn(key, data, replica_id, flattened_range)` creates the sharded state dict; it must depend on its arguments
    alone, so that an optimizer can apply it to its state as to the parameter. `merge_fn(loaded)` is its inverse. The
    built state dict may contain factories again.
    """

    key: str
    data: torch.Tensor | None
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    # Example: the two halves of a fused weight are stored as tensors of their own, which other models can load.
    #
    #     def build(key, data, replica_id, flattened_range):
    #         return {name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
    #                 for name, part in zip(("gate", "up"), data.chunk(2))}
    #
    #     ShardedTensorFactory("mlp", weight, build, lambda loaded: torch.cat([loaded["gate"], loaded["up"]]))
    def build(self) -> ShardedStateDict:
        """Build the sharded state dict that replaces the tensor. Raises `CheckpointError` without data."""
        if self.data is None:
            raise CheckpointError(
                f"the factory of {self.key!r} has no data; keep the factory that without_data() copied"
            )
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: the entries are validated when they are built."""

    def without_data(self) -> ShardedTensorFactory:
        """Return a copy with `data=None`, for a merge. It remembers the factories that were applied within this one."""
        # `replace` copies only the dataclass fields.
        copied = replace(self, data=None)
        if "_inner" in vars(self):
            vars(copied)["_inner"] = vars(self)["_inner"]
        return copied


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace factories by what they build, in dicts, lists and tuples, at any depth.

    Dicts and lists are modified in place; a tuple that contains a factory is replaced by a new one. Raises
    `CheckpointError` if the outermost object is itself a factory or such a tuple.
    """
    if _applied(sharded_state_dict) is not sharded_state_dict:
        raise CheckpointError(
            f"a {type(sharded_state_dict).__name__} cannot be changed in place: put it into a dict or a list"
        )


def _applied(value: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(value, ShardedTensorFactory):
        built = value.build()
        # Remember the factories within the built state dict for the merge, in an attribute: the dataclass fields are
        # Megatron-Core's.
        vars(value)["_inner"] = factories_of(built)
        return _applied(built)
    if isinstance(value, dict):
        for key, child in value.items():
            value[key] = _applied(child)
    elif isinstance(value, list):
        value[:] = map(_applied, value)
    elif isinstance(value, tuple):
        # A tuple is only replaced if something in it has changed, so that the caller's objects stay the same ones.
        new = [_applied(child) for child in value]
        if any(one is not other for one, other in zip(new, value, strict=True)):
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def factories_of(sharded_state_dict: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    """Return the factories as nested dicts of keys and indices, in the form that `apply_factory_merges` expects.

    A single factory is returned as it is; without factories, returns `{}`.
    """
    if isinstance(sharded_state_dict, ShardedTensorFactory):
        return sharded_state_dict
    if isinstance(sharded_state_dict, dict):
        items = list(sharded_state_dict.items())
    elif isinstance(sharded_state_dict, list | tuple):
        items = list(enumerate(sharded_state_dict))
    else:
        return {}
    return {key: factories for key, child in items if (factories := factories_of(child)) != {}}


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: Path = ()) -> StateDict:
    """Merge loaded values into `x1` where `x2` has a factory; modify `x1` in place and return it.

    `x2` has factories at some of the paths of `x1`; a list or tuple of `x1` corresponds to a list of the same length,
    or to a dict with integer keys. `key` is the path of `x1`, for error messages. Raises `InvalidStateDict` with
    the whole path for a missing key, lists of different lengths, a list index that is not an integer or out of bounds,
    and any leaf of `x2` that is not a factory.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(loaded: Any, factories: Any, key: Path) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(factories, ShardedTensorFactory):
        # From the inside out: factories within what this one has built are merged first, then its own `merge_fn` sees
        # plain values.
        return factories.merge_fn(_merged_inside(loaded, factories, key))
    if isinstance(loaded, dict) and isinstance(factories, dict):
        for name, below in factories.items():
            if name not in loaded:
                raise InvalidStateDict(f"{format_path(key)}: key {name!r} was not loaded; loaded keys: {list(loaded)}")
            loaded[name] = _merged(loaded[name], below, (*key, name))
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(factories, list | tuple | dict):
        # A list keeps its identity, a tuple and a named tuple have to be made anew.
        merged = _merged_list(list(loaded), factories, key)
        if isinstance(loaded, list):
            loaded[:] = merged
            return loaded
        return type(loaded)(*merged) if hasattr(loaded, "_fields") else type(loaded)(merged)
    raise InvalidStateDict(
        f"{format_path(key)}: loaded a {type(loaded).__name__}, but the factories have a {type(factories).__name__}"
    )


def _merged_list(loaded: list[Any], factories: Any, key: Path) -> list[Any]:  # noqa: ANN401 - a list, tuple or dict
    if not isinstance(factories, dict):
        if len(loaded) != len(factories):
            raise InvalidStateDict(
                f"{format_path(key)}: loaded {len(loaded)} elements, but the factories have {len(factories)}"
            )
        factories = dict(enumerate(factories))
    for index, below in factories.items():
        if not isinstance(index, int):
            raise InvalidStateDict(f"{format_path(key)}: expected an integer as list index, got {index!r}")
        if not 0 <= index < len(loaded):
            raise InvalidStateDict(
                f"{format_path(key)}: index {index} is out of range for {len(loaded)} loaded elements"
            )
        loaded[index] = _merged(loaded[index], below, (*key, index))
    return loaded


def _merged_inside(loaded: Any, factory: ShardedTensorFactory, key: Path) -> Any:  # noqa: ANN401 - any part
    inner = vars(factory).get("_inner", _NOTHING)
    if inner is _NOTHING:
        # Without data nothing can be built, so nothing is known of factories within: as in Megatron-Core, `merge_fn`
        # gets what was loaded.
        inner = {} if factory.data is None else factories_of(factory.build())
    return _merged(loaded, inner, key) if inner != {} else loaded


def format_path(path: Iterable[object]) -> str:
    """Format the path of an entry as the subscripts after the state dict's name."""
    return "".join(f"[{key!r}]" for key in path) or "the state dict"
