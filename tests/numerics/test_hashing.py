"""Test hashes and differences of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from rankbook.errors import InvalidArgument
from rankbook.numerics.hashing import BLOCK, block_of, compare_block, hash_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0, 4), (1100, 700)], ids=str)
def test_equal_tensors_have_equal_hashes_and_every_change_of_an_element_shows(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = hash_blocks(tensor)
    assert hash_blocks(tensor.clone()) == before
    assert len(before) == 8 * -(-tensor.nbytes // BLOCK)
    if tensor.numel():
        changed = tensor.clone().view(-1)
        changed[-1] = changed[-1].logical_not() if dtype is torch.bool else changed[-1] + 1
        assert hash_blocks(changed.view(shape)) != before


def test_hash_follows_the_logical_order_and_not_the_strides():
    tensor = torch.randn(700, 1100)
    transposed = tensor.T
    assert hash_blocks(transposed) == hash_blocks(transposed.contiguous()) != hash_blocks(tensor)
    view = torch.randn(40, 90_000)[:, 3:80_003:2]
    assert hash_blocks(view) == hash_blocks(view.contiguous())
    column = torch.randn(300_000, 2)[:, 1]
    assert hash_blocks(column) == hash_blocks(column.contiguous())
    unaligned = torch.randn(1001)[1:]
    assert hash_blocks(unaligned) == hash_blocks(unaligned.clone())


def test_flipped_signs_and_swapped_elements_do_not_cancel():
    """Check the highest bit, which a sum that is linear in the bits would lose: two of them are 0 modulo 2^64."""
    for dtype in (torch.float64, torch.float32):
        tensor = torch.ones(1 << 12, dtype=dtype)
        before = hash_blocks(tensor)
        assert hash_blocks(-tensor) != before
        for step in (1, 2, 4):
            flipped = tensor.clone()
            flipped[: 4 * step : step] *= -1
            assert hash_blocks(flipped) != before
    numbers = torch.arange(1 << 12)
    assert hash_blocks(numbers.flip(0)) != hash_blocks(numbers)
    assert hash_blocks(numbers.roll(1)) != hash_blocks(numbers)


def test_only_the_blocks_that_changed_have_other_hashes():
    tensor = torch.zeros(3 * BLOCK // 4 + 5)
    before = hash_blocks(tensor)
    tensor[BLOCK // 4 + 9] = 1
    after = hash_blocks(tensor)
    changed = [
        number for number in range(4) if before[8 * number : 8 * number + 8] != after[8 * number : 8 * number + 8]
    ]
    assert changed == [1]
    assert block_of(tensor, 3).numel() == 20


def test_difference_has_largest_gap_and_number_of_elements():
    reference = torch.zeros(100, dtype=torch.bfloat16)
    changed = reference.clone()
    changed[3], changed[4], changed[5], changed[6] = 0.5, -2.0, math.nan, -0.0
    assert compare_block(changed.view(torch.uint8), reference.view(torch.uint8), changed.dtype) == (2.0, 3, 100, 1)
    same = torch.tensor([math.nan, math.inf, 1.0])
    assert compare_block(same.view(torch.uint8), same.view(torch.uint8), same.dtype) == (0.0, 0, 3, 0)
    flags = torch.tensor([True, False]), torch.tensor([True, True])
    assert compare_block(flags[0].view(torch.uint8), flags[1].view(torch.uint8), torch.bool) == (1.0, 1, 2, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_large_integers_that_float64_would_round_to_one_number_differ(dtype):
    first, second = (torch.tensor([5, 2**60 + offset]).to(dtype).view(torch.uint8) for offset in (0, 1))
    assert compare_block(first, second, dtype) == (1.0, 1, 2, 0)
    assert compare_block(first, first, dtype) == (0.0, 0, 2, 0)
    smaller = torch.tensor([2, 2**60]).to(dtype).view(torch.uint8)
    assert compare_block(first, smaller, dtype) == (3.0, 1, 2, 0)


def test_differences_of_small_floats_are_measured():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        first, second = torch.tensor([1.0, 2.0, math.nan]).to(dtype), torch.tensor([1.0, 4.0, math.nan]).to(dtype)
        assert compare_block(first.view(torch.uint8), second.view(torch.uint8), dtype) == (2.0, 1, 3, 0)
        assert hash_blocks(first) == hash_blocks(first.clone()) != hash_blocks(second)
    packed = [torch.tensor(values, dtype=torch.uint8) for values in ([1, 2, 3], [1, 2, 4])]
    largest, *counts = compare_block(*packed, torch.float4_e2m1fn_x2)
    assert math.isnan(largest) and counts == [1, 3, 0]


def test_unreadable_tensors_are_refused():
    with pytest.raises(InvalidArgument, match="dense tensor"):
        hash_blocks(torch.eye(3).to_sparse())
    with pytest.raises(InvalidArgument, match="meta device"):
        hash_blocks(torch.empty(3, device="meta"))
