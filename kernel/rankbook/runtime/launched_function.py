"""A function that a launcher runs on a rank, as if the rank were fresh.

Owns: the shared state during such a call, and its return to what it was. Refuses: to start anything, and to import
torch: the notebook names `run` when it sends a function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

PRECISION = "ACCELERATE_MIXED_PRECISION"
"""Where a script finds the precision that its launcher was given; Accelerate's name."""
USE_CPU = "ACCELERATE_USE_CPU"


def run_launched(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - whatever the function returns
    """Call `function(*args)` with `environment` set, and with shared state of its own; what it returns.

    Settings that cells of this rank have made (accumulation, precision) are neither seen nor changed by it.
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
    """Within it the shared states are as if nobody had made them; `anew`: which device this is, too."""
    from rankbook.runtime.gradient_state import GradientState
    from rankbook.runtime.process_state import PartialState
    from rankbook.runtime.state import AcceleratorState

    shared = [AcceleratorState._shared_state, GradientState._shared_state]
    if anew:
        shared.append(PartialState._shared_state)
    before = [dict(each) for each in shared]
    for each in shared:
        each.clear()
    try:
        yield
    finally:
        for each, values in zip(shared, before, strict=True):
            each.clear()
            each.update(values)
