"""Test the predefined variable `accelerator` on a rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def forgotten(notebook):
    yield
    notebook.ok("%%distributed\nglobals().pop('accelerator', None)\nfrom rankbook import AcceleratorState\n"
                "AcceleratorState._reset_state()")  # fmt: skip


def test_cell_that_uses_accelerator_gets_one_for_its_rank(notebook):
    outcome = notebook.ok(
        "%%distributed\nprint(accelerator.process_index, accelerator.num_processes, type(accelerator))"
    )
    assert "[0] 0 2 <class 'rankbook.runtime.accelerator.Accelerator'>" in outcome.stdout
    assert "[1] 1 2 <class 'rankbook.runtime.accelerator.Accelerator'>" in outcome.stdout


def test_predefined_accelerator_is_the_same_in_the_next_cell(notebook):
    notebook.ok("%%distributed\naccelerator.seen = rank")
    assert "[1] 1" in notebook.ok("%%distributed\nprint(accelerator.seen)").stdout


@pytest.mark.parametrize(
    "code",
    [
        "accelerator = 7",
        "accelerator: int = 7",
        "other, accelerator = 1, 7",
        "from math import tau as accelerator",
        "for accelerator in [7]:\n    print(accelerator)",
        "%time accelerator = 7",
    ],
)
def test_cell_that_creates_an_accelerator_uses_it(notebook, code):
    notebook.ok(f"%%distributed\n{code}\nmade = accelerator\nfrom rankbook import AcceleratorState\n"
                "none_of_ours = not AcceleratorState._shared_state")  # fmt: skip
    assert "True" in notebook.ok("%%distributed\nnone_of_ours").text
    assert "7" in notebook.ok("%%distributed\nmade").text or "tau" in code


def test_cell_that_does_not_use_accelerator_gets_none(notebook):
    assert "False" in notebook.ok("%%distributed\n'acc' + 'elerator' in globals()").text


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("import rankbook\naccelerator: rankbook.Accelerator", False),
        ("def train(accelerator):\n    return accelerator.device", False),
        ("# set up the accelerator", False),
        ("text = 'accelerator'", False),
        ("def train():\n    return accelerator.device\ntrain()", True),
        ("def show(net, accelerator=None):\n    print(accelerator)\nshow(1, accelerator=accelerator)", True),
        ("print(f'{accelerator=}')", True),
        ("from rankbook import Accelerator\naccelerator: Accelerator\naccelerator.device", True),
        ("%time accelerator.device", True),
        ("%%time\ndict(device=accelerator.device,\n     accelerator=accelerator)", True),
        ("%%time\naccelerator.device", True),
        ("import asyncio\nawait asyncio.sleep(0)\naccelerator.device", True),
    ],
)
def test_a_cell_gets_an_accelerator_if_it_uses_the_name_and_not_if_it_only_mentions_it(notebook, code, made):
    notebook.ok(f"%%distributed\n{code}")
    assert str(made) in notebook.ok("%%distributed\n'acc' + 'elerator' in globals()").text
