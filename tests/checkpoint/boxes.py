"""Random global shapes, cut into boxes: regular grids, uneven grids, and cuts that no grid has."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st


@st.composite
def shapes(draw, most=6, axes=3):
    return tuple(draw(st.lists(st.integers(1, most), max_size=axes)))


@st.composite
def cuts(draw, shape):
    """Return boxes (offset, shape) that fill `shape` exactly once, in the order of their offsets."""
    kind = draw(st.sampled_from(["regular", "uneven", "irregular"]))
    if kind == "irregular":
        boxes = [((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 5))):
            at = draw(st.integers(0, len(boxes) - 1))
            offset, extent = boxes[at]
            axes = [axis for axis, size in enumerate(extent) if size > 1]
            if not axes:
                continue
            axis = draw(st.sampled_from(axes))
            size = draw(st.integers(1, extent[axis] - 1))
            boxes[at] = (offset, replaced(extent, axis, size))
            boxes.append((replaced(offset, axis, offset[axis] + size), replaced(extent, axis, extent[axis] - size)))
        return sorted(boxes)
    edges = []
    for size in shape:
        if kind == "regular":
            step = draw(st.sampled_from([step for step in range(1, size + 1) if size % step == 0]))
            edges.append(list(range(0, size + 1, step)))
        else:
            inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
            edges.append([0, *sorted(inner), size])
    axes = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*axes)]


def replaced(values, at, value):
    return (*values[:at], value, *values[at + 1 :])
