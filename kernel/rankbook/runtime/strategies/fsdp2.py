"""FSDP2 and tensor-parallel strategies: models whose parameters are sharded over the ranks.

`FullyShardedDataParallel` shards parameters, gradients and optimizer state with `fully_shard`. It translates the
plugin's options for `fully_shard`, and selects the submodules that are sharded as units of their own. The optimizers
are updated in `rankbook.runtime.prepare`.

`TensorParallel` splits layers over ranks by a plan, and shards them over the data-parallel ranks. The plan maps module
names to styles, given by name or as torch's `ParallelStyle`. A plan that matches no module of the model raises an
error.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import FullyShardedDataParallelPlugin
from rankbook.runtime.strategies.base import (
    Strategy,
    StrategySetup,
    checkpoint_activations,
    drop_unreduced,
    mesh_for,
    reshard,
    unshard_module,
)

_NAMED_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_UNIT_PARAMETERS = 100_000_000
"""Default number of parameters from which "size_based_wrap" makes a module a unit."""


class FullyShardedDataParallel(Strategy):
    """Strategy that shards models with `fully_shard`, over all ranks or over axes of a mesh."""

    name = "FSDP"
    wrapper = "fully_shard"
    shards = True

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True if a plugin or the mesh asks for sharding."""
        sizes = setup.parallelism.sizes if setup.parallelism is not None else {"dp_shard": 1, "tp": 1}
        return sizes["tp"] == 1 and (setup.fsdp is not None or sizes["dp_shard"] > 1)

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The plugin of the setup, or one with the defaults."""
        return self.setup.fsdp or FullyShardedDataParallelPlugin()

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes."""
        sizes = self.setup.parallelism.sizes if self.setup.parallelism is not None else {}
        # Hybrid sharding: replicas of the model, each of which is sharded over the ranks of one row of the mesh.
        if sizes.get("dp_replicate", 1) > 1:
            return {"dp_replicate": sizes["dp_replicate"], "dp_shard": sizes["dp_shard"]}
        return {"dp_shard": self.setup.num_processes}

    @property
    def signature(self) -> tuple[Any, ...]:
        """See `Strategy`."""
        return (*super().signature, *self.axes.items(), *map(repr, self.plugin.to_dict().values()))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place: its parameters become DTensors."""
        mesh = mesh_for(self.setup.device.type, self.axes)
        # The user's ranks may have initialized the model with different seeds.
        copy_from_first(model, self.setup.device)
        self.shard_layout(model, mesh)
        return model

    def shard_layout(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a model that is on the tensor-parallel axis already, if there is one. No collective."""
        shard(model, mesh, self.plugin)

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:  # noqa: ARG002 - as every strategy's
        """Gather all parameters on every rank. A collective."""
        unshard_module(model)

    def restore_parameters(self, model: nn.Module) -> None:
        """See `Strategy`."""
        reshard(model)

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """See `Strategy`."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(sync)

    def drop_gradients(self, wrapped: nn.Module) -> None:
        """See `Strategy`."""
        drop_unreduced(wrapped)


def copy_from_first(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's weights, so that the shards of all ranks belong to the same model. A collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            # A tensor on the meta device has no data yet, and a DTensor is distributed already. All ranks skip the same
            # ones, since they have the same model.
            if tensor.device.type != "meta" and not isinstance(tensor, DTensor):
                # One at a time, since the whole model may not fit on the device.
                moved = tensor.detach().to(device)
                dist.broadcast(moved, 0)
                if moved.device != tensor.device:
                    tensor.detach().copy_(moved)


@contextmanager
def moved_in_parts(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Shard `model` in the block, and then move to `device` what has not been sharded.

    `fully_shard` moves the parameters of one unit at a time, and frees all but the shard. It does so in place, so a
    variable or an optimizer that still refers to the parameters would keep all of them on the device. Therefore the
    model gets other parameters with the same data, which nothing else refers to.

    Tensors on the meta device stay there: the user calls `to_empty` afterwards.
    """
    renewed: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        # A subclass, such as a quantized parameter, has a constructor of its own.
        if type(parameter) is nn.Parameter and _is_elsewhere(parameter, device)
    ]
    for module, name, parameter in places:
        if parameter not in renewed:
            renewed[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        # Not in `_parameters`: the attributes of recurrent modules keep a list of their own.
        setattr(module, name, renewed[parameter])
    try:
        yield
    except BaseException:
        for module, name, parameter in places:
            # The optimizer follows only if the model has been sharded.
            if module._parameters.get(name) is renewed[parameter]:
                setattr(module, name, parameter)
        raise
    for module in model.modules():
        if not any(
            isinstance(tensor, DTensor) or tensor.is_meta for tensor in (*module.parameters(), *module.buffers())
        ):
            module.to(device)  # with what its class has besides parameters and buffers
            continue
        for parameter in module.parameters(recurse=False):
            if _is_elsewhere(parameter, device):
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and _is_elsewhere(buffer, device):
                module._buffers[name] = buffer.to(device)


def _is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    return not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.device != device


def shard(model: nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard `model` over `mesh`, units before the model itself."""
    ignored = _ignored_parameters(model, plugin)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": _mixed_precision_policy(plugin),
        "offload_policy": _offload_policy(plugin, mesh.device_type),
        "ignored_params": ignored or None,
    }
    units = list(_units(model, plugin))
    # Before sharding, so that the hooks of FSDP surround those of the recomputation.
    if plugin.activation_checkpointing:
        _checkpoint_activations(units)
    # Inner units first: `fully_shard` takes only the parameters below a module that no inner unit has taken. The call
    # for the model itself takes what is left.
    # A call of `fully_shard` gives a parameter that its modules share one successor. Two calls would give it two, and
    # tied weights would come apart. So they are left to an outer unit that has all of their modules.
    owners = _owners(model)  # before the first call, which replaces parameters
    for unit in [unit for unit in units if not any(_shared_outside(unit, owners))]:
        fully_shard(unit, **options)
    fully_shard(model, **options)


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Return the modules that have every parameter, by the parameter: several ones for tied weights."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def _shared_outside(part: nn.Module, owners: dict[nn.Parameter, list[nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parameters of `part`, by name, that a module outside of it has too, and that module."""
    inside = set(part.modules())
    for name, parameter in part.named_parameters():
        yield from ((name, owner) for owner in owners[parameter] if owner not in inside)


def _units(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Iterator[nn.Module]:
    """Yield the modules that are sharded and gathered as units of their own, innermost first."""
    is_unit = _unit_predicate(plugin)
    if is_unit is None:
        return
    # `modules()` yields a parent before its children. Reversed, the inner units come first.
    below = [module for module in model.modules() if module is not model and not isinstance(module, FSDPModule)]
    for module in reversed(below):
        # torch refuses to shard a container that has no forward.
        if is_unit(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield module


def _unit_predicate(plugin: FullyShardedDataParallelPlugin) -> Callable[[nn.Module], bool] | None:
    policy = plugin.auto_wrap_policy
    # Without units all parameters are gathered at once, at the beginning of the forward pass.
    if policy is None or policy == "no_wrap":
        return None
    if policy == "size_based_wrap":
        # The number includes the parameters of inner units. So an outer module that contains a unit is large enough,
        # too.
        least = plugin.min_num_params or _MIN_UNIT_PARAMETERS
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) >= least
    if policy == "transformer_based_wrap":
        names = set(plugin.transformer_cls_names_to_wrap or ())
        return lambda module: type(module).__name__ in names
    assert callable(policy)
    return policy


def _checkpoint_activations(units: list[nn.Module]) -> None:
    """Recompute the activations of `units` in the backward pass. Raises `InvalidArgument` if there are none."""
    if not units:
        raise InvalidArgument(
            "activation_checkpointing requires an auto_wrap_policy, which selects the blocks to recompute"
        )
    for unit in units:
        checkpoint_activations(unit)


def _ignored_parameters(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[nn.Parameter]:
    ignored = plugin.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        modules = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
    else:
        modules = list(ignored)
    return {parameter for module in modules for parameter in module.parameters()}


def _mixed_precision_policy(plugin: FullyShardedDataParallelPlugin) -> MixedPrecisionPolicy:
    policy = plugin.mixed_precision_policy
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, dict):
        return MixedPrecisionPolicy(**policy)
    if policy not in _NAMED_TYPES:
        raise InvalidArgument(
            f"unknown mixed_precision_policy {policy!r}; choose from bf16, fp16, or pass a MixedPrecisionPolicy"
        )
    kind = _NAMED_TYPES[policy]
    # Outputs are fp32, as with autocast, so that a loss is computed in fp32 with every strategy.
    return MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=kind, output_dtype=torch.float32)


def _offload_policy(plugin: FullyShardedDataParallelPlugin, device_type: str) -> OffloadPolicy:
    if device_type == "cpu":  # the shards are on the CPU anyway, and torch would pin memory for a missing device
        return OffloadPolicy()
    if isinstance(plugin.cpu_offload, OffloadPolicy):
        return plugin.cpu_offload
    return CPUOffloadPolicy() if plugin.cpu_offload else OffloadPolicy()


_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class TensorParallel(FullyShardedDataParallel):
    """Strategy with torch's `parallelize_module` on the mesh axis `tp`, and `fully_shard` on the data-parallel axes."""

    name = "TP"
    wrapper = "parallelize_module"

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True if the mesh has a `tp` axis of more than one rank."""
        return setup.parallelism is not None and setup.parallelism.sizes["tp"] > 1

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, all three."""
        assert self.setup.parallelism is not None
        return self.setup.parallelism.sizes

    @property
    def signature(self) -> tuple[Any, ...]:
        """See `Strategy`."""
        assert self.setup.parallelism is not None
        return (*super().signature, repr(self.setup.parallelism.tp_handler))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split and shard `model` in place.

        The hooks added to its layers are recorded, for `release` to remove them.
        """
        _check_ties(model, self._plan_for(model))  # raises before anything changes
        mesh = mesh_for(self.setup.device.type, self.axes)
        # `parallelize_module` scatters the weights of the first rank of every `tp` group, and does not touch parameters
        # outside the plan. So all ranks must have the same weights before it.
        copy_from_first(model, self.setup.device)
        self.divide_layers(model, mesh)
        # Tensor parallelism first, then sharding: `fully_shard` accepts parameters that are DTensors on the `tp` axis
        # and shards them on the other axes of the same mesh.
        self.shard_layout(model, mesh)
        return model

    def divide_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the layers of the plan over the `tp` axis. No collective for parameters that are divided already."""
        plan = self._plan_for(model)
        # `parallelize_module` adds forward hooks that redistribute inputs and outputs, and returns no handles for them.
        # They are found by comparing the hook tables before and after.
        hooks = _hooks_of(model)
        parallelize_module(model, mesh["tp"], plan)
        model.__dict__["_rankbook_tp_hooks"] = _new_hooks(model, hooks)

    def _plan_for(self, model: nn.Module) -> dict[str, ParallelStyle]:
        assert self.setup.parallelism is not None
        handler = self.setup.parallelism.tp_handler
        return read_plan(model, handler.plan if handler is not None else None)

    def shard_layout(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """See `FullyShardedDataParallel`."""
        if self.setup.data_parallel_size > 1:
            shard(model, mesh["dp_replicate", "dp_shard"], self.plugin)

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:
        """Gather all parameters on every rank, and remove the hooks. A collective."""
        super().release(model, wrapped)
        remove_layer_hooks(model)


def remove_layer_hooks(model: nn.Module) -> None:
    """Remove the hooks that `TensorParallel.divide_layers` has added."""
    for hooks, key in model.__dict__.pop("_rankbook_tp_hooks", ()):
        hooks.pop(key, None)
    for module in model.modules():
        module.__dict__.pop("_distribute_module_applied", None)  # torch divides a module once


def read_plan(model: nn.Module, plan_option: dict[str, Any] | None) -> dict[str, ParallelStyle]:
    """Return torch's style for every module of `model` in the plan.

    Raises `InvalidArgument` for missing or unknown entries.
    """
    chosen = plan_option or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if not chosen:
        raise InvalidArgument(
            f"{kind} has no tensor-parallel plan: pass ParallelismConfig(tp_handler=TorchTensorParallelConfig("
            'plan={"layer.up": "colwise", "layer.down": "rowwise"})), or set the attribute tp_plan of the model'
        )
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in chosen.items():
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            raise InvalidArgument(
                f"unknown style {style!r} for {pattern!r} in the tensor-parallel plan; choose from "
                f"{', '.join(sorted(_STYLES))}"
            )
        # `*` also matches dots, so that "layers.*.up" selects the layer of every block.
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise InvalidArgument(f"{pattern!r} in the tensor-parallel plan matches no module of {kind}")
        plan |= {name: style if isinstance(style, ParallelStyle) else _STYLES[style]() for name in matches}
    return plan


def _check_ties(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise `InvalidArgument` if a layer that is divided shares a parameter with a module outside of it.

    Only the layer would get the divided parameter. The other module, and the optimizer, would go on with two of them.
    """
    owners, names = _owners(model), {module: name for name, module in model.named_modules()}
    for layer, style in plan.items():
        if isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel):
            for parameter, other in _shared_outside(model.get_submodule(layer), owners):
                where = names[other] or type(model).__name__
                raise InvalidArgument(
                    f"{layer}.{parameter} is also a parameter of {where} (tied weights), and tensor parallelism would "
                    f"divide only one of them: leave {layer!r} out of the plan, or give it a parameter of its own"
                )


def _hooks_of(model: nn.Module) -> set[tuple[int, int]]:
    return {(id(hooks), key) for hooks in _hook_tables(model) for key in hooks}


def _new_hooks(model: nn.Module, old: set[tuple[int, int]]) -> list[tuple[dict[int, Any], int]]:
    return [(hooks, key) for hooks in _hook_tables(model) for key in hooks if (id(hooks), key) not in old]


def _hook_tables(model: nn.Module) -> list[dict[int, Any]]:
    return [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
