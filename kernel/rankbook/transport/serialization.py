"""Values to buffers, and back.

Owns: the pickle, what goes beside it, where each buffer travels, and the words for what cannot be opened. Refuses:
sockets, and torch: tensors are handed to `tensors`, which is imported once torch is here or a tensor arrives.

A pickle runs code when it is opened. Nothing may be given to `unpack` that did not come from a peer of this cluster.

What in a value cannot be pickled, and where in it that is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.messages import Buffer, Payload
from rankbook.transport.cell_sources import CellSources
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
        raise TransferError(explain_pickle_error(value, names, error, _attempt)) from error
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


def pickle_error(value: object, *, name: str, reduce: Reduce | None = None) -> str | None:
    """Why `value` cannot be packed, in words, or None if it can. Copies nothing."""
    error = _attempt(value, reduce)
    if error is None:
        return None
    return str(error) if isinstance(error, TransferError) else explain_pickle_error(value, (name,), error, _attempt)


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


class _DiscardingFile:
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

    def __init__(self, file: _Chunks | _DiscardingFile, beside: _Beside, reduce: Reduce | None = None) -> None:
        super().__init__(file, protocol=PROTOCOL, buffer_callback=beside)
        self._storages = beside.storages
        self._reduce = reduce
        self._sources = CellSources()

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
        _Pickler(_DiscardingFile(), _Beside(_storages()), reduce).dump(value)
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


PROTOCOL = 5
"""Of all pickles."""

_MOST_ATTEMPTS = 500
_MOST_LEVELS = 20
_SEARCH_SECONDS = 2.0
_LONGEST_PATH = 120
_LONGEST_KEY = 40
_JOINTS = ("[", ".", "'")  # how a label begins that is written behind the path; another one is a path of its own
_END = object()

Attempt = Callable[[object], BaseException | None]
"""Pickles a value to nowhere, and gives what that raised."""


def explain_pickle_error(value: object, names: Sequence[str], error: BaseException, attempt: Attempt) -> str:
    """One sentence: what was to be sent, what in it cannot be, where that is, and why."""
    found = _culprit(value, names, error, attempt)
    kind = type(found.value)
    told = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    path = found.path
    if len(path) > _LONGEST_PATH:
        path = f"{path[: _LONGEST_PATH // 2]}…{path[-_LONGEST_PATH // 2 :]}"
    what = f"cannot send '{found.name}'" if found.name else "cannot send the value"
    where = f" at {path}" if path not in (found.name, "value") else ""
    reason = str(found.error).strip().removesuffix(".") or type(found.error).__name__
    return f"{what}: {'' if found.sure else 'something inside '}{told}{where} cannot be pickled: {reason}"


@dataclass(frozen=True)
class _Culprit:
    """What cannot be pickled. `name` is what the person calls the whole; not `sure`: the search had to stop here."""

    name: str
    path: str
    value: object
    error: BaseException
    sure: bool


def _culprit(value: object, names: Sequence[str], error: BaseException, attempt: Attempt) -> _Culprit:
    """Go down for as long as some part of what cannot be pickled cannot be pickled by itself.

    Each step is a pickle, so their number, the depth and the time are bounded.
    """
    name = names[0] if len(names) == 1 else ""
    path, trail = name or "value", [value]
    parts = _named_parts(value, names)
    deadline = time.monotonic() + _SEARCH_SECONDS
    for _ in range(_MOST_ATTEMPTS):
        label, part = next(parts, ("", _END))
        if part is _END:
            return _Culprit(name, path, trail[-1], error, sure=True)
        if len(trail) > _MOST_LEVELS or time.monotonic() > deadline:
            break
        if any(part is each for each in trail) or (caught := attempt(part)) is None:
            continue
        if label[:1] in _JOINTS:
            path += label
        else:
            name = path = label
        error, parts = caught, _parts(part)
        trail.append(part)
    return _Culprit(name, path, trail[-1], error, sure=False)


def _named_parts(value: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """The parts of the whole: named by the person where that can be."""
    if len(names) > 1 and isinstance(value, tuple) and len(value) == len(names):
        return iter(zip(names, value, strict=True))
    if not names and type(value) is dict and all(isinstance(key, str) and key.isidentifier() for key in value):
        return iter(value.items())
    return _parts(value)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What pickle would take `value` apart into, each with what to write behind the path to `value`."""
    if type(value) is dict:
        for key, item in list(value.items()):
            yield f"[{_brief(key)}]", item
        for key in list(value):
            yield f"'s key {_brief(key)}", key
    elif type(value) in (list, tuple, set, frozenset):
        for index, item in enumerate(list(value)):  # type: ignore[call-overload]
            yield f"[{index}]", item
    elif isinstance(value, types.FunctionType):
        yield from ((f"'s variable {name}", used) for name, used in _variables(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in list(vars(value).items()))
    else:
        yield from _reduced(value)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function brings along: closed-over and global variables, defaults, attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # it grows: functions inside functions
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        codes.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from {**(function.__kwdefaults__ or {}), **vars(function)}.items()


def _reduced(value: object) -> Iterator[tuple[str, object]]:
    try:
        reduction = value.__reduce_ex__(PROTOCOL)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - reported already: pickling `value` raised it, SystemExit perhaps
        return
    if not isinstance(reduction, tuple):
        return
    _, arguments, state, items, pairs = (*reduction, None, None, None)[:5]
    for each in state if isinstance(state, tuple) else (state,):  # (attributes, slots), where there are slots
        for name, item in each.items() if isinstance(each, dict) else ():
            yield f".{name}", item
    if state is not None and not isinstance(state, dict):
        yield "'s state", state
    for index, item in enumerate(items or ()):
        yield f"[{index}]", item
    for key, item in pairs or ():
        yield f"[{_brief(key)}]", item
    for index, item in enumerate(arguments):
        yield ".__class__" if item is type(value) else f"'s argument {index + 1}", item


def _brief(key: object) -> str:
    told = repr(key) if isinstance(key, str | bytes | int | float | tuple) else f"<{type(key).__qualname__}>"
    return told if len(told) <= _LONGEST_KEY else f"{told[:_LONGEST_KEY]}…"
