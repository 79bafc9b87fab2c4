"""Puts a batch together where it is to lie.

Owns: torch's own way to collate, with a say in the memory of large tensors. Refuses: a person's collate function, and
a worker's batches, which torch itself puts into shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from rankbook.runtime.data.frames import LARGE

Room = Callable[[int], torch.Tensor | None]
"""Memory of so many bytes, or None where torch is to find some."""


class Collate:
    """What `default_collate` makes of a batch, with its large tensors in `room` while there is one."""

    def __init__(self) -> None:
        self.room: Room | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"room": None}  # this process's

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401 - any items
        """The items, stacked."""
        kinds = default_collate_fn_map
        if self.room is None or kinds.get(torch.Tensor) is not collate_tensor_fn or get_worker_info() is not None:
            return default_collate(batch)
        return collate(batch, collate_fn_map={**kinds, torch.Tensor: self._stack})

    def _stack(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ANN401
        first = tensors[0]
        size = first.nbytes * len(tensors)
        if size >= LARGE and self.room is not None and all(_is_like(each, first) for each in tensors):
            memory = self.room(size)
            if memory is not None:
                out = memory.view(first.dtype).view(len(tensors), *first.shape)
                return torch.stack(list(tensors), 0, out=out)
        stacked: torch.Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return stacked


def _is_like(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether both are plain: dense, on the CPU, without gradients, and of one type and shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
    )


def placing(fetch: Any) -> Collate | None:  # noqa: ANN401 - what reads a batch
    """Have `fetch` collate where it is told to, if torch's own function is what it collates with; None if not."""
    if fetch._collate is default_collate:
        fetch._collate = Collate()
    return fetch._collate if type(fetch._collate) is Collate else None
