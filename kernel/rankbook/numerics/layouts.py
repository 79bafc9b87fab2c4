"""Copies of a model and its optimizer in a layout, for a comparison.

`build` copies rank 0's whole weights to all ranks and spreads them; `use_current` takes the user's model itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rankbook.numerics.step_layout import Layout
from rankbook.runtime.config import (
    AutocastKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.settings import MixedForward, check_precision, install_forward
from rankbook.runtime.strategies.base import FSDP_STATE_KEYS, Strategy, StrategySetup, full_tensor, plain_class
from rankbook.runtime.strategies.ddp import DataParallel
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel
from rankbook.runtime.strategies.tensor_parallel import TensorParallel


@dataclass
class Built:
    """A model in a layout.

    `inner` is the model without a wrapper. `data_parallel_size` ranks have different batches. `reduces`: the backward
    pass leaves the mean of the gradients of all ranks.
    """

    model: nn.Module
    inner: nn.Module
    optimizer: Any
    data_parallel_size: int
    data_parallel_rank: int
    reduces: bool
    strategy: Strategy | None = None

    def release(self) -> None:
        """Remove what the layout has added to the model."""
        if self.strategy is not None:
            self.strategy.release(self.inner, self.model)


def raw_model(model: nn.Module) -> nn.Module:
    """Return the model inside of its wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def raw_optimizer(optimizer: Any) -> Any:  # noqa: ANN401 - an optimizer or its wrapper
    """Return torch's optimizer inside of a prepared one."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def use_current(model: nn.Module, optimizer: Any) -> Built:  # noqa: ANN401 - an optimizer or its wrapper
    """Return the user's own model as a layout."""
    inner = raw_model(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Ranks of one tensor-parallel group have the same batch.
    tensors = [parameter for parameter in inner.parameters() if isinstance(parameter, DTensor)]
    names = {name for tensor in tensors for name in tensor.device_mesh.mesh_dim_names or ()}
    width = 1
    if "tp" in names:
        mesh = next(t.device_mesh for t in tensors if "tp" in (t.device_mesh.mesh_dim_names or ()))
        width = mesh["tp"].size()
    reduces = isinstance(model, DistributedDataParallel) or bool(tensors)
    return Built(model, inner, optimizer, world // width, rank // width, reduces)


def build(layout: Layout, model: nn.Module, optimizer: Any) -> Built:  # noqa: ANN401 - an optimizer or its wrapper
    """Copy rank 0's model and optimizer, and spread the copy. A collective."""
    raw = raw_model(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    copied = plain_copy(raw)
    device = next((parameter.device for parameter in copied.parameters()), torch.device("cpu"))
    states = _whole_states(raw, raw_optimizer(optimizer))
    for tensor in (*copied.parameters(), *copied.buffers()):
        _broadcast(tensor)
    if layout.precision is not None:
        check_precision(layout.precision, device)
        install_forward(copied, layout.precision, device, AutocastKwargs())
    parallelism = layout.parallelism
    if layout.kind == "tp" and parallelism is None:
        parallelism = ParallelismConfig(tp_size=world)
    setup = StrategySetup(device, world, rank, layout.fsdp, parallelism)
    if parallelism is not None:
        parallelism.check(world)
    strategy: Strategy | None = None
    if layout.kind == "ddp":
        strategy = DataParallel(setup)
    elif layout.kind == "fsdp2":
        setup.fsdp = layout.fsdp or FullyShardedDataParallelPlugin()
        strategy = FullyShardedDataParallel(setup)
    elif layout.kind == "tp":
        strategy = TensorParallel(setup)
    wrapped = copied if strategy is None or world == 1 else strategy.wrap(copied)
    names = {id(parameter): name for name, parameter in raw.named_parameters()}
    parameters = dict(copied.named_parameters())
    moved = None if optimizer is None else _copy_optimizer(raw_optimizer(optimizer), names, parameters, states)
    return Built(
        wrapped,
        copied,
        moved,
        setup.data_parallel_size,
        setup.data_parallel_rank,
        True,
        strategy if world > 1 else None,
    )


# Copies ---------------------------------------------------------------------------------------------------------------


def plain_copy(raw: nn.Module) -> nn.Module:
    """Return a copy with whole, plain parameters of a model that may be sharded. A collective if it is.

    The gradients are not copied. `raw` stays as it is.
    """
    memo: dict[int, Any] = {}
    for parameter in raw.parameters():
        whole = full_tensor(parameter.detach()).clone()
        memo[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    with _without_sharding(raw):
        copied: nn.Module = copy.deepcopy(raw, memo)
    return copied


@contextlib.contextmanager
def _without_sharding(raw: nn.Module) -> Iterator[None]:
    """Hide what `fully_shard` and tensor parallelism have added to the modules, which cannot be copied."""
    hidden: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    added = {(id(hooks), key) for hooks, key in raw.__dict__.get("_rankbook_tp_hooks", ())}
    keys = ("_rankbook_tp_hooks", *FSDP_STATE_KEYS)
    tables = ("_forward_hooks", "_forward_pre_hooks")
    of_state_dict = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    try:
        for module in raw.modules():
            kept = dict(module.__dict__)
            hidden.append((module, type(module), kept))
            for name in tables:
                table = kept[name]
                module.__dict__[name] = type(table)(
                    (key, hook)
                    for key, hook in table.items()
                    if (id(table), key) not in added and "torch.distributed" not in _origin(hook)
                )
            if isinstance(module, FSDPModule):
                for name in of_state_dict:
                    if name in kept:
                        module.__dict__[name] = type(kept[name])()
                module.__class__ = plain_class(module)  # type: ignore[assignment]
            for key in keys:
                module.__dict__.pop(key, None)
        yield
    finally:
        for module, kind, kept in hidden:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(kept)


def _origin(hook: Any) -> str:  # noqa: ANN401 - any callable
    while hasattr(hook, "func"):
        hook = hook.func
    hook = getattr(hook, "__wrapped__", hook)
    return str(getattr(hook, "__module__", ""))


def _broadcast(tensor: torch.Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor.detach(), 0)


def _whole_states(raw: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - an optimizer
    """Return rank 0's optimizer state by the names of parameters, with whole tensors. A collective."""
    if optimizer is None:
        return {}
    states: dict[str, dict[str, Any]] = {}
    names = {id(parameter): name for name, parameter in raw.named_parameters()}
    for parameter, state in optimizer.state.items():
        if id(parameter) in names:
            states[names[id(parameter)]] = {
                key: full_tensor(value).detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for key, value in state.items()
            }
    if dist.is_initialized() and dist.get_world_size() > 1:
        # Ranks may hold different entries: those of rank 0 count.
        received: list[Any] = [states]
        dist.broadcast_object_list(received, 0)
        states = received[0]
    return states


def _copy_optimizer(
    optimizer: Any,  # noqa: ANN401 - an optimizer
    names: Mapping[int, str],
    parameters: Mapping[str, nn.Parameter],
    states: Mapping[str, Mapping[str, Any]],
) -> Any:  # noqa: ANN401
    """Return an optimizer of the same class and options for the copied parameters."""
    moved = object.__new__(type(optimizer))
    # Not by its constructor: its arguments are those of the class, and `defaults` may have others. Schedulers put a
    # `step` of their own into the instance.
    moved.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    moved.defaults = dict(optimizer.defaults)
    moved.param_groups = [
        {**group, "params": [parameters[names[id(p)]] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]
    moved.state = defaultdict(dict)
    for name, state in states.items():
        if name in parameters:
            moved.state[parameters[name]] = {key: _spread(value, parameters[name]) for key, value in state.items()}
    return moved


def _spread(value: Any, parameter: torch.Tensor) -> Any:  # noqa: ANN401 - any state of an optimizer
    """Return a state tensor of the parameter's shape in the parameter's layout. A collective."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.clone()
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim():
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def precision_of(model: nn.Module) -> torch.dtype:
    """Return the data type in which the model computes."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, MixedForward):
        return forward.kind
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits) if dtypes else torch.float32
