"""Sharding map of a variable: which slices of its tensors this rank and the other ranks hold.

The slices of other ranks are computed from the placements, without communication. No tensor value is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rankbook.errors import InvalidArgument
from rankbook.protocol.queries import Box, RankTensor, ShardsReply
from rankbook.rank.inspect import object_discovery, tensor_introspection
from rankbook.rank.inspect.tensor_introspection import GilYield, MemoryRegion, instance_dict, is_a

_MAX_TENSORS = 200_000
"""Maximum number of tensors per variable."""


@dataclass(frozen=True)
class KeyedTensor:
    """A tensor, or a `ShardedTensor` of a checkpoint, with its key."""

    key: str
    value: Any


def resolve_variable(namespace: Mapping[str, object], name: str, gil_yield: GilYield) -> object:
    """Return the variable, or the object at a dotted name, without running properties. Raises `InvalidArgument`."""
    if name in namespace:
        return namespace[name]
    # A dotted name, such as `trainer.model` or `state.optim.0`, where 0 is a key.
    first, *rest = name.split(".")
    if first in namespace:
        value = namespace[first]
        for part in rest:
            # Attributes and items, as they are stored. `getattr` could run a property.
            inside = {**instance_dict(value), **{str(key): below for key, below in tensor_introspection.items(value)}}
            if is_a(value, torch.nn.Module):
                # Views leave out the names of wrappers, such as `module` of DDP. A wrapper's own names win.
                for module in (tensor_introspection.unwrapped(value), value):  # type: ignore[arg-type]
                    for table in ("_buffers", "_parameters", "_modules"):
                        inside.update(instance_dict(module).get(table, {}))
            if part not in inside:
                raise InvalidArgument(f"{first!r} has no attribute or item {part!r} on this rank")
            value = inside[part]
        return value
    # A name that a view shows, such as `prepared model 0`, is no variable.
    objects = object_discovery.discover_objects(namespace, gil_yield)
    for kind in (objects.models, objects.optimizers):
        if name in kind:
            return kind[name]
    raise InvalidArgument(f"variable {name!r} is not defined on this rank")


def tensors_of(namespace: Mapping[str, object], name: str, gil_yield: GilYield) -> tuple[str, list[KeyedTensor]]:
    """Return the kind of the variable, as in `ShardMap`, and its tensors. Raises `InvalidArgument`."""
    value = resolve_variable(namespace, name, gil_yield)
    if is_a(value, torch.nn.Module):
        tree = list(tensor_introspection.modules_of(value, gil_yield))  # type: ignore[arg-type]
        return "model", [
            KeyedTensor(entry.name, entry.tensor) for entry in tensor_introspection.tensors_of_modules(tree, gil_yield)
        ]
    if is_a(value, torch.optim.Optimizer):
        names = _parameter_names(value, namespace, gil_yield)  # type: ignore[arg-type]
        states = tensor_introspection.tensors_of_optimizer(value, names, gil_yield)  # type: ignore[arg-type]
        return "optimizer", [KeyedTensor(state.name, state.tensor) for state in states]
    if is_a(value, torch.Tensor):
        return "DTensor" if tensor_introspection.is_dtensor(value) else "tensor", [KeyedTensor(name, value)]
    if _is_shard(value):
        return "ShardedTensor", [KeyedTensor(str(instance_dict(value).get("key", name)), value)]
    if is_a(value, dict):
        return "state dict", list(_leaves(value, (), gil_yield))
    raise InvalidArgument(
        f"expected a model, optimizer, state dict or tensor, but {name!r} is a {type(value).__name__} on this rank"
    )


def _parameter_names(
    optimizer: torch.optim.Optimizer, namespace: Mapping[str, object], gil_yield: GilYield
) -> dict[int, str]:
    """Return the names of the optimizer's parameters by id, with that of the model if it has those of several."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = {
        model: [(id(entry.tensor), entry.name) for entry in tensor_introspection.tensors_of_modules(tree, gil_yield)]
        for model, tree in object_discovery.discover_objects(namespace, gil_yield).trees.items()
    }
    several = sum(any(key in owned for key, _ in entries) for entries in models.values()) > 1
    return {key: f"{model}.{name}" if several else name for model, entries in models.items() for key, name in entries}


def _is_shard(value: object) -> bool:
    kind = tensor_introspection.loaded_class("rankbook.checkpoint.state_dict.sharded_tensor", "ShardedTensor")
    return kind is not None and is_a(value, kind)


def _leaves(value: object, path: tuple[str, ...], gil_yield: GilYield) -> Iterator[KeyedTensor]:
    gil_yield()
    # A bound, because a dict may contain itself.
    if len(path) > 12:
        return
    if is_a(value, torch.Tensor):
        yield KeyedTensor(".".join(path), value)
    elif _is_shard(value):
        yield KeyedTensor(str(instance_dict(value).get("key", ".".join(path))), value)
    elif is_a(value, dict):
        for key, item in tensor_introspection.items(value):
            if type(key) in {str, int}:
                yield from _leaves(item, (*path, str(key)), gil_yield)
    elif type(value) in {list, tuple}:
        for index, item in enumerate(tuple(value)):  # type: ignore[arg-type]
            yield from _leaves(item, (*path, str(index)), gil_yield)


def find_tensor(namespace: Mapping[str, object], name: str, key: str, gil_yield: GilYield) -> torch.Tensor:
    """Return the local shard of one tensor of a variable. Raises `InvalidArgument`."""
    _, tensors = tensors_of(namespace, name, gil_yield)
    for tensor in tensors:
        if tensor.key == key:
            value = instance_dict(tensor.value).get("data") if _is_shard(tensor.value) else tensor.value
            if value is None:
                raise InvalidArgument(f"{key!r} of {name!r} has no data on this rank")
            return tensor_introspection.local_shard(value)
    raise InvalidArgument(f"{name!r} has no tensor {key!r} on this rank")


@dataclass
class _Grids:
    """The distinct partitions of tensors, which are computed once and numbered."""

    rank: int
    others: bool
    # Example: a linear layer of (8, 4) and its bias of (8,), sharded along dim 0 over two ranks:
    #
    #     grids[0] = (Box(0, (0, 0), (4, 4)), Box(1, (4, 0), (4, 4)))
    #     grids[1] = (Box(0, (0,), (4,)), Box(1, (4,), (4,)))
    #
    # Further layers of the same shape refer to the same two grids. Without `others`, a grid has this rank's box only.
    grids: list[tuple[Box, ...]] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def of_dtensor(self, tensor: torch.Tensor) -> int:
        spec = tensor_introspection.spec_of(tensor)
        shape = tensor_introspection.shape_of(tensor)
        # Most parameters of a model have one of a few shapes and placements.
        key = (shape, id(spec.mesh), tuple(spec.placements))
        if key not in self.numbers:
            self.numbers[key] = self._add(tuple(self._partition(shape, spec.mesh, spec.placements)))
        return self.numbers[key]

    def of_unsharded(self, shape: tuple[int, ...]) -> int:
        return self.of_box(Box(self.rank, (0,) * len(shape), shape))

    def of_box(self, box: Box) -> int:
        if box not in self.numbers:
            self.numbers[box] = self._add((box,))
        return self.numbers[box]

    def _add(self, boxes: tuple[Box, ...]) -> int:
        self.grids.append(boxes)
        return len(self.grids) - 1

    def _partition(self, shape: tuple[int, ...], mesh: Any, placements: Any) -> Iterator[Box]:  # noqa: ANN401 - torch's
        """Yield the box of every rank in the mesh. Raises `InvalidArgument` for a placement without a box."""
        sizes = tuple(int(extent) for extent in mesh.mesh.shape)
        for number, rank in enumerate(mesh.mesh.flatten().tolist()):
            if not self.others and rank != self.rank:
                continue
            coordinate: list[int] = []
            # The mesh is flattened in C order, so the coordinate follows from the number.
            remainder = number
            for size in reversed(sizes):
                coordinate.insert(0, remainder % size)
                remainder //= size
            yield _box(int(rank), shape, list(zip(placements, sizes, coordinate, strict=True)))


def _box(rank: int, shape: tuple[int, ...], axes: list[tuple[Any, int, int]]) -> Box:
    # Imported here, because a rank that shows no shards need not have loaded the checkpoint package.
    from rankbook.checkpoint.state_dict import layout

    cuts: dict[int, list[tuple[int, int, int]]] = {}
    for placement, size, at in axes:
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise InvalidArgument(f"unsupported placement {placement}: no rank holds its values yet")
        # Several mesh axes may divide one dimension, one after the other.
        cuts.setdefault(dim % len(shape), []).append((int(getattr(placement, "split_factor", 1)), size, at))
    offset, local = [0] * len(shape), list(shape)
    for dim, steps in cuts.items():
        run = layout.cut_range(shape[dim], steps)
        if run is None:
            raise InvalidArgument(f"the shard of rank {rank} is not contiguous in dim {dim}")
        offset[dim], local[dim] = run
    return Box(rank, tuple(offset), tuple(local))


def shard_reply(
    token: int, namespace: Mapping[str, object], name: str, rank: int, gil_yield: GilYield, *, others: bool
) -> ShardsReply:
    """Return the answer. Raises `InvalidArgument` if the variable does not exist or has no tensors."""
    kind, tensors = tensors_of(namespace, name, gil_yield)
    grids, rank_tensors, trouble = _Grids(rank, others), list[RankTensor](), list[str]()
    counted = set[MemoryRegion]()
    for tensor in tensors[:_MAX_TENSORS]:
        gil_yield()
        try:
            rank_tensors.append(_rank_tensor(tensor, grids, counted))
        except InvalidArgument as error:
            trouble.append(f"{tensor.key}: {error}")
    if len(tensors) > _MAX_TENSORS:
        trouble.append(f"{len(tensors) - _MAX_TENSORS} of {len(tensors)} tensors are left out")
    if not tensors:
        trouble.append("no tensors yet")
    return ShardsReply(token, kind, tuple(rank_tensors), tuple(grids.grids), "; ".join(trouble[:5]))


def _count_bytes(tensor: torch.Tensor, size: int, counted: set[MemoryRegion]) -> int | None:
    """Return the bytes of the local shard that are not in `counted`, and add them; None if they are `size` bytes."""
    regions = set(tensor_introspection.regions_of(tensor)) - counted
    counted.update(regions)
    stored = sum(count for _, _, count in regions)
    return None if stored == size else stored


def _rank_tensor(named: KeyedTensor, grids: _Grids, counted: set[MemoryRegion]) -> RankTensor:
    value = named.value
    if _is_shard(value):
        attributes = instance_dict(value)
        dtype, data = attributes["dtype"], attributes.get("data")
        shape = (1,) * int(attributes.get("prepend_axis_num", 0)) + tuple(attributes["local_shape"])
        box = Box(grids.rank, tuple(attributes["global_offset"]), shape, _number(attributes.get("replica_id", 0)))
        device = "" if data is None else tensor_introspection.device_of(data)
        return RankTensor(
            named.key,
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
            device,
            tuple(attributes["global_shape"]),
            grids.of_box(box),
            None if data is None else _count_bytes(data, math.prod(shape) * dtype.itemsize, counted),
        )
    shape, local = tensor_introspection.shape_of(value), tensor_introspection.local_shard(value)
    if local.layout is not torch.strided:
        raise InvalidArgument("sparse: its size does not follow from its shape")
    grid = grids.of_dtensor(value) if tensor_introspection.is_dtensor(value) else grids.of_unsharded(shape)
    with torch._C.DisableTorchFunctionSubclass():
        itemsize = local.element_size()
        size = local.numel() * itemsize
    return RankTensor(
        named.key,
        tensor_introspection.dtype_of(value),
        itemsize,
        tensor_introspection.device_of(value),
        shape,
        grid,
        _count_bytes(local, size, counted),
    )


def _number(replica: object) -> int:
    """Return the replica number, or -1 for a secondary replica with several axes, to be numbered with its peers."""
    # Megatron-Core allows an int or a tuple of ints with one entry per mesh axis. A tuple of zeros is the main replica;
    # what other tuples mean is known only by comparison with those of all ranks.
    if type(replica) is int:
        return replica
    return -1 if type(replica) is not tuple or any(replica) else 0
