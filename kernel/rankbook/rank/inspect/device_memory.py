"""Device memory of a rank: total, free, and what its parameters, gradients and optimizer states hold.

CUDA is not initialised here, and no tensors are searched for.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rankbook.protocol.telemetry import MemoryUse
from rankbook.rank.inspect import tensor_introspection


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


class GradientCounter:
    """Counts the bytes of gradients, on the thread that writes them.

    A backward pass writes gradients without holding the interpreter lock, so another thread that reads `.grad` may find
    a tensor that is just being freed. A view therefore only requests a count. It is made by the thread that has called
    `optimizer.step()`, at the end of that step and for the parameters of that optimizer, and by the main thread between
    two cells for the rest, except for parameters that an optimizer on another thread steps.

    Without a view this costs nothing: the first request registers the hook, which counts once for each request.
    """

    def __init__(self, run_when_idle: Callable[[Callable[[], None]], None]) -> None:
        self._run_when_idle = run_when_idle
        self._pending: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._main = threading.main_thread().ident
        self._elsewhere: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._counted = threading.Event()
        self._waits_for_idle = False
        self._hook: object = None

    @property
    def bytes(self) -> int:
        """The bytes of all gradients of the requested parameters, as of their last counts."""
        return sum(tuple(self._bytes.values()))

    def request(self, parameters: Iterable[weakref.ref[torch.Tensor]], *, timeout: float) -> None:
        """Have the gradients of `parameters` counted, and wait for it for at most `timeout` seconds."""
        self._hook = self._hook or register_optimizer_step_post_hook(self._after_step)
        pending = {id(tensor): parameter for parameter in parameters if (tensor := parameter()) is not None}
        self._bytes = {key: size for key, size in self._bytes.items() if key in pending}
        self._counted.clear()
        self._pending, self._stepped = pending, set()
        if pending and not self._waits_for_idle:
            self._waits_for_idle = True
            self._run_when_idle(self._when_idle)
        if pending:
            self._counted.wait(timeout)

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if (thread := threading.get_ident()) != self._main:
            self._elsewhere[id(optimizer)] = weakref.ref(optimizer), thread
        else:
            self._elsewhere.pop(id(optimizer), None)
        if self._pending and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._count(tensor_introspection.parameters_of_optimizer(optimizer))

    def _when_idle(self) -> None:
        self._waits_for_idle = False
        alive = {thread.ident for thread in threading.enumerate()}
        elsewhere = {
            id(parameter)
            for reference, thread in tuple(self._elsewhere.values())
            if thread in alive and (optimizer := reference()) is not None
            for parameter in tensor_introspection.parameters_of_optimizer(optimizer)
        }
        tensors = [parameter() for key, parameter in tuple(self._pending.items()) if key not in elsewhere]
        self._count([tensor for tensor in tensors if tensor is not None])

    def _count(self, parameters: Iterable[torch.Tensor]) -> None:
        pending, sizes = self._pending, self._bytes
        with torch._C.DisableTorchFunctionSubclass():  # no user code
            for parameter in parameters:
                if pending.pop(id(parameter), None) is not None:
                    gradient = parameter.grad if parameter.is_leaf else None
                    sizes[id(parameter)] = 0 if gradient is None else tensor_introspection.nbytes(gradient)
        if not pending:
            self._counted.set()


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
