"""Relation of two tensors that should be equal: a factor, a missing rank, a shifted shard, a dropout mask, a precision.

Pure functions of tensors. `classify` tries the explanations from the most specific to the most general one; each is
accepted only if it explains the difference down to the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_MAX_SHIFTS = 64
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Relation:
    """Difference between a tensor and the reference. `kind` is a keyword for programs, `text` the explanation."""

    kind: str
    text: str
    relative: float


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, with a last dimension of the real and imaginary parts of complex numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64. See `as_real` for complex numbers."""
    return as_real(tensor.detach()).double()


def relative_difference(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Return the norm of the difference, divided by the norm of `reference`; inf if shapes differ or one is not finite.

    Both tensors in float64.
    """
    if reference.shape != candidate.shape:
        return math.inf
    difference = float((candidate - reference).norm())
    if not math.isfinite(difference):
        return math.inf
    scale = float(reference.norm())
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def classify(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    tolerance: float,
    world_size: int,
    parts: Sequence[torch.Tensor] = (),
    start: torch.Tensor | None = None,
    reference_dtype: torch.dtype = torch.float32,
    candidate_dtype: torch.dtype = torch.float32,
) -> Relation:
    """Return how `candidate` is related to `reference`.

    Args:
        reference: the value that is expected.
        candidate: the value that differs.
        tolerance: relative difference that counts as equal.
        world_size: number of ranks, N.
        parts: for a gradient, the contributions of the ranks; `reference` is their mean.
        start: for a parameter, buffer or state, its value before the step.
        reference_dtype: data type in which `reference` was computed.
        candidate_dtype: data type in which `candidate` was computed.
    """
    a, b = wide(reference), wide(candidate)
    if a.shape == b.shape:
        a, b = _without_equal_nonfinite(a, b)
    relative = relative_difference(a, b)
    if a.shape != b.shape:
        return Relation("shape", f"its shape is {list(b.shape)}, expected {list(a.shape)}", relative)
    if not bool(torch.isfinite(b).all()):
        return Relation("not finite", "it is not finite", relative)
    # A generous bound: parts were computed in the same precision, and only the order of sums differs.
    close = 4 * tolerance
    before = None if start is None else wide(start)
    if before is not None and before.shape == b.shape and relative > 0:
        # Exactly the value before the step: also if the change is smaller than the tolerance.
        is_unchanged = torch.equal(before, b) or relative_difference(before, b) <= close < relative
        if is_unchanged:
            return Relation("unchanged", "the step has not changed it", relative)
    rounded = _rounded(a, b, relative, reference_dtype, candidate_dtype)
    other = Relation("other", "no simple relation", relative)
    if relative <= close:  # so close to the reference, every relation to it would be accepted
        return rounded or other
    return (
        _from_parts(b, [wide(part) for part in parts], close, relative)
        or _scaled(a, b, close, world_size, relative)
        or _shifted(a, b, close, world_size, relative)
        or _scaled_shards(a, b, close, world_size, relative)
        or _masked(a, b, close, relative)
        or rounded
        or other
    )


def _without_equal_nonfinite(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors with zeros for elements that are NaN, or the same infinity, in both, as in a mask."""
    same = (a.isnan() & b.isnan()) | (a.isinf() & (a == b))
    return a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)


def _from_parts(b: torch.Tensor, parts: Sequence[torch.Tensor], close: float, relative: float) -> Relation | None:
    """Explain `b` as the contribution of one rank, or as that of all ranks without one."""
    if len(parts) < 2 or any(part.shape != b.shape for part in parts):
        return None
    total = torch.stack(list(parts)).sum(0)
    # If all ranks contribute the same, nothing can be told from their parts.
    if all(relative_difference(parts[0], part) <= close for part in parts[1:]):
        return None
    n = len(parts)
    for rank, part in enumerate(parts):
        if relative_difference(part, b) <= close:
            return Relation("not reduced", f"rank {rank} has only its own gradient: an all-reduce is missing", relative)
        if relative_difference(part / n, b) <= close:
            return Relation("not reduced", f"rank {rank} has only its own gradient, ÷{n}", relative)
    for rank, part in enumerate(parts):
        for divisor, name in ((n, ""), (n - 1, f", divided by {n - 1}")):
            if n > 2 and relative_difference((total - part) / divisor, b) <= close:
                return Relation("rank missing", f"the gradient of rank {rank} is missing{name}", relative)
    return None


def _scaled(a: torch.Tensor, b: torch.Tensor, close: float, world_size: int, relative: float) -> Relation | None:
    square = float((a * a).sum())
    if square == 0.0:
        return None
    factor = float((a * b).sum()) / square
    if factor == 0.0 or relative_difference(a * factor, b) > close or abs(factor - 1) <= close:
        return None
    n = world_size
    if n > 1 and math.isclose(factor, n, rel_tol=max(close, 1e-6)):
        return Relation("×N", f"×{n}, the number of ranks: a sum in place of a mean", relative)
    if n > 1 and math.isclose(factor, 1 / n, rel_tol=max(close, 1e-6)):
        return Relation("÷N", f"÷{n}, the number of ranks: divided twice, or the loss is scaled", relative)
    if n > 1 and math.isclose(factor, math.sqrt(n), rel_tol=max(close, 1e-6)):
        return Relation("×√N", f"×√{n}, the root of the number of ranks", relative)
    return Relation("factor", f"×{factor:.6g}", relative)


def _scaled_shards(a: torch.Tensor, b: torch.Tensor, close: float, world_size: int, relative: float) -> Relation | None:
    """Explain `b` as `a` whose shards along the first dimension have a factor of their own."""
    if world_size < 2 or not a.dim() or a.shape[0] < world_size:
        return None
    factors = []
    for x, y in zip(a.chunk(world_size), b.chunk(world_size), strict=True):
        square = float((x * x).sum())
        factor = float((x * y).sum()) / square if square else 1.0
        if relative_difference(x * factor, y) > close:
            return None
        factors.append(factor)
    named = ", ".join(f"{factor:.3g}" for factor in factors[:4]) + (", …" if len(factors) > 4 else "")
    return Relation(
        "shards scaled", f"its shards have the factors {named}: a norm of the shard, not of the whole", relative
    )


def _shifted(a: torch.Tensor, b: torch.Tensor, close: float, world_size: int, relative: float) -> Relation | None:
    """Explain `b` as `a` with its shards in another order along a dimension."""
    for dim, shift, shard in _shifts(a.shape, world_size):
        if relative_difference(a.roll(shift, dim), b) <= close:
            return Relation("shifted", f"shifted by {shift // shard} of {world_size} shards along dim {dim}", relative)
    return None


def _shifts(shape: Sequence[int], world_size: int) -> Iterator[tuple[int, int, int]]:
    for dim, size in enumerate(shape):
        if world_size > 1 and size >= world_size and size % world_size == 0:
            shard = size // world_size
            for count in range(1, min(world_size, _MAX_SHIFTS)):
                yield dim, count * shard, shard


def _masked(a: torch.Tensor, b: torch.Tensor, close: float, relative: float) -> Relation | None:
    """Explain `b` as `a` under another dropout mask: other elements are zero, and the common ones are equal."""
    zero_a, zero_b = a == 0, b == 0
    if a.numel() < 8 or bool((zero_a == zero_b).all()):
        return None
    both = ~zero_a & ~zero_b
    if not bool(both.any()) or relative_difference(a[both], b[both]) > close:
        return None
    share = float((zero_a != zero_b).double().mean())
    return Relation("mask", f"another dropout mask: {share:.0%} of the elements are zero in only one of them", relative)


def _rounded(
    a: torch.Tensor, b: torch.Tensor, relative: float, reference_dtype: torch.dtype, candidate_dtype: torch.dtype
) -> Relation | None:
    """Explain the difference by the rounding of a lower precision."""
    for dtype in _HALF:
        name = str(dtype).removeprefix("torch.")
        eps = torch.finfo(dtype).eps
        if relative > 16 * eps:
            continue
        if candidate_dtype == dtype and reference_dtype != dtype:
            return Relation("precision", f"a lower precision: it is {name}", relative)
        exact_b, exact_a = bool((b.to(dtype).double() == b).all()), bool((a.to(dtype).double() == a).all())
        if exact_b and not exact_a:
            return Relation("precision", f"a lower precision: its values are those of {name}", relative)
    if relative <= 16 * torch.finfo(torch.bfloat16).eps and relative >= torch.finfo(torch.float16).eps / 16:
        return Relation("precision", "the size of the difference is that of half precision", relative)
    return None
