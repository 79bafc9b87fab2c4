"""Values to buffers, and back.

Owns: the pickle, what goes beside it, where each buffer travels, and the words for what cannot be opened. Refuses:
sockets, and torch: tensors are handed to `tensors`, which is imported once torch is here or a tensor arrives.

A pickle runs code when it is opened. Nothing may be given to `unpack` that did not come from a peer of this cluster.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.messages import Buffer, Payload
from rankbook.transport.cell_sources import Sources
from rankbook.transport.pickle_errors import PROTOCOL, cannot_send
from rankbook.transport.shared_memory import Bytes, SegmentStore

if TYPE_CHECKING:
    from rankbook.transport.tensors import Storages

_IN_PICKLE = 4 << 10  # a smaller buffer costs less when it is copied into the pickle
_ALIGNMENT = 16  # torch reads a complex128 with instructions that fault below this


@dataclass(frozen=True)
class Packed:
    """A value ready to be sent.

    `frames` travel in the message, after it, and are nobody else's memory. `segments` are files: who sends a value to
    several receivers discards them once all have answered; the only receiver of a value removes them as it opens it.
    """

    payload: Payload
    frames: list[bytes | memoryview] = field(repr=False)
    segments: tuple[str, ...]


Reduce = Callable[[object], Any]  # as pickle's `reducer_override`, and asked first


def pack(
    value: object, *, store: SegmentStore | None, names: Sequence[str] = (), reduce: Reduce | None = None
) -> Packed:
    """Pickle `value`; its large buffers go into one file of `store` where that is worth it, and fits.

    Buffers are copied exactly once, here, so that the value may be changed as soon as this returns. Without a store
    (another host), or without room in it, they become frames. `names` is what the person calls the value, or, when
    there are several, the parts of the tuple that it is; a dict's entries go by their keys.

    Raises `TransferError` that names what cannot be pickled, and where in the value it is.
    """
    try:
        pickled = _pickle(value, reduce)
    except MemoryError as error:
        raise TransferError("cannot send the value: there is not enough memory to pickle it") from error
    except Exception as error:
        raise TransferError(cannot_send(value, names, error, _attempt)) from error
    if store is None:
        return _as_frames(pickled.buffers)
    stream, *beside = map(_size, pickled.buffers)
    worth_a_file = [stream >= store.least, *[sum(beside) >= store.least] * len(beside)]
    chosen = list(compress(pickled.buffers, worth_a_file))
    segment = store.write(chosen) if chosen else None
    if segment is None:
        return _as_frames(pickled.buffers)
    offsets = iter(segment.offsets)
    buffers = [
        Buffer(_size(pieces), segment.name, next(offsets)) if filed else Buffer(_size(pieces))
        for pieces, filed in zip(pickled.buffers, worth_a_file, strict=True)
    ]
    frames = [_snapshot(pieces) for pieces, filed in zip(pickled.buffers, worth_a_file, strict=True) if not filed]
    return Packed(Payload(tuple(buffers)), list(frames), (segment.name,))


def why_not(value: object, *, name: str, reduce: Reduce | None = None) -> str | None:
    """Why `value` cannot be packed, in words, or None if it can. Copies nothing."""
    error = _attempt(value, reduce)
    if error is None:
        return None
    return str(error) if isinstance(error, TransferError) else cannot_send(value, (name,), error, _attempt)


def unpack(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, folder: Path) -> Any:  # noqa: ANN401 - any value
    """The value of a payload. `folder` is where its segments lie; `unlink` removes them: nobody else will read them.

    What rests on a segment is not copied; it can be changed in place, which nobody else sees. Raises `TransferError`
    where the value cannot be opened here, and `ProtocolError` where the payload does not hold together.
    """
    stream, *beside = _locate(payload, frames, unlink=unlink, store=SegmentStore(folder))
    try:
        return pickle.loads(stream, buffers=[_usable(buffer) for buffer in beside])
    except ModuleNotFoundError as error:
        raise TransferError(
            f"cannot open the value here: it needs the module {error.name!r}, which cannot be imported in this process;"
            " install it here, or send plain values (numbers, lists, dicts, arrays, tensors)"
        ) from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise ProtocolError(f"a payload of {len(stream)} bytes is no pickle of ours: {error}") from error
    except MemoryError as error:
        raise TransferError("cannot open the value here: there is not enough memory") from error
    except Exception as error:
        told = f"cannot open the value here: {type(error).__name__}: {error}"
        if str(error).startswith("Can't get attribute"):  # pickle's words, for a name that the module does not have
            told += (
                "; the two processes see different versions of that module: restart the one that imported it first,"
                " or define the name in a cell, then it travels along"
            )
        raise TransferError(told) from error


# Pickling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pickled:
    """The pickle and its out-of-band buffers, each in pieces. `owner` keeps alive what they look into."""

    buffers: list[Sequence[Bytes]]
    owner: object


class _Chunks:
    """The file that a pickler writes to: nothing is ever joined, and a large bytes object is not even copied."""

    def __init__(self) -> None:
        self.chunks: list[Bytes] = []

    def write(self, data: Bytes) -> int:
        # a memoryview is of memory that the pickler frees as soon as this returns
        self.chunks.append(bytes(data) if isinstance(data, memoryview) else data)
        return len(data)


class _Nowhere:
    """The file of a trial."""

    @staticmethod
    def write(data: Bytes) -> int:
        return len(data)


class _Beside:
    """Collects the buffers that are worth taking out of the pickle."""

    def __init__(self, storages: Storages | None) -> None:
        self.storages = storages
        self.buffers: list[pickle.PickleBuffer] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer is to be copied into the pickle."""
        if memoryview(buffer).nbytes < _IN_PICKLE and not self._is_elsewhere(buffer):
            return True
        self.buffers.append(buffer)
        return False

    def views(self) -> Iterator[memoryview]:
        """The bytes of each buffer."""
        for buffer in self.buffers:
            if self._is_elsewhere(buffer):
                assert self.storages is not None
                yield self.storages.fetch(buffer)
            else:
                yield buffer.raw()

    def _is_elsewhere(self, buffer: pickle.PickleBuffer) -> bool:
        return self.storages is not None and self.storages.is_elsewhere(buffer)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle's, with tensors out of band."""

    def __init__(self, file: _Chunks | _Nowhere, beside: _Beside, reduce: Reduce | None = None) -> None:
        super().__init__(file, protocol=PROTOCOL, buffer_callback=beside)
        self._storages = beside.storages
        self._reduce = reduce
        self._sources = Sources()

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        """Take tensors apart, and leave the rest to cloudpickle."""
        if self._reduce is not None and (reduction := self._reduce(value)) is not NotImplemented:
            return reduction
        if self._storages is not None:
            reduction = self._storages.reduce(value)
            if reduction is not NotImplemented:
                return reduction
        if isinstance(value, types.CodeType):
            return self._sources.reduce(value, self.dispatch_table[types.CodeType](value))
        return super().reducer_override(value)


def _pickle(value: object, reduce: Reduce | None) -> _Pickled:
    file, beside = _Chunks(), _Beside(_storages())
    _Pickler(file, beside, reduce).dump(value)
    trimmed = beside.storages.trimmed() if beside.storages is not None else None
    if trimmed is not None:
        file, beside = _Chunks(), _Beside(trimmed)
        _Pickler(file, beside, reduce).dump(value)
    return _Pickled([file.chunks, *([view] for view in beside.views())], beside)


def _attempt(value: object, reduce: Reduce | None = None) -> BaseException | None:
    try:
        _Pickler(_Nowhere(), _Beside(_storages()), reduce).dump(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - returned; a value's own code may raise SystemExit
        return error
    return None


def _storages() -> Storages | None:
    if sys.modules.get("torch") is None:
        return None  # then there is no tensor either
    from rankbook.transport.tensors import Storages

    return Storages()


# Where buffers travel -----------------------------------------------------------------------------------------------


def _as_frames(outside: Sequence[Sequence[Bytes]]) -> Packed:
    buffers = tuple(Buffer(_size(pieces)) for pieces in outside)
    return Packed(Payload(buffers), [_snapshot(pieces) for pieces in outside], ())


def _snapshot(pieces: Sequence[Bytes]) -> bytes:
    """The pieces in one: a frame leaves when its socket can take it, and by then the value may have changed."""
    return b"".join(pieces)  # of one bytes object, that object


def _size(pieces: Sequence[Bytes]) -> int:
    return sum(map(len, pieces))


def _locate(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, store: SegmentStore) -> list[memoryview]:
    """Where each buffer of the payload lies. Raises `ProtocolError` unless it all fits together."""
    inline = sum(buffer.segment is None for buffer in payload.buffers)
    if not payload.buffers or inline != len(frames):
        raise ProtocolError(f"{inline} of {len(payload.buffers)} buffers are in frames, of which {len(frames)} came")
    names = {buffer.segment: None for buffer in payload.buffers if buffer.segment is not None}
    mapped = {name: store.read(name, unlink=unlink) for name in names}
    waiting = iter(frames)
    found = []
    for buffer in payload.buffers:
        whole = memoryview(next(waiting)).cast("B") if buffer.segment is None else mapped[buffer.segment]
        end = buffer.offset + buffer.size
        if min(buffer.offset, buffer.size) < 0 or end > len(whole) or (buffer.segment is None and end < len(whole)):
            raise ProtocolError(f"a buffer from byte {buffer.offset} to {end} does not fit {len(whole)} bytes")
        found.append(whole[buffer.offset : end])
    return found


def _usable(buffer: memoryview) -> memoryview | bytearray:
    """The buffer, or a copy where it cannot be written to or where arrays cannot rest on it."""
    if not buffer or buffer.readonly or ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % _ALIGNMENT:
        return bytearray(buffer)
    return buffer
