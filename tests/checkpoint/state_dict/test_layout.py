"""Test boxes, grids and byte runs against NumPy's slicing."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.state_dict import layout
from rankbook.errors import CheckpointError


@st.composite
def boxes(draw, axes=3, most=6):
    """Draw a shape, and the start and shape of a slice in it, which may be empty."""
    shape = draw(st.lists(st.integers(0, most), max_size=axes).map(tuple))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, starts, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True))


def slices(start, shape):
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def test_a_scalar_has_one_element():
    assert (layout.shard_numel(()), layout.shard_numel((3, 0)), layout.shard_numel((2, 3))) == (1, 0, 6)


@given(boxes(axes=4, most=5), st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=100, deadline=None)
def test_byte_runs_are_the_bytes_of_the_slice(box, itemsize):
    stored, start, shape = box
    byte_numbers = np.arange(layout.shard_numel(stored)).repeat(itemsize).astype(np.int16)  # one number for each byte
    runs = layout.byte_runs(stored, start, shape, itemsize)
    read = [number for offset, length in runs for number in byte_numbers[offset : offset + length]]
    elements = np.arange(layout.shard_numel(stored)).reshape(stored)[slices(start, shape)].ravel()
    assert read == elements.repeat(itemsize).tolist()
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))
    assert all(offset % itemsize == length % itemsize == 0 for offset, length in runs)


@pytest.mark.parametrize(
    ("stored", "start", "shape", "runs"),
    [
        ((), (), (), [(0, 4)]),
        ((4, 8), (1, 0), (2, 8), [(32, 64)]),
        ((4, 8), (0, 0), (4, 8), [(0, 128)]),
        ((4, 8), (1, 2), (2, 3), [(40, 12), (72, 12)]),
        ((4, 1, 8), (1, 0, 0), (2, 1, 8), [(32, 64)]),
        ((1, 1, 8), (0, 0, 4), (1, 1, 4), [(16, 16)]),
        ((4, 8), (1, 2), (2, 0), []),
    ],
)
def test_a_contiguous_slice_is_one_run(stored, start, shape, runs):
    assert layout.byte_runs(stored, start, shape, 4) == runs


@pytest.mark.parametrize(("start", "shape"), [((3, 0), (2, 8)), ((-1, 0), (1, 8)), ((0,), (4,)), ((0, 0), (-1, 8))])
def test_slice_outside_the_shard_has_no_byte_runs(start, shape):
    with pytest.raises(CheckpointError, match=r"slice at .* is outside the array: "):
        layout.byte_runs((4, 8), start, shape, 4)


def test_a_column_of_a_large_matrix_takes_little_time():
    runs = layout.byte_runs((100_000, 64), (0, 3), (100_000, 1), 2)
    assert (len(runs), runs[:2], runs[-1]) == (100_000, [(6, 2), (134, 2)], (99_999 * 128 + 6, 2))


@pytest.mark.parametrize(
    ("rank_offsets", "prepended", "output"),
    [
        ([(-1, 0, 2)], 0, "axis -1"),
        ([(2, 0, 2)], 0, r"axis 2 of \(2, 0, 2\) is not within 0..1"),
        ([(3, 0, 2)], 1, "not within 0..2"),
        ([(0, -1, 2)], 0, "offset -1 is not within 0..1"),
        ([(0, 2, 2)], 0, "offset 2 is not within 0..1"),
        ([(0, 0, 0)], 0, "fragments must be >= 1, got 0"),
        ([(0, 0, 2), (0, 0, 2)], 0, "named twice"),
        ([(0, 0)], 0, r"invalid rank offset \(0, 0\): expected \(axis, offset, fragments\)"),
        ([], -1, "prepend_axis_num must be >= 0, got -1"),
    ],
)
def test_a_wrong_rank_offset_is_reported_with_its_numbers(rank_offsets, prepended, output):
    with pytest.raises(CheckpointError, match=output):
        layout.grid_from_ranks((4, 8), rank_offsets, prepended)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4),
    st.integers(0, 2),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_rank_offsets_are_valid_and_give_the_chunk_index(axes, prepended, data):
    sizes = [1 if axis < prepended else size for axis, (size, _) in enumerate(axes)] + [1] * (prepended - len(axes))
    counts = [count for _, count in axes] + [1] * (prepended - len(axes))
    chunk = tuple(data.draw(st.integers(0, count - 1)) for count in counts)
    local = tuple(sizes[prepended:])
    grid = layout.grid_from_ranks(local, list(zip(range(len(sizes)), chunk, counts, strict=True)), prepended)
    shape = (1,) * prepended + local
    assert layout.bounds_error(grid.global_shape, grid.offset, shape) == ""
    assert layout.fragments_error(grid.global_shape, grid.offset, shape, grid.fragments) == ""
    assert layout.chunk_index(grid.offset, local, prepended) == chunk
    assert layout.chunk_sizes(grid.global_shape, grid.fragments) == shape


def test_chunks_that_do_not_divide_are_rounded_down_when_asked():
    assert layout.chunk_sizes((10, 8), (4, 1), rounded=True) == (2, 8)
    with pytest.raises(CheckpointError, match=r"axis 0: 10 elements % 4 fragments = 2, not 0"):
        layout.chunk_sizes((10, 8), (4, 1))


@pytest.mark.parametrize(
    ("global_size", "start", "size", "count", "output"),
    [
        (10, 3, 3, 4, ""),  # 3, 3, 3, 1
        (10, 0, 2, 4, "10 elements in 4 fragments make chunks of 3, not 2"),
        (10, 9, 3, 3, "make chunks of 4, not 3"),
        (9, 9, 3, 3, "offset 9 / local size 3 = chunk index 3, expected < 3"),
        (0, 0, 0, 5, ""),
        (4, 0, 4, 0, "fragments must be >= 1, got 0"),
    ],
)
def test_fragments_agree_with_the_shapes(global_size, start, size, count, output):
    error = layout.fragments_error((global_size,), (start,), (size,), (count,))
    assert output in error
    assert bool(output) == bool(error)


def test_fragments_for_other_axes_are_reported():
    assert layout.fragments_error((4, 4), (0, 0), (4, 4), (1,)) == "axis_fragmentations has 1 elements for 2 axes"


@pytest.mark.parametrize(
    ("value", "length", "size", "result"),
    [(16, 2, 4, 8), (4, 2, 4, 2), (10, 2, 4, None), (0, 0, 0, 0), (3, 0, 0, None), (8, 0, 4, 0)],
)
def test_narrowing_shrinks_complete_chunks_only(value, length, size, result):
    assert layout.rescale(value, length, size) == result


cuts = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4)).flatmap(
        lambda cut: st.tuples(st.just(cut[0]), st.just(cut[1]), st.integers(0, cut[1] - 1))
    ),
    max_size=3,
)


def cut_by_hand(elements, factor, parts, index):
    pieces = [
        elements[at : at + -(-len(elements) // factor)]
        for at in range(0, len(elements), -(-len(elements) // factor) or 1)
    ]
    cuts = []
    for piece in pieces:
        size = -(-len(piece) // parts)
        cuts += piece[index * size : (index + 1) * size]
    return cuts


@given(st.integers(0, 24), cuts)
@settings(max_examples=200, deadline=None)
def test_a_run_of_cuts_is_what_cutting_lists_leaves(size, steps):
    remaining = list(range(size))
    # Where the factors are the parts of the later cuts, those were made first.
    is_made_in_reverse = [step[0] for step in steps] == [
        math.prod(later[1] for later in steps[number + 1 :]) for number in range(len(steps))
    ]
    for step in [(1, *step[1:]) for step in reversed(steps)] if is_made_in_reverse else steps:
        remaining = cut_by_hand(remaining, *step)
    result = layout.cut_range(size, steps)
    if not remaining:
        assert result == (size, 0)
    elif remaining == list(range(remaining[0], remaining[-1] + 1)):
        assert result == (remaining[0], len(remaining))
    else:
        assert result is None


def test_a_strided_cut_before_a_plain_one_is_one_run():
    """Cut the rows of a tensor-parallel layer that is sharded again: 7 rows, first in 2, then each part in 2."""
    runs = [layout.cut_range(7, [(2, 2, data), (1, 2, tensor)]) for data in range(2) for tensor in range(2)]
    assert runs == [(0, 2), (4, 2), (2, 2), (6, 1)]
    assert layout.cut_range(8, [(2, 2, 0)]) is None


def test_parts_of_fsdp_over_tensor_parallelism_are_those_that_torch_makes_also_if_they_are_uneven():
    for size, data, tensor in itertools.product((*range(1, 20), 50257, 128257), range(1, 6), range(1, 5)):
        axis = torch.arange(size)
        for row, column in itertools.product(range(data), range(tensor)):
            piece = _chunk(axis, tensor, column)
            expected = _chunk(piece, data, row)
            offset, length = layout.cut_range(size, [(tensor, data, row), (1, tensor, column)])
            assert torch.equal(axis[offset : offset + length], expected), (size, data, tensor, row, column)


def _chunk(values, parts, index):
    """Return one of the parts that torch makes; those that it leaves out are empty."""
    chunks = values.chunk(parts)
    return chunks[index] if index < len(chunks) else values[:0]
