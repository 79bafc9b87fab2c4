"""The `Accelerator` in one process."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rankbook.errors import InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from rankbook.runtime.gradient_state import window
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(telemetry, "listener", None)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    window.abort(GradientState())
    GradientState._reset_state()


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def one_weight():
    """Return a model whose gradient is the sum of its inputs, divided as the loss is."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def run(accelerator, model, optimizer, loader, stop=None):
    """Return the change of the weight in every optimizer step, which is minus the gradient."""
    changes = []
    for number, batch in enumerate(loader):
        if number == stop:
            break
        before = model.weight.item()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        if model.weight.item() != before:
            changes.append(round(before - model.weight.item(), 5))
    return changes


ROWS = torch.tensor([[1.0], [2.0], [3.0], [10.0], [20.0], [30.0], [100.0]])


@pytest.mark.parametrize("has_length", [True, False], ids=["length known", "length unknown"])
@pytest.mark.parametrize(("count", "expected"), [(7, [2, 20, 100]), (5, [2, 15]), (6, [2, 20]), (2, [1.5])])
def test_the_last_shorter_window_divides_by_its_own_length(has_length, count, expected):
    accelerator = Accelerator(gradient_accumulation_steps=3)
    data = TensorDataset(ROWS[:count]) if has_length else Stream(ROWS[:count])
    loader = DataLoader(data, batch_size=1, collate_fn=(lambda rows: rows[0][0][None]) if has_length else None)
    model, optimizer, loader = accelerator.prepare(*one_weight(), loader)
    assert run(accelerator, model, optimizer, loader) == pytest.approx(expected)
    assert run(accelerator, model, optimizer, loader) == pytest.approx(expected)


def test_clipping_sees_the_gradients_of_the_shorter_window_whole():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS[:5]), batch_size=1))
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx([2, 15])
    assert model.weight.item() == pytest.approx(-2, abs=1e-4)


def test_a_loader_that_goes_on_over_its_end_divides_by_the_whole_window():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS[:3]), batch_size=1))
    assert run(accelerator, model, optimizer, loader) == [1.5]
    assert run(accelerator, model, optimizer, loader) == [2.0, 2.5]


def test_a_window_left_by_break_or_by_an_error_is_dropped():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    assert run(accelerator, model, optimizer, loader, stop=5) == [2]
    assert run(accelerator, model, optimizer, loader) == pytest.approx([2, 20, 100])

    def fail():
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if number == 1:
                    raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        fail()
    assert accelerator.sync_gradients
    assert not accelerator.gradient_state.in_dataloader
    assert run(accelerator, model, optimizer, loader) == pytest.approx([2, 20, 100])


def test_a_plain_loop_after_a_window_left_by_break_steps():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    other = accelerator.prepare(DataLoader(Stream(ROWS), batch_size=1))
    assert run(accelerator, model, optimizer, loader, stop=5) == [2]
    assert accelerator.sync_gradients and not window.is_open
    assert model.weight.grad is None, "it was not reduced, and must reach no step"
    optimizer.step()
    assert model.weight.item() == -2
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.steps, model.weight.item()) == (9, pytest.approx(-2 - ROWS.sum().item()))

    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            for _ in other:
                assert accelerator.sync_gradients == (number in {2, 5, 6})
                break
            assert accelerator.sync_gradients == (number in {2, 5, 6})
        for _ in other:
            pass
        assert accelerator.sync_gradients == (number in {2, 5, 6}), "a loop inside of the window's loop has ended"
        if number == 3:
            break
    assert accelerator.sync_gradients
    assert run(accelerator, model, optimizer, loader) == pytest.approx([2, 20, 100])


def test_a_window_that_goes_on_over_loops_is_not_ended_by_break():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    assert run(accelerator, model, optimizer, loader, stop=3) == [1.5]
    assert not accelerator.sync_gradients
    assert run(accelerator, model, optimizer, loader, stop=1) == [2]


def test_a_window_goes_on_after_an_error_that_is_caught_inside_of_the_loop():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    changes = []
    for number, batch in enumerate(loader):
        before = model.weight.item()
        try:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                _ = 1 / (number - 1)
                optimizer.step()
                optimizer.zero_grad()
        except ZeroDivisionError:
            continue
        if model.weight.item() != before:
            changes.append(round(before - model.weight.item(), 5))
    assert changes == [pytest.approx((1 + 2 + 3) / 3), pytest.approx((10 + 20 + 30) / 3), pytest.approx(100)]


def test_a_window_is_dropped_if_an_error_has_ended_its_loop():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    other = accelerator.prepare(DataLoader(Stream(ROWS), batch_size=1))

    def fail():
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                _ = 1 / (number - 1)

    with pytest.raises(ZeroDivisionError) as kept:  # the traceback keeps the loop's iterator
        fail()
    assert run(accelerator, model, optimizer, other) == pytest.approx([2, 20, 100])
    assert kept.value is not None


def test_a_model_that_is_prepared_again_has_what_unwrapping_has_removed():
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = accelerator.prepare(nn.Linear(2, 2))
    forward, compiled = type(model.forward), model._compiled_call_impl
    raw = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert type(raw.forward) is not forward and compiled is not None and model._compiled_call_impl is None
    assert accelerator.prepare(model) is model
    assert type(raw.forward) is forward and model._compiled_call_impl is not None


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the second one does step before
def test_the_scheduler_steps_once_per_real_step_or_as_the_option_says():
    for options, expected in ({}, 2), ({"step_scheduler_with_optimizer": False}, 4):
        accelerator = Accelerator(gradient_accumulation_steps=2, **options)
        model, optimizer = one_weight()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        loader = DataLoader(Stream(ROWS[:4]), batch_size=1)
        scheduler, model, optimizer, loader = accelerator.prepare(scheduler, model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert scheduler.get_last_lr() == pytest.approx([0.1**expected])


def test_a_one_cycle_schedule_ends_with_its_last_rate_and_does_not_raise():
    accelerator = Accelerator()
    model, optimizer = one_weight()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(5):
        accelerator.backward(model(ROWS[:2]).mean())
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates[2] == rates[3] == rates[4] != rates[1]  # torch takes three steps


def test_prepare_keeps_the_order_and_lets_everything_else_through():
    accelerator = Accelerator()
    model, optimizer = one_weight()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare("a", scheduler, 3, optimizer, None, model, scheduler.step)
    assert prepared[0] == "a"
    assert prepared[2:5:2] == (3, None)
    assert prepared[5] is model
    assert isinstance(prepared[3], AcceleratedOptimizer)
    assert prepared[1].optimizers == [prepared[3]]
    assert accelerator.prepare(model) is model
    assert accelerator.prepare("alone") == "alone"
    assert accelerator.prepare() is None
    assert accelerator.prepare(optimizer) is prepared[3], "one wrapper for an optimizer"


def test_a_second_plain_accelerator_keeps_the_shared_settings_and_another_changes_them():
    Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator()
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (4, "bf16")
    Accelerator(gradient_accumulation_steps=1, mixed_precision="no")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "no")
    second.gradient_accumulation_steps = 3
    assert Accelerator().gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism_config": ParallelismConfig(tp_size=2)},
        {"mixed_precision": "fp16"},
        {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
        {"rng_types": ["dice"]},
        {"log_with": "a tracker that is not there"},
    ],
    ids=str,
)
def test_an_accelerator_that_cannot_be_made_leaves_nothing_behind(options):
    with pytest.raises(InvalidArgument):
        Accelerator(gradient_accumulation_steps=5, **options)
    assert not PartialState._shared_state
    assert not AcceleratorState._shared_state
    assert Accelerator().gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixedprecision": "bf16"}, "'mixedprecision'; did you mean: mixed_precision"),
        ({"fp16": True}, 'use mixed_precision="fp16"'),
        ({"even_batches": False}, r"use dataloader_config=DataLoaderConfiguration\(even_batches=\.\.\.\)"),
        ({"logging_dir": "logs"}, r"use project_config=ProjectConfiguration\(logging_dir=\.\.\.\)"),
        ({"deepspeed_plugin": 1}, "deepspeed_plugin is not supported: use fsdp_plugin=Fully"),
        ({"megatron_lm_plugin": 1}, r"not supported: use parallelism_config=ParallelismConfig\(tp_size"),
        ({"torch_tp_plugin": 1}, r"not supported: use parallelism_config=ParallelismConfig\(tp_size"),
        ({"deepspeed_plugins": 1}, "deepspeed_plugins is not supported: use fsdp_plugin=Fully"),
    ],
    ids=str,
)
def test_an_argument_that_is_not_there_is_an_error_that_names_what_is(options, words):
    with pytest.raises(InvalidArgument, match=words):
        Accelerator(**options)
    assert not PartialState._shared_state


def test_errors_about_arguments_name_the_accelerator():
    accelerator = Accelerator(cpu=True)
    for call in (accelerator.backward, accelerator.gather, accelerator.save_model, accelerator.get_tracker):
        with pytest.raises(TypeError, match=rf"^Accelerator\.{call.__name__}\(\) missing"):
            call()
    with pytest.raises(TypeError, match=r"^Accelerator\.__init__\(\) takes"):
        Accelerator(*[None] * 30)


def test_positional_arguments_are_in_the_order_of_accelerate():
    order = [
        "device_placement",
        "split_batches",
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
        "dataloader_config",
        "deepspeed_plugin",
        "fsdp_plugin",
        "torch_tp_plugin",
        "megatron_lm_plugin",
        "rng_types",
        "log_with",
        "project_dir",
        "project_config",
        "gradient_accumulation_plugin",
        "step_scheduler_with_optimizer",
        "kwargs_handlers",
        "dynamo_backend",
        "dynamo_plugin",
        "deepspeed_plugins",
        "parallelism_config",
    ]
    parameters = inspect.signature(Accelerator).parameters.values()
    assert [entry.name for entry in parameters if entry.kind is entry.POSITIONAL_OR_KEYWORD] == order
    handler = AutocastKwargs(enabled=False)
    accelerator = Accelerator(*[None] * 2, "bf16", 3, True, *[None] * 5, ["numpy"], *[None] * 3, None, False, [handler])
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps, accelerator.rng_types) == (
        "bf16",
        3,
        ["numpy"],
    )
    assert accelerator.autocast_handler is handler and not accelerator.step_scheduler_with_optimizer


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "generator"])
def test_all_generators_that_can_be_synchronized_can_be_asked_for(kind):
    loader = Accelerator(cpu=True, rng_types=[kind]).prepare(DataLoader(range(4), shuffle=True))
    assert loader.rng_types == [kind] and sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3]


def test_attributes_that_code_for_accelerate_reads(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.native_amp and accelerator.should_save_model and accelerator.state.deepspeed_plugin is None
    assert not accelerator.ddp_handler.find_unused_parameters and accelerator.scaler_handler.enabled
    assert accelerator.init_handler.backend is None and accelerator.profile_handler.activities is None
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)  # as transformers does
    assert accelerator.handlers.ddp.find_unused_parameters
    with pytest.raises(InvalidArgument, match="unsupported kwargs_handlers entry int"):
        accelerator.ddp_handler = 3
    accelerator.sync_gradients = False
    assert not accelerator.gradient_state.sync_gradients
    steps = []
    for _ in accelerator.prepare(DataLoader(range(3))):
        with accelerator.accumulate():
            steps.append((accelerator.step, accelerator.sync_gradients))
    assert steps == [(1, False), (2, True), (0, True)]
    assert not Accelerator(mixed_precision="no").native_amp


def test_mixed_precision_never_nests_and_goes_with_copies_and_pickles():
    model, _ = one_weight()
    depths = []

    def see(_module, _inputs, output):
        depths.append(output.dtype)

    for _ in range(300):
        Accelerator(mixed_precision="bf16").prepare(model)
    assert not hasattr(model.forward.original, "original")
    for model_copy in model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert model_copy(torch.ones(1, 1)).dtype is torch.float32
        assert model_copy.forward.original.__self__ is model_copy
    Accelerator(mixed_precision="no").prepare(model)
    assert "forward" not in vars(model)


def test_an_error_in_a_forward_leaves_autocast():
    class Fails(nn.Module):
        def forward(self, inputs):
            raise ValueError(inputs)

    model = Accelerator(mixed_precision="bf16").prepare(Fails())
    with pytest.raises(ValueError, match="1"):
        model(1)
    assert not torch.is_autocast_enabled("cpu")


def test_outputs_of_any_shape_come_in_fp32():
    class Pair(NamedTuple):
        left: torch.Tensor
        right: int

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs):
            out = self.inner(inputs)
            return {"a": [out], "b": Pair(out, 3), "c": (out, None, "x")}

    out = Accelerator(mixed_precision="bf16").prepare(Many())(torch.ones(1, 2))
    assert [out["a"][0].dtype, out["b"].left.dtype, out["c"][0].dtype] == [torch.float32] * 3
    assert isinstance(out["b"], Pair)
    assert out["c"][1:] == (None, "x")


def test_what_to_compile_with_may_come_from_the_environment(monkeypatch):
    assert TorchDynamoPlugin().to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "0")
    monkeypatch.setenv("RANKBOOK_DYNAMO_BACKEND", "eager")
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "eager", "mode": "reduce-overhead", "dynamic": False}
    plugin = TorchDynamoPlugin(backend="no", mode="default", dynamic=True)
    assert (plugin.active, plugin.mode, plugin.dynamic) == (False, "default", True)
    assert Accelerator().dynamo_plugin.backend == "eager"
    monkeypatch.setenv("RANKBOOK_DYNAMO_BACKEND", "nothing")
    with pytest.raises(InvalidArgument, match=r"unknown dynamo_backend 'nothing'; choose from .*inductor"):
        Accelerator()


def test_a_backend_that_torch_does_not_have_is_refused_where_it_is_used():
    plugin = TorchDynamoPlugin(backend="AOT_TS_NVFUSER")  # code for Accelerate may compare with it
    assert (plugin.backend, plugin.to_kwargs()) == ("aot_ts_nvfuser", {"backend": "aot_ts_nvfuser"})
    with pytest.raises(InvalidArgument, match="unknown dynamo_backend 'aot_ts_nvfuser'"):
        Accelerator(dynamo_plugin=plugin)
    with pytest.raises(InvalidArgument, match="unknown dynamo_backend 'nothing'"):
        TorchDynamoPlugin(backend="nothing")


def test_a_model_is_compiled_in_place_and_again_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    prepared = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"), mixed_precision="bf16").prepare(model)
    assert prepared._compiled_call_impl is not None
    assert list(prepared.state_dict()) == ["0.weight", "0.bias"]
    assert prepared(torch.ones(1, 2)).dtype is torch.float32
    assert Accelerator(dynamo_backend="no").prepare(prepared)._compiled_call_impl is None
    torch._dynamo.reset()


def test_state_is_saved_numbered_limited_and_loaded(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    called = []
    handles = [
        accelerator.register_save_state_pre_hook(lambda *passed: called.append(("save", len(passed[1])))),
        accelerator.register_load_state_pre_hook(lambda *passed: called.append(("load", len(passed[0])))),
    ]

    class Counter:
        value = 1

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.register_for_checkpointing(counter)
    for counter.value in range(3):
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    drawn = torch.rand(1)
    weight = model.weight.item()
    run(accelerator, model, optimizer, loader)
    counter.value = 99
    accelerator.load_state()
    assert (torch.rand(1), model.weight.item(), counter.value) == (drawn, weight, 2)
    assert called == [("save", 1)] * 3 + [("load", 1)]
    for handle in handles:
        handle.remove()
    assert not accelerator._save_hooks
    assert not accelerator._load_hooks


def test_training_goes_on_in_the_middle_of_an_epoch(tmp_path):
    def fresh():
        AcceleratorState._reset_state()
        accelerator = Accelerator(gradient_accumulation_steps=2)
        return accelerator, *accelerator.prepare(*one_weight(), DataLoader(TensorDataset(ROWS), batch_size=1))

    def train(accelerator, model, optimizer, loader, save_at=None):
        for number, (batch,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if number == save_at:
                accelerator.save_state(tmp_path / "state")
        return model.weight.item()

    losses = train(*fresh(), save_at=3)
    later = fresh()
    later[0].load_state(tmp_path / "state")
    assert train(*later) == pytest.approx(losses)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("options", [{}, pytest.param({"use_stateful_dataloader": True}, marks=pytest.mark.slow)])
def test_a_loop_that_was_left_is_resumed_in_the_middle_only_if_it_has_trained(tmp_path, options):
    if options:
        pytest.importorskip("torchdata")

    def fresh():
        AcceleratorState._reset_state()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        loaders = [DataLoader(TensorDataset(ROWS), batch_size=1) for _ in range(4)]
        return accelerator, *accelerator.prepare(*one_weight(), *loaders)

    accelerator, model, optimizer, training, by_steps, evaluation, glance = fresh()
    next(iter(glance))  # before anything has trained
    for number, (batch,) in enumerate(training):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        for _ in evaluation:
            break
        if number == 2:
            break
    backwards = window.backwards
    for (batch,) in by_steps:
        model(batch).mean().backward()  # without the Accelerator
        optimizer.step()
        break
    assert window.backwards == backwards
    for _ in zip(range(2), evaluation, strict=False):
        accelerator.save_state(tmp_path / "inside")  # the loop goes on: it may be one that trains later
    accelerator.save_state(tmp_path / "left")

    def positions(folder):
        accelerator, _model, _optimizer, *loaders = fresh()
        accelerator.load_state(tmp_path / folder)
        return [(loader.position.next_epoch(), next(iter(loader))[0].item()) for loader in loaders]

    rows = ROWS.flatten().tolist()
    assert positions("left") == [(0, rows[3]), (0, rows[1]), (3, rows[0]), (0, rows[0])]
    assert positions("inside")[2] == (3, rows[2])


def test_trackers_triggers_profiles_and_utilities(tmp_path, monkeypatch):
    # Kineto reads it once in a process, and would print to stderr in the tests of our own profiler.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")

    class CallTracker:
        name, main_process_only, tracker = "kept", True, "inner"

        def __init__(self):
            self.calls = []

        def start(self):
            self.calls.append("start")

        def store_init_configuration(self, values):
            self.calls.append(values)

        def log(self, values, step=None, **kwargs):
            self.calls.append((values, step, kwargs))

        def finish(self):
            self.calls.append("finish")

    call_tracker = CallTracker()
    accelerator = Accelerator(log_with=call_tracker, kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
    accelerator.init_trackers("run", {"rate": 1})
    accelerator.log({"loss": 2}, step=3, log_kwargs={"kept": {"more": 4}})
    assert accelerator.get_tracker("kept", unwrap=True) == "inner"
    accelerator.end_training()
    assert call_tracker.calls == ["start", {"rate": 1}, ({"loss": 2}, 3, {"more": 4}), "finish"]

    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()

    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))):
        torch.ones(3).sum()
    assert (tmp_path / "profile_0.json").stat().st_size > 100
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    model, optimizer = accelerator.prepare(*one_weight())
    assert accelerator.unwrap_model(model) is model
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator._models == []


def test_prepare_sends_events_and_counters_are_read_on_demand():
    events = []
    telemetry.listener = events.append
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(Stream(ROWS), batch_size=1))
    assert [(report.kind, report.class_name, report.parameters, report.bytes, report.dtypes) for report in events] == [
        ("model", "Linear", 1, 4, ("float32",)),
        ("optimizer", "SGD", 1, 0, ("float32",)),
        ("loader", type(loader).__name__, 0, 0, ()),
    ]
    telemetry.snapshot()
    before = len(events)
    run(accelerator, model, optimizer, loader)
    assert len(events) == before, "nothing is sent as training goes on"
    reports = {type(report): report for report in telemetry.snapshot()}
    assert reports[telemetry.TrainingStep].steps >= 7
    assert reports[telemetry.TrainingStep].rate > 0
    assert reports[telemetry.LoaderPosition].delivered == 7
    del loader
    gc.collect()
    assert telemetry.LoaderPosition not in {type(report) for report in telemetry.snapshot()}


def test_unpickled_loader_reports_its_position():
    loader = Accelerator().prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    sent = pickle.dumps(loader)
    del loader
    gc.collect()
    telemetry._sources.clear()
    unpickled = pickle.loads(sent)
    next(iter(unpickled))
    (position,) = [report for report in telemetry.snapshot() if isinstance(report, telemetry.LoaderPosition)]
    assert (position.delivered, position.batches) == (1, 4)


def test_an_optimizer_behaves_as_its_own():
    accelerator = Accelerator()
    model, raw = one_weight()
    optimizer = accelerator.prepare(raw)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is raw.param_groups
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # takes any Optimizer
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})
    assert len(raw.param_groups) == 2
    hooks = []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    model.weight.grad = torch.ones(1, 1)
    optimizer.step(lambda: torch.tensor(3.0))
    assert hooks == [1]
    loaded = pickle.loads(pickle.dumps(accelerator.prepare(one_weight()[1])))
    assert loaded.param_groups[0]["lr"] == 1.0


def test_the_rule_of_many_processes_names_itself():
    options = DataLoaderConfiguration()
    accelerator = Accelerator(scheduler_steps_times_num_processes=True, dataloader_config=options)
    _, optimizer = one_weight()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(accelerator.prepare(optimizer), 1))
    assert scheduler.repeats == 1
    scheduler.set_num_processes(4)  # as when one rank becomes four
    scheduler.optimizers[0].step()
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 4
    accelerator = Accelerator()
    usual = accelerator.prepare(torch.optim.lr_scheduler.StepLR(accelerator.prepare(one_weight()[1]), 1))
    usual.set_num_processes(4)
    assert usual.repeats == 1


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # no optimizer of torch's takes that along
def test_prepared_objects_work_after_unpickling():
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(*one_weight())
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    sent = pickle.dumps({"a": accelerator, "m": model, "o": optimizer, "s": scheduler})
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unpickled = pickle.loads(sent)
    assert Accelerator().gradient_accumulation_steps == 2
    assert unpickled["a"]._models == [unpickled["m"]]
    assert unpickled["a"].prepare(unpickled["m"]) is unpickled["m"]
    assert unpickled["m"](torch.ones(1, 1)).dtype is torch.float32
    for number in range(2):
        with unpickled["a"].accumulate(unpickled["m"]):
            unpickled["a"].backward(unpickled["m"](torch.ones(1, 1)).mean())
            unpickled["o"].step()
            unpickled["s"].step()
        assert unpickled["o"].steps == number
    assert unpickled["m"].weight.item() == pytest.approx(-1)
    assert unpickled["s"].get_last_lr() == pytest.approx([0.1])
