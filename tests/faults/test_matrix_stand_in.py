"""The fault matrix on the stand-in for NCCL: a fault costs the cell in which it happens and nothing else.

Every fault on 2 and 3 ranks, with the holdings that it needs, is `full`; one fault of each kind is `slow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.injection import FAULTS, HUNG, Case, FaultInjector, injector_pool

SLOW = (
    "raises, others in all_reduce",
    "raises, others in barrier",
    "raises, others in DDP backward",
    "raises, others in FSDP2 forward",
    "all_reduce against barrier",
    "SIGKILL, others in all_reduce",
    "SIGKILL of one in all_reduce",
    "interrupt in all_reduce",
)


def all_faults() -> Iterator[pytest.ParameterSet]:
    for world in (2, 3):
        for fault in FAULTS:
            layer = pytest.mark.slow if world == 2 and fault.name in SLOW else pytest.mark.full
            case = Case(world, fault, (fault.needs or "DDP",))
            yield pytest.param(case, marks=layer, id=f"{world} ranks-{fault.name}")


@pytest.fixture(scope="module")
def injector_for() -> Iterator[Callable[[int], FaultInjector]]:
    with injector_pool(stand_in=True) as injector_for:
        yield injector_for


@pytest.mark.parametrize("case", [*all_faults()])
def test_fault_costs_only_its_cell(injector_for, case):
    times = injector_for(case.world).inject(case)
    assert times.control < HUNG
    assert times.works < HUNG
