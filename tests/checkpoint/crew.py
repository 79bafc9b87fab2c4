"""Ranks that are forked within a moment, to be killed; what they hold tells of which generation it is.

Owns: the forks, their pipes, that they end. Refuses: to know what they do.

It is to be used in a process that `run_ranks` has started for it alone: a fork of a process with threads would hang.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

HUNG = 20.0
"""Seconds after which a rank that should have ended is taken for hung."""


class Crew:
    """`world` forks that run `work(rank, say)` in a process group of theirs; `say` sends what the test gets."""

    def __init__(self, world: int, folder: Path, work: Callable[[int, Callable[[Any], None]], Any]) -> None:
        self.said: list[list[Any]] = [[] for _ in range(world)]
        self._pipes: dict[Any, int] = {}
        self.pids: list[int] = []
        store = folder / f"store-{time.monotonic_ns()}"
        for rank in range(world):
            ours, theirs = Pipe()
            pid = os.fork()
            leader = self.pids[0] if self.pids else pid
            os.setpgid(pid, leader)  # a group of theirs, which one of them may kill; whoever comes first makes it
            if not pid:
                _live(rank, world, store, work, theirs)
            theirs.close()
            self.pids.append(pid)
            self._pipes[ours] = rank

    def hear(self, until: Callable[[], bool], timeout: float = HUNG) -> bool:
        """Listen until something is so, all have ended, or `timeout` s have passed. Whether it is so."""
        deadline = time.monotonic() + timeout
        while not until() and self._pipes and (left := deadline - time.monotonic()) > 0:
            for each in multiprocessing.connection.wait(list(self._pipes), timeout=left):
                try:
                    self.said[self._pipes[each]].append(each.recv())
                except (EOFError, ConnectionError):
                    del self._pipes[each]
        return until()

    def kill(self, ranks: list[int]) -> None:
        """Now, with SIGKILL."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> list[int]:
        """Wait until all have ended, and reap them. Raises AssertionError where one hangs. The exit codes."""
        hung = not self.hear(lambda: not self._pipes)
        if hung:
            self.kill(list(set(self._pipes.values())))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        assert not hung, f"ranks {sorted(self._pipes.values())} hung; all have said {self.said}"
        return codes


def run(world: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` gives on each of `world` fresh ranks; a text where it raised."""
    crew = Crew(world, folder, lambda rank, say: say(work(rank)))
    crew.end()
    return [said[-1] if said else "said nothing" for said in crew.said]


def _live(rank: int, world: int, store: Path, work: Callable[..., Any], pipe: Any) -> None:
    import torch.distributed as dist

    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        dist.barrier()
        work(rank, pipe.send)
        dist.barrier()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the test hears of it
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
        os._exit(code)


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
    for each in (held["w"], held["half"]["rows"], held["everywhere"], held["scalar"]):
        each.data.fill_(-1)
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
