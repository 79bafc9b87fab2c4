"""What an editor is told while a person types: which names may follow, and what a name is.

Owns: the answers, from the live namespace. Refuses: user code (members.py), the main thread, and to be slow: it is
imported before the rank is forked.
"""

from __future__ import annotations

import builtins
import pkgutil
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from rankbook.protocol.queries import (
    Answer,
    AskCompletions,
    AskInspection,
    Completion,
    CompletionsTold,
    Hint,
    InspectionTold,
)
from rankbook.rank.inspect import cursor_context, safe_introspection
from rankbook.rank.inspect.object_info import describe
from rankbook.rank.inspect.safe_introspection import Known
from rankbook.rank.inspect.tensor_introspection import is_a

MOST = 2000
"""Names in an answer."""
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    classmethod,
    staticmethod,
)
_PROPERTIES = (property, types.GetSetDescriptorType, types.MemberDescriptorType)


class Work(Protocol):
    """What the main thread has. Any thread."""

    def namespace(self) -> dict[str, object]:
        """A copy of the variables."""

    def hidden(self) -> Collection[str]:
        """The names that were there before any cell."""


class Guide:
    """Answers for `rank`."""

    def __init__(self, work: Work, rank: int) -> None:
        self._work = work
        self._rank = rank
        self._modules: tuple[str, ...] = ()

    def at_once(self, _question: Hint) -> None:
        """None is: each reads the person's objects."""

    def answer(self, question: Hint) -> Answer:
        """The answer; nothing found is an answer too."""
        if isinstance(question, AskInspection):
            return self._inspect(question)
        text = question.text[: question.cursor]
        begun, found = self._candidates(question, text[-cursor_context.MOST_TEXT :])
        matches = [
            Completion(name, _type_of(value))
            for name, value in sorted(found.items(), key=lambda item: (item[0].startswith("_"), item[0].lower()))
            if name.startswith(begun) and (begun.startswith("_") or not name.startswith("_"))
        ]
        return CompletionsTold(question.token, len(text) - len(begun), tuple(matches[:MOST]))

    def _inspect(self, question: AskInspection) -> InspectionTold:
        name = cursor_context.name_at(question.text, question.cursor)
        found = safe_introspection.follow(cursor_context.parse(name), self._work.namespace()) if name else None
        text = "" if found is None else describe(name, found, self._rank, source=question.source)
        return InspectionTold(question.token, text)

    def _candidates(self, question: AskCompletions, text: str) -> tuple[str, Mapping[str, Any]]:
        """What is written of a name, and the names that could be meant."""
        namespace = self._work.namespace()
        begun = cursor_context.word_before(text)
        before = text[: len(text) - len(begun)]
        if question.variables:
            hidden = self._work.hidden()
            return begun, {name: value for name, value in namespace.items() if name not in hidden}
        place = cursor_context.place_of(text)
        if place.comment:
            return begun, {}
        if place.quote is not None:
            return self._keys(text, place, namespace)
        if (importing := cursor_context.import_before(text)) is not None:
            package, name, written = importing
            return written, self._importable(package, modules_only=name is None)
        if before.rstrip().endswith("."):
            found = safe_introspection.follow(
                cursor_context.parse(cursor_context.expression_before(before.rstrip().removesuffix("."))), namespace
            )
            return begun, {} if found is None else safe_introspection.members(found)
        return begun, {**self._globals(text, namespace), **_parameters(before, place, namespace)}

    def _keys(
        self, text: str, place: cursor_context.Place, namespace: Mapping[str, Any]
    ) -> tuple[str, dict[str, types.SimpleNamespace | None]]:
        """Of `mapping["be|`: its keys. Of any other string: nothing."""
        assert place.quote is not None
        quote = text[place.quote]
        opened = place.brackets[-1] if place.brackets else -1
        if opened < 0 or text[opened] != "[" or text[opened + 1 : place.quote].strip():
            return "", {}
        found = safe_introspection.follow(
            cursor_context.parse(cursor_context.expression_before(text[:opened])), namespace
        )
        begun = text[place.quote + 1 :]
        keys = [
            each
            for each in safe_introspection.keys_of(found)
            if each.isprintable() and quote not in each and "\\" not in each
        ]
        return begun, dict.fromkeys(keys)

    def _importable(self, package: str, *, modules_only: bool) -> dict[str, Any]:
        if not package:
            if not self._modules:
                found = {each.name for each in pkgutil.iter_modules()} | set(sys.builtin_module_names)
                self._modules = tuple(sorted(found))
            return dict.fromkeys(self._modules, sys)
        module = sys.modules.get(package)
        if module is None:
            return {}
        there = safe_introspection.in_object(module)
        path = there.get("__path__")
        below = {each.name for each in pkgutil.iter_modules(path)} if is_a(path, list) else set()
        return {**({} if modules_only else there), **dict.fromkeys(below, sys)}

    def _globals(self, text: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **dict.fromkeys(cursor_context.KEYWORDS, _KEYWORD),
            **vars(builtins),
            **dict.fromkeys(cursor_context.names_made(text)),
            **namespace,
        }


class _Parameter:
    """Stands for `name=` of what is called."""


_KEYWORD = object()
_PARAMETER = _Parameter()


def _parameters(before: str, place: cursor_context.Place, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the function whose brackets are open, as `name=`."""
    if not place.brackets or before[place.brackets[-1]] != "(" or not before.rstrip().endswith(("(", ",")):
        return {}
    called = safe_introspection.follow(
        cursor_context.parse(cursor_context.expression_before(before[: place.brackets[-1]])), namespace
    )
    return {f"{name}=": _PARAMETER for name in _names_of_parameters(called)}


def _names_of_parameters(called: safe_introspection.Found) -> Iterable[str]:
    if not isinstance(called, Known):
        return ()
    value, skip = called.value, 1
    if is_a(value, types.MethodType):
        value = value.__func__
    elif is_a(value, types.FunctionType):
        skip = 0
    else:
        maker = safe_introspection.is_class(value)
        try:
            value = safe_introspection.in_class(value if maker else type(value), "__init__" if maker else "__call__")
        except KeyError:
            return ()
    value = safe_introspection.unwrapped(value)
    if type(value) is not types.FunctionType:
        return ()
    code = value.__code__
    return code.co_varnames[skip : code.co_argcount + code.co_kwonlyargcount]


def _type_of(value: object) -> str:
    if value is _KEYWORD:
        return "keyword"
    if value is _PARAMETER:
        return "param"
    kind = type(value)
    if safe_introspection.is_class(value):
        return "class"
    if issubclass(kind, types.ModuleType):
        return "module"
    if issubclass(kind, _FUNCTIONS):
        return "function"
    return "property" if issubclass(kind, _PROPERTIES) else "instance"
