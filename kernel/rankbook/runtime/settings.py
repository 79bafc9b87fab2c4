"""Constructor and readable settings of the `Accelerator`.

The constructor validates all arguments before it changes shared state. It also selects the strategy (DDP, FSDP2, tensor
parallelism) that fits the setup.

Mixed precision is a setting: autocast, the gradient scaler of fp16, and the forward of a prepared model. The dtypes of
parameters are not changed.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Never

import torch
from torch import nn

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Handlers,
    KwargsHandler,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
    unknown_keyword,
)
from rankbook.runtime.data.rng import check_rng_types
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.optimizer import LayoutGradScaler, restart_scaler
from rankbook.runtime.prepared import note_registered, registered, unwrap_registered
from rankbook.runtime.process_state import DistributedType, PartialState
from rankbook.runtime.state import AcceleratorState
from rankbook.runtime.strategies.base import DataParallel, SingleDevice, Strategy, StrategySetup
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel, TensorParallel
from rankbook.runtime.trackers import Tracker, filter_trackers
from rankbook.runtime.tree import rebuild

_log = logging.getLogger(__name__)

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


def _warn_of_emulation(precision: str, device: torch.device) -> None:
    # A T4, for example, computes in bf16, but slower than in fp32.
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        _log.warning("%s only emulates bf16, which is slow; use mixed_precision='fp16'", device)


def autocast(precision: str, device: torch.device, handler: AutocastKwargs) -> AbstractContextManager[Any]:
    """Return the autocast context for `precision`; a null context for "no"."""
    kind = PRECISIONS[precision]
    if kind is None:
        return nullcontext()
    # `enabled=False` switches off an autocast around it, as that of a prepared model's forward.
    return torch.autocast(device.type, dtype=kind, enabled=handler.enabled, cache_enabled=handler.cache_enabled)


def make_scaler(precision: str, device: torch.device, handler: GradScalerKwargs) -> torch.amp.GradScaler | None:
    """Return the gradient scaler for fp16, None for other precisions."""
    # fp16 has a small range: small gradients would become zero. The scaler multiplies the loss before backward and
    # divides the gradients before the step. bf16 has the range of fp32 and needs none.
    return LayoutGradScaler(device.type, **handler.to_dict()) if precision == "fp16" else None


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
    if isinstance(value, Mapping) and not isinstance(value, dict):
        converted = {key: in_fp32(item) for key, item in value.items()}
        # Not if nothing has changed: the constructor of a mapping may do anything.
        return rebuild(value, converted) if any(converted[key] is not item for key, item in value.items()) else value
    return value


class MixedForward:
    """Replacement of a prepared model's `forward`: run the original under autocast, return fp32 outputs.

    It is an object rather than a closure, so that a copied or unpickled model has one that runs the copy.
    """

    def __init__(self, module: nn.Module, kind: torch.dtype, device: torch.device, cache: bool | None) -> None:
        self.original: Callable[..., Any] = module.forward
        self.__wrapped__ = self.original
        """For the signature, by which `generate` of Transformers knows what the model accepts."""
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


_UNSUPPORTED = {
    "deepspeed_plugin": "use fsdp_plugin=FullyShardedDataParallelPlugin(), which shards all states",
    "torch_tp_plugin": "use parallelism_config=ParallelismConfig(tp_size=...)",
    "megatron_lm_plugin": "use parallelism_config=ParallelismConfig(tp_size=..., dp_shard_size=...)",
    "deepspeed_plugins": "use fsdp_plugin=FullyShardedDataParallelPlugin(), which shards all states",
}
"""Parameters of Accelerate's constructor that are not supported, and their replacements."""


class _HandlerAttribute:
    """Attribute for one of the `handlers`, which can be set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = name.removesuffix("_handler")

    # Without an instance it is asked for by documentation tools, which expect the descriptor.
    def __get__(self, settings: AcceleratorSettings | None, owner: type | None = None) -> Any:  # noqa: ANN401 - a handler
        return self if settings is None else getattr(settings.handlers, self._field)

    def __set__(self, settings: AcceleratorSettings, handler: KwargsHandler) -> None:
        Handlers.of([handler])  # raises for an object that is no handler
        setattr(settings.handlers, self._field, handler)


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
        deepspeed_plugin: None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None,
        rng_types: Sequence[str] | None = None,
        log_with: str | Tracker | Sequence[str | Tracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_steps_times_num_processes: bool = False,
        **unknown: Never,
    ) -> None:
        # `Never` makes type checkers report unknown keywords. At run time they get an error that names the right one.
        # Validate everything before shared state changes.
        for name in unknown:
            raise unknown_keyword("Accelerator", name, inspect.signature(AcceleratorSettings).parameters)
        unsupported = (deepspeed_plugin, torch_tp_plugin, megatron_lm_plugin, deepspeed_plugins)
        for (name, replacement), value in zip(_UNSUPPORTED.items(), unsupported, strict=True):
            if value is not None:
                raise InvalidArgument(f"{name} is not supported: {replacement}")
        self.handlers = Handlers.of(kwargs_handlers)
        self.project_configuration = _project(project_dir, project_config)
        self.dataloader_config = _loader_options(split_batches, dataloader_config)
        self.rng_types = ["generator"] if rng_types is None else check_rng_types(rng_types)
        if dynamo_backend is not None and dynamo_plugin is not None:
            raise InvalidArgument("pass dynamo_backend or dynamo_plugin, not both")
        dynamo = TorchDynamoPlugin(backend=dynamo_backend) if dynamo_backend is not None else dynamo_plugin
        # Without arguments the backend may come from the environment.
        (dynamo or TorchDynamoPlugin()).check()
        accumulation = _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.log_with = filter_trackers(log_with, self.logging_dir)
        _check_types(fsdp_plugin, parallelism_config)

        # Creating the process group is the first change that others see. If a later check fails, a group that this
        # constructor has created is destroyed again, so that the corrected cell can be run.
        was_there = PartialState._shared_state != {}
        # None stands for "not given", for which `PartialState` has defaults from the environment.
        options = {name: value for name, value in self.handlers.init.to_dict().items() if value is not None}
        try:
            process = PartialState(cpu, **options)
            device = torch.device("cpu") if cpu else process.device
            if mixed_precision is not None:
                check_precision(str(mixed_precision).lower(), device)
            if parallelism_config is not None:
                parallelism_config.check(process.num_processes)
            self.state = AcceleratorState(mixed_precision=mixed_precision, cpu=cpu, dynamo_plugin=dynamo)
            # The precision may also come from the environment or from an earlier instance.
            check_precision(self.state.mixed_precision, self.state.device)
            _warn_of_emulation(self.state.mixed_precision, self.state.device)
        except BaseException:
            if not was_there and PartialState._shared_state:
                PartialState().destroy_process_group()
                AcceleratorState._reset_state(reset_partial_state=True)
            raise
        # The two settings belong together: giving one of them replaces both. So
        # `ParallelismConfig(dp_replicate_size=...)` ends the sharding of an earlier Accelerator.
        if fsdp_plugin is not None or parallelism_config is not None:
            if fsdp_plugin is None and parallelism_config is not None and parallelism_config.sizes["dp_shard"] > 1:
                fsdp_plugin = FullyShardedDataParallelPlugin()
            self.state.fsdp_plugin, self.state.parallelism_config = fsdp_plugin, parallelism_config
        self.gradient_state = GradientState(accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps_times_num_processes = scheduler_steps_times_num_processes
        self.trackers: list[Tracker] = []
        # Those of the process that this object was copied from: name, `main_process_only`, and the tracker itself if it
        # can go on here.
        self._received_trackers: list[tuple[str, bool, Tracker | None]] = []
        # Weak: a notebook runs the same cells repeatedly, and old models have to be freed although the Accelerator
        # lives on.
        self._references: dict[str, list[weakref.ref[Any]]] = {
            "model": [],
            "optimizer": [],
            "scheduler": [],
            "loader": [],
        }
        # Strong, unlike those above: a registered object may be held by nothing else.
        self._custom_objects: list[Any] = []
        # By the ids of their handles, in the order of registration, in which they are called.
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._triggered = False
        # In Hugging Face Accelerate every instance has a scaler of its own. Here it is shared, and starts anew where
        # the precision or its settings are given, so that a training can be run again whose gradients were NaN until
        # the scale was 0.
        if mixed_precision is not None or any(type(handler) is GradScalerKwargs for handler in kwargs_handlers or ()):
            self._restart_scaler()

    ddp_handler = _HandlerAttribute()
    scaler_handler = _HandlerAttribute()
    init_handler = _HandlerAttribute()
    autocast_handler = _HandlerAttribute()
    profile_handler = _HandlerAttribute()

    # Strategy

    @property
    def setup(self) -> StrategySetup:
        """Return the current settings that determine the strategy."""
        # Made anew for every use: another `Accelerator` may have changed the shared settings.
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
        # One scaler for the process: all losses of a step have to be scaled alike.
        shared = AcceleratorState._shared_state
        if shared.get("_scaler") is None:
            shared["_scaler"] = make_scaler("fp16", self.device, self.handlers.scaler)
        scaler: torch.amp.GradScaler = shared["_scaler"]
        return scaler

    def _restart_scaler(self) -> None:
        scaler = AcceleratorState._shared_state.get("_scaler")
        fresh = make_scaler(self.mixed_precision, self.device, self.handlers.scaler)
        if scaler is None or fresh is None:
            return
        if scaler.is_enabled() and fresh.is_enabled():
            restart_scaler(scaler, fresh)
        else:  # as with another precision: what is prepared already keeps the old one until it is prepared again
            AcceleratorState._shared_state["_scaler"] = fresh

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """Return the settings of `torch.compile`."""
        return self.state.dynamo_plugin or TorchDynamoPlugin()

    # Prepared objects, as weak references

    def _register(self, kind: str, item: object, serial: int | None = None) -> None:
        def identity(known: object) -> object:
            return unwrap_registered(known) if isinstance(known, nn.Module) else known

        # Prepared again, an object keeps its place, also a model that gets another wrapper. The order determines the
        # names in a checkpoint ("model", "model_1").
        references = self._references[kind]
        kept = [(reference, alive) for reference in references if (alive := reference()) is not None]
        places = [place for place, (_, alive) in enumerate(kept) if identity(alive) is identity(item)]
        references[:] = [reference for reference, _ in kept]
        if places:
            references[places[0]] = weakref.ref(item)
        else:
            references.append(weakref.ref(item))
        note_registered(kind, item, serial)

    def _registered(self, kind: str) -> list[Any]:
        return [referent for reference in self._references[kind] if (referent := reference()) is not None]

    @property
    def _models(self) -> list[Any]:
        return self._registered("model")

    @property
    def _optimizers(self) -> list[Any]:
        return self._registered("optimizer")

    @property
    def _schedulers(self) -> list[Any]:
        return self._registered("scheduler")

    @property
    def _dataloaders(self) -> list[Any]:
        return self._registered("loader")

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
        config: ParallelismConfig | None = self.state.parallelism_config
        return config

    @property
    def should_save_model(self) -> bool:
        """Return True if this rank writes files that are not sharded, see `ProjectConfiguration.save_on_each_node`."""
        return self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process

    @property
    def native_amp(self) -> bool:
        """Return True if forward passes run under autocast."""
        return self.mixed_precision != "no"

    @property
    def sync_gradients(self) -> bool:
        """Return True if the current batch ends its accumulation window.

        The property can be set, as the next `accumulate` does.
        """
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state._set_sync_gradients(value)

    @property
    def step(self) -> int:
        """Return the number of batches in `accumulate` since the start or the last end of a loader."""
        return window.step

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of batches per accumulation window.

        The property can be set; all instances in the process share it.
        """
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradientAccumulationPlugin(num_steps=value)  # raises unless value is an integer >= 1
        # In place, since all instances share the dict.
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
        return any(optimizer.step_was_skipped for optimizer in registered("optimizer").values())


def _project(folder: str | os.PathLike[str] | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    # The user's own object, not a copy: it counts the checkpoints of this project.
    project = config if config is not None else ProjectConfiguration()
    if folder is not None and project.project_dir is None:
        project.set_directories(os.fspath(folder))
    return project


def _loader_options(split_batches: bool | None, config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    if split_batches is not None and config is not None and bool(config.split_batches) != split_batches:
        raise InvalidArgument(
            f"split_batches={split_batches} differs from dataloader_config.split_batches={config.split_batches}"
        )
    return config if config is not None else DataLoaderConfiguration(split_batches=bool(split_batches))


def _accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin | None:
    """Return the new accumulation settings.

    None keeps the shared settings, as a second `Accelerator()` without arguments does.
    """
    if plugin is not None:
        if steps is not None and steps != 1:
            raise InvalidArgument("pass gradient_accumulation_steps or gradient_accumulation_plugin, not both")
        return plugin
    return GradientAccumulationPlugin(num_steps=steps) if steps is not None else None


def _check_types(fsdp: object, parallelism: object) -> None:
    if fsdp is not None and not isinstance(fsdp, FullyShardedDataParallelPlugin):
        raise InvalidArgument(f"fsdp_plugin must be a FullyShardedDataParallelPlugin, got {type(fsdp).__name__}")
    if parallelism is not None and not isinstance(parallelism, ParallelismConfig):
        raise InvalidArgument(f"parallelism_config must be a ParallelismConfig, got {type(parallelism).__name__}")


# Their conditions exclude each other, so the order has no effect.
STRATEGIES: list[type[Strategy]] = [SingleDevice, DataParallel, FullyShardedDataParallel, TensorParallel]


def make_strategy(setup: StrategySetup) -> Strategy:
    """Return the first strategy that fits `setup`.

    Raises `InvalidArgument` with the arithmetic if the mesh does not fit the world size.
    """
    if setup.parallelism is not None:
        setup.parallelism.check(setup.num_processes)
    for kind in STRATEGIES:
        if kind.fits(setup):
            return kind(setup)
    raise InvalidArgument(f"no strategy supports {setup}")
