"""Run a function on the ranks from a notebook or a script: `notebook_launcher` and `debug_launcher`.

The signatures are those of Accelerate. An option that is not supported raises an error instead of being ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import HOSTS_TIMEOUT, Cluster
from rankbook.errors import CellError, InvalidArgument, RankLostError
from rankbook.launch.placement import choose_device
from rankbook.magics.cell_handle import raise_cell_error, without_frames
from rankbook.magics.comm_bridge import forward_comms
from rankbook.magics.output_panel import ask_for, sink_for
from rankbook.runtime.launched_function import PRECISION, USE_CPU, run_launched

if TYPE_CHECKING:
    from rankbook.coordinator.wait import Ask

_PRECISIONS = ("no", "fp16", "bf16")
_OWN_PRECISION = "RANKBOOK_MIXED_PRECISION"
"""The notebook's default, which an `Accelerator` reads before `PRECISION`. A call removes it."""
_RENDEZVOUS = "the ranks meet at the notebook and need no other rendezvous"
_WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = {
    "node_rank": (0, "this notebook runs the ranks of all nodes; start an agent on the others, as it says"),
    "rdzv_backend": ("static", _RENDEZVOUS),
    "rdzv_endpoint": ("", _RENDEZVOUS),
    "rdzv_conf": (None, _RENDEZVOUS),
    "rdzv_id": ("none", _RENDEZVOUS),
    "monitor_interval": (0.1, "the death of a rank is reported at once"),
    "log_line_prefix_template": (None, "output lines show their ranks, as in every cell"),
}
"""Options of Accelerate that have no effect here: the only accepted value, and the reason."""
_ALONE = "the ranks of one machine do not need it"
_ONE_HOST: Mapping[str, tuple[object, str]] = {"use_port": ("29500", _ALONE), "master_addr": ("127.0.0.1", _ALONE)}
"""The same for options that have an effect with `num_nodes` only."""


@without_frames()
def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Call `function(*args)` on every rank of the notebook's cluster, and return the results in rank order.

    Starts `num_processes` ranks if none are running (None: one per CUDA device, or two on the CPU), and leaves them
    running. Another number of ranks on this host is replaced if they are idle and have no variables. The output appears
    below the cell as it arrives, and widgets are live. `function` and `args` are pickled by value, including closures,
    lambdas and classes from cells. In the call `Accelerator()` has the precision `mixed_precision` ("no", "fp16",
    "bf16") and otherwise default settings, and `os.environ` has the variables that the notebook has set since the ranks
    were started. If ACCELERATE_USE_CPU is 1 at the start, the ranks use the CPU.

    With `num_nodes`, there are `num_processes` ranks on this host and on every other node: the call prints the command
    that starts an agent there, and waits for the agents up to ten minutes. `master_addr` and `use_port` are where this
    host listens for them; their defaults stand for the address of the default route and a free port. Call it in one
    notebook, not on every node.

    If the call fails or loses a rank, it heals the ranks and calls the function again, up to `max_restarts` times. The
    function has to load what it saved before. `TORCHELASTIC_RESTART_COUNT` counts the calls.

    Raises the error of the first rank that failed by itself, as a `CellError` that is also an instance of that built-in
    type and names the ranks; `RankLostError`; `KeyboardInterrupt` after an interrupt, which leaves the ranks running;
    `InvalidArgument` for an option that is not supported, and for another number of ranks than those that are running
    and have variables or other hosts; `NoClusterError` if the ranks have stopped by themselves; `TransferError` for an
    argument or result that cannot be pickled. The signature is that of Accelerate 1.15.

    Example::

        def train(lr):
            from rankbook import Accelerator

            return lr * Accelerator().process_index


        rankbook.notebook_launcher(train, (0.5,), num_processes=2)  # [0.0, 0.5]
    """
    # The first statement, while the local variables are exactly the parameters.
    options = dict(locals())
    __tracebackhide__ = True  # IPython and pytest omit this frame from tracebacks
    for name, (only, reason) in {**_WITHOUT_EFFECT, **(_ONE_HOST if num_nodes == 1 else {})}.items():
        # Compared as text, so that the port 29500 and "29500" are both accepted.
        if str(options[name]) != str(only):
            raise InvalidArgument(f"notebook_launcher: {name}={options[name]!r} is not supported: {reason}; omit it")
    if mixed_precision not in _PRECISIONS:
        raise InvalidArgument(f"unknown mixed_precision {mixed_precision!r}; choose from {', '.join(_PRECISIONS)}")
    _check_call("notebook_launcher", function, args, num_processes)
    _check_count("num_nodes", num_nodes, 1)
    _check_count("max_restarts", max_restarts, 0)
    if num_nodes == 1:
        cluster = _ranks_of_one_host(num_processes)
    else:
        cluster = _ranks_of_nodes(num_nodes, num_processes, master_addr, use_port)
    # Only after the start, since the ranks choose their devices.
    _check_precision(cluster, mixed_precision)
    # Accelerate forks its processes from the notebook at every call. These were started before, with the environment of
    # that moment.
    for restart in range(max_restarts + 1):
        environment = {**cluster.changed_variables(), PRECISION: mixed_precision, _OWN_PRECISION: None}
        if max_restarts:
            environment |= {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)}
        try:
            return _call(cluster, function, args, environment)
        except (CellError, RankLostError) as error:
            if restart == max_restarts or cluster.stopped:
                raise
            _recover(cluster, error, f"restart {restart + 1} of {max_restarts}")
    raise AssertionError("unreachable")


@without_frames()
def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Call `function(*args)` on `num_processes` temporary CPU ranks, and return the results in rank order.

    The ranks are stopped afterwards. The notebook's own ranks are not affected. Raises as `notebook_launcher` does.

    Example::

        def train(lr):
            from rankbook import Accelerator

            return lr * Accelerator().process_index


        rankbook.debug_launcher(train, (0.5,), num_processes=2)  # [0.0, 0.5]
    """
    __tracebackhide__ = True  # as above
    _check_call("debug_launcher", function, args, num_processes)
    with Cluster(num_processes, backend="gloo", device="cpu") as cluster:
        return _call(cluster, function, args, {PRECISION: "no", _OWN_PRECISION: None, USE_CPU: "yes"})


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"notebook_launcher: {name} must be an integer of at least {least}, got {value!r}")


def _ranks_of_one_host(num_processes: int | None) -> Cluster:
    """Return the notebook's cluster, started with `num_processes` ranks if there is none."""
    cluster = default_cluster.default_or_none()
    if cluster is None:
        default_cluster.check_not_ended()
        return default_cluster.start(num_processes)
    if num_processes in (None, cluster.world_size):
        return cluster
    _check_replaceable(cluster, f"num_processes={num_processes}")
    # The new ranks are on the devices of the old ones, and kept after the end of the kernel as these were.
    cluster.stop()
    device = choose_device(None, os.environ) or cluster.device
    return default_cluster.start(num_processes, device=device, keep=cluster.keep or False)


def _ranks_of_nodes(num_nodes: int, num_processes: int | None, master_addr: str, use_port: str) -> Cluster:
    """Return the notebook's cluster with `num_processes` ranks on each of `num_nodes` nodes, started if necessary."""
    if num_processes is None:
        raise InvalidArgument("notebook_launcher: num_nodes needs num_processes, the number of ranks of each node")
    if not str(use_port).isdecimal():
        raise InvalidArgument(f"notebook_launcher: use_port must be a number, got {use_port!r}")
    count = num_nodes * num_processes
    cluster = default_cluster.default_or_none()
    if cluster is None:
        default_cluster.check_not_ended()
    else:
        # After a node was lost, its ranks may run on another one. So only their number counts.
        if cluster.world_size == count and cluster.hosts():
            return cluster
        wanted = f"num_nodes={num_nodes} with num_processes={num_processes} are {count} ranks"
        _check_replaceable(cluster, wanted, hosts=cluster.launcher == "env")
        cluster.stop()
    return default_cluster.start(
        count,
        launcher="env",
        # Accelerate's defaults stand for those of `start`: other nodes cannot reach 127.0.0.1.
        address=None if master_addr == "127.0.0.1" else master_addr,
        port=0 if str(use_port) == "29500" else int(use_port),
        nodes=num_nodes - 1,
        home=num_processes,
        timeout=HOSTS_TIMEOUT,
    )


def _check_replaceable(cluster: Cluster, wanted: str, *, hosts: bool = False) -> None:
    """Raise `InvalidArgument` if the ranks are in use, or on other hosts, unless `hosts` may be given away."""
    # Ranks with variables are never replaced without being asked; the user may need these. A scheduler's hosts would
    # have to be queued for again, and the new ranks would be on this one.
    elsewhere = bool(cluster.hosts())
    if (elsewhere and not hosts) or not _hold_nothing(cluster):
        where = "on other hosts" if elsewhere else "on this host"
        raise InvalidArgument(
            f"{wanted}, but {cluster.world_size} ranks are running {where}: omit it to use them, or stop them first "
            "with %distributed stop (rankbook.stop())"
        )


def _recover(cluster: Cluster, error: Exception, which: str) -> None:
    """Replace the ranks that have died. A function brings its variables, so new ranks may also be empty."""
    sys.stderr.write(f"{which}: {str(error).splitlines()[0]}\n")
    sys.stderr.flush()
    try:
        cluster.heal()
    except RankLostError:  # no rank is left to copy variables from
        cluster.heal(empty=True)


def _check_call(name: str, function: object, args: object, num_processes: int | None) -> None:
    # Ranks have these variables, and so have the processes of torchrun. A launch there would start ranks within a rank.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InvalidArgument(
            f"{name}: this process is already a rank; call it from the notebook, or call the function directly"
        )
    if not callable(function):
        raise InvalidArgument(f"{name}: function must be callable, got {function!r}")
    # `args=(x)` without the comma is no tuple. A string is a sequence, but never meant as one argument per letter.
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise InvalidArgument(f"{name}: args must be a tuple, got {args!r}; for one argument write args=({args!r},)")
    # bool is a subclass of int.
    if num_processes is not None and (isinstance(num_processes, bool) or not isinstance(num_processes, int)):
        raise InvalidArgument(f"{name}: num_processes must be an integer, got {num_processes!r}")


def _hold_nothing(cluster: Cluster) -> bool:
    """Return True if all ranks are idle, and cells have defined no names on them."""
    if any(status.state != "idle" for status in cluster.status()):
        return False
    variables = cluster.variables()  # without functions and modules, but a rank that does not reply is missing
    if len(variables) < cluster.world_size or any(variables.values()):
        return False
    # Functions and modules are not variables in this sense, but a user has defined them, too.
    # A rank that does not reply in time seems to have none, and Tab's own limit is short for a busy machine.
    return not any(cluster.complete("", 0, ranks=rank, variables=True, timeout=30.0)[1] for rank in variables)


def _check_precision(cluster: Cluster, precision: str) -> None:
    devices = {status.device for status in cluster.status()}
    if precision == "fp16" and devices == {"cpu"}:
        raise InvalidArgument(
            'mixed_precision="fp16" requires CUDA devices, but the ranks run on the CPU; use "bf16" or "no"'
        )


def _call(
    cluster: Cluster, function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str | None]
) -> list[Any]:
    __tracebackhide__ = True  # as above
    shell = _shell()
    # A callable object, such as a `functools.partial`, may have no `__name__`.
    label = getattr(function, "__name__", type(function).__name__) + "()"
    ask: Ask = ask_for(shell)
    call = (function, tuple(args), environment)
    sink = sink_for(shell)
    forward_comms(cluster, sink)
    try:
        return cluster.call(run_launched, call, sink=sink, ask=ask, label=label, raise_error=raise_cell_error)
    finally:
        sink.views.wait_shown()


def _shell() -> Any:  # noqa: ANN401 - an InteractiveShell, or None in a plain script
    from IPython.core.getipython import get_ipython

    return get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
