"""Test `prepare` on several ranks. Every test starts its processes once and checks several things."""

from __future__ import annotations

import pytest
import torch

from rankbook.errors import CheckpointError, InvalidArgument
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes


def small_model(seed=3):
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def start_over():
    """Reset the state of the process, except the process group."""
    from rankbook.runtime.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def traces():
    """Count the objects that `prepare` could leak: hooks, groups, models, and memory in bytes."""
    import gc

    import psutil
    from torch.distributed import distributed_c10d as c10d

    from rankbook.runtime import prepared

    gc.collect()
    gc.collect()
    return {
        "groups": len(c10d._world.pg_map),
        "generations": prepared.count_prepared(),
        "successors": len(prepared._replacements),
        "modules": sum(isinstance(instance, torch.nn.Module) for instance in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "memory": psutil.Process().memory_info().rss,
    }


def hooks_of(model):
    tables = [vars(module)[name] for module in model.modules() for name in vars(module) if name.endswith("hooks")]
    return sum(len(table) for table in tables if table)


def prepare_again_and_again(strategy, cells, models):
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    accelerator = Accelerator(
        mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    )
    raw = small_model()
    inputs = torch.randn(4, 8)

    def cell(model, optimizer):
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    counts = {}
    model, optimizer = cell(raw, torch.optim.SGD(raw.parameters(), 0.0))
    for _ in range(20):
        model, optimizer = cell(raw, torch.optim.SGD(raw.parameters(), 0.0))
    before, hooks = traces(), hooks_of(raw)
    for number in range(cells):
        if number % 100 == 0:  # the whole cell; the others prepare alone, which is quicker
            model, optimizer = cell(raw, torch.optim.SGD(raw.parameters(), 0.0))
        model, optimizer = accelerator.prepare(raw, optimizer)
    counts["same model"] = (before, traces(), hooks, hooks_of(raw))
    before = traces()
    for number in range(models):
        model = small_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
        if number % 20 == 0:
            cell(model, optimizer)
    counts["new models"] = (before, traces(), 0, 0)
    return counts


@pytest.mark.parametrize(("cells", "models"), [(100, 20), pytest.param(1000, 200, marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_repeated_prepare_leaks_no_hooks_groups_or_memory(strategy, cells, models):
    for counts in run_ranks(prepare_again_and_again, 2, strategy, cells, models, timeout=110):
        for what, (before, after, hooks_before, hooks_after) in counts.items():
            for name in ("groups", "generations", "successors", "modules"):
                # One model more, of four modules with its wrapper, is still in a variable.
                assert after[name] <= before[name] + 4, f"{what}: {name} grew from {before[name]} to {after[name]}"
            assert after["objects"] <= before["objects"] + 500, what
            assert after["memory"] <= before["memory"] + 8e6, what
            assert hooks_before == hooks_after, what


def evaluate_then_prepare_again():
    """Run a forward pass alone, which leaves full parameters in the modules, and prepare with other settings."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = small_model()
            self.scale = nn.Parameter(torch.ones(2))  # of the root itself

        def forward(self, inputs):
            return self.layers(inputs) * self.scale.sum()

    results = {}
    for keep_gathered in (False, True):
        start_over()
        plugin = FullyShardedDataParallelPlugin(
            reshard_after_forward=not keep_gathered, auto_wrap_policy=lambda module: isinstance(module, nn.Linear)
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        raw = Scaled()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 0.5))
        shards = list(model.parameters())
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

        with torch.no_grad():
            model(torch.ones(2, 8))
        assert accelerator.prepare(model, optimizer) == (model, optimizer)
        same = [one is other for one, other in zip(model.parameters(), shards, strict=True)]

        with torch.no_grad():
            model(torch.ones(2, 8))
        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
        model, optimizer = accelerator.prepare(model, optimizer)
        after = accelerator.get_state_dict(model)
        equal = all(torch.equal(after[name], before[name]) for name in before) and before.keys() == after.keys()
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        changed = [not torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(model).items()]
        results[keep_gathered] = (same, equal, changed, isinstance(model, DistributedDataParallel))
    return results


@pytest.mark.slow
def test_a_model_that_was_evaluated_is_prepared_again_with_its_optimizer():
    for results in run_ranks(evaluate_then_prepare_again, 2):
        for keep_gathered, (same, equal, changed, wrapped) in results.items():
            assert (all(same), equal, all(changed), wrapped) == (True,) * 4, (keep_gathered, same, equal, changed)


def change_everything():
    """The same model and optimizer under one setting after the other, in one process."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    rank = torch.distributed.get_rank()
    reference = small_model()
    expected = torch.optim.Adam(reference.parameters(), 0.01)
    raw = small_model()
    raw_optimizer = torch.optim.Adam(raw.parameters(), 0.01)
    kind, steps_done = type(raw), []
    model, optimizer = raw, raw_optimizer
    whole_copies = ParallelismConfig(dp_replicate_size=2)
    settings = [
        {},
        {"gradient_accumulation_steps": 2},
        {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        {},
        {"parallelism_config": whole_copies, "gradient_accumulation_steps": 1},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(reshard_after_forward=False), "gradient_accumulation_steps": 3},
        {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
        {"parallelism_config": whole_copies},
    ]
    torch.manual_seed(0)
    for options in settings:
        accelerator = Accelerator(**options)
        steps = accelerator.gradient_accumulation_steps
        if len(steps_done) % 2:  # what a cell has at hand: what it was given last time, or the person's own
            model, optimizer = raw, raw_optimizer
        model, optimizer = accelerator.prepare(model, optimizer)
        data = torch.randn(3, steps, 2, 5, 8)
        for window in data:
            for batch in window:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch[rank]).square().mean())
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
            reference(window.reshape(-1, 8)).square().mean().backward()
            norm_alone = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            assert torch.allclose(norm, norm_alone, atol=1e-6), (len(steps_done), norm, norm_alone)
            expected.step()
            expected.zero_grad()
        for name, value in accelerator.get_state_dict(model).items():
            assert torch.allclose(value, reference.state_dict()[name], atol=1e-5), (len(steps_done), name)
        wrapper = {True: "ddp", False: "fsdp2" if isinstance(model, FSDPModule) else "?"}[
            isinstance(model, DistributedDataParallel)
        ]
        steps_done.append((wrapper, steps, str(accelerator.distributed_type)))
    assert type(raw) is kind
    assert "forward" not in vars(raw)

    model = Accelerator(mixed_precision="bf16").prepare(model)
    assert isinstance(model, DistributedDataParallel)
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    widths = []
    handle = raw[0].register_forward_hook(lambda *passed: widths.append(passed[-1].dtype))
    assert model(torch.randn(2, 8)).dtype is torch.float32
    later = Accelerator(mixed_precision="no")
    model(torch.randn(2, 8))  # keeps what it was prepared in
    older, model = model, later.prepare(model)
    model(torch.randn(2, 8))
    handle.remove()
    assert widths == [torch.bfloat16, torch.bfloat16, torch.float32], widths
    with pytest.raises(ValueError, match="prepared again"):
        older(torch.randn(2, 8))
    assert "reducer" not in vars(older), "its hooks would be on the parameters still"
    return steps_done


def test_precision_accumulation_and_strategy_change_in_one_process():
    expected = [("ddp", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 2), ("ddp", 1), ("fsdp2", 3), ("fsdp2", 3), ("ddp", 3)]
    for steps_done in run_ranks(change_everything, 2):
        assert [step[:2] for step in steps_done] == expected
        assert [step[2] for step in steps_done] == ["FSDP" if step[0] == "fsdp2" else "MULTI_CPU" for step in expected]


def wrong_in_many_ways():
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook.runtime import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
        TorchTensorParallelConfig,
    )

    def error_text(call):
        start_over()
        try:
            call()
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def mismatched():
        data = TensorDataset(torch.zeros(9, 1))
        options = DataLoaderConfiguration(split_batches=True)
        Accelerator(dataloader_config=options).prepare(DataLoader(data, batch_size=3))

    def plan(**tp_plan):
        handler = TorchTensorParallelConfig(plan=tp_plan or None)
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler)).prepare(small_model())

    errors = {
        "mesh": error_text(lambda: Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=3))),
        "axis": error_text(lambda: ParallelismConfig(cp_size=2)),
        "size": error_text(lambda: ParallelismConfig(tp_size=0)),
        "version": error_text(lambda: FullyShardedDataParallelPlugin(fsdp_version=1)),
        "handlers": error_text(lambda: Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])),
        "handler": error_text(lambda: Accelerator(kwargs_handlers=[ParallelismConfig()])),
        "op": error_text(lambda: Accelerator().reduce(torch.ones(2), "median")),
        "batches": error_text(mismatched),
        "fp16": error_text(lambda: Accelerator(mixed_precision="fp16")),
        "fp4": error_text(lambda: Accelerator(mixed_precision="fp4")),
        "steps": error_text(lambda: Accelerator(gradient_accumulation_steps=0)),
        "both": error_text(
            lambda: Accelerator(
                gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
            )
        ),
        "rng": error_text(lambda: Accelerator(rng_types=["dice"])),
        "backend": error_text(lambda: Accelerator(dynamo_backend="magic")),
        "placement": error_text(lambda: Accelerator().prepare(small_model(), 1, device_placement=[True])),
        "no plan": error_text(plan),
        "no module": error_text(lambda: plan(**{"9": "colwise"})),
        "style": error_text(lambda: plan(**{"0": "sideways"})),
        "folder": error_text(lambda: Accelerator().save_state()),
        "checkpoint": error_text(lambda: Accelerator().load_state("/nowhere")),
        "registered": error_text(lambda: Accelerator().register_for_checkpointing(3)),
        "join": error_text(lambda: Accelerator().join_uneven_inputs([small_model()]).__enter__()),
    }
    start_over()
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    accelerator.wait_for_everyone()
    assert accelerator.gather(torch.tensor(accelerator.process_index)).tolist() == [0, 1]
    return errors


MESSAGES = {
    "mesh": "dp_replicate(2) * dp_shard(1) * tp(3) = 6 != world size (2)",
    "axis": "cp_size=2",
    "size": "tp_size must be an integer >= 1, got 0",
    "version": "fsdp_version=1",
    "handlers": "two AutocastKwargs",
    "handler": "ParallelismConfig",
    "op": "median",
    "batches": "3",
    "fp16": "CUDA",
    "fp4": "fp4",
    "steps": "0",
    "both": "not both",
    "rng": "dice",
    "backend": "magic",
    "placement": "one entry per argument (2), got 1",
    "no plan": "tp_plan",
    "no module": "'9' in the tensor-parallel plan matches no module",
    "style": "sideways",
    "folder": "project_dir",
    "checkpoint": "/nowhere",
    "registered": "state_dict",
    "join": "expects models under DDP, got ",
}


def test_invalid_configurations_raise_on_every_rank():
    for errors in run_ranks(wrong_in_many_ways, 2, timeout=40):
        wrong = {name: error for name, error in errors.items() if error is None or MESSAGES[name] not in error}
        assert (wrong, set(errors)) == ({}, set(MESSAGES))


def save_and_load(folder):
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    rank = accelerator.process_index
    model = small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))

    def step(accelerator, model, optimizer):
        accelerator.backward(model(torch.full((2, 8), float(accelerator.process_index))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    step(accelerator, model, optimizer)
    torch.manual_seed(50 + rank)
    accelerator.save_state(folder)
    drawn, then = torch.rand(1), step(accelerator, model, optimizer)

    later = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    other = small_model(seed=9)
    other, other_optimizer = later.prepare(other, torch.optim.Adam(other.parameters(), 0.01))
    later.load_state(folder)
    assert torch.equal(torch.rand(1), drawn)
    again = step(later, other, other_optimizer)
    assert all(torch.allclose(again[name], then[name], atol=1e-6) for name in then)

    sharding = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    with torch.device("meta"):
        third = small_model()
    third, third_optimizer = sharding.prepare(third, torch.optim.Adam(third.parameters(), 0.01))
    third.to_empty(device=sharding.device)
    sharding.load_state(folder)  # into shards of a model that was never whole
    again = step(sharding, third, third_optimizer)
    assert all(torch.allclose(again[name], then[name], atol=1e-6) for name in then)

    accelerator.load_state(folder)  # and into shards
    again = step(accelerator, model, optimizer)
    assert all(torch.allclose(again[name], then[name], atol=1e-6) for name in then)

    def fail(*_):
        raise OSError("the disk is full")

    if rank == 1:
        from rankbook.checkpoint.storage.backends import LocalStorage

        LocalStorage.write = fail
    with pytest.raises(CheckpointError, match=r"rank 1: OSError: the disk is full"):
        accelerator.save_state(folder)
    accelerator.load_state(folder)
    return True


def test_a_checkpoint_of_shards_is_read_by_whole_copies_and_a_failed_one_raises_everywhere(tmp_path):
    assert run_ranks(save_and_load, 2, str(tmp_path / "state")) == [True, True]


def train_with_two_optimizers(folder):
    """Train with one optimizer for the matrices and one for the biases, as Muon requires, beside a plain model."""
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())

    def optimizers_of(model):
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        return torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(biases, 0.02)

    def step(model, optimizers, rows, backward, clip):
        backward(model(rows).square().mean())
        norm = clip(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def train(count):
        for _ in range(count):
            rows = torch.randn(2, 3, 8)
            norm = step(model, optimizers, rows[accelerator.process_index], accelerator.backward, clip)
            plain_clip = torch.nn.utils.clip_grad_norm_
            expected = step(plain, plain_optimizers, rows.flatten(0, 1), torch.Tensor.backward, plain_clip)
            assert torch.allclose(norm, expected, atol=2e-3)  # Muon computes in bf16
        for name, value in accelerator.get_state_dict(model).items():
            assert torch.allclose(value, plain.state_dict()[name], atol=2e-3), name

    plain, raw = small_model(), small_model()
    plain_optimizers = optimizers_of(plain)
    listed = list(raw.parameters())  # before they are replaced by shards

    def clip(_, bound):
        return accelerator.clip_grad_norm_(listed, bound)

    model, *optimizers = accelerator.prepare(raw, *optimizers_of(raw))
    torch.manual_seed(1)
    train(2)
    accelerator.save_state(folder)
    accelerator, raw = Accelerator(), small_model(seed=9)
    listed = list(raw.parameters())
    model = accelerator.prepare(raw)
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers_of(raw)]
    accelerator.load_state(folder)
    train(2)
    return True


def test_a_sharded_model_may_have_several_optimizers(tmp_path):
    assert run_ranks(train_with_two_optimizers, 2, str(tmp_path / "state"), timeout=60) == [True, True]


def prepare_in_the_wrong_order():
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin

    raw = small_model()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    optimizer = accelerator.prepare(torch.optim.SGD(raw.parameters(), 0.1))
    model = accelerator.prepare(raw)
    errors = []

    def train():
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()

    for change in (lambda: None, lambda: accelerator.prepare(model[0].requires_grad_(False) and model)):
        change()
        with pytest.raises(InvalidArgument) as caught:
            train()
        errors.append(str(caught.value))
        accelerator.prepare(optimizer)
        before = model[2].weight.full_tensor().clone()
        train()
        assert not torch.equal(before, model[2].weight.full_tensor())
    return errors


def test_an_optimizer_that_was_prepared_before_its_model_does_not_step():
    for errors in run_ranks(prepare_in_the_wrong_order, 2):
        assert len(errors) == 2
        assert all("replaced parameters of this optimizer since it was prepared" in error for error in errors), errors


def divide_layers():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    from rankbook.runtime import (
        Accelerator,
        ParallelismConfig,
        TorchTensorParallelConfig,
    )

    torch.set_num_threads(1)
    plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
    part_of_it = TorchTensorParallelConfig(plan={"0": ColwiseParallel(output_layouts=Replicate())})
    results = []
    for options in (
        {"dp_shard_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "tp_size": 2},
        {"tp_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_replicate_size": 4},
        {"tp_size": 4, "tp_handler": part_of_it},  # the other layers keep plain parameters
    ):
        start_over()
        accelerator = Accelerator(parallelism_config=ParallelismConfig(**{"tp_handler": plan, **options}))
        reference, raw = small_model(), small_model()
        expected, optimizer_of_raw = (
            # As torch does it by default on CUDA.
            torch.optim.Adam(model_copy.parameters(), 0.01, foreach=True)
            for model_copy in (reference, raw)
        )
        model, optimizer = accelerator.prepare(raw, optimizer_of_raw)
        parts, part = accelerator.setup.data_parallel_size, accelerator.setup.data_parallel_rank
        torch.manual_seed(1)
        for _ in range(3):
            data = torch.randn(parts, 3, 8)
            accelerator.backward(model(data[part]).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            reference(data.flatten(0, 1)).square().mean().backward()
            assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), atol=1e-6)
            expected.step()
            expected.zero_grad()
        for name, value in accelerator.get_state_dict(model).items():
            assert torch.allclose(value, reference.state_dict()[name], atol=1e-5), (options, name)
        local = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in model.parameters())
        metrics = accelerator.gather_for_metrics(torch.tensor([part]))
        assert metrics.tolist() == list(range(parts))
        loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(12)), batch_size=2, shuffle=True))
        rounds = [accelerator.gather_for_metrics(batch) for batch in loader]
        assert sorted(torch.cat(rounds).tolist()) == list(range(12)), (options, rounds)
        hooks = hooks_of(raw)
        accelerator.free_memory()
        results.append((accelerator.strategy.wrapper, local, hooks_of(raw), hooks))
        assert all(type(parameter) is torch.nn.Parameter for parameter in raw.parameters())
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_mesh_divides_layers_and_batches_and_the_result_is_the_whole_models():
    parameter_count = 8 * 12 + 12 + 12 * 4 + 4
    for results in run_ranks(divide_layers, 4, timeout=110):
        assert [result[0] for result in results] == [
            "parallelize_module",
            "parallelize_module",
            "parallelize_module",
            "fully_shard",
            "DistributedDataParallel",
            "parallelize_module",
        ]
        assert all(result[1] < parameter_count for result in (*results[:4], results[5])), results
        assert all(result[2] == 0 for result in results), "hooks were left on the model"
        assert results[0][3] > 0


def free_sharded():
    """Free a sharded model that the caller gives up, and one that it keeps."""
    from torch.distributed.tensor import DTensor

    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    given_up, kept = accelerator.prepare(small_model(), small_model())
    accelerator.free_memory(given_up)
    gathered = [not isinstance(next(model.parameters()), DTensor) for model in (given_up, kept)]
    again = accelerator.prepare(given_up)
    return gathered, isinstance(next(again.parameters()), DTensor)


@pytest.mark.slow
def test_a_sharded_model_that_is_given_up_is_not_gathered():
    assert run_ranks(free_sharded, 2) == [([False, True], True)] * 2


def free_dropped():
    """Free the memory after the last reference to a sharded model is gone, which only a cycle keeps."""
    import gc

    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin
    from rankbook.runtime import accelerator as module

    released = []
    release = module.release_model
    module.release_model = lambda model: (released.append(model), release(model))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    gc.disable()
    model = accelerator.prepare(small_model())
    if accelerator.process_index == 0:
        model.itself = [model]
    del model
    accelerator.free_memory()
    return len(released)


@pytest.mark.slow
def test_a_sharded_model_that_only_a_cycle_keeps_is_not_gathered():
    assert run_ranks(free_dropped, 2) == [0, 0]


def prepare_after_failures():
    """Prepare a model after a preparation that has failed in the middle, of all kinds that shard."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    from rankbook.runtime import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchTensorParallelConfig,
    )

    def units(module):
        return isinstance(module, nn.Linear)

    def error_of(model):
        try:
            accelerator.prepare(model)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return ""

    def changes(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.backward(model(torch.arange(32.0).view(4, 8).sin()).square().mean())
        optimizer.step()
        after = accelerator.get_state_dict(model)
        sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return sharded, [name for name in before if torch.equal(before[name], after[name])]

    class Scaled(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, rows):
            return super().forward(rows) * self.scale

    found = {}
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=units, activation_checkpointing=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Scaled(*small_model())
    hooks, parameters = hooks_of(model), list(model.parameters())
    found["error"] = error_of(model)
    found["as before"] = (
        hooks_of(model) == hooks
        and all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        and not any(isinstance(module, FSDPModule) for module in model.modules())
    )
    model.load_state_dict(model.state_dict())
    model.scale = nn.Parameter(torch.tensor([2.0]))
    found["FSDP"] = changes(model)

    start_over()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=units))
    model = Scaled(*small_model())
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))  # by the user
    error_of(model)
    found["user's"] = [type(part).__name__ for part in (model, model[0], model[2])]
    model.scale = nn.Parameter(torch.tensor([2.0]))
    found["FSDP, user's"] = changes(model)

    start_over()
    plan = {"0": "colwise", "1": "colwise", "2": "rowwise"}
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    )
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    hooks = hooks_of(model)
    found["error, TP"] = error_of(model)
    found["as before, TP"] = hooks_of(model) == hooks and not any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
    start_over()
    plan = {"0": "colwise", "2": "rowwise"}
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    )
    model[1] = nn.Tanh()
    found["TP"] = changes(model)
    return found


@pytest.mark.slow
def test_a_model_can_be_prepared_after_its_sharding_has_failed():
    for found in run_ranks(prepare_after_failures, 2):
        assert "scalar parameters" in found["error"] and found["as before"]
        assert found["FSDP"] == found["FSDP, user's"] == (True, [])
        assert found["user's"] == ["Scaled", "FSDPLinear", "Linear"]
        assert "LayerNorm" in found["error, TP"] or "nn.Linear" in found["error, TP"]
        assert found["as before, TP"]
        assert found["TP"][1] == []


def join_and_tell():
    """Train with uneven inputs under DDP, and report the shards."""
    from torch.utils.data import DataLoader

    from rankbook.protocol import telemetry
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    model = small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.9))
    loader = accelerator.prepare(DataLoader(torch.randn(9, 8), batch_size=2))
    batches = len(loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        lengths = []
        for batch in loader:
            lengths.append(len(batch))
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"].sum().item()
    states = accelerator.gather_for_metrics(
        [(optimizer.steps, momentum, scheduler.get_last_lr())], use_gather_object=True
    )
    assert states[0] == states[1] and optimizer.steps == 3
    weights = accelerator.gather(model.module[0].weight.detach().sum())
    assert weights[0] == weights[1]
    assert len(loader) == batches, "as before the block"

    messages = []
    telemetry.listener = messages.append
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(model, optimizer)
    telemetry.listener = None
    return lengths, messages[0]


def test_join_handles_uneven_inputs_and_prepare_reports_shards():
    (first, report), (second, _) = run_ranks(join_and_tell, 2)
    assert (first, second) == ([2, 2, 1], [2, 2])
    assert (report.kind, report.class_name, report.wrapper) == ("model", "Sequential", "fully_shard")
    assert report.parameters == 8 * 12 + 12 + 12 * 4 + 4
    assert report.bytes == 4 * report.parameters // 2
    assert report.layout == {"Shard(dim=0)": 4}


def train_in_half_precision():
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    from rankbook.runtime import (
        Accelerator,
        GradScalerKwargs,
        ParallelismConfig,
        TorchTensorParallelConfig,
        settings,
    )

    torch.set_num_threads(1)
    settings.check_precision = lambda *_: None  # its scaler works on the CPU too
    plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
    part_of_it = TorchTensorParallelConfig(plan={"0": ColwiseParallel(output_layouts=Replicate())})
    results = []
    for options in (
        {"tp_size": 4, "tp_handler": plan},
        {"tp_size": 4, "tp_handler": part_of_it},  # the other layers keep plain parameters
        {"dp_replicate_size": 2, "tp_size": 2, "tp_handler": part_of_it},
        {"dp_shard_size": 2, "tp_size": 2, "tp_handler": part_of_it},
        {"dp_shard_size": 4},
    ):
        start_over()
        accelerator = Accelerator(
            mixed_precision="fp16",
            parallelism_config=ParallelismConfig(**options),
            kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
        )
        raw = small_model()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
        data = torch.ones(3, 8)

        def backward(accelerator=accelerator, model=model, data=data):
            accelerator.backward(model(data).square().mean())

        backward()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        skipped = []
        for number in range(4):  # an overflow in one rank's part of the last and of the first layer's gradient
            backward()
            parameter = list(model.parameters())[0 if number % 2 else -2]
            if accelerator.process_index == number:
                gradient = parameter.grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        results.append((norm, skipped, accelerator.scaler.get_scale()))
        accelerator.free_memory()
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_half_precision_skips_a_step_on_all_ranks_in_each_layout():
    reference = small_model()
    reference(torch.ones(3, 8)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9).item()
    for results in zip(*run_ranks(train_in_half_precision, 4), strict=True):
        for norm, skipped, scale in results:
            assert norm == pytest.approx(expected, rel=0.02)
            assert (skipped, scale) == ([True] * 4, 4.0)
