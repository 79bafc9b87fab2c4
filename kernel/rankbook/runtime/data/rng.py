"""Random numbers: the global seed of a run, and independent seeds for every batch of a prepared loader.

A batch is read with generators seeded by a hash of (seed, epoch, number), where the number counts the batches of all
ranks. So no two ranks, workers, epochs or batches draw the same numbers, a batch does not depend on the number of
workers, and a resumed run draws what the uninterrupted run would have drawn. `BatchRng` seeds the generators, and
`find_generators` searches datasets and collate functions for generators of their own.

`set_seed` seeds the global generators of this process, and `synchronize_rng_states` copies generator states from rank 0
to all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset, default_collate, default_convert, get_worker_info

from rankbook.errors import BadRequest
from rankbook.runtime.comm import consistency
from rankbook.runtime.process_state import PartialState

T = TypeVar("T")

MOST_ITEMS = 256
"""A longer list or dict is considered data, and not searched for generators."""

MOST_OBJECTS = 20_000
"""Maximum number of objects visited in the search for generators."""


def stream_seed(*key: int | str) -> int:
    """Return 256 bits that depend on every part of `key`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=32).digest(), "big")


class BatchRng:
    """Seed the global generators of `random`, NumPy and PyTorch, and those held by `roots`, for one batch at a time.

    In the main process, whose user code also draws from these generators, their states are restored after the batch. In
    a worker they are not. Generators in `skip` are not touched.
    """

    def __init__(self, *roots: object, skip: tuple[object, ...] = ()) -> None:
        self._roots = tuple(root for root in roots if not _draws_nothing(root))
        self._skip = skip
        self._generators: list[tuple[str, _Generator]] = []
        self._epoch: tuple[int | str, ...] = ()
        self._searches = 0

    @contextlib.contextmanager
    def seeded(self, *key: int | str) -> Iterator[None]:
        """Seed every generator from `key`, whose first two parts are the run's seed and the epoch."""
        if not self._roots:
            yield
            return
        # A dataset may create generators late, in a worker or with its first sample: so search twice per epoch.
        if key[:2] != self._epoch:
            self._epoch, self._searches = key[:2], 0
        if self._searches < 2:
            self._search()
        keep = get_worker_info() is None
        states = [generator.get_state() for _, generator in self._generators] if keep else []
        try:
            for name, generator in self._generators:
                generator.seed(stream_seed(*key, name))
            yield
        finally:
            for (_, generator), state in zip(self._generators, states, strict=False):
                generator.set_state(state)

    def iterate(self, items: Iterator[T], *key: int | str, first: int = 0) -> Iterator[T]:
        """Yield `items`, with generators seeded from `key` and the item's number, which counts from `first`."""
        for number in count(first):
            with self.seeded(*key, number):
                item = next(items, None)
            if item is None:
                return
            yield item

    def search_again(self) -> None:
        """Search the roots for further generators before the next batch."""
        self._searches = 0

    def _search(self) -> None:
        self._searches += 1
        skip = {id(generator) for generator in self._skip}
        matches = [
            (name, _generator(candidate))
            for name, candidate in find_generators(*self._roots)
            if id(candidate) not in skip
        ]
        self._generators = [*_GLOBAL, *[(name, generator) for name, generator in matches if generator is not None]]

    def __reduce__(self) -> tuple[Any, ...]:  # the generators found belong to this process
        return functools.partial(BatchRng, skip=self._skip), self._roots


def _draws_nothing(root: object) -> bool:
    return root is default_collate or root is default_convert or type(root) in {TensorDataset, list, tuple, range}


class _Generator(NamedTuple):
    """The functions of a random number generator, under one name for every library."""

    seed: Callable[[int], Any]
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


def _generator(value: object) -> _Generator | None:
    """Return the functions of the generator `value`; None if it is not one that can be seeded here."""
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return _Generator(lambda seed: value.manual_seed(seed >> 193), value.get_state, value.set_state)
    if isinstance(value, np.random.RandomState):
        get_state = functools.partial(value.get_state, legacy=False)
        return _Generator(lambda seed: value.seed(_words(seed)), get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        set_state = functools.partial(setattr, bits, "state")
        return _Generator(lambda seed: set_state(type(bits)(_words(seed)).state), lambda: bits.state, set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Generator(value.seed, value.getstate, value.setstate)
    return None


def _words(seed: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(seed.to_bytes(32, "big"), dtype=np.uint32)


# While a batch is read, NumPy's global bit generator is replaced by one of ours: restoring the original object takes 1
# microsecond, restoring its 624 words 55. The replacement loses the second number of a normally distributed pair, which
# `randn` caches for its next call. So the full state is set if there is a cached number, or for nested batches.
_numpy: Any = np.random
_bits = np.random.MT19937(0)


def _seed_numpy(seed: int) -> None:
    _numpy.set_bit_generator(_bits)
    _numpy.seed(_words(seed))


def _numpy_state() -> tuple[object, dict[str, Any]]:
    return _numpy.get_bit_generator(), _numpy.get_state(legacy=False)


def _set_numpy_state(saved: tuple[object, dict[str, Any]]) -> None:
    bits, state = saved
    _numpy.set_bit_generator(bits)
    if bits is _bits or state["has_gauss"]:
        _numpy.set_state(state)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed >> 193)


_GLOBAL = (
    ("random", _Generator(random.seed, random.getstate, random.setstate)),
    ("numpy", _Generator(_seed_numpy, _numpy_state, _set_numpy_state)),
    ("torch", _Generator(_seed_torch, torch.default_generator.get_state, torch.default_generator.set_state)),
)

_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic, types.ModuleType, type)


def find_generators(*roots: object) -> Iterator[tuple[str, object]]:
    """Yield the random generators that `roots` hold, once per generator, with the path that leads to it.

    The search follows attributes, slots, short lists and dicts, partial functions, bound methods, closures, and the
    global names used by functions and by the methods of the objects' classes.
    """
    seen: set[int] = set()
    waiting = [(str(number), root) for number, root in enumerate(roots)][::-1]
    while waiting and len(seen) < MOST_OBJECTS:
        path, value = waiting.pop()
        if isinstance(value, _DATA) or id(value) in seen:
            continue
        seen.add(id(value))
        if _generator(value) is not None:
            yield path, value
        else:
            waiting += [(f"{path}.{name}", child) for name, child in _children(value)][::-1]


def _children(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= MOST_ITEMS else []
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value)) if len(value) <= MOST_ITEMS else []
    if isinstance(value, types.FunctionType):
        return _children_of_function(value)
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    children: list[tuple[object, object]] = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        if _is_library(cls.__module__):
            continue
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(member, types.MemberDescriptorType):  # a slot
                children.append((name, getattr(value, name, None)))
            elif isinstance(function, types.FunctionType) or _generator(function) is not None:
                children.append((name, function))
    return children


def _children_of_function(function: types.FunctionType) -> list[tuple[object, object]]:
    if _is_library(function.__module__):
        return []
    children: list[tuple[object, object]] = [
        ("defaults", function.__defaults__),
        ("kwdefaults", function.__kwdefaults__),
        ("attributes", function.__dict__),
    ]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            children.append((name, cell.cell_contents))
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) or _generator(value) is not None:
            children.append((name, value))
    return children


def _is_library(module: str | None) -> bool:
    """Return True for modules that draw from the global generators only."""
    return (module or "").split(".", 1)[0] in {"torch", "builtins", "numpy", "random", "collections", "abc", "typing"}


RNG_TYPES = ("generator", "torch", "cuda", "numpy", "python")

_remembered: int | None = None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch (all devices), and remember `seed` for the loaders.

    With `device_specific` every rank draws different numbers, seeded by a hash of (seed, rank); the loaders still use
    `seed` itself, so that all ranks agree on the order of samples. `deterministic` also selects torch's deterministic
    algorithms.
    """
    global _remembered
    _remembered = seed
    rank_seed = stream_seed(seed, PartialState().process_index, "set_seed") >> 193 if device_specific else seed
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)  # noqa: NPY002 - the global state has to be set
    torch.manual_seed(rank_seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def remembered_seed() -> int | None:
    """Return the last seed given to `set_seed` in this process."""
    return _remembered


def run_seed() -> int:
    """Return the seed for a loader in this process: that of `set_seed`, otherwise torch's initial seed."""
    remembered = remembered_seed()
    return torch.initial_seed() if remembered is None else remembered


def check_rng_types(rng_types: Iterable[str] | None) -> list[str]:
    """Return `rng_types` as a list of names. Raises `BadRequest` for a name that is not in `RNG_TYPES`."""
    names = [str(getattr(rng_type, "value", rng_type)) for rng_type in rng_types or ()]
    for name in names:
        if name not in RNG_TYPES:
            raise BadRequest(f"rng type {name!r} is not known; use one of {', '.join(map(repr, RNG_TYPES))}")
    return names


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of the generators `rng_types` to all ranks; "generator" means `generator`. A collective.

    Raises `BadRequest` for an unknown type and for "generator" without one, before anything is sent.
    """
    names = check_rng_types(rng_types)
    if "generator" in names and generator is None:
        raise BadRequest("rng type 'generator' asks for a generator: synchronize_rng_states(['generator'], generator)")
    if not PartialState().use_distributed or not names:
        return
    message: list[Any] = [{name: _state(name, generator) for name in names} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0, device=consistency.control_device())
    for name, state in message[0].items():
        _set_state(name, state, generator)


def _state(name: str, generator: torch.Generator | None) -> Any:  # noqa: ANN401 - the type depends on the generator
    if name == "generator":
        assert generator is not None
        return generator.get_state()
    if name == "torch":
        return torch.get_rng_state()
    if name == "cuda":
        return torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return np.random.get_state(legacy=False) if name == "numpy" else random.getstate()  # noqa: NPY002


def _set_state(name: str, state: Any, generator: torch.Generator | None) -> None:  # noqa: ANN401
    if name == "generator":
        assert generator is not None
        generator.set_state(state)
    elif name == "torch":
        torch.set_rng_state(state)
    elif name == "cuda":
        if state is not None:
            torch.cuda.set_rng_state(state)
    elif name == "numpy":
        np.random.set_state(state)  # noqa: NPY002
    else:
        random.setstate(state)
