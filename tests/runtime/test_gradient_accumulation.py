"""Windows of gradient accumulation: how many batches one has, and when gradients are scaled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rankbook.runtime.gradient_state import AccumulationWindow

STEPS = 3


class Loader:
    """A loader that does not know its length."""


class Loop:
    """The batches of one loop over a loader, as a window sees them."""

    def __init__(self) -> None:
        self.window = AccumulationWindow()
        self.parameter = torch.zeros(2, requires_grad=True)
        loader = Loader()
        self.gradients = SimpleNamespace(
            num_steps=STEPS,
            sync_with_dataloader=True,
            end_of_dataloader=False,
            _active=[(lambda: loader,)],
            _set_sync_gradients=lambda _: None,
        )

    def batch(self, *, last: bool = False) -> bool:
        self.gradients.end_of_dataloader = last
        return self.window.begin_batch(self.gradients)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_gradients_sync_at_the_end_of_a_window_and_of_the_loader(loop):
    assert [loop.batch(), loop.batch(), loop.batch(), loop.batch(last=True)] == [False, False, True, True]


def test_gradients_of_a_window_cut_short_by_the_end_are_scaled_once(loop):
    loop.batch()
    loop.batch(last=True)
    loop.parameter.grad = torch.tensor([6.0, -2.0])
    loop.window.rescale_gradients([loop.parameter])
    loop.window.rescale_gradients([loop.parameter])
    assert loop.parameter.grad.tolist() == [9.0, -3.0]


def test_gradients_of_a_whole_window_are_not_written_to(loop):
    loop.parameter.grad = torch.ones(2)
    for _ in range(STEPS):
        loop.batch()
        loop.window.rescale_gradients([loop.parameter])
    assert loop.parameter.grad._version == 0, "a multiplication by 1.0 costs a pass over all gradients"


def test_a_new_window_is_not_scaled_for_the_one_before_it(loop):
    loop.batch(last=True)
    loop.parameter.grad = torch.ones(2)
    loop.batch()
    loop.window.rescale_gradients([loop.parameter])
    assert loop.parameter.grad.tolist() == [1.0, 1.0]


def test_a_loader_that_begins_again_beside_another_one_drops_no_gradients(loop):
    dropped = []
    loop.window.drop_gradients = lambda: dropped.append(1)
    restarted, other = Loader(), loop.gradients._active[0]
    loop.gradients._active[:] = [(lambda: restarted,), other]
    assert [loop.batch(), loop.batch()] == [False, False]
    # `zip(cycle(restarted), other)`: a new loop, while the other one goes on.
    loop.gradients._active[:] = [other, (lambda: restarted,)]
    assert loop.batch(), "the third batch of the window"
    assert dropped == []


def test_a_loop_that_was_left_in_the_middle_of_a_window_drops_its_gradients(loop):
    dropped = []
    loop.window.drop_gradients = lambda: dropped.append(1)
    loop.batch()
    other = Loader()
    loop.gradients._active[:] = [(lambda: other,)]
    assert [loop.batch(), loop.batch(), loop.batch()] == [False, False, True]
    assert dropped == [1]
