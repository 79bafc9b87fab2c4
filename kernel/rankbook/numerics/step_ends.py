"""Ends of optimizer steps: moments in a cell at which gradients, parameters and state are of one step.

A view or a check on another thread must not read tensors that the training is writing. It calls `listen`, and its
function runs on the thread that has stepped, at the end of `step()`, before the next batch.

All listeners share one hook of torch, which is registered by the first one and stays while there are listeners. torch
iterates over its hooks while they run. To add one from another thread meanwhile would raise in the user's
`optimizer.step()`.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from rankbook.lazy_imports import loaded_module

if TYPE_CHECKING:
    from rankbook.runtime.optimizer import AcceleratedOptimizer

Listener = Callable[[Optimizer], None]

_listeners: tuple[Listener, ...] = ()
"""Replaced and never changed, because another thread may be calling them."""
_hook: RemovableHandle | None = None
_lock = threading.Lock()
refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose last step the number watch has ended before it has changed anything."""
_counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of optimizers whose own counters are on a device, where to read one would wait for the device."""


def listen(listener: Listener) -> None:
    """Call `listener(optimizer)` at the end of every step of every optimizer, on the thread that has stepped."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    install()


def install() -> None:
    """Register the hook of torch. Who adds hooks of their own, that may run long, calls this before."""
    global _hook
    with _lock:
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_after_step)


def remove_unused() -> None:
    """Remove the hook of torch if nothing listens. Main thread, outside of a step."""
    global _hook
    with _lock:
        if _hook is not None and not _listeners:
            _hook.remove()
            _hook = None
            _counts.clear()  # steps are not counted from here on


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    # Inside a compiled step, this hook would be traced.
    if torch.compiler.is_compiling():
        return
    if optimizer in _counts:
        _counts[optimizer] += 1
    for listener in _listeners:
        try:
            listener(optimizer)
        except Exception:  # noqa: BLE001 - a view must not end the training: shown in full, once
            _remove(listener)
            sys.stderr.write(f"Rankbook stops looking at the ends of steps for a view:\n{traceback.format_exc()}")


def _remove(listener: Listener) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)


def wrapper_of(optimizer: Optimizer) -> AcceleratedOptimizer | None:
    """Return the wrapper of a prepared optimizer, otherwise None."""
    prepare = loaded_module("rankbook.runtime.prepare")
    return prepare.wrapper_of(optimizer) if prepare is not None else None


def step_of(optimizer: Optimizer) -> int | None:
    """Return the number of the step that has just ended, the first is 1; None for an optimizer that does not count.

    A prepared optimizer counts its steps, and most of torch's optimizers count them in their state.
    """
    wrapper = wrapper_of(optimizer)
    if wrapper is not None:  # counts a step when it has ended
        return int(wrapper.steps) + 1
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    steps = next((state["step"] for state in states if "step" in state), None)
    if isinstance(steps, torch.Tensor) and steps.device.type != "cpu":
        if optimizer not in _counts:
            _counts[optimizer] = int(steps)
        return _counts[optimizer]
    return None if steps is None else int(steps)
