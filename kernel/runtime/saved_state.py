"""What a checkpoint's files hold.

Owns: states with whole tensors, of models and optimizers however they are spread; random states; writing and reading
one file. Refuses: to decide which files there are.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from rankbook.errors import BadRequest
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.options import ProjectConfiguration
from rankbook.runtime.strategies.unshard import full


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict with whole tensors on every rank. A collective where it is sharded."""
    return {
        name: full(value) if isinstance(value, torch.Tensor) else value for name, value in model.state_dict().items()
    }


def load_model(model: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Put whole tensors into a model, each in the layout of the parameter that it is for."""
    own = model.state_dict()
    laid_out = {name: _like(value, own[name]) if name in own else value for name, value in state.items()}
    model.load_state_dict(laid_out, strict=strict)


def whole_optimizer_state(optimizer: AcceleratedOptimizer) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors on every rank. A collective where it is sharded."""
    found = optimizer.state_dict()
    state = {
        key: {name: full(value) if isinstance(value, torch.Tensor) else value for name, value in kept.items()}
        for key, kept in found["state"].items()
    }
    return {**found, "state": state}


def load_optimizer(optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
    """Put whole tensors into an optimizer, each in the layout of its parameter."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    places = [key for group in state["param_groups"] for key in group["params"]]
    if len(places) != len(parameters):
        raise BadRequest(f"the checkpoint's optimizer has {len(places)} parameters, and this one {len(parameters)}")
    own = dict(zip(places, parameters, strict=True))
    laid_out = {
        key: {
            name: _like(value, own[key]) if isinstance(value, torch.Tensor) and value.shape == own[key].shape else value
            for name, value in kept.items()
        }
        for key, kept in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": laid_out})


def _like(value: Any, own: Any) -> Any:  # noqa: ANN401 - a tensor, or what a module keeps beside its tensors
    if isinstance(own, DTensor) and isinstance(value, torch.Tensor) and value.dim() > 0:
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
    return value


def random_state() -> dict[str, Any]:
    """Of Python, numpy, torch and every CUDA device."""
    import numpy as np

    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - it is what user code draws from
    found: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """As `random_state` gave it."""
    import numpy as np

    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def write(value: object, file: Path) -> None:
    """Wholly or not at all: beside its place first, then moved."""
    draft = file.with_name(f"{file.name}.writing")
    torch.save(value, draft)
    draft.replace(file)


def read(file: Path) -> Any:  # noqa: ANN401 - what was written
    """What `write` wrote; nothing in it is executed."""
    return torch.load(file, map_location="cpu", weights_only=True)


def put_in_place(draft: Path, folder: Path) -> None:
    """Move a finished checkpoint to its place; an earlier one there goes once the new one is complete."""
    earlier = folder.with_name(f"{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        for other in folder.iterdir():  # what a hook or the person has put there stays
            if not (draft / other.name).exists() and not other.name.startswith("random_states_"):
                shutil.move(str(other), draft / other.name)
        folder.rename(earlier)
    draft.rename(folder)
    shutil.rmtree(earlier, ignore_errors=True)


def numbered(project: ProjectConfiguration) -> list[Path]:
    """The project's numbered checkpoints, oldest first."""
    found = [each for each in project.checkpoints.glob("checkpoint_*") if each.name.rpartition("_")[2].isdigit()]
    return sorted(found, key=lambda each: int(each.name.rpartition("_")[2]))


def latest(project: ProjectConfiguration) -> Path:
    """The project's newest numbered checkpoint. Raises `BadRequest` where there is none."""
    found = numbered(project)
    if not found:
        raise BadRequest(f"there is no checkpoint in {project.checkpoints}: give load_state a folder")
    return found[-1]


def keep_latest(project: ProjectConfiguration, newest: Path) -> None:
    """Remove numbered checkpoints beyond the project's limit, oldest first."""
    if project.total_limit is None or not project.automatic_checkpoint_naming or newest.parent != project.checkpoints:
        return
    for each in numbered(project)[: -project.total_limit]:
        shutil.rmtree(each)


def register(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    """Add `hook` to `hooks`; the handle takes it out again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
