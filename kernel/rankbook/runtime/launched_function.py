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


def run_launched(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - return value of the function
    """Return `function(*args)`, called with `environment` set and with fresh shared state.

    The call neither sees nor changes settings that cells of this rank have made, such as accumulation and precision.
    """
    with _set(environment), _own_state(anew=USE_CPU in environment):
        return function(*args)


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_state(*, anew: bool) -> Iterator[None]:
    """Clear the shared states within the block, and restore them afterwards.

    `anew`: also that of `PartialState`, so that the device is chosen again.
    """
    from rankbook.runtime.gradient_state import GradientState
    from rankbook.runtime.process_state import PartialState
    from rankbook.runtime.state import AcceleratorState

    shared = [AcceleratorState._shared_state, GradientState._shared_state]
    if anew:
        shared.append(PartialState._shared_state)
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)
