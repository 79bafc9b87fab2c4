"""Training runtime with the API of Hugging Face Accelerate: one script for one device and for many ranks.

The runtime does not depend on notebooks: the same code runs in a Rankbook rank, under torchrun, or in a single process.
Public names are imported when they are first used.

    accelerator.py         Accelerator: prepare and release objects, trackers; recovery after an aborted collective
    settings.py            the Accelerator's constructor and readable settings; mixed precision
    training.py            the Accelerator's training methods: backward, accumulation, clipping, autocast, profiling
    saving.py              the Accelerator's saving methods; numbered checkpoints
    training_checkpoint.py content of a training checkpoint
    model_files.py         model files for other programs (safetensors, torch.save)
    prepare.py             preparation of models, optimizers, loaders and schedulers
    prepared.py            registry of prepared models and of replaced parameters
    collectives.py         gather, broadcast, reduce, pad, and object collectives; the methods of the `Accelerator`
    tree.py                operations on nested containers of tensors
    process_state.py       PartialState: rank, device and process group; splitting of inputs
    state.py               AcceleratorState: PartialState with the settings of training
    gradient_state.py      GradientState and the window of gradient accumulation
    launch_environment.py  environment variables of torchrun, MPI and Slurm
    launched_function.py   run a function with fresh shared state, as notebook_launcher does
    config.py              plugins, handlers, loader and parallelism configuration
    optimizer.py           AcceleratedOptimizer and AcceleratedScheduler
    memory.py              release memory; find a batch size that fits
    logging.py             get_logger and tqdm
    trackers.py            experiment trackers
    data/                  prepared loaders, samplers, dispatcher, random numbers
    strategies/            DDP, FSDP2 and tensor parallelism
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from rankbook.runtime.accelerator import Accelerator
    from rankbook.runtime.collectives import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        trim,
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
    from rankbook.runtime.data.loaders import (
        DataLoaderDispatcher,
        DataLoaderShard,
        SkipDataLoader,
        prepare_data_loader,
        skip_first_batches,
    )
    from rankbook.runtime.data.rng import set_seed, synchronize_rng_states
    from rankbook.runtime.data.samplers import (
        BatchSamplerShard,
        IterableDatasetShard,
        SeedableRandomSampler,
        SkipBatchSampler,
    )
    from rankbook.runtime.data.seen import SeenSamples
    from rankbook.runtime.gradient_state import GradientState
    from rankbook.runtime.logging import get_logger, tqdm
    from rankbook.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
    from rankbook.runtime.optimizer import AcceleratedOptimizer, AcceleratedScheduler
    from rankbook.runtime.process_state import DistributedType, PartialState
    from rankbook.runtime.state import AcceleratorState
    from rankbook.runtime.trackers import (
        GeneralTracker,
        JSONLinesTracker,
        MLflowTracker,
        TensorBoardTracker,
        Tracker,
        WandBTracker,
        filter_trackers,
    )
    from rankbook.runtime.tree import (
        concatenate,
        convert_to_fp32,
        find_batch_size,
        honor_type,
        recursively_apply,
        send_to_device,
        slice_tensors,
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
    "MLflowTracker",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "SeedableRandomSampler",
    "SeenSamples",
    "SkipBatchSampler",
    "SkipDataLoader",
    "TensorBoardTracker",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "Tracker",
    "WandBTracker",
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
        "rankbook.runtime.data.loaders": (
            "DataLoaderDispatcher",
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
        "rankbook.runtime.data.seen": ("SeenSamples",),
        "rankbook.runtime.data.rng": (
            "set_seed",
            "synchronize_rng_states",
        ),
        "rankbook.runtime.collectives": (
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
            "MLflowTracker",
            "TensorBoardTracker",
            "Tracker",
            "WandBTracker",
            "filter_trackers",
        ),
        "rankbook.runtime.tree": (
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
