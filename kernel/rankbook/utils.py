"""Names of `accelerate.utils`: collectives over containers, plugins and handlers, random seeds, memory.

They are those of `rankbook.runtime`. The import of another name of Accelerate raises an ImportError that says what to
use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.accelerate_names import reexport

if TYPE_CHECKING:
    from rankbook.runtime import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        DynamoBackend,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        KwargsHandler,
        ParallelismConfig,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
        TorchTensorParallelConfig,
        broadcast,
        broadcast_object_list,
        clear_device_cache,
        concatenate,
        convert_to_fp32,
        find_batch_size,
        find_executable_batch_size,
        gather,
        gather_object,
        honor_type,
        pad_across_processes,
        recursively_apply,
        reduce,
        release_memory,
        send_to_device,
        set_seed,
        slice_tensors,
        synchronize_rng_states,
        tqdm,
    )

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_states",
    "tqdm",
]

__getattr__, __dir__ = reexport(__name__, __all__)
