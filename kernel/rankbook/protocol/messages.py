"""The wire's vocabulary, both directions.

Owns: the messages between the notebook process and a rank, as tagged, frozen structs, and the encoding of all. Refuses:
sockets, processes, pickles. An unknown type or an unknown field is a `ProtocolError`, never ignored.

Large or pickled values do not live in these structs: a message that has them carries a `Payload` that says where
each buffer lies, in a frame of the same multipart message or in a shared memory segment.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from rankbook.errors import ProtocolError
from rankbook.protocol.base import Message as Message  # noqa: PLC0414 - who imports messages finds their base here too
from rankbook.protocol.comm import CommFromRank, CommToRank, DapFromRank, DapToRank
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
from rankbook.protocol.profiling import Measure
from rankbook.protocol.queries import Answer, Question
from rankbook.protocol.reattach import (
    Acknowledge,
    ClaimAccepted,
    ClaimCluster,
    ClaimRejected,
    DetachCluster,
    ReplayStart,
    RequestReplay,
)
from rankbook.protocol.telemetry import GroupReport

_T = TypeVar("_T")


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One buffer of a payload: `size` bytes, in the next frame of the message or at `offset` in the file `segment`."""

    size: int
    segment: str | None = None
    offset: int = 0


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pickled value: the first buffer is the pickle (protocol 5), the others its out-of-band buffers."""

    buffers: tuple[Buffer, ...]


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a Python stack."""

    file: str
    line: int
    function: str
    source: str = ""


class ErrorReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception on a rank, told without its objects.

    `traceback` is coloured and meant for people, `plain` is the same without colour; ranks whose `plain` is equal,
    but for addresses of objects and for lines of context, had the same error. `memory` tells what held this rank's
    memory, where that ran out.
    """

    name: str
    value: str
    traceback: str
    plain: str
    line: int | None = None
    memory: str = ""


# Notebook to rank ---------------------------------------------------------------------------------------------------


class RunCell(Message, frozen=True):
    """Run `source` in the rank's namespace. `number` is the notebook's execution count, for tracebacks.

    `file` is what a debugger knows the cell as, where there is one.
    """

    cell: int
    source: str
    number: int
    measure: Measure | None = None
    file: str = ""


class CallFunction(Message, frozen=True):
    """Call the pickled `(function, args, kwargs)` and answer with what it returns."""

    cell: int
    payload: Payload


class Assign(Message, frozen=True):
    """Put the pickled dict's entries into the rank's namespace."""

    cell: int
    payload: Payload


class FetchValue(Message, frozen=True):
    """Answer with the value of `name`, a variable or a dotted attribute of one."""

    cell: int
    name: str


class ListState(Message, frozen=True):
    """Answer with the names of the variables that `ExportState` can send, and why it cannot send the others."""

    cell: int


class ExportState(Message, frozen=True):
    """Answer with what a rank needs that takes the place of a dead one: the variables `names`, imports, paths."""

    cell: int
    names: tuple[str, ...]


class AdoptState(Message, frozen=True):
    """Take over what a peer exported. Without a payload: make replicated models ready for the rank that did."""

    cell: int
    payload: Payload | None = None


class Regroup(Message, frozen=True):
    """Leave the process group, if in one, and join generation `generation` of it."""

    cell: int
    generation: int


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in cell `cell`, or drop it if it has not begun."""

    cell: int


class InputReply(Message, frozen=True):
    """What the person typed. `text` None: nobody can be asked; `reason` says why."""

    cell: int
    text: str | None = None
    reason: str = ""


class GetStack(Message, frozen=True):
    """Answer with `Stack`, from the control thread, whatever the main thread does."""

    token: int


class GetCollectives(Message, frozen=True):
    """Answer with `Collectives`, from the control thread, whatever the main thread does."""

    token: int


class Abort(Message, frozen=True):
    """Collectives of these groups cannot end any more (of all groups, if none is named); `cause` says why.

    `shut`: break them off. Without it the cause is only what a wait tells that breaks by itself. Only groups are meant
    that one of `ranks` is a member of: those that are broken off, or gone. `lost`: the processes of `ranks` are gone.
    """

    groups: tuple[str, ...]
    cause: str
    shut: bool
    ranks: tuple[int, ...]
    lost: bool = False


class Shutdown(Message, frozen=True):
    """Leave the process group and exit. Saves in the background and exit functions may take `patience` seconds."""

    patience: float = 0.0


# Rank to notebook ---------------------------------------------------------------------------------------------------


class RankReady(Message, frozen=True):
    """The first message of a rank: its link works and it takes tasks. `device` is as torch writes it (`cuda:0`)."""

    rank: int
    pid: int
    incarnation: int
    device: str
    backend: str
    threads: int


class ShutdownDelayed(Message, frozen=True):
    """The rank leaves once its saves in the background and its exit functions are done, or after `seconds`."""

    seconds: float


class StartFailed(Message, frozen=True):
    """The rank could not set itself up; it exits after this."""

    rank: int
    report: ErrorReport


class Text(Message, frozen=True):
    """Bytes that a rank's process, or a child of it, wrote to stdout or stderr."""

    cell: int
    stream: Literal["stdout", "stderr"]
    data: bytes


class TextCut(Message, frozen=True):
    """A flood was cut: `lines` lines of `size` bytes were left out here; `log` holds the whole of it."""

    cell: int
    lines: int
    size: int
    log: str


class Display(Message, frozen=True):
    """A mime bundle. `kind` is result for the last expression, update for `update_display`."""

    cell: int
    kind: Literal["display", "result", "update"]
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None


class Clear(Message, frozen=True):
    """`clear_output` on a rank."""

    cell: int
    wait: bool


class InputRequest(Message, frozen=True):
    """The rank's main thread waits for a line from the person."""

    cell: int
    prompt: str
    password: bool


class Done(Message, frozen=True):
    """The cell has ended on this rank. `payload` answers `CallFunction` and `FetchValue`, or is what was `Measured`.

    `collectives` is how many collectives it began there.
    """

    cell: int
    status: Literal["ok", "error", "interrupted"]
    seconds: float
    error: ErrorReport | None = None
    payload: Payload | None = None
    collectives: int = 0


class Collectives(Message, frozen=True):
    """What the rank's process groups wait for. `line` is where in the cell the main thread is; None when idle."""

    token: int
    cell: int | None
    line: int | None
    groups: tuple[GroupReport, ...]


class Stack(Message, frozen=True):
    """The main thread's Python stack, innermost frame last; `cell` is None when the rank is idle.

    `waits_for` is its oldest collective that has not ended, in words. `paused`: in a debugger.
    """

    token: int
    cell: int | None
    frames: tuple[Frame, ...]
    waits_for: str = ""
    paused: bool = False


Task = RunCell | CallFunction | Assign | FetchValue | ListState | ExportState | AdoptState | Regroup
"""What a rank's main thread does, one at a time, and answers with `Done`."""
_Aside = GetStack | GetCollectives | Abort | Shutdown | Acknowledge | RequestReplay | Question | CommToRank | DapToRank
ToRank = Task | Interrupt | InputReply | _Aside
_Shown = Text | TextCut | Display | Clear | CommFromRank
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
"""What comes by the thousand, or is large; its fields are made of text where it is made."""
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_forkserver: msgspec.msgpack.Decoder[ToForkserver] = msgspec.msgpack.Decoder(ToForkserver)
_from_forkserver: msgspec.msgpack.Decoder[FromForkserver] = msgspec.msgpack.Decoder(FromForkserver)


def encode(message: Message) -> bytes:
    """The bytes of one message. Raises TypeError for a field that is not plain data."""
    return _encoder.encode(message)


def encode_from_rank(message: Message) -> bytes:
    """Return the bytes of a message that a rank sends.

    Text from user code may hold lone surrogates (as file names do), which UTF-8 does not have: they are escaped.
    Raises TypeError, OverflowError or `ProtocolError` for what the notebook could not read.
    """
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        data = _encoder.encode(_escape_surrogates(msgspec.to_builtins(message, builtin_types=(bytes, memoryview))))
    if not isinstance(message, _FROM_STREAMS):
        _decode(_from_rank, data, "a rank was to send")
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
    """The message a rank received. Raises `ProtocolError` for anything that is not one."""
    return _decode(_to_rank, data, "a rank received")


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """The message a rank sent. Raises `ProtocolError` for anything that is not one."""
    return _decode(_from_rank, data, "a rank sent")


def decode_to_forkserver(data: bytes | memoryview) -> ToForkserver:
    """The message the forkserver received. Raises `ProtocolError` for anything that is not one."""
    return _decode(_to_forkserver, data, "the forkserver received")


def decode_from_forkserver(data: bytes | memoryview) -> FromForkserver:
    """The message the forkserver sent. Raises `ProtocolError` for anything that is not one."""
    return _decode(_from_forkserver, data, "the forkserver sent")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, who: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"{who} what is no message of this version: {error}") from error
