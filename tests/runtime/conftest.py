"""Give every test a process without shared state and without variables of a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rankbook.runtime import prepare
from rankbook.runtime.gradient_state import window
from rankbook.runtime.launch_environment import LAUNCHERS
from rankbook.runtime.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {
        name
        for launcher in LAUNCHERS
        for name in (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size)
    }
    for name in os.environ:
        if name.startswith(("MASTER_", "SLURM_", "ACCELERATE_", "RANKBOOK_")):
            names.add(name)
    for name in names - {"RANKBOOK_RUNTIME_DIR", "RANKBOOK_LOG_DIR"}:  # the worker's folders
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # Otherwise loops that only read would count as evaluations beside the training of an earlier test.
    window.backwards = 0
    prepare._wrappers.clear()
