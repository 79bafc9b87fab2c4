"""Children of a rank: loaders' workers, and whatever else a cell starts with multiprocessing.

Owns: what must hold around a fork for the child to live, and that a spawned one finds what cells have defined. Refuses:
to know what the child is for.

Two things that another thread does at that moment would be the child's end:

- torch's threads enter Python to drop a collective's tensors. The interpreter then lists them, under a lock that does
  not need the interpreter's own; a child that is forked meanwhile waits for that lock for ever, before it has run a
  line (`_PyThreadState_DeleteExcept`, CPython 3.11 and 3.12). So a fork waits until these threads sleep.
- A child shares gloo's sockets and what watches them. If it collected what is left of former connections, it would take
  the rank's down, and wait there for threads that it has not. So it collects nothing that is older than itself.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

_TASKS = Path("/proc/self/task")
_TORCH = "pt_gloo"
"""How the names of torch's threads begin that carry out collectives."""
_AT_MOST = 0.1
"""Seconds that a fork waits for them; one of them may be at work for long."""


def make_safe() -> None:
    """Do so for every child of this process from here on."""
    if sys.platform == "linux":
        os.register_at_fork(before=_wait_for_rest)
    os.register_at_fork(after_in_child=gc.freeze)
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]  # multiprocessing knows no other way in


def _by_value(_pickler: object, value: object) -> Any:  # noqa: ANN401 - see pickle.Pickler.reducer_override
    """What cells have defined goes to a spawned child by value: its `__main__` is another one, and empty."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(value),)
    return NotImplemented


def _wait_for_rest() -> None:
    deadline = time.monotonic() + _AT_MOST
    while any(map(_runs, _TASKS.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.0005)  # they need the interpreter


def _runs(task: Path) -> bool:
    """Whether it is one of torch's threads, and not asleep."""
    try:
        identity = (task / "stat").read_text()
    except OSError:  # it has ended
        return False
    name, _, rest = identity.partition("(")[2].rpartition(")")
    return name.startswith(_TORCH) and rest.split()[0] != "S"
