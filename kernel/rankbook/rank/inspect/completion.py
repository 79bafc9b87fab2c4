"""Code completion and inspection from the live namespace.

`CompletionHandler` answers the requests of an editor. It runs no user code (see `safe_introspection.py`) and works
beside the main thread. The second part analyzes the text before the cursor: open strings and brackets, the expression
before a dot, imports. The module is imported before the rank is forked, so it must stay light.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import pkgutil
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rankbook.protocol.queries import (
    Answer,
    Completion,
    CompletionsReply,
    GetCompletions,
    GetInspection,
    Hint,
    InspectionReply,
)
from rankbook.rank.inspect import (
    safe_introspection,
)
from rankbook.rank.inspect.object_info import describe_object
from rankbook.rank.inspect.safe_introspection import KnownValue
from rankbook.rank.inspect.tensor_introspection import is_a

MOST = 2000
"""Maximum number of names in an answer."""
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


class CompletionSource(Protocol):
    """Interface of the main thread's namespace. Any thread."""

    def namespace(self) -> dict[str, object]:
        """Return a copy of the variables."""

    def hidden(self) -> Collection[str]:
        """Return the names that were defined before any cell."""


class CompletionHandler:
    """Answers completion and inspection requests for `rank`."""

    def __init__(self, work: CompletionSource, rank: int) -> None:
        self._work = work
        self._rank = rank
        self._modules: tuple[str, ...] = ()

    def at_once(self, _question: Hint) -> None:
        """Return None: every request reads the user's objects and is answered on the query thread."""

    def answer(self, question: Hint) -> Answer:
        """Answer a request; finding nothing is an answer as well."""
        if isinstance(question, GetInspection):
            return self._inspect(question)
        text = question.text[: question.cursor]
        begun, candidates = self._candidates(question, text[-MOST_TEXT:])
        matches = [
            Completion(name, _type_of(value))
            for name, value in sorted(candidates.items(), key=lambda item: (item[0].startswith("_"), item[0].lower()))
            if name.startswith(begun) and (begun.startswith("_") or not name.startswith("_"))
        ]
        return CompletionsReply(question.token, len(text) - len(begun), tuple(matches[:MOST]))

    def _inspect(self, question: GetInspection) -> InspectionReply:
        name = name_at(question.text, question.cursor)
        target = safe_introspection.resolve_expression(parse(name), self._work.namespace()) if name else None
        text = "" if target is None else describe_object(name, target, self._rank, source=question.source)
        return InspectionReply(question.token, text)

    def _candidates(self, question: GetCompletions, text: str) -> tuple[str, Mapping[str, Any]]:
        """Return the part of the name before the cursor, and the possible names."""
        namespace = self._work.namespace()
        begun = word_before(text)
        before = text[: len(text) - len(begun)]
        if question.variables:
            hidden = self._work.hidden()
            return begun, {name: value for name, value in namespace.items() if name not in hidden}
        context = cursor_context(text)
        if context.comment:
            return begun, {}
        if context.quote is not None:
            return self._keys(text, context, namespace)
        if (importing := import_at(text)) is not None:
            package, name, written = importing
            return written, self._importable(package, modules_only=name is None)
        if before.rstrip().endswith("."):
            target = safe_introspection.resolve_expression(
                parse(expression_before(before.rstrip().removesuffix("."))), namespace
            )
            return begun, {} if target is None else safe_introspection.list_members(target)
        return begun, {**self._globals(text, namespace), **_parameters(before, context, namespace)}

    def _keys(
        self, text: str, place: CursorContext, namespace: Mapping[str, Any]
    ) -> tuple[str, dict[str, types.SimpleNamespace | None]]:
        """Return the keys of `mapping` for `mapping["be|`; nothing for any other string."""
        assert place.quote is not None
        quote = text[place.quote]
        opened = place.brackets[-1] if place.brackets else -1
        if opened < 0 or text[opened] != "[" or text[opened + 1 : place.quote].strip():
            return "", {}
        mapping = safe_introspection.resolve_expression(parse(expression_before(text[:opened])), namespace)
        begun = text[place.quote + 1 :]
        keys = [
            key
            for key in safe_introspection.keys_of(mapping)
            if key.isprintable() and quote not in key and "\\" not in key
        ]
        return begun, dict.fromkeys(keys)

    def _importable(self, package: str, *, modules_only: bool) -> dict[str, Any]:
        if not package:
            if not self._modules:
                names = {info.name for info in pkgutil.iter_modules()} | set(sys.builtin_module_names)
                self._modules = tuple(sorted(names))
            return dict.fromkeys(self._modules, sys)
        module = sys.modules.get(package)
        if module is None:
            return {}
        attributes = safe_introspection.instance_attribute(module)
        path = attributes.get("__path__")
        below = {info.name for info in pkgutil.iter_modules(path)} if is_a(path, list) else set()
        return {**({} if modules_only else attributes), **dict.fromkeys(below, sys)}

    def _globals(self, text: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **dict.fromkeys(KEYWORDS, _KEYWORD),
            **vars(builtins),
            **dict.fromkeys(assigned_names(text)),
            **namespace,
        }


class _Parameter:
    """Marker for `name=` of a called function."""


_KEYWORD = object()
_PARAMETER = _Parameter()


def _parameters(before: str, place: CursorContext, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the function whose bracket is open, as `name=`."""
    if not place.brackets or before[place.brackets[-1]] != "(" or not before.rstrip().endswith(("(", ",")):
        return {}
    called = safe_introspection.resolve_expression(parse(expression_before(before[: place.brackets[-1]])), namespace)
    return {f"{name}=": _PARAMETER for name in _names_of_parameters(called)}


def _names_of_parameters(called: safe_introspection.Found) -> Iterable[str]:
    if not isinstance(called, KnownValue):
        return ()
    value, skip = called.value, 1
    if is_a(value, types.MethodType):
        value = value.__func__
    elif is_a(value, types.FunctionType):
        skip = 0
    else:
        maker = safe_introspection.is_class(value)
        try:
            value = safe_introspection.class_attribute(
                value if maker else type(value), "__init__" if maker else "__call__"
            )
        except KeyError:
            return ()
    value = safe_introspection.unwrap_object(value)
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


MOST_TEXT = 50_000
"""Maximum characters before the cursor that are analyzed."""

_CLOSES = {")": "(", "]": "[", "}": "{"}
_IMPORT = re.compile(r"^\s*import\s+(?:.*,\s*)?([\w.]*)\Z")
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+\(?(?:.*,\s*)?(\w*)\Z")
_FROM_WHERE = re.compile(r"^\s*from\s+([\w.]*)\Z")
_MADE = re.compile(
    r"\b(?:def|class|as|for|import)\s+([^\W\d]\w*)|^[ \t]*([^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE
)
BUILTINS = tuple(sorted(name for name in vars(builtins) if not name.startswith("_")))
KEYWORDS = tuple(sorted(keyword.kwlist))


@dataclass(frozen=True)
class CursorContext:
    """The state at the cursor: the start of an open string, open brackets, or a comment."""

    quote: int | None
    brackets: tuple[int, ...]
    comment: bool


def cursor_context(text: str) -> CursorContext:
    """Return the state at the end of `text`."""
    brackets: list[int] = []
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        if char == "#":
            newline = text.find("\n", at)
            if newline < 0:
                return CursorContext(None, tuple(brackets), comment=True)
            at = newline
        elif char in "'\"":
            closed = _end_of_string(text, at)
            if closed is None:
                return CursorContext(at, tuple(brackets), comment=False)
            at = closed
            continue
        elif char in "([{":
            brackets.append(at)
        elif char in _CLOSES and brackets and text[brackets[-1]] == _CLOSES[char]:
            brackets.pop()
        at += 1
    return CursorContext(None, tuple(brackets), comment=False)


def _end_of_string(text: str, start: int) -> int | None:
    """Return the end of the string that begins at `start`, or None if it is open.

    A string in single quotes without a closing quote ends at the end of its line.
    """
    quote = text[start] * 3 if text.startswith(text[start] * 3, start) else text[start]
    at = start + len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        elif text[at] == "\n" and len(quote) == 1:
            return at
        else:
            at += 1
    return None


def word_before(text: str) -> str:
    """Return the incomplete name at the end of `text`."""
    at = len(text)
    while at and (text[at - 1].isalnum() or text[at - 1] == "_"):
        at -= 1
    return "" if text[at : at + 1].isdigit() else text[at:]


def expression_before(text: str) -> str:
    """Return the longest chain of names, attributes, items and calls at the end of `text`; "" if there is none."""
    at = end = len(text.rstrip())
    while at:
        if text[at - 1] in ")]":
            opened = _opening(text, at - 1)
            if opened is None:
                return ""
            at = opened
            continue
        if text[at - 1] in "'\"" and at == end:
            return ""
        word = word_before(text[:at])
        if not word or (word in KEYWORDS and at != end):
            break
        at -= len(word)
        before = text[:at].rstrip()
        if not before.endswith("."):
            break
        at = len(before) - 1
    return text[at:end].strip()


def _opening(text: str, closing: int) -> int | None:
    """Return the position of the bracket that the one at `closing` matches."""
    depth = 0
    for at in range(closing, max(-1, closing - 1000), -1):
        if text[at] in ")]}":
            depth += 1
        elif text[at] in "([{":
            depth -= 1
            if not depth:
                return at
    return None


def parse(expression: str) -> ast.expr | None:
    """Return the expression's syntax tree, or None if it is invalid."""
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def import_at(text: str) -> tuple[str, str | None, str] | None:
    """Return the module, the name and the incomplete part of an import statement; None as the name means a module.

    `from torch.nn import Li` gives ("torch.nn", "", "Li"), `import torch.o` gives ("torch", None, "o").
    """
    line = text.rsplit("\n", 1)[-1]
    if match := _FROM.match(line):
        return match[1], "", match[2]
    if match := (_IMPORT.match(line) or _FROM_WHERE.match(line)):
        package, _, begun = match[1].rpartition(".")
        return package, None, begun
    return None


def assigned_names(text: str) -> set[str]:
    """Return the names that the cell assigns, whether it has run or not."""
    return {match[1] or match[2] for match in _MADE.finditer(text)} - set(KEYWORDS)


def name_at(text: str, cursor: int) -> str:
    """Return the expression at the cursor, or else the called function: `f(1, |` gives f."""
    end = cursor
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    before = text[max(0, end - MOST_TEXT) : end]
    context = cursor_context(before)
    if context.quote is None and not context.comment and (word_before(before) or before.endswith("]")):
        return expression_before(before)
    for opened in reversed(context.brackets):
        if before[opened] == "(" and (called := expression_before(before[:opened])):
            return called
    return ""
