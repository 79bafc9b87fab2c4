"""Torch's tensors as shards of the map, and back.

Owns: where the local part of a DTensor lies in the global one, and how many copies of it there are. Refuses: to move
data; a shard is the same memory.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from rankbook.checkpoint.state_dict import layout
from rankbook.checkpoint.state_dict.replicas import Copy, this_rank
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor
from rankbook.errors import CheckpointingException


def copy_of(key: str, tensor: torch.Tensor, together: str | None = None) -> Copy | None:
    """A tensor as a shard, with the ranks that hold copies; None where this rank is not part of a DTensor's mesh.

    A plain tensor is a copy of the whole. Raises `CheckpointingException` for a DTensor with a partial placement, or
    whose local part is not one box of the global tensor, and for a tensor that is sparse, nested or quantized.
    """
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        raise CheckpointingException(
            f"{key!r} is a {kind.removeprefix('torch.')} tensor, on rank {this_rank()}: a checkpoint has boxes of "
            "numbers; store its parts, as plain tensors, or all of it as a ShardedObject"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if not isinstance(tensor, DTensor):
        return Copy(ShardedTensor.from_rank_offsets(key, tensor.detach()), (this_rank(),), 0, 1, nbytes, together)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes = tuple(mesh.mesh.shape)
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    index, count = 0, 1
    for placement, size, at in zip(tensor.placements, sizes, coordinate, strict=True):
        if placement.is_replicate():
            index, count = index * size + at, count * size
        elif (dim := getattr(placement, "dim", None)) is not None and not placement.is_partial():
            cuts.setdefault(dim % tensor.ndim, []).append((int(getattr(placement, "split_factor", 1)), size, at))
        else:
            raise CheckpointingException(
                f"{key!r} is a DTensor with the placement {placement}, on rank {this_rank()}: no rank holds its "
                "values; redistribute it first"
            )
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for dim, steps in cuts.items():
        found = layout.run_of_cuts(tensor.shape[dim], steps)
        if found is None:
            raise CheckpointingException(
                f"{key!r} is a DTensor with the placements {tensor.placements}: what rank {this_rank()} holds of its "
                f"dim {dim} does not lie together; redistribute it first"
            )
        offset[dim], shape[dim] = found
    local = local_part(tensor)
    shard = ShardedTensor(
        key,
        local,
        local.dtype,
        tuple(shape),
        tuple(tensor.shape),
        tuple(offset),
        None if cuts else (1,) * tensor.ndim,
    )
    return Copy(shard, tuple(mesh.mesh.flatten().tolist()), index, count, nbytes, together)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, or the tensor itself, without its gradient's graph."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def like(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A local part as what `tensor` is: a DTensor of its mesh and placements, on the local part's memory, or itself.

    A DTensor stays as it is. Raises `CheckpointingException` for a local part of another shape.
    """
    if isinstance(local, DTensor):
        return local
    own = local_part(tensor)
    if local.shape != own.shape:
        raise CheckpointingException(
            f"a part of the shape {tuple(local.shape)} was loaded for one of {tuple(own.shape)}, on rank {this_rank()}"
        )
    if not isinstance(tensor, DTensor):
        return local
    if local.dtype == own.dtype and (local.data_ptr() == own.data_ptr() or not own.numel()):
        return tensor
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
