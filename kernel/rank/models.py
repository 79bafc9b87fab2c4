"""Models that an error left half way through a step.

Owns: which models there are, and how each kind is made ready for its next step. Refuses: weights and gradients; what a
step that failed has added to gradients stays, as it does in plain PyTorch.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def remember_models() -> None:
    """Have each DistributedDataParallel that is made from here on known. A second time changes nothing."""
    original = DistributedDataParallel.__init__
    if not hasattr(original, "__wrapped__"):
        DistributedDataParallel.__init__ = _remembered(original)  # type: ignore[method-assign]
        restore = DistributedDataParallel.__setstate__
        DistributedDataParallel.__setstate__ = _remembered_too(restore)  # type: ignore[method-assign]


def _remembered(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        _models.add(self)

    return construct


def _remembered_too(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def restore(self: DistributedDataParallel, state: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, state)
        _models.add(self)

    return restore


def make_ready() -> None:
    """End the steps that failed: what waits in a bucket or an all-gather is dropped, what was gathered is freed."""
    for model in tuple(_models):
        model.reducer._reset_state()
    if _FSDP_STATE in sys.modules:
        _reset_fsdp(sys.modules[_FSDP_STATE].FSDPState)


def start_over() -> None:
    """Have each DDP model agree with the other ranks about its buckets anew: one of them is a fresh process."""
    for model in tuple(_models):
        parameters, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()


def _reset_fsdp(kind: type[Any]) -> None:
    """As `FSDPModule.reset_iter_state` of torch 2.13, for every root there is, and in the versions before."""
    states: list[Any] = [each for each in gc.get_objects() if type(each) is kind]
    for state in states:
        for group in _groups_of(state):
            group._all_gather_result = None  # it was aborted: to wait for it would raise
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
        elif state._is_root:
            _reset_root(state)


def _groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [each for each in (state._fsdp_param_group,) if each is not None]


def _reset_root(root: Any) -> None:  # noqa: ANN401 - torch's FSDPState, before 2.13
    shared, comm = root._state_ctx, root._comm_ctx
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_state"):
        comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for state in shared.all_states:
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in _groups_of(state):
            group._post_reduce_event = group._all_reduce_state = group._partial_reduce_output = None
            group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
