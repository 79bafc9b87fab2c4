"""Device meshes, made once and kept.

Owns: which meshes there are: making one anew for each `prepare` would leave process groups behind. Refuses: to decide
what a mesh is for.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_meshes: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[object, DeviceMesh]] = {}


def mesh_for(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these axes, outermost first. A collective, the first time.

    One that was made over another default group is made anew.
    """
    if not dist.is_initialized():
        _make_alone()
    world = dist.group.WORLD
    key = (device_type, tuple(sizes.items()))
    found = _meshes.get(key)
    if found is None or found[0] is not world:
        for stale in [each for each, (group, _) in _meshes.items() if group is not world]:
            del _meshes[stale]
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _meshes[key] = found = (world, mesh)
    return found[1]


def _make_alone() -> None:
    """A group of this process alone: shards want a mesh, and a mesh a group, also where there is one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
