"""Sharded state dicts of models and optimizers, for saving, and loading them back.

Supports models wrapped in DistributedDataParallel, `fully_shard`, tensor parallelism, `torch.compile` and activation
checkpointing; the names of the wrappers are removed from the keys. Optimizer state is keyed by parameter name. With
several models (`sharded_state_dicts`), an optimizer may update parameters of any model, and parameters outside of all
models.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankbook.checkpoint.state_dict.sharded_tensor import (
    EqualTensor,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from rankbook.checkpoint.state_dict.state_dicts import (
    Expecting,
    Gather,
    Path,
    ReplicatedEntry,
    Stored,
    as_dtensor,
    as_sharded,
    assign_replica_ids,
    flatten,
    local_part,
    map_leaves,
)
from rankbook.control_collectives import gather_objects, this_rank
from rankbook.errors import CheckpointError
from rankbook.lazy_imports import loaded_module

_INNER = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Attributes in which torch's wrappers keep the wrapped module, besides `module` of DistributedDataParallel."""

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def sharded_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    prefix: str = "",
    gather: Gather = gather_objects,
) -> ShardedStateDict:
    """Return `{"model": ..., "optimizer": ...}`, to be saved or loaded into the same memory. Collective.

    A tensor of the model is stored as `<prefix><name>`, with the wrappers' parts removed from the name; optimizer state
    as `<prefix>optimizer.state.<parameter name>.<state name>`. Parameter groups, which refer to parameters by name, and
    values that are not tensors are in the common part. If several ranks hold a whole parameter, one rank stores it
    together with its optimizer state, and the parameters are distributed over the ranks by bytes; rank 0 stores
    buffers. `gather` returns the values of all ranks in rank order (default: by the default process group).

    Raises `CheckpointError`, the same on every rank, for an optimizer parameter that is not in the model, names
    that collide once the wrappers' parts are removed, tensors that cannot be stored, the optimizer of an FSDP version 1
    model, and errors of a model's own hooks on any rank.

    Example::

        save(sharded_state_dict(model, optimizer), "checkpoints", step=200)
    """
    # The body may raise on some ranks only, for example in a hook of the model. `assign_replica_ids` is a collective
    # and must be reached in any case.
    state_dict: ShardedStateDict = {}
    copies: list[ReplicatedEntry] = []
    error = None
    try:
        state_dict["model"] = model_map(model, prefix, copies)
        if optimizer is not None:
            _refuse_flat_shards([model])
            state_dict["optimizer"] = optimizer_map(
                optimizer, _names(model), f"{prefix}optimizer.state.", copies, path="optimizer.state."
            )
    except Exception as raised:  # noqa: BLE001 - raised on all ranks in assign_replica_ids, so that none waits
        error = raised
    assign_replica_ids(copies, gather, error=error)
    return state_dict


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of the parameters by their identities; the first name of a shared parameter."""
    return {id(parameter): clean_name(model, raw) for raw, parameter in model.named_parameters()}


def model_map(
    model: nn.Module,
    prefix: str,
    copies: list[ReplicatedEntry],
    *,
    state: Mapping[str, Any] | None = None,
    storage_group: str = "",
) -> dict[str, Any]:
    """Return the sharded entries of a model, or of its `state` dict as modified by the caller.

    Appends the replicated entries to `copies`. A parameter and its optimizer state form a group that one rank stores;
    `storage_group` is the prefix of the parameter name in the name of the group.
    """
    # Tied parameters have several names, and each entry of the state dict is stored under its own.
    parameters = {clean_name(model, raw) for raw, _ in model.named_parameters(remove_duplicate=False)}
    entries: dict[str, Any] = {}
    for raw, value in (model.state_dict() if state is None else state).items():
        name = clean_name(model, raw)
        if name in entries:
            raise CheckpointError(f"two entries of the model have the name {name!r} without the names of wrappers")
        if isinstance(value, torch.Tensor):
            copy = as_sharded(prefix + name, value, storage_group + name if name in parameters else None)
        else:  # extra state of a module (`get_extra_state`)
            copy = ReplicatedEntry(ShardedObject(prefix + name, value, (1,), (0,)), (this_rank(),))
        if copy is not None:
            copies.append(copy)
            entries[name] = copy.entry
    return entries


def clean_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer of the model without the parts that wrappers add."""
    parts, module = [], model
    # The name is followed through the modules, since only their types tell a wrapper's attribute from a user's:
    # "module._orig_mod.fc.weight" of a compiled model in DistributedDataParallel becomes "fc.weight".
    for part in name.split("."):
        # A user's model may have a submodule called `module`; it is a wrapper's only if its parent is DDP or
        # DataParallel.
        wraps = part in _INNER or (part == "module" and isinstance(module, DistributedDataParallel | DataParallel))
        if not wraps or not isinstance(getattr(module, part, None), nn.Module):
            parts.append(part)
        module = getattr(module, part, module)
    return ".".join(parts)


class OptimizerMap(Expecting):
    """Optimizer part of a map: `{"state": {parameter name: {name: shard or value}}, "param_groups": [...]}`.

    An optimizer that has not stepped has no state yet. On load, `expected` adds the stored state of its parameters:
    state with the parameter's global shape is sharded like the parameter, all other state is loaded whole on every
    rank. `updated` are the names of the parameters that this rank updates; only their state is added.

    State may consist of lists or dicts of tensors, as that of LBFGS. Their tensors are stored by themselves, as
    `<parameter name>.<state name>.<index>`. The structure is stored as `"nested": {parameter name: {state name:
    structure}}`, with the keys in place of the tensors. On load `nested` is the stored one, if it is known.

    Plain values that an optimizer keeps under a string, and not under a parameter, are in `"others"`.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        parameters: Mapping[str, torch.Tensor],
        prefix: str,
        updated: Collection[str],
        path: str,
    ) -> None:
        super().__init__(content)
        self.parameters = parameters
        self.prefix = prefix
        self.updated = updated
        self.nested: Mapping[str, Mapping[str, Any]] = {}
        # Rankbook has named tensors in lists and dicts by their path in the state dict.
        self._earlier_prefix = path

    def expected(self, stored: Stored) -> dict[str, Any]:
        """Return the map with newly allocated shards for state that is stored but not present yet.

        Options of groups that earlier versions have stored as tensors are requested as tensors. Raises
        `CheckpointError` for stored lists and dicts of tensors whose structure is neither in `nested` nor that of the
        present state.
        """
        self.use_stored_keys(stored)
        state = {name: dict(values) for name, values in self["state"].items()}
        for name in self.nested.keys() & set(self.updated):
            for state_name, structure in self.nested[name].items():
                state.setdefault(name, {})[state_name] = self._nested_shards(name, structure, stored)
        present = {leaf.key for _, leaf in flatten(state) if isinstance(leaf, ShardedTensor)}
        for key, (shape, dtype) in stored.items():
            prefix = next((prefix for prefix in (self.prefix, self._earlier_prefix) if key.startswith(prefix)), None)
            if prefix is None or key in present:
                continue
            # Only state that the optimizer lacks is added. What it has is in the map already, with its memory.
            name, state_name = self._split_key(key.removeprefix(prefix))
            first, dot, _ = state_name.partition(".")
            if name not in self.updated or (not dot and state.get(name, {}).get(first) is not None):
                continue
            # The earlier prefix may be that of another model, and only tensors in lists and dicts were stored under it.
            if not dot and prefix != self.prefix:
                continue
            if dot:
                raise CheckpointError(
                    f"cannot load {key!r}: an optimizer that keeps lists or dicts of tensors must step before it is "
                    "loaded, until they have the stored structure"
                )
            shard = _expected_shard(key, shape, getattr(torch, dtype), self.parameters[name])
            if shard is not None:
                state.setdefault(name, {})[state_name] = shard
        return {**self, "state": state, "param_groups": self._with_stored_options(stored)}

    def _with_stored_options(self, stored: Stored) -> Any:  # noqa: ANN401 - a list of groups
        # A tensor in a group has its path in the whole state dict as its key; the user may have nested the map.
        name = self._earlier_prefix.removesuffix("state.") + "param_groups."
        tensors = {
            option: tensor
            for key, tensor in stored.items()
            for before, found, option in [key.rpartition(name)]
            if found and (not before or before.endswith("."))
        }

        def request(path: Path, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
            tensor = tensors.get(".".join(map(str, path)))
            if tensor is None or isinstance(leaf, torch.Tensor):
                return leaf
            shape, dtype = tensor
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

        return map_leaves(request, self["param_groups"])

    def use_stored_keys(self, stored: Collection[str]) -> None:
        """Rename tensors in lists and dicts to the keys under which earlier versions have stored them."""

        def rename(path: Path, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
            # A tensor that is in no list or dict has the path (parameter name, state name).
            if isinstance(leaf, ShardedTensor) and leaf.key not in stored and len(path) > 2:
                earlier = self._earlier_prefix + leaf.key.removeprefix(self.prefix)
                return replace(leaf, key=earlier) if earlier in stored else leaf
            return leaf

        self["state"] = map_leaves(rename, self["state"])

    def _nested_shards(self, name: str, structure: Any, stored: Stored) -> Any:  # noqa: ANN401 - any containers
        def shard(_: Path, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
            if not isinstance(leaf, str) or not leaf.startswith(f"{self.prefix}{name}.") or leaf not in stored:
                return leaf
            shape, dtype = stored[leaf]
            return _expected_shard(leaf, shape, getattr(torch, dtype), self.parameters[name])

        return map_leaves(shard, structure)

    def _split_key(self, rest: str) -> tuple[str, str]:
        """Split a key into parameter name and state name.

        Both may contain dots; the longest parameter name wins.
        """
        name, state_name = rest, ""
        while name:
            # Example: "fc.weight.exp_avg" with the parameter "fc.weight": the first round tries the name "fc.weight"
            # and has the state name "exp_avg".
            name, dot, last = name.rpartition(".")
            state_name = f"{last}{dot if state_name else ''}{state_name}"
            if name in self.parameters:
                return name, state_name
        return "", ""


def _expected_shard(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor
) -> ShardedTensor | None:
    copy = as_sharded(key, parameter)
    if copy is None:
        return None
    # `as_sharded` is used for its place in the global tensor; the data is the parameter's and is not read.
    assert isinstance(copy.entry, ShardedTensor) and copy.entry.data is not None
    # State of the parameter's shape belongs to its elements and has the same shards.
    if shape and shape == tuple(parameter.shape):
        return replace(
            copy.entry,
            data=torch.empty(copy.entry.local_shape, dtype=dtype, device=copy.entry.data.device),
            dtype=dtype,
        )
    # Optimizers keep scalars, such as the step count, on the CPU. Where they do not, loading moves the value.
    device = copy.entry.data.device if shape else torch.device("cpu")
    return ShardedTensor.from_rank_offsets(key, torch.empty(shape, dtype=dtype, device=device))


def _sharded_state(key: str, value: torch.Tensor, name: str, parameter: torch.Tensor) -> ReplicatedEntry | None:
    """Convert state of the parameter `name` to a shard. A plain tensor for the local part is sharded like it."""
    if isinstance(value, DTensor) or not is_cut(parameter):
        return as_sharded(key, value, name)
    # An optimizer may keep plain tensors of the local part's shape, for example `zeros_like(parameter.to_local())`.
    if value.dim() and value.shape == local_part(parameter).shape:
        copy = as_sharded(key, parameter, name)
        if copy is not None:
            assert isinstance(copy.entry, ShardedTensor)
            copy.entry = replace(copy.entry, data=value.detach(), dtype=value.dtype)
        return copy
    # A counter of steps is the same on all ranks. The scales of the blocks of a local part are not, and where they
    # belong in a global tensor is not known.
    copy = as_sharded(key, value, name)
    assert copy is not None
    copy.entry = EqualTensor(**vars(copy.entry))
    return copy


def is_cut(parameter: torch.Tensor) -> bool:
    """Return True if the parameter is sharded over several ranks."""
    # By the placements, and not by comparing the shapes: one rank may hold all rows of a small parameter, and the other
    # ranks none, and all of them must decide in the same way.
    return isinstance(parameter, DTensor) and any(
        size > 1 and not placement.is_replicate()
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[tuple[str, torch.Tensor]]]:
    """Return the parameters of every group with their names."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {position} in group {index} of the optimizer, of shape {tuple(parameter.shape)}, is "
                    "not a parameter of the model: create the optimizer from the current parameters of the model"
                )
        groups.append([(names[id(parameter)], parameter) for parameter in group["params"]])
    return groups


def _unwrap_prepared(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that `prepare` has wrapped, or the given one."""
    runtime = loaded_module("rankbook.runtime.optimizer")
    if runtime is not None and isinstance(optimizer, runtime.AcceleratedOptimizer):
        wrapped: torch.optim.Optimizer = optimizer.optimizer
        return wrapped
    return optimizer


def _refuse_flat_shards(models: Iterable[nn.Module]) -> None:
    """Raise `CheckpointError` for FSDP version 1: the optimizer's state is in flat shards that look like copies."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(module, kind) for model in models for module in model.modules()):
        raise CheckpointError(
            "the optimizer of a FullyShardedDataParallel model (FSDP version 1) has another part of its state on every "
            "rank, which cannot be told from a copy: shard the model by fully_shard, or store "
            "FullyShardedDataParallel.optim_state_dict(model, optimizer)"
        )


def has_divided_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for a ZeroRedundancyOptimizer: every rank has the state of other parameters."""
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return zero is not None and isinstance(optimizer, zero)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that this one wraps and that keep a state of their own, by their attributes."""
    return {
        attribute: inner
        for attribute, inner in vars(optimizer).items()
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
    }


def _local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that updates this rank's parameters and has their state.

    This is the optimizer itself, or the one inside of a ZeroRedundancyOptimizer. Raises `CheckpointError` for another
    optimizer that keeps its state in one that it wraps.
    """
    if has_divided_state(optimizer):
        local: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        return local
    for attribute, inner in inner_optimizers(optimizer).items():
        if inner.state:
            kind = type(optimizer).__name__
            raise CheckpointError(
                f"the optimizer in the attribute {attribute!r} of the {kind} has a state of its own, which would not "
                f"be stored: pass that optimizer, or store the state_dict() of the {kind} in a ShardedObject"
            )
    return optimizer


def optimizer_map(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str, copies: list[ReplicatedEntry], path: str
) -> OptimizerMap:
    """Return the sharded entries of an optimizer; `names` are the names of its parameters by identity.

    Appends the replicated entries to `copies`. `prefix` is the prefix of the parameter names in the keys of the state,
    and `path` that in the joined path of the state in the whole state dict. State that is a plain tensor, beside a
    parameter that is sharded, has the shape of the local part or the same values on all ranks; a save compares them.
    Raises `CheckpointError` for state that is neither here nor the same on all ranks.
    """
    optimizer = _unwrap_prepared(optimizer)
    state: dict[str, dict[str, Any]] = {}
    nested: dict[str, dict[str, Any]] = {}
    groups, local = _groups(optimizer, names), _local_optimizer(optimizer)
    # In the order of the groups, which is the same on all ranks.
    for name, parameter in (pair for group in groups for pair in group):
        for state_name, value in local.state.get(parameter, {}).items():
            key = f"{prefix}{name}.{state_name}"
            if local is not optimizer and value is not None and not isinstance(value, torch.Tensor):
                # Plain values are stored once for all ranks, by rank 0, which does not have this one.
                raise CheckpointError(
                    f"{key} is a {type(value).__name__}, on rank {this_rank()}: of a {type(optimizer).__name__} only "
                    "tensors can be stored"
                )
            tensors = {path: leaf for path, leaf in flatten(value) if isinstance(leaf, torch.Tensor)}
            keys = {path: ".".join([key, *map(str, path)]) for path in tensors}
            if tensors and not isinstance(value, torch.Tensor):
                nested.setdefault(name, {})[state_name] = _with_leaves(value, keys)
            shards = {path: _sharded_state(keys[path], leaf, name, parameter) for path, leaf in tensors.items()}
            present = [copy for copy in shards.values() if copy is not None]
            if len(present) == len(shards):
                copies += present
                entries = dict(zip(shards, (copy.entry for copy in present), strict=True))
                state.setdefault(name, {})[state_name] = _with_leaves(value, entries)
    param_groups = [
        # torch numbers the parameters. Names stay right when the order or the number of the parameters changes.
        {
            **{option: map_leaves(_as_number, value) for option, value in group.items() if option != "params"},
            "params": [name for name, _ in members],
        }
        for group, members in zip(optimizer.param_groups, groups, strict=True)
    ]
    states: Mapping[Any, Any] = local.state
    others = {key: value for key, value in states.items() if not isinstance(key, torch.Tensor)}
    for other, value in others.items():
        has_tensors = any(isinstance(leaf, torch.Tensor) for _, leaf in flatten(value))
        # torch's `load_state_dict` of a ZeroRedundancyOptimizer takes the state of parameters only.
        if local is not optimizer or not isinstance(other, str) or has_tensors:
            advice = "" if local is not optimizer else ": only plain values under a string can be stored there"
            raise CheckpointError(
                f"the {type(optimizer).__name__} has state under the key {other!r}, which is no parameter{advice}"
            )
    parameters = dict(pair for group in groups for pair in group)
    updated = {names[id(parameter)] for group in local.param_groups for parameter in group["params"]}
    content = {"state": state, "param_groups": param_groups, **({"nested": nested} if nested else {})}
    content |= {"others": others} if others else {}
    return OptimizerMap(content, parameters, prefix, updated, path)


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:  # noqa: ANN401 - any value
    """Return True for a plain tensor with one element, such as a learning rate for a captured graph."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and value.numel() == 1 and not value.is_meta


def _as_number(_: Path, option: Any) -> Any:  # noqa: ANN401 - any option
    """Return the number in an option of a group, which another optimizer may have as a number or as a tensor.

    A schedule that computes with NumPy makes its numbers, whose types would have to be allowed at the load.
    """
    return option.item() if _is_scalar(option) or isinstance(option, np.generic) else option


def _like_present(option: Any, present: Any) -> Any:  # noqa: ANN401 - any option
    """Return a stored option of a group with numbers and tensors in the places where the present option has them."""
    leaves = dict(flatten(present))

    def convert(path: Path, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        like = leaves.get(path)
        if _is_scalar(like) and (_is_scalar(leaf) or isinstance(leaf, int | float)):
            number = _as_number(path, leaf)
            return torch.full_like(like, number, dtype=torch.result_type(like, number))
        return _as_number(path, leaf) if isinstance(like, int | float) else leaf

    return map_leaves(convert, option)


def _with_leaves(value: Any, leaves: Mapping[Path, Any]) -> Any:  # noqa: ANN401 - a leaf or containers
    """Return `value` with other leaves at the paths in `leaves`."""
    return map_leaves(leaves.get, value)


def load_sharded_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None, loaded: StateDict) -> None:
    """Load a restored `sharded_state_dict` into the model and the optimizer.

    `loaded` has local parts or DTensors in place of the shards. Values that were loaded into the model's own memory are
    in place already; the rest is copied. Missing optimizer state is created, with the stored dtypes. The options
    `foreach`, `fused` and `capturable` of the optimizer stay as they are. Raises `CheckpointError` for a name that the
    model or the optimizer does not have, a different shape, and parameter groups with other parameters.

    Example::

        state = load(sharded_state_dict(model, optimizer), "checkpoints", step=100)
        load_sharded_state_dict(model, optimizer, state)
    """
    load_model(model, loaded.get("model", {}))
    if optimizer is not None and "optimizer" in loaded:
        load_optimizer(optimizer, _names(model), loaded["optimizer"])


def load_model(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Load the restored values of a `model_map` into the model."""
    # Tensors of `current` share the model's memory. A value that was loaded into this memory needs no copy.
    current = model.state_dict()
    raw_names = {clean_name(model, raw): raw for raw in current}
    if unknown := sorted(values.keys() - raw_names.keys()):
        raise CheckpointError(f"unexpected keys for the model: {unknown}")
    state = {}
    for name, value in values.items():
        target = current[raw_names[name]]
        if isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor):
            value = _convert_layout(name, value, target)  # noqa: PLW2901 - the same value in the model's layout
            if value is target or _same_memory(value, target):
                continue
        state[raw_names[name]] = value
    # By torch's method, since a module may convert values in its own hooks.
    model.load_state_dict(state, strict=False)


def _convert_layout(name: str, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    try:
        return as_dtensor(value, target)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error


def _same_memory(value: torch.Tensor, target: torch.Tensor) -> bool:
    a, b = local_part(value), local_part(target)
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def check_groups(groups: Sequence[Sequence[str]], stored: Sequence[Mapping[str, Any]], *, strict: bool) -> None:
    """Raise `CheckpointError` if stored parameter groups do not fit those of an optimizer.

    `groups` are the names of the parameters of every group. Their number must be the stored one. Without `strict` the
    names may differ.
    """
    if len(stored) != len(groups):
        raise CheckpointError(
            f"{len(stored)} parameter groups are stored, but the optimizer has {len(groups)}: create it with the "
            "stored groups, load it, and add further groups by add_param_group"
        )
    for index, (names, group) in enumerate(zip(groups, stored, strict=True)):
        if strict and (differing := sorted({*group.get("params", names)} ^ {*names})):
            raise CheckpointError(
                f"group {index} of the optimizer and the stored group differ in parameters: {differing}"
            )


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], loaded: StateDict, *, strict: bool = True
) -> None:
    """Load the restored values of an `optimizer_map` into the optimizer.

    Without `strict`, parameters that are not in the stored groups keep their state, and stored state of other
    parameters is left out.
    """
    inner = _unwrap_prepared(optimizer)
    groups, local = _groups(inner, names), _local_optimizer(inner)
    stored = loaded.get("param_groups", [{} for _ in groups])
    check_groups([[name for name, _ in members] for members in groups], stored, strict=strict)
    # torch's `load_state_dict` expects numbers again, counted through all groups in order.
    numbers: dict[str, int] = {}
    param_groups = []
    for group, stored_group, members in zip(optimizer.param_groups, stored, groups, strict=True):
        own_names = [name for name, _ in members]
        numbers |= {name: len(numbers) + position for position, name in enumerate(own_names)}
        # The stored settings, such as the learning rate, replace the current ones, except those that select torch's
        # kernels: which of them work depends on the devices and the sharding now. Parameters are numbered as in torch's
        # own format.
        kept = {option: group[option] for option in ("foreach", "fused", "capturable") if option in group}
        options = {option: _like_present(value, group.get(option)) for option, value in stored_group.items()}
        param_groups.append({**group, **options, **kept, "params": [numbers[name] for name in own_names]})
        if "param_names" in group:
            param_groups[-1]["param_names"] = group["param_names"]
    parameters = dict(pair for members in groups for pair in members)
    loaded_state = loaded.get("state", {})
    if unknown := sorted(loaded_state.keys() - parameters.keys()):
        if strict:
            raise CheckpointError(f"unexpected parameters for the optimizer: {unknown}")
        loaded_state = {name: values for name, values in loaded_state.items() if name in parameters}
    state = {
        name: {
            state_name: _convert_state(
                f"{name}.{state_name}",
                value,
                parameters[name],
                local.state.get(parameters[name], {}).get(state_name),
            )
            for state_name, value in values.items()
        }
        for name, values in loaded_state.items()
    }
    known = {name for group in stored for name in group.get("params", parameters)}
    state |= {
        name: dict(local.state[parameter])
        for name, parameter in parameters.items()
        if name not in known and parameter in local.state
    }
    by_number = {numbers[name]: values for name, values in state.items()}
    # By torch's method, which creates the state, moves it to the parameters' devices and calls the optimizer's hooks.
    optimizer.load_state_dict({"state": by_number | loaded.get("others", {}), "param_groups": param_groups})
    if local is not inner:
        inner.state.clear()  # torch has put the state into both
    for name, values in state.items():  # load_state_dict casts state to the parameter's dtype: undo it
        own_state = local.state.get(parameters[name])
        if own_state is None:  # a parameter that another rank updates
            continue
        for state_name, value in values.items():
            cast = {path: leaf for path, leaf in flatten(own_state[state_name]) if isinstance(leaf, torch.Tensor)}
            uncast = {
                path: leaf.to(cast[path].device)
                for path, leaf in flatten(value)
                if path in cast and isinstance(leaf, torch.Tensor) and cast[path].dtype != leaf.dtype
            }
            if uncast:
                own_state[state_name] = _with_leaves(own_state[state_name], uncast)


def _convert_state(name: str, value: Any, parameter: torch.Tensor, current: Any) -> Any:  # noqa: ANN401 - any value
    """Convert the tensors of a state that are sharded like the parameter to DTensors, except where `current` is plain.

    Returns other values unchanged.
    """
    present = dict(flatten(current))
    return map_leaves(lambda path, leaf: _convert_leaf(name, leaf, parameter, present.get(path)), value)


def _convert_leaf(name: str, value: Any, parameter: torch.Tensor, current: Any) -> Any:  # noqa: ANN401 - any value
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if isinstance(current, torch.Tensor) and not isinstance(current, DTensor):
        return value
    # State may be a DTensor of another shape than the parameter's, such as one value per row.
    like = parameter.detach() if current is None else current
    sharded = (value.dim() or like is current) and value.shape == local_part(like).shape
    return _convert_layout(name, value, like) if sharded else value


def sharded_state_dicts(
    models: Models,
    optimizers: Optimizers,
    *,
    states: Mapping[str, Mapping[str, Any]] | None = None,
    gather: Gather = gather_objects,
) -> ShardedStateDict:
    """Map several models and optimizers: `{"models": {name: ...}, "optimizers": {name: ...}}`. Collective.

    A tensor of a model is stored as `<model name>.<name>`, optimizer state as `<optimizer name>.state.<model
    name>.<parameter name>.<state name>`. A parameter outside of all models is named `<optimizer
    name>.<group>.<position>`; its values are not stored. `states` are state dicts by model name, used in place of the
    models' current ones; a model without one is left out.

    Raises as `sharded_state_dict` does.
    """
    state_dict: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}}
    copies: list[ReplicatedEntry] = []
    error = None
    try:
        for name, model in models.items():
            state = model.state_dict() if states is None else states.get(name)
            if state is not None:
                state_dict["models"][name] = model_map(model, f"{name}.", copies, state=state, storage_group=f"{name}.")
        if optimizers:
            _refuse_flat_shards(models.values())
        names = _names_of_all(models, optimizers)
        for name, optimizer in optimizers.items():
            state_dict["optimizers"][name] = optimizer_map(
                optimizer, names, f"{name}.state.", copies, path=f"optimizers.{name}.state."
            )
    except Exception as raised:  # noqa: BLE001 - raised on all ranks in assign_replica_ids, so that none waits
        error = raised
    assign_replica_ids(copies, gather, error=error)
    return state_dict


def load_sharded_state_dicts(models: Models, optimizers: Optimizers, loaded: StateDict, *, strict: bool = True) -> None:
    """Load a restored `sharded_state_dicts` into the models and optimizers; for `strict` see `load_optimizer`.

    Raises as `load_sharded_state_dict` does.
    """
    for name, model in models.items():
        if name in loaded.get("models", {}):
            load_model(model, loaded["models"][name])
    names = _names_of_all(models, optimizers)
    for name, optimizer in optimizers.items():
        if name in loaded.get("optimizers", {}):
            load_optimizer(optimizer, names, loaded["optimizers"][name], strict=strict)


def _names_of_all(models: Models, optimizers: Optimizers) -> dict[int, str]:
    """Return the names of all parameters by their identities; the first name of a shared parameter."""
    names: dict[int, str] = {}
    for name, model in models.items():
        for raw, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{name}.{clean_name(model, raw)}")
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"{name}.{index}.{position}")
    return names
