"""The notebook's one cluster.

Owns: which cluster `%%distributed` means, and one that is started before anybody has asked. Refuses: more than one at a
time; `Cluster` itself makes as many as wanted.
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
"""How long kept ranks stay without a notebook, if nothing else is said."""

_current: Cluster | None = None
_starting = threading.Lock()


class _Prestarted:
    """A start on a thread of its own. It is nobody's until somebody asks for ranks."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RankbookError | None = None
        self.cluster: Cluster | None = None

    def run(self) -> None:
        """The thread."""
        try:
            self.cluster = _start(None, None, START_TIMEOUT, None)
        except RankbookError as error:
            self.error = error  # told to the first who wants the ranks
        finally:
            self.ended.set()


_ahead: _Prestarted | None = None


def prestart_ranks() -> None:
    """Start the notebook's cluster in the background; who asks for it first waits for it, and hears its error.

    It gives way, unused, to a start with another number of ranks or backend, and to ranks that are attached.
    """
    global _ahead
    _ahead = _Prestarted()
    threading.Thread(target=_ahead.run, name="rankbook-start", daemon=True).start()


def _refuse_on_a_rank() -> None:
    """A plain cell of auto mode that looks after the ranks is in the wrong place, and would start ranks of a rank."""
    if telemetry.this_rank is not None:
        raise BadRequest(
            f"this runs on rank {telemetry.this_rank}, and the ranks are looked after from the notebook's own process; "
            "%%local as the cell's first line keeps it there"
        )


def is_starting() -> bool:
    """Whether ranks are started in the background, and are not there yet."""
    return _ahead is not None and not _ahead.ended.is_set()


def _wait_ahead() -> _Prestarted | None:
    """What was started ahead and has been asked for by nobody before, once it is there."""
    global _ahead
    ahead = _ahead
    if ahead is None:
        return None
    ahead.ended.wait()
    if _ahead is not ahead:  # another thread has asked meanwhile
        return None
    _ahead = None
    return ahead


def wait_default() -> Cluster | None:
    """The notebook's cluster; one that is being started ahead is waited for. None if there is none.

    Raises what became of the start, `StartError` or `BadRequest`: once, the next one is another try.
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
    """Start the notebook's cluster, or return the one that runs if it has `n` ranks. Raises as `Cluster`.

    `keep`: the ranks outlive this process, for ten minutes or so many seconds, and `attach` finds them again. Raises
    `BadRequest` when a cluster of another size or backend runs, or one that is not kept as asked.
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
    with _starting:  # a second thread gets the first one's cluster, once it is there
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
    """Take over the ranks that an earlier notebook process has left (`start(keep=True)`); `key` says which of several.

    What they printed meanwhile is shown in `sink`; `Cluster.missed` has what became of cells that ended. Raises
    `NoCluster`, `StartError`, and `BadRequest` when a cluster runs here, or another notebook still owns that one.
    """
    global _current
    _refuse_on_a_rank()
    ahead = _wait_ahead()
    if ahead is not None and ahead.cluster is not None:
        ahead.cluster.stop()
    with _starting, deferred_interrupts():  # a cluster that is taken over is the notebook's, whatever comes in between
        if default_or_none() is not None:
            raise BadRequest("ranks are running here already; %distributed stop ends them first")
        found = find_detached()
        if sink is not None and found.records and found.notes:
            sink.emit([Stream("stderr", "".join(f"{note}\n" for note in found.notes))])
        cluster = Cluster.adopt(select_detached(found, key), sink=sink)
        local.shutdown_prestarted()  # it was kept warm for ranks that need not be started now
        _current = cluster
        return cluster


def default_or_none() -> Cluster | None:
    """The notebook's cluster, if one runs."""
    return None if _current is None or _current.stopped else _current


def current() -> Cluster:
    """The notebook's cluster. Raises `NoCluster`, and what became of a start in the background."""
    _refuse_on_a_rank()
    running = wait_default()
    if running is None:
        raise NoCluster("no ranks are running; rankbook.start() or %distributed start makes them")
    return running


def stop() -> bool:
    """Stop the notebook's cluster; whether there was one."""
    _wait_ahead()
    running = default_or_none()
    if running is None:
        return False
    running.stop()
    return True
