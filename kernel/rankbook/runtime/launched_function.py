"""Run a launched function on a rank with fresh shared state, as in a newly started process.

This implements `notebook_launcher`. torch is not imported here, because the notebook process imports this module to
name `run_launched` when it sends a function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

PRECISION = "ACCELERATE_MIXED_PRECISION"
"""Environment variable with the launcher's mixed precision; the name is Accelerate's."""
USE_CPU = "ACCELERATE_USE_CPU"


def run_launched(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str | None]) -> Any:  # noqa: ANN401 - return value of the function
    """Return `function(*args)`, called with `environment` set and with fresh shared state.

    The value None removes a variable. The environment is restored afterwards. The call neither sees nor changes
    settings that cells of this rank have made, such as accumulation and precision.
    """
    # The environment first: the new states read their defaults from it.
    with _set(environment), _separate_state(new_process_state=environment.get(USE_CPU) is not None):
        return function(*args)


@contextmanager
def _set(environment: Mapping[str, str | None]) -> Iterator[None]:
    # Only these names: what the function itself sets stays, as in a cell.
    before = {name: os.environ.get(name) for name in environment}
    _update(environment)
    try:
        yield
    finally:
        _update(before)


def _update(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _separate_state(*, new_process_state: bool) -> Iterator[None]:
    """Clear the shared states within the block, and restore them afterwards.

    `new_process_state`: also that of `PartialState`, so that the device is chosen again.
    """
    from rankbook.runtime.gradient_state import GradientState, window
    from rankbook.runtime.process_state import PartialState
    from rankbook.runtime.state import AcceleratorState

    # An Accelerator of a cell keeps working after the call: its states are the same dicts, with their old content.
    shared = [AcceleratorState._shared_state, GradientState._shared_state]
    # The rank may have chosen a GPU already, and the launcher asks for the CPU. The process group itself is kept.
    if new_process_state:
        shared.append(PartialState._shared_state)
    # Instances use these dicts as their `__dict__`. So the dicts are emptied and filled again, and never replaced.
    before = [dict(state) for state in shared]
    scaler, window.scaler = window.scaler, None
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)
        window.scaler = scaler
