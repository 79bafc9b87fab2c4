"""Test how sharded state dicts are partitioned and assembled, on one rank and with DTensors on four."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.state_dict.sharded_tensor import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from rankbook.checkpoint.state_dict.state_dicts import Expecting, flatten, map_leaves, partition, unflatten
from rankbook.errors import CheckpointError
from tests.rank_processes import run_ranks

F = ShardedTensor.from_rank_offsets


class Pair(NamedTuple):
    first: object
    second: object


leaves = st.integers() | st.text(max_size=2) | st.none()
trees = st.recursive(
    leaves,
    lambda below: (
        st.dictionaries(st.text(max_size=2) | st.integers(0, 3), below, max_size=3)
        | st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.tuples(below, below).map(lambda both: Pair(*both))
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=60, deadline=None)
def test_unflatten_reverses_flatten(tree):
    flat = flatten(tree)
    assert unflatten(flat, tree) == tree
    assert type(unflatten(flat, tree)) is type(tree)
    doubled = map_leaves(lambda path, leaf: (path, leaf), tree)
    assert [leaf for _, leaf in flat] == [item[1] for _, item in zip(flat, _pairs(doubled, flat), strict=True)]


def _pairs(tree, flat):
    for path, _ in flat:
        value = tree
        for key in path:
            value = value[key]
        yield value


def test_other_leaves_do_not_fit():
    with pytest.raises(CheckpointError, match=r"\['b'\]\[0\]"):
        unflatten([(("a",), 1)], {"a": 1, "b": [2]})


def halves(key, data, replica_id, flattened_range):
    return {name: F(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}


def example():
    return {
        "w": F("weight", torch.arange(4.0)),
        "glued": ShardedTensorFactory("g", torch.arange(4.0), halves, lambda x: torch.cat([x["a"], x["b"]])),
        "rng": [ShardedObject("rng", {"seed": 1}, (1,), (0,)), LocalNonpersistentObject("here")],
        "plain": {"x": torch.ones(2), "deep": (torch.zeros(1), 5)},
        "step": 7,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {}],
    }


def test_leaves_are_classified_by_type():
    state = example()
    parts = partition(state)
    assert [(tensor.path, tensor.shard.key) for tensor in parts.tensors] == [
        (("w",), "weight"),
        (("glued", "a"), "g.a"),
        (("glued", "b"), "g.b"),
        (("plain", "x"), "plain.x"),
        (("plain", "deep", 0), "plain.deep.0"),
    ]
    assert [(path, item.unique_key) for path, item in parts.objects] == [(("rng", 0), "rng/shard_0_1")]
    assert parts.common == {"plain": {"deep": {1: 5}}, "step": 7, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {}]}
    assert isinstance(state["glued"], ShardedTensorFactory)
    assert state["plain"]["x"].data_ptr() == parts.tensors[3].shard.data.data_ptr()


def test_an_entry_answers_what_a_plan_asks():
    shard = F("k", torch.zeros(2, 3, dtype=torch.bfloat16), (0, 1, 4), prepend_axis_num=1, replica_id=(0, 1))
    [entry] = partition({"x": shard}).tensors
    assert (entry.key, entry.dtype_name, entry.is_main, entry.allow_shape_mismatch) == ("k", "bfloat16", False, False)
    assert (entry.global_shape, entry.global_offset, entry.local_shape) == ((4, 2, 3), (1, 0, 0), (1, 2, 3))


def values_of(parts):
    return {tensor.path: tensor.restore(tensor.shard.data) for tensor in parts.tensors} | {
        path: item.data for path, item in parts.objects
    }


def test_assemble_returns_everything_that_is_stored():
    parts = partition(example(), gather=None)
    state = parts.assemble(values_of(parts), {**parts.common, "step": 9, "more": {"x": 1}})
    assert state.pop("w").equal(torch.arange(4.0)) and state.pop("glued").equal(torch.arange(4.0))
    plain = state.pop("plain")
    assert plain["x"].equal(torch.ones(2)) and plain["deep"][0].equal(torch.zeros(1)) and plain["deep"][1] == 5
    assert type(plain["deep"]) is tuple
    assert state == {
        "rng": [{"seed": 1}, "here"],
        "step": 9,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {}],
        "more": {"x": 1},
    }


def test_missing_entries_and_their_factories_are_left_out():
    parts = partition(example(), gather=None)
    values = values_of(parts)
    for path in (("w",), ("glued", "b"), ("plain", "x")):
        del values[path]
    common = {key: value for key, value in parts.common.items() if key != "step"}
    state = parts.assemble(values, common)
    assert set(state) == {"rng", "plain", "groups"} and set(state["plain"]) == {"deep"}


def test_a_hole_in_a_list_is_an_error():
    parts = partition(example(), gather=None)
    values = {path: value for path, value in values_of(parts).items() if path != ("rng", 0)}
    with pytest.raises(CheckpointError, match=r"\['rng'\]: elements \[0\] are missing from the checkpoint"):
        parts.assemble(values, parts.common)
    with pytest.raises(CheckpointError, match=r"\['plain'\]: a int is stored where .* has a dict"):
        parts.assemble(values_of(parts), {**parts.common, "plain": 3})


def test_two_tensors_of_one_name_are_an_error():
    with pytest.raises(CheckpointError, match=r"'a\.b': \['a'\]\['b'\] and \['a\.b'\]"):
        partition({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="must be a dict, got list"):
        partition([torch.ones(1)])


def test_error_of_a_factory_is_reported_and_chained():
    broken = {"x": ShardedTensorFactory("k", torch.ones(1), lambda *_: 1 / 0, torch.cat)}
    with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError: division by zero") as caught:
        partition(broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        partition(broken, gather=None)


def test_partition_expects_stored_tensors_that_the_state_lacks():
    class Optimizer(Expecting):
        def expected(self, stored):
            return {name: F(name, torch.zeros(shape)) for name, (shape, _) in stored.items()}

    state = {"optimizer": Optimizer(), "x": {}}
    assert partition(state).tensors == []
    parts = partition(state, stored={"m": ((3,), "float32")}, gather=None)
    assert [(tensor.path, tensor.shard.local_shape) for tensor in parts.tensors] == [(("optimizer", "m"), (3,))]


def of_dtensors():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = torch.arange(15.0).reshape(5, 3)
    layouts = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(0), Shard(0)]),  # 5 rows: 3 and 2; then 2, 1, 1, 1
        (mesh, [Shard(1), Shard(1)]),  # 3 columns: 1, 1, 1 and none
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Replicate(), Replicate()]),
        (mesh["b"], [Shard(0)]),
        (mesh["a"], [Replicate()]),
    ]
    state = {str(n): distribute_tensor(tensor, on, how, src_data_rank=None) for n, (on, how) in enumerate(layouts)}
    state["own"] = {str(dist.get_rank()): torch.full((2,), float(dist.get_rank()))}
    state["scalar"] = distribute_tensor(torch.tensor(2.5), mesh, [Replicate(), Replicate()], src_data_rank=None)
    parts = partition(state)
    shards = []
    for entry in parts.tensors:
        shard = entry.shard
        shards.append((shard.key, shard.global_offset, shard.local_shape, shard.replica_id, shard.data))
        if shard.key.isdigit():
            on, how = layouts[int(shard.key)]
            shape, offset = compute_local_shape_and_global_offset(tensor.shape, on, how)
            assert (shard.local_shape, shard.global_offset) == (shape, offset), shard
            assert tensor[shard.global_slice()].equal(shard.data)
            fresh = entry.restore(shard.data.clone() + 1)
            assert isinstance(fresh, DTensor) and fresh.full_tensor().equal(tensor + 1)
            assert entry.restore(shard.data) is state[shard.key]
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    messages = []
    for state in ({"p": partial}, {"p": torch.ones(2), "x": 1} if dist.get_rank() else {"p": partial}):
        try:
            partition(state)
        except CheckpointError as error:
            messages.append(str(error))
    return shards, messages


@pytest.mark.processes
def test_dtensors_are_shards_with_their_copies_counted():
    ranks = run_ranks(of_dtensors, 4)
    tensor = torch.arange(15.0).reshape(5, 3)
    for key in map(str, range(7)):
        rebuilt = torch.full_like(tensor, -1)
        times = torch.zeros(5, 3)
        for shards, _ in ranks:
            [(_, offset, shape, replica, data)] = [item for item in shards if item[0] == key]
            if replica == 0:
                at = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
                rebuilt[at] = data
                times[at] += 1
        assert rebuilt.equal(tensor) and times.eq(1).all(), key
    ids = {key: [next(e[3] for e in shards if e[0] == key) for shards, _ in ranks] for key in ("3", "4", "5", "scalar")}
    assert ids == {"3": [0, 0, 1, 1], "4": [0, 1, 2, 3], "5": [0, 0, 1, 1], "scalar": [0, 1, 2, 3]}
    assert [[e[3] for e in shards if e[0].startswith("own")] for shards, _ in ranks] == [[0]] * 4
    assert {repr(messages) for _, messages in ranks} == {repr(ranks[0][1])}
    first_message, second_message = ranks[0][1]
    assert "rank 0: 'p' is a DTensor with the placement P" in second_message and "rank 1" not in second_message
    assert "rank 0: 'p'" in first_message and "rank 3: 'p'" in first_message
