"""Test checkpoints that are saved and loaded by different numbers of real processes."""

from __future__ import annotations

import pytest
import torch

import rankbook.checkpoint as rc
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.slow

WHOLE = torch.arange(12 * 6.0).reshape(12, 6)


def part(key, counts, data):
    """This rank's part of the grid, or None."""
    import torch.distributed as dist

    from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor

    rank = dist.get_rank()
    place = divmod(rank, counts[1])
    rows, columns = 12 // counts[0], 6 // counts[1]
    own = WHOLE[place[0] * rows :, place[1] * columns :][:rows, :columns].clone()
    offsets = [(axis, at, count) for axis, (at, count) in enumerate(zip(place, counts, strict=True))]
    return ShardedTensor.from_rank_offsets(key, own if data else torch.zeros_like(own), *offsets), own


def save_on_four(folder, of_one):
    """What one rank has saved; then grids, a DTensor of each kind, an object, and a second save with other values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import rankbook.checkpoint as rc

    entry, own = part("w", (2, 2), False)
    found = rc.load({"w": entry, "s": torch.zeros(())}, of_one)
    assert torch.equal(found["w"], own)
    assert found["s"].item() == 3

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = WHOLE.clone()
    state = {
        "rows": part("rows", (4, 1), True)[0],
        "squares": part("squares", (2, 2), True)[0],
        "dtensor": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "uneven": distribute_tensor(whole[:5], mesh, [Shard(0), Shard(0)]),  # 2, 1, 1 and 1 rows
        "plain": whole[0],
        "rng": rc.ShardedObject("rng", {"rank": dist.get_rank()}, (4,), (dist.get_rank(),)),
        "epoch": 1,
    }
    rc.save(state, folder)
    with torch.no_grad():
        whole += 1
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
    crossed, own = part("dtensor", (3, 1), False)
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
        found = rc.load(state, folder, step=step)
        assert torch.equal(found["rows"], own_rows + more)
        assert torch.equal(found["squares"], own_columns + more)
        assert torch.equal(found["dtensor"], own + more)
        assert torch.equal(found["copies"].full_tensor(), WHOLE + more)
        assert torch.equal(found["uneven"].full_tensor(), WHOLE[:5] + more)
        assert torch.equal(found["plain"], WHOLE[0] + more)
        assert found["rng"] == {"rank": dist.get_rank() + 1}
        assert found["epoch"] == step + 1
    crossing = {"rows": distribute_tensor(zeros, mesh, [Shard(1)])}  # a DTensor from what was a ShardedTensor
    assert torch.equal(rc.load(crossing, folder, step=0)["rows"].full_tensor(), WHOLE)
    return True


def test_checkpoint_is_resharded_from_one_rank_to_four_to_three_to_one(tmp_path):
    rc.save({"w": WHOLE.clone(), "s": torch.tensor(3.0)}, tmp_path / "one")
    written = run_ranks(save_on_four, 4, str(tmp_path), str(tmp_path / "one"))
    total = 4 * WHOLE.nbytes + WHOLE[:5].nbytes + WHOLE[0].nbytes
    assert sum(written) == total
    assert run_ranks(load_on_three, 3, str(tmp_path)) == [True] * 3
    assert rc.verify(tmp_path).ok
    found = rc.load_plain(tmp_path, step=0)
    for key in ("rows", "squares", "dtensor", "copies"):
        assert torch.equal(found[key], WHOLE), key
    assert [found[f"rng/shard_{rank}_4"]["rank"] for rank in range(4)] == [0, 1, 2, 3]
    asked = {"rows": torch.zeros(12, 6), "squares": torch.zeros(12, 6), "epoch": 0}
    found = rc.load(asked, tmp_path)
    assert torch.equal(found["rows"], WHOLE + 1)
    assert torch.equal(found["squares"], WHOLE + 1)
    assert found["epoch"] == 2
