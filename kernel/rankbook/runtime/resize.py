"""Change of the number of ranks: adapt the prepared objects of this rank, and move the shards of models.

The order of events, on every rank that stays (rank/recovery.py, coordinator/resize.py):

1. `find_problem` looks whether the objects fit the new number of ranks. Nothing has changed yet.
2. `hand_over`, on all ranks before the change: the shards of models and of their optimizers are saved in a folder of
   the cluster's shared memory, as a checkpoint. Replicated models need no such step: every rank has all of them.
3. `enter_world`, when the process group has the new number of ranks. Shards are replaced by empty ones of the new
   layout. Modules, optimizers, schedulers and loaders stay the same objects; sharded parameters are new ones.
4. New ranks receive the objects of another rank.
5. `take_over`, on all ranks after the change: the shards are loaded from the folder, by the plan with which a
   checkpoint is loaded on another number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from rankbook.checkpoint.loading import load, load_metadata, prepare_load
from rankbook.checkpoint.local_state import local_state_of
from rankbook.checkpoint.saving import save_aside
from rankbook.checkpoint.state_dict.models import clean_name, load_sharded_state_dicts, sharded_state_dicts
from rankbook.checkpoint.state_dict.state_dicts import local_part
from rankbook.checkpoint.storage.backends import LocalStorage
from rankbook.checkpoint.storage.steps import CheckpointLocation
from rankbook.errors import InvalidArgument
from rankbook.formatting import plural
from rankbook.runtime import prepared, protection
from rankbook.runtime.accelerator import restart_accumulation
from rankbook.runtime.config import ParallelismConfig
from rankbook.runtime.data.loader_base import PreparedLoader
from rankbook.runtime.data.loaders import prepare_again
from rankbook.runtime.data.samplers import per_rank_batch_size
from rankbook.runtime.gradient_state import window
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.process_state import DistributedType, PartialState
from rankbook.runtime.state import AcceleratorState
from rankbook.runtime.strategies.base import SingleDevice, Strategy, mesh_for
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel
from rankbook.runtime.strategies.transfer import shard_again, sharded_models

_NAME = "state"
"""Name of the checkpoint in the folder of a resize."""

MeshSizes = tuple[str, tuple[tuple[str, int], ...]]
"""Type of the devices of a mesh, and the names and sizes of its axes."""


def find_problem(world_size: int) -> str:
    """Return why the prepared objects do not fit `world_size` ranks, with the arithmetic; mostly nothing."""
    try:
        for strategy, wrapped in prepared.prepared_models():
            _check_model(strategy, wrapped, world_size)
        for _, raw in sharded_models().values():
            _check_state_dict(raw)
        for loader in prepared.registered("loader").values():
            _check_loader(loader, world_size)
        for item in prepared.registered("custom").values():
            _check_registered(item, world_size)
        if (config := _parallelism()) is not None:
            config.fitted_to(world_size)
    except InvalidArgument as error:
        return str(error)
    return ""


def _parallelism() -> ParallelismConfig | None:
    return AcceleratorState().parallelism_config if AcceleratorState._shared_state else None


def _check_model(strategy: Strategy, wrapped: nn.Module, world_size: int) -> None:
    if isinstance(strategy, SingleDevice) and world_size > 1:
        raise InvalidArgument(
            f"{type(wrapped).__name__} was prepared for one rank, and is not wrapped for several: start with at least "
            "two ranks, or prepare it with a FullyShardedDataParallelPlugin"
        )
    if strategy.setup.parallelism is not None:
        strategy.setup.parallelism.fitted_to(world_size)


def _check_state_dict(raw: nn.Module) -> None:
    stored = {clean_name(raw, name) for name in raw.state_dict()}
    names = (clean_name(raw, name) for name, item in raw.named_parameters() if isinstance(item, DTensor))
    if missing := [name for name in names if name not in stored]:
        raise InvalidArgument(
            f"the state_dict() of {prepared.own_class_name(raw)} leaves out {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}, whose shards would be lost: remove the hook or the method "
            "that leaves them out"
        )


def _check_loader(loader: Any, world_size: int) -> None:  # noqa: ANN401 - any loader
    if not isinstance(loader, PreparedLoader) or not (loader.parts.options or {}).get("split_batches"):
        return
    config = _parallelism()
    ranks = world_size if config is None else config.fitted_to(world_size).data_parallel_size
    per_rank_batch_size(loader.batch_size or 0, ranks, split_batches=True)


def _check_registered(item: Any, world_size: int) -> None:  # noqa: ANN401 - any object with a state
    state = item.state_dict()
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(state)):
        raise InvalidArgument(
            f"the registered {type(item).__name__} has sharded tensors, which only a checkpoint moves: call "
            f"save_state(), start with {plural(world_size, 'rank')}, and load_state()"
        )


def prepared_modules() -> set[int]:
    """Return the ids of all modules of prepared models, which a resize moves."""
    return {id(module) for _, raw in prepared.current_models().values() for module in raw.modules()}


# Handing over ---------------------------------------------------------------------------------------------------------


def _sharded_optimizers() -> dict[int, AcceleratedOptimizer]:
    owned = {id(parameter) for _, raw in sharded_models().values() for parameter in raw.parameters()}
    return {
        serial: wrapper
        for serial, wrapper in prepared.registered("optimizer").items()
        if any(id(parameter) in owned for group in wrapper.param_groups for parameter in group["params"])
    }


def bytes_to_hand_over() -> int:
    """Return this rank's part of the bytes that `hand_over` writes: of several replicas, those of the first one."""
    for strategy, raw in sharded_models().values():
        strategy.restore_parameters(raw)
    # Tensors, and the ones whose layout they have.
    tensors = [
        (tensor, tensor) for _, raw in sharded_models().values() for tensor in (*raw.parameters(), *raw.buffers())
    ]
    for wrapper in _sharded_optimizers().values():
        for parameter, values in wrapper.state.items():
            # Numbers may be under a name. A plain tensor may be the state of a shard.
            for value in values.values() if isinstance(parameter, torch.Tensor) else ():
                if isinstance(value, torch.Tensor):
                    is_shard = value.dim() > 0 and value.shape == local_part(parameter).shape
                    tensors.append((value, parameter if is_shard and not isinstance(value, DTensor) else value))
    return sum(local_part(tensor).nbytes for tensor, placed in tensors if _is_first_replica(placed))


def _is_first_replica(tensor: torch.Tensor) -> bool:
    """Return True if this rank has a part of the first replica of a tensor. Any one replica is saved."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    # Other meshes have the same parameters, such as those outside a tensor-parallel plan.
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return False
    return all(
        not placement.is_replicate() or at == 0 for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


def _parts() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    models = {f"model_{serial}": raw for serial, (_, raw) in sharded_models().items()}
    optimizers: dict[str, torch.optim.Optimizer] = {
        f"optimizer_{serial}": wrapper for serial, wrapper in _sharded_optimizers().items()
    }
    return models, optimizers


def hand_over(folder: str) -> None:
    """Save the shards of all models and their optimizers in `folder`. A collective."""
    for strategy, raw in sharded_models().values():
        strategy.restore_parameters(raw)
    location = CheckpointLocation(LocalStorage(Path(folder)), folder, name=_NAME)
    save_aside(local_state_of(sharded_state_dicts(*_parts())), location)


def take_over(folder: str) -> None:
    """Load the shards of all models and their optimizers from `folder`. A collective."""
    from rankbook.runtime.training_checkpoint import select_stored

    models, optimizers = _parts()
    checkpoint = f"{folder}/{_NAME}"
    # Written some moments ago into memory, by these processes: there is nothing to verify. A load of nothing returns
    # the common part.
    common = load({}, checkpoint, verify=False)
    requested = sharded_state_dicts(models, optimizers)
    requested = select_stored(requested, load_metadata(checkpoint), common, folder, strict=True)
    loaded = prepare_load(requested, checkpoint, verify=False).fill()
    load_sharded_state_dicts(models, optimizers, loaded)


# Entering another world -----------------------------------------------------------------------------------------------


def fitted_meshes(world_size: int) -> tuple[tuple[MeshSizes, ...], int]:
    """Return the meshes that the prepared objects need on `world_size` ranks, and how many ranks share a batch."""
    meshes: dict[MeshSizes, None] = {}
    for strategy, _ in sharded_models().values():
        axes = _fitted(strategy, world_size).axes
        meshes[strategy.setup.device.type, tuple(axes.items())] = None
    config = _parallelism()
    sharing = 1 if config is None else config.non_data_parallel_size
    if config is not None and sharing > 1:
        meshes[PartialState().device.type, tuple(config.fitted_to(world_size).sizes.items())] = None
    return tuple(meshes), sharing


def create_meshes(meshes: tuple[MeshSizes, ...]) -> None:
    """Create the meshes, in the same order on all ranks. A collective."""
    for device_type, sizes in meshes:
        mesh_for(device_type, dict(sizes))


def _fitted(strategy: FullyShardedDataParallel, world_size: int) -> FullyShardedDataParallel:
    kind = type(strategy)
    parallelism = strategy.setup.parallelism
    fitted = None if parallelism is None else parallelism.fitted_to(world_size)
    return kind(replace(strategy.setup, num_processes=world_size, parallelism=fitted))


def enter_world(meshes: tuple[MeshSizes, ...]) -> list[str]:
    """Adapt the prepared objects to the ranks of the default process group. A collective.

    Return what the user has to know: the loaders that cannot continue in the middle of their epoch.
    """
    process, world_size = PartialState._shared_state, dist.get_world_size()
    if process:
        several = DistributedType.MULTI_CPU if process["device"].type == "cpu" else DistributedType.MULTI_GPU
        process["num_processes"] = world_size
        process["distributed_type"] = several if world_size > 1 else DistributedType.NO
        process["backend"] = str(dist.get_backend()) if world_size > 1 else None
    create_meshes(meshes)
    if AcceleratorState._shared_state and (config := AcceleratorState().parallelism_config) is not None:
        AcceleratorState().parallelism_config = config.fitted_to(world_size)
    protection.end()  # its snapshots are those of another number of ranks
    # Gradients that were accumulated before belong to a window of other batches.
    window.drop_gradients()
    for strategy in _strategies():
        parallelism = strategy.setup.parallelism
        strategy.setup = replace(
            strategy.setup,
            num_processes=world_size,
            process_index=dist.get_rank(),
            parallelism=None if parallelism is None else parallelism.fitted_to(world_size),
        )
    _shard_again()
    restart_accumulation()
    _renew_signatures()
    mesh = _loader_mesh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loader in prepared.registered("loader").values():
            if isinstance(loader, PreparedLoader):
                prepare_again(loader, mesh)
    for scheduler in prepared.registered("scheduler").values():
        scheduler.set_num_processes(world_size if mesh is None else _data_parallel_size())
    return [str(warning.message) for warning in caught]


def _strategies() -> Iterator[Strategy]:
    """Yield the strategies of all prepared models, each once."""
    found = {id(strategy): strategy for strategy, _ in prepared.prepared_models()}
    yield from found.values()


def _data_parallel_size() -> int:
    config = _parallelism()
    assert config is not None
    return config.data_parallel_size


def _loader_mesh() -> Any:  # noqa: ANN401 - a DeviceMesh or None
    """Return the mesh for loaders; None if no two ranks read the same batches."""
    config = _parallelism()
    if config is None or config.data_parallel_size == config.total_size:
        return None
    return mesh_for(PartialState().device.type, config.sizes)


def _shard_again() -> None:
    """Replace the shards of all models by empty ones of the new layout, also in their optimizers."""
    optimizers = _sharded_optimizers().values()
    for strategy, raw in sharded_models().values():
        for wrapper in optimizers:
            _forget_state(wrapper, raw)
        with prepared.track_replaced_parameters(raw):
            shard_again(raw, strategy)
        for wrapper in optimizers:
            for group in wrapper.param_groups:
                group["params"] = [prepared.replacement_of(parameter) for parameter in group["params"]]


def _forget_state(wrapper: AcceleratedOptimizer, raw: nn.Module) -> None:
    # It is loaded with the shards.
    for parameter in raw.parameters():
        if isinstance(parameter, DTensor):
            wrapper.state.pop(parameter, None)


def _renew_signatures() -> None:
    """Make `prepare` recognize the models as prepared with the current settings."""
    for _, wrapped in prepared.prepared_models():
        raw = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        preparation = prepared.prepared_model_of(raw)
        if preparation is not None:
            parameters = tuple((id(parameter), parameter.requires_grad) for parameter in raw.parameters())
            preparation.signature = (preparation.strategy.signature, *preparation.signature[1:-1], parameters)
