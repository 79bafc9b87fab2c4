"""Test the devices and environment variables of ranks."""

from __future__ import annotations

import pytest

from rankbook.errors import InvalidArgument
from rankbook.launch.placement import (
    abort_grace,
    assign_devices,
    changed_variables,
    choose_device,
    rank_environment,
    threads_per_rank,
)


def test_one_rank_per_cuda_device_with_nccl_beside_gloo(monkeypatch):
    monkeypatch.delenv("RANKBOOK_RANKS", raising=False)
    placed = assign_devices(None, 4, backend=None, cores=16)
    assert placed.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert placed.backend == "cpu:gloo,cuda:nccl"
    assert placed.threads == 4


def test_ranks_that_share_a_device_use_gloo():
    placed = assign_devices(3, 2, backend=None, cores=2)
    assert placed.devices == ("cuda:0", "cuda:1", "cuda:0")
    assert placed.backend == "gloo"
    assert placed.threads == 1


def test_nccl_with_shared_devices_is_refused():
    with pytest.raises(InvalidArgument, match="3 ranks, 2 devices"):
        assign_devices(3, 2, backend="nccl", cores=2)


def test_default_number_of_ranks_without_gpus_is_two(monkeypatch):
    monkeypatch.delenv("RANKBOOK_RANKS", raising=False)
    assert assign_devices(None, 0, backend=None, cores=2).devices == ("cpu", "cpu")
    monkeypatch.setenv("RANKBOOK_RANKS", "3")
    assert len(assign_devices(None, 0, backend=None, cores=2).devices) == 3
    monkeypatch.setenv("RANKBOOK_RANKS", "many")
    with pytest.raises(InvalidArgument, match="invalid RANKBOOK_RANKS='many': expected a positive integer"):
        assign_devices(None, 0, backend=None, cores=2)


@pytest.mark.parametrize(
    ("device", "environment", "chosen"),
    [
        (None, {}, None),
        ("cpu", {}, "cpu"),
        ("cuda", {"ACCELERATE_USE_CPU": "1"}, "cuda"),
        (None, {"ACCELERATE_USE_CPU": "true"}, "cpu"),
        (None, {"ACCELERATE_USE_CPU": "0"}, None),
        (None, {"RANKBOOK_DEVICE": "cpu"}, "cpu"),
        (None, {"ACCELERATE_TORCH_DEVICE": "cpu"}, "cpu"),
        (None, {"RANKBOOK_DEVICE": "cuda", "ACCELERATE_USE_CPU": "1"}, None),  # as the `Accelerator` reads them
    ],
)
def test_the_ranks_use_the_device_that_an_accelerator_on_them_will_use(device, environment, chosen):
    assert choose_device(device, environment) == chosen


@pytest.mark.parametrize("device", ["gpu", "cuda:1", ""])
def test_another_device_is_refused(device):
    with pytest.raises(InvalidArgument, match=f"^invalid device='{device}': expected 'cpu', 'cuda', or None"):
        choose_device(device, {})


@pytest.mark.parametrize("ranks", [0, -1, 65, 100_000])
def test_more_ranks_than_sense_or_none_at_all(ranks):
    with pytest.raises(InvalidArgument, match=f"^invalid number of ranks: {ranks}; expected 1 to 64"):
        assign_devices(ranks, 0, backend=None, cores=2)


def test_torchs_contract_wins_over_the_notebooks_environment_and_hints_do_not():
    environment = rank_environment({"RANK": "9", "OMP_NUM_THREADS": "7", "MINE": "x"}, {"RANK": "1"}, threads=1)
    assert environment["RANK"] == "1"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["MINE"] == "x"


def test_a_rank_does_not_use_the_notebooks_process_of_wandb():
    base = {"WANDB_SERVICE": "3-123-unix-/tmp/service", "WANDB_MODE": "offline"}
    environment = rank_environment(base, {}, threads=1)
    assert environment["WANDB_MODE"] == "offline" and "WANDB_SERVICE" not in environment


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), (" 4 ", 4), ("4,2", 4), ("0", 8), ("", 8), ("-1", 8), ("many", 8)],
)
def test_the_threads_of_a_rank_are_those_of_the_users_variable(value, threads):
    assert threads_per_rank({"OMP_NUM_THREADS": value}, 8) == threads
    assert threads_per_rank({}, 8) == 8


def test_changed_variables_are_those_of_the_user():
    before = {"KEPT": "1", "CHANGED": "1", "REMOVED": "1", "RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    now = {"KEPT": "1", "CHANGED": "2", "NEW": "", "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": "1"}
    now["WANDB_SERVICE"] = "3-123-unix-/tmp/service"
    assert changed_variables(before, now) == {"CHANGED": "2", "NEW": "", "REMOVED": None}
    assert changed_variables(now, now) == {}


@pytest.mark.parametrize(
    ("value", "seconds"), [("", None), ("0.2", 0.2), ("0", 0.0), ("soon", None), ("-1", None), ("inf", None)]
)
def test_the_grace_before_an_abort_is_a_number_of_seconds(monkeypatch, value, seconds):
    monkeypatch.setenv("RANKBOOK_ABORT_GRACE", value)
    if seconds is None:
        with pytest.raises(InvalidArgument, match="RANKBOOK_ABORT_GRACE"):
            abort_grace()
    else:
        assert abort_grace() == seconds


def test_default_grace_period_is_one_second(monkeypatch):
    monkeypatch.delenv("RANKBOOK_ABORT_GRACE", raising=False)
    assert abort_grace() == 1.0


def test_nccl_neither_kills_ranks_nor_listens_on_the_network_by_default():
    environment = rank_environment({"NCCL_SOCKET_IFNAME": "eth0"}, {}, threads=1)
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    environment = rank_environment({}, {}, threads=1)
    assert environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert environment["NCCL_SOCKET_IFNAME"] == f"={environment['GLOO_SOCKET_IFNAME']}"
    environment = rank_environment({}, {}, threads=1, interface="eth7")
    # Not a prefix, which eth70 has too.
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")
    names = ("RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING")
    assert {environment[f"TORCH_NCCL_{name}"] for name in names} == {"0"}
    assert environment["NCCL_RAS_ENABLE"] == "0"


def test_nccl_connects_the_ranks_when_a_group_is_formed():
    assert rank_environment({}, {}, threads=1)["NCCL_RUNTIME_CONNECT"] == "0"
    assert rank_environment({"NCCL_RUNTIME_CONNECT": "1"}, {}, threads=1)["NCCL_RUNTIME_CONNECT"] == "1"
