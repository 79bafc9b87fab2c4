"""Run a function on the ranks from a notebook or a script: `notebook_launcher` and `debug_launcher`.

The signatures are those of Accelerate. An option that cannot be honoured raises an error instead of being ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster
from rankbook.errors import BadRequest
from rankbook.magics.output_panel import ask_for, sink_for
from rankbook.runtime.launched_function import PRECISION, USE_CPU, run_launched

if TYPE_CHECKING:
    from rankbook.coordinator.wait import Ask

_PRECISIONS = ("no", "fp16", "bf16")
_ONE_HOST = "the ranks of a notebook are on this machine and meet without it"
_NOT_YET: Mapping[str, tuple[object, str]] = {
    "use_port": ("29500", _ONE_HOST),
    "master_addr": ("127.0.0.1", _ONE_HOST),
    "node_rank": (0, "one machine is all there is so far"),
    "num_nodes": (1, "one machine is all there is so far"),
    "rdzv_backend": ("static", _ONE_HOST),
    "rdzv_endpoint": ("", _ONE_HOST),
    "rdzv_conf": (None, _ONE_HOST),
    "rdzv_id": ("none", _ONE_HOST),
    "max_restarts": (0, "a rank that died comes back by %distributed heal, and the call is yours to repeat"),
    "monitor_interval": (0.1, "a rank's death is told at once"),
    "log_line_prefix_template": (None, "lines carry their ranks as in every cell"),
}
"""Options of Accelerate that have no effect here: the only accepted value, and the reason."""


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
    running. Their output appears below the cell as it arrives. `function` and `args` are pickled by value, including
    closures, lambdas and classes from cells. In the call `Accelerator()` has the precision `mixed_precision` ("no",
    "fp16", "bf16") and otherwise default settings.

    Raises the error of the first rank that failed by itself, as a `CellError` that is also an instance of that built-in
    type and names the ranks; `LostRank`; `KeyboardInterrupt` after an interrupt, which leaves the ranks running;
    `BadRequest` for an option that cannot be honoured; `TransferError` for an argument or result that cannot be
    pickled. The signature is that of Accelerate 1.15.
    """
    options = dict(locals())
    __tracebackhide__ = True  # IPython and pytest omit this frame from tracebacks
    for name, (only, reason) in _NOT_YET.items():
        if str(options[name]) != str(only):
            raise BadRequest(f"notebook_launcher: {name}={options[name]!r} cannot be honoured: {reason}; leave it out")
    if mixed_precision not in _PRECISIONS:
        raise BadRequest(f"mixed_precision={mixed_precision!r} is not there; use one of {', '.join(_PRECISIONS)}")
    _check_call("notebook_launcher", function, args, num_processes)
    cluster = default_cluster.default_or_none()
    if cluster is None:
        cluster = default_cluster.start(num_processes)
    elif num_processes not in (None, cluster.world_size):
        raise BadRequest(
            f"num_processes={num_processes}, but {cluster.world_size} ranks are running: leave it out to use them, or "
            "end them first with %distributed stop (rankbook.stop())"
        )
    return _call(cluster, function, args, {PRECISION: mixed_precision})


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Call `function(*args)` on `num_processes` temporary CPU ranks, and return the results in rank order.

    The ranks are stopped afterwards. The notebook's own ranks are not affected. Raises as `notebook_launcher` does.
    """
    __tracebackhide__ = True  # as above
    _check_call("debug_launcher", function, args, num_processes)
    with Cluster(num_processes, backend="gloo") as cluster:
        return _call(cluster, function, args, {PRECISION: "no", USE_CPU: "yes"})


def _check_call(name: str, function: object, args: object, num_processes: int | None) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise BadRequest(f"{name}: this process is a rank already; call it from the notebook, or call the function")
    if not callable(function):
        raise BadRequest(f"{name}: {function!r} is no function")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise BadRequest(f"{name}: args={args!r} is no tuple; for one argument write args=({args!r},)")
    if num_processes is not None and (isinstance(num_processes, bool) or not isinstance(num_processes, int)):
        raise BadRequest(f"{name}: num_processes={num_processes!r} is no number of ranks")


def _call(
    cluster: Cluster, function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]
) -> list[Any]:
    __tracebackhide__ = True  # as above
    shell = _shell()
    label = getattr(function, "__name__", type(function).__name__) + "()"
    ask: Ask = ask_for(shell)
    call = (function, tuple(args), environment)
    return cluster.call(run_launched, call, sink=sink_for(shell), ask=ask, label=label)


def _shell() -> Any:  # noqa: ANN401 - an InteractiveShell, or None in a plain script
    from IPython.core.getipython import get_ipython

    return get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
