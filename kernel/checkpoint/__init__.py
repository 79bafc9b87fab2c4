"""Sharded checkpoints: saved on N ranks, loaded on M, never lost.

Owns: its public names, imported when they are used. Refuses: to know notebooks, cells and clusters.

layout.py         where a shard lies in its global tensor; pure integers
sharded_base.py   what all entries of a sharded state dict have in common
factories.py      entries that are built before saving and merged after loading
mapping.py        the sharding map: which part of which global tensor a local one is
checksums.py      CRC-32 of a chunk, piece by piece, and of the whole from its pieces
manifest.py       what a checkpoint says about itself: every chunk, its place, its checksums
declared.py       what one rank holds, as compact arrays
coverage.py       whether boxes fill a tensor exactly once, and where not
catalog.py        every chunk that is stored, and by which rank
sharing.py        which of a chunk's replicas is stored
plan.py           which rank stores which chunk
storage.py        where files go: a local folder, or whatever fsspec can reach
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankbook.checkpoint.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
        is_main_replica,
    )
    from rankbook.errors import CheckpointingException

_NAMES = {
    "rankbook.checkpoint.mapping": (
        "LocalNonpersistentObject",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
        "apply_factories",
        "apply_factory_merges",
        "is_main_replica",
    ),
    "rankbook.errors": ("CheckpointingException",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankbook.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
