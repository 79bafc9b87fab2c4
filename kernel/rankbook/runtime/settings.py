"""Constructor and readable settings of the `Accelerator`.

The constructor validates all arguments before it changes shared state. It also selects the strategy (DDP, FSDP2, tensor
parallelism) that fits the setup.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankbook.errors import BadRequest
from rankbook.runtime.config import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Handlers,
    KwargsHandler,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from rankbook.runtime.gradient_state import GradientState
from rankbook.runtime.precision import check_precision, make_scaler
from rankbook.runtime.process_state import DistributedType, PartialState
from rankbook.runtime.state import AcceleratorState
from rankbook.runtime.strategies.base import SingleDevice, Strategy, StrategySetup
from rankbook.runtime.strategies.ddp import DataParallel
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel
from rankbook.runtime.strategies.tensor_parallel import TensorParallel
from rankbook.runtime.trackers import Tracker, filter_trackers

_RNG_TYPES = {"torch", "cuda", "generator", "xpu", "mps", "npu", "mlu", "musa", "xla", "hpu", "sdaa", "neuron"}


class AcceleratorSettings:
    """Constructor and settings of the `Accelerator`, where the arguments are described."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: str | Tracker | Sequence[str | Tracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_steps_times_num_processes: bool = False,
    ) -> None:
        # Validate everything before shared state changes.
        self.handlers = Handlers.of(kwargs_handlers)
        self.project_configuration = _project(project_dir, project_config)
        self.dataloader_config = _loader_options(split_batches, dataloader_config)
        self.rng_types = _rng_types(rng_types)
        if dynamo_backend is not None and dynamo_plugin is not None:
            raise BadRequest("give dynamo_backend or dynamo_plugin, not both")
        dynamo = TorchDynamoPlugin(backend=dynamo_backend) if dynamo_backend is not None else dynamo_plugin
        accumulation = _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.log_with = filter_trackers(log_with, self.logging_dir)
        _check_types(fsdp_plugin, parallelism_config)

        was_there = PartialState._shared_state != {}
        options = {name: value for name, value in self.handlers.init.to_dict().items() if value is not None}
        try:
            process = PartialState(cpu, **options)
            device = torch.device("cpu") if cpu else process.device
            if mixed_precision is not None:
                check_precision(str(mixed_precision).lower(), device)
            if parallelism_config is not None:
                parallelism_config.check(process.num_processes)
            self.state = AcceleratorState(mixed_precision=mixed_precision, cpu=cpu, dynamo_plugin=dynamo)
            check_precision(self.state.mixed_precision, self.state.device)
        except BaseException:
            if not was_there and PartialState._shared_state:
                PartialState().destroy_process_group()
                AcceleratorState._reset_state(reset_partial_state=True)
            raise
        if fsdp_plugin is not None or parallelism_config is not None:
            if fsdp_plugin is None and parallelism_config is not None and parallelism_config.sizes["dp_shard"] > 1:
                fsdp_plugin = FullyShardedDataParallelPlugin()
            self.state.fsdp_plugin, self.state.parallelism_config = fsdp_plugin, parallelism_config
        self.gradient_state = GradientState(accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps_times_num_processes = scheduler_steps_times_num_processes
        self.trackers: list[Tracker] = []
        self._references: dict[str, list[weakref.ref[Any]]] = {
            "model": [],
            "optimizer": [],
            "scheduler": [],
            "loader": [],
        }
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._triggered = False

    # Strategy

    @property
    def setup(self) -> StrategySetup:
        """Return the current settings that determine the strategy."""
        return StrategySetup(
            device=self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            fsdp=self.state.fsdp_plugin,
            parallelism=self.state.parallelism_config,
            handlers=self.handlers,
        )

    @property
    def strategy(self) -> Strategy:
        """Return the strategy that distributes the next model to be prepared."""
        return make_strategy(self.setup)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the gradient scaler for fp16, which all instances share; None for other precisions."""
        if self.mixed_precision != "fp16":
            return None
        shared = AcceleratorState._shared_state
        if shared.get("_scaler") is None:
            shared["_scaler"] = make_scaler("fp16", self.device, self.handlers.scaler)
        found: torch.amp.GradScaler = shared["_scaler"]
        return found

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """Return the settings of `torch.compile`."""
        return self.state.dynamo_plugin or TorchDynamoPlugin()

    # Prepared objects, as weak references

    def _keep(self, kind: str, thing: object) -> None:
        references = self._references[kind]
        references[:] = [
            reference for reference in references if (alive := reference()) is not None and alive is not thing
        ]
        references.append(weakref.ref(thing))

    def _kept(self, kind: str) -> list[Any]:
        return [referent for reference in self._references[kind] if (referent := reference()) is not None]

    @property
    def _models(self) -> list[Any]:
        return self._kept("model")

    @property
    def _optimizers(self) -> list[Any]:
        return self._kept("optimizer")

    @property
    def _schedulers(self) -> list[Any]:
        return self._kept("scheduler")

    @property
    def _dataloaders(self) -> list[Any]:
        return self._kept("loader")

    # Settings

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """Return the kind of distributed setup."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Return the world size."""
        return int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """Return the rank of this process."""
        return int(self.state.process_index)

    @property
    def local_process_index(self) -> int:
        """Return the local rank, that is the index on this host."""
        return int(self.state.local_process_index)

    @property
    def is_main_process(self) -> bool:
        """Return True on rank 0."""
        return bool(self.state.is_main_process)

    @property
    def is_local_main_process(self) -> bool:
        """Return True on the first process of its host."""
        return bool(self.state.is_local_main_process)

    @property
    def is_last_process(self) -> bool:
        """Return True on the last rank."""
        return bool(self.state.is_last_process)

    @property
    def use_distributed(self) -> bool:
        """Return True if there is more than one rank."""
        return bool(self.state.use_distributed)

    @property
    def multi_device(self) -> bool:
        """Return True if there is more than one rank."""
        return self.use_distributed

    @property
    def mixed_precision(self) -> str:
        """Return the precision of objects that are prepared next: "no", "fp16" or "bf16"."""
        return self.state.mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Return True if models are sharded with `fully_shard`."""
        return self.strategy.shards

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Return the mesh of the ranks, None if it was not configured."""
        found: ParallelismConfig | None = self.state.parallelism_config
        return found

    @property
    def sync_gradients(self) -> bool:
        """Return True if the current batch ends its accumulation window."""
        return self.gradient_state.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of batches per accumulation window.

        The property can be set; all instances in the process share it.
        """
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradientAccumulationPlugin(num_steps=value)  # raises unless value is an integer >= 1
        self.gradient_state.plugin_kwargs.update(num_steps=value)

    @property
    def split_batches(self) -> bool:
        """Return `DataLoaderConfiguration.split_batches`."""
        return bool(self.dataloader_config.split_batches)

    @property
    def dispatch_batches(self) -> bool | None:
        """Return `DataLoaderConfiguration.dispatch_batches`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Return `DataLoaderConfiguration.even_batches`. The property can be set."""
        return bool(self.dataloader_config.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Return `DataLoaderConfiguration.use_seedable_sampler`."""
        return bool(self.dataloader_config.use_seedable_sampler)

    @property
    def non_blocking(self) -> bool:
        """Return `DataLoaderConfiguration.non_blocking`."""
        return bool(self.dataloader_config.non_blocking)

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return `DataLoaderConfiguration.use_stateful_dataloader`."""
        return bool(self.dataloader_config.use_stateful_dataloader)

    @property
    def project_dir(self) -> str | None:
        """Return the directory of the project's files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Return the directory of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Return the number of the next numbered checkpoint."""
        return self.project_configuration.iteration

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return True if an optimizer skipped its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)


def _project(folder: str | os.PathLike[str] | None, given: ProjectConfiguration | None) -> ProjectConfiguration:
    made = given if given is not None else ProjectConfiguration()
    if folder is not None and made.project_dir is None:
        made.set_directories(os.fspath(folder))
    return made


def _loader_options(split_batches: bool | None, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    if split_batches is not None and given is not None and bool(given.split_batches) != split_batches:
        raise BadRequest(f"split_batches={split_batches} and dataloader_config.split_batches={given.split_batches}")
    return given if given is not None else DataLoaderConfiguration(split_batches=bool(split_batches))


def _rng_types(given: Sequence[str] | None) -> list[str]:
    chosen = ["generator"] if given is None else [str(getattr(rng_type, "value", rng_type)) for rng_type in given]
    unknown = sorted(set(chosen) - _RNG_TYPES)
    if unknown:
        raise BadRequest(f"rng_types has {', '.join(map(repr, unknown))}: 'torch', 'cuda' and 'generator' are known")
    return chosen


def _accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin | None:
    """Return the new accumulation settings.

    None keeps the shared settings, as a second `Accelerator()` without arguments does.
    """
    if plugin is not None:
        if steps is not None and steps != 1:
            raise BadRequest("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
        return plugin
    return GradientAccumulationPlugin(num_steps=steps) if steps is not None else None


def _check_types(fsdp: object, parallelism: object) -> None:
    if fsdp is not None and not isinstance(fsdp, FullyShardedDataParallelPlugin):
        raise BadRequest(f"fsdp_plugin is a {type(fsdp).__name__}; give a FullyShardedDataParallelPlugin")
    if parallelism is not None and not isinstance(parallelism, ParallelismConfig):
        raise BadRequest(f"parallelism_config is a {type(parallelism).__name__}; give a ParallelismConfig")


STRATEGIES: list[type[Strategy]] = [SingleDevice, DataParallel, FullyShardedDataParallel, TensorParallel]


def make_strategy(setup: StrategySetup) -> Strategy:
    """Return the first strategy that fits `setup`.

    Raises `BadRequest` with the arithmetic if the mesh does not fit the world size.
    """
    if setup.parallelism is not None:
        setup.parallelism.check(setup.num_processes)
    for kind in STRATEGIES:
        if kind.fits(setup):
            return kind(setup)
    raise BadRequest(f"no strategy fits {setup}")
