"""The map of models on real processes: what all ranks store makes up the state of one process, and goes back into any.

Nothing is written here: the main shards of all ranks are put together by hand, as a checkpoint would hold them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rankbook.checkpoint import load as load_checkpoint
from rankbook.checkpoint import load_metadata
from rankbook.checkpoint import save as save_checkpoint
from rankbook.checkpoint.state_dict.models import load_sharded_state_dict, sharded_state_dict, sharded_state_dicts
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedBase, is_main_replica
from rankbook.checkpoint.state_dict.state_dicts import map_leaves, partition
from rankbook.control_collectives import gather_objects
from rankbook.errors import CheckpointError
from tests.rank_processes import run_ranks

WORLDS = {1: ["plain", "compiled"], 2: ["ddp", "fsdp", "zero"], 4: ["tp", "hsdp", "ddp of tp", "ddp"]}


class Small(nn.Module):
    """Model whose sizes share no divisor, with a buffer, a tied weight, and an extra state."""

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
    up = [item for name, item in model.named_parameters() if "up." in name]
    rest = [element for name, element in model.named_parameters() if "up." not in name]
    groups = [{"params": up, "lr": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=0.01)
    return model, torch.optim.AdamW(groups, lr=0.01)


def step(model, optimizer, number):
    """Take one optimizer step, with the same gradients on every rank."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for index, item in enumerate(model.parameters()):
        gradient = torch.sin(torch.arange(item.numel()).reshape(item.shape) + index + 10.0 * number)
        if isinstance(item, DTensor):
            gradient = distribute_tensor(gradient, item.device_mesh, item.placements, src_data_rank=None)
        item.grad = gradient
    optimizer.step()


def gathered(parts):
    """Return the combined main replicas of all ranks, as in a checkpoint. Fails unless each element comes once."""
    import torch.distributed as dist

    assert dist.is_initialized()
    shards = [tensor.shard for tensor in parts.tensors if is_main_replica(tensor.shard.replica_id)]
    objects = [item for _, item in parts.objects if is_main_replica(item.replica_id)]
    tensors, times = {}, {}
    for shard in (element for rank in gather_objects(shards) for element in rank):
        if shard.key not in tensors:
            tensors[shard.key] = torch.zeros(shard.global_shape, dtype=shard.dtype)
            times[shard.key] = torch.zeros(shard.global_shape, dtype=torch.int)
        tensors[shard.key][shard.global_slice()] = shard.data
        times[shard.key][shard.global_slice()] += 1
    assert {key: set(member.flatten().tolist()) for key, member in times.items()} == {key: {1} for key in tensors}
    stored = [entry for rank in gather_objects(objects) for entry in rank]
    assert len({value.unique_key for value in stored}) == len(stored)
    sizes = [sum(current.data.nbytes for current in rank) for rank in gather_objects(shards)]
    return {
        "tensors": tensors,
        "objects": {part.unique_key: part.data for part in stored},
        "common": parts.common,
        "sizes": sizes,
        "owners": gather_objects(sorted(main_shard.key for main_shard in shards)),
    }


def save_and_load(kinds):
    """Store every kind after two steps. Then load it from the state of the previous kind, and take one more step."""
    saved = {kind: save(kind) for kind in kinds}
    return saved, {kind: load(kind, saved[kinds[index - 1]]) for index, kind in enumerate(kinds)}


def save(kind):
    model, optimizer = build(kind, 3)
    for number in range(2):
        step(model, optimizer, number)
    return gathered(partition({**sharded_state_dict(model, optimizer), "number": 2}))


def load(kind, checkpoint):
    """Load into a new model with other values, whose optimizer has not stepped."""
    model, optimizer = build(kind, 11)
    restore(model, optimizer, checkpoint)
    again = gathered(partition({**sharded_state_dict(model, optimizer), "number": 2}))
    step(model, optimizer, 2)
    return again, gathered(partition({**sharded_state_dict(model, optimizer), "number": 2}))


def restore(model, optimizer, checkpoint):
    """Load what `gathered` returned."""
    stored = {
        key: (tuple(item.shape), str(item.dtype).removeprefix("torch.")) for key, item in checkpoint["tensors"].items()
    }
    parts = partition({**sharded_state_dict(model, optimizer), "number": 0}, stored=stored, gather=None)
    values = {path: checkpoint["objects"][element.unique_key] for path, element in parts.objects}
    for tensor in parts.tensors:
        tensor.shard.data.copy_(checkpoint["tensors"][tensor.shard.key][tensor.shard.global_slice()])
        values[tensor.path] = tensor.restore(tensor.shard.data)
    loaded = parts.assemble(values, checkpoint["common"])
    assert loaded["number"] == 2
    load_sharded_state_dict(model, optimizer, loaded)


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


@pytest.fixture(scope="module")
def ranks():
    """Return the results of every rank by world size."""
    return {world: run_ranks(save_and_load, world, kinds) for world, kinds in WORLDS.items()}


CASES = [(world, kind) for world, kinds in WORLDS.items() for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), CASES)
def test_ranks_together_store_the_state_of_one_process(ranks, world, kind):
    stored, expected = ranks[world][0][0][kind], reference(2)
    assert stored["tensors"].keys() == expected.keys()
    for key, value in expected.items():
        assert stored["tensors"][key].equal(value), key
    assert stored["objects"] == {"_extra_state/shard_0_1": {"epoch": 3}}
    groups = stored["common"]["optimizer"]["param_groups"]
    assert [(group["params"], group["lr"]) for group in groups] == [
        (["up.weight", "up.bias"], 0.1),
        (["module.weight", "module.bias", "norm.weight", "norm.bias", "tied.weight"], 0.01),
    ]
    assert stored["common"]["number"] == 2
    for saved, _ in ranks[world]:  # nothing of it tells which ranks have stored it
        assert_same(saved[kind], ranks[1][0][0]["plain"])


@pytest.mark.slow
def test_copies_are_spread_by_bytes_and_a_parameter_keeps_its_state(ranks):
    stored = ranks[2][0][0]["ddp"]
    assert max(stored["sizes"]) < 1.2 * min(stored["sizes"])
    owner = {key: rank for rank, keys in enumerate(stored["owners"]) for key in keys}
    for name in ("up.weight", "up.bias", "module.weight", "tied.weight"):
        assert len({rank for key, rank in owner.items() if key == name or f".{name}." in key}) == 1
    assert {owner[key] for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")} == {0}
    assert min(ranks[4][0][0]["ddp"]["sizes"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), CASES)
def test_optimizer_continues_from_state_of_another_layout(ranks, world, kind):
    expected = reference(3)
    for saved, loaded in ranks[world]:
        again, after = loaded[kind]
        assert_same(again, saved[kind])
        for key, value in expected.items():
            assert after["tensors"][key].equal(value), key


def pair(model=None):
    model = model or nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, sharded_state_dict(model, optimizer)


def loaded_from(state):
    return map_leaves(lambda _, leaf: leaf.data if isinstance(leaf, ShardedBase) else leaf, state)


def test_an_optimizer_that_has_not_stepped_stores_no_state():
    _, _, state = pair()
    assert state["optimizer"]["state"] == {}
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [["weight", "bias"]]


def with_rate(rate, *, betas=(0.9, 0.999)):
    model = nn.Linear(1, 1)
    capturable = {"foreach": True, "capturable": False} if isinstance(rate, float) else {"foreach": False}
    return model, torch.optim.Adam(model.parameters(), rate, betas, **capturable)


@pytest.mark.parametrize("by_earlier_version", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_learning_rates_are_loaded_as_numbers_and_as_tensors(tmp_path, by_earlier_version, nested):
    def state(model, optimizer):
        of_both = sharded_state_dict(model, optimizer)
        return {"all": [of_both]} if nested else of_both

    def of_optimizer(state):
        return (state["all"][0] if nested else state)["optimizer"]

    rates = (0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64))
    for step, rate in enumerate(rates):
        stored = state(*with_rate(rate))
        assert of_optimizer(stored)["param_groups"][0]["lr"] == 0.5
        if by_earlier_version:
            of_optimizer(stored)["param_groups"][0]["lr"] = rate
        save_checkpoint(stored, tmp_path, step=step)
        assert isinstance(rate, float) or by_earlier_version == any(
            key.endswith("optimizer.param_groups.0.lr") for key in load_metadata(tmp_path).tensors
        )
        for present in (0.1, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64), torch.tensor(1)):
            model, optimizer = with_rate(present)
            loaded = load_checkpoint(state(model, optimizer), tmp_path)
            load_sharded_state_dict(model, optimizer, loaded["all"][0] if nested else loaded)
            after = optimizer.param_groups[0]["lr"]
            assert (type(after), after) == (type(present), 0.5)
            assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
            if isinstance(present, torch.Tensor):
                assert after.shape == present.shape
                assert after.dtype == (present.dtype if present.is_floating_point() else torch.float32)


def test_tensors_within_an_option_are_stored_as_numbers(tmp_path):
    betas = (torch.tensor(0.5), torch.tensor(0.25))
    save_checkpoint(sharded_state_dict(*with_rate(torch.tensor(0.1), betas=betas)), tmp_path)
    for present in ((0.9, 0.999), (torch.tensor(0.9), torch.tensor(0.999))):
        model, optimizer = with_rate(torch.tensor(0.1), betas=present)
        load_sharded_state_dict(model, optimizer, load_checkpoint(sharded_state_dict(model, optimizer), tmp_path))
        after = optimizer.param_groups[0]["betas"]
        assert after == (0.5, 0.25)
        assert list(map(type, after)) == list(map(type, present))


def plain_local_state(rows, folder):
    """Store and load state of an optimizer that keeps plain tensors of the local shape, and one of another shape.

    Save it again with values of another shape that differ between the ranks.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def state(value):
        for parameter in model.parameters():
            local = torch.full_like(parameter.to_local(), value)
            # Not a multiple of anything, so that no shape is that of a local part by chance.
            history = torch.arange(11.0)
            optimizer.state[parameter] = {"buffer": local, "history": history, "parts": [local.clone(), history]}
        rows = distribute_tensor(torch.full((5,), value), model.weight.device_mesh, [Shard(0)], src_data_rank=0)
        optimizer.state[model.bias]["rows"] = rows

    model = nn.Linear(2, rows)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state(dist.get_rank() + 1.0)
    stored = gathered(partition({**sharded_state_dict(model, optimizer), "number": 2}))
    state(9.0)
    restore(model, optimizer, stored)
    buffers = [optimizer.state[parameter]["buffer"] for parameter in model.parameters()]
    kinds = [isinstance(buffer, DTensor) for buffer in buffers]
    parts = [optimizer.state[parameter]["parts"][0] for parameter in model.parameters()]
    assert all(map(torch.equal, parts, buffers))
    assert optimizer.state[model.bias]["rows"].full_tensor().tolist() == [1.0] * 5
    save_checkpoint(sharded_state_dict(model, optimizer), folder, step=1)
    optimizer.state[model.weight]["scales"] = torch.full((13,), float(dist.get_rank()))
    with pytest.raises(CheckpointError, match=r"'optimizer.state.weight.scales' differs between ranks") as raised:
        save_checkpoint(sharded_state_dict(model, optimizer), folder, step=2)
    assert "one value on rank 0, another on rank 1" in str(raised.value)
    return stored["tensors"], kinds, [buffer.tolist() for buffer in buffers]


@pytest.mark.slow
def test_plain_state_of_the_local_shape_is_stored_as_shards_and_stays_plain(tmp_path):
    for rank, (stored, kinds, buffers) in enumerate(
        run_ranks(plain_local_state, 2, 3, tmp_path)
    ):  # of 3 rows rank 1 has one
        assert stored["optimizer.state.weight.buffer"].tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
        assert stored["optimizer.state.bias.buffer"].tolist() == [1.0, 1.0, 2.0]
        assert stored["optimizer.state.weight.parts.0"].equal(stored["optimizer.state.weight.buffer"])
        assert stored["optimizer.state.weight.history"].tolist() == list(range(11))
        assert kinds == [False, False]
        assert buffers == ([[[1.0, 1.0]] * 2, [1.0, 1.0]] if rank == 0 else [[[2.0, 2.0]], [2.0]])
    for rank, (stored, _, buffers) in enumerate(
        run_ranks(plain_local_state, 2, 1, tmp_path / "one")
    ):  # rank 1 has none
        assert stored["optimizer.state.weight.buffer"].tolist() == [[1.0, 1.0]]
        assert buffers == ([[[1.0, 1.0]], [1.0]] if rank == 0 else [[], []])


class Wrapper(torch.optim.Optimizer):
    """An optimizer that keeps its state in another one, and shares its groups."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.base = inner

    def state_dict(self):
        return self.base.state_dict()


def test_state_in_a_wrapped_optimizer_is_not_lost_without_a_word():
    model, optimizer, _ = pair()
    wrapper = Wrapper(optimizer)
    sharded_state_dict(model, wrapper)
    step(model, optimizer, 0)
    for own in ({}, {model.weight: {"slow": torch.ones(3, 2)}}):  # as a lookahead optimizer has it
        wrapper.state.update(own)
        with pytest.raises(CheckpointError, match=r"the optimizer in the attribute 'base' of the Wrapper has a state"):
            sharded_state_dict(model, wrapper)
    wrapper.state = optimizer.state
    assert sharded_state_dict(model, wrapper)["optimizer"]["state"]["weight"].keys() == {"momentum_buffer"}


def refused_with_the_first_version_of_fsdp(folder, use_orig_params):
    """Save and load the model alone, without the optimizer, and return the keys that are stored."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    message = r"FSDP version 1\) has another part of its state on every rank.* shard the model by fully_shard"
    with pytest.raises(CheckpointError, match=message):
        sharded_state_dict(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        sharded_state_dicts({"model": model}, {"optimizer": optimizer})
    before = model(torch.ones(1, 4)).tolist()
    save_checkpoint(sharded_state_dict(model), folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_sharded_state_dict(model, None, load_checkpoint(sharded_state_dict(model), folder))
    assert model(torch.ones(1, 4)).tolist() == before
    return sorted(load_metadata(folder).tensors)


@pytest.mark.processes
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_optimizer_of_the_first_version_of_fsdp_is_refused_on_every_rank(tmp_path, use_orig_params):
    keys = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert run_ranks(refused_with_the_first_version_of_fsdp, 2, tmp_path, use_orig_params) == [keys, keys]


class CountingCalls(torch.optim.SGD):
    """An optimizer that counts its steps under a name, and not under a parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_state_under_a_name_is_stored_if_it_is_plain(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = CountingCalls(model.parameters(), 0.1, momentum=0.9)
    for number in range(2):
        step(model, optimizer, number)
    save_checkpoint(sharded_state_dict(model, optimizer), tmp_path)
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
    for steps in (0, 3):
        model = nn.Linear(2, 3)
        optimizer = CountingCalls(model.parameters(), 0.1, momentum=0.9)
        for number in range(steps):
            step(model, optimizer, number)
        load_sharded_state_dict(model, optimizer, load_checkpoint(sharded_state_dict(model, optimizer), tmp_path))
        assert optimizer.state["calls"] == 2
        assert optimizer.state[model.weight]["momentum_buffer"].equal(momentum)
    for key, value in [("mean", torch.ones(1)), ("means", {"all": [torch.ones(1)]}), (7, 1)]:
        optimizer.state[key] = value
        with pytest.raises(CheckpointError, match=f"the CountingCalls has state under the key {key!r}, which is no"):
            sharded_state_dict(model, optimizer)
        del optimizer.state[key]


def refused_under_a_name():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=CountingCalls, lr=0.1)
    sharded_state_dict(model, optimizer)
    step(model, optimizer, 0)
    with pytest.raises(CheckpointError, match="ZeroRedundancyOptimizer has state under the key 'calls', which is no"):
        sharded_state_dict(model, optimizer)
    return True


@pytest.mark.processes
def test_state_under_a_name_in_a_zero_redundancy_optimizer_is_refused():
    assert run_ranks(refused_under_a_name, 2) == [True, True]


class Late(torch.optim.SGD):
    """An optimizer whose state is None until its first step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = None

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = torch.full_like(parameter, 3.0)


def test_state_that_is_none_gets_the_stored_tensors(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = Late(model.parameters(), 0.1)
    save_checkpoint(sharded_state_dict(model, optimizer), tmp_path, step=0)
    optimizer.step()
    save_checkpoint(sharded_state_dict(model, optimizer), tmp_path, step=1)
    optimizer = Late(model.parameters(), 0.1)
    load_sharded_state_dict(model, optimizer, load_checkpoint(sharded_state_dict(model, optimizer), tmp_path, step=1))
    assert [optimizer.state[parameter]["moment"].tolist() for parameter in model.parameters()] == [
        [[3.0, 3.0]] * 3,
        [3.0] * 3,
    ]
    optimizer = Late(model.parameters(), 0.1)
    load_sharded_state_dict(model, optimizer, load_checkpoint(sharded_state_dict(model, optimizer), tmp_path, step=0))
    assert [optimizer.state[parameter]["moment"] for parameter in model.parameters()] == [None, None]


def test_a_learning_rate_of_numpy_is_stored_as_a_plain_number():
    model, optimizer, _ = pair()
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    (group,) = sharded_state_dict(model, optimizer)["optimizer"]["param_groups"]
    assert type(group["lr"]) is float and group["lr"] == 0.25


def test_a_prefix_comes_before_every_key():
    model, optimizer, _ = pair()
    step(model, optimizer, 0)
    state = sharded_state_dict(model, optimizer, prefix="net.")
    assert state["model"]["weight"].key == "net.weight"
    assert state["optimizer"]["state"]["bias"]["momentum_buffer"].key == "net.optimizer.state.bias.momentum_buffer"


@pytest.mark.parametrize("is_stored", [True, False])
def test_an_optimizer_with_a_prefix_does_not_get_the_state_of_the_model_without_one(tmp_path, is_stored):
    def build():
        return pair()[:2], pair()[:2]

    def state(first, second):
        return {"q1": sharded_state_dict(*first), "q2": sharded_state_dict(*second, prefix="q2.")}

    first, second = build()
    step(*first, 0)
    if is_stored:
        step(*second, 1)
    save_checkpoint(state(first, second), tmp_path)
    new_first, new_second = build()
    loaded = load_checkpoint(state(new_first, new_second), tmp_path)
    load_sharded_state_dict(*new_first, loaded["q1"])
    load_sharded_state_dict(*new_second, loaded["q2"])
    for (model, optimizer), (new_model, new_optimizer) in ((first, new_first), (second, new_second)):
        before = optimizer.state_dict()["state"]
        after = new_optimizer.state_dict()["state"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key]["momentum_buffer"], after[key]["momentum_buffer"]) for key in before)
        assert torch.equal(model.weight, new_model.weight)


def test_state_keeps_the_dtype_that_was_stored():
    model, optimizer, _ = pair(nn.Linear(2, 3).bfloat16())
    wide = {"weight": {"momentum_buffer": torch.full((3, 2), 1 / 3)}}
    load_sharded_state_dict(model, optimizer, {"optimizer": {"state": wide}})
    assert optimizer.state[model.weight]["momentum_buffer"].equal(wide["weight"]["momentum_buffer"])


def test_names_that_contain_each_other_keep_their_state_apart():
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})})
    _, _, state = pair(model)
    stored = {"optimizer.state.a.weight.m": ((1, 1), "float32"), "optimizer.state.b.a.weight.n": ((), "int64")}
    grown = state["optimizer"].expected({**stored, "optimizer.state.c.m": ((), "float32"), "a.weight": ((), "int8")})
    assert {name: list(item) for name, item in grown["state"].items()} == {"a.weight": ["m"], "b.a.weight": ["n"]}
    assert grown["state"]["b.a.weight"]["n"].dtype == torch.int64
    assert state["optimizer"]["state"] == {}


def test_optimizer_state_in_lists_is_not_created_by_load():
    model, optimizer, state = pair()
    stored = {"optimizer.state.weight.momentum_buffer.0": ((), "float32")}
    with pytest.raises(
        CheckpointError, match=r"cannot load 'optimizer\.state\.weight\.momentum_buffer\.0': .* must step before"
    ):
        state["optimizer"].expected(stored)
    # What is stored beyond the present list would be lost.
    optimizer.state[model.weight]["momentum_buffer"] = [torch.tensor(1.0)]
    part = sharded_state_dict(model, optimizer)["optimizer"]
    assert part.expected(stored)["state"]["weight"]["momentum_buffer"][0].data == 1
    with pytest.raises(CheckpointError, match=r"momentum_buffer\.1': .* until they have the stored structure"):
        part.expected({**stored, "optimizer.state.weight.momentum_buffer.1": ((), "float32")})


def other_parameter(model, optimizer, loaded):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})


def fewer_groups(model, optimizer, loaded):
    loaded["optimizer"]["param_groups"].clear()


def other_group(model, optimizer, loaded):
    loaded["optimizer"]["param_groups"][0]["params"] = ["weight"]


def unknown_tensor(model, optimizer, loaded):
    loaded["model"]["head"] = torch.zeros(1)


def unknown_state(model, optimizer, loaded):
    loaded["optimizer"]["state"] = {"head": {}}


def other_shape(model, optimizer, loaded):
    loaded["model"]["weight"] = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        (other_parameter, r"parameter 0 in group 1 of the optimizer, of shape \(7,\), is not a parameter of the model"),
        (fewer_groups, "0 parameter groups are stored, but the optimizer has 1"),
        (other_group, r"group 0 of the optimizer and the stored group differ in parameters: \['bias'\]"),
        (unknown_tensor, r"unexpected keys for the model: \['head'\]"),
        (unknown_state, r"unexpected parameters for the optimizer: \['head'\]"),
        (other_shape, r"'weight': loaded a local part of shape \(2, 2\), expected \(3, 2\), on rank 0"),
    ],
)
def test_error_names_the_entry_that_does_not_fit(change, output):
    model, optimizer, state = pair()
    loaded = loaded_from(state)
    change(model, optimizer, loaded)
    with pytest.raises(CheckpointError, match=output):
        load_sharded_state_dict(model, optimizer, loaded)


def test_a_parameter_of_another_model_cannot_be_stored():
    _, optimizer, _ = pair()
    with pytest.raises(CheckpointError, match="rank 0: parameter 0 in group 0 of the optimizer"):
        sharded_state_dict(nn.Linear(2, 3), optimizer)


def test_values_loaded_in_place_are_not_copied(monkeypatch):
    model, optimizer, state = pair()
    calls = []
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda _, values, **_more: calls.append(values))
    load_sharded_state_dict(model, optimizer, loaded_from(state))
    assert calls == [{}]


def uneven_parts():
    """Return whether the shards of a layer that divides evenly over no axis have the rows that their offsets say."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7))
    whole = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    shard = sharded_state_dict(model)["model"]["0.weight"]
    assert dist.get_world_size() == 6
    return torch.equal(whole[shard.global_slice()], shard.data)


@pytest.mark.slow
def test_uneven_parts_of_fsdp_over_tensor_parallelism_are_where_they_are_said_to_be():
    assert run_ranks(uneven_parts, 6) == [True] * 6
