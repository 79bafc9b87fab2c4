"""Random streams: derived by hashing, found wherever a dataset has them, put back."""

# ruff: noqa: NPY002 - numpy's global state is one of the streams
from __future__ import annotations

import functools
import pickle
import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.runtime.global_streams import global_streams, python_memory
from rankbook.runtime.streams import MOST_ITEMS, Streams, find_generators, stream_seed

parts = st.integers(0, 2**32) | st.text(max_size=5)


@settings(max_examples=30)
@given(st.lists(st.lists(parts, max_size=4).map(tuple), unique=True, min_size=2, max_size=20))
def test_different_keys_have_different_streams(keys):
    assert len({stream_seed(*key) for key in keys}) == len(keys)


def test_a_stream_is_the_same_in_every_process_and_version():
    assert stream_seed(0, 1, 2, 3, "torch") % 10**12 == 889_344_788_592


def draw():
    """One number of each global stream; the normal ones leave a half behind in Python and in numpy."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


class Something:
    """Code that could draw."""


def test_what_is_drawn_depends_on_the_key_alone_and_all_is_put_back():
    streams, runs = Streams((Something(),)), []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        expected = [draw() for _ in range(6)]
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        inside, outside = [], []
        for number in range(6):
            outside.append(draw())
            saved = streams.begin((7, 0, number % 3))
            inside.append(draw())
            streams.end(saved)
        assert outside == expected
        assert inside[:3] == inside[3:]
        assert len({value for drawn in inside[:3] for value in drawn}) == 15
        runs.append(inside)
    assert runs[0] == runs[1]


def test_the_front_door_gives_the_same_promise_where_memory_is_not_as_expected(monkeypatch):
    monkeypatch.setattr(global_streams(), "_memory", None)
    test_what_is_drawn_depends_on_the_key_alone_and_all_is_put_back()


def test_pythons_memory_is_where_it_is_expected_on_this_interpreter():
    source = random.Random(3)
    for _ in range(5):
        source.random()
    memory = python_memory(source)
    assert memory is not None
    seen = bytes(memory)
    first = source.random()
    memory[:] = seen
    assert source.random() == first
    assert python_memory(random.SystemRandom()) is None


def test_a_batch_may_be_read_while_another_one_is_read():
    streams = Streams((Something(),))
    outer = streams.begin((0, 0, 0))
    expected = draw() + draw()
    streams.end(outer)
    outer = streams.begin((0, 0, 0))
    found = draw()
    inner = streams.begin((0, 0, 1))
    assert set(draw()).isdisjoint(expected)
    streams.end(inner)
    assert found + draw() == expected
    streams.end(outer)


def test_numpys_own_state_may_be_of_another_kind():
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        streams = Streams((Something(),))
        first = np.random.rand()
        saved = streams.begin((0, 0, 0))
        np.random.rand()
        streams.end(saved)
        second = np.random.rand()
        np.random.set_bit_generator(np.random.PCG64(1))
        assert [np.random.rand(), np.random.rand()] == [first, second]
    finally:
        np.random.set_bit_generator(bits)


class Holder:
    shared = np.random.default_rng(1)

    def __init__(self):
        self.numpy = np.random.default_rng(2)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(4)
        self.nested = {"transforms": [Slotted(torch.Generator())]}
        self.call = functools.partial(function_with_default, other=torch.Generator())
        inner = random.Random(6)
        self.closure = lambda: inner.random() + 1
        self.again = self.python

    def __getitem__(self, index):
        return global_generator.random()


class Slotted:
    __slots__ = ("torch",)

    def __init__(self, generator):
        self.torch = generator


default = np.random.default_rng(5)
global_generator = np.random.default_rng(7)


def function_with_default(rng=default, other=None):
    return rng, other


def test_generators_are_found_in_all_the_places_where_people_keep_them():
    found = dict(find_generators((Holder(),)))
    ends = {path.split(".")[-1] for path in found}
    assert len(found) == 9
    assert {"shared", "numpy", "legacy", "python", "torch", "other", "inner", "global_generator"} <= ends
    assert [path for path, _ in find_generators((Holder(),))] == list(found)
    assert list(find_generators(([random.Random()] * (MOST_ITEMS + 1),))) == []


def test_held_generators_draw_from_their_own_streams_and_are_put_back():
    holder = Holder()
    streams = Streams((holder,))

    def draws():
        return [
            holder.numpy.random(),
            holder.legacy.rand(),
            holder.python.random(),
            torch.rand((), generator=holder.nested["transforms"][0].torch).item(),
            holder.shared.random(),
            holder[0],
        ]

    saved = streams.begin((1, 2, 3))
    inside = draws()
    streams.end(saved)
    assert len(set(inside)) == 6
    other = Holder()
    assert holder.numpy.random() == other.numpy.random() and holder.python.random() == other.python.random()
    saved = streams.begin((1, 2, 3))
    assert draws() == inside
    streams.end(saved)


def test_a_generator_that_is_made_late_is_found():
    holder = Something()
    streams = Streams((holder,), keep=False)
    streams.begin((0, 0, 0))
    holder.rng = np.random.default_rng()
    streams.begin((0, 0, 1))
    first = holder.rng.random()
    streams.begin((0, 0, 1))
    assert holder.rng.random() == first


def test_a_generator_that_is_somebody_elses_is_left_alone():
    holder = Something()
    holder.rng = torch.Generator().manual_seed(1)
    Streams((holder,), skip=(holder.rng,)).begin((0, 0, 0))
    assert torch.equal(holder.rng.get_state(), torch.Generator().manual_seed(1).get_state())


def test_streams_travel_without_what_they_found():
    streams = Streams((Slotted(random.Random(1)),))
    streams.begin((0, 0, 0))
    back = pickle.loads(pickle.dumps(streams))
    assert back._held == [] and type(back.roots[0]) is Slotted
