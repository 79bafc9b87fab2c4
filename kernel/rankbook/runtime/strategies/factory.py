"""Which way a setup asks for.

Owns: the order in which the ways are asked. Refuses: to know what any of them does.
"""

from __future__ import annotations

from rankbook.errors import BadRequest
from rankbook.runtime.strategies.base import Setup, Strategy
from rankbook.runtime.strategies.ddp import DataParallel
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel
from rankbook.runtime.strategies.single import SingleDevice
from rankbook.runtime.strategies.tensor_parallel import TensorParallel

STRATEGIES: list[type[Strategy]] = [SingleDevice, DataParallel, FullyShardedDataParallel, TensorParallel]


def choose(setup: Setup) -> Strategy:
    """The way that fits. Raises `BadRequest` with the arithmetic where the mesh does not fit the world."""
    if setup.parallelism is not None:
        setup.parallelism.check(setup.num_processes)
    for kind in STRATEGIES:
        if kind.fits(setup):
            return kind(setup)
    raise BadRequest(f"no strategy fits {setup}")
