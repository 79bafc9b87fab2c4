"""Small collectives for control data, on one rank: with a process group, and without one."""

from __future__ import annotations

import pytest

dist = pytest.importorskip("torch.distributed")

from rankbook.control_collectives import (
    all_min,
    all_ranks_equal,
    control_device,
    gather_objects,
    this_rank,
    world_size,
)


@pytest.fixture(params=[None, "gloo", "cpu:gloo"])
def single_rank_group(request):
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_this_process_is_the_only_rank():
    assert (this_rank(), world_size()) == (0, 1)
    assert gather_objects("a") == ["a"]
    assert all_min(3, -1) == [3, -1]
    assert all_ranks_equal("a")


def test_control_tensors_are_on_the_cpu_whatever_backend_was_named(single_rank_group):
    assert control_device().type == "cpu"
    assert (all_min(3, -1), all_ranks_equal("a"), gather_objects("a")) == ([3, -1], True, ["a"])
