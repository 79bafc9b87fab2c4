"""Save and load sharded checkpoints: save on N ranks, load on M.

The public names are imported on first use. The modules are:

Saving and loading (collectives):

    saving.py        `save`: plan, write and commit; the theory of operation of the commit
    async_save.py    copy the data and save it in a background thread; `SaveHandle`; progress reports
    loading.py       `load`, `load_plain`, `load_metadata`: find, plan, verify and fill
    local_state.py   one rank's part of a state dict, for saving and loading

Plans, pure data:

    local_plan.py    one rank's declaration of its chunks, as compact arrays; do chunks cover a tensor exactly once?
    save_plan.py     which rank writes which chunk
    load_plan.py     which bytes of which file are read into which slice

Offline tools:

    inspection.py    describe a checkpoint or a folder; compare every byte with its checksum
    conversion.py    convert to and from safetensors

state_dict/, from models to shards:

    sharded_tensor.py   `ShardedTensor`, `ShardedObject`, factories
    state_dicts.py      take sharded state dicts apart and assemble them; DTensors; choice of replicas
    models.py           sharded state dicts of models and optimizers
    layout.py           position of a shard in its global tensor, and of its bytes in a file

format/, the files of a checkpoint:

    manifest.py         `manifest.json`: chunks with their positions and checksums, and its validation; CRC-32
    tensor_io.py        write tensors as `torch.save` does; read stored chunks into tensors and verify them
    torch_zip.py        the zip format of `torch.save`; the check of a pickle before it is read
    dcp_metadata.py     checkpoints of torch.distributed.checkpoint
    safetensors.py      the safetensors format

storage/, the `Storage` protocol and its implementations:

    backends.py   local and mounted folders; object stores and other file systems of fsspec
    steps.py      a folder of steps: claim, commit, latest, sweep, retention
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from rankbook.checkpoint.async_save import SaveHandle
    from rankbook.checkpoint.inspection import Report, verify
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
    from rankbook.errors import CheckpointError, CheckpointingException

__all__ = [
    "CheckpointError",
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
        "rankbook.checkpoint.inspection": (
            "Report",
            "verify",
        ),
        "rankbook.errors": ("CheckpointError", "CheckpointingException"),
    },
)
