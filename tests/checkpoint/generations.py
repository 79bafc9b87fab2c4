"""State for checkpoint tests: every value shows which generation (save) it belongs to."""

from __future__ import annotations

from typing import Any

import torch


def state(rank: int, world: int, generation: int, rows: int = 512) -> dict[str, Any]:
    """Return a state whose values all name the generation: shards, a replica, an object per rank, a common part."""
    from rankbook.checkpoint import ShardedObject, ShardedTensor

    def sharded(key: str, dtype: torch.dtype, *offsets: Any, replica: int = 0) -> ShardedTensor:
        source = torch.Generator().manual_seed(generation * 1000 + len(key) * 100 + (rank if offsets else 0))
        data = torch.randn(rows, 512, generator=source).to(dtype)
        return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)

    return {
        "w": sharded("w", torch.float32, (0, rank, world)),
        "half": {"rows": sharded("half.rows", torch.bfloat16, (1, rank, world))},
        "everywhere": sharded("everywhere", torch.float32, replica=rank),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(float(generation)), replica_id=rank),
        "random": ShardedObject("random", {"generation": generation, "rank": rank}, (world,), (rank,)),
        "generation": generation,
        "more": {"list": [generation, "words", {"deep": float(generation)}]},
    }


def train(state_dict: dict[str, Any]) -> None:
    """Change all of it in place, as training does."""
    for item in (state_dict["w"], state_dict["half"]["rows"], state_dict["everywhere"], state_dict["scalar"]):
        item.data.fill_(-1)
    state_dict["random"].data["generation"] = state_dict["generation"] = state_dict["more"]["list"][0] = -1
    state_dict["more"]["list"][2]["deep"] = -1.0


def generation_of(rank: int, world: int, loaded: dict[str, Any], rows: int = 512) -> int:
    """Return the generation of the loaded state. Raises AssertionError if it mixes several."""
    generation = loaded["generation"]
    expected = state(rank, world, generation, rows)
    for key in ("w", "everywhere", "scalar"):
        assert torch.equal(loaded[key], expected[key].data), f"{key} is not of generation {generation}"
    assert torch.equal(loaded["half"]["rows"], expected["half"]["rows"].data), f"half is not of {generation}"
    assert loaded["random"] == expected["random"].data
    assert loaded["more"] == expected["more"]
    return int(generation)
