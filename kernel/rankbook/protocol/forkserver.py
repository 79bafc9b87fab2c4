"""Messages between the notebook and what starts ranks: its forkserver, and the agents of other hosts.

A forkserver starts, kills and watches rank processes. Messages that the ranks themselves exchange with the notebook are
in messages.py.

The messages of agents travel over `transport.agent_link` on two streams: messages, in the order in which they were
sent, and the bytes of large values. The first frame of a message is one of these structs. The frames after it belong to
it. The first message of an agent, its description, is a map of text to text. Its format never changes, so that every
version can refuse every other one with a reason.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from rankbook.errors import ProtocolError
from rankbook.protocol import Message

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

    `env`, `cwd` and `path` (`sys.path`) are copied from the notebook process, as bytes, because environment variables
    and paths need not be valid text. `uplink` and `downlink` are the addresses of the rank's links to and from the
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
    cwd: bytes
    path: tuple[bytes, ...]
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


def not_started(request: ForkRank, reason: object) -> RankExited:
    """Return the report of a rank whose process could not be created for `reason`."""
    return RankExited(
        rank=request.rank,
        incarnation=request.incarnation,
        pid=0,
        code=1,
        memory_kills=0,
        stdout=b"",
        stderr=b"",
        reason=f"could not be started: {reason}",
    )


class ClusterClosed(Message, frozen=True):
    """Report that no process of the cluster is left."""


_T = TypeVar("_T")

MESSAGES, VALUES = 0, 1
"""The streams."""


# Coordinator to agent -----------------------------------------------------------------------------------------------


# The life of an agent:
#
#     agent -> its description                      coordinator -> accepted, or refused with a reason (agent_link.py)
#     agent -> HostReady, or HostFailed
#     coordinator -> ForkRank, KillRank, ToRanks    agent -> RankForked, FromRanks, RankExited, ProcessState
#     coordinator -> CloseHost                      agent -> RankExited ..., HostLeaving
class ToRanks(Message, frozen=True):
    """Deliver a message to `ranks`: the next frame is the encoded message, and those after it are its frames.

    `needs` names the segments of shared memory that must have arrived before. `ordered`: the message does not overtake
    an earlier one that still waits for segments. The segments in answers to the cell `stay` are read by ranks of
    this host only, and are not sent.
    """

    ranks: tuple[int, ...]
    needs: tuple[str, ...] = ()
    ordered: bool = True
    stay: int | None = None


class DropSegments(Message, frozen=True):
    """Remove segments, which no rank will read any more."""

    names: tuple[str, ...]


class CloseHost(Message, frozen=True):
    """Kill all ranks, remove all folders, and exit.

    `reason` says why this host is not used; it is empty when the cluster is stopped.
    """

    reason: str = ""


class ModuleFiles(Message, frozen=True):
    """Write files of modules, whose contents are the next frames, and answer a `ModuleRequest`.

    `connection` is 0 for files that have changed. `removed` are files that do not exist any more. See
    `launch.code_sync`.
    """

    connection: int
    names: tuple[str, ...]
    removed: tuple[str, ...] = ()


class StoreReply(Message, frozen=True):
    """Answer a `StoreRequest`: the next frame is the encoded result."""

    connection: int


# Both ways ----------------------------------------------------------------------------------------------------------


class SegmentPart(Message, frozen=True):
    """Bytes of the shared memory segment `name`, from `offset`, in the next frame. `size` is that of the segment."""

    name: str
    offset: int
    size: int


class SegmentFailed(Message, frozen=True):
    """Report that no more of a segment will come, and why. This also answers a `SegmentRefused`."""

    name: str
    reason: str


class SegmentRefused(Message, frozen=True):
    """Report that there is no room for a segment, of which no more should be sent."""

    name: str


# Agent to coordinator -----------------------------------------------------------------------------------------------


class HostReady(Message, frozen=True):
    """Report that the host can start ranks: its slots, CUDA devices and CPU cores, and a free TCP port.

    `core_ids` are the numbers of the cores: agents that a launcher has started for one rank each have the same ones, or
    each its own. It is empty where the system does not tell them, or limits the time instead. The agent listens at
    `liveness_port` for as long as its process lives (0: at none). `problem` and `unexpected` are those of
    `ClusterOpened`.
    """

    slots: int
    devices: int
    cores: int
    port: int
    liveness_port: int = 0
    problem: str = ""
    unexpected: bool = False
    core_ids: tuple[int, ...] = ()


class HostFailed(Message, frozen=True):
    """Report that the host cannot start ranks, and why."""

    reason: str


class FromRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The sender of one message, and the number of its frames: the encoded message and those that follow it."""

    rank: int
    incarnation: int
    frames: int


class FromRanks(Message, frozen=True):
    """Deliver messages of ranks: the next frames are those of the first sender, then those of the second one, ...

    `needs` names the segments that must have arrived before, and `stay` those that are not sent because only ranks of
    the agent's host read them. With either, the message is the only one.
    """

    senders: tuple[FromRank, ...]
    needs: tuple[str, ...] = ()
    stay: tuple[str, ...] = ()


class ProcessState(Message, frozen=True):
    """State of a rank's process, which has not replied for some time. See `process_identity.ProcessInfo`.

    `status` is empty if the process has ended.
    """

    rank: int
    incarnation: int
    status: str
    cpu_seconds: float
    stopped: bool
    traced: bool


class StoreRequest(Message, frozen=True):
    """Perform the store operation of a rank: the next frame is the encoded operation."""

    connection: int


class ModuleRequest(Message, frozen=True):
    """Ask for the module `name` of the notebook's folder. `known` maps files of this host to their digests."""

    connection: int
    name: str
    known: dict[str, str]


class HostNote(Message, frozen=True):
    """Show `text` to the user."""

    text: str


class HostLeaving(Message, frozen=True):
    """Report that the agent exits, and why. All of its ranks have ended."""

    reason: str


_Segments = SegmentPart | SegmentFailed | SegmentRefused
ToAgent = ToRanks | DropSegments | CloseHost | StoreReply | ModuleFiles | _Segments | ForkRank | KillRank
FromAgent = (
    HostReady
    | HostFailed
    | FromRanks
    | ProcessState
    | StoreRequest
    | ModuleRequest
    | HostNote
    | HostLeaving
    | _Segments
    | RankForked
    | RankExited
)

_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_description: msgspec.msgpack.Decoder[dict[str, str]] = msgspec.msgpack.Decoder(dict[str, str])
_encoder = msgspec.msgpack.Encoder()


class HostDescription(NamedTuple):
    """Description of a host in the first message of its agent. Numbers are empty if the launcher has not set them.

    `name` is the host's name; `node` the node's number, `rank` and `local_rank` the numbers of the task that the
    launcher has started the agent as; `address` the one from which the agent reaches the coordinator.
    """

    name: str
    rankbook: str
    protocol: str
    torch: str
    python: str
    pid: str
    address: str
    node: str = ""
    rank: str = ""
    local_rank: str = ""


def encode_description(description: HostDescription) -> bytes:
    """Return the first message of an agent."""
    return _encoder.encode(description._asdict())


def decode_description(data: bytes | memoryview) -> HostDescription:
    """Decode the first message of an agent, also of another version. Raises `ProtocolError`."""
    values = _decode(_description, data, "first message of an agent")
    return HostDescription(**{name: values.get(name, "")[:200] for name in HostDescription._fields})


def decode_to_agent(data: bytes | memoryview) -> ToAgent:
    """Decode a message that an agent received. Raises `ProtocolError` if it is invalid."""
    return _decode(_to_agent, data, "message received by an agent")


def decode_from_agent(data: bytes | memoryview) -> FromAgent:
    """Decode a message that an agent sent. Raises `ProtocolError` if it is invalid."""
    return _decode(_from_agent, data, "message sent by an agent")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, which: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"invalid {which}: {error}") from error
