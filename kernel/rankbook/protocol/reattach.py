"""Messages that let a cluster outlive its notebook process and be claimed by another one.

Ranks of such a cluster retain every message that they send until the notebook has sent `Acknowledge` for its cell. The
handshake of a new owner is:

1. It sends `ClaimCluster` to the forkserver, which answers with `ClaimAccepted` (or `ClaimRejected`), followed by one
`RankForked` or `RankExited` per rank.

2. It sends `RequestReplay` to every live rank, which answers with `ReplayStart` and repeats the messages that were not
acknowledged.

Messages that arrive before `ReplayStart` were in flight when the previous owner exited. They are discarded, because the
replay contains them.
"""

from __future__ import annotations

from rankbook.protocol.base import Message

# Notebook to rank ---------------------------------------------------------------------------------------------------


class Acknowledge(Message, frozen=True):
    """Report that all output of `cell` was shown or handed over, so that the rank can drop its copy."""

    cell: int


# The nonce is repeated in `ReplayStart`. It tells the answer to this request from one to an earlier notebook's.
class RequestReplay(Message, frozen=True):
    """Request a `ReplayStart` and the messages to replay.

    Repeated are all unacknowledged messages, and acknowledged ones that were sent after `since`, in seconds of the
    machine's monotonic clock. `token` is the cluster's secret; a rank ignores requests with another one.
    """

    token: str
    nonce: str
    since: float


# Rank to notebook ---------------------------------------------------------------------------------------------------


class ReplayStart(Message, frozen=True):
    """Describe the rank's last task; `entries` replayed messages follow.

    `cell` is 0 if there was no task. `seen`: its output was acknowledged. `generation` is that of the rank's process
    group, 0 if it is in none. `dropped` counts the messages that did not fit into the replay buffer.
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
    """Keep the cluster alive for `seconds` without an owner.

    A process that knows `token` can claim it through the socket `address`.
    """

    address: str
    token: str
    seconds: float


# The token is in a file that only the user can read (`launch.registry`), so no other user can claim the cluster.
class ClaimCluster(Message, frozen=True):
    """Request ownership of the cluster for the process `pid`. The first message on a new connection."""

    token: str
    pid: int


class ClaimAccepted(Message, frozen=True):
    """Grant ownership of the cluster.

    `ranks` messages about its ranks follow. `lost` is when the previous owner disappeared, in seconds of the monotonic
    clock.
    """

    ranks: int
    lost: float


class ClaimRejected(Message, frozen=True):
    """Refuse ownership of the cluster: process `owner` holds it, or the token is wrong (`owner` is 0)."""

    owner: int
