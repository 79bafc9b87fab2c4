"""Reset of DDP and FSDP2 models after an error left them in the middle of a training step.

Clears the state of the failed step: pending buckets and all-gathers, unsharded parameters. Weights and reduced
gradients stay. `process_groups/manager.py` re-forms the process groups at the same time.

On a device, the host is ahead: an optimizer step may be queued behind a collective that is aborted later, and is then
executed with what the collective has left in the gradients. `StepTracker` knows which optimizers have begun a step
since a given time. `restore_stepped` copies their weights, states and schedulers from a rank that has not begun one, if
DDP keeps them equal on all ranks. Other weights may differ between ranks: parts of a model, or members of an ensemble.
In the same way a forward pass may have left partial data in the running statistics of SyncBatchNorm, without a step.

Wherever the collectives run, an interrupt or an error may end the cell on one rank before a step and on another one
after it. `compare_steps` finds the optimizers of which the ranks have made different numbers of steps in the cell, or
of which a step was cut short. Those of DDP models are copied from a rank whose last step has ended; for shards, the
user is told. Where the steps are equal, their schedulers and gradient scalers may have stopped at different places:
these are copied, also for shards. Prepared optimizers are left to the runtime, which compares them at the next batch.
"""

from __future__ import annotations

import functools
import gc
import pickle
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from rankbook import step_interrupts
from rankbook.errors import CollectiveAborted
from rankbook.lazy_imports import loaded_module
from rankbook.ranks import name_ranks
from rankbook.transport.serialization import hook_step

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
_RUNTIME = "rankbook.runtime.accelerator"
_PREPARE = "rankbook.runtime.prepare"
_DTENSOR = "torch.distributed.tensor"
_STEP_ENDS = "rankbook.numerics.step_ends"
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
    """Return `_ddp_init_helper`, which makes a reducer, with what torch tells a model's first reducer only.

    A model gets another one when a rank is replaced. It would reduce its gradients without the communication hooks, and
    nobody would see that they are no longer compressed. With `static_graph`, it would not reduce them at all: the first
    forward pass asks the reducer to do so, and the model notes that it has asked.
    """

    @functools.wraps(original)
    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        original(self, *args, **kwargs)
        self._static_graph_delay_allreduce_enqueued = False
        # In the constructor there are none yet.
        for hook, state in self.__dict__.get("_comm_hooks", ()):
            dist._register_comm_hook(self.reducer, state, hook)

    return make


class StepReport(TypedDict):
    """The optimizers of a rank: a checksum of each, and the indices of those with a step that may be wrong.

    `replicated`: the indices of those whose parameters DDP keeps equal on all ranks, `mixed` of those with such
    parameters and others, and `sharded` of those with shards. `was_cut`: a collective of the rank was aborted while its
    device had not finished it. `statistics`: the checksums of the models in `models_with_statistics`. `steps`: the
    steps of each optimizer in the last cell, and `unfinished` the indices of those whose last step has not ended.
    `schedules`: how far the plain schedulers and the gradient scaler of each have come, as a number that grows, and
    their checksum.
    """

    optimizers: list[int]
    suspect: list[int]
    replicated: list[int]
    mixed: list[int]
    sharded: list[int]
    was_cut: bool
    statistics: list[int]
    steps: list[int]
    unfinished: list[int]
    schedules: list[tuple[int, int]]


class StepTracker:
    """The steps of all optimizers, in the order of their first steps, which all ranks share."""

    def __init__(self) -> None:
        self._began: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()
        # The steps that have ended in this cell, and those that have not: the `step` of a class may call its base's.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._open: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler]] = weakref.WeakKeyDictionary()
        self._open_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self.has_failed = False
        """Whether a cell has failed since the ranks have compared their steps, which they do before the next one."""
        global _tracker
        if _tracker is None:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _hook_optimizers()
            GradScaler.step = _with_deferral(GradScaler.step)  # type: ignore[method-assign]
            GradScaler.update = _with_delivery(GradScaler.update)  # type: ignore[method-assign]
        _tracker = self

    def begin_cell(self) -> None:
        """Count the steps of a new cell, or go on with those of a cell that has failed, until they are compared."""
        if not self.has_failed:
            self._steps.clear()
            self._open.clear()
            self._open_scalers.clear()

    def note_compared(self) -> None:
        """Count from here on: the ranks have compared their steps."""
        for scaler in tuple(self._open_scalers):
            # What `update` does last. Otherwise the next step would use gradients that are not unscaled, or be refused.
            scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self.has_failed = False
        self.begin_cell()

    def begin_scaled_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note that a scaler unscales gradients. It defers interrupts until its `update`, which all ranks must make."""
        self._scalers[optimizer] = weakref.ref(scaler)
        self._open_scalers.add(scaler)
        if step_interrupts.deferral is not None:
            step_interrupts.deferral.defer(scaler)

    def end_scaled_step(self, scaler: GradScaler) -> None:
        """Note that a scaler has been updated."""
        self._open_scalers.discard(scaler)
        if step_interrupts.deferral is not None:
            step_interrupts.deferral.deliver(scaler)

    def scaler_of(self, optimizer: Optimizer) -> GradScaler | None:
        """Return the scaler that has last stepped an optimizer, None if there is none."""
        reference = self._scalers.get(optimizer)
        return reference() if reference is not None else None

    def begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a step begins. It defers interrupts, unless it has a closure."""
        # torch passes the optimizer itself as the first argument. A closure runs forward and backward passes.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None and step_interrupts.deferral is not None:
            step_interrupts.deferral.defer(optimizer)
        self._began[optimizer] = time.monotonic()
        self._open[optimizer] = 1 if optimizer in _refused() else self._open.get(optimizer, 0) + 1

    def end_step(self, optimizer: Optimizer) -> None:
        """Note that a step has ended."""
        is_open = self._open[optimizer] = self._open.get(optimizer, 1) - 1
        if is_open:
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step_interrupts.deferral is not None:
            step_interrupts.deferral.deliver(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have begun a step."""
        return list(self._began.keys())

    def report(self, since: float | None, world_size: int) -> StepReport:
        """Describe the optimizers. Those with a step since this time, if any, are suspect."""
        names = _names_in_replicas(world_size)
        optimizers = self.optimizers()
        checksums = [_checksum_of(each, names) for each in optimizers]
        if len(set(checksums)) < len(checksums):
            # Of a cell that was run again, the former optimizer may still be there, on some of the ranks.
            del optimizers
            gc.collect()
            optimizers = self.optimizers()
            checksums = [_checksum_of(each, names) for each in optimizers]
        # The optimizer within a ZeroRedundancyOptimizer has the part of this rank.
        left_out = {id(vars(each).get("optim")) for each in optimizers}
        left_out |= {id(each) for each in optimizers if is_prepared(each)}  # left to the runtime
        counted = [each for each in optimizers if id(each) not in left_out]
        steps = {id(each): self._steps.get(each, 0) for each in counted}
        unfinished = {id(each) for each in counted if self._open.get(each)} - set(map(id, _refused()))
        return StepReport(
            optimizers=checksums,
            suspect=_indices(optimizers, lambda each: since is not None and self._began[each] >= since),
            replicated=_indices(optimizers, lambda each: all(id(param) in names for param in _parameters_of(each))),
            mixed=_indices(optimizers, lambda each: len({id(param) in names for param in _parameters_of(each)}) > 1),
            sharded=_indices(optimizers, _is_sharded),
            was_cut=since is not None,
            statistics=[checksum for checksum, _ in models_with_statistics()],
            steps=[steps.get(id(each), 0) for each in optimizers],
            unfinished=_indices(optimizers, lambda each: id(each) in unfinished),
            schedules=[_progress_of(each) if steps.get(id(each)) else (0, 0) for each in optimizers],
        )

    def forget(self) -> None:
        """Trust all steps so far, once they have been dealt with."""
        for optimizer in self.optimizers():
            self._began[optimizer] = 0.0


_tracker: StepTracker | None = None


# Functions of this module, because an optimizer class of a cell is pickled with all of torch's hooks.


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _tracker is not None and not torch.compiler.is_compiling():  # a compiled step would trace this hook
        _tracker.begin_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if _tracker is not None and not torch.compiler.is_compiling():
        _tracker.end_step(optimizer)


def _hook_optimizers() -> None:
    """Make the steps of all of torch's optimizers call the global hooks.

    torch does it when the first object of a class is made. A class of the user whose `step` calls its base's would call
    other hooks on a rank that never had such an object, as after heal: the number watch has a collective in them.
    """
    for kind in vars(torch.optim).values():
        is_optimizer = isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
        if is_optimizer and not getattr(kind.step, "hooked", False):
            kind.step = hook_step(kind.step)


def _with_deferral(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def make(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        # A class of another `update`, such as that of FSDP version 1, would not end it.
        if _tracker is not None and self.is_enabled() and type(self).update is GradScaler.update:
            _tracker.begin_scaled_step(self, optimizer)
        return step(self, optimizer, *args, **kwargs)

    return make


def _with_delivery(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def make(self: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        update(self, *args, **kwargs)
        if _tracker is not None and self.is_enabled():
            _tracker.end_scaled_step(self)

    return make


def _progress_of(optimizer: Optimizer) -> tuple[int, int]:
    """Return how far the plain schedulers and the scaler of an optimizer have come, and a checksum of their state."""
    try:
        epochs = sorted((type(each).__qualname__, int(each.last_epoch)) for each in _plain_schedulers_of(optimizer))
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        scaler = _scaler_of(optimizer)
        scale = (scaler.get_scale(), scaler._get_growth_tracker()) if scaler is not None else ()
    except Exception:  # noqa: BLE001 - a class of the user, or a device that has failed, which is reported elsewhere
        return 0, 0
    progress = sum(epoch for _, epoch in epochs) + int(scale[1] if scale else 0)
    return progress, zlib.crc32(f"{epochs} {rates} {scale}".encode())


def _scaler_of(optimizer: Optimizer) -> GradScaler | None:
    return _tracker.scaler_of(optimizer) if _tracker is not None else None


def is_replicated(model: DistributedDataParallel, world_size: int) -> bool:
    """Return True if DDP keeps the model equal on all ranks, and not only on those of a smaller group."""
    return bool(model.process_group.size() == world_size)


def _indices(optimizers: Sequence[Optimizer], is_meant: Callable[[Optimizer], bool]) -> list[int]:
    return [index for index, optimizer in enumerate(optimizers) if is_meant(optimizer)]


def _refused() -> Collection[Optimizer]:
    """Return the optimizers whose last step the number watch has ended before it has changed anything."""
    ends = loaded_module(_STEP_ENDS)  # not imported if nothing was ever watched
    return ends.refused if ends is not None else ()


def _is_sharded(optimizer: Optimizer) -> bool:
    tensor = loaded_module(_DTENSOR)  # its import takes a second
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in _parameters_of(optimizer))


def is_prepared(optimizer: Optimizer) -> bool:
    """Return True for an optimizer that was prepared by an `Accelerator`."""
    prepare = loaded_module(_PREPARE)  # a rank need not use the runtime
    return prepare is not None and prepare.wrapper_of(optimizer) is not None


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


class StepDifference(NamedTuple):
    """An optimizer of which the ranks have made different numbers of steps in the last cell.

    `indices` are those of the optimizer in the reports, by rank, and None for a new process; all of them are None if it
    is not known which optimizers of the ranks belong together. `steps` are the numbers of its steps by rank, and `cut`
    the ranks on which a step has not ended. `replicated`: DDP keeps its parameters equal on all ranks, and `mixed`:
    some of them. `sharded`: they are shards. `schedules` are those of the reports, by rank.
    """

    indices: tuple[int | None, ...]
    steps: dict[int, int]
    cut: tuple[int, ...]
    replicated: bool
    mixed: bool
    sharded: bool
    schedules: dict[int, tuple[int, int]]

    @property
    def is_of_steps(self) -> bool:
        """Return False if the ranks have made the same steps."""
        return bool(self.cut) or len(set(self.steps.values())) > 1

    @property
    def is_real(self) -> bool:
        """Return False if there is no difference that matters."""
        is_known = any(index is not None for index in self.indices) and (self.replicated or self.sharded)
        return self.is_of_steps or (is_known and len(set(self.schedules.values())) > 1)

    @property
    def source(self) -> int | None:
        """Return the first rank whose weights all may have, or whose schedules; None if there is none."""
        if all(index is None for index in self.indices):
            return None
        if not self.is_of_steps:  # all have stepped, so that those whose scheduler has not are behind
            return max(self.schedules, key=lambda rank: self.schedules[rank][0])
        if not self.replicated:
            return None
        return next((rank for rank in self.steps if rank not in self.cut), None)

    @property
    def consequence(self) -> str:
        """Return what it means for the weights, and what to do; empty where ranks may have their own."""
        if (source := self.source) is not None:
            if not self.is_of_steps:
                return f"all ranks continue with those of rank {source}"
            return f"all ranks continue with the weights and the optimizer state of rank {source}"
        if self.sharded:
            return "the shards are from different steps now: load a checkpoint"
        if not (self.replicated or self.mixed):
            return ""
        if len(self.cut) == len(self.steps):
            return "the weights are partly those of the step: load a checkpoint, or make them again"
        return "the weights of the ranks differ: broadcast those of one rank, or load a checkpoint"

    def __str__(self) -> str:
        """Return what has happened."""
        if not self.is_of_steps:
            return "its learning rate schedule or gradient scale differs between the ranks"
        if len(set(self.steps.values())) > 1:
            by_count: dict[int, list[int]] = {}
            for rank, count in self.steps.items():
                by_count.setdefault(count, []).append(rank)
            parts = [f"{count} on {name_ranks(ranks)}" for count, ranks in by_count.items()]
            text = f"the ranks have made different numbers of steps in the last cell ({', '.join(parts)})"
            return text + (f", and a step has not ended on {name_ranks(self.cut)}" if self.cut else "")
        return f"a step of the last cell has not ended on {name_ranks(self.cut)}"


def compare_steps(reports: Sequence[StepReport | None]) -> list[StepDifference]:
    """Return the optimizers whose steps differ between the ranks, the same list on all ranks.

    None in `reports` is a new process.
    """
    known = {rank: report for rank, report in enumerate(reports) if report is not None}
    differences = []
    others: dict[int, list[int]] = {rank: [] for rank in known}
    for checksum in sorted({checksum for report in known.values() for checksum in report["optimizers"]}):
        places = {
            rank: [index for index, each in enumerate(report["optimizers"]) if each == checksum]
            for rank, report in known.items()
        }
        if len({len(indices) for indices in places.values()}) == 1:
            # Several of the same form: all ranks have them in the same order.
            for of_ranks in zip(*places.values(), strict=True):
                one = dict(zip(places, of_ranks, strict=True))
                indices = tuple(one.get(rank) for rank in range(len(reports)))
                differences.append(_compare({rank: [index] for rank, index in one.items()}, known, indices))
        else:
            for rank, indices_there in places.items():
                others[rank] += indices_there
    differences = [each for each in differences if each.is_real]
    # What some of the ranks do not have: one of them has failed before its first step, or all have a part of the
    # replica, as in ZeroRedundancyOptimizer, and have made the same number of steps.
    rest = _compare(others, known, (None,) * len(reports))
    return [*differences, rest] if rest.is_real else differences


def _compare(
    places: Mapping[int, list[int]], reports: Mapping[int, StepReport], indices: tuple[int | None, ...]
) -> StepDifference:
    """Return the steps of the optimizers at `places`, by rank."""
    steps = {rank: sum(reports[rank]["steps"][index] for index in own) for rank, own in places.items()}
    cut = tuple(rank for rank, own in places.items() if not set(own).isdisjoint(reports[rank]["unfinished"]))
    owners = [(own, reports[rank]) for rank, own in places.items() if own]
    replicated = all(set(own) <= set(report["replicated"]) for own, report in owners)
    sharded = all(set(own) <= set(report["sharded"]) for own, report in owners)
    schedules = {}
    for rank, own in places.items():
        progress, checksum = reports[rank]["schedules"][own[0]] if own else (0, 0)
        schedules[rank] = (progress, checksum)
    mixed = any(not set(own).isdisjoint(report["mixed"]) for own, report in owners)
    return StepDifference(indices, steps, cut, replicated, mixed, sharded, schedules)


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
    optimizers: Sequence[Optimizer | None], source: int, device: torch.device, *, only_schedules: bool = False
) -> tuple[list[Optimizer], list[str]]:
    """Copy the weights, states, schedulers and gradient scaler of `optimizers` from the rank `source`. A collective.

    With `only_schedules`, the weights and the states stay. `device` is one whose tensors the process group can send. An
    optimizer is None in a new process, which has none of them yet and takes part because the group has no broadcast
    without it. Return the optimizers that were not copied on all ranks, and what the user has to know about them.
    """
    results = [_restore(optimizer, source, device, only_schedules=only_schedules) for optimizer in optimizers]
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, results)
    failed, notes = [], []
    for optimizer, of_all in zip(optimizers, zip(*everyone, strict=True), strict=True):
        if optimizer is None:
            continue
        name = type(optimizer).__name__
        reason, schedulers = (next(filter(None, texts), "") for texts in zip(*of_all, strict=True))
        if reason:
            failed.append(optimizer)
            notes.append(f"{name}: {reason}")
        if schedulers:
            notes.append(
                f"{name}: its schedulers ({schedulers}) may have counted other steps, and were not copied from rank "
                f"{source}: make them again, or copy them with load_state_dict"
            )
    return failed, notes


def _restore(
    optimizer: Optimizer | None, source: int, device: torch.device, *, only_schedules: bool = False
) -> tuple[str, str]:
    """Copy what belongs to one optimizer. A collective.

    Return why that failed, and the names of the schedulers that were not copied, or empty strings.
    """
    states: list[Any] = [None, None, [], "", [], None]
    is_source, runtime = dist.get_rank() == source, loaded_module(_RUNTIME)  # a rank need not use the runtime
    try:
        if is_source:
            assert optimizer is not None  # as the source is a rank that has made a step
            if not only_schedules:
                states[4] = [(each.shape, each.dtype) for each in _parameters_of(optimizer)]
            # Through the CPU, because the device of the source may be another one. Pickled here: an error within the
            # collective would leave the other ranks waiting.
            states[0] = pickle.dumps(
                pytree.tree_map_only(
                    torch.Tensor,
                    lambda tensor: tensor.detach().cpu(),
                    _settings_of(optimizer) if only_schedules else optimizer.state_dict(),
                )
            )
            states[1] = runtime.schedules_of(optimizer) if runtime is not None else []
            states[2] = [_dump_scheduler(scheduler) for scheduler in _plain_schedulers_of(optimizer)]
            states[5] = scaler.state_dict() if (scaler := _scaler_of(optimizer)) is not None else None
    except Exception as error:  # noqa: BLE001 - may run code of the user
        states = [None, None, [], f"its state was not copied from rank {source}: {_first_line(error)}", states[4], None]
    dist.broadcast_object_list(states, source)
    state, schedules, plain, reason, forms, scale = states
    if only_schedules:
        parameters = []
    elif optimizer is not None:
        parameters = _parameters_of(optimizer)
    else:
        parameters = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
    try:
        for parameter in parameters:
            _copy_tensor(parameter, source, device)
    except _OF_ONE_RANK:
        raise
    except Exception as error:  # noqa: BLE001 - torch has refused the tensor, on all ranks alike
        return f"its weights and its state were not copied from rank {source}: {_first_line(error)}", ""
    skipped = ""
    try:
        if optimizer is not None and not is_source and not reason:
            loaded = pickle.loads(state)  # from a rank of the same program
            if only_schedules:
                for group, settings in zip(optimizer.param_groups, loaded, strict=True):
                    group.update(settings)
            else:
                _load_in_place(optimizer, loaded)
            if scale is not None and (own_scaler := _scaler_of(optimizer)) is not None:
                own_scaler.load_state_dict(scale)
            if runtime is not None:
                runtime.load_schedules(optimizer, schedules)
            skipped = _load_schedulers(_plain_schedulers_of(optimizer), plain)
    except Exception as error:  # noqa: BLE001 - may run code of the user
        reason = f"its state was not copied from rank {source}: {_first_line(error)}"
    return reason, skipped


def _load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state, and keep the groups: an optimizer around this one may share them, and a scheduler write to them."""
    groups, former = optimizer.param_groups, list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for group, loaded in zip(former, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    groups[:] = former
    optimizer.param_groups = groups


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _plain_schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers of `optimizer` that are neither prepared nor parts of others."""
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler):
            followed = vars(each).get("optimizer")
            # Of a prepared optimizer, or one around another one, under any name.
            inner = getattr(followed, "__dict__", {}).values()
            if followed is optimizer or any(value is optimizer for value in inner):
                found.append(each)
    others = {id(part) for each in found for part in vars(each).get("_schedulers", ())}
    if (runtime := loaded_module(_RUNTIME)) is not None:
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
        if model.static_graph:  # its reducer may have learned from a first pass that other ranks have not made
            _renew_reducer(model)
        else:
            model.reducer._reset_state()
    _reset_sharded()
    # Not imported, because a rank need not use the runtime.
    runtime = loaded_module(_RUNTIME)
    if runtime is not None:  # otherwise no cell has used it
        runtime.restart_accumulation()


def restart_step() -> None:
    """Rebuild the reducers of the DDP models, so that all ranks agree on the buckets again.

    Needed when one of the ranks is a new process.
    """
    for model in models_with_reducers():
        _renew_reducer(model)  # the new process's reducer is as fresh as these are now


def _renew_reducer(model: DistributedDataParallel) -> None:
    """Do what DDP's constructor does after it has checked the model."""
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
    module = loaded_module(_STATES)
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
