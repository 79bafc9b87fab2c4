"""Random numbers of a batch: seeded from a hash, in every generator that a dataset holds, and put back."""

# ruff: noqa: NPY002 - numpy's global state is one of the streams
from __future__ import annotations

import contextlib
import functools
import pickle
import random
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate

from rankbook.runtime.data import rng as streams
from rankbook.runtime.data.rng import MOST_ITEMS, BatchRng, find_generators, stream_seed

parts = st.integers(0, 2**32) | st.text(max_size=5)


@settings(max_examples=30)
@given(st.lists(st.lists(parts, max_size=4).map(tuple), unique=True, min_size=2, max_size=20))
def test_different_keys_have_different_streams(keys):
    assert len({stream_seed(*key) for key in keys}) == len(keys)


def test_a_stream_is_the_same_in_every_process_and_version():
    assert stream_seed(0, 1, 2, 3, "torch") % 10**12 == 889_344_788_592


def draw():
    """Draw one number from every global stream. The normal ones leave a second value behind in Python and in numpy."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


class Something:
    """Code that could draw."""


def test_draws_depend_on_the_key_only_and_states_are_restored():
    rng, runs = BatchRng(Something()), []
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
            with rng.seeded(7, 0, number % 3):
                inside.append(draw())
        assert outside == expected
        assert inside[:3] == inside[3:]
        assert len({value for drawn in inside[:3] for value in drawn}) == 15
        runs.append(inside)
    assert runs[0] == runs[1]


def test_the_states_are_put_back_after_an_error():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with contextlib.suppress(LookupError), BatchRng(Something()).seeded(0, 0, 0):
        draw()
        raise LookupError
    assert draw() == expected


def test_worker_seeds_without_restoring_states(monkeypatch):
    monkeypatch.setattr(streams, "get_worker_info", object)
    rng = BatchRng(Something())
    with rng.seeded(0, 0, 0):
        first = draw()
        following = draw()
    with rng.seeded(0, 0, 0):
        assert draw() == first
    assert draw() == following


def test_a_batch_may_be_read_within_another_one():
    rng = BatchRng(Something())
    with rng.seeded(0, 0, 0):
        expected = draw() + draw()
    with rng.seeded(0, 0, 0):
        drawn = draw()
        with rng.seeded(0, 0, 1):
            assert set(draw()).isdisjoint(expected)
        assert drawn + draw() == expected


def test_numpys_global_generator_may_be_of_another_kind():
    bit_generator = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        first = np.random.randn()
        with BatchRng(Something()).seeded(0, 0, 0):
            np.random.randn()
        second = np.random.randn()
        np.random.set_bit_generator(np.random.PCG64(1))
        assert [np.random.randn(), np.random.randn()] == [first, second]
    finally:
        np.random.set_bit_generator(bit_generator)


def test_a_dataset_may_seed_the_global_generators_itself():
    with BatchRng(Something()).seeded(0, 0, 0):
        np.random.seed(3)
        random.seed(3)
        drawn = [np.random.rand(), random.random()]
    assert drawn == [np.random.RandomState(3).rand(), random.Random(3).random()]


def test_torch_code_that_draws_nothing_is_run_directly(monkeypatch):
    def fail(*_):
        raise AssertionError("seeded")

    monkeypatch.setattr(streams, "stream_seed", fail)
    with BatchRng(TensorDataset(torch.ones(2)), default_collate).seeded(0, 0, 0):
        pass
    with pytest.raises(AssertionError, match="seeded"), BatchRng(Subset(Something(), [0])).seeded(0, 0, 0):
        pass


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
keyword_default = np.random.default_rng(8)
global_generator = np.random.default_rng(7)


def function_with_default(rng=default, other=None, *, keyword=keyword_default):
    return rng, other, keyword


def test_generators_are_found_in_attributes_containers_and_closures():
    generators = dict(find_generators(Holder()))
    ends = {path.split(".")[-1] for path in generators}
    assert len(generators) == 10
    named = {"shared", "numpy", "legacy", "python", "torch", "other", "inner", "keyword", "global_generator"}
    assert named <= ends
    assert [path for path, _ in find_generators(Holder())] == list(generators)


TRANSFORMS = {"train": [Slotted(torch.Generator())]}
TRANSFORM = Slotted(np.random.default_rng(9))
MANY = [random.Random(number) for number in range(MOST_ITEMS + 2)]
HELPERS = types.ModuleType("helpers_of_a_person")
HELPERS.rng = np.random.default_rng(4)


def draw_from_the_module():
    return [global_generator.random() for _ in range(2)]


class UsesGlobals:
    def __getitem__(self, index):
        return draw_from_the_module(), TRANSFORMS["train"], TRANSFORM, HELPERS.rng, MANY[index]


def test_generators_are_found_that_the_code_names():
    generators = [value for _, value in find_generators(UsesGlobals())]
    expected = [global_generator, TRANSFORMS["train"][0].torch, TRANSFORM.torch, HELPERS.rng, *MANY]
    assert {id(value) for value in expected} <= {id(value) for value in generators}


def test_a_long_list_of_data_is_not_walked():
    assert list(find_generators(["text"] * 100_000, dict.fromkeys(range(100_000)))) == []


def test_a_search_that_ends_early_says_so():
    def nest(depth):
        return [] if depth == 0 else [nest(depth - 1) for _ in range(30)]

    rng = BatchRng(UsesGlobals(), {"tree": nest(3)})
    with pytest.warns(UserWarning, match="ended after 20,000 objects"), rng.seeded(0, 0):
        pass


def test_a_generator_that_is_made_in_the_first_batch_draws_as_the_others():
    class Lazy:
        rng = None

        def read(self, _):
            self.rng = self.rng or np.random.default_rng(5)
            return self.rng.random()

    def drawn(number):
        dataset = Lazy()
        rng = BatchRng(dataset)
        return [rng.read(dataset.read, None, 0, 0, index) for index in (number, 7)]

    first, second = drawn(1), drawn(2)
    assert first[0] != second[0] and first[1] == second[1]
    assert np.random.default_rng(5).random() not in {*first, *second}
    assert drawn(1) == first


def test_held_generators_are_seeded_apart_and_put_back():
    holder = Holder()
    rng = BatchRng(holder)

    def draws():
        return [
            holder.numpy.random(),
            holder.legacy.rand(),
            holder.python.random(),
            torch.rand((), generator=holder.nested["transforms"][0].torch).item(),
            holder.shared.random(),
            holder[0],
        ]

    with rng.seeded(1, 2, 3):
        inside = draws()
    assert len(set(inside)) == 6
    other = Holder()
    assert holder.numpy.random() == other.numpy.random() and holder.python.random() == other.python.random()
    with rng.seeded(1, 2, 3):
        assert draws() == inside


def test_a_generator_that_is_made_late_is_found():
    holder = Something()
    rng = BatchRng(holder)
    with rng.seeded(0, 0, 0):
        holder.rng = np.random.default_rng()
    with rng.seeded(0, 0, 1):
        first = holder.rng.random()
    with rng.seeded(0, 0, 1):
        assert holder.rng.random() == first
    holder.rng = np.random.default_rng()
    rng.search_again()
    with rng.seeded(0, 0, 1):
        assert holder.rng.random() == first


def test_skipped_generator_is_not_seeded():
    holder = Something()
    holder.rng = torch.Generator().manual_seed(1)
    with BatchRng(holder, skip=(holder.rng,)).seeded(0, 0, 0):
        assert torch.equal(holder.rng.get_state(), torch.Generator().manual_seed(1).get_state())


def test_pickle_omits_discovered_generators():
    rng = BatchRng(Slotted(random.Random(1)))
    with rng.seeded(0, 0, 0):
        pass
    back = pickle.loads(pickle.dumps(rng))
    assert back._generators == [] and type(back._roots[0]) is Slotted
