"""A batch is what torch makes of it, wherever its large tensors lie."""

from __future__ import annotations

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from rankbook.runtime.comm.tree import leaves
from rankbook.runtime.data.batch_reader import MapReader
from rankbook.runtime.data.dispatcher import Collate, placing
from rankbook.runtime.data.frames import LARGE

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - as people write them


class Rooms:
    """Memory that remembers who asked for how much."""

    def __init__(self):
        self.given = []

    def __call__(self, size):
        self.given.append(torch.empty(size, dtype=torch.uint8))
        return self.given[-1]


def large(value, kind=torch.float32):
    return torch.full((LARGE,), value, dtype=kind)


def nowhere(size):
    return None


def collated(items, room):
    made = Collate()
    made.room = room
    return made(items)


BATCHES = [
    [large(1.0), large(2.0)],
    [
        {"x": large(1), "small": torch.ones(2), "n": 3, "word": "a"},
        {"x": large(2), "small": torch.ones(2), "n": 4, "word": "b"},
    ],
    [(large(True, torch.bool), [large(1, torch.bfloat16)]), (large(False, torch.bool), [large(2, torch.bfloat16)])],
    [Pair(np.full(LARGE, 1.5), 2), Pair(np.full(LARGE, 2.5), 3)],
    [large(1.0).reshape(2, -1).t(), large(2.0).reshape(2, -1).t()],
    [large(1.0), large(2.0, torch.float64)],
    [torch.ones(3), torch.ones(3)],
]


@pytest.mark.parametrize("items", BATCHES)
def test_it_is_the_batch_that_torch_makes(items):
    for room in (None, nowhere, Rooms()):
        found, expected = collated(items, room), default_collate(items)
        pairs = list(zip(leaves(found), leaves(expected), strict=True))
        assert type(found) is type(expected) and len(pairs) > 0
        for (where, one), (place, other) in pairs:
            assert where == place and type(one) is type(other)
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
            else:
                assert one == other


def test_large_tensors_lie_in_the_room_that_was_given():
    rooms = Rooms()
    found = collated([{"x": large(1), "y": torch.ones(2)}, {"x": large(2), "y": torch.ones(2)}], rooms)
    assert [each.numel() for each in rooms.given] == [found["x"].nbytes]
    assert found["x"].data_ptr() == rooms.given[0].data_ptr()


@pytest.mark.parametrize(
    "items",
    [
        [large(1.0).requires_grad_(), large(2.0)],
        [large(1.0), large(2.0, torch.float64)],
        [torch.nn.Parameter(large(1.0)), torch.nn.Parameter(large(2.0))],
        [torch.ones(2), torch.ones(2)],
    ],
)
def test_whatever_is_not_plain_is_left_to_torch(items):
    rooms = Rooms()
    found = collated(items, rooms)
    assert not rooms.given
    assert found.requires_grad == any(each.requires_grad for each in items)


def test_tensors_that_do_not_fit_raise_as_they_do_in_torch():
    with pytest.raises(RuntimeError, match="equal size"):
        collated([large(1.0), torch.ones(LARGE + 1)], Rooms())


def test_a_function_of_a_person_s_own_is_left_alone():
    assert placing(MapReader([1], list)) is None
    fetch = MapReader([1], default_collate)
    made = placing(fetch)
    assert made is placing(fetch)
    made.room = Rooms()
    assert pickle.loads(pickle.dumps(fetch))._collate.room is None  # memory is this process's
    assert DataLoader([1]).collate_fn is default_collate
