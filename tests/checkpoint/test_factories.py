"""Test factories: applied in place at any depth, merged back, with the whole path in every error."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from rankbook.checkpoint.state_dict.sharded_tensor import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    factories_of,
)
from rankbook.errors import CheckpointError

F = ShardedTensor.from_rank_offsets


def halves(key, data, replica_id, flattened_range):
    assert flattened_range is None
    return {
        name: F(f"{key}.{name}", part, replica_id=replica_id) for name, part in zip("ab", data.chunk(2), strict=True)
    }


def joined(loaded):
    return torch.cat([loaded["a"], loaded["b"]])


def factory(key="w", data=None, build=halves, merge=joined, **more):
    return ShardedTensorFactory(key, torch.arange(4.0) if data is None else data, build, merge, **more)


def loaded_from(value):
    """Return the loaded state of a sharded state dict: every shard is replaced by its data."""
    if isinstance(value, dict):
        return {key: loaded_from(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(loaded_from, value))
    return value.data.clone() if isinstance(value, ShardedTensor) else value


class Pair(NamedTuple):
    first: object
    second: object


def test_build_passes_key_data_replica_and_range():
    calls = []
    one = factory(build=lambda *args: calls.append(args) or {}, replica_id=(0, 1), flattened_range=slice(2))
    assert one.build() == {}
    assert calls == [("w", one.data, (0, 1), slice(2))]
    assert (one.without_data().data, one.without_data().key) == (None, "w")
    one.validate_metadata_integrity()


def test_factories_are_applied_in_place_and_merged_back():
    tree = {"x": factory(), "y": [1, factory("v", torch.ones(2))], "t": (factory("u"), 5), "p": Pair(2, [factory()])}
    factories, inner = factories_of(tree), tree["y"]
    assert set(factories) == {"x", "y", "t", "p"} and list(factories["y"]) == [1]
    assert apply_factories(tree) is None
    assert tree["y"] is inner
    assert tree["x"]["a"].key == "w.a" and tree["y"][1]["b"].key == "v.b" and tree["t"][0]["a"].key == "u.a"
    assert isinstance(tree["p"], Pair) and tree["p"].second[0]["a"].key == "w.a"
    loaded = {**loaded_from({name: tree[name] for name in "xyt"}), "p": Pair(2, loaded_from(tree["p"].second))}
    assert apply_factory_merges(loaded, factories) is loaded
    assert loaded["x"].equal(torch.arange(4.0)) and loaded["y"][1].equal(torch.ones(2))
    assert loaded["t"][0].equal(torch.arange(4.0)) and loaded["t"][1] == 5
    assert loaded["p"].second[0].equal(torch.arange(4.0))


@pytest.mark.parametrize("applied", [True, False])
def test_factories_may_be_nested(applied):
    def quarters(key, data, replica_id, flattened_range):
        return {name: factory(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}

    built = []
    tree = {"x": factory(build=lambda *args: built.append(1) or quarters(*args))}
    factories, fresh = factories_of(tree), {"x": factory(build=quarters)}
    apply_factories(tree)
    assert tree["x"]["b"]["a"].key == "w.b.a"
    merged = apply_factory_merges(loaded_from(tree), factories if applied else fresh)
    assert merged["x"].equal(torch.arange(4.0))
    assert built == [1]


def test_a_factory_without_data_merges_as_the_one_that_has_it():
    def quarters(key, data, replica_id, flattened_range):
        return {name: factory(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}

    templates = {"x": factory().without_data()}
    assert templates["x"].data is None
    loaded = {"x": {"a": torch.zeros(1), "b": torch.ones(1)}}
    assert apply_factory_merges(loaded, templates)["x"].tolist() == [0, 1]

    tree = {"x": factory(build=quarters)}
    nested = tree["x"]
    apply_factories(tree)
    merged = apply_factory_merges(loaded_from(tree), {"x": nested.without_data()})
    assert merged["x"].equal(torch.arange(4.0))


def test_the_outermost_object_is_changed_in_place_or_refused():
    for alone in (factory(), (factory(),)):
        with pytest.raises(CheckpointError, match="in place"):
            apply_factories(alone)
    apply_factories((1, {"x": 2}))


def test_factory_as_the_state_dict_merges_its_values():
    assert apply_factory_merges({"a": torch.zeros(1), "b": torch.ones(1)}, factory()).tolist() == [0, 1]


def test_a_dict_stands_for_a_list():
    pair = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert apply_factory_merges({"l": [7, pair]}, {"l": {1: factory()}})["l"][1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("loaded", "factories", "output"),
    [
        ({"m": {"x": {}}}, {"m": {"y": factory()}}, r"\['m'\]: key 'y' was not loaded; loaded keys: \['x'\]"),
        ({"m": {"l": [1]}}, {"m": {"l": [factory(), 2]}}, r"\['m'\]\['l'\]: loaded 1 elements, .* have 2"),
        ({"m": [[1]]}, {"m": {0: {"0": factory()}}}, r"\['m'\]\[0\]: expected an integer as list index, got '0'"),
        ({"m": [1]}, {"m": {1: factory()}}, r"\['m'\]: index 1 is out of range for 1 loaded elements"),
        ({"m": [1]}, {"m": {-1: factory()}}, r"\['m'\]: index -1 is out of range"),
        ({"m": [{"k": 3}]}, {"m": {0: {"k": 4}}}, r"\['m'\]\[0\]\['k'\]: loaded a int, but the factories have a int"),
        ([], {"m": factory()}, r"the state dict: expected an integer as list index, got 'm'"),
        ({}, {"m": factory()}, r"the state dict: key 'm' was not loaded"),
        ({"a": {}}, {"a": [factory()]}, r"\['a'\]: loaded a dict, but the factories have a list"),
    ],
)
def test_errors_name_the_whole_path(loaded, factories, output):
    with pytest.raises(CheckpointError, match=output) as caught:
        apply_factory_merges(loaded, factories)
    assert isinstance(caught.value, ValueError)  # as Megatron-Core's


def test_errors_within_what_a_factory_built_name_the_path():
    tree = {"x": factory(build=lambda *_: {"inner": factory()}, merge=lambda loaded: loaded["inner"])}
    with pytest.raises(CheckpointError, match=r"\['x'\]: key 'inner' was not loaded"):
        apply_factory_merges({"x": {}}, tree)
