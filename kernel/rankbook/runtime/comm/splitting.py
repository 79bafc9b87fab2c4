"""One process's share of a list, a dict or a tensor.

Owns: who gets what. Refuses: to ask the other processes; each computes its own share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from rankbook.errors import BadRequest

_D = TypeVar("_D")


def bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """Start and end of the share `index` of `count`; the first `length % count` shares are one longer."""
    each, extra = divmod(length, count)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


def share_of(inputs: _D, index: int, count: int, *, pad: bool = False) -> _D:
    """The share `index` of `count` of `inputs`. `pad` repeats the last element up to the largest share's length.

    A mapping's values are split one by one and must have one length. What cannot be sliced is given whole. The inputs
    are left as they are. Raises `BadRequest` for lengths that differ.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items() if _is_split(value)}
        if len(set(lengths.values())) > 1:
            raise BadRequest(f"all values of a dict must have the same length to be split between processes: {lengths}")
        return cast("_D", {key: share_of(value, index, count, pad=pad) for key, value in inputs.items()})
    if not _is_split(inputs):
        return inputs
    values: Any = inputs
    length = len(values)
    start, end = bounds(length, index, count)
    wanted = -(-length // count) if pad else end - start
    if hasattr(values, "select") and not isinstance(values, torch.Tensor):  # a table of rows, as `datasets.Dataset`
        return values.select([min(start + each, length - 1) for each in range(wanted)])  # type: ignore[no-any-return]
    share = values[start:end]
    short = wanted - (end - start)
    if short <= 0 or not length:
        return share  # type: ignore[no-any-return]
    if isinstance(values, torch.Tensor):
        return torch.cat([share, values[-1:].expand(short, *values.shape[1:])])  # type: ignore[return-value]
    if not isinstance(values, list | tuple):
        import numpy as np

        return np.concatenate([share, np.repeat(values[-1:], short, axis=0)])  # type: ignore[return-value]
    return share + type(share)([values[-1]] * short)  # type: ignore[no-any-return]


def _is_split(value: object) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return bool(getattr(value, "ndim", 0))
    return isinstance(value, list | tuple) or (hasattr(value, "select") and hasattr(value, "__len__"))
