"""The part of the wire's vocabulary that lets ranks outlive the notebook that started them.

Owns: the messages by which a cluster is kept, claimed by a new owner, and tells it what it has missed. Refuses: every
other message (messages.py), sockets, processes.

A rank of such a cluster keeps what it sends until the notebook has `Acknowledge` it. A new owner says `ClaimCluster` to
the forkserver, which answers `ClaimAccepted`, then with one `RankForked` or `RankExited` for each rank; then it says
`RequestReplay` to each living rank, which answers `ReplayStart` and repeats what nobody has seen. What comes before
`ReplayStart` was on the wire when the old owner went, and is among what is repeated.
"""

from __future__ import annotations

from rankbook.protocol.base import Message

# Notebook to rank ---------------------------------------------------------------------------------------------------


class Acknowledge(Message, frozen=True):
    """All of `cell` has been shown or handed over: a rank that keeps it may forget it."""

    cell: int


class RequestReplay(Message, frozen=True):
    """Answer with `ReplayStart`, and repeat what was not seen, and of what was seen all that came after `since`.

    `since` is on the machine's monotonic clock. `token` is the cluster's secret; a rank ignores who does not have it.
    """

    token: str
    nonce: str
    since: float


# Rank to notebook ---------------------------------------------------------------------------------------------------


class ReplayStart(Message, frozen=True):
    """What the rank's last task was (`cell` 0: none), and how many messages are repeated after this one.

    `generation` is the process group's that it is in, 0 for none; `dropped` how many messages it had no room for.
    """

    nonce: str
    cell: int
    number: int
    label: str
    running: bool
    seen: bool
    generation: int
    entries: int
    dropped: int


# Notebook to forkserver, and back -----------------------------------------------------------------------------------


class DetachCluster(Message, frozen=True):
    """Let the cluster live on for `seconds` without an owner; one with `token` may claim it at the socket `address`."""

    address: str
    token: str
    seconds: float


class ClaimCluster(Message, frozen=True):
    """The first message of the process `pid`, which wants to own the cluster."""

    token: str
    pid: int


class ClaimAccepted(Message, frozen=True):
    """It does. `ranks` messages about its ranks follow. The owner before was gone at `lost` (monotonic)."""

    ranks: int
    lost: float


class ClaimRejected(Message, frozen=True):
    """It does not: the process `owner` does, or the token is wrong (`owner` 0)."""

    owner: int
