"""Test what `protect` refuses. What it restores is tested in tests/faults/test_protect.py."""

from __future__ import annotations

import pytest

from rankbook.errors import InvalidArgument
from rankbook.runtime import optimizer, protection


@pytest.mark.parametrize("every", [-1, 1.5, True, "2"])
def test_another_value_than_a_number_of_steps_is_refused(every):
    with pytest.raises(InvalidArgument, match="expected a number of steps, 1 or more, got every="):
        protection.protect(every)


def test_a_process_that_is_no_rank_cannot_be_protected():
    with pytest.raises(InvalidArgument, match="requires ranks of Rankbook"):
        protection.protect(1)
    protection.protect(0)
    assert optimizer.after_step is None


def test_what_optimizers_and_models_outside_prepare_are_is_said():
    import torch

    model = torch.nn.Linear(1, 1)
    namespace = {"model": model, "x": torch.ones(1), "steps": 3, "_private": 1, "rank": 2, "torch": torch}
    namespace["optimizer"] = torch.optim.SGD(namespace["model"].parameters())
    assert protection.find_unprotected(namespace, {"rank": None}) == {
        "model": "a module outside prepare()",
        "x": "a tensor",
        "steps": "a variable (int)",
        "optimizer": "an optimizer outside prepare()",
    }
