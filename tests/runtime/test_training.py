"""Steps of training that no other test has a part in: the scale of fp16, clipping, handlers, where things are put."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rankbook.errors import BadRequest
from rankbook.runtime import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
    precision,
    settings,
)
from rankbook.runtime.gradient_state import window
from rankbook.runtime.state import GradientState

METHODS = {  # what a script that was written for Accelerate may give by position or by name
    "prepare": "args device_placement",
    "prepare_model": "model device_placement evaluation_mode",
    "prepare_optimizer": "optimizer device_placement",
    "prepare_scheduler": "scheduler",
    "prepare_data_loader": "data_loader device_placement slice_fn_for_dispatch",
    "backward": "loss kwargs",
    "accumulate": "models",
    "no_sync": "model",
    "trigger_sync_in_backward": "model",
    "autocast": "autocast_handler",
    "clip_grad_norm_": "parameters max_norm norm_type",
    "clip_grad_value_": "parameters clip_value",
    "unscale_gradients": "optimizer",
    "gather": "tensor",
    "gather_for_metrics": "input_data use_gather_object",
    "reduce": "tensor reduction scale",
    "pad_across_processes": "tensor dim pad_index pad_first",
    "wait_for_everyone": "",
    "main_process_first": "",
    "local_main_process_first": "",
    "split_between_processes": "inputs apply_padding",
    "on_main_process": "function",
    "on_local_main_process": "function",
    "on_last_process": "function",
    "on_process": "function process_index",
    "on_local_process": "function local_process_index",
    "unwrap_model": "model keep_fp32_wrapper keep_torch_compile",
    "free_memory": "objects",
    "clear": "objects",
    "register_for_checkpointing": "objects",
    "register_save_state_pre_hook": "hook",
    "register_load_state_pre_hook": "hook",
    "save": "obj f safe_serialization",
    "save_model": "model save_directory max_shard_size safe_serialization",
    "get_state_dict": "model unwrap",
    "skip_first_batches": "dataloader num_batches",
    "join_uneven_inputs": "joinables even_batches",
    "init_trackers": "project_name config init_kwargs",
    "get_tracker": "name unwrap",
    "log": "values step log_kwargs",
    "end_training": "",
    "set_trigger": "",
    "check_trigger": "",
    "profile": "profile_handler",
}


@pytest.fixture(autouse=True)
def no_window():
    yield
    window.abandon(GradientState())
    window.scaler = None


@pytest.fixture
def half_precision(monkeypatch):
    """Fp16 on the CPU, which `Accelerator` refuses: its scaler works there just as it does on a CUDA device."""
    monkeypatch.setattr(settings, "check_precision", lambda *_: None)


def one_weight(rate=1.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def test_every_method_takes_what_accelerates_takes():
    for name, words in METHODS.items():
        given = [each for each in inspect.signature(getattr(Accelerator, name)).parameters if each != "self"]
        assert given == words.split(), name
    for name in ("save_state", "load_state", "print"):
        assert callable(getattr(Accelerator, name))


def test_a_step_that_overflowed_is_left_out_told_and_not_counted_by_the_scheduler(half_precision):
    accelerator = Accelerator(
        mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=2)]
    )
    model, optimizer = one_weight()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(factor):
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0]

    assert accelerator.scaler.get_scale() == 8.0
    assert step(float("inf")) == (True, True, 1.0)
    assert (model.weight.item(), optimizer.steps, accelerator.scaler.get_scale()) == (1.0, 0, 4.0)
    assert step(0.25) == (False, False, 0.5)
    assert (model.weight.item(), optimizer.steps) == (0.75, 1)
    assert step(float("inf"))[:2] == (True, True)

    accelerator = Accelerator(mixed_precision="no")  # live: the step that was left out is not the last one any more
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert (accelerator.scaler, optimizer.scaler, window.scaler) == (None, None, None)
    assert step(0.5) == (False, False, 0.25)
    assert model.weight.item() == 0.5


def test_clipping_sees_gradients_without_the_scale_which_is_taken_off_once(half_precision):
    accelerator = Accelerator(
        mixed_precision="fp16",
        cpu=True,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=16.0)],
    )
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(torch.full((4, 1), 3.0), batch_size=1))
    seen = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if number == 1:
                accelerator.unscale_gradients()
                accelerator.unscale_gradients(optimizer)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if number == 3:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            if accelerator.sync_gradients:
                seen.append((round(norm.item(), 3), round(model.weight.grad.item(), 3)))
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [(3.0, 1.0), (3.0, 0.5)]
    assert model.weight.item() == pytest.approx(-0.5, abs=1e-3)


def test_values_are_clipped_where_gradients_sync_alone():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(torch.full((2, 1), 4.0), batch_size=1))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            seen.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [2.0, 0.5]
    accelerator.unscale_gradients()  # without a scale nothing happens


def test_the_autocast_handler_reaches_the_models_forward(monkeypatch):
    asked = []
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: asked.append(k["cache_enabled"]) or real(*a, **k))
    for enabled, kind in ((True, torch.bfloat16), (False, torch.float32)):
        handler = AutocastKwargs(enabled=enabled, cache_enabled=False)
        accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[handler])
        model, kinds = nn.Sequential(nn.Linear(2, 2)), []
        model[0].register_forward_hook(lambda *passed, kinds=kinds: kinds.append(passed[-1].dtype))
        model = accelerator.prepare(model)
        model(torch.ones(1, 2))
        with accelerator.autocast():
            inside = torch.is_autocast_enabled("cpu")
        assert (kinds, inside) == ([kind], enabled)
    assert asked == [False, False]


def test_models_and_batches_stay_where_they_are_if_that_is_asked(monkeypatch):
    monkeypatch.setenv("RANKBOOK_DEVICE", "meta")
    loader = DataLoader(torch.ones(2, 1), batch_size=2)

    def devices(*prepared):
        model, batches = prepared
        return model.weight.device.type, next(iter(batches)).device.type

    accelerator = Accelerator()
    assert devices(*accelerator.prepare(nn.Linear(1, 1), loader)) == ("meta", "meta")
    assert devices(*accelerator.prepare(nn.Linear(1, 1), loader, device_placement=[True, False])) == ("meta", "cpu")
    assert devices(*accelerator.prepare(nn.Linear(1, 1), loader, device_placement=[False, True])) == ("cpu", "meta")
    assert devices(*Accelerator(device_placement=False).prepare(nn.Linear(1, 1), loader)) == ("cpu", "cpu")
    assert accelerator.prepare_model(nn.Linear(1, 1), device_placement=False).weight.device.type == "cpu"


def test_a_copy_to_the_device_does_not_wait_if_that_is_asked(monkeypatch):
    monkeypatch.setenv("RANKBOOK_DEVICE", "meta")

    class Batch(list):
        def to(self, device, non_blocking=False):
            return device.type, non_blocking

    for asked in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=asked))
        loader = accelerator.prepare(DataLoader([1, 2], batch_size=2, collate_fn=Batch))
        assert list(loader) == [("meta", asked)] and accelerator.non_blocking is asked


def test_repeated_blocks_are_compiled_alone_if_that_is_asked():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.head = nn.Linear(2, 1)

        def forward(self, inputs):
            for each in self.blocks:
                inputs = each(inputs)
            return self.head(inputs)

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Accelerator(dynamo_plugin=plugin).prepare(Blocks())
    compiled = [name for name, each in model.named_modules() if each._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "blocks.1"] and model(torch.ones(1, 2)).shape == (1, 1)
    with pytest.raises(BadRequest, match="not both"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=plugin)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"comm_hook": "fp8"}, "comm_hook='fp8' is unknown: choose 'no', 'fp16', 'bf16', 'power_sgd'"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd' is unknown"),
        ({"comm_wrapper": "fp16"}, "and there is none"),
        ({"comm_hook": DDPCommunicationHookType.BATCHED_POWER_SGD}, "'batched_power_sgd' is not offered"),
        ({"comm_hook": "fp16", "comm_state_option": {"matrix_approximation_rank": 1}}, "'fp16' has no state"),
    ],
)
def test_a_hook_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(BadRequest, match=words):
        DistributedDataParallelKwargs(**options)


def test_a_rank_knows_its_place_in_the_mesh():
    parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4)
    places = [tuple(parallelism.place_of(rank).values()) for rank in range(24)]
    assert len(set(places)) == 24
    assert parallelism.place_of(23) == {"tp": 3, "dp_shard": 2, "dp_replicate": 1}
    assert parallelism.place_of(4) == {"tp": 0, "dp_shard": 1, "dp_replicate": 0}
    enabled = (parallelism.dp_replicate_enabled, parallelism.dp_shard_enabled, parallelism.tp_enabled)
    assert (enabled, parallelism.data_parallel_size, parallelism.non_data_parallel_size) == ((True,) * 3, 6, 4)
    accelerator = Accelerator()
    assert accelerator.torch_device_mesh is None
    with pytest.raises(BadRequest, match="no mesh with an axis tp"):
        _ = accelerator.tensor_parallel_rank


def test_a_precision_that_the_device_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    device = torch.device("cuda", 0)
    with pytest.raises(BadRequest, match="'bf16' is more than cuda:0 can do"):
        precision.check_precision("bf16", device)
    precision.check_precision("fp16", device)
    with pytest.raises(BadRequest, match="this rank's is cpu: use 'bf16' or 'no'"):
        precision.check_precision("fp16", torch.device("cpu"))
