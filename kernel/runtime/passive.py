"""Which code is known to draw no random number.

Owns: the proof, from torch's own classes and from the bytecode of a person's `__getitem__`. Refuses: to guess. What is
not proven may draw, and its streams are set.

A sample that is looked up in memory takes less time than the setting of a batch's streams. It is also what can be
proven: a method that reads plain data out of `self`, indexes it, calls a few known functions, and nothing else, has no
way to a random generator.
"""

from __future__ import annotations

import builtins
import dis
import types
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

MOST_ITEMS = 100_000
"""A container with more items than that is not looked through, and so not proven to be plain."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCALARS = frozenset({int, float, bool, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device})
_ARRAYS = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({list, tuple, set, frozenset})

_FUNCTIONS: tuple[Any, ...] = (int, float, bool, str, len, abs, min, max, round, sum, tuple, list, dict)
_OF_TORCH = frozenset({"tensor", "as_tensor", "from_numpy", "stack", "cat"})
_METHODS = _words("""
float double half bfloat16 int long bool to type astype item tolist numpy clone copy contiguous view reshape
flatten unsqueeze squeeze permute transpose expand sum mean div mul add sub shape dtype ndim size get
""")

_PLAIN_STEPS = _words("""
RESUME NOP CACHE PRECALL PUSH_NULL POP_TOP COPY SWAP LOAD_CONST LOAD_SMALL_INT STORE_FAST RETURN_VALUE
RETURN_CONST BINARY_SUBSCR BINARY_SLICE BINARY_OP COMPARE_OP IS_OP CONTAINS_OP UNARY_NOT UNARY_NEGATIVE
TO_BOOL UNPACK_SEQUENCE BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP BUILD_SLICE BUILD_STRING
FORMAT_VALUE FORMAT_SIMPLE CALL KW_NAMES CALL_KW JUMP_FORWARD POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE
POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE NOT_TAKEN
""")
_READS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST"}) | {
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "STORE_FAST_LOAD_FAST",
    "STORE_FAST_STORE_FAST",
}
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def cannot_draw(thing: Any) -> bool:  # noqa: ANN401 - a dataset, a collate function, None
    """Whether it is known that reading `thing`, or calling it, draws no number: its streams need not be set."""
    if thing is None or thing in (default_collate, default_convert):
        return True
    kind = type(thing)
    if kind is TensorDataset:
        return True
    if kind is Subset:
        return cannot_draw(thing.dataset)
    if kind is ConcatDataset:
        return all(cannot_draw(each) for each in thing.datasets)
    if kind is StackDataset:
        parts = thing.datasets.values() if isinstance(thing.datasets, dict) else thing.datasets
        return all(cannot_draw(each) for each in parts)
    return kind in {list, tuple, range} or _looks_up(thing)


def _looks_up(thing: Any) -> bool:  # noqa: ANN401 - a person's dataset
    """Whether it is a dataset whose `__getitem__` is proven to do no more than look plain data up."""
    kind = type(thing)
    method = kind.__dict__.get("__getitem__") or getattr(kind, "__getitem__", None)
    if not isinstance(thing, Dataset) or not isinstance(method, types.FunctionType):
        return False
    own_ideas = any("__getattribute__" in each.__dict__ for each in kind.__mro__[:-1])
    if own_ideas or hasattr(kind, "__getattr__") or hasattr(kind, "__getitems__"):
        return False
    names = names_read(method)
    if names is None:
        return False
    held = vars(thing)
    return all(name in held and not hasattr(kind, name) and is_plain(held[name]) for name in names)


def names_read(method: types.FunctionType) -> frozenset[str] | None:
    """The attributes of its first argument that `method` reads; None if it may do anything but compute with them."""
    code = method.__code__
    if code.co_argcount != 2 or code.co_flags & (0x04 | 0x08 | 0x20 | 0x80 | 0x200):  # *args, **kwargs, generators
        return None
    if code.co_freevars or code.co_cellvars or code.co_exceptiontable:
        return None
    own = code.co_varnames[0]
    steps = [each for each in dis.get_instructions(method) if each.opname not in {"CACHE", "EXTENDED_ARG"}]
    read: set[str] = set()
    for number, step in enumerate(steps):
        name = step.opname
        if name in _READS:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if own not in names:
                continue
            following = steps[number + 1]
            if names[-1] != own or names.count(own) > 1 or name.startswith("STORE"):
                return None
            if following.opname != "LOAD_ATTR":
                return None
            read.add(following.argval)
        elif name in _ATTRIBUTES:
            if not _known_attribute(steps[number - 1], step, own, method):
                return None
        elif name == "LOAD_GLOBAL":
            if not _known_global(step, steps[number + 1], method):
                return None
        elif name not in _PLAIN_STEPS or (name == "STORE_FAST" and step.argval == own):
            return None
    return frozenset(read)


def _known_attribute(before: dis.Instruction, step: dis.Instruction, own: str, method: types.FunctionType) -> bool:
    last = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
    if before.opname in _READS and last == own:
        return True  # what it is, is looked at by the caller
    if before.opname == "LOAD_GLOBAL" and method.__globals__.get(before.argval) is torch:
        return step.argval in _OF_TORCH or isinstance(getattr(torch, step.argval, None), torch.dtype)
    return step.argval in _METHODS


def _known_global(step: dis.Instruction, following: dis.Instruction, method: types.FunctionType) -> bool:
    missing = object()
    value = method.__globals__.get(step.argval, missing)
    if value is missing:
        usual = method.__globals__.get("__builtins__") in (builtins, vars(builtins))
        return usual and any(getattr(builtins, step.argval, missing) is each for each in _FUNCTIONS)
    if value is torch:
        return following.opname in _ATTRIBUTES
    return is_plain(value)


def is_plain(value: Any, depth: int = 6) -> bool:  # noqa: ANN401
    """Whether `value` is data: numbers, text, tensors, arrays, and containers of those, `depth` deep at most."""
    kind = type(value)
    if depth < 0:
        return False
    if kind in _SCALARS or kind in _ARRAYS:
        return True
    if kind is np.ndarray:
        return value.dtype.kind in "biufcSU"
    if kind is dict:
        return len(value) <= MOST_ITEMS and is_plain([*value], depth) and is_plain([*value.values()], depth)
    if kind in _CONTAINERS:
        if len(value) > MOST_ITEMS:
            return False
        return set(map(type, value)) <= _SCALARS or all(is_plain(each, depth - 1) for each in value)
    return issubclass(kind, np.number | np.bool_) and kind.__module__ == "numpy"
