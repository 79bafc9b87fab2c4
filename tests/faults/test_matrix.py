"""A fault costs the cell that it came in and nothing else: each fault, at each moment, with each thing in ranks' hands.

A few cases are in the suite, all of them run with `-m exhaustive`. What each took is printed in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.faults.scenes import FAULTS, HOLDINGS, HUNG, Case, Stage, Times, cases, stage

EVERYTHING = tuple(HOLDINGS)


def in_suite() -> Iterator[Case]:
    """Three ranks that hold everything at once, and one fault of each kind and of each holding."""
    names = (
        "raises, others in barrier",
        "raises, others in a loader's broadcast",
        "raises, others in a sub-group's all_reduce",
        "raises, others in new_group",
        "raises, others in the wait for async work",
        "raises, others in DDP backward",
        "raises, others in FSDP2 forward",
        "raises, others in a prepared step",
        "recv against all_reduce",
        "SIGKILL of one in all_reduce",
        "interrupt in a loader with workers",
        "interrupt in all_reduce",
    )
    for fault in FAULTS:
        if fault.name in names:
            yield Case(3, fault, EVERYTHING)


@pytest.fixture(scope="module")
def on_stage() -> Iterator[Callable[[int], Stage]]:
    """The kernel with that many ranks; the one before it ends, and so does one whose test has failed."""
    with ExitStack() as stack:
        current: list[Stage] = []

        def give(world: int) -> Stage:
            if not current or current[0].world != world or not current[0].sound:
                stack.close()
                current[:] = [stack.enter_context(stage(world))]
            return current[0]

        yield give


def strike(on_stage: Callable[[int], Stage], measured: list[Times], case: Case) -> None:
    scene = on_stage(case.world)
    scene.sound = False
    times = scene.strike(case)
    scene.sound = True
    measured.append(times)
    assert times.control < HUNG
    assert times.works < HUNG


@pytest.mark.parametrize("case", [*in_suite()], ids=str)
def test_the_cell_is_lost_and_nothing_else(on_stage, measured, case):
    strike(on_stage, measured, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_the_whole_matrix(on_stage, measured, case):
    strike(on_stage, measured, case)
