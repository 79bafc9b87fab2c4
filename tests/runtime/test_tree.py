"""Containers of tensors: what is looked into, and that it comes back as what it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from rankbook.errors import InvalidArgument
from rankbook.runtime.tree import (
    concatenate,
    convert_to_fp32,
    describe,
    find_batch_size,
    honor_type,
    leaves,
    map_leaves,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

META = torch.device("meta")


class Pair(NamedTuple):
    x: object
    y: object


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str = "batch"
    more: list = field(default_factory=list)
    derived: int = field(init=False, default=3)


class Tokens(UserDict):
    """Mapping like the batch of a tokenizer: not registered as `Mapping`, with its own `to`."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Attributed(dict):
    """A mapping whose constructor takes something else, and that carries more than its items."""

    def __init__(self, *, tag: str) -> None:
        super().__init__()
        self.tag = tag


def one() -> torch.Tensor:
    return torch.ones(2)


def devices(data) -> set[str]:
    return {leaf.device.type for _, leaf in leaves(data) if isinstance(leaf, torch.Tensor)}


CONTAINERS = [
    {"a": one(), "b": {"c": [one(), "text", 3]}},
    [one(), (one(), None)],
    Pair(one(), [one()]),
    OrderedDict(b=one(), a=one()),
    Batch(one(), more=[one()]),
]


@pytest.mark.parametrize("data", CONTAINERS, ids=lambda data: type(data).__name__)
def test_every_tensor_is_moved_and_the_container_stays_what_it_is(data):
    moved = send_to_device(data, "meta")
    assert type(moved) is type(data)
    assert devices(moved) == {"meta"}
    assert devices(data) == {"cpu"}
    assert describe(moved) == describe(data)
    other_leaves = [(path, leaf) for path, leaf in leaves(data) if not isinstance(leaf, torch.Tensor)]
    assert [(path, leaf) for path, leaf in leaves(moved) if not isinstance(leaf, torch.Tensor)] == other_leaves


def test_a_defaultdict_keeps_its_factory():
    moved = send_to_device(defaultdict(list, a=one()), META)
    assert moved["a"].device == META
    assert moved["new"] == []


def test_a_mapping_with_another_constructor_keeps_what_it_carries():
    data = Attributed(tag="t")
    data["a"] = one()
    moved = send_to_device(data, META)
    assert (type(moved), moved.tag, moved["a"].device) == (Attributed, "t", META)
    assert data["a"].device.type == "cpu"


def test_object_with_a_to_method_is_moved_by_it():
    class InPlace:
        def to(self, device):
            self.device = device

    tokens, silent, packed = Tokens(a=one()), InPlace(), pack_sequence([one()])
    moved = send_to_device({"t": tokens, "s": silent, "p": packed}, META, non_blocking=True)
    assert moved["t"]["a"].device == META
    assert moved["s"] is silent
    assert silent.device == META
    assert moved["p"].data.device == META
    assert type(moved["p"]) is type(packed)


def test_an_error_inside_such_a_to_is_not_taken_for_an_old_signature():
    class Broken:
        def to(self, device, non_blocking=False):  # noqa: ARG002 - as torch's
            raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        send_to_device([Broken()], META)


def test_skipped_keys_stay_at_any_depth():
    moved = send_to_device({"keep": one(), "in": [{"keep": one(), "go": one()}]}, META, skip_keys="keep")
    assert moved["keep"].device.type == moved["in"][0]["keep"].device.type == "cpu"
    assert moved["in"][0]["go"].device == META
    assert devices(send_to_device({"a": one(), "b": one()}, META, skip_keys=["a", "b"])) == {"cpu"}


def test_a_dataclass_is_not_constructed_again():
    instances = []

    @dataclass
    class Counted:
        x: torch.Tensor

        def __post_init__(self):
            instances.append(self)

    data = Counted(one())
    assert send_to_device(data, META).x.device == META
    assert len(instances) == 1


def test_types_and_modules_are_no_containers():
    module = torch.nn.Linear(1, 1)
    assert map_leaves(lambda leaf: leaf, [Batch, module]) == [Batch, module]


def test_concatenate_joins_each_tensor():
    joined = concatenate([{"x": Pair(one(), [one()])}, {"x": Pair(one() * 2, [one()])}])
    assert joined["x"].x.tolist() == [1, 1, 2, 2]
    assert isinstance(joined["x"], Pair)
    assert concatenate([torch.ones(2, 1), torch.ones(2, 3)], dim=1).shape == (2, 4)


def test_concatenate_refuses_values_other_than_tensors():
    for error in (InvalidArgument, TypeError):
        with pytest.raises(error, match="not str"):
            concatenate([["a"], ["b"]])
    assert concatenate([{"name": "a", "x": torch.ones(1)}]) == {"name": "a", "x": torch.ones(1)}


def test_the_batch_size_is_the_first_tensors_that_has_one():
    assert find_batch_size({"scale": torch.tensor(1.0), "x": [torch.ones(5, 2), torch.ones(7)]}) == 5
    assert find_batch_size(Batch(one())) == 2
    for data in ({}, "text", torch.tensor(1), [None]):
        with pytest.raises(InvalidArgument, match="cannot determine the batch size"):
            find_batch_size(data)


def test_other_leaves_are_kept_or_an_error():
    assert recursively_apply(lambda tensor, by: tensor + by, {"x": one(), "n": 1}, 2)["x"].tolist() == [3, 3]
    with pytest.raises(TypeError, match="dataclasses, got str"):
        recursively_apply(torch.neg, [one(), "text"], error_on_other_type=True)


def test_slices_dtypes_and_descriptions():
    data = {"x": torch.arange(4), "y": (torch.ones(4, 2, dtype=torch.float16), "t")}
    assert describe(slice_tensors(data, slice(0, 3))) == "{'x': int64[3], 'y': (float16[3, 2], str)}"
    assert describe(convert_to_fp32(data)["y"]) == "(float32[4, 2], str)"
    assert describe([Pair(one(), Batch(one()))]) == "[Pair(float32[2], Batch(float32[2], str, [], int))]"
    assert [path for path, _ in leaves({"x": [Batch(one())]})][:2] == ["['x'][0].x", "['x'][0].name"]
    assert honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
