"""Test that training continues unchanged from a checkpoint, for all numbers of ranks and all ways to shard a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankbook.errors import CheckpointError, InvalidArgument
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.slow

SAMPLES, BATCH, WINDOW = 48, 6, 2
MIDDLE = 4
"""Batches before the save, of the 8 of an epoch."""


class Average:
    """The average of the weights, which holds DTensors if the model is sharded."""

    def __init__(self, model):
        self.model = model
        self.state = {"steps": 0, "weights": {name: item.detach().clone() for name, item in model.named_parameters()}}

    def update(self):
        self.state["steps"] += 1
        for name, item in self.model.named_parameters():
            self.state["weights"][name].lerp_(item.detach(), 0.1)

    def total(self):
        from rankbook.runtime.strategies.base import full_tensor

        return sum(full_tensor(value).abs().sum().item() for value in self.state["weights"].values())

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def training(**options):
    """Return the prepared objects of a fresh process: batches of 6, split by the ranks, with two batches per step."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook.runtime import Accelerator, DataLoaderConfiguration, set_seed
    from rankbook.runtime.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True), gradient_accumulation_steps=WINDOW, **options
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    set_seed(1)
    loader = DataLoader(TensorDataset(rows, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
    parts = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(Average(accelerator.unwrap_model(parts[0])))
    return accelerator, *parts


def go_on(accelerator, model, optimizer, scheduler, loader, stop=None):
    """Train until `stop`.

    Return for every batch its samples, the loss over all ranks, the learning rate, and the sum of the averaged weights.
    """
    (average,) = accelerator._custom_objects
    records = []
    for rows, numbers in loader:
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        average.update()
        samples = sorted(set(accelerator.gather(numbers).tolist()))
        loss_of_all = accelerator.reduce(loss.detach(), "mean").item()
        records.append((samples, loss_of_all, scheduler.get_last_lr()[0], average.total()))
        if len(records) == stop:
            break
    return records


def options_of(way, world):
    from rankbook.runtime import FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig

    plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
    return (
        {
            "whole": {"parallelism_config": ParallelismConfig(dp_replicate_size=world)},
            "shards": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
            "layers": {"parallelism_config": ParallelismConfig(tp_size=world, tp_handler=plan)},
        }[way]
        if world > 1
        else {}
    )


def divided(folder):
    """Save with a prepared ZeroRedundancyOptimizer, and load into a fresh one."""
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from rankbook.runtime import Accelerator, protection
    from rankbook.runtime.state import AcceleratorState, GradientState

    def start():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(3)
        accelerator, net = Accelerator(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
        return accelerator, *accelerator.prepare(net, optimizer)

    def step(accelerator, model, optimizer, number):
        accelerator.backward(model(torch.full((2, 4), float(number))).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def values(model, optimizer):
        moments = [value["exp_avg"].tolist() for value in optimizer.optimizer.optim.state.values()]
        return moments, [parameter.tolist() for parameter in model.parameters()]

    parts = start()
    for number in range(3):
        step(*parts, number)
    parts[0].save_state(folder)
    step(*parts, 3)
    again = start()
    step(*again, 7)
    again[0].load_state(folder)
    step(*again, 3)
    assert values(*again[1:]) == values(*parts[1:])
    assert values(*parts[1:])[0], "this rank has a part of the state"
    with pytest.raises(InvalidArgument, match="ZeroRedundancyOptimizer cannot be protected"):
        protection.protect(1)


def test_a_prepared_zero_redundancy_optimizer_is_saved_with_its_state(tmp_path):
    run_ranks(divided, 2, str(tmp_path / "checkpoint"))


def save_in(folder, layouts):
    """Save in the middle of an epoch, then go on: the rest of it, and what each rank drew."""
    import torch.distributed as dist

    results = {}
    for way in layouts:
        parts = training(**options_of(way, dist.get_world_size()))
        records = go_on(*parts, stop=MIDDLE)
        torch.manual_seed(50 + dist.get_rank())
        handle = parts[0].save_state(f"{folder}/{way}", async_=True)
        drawn = torch.rand(1).item()
        rest = go_on_within(parts)
        handle.wait(30)
        assert sorted(sample for samples, *_ in records + rest for sample in samples) == list(range(SAMPLES))
        results[way] = rest, drawn
    return results


def go_on_within(parts):
    """The rest of the epoch, by a loader that stands where the broken-off loop has left it."""
    loader = parts[-1]
    loader.load_state_dict(loader.state_dict())
    return go_on(*parts)


def load_in(folder, saved, layouts):
    import torch.distributed as dist

    world = dist.get_world_size()
    results = {}
    for where in saved:
        for way in layouts:
            parts = training(**options_of(way, world))
            go_on(*parts, stop=MIDDLE // 2)
            torch.manual_seed(7)
            drawn_after = torch.rand(1).item()
            torch.manual_seed(7)
            parts[0].load_state(f"{folder}/{where}")
            drawn = torch.rand(1).item()
            results[where, way] = go_on(*parts), drawn, drawn_after
    return results


@pytest.mark.parametrize(
    ("world", "layouts_by_ranks"),
    [
        pytest.param(2, {1: ["whole"], 3: ["shards"], 2: ["whole", "layers"]}, id="2"),
        pytest.param(1, {2: ["shards"]}, id="1", marks=pytest.mark.full),
        pytest.param(3, {1: ["whole"], 2: ["whole"]}, id="3", marks=pytest.mark.full),  # the same the other way
    ],
)
def test_training_goes_on_with_the_next_batch_however_many_ranks_load(world, layouts_by_ranks, tmp_path):
    layouts = ["whole", "shards", "layers"] if world == 2 else ["whole"]
    runs = run_ranks(save_in, world, str(tmp_path), layouts)
    for other, how in layouts_by_ranks.items():
        for rank, results in enumerate(run_ranks(load_in, other, str(tmp_path), layouts, how)):
            for (where, way), (rest, drawn, drawn_after) in results.items():
                expected = runs[0][where][0]
                assert [step[0] for step in rest] == [step[0] for step in expected], (where, way)
                assert len(rest) == SAMPLES // BATCH - MIDDLE
                for (_, loss, rate, total), (_, loss_then, rate_then, total_then) in zip(rest, expected, strict=True):
                    assert total == pytest.approx(total_then, rel=1e-4), (where, way)
                    assert loss == pytest.approx(loss_then, rel=1e-4), (where, way)
                    assert rate == pytest.approx(rate_then)
                assert drawn == (runs[rank][where][1] if rank < world else drawn_after), (where, way, rank)


def what_goes_wrong(folder):
    """Return the error of every rank, whichever rank failed."""
    from torch.utils.data import DataLoader

    parts = training()
    accelerator, model = parts[:2]
    rank = accelerator.process_index

    def error_text(call):
        try:
            call()
        except (InvalidArgument, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    class Bad:
        def state_dict(self):
            if rank == 1:
                raise ValueError("no state here")
            return {}

        load_state_dict = None

    errors = {"object": None, "folder": None, "hook": None, "loader": None, "shape": None}
    accelerator.save_state(f"{folder}/good")
    bad = Bad()
    accelerator.register_for_checkpointing(bad)
    try:
        accelerator.save_state(f"{folder}/good")
    except (InvalidArgument, ValueError) as error:
        errors["object"] = str(error)
    accelerator._custom_objects.clear()
    errors["folder"] = error_text(lambda: accelerator.load_state(folder if rank else f"{folder}/good"))
    errors["folders"] = error_text(lambda: accelerator.save_state(f"{folder}/of-rank-{rank}"))

    def hook(*_):
        raise InvalidArgument("the hook does not want to")

    if rank == 1:
        handle = accelerator.register_save_state_pre_hook(hook)
    errors["hook"] = error_text(lambda: accelerator.save_state(f"{folder}/good"))
    if rank == 1:
        handle.remove()
    other = accelerator.prepare(DataLoader(list(range(12)), batch_size=2))
    errors["loader"] = error_text(lambda: accelerator.load_state(f"{folder}/good"))
    del other
    with torch.no_grad():
        accelerator.unwrap_model(model)[2].bias = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    errors["shape"] = error_text(lambda: accelerator.load_state(f"{folder}/good"))
    more = accelerator.prepare(DataLoader(list(range(12)), batch_size=2)) if rank == 1 else None
    errors["names"] = error_text(lambda: accelerator.save_state(f"{folder}/good"))
    del more
    return errors


def a_hook_of_the_main_process(folder):
    from rankbook.checkpoint import load_metadata
    from rankbook.runtime import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))

    def hook(models, states, where):
        if accelerator.is_main_process:
            torch.save(states.pop(), Path(where) / "weights.pt")

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(folder)
    return sorted(load_metadata(folder).tensors), (Path(folder) / "weights.pt").is_file(), model is not None


def test_a_hook_may_save_a_model_on_the_main_process_only(tmp_path):
    assert run_ranks(a_hook_of_the_main_process, 2, str(tmp_path / "state")) == [([], True, True)] * 2


def hooks_of_ranks(folder, async_):
    """Save with hooks of all ranks, with one of rank 1 only, and with one that fails there. Return the texts."""
    from rankbook.runtime import Accelerator

    accelerator, value = Accelerator(), 1
    rank = accelerator.process_index
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    texts = []

    def write(models, states, where):
        (Path(where) / f"rank-{rank}").write_text(str(value))

    def fail(*_):
        raise InvalidArgument("the hook does not want to")

    def save():
        saving = accelerator.save_state(folder, async_=async_)
        if async_:
            saving.wait(60)

    def note():
        accelerator.wait_for_everyone()
        texts.append([(Path(folder) / f"rank-{number}").read_text() for number in range(2)])
        texts.append([path.name for path in Path(folder).parent.iterdir()])
        accelerator.wait_for_everyone()

    handle = accelerator.register_save_state_pre_hook(write)
    save()
    note()
    if rank == 0:
        handle.remove()
    value = 2
    save()
    note()
    if rank == 1:
        accelerator.register_save_state_pre_hook(fail)
    value = 3
    with pytest.raises(InvalidArgument, match="the hook does not want to"):
        save()
    note()
    assert model is not None
    return texts


def numbers_of_ranks(folder):
    """Return the folders of numbered saves, with an interrupt on rank 0 and a rank that sees fewer folders."""
    from rankbook.runtime import ProjectConfiguration, saving

    accelerator, *prepared = training(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    )
    saved = [accelerator.save_state()]
    keep, see = saving.keep_latest, saving.numbered_folders

    def interrupt(*_):
        raise KeyboardInterrupt

    saving.keep_latest = interrupt  # called on rank 0
    try:
        accelerator.save_state()
    except (KeyboardInterrupt, CheckpointError) as error:
        saved.append(type(error).__name__)
    saving.keep_latest = keep
    saved += [accelerator.save_state(), accelerator.save_state()]
    accelerator.project_configuration.iteration = 0  # as in a new process
    if accelerator.process_index == 1:
        saving.numbered_folders = lambda project: see(project)[:0]
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_2")
    saving.numbered_folders = see
    saved.append(accelerator.save_state())
    assert prepared
    return [Path(folder).name for folder in saved]


def test_all_ranks_number_the_same_after_an_interrupt_and_after_a_load(tmp_path):
    rank_0, rank_1 = run_ranks(numbers_of_ranks, 2, str(tmp_path))
    assert rank_0 == ["checkpoint_0", "KeyboardInterrupt", "checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert rank_1 == ["checkpoint_0", "CheckpointError", *rank_0[2:]]


@pytest.mark.parametrize("async_", [False, True])
def test_files_of_the_hooks_of_all_ranks_are_saved_together_or_not_at_all(tmp_path, async_):
    expected = [["1", "1"], ["state"], ["1", "2"], ["state"], ["1", "2"], ["state"]]
    assert run_ranks(hooks_of_ranks, 2, str(tmp_path / "state"), async_) == [expected] * 2


def test_save_and_load_errors_of_one_rank_are_raised_on_all_ranks(tmp_path):
    expected = {
        "object": "no state here",
        "folder": "no checkpoint found at",
        "folders": f"rank 1: the folder {tmp_path}/of-rank-1",
        "hook": "the hook does not want to",
        "loader": "does not contain loader_1",
        "shape": "model.2.bias",
        "names": ", loader_1",
    }
    for errors in run_ranks(what_goes_wrong, 2, str(tmp_path)):
        assert {name: error for name, error in errors.items() if error is None or expected[name] not in error} == {}


def sharded_objects(folder):
    """Save registered objects of a sharded model that cannot be restored on every rank. Return the errors."""
    from types import SimpleNamespace

    from torch.distributed.tensor import DTensor

    from rankbook.runtime import FullyShardedDataParallelPlugin, training_checkpoint

    parts = training(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator = parts[0]
    (average,) = accelerator._custom_objects
    then = average.total()
    errors = []

    def note_error(call, *args):
        with pytest.raises(CheckpointError) as raised:
            call(*args)
        errors.append(str(raised.value))

    average.state["hidden"] = SimpleNamespace(weight=average.state["weights"]["0.weight"])
    note_error(accelerator.save_state, f"{folder}/hidden")
    assert not Path(f"{folder}/hidden").exists()
    del average.state["hidden"]
    accelerator.save_state(f"{folder}/good")
    weights = average.state["weights"]
    average.state["weights"] = {}
    note_error(accelerator.load_state, f"{folder}/good")
    average.state["weights"] = {name: torch.zeros_like(value) for name, value in weights.items()}
    accelerator.load_state(f"{folder}/good")
    assert average.total() == then
    assert all(isinstance(value, DTensor) for value in average.state["weights"].values())
    # As earlier versions have stored it: rank 0's part.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_checkpoint, "_without_shards", lambda _, state, __: state)
        accelerator.save_state(f"{folder}/earlier")
    weights = average.state["weights"]
    note_error(accelerator.load_state, f"{folder}/earlier")
    with pytest.warns(UserWarning, match=r"only rank 0's part of sharded tensors in custom_checkpoint, which stays"):
        accelerator.load_state(f"{folder}/earlier", strict=False)
    assert average.state["weights"] is weights
    return errors, [value.tolist() for value in accelerator.get_state_dict(parts[1]).values()]


def test_sharded_tensors_of_a_registered_object_that_cannot_be_restored_are_refused(tmp_path):
    from rankbook.checkpoint import load_plain

    (errors, weights), other = run_ranks(sharded_objects, 2, str(tmp_path))
    assert (errors, weights) == other
    for error, message in zip(
        errors,
        [
            "has a DTensor in an object that is no dict, list or tuple",
            "the registered object has none there: create its tensors before load_state()",
            "only rank 0's part of sharded tensors in custom_checkpoint; strict=False loads the rest",
        ],
        strict=True,
    ):
        assert message in error
    stored = load_plain(tmp_path / "good")
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [stored[f"object_tensors.custom_checkpoint.weights.{name}"].tolist() for name in names] == weights


def write_files(folder):
    """Write the files of a sharded model."""
    from rankbook.runtime import FullyShardedDataParallelPlugin

    accelerator, model = training(fsdp_plugin=FullyShardedDataParallelPlugin())[:2]
    accelerator.save_model(model, folder, max_shard_size=400)
    tensors = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    from rankbook.checkpoint.storage.backends import LocalStorage

    if accelerator.process_index == 0:

        def fail(*_):
            raise OSError("the disk is full")

        LocalStorage.write = fail
    with pytest.raises(OSError if accelerator.process_index == 0 else InvalidArgument, match="the disk is full"):
        accelerator.save_model(model, folder)
    return tensors


def test_sharded_model_is_written_completely_and_a_full_disk_raises_on_all_ranks(tmp_path):
    from tests.runtime.test_saving import read

    (tensors, _) = run_ranks(write_files, 2, str(tmp_path))
    assert len(list(tmp_path.glob("model-*-of-00002.safetensors"))) == 2
    stored = read(tmp_path)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
