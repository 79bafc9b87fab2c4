"""Descriptions of objects for `x?`, `x??` and Shift-Tab, and the list of a rank's variables.

No repr, property or computed docstring runs: all information is read from stored attributes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

from rankbook.formatting import plural
from rankbook.protocol.telemetry import Variable
from rankbook.rank.inspect import (
    safe_introspection,
    tensor_introspection,
)
from rankbook.rank.inspect.safe_introspection import KnownType, KnownValue
from rankbook.rank.inspect.tensor_introspection import GilYield, is_a
from rankbook.transport.cell_sources import cell_number

_LONGEST = 20_000
"""Maximum characters of a docstring or a source."""
_LINE = 100


def describe_object(name: str, found: KnownValue | KnownType, rank: int, *, source: bool) -> str:
    """Return the description of an object; with `source`, the source replaces the docstring if available."""
    if isinstance(found, KnownType):
        sections = {"Type": found.kind.__name__, "Value": "not known without computing it"}
        return _text({**sections, "Docstring": _docstring(found.kind), "Rank": str(rank)})
    value = found.value
    called = _callable(value)
    sections = {"Signature": _signature(name, value) if called else ""}
    sections["Type"] = type(value).__name__
    if not called and not is_a(value, types.ModuleType):
        sections.update(_value(name, value))
    sections["File"] = _file(value)
    text = _source(value) if source else ""
    sections["Source" if text else "Docstring"] = text or _docstring(value)
    sections["Rank"] = str(rank)
    return _text(sections)


def _text(sections: dict[str, str]) -> str:
    width = max(map(len, sections)) + 2
    lines = []
    for title, text in sections.items():
        if "\n" in text:
            lines.append(f"{title}:\n{text[:_LONGEST].rstrip()}\n")
        elif text:
            lines.append(f"{title + ':':{width}}{text}")
    return "\n".join(lines)


def _callable(value: object) -> bool:
    return safe_introspection.is_class(value) or is_a(
        value,
        types.FunctionType | types.MethodType | types.BuiltinFunctionType | types.MethodDescriptorType,  # type: ignore[arg-type]
    )


def _value(name: str, value: object) -> dict[str, str]:
    variable = format_info(name, value, GilYield())
    shape = "" if variable.shape is None else str(list(variable.shape))
    size = "" if variable.bytes is None else f"{variable.bytes:,} bytes"
    return {"Value": variable.preview, "Shape": shape, "Dtype": variable.dtype, "Device": variable.device, "Size": size}


class _Shown:
    """Text in place of a default value or an annotation, whose own repr may be user code."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, value: Any) -> str:  # noqa: ANN401 - any callable
    function, bound = value, False
    if safe_introspection.is_class(value):
        function, bound = _maker(value), True
    if is_a(function, types.MethodType):
        function, bound = function.__func__, True
    function = safe_introspection.unwrap_object(function)
    try:
        if type(function) is types.FunctionType:
            plain = types.FunctionType(
                function.__code__, {}, function.__name__, function.__defaults__, function.__closure__
            )  # without attributes of decorators such as __signature__, which may run user code
            plain.__kwdefaults__ = function.__kwdefaults__
            plain.__annotations__ = dict(function.__annotations__)
            signature = inspect.signature(plain)
        elif is_a(function, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):  # type: ignore[arg-type]
            signature, bound = inspect.signature(function), bound and not safe_introspection.is_class(value)
        else:
            return ""
    except (ValueError, TypeError):  # a C function without a signature
        return ""
    parameters = [_tamed(parameter) for parameter in signature.parameters.values()][1 if bound else 0 :]
    returns = (
        _stated(signature.return_annotation) if not safe_introspection.is_class(value) else inspect.Signature.empty
    )
    try:
        text = str(inspect.Signature(parameters, return_annotation=returns))
    except ValueError:
        return ""
    if len(name) + len(text) > _LINE:
        text = "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")"
    return name + text


def _maker(kind: type) -> object:
    for name in ("__init__", "__new__"):
        try:
            method = safe_introspection.class_attribute(kind, name)
        except KeyError:
            continue
        method = method.__func__ if type(method) is staticmethod else method
        if type(method) is types.FunctionType:
            return method
    return None


def _tamed(parameter: inspect.Parameter) -> inspect.Parameter:
    default, annotation = parameter.default, _stated(parameter.annotation)
    if default is not inspect.Parameter.empty:
        default = _Shown(preview_value(default) if _is_plain(default) else _name_of(default))
    return parameter.replace(default=default, annotation=annotation)


def _is_plain(value: object) -> bool:
    return type(value) in {int, float, complex, bool, str, bytes, type(None)}


def _name_of(value: object) -> str:
    if safe_introspection.is_class(value) or isinstance(value, types.FunctionType):
        return value.__name__
    return f"<{type(value).__name__}>"


def _stated(annotation: Any) -> Any:  # noqa: ANN401 - any annotation
    if annotation is inspect.Parameter.empty:
        return annotation
    if type(annotation) is str:
        return _Shown(annotation)
    known = type(annotation).__module__ in {"typing", "types", "builtins"}
    return _Shown(inspect.formatannotation(annotation)) if known else _Shown(_name_of(annotation))


def _docstring(value: object) -> str:
    docstring: object = None
    if safe_introspection.is_class(value):
        docstring = next((doc for doc in _docs_of(value) if type(doc) is str), None)
    elif _callable(value) or is_a(value, types.ModuleType):
        docstring = value.__doc__
    else:
        docstring = safe_introspection.instance_attribute(value).get("__doc__") or next(
            (doc for doc in _docs_of(type(value)) if type(doc) is str), None
        )
    return inspect.cleandoc(docstring) if type(docstring) is str else ""


def _docs_of(kind: type) -> list[object]:
    return [
        safe_introspection.class_dict(base).get("__doc__")
        for base in safe_introspection.mro(kind)
        if base is not object
    ]


def _code_of(value: Any) -> Any:  # noqa: ANN401 - any object
    """Return the object whose source Python can find: a function, class or module, or the class of an instance."""
    while True:
        if is_a(value, types.MethodType):
            value = value.__func__
        elif is_a(value, functools.partial):
            value = value.func
        else:
            break
    value = safe_introspection.unwrap_object(value)
    if type(value) is types.FunctionType or safe_introspection.is_class(value) or is_a(value, types.ModuleType):
        return value
    return None if is_a(value, types.BuiltinFunctionType | types.MethodDescriptorType) else type(value)  # type: ignore[arg-type]


def _is_strange(code: object) -> bool:
    """Return True for a class whose metaclass defines `__getattribute__`."""
    kinds: list[type] = (
        []
        if not safe_introspection.is_class(code)
        else [kind for kind in safe_introspection.mro(type(code)) if kind is not type]
    )
    return any("__getattribute__" in safe_introspection.class_dict(kind) for kind in kinds if kind is not object)


def _file(value: object) -> str:
    code = _code_of(value)
    if code is None or _is_strange(code):
        return ""
    try:
        file = inspect.getfile(code)
    except (TypeError, OSError):  # defined in C or in a cell
        return ""
    return "" if file.startswith("<") or cell_number(file) is not None else file


def _source(value: object) -> str:
    code = _code_of(value)
    if code is None or _is_strange(code):
        return ""
    try:
        return inspect.getsource(code)
    except (TypeError, OSError, IndexError, SyntaxError):  # defined in C or in a cell, or not found
        return _source_in_cell(code) if safe_introspection.is_class(code) else ""


def _source_in_cell(kind: type) -> str:
    """Return the source of a class defined in a cell, found through the cell of its methods."""
    codes = [
        method.__code__ for method in safe_introspection.class_dict(kind).values() if type(method) is types.FunctionType
    ]
    for code in codes:
        lines = linecache.getlines(code.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:  # the cell contains magics
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first <= code.co_firstlineno <= (node.end_lineno or first):
                    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    return ""


MOST = 500
_LONGEST_VALUE = 80
_NO_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_SIZED = (dict, list, tuple, set, frozenset)


def list_variables(namespace: Mapping[str, object], hidden: Collection[str], breath: GilYield) -> tuple[Variable, ...]:
    """Return the variables that cells have defined, in order of definition; at most `MOST`."""
    variables: list[Variable] = []
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or issubclass(type(value), _NO_DATA):
            continue
        if len(variables) == MOST:
            break
        breath()
        variables.append(format_info(name, value, breath))
    return tuple(variables)


def format_info(name: str, value: object, breath: GilYield) -> Variable:
    """Return the description of one variable."""
    kind = type(value).__name__
    if is_a(value, torch.Tensor):
        assert isinstance(value, torch.Tensor)
        return Variable(
            name,
            kind,
            tensor_introspection.shape_of(value),
            tensor_introspection.dtype_of(value),
            tensor_introspection.device_of(value),
            tensor_introspection.nbytes(value),
            "",
        )
    if type(value) is numpy.ndarray:
        return Variable(name, kind, value.shape, str(value.dtype), "cpu", value.nbytes, "")
    if is_a(value, torch.nn.Module):
        assert isinstance(value, torch.nn.Module)
        return _tell_tensors(name, kind, list(_tensors_of(value, breath)))
    if is_a(value, torch.optim.Optimizer):
        assert isinstance(value, torch.optim.Optimizer)
        return _tell_tensors(
            name, kind, [state.tensor for state in tensor_introspection.tensors_of_optimizer(value, {}, breath)]
        )
    return Variable(name, kind, None, "", "", None, preview_value(value))


def _tensors_of(model: torch.nn.Module, breath: GilYield) -> Iterator[torch.Tensor]:
    for part in tensor_introspection.tensors_of_modules(list(tensor_introspection.modules_of(model, breath)), breath):
        yield part.tensor


def _tell_tensors(name: str, kind: str, tensors: list[torch.Tensor]) -> Variable:
    dtypes = ", ".join(sorted(set(map(tensor_introspection.dtype_of, tensors))))
    devices = ", ".join(sorted(set(map(tensor_introspection.device_of, tensors))))
    return Variable(
        name, kind, None, dtypes, devices, sum(map(tensor_introspection.nbytes, tensors)), f"{len(tensors)} tensors"
    )


def preview_value(value: object) -> str:
    """Return the repr of a short plain value, the length of a container, or ""."""
    if type(value) in _PLAIN:
        if type(value) in {str, bytes}:
            value = value[:_LONGEST_VALUE]  # type: ignore[index]
        elif type(value) is int and value.bit_length() > 256:
            return f"{value.bit_length()} bits"
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    base = next((kind for kind in _SIZED if is_a(value, kind)), None)
    if base is None:
        return ""
    return plural(base.__len__(value), "item")  # type: ignore[arg-type]
