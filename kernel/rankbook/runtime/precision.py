"""Mixed precision: autocast, the gradient scaler of fp16, and the forward of a prepared model.

The dtypes of parameters are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import AutocastKwargs, GradScalerKwargs

PRECISIONS = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Values of `mixed_precision` and the dtypes that autocast uses for them."""
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `InvalidArgument` if `precision` is unknown, or if `device` cannot train in it."""
    if precision not in PRECISIONS:
        raise InvalidArgument(f"unknown mixed_precision {precision!r}; choose from {', '.join(PRECISIONS)}")
    if precision == "fp16" and device.type != "cuda":
        raise InvalidArgument(
            "mixed_precision='fp16' requires a CUDA device for its gradient scaler, but the device of this rank is "
            f"{device}; use 'bf16' or 'no'"
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise InvalidArgument(f"mixed_precision='bf16' is not supported on {device}; use 'fp16' or 'no'")


def autocast(precision: str, device: torch.device, handler: AutocastKwargs) -> AbstractContextManager[Any]:
    """Return the autocast context for `precision`; a null context for "no"."""
    kind = PRECISIONS[precision]
    # Not `torch.autocast(enabled=False)`, which would switch off an autocast of the user around it.
    if kind is None or not handler.enabled:
        return nullcontext()
    return torch.autocast(device.type, dtype=kind, cache_enabled=handler.cache_enabled)


def make_scaler(precision: str, device: torch.device, handler: GradScalerKwargs) -> torch.amp.GradScaler | None:
    """Return the gradient scaler for fp16, None for other precisions."""
    # fp16 has a small range: small gradients would become zero. The scaler multiplies the loss before backward and
    # divides the gradients before the step. bf16 has the range of fp32 and needs none.
    return torch.amp.GradScaler(device.type, **handler.to_dict()) if precision == "fp16" else None


def in_fp32(value: Any) -> Any:  # noqa: ANN401 - any output of a model
    """Return `value` with all half-precision tensors in it converted to fp32; container types are preserved."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF_DTYPES else value
    # A named tuple takes its fields as separate arguments.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(in_fp32(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(in_fp32(item) for item in value)
    if isinstance(value, dict):
        if type(value) is dict:
            return {key: in_fp32(item) for key, item in value.items()}
        for key in value:  # an output class (transformers) mirrors its items in attributes: assign in place
            value[key] = in_fp32(value[key])
    return value


class MixedForward:
    """Replacement of a prepared model's `forward`: run the original under autocast, return fp32 outputs.

    It is an object rather than a closure, so that a copied or unpickled model has one that runs the copy.
    """

    def __init__(self, module: nn.Module, kind: torch.dtype, device: torch.device, cache: bool | None) -> None:
        self.original: Callable[..., Any] = module.forward
        self.replaced = module.__dict__.get("forward")
        self.kind = kind
        self.device_type = device.type
        self.cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model's
        """Return the output of the original forward, in fp32."""
        with torch.autocast(self.device_type, dtype=self.kind, cache_enabled=self.cache):
            output = self.original(*args, **kwargs)
        # Most models return one tensor. It is tested first, since this runs in every forward pass.
        if isinstance(output, torch.Tensor):
            return output.float() if output.dtype in _HALF_DTYPES else output
        return in_fp32(output)


def install_forward(module: nn.Module, precision: str, device: torch.device, handler: AutocastKwargs) -> None:
    """Make `module` run under autocast. Replaces a forward that was installed earlier: they never nest."""
    remove_forward(module)
    kind = PRECISIONS[precision]
    if kind is not None and handler.enabled:
        # In the instance's dict, so that other models of the class are not affected. Hooks of DDP and FSDP are called
        # by `__call__` and run outside of autocast.
        module.__dict__["forward"] = MixedForward(module, kind, device, handler.cache_enabled)


def remove_forward(module: nn.Module) -> None:
    """Restore the original forward of `module`."""
    installed = module.__dict__.get("forward")
    if isinstance(installed, MixedForward):
        del module.__dict__["forward"]
        # The user, or a library such as peft or accelerate, had put a forward of its own into the instance.
        if installed.replaced is not None:
            module.__dict__["forward"] = installed.replaced
