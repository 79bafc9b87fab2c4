"""How full this rank's device is.

Owns: the device's own numbers, and their split by what the rank's models and optimizers hold. Refuses: to initialise
CUDA where the cells have not, and to look for tensors itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import torch

from rankbook.telemetry import MemoryUse


def memory_use(device: torch.device, parameters: int, gradients: int, optimizer: int) -> MemoryUse | None:
    """The split, in bytes; None for a CUDA device that this rank has not touched yet."""
    if device.type == "cuda":
        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info(device)
        shared = 0
    else:
        resident = psutil.Process().memory_info()
        free, shared = psutil.virtual_memory().available, getattr(resident, "shared", 0)
        total = free + resident.rss
    held = parameters + gradients + optimizer
    return MemoryUse(
        total=max(total, free + held),  # pages that nobody has written are nowhere yet
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        other=max(0, total - free - held),
        free=free,
        shared=shared,
    )


def device_name(device: torch.device) -> str:
    """As its maker calls it; empty where nobody says."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_initialized() else ""
    if sys.platform != "linux":
        return ""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


class Utilisation:
    """The share of time in which a CUDA device computed, where NVML is there to say."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._silent = device.type != "cuda"

    def now(self) -> float | None:
        """From 0 to 1."""
        if self._silent or not torch.cuda.is_initialized():
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except Exception as error:
            # No NVML, or none that tells this of the device (a part of a GPU, say); it will not come either. NVML's
            # errors are of a module that only torch imports.
            if not (isinstance(error, ImportError | RuntimeError | OSError) or type(error).__module__ == "pynvml"):
                raise
            self._silent = True
            return None
