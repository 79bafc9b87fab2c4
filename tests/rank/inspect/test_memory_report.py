"""Test the search for tensors that hold memory: each storage once, and no user code."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankbook.rank.inspect.oom import MAX_DEPTH, find_holdings


def names(namespace: dict[str, object], **options) -> list[str]:
    """The names of all that is found, in no order."""
    return sorted(holding.name for holding in find_holdings(namespace, **options).holdings)


@dataclass
class Batch:
    images: torch.Tensor
    labels: object = None


class Slotted:
    __slots__ = ("kept", "unset")

    def __init__(self) -> None:
        self.kept = torch.ones(3)

    def __str__(self) -> str:
        return "Slotted()"  # the test's name must be the same in every process


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
        self.heads = torch.nn.ModuleDict({"main": torch.nn.Linear(2, 1, bias=False)})
        self.register_buffer("mask", torch.ones(2))
        self.cache = [torch.ones(5)]


def ones() -> torch.Tensor:
    return torch.ones(3)


@pytest.mark.parametrize(
    ("value", "expected_names"),
    [
        (ones(), ["x"]),
        ([1, ones(), "text", ones()], ["x[1]", "x[3]"]),
        ((ones(),), ["x[0]"]),
        (collections.deque([ones()]), ["x[0]"]),
        ({"a": ones(), 3: ones(), (1, 2): ones()}, ["x['a']", "x[3]", "x[…]"]),
        ({ones()}, ["x{…}"]),
        ([{"deep": (ones(),)}], ["x[0]['deep'][0]"]),
        (Batch(ones(), [ones()]), ["x.images", "x.labels[0]"]),
        (SimpleNamespace(inner=SimpleNamespace(t=ones())), ["x.inner.t"]),
        (Slotted(), ["x.kept"]),
        (functools.partial(print, ones()), ["x.args[0]"]),
        (np.ones(4), ["x"]),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), ["x[0].bias", "x[0].weight"]),
        (Block(), ["x.cache[0]", "x.heads['main'].weight", "x.layers[0].weight", "x.mask"]),
        (torch.eye(3).to_sparse(), ["x.indices()", "x.values()"]),
        (torch.ones(3, device="meta"), []),
        (torch, []),
        (None, []),
    ],
    ids=str,
)
def test_tensor_is_named_by_its_path(value, expected_names):
    assert names({"x": value}) == sorted(expected_names)


def test_memory_report_has_name_size_and_shape():
    (holding,) = find_holdings({"x": [torch.zeros(4, 5, dtype=torch.float16)]}).holdings
    assert (holding.name, holding.size, holding.shape, holding.dtype, holding.device) == (
        "x[0]",
        40,
        (4, 5),
        "float16",
        "cpu",
    )
    assert holding.variable == "x"


def test_storage_counts_once_in_full_size_under_its_shortest_name():
    big = torch.zeros(1000)
    report = find_holdings({"views": [big[:10], big.view(10, 100)], "big": big, "as_array": [big.numpy()]})
    assert [holding.name for holding in report.holdings] == ["big"]
    assert report.size == 4000
    (view,) = find_holdings({"view": big[:10]}).holdings
    assert (view.size, view.shape) == (4000, (10,)), "what a small view keeps alive is the whole"


def test_the_largest_come_first():
    report = find_holdings({"small": torch.ones(1), "large": torch.ones(100), "middle": torch.ones(10)})
    assert [holding.name for holding in report.holdings] == ["large", "middle", "small"]


def test_gradients_and_an_optimizers_state_are_named_by_their_parameters():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    holding_names = names({"optimizer": optimizer, "model": model})
    assert "model.weight" in holding_names and "model.weight.grad" in holding_names
    assert "optimizer.state[model.weight]['exp_avg']" in holding_names
    assert "optimizer.state[model.weight]['exp_avg_sq']" in holding_names


def test_an_optimizer_without_its_model_still_says_what_it_has():
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=1)
    assert names({"optimizer": optimizer}) == ["optimizer.param_groups[0]['params'][0]"]


def test_only_one_device_is_reported_if_that_is_asked_for():
    assert names({"x": ones()}, device="cuda:0") == []
    assert names({"x": ones()}, device="cpu") == ["x"]


def test_the_variable_of_a_functions_local_has_its_function():
    (holding,) = find_holdings({"forward(): cache": [ones()]}).holdings
    assert holding.name == "forward(): cache[0]"
    assert holding.variable == "forward(): cache"


class Hostile:
    """Object that fails on every access, and whose instance has a tensor."""

    def __init__(self) -> None:
        object.__setattr__(self, "kept", torch.ones(3))

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None

    def __len__(self) -> int:
        raise RuntimeError("len")


class HostileList(list[object]):
    def __iter__(self):
        raise RuntimeError("iter")


def test_search_runs_no_user_code():
    assert names({"x": Hostile(), "y": HostileList([ones()])}) == ["x.kept", "y[0]"]


def test_a_circle_ends():
    circle: list[object] = [ones()]
    circle.append(circle)
    assert names({"circle": circle}) == ["circle[0]"]


def test_search_limits_are_reported_as_incomplete():
    deep: object = ones()
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    report = find_holdings({"deep": deep, "flat": ones()})
    assert [holding.name for holding in report.holdings] == ["flat"] and not report.complete
    many = find_holdings({"t": ones(), "many": [[] for _ in range(100)]}, most_objects=50)
    assert [item.name for item in many.holdings] == ["t"] and not many.complete
    assert find_holdings({"t": ones()}).complete


def test_a_large_namespace_is_searched_up_to_a_bound():
    namespace = {
        "numbers": list(range(3_000_000)),
        "table": {n: [n, str(n)] for n in range(200_000)},
        "objects": [[SimpleNamespace(n=n) for n in range(9_000)] for _ in range(20)],
        "big": torch.ones(1000),
    }
    report = find_holdings(namespace)
    assert [holding.name for holding in report.holdings] == ["big"]
    assert not report.complete


def test_search_keeps_no_object_alive():
    import weakref

    big = torch.ones(3)
    reference = weakref.ref(big)
    find_holdings({"big": [big]})
    del big
    assert reference() is None
