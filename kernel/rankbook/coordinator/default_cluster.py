"""The notebook's default cluster, which `%%distributed` uses: start, prestart, attach, stop.

There is at most one. `Cluster` itself can be created any number of times. `prestart_ranks` starts the default cluster
in the background before it is needed.
"""

from __future__ import annotations

import threading

from rankbook.coordinator.cluster import START_TIMEOUT, Cluster
from rankbook.coordinator.deferred_interrupts import deferred_interrupts
from rankbook.coordinator.reattach import select_detached
from rankbook.coordinator.running_cell import Sink
from rankbook.errors import BadRequest, NoCluster, RankbookError
from rankbook.launch import local
from rankbook.launch.registry import find_detached
from rankbook.output.merger import Stream
from rankbook.protocol import telemetry

KEEP_SECONDS = 600.0
"""Default number of seconds that kept ranks stay without a notebook."""

_current: Cluster | None = None
_starting = threading.Lock()


class _Prestarted:
    """A start in the background. The cluster is unused until the first call that needs ranks."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RankbookError | None = None
        self.cluster: Cluster | None = None

    def run(self) -> None:
        """Start the cluster. The thread's target."""
        try:
            self.cluster = _start(None, None, START_TIMEOUT, None)
        except RankbookError as error:
            self.error = error  # raised for the first caller that needs the ranks
        finally:
            self.ended.set()


_ahead: _Prestarted | None = None


def prestart_ranks() -> None:
    """Start the notebook's cluster in the background. The first use waits for it and raises its error.

    A cluster that is still unused is stopped when another number of ranks or backend is requested, or ranks are
    attached.
    """
    global _ahead
    _ahead = _Prestarted()
    threading.Thread(target=_ahead.run, name="rankbook-start", daemon=True).start()


def _refuse_on_a_rank() -> None:
    """Raise `BadRequest` on a rank, where a plain cell of auto mode would otherwise start nested ranks."""
    if telemetry.this_rank is not None:
        raise BadRequest(
            f"this runs on rank {telemetry.this_rank}, and the ranks are looked after from the notebook's own process; "
            "%%local as the cell's first line keeps it there"
        )


def is_starting() -> bool:
    """Return True if a start in the background is under way."""
    return _ahead is not None and not _ahead.ended.is_set()


def _wait_ahead() -> _Prestarted | None:
    """Wait for the start in the background and return it, to the first caller only."""
    global _ahead
    ahead = _ahead
    if ahead is None:
        return None
    ahead.ended.wait()
    if _ahead is not ahead:  # another thread was first
        return None
    _ahead = None
    return ahead


def wait_default() -> Cluster | None:
    """Return the notebook's cluster, after waiting for a start in the background. None if there is none.

    Raises the error of that start, `StartError` or `BadRequest`, once; a later call starts again.
    """
    ahead = _wait_ahead()
    if ahead is not None and ahead.error is not None:
        raise ahead.error
    return default_or_none()


def start(
    n: int | None = None,
    *,
    backend: str | None = None,
    timeout: float = START_TIMEOUT,
    keep: bool | float = False,
) -> Cluster:
    """Start the notebook's cluster, or return the running one if it has `n` ranks. Raises the errors of `Cluster`.

    `keep`: the ranks survive this process, for ten minutes or the given number of seconds, and `attach` finds them
    again. Raises `BadRequest` if a cluster of another size, backend or `keep` is running.
    """
    _refuse_on_a_rank()
    seconds = KEEP_SECONDS if keep is True else float(keep) or None
    if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
        raise BadRequest(f"keep={keep} is no time in seconds")
    ahead = _wait_ahead()
    if ahead is not None and ahead.cluster is not None and ahead.cluster is default_or_none():
        unused = ahead.cluster
        if n not in (None, unused.world_size) or backend not in (None, unused.backend) or seconds is not None:
            unused.stop()
    return _start(n, backend, timeout, seconds)


def _start(n: int | None, backend: str | None, timeout: float, seconds: float | None) -> Cluster:
    global _current
    with _starting:  # a second thread waits for the first one's cluster
        running = default_or_none()
        if running is None:
            _current = running = Cluster(n, backend=backend, timeout=timeout, keep=seconds)
        elif n not in (None, running.world_size) or backend not in (None, running.backend):
            raise BadRequest(
                f"{running.world_size} ranks ({running.backend}) are running already; %distributed stop ends them first"
            )
        elif seconds not in (None, running.keep):
            how = "end with the notebook" if running.keep is None else f"are kept for {running.keep:g} s"
            raise BadRequest(
                f"{running.world_size} ranks are running already, and {how}; %distributed stop, then start --keep"
            )
        return running


def attach(key: str | None = None, *, sink: Sink | None = None) -> Cluster:
    """Attach to the ranks of an earlier notebook process (`start(keep=True)`). `key` selects one of several clusters.

    Missed output is shown in `sink`, and `Cluster.missed` has the results of the cells that ended. Raises `NoCluster`,
    `StartError`, and `BadRequest` if a cluster is running here or another notebook still owns the other one.
    """
    global _current
    _refuse_on_a_rank()
    ahead = _wait_ahead()
    if ahead is not None and ahead.cluster is not None:
        ahead.cluster.stop()
    with _starting, deferred_interrupts():  # SIGINT must not lose a cluster that was taken over
        if default_or_none() is not None:
            raise BadRequest("ranks are running here already; %distributed stop ends them first")
        detached = find_detached()
        if sink is not None and detached.records and detached.notes:
            sink.emit([Stream("stderr", "".join(f"{note}\n" for note in detached.notes))])
        cluster = Cluster.adopt(select_detached(detached, key), sink=sink)
        local.shutdown_prestarted()  # the forkserver that was prestarted for new ranks
        _current = cluster
        return cluster


def default_or_none() -> Cluster | None:
    """Return the notebook's cluster, or None if none is running."""
    return None if _current is None or _current.stopped else _current


def current() -> Cluster:
    """Return the notebook's cluster. Raises `NoCluster`, or the error of a start in the background."""
    _refuse_on_a_rank()
    running = wait_default()
    if running is None:
        raise NoCluster("no ranks are running; rankbook.start() or %distributed start makes them")
    return running


def stop() -> bool:
    """Stop the notebook's cluster. Return True if one was running."""
    _wait_ahead()
    running = default_or_none()
    if running is None:
        return False
    running.stop()
    return True
