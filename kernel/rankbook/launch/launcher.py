"""Protocol between the coordinator and a launcher, which starts the rank processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rankbook.process_identity import ProcessInfo
from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import FromForkserver


# `local.LocalLauncher` starts a forkserver of this notebook, `local.ReattachedLauncher` talks to that of an earlier
# one. The driver thread makes all calls, and waits on `fileno` together with its sockets.
class Launcher(Protocol):
    """Start and kill ranks, and report their exits."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `read` has messages."""

    def fork(self, request: ForkRank) -> None:
        """Start one rank. `read` always reports its exit."""

    def kill(self, rank: int, incarnation: int) -> None:
        """Kill this incarnation of the rank, and its children."""

    def read(self) -> Iterator[FromForkserver]:
        """Yield the messages received since the last call. Never blocks."""

    def process_info(self, rank: int, pid: int | None) -> ProcessInfo | None:
        """Return the state of the process of `rank`; None if it has ended."""

    @property
    def alive(self) -> bool:
        """Return True while it can start ranks."""

    def close(self) -> None:
        """Kill the remaining processes of the cluster, wait for their end, and release resources."""
