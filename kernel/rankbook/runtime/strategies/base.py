"""Strategy interface: how a model is wrapped for training on the ranks, and unwrapped again.

`StrategySetup` is what an `Accelerator` was asked for, and `Strategy` the base class, with defaults that do nothing.
`SingleDevice` and `DataParallel` are the strategies whose models stay whole: for one device, and replicas that average
their gradients with DistributedDataParallel in the default process group.

`mesh_for` creates and caches device meshes. `unshard_module` gathers the shards of a model again, so that it can be
prepared with another strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import contract
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from rankbook.control_collectives import all_min
from rankbook.errors import InvalidArgument
from rankbook.runtime.config import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    Handlers,
    ParallelismConfig,
)


@dataclass
class StrategySetup:
    """Settings of an `Accelerator`, as read by the strategies."""

    device: torch.device
    num_processes: int
    process_index: int
    fsdp: FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None
    handlers: Handlers = field(default_factory=Handlers)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that batches are divided among; the ranks of a tensor-parallel group share a batch."""
        return self.parallelism.data_parallel_size if self.parallelism is not None else self.num_processes

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among those of different batches; `tp` is the innermost axis of the mesh."""
        return self.process_index // (self.num_processes // self.data_parallel_size)


class Strategy(ABC):
    """Strategy for spreading a model over the ranks.

    `wrapper` names it in reports; `name` is the value of `DistributedType`.
    """

    name: ClassVar[str]
    wrapper: ClassVar[str]
    shards: ClassVar[bool] = False
    """True if parameters are replaced by shards, so that optimizers must be updated."""

    def __init__(self, setup: StrategySetup) -> None:
        self.setup = setup

    @classmethod
    @abstractmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True if `setup` asks for this strategy."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """Settings that, when changed, require a wrapped model to be wrapped again."""
        return (type(self).__name__, self.setup.device, self.setup.num_processes)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Spread `model`, and return the module that the user calls from now on.

        `model` is on this rank's device, unless the strategy shards: then sharding moves it.
        """
        return model

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:  # noqa: B027 - most have nothing to do
        """Undo `wrap`: restore `model`, and remove all references to it from `wrapped`."""

    def restore_parameters(self, model: nn.Module) -> None:  # noqa: B027
        """Put back the parameters that `wrap` has made, if a forward pass has replaced them."""

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:  # noqa: B027
        """Set whether the next backward pass reduces gradients over the ranks, or accumulates them locally."""

    def drop_gradients(self, wrapped: nn.Module) -> None:  # noqa: B027
        """Discard gradients that backward has accumulated locally and not yet stored in the parameters' `grad`."""


# Device meshes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CachedMesh:
    """A mesh of the default process group `world`. `on_all_ranks`: all ranks are known to have it in their cache."""

    world: object
    mesh: DeviceMesh
    on_all_ranks: bool


# Every `init_device_mesh` creates process groups, which is a collective and uses sockets and memory. So a mesh is
# created once per shape. The key of an entry is not enough: after a change of the number of ranks the default group is
# a new one, and the mesh's groups of the old one are dead.
#
# A rank that has replaced another one lacks the meshes that have not come with a model, and so does a rank in which the
# creation was aborted. If the others used theirs, it would wait for them in `init_device_mesh`. So the ranks agree once
# about every mesh: at its creation, and again after every time that the process groups were formed anew. All ranks mark
# their entries together, so either all of them agree in a call or none.
_meshes: dict[tuple[str, tuple[tuple[str, int], ...]], _CachedMesh] = {}


def mesh_for(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with these axes, outermost first.

    Meshes are cached. The first call is a collective, and so is the first one after the process groups were formed
    anew. A mesh of an earlier default process group, or that a rank lacks, is created again on all ranks.
    """
    if not dist.is_initialized():
        _init_single_rank_group()
    world = dist.group.WORLD
    key = (device_type, tuple(sizes.items()))
    known = _meshes.get(key)
    if known is not None and known.world is not world:
        known = None
    if known is not None and known.on_all_ranks:
        return known.mesh
    (is_everywhere,) = all_min(known is not None)
    if known is not None and is_everywhere:
        mesh = known.mesh
    else:
        # Only now: `rankbook.compare` puts a group of one rank in the place of the default group for a while.
        for stale in [mesh_key for mesh_key, entry in _meshes.items() if entry.world is not world]:
            del _meshes[stale]
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    _meshes[key] = _CachedMesh(world, mesh, on_all_ranks=True)
    return mesh


def existing_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of a model that is prepared. Not a collective: called on some ranks only."""
    entry = _meshes.get((device_type, tuple(sizes.items())))
    return entry.mesh if entry is not None and entry.world is dist.group.WORLD else mesh_for(device_type, sizes)


def remember_mesh(device_type: str, sizes: dict[str, int], mesh: DeviceMesh) -> None:
    """Make `mesh_for` return `mesh`, which other ranks have created before this process existed."""
    _meshes[device_type, tuple(sizes.items())] = _CachedMesh(dist.group.WORLD, mesh, on_all_ranks=False)


def doubt_meshes() -> None:
    """Make the ranks agree again about every cached mesh, because some ranks may lack it now."""
    for key, entry in _meshes.items():
        _meshes[key] = replace(entry, on_all_ranks=False)


def _init_single_rank_group() -> None:
    """Create a process group of this process alone: sharding needs a mesh, and a mesh a group, even for one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# Strategies without shards --------------------------------------------------------------------------------------------


class SingleDevice(Strategy):
    """Strategy for one device: the model is used as it is."""

    name = "NO"
    wrapper = ""

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True for one rank without sharding."""
        return setup.num_processes == 1 and setup.fsdp is None


_HOOKS = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook"}
_WRAPPERS = {"fp16": "fp16_compress_wrapper", "bf16": "bf16_compress_wrapper"}


class DataParallel(Strategy):
    """Strategy that wraps models in DistributedDataParallel over all ranks."""

    name = "MULTI"
    wrapper = "DistributedDataParallel"

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True for more than one rank without sharding or a tensor-parallel plan."""
        # A mesh with `dp_replicate` alone consists of whole replicas, which is what DDP provides.
        sizes = setup.parallelism.sizes if setup.parallelism is not None else {"dp_shard": 1, "tp": 1}
        return setup.num_processes > 1 and setup.fsdp is None and sizes["dp_shard"] == sizes["tp"] == 1

    @property
    def signature(self) -> tuple[Any, ...]:
        """See `Strategy`."""
        return (*super().signature, *map(repr, self.setup.handlers.ddp.to_dict().values()))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in DDP. A model without trainable parameters is returned as it is: DDP would refuse it."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        handler = self.setup.handlers.ddp
        # DDP's constructor gets only the fields that differ from our defaults; those of the hook are applied after it.
        options = {name: value for name, value in handler.to_kwargs().items() if not name.startswith("comm_")}
        device = self.setup.device
        # Checked here, before the constructor: DDP's constructor is a collective, and all ranks have devices of the
        # same type.
        if handler.comm_hook == "bf16" and device.type == "cpu":
            raise InvalidArgument(
                "comm_hook='bf16' requires a CUDA device in torch, but the device of this rank is cpu; use 'fp16'"
            )
        wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)
        _register_hook(wrapped, handler)
        return wrapped

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:  # noqa: ARG002 - as every strategy's
        """Remove the reducer's hooks from the parameters: a second reducer would reduce every gradient twice."""
        if isinstance(wrapped, DistributedDataParallel) and "reducer" in wrapped.__dict__:
            # The hooks are on the gradient accumulators of the user's parameters, so they would outlive the wrapper if
            # its reducer is kept alive by a reference of the user. The logger refers to the reducer, too.
            wrapped.reducer._remove_autograd_hooks()
            wrapped.logger = None
            del wrapped.reducer
            wrapped.forward = _released  # type: ignore[method-assign]

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """See `Strategy`."""
        if isinstance(wrapped, DistributedDataParallel):
            # The same attribute that DDP's `no_sync` sets. It has to be set before the forward pass, where DDP prepares
            # its reducer.
            wrapped.require_backward_grad_sync = sync


# torch's reducer divides the gradients into buckets in the order of the parameters, and after the first backward pass
# once more in the order in which the gradients arrive. gloo sums the elements of a bucket in an order that depends on
# their place in it. So a model that is to continue with bitwise equal results needs the buckets that it had. torch has
# no public way to read or set them. Tried with torch 2.13.
def bucket_indices(wrapped: nn.Module) -> list[list[int]] | None:
    """Return the numbers of the parameters in each bucket of the next backward pass; None for torch's first buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or "reducer" not in wrapped.__dict__:
        return None
    assert wrapped.logger is not None
    text = wrapped.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    if text:
        return [[int(number) for number in bucket.split()] for bucket in text.split(",")]
    # In the first steps they are not reported yet. They follow from the times at which the gradients have arrived.
    times = list(wrapped.reducer.get_backward_stats())
    if not any(times):
        return None
    parameters, sparse = wrapped._build_params_for_reducer()
    order = sorted(range(len(times)), key=times.__getitem__)
    first, others = wrapped.bucket_bytes_cap, wrapped.bucket_bytes_cap
    if not wrapped.static_graph or wrapped.find_unused_parameters:
        first = min(first, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(
        [parameters[index] for index in order], [first, others], [sparse[index] for index in order], order
    )
    return [list(bucket) for bucket in buckets]


def set_buckets(wrapped: nn.Module, buckets: list[list[int]] | None) -> None:
    """Make the reducer of a DDP model anew, with these buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or buckets is None:
        return
    parameters, sparse = wrapped._build_params_for_reducer()
    names = wrapped._build_debug_param_to_name_mapping(parameters)
    compute = torch.distributed._compute_bucket_assignment_by_size
    # DDP reverses what this function returns.
    chosen = (buckets[::-1], [wrapped.bucket_bytes_cap] * len(buckets))
    torch.distributed._compute_bucket_assignment_by_size = lambda *_: chosen
    try:
        wrapped._ddp_init_helper(parameters, sparse, names, wrapped.static_graph)
    finally:
        torch.distributed._compute_bucket_assignment_by_size = compute
    if wrapped.static_graph:
        wrapped.reducer._set_static_graph()


def _register_hook(wrapped: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
    name = handler.comm_hook
    if name == "no":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    low_rank = name == "power_sgd"
    # None is the default process group. The state has the errors of the compression of every parameter, so every
    # wrapper has its own.
    state = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option) if low_rank else None
    hook: Any = powerSGD_hook.powerSGD_hook if low_rank else getattr(default_hooks, _HOOKS[name])
    if handler.comm_wrapper != "no":
        hook = getattr(default_hooks, _WRAPPERS[handler.comm_wrapper])(hook)
    wrapped.register_comm_hook(state=state, hook=hook)


def _released(*_: object, **__: object) -> NoReturn:
    raise InvalidArgument(
        "this model was prepared again, or released by free_memory(), and can no longer be called: use the one that "
        "the last prepare() returned"
    )


# Unsharding -----------------------------------------------------------------------------------------------------------

# `unshard_module` uses private names of torch, which has no public way to undo `fully_shard`.
FSDP_STATE_KEYS = (contract.__globals__["STATE_KEY"], contract.__globals__["REGISTRY_KEY"])
"""Attributes of a module in which torch keeps the state of `fully_shard`."""
_CHECKPOINTED = "_rankbook_checkpointed"
"""Attribute of modules whose activations are recomputed by `checkpoint_activations`."""
FSDP_ATTRIBUTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def reshard(model: nn.Module) -> None:
    """Put the shards of `model` back that a forward pass has replaced by full parameters.

    After a forward pass without a backward pass some modules still hold full parameters, which are not those of the
    optimizer: the root, and with `reshard_after_forward=False` the units inside it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # of this unit alone


def unshard_module(model: nn.Module) -> None:
    """Replace the shards of `model` by full, plain parameters on every rank, and remove all FSDP state. A collective.

    A parameter shared by two modules stays shared. Gradients are gathered as well. All collectives come first: if one
    fails, the model is still sharded and usable. Only then hooks and states are removed and parameters replaced.
    """
    reshard(model)
    # Full parameters by their shards, for parameters that several modules share: one collective, and one result.
    full_parameters: dict[nn.Parameter, nn.Parameter] = {}
    gathered = [
        (module, name, _full_parameter(parameter, full_parameters))
        for module in model.modules()
        for name, parameter in cast("dict[str, object]", module._parameters).items()  # mypy: no Parameter is a DTensor
        if isinstance(parameter, DTensor)
    ]
    # Nothing has been changed up to here: if a collective is aborted, the model is still sharded and complete.
    remove_hooks(model)
    for module, name, parameter in gathered:
        module._parameters[name] = parameter
    remove_states(model)


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute the activations of `module` in the backward pass, unless its user has arranged that already."""
    from torch.distributed._composable import checkpoint
    from torch.distributed._composable.contract import _get_registry

    if "checkpoint" not in (_get_registry(module) or {}):
        checkpoint(module)
        module.__dict__[_CHECKPOINTED] = True


def _keep_activations(module: nn.Module) -> None:
    """Undo `checkpoint_activations`."""
    if not module.__dict__.pop(_CHECKPOINTED, False):
        return
    for tables in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        hooks = cast("dict[int, Any]", tables[0])
        for key in [key for key, hook in hooks.items() if str(hook.__module__).endswith("checkpoint_activation")]:
            for table in tables:
                table.pop(key, None)
    _forget_contract(module, "checkpoint")


def _forget_contract(module: nn.Module, function: str) -> None:
    """Remove what torch keeps of a function of `torch.distributed._composable` that was applied to `module`."""
    for attribute in FSDP_STATE_KEYS:
        # The states by function, and the registry by its name.
        entries = module.__dict__.get(attribute, {})
        for key in [key for key in entries if getattr(key, "__name__", key) == function]:
            del entries[key]
        if not entries:
            module.__dict__.pop(attribute, None)


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of `fully_shard` and of `checkpoint_activations` from all modules of `model`."""
    for module in model.modules():
        _keep_activations(module)
    # Modules that were sharded in one call share a state.
    states = {id(state): state for submodule in model.modules() if (state := _state_of(submodule)) is not None}
    for state in states.values():
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups_of(state):
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
        # This hook is registered on the module that owns the parameter.
        for shard in _parameters_of(state):
            shard._post_load_hook_handle.remove()


def remove_states(model: nn.Module) -> None:
    """Remove the states and classes of `fully_shard` from all modules of `model`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _remove_fsdp_state(module)


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Put the modules of `model` back as they were if the block, which shards it, fails in the middle. No collective.

    `fully_shard` and `parallelize_module` would otherwise refuse the modules, or leave them out, when they are called
    again. What the user has sharded before the block stays sharded.
    """
    before = [
        (
            module,
            type(module),
            dict(vars(module)),
            # Tables that torch changes in place: parameters, buffers, hooks, and the states of `fully_shard`.
            [
                (table, dict(table))
                for name, table in vars(module).items()
                if isinstance(table, dict)
                and (name in {"_parameters", "_buffers", *FSDP_STATE_KEYS} or "_hooks" in name)
            ],
            _module_state_mapping.get(module),
        )
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes, tables, state in before:
            module.__class__ = kind
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for table, entries in tables:
                parameters = table is vars(module)["_parameters"]
                # By `setattr`, because the attributes of recurrent modules keep a list of their own.
                for name, entry in entries.items() if parameters else ():
                    if table.get(name) is not entry:
                        setattr(module, name, entry)
                table.clear()
                table.update(entries)
            if state is None:
                _module_state_mapping.pop(module, None)
            else:
                _module_state_mapping[module] = state
        raise


def _full_parameter(parameter: Any, cache: dict[Any, nn.Parameter]) -> nn.Parameter:  # noqa: ANN401 - a DTensor parameter
    if parameter not in cache:
        full = nn.Parameter(full_tensor(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            full.grad = full_tensor(parameter.grad).clone()
        cache[parameter] = full
    return cache[parameter]


def is_sharded(model: nn.Module) -> bool:
    """Return True if `model` itself is under FSDP2, or has parameters that are DTensors."""
    return isinstance(model, FSDPModule) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor (a collective), or any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def without_summands(gradient: DTensor) -> DTensor:
    """Add up the summands of a gradient that sequence parallelism leaves on the ranks. A collective if it has some."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=whole)


def group_by_layout(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters that have gradients, grouped by the layout of these, in the order of the parameters.

    Gradients of one layout (mesh and placements, or plain tensors) can be treated by one call of torch's functions.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def update_one_by_one_where_mixed(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` update one parameter at a time in groups with both DTensors and plain tensors.

    Such are the parameters of a tensor-parallel model without sharding: those outside the plan stay plain. The kernels
    that update many parameters at once, torch's default on CUDA, refuse the mix.
    """
    for group in optimizer.param_groups:
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})


UnreducedGradient: TypeAlias = tuple[Any, torch.Tensor | None, torch.Tensor | None]
"""FSDP's object of a parameter, and its two gradients that are not reduced, see `unreduced_gradients`."""


def unreduced_gradients(model: nn.Module) -> list[UnreducedGradient]:
    """Return the gradients that the shards of `model` have accumulated on this rank and not reduced."""
    # FSDP keeps them in one of two places: as a sum of several passes, or in the `grad` of the full parameter.
    # Modules that were sharded in one call share a state.
    states = {id(state): state for module in model.modules() if (state := _state_of(module)) is not None}
    gradients: list[UnreducedGradient] = []
    for state in states.values():
        for parameter in _parameters_of(state):
            full = getattr(parameter, "_unsharded_param", None)
            gradients.append((parameter, parameter.unsharded_accumulated_grad, None if full is None else full.grad))
    return gradients


def hold_unreduced(model: nn.Module, shards: Collection[int]) -> list[torch.Tensor]:
    """Return tensors whose `grad` is what this rank has accumulated and not reduced, for shards with these ids."""
    holders = []
    for parameter, *gradients in unreduced_gradients(model):
        for gradient in gradients if id(parameter.sharded_param) in shards else ():
            if gradient is not None:
                holders.append(gradient.detach())
                holders[-1].grad = gradient
    return holders


def set_unreduced(gradients: Iterable[UnreducedGradient]) -> None:
    """Put back what `unreduced_gradients` has returned."""
    for parameter, accumulated, gradient in gradients:
        parameter.unsharded_accumulated_grad = accumulated
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = gradient


def drop_unreduced(model: nn.Module) -> None:
    """Discard the gradients that the shards of `model` have accumulated on this rank and not reduced."""
    set_unreduced((parameter, None, None) for parameter, *_ in unreduced_gradients(model))


def reduction_switches(model: nn.Module) -> list[tuple[Any, str, bool]]:
    """Return the switches by which DDP and FSDP2 reduce gradients: their object, their name, and their value."""
    owners: list[tuple[Any, str]] = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            # DDP sets the second one to the value of the first one in a forward pass.
            owners += [(module, "require_backward_grad_sync"), (module, "require_forward_param_sync")]
        elif isinstance(module, FSDPModule):
            groups = _groups_of(_state_of(module))
            owners += [(group, name) for group in groups for name in ("reduce_grads", "all_reduce_grads")]
    return [(owner, name, getattr(owner, name)) for owner, name in owners]


def _state_of(module: nn.Module) -> Any:  # noqa: ANN401 - torch's FSDPState
    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def _groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameters_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    return [parameter for group in _groups_of(state) for parameter in group.fsdp_params]


def _remove_fsdp_state(module: nn.Module) -> None:
    # torch finds the state of a module in this mapping and in two attributes. If one of them were left, `fully_shard`
    # would refuse the module in a later `prepare`.
    _module_state_mapping.pop(module, None)
    _forget_contract(module, "fully_shard")
    for attribute in FSDP_ATTRIBUTES:
        module.__dict__.pop(attribute, None)
    # `fully_shard` has replaced the class by a subclass of FSDPModule and the user's class. Return to the user's.
    module.__class__ = plain_class(module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module that may be sharded."""
    return next(
        base for base in type(module).__mro__ if not issubclass(base, FSDPModule) and issubclass(base, nn.Module)
    )
