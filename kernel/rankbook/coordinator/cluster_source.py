"""What views see of a cluster, and what they can do to it.

Owns: kinds of pictures and questions by their names. Refuses: to draw, and to look while nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankbook.coordinator.cluster import Cluster
from rankbook.errors import BadRequest
from rankbook.protocol.telemetry import Struct
from rankbook.ranks import name_ranks


class ClusterFeed:
    """A feed of `cluster`. Any thread, also while cells run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def watch(self, kind: str, callback: Callable[[Any], None], **_options: object) -> Callable[[], None]:
        """See `Cluster.watch`."""
        return self._cluster.watch(kind, callback)

    def ask(self, kind: str, **options: Any) -> Struct:  # noqa: ANN401 - the question's own
        """Answer "placement", "detail" (rank), "shards" (name) or "statistic" (name, key, rank), within 2 s or so.

        Raises `RankbookError`.
        """
        questions: dict[str, Callable[..., Struct]] = {
            "placement": self._cluster.placement,
            "detail": self._cluster.detail,
            "shards": self._cluster.shards,
            "statistic": self._cluster.statistic,
        }
        if kind not in questions:
            raise BadRequest(f"{kind!r} cannot be asked; there are {', '.join(questions)}")
        return questions[kind](**options)

    def act(self, kind: str, rank: int | None = None) -> str:
        """Interrupt or restart `rank`, or all; what was done, in a sentence. Raises `RankbookError`.

        A rank's cell is interrupted on all its ranks: they wait for one another.
        """
        ranks = None if rank is None else (rank,)
        match kind:
            case "interrupt":
                cells = sorted({cell.label for cell in self._cluster.cells() if rank is None or rank in cell.ranks})
                hit = self._cluster.interrupt(ranks)
                return f"interrupted {', '.join(cells)} on {name_ranks(hit)}" if hit else "nothing runs there"
            case "restart":
                fresh = self._cluster.restart(ranks)
                have = "has a fresh process" if len(fresh) == 1 else "have fresh processes"
                return f"{name_ranks(fresh)} {have} and an empty namespace"
            case _:
                raise BadRequest(f"{kind!r} cannot be done; there are interrupt, restart")
