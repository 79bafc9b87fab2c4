"""What in a value cannot be pickled, and where in it that is.

Owns: the search, which is bounded, and its words. Refuses: to know how a value is pickled; it is told what fails.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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


def cannot_send(value: object, names: Sequence[str], error: BaseException, attempt: Attempt) -> str:
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
