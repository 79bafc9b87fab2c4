"""Test what `protect` refuses, and when it takes snapshots. What heal restores is tested in faults/test_protect.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rankbook import snapshot_files
from rankbook.errors import CollectiveAborted, InvalidArgument, NumericalError
from rankbook.numerics import compare, watch_numbers
from rankbook.runtime import Accelerator, GradScalerKwargs, optimizer, prepared, protection, set_seed, settings
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.snapshot_files import SnapshotFile, SnapshotHeader, SnapshotPlace, SnapshotVersion, read_headers
from tests.rank_processes import run_ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make this process the only rank, with its snapshots in this folder."""
    monkeypatch.setattr(snapshot_files, "this_place", SnapshotPlace(tmp_path, 0, 1))
    monkeypatch.setattr(prepared, "_registered", {})  # objects of other tests
    yield tmp_path
    protection.end()


def prepare(count: int = 2) -> tuple[list[nn.Module], list[AcceleratedOptimizer]]:
    """Return prepared models, and an optimizer of each."""
    models = [nn.Linear(1, 1) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    made = Accelerator(cpu=True).prepare(*models, *optimizers)
    return made[:count], made[count:]


def versions(folder: Path) -> list[SnapshotVersion]:
    return [header.version for header in read_headers(folder, [0])[0]]


@pytest.mark.parametrize("every", [-1, 1.5, True, "2"])
def test_another_value_than_a_number_of_steps_is_refused(every):
    with pytest.raises(InvalidArgument, match="expected a number of steps, 1 or more, got every="):
        protection.protect(every)


def test_a_process_that_is_no_rank_cannot_be_protected():
    with pytest.raises(InvalidArgument, match="requires ranks of Rankbook"):
        protection.protect(1)
    protection.protect(0)
    assert optimizer.after_step is None


def test_what_optimizers_and_models_outside_prepare_are_is_said():
    model = torch.nn.Linear(1, 1)
    namespace = {"model": model, "x": torch.ones(1), "steps": 3, "_private": 1, "rank": 2, "torch": torch}
    namespace["optimizer"] = torch.optim.SGD(namespace["model"].parameters())
    assert protection.find_unprotected(namespace, {"rank": None}) == {
        "model": "a module outside prepare()",
        "x": "a tensor",
        "steps": "a variable (int)",
        "optimizer": "an optimizer outside prepare()",
    }


def test_a_snapshot_is_taken_when_all_optimizers_have_stepped_also_after_a_return(folder):
    _models, (one, other) = prepare()
    one.step()
    other.step()
    protection.protect(1)
    for number in (1, 2):
        one.step()
        assert versions(folder)[0].number == number
        other.step()
        assert versions(folder)[0] == SnapshotVersion(number + 1, 0, number + 1)
    one.step()
    protection.set_interval(4)  # by a call that was aborted
    assert protection.restore(versions(folder)[0], 4) == {"step": 3, "lost": 0, "refused": ""}
    assert (one.steps, other.steps, protection.interval()) == (3, 3, 1)
    one.step()
    assert versions(folder)[0].number == 3
    other.step()
    assert versions(folder)[0] == SnapshotVersion(4, 0, 4)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_of_another_training_delays_one_snapshot_and_does_not_count(folder, steps):
    _models, (old, new) = prepare()
    for _ in range(steps):
        old.step()
    protection.protect(1)
    new.step()
    assert versions(folder)[0].number == 1, "the other one may take part"
    for number in range(2, 7):
        new.step()
        assert versions(folder)[0] == SnapshotVersion(number, 0, number)
    old.step()
    new.step()
    assert versions(folder)[0].number == 7, "now both do"


def test_a_snapshot_is_taken_at_the_last_of_two_optimizers_beside_one_of_another_training(folder):
    _models, (old, one, other) = prepare(3)
    old.step()
    protection.protect(1)
    taken = []
    for _ in range(3):
        for wrapper in (one, other):
            before = versions(folder)[0]
            wrapper.step()
            taken.append(versions(folder)[0] != before)
    assert taken == [False, False, False, True, False, True]


def test_an_optimizer_that_another_rank_does_not_have_is_not_waited_for(folder, monkeypatch):
    _models, (old,) = prepare(1)
    old.step()
    # The other rank was restarted since.
    monkeypatch.setattr(protection, "gather", lambda value: [value, (0, False, set())] if len(value) == 3 else [value])
    protection.protect(1)
    _models_now, (new,) = prepare(1)
    new.step()
    assert versions(folder)[0].number == 2


def test_a_new_optimizer_is_protected_from_its_first_step_on(folder):
    def make() -> AcceleratedOptimizer:
        _models, (wrapper,) = prepare(1)
        wrapper.owner = [wrapper]  # a cycle of references
        return wrapper

    training = make()
    protection.protect(1)
    for _ in range(2):
        training.step()
    training = make()
    training.step()
    assert versions(folder)[0] == SnapshotVersion(4, 0, 1)


def test_an_optimizer_that_only_the_traceback_of_an_error_keeps_is_not_waited_for(folder, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError from ValueError()

    _models, (training,) = prepare(1)
    protection.protect(1)
    training.step()
    training.optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError) as failed:
        training.step()
    monkeypatch.setattr(sys, "last_value", failed.value, raising=False)
    del failed, training, _models
    _models, (training,) = prepare(1)
    training.step()
    assert versions(folder)[0].number == 3


def test_the_snapshot_that_all_ranks_have_stays_after_others_were_interrupted(folder, monkeypatch):
    monkeypatch.setattr(snapshot_files, "this_place", SnapshotPlace(folder, 0, 2))
    _models, (one, other) = prepare()
    protection.protect(1)

    def peer_takes(generation: int, version: SnapshotVersion) -> None:
        file = SnapshotFile(folder, 1, generation)
        file.allocate(1)
        file.commit(SnapshotHeader(version, 0.0, 1, 1), b"")

    peer_takes(0, versions(folder)[0])
    one.step()
    other.step()
    # The other rank was interrupted before this step. They agree on the number, and it makes the next one first.
    protection.continue_numbers(2)
    peer_takes(1, SnapshotVersion(3, 0, 2))
    one.step()
    other.step()
    assert [version.number for version in versions(folder)] == [3, 1]


def test_an_interrupt_while_a_scheduler_updates_the_snapshot_leaves_the_one_before(folder, monkeypatch):
    monkeypatch.setattr(snapshot_files, "this_place", SnapshotPlace(folder, 0, 2))
    monkeypatch.setattr(protection, "PEER_TIMEOUT", 0.1)
    model = nn.Linear(1, 1)
    wrapper = torch.optim.SGD(model.parameters(), lr=1.0)
    _model, wrapper, scheduler = Accelerator(cpu=True).prepare(
        model, wrapper, torch.optim.lr_scheduler.StepLR(wrapper, 1)
    )
    protection.protect(1)
    peer = SnapshotFile(folder, 1, 0)  # the other rank is interrupted at the same place
    peer.allocate(1)
    peer.commit(SnapshotHeader(versions(folder)[0], 0.0, 1, 1), b"")
    wrapper.step()

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(protection._Area, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    assert [version.number for version in versions(folder)] == [1]
    scheduler.step()
    wrapper.step()
    assert [version.number for version in versions(folder)] == [3, 1]


class Stopped(Exception):
    pass


class Loops:
    """A training of one process, by loops that step their scheduler and read batches at different moments.

    `evaluates` and `prefetch` stand for a loop with a scheduler's step per epoch, and one that reads a batch ahead.
    `two_in_turn` reads a longer loader too, and leaves it with two batches, or one, that were not read.
    """

    def __init__(self) -> None:
        set_seed(3)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        data = torch.randn(24, 2, generator=torch.Generator().manual_seed(7))
        loaders = [DataLoader(data, size, shuffle=size < 12) for size in (4, 3, 12)]
        self.model, self.optimizer, self.scheduler, self.loader, self.longer, self.held_out = self.accelerator.prepare(
            model, optimizer, scheduler, *loaders
        )
        self.losses: dict[int, float] = {}
        self.stop_at = -1

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        if self.optimizer.steps == self.stop_at:
            raise Stopped
        self.losses[self.optimizer.steps] = loss.item()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after_the_optimizer(self) -> None:
        for batch in self.loader:
            self.accelerator.backward(self.forward(batch))
            self.step()
            self.scheduler.step()

    def in_the_next_iteration(self) -> None:
        for batch in self.loader:
            if self.optimizer.steps:
                self.scheduler.step()
            self.accelerator.backward(self.forward(batch))
            self.step()

    def prefetch(self) -> None:
        batches = iter(self.loader)
        batch = next(batches, None)
        while batch is not None:
            self.accelerator.backward(self.forward(batch))
            batch = next(batches, None)
            self.step()
            self.scheduler.step()

    def two_in_turn(self) -> None:
        for pair in zip(self.loader, self.longer, strict=False):
            self.accelerator.backward(self.forward(torch.cat(pair)))
            self.step()
            self.scheduler.step()

    def longer_one_first(self) -> None:
        for pair in zip(self.longer, self.loader, strict=False):
            self.accelerator.backward(self.forward(torch.cat(pair)))
            self.step()
            self.scheduler.step()

    def evaluates(self) -> None:
        for batch in self.loader:
            self.accelerator.backward(self.forward(batch))
            self.step()
        with torch.no_grad():
            for batch in self.held_out:
                self.model(batch)
        self.scheduler.step()

    def evaluates_around_a_single_step(self) -> None:
        if not hasattr(self, "whole"):  # the samples are one batch, which no loader reads
            self.whole = torch.randn(24, 2, generator=torch.Generator().manual_seed(8))
        for batch in self.held_out:
            self.model(batch).detach()
        self.accelerator.backward(self.forward(self.whole))
        self.step()
        for batch in self.held_out:
            self.model(batch).detach()
        self.scheduler.step()


def test_the_step_of_a_scheduler_after_an_evaluation_is_part_of_the_snapshot(folder):
    def train(epochs: int) -> None:
        for _ in range(epochs):
            loops.evaluates_around_a_single_step()

    loops = Loops()
    protection.protect(1)
    train(3)
    version, rate = versions(folder)[0], loops.scheduler.get_last_lr()
    assert version.step == 3
    train(1)
    protection.restore(version, 1)
    assert loops.scheduler.get_last_lr() == rate


@pytest.mark.parametrize("stop_at", [4, 6])  # in the middle of an epoch, and at the first step of one
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "loop",
    ["after_the_optimizer", "in_the_next_iteration", "prefetch", "two_in_turn", "longer_one_first", "evaluates"],
)
def test_a_return_continues_with_the_batch_and_the_rate_of_the_next_step(folder, loop, every, stop_at):
    def train(loops: Loops, *, epochs: int) -> None:
        for _ in range(epochs):
            getattr(loops, loop)()

    undisturbed = Loops()
    train(undisturbed, epochs=5)
    loops = Loops()
    protection.protect(every)
    loops.stop_at = stop_at
    with pytest.raises(Stopped):
        train(loops, epochs=3)
    restored = protection.restore(versions(folder)[0], every)
    assert stop_at - every < restored["step"] <= stop_at
    loops.stop_at = -1
    train(loops, epochs=3)
    assert max(loops.losses) > stop_at + 5
    assert loops.losses == {step: loss for step, loss in undisturbed.losses.items() if step in loops.losses}


@pytest.mark.parametrize("error", [CollectiveAborted, KeyboardInterrupt])  # an instance would keep the test's models
def test_snapshots_stay_if_the_ranks_are_protected_again_and_that_is_aborted(folder, monkeypatch, error):
    _models, _optimizers = prepare()
    accelerator = Accelerator(cpu=True)

    def abort(_: object) -> None:
        raise error("rank 1 has died")

    accelerator.protect(2)
    with monkeypatch.context() as patch:
        patch.setattr(protection.RankSnapshots, "begin", abort)
        with pytest.raises(error):
            accelerator.protect(3)
    assert protection.interval() == 2
    assert len(versions(folder)) == 1
    for every in (-1, 2.5):
        with pytest.raises(InvalidArgument):
            accelerator.protect(every)
        assert protection.interval() == 2, "a mistake does not end it"
    error = InvalidArgument  # raised by `abort`
    with monkeypatch.context() as patch:
        patch.setattr(protection.RankSnapshots, "begin", abort)
        with pytest.raises(InvalidArgument):
            accelerator.protect(3)
    assert protection.interval() == 0
    assert versions(folder) == []


def test_the_end_removes_what_an_earlier_process_of_this_rank_has_left(folder):
    file = SnapshotFile(folder, 0, 1)
    file.allocate(8)
    file.commit(SnapshotHeader(SnapshotVersion(1, 0, 1), 0.0, 8, 1), b"")
    protection.protect(0)
    assert list(folder.iterdir()) == []


def test_a_return_in_the_middle_of_a_step_ends_the_round_of_the_scaler(folder, monkeypatch):
    monkeypatch.setattr(settings, "check_precision", lambda *_: None)  # which allows fp16 on CUDA devices only
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = nn.Linear(1, 1, bias=False)
    model, wrapper = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def begin_step() -> None:
        accelerator.backward(model(torch.ones(1, 1)).sum() * 0.25)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # unscales the gradients

    begin_step()
    wrapper.step()
    wrapper.zero_grad()
    protection.protect(1)
    begin_step()
    assert protection.restore(versions(folder)[0], 1)["refused"] == ""
    begin_step()
    wrapper.step()
    assert (wrapper.steps, accelerator.scaler.get_scale()) == (2, 8.0)


class Overflowing(torch.optim.SGD):
    """An optimizer that makes its parameters NaN."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].data.fill_(float("nan"))


@pytest.mark.parametrize("is_before", [True, False])
def test_an_alarm_of_the_watch_is_in_the_middle_of_a_step_only_after_an_update(folder, is_before):
    model = nn.Linear(1, 1)
    model, wrapper = Accelerator(cpu=True).prepare(model, Overflowing(model.parameters(), lr=1.0))
    protection.protect(1)
    watch_numbers("nan")
    try:
        model(torch.full((1, 1), float("nan") if is_before else 1.0)).sum().backward()
        with pytest.raises(NumericalError, match="in the data" if is_before else "in the optimizer's step"):
            wrapper.step()
    finally:
        watch_numbers("off")
    assert protection.training_place().is_mixed is not is_before


def test_an_optimizer_with_lists_of_tensors_in_its_state_repeats_its_steps_after_a_return(folder):
    def train(steps: int) -> list[torch.Tensor]:
        return [wrapper.step(closure).detach() for _ in range(steps)]

    def closure() -> torch.Tensor:
        wrapper.zero_grad()
        loss = (model(data) - data.prod(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    data = torch.randn(16, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1, history_size=4)
    model, wrapper = Accelerator(cpu=True).prepare(model, optimizer)
    train(5)
    protection.protect(1)
    version = versions(folder)[0]
    expected = train(1)
    assert protection.restore(version, 1)["refused"] == ""
    (state,) = wrapper.state.values()
    tensors = [*state["old_dirs"], *state["old_stps"], *state["ro"]]
    assert len(tensors) == 12
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), "views of the snapshot"
    # They would change when the file of that snapshot is written again.
    before = [tensor.clone() for tensor in tensors]
    assert train(4)[:1] == expected
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


class Adapting(torch.optim.SGD):
    """SGD that counts its calls in an attribute, and keeps a tensor in an object."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("memory", SimpleNamespace(total=torch.zeros(2))).total.add_(1.0)
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        super().load_state_dict({name: value for name, value in state.items() if name != "calls"})


def test_state_that_only_the_class_of_an_optimizer_knows_comes_back(folder):
    model = nn.Linear(1, 1, bias=False)
    _model, wrapper = Accelerator(cpu=True).prepare(model, Adapting(model.parameters(), lr=1.0))
    protection.protect(1)
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1)
        wrapper.step()
    version = versions(folder)[0]
    wrapper.step()
    assert protection.restore(version, 1)["refused"] == ""
    (state,) = wrapper.state.values()
    assert (wrapper.optimizer.calls, state["memory"].total.tolist()) == (2, [2.0, 2.0])
    assert state["memory"].total.untyped_storage().nbytes() == 8, "a view of the snapshot"


class Counting(torch.optim.SGD):
    """SGD that keeps a number and a tensor under names, and not under a parameter."""

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        self.state.setdefault("total", torch.zeros(2)).add_(1.0)
        return super().step(closure)


def test_state_of_an_optimizer_under_a_name_comes_back(folder):
    model = nn.Linear(1, 1)
    _model, wrapper = Accelerator(cpu=True).prepare(model, Counting(model.parameters(), lr=1.0))
    protection.protect(1)
    wrapper.step()
    version = versions(folder)[0]
    wrapper.step()
    assert protection.restore(version, 1)["refused"] == ""
    assert (wrapper.state["count"], wrapper.state["total"].tolist()) == (1, [1.0, 1.0])
    wrapper.step()
    assert (wrapper.state["count"], wrapper.state["total"].tolist()) == (2, [2.0, 2.0])
    assert wrapper.state["total"].untyped_storage().nbytes() == 8, "a view of the snapshot"


def test_tensors_in_objects_of_a_registered_state_are_copies_after_a_return(folder):
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    replay = Replay([SimpleNamespace(reward=torch.full((3,), 7.0))])
    accelerator.register_for_checkpointing(replay)
    protection.protect(1)
    assert protection.restore(versions(folder)[0], 1)["refused"] == ""
    (item,) = replay.items
    assert item.reward.untyped_storage().nbytes() == item.reward.nbytes, "a view of the snapshot"
    assert item.reward.tolist() == [7.0] * 3
    assert model is not None and optimizer is not None


class Replay:
    """A buffer of a program whose entries are objects."""

    def __init__(self, items: list) -> None:
        self.items = items

    def state_dict(self) -> dict:
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict) -> None:
        self.items = state["items"]


def test_an_optimizer_with_state_in_another_one_is_not_protected(folder):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

    model = nn.Linear(1, 1)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    with pytest.raises(InvalidArgument, match="a Lookahead cannot be protected"):
        protection.protect(1)
    assert versions(folder) == []


@pytest.mark.parametrize(("option", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")])
def test_state_of_a_new_rank_is_restored_on_the_device_where_its_optimizer_expects_it(option, device):
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter]))
    optimizer.param_groups[0].update({"lr": torch.tensor(0.1, device="meta"), option: True})
    state = {"step": torch.tensor(3.0), "average": torch.tensor(0.5), "moments": torch.ones(2)}
    stored = {"groups": [{"lr": torch.tensor(0.2)}], "values": [[state]], "named": {}, "others": {}}
    stored |= {"steps": 3, "skipped": False}
    protection._restore_optimizer(stored, optimizer)
    restored = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert restored == {"step": device, "average": "meta", "moments": "meta"}
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


class Averaging(torch.optim.SGD):
    """An optimizer that keeps its averages in a dict."""

    def step(self, *_):
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("averages", {"fast": torch.zeros_like(parameter.detach())})
            average["fast"].add_(1)


class Weights:
    """A registered object that is made anew when it is loaded."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return {"values": dict(self.values)}

    def load_state_dict(self, state):
        self.values = state["values"]


def restore_sharded_objects(folder: Path) -> tuple[list[float], list[str], bool]:
    """Return to a snapshot of a sharded model whose optimizer and registered object have DTensors in dicts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    from rankbook.runtime import FullyShardedDataParallelPlugin

    snapshot_files.this_place = SnapshotPlace(folder, 0, 1)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = nn.Linear(2, 3)
    model, wrapper = accelerator.prepare(model, Averaging(model.parameters()))
    weights = Weights({name: value.detach().clone().fill_(5) for name, value in model.named_parameters()})
    accelerator.register_for_checkpointing(weights)
    wrapper.step()
    protection.protect(1)
    version = versions(folder)[0]
    wrapper.step()
    # A new rank has an object without tensors.
    weights.values = {}
    assert protection.restore(version, 1)["refused"] == ""
    averages = [values["averages"]["fast"] for values in wrapper.state.values()]
    tensors = [*averages, *weights.values.values()]
    layouts = all(isinstance(value, DTensor) and value.device_mesh is model.weight.device_mesh for value in tensors)
    wrapper.step()  # an optimizer refuses a mix of tensors and DTensors
    weights.values["other"] = distribute_tensor(torch.ones(1), init_device_mesh("cpu", (1,), mesh_dim_names=("other",)))
    with pytest.raises(
        InvalidArgument, match=r"it has a DTensor on DeviceMesh.*, which is no mesh of a prepared model"
    ):
        wrapper.step()
    return [value.full_tensor().mean().item() for value in tensors], list(weights.values), layouts


@pytest.mark.slow
def test_sharded_tensors_in_dicts_come_back_as_such(tmp_path):
    [(means, names, layouts)] = run_ranks(restore_sharded_objects, 1, tmp_path)
    assert (means, names, layouts) == ([3, 3, 5, 5], ["weight", "bias", "other"], True)


class Rows(torch.optim.Optimizer):
    """An optimizer that keeps a number for each row of a matrix, which all ranks have, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, *_):
        from torch.distributed.tensor import Replicate, distribute_tensor

        for parameter in self.param_groups[0]["params"]:
            rows = torch.arange(float(len(parameter)))
            self.state[parameter]["rows"] = distribute_tensor(rows, parameter.device_mesh, [Replicate()])


def restore_rows(folder: Path) -> list[tuple[object, ...]]:
    """Return the state of a new rank's optimizer after a return to a snapshot."""
    from rankbook.runtime import FullyShardedDataParallelPlugin

    snapshot_files.this_place = SnapshotPlace(folder, 0, 1)
    model = nn.Linear(2, 3)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model, wrapper = accelerator.prepare(model, Rows(model.parameters()))
    wrapper.step()
    protection.protect(1)
    wrapper.state.clear()
    assert protection.restore(versions(folder)[0], 1)["refused"] == ""
    states = [state["rows"] for state in wrapper.state.values()]
    return [(str(value.placements), tuple(value.shape), value.full_tensor().tolist()) for value in states]


@pytest.mark.slow
def test_state_of_another_shape_than_its_parameter_comes_back_as_it_was_divided(tmp_path):
    [states] = run_ranks(restore_rows, 1, tmp_path)
    assert states == [("(Replicate(),)", (3,), [0.0, 1.0, 2.0])] * 2


def test_a_comparison_takes_no_snapshot_and_counts_no_step(folder):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, wrapper = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapper.optimizer, 0.5)
    scheduler = accelerator.prepare(schedule)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    protection.protect(1)
    step(model, wrapper, torch.ones(4, 2))
    before, place = versions(folder), protection.training_place()
    assert compare(step, model, wrapper, torch.ones(4, 2), layouts=("current", "current")).equal
    assert versions(folder) == before
    assert protection.training_place() == place
    scheduler.step()
    assert versions(folder)[0].updates == 1
    step(model, wrapper, torch.ones(4, 2))
    assert versions(folder)[0] == SnapshotVersion(before[0].number + 1, 0, 2)
