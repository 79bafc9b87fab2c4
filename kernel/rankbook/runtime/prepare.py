"""Prepare models, optimizers, loaders and schedulers for distributed training.

- Models are moved to the device, wrapped for DDP or sharded, set to mixed precision, and compiled.
- Optimizers are wrapped, and follow parameters that were replaced.
- Loaders are replaced by ones that read this rank's share of the data.
- Schedulers are wrapped to step with their optimizers.

`KINDS` maps types to these functions; other objects are returned unchanged.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rankbook.errors import InvalidArgument
from rankbook.runtime import prepared as registry
from rankbook.runtime.data.loaders import prepare_data_loader
from rankbook.runtime.gradient_state import remove_settling
from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from rankbook.runtime.prepared import PrepareContext, PreparedModel, report_loader, report_model, report_optimizer
from rankbook.runtime.settings import MixedForward, install_forward, remove_forward
from rankbook.runtime.strategies.base import full_tensor, mesh_for, restored_on_error, update_one_by_one_where_mixed
from rankbook.runtime.strategies.fsdp2 import moved_in_parts

KINDS: list[tuple[str, tuple[type, ...]]] = [
    # in the order of preparation: later kinds depend on earlier ones
    ("prepare_model", (nn.Module,)),
    ("prepare_optimizer", (torch.optim.Optimizer,)),
    ("prepare_data_loader", (DataLoader,)),
    ("prepare_scheduler", (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)),
]


def kind_of(item: object) -> str | None:
    """Return the name of the method that prepares `item`, None if it is returned unchanged."""
    for method, types in KINDS:
        if isinstance(item, types):
            return method
    return None


def prepare_all(
    accelerator: Any,  # noqa: ANN401 - an Accelerator, whose module imports this one
    items: Sequence[Any],
    placement: Sequence[bool] | None,
) -> Any:  # noqa: ANN401 - types of the arguments
    """Prepare `items` and return them in the given order.

    A single thing is returned without a tuple, None for no things.
    """
    kinds = [kind_of(argument) for argument in items]
    prepared = list(items)
    # By kind, not in the order of the arguments: sharding replaces parameters, which an optimizer in the same call has
    # to follow, and a scheduler follows the prepared optimizer. Results keep the positions of the arguments.
    for method, _ in KINDS:
        for index, kind in enumerate(kinds):
            if kind == method:
                options = (
                    {} if placement is None or kind == "prepare_scheduler" else {"device_placement": placement[index]}
                )
                # By the public method, so that a subclass of Accelerator can override it.
                prepared[index] = getattr(accelerator, method)(items[index], **options)
    if len(prepared) == 1:
        return prepared[0]
    return tuple(prepared) if prepared else None


def placement_length_error(placements: int, items: int) -> InvalidArgument:
    """Return the error for a `device_placement` whose length is not the number of arguments."""
    return InvalidArgument(f"device_placement must have one entry per argument ({items}), got {placements} entries")


# Names for telemetry. All ranks prepare the same objects in the same order and so count alike.
_loader_numbers = itertools.count()


def prepare_loader(
    loader: Any,  # noqa: ANN401 - a DataLoader
    context: PrepareContext,
    *,
    device_placement: bool | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> Any:  # noqa: ANN401 - a loader
    """Return a loader of this rank's share of the data.

    Ranks of one tensor-parallel group read the same batches.
    """
    options, setup = context.loader_options, context.setup
    mesh = None
    # The mesh is needed only if several ranks read the same batches.
    if setup.parallelism is not None and setup.data_parallel_size < setup.num_processes:
        mesh = mesh_for(setup.device.type, setup.parallelism.sizes)
    prepared = prepare_data_loader(
        loader,
        setup.device,
        split_batches=options.split_batches,
        put_on_device=context.move_batches if device_placement is None else device_placement,
        rng_types=list(context.rng_types) if context.rng_types is not None else None,
        dispatch_batches=options.dispatch_batches,
        even_batches=options.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=options.use_seedable_sampler,
        data_seed=options.data_seed,
        non_blocking=options.non_blocking,
        use_stateful_dataloader=options.use_stateful_dataloader,
        torch_device_mesh=mesh,
    )
    if prepared is not loader:
        name = f"loader {next(_loader_numbers)}"
        prepared.tell(name)
        report_loader(name, prepared)
    return prepared


_log = logging.getLogger(__name__)
_model_numbers = itertools.count()
_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that `prepare` has compiled in place."""


def prepare_model(
    model: nn.Module, context: PrepareContext, *, device_placement: bool | None = None, evaluation: bool = False
) -> nn.Module:
    """Return the model to train with. A collective if there is more than one rank.

    With `evaluation`, the model is only moved to the device and set to mixed precision. A model that was prepared
    before is prepared again with the current settings. If the settings are unchanged and `model` is what `prepare`
    returned, it is returned as it is. If it fails, the original model can be prepared again.
    """
    raw = registry.unwrap_registered(model)
    # Running the same cell again must not wrap a wrapper, and must not shard a model that is already as requested.
    earlier = registry.prepared_model_of(raw)
    # The signature has the identity of the parameters.
    if earlier is not None:
        earlier.strategy.restore_parameters(raw)
    if earlier is not None and earlier.wrapped() is model and earlier.signature == _signature(raw, context, evaluation):
        _restore_unwrapped(model, raw, context)
        return model
    name = earlier.name if earlier is not None else f"model {next(_model_numbers)}"
    release_model(raw)
    mapped = any(len(getattr(module, "hf_device_map", ())) > 1 for module in raw.modules())
    if mapped and context.setup.num_processes > 1:
        raise InvalidArgument(
            f"{type(raw).__name__} was loaded with a device_map over several devices, which belong to other ranks; "
            "load it without device_map, or use one rank"
        )
    # The user's own DDP wrapper is kept and not wrapped a second time.
    spread = not evaluation and not isinstance(raw, DistributedDataParallel)
    # The parts of a model with a device map stay where Accelerate has put them.
    moves = not mapped and (context.move_models if device_placement is None else device_placement)
    in_parts = moves and spread and context.strategy.shards
    if moves and not in_parts:
        raw.to(context.setup.device)
    # Installed on the user's own model, so that it also holds for a caller that uses the inner module directly.
    install_forward(raw, context.precision, context.setup.device, context.setup.handlers.autocast)
    wrapped = raw
    try:
        if spread:
            moving = moved_in_parts(raw, context.setup.device) if in_parts else nullcontext()
            restoring = restored_on_error(raw) if context.strategy.shards else nullcontext()
            with restoring, registry.track_replaced_parameters(raw), moving:
                wrapped = context.strategy.wrap(raw)
    # Without this, a failed `prepare` would leave a model that silently runs under autocast.
    except BaseException:
        remove_forward(raw)
        raise
    # Compile last, so that the compiled call includes the wrapper.
    if context.dynamo.active:
        _compile(wrapped, context)
    registry.register_model(
        raw,
        PreparedModel(weakref.ref(wrapped), context.strategy, _signature(raw, context, evaluation), name),
    )
    report_model(name, raw, context, wrapper=context.strategy.wrapper if spread else "")
    return wrapped


def register_received_model(wrapped: nn.Module, context: PrepareContext) -> None:
    """Register a prepared model that arrived from another process, on a rank that replaces a lost one."""
    raw = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    if registry.prepared_model_of(raw) is None:
        if context.dynamo.active:  # compiled code does not travel
            _compile(wrapped, context)
        name, signature = f"model {next(_model_numbers)}", _signature(raw, context, evaluation=False)
        registry.register_model(raw, PreparedModel(weakref.ref(wrapped), context.strategy, signature, name))


def _restore_unwrapped(model: nn.Module, raw: nn.Module, context: PrepareContext) -> None:
    """Install again what `unwrap` has removed from a prepared model."""
    if not isinstance(raw.__dict__.get("forward"), MixedForward):
        install_forward(raw, context.precision, context.setup.device, context.setup.handlers.autocast)
    if context.dynamo.active and not any(module in _compiled for module in model.modules()):
        _compile(model, context)


def release_model(model: nn.Module) -> nn.Module:
    """Undo `prepare_model` and return the original model. A collective if the model is sharded."""
    raw = registry.unwrap_registered(model)
    preparation = registry.prepared_model_of(raw)
    if preparation is None:
        remove_forward(raw)
        return raw
    wrapped = preparation.wrapped()
    # Before the parameters are listed: those of the optimizer are the ones to be replaced.
    preparation.strategy.restore_parameters(raw)
    # Releasing replaces the shards by full parameters, and a prepared optimizer has to follow these, too.
    with registry.track_replaced_parameters(raw):
        preparation.strategy.release(raw, wrapped)
    remove_forward(raw)
    for module in (raw, wrapped):
        if module is not None:
            remove_settling(module)
    # The compiled code refers to the shards or buckets of the old preparation.
    _undo_compile(raw if wrapped is None else wrapped)
    registry.unregister_model(raw)
    return raw


def _signature(raw: nn.Module, context: PrepareContext, evaluation: bool) -> tuple[Any, ...]:
    """Return everything that the preparation depends on: the settings, and the identity of the parameters.

    A model must be prepared again if and only if its signature has changed.
    """
    return (
        context.strategy.signature,
        context.precision,
        repr(context.setup.handlers.autocast),
        repr(context.dynamo),
        evaluation,
        # DDP's reducer and FSDP's groups are made for the parameters that exist and are trainable at the time of
        # wrapping. Freezing a layer, or replacing a head, requires new ones.
        tuple((id(parameter), parameter.requires_grad) for parameter in raw.parameters()),
    )


def _compile(model: nn.Module, context: PrepareContext) -> None:
    """Compile `model` in place, which keeps the names of its modules and of its state dict."""
    options = context.dynamo.compile_kwargs()
    # The blocks of a transformer have the same code, so that torch compiles it once and reuses it for all blocks.
    block_lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    blocks = [block for blocks in block_lists for block in blocks]
    for module in blocks if context.dynamo.use_regional_compilation and blocks else (model,):
        module.compile(**options)
        _compiled.add(module)


def _undo_compile(model: nn.Module) -> None:
    """Undo what `_compile` has done. What the user has compiled stays so."""
    for module in model.modules():
        if module in _compiled:
            _compiled.discard(module)
            module._compiled_call_impl = None  # set by `nn.Module.compile`


def unwrap(model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
    """Return the original model, which stays prepared.

    With `keep_fp32_wrapper=False` its mixed-precision forward is removed, with `keep_torch_compile=False` its
    compilation, until it is prepared again. `torch.compile` of a model that is wrapped already has compiled the
    wrapper, and goes with it.
    """
    inner: nn.Module = model
    compiled: nn.Module | None = None
    # `torch.compile(model)` of the user returns this class; `_compile` above uses `nn.Module.compile`, which does not.
    optimized = torch._dynamo.eval_frame.OptimizedModule
    while isinstance(inner, (optimized, DistributedDataParallel, nn.DataParallel)):
        if isinstance(inner, optimized):
            compiled, inner = inner, inner._orig_mod
        else:
            compiled, inner = None, inner.module
    if not keep_fp32_wrapper:
        remove_forward(inner)
    if keep_torch_compile:
        return inner if compiled is None else compiled  # a module may have a length of 0
    _undo_compile(inner)
    inner._compiled_call_impl = None
    return inner


# An optimizer that is prepared again gets the same wrapper, with its step count, while that is referenced.
_wrappers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[AcceleratedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, context: PrepareContext, *, device_placement: bool | None = None
) -> AcceleratedOptimizer:
    """Wrap `optimizer` with the current settings; an optimizer has one wrapper.

    A collective if the layout of its parameters has changed.
    """
    raw = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    wrapper = wrapper_of(optimizer)
    # Always, not only for sharding: the model may have been prepared in another cell, or released.
    replace_parameters(raw)
    if wrapper is None:
        wrapper = AcceleratedOptimizer(raw)
    _wrappers[raw] = weakref.ref(wrapper)
    # Settings are replaced on every call: an Accelerator of another precision may prepare the same optimizer.
    wrapper.scaler = context.scaler
    wrapper.device_placement = context.move_models if device_placement is None else device_placement
    wrapper.before_step = context.before_step
    if wrapper.device_placement:
        _move_state(raw)
    report_optimizer(raw)
    return wrapper


def wrapper_of(optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer | None:
    """Return the wrapper of a prepared optimizer, otherwise None."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer
    reference = _wrappers.get(optimizer)
    return reference() if reference is not None else None


def prepared_optimizers() -> list[AcceleratedOptimizer]:
    """Return the wrappers that are still referenced."""
    # A copy of the values, because telemetry asks on another thread while a cell may prepare more.
    return [wrapper for reference in tuple(_wrappers.values()) if (wrapper := reference()) is not None]


def replace_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters of `optimizer` by those that now take their place in the model.

    `fully_shard` and tensor parallelism replace a model's parameters by DTensors; releasing the model reverts that.
    State tensors are converted to the layout of the new parameter, which is a collective.
    """
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = registry.replacement_of(old)
            if new is not old:
                # The state of a parameter is a dict such as {"step", "exp_avg", "exp_avg_sq"}. All ranks have the same
                # names in the same order, so the collectives match.
                state = {name: _convert_layout(value, old, new) for name, value in optimizer.state.get(old, {}).items()}
                group["params"][index] = new
                optimizer.state.pop(old, None)
                if state:
                    optimizer.state[new] = state
    update_one_by_one_where_mixed(optimizer)


def _convert_layout(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:  # noqa: ANN401 - any state of an optimizer
    """Return `value` in the layout of `new`, if it is a tensor of the old parameter's shape. A collective.

    Other values are returned unchanged.
    """
    # A tensor of the parameter's shape is assumed to belong to its elements, as moments do. Counters have no
    # dimensions.
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    # Via the full tensor: simple, and one tensor at a time is in memory.
    full = full_tensor(value)
    if isinstance(new, DTensor):
        return distribute_tensor(full.to(new.device), new.device_mesh, new.placements)
    return full.to(new.device)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state tensors to the devices of their parameters.

    Needed for an optimizer that has stepped before its model was moved.
    """
    states: dict[Any, Any] = optimizer.state  # some optimizers keep other entries than those of parameters
    for parameter, state in states.items():
        for name, value in state.items() if isinstance(parameter, torch.Tensor) else ():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)


def prepare_scheduler(
    scheduler: Any,  # noqa: ANN401 - anything with `step`
    context: PrepareContext,
    optimizers: Sequence[AcceleratedOptimizer],
) -> AcceleratedScheduler:
    """Wrap `scheduler` to follow its own optimizer, if that is prepared, otherwise all `optimizers`."""
    raw = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    # torch's schedulers know their optimizer. Any other object with a `step` follows all optimizers.
    optimizer = getattr(raw, "optimizer", None)
    wrapper = wrapper_of(optimizer) if optimizer is not None else None
    followed = [wrapper] if wrapper is not None else list(optimizers)
    options = context.loader_options
    split = bool(getattr(options, "split_batches", False))
    wrapped = AcceleratedScheduler(
        raw,
        followed,
        step_with_optimizer=context.step_with_optimizer,
        split_batches=split,
        steps_times_num_processes=context.steps_times_num_processes,
        num_processes=context.setup.data_parallel_size,
    )
    # The user's variable already holds this wrapper. It is updated in place, so that the old name has the new settings.
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler.__dict__.update(wrapped.__dict__)
        return scheduler
    return wrapped
