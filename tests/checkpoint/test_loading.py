"""Test `load` on one process without a group; several ranks are in test_consistency.py and test_ranks.py."""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta

import numpy as np
import pytest
import torch

import rankbook.checkpoint as rc
from rankbook.checkpoint import loading, saving
from rankbook.errors import CheckpointError, InvalidArgument

STATE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "opt": {"lr": 0.1, "steps": [1, 2]}}


@pytest.fixture
def saved(tmp_path):
    rc.save({**STATE, "rng": rc.ShardedObject("rng", {"seed": 3}, (1,), (0,))}, tmp_path, step=1)
    return tmp_path


def requested_state():
    return {"w": torch.zeros(2, 3), "b": torch.zeros(2), "opt": {"lr": 0.0}}


def test_load_fills_the_given_tensors_in_place(saved):
    state = requested_state()
    loaded = rc.load(state, saved)
    assert loaded["w"] is state["w"] or loaded["w"].data_ptr() == state["w"].data_ptr()
    assert torch.equal(state["w"], STATE["w"])
    assert loaded["opt"] == STATE["opt"]  # all of the common part that is stored there
    assert state["opt"] == {"lr": 0.0}


def test_load_fills_noncontiguous_targets_and_targets_that_require_grad(saved):
    memory = torch.zeros(3, 4).t()[1:3]
    weight = torch.nn.Parameter(torch.zeros(2))
    rc.load({"w": memory, "b": weight}, saved)
    assert torch.equal(memory, STATE["w"])
    assert weight.tolist() == [1, 1]
    assert weight.requires_grad


def test_load_allocates_memory_for_shards_without_data(saved):
    shard = rc.ShardedTensor.from_rank_offsets("w", torch.zeros(1, 3), (0, 1, 2)).without_data()
    assert rc.load({"w": shard}, saved)["w"].tolist() == [[3, 4, 5]]


def test_a_model_on_the_meta_device_is_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"'w' is on the meta device, .*to_empty"):
        rc.load({"w": torch.zeros(2, 3, device="meta")}, saved)
    with pytest.raises(CheckpointError, match="or data on the meta device"):
        rc.save({"w": torch.zeros(2, 3, device="meta")}, tmp_path / "new")


def test_what_is_no_damage_is_not_called_damage(saved):
    state = requested_state()
    state["w"] = torch.zeros(2, 1).expand(2, 3)  # its elements share their memory
    with pytest.raises(CheckpointError, match=r"step-1 could not be loaded:\n.*'w'.*RuntimeError"):
        rc.load(state, saved)
    assert rc.load(requested_state(), saved)["w"].equal(STATE["w"])


def test_strict_mode_decides_about_missing_and_unexpected_keys(saved, caplog):
    caplog.set_level(logging.WARNING)
    more = {**requested_state(), "new": torch.full((2,), 5.0)}
    less = {"w": torch.zeros(2, 3)}
    for mode in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointError, match=r"unexpected keys.*'new' \(rank 0\)"):
            rc.load(more, saved, strict=mode)
    assert rc.load(less, saved)["w"].equal(STATE["w"])
    with pytest.raises(CheckpointError, match=r"missing keys.*'b', 'rng/shard_0_1'"):
        rc.load(less, saved, strict="raise_all")
    for mode in ("log_unexpected", "log_all"):
        caplog.clear()
        loaded = rc.load(more, saved, strict=mode)
        assert "new" not in loaded
        assert loaded["w"].equal(STATE["w"])
        assert "'new'" in caplog.text
        assert ("rng" in caplog.text) == (mode == "log_all")
    caplog.clear()
    loaded, missing, unexpected = rc.load(more, saved, strict="return_all")
    assert (missing, unexpected) == ({"rng/shard_0_1"}, {"new"})
    assert "new" not in loaded
    assert rc.load(more, saved, strict=rc.StrictHandling.RETURN_UNEXPECTED)[1:] == (set(), {"new"})
    assert "new" not in rc.load(more, saved, strict="ignore_all")
    assert more["new"].tolist() == [5, 5]
    assert caplog.text == ""
    with pytest.raises(InvalidArgument, match="unknown strict 'perhaps'"):
        rc.load(less, saved, strict="perhaps")


def test_a_dtype_is_what_was_stored_unless_a_cast_is_asked_for(saved):
    with pytest.raises(CheckpointError, match=r"'w'.*float32.*float16 was requested"):
        rc.load({"w": torch.zeros(2, 3).half()}, saved)
    assert rc.load({"w": torch.zeros(2, 3).half()}, saved, cast=True)["w"].equal(STATE["w"].half())


def test_local_nonpersistent_objects_are_not_stored(tmp_path):
    rc.save({"w": torch.ones(2), "x": {"here": rc.LocalNonpersistentObject(3), "lr": 1}}, tmp_path)
    assert b"here" not in (tmp_path / "step-0/common.pt").read_bytes()
    loaded = rc.load({"w": torch.zeros(2), "x": {"here": rc.LocalNonpersistentObject(len), "lr": 0}}, tmp_path)
    assert loaded["x"] == {"here": len, "lr": 1}


def test_objects_are_of_safe_classes_or_of_allowed_ones(tmp_path):
    def state_with(value):
        return {"o": rc.ShardedObject("o", value, (1,), (0,))}

    for value in ([1], [[2]], None, {"a": torch.ones(1)}, {1, 2}):
        rc.save(state_with(value), tmp_path)
        assert rc.load(state_with(None), tmp_path)["o"] == value
    rc.save(state_with(timedelta(1)), tmp_path)
    with pytest.raises(CheckpointError, match=r"object 'o/shard_0_1'.*datetime\.timedelta.*allow=\["):
        rc.load(state_with(None), tmp_path)
    assert rc.load(state_with(None), tmp_path, allow=[timedelta])["o"] == timedelta(1)
    with pytest.raises(CheckpointError):
        rc.load(state_with(None), tmp_path)  # allowed for that load, and not from then on
    rc.save({"common": timedelta(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"common\.pt.*datetime\.timedelta"):
        rc.load({"common": 0}, tmp_path)
    assert rc.load_plain(tmp_path, allow=[timedelta]) == {"common": timedelta(2)}
    rc.save({"common": deque([1])}, tmp_path)
    with pytest.raises(CheckpointError, match=r"common\.pt.*cannot be read: .*deque"):
        rc.load({"common": 0}, tmp_path, allow=[deque])  # torch cannot fill it, allowed or not


def test_unsafe_classes_are_warned_about_when_they_are_saved(tmp_path, caplog, monkeypatch, no_safe_globals):
    monkeypatch.setattr(saving, "_warned_unsafe", set())

    def state_with(value):
        return {"o": rc.ShardedObject("o", value, (1,), (0,)), "common": value}

    best = {"loss": np.float64(0.5), "at": timedelta(3), "rows": np.arange(3)}
    for _ in range(2):  # said once
        rc.save(state_with(best), tmp_path)
    names = ["datetime.timedelta", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar"]
    names += ["numpy.dtype", "numpy.ndarray"]
    output = [record.getMessage() for record in caplog.records if record.name.startswith("rankbook")]
    assert [item.partition(" contains ")[0] for item in output] == ["object 'o/shard_0_1'", "the common part"]
    assert all(f"allow={names}" in element for element in output)
    rc.save({"more": rc.ShardedObject("more", deque([1]), (1,), (0,))}, tmp_path, step=9)
    assert "torch cannot load collections.deque, even with allow=: convert it to a list" in caplog.text
    rc.remove(tmp_path, 9)
    with pytest.raises(
        CheckpointError, match="is intact, but some of its objects are not loaded without allow="
    ) as caught:
        rc.load(state_with(None), tmp_path)
    assert str(caught.value).count(f"allow={names}") == 2
    loaded = rc.load(state_with(None), tmp_path, allow=names)
    assert loaded["o"]["loss"] == 0.5 and loaded["common"]["rows"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="is damaged"):  # whose bytes nobody has checked
        rc.load(state_with(None), tmp_path, verify=False)


def test_load_plain_drops_no_value_that_shares_its_name_with_a_tensor(tmp_path):
    model = torch.nn.Linear(1, 1)
    state = {**rc.sharded_state_dict(model), "bias": 5, "weight": {"a": 1}}
    rc.save({**state, "o": rc.ShardedObject("more", 1, (1,), (0,)), "more/shard_0_1": 2}, tmp_path)
    with pytest.raises(CheckpointError, match=r"stored as 'bias', 'more/shard_0_1', 'weight': load them with a state"):
        rc.load_plain(tmp_path)
    loaded = rc.load(state, tmp_path)
    assert (loaded["bias"], loaded["weight"]) == (5, {"a": 1})
    assert torch.equal(loaded["model"]["weight"], model.weight)


def test_load_plain_returns_all_entries(saved):
    loaded = rc.load_plain(saved)
    assert loaded.keys() == {"w", "b", "opt", "rng/shard_0_1"}
    assert loaded["w"].equal(STATE["w"])
    assert loaded["rng/shard_0_1"] == {"seed": 3}
    assert loaded["opt"] == STATE["opt"]
    assert rc.load_plain(saved / "step-1").keys() == loaded.keys()


def test_step_is_selected_by_number_or_latest(saved):
    rc.save({"w": torch.zeros(1)}, saved, step=4)
    assert rc.load_metadata(saved).step == 4
    assert rc.load_metadata(saved, step=1).tensors["w"].shape == (2, 3)
    assert rc.load_plain(saved, step=4)["w"].tolist() == [0]
    with pytest.raises(CheckpointError, match=r"no finished step 3; finished steps: 1, 4"):
        rc.load({}, saved, step=3)
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        rc.load_plain(saved / "nothing")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_reported_unless_verify_is_off(saved):
    manifest = rc.load_metadata(saved)
    chunk = manifest.tensors["w"].chunks[0]
    data = saved / "step-1/__0_0.distcp"
    flip(data, chunk.data + 2)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: key 'w', the chunk at \(0, 0\) written by rank 0"):
        rc.load(requested_state(), saved)
    assert rc.load({"b": torch.zeros(2)}, saved)["b"].tolist() == [1, 1]  # not read, and not in the way
    rc.load(requested_state(), saved, verify=False)
    flip(data, chunk.data + 2)
    flip(data, chunk.start + 5)
    with pytest.raises(CheckpointError, match="around its data"):
        rc.load(requested_state(), saved)
    flip(data, chunk.start + 5)
    for name in (".metadata", "common.pt", "metadata.json"):
        flip(saved / "step-1" / name, 30)
        with pytest.raises(CheckpointError, match=name):
            rc.load(requested_state(), saved)
        flip(saved / "step-1" / name, 30)
    with data.open("ab") as more:
        more.write(b"x")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.* bytes, expected"):
        rc.load(requested_state(), saved)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: key 'w'.*No such file"):
        rc.load(requested_state(), saved)


@pytest.mark.parametrize("other", [{"step": 2, "keep": 1}, {"step": 1}], ids=["removed", "replaced"])
def test_a_checkpoint_that_another_save_removes_or_replaces_is_not_called_damaged(saved, monkeypatch, other):
    verify = loading.Loader.verify

    def save_and_verify(loader):
        rc.save({**STATE, "w": torch.full((2, 3), 7.0)}, saved, **other)
        verify(loader)

    state = requested_state()
    with monkeypatch.context() as patched:
        patched.setattr(loading.Loader, "verify", save_and_verify)
        message = r"step-1 was removed or replaced by another save while it was loaded; load again:\n"
        with pytest.raises(CheckpointError, match=message):
            rc.load(state, saved)
    assert not state["w"].any()
    assert rc.load(state, saved)["w"].tolist() == [[7.0] * 3] * 2
