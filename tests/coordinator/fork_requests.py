"""The request for a rank that no launcher of the tests really starts."""

from __future__ import annotations

from rankbook.protocol.forkserver import ForkRank


def request(rank: int, incarnation: int, downlink: str) -> ForkRank:
    return ForkRank(
        rank=rank,
        incarnation=incarnation,
        world_size=2,
        local_rank=rank,
        backend="gloo",
        device="cpu",
        threads=1,
        env={},
        cwd=b"/",
        path=(),
        uplink="memory:up",
        downlink=downlink,
        segments="",
        logs="",
        cluster="test",
    )
