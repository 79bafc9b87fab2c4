"""Messages between the notebook process and the ranks, and the MessagePack encoding of all protocol messages.

A message of an unknown type, or with an unknown field, raises `ProtocolError` and is never ignored.

Messages hold no large values. A message with a pickled value carries a `Payload` that locates the value's buffers, in
frames of the same multipart message or in a shared memory segment.

Messages of comms (Jupyter widgets) and debuggers connect the ranks to the front end, and are forwarded without being
interpreted. Those of comms follow "Custom Messages" in the Jupyter messaging specification: `content` and `metadata`
are JSON, and the buffers are further frames of the same multipart message. Those of debuggers carry the Debug Adapter
Protocol (DAP) as JSON.

A cluster may outlive its notebook process and be claimed by another one. Ranks of such a cluster retain every message
that they send until the notebook has sent `Acknowledge` for its cell. The handshake of a new owner is:

1. It sends `ClaimCluster` to the forkserver, which answers with `ClaimAccepted` (or `ClaimRejected`), followed by one
`RankForked` or `RankExited` per rank.

2. It sends `RequestReplay` to every live rank, which answers with `ReplayStart` and repeats the messages that were not
acknowledged.

Messages that arrive before `ReplayStart` were in flight when the previous owner exited. They are discarded, because the
replay contains them.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from rankbook.errors import InvalidArgument, ProtocolError
from rankbook.protocol import Message as Message  # noqa: PLC0414 - re-exported with the messages
from rankbook.protocol.forkserver import (
    CloseCluster,
    ClusterClosed,
    ClusterOpened,
    ForkRank,
    ForkserverUp,
    KillRank,
    OpenCluster,
    RankExited,
    RankForked,
)
from rankbook.protocol.queries import Answer, HashState, MeasureDifferences, MeasureGradients, Question
from rankbook.protocol.telemetry import GroupReport, Measure
from rankbook.snapshot_files import SnapshotVersion, TrainingPlace

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


# `content` and `metadata` are text, because both ends have JSON already: the widget on the rank and the front end.
class CommFromRank(Message, frozen=True):
    """Open, use or close a comm from the rank's side.

    `comm` is the comm's id. `target` is the target name in the front end, set when `kind` is "open".
    """

    kind: Literal["open", "msg", "close"]
    comm: str
    target: str
    content: str
    metadata: str


class CommToRank(Message, frozen=True):
    """Forward a message from the front end to a comm on the rank, or report that the front end closed the comm."""

    kind: Literal["msg", "close"]
    comm: str
    content: str
    metadata: str


class DapToRank(Message, frozen=True):
    """Send a DAP request, as JSON, to the rank's debugger.

    The first request starts the debugger, and `disconnect` stops it.
    """

    content: str


class DapFromRank(Message, frozen=True):
    """Forward a DAP response or event, as JSON, from the rank's debugger.

    An empty string means that the debugger ended without a request to disconnect.
    """

    content: str


_T = TypeVar("_T")


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of one buffer of a payload.

    The `size` bytes are the next frame of the message, or start at `offset` in the file `segment`.
    """

    size: int
    segment: str | None = None
    offset: int = 0


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pickled value: the first buffer is the pickle (protocol 5), the others are its out-of-band buffers."""

    buffers: tuple[Buffer, ...]

    @property
    def segments(self) -> tuple[str, ...]:
        """Return the names of the shared memory segments that hold buffers, once each."""
        return tuple(dict.fromkeys(buffer.segment for buffer in self.buffers if buffer.segment is not None))


def message_segments(message: Message) -> tuple[str, ...]:
    """Return the names of the shared memory segments that a message refers to."""
    payload = getattr(message, "payload", None)
    return payload.segments if isinstance(payload, Payload) else ()


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str
    source: str = ""


class ErrorReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain-text description of an exception on a rank.

    `traceback` is coloured for display, `plain` is the same text without colour. Ranks with equal `plain`, apart from
    object addresses and context lines, are reported as having the same error. `memory` lists what held the rank's
    memory, if the error is an out-of-memory error. `line` is the innermost line of the cell itself; `place` is that of
    all the user's code, as in "line 3", "line 3 of cell 5" or "line 12 of train.py".
    """

    name: str
    value: str
    traceback: str
    plain: str
    line: int | None = None
    memory: str = ""
    place: str = ""


# Notebook to rank ---------------------------------------------------------------------------------------------------


# The messages of one cell on one rank, in their order on the wire:
#
#     to the rank      RunCell(cell=7, ...)
#     from the rank    Text, Display, Clear, TextCut, CommFromRank    any number, in the order of the output
#     from the rank    InputRequest                                   the main thread waits ...
#     to the rank      InputReply(cell=7, ...)                        ... for this
#     to the rank      Interrupt(cell=7), LimitOutput(cell=7)         at any time
#     from the rank    Done(cell=7, ...)                              exactly one, after all output
#
# `cell` is the cluster's own number of the task. The number in the notebook is `RunCell.number`.
class RunCell(Message, frozen=True):
    """Run `source` in the rank's namespace.

    `number` is the notebook's execution count, shown in tracebacks. `file` is the cell's file name in the debugger,
    empty without one. `session`: keep the source in `In` and the value in `Out`, `_` and `_5`.
    """

    cell: int
    source: str
    number: int
    measure: Measure | None = None
    file: str = ""
    session: bool = False


class CallFunction(Message, frozen=True):
    """Call the pickled `(function, args, kwargs)` and answer with the return value.

    `defines_variables`: the function may be the user's. A rank on which it has run does not count as empty.
    """

    cell: int
    payload: Payload
    defines_variables: bool = True


class Assign(Message, frozen=True):
    """Assign the pickled dict's entries to variables in the rank's namespace."""

    cell: int
    payload: Payload


class FetchValue(Message, frozen=True):
    """Answer with the value of `name`, a variable or a dotted attribute of one."""

    cell: int
    name: str


class ListState(Message, frozen=True):
    """Answer with the names of the variables that `ExportState` can send, and why it cannot send the others.

    All ranks will return to `snapshot`, if there is one, so that the sharded models in it can be sent without shards.
    Otherwise this holds for the models of which there is a replica without the `replaced` ranks, and with
    `handed_over` for all models.
    """

    cell: int
    snapshot: SnapshotVersion | None = None
    replaced: tuple[int, ...] = ()
    handed_over: bool = False


class ExportState(Message, frozen=True):
    """Answer with the state for the replacement of a dead rank: the variables `names`, imports and `sys.path`.

    `stays`: all ranks that will load the state run on this rank's host. The other fields are as in `ListState`.
    """

    cell: int
    names: tuple[str, ...]
    stays: bool = False
    snapshot: SnapshotVersion | None = None
    replaced: tuple[int, ...] = ()
    handed_over: bool = False


class AdoptState(Message, frozen=True):
    """Load the state that a peer exported.

    Without a payload, the rank is a survivor: it prepares its replicated models for the rank that loads the state.
    `random` and `seeded` are as in `EnterWorld`; if `random` is empty, the rank keeps the random numbers of its start.
    """

    cell: int
    payload: Payload | None = None
    random: bytes = b""
    seeded: int | None = None


class DescribeRandom(Message, frozen=True):
    """Answer with the state of the random generators, empty if no code has seeded torch's."""

    cell: int


class Protect(Message, frozen=True):
    """Protect the training state by a snapshot after every `every` steps, and answer with a `ProtectionReport`.

    0 ends the protection, None leaves it as it is.
    """

    cell: int
    every: int | None = None


class ListSnapshots(Message, frozen=True):
    """Answer with the headers of the snapshots in the shared memory of this host, by rank, newest first.

    With `remove`, remove them all, and answer with none.
    """

    cell: int
    remove: bool = False


class RestoreSnapshot(Message, frozen=True):
    """Return to the snapshot `version`, go on taking one after every `every` steps; answer with `RestoredSnapshot`."""

    cell: int
    version: SnapshotVersion
    every: int


class RestoreReplicas(Message, frozen=True):
    """Take over the state of a replica without the `replaced` ranks, and answer with `RestoredSnapshot`."""

    cell: int
    replaced: tuple[int, ...]


class CheckResize(Message, frozen=True):
    """Answer with a `ResizeCheck`: whether this rank's state fits `world_size` ranks. Changes nothing."""

    cell: int
    world_size: int


class HandOver(Message, frozen=True):
    """Write this rank's shards of models and optimizers into `folder`, for another number of ranks."""

    cell: int
    folder: str


class EnterWorld(Message, frozen=True):
    """Adapt this rank to the number of ranks that its process group has now.

    `threads` is the number of threads per rank, and `meshes` are the device meshes that all ranks create, in this
    order: the type of the devices, and the names and sizes of the axes. A new rank continues with the random numbers of
    the state `random`, or if `seeded` is not None with others, which are the same for the same `seeded`.
    """

    cell: int
    world_size: int
    threads: int
    meshes: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    random: bytes = b""
    seeded: int | None = None


class TakeOver(Message, frozen=True):
    """Read this rank's shards from `folder`, into which the ranks before the resize have written theirs."""

    cell: int
    folder: str


class Regroup(Message, frozen=True):
    """Leave the current process group, if any, and join generation `generation` of it.

    `anew`: destroy all groups first, because the number of ranks is `world_size` now. `places` has the variables of
    every rank's environment that change when ranks move to another host; it is empty without other hosts.
    """

    cell: int
    generation: int
    world_size: int = 0
    anew: bool = False
    places: tuple[dict[str, str], ...] = ()


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in cell `cell`, or drop the cell if it has not started."""

    cell: int


MAX_CELL_OUTPUT = 4 << 20
"""Bytes of text that are shown of one cell; further output goes to log files of the ranks."""


class LimitOutput(Message, frozen=True):
    """Send no more text of cell `cell`, but write it to the log: all ranks together have sent enough."""

    cell: int


class InputReply(Message, frozen=True):
    """Answer an `InputRequest` with the line that the user typed.

    `text` is None if there is no answer, as without a front end to ask; `reason` explains why.
    """

    cell: int
    text: str | None = None
    reason: str = ""


class GetStack(Message, frozen=True):
    """Request a `Stack`. The control thread answers, also while the main thread is busy."""

    token: int


class GetCollectives(Message, frozen=True):
    """Request a `Collectives`. The control thread answers, also while the main thread is busy."""

    token: int


# Sent to ranks that may wait forever, see `coordinator.deadlock`. The rank aborts the groups on its control thread, and
# the wait of the main thread then raises CollectiveAborted with `cause`.
class Abort(Message, frozen=True):
    """Report that collectives of `groups` (of all groups if empty) cannot complete; `cause` explains why.

    Only groups with a member in `ranks`, the failed ranks, are concerned. `shut`: abort the pending collectives.
    Otherwise the cause is only kept for the error of a wait that fails by itself. `mismatch`: `cause` says which
    collective does not match, so that an error needs no further description.
    """

    groups: tuple[str, ...]
    cause: str
    shut: bool
    ranks: tuple[int, ...]
    mismatch: bool = False


class RanksLost(Message, frozen=True):
    """Report that processes of ranks have exited; `causes` has a sentence per rank.

    A cause is kept for the error of a wait that fails by itself, in every group that the lost rank is a member of.
    """

    causes: tuple[tuple[int, str], ...]


class Shutdown(Message, frozen=True):
    """Leave the process group and exit.

    Background saves and exit handlers may take up to `patience` seconds.
    """

    patience: float = 0.0


# Rank to notebook ---------------------------------------------------------------------------------------------------


class RankReady(Message, frozen=True):
    """Report that the rank accepts tasks: the first message of a rank.

    `device` is in torch's notation (`cuda:0`).
    """

    rank: int
    pid: int
    incarnation: int
    device: str
    backend: str
    threads: int


class ShutdownDelayed(Message, frozen=True):
    """Report that background saves or exit handlers delay the rank's exit, by at most `seconds`."""

    seconds: float


class StartFailed(Message, frozen=True):
    """Report that the rank failed to start. The process exits after this message."""

    rank: int
    report: ErrorReport


class Text(Message, frozen=True):
    """Bytes that the rank's process, or a child of it, wrote to stdout or stderr."""

    cell: int
    stream: Literal["stdout", "stderr"]
    data: bytes


class TextCut(Message, frozen=True):
    """Report that `lines` lines (`size` bytes) of excessive output were omitted at this point.

    The file `log` contains the complete output.
    """

    cell: int
    lines: int
    size: int
    log: str


class Display(Message, frozen=True):
    """Display a MIME bundle.

    `kind` is "result" for the value of the last expression, "update" for `update_display`, otherwise "display".
    """

    cell: int
    kind: Literal["display", "result", "update"]
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None


class Clear(Message, frozen=True):
    """Clear the output, as `IPython.display.clear_output` does."""

    cell: int
    wait: bool


class OutputBarrier(Message, frozen=True):
    """Mark a place in the output: what comes before it on any rank is shown before what comes after it on any other.

    `name` is the same on all ranks, and another one for every place.
    """

    cell: int
    name: str


class InputRequest(Message, frozen=True):
    """Ask the user for a line of input; the rank's main thread waits for the `InputReply`."""

    cell: int
    prompt: str
    password: bool


# Output precedes it, because both go through the same link. Output of threads may follow it.
class Done(Message, frozen=True):
    """Report that the cell has ended on this rank.

    `payload` is the answer to `CallFunction` and `FetchValue`, or the `Measured` of a measured cell. `collectives`
    counts the collectives that the cell started on this rank, and its batches of gradient accumulation, which have to
    be equally many on all ranks, too. `groups` has the state of the process groups that it used. `lost_device` is the
    error of a device that has failed for good, and executes nothing any more. `place` is where the rank is in a
    protected training.
    """

    cell: int
    status: Literal["ok", "error", "interrupted"]
    seconds: float
    error: ErrorReport | None = None
    payload: Payload | None = None
    collectives: int = 0
    groups: tuple[GroupReport, ...] = ()
    lost_device: str = ""
    place: TrainingPlace | None = None


class Collectives(Message, frozen=True):
    """State of the rank's process groups.

    `line` is the line of the cell that the main thread is executing, a text such as "3 of cell 5" for the line of
    another cell, None if it is idle.
    """

    token: int
    cell: int | None
    line: int | str | None
    groups: tuple[GroupReport, ...]


class Stack(Message, frozen=True):
    """Python stack of the main thread, innermost frame last.

    `cell` is None if the rank is idle. `waits_for` describes its oldest pending collective. `paused`: the main thread
    is stopped in a debugger.
    """

    token: int
    cell: int | None
    frames: tuple[Frame, ...]
    waits_for: str = ""
    paused: bool = False


_Check = HashState | MeasureDifferences | MeasureGradients
_Protection = Protect | ListSnapshots | RestoreSnapshot | RestoreReplicas
_Resize = CheckResize | HandOver | EnterWorld | TakeOver
_Copy = ListState | ExportState | AdoptState | DescribeRandom
Task = RunCell | CallFunction | Assign | FetchValue | _Copy | Regroup | _Check | _Protection | _Resize
"""Tasks of a rank's main thread, executed one at a time; it answers every task with `Done`."""
# The control thread handles these at once, beside a running task.
_Control = (
    LimitOutput
    | GetStack
    | GetCollectives
    | Abort
    | RanksLost
    | Shutdown
    | Acknowledge
    | RequestReplay
    | Question
    | CommToRank
    | DapToRank
)
ToRank = Task | Interrupt | InputReply | _Control
_Shown = Text | TextCut | Display | Clear | OutputBarrier | CommFromRank
FromRank = (
    RankReady
    | StartFailed
    | ShutdownDelayed
    | _Shown
    | InputRequest
    | Done
    | Stack
    | Collectives
    | ReplayStart
    | Answer
    | DapFromRank
)

ToForkserver = OpenCluster | ForkRank | KillRank | CloseCluster | DetachCluster | ClaimCluster
FromForkserver = ForkserverUp | ClusterOpened | RankForked | RankExited | ClusterClosed | ClaimAccepted | ClaimRejected

_FROM_STREAMS = (Text, Display, CommFromRank)
"""Frequent or large messages, which `encode_from_rank` does not validate by decoding them again.

Their fields are converted to valid text where the messages are created.
"""
# Made once, because making one compiles its types.
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_forkserver: msgspec.msgpack.Decoder[ToForkserver] = msgspec.msgpack.Decoder(ToForkserver)
_from_forkserver: msgspec.msgpack.Decoder[FromForkserver] = msgspec.msgpack.Decoder(FromForkserver)


def encode(message: Message) -> bytes:
    """Return the encoded message.

    Raises TypeError for a field that is not plain data, and `InvalidArgument` for text with lone surrogates, which
    UTF-8 cannot encode.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.end]
        raise InvalidArgument(
            f"expected text that UTF-8 can encode, found {found!r} after {error.object[: error.start][-20:]!r}; write "
            "its escape in a string literal, or remove it"
        ) from error


def encode_from_rank(message: Message) -> bytes:
    """Return the encoded message of a rank.

    Text from user code can contain lone surrogates (file names do), which UTF-8 cannot encode; they are escaped. Raises
    TypeError, OverflowError or `ProtocolError` for a message that the notebook process could not decode.
    """
    # The fast way first. Lone surrogates are rare, and looking for them in every message would cost more than the
    # exception.
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        data = _encoder.encode(_escape_surrogates(msgspec.to_builtins(message, builtin_types=(bytes, memoryview))))
    # Decoded once as a check: the notebook would kill a rank whose message it cannot decode, so the error has to be
    # raised here, where its cause is.
    if not isinstance(message, _FROM_STREAMS):
        _decode(_from_rank, data, "to be sent by a rank")
    return data


def _escape_surrogates(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape_surrogates(item) for item in value]
    return value


def decode_to_rank(data: bytes | memoryview) -> ToRank:
    """Decode a message that a rank received. Raises `ProtocolError` if it is invalid."""
    return _decode(_to_rank, data, "received by a rank")


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Decode a message that a rank sent. Raises `ProtocolError` if it is invalid."""
    return _decode(_from_rank, data, "sent by a rank")


def decode_to_forkserver(data: bytes | memoryview) -> ToForkserver:
    """Decode a message that the forkserver received. Raises `ProtocolError` if it is invalid."""
    return _decode(_to_forkserver, data, "received by the forkserver")


def decode_from_forkserver(data: bytes | memoryview) -> FromForkserver:
    """Decode a message that the forkserver sent. Raises `ProtocolError` if it is invalid."""
    return _decode(_from_forkserver, data, "sent by the forkserver")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, which: str) -> _T:
    try:
        return decoder.decode(data)
    # Deeply nested data raises RecursionError, and a wrong length may raise MemoryError. They are errors of the message
    # like the others.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"invalid message {which}, expected a message of this protocol version: {error}") from error
