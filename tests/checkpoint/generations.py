"""State for checkpoint tests: every value shows which generation (save) it belongs to."""

from __future__ import annotations

from typing import Any

import torch


def state(rank: int, world: int, generation: int, rows: int = 512) -> dict[str, Any]:
    """A map whose every value tells the generation: shards, a replica, an object for each rank, a common part."""
    from rankbook.checkpoint import ShardedObject, ShardedTensor

    def made(key: str, dtype: torch.dtype, *place: Any, replica: int = 0) -> ShardedTensor:
        source = torch.Generator().manual_seed(generation * 1000 + len(key) * 100 + (rank if place else 0))
        data = torch.randn(rows, 512, generator=source).to(dtype)
        return ShardedTensor.from_rank_offsets(key, data, *place, replica_id=replica)

    return {
        "w": made("w", torch.float32, (0, rank, world)),
        "half": {"rows": made("half.rows", torch.bfloat16, (1, rank, world))},
        "everywhere": made("everywhere", torch.float32, replica=rank),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(float(generation)), replica_id=rank),
        "random": ShardedObject("random", {"generation": generation, "rank": rank}, (world,), (rank,)),
        "generation": generation,
        "more": {"list": [generation, "words", {"deep": float(generation)}]},
    }


def train(held: dict[str, Any]) -> None:
    """Change all of it in place, as training does."""
    for item in (held["w"], held["half"]["rows"], held["everywhere"], held["scalar"]):
        item.data.fill_(-1)
    held["random"].data["generation"] = held["generation"] = held["more"]["list"][0] = -1
    held["more"]["list"][2]["deep"] = -1.0


def generation_of(rank: int, world: int, loaded: dict[str, Any], rows: int = 512) -> int:
    """Of which generation all of it is. Raises AssertionError where it is a mix."""
    generation = loaded["generation"]
    expected = state(rank, world, generation, rows)
    for key in ("w", "everywhere", "scalar"):
        assert torch.equal(loaded[key], expected[key].data), f"{key} is not of generation {generation}"
    assert torch.equal(loaded["half"]["rows"], expected["half"]["rows"].data), f"half is not of {generation}"
    assert loaded["random"] == expected["random"].data
    assert loaded["more"] == expected["more"]
    return int(generation)
