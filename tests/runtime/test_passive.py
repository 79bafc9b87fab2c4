"""What is proven to draw no random number, and above all what is not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from rankbook.runtime.passive import MOST_ITEMS, cannot_draw, is_plain

SCALE = 255


def noisy(x):
    return x + random.random()


class Held(Dataset):
    """Data in memory, as most people's first dataset has it."""

    def __init__(self):
        self.x, self.y, self.names = torch.ones(4, 2), np.arange(4), ["a", "b", "c", "d"]
        self.augment = noisy
        self.rng = np.random.default_rng(1)

    def __len__(self):
        return len(self.x)


def of(getitem, **held):
    """A `Held` with this `__getitem__`, and these attributes."""
    made = type("Mine", (Held,), {"__getitem__": getitem})()
    vars(made).update(held)
    return made


def branches(self, index):
    x = self.x[index]
    if index % 2 == 0:
        x = x / SCALE
    return x


def converts(self, index):
    return torch.as_tensor(self.x[index], dtype=torch.float64).float(), int(self.y[index]), f"{self.names[index]}!"


def calls_a_global(self, index):
    return noisy(self.x[index])


def calls_random(self, index):
    return self.x[index] + random.random()


def calls_torch(self, index):
    return self.x[index] + torch.rand(2)


def loops(self, index):
    return [each * index for each in self.names]


def closes_over(function):
    return lambda self, index: function(self.x[index])


def rebinds(self, index):
    self = self.augment
    return self(index)


def defaults(self, index, draw=random.random):
    return draw()


PROVEN = {
    "a pair": lambda self, index: (self.x[index], self.y[index]),
    "nested": lambda self, index: {"in": {"x": self.x[index], "y": [self.y[index]] * 2}, "name": self.names[index]},
    "arithmetic": lambda self, index: self.x[index % 2] * 2 + SCALE,
    "conversions": converts,
    "a branch": branches,
}

NOT_PROVEN = {
    "a call of its own attribute": lambda self, index: self.augment(self.x[index]),
    "a generator of its own": lambda self, index: self.x[index] + self.rng.random(),
    "its own method": lambda self, index: self.__len__() + index,
    "its own len": lambda self, index: len(self) + index,
    "itself, given away": lambda self, index: [self, index],
    "a global function": calls_a_global,
    "the random module": calls_random,
    "torch's random functions": calls_torch,
    "a tensor's random method": lambda self, index: self.x[index].normal_(),
    "a tensor's random method with a harmless name beside it": lambda self, index: self.x.bernoulli(self.y[index]),
    "numpy's": lambda self, index: self.x[index] + np.random.default_rng().random(),
    "an import": lambda self, index: self.x[index] + __import__("random").random(),
    "a loop": loops,
    "a closure": closes_over(noisy),
    "another name for itself": rebinds,
    "a default": defaults,
    "what it does not have": lambda self, index: self.missing[index],
}


@pytest.mark.parametrize("getitem", PROVEN.values(), ids=PROVEN)
def test_a_sample_looked_up_in_memory_is_known_to_draw_nothing(getitem):
    dataset = of(getitem)
    assert cannot_draw(dataset)
    dataset[1]


@pytest.mark.parametrize("getitem", NOT_PROVEN.values(), ids=NOT_PROVEN)
def test_what_could_reach_a_generator_is_not(getitem):
    assert not cannot_draw(of(getitem))


def pair(self, index):
    return self.x[index], self.y[index]


class Sneaky(torch.Tensor):
    """A tensor that may do anything when it is indexed."""


cyclic: list = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    "held",
    [
        [noisy],
        {"f": noisy},
        np.array([noisy], dtype=object),
        torch.ones(2).as_subclass(Sneaky),
        Held(),
        cyclic,
        [0] * (MOST_ITEMS + 1),
    ],
    ids=["list", "dict", "objects", "subclass", "dataset", "cycle", "long"],
)
def test_data_that_is_more_than_data_proves_nothing(held):
    assert not is_plain(held)
    assert not cannot_draw(of(pair, x=held))


def test_names_that_the_class_has_an_own_idea_of_prove_nothing():
    made = of(pair)
    type(made).x = property(vars)
    assert not cannot_draw(made)
    made = of(pair)
    type(made).__getattr__ = lambda self, name: (self, name)
    assert not cannot_draw(made)
    made = of(pair)
    type(made).__getitems__ = lambda self, indices: [noisy(self.x[index]) for index in indices]
    assert not cannot_draw(made)


@pytest.mark.parametrize(
    ("thing", "passive"),
    [
        (TensorDataset(torch.ones(2)), True),
        (Subset(TensorDataset(torch.ones(2)), [0]), True),
        (ConcatDataset([TensorDataset(torch.ones(2)), [1, 2]]), True),
        (ConcatDataset([of(pair), of(calls_random)]), False),
        (default_collate, True),
        (Subset(of(calls_random), [0]), False),
        (type("Mine", (TensorDataset,), {})(torch.ones(2)), False),
        (lambda batch: batch, False),
        (pair, False),
    ],
)
def test_torchs_own_code_is_known(thing, passive):
    assert cannot_draw(thing) is passive
