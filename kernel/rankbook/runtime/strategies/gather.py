"""Takes the shards of a model together again, so that it can be prepared another way.

Owns: what `fully_shard` and a tensor-parallel plan leave on a module, and its removal. Refuses: optimizers.

torch has no such call. What is undone here is what torch 2.11 to 2.13 do: the class they give a module, two hooks on
each forward, three on saving and loading, and an entry in two registries.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable import contract
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def unshard_module(model: nn.Module) -> None:
    """Have `model` hold whole, plain parameters on every rank, and no trace of the shards. A collective.

    A parameter that two modules share is one again. Gradients are gathered as well.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    whole: dict[nn.Parameter, nn.Parameter] = {}
    states = {id(state): state for each in model.modules() if (state := _state_of(each)) is not None}
    gathered = [
        (module, name, _whole(parameter, whole))
        for module in model.modules()
        for name, parameter in cast("dict[str, object]", module._parameters).items()  # mypy: no Parameter is a DTensor
        if isinstance(parameter, DTensor)
    ]
    # Nothing has changed so far: a collective that is broken off leaves the model sharded, and whole.
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
        for each in _parameters_of(state):
            each._post_load_hook_handle.remove()
    for module, name, parameter in gathered:
        module._parameters[name] = parameter
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _forget(module)


def _whole(parameter: Any, known: dict[Any, nn.Parameter]) -> nn.Parameter:  # noqa: ANN401 - a DTensor parameter
    if parameter not in known:
        made = nn.Parameter(full(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            made.grad = full(parameter.grad).clone()
        known[parameter] = made
    return known[parameter]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. A collective, where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def drop_unreduced(model: nn.Module) -> None:
    """Forget the gradients that `model`'s shards have gathered on this rank and not reduced."""
    for each in model.modules():
        state = _state_of(each)
        for parameter in _parameters_of(state) if state is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _state_of(module: nn.Module) -> Any:  # noqa: ANN401 - torch's FSDPState
    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def _groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameters_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    return [each for group in _groups_of(state) for each in group.fsdp_params]


def _forget(module: nn.Module) -> None:
    _module_state_mapping.pop(module, None)
    for mark in (contract.__globals__["STATE_KEY"], contract.__globals__["REGISTRY_KEY"], *_MARKS):
        module.__dict__.pop(mark, None)
    module.__class__ = next(
        each for each in type(module).__mro__[1:] if not issubclass(each, FSDPModule) and issubclass(each, nn.Module)
    )
