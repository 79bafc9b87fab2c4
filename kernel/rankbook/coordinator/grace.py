"""The grace periods: how long ranks are given before something is done about them.

Owns: the numbers. Refuses: to measure time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GracePeriods:
    """The grace periods of a cluster, in seconds.

    The defaults are what a person at a notebook needs. `Cluster(2, grace=GracePeriods(leave=3.0))` has another.
    """

    raised: float = 1.0
    """A rank waits in a collective for one that raised, before the wait is broken off (`RANKBOOK_ABORT_GRACE`)."""
    finished: float = 5.0
    """A rank waits in a collective for one that has finished its cell, before the cell says so."""
    death_interrupt: float = 0.15
    """The other ranks of a cell end by themselves after a death, before they are interrupted."""
    death_abort: float = 0.4
    """From a death until whatever still waits in a collective is broken off."""
    death_release: float = 0.8
    """From a death until the notebook gets control back, also from ranks that still run."""
    interrupt_abort: float = 0.5
    """From an interrupt until the collective that a rank may wait in is broken off."""
    interrupt_release: float = 5.0
    """From an interrupt until the notebook gets control back, also from ranks that still run."""
    leave: float = 1.5
    """An idle rank ends by itself after it was asked to."""
    save: float = 30.0
    """A rank that ends finishes a save in the background and calls its exit functions."""
    last_save: float = 2.0
    """The same as the kernel ends. Jupyter's server kills a kernel after half of its `shutdown_wait_time` of 5 s."""
