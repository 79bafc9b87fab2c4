"""Reset of DDP and FSDP2 models after an error left them in the middle of a training step.

Clears the state of the failed step: pending buckets and all-gathers, unsharded parameters. Weights and reduced
gradients stay. `process_groups/manager.py` re-forms the process groups at the same time.

On a device, the host is ahead: an optimizer step may be queued behind a collective that is aborted later, and is then
executed with what the collective has left in the gradients. `StepTracker` knows which optimizers have begun a step
since a given time. `restore_stepped` copies their weights, states and schedulers from a rank that has not begun one, if
DDP keeps them equal on all ranks. Other weights may differ between ranks: parts of a model, or members of an ensemble.
In the same way a forward pass may have left partial data in the running statistics of SyncBatchNorm, without a step.
"""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from rankbook.errors import CollectiveAborted

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
_RUNTIME = "rankbook.runtime.accelerator"
_OF_ONE_RANK = (CollectiveAborted, dist.DistError, torch.OutOfMemoryError)
"""Errors of a collective that the other ranks need not have. All have those of its arguments."""


def track_models() -> None:
    """Record all DistributedDataParallel instances created from now on. Can be called twice."""
    original = DistributedDataParallel.__init__
    # `functools.wraps` has set `__wrapped__` if the method is wrapped already.
    if not hasattr(original, "__wrapped__"):
        DistributedDataParallel.__init__ = _tracked(original)  # type: ignore[method-assign]
        restore = DistributedDataParallel.__setstate__
        # A copied or unpickled model is made without `__init__`.
        DistributedDataParallel.__setstate__ = _tracked(_with_own_device(restore))  # type: ignore[method-assign]
        dump = DistributedDataParallel.__getstate__
        DistributedDataParallel.__getstate__ = _without_compiled_call(dump)  # type: ignore[method-assign]
        build = DistributedDataParallel._ddp_init_helper
        DistributedDataParallel._ddp_init_helper = _with_hooks(build)  # type: ignore[method-assign]


def _tracked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        _models.add(self)

    return make


def _with_own_device(original: Callable[..., None]) -> Callable[..., None]:
    """Return `__setstate__`, with the device of the parameters as that of the model, which moves its inputs there.

    A pickled model has the number of the device that it was on.
    """

    @functools.wraps(original)
    def restore(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        if self.device_ids:
            self.device = next(self.parameters()).device
            self.device_ids, self.output_device = [self.device.index], self.device.index

    return restore


def _without_compiled_call(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return `__getstate__` without the compiled call of the model, which cannot be pickled.

    That of other modules leaves it out; that of DDP does not, at least up to torch 2.13.
    """

    @functools.wraps(original)
    def dump(self: DistributedDataParallel) -> dict[str, Any]:
        return {name: value for name, value in original(self).items() if name != "_compiled_call_impl"}

    return dump


def _with_hooks(original: Callable[..., None]) -> Callable[..., None]:
    """Return `_ddp_init_helper`, which makes a reducer, with the communication hooks of the model's former reducer.

    torch registers a hook with the reducer only. A model that got another one, as all do when a rank is replaced, would
    reduce its gradients without the hook, and nobody would see that they are no longer compressed.
    """

    @functools.wraps(original)
    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        # In the constructor there are none yet.
        for hook, state in self.__dict__.get("_comm_hooks", ()):
            dist._register_comm_hook(self.reducer, state, hook)

    return make


class StepReport(TypedDict):
    """The optimizers of a rank: a checksum of each, and the indices of those with a step that may be wrong.

    `replicated`: the indices of those whose parameters DDP keeps equal on all ranks. `was_cut`: a collective of the
    rank was aborted while its device had not finished it. `statistics`: the checksums of the models in
    `models_with_statistics`.
    """

    optimizers: list[int]
    suspect: list[int]
    replicated: list[int]
    was_cut: bool
    statistics: list[int]


class StepTracker:
    """The times of the last steps of all optimizers, in the order of their first steps, which all ranks share."""

    def __init__(self) -> None:
        self._began: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()
        register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        self._began[optimizer] = time.monotonic()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have begun a step."""
        return list(self._began.keys())

    def report(self, since: float | None, world_size: int) -> StepReport:
        """Describe the optimizers. Those with a step since this time, if any, are suspect."""
        optimizers = self.optimizers()
        names = _names_in_replicas(world_size)
        suspect = [] if since is None else [i for i, each in enumerate(optimizers) if self._began[each] >= since]
        return StepReport(
            optimizers=[_checksum_of(each, names) for each in optimizers],
            suspect=suspect,
            replicated=[
                i for i, each in enumerate(optimizers) if all(id(param) in names for param in _parameters_of(each))
            ],
            was_cut=since is not None,
            statistics=[checksum for checksum, _ in models_with_statistics()],
        )

    def forget(self) -> None:
        """Trust all steps so far, once they have been dealt with."""
        for optimizer in self.optimizers():
            self._began[optimizer] = 0.0


def is_replicated(model: DistributedDataParallel, world_size: int) -> bool:
    """Return True if DDP keeps the model equal on all ranks, and not only on those of a smaller group."""
    return bool(model.process_group.size() == world_size)


def _names_in_replicas(world_size: int) -> dict[int, str]:
    """Return the names of the parameters that DDP keeps equal on all ranks, by the identity of the parameter."""
    return {
        id(parameter): name
        for model in models_with_reducers()
        if is_replicated(model, world_size)
        for name, parameter in model.module.named_parameters()
        if name not in model.parameters_to_ignore
    }


def _checksum_of(optimizer: Optimizer, names: dict[int, str]) -> int:
    # With the names: an optimizer may have another part of the replica on every rank, as in ZeroRedundancyOptimizer.
    parameters = [(names.get(id(parameter)), tuple(parameter.shape)) for parameter in _parameters_of(optimizer)]
    return zlib.crc32(f"{type(optimizer).__qualname__} {parameters}".encode())


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def choose_source(reports: Sequence[StepReport | None]) -> int | None:
    """Return the first rank whose optimizers may be copied to all others; None if there is none.

    A rank without a suspect step has stopped before the others. None in `reports` is a new process, which has no
    optimizers; its peers are restored by `heal` or not at all.
    """
    known = [report for report in reports if report is not None]
    if len(known) < len(reports) or any(report["optimizers"] != known[0]["optimizers"] for report in known):
        return None
    return next((rank for rank, report in enumerate(known) if not report["suspect"]), None)


def replicated_on_all(reports: Sequence[StepReport | None]) -> set[int]:
    """Return the indices of the optimizers whose parameters are known to be equal on all ranks, but for cut steps."""
    return set.intersection(*(set(report["replicated"] if report is not None else ()) for report in reports))


def choose_statistics_source(reports: Sequence[StepReport | None]) -> int | None:
    """Return the first rank without a cut collective, whose running statistics all may have; None if there is none.

    None also if the ranks have different models, or several of the same form, which nobody could tell apart.
    """
    known = [report for report in reports if report is not None]
    statistics = known[0]["statistics"] if len(known) == len(reports) else []
    if len(set(statistics)) < len(statistics) or any(report["statistics"] != statistics for report in known):
        return None
    return next((rank for rank, report in enumerate(known) if not report["was_cut"]), None)


def models_with_statistics() -> list[tuple[int, DistributedDataParallel]]:
    """Return the DDP models with SyncBatchNorm, each with a checksum of its form, in the order of the checksums.

    The size of its process group is a part of the form.
    """
    found = []
    for model in models_with_reducers():
        if _synchronized_layers(model):
            tensors = [*model.named_parameters(), *model.named_buffers()]  # `state_dict` may run code of the user
            shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors]
            found.append((zlib.crc32(f"{model.process_group.size()} {shapes}".encode()), model))
    return sorted(found, key=lambda entry: entry[0])


def _synchronized_layers(model: torch.nn.Module) -> list[torch.nn.SyncBatchNorm]:
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.SyncBatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


def restore_statistics(source: int, device: torch.device) -> None:
    """Copy the running statistics of SyncBatchNorm in replicated models from the rank `source`. A collective.

    `device` is one whose tensors the process group can send.
    """
    models = [model for _, model in models_with_statistics() if is_replicated(model, dist.get_world_size())]
    for model in models:
        for layer in _synchronized_layers(model):
            for buffer in layer.buffers(recurse=False):
                _copy_tensor(buffer, source, device)


def _copy_tensor(tensor: torch.Tensor, source: int, device: torch.device) -> None:
    """Give the tensor the value that it has on the rank `source`. A collective."""
    own = tensor.detach()
    sent = own.to(device).contiguous()  # NCCL takes no other tensor
    dist.broadcast(sent, source)
    if sent is not own:
        own.copy_(sent)


def restore_stepped(
    optimizers: Sequence[Optimizer], source: int, device: torch.device
) -> tuple[list[Optimizer], list[str]]:
    """Copy the weights, states and schedulers of `optimizers` from the rank `source`. A collective.

    `device` is one whose tensors the process group can send. Return the optimizers that were not copied on all ranks,
    and what the user has to know about them.
    """
    results = [_restore(optimizer, source, device) for optimizer in optimizers]
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, results)
    failed, notes = [], []
    for optimizer, of_all in zip(optimizers, zip(*everyone, strict=True), strict=True):
        name = type(optimizer).__name__
        reason, schedulers = (next(filter(None, texts), "") for texts in zip(*of_all, strict=True))
        if reason:
            failed.append(optimizer)
            notes.append(f"{name}: its weights and its state were not copied from rank {source}: {reason}")
        if schedulers:
            notes.append(
                f"{name}: its schedulers ({schedulers}) may have counted a step that was taken back, and were not "
                f"copied from rank {source}: make them again, or copy them with load_state_dict"
            )
    return failed, notes


def _restore(optimizer: Optimizer, source: int, device: torch.device) -> tuple[str, str]:
    """Copy what belongs to one optimizer. A collective.

    Return why that failed, and the names of the schedulers that were not copied, or empty strings.
    """
    try:
        for parameter in _parameters_of(optimizer):
            _copy_tensor(parameter, source, device)
    except _OF_ONE_RANK:
        raise
    except Exception as error:  # noqa: BLE001 - torch has refused the tensor, on all ranks alike
        return _first_line(error), ""
    states: list[Any] = [None, None, [], ""]
    is_source, runtime = dist.get_rank() == source, sys.modules.get(_RUNTIME)  # a rank need not use the runtime
    try:
        if is_source:
            # Through the CPU, because the device of the source may be another one. Pickled here: an error within the
            # collective would leave the other ranks waiting.
            states[0] = pickle.dumps(
                pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), optimizer.state_dict())
            )
            states[1] = runtime.schedules_of(optimizer) if runtime is not None else []
            states[2] = [_dump_scheduler(scheduler) for scheduler in _plain_schedulers_of(optimizer)]
    except Exception as error:  # noqa: BLE001 - may run code of the user
        states = [None, None, [], _first_line(error)]
    dist.broadcast_object_list(states, source)
    state, schedules, plain, reason = states
    skipped = ""
    try:
        if not is_source and not reason:
            optimizer.load_state_dict(pickle.loads(state))  # from a rank of the same program
            if runtime is not None:
                runtime.load_schedules(optimizer, schedules)
            skipped = _load_schedulers(_plain_schedulers_of(optimizer), plain)
    except Exception as error:  # noqa: BLE001 - may run code of the user
        reason = _first_line(error)
    return reason, skipped


def _plain_schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers of `optimizer` that are neither prepared nor parts of others."""
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler):
            followed = vars(each).get("optimizer")
            if followed is optimizer or getattr(followed, "optimizer", None) is optimizer:  # prepared
                found.append(each)
    others = {id(part) for each in found for part in vars(each).get("_schedulers", ())}
    if (runtime := sys.modules.get(_RUNTIME)) is not None:
        others |= {id(prepared.scheduler) for prepared in runtime.schedulers_of(optimizer)}
    return [each for each in found if id(each) not in others]


def _dump_scheduler(scheduler: LRScheduler) -> tuple[str, bytes]:
    """Return the type of a scheduler and its pickled state, which is empty if it cannot be pickled."""
    try:
        return type(scheduler).__qualname__, pickle.dumps(scheduler.state_dict())
    except Exception:  # noqa: BLE001 - any object of the user, such as a lambda; named by `_load_schedulers`
        return type(scheduler).__qualname__, b""


def _load_schedulers(schedulers: list[LRScheduler], states: list[tuple[str, bytes]]) -> str:
    """Load the states of another rank's schedulers.

    Return the types if they cannot be told apart, do not agree, or cannot be loaded; otherwise an empty string.
    """
    own = {type(scheduler).__qualname__: scheduler for scheduler in schedulers}
    sent = dict(states)
    names = ", ".join(sorted(own.keys() | sent.keys()))
    if len(own) < len(schedulers) or len(sent) < len(states) or own.keys() != sent.keys():
        return names
    try:
        for name, scheduler in own.items():
            scheduler.load_state_dict(pickle.loads(sent[name]))  # from a rank of the same program
    except Exception:  # noqa: BLE001 - a class of the user, or the empty state of `_dump_scheduler`
        return names
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def names_of_models(models: Collection[torch.nn.Module], namespace: dict[str, Any]) -> list[str]:
    """Return the variables that hold `models`, or the modules in them."""
    modules = {id(module) for model in models for module in model.modules()}
    return [name for name, value in namespace.items() if not name.startswith("_") and id(value) in modules]


def names_of(optimizers: Collection[Optimizer], namespace: dict[str, Any]) -> list[str]:
    """Return the variables that hold `optimizers`, or models with their parameters."""
    parameters = {id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)}
    names = []
    for name, value in namespace.items():
        if name.startswith("_"):
            continue
        kind = type(value)
        if issubclass(kind, torch.nn.Module):
            holds = any(id(parameter) in parameters for parameter in value.parameters())
        else:
            holds = any(value is each for each in optimizers) or (
                issubclass(kind, Optimizer) and any(vars(value).get("optimizer") is each for each in optimizers)
            )
        if holds:
            names.append(name)
    return names


def reset_after_abort() -> None:
    """Reset all models after an aborted step: drop pending buckets and all-gathers, free gathered parameters."""
    for model in models_with_reducers():
        model.reducer._reset_state()
    _reset_sharded()
    # Not imported, because a rank need not use the runtime.
    runtime = sys.modules.get(_RUNTIME)
    if runtime is not None:  # otherwise no cell has used it
        runtime.restart_accumulation()


def restart_step() -> None:
    """Rebuild the reducers of the DDP models, so that all ranks agree on the buckets again.

    Needed when one of the ranks is a new process.
    """
    for model in models_with_reducers():
        # What DDP's constructor does after it has checked the model. The new process's reducer is as fresh as these are
        # now.
        parameters, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()


def models_with_reducers() -> list[DistributedDataParallel]:
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

    # torch keeps the states in a table with weak references, whose targets may be gone.
    states = [reference() for reference in tuple(_module_state_mapping.values())]
    roots = {id(state): state for state in states if isinstance(state, module.FSDPState) and state._is_root}
    for root in roots.values():
        _reset(root)


def _reset(root: Any) -> None:  # noqa: ANN401 - torch's FSDPState
    # The root knows the states of all its modules. The order does not matter: nothing is communicated.
    groups = [group for state in root._state_ctx.all_states for group in _groups_of(state)]
    # Outside of a backward pass, unreduced gradients are those that the user accumulates without synchronization, and
    # stay.
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
    # What `_reset_iter_state` does in later versions.
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
        # Frees the gathered parameters, and sets the module's attributes to the shards.
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - torch's FSDPState
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
