"""Environment variables, devices, backend and number of threads of the ranks.

Pure functions: imports no torch and starts no process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rankbook.errors import InvalidArgument

DEFAULT_CPU_RANKS = 2
_MAX_RANKS_PER_CORE = 8
_LOWEST_RANK_LIMIT = 64


@dataclass(frozen=True)
class DeviceAssignment:
    """Devices of one host's ranks (`devices[rank]`), with the backend and the threads per rank."""

    devices: tuple[str, ...]
    backend: str
    threads: int


def assign_devices(ranks: int | None, cuda_devices: int, *, backend: str | None, cores: int) -> DeviceAssignment:
    """Assign devices to `ranks` ranks; by default one rank per CUDA device, or two on the CPU.

    The backend is nccl if every rank has its own device (beside gloo for CPU tensors), and gloo if ranks share a
    device, which nccl does not support. Raises `InvalidArgument` for a number of ranks out of range.
    """
    count = default_ranks(cuda_devices) if ranks is None else ranks
    # More ranks than this are almost certainly a typing mistake, and would bring the machine to a halt.
    limit = max(_LOWEST_RANK_LIMIT, _MAX_RANKS_PER_CORE * cores)
    if not 1 <= count <= limit:
        source = "RANKBOOK_RANKS=" if ranks is None and os.environ.get("RANKBOOK_RANKS") else "number of ranks: "
        raise InvalidArgument(f"invalid {source}{count}; expected 1 to {limit} on {cores} cores")
    # In turn: four ranks on two devices get cuda:0, cuda:1, cuda:0, cuda:1.
    devices = tuple(f"cuda:{rank % cuda_devices}" if cuda_devices else "cpu" for rank in range(count))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if cuda_devices and count <= cuda_devices else "gloo"
    elif "nccl" in backend and count > cuda_devices:
        raise InvalidArgument(f"nccl needs a CUDA device per rank: {count} ranks, {cuda_devices} devices; use gloo")
    # The cores are divided: torch would start as many threads per rank as there are cores.
    return DeviceAssignment(devices, backend, max(1, cores // count))


def default_ranks(cuda_devices: int) -> int:
    """Return the default number of ranks: RANKBOOK_RANKS, or one per CUDA device, or two.

    Raises `InvalidArgument` if RANKBOOK_RANKS is not a number.
    """
    setting = os.environ.get("RANKBOOK_RANKS")
    if setting:
        if not setting.isdecimal():
            raise InvalidArgument(f"invalid RANKBOOK_RANKS={setting!r}: expected a positive integer")
        return int(setting)
    return cuda_devices or DEFAULT_CPU_RANKS


def abort_grace() -> float:
    """Return the grace period for collectives: the value of RANKBOOK_ABORT_GRACE in seconds, 1 by default.

    After a rank has raised, the others may wait for it this long before their collectives are aborted. Raises
    `InvalidArgument` if the value is not a number of seconds.
    """
    setting = os.environ.get("RANKBOOK_ABORT_GRACE", "1")
    try:
        seconds = float(setting)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"invalid RANKBOOK_ABORT_GRACE={setting!r}: expected a number of seconds >= 0")
    return seconds


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # The cores of this process's affinity, which containers and job schedulers restrict. macOS has no such call.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(
    base: Mapping[str, str], place: Mapping[str, str], *, threads: int, interface: str = ""
) -> dict[str, str]:
    """Return the environment of a rank: defaults, then `base` of the notebook or the agent, then `place`.

    `place` has the variables that torchrun sets, see `placement.place_variables`. Nothing listens on MASTER_PORT: rank
    0 may host a `TCPStore` there. `init_method="env://"` uses the cluster's own store. `interface` is the name of the
    network interface that reaches the other hosts; without one, all ranks are on this host.
    """
    # Without other hosts: no listening on the network, no loss with a VPN.
    name = interface or ("lo0" if sys.platform == "darwin" else "lo")
    # The variables above those of `base` are defaults, which the user's own values replace. Those below belong to the
    # rank.
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": name,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": name,
        # The watchdog of NCCL must end neither the process when a communicator is aborted, nor after an error of the
        # device, which the cell reports. Its dump sets a key in the store for good, on which the monitor of a process
        # that joins later ends that process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # Not the notebook's MPLBACKEND: it may name a backend that needs the kernel or a window. A rank sends its
        # figures by the inline backend.
        **{name: value for name, value in base.items() if name != "MPLBACKEND"},
        **place,
    }


_OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "MPLBACKEND", "CUDA_VISIBLE_DEVICES"),
    }
)
"""Variables that belong to a rank, or that its device was chosen by."""


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with another value than `before`; None for those that were removed.

    For a call on running ranks, whose own environment is that of their start. Variables that a rank has of its own are
    left out.
    """
    names = before.keys() | now.keys()
    return {name: now.get(name) for name in sorted(names - _OWN_VARIABLES) if before.get(name) != now.get(name)}
