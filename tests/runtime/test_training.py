"""Steps of training that no other test has a part in: the scale of fp16, clipping, handlers, where things are put."""

from __future__ import annotations

import inspect
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rankbook.errors import InvalidArgument
from rankbook.numerics.gradients import local_gradients
from rankbook.protocol import telemetry
from rankbook.rank.inspect.object_discovery import measure
from rankbook.runtime import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
    prepare,
    settings,
)
from rankbook.runtime.gradient_state import window
from rankbook.runtime.launched_function import run_launched
from rankbook.runtime.prepared import track_replaced_parameters
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
    window.abort(GradientState())
    window.scaler = None


@pytest.fixture
def half_precision(monkeypatch):
    """Allow fp16 on the CPU, which `Accelerator` refuses: its scaler works there as on a CUDA device."""
    monkeypatch.setattr(settings, "check_precision", lambda *_: None)


def one_weight(rate=1.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def test_methods_have_the_parameters_of_accelerate():
    for name, words in METHODS.items():
        parameters = [
            parameter for parameter in inspect.signature(getattr(Accelerator, name)).parameters if parameter != "self"
        ]
        assert parameters == words.split(), name
    for name in ("save_state", "load_state", "print"):
        assert callable(getattr(Accelerator, name))


def test_gradients_that_a_step_has_used_have_no_loss_scale(half_precision):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model, optimizer = accelerator.prepare(*one_weight(0.0))

    def norm():
        (entry,) = local_gradients(model, "model").entries
        return entry.norm

    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum() * 2)
        assert (model.weight.grad.item(), norm()) == (16.0, 2.0)
        optimizer.step()
        assert (model.weight.grad.item(), norm()) == (2.0, 2.0)


def test_gradients_of_one_optimizer_have_their_loss_scale_after_another_one_was_unscaled(half_precision):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in net:
        nn.init.ones_(layer.weight)
    model, first, _second = accelerator.prepare(net, *(torch.optim.SGD(layer.parameters(), lr=1.0) for layer in net))
    accelerator.backward(model(torch.ones(1, 1)).sum() * 2)
    first.unscale()
    gradients = local_gradients(model, "model")
    assert [entry.norm for entry in gradients.entries] == [2.0, 2.0] and gradients.scale == 8.0
    of_view = measure(list(model.named_parameters()))
    assert [entry.norm for entry in of_view.entries] == [2.0, 2.0] and of_view.scale == 8.0


def test_overflowed_step_is_skipped_reported_and_not_counted_by_the_scheduler(half_precision):
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
    norms = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if number < 2:
                accelerator.unscale_gradients()
                accelerator.unscale_gradients(optimizer)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if number == 3:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            if accelerator.sync_gradients:
                norms.append((round(norm.item(), 3), round(model.weight.grad.item(), 3)))
            optimizer.step()
            optimizer.zero_grad()
    assert norms == [(3.0, 1.0), (3.0, 0.5)]
    assert model.weight.item() == pytest.approx(-0.5, abs=1e-3)


def two_models(accelerator, make=torch.optim.SGD):
    """Return two models with one weight of 1.0, and their prepared optimizers."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    prepared = accelerator.prepare(*models, *(make(model.parameters(), lr=1.0) for model in models))
    return prepared[:2], prepared[2:]


def fp16(init_scale=8.0, growth_interval=1000):
    handler = GradScalerKwargs(init_scale=init_scale, growth_interval=growth_interval)
    return Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[handler])


def backward(accelerator, *terms):
    """Run backward on a loss whose gradient for the weight of every model is its factor."""
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() * factor for model, factor in terms))


def test_the_scale_of_a_loss_changes_when_all_its_optimizers_have_stepped(half_precision):
    accelerator = fp16(growth_interval=1)
    (first, second), (one, other) = two_models(accelerator)
    for scale in (8.0, 16.0):
        assert accelerator.scaler.get_scale() == scale
        backward(accelerator, (first, 0.25), (second, 0.25))
        accelerator.clip_grad_norm_([first.weight, second.weight], 10.0)  # unscales both
        one.step()
        assert accelerator.scaler.get_scale() == scale, "the other one's gradients have this scale"
        other.step()
        assert (first.weight.grad.item(), second.weight.grad.item()) == (0.25, 0.25)
        one.zero_grad()
        other.zero_grad()
    assert (first.weight.item(), second.weight.item()) == (0.5, 0.5)


def test_scale_starts_anew_where_the_precision_or_its_settings_are_given(half_precision):
    accelerator = fp16(init_scale=8.0)
    (first, second), (one, other) = two_models(accelerator)
    backward(accelerator, (first, float("inf")))
    one.step()
    one.zero_grad()
    assert accelerator.scaler.get_scale() == 4.0
    assert Accelerator().scaler.get_scale() == 4.0, "nothing was given"

    backward(accelerator, (first, 0.25), (second, 0.5))  # gradients that are still to be used
    accelerator.unscale_gradients(other)
    again = fp16(init_scale=32.0, growth_interval=1)
    assert again.scaler is accelerator.scaler is one.scaler
    assert (again.scaler.get_scale(), again.scaler.get_growth_interval()) == (32.0, 1)
    assert second.weight.grad.item() == 0.5, "unscaled again"
    one.step()
    other.step()
    assert (first.weight.item(), second.weight.item()) == (0.75, 0.5)
    assert again.scaler.get_scale() == 64.0


@pytest.mark.parametrize(("own", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_training_keeps_its_scale_beside_one_of_another_precision(half_precision, own, other):
    """In another cell, and in a function that `notebook_launcher` runs on the same ranks."""

    def make(precision):
        handler = GradScalerKwargs(init_scale=256.0)
        accelerator = Accelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[handler])
        model, optimizer = accelerator.prepare(*one_weight())

        def step():
            before = model.weight.item()
            accelerator.backward(model(torch.ones(1, 1)).sum() * 0.25)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return before - model.weight.item()

        return step

    step = make(own)
    assert step() == 0.25

    def launched():
        return make(other)()

    assert run_launched(launched, (), {}) == 0.25
    assert step() == 0.25
    others_step = make(other)
    assert (others_step(), step(), others_step()) == (0.25, 0.25, 0.25)


def test_a_short_last_window_is_a_mean_for_each_of_two_optimizers():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    (first, second), (one, other) = two_models(accelerator)
    twin = accelerator.prepare(torch.optim.SGD(first.parameters(), lr=1.0))  # of an earlier run of the cell

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(5, 1))

    gradients = []
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=1)):
        with accelerator.accumulate(first, second):
            for model, optimizer in ((first, one), (second, other)):
                accelerator.backward(model(batch).sum())
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                if accelerator.sync_gradients:
                    gradients.append(model.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    assert gradients == [1.0] * 4 and len(twin.param_groups) == 1


def test_an_optimizer_of_the_users_may_have_another_zero_grad():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

    accelerator = Accelerator()
    model, _ = one_weight()
    model, optimizer = accelerator.prepare(model, Own(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_model_with_a_device_map_stays_where_its_parts_are(monkeypatch):
    model, _ = one_weight()
    model.hf_device_map = {"a": 0, "b": 1}
    monkeypatch.setattr(model, "to", lambda *_: pytest.fail("it is moved"))
    assert Accelerator().prepare(model) is model


def test_lazy_modules_can_be_prepared_where_the_preparation_is_reported(monkeypatch):
    told = []
    monkeypatch.setattr(telemetry, "listener", told.append)
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    model, _ = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert [each.parameters for each in told if isinstance(each, telemetry.Prepared)] == [3, 3]
    assert model(torch.ones(1, 3)).shape == (1, 1)


def test_training_can_be_run_again_after_the_scale_has_become_zero(half_precision):
    accelerator = fp16(init_scale=2.0**-149)
    (first, _), (one, other) = two_models(accelerator)
    for _ in range(2):
        backward(accelerator, (first, float("nan")))
        one.step()
    assert (accelerator.scaler.get_scale(), one.step_was_skipped) == (0.0, True)
    one.zero_grad()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    assert accelerator.scaler.get_scale() == 65536.0
    backward(accelerator, (first, 0.25))
    one.step()
    assert (first.weight.item(), other.steps) == (0.75, 0)


def test_second_accelerator_unscales_what_the_first_has_prepared(half_precision):
    accelerator = fp16(init_scale=8.0)
    (first, _), (one, _) = two_models(accelerator)
    earlier = accelerator.prepare(torch.optim.SGD(first.parameters(), lr=1.0))
    one = accelerator.prepare(one.optimizer)
    accelerator = Accelerator()
    backward(accelerator, (first, 4.0))
    assert accelerator.clip_grad_norm_(first.parameters(), 2.0).item() == pytest.approx(4.0)
    assert first.weight.grad.item() == pytest.approx(2.0), "unscaled once, though two optimizers have this parameter"
    one.step()
    assert (first.weight.item(), earlier.steps) == (pytest.approx(-1.0), 0)
    backward(accelerator, (first, float("inf")))
    one.step()
    assert accelerator.optimizer_step_was_skipped


def test_overflow_of_one_optimizer_keeps_the_gradients_of_the_other(half_precision):
    accelerator = fp16()
    (first, second), (one, other) = two_models(accelerator)
    backward(accelerator, (first, float("inf")), (second, 0.25))
    one.step()
    other.step()
    assert (one.step_was_skipped, other.step_was_skipped, second.weight.item()) == (True, False, 0.75)
    assert accelerator.scaler.get_scale() == 4.0


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "with-old-gradients"])
@pytest.mark.parametrize("clips", [True, False], ids=["clips", "steps-only"])
def test_one_optimizer_may_step_several_times_before_another(half_precision, cleared, clips):
    accelerator = fp16(growth_interval=1)
    (generator, critic), (seldom, often) = two_models(accelerator)
    for _ in range(2):
        for factor in (0.25, 0.5, 0.125):
            before = critic.weight.item()
            often.zero_grad()
            backward(accelerator, (critic, factor))
            if clips:
                assert accelerator.clip_grad_norm_(critic.parameters(), 10.0).item() == factor
            often.step()
            assert critic.weight.item() == before - factor
        before = generator.weight.item()
        seldom.zero_grad()
        backward(accelerator, (generator, 0.5), (critic, 2.0))
        if clips:
            accelerator.unscale_gradients()
            assert generator.weight.grad.item() == 0.5
        seldom.step()
        assert generator.weight.item() == before - 0.5
        if cleared:
            seldom.zero_grad()
            often.zero_grad()


def test_an_optimizer_of_an_earlier_run_of_the_cell_changes_nothing(half_precision):
    accelerator = fp16(growth_interval=1)
    model, earlier = accelerator.prepare(*one_weight())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    for factor in (0.25, 0.25, float("inf"), 0.25):
        backward(accelerator, (model, factor))
        before = model.weight.item()
        optimizer.step()
        assert model.weight.item() == before - (0.0 if factor == float("inf") else factor)
        optimizer.zero_grad()
    assert (optimizer.steps, earlier.steps) == (3, 0)


def test_losses_of_two_models_are_clipped_one_after_the_other(half_precision):
    accelerator = fp16()
    (first, second), (one, other) = two_models(accelerator)
    for model in (first, second):
        backward(accelerator, (model, 0.5))
        assert accelerator.clip_grad_norm_(model.parameters(), 0.25).item() == 0.5
    one.step()
    other.step()
    assert (first.weight.item(), second.weight.item()) == pytest.approx((0.75, 0.75), abs=1e-5)


def test_gradients_that_were_unscaled_and_never_used_do_not_count_for_the_next(half_precision):
    accelerator = fp16()
    model, optimizer = accelerator.prepare(*one_weight())
    for in_place in (False, True):
        backward(accelerator, (model, 4.0))
        accelerator.unscale_gradients()
        optimizer.zero_grad(set_to_none=not in_place)  # without a step, such as for a loss that makes no sense
    backward(accelerator, (model, 0.5))
    assert accelerator.clip_grad_norm_(model.parameters(), 10.0).item() == 0.5
    optimizer.step()
    assert model.weight.item() == 0.5


def test_gradients_that_the_model_has_dropped_after_clipping_are_forgotten(half_precision):
    accelerator = fp16()
    model, optimizer = accelerator.prepare(*one_weight())
    backward(accelerator, (model, 4.0))
    accelerator.clip_grad_norm_(model.parameters(), 10.0)
    model.zero_grad()
    backward(accelerator, (model, 0.5))
    assert accelerator.clip_grad_norm_(model.parameters(), 10.0).item() == 0.5
    optimizer.step()
    assert (model.weight.item(), optimizer.steps) == (0.5, 1)


def test_a_step_without_gradients_after_clipping_changes_nothing(half_precision):
    accelerator = fp16()
    model, optimizer = accelerator.prepare(*one_weight())
    backward(accelerator, (model, 4.0))
    accelerator.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.zero_grad()
    optimizer.step()
    assert (model.weight.item(), accelerator.scaler.get_scale()) == (1.0, 8.0)
    backward(accelerator, (model, 0.5))
    optimizer.step()
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("clips", [True, False], ids=["after-clipping", "before-clipping"])
def test_the_scale_after_an_interrupted_step_does_not_depend_on_where_it_was_cut(half_precision, clips):
    accelerator = fp16(growth_interval=2)
    model, optimizer = accelerator.prepare(*one_weight())
    scales = []
    for number in range(4):
        with suppress(KeyboardInterrupt), accelerator.accumulate(model):
            backward(accelerator, (model, 0.125))
            if clips or number:
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
            if not number:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()
            scales.append(accelerator.scaler.get_scale())
    assert (scales, model.weight.item()) == ([8.0, 16.0, 16.0], 0.625)


def test_even_batches_repeat_no_sample_on_a_single_rank():
    accelerator = Accelerator()
    model, loader = accelerator.prepare(one_weight()[0], DataLoader(list(range(5)), batch_size=2))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("kwargs", [{}, {"create_graph": True}], ids=["in-place", "new-tensor"])
def test_scaled_gradients_are_not_added_to_unscaled_ones(half_precision, kwargs):
    accelerator = fp16()
    (first, second), (one, other) = two_models(accelerator)
    backward(accelerator, (first, 0.5))
    accelerator.clip_grad_norm_([first.weight], 0.25)
    backward(accelerator, (second, 0.5))  # of another optimizer
    with pytest.raises(InvalidArgument, match="added to gradients that were unscaled already: unscale or clip after"):
        accelerator.backward(first(torch.ones(1, 1)).square().sum(), **kwargs)
    one.zero_grad()
    backward(accelerator, (first, 0.25))
    one.step()
    other.step()
    assert (first.weight.item(), second.weight.item()) == (0.75, 0.5)


def test_a_parameter_without_a_gradient_gets_no_scaled_one_beside_unscaled_ones(half_precision):
    accelerator = fp16()
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    *models, optimizer = accelerator.prepare(*models, torch.optim.SGD([model.weight for model in models], lr=1.0))
    backward(accelerator, (models[0], 0.5))
    accelerator.unscale_gradients()
    with pytest.raises(InvalidArgument, match="added to gradients that were unscaled already"):
        backward(accelerator, (models[1], 0.5))
    assert optimizer.steps == 0


def test_fused_optimizer_reports_a_skipped_step(half_precision):
    accelerator = fp16()
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
    for factor, skipped in ((float("inf"), True), (0.5, False)):
        backward(accelerator, (model, factor))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped
    assert optimizer.steps == 1


def test_a_closure_is_refused_under_fp16_and_runs_otherwise(half_precision):
    accelerator = fp16()
    model, optimizer = accelerator.prepare(*one_weight())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum() * 0.5
        accelerator.backward(loss)
        return loss

    with pytest.raises(InvalidArgument, match=r"step\(closure\) is not supported with mixed_precision='fp16'"):
        optimizer.step(closure)
    assert model.weight.item() == 1.0
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, optimizer)
    assert optimizer.step(closure).item() == 0.5
    assert model.weight.item() == 0.5


def test_sparse_gradients_are_clipped_with_dense_ones():
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1))
    net[0](torch.tensor([1, 1, 2])).sum().backward()  # 2 in one row and 1 in another
    net[1].bias.grad = torch.full((1,), 2.0)
    assert float(accelerator.clip_grad_norm_(net.parameters(), 1.5)) == 3.0
    assert net[0].weight.grad.layout is torch.sparse_coo
    torch.testing.assert_close(net[0].weight.grad.to_dense(), torch.tensor([[0.0], [1.0], [0.5], [0.0]]))
    torch.testing.assert_close(net[1].bias.grad, torch.ones(1))


def test_parameters_that_were_listed_before_they_were_replaced_are_followed():
    """Sharding replaces the parameters of a model."""
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    listed = [net[0].weight, net[1].weight, net[0].weight]
    optimizer = accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0))
    with track_replaced_parameters(net):
        for layer in net:
            layer.weight = nn.Parameter(torch.ones(1, 1))
            layer.weight.grad = torch.full((1, 1), 2.0)
    assert float(accelerator.clip_grad_norm_([*listed, net[0].weight], 0.5)) == pytest.approx(8**0.5)
    assert torch.stack([layer.weight.grad for layer in net]).norm().item() == pytest.approx(0.5)
    accelerator.clip_grad_value_(listed[0], 0.25)
    assert [layer.weight.grad.item() == 0.25 for layer in net] == [True, False]
    optimizer.add_param_group({"params": listed[0]})
    optimizer.add_param_group({"params": listed[1:2]})
    optimizer.step()
    assert net[0].weight.item() == 0.75
    assert net[1].weight.item() < 1.0
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": iter(listed[:2])})


def test_an_optimizer_whose_parameters_were_replaced_does_not_step():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*one_weight())
    unrelated, other = accelerator.prepare(*one_weight())
    model.weight.grad = unrelated.weight.grad = torch.ones(1, 1)
    with track_replaced_parameters(model):
        model.weight = nn.Parameter(torch.ones(1, 1))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"replaced parameters of this optimizer .* or prepare it again"):
            optimizer.step()
    other.step()
    assert unrelated.weight.item() == 0.0
    optimizer = accelerator.prepare(optimizer)
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert (model.weight.item(), optimizer.steps) == (0.0, 1)


def test_values_are_clipped_only_when_gradients_synchronize():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*one_weight(), DataLoader(torch.full((2, 1), 4.0), batch_size=1))
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == [2.0, 0.5]
    accelerator.unscale_gradients()  # without a scale nothing happens


def test_the_autocast_handler_reaches_the_models_forward(monkeypatch):
    cache_options = []
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: cache_options.append(k["cache_enabled"]) or real(*a, **k))
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
    assert cache_options == [False, False, False]
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs()])
    with accelerator.autocast(), accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu"), "a block that needs fp32"


def test_models_and_batches_are_not_moved_without_device_placement(monkeypatch):
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


def test_non_blocking_option_is_passed_to_the_copy(monkeypatch):
    monkeypatch.setenv("RANKBOOK_DEVICE", "meta")

    class Batch(list):
        def to(self, device, non_blocking=False):
            return device.type, non_blocking

    for expected in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=expected))
        loader = accelerator.prepare(DataLoader([1, 2], batch_size=2, collate_fn=Batch))
        assert list(loader) == [("meta", expected)] and accelerator.non_blocking is expected


def test_regional_compilation_compiles_repeated_blocks():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.head = nn.Linear(2, 1)

        def forward(self, inputs):
            for block in self.blocks:
                inputs = block(inputs)
            return self.head(inputs)

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Accelerator(dynamo_plugin=plugin).prepare(Blocks())
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "blocks.1"] and model(torch.ones(1, 2)).shape == (1, 1)
    with pytest.raises(InvalidArgument, match="not both"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=plugin)
    model.head.compile(backend="eager")  # by the user: it stays
    model = Accelerator(dynamo_backend="no").prepare(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["head"] and model(torch.ones(1, 2)).shape == (1, 1)
    torch._dynamo.reset()


def test_unwrap_model_finds_the_original_below_wrappers_in_any_order(monkeypatch):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    monkeypatch.setattr(prepare, "DistributedDataParallel", Wrapper)
    accelerator, net = Accelerator(), nn.Linear(1, 1)
    compiled = torch.compile(net, backend="eager")
    for model in (compiled, Wrapper(compiled)):
        assert accelerator.unwrap_model(model) is compiled
        assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    assert accelerator.unwrap_model(torch.compile(Wrapper(net), backend="eager")) is net
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"comm_hook": "fp8"}, "unknown comm_hook 'fp8'; choose from no, fp16, bf16, power_sgd$"),
        ({"comm_hook": "BATCHED_POWER_SGD"}, "'batched_power_sgd' is not supported"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "unknown comm_wrapper 'power_sgd'"),
        ({"comm_wrapper": "fp16"}, "requires a comm_hook, got comm_hook='no'"),
        ({"comm_hook": DDPCommunicationHookType.BATCHED_POWER_SGD}, "'batched_power_sgd' is not supported"),
        (
            {"comm_hook": "fp16", "comm_state_option": {"matrix_approximation_rank": 1}},
            "requires comm_hook='power_sgd', got comm_hook='fp16'",
        ),
    ],
)
def test_invalid_communication_hook_is_refused(options, words):
    with pytest.raises(InvalidArgument, match=words):
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
    with pytest.raises(InvalidArgument, match="mesh axis 'tp' is not defined"):
        _ = accelerator.tensor_parallel_rank


def test_a_precision_that_the_device_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    device = torch.device("cuda", 0)
    with pytest.raises(InvalidArgument, match="'bf16' is not supported on cuda:0"):
        settings.check_precision("bf16", device)
    settings.check_precision("fp16", device)
    with pytest.raises(InvalidArgument, match="the device of this rank is cpu; use 'bf16' or 'no'"):
        settings.check_precision("fp16", torch.device("cpu"))


@pytest.mark.parametrize("supported", [True, False])
def test_a_device_that_only_emulates_bf16_is_named(monkeypatch, caplog, supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or supported)
    settings._warn_of_emulation("bf16", torch.device("cuda", 0))
    settings._warn_of_emulation("bf16", torch.device("cpu"))
    settings._warn_of_emulation("fp16", torch.device("cuda", 0))
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ([] if supported else ["cuda:0 only emulates bf16, which is slow; use mixed_precision='fp16'"])
