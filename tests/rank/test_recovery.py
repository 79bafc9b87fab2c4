"""Test the variables that a new rank receives from a peer, and the reasons for those that it does not."""

from __future__ import annotations

import math
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from rankbook import snapshot_files
from rankbook.rank import recovery
from rankbook.transport import serialization, tensors
from rankbook.transport.serialization import unpack
from rankbook.transport.shared_memory import SegmentStore
from tests.rank_processes import run_code

pytestmark = pytest.mark.processes  # a forked child tries what can be pickled

CELL = """
import math

scale = 3

class Point:
    def __init__(self, x):
        self.x = x

def scaled(x):
    return x * scale
"""


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch, tmp_path):
    """Restore the import path, the current folder and the namespace, which a takeover of variables changes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(recovery, "_namespace", {})
    monkeypatch.chdir(tmp_path)


def taken_over(
    peer: dict[str, Any], hidden: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], recovery.AdoptedState]:
    """Return the namespace of a fresh rank after it has taken over the peer's variables, and what is missing."""
    listed = recovery.list_state(peer, hidden)
    packed = recovery.export_state(peer, hidden, listed["names"], SegmentStore(folder))
    fresh: dict[str, Any] = {"__name__": "__main__"}
    recovery.set_cell_namespace(fresh)
    serialization._is_defined_here.clear()  # a fresh rank is another process
    adopted = recovery.adopt_state(fresh, lambda: unpack(packed.payload, packed.frames, unlink=True, folder=folder))
    adopted["missing"] |= listed["missing"]
    return fresh, adopted


def test_variables_functions_and_imports_are_taken_over_and_counted(tmp_path):
    peer: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, peer)
    peer["tensor"] = torch.arange(3)
    fresh, adopted = taken_over(peer, {}, tmp_path)
    assert adopted == {"variables": 2, "functions": 2, "imports": 1, "missing": {}, "refused": "", "lost_save": ""}
    assert (fresh["scale"], fresh["tensor"].tolist(), fresh["math"]) == (3, [0, 1, 2], math)
    fresh["scale"] = 5
    assert fresh["scaled"](2) == 10, "it sees the variables of the rank that it is on"


def test_private_names_and_predefined_names_are_not_transferred(tmp_path):
    peer = {"_private": 1, "rank": 0, "kept": 2}
    fresh, adopted = taken_over(peer, {"rank": None}, tmp_path)
    assert set(fresh) - {"__name__", "__builtins__"} == {"kept"}
    assert adopted["missing"] == {}


def test_a_variable_that_cannot_be_sent_is_named_with_the_reason(tmp_path):
    fresh, adopted = taken_over({"lock": threading.Lock(), "kept": 2}, {}, tmp_path)
    assert fresh["kept"] == 2
    assert "lock" not in fresh
    assert "_thread.lock cannot be pickled" in adopted["missing"]["lock"]


def test_a_peer_whose_folder_was_removed_gives_its_variables_all_the_same(tmp_path, monkeypatch):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    fresh, adopted = taken_over({"x": 1}, {}, tmp_path)
    assert fresh["x"] == 1
    assert adopted["missing"] == {"the current folder": "it was removed"}


def test_a_folder_and_a_module_that_are_not_there_are_named(tmp_path):
    state = recovery.ExportedState(
        variables={"kept": 2},
        imports={"m": "no_such_module"},
        path=sys.path,
        folder=str(tmp_path / "no"),
        host="",
        path_changes=recovery.PathChanges([], [], []),
        has_moved=True,
        watch=None,
        environment={},
        settings=recovery.torch_settings(),
    )
    fresh: dict[str, Any] = {}
    adopted = recovery.adopt_state(fresh, lambda: state)
    assert fresh == {"kept": 2}
    assert adopted["imports"] == 0
    assert set(adopted["missing"]) == {"the current folder", "m"}


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_rank_of_another_host_keeps_its_own_folders_and_takes_what_cells_have_changed(
    tmp_path, monkeypatch, has_moved
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(there)
    path = ["/there/own", "/there/packages"]
    monkeypatch.setattr(recovery, "own_host", "ipc:///there/requests")
    monkeypatch.setattr(recovery, "first_path", path)
    monkeypatch.setattr(recovery, "first_folder", str(here if has_moved else there))
    monkeypatch.setattr(sys, "path", ["/added", "/there/own", "/more"])
    packed = recovery.export_state({"kept": 1}, {}, ["kept"], SegmentStore(tmp_path))
    state = unpack(packed.payload, packed.frames, unlink=True, folder=tmp_path)
    monkeypatch.chdir(here)
    monkeypatch.setattr(recovery, "own_host", "")
    monkeypatch.setattr(sys, "path", ["/here/own", "/there/packages", "/here/packages"])
    adopted = recovery.adopt_state({}, lambda: state)
    assert sys.path == ["/added", "/here/own", "/here/packages", "/more"] and not adopted["missing"]
    assert Path.cwd() == (there if has_moved else here)


STATEFUL = """
import functools, torch

def counter():
    count = 0
    def add():
        nonlocal count
        count += 1
    def get():
        return count
    return add, get

add, get = counter()
add()

def recursive():
    def down(n):
        return 0 if n == 0 else down(n - 1) + scale
    return down

down, scale = recursive(), 2

@functools.lru_cache(maxsize=4)
def cached(x):
    return x * scale

class Tokens:
    @functools.cache
    def item(self, x):
        return x + scale

tokens = Tokens()
weight = torch.nn.Parameter(torch.ones(2))
seen = []
weight.register_hook(lambda gradient: gradient * scale)
weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
search = torch.optim.LBFGS([weight], max_iter=1)
plain = torch.optim.SGD([weight], lr=1.0)
plain.every = 3
plain.register_step_post_hook(lambda *_: seen.append("step"))
schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
plain.step()
schedule.step()
seen.clear()
"""


def test_functions_keep_the_variables_that_they_share_and_their_caches(tmp_path):
    peer: dict[str, Any] = {"__name__": "__main__"}
    exec(STATEFUL, peer)
    fresh, adopted = taken_over(peer, {}, tmp_path)
    assert adopted["missing"] == {}
    fresh["add"]()
    assert (peer["get"](), fresh["get"](), fresh["down"](3)) == (1, 2, 6)
    fresh["scale"] = 10
    assert (fresh["cached"](1), fresh["cached"](1), fresh["tokens"].item(1)) == (10, 10, 11)
    assert fresh["cached"].cache_info() == (1, 1, 4, 1)


def test_optimizers_keep_the_attributes_of_their_class_and_hooks_stay(tmp_path):
    peer: dict[str, Any] = {"__name__": "__main__"}
    exec(STATEFUL, peer)
    fresh, adopted = taken_over(peer, {}, tmp_path)
    assert adopted["missing"] == {}
    weight, seen, plain, schedule = (fresh[name] for name in ("weight", "seen", "plain", "schedule"))
    weight.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0] and len(seen) == 1 and seen[0] is weight
    plain.step()
    schedule.step()
    assert (plain.every, seen[1:], weight.tolist()) == (3, ["step"], pytest.approx([0.8, 0.8]))
    assert plain.param_groups[0]["lr"] == pytest.approx(0.01)
    assert plain.param_groups[0]["params"][0] is weight
    fresh["search"].step(lambda: weight.square().sum())
    assert peer["seen"] == [] and peer["weight"].tolist() == [1.0, 1.0]


def test_a_hook_that_cannot_be_sent_is_the_reason_why_its_parameter_is_not(tmp_path):
    weight, lock = torch.nn.Parameter(torch.ones(1)), threading.Lock()
    weight.register_hook(lambda gradient: gradient if lock else None)
    fresh, adopted = taken_over({"weight": weight, "kept": 1}, {}, tmp_path)
    assert fresh["kept"] == 1 and "'_thread.lock' object" in adopted["missing"]["weight"]


def test_a_module_that_cannot_be_imported_any_more_is_named(tmp_path):
    (tmp_path / "edited_module.py").write_text("def f(:\n")
    state = recovery.ExportedState(
        variables={"kept": 2},
        imports={"m": "edited_module"},
        path=[str(tmp_path), *sys.path],
        folder=str(tmp_path),
        host="",
        path_changes=recovery.PathChanges([], [], []),
        has_moved=True,
        watch=None,
        environment={},
        settings=recovery.torch_settings(),
    )
    fresh: dict[str, Any] = {}
    adopted = recovery.adopt_state(fresh, lambda: state)
    assert fresh == {"kept": 2} and adopted["missing"]["m"].startswith("SyntaxError: ")


def test_the_precision_of_float32_comes_over_from_either_of_its_settings(tmp_path):
    code = """
import sys, torch
from rankbook.rank import recovery

settings = recovery.torch_settings()  # of a new rank
if sys.argv[1] == "new":
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # from now on torch refuses to read the older setting
    torch.backends.cudnn.conv.fp32_precision = "ieee"
else:
    torch.set_float32_matmul_precision("high")
changed = recovery.torch_settings()
assert changed != settings
recovery.set_torch_settings({**changed, "float32_matmul_precision": settings["float32_matmul_precision"],
                             "fp32_precisions": settings["fp32_precisions"]})
recovery.set_torch_settings(changed)
print(recovery.torch_settings() == changed, torch.backends.cuda.matmul.fp32_precision)
"""
    for setting in ("new", "old"):
        done = run_code(code, setting)
        assert done.stdout == "True tf32\n", done.stderr


def test_accelerate_is_told_another_number_of_ranks_if_cells_use_it(monkeypatch):
    used, unused = {"num_processes": 2, "process_index": 0, "backend": "gloo"}, {}
    state = SimpleNamespace(
        PartialState=SimpleNamespace(_shared_state=used), AcceleratorState=SimpleNamespace(_shared_state=unused)
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    recovery._renumber_accelerate(1, 3)
    assert (used, unused) == ({"num_processes": 3, "process_index": 1, "backend": "gloo"}, {})
    monkeypatch.delitem(sys.modules, "accelerate.state")
    recovery._renumber_accelerate(1, 3)


def test_the_device_of_the_peer_becomes_that_of_the_new_rank(monkeypatch, tmp_path):
    devices = {"own": torch.device("cuda", 0), "other": torch.device("cuda", 3), "host": torch.device("cpu")}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    packed = recovery.export_state(devices, {}, list(devices), SegmentStore(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    fresh: dict[str, Any] = {}
    recovery.adopt_state(fresh, lambda: unpack(packed.payload, packed.frames, unlink=True, folder=tmp_path))
    assert fresh == {"own": torch.device("cuda", 1), "other": torch.device("cuda", 3), "host": torch.device("cpu")}


def test_tensors_of_a_device_share_memory_on_the_device_of_the_new_rank_and_are_copied_once(monkeypatch, tmp_path):
    monkeypatch.setattr(tensors, "_device_type", lambda _: "meta")  # as if this were another device
    copies = []
    fetch = tensors._SentSlice._fetch
    monkeypatch.setattr(
        tensors._SentSlice, "_fetch", lambda sent, low, size: copies.append(size) or fetch(sent, low, size)
    )
    model = torch.nn.Sequential(torch.nn.Linear(300, 300, bias=False), torch.nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.group = "decay"
    peer = {"model": model, "row": model[0].weight.detach()[5], "same": model[0].weight}
    fresh, adopted = taken_over(peer, {}, tmp_path)
    assert adopted["missing"] == {} and adopted["variables"] == 3
    weight = fresh["model"][0].weight
    assert fresh["same"] is weight is fresh["model"][1].weight
    assert (weight.device.type, weight.group, weight.requires_grad) == ("meta", "decay", True)
    assert fresh["row"].untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert fresh["row"].storage_offset() == 5 * 300
    assert copies == [300 * 300 * 4]


def test_random_numbers_go_on_unless_nobody_has_seeded_them(monkeypatch):
    def draws():
        return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    with torch.random.fork_rng(devices=[]):
        monkeypatch.setattr(recovery, "first_seed", torch.seed())
        draws()
        assert recovery.seeded_random_state() == b""
        torch.manual_seed(7)
        state = recovery.seeded_random_state()
        own = draws()
        recovery.continue_random(state, None)
        assert draws() == own
        recovery.continue_random(b"", None)
        assert draws() != own
        others = []
        for number in (1, 2, 1):
            recovery.continue_random(state, number)
            others.append(draws())
        assert others[0] == others[2] != others[1] and own not in others


def test_a_sampler_that_divides_the_data_reads_the_part_of_the_new_rank(monkeypatch, tmp_path):
    """Only if it was that of the peer: a sampler of other ranks, such as a fixed part for evaluation, stays."""
    own = DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=True, seed=5)
    own.set_epoch(3)
    fixed = DistributedSampler(range(8), num_replicas=4, rank=2)
    monkeypatch.setattr(snapshot_files, "this_place", snapshot_files.SnapshotPlace(tmp_path, 0, 2))
    monkeypatch.setattr(recovery.dist, "get_rank", lambda: 1)  # that of the new rank
    fresh, adopted = taken_over(
        {"sampler": own, "loader": DataLoader(range(8), sampler=own), "fixed": fixed}, {}, tmp_path
    )
    assert not adopted["missing"]
    sampler = fresh["sampler"]
    assert fresh["loader"].sampler is sampler
    assert (sampler.rank, sampler.num_replicas, sampler.epoch, sampler.seed) == (1, 2, 3, 5)
    assert sorted([*sampler, *own]) == list(range(8))
    assert (own.rank, fresh["fixed"].rank, fresh["fixed"].num_replicas) == (0, 2, 4)


def test_hooks_of_the_new_rank_replace_none_that_came_over(monkeypatch, tmp_path):
    layer = torch.nn.Linear(1, 1)
    handle = layer.register_forward_pre_hook(print)
    fresh: dict[str, Any] = {}
    packed = recovery.export_state({"layer": layer}, {}, ["layer"], SegmentStore(tmp_path))
    monkeypatch.setattr(RemovableHandle, "next_id", handle.id)  # of a process that has registered fewer hooks
    recovery.adopt_state(fresh, lambda: unpack(packed.payload, packed.frames, unlink=True, folder=tmp_path))
    fresh["layer"].register_forward_pre_hook(abs)
    assert list(fresh["layer"]._forward_pre_hooks.values()) == [print, abs]
