"""What a launcher is.

Owns: the Protocol between the coordinator and whatever starts ranks. Refuses: to know how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import FromForkserver


class Launcher(Protocol):
    """Starts and kills ranks and tells when they end."""

    def fileno(self) -> int:
        """A descriptor that is readable when `read` has something."""

    def fork(self, request: ForkRank) -> None:
        """Start one rank. Its end is told by `read`, always."""

    def kill(self, rank: int, incarnation: int) -> None:
        """Kill this incarnation of the rank and its children."""

    def read(self) -> Iterator[FromForkserver]:
        """What happened since. Never waits."""

    @property
    def alive(self) -> bool:
        """Whether it can still start ranks."""

    def close(self) -> None:
        """Kill what is left of the cluster, wait for it, and let go."""
