"""Names of `accelerate.data_loader`: prepared loaders and their samplers.

They are those of `rankbook.runtime`. The import of another name of Accelerate raises an ImportError that says what to
use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.accelerate_names import reexport

if TYPE_CHECKING:
    from rankbook.runtime import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        DataLoaderShard,
        IterableDatasetShard,
        SeedableRandomSampler,
        SkipBatchSampler,
        SkipDataLoader,
        broadcast,
        broadcast_object_list,
        concatenate,
        find_batch_size,
        prepare_data_loader,
        send_to_device,
        skip_first_batches,
        slice_tensors,
        synchronize_rng_states,
    )

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "find_batch_size",
    "prepare_data_loader",
    "send_to_device",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_states",
]

__getattr__, __dir__ = reexport(__name__, __all__)
