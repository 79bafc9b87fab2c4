"""The forward of a model in mixed precision: installed once, removed without a trace."""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from rankbook.runtime.config import AutocastKwargs
from rankbook.runtime.settings import MixedForward, in_fp32, install_forward, remove_forward

CPU = torch.device("cpu")


def install(model: nn.Module, precision: str = "bf16") -> None:
    install_forward(model, precision, CPU, AutocastKwargs())


def doubled(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return twice the output, as a user's own `forward` that is an attribute of the module."""
    original = model.forward
    return lambda x: original(x) * 2


def test_a_second_installation_replaces_the_first():
    model = nn.Linear(2, 2)
    install(model)
    install(model)
    assert isinstance(model.forward, MixedForward)
    assert not isinstance(model.forward.original, MixedForward)
    install(model, "no")
    assert "forward" not in vars(model)


def test_the_signature_stays_for_code_that_asks_what_the_model_accepts():
    model = nn.Linear(2, 2)
    install(model)
    for each in (model, copy.deepcopy(model)):
        assert list(inspect.signature(each.forward).parameters) == ["input"]
        assert each.forward.__wrapped__.__self__ is each


def test_removal_gives_back_a_forward_that_the_user_had_set():
    model = nn.Linear(2, 2)
    model.forward = forward = doubled(model)
    install(model)
    assert model.forward is not forward
    remove_forward(model)
    assert model.forward is forward
    remove_forward(model)
    assert model.forward is forward, "it is not ours to remove"


class Output(NamedTuple):
    loss: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_become_fp32_in_their_containers(dtype):
    half_tensor, double_tensor = torch.ones(1, dtype=dtype), torch.ones(1, dtype=torch.float64)
    converted = in_fp32({"a": (half_tensor, [double_tensor]), "b": Output(half_tensor, ["x"])})
    assert converted["a"][0].dtype == converted["b"].loss.dtype == torch.float32
    assert converted["a"][1][0] is double_tensor
    assert isinstance(converted["b"], Output)
    assert converted["b"].names == ["x"]
    converted = in_fp32(UserDict(logits=half_tensor, names=["x"], inner=UserDict(loss=half_tensor)))
    assert type(converted) is type(converted["inner"]) is UserDict and converted["names"] == ["x"]
    assert converted["logits"].dtype == converted["inner"]["loss"].dtype == torch.float32
