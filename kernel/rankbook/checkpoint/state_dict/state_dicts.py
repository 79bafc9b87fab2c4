"""Partition sharded state dicts into tensors, objects and the common part, and assemble loaded ones.

`partition` takes a sharded state dict apart, `Split.assemble` rebuilds it from loaded values, and `as_sharded` and
`as_dtensor` convert between torch's tensors and shards.

Containers are dicts, lists and tuples, including named tuples; an empty container is a leaf. A *path* consists of the
keys and indices that lead to a leaf. A tensor without a key of its own is stored under its path, joined by ".". The
*common part* consists of the leaves that are not sharded: plain values, equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankbook.checkpoint.state_dict import layout
from rankbook.checkpoint.state_dict.sharded_tensor import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factories,
    apply_factory_merges,
    factories_of,
    format_path,
    is_main_replica,
)
from rankbook.control_collectives import gather_objects, this_rank, world_size
from rankbook.errors import CheckpointError, InvalidStateDict

Path: TypeAlias = tuple[Any, ...]
Stored: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
"""The tensors of a checkpoint: maps a key to global shape and dtype name, such as "float32"."""

# Marks a part without content. None and {} are values that a state dict may hold.
_MISSING = object()


class Expecting(dict[str, Any]):
    """Part of a sharded state dict that, on load, also accepts stored entries that it does not have yet."""

    def expected(self, stored: Stored) -> dict[str, Any]:
        """Return this part with entries for everything stored that belongs to it."""
        raise NotImplementedError


def _children(value: Any) -> list[tuple[Any, Any]] | None:  # noqa: ANN401 - any part of a state dict
    if isinstance(value, dict) and value:
        return list(value.items())
    # torch.Size is a tuple, but a value, not a container.
    if isinstance(value, list | tuple) and value and not isinstance(value, torch.Size):
        return list(enumerate(value))
    return None


def _rebuild(container: Any, values: Sequence[tuple[Any, Any]]) -> Any:  # noqa: ANN401 - of the container's kind
    if isinstance(container, dict):
        return dict(values)
    elements = [value for _, value in values]
    if isinstance(container, tuple):
        return type(container)(*elements) if hasattr(container, "_fields") else type(container)(elements)
    return elements


# Example: {"a": [1, {"b": 2}], "c": {}} has the leaves
#
#     (("a", 0), 1), (("a", 1, "b"), 2), (("c",), {})
#
# An empty container is a leaf, because otherwise it would be lost.
def flatten(sharded_state_dict: Any) -> list[tuple[Path, Any]]:  # noqa: ANN401 - any part of a state dict
    """Return all leaves with their paths, in order."""
    children = _children(sharded_state_dict)
    if children is None:
        return [((), sharded_state_dict)]
    return [((key, *path), leaf) for key, child in children for path, leaf in flatten(child)]


def unflatten(leaves: Iterable[tuple[Path, Any]], container: Any) -> Any:  # noqa: ANN401 - of the container's kind
    """Return the containers of `container` with other leaves; the inverse of `flatten`.

    Raises `CheckpointError` if the paths differ from those of `container`.
    """
    values = dict(leaves)
    paths = [path for path, _ in flatten(container)]
    if values.keys() != set(paths):
        wrong = sorted(map(format_path, values.keys() ^ set(paths)))
        raise CheckpointError(f"paths do not match the leaves of the state dict: {wrong}")
    return map_leaves(lambda path, _: values[path], container)


def map_leaves(function: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:  # noqa: ANN401 - any part
    """Return the same containers, with every leaf replaced by `function(path, leaf)`."""
    children = _children(value)
    if children is None:
        return function(path, value)
    return _rebuild(value, [(key, map_leaves(function, child, (*path, key))) for key, child in children])


def nest(leaves: Iterable[tuple[Path, Any]], like: Any = None) -> StateDict:  # noqa: ANN401 - any part of a state dict
    """Build a state dict from leaves and their paths.

    A container whose keys are 0, 1, 2, ... becomes a list, unless it is a dict in `like`, another state dict.
    """
    root = _Node()
    for path, leaf in leaves:
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, _Node())
        # Dicts of the class `_Node` are containers; a dict that is itself a leaf stays as it is.
        at[path[-1]] = leaf
    return {key: _with_lists(child, _below(like, key)) for key, child in root.items()}


def normalize_path(path: Path, like: Any) -> Path:  # noqa: ANN401 - any part of a state dict
    """Return a path with the key types of `like`: digits as text become a number if the dict there has that key."""
    normalized = []
    for key in path:
        if isinstance(like, dict) and key not in like and str(key).isdecimal() and int(key) in like:
            # JSON and other programs' paths have text where the state dict has numbers, as in the state of an
            # optimizer.
            key = int(key)  # noqa: PLW2901 - the same key, as a number
        normalized.append(key)
        like = _below(like, key)
    return tuple(normalized)


def _below(value: Any, key: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    return dict(_children(value) or ()).get(key)


class _Node(dict[Any, Any]):
    """Container that `nest` creates, as opposed to a dict that is a leaf."""


def _with_lists(value: Any, like: Any) -> Any:  # noqa: ANN401 - a leaf or a container
    if not isinstance(value, _Node):
        return value
    below = {key: _with_lists(child, _below(like, key)) for key, child in value.items()}
    in_order = (
        not isinstance(like, dict)
        and all(isinstance(key, int) for key in below)
        and sorted(below) == list(range(len(below)))
    )
    return [below[number] for number in range(len(below))] if in_order else below


@dataclass
class TensorEntry:
    """A shard, and the tensor that it replaces in the state dict: a DTensor is restored as a DTensor.

    The properties are those that the planner needs (see `LocalShard`); `local_shape` includes prepended axes, with one
    element along any of them.
    """

    path: Path
    shard: ShardedTensor
    origin: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """Return the key of the global tensor."""
        return self.shard.key

    @property
    def dtype_name(self) -> str:
        """Return torch's dtype name without the "torch." prefix."""
        return str(self.shard.dtype).removeprefix("torch.")

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Return the global shape, in elements."""
        return tuple(self.shard.global_shape)

    @property
    def global_offset(self) -> tuple[int, ...]:
        """Return the offset in the global tensor, in elements."""
        return tuple(self.shard.global_offset)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the local shape along all axes of the global tensor, in elements."""
        return (1,) * self.shard.prepend_axis_num + tuple(self.shard.local_shape)

    @property
    def is_main(self) -> bool:
        """Return True if this replica is stored."""
        return is_main_replica(self.shard.replica_id)

    @property
    def allow_shape_mismatch(self) -> bool:
        """Return True if the stored tensor may have another global shape."""
        return self.shard.allow_shape_mismatch

    def restore(self, data: torch.Tensor) -> torch.Tensor:
        """Return the value that replaces the entry after a load, on the memory of the loaded local part."""
        return data if self.origin is None else as_dtensor(data, self.origin)


@dataclass
class Split:
    """A partitioned sharded state dict: tensors, objects, and the common part.

    common: the plain values in their containers; a list that also contains shards becomes a dict by index. containers:
    the whole state dict with its leaves, after factories are applied. factories: see `factories_of`.
    """

    tensors: list[TensorEntry] = field(default_factory=list)
    objects: list[tuple[Path, ShardedObject]] = field(default_factory=list)
    common: StateDict = field(default_factory=dict)
    containers: Any = None
    factories: Any = None

    def assemble(self, values: Mapping[Path, Any], common: StateDict) -> StateDict:
        """Return the state dict with the loaded values in place, and factories merged.

        values: the loaded `tensors` and `objects` by path. Entries without a value are left out, and so are the results
        of their factories. common: the stored common part, which is returned completely. Raises
        `CheckpointError` if an element of a list or tuple is missing, or if a plain value is stored where the
        state dict has a container.
        """
        # A factory whose parts are not all there cannot be merged. Its whole result is left out, from the path of the
        # factory on, and what was loaded below it is dropped.
        missing = [path for path in self._paths() if path not in values]
        factories = _loaded_factories(self.factories, missing, ())
        missing_paths = {path[:length] for path in missing for length in range(len(path) + 1)} & set(
            _factory_paths(self.factories, ())
        )
        assembled = _assemble(self.containers, values, common, missing_paths, ())
        state: StateDict = {} if assembled is _MISSING else assembled
        return apply_factory_merges(state, factories) if factories else state

    def _paths(self) -> list[Path]:
        return [entry.path for entry in self.tensors] + [path for path, _ in self.objects]


def partition(
    sharded_state_dict: ShardedStateDict,
    *,
    stored: Stored | None = None,
    gather: Gather | None = gather_objects,
) -> Split:
    """Partition a sharded state dict, without modifying it.

    Applies factories, and converts tensors and DTensors to shards. If several ranks hold copies, the first rank that
    has one holds the main replica; ranks settle this with `gather`, which makes the call collective. With
    `gather=None`, for a load, replica ids are left as they are. `stored` describes the checkpoint, for parts that are
    `Expecting`. Raises `CheckpointError`, on every rank if there is a `gather`, if the argument is not a dict,
    for tensors without a key whose paths have the same spelling, for DTensors that cannot be stored, and for errors of
    a factory's `build_fn`.
    """
    # Objects of the caller: shards go to `split` as they are, tensors without a key become shards, whose replica ids
    # are set at the end, in `copies`.
    split, copies = Split(), list[ReplicatedEntry]()
    error = None
    try:
        _partition(sharded_state_dict, stored, split, copies)
    except Exception as raised:
        if gather is None:
            raise
        error = raised  # assign_replica_ids raises it on all ranks, so that none waits for this one
    if gather is not None:
        assign_replica_ids(copies, gather, error=error)
    return split


def _partition(state: ShardedStateDict, stored: Stored | None, split: Split, copies: list[ReplicatedEntry]) -> None:
    if not isinstance(state, dict):
        raise InvalidStateDict(f"sharded_state_dict must be a dict, got {type(state).__name__}")
    # Factories are applied in place, so the caller's containers are copied first.
    containers = _copy_containers(state, stored)
    split.factories = factories_of(containers)
    apply_factories(containers)
    keys: dict[str, Path] = {}

    def entry(path: Path, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        if isinstance(leaf, ShardedTensor):
            split.tensors.append(TensorEntry(path, leaf))
        elif isinstance(leaf, ShardedObject):
            split.objects.append((path, leaf))
        elif isinstance(leaf, torch.Tensor):
            # The key of a tensor that is not a ShardedTensor: {"model": {"fc.weight": ...}} is stored as
            # "model.fc.weight".
            key = ".".join(map(str, path))
            if key in keys:
                raise CheckpointError(
                    f"two tensors would be stored as {key!r}: {format_path(keys[key])} and {format_path(path)}"
                )
            keys[key] = path
            copy = as_sharded(key, leaf)
            if copy is not None:
                assert isinstance(copy.entry, ShardedTensor)
                copies.append(copy)
                split.tensors.append(TensorEntry(path, copy.entry, leaf))
        return leaf

    split.containers = map_leaves(entry, containers)
    common = _common(split.containers)
    split.common = {} if common is _MISSING else common


def _copy_containers(value: Any, stored: Stored | None) -> Any:  # noqa: ANN401 - any part of a state dict
    """Copy the containers but not the leaves, with `Expecting` parts expanded; factories are then applied in place."""
    if isinstance(value, Expecting) and stored is not None:
        value = value.expected(stored)
    children = _children(value)
    if children is None:
        # An empty one too becomes a plain dict or list. Another class would be refused when it is loaded.
        return {} if isinstance(value, dict) else [] if isinstance(value, list) else value
    return _rebuild(value, [(key, _copy_containers(child, stored)) for key, child in children])


def is_common(leaf: object) -> bool:
    """Return True if a leaf belongs to the common part: a plain value, the same on all ranks."""
    return not isinstance(leaf, ShardedBase | LocalNonpersistentObject | torch.Tensor | DTensor)


def _common(value: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    children = _children(value)
    if children is None:
        return value if is_common(value) else _MISSING
    # Of {"lr": 0.1, "w": <shard>} only {"lr": 0.1} is common.
    members = [(key, below) for key, child in children if (below := _common(child)) is not _MISSING]
    if not members:
        return _MISSING
    # A list in which some elements are sharded loses its positions, so it is stored as a dict by index.
    return _rebuild(value, members) if len(members) == len(children) else dict(members)


def _assemble(container: Any, values: Mapping[Path, Any], common: Any, missing_paths: set[Path], path: Path) -> Any:  # noqa: ANN401
    """Return the part of the state dict at `path`; `common` is the stored common part there."""
    if path in missing_paths:
        return _MISSING
    if isinstance(container, LocalNonpersistentObject):
        return container.unwrap()
    children = _children(container)
    if children is None:
        return common if is_common(container) else values.get(path, _MISSING)
    # A container of plain values is replaced as a whole: the stored one may have other keys or another length.
    if all(is_common(leaf) for _, leaf in flatten(container)):
        return common
    if common is not _MISSING and not isinstance(common, dict | list | tuple):
        raise CheckpointError(
            f"{format_path(path)}: a {type(common).__name__} is stored "
            f"where the state dict has a {type(container).__name__}"
        )
    # The state dict and the stored common part are walked together. `stored.pop` removes what has a counterpart, so
    # that the rest is what is stored and was not asked for.
    stored = {} if common is _MISSING else dict(_children(common) or ())
    members = [
        (key, _assemble(child, values, stored.pop(key, _MISSING), missing_paths, (*path, key)))
        for key, child in children
    ]
    present = [(key, child) for key, child in members if child is not _MISSING]
    if isinstance(container, dict):
        # A dict also gets what is stored and was not asked for; `stored` has only these left.
        return {**dict(present), **stored} if present or stored else _MISSING
    if present and len(present) < len(members):
        absent = sorted({key for key, _ in members} - {key for key, _ in present})
        raise CheckpointError(f"{format_path(path)}: elements {absent} are missing from the checkpoint")
    return _rebuild(container, present) if present else _MISSING


def _factory_paths(factories: Any, path: Path) -> list[Path]:  # noqa: ANN401 - as `factories_of` gives
    if isinstance(factories, dict):
        return [leaf for key, below in factories.items() for leaf in _factory_paths(below, (*path, key))]
    return [path]


def _loaded_factories(factories: Any, missing: Sequence[Path], path: Path) -> Any:  # noqa: ANN401 - as `factories_of` gives
    """Return the factories for which all entries were loaded."""
    if isinstance(factories, dict):
        remaining = {key: _loaded_factories(below, missing, (*path, key)) for key, below in factories.items()}
        return {key: below for key, below in remaining.items() if below not in (None, {})}
    return None if any(missing_path[: len(path)] == path for missing_path in missing) else factories


def as_sharded(key: str, tensor: torch.Tensor, storage_group: str | None = None) -> ReplicatedEntry | None:
    """Convert a tensor to a shard, with the ranks that hold copies; None if this rank is not in a DTensor's mesh.

    A plain tensor is a copy of the whole. Raises `CheckpointError` for a DTensor with a partial placement or
    whose local part is not a single box of the global tensor, and for sparse, nested and quantized tensors.
    """
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        raise CheckpointError(
            f"{key!r} is a {kind.removeprefix('torch.')} tensor, on rank {this_rank()}: only plain strided tensors are "
            "supported; store its parts as plain tensors, or wrap it in a ShardedObject"
        )
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(inner) and not isinstance(inner, AsyncCollectiveTensor):
        raise CheckpointError(
            f"{key!r} is a {type(inner).__name__}, on rank {this_rank()}: its values are in other tensors, which a "
            "checkpoint does not know; store these, or the tensor in a ShardedObject"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if not isinstance(tensor, DTensor):
        return ReplicatedEntry(
            ShardedTensor.from_rank_offsets(key, tensor.detach()), (this_rank(),), 0, 1, nbytes, storage_group
        )
    mesh = tensor.device_mesh
    # None on a rank that is not part of the mesh, such as the ranks of another pipeline stage.
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    # Example: a tensor of shape (8, 4) on a mesh of shape (2, 3) with the placements [Replicate, Shard(0)]. The rank at
    # coordinate (1, 2) has copy `index` 1 of `count` 2, and `cuts` is {0: [(1, 3, 2)]}: part 2 of 3 of dim 0, which are
    # the rows 6 and 7, because parts have 3 rows, rounded up.
    sizes = tuple(mesh.mesh.shape)
    # Replicate placements number the copies: this rank has copy `index` of `count`. Shard placements cut a tensor dim,
    # in the order of the mesh dims; `split_factor` belongs to the strided sharding of FSDP over tensor parallelism.
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    index, count = 0, 1
    for placement, size, at in zip(tensor.placements, sizes, coordinate, strict=True):
        if placement.is_replicate():
            index, count = index * size + at, count * size
        elif (dim := getattr(placement, "dim", None)) is not None and not placement.is_partial():
            cuts.setdefault(dim % tensor.ndim, []).append((int(getattr(placement, "split_factor", 1)), size, at))
        else:
            raise CheckpointError(
                f"{key!r} is a DTensor with the placement {placement}, on rank {this_rank()}: no rank holds its "
                "values; redistribute it first"
            )
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for dim, steps in cuts.items():
        run = layout.cut_range(tensor.shape[dim], steps)
        if run is None:
            raise CheckpointError(
                f"{key!r} is a DTensor with the placements {tensor.placements}: the part of dim {dim} on rank "
                f"{this_rank()} is not contiguous; redistribute it first"
            )
        offset[dim], shape[dim] = run
    local = local_part(tensor)
    shard = ShardedTensor(
        key,
        local,
        local.dtype,
        tuple(shape),
        tuple(tensor.shape),
        tuple(offset),
        # torch's shards differ in size if the dimension does not divide evenly, which Megatron-Core calls an irregular
        # grid.
        None if cuts else (1,) * tensor.ndim,
    )
    return ReplicatedEntry(shard, tuple(mesh.mesh.flatten().tolist()), index, count, nbytes, storage_group)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, or a plain tensor itself, detached from the autograd graph."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def as_dtensor(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Convert a local part to the type of `tensor`: a DTensor of its mesh and placements, or a plain tensor.

    The result uses the local part's memory. A `local` that is a DTensor already is returned unchanged. Raises
    `CheckpointError` if the local part has another shape than that of `tensor`.
    """
    if isinstance(local, DTensor):
        return local
    part = local_part(tensor)
    if local.shape != part.shape:
        raise CheckpointError(
            f"loaded a local part of shape {tuple(local.shape)}, expected {tuple(part.shape)}, on rank {this_rank()}"
        )
    if not isinstance(tensor, DTensor):
        return local
    # The data was loaded into the memory of `tensor` itself.
    if local.dtype == part.dtype and (local.data_ptr() == part.data_ptr() or not part.numel()):
        return tensor
    # `run_check=False`: the check is a collective. Shape and stride are given, since they cannot be derived from uneven
    # shards.
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


Holders: TypeAlias = tuple[int, ...]
Gather: TypeAlias = Callable[[Any], list[Any]]


@dataclass
class ReplicatedEntry:
    """An entry that other ranks may hold copies of.

    holders: the ranks that together hold whole copies of the global tensor: those of a mesh, or this rank alone. index,
    count: which of the `count` copies within the holders this entry belongs to. nbytes: size of the global tensor in
    bytes. storage_group: entries with the same name are stored by one rank, and the names are distributed over the
    ranks; None: the first rank stores the entry.
    """

    entry: ShardedTensor | ShardedObject
    holders: Holders
    # Example: a DTensor is sharded over the ranks 0 and 1, and again over 2 and 3. Each pair holds one whole copy.
    # `holders` is (0, 1) on the ranks 0 and 1 and (2, 3) on the others, `index` is 0 and `count` 1. If the first pair
    # is chosen to store it, the ranks 0 and 1 get replica id 0, the ranks 2 and 3 get replica id 1.
    index: int = 0
    count: int = 1
    nbytes: int = 0
    storage_group: str | None = None


def assign_replica_ids(
    copies: Sequence[ReplicatedEntry], gather: Gather = gather_objects, *, error: Exception | None = None
) -> None:
    """Set the replica id of every entry: 0 on the rank that stores it. Collective; all ranks must call it.

    Ranks may hold different keys; one of the ranks that hold a key stores it. `error` is the exception that this rank
    raised while it prepared its entries, if any; then all ranks raise `CheckpointError` with its message.
    """
    # Entries whose mesh has all ranks are held by all of them; nothing has to be exchanged for these.
    meshes_by_key = _meshes_by_key([copy for copy in copies if len(copy.holders) < world_size()], gather, error)
    placed = [(copy, meshes_by_key.get(copy.entry.key, [copy.holders])) for copy in copies]
    owners = _assign_owners(placed)
    for copy, meshes in placed:
        # All copies in the job: those of every mesh that holds the key.
        total = len(meshes) * copy.count
        # Number the copies of all meshes in order, then rotate, so that the owner's copy gets replica id 0.
        index = meshes.index(copy.holders) * copy.count + copy.index
        copy.entry.replica_id = (index - owners.get(_group_key(copy, meshes), 0)) % total


def _meshes_by_key(
    copies: Iterable[ReplicatedEntry], gather: Gather, error: Exception | None
) -> dict[str, list[Holders]]:
    """Return the meshes that hold every key, sorted.

    All ranks first exchange a digest of what they hold. If it is the same everywhere and no key is on a mesh, every
    rank holds every key, and the keys themselves need not be exchanged.
    """
    rank, world = this_rank(), world_size()
    # () stands for "this rank alone", so that ranks that hold the same keys send the same digest.
    entries = sorted({(copy.entry.key, () if copy.holders == (rank,) else copy.holders) for copy in copies})
    message = "" if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointError):
        message = f"{type(error).__name__}: {error}"
    # One collective in the usual case: 32 bytes per rank instead of all keys.
    reports = gather((message, hashlib.sha256(repr(entries).encode()).digest()))
    if errors := [f"rank {peer}: {problem}" for peer, (problem, _) in enumerate(reports) if problem]:
        raise CheckpointError("the state dict cannot be stored: " + "; ".join(errors)) from error
    if len({digest for _, digest in reports}) == 1 and not any(holders for _, holders in entries):
        return {key: [(peer,) for peer in range(world)] for key, _ in entries}
    meshes_by_key: dict[str, set[Holders]] = {}
    # The second collective. All ranks come here or none, because they compare the same digests.
    for other, keys in enumerate(gather(entries)):
        for key, holders in keys:
            meshes_by_key.setdefault(key, set()).add(holders or (other,))
    return {key: sorted(meshes_by_key[key]) for key, _ in entries}


def _group_key(copy: ReplicatedEntry, meshes: Sequence[Holders]) -> tuple[str | None, tuple[Holders, ...], int]:
    return copy.storage_group, tuple(meshes), copy.count


def _assign_owners(
    placed: Sequence[tuple[ReplicatedEntry, list[Holders]]],
) -> dict[tuple[str | None, tuple[Holders, ...], int], int]:
    """Return the copy to store for every group of entries.

    Assigns greedily: the largest group first, to the copy with the fewest bytes so far among equal meshes. The result
    is deterministic, so the ranks of a mesh agree without communication.
    """
    groups: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for copy, meshes in placed:
        if copy.storage_group is not None:
            # A parameter and its optimizer state have the same group, so they are stored by one rank and read together.
            group = _group_key(copy, meshes)
            groups[group] = groups.get(group, 0) + copy.nbytes
    loads: dict[tuple[tuple[Holders, ...], int], list[int]] = {}
    owners: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    # The name breaks ties, so that the order does not depend on that of a dict.
    for group, nbytes in sorted(groups.items(), key=lambda item: (-item[1], str(item[0][0]))):
        _, among, count = group
        load = loads.setdefault((among, count), [0] * (len(among) * count))
        owners[group] = load.index(min(load))
        load[owners[group]] += nbytes
    return owners
