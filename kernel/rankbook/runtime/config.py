"""Configuration objects of the runtime: plugins and handlers, loader options, and the mesh of the ranks.

They validate their fields and are applied by other modules. torch's distributed modules are imported only when needed.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from rankbook.errors import InvalidArgument, UnknownKeyword
from rankbook.formatting import suggest
from rankbook.runtime.launch_environment import read_flag, read_text

_Class = TypeVar("_Class")


def _suggest_keywords(kind: type[_Class]) -> type[_Class]:
    """Make a dataclass raise `UnknownKeyword`, with the field that was probably meant, for an unknown keyword."""
    construct = kind.__init__
    names = [option.name for option in fields(kind) if option.init]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def check(self: _Class, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the fields' types
        if (unknown := next((name for name in kwargs if name not in names), None)) is not None:
            raise unknown_keyword(kind.__name__, unknown, names)
        construct(self, *args, **kwargs)

    kind.__init__ = check  # type: ignore[method-assign, assignment]
    return kind


class KwargsHandler:
    """Base class of handlers: dataclasses that hold keyword arguments of a torch class or function."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose value differs from the default."""
        # torch's own default applies to the others. An option that a version of torch lacks fails only if it is used.
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)  # type: ignore[arg-type]
            if getattr(self, option.name) != _default_of(option)
        }


def _default_of(option: Any) -> Any:  # noqa: ANN401 - a dataclass field and its default
    return option.default_factory() if option.default_factory is not MISSING else option.default


@_suggest_keywords
@dataclass
class AutocastKwargs(KwargsHandler):
    """Keyword arguments of `torch.autocast`. `cache_enabled` None selects torch's default.

    Example::

        accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
    """

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(StrEnum):
    """Compression of gradients under DDP: none, half precision, or low-rank matrices (PowerSGD).

    `BATCHED_POWER_SGD` is a member because Accelerate has it; `DistributedDataParallelKwargs` refuses it.
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@_suggest_keywords
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Keyword arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    Args:
        comm_hook: a `DDPCommunicationHookType` or its value: "no", "fp16", "bf16" or "power_sgd".
        comm_wrapper: "fp16" or "bf16" sends the hook's tensors in that dtype.
        comm_state_option: keyword arguments of torch's `PowerSGDState`.

    The other fields are described by torch. Raises `InvalidArgument` for an unknown hook or a contradictory
    combination.

    Example::

        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[options])
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str = "no"
    comm_wrapper: str = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before the check of the choices, which leaves it out.
        if str(getattr(self.comm_hook, "value", self.comm_hook)).lower() == DDPCommunicationHookType.BATCHED_POWER_SGD:
            raise InvalidArgument(
                "comm_hook='batched_power_sgd' is not supported: torch's hook raises in its first step (torch 2.13); "
                "use 'power_sgd', which batches tensors of the same shape with "
                'comm_state_option={"batch_tensors_with_same_shape": True}'
            )
        hooks = [hook.value for hook in DDPCommunicationHookType if hook != DDPCommunicationHookType.BATCHED_POWER_SGD]
        self.comm_hook = _check_choice("comm_hook", self.comm_hook, hooks)
        self.comm_wrapper = _check_choice("comm_wrapper", self.comm_wrapper, ["no", "fp16", "bf16"])
        if self.comm_wrapper != "no" and self.comm_hook == "no":
            raise InvalidArgument(
                f"comm_wrapper={self.comm_wrapper!r} requires a comm_hook, got comm_hook={self.comm_hook!r}"
            )
        if self.comm_state_option and self.comm_hook != "power_sgd":
            raise InvalidArgument(f"comm_state_option requires comm_hook='power_sgd', got comm_hook={self.comm_hook!r}")


def _check_choice(name: str, choice: object, choices: list[str]) -> str:
    # Also a member of Accelerate's enum, and a value in capital letters.
    value = str(getattr(choice, "value", choice)).lower()
    if value not in choices:
        raise InvalidArgument(f"unknown {name} {choice!r}; choose from {', '.join(choices)}")
    return value


@_suggest_keywords
@dataclass
class GradScalerKwargs(KwargsHandler):
    """Keyword arguments of `torch.amp.GradScaler`, which fp16 uses.

    Example::

        accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@_suggest_keywords
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Keyword arguments of `torch.distributed.init_process_group`.

    If a process group exists already, as on the ranks of a cluster, `timeout` is set for it, also when its connections
    are made anew. The others have no effect then, and a warning says so.

    Example::

        options = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@_suggest_keywords
@dataclass
class ProfileKwargs(KwargsHandler):
    """Keyword arguments of `torch.profiler.profile`.

    Args:
        activities: names of profiler activities ("cpu", "cuda"); by default all that the machine supports.
        schedule_option: keyword arguments of `torch.profiler.schedule`.
        output_trace_dir: directory where every rank writes its trace, in a file named by its rank.

    The other fields are described by torch.

    Example::

        accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
        with accelerator.profile() as profiler:
            model(torch.ones(4, 8))
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> Any:  # noqa: ANN401 - torch.profiler.profile
        """Return a `torch.profiler.profile` that has not started.

        Raises `InvalidArgument` for an activity that the machine cannot profile.
        """
        from torch import profiler

        supported = {activity.name.lower(): activity for activity in profiler.supported_activities()}
        unknown = sorted(set(self.activities or ()) - set(supported))
        if unknown:
            raise InvalidArgument(
                f"cannot profile {', '.join(unknown)} on this machine; choose from {', '.join(sorted(supported))}"
            )
        return profiler.profile(
            activities=[supported[name] for name in self.activities] if self.activities is not None else None,
            schedule=profiler.schedule(**self.schedule_option) if self.schedule_option is not None else None,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@_suggest_keywords
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Args:
        num_steps: number of batches per window, that is per optimizer step.
        adjust_scheduler: accepted for compatibility; a scheduler steps once per optimizer step in any case.
        sync_with_dataloader: the end of a loader ends its window, whose loss is then divided by the window's actual
            length.
        sync_each_batch: reduce gradients at every batch, which saves memory with FSDP and costs time.

    Raises `InvalidArgument` unless `num_steps` is an integer >= 1.

    Example::

        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        num_steps: Any = self.num_steps  # notebook code is not type-checked
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise InvalidArgument(
                f"the number of gradient accumulation steps must be an integer >= 1, got {num_steps!r}"
            )


class DynamoBackend(StrEnum):
    """Backends of `torch.compile` that Accelerate names.

    The name of any other backend that is registered with torch is accepted as well. A backend that is not registered
    is an error when an `Accelerator` is created with it.
    """

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    AOT_TS_NVFUSER = "aot_ts_nvfuser"
    NVPRIMS_NVFUSER = "nvprims_nvfuser"
    CUDAGRAPHS = "cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    TENSORRT = "tensorrt"
    AOT_TORCHXLA_TRACE_ONCE = "aot_torchxla_trace_once"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    TVM = "tvm"


@_suggest_keywords
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Keyword arguments of `torch.compile`.

    Args:
        backend: name of a backend; "no" disables compilation.
        use_regional_compilation: compile only the repeated blocks of a model.

    The other fields are described by torch. What is not given is read from the environment variables
    `RANKBOOK_DYNAMO_BACKEND`, `..._MODE`, `..._USE_FULLGRAPH`, `..._USE_DYNAMIC` and `..._USE_REGIONAL_COMPILATION`, or
    from Accelerate's, which begin with `ACCELERATE_DYNAMO_`. Raises `InvalidArgument` for an unknown backend.

    Example::

        accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        # An argument wins over the environment. None stands for "not given", because "no" and False are values that an
        # argument may have to switch something off.
        if self.backend is None:
            self.backend = _dynamo_variable("BACKEND")
        if self.mode is None:
            self.mode = _dynamo_variable("MODE")
        if self.fullgraph is None:
            self.fullgraph = _dynamo_flag("USE_FULLGRAPH") or False
        if self.dynamic is None:
            self.dynamic = _dynamo_flag("USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = _dynamo_flag("USE_REGIONAL_COMPILATION") or False
        self.backend = str(self.backend or "no").lower()
        # Members of the enumeration can be compared and passed on where torch lacks them. See `check`.
        if self.backend not in {member.value for member in DynamoBackend}:
            self.check()

    def check(self) -> None:
        """Raise `InvalidArgument` if the backend is not registered with torch."""
        if self.backend == "no":
            return
        # Imported here: it takes more than a second, and most programs do not compile.
        import torch._dynamo

        backends = {*torch._dynamo.list_backends(exclude_tags=()), "eager", "inductor"}
        if self.backend not in backends:
            raise InvalidArgument(f"unknown dynamo_backend {self.backend!r}; choose from {', '.join(sorted(backends))}")

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose value differs from what it is without arguments and environment variables."""
        plain = {"backend": "no", "fullgraph": False, "use_regional_compilation": False, "disable": False}
        return {name: value for name, value in self.to_dict().items() if value != plain.get(name)}

    @property
    def active(self) -> bool:
        """Return True if models are compiled."""
        return self.backend != "no" and not self.disable

    def compile_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `torch.compile`."""
        chosen = {"mode": self.mode, "dynamic": self.dynamic, "options": self.options}
        options = {name: value for name, value in chosen.items() if value is not None}
        return {"backend": self.backend, "fullgraph": bool(self.fullgraph), **options}


def _dynamo_variable(name: str) -> str | None:
    return read_text(f"RANKBOOK_DYNAMO_{name}", f"ACCELERATE_DYNAMO_{name}")


def _dynamo_flag(name: str) -> bool | None:
    # `dynamic` has three values for torch: None lets it decide, so a variable that is not set must not become False.
    names = (f"RANKBOOK_DYNAMO_{name}", f"ACCELERATE_DYNAMO_{name}")
    return None if read_text(*names) is None else read_flag(*names)


@_suggest_keywords
@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Settings of `torch.distributed.fsdp.fully_shard` (FSDP2).

    Args:
        fsdp_version: only 2 is supported.
        reshard_after_forward: as in `fully_shard`.
        mixed_precision_policy: torch's `MixedPrecisionPolicy`, or "fp16" or "bf16" for parameters of that dtype; by
            default the forward runs under autocast, as with other strategies.
        auto_wrap_policy: selects the submodules that are gathered separately. None or "no_wrap" for none,
            "size_based_wrap" with `min_num_params`, "transformer_based_wrap" with `transformer_cls_names_to_wrap`, or a
            function from a module to a bool.
        cpu_offload: True, or torch's `CPUOffloadPolicy`, to keep the shards in CPU memory and copy them to the GPU for
            the computation; without effect on CPU ranks.
        ignored_modules: modules, or a regular expression over module names, that are not sharded; their gradients are
            not reduced.
        state_dict_type: accepted for compatibility; `save_state` stores shards that any layout can load.
        activation_checkpointing: recompute the activations of the submodules that `auto_wrap_policy` selects in the
            backward.

    Raises `InvalidArgument` for unknown or unsupported values. With `activation_checkpointing`, `prepare` raises it if
    `auto_wrap_policy` selects no submodule.

    Example::

        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=1000)
        accelerator = Accelerator(fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    fsdp_version: int = 2
    reshard_after_forward: bool | int = True
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[[Any], bool] | str | None = None
    cpu_offload: Any = False
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: str = "FULL_STATE_DICT"
    activation_checkpointing: bool = False
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, str):
            self.ignored_modules = tuple(self.ignored_modules)  # an iterator would be exhausted by the first prepare()
        # Version 1 is Accelerate's default, so a script may pass it on without meaning it.
        if self.fsdp_version != 2:
            raise InvalidArgument(
                f"fsdp_version={self.fsdp_version} is not supported: Rankbook shards with fully_shard, which is "
                "version 2; omit fsdp_version"
            )
        named = {None, "no_wrap", "size_based_wrap", "transformer_based_wrap"}
        if not callable(self.auto_wrap_policy) and self.auto_wrap_policy not in named:
            raise InvalidArgument(
                f"unknown auto_wrap_policy {self.auto_wrap_policy!r}; choose from "
                f"{', '.join(sorted(map(str, named)))}, or pass a function"
            )
        if self.auto_wrap_policy == "transformer_based_wrap" and not self.transformer_cls_names_to_wrap:
            raise InvalidArgument(
                "transformer_based_wrap requires transformer_cls_names_to_wrap, the names of the block classes"
            )
        if self.state_dict_type not in {"FULL_STATE_DICT", "SHARDED_STATE_DICT"}:
            raise InvalidArgument(
                f"state_dict_type={self.state_dict_type!r} is not supported; choose from FULL_STATE_DICT, "
                "SHARDED_STATE_DICT: with both, save_state() stores shards, which can be loaded into any layout"
            )

    def set_reshard_after_forward(self, value: bool | int) -> None:
        """Set the field `reshard_after_forward`."""
        self.reshard_after_forward = value


@_suggest_keywords
@dataclass
class ProjectConfiguration:
    """Directories of a project.

    Args:
        project_dir: directory of checkpoints, a local one if they are numbered.
        logging_dir: directory of logs, by default `project_dir`.
        automatic_checkpoint_naming: number the checkpoints that are saved without a name.
        total_limit: number of numbered checkpoints to keep; those that were saved earlier are deleted.
        iteration: number of the next checkpoint.
        save_on_each_node: write files that are not sharded on every host rather than on rank 0 only.

    Example::

        project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
        accelerator = Accelerator(project_config=project)
        accelerator.save_state()
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, and `logging_dir` too unless it is set already."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    @property
    def checkpoints(self) -> Path:
        """Return the directory of numbered checkpoints. Raises `InvalidArgument` if `project_dir` is a URL."""
        if "://" in str(self.project_dir):
            raise InvalidArgument(
                f"numbered checkpoints require a local project_dir, got the URL {self.project_dir}: pass a URL to "
                f"save_state() and load_state() themselves, such as {str(self.project_dir).rstrip('/')}/checkpoint_0"
            )
        return Path(os.path.expanduser(self.project_dir or ".")) / "checkpoints"  # noqa: PTH111 - as in `save_state`


def unknown_keyword(function: str, name: str, parameters: Iterable[str]) -> UnknownKeyword:
    """Return the error for a keyword argument that `function` does not have, with the name that was probably meant.

    The fields of configuration objects and the names of early versions of Accelerate are known.
    """
    message = f"{function}() got an unexpected keyword argument {name!r}"
    # `Accelerator(fp16=True)` and `use_fp16=True` are spellings of Accelerate's first versions.
    if name.removeprefix("use_") in {"fp16", "bf16"}:
        return UnknownKeyword(f'{message}; use mixed_precision="{name.removeprefix("use_")}"')
    names = tuple(parameters)
    # In older versions of Accelerate these fields were parameters themselves.
    for parameter, kind in _CONFIGURATIONS.items():
        if parameter in names and name in {option.name for option in fields(kind)}:
            return UnknownKeyword(f"{message}; use {parameter}={kind.__name__}({name}=...)")
    return UnknownKeyword(message + suggest(name, names))


HANDLERS: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


@dataclass
class Handlers:
    """Handlers of an `Accelerator`, one per class."""

    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def of(cls, instances: Sequence[KwargsHandler] | None) -> Handlers:
        """Create the handlers from the argument `kwargs_handlers`.

        Raises `InvalidArgument` for two handlers of one class, or a handler of an unknown class.
        """
        attributes: dict[type, str] = {
            AutocastKwargs: "autocast",
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            InitProcessGroupKwargs: "init",
            ProfileKwargs: "profile",
        }
        handlers: dict[str, Any] = {}
        for handler in instances or ():
            # By the exact class. A subclass may be an adapter of another library, whose fields are not applied.
            attribute = attributes.get(type(handler))
            names = ", ".join(kind.__name__ for kind in HANDLERS)
            if attribute is None:
                raise InvalidArgument(
                    f"unsupported kwargs_handlers entry {type(handler).__name__}; choose from {names}"
                )
            if attribute in handlers:
                raise InvalidArgument(f"kwargs_handlers contains two {type(handler).__name__}, expected at most one")
            handlers[attribute] = handler
        return cls(**handlers)


@_suggest_keywords
@dataclass
class DataLoaderConfiguration:
    """Treatment of loaders by `Accelerator.prepare`.

    Args:
        split_batches: the loader's batch size is that of all ranks together, and batches are split between the ranks.
        dispatch_batches: if True, rank 0 reads all batches and sends the other ranks their part; if False, every rank
            reads its own part. None means True for iterable datasets whose batches go to a device, otherwise False.
        even_batches: repeat samples at the end, so that all ranks have the same number of batches.
        use_seedable_sampler: shuffle with a `SeedableRandomSampler`, which can be inspected. Prepared loaders derive
            their order from (seed, epoch) in any case.
        data_seed: seed of the loaders, instead of that of `set_seed`.
        non_blocking: do not wait for copies to the device; requires pinned memory.
        use_stateful_dataloader: read with torchdata's StatefulDataLoader, see below.

    With `use_stateful_dataloader`, a dataset with `state_dict` and `load_state_dict` is resumed from its own state, in
    every worker. The state of a map-style dataset is restored only if the numbers of ranks and of workers are
    unchanged. That of an iterable dataset, or of its iterators, is restored on any number, within a pass, without
    reading earlier samples again except the first batch of every rank, which fills up the last batches. Anything that
    the dataset's state omits, such as a shuffle buffer, is lost; without the option a stream is read again up to its
    position, which takes longer and loses nothing. The option does not apply to loaders that rank 0 reads for all
    ranks.

    Raises `InvalidArgument` if `use_stateful_dataloader` is set and torchdata is not installed.

    Example::

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=4))
        find_batch_size(next(iter(loader)))  # 2
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        # Here, where the option is set, and not when the first loader is prepared, which may be hours later.
        if self.use_stateful_dataloader:
            require_stateful_dataloader()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def require_stateful_dataloader() -> type[Any]:
    """Return torchdata's StatefulDataLoader. Raises `InvalidArgument` if torchdata is not installed."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise InvalidArgument(
            "use_stateful_dataloader requires torchdata's StatefulDataLoader, but torchdata is not installed: "
            "pip install torchdata, or omit the option; prepared loaders resume exactly without it"
        ) from error
    loader_class: type[Any] = StatefulDataLoader
    return loader_class


@_suggest_keywords
@dataclass
class TorchTensorParallelConfig:
    """Tensor-parallel plan.

    Args:
        plan: maps module names (`*` is a wildcard) to "colwise", "rowwise", or a torch `ParallelStyle`. By default the
            model's own `tp_plan` is used.
    """

    plan: dict[str, Any] | None = None


@_suggest_keywords
@dataclass
class ParallelismConfig:
    """Mesh of the ranks: replication, sharding and tensor parallelism.

    Args:
        dp_replicate_size: number of replicas of the model.
        dp_shard_size: number of ranks that shard a replica.
        tp_size: number of ranks that divide a layer.
        cp_size, sp_size: not supported; must be 1.
        tp_handler: tensor-parallel plan.

    A size of None is 1. `dp_replicate_size * dp_shard_size * tp_size` must be the world size. The mesh axes are named
    `dp_replicate`, `dp_shard` and `tp`. Raises `InvalidArgument` for a size that is not an integer >= 1, and for a
    `cp_size` or `sp_size` other than 1.

    Example::

        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    tp_handler: TorchTensorParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            # A bool is an integer in Python, and `tp_size=True` is a misunderstanding.
            size = 1 if getattr(self, name) is None else getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidArgument(f"{name} must be an integer >= 1, got {size!r}")
            setattr(self, name, size)
        for name in ("cp_size", "sp_size"):
            if getattr(self, name) != 1:
                raise InvalidArgument(
                    f"{name}={getattr(self, name)} is not supported; the mesh axes are dp_replicate, dp_shard, tp"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the mesh axes by name, outermost first."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """Return the number of ranks in the mesh."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that read different batches."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Return the number of ranks that read the same batches."""
        return self.tp_size or 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return True if there is more than one replica of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return True if a replica is sharded over several ranks."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Return True if layers are divided over several ranks."""
        return self.sizes["tp"] > 1

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on every mesh axis."""
        # The last axis is the innermost: neighbouring ranks differ in it first, as in `init_device_mesh`.
        coordinates = {}
        for name, size in reversed(self.sizes.items()):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def fitted_to(self, world_size: int) -> ParallelismConfig:
        """Return the mesh for another number of ranks: the number of replicas changes, or without any that of shards.

        Raises `InvalidArgument` with the arithmetic if `world_size` is not a multiple of the other sizes.
        """
        # The mesh that the user has asked for, so that the way back leads to it.
        requested: ParallelismConfig = vars(self).get("_requested", self)
        if requested.total_size == world_size:
            return requested
        sizes = requested.sizes
        changing = "dp_replicate" if requested.dp_replicate_enabled else "dp_shard"
        fixed = {name: size for name, size in sizes.items() if name != changing}
        product = math.prod(fixed.values())
        if world_size % product:
            factors = " * ".join(f"{name}({size})" for name, size in fixed.items())
            mesh = " * ".join(f"{name}({size})" for name, size in sizes.items())
            raise InvalidArgument(
                f"{world_size} ranks do not fit the mesh {mesh}: {factors} = {product}, and "
                f"{world_size} % {product} = {world_size % product}, expected 0"
            )
        fitted = copy.copy(requested)
        vars(fitted).update({f"{changing}_size": world_size // product, "_requested": requested})
        return fitted

    def check(self, world_size: int) -> None:
        """Raise `InvalidArgument` with the arithmetic unless the sizes multiply to `world_size`."""
        if self.total_size != world_size:
            product = " * ".join(f"{name}({size})" for name, size in self.sizes.items())
            raise InvalidArgument(f"{product} = {self.total_size} != world size ({world_size}): the mesh does not fit")


_CONFIGURATIONS: dict[str, type] = {
    "dataloader_config": DataLoaderConfiguration,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "parallelism_config": ParallelismConfig,
}
"""Parameters of the `Accelerator` that take a configuration object."""
