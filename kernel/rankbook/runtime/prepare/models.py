"""Models: placed, spread over the ranks, run in mixed precision, compiled.

Owns: the one way from a person's model to a prepared one, and back. Refuses: to nest: what is prepared again is
released first.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankbook.runtime.precision import install_forward, remove_forward
from rankbook.runtime.prepare import registry
from rankbook.runtime.prepare.context import Context
from rankbook.runtime.prepare.registry import Generation
from rankbook.runtime.prepare.reports import report_model

_log = logging.getLogger(__name__)
_model_numbers = itertools.count()


def prepare_model(
    model: nn.Module, context: Context, *, place: bool | None = None, evaluation: bool = False
) -> nn.Module:
    """The model to train with. A collective where there is more than one rank.

    `evaluation`: it is placed and run in mixed precision, and not spread. A model that was prepared before is prepared
    anew with the settings of now; given back as it was returned, and with the same settings, it is returned as it is.
    """
    raw = registry.raw_of(model)
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
            with registry.following(raw):
                wrapped = context.strategy.wrap(raw)
    except BaseException:
        remove_forward(raw)
        raise
    if context.dynamo.active:
        _compile(wrapped, context)
    registry.remember(
        raw,
        Generation(weakref.ref(wrapped), context.strategy, _signature(raw, context, evaluation), name),
    )
    report_model(name, raw, context, wrapper=context.strategy.wrapper if spread else "")
    return wrapped


def adopt_model(wrapped: nn.Module, context: Context) -> None:
    """Know a prepared model that has arrived from another process, on a rank that replaces a lost one."""
    raw = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    if registry.generation_of(raw) is None:
        name, signature = f"model {next(_model_numbers)}", _signature(raw, context, evaluation=False)
        registry.remember(raw, Generation(weakref.ref(wrapped), context.strategy, signature, name))


def release_model(model: nn.Module) -> nn.Module:
    """The person's own model, as it was before `prepare`. A collective where it is sharded."""
    raw = registry.raw_of(model)
    generation = registry.generation_of(raw)
    if generation is None:
        remove_forward(raw)
        return raw
    wrapped = generation.wrapped()
    with registry.following(raw):
        generation.strategy.release(raw, wrapped)
    remove_forward(raw)
    for each in (raw, wrapped):
        if each is not None:
            each._compiled_call_impl = None
    registry.forget(raw)
    return raw


def _signature(raw: nn.Module, context: Context, evaluation: bool) -> tuple[Any, ...]:
    """What would have to be done again, were it different: the settings, and which parameters there are."""
    return (
        context.strategy.signature,
        context.precision,
        repr(context.setup.handlers.autocast),
        repr(context.dynamo),
        evaluation,
        tuple((id(each), each.requires_grad) for each in raw.parameters()),
    )


def _compile(model: nn.Module, context: Context) -> None:
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
