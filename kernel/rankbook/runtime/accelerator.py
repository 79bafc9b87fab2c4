"""Prepare and release models, optimizers, loaders and schedulers: the `Accelerator` class.

The class is composed of mix-ins: settings (settings.py), training (training.py), collectives (collectives.py), saving
(saving.py), and experiment tracking, which this module defines.

This module also recovers the training state after an aborted collective, and connects the accumulation window to
prepared objects (`install`). The ranks may have failed at different batches: some may have taken an optimizer step that
others did not. The sequence is: the process groups are re-formed (rank/process_groups), rank/model_reset.py calls
`restart_accumulation`, and at the start of the next batch the window clears all gradients (`_drop_gradients`) and
copies replicas and schedulers that differ from rank 0 (`_synchronize_replicas`). The batch starts with `accumulate`, or
without it with the forward pass of a prepared model in a loop over a prepared loader (`settle_before_training`).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rankbook.errors import CollectiveAborted, InvalidArgument
from rankbook.protocol import telemetry
from rankbook.ranks import format_ranks
from rankbook.runtime import optimizer as optimizer_module
from rankbook.runtime import prepare, prepared
from rankbook.runtime.collectives import CollectiveMethods
from rankbook.runtime.gradient_state import GradientState, settle_before_training, window
from rankbook.runtime.memory import clear_device_cache, collect_left_over, release_memory
from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from rankbook.runtime.prepare import (
    prepare_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
    register_received_model,
    release_model,
)
from rankbook.runtime.prepared import PrepareContext
from rankbook.runtime.saving import SavingMethods
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.state import AcceleratorState
from rankbook.runtime.strategies.base import DataParallel
from rankbook.runtime.trackers import InactiveTracker, make_tracker
from rankbook.runtime.training import TrainingMethods

_log = logging.getLogger(__name__)


def install() -> None:
    """Register this module's functions with the accumulation window, and a telemetry source for training steps."""
    # The window is in a module that imports neither models nor optimizers, so it gets these functions from here.
    window.drop_gradients = _drop_gradients
    window.synchronize_replicas = _synchronize_replicas
    window.count_steps = _count_steps
    telemetry.offer_source("training", _training_step)


def prepared_objects() -> tuple[list[Any], list[Any]]:
    """Return the prepared models and optimizers of all `Accelerator` instances that are not sharded.

    Their whole state is on every rank, so they can be sent to the replacement of a lost rank.
    """
    models = [wrapped for strategy, wrapped in prepared.prepared_models() if not strategy.shards]
    return models, [wrapper for wrapper in prepare.prepared_optimizers() if not _is_sharded(wrapper)]


def restart_accumulation() -> None:
    """Start a new window at the next batch, on this rank as on all others.

    The ranks may have failed at different batches.
    """
    # Without a shared state no Accelerator exists in this process, and no window.
    if GradientState._shared_state:
        has_gradients = window.has_unused_gradients
        window.abort(GradientState())
        if has_gradients:  # they may not be reduced, and a loop without `accumulate` would use them
            _drop_gradients()
        for strategy, wrapped in prepared.prepared_models():
            strategy.set_sync(wrapped, True)  # an interrupt may have come while a batch began or ended
            settle_before_training(wrapped)


def _drop_gradients() -> None:
    for wrapper in prepare.prepared_optimizers():
        # The wrapped optimizer's method: that of the wrapper does nothing in the middle of a window.
        wrapper.optimizer.zero_grad()
    for strategy, wrapped in prepared.prepared_models():
        # FSDP keeps gradients that are not reduced yet outside of `grad`, where `zero_grad` does not find them.
        strategy.drop_gradients(wrapped)
    # A rank may have unscaled its gradients before the error, and another one may not: their scales would differ.
    optimizer_module.end_rounds()


class _TrainingProgress(NamedTuple):
    """Progress of a rank's prepared objects, by serial number.

    `models` are those under DDP, `steps` the optimizers' numbers of steps, `scales` the states of their scalers,
    `schedules` the checksums of the schedulers, and `cut` the optimizers whose last step did not end.
    """

    models: set[int]
    steps: dict[int, int]
    scales: dict[int, Any]
    schedules: dict[int, int]
    cut: set[int]

    def renumbered(self) -> _TrainingProgress:
        """Return the progress with numbers from 0 on, in the order of the serial numbers."""
        order = dict(enumerate(sorted(self.steps)))
        return _TrainingProgress(
            set(range(len(self.models))),
            {number: self.steps[serial] for number, serial in order.items()},
            {number: self.scales[serial] for number, serial in order.items() if serial in self.scales},
            dict(enumerate(self.schedules[serial] for serial in sorted(self.schedules))),
            {number for number, serial in order.items() if serial in self.cut},
        )


def _synchronize_replicas(*, to_most_steps: bool = False) -> None:
    """Copy replicated models, optimizer states and schedules from one rank, where the ranks differ. A collective.

    A rank may have failed before a step that others took, or in the middle of a step. The source is the first rank
    whose last step has ended. The scale of fp16 becomes that of the source as well, because a rank may have skipped a
    step that others took. Shards are left as they are, with a warning: no other rank has what a rank lacks.

    `to_most_steps`: the ranks have made different numbers of steps on purpose, and all take the state of the first rank
    with the most, without a warning.
    """
    if not dist.is_initialized():
        return
    # By serial number: a rank may hold other objects than the others, such as those of a cell that has failed there,
    # or fewer if it replaces a lost one. Only what all ranks have is compared and copied.
    registered = prepared.registered("model")
    copies = {
        serial: registered[serial]
        for serial, (strategy, _) in prepared.current_models().items()
        if isinstance(strategy, DataParallel)
    }
    wrappers, schedulers = prepared.registered("optimizer"), prepared.registered("scheduler")
    progress = _TrainingProgress(
        set(copies),
        {serial: wrapper.steps for serial, wrapper in wrappers.items()},
        {serial: wrapper.scaler.state_dict() for serial, wrapper in wrappers.items() if wrapper.scaler is not None},
        {serial: optimizer_module.schedule_checksum(scheduler) for serial, scheduler in schedulers.items()},
        {serial for serial, wrapper in wrappers.items() if wrapper.is_stepping},
    )
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, progress)
    if not set.intersection(*(set(row.steps) for row in rows)) and len({tuple(map(len, row[:2])) for row in rows}) == 1:
        # A rank that was restarted has prepared the same objects, under other numbers: the order counts.
        rows = [row.renumbered() for row in rows]
        copies, wrappers, schedulers = (
            dict(enumerate(items[serial] for serial in sorted(items))) for items in (copies, wrappers, schedulers)
        )
    serials = sorted(set.intersection(*(set(row.steps) for row in rows)))
    # A step that did not end has changed some of the parameters, and others on another rank.
    cut = {rank: row.cut.intersection(serials) for rank, row in enumerate(rows) if row.cut.intersection(serials)}
    source = next((rank for rank in range(len(rows)) if rank not in cut), 0)
    if to_most_steps:
        source = max(range(len(rows)), key=lambda rank: sum(rows[rank].steps[serial] for serial in serials))
    warn = _log.debug if to_most_steps else _log.warning
    _copy_replicas(rows, copies, {serial: wrappers[serial] for serial in serials}, cut, source, warn)
    # After the optimizers, whose options are a part of the schedules.
    _copy_schedules(rows, schedulers, source, warn)


def _copy_replicas(
    rows: list[_TrainingProgress],
    copies: dict[int, nn.Module],
    wrappers: dict[int, AcceleratedOptimizer],
    cut: dict[int, set[int]],
    source: int,
    warn: Callable[..., None],
) -> None:
    """Copy models and optimizer states from the rank `source`, if the ranks have made different steps. A collective.

    `cut` are the optimizers in the middle of a step, by rank.
    """
    serials = list(wrappers)
    for serial in serials:
        scaler, scale = wrappers[serial].scaler, rows[source].scales.get(serial)
        # Gradients of different scales must not be averaged.
        if scaler is not None and scale is not None and scale != scaler.state_dict():
            scaler.load_state_dict(scale)
    steps_by_rank = [[row.steps[serial] for serial in serials] for row in rows]
    is_equal = all(rank_steps == steps_by_rank[0] for rank_steps in steps_by_rank)
    if is_equal and not cut:
        return
    # All ranks have compared the same rows above, so all of them return there or all come here.
    for serial in sorted(set.intersection(*(row.models for row in rows))):
        for tensor in (*copies[serial].parameters(), *copies[serial].buffers()):
            dist.broadcast(tensor.detach(), source)
    for index, serial in enumerate(serials):
        wrapper = wrappers[serial]
        if _is_sharded(wrapper):
            continue
        state_list = [wrapper.state_dict()]
        dist.broadcast_object_list(state_list, source)
        wrapper.load_state_dict(state_list[0])
        wrapper.steps = steps_by_rank[source][index]
    if dist.get_rank() == 0:
        counts = ", ".join(f"rank {rank}: {rank_steps}" for rank, rank_steps in enumerate(steps_by_rank))
        cause = (
            f"An optimizer step did not end on {'rank' if len(cut) == 1 else 'ranks'} {format_ranks(cut)}"
            if is_equal
            else f"The ranks had made different numbers of optimizer steps ({counts})"
        )
        # Whether parameters are sharded is the same on all ranks, and so are the numbers of the others now.
        mixed = any(
            _is_sharded(wrappers[serial])
            and (
                any(serial in of_rank for of_rank in cut.values())
                or any(rank_steps[index] != steps_by_rank[source][index] for rank_steps in steps_by_rank)
            )
            for index, serial in enumerate(serials)
        )
        remedy = (
            "interrupt this cell, and %distributed heal brings all ranks back to the last snapshot"
            if optimizer_module.after_step is not None  # the training is protected
            else "load the last checkpoint with load_state"
        )
        warn(
            "%s; %s",
            cause,
            f"the shards of a model are from different steps now: {remedy}."
            if mixed
            else f"all continue with the weights of rank {source}, which are those of the middle of its step: {remedy}."
            if source in cut
            else f"all continue with the weights of rank {source}.",
        )


def _copy_schedules(
    rows: list[_TrainingProgress],
    schedulers: dict[int, AcceleratedScheduler],
    source: int,
    warn: Callable[..., None],
) -> None:
    serials = sorted(set.intersection(*(set(row.schedules) for row in rows)))
    # Also those of sharded optimizers: the learning rates are the same on all ranks.
    different = [serial for serial in serials if len({row.schedules[serial] for row in rows}) > 1]
    if not different:
        return
    is_source = dist.get_rank() == source
    schedules = [optimizer_module.dump_schedule(schedulers[serial]) if is_source else b"" for serial in different]
    dist.broadcast_object_list(schedules, source)
    if is_source:
        names = ", ".join(type(schedulers[serial].scheduler).__name__ for serial in different)
        warn(
            "The schedulers of the ranks were in different states (%s); all continue with that of rank %s, and with "
            "its learning rates.",
            names,
            source,
        )
        return
    for serial, schedule in zip(different, schedules, strict=True):
        optimizer_module.load_schedule(schedulers[serial], schedule)


def schedules_of(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the schedules of the prepared schedulers that follow `optimizer`, for `load_schedules` on another rank."""
    return [optimizer_module.dump_schedule(scheduler) for scheduler in schedulers_of(optimizer)]


def load_schedules(optimizer: torch.optim.Optimizer, schedules: list[bytes]) -> None:
    """Load what `schedules_of` has returned on another rank."""
    # A rank may have prepared more schedulers than the other one, in a cell that has failed there.
    for scheduler, schedule in zip(schedulers_of(optimizer), schedules, strict=False):
        optimizer_module.load_schedule(scheduler, schedule)


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[AcceleratedScheduler]:
    """Return the prepared schedulers that follow `optimizer`."""
    return [
        scheduler
        for scheduler in prepared.registered("scheduler").values()
        if any(wrapper.optimizer is optimizer for wrapper in scheduler.optimizers)
    ]


def _is_sharded(wrapper: AcceleratedOptimizer) -> bool:
    # Imported here: most programs never need it.
    from rankbook.checkpoint.state_dict.models import has_divided_state

    is_sharded = any(isinstance(parameter, DTensor) for group in wrapper.param_groups for parameter in group["params"])
    return is_sharded or has_divided_state(wrapper.optimizer)


# Values at the last report, for the steps per second since then.
class _Rate:
    steps = 0
    seconds = 0.0


def _count_steps() -> int:
    return sum(wrapper.steps for wrapper in prepare.prepared_optimizers())


def _training_step() -> telemetry.TrainingStep:
    # Of all optimizers together: with two of them, such as those of a GAN, the rate is that of both.
    steps, now = _count_steps(), time.monotonic()
    rate = (steps - _Rate.steps) / (now - _Rate.seconds) if _Rate.seconds and now > _Rate.seconds else None
    _Rate.steps, _Rate.seconds = steps, now
    return telemetry.TrainingStep(steps=steps, batches=window.batches, rate=rate)


class TrackingMethods(AcceleratorSettings):
    """Tracking methods of the `Accelerator`."""

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start all trackers of `log_with`. Trackers that are running end first.

        Args:
            project_name: name of the run.
            config: settings of the run, which the trackers store.
            init_kwargs: maps a tracker's name to keyword arguments of its constructor.

        Raises `InvalidArgument` if the package of a tracker is not installed.

        Example::

            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits", config={"lr": 0.1, "epochs": 3})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
        """
        # A notebook starts trackers again and again; the files of the previous run must be closed first.
        self.end_training()
        for entry in self.log_with:
            # By the tracker's name, as in Accelerate. Instances were constructed by the user, and get none.
            options = (init_kwargs or {}).get(entry if isinstance(entry, str) else entry.name, {})
            tracker = make_tracker(entry, project_name, self.logging_dir, **options)
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: ANN401 - a tracker, or its own object
        """Return the tracker called `name`, or with `unwrap` the object that it writes to.

        On a rank where the tracker does not run, the object is one whose methods do nothing. Raises `InvalidArgument`
        for a name that is not in `log_with`.

        Example::

            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits")
            accelerator.get_tracker("jsonl").name  # 'jsonl'
            file = accelerator.get_tracker("jsonl", unwrap=True)  # the open file of rank 0
            file.flush()  # does nothing on the other ranks
            accelerator.end_training()
        """
        self._start_received_trackers()
        for tracker in self.trackers:
            if tracker.name == name:
                if unwrap and tracker.main_process_only and not self.is_main_process:
                    return InactiveTracker(name)
                return tracker.tracker if unwrap else tracker
        names = [entry if isinstance(entry, str) else entry.name for entry in self.log_with]
        # A script calls `get_tracker(...)` on all ranks and then its methods, which must exist there and do nothing.
        if name in names and not self.is_main_process:
            return InactiveTracker(name)
        started = ", ".join(map(repr, names)) or "the trackers of log_with"
        raise InvalidArgument(f"tracker {name!r} was not started; init_trackers() starts {started}")

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Send `values` to all trackers, on the ranks where they run.

        Args:
            values: maps metric names to values.
            step: the training step.
            log_kwargs: maps a tracker's name to further keyword arguments of its `log`.

        Example::

            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits")
            for step, batch in enumerate(loader):
                accelerator.log({"loss": model(batch).mean()}, step=step)
            accelerator.end_training()
        """
        self._start_received_trackers()
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Close all trackers.

        Example::

            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits", config={"lr": 0.1})
            accelerator.log({"accuracy": 0.98}, step=1000)
            accelerator.end_training()  # closes runs/digits/metrics.jsonl
        """
        self._received_trackers.clear()
        # Removed before it is finished: if that raises, the next call does not try the same one again.
        while self.trackers:
            self.trackers.pop().finish()

    def _start_received_trackers(self) -> None:
        """Start the trackers that go on after their rank has died, and report the others."""
        received, self._received_trackers = self._received_trackers, []
        ended = []
        for name, main_process_only, tracker in received:
            if tracker is not None:
                tracker.start()
                self.trackers.append(tracker)
            elif self.is_main_process or not main_process_only:
                ended.append(name)
        if ended:
            _log.warning(
                "This rank has no run of %s, since the rank was replaced: nothing is logged there until you call "
                "init_trackers() again",
                ", ".join(ended),
            )


# Objects of the process, see `__getstate__`.
_NOT_PICKLED = {"state", "gradient_state", "_references", "trackers", "_received_trackers"}


class Accelerator(TrainingMethods, CollectiveMethods, SavingMethods, TrackingMethods):
    """Prepare models, optimizers, loaders and schedulers for distributed training, and train with them.

    All instances in a process share the precision, the gradient accumulation, and the plugins for sharding and
    compilation: a second `Accelerator()` keeps these settings, and explicit arguments change them. Objects that were
    prepared before keep theirs until they are prepared again. They share the loss scale of fp16 too, which starts anew
    with an instance that is given `mixed_precision="fp16"` or `GradScalerKwargs`. The positional parameters are in
    Accelerate's order.

    Args:
        device_placement: move models and batches to the rank's device.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: number of batches per optimizer step.
        cpu: use the CPU although an accelerator is available.
        dataloader_config: treatment of loaders.
        deepspeed_plugin, torch_tp_plugin, megatron_lm_plugin, deepspeed_plugins: not supported; must be None.
        fsdp_plugin: shard models with FSDP2.
        rng_types: generators that the ranks synchronize when a loop starts: "generator" (that of the sampler), "torch",
            "cuda", "numpy", "python".
        log_with: trackers, by name or as instances.
        project_dir: directory of checkpoints and logs.
        project_config: see `ProjectConfiguration`.
        gradient_accumulation_plugin: further settings of accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: step a scheduler only when its optimizer steps.
        kwargs_handlers: handlers such as `AutocastKwargs`, at most one per class.
        dynamo_backend: compile models with this backend of `torch.compile`.
        dynamo_plugin: further settings of `torch.compile`, instead of `dynamo_backend`.
        parallelism_config: mesh of the ranks. `ParallelismConfig(dp_replicate_size=world_size)` restores whole
            replicas.
        scheduler_steps_times_num_processes: step a scheduler once per rank for every optimizer step.

    Raises `InvalidArgument` for invalid, contradictory or unknown arguments, without changing any shared state.

    Example::

        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    """

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:  # noqa: ANN401 - types of the arguments
        """Prepare `args` for distributed training and return them in the same order. A collective.

        Models are prepared first, then optimizers (whose parameters may be replaced), loaders and schedulers. Other
        objects are returned unchanged. A single argument is returned without a tuple.

        Args:
            args: models, optimizers, loaders and schedulers.
            device_placement: for every argument, whether it is moved to the rank's device.

        Raises `InvalidArgument` on all ranks for arguments that cannot be prepared. Objects that were prepared before
        the invalid one stay so, and can be passed to `prepare` again.

        Example::

            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise prepare.placement_length_error(len(device_placement), len(args))
        return prepare.prepare_all(self, args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare `model` and return the model to call. A collective.

        Args:
            model: the model.
            device_placement: move it to the rank's device; defaults to the setting of the `Accelerator`.
            evaluation_mode: only move it and set up mixed precision, without DDP or sharding.

        Raises `InvalidArgument` if the settings do not suit the model, such as a tensor-parallel plan that names none
        of its modules.

        Example::

            model = accelerator.prepare_model(model)
            teacher = accelerator.prepare_model(torch.nn.Linear(8, 1), evaluation_mode=True)  # is not trained
        """
        wrapped = prepare_model(model, self._context(), device_placement=device_placement, evaluation=evaluation_mode)
        self._register("model", wrapped)
        return wrapped

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare `optimizer` and return the optimizer to step.

        Example::

            model = accelerator.prepare_model(model)  # first: it may replace the parameters
            optimizer = accelerator.prepare_optimizer(optimizer)
        """
        wrapped = prepare_optimizer(optimizer, self._context(), device_placement=device_placement)
        # `backward` knows the loss but no optimizer, so it takes the scaler from the window.
        window.scaler = wrapped.scaler
        self._register("optimizer", wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:  # noqa: ANN401 - anything with `step`
        """Prepare `scheduler` and return the scheduler to step.

        Example::

            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
            optimizer = accelerator.prepare_optimizer(optimizer)
            scheduler = accelerator.prepare_scheduler(scheduler)
        """
        wrapped = prepare_scheduler(scheduler, self._context(), self._optimizers)
        self._register("scheduler", wrapped)
        return wrapped

    def prepare_data_loader(
        self,
        data_loader: Any,  # noqa: ANN401 - a DataLoader
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:  # noqa: ANN401 - a loader
        """Prepare `data_loader` and return a loader of this rank's share of the data.

        `slice_fn_for_dispatch` cuts a rank's share out of a batch that rank 0 has read.

        Example::

            loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(8), batch_size=2))
            gather_object([batch.tolist() for batch in loader])  # [[0, 1], [4, 5], [2, 3], [6, 7]]
        """
        context = self._context()
        wrapped = prepare_loader(
            data_loader, context, device_placement=device_placement, slice_fn=slice_fn_for_dispatch
        )
        self._register("loader", wrapped)
        return wrapped

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - a loader
        """Return a loader that skips the first `num_batches` batches of this rank in every pass.

        Raises `InvalidArgument` for a negative number.

        Example::

            loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=2))
            rest = accelerator.skip_first_batches(loader, 1)
            gather_object([batch.tolist() for batch in rest])  # [[4, 5], [6, 7]]
        """
        from rankbook.runtime.data.loaders import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def protect(self, every: int | bool = 1) -> None:
        """Keep a snapshot of the training state in shared memory, from which `heal` restores a dead rank. All ranks.

        After every `every` optimizer steps each rank copies what it holds of all prepared models, optimizers,
        schedulers and loaders, of registered objects, and its random state, into memory that outlives its process.
        `protect(False)` ends it and frees the memory, which is twice the size of the state.

        Raises `InvalidArgument` for another number, outside of Rankbook's ranks, and, with the arithmetic,
        if there is too little shared memory.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.protect(every=10)
        """
        from rankbook.runtime import protection

        before, every = protection.interval(), int(every) if isinstance(every, bool) else every
        with self._raise_on_all("protect"):
            protection.check_interval(every)  # a mistake does not end a protection
        try:
            with self._raise_on_all("protect"):
                protection.protect(every)
        except BaseException as error:
            # All ranks are protected, or none is. If the cell ends on all of them, since a rank has died or the user
            # interrupts it, they stay protected as before: `heal` needs their snapshots.
            if every and before and isinstance(error, (CollectiveAborted, KeyboardInterrupt)):
                protection.set_interval(before)
            else:
                protection.end()
            raise

    def free_memory(self, *objects: Any) -> list[None]:  # noqa: ANN401 - anything
        """Release all prepared objects and `objects`, and empty the device's cache.

        Returns one None per object, to overwrite the caller's references: `a, b = accelerator.free_memory(a, b)`.

        Example::

            model, optimizer = accelerator.prepare(model, optimizer)
            model, optimizer = accelerator.free_memory(model, optimizer)
            model is None  # True
        """
        # Models that nobody holds any more may be kept by a reference cycle, and on some ranks only, which would then
        # wait for the others.
        collect_left_over()
        # A collective for sharded models: all ranks call it. Every model is whole again afterwards, if the user still
        # holds it. To gather a model that the caller gives up may take more memory than the device has.
        given_up = {id(prepared.unwrap_registered(item)) for item in objects if isinstance(item, nn.Module)}
        for model in self._models:
            strategy = prepared.strategy_of(model)
            if strategy is None or not strategy.shards or id(prepared.unwrap_registered(model)) not in given_up:
                release_model(model)
            del model  # it would keep the last one during the collection
        for references in self._references.values():
            references.clear()
        window.abort(self.gradient_state)
        cleared = release_memory(*objects)
        clear_device_cache(garbage_collection=True)
        return cleared

    def clear(self, *objects: Any) -> list[None]:  # noqa: ANN401 - anything
        """Alias of `free_memory`."""
        return self.free_memory(*objects)

    # Pickling: the replacement of a lost rank receives the Accelerator of a surviving rank. Objects of the process (the
    # shared states, the open files of trackers, the weak references) are not sent: they are created anew on the
    # receiving rank, with the sender's settings, and the models and optimizers that came along are registered there as
    # prepared.

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}
        shared = {name: getattr(self.state, name) for name in ("dynamo_plugin", "fsdp_plugin", "parallelism_config")}
        # Without a former wrapper of a model that was prepared again: it has no number, and DDP cannot pickle it.
        objects = {}
        for kind in self._references:
            items = self._registered(kind)
            numbered = zip(items, prepared.serials_of(kind, items), strict=True)
            objects[kind] = [item for item, serial in numbered if serial is not None]
        settings = (self.mixed_precision, dict(self.gradient_state.plugin_kwargs), shared)
        scale = self.scaler.state_dict() if self.scaler is not None else {}
        return {
            "own": attributes,
            "settings": settings,
            "scale": scale,
            "kept": objects,
            "known": prepared_objects(),
            "serials": {kind: prepared.serials_of(kind, items) for kind, items in objects.items()},
            "custom_serials": prepared.serials_of("custom", self._custom_objects),
            "trackers": [
                *self._received_trackers,
                *(
                    (tracker.name, tracker.main_process_only, tracker if getattr(tracker, "_appends", False) else None)
                    for tracker in self.trackers
                ),
            ],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        precision, accumulation, shared = state["settings"]
        # `_arrived`: the `AcceleratorState` in the same pickle was unpickled before this and has created the shared
        # state. So it counts as fresh.
        shared_here = AcceleratorState._shared_state
        fresh = not shared_here or shared_here.pop("_arrived", False)
        self.__dict__.update(state["own"], trackers=[], _received_trackers=state["trackers"])
        self.state = AcceleratorState(mixed_precision=precision)
        for name, value in shared.items():
            setattr(self.state, name, value)
        self.gradient_state = GradientState()
        self.gradient_state.plugin_kwargs.update(accumulation)
        self._references = {kind: [] for kind in state["kept"]}
        context = self._context()
        if fresh and context.scaler is not None and state["scale"]:
            context.scaler.load_state_dict(state["scale"])  # averaged gradients need the same loss scale on all ranks
        models, optimizers = state["known"]
        # Models first: the optimizers below look up the replacements of their parameters.
        for model in (*models, *state["kept"]["model"]):
            register_received_model(model, context)
        for optimizer in (*optimizers, *state["kept"]["optimizer"]):
            window.scaler = prepare_optimizer(optimizer, context, device_placement=False).scaler
        # Register all objects in the sender's order, which determines their names in checkpoints.
        for kind, objects in state["kept"].items():
            for item, serial in zip(objects, state["serials"][kind], strict=True):
                self._register(kind, item, serial)
        for item, serial in zip(self._custom_objects, state["custom_serials"], strict=True):
            prepared.note_registered("custom", item, serial)
        # A replacement rank starts as the survivors do.
        if fresh:
            restart_accumulation()

    def _context(self) -> PrepareContext:
        setup = self.setup
        return PrepareContext(
            setup=setup,
            strategy=self.strategy,
            precision=self.mixed_precision,
            dynamo=self.dynamo_plugin,
            scaler=self.scaler,
            move_models=self.device_placement,
            move_batches=self.device_placement,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            steps_times_num_processes=self.scheduler_steps_times_num_processes,
            loader_options=self.dataloader_config,
            rng_types=self.rng_types,
            before_step=window.rescale_gradients,
        )


for _part in (AcceleratorSettings, TrainingMethods, CollectiveMethods, SavingMethods, TrackingMethods):
    for _name, _method in vars(_part).items():
        if inspect.isfunction(_method):
            _method.__qualname__ = f"{Accelerator.__name__}.{_name}"  # the name in Python's errors about arguments

install()
