"""Test how a model is moved to the device while it is sharded. `meta` plays the device, as no test has another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankbook.runtime.strategies.fsdp2 import copy_from_first, moved_in_parts

DEVICE = torch.device("meta")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.cell = nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("mean", torch.ones(2))


def test_parameters_that_are_moved_while_sharding_are_referred_to_by_the_model_alone():
    """`fully_shard` moves them in place: the old ones, which an optimizer may hold, have to stay where they are."""
    model = Recurrent()
    old = dict(model.named_parameters())
    with moved_in_parts(model, DEVICE):
        new = dict(model.named_parameters())
        assert list(new) == list(old)
        assert not {id(parameter) for parameter in new.values()} & {id(parameter) for parameter in old.values()}
        assert all(new[name].data_ptr() == old[name].data_ptr() for name in old)
        assert [parameter.requires_grad for parameter in new.values()] == [name != "second.bias" for name in new]
        assert model.second.weight is model.first.weight
        assert model.cell._flat_weights[0] is model.cell.weight_ih_l0
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {DEVICE}
    assert {parameter.device.type for parameter in old.values()} == {"cpu"}


def test_parameters_are_as_before_if_sharding_fails():
    model = Recurrent()
    old, shard = dict(model.named_parameters()), nn.Parameter(torch.ones(1))

    def fail():
        with moved_in_parts(model, DEVICE):
            model.second.bias = shard
            raise ValueError("a rank has failed")

    with pytest.raises(ValueError, match="a rank has failed"):
        fail()
    assert all(parameter is (old | {"second.bias": shard})[name] for name, parameter in model.named_parameters())
    assert model.mean.device.type == "cpu"


def test_tensors_that_are_where_they_belong_or_have_no_data_stay_the_same():
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Recurrent()
        before = list(model.parameters())
        with moved_in_parts(model, torch.device("cpu")):
            pass
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert model.mean.device.type == device


def test_weights_of_the_first_rank_are_received_on_the_device_and_copied_back(monkeypatch):
    """NCCL does not send tensors of the CPU."""
    received, copied = [], []
    moved = SimpleNamespace(device="device")
    detached = SimpleNamespace(to=lambda _: moved, copy_=copied.append)
    tensor = SimpleNamespace(device=torch.device("cpu"), detach=lambda: detached)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", lambda sent, _: received.append(sent))
    copy_from_first(SimpleNamespace(parameters=lambda: [tensor], buffers=list), DEVICE)
    assert received == copied == [moved]
