"""Test in one process that `rankbook.compare` leaves training objects as they are, and what it steps in copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rankbook.numerics import compare
from rankbook.runtime import Accelerator, AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_step(accelerator: Accelerator, *, accumulates: bool):
    """Return a training step of a cell, which may accumulate gradients."""

    def backward_and_step(model, optimizer, batch):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def accumulate(model, optimizer, batch):
        with accelerator.accumulate():
            backward_and_step(model, optimizer, batch)

    return accumulate if accumulates else backward_and_step


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_step_is_compared_while_a_window_of_gradient_accumulation_is_open(accumulates):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch, step = torch.randn(4, 2), make_step(accelerator, accumulates=accumulates)
    train = make_step(accelerator, accumulates=True)
    before = model.weight.detach().clone()
    (expected,) = torch.autograd.grad(model(batch).square().mean(), [model.weight])
    for _ in range(3):  # one batch is missing
        train(model, optimizer, batch)
    compared = compare(step, model, optimizer, batch)
    assert compared.equal, compared
    assert GradientState().num_steps == 4
    assert not GradientState().sync_gradients
    assert torch.equal(model.weight, before)
    train(model, optimizer, batch)
    assert optimizer.steps == 1
    torch.testing.assert_close(before - model.weight.detach(), 0.1 * expected)
