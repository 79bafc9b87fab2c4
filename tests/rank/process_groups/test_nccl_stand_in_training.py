"""DDP and FSDP2 of plain torch train on the stand-in for NCCL as they do on gloo, with the host ahead of the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.rank_processes import run_ranks

STEPS = 4


def train(backend: str, wrapper: str, world_size: int) -> tuple[list[float], int]:
    """Return the losses of some steps, and how many operations the device had to do after the last one."""
    from tests.nccl_stand_in import current_device, on_device

    dist.init_process_group(backend)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    )
    inputs = torch.randn(STEPS, world_size, 5, 6)[:, dist.get_rank()]
    device = current_device()
    with on_device(device) if backend != "gloo" else contextlib.nullcontext():
        if wrapper == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            for layer in (model[0], model[3]):
                fully_shard(layer)
            fully_shard(model)
        else:
            options = {"DDP": {}, "DDP, unused": {"find_unused_parameters": True}}[wrapper]
            model = torch.nn.parallel.DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        device.delay = 0.0001  # never idle, so that everything is queued
        losses = []
        for step, batch in enumerate(inputs):
            # In the last step nothing may wait for the device. To find unused parameters, DDP reads on the host.
            is_last = step == STEPS - 1
            device.held = is_last and wrapper != "DDP, unused"
            loss = model(batch).square().mean()
            loss.backward()
            if wrapper == "FSDP2" and not is_last:  # a functional collective of DTensor
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        ahead = len(device.pending)
        device.held = False
        return [loss.item() for loss in losses], ahead


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", pytest.param("DDP, unused", marks=pytest.mark.slow)])
def test_training_gives_the_same_losses_as_on_gloo(wrapper):
    on_gloo = run_ranks(train, 2, "gloo", wrapper, 2, group=False)
    on_stand_in = run_ranks(train, 2, "stand_in", wrapper, 2, group=False)
    assert [losses for losses, _ in on_stand_in] == [losses for losses, _ in on_gloo]
    if wrapper != "DDP, unused":
        assert all(ahead > 20 for _, ahead in on_stand_in)
    assert len({*on_gloo[0][0]}) == STEPS


def use_from_torch() -> list[Any]:
    """Use the functions of torch.distributed on the stand-in."""
    from tests.nccl_stand_in import StandInGroup, on_device

    dist.init_process_group("stand_in")
    rank = dist.get_rank()
    with on_device():
        tensor = torch.full((2,), float(rank + 1))
        results: list[Any] = [dist.all_reduce(tensor), dist.barrier()]
        work = dist.all_reduce(tensor, async_op=True)
        results += [work.wait(), tensor.tolist()]
        subgroup = dist.new_group([0, 1])
        assert isinstance(subgroup, StandInGroup)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group=subgroup)
        results.append(objects)
        received = torch.zeros(1)
        messages = [
            dist.P2POp(dist.isend, torch.full((1,), float(rank)), 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        results.append(received.item())
        dist.barrier()
        tensor.tolist()
    # Rank 0 has the store, which the other rank uses until the end of its barrier.
    store = distributed_c10d._get_default_store()
    if rank:
        store.set("ended", "")
    else:
        store.wait(["ended"])
    return results


@pytest.mark.processes
def test_functions_of_torch_work_on_the_stand_in():
    common = [None, None, True, [6.0, 6.0], [{"rank": 0}, {"rank": 1}]]
    assert run_ranks(use_from_torch, 2, group=False) == [[*common, 1.0], [*common, 0.0]]
