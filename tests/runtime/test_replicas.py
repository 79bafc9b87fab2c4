"""Test the choice of the replica whose state all ranks take over, and that its schedule comes along."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from rankbook.rank import model_reset
from rankbook.runtime import Accelerator
from rankbook.runtime.strategies.transfer import choose_row


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({0: (7,), 1: (7,), 2: None, 3: (7,)}, [0, 1]),  # the shards of rank 2 are lost
        ({0: (7,), 1: (7,), 2: (8,), 3: (8,)}, [2, 3]),  # the replica that has made more steps
        ({0: (7,), 1: (8,), 2: (7,), 3: (7,)}, [2, 3]),  # the shards of the first one are of different steps
        ({0: (8, 7), 1: (7, 7), 2: (7, 7), 3: (7, 7)}, [2, 3]),  # so are they if one of two optimizers has stepped
        ({0: (0,), 1: (0,), 2: None, 3: None}, [0, 1]),
        ({0: (7,), 1: (8,), 2: None, 3: (8,)}, None),
        ({0: None, 1: (8,), 2: None, 3: (8,)}, None),
    ],
)
def test_a_whole_replica_of_one_step_is_chosen(steps, expected):
    assert choose_row([[0, 1], [2, 3]], steps) == expected


def test_without_replicas_there_is_none():
    assert choose_row([], {0: (1,), 1: (1,)}) is None


def test_the_schedule_of_a_reverted_step_is_reverted_with_it(monkeypatch):
    """Its scheduler may have stepped too, since the host is ahead of the device."""

    def trained(steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer, scheduler = Accelerator().prepare(optimizer, scheduler)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer.optimizer, scheduler

    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda *_: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, _: sent.extend(objects))
    monkeypatch.setattr(dist, "all_gather_object", lambda rows, row: rows.__setitem__(slice(None), [row]))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    optimizer, _ = trained(steps=1)
    assert model_reset.restore_stepped([optimizer], 0, torch.device("cpu")) == {}

    def receive(objects, _):
        objects[:] = pickle.loads(pickle.dumps(sent))

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    optimizer, scheduler = trained(steps=2)
    assert model_reset.restore_stepped([optimizer], 0, torch.device("cpu")) == {}
    assert (scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]) == (1, [0.5], 0.5)
