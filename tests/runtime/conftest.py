"""Each test finds and leaves a process that knows nothing: no shared state, no launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rankbook.runtime.environment import SPELLINGS
from rankbook.runtime.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {
        name for each in SPELLINGS for name in (each.rank, each.world_size, each.local_rank, each.local_world_size)
    }
    for name in [*os.environ]:
        if name in names or name.startswith(("MASTER_", "SLURM_", "ACCELERATE_", "RANKBOOK_")):
            monkeypatch.delenv(name)
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
