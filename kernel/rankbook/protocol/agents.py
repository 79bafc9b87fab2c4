"""Messages between the coordinator and the agents of other hosts.

They travel over `transport.agent_link` on two streams: messages, in the order in which they were sent, and the bytes of
large values. The first frame of a message is one of these structs. The frames after it belong to it.

The first message of an agent, its description, is a map of text to text. Its format never changes, so that every
version can refuse every other one with a reason.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from rankbook.errors import ProtocolError
from rankbook.protocol.base import Message
from rankbook.protocol.forkserver import ForkRank, KillRank, RankExited, RankForked

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
    """Kill all ranks, remove all folders, and exit."""


class ModuleFiles(Message, frozen=True):
    """Write files of modules, whose contents are the next frames, and answer a `ModuleRequest`.

    `connection` is 0 for files that have changed. See `launch.code_sync`.
    """

    connection: int
    names: tuple[str, ...]


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

    The agent listens at `liveness_port` for as long as its process lives (0: at none). `problem` and `unexpected` are
    those of `ClusterOpened`.
    """

    slots: int
    devices: int
    cores: int
    port: int
    liveness_port: int = 0
    problem: str = ""
    unexpected: bool = False


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
