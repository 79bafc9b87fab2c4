"""The map of models on real processes: what all ranks store makes up the state of one process, and goes back into any.

Nothing is written here: the main shards of all ranks are put together by hand, as a checkpoint would hold them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.ranks import run_ranks

WORLDS = {1: ["plain", "compiled"], 2: ["ddp", "fsdp"], 4: ["tp", "hsdp", "ddp of tp", "ddp"]}


class Small(nn.Module):
    """Of sizes that divide by nothing, with a buffer, a tied weight, and something beside its tensors."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, 7)
        self.module = nn.Linear(7, 5)  # called as DistributedDataParallel's inner one, and yet the model's own
        self.norm = nn.BatchNorm1d(5)
        self.tied = nn.Linear(5, 1, bias=False)
        self.again = nn.Linear(5, 1, bias=False)
        self.again.weight = self.tied.weight
        self.epoch = seed

    def get_extra_state(self):
        return {"epoch": self.epoch}

    def set_extra_state(self, state):
        self.epoch = state["epoch"]


def build(kind, seed):
    """The model spread in this way, and its optimizer, which has two groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    model = Small(seed)
    plan = {"up": ColwiseParallel(), "module": RowwiseParallel()}
    if kind == "compiled":
        model = torch.compile(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model.up)
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    elif kind in {"tp", "ddp of tp"}:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        if kind == "tp":
            fully_shard(model, mesh=mesh["dp"])
    up = [each for name, each in model.named_parameters() if "up." in name]
    rest = [each for name, each in model.named_parameters() if "up." not in name]
    return model, torch.optim.AdamW([{"params": up, "lr": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def step(model, optimizer, number):
    """As if every rank had computed these gradients."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for index, each in enumerate(model.parameters()):
        gradient = torch.sin(torch.arange(each.numel()).reshape(each.shape) + index + 10.0 * number)
        if isinstance(each, DTensor):
            gradient = distribute_tensor(gradient, each.device_mesh, each.placements, src_data_rank=None)
        each.grad = gradient
    optimizer.step()


def gathered(taken):
    """What all ranks' main replicas make up, as a checkpoint would hold it; fails unless each element comes once."""
    import torch.distributed as dist

    from rankbook.checkpoint.mapping import is_main_replica
    from rankbook.checkpoint.replicas import gather_objects

    assert dist.is_initialized()
    mine = [each.shard for each in taken.tensors if is_main_replica(each.shard.replica_id)]
    objects = [each for _, each in taken.objects if is_main_replica(each.replica_id)]
    whole, times = {}, {}
    for shard in (each for rank in gather_objects(mine) for each in rank):
        if shard.key not in whole:
            whole[shard.key] = torch.zeros(shard.global_shape, dtype=shard.dtype)
            times[shard.key] = torch.zeros(shard.global_shape, dtype=torch.int)
        whole[shard.key][shard.global_slice()] = shard.data
        times[shard.key][shard.global_slice()] += 1
    assert {key: set(each.flatten().tolist()) for key, each in times.items()} == {key: {1} for key in whole}
    stored = [each for rank in gather_objects(objects) for each in rank]
    assert len({each.unique_key for each in stored}) == len(stored)
    sizes = [sum(each.data.nbytes for each in rank) for rank in gather_objects(mine)]
    return {
        "tensors": whole,
        "objects": {each.unique_key: each.data for each in stored},
        "common": taken.common,
        "sizes": sizes,
        "owners": gather_objects(sorted(each.key for each in mine)),
    }


def save(kinds):
    from rankbook.checkpoint.models import sharded_state_dict
    from rankbook.checkpoint.state_dicts import split

    found = {}
    for kind in kinds:
        model, optimizer = build(kind, 3)
        for number in range(2):
            step(model, optimizer, number)
        state = {**sharded_state_dict(model, optimizer), "number": 2}
        found[kind] = gathered(split(state))
    return found


def load(kinds, saved):
    """Into fresh models with other values, whose optimizers have not stepped; then one step more."""
    from rankbook.checkpoint.models import load_sharded_state_dict, sharded_state_dict
    from rankbook.checkpoint.state_dicts import split

    found = {}
    for position, kind in enumerate(kinds):
        for name in [*saved][position :: len(kinds)]:  # each checkpoint into one of the kinds
            checkpoint = saved[name]
            model, optimizer = build(kind, 11)
            stored = {
                key: (tuple(each.shape), str(each.dtype).removeprefix("torch."))
                for key, each in checkpoint["tensors"].items()
            }
            taken = split({**sharded_state_dict(model, optimizer), "number": 0}, stored=stored, gather=None)
            values = {path: checkpoint["objects"][each.unique_key] for path, each in taken.objects}
            for each in taken.tensors:
                each.shard.data.copy_(checkpoint["tensors"][each.shard.key][each.shard.global_slice()])
                values[each.path] = each.restored(each.shard.data)
            loaded = taken.assemble(values, checkpoint["common"])
            assert loaded["number"] == 2
            load_sharded_state_dict(model, optimizer, loaded)
            again = gathered(split({**sharded_state_dict(model, optimizer), "number": 2}))
            step(model, optimizer, 2)
            after = gathered(split({**sharded_state_dict(model, optimizer), "number": 2}))
            found[kind, name] = (again, after)
    return found


@pytest.fixture(scope="module")
def checkpoints():
    """By kind and world size, as rank 0 sees them; all ranks see the same."""
    found = {}
    for world, kinds in WORLDS.items():
        first, *others = run_ranks(save, world, kinds)
        for kind in kinds:
            for other in others:
                assert_same(other[kind], first[kind])
            found[f"{kind} on {world}"] = first[kind]
    return found


def assert_same(one, other):
    assert one["tensors"].keys() == other["tensors"].keys()
    for key, value in one["tensors"].items():
        assert value.equal(other["tensors"][key]), key
        assert value.dtype == other["tensors"][key].dtype, key
    assert (one["objects"], one["common"]) == (other["objects"], other["common"])


def reference(steps):
    model, optimizer = build("plain", 3)
    for number in range(steps):
        step(model, optimizer, number)
    state = {f"optimizer.state.{name}.{what}": value for name, parameter in model.named_parameters()
             for what, value in optimizer.state[parameter].items()}  # fmt: skip
    return {name: value for name, value in model.state_dict().items() if name != "_extra_state"} | state


@pytest.mark.parametrize("name", [f"{kind} on {world}" for world, kinds in WORLDS.items() for kind in kinds])
def test_all_ranks_store_what_one_process_would_have(checkpoints, name):
    found, expected = checkpoints[name], reference(2)
    assert found["tensors"].keys() == expected.keys()
    for key, value in expected.items():
        assert found["tensors"][key].equal(value), key
    assert found["objects"] == {"_extra_state/shard_0_1": {"epoch": 3}}
    groups = found["common"]["optimizer"]["param_groups"]
    assert [(group["params"], group["lr"]) for group in groups] == [
        (["up.weight", "up.bias"], 0.1),
        (["module.weight", "module.bias", "norm.weight", "norm.bias", "tied.weight"], 0.01),
    ]
    assert found["common"]["number"] == 2


def test_copies_are_spread_by_bytes_and_a_parameter_keeps_its_state(checkpoints):
    found = checkpoints["ddp on 2"]
    assert max(found["sizes"]) < 1.2 * min(found["sizes"])
    owner = {key: rank for rank, keys in enumerate(found["owners"]) for key in keys}
    for name in ("up.weight", "up.bias", "module.weight", "tied.weight"):
        assert len({rank for key, rank in owner.items() if key == name or f".{name}." in key}) == 1
    assert {owner[key] for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")} == {0}
    assert min(checkpoints["ddp on 4"]["sizes"]) > 0


@pytest.mark.parametrize("world", WORLDS)
def test_what_any_ranks_stored_goes_into_any_others(checkpoints, world):
    expected = reference(3)
    for rank in run_ranks(load, world, WORLDS[world], checkpoints):
        for (kind, name), (again, after) in rank.items():
            assert_same(again, checkpoints[name])
            for key, value in expected.items():
                assert after["tensors"][key].equal(value), (kind, name, key)
