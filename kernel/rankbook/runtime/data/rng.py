"""Random numbers: the global seed of a run, and independent seeds for every batch of a prepared loader.

A batch is read with generators seeded by a hash of (seed, epoch, number), where the number counts the batches of all
ranks. So no two ranks, workers, epochs or batches draw the same numbers, a batch does not depend on the number of
workers, and a resumed run draws what the uninterrupted run would have drawn. `BatchRng` seeds the generators, and
`find_generators` searches datasets and collate functions for generators of their own.

The rule: all generators that the dataset can reach draw from the batch's streams, whatever seed they were made with.
That includes those that the code of its functions and methods names: module globals, also in dicts, lists and transform
objects, and in the user's own modules. A generator that the dataset makes while it reads its first batch is found after
this batch, which is then read again (`BatchRng.read`). A warning says so if the search ends early. A generator that is
made anew in every call is not reachable between calls: with a fixed seed it draws the same numbers every time.

`set_seed` seeds the global generators of this process, and `synchronize_rng_states` copies generator states from rank 0
to all ranks. `random_state` returns the states of all global generators, for a checkpoint or a snapshot.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import random
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset, default_collate, default_convert, get_worker_info

from rankbook.control_collectives import control_device
from rankbook.errors import InvalidArgument
from rankbook.formatting import plural
from rankbook.runtime.state import AcceleratorState, PartialState

T = TypeVar("T")

_log = logging.getLogger(__name__)

MOST_ITEMS = 256
"""Of a longer list or dict, only this many items are searched, and all items that are generators themselves."""

MOST_OBJECTS = 20_000
"""Maximum number of objects visited in the search for generators."""


def stream_seed(*key: int | str) -> int:
    """Return 256 bits that depend on every part of `key`."""
    # `repr` keeps 1 and "1" apart, and parts of different lengths. Python's `hash` of a text differs between processes.
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=32).digest(), "big")


class BatchRng:
    """Seed the global generators of `random`, NumPy and PyTorch, and those held by `roots`, for one batch at a time.

    In the main process, whose user code also draws from these generators, their states are restored after the batch. In
    a worker they are not. Generators in `skip` are not touched.
    """

    def __init__(self, *roots: object, skip: tuple[object, ...] = ()) -> None:
        # Without roots nothing can draw, and the batch is read without touching any generator.
        self._roots = tuple(root for root in roots if not _draws_nothing(root))
        self._skip = skip
        self._generators: list[tuple[str, _Generator]] = []
        self._found: list[object] = []
        self._epoch: tuple[int | str, ...] = ()
        self._searches = 0
        self._warned = False

    @contextlib.contextmanager
    def seeded(self, *key: int | str) -> Iterator[None]:
        """Seed every generator from `key`, whose first two parts are the run's seed and the epoch."""
        if not self._roots:
            yield
            return
        self._search_in_time(key)
        # A worker runs no code but the dataset's, so its generators need not be restored.
        keep = get_worker_info() is None
        states = [generator.get_state() for _, generator in self._generators] if keep else []
        try:
            for name, generator in self._generators:
                generator.seed(stream_seed(*key, name))
            yield
        finally:
            for (_, generator), state in zip(self._generators, states, strict=False):
                generator.set_state(state)

    def read(self, function: Callable[..., T], argument: object, *key: int | str) -> T:
        """Return `function(argument)`, called with every generator seeded from `key`.

        If the first call of an epoch makes generators, it is repeated, because they have drawn from seeds of their own,
        which are the same on all ranks and workers.
        """
        # The first call of a pass may create generators, which it then draws from without our seed.
        with self.seeded(*key):
            result = function(argument)
        if self._roots and self._searches < 2:
            known = self._found
            self._search()
            if any(all(generator is not other for other in known) for generator in self._found):
                with self.seeded(*key):
                    result = function(argument)
        return result

    def iterate(self, items: Iterator[T], *key: int | str, first: int = 0) -> Iterator[T]:
        """Yield `items`, with generators seeded from `key` and the item's number, which counts from `first`."""
        for number in count(first):
            with self.seeded(*key, number):
                item = next(items, None)
            # No iterator in this package yields None, so it can stand for the end.
            if item is None:
                return
            yield item

    def iterate_as_one(self, items: Iterator[T], *key: int | str) -> Iterator[T]:
        """Yield `items`, drawn from one stream per generator, which is seeded from `key` and continues over all items.

        For code that is not called in a worker. The states of the generators are restored after every item.
        """
        states: dict[str, Any] = {}
        # `states` are the generators' states after the previous item. A generator that was found only now is seeded
        # from the key.
        while self._roots:
            self._search_in_time(key)
            before = [generator.get_state() for _, generator in self._generators]
            try:
                for name, generator in self._generators:
                    if name in states:
                        generator.set_state(states[name])
                    else:
                        generator.seed(stream_seed(*key, name))
                item = next(items, None)
                states = {name: generator.get_state() for name, generator in self._generators}
            finally:
                for (_, generator), state in zip(self._generators, before, strict=True):
                    generator.set_state(state)
            if item is None:
                return
            yield item
        yield from items

    def search_again(self) -> None:
        """Search the roots for further generators before the next batch."""
        self._searches = 0

    def _search_in_time(self, key: tuple[int | str, ...]) -> None:
        # A dataset may create generators late, in a worker or with its first sample: so search twice per epoch.
        if key[:2] != self._epoch:
            self._epoch, self._searches = key[:2], 0
        if self._searches < 2:
            self._search()

    def _search(self) -> None:
        self._searches += 1
        # By identity: generators of NumPy may compare in other ways.
        skip = {id(generator) for generator in self._skip}
        generators = [(path, value) for path, value in find_generators(*self._roots) if id(value) not in skip]
        if generators and generators[-1][1] is SEARCH_ENDED:
            generators.pop()
            self._warn()
        matches = [(path, _generator(value)) for path, value in generators]
        self._found = [value for _, value in generators]
        # The global generators come first, since nearly every dataset draws from them.
        self._generators = [*_GLOBAL, *[(path, generator) for path, generator in matches if generator is not None]]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the search for random generators in the dataset ended after {MOST_OBJECTS:,} objects. Generators "
                "that were not found may draw the same numbers on several ranks and workers: keep them in attributes "
                "of the dataset, or draw from the global generators of random, numpy or torch",
                stacklevel=2,
            )

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
        # 63 of the 256 bits: `manual_seed` takes a signed 64-bit number. Generators of devices are left alone.
        return _Generator(lambda seed: value.manual_seed(seed >> 193), value.get_state, value.set_state)
    if isinstance(value, np.random.RandomState):
        get_state = functools.partial(value.get_state, legacy=False)
        return _Generator(lambda seed: value.seed(_seed_words(seed)), get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        # A NumPy Generator cannot be seeded again. A new bit generator of the same kind is seeded, and its state
        # copied.
        bits = value.bit_generator
        set_state = functools.partial(setattr, bits, "state")
        return _Generator(lambda seed: set_state(type(bits)(_seed_words(seed)).state), lambda: bits.state, set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Generator(value.seed, value.getstate, value.setstate)
    return None


def _seed_words(seed: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(seed.to_bytes(32, "big"), dtype=np.uint32)


# While a batch is read, NumPy's global bit generator is replaced by one of ours: restoring the original object takes 1
# microsecond, restoring its 624 words 55. The replacement loses the second number of a normally distributed pair, which
# `randn` caches for its next call. So the full state is set if there is a cached number, or for nested batches.
_numpy: Any = np.random
_bits = np.random.MT19937(0)


def _seed_numpy(seed: int) -> None:
    _numpy.set_bit_generator(_bits)
    _numpy.seed(_seed_words(seed))


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


SEARCH_ENDED = object()
"""Last result of a search that ended early."""

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

# Instances of these modules' classes refer to large parts of the process, and hold no generators of a dataset.
_NOT_SEARCHED = {"logging", "threading", "multiprocessing", "asyncio", "concurrent", "weakref", "socket", "subprocess"}


def find_generators(*roots: object) -> Iterator[tuple[str, object]]:
    """Yield the random generators that `roots` hold, once per generator, with the path that leads to it.

    The search follows attributes, slots, lists and dicts, partial functions, bound methods, closures, and the global
    names used by functions and by the methods of the objects' classes, also through the user's own modules. If it ends
    early, after `MOST_OBJECTS` objects, the last pair is ("", SEARCH_ENDED).
    """
    seen: set[int] = set()
    # A stack: depth first, in the order of the attributes. The paths name generators in the seeds (`BatchRng.seeded`),
    # so the order and the paths must be the same on all ranks.
    waiting = [(str(number), root) for number, root in enumerate(roots)][::-1]
    while waiting and len(seen) < MOST_OBJECTS:
        path, value = waiting.pop()
        # Data, modules and classes are not searched. `seen` also ends cycles.
        if isinstance(value, _DATA) or id(value) in seen:
            continue
        seen.add(id(value))
        if _generator(value) is not None:
            yield path, value
        else:
            waiting += [(f"{path}.{name}", child) for name, child in _children(value)][::-1]
    # The limit was reached with objects left that could hold generators.
    if any(not isinstance(value, _DATA) and id(value) not in seen for _, value in waiting):
        yield "", SEARCH_ENDED


def _children(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return _items(value.items(), value.values(), len(value)) + _attributes(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _items(enumerate(value), value, len(value)) + _attributes(value)
    if isinstance(value, types.FunctionType):
        return _children_of_function(value)
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    children = _attributes(value)
    # The user's own base classes too: their methods name globals, and their class attributes may be generators.
    for cls in type(value).__mro__:
        if _is_library(cls.__module__):
            continue
        for name, member in vars(cls).items():
            # Static and class methods have `__func__`, properties have `fget`.
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(member, types.MemberDescriptorType):  # a slot
                children.append((name, getattr(value, name, None)))
            elif isinstance(function, types.FunctionType) or _generator(function) is not None:
                children.append((name, function))
    return children


def _attributes(value: object) -> list[tuple[object, object]]:
    if type(value).__module__.split(".", 1)[0] in _NOT_SEARCHED:
        return []
    return list(getattr(value, "__dict__", {}).items())


def _items(
    pairs: Iterable[tuple[object, object]], values: Iterable[object], length: int
) -> list[tuple[object, object]]:
    if length <= MOST_ITEMS:
        return list(pairs)
    # A list of millions of samples is not searched, but a long list of generators, such as one per sample, is.
    if any(issubclass(kind, _GENERATORS) for kind in set(map(type, values))):
        return [(name, value) for name, value in pairs if isinstance(value, _GENERATORS)]
    return list(islice(pairs, MOST_ITEMS))


def _children_of_function(function: types.FunctionType) -> list[tuple[object, object]]:
    if _is_library(function.__module__):
        return []
    # Example: the function `lambda row: JITTER(row) + helpers.noise.normal()` of a dataset names `JITTER`, an object in
    # its module that may hold a generator, and `helpers.noise`, a generator in another module of the user.
    children: list[tuple[object, object]] = [
        ("defaults", function.__defaults__),
        ("kwdefaults", function.__kwdefaults__),
        ("attributes", function.__dict__),
    ]
    # Variables of enclosing functions.
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            children.append((name, cell.cell_contents))
    # Global names and attribute names together: for `helpers.rng.random()` they are "helpers", "rng" and "random". Only
    # the user's own modules are followed by attribute.
    names = list(_names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            children.append((name, value))
        elif not _is_library(value.__name__):
            children += [
                (f"{name}.{attribute}", vars(value)[attribute]) for attribute in names if attribute in vars(value)
            ]
    return children


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that the code uses, also in comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_library(module: str | None) -> bool:
    """Return True for modules that draw from the global generators only."""
    return (module or "").split(".", 1)[0] in {"torch", "builtins", "numpy", "random", "collections", "abc", "typing"}


RNG_TYPES = ("generator", "torch", "cuda", "numpy", "python")
"""Generators that can be synchronized: the one of a loader's sampler, and the global ones of the libraries."""

_last_seed: int | None = None
_seeded: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""The positions of the loaders that have a seed since `set_seed`, by it. `skip_first_batches` shares the position."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch (all devices), and remember `seed` for the loaders.

    With `device_specific` every rank draws different numbers, seeded by a hash of (seed, rank); the seeds of the
    loaders still come from `seed` itself, so that all ranks agree on the order of samples. The ranks of a
    tensor-parallel group draw the same numbers, if the `Accelerator` with this mesh was made before: they compute on
    the same batch, and need the same dropout. `deterministic` also selects torch's deterministic algorithms.

    Example::

        set_seed(0)
        torch.rand(1).item() == torch.rand(1).item()  # False
        set_seed(0, device_specific=True)  # other numbers on every rank
    """
    global _last_seed
    _last_seed = seed
    _seeded.clear()
    # Accelerate adds the rank to the seed, which gives rank 1 of seed 0 the numbers of rank 0 of seed 1.
    rank_seed = stream_seed(seed, _batch_index(), "set_seed") >> 193 if device_specific else seed
    random.seed(rank_seed)
    # NumPy's seed has 32 bits.
    np.random.seed(rank_seed % 2**32)  # noqa: NPY002 - the global state has to be set
    torch.manual_seed(rank_seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _batch_index() -> int:
    """Return the index of this rank among those of different batches."""
    parallelism = AcceleratorState._shared_state.get("parallelism_config")
    # As in `StrategySetup.data_parallel_rank`: `tp` is the innermost axis of the mesh.
    return PartialState().process_index // (parallelism.non_data_parallel_size if parallelism is not None else 1)


def last_seed() -> int | None:
    """Return the last seed given to `set_seed` in this process."""
    return _last_seed


def run_seed() -> int:
    """Return the seed for a loader in this process: that of `set_seed`, otherwise torch's initial seed."""
    remembered = last_seed()
    # torch's initial seed is random unless the program has set it. With several ranks, rank 0's value is broadcast.
    return torch.initial_seed() if remembered is None else remembered


def loader_seed(position: object) -> int:
    """Return a seed for the loader at `position` that no other loader has: `run_seed()` for the first one.

    Two loaders over one dataset would otherwise give the same order, and draw the same numbers. A loader that is gone
    does not count.
    """
    seed = run_seed()
    seeds = (stream_seed(seed, "loader", number) >> 193 if number else seed for number in itertools.count())
    return next(candidate for candidate in seeds if _seeded.get(candidate, position) is position)


def note_loader_seed(position: object, seed: int) -> None:
    """Let no other loader have this seed, also if it comes from a checkpoint or from rank 0."""
    for other in [other for other, owner in _seeded.items() if owner is position and other != seed]:
        del _seeded[other]
    _seeded.setdefault(seed, position)


def check_rng_types(rng_types: Iterable[str] | None) -> list[str]:
    """Return `rng_types` as a list of names. Raises `InvalidArgument` for names that are not in `RNG_TYPES`."""
    if isinstance(rng_types, str):
        raise InvalidArgument(f"rng_types must be a list of names, got the string {rng_types!r}; pass [{rng_types!r}]")
    names = [str(getattr(rng_type, "value", rng_type)) for rng_type in rng_types or ()]
    unknown = [repr(name) for name in names if name not in RNG_TYPES]
    if unknown:
        noun = "rng type" if len(unknown) == 1 else "rng types"
        raise InvalidArgument(f"unknown {noun} {', '.join(unknown)}; choose from {', '.join(RNG_TYPES)}")
    return names


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of the generators `rng_types` to all ranks; "generator" means `generator`. A collective.

    Raises `InvalidArgument` for an unknown type and for "generator" without one, before anything is sent.

    Example::

        synchronize_rng_states(["torch"])
        gather(torch.rand(1)).unique().numel()  # 1
    """
    names = check_rng_types(rng_types)
    if "generator" in names and generator is None:
        raise InvalidArgument(
            "rng type 'generator' requires a generator: synchronize_rng_states(['generator'], generator)"
        )
    if not PartialState().use_distributed or not names:
        return
    # One message for all generators, from rank 0.
    message: list[Any] = [{name: _state(name, generator) for name in names} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0, device=control_device())
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


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and all CUDA devices."""
    # The keys of NumPy's Mersenne Twister are uint32, for which torch has only limited support. They are stored as an
    # int64 tensor, so that the checkpoint has no NumPy object in it.
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - user code draws from this state
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from a state returned by `random_state`."""
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    # The states are per device of the process. With another number of devices there is no correspondence between them.
    saved = len(state.get("cuda", ()))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved == devices and saved:
        torch.cuda.set_rng_state_all(state["cuda"])
    # The rank computes on one device, which may have another number by now. Older checkpoints do not name it.
    if devices and "cuda_device" in state:
        torch.cuda.set_rng_state(state["cuda"][state["cuda_device"]])
    elif saved != devices and saved:
        _log.warning(
            "the random states of %s are not restored: this process has %d", plural(saved, "CUDA device"), devices
        )
