from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.format.manifest import Chunk, Manifest, StoredFile, StoredTensor
from rankbook.checkpoint.load_plan import WantedChunk, plan_read
from tests.checkpoint.boxes import cuts, replaced, shapes


def within(offset, shape):
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def store(tensors, order="C"):
    """Store arrays in the boxes that they are cut into; return two files' bytes and their manifest."""
    files, described = [bytearray(), bytearray()], {}
    for key, (array, boxes) in tensors.items():
        chunks = []
        for number, (offset, shape) in enumerate(boxes):
            file, part = number % 2, array[within(offset, shape)]
            strides = None
            if order == "F":
                strides = tuple(math.prod(shape[:axis]) for axis in range(len(shape)))
            start, data = len(files[file]), part.tobytes(order=order)
            files[file] += b"envelope" + data + b"end"
            chunks.append(
                Chunk(offset, shape, file, start, len(data) + 11, start + 8, len(data), (), None, number % 3, strides)
            )
        described[key] = StoredTensor(array.dtype.name, array.shape, tuple(chunks))
    listed = tuple(StoredFile(f"__RANK_{at}.distcp", len(item), None, at) for at, item in enumerate(files))
    manifest = Manifest(step=1, world_size=2, tensors=described, objects={}, files=listed)
    return {file.name: bytes(element) for file, element in zip(listed, files, strict=True)}, manifest


def apply(plan, requests, files, *, gap=0, most=None):
    """The wanted chunks, copied by hand; only bytes in the runs are there to be copied."""
    filled = [np.full(item.shape, 77, item.dtype) for item in requests]
    for position in plan.zeros:
        filled[position][...] = 0
    for chunk in plan.chunks:
        data = bytearray(b"\xee" * chunk.chunk.nbytes)
        for start, length in chunk.runs(gap):
            begin = chunk.chunk.data + start
            data[start : start + length] = files[chunk.file][begin : begin + length]
        for read_item in chunk.reads:
            for read in chunk.split(read_item, most) if most else [read_item]:
                start, stop = chunk.span(read)
                source = np.ndarray(
                    read.shape,
                    chunk.dtype,
                    bytes(data[start:stop]),
                    0,
                    [step * chunk.itemsize for step in chunk.strides],
                )
                filled[read.wanted][within(read.target, read.shape)] = source
    return filled


@st.composite
def arrays(draw, **limits):
    shape = draw(shapes(**limits))
    dtype = draw(st.sampled_from(["float32", "int8", "complex64", "float64"]))
    return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(dtype)


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from("CF"), st.integers(0, 40), st.sampled_from([None, 1, 16, 64]))
def test_any_grid_is_read_from_any_grid(data, order, gap, most):
    tensors, requests, truth = {}, [], []
    for number in range(data.draw(st.integers(1, 3))):
        array = data.draw(arrays())
        tensors[f"t/{number}"] = (array, data.draw(cuts(array.shape)))
        for offset, shape in data.draw(cuts(array.shape)):
            requests.append(WantedChunk(f"t/{number}", array.dtype.name, array.shape, offset, shape))
            truth.append(array[within(offset, shape)])
    files, manifest = store(tensors, order)
    plan = plan_read(requests, manifest)
    assert (plan.zeros, plan.unexpected, plan.mismatches) == ([], [], [])
    assert plan.nbytes == sum(part.nbytes for part in truth)
    for loaded, part in zip(apply(plan, requests, files, gap=gap, most=most), truth, strict=True):
        np.testing.assert_array_equal(loaded, part)
    assert len({(item.key, item.chunk.offset) for item in plan.chunks}) == len(plan.chunks)
    assert [(chunk.file, chunk.chunk.data) for chunk in plan.chunks] == sorted(
        (element.file, element.chunk.data) for element in plan.chunks
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_another_global_shape_is_read_where_both_have_elements_and_zero_elsewhere(data):
    array = data.draw(arrays(most=5))
    files, manifest = store({"w": (array, data.draw(cuts(array.shape)))})
    other = tuple(data.draw(st.integers(1, 7)) for _ in array.shape)
    padded = np.zeros(other, array.dtype)
    overlap = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, other, strict=True))
    padded[overlap] = array[overlap]
    boxes = data.draw(cuts(other))
    requests = [WantedChunk("w", array.dtype.name, other, *box, allow_shape_mismatch=True) for box in boxes]
    for loaded, item in zip(apply(plan_read(requests, manifest), requests, files), boxes, strict=True):
        np.testing.assert_array_equal(loaded, padded[within(*item)])
    if other != array.shape:
        strict = [element._replace(allow_shape_mismatch=False) for element in requests]
        assert [mismatch.wanted for mismatch in plan_read(strict, manifest).mismatches] == list(range(len(requests)))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 100))
def test_runs_hold_the_wanted_bytes_and_between_gaps_no_others(data, gap):
    array = data.draw(arrays())
    _, manifest = store({"w": (array, [((0,) * array.ndim, array.shape)])})
    several = data.draw(cuts(array.shape)) + data.draw(cuts(array.shape))
    boxes = data.draw(st.lists(st.sampled_from(several), min_size=1, max_size=4))
    plan = plan_read([WantedChunk("w", array.dtype.name, array.shape, *item) for item in boxes], manifest)
    needed = np.zeros(array.nbytes, bool)
    places = np.arange(array.nbytes).reshape(*array.shape, array.itemsize)
    for box in boxes:
        needed[places[within(*box)].ravel()] = True
    read, exact = np.zeros(array.nbytes, bool), plan.chunks[0].runs()
    for start, length in exact:
        read[start : start + length] = True
    np.testing.assert_array_equal(read, needed)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(exact))
    merged = [exact[0]]
    for start, length in exact[1:]:
        last, size = merged[-1]
        if start - (last + size) <= gap:
            merged[-1] = (last, start + length - last)
        else:
            merged.append((start, length))
    assert plan.chunks[0].runs(gap) == merged


def test_a_contiguous_slice_of_a_chunk_is_one_range():
    array = np.zeros((1024, 64), np.float32)
    _, manifest = store({"w": (array, [((0, 0), (1024, 64))])})
    rows = plan_read([WantedChunk("w", "float32", (1024, 64), (16, 0), (8, 64))], manifest)
    assert rows.chunks[0].runs() == [(16 * 64 * 4, 8 * 64 * 4)]
    columns = plan_read([WantedChunk("w", "float32", (1024, 64), (0, 32), (1024, 8))], manifest)
    assert len(columns.chunks[0].runs()) == 1024
    assert columns.chunks[0].runs(gap=56 * 4) == [(128, 1023 * 256 + 32)]
    halves = [WantedChunk("w", "float32", (1024, 64), (0, at), (1024, 32)) for at in (0, 32)]
    assert plan_read(halves, manifest).chunks[0].runs() == [(0, array.nbytes)]


def test_ranges_that_lie_in_others_are_read_once():
    array = np.zeros(100, np.int8)
    _, manifest = store({"w": (array, [((0,), (100,))])})
    requests = [WantedChunk("w", "int8", (100,), *item) for item in (((0,), (90,)), ((10,), (5,)), ((50,), (20,)))]
    assert plan_read(requests, manifest).chunks[0].runs() == [(0, 90)]


@pytest.mark.parametrize("most", [1, 100, 256, 1000, 5000, 10**9])
def test_parts_span_no_more_than_asked_unless_they_are_one_element(most):
    array = np.arange(7 * 9 * 11, dtype=np.float32).reshape(7, 9, 11)
    files, manifest = store({"w": (array, [((0, 0, 0), (7, 9, 11))])}, "F")
    requests = [WantedChunk("w", "float32", array.shape, (1, 2, 3), (5, 6, 7))]
    plan = plan_read(requests, manifest)
    chunk_read = plan.chunks[0]
    for part in chunk_read.split(chunk_read.reads[0], most):
        start, stop = chunk_read.span(part)
        assert stop - start <= most or math.prod(part.shape) == 1
    np.testing.assert_array_equal(apply(plan, requests, files, most=most)[0], array[1:6, 2:8, 3:10])


def test_a_scalar_an_empty_chunk_and_prepended_axes():
    scalar, none, layers = np.float32(3).reshape(()), np.zeros((0, 4), np.int8), np.arange(24).reshape(4, 6)
    stored = {
        "scalar": (scalar, [((), ())]),
        "none": (none, [((0, 0), (0, 4))]),
        "layers": (layers, [((0, 0), (0, 6)), *(((row, 0), (1, 6)) for row in range(4))]),
    }
    files, manifest = store(stored)
    requests = [
        WantedChunk("scalar", "float32", (), (), ()),
        WantedChunk("none", "int8", (0, 4), (0, 0), (0, 4)),
        WantedChunk("layers", "int64", (4, 6), (4, 0), (0, 6)),
        WantedChunk("layers", "int64", (4, 6), (2, 3), (1, 3)),  # one row of a stack, of local shape (3,)
    ]
    plan = plan_read(requests, manifest)
    assert plan.zeros == plan.mismatches == []
    loaded = apply(plan, requests, files)
    assert loaded[0] == 3
    assert loaded[3].tolist() == [[15, 16, 17]]
    assert len(plan.chunks) == 2


def test_mismatches_name_the_key_and_both_values():
    array = np.zeros((4, 4), np.float32)
    _, manifest = store({"w": (array, [((0, 0), (4, 4))])})
    right = WantedChunk("w", "float32", (4, 4), (0, 0), (4, 4))
    requests = [
        right,
        right._replace(key="v"),
        right._replace(dtype="bfloat16"),
        right._replace(global_shape=(8, 4)),
        right._replace(global_shape=(4, 4, 1), offset=(0, 0, 0), shape=(4, 4, 1), allow_shape_mismatch=True),
        right._replace(offset=(1, 0)),
    ]
    plan = plan_read(requests, manifest)
    assert plan.unexpected == [1]
    output = {mismatch.wanted: mismatch.what for mismatch in plan.mismatches}
    assert sorted(output) == [2, 3, 4, 5]
    assert all(item.startswith("tensor 'w': ") for item in output.values())
    assert "float32" in output[2] and output[2].endswith(
        "bfloat16 was requested; to convert it, pass cast=True to load()"
    )
    other = plan_read(requests, manifest, dtype_hint="ask again")
    assert other.mismatches[0].what.endswith("bfloat16 was requested; ask again")
    assert "(4, 4) in the checkpoint, but (8, 4)" in output[3]
    assert "(4, 4) in the checkpoint, but (4, 4, 1)" in output[4]
    assert "[1:5, 0:4] is outside" in output[5]
    cast = plan_read(requests, manifest, cast=True)
    assert [element.wanted for element in cast.mismatches] == [3, 4, 5]
    assert {read.wanted for read in cast.chunks[0].reads} == {0, 2}
    assert cast.chunks[0].dtype == "float32"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_tensor_whose_stored_chunks_do_not_fill_it_is_never_read(data):
    array = data.draw(arrays())
    boxes = data.draw(cuts(array.shape))
    at = data.draw(st.integers(0, len(boxes) - 1))
    change = data.draw(st.sampled_from(["lost", "twice", "smaller"]))
    offset, shape = boxes[at]
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if change == "smaller" and axes:
        boxes[at] = (offset, replaced(shape, axes[0], shape[axes[0]] - 1))
    else:
        boxes[at : at + 1] = [boxes[at]] * 2 if change == "twice" else []
    _, manifest = store({"w": (array, boxes), "sound": (array, [((0,) * array.ndim, array.shape)])})
    request = WantedChunk("w", array.dtype.name, array.shape, (0,) * array.ndim, array.shape)
    plan = plan_read([request, request._replace(key="sound")], manifest)
    assert [chunk.key for chunk in plan.chunks] == ["sound"]
    assert "do not cover it exactly once: " in plan.mismatches[0].what
    assert not plan.mismatches[0].what.endswith("once: ")
