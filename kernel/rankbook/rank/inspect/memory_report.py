"""Which variables hold the memory.

Owns: the search for tensors and arrays from a namespace's names, through modules, optimizers, containers and
attributes. Refuses: to run user code on its way (no properties, no iterators of theirs), to go on for long, and to keep
anything that it found.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

DEEPEST = 12
"""Steps from a variable to what it holds: `model.layers[0].attention.query.weight` takes seven."""
MOST_OBJECTS = 100_000
"""Objects that are looked at; that takes a fifth of a second."""
_MOST_ITEMS = 10_000
_VARIABLE = re.compile(r"(?:[^.[{]*\(\): )?\w+")
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, FunctionType)
_OPAQUE = (*_PLAIN, BuiltinFunctionType)


@dataclass(frozen=True)
class Holding:
    """One storage, by the shortest name that leads to it, with the shape of the tensor found there."""

    name: str
    size: int
    shape: tuple[int, ...]
    dtype: str
    device: str

    @property
    def variable(self) -> str:
        """The variable that the name begins with, and before it the function, if it is one of a function's."""
        found = _VARIABLE.match(self.name)
        return found[0] if found else self.name


@dataclass
class Found:
    """All of it, the largest first. `complete`: nothing was left out for being too deep or too much."""

    holdings: list[Holding] = field(default_factory=list)
    complete: bool = True

    @property
    def size(self) -> int:
        """Bytes of all holdings."""
        return sum(each.size for each in self.holdings)


def find_holdings(
    namespace: Mapping[str, object], *, device: str | None = None, most_objects: int = MOST_OBJECTS
) -> Found:
    """The storages that `namespace`'s names lead to, each once; those on `device` (`cpu`, `cuda:0`), or all."""
    return _Search(most_objects).run(namespace, device)


class _Search:
    """Breadth first, so that of several names of a tensor the shortest is found."""

    def __init__(self, most_objects: int) -> None:
        self._left = most_objects
        self._seen: dict[int, object] = {}  # with the objects, for a dead one's number may be given to another
        self._storages: dict[tuple[str, int], Holding] = {}
        self._names: dict[int, str] = {}
        self._queue: deque[tuple[str, object, int]] = deque()
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._complete = True

    def run(self, namespace: Mapping[str, object], device: str | None) -> Found:
        self._enqueue(dict(namespace).items(), 0)
        self._work()
        for name, optimizer in self._optimizers:  # last, for its parameters have better names by then
            self._enqueue(self._optimizer_parts(name, optimizer), 1)
            self._work()
        holdings = [each for each in self._storages.values() if device in (None, each.device)]
        return Found(sorted(holdings, key=lambda each: -each.size), self._complete)

    def _enqueue(self, parts: Any, depth: int) -> None:  # noqa: ANN401 - pairs of a name and anything
        for name, value in parts:
            self._left -= 1
            if self._left < 0:
                self._complete = False
                return
            if not issubclass(type(value), _OPAQUE) and id(value) not in self._seen:
                if depth > DEEPEST:
                    self._complete = False
                    continue
                self._seen[id(value)] = value
                self._queue.append((name, value, depth))

    def _work(self) -> None:
        while self._queue:
            name, value, depth = self._queue.popleft()
            kind = type(value)  # isinstance would ask a proxy what it stands for
            if issubclass(kind, torch.optim.Optimizer):
                self._optimizers.append((name, value))  # type: ignore[arg-type]
            else:
                self._enqueue(self._parts(name, value, kind), depth + 1)

    def _parts(self, name: str, value: Any, kind: type) -> Iterator[tuple[str, object]]:  # noqa: ANN401 - anything
        if issubclass(kind, torch.Tensor):
            yield from self._tensor_parts(name, value)
        elif issubclass(kind, numpy.ndarray):
            self._add_array(name, value)
        elif issubclass(kind, dict):
            yield from ((f"{name}[{_key(key)}]", item) for key, item in self._first(dict.items(value)))
        elif issubclass(kind, (list, tuple, deque)):
            yield from _with_index(name, self._first(_iterator(kind)(value)))
        elif issubclass(kind, (set, frozenset)):
            yield from ((f"{name}{{…}}", item) for item in self._first(_iterator(kind)(value)))
        if issubclass(kind, torch.nn.Module):
            yield from _module_parts(name, value)
        yield from ((f"{name}.{each}", item) for each, item in _attributes(value))

    def _first(self, items: Iterable[Any]) -> list[Any]:
        first = list(islice(items, _MOST_ITEMS + 1))  # in one go: another thread may add to it
        if len(first) > _MOST_ITEMS:
            self._complete = False
        return first[:_MOST_ITEMS]

    def _tensor_parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
        self._names[id(tensor)] = name
        flatten = getattr(type(tensor), "__tensor_flatten__", None)
        if flatten is not None:  # a DTensor, or another that only wraps the tensors that have the memory
            for each in flatten(tensor)[0]:
                yield name if each == "_local_tensor" else f"{name}.{each}", getattr(tensor, each)
        elif tensor.layout is torch.strided:
            self._add_tensor(name, tensor)
        else:
            yield from ((f"{name}.{part}", piece) for part, piece in _sparse_parts(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            yield f"{name}.grad", tensor.grad

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
        except RuntimeError:  # of a kind that has none: fake, functional, in a transform
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._add(name, pointer, storage.nbytes(), tuple(tensor.shape), dtype, str(tensor.device))

    def _add_array(self, name: str, array: numpy.ndarray[Any, Any]) -> None:
        while issubclass(type(array.base), numpy.ndarray):
            array = array.base  # type: ignore[assignment]
        pointer = array.__array_interface__["data"][0]
        self._add(name, pointer, array.nbytes, tuple(array.shape), str(array.dtype), "cpu")

    def _add(self, name: str, pointer: int, size: int, shape: tuple[int, ...], dtype: str, device: str) -> None:
        if size and pointer and device != "meta":
            self._storages.setdefault((device, pointer), Holding(name, size, shape, dtype, device))

    def _optimizer_parts(self, name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
        """Named by the parameter that each state belongs to: `optimizer.state[model.weight]['exp_avg']`."""
        for number, (parameter, state) in enumerate(dict.items(optimizer.state)):
            yield f"{name}.state[{self._names.get(id(parameter), number)}]", state
        yield f"{name}.param_groups", optimizer.param_groups
        yield from ((f"{name}.{each}", item) for each, item in _attributes(optimizer) if each != "state")


def _iterator(kind: type) -> Any:  # noqa: ANN401 - a method of whichever container
    """The container's own way to iterate, whatever a subclass of the user's made of it."""
    return next(base for base in (list, tuple, deque, set, frozenset) if issubclass(kind, base)).__iter__


def _with_index(name: str, items: Iterable[Any]) -> Iterator[tuple[str, object]]:
    return ((f"{name}[{index}]", item) for index, item in enumerate(items))


def _key(key: object) -> str:
    if isinstance(key, (str, int, float, bool)):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:37]}…"
    return "…"


def _module_parts(name: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for kind in ("_parameters", "_buffers"):
        yield from ((f"{name}.{each}", item) for each, item in _own(module, kind).items())
    numbered = issubclass(type(module), (torch.nn.Sequential, torch.nn.ModuleList))
    keyed = issubclass(type(module), torch.nn.ModuleDict)
    for each, item in _own(module, "_modules").items():
        yield f"{name}[{each}]" if numbered else f"{name}[{each!r}]" if keyed else f"{name}.{each}", item


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """What is in the instance itself, in its dict and its slots; a module's own parts are told by `_module_parts`."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        own = {}
    if issubclass(type(own), dict):
        yield from ((str(each), item) for each, item in list(dict.items(own)) if each not in _OF_MODULES)
    for kind in type(value).__mro__:
        for slot, descriptor in list(vars(kind).items()):
            if type(descriptor) is _MEMBER:
                try:
                    yield slot, descriptor.__get__(value)
                except AttributeError:  # not set
                    continue


def _own(module: torch.nn.Module, name: str) -> dict[str, object]:
    found = object.__getattribute__(module, "__dict__").get(name)
    return found if issubclass(type(found), dict) else {}


def _sparse_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.layout is torch.sparse_coo:
        yield "values()", tensor._values()
        yield "indices()", tensor._indices()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield "values()", tensor.values()
        yield "crow_indices()", tensor.crow_indices()
        yield "col_indices()", tensor.col_indices()


class _Slotted:
    __slots__ = ("slot",)


_MEMBER = type(vars(_Slotted)["slot"])
_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules"))
