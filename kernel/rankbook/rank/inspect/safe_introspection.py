"""Resolve expressions and list attributes without running user code.

Names, attributes and items are looked up in stored data only: no property, `__getattr__`, `__dir__` or call runs. A
value that only code could compute is unknown, or known by its class alone (from an annotation, for example).
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy
import torch

from rankbook.rank.inspect import tensor_introspection
from rankbook.rank.inspect.tensor_introspection import is_a

_dict_of_class: Any = type.__dict__["__dict__"]
_mro_of_class: Any = type.__dict__["__mro__"]
_OF_TENSORS: dict[str, type] = {
    **dict.fromkeys(("T", "mT", "H", "mH", "data", "grad", "real", "imag"), torch.Tensor),
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
}
"""Attributes that torch computes on access, with the class of their values."""
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MOST_WRAPS = 20
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class KnownValue:
    """An existing value."""

    value: Any


@dataclass(frozen=True)
class KnownType:
    """A value of which only the class is known."""

    kind: type


Found = KnownValue | KnownType | None


def is_class(value: object) -> TypeGuard[type]:
    """Return True if `value` is really a class, whatever its `__class__` claims."""
    return is_a(value, type)


def mro(kind: type) -> tuple[type, ...]:
    """Return the class and its bases."""
    return tuple(_mro_of_class.__get__(kind))


def class_dict(kind: type) -> Mapping[str, Any]:
    """Return the class's own attributes."""
    found: Mapping[str, Any] = _dict_of_class.__get__(kind)
    return found


def class_attribute(kind: type, name: str) -> Any:  # noqa: ANN401 - any class attribute
    """Return a class attribute unbound, from the class or its bases. Raises KeyError."""
    for base in mro(kind):
        attributes = class_dict(base)
        if name in attributes:
            return attributes[name]
    raise KeyError(name)


def instance_attribute(value: object) -> dict[str, Any]:
    """Return the instance's own attributes, including the parts of a module."""
    if is_a(value, types.ModuleType):
        return dict.copy(types.ModuleType.__getattribute__(value, "__dict__"))
    attributes: dict[str, Any] = dict(tensor_introspection.items(tensor_introspection.instance_dict(value)))
    if is_a(value, torch.nn.Module):
        for kind in _MODULE_PARTS:
            attributes.update(
                (name, part) for name, part in tensor_introspection.items(attributes.get(kind)) if is_a(name, str)
            )
    return attributes


def data_frame_columns(value: object) -> list[str]:
    """Return the string column names of a pandas DataFrame."""
    kind = tensor_introspection.loaded_class("pandas", "DataFrame")
    if kind is None or not is_a(value, kind):
        return []
    axes = getattr(tensor_introspection.instance_dict(value).get("_mgr"), "axes", None)
    return [column for column in axes[0] if type(column) is str] if axes else []


def list_members(found: KnownValue | KnownType) -> dict[str, Any]:
    """Return the names that can follow the dot, with the stored values."""
    value = found.value if isinstance(found, KnownValue) else None
    members: dict[str, Any] = {}
    kind = found.kind if isinstance(found, KnownType) else type(value)
    of = value if is_class(value) else kind
    for base in reversed(mro(of)):
        members.update(class_dict(base))
    if isinstance(found, KnownValue) and not is_class(value):
        members.update(instance_attribute(value))
        members.update((column, None) for column in data_frame_columns(value) if column.isidentifier())
    return {name: member for name, member in members.items() if type(name) is str}


def keys_of(found: Found) -> list[str]:
    """Return the string keys of a mapping that stores them."""
    if not isinstance(found, KnownValue):
        return []
    value = found.value
    if is_a(value, torch.nn.ModuleDict):
        value = tensor_introspection.instance_dict(value).get("_modules")
    return [key for key, _ in tensor_introspection.items(value) if type(key) is str] or data_frame_columns(value)


def unwrap_object(function: Any) -> Any:  # noqa: ANN401 - any callable
    """Return the function that decorators wrap, if they use functools.wraps."""
    for _ in range(_MOST_WRAPS):
        inner = (
            tensor_introspection.instance_dict(function).get("__wrapped__")
            if type(function) is types.FunctionType
            else None
        )
        if type(inner) is not types.FunctionType:
            break
        function = inner
    return function


def resolve_expression(node: ast.expr | None, namespace: Mapping[str, Any]) -> Found:
    """Return the value or class of the expression, or None if unknown."""
    match node:
        case ast.Name(id=name):
            if name in namespace:
                return KnownValue(namespace[name])
            return KnownValue(getattr(builtins, name)) if hasattr(builtins, name) else None
        case ast.Constant(value=value):
            return KnownValue(value)
        case ast.Attribute(value=of, attr=name):
            return _attribute(resolve_expression(of, namespace), name)
        case ast.Subscript(value=of, slice=index):
            return _item(resolve_expression(of, namespace), index)
        case ast.Call(func=called):
            return _result(resolve_expression(called, namespace))
        case ast.List() | ast.Dict() | ast.Set() | ast.Tuple() | ast.JoinedStr():
            kinds = {ast.List: list, ast.Dict: dict, ast.Set: set, ast.Tuple: tuple, ast.JoinedStr: str}
            return KnownType(kinds[type(node)])
    return None


def _attribute(of: Found, name: str) -> Found:
    if isinstance(of, KnownType):
        try:
            stored = class_attribute(of.kind, name)
        except KeyError:
            return None
        return _class_of_property(of.kind, name, stored) or (None if _computes(stored) else KnownValue(_plain(stored)))
    if of is None:
        return None
    value = of.value
    if is_a(value, types.ModuleType):
        members = instance_attribute(value)
        below = sys.modules.get(f"{members.get('__name__')}.{name}")
        return KnownValue(members[name]) if name in members else None if below is None else KnownValue(below)
    try:
        stored = class_attribute(value if is_class(value) else type(value), name)
    except KeyError:
        attributes = instance_attribute(value)
        return KnownValue(attributes[name]) if name in attributes else None
    if is_class(value):
        return KnownValue(_plain(stored))
    return _bound(value, name, stored)


def _bound(value: object, name: str, stored: Any) -> Found:  # noqa: ANN401 - any class attribute
    # The order of object.__getattribute__: data descriptors, the instance's own attributes, then the class attribute,
    # bound if it is a function. Only descriptors implemented in C are called.
    kind = type(value)
    if (known_type := _class_of_property(kind, name, stored)) is not None:
        return known_type
    if is_a(stored, types.MemberDescriptorType):  # a slot
        try:
            return KnownValue(stored.__get__(value, kind))
        except AttributeError:
            return None
    if is_a(stored, types.GetSetDescriptorType):
        return KnownValue(stored.__get__(value, kind)) if kind is numpy.ndarray else None
    attributes = instance_attribute(value)
    if name in attributes:
        return KnownValue(attributes[name])
    if type(stored) is types.FunctionType:
        return KnownValue(types.MethodType(stored, value))
    if type(stored) is classmethod:
        return KnownValue(types.MethodType(stored.__func__, kind))
    return None if _computes(stored) else KnownValue(_plain(stored))


def _class_of_property(kind: type, name: str, stored: object) -> KnownType | None:
    """Return the class of a computed attribute, if the code states it."""
    if issubclass(kind, torch.Tensor) and name in _OF_TENSORS:
        return KnownType(_OF_TENSORS[name])
    if type(stored) is property:
        return _annotated(stored.fget)
    if type(stored) is functools.cached_property:
        return _annotated(stored.func)
    return None


def _computes(stored: object) -> bool:
    """Return True if accessing the attribute would run code."""
    if type(stored) in {types.FunctionType, staticmethod, classmethod} or is_a(stored, _BUILTIN):  # type: ignore[arg-type]
        return False
    return not is_class(stored) and any("__get__" in class_dict(base) for base in mro(type(stored)))


def _plain(stored: Any) -> Any:  # noqa: ANN401 - any class attribute
    return stored.__func__ if type(stored) in {staticmethod, classmethod} else stored


def _item(of: Found, index: ast.expr) -> Found:
    kind = of.kind if isinstance(of, KnownType) else type(of.value) if of is not None else type(None)
    if issubclass(kind, (torch.Tensor, numpy.ndarray)):
        return KnownType(kind)
    try:
        key = ast.literal_eval(index)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(of, KnownValue) or type(key) not in {int, str}:
        return None
    value = of.value
    if is_a(value, torch.nn.Module):
        inside = dict(tensor_introspection.items(tensor_introspection.instance_dict(value).get("_modules")))
        value = list(inside.values()) if type(key) is int else inside
    try:
        if is_a(value, list):
            return KnownValue(list.__getitem__(value, key))
        if is_a(value, tuple):
            return KnownValue(tuple.__getitem__(value, key))
        if type(value) in {dict, str} or is_a(value, dict):
            return KnownValue(dict.__getitem__(value, key)) if is_a(value, dict) else KnownType(str)
    except (LookupError, TypeError):
        return None
    return None


def _result(called: Found) -> Found:
    """Return the class of a call's result, if it is known without the call."""
    if not isinstance(called, KnownValue):
        return None
    value = called.value
    if is_class(value):
        return KnownType(value)
    if is_a(value, types.MethodType):
        value = value.__func__
    return _annotated(value)


def _annotated(function: object) -> KnownType | None:
    """Return the class in the function's return annotation."""
    function = unwrap_object(function)
    if type(function) is not types.FunctionType:
        return None
    stated = function.__annotations__.get("return")
    if type(stated) is str:
        annotation = resolve_expression(_parse(stated), function.__globals__)
        stated = annotation.value if isinstance(annotation, KnownValue) else None
    return KnownType(stated) if is_class(stated) else None


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
