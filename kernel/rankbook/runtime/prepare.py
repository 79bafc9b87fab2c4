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
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rankbook.errors import BadRequest
from rankbook.runtime import prepared as registry
from rankbook.runtime.data.loaders import prepare_data_loader
from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from rankbook.runtime.precision import install_forward, remove_forward
from rankbook.runtime.prepared import PrepareContext, PreparedModel, report_loader, report_model, report_optimizer
from rankbook.runtime.strategies.base import full_tensor, mesh_for

KINDS: list[tuple[str, tuple[type, ...]]] = [
    # in the order of preparation: later kinds depend on earlier ones
    ("prepare_model", (nn.Module,)),
    ("prepare_optimizer", (torch.optim.Optimizer,)),
    ("prepare_data_loader", (DataLoader,)),
    ("prepare_scheduler", (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)),
]


def kind_of(thing: object) -> str | None:
    """Return the name of the method that prepares `thing`, None if it is returned unchanged."""
    for method, types in KINDS:
        if isinstance(thing, types):
            return method
    return None


def prepare_all(
    accelerator: Any,  # noqa: ANN401 - an Accelerator, whose module imports this one
    context: PrepareContext,
    things: Sequence[Any],
    placement: Sequence[bool] | None,
) -> Any:  # noqa: ANN401 - types of the arguments
    """Prepare `things` and return them in the given order.

    A single thing is returned without a tuple, None for no things.
    """
    kinds = [kind_of(argument) for argument in things]
    if context.strategy.shards:
        of = {name: [t for t, kind in zip(things, kinds, strict=True) if kind == name] for name, _ in KINDS}
        check_sharded(of["prepare_model"], of["prepare_optimizer"])
    prepared = list(things)
    for method, _ in KINDS:
        for index, kind in enumerate(kinds):
            if kind == method:
                options = (
                    {} if placement is None or kind == "prepare_scheduler" else {"device_placement": placement[index]}
                )
                prepared[index] = getattr(accelerator, method)(things[index], **options)
    if len(prepared) == 1:
        return prepared[0]
    return tuple(prepared) if prepared else None


def misplaced(given: int, things: int) -> BadRequest:
    """Return the error for a `device_placement` whose length is not the number of arguments."""
    return BadRequest(f"device_placement has {given} entries for {things} arguments: give one for each")


_loader_numbers = itertools.count()


def prepare_loader(
    loader: Any,  # noqa: ANN401 - a DataLoader
    context: PrepareContext,
    *,
    place: bool | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> Any:  # noqa: ANN401 - a loader
    """Return a loader of this rank's share of the data.

    Ranks of one tensor-parallel group read the same batches.
    """
    options, setup = context.loader_options, context.setup
    mesh = None
    if setup.parallelism is not None and setup.data_parallel_size < setup.num_processes:
        mesh = mesh_for(setup.device.type, setup.parallelism.sizes)
    prepared = prepare_data_loader(
        loader,
        setup.device,
        split_batches=options.split_batches,
        put_on_device=context.place_batches if place is None else place,
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


def prepare_model(
    model: nn.Module, context: PrepareContext, *, place: bool | None = None, evaluation: bool = False
) -> nn.Module:
    """Return the model to train with. A collective if there is more than one rank.

    With `evaluation`, the model is only moved to the device and set to mixed precision. A model that was prepared
    before is prepared again with the current settings. If the settings are unchanged and `model` is what `prepare`
    returned, it is returned as it is.
    """
    raw = registry.unwrap_registered(model)
    earlier = registry.generation_of(raw)
    if earlier is not None and earlier.wrapped() is model and earlier.signature == _signature(raw, context, evaluation):
        return model
    name = earlier.name if earlier is not None else f"model {next(_model_numbers)}"
    # An earlier preparation is undone first, and the model moved before its parameters are sharded.
    release_model(raw)
    if context.place_models if place is None else place:
        raw.to(context.setup.device)
    install_forward(raw, context.precision, context.setup.device, context.setup.handlers.autocast)
    wrapped = raw
    spread = not evaluation and not isinstance(raw, DistributedDataParallel)
    try:
        if spread:
            with registry.track_replaced_parameters(raw):
                wrapped = context.strategy.wrap(raw)
    except BaseException:
        remove_forward(raw)
        raise
    if context.dynamo.active:
        _compile(wrapped, context)
    registry.register_model(
        raw,
        PreparedModel(weakref.ref(wrapped), context.strategy, _signature(raw, context, evaluation), name),
    )
    report_model(name, raw, context, wrapper=context.strategy.wrapper if spread else "")
    return wrapped


def adopt_model(wrapped: nn.Module, context: PrepareContext) -> None:
    """Register a prepared model that arrived from another process, on a rank that replaces a lost one."""
    raw = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    if registry.generation_of(raw) is None:
        name, signature = f"model {next(_model_numbers)}", _signature(raw, context, evaluation=False)
        registry.register_model(raw, PreparedModel(weakref.ref(wrapped), context.strategy, signature, name))


def release_model(model: nn.Module) -> nn.Module:
    """Undo `prepare_model` and return the original model. A collective if the model is sharded."""
    raw = registry.unwrap_registered(model)
    generation = registry.generation_of(raw)
    if generation is None:
        remove_forward(raw)
        return raw
    wrapped = generation.wrapped()
    with registry.track_replaced_parameters(raw):
        generation.strategy.release(raw, wrapped)
    remove_forward(raw)
    for module in (raw, wrapped):
        if module is not None:
            module._compiled_call_impl = None
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
        tuple((id(parameter), parameter.requires_grad) for parameter in raw.parameters()),
    )


def _compile(model: nn.Module, context: PrepareContext) -> None:
    """Compile `model` in place, which keeps the names of its modules and of its state dict."""
    options = context.dynamo.compile_kwargs()
    if not context.dynamo.use_regional_compilation:
        model.compile(**options)
        return
    block_lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    for blocks in block_lists:
        for block in blocks:
            block.compile(**options)
    if not block_lists:
        model.compile(**options)


def unwrap(model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
    """Return the original model, which stays prepared.

    With `keep_fp32_wrapper=False` its mixed-precision forward is removed, with `keep_torch_compile=False` its
    compilation.
    """
    inner = model
    if isinstance(inner, torch._dynamo.eval_frame.OptimizedModule) and not keep_torch_compile:
        inner = inner._orig_mod
    while isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
        inner = inner.module
    if not keep_fp32_wrapper:
        remove_forward(inner)
    if not keep_torch_compile:
        inner._compiled_call_impl = None
    return inner


_wrappers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[AcceleratedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, context: PrepareContext, *, place: bool | None = None
) -> AcceleratedOptimizer:
    """Wrap `optimizer` with the current settings; an optimizer has one wrapper.

    A collective if the layout of its parameters has changed.
    """
    raw = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    wrapper = wrapper_of(optimizer)
    follow_parameters(raw)
    if wrapper is None:
        wrapper = AcceleratedOptimizer(raw)
    _wrappers[raw] = weakref.ref(wrapper)
    wrapper.scaler = context.scaler
    wrapper.device_placement = context.place_models if place is None else place
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
    return [wrapper for reference in tuple(_wrappers.values()) if (wrapper := reference()) is not None]


def check_sharded(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `BadRequest` if several optimizers are prepared with one model that is to be sharded."""
    if len(models) == 1 and len(optimizers) > 1:
        raise BadRequest(
            f"{len(optimizers)} optimizers came with one model that is sharded by fully_shard: prepare one optimizer, "
            "with a parameter group for each set of options"
        )


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters of `optimizer` by those that now take their place in the model.

    `fully_shard` and tensor parallelism replace a model's parameters by DTensors; releasing the model reverts that.
    State tensors are converted to the layout of the new parameter, which is a collective.
    """
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = registry.replacement_of(old)
            if new is not old:
                state = {name: _like(value, old, new) for name, value in optimizer.state.get(old, {}).items()}
                group["params"][place] = new
                optimizer.state.pop(old, None)
                if state:
                    optimizer.state[new] = state


def _like(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:  # noqa: ANN401 - any state of an optimizer
    """Return `value` in the layout of `new`, if it is a tensor of the old parameter's shape. A collective.

    Other values are returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    whole = full_tensor(value)
    if isinstance(new, DTensor):
        return distribute_tensor(whole.to(new.device), new.device_mesh, new.placements)
    return whole.to(new.device)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state tensors to the devices of their parameters.

    Needed for an optimizer that has stepped before its model was moved.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)


def prepare_scheduler(
    scheduler: Any,  # noqa: ANN401 - anything with `step`
    context: PrepareContext,
    optimizers: Sequence[AcceleratedOptimizer],
) -> AcceleratedScheduler:
    """Wrap `scheduler` to follow its own optimizer, if that is prepared, otherwise all `optimizers`."""
    raw = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    optimizer = getattr(raw, "optimizer", None)
    wrapper = wrapper_of(optimizer) if optimizer is not None else None
    followed = [wrapper] if wrapper is not None else list(optimizers)
    options = context.loader_options
    split = bool(getattr(options, "split_batches", False))
    made = AcceleratedScheduler(
        raw,
        followed,
        step_with_optimizer=context.step_with_optimizer,
        split_batches=split,
        steps_times_num_processes=context.steps_times_num_processes,
        num_processes=context.setup.data_parallel_size,
    )
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler.__dict__.update(made.__dict__)
        return scheduler
    return made
