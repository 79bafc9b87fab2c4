"""The `Accelerator`: one object that makes a training script for one device run on many.

Owns: `prepare` and its kin, and what a person lets go. Refuses: everything the classes it is made of do.

Metrics sent to trackers, as methods of the `Accelerator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rankbook.errors import BadRequest
from rankbook.runtime import prepare, recovery
from rankbook.runtime.comm.methods import CollectiveMethods
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.memory import clear_device_cache, release_memory
from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from rankbook.runtime.prepare import (
    adopt_model,
    prepare_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
    release_model,
)
from rankbook.runtime.prepared import PrepareContext
from rankbook.runtime.saving.methods import SavingMethods
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.state import AcceleratorState
from rankbook.runtime.trackers import GeneralTracker, make_tracker
from rankbook.runtime.training import TrainingMethods


class TrackingMethods(AcceleratorSettings):
    """See `Accelerator`."""

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start every tracker of `log_with` for a run called `project_name`; earlier ones end first.

        `config` are the run's settings. `init_kwargs` maps a tracker's name to what it is made with.
        """
        self.end_training()
        for each in self.log_with:
            options = (init_kwargs or {}).get(each if isinstance(each, str) else each.name, {})
            tracker = make_tracker(each, project_name, self.logging_dir, **options)
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: ANN401 - a tracker, or its own object
        """The tracker that is called `name`; on ranks without one, a tracker that does nothing.

        Raises `BadRequest` for a name that none of `log_with` has.
        """
        for each in self.trackers:
            if each.name == name:
                return each.tracker if unwrap else each
        known = [each if isinstance(each, str) else each.name for each in self.log_with]
        if name in known and not self.is_main_process:
            return GeneralTracker(_blank=True)
        raise BadRequest(f"no tracker {name!r} runs; init_trackers starts {known or 'those that log_with names'}")

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Send `values` to every tracker. `log_kwargs` maps a tracker's name to further arguments."""
        for each in self.trackers:
            each.log(values, step=step, **(log_kwargs or {}).get(each.name, {}))

    def end_training(self) -> None:
        """End every tracker."""
        while self.trackers:
            self.trackers.pop().finish()


_HERE_ONLY = {"state", "gradient_state", "_references", "trackers"}


class Accelerator(TrainingMethods, CollectiveMethods, SavingMethods, TrackingMethods):
    """Prepares models, optimizers, loaders and schedulers for the ranks there are, and trains with them.

    A second `Accelerator()` keeps the settings that all in this process share; one with other settings changes them,
    live. What was prepared before keeps its own until it is prepared again.

    `device_placement`: models and batches go to the rank's device. `mixed_precision`: "no", "fp16" or "bf16".
    `gradient_accumulation_steps` or `gradient_accumulation_plugin`: batches to a step. `fsdp_plugin` shards models;
    `parallelism_config` divides the ranks; `ParallelismConfig(dp_replicate_size=world_size)` alone goes back to whole
    copies. `step_scheduler_with_optimizer`: schedulers step once per optimizer step;
    `scheduler_steps_times_num_processes` has them step once per rank each time instead. `kwargs_handlers`: at most one
    of a class. `dynamo_backend` or `dynamo_plugin`: models are compiled. `rng_types`: whose states the ranks share as a
    loop begins. `log_with`, `project_dir`, `project_config`: trackers and where files go.

    Raises `BadRequest` for what makes no sense here; nothing has changed then.
    """

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:  # noqa: ANN401 - what was given
        """Each of `args` made ready for the ranks, in order; one alone comes back bare. A collective.

        Models come first, then optimizers, which follow their parameters, loaders, and schedulers; anything else passes
        through. `device_placement`: for each argument, whether it is placed. Raises `BadRequest` on every rank, before
        anything is touched.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise prepare.misplaced(len(device_placement), len(args))
        return prepare.prepare_all(self, self._context(), args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model to call from now on.

        `evaluation_mode`: placed and in mixed precision, and not spread. A collective.
        """
        wrapped = prepare_model(model, self._context(), place=device_placement, evaluation=evaluation_mode)
        self._keep("model", wrapped)
        return wrapped

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer to step from now on."""
        wrapped = prepare_optimizer(optimizer, self._context(), place=device_placement)
        window.scaler = wrapped.scaler
        self._keep("optimizer", wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:  # noqa: ANN401 - anything with `step`
        """The scheduler to step from now on."""
        wrapped = prepare_scheduler(scheduler, self._context(), self._optimizers)
        self._keep("scheduler", wrapped)
        return wrapped

    def prepare_data_loader(
        self,
        data_loader: Any,  # noqa: ANN401 - a DataLoader
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:  # noqa: ANN401 - a loader
        """The loader that gives this rank its share."""
        context = self._context()
        wrapped = prepare_loader(data_loader, context, place=device_placement, slice_fn=slice_fn_for_dispatch)
        self._keep("loader", wrapped)
        return wrapped

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - a loader
        """A loader that begins `num_batches` later."""
        from rankbook.runtime.data.loaders import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:  # noqa: ANN401 - anything
        """Let go of all that was prepared here, and of what is given: `a, b = accelerator.free_memory(a, b)`."""
        for each in self._models:
            release_model(each)
        for kept in self._references.values():
            kept.clear()
        window.abandon(self.gradient_state)
        cleared = release_memory(*objects)
        clear_device_cache(garbage_collection=True)
        return cleared

    def clear(self, *objects: Any) -> list[None]:  # noqa: ANN401 - anything
        """As `free_memory`."""
        return self.free_memory(*objects)

    # On a rank that takes a lost one's place

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in _HERE_ONLY}
        shared = {name: getattr(self.state, name) for name in ("dynamo_plugin", "fsdp_plugin", "parallelism_config")}
        kept = {kind: self._kept(kind) for kind in self._references}
        settings = (self.mixed_precision, dict(self.gradient_state.plugin_kwargs), shared)
        scale = self.scaler.state_dict() if self.scaler is not None else {}
        return {"own": own, "settings": settings, "scale": scale, "kept": kept, "known": recovery.prepared_objects()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        precision, accumulation, shared = state["settings"]
        shared_here = AcceleratorState._shared_state
        fresh = not shared_here or shared_here.pop("_arrived", False)
        self.__dict__.update(state["own"], trackers=[])
        self.state = AcceleratorState(mixed_precision=precision)
        for name, value in shared.items():
            setattr(self.state, name, value)
        self.gradient_state = GradientState()
        self.gradient_state.plugin_kwargs.update(accumulation)
        self._references = {kind: [] for kind in state["kept"]}
        context = self._context()
        if fresh and context.scaler is not None and state["scale"]:
            context.scaler.load_state_dict(state["scale"])  # gradients that are averaged have one scale
        models, optimizers = state["known"]
        for model in (*models, *state["kept"]["model"]):
            adopt_model(model, context)
        for optimizer in (*optimizers, *state["kept"]["optimizer"]):
            window.scaler = prepare_optimizer(optimizer, context, place=False).scaler
        for kind, things in state["kept"].items():
            for each in things:
                self._keep(kind, each)
        if fresh:  # a new rank among others: they begin with an agreement, so it does too
            recovery.restart_accumulation()

    def _context(self) -> PrepareContext:
        setup = self.setup
        return PrepareContext(
            setup=setup,
            strategy=self.strategy,
            precision=self.mixed_precision,
            dynamo=self.dynamo_plugin,
            scaler=self.scaler,
            place_models=self.device_placement,
            place_batches=self.device_placement,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            steps_times_num_processes=self.scheduler_steps_times_num_processes,
            loader_options=self.dataloader_config,
            rng_types=self.rng_types,
            before_step=window.settle,
        )


recovery.install()
