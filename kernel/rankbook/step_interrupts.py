"""Interrupts that wait for the end of an optimizer step.

`optimizer.step()` changes one tensor after another. An interrupt in the middle would leave some weights from before the
step and some from after it, others on every rank, and nothing would show it: DDP never compares weights again. So an
interrupt that arrives in a step is raised when the step has ended, or after `LIMIT` seconds.

Prepared optimizers (`runtime/optimizer.py`) and torch's own (`rank/model_reset.py`) say when a step begins and ends. A
rank sets `deferral`; in a script it is None.
"""

from __future__ import annotations

from typing import Protocol

LIMIT = 2.0
"""Seconds for which a step may delay an interrupt: it may hang, or wait for a rank that will not come."""


class Deferral(Protocol):
    """Interface to the interrupts of the process. Calls on other threads than the main thread have no effect.

    `owner` is the object that steps. A step within the step of another owner is a part of that one.
    """

    def defer(self, owner: object) -> None:
        """Begin a step of `owner`: an interrupt is not raised before `deliver`, for at most `LIMIT` seconds."""

    def deliver(self, owner: object) -> None:
        """End the step, and raise the interrupt that has arrived meanwhile."""


deferral: Deferral | None = None
