"""Fake ranks: a cluster source and a checkpoint source of any size, which record what was clicked.

Also imported by the notebooks of the browser tests and of the benchmark, whose kernels have no ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rankbook.errors import InvalidArgument
from rankbook.protocol.telemetry import (
    CheckpointFolder,
    CheckpointSave,
    Holding,
    MemoryUse,
    Placement,
    RankDetail,
    RankPlacement,
    RankSave,
    Saves,
    Shard,
    ShardedTensorMap,
    ShardMap,
    Statistic,
    StoredCheckpoint,
    Variable,
)

GB = 1_000_000_000
MODEL = Holding(
    "model", "model", "Transformer", "FSDP2", 1_240_000, 4_960_000, ("float32",), "cuda:0", "Shard(dim=0) ×24"
)
LOADER = Holding("loader", "loader", "DataLoader", "", 0, 0, (), "", "epoch 1, batch 12 of 100")


def rank_placement(rank: int, *, tick: int = 0, per_host: int = 8, **changes: Any) -> RankPlacement:
    """Return the placement of a rank that trains; what changes depends on `tick` alone."""
    wave = (tick * 7 + rank * 13) % 100
    template = RankPlacement(
        rank=rank,
        host=f"node-{rank // per_host}",
        pid=4000 + rank,
        device=f"cuda:{rank % per_host}",
        device_name="H200",
        state="running",
        cell=3,
        line=10 + tick % 20,
        waits_for="",
        memory=MemoryUse(140 * GB, 20 * GB, 20 * GB, 40 * GB, (10 + wave // 10) * GB, (50 - wave // 10) * GB, 0),
        utilisation=wave / 100,
        steps=tick,
        rate=4 + wave / 100,
        lags=False,
        holdings=(replace(MODEL, device=f"cuda:{rank % per_host}"), replace(LOADER, detail=f"epoch 1, batch {tick}")),
    )
    return replace(template, **changes)


def placement(ranks: int = 4, *, tick: int = 0, at: float = 1_790_000_000.0, per_host: int = 8) -> Placement:
    """Return the placement of all ranks. One rank waits and one lags, if there are enough ranks."""
    rank_placements = [rank_placement(rank, tick=tick, per_host=per_host) for rank in range(ranks)]
    if ranks > 2:
        rank_placements[1] = replace(rank_placements[1], state="waiting", waits_for="all_reduce #41 (float32[4, 4])")
        rank_placements[2] = replace(rank_placements[2], lags=True, rate=1.5)
    return Placement(tuple(rank_placements), at, "main")


@cache
def shard_map(name: str = "model", *, parameters: int = 6, ranks: int = 4) -> ShardMap:
    """Return parameters that are sharded over the ranks in several ways, the same ones in every call."""
    return ShardMap(name, "model", tuple(sharded_tensor(index, ranks) for index in range(parameters)), "")


def sharded_tensor(index: int, ranks: int) -> ShardedTensorMap:
    """Return a tensor map: in turn sharded by rows, on a 2-d mesh, replicated, a vector, and with four dimensions."""
    key = f"layers.{index // 5}.{('weight', 'attention', 'norm', 'bias', 'conv')[index % 5]}"
    kind = index % 5
    shape: tuple[int, ...] = ((64 * ranks, 128), (32 * ranks, 64 * 2), (96, 48), (16 * ranks,), (8 * ranks, 4, 3, 3))[
        kind
    ]
    across = 2 if kind == 1 and ranks % 2 == 0 else 1
    rows = 1 if kind == 2 else ranks // across
    shards = []
    for rank, (row, column) in enumerate(product(range(rows), range(across))):
        local = (shape[0] // rows, *(size // across if dim == 0 else size for dim, size in enumerate(shape[1:])))
        offset = (row * local[0], *(column * local[1] if dim == 0 else 0 for dim in range(len(shape) - 1)))
        count = 4
        for size in local:
            count *= size
        copies = range(ranks) if kind == 2 else [rank]
        shards += [Shard(item, offset, local, copy, f"cuda:{item}", count) for copy, item in enumerate(copies)]
    return ShardedTensorMap(key, "float32", shape, tuple(shards))


def saves(written: float = 0.5, *, ranks: int = 4, phase: str = "writing", error: str = "") -> Saves:
    """Return a save of step 40 with this progress."""
    progress = [
        CheckpointSave("/ckpt", "step-40", 40, phase, int(written * GB), GB, 10 * written, 0.1 * GB, True, error)
        for _ in range(ranks)
    ]
    return Saves(tuple(RankSave(rank, save) for rank, save in enumerate(progress)), 1_790_000_000.0)


class FakeFeed:
    """A feed whose states the test pushes, or that ticks by itself; `acts` are the clicks that reached it."""

    def __init__(self, ranks: int = 4, parameters: int = 6) -> None:
        self.ranks, self.parameters = ranks, parameters
        self.watchers: dict[str, list[Callable[[Struct], None]]] = {"placement": [], "saves": []}
        self.last: dict[str, Struct] = {"placement": placement(ranks)}
        self.acts: list[tuple[str, int | None]] = []
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.ended = 0
        self._stop = threading.Event()

    def watch(self, kind: str, callback: Callable[[Struct], None], **_options: object) -> Callable[[], None]:
        """See `ClusterSource`."""
        self.watchers[kind].append(callback)
        if kind in self.last:
            callback(self.last[kind])

        def end() -> None:
            self.watchers[kind].remove(callback)
            self.ended += 1

        return end

    def push(self, kind: str, state: Struct) -> None:
        """Show this state in all views."""
        self.last[kind] = state
        for callback in tuple(self.watchers[kind]):
            callback(state)

    def ask(self, kind: str, **options: object) -> Struct:
        """See `ClusterSource`."""
        self.asked.append((kind, options))
        rank = options.get("rank")
        match kind:
            case "placement":
                return placement(self.ranks)
            case "detail" if isinstance(rank, int) and rank < self.ranks:
                stack = ("cell [3], line 12: loss.backward()", "torch/_tensor.py, line 521: backward")
                variables = (
                    Variable("model", "Transformer", None, "", "", 4_960_000, "Transformer(24 layers)"),
                    Variable("x", "Tensor", (32, 128), "float32", f"cuda:{rank}", 16384, "tensor([[0.1, …"),
                )
                return RankDetail(rank, stack, (f"rank {rank}: step 11", "step <b>12</b>"), variables)
            case "shards" if options["name"] == "nothing":
                return ShardMap("nothing", "", (), "no rank has a variable `nothing`")
            case "shards":
                return shard_map(str(options["name"]), parameters=self.parameters, ranks=self.ranks)
            case "statistic" if isinstance(rank, int):
                return Statistic(rank, -0.5, 0.25, 1.5, 2, 0)
        raise InvalidArgument(f"there is no {kind} of {options}")

    def act(self, kind: str, rank: int | None) -> str:
        """See `ClusterSource`."""
        self.acts.append((kind, rank))
        return f"rank {rank} was told to {kind}"

    def tick(self, rate: float = 10.0, *, kinds: tuple[str, ...] = ("placement",)) -> None:
        """Push a new state `rate` times a second from a thread, until `stop`."""

        def run() -> None:
            number, due = 0, time.monotonic()
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                number, due = number + 1, due + 1 / rate
                if "placement" in kinds:
                    self.push("placement", placement(self.ranks, tick=number, at=time.time()))
                if "saves" in kinds:
                    self.push("saves", saves(number % 100 / 100, ranks=self.ranks))

        threading.Thread(target=run, name="fake-feed", daemon=True).start()

    def stop(self) -> None:
        """End the ticking."""
        self._stop.set()


class FakeCheckpoints:
    """Three checkpoints, one of them broken off; `done` is what was clicked."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.checked: dict[str, str] = {"step-20": "damaged"}
        self.names = ["step-20", "step-30", "step-40.partial"]

    def list_checkpoints(self) -> CheckpointFolder:
        """See `CheckpointSource`."""
        return CheckpointFolder("/ckpt", tuple(self._stored(name) for name in self.names), "")

    def _stored(self, name: str) -> StoredCheckpoint:
        checked = self.checked.get(name, "")
        partial = name.endswith(".partial")
        return StoredCheckpoint(
            name=name,
            step=int(name.split("-")[1].split(".", maxsplit=1)[0]),
            created=1_789_990_000.0,
            bytes=4 * GB,
            world_size=None if partial else 4,
            state="partial" if partial else "finished",
            checked=checked,
            latest=name == "step-30",
            detail="__0_0.distcp: checksum of piece 3" if checked == "damaged" else "",
        )

    def verify(self, name: str) -> str:
        """See `CheckpointSource`."""
        self.done.append(("verify", name))
        self.checked[name] = "verified"
        return f"{name}: every byte is as it was written"

    def load(self, name: str) -> str:
        """See `CheckpointSource`."""
        self.done.append(("load", name))
        return f"{name} was loaded into model"

    def delete(self, name: str) -> str:
        """See `CheckpointSource`."""
        self.done.append(("delete", name))
        self.names.remove(name)
        return f"{name} was deleted"
