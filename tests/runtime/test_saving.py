"""Checkpoints of a training, in one process: numbers, hooks, what is in the background, files of a model."""

from __future__ import annotations

import copy
import errno
import gc
import inspect
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as torch_files
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rankbook.checkpoint import async_save, load_metadata, load_plain, verify
from rankbook.checkpoint import saving as checkpoint_saving
from rankbook.checkpoint.format import manifest as manifest_format
from rankbook.checkpoint.saving import Writer
from rankbook.checkpoint.state_dict.models import sharded_state_dicts
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor
from rankbook.checkpoint.state_dict.state_dicts import map_leaves
from rankbook.checkpoint.storage import backends
from rankbook.checkpoint.storage.backends import LocalStorage, storage_of
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime import (
    Accelerator,
    GradScalerKwargs,
    ProjectConfiguration,
    model_files,
    saving,
    settings,
    training_checkpoint,
)
from rankbook.runtime.data import rng, stateful
from rankbook.runtime.gradient_state import window
from rankbook.runtime.state import AcceleratorState


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def trained(accelerator, seed=1, steps=1):
    """Return a model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def numbers(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_process_that_does_not_save_imports_no_checkpoint_code():
    code = (
        "import sys\nfrom rankbook.runtime import Accelerator\nAccelerator().prepare()\n"
        "print([name for name in sys.modules if name.startswith(('rankbook.checkpoint', 'safetensors'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_several_models_with_one_optimizer_and_a_parameter_of_none_come_back(tmp_path):
    def prepared(seed):
        accelerator = Accelerator()
        torch.manual_seed(seed)
        loose = nn.Parameter(torch.ones(2))
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        shared_optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), loose], lr=0.1 * seed)
        other = torch.optim.SGD(second.parameters(), lr=0.5 * seed, momentum=0.9)
        first, second, shared_optimizer, other = accelerator.prepare(first, second, shared_optimizer, other)
        (first(torch.ones(2)) + second(torch.ones(2)) + loose).sum().backward()
        shared_optimizer.step()
        other.step()
        return accelerator, first, second, shared_optimizer, other

    accelerator, *then = prepared(1)
    assert accelerator.save_state(tmp_path / "state") == str(tmp_path / "state")
    assert verify(tmp_path / "state").ok
    again, *now = prepared(2)
    again.load_state(tmp_path / "state")
    assert all(same(values(one), values(other)) for one, other in zip(then[:2], now[:2], strict=True))
    for one, other in zip(then[2:], now[2:], strict=True):
        assert [group["lr"] for group in one.param_groups] == [group["lr"] for group in other.param_groups]
        states = [[*optimizer.state_dict()["state"].values()] for optimizer in (one, other)]
        assert len(states[0]) == len(states[1]) > 0
        assert all(same(*pair) for pair in zip(*states, strict=True))


def test_an_optimizer_goes_back_to_before_its_first_step_and_forward_again(tmp_path):
    accelerator = Accelerator()
    prepared = trained(accelerator, steps=0)
    accelerator.save_state(tmp_path / "fresh")
    del prepared
    _model, optimizer = trained(accelerator, steps=2)
    accelerator.save_state(tmp_path / "stepped")
    state = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    accelerator.load_state(tmp_path / "fresh")
    assert optimizer.state_dict()["state"] == {}
    accelerator.load_state(tmp_path / "stepped")
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state)


@pytest.fixture
def without_collection():
    gc.disable()
    yield
    gc.enable()


def test_a_former_model_in_a_reference_cycle_is_not_saved(tmp_path, without_collection):
    accelerator = Accelerator(mixed_precision="bf16")
    prepared = trained(accelerator, seed=1)
    del prepared
    assert len(accelerator._models) == 1, "the forward for mixed precision refers to its model"
    model, _optimizer = trained(accelerator, seed=2)
    accelerator.save_state(tmp_path / "state")
    assert load_metadata(tmp_path / "state").metadata["rankbook.runtime"]["parts"] == ["model", "optimizer"]
    again = Accelerator(mixed_precision="bf16")
    loaded, _optimizer_again = trained(again, seed=3)
    again.load_state(tmp_path / "state")
    assert same(values(loaded), values(model))


def test_a_former_model_that_only_the_traceback_of_an_error_keeps_is_neither_saved_nor_loaded(tmp_path, monkeypatch):
    def fail():
        prepared = trained(accelerator, seed=1)
        raise RuntimeError(len(prepared))

    def fail_and_keep_the_error():
        with pytest.raises(RuntimeError) as failed:
            fail()
        monkeypatch.setattr(sys, "last_value", failed.value, raising=False)

    accelerator = Accelerator()
    fail_and_keep_the_error()
    model, _optimizer = trained(accelerator, seed=2)
    assert len(accelerator._models) == 2
    accelerator.save_state(tmp_path / "state")
    assert load_metadata(tmp_path / "state").metadata["rankbook.runtime"]["parts"] == ["model", "optimizer"]
    before = values(model)
    del model, _optimizer
    fail_and_keep_the_error()
    model, _optimizer = trained(accelerator, seed=3)
    accelerator.load_state(tmp_path / "state")
    assert same(values(model), before)


def test_a_registered_object_of_a_cell_that_is_run_again_takes_the_place_of_the_former_one(tmp_path, caplog):
    def run_cell(accelerator, value):
        counter = type("Counter", (Counter,), {"__module__": "__main__"})(value)  # the cell defines the class as well
        counter.itself = counter
        accelerator.register_for_checkpointing(counter)
        return counter

    accelerator, other = Accelerator(), Counter(5)
    counter = run_cell(accelerator, 1)
    accelerator.register_for_checkpointing(other)
    del counter
    counter = run_cell(accelerator, 2)
    assert accelerator._custom_objects == [counter, other]
    assert [record.getMessage() for record in caplog.records] == [
        "The former __main__.Counter is not saved any more: no variable refers to it"
    ]
    accelerator.save_state(tmp_path / "state")
    again = Accelerator()
    loaded, _other = run_cell(again, 3), again.register_for_checkpointing(Counter())
    again.load_state(tmp_path / "state")
    assert loaded.value == 2


def test_registered_objects_of_a_class_all_stay_while_something_refers_to_them():
    class Slots:
        __slots__ = ()
        state_dict = load_state_dict = dict

    accelerator, first, second = Accelerator(), Counter(1), Counter(2)
    accelerator.register_for_checkpointing(first)
    accelerator.register_for_checkpointing(Slots())
    accelerator.register_for_checkpointing(second, Slots(), Counter(3))
    assert [type(item) for item in accelerator._custom_objects] == [Counter, Slots, Counter, Slots, Counter]
    accelerator.register_for_checkpointing(first)
    assert [item.value for item in accelerator._custom_objects[::2]] == [1, 2, 3]


def test_numbers_go_on_after_a_load_and_are_never_used_twice(tmp_path):
    def project(limit=2):
        return ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=limit)

    accelerator = Accelerator(project_config=project())
    prepared = [trained(accelerator)]
    for _number in range(3):
        accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_9.partial").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_of_mine").mkdir()
    later = Accelerator(project_config=project())
    prepared.append(trained(later))
    later.project_configuration.iteration = 2
    with pytest.raises(
        InvalidArgument, match=r"checkpoint_2 already exists: load_state\(\) continues after the latest"
    ):
        later.save_state()
    later.load_state()
    assert later.save_iteration == 3
    later.save_state(async_=True).wait()
    assert numbers(tmp_path) == ["checkpoint_2", "checkpoint_3", "checkpoint_of_mine"]
    earlier = Accelerator(project_config=project())
    prepared[:] = [trained(earlier)]
    earlier.save_state()
    assert numbers(tmp_path) == ["checkpoint_0", "checkpoint_3", "checkpoint_of_mine"], "the newest stays"
    earlier.save_state(tmp_path / "checkpoints" / "checkpoint_of_mine")
    earlier.load_state(tmp_path / "checkpoints" / "checkpoint_of_mine")
    assert earlier.save_iteration == 1


class Run:
    """A run in the project `folder`, as a setup cell begins one; every save stores the next value of `counter`."""

    def __init__(self, folder, limit=3):
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
        self.accelerator, self.counter = Accelerator(project_config=project), Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def save(self, *numbers):
        for self.counter.value in numbers:
            self.accelerator.save_state()

    def loaded(self, folder=None):
        self.counter.value = None
        self.accelerator.load_state(folder)
        return self.counter.value


@pytest.fixture
def same_second(monkeypatch):
    """Let all saves have the same `created`, which has whole seconds: that of now, of any checkpoint."""
    created = manifest_format.now()
    monkeypatch.setattr(checkpoint_saving, "now", lambda: created)
    monkeypatch.setattr(saving, "_SAME_SAVE", 60.0)  # a busy machine may need seconds for the saves


@pytest.mark.usefixtures("same_second")
def test_a_run_that_begins_anew_removes_the_checkpoints_of_the_former_one_first(tmp_path):
    Run(tmp_path).save(1, 2, 3, 4, 5)
    assert numbers(tmp_path) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
    again = Run(tmp_path)
    again.save(6)
    assert numbers(tmp_path) == ["checkpoint_0", "checkpoint_3", "checkpoint_4"]
    again.save(7, 8)
    assert numbers(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert Run(tmp_path).loaded() == 8


@pytest.mark.parametrize("through_a_link", [False, True])
def test_numbers_go_on_above_all_after_a_load_of_a_numbered_folder(tmp_path, through_a_link):
    Run(tmp_path / "run").save(0, 1, 2, 3, 4, 5)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    later = Run(tmp_path / "run", limit=2)
    assert later.loaded(tmp_path / ("link" if through_a_link else "run") / "checkpoints" / "checkpoint_4") == 4
    later.save(104)
    assert numbers(tmp_path / "run") == ["checkpoint_5", "checkpoint_6"]
    later.save(105)
    assert numbers(tmp_path / "run") == ["checkpoint_6", "checkpoint_7"]
    assert Run(tmp_path / "run").loaded() == 105
    other = Run(tmp_path / "other")
    other.loaded(tmp_path / "run" / "checkpoints" / "checkpoint_7")
    assert other.accelerator.save_iteration == 0, "a checkpoint of another project"


def test_checkpoints_are_ordered_by_the_time_of_the_save_also_in_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_saving, "now", lambda: "2026-01-01T10:00:00+00:00")
    Run(tmp_path / "run").save(0, 1, 2)
    monkeypatch.setattr(checkpoint_saving, "now", lambda: "2026-01-01T10:00:05+00:00")
    Run(tmp_path / "run", limit=4).accelerator.save_state(tmp_path / "run" / "checkpoints" / "checkpoint_1")
    # The files of a copy have times in any order.
    for number, time in ((2, 1000), (1, 2000), (0, 3000)):
        os.utime(tmp_path / "run" / "checkpoints" / f"checkpoint_{number}" / "manifest.json", (time, time))
    ordered = sorted((tmp_path / "run" / "checkpoints").iterdir(), key=saving.saved_at)
    assert [path.name for path in ordered] == ["checkpoint_0", "checkpoint_2", "checkpoint_1"]
    # A damaged manifest has no time, and one that another process is removing is not there.
    manifest = tmp_path / "run" / "checkpoints" / "checkpoint_1" / "manifest.json"
    manifest.write_bytes(b"{")
    assert saving.saved_at(manifest.parent)[0] == manifest.stat().st_mtime
    manifest.unlink()
    assert saving.saved_at(manifest.parent) == (0, 0, 1)


def test_a_save_that_is_interrupted_after_its_commit_is_counted(tmp_path, monkeypatch):
    run = Run(tmp_path, limit=1)
    run.save(0)

    def interrupt(*_):
        raise KeyboardInterrupt

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "keep_latest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.save(1)
    assert numbers(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    run.save(2)
    assert numbers(tmp_path) == ["checkpoint_2"]
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "write", fail)
        with pytest.raises(CheckpointError, match="the disk is full"):
            run.save(3)
    run.save(4)
    assert numbers(tmp_path) == ["checkpoint_3"], "the failed save has left nothing, and its number is free"
    assert run.loaded() == 4


def test_a_url_is_refused_where_files_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"memory://bucket/{uuid.uuid4().hex}"
    run = Run(url)
    for function in (run.accelerator.save_state, run.accelerator.load_state):
        with pytest.raises(InvalidArgument, match=f"require a local project_dir, got the URL {url}: pass a URL"):
            function()
    for is_safe in (False, True):
        with pytest.raises(InvalidArgument, match=r"writes a local file, got the URL memory://.*: pass a path"):
            run.accelerator.save({"weight": torch.ones(1)}, f"{url}/x.safetensors", safe_serialization=is_safe)
    # On the ranks that do not write, too.
    monkeypatch.setattr(Accelerator, "should_save_model", False)
    with pytest.raises(InvalidArgument, match="writes a local file"):
        run.accelerator.save({}, f"{url}/x.pt")
    assert list(tmp_path.iterdir()) == []
    run.counter.value = 3
    for folder in (f"{url}/checkpoints/checkpoint_3", str(tmp_path / "checkpoints" / "checkpoint_3")):
        run.accelerator.save_state(folder)
        assert run.loaded(folder) == 3
    assert run.accelerator.save_iteration == 0


def test_hooks_may_save_a_model_themselves_and_their_files_remain(tmp_path):
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    folder = tmp_path / "state"

    def save(models, states, where):
        assert models == [model]
        (folder / "mine").mkdir(exist_ok=True)
        torch.save(states.pop(), folder / "mine" / "weights.pt")

    def load(models, where):
        models.pop().load_state_dict(torch.load(folder / "mine" / "weights.pt"))

    accelerator.register_save_state_pre_hook(save)
    for _ in range(2):
        accelerator.save_state(folder)
    expected = values(model)
    assert not any(key.startswith("model.") for key in load_metadata(folder).tensors)
    assert (folder / "mine" / "weights.pt").is_file()
    assert not (tmp_path / "state.partial").exists()
    model[0].weight.data.zero_()
    with pytest.raises(InvalidArgument, match="does not contain model: prepare the objects that were prepared"):
        accelerator.load_state(folder)
    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(folder)
    assert same(values(model), expected)

    def rename(models, states, where):
        states[0] = {"0.weight": torch.full((4, 3), 7.0)}

    other = Accelerator()
    model, _ = trained(other)
    other.register_save_state_pre_hook(rename)
    other.save_state(folder)
    with pytest.raises(CheckpointError, match=r"does not match the model; only in the model: '0.bias'"):
        other.load_state(folder)
    other.load_state(folder, strict=False)
    assert (model[0].weight == 7).all()


def with_hooks(folder):
    """Return an accelerator with a counter, and a hook that writes the counter's value to a file."""
    accelerator, counter, passed = Accelerator(), Counter(1), []
    accelerator.register_for_checkpointing(counter)

    def hook(models, states, where):
        passed.append(where)
        (Path(where) / "part").mkdir()
        for name in ("value", "part/value"):
            (Path(where) / name).write_text(str(counter.value))

    accelerator.register_save_state_pre_hook(hook)
    assert accelerator.save_state(folder) == str(folder)
    return accelerator, counter, passed


def saved(accelerator, folder, async_):
    """Save, and return the folder, or the name of what was saved in the background."""
    return accelerator.save_state(folder, async_=True).wait(20).name if async_ else accelerator.save_state(folder)


@pytest.mark.parametrize("async_", [False, True])
def test_files_of_hooks_stay_as_they_were_if_the_save_fails(tmp_path, monkeypatch, async_):
    accelerator, counter, _ = with_hooks(tmp_path / "state")
    write = LocalStorage.write

    def fail(storage, path, parts):
        if path.endswith("manifest.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write(storage, path, parts)

    counter.value = 2
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "write", fail)
        with pytest.raises(CheckpointError, match="existing checkpoints are unchanged"):
            saved(accelerator, tmp_path / "state", async_)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    accelerator.load_state(tmp_path / "state")
    files = [tmp_path / "state" / "value", tmp_path / "state" / "part" / "value"]
    assert (counter.value, [file.read_text() for file in files]) == (1, ["1", "1"])
    counter.value = 3
    saved(accelerator, tmp_path / "state", async_)
    assert [file.read_text() for file in files] == ["3", "3"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_files_of_hooks_stay_as_they_were_if_a_later_hook_fails(tmp_path, error):
    accelerator, counter, _ = with_hooks(tmp_path / "state")

    def fail(*_):
        raise error("in the hook")

    accelerator.register_save_state_pre_hook(fail)
    counter.value = 2
    with pytest.raises(error, match="in the hook"):
        accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "value").read_text() == "1"


@pytest.mark.parametrize("async_", [False, True])
def test_files_of_hooks_replace_those_of_the_same_names_and_the_others_stay(tmp_path, async_):
    accelerator, counter, passed = with_hooks(tmp_path / "state")
    for name in ("mine", "part/mine", "replaced"):
        (tmp_path / "state" / name).write_text("valuable")

    def hook(models, states, where):
        assert (Path(where) / "value").read_text() == "2", "what the hook before has written"
        (Path(where) / "replaced").mkdir()

    accelerator.register_save_state_pre_hook(hook)
    loaded_from = []
    accelerator.register_load_state_pre_hook(lambda _models, where: loaded_from.append(where))
    counter.value = 2
    assert saved(accelerator, tmp_path / "state", async_) == ("state" if async_ else str(tmp_path / "state"))
    texts = {name: (tmp_path / "state" / name).read_text() for name in ("value", "part/value", "mine", "part/mine")}
    assert texts == {"value": "2", "part/value": "2", "mine": "valuable", "part/mine": "valuable"}
    assert (tmp_path / "state" / "replaced").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert len(set(passed)) == 1 and Path(passed[0]).parent == tmp_path
    accelerator.load_state(tmp_path / "state")
    assert loaded_from == [str(tmp_path / "state")]


@pytest.mark.parametrize("has_hooks", [False, True])
def test_files_of_hooks_that_a_killed_save_has_left_are_removed_by_the_next_one(tmp_path, has_hooks):
    _, _, passed = with_hooks(tmp_path / "state")
    Path(passed[0]).mkdir()
    (Path(passed[0]) / "left").write_text("from the killed save")
    accelerator = with_hooks(tmp_path / "state")[0] if has_hooks else Accelerator()
    accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert not (tmp_path / "state" / "left").exists()


@pytest.mark.parametrize("async_", [False, True])
def test_a_hook_that_writes_a_file_of_the_checkpoint_fails_the_save(tmp_path, async_):
    accelerator, _, _ = with_hooks(tmp_path / "state")
    before = (tmp_path / "state" / "metadata.json").read_bytes()
    accelerator.register_save_state_pre_hook(lambda _models, _states, where: Path(where, "metadata.json").touch())
    with pytest.raises(CheckpointError, match=r"a save hook has written metadata.json.*nothing was replaced"):
        saved(accelerator, tmp_path / "state", async_)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "metadata.json").read_bytes() == before


def test_files_of_hooks_of_a_save_that_begins_in_the_background_are_not_taken_for_left_ones(tmp_path, monkeypatch):
    accelerator, counter, _ = with_hooks(tmp_path / "state")
    gate, begin = threading.Event(), training_checkpoint.Folder.begin

    def wait_and_begin(location):
        assert gate.wait(20)
        return begin(location)

    def wait_for_saves():
        gate.set()
        return async_save.wait_for_saves(20)

    monkeypatch.setattr(training_checkpoint.Folder, "begin", wait_and_begin)
    monkeypatch.setattr(training_checkpoint, "wait_for_saves", wait_for_saves)
    counter.value = 2
    handle = accelerator.save_state(tmp_path / "state", async_=True)
    counter.value = 3
    accelerator.save_state(tmp_path / "state")
    assert handle.wait(20).name == "state"
    assert (tmp_path / "state" / "value").read_text() == "3"


def test_background_save_that_fails_does_not_remove_the_files_of_the_hooks_of_the_next_one(tmp_path, monkeypatch):
    accelerator, counter, passed = with_hooks(tmp_path / "state")
    claimed, gate, write = threading.Event(), threading.Event(), LocalStorage.write

    def wait_and_fail(storage, path, parts):
        if ".owner" in path:
            return write(storage, path, parts)
        claimed.set()
        assert gate.wait(20)
        raise OSError("the disk is full")

    def hook(*_):
        monkeypatch.undo()
        gate.set()
        with pytest.raises(CheckpointError, match="the disk is full"):
            handle.wait(20)
        assert (Path(passed[0]) / "value").read_text() == "3"

    monkeypatch.setattr(LocalStorage, "write", wait_and_fail)
    counter.value = 2
    handle = accelerator.save_state(tmp_path / "state", async_=True)
    assert claimed.wait(20)
    accelerator.register_save_state_pre_hook(hook)
    counter.value = 3
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "value").read_text() == "3"


def test_a_hook_may_load_a_model_itself_and_the_optimizers_state_and_the_other_models_come_back(tmp_path):
    def prepared(seed):
        accelerator = Accelerator()
        torch.manual_seed(seed)
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizer = torch.optim.Adam([parameter for model in models for parameter in model.parameters()], 0.1)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        (models[0](torch.ones(2)) + models[1](torch.ones(2))).sum().backward()
        optimizer.step()
        return accelerator, models, optimizer

    def save(models, states, where):
        torch.save(states.pop(0), tmp_path / "first.pt")

    def load(models, where):
        models.pop(0).load_state_dict(torch.load(tmp_path / "first.pt"))

    accelerator, models, optimizer = prepared(1)
    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "state")
    again, models_now, optimizer_now = prepared(2)
    again.register_load_state_pre_hook(load)
    again.load_state(tmp_path / "state")
    assert all(same(values(one), values(other)) for one, other in zip(models, models_now, strict=True))
    states = [optimizer.state_dict()["state"], optimizer_now.state_dict()["state"]]
    assert len(states[0]) == 4
    assert all(same(states[0][number], states[1][number]) for number in range(4))


def with_head(accelerator, head, *, groups=1):
    """Return a model whose head has the name `head`, its body, and its optimizer after a step, in 1 or 2 groups."""
    body = nn.Linear(3, 4)
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module(head, nn.Linear(4, 2))
    parts = [body.parameters(), model.get_submodule(head).parameters()]
    listed = [{"params": list(part)} for part in parts] if groups == 2 else model.parameters()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(listed, 0.1))
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_hook_of_a_cell_that_is_run_again_is_called_once(tmp_path):
    cell = """
def hook(models, states, folder):
    saved.append(states.pop())

def other(*_):
    called.append(1)

for register in (accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook):
    register(other)
    register(lambda *_: called.append(2))
first = accelerator.register_save_state_pre_hook(hook)
"""
    accelerator, saved, called = Accelerator(), [], []
    model = accelerator.prepare(nn.Linear(2, 2))
    names = {"__name__": "__main__", "accelerator": accelerator, "saved": saved, "called": called}
    exec(cell, names)
    former = names["first"]
    exec(cell, names)
    former.remove()
    accelerator.save_state(tmp_path / "state")
    assert (len(saved), called) == (1, [2, 1, 2])
    names["first"].remove()
    accelerator.save_state(tmp_path / "state")
    assert len(saved) == 1, "the handle removes the new one"
    called.clear()
    accelerator.load_state(tmp_path / "state")
    assert called == [2, 1, 2] and model is not None


def test_parameter_groups_are_compared_before_anything_changes(tmp_path):
    accelerator = Accelerator()
    then, optimizer_then = with_head(accelerator, "head")
    accelerator.save_state(tmp_path / "state")
    for head, groups, message in [
        ("head", 2, "1 parameter groups are stored, but the optimizer has 2: create it with the stored groups"),
        ("other", 1, r"only in the model: 'other.bias'"),
    ]:
        accelerator = Accelerator()
        model, optimizer = with_head(accelerator, head, groups=groups)
        before, state = values(model), copy.deepcopy(optimizer.state_dict())
        with pytest.raises(CheckpointError, match=message):
            accelerator.load_state(tmp_path / "state")
        assert same(values(model), before)
        assert str(optimizer.state_dict()) == str(state)
    # The model with another head is the last one.
    optimizer.param_groups[0]["lr"] = 5.0
    own = {name: value.clone() for name, value in optimizer.state[model.other.weight].items()}
    accelerator.load_state(tmp_path / "state", strict=False)
    assert torch.equal(model.body.weight, then.body.weight)
    assert torch.equal(model.other.weight, before["other.weight"])
    assert same(optimizer.state[model.body.weight], optimizer_then.state[then.body.weight])
    assert same(optimizer.state[model.other.weight], own)
    assert optimizer.param_groups[0]["lr"] == 0.1
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def test_parameters_that_moved_to_another_group_are_reported_before_anything_changes(tmp_path):
    accelerator = Accelerator()
    parts = with_head(accelerator, "head", groups=2)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory(*parts)
    model, optimizer = with_head(accelerator, "head", groups=2)
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())
    before = values(model)
    message = r"group 0 of the optimizer and the stored group differ in parameters: \['model.head.bias'\]; strict=False"
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(tmp_path / "state")
    assert same(values(model), before)
    accelerator.load_state(tmp_path / "state", strict=False)
    assert not same(values(model), before)


def test_an_optimizer_keeps_the_kernels_that_it_has_now(tmp_path):
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1, foreach=True))
    accelerator.save_state(tmp_path / "state")
    # Such is the optimizer of a tensor-parallel model, whose parameters are partly DTensors.
    optimizer.param_groups[0].update(foreach=False, lr=5.0, weight_decay=1.0)
    accelerator.load_state(tmp_path / "state")
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["lr"], group["weight_decay"]) == (False, 0.1, 0)


def trained_by(accelerator, optimizer_class, steps, seed=0, dtype=None, **options):
    torch.manual_seed(seed)
    data = torch.randn(16, 3, dtype=dtype)
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 1, dtype=dtype))
    model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), **options))

    def closure():
        optimizer.zero_grad()
        loss = (model(data) - data.prod(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    def train(count):
        return [optimizer.step(closure).item() for _ in range(count)]

    train(steps)
    return model, optimizer, train


LBFGS = {"lr": 0.1, "max_iter": 1, "history_size": 4}


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_lists_of_tensors_in_the_state_of_an_optimizer_come_back(tmp_path, steps):
    accelerator = Accelerator()
    kept = trained_by(accelerator, torch.optim.LBFGS, 5, **LBFGS)
    accelerator.save_state(tmp_path / "state")
    assert {f"optimizer.state.model.0.weight.old_dirs.{number}" for number in range(4)} <= {
        *load_metadata(tmp_path / "state").tensors
    }
    (then,) = copy.deepcopy([*kept[1].state_dict()["state"].values()])
    expected = kept[2](3)
    accelerator.free_memory(*kept[:2])
    model, optimizer, train = trained_by(accelerator, torch.optim.LBFGS, steps, **LBFGS)
    accelerator.load_state(tmp_path / "state")
    (now,) = optimizer.state_dict()["state"].values()
    torch.testing.assert_close(now, then, rtol=0, atol=0)
    assert train(3) == expected
    assert model is not None


def with_keys_of_earlier_versions(models, optimizers, **more):
    """Return a map in which the tensors in lists are named by their paths, and nothing tells their structure."""
    state = sharded_state_dicts(models, optimizers, **more)
    for part in state["optimizers"].values():
        part.pop("nested")
        for values in part["state"].values():
            values |= {
                name: map_leaves(lambda _, leaf: leaf.data if isinstance(leaf, ShardedTensor) else leaf, value)
                for name, value in values.items()
                if isinstance(value, list)
            }
    return state


def test_lists_of_tensors_that_earlier_versions_have_stored_come_back_if_their_lengths_are_equal(tmp_path, monkeypatch):
    accelerator = Accelerator()
    kept = trained_by(accelerator, torch.optim.LBFGS, 5, **LBFGS)
    with monkeypatch.context() as patched:
        patched.setattr(training_checkpoint, "sharded_state_dicts", with_keys_of_earlier_versions)
        accelerator.save_state(tmp_path / "state")
    assert "optimizers.optimizer.state.model.0.weight.old_dirs.0" in load_metadata(tmp_path / "state").tensors
    expected = kept[2](3)
    for steps in (0, 2, 6):
        accelerator.free_memory(*kept[:2])
        kept = model, _, train = trained_by(accelerator, torch.optim.LBFGS, steps, **LBFGS)
        before = values(model)
        if steps == 6:
            accelerator.load_state(tmp_path / "state")
            assert train(3) == expected
        else:
            with pytest.raises(CheckpointError, match="lists or dicts of tensors must step before it is loaded"):
                accelerator.load_state(tmp_path / "state")
            assert same(values(model), before)


class Quantized(torch.optim.SGD):
    """An optimizer whose state is a dict of tensors of other dtypes than the parameters."""

    def step(self, closure):
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter].setdefault("moment", {"codes": None, "scales": [None]})
            state["codes"] = torch.full((3,), 200, dtype=torch.uint8)
            state["scales"] = [torch.full((2,), 1 / 3), 7]
        return loss


def test_tensors_in_dicts_in_the_state_of_an_optimizer_keep_their_dtypes(tmp_path):
    accelerator = Accelerator()
    kept = trained_by(accelerator, Quantized, 1, dtype=torch.bfloat16)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory(*kept[:2])
    kept = model, optimizer, _ = trained_by(accelerator, Quantized, 0, dtype=torch.bfloat16)
    accelerator.load_state(tmp_path / "state")
    moment = optimizer.state[model[0].weight]["moment"]
    assert moment["codes"].equal(torch.full((3,), 200, dtype=torch.uint8))
    assert (moment["scales"][0].equal(torch.full((2,), 1 / 3)), moment["scales"][1]) == (True, 7)
    # A load goes back to before the first step too.
    optimizer.state.clear()
    accelerator.save_state(tmp_path / "fresh")
    accelerator.load_state(tmp_path / "state")
    assert optimizer.state
    accelerator.load_state(tmp_path / "fresh")
    assert not optimizer.state


class CountingCalls(torch.optim.SGD):
    """An optimizer that counts its steps under a name, and not under a parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_state_of_an_optimizer_under_a_name_comes_back(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr(telemetry, "listener", reports.append)
    accelerator = Accelerator()
    kept = trained_by(accelerator, CountingCalls, 3, lr=0.1)
    accelerator.save_state(tmp_path / "state")
    kept[2](1)
    accelerator.prepare(kept[1])
    accelerator.load_state(tmp_path / "state")
    assert kept[1].state["calls"] == 3
    accelerator.free_memory(*kept[:2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = CountingCalls(model.parameters(), 0.1)
    optimizer.state["calls"] = 7
    model, optimizer = accelerator.prepare(model, optimizer)
    assert optimizer.state["calls"] == 7 and reports
    accelerator.load_state(tmp_path / "state")
    assert optimizer.state["calls"] == 3
    optimizer.state["mean"] = torch.ones(1)
    with pytest.raises(CheckpointError, match="CountingCalls has state under the key 'mean', which is no parameter"):
        accelerator.save_state(tmp_path / "state")
    assert model is not None


class Late(torch.optim.SGD):
    """An optimizer whose state is None until its first step."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = None

    def step(self, closure):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = torch.full_like(parameter, 3.0)
        return closure()


def test_state_of_an_optimizer_that_is_none_gets_the_stored_tensors(tmp_path):
    accelerator = Accelerator()
    kept = trained_by(accelerator, Late, 1)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory(*kept[:2])
    kept = model, optimizer, _ = trained_by(accelerator, Late, 0)
    accelerator.load_state(tmp_path / "state")
    assert all((optimizer.state[parameter]["moment"] == 3).all() for parameter in model.parameters())


def test_mismatch_is_reported_before_anything_changes(tmp_path):
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    accelerator.save_state(tmp_path / "state")
    model.add_module("more", nn.Linear(1, 1))
    before = values(model)
    with pytest.raises(CheckpointError, match=r"only in the model: 'more.bias', 'more.weight'. strict=False loads"):
        accelerator.load_state(tmp_path / "state")
    del model.more, model[1]
    with pytest.raises(
        CheckpointError, match=r"only in the checkpoint: 'model.1.bias', .* strict=False loads the rest"
    ):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(
        InvalidArgument, match="does not contain custom_checkpoint: prepare the objects that were prepared"
    ):
        accelerator.load_state(tmp_path / "state")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.pt").touch()
    with pytest.raises(InvalidArgument, match="before checkpoints were sharded"):
        accelerator.load_state(tmp_path / "old")
    from rankbook import checkpoint

    checkpoint.save({"x": torch.ones(1)}, tmp_path / "other", step=1)
    with pytest.raises(
        InvalidArgument, match=r"step-1 was not written by save_state\(\): load it with rankbook.checkpoint.load"
    ):
        accelerator.load_state(tmp_path / "other" / "step-1")


def test_background_save_stores_the_values_at_its_start(tmp_path, monkeypatch):
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    counted, gate = Counter([1]), threading.Event()
    accelerator.register_for_checkpointing(counted)
    write = LocalStorage.write

    def wait_and_write(storage, path, parts):
        assert gate.wait(20)
        return write(storage, path, parts)

    monkeypatch.setattr(LocalStorage, "write", wait_and_write)
    then, rate = values(model), optimizer.param_groups[0]["lr"]
    handle = accelerator.save_state(tmp_path / "state", async_=True)
    assert not handle.done
    model[0].weight.data.zero_()
    counted.value.append(2)
    optimizer.param_groups[0]["lr"] = 5.0
    drawn = torch.rand(3)
    gate.set()
    assert handle.wait(20).name == "state"
    accelerator.load_state(tmp_path / "state")
    assert (same(values(model), then), counted.value, optimizer.param_groups[0]["lr"]) == (True, [1], rate)
    assert torch.equal(torch.rand(3), drawn)


def test_background_save_removes_checkpoints_of_its_own_project_only_after_a_chdir(tmp_path, monkeypatch):
    def project(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        configuration = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(project_config=configuration)
        accelerator.save_state()
        return accelerator

    project("other")
    accelerator, gate, write = project("own"), threading.Event(), LocalStorage.write

    def wait_and_write(storage, path, parts):
        assert gate.wait(20)
        return write(storage, path, parts)

    monkeypatch.setattr(LocalStorage, "write", wait_and_write)
    handle = accelerator.save_state(async_=True)
    monkeypatch.chdir(tmp_path / "other")
    gate.set()
    handle.wait(20)
    assert numbers(tmp_path / "own" / "run") == ["checkpoint_1"]
    assert numbers(tmp_path / "other" / "run") == ["checkpoint_0"]


def test_failed_background_save_is_reported_by_its_handle_and_the_next_save(tmp_path, monkeypatch):
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    accelerator.save_state(tmp_path / "state")
    then = values(model)

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "write", fail)
        handle = accelerator.save_state(tmp_path / "state", async_=True)
        assert async_save.wait_for_saves(20)
        assert "the disk is full" in str(handle.error)
        assert "the disk is full" in repr(handle)
    with pytest.raises(CheckpointError, match=r"the previous asynchronous save failed.*disk is full"):
        accelerator.save_state(tmp_path / "state")
    model[0].weight.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert same(values(model), then), "the checkpoint before it is as it was"
    accelerator.save_state(tmp_path / "state")


def test_load_from_a_folder_of_steps_uses_and_reports_the_latest(tmp_path, capsys):
    counter = Counter()
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(counter)
    for step in (20, 100, 40):
        counter.value = step
        accelerator.save_state(tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-580.partial").mkdir()
    counter.value = 0
    folders = []
    accelerator.register_load_state_pre_hook(lambda _models, folder: folders.append(folder))
    accelerator.load_state(tmp_path / "run")
    run = tmp_path / "run"
    assert (counter.value, folders) == (100, [f"{run}/step-100"])
    assert capsys.readouterr().out == f"load_state: step-100 is the latest of 3 checkpoints in {run}\n"
    accelerator.load_state(tmp_path / "run" / "step-20")
    assert (counter.value, capsys.readouterr().out) == (20, "")
    with pytest.raises(InvalidArgument, match="expected a checkpoint, or a folder of step-N checkpoints"):
        accelerator.load_state(tmp_path / "nothing")


def test_step_of_an_accelerator_is_read_by_the_functions_for_folders_of_steps(tmp_path):
    accelerator = Accelerator()
    kept = trained(accelerator)
    for step in (20, 40):
        accelerator.save_state(tmp_path / "run" / f"step-{step}")
    run = tmp_path / "run"
    assert (verify(run).ok, verify(run, 20).ok, str(verify(run)).partition(":")[0]) == (True, True, f"{run}/step-40")
    assert load_metadata(run).metadata["rankbook.runtime"]["parts"] == ["model", "optimizer"]
    assert load_plain(run, step=20).keys() == load_plain(run / "step-20").keys()
    del kept  # an Accelerator saves the models that are alive


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_changes_nothing(tmp_path, monkeypatch):
    accelerator = Accelerator()
    model, _optimizer = trained(accelerator)
    accelerator.save_state(tmp_path / "state")
    prepare, calls = training_checkpoint.prepare_load, []

    def replace_and_prepare(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            model[0].weight.data.fill_(7.0)
            accelerator.save_state(tmp_path / "state")
            model[0].weight.data.fill_(9.0)
        return prepare(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(training_checkpoint, "prepare_load", replace_and_prepare)
        with pytest.raises(CheckpointError, match="state was replaced by another save while it was loaded: load it"):
            accelerator.load_state(tmp_path / "state")
    assert (model[0].weight == 9).all()
    accelerator.load_state(tmp_path / "state")
    assert (model[0].weight == 7).all()


def test_loaders_keep_their_positions_if_one_cannot_be_loaded(tmp_path, monkeypatch):
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    loaders = accelerator.prepare(*(DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True) for _ in range(3)))
    loops = [iter(loader) for loader in loaders]  # they go on when the state is saved
    for loop in loops:
        next(loop)
    accelerator.save_state(tmp_path / "state")
    list(loaders[0])
    for _, _ in zip(range(3), loaders[1], strict=False):
        pass
    model[0].weight.data.zero_()
    before = [loader.state_dict() for loader in loaders]
    load = type(loaders[0]).load_state_dict

    def fail(loader, state):
        load(loader, state)
        if loader is loaders[1]:
            raise InvalidArgument("this one does not want to")

    with monkeypatch.context() as patched:
        patched.setattr(type(loaders[0]), "load_state_dict", fail)
        with pytest.raises(InvalidArgument, match="does not want to"):
            accelerator.load_state(tmp_path / "state")
    assert [loader.state_dict() for loader in loaders] == before
    assert not model[0].weight.any()
    accelerator.load_state(tmp_path / "state")
    assert [(loader.position.resume, loader.position.next_epoch()) for loader in loaders] == [(1, 0)] * 3


def test_an_object_that_is_prepared_again_keeps_its_name(tmp_path):
    def prepared(accelerator):
        models = accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
        loaders = accelerator.prepare(DataLoader(range(8), 2), DataLoader(range(4), 2))
        return models, loaders

    accelerator = Accelerator()
    models, loaders = prepared(accelerator)
    accelerator.prepare(models[0], loaders[0])
    next(iter(loaders[1]))
    accelerator.save_state(tmp_path / "state")
    again = Accelerator()
    models_again, loaders_again = prepared(again)
    again.load_state(tmp_path / "state")
    assert [same(values(one), values(other)) for one, other in zip(models, models_again, strict=True)] == [True] * 2
    assert [loader.position.resume for loader in loaders_again] == [0, 1]


def test_a_model_with_another_wrapper_keeps_its_place():
    class Wrapper(DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module  # without a reducer, as a former wrapper

    accelerator, model, other = Accelerator(), nn.Linear(2, 2), nn.Linear(2, 2)
    former, present = Wrapper(model), Wrapper(model)
    for item in (former, other, present):
        accelerator._register("model", item)
    assert [id(item) for item in accelerator._models] == [id(present), id(other)] and former is not None


def test_loaders_in_another_order_are_refused_before_anything_changes(tmp_path, monkeypatch):
    def prepared(*sizes):
        accelerator = Accelerator()
        model, _optimizer = trained(accelerator, seed=sum(sizes))
        return accelerator, model, [accelerator.prepare(DataLoader(range(size), 2)) for size in sizes]

    accelerator, _model, loaders = prepared(12000, 4)
    next(iter(loaders[1]))
    accelerator.save_state(tmp_path / "state")
    again, model, loaders = prepared(4, 12000)
    before = values(model)
    message = "^loader was saved for 12,000 samples and is prepared for 4, as loader_1 was: prepare the loaders in the"
    with pytest.raises(InvalidArgument, match=message):
        again.load_state(tmp_path / "state")
    assert same(values(model), before)
    assert [loader.position.resume for loader in loaders] == [0, 0]
    again, _model, loaders = prepared(12000, 12000)  # that of the evaluation has grown
    with pytest.warns(
        UserWarning, match=r"loader_1 was saved for 4 samples and is prepared for 12,000\. It goes on in"
    ):
        again.load_state(tmp_path / "state")
    assert [loader.position.resume for loader in loaders] == [0, 1]
    again, model, loaders = prepared(4)  # an evaluation does not prepare the loader of the training
    before = values(model)
    with pytest.raises(InvalidArgument, match=message):
        again.load_state(tmp_path / "state")
    assert same(values(model), before) and loaders[0].position.resume == 0
    again, _model, loaders = prepared(12000)
    again.load_state(tmp_path / "state")
    # Checkpoints of earlier versions do not contain the length.
    monkeypatch.setattr(stateful, "dataset_length", lambda _: None)
    accelerator.save_state(tmp_path / "earlier")
    prepared(4, 12000)[0].load_state(tmp_path / "earlier")


def test_error_of_a_background_save_names_the_line_that_started_it(tmp_path):
    accelerator = Accelerator()
    line = inspect.currentframe().f_lineno
    handle = accelerator.save_state(tmp_path / "run" / "step-7", async_=True)
    handle.wait(30)
    assert handle._called_at == (__file__, line + 1)
    handle._lost_peer = "rank 1 was killed by SIGKILL"
    assert handle._describe_loss({__file__: 3}) == (
        f"the save of step-7 to {tmp_path / 'run'}, begun at line {line + 1} of Cell In[3], was lost: rank 1 was "
        "killed by SIGKILL. Existing checkpoints are unchanged."
    )


def test_a_checkpoint_may_lie_where_fsspec_reaches():
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    then = values(model)
    accelerator.save_state("memory://runs/state")
    model[0].weight.data.zero_()
    accelerator.load_state("memory://runs/state")
    assert same(values(model), then)
    with pytest.raises(InvalidArgument, match="such as memory://run/state"):
        accelerator.save_state("memory://state")


@pytest.mark.parametrize("written", ["before the save", "during the save"])
def test_a_save_to_an_object_store_does_not_delete_other_files(monkeypatch, written):
    accelerator = Accelerator()
    trained(accelerator)
    folder = f"memory://run-{uuid.uuid4().hex}/state"
    for _ in range(2):
        accelerator.save_state(folder)  # replaces the former checkpoint
    storage = storage_of(folder)
    before = storage.list()
    write_parts = Writer._file_parts

    def write_log(*_):
        storage.write("logs/events.txt", [b"valuable"])

    if written == "before the save":
        write_log()
    else:
        monkeypatch.setattr(Writer, "_file_parts", lambda *args: write_log() or write_parts(*args))
    with pytest.raises(CheckpointError, match="state contains logs, which is not part of a checkpoint"):
        accelerator.save_state(folder)
    assert storage.list() == {**before, "logs": None}
    assert storage.list("logs") == {"events.txt": len(b"valuable")}
    assert list(storage_of(folder.removesuffix("/state")).list()) == ["state"]
    accelerator.load_state(folder)


def test_a_checkpoint_of_another_program_is_not_replaced(tmp_path):
    accelerator = Accelerator()
    trained(accelerator)
    before = {".metadata": b"valuable", "__0_0.distcp": b"valuable"}  # of torch.distributed.checkpoint
    (tmp_path / "step-5").mkdir()
    for name, content in before.items():
        (tmp_path / "step-5" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-5 is a checkpoint of another program, it has no manifest\.json"):
        accelerator.save_state(tmp_path / "step-5")
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-5").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.parametrize("folder", [".", "..", "../../run"])
def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch, folder):
    inner = tmp_path / "run" / "inner"
    inner.mkdir(parents=True)
    (inner / "notes.txt").write_text("valuable")
    monkeypatch.chdir(inner)
    accelerator = Accelerator()
    with pytest.raises(CheckpointError, match=r"the working directory .*/run/inner is in .*, which a save replaces"):
        accelerator.save_state(folder)
    assert Path.cwd() == inner
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "inner", "notes.txt"]
    accelerator.save_state("state")
    accelerator.load_state("state")


def test_a_state_is_saved_although_the_working_directory_was_removed(tmp_path, monkeypatch):
    accelerator = Accelerator()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize("mounted", ["state", "state/data/inner"])
def test_a_mount_point_is_not_replaced(tmp_path, monkeypatch, mounted):
    (tmp_path / mounted).mkdir(parents=True)
    (tmp_path / mounted / "notes.txt").write_text("valuable")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / mounted)
    accelerator = Accelerator()
    with pytest.raises(CheckpointError, match=f"{mounted} is a mount point, which a save into .*/state cannot replace"):
        accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / mounted / "notes.txt").read_text() == "valuable"


@pytest.mark.parametrize("name", ["metadata.json", "common.pt"])
def test_a_file_with_the_name_of_one_of_a_checkpoint_is_not_replaced(tmp_path, name):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_text("valuable")
    accelerator = Accelerator()
    with pytest.raises(CheckpointError, match=f"contains {name}, and a checkpoint has a file of this name: rename it"):
        accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.rglob("*")] == ["state", name]
    assert (tmp_path / "state" / name).read_text() == "valuable"
    (tmp_path / "state" / name).rename(tmp_path / "state" / "mine")
    for _ in range(2):
        accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "mine").read_text() == "valuable"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_state_is_saved_although_the_old_one_cannot_be_removed(tmp_path, monkeypatch, can_exchange):
    def fail(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    accelerator, counter = Accelerator(), Counter(1)
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "state")
    if not can_exchange:
        monkeypatch.setattr(backends, "_exchange", lambda *_: False)
    for value in (2, 3):
        counter.value = value
        with monkeypatch.context() as patched:
            if value == 2:
                patched.setattr(backends.shutil, "rmtree", fail)
            accelerator.save_state(tmp_path / "state")
        assert len(list(tmp_path.iterdir())) == (2 if value == 2 else 1)
        counter.value = 0
        accelerator.load_state(tmp_path / "state")
        assert counter.value == value


def test_a_tilde_means_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    configuration = ProjectConfiguration("~/project", automatic_checkpoint_naming=True)
    accelerator, counter = Accelerator(project_config=configuration), Counter(5)
    accelerator.register_for_checkpointing(counter)
    folders = [accelerator.save_state("~/state"), accelerator.save_state()]
    assert folders == [f"{tmp_path}/state", f"{tmp_path}/project/checkpoints/checkpoint_0"]
    for folder in ("~/state", None):
        counter.value = 0
        accelerator.load_state(folder)
        assert counter.value == 5
    assert list((tmp_path / "work").iterdir()) == []


def test_save_warns_that_accumulated_gradients_are_not_stored(tmp_path, caplog):
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.ones(9, 1)), batch_size=1)
    )

    def steps(stop=None):
        synced = []
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                synced.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
            if len(synced) == stop:
                accelerator.save_state(tmp_path / "state")
                break
        return synced

    steps(3)
    assert "window" not in caplog.text
    steps(4)
    assert "save_state() within a gradient accumulation window" in caplog.text
    accelerator.load_state(tmp_path / "state")
    assert steps() == [False, False, True, False, True], "a window begins with the next batch"


def read(folder):
    """Return every tensor of safetensors files; each begins at a multiple of its element's size."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= torch_files.load_file(file)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors.values())
    return tensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.small = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))


def test_sharded_tensors_go_to_the_memory_of_the_cpu_one_at_a_time(monkeypatch):
    done = []

    class Sharded:
        def full_tensor(self):
            done.append("gathered")
            return self

        def cpu(self):
            done.append("copied")
            return torch.ones(1)

    class Model(nn.Module):
        def state_dict(self):
            return {"one": Sharded(), "plain": plain, "other": Sharded(), "extra": "text"}

    plain = torch.ones(1, device="meta")
    monkeypatch.setattr(saving, "DTensor", Sharded)
    state = Accelerator().get_state_dict(Model())
    assert done == ["gathered", "copied"] * 2
    assert {name: getattr(value, "device", value) for name, value in state.items()} == {
        "one": torch.device("cpu"),
        "plain": torch.device("meta"),
        "other": torch.device("cpu"),
        "extra": "text",
    }


def test_a_model_is_written_as_safetensors_whole_or_in_shards_and_tied_weights_once(tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    stored = read(tmp_path)
    assert sorted(stored) == ["embedding.weight", "mask", "small"]
    assert same(stored, {name: value for name, value in model.state_dict().items() if name != "head.weight"} | stored)
    accelerator.save_model(model, tmp_path, max_shard_size="20B")
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    assert same(read(tmp_path), stored)
    (tmp_path / "model.json").touch()
    accelerator.save_model(model, tmp_path, max_shard_size=10_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    accelerator.save_model(model, tmp_path / "torch", max_shard_size="20B", safe_serialization=False)
    loaded = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "torch").glob("*.bin"))]
    assert same({name: value for tensors in loaded for name, value in tensors.items()}, stored)
    accelerator.save(stored, tmp_path / "one" / "any.safetensors", safe_serialization=True)
    assert same(read(tmp_path / "one"), stored)
    with pytest.raises(InvalidArgument, match="a dict of tensors"):
        accelerator.save([1], tmp_path / "x", safe_serialization=True)


def test_the_safetensors_package_reads_it(tmp_path):
    model = Accelerator().prepare(Tied())
    Accelerator().save_model(model, tmp_path)
    stored = torch_files.load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["embedding.weight"], model.embedding.weight)
    torch_files.load_model(Tied(), tmp_path / "model.safetensors")


def test_compiled_model_is_written_under_the_names_of_the_original(tmp_path):
    net = nn.Sequential(nn.Linear(2, 3), torch.compile(nn.Linear(3, 1), backend="eager"))
    accelerator = Accelerator()
    for model in (net, torch.compile(accelerator.prepare(net), backend="eager")):
        accelerator.save_model(model, tmp_path / "model")
        names = torch_files.load_file(tmp_path / "model" / "model.safetensors").keys()
        assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    torch._dynamo.reset()


def test_failed_save_model_keeps_the_existing_files(tmp_path, monkeypatch):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, tmp_path)
    then = read(tmp_path)
    model.weight.data.zero_()

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "write", fail)
        with pytest.raises(OSError, match="the disk is full"):
            accelerator.save_model(model, tmp_path)
    assert same(read(tmp_path), then)
    model.register_buffer("odd", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="odd has the dtype complex128"):
        accelerator.save_model(model, tmp_path)


def test_sizes_are_parsed_in_common_notations():
    sizes = [model_files.parse_size(text) for text in ("10GB", "1.5 mib", 7, "200", "3KB")]
    assert sizes == [10**10, 3 * 2**19, 7, 200, 3000]
    for wrong in ("ten", "5 PB", 0, "-3"):
        with pytest.raises(InvalidArgument, match="max_shard_size"):
            model_files.parse_size(wrong)


def test_plain_reading_finds_the_names_of_the_model(tmp_path):
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    accelerator.save_state(tmp_path / "state")
    loaded_values = load_plain(tmp_path / "state")
    assert torch.equal(loaded_values["model.0.weight"], model[0].weight)
    assert {"optimizer.state.model.0.weight.exp_avg", "model.1.running_mean"} <= loaded_values.keys()


def test_another_dtype_is_an_error_that_names_no_argument_of_another_function(tmp_path):
    accelerator = Accelerator()
    parts = trained(accelerator)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory(*parts)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    parts = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
    message = r"dtype is float32 in the checkpoint, but float64 was requested; load_state\(\) does not convert"
    with pytest.raises(CheckpointError, match=message) as raised:
        accelerator.load_state(tmp_path / "state")
    assert "cast=True" not in str(raised.value)


def test_a_registered_object_may_hold_what_is_allowed(tmp_path, no_safe_globals):
    accelerator = Accelerator()
    best = Counter(np.float64(0.25))
    accelerator.register_for_checkpointing(best)
    accelerator.save_state(tmp_path / "state")
    best.value = None
    with pytest.raises(CheckpointError, match=r"allow=\['numpy._core.multiarray.scalar', 'numpy.dtype'\]"):
        accelerator.load_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", allow=["numpy._core.multiarray.scalar", np.dtype])
    assert best.value == 0.25


def test_the_scale_of_fp16_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "check_precision", lambda *_: None)  # its scaler works on the CPU too

    def prepared(scale, precision="fp16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        handler = GradScalerKwargs(init_scale=scale, growth_interval=2)
        accelerator = Accelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[handler])
        model = nn.Linear(1, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def scales(accelerator, model, optimizer, steps):
        scale_values = []
        for _ in range(steps):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            scale_values.append(accelerator.scaler.get_scale())
        return scale_values

    first = prepared(16.0)
    assert scales(*first, 3) == [16, 32, 32]
    first[0].save_state(tmp_path / "state")
    assert scales(*first, 3) == [64, 64, 128]
    later = prepared(2.0)
    later[0].load_state(tmp_path / "state")
    assert scales(*later, 3) == [64, 64, 128]
    plain = prepared(2.0, "no")
    plain[0].save_state(tmp_path / "plain")
    fresh = prepared(4.0)
    fresh[0].load_state(tmp_path / "plain")  # without a scale: it begins anew
    assert fresh[0].scaler.get_scale() == 4
    window.scaler = None


def test_the_random_state_of_the_device_of_a_rank_is_restored_on_its_present_device(monkeypatch, caplog):
    state = {**rng.random_state(), "cuda": ["of device 0", "of device 1"], "cuda_device": 1}
    states: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    rng.restore_random_state(state)
    assert states == ["of device 1"]
    assert not caplog.records


@pytest.mark.parametrize(("devices", "restored"), [(2, True), (1, False), (0, False)])
def test_random_states_of_other_devices_are_not_restored_in_silence(monkeypatch, caplog, devices, restored):
    state = {**rng.random_state(), "cuda": ["of device 0", "of device 1"]}
    states: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states.append)
    rng.restore_random_state(state)
    assert states == ([state["cuda"]] if restored else [])
    told = [record.getMessage() for record in caplog.records]
    assert told == (
        [] if restored else [f"the random states of 2 CUDA devices are not restored: this process has {devices}"]
    )
