"""Names of Accelerate: re-export those that Rankbook has, and say what to use instead of the others.

The modules utils.py, state.py, data_loader.py, logging.py and tracking.py have the names that these modules have in
Accelerate, so that the word `accelerate` can be replaced by `rankbook` in imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rankbook.lazy_imports import lazy_imports

# From the advice to the names, because many names have the same advice. `_instead` is the reverse.
_INSTEAD = {
    "FullyShardedDataParallelPlugin() as fsdp_plugin of the Accelerator, which shards all states": (
        "DeepSpeedPlugin DeepSpeedSequenceParallelConfig GatheredParameters compile_regions_deepspeed "
        "deepspeed_required prepare_deepspeed_cmd_env"
    ),
    "ParallelismConfig(tp_size=..., dp_shard_size=...)": (
        "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler "
        "MegatronLMPlugin TorchContextParallelConfig TorchTensorParallelPlugin add_model_config_to_megatron_parser "
        "avg_losses_across_data_parallel_group get_model_tp_size prepare_pippy"
    ),
    "Accelerator.prepare(model) with a FullyShardedDataParallelPlugin": (
        "apply_fp8_autowrap disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler compile_regions_fsdp2"
    ),
    "Accelerator.save_state() and load_state(), or rankbook.checkpoint.save and load": (
        "fsdp2_load_full_state_dict load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model "
        "save_fsdp_optimizer load_state_dict MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME "
        "SCHEDULER_NAME"
    ),
    "Accelerator.save() and save_model()": (
        "save clean_state_dict_for_safetensors SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME "
        "SAFE_WEIGHTS_PATTERN_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME"
    ),
    'Accelerator(mixed_precision="bf16"); fp8 is not supported': (
        "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs contextual_fp8_autocast convert_model "
        "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers "
        "check_cuda_fp8_capability torchao_required"
    ),
    "Accelerator.autocast() and scaler": "get_grad_scaler get_mixed_precision_context_manager",
    "convert_to_fp32": "convert_outputs_to_fp32",
    "Accelerator.unwrap_model(model)": "extract_model_from_parallel",
    "PartialState().wait_for_everyone()": "wait_for_everyone",
    "PartialState().initialized": "is_initialized",
    "synchronize_rng_states([name])": "synchronize_rng_state",
    "names of generators as strings, such as rng_types=['torch']": "RNGType",
    "names as strings, such as mixed_precision='bf16' and log_with='tensorboard'": "PrecisionType LoggerType",
    "Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True))": (
        "compile_regions has_compiled_regions is_compiled_module"
    ),
    "DataLoaderShard": "DataLoaderAdapter DataLoaderStateMixin",
    "get_logger": "MultiProcessAdapter",
    "GeneralTracker() as the base class of a tracker of your own": (
        "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker TrackioTracker"
    ),
    "the optimizer and the scheduler themselves": "DummyOptim DummyScheduler",
    "Accelerator.no_sync(model), and Accelerator.reduce(parameter.data, 'mean') of all parameters every few steps": (
        "LocalSGD"
    ),
    "the attribute `sampler` of the loader's batch_sampler": "get_sampler",
    "notebook_launcher, or %%distributed in a notebook": (
        "PrepareForLaunch prepare_multi_gpu_env prepare_simple_launcher_cmd_env prepare_tpu "
        "prepare_sagemager_args_inputs write_basic_config TORCH_LAUNCH_PARAMS ComputeEnvironment"
    ),
    "Hugging Face transformers, which loads quantized models": (
        "BnbQuantizationConfig load_and_quantize_model has_4bit_bnb_layers"
    ),
    "sharding over ranks (FullyShardedDataParallelPlugin); offloading to the CPU or the disk is not supported": (
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map init_empty_weights "
        "init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model OffloadedWeightsLoader PrefixedDataset "
        "align_module_device check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device "
        "compute_module_sizes extract_submodules_state_dict find_tied_parameters get_balanced_memory "
        "get_max_layer_size get_max_memory has_offloaded_params load_offloaded_weight load_offloaded_weights "
        "named_module_tensors offload_state_dict offload_weight retie_parameters save_offload_index "
        "set_module_tensor_to_device calculate_maximum_sizes"
    ),
    "unittest.mock.patch.dict(os.environ, ...)": "patch_environment clear_environment purge_accelerate_environment",
    "os.environ": "get_int_from_env parse_choice_from_env parse_flag_from_env str_to_bool",
    "torch.cuda.is_bf16_supported()": "is_bf16_available",
    "importlib.metadata.version": "compare_versions is_torch_version",
}
"""Alternatives, and the names of Accelerate that they replace."""

_instead = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}


# Python calls `__getattr__` of a module for names that it does not have (PEP 562), also in `from module import name`.
def reexport(module: str, names: Iterable[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module with some public names of `rankbook.runtime`."""
    return lazy_imports(module, {"rankbook.runtime": names}, explain_missing)


def explain_missing(module: str, name: str) -> str | None:
    """Return what to use instead of a name of Accelerate that Rankbook does not have; None for other names."""
    # Accelerate has dozens of such functions, one per package.
    if name.startswith("is_") and name.endswith("_available") and name not in _instead:
        instead = f"importlib.util.find_spec({name[3:-10]!r})"
    elif name in _instead:
        instead = _instead[name]
    else:
        return None
    return f"cannot import name {name!r} from {module!r}: Rankbook does not have it; use {instead}"
