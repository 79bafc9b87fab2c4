"""What an `Accelerator` was asked for, as the modules of `prepare` read it.

Owns: `Context`. Refuses: behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rankbook.runtime.config import TorchDynamoPlugin
from rankbook.runtime.strategies.base import Setup, Strategy


@dataclass
class Context:
    """One `prepare` call's view. `before_step` is called by each optimizer ahead of a real step."""

    setup: Setup
    strategy: Strategy
    precision: str
    dynamo: TorchDynamoPlugin
    scaler: torch.amp.GradScaler | None
    place_models: bool
    place_batches: bool
    step_with_optimizer: bool
    steps_times_num_processes: bool
    loader_options: Any
    rng_types: list[str] | None
    before_step: Callable[[], None]
