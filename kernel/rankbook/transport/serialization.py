"""Serialization: values to buffers and back.

`pack` pickles a value with cloudpickle. Large buffers stay out of the pickle: they go into one shared memory file, or
into frames of the message. Tensors are handed to `tensors.py`, which is imported only once torch is loaded or a tensor
arrives. `unpack` is the reverse. The last part explains pickling errors: it searches for the part of the value that
cannot be pickled, and names the path to it.

A pickle runs code when it is opened: `unpack` must only be given payloads from a process of this cluster.
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


_IN_PICKLE = 4 << 10  # bytes; copying a smaller buffer into the pickle is cheaper
_ALIGNMENT = 16  # bytes; torch reads a complex128 with instructions that fault on a smaller alignment


@dataclass(frozen=True)
class Packed:
    """A serialized value, ready to be sent.

    `frames` follow the message and share no memory with the value. `segments` are shared memory files: the sender of a
    value with several receivers removes them once all have answered; a single receiver removes them as it opens the
    value.
    """

    payload: Payload
    frames: list[bytes | memoryview] = field(repr=False)
    segments: tuple[str, ...]


Reduce = Callable[[object], Any]  # like pickle's `reducer_override`, and called before it


def pack(
    value: object, *, store: SegmentStore | None, names: Sequence[str] = (), reduce: Reduce | None = None
) -> Packed:
    """Pickle `value`, with its large buffers in one file of `store` if that is worth it and fits.

    Buffers are copied exactly once, by this function, so that the value may be changed as soon as it returns. Without a
    store (another host), or without room in it, they become frames. `names` is the user's name of the value, or, when
    it is a tuple of several values, of its elements; the entries of a dict are named by their keys.

    Raises `TransferError`, which names the part that cannot be pickled and the path to it.
    """
    try:
        pickled = _pickle(value, reduce)
    except MemoryError as error:
        raise TransferError("cannot send the value: there is not enough memory to pickle it") from error
    except Exception as error:
        raise TransferError(explain_pickle_error(value, names, error, _attempt)) from error
    if store is None:
        return _as_frames(pickled.buffers)
    # The pickle itself goes into the file only if it is large, the out-of-band buffers all together or not at all.
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
    """Return the reason why `value` cannot be packed, or None if it can. Copies no buffer."""
    error = _attempt(value, reduce)
    if error is None:
        return None
    return str(error) if isinstance(error, TransferError) else explain_pickle_error(value, (name,), error, _attempt)


def unpack(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, folder: Path) -> Any:  # noqa: ANN401 - any value
    """Open a payload. `folder` holds its segments; `unlink` removes them, for the last reader.

    Arrays and tensors in a segment are not copied; they can be changed in place, which no other process sees. Raises
    `TransferError` if the value cannot be opened here, and `ProtocolError` if the payload is inconsistent.
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
        message = f"cannot open the value here: {type(error).__name__}: {error}"
        if str(error).startswith("Can't get attribute"):  # pickle's message for a name that the module lacks
            message += (
                "; the two processes see different versions of that module: restart the one that imported it first,"
                " or define the name in a cell, then it travels along"
            )
        raise TransferError(message) from error


# Pickling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pickled:
    """The pickle and its out-of-band buffers, as lists of pieces. `owner` keeps their memory alive."""

    buffers: list[Sequence[Bytes]]
    owner: object


class _Chunks:
    """The output file of a pickler, as a list of chunks: nothing is joined, and a large bytes object is not copied."""

    def __init__(self) -> None:
        self.chunks: list[Bytes] = []

    def write(self, data: Bytes) -> int:
        # the pickler frees the memory of a memoryview as soon as this returns
        self.chunks.append(bytes(data) if isinstance(data, memoryview) else data)
        return len(data)


class _DiscardingFile:
    """File object that discards writes, for dry-run pickling."""

    @staticmethod
    def write(data: Bytes) -> int:
        return len(data)


class _Beside:
    """Callback that collects the buffers worth keeping out of the pickle."""

    def __init__(self, storages: Storages | None) -> None:
        self.storages = storages
        self.buffers: list[pickle.PickleBuffer] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if the buffer is to be copied into the pickle."""
        if memoryview(buffer).nbytes < _IN_PICKLE and not self._is_elsewhere(buffer):
            return True
        self.buffers.append(buffer)
        return False

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes of the buffers."""
        for buffer in self.buffers:
            if self._is_elsewhere(buffer):
                assert self.storages is not None
                yield self.storages.fetch(buffer)
            else:
                yield buffer.raw()

    def _is_elsewhere(self, buffer: pickle.PickleBuffer) -> bool:
        return self.storages is not None and self.storages.is_elsewhere(buffer)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """A cloudpickle pickler that takes tensors out of band."""

    def __init__(self, file: _Chunks | _DiscardingFile, beside: _Beside, reduce: Reduce | None = None) -> None:
        super().__init__(file, protocol=PROTOCOL, buffer_callback=beside)
        self._storages = beside.storages
        self._reduce = reduce
        self._sources = CellSources()

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        """Reduce tensors and code objects, and leave everything else to cloudpickle."""
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
    # The first pass records which parts of storages are used; a second one sends only these, see `Storages.trimmed`.
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
        return None  # no tensor can exist
    from rankbook.transport.tensors import Storages

    return Storages()


# Where buffers travel -----------------------------------------------------------------------------------------------


def _as_frames(outside: Sequence[Sequence[Bytes]]) -> Packed:
    buffers = tuple(Buffer(_size(pieces)) for pieces in outside)
    return Packed(Payload(buffers), [_snapshot(pieces) for pieces in outside], ())


def _snapshot(pieces: Sequence[Bytes]) -> bytes:
    """Join the pieces into one copy: a frame leaves when its socket is ready, and the value may change before."""
    return b"".join(pieces)  # returns a single bytes object itself


def _size(pieces: Sequence[Bytes]) -> int:
    return sum(map(len, pieces))


def _locate(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, store: SegmentStore) -> list[memoryview]:
    """Return the memory of every buffer of the payload. Raises `ProtocolError` if sizes or numbers do not match."""
    inline = sum(buffer.segment is None for buffer in payload.buffers)
    if not payload.buffers or inline != len(frames):
        raise ProtocolError(f"{inline} of {len(payload.buffers)} buffers are in frames, of which {len(frames)} came")
    names = {buffer.segment: None for buffer in payload.buffers if buffer.segment is not None}
    mapped = {name: store.read(name, unlink=unlink) for name in names}
    waiting = iter(frames)
    views = []
    for buffer in payload.buffers:
        whole = memoryview(next(waiting)).cast("B") if buffer.segment is None else mapped[buffer.segment]
        end = buffer.offset + buffer.size
        if min(buffer.offset, buffer.size) < 0 or end > len(whole) or (buffer.segment is None and end < len(whole)):
            raise ProtocolError(f"a buffer from byte {buffer.offset} to {end} does not fit {len(whole)} bytes")
        views.append(whole[buffer.offset : end])
    return views


def _usable(buffer: memoryview) -> memoryview | bytearray:
    """Return the buffer, or a copy if it is read-only or not aligned for arrays."""
    if not buffer or buffer.readonly or ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % _ALIGNMENT:
        return bytearray(buffer)
    return buffer


PROTOCOL = 5
"""The pickle protocol."""

_MOST_ATTEMPTS = 500
_MOST_LEVELS = 20
_SEARCH_SECONDS = 2.0
_LONGEST_PATH = 120
_LONGEST_KEY = 40
_JOINTS = ("[", ".", "'")  # labels that begin so are appended to the path; any other label starts a new path
_END = object()

Attempt = Callable[[object], BaseException | None]
"""Pickles a value to nowhere and returns the exception, if any."""


def explain_pickle_error(value: object, names: Sequence[str], error: BaseException, attempt: Attempt) -> str:
    """Return the error message: the value, the part that cannot be pickled, the path to it, and the reason."""
    culprit = _culprit(value, names, error, attempt)
    kind = type(culprit.value)
    type_name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    path = culprit.path
    if len(path) > _LONGEST_PATH:
        path = f"{path[: _LONGEST_PATH // 2]}…{path[-_LONGEST_PATH // 2 :]}"
    problem = f"cannot send '{culprit.name}'" if culprit.name else "cannot send the value"
    where = f" at {path}" if path not in (culprit.name, "value") else ""
    reason = str(culprit.error).strip().removesuffix(".") or type(culprit.error).__name__
    return f"{problem}: {'' if culprit.sure else 'something inside '}{type_name}{where} cannot be pickled: {reason}"


@dataclass(frozen=True)
class _Culprit:
    """The part that cannot be pickled. `name` is the user's name of the whole value.

    `sure` is False if the search stopped at a limit, so that the cause may lie deeper.
    """

    name: str
    path: str
    value: object
    error: BaseException
    sure: bool


def _culprit(value: object, names: Sequence[str], error: BaseException, attempt: Attempt) -> _Culprit:
    """Descend into the value as long as some part of it cannot be pickled on its own.

    Every step is a dry-run pickle, so their number, the depth and the time are limited.
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
        if any(part is ancestor for ancestor in trail) or (caught := attempt(part)) is None:
            continue
        if label[:1] in _JOINTS:
            path += label
        else:
            name = path = label
        error, parts = caught, _parts(part)
        trail.append(part)
    return _Culprit(name, path, trail[-1], error, sure=False)


def _named_parts(value: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the parts of the whole value, by the user's names where possible."""
    if len(names) > 1 and isinstance(value, tuple) and len(value) == len(names):
        return iter(zip(names, value, strict=True))
    if not names and type(value) is dict and all(isinstance(key, str) and key.isidentifier() for key in value):
        return iter(value.items())
    return _parts(value)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts into which pickle would take `value`, with the label to append to the path."""
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
    """Yield the values that a function is pickled with: closure and global variables, defaults, attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable without a value
            yield name, cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # the list grows by nested functions
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
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
    for mapping in state if isinstance(state, tuple) else (state,):  # (attributes, slots) for a class with slots
        for name, item in mapping.items() if isinstance(mapping, dict) else ():
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
    text = repr(key) if isinstance(key, str | bytes | int | float | tuple) else f"<{type(key).__qualname__}>"
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
