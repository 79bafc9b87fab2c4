"""Environment variables, devices, backend and number of threads of the ranks.

Pure functions: imports no torch and starts no process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rankbook.errors import BadRequest

DEFAULT_CPU_RANKS = 2
_MOST_PER_CORE = 8
_MOST_AT_LEAST = 64


@dataclass(frozen=True)
class DeviceAssignment:
    """Devices of one host's ranks (`devices[rank]`), with the backend and the threads per rank."""

    devices: tuple[str, ...]
    backend: str
    threads: int


def assign_devices(ranks: int | None, cuda_devices: int, *, backend: str | None, cores: int) -> DeviceAssignment:
    """Assign devices to `ranks` ranks; by default one rank per CUDA device, or two on the CPU.

    The backend is nccl if every rank has its own device (beside gloo for CPU tensors), and gloo if ranks share a
    device, which nccl does not support. Raises `BadRequest` for a number of ranks out of range.
    """
    count = default_ranks(cuda_devices) if ranks is None else ranks
    most = max(_MOST_AT_LEAST, _MOST_PER_CORE * cores)
    if not 1 <= count <= most:
        source = "RANKBOOK_RANKS: " if ranks is None and os.environ.get("RANKBOOK_RANKS") else ""
        raise BadRequest(f"{source}{count} ranks make no sense here; from 1 to {most} do on {cores} cores")
    devices = tuple(f"cuda:{rank % cuda_devices}" if cuda_devices else "cpu" for rank in range(count))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if cuda_devices and count <= cuda_devices else "gloo"
    elif "nccl" in backend and count > cuda_devices:
        raise BadRequest(f"nccl needs a CUDA device per rank: {count} ranks, {cuda_devices} devices; use gloo")
    return DeviceAssignment(devices, backend, max(1, cores // count))


def default_ranks(cuda_devices: int) -> int:
    """Return the default number of ranks: RANKBOOK_RANKS, or one per CUDA device, or two.

    Raises `BadRequest` if RANKBOOK_RANKS is not a number.
    """
    wish = os.environ.get("RANKBOOK_RANKS")
    if wish:
        if not wish.isdecimal():
            raise BadRequest(f"RANKBOOK_RANKS={wish} is no number of ranks")
        return int(wish)
    return cuda_devices or DEFAULT_CPU_RANKS


def abort_grace() -> float:
    """Return the grace period for collectives: the value of RANKBOOK_ABORT_GRACE in seconds, 1 by default.

    After a rank has raised, the others may wait for it this long before their collectives are aborted. Raises
    `BadRequest` if the value is not a number of seconds.
    """
    wish = os.environ.get("RANKBOOK_ABORT_GRACE", "1")
    try:
        seconds = float(wish)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"RANKBOOK_ABORT_GRACE={wish} is no number of seconds")
    return seconds


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(base: Mapping[str, str], *, rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """Return the environment of a rank: `base`, the notebook's environment, and the variables that torchrun sets.

    Nothing listens on `port`: rank 0 may host a `TCPStore` there. `init_method="env://"` uses the cluster's own store.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # aborting a communicator must not end the process
        **{name: value for name, value in base.items() if name != "MPLBACKEND"},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
