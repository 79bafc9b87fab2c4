"""Transfer of sharded models to the process that replaces a dead rank, and of shards between replicas.

A model that `fully_shard` or a tensor-parallel plan has sharded cannot be pickled: its parameters are this rank's, and
FSDP's states hold streams, groups and hooks. What is sent is the structure: the modules in the user's classes, buffers,
the user's hooks, and the layout of the parameters (`ParameterLayout`). The new rank makes parameters without data of
that layout, and shards the model again with its own part of the mesh, without a collective. The shards themselves come
from a snapshot, or from a replica.

Optimizers and other objects refer to parameters. Such a reference is sent as the model and the name of the parameter,
and becomes the parameter of the sharded model on the new rank. `ModelPickling` makes the reductions, of which the
pickler asks for one per object.

Hybrid sharding (HSDP) has several replicas of a model, each of which is sharded over the ranks of one row of the mesh.
If a rank dies, another row has its shards, and no snapshot is needed (`restore_from_replicas`). All ranks take over the
state of one whole row whose ranks have made the same steps (`choose_row`), so that they continue at one step: models,
optimizers, schedulers and registered objects. Random states and positions of loaders stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from rankbook.control_collectives import gather_objects
from rankbook.runtime import prepared, protection
from rankbook.runtime.gradient_state import settle_before_training
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.protection import RestoredSnapshot
from rankbook.runtime.strategies.base import (
    FSDP_ATTRIBUTES,
    Strategy,
    existing_mesh,
    is_sharded,
    mesh_for,
    plain_class,
    remember_mesh,
    remove_hooks,
    remove_states,
)
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel, TensorParallel, remove_layer_hooks

_TORCH_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable")
"""Modules whose hooks are made anew by sharding. Those of a tensor-parallel plan are sent."""
_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(eq=False)
class ParameterLayout:
    """A parameter without its data. `tp` is its layout on the tensor-parallel axis, None if it is whole there.

    One object stands for a parameter that several modules share.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    tp: Any
    made: nn.Parameter | None = field(default=None)

    def make(self, tp_mesh: DeviceMesh | None) -> nn.Parameter:
        """Return the parameter, the same one at every call. Unsharded parameters are on the meta device."""
        if self.made is None:
            data: torch.Tensor
            if self.tp is None or tp_mesh is None:
                data = torch.empty(self.shape, dtype=self.dtype, device="meta")
            else:
                data = empty_dtensor(self.shape, dtype=self.dtype, device_mesh=tp_mesh, placements=[self.tp])
            self.made = nn.Parameter(data, requires_grad=self.requires_grad)
        return self.made


@dataclass
class _Sharding:
    """Sharding of the model. `mesh` becomes the new rank's own mesh when it is unpickled."""

    strategy: type[Strategy]
    setup: Any
    mesh: DeviceMesh
    tp_hooks: list[tuple[str, str, int]]


def sharded_models() -> dict[int, tuple[FullyShardedDataParallel, nn.Module]]:
    """Return the prepared models whose parameters are shards, by serial number."""
    return {
        serial: (strategy, raw)
        for serial, (strategy, raw) in prepared.current_models().items()
        # A model that was prepared for evaluation, beside a sharded one, has the strategy but is whole.
        if isinstance(strategy, FullyShardedDataParallel) and is_sharded(raw)
    }


class ModelPickling:
    """Reductions for sharded models and their parameters. `covered` are the serial numbers of those to be restored."""

    def __init__(self, covered: Collection[int]) -> None:
        self._models: dict[int, tuple[nn.Module, _Sharding | None]] = {}
        self._parameters: dict[int, tuple[nn.Module, str]] = {}
        self._layouts: dict[int, ParameterLayout] = {}
        for serial, (strategy, raw) in sharded_models().items():
            if serial in covered:
                strategy.restore_parameters(raw)
                sharding = _sharding_of(strategy, raw)
                self._models |= {id(module): (module, None) for module in raw.modules()}
                self._models[id(raw)] = (raw, sharding)
                for name, parameter in raw.named_parameters():
                    if isinstance(parameter, DTensor):
                        self._parameters[id(parameter)] = (raw, name)
                        self._layouts[id(parameter)] = _layout_of(parameter)

    def reduce(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        """Return the reduction of a part of a sharded model, NotImplemented for any other object."""
        entry = self._models.get(id(value))
        if entry is not None and entry[0] is value:
            module, sharding = entry
            # In two steps, since modules may refer to one another in circles.
            complete: Callable[..., None] = _complete_module if sharding is None else _complete_model
            sent = (self._state_of(module), sharding)
            return _new_module, (plain_class(module),), sent, None, None, complete
        if id(value) in self._parameters:
            model, name = self._parameters[id(value)]
            return _parameter_of, (model, name)
        if isinstance(value, torch.optim.Optimizer) and not isinstance(value, AcceleratedOptimizer):
            return self._reduce_optimizer(value)
        return NotImplemented

    def _reduce_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401 - pickle's own contract
        """Leave out the state of sharded parameters, which is of this rank."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in self._parameters for parameter in parameters):
            return NotImplemented
        reduction: Any = optimizer.__reduce_ex__(2)
        make, arguments, state, *rest = reduction
        kept = {key: value for key, value in state["state"].items() if id(key) not in self._parameters}
        return make, arguments, {**state, "state": defaultdict(dict, kept)}, *rest

    def _state_of(self, module: nn.Module) -> dict[str, Any]:
        left_out = {
            *(contract.__globals__["STATE_KEY"], contract.__globals__["REGISTRY_KEY"], *FSDP_ATTRIBUTES),
            *("_rankbook_tp_hooks", "_compiled_call_impl"),
        }
        # A class may leave out what cannot be sent, such as a lock. That of a parametrized module raises an error.
        pickled: Any = None if nn.utils.parametrize.is_parametrized(module) else module.__getstate__()
        values = pickled if isinstance(pickled, dict) else vars(module)
        state = {name: value for name, value in values.items() if name not in left_out}
        if isinstance(module, nn.RNNBase):  # lists of its parameters, which its `_apply` makes anew
            state.pop("_flat_weight_refs", None)
            state["_flat_weights"] = [None] * len(module._flat_weights_names)
        state["_parameters"] = {
            name: self._layouts.get(id(parameter), parameter) for name, parameter in module._parameters.items()
        }
        for name in _HOOK_TABLES:
            if name in state:
                # A copy of the table's class, which is an OrderedDict.
                table = state[name].copy()
                for key in [key for key, hook in table.items() if _is_of_torch(hook)]:
                    del table[key]
                state[name] = table
        return state


def _sharding_of(strategy: FullyShardedDataParallel, raw: nn.Module) -> _Sharding:
    tables = {
        id(table): (path, name)
        for path, module in raw.named_modules()
        for name in _HOOK_TABLES
        if (table := vars(module).get(name)) is not None
    }
    hooks = [(*tables[id(table)], key) for table, key in vars(raw).get("_rankbook_tp_hooks", ())]
    mesh = existing_mesh(strategy.setup.device.type, strategy.axes)
    return _Sharding(type(strategy), strategy.setup, mesh, hooks)


def _layout_of(parameter: DTensor) -> ParameterLayout:
    names = parameter.device_mesh.mesh_dim_names or ()
    tp = parameter.placements[names.index("tp")] if "tp" in names else None
    return ParameterLayout(parameter.shape, parameter.dtype, parameter.requires_grad, tp)


def shard_again(model: nn.Module, strategy: FullyShardedDataParallel) -> None:
    """Shard a sharded model for the setup that `strategy` has now, in place and without its data.

    No collective, if the mesh exists. Called again after an error, it begins again.
    """
    strategy.restore_parameters(model)
    slots: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(cast("object", parameter), (DTensor, ParameterLayout))  # mypy: no Parameter is a DTensor
    ]
    layouts = {
        id(parameter): parameter if isinstance(parameter, ParameterLayout) else _layout_of(parameter)
        for _, _, parameter in slots
    }
    remove_hooks(model)
    remove_states(model)
    remove_layer_hooks(model)
    for module, name, parameter in slots:
        module._parameters[name] = layouts[id(parameter)]  # type: ignore[assignment]
    del slots, parameter  # their memory
    mesh = mesh_for(strategy.setup.device.type, strategy.axes)
    if isinstance(strategy, TensorParallel):
        _make_parameters(model, mesh["tp"])
        strategy.divide_layers(model, mesh)
    else:
        _make_parameters(model, None)
    strategy.shard_layout(model, mesh)
    _materialize(model, strategy.setup.device)


def _make_parameters(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Replace layouts by parameters without data."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, ParameterLayout):
                module._parameters[name] = parameter.make(tp_mesh)


def _is_of_torch(hook: object) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps the hooks of `load_state_dict`
    return str(getattr(function, "__module__", "")).startswith(_TORCH_HOOKS)


def _new_module(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _complete_module(module: nn.Module, sent: tuple[dict[str, Any], None]) -> None:
    module.__setstate__(sent[0])


def _complete_model(model: nn.Module, sent: tuple[dict[str, Any], _Sharding]) -> None:
    """Shard the model on this rank. All of its modules are complete."""
    state, sharding = sent
    model.__setstate__(state)
    process = PartialState()
    setup = replace(sharding.setup, device=process.device, process_index=process.process_index)
    strategy: Any = sharding.strategy(setup)
    remember_mesh(process.device.type, strategy.axes, sharding.mesh)
    tp_mesh = sharding.mesh["tp"] if isinstance(strategy, TensorParallel) else None
    _make_parameters(model, tp_mesh)
    modules = dict(model.named_modules())
    if sharding.tp_hooks:
        hooks = [(vars(modules[path])[name], key) for path, name, key in sharding.tp_hooks]
        model.__dict__["_rankbook_tp_hooks"] = hooks
    strategy.shard_layout(model, sharding.mesh)
    settle_before_training(model)
    _materialize(model, process.device)


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Replace shards on the meta device by memory, whose content comes from a snapshot or a replica."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    parameter = model.get_parameter(name)
    if isinstance(parameter, ParameterLayout):
        raise TypeError(f"{name} belongs to a model that refers to its own optimizer")
    return parameter


_AXIS = "dp_replicate"


def replicated_models(replaced: Collection[int]) -> set[int]:
    """Return the serial numbers of the sharded models of which a replica without any of the `replaced` ranks exists."""
    return {
        serial
        for serial, (strategy, _) in prepared.current_models().items()
        if any(set(row).isdisjoint(replaced) for row in rows_of(strategy))
    }


def rows_of(strategy: Strategy) -> list[list[int]]:
    """Return the ranks of every replica, each of which has all shards; nothing without replicas."""
    if not isinstance(strategy, FullyShardedDataParallel) or strategy.axes.get(_AXIS, 1) == 1:
        return []
    mesh = existing_mesh(strategy.setup.device.type, strategy.axes).mesh
    # The axis of the replicas is the outermost.
    return [row.flatten().tolist() for row in mesh]


def choose_row(rows: Sequence[Sequence[int]], steps: Mapping[int, tuple[int, ...] | None]) -> Sequence[int] | None:
    """Return the row to copy from: of those whose ranks have made the same steps, the one that has made the most.

    `steps` are those of a rank's optimizers, None for a new rank. None if there is no such row.
    """
    whole = [row for row in rows if steps[row[0]] is not None and len({steps[rank] for rank in row}) == 1]
    return max(whole, key=lambda row: steps[row[0]] or (), default=None)


def restore_from_replicas(replaced: Collection[int]) -> RestoredSnapshot:
    """Take over the state of one replica, on all ranks or on none. A collective."""
    rank = dist.get_rank()
    strategies = [strategy for strategy, _ in prepared.current_models().values() if rows_of(strategy)]
    rows = rows_of(strategies[0]) if strategies else []
    # Of all optimizers, not only the number to show: a rank may have died between the steps of two.
    steps_here = {serial: wrapper.steps for serial, wrapper in prepared.registered("optimizer").items()}
    made = protection.steps_made()
    answers = gather_objects((None if rank in replaced else steps_here, rows, made))
    known = [set(answer[0]) for answer in answers if answer[0] is not None]
    # A rank may still have an optimizer that nothing refers to.
    common = sorted(set.intersection(*known)) if known else []
    steps = {
        number: None if answer[0] is None else tuple(answer[0][serial] for serial in common)
        for number, answer in enumerate(answers)
    }
    row = choose_row(rows, steps) if all(answer[1] == rows for answer in answers) else None
    if row is None:
        return RestoredSnapshot(step=0, lost=0, refused="no replica has all shards of one step")
    # The ranks with the same shards: one of every row, at the same place.
    place = next(each.index(rank) for each in rows if rank in each)
    source = row[place]
    strategy = strategies[0]
    assert isinstance(strategy, FullyShardedDataParallel)
    mesh = existing_mesh(strategy.setup.device.type, strategy.axes)
    sent: list[Any] = [None]
    if rank == source:
        sent = [protection.pack_state()]
    dist.broadcast_object_list(sent, source, group=mesh.get_group(_AXIS))
    if rank not in row:
        protection.restore_packed(sent[0])
    else:
        protection.end_step()
    step = answers[row[0]][2]
    # One step more was begun, in which the rank has died.
    return RestoredSnapshot(step=step, lost=max(0, made - step) + 1, refused="")
