"""Norms of the gradients on this rank, and the table of all ranks.

`local_gradients` measures the shards of this rank; norms.py adds them up. The notebook asks every rank, and
`gradients_of_ranks` does the same inside of a cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from rankbook.checkpoint.state_dict.state_dicts import local_part
from rankbook.control_collectives import gather_objects
from rankbook.errors import InvalidArgument
from rankbook.numerics.hashing import place_of
from rankbook.numerics.norms import GradientTable, merge_gradients
from rankbook.numerics.relations import as_real
from rankbook.protocol.queries import GradientEntry, LocalGradients
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.prepare import prepared_optimizers
from rankbook.runtime.strategies.base import reshard, without_summands

_PIECE = 1 << 22
"""Elements that are converted to float64 at a time."""
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def gradients_of_ranks(model: object) -> GradientTable:
    """Return the norms of the gradients of `model` over all ranks. A collective."""
    return merge_gradients(dict(enumerate(gather_objects(local_gradients(model, "model")))))


def local_gradients(model: object, name: str) -> LocalGradients:
    """Return the norms of the gradients on this rank.

    A collective if a gradient is a partial sum, as tensor parallelism can leave it. Raises `InvalidArgument` if `model`
    is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"{name!r} is a {type(model).__name__} on this rank: expected a model")
    reshard(model)  # the gradients of FSDP2 belong to the shards
    reduced = not GradientState._shared_state or (GradientState().sync_gradients and not window.is_open)
    parameters = dict(_named_parameters(model))
    scales = loss_scales(list(parameters.values()))
    with torch.no_grad():
        entries = tuple(
            _measure(key, parameter, scales.get(id(parameter), 1.0)) for key, parameter in parameters.items()
        )
    return LocalGradients(entries, reduced, max(scales.values(), default=1.0))


def _named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for key, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            continue  # a lazy module that has not run
        yield ".".join(_without_wrappers(model, key.split("."))), parameter


def _without_wrappers(module: torch.nn.Module, path: list[str]) -> Iterator[str]:
    """Yield the parts of a name without those that DDP, torch.compile and checkpointing of activations add."""
    for part in path:
        child = module._modules.get(part)
        is_wrapper = part in _WRAPPERS and len(module._modules) == 1 and not module._parameters
        if not is_wrapper or (part == "module" and not isinstance(module, torch.nn.parallel.DistributedDataParallel)):
            yield part
        if child is not None:
            module = child


def _measure(key: str, parameter: torch.Tensor, scale: float) -> GradientEntry:
    gradient = parameter.grad
    place = _place(parameter)
    weights = local_part(parameter)
    if gradient is None:
        return GradientEntry(key, place, None, _norm(weights), weights.numel())
    if isinstance(gradient, DTensor):
        gradient = without_summands(gradient)
        place = _place(gradient)
    local = local_part(gradient)
    if local.layout is not torch.strided:
        local = local.coalesce().values()
    norm = _norm(local)
    nonfinite = 0 if math.isfinite(norm) else int((~local.isfinite()).sum())
    return GradientEntry(key, place, norm / scale, _norm(weights), weights.numel(), nonfinite)


def _norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm, accumulated in float64 (float32 on a device without it)."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values()
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    pieces = as_real(tensor).reshape(-1).split(_PIECE)
    norms = [torch.linalg.vector_norm(piece.to(dtype)) for piece in pieces if piece.numel()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _place(tensor: torch.Tensor) -> str:
    return place_of(tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ""


def loss_scales(parameters: Sequence[torch.Tensor]) -> dict[int, float]:
    """Return the fp16 loss scales that the gradients of `parameters` still have, by the identity of the parameter.

    Parameters without one are left out: of two optimizers, one may have unscaled its gradients already.
    """
    chosen = set(map(id, parameters))
    scales: dict[int, float] = {}
    for optimizer in prepared_optimizers():
        scaler = getattr(optimizer, "scaler", None)
        if scaler is None or not scaler.is_enabled() or optimizer.has_unscaled_gradients():
            continue
        owned = chosen.intersection(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
        if owned:
            scales |= dict.fromkeys(owned, float(scaler.get_scale()))
    return scales
