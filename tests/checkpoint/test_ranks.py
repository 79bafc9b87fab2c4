"""Test checkpoints that are saved and loaded by different numbers of real processes."""

from __future__ import annotations

import pytest
import torch

import rankbook.checkpoint as rc
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.slow

TENSOR = torch.arange(12 * 6.0).reshape(12, 6)


def part(key, counts, data):
    """Return this rank's part of the grid as an entry, and its values."""
    import torch.distributed as dist

    from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor

    rank = dist.get_rank()
    coordinates = divmod(rank, counts[1])
    rows, columns = 12 // counts[0], 6 // counts[1]
    local = TENSOR[coordinates[0] * rows :, coordinates[1] * columns :][:rows, :columns].clone()
    offsets = [(axis, at, count) for axis, (at, count) in enumerate(zip(coordinates, counts, strict=True))]
    return ShardedTensor.from_rank_offsets(key, local if data else torch.zeros_like(local), *offsets), local


def save_on_four(folder, of_one):
    """Load a checkpoint of one rank. Then save grids, every kind of DTensor and an object, twice with other values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import rankbook.checkpoint as rc

    entry, local = part("w", (2, 2), False)
    loaded = rc.load({"w": entry, "s": torch.zeros(())}, of_one)
    assert torch.equal(loaded["w"], local)
    assert loaded["s"].item() == 3

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = TENSOR.clone()
    state = {
        "rows": part("rows", (4, 1), True)[0],
        "squares": part("squares", (2, 2), True)[0],
        "dtensor": distribute_tensor(tensor, mesh, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]),
        "uneven": distribute_tensor(tensor[:5], mesh, [Shard(0), Shard(0)]),  # 2, 1, 1 and 1 rows
        "plain": tensor[0],
        "rng": rc.ShardedObject("rng", {"rank": dist.get_rank()}, (4,), (dist.get_rank(),)),
        "epoch": 1,
    }
    rc.save(state, folder)
    with torch.no_grad():
        tensor += 1
        for key in ("dtensor", "copies", "uneven"):
            state[key].to_local().add_(1)
        state["rows"].data += 1
        state["squares"].data += 1
    return rc.save({**state, "epoch": 2}, folder, fully_parallel=True).bytes


def load_on_three(folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import rankbook.checkpoint as rc

    mesh, zeros = init_device_mesh("cpu", (3,)), torch.zeros(12, 6)
    (rows, own_rows), (squares, own_columns) = part("rows", (3, 1), False), part("squares", (1, 3), False)
    crossed, local = part("dtensor", (3, 1), False)
    state = {
        "rows": rows,
        "squares": squares,
        "dtensor": crossed,
        "copies": distribute_tensor(zeros, mesh, [Shard(1)]),
        "uneven": distribute_tensor(zeros[:5], mesh, [Shard(0)]),
        "plain": torch.zeros(6),
        "rng": rc.ShardedObject("rng", None, (4,), (dist.get_rank() + 1,)),
        "epoch": 0,
    }
    for step, more in ((0, 0), (1, 1)):
        loaded = rc.load(state, folder, step=step)
        assert torch.equal(loaded["rows"], own_rows + more)
        assert torch.equal(loaded["squares"], own_columns + more)
        assert torch.equal(loaded["dtensor"], local + more)
        assert torch.equal(loaded["copies"].full_tensor(), TENSOR + more)
        assert torch.equal(loaded["uneven"].full_tensor(), TENSOR[:5] + more)
        assert torch.equal(loaded["plain"], TENSOR[0] + more)
        assert loaded["rng"] == {"rank": dist.get_rank() + 1}
        assert loaded["epoch"] == step + 1
    crossing = {"rows": distribute_tensor(zeros, mesh, [Shard(1)])}  # a DTensor from what was a ShardedTensor
    assert torch.equal(rc.load(crossing, folder, step=0)["rows"].full_tensor(), TENSOR)
    return True


def test_checkpoint_is_resharded_from_one_rank_to_four_to_three_to_one(tmp_path):
    rc.save({"w": TENSOR.clone(), "s": torch.tensor(3.0)}, tmp_path / "one")
    written = run_ranks(save_on_four, 4, str(tmp_path), str(tmp_path / "one"))
    total = 4 * TENSOR.nbytes + TENSOR[:5].nbytes + TENSOR[0].nbytes
    assert sum(written) == total
    assert run_ranks(load_on_three, 3, str(tmp_path)) == [True] * 3
    assert rc.verify(tmp_path).ok
    loaded = rc.load_plain(tmp_path, step=0)
    for key in ("rows", "squares", "dtensor", "copies"):
        assert torch.equal(loaded[key], TENSOR), key
    assert [loaded[f"rng/shard_{rank}_4"]["rank"] for rank in range(4)] == [0, 1, 2, 3]
    request = {"rows": torch.zeros(12, 6), "squares": torch.zeros(12, 6), "epoch": 0}
    loaded = rc.load(request, tmp_path)
    assert torch.equal(loaded["rows"], TENSOR + 1)
    assert torch.equal(loaded["squares"], TENSOR + 1)
    assert loaded["epoch"] == 2
