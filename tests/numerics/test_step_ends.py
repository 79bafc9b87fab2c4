"""Test the ends of optimizer steps: what is called, and what an error of a listener costs."""

from __future__ import annotations

import pytest
import torch

from rankbook.numerics import step_ends


@pytest.fixture(autouse=True)
def no_listeners(monkeypatch) -> None:
    monkeypatch.setattr(step_ends, "_listeners", ())


def optimizer(kind: type = torch.optim.SGD) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.1)


def test_listeners_are_called_after_every_step_with_the_optimizer():
    ends = []
    step_ends.listen(lambda stepped: ends.append((stepped, step_ends.step_of(stepped))))
    adam, sgd = optimizer(torch.optim.Adam), optimizer()
    adam.step()
    adam.step()
    sgd.step()
    assert ends == [(adam, 1), (adam, 2), (sgd, None)]


def test_state_under_a_name_is_no_counter_of_steps():
    ends = []
    step_ends.listen(lambda stepped: ends.append(step_ends.step_of(stepped)))
    adam, sgd = optimizer(torch.optim.Adam), optimizer()
    for each in (adam, sgd):
        each.state["calls"] = 7
        each.state["options"] = {"warm": True}
        each.step()
    assert ends == [1, None]


def test_a_counter_on_a_device_is_read_once():
    """To read it waits for the device, which would end the lead of the host in every step."""
    read = []

    class OnDevice(torch.Tensor):
        device = property(lambda _tensor: torch.device("cuda"))

        def __int__(self) -> int:
            read.append(True)
            return 7

    ends = []
    step_ends.listen(lambda stepped: ends.append((step_ends.step_of(stepped), step_ends.step_of(stepped))))
    fused = optimizer()
    fused.state[fused.param_groups[0]["params"][0]]["step"] = torch.tensor(7.0).as_subclass(OnDevice)
    for _ in range(3):
        fused.step()
    assert ends == [(7, 7), (8, 8), (9, 9)]
    assert len(read) == 1


def test_an_error_of_a_listener_is_shown_once_and_does_not_reach_the_training(capsys):
    ends = []

    def broken(stepped: object) -> None:
        raise ValueError("of the view")

    step_ends.listen(broken)
    step_ends.listen(ends.append)
    sgd = optimizer()
    sgd.step()
    sgd.step()
    assert ends == [sgd, sgd]
    assert capsys.readouterr().err.count("ValueError: of the view") == 1


def test_an_interrupt_in_a_listener_ends_the_step():
    def interrupted(stepped: object) -> None:
        raise KeyboardInterrupt

    step_ends.listen(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer().step()


def test_the_hook_is_removed_only_while_nothing_listens():
    step_ends.install()
    step_ends.remove_unused()
    assert step_ends._hook is None
    ends = []
    step_ends.listen(ends.append)
    step_ends.remove_unused()
    sgd = optimizer()
    sgd.step()
    assert ends == [sgd]
