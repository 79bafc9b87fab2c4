"""Serialization: values to buffers and back.

`pack` pickles a value with cloudpickle. Large buffers stay out of the pickle: they go into one shared memory file, or
into frames of the message. Tensors are handed to `tensors.py`, which is imported only once torch is loaded or a tensor
arrives. `unpack` is the reverse. The last part explains pickling errors: it searches for the part of the value that
cannot be pickled, and names the path to it.

A pickle runs code when it is opened: `unpack` must only be given payloads from a process of this cluster.

A function that was defined in a notebook cell is pickled with the source of the cell, so that a traceback in another
process shows its lines. Functions from files bring no source: it is read from the file where it is needed.

`reduce_for_child` pickles functions and classes of cells for the child processes of a rank: DataLoader workers and
other children of multiprocessing.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import enum
import functools
import linecache
import pickle
import re
import sys
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import cloudpickle

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.messages import Buffer, Payload
from rankbook.transport.shared_memory import Bytes, Pieces, SegmentStore, present_bytes

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
    value: object,
    *,
    store: SegmentStore | None,
    names: Sequence[str] = (),
    reduce: Reduce | None = None,
    for_new_rank: bool = False,
) -> Packed:
    """Pickle `value`, with its large buffers in one file of `store` if that is worth it and fits.

    Buffers are copied exactly once, by this function, so that the value may be changed as soon as it returns. Without a
    store (another host), or without room in it, they become frames. With `for_new_rank`, tensors of an accelerator
    arrive on the receiver's own, and not on the CPU, and a class that is defined here counts as defined there. `names`
    is the user's name of the value, or, when it is a tuple of several values, of its elements; the entries of a dict
    are named by their keys.

    Raises `TransferError`, which names the part that cannot be pickled and the path to it.
    """
    try:
        pickled = _pickle(value, reduce, for_new_rank=for_new_rank)
    except MemoryError as error:
        raise TransferError("cannot send the value: not enough memory to pickle it") from error
    except Exception as error:
        raise TransferError(explain_pickle_error(value, names, error, reduce)) from error
    if store is None:
        return _pack_in_frames(pickled.buffers)
    # The pickle itself goes into the file only if it is large, the out-of-band buffers all together or not at all.
    stream, *out_of_band = map(_size, pickled.buffers)
    worth_a_file = [stream >= store.least, *[sum(out_of_band) >= store.least] * len(out_of_band)]
    file_buffers = list(compress(pickled.buffers, worth_a_file))
    segment = store.write(file_buffers) if file_buffers else None
    # No segment: nothing is worth a file, or shared memory has no room for it.
    if segment is None:
        return _pack_in_frames(pickled.buffers)
    offsets = iter(segment.offsets)
    buffers = [
        Buffer(_size(pieces), segment.name, next(offsets)) if in_file else Buffer(_size(pieces))
        for pieces, in_file in zip(pickled.buffers, worth_a_file, strict=True)
    ]
    # In the order of the buffers without a segment, which is the order in which `_locate` takes them.
    frames = [_snapshot(pieces) for pieces, in_file in zip(pickled.buffers, worth_a_file, strict=True) if not in_file]
    return Packed(Payload(tuple(buffers)), list(frames), (segment.name,))


def pickle_error(value: object, *, name: str, reduce: Reduce | None = None) -> str | None:
    """Return the reason why `value` cannot be packed, or None if it can. Copies no buffer."""
    error = _attempt(value, reduce)
    if error is None:
        return None
    return str(error) if isinstance(error, TransferError) else explain_pickle_error(value, (name,), error, reduce)


def unpack(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, folder: Path) -> Any:  # noqa: ANN401 - any value
    """Open a payload. `folder` holds its segments; `unlink` removes them, for the last reader.

    Arrays and tensors in a segment are not copied; they can be changed in place, which no other process sees. Raises
    `TransferError` if the value cannot be opened here, and `ProtocolError` if the payload is inconsistent.
    """
    stream, *out_of_band = _locate(payload, frames, unlink=unlink, store=SegmentStore(folder))
    try:
        # The buffers are given in the order in which the pickler took them out.
        return pickle.loads(stream, buffers=[_aligned(buffer) for buffer in out_of_band])
    except ModuleNotFoundError as error:
        raise TransferError(
            f"cannot unpickle the value: it needs the module {error.name!r}, which cannot be imported in this process;"
            " install it here, or send plain values (numbers, lists, dicts, arrays, tensors)"
        ) from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise ProtocolError(f"invalid payload of {len(stream)} bytes, expected a pickle: {error}") from error
    except MemoryError as error:
        raise TransferError("cannot unpickle the value: not enough memory") from error
    except Exception as error:
        message = f"cannot unpickle the value: {type(error).__name__}: {error}"
        # The module exists on both sides but differs, typically because it was edited between two imports.
        if str(error).startswith("Can't get attribute"):  # pickle's message for a name that the module lacks
            message += (
                "; the two processes have different versions of that module: restart the one that imported it first,"
                " or define the name in a cell, so that it is sent with the value"
            )
        raise TransferError(message) from error


# Pickling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pickled:
    """The pickle and its out-of-band buffers, as lists of pieces. `owner` keeps their memory alive."""

    buffers: list[Pieces]
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


class _BufferCollector:
    """Callback that collects the buffers worth keeping out of the pickle."""

    def __init__(self, storages: Storages | None) -> None:
        self.storages = storages
        self.buffers: list[pickle.PickleBuffer] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if the buffer is to be copied into the pickle."""
        if memoryview(buffer).nbytes < _IN_PICKLE and not self._is_placeholder(buffer):
            return True
        self.buffers.append(buffer)
        return False

    def pieces(self) -> Iterator[Pieces]:
        """Yield the bytes of the buffers."""
        for buffer in self.buffers:
            if self._is_placeholder(buffer):
                assert self.storages is not None
                yield self.storages.pieces(buffer)
            else:
                yield [buffer.raw()]

    def _is_placeholder(self, buffer: pickle.PickleBuffer) -> bool:
        return self.storages is not None and self.storages.is_placeholder(buffer)


class _PayloadPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """A cloudpickle pickler that takes tensors out of band."""

    def __init__(
        self,
        file: _Chunks | _DiscardingFile,
        collector: _BufferCollector,
        reduce: Reduce | None = None,
        *,
        for_new_rank: bool = False,
    ) -> None:
        super().__init__(file, protocol=PROTOCOL, buffer_callback=collector)
        self._for_new_rank = for_new_rank
        self._storages = collector.storages
        self._reduce = reduce
        # One per pickle, so that the source of a cell is sent once, however many functions come from it.
        self._sources = CellSources()

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        """Reduce tensors, code objects and the classes of cells, and leave everything else to cloudpickle."""
        # The caller's reducer comes first, so that it can replace what tensors would otherwise become. cloudpickle
        # comes last.
        if self._reduce is not None and (reduction := self._reduce(value)) is not NotImplemented:
            return reduction
        if self._storages is not None:
            reduction = self._storages.reduce(value)
            if reduction is not NotImplemented:
                return reduction
        # By reference, as functools has it, a function of a cell is found in the sender's process only.
        if type(value) is _CachedFunction and value.__module__ == "__main__":
            return make_cached, (value.__wrapped__, value.cache_parameters())
        if type(value) is types.FunctionType and is_hooked_step(value):
            return hook_step, (vars(value)["__wrapped__"],)
        if type(value) is functools.cached_property:  # before Python 3.12 it has a lock, which cannot be pickled
            return make_cached_property, (value.func, value.attrname)
        if is_parametrized(value):
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
        # A code object is the part of a function that names its file. cloudpickle's own reduction is extended, so that
        # classes, closures and nested functions are covered as well.
        if isinstance(value, types.CodeType):
            return self._sources.reduce(value, self.dispatch_table[types.CodeType](value))
        reduction = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduction, tuple) and len(reduction) == 6:
            return reduce_class(value, reduction, for_new_rank=self._for_new_rank)
        return reduction


_CachedFunction = type(functools.cache(len))
_is_defined_here: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Classes that were sent or have arrived by value: True for those of this process, False for those of another one."""


def reduce_class(value: type, reduction: tuple[Any, ...], *, for_new_rank: bool) -> tuple[Any, ...]:
    """Return cloudpickle's `reduction` of a class by value, made so that its process keeps it as it is there.

    cloudpickle sets all attributes of a class whenever it arrives, also where it was defined: an object that comes back
    would take the class to the state that it had when the object was sent.
    """
    make, arguments, content, *nothing, set_content = reduction
    is_here = _is_defined_here.setdefault(value, True)
    if (slots := vars(value).get("__slots__")) is not None and not issubclass(value, enum.Enum | tuple):
        # cloudpickle leaves them out, so that the copy's objects have a `__dict__`, and state of another form.
        kind, name, bases, keywords, *others = arguments
        arguments = (kind, name, bases, {**keywords, "__slots__": slots}, *others)
    return make_class, (make, *arguments), (set_content, content, is_here and for_new_rank), *nothing, set_class_content


def make_class(make: Callable[..., type], *arguments: Any) -> type:  # noqa: ANN401 - cloudpickle's
    """Return a class that has arrived: the one that this process has already, or a new one without attributes.

    cloudpickle makes a new one first, and then looks for the other. To make one runs `__init_subclass__` of the bases,
    which may enter it into a registry.
    """
    # The identity of a class is the last argument but one of the functions that make a class and an enum.
    known = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(arguments[-2])
    return make(*arguments) if known is None else known


def set_class_content(value: type, state: tuple[Callable[[type, object], object], object, bool]) -> type:
    """Give a class that has arrived its attributes, unless it is one of this process. See `reduce_class`."""
    set_content, content, becomes_own = state
    if not _is_defined_here.get(value, False):
        set_content(value, content)
    _is_defined_here.setdefault(value, becomes_own)
    return value


_DEFINES_CLASS = re.compile(r"class|tuple|Tuple|Enum|Flag")
_identified: weakref.WeakSet[type] = weakref.WeakSet()


def identify_classes(namespace: Mapping[str, object], source: str, cell: int) -> None:
    """Give the value classes that a cell has defined the same identity on all ranks which have run it.

    Enums, dataclasses and named tuples: their objects equal only those of the same class. cloudpickle gives every class
    of every process an identity of its own. Then equal values of two ranks would differ in the notebook, and one that
    comes back would have the class of one rank only. Other classes may have a state of their own on every rank, and
    keep an identity of their own. `cell` is the cluster's number of the cell, and `namespace` has its variables.
    """
    track = getattr(cloudpickle.cloudpickle, "_lookup_class_or_track", None)
    if track is None or not _DEFINES_CLASS.search(source):
        return
    for value in list(namespace.values()):
        if is_value_class(value) and value not in _identified and value not in _is_defined_here:
            _identified.add(value)
            text = f"{cell} {value.__qualname__} {source}"
            track(blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest(), value)


def is_value_class(value: object) -> TypeGuard[type]:
    """Return True for an enum, a dataclass or a named tuple that a cell has defined."""
    own = vars(value) if issubclass(type(value), type) else {}
    if own.get("__module__") != "__main__":
        return False
    return issubclass(type(value), enum.EnumMeta) or "__dataclass_fields__" in own or "_field_defaults" in own


def is_parametrized(value: object) -> bool:
    """Return True for a module with parametrizations, such as `weight_norm`.

    torch gives it a class of its own whose `__getstate__` raises an error, because pickle sends no class by value.
    """
    kind = type(value)
    return kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__.startswith("Parametrized")


def is_hooked_step(function: types.FunctionType) -> bool:
    """Return True for the `step` of an optimizer class of a cell as torch has replaced it, to call its global hooks."""
    if "hooked" not in vars(function):  # set by torch
        return False
    from torch.optim.optimizer import Optimizer

    return function.__code__ in Optimizer.profile_hook_step.__code__.co_consts


def hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` with the global hooks of this process. By value, it would call those of its sender."""
    from torch.optim.optimizer import Optimizer

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # as `Optimizer._patch_step_function`
    return hooked  # type: ignore[no-any-return]


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """Return a `cached_property` that is an attribute of this name."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:  # noqa: ANN401 - functools' own type
    """Return `function` with a cache of its own, see `functools.lru_cache`."""
    return functools.lru_cache(**parameters)(function)


def _pickle(value: object, reduce: Reduce | None, *, for_new_rank: bool) -> _Pickled:
    file, collector = _Chunks(), _BufferCollector(_storages(keep_devices=for_new_rank))
    _PayloadPickler(file, collector, reduce, for_new_rank=for_new_rank).dump(value)
    # The first pass records which parts of storages are used; a second one sends only these, see `Storages.trimmed`.
    trimmed = collector.storages.trimmed() if collector.storages is not None else None
    if trimmed is not None:
        file, collector = _Chunks(), _BufferCollector(trimmed)
        _PayloadPickler(file, collector, reduce, for_new_rank=for_new_rank).dump(value)
    return _Pickled([file.chunks, *collector.pieces()], collector)


def _attempt(value: object, reduce: Reduce | None = None) -> BaseException | None:
    # The whole pickle is made, because only that tells whether it is possible. Nothing is stored.
    try:
        _PayloadPickler(_DiscardingFile(), _BufferCollector(_storages()), reduce).dump(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - returned; a value's own code may raise SystemExit
        return error
    return None


def _storages(*, keep_devices: bool = False) -> Storages | None:
    # Importing torch here would cost seconds in a notebook that only sends plain values.
    if sys.modules.get("torch") is None:
        return None  # no tensor can exist
    from rankbook.transport.tensors import Storages

    return Storages(keep_devices=keep_devices)


# Where buffers travel -----------------------------------------------------------------------------------------------


def _pack_in_frames(outside: Sequence[Pieces]) -> Packed:
    buffers = tuple(Buffer(_size(pieces)) for pieces in outside)
    return Packed(Payload(buffers), [_snapshot(pieces) for pieces in outside], ())


def _snapshot(pieces: Pieces) -> bytes:
    """Join the pieces into one copy: a frame leaves when its socket is ready, and the value may change before."""
    return b"".join(map(present_bytes, pieces))  # returns a single bytes object itself


def _size(pieces: Pieces) -> int:
    return sum(map(len, pieces))


def _locate(payload: Payload, frames: Sequence[Bytes], *, unlink: bool, store: SegmentStore) -> list[memoryview]:
    """Return the memory of every buffer of the payload. Raises `ProtocolError` if sizes or numbers do not match."""
    # The payload comes from a peer. Every number in it is checked before memory is read by it.
    inline = sum(buffer.segment is None for buffer in payload.buffers)
    if not payload.buffers:
        raise ProtocolError("invalid payload without buffers: expected at least the pickle")
    if inline != len(frames):
        raise ProtocolError(
            f"invalid payload of {len(payload.buffers)} buffers: expected {inline} frames, got {len(frames)}"
        )
    names = {buffer.segment: None for buffer in payload.buffers if buffer.segment is not None}
    mapped = {name: store.read(name, unlink=unlink) for name in names}
    waiting = iter(frames)
    views = []
    for buffer in payload.buffers:
        memory = memoryview(next(waiting)).cast("B") if buffer.segment is None else mapped[buffer.segment]
        end = buffer.offset + buffer.size
        # A frame must have exactly the announced size. A segment may be longer, because it holds several buffers.
        if min(buffer.offset, buffer.size) < 0 or end > len(memory) or (buffer.segment is None and end < len(memory)):
            raise ProtocolError(
                f"invalid buffer: bytes {buffer.offset} to {end} do not match a memory of {len(memory)} bytes"
            )
        views.append(memory[buffer.offset : end])
    return views


def _aligned(buffer: memoryview) -> memoryview | bytearray:
    """Return the buffer, or a copy if it is read-only or not aligned for arrays."""
    # `frombuffer` of numpy and torch share the memory, so it has to be writable, for in-place operations, and aligned.
    if not buffer or buffer.readonly or ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % _ALIGNMENT:
        return bytearray(buffer)
    return buffer


PROTOCOL = 5
"""The pickle protocol."""

_MAX_ATTEMPTS = 500
_MAX_LEVELS = 20
_SEARCH_SECONDS = 2.0
_MAX_PATH_LENGTH = 120
_MAX_KEY_LENGTH = 40
_FUNCTIONS = (types.FunctionType, classmethod, staticmethod, property)
_PATH_SEPARATORS = ("[", ".", "'")  # labels that begin so are appended to the path; any other label starts a new path
_END = object()


def explain_pickle_error(value: object, names: Sequence[str], error: BaseException, reduce: Reduce | None) -> str:
    """Return the error message: the value, the part that cannot be pickled, the path to it, and the reason."""
    part = _find_unpicklable(value, names, error, reduce)
    kind = type(part.value)
    type_name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    path = part.path
    if len(path) > _MAX_PATH_LENGTH:
        path = f"{path[: _MAX_PATH_LENGTH // 2]}…{path[-_MAX_PATH_LENGTH // 2 :]}"
    problem = f"cannot send '{part.name}'" if part.name else "cannot send the value"
    where = f" at {path}" if path not in (part.name, "value") else ""
    reason = str(part.error).strip().removesuffix(".") or type(part.error).__name__
    return f"{problem}: {'' if part.sure else 'something inside '}{type_name}{where} cannot be pickled: {reason}"


@dataclass(frozen=True)
class _UnpicklablePart:
    """The part that cannot be pickled. `name` is the user's name of the whole value.

    `sure` is False if the search stopped at a limit, so that the cause may lie deeper.
    """

    name: str
    path: str
    value: object
    error: BaseException
    sure: bool


def _find_unpicklable(
    value: object, names: Sequence[str], error: BaseException, reduce: Reduce | None
) -> _UnpicklablePart:
    """Descend into the value as long as some part of it cannot be pickled on its own.

    Every step is a dry-run pickle, so their number, the depth and the time are limited.
    """
    name = names[0] if len(names) == 1 else ""
    path, trail = name or "value", [value]
    components = _named_components(value, names, reduce)
    # A search from the outside to the inside. In every round, the parts of the value that failed are pickled one by
    # one; the first part that fails becomes the value of the next round. If all parts succeed alone, the value itself
    # is at fault.
    deadline = time.monotonic() + _SEARCH_SECONDS
    for _ in range(_MAX_ATTEMPTS):
        label, component = next(components, ("", _END))
        if component is _END:
            return _UnpicklablePart(name, path, trail[-1], error, sure=True)
        if len(trail) > _MAX_LEVELS or time.monotonic() > deadline:
            break
        # A value that contains itself would lead the search in a circle.
        if any(component is ancestor for ancestor in trail) or (caught := _attempt(component, reduce)) is None:
            continue
        if label[:1] in _PATH_SEPARATORS:
            path += label
        else:
            name = path = label
        error, components = caught, _components(component, reduce)
        trail.append(component)
    return _UnpicklablePart(name, path, trail[-1], error, sure=False)


def _named_components(value: object, names: Sequence[str], reduce: Reduce | None) -> Iterator[tuple[str, object]]:
    """Yield the parts of the whole value, by the user's names where possible."""
    if len(names) > 1 and isinstance(value, tuple) and len(value) == len(names):
        return iter(zip(names, value, strict=True))
    # The values of a push, whose keys are the names of the variables.
    if not names and type(value) is dict and all(isinstance(key, str) and key.isidentifier() for key in value):
        return iter(value.items())
    return _components(value, reduce)


def _components(value: object, reduce: Reduce | None) -> Iterator[tuple[str, object]]:
    """Yield the parts into which pickle would take `value`, with the label to append to the path."""
    if type(value) is dict:
        # Copies of the containers: pickling a part runs user code, which may change them.
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
        # Functions last: one that uses `super()` has the class itself as a variable, with all that is wrong in it.
        attributes = sorted(vars(value).items(), key=lambda entry: isinstance(entry[1], _FUNCTIONS))
        yield from ((f".{name}", item) for name, item in attributes)
    else:
        yield from _reduced_components(value, reduce)


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


def _reduced_components(value: object, reduce: Reduce | None) -> Iterator[tuple[str, object]]:
    try:
        # What pickle would take the value apart into: constructor, arguments, state, list items, dict items.
        reduction = reduce(value) if reduce is not None else NotImplemented
        if reduction is NotImplemented:
            reduction = value.__reduce_ex__(PROTOCOL)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - reported already: pickling `value` raised it, SystemExit perhaps
        return
    if not isinstance(reduction, tuple):
        return
    # Reductions have two to six elements. The missing ones are None.
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
    # Only for types whose `repr` is not user code.
    text = repr(key) if isinstance(key, str | bytes | int | float | tuple) else f"<{type(key).__qualname__}>"
    return text if len(text) <= _MAX_KEY_LENGTH else f"{text[:_MAX_KEY_LENGTH]}…"


_cell_numbers: dict[str, int] | None = None


def set_cell_numbers(numbers: dict[str, int]) -> None:
    """Use IPython's table of cell numbers by file name. Cells that arrive from other processes are added to it."""
    global _cell_numbers
    _cell_numbers = numbers


def cell_number(file: str) -> int | None:
    """Return the number of the cell with this file name, or None for any other file."""
    return None if _cell_numbers is None else _cell_numbers.get(file)


class CellSources:
    """The cells of one pickle, which contains their sources once."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def reduce(self, code: types.CodeType, plain: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the reduction `plain` of `code`, extended by the source of its cell if it comes from one.

        Also add the file's name if `plain` lacks it: cloudpickle omits it since version 3.1.3, and a traceback would
        show no line of the function.
        """
        source = self._source_of(code.co_filename)
        if not source and code.co_filename in plain[1]:
            return plain
        return restore_code, (code.co_filename, source, cell_number(code.co_filename) or 0, *plain)

    def _source_of(self, file: str) -> str:
        if file not in self._sources:
            match linecache.cache.get(file):
                # A file has a modification time in linecache, a cell has none. A lazy entry has other fields and does
                # not match.
                case (_, None, lines, _):  # linecache has no modification time for a source without a file
                    self._sources[file] = "".join(lines)
                case _:
                    self._sources[file] = ""
        return self._sources[file]


def restore_code(file: str, source: str, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """Return the code object `make(*args)` of `file`, and register the source of its cell for tracebacks."""
    # Without a modification time, so that `linecache.checkcache` does not drop the entry for want of a file.
    if source:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    if number and _cell_numbers is not None:
        _cell_numbers[file] = number
    code: types.CodeType = make(*args)
    return code if code.co_filename == file else code.replace(co_filename=file)


# Child processes of a rank -------------------------------------------------------------------------------------------

# The module `__main__` of a spawned child is empty, so functions and classes of cells must be pickled by value for it.
# For a forked child that would be wrong: it has them already, with the globals that it has changed and the locks that
# it has inherited, and `isinstance` and `except` compare classes by identity. But a queue does not tell the pickler
# which process will read from it. So before every fork the functions and classes in `__main__` get random numbers,
# which a forked child inherits. A pickle has both the number and the value, and the process that opens it takes its own
# object of that number if it has one. A function that a cell defines anew later has no number in an older child, which
# gets it by value.
_numbers: dict[int, bytes] = {}
"""The number of an object, by its address. It may be that of an earlier object at this address."""
_numbered: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
_has_spawned = False
"""True once this process has started a child that has not inherited the numbers."""


def number_cell_objects() -> None:
    """Number the functions and classes in `__main__` that have no number yet. Called before a fork."""
    main = vars(sys.modules["__main__"])
    namespaces = {id(main): main}  # by identity: to compare the dicts would compare the user's values
    # A function that has arrived in a pickle, as that of `notebook_launcher`, has globals of its own.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            namespaces[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    for value in [value for namespace in namespaces.values() for value in list(namespace.values())]:
        if _is_cell_object(value) and _number_of(value) is None:
            number = _numbers[id(value)] = uuid.uuid4().bytes
            _numbered[number] = value


def reduce_for_child(_pickler: object, value: object) -> Any:  # noqa: ANN401 - see pickle.Pickler.reducer_override
    """Reduce a function or class of `__main__` for a parent or child process, forked or spawned."""
    # Not with the module, which the notebook imports on every system, to say that it needs Linux or macOS.
    from multiprocessing.context import get_spawning_popen

    global _has_spawned
    _has_spawned = _has_spawned or get_spawning_popen() is not None
    if not _is_cell_object(value):
        return NotImplemented
    number = _number_of(value)
    if number is None or get_spawning_popen() is not None:
        return cloudpickle.loads, (cloudpickle.dumps(value),)
    problem = ""
    try:
        by_value = cloudpickle.dumps(value)
    except Exception as error:
        # A forked process needs only the number of a function that uses a lock, for example. A spawned process would
        # fail where it reads the pickle, and a Pool would wait for it without end.
        if _has_spawned:
            raise
        by_value, problem = b"", f"cannot pickle {value!r} by value: {type(error).__name__}: {error}"
    return restore_cell_object, (number, by_value, problem)


def restore_cell_object(number: bytes, by_value: bytes, problem: str) -> object:
    """Return this process's object of that number, or a copy. Raises `PicklingError` if there is neither."""
    value = _numbered.get(number)
    if value is not None:
        return value
    if problem:
        raise pickle.PicklingError(problem)
    return cloudpickle.loads(by_value)


def _number_of(value: object) -> bytes | None:
    number = _numbers.get(id(value))
    return number if number is not None and _numbered.get(number) is value else None


def _is_cell_object(value: object) -> bool:
    # Not `isinstance`, which asks the `__class__` of lazy proxies.
    return issubclass(type(value), (type, types.FunctionType)) and getattr(value, "__module__", None) == "__main__"
