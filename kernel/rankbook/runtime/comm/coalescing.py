"""Small tensors travel together: one collective for all leaves of a container, not one for each.

Owns: which of them go together, and how they come apart again. Refuses: to send anything.

All ranks have to come to the same parcels: these depend on shapes, types and devices only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

MOST_BYTES = 1 << 20
"""Above this a copy costs more than a collective's latency, so that larger tensors go alone."""


def parcels(tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The indices of tensors that go together: of one kind, in order, and of `MOST_BYTES` at most."""
    open_parcels: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for index, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        size = tensor.nbytes
        if size > MOST_BYTES:
            closed.append([index])
            continue
        indices, filled = open_parcels.get(kind, ([], 0))
        if filled + size > MOST_BYTES:
            closed.append(indices)
            indices, filled = [], 0
        open_parcels[kind] = ([*indices, index], filled + size)
    return closed + [indices for indices, _ in open_parcels.values()]


def as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of contiguous tensors, one after the other: uint8[sum of their bytes]."""
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])


def rows_from_bytes(gathered: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What all ranks' `as_bytes(like)` hold, uint8[ranks, bytes]: each tensor with every rank's rows, in rank order."""
    found, start = [], 0
    for each in like:
        piece = gathered[:, start : start + each.nbytes].flatten().clone()  # a copy starts where its type may
        found.append(piece.view(each.dtype).view(gathered.shape[0] * each.shape[0], *each.shape[1:]))
        start += each.nbytes
    return found


def split_like(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of a 1-d tensor in the shapes of `like`, as tensors of their own."""
    pieces = flat.split([each.numel() for each in like])
    return [piece.clone().view(each.shape) for piece, each in zip(pieces, like, strict=True)]
