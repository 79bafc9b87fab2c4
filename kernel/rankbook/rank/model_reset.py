"""Reset of DDP and FSDP2 models after an error left them in the middle of a training step.

Clears the state of the failed step: pending buckets and all-gathers, unsharded parameters. Weights and reduced
gradients stay. `process_groups/manager.py` re-forms the process groups at the same time.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
_RUNTIME = "rankbook.runtime.recovery"


def remember_models() -> None:
    """Record all DistributedDataParallel instances created from now on. Can be called twice."""
    original = DistributedDataParallel.__init__
    if not hasattr(original, "__wrapped__"):
        DistributedDataParallel.__init__ = _remembered(original)  # type: ignore[method-assign]
        restore = DistributedDataParallel.__setstate__
        DistributedDataParallel.__setstate__ = _remembered(restore)  # type: ignore[method-assign]


def _remembered(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        _models.add(self)

    return make


def reset_after_abort() -> None:
    """Reset all models after an aborted step: drop pending buckets and all-gathers, free gathered parameters."""
    for model in _with_reducers():
        model.reducer._reset_state()
    _reset_sharded()
    runtime = sys.modules.get(_RUNTIME)
    if runtime is not None:  # otherwise no cell has used it
        runtime.restart_accumulation()


def restart_step() -> None:
    """Rebuild the reducers of the DDP models, so that all ranks agree on the buckets again.

    Needed when one of the ranks is a new process.
    """
    for model in _with_reducers():
        parameters, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()


def _with_reducers() -> list[DistributedDataParallel]:
    """Return the DDP models in use.

    A model that was prepared again has passed its reducer to the later wrapper.
    """
    return [model for model in tuple(_models) if "reducer" in model.__dict__]


def _reset_sharded() -> None:
    """Reset every FSDP2 model of this process to the state before the failed step.

    A rank that raised between the forward pass and the end of the backward pass holds unsharded parameters where the
    others hold shards, and would run other collectives than they. If a backward pass failed, unreduced gradients of
    this rank are dropped, because the next one would add to them.
    """
    module = sys.modules.get(_STATES)
    if module is None:  # no model is sharded, and importing FSDP is slow
        return
    from torch.distributed._composable_state import _module_state_mapping

    states = [reference() for reference in tuple(_module_state_mapping.values())]
    roots = {id(state): state for state in states if isinstance(state, module.FSDPState) and state._is_root}
    for root in roots.values():
        _reset(root)


def _reset(root: Any) -> None:  # noqa: ANN401 - torch's FSDPState
    groups = [group for state in root._state_ctx.all_states for group in _groups_of(state)]
    in_backward = any(group._training_state.name in {"PRE_BACKWARD", "POST_BACKWARD"} for group in groups)
    for group in groups:
        group._all_gather_result = None  # aborted: waiting for it would fail
        if in_backward:
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
    if hasattr(root, "_reset_iter_state"):  # torch 2.13
        root._reset_iter_state()
        return
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    for group in groups:
        group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
