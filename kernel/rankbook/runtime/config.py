"""What a person can ask of the runtime, as plain objects.

Owns: the plugins and handlers, their fields and defaults, and what of them makes no sense. Refuses: to apply any of it,
and to import torch's distributed parts before they are needed.

What one may ask of prepared loaders.

How the ranks are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from rankbook.errors import BadRequest


class KwargsHandler:
    """Base of the handlers: each is a dataclass of keyword arguments for something of torch's."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)  # type: ignore[arg-type]
            if getattr(self, each.name) != _default_of(each)
        }


def _default_of(each: Any) -> Any:  # noqa: ANN401 - a dataclass field and its default
    return each.default_factory() if each.default_factory is not MISSING else each.default


@dataclass
class AutocastKwargs(KwargsHandler):
    """Of `torch.autocast`. `cache_enabled` None means torch's own choice."""

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(StrEnum):
    """How gradients travel under DDP: as they are, in a type of half the size, or as matrices of low rank."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Of `torch.nn.parallel.DistributedDataParallel`.

    `comm_hook` is one of `DDPCommunicationHookType`, or its name; `comm_wrapper`, "fp16" or "bf16", has what the hook
    sends travel in that type. `comm_state_option` are keywords of torch's `PowerSGDState`.
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
        self.comm_hook = _one_of("comm_hook", self.comm_hook, [each.value for each in DDPCommunicationHookType])
        self.comm_wrapper = _one_of("comm_wrapper", self.comm_wrapper, ["no", "fp16", "bf16"])
        if self.comm_hook == "batched_power_sgd":
            raise BadRequest(
                "comm_hook='batched_power_sgd' is not offered: torch's own raises in its first step (2.13); use "
                "'power_sgd', which batches tensors of the same shape with "
                'comm_state_option={"batch_tensors_with_same_shape": True}'
            )
        if self.comm_wrapper != "no" and self.comm_hook == "no":
            raise BadRequest(f"comm_wrapper={self.comm_wrapper!r} is for what a comm_hook sends, and there is none")
        if self.comm_state_option and "power_sgd" not in self.comm_hook:
            raise BadRequest(f"comm_state_option is for power_sgd, and comm_hook={self.comm_hook!r} has no state")


def _one_of(name: str, given: object, known: list[str]) -> str:
    value = str(getattr(given, "value", given)).lower()
    if value not in known:
        raise BadRequest(f"{name}={given!r} is unknown: choose {', '.join(map(repr, known))}")
    return value


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Of `torch.amp.GradScaler`, which fp16 needs."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Of `torch.distributed.init_process_group`; used only where no process group is there yet."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Of `torch.profiler.profile`. `output_trace_dir`: each rank writes its trace there, named by its rank.

    `schedule_option` has the keywords of `torch.profiler.schedule`.
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
        """A `torch.profiler.profile` that has not begun."""
        from torch import profiler

        known = {each.name.lower(): each for each in profiler.supported_activities()}
        unknown = sorted(set(self.activities or ()) - set(known))
        if unknown:
            raise BadRequest(f"this machine cannot profile {', '.join(unknown)}, only {', '.join(sorted(known))}")
        return profiler.profile(
            activities=[known[each] for each in self.activities] if self.activities is not None else None,
            schedule=profiler.schedule(**self.schedule_option) if self.schedule_option is not None else None,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients gather up before a step.

    `num_steps` batches make a window. `sync_with_dataloader`: the end of a loader ends its window, which then divides
    by its own length. `sync_each_batch`: the ranks reduce at every batch, which saves memory with FSDP and costs time.
    `adjust_scheduler` is kept for programs that read it; a scheduler steps once per optimizer step either way.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        given: Any = self.num_steps  # a notebook is not type-checked
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise BadRequest(f"gradient accumulation over {given!r} steps: it takes a whole number from 1 on")


class DynamoBackend(StrEnum):
    """Backends of `torch.compile` by the names that people know; any name that torch knows may be given instead."""

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    CUDAGRAPHS = "cudagraphs"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Of `torch.compile`.

    `backend` "no" compiles nothing. `use_regional_compilation` compiles repeated blocks alone.
    """

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        self.backend = str(self.backend or "no").lower()
        if self.backend != "no":
            import torch._dynamo

            known = {*torch._dynamo.list_backends(exclude_tags=()), "eager", "inductor"}
            if self.backend not in known:
                raise BadRequest(f"dynamo_backend={self.backend!r} is unknown here: choose from {sorted(known)}")

    @property
    def active(self) -> bool:
        """Whether anything is to be compiled."""
        return self.backend != "no" and not self.disable

    def compile_kwargs(self) -> dict[str, Any]:
        """What `torch.compile` is given."""
        chosen = {"mode": self.mode, "dynamic": self.dynamic, "options": self.options}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"backend": self.backend, "fullgraph": self.fullgraph, **given}


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Of `torch.distributed.fsdp.fully_shard` (FSDP2).

    `auto_wrap_policy` tells which modules below the model are gathered on their own: None or "no_wrap" for none,
    "size_based_wrap" with `min_num_params`, "transformer_based_wrap" with `transformer_cls_names_to_wrap`, or a
    function from a module to a bool. `mixed_precision_policy` is torch's, or "bf16" or "fp16" for parameters in that
    type; without one the forward runs under autocast, as everywhere. `ignored_modules`: modules, or a regular
    expression over names; they stay whole, and their gradients each rank's own.
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
            self.ignored_modules = tuple(self.ignored_modules)  # looked at by each prepare()
        if self.fsdp_version != 2:
            raise BadRequest(
                f"fsdp_version={self.fsdp_version} is not offered: Rankbook shards with fully_shard, that is version "
                "2; leave fsdp_version out"
            )
        named = {None, "no_wrap", "size_based_wrap", "transformer_based_wrap"}
        if not callable(self.auto_wrap_policy) and self.auto_wrap_policy not in named:
            raise BadRequest(f"auto_wrap_policy={self.auto_wrap_policy!r} is unknown: {sorted(map(str, named))}")
        if self.auto_wrap_policy == "transformer_based_wrap" and not self.transformer_cls_names_to_wrap:
            raise BadRequest(
                "transformer_based_wrap needs transformer_cls_names_to_wrap: the names of the block classes"
            )
        if self.state_dict_type not in {"FULL_STATE_DICT", "SHARDED_STATE_DICT"}:
            raise BadRequest(
                f"state_dict_type={self.state_dict_type!r} is not offered: save_state stores shards, which any layout "
                "reads, whether it is FULL_STATE_DICT or SHARDED_STATE_DICT"
            )

    def set_reshard_after_forward(self, value: bool | int) -> None:
        """As the field."""
        self.reshard_after_forward = value


@dataclass
class ProjectConfiguration:
    """Where a project's files go. `total_limit`: how many numbered checkpoints are kept."""

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
        """Put the project, and its logs unless they have their own place, into `project_dir`."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    @property
    def checkpoints(self) -> Path:
        """The folder of numbered checkpoints."""
        return Path(self.project_dir or ".") / "checkpoints"


HANDLERS: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


@dataclass
class Handlers:
    """The handlers that an `Accelerator` was given, one per class."""

    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def of(cls, given: Sequence[KwargsHandler] | None) -> Handlers:
        """From `kwargs_handlers`.

        Raises `BadRequest` for a second one of a class, or one of a class that is unknown.
        """
        places: dict[type, str] = {
            AutocastKwargs: "autocast",
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            InitProcessGroupKwargs: "init",
            ProfileKwargs: "profile",
        }
        found: dict[str, Any] = {}
        for each in given or ():
            place = places.get(type(each))
            names = ", ".join(kind.__name__ for kind in HANDLERS)
            if place is None:
                raise BadRequest(f"kwargs_handlers has a {type(each).__name__}; it takes one each of {names}")
            if place in found:
                raise BadRequest(f"kwargs_handlers has two {type(each).__name__}; it takes one of a class")
            found[place] = each
        return cls(**found)


@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` treats loaders.

    `split_batches`: a loader's batch is that of all ranks together, and is cut.
    `dispatch_batches`: rank 0 reads and sends; False: every rank reads its own part; None: as True for iterable
    datasets whose batches go to a device, as False for all others.
    `even_batches`: the last round is filled up, so that every rank has as many batches.
    `use_seedable_sampler`: a shuffle is drawn by a `SeedableRandomSampler`, which can be looked at; prepared loaders
    draw theirs from (seed, epoch) in any case.
    `data_seed`: the loaders' own seed, instead of that of `set_seed`.
    `non_blocking`: copies to the device do not wait, which needs pinned memory.
    `use_stateful_dataloader`: batches come from torchdata's StatefulDataLoader. A dataset with a `state_dict` and a
    `load_state_dict` is resumed with its own state, in each worker: a map-style one on as many ranks with as many
    workers; an iterable one, or its iterators, on any, within a pass, and no sample before is read again but a round's.
    What such a state leaves out is lost, a shuffle buffer for instance; without the option a stream is read again up to
    there, which takes longer and loses nothing. One that rank 0 reads for all is not resumed so. Raises `BadRequest`
    where torchdata is not installed.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            require_stateful_dataloader()

    def to_dict(self) -> dict[str, Any]:
        """The options by name."""
        return asdict(self)


def require_stateful_dataloader() -> type[Any]:
    """Torchdata's StatefulDataLoader. Raises `BadRequest` where torchdata is not installed."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise BadRequest(
            "use_stateful_dataloader needs torchdata's StatefulDataLoader, and torchdata is not installed: "
            "pip install torchdata, or leave the option out; prepared loaders resume exactly without it"
        ) from error
    found: type[Any] = StatefulDataLoader
    return found


@dataclass
class TorchTensorParallelConfig:
    """The tensor-parallel plan: names of modules (with `*`) to "colwise", "rowwise", or a ParallelStyle of torch's.

    Without a plan the model's own `tp_plan` is used.
    """

    plan: dict[str, Any] | None = None


@dataclass
class ParallelismConfig:
    """How the ranks are divided: `dp_replicate_size * dp_shard_size * tp_size` must be the world size.

    An axis that is left out, or None, has size 1. The mesh's axes are named `dp_replicate`, `dp_shard`, `tp`. Raises
    `BadRequest` for a size that is no whole number from 1 on, and for a `cp_size` or `sp_size` that is not 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    tp_handler: TorchTensorParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size = 1 if getattr(self, name) is None else getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BadRequest(f"{name}={size!r}: the size of a mesh axis is a whole number from 1 on")
            setattr(self, name, size)
        for name in ("cp_size", "sp_size"):
            if getattr(self, name) != 1:
                raise BadRequest(
                    f"{name}={getattr(self, name)}: this axis is not offered; dp_replicate, dp_shard, tp are"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh's axes, outermost first."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """How many ranks it is for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks the batches are divided."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks get the same batches."""
        return self.tp_size or 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy is sharded over several ranks."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return self.sizes["tp"] > 1

    def place_of(self, rank: int) -> dict[str, int]:
        """The rank's number on each axis."""
        place = {}
        for name, size in reversed(self.sizes.items()):
            rank, place[name] = divmod(rank, size)
        return place

    def check(self, world_size: int) -> None:
        """Raise `BadRequest` with the arithmetic unless the axes multiply to `world_size`."""
        if self.total_size != world_size:
            product = " * ".join(f"{name}({size})" for name, size in self.sizes.items())
            raise BadRequest(f"{product} = {self.total_size} != world size ({world_size}): the mesh does not fit")
