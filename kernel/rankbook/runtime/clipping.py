"""Gradients brought within bounds, over shards too.

Owns: the norm of gradients that lie on the ranks in different ways. Refuses: scales and windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from rankbook.runtime.strategies.gather import full


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scale the gradients of `parameters` to a norm of at most `max_norm`. Returns the norm before, whole on each rank.

    torch's own refuses shards and whole tensors together, as a tensor-parallel model has them, and returns a share of
    the norm for shards.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            layout = (each.grad.device_mesh, each.grad.placements) if isinstance(each.grad, DTensor) else None
            groups.setdefault(layout, []).append(each)
    if not groups:
        return torch.zeros((), device=device)
    norms = [
        full(get_total_norm([each.grad for each in group if each.grad is not None], norm_type))
        for group in groups.values()
    ]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm != float("inf"):
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_values(parameters: Sequence[torch.Tensor], bound: float) -> None:
    """Bring each element of the gradients between `-bound` and `bound`."""
    whole = [each for each in parameters if each.grad is not None and not isinstance(each.grad, DTensor)]
    if whole:  # torch's raises for none
        clip_grad_value_(whole, bound)
    clip_local = [each.grad.to_local() for each in parameters if isinstance(each.grad, DTensor)]
    for each in clip_local:
        each.clamp_(-bound, bound)
