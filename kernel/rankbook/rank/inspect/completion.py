"""Answer completion and inspection requests about the live namespace of a rank, while its main thread runs cells.

Tab must not run user code: a property may be slow, launch a kernel on the device or start a collective. IPython's
limited evaluation does run some: `isinstance`, `getattr` and `dir` on objects and classes of the user; it computes
`10**10**10` where a user has typed it, and it rejects the attributes of a `torch.nn.Module`. IPython's inspector calls
`str`, `len` and the `repr` of default values.

So user objects never reach IPython. The expression before the cursor is resolved here, from what objects and classes
store; where only a run could tell the value, its class may be known. IPython then completes or inspects a plain copy: a
dictionary of keys, a function or a class with the same code and docstring. Of its completer, the methods that exist in
IPython 7.34, 8.20 and 9.18 are called one by one: `IPCompleter.completions` also searches files, and evaluates the
lines above the cursor. The standard `inspect.getattr_static` is no help: it runs the `__getattribute__` of metaclasses.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import keyword
import linecache
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import IPython
import numpy
import torch
from IPython.core.completer import IPCompleter
from IPython.core.oinspect import Inspector

from rankbook.ipython_compat import EVALUATION
from rankbook.protocol.queries import (
    Answer,
    Completion,
    CompletionsReply,
    GetCompletions,
    GetInspection,
    Hint,
    InspectionReply,
)
from rankbook.rank.inspect.tensor_introspection import (
    GilYield,
    format_info,
    instance_dict,
    is_a,
    items,
    loaded_class,
    preview_value,
)
from rankbook.transport.serialization import cell_number

MAX_COMPLETIONS = 2000
"""Maximum number of completions in a reply."""
_MAX_CODE = 20_000
"""Maximum characters before the cursor that are read."""
_MAX_EXPRESSION = 2000
_MAX_SECTION = 20_000
"""Maximum characters of a docstring or of source code."""
_SIGNATURE_OF_C_TYPE = re.compile(r"\A\w+\(.*\)\n--\n\n")
"""Matches the signature that Python leaves out of the docstring of a class written in C when `__doc__` is read."""

_LEXEME = re.compile(
    r"""(?P<comment>\#[^\n]*) | (?P<bracket>[()\[\]{}])
    | (?P<triple>'{3}|"{3}) (?:\\.|(?!(?P=triple)).)* (?P<end3>(?P=triple))?
    | (?P<single>['"])      (?:\\.|(?!(?P=single))[^\n])* (?P<end1>(?P=single))?""",
    re.DOTALL | re.VERBOSE,
)
"""A comment, a bracket or a string; a string that is not closed has neither `end3` nor `end1`."""
# Possessive quantifiers (Python 3.11) keep the search fast: nothing that was matched is tried again in another way.
_CHAIN = re.compile(r"(?<![\w.)])(?:[^\W\d]\w*+|\))\)*+(?:\s*+\.\s*+[^\W\d]\w*+\)*+)*+\s*+\Z")
"""Names with closed pairs of brackets, joined by dots, at the end of `CodeBeforeCursor.skeleton`."""
# The beginning of an import statement up to the cursor: "from torch.nn import Lin" has the package "torch.nn" and the
# name "Lin", "import torch.n" the module "torch.n".
_IMPORT = re.compile(
    r"\s*(?:from\s+(?P<package>[\w.]+)\s+import\s+\(?(?:.*,\s*)?(?P<name>\w*)"
    r"|(?:from\s+|import\s+(?:.*,\s*)?)(?P<module>[\w.]*))"
)
# Names that a cell binds, as far as lines show it: `def f`, `import numpy as np`, `for x in`, `x = 1`, `x: int = 1`. A
# name too many does no harm in a list of completions.
_ASSIGNED = re.compile(
    r"\b(?:def|class|as|for|import)\s+([^\W\d]\w*)|^[ \t]*([^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE
)

# Reading one of these may launch a kernel or copy memory, so only its type is used.
_TENSOR_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("T", "mT", "H", "mH", "data", "grad", "real", "imag"), torch.Tensor),
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
}
"""Attributes that torch computes on access, with their types."""
_ROUTINES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType)
_METHODS = (*_ROUTINES, types.WrapperDescriptorType, types.ClassMethodDescriptorType, classmethod, staticmethod)
_PROPERTIES = (property, types.GetSetDescriptorType, types.MemberDescriptorType)
_PLAIN = {int, float, complex, bool, str, bytes, type(None), type(...)}
"""Types whose `repr` is not user code; a subclass may have its own."""
_MISSING = object()


class CompletionSource(Protocol):
    """Interface of the main thread's namespace. Any thread."""

    def namespace(self) -> dict[str, object]:
        """Return a copy of the variables."""

    def hidden(self) -> Collection[str]:
        """Return the names that were defined before any cell."""


class CompletionHandler:
    """Answers completion and inspection requests for `rank`, on one thread."""

    def __init__(self, main_thread: CompletionSource, rank: int) -> None:
        self._main_thread = main_thread
        self._rank = rank
        # Jedi analyses source code. Here the objects themselves are known.
        # The options of the constructor differ between versions of IPython, see `ipython_compat.EVALUATION`.
        self._completer = IPCompleter(namespace={}, use_jedi=False, **EVALUATION)
        self._inspector = Inspector(
            **{"theme_name": "nocolor"} if IPython.version_info >= (9,) else {"scheme": "NoColor"}
        )
        self._top_level_modules: list[str] = []

    def cheap_answer(self, _question: Hint) -> None:
        """Return None: every request reads the user's objects and is answered on the query thread."""

    def answer(self, question: Hint) -> Answer:
        """Answer a request; finding nothing is an answer as well."""
        if isinstance(question, GetInspection):
            return InspectionReply(question.token, self._inspect(question))
        text = question.text[: question.cursor]
        prefix, types_by_name = self._complete(question, CodeBeforeCursor(text[-_MAX_CODE:]))
        self._completer.namespace = {}  # or it would keep the defaults of a function alive
        # Names with an underscore are shown to those who have typed one.
        names = [name for name in types_by_name if prefix.startswith("_") or not name.startswith("_")]
        names.sort(key=lambda name: (name.startswith("_"), name.lower()))
        completions = tuple(Completion(name, types_by_name[name]) for name in names[:MAX_COMPLETIONS])
        return CompletionsReply(question.token, len(text) - len(prefix), completions)

    def _complete(self, question: GetCompletions, code: CodeBeforeCursor) -> tuple[str, dict[str, str]]:
        """Return the incomplete name before the cursor, and the possible names with their types."""
        namespace = self._main_thread.namespace()
        other: dict[str, str] = {}
        # What is completed, in the order of these branches:
        #
        #     %distributed pull lo|     only variables of the user, for the notebook's magics
        #     # a comment|              nothing
        #     batch["inp|               keys of a mapping
        #     from torch import nn|     modules and their names
        #     model.fc|                 attributes
        #     los|                      names, keywords, and parameters of the function that is called
        if question.variables:
            members: dict[str, Any] = {name: namespace[name] for name in namespace.keys() - self._main_thread.hidden()}
        elif code.state == "comment":
            return "", {}
        elif code.state == "string":
            return self._complete_key(code, namespace)
        elif (statement := _IMPORT.fullmatch(code.text.rsplit("\n", 1)[-1])) is not None:
            return self._complete_import(statement)
        elif code.before_name.endswith("."):
            members = list_members(resolve_expression(code.expression_before(len(code.before_name) - 1), namespace))
        else:
            # Names that the incomplete cell assigns are completed as well, although they do not exist yet.
            assigned = {first or second for first, second in _ASSIGNED.findall(code.text)}
            members = {**vars(builtins), **dict.fromkeys(assigned), **namespace}
            other = {**dict.fromkeys(keyword.kwlist, "keyword"), **self._complete_parameter(code, namespace)}
        types_by_name = {name: _completion_type(value) for name, value in members.items()} | other
        names = [name for name in types_by_name if type(name) is str and name.startswith(code.prefix)]
        return code.prefix, {name: types_by_name[name] for name in names}

    def _complete_key(self, code: CodeBeforeCursor, namespace: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """Complete `mapping["be|` from the mapping's keys."""
        if not code.opened or not re.fullmatch(r'\[\s*"+', code.skeleton[code.opened[-1] :]):
            return "", {}  # no other text reaches IPython, which would evaluate `10**10**10, "be|`
        subscript = code.text[code.opened[-1] :]
        # IPython decides what a key's prefix is: it knows quotes, escapes and tuples of keys.
        prefix: str = self._completer.splitter.split_line(subscript)
        mapping = resolve_expression(code.expression_before(code.opened[-1]), namespace)
        # A plain dict with the same keys, because IPython looks into what it is given.
        self._set_completer_input(dict.fromkeys(mapping_keys(mapping)), subscript)
        return prefix, dict.fromkeys(self._completer.dict_key_matches(prefix), "instance")

    def _complete_parameter(self, code: CodeBeforeCursor, namespace: Mapping[str, Any]) -> dict[str, str]:
        """Complete `function(pa|` as `parameter=`."""
        # Closed brackets become blanks, so that IPython's own reading of the call is not led astray by what is in them.
        call = code.skeleton[code.opened[-1] :].replace(")", " ") if code.opened else ""
        if not call.startswith("(") or not code.before_name.endswith(("(", ",")):
            return {}
        function = resolve_expression(code.expression_before(code.opened[-1]), namespace)
        if not _is_routine(function.value):
            function = _attribute(function, "__call__")
        self._set_completer_input(None if function.value is _MISSING else _copy_for_ipython(function), call)
        return dict.fromkeys(self._completer.python_func_kw_matches(code.prefix), "param")

    def _set_completer_input(self, value: object, code: str) -> None:
        """Have IPython complete `_` followed by `code`, with `_` as the name of `value`."""
        self._completer.namespace = {"_": value}
        self._completer.line_buffer = self._completer.text_until_cursor = f"_{code}"

    def _complete_import(self, statement: re.Match[str]) -> tuple[str, dict[str, str]]:
        """Complete an import statement. IPython would import the package for that, and so run its code."""
        package, _, prefix = (statement["module"] or "").rpartition(".")
        if statement["package"]:
            package, prefix = statement["package"], statement["name"]
        # Made once: it reads all folders of the path.
        if not package and not self._top_level_modules:
            self._top_level_modules += (*sys.builtin_module_names, *(module.name for module in pkgutil.iter_modules()))
        # From what has been imported. A module that was not imported has no known names.
        stored = _stored_attributes(sys.modules.get(package))
        path = stored.get("__path__")
        modules = [module.name for module in pkgutil.iter_modules(path)] if is_a(path, list) else []
        types_by_name = (
            dict.fromkeys(_exported(stored), "instance")
            | {name: _completion_type(value) for name, value in stored.items()}
            if statement["package"]
            else {}
        )
        types_by_name |= dict.fromkeys(modules if package else self._top_level_modules, "module")
        return prefix, {name: kind for name, kind in types_by_name.items() if name.startswith(prefix)}

    def _inspect(self, question: GetInspection) -> str:
        """Return the description of the expression at the cursor, or "" if nothing is known of it."""
        expression = expression_at(question.text, question.cursor)
        resolved = resolve_expression(expression, self._main_thread.namespace())
        if expression is None or resolved is _UNKNOWN:
            return ""
        name, copy = ast.unparse(expression), _copy_for_ipython(resolved)
        inspected = self._inspector.info(copy, oname=name, detail_level=int(question.source))
        # The order of the sections is that of IPython's `x?`.
        sections = {"Signature": "", "Type": _type_attribute(resolved.kind, "__name__")}
        if resolved.value is _MISSING:
            sections["Value"] = "unknown until it is computed"
        elif _is_routine(resolved.value):
            if not is_class(copy) or {"__init__", "__new__"} & vars(copy).keys():
                sections["Signature"] = inspected["definition"] or inspected["init_definition"]
        elif not is_a(resolved.value, types.ModuleType):
            value = format_info(name, resolved.value, GilYield())
            sections |= {"Value": value.preview, "Shape": "" if value.shape is None else str(list(value.shape))}
            sections |= {"Dtype": value.dtype, "Device": value.device}
            sections["Size"] = "" if value.bytes is None else f"{value.bytes:,} bytes"
        # A cell has no file that could be opened; IPython would show the name of its temporary one.
        file = copy.__code__.co_filename if isinstance(copy, (types.FunctionType, types.MethodType)) else ""
        sections["File"] = "" if file.startswith("<") or cell_number(file) is not None else inspected["file"]
        source = (inspected["source"] or _class_source_in_cell(resolved)) if question.source else ""
        docstring = "" if inspected["docstring"] == "<no docstring>" else inspected["docstring"]
        sections |= {"Source": source} if source else {"Docstring": docstring}
        sections["Rank"] = str(self._rank)
        texts = [(title, text[:_MAX_SECTION]) for title, text in sections.items() if text]
        described: str = self._inspector.format_mime({"text/plain": texts})["text/plain"]
        return described


# The code before the cursor ------------------------------------------------------------------------------------------


# Example: the skeleton of `f(1)[0].x` is `f)))))).x`. The brackets keep their length, so that positions in text and
# skeleton are the same, but nothing in them is taken for a name, a dot or an operator.
class CodeBeforeCursor:
    """The lexical state at the end of `text`: open brackets, an open string or a comment, an incomplete name.

    `skeleton` is `text`, character for character, with comments as spaces, strings as quotes, and closed pairs of
    brackets with their content as closing parentheses, so that a regular expression finds a chain of attributes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = "code"
        self.opened: list[int] = []
        skeleton = list(text)
        for lexeme in _LEXEME.finditer(text):
            # The text `loss(x[0], "a)b").bac` is read lexeme by lexeme:
            #
            #     ( [       opened = [4, 6]
            #     ]         closes [: x[0] becomes x)))
            #     "a)b"     a string: """"", so that its bracket does not count
            #     )         closes (: everything from there on becomes )
            #
            # and leaves the skeleton `loss))))))))))))).bac`, in which `_CHAIN` finds the chain.
            start, end = lexeme.span()
            if not lexeme["bracket"]:
                skeleton[start:end] = (" " if lexeme["comment"] else '"') * (end - start)
                if end == len(text) and not (lexeme["end1"] or lexeme["end3"]):
                    self.state = "comment" if lexeme["comment"] else "string"
            elif lexeme[0] in "([{":
                self.opened.append(start)
            elif self.opened and text[self.opened[-1]] + lexeme[0] in {"()", "[]", "{}"}:
                # Bounded, because every enclosing pair would rewrite the whole of it again.
                start = max(self.opened.pop(), end - _MAX_EXPRESSION)
                skeleton[start:end] = ")" * (end - start)
        self.skeleton = "".join(skeleton)
        name = re.search(r"(?<!\w)[^\W\d]\w*+\Z", self.skeleton[-_MAX_EXPRESSION:])
        self.prefix = name[0] if name else ""
        self.before_name = self.skeleton.removesuffix(self.prefix).rstrip()

    def expression_before(self, end: int) -> ast.expr | None:
        """Return the chain of names, attributes, subscripts and calls that ends at `end`, if there is one."""
        chain = _CHAIN.search(self.skeleton, max(0, end - _MAX_EXPRESSION), end)
        return None if chain is None else _parse(self.text[chain.start() : end])


def _parse(text: str) -> ast.expr | None:
    try:
        # In parentheses, so that an expression may extend over several lines.
        return ast.parse(f"(\n{text}\n)", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def expression_at(text: str, cursor: int) -> ast.expr | None:
    """Return the expression at the cursor, or else the called function: `f(1, |` gives f."""
    # The name under the cursor counts to its end.
    end = cursor + len(re.split(r"\W", text[cursor:], maxsplit=1)[0])
    code = CodeBeforeCursor(text[max(0, end - _MAX_CODE) : end])
    if code.state == "code" and (code.prefix or code.text.endswith("]")):
        return code.expression_before(len(code.text))
    calls = (code.expression_before(opened) for opened in reversed(code.opened) if code.text[opened] == "(")
    return next(filter(None, calls), None)


# What objects store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """The object that an expression stands for, or, where only a run could tell the `value`, its class."""

    kind: type
    value: Any = _MISSING


_UNKNOWN = Resolved(object)


def _resolved_value(value: object) -> Resolved:
    return Resolved(type(value), value)


def resolve_expression(node: ast.expr | None, namespace: Mapping[str, Any]) -> Resolved:
    """Return the object of an expression as far as stored attributes and items tell."""
    match node:
        case ast.Name(id=name) if name in namespace or hasattr(builtins, name):
            return _resolved_value(namespace[name] if name in namespace else getattr(builtins, name))
        case ast.Attribute(value=owner, attr=name):
            return _attribute(resolve_expression(owner, namespace), name)
        case ast.Subscript(value=owner, slice=index):
            return _item(resolve_expression(owner, namespace), index)
        case ast.Call(func=function):
            # A call is not made. Its result is known to be an instance of the class, or of the class that the
            # annotation names.
            called = resolve_expression(function, namespace).value
            return Resolved(called) if is_class(called) else _return_type(called)
        case ast.List():
            return Resolved(list)
    return _UNKNOWN


def is_class(value: object) -> TypeGuard[type]:
    """Return True for a class, False for a proxy whose `__class__` says that it is one."""
    return is_a(value, type)


def _type_attribute(kind: type, name: str) -> Any:  # noqa: ANN401 - depends on the name
    """Return `kind.__mro__`, `kind.__name__` and the like, which a metaclass may compute."""
    return type.__dict__[name].__get__(kind)


def _class_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that the class and its bases store."""
    attributes: dict[str, Any] = {}
    # From the base to the class itself, which overrides.
    for base in reversed(_type_attribute(kind, "__mro__")):
        attributes.update(_type_attribute(base, "__dict__"))
    return attributes


def _stored_attributes(value: object) -> dict[str, Any]:
    """Return the attributes that the object itself stores, including the parts of a module of torch."""
    stored: dict[str, Any] = dict(items(instance_dict(value)))
    if is_a(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            stored.update(items(stored.get(group)))
    return {name: attribute for name, attribute in stored.items() if type(name) is str}


def _exported(stored: Mapping[str, Any]) -> list[str]:
    """Return the names in a module's `__all__`, which it may make only when they are used."""
    names = stored.get("__all__")
    if type(names) is not list and type(names) is not tuple:
        return []
    return [name for name in tuple(names) if type(name) is str]


def list_members(owner: Resolved) -> dict[str, Any]:
    """Return the attribute names of an object with the values stored under them."""
    if is_class(owner.value):
        return _class_attributes(owner.value)
    columns = dict.fromkeys(name for name in _columns(owner.value) if name.isidentifier())
    if owner is _UNKNOWN:
        return {}
    stored = _stored_attributes(owner.value)
    exported = dict.fromkeys(_exported(stored)) if is_a(owner.value, types.ModuleType) else {}
    return exported | _class_attributes(owner.kind) | stored | columns


def mapping_keys(mapping: Resolved) -> list[str]:
    """Return the keys that a mapping stores, as far as they are strings."""
    modules = instance_dict(mapping.value).get("_modules") if is_a(mapping.value, torch.nn.ModuleDict) else None
    return [key for key, _ in items(modules or mapping.value) if type(key) is str] or _columns(mapping.value)


def _columns(value: object) -> list[str]:
    """Return the column names of a DataFrame that are strings."""
    kind = loaded_class("pandas", "DataFrame")
    axes = getattr(instance_dict(value).get("_mgr"), "axes", None) if kind and is_a(value, kind) else None
    return [column for column in axes[0] if type(column) is str] if axes else []


def _attribute(owner: Resolved, name: str) -> Resolved:
    value, kind = owner.value, owner.kind
    # The order is that of Python's attribute lookup: data descriptors of the class, the instance's own attributes, then
    # the rest of the class.
    attribute = _class_attributes(value if is_class(value) else kind).get(name, _MISSING)
    if not is_class(value):
        if issubclass(kind, torch.Tensor) and name in _TENSOR_ATTRIBUTES:
            return Resolved(_TENSOR_ATTRIBUTES[name])
        # A property is not read. If its getter is annotated with a class, the completion knows that class.
        if type(attribute) is property:
            return _return_type(attribute.fget)
        # Members in C and slots only read memory: `array.shape`, or an attribute that is declared in `__slots__`.
        in_array = kind is numpy.ndarray and is_a(attribute, types.GetSetDescriptorType)
        if value is not _MISSING and (in_array or is_a(attribute, types.MemberDescriptorType)):
            try:
                return _resolved_value(attribute.__get__(value, kind))
            except AttributeError:  # an empty slot
                return _UNKNOWN
        stored = _stored_attributes(value)
        if name in stored:
            return _resolved_value(stored[name])
        if type(attribute) is functools.cached_property:
            return _return_type(attribute.func)
        if type(attribute) is types.FunctionType and value is not _MISSING:
            return _resolved_value(types.MethodType(attribute, value))
        if type(attribute) is classmethod:
            return _resolved_value(types.MethodType(attribute.__func__, kind))
        if attribute is _MISSING and is_a(value, types.ModuleType):
            attribute = sys.modules.get(f"{stored.get('__name__')}.{name}", _MISSING)
        is_method = issubclass(type(attribute), _METHODS) or is_class(attribute)
        if not is_method and "__get__" in _class_attributes(type(attribute)):
            return _UNKNOWN  # a descriptor, which may run user code
    if type(attribute) in {staticmethod, classmethod}:
        attribute = attribute.__func__
    return _UNKNOWN if attribute is _MISSING else _resolved_value(attribute)


def _item(owner: Resolved, index: ast.expr) -> Resolved:
    value, kind = owner.value, owner.kind
    if issubclass(kind, (torch.Tensor, numpy.ndarray)):
        return Resolved(kind)
    try:
        key = ast.literal_eval(index)
        if is_a(value, torch.nn.Module):
            children = dict(items(instance_dict(value).get("_modules")))
            value = list(children.values()) if type(key) is int else children
        if is_a(value, dict):
            stored = dict.get(value, key, _MISSING)  # dict.__getitem__ would call `__missing__`
            return _UNKNOWN if stored is _MISSING else _resolved_value(stored)
        sequence = next(kind for kind in (list, tuple, str) if is_a(value, kind))
        return _resolved_value(sequence.__getitem__(value, key))
    except (ValueError, TypeError, SyntaxError, LookupError, MemoryError, RecursionError, StopIteration):
        return _UNKNOWN  # no literal, no such item or no container


def _return_type(function: Any) -> Resolved:  # noqa: ANN401 - any object
    """Return the class that the function's annotation names."""
    function = _undecorated(function.__func__ if is_a(function, types.MethodType) else function)
    annotation = function.__annotations__.get("return") if type(function) is types.FunctionType else None
    if type(annotation) is str:
        annotation = resolve_expression(_parse(annotation), function.__globals__).value
    return Resolved(annotation) if is_class(annotation) else _UNKNOWN


def _undecorated(function: Any) -> Any:  # noqa: ANN401 - any object
    """Return the function inside decorators that use `functools.wraps`."""
    # The innermost one: its signature is what a user has written.
    for _ in range(20):  # a function may wrap itself
        inner = vars(function).get("__wrapped__") if type(function) is types.FunctionType else None
        function = inner if type(inner) is types.FunctionType else function
    return function


def _is_routine(value: object) -> bool:
    return is_class(value) or issubclass(type(value), _ROUTINES)


def _completion_type(value: object) -> str:
    """Return the type of a completion, one of those that front ends have icons for."""
    if is_class(value):
        return "class"
    names: dict[Any, str] = {types.ModuleType: "module", _METHODS: "function", _PROPERTIES: "property"}
    return next((name for kinds, name in names.items() if issubclass(type(value), kinds)), "instance")


# Copies for IPython --------------------------------------------------------------------------------------------------


def _copy_for_ipython(resolved: Resolved) -> Any:  # noqa: ANN401 - a routine, a class or a module
    """Return an object with the same code, docstring and signature, none of whose attributes runs user code."""
    value = resolved.value
    function = _undecorated(value.__func__ if is_a(value, types.MethodType) else value)
    if type(function) is types.FunctionType:
        copy = _copy_function(function)
        return types.MethodType(copy, copy) if is_a(value, types.MethodType) else copy
    if is_a(value, types.ModuleType):
        stored = {name: text for name, text in _stored_attributes(value).items() if type(text) is str}
        module = types.ModuleType("module", stored.get("__doc__"))
        module.__file__ = stored.get("__file__")
        return module
    if _is_routine(value) and not is_class(value):
        return value  # implemented in C
    kind = value if is_class(value) else resolved.kind
    attributes = {name: _type_attribute(kind, name) for name in ("__module__", "__qualname__")}
    docs = (_type_attribute(base, "__dict__").get("__doc__") for base in _type_attribute(kind, "__mro__")[:-1])
    doc = next((doc for doc in docs if type(doc) is str), None)
    attributes["__doc__"] = None if doc is None else _SIGNATURE_OF_C_TYPE.sub("", doc, count=1)
    attributes["__firstlineno__"] = _type_attribute(kind, "__dict__").get(
        "__firstlineno__"
    )  # for Python 3.13 and later
    # IPython shows the signature of a class by way of its constructor, which is copied without its code's globals.
    for name in ("__init__", "__new__"):
        constructor = _undecorated(_attribute(_resolved_value(kind), name).value)
        if type(constructor) is types.FunctionType:
            attributes[name] = _copy_function(constructor)
            attributes[name].__annotations__.pop("return", None)
    return type(_type_attribute(kind, "__name__"), (), attributes)


def _copy_function(function: types.FunctionType) -> types.FunctionType:
    """Copy a function with texts for its defaults and annotations, and without the attributes set by decorators."""
    defaults = tuple(map(_text, function.__defaults__ or ()))
    # Empty globals: the copy is never called.
    copy = types.FunctionType(function.__code__, {}, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__ = {name: _text(value) for name, value in (function.__kwdefaults__ or {}).items()}
    copy.__annotations__ = {
        name: _Text(value) if type(value) is str else _text(value) for name, value in function.__annotations__.items()
    }
    copy.__doc__ = function.__doc__ if type(function.__doc__) is str else None
    return copy


class _Text(str):
    """A text in place of a default or an annotation whose own `__repr__` may be user code."""

    __slots__ = ()
    # `inspect.signature` formats defaults by `repr`, which would add quotes.
    __repr__ = str.__str__


def _text(value: Any) -> _Text:  # noqa: ANN401 - any object
    if is_class(value):
        return _Text(_type_attribute(value, "__name__"))
    if type(value) in _PLAIN:
        return _Text(preview_value(value))
    return _Text(
        inspect.formatannotation(value) if _is_plain(value) else f"<{_type_attribute(type(value), '__name__')}>"
    )


def _is_plain(value: Any) -> bool:  # noqa: ANN401 - any object
    """Return True for an annotation of the typing module around plain values and classes without tricks."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    if _type_attribute(type(value), "__module__") in {"typing", "types"}:
        return all(_is_plain(getattr(value, name, ())) for name in ("__origin__", "__metadata__", "__args__"))
    if is_class(value):
        return _class_attributes(type(value))["__getattribute__"] is type.__dict__["__getattribute__"]
    return type(value) in _PLAIN


def _class_source_in_cell(resolved: Resolved) -> str:
    """Return the source of a class that was defined in a cell, by way of its methods: a class knows no file there."""
    kind = resolved.value if is_class(resolved.value) else resolved.kind
    header = re.compile(rf"\s*class\s+{re.escape(_type_attribute(kind, '__name__'))}\b")
    # A class does not know its lines before Python 3.13, but its methods do.
    for method in _type_attribute(kind, "__dict__").values():
        if type(method) is types.FunctionType:
            lines = linecache.getlines(method.__code__.co_filename)
            for number in reversed(range(len(lines[: method.__code__.co_firstlineno]))):
                if header.match(lines[number]):
                    return textwrap.dedent("".join(inspect.getblock(lines[number:])))
    return ""
