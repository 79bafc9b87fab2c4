"""The numbers of one tensor, a little at a time.

Owns: minimum, mean, maximum and what is not finite. Refuses: to take the processors from the main thread (each piece is
too small for torch to share out), and tensors that cannot be read in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from rankbook.errors import BadRequest
from rankbook.protocol.telemetry import Statistic

LONGEST = 1.5
"""Seconds."""
_PIECE = {"cpu": 30_000, "cuda": 1 << 24}
"""Elements. torch shares out work among threads from 32768 on."""


def statistic(rank: int, tensor: torch.Tensor) -> Statistic:
    """Of all elements that are here; of values that the main thread changes meanwhile some are old and some new.

    Raises `BadRequest` for what has no order, and for more than can be read in `LONGEST` seconds.
    """
    if tensor.is_complex() or tensor.is_quantized or tensor.layout is not torch.strided:
        raise BadRequest(f"a tensor of {tensor.dtype}, {tensor.layout} has no minimum and maximum here")
    if tensor.device.type == "meta":
        raise BadRequest("the tensor is on the meta device and has no values")
    began, read = time.monotonic(), 0
    low, high, total, finite, nans, infinities = float("inf"), float("-inf"), 0.0, 0, 0, 0
    with torch.no_grad():
        for piece in _pieces(tensor.detach(), _PIECE.get(tensor.device.type, 1 << 20)):
            if time.monotonic() - began > LONGEST:
                raise BadRequest(
                    f"{tensor.numel():,} elements are too many to look at while the rank works: {read:,} of them took "
                    f"{LONGEST} s"
                )
            values = piece.to(torch.float64) if tensor.device.type == "cpu" else piece.to(torch.float32)
            kept = values[values.isfinite()] if tensor.is_floating_point() else values
            if tensor.is_floating_point() and kept.numel() < values.numel():
                nans += int(values.isnan().sum())
                infinities += int(values.isinf().sum())
            if kept.numel():
                low, high = min(low, float(kept.min())), max(high, float(kept.max()))
                total += float(kept.sum(dtype=torch.float64))
                finite += kept.numel()
            read += piece.numel()
    if not finite:
        return Statistic(rank, None, None, None, nans, infinities)
    return Statistic(rank, low, total / finite, high, nans, infinities)


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The tensor in pieces of at most `most` elements, without a copy of the whole."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), most):
            yield flat[start : start + most]
    else:
        rows = max(1, most // (tensor.numel() // tensor.shape[0]))
        for start in range(0, tensor.shape[0], rows):
            block = tensor[start : start + rows]
            yield from _pieces(block if rows > 1 else block[0], most)
