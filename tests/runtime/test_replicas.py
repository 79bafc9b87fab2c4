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


@pytest.fixture
def restore(monkeypatch):
    """Return a function that copies an optimizer from rank 0 to another one, and returns what the user has to know."""
    monkeypatch.setattr(dist, "broadcast", lambda *_: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda rows, row: rows.__setitem__(slice(None), [row]))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def restore(source, target):
        sent = []
        monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, _: sent.extend(objects))
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        assert model_reset.restore_stepped([source], 0, torch.device("cpu")) == ([], [])

        def receive(objects, _):
            objects[:] = pickle.loads(pickle.dumps(sent))

        monkeypatch.setattr(dist, "broadcast_object_list", receive)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        failed, notes = model_reset.restore_stepped([target], 0, torch.device("cpu"))
        assert failed == []
        return "".join(notes)

    return restore


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)


def halve(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def warm_up(optimizer):
    constant = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=1) for _ in range(2)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, constant, [1])


def state_after(optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("make", [halve, warm_up])
@pytest.mark.parametrize("is_prepared", [(True, True), (True, False), (False, False)], ids=str)
def test_the_schedule_of_a_reverted_step_is_reverted_with_it(restore, make, is_prepared):
    """Its scheduler may have stepped too, since the host is ahead of the device."""

    def trained(steps):
        raw = optimizer = make_optimizer()
        prepare_optimizer, prepare_scheduler = is_prepared
        if prepare_optimizer:
            optimizer = Accelerator().prepare(raw)
        scheduler = make(raw if prepare_scheduler else optimizer)
        if prepare_scheduler:
            scheduler = Accelerator().prepare(scheduler)
        return raw, scheduler, state_after(optimizer, scheduler, steps)

    source, kept, expected = trained(steps=1)
    target, scheduler, ahead = trained(steps=2)
    assert ahead != expected
    assert restore(source, target) == ""
    assert (scheduler.last_epoch, scheduler.get_last_lr(), target.param_groups[0]["lr"]) == expected
    del kept


def test_schedulers_that_cannot_be_told_apart_are_named(restore):
    source, target = make_optimizer(), make_optimizer()
    of_source, of_target = [halve(source)], [halve(target), halve(target)]
    expected = state_after(target, of_target[0], steps=1)
    note = restore(source, target)
    assert note.startswith("SGD: its schedulers (ExponentialLR) may have counted other steps, and were not copied")
    assert (of_target[0].last_epoch, of_source[0].last_epoch) == (expected[0], 0)


def test_a_scheduler_whose_state_cannot_be_pickled_is_named(restore):
    source, target = make_optimizer(), make_optimizer()
    schedulers = [halve(source), halve(target)]
    schedulers[0].factor = lambda: 0.5
    assert "(ExponentialLR)" in restore(source, target)


def test_a_scheduler_that_the_other_rank_does_not_have_is_named(restore):
    source, target = make_optimizer(), make_optimizer()
    scheduler = halve(source)
    assert "(ExponentialLR)" in restore(source, target)
    assert restore(target, make_optimizer()) == ""
    del scheduler
