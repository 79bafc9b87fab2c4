"""Hashes of tensors, block by block, and the differences of blocks: torch integer arithmetic on the tensor's device.

A block has 1 MiB and a 64-bit hash. Its bytes are read as 64-bit integers x, and the hash is the sum of

    (x + (x >> 29)) * w        modulo 2^64

over the block, with an odd pseudo-random weight w per position. An odd weight is invertible, so that the change of a
single element changes the hash; several changes cancel with a probability of about 2^-30. Without the shift, changes of
the highest bit alone would cancel in pairs, whatever the weights: two times 2^63 is 0, so that the negative of a tensor
would have its hash. On the CPU this takes about the time of a fast CRC-32, and a GPU gives the same hash.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankbook.errors import InvalidArgument

BLOCK = 1 << 20
"""Bytes of a tensor under one hash. Only blocks with different hashes are sent to other ranks, to be compared."""
_WORDS = BLOCK // 8
_SHIFT = 29


def hash_blocks(tensor: torch.Tensor) -> bytes:
    """Return the hashes of a tensor's blocks, 8 bytes each; no bytes for a tensor without elements.

    Args:
        tensor: a plain tensor of any dtype and shape, on any device. Its logical order counts, not its strides.

    The extra memory is two blocks, and a third one for a tensor that is not contiguous. Raises `InvalidArgument` for
    data that cannot be read: a sparse or quantized tensor, or one on the meta device.
    """
    check_readable(tensor)
    if not tensor.numel():
        return b""
    weights, scratch = _weights(tensor.device), _scratch(tensor.device)
    sums = torch.empty(block_count(nbytes(tensor)), dtype=torch.int64, device=tensor.device)
    for number, block in enumerate(blocks(tensor)):
        words = _as_words(block)
        count = words.numel()
        mixed = torch.bitwise_right_shift(words, _SHIFT, out=scratch[:count]).add_(words)
        if mixed.device.type == "cpu":
            sums[number] = torch.dot(mixed, weights[:count])
        else:  # torch has no integer dot product on accelerators
            sums[number] = mixed.mul_(weights[:count]).sum()
    # One transfer, and one wait for a device.
    return sums.cpu().numpy().tobytes()


def check_readable(tensor: torch.Tensor) -> None:
    """Raise `InvalidArgument` for a tensor whose bytes cannot be read."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise InvalidArgument("it is not initialized yet: its lazy module has not run")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
        raise InvalidArgument(f"expected a dense tensor, got one that is {kind}".removesuffix(", torch.strided"))
    if tensor.device.type == "meta":
        raise InvalidArgument("it is on the meta device and has no values")


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def block_count(size: int) -> int:
    """Return the number of blocks of a tensor of `size` bytes."""
    return -(-size // BLOCK)


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor as 1-d uint8 tensors of one block; views, if the tensor is contiguous."""
    for number in range(block_count(nbytes(tensor))):
        yield block_of(tensor, number)


def block_of(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return block `number` of a tensor as a 1-d uint8 tensor: a view, if the tensor is contiguous."""
    size = BLOCK // tensor.element_size()
    start = number * size
    count = min(size, tensor.numel() - start)
    part = tensor.view(-1)[start : start + count] if tensor.is_contiguous() else _gather(tensor, start, count)
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    return part.view(torch.uint8)


def _gather(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` elements of a tensor that is not contiguous, from `start` on, in their logical order."""
    if tensor.dim() == 1:
        return tensor[start : start + count].contiguous()
    # Rows of the first axis that contain the elements. A row may be long, so its part is found in the same way.
    row = tensor.numel() // tensor.shape[0]
    first, last = start // row, (start + count - 1) // row
    if first == last:
        return _gather(tensor[first], start - first * row, count)
    if (last - first + 1) * row <= 4 * count:
        flat = tensor[first : last + 1].reshape(-1)
        return flat[start - first * row : start - first * row + count]
    middle = (first + 1) * row
    return torch.cat([_gather(tensor, start, middle - start), _gather(tensor, middle, start + count - middle)])


def _as_words(block: torch.Tensor) -> torch.Tensor:
    """Return a block as 64-bit integers, padded with zeros."""
    rest = block.numel() % 8
    # A view as wider integers needs an aligned start.
    if not rest and not block.storage_offset() % 8 and not block.data_ptr() % 8:
        return block.view(torch.int64)
    padded = torch.zeros(block.numel() + (8 - rest) % 8, dtype=torch.uint8, device=block.device)
    padded[: block.numel()] = block
    return padded.view(torch.int64)


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    # From a generator of its own: the user's random numbers must not change.
    generator = torch.Generator().manual_seed(0x5EED)
    weights = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS,), dtype=torch.int64, generator=generator, device="cpu")
    return weights.bitwise_or_(1).to(device)


def _scratch(device: torch.device) -> torch.Tensor:
    return torch.empty(_WORDS, dtype=torch.int64, device=device)


def compare_block(block: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> tuple[float, int, int, int]:
    """Return the largest difference, and the numbers of differing, compared and nonfinite elements of two blocks.

    Args:
        block, reference: 1-d uint8 tensors of the same length on one device.
        dtype: dtype of the elements.

    Two NaNs are equal, and so are 0.0 and -0.0. An element that is NaN or infinite in one block only counts as
    differing and as nonfinite, and has no part in the largest difference. Without a way to read numbers of `dtype`, as
    for packed ones, the bytes are compared, and the largest difference is NaN.
    """
    if dtype.itemsize == 8 and not dtype.is_floating_point and not dtype.is_complex:
        return _compare_integers(block, reference, dtype)
    try:
        mine, other = _wide(block, dtype), _wide(reference, dtype)
    except NotImplementedError:
        differing = int((block != reference).view(-1, dtype.itemsize).any(1).sum())
        return math.nan if differing else 0.0, differing, block.numel() // dtype.itemsize, 0
    differs = mine != other
    if mine.is_floating_point() or mine.is_complex():
        differs &= ~(mine.isnan() & other.isnan())
    differing = int(differs.sum())
    if not differing:
        return 0.0, 0, mine.numel(), 0
    gaps = (mine[differs] - other[differs]).abs()
    finite = gaps[gaps.isfinite()]
    largest = float(finite.max()) if finite.numel() else math.nan
    return largest, differing, mine.numel(), differing - finite.numel()


def _compare_integers(block: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> tuple[float, int, int, int]:
    # float64 rounds large integers, so that neighbours would be equal.
    mine, other = (part.clone().view(torch.int64) for part in (block, reference))
    differs = mine != other
    differing = int(differs.sum())
    if not differing:
        return 0.0, 0, mine.numel(), 0
    gaps = (_wide(block, dtype)[differs] - _wide(reference, dtype)[differs]).abs()
    return max(1.0, float(gaps.max())), differing, mine.numel(), 0


def _wide(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Alignment: a clone starts at an aligned address.
    values = block.clone().view(dtype)
    return values.to(torch.complex128 if dtype.is_complex else torch.float64)


def place_of(mesh: Any, placements: Sequence[Any]) -> str:  # noqa: ANN401 - a DeviceMesh and its placements
    """Return the coordinates of this rank's shard along the axes of its mesh that shard it, with their placements.

    Ranks with equal places hold replicas of one shard. Empty if the tensor is replicated along all axes.
    """
    names = mesh.mesh_dim_names or tuple(map(str, range(len(placements))))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return "outside of the mesh"
    return ", ".join(
        f"{placement} {name} {at}"
        for placement, name, at in zip(placements, names, coordinate, strict=True)
        if not placement.is_replicate()
    )
