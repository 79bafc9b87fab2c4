"""What is told of a rank.

Owns: the fields. Refuses: to find them out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment. `state` is idle, running, starting, leaving, dead or absent; `loss` how it died.

    `empty`: it was restarted, or healed without a state, and nothing was run on it since with success. `heal` takes no
    state from it.

    That of a rank that lives and does not answer is `unresponsive for 12 s, process running, 3.1 s of CPU time`, that
    of one under a debugger where it is paused.
    """

    rank: int
    state: str
    device: str
    pid: int | None
    cell: str | None
    loss: str | None
    empty: bool = False
