"""Test `save` on one process without a group; several ranks are in test_consistency.py and test_ranks.py."""

from __future__ import annotations

import errno
import json
import math
import os
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import rankbook.checkpoint as rc
from rankbook import control_collectives
from rankbook.checkpoint import saving
from rankbook.checkpoint.format.manifest import PIECE
from rankbook.checkpoint.save_plan import PlanCache
from rankbook.checkpoint.saving import PlanHistory, Writer
from rankbook.checkpoint.storage import backends
from rankbook.errors import CheckpointError, InvalidArgument
from tests.checkpoint.simulated import InMemory

STATE = {"w": torch.arange(6.0).reshape(2, 3), "opt": {"lr": 0.1, "steps": [1, 2]}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_save_returns_what_it_saved_and_numbers_the_steps(tmp_path):
    first = rc.save(STATE, tmp_path)
    assert (first.folder, first.name, first.step, first.bytes) == (str(tmp_path), "step-0", 0, 24)
    assert 0 < first.seconds < 60
    assert [rc.save(STATE, tmp_path, step=7).step, rc.save(STATE, tmp_path).step] == [7, 8]
    assert rc.steps(tmp_path) == [0, 7, 8]
    assert names(tmp_path / "step-8") == [".metadata", "__0_0.distcp", "common.pt", "manifest.json", "metadata.json"]
    assert rc.verify(tmp_path).ok
    assert rc.verify(tmp_path).unchecked == 0
    rc.remove(tmp_path, 8)
    assert rc.steps(tmp_path) == [0, 7]
    assert rc.load_metadata(tmp_path).step == 7


def test_old_steps_are_removed_as_reported(tmp_path):
    for step in range(10):
        rc.save(STATE, tmp_path, step=step, keep=2, keep_every=4)
    assert rc.steps(tmp_path) == [0, 4, 8, 9]
    rc.save(STATE, tmp_path, keep=1)
    assert rc.steps(tmp_path) == [10]


def test_saving_a_step_again_replaces_it(tmp_path):
    rc.save(STATE, tmp_path, step=3)
    rc.save({"w": torch.zeros(2, 3)}, tmp_path, step=3)
    assert rc.load_plain(tmp_path).keys() == {"w"}
    assert names(tmp_path) == ["latest", "step-3"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_step_is_saved_although_the_old_one_cannot_be_removed(tmp_path, monkeypatch, can_exchange):
    def fail(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    rc.save(STATE, tmp_path, step=3)
    with monkeypatch.context() as patch:
        if not can_exchange:
            patch.setattr(backends, "_exchange", lambda *_: False)
        patch.setattr(backends.shutil, "rmtree", fail)
        assert rc.save({"w": torch.zeros(2, 3)}, tmp_path, step=3).step == 3
    assert not rc.load_plain(tmp_path)["w"].any()
    assert names(tmp_path) == ["latest", "step-3", "step-3.partial" if can_exchange else "step-3.replaced"]
    rc.save(STATE, tmp_path, step=4)
    assert names(tmp_path) == ["latest", "step-3", "step-4"]
    assert not rc.load_plain(tmp_path, step=3)["w"].any()


def test_a_link_to_itself_in_a_folder_of_steps_is_no_obstacle(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert rc.steps(tmp_path) == []
    rc.save(STATE, tmp_path, step=1, keep=1)
    rc.save(STATE, tmp_path, step=2, keep=1)
    assert rc.steps(tmp_path) == [2]
    assert rc.load({"w": torch.zeros(2, 3)}, tmp_path)["w"].equal(STATE["w"])
    assert (tmp_path / "loop").is_symlink()


def test_a_tilde_means_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    rc.save(STATE, "~/run", step=1)
    assert (rc.steps(tmp_path / "run"), names(tmp_path / "work")) == ([1], [])
    assert rc.load_plain("~/run")["w"].equal(STATE["w"])
    assert rc.steps("~of-nobody/run") == []


def test_steps_of_a_url_with_brackets_are_those_of_that_folder():
    base = f"memory://{uuid.uuid4().hex}"
    for step in (1, 2):
        rc.save(STATE, f"{base}/run1", step=step)
    for step in (1, 1, 2):
        rc.save(STATE, f"{base}/run[1]", step=step, keep=1)
    assert rc.steps(f"{base}/run1") == [1, 2]
    assert rc.steps(f"{base}/run[1]") == [2]
    assert torch.equal(rc.load_plain(f"{base}/run[1]")["w"], STATE["w"])


class Items(list):
    """A list of a class that torch does not load."""


def test_containers_of_other_classes_are_stored_as_plain_ones(tmp_path):
    for step, item in enumerate((None, 1)):
        pairs = [] if item is None else [("a", item)]
        values = [item] if item else []
        state = {
            "default": defaultdict(list, pairs),
            "ordered": OrderedDict(pairs),
            "counts": [Counter(dict(pairs))],
            "items": Items(values),
        }
        rc.save(state, tmp_path, step=step)
        plain = {"default": dict(pairs), "ordered": dict(pairs), "counts": [dict(pairs)], "items": values}
        for loaded in (rc.load(state, tmp_path), rc.load_plain(tmp_path)):
            assert loaded == plain
            assert [type(loaded[key]) for key in plain] == [dict, dict, list, list]
            assert type(loaded["counts"][0]) is dict
        assert type(state["default"]) is defaultdict


@pytest.mark.parametrize("program", ["rankbook", "torch"])
def test_step_is_not_saved_into_a_folder_that_is_itself_a_checkpoint(tmp_path, program):
    rc.save(STATE, tmp_path, step=3)
    folder = tmp_path / "step-3"
    if program == "torch":
        (folder / "manifest.json").unlink()
    files = names(folder)
    for step in (None, 100):
        with pytest.raises(CheckpointError, match="step-3 is itself a checkpoint; save into another folder"):
            rc.save({"w": torch.zeros(2, 3)}, folder, step=step)
    assert names(folder) == files
    assert torch.equal(rc.load_plain(folder)["w"], STATE["w"])


def test_json_metadata_survives_a_round_trip(tmp_path):
    metadata = {"loss": 0.25, "tags": ["a", "ü"], "nested": {"n": None, "yes": True}}
    rc.save(STATE, tmp_path, metadata=metadata)
    assert rc.load_metadata(tmp_path).metadata == metadata
    assert json.loads((tmp_path / "step-0/manifest.json").read_bytes())["metadata"] == metadata
    for wrong in ({"f": len}, {"loss": math.nan}, {1: 2}):
        with pytest.raises(InvalidArgument, match="metadata"):
            rc.save(STATE, tmp_path, metadata=wrong)
        assert names(tmp_path) == ["latest", "step-0"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": True},
        {"step": "7"},
        {"step": 2.0},
        {"keep": 0},
        {"keep": 1.5},
        {"keep_every": 0, "keep": 1},
        {"busy": "never"},
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        rc.save(STATE, tmp_path, **wrong)
    assert names(tmp_path) == []


def test_step_may_be_any_integer_type_and_is_loaded_by_it(tmp_path):
    for step in (np.int64(3), torch.tensor(5)):
        assert rc.save({"w": torch.ones(1) * int(step)}, tmp_path, step=step).name == f"step-{int(step)}"
    assert names(tmp_path) == ["latest", "step-3", "step-5"]
    assert rc.load({"w": torch.zeros(1)}, tmp_path, step=np.int64(3))["w"].item() == 3
    assert rc.load_plain(tmp_path, step=torch.tensor(3))["w"].item() == 3
    for wrong in ("3", "newest", 3.0, True, -3):
        for call in (partial(rc.load, {"w": torch.zeros(1)}, tmp_path), partial(rc.load_plain, tmp_path)):
            with pytest.raises(InvalidArgument, match="step must be"):
                call(step=wrong)
        with pytest.raises(InvalidArgument, match="step must be"):
            rc.verify(tmp_path, step=wrong)
        with pytest.raises(InvalidArgument, match="step must be"):
            rc.remove(tmp_path, wrong)
    assert rc.verify(tmp_path, step=np.int64(3)).ok
    rc.remove(tmp_path, np.int64(3))
    assert rc.steps(tmp_path) == [5]


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "quantized"])
def test_tensor_without_a_regular_layout_is_named(tmp_path, kind):
    factories = {
        "sparse_coo": lambda: torch.eye(3).to_sparse(),
        "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it has in prototype
        odd = factories()
    with pytest.raises(CheckpointError, match=f"'a.b' is a {kind} tensor, on rank 0"):
        rc.save({"a": {"b": odd}}, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("background", [False, True])
def test_tensor_whose_values_are_in_other_tensors_is_named(tmp_path, background):
    odd = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(CheckpointError, match=r"'a.b' is a TwoTensor, on rank 0: its values are in other tensors"):
        rc.save({"a": {"b": odd}}, tmp_path, async_=background)
    assert names(tmp_path) == []


def test_progress_goes_through_its_phases(tmp_path):
    updates = []
    rc.save({"w": torch.zeros(3 * PIECE, dtype=torch.uint8)}, tmp_path, step=4, on_progress=updates.append)
    phases = list(dict.fromkeys(element.phase for element in updates))
    assert phases == ["planning", "writing", "committing", "done"]
    assert (updates[-1].name, updates[-1].step, updates[-1].written, updates[-1].total) == (
        "step-4",
        4,
        3 * PIECE,
        3 * PIECE,
    )
    assert [item.written for item in updates] == sorted(entry.written for entry in updates)
    assert not any(member.error or member.background for member in updates)
    updates.clear()
    with pytest.raises(CheckpointError):
        rc.save(
            {"w": rc.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))},
            tmp_path,
            on_progress=updates.append,
        )
    assert updates[-1].phase == "failed"
    assert "'w'" in updates[-1].error


def test_error_of_the_progress_callback_is_reported_and_the_checkpoint_is_saved(tmp_path, caplog):
    called = []

    def broken(_):
        called.append(1)
        raise ValueError("the listener broke")

    rc.save(STATE, tmp_path, on_progress=broken)
    assert called == [1]
    assert "ValueError: the listener broke" in caplog.text
    assert rc.steps(tmp_path) == [0]


def test_an_unchanged_layout_is_reported_by_its_digests(tmp_path, monkeypatch):
    reported = []

    declare = Writer.declare

    def spied(self, *, full):
        declared = declare(self, full=full)
        reported.append("digests" if isinstance(declared, tuple) else "all")
        return declared

    monkeypatch.setattr(Writer, "declare", spied)
    monkeypatch.setattr(saving._process, "history", PlanHistory())
    rc.save({"w": torch.zeros(3), "lr": 0.1}, tmp_path)
    rc.save({"w": torch.ones(3), "lr": 0.2}, tmp_path)  # another common part: it alone is told anew
    rc.save({"w": torch.ones(3), "lr": 0.2}, tmp_path)
    assert reported[0] == "all"
    assert reported[-1] == "digests"
    reported.clear()
    rc.save({"w": torch.ones(4), "lr": 0.2}, tmp_path)
    assert reported == ["all"]
    reported.clear()
    saving._process.history.cache = PlanCache()  # rank 0 is a new process
    rc.save({"w": torch.full((4,), 2.0), "lr": 0.2}, tmp_path)
    assert reported == ["digests", "all"]
    assert rc.load_plain(tmp_path)["w"].tolist() == [2, 2, 2, 2]


def test_an_interrupt_anywhere_leaves_nothing_and_the_step_can_be_saved(tmp_path, monkeypatch):
    rc.save(STATE, tmp_path, step=1)

    class Interrupting(control_collectives.RankGroup):
        def exchange(self, work, combine):
            super().exchange(work, combine)
            raise KeyboardInterrupt  # between two collectives, where nobody catches it

    with monkeypatch.context() as patch:
        patch.setattr(saving, "RankGroup", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            rc.save(STATE, tmp_path, step=2)
    assert names(tmp_path) == ["latest", "step-1"]

    class Interrupted(InMemory):
        def write(self, path, parts):
            if path.endswith(".distcp"):
                raise KeyboardInterrupt
            return super().write(path, parts)

    storage = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        rc.save(STATE, storage)
    assert storage.files == {}
    assert rc.save(STATE, tmp_path, step=2).step == 2


def test_file_that_rank_0_cannot_see_fails_the_save():
    class Elsewhere(InMemory):
        def list(self, path=""):
            return {name: size for name, size in super().list(path).items() if not name.endswith(".distcp")}

    storage = Elsewhere()
    with pytest.raises(CheckpointError, match=r"rank 0 wrote \d+ bytes .* no such file.* a shared file system"):
        rc.save(STATE, storage)
    assert storage.files == {}


def test_custom_storage_works_like_a_folder():
    storage = InMemory()
    rc.save(STATE, storage, step=2)
    assert rc.load_plain(storage)["w"].equal(STATE["w"])
    assert rc.steps(storage) == [2]
