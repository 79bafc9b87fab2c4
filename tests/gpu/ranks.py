"""Ranks on CUDA devices for the tests: several on one device that use NCCL all the same.

NCCL refuses two ranks on one device, which it tells by the host and the bus. With another NCCL_HOSTID for every rank it
takes them for several hosts, and they talk over the loopback interface. NVIDIA does not support that, so `nccl_ranks`
first proves one all_reduce, and skips with NCCL's words otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rankbook import Cluster
from rankbook.coordinator import cluster_processes
from tests.conftest import Notebook, running_kernel

COUNT = "import torch; print(torch.cuda.device_count())"
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@functools.cache
def cuda_devices() -> int:
    """Count the CUDA devices in another process: this one must not initialize CUDA."""
    if not any(driver.exists() for driver in DRIVERS):
        return 0
    reported = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    return int(reported.stdout)


ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_devices() == 0, reason="torch sees no CUDA device on this machine"),
]

NCCL_OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
PLACE = f"""
def _share_device():
    from rankbook.coordinator import cluster_processes
    from rankbook.launch.placement import DeviceAssignment
    environment = cluster_processes.rank_environment
    def of_rank(base, place, **options):
        own = dict(NCCL_HOSTID='rank-' + place['RANK']) if HOSTS else {{}}
        return environment(base, place, **options) | {NCCL_OVER_SOCKETS!r} | own
    def assign(n, *_, **__):
        return DeviceAssignment(('cuda:0',) * (n or 2), 'cpu:gloo,cuda:nccl', 1)
    cluster_processes.assign_devices, cluster_processes.rank_environment = assign, of_rank
_share_device()
"""
REDUCE = "t = torch.full((4,), rank + 1.0, device=device)\ndist.all_reduce(t)\n"


@contextlib.contextmanager
def nccl_ranks(count: int, *, hosts: bool = True, variables: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """Run a kernel with ranks that share cuda:0 and use NCCL."""
    with running_kernel(env={"RANKBOOK_ABORT_GRACE": "0.3", **(variables or {})}) as notebook:
        notebook.ok(PLACE.replace("HOSTS", str(hosts)))
        started = notebook.run(f"%distributed start -n {count}", timeout=120)
        proof = (
            notebook.run(f"%%distributed\n{REDUCE}print(t.tolist())", timeout=60) if started.status == "ok" else started
        )
        if hosts and proof.status != "ok":
            pytest.skip(f"NCCL does not let ranks share a device: {(proof.traceback or proof.text)[-600:]}")
        yield notebook


@contextlib.contextmanager
def nccl_cluster(count: int) -> Iterator[Cluster]:
    """Start ranks of this process that share cuda:0 and use NCCL."""
    before = cluster_processes.assign_devices, cluster_processes.rank_environment
    exec(PLACE.replace("HOSTS", "True"), {})
    try:
        with Cluster(count) as cluster:
            yield cluster
    finally:
        cluster_processes.assign_devices, cluster_processes.rank_environment = before


class SharedRanks:
    """A kernel with two NCCL ranks for all tests that leave it in order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._notebook: Notebook | None = None

    def take(self) -> Notebook:
        if self._notebook is None:
            self._notebook = self._stack.enter_context(nccl_ranks(2))
        return self._notebook

    def close(self) -> None:
        self._notebook = None
        self._stack.close()
