"""In which floating-point type a forward runs.

Owns: which types a device can do, autocast, the scaler that fp16 needs, and the forward of a prepared model. Refuses:
the types of the parameters, which stay as the person made them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from rankbook.errors import BadRequest
from rankbook.runtime.config import AutocastKwargs, GradScalerKwargs

PRECISIONS = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What may be asked for, with the type that autocast uses."""
_HALVES = (torch.float16, torch.bfloat16)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `BadRequest` where `device` cannot train in `precision`."""
    if precision not in PRECISIONS:
        raise BadRequest(f"mixed_precision={precision!r} is unknown: choose from {', '.join(map(repr, PRECISIONS))}")
    if precision == "fp16" and device.type != "cuda":
        raise BadRequest(
            f"mixed_precision='fp16' needs a CUDA device for its gradient scaler, and this rank's is {device}: "
            "use 'bf16' or 'no'"
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise BadRequest(f"mixed_precision='bf16' is more than {device} can do: use 'fp16' or 'no'")


def autocast(precision: str, device: torch.device, handler: AutocastKwargs) -> AbstractContextManager[Any]:
    """The context in which a forward runs; one that does nothing for precision "no"."""
    kind = PRECISIONS[precision]
    if kind is None or not handler.enabled:
        return nullcontext()
    return torch.autocast(device.type, dtype=kind, cache_enabled=handler.cache_enabled)


def make_scaler(precision: str, device: torch.device, handler: GradScalerKwargs) -> torch.amp.GradScaler | None:
    """The gradient scaler of fp16, None for other precisions."""
    return torch.amp.GradScaler(device.type, **handler.to_dict()) if precision == "fp16" else None


def in_fp32(value: Any) -> Any:  # noqa: ANN401 - whatever a model returns
    """`value` with every half-precision tensor in it as fp32; containers keep their types."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(in_fp32(each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(in_fp32(each) for each in value)
    if isinstance(value, dict):
        if type(value) is dict:
            return {key: in_fp32(each) for key, each in value.items()}
        for key in value:  # an output class of a library: its attributes mirror its items
            value[key] = in_fp32(value[key])
    return value


class MixedForward:
    """Stands as `forward` on a prepared model: autocast around the model's own, outputs in fp32.

    An object and not a closure, so that a copy or a pickle of the model has one that runs the copy.
    """

    def __init__(self, module: nn.Module, kind: torch.dtype, device: torch.device, cache: bool | None) -> None:
        self.original: Callable[..., Any] = module.forward
        self.replaced = module.__dict__.get("forward")
        self.kind = kind
        self.device_type = device.type
        self.cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model's
        """As the model's forward."""
        with torch.autocast(self.device_type, dtype=self.kind, cache_enabled=self.cache):
            output = self.original(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output.float() if output.dtype in _HALVES else output
        return in_fp32(output)


def install_forward(module: nn.Module, precision: str, device: torch.device, handler: AutocastKwargs) -> None:
    """Have `module` run under autocast, in place of an earlier such forward: they never nest."""
    remove_forward(module)
    kind = PRECISIONS[precision]
    if kind is not None and handler.enabled:
        module.__dict__["forward"] = MixedForward(module, kind, device, handler.cache_enabled)


def remove_forward(module: nn.Module) -> None:
    """Give `module` its own forward back."""
    installed = module.__dict__.get("forward")
    if isinstance(installed, MixedForward):
        del module.__dict__["forward"]
        if installed.replaced is not None:
            module.__dict__["forward"] = installed.replaced
