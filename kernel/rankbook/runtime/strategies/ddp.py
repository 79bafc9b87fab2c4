"""Data parallel strategy: replicas of the model that average their gradients with DistributedDataParallel.

It uses the default process group.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import DistributedDataParallelKwargs
from rankbook.runtime.strategies.base import Strategy, StrategySetup

_HOOKS = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook"}
_WRAPPERS = {"fp16": "fp16_compress_wrapper", "bf16": "bf16_compress_wrapper"}


class DataParallel(Strategy):
    """Strategy that wraps models in DistributedDataParallel over all ranks."""

    name = "MULTI"
    wrapper = "DistributedDataParallel"

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True for more than one rank without sharding or a tensor-parallel plan."""
        # A mesh with `dp_replicate` alone consists of whole replicas, which is what DDP provides.
        sizes = setup.parallelism.sizes if setup.parallelism is not None else {"dp_shard": 1, "tp": 1}
        return setup.num_processes > 1 and setup.fsdp is None and sizes["dp_shard"] == sizes["tp"] == 1

    @property
    def signature(self) -> tuple[Any, ...]:
        """See `Strategy`."""
        return (*super().signature, *map(repr, self.setup.handlers.ddp.to_dict().values()))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in DDP. A model without trainable parameters is returned as it is: DDP would refuse it."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        handler = self.setup.handlers.ddp
        # DDP's constructor gets only the fields that differ from our defaults; those of the hook are applied after it.
        options = {name: value for name, value in handler.to_kwargs().items() if not name.startswith("comm_")}
        device = self.setup.device
        # Checked here, before the constructor: DDP's constructor is a collective, and all ranks have devices of the
        # same type.
        if handler.comm_hook == "bf16" and device.type == "cpu":
            raise InvalidArgument(
                "comm_hook='bf16' requires a CUDA device in torch, but the device of this rank is cpu; use 'fp16'"
            )
        wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)
        _register_hook(wrapped, handler)
        return wrapped

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:  # noqa: ARG002 - as every strategy's
        """Remove the reducer's hooks from the parameters: a second reducer would reduce every gradient twice."""
        if isinstance(wrapped, DistributedDataParallel) and "reducer" in wrapped.__dict__:
            # The hooks are on the gradient accumulators of the user's parameters, so they would outlive the wrapper if
            # its reducer is kept alive by a reference of the user. The logger refers to the reducer, too.
            wrapped.reducer._remove_autograd_hooks()
            wrapped.logger = None
            del wrapped.reducer
            wrapped.forward = _released  # type: ignore[method-assign]

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """See `Strategy`."""
        if isinstance(wrapped, DistributedDataParallel):
            # The same attribute that DDP's `no_sync` sets. It has to be set before the forward pass, where DDP prepares
            # its reducer.
            wrapped.require_backward_grad_sync = sync


# torch's reducer divides the gradients into buckets in the order of the parameters, and after the first backward pass
# once more in the order in which the gradients arrive. gloo sums the elements of a bucket in an order that depends on
# their place in it. So a model that is to continue with bitwise equal results needs the buckets that it had. torch has
# no public way to read or set them. Tried with torch 2.13.
def bucket_indices(wrapped: nn.Module) -> list[list[int]] | None:
    """Return the numbers of the parameters in each bucket of the next backward pass; None for torch's first buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or "reducer" not in wrapped.__dict__:
        return None
    assert wrapped.logger is not None
    text = wrapped.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    if text:
        return [[int(number) for number in bucket.split()] for bucket in text.split(",")]
    # In the first steps they are not reported yet. They follow from the times at which the gradients have arrived.
    times = list(wrapped.reducer.get_backward_stats())
    if not any(times):
        return None
    parameters, sparse = wrapped._build_params_for_reducer()
    order = sorted(range(len(times)), key=times.__getitem__)
    first, others = wrapped.bucket_bytes_cap, wrapped.bucket_bytes_cap
    if not wrapped.static_graph or wrapped.find_unused_parameters:
        first = min(first, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(
        [parameters[index] for index in order], [first, others], [sparse[index] for index in order], order
    )
    return [list(bucket) for bucket in buckets]


def set_buckets(wrapped: nn.Module, buckets: list[list[int]] | None) -> None:
    """Make the reducer of a DDP model anew, with these buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or buckets is None:
        return
    parameters, sparse = wrapped._build_params_for_reducer()
    names = wrapped._build_debug_param_to_name_mapping(parameters)
    compute = torch.distributed._compute_bucket_assignment_by_size
    # DDP reverses what this function returns.
    chosen = (buckets[::-1], [wrapped.bucket_bytes_cap] * len(buckets))
    torch.distributed._compute_bucket_assignment_by_size = lambda *_: chosen
    try:
        wrapped._ddp_init_helper(parameters, sparse, names, wrapped.static_graph)
    finally:
        torch.distributed._compute_bucket_assignment_by_size = compute
    if wrapped.static_graph:
        wrapped.reducer._set_static_graph()


def _register_hook(wrapped: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
    name = handler.comm_hook
    if name == "no":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    low_rank = name == "power_sgd"
    # None is the default process group. The state has the errors of the compression of every parameter, so every
    # wrapper has its own.
    state = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option) if low_rank else None
    hook: Any = powerSGD_hook.powerSGD_hook if low_rank else getattr(default_hooks, _HOOKS[name])
    if handler.comm_wrapper != "no":
        hook = getattr(default_hooks, _WRAPPERS[handler.comm_wrapper])(hook)
    wrapped.register_comm_hook(state=state, hook=hook)


def _released(*_: object, **__: object) -> NoReturn:
    raise InvalidArgument(
        "this model was prepared again and can no longer be called: use the one that the last prepare() returned"
    )
