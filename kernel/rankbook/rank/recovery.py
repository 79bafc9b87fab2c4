"""Transfer of a rank's variables to the rank that replaces a dead one, and changes of the number of ranks.

A peer lists which variables can be pickled (`list_state`), exports them (`export_state`), and the new rank adopts them
(`adopt_state`). The coordinator chooses the peer, and re-forms the process groups.

Variables are first checked one by one, in a forked child, where a value that crashes or hangs does no harm. Those that
can be pickled are then pickled in one piece, so that an optimizer still holds the parameters of its model. If that
pickle cannot be loaded, the coordinator asks for parts of it until it knows which variables to leave out. Functions and
classes of cells are bound to the namespace that they arrive in: on the new rank they use its variables.

Before the number of ranks changes, `check_resize` describes this rank's state; `enter_world` adapts it afterwards. New
ranks get their variables as above. What was prepared for training is the concern of runtime/resize.py, which is not
imported unless a cell has used the runtime.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import operator
import os
import pickle
import random
import signal
import struct
import sys
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.optim.optimizer import Optimizer
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from rankbook import snapshot_files
from rankbook.errors import TransferError
from rankbook.lazy_imports import loaded_module
from rankbook.protocol.messages import EnterWorld
from rankbook.rank import model_reset
from rankbook.rank.inspect.tensor_introspection import loaded_class
from rankbook.rank.process_groups import manager
from rankbook.rank.process_groups.recoverable_group import RecoverableProcessGroup
from rankbook.snapshot_files import SnapshotVersion
from rankbook.transport.framed_socket import wait_readable
from rankbook.transport.serialization import Packed, Reduce, pack, pickle_error
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.tensors import hooks_of

_SAVES = "rankbook.checkpoint.saving"
_ACCELERATE = "accelerate.state"
_WATCH = "rankbook.numerics.watch"
_namespace: dict[str, Any] = {}
"""The namespace of this rank's cells, to which functions from a peer are bound."""


class Exportable(TypedDict):
    """The names of the variables that a rank can export, and the reason for every one that it cannot.

    `replicas`: the shards of some models will be restored from replicas. `last_saved` is a hint at the last checkpoint,
    or empty.
    """

    names: list[str]
    missing: dict[str, str]
    replicas: bool
    last_saved: str


class Shards(NamedTuple):
    """Source of the shards of new ranks: a snapshot, or else replicas without the `replaced` ranks.

    `handed_over`: the shards of all models will be read from the folder of a resize.
    """

    snapshot: SnapshotVersion | None = None
    replaced: tuple[int, ...] = ()
    handed_over: bool = False


_NO_SHARDS = Shards()


class TorchSettings(TypedDict):
    """Settings of torch that hold for a whole process, by the names of their functions; see `torch_settings`."""

    default_dtype: torch.dtype
    default_device: str
    float32_matmul_precision: str | None
    fp32_precisions: dict[str, str]
    deterministic: bool
    deterministic_warn_only: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    grad_enabled: bool
    detect_anomaly: bool


class PathChanges(NamedTuple):
    """Changes of `sys.path` by cells: entries before and behind those of the start, and the removed ones."""

    before: list[str]
    behind: list[str]
    removed: list[str]


class ExportedState(TypedDict):
    """The exported part of a rank's state. `imports` maps names to modules, `path` is `sys.path`.

    `folder` is the current folder, empty if it was removed. `host` is that of the rank (`own_host`): a rank of another
    one takes only what cells have changed, that is `path_changes`, and `folder` if `has_moved`. `watch` are the
    conditions of the number watch, None if it is off. `environment` has the environment variables that cells have
    changed, None for a deleted one. `settings` are those of `torch_settings`. `newest_hook` has a higher number than
    all hooks of modules and optimizers; torch numbers further ones from there on.
    """

    newest_hook: RemovableHandle
    variables: dict[str, Any]
    imports: dict[str, str]
    path: list[str]
    folder: str
    host: str
    path_changes: PathChanges
    has_moved: bool
    watch: Any
    environment: dict[str, str | None]
    settings: TorchSettings


class AdoptedState(TypedDict):
    """The number of adopted values by kind, and the reasons for missing ones.

    `refused` is the reason why nothing was adopted; empty otherwise. `lost_save` is the message of a rank whose
    background save was lost with the dead rank; empty otherwise.
    """

    variables: int
    functions: int
    imports: int
    missing: dict[str, str]
    refused: str
    lost_save: str


def list_state(namespace: dict[str, Any], hidden: Mapping[str, Any], *, shards: Shards = _NO_SHARDS) -> Exportable:
    """Check which variables of `namespace` can be pickled.

    Skips modules, private names, and the names in `hidden`, which are defined on every rank. The models
    whose shards will come from `shards` can be sent without them.
    """
    missing: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or isinstance(value, types.ModuleType):
            continue
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            missing[name] = "the exporting rank is not a member of this group; create the group again on all ranks"
        else:
            values[name] = value
    # The list is made before the export, in which one variable that cannot be pickled would cost all others. It is
    # found out in a forked child (`check_pickling`), because the code of a user's class may crash or never return.
    reducer = _Reducer(namespace, with_data=False, shards=shards)
    missing |= check_pickling(values, reducer)
    names = [name for name in values if name not in missing]
    uses_replicas = shards.snapshot is None and not shards.handed_over
    replicas = uses_replicas and reducer.restores
    return Exportable(names=names, missing=missing, replicas=replicas, last_saved=_last_saved())


def export_state(
    namespace: dict[str, Any],
    hidden: Mapping[str, Any],
    names: Collection[str],
    store: SegmentStore,
    *,
    shards: Shards = _NO_SHARDS,
) -> Packed:
    """Pickle the variables `names`, with the imports, `sys.path` and the current folder. Raises `TransferError`.

    `shards` as in `list_state`.
    """
    imports = {
        name: value.__name__
        for name, value in namespace.items()
        if isinstance(value, types.ModuleType) and not name.startswith("_") and name not in hidden
    }
    # One pickle for all variables: objects that several of them refer to are one object on the new rank, too.
    variables = {name: namespace[name] for name in names if name in namespace}
    watch = loaded_module(_WATCH)
    try:
        folder = str(Path.cwd())
    except OSError:  # it was removed
        folder = ""
    state = ExportedState(
        # Unpickled first: the new rank then gives none of its hooks the number of a hook that comes along.
        newest_hook=RemovableHandle(OrderedDict()),
        variables=variables,
        imports=imports,
        path=list(sys.path),
        folder=folder,
        host=own_host,
        path_changes=_path_changes(),
        has_moved=folder != first_folder,
        watch=watch.active_conditions() if watch is not None else None,
        environment=changed_environment(),
        settings=torch_settings(),
    )
    # Tensors go to the device of the new rank, whose number may differ.
    return pack(state, store=store, reduce=_Reducer(namespace, shards=shards), for_new_rank=True)


def adopt_state(namespace: dict[str, Any], open_state: Callable[[], ExportedState] | None) -> AdoptedState:
    """Copy the state that `open_state` returns into `namespace`; copy nothing if it raises.

    Without `open_state`, prepare this rank's models for training with the new ranks.
    """
    adopted = AdoptedState(variables=0, functions=0, imports=0, missing={}, refused="", lost_save="")
    if open_state is None:
        model_reset.restart_step()
        return adopted
    try:
        state = open_state()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - reported; a value's code may raise even SystemExit
        adopted["refused"] = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        return adopted
    missing = adopted["missing"]
    # Before the imports, which may need it. Another host has other packages, and may have other folders.
    is_here = state["host"] == own_host
    if is_here:
        sys.path[:] = state["path"]
    else:
        changes = state["path_changes"]
        kept = [entry for entry in sys.path if entry not in changes.removed]
        sys.path[:] = dict.fromkeys((*changes.before, *kept, *changes.behind))
    if is_here or state["has_moved"]:
        try:
            os.chdir(state["folder"])
        except OSError as error:
            missing["the current folder"] = str(error) if state["folder"] else "it was removed"
    for name, value in state["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name, module in state["imports"].items():
        try:
            namespace[name] = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - named: a module that is being edited may raise anything
            missing[name] = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    # Only after everything has been unpickled: the namespace gets all of the state or nothing.
    namespace.update(state["variables"])
    set_torch_settings(state["settings"])
    if state["watch"] is not None:
        # The ranks that watch exchange a flag in every step.
        from rankbook.numerics.watch import set_conditions

        set_conditions(state["watch"])
    functions = sum(isinstance(value, (types.FunctionType, type)) for value in state["variables"].values())
    adopted["variables"] = len(state["variables"]) - functions
    adopted["functions"] = functions
    adopted["imports"] = sum(name not in missing for name in state["imports"])
    return adopted


def torch_settings() -> TorchSettings:
    """Return the settings of torch that cells may have changed, and without which a rank computes something else."""
    return TorchSettings(
        default_dtype=torch.get_default_dtype(),
        # Without the number: it is that of the donor's device.
        default_device=torch.get_default_device().type,
        float32_matmul_precision=_float32_matmul_precision(),
        fp32_precisions=_fp32_precisions(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        grad_enabled=torch.is_grad_enabled(),
        detect_anomaly=torch.is_anomaly_enabled(),
    )


_FP32 = ("", "cudnn", "mkldnn", *(f"{name}.{kind}" for name in ("cudnn", "mkldnn") for kind in ("conv", "rnn")))
_FP32 += ("cuda.matmul", "mkldnn.matmul")
"""Places of the newer settings of the precision of float32 in `torch.backends`, which contain one another."""


def _fp32_precisions() -> dict[str, str]:
    """Return the newer settings of the precision of float32, by their places in `torch.backends`."""
    precisions = {}
    for place in _FP32:
        with contextlib.suppress(RuntimeError, AttributeError):
            precisions[place] = _backend(place).fp32_precision
    return precisions


def _backend(place: str) -> Any:  # noqa: ANN401 - a module
    return operator.attrgetter(place)(torch.backends) if place else torch.backends


def _float32_matmul_precision() -> str | None:
    # torch refuses to read this older setting once one of the newer ones is used.
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def set_torch_settings(settings: TorchSettings) -> None:
    """Set those of `settings` that this process has otherwise: some of them cost time even with the default value."""
    own = torch_settings()
    if settings["default_dtype"] != own["default_dtype"]:
        torch.set_default_dtype(settings["default_dtype"])
    if settings["default_device"] != own["default_device"]:
        torch.set_default_device(settings["default_device"])
    if settings["float32_matmul_precision"] not in (None, own["float32_matmul_precision"]):
        torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    own_precisions = _fp32_precisions()  # after the setter above, which changes some of them
    for place, precision in settings["fp32_precisions"].items():
        if own_precisions.get(place) != precision:
            _backend(place).fp32_precision = precision
    if settings["deterministic"] != own["deterministic"]:
        torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["deterministic_warn_only"])
    if settings["detect_anomaly"] != own["detect_anomaly"]:
        torch.autograd.set_detect_anomaly(settings["detect_anomaly"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.set_grad_enabled(settings["grad_enabled"])


_OWN_VARIABLES = frozenset(
    (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "WANDB_SERVICE",
    )
)  # fmt: skip
"""Environment variables of one process: where it is (`launch.placement.place_variables`), and its service of wandb."""
first_environment: dict[str, str] = {}
"""The environment at the start of the rank."""
first_path: list[str] = []
"""`sys.path` at the start of the rank."""
first_folder = ""
"""The current folder at the start of the rank."""
own_host = ""
"""The address of this host's agent, by which hosts differ; empty on the notebook's host."""


def _path_changes() -> PathChanges:
    first = next((index for index, entry in enumerate(sys.path) if entry in first_path), 0)
    added = [(index, entry) for index, entry in enumerate(sys.path) if entry not in first_path]
    return PathChanges(
        [entry for index, entry in added if index < first],
        [entry for index, entry in added if index >= first],
        [entry for entry in first_path if entry not in sys.path],
    )


def changed_environment() -> dict[str, str | None]:
    """Return the environment variables that this process has changed, with None for a deleted one."""
    names = (os.environ.keys() | first_environment.keys()) - _OWN_VARIABLES
    now = {name: os.environ.get(name) for name in names}
    return {name: value for name, value in sorted(now.items()) if value != first_environment.get(name)}


def describe_steps(
    namespace: dict[str, Any],
    restored_from: int | None,
    notes: list[str],
    untrusted: list[Optimizer],
    untrusted_statistics: list[torch.nn.Module],
) -> str:
    """Return what the user has to know about steps on the results of aborted collectives; mostly nothing."""
    lines = []
    if restored_from is not None:
        lines.append(
            "an optimizer step had used a collective that was aborted: all ranks continue with the weights and the "
            f"optimizer state of rank {restored_from}, which had not taken it"
        )
    lines += notes
    if untrusted:
        names = model_reset.names_of(untrusted, namespace) or [f"a model trained by {type(untrusted[0]).__name__}"]
        lines.append(
            f"{' and '.join(names)}: an optimizer step used a collective that was aborted, and no rank is known to "
            "have the weights from before it; they are not to be trusted: load a checkpoint, or make them again"
            f"{_last_saved()}"
        )
    if untrusted_statistics:
        names = model_reset.names_of_models(untrusted_statistics, namespace) or ["a model"]
        lines.append(
            f"{' and '.join(names)}: a collective was aborted on all ranks, maybe one of SyncBatchNorm: its running "
            f"statistics are not to be trusted: load a checkpoint, or let further steps renew them{_last_saved()}"
        )
    return "".join(f"{line}\n" for line in lines)


def set_cell_namespace(namespace: dict[str, Any]) -> None:
    """Set the namespace that functions from a peer are bound to."""
    global _namespace
    _namespace = namespace


class _Reducer:
    """Pickle reducer for cell functions, process groups, meshes, and tensors.

    The sharded models that `shards` has are sent without their shards (`restores`). For any other sharded DTensor it
    raises `TransferError`. Without `with_data`, plain tensors and the random generators of a device are left out: that
    suffices to find out which values can be pickled, and needs no CUDA.
    """

    def __init__(self, namespace: dict[str, Any], *, shards: Shards = _NO_SHARDS, with_data: bool = True) -> None:
        self._namespace = namespace
        self._with_data = with_data
        self._models = None
        covered: set[int] = set()
        if shards.handed_over:
            from rankbook.runtime.strategies.transfer import sharded_models

            covered = set(sharded_models())
        elif shards.snapshot is not None:
            from rankbook.runtime import protection

            covered = protection.models_in(shards.snapshot)
        elif "rankbook.runtime.accelerator" in sys.modules:  # otherwise no model is prepared
            from rankbook.runtime.strategies.transfer import replicated_models

            covered = replicated_models(shards.replaced)
        self.restores = bool(covered)
        if covered:
            from rankbook.runtime.strategies.transfer import ModelPickling

            self._models = ModelPickling(covered)

    def __call__(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        # A function of a cell. cloudpickle would pickle a copy of the globals that it uses, which the copy would not
        # share with the new namespace.
        if isinstance(value, types.FunctionType) and value.__globals__ is self._namespace:
            return _reduce_function(value)
        # Functions that share a variable, such as a counter, go on sharing it.
        if isinstance(value, types.CellType):
            return types.CellType, (), _contents_of(value), None, None, _fill_cell
        # The new rank has its own object for the group, with the same name.
        if isinstance(value, RecoverableProcessGroup):
            return _group_here, (value.group_name,)
        if isinstance(value, DeviceMesh):
            return _reduce_mesh(value)
        if type(value) is torch.device and _is_own_device(value):
            return _own_device, ()
        if isinstance(value, DistributedSampler) and _is_of_this_rank(value):
            return object.__new__, (type(value),), dict(vars(value)), None, None, _set_own_sampler
        if type(value).__module__ == _ACCELERATE and (reduction := _reduce_accelerate(value)) is not NotImplemented:
            return reduction
        attributes = _attributes_of(value) if isinstance(value, torch.optim.Optimizer) else None
        if self._models is not None and (reduction := self._models.reduce(value)) is not NotImplemented:
            if attributes is not None:  # without the state of sharded parameters
                make, arguments, state, *rest = reduction
                return make, arguments, {**attributes, **state}, *rest
            return reduction
        if attributes is not None:
            return _reduce_optimizer(type(value), attributes)
        if isinstance(value, torch.Tensor):
            placements = getattr(value, "placements", ())
            if any(not placement.is_replicate() for placement in placements):
                raise TransferError(f"it is sharded over the ranks: the shard of the dead rank is lost{_last_saved()}")
            # A plain number in place of the tensor: whether a value can be pickled does not depend on the tensor's
            # data, but on its hooks.
            if not self._with_data and (placements or type(value) in (torch.Tensor, torch.nn.Parameter)):
                return _nothing, hooks_of(value)
        # Reading its state in a forked child would kill the child. Seen on an H100 with torch 2.11.
        if not self._with_data and type(value) is torch.Generator and value.device.type != "cpu":
            return int, ()
        return NotImplemented


def _reduce_optimizer(kind: Any, attributes: dict[str, Any]) -> tuple[Any, ...]:  # noqa: ANN401 - a class
    if not kind.__setstate__.__module__.startswith("torch."):  # the user's own
        return object.__new__, (kind,), attributes
    return object.__new__, (kind,), (attributes, hasattr(kind.step, "hooked")), None, None, _set_optimizer


def _set_optimizer(optimizer: torch.optim.Optimizer, state: tuple[dict[str, Any], bool]) -> None:
    # torch's `__setstate__` needs attributes that its constructor sets, and adds its hooks to the class. An optimizer
    # around another one may have neither, as those of Lightning Fabric: its steps would be counted twice.
    attributes, is_hooked = state
    vars(optimizer).update(attributes)
    if is_hooked:
        optimizer._patch_step_function()


def _is_of_this_rank(sampler: DistributedSampler[Any]) -> bool:
    """Return True for a sampler that divides the data among all ranks, and reads the part of this one."""
    place = snapshot_files.this_place
    return place is not None and (sampler.num_replicas, sampler.rank) == (place.world_size, place.rank)


def _set_own_sampler(sampler: DistributedSampler[Any], attributes: dict[str, Any]) -> None:
    # Otherwise two ranks would read the same part of the data, and none the part of the lost rank.
    vars(sampler).update(attributes, rank=dist.get_rank())


def _divide_again(former: int, world_size: int) -> None:
    """Let the user's samplers that divide the data among all ranks divide it among `world_size`.

    Those of loaders in attributes and containers too. A subclass may have other arguments, and stays as it is.
    """
    samplers = [value for value in gc.get_objects() if type(value) is DistributedSampler]
    for sampler in samplers:
        if sampler.num_replicas == former:
            epoch, rank = sampler.epoch, dist.get_rank()
            settings = {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": sampler.drop_last}
            sampler.__init__(sampler.dataset, world_size, rank, **settings)  # type: ignore[misc]
            sampler.set_epoch(epoch)


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return all attributes of an optimizer; None if its class has a `__getstate__` of its own.

    torch's leaves out the attributes of the class, and the hooks. Raises `TransferError` for an optimizer that steps
    other parameters on every rank.
    """
    divided = loaded_class("torch.distributed.optim", "ZeroRedundancyOptimizer")
    if divided is not None and isinstance(optimizer, divided):
        raise TransferError(
            "every rank has the state of other parameters, and that of the dead rank is lost: make it again on all "
            f"ranks{_last_saved()}"
        )
    if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        return None
    # `step` is replaced by a scheduler, in the object itself.
    return {name: value for name, value in vars(optimizer).items() if name != "step"}


def _nothing(*_: object) -> int:
    return 0


def _last_saved() -> str:
    """Return a hint at the last checkpoint, from which a sharded variable can be loaded."""
    saving = loaded_module(_SAVES)  # not imported: no cell has saved anything
    saved = saving.last_save() if saving is not None else None
    if saved is None or not ("://" in saved.folder or Path(saved.folder, saved.name).is_dir()):
        return ""
    return f"; the last checkpoint is {saved.folder}/{saved.name}"


def _group_here(name: str) -> Any:  # noqa: ANN401 - a group, or torch's value for a non-member
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except RuntimeError:  # this rank is not a member
        return dist.GroupMember.NON_GROUP_MEMBER


# torch has no public way to make the mesh of other ranks without creating its groups again, which is a collective.
# Tried with torch 2.13.
def _reduce_mesh(mesh: DeviceMesh) -> Any:  # noqa: ANN401 - pickle's own contract
    state = dict(vars(mesh))
    state.pop("_pg_registry", None)
    names = state.pop("_dim_group_names", None)
    ordinals = None if names is None else [_ordinal_of(name) for name in names]
    return DeviceMesh.__new__, (DeviceMesh,), (state, names, ordinals), None, None, _complete_mesh


def _groups_of_ranks(ranks: list[int]) -> list[str]:
    """Return the names of this rank's groups of these ranks, in the order of creation, which all members share."""
    world = c10d._world
    return [str(name) for group, name in world.pg_names.items() if sorted(world.pg_group_ranks[group]) == sorted(ranks)]


def _ordinal_of(name: str) -> int:
    """Return the number of the group `name` among those of the same ranks."""
    world = c10d._world
    ranks = next(list(world.pg_group_ranks[group]) for group, other in world.pg_names.items() if other == name)
    return _groups_of_ranks(ranks).index(name)


def _complete_mesh(mesh: DeviceMesh, sent: tuple[dict[str, Any], list[str] | None, list[int] | None]) -> None:
    """Give the mesh this rank's place in it, and its groups along every dimension."""
    state, names, ordinals = sent
    mesh.__dict__.update(state, _pg_registry={})
    mesh._rank = dist.get_rank()
    places = (mesh.mesh == mesh._rank).nonzero()
    at = tuple(places[0].tolist()) if len(places) else None
    mesh._coordinate_on_dim = at
    if names is None or ordinals is None:
        return
    mesh._dim_group_names = [c10d.GroupName(name) for name in names]
    if at is None:  # this rank is not part of the mesh
        return
    for dim, ordinal in enumerate(ordinals):
        index = tuple(slice(None) if other == dim else place for other, place in enumerate(at))
        ranks = mesh.mesh[index].tolist()
        groups = _groups_of_ranks(ranks)
        while ordinal >= len(groups) and (renewed := manager.create_lost_group(ranks, len(groups))) is not None:
            groups.append(renewed)
        if ordinal >= len(groups):
            raise TransferError(f"this rank has no process group for the dimension {dim} of {mesh}")
        mesh._dim_group_names[dim] = c10d.GroupName(groups[ordinal])
        mesh._pg_registry[groups[ordinal]] = _resolve_process_group(c10d.GroupName(groups[ordinal]))


# Hugging Face Accelerate keeps its state in dicts of its classes, and a copy of an object would have that of its sender
# for its own: both ranks would be rank 0. Tried with accelerate 1.15.
def _reduce_accelerate(state: Any) -> Any:  # noqa: ANN401 - pickle's own contract
    """Let the new rank make its own `PartialState`; raise `TransferError` for the other states, which know more."""
    match type(state).__name__:
        case "PartialState":
            return _own_partial_state, (bool(state._cpu),)
        case "AcceleratorState" | "GradientState" as name:
            raise TransferError(
                f"{name} of Accelerate belongs to its process; run the cell again that made the Accelerator or Trainer"
            )
    return NotImplemented


def _own_partial_state(cpu: bool) -> Any:  # noqa: ANN401 - accelerate's type
    return importlib.import_module(_ACCELERATE).PartialState(cpu=cpu)


def _renumber_accelerate(rank: int, world_size: int) -> None:
    """Tell Accelerate, if cells use it, the number of ranks, which it reads only once."""
    accelerate = sys.modules.get(_ACCELERATE)
    for name in ("PartialState", "AcceleratorState"):
        shared = getattr(getattr(accelerate, name, None), "_shared_state", None)
        if shared:
            shared.update(num_processes=world_size, process_index=rank)


def _reduce_function(function: types.FunctionType) -> tuple[Any, ...]:
    state = {
        "attributes": vars(function),
        "__kwdefaults__": function.__kwdefaults__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__annotations__": function.__annotations__,
    }
    # A function may refer to itself by its closure: its cells are filled after it has been made.
    make = (function.__code__, function.__name__, function.__defaults__, function.__closure__)
    return _make_function, make, state, None, None, _complete_function


def _make_function(
    code: types.CodeType, name: str, defaults: tuple[Any, ...] | None, cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(code, _namespace, name, defaults, cells)


def _complete_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Set a function's attributes. A second step, as they may refer to the function."""
    function.__dict__.update(state.pop("attributes"))
    for name, value in state.items():
        setattr(function, name, value)


def _contents_of(cell: types.CellType) -> tuple[object, ...]:
    """Return the value of a variable in a closure in a tuple, an empty one if nothing was assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[object, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _is_own_device(device: torch.device) -> bool:
    # Not in a forked child, which only tries whether a value can be pickled.
    return device.type == "cuda" and torch.cuda.is_initialized() and device.index == torch.cuda.current_device()


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random_state() -> bytes:
    """Return the state of the generators of Python, numpy and torch, and of that of the rank's device."""
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
    state = np.random.get_state(legacy=True)  # noqa: NPY002 - user code draws from this state
    return pickle.dumps((random.getstate(), state, torch.get_rng_state().numpy().tobytes(), cuda))


def set_random_state(state: bytes) -> None:
    """Continue with the random numbers of another rank."""
    python, numpy, cpu, cuda = pickle.loads(state)
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(cuda), dtype=torch.uint8))


def seed_from(state: bytes, number: int) -> None:
    """Begin other random numbers than those of `state`, the same ones for the same `number`."""
    seed = int.from_bytes(blake2b(state, digest_size=8, salt=number.to_bytes(8, "little")).digest(), "little")
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed % (1 << 63))


def continue_random(state: bytes, seeded: int | None) -> None:
    """Continue with the random numbers of `state`, or if `seeded` is not None with others, see `EnterWorld`."""
    if not state:
        return
    if seeded is None:
        set_random_state(state)
    else:
        seed_from(state, seeded)


first_seed: int | None = None
"""Seed of torch's generator at the start of the rank, which no other rank has."""


def seeded_random_state() -> bytes:
    """Return the state of the random generators, empty if no code has seeded torch's."""
    return b"" if torch.initial_seed() == first_seed else random_state()


VALUE_SECONDS = 10.0
"""Time limit for pickling one value, in seconds. No tensor data is pickled and nothing is stored."""
_LENGTH = struct.Struct("I")
_NO_CUDA = ("forked subprocess", "initialization error")
"""Parts of the error messages of torch and of CUDA itself when a forked child uses CUDA."""


# Example: the values are a, b, c and d, and pickling b ends the process. The first child answers for a only. So b is at
# fault, and a second child continues with c and d.
def check_pickling(values: Mapping[str, object], reduce: Reduce, *, seconds: float = VALUE_SECONDS) -> dict[str, str]:
    """Return the names of values that cannot be pickled, with the reasons.

    A forked child pickles the values in order. When it dies or spends more than `seconds` on a value, that value is at
    fault, and another child continues with the next one. This process pickles only what needs CUDA, or all if it cannot
    fork.
    """
    problems: dict[str, str] = {}
    names = list(values)
    while names:
        try:
            child = _Child({name: values[name] for name in names}, reduce)
        except OSError:  # no process, descriptor or memory left for a child
            return problems | _check_in_process(names, values, reduce)
        try:
            answers = list(child.answers(len(names), seconds))
        finally:
            # In any case: a child that is left would keep its copy of the rank's memory.
            ending = child.end()
        # The first answer is the empty one with which the child reports that it has begun.
        failed = {name: answer for name, answer in zip(names, answers[1:], strict=False) if answer}
        # A child of a process that has used CUDA cannot use it. These values are tried in this process.
        problems |= {name: text for name, text in failed.items() if not any(each in text for each in _NO_CUDA)}
        problems |= _check_in_process([name for name in failed if name not in problems], values, reduce)
        if not answers:  # a hook of os.register_at_fork ends or stops children
            return problems | _check_in_process(names, values, reduce)
        # What the child has not answered, beginning with the value at which it has stopped.
        names = names[len(answers) - 1 :]
        if names:
            how = ending or f"takes longer than {seconds:g} s"
            problems[names.pop(0)] = f"pickling it {how}"
    return problems


def _check_in_process(names: list[str], values: Mapping[str, object], reduce: Reduce) -> dict[str, str]:
    problems = {name: pickle_error(values[name], name=name, reduce=reduce) for name in names}
    return {name: problem for name, problem in problems.items() if problem}


class _Child:
    """A forked process that pickles `values`.

    It answers per value, with the length of a text, then the text: the problem, or nothing.
    """

    def __init__(self, values: Mapping[str, object], reduce: Reduce) -> None:
        self._read, write = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
                # Of the threads, only the one that forks exists in the child. That suffices for pickling.
                self._pid = os.fork()
        except OSError:
            os.close(self._read)
            os.close(write)
            raise
        if self._pid == 0:
            try:
                _pickle_in_child(values, reduce, write)
            finally:
                os._exit(1)
        os.close(write)

    def answers(self, count: int, seconds: float) -> Iterator[str]:
        """Yield an empty string when the child begins, then its answers.

        Stops early if none arrives within `seconds`.
        """
        received, taken = b"", 0
        deadline = time.monotonic() + seconds
        while taken <= count:
            readable = wait_readable([self._read], max(0.0, deadline - time.monotonic()))
            # An empty read means that the child has closed the pipe, that is, ended.
            chunk = os.read(self._read, 1 << 16) if readable else b""
            if not chunk:
                return
            received += chunk
            while len(received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
                if len(received) < end:
                    break
                yield received[_LENGTH.size : end].decode(errors="replace")
                received, taken = received[end:], taken + 1
                deadline = time.monotonic() + seconds

    def end(self) -> str:
        """Kill the child if it is still running.

        Returns how it ended by itself, or an empty string if it had to be killed.
        """
        os.close(self._read)
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        # The pipe closes a moment before the process has exited.
        deadline = time.monotonic() + 0.2
        while not ended and time.monotonic() < deadline:
            time.sleep(0.002)
            ended, status = os.waitpid(self._pid, os.WNOHANG)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return ""
        code = os.waitstatus_to_exitcode(status)
        return f"ends the process with exit code {code}" if code >= 0 else f"kills the process with signal {-code}"


def _pickle_in_child(values: Mapping[str, object], reduce: Reduce, write: int) -> None:
    """Pickle `values` and write the answers. Runs in the child."""
    own_pid = os.getpid()
    # A value that kills its process group kills only this child.
    os.setpgid(0, 0)
    faulthandler.disable()  # its file belongs to the parent
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    # The output of the check is not part of any cell.
    os.dup2(null, 2)
    torch.set_num_threads(1)  # the parent's threads do not exist in the child
    _answer(write, "")
    for name, value in values.items():
        problem = pickle_error(value, name=name, reduce=reduce)
        if os.getpid() != own_pid:
            os._exit(1)  # the value's own code has forked, and this is that child
        _answer(write, problem or "")
    os._exit(0)


def _answer(write: int, problem: str) -> None:
    text = problem.encode(errors="replace")
    data = _LENGTH.pack(len(text)) + text
    while data:
        data = data[os.write(write, data) :]


# Changes of the number of ranks ---------------------------------------------------------------------------------------


_RUNTIME = "rankbook.runtime.accelerator"
_FSDP_STATES = "torch.distributed._composable_state"
_ASYNC_SAVES = "rankbook.checkpoint.async_save"
_SAVE_TIMEOUT = 60.0
"""Seconds to wait for a background save, whose process group ends with the number of ranks."""
_LARGEST = 1 << 26
"""Bytes of a variable that are compared with other ranks; larger ones count as equal."""
_MOST_ITEMS = 10_000
"""Items of a container that are compared with other ranks; a larger one counts as equal."""


class ResizeCheck(TypedDict):
    """Answer to `CheckResize`.

    `problem`: why the state does not fit the new number of ranks; empty if it does. `size`: the bytes that this rank
    hands over. `digests` of the variables, empty for those that cannot be compared between ranks. `groups`: the
    variables that hold process groups, device meshes or sharded tensors, which belong to the number of ranks before.
    `meshes`: those that all ranks create. `every`: the interval of the protection, 0 without. `steps`: the optimizer
    steps made. `random`: the state of the random generators. `sharing`: the number of ranks that will read the same
    batches, 1 without tensor parallelism.
    """

    problem: str
    size: int
    digests: dict[str, str]
    groups: list[str]
    meshes: tuple[Any, ...]
    every: int
    steps: int
    random: bytes
    sharing: int


def _find_unsendable(namespace: dict[str, Any]) -> str:
    """Return why new ranks cannot get a sharded model: its shards would be lost with the resize. Mostly nothing."""
    from rankbook.runtime.strategies.transfer import sharded_models

    names = {id(value): name for name, value in namespace.items() if isinstance(value, torch.nn.Module)}
    models: dict[str, torch.nn.Module] = {}
    for serial, (_, raw) in sharded_models().items():
        name = names.get(id(raw), type(raw).__name__)
        models[f"{name} ({serial})" if name in models else name] = raw
    if not models:
        return ""
    problems = check_pickling(models, _Reducer(namespace, with_data=False, shards=Shards(handed_over=True)))
    return "; ".join(f"new ranks cannot get the sharded model {name}: {text}" for name, text in problems.items())


def check_resize(namespace: dict[str, Any], hidden: Mapping[str, Any], world_size: int) -> ResizeCheck:
    """Describe this rank for a change to `world_size` ranks. Changes nothing."""
    # Imported here, because it imports hundreds of modules, which most ranks never need.
    from torch.distributed.tensor import DTensor
    from torch.utils import _pytree as pytree

    answer = ResizeCheck(
        problem="",
        size=0,
        digests={},
        groups=[],
        meshes=(),
        every=0,
        steps=0,
        random=random_state(),
        sharing=1,
    )
    save = loaded_module(_ASYNC_SAVES)
    if save is not None and not save.wait_for_saves(_SAVE_TIMEOUT):
        answer["problem"] = f"a background save has not finished within {_SAVE_TIMEOUT:.0f} s; wait for it"
        return answer
    prepared_ids: set[int] = set()
    if _RUNTIME in sys.modules:
        from rankbook.runtime import protection, resize

        answer["problem"] = (
            resize.find_problem(world_size)
            or _find_unmovable(namespace, resize.prepared_modules())
            or ("" if dist.is_initialized() and world_size <= dist.get_world_size() else _find_unsendable(namespace))
        )
        if answer["problem"]:
            return answer
        answer["size"] = resize.bytes_to_hand_over()
        answer["meshes"], answer["sharing"] = resize.fitted_meshes(world_size)
        answer["every"], answer["steps"] = protection.interval(), protection.steps_made()
        prepared_ids = protection.covered()
    elif problem := _find_unmovable(namespace, set()):
        answer["problem"] = problem
        return answer
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or id(value) in prepared_ids:
            continue
        is_searched = isinstance(value, (dict, list, tuple)) and len(value) <= _MOST_ITEMS
        parts = pytree.tree_leaves(value) if is_searched else [value]
        if any(isinstance(part, (RecoverableProcessGroup, DeviceMesh, DTensor)) for part in parts):
            answer["groups"].append(name)
        else:
            # A value that cannot be compared counts as equal, but a rank may have none.
            answer["digests"][name] = digest_of(value) or ""
    return answer


def _find_unmovable(namespace: Mapping[str, Any], prepared_modules: set[int]) -> str:
    """Return which model that is sharded outside of `prepare` would be lost; mostly nothing.

    `prepared_modules` has the ids of the modules that a resize moves.
    """
    from torch.distributed.tensor import DTensor

    remedy = "outside of prepare(): prepare it, or delete it"
    for name, value in namespace.items():
        if not isinstance(value, torch.nn.Module) or not prepared_modules.isdisjoint(map(id, value.modules())):
            continue
        if any(isinstance(parameter, DTensor) for parameter in value.parameters()):
            return f"{name} is sharded {remedy}"
    # Models that are no variables, such as attributes of an object.
    if (states := loaded_module(_FSDP_STATES)) is not None:
        from torch.distributed.fsdp import FSDPModule

        def find() -> str:
            found = (each for each in tuple(states._module_state_mapping) if isinstance(each, FSDPModule))
            return next((type(each).__name__ for each in found if id(each) not in prepared_modules), "")

        if find():
            gc.collect()  # a model that was deleted is a cycle
        if kind := find():
            return f"{kind} is sharded by fully_shard {remedy}"
    return ""


def digest_of(value: object) -> str | None:
    """Return a digest of a number, text, tensor or array, or a container of them; None for other values."""
    hasher = blake2b(digest_size=16)
    try:
        for index, part in enumerate(_parts_of(value)):
            if index > _MOST_ITEMS:
                return None
            hasher.update(part)
    except (TypeError, RuntimeError, RecursionError):  # another type, or data on a device that has failed
        return None
    return hasher.hexdigest()


def _parts_of(value: object) -> Iterator[Any]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        yield f"{kind.__name__} {value!r};".encode(errors="replace")
    elif kind in (list, tuple):
        yield f"{kind.__name__} {len(value)};".encode()  # type: ignore[arg-type]
        for item in value:  # type: ignore[attr-defined]
            yield from _parts_of(item)
    elif kind is dict:
        yield f"dict {len(value)};".encode()  # type: ignore[arg-type]
        for key, item in value.items():  # type: ignore[attr-defined]
            yield from _parts_of(key)
            yield from _parts_of(item)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        tensor = value.detach()  # type: ignore[attr-defined]
        if tensor.nbytes > _LARGEST or tensor.layout is not torch.strided:
            raise TypeError("too large to compare")
        yield f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode()
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        if value.nbytes > _LARGEST or value.dtype.hasobject:  # type: ignore[attr-defined]
            raise TypeError("too large to compare")
        yield f"array {value.dtype} {value.shape};".encode()  # type: ignore[attr-defined]
        yield value.tobytes()
    else:
        raise TypeError("cannot be compared")


def enter_world(namespace: dict[str, Any], hidden: Mapping[str, Any], message: EnterWorld) -> list[str]:
    """Adapt this rank to the number of ranks of the process group, which has been formed. A collective.

    Return what the user has to know about it; mostly nothing.
    """
    world_size = message.world_size
    place = snapshot_files.this_place
    former = place.world_size if place is not None else world_size
    if place is not None:
        snapshot_files.this_place = structs.replace(place, world_size=world_size)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    _renumber_accelerate(dist.get_rank(), world_size)
    # The user's own value stays.
    if "world_size" in hidden and namespace.get("world_size") == former:
        namespace["world_size"] = world_size
    torch.set_num_threads(message.threads)
    for model in model_reset.models_with_reducers():
        model.process_group = c10d._get_default_group()
    _divide_again(former, world_size)
    notes: list[str] = []
    if message.meshes or _RUNTIME in sys.modules:
        from rankbook.runtime import resize

        notes = resize.enter_world(message.meshes)
    continue_random(message.random, message.seeded)
    return notes


def hand_over(folder: str) -> None:
    """Write this rank's shards into `folder`. A collective."""
    from rankbook.runtime import resize

    resize.hand_over(folder)


def take_over(folder: str) -> None:
    """Read this rank's shards from `folder`. A collective."""
    from rankbook.runtime import resize

    resize.take_over(folder)
