"""Messages between the notebook process and the forkserver, which starts, kills and watches rank processes.

Messages that the ranks themselves exchange with the notebook are in messages.py.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol.base import Message

# Notebook to forkserver ---------------------------------------------------------------------------------------------


# The life of a cluster on this connection:
#
#     notebook -> OpenCluster                       forkserver -> ForkserverUp (once), ClusterOpened
#     notebook -> ForkRank, one per rank            forkserver -> RankForked, and RankExited whenever one ends
#     notebook -> KillRank, ForkRank (restart)      forkserver -> RankExited, RankForked
#     notebook -> CloseCluster                      forkserver -> RankExited ..., ClusterClosed
#
# The connection also tells each side that the other one has ended: it closes with the process.
class OpenCluster(Message, frozen=True):
    """Prepare a cluster: choose its MASTER_PORT, and remove `folders` and `files` if the notebook process dies.

    CUDA devices are counted with the variables of `env`, those of the notebook process at this moment. If `device` is
    "cpu", they are not: the ranks will not use them.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...] = ()
    env: dict[bytes, bytes] = msgspec.field(default_factory=dict)
    device: str = ""


# `incarnation` counts the processes of a rank, from 1. A message about an earlier incarnation is recognized as such.
class ForkRank(Message, frozen=True):
    """Fork one rank.

    `env`, `cwd` and `path` (`sys.path`) are copied from the notebook process; `env` holds bytes, because an environment
    variable need not be valid text. `uplink` and `downlink` are the addresses of the rank's links to and from the
    notebook; `segments` and `logs` are the folders of its shared memory segments and of its complete output. A
    non-empty token in `keep` makes the rank retain messages that were not acknowledged yet, so that another notebook
    process can claim the cluster. `widgets`: the notebook process is a Jupyter kernel, whose front end can show
    widgets. `store` is the socket of this host's agent, which relays requests to the rendezvous store; it is empty on
    the notebook's host. On another host the agent fills in the addresses and folders, and completes `env`, `cwd` and
    `path` with its own. `modules` is the agent's socket at which the rank asks for modules of the notebook's folder;
    from the notebook it is not empty if ranks may ask.
    """

    rank: int
    incarnation: int
    world_size: int
    local_rank: int
    backend: str
    device: str
    threads: int
    env: dict[bytes, bytes]
    cwd: str
    path: tuple[str, ...]
    uplink: str
    downlink: str
    segments: str
    logs: str
    cluster: str
    keep: str = ""
    widgets: bool = False
    store: str = ""
    modules: str = ""


class KillRank(Message, frozen=True):
    """Kill a rank and every process of its session. Ignored if that incarnation has exited already."""

    rank: int
    incarnation: int


class CloseCluster(Message, frozen=True):
    """Kill the remaining processes of the cluster, then answer with `ClusterClosed`."""


# Forkserver to notebook ---------------------------------------------------------------------------------------------


class ForkserverUp(Message, frozen=True):
    """Report that torch and IPython are imported, which took `seconds`, and their versions."""

    torch: str
    python: str
    seconds: float


class ClusterOpened(Message, frozen=True):
    """Report that the cluster can start ranks.

    `master_port` is a free port of the loopback interface; nothing listens on it yet. `devices` is the number of
    CUDA devices that torch can use. `problem` says why it is 0, or why a device is left out; empty otherwise.
    `unexpected`: the machine has such devices nonetheless, so the user should know.
    """

    master_port: int
    devices: int
    problem: str = ""
    unexpected: bool = False


class RankForked(Message, frozen=True):
    """Report that the process of a rank was created."""

    rank: int
    incarnation: int
    pid: int


class JournalTail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of one stream of one cell: `total` bytes were read in all, and `tail` is the last of them."""

    cell: int
    stream: str
    total: int
    tail: bytes

    def missing(self, received: int) -> bytes:
        """Return the bytes that were not received, where `received` bytes were."""
        missing_count = min(self.total - received, len(self.tail))
        return self.tail[-missing_count:] if missing_count > 0 else b""


class RankExited(Message, frozen=True):
    """Report that the process of a rank ended.

    `code` is the exit code, or the negative signal number. `memory_kills` counts the processes that the Linux OOM
    killer ended in this control group in the preceding seconds. `stdout` and `stderr` hold output that the rank wrote
    and that was not read before it exited. `journal` and `crash` are set by the agent of another host, which reads the
    files that the rank has left there. `reason` replaces the description of `code`: the rank's host was lost.
    `ordered`: everything that the rank has sent was delivered before this message.
    """

    rank: int
    incarnation: int
    pid: int
    code: int
    # From the control group's counters: the kernel does not say which process it has killed, or why.
    memory_kills: int
    stdout: bytes
    stderr: bytes
    journal: tuple[JournalTail, ...] = ()
    crash: str = ""
    reason: str = ""
    ordered: bool = False


class ClusterClosed(Message, frozen=True):
    """Report that no process of the cluster is left."""
