"""The notebook's one cluster.

Owns: which cluster `%%distributed` means. Refuses: more than one at a time; `Cluster` itself makes as many as wanted.
"""

from __future__ import annotations

import threading

from rankbook.coordinator.cluster import START_TIMEOUT, Cluster
from rankbook.errors import BadRequest, NoCluster

_current: list[Cluster] = []
_starting = threading.Lock()


def start(n: int | None = None, *, backend: str | None = None, timeout: float = START_TIMEOUT) -> Cluster:
    """Start the notebook's cluster, or return the one that runs if it has `n` ranks. Raises as `Cluster`.

    Raises `BadRequest` when a cluster of another size or backend runs.
    """
    with _starting:  # a second thread gets the first one's cluster, once it is there
        running = running_cluster()
        if running is None:
            running = Cluster(n, backend=backend, timeout=timeout)
            _current[:] = [running]
        elif n not in (None, running.world_size) or backend not in (None, running.backend):
            raise BadRequest(
                f"{running.world_size} ranks ({running.backend}) are running already; %distributed stop ends them first"
            )
        return running


def running_cluster() -> Cluster | None:
    """The notebook's cluster, if one runs."""
    return _current[0] if _current and not _current[0].stopped else None


def current() -> Cluster:
    """The notebook's cluster. Raises `NoCluster`."""
    running = running_cluster()
    if running is None:
        raise NoCluster("no ranks are running; rankbook.start() or %distributed start makes them")
    return running


def stop() -> bool:
    """Stop the notebook's cluster; whether there was one."""
    running = running_cluster()
    if running is None:
        return False
    running.stop()
    return True
