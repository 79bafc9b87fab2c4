"""Test which entries a rank lists for a check: what is in containers, and what cannot be compared by name."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rankbook.rank.inspect.state_inventory import drops, hash_state


def entries(**variables: object) -> dict[str, str]:
    """Return the entries of all variables by key: the value in words, or the shape of a tensor."""
    hashes = hash_state(variables, tuple(variables))
    assert not hashes.missing
    return {entry.key: entry.value or str(entry.shape) for entry in hashes.entries}


def unreadable(**variables: object) -> dict[str, str]:
    return hash_state(variables, tuple(variables)).unreadable


def test_numbers_of_numpy_are_compared_as_numbers_of_python():
    assert entries(x={"lr": numpy.float64(0.5)}) == entries(x={"lr": 0.5}) == {"x.lr": "0.5"}
    assert entries(x=numpy.int32(3)) == {"x": "3"}
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = numpy.float64(0.25)
    assert entries(optimizer=optimizer)["optimizer.group 0.lr"] == "0.25"


class Pair(NamedTuple):
    first: int
    second: torch.Tensor


def test_containers_of_all_kinds_are_compared():
    assert entries(x=OrderedDict(a=1)) == {"x.a": "1"}
    assert entries(x=Pair(1, torch.zeros(2))) == {"x.0": "1", "x.1": "(2,)"}
    assert entries(x={"b", "a"}) == entries(x={"a", "b"}) == {"x": "{'a', 'b'}"}
    assert entries(x=[torch.float32]) == {"x.0": "torch.float32"}
    assert entries(x={"net": nn.Linear(2, 3)}) == {"x.net.weight": "(3, 2)", "x.net.bias": "(3,)"}


def test_state_of_an_optimizer_under_a_name_is_compared():
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state["calls"] = 3
    optimizer.state["scales"] = {"slow": 0.5, "mean": torch.ones(2)}
    found = {key: value for key, value in entries(optimizer=optimizer).items() if ".state." in key}
    assert found == {
        "optimizer.state.0.momentum_buffer": "(2, 2)",
        "optimizer.state.calls": "3",
        "optimizer.state.scales.slow": "0.5",
        "optimizer.state.scales.mean": "(2,)",
    }


def test_an_average_of_the_weights_need_not_be_on_all_ranks_unless_it_is_named():
    variables = {"ema": AveragedModel(nn.Linear(2, 2))}
    assert {entry.optional for entry in hash_state(variables, ()).entries} == {"ema"}
    assert {entry.optional for entry in hash_state(variables, ("ema",)).entries} == {""}


@pytest.mark.parametrize(("ranks", "is_due"), [((0, 1), True), ((0,), False)])
def test_a_generator_that_only_rank_0_draws_from_will_be_equal_again(ranks, is_due):
    parts = {"synchronized": True, "generator": torch.Generator(), "tickets": SimpleNamespace(ranks=ranks)}
    loader = SimpleNamespace(parts=SimpleNamespace(**parts), position=SimpleNamespace(seed=1, epoch=0))
    due = {entry.key: entry.due for entry in hash_state({"loader": loader}, ("loader",)).entries}
    assert set(due) == {"loader.seed", "loader.epoch", "loader.generator"}
    assert [key for key, text in due.items() if text] == (["loader.generator"] if is_due else [])


def test_active_dropout_is_known_from_layers_and_from_numbers():
    attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    assert drops(nn.Dropout(0.1)) and drops(nn.Dropout2d(0.1)) and drops(attention)
    assert not drops(nn.Dropout(0.0)) and not drops(nn.Linear(2, 2)) and not drops(nn.MultiheadAttention(4, 2))
    assert not drops(attention.eval()) and not drops(nn.Dropout(0.1).eval())


class Wrapped(torch.Tensor):
    """A tensor that consists of another one, and has no operation that gives its bytes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"no {function}")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "the type object: expected tensors"),
        (numpy.array(["a"], dtype=object), "the type ndarray of object"),
        ([[[[[[[[[[1]]]]]]]]]], "nested more than 8 levels"),
        (Wrapped(torch.ones(2)), "a Wrapped does not give its bytes"),
    ],
    ids=["object", "array of objects", "depth", "subclass"],
)
def test_what_cannot_be_compared_is_named(value, reason):
    (found,) = unreadable(x={"a": 1, "odd": value}).values()
    assert reason in found
