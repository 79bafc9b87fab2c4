"""Grace periods: how long the coordinator waits for ranks before it interrupts, aborts or kills them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GracePeriods:
    """Grace periods of a cluster, in seconds.

    The defaults suit interactive work. `Cluster(2, grace=GracePeriods(leave=3.0))` changes one.
    """

    raised: float = 1.0
    """Seconds from a rank's error until peers that wait for it in a collective are aborted (`RANKBOOK_ABORT_GRACE`)."""
    finished: float = 5.0
    """Seconds from a rank's end of a cell until the user is warned that a peer waits for it in a collective."""
    death_interrupt: float = 0.15
    """Seconds from a rank's death until the other ranks of its cell are interrupted."""
    death_abort: float = 0.4
    """Seconds from a rank's death until collectives that still wait are aborted."""
    death_release: float = 0.8
    """Seconds from a rank's death until the cell ends in the notebook, even if ranks still run it."""
    interrupt_abort: float = 0.5
    """Seconds from an interrupt until the collectives that ranks wait in are aborted."""
    interrupt_release: float = 5.0
    """Seconds from an interrupt until the cell ends in the notebook, even if ranks still run it."""
    leave: float = 1.5
    """Seconds from a shutdown request to an idle rank until it is killed."""
    save: float = 30.0
    """Time for a rank that exits to finish background saves and to call its exit functions."""
    last_save: float = 2.0
    """Like `save`, at kernel exit. Jupyter Server kills a kernel after half of `shutdown_wait_time`, which is 5 s."""
