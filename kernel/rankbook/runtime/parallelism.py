"""How the ranks are divided.

Owns: `ParallelismConfig`: the mesh's axes, their sizes, and where a rank stands. Refuses: meshes and process groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankbook.errors import BadRequest


@dataclass
class TorchTensorParallelConfig:
    """The tensor-parallel plan: names of modules (with `*`) to "colwise", "rowwise", or a ParallelStyle of torch's.

    Without a plan the model's own `tp_plan` is used.
    """

    plan: dict[str, Any] | None = None


@dataclass
class ParallelismConfig:
    """How the ranks are divided: `dp_replicate_size * dp_shard_size * tp_size` must be the world size.

    An axis that is left out, or None, has size 1. The mesh's axes are named `dp_replicate`, `dp_shard`, `tp`. Raises
    `BadRequest` for a size that is no whole number from 1 on, and for a `cp_size` or `sp_size` that is not 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    tp_handler: TorchTensorParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size = 1 if getattr(self, name) is None else getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BadRequest(f"{name}={size!r}: the size of a mesh axis is a whole number from 1 on")
            setattr(self, name, size)
        for name in ("cp_size", "sp_size"):
            if getattr(self, name) != 1:
                raise BadRequest(
                    f"{name}={getattr(self, name)}: this axis is not offered; dp_replicate, dp_shard, tp are"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh's axes, outermost first."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """How many ranks it is for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks the batches are divided."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks get the same batches."""
        return self.tp_size or 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy is sharded over several ranks."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return self.sizes["tp"] > 1

    def place_of(self, rank: int) -> dict[str, int]:
        """The rank's number on each axis."""
        place = {}
        for name, size in reversed(self.sizes.items()):
            rank, place[name] = divmod(rank, size)
        return place

    def check(self, world_size: int) -> None:
        """Raise `BadRequest` with the arithmetic unless the axes multiply to `world_size`."""
        if self.total_size != world_size:
            product = " * ".join(f"{name}({size})" for name, size in self.sizes.items())
            raise BadRequest(f"{product} = {self.total_size} != world size ({world_size}): the mesh does not fit")
