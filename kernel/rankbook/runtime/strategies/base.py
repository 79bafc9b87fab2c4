"""What each way to spread a model over the ranks can do.

Owns: `Setup`, the `Strategy` base, and what their defaults are. Refuses: any process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from rankbook.runtime.config import FullyShardedDataParallelPlugin, Handlers
from rankbook.runtime.parallelism import ParallelismConfig


@dataclass
class Setup:
    """What an `Accelerator` was asked for, as the strategies read it."""

    device: torch.device
    num_processes: int
    process_index: int
    fsdp: FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None
    handlers: Handlers = field(default_factory=Handlers)

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks batches are divided; ranks of one tensor-parallel group share theirs."""
        return self.parallelism.data_parallel_size if self.parallelism is not None else self.num_processes

    @property
    def data_parallel_rank(self) -> int:
        """Which of them this rank is: `tp` is the mesh's innermost axis."""
        return self.process_index // (self.num_processes // self.data_parallel_size)


class Strategy(ABC):
    """One way. `wrapper` names it in reports; `name` is the value of `DistributedType`."""

    name: ClassVar[str]
    wrapper: ClassVar[str]
    shards: ClassVar[bool] = False
    """Whether parameters are replaced by shards, so that optimizers have to follow."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @classmethod
    @abstractmethod
    def fits(cls, setup: Setup) -> bool:
        """Whether `setup` asks for this way."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a model that was wrapped would have to be wrapped anew for, were it different."""
        return (type(self).__name__, self.setup.device, self.setup.num_processes)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Spread `model`, which is on this rank's device. Returns what the person calls from now on."""
        return model

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:  # noqa: B027 - most have nothing to do
        """Undo `wrap`: `model` is as it was before, and `wrapped` holds nothing of it but itself."""

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:  # noqa: B027
        """Have the next backward reduce gradients over the ranks, or only gather them up here."""

    def drop_gradients(self, wrapped: nn.Module) -> None:  # noqa: B027
        """Forget what backward has gathered on this rank and not put into a parameter's `grad` yet."""
