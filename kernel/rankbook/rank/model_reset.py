"""Models that an error left half way through a step.

Owns: which models there are, and how each kind is made ready for its next step. Refuses: weights, gradients that were
reduced, and groups; `process_group.py` makes those anew at the same moment.
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
    """Have each DistributedDataParallel that is made from here on known. A second time changes nothing."""
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
    """End the steps that failed: what waits in a bucket or an all-gather is dropped, what was gathered is freed."""
    for model in _with_reducers():
        model.reducer._reset_state()
    _reset_sharded()
    runtime = sys.modules.get(_RUNTIME)
    if runtime is not None:  # else no cell has used it
        runtime.restart_accumulation()


def restart_step() -> None:
    """Have each DDP model agree with the other ranks about its buckets anew: one of them is a fresh process."""
    for model in _with_reducers():
        parameters, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()


def _with_reducers() -> list[DistributedDataParallel]:
    """Those that are in use: a model that was prepared again has left its reducer to the later wrapper."""
    return [each for each in tuple(_models) if "reducer" in each.__dict__]


def _reset_sharded() -> None:
    """Let every FSDP2 model of this process begin its next step as if the failed one had not been.

    A rank that raised between the forward and the end of the backward holds whole parameters where the others hold
    shards, and would take part in other collectives than they. Gradients of this rank that have not been reduced are
    dropped with a backward that failed, or the next one would add to them.
    """
    module = sys.modules.get(_STATES)
    if module is None:  # no model is sharded, and the import is slow
        return
    from torch.distributed._composable_state import _module_state_mapping

    found = [reference() for reference in tuple(_module_state_mapping.values())]
    roots = {id(each): each for each in found if isinstance(each, module.FSDPState) and each._is_root}
    for root in roots.values():
        _reset(root)


def _reset(root: Any) -> None:  # noqa: ANN401 - torch's FSDPState
    groups = [group for state in root._state_ctx.all_states for group in _groups_of(state)]
    in_backward = any(group._training_state.name in {"PRE_BACKWARD", "POST_BACKWARD"} for group in groups)
    for group in groups:
        group._all_gather_result = None  # broken off: nobody can wait for it
        if in_backward:
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
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
