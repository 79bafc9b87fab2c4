"""Test how many bytes the ranks hand over in a resize."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankbook.runtime import Accelerator, ParallelismConfig, resize
from tests.rank_processes import run_ranks

LAYOUTS = {
    "sharded": {"dp_shard_size": 4},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tensor parallel": {"dp_shard_size": 2, "tp_size": 2},
}


def count_bytes(sizes: dict[str, int]) -> tuple[int, int]:
    """Return the bytes that this rank hands over, and those of one replica of a model and its optimizer."""
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    net.tp_plan = {"0": "colwise"}
    parameters = list(net.parameters())
    # Adam has two tensors and a counter of 4 bytes for a parameter.
    replica = sum(3 * tensor.nbytes + 4 for tensor in parameters) + sum(buffer.nbytes for buffer in net.buffers())
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    _model, optimizer = accelerator.prepare(net, torch.optim.Adam(parameters))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return resize.bytes_to_hand_over(), replica


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_handed_over_once(layout):
    results = run_ranks(count_bytes, 4, LAYOUTS[layout])
    assert sum(handed for handed, _ in results) == results[0][1]


def find_problem_without_state() -> str:
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    net.register_state_dict_post_hook(lambda _, state, __, ___: state.__delitem__("0.weight"))
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    problem = resize.find_problem(3)
    assert model is not None and optimizer is not None
    return problem


@pytest.mark.slow
def test_a_model_whose_state_dict_leaves_shards_out_is_refused():
    expected = "the state_dict() of Sequential leaves out 0.weight, whose shards would be lost: "
    assert all(problem.startswith(expected) for problem in run_ranks(find_problem_without_state, 2))
