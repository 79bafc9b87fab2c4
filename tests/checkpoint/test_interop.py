"""Others read ours and we read theirs, value by value: torch's own `dcp`, and Megatron-Core where it is installed.

Megatron's part runs after `pip install --no-deps megatron-core==0.16.1`, a matter of seconds; it is skipped without it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import rankbook.checkpoint as rc
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError
from tests.checkpoint.simulated import save_ranks
from tests.checkpoint.test_reshard import DTYPES, bits, grid, numbered
from tests.rank_processes import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def equal(one, other):
    """Return whether two states are nested alike, with tensors equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def blank(value):
    """The same, with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(entry, torch.Tensor | dict) for entry in value):
        return [blank(element) for element in value]
    return None


def test_dcp_reads_a_checkpoint_of_four_ranks(tmp_path):
    tensors = {str(dtype): numbered((8, 6), dtype) for dtype in DTYPES}
    ranks = [{} for _ in range(4)]
    for key, tensor in tensors.items():
        for state, shard in zip(ranks, grid(key, tensor, (2, 2)), strict=True):
            state[key] = shard
    for rank, state in enumerate(ranks):
        state |= {"rng": rc.ShardedObject("rng", rank, (4,), (rank,)), "lr": 0.1}
        state["scalar"] = rc.ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5), replica_id=rank)
        state["none"] = rc.ShardedTensor.from_rank_offsets("none", torch.zeros(0, 3), replica_id=rank)
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    save_ranks(ranks, storage_of(tmp_path), step=3)
    step = tmp_path / "step-3"
    loaded = blank(tensors) | {"rng/shard_2_4": None}
    dcp.load(loaded, checkpoint_id=step, no_dist=True)
    assert loaded.pop("rng/shard_2_4") == [2]
    assert equal(loaded, tensors)

    dcp_to_torch_save(step, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert [loaded.pop(f"rng/shard_{rank}_4") for rank in range(4)] == [[0], [1], [2], [3]]
    assert equal(loaded, tensors)
    assert torch.load(step / "common.pt", weights_only=True) == {"lr": 0.1}


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_load_plain_reads_dcp_checkpoints_with_nesting_and_values(tmp_path):
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "epoch": 3,
        "names": ["one"],
        "history": [{"loss": 0.5}, {"loss": 0.25}],
        "mixed": [torch.ones(2), {"x": torch.zeros(1), "n": 5}],
        "blob": b"abc",
        "none": None,
        "table": {0: 0.5, "a": {1, 2}},
        "by number": {0: 1, 1: [2]},
        "turned": torch.randn(30, 20).t(),
        "empty": torch.zeros(0, 3),
        **{str(dtype): numbered((4, 5), dtype) for dtype in DTYPES},
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert equal(rc.load({**blank(state), "none": 1}, tmp_path), state)
    assert equal(rc.load(blank({"model": state["model"]}), tmp_path), {"model": state["model"]})
    loaded = rc.load_plain(tmp_path)
    assert equal(loaded["model.0.weight"], state["model"]["0.weight"])
    assert equal(loaded["optim"]["param_groups"], state["optim"]["param_groups"])
    assert (loaded["epoch"], loaded["names"], loaded["blob"]) == (3, ["one"], b"abc")
    assert rc.load(blank({"model": state["model"]}), tmp_path, strict="return_all")[1] >= {"mixed.0", "turned"}

    part = rc.ShardedTensor.from_rank_offsets("turned", torch.zeros(10, 15), (0, 1, 2), (1, 0, 2))
    assert equal(rc.load({"part": part}, tmp_path)["part"], state["turned"][10:, :15])
    loaded_model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    rc.load({"model": loaded_model.state_dict()}, tmp_path)
    assert equal(dict(loaded_model.state_dict()), dict(state["model"]))


def test_damage_in_checkpoints_of_torch_is_found(tmp_path):
    dcp.save({"w": torch.arange(9.0), "epoch": 3}, checkpoint_id=tmp_path, no_dist=True)
    manifest = rc.load_metadata(tmp_path)
    stored = manifest.objects["epoch"]
    for key, file, at in (
        ("'w'", manifest.tensors["w"].chunks[0].file, manifest.tensors["w"].chunks[0].data + 3),
        ("'epoch'", stored.file, stored.start + 64),
    ):
        path = tmp_path / manifest.files[file].name
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=key):
            rc.load({"w": torch.zeros(9), "epoch": 0}, tmp_path)
        data[at] ^= 1
        path.write_bytes(data)
    assert rc.load({"w": torch.zeros(9), "epoch": 0}, tmp_path)["epoch"] == 3


def both_ways(folder):
    """Save with each of Megatron and Rankbook what the other one loads, on two ranks; return what was loaded."""
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    torch.cuda.synchronize = lambda *_: None  # Megatron calls both also where there is no such device
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing as theirs
    from megatron.core.dist_checkpointing import mapping as their_map

    import rankbook.checkpoint as rc

    rank, world = dist.get_rank(), dist.get_world_size()

    def state(kind, *, filled):
        tensors = {
            "bf16": numbered((8, 6), torch.bfloat16),
            "f32": torch.arange(48.0).reshape(8, 6),
            "int": numbered((8, 6), torch.int64),
        }
        state_dict = {}
        for key, tensor in tensors.items():
            rows = tensor[rank * 4 :][:4].clone()
            data = rows if filled else torch.zeros_like(rows)
            state_dict[key] = kind.ShardedTensor.from_rank_offsets(f"model.{key}", data, (0, rank, world))
        layer = torch.full((3,), rank + 0.5) if filled else torch.zeros(3)
        state_dict["layer"] = kind.ShardedTensor.from_rank_offsets(
            "layers", layer, (0, rank, world), prepend_axis_num=1
        )
        copy = torch.arange(5.0) if filled else torch.zeros(5)
        state_dict["copy"] = kind.ShardedTensor.from_rank_offsets("copy", copy, replica_id=rank)
        state_dict["rng"] = kind.ShardedObject("rng", {"seed": rank} if filled else None, (world,), (rank,))
        return {"model": state_dict, "iteration": 7, "args": {"lr": 0.1, "layers": [1, 2]}}

    plain = {
        key: getattr(item, "data", item) if key != "rng" else {"seed": rank}
        for key, item in state(rc, filled=True)["model"].items()
    }
    expected = {"model": plain, "iteration": 7, "args": {"lr": 0.1, "layers": [1, 2]}}
    if not rank:
        Path(folder, "theirs").mkdir()
    dist.barrier()
    theirs.save(state(their_map, filled=True), f"{folder}/theirs")
    dist.barrier()
    ours_of_theirs = rc.load(state(rc, filled=False), f"{folder}/theirs", strict="raise_all")
    rc.save(state(rc, filled=True), f"{folder}/ours", step=1)
    theirs_of_ours = theirs.load(state(their_map, filled=False), f"{folder}/ours/step-1")
    loaded = theirs.load_plain_tensors(f"{folder}/ours/step-1")
    checks = [equal(ours_of_theirs, expected), equal(theirs_of_ours, expected)]
    checks.append(bits(loaded["model.bf16"]) == bits(numbered((8, 6), torch.bfloat16)))
    checks.append(theirs.load_common_state_dict(f"{folder}/ours/step-1")["iteration"] == 7)
    for child in multiprocessing.active_children():  # Megatron's manager of a queue, which would outlive this process
        child.terminate()
        child.join()
    return checks


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.mark.slow  # two processes import all of Megatron
@needs_megatron
def test_megatron_reads_our_checkpoints_and_we_read_its_checkpoints(tmp_path):
    assert run_ranks(both_ways, 2, str(tmp_path), timeout=100) == [[True] * 4] * 2
    assert rc.verify(tmp_path / "theirs").ok
    assert rc.verify(tmp_path / "ours").ok
    loaded = rc.load_plain(tmp_path / "theirs")
    assert loaded["layers"].tolist() == [[0.5] * 3, [1.5] * 3]
    assert loaded["rng/shard_1_2"] == {"seed": 1}
    assert loaded["iteration"] == 7
    request = {"f32": rc.ShardedTensor.from_rank_offsets("model.f32", torch.zeros(8, 2), (1, 2, 3))}
    assert equal(rc.load(request, tmp_path / "theirs")["f32"], torch.arange(48.0).reshape(8, 6)[:, 4:])
