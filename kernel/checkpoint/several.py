"""The map of several models and optimizers at once, and what was loaded put back.

Owns: names over all of them: an optimizer may step the parameters of any model, and parameters that are no model's.
Refuses: the map of one of them (`models.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rankbook.checkpoint.mapping import ShardedStateDict, StateDict
from rankbook.checkpoint.models import clean_name, load_model, load_optimizer, model_map, optimizer_map
from rankbook.checkpoint.replicas import Copy, Gather, gather_objects, settle

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def sharded_state_dicts(
    models: Models,
    optimizers: Optimizers,
    *,
    states: Mapping[str, Mapping[str, Any]] | None = None,
    gather: Gather = gather_objects,
) -> ShardedStateDict:
    """`{"models": {name: ...}, "optimizers": {name: ...}}`, for `save` or `load`. A collective.

    A tensor of a model is stored as `<model's name>.<its name>`, an optimizer's state as
    `<optimizer's name>.state.<model's name>.<parameter's name>.<its name>`. A parameter that is no model's is called
    `<optimizer's name>.<its group>.<its position>`; its values are not stored. `states`: state dicts of models that
    stand for what the models have now; a model without one is left out.

    Raises as `sharded_state_dict` does.
    """
    found: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}}
    copies: list[Copy] = []
    error = None
    try:
        for name, model in models.items():
            state = model.state_dict() if states is None else states.get(name)
            if state is not None:
                found["models"][name] = model_map(model, f"{name}.", copies, state=state, together=f"{name}.")
        names = _names(models, optimizers)
        for name, optimizer in optimizers.items():
            found["optimizers"][name] = optimizer_map(optimizer, names, f"{name}.state.", copies)
    except Exception as raised:  # noqa: BLE001 - every rank raises it, instead of waiting for this one
        error = raised
    settle(copies, gather, error=error)
    return found


def load_sharded_state_dicts(models: Models, optimizers: Optimizers, loaded: StateDict) -> None:
    """Put back what was loaded for a map of `sharded_state_dicts`. Raises as `load_sharded_state_dict` does."""
    for name, model in models.items():
        if name in loaded.get("models", {}):
            load_model(model, loaded["models"][name])
    names = _names(models, optimizers)
    for name, optimizer in optimizers.items():
        if name in loaded.get("optimizers", {}):
            load_optimizer(optimizer, names, loaded["optimizers"][name])


def _names(models: Models, optimizers: Optimizers) -> dict[int, str]:
    """The name of each parameter, by its identity; of one that has several the first."""
    names: dict[int, str] = {}
    for name, model in models.items():
        for raw, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{name}.{clean_name(model, raw)}")
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"{name}.{index}.{position}")
    return names
