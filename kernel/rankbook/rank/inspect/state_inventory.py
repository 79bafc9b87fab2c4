"""List the state that the ranks' layout keeps equal, and hash it: tensors, optimizers, schedulers, random states.

The coordinator compares the hashes of all ranks (`coordinator/sync_check.py`). A key names a tensor on all ranks, and
the place of a shard says which ranks hold a replica of it: the coordinates along the axes of its mesh that shard it.
All of this runs on the main thread, between cells or at the end of an optimizer step (`step_hold.py`).
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

import numpy
import torch
import torch.distributed as dist

from rankbook.control_collectives import control_device
from rankbook.errors import InvalidArgument
from rankbook.numerics.hashing import BLOCK, block_of, check_readable, compare_block, hash_blocks, place_of
from rankbook.protocol.queries import Piece, PieceDifference, StateEntry, StateHashes
from rankbook.rank.inspect import object_discovery, tensor_introspection
from rankbook.rank.inspect.shard_map import resolve_variable
from rankbook.rank.inspect.tensor_introspection import GilYield, instance_dict, is_a, is_dtensor, loaded_class

RNG = "rng"
"""Name of the random states of Python, NumPy and torch, for `names`."""


class _NoYield(GilYield):
    """Yields nothing: this is the main thread."""

    def __call__(self) -> None:
        pass


_no_yield = _NoYield()
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (numpy.ndarray, numpy.generic, dict, list, tuple, set, frozenset)
_MAX_DEPTH = 8


@dataclass
class StateItem:
    """An entry of the inventory, with the local tensor in place of its hashes. See `protocol.queries.StateEntry`."""

    key: str
    kind: str
    tensor: torch.Tensor | None = None
    value: str = ""
    shape: tuple[int, ...] = ()
    place: str = ""
    ranks: tuple[int, ...] = ()
    trainable: bool | None = None
    first: str = ""
    due: str = ""
    optional: str = ""


@dataclass
class Inventory:
    """State that the names refer to on this rank. See `protocol.queries.StateHashes`."""

    items: list[StateItem] = field(default_factory=list)
    steps: int | None = None
    missing: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def hash_state(namespace: Mapping[str, object], names: tuple[str, ...]) -> StateHashes:
    """Return the hashes of the variables `names`, or of all state that the layout keeps equal."""
    inventory = take_inventory(namespace, names)
    entries = []
    with torch.no_grad():
        for item in inventory.items:
            try:
                entries.append(_hashed(item))
            except InvalidArgument as error:
                inventory.unreadable[item.key] = str(error)
            except (RuntimeError, TypeError) as error:
                kind = type(item.tensor)
                if not hasattr(kind, "__tensor_flatten__"):  # torch's protocol for tensors that consist of others
                    raise
                inventory.unreadable[item.key] = f"a {kind.__name__} does not give its bytes: {error}"
    return StateHashes(tuple(entries), inventory.steps, inventory.missing, inventory.skipped, inventory.unreadable)


def _hashed(item: StateItem) -> StateEntry:
    tensor, dtype, digest, value, size = item.tensor, "", b"", item.value, 0
    if tensor is not None:
        dtype, size = tensor_introspection.dtype_of(tensor), tensor_introspection.nbytes(tensor)
        digest = hash_blocks(tensor)
    return StateEntry(
        item.key, item.kind, dtype, item.shape, item.place, item.ranks, digest, value, size, item.trainable, item.first,
        item.due, item.optional,
    )  # fmt: skip


def measure_differences(
    namespace: Mapping[str, object], names: tuple[str, ...], pieces: tuple[Piece, ...]
) -> list[PieceDifference]:
    """Compare blocks of tensors with those of the rank that holds the reference. A collective of all ranks.

    Blocks are broadcast one by one, so that the extra memory is a few blocks. The largest difference and the number of
    differing elements are those of the blocks that the pieces name.
    """
    tensors = {item.key: item.tensor for item in take_inventory(namespace, names).items if item.tensor is not None}
    rank, device = dist.get_rank(), control_device()
    differences = []
    with torch.no_grad():
        for piece in pieces:
            tensor = tensors.get(piece.key)
            found = []
            for number in piece.blocks:
                size = min(BLOCK, piece.nbytes - number * BLOCK)
                if rank == piece.source:
                    if tensor is None:
                        raise InvalidArgument(f"{piece.key!r} is not defined any more on this rank")
                    block = block_of(tensor, number).to(device).contiguous()
                else:
                    block = torch.empty(size, dtype=torch.uint8, device=device)
                dist.broadcast(block, piece.source)
                if rank in piece.ranks and tensor is not None:
                    found.append(compare_block(block_of(tensor, number).to(device), block, tensor.dtype))
            if found:
                largest = [gap for gap, *_ in found if not math.isnan(gap)]
                differences.append(
                    PieceDifference(
                        piece.key,
                        rank,
                        max(largest, default=float("nan")),
                        sum(differing for _, differing, _, _ in found),
                        sum(compared for _, _, compared, _ in found),
                        sum(nonfinite for *_, nonfinite in found),
                    )
                )
    return differences


def take_inventory(namespace: Mapping[str, object], names: tuple[str, ...]) -> Inventory:
    """Return the items of the variables `names`, or of all state that the layout keeps equal."""
    collector = _Collector(namespace)
    if names:
        for name in names:
            collector.add_named(name)
    else:
        collector.add_all()
    return collector.inventory


class _Collector:
    """Collects items. Reads attributes of modules and optimizers without running properties."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.inventory = Inventory()
        self._namespace = namespace
        self._objects = object_discovery.discover_objects(namespace, _no_yield)
        self._added: set[str] = set()
        # Of every parameter: its model, its name there, and the ranks that hold replicas of it.
        self._owners: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        kept: set[int] = set()
        for name, tree in self._objects.trees.items():
            for key, _, tensor, _ in _tensors_with_aliases(tree):
                self._owners.setdefault(id(tensor), (name, key, _ddp_ranks(tree)))
            if is_kept_equal(tree):
                kept |= {id(tensor) for _, _, tensor, _ in _tensors_with_aliases(tree)}
        # A rank may have another optimizer for itself, which has taken other steps.
        optimizers = list(self._objects.optimizers.values())
        shared = [
            o for o in optimizers if not kept.isdisjoint(map(id, tensor_introspection.parameters_of_optimizer(o)))
        ]
        counted = map(tensor_introspection.steps_of_optimizer, shared or optimizers)
        self.inventory.steps = max((count for count in counted if count is not None), default=None)

    def _add(self, item: StateItem) -> None:
        if item.key not in self._added:
            self._added.add(item.key)
            if item.tensor is not None and not is_dtensor(item.tensor):
                try:
                    check_readable(item.tensor)
                except InvalidArgument as error:
                    self.inventory.unreadable[item.key] = str(error)
                    return
            if item.tensor is not None and is_dtensor(item.tensor):
                item.place = _place(item.tensor)
                item.shape = tensor_introspection.shape_of(item.tensor)
                item.tensor = tensor_introspection.local_shard(item.tensor)
            elif item.tensor is not None:
                item.shape = item.shape or tensor_introspection.shape_of(item.tensor)
            self.inventory.items.append(item)

    def add_all(self) -> None:
        """Add what is meant to be equal: wrapped models, their optimizers, schedulers, scalers and random states."""
        kept: set[int] = set()
        trees = dict(self._named(self._objects.trees))
        if not any(map(is_kept_equal, trees.values())):
            # Models in local variables, which only the runtime knows, by the order in which they were prepared. Those
            # that wait for the garbage collector would be counted on some ranks only.
            gc.collect()
            self._objects = object_discovery.discover_objects(self._namespace, _no_yield)
            trees = self._objects.trees
        for name, tree in trees.items():
            if is_kept_equal(tree):
                # A rank may keep an average of the weights for itself.
                self._add_model(name, tree, optional="" if _has_replicas(tree) else name)
                kept |= {id(tensor) for _, _, tensor, _ in _tensors_with_aliases(tree)}
                self._add_dropout_states(tree)
            else:
                kind = type(tensor_introspection.unwrapped(tree[0][1])).__name__
                self.inventory.skipped[name] = f"{kind} that no wrapper keeps equal"
        bare = []
        for name, optimizer in self._objects.optimizers.items():
            if kept.isdisjoint(map(id, tensor_introspection.parameters_of_optimizer(optimizer))):
                continue
            bare.append(tensor_introspection.bare_optimizer(optimizer))
            if type(bare[-1]).__name__ == "ZeroRedundancyOptimizer":
                self.inventory.skipped[name] = "ZeroRedundancyOptimizer, whose ranks hold different states"
            else:
                self._add_optimizer(name, optimizer)
        for name, value in self._namespace.items():
            scheduler: Any = instance_dict(value).get("scheduler", value)
            if _is_scheduler(scheduler) and tensor_introspection.bare_optimizer(scheduler.optimizer) in bare:
                self._add_leaves(name, "scheduler", scheduler.state_dict())
            scaler: Any = instance_dict(value).get("scaler") if type(value).__name__ == "Accelerator" else value
            if bare and is_a(scaler, torch.amp.GradScaler):
                self._add_leaves(f"{name}.scaler" if scaler is not value else name, "scaler", scaler.state_dict())
        for name, loader in self._objects.loaders.items():
            self._add_loader(name, loader)

    @staticmethod
    def _named(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the objects that variables lead to."""
        return ((name, value) for name, value in objects.items() if not name.startswith("prepared "))

    def add_named(self, name: str) -> None:
        """Add the variable `name`, a part of a model, or all entries that match a pattern such as `model.*.bias`."""
        before, first = len(self._added), name.split(".", maxsplit=1)[0]
        if name == RNG and RNG not in self._namespace:
            self._add_random_states(("python", "numpy", "torch", "cuda"))
            return
        if any(symbol in name for symbol in "*?["):
            self._add_matching(first, lambda key: fnmatchcase(key, name))
        elif "." in name:
            self._add_matching(first, lambda key: key == name or key.startswith(f"{name}."))
        if len(self._added) > before:
            return
        try:
            value = resolve_variable(self._namespace, name, _no_yield)
            self._add_value(name, value)
        except InvalidArgument as error:
            self.inventory.missing[name] = str(error)
        except Exception as error:  # noqa: BLE001 - of a `state_dict` or `__getattr__` of the user's: it is reported
            self.inventory.missing[name] = f"cannot read the state of {name!r}: {type(error).__name__}: {error}"

    def _add_matching(self, first: str, matches: Callable[[str], bool]) -> None:
        """Add the entries of the variable `first`, and of all models and optimizers, whose keys match."""
        everything = _Collector(self._namespace)
        if first in self._namespace:
            with contextlib.suppress(InvalidArgument):
                everything._add_value(first, self._namespace[first])
        for name, tree in everything._objects.trees.items():
            everything._add_model(name, tree)
        for name, optimizer in everything._objects.optimizers.items():
            everything._add_optimizer(name, optimizer)
        for item in everything.inventory.items:
            if matches(item.key):
                self._add(item)

    def _add_value(self, name: str, value: Any) -> None:  # noqa: ANN401 - any variable
        if is_a(value, torch.nn.Module):
            self._add_model(name, list(tensor_introspection.modules_of(value, _no_yield)))
        elif is_a(value, torch.optim.Optimizer):
            self._add_optimizer(name, value)
        elif is_a(value, torch.Tensor):
            self._add(StateItem(name, "tensor", value))
        elif is_a(value, torch.Generator):
            self._add(StateItem(name, "random state", value.get_state()))
        elif "parts" in instance_dict(value) and "position" in instance_dict(value):
            self._add_loader(name, value)
        elif callable(state := getattr(value, "state_dict", None)):
            self._add_leaves(name, "state", state())
        elif type(value) in _PLAIN_VALUES or any(is_a(value, kind) for kind in _CONTAINERS):
            self._add_leaves(name, "value", value)
        else:
            raise InvalidArgument(
                f"cannot compare {name!r}, a {type(value).__name__}: expected a tensor, a module, an optimizer, an "
                "object with a state_dict, numbers, or containers of these"
            )

    # Models

    def _add_model(self, name: str, tree: list[tuple[str, torch.nn.Module]], optional: str = "") -> None:
        ranks, ddp = _ddp_ranks(tree), _ddp_of(tree)
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        # torch 2.13 has given the attribute another name.
        options = instance_dict(ddp)
        broadcasts = options.get("forward_sync_buffers", options.get("broadcast_buffers")) is True
        due = "the next forward pass of DDP broadcasts the buffers of rank 0" if broadcasts else ""
        firsts: dict[int, str] = {}
        for key, kind, tensor, trainable in _tensors_with_aliases(tree):
            if key in ignored:
                continue
            self._add(
                StateItem(
                    f"{name}.{key}",
                    kind,
                    tensor,
                    ranks=ranks,
                    trainable=trainable,
                    first=firsts.setdefault(id(tensor), f"{name}.{key}"),
                    due=due if kind == "buffer" else "",
                    optional=optional,
                )
            )

    # Optimizers

    def _add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        bare = tensor_introspection.bare_optimizer(optimizer)
        parameters = [parameter for group in bare.param_groups for parameter in group["params"]]
        models = {self._owners[id(parameter)][0] for parameter in parameters if id(parameter) in self._owners}
        numbers: dict[int, tuple[str, tuple[int, ...]]] = {}
        for index, group in enumerate(bare.param_groups):
            for parameter in group["params"]:
                model, known, ranks = self._owners.get(id(parameter), ("", str(len(numbers)), ()))
                known = f"{model}.{known}" if model and len(models) > 1 else known
                numbers[id(parameter)] = known, ranks
                self._add(StateItem(f"{name}.params.{known}", "optimized", value=f"group {index}", ranks=ranks))
            options = {key: value for key, value in group.items() if key != "params"}
            self._add_leaves(f"{name}.group {index}", "option", options)
        states: dict[Any, Any] = bare.state
        for parameter, state in states.items():
            # Some optimizers keep numbers under a name.
            known, ranks = numbers.get(id(parameter), (parameter if is_a(parameter, str) else "?", ()))
            place = _place(parameter) if is_a(parameter, torch.Tensor) and is_dtensor(parameter) else ""
            if not is_a(state, dict):
                self._add_leaves(f"{name}.state.{known}", "optimizer state", state)
                continue
            for key, value in tensor_introspection.items(state):
                entry = f"{name}.state.{known}.{key}"
                if is_a(value, torch.Tensor):
                    # Some optimizers keep the state of a sharded parameter as plain tensors of the shard's size.
                    local = place if not is_dtensor(value) and value.numel() > 1 else ""
                    self._add(StateItem(entry, "optimizer state", value, place=local, ranks=ranks))
                else:
                    self._add_leaves(entry, "optimizer state", value)

    # Others

    def _add_loader(self, name: str, loader: object) -> None:
        parts, position = instance_dict(loader).get("parts"), instance_dict(loader).get("position")
        has = instance_dict(position)
        if not instance_dict(parts).get("synchronized") or has.get("seed") is None:
            return
        self._add(StateItem(f"{name}.seed", "loader", value=str(has["seed"])))
        self._add(StateItem(f"{name}.epoch", "loader", value=str(has.get("epoch"))))
        generator: Any = instance_dict(parts).get("generator")
        if is_a(generator, torch.Generator):
            # A dispatcher reads on rank 0 for all ranks, and draws from the generator there alone.
            ranks = instance_dict(instance_dict(parts).get("tickets")).get("ranks", ())
            due = "the next pass over the loader begins with the generator of rank 0" if len(ranks) > 1 else ""
            self._add(StateItem(f"{name}.generator", "random state", generator.get_state(), due=due))

    def _add_dropout_states(self, tree: list[tuple[str, torch.nn.Module]]) -> None:
        """Add torch's random states for the ranks of a tensor-parallel group, if dropout draws from them.

        These ranks hold the same activations, so they have to drop the same ones. Data-parallel ranks do not.
        """
        ranks = _tensor_parallel_ranks(tree)
        if len(ranks) > 1 and any(drops(module) for _, module in tree):
            self._add_random_states(("torch", "cuda"), ranks)

    def _add_random_states(self, kinds: tuple[str, ...], ranks: tuple[int, ...] = ()) -> None:
        for kind in kinds:
            if kind == "torch":
                self._add(StateItem("rng.torch", "random state", torch.get_rng_state(), ranks=ranks))
            elif kind == "cuda" and torch.cuda.is_initialized():
                self._add(StateItem("rng.cuda", "random state", torch.cuda.get_rng_state(), ranks=ranks))
            elif kind in {"python", "numpy"}:
                state = random.getstate() if kind == "python" else numpy.random.get_state()  # noqa: NPY002 - the state itself
                text = (
                    repr(state)
                    if kind == "python"
                    else repr([getattr(part, "tolist", lambda p=part: p)() for part in state])
                )
                digest = blake2b(text.encode(), digest_size=8).hexdigest()
                self._add(StateItem(f"rng.{kind}", "random state", value=digest, ranks=ranks))

    def _add_leaves(self, key: str, kind: str, value: Any, depth: int = 0) -> None:  # noqa: ANN401 - any value
        """Add the tensors and values in nested containers. What cannot be compared is named as unreadable."""
        if is_a(value, numpy.generic):  # a number out of an array, such as a learning rate from numpy.cos
            value = value.item()
        if depth > _MAX_DEPTH:
            self.inventory.unreadable[key] = f"it is nested more than {_MAX_DEPTH} levels deep"
        elif is_a(value, torch.Tensor):
            self._add(StateItem(key, kind, value))
        elif is_a(value, numpy.ndarray) and value.dtype.kind in "biufc":
            self._add(StateItem(key, kind, torch.from_numpy(numpy.ascontiguousarray(value))))
        elif type(value) in _PLAIN_VALUES:
            self._add(StateItem(key, kind, value=_in_words(repr(value))))
        elif type(value) in {set, frozenset}:  # their order is that of the hashes, which differ between processes
            self._add(StateItem(key, kind, value=_in_words(f"{{{', '.join(sorted(map(repr, value)))}}}")))
        elif is_a(value, dict):
            for name, item in tensor_introspection.items(value):
                self._add_leaves(f"{key}.{name}", kind, item, depth + 1)
        elif is_a(value, list) or is_a(value, tuple):
            for index, item in enumerate(value):
                self._add_leaves(f"{key}.{index}", kind, item, depth + 1)
        elif is_a(value, torch.nn.Module) or is_a(value, torch.optim.Optimizer) or is_a(value, torch.Generator):
            self._add_value(key, value)
        else:
            found = type(value).__name__ + (f" of {value.dtype}" if is_a(value, numpy.ndarray) else "")
            self.inventory.unreadable[key] = f"it has the type {found}: expected tensors, numbers or strings"


def _in_words(text: str) -> str:
    if len(text) <= 100:
        return text
    return f"{text[:60]}… ({blake2b(text.encode(), digest_size=8).hexdigest()})"


def is_kept_equal(tree: list[tuple[str, torch.nn.Module]]) -> bool:
    """Return True if a wrapper keeps the replicas of a model equal: DDP, FSDP2, DTensors, or an average of weights."""
    averaged = loaded_class("torch.optim.swa_utils", "AveragedModel")
    return _has_replicas(tree) or (averaged is not None and any(is_a(module, averaged) for _, module in tree))


def _has_replicas(tree: list[tuple[str, torch.nn.Module]]) -> bool:
    """Return True if several ranks have parts or replicas of a model: DDP, FSDP2, DTensors."""
    return (
        _ddp_of(tree) is not None
        or any(tensor_introspection.is_fsdp(module) for _, module in tree)
        or any(is_dtensor(tensor) for _, _, tensor, _ in _tensors_with_aliases(tree))
    )


def drops(module: torch.nn.Module) -> bool:
    """Return True if a module has active dropout: a layer of torch, or a number that it passes to a function."""
    attributes = instance_dict(module)
    names = ["p"] if is_a(module, torch.nn.modules.dropout._DropoutNd) else [n for n in attributes if "dropout" in n]
    values: list[Any] = [attributes[name] for name in names if name in attributes]
    return attributes.get("training") is True and any(type(v) in {int, float} and 0 < v <= 1 for v in values)


def _place(tensor: torch.Tensor) -> str:
    spec = tensor_introspection.spec_of(tensor)
    return place_of(spec.mesh, spec.placements)


def _tensors_with_aliases(
    tree: list[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, str, torch.Tensor, bool | None]]:
    """Yield (name, kind, tensor, trainable) of all parameters and buffers; a tied tensor under every name."""
    shards = tensor_introspection.fsdp_shards([module for _, module in tree])
    for prefix, module in tree:
        for kind in ("parameter", "buffer"):
            for name, tensor in tensor_introspection.items(instance_dict(module).get(f"_{kind}s")):
                shard = shards.get((id(module), name), tensor)
                if shard is not None and is_a(shard, torch.Tensor):
                    yield f"{prefix}{name}", kind, shard, shard.requires_grad if kind == "parameter" else None


def _ddp_of(tree: list[tuple[str, torch.nn.Module]]) -> torch.nn.Module | None:
    kind = loaded_class("torch.nn.parallel", "DistributedDataParallel")
    return next((module for _, module in tree if kind is not None and is_a(module, kind)), None)


def _ddp_ranks(tree: list[tuple[str, torch.nn.Module]]) -> tuple[int, ...]:
    """Return the ranks that DDP keeps equal; () for all ranks, and for other models."""
    ddp = _ddp_of(tree)
    group = None if ddp is None else instance_dict(ddp).get("process_group")
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return ()
    return tuple(dist.get_process_group_ranks(group))


def _tensor_parallel_ranks(tree: list[tuple[str, torch.nn.Module]]) -> tuple[int, ...]:
    for _, _, tensor, _ in _tensors_with_aliases(tree):
        if is_dtensor(tensor):
            mesh = tensor_introspection.spec_of(tensor).mesh
            if "tp" in (mesh.mesh_dim_names or ()):
                return tuple(dist.get_process_group_ranks(mesh.get_group("tp")))
    return ()


def _is_scheduler(value: object) -> bool:
    kind = loaded_class("torch.optim.lr_scheduler", "LRScheduler")
    return kind is not None and is_a(value, kind)
