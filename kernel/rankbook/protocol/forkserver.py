"""The part of the wire's vocabulary between the notebook and the forkserver.

Owns: how ranks are asked for, and what became of their processes. Refuses: what ranks do (messages.py).
"""

from __future__ import annotations

from rankbook.protocol.base import Message


class OpenCluster(Message, frozen=True):
    """Prepare for a cluster: choose its MASTER_PORT, and remove `folders` should the notebook die."""

    folders: tuple[str, ...]


class ForkRank(Message, frozen=True):
    """Fork one rank. `env`, `cwd` and `path` (sys.path) are the notebook's own; `uplink` and `downlink` its links.

    `env` is bytes, for a variable need not be text. With a token in `keep` the rank keeps what nobody has seen.
    `widgets`: the notebook is a Jupyter kernel, whose front end shows widgets.
    """

    rank: int
    incarnation: int
    world_size: int
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


class KillRank(Message, frozen=True):
    """Kill a rank and every process of its session. An incarnation that is gone already is left alone."""

    rank: int
    incarnation: int


class CloseCluster(Message, frozen=True):
    """Kill whatever is left of the cluster and answer with `ClusterClosed`."""


class ForkserverUp(Message, frozen=True):
    """torch and IPython are imported; it took `seconds`."""

    torch: str
    python: str
    seconds: float


class ClusterOpened(Message, frozen=True):
    """Nothing listens on `master_port` of the loopback interface yet; `devices` CUDA devices are visible."""

    master_port: int
    devices: int


class RankForked(Message, frozen=True):
    """A rank's process exists."""

    rank: int
    incarnation: int
    pid: int


class RankExited(Message, frozen=True):
    """A rank's process ended.

    `code` is the exit code, or minus the signal; `memory_kills` is how many processes the kernel's OOM killer ended in
    this control group in the seconds before; `stdout` and `stderr` are what the rank had written and nobody had read.
    """

    rank: int
    incarnation: int
    pid: int
    code: int
    memory_kills: int
    stdout: bytes
    stderr: bytes


class ClusterClosed(Message, frozen=True):
    """No process of the cluster is left."""
