"""Test where ranks are placed, on which device, and what they inherit."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from dataclasses import replace

import pytest

from rankbook import control_groups
from rankbook.errors import InvalidArgument
from rankbook.launch.placement import (
    HOME,
    OWN_FOLDERS,
    HostSlots,
    choose_backend,
    free_seat,
    home_seat,
    inherited_variables,
    number_nodes,
    path_on_host,
    path_to_send,
    place_ranks,
    place_variables,
    usable_cores,
)

TWO_GPUS = HostSlots("a", "node1", slots=2, devices=2, cores=16, node=0)
FOUR_GPUS = HostSlots("b", "node2", slots=4, devices=4, cores=16, node=1)
CPU = HostSlots("c", "node3", slots=2, cores=4)


def test_ranks_are_numbered_host_by_host_in_the_order_of_the_nodes():
    seats = place_ranks(6, [FOUR_GPUS, TWO_GPUS])
    assert [seat.host for seat in seats] == ["a", "a", "b", "b", "b", "b"]
    assert [seat.device for seat in seats] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [(seat.local_rank, seat.local_world_size) for seat in seats] == [
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
    ]
    assert [(seat.group_rank, seat.group_world_size) for seat in seats] == [(0, 2)] * 2 + [(1, 2)] * 4
    assert [seat.threads for seat in seats] == [8, 8, 4, 4, 4, 4]


def test_the_notebooks_host_comes_first_and_unused_hosts_do_not_count():
    home = HostSlots(HOME, "login", slots=1, cores=2)
    seats = place_ranks(2, [TWO_GPUS, CPU, home])
    assert [(seat.host, seat.group_world_size, seat.local_world_size) for seat in seats] == [(HOME, 2, 1), ("a", 2, 1)]


def test_hosts_without_a_number_are_ordered_by_name_behind_the_others():
    named = [HostSlots(agent, name, slots=1) for agent, name in (("1", "z"), ("2", "y"))]
    assert [seat.host for seat in place_ranks(3, [*named, HostSlots("3", "x9", slots=1, node=5)])] == ["3", "2", "1"]


def test_agents_that_were_started_per_rank_keep_its_order_and_share_the_node():
    tasks = [
        HostSlots(
            f"task{rank}",
            f"node{rank // 2}#{rank % 2 + 1}",
            *(1, 2, 8, rank // 2),
            rank=rank,
            local_rank=rank % 2,
            machine=f"node{rank // 2}",
        )
        for rank in range(4)
    ]
    seats = place_ranks(4, tasks[::-1])
    assert [seat.host for seat in seats] == ["task0", "task1", "task2", "task3"]
    assert [seat.local_rank for seat in seats] == [0, 1, 0, 1]
    assert {seat.local_world_size for seat in seats} == {2} and [seat.group_rank for seat in seats] == [0, 0, 1, 1]
    assert [seat.device for seat in seats] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    # They share the cores of their node, or have their own.
    assert [seat.threads for seat in seats] == [4] * 4
    shared = [replace(task, core_ids=frozenset(range(8))) for task in tasks]
    assert [seat.threads for seat in place_ranks(4, shared)] == [4] * 4
    bound = [replace(task, core_ids=frozenset(range(8 * task.local_rank, 8 * task.local_rank + 8))) for task in tasks]
    assert [seat.threads for seat in place_ranks(4, bound)] == [8] * 4
    moved = free_seat(place_ranks(4, bound)[3], place_ranks(4, bound), [*bound[:3], replace(bound[3], id="task4")])
    assert moved is not None and moved.threads == 8
    # The task of rank 3 is lost, and another one takes its place.
    newcomer = replace(tasks[3], id="task4", name="node1#3")
    moved = free_seat(seats[3], seats, [*tasks[:3], newcomer])
    assert moved is not None and (moved.host, moved.local_rank, moved.group_rank) == ("task4", 1, 1)
    assert number_nodes([*seats[:3], moved], [*tasks[:3], newcomer]) == (*seats[:3], moved)


def test_nodes_are_numbered_without_gaps_after_ranks_have_moved():
    def numbers(*hosts: str) -> list[tuple[int, int, int]]:
        moved = [replace(seat, host=host) for seat, host in zip(seats, hosts, strict=True)]
        numbered = number_nodes(moved, [HostSlots(host, f"node-{host}", slots=4) for host in set(hosts)])
        return [(seat.group_rank, seat.group_world_size, seat.local_world_size) for seat in numbered]

    nodes = [HostSlots(name, name, slots=2) for name in "ab"]
    seats = place_ranks(4, nodes)
    assert numbers("a", "a", "b", "b") == [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]
    # The ranks of one host have moved to two.
    assert numbers("a", "a", "c", "d") == [(0, 3, 2), (0, 3, 2), (1, 3, 1), (2, 3, 1)]
    assert numbers("c", "d", "b", "b") == [(0, 3, 1), (1, 3, 1), (2, 3, 2), (2, 3, 2)]
    # To the other host.
    assert numbers("b", "b", "b", "b") == [(0, 1, 4)] * 4


def test_too_few_slots_are_an_error_that_says_how_many_there_are():
    with pytest.raises(InvalidArgument, match="9 ranks need 9 slots, but the hosts offer 8"):
        place_ranks(9, [TWO_GPUS, FOUR_GPUS, CPU])


def test_a_lost_rank_goes_back_to_its_host_else_to_a_free_slot_of_another_one():
    seats = place_ranks(4, [TWO_GPUS, FOUR_GPUS])
    assert free_seat(seats[1], seats, [TWO_GPUS, FOUR_GPUS]) is seats[1]
    moved = free_seat(seats[1], seats, [FOUR_GPUS])
    assert moved is not None
    assert (moved.rank, moved.host, moved.device, moved.local_rank, moved.group_rank) == (1, "b", "cuda:2", 2, 1)
    newcomer = free_seat(seats[3], seats, [CPU])
    assert newcomer is not None and (newcomer.host, newcomer.device, newcomer.group_rank) == ("c", "cpu", 1)
    assert free_seat(seats[1], seats, []) is None
    full = HostSlots("d", "node4", slots=0)
    assert free_seat(seats[1], seats, [full]) is None


def test_two_lost_ranks_get_two_places():
    seats = list(place_ranks(4, [TWO_GPUS, FOUR_GPUS]))
    for rank in (0, 1):
        moved = free_seat(seats[rank], seats, [FOUR_GPUS])
        assert moved is not None
        seats[rank] = moved
    assert sorted(seat.device for seat in seats) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert free_seat(seats[0], seats, [TWO_GPUS]) is not None


@pytest.mark.parametrize(("quota", "cores"), [(None, 12), (96.0, 12), (8.0, 8), (1.5, 2), (0.1, 1)])
def test_the_cores_are_those_of_the_affinity_and_of_the_cpu_quota(monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(12)}, raising=False)
    monkeypatch.setattr(control_groups, "cpu_quota", lambda: quota)
    assert usable_cores() == cores


def test_nccl_is_used_if_every_rank_has_a_device_of_its_own():
    assert choose_backend(place_ranks(6, [TWO_GPUS, FOUR_GPUS]), None) == "cpu:gloo,cuda:nccl"
    assert choose_backend(place_ranks(8, [TWO_GPUS, FOUR_GPUS, CPU]), None) == "gloo"
    assert choose_backend([home_seat(rank, ["cuda:0", "cuda:0"], 1) for rank in range(2)], None) == "gloo"
    assert choose_backend(place_ranks(2, [CPU]), "gloo") == "gloo"
    with pytest.raises(InvalidArgument, match="nccl needs a CUDA device per rank"):
        choose_backend(place_ranks(2, [CPU]), "nccl")


def test_named_variables_are_inherited_and_those_of_the_host_are_not():
    environment = {
        "PATH": "/bin",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HOME": "/data",
        "OMP_NUM_THREADS": "3",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANKBOOK_CONNECT": "secret",
        "WANDB_SERVICE": "3-123-unix-/tmp/service",
        "MINE": "1",
    }
    assert inherited_variables(environment, ["MINE", "MISSING"]) == {
        "HF_HOME": "/data",
        "OMP_NUM_THREADS": "3",
        "NCCL_DEBUG": "INFO",
        "MINE": "1",
    }


def test_no_device_is_visible_to_ranks_on_the_cpu():
    seat = home_seat(0, ["cpu"], 1)
    variables = {
        device: place_variables(seat, world_size=1, address="127.0.0.1", port=5, run="1-1", device=device)
        for device in (None, "cuda", "cpu")
    }
    # The notebook's RANKBOOK_DEVICE=cuda would make an `Accelerator` ask for a device.
    assert variables["cpu"] == {"CUDA_VISIBLE_DEVICES": "", "RANKBOOK_DEVICE": "cpu", **variables["cuda"]}
    assert variables[None] == variables["cuda"]
    assert not {"CUDA_VISIBLE_DEVICES", "RANKBOOK_DEVICE"} & variables["cuda"].keys()


def test_libraries_learn_that_a_rank_is_on_the_cpu(monkeypatch):
    def variables(device: str, world_size: int) -> dict[str, str]:
        seat = home_seat(0, [device] * world_size, 1)
        return place_variables(seat, world_size=world_size, address="127.0.0.1", port=5, run="1-1")

    assert variables("cpu", 2)["ACCELERATE_USE_CPU"] == variables("cpu", 1)["ACCELERATE_USE_CPU"] == "1"
    assert "ACCELERATE_USE_CPU" not in variables("cuda:0", 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "ACCELERATE_USE_CPU" not in variables("cpu", 1), "a single process may use the GPU of a Mac"


def test_the_variables_are_those_of_torchrun():
    seat = place_ranks(6, [TWO_GPUS, FOUR_GPUS])[3]
    assert place_variables(seat, world_size=6, address="10.0.0.1", port=5, run="1-1") == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "TORCHELASTIC_RUN_ID": "1-1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_hosts_may_have_different_numbers_of_devices():
    hosts = [
        HostSlots("a", "node1", slots=4, devices=4, cores=16, node=0),
        HostSlots("b", "node2", slots=2, devices=2, cores=16, node=1),
        HostSlots("c", "node3", slots=1, devices=0, cores=4, node=2),
    ]
    seats = place_ranks(7, hosts)
    assert [seat.device for seat in seats] == [f"cuda:{n}" for n in (0, 1, 2, 3, 0, 1)] + ["cpu"]
    assert [seat.local_world_size for seat in seats] == [4, 4, 4, 4, 2, 2, 1]
    assert [seat.threads for seat in seats] == [4, 4, 4, 4, 8, 8, 4]
    assert choose_backend(seats, None) == "gloo", "a rank has no device"
    assert choose_backend(seats[:6], None) == "cpu:gloo,cuda:nccl"


def test_the_folders_of_the_notebooks_python_are_not_sent_to_other_hosts():
    libraries = [entry for entry in sys.path if entry.startswith(sysconfig.get_paths()["stdlib"])]
    assert any("lib-dynload" in entry for entry in libraries)
    archive = next(entry for entry in sys.path if entry.endswith(".zip"))
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    path = ["", "/before", archive, *libraries, *installed, "/of/a/pth/file"]
    sent = path_to_send(map(os.fsencode, path))
    assert sent == (b"", b"/before", OWN_FOLDERS, b"/of/a/pth/file")
    assert path_on_host(sent, [b"/lib", b"/before"]) == (b"", b"/before", b"/lib", b"/of/a/pth/file")
    assert path_on_host((b"/before",), [b"/lib"]) == (b"/before", b"/lib")
