"""The notebook's default cluster, which `%%distributed` uses: start, prestart, attach, stop.

There is at most one. `Cluster` itself can be created any number of times. `prestart_ranks` starts the default cluster
in the background before it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rankbook.coordinator.cluster import HOSTS_TIMEOUT, START_TIMEOUT, Cluster
from rankbook.coordinator.reattach import select_detached
from rankbook.coordinator.running_cell import Sink
from rankbook.coordinator.wait import deferred_interrupts
from rankbook.engines.engine import Engine
from rankbook.errors import InvalidArgument, NoClusterError, RankbookError, StartError
from rankbook.launch import local
from rankbook.launch.hosts import LOST_AFTER, HostOptions
from rankbook.launch.placement import choose_device
from rankbook.launch.registry import ClusterRecord, find_detached, session_id
from rankbook.output.merger import Stream
from rankbook.protocol import telemetry

KEEP_SECONDS = 600.0
"""Default number of seconds that kept ranks stay without a notebook."""

_DEVICES = {"cpu": "the CPU", "cuda": "CUDA devices"}
_HOST_OPTIONS = {
    # field of `HostOptions`: argument of `start`
    **{name: name for name in ("nodes", "address", "port", "home", "lost_after", "env", "sync_code")},
    "arguments": "launcher_args",
}

_current: Cluster | None = None
# Held during a whole start, which may take a minute. Functions that only read `_current` do not take it.
_starting = threading.Lock()


class _Prestarted:
    """A start in the background. The cluster is unused until the first call that needs ranks."""

    def __init__(self) -> None:
        self.packages = local.InstalledPackages()
        self.ended = threading.Event()
        self.error: RankbookError | None = None
        self.cluster: Cluster | None = None

    def run(self) -> None:
        """Start the cluster. The thread's target."""
        try:
            self.cluster = _start(None, None, None, START_TIMEOUT, None)
        except RankbookError as error:
            # Only errors of Rankbook. Any other exception is a bug, which `threading.excepthook` prints.
            self.error = error  # raised for the first caller that needs the ranks
        # In all cases, because `_wait_prestarted` waits without a timeout.
        finally:
            self.ended.set()


_prestarted: _Prestarted | None = None


def prestart_ranks() -> None:
    """Start the notebook's cluster in the background. The first use waits for it and raises its error.

    A cluster that is still unused is stopped when another number of ranks, backend or device is requested, or ranks
    are attached.
    """
    global _prestarted
    _prestarted = _Prestarted()
    threading.Thread(target=_prestarted.run, name="rankbook-start", daemon=True).start()


def renew_unused() -> bool:
    """Start again what was started early, forkserver or ranks, if other packages are installed now.

    Return False if there are ranks in use, which keep the modules that are imported.
    """
    if (prestarted := _prestarted) is not None:
        prestarted.ended.wait()
        if prestarted is _prestarted and prestarted.packages.changed:
            if prestarted.cluster is not None:
                prestarted.cluster.stop()
            prestart_ranks()
        return True
    if default_or_none() is not None:
        return False
    local.prestart_forkserver()
    return True


def _check_not_on_rank() -> None:
    """Raise `InvalidArgument` on a rank, where a plain cell of auto mode would otherwise start nested ranks."""
    if telemetry.this_rank is not None:
        raise InvalidArgument(
            f"this code runs on rank {telemetry.this_rank}, but the ranks are managed from the notebook's process; "
            "put %%local in the first line of the cell to run it there"
        )


def is_starting() -> bool:
    """Return True if a start in the background is under way."""
    return _prestarted is not None and not _prestarted.ended.is_set()


def _wait_prestarted() -> _Prestarted | None:
    """Wait for the start in the background and return it, to the first caller only."""
    global _prestarted
    prestarted = _prestarted
    if prestarted is None:
        return None
    prestarted.ended.wait()
    # Several threads may have waited. Only one of them takes the result, so that an error is raised once.
    if _prestarted is not prestarted:  # another thread was first
        return None
    _prestarted = None
    return prestarted


def wait_default() -> Cluster | None:
    """Return the notebook's cluster, after waiting for a start in the background. None if there is none.

    Raises the error of that start, `StartError` or `InvalidArgument`, once; a later call starts again.
    """
    prestarted = _wait_prestarted()
    if prestarted is not None and prestarted.error is not None:
        raise prestarted.error
    return default_or_none()


def start(
    n: int | None = None,
    *,
    backend: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
    keep: bool | float = False,
    launcher: str | Engine | None = None,
    nodes: int | None = None,
    launcher_args: Sequence[str] = (),
    address: str | None = None,
    port: int = 0,
    home: int = 0,
    lost_after: float = LOST_AFTER,
    env: Sequence[str] = (),
    sync_code: bool = True,
) -> Cluster:
    """Start the notebook's cluster, or return the running one if it has `n` ranks. Raises the errors of `Cluster`.

    `device` is "cpu", which hides CUDA devices from the ranks, or "cuda", which raises `StartError` if torch can use
    none; by default the ranks use CUDA devices if torch can. `timeout` is in seconds, by default 180. `keep`: the ranks
    survive this process, for ten minutes or the given number of seconds, and `attach` finds them again. Raises
    `InvalidArgument` if a cluster of another size, backend, device or `keep` is running, with `keep` if ranks of this
    notebook are kept already, and if an option for other hosts is given without `launcher`.

    `launcher` starts ranks on other hosts: "ssh", "slurm", "mpirun" and "ray" start an agent on each of them, "env"
    prints the command, and another package or a `rankbook.engines.Engine` object may start them too. The call waits up
    to `timeout` seconds, by default ten minutes, until they offer enough slots. `nodes` is the number of hosts, by
    default the launcher's choice, and `launcher_args` are options of the launcher; what follows `"--"` is passed to the
    program that it runs. `address` and `port` are where this host listens for them, by default the address of the
    default route and a free port; `home` is the number of ranks on this host. A host that cannot be reached for
    `lost_after` seconds is lost. `env` names environment variables that the ranks there inherit from this process,
    beside RANKBOOK_*, ACCELERATE_*, OMP_*, NCCL_*, TORCH*, HF_* and WANDB_*. With `sync_code`, modules of this
    process's folder are sent to the hosts that import them, and again when they change.

    Example::

        cluster = rankbook.start(2)
        cluster.run("x = torch.full((2,), rank)")
        cluster.pull("x")  # [tensor([0, 0]), tensor([1, 1])]
    """
    _check_not_on_rank()
    choose_device(device, {})  # refused before an unused cluster is stopped
    seconds = KEEP_SECONDS if keep is True else float(keep) or None
    if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
        raise InvalidArgument(f"keep must be True, False or a positive number of seconds, got {keep}")
    engine = "env" if launcher is None else launcher
    host_options = HostOptions(
        engine, address, port, home, lost_after, tuple(env), nodes, tuple(launcher_args), sync_code
    )
    if launcher is None:
        _check_no_host_options(host_options)
    options = None if launcher is None else host_options
    # Before the start in the background is taken: after a refusal, `attach` may still replace its cluster.
    if seconds is not None and (_prestarted is not None or default_or_none() is None):
        _check_none_kept()
    prestarted = _wait_prestarted()
    # The cluster that was started in the background has run no cell, so it can be replaced silently if the request does
    # not fit.
    if prestarted is not None and prestarted.cluster is not None and prestarted.cluster is default_or_none():
        unused = prestarted.cluster
        differs = (
            n not in (None, unused.world_size)
            or backend not in (None, unused.backend)
            or device not in (None, unused.device)
        )
        if differs or seconds is not None or options is not None:
            unused.stop()
    if timeout is None:  # users and queues start other hosts
        timeout = START_TIMEOUT if options is None else HOSTS_TIMEOUT
    return _start(n, backend, device, timeout, seconds, options)


def _check_no_host_options(options: HostOptions) -> None:
    """Raise `InvalidArgument` if an option has a value that a start on this host alone would ignore."""
    default = HostOptions()
    given = [name for field, name in _HOST_OPTIONS.items() if getattr(options, field) != getattr(default, field)]
    if given:
        names = " and ".join(filter(None, [", ".join(given[:-1]), given[-1]]))
        raise InvalidArgument(
            f"{names} can be given only with a launcher (--launcher NAME), which starts ranks on other hosts: ssh, "
            "slurm, mpirun, ray, or env, which prints the command to run there"
        )


def _check_none_kept() -> None:
    """Raise `InvalidArgument` if ranks of this notebook's earlier processes are kept.

    A notebook that starts kept ranks and is restarted some times would otherwise fill the devices' memory with ranks
    that nothing uses any more.
    """
    session = session_id()
    # Without a session, a record may be of any other notebook, whose ranks must not hinder this one.
    kept = [record for record in find_detached().records if session and record.session == session and not record.owned]
    if kept:
        key = kept[0].key if len(kept) == 1 else "KEY"
        lines = "".join(f"\n{record.describe()}" for record in kept)
        raise InvalidArgument(
            f"ranks of this notebook are kept already; connect to them with %distributed attach {key}, or end them "
            f"with %distributed stop {key}:{lines}"
        )


def _start(
    n: int | None,
    backend: str | None,
    device: str | None,
    timeout: float,
    seconds: float | None,
    options: HostOptions | None = None,
) -> Cluster:
    global _current
    # A second thread waits for the first one's cluster. SIGINT must not lose one that was started.
    with _starting, deferred_interrupts():
        running = default_or_none()
        if running is None:
            _current = running = Cluster(
                n, backend=backend, device=device, timeout=timeout, keep=seconds, hosts=options
            )
        elif n not in (None, running.world_size) or backend not in (None, running.backend):
            resize = "" if n in (None, running.world_size) else f", or change their number with %distributed resize {n}"
            raise InvalidArgument(
                f"{running.world_size} ranks ({running.backend}) are already running;"
                f" stop them first with %distributed stop{resize}"
            )
        elif device not in (None, running.device):
            raise InvalidArgument(
                f"{running.world_size} ranks are already running on {_DEVICES[running.device]};"
                " stop them first with %distributed stop"
            )
        elif options is not None and not running.hosts():
            raise InvalidArgument(
                f"{running.world_size} ranks are already running on this host; stop them first with %distributed stop"
            )
        elif seconds not in (None, running.keep):
            how = "end with the notebook" if running.keep is None else f"are kept for {running.keep:g} s"
            raise InvalidArgument(
                f"{running.world_size} ranks are already running and {how};"
                " run %distributed stop, then %distributed start --keep"
            )
        return running


def attach(key: str | None = None, *, sink: Sink | None = None) -> Cluster:
    """Attach to the ranks of an earlier notebook process (`start(keep=True)`). `key` selects one of several clusters.

    Missed output is shown in `sink`, and `Cluster.missed` has the results of the cells that ended. Raises
    `NoClusterError`, `StartError`, and `InvalidArgument` if a cluster is running here or another notebook still owns
    the other one.

    Example::

        cluster = rankbook.attach()  # after rankbook.start(keep=True) in a notebook whose kernel has ended
    """
    global _current
    _check_not_on_rank()
    prestarted = _wait_prestarted()
    # See `start`: the unused cluster gives way to the detached one.
    if prestarted is not None and prestarted.cluster is not None:
        prestarted.cluster.stop()
    with _starting, deferred_interrupts():  # SIGINT must not lose a cluster that was taken over
        if default_or_none() is not None:
            raise InvalidArgument("ranks are already running in this notebook; stop them first with %distributed stop")
        detached = find_detached()
        if sink is not None and detached.records and detached.notes:
            sink.emit([Stream("stderr", "".join(f"{note}\n" for note in detached.notes))])
        cluster = Cluster.adopt(select_detached(detached, key), sink=sink)
        # An attached cluster has a forkserver of its own. The other one would only hold memory.
        local.shutdown_prestarted()  # the forkserver that was prestarted for new ranks
        _current = cluster
        return cluster


def default_or_none() -> Cluster | None:
    """Return the notebook's cluster, or None if none is running."""
    return None if _current is None or _current.stopped else _current


def check_not_ended() -> None:
    """Raise `NoClusterError` if the ranks have stopped by themselves, until `start` or `stop` is called.

    A cell that needs ranks would otherwise start new ones on this host: of another number, and without the variables.
    """
    if _current is not None and _current.stopped and _current.ended_because:
        raise NoClusterError(
            f"the ranks have stopped, because {_current.ended_because}; start others with %distributed start and the "
            "options that you want"
        )


def current() -> Cluster:
    """Return the notebook's cluster. Raises `NoClusterError`, or the error of a start in the background.

    Example::

        rankbook.current().pull("rank")  # [0, 1]
    """
    _check_not_on_rank()
    running = wait_default()
    if running is None:
        raise NoClusterError("no ranks are running; start them with rankbook.start() or %distributed start")
    return running


def stop(key: str | None = None) -> bool:
    """Stop the notebook's cluster. Return True if one was running.

    With the `key` of a kept cluster whose notebook has ended, stop that one (`start(keep=True)`). Raises
    `NoClusterError` if none is kept, and `InvalidArgument` if none has this key or another notebook still owns it.

    Example::

        rankbook.stop()  # True
    """
    global _current
    if key is not None and ((own := default_or_none()) is None or own.key != key):
        _stop_detached(select_detached(find_detached(), key))
        return True
    # A start that is under way must end first. Otherwise its cluster would appear after this call has returned.
    _wait_prestarted()
    running = default_or_none()
    if running is None:
        _current = None
        return False
    running.stop()
    return True


def _stop_detached(record: ClusterRecord) -> None:
    """Attach to a kept cluster and stop it, so that idle ranks may save."""
    with deferred_interrupts():
        try:
            cluster = Cluster.adopt(record)
        except StartError:
            # A rank does not answer, which `stop` would kill as well. Raises if the forkserver does not answer either.
            local.ReattachedLauncher(record).close()
        else:
            cluster.stop()
