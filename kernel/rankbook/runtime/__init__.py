"""The shared-state runtime: one training script for one device and for many.

Owns: its public names, imported when they are used. Refuses: to know notebooks, cells and clusters; the same code runs
under torchrun, or alone.

environment.py     which setup this process is part of, read from what its launcher set
process_state.py   PartialState: this process among the others, its device, its turn
gradient_state.py  GradientState: accumulation, and which loader is being read
state.py           AcceleratorState: PartialState with the settings of training
splitting.py       one process's share of a list, a dict or a tensor
tree.py            nested containers of tensors: apply, move, concatenate, describe
packing.py         small tensors that travel together
agreement.py       all ranks learn that one of them cannot go on
collectives.py     gather, broadcast, reduce and pad, over such containers
memory.py          what holds memory let go; a batch size that fits on every rank
logs.py            a logger that knows its rank
progress.py        tqdm on one process
trackers.py        where metrics go
options.py         plugins and handlers
parallelism.py     how the ranks are divided
precision.py       bf16 and fp16: autocast, the scaler, a prepared model's forward
strategies/        how a model is spread over the ranks, one class for each way
prepare/           one module for each kind of object that is prepared
optimizer.py       an optimizer that acts when gradients sync
scheduler.py       a scheduler that steps with its optimizers
accumulation.py    which batches make one optimizer step
clipping.py        gradients within bounds, over shards too
core.py            what an Accelerator is set to
training.py        its steps of training
communication.py   its collectives, and metrics over uneven data
saved_state.py     parts of its state, and folders of checkpoints
checkpoints.py     what a checkpoint of it holds
model_files.py     a model in files that other programs read
saving.py          its checkpoints
tracking.py        its trackers
recovery.py        what begins anew after a collective was broken off
accelerator.py     the Accelerator
streams.py         random numbers of prepared loaders: every batch has its own seed
seeding.py         one seed for a run; the same random state on all ranks
samplers.py        which rank gets which samples
tickets.py         what is to be read in one pass over the data
fetch.py           reads one batch, in a worker or here
position.py        where a loader is, and how a fresh process continues there
reader_state.py    what torchdata's loader keeps of its dataset
loader_options.py  DataLoaderConfiguration
loader_base.py     what every prepared loader does
lent.py            memory for what arrives, lent again once it is free
slots.py           shared memory between two ranks of one host
parcels.py         batches on their way from one rank to another
collating.py       puts a batch together where it is to lie
lanes.py           the ways between rank 0, which reads, and the others
dispatcher.py      DataLoaderDispatcher: rank 0 reads for all ranks
loaders.py         DataLoaderShard: each rank reads its own part; prepare_data_loader
skipping.py        a loader without its first batches
trim.py            from what all ranks gathered to the dataset's own samples
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from rankbook.runtime.accelerator import Accelerator
    from rankbook.runtime.comm.collectives import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        trim,
    )
    from rankbook.runtime.comm.tree import (
        concatenate,
        convert_to_fp32,
        find_batch_size,
        honor_type,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )
    from rankbook.runtime.config import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
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
    )
    from rankbook.runtime.data.dispatcher import DataLoaderDispatcher
    from rankbook.runtime.data.loaders import DataLoaderShard, SkipDataLoader, prepare_data_loader, skip_first_batches
    from rankbook.runtime.data.rng import set_seed, synchronize_rng_states
    from rankbook.runtime.data.samplers import (
        BatchSamplerShard,
        IterableDatasetShard,
        SeedableRandomSampler,
        SkipBatchSampler,
    )
    from rankbook.runtime.gradient_state import GradientState
    from rankbook.runtime.logging import get_logger, tqdm
    from rankbook.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
    from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
    from rankbook.runtime.process_state import DistributedType, PartialState
    from rankbook.runtime.state import AcceleratorState
    from rankbook.runtime.trackers import (
        GeneralTracker,
        JSONLinesTracker,
        TensorBoardTracker,
        Tracker,
        filter_trackers,
    )

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "BatchSamplerShard",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "IterableDatasetShard",
    "JSONLinesTracker",
    "KwargsHandler",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "TensorBoardTracker",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "Tracker",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "convert_to_fp32",
    "filter_trackers",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "honor_type",
    "pad_across_processes",
    "prepare_data_loader",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_states",
    "tqdm",
    "trim",
]

__getattr__, __dir__ = lazy_imports(
    __name__,
    {
        "rankbook.runtime.accelerator": ("Accelerator",),
        "rankbook.runtime.optimizer": (
            "AcceleratedOptimizer",
            "AcceleratedScheduler",
        ),
        "rankbook.runtime.config": (
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DataLoaderConfiguration",
            "DistributedDataParallelKwargs",
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
        ),
        "rankbook.runtime.data.dispatcher": ("DataLoaderDispatcher",),
        "rankbook.runtime.data.loaders": (
            "DataLoaderShard",
            "SkipDataLoader",
            "prepare_data_loader",
            "skip_first_batches",
        ),
        "rankbook.runtime.data.samplers": (
            "BatchSamplerShard",
            "IterableDatasetShard",
            "SeedableRandomSampler",
            "SkipBatchSampler",
        ),
        "rankbook.runtime.data.rng": (
            "set_seed",
            "synchronize_rng_states",
        ),
        "rankbook.runtime.comm.collectives": (
            "broadcast",
            "broadcast_object_list",
            "gather",
            "gather_object",
            "pad_across_processes",
            "reduce",
            "trim",
        ),
        "rankbook.runtime.gradient_state": ("GradientState",),
        "rankbook.runtime.logging": (
            "get_logger",
            "tqdm",
        ),
        "rankbook.runtime.memory": (
            "clear_device_cache",
            "find_executable_batch_size",
            "release_memory",
        ),
        "rankbook.runtime.process_state": (
            "DistributedType",
            "PartialState",
        ),
        "rankbook.runtime.state": ("AcceleratorState",),
        "rankbook.runtime.trackers": (
            "GeneralTracker",
            "JSONLinesTracker",
            "TensorBoardTracker",
            "Tracker",
            "filter_trackers",
        ),
        "rankbook.runtime.comm.tree": (
            "concatenate",
            "convert_to_fp32",
            "find_batch_size",
            "honor_type",
            "recursively_apply",
            "send_to_device",
            "slice_tensors",
        ),
    },
)
