"""Which module of `prepare` an object belongs to, and in what order.

Owns: the table of kinds. Refuses: what stands in no row; it passes through.

Loaders: each rank gets its share.

Models: placed, spread over the ranks, run in mixed precision, compiled.

Optimizers: they follow their parameters, and act when gradients sync.

Schedulers: they step with their optimizers.
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
    # in the order in which they are prepared: each one looks at those before it
    ("prepare_model", (nn.Module,)),
    ("prepare_optimizer", (torch.optim.Optimizer,)),
    ("prepare_data_loader", (DataLoader,)),
    ("prepare_scheduler", (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)),
]


def kind_of(thing: object) -> str | None:
    """The method that prepares `thing`; None for what passes through."""
    for method, types in KINDS:
        if isinstance(thing, types):
            return method
    return None


def prepare_all(
    accelerator: Any,  # noqa: ANN401 - an Accelerator, which imports this
    context: PrepareContext,
    things: Sequence[Any],
    placement: Sequence[bool] | None,
) -> Any:  # noqa: ANN401 - what was given
    """Each thing prepared, in the order in which they came; one alone bare, none for none."""
    kinds = [kind_of(each) for each in things]
    if context.strategy.shards:
        of = {name: [t for t, kind in zip(things, kinds, strict=True) if kind == name] for name, _ in KINDS}
        check_sharded(of["prepare_model"], of["prepare_optimizer"])
    prepared = list(things)
    for method, _ in KINDS:
        for place, kind in enumerate(kinds):
            if kind == method:
                options = (
                    {} if placement is None or kind == "prepare_scheduler" else {"device_placement": placement[place]}
                )
                prepared[place] = getattr(accelerator, method)(things[place], **options)
    if len(prepared) == 1:
        return prepared[0]
    return tuple(prepared) if prepared else None


def misplaced(given: int, things: int) -> BadRequest:
    """The error for a list of placements that is not as long as what is to be placed."""
    return BadRequest(f"device_placement has {given} entries for {things} arguments: give one for each")


_loader_numbers = itertools.count()


def prepare_loader(
    loader: Any,  # noqa: ANN401 - a DataLoader
    context: PrepareContext,
    *,
    place: bool | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> Any:  # noqa: ANN401 - a loader
    """The loader that gives this rank its share. Ranks of one tensor-parallel group get the same."""
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
    """The model to train with. A collective where there is more than one rank.

    `evaluation`: it is placed and run in mixed precision, and not spread. A model that was prepared before is prepared
    anew with the settings of now; given back as it was returned, and with the same settings, it is returned as it is.
    """
    raw = registry.unwrap_registered(model)
    earlier = registry.generation_of(raw)
    if earlier is not None and earlier.wrapped() is model and earlier.signature == _signature(raw, context, evaluation):
        return model
    name = earlier.name if earlier is not None else f"model {next(_model_numbers)}"
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
    """Know a prepared model that has arrived from another process, on a rank that replaces a lost one."""
    raw = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    if registry.generation_of(raw) is None:
        name, signature = f"model {next(_model_numbers)}", _signature(raw, context, evaluation=False)
        registry.register_model(raw, PreparedModel(weakref.ref(wrapped), context.strategy, signature, name))


def release_model(model: nn.Module) -> nn.Module:
    """The person's own model, as it was before `prepare`. A collective where it is sharded."""
    raw = registry.unwrap_registered(model)
    generation = registry.generation_of(raw)
    if generation is None:
        remove_forward(raw)
        return raw
    wrapped = generation.wrapped()
    with registry.track_replaced_parameters(raw):
        generation.strategy.release(raw, wrapped)
    remove_forward(raw)
    for each in (raw, wrapped):
        if each is not None:
            each._compiled_call_impl = None
    registry.unregister_model(raw)
    return raw


def _signature(raw: nn.Module, context: PrepareContext, evaluation: bool) -> tuple[Any, ...]:
    """What would have to be done again, were it different: the settings, and which parameters there are."""
    return (
        context.strategy.signature,
        context.precision,
        repr(context.setup.handlers.autocast),
        repr(context.dynamo),
        evaluation,
        tuple((id(each), each.requires_grad) for each in raw.parameters()),
    )


def _compile(model: nn.Module, context: PrepareContext) -> None:
    """In place, so that names and the state dict stay what they are."""
    options = context.dynamo.compile_kwargs()
    if not context.dynamo.use_regional_compilation:
        model.compile(**options)
        return
    found = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    for blocks in found:
        for block in blocks:
            block.compile(**options)
    if not found:
        model.compile(**options)


def unwrap(model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
    """The person's own model. It stays prepared; without `keep_…` it loses the forward, or the compilation, of that."""
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
    """The optimizer's one wrapper, with the settings of now. A collective where its parameters changed their layout."""
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
    """The wrapper of an optimizer that was prepared."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer
    reference = _wrappers.get(optimizer)
    return reference() if reference is not None else None


def prepared_optimizers() -> list[AcceleratedOptimizer]:
    """The wrappers that somebody still holds."""
    return [wrapper for reference in tuple(_wrappers.values()) if (wrapper := reference()) is not None]


def check_sharded(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `BadRequest` where two optimizers come for one model that is to be sharded."""
    if len(models) == 1 and len(optimizers) > 1:
        raise BadRequest(
            f"{len(optimizers)} optimizers came with one model that is sharded by fully_shard: prepare one optimizer, "
            "with a parameter group for each set of options"
        )


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer` hold what stands for its parameters in their model now, with its state in the same layout."""
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = registry.replacement_of(old)
            if new is not old:
                state = {name: _like(value, old, new) for name, value in optimizer.state.get(old, {}).items()}
                group["params"][place] = new
                optimizer.state.pop(old, None)
                if state:
                    optimizer.state[new] = state


def _like(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:  # noqa: ANN401 - what an optimizer keeps
    """A tensor of the parameter's shape in the layout of its successor; anything else as it is. A collective."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or value.dim() == 0:
        return value
    whole = full_tensor(value)
    if isinstance(new, DTensor):
        return distribute_tensor(whole.to(new.device), new.device_mesh, new.placements)
    return whole.to(new.device)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """To where the parameters are, for an optimizer that has stepped before its model was placed."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)


def prepare_scheduler(
    scheduler: Any,  # noqa: ANN401 - anything with `step`
    context: PrepareContext,
    optimizers: Sequence[AcceleratedOptimizer],
) -> AcceleratedScheduler:
    """The scheduler, following its own optimizer where that is prepared, else all `optimizers`."""
    raw = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    own = getattr(raw, "optimizer", None)
    wrapper = wrapper_of(own) if own is not None else None
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
