"""The fault matrix: a fault costs the cell in which it happens and nothing else.

A case is a fault, a number of ranks, and what the ranks hold. Twelve cases are in the standard suite. Every fault on 2,
3 and 4 ranks that hold everything at once is `slow`: 96 cases. Every fault with a single holding is `full`: 348 cases.
The time that each case took is printed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.injection import FAULTS, HOLDINGS, HUNG, Case, FaultInjector, Times, cases, injector_pool

EVERYTHING = tuple(HOLDINGS)


def with_everything() -> Iterator[pytest.ParameterSet]:
    """Yield every fault on 2, 3 and 4 ranks that hold everything; slow, but for one fault of each kind on 3 ranks."""
    standard = (
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
    for world in (2, 3, 4):
        for fault in FAULTS:
            layer = pytest.mark.processes if world == 3 and fault.name in standard else pytest.mark.slow
            yield pytest.param(Case(world, fault, EVERYTHING), marks=layer, id=f"{world} ranks-{fault.name}")


@pytest.fixture(scope="module")
def injector_for() -> Iterator[Callable[[int], FaultInjector]]:
    with injector_pool() as injector_for:
        yield injector_for


def inject(injector_for: Callable[[int], FaultInjector], measured: list[Times], case: Case) -> None:
    times = injector_for(case.world).inject(case)
    measured.append(times)
    assert times.control < HUNG
    assert times.works < HUNG


@pytest.mark.parametrize("case", [*with_everything()])
def test_fault_costs_only_its_cell(injector_for, measured, case):
    inject(injector_for, measured, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_fault_costs_only_its_cell_for_every_holding(injector_for, measured, case):
    inject(injector_for, measured, case)
