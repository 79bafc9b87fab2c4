"""Sharded checkpoints: saved on N ranks, loaded on M, never lost.

Owns: its public names, imported when they are used. Refuses: to know notebooks, cells and clusters.

The map:
layout.py         where a shard lies in its global tensor; pure integers
mapping.py        the sharding map: which part of which global tensor a local one is
dtensors.py       a tensor or DTensor as an entry of the map, and back
replicas.py       which of several copies is the main one
state_dicts.py    sharded state dicts, taken apart and put together again
models.py         the map of models and their optimizers
The plan:
declared.py       what one rank holds, as compact arrays
coverage.py       whether boxes fill a tensor exactly once, and where not
catalog.py        every chunk that is stored, and by which rank
plan.py           which rank stores which chunk
reading.py        which bytes of which file go where
strictness.py     what becomes of keys that only one side knows
On disk:
stores.py         what a storage is: five methods between a checkpoint and the place it lies in
storage.py        where files go: the local storage, and which one a folder means
remote.py         storages that fsspec can reach
checksums.py      CRC-32 of a chunk, piece by piece, and of the whole from its pieces
manifest.py       what a checkpoint says about itself: every chunk, its place, its checksums
structure.py      whether a manifest makes sense: indices, extents, strides
owners.py         which process is at a save
folders.py        a folder of steps: which is the latest, what is finished, what was broken off
zips.py           where the data lies in a file of torch.save
opcodes.py        a pickle's instructions, looked through before an unpickler gets them
pickles.py        checkpoints that other programs wrote, read without running what their pickles name
checking.py       the bytes of one chunk or object against their checksums
verifying.py      every byte of a checkpoint, checked
describe.py       what a checkpoint has, in words
safetensors.py    files of safetensors: the header of written ones, the tensors of read ones
convert.py        a checkpoint to and from safetensors
Saving and loading:
contents.py       what one rank holds or asks for
blobs.py          a chunk as the bytes that torch.load reads
telling.py        how far a save is, for whoever looks
writing.py        one rank's part in a save: declaration, file, and on rank 0 plan and description
agreement.py      collectives that propagate errors, and the check that arguments agree
async_save.py     saving while training goes on
saving.py         save: plan, write, commit
transfer.py       bytes of stored chunks into tensors, checked
fetch.py          what a rank has planned to read: verified, then read
loading.py        load, load_plain, load_metadata
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from rankbook.checkpoint.async_save import SaveHandle
    from rankbook.checkpoint.loading import StrictHandling, load, load_metadata, load_plain
    from rankbook.checkpoint.saving import Saved, save
    from rankbook.checkpoint.state_dict.models import load_sharded_state_dict, sharded_state_dict
    from rankbook.checkpoint.state_dict.sharded_tensor import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
        is_main_replica,
    )
    from rankbook.checkpoint.storage.steps import remove, steps
    from rankbook.checkpoint.tools.verify import Report, verify
    from rankbook.errors import CheckpointingException

__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "Report",
    "SaveHandle",
    "Saved",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
    "load",
    "load_metadata",
    "load_plain",
    "load_sharded_state_dict",
    "remove",
    "save",
    "sharded_state_dict",
    "steps",
    "verify",
]

__getattr__, __dir__ = lazy_imports(
    __name__,
    {
        "rankbook.checkpoint.async_save": ("SaveHandle",),
        "rankbook.checkpoint.storage.steps": (
            "remove",
            "steps",
        ),
        "rankbook.checkpoint.loading": (
            "StrictHandling",
            "load",
            "load_metadata",
            "load_plain",
        ),
        "rankbook.checkpoint.state_dict.sharded_tensor": (
            "LocalNonpersistentObject",
            "ShardedObject",
            "ShardedTensor",
            "ShardedTensorFactory",
            "apply_factories",
            "apply_factory_merges",
            "is_main_replica",
        ),
        "rankbook.checkpoint.state_dict.models": (
            "load_sharded_state_dict",
            "sharded_state_dict",
        ),
        "rankbook.checkpoint.saving": (
            "Saved",
            "save",
        ),
        "rankbook.checkpoint.tools.verify": (
            "Report",
            "verify",
        ),
        "rankbook.errors": ("CheckpointingException",),
    },
)
