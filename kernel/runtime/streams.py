"""Random streams: each batch draws from its own, derived by hashing.

Owns: how a stream's seed is derived, which generators a dataset can reach, and how all of them are set for a batch
and put back. Refuses: adding numbers to seeds, and keeping a stream from one batch to the next.

The key of a batch is (seed, epoch, number), and the number counts the batches of all ranks: so no two ranks, workers
or epochs share a stream, a batch does not depend on how many workers there are, and a run that is resumed draws what
it would have drawn.
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch

from rankbook.runtime.global_streams import Saved, global_streams
from rankbook.runtime.passive import cannot_draw

Key = tuple[int | str, ...]
T = TypeVar("T")

MOST_ITEMS = 256
"""A list or dict that is longer is data, and is not searched for generators."""

MOST_OBJECTS = 20_000
"""The search for generators ends after so many objects."""


def stream_seed(*key: int | str) -> int:
    """256 bits that depend on every part of `key`: (seed, epoch, rank, worker, stream), or any other names."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=32).digest(), "big")


def _words(seed: int) -> Any:  # noqa: ANN401 - eight uint32, as numpy's seeds are given
    return np.frombuffer(seed.to_bytes(32, "big"), dtype=np.uint32)


class _PythonStream:
    """One `random.Random`."""

    def __init__(self, source: Any) -> None:  # noqa: ANN401 - typed by its methods
        self._source = source

    def begin(self, seed: int) -> Any:  # noqa: ANN401 - opaque
        state = self._source.getstate()
        self._source.seed(seed)
        return state

    def seed(self, seed: int) -> None:
        self._source.seed(seed)

    def end(self, state: Any) -> None:  # noqa: ANN401
        self._source.setstate(state)


class _TorchStream:
    """One torch generator, on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def begin(self, seed: int) -> Any:  # noqa: ANN401
        state = self._generator.get_state()
        self._generator.manual_seed(seed >> 193)
        return state

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed >> 193)

    def end(self, state: Any) -> None:  # noqa: ANN401
        self._generator.set_state(state)


class _NumpyStream:
    """A `numpy.random.Generator`, or a `RandomState`."""

    def __init__(self, generator: Any) -> None:  # noqa: ANN401
        self._legacy = isinstance(generator, np.random.RandomState)
        self._generator = generator

    def begin(self, seed: int) -> Any:  # noqa: ANN401
        state = self._generator.get_state(legacy=False) if self._legacy else self._generator.bit_generator.state
        self.seed(seed)
        return state

    def seed(self, seed: int) -> None:
        if self._legacy:
            self._generator.seed(_words(seed))
        else:
            bits = self._generator.bit_generator
            bits.state = type(bits)(_words(seed)).state

    def end(self, state: Any) -> None:  # noqa: ANN401
        if self._legacy:
            self._generator.set_state(state)
        else:
            self._generator.bit_generator.state = state


_Saved = tuple[Saved, list[tuple[Any, Any]]]
Stream = _PythonStream | _TorchStream | _NumpyStream


def stream_of(thing: Any) -> Stream | None:  # noqa: ANN401 - any object
    """How to set the generator `thing`; None if it is none."""
    if isinstance(thing, np.random.Generator | np.random.RandomState):
        return _NumpyStream(thing)
    if isinstance(thing, torch.Generator):
        return _TorchStream(thing) if thing.device.type == "cpu" else None
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return _PythonStream(thing)
    return None


@dataclass
class Streams:
    """Every random stream that the code of `roots` can draw from: `random`, numpy's, torch's, and what it holds.

    `begin(key)` sets them all and returns what `end` puts back. With `keep=False`, in a process that has no other use
    for its state (a loader's worker), nothing is saved. `skip` are generators that are somebody else's.
    """

    roots: tuple[Any, ...]
    keep: bool = True
    skip: tuple[Any, ...] = ()
    _held: list[tuple[str, Stream]] = field(default_factory=list)
    _idle: bool = False
    _pass: Key = ()
    _looks: int = 0

    def begin(self, key: Key) -> _Saved | None:
        """Set every stream to the one of `key`."""
        if self._looks < 2 or key[:2] != self._pass:
            self._look(key)
        if self._idle:
            return None
        digest = hashlib.blake2b(repr(key).encode(), digest_size=40).digest()
        if not self.keep:
            global_streams().seed(digest)
            for name, stream in self._held:
                stream.seed(stream_seed(*key, name))
            return None
        held = [(stream, stream.begin(stream_seed(*key, name))) for name, stream in self._held]
        return global_streams().begin(digest), held

    def end(self, saved: _Saved | None) -> None:
        """Put back what `begin` found."""
        if saved is not None:
            global_streams().end(saved[0])
            for stream, state in saved[1]:
                stream.end(state)

    def over(self, items: Iterator[T], key: Key, first: int = 0) -> Iterator[T]:
        """`items`, each read with the streams at `key` and its number, which counts from `first`, however far ahead."""
        for number in count(first):
            saved = self.begin((*key, number))
            try:
                each = next(items, None)
            finally:
                self.end(saved)
            if each is None:
                return
            yield each

    def look_again(self) -> None:
        """What held the generators may hold others by now."""
        self._looks = 0

    def _look(self, key: Key) -> None:
        """Search again: a dataset may make its generators late, in a worker or with its first sample."""
        self._looks = self._looks + 1 if key[:2] == self._pass else 1
        self._pass = key[:2]
        self._idle = all(cannot_draw(root) for root in self.roots)
        if self._idle:
            return
        skip = {id(each) for each in self.skip}
        roots = tuple(root for root in self.roots if not cannot_draw(root))
        found = [(name, stream_of(each)) for name, each in find_generators(roots) if id(each) not in skip]
        self._held = [(name, stream) for name, stream in found if stream is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, (self.roots, self.keep, self.skip)


_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic, types.ModuleType)


def find_generators(roots: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The random generators that `roots` hold, each once, by the path that leads to it.

    Looks into attributes, slots, short lists and dicts, partial functions, bound methods, closures, and the global
    names that the functions and the methods of the objects' classes use. Looks into no tensor, array or module.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(f"{number}", root) for number, root in enumerate(roots)][::-1]
    while waiting and len(seen) < MOST_OBJECTS:
        path, thing = waiting.pop()
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if stream_of(thing) is not None:
            yield path, thing
        else:
            waiting += [(f"{path}.{name}", each) for name, each in _parts(thing) if id(each) not in seen][::-1]


def _parts(thing: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    if isinstance(thing, Mapping):
        return [(str(name), each) for name, each in thing.items()] if len(thing) <= MOST_ITEMS else []
    if isinstance(thing, list | tuple | set | frozenset):
        return [(str(number), each) for number, each in enumerate(thing)] if len(thing) <= MOST_ITEMS else []
    if isinstance(thing, types.FunctionType):
        return [] if _is_library(thing.__module__) else _parts_of_function(thing)
    if isinstance(thing, types.MethodType):
        return [("self", thing.__self__), ("function", thing.__func__)]
    if isinstance(thing, functools.partial):
        return [("func", thing.func), ("args", thing.args), ("keywords", thing.keywords)]
    if isinstance(thing, type):
        return []
    parts = list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += [(name, getattr(thing, name)) for name in names if hasattr(thing, name) and name != "__dict__"]
        if not _is_library(kind.__module__):
            parts += [part for name, each in kind.__dict__.items() for part in _parts_of_member(name, each)]
    return parts


def _is_library(module: str | None) -> bool:
    """Whether it is code whose generators are known: the global ones."""
    return (module or "").split(".", 1)[0] in {"torch", "builtins", "numpy", "random", "collections", "abc", "typing"}


def _parts_of_member(name: str, member: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    member = getattr(member, "__func__", getattr(member, "fget", member))
    if isinstance(member, types.FunctionType):
        return [(f"{name}.{inner}", each) for inner, each in _parts_of_function(member)]
    return [(name, member)] if stream_of(member) is not None else []


def _parts_of_function(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    assert isinstance(function, types.FunctionType)
    parts = [("defaults", function.__defaults__), ("attributes", function.__dict__)]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            parts.append((name, cell.cell_contents))
        except ValueError:  # a name that has no value yet
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if stream_of(value) is not None or isinstance(value, types.FunctionType):
            parts.append((name, value))
    return parts
